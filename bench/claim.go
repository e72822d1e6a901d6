package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// batchSize is the number of entries that one transaction claims.
const batchSize = 100

// claim fills the open partition with 1,000,000 entries and measures the transactions of DLQ workers. The baseline is
// the same with 10,000 entries.
func claim(b *bench, scale float64) error {
	const least = 6 * batchSize // one batch for each step
	large, small := max(least, int(1_000_000*scale)), max(least, int(10_000*scale))
	b.row("entries", "claim rows/s", "claim + decide rows/s", "claim + redeliver rows/s")
	for _, entries := range []int{small, large} {
		var rates [3][]float64
		err := b.withPool(4, func(pool *pgxpool.Pool) error {
			for range b.rounds {
				if err := b.reset(pool, true); err != nil {
					return err
				}
				if err := fill(b.ctx, pool, entries); err != nil {
					return err
				}
				measured, err := measureClaims(b.ctx, pool, min(entries/3, 30_000))
				if err != nil {
					return err
				}
				for i := range rates {
					rates[i] = append(rates[i], measured[i])
				}
			}
			if entries == large {
				return plans(b.ctx, pool)
			}
			return nil
		})
		if err != nil {
			return err
		}
		b.row(thousands(float64(entries)), thousands(median(rates[0])), thousands(median(rates[1])),
			thousands(median(rates[2])))
	}
	return nil
}

func fill(ctx context.Context, pool *pgxpool.Pool, entries int) error {
	_, err := pool.Exec(ctx, `
		SET session_replication_role = replica; -- skip the audit trail, which is not measured
		INSERT INTO dlq.dead_letter_open (id, river_job_id, job_created_at, stage, queue, kind, job_kind, priority,
			original_event, error_message,
			error_type, error_class, source, next_retry_at, first_failed_at, last_failed_at)
		SELECT dlq.uuid_v7(), i, now(), 'open', 'queue_' || i % 10, 'kind_' || i % 50, 'noop', 1 + i % 4,
			jsonb_build_object('blob', repeat('x', 890) || i), -- equal payloads would be each other's later work
			'dial tcp: connection refused', 'TYPE_' || i % 20, (ARRAY['transient', 'outage', 'validation'])[1 + i % 3],
				'source_' || i % 30,
			now() - i % 3600 * interval '1 second', now(), now()
		FROM generate_series(1, `+strconv.Itoa(entries)+`) i;
		SET session_replication_role = DEFAULT`, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return err
	}
	for _, sql := range []string{"VACUUM ANALYZE dlq.dead_letter_open", "CHECKPOINT"} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// measureClaims returns the entries per second of one worker for claims only, for claims that decide, and for claims
// that redeliver. Each transaction handles one batch.
func measureClaims(ctx context.Context, pool *pgxpool.Pool, rows int) ([3]float64, error) {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	var rates [3]float64
	start := time.Now()
	for range rows / batchSize {
		if err := store.InTx(ctx, func(tx postgres.DB) error {
			rows, err := tx.Query(ctx, worker.ClaimSQL, false, nil, batchSize)
			if err != nil {
				return err
			}
			claimed, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
			if err == nil && len(claimed) != batchSize {
				err = fmt.Errorf("claimed %d entries instead of %d", len(claimed), batchSize)
			}
			return err
		}); err != nil {
			return rates, err
		}
	}
	rates[0] = float64(rows) / time.Since(start).Seconds()

	rules, err := policy.Default("http://127.0.0.1:1/")
	if err != nil {
		return rates, err
	}
	rules.Routing.RedeliveriesPerSecond = 0 // no limit
	planner, err := strategy.NewPlanner(rules, nil)
	if err != nil {
		return rates, err
	}
	now := time.Now()
	w := worker.New(worker.Config{
		Store: store, Planner: func() *strategy.Planner { return planner },
		Logger: quiet, Now: func() time.Time { return now },
	})
	for i, step := range []string{"decide", "redeliver"} {
		if step == "redeliver" { // make the entries look due
			if _, err := pool.Exec(ctx, `SET session_replication_role = replica; UPDATE dlq.dead_letter_open
				SET strategy = 'immediate', next_retry_at = now() - interval '1 day' WHERE strategy = 'immediate';
				SET session_replication_role = DEFAULT`,
				pgx.QueryExecModeSimpleProtocol); err != nil {
				return rates, err
			}
			if _, err := pool.Exec(ctx, "VACUUM dlq.dead_letter_open"); err != nil {
				return rates, err
			}
		}
		start = time.Now()
		for range rows / batchSize / 2 {
			if _, err := w.RunOnce(ctx); err != nil {
				return rates, err
			}
		}
		rates[i+1] = float64(rows/2) / time.Since(start).Seconds()
	}
	return rates, nil
}

// plans prints the plans and times of statements of DLQ workers, of the backlog and of the lists.
func plans(ctx context.Context, pool *pgxpool.Pool) error {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	show := func(name, sql string, args ...any) error {
		lines, err := explain(ctx, pool, sql, args...)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Printf("--- %s\n%s\n\n", name, strings.Join(lines, "\n"))
		return nil
	}
	if err := show("claim", worker.ClaimSQL, false, nil, batchSize); err != nil {
		return err
	}
	if err := show("backlog", deadletter.BacklogSQL); err != nil {
		return err
	}
	// A third of the entries waits for a condition, and a third is parked, in a thousand failure groups.
	if _, err := pool.Exec(ctx, `SET session_replication_role = replica;
		UPDATE dlq.dead_letter_open SET strategy = 'conditional', waiting_for = 'condition: x',
			next_retry_at = now() + interval '1 hour' WHERE error_class = 'outage';
		UPDATE dlq.dead_letter_open SET strategy = 'manual', status = 'dlq_manual', next_retry_at = NULL,
			fingerprint = md5((river_job_id % 1000)::text) WHERE error_class = 'validation';
		SET session_replication_role = DEFAULT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, "VACUUM ANALYZE dlq.dead_letter_open"); err != nil {
		return err
	}
	for _, q := range []struct {
		name, sql string
		args      []any
	}{
		{"queues with waiting entries", worker.WaitingQueuesSQL, nil},
		{"claim of waiting entries", worker.ClaimWaitingSQL, []any{nil, nil, nil, "queue_4", batchSize}},
		{"smart retry: failure groups", worker.StuckGroupsSQL, []any{1000}},
		{
			"smart retry: failures of a group", worker.GroupFailuresSQL,
			[]any{"queue_5", "x", deadletter.FirstID(time.Now().Add(-time.Hour))},
		},
		{"smart retry: claim", worker.ClaimStuckSQL, []any{"queue_5", "x", time.Now(), []string{"validation"}, uuid.Nil, 3}},
	} {
		if err := show(q.name, q.sql, q.args...); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"list, newest":                     "",
		"list, one status":                 "status:manual",
		"list, a queue without entries":    "queue:no_such_queue",
		"list, kind":                       "kind:kind_7",
		"list, a class without entries":    "class:business",
		"list, an error type and a source": "type:TYPE_7 source:source_7",
	} {
		sql, args, err := listSQL(ctx, store, text)
		if err != nil {
			return err
		}
		if err := show(name, sql, args...); err != nil {
			return err
		}
	}
	return nil
}

// listSQL returns the query of a page of open entries that match a filter.
func listSQL(ctx context.Context, store *deadletter.Store, text string) (string, []any, error) {
	parsed, err := filter.Parse(text, "")
	if err != nil {
		return "", nil, err
	}
	where, err := store.Where(ctx, &parsed)
	if err != nil {
		return "", nil, err
	}
	sql, args := store.ListSQL(ctx, deadletter.Page{Filter: parsed, Limit: 50}, where, deadletter.OpenPart())
	return sql, args, nil
}
