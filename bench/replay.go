package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
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

// replayLimit is the baseline for replay runs, which gives none of dlqd's guarantees. A transaction claims entries,
// inserts one job for each with River's client, and updates each entry.
const replayLimit = "limit"

// replayBench measures replay runs without a rate limit. It compares them with the baseline replayLimit, and with
// inserts of as many jobs by River's client. Then it measures one run at a rate of 1,000/s. The baseline has the same
// entries, indexes, batches and commits as the run, but no triggers. Each entry has its failed job.
func replayBench(b *bench, scale float64) error {
	entries := int(200_000 * scale)
	b.row("batch size", "replayed/s", "limit/s", "ratio", "River inserts/s", "ratio",
		"Postgres CPU ms per 1,000", "of the limit", "of River")
	for _, size := range []int{100, 1000, 5000} {
		size = min(size, entries)
		subjects := []string{"dlqd", replayLimit, "river"}
		var rates, cpu [3][]float64
		var ratios [3][]float64 // ratio of dlqd to each subject
		for round := range b.rounds {
			var measured [3]float64
			for i := range subjects {
				i = (i + round) % len(subjects)
				rate, used, err := b.replayRate(subjects[i], entries, size)
				if err != nil {
					return fmt.Errorf("%s: %w", subjects[i], err)
				}
				measured[i] = rate
				rates[i], cpu[i] = append(rates[i], rate), append(cpu[i], used)
			}
			for i := range subjects {
				ratios[i] = append(ratios[i], measured[0]/measured[i])
			}
		}
		b.row(size, thousands(median(rates[0])), thousands(median(rates[1])), fmt.Sprintf("%.2f", median(ratios[1])),
			thousands(median(rates[2])), fmt.Sprintf("%.2f", median(ratios[2])),
			fmt.Sprintf("%.0f", median(cpu[0])), fmt.Sprintf("%.0f", median(cpu[1])), fmt.Sprintf("%.0f", median(cpu[2])))
	}
	if err := b.table.Flush(); err != nil {
		return err
	}
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.fillReplay(pool, entries); err != nil {
			return err
		}
		limited, err := replayAll(b.ctx, pool, replay.Request{BatchSize: 100, Rate: 1000}, min(entries, 20_000))
		if err == nil {
			fmt.Printf("\nat a limit of 1,000/s: %s/s (%+.1f %%)\n", thousands(limited), (limited/1000-1)*100)
		}
		return err
	})
}

// replayRate returns how many entries per second the subject sends, and the CPU time of Postgres per thousand entries,
// in milliseconds.
func (b *bench) replayRate(subject string, entries, size int) (rate, cpu float64, err error) {
	err = b.withPool(4, func(pool *pgxpool.Pool) error {
		if subject == "river" {
			if err := b.reset(pool, false); err != nil {
				return err
			}
		} else if err := b.fillReplay(pool, entries); err != nil {
			return err
		}
		postmaster, err := b.postmaster(pool)
		if err != nil {
			return err
		}
		before := postgresCPU(postmaster)
		switch subject {
		case "river":
			rate, err = insertAll(b.ctx, pool, entries, size)
		case replayLimit:
			rate, err = limitAll(b.ctx, pool, entries, size)
		default:
			rate, err = replayAll(b.ctx, pool, replay.Request{BatchSize: size}, math.MaxInt)
		}
		cpu = perThousand(postgresCPU(postmaster)-before, int64(entries))
		return err
	})
	return rate, cpu, err
}

// fillReplay fills an empty database with entries and their failed jobs. A River client works the queues of the jobs.
func (b *bench) fillReplay(pool *pgxpool.Pool, entries int) error {
	if err := b.reset(pool, true); err != nil {
		return err
	}
	if err := fill(b.ctx, pool, entries); err != nil {
		return err
	}
	for _, sql := range []string{
		`INSERT INTO river_job (id, args, kind, max_attempts, priority, queue, state, attempt, attempted_at, errors,
			finalized_at, created_at)
		SELECT e.river_job_id, e.original_event, e.job_kind, 1, e.priority, e.queue, 'discarded', 1, now(),
			ARRAY[jsonb_build_object('attempt', 1, 'error', e.error_message)], now(), e.job_created_at
		FROM dlq.dead_letter_open e ORDER BY e.river_job_id`,
		"SELECT setval('river_job_id_seq', max(id)) FROM river_job",
		`INSERT INTO river_queue (name, created_at, updated_at)
		SELECT DISTINCT e.queue, now(), now() + interval '1 day' FROM dlq.dead_letter_open e`,
		"VACUUM ANALYZE river_job", "CHECKPOINT",
	} {
		if _, err := pool.Exec(b.ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// replayAll starts a replay run of all entries. It waits until the run has replayed the given number of entries, or
// all, and returns how many it replayed per second.
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
	run, err := replayer.Start(ctx, &request)
	if err != nil {
		return 0, err
	}
	group := &background.Group{Logger: quiet}
	group.Add(replay.NewRunner(store, replayer.Planner, quiet, nil).Loop())
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

// storedArgs are the arguments of an entry's job, unchanged.
type storedArgs json.RawMessage

func (storedArgs) Kind() string { return noopArgs{}.Kind() }

func (a storedArgs) MarshalJSON() ([]byte, error) { return json.RawMessage(a).MarshalJSON() }

// limitAll does the least work of a replay run: it claims the entries, inserts their jobs with River's client, and
// updates the entries' rows. It uses plain statements, with the batches and transactions of the run, and returns the
// entries per second.
func limitAll(ctx context.Context, pool *pgxpool.Pool, entries, size int) (float64, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	if err != nil {
		return 0, err
	}
	var after uuid.UUID
	left := entries
	batch := func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT e.id, e.original_event, e.queue, e.priority FROM dlq.dead_letter_open e
			WHERE e.status = 'dlq_pending' AND e.id > $1 ORDER BY e.id LIMIT $2 FOR UPDATE SKIP LOCKED`, after, size)
		if err != nil {
			return err
		}
		ids, params := make([]uuid.UUID, 0, size), make([]river.InsertManyParams, 0, size)
		for rows.Next() {
			var id uuid.UUID
			var args []byte
			opts := &river.InsertOpts{}
			if err := rows.Scan(&id, &args, &opts.Queue, &opts.Priority); err != nil {
				return err
			}
			ids, params = append(ids, id), append(params, river.InsertManyParams{Args: storedArgs(args), InsertOpts: opts})
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if len(ids) == 0 {
			return fmt.Errorf("%d entries are left, and none was found", left)
		}
		if _, err := client.InsertManyFastTx(ctx, tx, params); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE dlq.dead_letter_open SET status = 'dlq_processing', next_retry_at = NULL,
			redelivery_job_id = river_job_id, locked_by = 'bench', locked_at = now(), updated_at = now()
			WHERE id = ANY ($1)`, ids); err != nil {
			return err
		}
		after, left = ids[len(ids)-1], left-len(ids)
		return nil
	}
	start := time.Now()
	for left > 0 {
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SET LOCAL session_replication_role = replica"); err != nil {
				return err
			}
			for range max(1, 500/size) {
				if left == 0 {
					break
				}
				if err := batch(tx); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return 0, err
		}
	}
	return float64(entries) / time.Since(start).Seconds(), nil
}

// insertAll inserts jobs with River's client in batches of the given size, and returns the jobs per second.
func insertAll(ctx context.Context, pool *pgxpool.Pool, jobs, size int) (float64, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	if err != nil {
		return 0, err
	}
	params := make([]river.InsertManyParams, size)
	start := time.Now()
	for batch := range jobs / size {
		for i := range params {
			params[i].Args = noopArgs{strings.Repeat("x", 890) + strconv.Itoa(batch*size+i)}
		}
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := client.InsertManyFastTx(ctx, tx, params)
			return err
		}); err != nil {
			return 0, err
		}
	}
	return float64(jobs/size*size) / time.Since(start).Seconds(), nil
}
