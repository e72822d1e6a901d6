package postgrestest

import (
	"embed"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// newer has a migration and functions such as a later release may have. "make trial-upgrade" also builds them into a
// program.
//
//go:embed newer/*.sql
var newer embed.FS

// newerTries and newerPause bound the attempts of [Newer] to lock tables that running processes use.
const (
	newerTries = 100
	newerPause = 100 * time.Millisecond
)

// Newer upgrades the schema of a database as the next release of dlqd would. Programs whose schema version is oldest or
// newer work on the upgraded schema.
func Newer(tb testing.TB, pool *pgxpool.Pool, oldest int64) {
	tb.Helper()
	latest, err := postgres.LatestVersion()
	require.NoError(tb, err)
	migration, err := newer.ReadFile("newer/migration.sql")
	require.NoError(tb, err)
	code, err := newer.ReadFile("newer/code.sql")
	require.NoError(tb, err)
	up, _, _ := strings.Cut(string(migration), "-- +goose Down")
	// As in a migration, each statement waits only briefly for locks of running processes, and is retried.
	exec := func(sql string, args ...any) {
		for try := 1; ; try++ {
			err := pgx.BeginFunc(tb.Context(), pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(tb.Context(), "SET LOCAL lock_timeout = '200ms'"); err != nil {
					return err
				}
				_, err := tx.Exec(tb.Context(), sql, args...)
				return err
			})
			if err == nil || try == newerTries {
				require.NoError(tb, err)
				return
			}
			time.Sleep(newerPause)
		}
	}
	exec(`INSERT INTO dlq.settings (key, value) VALUES ('oldest_program', $1::bigint::text), ('program', '0.9.0')
		ON CONFLICT (key) DO UPDATE SET value = excluded.value`, oldest)
	exec(up)
	exec("INSERT INTO dlq.schema_migrations (version_id, is_applied) VALUES ($1, true)", latest+1)
	exec(string(code))
	exec("UPDATE dlq.settings SET value = 'newer' WHERE key IN ('code_version', 'triggers', 'river_triggers')")
}
