package host_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestHost_SurvivesChangedObjects drops, renames or changes each object of schema dlq while a session is open in which
// capture has run before. The change, and then the application's statements, run in one transaction of the
// administrator, which is rolled back.
func TestHost_SurvivesChangedObjects(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	statements := h.strings(`
		SELECT format(f, c.oid::regclass) FROM pg_class c, unnest(CASE c.relkind
			WHEN 'v' THEN ARRAY['DROP VIEW %s CASCADE', 'ALTER VIEW %s RENAME TO another']
			WHEN 'S' THEN ARRAY['DROP SEQUENCE %s CASCADE', 'ALTER SEQUENCE %s RENAME TO another']
			WHEN 'i' THEN ARRAY['DROP INDEX %s', 'ALTER INDEX %s RENAME TO another']
			WHEN 'I' THEN ARRAY['DROP INDEX %s', 'ALTER INDEX %s RENAME TO another']
			ELSE ARRAY['DROP TABLE %s CASCADE', 'ALTER TABLE %s RENAME TO another', 'ALTER TABLE %s SET SCHEMA public',
				'ALTER TABLE %s ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', 'ALTER TABLE %s ENABLE ROW LEVEL SECURITY',
				'REVOKE ALL ON %s FROM ` + h.DLQDRole + `', 'ALTER TABLE %s OWNER TO ` + postgrestest.Role +
		`', 'ALTER TABLE %s DISABLE TRIGGER ALL', 'ALTER TABLE %s ADD COLUMN another text'] END) f
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S', 'i', 'I')
			AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('i', 'P'))
		UNION ALL
		SELECT format(f, c.oid::regclass, a.attname) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
			AND a.attnum > 0 AND NOT a.attisdropped,
			unnest(ARRAY['ALTER TABLE %s DROP COLUMN %I CASCADE', 'ALTER TABLE %s RENAME COLUMN %I TO another',
				'ALTER TABLE %s DROP COLUMN %I CASCADE, ADD COLUMN %2$I box', 'ALTER TABLE %s ALTER COLUMN %I SET NOT NULL']) f
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
		UNION ALL
		SELECT format(f, p.oid::regprocedure) FROM pg_proc p,
			unnest(ARRAY['DROP FUNCTION %s CASCADE', 'ALTER FUNCTION %s RENAME TO another',
				'ALTER FUNCTION %s SET SCHEMA public', 'ALTER FUNCTION %s SECURITY INVOKER', 'ALTER FUNCTION %s SECURITY DEFINER',
				'REVOKE ALL ON FUNCTION %s FROM PUBLIC, ` + h.DLQDRole + `', 'ALTER FUNCTION %s RESET ALL']) f
		WHERE p.pronamespace = 'dlq'::regnamespace
		UNION ALL
		SELECT format(f, y.oid::regtype)
		FROM pg_type y, unnest(ARRAY['DROP TYPE %s CASCADE', 'ALTER TYPE %s RENAME TO another',
			'ALTER TYPE %s SET SCHEMA public']) f
		WHERE y.typnamespace = 'dlq'::regnamespace AND y.typtype = 'e'
		UNION ALL SELECT 'DROP SCHEMA dlq CASCADE' UNION ALL SELECT 'ALTER SCHEMA dlq RENAME TO another' UNION ALL
		SELECT 'REVOKE ALL ON SCHEMA dlq FROM ` + h.DLQDRole + `' UNION ALL SELECT 'ALTER SCHEMA dlq OWNER TO ` +
		postgrestest.Role + `'
		UNION ALL SELECT 'REASSIGN OWNED BY ` + h.DLQDRole + ` TO ` + postgrestest.Role + `'`)
	h.tryChanges(statements)
}

// tryChanges runs each statement in a transaction, then ends and retries jobs as the application, and rolls back.
func (h *host) tryChanges(statements []string) {
	h.Helper()
	batches := h.prepare(2)
	warm := h.application()
	require.Empty(h, warm.run(batches[0], "nothing is changed"))
	admin, err := pgx.Connect(h.Context(), h.Admin)
	require.NoError(h, err)
	h.exec(admin, "SET client_min_messages = error")
	role := warm.Config().ConnConfig.User
	refused := 0
	try := func(statement string) {
		tx, err := admin.Begin(h.Context())
		require.NoError(h, err)
		defer func() { require.NoError(h, tx.Rollback(h.Context())) }()
		if statement != "" {
			if _, err := tx.Exec(h.Context(), statement); err != nil {
				refused++ // the object is part of another object, which has a statement of its own
				return
			}
		}
		h.exec(tx, "SET LOCAL SESSION AUTHORIZATION "+role)
		river := riverpgxv5.New(nil).UnwrapExecutor(tx)
		begun := time.Now()
		err = complete(h.Context(), river, batches[1])
		if err == nil {
			err = retry(h.Context(), river, batches[1])
		}
		if err != nil {
			h.Errorf("%s: %v", statement, err)
		}
		if time.Since(begun) > limit {
			h.Errorf("%s: took %v", statement, time.Since(begun))
		}
	}
	try("")
	for _, statement := range statements {
		try(statement)
	}
	require.Less(h, refused, len(statements)/10)
}

// TestHost_SurvivesChangedRiverColumns changes River's columns. It then runs statements in a session in which capture
// has run before, and in a new one. A session whose plans have the old type skips capture until the session ends.
func TestHost_SurvivesChangedRiverColumns(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	role := h.application().Config().ConnConfig.User
	h.exec(h.owner, "DROP INDEX river_job_args_index, river_job_metadata_index")
	h.prepare(1)
	for _, column := range h.strings(`SELECT attname::text FROM pg_attribute WHERE attrelid = 'river_job'::regclass
		AND attnum > 0 AND attname NOT IN ('id', 'state')`) {
		for _, change := range []string{
			"DROP COLUMN %s CASCADE", "RENAME COLUMN %s TO another",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE text USING 'x'",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE json USING '{}'",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE bigint USING 1",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE json[] USING '{}'",
			"DROP COLUMN %s CASCADE, ADD COLUMN %[1]s point NOT NULL DEFAULT '(0, 0)'",
		} {
			for _, warm := range []bool{true, false} {
				change := "ALTER TABLE river_job " + fmt.Sprintf(change, column)
				session, err := pgx.Connect(t.Context(), h.Admin)
				require.NoError(t, err)
				run := func(sql string) error {
					_, err := session.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
					return err
				}
				finalized := ", finalized_at = now()"
				if column == "finalized_at" {
					finalized = ""
				}
				end, retry := "UPDATE river_job SET state = 'discarded'"+finalized, "UPDATE river_job SET state = 'available'"+
					strings.Replace(finalized, "now()", "NULL", 1)
				require.NoError(t, run("BEGIN; SET LOCAL client_min_messages = error; ALTER TABLE river_job DROP CONSTRAINT "+
					"finalized_or_finalized_at_null"))
				if warm {
					require.NoError(t, run(end))
					require.NoError(t, run(retry))
				}
				if run(change) == nil { // fails for columns in the triggers' conditions
					require.NoError(t, run("SET LOCAL SESSION AUTHORIZATION "+role))
					if assert.NoError(t, run(end), "%s, warm: %t", change, warm) {
						assert.NoError(t, run(retry), "retry after %s, warm: %t", change, warm)
					}
				}
				require.NoError(t, session.Close(t.Context()))
			}
		}
	}
}

// TestHost_SurvivesMixedPlans changes a column of River's table in a session in which capture's plans for the first job
// of a statement are invalid and its plans for further jobs are valid. So capture handles the first job with the new
// type of the column, and further jobs by plans for the old type. A message with several statements leaves the session
// in this state: capture takes them for one statement of the application, and CREATE SCHEMA invalidates all plans that
// were made before it.
func TestHost_SurvivesMixedPlans(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(h.owner, "DROP INDEX river_job_args_index, river_job_metadata_index")
	h.exec(h.admin, `INSERT INTO river_job (kind, args, max_attempts, attempt, state, errors)
		SELECT 'fails', '{}', 2, 2, 'running', ARRAY['{"error": "timeout"}']::jsonb[]
		FROM generate_series(1, 3)`)
	role := h.application().Config().ConnConfig.User
	for _, column := range h.strings(`SELECT attname::text FROM pg_attribute WHERE attrelid = 'river_job'::regclass
		AND attnum > 0 AND attname NOT IN ('id', 'state', 'metadata', 'finalized_at')`) {
		for _, change := range []string{
			"DROP COLUMN %s CASCADE, ADD COLUMN %[1]s point NOT NULL DEFAULT '(0, 0)'",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE json USING '{}'",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE bigint USING 1",
			"ALTER COLUMN %s DROP DEFAULT, ALTER COLUMN %[1]s TYPE json[] USING '{}'",
		} {
			change := "ALTER TABLE river_job " + fmt.Sprintf(change, column)
			session, err := pgx.Connect(t.Context(), h.Admin)
			require.NoError(t, err)
			run := func(sql string) error {
				_, err := session.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
				return err
			}
			end := "UPDATE river_job SET state = 'discarded', finalized_at = now()"
			retry := "UPDATE river_job SET state = 'available', finalized_at = NULL"
			first, further := " WHERE id = (SELECT min(id) FROM river_job)", " WHERE id > (SELECT min(id) FROM river_job)"
			require.NoError(t, run("BEGIN; SET LOCAL client_min_messages = error"))
			require.NoError(t, run(strings.Join([]string{
				end + first, retry + first, "CREATE SCHEMA another", end + further, retry + further,
			}, "; ")))
			if run(change) == nil { // fails for some columns with constraints
				require.NoError(t, run("SET LOCAL SESSION AUTHORIZATION "+role))
				if assert.NoError(t, run(end), change) {
					assert.NoError(t, run(retry), "retry after %s", change)
				}
			}
			require.NoError(t, session.Close(t.Context()))
		}
	}
}

// TestHost_RecordsEndsOfRedeliveries ends a redelivery while a column that only a new entry needs cannot be read.
func TestHost_RecordsEndsOfRedeliveries(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	app := h.application()
	d := h.fail(app)
	h.exec(h.owner, "ALTER TABLE river_job DROP COLUMN tags CASCADE, ADD COLUMN tags point NOT NULL DEFAULT '(0, 0)'")
	h.exec(app, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
		errors = ARRAY['{"error": "timeout", "attempt": 1}'::jsonb] WHERE id = $1`, d.redelivery)
	facts := h.strings(fmt.Sprint("SELECT fact FROM dlq.job_facts WHERE job_id = ", d.redelivery))
	require.Equal(t, []string{"discarded"}, facts)
}
