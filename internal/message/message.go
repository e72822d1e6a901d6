// Package message defines the messages that clients submit, and validates them.
package message

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/textproto"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"golang.org/x/net/http/httpguts"
)

// JobKind is the River kind of the job that delivers a message. The message's own kind is in the
// job's args, and in the kind column of a dead letter.
const JobKind = "dlqd_message"

// Limits on a message. Names are limited to the lengths that River's columns hold and a page can show.
const (
	MaxDepth       = 64  // levels of nesting of the whole message
	MaxNameLength  = 127 // characters of kind, as in River's constraint on the kinds of jobs
	MaxIDLength    = 128
	MaxTextLength  = 255 // bytes of source and its type, id and name, version, subscriberId and orderingKey
	MaxTags        = 32
	MaxTagLength   = 255 // River's column
	MaxHeaders     = 32
	MaxHeaderBytes = 4096 // of one header's value
)

// DefaultPriority is the priority of a message that does not set one. Priorities are 1 (most urgent) to 4.
const DefaultPriority = 2

// Message is a message as a client submits it, and the args of the job that delivers it.
type Message struct {
	MessageID    string            `json:"messageId" river:"unique" doc:"Id of the message. A second message with the same id is a duplicate and is not delivered. Generated if absent."`
	Queue        string            `json:"queue" doc:"Name of a queue of the policy." example:"payment-processing"`
	EventKind    string            `json:"kind" doc:"Kind of the event: words joined by dots." example:"payment.captured"`
	Payload      json.RawMessage   `json:"payload" doc:"Any JSON."`
	Source       string            `json:"source,omitempty" doc:"Sender of the message." example:"checkout"`
	SourceType   string            `json:"sourceType,omitempty" doc:"Type of the sender." example:"service"`
	SourceID     string            `json:"sourceId,omitempty" doc:"Id of the sender." example:"checkout-7f9c"`
	SourceName   string            `json:"sourceName,omitempty" doc:"Display name of the sender." example:"Checkout"`
	Version      string            `json:"version,omitempty" doc:"Version of the event's schema." example:"2.1"`
	SubscriberID string            `json:"subscriberId,omitempty" doc:"Subscriber whom the message concerns." example:"sub_81"`
	Priority     int               `json:"priority,omitempty" doc:"1 (most urgent) to 4; 2 if absent."`
	Tags         []string          `json:"tags,omitempty" doc:"Tags of three or more letters, digits, _ and -."`
	Headers      map[string]string `json:"headers,omitempty" doc:"HTTP headers of the delivery, sent unchanged."`
	Metadata     json.RawMessage   `json:"metadata,omitempty" doc:"An object that is stored with the message and not delivered."`
	ScheduledAt  *time.Time        `json:"scheduledAt,omitempty" doc:"Earliest time of the delivery."`
	ExpiresAt    *time.Time        `json:"expiresAt,omitempty" doc:"Time after which the message is out of date. dlqd still delivers it; replay runs can skip its dead letter."`
	OrderingKey  string            `json:"orderingKey,omitempty" doc:"In ordered queues, messages with the same key are delivered in the order of their submission." example:"order_81"`
	// PayloadText is the payload exactly as submitted, because the database changes the layout of Payload. Only jobs of
	// queues that deliver the exact text have it. Clients cannot set it.
	PayloadText string `json:"payloadText,omitempty"`

	generatedID bool
}

// Exact returns the message with PayloadText set to the text of its payload.
func (m Message) Exact() Message {
	m.PayloadText = string(m.Payload)
	return m
}

// Args returns the message as JSON, for the args of its job. It keeps the layout of the payload, which [Parse] has
// checked. It is faster than json.Marshal, because it does not parse the payload.
func (m Message) Args() (string, error) {
	var out strings.Builder
	out.Grow(256 + len(m.Payload) + len(m.PayloadText))
	writeText(&out, `{"messageId":`, m.MessageID)
	writeText(&out, `,"queue":`, m.Queue)
	writeText(&out, `,"kind":`, m.EventKind)
	for _, f := range []struct{ key, value string }{
		{`,"source":`, m.Source},
		{`,"sourceType":`, m.SourceType},
		{`,"sourceId":`, m.SourceID},
		{`,"sourceName":`, m.SourceName},
		{`,"version":`, m.Version},
		{`,"subscriberId":`, m.SubscriberID},
		{`,"orderingKey":`, m.OrderingKey},
	} {
		if f.value != "" {
			writeText(&out, f.key, f.value)
		}
	}
	for _, f := range []struct {
		key     string
		value   any
		present bool
	}{
		{`,"priority":`, m.Priority, m.Priority != 0},
		{`,"tags":`, m.Tags, len(m.Tags) > 0},
		{`,"headers":`, m.Headers, len(m.Headers) > 0},
		{`,"metadata":`, m.Metadata, len(m.Metadata) > 0},
		{`,"scheduledAt":`, m.ScheduledAt, m.ScheduledAt != nil},
		{`,"expiresAt":`, m.ExpiresAt, m.ExpiresAt != nil},
		{`,"payloadText":`, m.PayloadText, m.PayloadText != ""},
	} {
		if !f.present {
			continue
		}
		raw, err := json.Marshal(f.value)
		if err != nil {
			return "", err
		}
		out.WriteString(f.key)
		out.Write(raw)
	}
	out.WriteString(`,"payload":`)
	if len(m.Payload) == 0 {
		out.WriteString("null")
	}
	out.Write(m.Payload)
	out.WriteByte('}')
	return out.String(), nil
}

// writeText writes a key as it is and a text as a JSON string.
func writeText(out *strings.Builder, key, text string) {
	out.WriteString(key)
	for i := range len(text) {
		if !ordinary[text[i]] || text[i] >= utf8.RuneSelf {
			raw, _ := json.Marshal(text) //nolint:errchkjson // a string can be encoded
			out.Write(raw)
			return
		}
	}
	out.WriteByte('"')
	out.WriteString(text)
	out.WriteByte('"')
}

// Body returns the body to deliver.
func (m Message) Body() []byte {
	if m.PayloadText != "" {
		return []byte(m.PayloadText)
	}
	return m.Payload
}

// HasGeneratedID reports whether dlqd generated the messageId, so that no earlier message can have it.
func (m Message) HasGeneratedID() bool { return m.generatedID }

// UniqueKey returns River's unique key of a message's job: the SHA-256 of its kind and of the args
// that are tagged unique (River's internal/dbunique). It finds a message by its id.
func UniqueKey(messageID string) []byte {
	sum := sha256.Sum256([]byte(`&kind=` + JobKind + `&args={"messageId":"` + messageID + `"}`))
	return sum[:]
}

// Kind implements river.JobArgs.
func (Message) Kind() string { return JobKind }

// FieldError is an error in one field.
type FieldError struct {
	Field   string // path in the message, such as "tags[3]"; empty for the whole message
	Message string
}

// InvalidError lists the errors of a message: every invalid field or, if the message is malformed, the first mistake.
type InvalidError struct {
	Fields    []FieldError
	Malformed bool // the text is not JSON in the form of a message
}

func (e *InvalidError) Error() string {
	parts := make([]string, len(e.Fields))
	for i, f := range e.Fields {
		parts[i] = f.Message
		if f.Field != "" {
			parts[i] = f.Field + ": " + f.Message
		}
	}
	return "invalid message: " + strings.Join(parts, "; ")
}

func malformed(field, format string, args ...any) *InvalidError {
	return &InvalidError{Malformed: true, Fields: []FieldError{{Field: field, Message: fmt.Sprintf(format, args...)}}}
}

var tagPattern = regexp.MustCompile(`^\w[\w-]+\w$`)

func isLetterOrDigit(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// isID reports whether a text matches ^[A-Za-z0-9][A-Za-z0-9._:~@+=-]*$. A regular expression takes ten times as long.
func isID(text string) bool {
	for i := range len(text) {
		if c := text[i]; !isLetterOrDigit(c) && (i == 0 || strings.IndexByte("._:~@+=-", c) < 0) {
			return false
		}
	}
	return text != ""
}

// isKind reports whether a text matches ^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$.
func isKind(text string) bool {
	wasDot := true
	for i := range len(text) {
		c := text[i]
		if !isLetterOrDigit(c) && c != '_' && c != '-' && (c != '.' || wasDot) {
			return false
		}
		wasDot = c == '.'
	}
	return !wasDot
}

// TagProblem returns why a tag breaks River's rules, or "".
func TagProblem(tag string) string {
	if len(tag) <= MaxTagLength && tagPattern.MatchString(tag) {
		return ""
	}
	return fmt.Sprintf("must be 3 to %d letters, digits, _ and -, and neither start nor end with -", MaxTagLength)
}

// reservedHeaders are the headers that dlqd or HTTP itself sets on a delivery.
var reservedHeaders = map[string]bool{
	"Connection": true, "Content-Length": true, "Content-Type": true, "Host": true, "Keep-Alive": true,
	"Proxy-Authorization": true, "Proxy-Connection": true, "Te": true, "Trailer": true, "Transfer-Encoding": true,
	"Upgrade": true, "Traceparent": true, "Tracestate": true, "User-Agent": true,
}

// wire is a submitted message. Its fields replace fields of Message: their types accept more values, so that decode
// can name the field with an invalid value.
type wire struct {
	Message

	Priority    *int            `json:"priority"`
	ScheduledAt *string         `json:"scheduledAt"`
	ExpiresAt   *string         `json:"expiresAt"`
	PayloadText json.RawMessage `json:"payloadText"`
}

// Parse decodes and checks one message. It returns an [*InvalidError] that names every invalid
// field or, if the message is malformed, the first place.
func Parse(raw []byte) (*Message, error) {
	s := scanner{
		raw: raw, onKey: checkKeyCase(1), keep: true, fields: make([]field, 0, 16), keys: make([][]byte, 0, 32),
	}
	if err := s.document(); err != nil {
		return nil, err
	}
	return decode(raw, s.fields)
}

// ParseBatch decodes and checks a JSON object {"messages": [...]} of 1 to most messages with different ids, each of at
// most maxBytes. Its InvalidError names the fields of all invalid messages.
func ParseBatch(raw []byte, most int, maxBytes int64) ([]*Message, error) {
	if err := check(raw, checkKeyCase(len(`{[{`))); err != nil {
		return nil, err
	}
	var batch struct {
		Messages []json.RawMessage `json:"messages"`
	}
	if err := strictDecode(raw, &batch); err != nil {
		return nil, err
	}
	if len(batch.Messages) == 0 || len(batch.Messages) > most {
		return nil, &InvalidError{Fields: []FieldError{{
			Field:   "messages",
			Message: fmt.Sprintf("has %d messages; must have 1 to %d", len(batch.Messages), most),
		}}}
	}
	invalid := &InvalidError{}
	messages := make([]*Message, len(batch.Messages))
	first := make(map[string]int, len(messages))
	for i, item := range batch.Messages {
		at := fmt.Sprintf("messages[%d]", i)
		if int64(len(item)) > maxBytes {
			invalid.Fields = append(invalid.Fields,
				FieldError{Field: at, Message: fmt.Sprintf("is %d bytes long; at most %d", len(item), maxBytes)})
			continue
		}
		s := scanner{raw: item, keep: true}
		var msg *Message
		err := s.document() // the limit of maxGrowth depends on the length: a message may grow less than the batch
		if err == nil {
			msg, err = decode(item, s.fields)
		}
		if bad, ok := errors.AsType[*InvalidError](err); ok {
			invalid.Malformed = invalid.Malformed || bad.Malformed
			for _, f := range bad.Fields {
				if f.Field != "" {
					f.Field = "." + f.Field
				}
				invalid.Fields = append(invalid.Fields, FieldError{Field: at + f.Field, Message: f.Message})
			}
			continue
		}
		if j, again := first[msg.MessageID]; again {
			invalid.Fields = append(invalid.Fields,
				FieldError{Field: at + ".messageId", Message: fmt.Sprintf("is also the id of messages[%d]", j)})
		}
		first[msg.MessageID] = i
		messages[i] = msg
	}
	if len(invalid.Fields) > 0 {
		return nil, invalid
	}
	return messages, nil
}

// fill sets the fields of a message from the fields of its document. If it returns false, strictDecode has to read the
// document, to find a possible error.
func (w *wire) fill(fields []field) bool {
	for _, f := range fields {
		var into any
		switch string(f.name) {
		case "messageId":
			into = &w.MessageID
		case "queue":
			into = &w.Queue
		case "kind":
			into = &w.EventKind
		case "payload":
			w.Payload = bytes.Clone(f.value)
			continue
		case "source":
			into = &w.Source
		case "sourceType":
			into = &w.SourceType
		case "sourceId":
			into = &w.SourceID
		case "sourceName":
			into = &w.SourceName
		case "version":
			into = &w.Version
		case "subscriberId":
			into = &w.SubscriberID
		case "orderingKey":
			into = &w.OrderingKey
		case "priority":
			into = &w.Priority
		case "tags":
			into = &w.Tags
		case "headers":
			into = &w.Headers
		case "metadata":
			w.Metadata = bytes.Clone(f.value)
			continue
		case "scheduledAt":
			into = &w.ScheduledAt
		case "expiresAt":
			into = &w.ExpiresAt
		default:
			return false
		}
		if text, ok := into.(*string); ok && f.value[0] == '"' && bytes.IndexByte(f.value, '\\') < 0 {
			*text = string(f.value[1 : len(f.value)-1])
		} else if json.Unmarshal(f.value, into) != nil {
			return false
		}
	}
	return len(fields) > 0
}

// decode returns the message of a checked document, with a new id if the document has none, or an InvalidError. fields
// are the members of its outermost object.
func decode(raw []byte, fields []field) (*Message, error) {
	var w wire
	if !w.fill(fields) { // fill is faster
		w = wire{}
		if err := strictDecode(raw, &w); err != nil {
			return nil, err
		}
	}
	if w.PayloadText != nil {
		return nil, malformed("payloadText", "unknown field")
	}
	msg := &w.Message
	invalid := &InvalidError{}
	add := func(field, format string, args ...any) {
		invalid.Fields = append(invalid.Fields, FieldError{Field: field, Message: fmt.Sprintf(format, args...)})
	}

	switch {
	case msg.MessageID == "":
		msg.MessageID = uuid.Must(uuid.NewV7()).String()
		msg.generatedID = true
	case len(msg.MessageID) > MaxIDLength || !isID(msg.MessageID):
		add("messageId", "must be 1 to %d letters, digits and . _ : ~ @ + = -, and start with a letter or digit", MaxIDLength)
	}
	if msg.Queue == "" {
		add("queue", "is required")
	}
	switch {
	case msg.EventKind == "":
		add("kind", "is required")
	case len(msg.EventKind) > MaxNameLength || !isKind(msg.EventKind):
		add("kind", "must be at most %d letters, digits, _ and -, as words joined by dots, such as payment.captured",
			MaxNameLength)
	}
	if len(msg.Payload) == 0 {
		add("payload", "is required (null is allowed)")
	}
	for _, f := range []struct{ name, value string }{
		{"source", msg.Source},
		{"sourceType", msg.SourceType},
		{"sourceId", msg.SourceID},
		{"sourceName", msg.SourceName},
		{"version", msg.Version},
		{"subscriberId", msg.SubscriberID},
		{"orderingKey", msg.OrderingKey},
	} {
		if len(f.value) > MaxTextLength {
			add(f.name, "is %d bytes long; at most %d", len(f.value), MaxTextLength)
		}
	}
	if w.Priority != nil {
		if msg.Priority = *w.Priority; msg.Priority < 1 || msg.Priority > 4 {
			add("priority", "is %d; must be 1 (most urgent) to 4", msg.Priority)
		}
	}
	if len(msg.Tags) > MaxTags {
		add("tags", "has %d tags; at most %d", len(msg.Tags), MaxTags)
	}
	for i, tag := range msg.Tags {
		if problem := TagProblem(tag); problem != "" {
			add(fmt.Sprintf("tags[%d]", i), "%s", problem)
		}
	}
	if len(msg.Headers) > MaxHeaders {
		add("headers", "has %d headers; at most %d", len(msg.Headers), MaxHeaders)
	}
	for name, value := range msg.Headers {
		canonical := textproto.CanonicalMIMEHeaderKey(name)
		switch {
		case !httpguts.ValidHeaderFieldName(name):
			add("headers", "%q is not a valid HTTP header name", shortened(name))
		case reservedHeaders[canonical] || strings.HasPrefix(canonical, "Webhook-") || strings.HasPrefix(canonical, "Dlqd-"):
			add("headers."+shortened(name), "is set by dlqd")
		case len(value) > MaxHeaderBytes || !httpguts.ValidHeaderFieldValue(value):
			add("headers."+shortened(name), "is not a valid HTTP header value of at most %d bytes", MaxHeaderBytes)
		}
	}
	if len(msg.Metadata) > 0 && msg.Metadata[0] != '{' && string(msg.Metadata) != "null" {
		add("metadata", "must be an object")
	}
	for _, f := range []struct {
		name string
		text *string
		time **time.Time
	}{{"scheduledAt", w.ScheduledAt, &msg.ScheduledAt}, {"expiresAt", w.ExpiresAt, &msg.ExpiresAt}} {
		if f.text == nil {
			continue
		}
		at, err := time.Parse(time.RFC3339, *f.text)
		at = at.UTC() // convert first: in another zone, the last hours of 9999 may be in the year 10000 in UTC
		if err != nil || at.Year() < 2000 || at.Year() > 9999 {
			add(f.name, "%q is not an RFC 3339 time such as 2027-01-31T08:00:00Z", shortened(*f.text))
		}
		*f.time = &at
	}
	if len(invalid.Fields) > 0 {
		return nil, invalid
	}
	return msg, nil
}

func strictDecode(raw []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	var wrongType *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrongType):
		field := strings.TrimPrefix(wrongType.Field, "Message.")
		return malformed(field, "is a JSON %s; must be %s", wrongType.Value, jsonName(wrongType))
	default:
		text := strings.TrimPrefix(err.Error(), "json: ")
		if name, ok := strings.CutPrefix(text, "unknown field "); ok {
			return malformed(shortened(strings.Trim(name, `"`)), "unknown field")
		}
		return malformed("", "%s", text)
	}
}

func jsonName(err *json.UnmarshalTypeError) string {
	switch name := err.Type.String(); {
	case strings.HasPrefix(name, "int"):
		return "a whole number"
	case strings.HasPrefix(name, "[]"):
		return "an array"
	case strings.HasPrefix(name, "map") || strings.HasPrefix(name, "struct") || strings.Contains(name, "."):
		return "an object"
	default:
		return "a " + strings.TrimPrefix(name, "*")
	}
}
