package kafka

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/dlqd/dlqd/internal/source"
)

// Brokers before Kafka 2.8, and some other brokers that speak its protocol, send no topic ids.
func TestReader_KeepsTopicsWithoutIDsApart(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "dlq.a", "dlq.b"), kfake.MaxVersions(kversion.V2_7_0()))
	producer := b.producer(t)
	produce(t, producer, numbered("dlq.a", 0, 0, 10)...)
	produce(t, producer, numbered("dlq.b", 0, 0, 10)...)
	b.read(t)
	eventually(t, func() bool {
		return len(b.ledger.values("dlq.a")) == 10 && len(b.ledger.values("dlq.b")) == 10
	}, "records")
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	ids := map[string]string{}
	for p := range b.ledger.positions {
		ids[p.TopicID.String()] = p.Topic
	}
	require.Len(t, ids, 2, "the topic's id is what tells positions apart")
}

// A fetch may hold batches of many partitions, each of which unpacks to a multiple of its size. Batches that would
// exceed the limit wait until others are stored.
func TestReader_LimitsUnpackedBatches(t *testing.T) {
	t.Parallel()
	const partitions, size, limit = 12, 4 << 20, 8 << 20
	b := setup(t, kfake.NumBrokers(1), kfake.SeedTopics(partitions, "dlq.a"))
	producer := b.producer(t, kgo.ProducerBatchMaxBytes(2*size), kgo.ProducerBatchCompression(kgo.ZstdCompression()))
	for partition := range int32(partitions) {
		produce(t, producer, &kgo.Record{Topic: "dlq.a", Partition: partition, Value: make([]byte, size)})
		produce(t, producer, &kgo.Record{Topic: "dlq.a", Partition: partition, Value: bytes.Repeat([]byte{1}, size)})
	}
	var once sync.Once
	full, store := make(chan struct{}), make(chan struct{})
	b.ledger.before = func(ctx context.Context, batch source.Batch) error {
		if len(batch.Records) == 0 {
			return nil
		}
		once.Do(func() { close(full) })
		select {
		case <-store:
		case <-ctx.Done():
		}
		return ctx.Err()
	}
	broker, _ := b.readLimited(t, limit)
	<-full
	most := int64(0)
	eventually(t, func() bool {
		most = max(most, broker.unpacker.bytes.Load())
		return most >= limit
	}, "batches are not unpacked")
	close(store)
	eventually(t, func() bool {
		most = max(most, broker.unpacker.bytes.Load())
		return len(b.ledger.values("dlq.a")) == 2*partitions
	}, "batches that waited are not read")
	require.Less(t, most, int64(limit+2*size))
	for partition := range int32(partitions) {
		require.Equal(t, sequence(2), b.ledger.offsets("dlq.a", partition))
		require.Empty(t, b.ledger.failure("dlq.a", partition), "waiting is no error")
	}
}
