package kafka

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// valueType returns the type of a source's values if its envelope is protobuf; otherwise nil.
func valueType(s *policy.TopicSource) (of protoreflect.MessageDescriptor, err error) {
	if s.Envelope != policy.EnvelopeProtobuf {
		return nil, nil
	}
	of, err = grpc.MessageOf(s.MessageType, s.Descriptor)
	if err != nil {
		return nil, fmt.Errorf("descriptorFile: %w", err)
	}
	return of, nil
}

// valueType is the function valueType with a cache: it reads the descriptor of a source once, not for each record.
func (b *Broker) valueType(s *policy.TopicSource) (protoreflect.MessageDescriptor, error) {
	if of, ok := b.types.Load(s.Name); ok {
		return of.(protoreflect.MessageDescriptor), nil //nolint:forcetypeassert // only this function stores
	}
	of, err := valueType(s)
	if of != nil {
		b.types.Store(s.Name, of)
	}
	return of, err
}

// protobuf reads the error from a value of a message type, and sets the record's payload to the value as JSON. If the
// value is of another type, it records that the envelope is malformed, and sets nothing.
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
	e.Error.Type, e.Error.Message, e.Node = text(source.FieldType), text(source.FieldMessage), text(source.FieldNode)
	if topic := text(source.FieldTopic); topicName.MatchString(topic) {
		e.Original.Topic = topic
	} else if topic != "" {
		e.malformedf("the field %s is not the name of a topic", source.FieldTopic)
	}
	if field := of.Fields().ByName(source.FieldAt); field != nil && !field.IsList() && value.Has(field) {
		e.At = timeOf(field, value.Get(field))
	}
	if raw, err := protojson.Marshal(value); err == nil {
		record.Payload = raw
	}
}

// errNoPayload is returned for a value without the payload to publish.
var errNoPayload = errors.New("there is no payload to publish")

// unwrapped returns the value to publish for a record of a source. If the envelope is a Protobuf type with a payload
// field, it returns the bytes of that field; otherwise the whole value. It returns errNoPayload if the field is empty
// or the value is of another type.
func (b *Broker) unwrapped(name string, value []byte) ([]byte, error) {
	s := b.policy.Sources.Sources[name]
	if s == nil || value == nil {
		return value, nil
	}
	of, err := b.valueType(s)
	if err != nil || of == nil {
		return value, err
	}
	field := of.Fields().ByName(source.FieldPayload)
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
				payload = nil // of several values of a text or bytes field the last one counts; parts of a message are merged
			}
			payload, found = append(payload, part...), true
		}
		rest = rest[n+size:]
	}
	if !found {
		return nil, fmt.Errorf("%w: the field %s of the value is empty", errNoPayload, source.FieldPayload)
	}
	return payload, nil
}

// timeOf returns the time in a field, or the zero time.
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
