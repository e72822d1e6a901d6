package postgres

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DB is what a pool, a connection and a transaction have in common.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Rendered is db with the schemas' names put into every query.
func (s Schemas) Rendered(db DB) DB { return rendered{db, s} }

type rendered struct {
	db      DB
	schemas Schemas
}

type renderKey struct {
	schemas Schemas
	sql     string
}

var renderCache sync.Map // of renderKey to string: queries are constants, and few

func (r rendered) sql(sql string) string {
	key := renderKey{r.schemas, sql}
	if cached, ok := renderCache.Load(key); ok {
		return cached.(string) //nolint:forcetypeassert // only strings are stored
	}
	out := r.schemas.Render(sql)
	renderCache.Store(key, out)
	return out
}

func (r rendered) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return r.db.Exec(ctx, r.sql(sql), args...)
}

func (r rendered) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return r.db.Query(ctx, r.sql(sql), args...)
}

func (r rendered) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return r.db.QueryRow(ctx, r.sql(sql), args...)
}
