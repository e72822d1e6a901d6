package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
)

type scopeKey struct{}

// WithScope returns a context whose statements are limited to queues and kinds. scope is in the JSON format of
// dlq.scope(); an empty scope limits nothing. Statements through [Schemas.Rendered] pass the scope to the database.
func WithScope(ctx context.Context, scope string) context.Context {
	return context.WithValue(ctx, scopeKey{}, scope)
}

// Scope returns the scope of ctx, or "" if ctx has none.
func Scope(ctx context.Context) string {
	scope, _ := ctx.Value(scopeKey{}).(string)
	return scope
}

type readerKey struct{}

// AsReader returns a context whose statements return only data that the role dlq_reader may see: see dlq.is_reader.
func AsReader(ctx context.Context) context.Context {
	return context.WithValue(ctx, readerKey{}, true)
}

// IsReader reports whether ctx is a context of [AsReader].
func IsReader(ctx context.Context) bool {
	reader, _ := ctx.Value(readerKey{}).(bool)
	return reader
}

// SetScope limits the rest of a transaction to the scope of ctx and, if ctx comes from [AsReader], to data that the
// role dlq_reader may see. It does nothing for other contexts. The names of the settings contain the schema's name, as
// the functions that read them expect.
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
