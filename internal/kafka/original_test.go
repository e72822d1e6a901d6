package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// reference returns the dead letter of a share group that copies no records.
func reference(topic string, partition int32, offset int64) *kgo.Record {
	return &kgo.Record{Topic: "dlq.a", Headers: []kgo.RecordHeader{
		{Key: sharePrefix + "topic", Value: []byte(topic)},
		{Key: sharePrefix + "partition", Value: fmt.Append(nil, partition)},
		{Key: sharePrefix + "offset", Value: fmt.Append(nil, offset)},
		{Key: sharePrefix + "group", Value: []byte("workers")},
	}}
}

// stored returns the stored records of the topic dlq.a once there are n.
func (b *bundle) stored(t *testing.T, n int) []source.Record {
	t.Helper()
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) >= n }, "records are missing")
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	for p, records := range b.ledger.records {
		if p.Partition == 0 {
			require.Len(t, records, n)
			return records
		}
	}
	return nil
}

func original(record source.Record) any { return record.Failure.Error.Context[contextOriginal] }

// A reference gets the key, value and headers of the record that failed. If the topic does not have that record any
// more, the entry says that it is gone.
func TestReader_FetchesTheRecordOfAReference(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 2, "orders", "dlq.a")
	b.source.Envelope = policy.EnvelopeShare
	producer := b.producer(t)
	for i := range 5 {
		produce(t, producer, &kgo.Record{
			Topic: "orders", Partition: 1, Key: fmt.Append(nil, "cus_", i), Value: fmt.Appendf(nil, `{"n": %d}`, i),
			Headers: []kgo.RecordHeader{{Key: "trace", Value: []byte{0xff}}, {Key: "none"}},
		})
	}
	produce(t, producer, &kgo.Record{Topic: "orders", Partition: 1, Key: []byte("tombstone")})
	admin := kadm.NewClient(producer)
	_, err := admin.DeleteRecords(t.Context(), kadm.OffsetsList{{Topic: "orders", Partition: 1, At: 2}}.Offsets())
	require.NoError(t, err)
	early := reference("orders", 1, 3)
	early.Timestamp = time.Now().Add(-time.Hour)
	produce(t, producer, reference("orders", 1, 4), reference("orders", 1, 2), reference("orders", 1, 5),
		reference("orders", 1, 1), reference("orders", 1, 6), reference("orders", 7, 0), reference("none", 0, 0), early)
	b.read(t)
	records := b.stored(t, 8)
	for i, want := range []string{"cus_4", "cus_2"} {
		require.Equal(t, want, string(records[i].Key))
		require.Equal(t, fmt.Sprintf(`{"n": %s}`, want[4:]), string(records[i].Value))
		require.Equal(t, []source.Header{
			{Key: "trace", Value: []byte{0xff}}, {Key: "none"}, {Key: sharePrefix + "topic", Value: []byte("orders")},
		}, records[i].Headers[:3])
		require.Equal(t, "workers", records[i].Failure.Group)
		require.Nil(t, original(records[i]))
	}
	require.Equal(t, "tombstone", string(records[2].Key))
	require.Nil(t, records[2].Value)
	for i, want := range []string{
		"gone: orders/1 has no record at offset 1 any more",
		"gone: orders/1 has no record at offset 6 any more",
		"gone: orders/7 has no record at offset 0 any more",
		"gone: none/0 has no record at offset 0 any more",
		"gone: orders/1 has a later record at offset 3: the topic was made again",
	} {
		require.Equal(t, want, original(records[i+3]))
		require.Nil(t, records[i+3].Key)
		require.Nil(t, records[i+3].Value)
	}
}

// References are small, and the records that they refer to are not: a batch is stored in parts.
func TestReader_LimitsTheRecordsOfReferences(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "orders", "dlq.a")
	b.source.Envelope = policy.EnvelopeShare
	producer := b.producer(t)
	const records, size = 12, 900 << 10
	var references []*kgo.Record
	for i := range int64(records) {
		produce(t, producer, &kgo.Record{Topic: "orders", Value: bytes.Repeat([]byte{byte(i)}, size)})
		references = append(references, reference("orders", 0, i))
	}
	produce(t, producer, references...)
	var most atomic.Int64
	b.ledger.before = func(_ context.Context, batch source.Batch) error {
		bytes := 0
		for i := range batch.Records {
			bytes += len(batch.Records[i].Value)
		}
		most.Store(max(most.Load(), int64(bytes)))
		return nil
	}
	b.read(t)
	for i, record := range b.stored(t, records) {
		require.Len(t, record.Value, size)
		require.Equal(t, byte(i), record.Value[0])
	}
	require.LessOrEqual(t, most.Load(), int64(maxBatchBytes+size))
}

// If the record cannot be fetched, the reference is stored without it, and later records are stored, too.
func TestReader_StoresReferencesThatCannotBeFetched(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "orders", "dlq.a"))
	b.source.Envelope = policy.EnvelopeShare
	producer := b.producer(t)
	produce(t, producer, &kgo.Record{Topic: "orders", Value: []byte("1")})
	var cut atomic.Bool
	cut.Store(true)
	b.cluster.ControlKey(int16(kmsg.Fetch), func(request kmsg.Request) (kmsg.Response, error, bool) {
		b.cluster.KeepControl()
		if fetch, ok := request.(*kmsg.FetchRequest); ok && fetch.MaxBytes == partitionBytes && cut.Load() {
			return nil, errors.New("the connection is cut"), true
		}
		return nil, nil, false
	})
	whole := reference("orders", 0, 0)
	whole.Value = []byte("copied")
	produce(t, producer, reference("orders", 0, 0), whole)
	b.read(t)
	records := b.stored(t, 2)
	require.Nil(t, records[0].Value)
	require.Contains(t, original(records[0]), "fetching orders/0 at offset 0: ")
	require.Equal(t, "copied", string(records[1].Value))
	require.Nil(t, original(records[1]))

	broker := b.broker(t)
	at := source.Origin{Topic: "orders", TopicID: uuid.Nil, Partition: 0, Offset: 0}
	_, err := broker.Original(t.Context(), "main", at, time.Now())
	require.Error(t, err)
	require.NotErrorIs(t, err, source.ErrGone)
	cut.Store(false)
	message, err := broker.Original(t.Context(), "main", at, time.Now())
	require.NoError(t, err)
	require.Equal(t, "1", string(message.Value))
	at.Offset++
	_, err = broker.Original(t.Context(), "main", at, time.Now())
	require.ErrorIs(t, err, source.ErrGone)
}
