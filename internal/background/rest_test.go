package background_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
)

// A single turn that hung for minutes does not lengthen the rest. If all turns are long, the rest grows up to its
// limit.
func TestRest_IgnoresOneLongTurn(t *testing.T) {
	t.Parallel()
	rest := &background.Rest{Multiple: 10, Max: 30 * time.Second}
	require.Equal(t, 30*time.Second, rest.After(5*time.Minute), "the median of a single turn")
	require.Equal(t, time.Second, rest.After(100*time.Millisecond))
	for range 3 {
		require.Equal(t, time.Second, rest.After(100*time.Millisecond))
	}
	require.Equal(t, time.Second, rest.After(5*time.Minute))
	require.Equal(t, time.Second, rest.After(5*time.Minute))
	require.Equal(t, 30*time.Second, rest.After(5*time.Minute), "three of five turns are long")
	for range 2 {
		rest.After(200 * time.Millisecond)
	}
	require.Equal(t, 2*time.Second, rest.After(200*time.Millisecond))
}
