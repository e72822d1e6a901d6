package breaker_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestBreaker_ReturnsErrorOfEachStatement(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2}")
	rules := func() *policy.Policy { return b.policy }
	fail := func(do func(p *breaker.Breakers) error) {
		t.Helper()
		postgrestest.FailEach(t, b.pool, func(pool *pgxpool.Pool) error { return do(b.breakers("one", pool, rules)) })
	}
	fail(func(p *breaker.Breakers) error { return p.Sync(t.Context()) })
	fail(func(p *breaker.Breakers) error { return p.ForceOpen(t.Context(), bank, "kim", "", time.Second) })
	b.pass(time.Second)
	fail(func(p *breaker.Breakers) error {
		if err := p.Sync(t.Context()); err != nil {
			return err
		}
		_, err := p.Allow(t.Context(), "default", timeout)
		return err
	})
	fail(func(p *breaker.Breakers) error {
		_, err := p.Reset(t.Context(), bank, "kim", "")
		return err
	})
	b.requireState(b.process("two"), breaker.Closed)

	// The opening is written before the shared state is read again.
	b.pass(time.Second)
	postgrestest.FailEach(t, b.pool, func(pool *pgxpool.Pool) error {
		db := &failingDB{DB: b.pool}
		p := b.breakers("three", db, rules)
		db.off.Store(true)
		for range 2 {
			b.deliver(p, false)
		}
		db.off.Store(false)
		db.DB = pool
		return p.Sync(t.Context())
	})
	b.requireState(b.process("two"), breaker.Open)
}

func TestQueues_ReturnErrorOfEachStatement(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {minimumCount: 1, openFor: 10s, probes: 1}}", "emails")
	fail := func(want breaker.State, paused bool) {
		t.Helper()
		postgrestest.FailEach(t, b.pool, func(pool *pgxpool.Pool) error {
			process := b.breakers("one", pool, func() *policy.Policy { return b.policy })
			watch := &breaker.Queues{
				Pool: pool, Schemas: postgres.DefaultSchemas(), River: b.client, Breakers: process,
			}
			return watch.RunOnce(t.Context())
		})
		require.NoError(t, b.process.Sync(t.Context()))
		state, _ := b.process.State("queue:emails")
		require.Equal(t, want, state)
		queue, err := b.client.QueueGet(t.Context(), "emails")
		require.NoError(t, err)
		require.Equal(t, paused, queue.PausedAt != nil)
	}
	fail(breaker.Closed, false)
	b.running()
	b.end("discarded")
	fail(breaker.Open, true)
	b.pass(10 * time.Second)
	fail(breaker.HalfOpen, false)
	b.running()
	fail(breaker.HalfOpen, true)
	b.end("discarded")
	fail(breaker.Open, true)
	b.pass(10 * time.Second)
	fail(breaker.HalfOpen, false)
	b.running()
	b.end("completed")
	fail(breaker.Closed, false)
	require.NoError(t, b.process.ForceOpen(t.Context(), "queue:emails", "kim", "", 0))
	fail(breaker.Open, true)
	_, err := b.process.Reset(t.Context(), "queue:emails", "kim", "")
	require.NoError(t, err)
	fail(breaker.Closed, false)

	b.pass(time.Second)
	b.running()
	b.end("discarded")
	fail(breaker.Open, true)
	b.policy = policytest.Load(t, nil)
	fail(breaker.Closed, false)
}
