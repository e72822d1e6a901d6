package main

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
)

// retriesBench measures how fast dlqd applies the facts of retries that an operator makes outside dlqd, for example
// with "retry all" in River UI. An application's jobs are discarded, dlqd files their failures, and one statement
// retries all jobs. Then the jobs either wait to run, or have completed before dlqd applies the first fact.
func retriesBench(b *bench, scale float64) error {
	jobs := int(100_000 * scale)
	b.row("retried jobs", "facts/s", "Postgres CPU ms per 1,000")
	for _, c := range []struct{ name, meanwhile string }{
		{"wait to run", ""},
		{"have completed", "UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp()"},
	} {
		var rates, cpu []float64
		for range b.rounds {
			rate, used, err := b.retryRate(jobs, c.meanwhile)
			if err != nil {
				return err
			}
			rates, cpu = append(rates, rate), append(cpu, used)
		}
		b.row(c.name, thousands(median(rates)), fmt.Sprintf("%.0f", median(cpu)))
	}
	return nil
}

// retryRate retries jobs, and then executes the SQL in meanwhile, which may be empty. It returns how many facts per
// second dlqd then applies, and the CPU time of Postgres per thousand facts, in milliseconds.
func (b *bench) retryRate(jobs int, meanwhile string) (rate, cpu float64, err error) {
	err = b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := insertFailing(b.ctx, pool, jobs); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx,
			"UPDATE river_job SET state = 'discarded', finalized_at = now() + id * interval '1 microsecond'"); err != nil {
			return err
		}
		w, err := filingWorker(pool, 500, nil)
		if err != nil {
			return err
		}
		for more := true; more; {
			if more, err = w.File(b.ctx); err != nil {
				return err
			}
		}
		applier := &facts.Applier{Store: deadletter.NewStore(pool, postgres.DefaultSchemas())}
		if _, err := applier.Once(b.ctx); err != nil { // the first turn applies facts one by one, so it must not be measured
			return err
		}
		for _, sql := range []string{
			"VACUUM ANALYZE",
			`UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now(),
				max_attempts = greatest(max_attempts, attempt + 1)`,
			meanwhile, "CHECKPOINT",
		} {
			if _, err := pool.Exec(b.ctx, sql); err != nil {
				return err
			}
		}
		postmaster, err := b.postmaster(pool)
		if err != nil {
			return err
		}
		before, start := postgresCPU(postmaster), time.Now()
		if err := applier.All(b.ctx); err != nil {
			return err
		}
		rate = float64(jobs) / time.Since(start).Seconds()
		cpu = perThousand(postgresCPU(postmaster)-before, int64(jobs))
		var left, done int
		if err := pool.QueryRow(b.ctx, `SELECT (SELECT count(*) FROM dlq.job_facts), count(*)
			FROM dlq.dead_letter_queue WHERE status IN ('dlq_processing', 'dlq_resolved')`).Scan(&left, &done); err != nil {
			return err
		}
		if left != 0 || done != jobs {
			return fmt.Errorf("%d facts are left, and %d of %d entries followed their jobs", left, done, jobs)
		}
		return nil
	})
	return rate, cpu, err
}
