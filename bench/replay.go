package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

// replayBench measures replay runs without a rate limit, beside River inserting as many jobs of the
// same size, and at a given rate.
func replayBench(b *bench, scale float64) error {
	entries := int(200_000 * scale)
	b.row("batch size", "replayed/s", "River inserts/s", "ratio")
	for _, size := range []int{100, 1000, 5000} {
		size = min(size, entries)
		subject, baseline, ratio, err := b.pairs(
			func() (rate float64, err error) {
				err = b.withPool(4, func(pool *pgxpool.Pool) error {
					if err := b.reset(pool, true); err != nil {
						return err
					}
					if err := fill(b.ctx, pool, entries); err != nil {
						return err
					}
					rate, err = replayAll(b.ctx, pool, replay.Request{BatchSize: size}, math.MaxInt)
					return err
				})
				return rate, err
			},
			func() (rate float64, err error) {
				err = b.withPool(4, func(pool *pgxpool.Pool) error {
					if err := b.reset(pool, false); err != nil {
						return err
					}
					rate, err = insertAll(b.ctx, pool, entries, size)
					return err
				})
				return rate, err
			})
		if err != nil {
			return err
		}
		b.row(size, thousands(subject), thousands(baseline), fmt.Sprintf("%.2f", ratio))
	}
	if err := b.table.Flush(); err != nil {
		return err
	}
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := fill(b.ctx, pool, entries); err != nil {
			return err
		}
		limited, err := replayAll(b.ctx, pool, replay.Request{BatchSize: 100, Rate: 1000}, min(entries, 20_000))
		if err == nil {
			fmt.Printf("\nat a limit of 1,000/s: %s/s (%+.1f %%)\n", thousands(limited), (limited/1000-1)*100)
		}
		return err
	})
}

// replayAll runs a replay of all entries until the number of replayed ones reaches most, and
// returns the number per second.
func replayAll(ctx context.Context, pool *pgxpool.Pool, request replay.Request, most int) (float64, error) {
	rules, err := policy.Default("http://127.0.0.1:1/")
	if err != nil {
		return 0, err
	}
	planner, err := strategy.NewPlanner(rules, nil)
	if err != nil {
		return 0, err
	}
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	replayer := &replay.Replayer{Store: store, Planner: func() *strategy.Planner { return planner }}
	request.Filter, request.All, request.StopAt, request.Act = json.RawMessage(`{}`), true, replay.DefaultStopAt,
		deadletter.Act{Actor: "bench"}
	request.Force = true // no worker runs the redeliveries
	run, err := replayer.Start(ctx, &request)
	if err != nil {
		return 0, err
	}
	group := &background.Group{Logger: quiet}
	group.Add(replay.NewRunner(store, quiet, nil).Loop())
	start := time.Now()
	group.Start()
	defer func() { _ = group.Stop(ctx) }()
	for {
		time.Sleep(20 * time.Millisecond)
		var replayed int
		if err := pool.QueryRow(ctx, "SELECT replayed FROM dlq.replay_runs WHERE id = $1",
			run.ID).Scan(&replayed); err != nil {
			return 0, err
		}
		if replayed >= min(most, int(run.Total)) {
			return float64(replayed) / time.Since(start).Seconds(), nil
		}
	}
}

func insertAll(ctx context.Context, pool *pgxpool.Pool, jobs, size int) (float64, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	if err != nil {
		return 0, err
	}
	params := make([]river.InsertManyParams, size)
	for i := range params {
		params[i] = river.InsertManyParams{Args: noopArgs{strings.Repeat("x", 900)}}
	}
	start := time.Now()
	for range jobs / size {
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := client.InsertManyFastTx(ctx, tx, params)
			return err
		}); err != nil {
			return 0, err
		}
	}
	return float64(jobs/size*size) / time.Since(start).Seconds(), nil
}
