package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// analyticsRuns is how often each analytics query is measured, for its percentiles.
const analyticsRuns = 200

// analyticsBench inserts ten million entries and thirty million moves of 90 days and rebuilds the rollups. It measures
// the time of the rebuild, of each analytics query, and of refreshes while another transaction is open. It also
// measures by how much refreshes slow down captures.
func analyticsBench(b *bench, scale float64) error {
	entries := int(10_000_000 * scale)
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := fillHistory(b.ctx, pool, entries); err != nil {
			return err
		}
		start := time.Now()
		var moves int
		if err := pool.QueryRow(b.ctx, "SELECT dlq.rebuild_rollups()").Scan(&moves); err != nil {
			return err
		}
		b.row("rebuild", "moves", "seconds", "moves/s")
		took := time.Since(start)
		b.row("", thousands(float64(moves)), fmt.Sprintf("%.1f", took.Seconds()), thousands(float64(moves)/took.Seconds()))
		if _, err := pool.Exec(b.ctx, "VACUUM ANALYZE"); err != nil {
			return err
		}
		if err := measureAnalytics(b, pool); err != nil {
			return err
		}
		if err := refreshBehind(b, pool, scale); err != nil {
			return err
		}
		return refreshCost(b, pool)
	})
}

// refreshBehind measures refreshes while another transaction stays open and a million moves arrive in transactions of
// 10,000. It prints the time of a refresh with 10,000 new moves and of one with none, and the same without the open
// transaction.
func refreshBehind(b *bench, pool *pgxpool.Pool, scale float64) error {
	store := analytics.NewStore(pool, postgres.DefaultSchemas())
	batches := max(int(100*scale), 3)
	b.row("refresh, transaction open for", "with 10,000 new moves ms", "without new moves ms")
	for _, open := range []bool{true, false} {
		tx, err := pool.Begin(b.ctx)
		if err != nil {
			return err
		}
		if open {
			if _, err := tx.Exec(b.ctx, "SELECT txid_current()"); err != nil {
				return err
			}
		}
		var some, none time.Duration
		for range batches {
			if _, err := pool.Exec(b.ctx, `INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor,
				queue, kind, error_class)
				SELECT gen_random_uuid(), 'dlq_pending', 'dlq_pending', 'worker:1', 'queue_' || i % 10, 'kind', 'transient'
				FROM generate_series(1, 10000) i`); err != nil {
				return err
			}
			for _, took := range []*time.Duration{&some, &none} {
				start := time.Now()
				if err := store.Refresh(b.ctx); err != nil {
					return err
				}
				*took = time.Since(start) // each batch overwrites the duration, so that the last one is printed
			}
		}
		if err := tx.Rollback(b.ctx); err != nil {
			return err
		}
		name := "no moves"
		if open {
			name = thousands(float64(batches*10_000)) + " moves"
		}
		b.row(name, fmt.Sprintf("%.0f", float64(some.Microseconds())/1000),
			fmt.Sprintf("%.0f", float64(none.Microseconds())/1000))
	}
	return nil
}

// fillHistory inserts entries, of which three percent are open, with three moves each. Before the inserts it drops the
// indexes that are not unique, and afterwards it creates them again.
func fillHistory(ctx context.Context, pool *pgxpool.Pool, entries int) error {
	const row = `SELECT i, to_timestamp(floor(extract(epoch
		FROM now() - interval '90 days') + i * (90 * 86400.0 / %[1]d))) AS at,
		dlq.first_id(to_timestamp(extract(epoch FROM now() - interval '90 days') + i * (90 * 86400.0 / %[1]d))) AS first_id
			FROM generate_series(1, %[1]d) i`
	rows := fmt.Sprintf("(SELECT i, at, (left(first_id::text, 24) || lpad(to_hex(i), 12, '0'))::uuid AS id, i > %[2]d "+
		"AS open FROM ("+row+") r) r", entries, entries*97/100)
	queue, class := "'queue_' || i % 10", "(ARRAY['transient', 'rate_limited', 'outage', 'validation', 'malformed', "+
		"'unauthorized', 'not_found', 'business', 'code_bug'])[1 + (i / 10) % 9]"
	partitions := `SELECT dlq.ensure_partition(p.parent, d)
		FROM (VALUES ('dlq.dead_letter_transitions'::regclass), ('dlq.dead_letter_resolved')) p (parent),
		generate_series(date_trunc('month', now() - interval '91 days', 'UTC'), now(), interval '1 month') d`
	queued := fmt.Sprintf(`INSERT INTO dlq.dead_letter_queue (id, status, stage, river_job_id, job_created_at, queue, kind,
		job_kind, priority, original_event, error_message, error_type, error_class, source, fingerprint, strategy, closed_at,
			first_failed_at, last_failed_at, created_at)
		SELECT id, CASE WHEN open THEN 'dlq_manual' ELSE 'dlq_resolved' END::dlq.dead_letter_status, CASE
			WHEN open THEN 'open' ELSE 'resolved' END::dlq.dead_letter_stage, i, at, %s, 'kind_' || i %% 50, 'noop', 2, '{}',
				'connection refused', 'TYPE_' || i %% 50, %s, 'source_' || i %% 200,
			left(md5('group_' || i %% 1000), 20), 'manual', CASE WHEN NOT open THEN at + interval '1 hour' END, at AS first,
				at AS last, at FROM %s`, queue, class, rows)
	moved := fmt.Sprintf(`INSERT INTO dlq.dead_letter_transitions (at, entry_id, from_status, to_status, actor, queue,
		kind, error_class, from_class, error_type, source, attempts, first_failed_at, left_group, joined_group, origin)
		SELECT at + m.n * interval '20 minutes', id, m.from_status::dlq.dead_letter_status, CASE WHEN m.n = 2
			AND open THEN 'dlq_manual' ELSE m.to_status END::dlq.dead_letter_status, CASE WHEN i %% 1000 = 0
			AND m.n = 2 THEN 'kim' ELSE 'worker:1' END, %s, 'kind', CASE WHEN m.n > 0 THEN %s END, CASE
				WHEN m.n > 1 THEN %[2]s END,
			CASE WHEN m.n = 0 THEN 'TYPE_' || i %% 50 END, CASE WHEN m.n = 0 THEN 'source_' || i %% 200 END, CASE
				WHEN m.n = 0 THEN 5 END,
			CASE WHEN m.n = 2 AND NOT open THEN at - i %% 3600 * interval '1 second' END, CASE WHEN m.n = 2
				AND NOT open THEN left(md5('group_' || i %% 1000), 20) END,
			CASE WHEN m.n = 1 THEN left(md5('group_' || i %% 1000), 20) END, CASE
					WHEN i %% 1000 = 0 AND m.n = 2 THEN 'psql' END
		FROM %s CROSS JOIN (VALUES (0, NULL, 'dlq_pending'), (1, 'dlq_pending', 'dlq_processing'),
			(2, 'dlq_processing', 'dlq_resolved')) m (n, from_status, to_status)`, queue, class, rows)
	in := func(statements ...string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, sql := range append([]string{
				"SET LOCAL timezone = 'UTC'", "SET LOCAL session_replication_role = replica",
				"SET LOCAL maintenance_work_mem = '1GB'",
			}, statements...) {
				if _, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
					return fmt.Errorf("%.60s: %w", sql, err)
				}
			}
			return nil
		})
	}
	if err := in(partitions); err != nil {
		return err
	}
	if err := setWAL(ctx, pool, "SET max_wal_size = '16GB'"); err != nil {
		return err
	}
	const indexes = `FROM pg_index
		WHERE indrelid IN ('dlq.dead_letter_open'::regclass, 'dlq.dead_letter_resolved'::regclass,
			'dlq.dead_letter_transitions'::regclass) AND NOT indisunique`
	var drop, create []string
	if err := pool.QueryRow(ctx,
		`SELECT array_agg('DROP INDEX ' || indexrelid::regclass), array_agg(replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON ')) `+indexes).Scan(&drop, &create); err != nil {
		return err
	}
	if err := in(drop...); err != nil {
		return err
	}
	var both errgroup.Group
	both.Go(func() error { return in(queued) })
	both.Go(func() error { return in(moved) })
	if err := both.Wait(); err != nil {
		return err
	}
	if err := in(create...); err != nil {
		return err
	}
	return setWAL(ctx, pool, "RESET max_wal_size")
}

// setWAL changes how much WAL the server writes between two checkpoints. Afterwards it runs ANALYZE and a checkpoint.
func setWAL(ctx context.Context, pool *pgxpool.Pool, change string) error {
	for _, sql := range []string{"ALTER SYSTEM " + change, "SELECT pg_reload_conf()", "ANALYZE", "CHECKPOINT"} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// measureAnalytics measures each analytics query analyticsRuns times over a usual window, 7 days, and over a long one,
// 90 days. The query by hour covers 7 days in both cases; the audit and the oldest entries have no window.
func measureAnalytics(b *bench, pool *pgxpool.Pool) error {
	store, trail := analytics.NewStore(pool, postgres.DefaultSchemas()),
		deadletter.NewStore(pool, postgres.DefaultSchemas())
	week, quarter := analytics.Window{Over: 7 * 24 * time.Hour}, analytics.Window{Over: 90 * 24 * time.Hour}
	questions := []struct {
		name string
		run  func(analytics.Window) error
	}{
		{"backlog and rates", func(w analytics.Window) error { _, err := store.Flow(b.ctx, w, "all", ""); return err }},
		{
			"backlog and rates by queue",
			func(w analytics.Window) error { _, err := store.Flow(b.ctx, w, "queue", ""); return err },
		},
		{"backlog and rates by queue and hour", func(w analytics.Window) error {
			_, err := store.Flow(b.ctx, analytics.Window{Over: min(w.Over, 7*24*time.Hour)}, "queue", "hour")
			return err
		}},
		{
			"backlog and rates by class",
			func(w analytics.Window) error { _, err := store.Flow(b.ctx, w, "class", ""); return err },
		},
		{"queues, resolution rate", func(w analytics.Window) error { _, err := store.Stats(b.ctx, w); return err }},
		{"times", func(w analytics.Window) error { _, err := store.Times(b.ctx, w, "all"); return err }},
		{"times by queue", func(w analytics.Window) error { _, err := store.Times(b.ctx, w, "queue"); return err }},
		{"error types", func(w analytics.Window) error { _, err := store.ErrorTypes(b.ctx, w, 20); return err }},
		{"failure groups and trend", func(w analytics.Window) error { _, err := store.TopGroups(b.ctx, w, 20); return err }},
		{"heat map", func(w analytics.Window) error { _, err := store.HeatMap(b.ctx, w, "Europe/Paris"); return err }},
		{"replay success", func(w analytics.Window) error { _, err := store.ReplaySuccess(b.ctx, w); return err }},
		{"oldest entries", func(analytics.Window) error { _, err := store.Oldest(b.ctx, 20); return err }},
		{"noisiest sources", func(w analytics.Window) error { _, err := store.NoisiestSources(b.ctx, w, 20); return err }},
		{"audit: moves of a user", func(analytics.Window) error {
			_, err := trail.Audit(b.ctx, deadletter.AuditFilter{Actor: "kim"}, 50, deadletter.AuditCursor{})
			return err
		}},
		{"audit: moves of all users", func(analytics.Window) error {
			_, err := trail.Audit(b.ctx, deadletter.AuditFilter{People: true}, 50, deadletter.AuditCursor{})
			return err
		}},
		{"cost of retries", func(w analytics.Window) error { _, err := store.RetryCost(b.ctx, w); return err }},
	}
	b.row("question", "7 days p50 ms", "p99 ms", "90 days p50 ms", "p99 ms")
	for _, q := range questions {
		cells := []any{q.name}
		for _, w := range []analytics.Window{week, quarter} {
			took := make([]time.Duration, analyticsRuns)
			for i := range took {
				start := time.Now()
				if err := q.run(w); err != nil {
					return fmt.Errorf("%s: %w", q.name, err)
				}
				took[i] = time.Since(start)
			}
			slices.Sort(took)
			for _, d := range []time.Duration{took[len(took)/2], took[len(took)*99/100]} {
				cells = append(cells, fmt.Sprintf("%.1f", float64(d.Microseconds())/1000))
			}
		}
		b.row(cells...)
	}
	return nil
}

// refreshCost compares the rate of captures without refreshes of the rollups and with the loop that refreshes them.
func refreshCost(b *bench, pool *pgxpool.Pool) error {
	store := analytics.NewStore(pool, postgres.DefaultSchemas())
	b.row("captures/s", "without refreshes", "with refreshes", "ratio")
	run := func(refresh bool) func() (float64, error) {
		return func() (float64, error) {
			// River's table grows with each failed job, which makes later failures slower.
			if _, err := pool.Exec(b.ctx, "TRUNCATE river_job"); err != nil {
				return 0, err
			}
			group := &background.Group{Logger: quiet}
			if refresh {
				group.Add(store.Loops()...)
			}
			group.Start()
			rate, _, err := captures(b.ctx, pool, func() error { time.Sleep(10 * time.Second); return nil })
			return rate, errors.Join(err, group.Stop(b.ctx))
		}
	}
	with, without, ratio, err := b.pairs(run(true), run(false))
	if err != nil {
		return err
	}
	b.row("", thousands(without), thousands(with), fmt.Sprintf("%.3f", ratio))
	return nil
}
