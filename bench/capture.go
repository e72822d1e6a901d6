package main

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

// capture measures what dlqd's triggers cost an application, compared with River without triggers: jobs that River
// works, one statement that discards many jobs, transactions that fail one job each, and WAL. No dlqd process runs
// meanwhile.
func capture(b *bench, scale float64) error {
	b.newTable("River's batches", "with capture jobs/s", "without jobs/s", "ratio")
	for _, c := range []struct {
		name string
		jobs int
		fail bool
	}{{"all succeed", 200_000, false}, {"all are discarded", 100_000, true}} {
		jobs := int(float64(c.jobs) * scale)
		with, without, ratio, err := b.pairs(b.measureWork(jobs, true, c.fail), b.measureWork(jobs, false, c.fail))
		if err != nil {
			return err
		}
		b.row(c.name, thousands(with), thousands(without), fmt.Sprintf("%.3f", ratio))
	}
	b.newTable("one statement", "with capture ms", "without ms", "ratio")
	for _, c := range []struct{ jobs, bytes int }{{5000, 1000}, {2000, 20_000}} {
		with, without, ratio, err := b.pairs(b.statement(c.jobs, c.bytes, true), b.statement(c.jobs, c.bytes, false))
		if err != nil {
			return err
		}
		b.row(fmt.Sprintf("%d jobs of %d KB", c.jobs, c.bytes/1000), fmt.Sprintf("%.0f", with), fmt.Sprintf("%.0f", without),
			fmt.Sprintf("%.2f", ratio))
	}
	b.newTable("one job per transaction", "with capture commits/s", "without commits/s", "ratio")
	for _, conns := range []int{1, 16} {
		jobs := int(float64(4000*conns) * scale)
		with, without, ratio, err := b.pairs(b.commits(jobs, conns, true), b.commits(jobs, conns, false))
		if err != nil {
			return err
		}
		b.row(fmt.Sprintf("%d connections", conns), thousands(with), thousands(without), fmt.Sprintf("%.2f", ratio))
	}
	return b.captureWAL()
}

const discardJobs = `UPDATE river_job SET state = 'discarded', finalized_at = now(),
	errors = ARRAY['{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "connection refused by 10.0.0.7:5432", "trace": ""}'::jsonb]`

// insertRunning inserts running jobs whose payloads do not compress well.
func (b *bench) insertRunning(pool *pgxpool.Pool, jobs, bytes int, withDLQ bool) error {
	if err := b.reset(pool, withDLQ); err != nil {
		return err
	}
	if _, err := pool.Exec(b.ctx, `INSERT INTO river_job (kind, args, state, attempt, max_attempts, attempted_at)
		SELECT 'noop', jsonb_build_object('blob', (SELECT string_agg(md5(g::text || n::text), '')
		FROM generate_series(1, $2::int / 32) n)), 'running', 1, 1, now()
		FROM generate_series(1, $1::int) g`, jobs, bytes); err != nil {
		return err
	}
	_, err := pool.Exec(b.ctx, "VACUUM ANALYZE river_job")
	return err
}

func (b *bench) statement(jobs, bytes int, withDLQ bool) func() (float64, error) {
	return func() (ms float64, err error) {
		err = b.withPool(2, func(pool *pgxpool.Pool) error {
			if err := b.insertRunning(pool, jobs, bytes, withDLQ); err != nil {
				return err
			}
			start := time.Now()
			if _, err := pool.Exec(b.ctx, discardJobs); err != nil {
				return err
			}
			ms = float64(time.Since(start).Microseconds()) / 1000
			return nil
		})
		return ms, err
	}
}

func (b *bench) commits(jobs, conns int, withDLQ bool) func() (float64, error) {
	return func() (rate float64, err error) {
		err = b.withPool(int32(conns), func(pool *pgxpool.Pool) error {
			if err := b.insertRunning(pool, jobs, 1000, withDLQ); err != nil {
				return err
			}
			var first, next int64
			if err := pool.QueryRow(b.ctx, "SELECT min(id) FROM river_job").Scan(&first); err != nil {
				return err
			}
			group, ctx := errgroup.WithContext(b.ctx)
			start := time.Now()
			for range conns {
				group.Go(func() error {
					for n := atomic.AddInt64(&next, 1); n <= int64(jobs); n = atomic.AddInt64(&next, 1) {
						if _, err := pool.Exec(ctx, discardJobs+" WHERE id = $1", first+n-1); err != nil {
							return err
						}
					}
					return nil
				})
			}
			err := group.Wait()
			rate = float64(jobs) / time.Since(start).Seconds()
			return err
		})
		return rate, err
	}
}

// captureWAL prints how much WAL the failure of one job writes with capture and without, and the ratio.
func (b *bench) captureWAL() error {
	const jobs = 5000
	written := map[bool]float64{}
	for _, withDLQ := range []bool{true, false} {
		if err := b.withPool(2, func(pool *pgxpool.Pool) error {
			if err := b.insertRunning(pool, jobs, 1000, withDLQ); err != nil {
				return err
			}
			lsn := func() (at float64, err error) {
				err = pool.QueryRow(context.WithoutCancel(b.ctx), "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8").Scan(&at)
				return at, err
			}
			before, err := lsn()
			if err != nil {
				return err
			}
			if _, err := pool.Exec(b.ctx, discardJobs); err != nil {
				return err
			}
			after, err := lsn()
			written[withDLQ] = (after - before) / jobs
			return err
		}); err != nil {
			return err
		}
	}
	b.newTable("WAL per failure", "with capture bytes", "without bytes", "ratio")
	b.row("1 KB, no full pages", thousands(written[true]), thousands(written[false]),
		strings.TrimSpace(fmt.Sprintf("%.2f", written[true]/written[false])))
	return nil
}
