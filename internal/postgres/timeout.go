package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DefaultTimeout bounds each statement, and each wait for a connection of the pool, whose context has no deadline of its
// own: ten times what the longest of them takes on ten million dead letters. It is the client's, so that it also holds
// where the server hangs; pgx cancels the statement and closes its connection.
const DefaultTimeout = time.Minute

type unboundedKey struct{}

// Unbounded lets statements take as long as they need: those of migrations, which build indexes.
func Unbounded(ctx context.Context) context.Context {
	return context.WithValue(ctx, unboundedKey{}, true)
}

// timeouts gives every statement of a pool a deadline, whoever runs it: a hook of pgx that every statement passes.
type timeouts struct{ limit time.Duration }

// limited is a context that a statement was given, and not one that the statement's caller has.
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

func (t timeouts) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	return t.start(ctx)
}

func (t timeouts) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireEndData) {
	t.end(ctx)
}
