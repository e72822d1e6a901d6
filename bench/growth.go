package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	growthOpen  = 30_000 // entries that are due, besides the history
	growthRows  = 20_000 // messages, failures and claims measured at each size
	growthReads = 200    // executions of each read
)

// figure is a measurement whose unit is part of its name.
type figure struct {
	name  string
	value float64
}

// growth measures the main paths and reads with 10,000 entries in the database, then with ten times as many, and so on
// up to 10,000,000 entries (times scale). 97 % of the entries are closed. Each entry has three moves. The last column
// is the last size's figure divided by the first size's.
func growth(b *bench, scale float64) error {
	last := int(10_000_000 * scale)
	header := []any{"entries"}
	var rows [][]any
	var first []figure
	for size := 10_000; ; size = min(10*size, last) {
		var figures []figure
		if err := b.withPool(8, func(pool *pgxpool.Pool) (err error) {
			figures, err = b.growthAt(pool, size)
			return err
		}); err != nil {
			return fmt.Errorf("%d entries: %w", size, err)
		}
		header = append(header, thousands(float64(size)))
		if first == nil {
			first = figures
			for _, f := range figures {
				rows = append(rows, []any{f.name})
			}
		}
		for i, f := range figures {
			rows[i] = append(rows[i], fmt.Sprintf("%.4g", f.value))
			if size >= last {
				rows[i] = append(rows[i], fmt.Sprintf("%.2f", f.value/first[i].value))
			}
		}
		if size >= last {
			break
		}
	}
	b.row(append(header, "growth")...)
	for _, row := range rows {
		b.row(row...)
	}
	return nil
}

// growthAt fills the database with a history of the size, and returns the figures.
func (b *bench) growthAt(pool *pgxpool.Pool, size int) ([]figure, error) {
	if err := b.reset(pool, true); err != nil {
		return nil, err
	}
	if err := fillHistory(b.ctx, pool, size); err != nil {
		return nil, err
	}
	for _, sql := range []string{"SELECT dlq.rebuild_rollups()", "VACUUM ANALYZE"} {
		if _, err := pool.Exec(b.ctx, sql); err != nil {
			return nil, err
		}
	}
	figures, err := reads(b.ctx, pool)
	if err != nil {
		return nil, err
	}
	postmaster, err := b.postmaster(pool)
	if err != nil {
		return nil, err
	}

	sent, err := b.measureServer(pool, "dlqd", 64, growthRows, false)
	if err != nil {
		return nil, err
	}
	figures = append(figures, figure{"intake, Postgres CPU ms per 1,000", sent.postgres})

	if _, err := pool.Exec(b.ctx, "TRUNCATE river_job"); err != nil {
		return nil, err
	}
	if err := insertFailing(b.ctx, pool, growthRows); err != nil {
		return nil, err
	}
	before := postgresCPU(postmaster)
	if _, err := pool.Exec(b.ctx, `UPDATE river_job
		SET state = 'discarded', finalized_at = now() + id * interval '1 microsecond'`); err != nil {
		return nil, err
	}
	captured := postgresCPU(postmaster)
	if _, _, err := b.fileAll(pool, growthRows, 500); err != nil {
		return nil, err
	}
	figures = append(figures,
		figure{"capture, Postgres CPU ms per 1,000", perThousand(captured-before, growthRows)},
		figure{"filed and decided, Postgres CPU ms per 1,000", perThousand(postgresCPU(postmaster)-captured, growthRows)})

	if err := fill(b.ctx, pool, growthOpen); err != nil {
		return nil, err
	}
	rates, err := measureClaims(b.ctx, pool, growthRows)
	for i, name := range []string{"claim", "claim and decide", "claim and redeliver"} {
		figures = append(figures, figure{name + ", ms per 1,000", 1e6 / rates[i]})
	}
	return figures, err
}

// reads returns the median and the p99 of reads that pages and the API make.
func reads(ctx context.Context, pool *pgxpool.Pool) ([]figure, error) {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	stats, groups := analytics.NewStore(pool, postgres.DefaultSchemas()), &group.Store{Store: store}
	var id uuid.UUID
	var fingerprint string
	if err := pool.QueryRow(ctx, `SELECT id, fingerprint FROM dlq.dead_letter_resolved
		OFFSET 100 LIMIT 1`).Scan(&id, &fingerprint); err != nil {
		return nil, err
	}
	list := func(text string) func() error {
		return func() error {
			sql, args, err := listSQL(ctx, store, text)
			if err != nil {
				return err
			}
			rows, err := pool.Query(ctx, sql, args...)
			if err != nil {
				return err
			}
			rows.Close()
			return rows.Err()
		}
	}
	week := analytics.Window{Over: 7 * 24 * time.Hour}
	var figures []figure
	for _, read := range []struct {
		name string
		run  func() error
	}{
		{"entry by id", func() error { _, _, err := store.Get(ctx, id); return err }},
		{"list: status:manual", list("status:manual")},
		{"list: queue and class", list("queue:queue_1 class:outage")},
		{"list: group", list("group:" + fingerprint)},
		{"search: words", list(`"connection refused"`)},
		{"groups", func() error {
			_, _, err := groups.List(ctx, group.Filter{Order: "latest", Over: 24 * time.Hour, Limit: 50})
			return err
		}},
		{"backlog and rates by queue", func() error { _, err := stats.Flow(ctx, week, "queue", ""); return err }},
		{"count of a list", func() error {
			_, _, err := store.CountWithin(ctx, filter.Filter{Queue: []string{"queue_1"}}, 1000, time.Second)
			return err
		}},
	} {
		took := make([]time.Duration, growthReads)
		for i := range took {
			start := time.Now()
			if err := read.run(); err != nil {
				return nil, fmt.Errorf("%s: %w", read.name, err)
			}
			took[i] = time.Since(start)
		}
		slices.Sort(took)
		figures = append(figures, figure{read.name + ", p50 ms", took[growthReads/2].Seconds() * 1000},
			figure{read.name + ", p99 ms", took[growthReads*99/100].Seconds() * 1000})
	}
	return figures, nil
}
