package registry

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/bufbuild/protocompile/ast"
	"github.com/bufbuild/protocompile/options"
	"github.com/bufbuild/protocompile/parser"
	"github.com/bufbuild/protocompile/reporter"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dlqd/dlqd/internal/grpc"
)

const (
	// maxProtobufBytes limits a value in Protobuf: two bytes of it can become a message in memory.
	maxProtobufBytes = 1 << 20
	// maxProtoBytes limits the text of a file, and maxImports its imports: the time to parse and link a file grows faster
	// than both. Meanwhile, readers of the registry wait.
	maxProtoBytes = 256 << 10
	maxImports    = 2 * maxReferences
	// mainFile is the name of the file that no import names.
	mainFile = "dlqd/schema.proto"
)

// known are files that a schema may import without a reference, because Confluent's registry has them. Of meta.proto,
// only options of fields and messages are used, which have no meaning here.
var known = map[string]string{
	"confluent/meta.proto": `syntax = "proto3"; package confluent;`,
	"confluent/type/decimal.proto": `syntax = "proto3"; package confluent.type;
message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }`,
}

// noTypes resolves no type: an Any in an Any would be decoded again and again.
var noTypes = new(protoregistry.Types)

// decoding admits one value at a time, because a small one can need much memory.
var decoding sync.Mutex

// protobufSchema is a file with message types.
type protobufSchema struct{ file protoreflect.FileDescriptor }

// newProtobuf returns the file of the last text. The others are files that it imports.
func newProtobuf(texts []schemaText) (*protobufSchema, error) {
	texts[len(texts)-1].name = mainFile
	have := map[string]bool{}
	for _, text := range texts {
		have[text.name] = true
	}
	var files []*descriptorpb.FileDescriptorProto
	for _, text := range texts {
		file, err := parseFile(text)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
		for _, name := range file.GetDependency() {
			if known[name] == "" || have[name] {
				continue
			}
			have[name] = true
			if file, err = parseFile(schemaText{name, known[name]}); err != nil {
				return nil, err
			}
			files = append(files, file)
		}
	}
	linked, err := grpc.FilesOf(files)
	if err != nil {
		return nil, err
	}
	file, err := linked.FindFileByPath(mainFile)
	return &protobufSchema{file}, err
}

// parseFile parses the text of a .proto file. It does not link the file to its imports.
func parseFile(text schemaText) (*descriptorpb.FileDescriptorProto, error) {
	if len(text.text) > maxProtoBytes {
		return nil, fmt.Errorf("a file has more than %d bytes", maxProtoBytes)
	}
	if nesting(text.text) > maxDepth {
		return nil, errTooDeep
	}
	handler := reporter.NewHandler(nil)
	node, err := parser.Parse(text.name, strings.NewReader(text.text), handler)
	if err != nil {
		return nil, err
	}
	imports := 0
	for _, part := range node.Decls {
		if _, ok := part.(*ast.ImportNode); ok {
			imports++
		}
	}
	if imports > maxImports {
		return nil, fmt.Errorf("a file has more than %d imports", maxImports)
	}
	parsed, err := parser.ResultFromAST(node, true, handler)
	if err != nil {
		return nil, err
	}
	if _, err := options.InterpretUnlinkedOptions(parsed); err != nil {
		return nil, err
	}
	return parsed.FileDescriptorProto(), nil
}

// nesting returns the depth to which brackets nest in the text of a .proto file, outside of comments and texts. The
// parser's functions call themselves for each level.
func nesting(text string) int {
	const opening, closing = "{[(<", "}])>"
	var depths [4]int // by kind of bracket
	most := 0
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"' || c == '\'':
			for i++; i < len(text) && text[i] != c && text[i] != '\n'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case strings.HasPrefix(text[i:], "//"):
			if end := strings.IndexByte(text[i:], '\n'); end >= 0 {
				i += end
			} else {
				i = len(text)
			}
		case strings.HasPrefix(text[i:], "/*"):
			if end := strings.Index(text[i+2:], "*/"); end >= 0 {
				i += end + 3
			} else {
				i = len(text)
			}
		case strings.IndexByte(opening, c) >= 0:
			depths[strings.IndexByte(opening, c)]++
			most = max(most, slices.Max(depths[:]))
		case strings.IndexByte(closing, c) >= 0:
			depth := &depths[strings.IndexByte(closing, c)]
			*depth = max(*depth-1, 0)
		}
	}
	return most
}

// message returns the type of a value, and the value after its indexes. The indexes name a type by its place in the
// file and in the types that contain it: their number and each of them, in zigzag encoding. The number 0 stands for the
// first type.
func (s *protobufSchema) message(body []byte) (of protoreflect.MessageDescriptor, rest []byte, err error) {
	next := func() int {
		n, size := binary.Varint(body)
		if size <= 0 || n < 0 || n > maxSchemaBytes {
			return -1
		}
		body = body[size:]
		return int(n)
	}
	indexes := []int{0}
	if count := next(); count < 0 || count > maxDepth {
		return nil, nil, errNoMessage
	} else if count > 0 {
		indexes = make([]int, count)
		for i := range indexes {
			indexes[i] = next()
		}
	}
	types := s.file.Messages()
	for _, index := range indexes {
		if index < 0 || index >= types.Len() {
			return nil, nil, errNoMessage
		}
		of = types.Get(index)
		types = of.Messages()
	}
	return of, body, nil
}

var errNoMessage = errors.New("the value names no message type of its schema")

// decode implements codec.
func (s *protobufSchema) decode(body []byte) (json.RawMessage, error) {
	of, raw, err := s.message(body)
	if err != nil {
		return nil, err
	}
	decoding.Lock()
	defer decoding.Unlock()
	value, err := unmarshal(of, raw)
	if err != nil {
		return nil, err
	}
	return asJSON(value, len(raw))
}

// encode implements codec.
func (s *protobufSchema) encode(body []byte, edited json.RawMessage) ([]byte, error) {
	of, raw, err := s.message(body)
	if err != nil {
		return nil, err
	}
	encoded, err := EncodeMessage(of, raw, edited)
	if err != nil {
		return nil, err
	}
	return append(body[:len(body)-len(raw):len(body)-len(raw)], encoded...), nil
}

// EncodeMessage returns the message of an edited document. raw is the message before the edit. If the document cannot
// have all of that message, for example a field that the type does not have, EncodeMessage returns an error.
func EncodeMessage(of protoreflect.MessageDescriptor, raw []byte, edited json.RawMessage) ([]byte, error) {
	decoding.Lock()
	defer decoding.Unlock()
	before, err := unmarshal(of, raw)
	if err != nil {
		return nil, err
	}
	shown, err := asJSON(before, len(raw))
	if err != nil {
		return nil, err
	}
	again, err := fromJSON(of, shown)
	if err != nil || !proto.Equal(before, again) {
		return nil, fmt.Errorf("the value has more than its JSON as a %s shows, which an edit would lose", of.FullName())
	}
	value, err := fromJSON(of, edited)
	if err != nil {
		return nil, err
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(value)
}

func unmarshal(of protoreflect.MessageDescriptor, raw []byte) (*dynamicpb.Message, error) {
	if len(raw) > maxProtobufBytes {
		return nil, fmt.Errorf("a value in Protobuf of more than %d bytes", maxProtobufBytes)
	}
	value := dynamicpb.NewMessage(of)
	if err := (proto.UnmarshalOptions{Resolver: noTypes, RecursionLimit: maxDepth}).Unmarshal(raw, value); err != nil {
		return nil, fmt.Errorf("the value is not a %s", of.FullName())
	}
	return value, nil
}

// asJSON returns the JSON of a message with a size.
func asJSON(value *dynamicpb.Message, size int) (json.RawMessage, error) {
	if left := maxJSON(size); !fits(value, &left) {
		return nil, errTooLarge
	}
	raw, err := protojson.MarshalOptions{Resolver: noTypes}.Marshal(value)
	var document bytes.Buffer
	if err != nil || json.Compact(&document, raw) != nil { // protojson adds spaces at random
		return nil, fmt.Errorf("the %s has no form in JSON (an Any is not decoded)", value.Descriptor().FullName())
	}
	return document.Bytes(), nil
}

func fromJSON(of protoreflect.MessageDescriptor, document json.RawMessage) (*dynamicpb.Message, error) {
	value := dynamicpb.NewMessage(of)
	if err := (protojson.UnmarshalOptions{Resolver: noTypes}).Unmarshal(document, value); err != nil {
		// protojson varies its blanks on purpose.
		text := strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\u00a0", " "), "proto: ")
		return nil, fmt.Errorf("the payload is not a %s: %s", of.FullName(), short(errors.New(text)))
	}
	return value, nil
}

// fits subtracts the length of a message's JSON from left, or a little more. It returns false as soon as left is
// negative.
func fits(message protoreflect.Message, left *int) bool {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		*left -= len(field.JSONName()) + 6
		switch {
		case field.IsList():
			for i := 0; i < value.List().Len() && *left >= 0; i++ {
				spend(field, value.List().Get(i), left)
			}
		case field.IsMap():
			value.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				spend(field.MapKey(), key.Value(), left)
				spend(field.MapValue(), value, left)
				return *left >= 0
			})
		default:
			spend(field, value, left)
		}
		return *left >= 0
	})
	return *left >= 0
}

// spend subtracts the length of one value's JSON.
func spend(field protoreflect.FieldDescriptor, value protoreflect.Value, left *int) {
	const number = 32
	switch field.Kind() { //nolint:exhaustive // the others are numbers
	case protoreflect.MessageKind, protoreflect.GroupKind:
		*left -= number // a Timestamp is longer than its fields
		fits(value.Message(), left)
	case protoreflect.EnumKind:
		*left -= number
		if symbol := field.Enum().Values().ByNumber(value.Enum()); symbol != nil {
			*left -= len(symbol.Name())
		}
	case protoreflect.StringKind:
		*left -= 6*len(value.String()) + 4 // such as \u0001
	case protoreflect.BytesKind:
		*left -= 2*len(value.Bytes()) + 4
	default:
		*left -= number
	}
}
