package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// errRollback rolls back a transaction that only measures.
var errRollback = errors.New("rolled back")

// indexStudy measures the list indexes of the open partition. For each index, for several and for all, it measures how
// much faster filing and deciding are without them. With 1,000,000 open entries, it also measures lists with the index
// that they use and without it. The lists search for common values, and for values that only old entries have.
func indexStudy(b *bench, scale float64) error {
	entries := int(30_000 * scale)
	b.row("without the index of", "filed and decided/s", "ratio to all indexes", "WAL bytes per entry")
	sets := make([][]string, 1, len(listIndexes)+3)
	for _, name := range listIndexes {
		sets = append(sets, []string{name})
	}
	sets = append(sets, []string{"status", "kind", "type", "source", "class"}, listIndexes)
	rates, wals := make([][]float64, len(sets)), make([]float64, len(sets))
	for range b.rounds { // the sets alternate, so that a drift of the machine's speed affects all of them equally
		for i, without := range sets {
			rate, wal, err := b.filingRate(entries, 500, viaCapture, without...)
			if err != nil {
				return err
			}
			rates[i], wals[i] = append(rates[i], rate), wal
		}
	}
	for i, without := range sets {
		b.row(fmt.Sprint(without), thousands(median(rates[i])), fmt.Sprintf("%.2f", median(rates[i])/median(rates[0])),
			fmt.Sprintf("%.0f", wals[i]))
	}
	if err := b.table.Flush(); err != nil {
		return err
	}
	return b.withPool(2, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := fill(b.ctx, pool, int(1_000_000*scale)); err != nil {
			return err
		}
		// The oldest one percent of the entries get values that no other entry has.
		if _, err := pool.Exec(b.ctx, `SET session_replication_role = replica;
			UPDATE dlq.dead_letter_open SET status = 'dlq_manual', next_retry_at = NULL, queue = 'old', kind = 'old',
				error_class = 'business', error_type = 'old', source = 'old'
			WHERE id <= (SELECT id FROM dlq.dead_letter_open ORDER BY id OFFSET `+strconv.Itoa(int(10_000*scale))+` LIMIT 1);
			SET session_replication_role = DEFAULT`, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx, "VACUUM ANALYZE dlq.dead_letter_open"); err != nil {
			return err
		}
		return listTimes(b, pool)
	})
}

func listTimes(b *bench, pool *pgxpool.Pool) error {
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	b.row("list", "index", "with ms", "without ms")
	for _, q := range []struct {
		name, index string
		filter      string
	}{
		{"status, common", "status", "status:pending"},
		{"status, old", "status", "status:manual"},
		{"queue, common", "queue", "queue:queue_4"},
		{"queue, old", "queue", "queue:old"},
		{"queue, none", "queue", "queue:no_such"},
		{"kind, common", "kind", "kind:kind_7"},
		{"kind, old", "kind", "kind:old"},
		{"class, common", "class", "class:outage"},
		{"class, old", "class", "class:business"},
		{"type, common", "type", "type:TYPE_7"},
		{"type, old", "type", "type:old"},
		{"source, common", "source", "source:source_7"},
		{"source, old", "source", "source:old"},
	} {
		sql, args, err := listSQL(b.ctx, store, q.filter)
		if err != nil {
			return err
		}
		with, err := listTime(b, pool, "", sql, args)
		if err != nil {
			return err
		}
		without, err := listTime(b, pool, q.index, sql, args)
		if err != nil {
			return err
		}
		b.row(q.name, q.index, ms(with), ms(without))
	}
	return nil
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000) }

// listTime returns the median duration of five runs of a query. If without is not empty, listTime drops the index
// dead_letter_open_by_<without> for the measurement, and rolls that back.
func listTime(b *bench, pool *pgxpool.Pool, without, sql string, args []any) (time.Duration, error) {
	took := make([]time.Duration, 5)
	err := pgx.BeginFunc(b.ctx, pool, func(tx pgx.Tx) error {
		if without != "" {
			if _, err := tx.Exec(b.ctx, "DROP INDEX dlq.dead_letter_open_by_"+without); err != nil {
				return err
			}
		}
		for i := range took {
			start := time.Now()
			rows, err := tx.Query(b.ctx, sql, args...)
			if err != nil {
				return err
			}
			rows.Close()
			if err := rows.Err(); err != nil {
				return err
			}
			took[i] = time.Since(start)
		}
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		return 0, err
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}
