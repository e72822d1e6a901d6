package grpc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	_ "google.golang.org/protobuf/types/known/anypb" // types that descriptors may import without bringing them
	_ "google.golang.org/protobuf/types/known/durationpb"
	_ "google.golang.org/protobuf/types/known/emptypb"
	_ "google.golang.org/protobuf/types/known/fieldmaskpb"
	_ "google.golang.org/protobuf/types/known/structpb"
	_ "google.golang.org/protobuf/types/known/timestamppb"
	_ "google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// maxDescriptorBytes limits the descriptors of a method, which come from a server or a file.
	maxDescriptorBytes = 4 << 20
	// maxDescriptorFiles limits their files.
	maxDescriptorFiles = 1000
	// maxNameBytes limits a name, maxScopeBytes the full name of the package or message that contains it, and
	// maxNamesBytes all full names.
	maxNameBytes  = 200
	maxScopeBytes = 1000
	maxNamesBytes = 64 << 20
	// maxPublicPaths limits the paths of public imports.
	maxPublicPaths = 100_000
	// wellKnown is the package whose messages have JSON forms of their own. protojson relies on their fields, so its
	// own definitions are used.
	wellKnown = "google.protobuf"
)

// Method is a unary method. The request of the zero Method is empty, and its answer is not read.
type Method struct {
	input, output protoreflect.MessageDescriptor
	types         *dynamicpb.Types
}

// MethodOf returns a target's method as a file of descriptors defines it: a FileDescriptorSet with imports.
func MethodOf(target *Target, set []byte) (*Method, error) {
	protos, err := protosOf(set)
	if err != nil {
		return nil, err
	}
	return methodOf(target, protos)
}

// MessageOf returns the message of a name as a file of descriptors defines it: a FileDescriptorSet with imports.
func MessageOf(name string, set []byte) (of protoreflect.MessageDescriptor, err error) {
	defer func() {
		if p := recover(); p != nil { // protodesc panics on some invalid descriptors
			err = fmt.Errorf("descriptors: %v", background.Panicked(p).Value)
		}
	}()
	protos, err := protosOf(set)
	if err != nil {
		return nil, err
	}
	files, err := filesOf(protos)
	if err != nil {
		return nil, err
	}
	found, err := files.FindDescriptorByName(protoreflect.FullName(name))
	of, isMessage := found.(protoreflect.MessageDescriptor)
	if err != nil || !isMessage {
		return nil, fmt.Errorf("the descriptors have no message %s", name)
	}
	return of, nil
}

func protosOf(set []byte) ([]*descriptorpb.FileDescriptorProto, error) {
	if len(set) > maxDescriptorBytes {
		return nil, fmt.Errorf("the descriptors have %d bytes; at most %d are allowed", len(set), maxDescriptorBytes)
	}
	var files descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(set, &files); err != nil {
		return nil, errors.New("must be a FileDescriptorSet (protoc --include_imports --descriptor_set_out)")
	}
	return files.GetFile(), nil
}

// filesOf links descriptors.
func filesOf(protos []*descriptorpb.FileDescriptorProto) (*protoregistry.Files, error) {
	if len(protos) > maxDescriptorFiles {
		return nil, fmt.Errorf("the descriptors have %d files; at most %d are allowed", len(protos), maxDescriptorFiles)
	}
	protos, err := withWellKnown(protos)
	if err != nil {
		return nil, err
	}
	if err := checkPublicImports(protos); err != nil {
		return nil, err
	}
	files, err := protodesc.NewFiles(&descriptorpb.FileDescriptorSet{File: protos})
	if err != nil {
		return nil, fmt.Errorf("descriptors: %w", err)
	}
	return files, nil
}

func methodOf(target *Target, protos []*descriptorpb.FileDescriptorProto) (*Method, error) {
	files, err := filesOf(protos)
	if err != nil {
		return nil, err
	}
	found, err := files.FindDescriptorByName(target.Service)
	service, isService := found.(protoreflect.ServiceDescriptor)
	if err != nil || !isService {
		return nil, fmt.Errorf("the descriptors have no service %s", target.Service)
	}
	method := service.Methods().ByName(target.Method)
	switch {
	case method == nil:
		return nil, fmt.Errorf("the service %s has no method %s", target.Service, target.Method)
	case method.IsStreamingClient() || method.IsStreamingServer():
		return nil, fmt.Errorf("the method %s of %s is a stream; must be unary", target.Method, target.Service)
	}
	return &Method{input: method.Input(), output: method.Output(), types: dynamicpb.NewTypes(files)}, nil
}

// withWellKnown returns the files, with protojson's files in place of those of the package google.protobuf.
func withWellKnown(protos []*descriptorpb.FileDescriptorProto) ([]*descriptorpb.FileDescriptorProto, error) {
	out, have := []*descriptorpb.FileDescriptorProto{}, map[string]bool{}
	var own []string
	var lengths nameLengths
	for _, file := range protos {
		switch {
		case have[file.GetName()]:
			continue // sent twice
		case file.GetPackage() == wellKnown:
			own = append(own, file.GetName())
			continue
		}
		for _, message := range file.GetMessageType() {
			name := strings.TrimPrefix(file.GetPackage()+"."+message.GetName(), ".")
			// A message with the name of a package, such as google, could contain types with the full names of
			// protojson's.
			if strings.HasPrefix(wellKnown+".", name+".") { //nolint:gocritic // the order is right
				return nil, fmt.Errorf("descriptors: %s: %s is a package", file.GetName(), name)
			}
		}
		if err := lengths.checkFile(file); err != nil {
			return nil, fmt.Errorf("descriptors: %s: %w", file.GetName(), err)
		}
		have[file.GetName()], out = true, append(out, file)
		own = append(own, file.GetDependency()...)
	}
	for len(own) > 0 {
		name := own[0]
		own = own[1:]
		file, err := protoregistry.GlobalFiles.FindFileByPath(name)
		if have[name] || err != nil || file.Package() != wellKnown {
			continue // what is missing is named when the descriptors are linked
		}
		known := protodesc.ToFileDescriptorProto(file)
		have[name], out = true, append(out, known)
		own = append(own, known.GetDependency()...)
	}
	return out, nil
}

// nameLengths checks the lengths of names, which a server may choose: linking descriptors allocates each full name, and
// one or two bytes of an answer can become the name of a field or of an enum's value in JSON.
type nameLengths struct{ total int }

// add counts a name in a scope, both in bytes.
func (n *nameLengths) add(scope, name int) error {
	n.total += scope + name
	switch {
	case name > maxNameBytes:
		return fmt.Errorf("a name is longer than %d bytes", maxNameBytes)
	case scope > maxScopeBytes:
		return fmt.Errorf("a scope's name is longer than %d bytes", maxScopeBytes)
	case n.total > maxNamesBytes:
		return fmt.Errorf("full names of more than %d bytes", maxNamesBytes)
	}
	return nil
}

// check counts the names that a file or a message declares. scope is the length of the full name of the package or the
// message.
func (n *nameLengths) check(scope int, messages []*descriptorpb.DescriptorProto,
	enums []*descriptorpb.EnumDescriptorProto, fields ...*descriptorpb.FieldDescriptorProto,
) error {
	for _, field := range fields {
		if err := n.add(scope, max(len(field.GetName()), len(field.GetJsonName()))); err != nil {
			return err
		}
	}
	for _, enum := range enums {
		if err := n.add(scope, len(enum.GetName())); err != nil {
			return err
		}
		for _, value := range enum.GetValue() {
			if err := n.add(scope, len(value.GetName())); err != nil {
				return err
			}
		}
	}
	for _, message := range messages {
		name := len(message.GetName())
		if err := n.add(scope, name); err != nil {
			return err
		}
		for _, oneof := range message.GetOneofDecl() {
			if err := n.add(scope+name+1, len(oneof.GetName())); err != nil {
				return err
			}
		}
		if err := n.check(scope+name+1, message.GetNestedType(), message.GetEnumType(),
			slices.Concat(message.GetField(), message.GetExtension())...); err != nil {
			return err
		}
	}
	return nil
}

// checkFile counts the names of a file.
func (n *nameLengths) checkFile(file *descriptorpb.FileDescriptorProto) error {
	scope := len(file.GetPackage()) + 1
	for _, service := range file.GetService() {
		if err := n.add(scope, len(service.GetName())); err != nil {
			return err
		}
		for _, method := range service.GetMethod() {
			if err := n.add(scope+len(service.GetName())+1, len(method.GetName())); err != nil {
				return err
			}
		}
	}
	return n.check(scope, file.GetMessageType(), file.GetEnumType(), file.GetExtension()...)
}

// checkPublicImports limits the paths of public imports: protodesc follows each path, also to files that it has met.
func checkPublicImports(protos []*descriptorpb.FileDescriptorProto) error {
	files, counts := map[string]*descriptorpb.FileDescriptorProto{}, map[string]int{}
	for _, file := range protos {
		files[file.GetName()] = file
	}
	var paths func(name string) int
	paths = func(name string) int {
		count, known := counts[name]
		if known {
			return count
		}
		counts[name] = 0 // for a cycle, which is an error when the descriptors are linked
		imports := files[name].GetDependency()
		for _, i := range files[name].GetPublicDependency() {
			if i >= 0 && int(i) < len(imports) {
				count = min(count+1+paths(imports[i]), maxPublicPaths+1)
			}
		}
		counts[name] = count
		return count
	}
	total := 0
	for _, file := range protos {
		for _, name := range file.GetDependency() {
			if total += paths(name); total > maxPublicPaths {
				return fmt.Errorf("descriptors: more than %d paths of public imports", maxPublicPaths)
			}
		}
	}
	return nil
}

// MappingError is the error of a document that is not a request of a method.
type MappingError struct {
	request protoreflect.FullName
	text    string
}

// Error implements error.
func (e *MappingError) Error() string {
	return "the payload is not a " + string(e.request) + ": " + e.text
}

// Request returns the request that a JSON document describes. The document must have no field that the request lacks.
// The error is a [MappingError].
func (m *Method) Request(document []byte) ([]byte, error) {
	if m.input == nil {
		return nil, nil
	}
	request := dynamicpb.NewMessage(m.input)
	if err := (protojson.UnmarshalOptions{Resolver: m.types}).Unmarshal(document, request); err != nil {
		// protojson varies its blanks on purpose, and errors of the same cause belong to one group.
		text := strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\u00a0", " "), "proto: ")
		return nil, &MappingError{m.input.FullName(), text}
	}
	raw, err := proto.Marshal(request)
	if err != nil {
		return nil, &MappingError{m.input.FullName(), err.Error()}
	}
	return raw, nil
}

// Answer returns the JSON form of an answer, or nil if raw is not one. A field success that is false is part of it,
// although a proto3 message does not hold false.
func (m *Method) Answer(raw []byte) []byte {
	if m.output == nil {
		return nil
	}
	answer := dynamicpb.NewMessage(m.output)
	if err := (proto.UnmarshalOptions{Resolver: m.types}).Unmarshal(raw, answer); err != nil {
		return nil
	}
	marshalled, err := protojson.MarshalOptions{Resolver: m.types}.Marshal(answer)
	var document bytes.Buffer
	if err != nil || json.Compact(&document, marshalled) != nil {
		return nil
	}
	success := m.output.Fields().ByName("success")
	if success == nil || success.Kind() != protoreflect.BoolKind || success.Cardinality() == protoreflect.Repeated ||
		success.HasPresence() || answer.Get(success).Bool() {
		return document.Bytes()
	}
	rest := bytes.TrimPrefix(document.Bytes(), []byte("{"))
	if len(rest) > 1 {
		return append([]byte(`{"success":false,`), rest...)
	}
	return []byte(`{"success":false}`)
}
