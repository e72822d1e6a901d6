package postgres

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DB is the common interface of a pool, a connection and a transaction.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Rendered returns db with schema names rendered into every statement. On a pool, each statement is also limited to the
// scope of its context: see [WithScope].
func (s Schemas) Rendered(db DB) DB {
	if pool, ok := db.(*pgxpool.Pool); ok {
		return rendered{Statements(pool), pool, s}
	}
	return rendered{db, nil, s}
}

type rendered struct {
	db      DB
	pool    *pgxpool.Pool // nil for a transaction or a connection
	schemas Schemas
}

type renderKey struct {
	schemas Schemas
	sql     string
}

var renderCache sync.Map // renderKey to string; queries are constants, and few

type countKey struct{}

// Counting returns a context that counts the statements that run with it. BEGIN, COMMIT and the settings of
// transactions do not count.
func Counting(ctx context.Context) (counted context.Context, statements *atomic.Int64) {
	statements = &atomic.Int64{}
	return context.WithValue(ctx, countKey{}, statements), statements
}

func (r rendered) sql(ctx context.Context, sql string) string {
	if statements, ok := ctx.Value(countKey{}).(*atomic.Int64); ok {
		statements.Add(1)
	}
	key := renderKey{r.schemas, sql}
	if cached, ok := renderCache.Load(key); ok {
		return cached.(string) //nolint:forcetypeassert // only strings are stored
	}
	out := r.schemas.Render(sql)
	renderCache.Store(key, out)
	return out
}

func (r rendered) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return r.in(ctx).Exec(ctx, r.sql(ctx, sql), args...)
}

func (r rendered) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return r.in(ctx).Query(ctx, r.sql(ctx, sql), args...)
}

func (r rendered) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return r.in(ctx).QueryRow(ctx, r.sql(ctx, sql), args...)
}

// in returns the DB on which statements of ctx run. A statement with a scope or a reader's view gets its own
// transaction, because its settings must hold only for that transaction: a pooler may run the next statement in another
// session.
func (r rendered) in(ctx context.Context) DB {
	if r.pool != nil && isLimited(ctx) {
		settings := settingsQuery
		if standbyReadOf(ctx) != nil {
			settings = standbySettingsQuery
		}
		return singleStatements{ReadPool(ctx, r.pool), settings, r.schemas.Render(setScope), scopeArgs(ctx)}
	}
	return r.db
}
