package kafka

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dlqd/dlqd/internal/cause"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/registry"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

const (
	// maxTextBytes limits a text of an envelope, such as a stack trace.
	maxTextBytes = 64 << 10
	// maxAttempts limits the earlier attempts of an envelope. The latest are kept.
	maxAttempts = 100
)

// recordOf returns a fetched record with the data of its envelope. schemas, if not nil, is the registry of the source.
func recordOf(
	ctx context.Context, s *policy.TopicSource, of protoreflect.MessageDescriptor, schemas *registry.Registry,
	fetched *kgo.Record,
) source.Record {
	record := source.Record{
		Offset: fetched.Offset, Time: fetched.Timestamp, Key: fetched.Key, Value: fetched.Value,
		Headers: make([]source.Header, len(fetched.Headers)),
	}
	for i, header := range fetched.Headers {
		record.Headers[i] = source.Header(header)
	}
	decode(ctx, schemas, s, &record)
	record.Failure = failureOf(s, of, &record)
	return record
}

// failureOf returns the data of a record's envelope, in the format that the source names. of is the type of the
// record's value, and nil unless the envelope is protobuf.
func failureOf(
	s *policy.TopicSource, of protoreflect.MessageDescriptor, record *source.Record,
) source.Failure {
	e := &envelope{headers: record.Headers}
	e.Original = source.Origin{Partition: source.Unknown, Offset: source.Unknown}
	switch s.Envelope {
	case policy.EnvelopeSpring:
		e.spring()
	case policy.EnvelopeConnect:
		e.connect()
	case policy.EnvelopeStreams:
		e.streams()
	case policy.EnvelopeShare:
		e.share()
	case policy.EnvelopeJSON:
		value := record.Value
		if record.Payload != nil {
			value = record.Payload
		}
		e.json(s, value)
	case policy.EnvelopeProtobuf:
		e.protobuf(of, record)
	}
	if e.Original.Topic == "" {
		e.Original.Partition, e.Original.Offset = source.Unknown, source.Unknown
	}
	return e.Failure
}

// envelope collects the data in the headers of a record.
type envelope struct {
	source.Failure

	headers []source.Header
}

// malformedf records the first reason why the envelope does not decode.
func (e *envelope) malformedf(format string, args ...any) {
	if e.Malformed == "" {
		e.Malformed = fmt.Sprintf(format, args...)
	}
}

// find returns the index in headers of the first header with a name in headers[from:to], or -1.
func (e *envelope) find(name string, from, to int) int {
	at := slices.IndexFunc(e.headers[from:to], func(h source.Header) bool { return h.Key == name })
	if at < 0 {
		return -1
	}
	return from + at
}

// text returns the value of the first header with a name in headers[from:to], as valid UTF-8. It reads at most
// maxTextBytes of the value, and returns "" if there is no such header.
func (e *envelope) text(name string, from, to int) string {
	at := e.find(name, from, to)
	if at < 0 {
		return ""
	}
	value := e.headers[at].Value
	return strings.ToValidUTF8(string(value[:min(len(value), maxTextBytes)]), "\uFFFD")
}

// all returns the indexes of the headers whose name is one of names.
func (e *envelope) all(names ...string) []int {
	var indexes []int
	for i, header := range e.headers {
		if slices.Contains(names, header.Key) {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// topicName matches the topic names that Kafka permits (org.apache.kafka.common.internals.Topic).
var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// topic sets the original topic from the header at an index.
func (e *envelope) topic(at int) {
	name := string(e.headers[at].Value)
	if !topicName.MatchString(name) {
		e.malformedf("the header %s is not the name of a topic", e.headers[at].Key)
		return
	}
	e.Original.Topic = name
}

// number returns the header with a name as a big-endian number of size bytes, or as decimal text if size is 0. It
// returns Unknown if there is no such header, if its value is -1, or if the value is malformed, which it also records.
func (e *envelope) number(name string, size int) int64 {
	at := e.find(name, 0, len(e.headers))
	if at < 0 || e.headers[at].Value == nil {
		return source.Unknown
	}
	value := e.headers[at].Value
	var number int64
	switch {
	case size == 0:
		var err error
		if number, err = strconv.ParseInt(string(value), 10, 64); err != nil {
			e.malformedf("the header %s is not a number", name)
			return source.Unknown
		}
		if number == -1 { // Kafka writes -1 if the place is unknown
			return source.Unknown
		}
	case len(value) != size:
		e.malformedf("the header %s has %d bytes instead of %d", name, len(value), size)
		return source.Unknown
	case size == 4:
		number = int64(int32(binary.BigEndian.Uint32(value)))
	default:
		number = int64(binary.BigEndian.Uint64(value))
	}
	if number < 0 {
		e.malformedf("the header %s is negative: %d", name, number)
		return source.Unknown
	}
	return number
}

// place sets the original partition and offset from headers. size is 4 for binary numbers, and 0 for
// text.
func (e *envelope) place(partition, offset string, size int) {
	number := e.number(partition, size)
	if number != int64(int32(number)) {
		e.malformedf("the header %s is not a partition: %d", partition, number)
		number = source.Unknown
	}
	e.Original.Partition = int32(number)
	e.Original.Offset = e.number(offset, 2*size)
}

// The prefixes of Spring Kafka's headers. DeadLetterPublishingRecoverer uses springPrefix, and
// DeadLetterPublishingRecovererFactory (retry topics) springRetryPrefix for the same headers; the
// names are in org.springframework.kafka.support.KafkaHeaders.
const (
	springPrefix      = "kafka_dlt-"
	springRetryPrefix = "kafka_"
	springAttempts    = "retry_topic-attempts" // org.springframework.kafka.retrytopic.RetryTopicHeaders
)

// springWrapper is the exception in which a Spring listener wraps the application's exception. The other is the
// exception for a key or value that does not decode.
const (
	springWrapper     = "org.springframework.kafka.listener.ListenerExecutionFailedException"
	springUndecodable = "org.springframework.kafka.support.serializer.DeserializationException"
)

// spring reads the headers that DeadLetterPublishingRecoverer adds (maybeAddOriginalHeaders, addExceptionInfoHeaders):
// partitions, offsets and timestamps are binary. A record that fails for good more than once has each header several
// times, oldest first: the first original headers have the origin, and the last exception headers the latest error.
func (e *envelope) spring() {
	if topics := e.all(springPrefix+"original-topic", springRetryPrefix+"original-topic"); len(topics) > 0 {
		e.topic(topics[0])
		prefix := strings.TrimSuffix(e.headers[topics[0]].Key, "original-topic")
		e.place(prefix+"original-partition", prefix+"original-offset", 4)
		e.number(prefix+"original-timestamp", 8)
		e.Group = e.text(prefix+"original-consumer-group", 0, len(e.headers))
	} else {
		e.place(springPrefix+"original-partition", springPrefix+"original-offset", 4)
	}
	classes := e.all(springPrefix+"exception-fqcn", springRetryPrefix+"exception-fqcn",
		springPrefix+"key-exception-fqcn", springRetryPrefix+"key-exception-fqcn")
	e.exceptions(classes, func(at, end int) exception {
		prefix := strings.TrimSuffix(e.headers[at].Key, "fqcn")
		x := exception{
			class: e.text(prefix+"fqcn", at, end), message: e.text(prefix+"message", at, end),
			trace: e.text(prefix+"stacktrace", at, end),
		}
		before, isKey := strings.CutSuffix(prefix, "key-exception-")
		if isKey {
			prefix = before + "exception-" // the cause of a key's exception is in the header without the key prefix
		}
		x.isKey = isKey
		x.unwrap(e.text(prefix+"cause-fqcn", at, end))
		return x
	})
	if attempts := e.all(springAttempts); len(attempts) > 0 {
		switch value := e.headers[attempts[len(attempts)-1]].Value; len(value) {
		case 1: // before Spring Kafka 2.8
			e.context("attempts", int(value[0]))
		case 4:
			e.context("attempts", int(binary.BigEndian.Uint32(value)))
		default:
			e.malformedf("the header %s has %d bytes instead of 4", springAttempts, len(value))
		}
	}
}

// connectPrefix begins the headers that Kafka Connect adds with
// errors.deadletterqueue.context.headers.enable (DeadLetterQueueReporter.populateContextHeaders of
// org.apache.kafka.connect.runtime.errors): all are text, and each is there once.
const connectPrefix = "__connect.errors."

// connectUndecodable are the stages of Connect in which a decoding error occurs.
var connectUndecodable = []string{"KEY_CONVERTER", "VALUE_CONVERTER", "HEADER_CONVERTER"}

func (e *envelope) connect() {
	header := func(name string) string { return e.text(connectPrefix+name, 0, len(e.headers)) }
	if topics := e.all(connectPrefix + "topic"); len(topics) > 0 && len(e.headers[topics[0]].Value) > 0 {
		e.topic(topics[0])
	}
	e.place(connectPrefix+"partition", connectPrefix+"offset", 0)
	e.Node = header("connector.name")
	e.exceptions(e.all(connectPrefix+"exception.class.name"), func(int, int) exception {
		return exception{
			class: header("exception.class.name"), message: header("exception.message"), trace: header("exception.stacktrace"),
		}
	})
	for _, name := range []string{"stage", "task.id", "class.name"} {
		if value := header(name); value != "" {
			e.context(name, value)
		}
	}
	if slices.Contains(connectUndecodable, header("stage")) {
		e.Error.Class = riverdlq.ClassMalformed
	}
}

// streamsPrefix begins the headers that Kafka Streams adds (KIP-1034; ExceptionHandlerUtils of
// org.apache.kafka.streams.errors.internals). All are text. Headers of an earlier failure come first.
const streamsPrefix = "__streams.errors."

func (e *envelope) streams() {
	if topics := e.all(streamsPrefix + "topic"); len(topics) > 0 && len(e.headers[topics[0]].Value) > 0 {
		e.topic(topics[0])
	}
	e.place(streamsPrefix+"partition", streamsPrefix+"offset", 0)
	e.exceptions(e.all(streamsPrefix+"exception"), func(at, end int) exception {
		return exception{
			class: e.text(streamsPrefix+"exception", at, end), message: e.text(streamsPrefix+"message", at, end),
			trace: e.text(streamsPrefix+"stacktrace", at, end),
		}
	})
}

// sharePrefix begins the headers that a broker adds for a share group (KIP-1191; ShareGroupDLQRecordHelper.headers of
// org.apache.kafka.server.share.dlq). All are text, in the order topic, partition, offset, group and, if known,
// delivery.count and message. They follow the headers of the failed record, which are present if the group copies
// records. If a name occurs several times, the last header counts.
const sharePrefix = "__dlq.errors."

func (e *envelope) share() {
	topics := e.all(sharePrefix + "topic")
	if len(topics) == 0 {
		return
	}
	e.headers = e.headers[topics[len(topics)-1]:]
	e.topic(0)
	e.place(sharePrefix+"partition", sharePrefix+"offset", 0)
	e.Group = e.text(sharePrefix+"group", 0, len(e.headers))
	e.Error.Message = e.text(sharePrefix+"message", 0, len(e.headers))
	if deliveries := e.number(sharePrefix+"delivery.count", 0); deliveries >= 0 {
		e.context("attempts", int(deliveries))
	}
}

// json reads the error from a JSON value, at the source's paths or at common ones.
func (e *envelope) json(s *policy.TopicSource, value []byte) {
	if !json.Valid(value) {
		e.malformedf("the value is not JSON")
		return
	}
	answer := cause.Answer{
		ContentType: "application/json", Body: bytes.TrimSpace(value), Paths: cause.Paths(s.ErrorPaths),
	}
	c := answer.Cause()
	e.Error = riverdlq.Error{Type: c.Type, Code: c.Code, Title: c.Title, Message: cmp.Or(c.Message, c.Title)}
}

// exception is a Java exception with its data from headers.
type exception struct {
	class   string
	message string
	trace   string
	isKey   bool // the exception is about the record's key
}

// unwrap replaces Spring's own exception with the exception that it wraps.
func (x *exception) unwrap(inner string) {
	if x.class != springWrapper || inner == "" {
		return
	}
	x.class = inner
	_, after, found := strings.Cut(x.trace, "Caused by: "+inner)
	if !found {
		return
	}
	if line, _, _ := strings.Cut(after, "\n"); strings.HasPrefix(line, ": ") {
		x.message = strings.TrimRight(line[2:], "\r")
	}
}

// String returns the exception as Java prints it.
func (x *exception) String() string {
	if x.message == "" {
		return x.class
	}
	return x.class + ": " + x.message
}

// exceptions sets the error from the last exception, and the attempts from the earlier ones. read returns the exception
// whose headers are between two indexes.
func (e *envelope) exceptions(at []int, read func(at, end int) exception) {
	at = at[max(0, len(at)-maxAttempts-1):]
	for i, from := range at {
		end := len(e.headers)
		if i+1 < len(at) {
			end = at[i+1]
		}
		x := read(from, end)
		if i+1 < len(at) {
			e.Attempts = append(e.Attempts, source.Attempt{Error: x.String(), Trace: x.trace})
			continue
		}
		e.Error.Type, e.Error.Message, e.Trace = x.class, cmp.Or(x.message, x.class), x.trace
		if x.class == springUndecodable {
			e.Error.Class = riverdlq.ClassMalformed
		}
		if x.isKey {
			e.context("part", "key")
		}
	}
}

// context adds to the error's context.
func (e *envelope) context(key string, value any) {
	if e.Error.Context == nil {
		e.Error.Context = map[string]any{}
	}
	e.Error.Context[key] = value
}
