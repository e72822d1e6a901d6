package source

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/policy"
)

// dlqMessages returns the descriptors of a pipeline, whose DlqMessage has an enum as the type of the error.
func dlqMessages(t *testing.T) []byte {
	t.Helper()
	type field = descriptorpb.FieldDescriptorProto
	fieldOf := func(number int32, name string, kind descriptorpb.FieldDescriptorProto_Type, of string) *field {
		f := &field{Name: &name, Number: &number, Type: &kind, Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()}
		if of != "" {
			f.TypeName = &of
		}
		return f
	}
	const text, message = descriptorpb.FieldDescriptorProto_TYPE_STRING, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE
	set, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{
		protodesc.ToFileDescriptorProto(timestamppb.File_google_protobuf_timestamp_proto),
		{
			Name: new("dlq.proto"), Package: new("pipeline"), Syntax: new("proto3"),
			Dependency: []string{"google/protobuf/timestamp.proto"},
			EnumType: []*descriptorpb.EnumDescriptorProto{{
				Name: new("ErrorType"), Value: []*descriptorpb.EnumValueDescriptorProto{
					{Name: new("UNKNOWN"), Number: new(int32(0))}, {Name: new("TIMEOUT"), Number: new(int32(1))},
				},
			}},
			MessageType: []*descriptorpb.DescriptorProto{{
				Name: new("Stream"), Field: []*field{
					fieldOf(1, "id", text, ""), fieldOf(2, "count", descriptorpb.FieldDescriptorProto_TYPE_INT32, ""),
				},
			}, {
				Name: new("DlqMessage"), Field: []*field{
					fieldOf(1, "stream", message, ".pipeline.Stream"),
					fieldOf(2, "error_type", descriptorpb.FieldDescriptorProto_TYPE_ENUM, ".pipeline.ErrorType"),
					fieldOf(3, "error_message", text, ""), fieldOf(4, "failed_at", message, ".google.protobuf.Timestamp"),
					fieldOf(5, "failed_node_id", text, ""), fieldOf(6, "original_topic", text, ""),
				},
			}},
		},
	}})
	require.NoError(t, err)
	return set
}

func TestEncoder_WritesTheMessageOfADescriptor(t *testing.T) {
	t.Parallel()
	feed := &policy.Feed{Form: policy.FormProtobuf, Descriptor: dlqMessages(t), MessageType: "pipeline.DlqMessage"}
	encode, err := encoderOf(feed)
	require.NoError(t, err)
	of, err := grpc.MessageOf(feed.MessageType, feed.Descriptor)
	require.NoError(t, err)
	entry := &deadletter.Entry{
		Summary: deadletter.Summary{
			Queue: "orders", ErrorType: new("timeout"), ErrorMessage: new("no answer"),
			LastFailedAt: time.Date(2026, 11, 28, 10, 0, 0, 500_000_000, time.UTC),
			Record:       &deadletter.Record{Node: "parser", Topic: "dlq.parser", OriginalTopic: "in.parser"},
		},
		JobKind: "dlqd_message", OriginalEvent: json.RawMessage(`{"payload": {"id": "s-1", "count": 3, "more": [1]}}`),
	}
	shows := func(want string) {
		t.Helper()
		value, form, err := encode(uuid.New(), entry)
		require.NoError(t, err)
		require.Equal(t, "application/protobuf", form)
		message := dynamicpb.NewMessage(of)
		require.NoError(t, proto.Unmarshal(value, message))
		raw, err := protojson.Marshal(message)
		require.NoError(t, err)
		require.JSONEq(t, want, string(raw))
	}
	shows(`{"stream": {"id": "s-1", "count": 3}, "errorType": "TIMEOUT", "errorMessage": "no answer",
		"failedAt": "2026-11-28T10:00:00.500Z", "failedNodeId": "parser", "originalTopic": "in.parser"}`)
	// A masked number does not fit the type of its field, so the payload is left out. The entry has no record, so the
	// queue and the destination say where it failed.
	entry.OriginalEvent = json.RawMessage(`{"payload": {"id": "s-1", "count": "***"}}`)
	entry.ErrorType, entry.ErrorClass, entry.Record = new("HTTP_500"), new("timeout"), nil
	entry.Destination = new("payments")
	shows(`{"errorType": "TIMEOUT", "errorMessage": "no answer", "failedAt": "2026-11-28T10:00:00.500Z",
		"failedNodeId": "payments", "originalTopic": "orders"}`)
	entry.OriginalEvent = nil // readers of dlqd do not see the event
	shows(`{"errorType": "TIMEOUT", "errorMessage": "no answer", "failedAt": "2026-11-28T10:00:00.500Z",
		"failedNodeId": "payments", "originalTopic": "orders"}`)
	_, err = encoderOf(&policy.Feed{Form: policy.FormProtobuf, Descriptor: []byte{0xff}, MessageType: "x"})
	require.Error(t, err)
}

func TestFeeds_ReadADescriptorOncePerPolicy(t *testing.T) {
	t.Parallel()
	feed := &policy.Feed{
		Name: "f", Form: policy.FormProtobuf, Descriptor: dlqMessages(t), MessageType: "pipeline.DlqMessage",
	}
	f, p := &feeds{}, &policy.Policy{}
	_, err := f.encoder(p, feed)
	require.NoError(t, err)
	feed.Descriptor = nil
	_, err = f.encoder(p, feed)
	require.NoError(t, err, "the descriptor is not read again")
	for range 2 {
		_, err = f.encoder(&policy.Policy{}, feed)
		require.Error(t, err)
	}
}

func TestRecord_SaysWhyItIsNotDecoded(t *testing.T) {
	t.Parallel()
	value := []byte{0, 0, 0, 0, 1, 2}
	for _, c := range []struct {
		record     Record
		form, says string
	}{
		{Record{Value: value, Payload: json.RawMessage(`{"a":1}`)}, FormDecoded, ""},
		{Record{Value: value, NotDecoded: "schema 1: unknown"}, FormBinary, "schema 1: unknown"},
		{Record{Value: value, Payload: json.RawMessage(`"\u0000"`)}, FormBinary, "the database cannot hold the value"},
		{Record{Value: value}, FormBinary, ""},
	} {
		form, payload := c.record.payload(100, false)
		require.Equal(t, c.form, form)
		var shown struct{ NotDecoded string }
		require.NoError(t, json.Unmarshal(payload, &shown))
		require.Contains(t, shown.NotDecoded, c.says)
		require.Equal(t, c.says == "", shown.NotDecoded == "")
	}
}
