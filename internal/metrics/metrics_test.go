package metrics_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/metrics/metricstest"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// bundle has a database and a process that serves the database's metrics.
type bundle struct {
	*testing.T

	url     string
	pool    *pgxpool.Pool
	store   *deadletter.Store
	policy  *policy.Policy
	metrics *metrics.Metrics
}

func setup(t *testing.T) *bundle {
	t.Helper()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	b := &bundle{T: t, url: url, pool: pool, store: deadletter.NewStore(pool, postgres.DefaultSchemas())}
	var err error
	files := policytest.Files{"monitoring": "queues: {q: {maxOpen: 2, maxAge: 1m, needsPersonAfter: 5m}}"}
	b.policy, err = policy.Load(policy.Source{Destination: "http://127.0.0.1:9", Dir: policytest.Dir(t, files)})
	require.NoError(t, err)
	b.metrics = b.process(pool)
	return b
}

// process returns the metrics of a further process.
func (b *bundle) process(pool *pgxpool.Pool) *metrics.Metrics {
	b.Helper()
	m := metrics.New()
	db := postgres.DefaultSchemas().Rendered(pool)
	m.WatchDatabase(db, func() *policy.Policy { return b.policy }, slog.New(slog.DiscardHandler))
	return m
}

func (b *bundle) sampler() *metrics.Sampler {
	return &metrics.Sampler{
		Store: b.store, Schemas: postgres.DefaultSchemas(), Policy: func() *policy.Policy { return b.policy },
	}
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err, sql)
}

// fail creates n filed dead letters of a queue. Their failures happened the given time ago.
func (b *bundle) fail(n int, queue, errorType string, ago time.Duration) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state) SELECT 'app', '{}', $1, 5, 5, 'running'
		FROM generate_series(1, $2)`, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() - $2::interval,
		errors = ARRAY[jsonb_build_object('error', 'no', 'attempt', attempt)],
		metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', attempt, 'type', $1::text))
			WHERE state = 'running'`, errorType, ago)
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'))")
}

// takeSample refreshes the rollups, takes a sample, and returns the series that the process then serves, by name and
// labels.
func (b *bundle) takeSample() map[string]*dto.Metric {
	b.Helper()
	b.exec(postgrestest.RefreshRollups)
	b.exec("DELETE FROM dlq.metrics_sample")
	require.NoError(b, b.sampler().Once(b.Context()))
	return b.gather(b.metrics)
}

func (b *bundle) gather(m *metrics.Metrics) map[string]*dto.Metric {
	b.Helper()
	families, err := m.Gatherer().Gather()
	require.NoError(b, err)
	series := map[string]*dto.Metric{}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			labels := make([]string, len(metric.GetLabel()))
			for i, l := range metric.GetLabel() {
				labels[i] = l.GetName() + "=" + l.GetValue()
			}
			series[family.GetName()+"{"+strings.Join(labels, ",")+"}"] = metric
		}
	}
	return series
}

func value(m *dto.Metric) float64 {
	switch {
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	case m.GetHistogram() != nil:
		return float64(m.GetHistogram().GetSampleCount())
	}
	return m.GetGauge().GetValue()
}

// requireSeries requires that the series in want exist with the given values.
func (b *bundle) requireSeries(series map[string]*dto.Metric, want map[string]float64) {
	b.Helper()
	got := map[string]float64{}
	for name := range want {
		if m := series[name]; m != nil {
			got[name] = value(m)
		}
	}
	require.Equal(b, want, got)
}

func TestDatabase_CountsMoves(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.requireSeries(b.takeSample(), map[string]float64{ // queues of the policy have their series from the start
		"dlq_jobs_total{queue=default}": 0, "dlq_size{queue=default}": 0,
		"dlq_retry_success_total{queue=default}": 0, "dlq_permanent_failures_total{queue=default}": 0,
		"dlq_time_to_retry_seconds{queue=default}": 0, "dlqd_queue_up{queue=default}": 1,
		"dlqd_dead_letter_oldest_seconds{queue=default}": 0,
	})
	b.fail(5, "payments", "TIMEOUT", time.Hour)
	b.fail(2, "payments", "", 0)
	b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', error_class = 'outage', strategy = 'manual',
		move = '{"actor": "worker:1", "reason": "decided"}' WHERE error_type = 'TIMEOUT'`)
	b.exec("SELECT dlq.replay(id) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'")
	first := b.takeSample()
	b.requireSeries(first, map[string]float64{
		"dlq_jobs_total{queue=payments}": 7, "dlq_size{queue=payments}": 7,
		"dlq_time_to_retry_seconds{queue=payments}": 5, "dlqd_time_to_filing_seconds{queue=payments}": 7,
		"dlqd_dead_letters{error_class=undecided,queue=payments,status=dlq_pending}": 2,
		"dlqd_dead_letters{error_class=outage,queue=payments,status=dlq_processing}": 5,
		"dlqd_failures_by_type_total{error_type=TIMEOUT,queue=payments}":             5,
		"dlqd_failures_by_type_total{error_type=none,queue=payments}":                2,
		"dlqd_redeliveries_total{error_class=outage,queue=payments}":                 5,
		"dlqd_dead_letters_parked_total{error_class=outage,queue=payments}":          5,
	})
	require.Positive(t, value(first["dlqd_dead_letter_oldest_seconds{queue=payments}"]))
	require.InDelta(t, 5*time.Hour.Seconds(),
		first["dlq_time_to_retry_seconds{queue=payments}"].GetHistogram().GetSampleSum(), 60)

	// Four redeliveries succeed, and one entry has used up its redeliveries.
	b.exec(`WITH one AS (SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_processing' LIMIT 1)
		UPDATE dlq.dead_letter_queue e SET status = 'dlq_failed', last_failed_at = now(),
			move = '{"actor": "capture", "reason": "job failed"}' FROM one WHERE e.id = one.id`)
	b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_resolved',
		move = '{"actor": "capture", "reason": "job completed"}' WHERE status = 'dlq_processing'`)
	b.exec("SELECT dlq.discard(id) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'")
	want := map[string]float64{
		"dlq_jobs_total{queue=payments}": 7, "dlq_size{queue=payments}": 0,
		"dlq_retry_success_total{queue=payments}": 4, "dlq_permanent_failures_total{queue=payments}": 1,
		"dlqd_redeliveries_ended_total{error_class=outage,outcome=succeeded,queue=payments}":    4,
		"dlqd_redeliveries_ended_total{error_class=outage,outcome=failed,queue=payments}":       1,
		"dlqd_dead_letters_closed_total{error_class=outage,outcome=resolved,queue=payments}":    4,
		"dlqd_dead_letters_closed_total{error_class=outage,outcome=failed,queue=payments}":      1,
		"dlqd_dead_letters_closed_total{error_class=undecided,outcome=archived,queue=payments}": 2,
		"dlqd_time_in_dlq_seconds{queue=payments}":                                              7,
		"dlqd_time_to_recovery_seconds{queue=payments}":                                         4,
	}
	b.requireSeries(b.takeSample(), want)
	// The entry was already closed, so discarding it does not count.
	b.exec("SELECT dlq.discard(id) FROM dlq.dead_letter_queue WHERE status = 'dlq_failed'")
	b.requireSeries(b.takeSample(), want)
	require.Nil(t, b.takeSample()["dlqd_dead_letters_closed_total{error_class=outage,outcome=archived,queue=payments}"])

	// Counts survive a rebuild and a trim of the rollups and counters.
	b.exec("SELECT dlq.rebuild_rollups()")
	b.exec("SELECT dlq.trim_rollups(now() + interval '3000 days')")
	b.exec("SELECT dlq.trim_counters(now() + interval '3000 days')")
	b.requireSeries(b.takeSample(), want)
	// This is the state of a database that was restored from a dump into another server.
	b.exec("UPDATE dlq.rollup_state SET snapshot = '900000000:900000000:'")
	b.fail(1, "payments", "TIMEOUT", 0)
	want["dlq_jobs_total{queue=payments}"], want["dlq_size{queue=payments}"] = 8, 1
	b.requireSeries(b.takeSample(), want)
}

// An application may give an error type the name that is the label of errors without a type. If a metric cannot be
// collected, only that metric is missing from the scrape.
func TestDatabase_AcceptsNamesOfApplications(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "q", "", 0)
	b.fail(3, "q", "none", 0)
	b.requireSeries(b.takeSample(), map[string]float64{
		"dlqd_failures_by_type_total{error_type=none,queue=q}": 5,
		// The policy's queues do not include q; monitoring.yaml sets limits for it nevertheless.
		"dlq_size{queue=q}": 5, "dlqd_alert_max_open{queue=q}": 2, "dlqd_queue_up{queue=q}": 0,
		"dlqd_alert_max_open{queue=default}": 1000, "dlqd_alert_max_age_seconds{queue=q}": 60,
	})
	b.metrics.WatchLoops(func() []background.Status { return []background.Status{{Name: "twice"}, {Name: "twice"}} })
	recorder := httptest.NewRecorder()
	b.metrics.Handler().ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	require.Equal(t, http.StatusOK, recorder.Code)
	require.Contains(t, recorder.Body.String(), `dlq_size{queue="q"} 5`)
}

// A River queue has its series before its first failure, so that rate() sees the counter increase from 0.
func TestDatabase_IncludesQueuesOfRiver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("INSERT INTO river_queue (name, updated_at) SELECT 'r' || n, now() FROM generate_series(1, 2) n")
	b.requireSeries(b.takeSample(), map[string]float64{
		"dlq_jobs_total{queue=r1}": 0, "dlq_size{queue=r1}": 0, "dlqd_alert_max_open{queue=r2}": 1000,
	})
	b.fail(3, "r1", "A", 0)
	b.requireSeries(b.takeSample(), map[string]float64{"dlq_jobs_total{queue=r1}": 3, "dlq_size{queue=r1}": 3})
	b.exec("INSERT INTO river_queue (name, updated_at) SELECT 's' || n, now() FROM generate_series(1, 200) n")
	queues := 0
	for name := range b.takeSample() {
		if strings.HasPrefix(name, "dlq_size{") {
			queues++
		}
	}
	require.Equal(t, 100, queues)
}

// A rebuild of the rollups counts changes since the last refresh, and counts nothing twice.
func TestDatabase_RebuildCountsOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "q", "A", 0)
	b.takeSample()
	b.fail(2, "q", "A", 0)
	b.exec("SELECT dlq.rebuild_rollups()")
	b.requireSeries(b.takeSample(), map[string]float64{
		"dlq_jobs_total{queue=q}": 3, "dlqd_failures_by_type_total{error_type=A,queue=q}": 3,
	})
}

// Every process serves the sample that one of the processes took, and reads one row for it.
func TestDatabase_EveryProcessServesSameSample(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "q", "A", time.Minute)
	first := b.takeSample()

	config := b.pool.Config().Copy()
	queries := &statements{}
	config.ConnConfig.Tracer = queries
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pool.Ping(t.Context()))
	other := b.process(pool)
	queries.take()
	second := b.gather(other)
	texts := queries.take()
	require.Len(t, texts, 1, texts)
	require.Contains(t, texts[0], "metrics_sample")
	require.NotContains(t, texts[0], "river_job")

	// A process does not read the same sample twice. The ages that it serves still grow.
	age := value(second["dlqd_sample_age_seconds{}"])
	b.exec("UPDATE dlq.metrics_sample SET sample = '{}'")
	again := b.gather(other)
	b.requireSeries(again, map[string]float64{"dlq_size{queue=q}": 3})
	require.Greater(t, value(again["dlqd_sample_age_seconds{}"]), age)
	b.exec("UPDATE dlq.metrics_sample SET at = clock_timestamp(), counters = '{}'")
	require.NotContains(t, b.gather(other), "dlq_size{queue=q}")
	b.takeSample()
	b.requireSeries(b.gather(other), map[string]float64{"dlq_size{queue=q}": 3})

	same := 0
	for name, m := range first {
		if strings.HasPrefix(name, "dlq") && !strings.Contains(name, "_seconds{") &&
			!strings.HasPrefix(name, "dlqd_build_info") {
			require.Equal(t, value(m), value(second[name]), name) //nolint:testifylint // the same number
			same++
		}
	}
	require.Greater(t, same, 50)

	// If several samplers run at once, only one takes a sample.
	b.exec("UPDATE dlq.metrics_sample SET at = now() - interval '1 hour'")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended('dlq.metrics_sample', 0))")
	require.NoError(t, err)
	sampler := b.sampler()
	require.ErrorContains(t, sampler.Once(t.Context()), "another process has not finished")
	require.InDelta(t, 3600, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 60)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, sampler.Once(t.Context()))
	require.Less(t, value(b.gather(b.metrics)["dlqd_sample_age_seconds{}"]), 60.0)

	// After a crash, the server empties the table. A process that has read a sample continues to serve it. Other
	// processes serve no counters, because zeros would look like a reset.
	b.exec("TRUNCATE dlq.metrics_sample")
	age = value(b.gather(other)["dlqd_sample_age_seconds{}"])
	again = b.gather(other)
	b.requireSeries(again, map[string]float64{"dlq_jobs_total{queue=q}": 3, "dlqd_database_up{}": 1})
	require.Greater(t, value(again["dlqd_sample_age_seconds{}"]), age)
	series := b.gather(b.process(b.pool))
	b.requireSeries(series, map[string]float64{"dlqd_database_up{}": 1})
	require.NotContains(t, series, "dlq_jobs_total{queue=default}")
	require.NoError(t, sampler.Once(t.Context()))
	b.requireSeries(b.gather(other), map[string]float64{"dlq_jobs_total{queue=q}": 3, "dlq_jobs_total{queue=default}": 0})
}

// While the database does not answer, a process serves its last sample for an hour, so that alerts continue.
func TestDatabase_ServesLastSampleDuringOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "q", "A", time.Minute)
	config := b.pool.Config().Copy()
	for _, served := range []struct {
		age  time.Duration
		want bool
	}{{0, true}, {50 * time.Minute, true}, {70 * time.Minute, false}} {
		b.takeSample()
		b.exec(`UPDATE dlq.metrics_sample SET at = at - $1::interval,
			sample = jsonb_set(sample::jsonb, '{Rollups,At}', to_jsonb(now() - $1::interval), false)::json`, served.age)
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		m := b.process(pool)
		before := b.gather(m)
		b.requireSeries(before, map[string]float64{"dlqd_database_up{}": 1, "dlq_size{queue=q}": 3})
		pool.Close()
		series := b.gather(m)
		b.requireSeries(series, map[string]float64{"dlqd_database_up{}": 0})
		if !served.want {
			require.NotContains(t, series, "dlq_size{queue=q}")
			require.NotContains(t, series, "dlq_jobs_total{queue=q}")
			continue
		}
		b.requireSeries(series, map[string]float64{
			"dlq_size{queue=q}": 3, "dlq_jobs_total{queue=q}": 3, "dlqd_capture{mode=on,triggers=enabled}": 1,
		})
		for _, age := range []string{"dlqd_sample_age_seconds{}", "dlqd_dead_letter_oldest_seconds{queue=q}"} {
			require.Greater(t, value(series[age]), value(before[age]), age)
		}
		lag := value(series["dlqd_rollup_lag_seconds{}"])
		require.Less(t, lag, 60.0, "lag is extrapolated for at most half a minute")
		if served.age > 0 {
			require.Greater(t, lag, 25.0, "the lag comes from the sample")
		}
	}
	m := b.process(b.pool) // a process that never reached the database has no sample
	b.pool.Close()
	series := b.gather(m)
	b.requireSeries(series, map[string]float64{"dlqd_database_up{}": 0})
	require.NotContains(t, series, "dlq_jobs_total{queue=default}")
}

// The counters of years of use, for as many queues as can have series, fit into a small row. The row is not written
// again until the counters change.
func TestSampler_WritesSmallRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(metricstest.FillCounters, 100)
	first := b.takeSample()
	var size int
	var persistence string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT octet_length(counters::text) + octet_length(sample::text),
		(SELECT relpersistence FROM pg_class WHERE oid = 'dlq.metrics_sample'::regclass)
			FROM dlq.metrics_sample`).Scan(&size, &persistence))
	require.Less(t, size, 800_000)
	require.Equal(t, "u", persistence, "no sample goes to replicas and backups")

	for _, of := range []struct{ where, family string }{
		{"name = 'captured'", "dlq_jobs_total{"},
		{"name = 'captured'", "dlqd_dead_letters_captured_total{"},
		{"name = 'failures'", "dlqd_failures_total{"},
		{"name = 'error_type'", "dlqd_failures_by_type_total{"},
		{"name = 'in_dlq' AND label <> 'seconds'", "dlqd_time_in_dlq_seconds{"},
		{"name = 'to_recovery' AND label <> 'seconds'", "dlqd_time_to_recovery_seconds{"},
		{"name = 'to_retry' AND label <> 'seconds'", "dlq_time_to_retry_seconds{"},
		{"name = 'to_filing' AND label <> 'seconds'", "dlqd_time_to_filing_seconds{"},
	} {
		var want, got float64
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT sum(value) FROM dlq.counters WHERE "+of.where).Scan(&want))
		for name, m := range first {
			if strings.HasPrefix(name, of.family) {
				got += value(m)
			}
		}
		require.Positive(t, want, of.family)
		require.InDelta(t, want, got, 0, of.family)
	}

	outOfLine := func() (bytes int) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT pg_relation_size(reltoastrelid) FROM pg_class
			WHERE oid = 'dlq.metrics_sample'::regclass`).Scan(&bytes))
		return bytes
	}
	before := outOfLine()
	for n := range 3 {
		b.exec("INSERT INTO dlq.paces (name, free_at) VALUES ($1, now() + interval '1 minute')",
			fmt.Sprint("destination:", n))
		b.exec("UPDATE dlq.metrics_sample SET at = at - interval '1 hour'")
		require.NoError(t, b.sampler().Once(t.Context()))
		require.Contains(t, b.gather(b.metrics), fmt.Sprintf("dlqd_pace_reserved_seconds{name=destination:%d}", n))
	}
	require.Equal(t, before, outOfLine())
}

// statements records the SQL that a pool has sent.
type statements struct {
	mu    sync.Mutex
	texts []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.texts = append(s.texts, data.SQL)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.texts
	s.texts = nil
	return taken
}

// Applications choose names of queues and error types. The number of series is bounded, and no counter decreases when
// other names get series.
func TestDatabase_LimitsNames(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state) SELECT 'app', '{}', 'q' || n, 5, 5,
		'running' FROM generate_series(1, 150) n`)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, tags) SELECT 'app', '{}', 'q1', 5, 5,
		'running', ARRAY['t' || n] FROM generate_series(1, 50) n`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY[jsonb_build_object('error', 'no', 'attempt', 5)],
		metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 5, 'type', coalesce(tags[1], 'x')))`)
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'))")
	of := func(series map[string]*dto.Metric, prefix string) (names []string, total float64) {
		for name, m := range series {
			if strings.HasPrefix(name, prefix) {
				names, total = append(names, name), total+value(m)
			}
		}
		return names, total
	}
	first := b.takeSample()
	queues, all := of(first, "dlq_jobs_total{")
	require.Len(t, queues, 102, "100 queues, other, and the queue of the policy")
	require.InDelta(t, 200, all, 0)
	b.requireSeries(first, map[string]float64{"dlq_jobs_total{queue=other}": 50})
	sizes, all := of(first, "dlq_size{")
	require.LessOrEqual(t, len(sizes), 102)
	require.InDelta(t, 200, all, 0)
	types, all := of(first, "dlqd_failures_by_type_total{")
	types = slices.DeleteFunc(types, func(name string) bool { return !strings.HasSuffix(name, "queue=q1}") })
	require.Len(t, types, 21)
	require.InDelta(t, 200, all, 0)

	// A type that was counted under "other" becomes the most frequent one and gets its own counter. "other" does not
	// decrease.
	shown := func(series map[string]*dto.Metric, name string) bool {
		return series["dlqd_failures_by_type_total{error_type="+name+",queue=q1}"] != nil
	}
	var hidden string
	for n := 1; hidden == "" || shown(first, hidden); n++ {
		hidden = fmt.Sprint("t", n)
	}
	b.fail(30, "q1", hidden, 0)
	second := b.takeSample()
	require.False(t, shown(second, hidden))
	b.exec("SELECT dlq.trim_counters()")
	b.fail(4, "q1", hidden, 0)
	third := b.takeSample()
	other := "dlqd_failures_by_type_total{error_type=other,queue=q1}"
	b.requireSeries(third, map[string]float64{
		"dlqd_failures_by_type_total{error_type=" + hidden + ",queue=q1}": 4, other: value(second[other]),
	})
	types, _ = of(third, "dlqd_failures_by_type_total{")
	types = slices.DeleteFunc(types, func(name string) bool { return !strings.HasSuffix(name, "queue=q1}") })
	require.LessOrEqual(t, len(types), 21)

	// Series of unused queues become free for other queues.
	b.exec("UPDATE dlq.rollup_flow SET bucket = bucket - interval '60 days' WHERE queue <> 'q1'")
	b.exec("UPDATE dlq.rollup_backlog SET pending = 0 WHERE queue <> 'q1'")
	b.exec("SELECT dlq.trim_counters()")
	b.fail(1, "late", "x", 0)
	b.requireSeries(b.takeSample(), map[string]float64{"dlq_jobs_total{queue=late}": 1, "dlq_jobs_total{queue=other}": 50})
}

// Classic and native buckets agree.
func TestHistogram_ClassicAndNativeBucketsAgree(t *testing.T) {
	t.Parallel()
	b := setup(t)
	agos := []time.Duration{
		time.Second, 3 * time.Second, 5 * time.Second, 100 * time.Second, time.Hour, 90 * time.Minute,
		60 * 24 * time.Hour,
	}
	for _, ago := range agos {
		b.fail(1, "q", "A", ago)
	}
	h := b.takeSample()["dlqd_time_to_filing_seconds{queue=q}"].GetHistogram()
	require.EqualValues(t, len(agos), h.GetSampleCount())
	require.Len(t, h.GetBucket(), 29)
	require.InDelta(t, 1.0/64, h.GetBucket()[0].GetUpperBound(), 0, "filing normally takes less than a second")
	for _, bucket := range h.GetBucket() {
		want := 0
		for _, ago := range agos {
			if ago.Seconds()+0.5 < bucket.GetUpperBound() { // the statements took a moment
				want++
			}
		}
		require.InDelta(t, want, bucket.GetCumulativeCount(), 1, bucket.GetUpperBound())
	}
	counts := map[float64]int64{} // by upper bound
	index, count, delta := int32(0), int64(0), 0
	for i, span := range h.GetPositiveSpan() {
		index += span.GetOffset()
		if i > 0 {
			index += 0
		}
		for range span.GetLength() {
			count += h.GetPositiveDelta()[delta]
			delta++
			counts[math.Pow(2, float64(index)/8)] = count
			index++
		}
	}
	var all int64
	for _, n := range counts {
		all += n
	}
	require.EqualValues(t, len(agos), all)
	for _, ago := range agos[3:] {
		require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(counts)), func(bound float64) bool {
			return bound >= ago.Seconds() && bound < 1.1*(ago.Seconds()+5)
		}), "%s: %v", ago, counts)
	}
}

func TestDatabase_PublishesInstallation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("CALL dlq.ensure_partitions()")
	b.exec(`INSERT INTO river_queue (name, created_at, updated_at, paused_at) VALUES ('mails', now(), now(), now()),
		('reports', now(), now(), NULL)`)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, scheduled_at) SELECT 'app', '{}', 'mails', 5,
		'available', now() - interval '5 minutes' FROM generate_series(1, 10500)`)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, scheduled_at, attempted_at)
		VALUES ('app', '{}', 'reports', 5, 1, 'running', now() - interval '40 seconds', now() - interval '10 seconds')`)
	b.exec("SELECT dlq.open_breaker('destination:shop')")
	b.exec("SELECT dlq.reset_breaker('destination:shop')")
	b.exec("SELECT dlq.open_breaker('destination:shop')")
	b.exec(`INSERT INTO dlq.paces (name, free_at) VALUES ('destination:shop', now() + interval '1 minute'),
		('replay:0', now() + interval '1 minute')`)
	b.exec("INSERT INTO dlq.gates (name, state, started_at) VALUES ('conditions:q', 'shut', now())")
	b.exec(`INSERT INTO dlq.replay_runs (id, filter, actor, total, replayed)
		VALUES (gen_random_uuid(), '{}', 'kim', 10, 4)`)
	b.exec("SELECT dlq.stop_automatic('kim', 'enough')")
	b.exec("INSERT INTO dlq.processes (id, name, version, parts) VALUES (gen_random_uuid(), 'one', '1', '{api}')")
	series := b.takeSample()
	b.requireSeries(series, map[string]float64{
		"dlqd_river_jobs{queue=mails,state=available}": 10000,
		"dlqd_river_jobs{queue=reports,state=running}": 1, "dlqd_river_jobs{queue=reports,state=available}": 0,
		"dlqd_river_queue_paused{queue=mails}": 1, "dlqd_river_queue_paused{queue=reports}": 0,
		"dlqd_river_oldest_job_seconds{queue=reports}": 0, "dlqd_river_latency_seconds{queue=reports}": 30,
		"dlqd_circuit_breaker_changes_total{name=destination:shop,to=open}":   2,
		"dlqd_circuit_breaker_changes_total{name=destination:shop,to=closed}": 1,
		"dlqd_gates{state=shut}": 1, "dlqd_gates{state=open}": 0, "dlqd_replay_runs{status=running}": 1,
		"dlqd_replay_run_entries{state=total}": 10, "dlqd_replay_run_entries{state=replayed}": 4,
		"dlqd_automatic_stopped{}": 1, "dlqd_processes{}": 1, "dlqd_capture{mode=on,triggers=enabled}": 1,
		"dlqd_unfiled_entries{}": 0, "dlqd_approvals{operation=erase,state=requested}": 0,
		"dlqd_reconciled_entries_total{why=missed}": 0, "dlqd_database_up{}": 1,
	})
	require.InDelta(t, 300, value(series["dlqd_river_oldest_job_seconds{queue=mails}"]), 30)
	require.InDelta(t, 60, value(series["dlqd_pace_reserved_seconds{name=destination:shop}"]), 30)
	require.NotContains(t, series, "dlqd_pace_reserved_seconds{name=replay:0}")
	ahead := time.Until(time.Unix(int64(value(series["dlqd_partitions_until_timestamp_seconds{table=transitions}"])), 0))
	require.Greater(t, ahead, 59*24*time.Hour)
	require.Less(t, ahead, 100*24*time.Hour)

	problems, err := testutil.GatherAndLint(b.metrics.Gatherer())
	require.NoError(t, err)
	require.Empty(t, problems)
}
