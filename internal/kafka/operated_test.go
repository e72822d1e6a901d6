package kafka

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/dlqd/dlqd/internal/source"
)

// history is a ledger that also stores all reports about partitions.
type history struct {
	*ledger

	mu      sync.Mutex
	reports []source.Progress
}

func (h *history) Progress(p source.Progress) {
	h.ledger.Progress(p)
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.Partition.Partition >= 0 {
		h.reports = append(h.reports, p)
	}
}

// While a batch is refused repeatedly, each report has the error.
func TestReader_KeepsTheErrorUntilABatchIsStored(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "dlq.a"))
	produce(t, b.producer(t), numbered("dlq.a", 0, 0, 3)...)
	h := &history{ledger: b.ledger}
	var mu sync.Mutex
	refused := 0
	b.ledger.before = func(_ context.Context, batch source.Batch) error {
		mu.Lock()
		defer mu.Unlock()
		if len(batch.Records) > 0 && refused < 4 {
			refused++
			return errors.New("refused")
		}
		return nil
	}
	broker, err := Open(b.policy)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- broker.(*Broker).read(ctx, b.source, h, 100*time.Millisecond) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done); broker.Close() })
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 3 }, "the batch is not stored")
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 0) == "" }, "the error stays")
	h.mu.Lock()
	defer h.mu.Unlock()
	failed := false
	for _, p := range h.reports {
		failed = failed || p.Error != ""
		if failed && p.Error == "" {
			require.Positive(t, p.Next, "an error is cleared before a batch is stored")
		}
	}
	require.True(t, failed)
}

func TestBroker_TriesASourceWithoutStoring(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(2, "dlq.a", "other"))
	b.source.ReplayTo, b.source.Kind = "in.{*}", "{topic}"
	produce(t, b.producer(t), numbered("dlq.a", 0, 0, 30)...)
	broker, err := Open(b.policy)
	require.NoError(t, err)
	defer broker.Close()
	trial, err := broker.Try(t.Context(), b.source, 3)
	require.NoError(t, err)
	require.Len(t, trial.Topics, 1)
	topic := trial.Topics[0]
	require.Equal(t, "dlq.a", topic.Topic)
	require.Empty(t, topic.Error)
	require.EqualValues(t, 30, topic.Offsets)
	require.Len(t, topic.Records, 3)
	require.EqualValues(t, 27, topic.Records[0].Offset)
	require.Equal(t, "in.a", topic.Records[0].ReplayTo)
	require.Empty(t, b.ledger.values("dlq.a"))

	offset, err := broker.OffsetAt(t.Context(), b.source, "dlq.a", 0, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Zero(t, offset)
	offset, err = broker.OffsetAt(t.Context(), b.source, "dlq.a", 0, time.Now().Add(time.Hour))
	require.NoError(t, err)
	require.EqualValues(t, 30, offset)
}

// The value of a DlqMessage contains the payload that failed. Exactly the bytes of this payload are published.
func TestPublisher_UnwrapsThePayloadOfAProtobuf(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "dlq.a", "in.a"))
	of := protobufSource(t)
	b.source.Envelope, b.source.DescriptorFile, b.source.MessageType = of.Envelope, of.DescriptorFile, of.MessageType
	b.source.Descriptor = of.Descriptor
	broker, err := Open(b.policy)
	require.NoError(t, err)
	defer broker.Close()
	descriptor, err := valueType(b.source)
	require.NoError(t, err)
	field := descriptor.Fields().ByName("stream")
	require.NotNil(t, field)
	payload := []byte{0x7a, 3, 0xff, 0, 1} // an unknown field of the payload
	value := protowire.AppendTag(nil, field.Number(), protowire.BytesType)
	value = protowire.AppendBytes(value, payload)
	other := protowire.AppendBytes(protowire.AppendTag(nil, 200, protowire.BytesType), []byte("x"))
	for _, wrapped := range [][]byte{value, append(append([]byte{}, other...), value...)} {
		_, err = broker.Publish(t.Context(), source.Target{
			Source: "orders", Cluster: "main", Topic: "in.a", Partition: source.Unknown,
		}, source.Message{Value: wrapped})
		require.NoError(t, err)
	}
	for _, record := range b.consume(t, "in.a", 2) {
		require.Equal(t, payload, record.Value)
	}
	for _, broken := range [][]byte{other, {0xff}, {}} {
		_, err = broker.Publish(t.Context(), source.Target{
			Source: "orders", Cluster: "main", Topic: "in.a", Partition: source.Unknown,
		}, source.Message{Value: broken})
		require.ErrorIs(t, err, source.ErrUnpublishable)
	}
}

// After a panic in the work on a partition, that partition is tried again. After a panic in another goroutine, Read
// returns the panic as an error.
func TestReader_ContainsPanics(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(2, "dlq.a"))
	produce(t, b.producer(t), append(numbered("dlq.a", 0, 0, 3), numbered("dlq.a", 1, 0, 3)...)...)
	h := &history{ledger: b.ledger}
	var mu sync.Mutex
	panics := map[bool]int{} // number of panics, by whether the batch had records
	b.ledger.before = func(_ context.Context, batch source.Batch) error {
		mu.Lock()
		defer mu.Unlock()
		if batch.Partition.Partition == 0 && panics[len(batch.Records) > 0] < 2 {
			panics[len(batch.Records) > 0]++
			panic("a fault of the program")
		}
		return nil
	}
	broker, err := Open(b.policy)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- broker.(*Broker).read(ctx, b.source, h, 100*time.Millisecond) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done); broker.Close() })
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 3 }, "the batch is not stored")
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 1)) == 3 }, "the other partition is not read")
	eventually(t, func() bool { return b.ledger.failure("dlq.a", 0) == "" }, "the error stays")
	h.mu.Lock()
	defer h.mu.Unlock()
	stacks := 0
	for _, r := range h.reports {
		if r.Error != "" {
			require.Zero(t, r.Partition.Partition)
			require.Equal(t, "panicked: a fault of the program", r.Error)
		}
		if r.Stack != "" {
			stacks++
			require.Contains(t, r.Stack, "TestReader_ContainsPanics")
		}
	}
	require.Equal(t, 4, stacks, "each panic is logged once")
}
