package postgrestest

import (
	"embed"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// newer has a migration and functions as a later release may have them. "make trial-upgrade" builds them into a
// program.
//
//go:embed newer/*.sql
var newer embed.FS

// Newer upgrades the schema of a database as the release after this dlqd would, on whose schema programs for version
// oldest or newer work.
func Newer(tb testing.TB, pool *pgxpool.Pool, oldest int64) {
	tb.Helper()
	latest, err := postgres.LatestVersion()
	require.NoError(tb, err)
	migration, err := newer.ReadFile("newer/migration.sql")
	require.NoError(tb, err)
	code, err := newer.ReadFile("newer/code.sql")
	require.NoError(tb, err)
	up, _, _ := strings.Cut(string(migration), "-- +goose Down")
	exec := func(sql string, args ...any) {
		_, err := pool.Exec(tb.Context(), sql, args...)
		require.NoError(tb, err)
	}
	exec(`INSERT INTO dlq.settings (key, value) VALUES ('oldest_program', $1::bigint::text), ('program', '0.9.0')
		ON CONFLICT (key) DO UPDATE SET value = excluded.value`, oldest)
	exec(up)
	exec("INSERT INTO dlq.schema_migrations (version_id, is_applied) VALUES ($1, true)", latest+1)
	exec(string(code))
	exec("UPDATE dlq.settings SET value = 'newer' WHERE key IN ('code_version', 'triggers', 'river_triggers')")
}
