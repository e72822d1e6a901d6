package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// filing measures how fast one DLQ worker files and decides failures, which come from capture or from the reconciler.
// It also measures the time from a job's commit to the decision, with steady traffic and during a storm of failures.
func filing(b *bench, scale float64) error {
	if err := b.filingRates(int(50_000 * scale)); err != nil {
		return err
	}
	if err := b.filingDelays("steady, 500 failures/s", int(15_000*scale), 25, 50*time.Millisecond); err != nil {
		return err
	}
	return b.filingDelays("storm", int(100_000*scale), 1000, 0)
}

// listIndexes are the indexes of the open partition that serve lists and searches by message id. DLQ workers do not use
// them.
var listIndexes = []string{"event", "status", "queue", "kind", "class", "type", "source"}

func (b *bench) filingRates(entries int) error {
	b.row("batch", "filed and decided/s", "without list indexes", "filed by the reconciler")
	for _, batch := range []int{100, 500} {
		var rates [3][]float64
		for range b.rounds {
			for i, measure := range []func() (float64, float64, error){
				func() (float64, float64, error) { return b.filingRate(entries, batch, viaCapture) },
				func() (float64, float64, error) { return b.filingRate(entries, batch, viaCapture, listIndexes...) },
				func() (float64, float64, error) { return b.filingRate(entries/5, batch, b.viaReconciler) },
			} {
				rate, _, err := measure()
				if err != nil {
					return err
				}
				rates[i] = append(rates[i], rate)
			}
		}
		b.row(batch, thousands(median(rates[0])), thousands(median(rates[1])), thousands(median(rates[2])))
	}
	return b.table.Flush()
}

// viaCapture ends the jobs with end, so that capture records their failures.
func viaCapture(_ *pgxpool.Pool, end func() error) error { return end() }

// viaReconciler ends the jobs without capture, so that the reconciler finds their failures. The database then has
// partitions of closed entries for two years.
func (b *bench) viaReconciler(pool *pgxpool.Pool, end func() error) error {
	if _, err := pool.Exec(b.ctx, `SELECT dlq.ensure_partition(p, now() - m * interval '1 month')
		FROM unnest('{dlq.dead_letter_resolved,dlq.dead_letter_failed,dlq.dead_letter_archived}'::regclass[]) p,
			generate_series(1, 23) m`); err != nil {
		return err
	}
	if _, err := pool.Exec(b.ctx, "SELECT dlq.set_capture('off')"); err != nil {
		return err
	}
	if err := end(); err != nil {
		return err
	}
	for done := false; !done; {
		if err := pool.QueryRow(b.ctx, "SELECT done FROM dlq.reconcile(p_whole => true)").Scan(&done); err != nil {
			return err
		}
	}
	return nil
}

// filingRate drops the list indexes that the parameter without names. It returns the number of entries filed per
// second, and the WAL per entry in bytes. The function found must call its argument, which ends the jobs, and bring the
// jobs' failures into the inbox.
func (b *bench) filingRate(entries, batch int, found func(*pgxpool.Pool, func() error) error,
	without ...string,
) (rate, wal float64, err error) {
	err = b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		for _, name := range without {
			if _, err := pool.Exec(b.ctx, "DROP INDEX IF EXISTS dlq.dead_letter_open_by_"+name); err != nil {
				return err
			}
		}
		if err := insertFailing(b.ctx, pool, entries); err != nil {
			return err
		}
		if err := found(pool, func() error {
			_, err := pool.Exec(b.ctx,
				`UPDATE river_job SET state = 'discarded', finalized_at = now() + id * interval '1 microsecond'`)
			return err
		}); err != nil {
			return err
		}
		rate, wal, err = b.fileAll(pool, entries, batch)
		return err
	})
	return rate, wal, err
}

// fileAll files the failures in the inbox. It returns the number of entries filed and decided per second, and the WAL
// per entry in bytes.
func (b *bench) fileAll(pool *pgxpool.Pool, entries, batch int) (rate, wal float64, err error) {
	const decided = "SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL"
	if _, err := pool.Exec(b.ctx, "CHECKPOINT"); err != nil {
		return 0, 0, err
	}
	w, err := filingWorker(pool, batch, nil)
	if err != nil {
		return 0, 0, err
	}
	var lsn string
	var existing, filed int
	if err := pool.QueryRow(b.ctx, "SELECT pg_current_wal_lsn()::text, ("+decided+")").Scan(&lsn, &existing); err != nil {
		return 0, 0, err
	}
	start := time.Now()
	for more := true; more; {
		if more, err = w.File(b.ctx); err != nil {
			return 0, 0, err
		}
	}
	rate = float64(entries) / time.Since(start).Seconds()
	if err := pool.QueryRow(b.ctx, "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), $1::text::pg_lsn)::float8 / $2, ("+
		decided+")", lsn, entries).Scan(&wal, &filed); err != nil {
		return 0, 0, err
	}
	if filed-existing != entries {
		return 0, 0, fmt.Errorf("filed %d of %d failures", filed-existing, entries)
	}
	return rate, wal, nil
}

// insertFailing inserts jobs at their last attempt. A third each has a transient error, an outage, and an error that
// needs an operator.
func insertFailing(ctx context.Context, pool *pgxpool.Pool, jobs int) error {
	_, err := pool.Exec(ctx, `INSERT INTO river_job (kind, args, queue, priority, max_attempts, attempt, state,
		attempted_at, errors)
		SELECT 'kind_' || i % 50, jsonb_build_object('blob', repeat('x', 900), 'n', i), 'queue_' || i % 10, 1 + i % 4, 3, 3,
			'running', now(),
		       ARRAY[jsonb_build_object('at', now(), 'attempt', 3, 'trace', '', 'error',
		           (ARRAY['dial tcp 10.0.0.7:443: connection refused', 'unexpected status 503',
		           	'card was declined'])[1 + i % 3])]
		FROM generate_series(1, `+strconv.Itoa(jobs)+`) i`)
	return err
}

func filingWorker(pool *pgxpool.Pool, batch int, parked func([]worker.Parked)) (*worker.Worker, error) {
	rules, err := policy.Default("http://127.0.0.1:1/")
	if err != nil {
		return nil, err
	}
	planner, err := strategy.NewPlanner(rules, nil)
	if err != nil {
		return nil, err
	}
	return worker.New(worker.Config{
		Store:   deadletter.NewStore(pool, postgres.DefaultSchemas()),
		Planner: func() *strategy.Planner { return planner }, Logger: quiet,
		BatchSize: batch, Parked: parked,
	}), nil
}

// filingDelays makes jobs fail while a DLQ worker runs, and prints the time from the jobs' commit to the decision. Each
// statement makes the given number of jobs fail (statement). The statements follow each other at an interval (every).
// filingDelays measures only the third of the jobs that needs an operator, because the worker reports parked entries
// after its commit.
func (b *bench) filingDelays(name string, jobs, statement int, every time.Duration) error {
	return b.withPool(8, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := insertFailing(b.ctx, pool, jobs); err != nil {
			return err
		}
		var mu sync.Mutex
		committed, decided := make([]time.Time, jobs+1), make([]time.Time, jobs+1)
		done := make(chan struct{}, 1)
		reported := 0
		w, err := filingWorker(pool, 0, func(parked []worker.Parked) {
			now := time.Now()
			mu.Lock()
			defer mu.Unlock()
			for _, p := range parked {
				decided[binary.BigEndian.Uint64(p.ID[8:])&(1<<62-1)] = now
			}
			if reported += len(parked); reported >= jobs/3 {
				select {
				case done <- struct{}{}:
				default:
				}
			}
		})
		if err != nil {
			return err
		}
		group := background.Group{Logger: quiet}
		for _, loop := range w.Loops() {
			group.Add(loop)
		}
		group.Start()
		defer func() { _ = group.Stop(context.WithoutCancel(b.ctx)) }()

		start := time.Now()
		for first := 1; first <= jobs; first += statement {
			if _, err := pool.Exec(b.ctx, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp()
				WHERE id BETWEEN $1 AND $2`, first, first+statement-1); err != nil {
				return err
			}
			now := time.Now()
			mu.Lock()
			for id := first; id < first+statement && id <= jobs; id++ {
				committed[id] = now
			}
			mu.Unlock()
			if every > 0 {
				time.Sleep(time.Until(start.Add(time.Duration(first+statement) * every / time.Duration(statement))))
			}
		}
		failed := time.Since(start)
		select {
		case <-done:
		case <-time.After(2 * time.Minute):
			return fmt.Errorf("only %d of %d failures were decided", reported, jobs/3)
		}
		all := time.Since(start)
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf("\n%s: %s failures in %.1f s, all decided after %.1f s\n", name, thousands(float64(jobs)),
			failed.Seconds(), all.Seconds())
		return b.delays(committed, decided)
	})
}

// delays prints the time from the commit of a failure to its decision, separately for each fifth of the jobs.
func (b *bench) delays(committed, decided []time.Time) error {
	jobs := len(committed) - 1
	b.row("failed so far", "p50 ms", "p99 ms", "max ms")
	for part := range 5 {
		var delays []time.Duration
		for id := part*jobs/5 + 1; id <= (part+1)*jobs/5; id++ {
			if !decided[id].IsZero() {
				delays = append(delays, decided[id].Sub(committed[id]))
			}
		}
		slices.Sort(delays)
		ms := func(share float64) string {
			return fmt.Sprintf("%.0f", max(0, delays[int(share*float64(len(delays)-1))].Seconds()*1000))
		}
		b.row(thousands(float64((part+1)*jobs/5)), ms(0.5), ms(0.99), ms(1))
	}
	return b.table.Flush()
}
