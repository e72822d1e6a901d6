package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
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
	_, err := tx.Exec(ctx, s.Render(setScope), scopeArgs(ctx)...)
	return err
}

const setScope = "SELECT set_config('dlq.scope', $1, true), set_config('dlq.sight', $2, true)"

func scopeArgs(ctx context.Context) []any {
	sight := ""
	if IsReader(ctx) {
		sight = "reader"
	}
	return []any{Scope(ctx), sight}
}

func isLimited(ctx context.Context) bool { return Scope(ctx) != "" || IsReader(ctx) }
