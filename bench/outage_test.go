package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// TestOutage is the drill of "go run ./bench outage", cut short: the same code, until four thousand messages have come for a
// destination that is down. A slow machine takes longer for that, and what is asserted does not depend on its speed.
func TestOutage(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	p := outageParams{
		perSecond: 900, before: 2 * time.Second, outage: 6 * time.Second, whileDown: 4000, slot: time.Second, pace: 450, concurrency: 20,
		breaker: "defaults: {consecutiveFailures: 3, openFor: 3s, probes: 1}\n",
	}
	report, err := runOutage(t.Context(), url, postgrestest.Open(t, url), p)
	require.NoError(t, err)
	t.Logf("%d attempts for %d messages, %d half-open periods; %d let go in one second; p99 %v", report.attempts, report.sentWhileDown.Load(), report.probes, report.released, report.p99)
	require.Equal(t, report.sent, report.delivered, "everything that was accepted is delivered")
	require.Zero(t, report.dead, "nothing is dead that should not be")
	require.Greater(t, report.probes, 1)
	// What was under way when it opened, and the probes; no message spends its attempts on a destination that is down.
	require.Less(t, report.share(), 0.01, "%d attempts for %d messages", report.attempts, report.sentWhileDown.Load())
	// What was held comes back at its pace, not all at once: each look, once a second, lets go what comes until the next one.
	require.Positive(t, report.released)
	require.LessOrEqual(t, report.released, 2*(p.pace+1), "two looks in one second at most")
	for _, name := range destinations {
		if p99 := report.p99[name]; name != broken {
			// Far above the noise of a busy machine, and far below what waiting for the broken one would cost.
			require.Less(t, p99[1], 3*p99[0]+2*time.Second, "the others go on: %s before, %s in the outage", p99[0], p99[1])
		}
	}
}
