package kafka

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// trialTime limits how long a trial reads the records of a topic.
const trialTime = 5 * time.Second

// operations are the names of Kafka's operations on topics, by their bit in the operations that a broker allows.
var operations = map[int]string{3: "Read", 4: "Write", 8: "Describe"}

// OffsetAt implements source.Broker.
func (b *Broker) OffsetAt(
	ctx context.Context, s *policy.TopicSource, topic string, partition int32, at time.Time,
) (int64, error) {
	c, err := b.client(s.Cluster)
	if err != nil {
		return 0, err
	}
	offset, err := listOffset(ctx, c.Client, topic, partition, at.UnixMilli())
	if err == nil && offset < 0 { // no record has such a late time
		offset, err = listOffset(ctx, c.Client, topic, partition, newest)
	}
	return offset, err
}

// Try implements source.Broker.
func (b *Broker) Try(ctx context.Context, s *policy.TopicSource, records int) (*source.Trial, error) {
	c, err := b.client(s.Cluster)
	if err != nil {
		return nil, err
	}
	if err := c.Ping(ctx); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", s.Cluster, err)
	}
	request := kmsg.NewPtrMetadataRequest()
	request.IncludeTopicAuthorizedOperations = true
	for _, name := range s.Topics {
		if strings.Contains(name, "*") {
			request.Topics = nil // of all topics
			break
		}
		named := kmsg.NewMetadataRequestTopic()
		named.Topic = new(name)
		request.Topics = append(request.Topics, named)
	}
	response, err := request.RequestWith(ctx, c.Client)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: listing topics: %w", s.Cluster, err)
	}
	trial := &source.Trial{Source: s.Name, Topics: []source.TrialTopic{}}
	for _, t := range response.Topics {
		if t.Topic == nil || !s.Topics.Match(*t.Topic) {
			continue
		}
		found := source.TrialTopic{Topic: *t.Topic, Partitions: len(t.Partitions)}
		for bit, name := range operations {
			if t.AuthorizedOperations >= 0 && t.AuthorizedOperations&(1<<bit) != 0 {
				found.Allowed = append(found.Allowed, name)
			}
		}
		slices.Sort(found.Allowed)
		err := kerr.ErrorForCode(t.ErrorCode)
		if err == nil {
			err = b.tryTopic(ctx, s, &found, records)
		}
		if err != nil {
			found.Error = err.Error()
		}
		trial.Topics = append(trial.Topics, found)
	}
	slices.SortFunc(trial.Topics, func(a, b source.TrialTopic) int { return strings.Compare(a.Topic, b.Topic) })
	return trial, nil
}

// tryTopic reads the last records of a topic's partitions: at most records in all, and those that arrive within
// trialTime.
func (b *Broker) tryTopic(ctx context.Context, s *policy.TopicSource, topic *source.TrialTopic, records int) error {
	of, err := valueType(s)
	if err != nil {
		return err
	}
	c, err := b.client(s.Cluster)
	if err != nil {
		return err
	}
	from, waiting := map[int32]kgo.Offset{}, map[int32]int64{} // by partition: the offset after the last record
	for number := range int32(topic.Partitions) {
		start, err := listOffset(ctx, c.Client, topic.Topic, number, oldest)
		if err != nil {
			return err
		}
		end, err := listOffset(ctx, c.Client, topic.Topic, number, newest)
		if err != nil {
			return err
		}
		topic.Offsets += end - start
		if end > start {
			from[number], waiting[number] = kgo.NewOffset().At(max(start, end-int64(records))), end
		}
	}
	if len(from) == 0 || records == 0 {
		return nil
	}
	opts, err := options(b.policy.Sources.Clusters[s.Cluster])
	if err != nil {
		return err
	}
	reading, err := kgo.NewClient(append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords(),
		kgo.FetchMaxBytes(fetchBytes), kgo.FetchMaxPartitionBytes(partitionBytes), kgo.MaxConcurrentFetches(1),
		kgo.MaxDecompressBatchBytes(batchBytes),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic.Topic: from}))...)
	if err != nil {
		return err
	}
	defer reading.Close()
	ctx, cancel := context.WithTimeout(ctx, trialTime)
	defer cancel()
	for len(waiting) > 0 && len(topic.Records) < records && ctx.Err() == nil {
		fetched := reading.PollRecords(ctx, records)
		if err := fetched.Err0(); err != nil && ctx.Err() == nil {
			return err
		}
		for _, problem := range fetched.Errors() {
			if ctx.Err() == nil {
				return problem.Err
			}
		}
		fetched.EachRecord(func(r *kgo.Record) {
			if r.Offset+1 >= waiting[r.Partition] {
				delete(waiting, r.Partition)
			}
			if r.Attrs.IsControl() || len(topic.Records) >= records {
				return
			}
			record := recordOf(ctx, s, of, b.registries[s.Registry], r)
			topic.Records = append(topic.Records, source.Try(b.policy, s, r.Topic, r.Partition, &record))
		})
	}
	return nil
}
