package postgres_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestOpen_LimitsStatementTime(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	holder := postgrestest.Open(t, url)
	execute(t, holder, "CREATE TABLE locked (n int)")
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE locked")
	require.NoError(t, err)

	var pool *pgxpool.Pool
	require.Eventually(t, func() bool { // on a busy machine, connecting may take longer than the timeout
		pool, err = postgres.OpenLimited(t.Context(), url, 1, 200*time.Millisecond, nil)
		return err == nil
	}, 5*time.Minute, time.Millisecond)
	t.Cleanup(pool.Close)
	require.Eventually(t, func() bool { return pool.Ping(t.Context()) == nil }, 5*time.Minute, time.Millisecond)

	for name, hangs := range map[string]func(ctx context.Context) error{
		"exec": func(ctx context.Context) error {
			_, err := pool.Exec(ctx, "INSERT INTO locked VALUES (1)")
			return err
		},
		"row": func(ctx context.Context) error {
			var n int
			return pool.QueryRow(ctx, "SELECT count(*) FROM locked").Scan(&n)
		},
		"rows": func(ctx context.Context) error {
			rows, err := pool.Query(ctx, "SELECT n FROM locked")
			if err != nil {
				return err
			}
			_, err = pgx.CollectRows(rows, pgx.RowTo[int])
			return err
		},
		"batch": func(ctx context.Context) error {
			batch := &pgx.Batch{}
			batch.Queue("INSERT INTO locked VALUES (1)")
			return pool.SendBatch(ctx, batch).Close()
		},
		"copy": func(ctx context.Context) error {
			_, err := pool.CopyFrom(ctx, pgx.Identifier{"locked"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
			return err
		},
		"in a transaction": func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "INSERT INTO locked VALUES (1)")
				return err
			})
		},
		"no connection is free": func(ctx context.Context) error {
			return pool.AcquireFunc(ctx, func(*pgxpool.Conn) error { return pool.Ping(ctx) })
		},
	} {
		require.ErrorIs(t, hangs(t.Context()), context.DeadlineExceeded, name)
		require.Eventually(t, func() bool { return pool.Ping(t.Context()) == nil }, 5*time.Minute, time.Millisecond,
			"%s: the pool stays usable", name)
	}

	// The timeout does not shorten a longer deadline of the caller, and does not apply to an unbounded context.
	long, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	for _, ctx := range []context.Context{long, postgres.Unbounded(t.Context())} {
		_, err := pool.Exec(ctx, "SELECT pg_sleep(0.4)")
		require.NoError(t, err)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = pool.Exec(t.Context(), "INSERT INTO locked VALUES (1)")
	require.NoError(t, err)
}
