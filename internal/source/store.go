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
	// maxAttempts is the number of earlier attempts of a record that the entry keeps: the latest ones.
	maxAttempts = 100
	// maxKeyBytes is the maximum length of dead_letter_queue.ordering_key.
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
	DB     postgres.DB // a connection that renders schema names
	Policy func() *policy.Policy
	Logger *slog.Logger

	mu       sync.Mutex
	progress map[place]Progress // reports that are not written yet
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

// appendInParts stores a batch. If the database refuses the batch, it halves the batch until it finds the refused
// record, and stores that record without its texts.
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
	}
	makeColumns(&params, len(batch.Records))
	for i := range batch.Records {
		r := &batch.Records[i]
		if err := describe(&params, i, source, batch, r, plain); err != nil {
			return Stored{}, fmt.Errorf("%s/%d at offset %d: %w", batch.Topic, batch.Partition.Partition, r.Offset, err)
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

// makeColumns allocates the columns of a batch, with one element per record.
func makeColumns(p *dbsqlc.AppendParams, records int) {
	p.Offsets, p.Ats, p.FailedAts = make([]int64, records), make([]time.Time, records), make([]time.Time, records)
	p.DeliveryIds, p.Kinds, p.OrderingKeys = make([]string, records), make([]string, records), make([]string, records)
	p.Events, p.Errors = make([]json.RawMessage, records), make([]string, records)
	p.Histories, p.Attempts = make([]json.RawMessage, records), make([]int32, records)
	p.Metadata, p.Groups, p.Nodes = make([]json.RawMessage, records), make([]string, records), make([]string, records)
	p.OriginalTopics, p.OriginalTopicIds = make([]string, records), make([]string, records)
	p.OriginalPartitions, p.OriginalOffsets = make([]int32, records), make([]int64, records)
	p.Forms, p.Sizes = make([]string, records), make([]int64, records)
	p.Sha256s, p.Contents = make([][]byte, records), make([][]byte, records)
	p.HeaderKeys, p.HeaderValues = make([]string, records), make([]string, records)
	p.Keys, p.Values = make([][]byte, records), make([][]byte, records)
}

// attemptError is an error of an attempt in River's form.
type attemptError struct {
	At      time.Time `json:"at"`
	Attempt int32     `json:"attempt"`
	Error   string    `json:"error"`
	Trace   string    `json:"trace"`
}

// report is a structured error as riverdlq.Record writes it to a job's metadata.
type report struct {
	Attempt int32          `json:"attempt"`
	Type    string         `json:"type,omitempty"`
	Code    string         `json:"code,omitempty"`
	Class   riverdlq.Class `json:"class,omitempty"`
	Title   string         `json:"title,omitempty"`
	Message string         `json:"message"`
	Context map[string]any `json:"context"`
}

// reported is the metadata of an entry.
type reported struct {
	Error report `json:"dlq:error"` // riverdlq.MetadataKey
}

// recordPlace is the place of a record in the context of its error.
type recordPlace struct {
	Cluster           string `json:"cluster"`
	Topic             string `json:"topic"`
	Partition         int32  `json:"partition"`
	Offset            int64  `json:"offset"`
	Time              string `json:"time"`
	Form              string `json:"form"`
	Group             string `json:"group,omitempty"`
	Node              string `json:"node,omitempty"`
	OriginalTopic     string `json:"originalTopic,omitempty"`
	OriginalPartition *int32 `json:"originalPartition,omitempty"`
	OriginalOffset    *int64 `json:"originalOffset,omitempty"`
}

// describe sets element i of each column of dlq.store_records. If plain is set, it leaves out all texts of the record.
func describe(p *dbsqlc.AppendParams, i int, source *policy.TopicSource, batch *Batch, r *Record, plain bool) error {
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
	at := storableTime(r.Time)
	form, payload := r.payload(source.MaxRecordBytes, plain)
	place := recordPlace{
		Cluster: batch.Cluster, Topic: batch.Topic, Partition: batch.Partition.Partition, Offset: r.Offset,
		Time: at.UTC().Format(time.RFC3339Nano), Form: form,
		Group: storable(cmp.Or(f.Group, source.GroupOf(batch.Topic))), Node: storable(f.Node),
		OriginalTopic: storable(f.Original.Topic),
	}
	p.Offsets[i], p.Forms[i] = r.Offset, form
	p.Ats[i], p.FailedAts[i] = at.Round(time.Microsecond), failedAt.Round(time.Microsecond) // pgx would truncate
	p.Kinds[i] = storable(source.KindOf(batch.Topic, f.Original.Topic))
	p.Groups[i], p.Nodes[i], p.OriginalTopics[i] = place.Group, place.Node, place.OriginalTopic
	p.Keys[i], p.OrderingKeys[i] = r.Key, orderingKey(r.Key)
	p.Sizes[i], p.Sha256s[i] = Unknown, []byte{}
	p.OriginalPartitions[i], p.OriginalOffsets[i] = Unknown, Unknown
	if f.Original.Topic != "" {
		if f.Original.TopicID != uuid.Nil {
			p.OriginalTopicIds[i] = f.Original.TopicID.String()
		}
		if f.Original.Partition >= 0 {
			p.OriginalPartitions[i], place.OriginalPartition = f.Original.Partition, &f.Original.Partition
		}
		if f.Original.Offset >= 0 {
			p.OriginalOffsets[i], place.OriginalOffset = f.Original.Offset, &f.Original.Offset
		}
	}
	sum := sha256.Sum256(r.Value)
	p.Contents[i] = content(r.Key, r.Value, sum)
	if r.Value != nil {
		p.Sizes[i], p.Sha256s[i] = int64(len(r.Value)), sum[:]
	}
	if len(r.Value) <= source.MaxRecordBytes {
		p.Values[i] = r.Value
	}
	event := message.Message{
		MessageID: fmt.Sprintf("%s/%d/%d", batch.Topic, batch.Partition.Partition, r.Offset), Queue: source.Queue,
		EventKind: p.Kinds[i], Payload: payload, Source: source.Name, OrderingKey: p.OrderingKeys[i],
		Headers: map[string]string{},
	}
	keys, values := []byte{'{'}, []byte{'{'}
	for _, h := range r.Headers {
		keys, values = appendBytea(keys, []byte(h.Key)), appendBytea(values, h.Value)
		if h.Value != nil && isText(h.Value) && len(h.Value) <= message.MaxHeaderBytes && isText([]byte(h.Key)) && !plain {
			event.Headers[h.Key] = string(h.Value)
		}
		if h.Key == HeaderDelivery {
			if id, err := uuid.ParseBytes(h.Value); err == nil {
				p.DeliveryIds[i] = id.String()
			}
		}
	}
	p.HeaderKeys[i], p.HeaderValues[i] = string(append(keys, '}')), string(append(values, '}'))
	args, err := event.Args()
	if err != nil {
		return err
	}
	p.Events[i] = json.RawMessage(args)
	earlier := f.Attempts[max(len(f.Attempts)-maxAttempts, 0):]
	p.Attempts[i] = int32(len(earlier)) + 1
	history := make([]attemptError, 0, p.Attempts[i])
	for _, a := range earlier {
		at := a.At
		if at.IsZero() { // the envelope has no time for the attempt; it was not after the last attempt
			at = failedAt
		}
		history = append(history,
			attemptError{storableTime(at), int32(len(history)) + 1, storable(a.Error), storable(a.Trace)})
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
	p.Errors[i] = cmp.Or(storable(failure.Message), "the record names no error")
	history = append(history, attemptError{failedAt, p.Attempts[i], p.Errors[i], storable(f.Trace)})
	if p.Histories[i], err = json.Marshal(history); err != nil {
		return err
	}
	p.Metadata[i], err = json.Marshal(reported{report{
		Attempt: p.Attempts[i], Type: storable(failure.Type), Code: storable(failure.Code), Class: failure.Class,
		Title: storable(failure.Title), Message: p.Errors[i], Context: contextOf(failure.Context, place),
	}})
	return err
}

// contextOf returns the context of an error, with the place of the record under the key "record". It leaves out a
// context that the database cannot store.
func contextOf(context map[string]any, place recordPlace) map[string]any {
	all := map[string]any{}
	if context != nil {
		if raw, err := json.Marshal(context); err == nil && message.CheckJSON(raw) == nil {
			maps.Copy(all, context)
		}
	}
	all["record"] = place
	return all
}

// appendBytea appends an element of an array of bytea in Postgres's text format; nil is NULL.
func appendBytea(array, value []byte) []byte {
	if len(array) > 1 {
		array = append(array, ',')
	}
	if value == nil {
		return append(array, "NULL"...)
	}
	return append(hex.AppendEncode(append(array, `"\\x`...), value), '"')
}

// payload returns the form of a record's value, and the payload to show. If the value is not text, the payload has only
// its length and hash, because masks find nothing in encoded bytes, and why it was not decoded. The same holds for JSON
// that the database cannot store.
func (r *Record) payload(most int, plain bool) (form string, payload json.RawMessage) {
	notDecoded := r.NotDecoded
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
		if r.Payload != nil {
			notDecoded = "the database cannot hold the value as JSON"
		}
	}
	sum := sha256.Sum256(r.Value)
	shown := map[string]any{"bytes": len(r.Value), "sha256": hex.EncodeToString(sum[:])}
	if notDecoded != "" && !plain {
		shown["notDecoded"] = storable(notDecoded)
	}
	raw, err := json.Marshal(shown)
	if err != nil { // impossible for an integer and a text
		raw = json.RawMessage("null")
	}
	return form, raw
}

// Content returns the hash of a record's key and value. By this hash dlqd recognizes a record that returns without its
// headers. A null key or value differs from an empty one.
func Content(key, value []byte) []byte { return content(key, value, sha256.Sum256(value)) }

// content returns the hash of a record's key and value; sum is the hash of the value.
func content(key, value []byte, sum [sha256.Size]byte) []byte {
	text := make([]byte, 0, 2*sha256.Size+2)
	if key != nil {
		keySum := sha256.Sum256(key)
		text = append(text, keySum[:]...)
	}
	text = append(text, '/')
	if value != nil {
		text = append(text, sum[:]...)
	}
	hash := sha256.Sum256(append(text, '/'))
	return hash[:]
}

// orderingKey returns a record's key as an ordering key. If the key is not text, is too long, or may have fields that
// masks by path would not find, it returns a hash of the key. Without a key it returns "".
func orderingKey(key []byte) string {
	if key == nil {
		return ""
	}
	text := string(key)
	if !isText(key) || len(key) > maxKeyBytes || text == "" || hasFields(key) {
		sum := sha256.Sum256(key)
		text = "sha256:" + hex.EncodeToString(sum[:])
	}
	return text
}

// hasFields reports whether a text may be a JSON object or array.
func hasFields(text []byte) bool {
	text = bytes.TrimSpace(text)
	return bytes.HasPrefix(text, []byte("{")) || bytes.HasPrefix(text, []byte("["))
}

// isText reports whether the database can store the bytes as text.
func isText(raw []byte) bool { return utf8.Valid(raw) && bytes.IndexByte(raw, 0) < 0 }

// storable replaces the parts of a text that the database cannot store with U+FFFD.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// storableTime returns the nearest time that JSON and the database can store, because a record may have any time.
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
