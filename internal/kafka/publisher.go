package kafka

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// HeaderTimestamp is the header with the time of the original record, as text in milliseconds since 1970. The published
// record has the time of its publication: with an old time, the topic's retention could remove it at once.
const HeaderTimestamp = "dlqd-original-timestamp"

const (
	// publishTimeout limits a publication, unless ctx ends earlier.
	publishTimeout = 30 * time.Second
	// produceTimeout is how long a broker waits for the in-sync replicas.
	produceTimeout = 10 * time.Second
	// maxProduceBytes limits the size of a record in the client. The topic's max.message.bytes may be lower.
	maxProduceBytes = 64 << 20
)

func producerOptions() []kgo.Opt {
	return []kgo.Opt{
		kgo.RequiredAcks(kgo.AllISRAcks()), // with franz-go's idempotent producer, which is its default
		kgo.ProducerLinger(0),
		kgo.ProducerBatchMaxBytes(maxProduceBytes),
		kgo.RecordPartitioner(kgo.BasicConsistentPartitioner(partitioner)),
		kgo.RecordDeliveryTimeout(publishTimeout),
		kgo.ProduceRequestTimeout(produceTimeout),
		kgo.UnknownTopicRetries(2),
		kgo.MetadataMinAge(time.Second),
		kgo.MetadataMaxAge(time.Minute),
	}
}

// partitioner chooses the partition that the record names, if the topic has it. Otherwise it chooses by the key, as
// Kafka's own producers do.
func partitioner(topic string) func(*kgo.Record, int) int {
	byKey := kgo.StickyKeyPartitioner(nil).ForTopic(topic)
	return func(record *kgo.Record, count int) int {
		if original := int(record.Partition); original >= 0 && original < count {
			return original
		}
		return byKey.Partition(record, count)
	}
}

// Publish publishes a record, and returns once all in-sync replicas have it. It fails after publishTimeout; the broker
// may then still store the record.
func (b *Broker) Publish(
	ctx context.Context, target source.Target, message source.Message,
) (source.Acknowledgement, error) {
	c, err := b.client(target.Cluster)
	if err != nil {
		return source.Acknowledgement{}, err
	}
	value, err := b.unwrapped(target.Source, message.Value)
	if err != nil {
		return source.Acknowledgement{}, publishError(target.Topic, err)
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if !c.answers.Load() { // if the cluster refuses the login, a publication would wait until its timeout
		if err := c.Ping(ctx); err != nil {
			return source.Acknowledgement{}, publishError(target.Topic, err)
		}
	}
	record := &kgo.Record{
		Topic: target.Topic, Partition: target.Partition, Key: message.Key, Value: value,
		Headers: published(message),
	}
	done := make(chan error, 1)
	c.Produce(ctx, record, func(_ *kgo.Record, err error) { done <- err })
	select {
	case err = <-done:
	case <-ctx.Done(): // the client cannot withdraw a record that it sent; the broker may store it later
		err = ctx.Err()
	}
	c.answers.Store(err == nil)
	if err != nil {
		return source.Acknowledgement{}, publishError(target.Topic, err)
	}
	return source.Acknowledgement{
		TopicID: topicID(ctx, c.Client, target.Topic), Partition: record.Partition, Offset: record.Offset,
	}, nil
}

// published returns the headers of a record to publish. It omits the envelope's headers: they would grow with each
// failure, until the record exceeds the topic's max.message.bytes.
func published(message source.Message) []kgo.RecordHeader {
	headers := make([]kgo.RecordHeader, 0, len(message.Headers)+1)
	for _, header := range message.Headers {
		if !isEnvelope(header.Key) {
			headers = append(headers, kgo.RecordHeader(header))
		}
	}
	if !message.Time.IsZero() {
		headers = append(headers, kgo.RecordHeader{
			Key: HeaderTimestamp, Value: fmt.Append(nil, message.Time.UnixMilli()),
		})
	}
	return headers
}

// isEnvelope reports whether a framework or dlqd adds a header with this name to a dead letter.
func isEnvelope(key string) bool {
	return key == HeaderTimestamp || slices.ContainsFunc([]string{
		springPrefix, springRetryPrefix + "original-", springRetryPrefix + "exception-",
		springRetryPrefix + "key-exception-", "retry_topic-", connectPrefix, streamsPrefix, sharePrefix,
	}, func(prefix string) bool { return strings.HasPrefix(key, prefix) })
}

// publishError adds a class and a type to an error; dlqd decides by these.
func publishError(topic string, err error) error {
	failure := &riverdlq.Error{Message: fmt.Sprintf("publishing to the topic %s: %s", topic, err), Err: err}
	var broker *kerr.Error
	var network net.Error
	switch {
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge),
		errors.Is(err, kerr.InvalidRecord), errors.Is(err, kerr.InvalidTimestamp), errors.Is(err, errNoPayload):
		failure.Class, failure.Err = riverdlq.ClassValidation, errors.Join(err, source.ErrUnpublishable)
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.InvalidTopicException),
		errors.Is(err, kerr.UnknownTopicID):
		failure.Class, failure.Err = riverdlq.ClassNotFound, errors.Join(err, source.ErrUnpublishable)
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed),
		errors.Is(err, kerr.SaslAuthenticationFailed), errors.Is(err, kerr.TransactionalIDAuthorizationFailed):
		failure.Class = riverdlq.ClassUnauthorized
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, kgo.ErrRecordTimeout),
		errors.Is(err, kgo.ErrRecordRetries), errors.Is(err, io.EOF), errors.As(err, &network),
		errors.As(err, &broker) && broker.Retriable:
		failure.Class = riverdlq.ClassOutage
	}
	if errors.As(err, &broker) {
		failure.Type = broker.Message
	}
	return failure
}
