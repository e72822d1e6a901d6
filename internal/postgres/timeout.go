package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DefaultTimeout bounds each statement, and each wait for a connection of the pool, if the context has no deadline. It
// is ten times the duration of the longest statement on ten million dead letters. The client enforces the timeout, so
// that it also holds if the server hangs: pgx cancels the statement and closes its connection.
const DefaultTimeout = time.Minute

type unboundedKey struct{}

// Unbounded returns a context whose statements have no timeout, for migrations, which build
// indexes.
func Unbounded(ctx context.Context) context.Context {
	return context.WithValue(ctx, unboundedKey{}, true)
}

// timeouts is a pgx tracer that gives every statement of a pool a deadline.
type timeouts struct{ limit time.Duration }

// limited is a context that timeouts created. Its type distinguishes it from the context of the statement's caller.
type limited struct {
	context.Context

	cancel context.CancelFunc
}

func (t timeouts) start(ctx context.Context) context.Context {
	if _, bounded := ctx.Deadline(); bounded || ctx.Value(unboundedKey{}) != nil {
		return ctx
	}
	with, cancel := context.WithTimeout(ctx, t.limit)
	return limited{with, cancel}
}

func (timeouts) end(ctx context.Context) {
	if l, ok := ctx.(limited); ok {
		l.cancel()
	}
}

func (t timeouts) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return t.start(ctx)
}

func (t timeouts) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	t.end(ctx)
}

func (t timeouts) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return t.start(ctx)
}

func (timeouts) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (t timeouts) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	t.end(ctx)
}

func (t timeouts) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromStartData) context.Context {
	return t.start(ctx)
}

func (t timeouts) TraceCopyFromEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromEndData) {
	t.end(ctx)
}

func (t timeouts) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool,
	_ pgxpool.TraceAcquireStartData,
) context.Context {
	return t.start(ctx)
}

func (t timeouts) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireEndData) {
	t.end(ctx)
}
