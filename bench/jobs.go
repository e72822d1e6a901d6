package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/riverdlq"
)

const (
	jobWorkers = 1000
	poolConns  = 20
)

type noopArgs struct {
	Blob string `json:"blob"`
}

func (noopArgs) Kind() string { return "noop" }

var errNoop = errors.New("connection refused")

// work inserts jobs, then runs a River client that works them, and returns the jobs per second.
func work(b *bench, pool *pgxpool.Pool, jobs int, fail bool, middleware []rivertype.Middleware) (float64, error) {
	blob := strings.Repeat("x", 900)
	if _, err := pool.Exec(b.ctx, `INSERT INTO river_job (kind, args, max_attempts, queue)
		SELECT 'noop', jsonb_build_object('blob', $1::text), 1, 'default'
		FROM generate_series(1, $2::int)`, blob, jobs); err != nil {
		return 0, err
	}
	if _, err := pool.Exec(b.ctx, "VACUUM ANALYZE river_job"); err != nil {
		return 0, err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[noopArgs]) error {
		if fail {
			return errNoop
		}
		return nil
	}))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{"default": {MaxWorkers: jobWorkers}}, Workers: workers, Logger: quiet,
		FetchCooldown: 5 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, Middleware: middleware,
	})
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := client.Start(b.ctx); err != nil {
		return 0, err
	}
	for left := 1; left > 0; time.Sleep(20 * time.Millisecond) {
		// This is the cheapest way to check whether a job has not ended yet.
		err := pool.QueryRow(b.ctx, "SELECT 1 FROM river_job WHERE finalized_at IS NULL LIMIT 1").Scan(&left)
		if errors.Is(err, pgx.ErrNoRows) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	rate := float64(jobs) / time.Since(start).Seconds()
	return rate, client.Stop(b.ctx)
}

func (b *bench) measureWork(jobs int, withDLQ, fail bool, middleware ...rivertype.Middleware) func() (float64, error) {
	return func() (rate float64, err error) {
		err = b.withPool(poolConns, func(pool *pgxpool.Pool) error {
			if err := b.reset(pool, withDLQ); err != nil {
				return err
			}
			if rate, err = work(b, pool, jobs, fail, middleware); err != nil || !withDLQ || !fail {
				return err
			}
			var entries int
			if err := pool.QueryRow(b.ctx, "SELECT count(*) FROM dlq.dead_letter_queue").Scan(&entries); err != nil {
				return err
			}
			if entries != jobs {
				return fmt.Errorf("%d jobs failed, but there are %d dead letters", jobs, entries)
			}
			return nil
		})
		return rate, err
	}
}

// processing works no-op jobs with dlqd's River client on dlqd's schema, and with River's own client on River's schema.
func processing(b *bench, scale float64) error {
	jobs := int(200_000 * scale)
	b.row("no-op jobs", "dlqd jobs/s", "bare River jobs/s", "ratio")
	with, bare, ratio, err := b.pairs(b.measureWork(jobs, true, false, riverdlq.NewMiddleware()),
		b.measureWork(jobs, false, false))
	if err != nil {
		return err
	}
	b.row(jobs, thousands(with), thousands(bare), fmt.Sprintf("%.3f", ratio))
	return nil
}
