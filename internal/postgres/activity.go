package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ConnectionsUsed is how many percent of the server's connections are in use.
func ConnectionsUsed(ctx context.Context, db DB) (percent float64, err error) {
	// pg_stat_activity shows a plain role its own sessions alone.
	err = db.QueryRow(ctx, "SELECT 100.0::float8 * sum(numbackends) / current_setting('max_connections')::int FROM pg_stat_database").Scan(&percent)
	return percent, err
}

// Entered are rows of a group of partitions.
type Entered struct {
	Partition string // inbox, open, resolved, failed or archived, or the audit trail
	Rows      float64
}

// RowsEntered counts the rows that have come into dead_letter_queue, by group of partitions, from the server's statistics.
func RowsEntered(ctx context.Context, db DB, schemas Schemas) ([]Entered, error) {
	rows, err := db.Query(ctx, `
		SELECT substring(relname FROM 'dead_letter_([a-z]+)'), sum(n_tup_ins)::float8
		FROM pg_stat_user_tables WHERE schemaname = $1 AND relname ~ '^dead_letter_(inbox|open|resolved|failed|archived)'
		GROUP BY 1`, schemas.DLQ)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Entered])
}

// RowsInDefaults counts the rows in default partitions, which are there because a month's own was missing.
func RowsInDefaults(ctx context.Context, db DB) ([]Entered, error) {
	rows, err := db.Query(ctx, "SELECT partition, entries::float8 FROM dlq.default_partition_rows()")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Entered])
}

// Listen returns a connection that hears what is sent to a topic. It is out of the pool for good: it would go back with its
// LISTEN.
func Listen(ctx context.Context, pool *pgxpool.Pool, topic string) (*pgx.Conn, error) {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	conn := pooled.Hijack()
	_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{topic}.Sanitize())
	return conn, err
}
