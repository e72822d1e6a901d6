package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

type scopeKey struct{}

// WithScope limits what is done in ctx to queues and kinds, as dlq.scope() has them in JSON: each statement that goes through
// [Schemas.Rendered] says so to the database. An empty scope limits nothing.
func WithScope(ctx context.Context, scope string) context.Context {
	return context.WithValue(ctx, scopeKey{}, scope)
}

// Scope is to what ctx is limited; empty for nothing.
func Scope(ctx context.Context) string {
	scope, _ := ctx.Value(scopeKey{}).(string)
	return scope
}

type readerKey struct{}

// AsReader has what is done in ctx see what a dlq_reader sees: see dlq.is_reader.
func AsReader(ctx context.Context) context.Context {
	return context.WithValue(ctx, readerKey{}, true)
}

// IsReader reports whether what is done in ctx sees what a dlq_reader sees.
func IsReader(ctx context.Context) bool {
	reader, _ := ctx.Value(readerKey{}).(bool)
	return reader
}

// SetScope limits the rest of a transaction to the scope of ctx, if that has one, and to what a reader sees, if it is one's. (The names
// of settings have the schema's in them, as functions that read them do.)
func (s Schemas) SetScope(ctx context.Context, tx pgx.Tx) error {
	if !isLimited(ctx) {
		return nil
	}
	sight := ""
	if IsReader(ctx) {
		sight = "reader"
	}
	_, err := tx.Exec(ctx, s.Render("SELECT set_config('dlq.scope', $1, true), set_config('dlq.sight', $2, true)"), Scope(ctx), sight)
	return err
}

func isLimited(ctx context.Context) bool { return Scope(ctx) != "" || IsReader(ctx) }

// scoped begins a transaction that is limited as ctx is: a pooler in front may give the next statement another session, so a
// setting holds for a transaction alone. It returns nil where db is a transaction itself, or ctx is not limited.
func (s Schemas) scoped(ctx context.Context, db DB) (pgx.Tx, error) {
	pool, ok := db.(*pgxpool.Pool)
	if !ok || !isLimited(ctx) {
		return nil, nil //nolint:nilnil // as said
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.SetScope(ctx, tx); err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return nil, err
	}
	return tx, nil
}

// end ends the transaction of one statement.
func end(ctx context.Context, tx pgx.Tx, err error) error {
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
	}
	return err
}

func execScoped(ctx context.Context, tx pgx.Tx, sql string, args []any) (pgconn.CommandTag, error) {
	tag, err := tx.Exec(ctx, sql, args...)
	return tag, end(ctx, tx, err)
}

// scopedRows are the rows of a statement, and its transaction, which ends with them.
type scopedRows struct {
	pgx.Rows

	end func(err error) error
	err error
}

func (r *scopedRows) Close() {
	r.Rows.Close()
	if r.end != nil {
		r.err, r.end = r.end(r.Rows.Err()), nil
	}
}

func (r *scopedRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *scopedRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}

func queryScoped(ctx context.Context, tx pgx.Tx, sql string, args []any) (pgx.Rows, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, end(ctx, tx, err)
	}
	return &scopedRows{Rows: rows, end: func(err error) error { return end(ctx, tx, err) }}, nil
}

// scopedRow is the row of a statement, and its transaction, which ends when it is read.
type scopedRow struct {
	pgx.Row

	end func(err error) error
}

func (r scopedRow) Scan(into ...any) error {
	err := r.Row.Scan(into...)
	if ended := r.end(err); err == nil {
		return ended
	}
	return err
}

// failedRow is the row of a statement that was not made.
type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }
