package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func newMigrator(pool *pgxpool.Pool) *postgres.Migrator {
	return &postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(postgres.Unbounded(t.Context()), sql, args...)
	require.NoError(t, err)
}

func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

// catalog lists all objects of a database except those of Postgres itself.
func catalog(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		SELECT 'relation ' || c.oid::regclass FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
		UNION ALL SELECT 'function ' || p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
		UNION ALL SELECT 'trigger ' || tgname || ' on ' || tgrelid::regclass FROM pg_trigger WHERE NOT tgisinternal
		UNION ALL SELECT 'schema ' || nspname FROM pg_namespace
		ORDER BY 1`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// riverDatabase returns a database of an application with River's tables and without dlqd.
func riverDatabase(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := postgrestest.Open(t, postgrestest.Empty(t))
	postgrestest.MigrateRiver(t, pool, "", 0)
	return pool
}

func TestMigrate_GoesUpAndDown(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.Empty(t))
	m := newMigrator(pool)
	m.OwnRiver = true
	river, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(t, err)
	_, err = river.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	before := catalog(t, pool)
	require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaOld)
	for range 2 { // the second call changes nothing
		require.NoError(t, m.Up(t.Context()))
		require.NoError(t, m.Check(t.Context()))
	}
	full := catalog(t, pool)
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	require.True(t, status.Current())

	execute(t, pool, "INSERT INTO river_job (kind, args, max_attempts) VALUES ('app', '{}', 1)")
	for status.Version > 0 {
		require.NoError(t, m.Down(t.Context()))
		require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaOld)
		status, err = m.Status(t.Context())
		require.NoError(t, err)
	}
	require.NoError(t, m.Down(t.Context()))
	var jobs int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM river_job").Scan(&jobs))
	require.Equal(t, 1, jobs, "an application may use River's tables")
	left := strings.Join(catalog(t, pool), "\n")
	left = strings.NewReplacer("relation dlq.schema_migrations_id_seq\n", "", "relation dlq.schema_migrations_pkey\n", "",
		"relation dlq.schema_migrations\n", "", "schema dlq\n", "").Replace(left)
	require.Equal(t, strings.Join(before, "\n"), left, "only the record of migrations remains")

	require.NoError(t, m.Up(t.Context()))
	require.Equal(t, full, catalog(t, pool))
}

// Recorded functions may be missing: after an interrupted Down, a partial restore, or DROP … CASCADE. Status reports
// that, and Up repairs it.
func TestMigrate_RepairsMissingCode(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	m := newMigrator(pool)
	m.OwnRiver = true
	full := catalog(t, pool)
	gone := map[string]string{
		"a function of capture":      "DROP FUNCTION dlq.capture CASCADE",
		"a function of operators":    "DROP FUNCTION dlq.park",
		"a view":                     "DROP VIEW dlq.entries",
		"a trigger":                  "DROP TRIGGER dead_letter_move ON dlq.dead_letter_queue",
		"a trigger of code":          "DROP TRIGGER circuit_breaker_change ON dlq.circuit_breakers",
		"a trigger on River's table": "DROP TRIGGER dlq_follow ON river_job",
		"all code": `DO $$ BEGIN
			EXECUTE (SELECT string_agg(format('DROP VIEW IF EXISTS %s CASCADE', oid::regclass), ';') FROM pg_class
				WHERE relnamespace = 'dlq'::regnamespace AND relkind = 'v');
			EXECUTE (SELECT string_agg(format('DROP ROUTINE IF EXISTS %s CASCADE', oid::regprocedure), ';') FROM pg_proc
				WHERE pronamespace = 'dlq'::regnamespace);
		END $$`,
		"all but River, by down": "",
	}
	for name, sql := range gone {
		if sql == "" {
			require.NoError(t, m.Down(t.Context()))
		} else {
			execute(t, pool, sql)
		}
		status, err := m.Status(t.Context())
		require.NoError(t, err)
		require.False(t, status.Current(), name)
		require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaOld, name)
		installed, err := m.Installed(t.Context())
		require.NoError(t, err)
		require.Equal(t, count(t, pool, "SELECT count(*) FROM pg_proc WHERE proname = 'capture'") == 1, installed, name)
		require.NoError(t, m.Up(t.Context()), name)
		require.NoError(t, m.Check(t.Context()), name)
		require.Equal(t, full, catalog(t, pool), name)
		execute(t, pool, "INSERT INTO river_job (kind, args, max_attempts, state) VALUES ('k', '{}', 1, 'running')")
		execute(t, pool, "UPDATE river_job SET state = 'cancelled', finalized_at = now(), errors = ARRAY['{\"error\": "+
			"\"x\"}'::jsonb] WHERE state = 'running'")
		require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM dlq.dead_letter_queue
			WHERE river_job_id = (SELECT max(id) FROM river_job)`), name)
	}

	// Functions and views of an older dlqd with other parameters or results are replaced. None of the older ones remains.
	execute(t, pool, `DROP FUNCTION dlq.reconcile; CREATE FUNCTION dlq.reconcile(p_limit integer, p_whole boolean,
		OUT filed integer) LANGUAGE sql AS 'SELECT 1';
		CREATE FUNCTION dlq.discard(p_id uuid, p_actor text DEFAULT session_user) RETURNS void LANGUAGE sql AS '';
		DROP FUNCTION dlq.note; CREATE FUNCTION dlq.note(entry uuid, note text,
			actor text DEFAULT NULL) RETURNS void LANGUAGE sql AS '';
		DROP VIEW dlq.backlog; CREATE VIEW dlq.backlog AS SELECT 1 AS more, 2 AS status;
		UPDATE dlq.settings SET value = 'older' WHERE key = 'code_version'`)
	require.NoError(t, m.Up(t.Context()))
	require.NoError(t, m.Check(t.Context()))
	require.Equal(t, full, catalog(t, pool))
	drift, err := m.Drift(t.Context())
	require.NoError(t, err)
	require.Empty(t, drift)

	// Down stops half-way, because a view depends on a table.
	execute(t, pool, "CREATE VIEW report AS SELECT id FROM dlq.dead_letter_queue")
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	for status.Version > 1 {
		require.NoError(t, m.Down(t.Context()))
		status, err = m.Status(t.Context())
		require.NoError(t, err)
	}
	require.Error(t, m.Down(t.Context()), "the first migration cannot be reverted")
	require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaOld)
	require.NoError(t, m.Up(t.Context()))
	require.NoError(t, m.Check(t.Context()))
	execute(t, pool, `CREATE VIEW dlq.added AS
		SELECT 1 AS one; CREATE FUNCTION dlq.added() RETURNS integer LANGUAGE sql AS 'SELECT 1'`)
	require.NoError(t, m.Check(t.Context()), "objects of other owners do not matter")
}

func TestMigrate_RunsOneAtATime(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.Empty(t))
	done := make(chan error, 3)
	for range cap(done) {
		go func() { done <- newMigrator(pool).Up(t.Context()) }()
	}
	for range cap(done) {
		require.NoError(t, <-done)
	}
}

// While a dlqd installs its functions, another session changes the same objects: a serving dlqd hides columns, or an
// administrator grants rights.
func TestMigrate_RetriesDuringGrants(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	for _, sql := range []string{"SELECT dlq.protect('{notes}')", "GRANT SELECT ON dlq.dead_letter_queue TO dlq_reader"} {
		execute(t, pool, "UPDATE dlq.settings SET value = 'older' WHERE key = 'code_version'")
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- newMigrator(pool).Up(t.Context()) }()
		require.Eventually(t, func() bool {
			var waits bool
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits))
			return waits
		}, 5*time.Minute, 5*time.Millisecond)
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-done, sql)
	}
}

func TestPlan_NamesTheUpgradeOfAnOlderInstallation(t *testing.T) {
	t.Parallel()
	pool := riverDatabase(t)
	m := newMigrator(pool)
	require.NoError(t, m.Attach(t.Context()))
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	execute(t, pool, "DELETE FROM dlq.schema_migrations WHERE version_id = $1", status.Latest)
	execute(t, pool, "UPDATE dlq.settings SET value = 'older' WHERE key = 'code_version'")
	plan, err := m.Plan(t.Context())
	require.NoError(t, err)
	require.NoError(t, plan.Err())
	require.Equal(t, fmt.Sprintf("schema dlq from version %d to version %d", status.Latest-1, status.Latest), plan.Upgrade[0])
	require.Contains(t, plan.Upgrade[1], "functions and views")
	require.Empty(t, plan.Create)
}

func TestAttach_DetachRemovesEverything(t *testing.T) {
	t.Parallel()
	pool := riverDatabase(t)
	before := catalog(t, pool)
	m := newMigrator(pool)
	execute(t, pool, `INSERT INTO river_job (kind, args, max_attempts, state, finalized_at, errors, metadata) VALUES
		('k', '{"n": 1}', 1, 'discarded', now(), ARRAY['{"error": "old"}'::jsonb], '{}'),
		('k', '{"n": 2}', 1, 'cancelled', now(), ARRAY['{"error": "JobCancelError: old"}'::jsonb], '{}'),
		('k', '{"n": 3}', 1, 'cancelled', now(), NULL, '{"cancel_attempted_at": "x"}'),
		('k', '{"n": 4}', 1, 'discarded', now(), NULL, '{"unique_key_conflict": "scheduler_discarded"}'),
		('k', '{"n": 5}', 1, 'completed', now(), NULL, '{}')`)

	plan, err := m.Plan(t.Context())
	require.NoError(t, err)
	require.Contains(t, strings.Join(plan.Create, "\n"), "trigger dlq_capture on public.river_job")
	require.Equal(t, before, catalog(t, pool), "a plan creates nothing")
	planned := strings.Join(plan.Create, "\n")

	for range 2 {
		require.NoError(t, m.Attach(t.Context()))
		rows, err := pool.Query(t.Context(), `SELECT 'dlq.' || regexp_replace(relname, '^rollup_.*', 'rollup_*') FROM pg_class
			WHERE relnamespace = 'dlq'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition`)
		require.NoError(t, err)
		tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		for _, table := range tables {
			require.Regexp(t, regexp.QuoteMeta(table)+`(?m:$|,)`, planned, "a plan names each table")
		}
		plan, err = m.Plan(t.Context())
		require.NoError(t, err)
		require.Empty(t, plan.Create)
		require.Empty(t, plan.Upgrade)
	}
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	require.True(t, status.Attached)
	require.Zero(t, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_queue"))
	for _, want := range []int{2, 0} {
		n, err := m.Backfill(t.Context(), func(int) {})
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	require.Equal(t, 2, count(t, pool, `SELECT count(*) FROM dlq.dead_letter_queue WHERE error_message LIKE '%old'
		AND captured_by = 'backfill' AND (original_event ->> 'n')::int <= 2`))

	execute(t, pool, "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1)")
	execute(t, pool, "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'available'")
	require.Equal(t, 3, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_queue"))

	for range 2 {
		found, err := m.Find(t.Context(), false, false)
		require.NoError(t, err)
		_, err = m.Detach(t.Context(), *found, false)
		require.NoError(t, err)
		require.Equal(t, 3, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_queue"), "the data stays")
		left := strings.Join(catalog(t, pool), "\n")
		require.NotContains(t, left, "trigger ")
		require.NotContains(t, left, "function dlq.")
	}
	execute(t, pool, "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1)")
	execute(t, pool, "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'available'")
	require.Equal(t, 3, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_queue"))

	require.NoError(t, m.Attach(t.Context()), "attach again")
	status, err = m.Status(t.Context())
	require.NoError(t, err)
	require.True(t, status.Attached)
	found, err := m.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = m.Detach(t.Context(), *found, true)
	require.NoError(t, err)
	require.Equal(t, before, catalog(t, pool), "detach leaves no object")
	found, err = m.Find(t.Context(), false, false)
	require.NoError(t, err)
	require.Nil(t, found)
}

// Up fails if an application may own the existing River.
func TestMigrate_DoesNotTakeOverRiverOfApplication(t *testing.T) {
	t.Parallel()
	pool := riverDatabase(t)
	before := catalog(t, pool)
	m := newMigrator(pool)
	require.ErrorContains(t, m.Up(t.Context()), `run "dlqd attach"`)
	require.Equal(t, before, catalog(t, pool))
	m.OwnRiver = true
	require.NoError(t, m.Up(t.Context()))
	m.OwnRiver = false
	require.NoError(t, m.Up(t.Context()), "the owner of River is recorded")
	require.NoError(t, m.Attach(t.Context()))
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	require.False(t, status.Attached)
}

func TestAttach_NeedsRiver(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.Empty(t))
	require.ErrorContains(t, newMigrator(pool).Attach(t.Context()), "there is no River in schema")
}

// Every object that dlqd creates has a comment, for psql.
func TestSchema_HasComments(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	rows, err := pool.Query(t.Context(), `
		SELECT 'schema ' || n.nspname FROM pg_namespace n WHERE n.nspname = 'dlq'
			AND obj_description(n.oid, 'pg_namespace') IS NULL
		UNION ALL
		SELECT 'column ' || c.oid::regclass || '.' || a.attname
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'c') AND NOT c.relispartition AND c.relname <> 'schema_migrations' -- goose's
		  AND col_description(c.oid, a.attnum) IS NULL
		UNION ALL
		SELECT 'relation ' || c.relkind::text || ' ' || c.oid::regclass FROM pg_class c LEFT
		JOIN pg_index i ON i.indexrelid = c.oid LEFT JOIN pg_class t ON t.oid = i.indrelid
		WHERE c.relnamespace = 'dlq'::regnamespace AND obj_description(c.oid, 'pg_class') IS NULL
			AND c.relname NOT LIKE 'schema\_migrations%' AND c.relkind <> 'c' -- the comment is that of the type
		  -- Of a month's index, the comment is its table's.
		  AND NOT (c.relkind = 'i' AND t.relispartition AND t.relname NOT IN ('dead_letter_inbox',
			'dead_letter_open', 'dead_letter_returned'))
		UNION ALL
		SELECT 'function ' || p.oid::regprocedure FROM pg_proc p
		WHERE p.pronamespace = 'dlq'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
		UNION ALL
		SELECT 'type ' || t.oid::regtype FROM pg_type t WHERE t.typnamespace = 'dlq'::regnamespace AND t.typtype = 'e'
			AND obj_description(t.oid, 'pg_type') IS NULL
		UNION ALL
		SELECT 'trigger ' || t.tgname || ' on ' || t.tgrelid::regclass FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
		WHERE c.relnamespace = 'dlq'::regnamespace AND NOT t.tgisinternal AND t.tgparentid = 0
			AND obj_description(t.oid, 'pg_trigger') IS NULL`)
	require.NoError(t, err)
	missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, missing, strings.Join(missing, "\n"))
}

// Migrations cannot change after their freeze, so db/code/16_comments.sql replaces their comments.
func TestSchema_CommentsUsePlainWords(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	rows, err := pool.Query(t.Context(), `
		SELECT DISTINCT pg_describe_object(d.classoid, d.objoid, d.objsubid) || ': ' || d.description
		FROM pg_description d JOIN pg_depend n ON n.classid = d.classoid AND n.objid = d.objoid
		WHERE n.refclassid = 'pg_namespace'::regclass AND n.refobjid = 'dlq'::regnamespace
		  AND d.description ~* '\m(somebody|nobody|whoever|whatever|everybody|who did|where it went|they said)\M'`)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, found, strings.Join(found, "\n"))
}

func TestFunctions_PinSearchPath(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	require.Zero(t, count(t, pool, `SELECT count(*) FROM pg_proc WHERE pronamespace = 'dlq'::regnamespace AND prosecdef
		AND NOT coalesce(proconfig::text, '') LIKE '%search_path=pg_catalog, pg_temp%'`))
	require.NotZero(t, count(t, pool, `SELECT count(*) FROM pg_proc WHERE pronamespace = 'dlq'::regnamespace
		AND prosecdef`))
}

func TestPartitions_AreCreatedAhead(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	months := "SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_transitions'::regclass"
	require.Equal(t, 1+3, count(t, pool, months))
	execute(t, pool, "CALL dlq.ensure_partitions()")
	require.Equal(t, 1+3, count(t, pool, months), "the partitions exist already")
	execute(t, pool, "CALL dlq.ensure_partitions(4)")
	require.Equal(t, 1+5, count(t, pool, months))

	// If the partition of a row is missing, the row stays in the default partition until that partition is created.
	execute(t, pool, `INSERT INTO dlq.dead_letter_transitions (at, entry_id, to_status, actor, queue, kind)
		VALUES (now() + interval '200 days', gen_random_uuid(), 'dlq_pending', 'a', 'q', 'k')`)
	require.Equal(t, 1, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_transitions_default"))
	execute(t, pool, "CALL dlq.ensure_partitions()")
	require.Equal(t, 1+6, count(t, pool, months))
	require.Zero(t, count(t, pool, "SELECT count(*) FROM dlq.dead_letter_transitions_default"))

	// A closed entry moves to the partition of its month. That partition has the same triggers as the others.
	execute(t, pool, "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1)")
	execute(t, pool, "UPDATE river_job SET state = 'discarded', finalized_at = now()")
	execute(t, pool, "SELECT dlq.discard(id) FROM dlq.dead_letter_queue")
	var partition string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT tableoid::regclass::text FROM dlq.dead_letter_queue").Scan(
		&partition))
	require.Regexp(t, `^dlq\.dead_letter_archived_\d{6}$`, partition)
	_, err := pool.Exec(t.Context(), "UPDATE "+partition+" SET status = 'dlq_pending'")
	require.ErrorContains(t, err, "cannot move from dlq_archived")
}

func TestSchemas_ValidateAndRender(t *testing.T) {
	t.Parallel()
	for _, s := range []postgres.Schemas{
		{DLQ: "a b", River: "public"},
		{DLQ: "dlq", River: "Robert'; DROP"},
		{DLQ: "x", River: "x"},
		{DLQ: strings.Repeat("x", 50), River: "public"},
		{},
	} {
		require.Error(t, s.Validate(), fmt.Sprint(s))
	}
	require.Equal(t, "SELECT a.b FROM jobs.river_job, office.t -- office.x xdlq.y",
		postgres.Schemas{DLQ: "office", River: "jobs"}.Render("SELECT a.b FROM river.river_job, dlq.t -- dlq.x xdlq.y"))
}

func TestOpen_ErrorsHidePasswords(t *testing.T) {
	t.Parallel()
	_, err := postgres.Open(context.Background(), "postgres://user:hunter2@127.0.0.1:1/db?connect_timeout=1", 0)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
	_, err = postgres.Open(context.Background(), "postgres://user:hunter2@[bad", 0)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
}

// Migrations, attach and detach hold their lock on a connection outside the pool, so a pool of one connection is
// enough.
func TestMigrator_WorksWithOneConnection(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	pool, err := postgres.Open(t.Context(), url, 1)
	require.NoError(t, err)
	defer pool.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	m := &postgres.Migrator{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler), OwnRiver: true,
	}
	require.NoError(t, m.Up(ctx))
	found, err := m.Find(ctx, false, false)
	require.NoError(t, err)
	_, err = m.Detach(ctx, *found, true)
	require.NoError(t, err)
	plan, err := m.Plan(ctx)
	require.NoError(t, err)
	require.NoError(t, plan.Err())
	require.NoError(t, m.Attach(ctx))
	_, err = m.Backfill(ctx, func(int) {})
	require.NoError(t, err)
	require.NoError(t, m.Down(ctx))
	_, err = m.Status(ctx)
	require.NoError(t, err)
}

func TestOpen_LimitsConnections(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	with := url + "&pool_max_conns=3"
	if !strings.Contains(url, "?") {
		with = url + "?pool_max_conns=3"
	}
	for _, test := range []struct {
		url       string
		max, want int32
	}{{url, 0, postgres.DefaultMaxConns}, {with, 0, 3}, {with, 2, 2}, {url, 1, 1}} {
		pool, err := postgres.Open(t.Context(), test.url, test.max)
		require.NoError(t, err)
		require.Equal(t, test.want, pool.Config().MaxConns, test.url)
		pool.Close()
	}
}
