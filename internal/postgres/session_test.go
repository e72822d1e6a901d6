package postgres_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// Behind a pooler, statements have dlqd's settings inside and outside of transactions. No setting remains in the
// session.
func TestSession_HasSettingsForStatements(t *testing.T) {
	t.Parallel()
	direct := postgrestest.URL(t)
	postgrestest.Alter(t, direct, "SET default_transaction_isolation = 'repeatable read'")
	_, err := postgrestest.Open(t, direct).Exec(t.Context(),
		"CREATE FUNCTION fail() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE 'it failed'; END $$")
	require.NoError(t, err)
	ignoring := postgrestest.IgnoringPooler(t, direct, 1)
	prepares, err := url.Parse(ignoring)
	require.NoError(t, err)
	query := prepares.Query()
	query.Set("default_query_exec_mode", "simple_protocol")
	prepares.RawQuery = query.Encode()
	const settings = "SELECT concat_ws(' ', current_setting('row_security'), current_setting('jit'), " +
		"current_setting('transaction_isolation'))"
	const wanted = "off off read committed"
	for name, at := range map[string]string{
		"direct": direct, "pooled": postgrestest.Pooler(t, direct, 1), "ignoring": ignoring,
		"simple": prepares.String(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.Open(t, at)
			require.Equal(t, name != "direct", postgres.IsPooled(pool))
			rendered := postgres.DefaultSchemas().Rendered(pool)
			for _, db := range []postgres.DB{postgres.Statements(pool), rendered} {
				for range 3 {
					require.Equal(t, wanted, read(t, t.Context(), db, settings))
				}
				const withArgument = "SELECT $1 || substr((" + settings + "), 2)"
				require.Equal(t, wanted, read(t, t.Context(), db, withArgument, pgx.QueryExecModeCacheDescribe, "o"))
				require.ErrorIs(t, db.QueryRow(t.Context(), "SELECT 1 WHERE false").Scan(new(int)), pgx.ErrNoRows)
				tag, err := db.Exec(t.Context(),
					"INSERT INTO dlq.settings (key, value) VALUES ('t', '1') ON CONFLICT (key) DO UPDATE SET value = '2'")
				require.NoError(t, err)
				require.Equal(t, int64(1), tag.RowsAffected())

				// A failing statement ends its transaction, and the session remains usable.
				_, err = db.Exec(t.Context(), "SELECT fail()")
				require.ErrorContains(t, err, "it failed")
				_, err = db.Exec(t.Context(), "SELECT no_such_function()")
				require.ErrorContains(t, err, "no_such_function")
				canceled, cancel := context.WithCancel(t.Context())
				cancel()
				_, err = db.Exec(canceled, "SELECT 1")
				require.ErrorIs(t, err, context.Canceled)
				rows, err := db.Query(t.Context(), "SELECT generate_series(1, 100000)")
				require.NoError(t, err)
				require.True(t, rows.Next())
				rows.Close() // the session also remains usable if rows are not read to the end
				require.NoError(t, rows.Err())
			}
			const queues = `{"queues": ["a"]}`
			limited := postgres.AsReader(postgres.WithScope(t.Context(), queues))
			require.Equal(t, wanted, read(t, limited, rendered, settings))
			const scope = "SELECT current_setting('dlq.scope', true) || current_setting('dlq.sight', true)"
			require.JSONEq(t, queues, read(t, limited, rendered, "SELECT current_setting('dlq.scope')"))
			require.Equal(t, "reader", read(t, limited, rendered, "SELECT current_setting('dlq.sight')"))
			require.Empty(t, read(t, t.Context(), rendered, "SELECT coalesce(nullif(("+scope+"), ''), '')"))
			require.NoError(t, postgres.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				require.Equal(t, wanted, read(t, t.Context(), tx, settings))
				return nil
			}))
			require.NoError(t, postgres.OutsidePool(t.Context(), pool, func(tx pgx.Tx) error {
				require.Equal(t, wanted, read(t, t.Context(), tx, settings))
				return nil
			}))
			options := pgx.TxOptions{BeginQuery: postgres.BeginReadOnlyQuery("statement_timeout = 71")}
			require.NoError(t, pgx.BeginTxFunc(t.Context(), pool, options, func(tx pgx.Tx) error {
				require.Equal(t, wanted, read(t, t.Context(), tx, settings))
				require.Equal(t, "on", read(t, t.Context(), tx, "SELECT current_setting('transaction_read_only')"))
				require.Equal(t, "71ms", read(t, t.Context(), tx, "SELECT current_setting('statement_timeout')"))
				return nil
			}))
			if name != "direct" {
				require.Equal(t, "on on repeatable read", read(t, t.Context(), pool, settings),
					"the session keeps its own settings")
			}
		})
	}
}

func read(t *testing.T, ctx context.Context, db postgres.DB, sql string, args ...any) (found string) {
	t.Helper()
	require.NoError(t, db.QueryRow(ctx, sql, args...).Scan(&found), sql)
	return found
}

// Behind a pooler, reads of dlqd and of River's client fail if a policy hides jobs.
func TestSession_RowLevelSecurityFailsBehindPooler(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	pool := postgrestest.Open(t, postgrestest.Pooler(t, g.DLQD, 1))
	execute(t, g.owner, "ALTER TABLE river_job ENABLE ROW LEVEL SECURITY")
	const denied = "row-level security policy"
	_, err := postgres.DefaultSchemas().Rendered(pool).Exec(t.Context(), "SELECT FROM river.river_job")
	require.ErrorContains(t, err, denied)
	_, err = (&postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas()}).Backfill(t.Context(), func(int) {})
	require.ErrorContains(t, err, denied)
	river := postgres.NewDriver(pool).GetExecutor()
	require.ErrorContains(t, river.QueryRow(t.Context(), "SELECT id FROM river_job").Scan(new(int64)), denied)
	tx, err := river.Begin(t.Context())
	require.NoError(t, err)
	require.ErrorContains(t, tx.Exec(t.Context(), "SELECT FROM river_job"), denied)
	require.NoError(t, tx.Rollback(t.Context()))
	require.ErrorContains(t, postgres.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT FROM river_job")
		return err
	}), denied)
}
