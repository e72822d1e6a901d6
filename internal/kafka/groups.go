package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/dlqd/dlqd/internal/source"
)

// Committed implements source.Broker.
func (b *Broker) Committed(ctx context.Context, cluster, group string) ([]source.Committed, error) {
	c, err := b.client(cluster)
	if err != nil {
		return nil, err
	}
	offsets, err := kadm.NewClient(c.Client).FetchOffsets(ctx, group)
	if errors.Is(err, kerr.GroupIDNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var committed []source.Committed
	var failed error
	offsets.Each(func(o kadm.OffsetResponse) {
		switch {
		case o.Err != nil:
			failed = fmt.Errorf("%s/%d: %w", o.Topic, o.Partition, o.Err)
		case o.At >= 0:
			committed = append(committed, source.Committed{Topic: o.Topic, Partition: o.Partition, Offset: o.At})
		}
	})
	return committed, failed
}

// Groups implements source.Broker. Kafka forgets the offsets of a group without members after 7 days, unless the broker
// is configured otherwise.
func (b *Broker) Groups(ctx context.Context, cluster string, topics []string) (map[string][]string, error) {
	c, err := b.client(cluster)
	if err != nil {
		return nil, err
	}
	admin := kadm.NewClient(c.Client)
	listed, err := admin.ListGroups(ctx)
	if err != nil {
		return nil, err
	}
	names := listed.Groups()
	groups := map[string][]string{}
	if len(names) == 0 {
		return groups, nil
	}
	described, err := admin.DescribeGroups(ctx, names...)
	if err != nil {
		return nil, err
	}
	fetched := admin.FetchManyOffsets(ctx, names...)
	for _, name := range names {
		if err := fetched[name].Err; err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
			return nil, fmt.Errorf("consumer group %s: %w", name, err)
		}
		group := described[name]
		assigned := group.AssignedPartitions()
		for _, topic := range topics {
			reads := len(assigned[topic]) > 0
			for _, offset := range fetched[name].Fetched[topic] {
				reads = reads || offset.Err == nil && offset.At >= 0
			}
			for i := range group.Members {
				if joined, ok := group.Members[i].Join.AsConsumer(); ok {
					reads = reads || slices.Contains(joined.Topics, topic)
				}
			}
			if reads {
				groups[topic] = append(groups[topic], name)
			}
		}
	}
	return groups, nil
}
