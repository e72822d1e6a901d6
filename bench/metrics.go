package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http/httptest"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// metricsBench measures what a scrape and a sample cost with ten thousand open dead letters and with a million, and 300,000 jobs that
// wait.
func metricsBench(b *bench, scale float64) error {
	p, err := policy.Load(policy.Source{Destination: "http://127.0.0.1:9"})
	if err != nil {
		return err
	}
	b.row("open", "jobs", "series", "bytes", "scrape: database ms, least", "median", "all of it ms, least", "median", "sample ms, least", "median", "count(*) ms")
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		for _, open := range []int{int(10_000 * scale), int(1_000_000 * scale)} {
			if err := b.fresh(pool, true); err != nil {
				return err
			}
			jobs := int(300_000 * scale)
			if err := fillOpen(b.ctx, pool, open, jobs); err != nil {
				return err
			}
			if err := measureMetrics(b, pool, p, open, jobs); err != nil {
				return err
			}
		}
		return nil
	})
}

func fillOpen(ctx context.Context, pool *pgxpool.Pool, open, jobs int) error {
	if _, err := pool.Exec(ctx, `INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'app', '{}', 'queue_' || i % 3, 5, 'available' FROM generate_series(1, $1) i`, jobs); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, `INSERT INTO river_queue (name, created_at, updated_at) SELECT 'queue_' || i, now(), now() FROM generate_series(0, 19) i`); err != nil {
		return err
	}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL session_replication_role = replica"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO dlq.dead_letter_queue (id, status, stage, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event, error_message, error_type, error_class, fingerprint, strategy, waiting_for, next_retry_at, first_failed_at, last_failed_at, created_at)
			SELECT dlq.uuid_v7(), CASE WHEN i % 2 = 0 THEN 'dlq_manual' ELSE 'dlq_pending' END::dlq.dead_letter_status, 'open', 10000000 + i, now(), 'queue_' || i % 20, 'kind', 'noop', 2, '{}', 'connection refused', 'TYPE_' || i % 50,
				(ARRAY['transient', 'rate_limited', 'outage', 'validation', 'malformed', 'unauthorized', 'not_found', 'business', 'code_bug'])[1 + (i / 20) % 9], 'group_' || i % 1000,
				CASE WHEN i % 2 = 0 THEN 'manual' ELSE 'immediate' END::dlq.strategy, CASE WHEN i % 2 = 1 THEN 'automatic' END, CASE WHEN i % 2 = 1 THEN now() END, now(), now(), now() FROM generate_series(1, $1) i`, open)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, queue, kind, error_class, error_type, attempts, failed_at)
			SELECT gen_random_uuid(), NULL, 'dlq_pending', 'worker:1', 'queue_' || i % 20, 'kind', 'transient', 'TYPE_' || i % 50, 5, now() - i % 1000 * interval '1 second' FROM generate_series(1, $1) i`, open)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, "SELECT dlq.rebuild_rollups()"); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "VACUUM ANALYZE")
	return err
}

func measureMetrics(b *bench, pool *pgxpool.Pool, p *policy.Policy, open, jobs int) error {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	m := metrics.New()
	m.WatchDatabase(store.DB(), func() *policy.Policy { return p }, quiet)
	var samples, reads, scrapes []float64
	series, size := 0, 0
	for range 30 {
		if _, err := pool.Exec(b.ctx, "DELETE FROM dlq.metrics_sample"); err != nil {
			return err
		}
		start := time.Now()
		if err := (&metrics.Sampler{Store: store, Schemas: postgres.DefaultSchemas()}).Once(b.ctx); err != nil {
			return err
		}
		samples = append(samples, millisecondsSince(start))
	}
	for range 200 {
		start := time.Now()
		var at, now time.Time
		var sample []byte
		if err := pool.QueryRow(b.ctx, "SELECT at, sample, clock_timestamp() FROM dlq.metrics_sample").Scan(&at, &sample, &now); err != nil { // as metrics.ReadSample does, which also decodes it
			return err
		}
		reads = append(reads, millisecondsSince(start))
		size = len(sample)
		start = time.Now()
		answer := httptest.NewRecorder()
		m.Handler().ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
		scrapes = append(scrapes, millisecondsSince(start))
		series = bytes.Count(answer.Body.Bytes(), []byte("\ndlq"))
	}
	start := time.Now()
	var counted int
	if err := pool.QueryRow(b.ctx, "SELECT count(*) FROM river_job").Scan(&counted); err != nil {
		return err
	}
	counting := millisecondsSince(start)
	cells := []any{thousands(float64(open)), thousands(float64(jobs)), series, size}
	for _, of := range [][]float64{reads, scrapes, samples} {
		slices.Sort(of)
		cells = append(cells, fmt.Sprintf("%.2f", of[0]), fmt.Sprintf("%.2f", of[len(of)/2]))
	}
	b.row(append(cells, fmt.Sprintf("%.0f", counting))...)
	return nil
}

func millisecondsSince(since time.Time) float64 { return float64(time.Since(since).Microseconds()) / 1000 }
