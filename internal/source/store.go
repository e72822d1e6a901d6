package source

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

const (
	// appendTimeout bounds the transaction of a batch.
	appendTimeout = time.Minute
	// maxAttempts is the number of earlier attempts of a record that are kept, the last ones.
	maxAttempts = 100
	// maxKeyBytes is the length of dead_letter_queue.ordering_key.
	maxKeyBytes = message.MaxTextLength
)

// Forms of a record's value (dlq.record.form).
const (
	FormJSON    = "json"
	FormText    = "text"
	FormBinary  = "binary"
	FormDecoded = "decoded"
	FormNull    = "null"
	FormAbsent  = "absent"
)

// Store stores records, positions and the state of readers.
type Store struct {
	DB     postgres.DB // renders schema names
	Policy func() *policy.Policy
	Logger *slog.Logger

	mu       sync.Mutex
	progress map[place]Progress // not yet written
}

// Position implements [Appender].
func (s *Store) Position(ctx context.Context, p Partition) (next int64, ok bool, err error) {
	next, err = dbsqlc.New(s.DB).Position(ctx, dbsqlc.PositionParams{
		Cluster: p.Cluster, TopicID: p.TopicID, Partition: p.Partition,
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	return next, err == nil, err
}

// Append implements [Appender].
func (s *Store) Append(ctx context.Context, batch Batch) (Stored, error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	p := s.Policy()
	source := p.Sources.Sources[batch.Source]
	if source == nil {
		return Stored{}, fmt.Errorf("source %s: the policy has no such source", batch.Source)
	}
	if err := batch.check(); err != nil {
		return Stored{}, err
	}
	return s.appendInParts(ctx, p, source, &batch)
}

// appendInParts stores a batch. If the database refuses it, it halves the batch until it has the record that is
// refused, and stores that without its texts.
func (s *Store) appendInParts(ctx context.Context, p *policy.Policy, source *policy.TopicSource, batch *Batch) (
	Stored, error,
) {
	stored, err := s.append(ctx, p, source, batch, false)
	if err == nil || !postgres.IsRefusal(err) {
		return stored, err
	}
	if len(batch.Records) <= 1 {
		s.Logger.WarnContext(ctx, "the database refused a record; it is stored without its texts", "source", batch.Source,
			"topic", batch.Topic, "partition", batch.Partition.Partition, "first", batch.First, "error", err)
		return s.append(ctx, p, source, batch, true)
	}
	half := len(batch.Records) / 2
	before, after := *batch, *batch
	before.Records, after.Records = batch.Records[:half], batch.Records[half:]
	before.Next = before.Records[half-1].Offset + 1
	after.First, after.Start = before.Next, false
	first, err := s.appendInParts(ctx, p, source, &before)
	if err != nil {
		return Stored{}, err
	}
	second, err := s.appendInParts(ctx, p, source, &after)
	if err != nil {
		return Stored{}, err
	}
	return Stored{
		Next: second.Next, Entries: first.Entries + second.Entries, Returned: first.Returned + second.Returned,
		Skipped: first.Skipped + second.Skipped,
	}, nil
}

// check rejects batches whose offsets are not in order.
func (b *Batch) check() error {
	next := b.First
	for i := range b.Records {
		if b.Records[i].Offset < next || b.Records[i].Offset >= b.Next {
			return fmt.Errorf("%s/%d: a record has offset %d in a batch from %d to %d", b.Topic, b.Partition.Partition,
				b.Records[i].Offset, b.First, b.Next)
		}
		next = b.Records[i].Offset + 1
	}
	if b.Next < b.First || b.Lost && len(b.Records) > 0 {
		return fmt.Errorf("%s/%d: invalid batch from %d to %d", b.Topic, b.Partition.Partition, b.First, b.Next)
	}
	return nil
}

func (s *Store) append(ctx context.Context, p *policy.Policy, source *policy.TopicSource, batch *Batch,
	plain bool,
) (Stored, error) {
	params := dbsqlc.AppendParams{
		Source: source.Name, Queue: source.Queue, Cluster: batch.Cluster, Topic: batch.Topic, TopicID: batch.TopicID,
		Partition: batch.Partition.Partition, FirstOffset: batch.First, NextOffset: batch.Next,
		IsStart: batch.Start, IsLost: batch.Lost, IsOrdered: p.Queues[source.Queue].Ordering,
		Records: make([]json.RawMessage, len(batch.Records)), Keys: make([][]byte, len(batch.Records)),
		Values: make([][]byte, len(batch.Records)),
	}
	for i := range batch.Records {
		r := &batch.Records[i]
		raw, err := describe(source, batch, r, plain)
		if err != nil {
			return Stored{}, fmt.Errorf("%s/%d at offset %d: %w", batch.Topic, batch.Partition.Partition, r.Offset, err)
		}
		params.Records[i], params.Keys[i] = raw, r.Key
		if len(r.Value) <= source.MaxRecordBytes {
			params.Values[i] = r.Value
		}
	}
	row, err := dbsqlc.New(s.DB).Append(ctx, params)
	if err != nil {
		return Stored{}, err
	}
	if !row.Accepted {
		return Stored{}, &PositionError{
			Partition: batch.Partition, First: batch.First, Next: max(row.Next, 0), Known: row.Next >= 0,
		}
	}
	return Stored{
		Next: row.Next, Entries: int(row.Entries), Returned: int(row.Returned), Skipped: int(row.Skipped),
	}, nil
}

// stored is what dlq.append_records reads of a record, besides its key and value.
type stored struct {
	Offset            int64           `json:"offset"`
	At                time.Time       `json:"at"`
	FailedAt          time.Time       `json:"failed_at"`
	DeliveryID        *uuid.UUID      `json:"delivery_id"`
	MessageID         string          `json:"message_id"`
	Kind              string          `json:"kind"`
	OrderingKey       *string         `json:"ordering_key"`
	Event             json.RawMessage `json:"event"`
	Error             string          `json:"error"`
	Errors            []attemptError  `json:"errors"`
	Attempts          int             `json:"attempts"`
	Metadata          json.RawMessage `json:"metadata"`
	Group             *string         `json:"consumer_group"`
	Node              *string         `json:"node"`
	OriginalTopic     *string         `json:"original_topic"`
	OriginalTopicID   *uuid.UUID      `json:"original_topic_id"`
	OriginalPartition *int32          `json:"original_partition"`
	OriginalOffset    *int64          `json:"original_offset"`
	Form              string          `json:"form"`
	Size              *int            `json:"size"`
	SHA256            *string         `json:"sha256"`
	Content           string          `json:"content"` // hex
	Headers           [][2][]byte     `json:"headers"` // base64
}

// attemptError is an error of an attempt in River's form.
type attemptError struct {
	At      time.Time `json:"at"`
	Attempt int       `json:"attempt"`
	Error   string    `json:"error"`
	Trace   string    `json:"trace"`
}

// report is a structured error as riverdlq.Record writes it to a job's metadata.
type report struct {
	Attempt int             `json:"attempt"`
	Type    string          `json:"type,omitempty"`
	Code    string          `json:"code,omitempty"`
	Class   riverdlq.Class  `json:"class,omitempty"`
	Title   string          `json:"title,omitempty"`
	Message string          `json:"message"`
	Context json.RawMessage `json:"context"`
}

// describe returns a record in the form of dlq.append_records. Plain leaves out all texts that the
// record brought along.
func describe(source *policy.TopicSource, batch *Batch, r *Record, plain bool) (json.RawMessage, error) {
	f := &r.Failure
	if plain {
		f = &Failure{
			Malformed: "the database cannot hold the texts of this record",
			Original:  Origin{Partition: Unknown, Offset: Unknown},
		}
	}
	failedAt := f.At
	if failedAt.IsZero() {
		failedAt = r.Time
	}
	failedAt = storableTime(failedAt)
	form, payload := r.payload(source.MaxRecordBytes, plain)
	d := stored{
		Offset: r.Offset, At: storableTime(r.Time), FailedAt: failedAt, Form: form,
		MessageID: fmt.Sprintf("%s/%d/%d", batch.Topic, batch.Partition.Partition, r.Offset),
		Kind:      storable(source.KindOf(batch.Topic, f.Original.Topic)),
		Group:     known(cmp.Or(f.Group, source.GroupOf(batch.Topic))), Node: known(f.Node),
		OriginalTopic: known(f.Original.Topic),
		Attempts:      min(len(f.Attempts), maxAttempts) + 1,
		Headers:       make([][2][]byte, len(r.Headers)),
		Content:       hex.EncodeToString(Content(r.Key, r.Value)),
	}
	if r.Value != nil {
		size, sum := len(r.Value), sha256.Sum256(r.Value)
		hash := hex.EncodeToString(sum[:])
		d.Size, d.SHA256 = &size, &hash
	}
	if f.Original.Topic != "" && f.Original.TopicID != uuid.Nil {
		d.OriginalTopicID = &f.Original.TopicID
	}
	if f.Original.Topic != "" && f.Original.Partition >= 0 {
		d.OriginalPartition = &f.Original.Partition
	}
	if f.Original.Topic != "" && f.Original.Offset >= 0 {
		d.OriginalOffset = &f.Original.Offset
	}
	d.OrderingKey = orderingKey(r.Key)
	event := message.Message{
		MessageID: d.MessageID, Queue: source.Queue, EventKind: d.Kind, Payload: payload, Source: source.Name,
		Headers: map[string]string{},
	}
	if d.OrderingKey != nil {
		event.OrderingKey = *d.OrderingKey
	}
	for i, h := range r.Headers {
		d.Headers[i] = [2][]byte{[]byte(h.Key), h.Value}
		if h.Value != nil && isText(h.Value) && len(h.Value) <= message.MaxHeaderBytes && isText([]byte(h.Key)) && !plain {
			event.Headers[h.Key] = string(h.Value)
		}
		if h.Key == HeaderDelivery {
			if id, err := uuid.ParseBytes(h.Value); err == nil {
				d.DeliveryID = &id
			}
		}
	}
	args, err := event.Args()
	if err != nil {
		return nil, err
	}
	d.Event = json.RawMessage(args)
	for i, a := range f.Attempts[max(len(f.Attempts)-maxAttempts, 0):] {
		at := a.At
		if at.IsZero() { // the envelope does not say it; it was not after the last attempt
			at = failedAt
		}
		d.Errors = append(d.Errors, attemptError{storableTime(at), i + 1, storable(a.Error), storable(a.Trace)})
	}
	failure := f.Error
	if f.Malformed != "" {
		failure = riverdlq.Error{
			Type: "MALFORMED_RECORD", Class: riverdlq.ClassMalformed, Message: f.Malformed, Context: failure.Context,
		}
	}
	if failure.Message == "" && failure.Err != nil {
		failure.Message = failure.Err.Error()
	}
	failure.Message = cmp.Or(storable(failure.Message), "the record names no error")
	d.Error = failure.Message
	d.Errors = append(d.Errors, attemptError{failedAt, d.Attempts, d.Error, storable(f.Trace)})
	d.Metadata, err = json.Marshal(map[string]report{riverdlq.MetadataKey: {
		Attempt: d.Attempts, Type: storable(failure.Type), Code: storable(failure.Code), Class: failure.Class,
		Title: storable(failure.Title), Message: failure.Message, Context: contextOf(batch, &d, failure.Context),
	}})
	if err != nil {
		return nil, err
	}
	return json.Marshal(d)
}

// contextOf returns the context of an error, with the place of the record under the key record. A context
// that the database cannot hold is left out.
func contextOf(batch *Batch, d *stored, context map[string]any) json.RawMessage {
	place := map[string]any{
		"cluster": batch.Cluster, "topic": batch.Topic, "partition": batch.Partition.Partition, "offset": d.Offset,
		"time": d.At.UTC().Format(time.RFC3339Nano), "form": d.Form,
	}
	for key, value := range map[string]*string{"group": d.Group, "node": d.Node, "originalTopic": d.OriginalTopic} {
		if value != nil {
			place[key] = *value
		}
	}
	if d.OriginalPartition != nil {
		place["originalPartition"] = *d.OriginalPartition
	}
	if d.OriginalOffset != nil {
		place["originalOffset"] = *d.OriginalOffset
	}
	all := map[string]any{}
	if raw, err := json.Marshal(context); err == nil && context != nil && message.CheckJSON(raw) == nil {
		maps.Copy(all, context)
	}
	all["record"] = place
	raw, err := json.Marshal(all)
	if err != nil { // not for texts and integers
		return json.RawMessage("{}")
	}
	return raw
}

// payload returns the form of a record's value, and what is shown of it. Of bytes that are no text, only
// their number and hash are shown: masks find nothing in encoded bytes. Neither do they in JSON that the
// database cannot hold.
func (r *Record) payload(most int, plain bool) (form string, payload json.RawMessage) {
	switch {
	case r.Value == nil:
		return FormNull, json.RawMessage("null")
	case len(r.Value) > most:
		form = FormAbsent
	case plain:
		form = FormBinary
	case r.Payload != nil && message.CheckJSON(r.Payload) == nil:
		return FormDecoded, r.Payload
	case message.CheckJSON(r.Value) == nil:
		return FormJSON, bytes.TrimSpace(r.Value)
	case isText(r.Value) && !hasFields(r.Value):
		raw, err := json.Marshal(string(r.Value))
		if err == nil {
			return FormText, raw
		}
		form = FormBinary
	default:
		form = FormBinary
	}
	sum := sha256.Sum256(r.Value)
	raw, err := json.Marshal(map[string]any{"bytes": len(r.Value), "sha256": hex.EncodeToString(sum[:])})
	if err != nil { // not for an integer and a text
		raw = json.RawMessage("null")
	}
	return form, raw
}

// Content returns the hash of a record's key and value, by which a record that comes back without its
// headers is recognized. Null is not empty.
func Content(key, value []byte) []byte {
	hash := sha256.New()
	for _, part := range [][]byte{key, value} {
		if part != nil {
			sum := sha256.Sum256(part)
			hash.Write(sum[:])
		}
		hash.Write([]byte{'/'})
	}
	return hash.Sum(nil)
}

// orderingKey returns a record's key as an ordering key: the key itself, or its hash if the key is no
// short text, or has fields that masks by path would not find.
func orderingKey(key []byte) *string {
	if key == nil {
		return nil
	}
	text := string(key)
	if !isText(key) || len(key) > maxKeyBytes || text == "" || hasFields(key) {
		sum := sha256.Sum256(key)
		text = "sha256:" + hex.EncodeToString(sum[:])
	}
	return &text
}

// hasFields reports whether a text may be a JSON object or array.
func hasFields(text []byte) bool {
	text = bytes.TrimSpace(text)
	return bytes.HasPrefix(text, []byte("{")) || bytes.HasPrefix(text, []byte("["))
}

// isText reports whether the database can hold bytes as text.
func isText(raw []byte) bool { return utf8.Valid(raw) && bytes.IndexByte(raw, 0) < 0 }

// storable replaces what the database cannot hold in a text.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// storableTime returns the nearest time that JSON and the database can hold: a record may have any.
func storableTime(at time.Time) time.Time {
	at = at.UTC()
	switch year := at.Year(); {
	case year < 1:
		return time.Time{}
	case year > 9999:
		return time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC)
	}
	return at
}

// known returns nil for an empty text.
func known(text string) *string {
	if text == "" {
		return nil
	}
	text = storable(text)
	return &text
}
