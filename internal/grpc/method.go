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
	_ "google.golang.org/protobuf/types/known/anypb" // types that descriptors may import without including them
	_ "google.golang.org/protobuf/types/known/durationpb"
	_ "google.golang.org/protobuf/types/known/emptypb"
	_ "google.golang.org/protobuf/types/known/fieldmaskpb"
	_ "google.golang.org/protobuf/types/known/structpb"
	_ "google.golang.org/protobuf/types/known/timestamppb"
	_ "google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// maxDescriptorBytes limits the size of a method's descriptors, which come from a server or a file.
	maxDescriptorBytes = 4 << 20
	// maxDescriptorFiles limits the number of files in these descriptors.
	maxDescriptorFiles = 1000
	// maxNameBytes limits a name, maxScopeBytes the full name of the package or message that contains the name, and
	// maxNamesBytes the total length of all full names.
	maxNameBytes  = 200
	maxScopeBytes = 1000
	maxNamesBytes = 64 << 20
	// maxPublicPaths limits the number of paths of public imports.
	maxPublicPaths = 100_000
	// wellKnown is the package whose messages have special JSON forms. protojson relies on the fields of these messages,
	// so protojson's definitions replace those in the descriptors.
	wellKnown = "google.protobuf"
)

// Method is a unary method. The zero Method has an empty request, and its answer is not read.
type Method struct {
	input, output protoreflect.MessageDescriptor
	types         *dynamicpb.Types
}

// MethodOf returns the method of a target, as a FileDescriptorSet with imports defines it.
func MethodOf(target *Target, set []byte) (*Method, error) {
	protos, err := protosOf(set)
	if err != nil {
		return nil, err
	}
	return methodOf(target, protos)
}

// MessageOf returns the message with the given name, as a FileDescriptorSet with imports defines it.
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

// FilesOf links the files of descriptors from outside. Types may be named as in the text of a .proto file.
func FilesOf(protos []*descriptorpb.FileDescriptorProto) (files *protoregistry.Files, err error) {
	defer func() {
		if p := recover(); p != nil { // protodesc panics on some invalid descriptors
			err = fmt.Errorf("descriptors: %v", background.Panicked(p).Value)
		}
	}()
	return filesOf(protos)
}

// filesOf links the files of descriptors.
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

// withWellKnown returns the files. protojson's files replace those of the package google.protobuf.
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
			// If a message had the name of a package, such as google, it could contain types with the full names of
			// protojson's types.
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
			continue // linking the descriptors reports missing files
		}
		known := protodesc.ToFileDescriptorProto(file)
		have[name], out = true, append(out, known)
		own = append(own, known.GetDependency()...)
	}
	return out, nil
}

// nameLengths checks the lengths of names, which a server chooses. Linking descriptors allocates each full name. And
// one or two bytes of an answer can become the name of a field or of an enum value in JSON.
type nameLengths struct{ total int }

// add counts a name in a scope. Both lengths are in bytes.
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

// check counts the names that a file or a message declares. scope is the length of the full name of that package or
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

// checkPublicImports limits the number of paths of public imports. protodesc follows each path, even to files that it
// has already visited.
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
		counts[name] = 0 // ends a cycle, which is an error when the descriptors are linked
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

// MappingError says that a document does not describe a request of a method.
type MappingError struct {
	request protoreflect.FullName
	text    string
}

// Error implements error.
func (e *MappingError) Error() string {
	return "the payload is not a " + string(e.request) + ": " + e.text
}

// Request returns the request that a JSON document describes. A field that the request's type does not have is an
// error. The error is a [MappingError].
func (m *Method) Request(document []byte) ([]byte, error) {
	if m.input == nil {
		return nil, nil
	}
	request := dynamicpb.NewMessage(m.input)
	if err := (protojson.UnmarshalOptions{Resolver: m.types}).Unmarshal(document, request); err != nil {
		// protojson varies its blanks on purpose, but errors with the same cause must have the same text, so that they
		// belong to one group.
		text := strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\u00a0", " "), "proto: ")
		return nil, &MappingError{m.input.FullName(), text}
	}
	raw, err := proto.Marshal(request)
	if err != nil {
		return nil, &MappingError{m.input.FullName(), err.Error()}
	}
	return raw, nil
}

// Answer returns the JSON form of an answer, or nil if raw is not an answer of the method. It includes a field success
// that is false, although a proto3 message does not contain false values.
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
