package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// TestOutage is a short run of "go run ./bench outage" with the same code. It ends when a few hundred messages have
// been sent to a destination that is down, and the destination's breaker has had more than one half-open period. It
// asserts nothing that depends on speed; the benchmark itself checks its figures.
func TestOutage(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	const failures = 3
	p := outageParams{
		perSecond: 300, before: time.Second, whileDown: 300, periods: 2, slot: time.Second, pace: 100, concurrency: 10,
		breaker: fmt.Sprintf("defaults: {consecutiveFailures: %d, openFor: 1s, probes: 1}\n", failures),
	}
	report, err := runOutage(t.Context(), url, postgrestest.Open(t, url), p)
	require.NoError(t, err)
	t.Logf("%d attempts for %d messages, %d half-open periods; %d released in one second",
		report.attempts, report.sentWhileDown.Load(), report.probes, report.released)
	require.Equal(t, report.sent, report.delivered, "an accepted message was not delivered")
	require.Zero(t, report.unresolved, "a dead letter is parked or failed")
	// A failed attempt has one of three reasons: it counted towards opening the breaker, it was under way when the
	// breaker opened, or it was the probe of a half-open period. A delivery that was under way when the destination
	// failed may succeed, and then the breaker counts failures from zero again. Messages do not spend their attempts on a
	// destination that is down.
	require.GreaterOrEqual(t, report.probes, p.periods)
	require.LessOrEqual(t, report.attempts, failures+p.concurrency*failures+report.probes)
	// Held messages are released at the pace, not all at once.
	require.Positive(t, report.released)
	require.Less(t, int64(report.released), report.sentWhileDown.Load())
	for _, name := range destinations {
		if name != broken {
			require.Positive(t, report.p50[name][1], "deliveries to %s stopped", name)
		}
	}
}
