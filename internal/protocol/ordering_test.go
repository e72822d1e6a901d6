package protocol_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/protocol"
)

// The test explores all states of two messages of one ordering key, two workers, and processes that may die between any
// two transactions.
func TestOrdering_KeepsInvariants(t *testing.T) {
	t.Parallel()
	states, wrong, trace := protocol.ExploreOrdering(protocol.Rules{})
	t.Logf("%d states", states)
	require.Empty(t, wrong, strings.Join(trace, "\n"))
}

// Under the earlier rule, a message lost its place before its job ended. If the process died in between, the next
// message was sent, and then the old message again.
func TestOrdering_FindsOldMessageSentAfterNext(t *testing.T) {
	t.Parallel()
	earlier := protocol.Rules{PlaceFirst: true}
	_, wrong, trace := protocol.ExploreOrdering(earlier)
	t.Log(strings.Join(trace, "\n"))
	require.Equal(t, protocol.NotBehind, wrong)

	state, wrong := protocol.StartOrdering(), ""
	for _, text := range []string{
		"worker 0 fetches message 0",
		"no message comes before, worker 0",
		"message 0 is delivered, worker 0",
		"the place is released, worker 0",
		"worker 0 dies",
		"worker 0 fetches message 1",
		"no message comes before, worker 0",
		"message 1 is delivered, worker 0",
		"message 0 is rescued",
		"worker 1 fetches message 0",
		"no message comes before, worker 1",
		"message 0 is delivered, worker 1",
	} {
		require.Empty(t, wrong)
		steps := state.Steps(earlier)
		n := slices.IndexFunc(steps, func(s protocol.OrderingStep) bool { return s.Text == text })
		require.GreaterOrEqual(t, n, 0, text)
		state, wrong = steps[n].After, steps[n].Wrong
	}
	require.Equal(t, protocol.NotBehind, wrong)
}
