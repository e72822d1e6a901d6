package kafka

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kversion"
)

// Brokers before Kafka 2.8, and some that only speak its protocol, send no id of a topic.
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
