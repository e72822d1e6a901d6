package source

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
)

// The fields of a dead letter in Protobuf. A message type may have some or all of them.
const (
	FieldType    = "error_type"
	FieldMessage = "error_message"
	FieldAt      = "failed_at" // google.protobuf.Timestamp, or milliseconds since 1970
	FieldNode    = "failed_node_id"
	FieldTopic   = "original_topic"
	FieldPayload = "stream" // the payload that failed: a message or bytes
)

// encoder returns the value of the record that is published for an entry, and the value's media type.
type encoder func(delivery uuid.UUID, entry *deadletter.Entry) (value []byte, form string, err error)

// encoderOf returns the encoder of a feed.
func encoderOf(feed *policy.Feed) (encoder, error) {
	switch feed.Form {
	case policy.FormProtobuf:
		of, err := grpc.MessageOf(feed.MessageType, feed.Descriptor)
		return func(_ uuid.UUID, entry *deadletter.Entry) ([]byte, string, error) {
			value, err := asProtobuf(of, entry)
			return value, "application/protobuf", err
		}, err
	case policy.FormCloudEvents:
		return asCloudEvent, nil
	}
	return func(_ uuid.UUID, entry *deadletter.Entry) ([]byte, string, error) {
		value, err := json.Marshal(entry)
		return value, "application/json", err
	}, nil
}

// asCloudEvent returns an entry as a CloudEvent 1.0 in structured mode. The event has the id of the delivery, so that a
// consumer recognizes an event that is published twice.
func asCloudEvent(delivery uuid.UUID, entry *deadletter.Entry) ([]byte, string, error) {
	value, err := json.Marshal(struct {
		SpecVersion     string            `json:"specversion"`
		ID              uuid.UUID         `json:"id"`
		Source          string            `json:"source"`
		Type            string            `json:"type"`
		Subject         uuid.UUID         `json:"subject"`
		Time            time.Time         `json:"time"`
		DataContentType string            `json:"datacontenttype"`
		Data            *deadletter.Entry `json:"data"`
	}{
		"1.0", delivery, "/dlqd/queues/" + url.PathEscape(entry.Queue), "dlqd.deadletter.filed", entry.ID,
		entry.LastFailedAt, "application/json", entry,
	})
	return value, "application/cloudevents+json; charset=UTF-8", err
}

// asProtobuf returns an entry as a message of a type. It sets the fields that the type has. It leaves out a payload
// that does not fit the field's type, for example because a number in the payload is masked.
func asProtobuf(of protoreflect.MessageDescriptor, entry *deadletter.Entry) ([]byte, error) {
	value := dynamicpb.NewMessage(of)
	set := func(name protoreflect.Name, texts ...string) {
		field := of.Fields().ByName(name)
		if field == nil || field.IsList() || cmp.Or(texts...) == "" {
			return
		}
		switch field.Kind() { //nolint:exhaustive // no other kind holds a text
		case protoreflect.StringKind:
			value.Set(field, protoreflect.ValueOfString(cmp.Or(texts...)))
		case protoreflect.EnumKind:
			for _, text := range texts {
				if number := field.Enum().Values().ByName(protoreflect.Name(strings.ToUpper(text))); number != nil {
					value.Set(field, protoreflect.ValueOfEnum(number.Number()))
					return
				}
			}
		}
	}
	set(FieldType, textOf(entry.ErrorType), textOf(entry.ErrorClass))
	set(FieldMessage, textOf(entry.ErrorMessage))
	node, topic := textOf(entry.Destination), entry.Queue
	if entry.Record != nil {
		node, topic = entry.Record.Node, cmp.Or(entry.Record.OriginalTopic, entry.Record.Topic)
	}
	set(FieldNode, node)
	set(FieldTopic, topic)
	setTime(value, of.Fields().ByName(FieldAt), entry.LastFailedAt)
	setPayload(value, of.Fields().ByName(FieldPayload), payloadOf(entry))
	return proto.Marshal(value)
}

// payloadOf returns an entry's payload. The payload is masked if the entry is. For a message of dlqd, payloadOf returns
// nil if the event has no payload or cannot be decoded.
func payloadOf(entry *deadletter.Entry) json.RawMessage {
	if entry.JobKind != message.JobKind {
		return entry.OriginalEvent
	}
	var event struct {
		Payload json.RawMessage `json:"payload"`
	}
	if json.Unmarshal(entry.OriginalEvent, &event) != nil {
		return nil
	}
	return event.Payload
}

func setTime(value *dynamicpb.Message, field protoreflect.FieldDescriptor, at time.Time) {
	if field == nil || field.IsList() {
		return
	}
	switch field.Kind() { //nolint:exhaustive // no other kind holds a time
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		value.Set(field, protoreflect.ValueOfInt64(at.UnixMilli()))
	case protoreflect.MessageKind:
		if field.Message().FullName() != "google.protobuf.Timestamp" {
			return
		}
		stamp := value.Mutable(field).Message()
		stamp.Set(field.Message().Fields().ByName("seconds"), protoreflect.ValueOfInt64(at.Unix()))
		stamp.Set(field.Message().Fields().ByName("nanos"), protoreflect.ValueOfInt32(int32(at.Nanosecond())))
	}
}

func setPayload(value *dynamicpb.Message, field protoreflect.FieldDescriptor, payload json.RawMessage) {
	if field == nil || field.IsList() || field.IsMap() || len(payload) == 0 || bytes.Equal(payload, []byte("null")) {
		return
	}
	switch field.Kind() { //nolint:exhaustive // no other kind holds a payload
	case protoreflect.BytesKind:
		value.Set(field, protoreflect.ValueOfBytes(payload))
	case protoreflect.StringKind:
		value.Set(field, protoreflect.ValueOfString(string(payload)))
	case protoreflect.MessageKind:
		inner := dynamicpb.NewMessage(field.Message())
		if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(payload, inner) == nil {
			value.Set(field, protoreflect.ValueOfMessage(inner))
		}
	}
}

func textOf(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}
