package postgrestest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// FailEach calls do once for each statement that do executes, with a pool on which only that statement fails, and
// requires that do returns an error each time. Last it calls do with a pool on which no statement fails, and requires
// success. The pool connects to the database of pool. do executes one statement after another.
func FailEach(tb testing.TB, pool *pgxpool.Pool, do func(pool *pgxpool.Pool) error) {
	tb.Helper()
	f := &failing{}
	config := pool.Config()
	config.ConnConfig.Tracer = f
	limited, err := pgxpool.NewWithConfig(tb.Context(), config)
	require.NoError(tb, err)
	defer limited.Close()
	require.NoError(tb, limited.Ping(tb.Context())) // a new session may execute statements of its own
	for n := 1; ; n++ {
		f.left, f.failed = n, ""
		err := do(limited)
		if f.failed == "" {
			require.NoError(tb, err)
			require.Greater(tb, n, 1, "no statement was executed")
			return
		}
		require.Error(tb, err, "statement %d failed: %s", n, f.failed)
	}
}

// failing is a tracer that cancels the context of one statement, or of one batch of statements.
type failing struct {
	left   int    // statements until the one that fails
	failed string // the statement that failed
}

func (f *failing) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return f.next(ctx, data.SQL)
}

func (f *failing) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f *failing) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	return f.next(ctx, data.Batch.QueuedQueries[data.Batch.Len()-1].SQL)
}

func (f *failing) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (f *failing) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (f *failing) next(ctx context.Context, sql string) context.Context {
	if sql == "rollback" {
		return ctx
	}
	if f.left--; f.left != 0 {
		return ctx
	}
	f.failed = sql
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}
