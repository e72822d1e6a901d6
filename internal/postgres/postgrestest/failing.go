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
// success. All pools connect to the database of pool. do executes one statement after another.
func FailEach(tb testing.TB, pool *pgxpool.Pool, do func(pool *pgxpool.Pool) error) {
	tb.Helper()
	for n := 1; ; n++ {
		tracer := &failing{left: n}
		config := pool.Config()
		config.ConnConfig.Tracer = tracer
		failing, err := pgxpool.NewWithConfig(tb.Context(), config)
		require.NoError(tb, err)
		err = do(failing)
		failing.Close()
		if tracer.failed == "" {
			require.NoError(tb, err)
			require.Greater(tb, n, 1, "no statement was executed")
			return
		}
		require.Error(tb, err, "statement %d failed: %s", n, tracer.failed)
	}
}

// failing is a tracer that cancels the context of one statement.
type failing struct {
	left   int    // statements until the one that fails
	failed string // the statement that failed
}

func (f *failing) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == "rollback" {
		return ctx
	}
	if f.left--; f.left != 0 {
		return ctx
	}
	f.failed = data.SQL
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

func (f *failing) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
