package kafka

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// The fields of a value in the envelope protobuf. Each may be missing in its type.
const (
	fieldType    = "error_type"
	fieldMessage = "error_message"
	fieldAt      = "failed_at" // google.protobuf.Timestamp, or milliseconds since 1970
	fieldNode    = "failed_node_id"
	fieldTopic   = "original_topic"
	fieldPayload = "stream" // the payload that failed: a message or bytes
)

// valueType returns the type of the values of a source whose envelope is protobuf, and nil for
// another envelope.
func valueType(s *policy.TopicSource) (of protoreflect.MessageDescriptor, err error) {
	if s.Envelope != policy.EnvelopeProtobuf {
		return nil, nil
	}
	defer func() {
		if p := recover(); p != nil { // protodesc panics on some invalid descriptors
			err = fmt.Errorf("descriptorFile: %v", background.Panicked(p).Value)
		}
	}()
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(s.Descriptor, &set); err != nil {
		return nil, fmt.Errorf("descriptorFile: %w", err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return nil, fmt.Errorf("descriptorFile: %w", err)
	}
	found, err := files.FindDescriptorByName(protoreflect.FullName(s.MessageType))
	if err != nil {
		return nil, fmt.Errorf("messageType %s: %w", s.MessageType, err)
	}
	of, ok := found.(protoreflect.MessageDescriptor)
	if !ok {
		return nil, fmt.Errorf("messageType %s: is not a message", s.MessageType)
	}
	return of, nil
}

// protobuf reads the error from a value of a message type, and sets the record's payload to the value
// as JSON.
func (e *envelope) protobuf(of protoreflect.MessageDescriptor, record *source.Record) {
	value := dynamicpb.NewMessage(of)
	if err := proto.Unmarshal(record.Value, value); err != nil {
		e.malformedf("the value is not a %s", of.FullName())
		return
	}
	text := func(name protoreflect.Name) string {
		field := of.Fields().ByName(name)
		switch {
		case field == nil || field.IsList() || !value.Has(field):
			return ""
		case field.Kind() == protoreflect.StringKind:
			return value.Get(field).String()
		case field.Kind() == protoreflect.EnumKind:
			if number := field.Enum().Values().ByNumber(value.Get(field).Enum()); number != nil {
				return string(number.Name())
			}
		}
		return ""
	}
	e.Error.Type, e.Error.Message, e.Node = text(fieldType), text(fieldMessage), text(fieldNode)
	if topic := text(fieldTopic); topicName.MatchString(topic) {
		e.Original.Topic = topic
	} else if topic != "" {
		e.malformedf("the field %s is not the name of a topic", fieldTopic)
	}
	if field := of.Fields().ByName(fieldAt); field != nil && !field.IsList() && value.Has(field) {
		e.At = timeOf(field, value.Get(field))
	}
	if raw, err := protojson.Marshal(value); err == nil {
		record.Payload = raw
	}
}

// errNoPayload is the error of a value that holds no payload.
var errNoPayload = errors.New("there is no payload to publish")

// unwrapped returns the value to publish for a record of a source: the payload that the value holds, byte for byte,
// if the envelope is a Protobuf type with such a field; else the value.
func (b *Broker) unwrapped(name string, value []byte) ([]byte, error) {
	s := b.policy.Sources.Sources[name]
	if s == nil || value == nil {
		return value, nil
	}
	of, err := valueType(s)
	if err != nil || of == nil {
		return value, err
	}
	field := of.Fields().ByName(fieldPayload)
	if field == nil || field.IsList() || field.IsMap() ||
		field.Kind() != protoreflect.MessageKind && field.Kind() != protoreflect.BytesKind {
		return value, nil
	}
	var payload []byte
	found := false
	for rest := value; len(rest) > 0; {
		number, kind, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return nil, fmt.Errorf("%w: the value is not a %s", errNoPayload, of.FullName())
		}
		size := protowire.ConsumeFieldValue(number, kind, rest[n:])
		if size < 0 {
			return nil, fmt.Errorf("%w: the value is not a %s", errNoPayload, of.FullName())
		}
		if number == field.Number() && kind == protowire.BytesType {
			part, _ := protowire.ConsumeBytes(rest[n:])
			if field.Kind() == protoreflect.BytesKind {
				payload = nil // the last one counts; parts of a message are merged
			}
			payload, found = append(payload, part...), true
		}
		rest = rest[n+size:]
	}
	if !found {
		return nil, fmt.Errorf("%w: the field %s of the value is empty", errNoPayload, fieldPayload)
	}
	return payload, nil
}

// timeOf returns the time in a field, or a zero time.
func timeOf(field protoreflect.FieldDescriptor, value protoreflect.Value) time.Time {
	switch field.Kind() { //nolint:exhaustive // no other kind holds a time
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return time.UnixMilli(value.Int())
	case protoreflect.MessageKind:
		fields := field.Message().Fields()
		seconds, nanos := fields.ByName("seconds"), fields.ByName("nanos")
		if field.Message().FullName() == "google.protobuf.Timestamp" && seconds != nil && nanos != nil {
			return time.Unix(value.Message().Get(seconds).Int(), value.Message().Get(nanos).Int())
		}
	}
	return time.Time{}
}
