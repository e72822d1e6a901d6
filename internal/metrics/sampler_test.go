package metrics_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/postgres"
)

// takes is how long the last samples took, the newest first, and what the rest goes by.
func (b *bundle) takes() (takes []time.Duration, took time.Duration) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT takes, took FROM dlq.metrics_sample").Scan(&takes, &took))
	return takes, took
}

// One sample that hung does not put off the next, and samples that all take long are 30 seconds apart.
func TestSampler_OneStallPutsNothingOff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sampler := &metrics.Sampler{Store: b.store, Schemas: postgres.DefaultSchemas()}
	take := func() { // once the last one is old enough
		b.exec("UPDATE dlq.metrics_sample SET at = at - interval '31 s'")
		require.NoError(t, sampler.Once(t.Context()))
	}
	for range 5 {
		take()
	}
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.paces")
	require.NoError(t, err)
	stalled := make(chan error, 1)
	began := time.Now()
	b.exec("UPDATE dlq.metrics_sample SET at = at - interval '31 s'")
	go func() { stalled <- sampler.Once(context.Background()) }()
	require.Eventually(t, func() bool {
		var waits bool
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'dlq.paces'::regclass)").Scan(&waits))
		return waits
	}, time.Minute, 10*time.Millisecond)
	waited := time.Since(began)
	require.NoError(t, tx.Rollback(t.Context()))
	if err := <-stalled; err != nil { // it was cut off by the limit on locks
		t.Skip("this machine is too slow to hang a sample and let it go on")
	}
	takes, took := b.takes()
	require.Len(t, takes, 5)
	require.Less(t, took, takes[0], "%s of %s, which hung for up to %s", took, takes, waited)

	// The rest has an end, whatever samples take, and also where the clock was set back.
	b.exec("UPDATE dlq.metrics_sample SET at = now() - interval '31 s', took = '20 s', takes = array_fill('20 s'::interval, ARRAY[5])")
	require.NoError(t, sampler.Once(t.Context()))
	require.Less(t, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 20.0)
	b.exec("UPDATE dlq.metrics_sample SET at = now() + interval '1 hour', took = '1 ms'")
	require.NoError(t, sampler.Once(t.Context()))
	require.GreaterOrEqual(t, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 0.0)
}

// What a sample waits for a connection is not what it costs the database.
func TestSampler_WaitForAConnectionIsApart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := b.pool.Config().Copy()
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	sampler := &metrics.Sampler{Store: deadletter.NewStore(pool, postgres.DefaultSchemas()), Schemas: postgres.DefaultSchemas()}
	require.NoError(t, sampler.Once(t.Context()))
	b.exec("DELETE FROM dlq.metrics_sample")
	held, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- sampler.Once(context.Background()) }()
	_, err = held.Exec(t.Context(), "SELECT pg_sleep(3)")
	require.NoError(t, err)
	held.Release()
	require.NoError(t, <-done)
	takes, _ := b.takes()
	require.Less(t, takes[0], time.Since(began)-2*time.Second)
}

// A question of a sample that hangs is cut off, and no other is asked for a while: the sample grows old, and the loop says so.
func TestSampler_HangingQuestionIsCutOff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.sampled()
	b.exec("CREATE OR REPLACE FUNCTION dlq.partitions_until() RETURNS TABLE (of text, until timestamptz) LANGUAGE sql AS 'SELECT NULL::text, now() FROM pg_sleep(100)'")
	b.exec("UPDATE dlq.metrics_sample SET at = now() - interval '31 s'")
	sampler := &metrics.Sampler{Store: b.store, Schemas: postgres.DefaultSchemas()}
	err := sampler.Once(t.Context())
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "57014", pgErr.Code, "statement_timeout")
	b.exec("UPDATE dlq.metrics_sample SET at = now()") // the database says that none is due
	require.ErrorIs(t, sampler.Once(t.Context()), err)

	other := &metrics.Sampler{Store: b.store, Schemas: postgres.DefaultSchemas()}
	require.NoError(t, other.Once(t.Context()))
	sample, _, err := metrics.Ages(t.Context(), postgres.DefaultSchemas().Rendered(b.pool))
	require.NoError(t, err)
	require.Less(t, sample, metrics.StaleAfter)
}
