// Package sourcetest has a broker in memory, for tests that do not depend on the kind of broker.
package sourcetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// Partitions is the number of partitions of each topic.
const Partitions = 3

// Headers of dead letters: the error, the original topic, the place in it, and the consumer group.
const (
	HeaderError = "error"
	HeaderTopic = "original-topic"
	HeaderPlace = "original-place" // partition/offset
	HeaderGroup = "group"
)

// Broker is a broker in memory. A topic exists from its first record on.
type Broker struct {
	// Refuse, if not nil, is called before a record is published. If it returns an error, Publish returns that
	// and does not store the record.
	Refuse func(target source.Target, m source.Message) error

	mu        sync.Mutex
	committed map[string][]source.Committed // by consumer group
	failure   error                         // of Groups
	topics    map[string]*topic
	grown     chan struct{} // closed when a record comes
}

type topic struct {
	id         uuid.UUID
	partitions [Partitions][]source.Message
}

// New returns an empty broker.
func New() *Broker { return &Broker{topics: map[string]*topic{}, grown: make(chan struct{})} }

// Open implements source.Open.
func (b *Broker) Open(*policy.Policy) (source.Broker, error) { return b, nil }

// Close implements source.Broker.
func (b *Broker) Close() {}

// Publish implements source.Publisher.
func (b *Broker) Publish(_ context.Context, target source.Target, m source.Message) (source.Acknowledgement, error) {
	if b.Refuse != nil {
		if err := b.Refuse(target, m); err != nil {
			return source.Acknowledgement{}, err
		}
	}
	return b.Add(target.Topic, m), nil
}

// Original implements source.Publisher.
func (b *Broker) Original(_ context.Context, _ string, at source.Origin, _ time.Time) (source.Message, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.topics[at.Topic]; t != nil && at.Offset < int64(len(t.partitions[at.Partition])) {
		return t.partitions[at.Partition][at.Offset], nil
	}
	return source.Message{}, fmt.Errorf("%w: there is no such record", source.ErrGone)
}

// Encode implements source.Publisher. It returns the edited payload in brackets.
func (b *Broker) Encode(_ context.Context, _ string, _ []byte, edited json.RawMessage) ([]byte, error) {
	return fmt.Appendf(nil, "[%s]", edited), nil
}

// Add adds a record to a topic.
func (b *Broker) Add(name string, m source.Message) source.Acknowledgement {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.topics[name] == nil {
		b.topics[name] = &topic{id: uuid.New()}
	}
	hash := fnv.New32a()
	_, _ = hash.Write(m.Key)
	p := int32(hash.Sum32() % Partitions)
	records := &b.topics[name].partitions[p]
	*records = append(*records, m)
	close(b.grown)
	b.grown = make(chan struct{})
	return source.Acknowledgement{Partition: p, Offset: int64(len(*records) - 1)}
}

// Commit sets the offset that a consumer group reads next.
func (b *Broker) Commit(group, topic string, partition int32, next int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.committed == nil {
		b.committed = map[string][]source.Committed{}
	}
	b.committed[group] = append(b.committed[group], source.Committed{Topic: topic, Partition: partition, Offset: next})
}

// Fail makes Groups return an error.
func (b *Broker) Fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failure = err
}

// Committed implements source.Broker.
func (b *Broker) Committed(_ context.Context, _, group string) ([]source.Committed, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.committed[group]), nil
}

// Groups implements source.Broker: a group reads the topics in which it has committed.
func (b *Broker) Groups(_ context.Context, _ string, topics []string) (map[string][]string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failure != nil {
		return nil, b.failure
	}
	groups := map[string][]string{}
	for _, topic := range topics {
		for _, name := range slices.Sorted(maps.Keys(b.committed)) {
			if slices.ContainsFunc(b.committed[name], func(c source.Committed) bool { return c.Topic == topic }) {
				groups[topic] = append(groups[topic], name)
			}
		}
	}
	return groups, nil
}

// Records returns the records of a topic, by partition.
func (b *Broker) Records(name string) []source.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.topics[name] == nil {
		return nil
	}
	return slices.Concat(b.topics[name].partitions[:]...)
}

// OffsetAt implements source.Broker.
func (b *Broker) OffsetAt(
	_ context.Context, _ *policy.TopicSource, name string, partition int32, at time.Time,
) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.topics[name] == nil || partition < 0 || partition >= Partitions {
		return 0, errors.New("there is no such partition")
	}
	records := b.topics[name].partitions[partition]
	i := slices.IndexFunc(records, func(m source.Message) bool { return !m.Time.Before(at) })
	if i < 0 {
		i = len(records)
	}
	return int64(i), nil
}

// Try implements source.Broker.
func (b *Broker) Try(context.Context, *policy.TopicSource, int) (*source.Trial, error) {
	return nil, errors.ErrUnsupported
}

// Read implements source.Broker.
func (b *Broker) Read(ctx context.Context, s *policy.TopicSource, into source.Appender) error {
	for {
		b.mu.Lock()
		grown, topics := b.grown, maps.Clone(b.topics)
		b.mu.Unlock()
		for name, t := range topics {
			if !s.Topics.Match(name) {
				continue
			}
			for p := range int32(Partitions) {
				if err := b.readPartition(ctx, s, into, name, t, p); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-grown:
		}
	}
}

func (b *Broker) readPartition(ctx context.Context, s *policy.TopicSource, into source.Appender, name string, t *topic,
	p int32,
) error {
	at := source.Partition{Cluster: s.Cluster, Topic: name, TopicID: t.id, Partition: p}
	for {
		next, known, err := into.Position(ctx, at)
		if err != nil {
			return err
		}
		b.mu.Lock()
		records := slices.Clone(t.partitions[p])
		b.mu.Unlock()
		end := int64(len(records))
		batch := source.Batch{Partition: at, Source: s.Name, First: next, Next: end, Start: !known}
		for offset := next; offset < end; offset++ {
			batch.Records = append(batch.Records, record(offset, records[offset]))
		}
		if known && next >= end {
			into.Progress(source.Progress{
				Partition: at, Source: s.Name, State: source.StateCaughtUp, Next: next, End: end,
			})
			return nil
		}
		_, err = into.Append(ctx, batch)
		var position *source.PositionError
		if err != nil && !errors.As(err, &position) {
			return err
		}
	}
}

// record returns a dead letter as a reader would.
func record(offset int64, m source.Message) source.Record {
	r := source.Record{Offset: offset, Time: m.Time, Key: m.Key, Value: m.Value, Headers: m.Headers}
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	r.Failure.Original = source.Origin{Partition: source.Unknown, Offset: source.Unknown}
	for _, h := range m.Headers {
		switch h.Key {
		case HeaderError:
			r.Failure.Error = riverdlq.Error{Type: "CONSUMER_ERROR", Class: riverdlq.ClassBusiness, Message: string(h.Value)}
		case HeaderTopic:
			r.Failure.Original.Topic = string(h.Value)
		case HeaderGroup:
			r.Failure.Group = string(h.Value)
		case HeaderPlace:
			_, _ = fmt.Sscanf(string(h.Value), "%d/%d", &r.Failure.Original.Partition, &r.Failure.Original.Offset)
		}
	}
	return r
}
