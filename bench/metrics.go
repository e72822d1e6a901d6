package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/metrics/metricstest"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// metricsBench measures the cost of a scrape and of a sample with 300,000 waiting jobs. It does so for 20 queues and
// for the maximum number of queues, all with the counters of years, and for ten thousand and a million open dead
// letters.
func metricsBench(b *bench, scale float64) error {
	p, err := policy.Load(policy.Source{Destination: "http://127.0.0.1:9"})
	if err != nil {
		return err
	}
	b.row("queues", "open", "jobs", "series", "sample bytes", "stored", "WAL per sample", "with changed counters",
		"scrape: database ms, min", "median", "whole scrape ms, min", "median", "sample ms, min", "median", "count(*) ms")
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		for _, of := range []measured{
			{20, int(10_000 * scale), int(300_000 * scale)},
			{100, int(10_000 * scale), int(300_000 * scale)},
			{100, int(1_000_000 * scale), int(300_000 * scale)},
		} {
			if err := b.reset(pool, true); err != nil {
				return err
			}
			if err := fillOpen(b.ctx, pool, of.open, of.jobs); err != nil {
				return err
			}
			if _, err := pool.Exec(b.ctx, metricstest.FillCounters, of.queues); err != nil {
				return err
			}
			if _, err := pool.Exec(b.ctx, "VACUUM ANALYZE"); err != nil {
				return err
			}
			if err := measureMetrics(b, pool, p, of); err != nil {
				return err
			}
		}
		return nil
	})
}

// measured has the numbers of queues with counters, of open dead letters, and of jobs.
type measured struct{ queues, open, jobs int }

func fillOpen(ctx context.Context, pool *pgxpool.Pool, open, jobs int) error {
	if _, err := pool.Exec(ctx, `INSERT INTO river_job (kind, args, queue, max_attempts, state)
		SELECT 'app', '{}', 'queue_' || i % 3, 5, 'available' FROM generate_series(1, $1) i`, jobs); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, `INSERT INTO river_queue (name, created_at, updated_at) SELECT 'queue_' || i, now(), now()
		FROM generate_series(0, 19) i`); err != nil {
		return err
	}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL session_replication_role = replica"); err != nil {
			return err
		}
		//nolint:dupword // columns
		_, err := tx.Exec(ctx, `INSERT INTO dlq.dead_letter_queue (id, status, stage, river_job_id, job_created_at, queue,
			kind, job_kind, priority, original_event, error_message, error_type, error_class, fingerprint, strategy, waiting_for,
				next_retry_at, first_failed_at, last_failed_at, created_at)
			SELECT dlq.uuid_v7(), CASE WHEN i % 2 = 0 THEN 'dlq_manual' ELSE 'dlq_pending' END::dlq.dead_letter_status, 'open',
				10000000 + i, now(), 'queue_' || i % 20, 'kind', 'noop', 2, '{}', 'connection refused', 'TYPE_' || i % 50,
				(ARRAY['transient', 'rate_limited', 'outage', 'validation', 'malformed', 'unauthorized', 'not_found', 'business',
					'code_bug'])[1 + (i / 20) % 9], 'group_' || i % 1000,
				CASE WHEN i % 2 = 0 THEN 'manual' ELSE 'immediate' END::dlq.strategy, CASE WHEN i % 2 = 1 THEN 'automatic' END, CASE
					WHEN i % 2 = 1 THEN now() END, now(), now(), now() FROM generate_series(1, $1) i`, open)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, queue, kind,
			error_class, error_type, attempts, failed_at)
			SELECT gen_random_uuid(), NULL, 'dlq_pending', 'worker:1', 'queue_' || i % 20, 'kind', 'transient',
				'TYPE_' || i % 50, 5, now() - i % 1000 * interval '1 second' FROM generate_series(1, $1) i`, open)
		return err
	})
	if err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "SELECT dlq.rebuild_rollups()")
	return err
}

func measureMetrics(b *bench, pool *pgxpool.Pool, p *policy.Policy, of measured) error {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	sampler := &metrics.Sampler{
		Store: store, Schemas: postgres.DefaultSchemas(), Policy: func() *policy.Policy { return p },
	}
	m := metrics.New()
	m.WatchDatabase(store.DB(), func() *policy.Policy { return p }, quiet)
	if err := sampler.Once(b.ctx); err != nil {
		return err
	}
	// Before each sample, one row changes: alternately a pace, which changes often in a running dlqd, and a counter.
	var samples, reads, scrapes []float64
	var logged [2][]float64
	for i := range 30 {
		change := `INSERT INTO dlq.paces (name, free_at) VALUES ('destination:shop', now()) ON CONFLICT (name) DO UPDATE
			SET free_at = now()`
		if i%2 == 1 {
			change = "UPDATE dlq.counters SET value = value + 1 WHERE queue = 'queue_1' AND label = '10'"
		}
		for _, sql := range []string{change, "UPDATE dlq.metrics_sample SET at = at - interval '1 hour'"} {
			if _, err := pool.Exec(b.ctx, sql); err != nil {
				return err
			}
		}
		before, err := walPosition(b.ctx, pool)
		if err != nil {
			return err
		}
		start := time.Now()
		if err := sampler.Once(b.ctx); err != nil {
			return err
		}
		samples = append(samples, millisecondsSince(start))
		after, err := walPosition(b.ctx, pool)
		if err != nil {
			return err
		}
		logged[i%2] = append(logged[i%2], after-before)
	}
	series, size, stored := 0, 0, 0
	if err := pool.QueryRow(b.ctx,
		"SELECT pg_column_size(counters) + pg_column_size(sample) FROM dlq.metrics_sample").Scan(&stored); err != nil {
		return err
	}
	for range 100 {
		start := time.Now()
		var at, now time.Time
		var counters, sample []byte
		// metrics.ReadSample does the same, and also decodes the sample.
		if err := pool.QueryRow(b.ctx, "SELECT at, counters, sample, clock_timestamp() FROM dlq.metrics_sample").Scan(&at,
			&counters, &sample, &now); err != nil {
			return err
		}
		reads = append(reads, millisecondsSince(start))
		size = len(counters) + len(sample)
		if _, err := pool.Exec(b.ctx, "UPDATE dlq.metrics_sample SET at = clock_timestamp()"); err != nil {
			// The update makes a new sample that no scrape has read yet.
			return err
		}
		start = time.Now()
		answer := httptest.NewRecorder()
		m.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(b.ctx, http.MethodGet, "/metrics", nil))
		scrapes = append(scrapes, millisecondsSince(start))
		series = bytes.Count(answer.Body.Bytes(), []byte("\ndlq"))
	}
	start := time.Now()
	var counted int
	if err := pool.QueryRow(b.ctx, "SELECT count(*) FROM river_job").Scan(&counted); err != nil {
		return err
	}
	counting := millisecondsSince(start)
	cells := []any{of.queues, thousands(float64(of.open)), thousands(float64(of.jobs)), series, size, stored}
	for _, bytes := range logged {
		slices.Sort(bytes)
		cells = append(cells, bytes[len(bytes)/2])
	}
	for _, times := range [][]float64{reads, scrapes, samples} {
		slices.Sort(times)
		cells = append(cells, fmt.Sprintf("%.2f", times[0]), fmt.Sprintf("%.2f", times[len(times)/2]))
	}
	b.row(append(cells, fmt.Sprintf("%.0f", counting))...)
	return nil
}

// walPosition returns the WAL insert position of the server, in bytes.
func walPosition(ctx context.Context, pool *pgxpool.Pool) (bytes float64, err error) {
	err = pool.QueryRow(ctx, "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8").Scan(&bytes)
	return bytes, err
}

func millisecondsSince(since time.Time) float64 {
	return float64(time.Since(since).Microseconds()) / 1000
}
