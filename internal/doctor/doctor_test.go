package doctor_test

import (
	"log/slog"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func examine(t *testing.T, pool *pgxpool.Pool) map[string]doctor.Finding {
	t.Helper()
	found := map[string]doctor.Finding{}
	for _, f := range doctor.Examine(t.Context(), &postgres.Migrator{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}) {
		require.NotContains(t, f.Detail, "%!", "the format does not match its arguments")
		require.NotEmpty(t, f.Detail)
		require.Equal(t, f.OK, f.Do == "", f.Name)
		found[f.Name] = f
	}
	return found
}

func TestExamine_FindsEachProblem(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("INSERT INTO river_leader (leader_id, elected_at, expires_at) VALUES ('me', now(), now() + interval '1 hour')")
	exec("SELECT dlq.reconcile()")
	exec(postgrestest.RefreshRollups)
	for name, f := range examine(t, pool) {
		if name != "transactions" && name != "replication slots" { // these checks cover the whole server
			require.True(t, f.OK, "%s: %s", name, f.Detail)
		}
	}

	// Each round combines problems that can exist at the same time.
	type problem struct{ name, sql, remedy, detail string }
	for _, round := range [][]problem{{
		{
			"triggers", "ALTER TABLE river_job DISABLE TRIGGER dlq_capture", "ALTER TABLE river_job ENABLE TRIGGER dlq_capture",
			"dlq_capture is disabled, dlq_follow is enabled",
		},
		{
			"capture", "SELECT dlq.set_capture('off', p_actor => 'kim', p_note => 'stuck')", "SELECT dlq.set_capture('on')",
			"is off, by kim since",
		},
		{
			"scopes", "INSERT INTO dlq.role_scopes (role, queues) VALUES ('was_renamed', '{a}')", "DELETE FROM dlq.role_scopes",
			"roles that do not exist: was_renamed",
		},
		{
			"grants", "GRANT SELECT ON ALL TABLES IN SCHEMA dlq TO dlq_reader",
			"REVOKE SELECT ON ALL TABLES IN SCHEMA dlq FROM dlq_reader", "dlq_reader may read partitions, tokens or sessions",
		},
		{
			"reconciler", "UPDATE dlq.reconcile_looks SET done_at = now() - interval '10 minutes'", "SELECT dlq.reconcile()",
			"has not scanned for 60",
		},
		{
			"filing", `INSERT INTO dlq.job_facts (job_id, job_created_at, fact, at)
			VALUES (1, now(), 'retried', now() - interval '1 hour')`,
			"DELETE FROM dlq.job_facts", "1 facts to apply (ends of redeliveries",
		},
		{"River's leader", "DELETE FROM river_leader", `INSERT INTO river_leader (leader_id, elected_at, expires_at)
			VALUES ('me', now(), now() + interval '1 hour')`, "there is none"},
		{
			"jobs", `INSERT INTO river_job (kind, args, max_attempts, scheduled_at)
			VALUES ('k', '{}', 1, now() - interval '2 hours')`, "DELETE FROM river_job",
			"1 available jobs have waited for more than an hour (queue default)",
		},
		{
			"default partitions", `INSERT INTO dlq.dead_letter_transitions_default (at, entry_id, to_status, actor, queue, kind)
			VALUES (now() + interval '400 days', gen_random_uuid(), 'dlq_pending', 'a', 'q',
				'k')`, `ALTER TABLE dlq.dead_letter_transitions_default DISABLE TRIGGER USER; DELETE
					FROM dlq.dead_letter_transitions_default; ALTER TABLE dlq.dead_letter_transitions_default ENABLE TRIGGER USER`,
			"hold 1 rows whose partition was missing",
		},
		{
			"circuit breakers", "SELECT dlq.open_breaker('destination:x')", "SELECT dlq.reset_breaker('destination:x')",
			"an operator holds open: destination:x",
		},
		{
			"dlqd's triggers", "ALTER TABLE dlq.dead_letter_queue DISABLE TRIGGER dead_letter_move",
			"ALTER TABLE dlq.dead_letter_queue ENABLE TRIGGER dead_letter_move", "dead_letter_move on dead_letter_queue",
		},
		{
			"tables and functions", "ALTER TABLE dlq.dead_letter_transitions DISABLE TRIGGER USER",
			"ALTER TABLE dlq.dead_letter_transitions ENABLE TRIGGER USER",
			"trigger transitions_append_only on dead_letter_transitions is disabled",
		},
		{
			"tables and functions", "ALTER FUNCTION dlq.origin(text, text) COST 7",
			"ALTER FUNCTION dlq.origin(text, text) COST 100", "function origin(p_actor text, p_claimed text) is different",
		},
		{
			"tables and functions", "ALTER INDEX dlq.dead_letter_open_due RENAME TO x",
			"ALTER INDEX dlq.x RENAME TO dead_letter_open_due", "index dead_letter_open_due is missing",
		},
		{
			"tables and functions", "ALTER TABLE dlq.dead_letter_inbox ADD CONSTRAINT mine CHECK (queue <> 'x')",
			"ALTER TABLE dlq.dead_letter_inbox DROP CONSTRAINT mine", "constraint mine on dead_letter_inbox was added",
		},
		{
			"tables and functions", "ALTER TABLE dlq.settings ALTER value DROP NOT NULL",
			"ALTER TABLE dlq.settings ALTER value SET NOT NULL", "column settings.value is different",
		},
		{
			"tables and functions", "CREATE UNIQUE INDEX mine ON dlq.dead_letter_inbox (queue)", "DROP INDEX dlq.mine",
			"index mine was added",
		},
		{
			"tables and functions", "ALTER TABLE dlq.job_facts ADD note text", "ALTER TABLE dlq.job_facts DROP note",
			"column job_facts.note was added",
		},
		{
			"partitions", `DO $$ DECLARE p text; BEGIN FOR p IN SELECT inhrelid::regclass FROM pg_inherits
			JOIN pg_class ON pg_class.oid = inhrelid
			WHERE inhparent = 'dlq.dead_letter_resolved'::regclass
				AND relname ~ '[0-9]$' LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$`,
			"CALL dlq.ensure_partitions()", "of dlq.dead_letter_resolved exist only 0.0 days ahead",
		},
	}, {
		// The next problem also causes this one.
		{"tables and functions", "SELECT 1", "SELECT 1", "trigger dlq_follow on river_job is for replicas only"},
		{
			"triggers", "ALTER TABLE river_job ENABLE REPLICA TRIGGER dlq_follow",
			"ALTER TABLE river_job ENABLE TRIGGER dlq_follow", "dlq_follow is enabled for replicas only",
		},
		{"capture", "SELECT dlq.set_capture('strict')", "SELECT dlq.set_capture('on')", "is strict, by"},
		{
			"partitions", `DO $$ DECLARE p text; BEGIN FOR p IN SELECT inhrelid::regclass FROM pg_inherits
			JOIN pg_class ON pg_class.oid = inhrelid
			WHERE inhparent = 'dlq.dead_letter_transitions'::regclass
				AND relname ~ '[0-9]$' LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$`,
			"CALL dlq.ensure_partitions()", "exist only 0.0 days ahead",
		},
	}} {
		for _, p := range round {
			exec(p.sql)
		}
		found := examine(t, pool)
		for _, p := range round {
			require.False(t, found[p.name].OK, p.name)
			require.Contains(t, found[p.name].Detail, p.detail)
			exec(p.remedy)
		}
		found = examine(t, pool)
		for _, p := range round {
			require.True(t, found[p.name].OK, "%s: %s", p.name, found[p.name].Detail)
		}
	}
	require.Contains(t, examine(t, postgrestest.Open(t, postgrestest.Empty(t)))["schema"].Detail, "dlqd migrate up")
}

// In an application's database, dlqd's role is no superuser. Each missing right comes with the statement that grants
// it.
func TestExamine_NamesMissingPrivileges(t *testing.T) {
	t.Parallel()
	g := postgrestest.NewGuest(t)
	owner, pool := postgrestest.Open(t, g.Owner), postgrestest.Open(t, g.DLQD)
	found := examine(t, pool)
	require.Contains(t, found["rights"].Do, "GRANT TRIGGER ON TABLE public.river_job TO "+g.DLQDRole)
	for _, f := range []string{"database", "row level security"} {
		require.True(t, found[f].OK, f)
	}
	g.Grant(t, postgres.DefaultSchemas())
	m := &postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	require.NoError(t, m.Attach(t.Context()))
	found = examine(t, pool)
	require.True(t, found["rights"].OK)
	require.Contains(t, found["rights"].Detail, "without pg_read_all_stats it does not see transactions of other users")
	for name, f := range found {
		if name != "replication slots" && name != "River's leader" {
			require.True(t, f.OK, "%s: %s", name, f.Detail)
		}
	}
	_, err := owner.Exec(t.Context(), "REVOKE INSERT ON river_job FROM "+g.DLQDRole+"; ALTER TABLE river_job ENABLE ROW "+
		"LEVEL SECURITY")
	require.NoError(t, err)
	found = examine(t, pool)
	require.Contains(t, found["rights"].Do, "GRANT INSERT ON TABLE public.river_job TO "+g.DLQDRole)
	require.Contains(t, found["row level security"].Detail, "hides rows of river_job")
}

// A finding names the schemas that were checked.
func TestExamine_NamesTheSchemasThatItChecked(t *testing.T) {
	t.Parallel()
	m := &postgres.Migrator{
		Pool:    postgrestest.Open(t, postgrestest.Empty(t)),
		Schemas: postgres.Schemas{DLQ: "office", River: "jobs"}, Logger: slog.New(slog.DiscardHandler),
	}
	require.NoError(t, m.Up(t.Context()))
	findings := func() []doctor.Finding { return doctor.Examine(t.Context(), m) }
	for _, f := range findings() {
		require.Regexp(t, `^(ok true|River's leader|transactions|replication slots)`,
			map[bool]string{true: "ok true", false: f.Name}[f.OK], f.Detail)
	}
	_, err := m.Pool.Exec(t.Context(), `SELECT office.set_capture('off'); UPDATE office.reconcile_looks
		SET done_at = now() - interval '10 minutes'; ALTER TABLE office.dead_letter_queue DISABLE TRIGGER USER; TRUNCATE office.rollup_state`)
	require.NoError(t, err)
	for _, f := range findings() {
		require.NotRegexp(t, `\b(dlq|river)\.[a-z]`, f.Detail+f.Do, f.Name)
	}
	var left int
	require.NoError(t, m.Pool.QueryRow(t.Context(),
		"SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'dlqd_doctor%'").Scan(&left))
	require.Zero(t, left, "the schema for the comparison is dropped")
}

// A dump contains views as pg_get_viewdef prints them. After a restore, Postgres prints them differently.
func TestExamine_AcceptsARestoredDump(t *testing.T) {
	t.Parallel()
	from, to := postgrestest.URL(t), postgrestest.Empty(t)
	dump := filepath.Join(t.TempDir(), "dump")
	for range 2 { // the second dump is of the restored database
		command(t, "pg_dump", "--format=custom", "--file", dump, postgrestest.Superuser(t, from))
		command(t, "pg_restore", "--exit-on-error", "--no-comments", "--dbname", postgrestest.Superuser(t, to), dump)
		found := examine(t, postgrestest.Open(t, to))["tables and functions"]
		require.True(t, found.OK, found.Detail)
		from, to = to, postgrestest.Empty(t)
	}
}

// TestExamine_AcceptsRecreatedViews recreates views and functions as a restored dump does. Unlike a real restore, it
// works on machines without pg_dump.
func TestExamine_AcceptsRecreatedViews(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	recreate := func() {
		t.Helper()
		_, err := pool.Exec(t.Context(), `DO $$
			DECLARE v_statement text;
			BEGIN
				FOR v_statement IN
					SELECT format('CREATE OR REPLACE VIEW %s AS %s', c.oid::regclass, pg_get_viewdef(c.oid))
					FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind = 'v'
					UNION ALL SELECT pg_get_functiondef(p.oid) FROM pg_proc p
					WHERE p.pronamespace = 'dlq'::regnamespace AND p.prosqlbody IS NOT NULL
				LOOP
					EXECUTE v_statement;
				END LOOP;
			END $$`)
		require.NoError(t, err)
	}
	for range 2 {
		recreate()
		found := examine(t, pool)["tables and functions"]
		require.True(t, found.OK, found.Detail)
	}
	// A change that was made before the dump is found after the restore.
	_, err := pool.Exec(t.Context(), "CREATE OR REPLACE VIEW dlq.automatic AS "+changed(t, pool,
		"SELECT pg_get_viewdef('dlq.automatic'::regclass)", "'policy'::text", "'politics'::text"))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), changed(t, pool, "SELECT pg_get_functiondef('dlq.known_failure'::regproc)",
		"'waits'::text", "'stays'::text"))
	require.NoError(t, err)
	recreate()
	detail := examine(t, pool)["tables and functions"].Detail
	require.Contains(t, detail, "view automatic is different")
	require.Regexp(t, `function known_failure\([^;]*\) is different`, detail)
}

// changed selects a definition with query, replaces the text of the parameter was in it by that of the parameter is,
// and returns the result.
func changed(t *testing.T, pool *pgxpool.Pool, query, was, is string) (definition string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), query).Scan(&definition))
	require.Contains(t, definition, was)
	return strings.ReplaceAll(definition, was, is)
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestExamine_ReportsReplication(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	require.True(t, examine(t, postgrestest.Open(t, url))["replication"].OK)
	found := examine(t, postgrestest.Open(t, url+"&synchronous_commit=off"))["replication"]
	require.False(t, found.OK)
	require.Contains(t, found.Detail, "synchronous_commit is off")
}
