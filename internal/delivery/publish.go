package delivery

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// TypePublish is the error type of a record that could not be published.
const TypePublish = "PUBLISH_ERROR"

// contextTopic is the key of the topic in an error's context, if the error is that of a record that could not be
// published.
const contextTopic = "topic"

// errNoClient is the error of a process that was started without a client for sources.
var errNoClient = errors.New("this process has no client for sources")

// publish publishes the record of an entry. It commits the redelivery's id before the publication, and the partition
// and offset of the published record afterwards. If this process dies in between, the job is rescued and the record is
// published twice, with the same id. The status is always 0, because Kafka has none.
func (w *Worker) publish(ctx context.Context, queue *policy.Queue, destination *policy.Destination,
	job *river.Job[Args], _ *metadata, hide func(string) string,
) (status int, err error) {
	queries := dbsqlc.New(w.config.DB)
	record, err := queries.RecordOfJob(ctx, dbsqlc.RecordOfJobParams{Job: job.ID, CreatedAt: job.CreatedAt})
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, requestError(destination,
			errors.New("this job is not the redelivery of a record; a source's queue publishes only records"))
	}
	if err != nil {
		return 0, err
	}
	topic, ok := w.config.Planner().Policy().TargetOf(destination.Source, record.Topic, record.OriginalTopic)
	switch {
	case w.config.Publisher == nil:
		return 0, publishError(ctx, destination, topic, errNoClient, hide)
	case !ok:
		return 0, requestError(destination, fmt.Errorf("no topic to publish to: replayTo is %q, the record is of topic %q, "+
			"and failed in topic %q: the topic is not known, its name is too long, or a source reads it",
			destination.Source.ReplayTo, record.Topic, record.OriginalTopic))
	}
	if destination.Source.Envelope == policy.EnvelopeShare && record.Form == source.FormNull && record.Key == nil &&
		!record.Edited {
		err := w.complete(ctx, destination.Source.Cluster, &record)
		if errors.Is(err, source.ErrGone) {
			return 0, requestError(destination, fmt.Errorf("the share group copies no records into its topic of dead letters "+
				"(errors.deadletterqueue.copy.record.enable), and the record is %w: edit the payload", err))
		}
		if err != nil {
			return 0, publishError(ctx, destination, record.OriginalTopic, err, hide)
		}
	}
	value, err := valueOf(&record, destination.Source, job.Args.Payload)
	if err != nil {
		return 0, requestError(destination, err)
	}
	if record.Edited && record.Form == source.FormDecoded {
		value, err = w.config.Publisher.Encode(ctx, destination.Source.Name, record.Value, job.Args.Payload)
		if err != nil {
			return 0, publishError(ctx, destination, topic, err, hide)
		}
	}
	id, err := queries.BeginDelivery(ctx, dbsqlc.BeginDeliveryParams{
		Entry: record.EntryID, Queue: queue.Name, Job: job.ID, CreatedAt: job.CreatedAt,
		Cluster: destination.Source.Cluster, Topic: topic,
		ConsumerGroup: cmp.Or(record.ConsumerGroup, destination.Source.GroupOf(record.Topic)),
		Content:       source.Content(record.Key, value),
	})
	if err != nil {
		return 0, err
	}
	target := source.Target{
		Source: destination.Source.Name, Cluster: destination.Source.Cluster, Topic: topic, Partition: source.Unknown,
	}
	if topic == record.OriginalTopic {
		target.Partition = record.OriginalPartition
	}
	stored, err := w.config.Publisher.Publish(ctx, target, source.Message{
		Key: record.Key, Value: value, Headers: headersOf(&record, id), Time: record.At,
	})
	if err != nil {
		return 0, publishError(ctx, destination, topic, err, hide)
	}
	return 0, queries.EndDelivery(ctx, dbsqlc.EndDeliveryParams{
		ID: id, Partition: stored.Partition, StoredAt: stored.Offset, TopicID: stored.TopicID,
	})
}

// complete gives a reference of a share group the key, the value and the headers of the record that failed, as if the
// group had copied the record.
func (w *Worker) complete(ctx context.Context, cluster string, record *dbsqlc.RecordOfJobRow) error {
	if record.OriginalPartition < 0 || record.OriginalOffset < 0 {
		return fmt.Errorf("%w: the dead letter does not name its place in the topic %s", source.ErrGone,
			record.OriginalTopic)
	}
	original, err := w.config.Publisher.Original(ctx, cluster, source.Origin{
		Topic: record.OriginalTopic, Partition: record.OriginalPartition, Offset: record.OriginalOffset,
	}, record.At)
	if err != nil {
		return err
	}
	record.Key, record.Value = original.Key, original.Value
	var keys, values [][]byte
	for _, h := range original.Headers {
		keys, values = append(keys, []byte(h.Key)), append(values, h.Value)
	}
	record.HeaderKeys, record.HeaderValues = append(keys, record.HeaderKeys...), append(values, record.HeaderValues...)
	return nil
}

// valueOf returns the value to publish: the record's bytes, unless an operator edited the payload. If the value was
// decoded, an edited payload has to be encoded.
func valueOf(record *dbsqlc.RecordOfJobRow, from *policy.TopicSource, edited json.RawMessage) ([]byte, error) {
	switch {
	case record.Form == source.FormAbsent:
		return nil, errors.New("the record is larger than maxRecordBytes, so only its topic has its value: " +
			"copy it from there")
	case !record.Edited && record.Value == nil && record.Form != source.FormNull: // null would delete the key's record
		return nil, errors.New("the record's value was erased: there is nothing to publish")
	case !record.Edited:
		return record.Value, nil
	case record.Form == source.FormNull && from.Registry != "":
		return nil, errors.New("the record's value is null, so no schema is known for an edited payload")
	case record.Form == source.FormDecoded && record.Value == nil:
		return nil, errors.New("the record's value was erased, and with it the id of its schema: an edited payload " +
			"cannot be encoded")
	case record.Form == source.FormJSON || record.Form == source.FormNull || record.Form == source.FormDecoded:
		return edited, nil
	case record.Form == source.FormText:
		var text string
		if err := json.Unmarshal(edited, &text); err != nil {
			return nil, errors.New("the record's value is a text: an edited payload must be a JSON string")
		}
		return []byte(text), nil
	}
	return nil, errors.New("the record's value is binary: an edited payload cannot be published")
}

// headersOf returns the headers to publish with a record. They have the headers of dlqd for this delivery, in place of
// those of earlier deliveries.
func headersOf(record *dbsqlc.RecordOfJobRow, delivery uuid.UUID) []source.Header {
	headers := make([]source.Header, 0, len(record.HeaderKeys)+3)
	for i, key := range record.HeaderKeys {
		switch string(key) {
		case source.HeaderEntry, source.HeaderDelivery, source.HeaderReplay:
		default:
			headers = append(headers, source.Header{Key: string(key), Value: record.HeaderValues[i]})
		}
	}
	headers = append(headers, source.Header{Key: source.HeaderEntry, Value: []byte(record.EntryID.String())},
		source.Header{Key: source.HeaderDelivery, Value: []byte(delivery.String())})
	if record.RunID != uuid.Nil {
		headers = append(headers, source.Header{Key: source.HeaderReplay, Value: []byte(record.RunID.String())})
	}
	return headers
}

// publishError returns the error of a record whose publication was not acknowledged.
func publishError(ctx context.Context, destination *policy.Destination, topic string, err error,
	hide func(string) string,
) error {
	if structured, ok := errors.AsType[*riverdlq.Error](err); ok {
		failure := *structured
		failure.Message = excerpt(hide(cmp.Or(failure.Message, err.Error())))
		failure.Context = contextOf(destination)
		maps.Copy(failure.Context, structured.Context)
		failure.Context[contextTopic] = topic
		return &failure
	}
	failure := &riverdlq.Error{
		Type: TypePublish, Class: riverdlq.ClassTransient, Message: excerpt(hide(err.Error())),
		Context: contextOf(destination),
	}
	failure.Context[contextTopic] = topic
	switch {
	case errors.Is(err, source.ErrUnpublishable):
		failure.Type, failure.Class = TypeRequest, riverdlq.ClassValidation
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		failure.Type = TypeTimeout
	}
	return failure
}
