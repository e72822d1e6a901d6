package metrics_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// sampleTimes returns the durations of the last samples, newest first, and their median.
func (b *bundle) sampleTimes() (takes []time.Duration, took time.Duration) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT takes, took FROM dlq.metrics_sample").Scan(&takes, &took))
	return takes, took
}

// One slow sample does not delay the next one. If all samples are slow, they are 30 seconds apart.
func TestSampler_OneStallDoesNotDelayNext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sampler := b.sampler()
	for range 5 {
		b.exec("UPDATE dlq.metrics_sample SET at = at - interval '31 s'") // old enough for the next sample
		require.NoError(t, sampler.Once(t.Context()))
	}
	before, _ := b.sampleTimes()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.paces")
	require.NoError(t, err)
	stalled := make(chan error, 1)
	b.exec("UPDATE dlq.metrics_sample SET at = at - interval '31 s'")
	go func() { stalled <- sampler.Once(context.Background()) }()
	var since time.Time
	require.Eventually(t, func() bool {
		var waits bool
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT EXISTS (
			SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE a.datname = current_database() AND NOT l.granted AND l.relation = 'dlq.paces'::regclass)`).Scan(&waits))
		if waits && since.IsZero() {
			since = time.Now()
		}
		return waits && time.Since(since) > slices.Max(before)
	}, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	if err := <-stalled; err != nil { // its lock_timeout expired
		t.Skip("this machine is too slow to hang a sample and let it go on")
	}
	takes, took := b.sampleTimes()
	require.Len(t, takes, 5)
	require.Less(t, took, takes[0])
	require.LessOrEqual(t, took, slices.Max(before))

	// The pause is bounded, however long samples take, and even if the clock was set back.
	b.exec(`UPDATE dlq.metrics_sample SET at = now() - interval '31 s', took = '20 s',
		takes = array_fill('20 s'::interval, ARRAY[5])`)
	require.NoError(t, sampler.Once(t.Context()))
	require.Less(t, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 20.0)
	b.exec("UPDATE dlq.metrics_sample SET at = now() + interval '1 hour', took = '1 ms'")
	require.NoError(t, sampler.Once(t.Context()))
	require.GreaterOrEqual(t, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 0.0)
}

// The wait for a connection does not count towards the duration of a sample.
func TestSampler_ExcludesWaitForConnection(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := b.pool.Config().Copy()
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	sampler := b.sampler()
	sampler.Store = deadletter.NewStore(pool, postgres.DefaultSchemas())
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
	takes, _ := b.sampleTimes()
	require.Less(t, takes[0], time.Since(began)-2*time.Second)
}

// A hanging statement of a sample is cancelled. During the pause that follows, the loop reports the statement's error.
func TestSampler_CancelsHangingStatement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.takeSample()
	b.exec(`CREATE OR REPLACE FUNCTION dlq.partitions_until() RETURNS TABLE (of text, until timestamptz)
		LANGUAGE sql AS 'SELECT NULL::text, now() FROM pg_sleep(100)'`)
	b.exec("UPDATE dlq.metrics_sample SET at = now() - interval '31 s'")
	sampler := b.sampler()
	err := sampler.Once(t.Context())
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "57014", pgErr.Code, "statement_timeout")
	b.exec("UPDATE dlq.metrics_sample SET at = now()") // for the database, no sample is due
	require.ErrorIs(t, sampler.Once(t.Context()), err)

	other := b.sampler()
	require.NoError(t, other.Once(t.Context()))
	sample, _, err := metrics.Ages(t.Context(), postgres.DefaultSchemas().Rendered(b.pool))
	require.NoError(t, err)
	require.Less(t, sample, metrics.StaleAfter)
}

// Entries count if they have been manual or failed for longer than the policy allows, however they got into that state.
// Entries of muted groups do not count.
func TestSampler_CountsEntriesThatNeedPerson(t *testing.T) {
	t.Parallel()
	b := setup(t)
	super := postgrestest.Open(t, postgrestest.Superuser(t, b.url))
	fail := func(n int, queue, class, fingerprint, status string, ago time.Duration) {
		b.fail(n, queue, fingerprint, 2*time.Hour)
		b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', error_class = nullif($1, ''), fingerprint = $2,
				strategy = 'manual', move = '{"actor": "worker:1", "reason": "decided"}'
			WHERE queue = $3 AND status = 'dlq_pending' AND stage = 'open'`, class, fingerprint, queue)
		if status == "dlq_failed" { // its last redelivery failed
			b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = 1, dlq_retry_count = 5,
					locked_by = 'worker:1', locked_at = now(), move = '{"actor": "worker:1"}'
				WHERE queue = $1 AND fingerprint = $2 AND stage = 'open'`, queue, fingerprint)
			b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_failed', last_failed_at = now(), move = '{"actor": "capture"}'
				WHERE queue = $1 AND fingerprint = $2 AND stage = 'open'`, queue, fingerprint)
		}
		_, err := super.Exec(t.Context(), fmt.Sprintf(`SET session_replication_role = replica;
			UPDATE dlq.dead_letter_queue SET updated_at = now() - %[1]d * interval '1 second',
				closed_at = CASE WHEN closed_at IS NOT NULL THEN now() - %[1]d * interval '1 second' END
			WHERE queue = '%[2]s' AND fingerprint = '%[3]s';
			RESET session_replication_role`, int(ago.Seconds()), queue, fingerprint))
		require.NoError(t, err)
	}
	fail(3, "q", "validation", "a", "dlq_manual", 6*time.Minute) // monitoring.yaml: 5 minutes
	fail(2, "q", "validation", "b", "dlq_manual", 4*time.Minute)
	fail(4, "q", "outage", "c", "dlq_failed", 6*time.Minute)
	fail(5, "q", "outage", "d", "dlq_failed", 4*time.Minute)
	fail(6, "other", "outage", "e", "dlq_manual", 6*time.Minute) // 15 minutes
	fail(7, "other", "business", "f", "dlq_manual", 16*time.Minute)
	fail(2, "other", "", "g", "dlq_manual", 16*time.Minute)
	for _, group := range []string{"m", "n"} { // muted groups, before and after the other groups in the index
		fail(8, "q", "validation", group, "dlq_manual", time.Hour)
		fail(8, "q", "outage", group+"f", "dlq_failed", time.Hour)
	}
	fail(1, "q", "outage", "mm", "dlq_failed", time.Hour)
	fail(1, "q", "outage", "z", "dlq_failed", time.Hour)
	b.exec(postgrestest.RefreshRollups)
	for _, group := range []string{"m", "n", "mf", "nf"} {
		b.exec(`SELECT dlq.set_group('q', $1, '{"muteUntil": "2100-01-01T00:00:00Z"}')`, group)
	}
	series := b.takeSample()
	b.requireSeries(series, map[string]float64{
		"dlqd_needs_person{error_class=validation,queue=q}": 3, "dlqd_needs_person{error_class=outage,queue=q}": 6,
		"dlqd_needs_person{error_class=business,queue=other}": 7, "dlqd_needs_person{error_class=undecided,queue=other}": 2,
	})
	require.NotContains(t, series, "dlqd_needs_person{error_class=outage,queue=other}")

	// An entry has no fingerprint, and so no group, until a worker has decided on one of its failures.
	_, err := super.Exec(t.Context(), `SET session_replication_role = replica;
		UPDATE dlq.dead_letter_queue SET fingerprint = NULL WHERE fingerprint = 'z';
		RESET session_replication_role`)
	require.NoError(t, err)
	b.requireSeries(b.takeSample(), map[string]float64{"dlqd_needs_person{error_class=outage,queue=q}": 6})

	// If there are more entries than the query reads, the rollups give a lower bound.
	sampler := b.sampler()
	sampler.Looked = 1
	b.exec("UPDATE dlq.rollup_flow SET parked = 0") // all entries were parked just now, so the bound would subtract them
	b.exec("DELETE FROM dlq.metrics_sample")
	require.NoError(t, sampler.Once(t.Context()))
	series = b.gather(b.metrics)
	// Entries of the groups a and b count, and entries of muted groups do not.
	b.requireSeries(series, map[string]float64{
		"dlqd_needs_person{error_class=validation,queue=q}": 5, "dlqd_needs_person{error_class=business,queue=other}": 7,
	})
}

// TestNeedsPerson_ReadsRecentMinutes checks that dlq.needs_person reads only the minutes of the rollups for which a
// parked entry does not count yet, not three days of rollups.
func TestNeedsPerson_ReadsRecentMinutes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "q", "e", time.Hour)
	b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', error_class = 'validation', strategy = 'manual',
		move = '{"actor": "worker:1", "reason": "decided"}' WHERE stage = 'open'`)
	b.exec(postgrestest.RefreshRollups)
	b.exec(`INSERT INTO dlq.rollup_flow (step, scope, bucket, queue, error_class, parked)
		SELECT 'minute', 'queue_class', date_trunc('minute', now()) - make_interval(mins => m), q, 'validation', 1
		FROM unnest('{q,a,b,c,d,e,f,g,h,i}'::text[]) q, generate_series(20, 3 * 24 * 60) m`)
	b.exec("ANALYZE dlq.rollup_flow")
	var explained []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, b.pool.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT json)
		SELECT * FROM dlq.needs_person('15 minutes', p_most => 1)`).Scan(&explained))
	require.Less(t, explained[0].Plan.Hit+explained[0].Plan.Read, 1000)
}
