package main

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/retention"
)

// captureBatch is the number of jobs that fail in one transaction.
const captureBatch = 100

// retentionBench measures three ways to remove a month of a million resolved entries: drop it, archive and drop it, and
// delete its entries. For each it prints the duration, and how many jobs per second can fail and be captured before,
// meanwhile and afterwards.
func retentionBench(b *bench, scale float64) error {
	entries := int(1_000_000 * scale)
	idle := func() error { time.Sleep(time.Duration(float64(5*time.Second) * min(1, 10*scale))); return nil }
	b.row("", "seconds", "captures/s before", "during", "after", "longest capture of 100")
	for _, how := range []string{"dropped", "archived, then dropped", "deleted"} {
		err := b.withPool(4, func(pool *pgxpool.Pool) error {
			if err := b.reset(pool, true); err != nil {
				return err
			}
			if err := fillMonth(b.ctx, pool, entries); err != nil {
				return err
			}
			before, _, err := captures(b.ctx, pool, idle)
			if err != nil {
				return err
			}
			start := time.Now()
			var took time.Duration
			during, longest, err := captures(b.ctx, pool, func() error {
				err := removeMonth(b.ctx, pool, how)
				took = time.Since(start)
				time.Sleep(max(0, time.Second-took)) // at least a second, so that the rate can be measured
				return err
			})
			if err != nil {
				return err
			}
			// River's table grows with each failed job, which makes later failures slower. The rate after the removal shows
			// how much of a decline comes from that.
			after, _, err := captures(b.ctx, pool, idle)
			b.row(how, fmt.Sprintf("%.3f", took.Seconds()), thousands(before), thousands(during), thousands(after),
				longest.Round(time.Millisecond))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// fillMonth fills the partition of a month that is long past.
func fillMonth(ctx context.Context, pool *pgxpool.Pool, entries int) error {
	for _, sql := range []string{
		"SELECT dlq.ensure_partition('dlq.dead_letter_resolved', '2024-01-01Z')",
		fmt.Sprintf(`SET session_replication_role = replica; -- resolving each entry would take an hour
			INSERT INTO dlq.dead_letter_resolved (id, status, stage, river_job_id, job_created_at, queue, kind, job_kind,
				priority, original_event, error_message, error_type, error_class, source, closed_at, first_failed_at,
					last_failed_at)
			SELECT dlq.uuid_v7(), 'dlq_resolved', 'resolved', i, now(), 'queue_' || i %% 10, 'kind_' || i %% 50, 'noop', 2,
				jsonb_build_object('blob', repeat('x', 900)), 'dial tcp: connection refused', 'T', 'transient', 's',
				'2024-01-01Z'::timestamptz + i * interval '1 second', now(), now()
			FROM generate_series(1, %d) i; SET session_replication_role = DEFAULT`, entries),
		"VACUUM ANALYZE dlq.dead_letter_resolved", "CHECKPOINT",
	} {
		if _, err := pool.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
	}
	return nil
}

// removeMonth drops the month as retention does, with or without an archive, or deletes its entries in steps of 1,000.
func removeMonth(ctx context.Context, pool *pgxpool.Pool, how string) error {
	if how != "deleted" {
		keeper := &retention.Keeper{Store: deadletter.NewStore(pool, postgres.DefaultSchemas()), Logger: quiet}
		rules, err := policy.Default("http://127.0.0.1:1/")
		if err != nil {
			return err
		}
		keeper.Policy = func() *policy.Policy { return rules }
		if how != "dropped" {
			dir, err := os.MkdirTemp("", "dlqd-bench-archive-")
			if err != nil {
				return err
			}
			defer func() { _ = os.RemoveAll(dir) }()
			if keeper.Archive, err = archive.Open(ctx, dir); err != nil {
				return err
			}
		}
		done, err := keeper.Run(ctx)
		if err == nil && done.Dropped != 1 {
			err = fmt.Errorf("%d months were dropped", done.Dropped)
		}
		return err
	}
	for {
		tag, err := pool.Exec(ctx, `DELETE FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved' AND id IN (
			SELECT id FROM dlq.dead_letter_resolved WHERE closed_at < now() - interval '30 days' ORDER BY id LIMIT 1000)`)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
	}
}

// captures makes jobs fail while during runs. It returns the number of jobs per second, and the longest duration of a
// batch of captureBatch jobs.
func captures(ctx context.Context, pool *pgxpool.Pool, during func() error) (perSecond float64,
	longest time.Duration, err error,
) {
	var stop atomic.Bool
	ended := make(chan error, 1)
	go func() { err := during(); stop.Store(true); ended <- err }()
	start, n := time.Now(), 0
	for !stop.Load() {
		if _, err := pool.Exec(ctx, `INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'k', '{}', 1, 'running'
			FROM generate_series(1, $1)`, captureBatch); err != nil {
			return 0, 0, err
		}
		began := time.Now()
		if _, err := pool.Exec(ctx, `UPDATE river_job SET state = 'discarded', finalized_at = now(),
			errors = ARRAY['{"error": "x"}'::jsonb] WHERE state = 'running'`); err != nil {
			return 0, 0, err
		}
		longest = max(longest, time.Since(began))
		n += captureBatch
	}
	return float64(n) / time.Since(start).Seconds(), longest, <-ended
}
