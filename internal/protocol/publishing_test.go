package protocol_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/protocol"
)

// The test explores all states of a record of a topic, two redeliveries and two published copies.
func TestPublishing_KeepsInvariants(t *testing.T) {
	t.Parallel()
	states, wrong, trace := protocol.ExplorePublishing(protocol.Rules{})
	t.Logf("%d states", states)
	require.Empty(t, wrong, strings.Join(trace, "\n"))
}

// Each of these rules was or would be a fault, and the explorer finds it.
func TestPublishing_FindsFaults(t *testing.T) {
	t.Parallel()
	for wrong, rules := range map[string]protocol.Rules{
		protocol.FailureStays:     {ComesBackAtOnce: true},
		protocol.PastIsPast:       {KeepsConsumed: true},
		protocol.ReturnedResolves: {SettlesEarly: true},
	} {
		_, found, trace := protocol.ExplorePublishing(rules)
		t.Log(strings.Join(trace, "\n"))
		require.Equal(t, wrong, found)
	}
}
