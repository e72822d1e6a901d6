package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// TestOutage is the drill of "go run ./bench outage", cut short: the same code, a few seconds of it.
func TestOutage(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	report, err := runOutage(t.Context(), url, postgrestest.Open(t, url), outageParams{
		perSecond: 150, before: 2 * time.Second, outage: 6 * time.Second, slot: time.Second, pace: 300,
		breaker: "defaults: {consecutiveFailures: 10, openFor: 1s}\n",
	})
	require.NoError(t, err)
	require.Equal(t, report.sent, report.delivered, "everything that was accepted is delivered")
	require.Zero(t, report.dead, "nothing is dead that should not be")
	require.Greater(t, report.probes, 1)
	require.Greater(t, report.sentWhileDown, 100)
	// What was under way when it opened, and the probes; no message spends its attempts on a destination that is down.
	require.LessOrEqual(t, report.attempts, 10+100+10*report.probes)
	require.Less(t, report.attempts, report.sentWhileDown)
	for _, name := range destinations {
		if name != broken {
			require.NotEmpty(t, report.p99[name][1], "the others go on")
		}
	}
}
