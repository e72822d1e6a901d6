package kafka

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/dlqd/dlqd/internal/policy"
)

// "from: latest" leaves out the records that existed when reading began. A topic that is found later is read from its
// start.
func TestReader_ReadsNewTopicsFromTheirStart(t *testing.T) {
	t.Parallel()
	for _, group := range []string{"", "dlqd"} {
		b := setup(t, kfake.SeedTopics(1, "dlq.a"))
		b.source.ConsumerGroup, b.source.From = group, policy.FromLatest
		produce(t, b.producer(t), numbered("dlq.a", 0, 0, 10)...)
		b.read(t)
		eventually(t, func() bool {
			b.ledger.mu.Lock()
			defer b.ledger.mu.Unlock()
			return len(b.ledger.positions) == 1
		}, "the position is not stored")
		require.NoError(t, b.cluster.CreateTopic("dlq.b", 1, nil))
		produce(t, b.producer(t), numbered("dlq.b", 0, 0, 3)...)
		eventually(t, func() bool {
			b.ledger.mu.Lock()
			defer b.ledger.mu.Unlock()
			return len(b.ledger.positions) == 2
		}, "the new topic is not read")
		produce(t, b.producer(t), numbered("dlq.b", 0, 3, 5)...)
		eventually(t, func() bool { return slices.Contains(b.ledger.offsets("dlq.b", 0), 4) }, "the new topic is not read")
		require.Equal(t, sequence(5), b.ledger.offsets("dlq.b", 0))

		require.NoError(t, b.cluster.DeleteTopic("dlq.a"))
		require.NoError(t, b.cluster.CreateTopic("dlq.a", 1, nil))
		produce(t, b.producer(t), numbered("dlq.a", 0, 0, 4)...)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 4 },
			"the topic that was made again is not read")
	}
}
