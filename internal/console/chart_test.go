package console

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestChart_MergesSigns draws events of one hour. Events of different kinds get separate signs. Events of
// one kind share a sign, which lists six of them and the number of the others.
func TestChart_MergesSigns(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC)
	c := &chart{Title: "Backlog", Step: time.Hour}
	for i := range 25 {
		c.Starts = append(c.Starts, start.Add(time.Duration(i)*time.Hour))
	}
	for i := range 9 {
		c.Markers = append(c.Markers, marker{
			start.Add(12*time.Hour + time.Duration(i)*time.Minute), "policy",
			"policy " + strconv.Itoa(i),
		})
	}
	c.Markers = append(c.Markers, marker{start.Add(12*time.Hour + 5*time.Minute), "replay", "replay by kim"},
		marker{start.Add(18 * time.Hour), "policy", "policy 9"})
	now := c.Starts[len(c.Starts)-1].Add(time.Minute)
	c.Markers = append(c.Markers, marker{now, "breaker", "shop open"}, marker{now, "replay", "replay by ann"},
		marker{now, "policy", "policy 10"})
	signs := c.signs()
	require.Len(t, signs, 6)
	for i := range signs[1:] {
		require.GreaterOrEqual(t, signs[i+1].at-signs[i].at, 1.5-1e-9)
	}
	require.InDelta(t, 100, signs[5].at, 0)
	signs = signs[:3]
	require.Equal(t, []string{"policy", "replay", "policy"}, []string{signs[0].kind, signs[1].kind, signs[2].kind})
	require.GreaterOrEqual(t, signs[1].at-signs[0].at, 1.5)
	require.InDelta(t, 75, signs[2].at, 0.01)
	require.Equal(t, 6, strings.Count(signs[0].words, "\n"))
	require.True(t, strings.HasSuffix(signs[0].words, "and 3 more; see the table"), signs[0].words)
}
