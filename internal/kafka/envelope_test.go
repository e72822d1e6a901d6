package kafka

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

func int32Of(number int32) string { return string(binary.BigEndian.AppendUint32(nil, uint32(number))) }

func int64Of(number int64) string { return string(binary.BigEndian.AppendUint64(nil, uint64(number))) }

// headers returns headers from alternating names and values.
func headers(pairs ...string) []source.Header {
	var list []source.Header
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, source.Header{Key: pairs[i], Value: []byte(pairs[i+1])})
	}
	return list
}

func failure(envelope string, value string, list []source.Header) source.Failure {
	return failureOf(&policy.TopicSource{Envelope: envelope}, nil, &source.Record{Value: []byte(value), Headers: list})
}

// springTrace is what ListenerExecutionFailedException prints.
const springTrace = `org.springframework.kafka.listener.ListenerExecutionFailedException: Listener failed
	at org.springframework.kafka.listener.KafkaMessageListenerContainer.decorate(KafkaMessageListenerContainer.java:2946)
Caused by: com.shop.CardDeclined: card of customer 17 was declined
	at com.shop.Payments.charge(Payments.java:42)
`

func spring(prefix, topic string, partition int32, offset int64, exception, message string) []source.Header {
	return headers(
		prefix+"exception-fqcn", "org.springframework.kafka.listener.ListenerExecutionFailedException",
		prefix+"exception-cause-fqcn", exception,
		prefix+"exception-message", "Listener failed",
		prefix+"exception-stacktrace", strings.Replace(springTrace, "com.shop.CardDeclined: card of customer 17 was declined",
			exception+": "+message, 1),
		prefix+"original-topic", topic,
		prefix+"original-partition", int32Of(partition),
		prefix+"original-offset", int64Of(offset),
		prefix+"original-timestamp", int64Of(1_790_000_000_000),
		prefix+"original-timestamp-type", "CreateTime",
		prefix+"original-consumer-group", "payments",
	)
}

func TestEnvelope_ReadsSpring(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"kafka_dlt-", "kafka_"} {
		f := failure(policy.EnvelopeSpring, "{}", spring(prefix, "orders", 3, 1<<40, "com.shop.CardDeclined", "no money"))
		require.Equal(t, source.Origin{Topic: "orders", Partition: 3, Offset: 1 << 40}, f.Original)
		require.Equal(t, "payments", f.Group)
		require.Equal(t, "com.shop.CardDeclined", f.Error.Type)
		require.Equal(t, "no money", f.Error.Message)
		require.Contains(t, f.Trace, "com.shop.Payments.charge")
		require.Empty(t, f.Malformed)
		require.Empty(t, f.Error.Class)
		require.Empty(t, f.Attempts)
	}
}

// A record that failed for good twice has each header twice: the first one has the origin, the last one the error.
func TestEnvelope_ReadsSpringHeadersOfTwoDeaths(t *testing.T) {
	t.Parallel()
	list := append(spring("kafka_dlt-", "orders", 3, 17, "com.shop.CardDeclined", "no money"),
		spring("kafka_dlt-", "orders.DLT", 0, 4, "java.net.ConnectException", "Connection refused")...)
	list = append(list, headers("retry_topic-attempts", int32Of(2), "retry_topic-attempts", int32Of(5))...)
	f := failure(policy.EnvelopeSpring, "{}", list)
	require.Equal(t, source.Origin{Topic: "orders", Partition: 3, Offset: 17}, f.Original)
	require.Equal(t, "java.net.ConnectException", f.Error.Type)
	require.Equal(t, "Connection refused", f.Error.Message)
	require.Equal(t, 5, f.Error.Context["attempts"])
	require.Len(t, f.Attempts, 1)
	require.Equal(t, "com.shop.CardDeclined: no money", f.Attempts[0].Error)
	require.Contains(t, f.Attempts[0].Trace, "no money")
	// The record failed first in a retry topic, then in another topic.
	f = failure(policy.EnvelopeSpring, "{}", append(
		spring("kafka_", "orders", 3, 17, "com.shop.CardDeclined", "no money"),
		spring("kafka_dlt-", "orders-dlt", 0, 4, "java.net.ConnectException", "Connection refused")...))
	require.Equal(t, source.Origin{Topic: "orders", Partition: 3, Offset: 17}, f.Original)
	require.Equal(t, "java.net.ConnectException", f.Error.Type)
}

// A record that Spring could not deserialize gets the class malformed, because a repeat would fail, too.
func TestEnvelope_ReadsSpringDeserialization(t *testing.T) {
	t.Parallel()
	const class = "org.springframework.kafka.support.serializer.DeserializationException"
	f := failure(policy.EnvelopeSpring, "{", headers(
		"kafka_dlt-key-exception-fqcn", class,
		"kafka_dlt-exception-cause-fqcn", "com.fasterxml.jackson.core.JsonParseException",
		"kafka_dlt-key-exception-message", "failed to deserialize", "kafka_dlt-key-exception-stacktrace", class+": failed",
		"kafka_dlt-original-topic", "orders",
		"kafka_dlt-original-partition", int32Of(0), "kafka_dlt-original-offset", int64Of(0),
	))
	require.Equal(t, class, f.Error.Type)
	require.Equal(t, riverdlq.ClassMalformed, f.Error.Class)
	require.Equal(t, "key", f.Error.Context["part"])
	require.Equal(t, source.Origin{Topic: "orders", Partition: 0, Offset: 0}, f.Original)
	require.Empty(t, f.Malformed, "the envelope itself decodes")
}

func TestEnvelope_ReadsConnect(t *testing.T) {
	t.Parallel()
	f := failure(policy.EnvelopeConnect, "", headers(
		"__connect.errors.topic", "orders", "__connect.errors.partition", "7", "__connect.errors.offset", "4711",
		"__connect.errors.connector.name", "orders-sink", "__connect.errors.task.id", "2",
		"__connect.errors.stage", "VALUE_CONVERTER",
		"__connect.errors.class.name", "org.apache.kafka.connect.json.JsonConverter",
		"__connect.errors.exception.class.name", "org.apache.kafka.connect.errors.DataException",
		"__connect.errors.exception.message", "Converting byte[] to Kafka Connect data failed",
		"__connect.errors.exception.stacktrace", "org.apache.kafka.connect.errors.DataException: Converting …",
	))
	require.Equal(t, source.Origin{Topic: "orders", Partition: 7, Offset: 4711}, f.Original)
	require.Equal(t, "orders-sink", f.Node)
	require.Equal(t, "org.apache.kafka.connect.errors.DataException", f.Error.Type)
	require.Equal(t, "Converting byte[] to Kafka Connect data failed", f.Error.Message)
	require.Equal(t, riverdlq.ClassMalformed, f.Error.Class)
	require.Equal(t, map[string]any{
		"stage": "VALUE_CONVERTER", "task.id": "2", "class.name": "org.apache.kafka.connect.json.JsonConverter",
	}, f.Error.Context)
	// These are the headers that Connect writes if it does not know the original record.
	f = failure(policy.EnvelopeConnect, "", headers("__connect.errors.topic", "", "__connect.errors.partition", "-1",
		"__connect.errors.offset", "-1", "__connect.errors.stage", "TASK_PUT"))
	require.Equal(t, source.Origin{Partition: source.Unknown, Offset: source.Unknown}, f.Original)
	require.Empty(t, f.Malformed)
	require.Empty(t, f.Error.Class)
}

func TestEnvelope_ReadsStreams(t *testing.T) {
	t.Parallel()
	list := headers("__streams.errors.exception", "java.lang.RuntimeException")
	list = append(list, source.Header{Key: "__streams.errors.message"}) // an exception without a message
	list = append(list, headers(
		"__streams.errors.stacktrace", "java.lang.RuntimeException\n\tat com.shop.Join.apply(Join.java:7)",
		"__streams.errors.topic", "orders", "__streams.errors.partition", "1", "__streams.errors.offset", "9")...)
	f := failure(policy.EnvelopeStreams, "", list)
	require.Equal(t, source.Origin{Topic: "orders", Partition: 1, Offset: 9}, f.Original)
	require.Equal(t, "java.lang.RuntimeException", f.Error.Type)
	require.Equal(t, "java.lang.RuntimeException", f.Error.Message)
	list = append(list, headers(
		"__streams.errors.exception", "java.lang.IllegalStateException", "__streams.errors.message", "twice",
		"__streams.errors.topic", "dlq", "__streams.errors.partition", "0", "__streams.errors.offset", "3")...)
	f = failure(policy.EnvelopeStreams, "", list)
	require.Equal(t, source.Origin{Topic: "orders", Partition: 1, Offset: 9}, f.Original)
	require.Equal(t, "java.lang.IllegalStateException", f.Error.Type)
	require.Equal(t, "twice", f.Error.Message)
	require.Len(t, f.Attempts, 1)
	require.Equal(t, "java.lang.RuntimeException", f.Attempts[0].Error)
}

func TestEnvelope_ReadsJSON(t *testing.T) {
	t.Parallel()
	s := &policy.TopicSource{Envelope: policy.EnvelopeJSON, ErrorPaths: policy.ErrorPaths{
		Type: []string{"failure.kind"}, Code: []string{"failure.number"}, Message: []string{"failure.why"},
	}}
	const value = ` {"failure": {"kind": "CardDeclined", "number": 51, "why": "no money"}}`
	f := failureOf(s, nil, &source.Record{Value: []byte(value)})
	require.Equal(t, riverdlq.Error{Type: "CardDeclined", Code: "51", Message: "no money"}, f.Error)
	require.Equal(t, "the value is not JSON", failureOf(s, nil, &source.Record{Value: []byte("{")}).Malformed)
	require.Equal(t, "the value is not JSON", failureOf(s, nil, &source.Record{}).Malformed)
}

// protobufSource returns a source whose values are DlqMessages of a pipeline.
func protobufSource(tb testing.TB) *policy.TopicSource {
	tb.Helper()
	type field = descriptorpb.FieldDescriptorProto
	fieldOf := func(number int32, name string, kind descriptorpb.FieldDescriptorProto_Type, of string) *field {
		f := &descriptorpb.FieldDescriptorProto{
			Name: &name, Number: &number, Type: &kind, Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		}
		if of != "" {
			f.TypeName = &of
		}
		return f
	}
	const text = descriptorpb.FieldDescriptorProto_TYPE_STRING
	set, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{
		protodesc.ToFileDescriptorProto(timestamppb.File_google_protobuf_timestamp_proto),
		{
			Name: new("dlq.proto"), Package: new("pipeline"), Syntax: new("proto3"),
			Dependency: []string{"google/protobuf/timestamp.proto"},
			MessageType: []*descriptorpb.DescriptorProto{{
				Name: new("DlqMessage"), Field: []*field{
					fieldOf(1, "stream", descriptorpb.FieldDescriptorProto_TYPE_BYTES, ""),
					fieldOf(2, "error_type", text, ""), fieldOf(3, "error_message", text, ""),
					fieldOf(4, "failed_at", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, ".google.protobuf.Timestamp"),
					fieldOf(5, "failed_node_id", text, ""), fieldOf(6, "original_topic", text, ""),
				},
			}},
		},
	}})
	require.NoError(tb, err)
	return &policy.TopicSource{Envelope: policy.EnvelopeProtobuf, Descriptor: set, MessageType: "pipeline.DlqMessage"}
}

func TestEnvelope_ReadsProtobuf(t *testing.T) {
	t.Parallel()
	s := protobufSource(t)
	of, err := valueType(s)
	require.NoError(t, err)
	message := dynamicpb.NewMessage(of)
	const shown = `{"stream": "AAE=", "errorType": "CONNECTION_REFUSED", "errorMessage": "no parser",
		"failedAt": "2026-11-28T10:00:00.500Z", "failedNodeId": "parser", "originalTopic": "in.parser"}`
	require.NoError(t, protojson.Unmarshal([]byte(shown), message))
	value, err := proto.Marshal(message)
	require.NoError(t, err)
	record := &source.Record{Value: value}
	f := failureOf(s, of, record)
	require.Equal(t, riverdlq.Error{Type: "CONNECTION_REFUSED", Message: "no parser"}, f.Error)
	require.Equal(t, "parser", f.Node)
	require.Equal(t, source.Origin{Topic: "in.parser", Partition: source.Unknown, Offset: source.Unknown}, f.Original)
	require.Equal(t, time.Date(2026, 11, 28, 10, 0, 0, 500_000_000, time.UTC), f.At.UTC())
	require.JSONEq(t, shown, string(record.Payload))
	f = failureOf(s, of, &source.Record{Value: []byte{0xff}})
	require.Equal(t, "the value is not a pipeline.DlqMessage", f.Malformed)
	for _, broken := range []policy.TopicSource{
		{Envelope: s.Envelope, Descriptor: []byte{0xff}, MessageType: s.MessageType},
		{Envelope: s.Envelope, Descriptor: s.Descriptor, MessageType: "pipeline.Missing"},
	} {
		_, err := valueType(&broken)
		require.Error(t, err)
	}
}

// A record without an envelope becomes an entry, too.
func TestEnvelope_MayBeMissing(t *testing.T) {
	t.Parallel()
	for _, envelope := range []string{
		policy.EnvelopeNone, policy.EnvelopeSpring, policy.EnvelopeConnect, policy.EnvelopeStreams, "",
	} {
		f := failure(envelope, "", headers("traceparent", "00-1"))
		require.Equal(t, source.Failure{Original: source.Origin{Partition: source.Unknown, Offset: source.Unknown}}, f)
	}
}

// A broken header makes the entry malformed, with the reason.
func TestEnvelope_SaysWhatIsBroken(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		envelope, header, value, reason string
	}{
		{policy.EnvelopeSpring, "kafka_dlt-original-partition", "12", "has 2 bytes instead of 4"},
		{policy.EnvelopeSpring, "kafka_dlt-original-partition", int32Of(-5), "is negative: -5"},
		{policy.EnvelopeSpring, "kafka_dlt-original-offset", "4711", "has 4 bytes instead of 8"},
		{policy.EnvelopeSpring, "kafka_dlt-original-offset", "", "has 0 bytes instead of 8"},
		{policy.EnvelopeSpring, "kafka_dlt-original-timestamp", "yesterday", "has 9 bytes instead of 8"},
		{policy.EnvelopeSpring, "kafka_dlt-original-topic", "orders\x00", "is not the name of a topic"},
		{policy.EnvelopeSpring, "retry_topic-attempts", "", "has 0 bytes instead of 4"},
		{policy.EnvelopeConnect, "__connect.errors.partition", "1.5", "is not a number"},
		{policy.EnvelopeConnect, "__connect.errors.partition", "4294967296", "is not a partition: 4294967296"},
		{policy.EnvelopeConnect, "__connect.errors.offset", "99999999999999999999", "is not a number"},
		{policy.EnvelopeConnect, "__connect.errors.topic", strings.Repeat("t", 250), "is not the name of a topic"},
		{policy.EnvelopeStreams, "__streams.errors.offset", "-2", "is negative: -2"},
		{policy.EnvelopeStreams, "__streams.errors.topic", "\xff", "is not the name of a topic"},
	} {
		list := headers("kafka_dlt-original-topic", "orders")
		if strings.HasSuffix(c.header, "topic") {
			list = nil
		}
		f := failure(c.envelope, "", append(list, headers(c.header, c.value)...))
		require.Equal(t, fmt.Sprintf("the header %s %s", c.header, c.reason), f.Malformed)
	}
}

func FuzzEnvelope(f *testing.F) {
	envelopes := []string{
		policy.EnvelopeSpring, policy.EnvelopeConnect, policy.EnvelopeStreams, policy.EnvelopeJSON, policy.EnvelopeNone,
		policy.EnvelopeProtobuf,
	}
	of, err := valueType(protobufSource(f))
	require.NoError(f, err)
	names := []string{
		"kafka_dlt-original-topic", "kafka_dlt-original-partition", "kafka_dlt-original-offset",
		"kafka_dlt-original-timestamp", "kafka_dlt-exception-fqcn", "kafka_dlt-exception-cause-fqcn",
		"kafka_dlt-exception-message", "kafka_dlt-exception-stacktrace", "kafka_dlt-key-exception-fqcn",
		"kafka_original-topic", "kafka_exception-fqcn", "retry_topic-attempts",
		"__connect.errors.topic", "__connect.errors.partition", "__connect.errors.offset", "__connect.errors.stage",
		"__connect.errors.exception.class.name",
		"__streams.errors.topic", "__streams.errors.exception", "__streams.errors.partition", "__streams.errors.message",
	}
	f.Add(uint8(0), []byte("\x00\x06orders\x01\x04\x00\x00\x00\x03\x02\x08\x00\x00\x00\x00\x00\x00\x00\x07"), []byte("{}"))
	f.Add(uint8(1), []byte("\x0c\x01t\x0d\x01x\x0e\x03-12"), []byte(`{"error":{"code":5}}`))
	f.Fuzz(func(t *testing.T, envelope uint8, raw, value []byte) {
		var list []source.Header // each: the name's index, the value's length, the value
		for len(raw) >= 2 {
			header := source.Header{Key: names[int(raw[0])%len(names)]}
			if length := int(raw[1]); length < 255 {
				header.Value = raw[2:min(2+length, len(raw))]
				raw = raw[min(2+length, len(raw)):]
			} else { // null
				raw = raw[2:]
			}
			list = append(list, header)
		}
		record := &source.Record{Value: value, Headers: list}
		got := failureOf(&policy.TopicSource{Envelope: envelopes[int(envelope)%len(envelopes)]}, of, record)
		require.GreaterOrEqual(t, got.Original.Partition, int32(source.Unknown))
		require.GreaterOrEqual(t, got.Original.Offset, int64(source.Unknown))
		require.LessOrEqual(t, len(got.Trace), 3*maxTextBytes)
		require.LessOrEqual(t, len(got.Attempts), maxAttempts)
		if got.Original.Topic != "" {
			require.Regexp(t, topicName, got.Original.Topic)
		}
	})
}

// The test uses the headers of Kafka's ShareGroupDLQRecordHelper.
func TestEnvelope_ReadsShareGroups(t *testing.T) {
	t.Parallel()
	died := func(topic, partition, offset, group string) []source.Header {
		return headers("__dlq.errors.topic", topic, "__dlq.errors.partition", partition, "__dlq.errors.offset", offset,
			"__dlq.errors.group", group)
	}
	f := failure(policy.EnvelopeShare, "{}", append(died("orders", "3", "1099511627776", "workers"), headers(
		"__dlq.errors.delivery.count", "5", "__dlq.errors.message", "Offset delivery count exceeded the threshold.")...))
	require.Equal(t, source.Origin{Topic: "orders", Partition: 3, Offset: 1 << 40}, f.Original)
	require.Equal(t, "workers", f.Group)
	require.Equal(t, "Offset delivery count exceeded the threshold.", f.Error.Message)
	require.Equal(t, 5, f.Error.Context["attempts"])
	require.Empty(t, f.Malformed)

	// The record already had such headers when it failed, and the broker knows neither the count nor the cause.
	f = failure(policy.EnvelopeShare, "{}", append(append(died("orders", "3", "17", "workers"),
		headers("__dlq.errors.message", "earlier", "a", "b")...), died("orders.dlq", "0", "4", "fixers")...))
	require.Equal(t, source.Origin{Topic: "orders.dlq", Partition: 0, Offset: 4}, f.Original)
	require.Equal(t, "fixers", f.Group)
	require.Empty(t, f.Error.Message)
	require.Empty(t, f.Error.Context)

	require.Empty(t, failure(policy.EnvelopeShare, "{}", nil).Malformed)
	f = failure(policy.EnvelopeShare, "{}", died("orders", "x", "4", "workers"))
	require.Equal(t, "the header __dlq.errors.partition is not a number", f.Malformed)
	require.True(t, isEnvelope("__dlq.errors.group"))
}
