package kafka

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// generous limits the wait for something that should happen soon.
const generous = 3 * time.Minute

// ledger is an Appender in memory with the rules of source.Store. TestKafka_RecordGoesBackToItsTopic
// uses the store itself.
type ledger struct {
	mu        sync.Mutex
	positions map[source.Partition]int64
	records   map[source.Partition][]source.Record
	lost      map[source.Partition][][2]int64
	errors    map[source.Partition]string // the last error
	ends      map[source.Partition]int64
	// before, if not nil, is called before each batch, and may refuse it.
	before func(ctx context.Context, batch source.Batch) error
}

func newLedger() *ledger {
	return &ledger{
		positions: map[source.Partition]int64{}, records: map[source.Partition][]source.Record{},
		lost: map[source.Partition][][2]int64{}, errors: map[source.Partition]string{}, ends: map[source.Partition]int64{},
	}
}

func (l *ledger) Position(_ context.Context, partition source.Partition) (int64, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, ok := l.positions[partition]
	return next, ok, nil
}

func (l *ledger) Append(ctx context.Context, batch source.Batch) (source.Stored, error) {
	if l.before != nil {
		if err := l.before(ctx, batch); err != nil {
			return source.Stored{}, err
		}
	}
	if err := ctx.Err(); err != nil {
		return source.Stored{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	next, ok := l.positions[batch.Partition]
	switch {
	case !ok && !batch.Start, batch.First > next && ok && !batch.Start:
		return source.Stored{}, &source.PositionError{Partition: batch.Partition, First: batch.First, Next: next, Known: ok}
	case !ok:
		next = batch.First
	}
	if batch.Lost {
		l.lost[batch.Partition] = append(l.lost[batch.Partition], [2]int64{batch.First, batch.Next})
	}
	for _, record := range batch.Records {
		if record.Offset >= next {
			// Clone: slices of the unpacked batch would keep the batch in memory.
			record.Key, record.Value = bytes.Clone(record.Key), bytes.Clone(record.Value)
			record.Headers = slices.Clone(record.Headers)
			for i := range record.Headers {
				record.Headers[i].Value = bytes.Clone(record.Headers[i].Value)
			}
			l.records[batch.Partition] = append(l.records[batch.Partition], record)
		}
	}
	l.positions[batch.Partition] = max(next, batch.Next)
	return source.Stored{Next: l.positions[batch.Partition]}, nil
}

func (l *ledger) Progress(progress source.Progress) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errors[progress.Partition], l.ends[progress.Partition] = progress.Error, progress.End
}

// offsets returns the stored offsets of a partition. If several topics have had the name, it returns the offsets of all
// of them.
func (l *ledger) offsets(topic string, partition int32) []int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var offsets []int64
	for p, records := range l.records {
		if p.Topic == topic && p.Partition == partition {
			for _, record := range records {
				offsets = append(offsets, record.Offset)
			}
		}
	}
	return offsets
}

// values returns the values of a topic, in order of partitions and offsets.
func (l *ledger) values(topic string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var values []string
	for p, records := range l.records {
		if p.Topic == topic {
			for _, record := range records {
				values = append(values, string(record.Value))
			}
		}
	}
	slices.Sort(values)
	return values
}

func (l *ledger) failure(topic string, partition int32) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p, failure := range l.errors {
		if p.Topic == topic && p.Partition == partition && failure != "" {
			return failure
		}
	}
	return ""
}

type bundle struct {
	cluster *kfake.Cluster
	policy  *policy.Policy
	source  *policy.TopicSource
	ledger  *ledger
}

// testBrokers are the brokers of a cluster for tests (make trial-kafka); empty for kfake.
var testBrokers = os.Getenv("DLQD_TEST_KAFKA")

func setup(t *testing.T, opts ...kfake.Opt) *bundle {
	t.Helper()
	if testBrokers != "" {
		t.Skip("this test needs kfake")
	}
	cluster, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(2)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	b := newBundle(cluster.ListenAddrs())
	b.cluster = cluster
	return b
}

// setupTopics returns a bundle whose cluster has these topics, all empty. On the cluster for tests, it deletes the
// topics and the consumer group dlqd first.
func setupTopics(t *testing.T, partitions int32, names ...string) *bundle {
	t.Helper()
	if testBrokers == "" {
		return setup(t, kfake.SeedTopics(partitions, names...))
	}
	b := newBundle(strings.Split(testBrokers, ","))
	admin := kadm.NewClient(b.producer(t))
	eventually(t, func() bool { // a cluster deletes topics some time after its answer
		_, err := admin.DeleteTopics(t.Context(), names...)
		require.NoError(t, err)
		_, err = admin.DeleteGroups(t.Context(), b.source.ConsumerGroup)
		require.NoError(t, err)
		made, err := admin.CreateTopics(t.Context(), partitions, -1, nil, names...)
		require.NoError(t, err)
		return made.Error() == nil
	}, "the topics are not made")
	return b
}

func newBundle(brokers []string) *bundle {
	b := &bundle{ledger: newLedger()}
	b.source = &policy.TopicSource{
		Name: "orders", Cluster: "main", Topics: policy.Words{"dlq.*"}, Envelope: policy.EnvelopeNone,
		ConsumerGroup: "dlqd", From: policy.FromEarliest, MaxRecordBytes: 1 << 20,
	}
	b.policy = &policy.Policy{Sources: policy.Sources{
		Clusters: map[string]*policy.Cluster{"main": {Name: "main", Brokers: brokers}},
		Sources:  map[string]*policy.TopicSource{"orders": b.source},
	}}
	return b
}

// producer returns a client that produces to the partition that a record names.
func (b *bundle) producer(t *testing.T, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(b.policy.Sources.Clusters["main"].Brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.MetadataMinAge(100 * time.Millisecond),
	}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

// read starts a reader, and returns a function that stops it.
func (b *bundle) read(t *testing.T) (stop func()) {
	t.Helper()
	_, stop = b.readLimited(t, unpackedBytes)
	return stop
}

// readLimited starts a reader with a limit on unpacked batches.
func (b *bundle) readLimited(t *testing.T, limit int64) (broker *Broker, stop func()) {
	t.Helper()
	opened, err := Open(b.policy)
	require.NoError(t, err)
	broker = opened.(*Broker)
	broker.unpacker, err = newUnpacker(limit)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- broker.read(ctx, b.source, b.ledger, 100*time.Millisecond)
		broker.Close()
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(generous):
				require.Fail(t, "the reader did not stop")
			}
		})
	}
	t.Cleanup(stop)
	return broker, stop
}

func produce(t *testing.T, client *kgo.Client, records ...*kgo.Record) {
	t.Helper()
	require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
}

func numbered(topic string, partition int32, from, to int) []*kgo.Record {
	var records []*kgo.Record
	for i := from; i < to; i++ {
		records = append(records, &kgo.Record{
			Topic: topic, Partition: partition, Value: fmt.Appendf(nil, "%d/%06d", partition, i),
		})
	}
	return records
}

func sequence(n int) []int64 {
	offsets := make([]int64, n)
	for i := range offsets {
		offsets[i] = int64(i)
	}
	return offsets
}

func eventually(t *testing.T, condition func() bool, message string, args ...any) {
	t.Helper()
	require.Eventually(t, condition, generous, 20*time.Millisecond, append([]any{message}, args...)...)
}

// Four readers of a group restart while records are produced. Each offset is stored once.
func TestReader_StoresEveryOffsetOnce(t *testing.T) {
	t.Parallel()
	const partitions, each = 8, 600
	b := setupTopics(t, partitions, "dlq.a")
	producer := b.producer(t)
	var producing errgroup.Group
	for partition := range int32(partitions) {
		producing.Go(func() error {
			for i := 0; i < each; i += 50 {
				if err := producer.ProduceSync(t.Context(), numbered("dlq.a", partition, i, i+50)...).FirstErr(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	stops := make([]func(), 4)
	for i := range stops {
		stops[i] = b.read(t)
	}
	for i := range stops {
		stored := len(b.ledger.values("dlq.a"))
		eventually(t, func() bool {
			now := len(b.ledger.values("dlq.a"))
			return now > stored || now == partitions*each
		}, "nothing was stored")
		stops[i]()
		stops[i] = b.read(t)
	}
	require.NoError(t, producing.Wait())
	eventually(t, func() bool { return len(b.ledger.values("dlq.a")) >= partitions*each }, "records are missing")
	for partition := range int32(partitions) {
		require.Equal(t, sequence(each), b.ledger.offsets("dlq.a", partition))
	}
	offsets := kadm.NewClient(producer)
	eventually(t, func() bool { // the offsets of the group follow
		committed, err := offsets.FetchOffsets(t.Context(), "dlqd")
		require.NoError(t, err)
		for partition := range int32(partitions) {
			if offset, ok := committed.Lookup("dlq.a", partition); !ok || offset.At != each {
				return false
			}
		}
		return true
	}, "the group's offsets are not those of the database")
}

// Without a consumer group, one reader reads all partitions, also partitions that are added later.
func TestReader_ReadsWithoutGroup(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(2, "dlq.a", "other"))
	b.source.ConsumerGroup = ""
	producer := b.producer(t)
	produce(t, producer, numbered("dlq.a", 0, 0, 20)...)
	produce(t, producer, numbered("other", 0, 0, 20)...)
	stop := b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 20 }, "the first records are missing")
	_, err := kadm.NewClient(producer).CreatePartitions(t.Context(), 1, "dlq.a")
	require.NoError(t, err)
	require.NoError(t, b.cluster.CreateTopic("dlq.b", 1, nil))
	producer = b.producer(t)
	produce(t, producer, numbered("dlq.a", 2, 0, 20)...)
	produce(t, producer, numbered("dlq.b", 0, 0, 20)...)
	eventually(t, func() bool {
		return len(b.ledger.offsets("dlq.a", 2)) == 20 && len(b.ledger.offsets("dlq.b", 0)) == 20
	}, "an added partition or topic is not read")
	stop()
	produce(t, producer, numbered("dlq.a", 0, 20, 40)...)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 40 }, "the reader did not continue")
	require.Equal(t, sequence(40), b.ledger.offsets("dlq.a", 0))
	require.Empty(t, b.ledger.values("other"))
}

// A reader with a consumer group also reads a topic that appears while it runs.
func TestReader_FindsTopicsWhileRunning(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.read(t)
	require.NoError(t, b.cluster.CreateTopic("dlq.late", 3, nil))
	produce(t, b.producer(t), numbered("dlq.late", 2, 0, 10)...)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.late", 2)) == 10 }, "the topic is not read")
}

// The database was restored to an older state. The reader starts at the position in the database, not at the offset
// that the group has committed.
func TestReader_BeginsAtThePositionInTheDatabase(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	produce(t, b.producer(t), numbered("dlq.a", 0, 0, 30)...)
	stop := b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 30 }, "records are missing")
	stop()
	b.ledger.mu.Lock()
	for partition := range b.ledger.records {
		b.ledger.records[partition], b.ledger.positions[partition] = b.ledger.records[partition][:7], 7
	}
	b.ledger.mu.Unlock()
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 30 }, "records are missing")
	require.Equal(t, sequence(30), b.ledger.offsets("dlq.a", 0))
}

// The position moves while the reader runs. The reader seeks to the new position and reads again.
func TestReader_SeeksToAPositionThatMoved(t *testing.T) {
	t.Parallel()
	for _, group := range []string{"", "dlqd"} {
		b := setupTopics(t, 1, "dlq.a")
		b.source.ConsumerGroup = group
		producer := b.producer(t)
		produce(t, producer, numbered("dlq.a", 0, 0, 30)...)
		b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 30 }, "records are missing")
		b.ledger.mu.Lock()
		for partition := range b.ledger.records {
			b.ledger.records[partition], b.ledger.positions[partition] = nil, 0
		}
		b.ledger.mu.Unlock()
		produce(t, producer, numbered("dlq.a", 0, 30, 31)...)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 31 }, "records are missing")
		require.Equal(t, sequence(31), b.ledger.offsets("dlq.a", 0))
	}
}

// With "from: latest", the reader skips records from before its first start, and reads records that arrive while it is
// stopped.
func TestReader_BeginsAtTheEnd(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	b.source.From = policy.FromLatest
	producer := b.producer(t)
	produce(t, producer, numbered("dlq.a", 0, 0, 10)...)
	stop := b.read(t)
	eventually(t, func() bool {
		b.ledger.mu.Lock()
		defer b.ledger.mu.Unlock()
		return len(b.ledger.positions) == 1
	}, "the position is not stored")
	stop()
	produce(t, producer, numbered("dlq.a", 0, 10, 12)...)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 2 }, "records are missing")
	require.Equal(t, []int64{10, 11}, b.ledger.offsets("dlq.a", 0))
}

// Keys, values and headers are stored unchanged: null differs from empty, and headers keep their order.
func TestReader_KeepsBytes(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	produce(t, b.producer(t),
		&kgo.Record{Topic: "dlq.a", Key: nil, Value: nil},
		&kgo.Record{Topic: "dlq.a", Key: []byte{}, Value: []byte{}, Headers: []kgo.RecordHeader{
			{Key: "h", Value: []byte("2")}, {Key: "h"}, {Key: "", Value: []byte{}}, {Key: "h", Value: []byte{0xff, 0}},
		}},
		&kgo.Record{Topic: "dlq.a", Key: []byte{0, 0xff}, Value: []byte("\x00\xff{}")},
	)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 3 }, "records are missing")
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	for _, records := range b.ledger.records {
		require.True(t, records[0].Key == nil && records[0].Value == nil, "null became empty")
		require.True(t, records[1].Key != nil && records[1].Value != nil, "empty became null")
		require.Equal(t, []source.Header{
			{Key: "h", Value: []byte("2")}, {Key: "h"}, {Key: "", Value: []byte{}}, {Key: "h", Value: []byte{0xff, 0}},
		}, records[1].Headers)
		require.Equal(t, []byte{0, 0xff}, records[2].Key)
		require.Equal(t, []byte("\x00\xff{}"), records[2].Value)
		require.WithinDuration(t, time.Now(), records[0].Time, generous)
	}
}

// Records of aborted transactions are not stored. The position ends after the last transaction marker.
func TestReader_SkipsAbortedTransactions(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	producer := b.producer(t, kgo.TransactionalID("tests"))
	for i, end := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit, kgo.TryAbort} {
		require.NoError(t, producer.BeginTransaction())
		produce(t, producer, numbered("dlq.a", 0, 2*i, 2*i+2)...)
		require.NoError(t, producer.EndTransaction(t.Context(), end))
	}
	b.read(t)
	eventually(t, func() bool {
		b.ledger.mu.Lock()
		defer b.ledger.mu.Unlock()
		for partition, next := range b.ledger.positions {
			return next == 12 && b.ledger.ends[partition] == 12 // including four transaction markers
		}
		return false
	}, "the position is not the end")
	require.Equal(t, []string{"0/000000", "0/000001", "0/000004", "0/000005"}, b.ledger.values("dlq.a"))
}

// Compaction leaves gaps between offsets.
func TestReader_CrossesCompactedGaps(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.cluster.CreateTopic("dlq.a", 1, map[string]string{
		"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "segment.bytes": "100",
	}))
	producer := b.producer(t)
	for i := range 50 {
		produce(t, producer, &kgo.Record{Topic: "dlq.a", Key: fmt.Append(nil, "k", i%5), Value: fmt.Append(nil, i)})
	}
	b.cluster.Compact()
	b.read(t)
	eventually(t, func() bool {
		b.ledger.mu.Lock()
		defer b.ledger.mu.Unlock()
		for _, next := range b.ledger.positions {
			return next == 50
		}
		return false
	}, "the position is not the end")
	require.Less(t, len(b.ledger.offsets("dlq.a", 0)), 50, "the cluster did not compact the topic")
	require.Contains(t, b.ledger.offsets("dlq.a", 0), int64(49))
}

// Offsets that the broker removed before they were read are recorded as lost.
func TestReader_RecordsLostOffsets(t *testing.T) {
	t.Parallel()
	for _, group := range []string{"", "dlqd"} {
		b := setup(t, kfake.SeedTopics(1, "dlq.a"))
		b.source.ConsumerGroup = group
		producer := b.producer(t)
		produce(t, producer, numbered("dlq.a", 0, 0, 10)...)
		stop := b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 10 }, "records are missing")
		stop()
		produce(t, producer, numbered("dlq.a", 0, 10, 30)...)
		require.NoError(t, b.cluster.DeleteRecords("dlq.a", 0, 25))
		b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 15 }, "records are missing")
		b.ledger.mu.Lock()
		for partition := range b.ledger.positions {
			require.Equal(t, [][2]int64{{10, 25}}, b.ledger.lost[partition])
		}
		b.ledger.mu.Unlock()
	}
}

// A position beyond the partition's end is an error. The reader reads nothing, because the offsets may have another
// meaning now.
func TestReader_StopsBeyondTheEnd(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 2, "dlq.a")
	produce(t, b.producer(t), append(numbered("dlq.a", 0, 0, 5), numbered("dlq.a", 1, 0, 5)...)...)
	b.ledger.positions[b.partition(t, "dlq.a", 0)] = 9
	b.read(t)
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 0) != "" }, "no error is reported")
	require.Contains(t, b.ledger.failure("dlq.a", 0), "the position is 9, but the partition ends at 5")
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 1)) == 5 }, "the other partition is not read")
	require.Empty(t, b.ledger.offsets("dlq.a", 0))
}

// partition identifies a partition, with the current id of its topic.
func (b *bundle) partition(t *testing.T, topic string, number int32) source.Partition {
	t.Helper()
	topics, err := kadm.NewClient(b.producer(t)).ListTopics(t.Context(), topic)
	require.NoError(t, err)
	return source.Partition{Cluster: "main", Topic: topic, TopicID: uuid.UUID(topics[topic].ID), Partition: number}
}

// A topic that was deleted and created again is another topic, although its offsets are the same.
func TestReader_ReadsATopicThatWasMadeAgain(t *testing.T) {
	t.Parallel()
	for _, group := range []string{"", "dlqd"} {
		b := setup(t, kfake.SeedTopics(1, "dlq.a", "dlq.b"))
		b.source.ConsumerGroup = group
		produce(t, b.producer(t), numbered("dlq.a", 0, 0, 10)...)
		b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 10 }, "records are missing")
		require.NoError(t, b.cluster.DeleteTopic("dlq.a"))
		require.NoError(t, b.cluster.CreateTopic("dlq.a", 1, nil))
		produce(t, b.producer(t), numbered("dlq.a", 0, 100, 120)...)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 30 }, "the new topic is not read")
		produce(t, b.producer(t), numbered("dlq.b", 0, 0, 3)...)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.b", 0)) == 3 }, "the other topic is not read")
		require.NoError(t, b.cluster.DeleteTopic("dlq.b"))
		produce(t, b.producer(t), numbered("dlq.a", 0, 120, 125)...)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 35 }, "a deleted topic holds up another")
	}
}

// A partition whose batches hang, and one whose batches are refused, do not delay other partitions.
func TestReader_OnePartitionHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 3, "dlq.a")
	release := make(chan struct{})
	b.ledger.before = func(ctx context.Context, batch source.Batch) error {
		switch {
		case len(batch.Records) == 0:
		case batch.Partition.Partition == 0:
			select {
			case <-release:
			case <-ctx.Done():
			}
		case batch.Partition.Partition == 1 && batch.First <= 17 && batch.Next > 17:
			return fmt.Errorf("refused")
		}
		return nil
	}
	producer := b.producer(t)
	for partition := range int32(3) {
		produce(t, producer, numbered("dlq.a", partition, 0, 40)...)
	}
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 2)) == 40 }, "a partition is held up")
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 1)) == 17 },
		"records before the refused one are held up")
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 1) == "refused" }, "the refusal is not reported")
	close(release)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 40 }, "a partition did not continue")
	require.Equal(t, sequence(40), b.ledger.offsets("dlq.a", 0))
}

// A batch that unpacks to too many bytes stops its partition. Records before the batch are stored, and an operator can
// move the position past the batch.
func TestReader_StopsAtABatchThatUnpacksToTooMuch(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(2, "dlq.a"))
	producer := b.producer(t, kgo.ProducerBatchMaxBytes(256<<20), kgo.BrokerMaxWriteBytes(512<<20),
		kgo.MaxBufferedBytes(512<<20), kgo.ProducerBatchCompression(kgo.ZstdCompression()),
		kgo.MaxDecompressBatchBytes(512<<20))
	produce(t, producer, numbered("dlq.a", 0, 0, 3)...)
	produce(t, producer, &kgo.Record{Topic: "dlq.a", Partition: 0, Value: bytes.Repeat([]byte{0}, batchBytes+1)})
	produce(t, producer, numbered("dlq.a", 0, 4, 6)...)
	produce(t, producer, numbered("dlq.a", 1, 0, 3)...)
	b.read(t)
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 0) != "" }, "no error is reported")
	require.Contains(t, b.ledger.failure("dlq.a", 0), "from offset 3 to 3 unpacks to more than 128 MiB")
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 1)) == 3 }, "the other partition is held up")
	require.Equal(t, sequence(3), b.ledger.offsets("dlq.a", 0))
	partition := b.partition(t, "dlq.a", 0)
	b.ledger.mu.Lock()
	b.ledger.positions[partition] = 4
	b.ledger.mu.Unlock()
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 5 }, "the partition does not continue")
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 0) == "" }, "the error stays")
}

// Every compression is read.
func TestReader_ReadsEveryCompression(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	for i, codec := range []kgo.CompressionCodec{
		kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression(),
	} {
		produce(t, b.producer(t, kgo.ProducerBatchCompression(codec)), &kgo.Record{
			Topic: "dlq.a", Value: bytes.Repeat(fmt.Append(nil, i), 2000),
		})
	}
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 5 }, "records are missing")
	for i, value := range b.ledger.values("dlq.a") {
		require.Equal(t, bytes.Repeat(fmt.Append(nil, i), 2000), []byte(value))
	}
}
