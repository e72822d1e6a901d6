package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ConnectionsUsed returns the percentage of the server's max_connections that is in use.
func ConnectionsUsed(ctx context.Context, db DB) (percent float64, err error) {
	// numbackends is used instead of pg_stat_activity, which hides the backend type of other roles' sessions from a plain
	// role.
	err = db.QueryRow(ctx, `SELECT 100.0::float8 * sum(numbackends) / current_setting('max_connections')::int
		FROM pg_stat_database`).Scan(&percent)
	return percent, err
}

// Entered is a number of rows in a group of partitions: inserted rows ([RowsEntered]) or present rows
// ([RowsInDefaults]).
type Entered struct {
	Partition string // inbox, open, resolved, failed, archived, or audit trail
	Rows      float64
}

// RowsEntered returns the number of rows that were inserted into dead_letter_queue, by group of
// partitions, from the server's statistics.
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

// RowsInDefaults counts the rows in default partitions, up to 10,000 in each. A row goes to a default partition if the
// partition of the row's month is missing.
func RowsInDefaults(ctx context.Context, db DB) ([]Entered, error) {
	rows, err := db.Query(ctx, "SELECT partition, entries::float8 FROM dlq.default_partition_rows()")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Entered])
}

// Listen returns a connection that listens on a topic. Listen takes the connection out of the pool, because a released
// connection would keep its LISTEN. If LISTEN fails, Listen returns both the connection and the error. The caller
// closes the connection in both cases.
func Listen(ctx context.Context, pool *pgxpool.Pool, topic string) (*pgx.Conn, error) {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	conn := pooled.Hijack()
	_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{topic}.Sanitize())
	return conn, err
}
