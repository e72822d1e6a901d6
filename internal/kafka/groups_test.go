package kafka

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dlqd/dlqd/internal/source"
)

func TestGroups_AreThoseWithAMemberOrAnOffset(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "orders", "other"))
	broker := b.broker(t)
	groups, err := broker.Groups(t.Context(), "main", []string{"orders"})
	require.NoError(t, err)
	require.Empty(t, groups["orders"])

	admin := kadm.NewClient(b.producer(t))
	offsets := kadm.Offsets{}
	offsets.AddOffset("orders", 0, 7, -1)
	_, err = admin.CommitOffsets(t.Context(), "audit", offsets)
	require.NoError(t, err)
	offsets = kadm.Offsets{}
	offsets.AddOffset("other", 0, 7, -1)
	_, err = admin.CommitOffsets(t.Context(), "elsewhere", offsets)
	require.NoError(t, err)
	member := b.producer(t, kgo.ConsumerGroup("payments"), kgo.ConsumeTopics("orders"), kgo.DisableAutoCommit())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go member.PollFetches(ctx)
	require.Eventually(t, func() bool {
		groups, err = broker.Groups(t.Context(), "main", []string{"orders", "other"})
		require.NoError(t, err)
		return len(groups["orders"]) == 2
	}, 3*time.Minute, 50*time.Millisecond)
	require.ElementsMatch(t, []string{"audit", "payments"}, groups["orders"])
	require.Equal(t, []string{"elsewhere"}, groups["other"])

	committed, err := broker.Committed(t.Context(), "main", "audit")
	require.NoError(t, err)
	require.Equal(t, []source.Committed{{Topic: "orders", Partition: 0, Offset: 7}}, committed)
	committed, err = broker.Committed(t.Context(), "main", "unknown")
	require.NoError(t, err)
	require.Empty(t, committed)
	_, err = broker.Groups(t.Context(), "missing", []string{"orders"})
	require.ErrorContains(t, err, "no cluster")
}
