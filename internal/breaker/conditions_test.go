package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestConditions(t *testing.T) {
	t.Parallel()
	var status atomic.Int64
	status.Store(http.StatusOK)
	probed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, http.MethodGet, r.Method)
		w.WriteHeader(int(status.Load()))
	}))
	t.Cleanup(probed.Close)
	rules := policytest.Load(t, policytest.Files{
		"retry-policies": fmt.Sprintf("queues: {mails: {destination: mailer}}\ndestinations: {mailer: {url: %q, probe: "+
			"{url: %q, every: 100ms}}}\n", probed.URL, probed.URL),
	})
	current := func() *policy.Policy { return rules }
	pool := postgrestest.Pool(t)
	logger := slog.New(slog.DiscardHandler)
	breakers := breaker.New(breaker.Config{DB: pool, Policy: current, Actor: "test", Logger: logger})
	load, failure := breaker.Load{}, error(nil)
	c := breaker.NewConditions(breaker.ConditionsConfig{
		DB: pool, Policy: current, Breakers: breakers,
		Measure: func(context.Context) (breaker.Load, error) { return load, failure },
	})
	want := rules.Routing.Strategies["conditional"].Conditions
	unmetAt := func(l breaker.Load) string {
		load = l
		if err := c.Update(t.Context()); failure == nil {
			require.NoError(t, err)
		}
		return c.Unmet("mails", "", want)
	}
	require.Empty(t, c.Unmet("mails", "", want), "unknown conditions delay nothing")
	require.Empty(t, unmetAt(breaker.Load{CPU: 79.9, Memory: 84.9, Connections: 84.9}))
	require.Equal(t, "80 % of this machine's processors are in use (must be below 80 %)",
		unmetAt(breaker.Load{CPU: 80}))
	require.Equal(t, "91 % of this machine's memory is in use (must be below 85 %)", unmetAt(breaker.Load{Memory: 91}))
	require.Equal(t, "99 % of the database's connections are in use (must be below 85 %)",
		unmetAt(breaker.Load{Connections: 99}))
	require.Empty(t, c.Unmet("mails", "", &policy.Conditions{}), "a plan without conditions has none unmet")
	failure = errors.New("no /proc")
	require.Contains(t, unmetAt(breaker.Load{}), "connections", "the last measurement applies")
	failure = nil
	require.Empty(t, unmetAt(breaker.Load{}))

	status.Store(http.StatusServiceUnavailable)
	require.Eventually(t, func() bool {
		return unmetAt(breaker.Load{}) == "the probe of destination mailer answers 503"
	}, 5*time.Minute, 50*time.Millisecond)
	require.Empty(t, c.Unmet("elsewhere", "", want), "an application's queue has no probe")
	for code, problem := range map[int64]string{300: "the probe of destination mailer answers 300", 299: ""} {
		status.Store(code)
		require.Eventually(t, func() bool { return unmetAt(breaker.Load{}) == problem }, 5*time.Minute, 50*time.Millisecond)
	}
	probed.Close()
	require.Eventually(t, func() bool {
		return unmetAt(breaker.Load{}) == "the probe of destination mailer does not answer"
	}, 5*time.Minute, 50*time.Millisecond)

	require.NoError(t, breakers.ForceOpen(t.Context(), "destination:mailer", "kim", "", 0))
	require.Equal(t, "circuit breaker destination:mailer is open", c.Unmet("mails", "", want))
	require.Empty(t, c.Unmet("mails", "", &policy.Conditions{}))
	require.NoError(t, breakers.ForceOpen(t.Context(), "queue:elsewhere", "kim", "", 0))
	require.Equal(t, "circuit breaker queue:elsewhere is open", c.Unmet("elsewhere", "", want))
}

// On a real machine and database, the measured values of memory and connections are above zero.
func TestConditions_MeasuresLoad(t *testing.T) {
	t.Parallel()
	rules := policytest.Load(t, nil)
	pool := postgrestest.Pool(t)
	current := func() *policy.Policy { return rules }
	logger := slog.New(slog.DiscardHandler)
	c := breaker.NewConditions(breaker.ConditionsConfig{
		DB: pool, Policy: current,
		Breakers: breaker.New(breaker.Config{DB: pool, Policy: current, Actor: "test", Logger: logger}),
	})
	require.NoError(t, c.Update(t.Context()))
	least := 0.000001 // any running system uses more
	require.Contains(t, c.Unmet("default", "", &policy.Conditions{MemoryBelow: &least}), "memory")
	require.Contains(t, c.Unmet("default", "", &policy.Conditions{ConnectionsBelow: &least}), "connections")
}
