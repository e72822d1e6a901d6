package postgres_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// guest is an application's database, with dlqd's migrator as dlqd's role, which is no superuser.
type guest struct {
	*postgrestest.Guest
	*testing.T

	owner, app, dlqd *pgxpool.Pool
	migrator         *postgres.Migrator
}

func newGuest(t *testing.T) *guest {
	t.Helper()
	return openGuest(t, postgrestest.NewGuest(t))
}

// attachedGuest returns a guest to which dlqd is attached. Other tests use the same roles.
func attachedGuest(t *testing.T) *guest {
	t.Helper()
	return openGuest(t, postgrestest.AttachedGuest(t))
}

func openGuest(t *testing.T, of *postgrestest.Guest) *guest {
	t.Helper()
	g := &guest{Guest: of, T: t}
	g.owner, g.dlqd = postgrestest.Open(t, g.Owner), postgrestest.Open(t, g.DLQD)
	app, err := pgxpool.New(t.Context(), g.App) // an application's session, without dlqd's settings
	require.NoError(t, err)
	t.Cleanup(app.Close)
	g.app = app
	g.migrator = newMigrator(g.dlqd)
	return g
}

// fail inserts a job, discards it as the application does, and returns its id.
func (g *guest) fail(conn postgres.DB) (job int64) {
	g.Helper()
	require.NoError(g, conn.QueryRow(g.Context(), `INSERT INTO river_job (kind, args, max_attempts, state)
		VALUES ('mail', '{"n": 9007199254740993}', 3, 'running') RETURNING id`).Scan(&job))
	_, err := conn.Exec(g.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3,
		errors = errors || jsonb_build_object('error', 'timeout', 'attempt', 3) WHERE id = $1`, job)
	require.NoError(g, err, "the application's statement must not fail")
	return job
}

func (g *guest) countEntries() int {
	g.Helper()
	return count(g.T, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_queue")
}

// reconcile appends the failures that capture missed to the inbox.
func (g *guest) reconcile() {
	g.Helper()
	for done := false; !done; {
		require.NoError(g, g.dlqd.QueryRow(g.Context(), "SELECT done FROM dlq.reconcile()").Scan(&done))
	}
}

func TestAttach_WorksAsPlainRole(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	before := catalog(t, g.owner)
	require.Zero(t, count(t, g.dlqd, `SELECT count(*) FROM pg_roles r WHERE r.rolname = current_user
		AND (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls)`))
	require.Zero(t, count(t, g.dlqd, `SELECT count(*) FROM pg_auth_members m
		WHERE m.member = (SELECT oid FROM pg_roles WHERE rolname = current_user)`))

	// Without rights, Attach refuses, lists all missing rights and creates nothing.
	var missing *postgres.MissingRightsError
	require.ErrorAs(t, g.migrator.Attach(t.Context()), &missing)
	require.Equal(t, before, catalog(t, g.owner), "a refused attach leaves nothing")
	for range missing.Missing { // as River's owner, run the printed statements one by one; together they suffice
		require.ErrorAs(t, g.migrator.Attach(t.Context()), &missing)
		execute(t, g.owner, missing.Missing[0].GrantSQL)
	}
	require.NoError(t, g.migrator.Attach(t.Context()))
	require.NoError(t, g.migrator.Check(t.Context()))
	require.Equal(t, before, slices.DeleteFunc(catalog(t, g.owner), func(object string) bool {
		return strings.Contains(object, "dlq.") || object == "schema dlq" || strings.HasPrefix(object, "trigger dlq_")
	}), "only objects in dlqd's schema and two triggers")

	g.fail(g.app)
	require.Equal(t, 1, g.countEntries())

	// The same role upgrades the installation.
	execute(t, g.dlqd, "UPDATE dlq.settings SET value = 'older' WHERE key IN ('code_version', 'river_triggers')")
	require.NoError(t, g.migrator.Attach(t.Context()))
	g.fail(g.app)
	require.Equal(t, 2, g.countEntries())

	// Detach finds the installation in the catalog. Its role does not own River's table.
	found, err := g.migrator.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = g.migrator.Detach(t.Context(), *found, true)
	require.NoError(t, err)
	require.Equal(t, before, catalog(t, g.owner))
	g.fail(g.app)
}

// Each right that is not optional is needed: if it is revoked, MissingRights reports it.
func TestRights_AreAllNeeded(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	database := g.owner.Config().ConnConfig.Database
	for _, right := range postgres.Rights() {
		if right.Optional {
			continue
		}
		grant := right.Grant(postgres.DefaultSchemas(), database, g.DLQDRole)
		execute(t, g.owner, strings.Replace(strings.Replace(grant, "GRANT", "REVOKE", 1), " TO ", " FROM ", 1))
		if right.On == "schema" { // PUBLIC has the right, too
			execute(t, g.owner, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
		}
		_, missing, err := g.migrator.MissingRights(t.Context(), right.Part)
		require.NoError(t, err)
		require.True(t, slices.ContainsFunc(missing, func(m postgres.MissingRight) bool { return m.GrantSQL == grant }),
			grant)
		execute(t, g.owner, grant)
	}
	_, missing, err := g.migrator.MissingRights(t.Context(), postgres.Parts()...)
	require.NoError(t, err)
	require.Len(t, missing, 2, "only the optional rights")
}

// A lock of the application makes Attach fail. Attach then removes the objects that a first installation created.
func TestAttach_RemovesPartialInstallation(t *testing.T) {
	t.Parallel()
	for _, hadSchema := range []bool{false, true} {
		g := newGuest(t)
		g.Grant(t, postgres.DefaultSchemas())
		if hadSchema {
			execute(t, g.owner, "CREATE SCHEMA dlq")
			execute(t, g.owner, "GRANT USAGE, CREATE ON SCHEMA dlq TO "+g.DLQDRole)
		}
		before := catalog(t, g.owner)
		tx, err := g.app.Begin(t.Context())
		require.NoError(t, err)
		// CREATE TRIGGER waits for this transaction.
		_, err = tx.Exec(t.Context(), "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1)")
		require.NoError(t, err)
		g.migrator.Tries = 1
		require.ErrorContains(t, g.migrator.Attach(t.Context()), "the partial installation was removed")
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, catalog(t, g.owner))
		require.NoError(t, g.migrator.Attach(t.Context()))
	}
}

// Detach drops everything in dlqd's schema. So Attach refuses a schema with other objects, and Find skips such a
// schema.
func TestGuest_RejectsSchemasOfOthers(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	for _, schema := range []string{"dlq", "app"} {
		execute(t, g.owner, "CREATE SCHEMA "+schema)
		execute(t, g.owner, "GRANT USAGE, CREATE ON SCHEMA "+schema+" TO "+g.DLQDRole)
		for _, sql := range []string{
			"CREATE TABLE %.settings (key text PRIMARY KEY, value text)", "CREATE TABLE %.dead_letter_queue (id bigint)",
			"CREATE VIEW %.report AS SELECT 1 AS n", "CREATE FUNCTION %.one() RETURNS integer LANGUAGE sql RETURN 1",
		} {
			execute(t, g.owner, strings.ReplaceAll(sql, "%", schema))
		}
	}
	before := catalog(t, g.owner)
	asOwner := newMigrator(g.owner) // some users have one role for everything
	for _, migrator := range []*postgres.Migrator{g.migrator, asOwner} {
		migrator.Tries = 1
		plan, err := migrator.Plan(t.Context())
		require.NoError(t, err)
		require.ErrorContains(t, plan.Err(), "schema dlq has objects that are not dlqd's (dead_letter_queue, one(), "+
			"report, settings)")
		require.Error(t, migrator.Attach(t.Context()))
		found, err := migrator.Find(t.Context(), false, false)
		require.NoError(t, err)
		require.Nil(t, found, "those tables do not belong to a dlqd")
	}
	require.Equal(t, before, catalog(t, g.owner))
}

// While dlqd is attached, River's own migrations work: down to none, up again, and to the newest version.
func TestGuest_AllowsRiverMigrations(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	postgrestest.MigrateRiver(t, g.owner, "", 6)
	g.Grant(t, postgres.DefaultSchemas())
	require.NoError(t, g.migrator.Attach(t.Context()))
	postgrestest.MigrateRiver(t, g.owner, "", 0) // the newest version
	require.NoError(t, g.migrator.Check(t.Context()))
	g.fail(g.app)
	postgrestest.MigrateRiver(t, g.owner, "", 5)
	postgrestest.MigrateRiver(t, g.owner, "", 0)
	g.fail(g.app)
	require.Equal(t, 2, g.countEntries())

	postgrestest.MigrateRiver(t, g.owner, "", -1)
	require.Equal(t, 2, g.countEntries(), "the dead letters stay")
	postgrestest.MigrateRiver(t, g.owner, "", 0)
	g.Grant(t, postgres.DefaultSchemas()) // on the new tables
	require.ErrorIs(t, g.migrator.Check(t.Context()), postgres.ErrSchemaOld, "the new table has no triggers")
	// Job ids start again at 1, which is harmless: id and creation time together identify a job.
	execute(t, g.owner, "GRANT SELECT, INSERT, UPDATE ON river_job TO "+g.app.Config().ConnConfig.User)
	execute(t, g.owner, "GRANT USAGE ON SEQUENCE river_job_id_seq TO "+g.app.Config().ConnConfig.User)
	require.NoError(t, g.migrator.Attach(t.Context()))
	require.EqualValues(t, 1, g.fail(g.app))
	require.Equal(t, 3, g.countEntries())
}

// The types of River's columns may change while sessions are open in which capture has run before.
func TestGuest_ToleratesColumnTypeChanges(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	warm, err := g.app.Acquire(t.Context())
	require.NoError(t, err)
	defer warm.Release()
	one := func(sql string, args ...any) {
		t.Helper()
		_, err := warm.Exec(t.Context(), sql, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
		require.NoError(t, err)
	}
	round := func(n int) {
		t.Helper()
		one("INSERT INTO river_job (kind, args, max_attempts, state) VALUES ('mail', '{\"n\": 1}', 3, 'running')")
		one("UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'")
		g.reconcile() // capture skips a job if its cached plan uses the older type
		one("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = (SELECT max(id) FROM river_job)")
		one("UPDATE river_job SET state = 'cancelled', finalized_at = now() WHERE id = (SELECT max(id) FROM river_job)")
		require.Equal(t, n, g.countEntries())
	}
	round(1)
	for i, change := range []string{
		"ALTER TABLE river_job ALTER COLUMN args TYPE json USING args::json",
		"ALTER TABLE river_job ALTER COLUMN errors TYPE json[] USING errors::json[]",
		"ALTER TABLE river_job ALTER COLUMN tags TYPE text[]", "ALTER TABLE river_job ALTER COLUMN attempt TYPE bigint",
		"ALTER TABLE river_job ALTER COLUMN priority TYPE integer",
		"ALTER TABLE river_job ALTER COLUMN max_attempts TYPE bigint",
		"ALTER TABLE river_job ALTER COLUMN queue TYPE varchar(200)",
		"ALTER TABLE river_job ALTER COLUMN kind TYPE varchar(200)",
		"ALTER TABLE river_job ADD COLUMN more text", "ALTER TABLE river_job DROP COLUMN attempted_by",
	} {
		if strings.Contains(change, "args TYPE") {
			execute(t, g.owner, "DROP INDEX river_job_args_index")
		}
		execute(t, g.owner, change)
		round(i + 2)
	}
}

// If dlqd's role loses its rights, the application is not affected: capture needs no right on River's tables.
func TestGuest_ToleratesLostRights(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	job := g.fail(g.app)
	execute(t, g.owner, "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM "+g.DLQDRole)
	execute(t, g.owner, "REVOKE ALL ON SCHEMA public FROM PUBLIC, "+g.DLQDRole)
	execute(t, g.owner, "GRANT USAGE ON SCHEMA public TO "+g.app.Config().ConnConfig.User)
	g.fail(g.app)
	require.Equal(t, 2, g.countEntries())
	// River UI retries the job.
	execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", job)
	require.Equal(t, 1, count(t, g.dlqd, "SELECT count(*) FROM dlq.job_facts WHERE job_id = $1 AND fact = 'retried'", job))
	execute(t, g.app, "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", job)

	// dlqd's role needs SELECT and UPDATE to mark a retried job. Revoke each of them in turn.
	execute(t, g.owner, "GRANT USAGE ON SCHEMA public TO "+g.DLQDRole)
	for _, lost := range []string{"SELECT", "UPDATE"} {
		execute(t, g.owner, "GRANT SELECT, UPDATE ON river_job TO "+g.DLQDRole)
		execute(t, g.owner, "REVOKE "+lost+" ON river_job FROM "+g.DLQDRole)
		execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", g.fail(g.app))
	}
	execute(t, g.app, "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'available'")

	// After the rights are restored, dlqd sees the jobs that ended meanwhile.
	execute(t, g.owner, "GRANT USAGE ON SCHEMA public TO "+g.DLQDRole)
	g.Grant(t, postgres.DefaultSchemas())
	require.Eventually(t, func() bool { // on a busy machine, a batch of facts may not fit into the time of a call
		execute(t, g.dlqd, "SELECT dlq.apply_facts()")
		return count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'") == 3
	}, 5*time.Minute, 50*time.Millisecond)
}

// Another role owns dlqd's schema and revokes the use of it. The application is not affected. After the use is granted
// again, a backfill records the failures of that time.
func TestGuest_ToleratesLostSchema(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	execute(t, g.owner, "CREATE SCHEMA dlq")
	execute(t, g.owner, "GRANT USAGE, CREATE ON SCHEMA dlq TO "+g.DLQDRole)
	require.NoError(t, g.migrator.Attach(t.Context()))
	g.fail(g.app)
	execute(t, g.owner, "REVOKE USAGE ON SCHEMA dlq FROM "+g.DLQDRole)
	job := g.fail(g.app)
	execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", job)
	execute(t, g.app, "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1", job)
	_, missing, err := g.migrator.MissingRights(t.Context(), postgres.PartAttach)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	execute(t, g.owner, missing[0].GrantSQL)
	n, err := g.migrator.Backfill(t.Context(), func(int) {})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, 2, g.countEntries())
}

// dlqd does not take a job that a policy hides for a deleted job.
func TestGuest_RejectsRowLevelSecurity(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	job := g.fail(g.app)
	execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", job)
	execute(t, g.dlqd, "SELECT dlq.apply_facts()")
	require.Equal(t, 1, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
	execute(t, g.owner, "ALTER TABLE river_job ENABLE ROW LEVEL SECURITY")
	execute(t, g.owner, "CREATE POLICY app ON river_job TO "+g.app.Config().ConnConfig.User+" USING (true)")

	session, err := pgx.Connect(t.Context(), g.DLQD)
	require.NoError(t, err)
	defer func() { _ = session.Close(context.WithoutCancel(t.Context())) }()
	for _, setting := range []string{"off", "on"} { // any setting of the session, as behind a pooler
		_, err = session.Exec(t.Context(), "SET row_security = "+setting)
		require.NoError(t, err)
		for _, sql := range []string{
			"SELECT dlq.sweep_redeliveries()", "SELECT dlq.backfill()",
			"SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_queue), 'x', 'x')",
			"CALL dlq.erase('{\"queue\": \"default\"}', 'x')", "SELECT dlq.is_undone(1, now())",
			"SELECT dlq.release_held('{default}', 1, '1 hour')",
		} {
			_, err = session.Exec(t.Context(), sql)
			require.ErrorContains(t, err, "row-level security policy", sql)
		}
	}
	_, err = g.dlqd.Exec(t.Context(), "SELECT FROM river_job")
	require.ErrorContains(t, err, "row-level security policy", "every session of dlqd has row_security off")
	require.Equal(t, 1, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"),
		"the entry waits for its job")

	// The application is not affected, and Attach refuses.
	retried := g.fail(g.app)
	// dlqd does not see the retried job, so it cannot write its marker into the job's metadata.
	execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", retried)
	execute(t, g.app, "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1", job)
	execute(t, g.app, "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", job)
	require.ErrorContains(t, g.migrator.Attach(t.Context()), "row level security hides rows of river_job")
}

func TestGuest_SupportsTwoRivers(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	execute(t, g.owner, "CREATE SCHEMA jobs")
	postgrestest.MigrateRiver(t, g.owner, "jobs", 0)
	second := postgres.Schemas{DLQ: "dlq", River: "jobs"}
	g.Grant(t, second)
	other := newMigrator(g.dlqd)
	other.Schemas = second
	plan, err := other.Plan(t.Context())
	require.NoError(t, err)
	require.ErrorContains(t, plan.Err(), "schema dlq has the dlqd of the River in schema public: choose another schema "+
		"with --schema")

	other.Schemas.DLQ = "dlq_jobs"
	require.NoError(t, other.Attach(t.Context()))
	third := newMigrator(g.dlqd)
	third.Schemas = postgres.Schemas{DLQ: "dlq_three", River: "jobs"}
	require.ErrorContains(t, third.Attach(t.Context()), "already has a dlqd in schema dlq_jobs")
	execute(t, g.owner, "INSERT INTO jobs.river_job (kind, args, max_attempts, state) VALUES ('k', '{}', 1, 'running')")
	execute(t, g.owner, "UPDATE jobs.river_job SET state = 'discarded', finalized_at = now()")
	g.fail(g.app)
	require.Equal(t, 1, g.countEntries())
	require.Equal(t, 1, count(t, g.dlqd, "SELECT count(*) FROM dlq_jobs.dead_letter_queue"))

	_, err = g.migrator.Find(t.Context(), false, false)
	require.ErrorContains(t, err, "there is more than one dlqd in this database")
	g.migrator.Schemas.DLQ = "typo"
	_, err = g.migrator.Find(t.Context(), true, false)
	require.ErrorIs(t, err, postgres.ErrNotAttached)
	require.ErrorContains(t, err, "--schema dlq_jobs --river-schema jobs")
	found, err := other.Find(t.Context(), true, true)
	require.NoError(t, err)
	_, err = other.Detach(t.Context(), *found, true)
	require.NoError(t, err)
	g.fail(g.app)
	require.Equal(t, 2, g.countEntries(), "the other dlqd still captures")
}

// Detach reports the objects and changes that remain, with commands that remove them.
func TestDetach_ReportsWhatStays(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	require.NoError(t, g.migrator.Attach(t.Context()))
	job := g.fail(g.app)
	execute(t, g.dlqd, "SELECT dlq.replay(id) FROM dlq.dead_letter_queue")
	execute(t, g.app, "INSERT INTO river_job (kind, args, max_attempts) VALUES ('dlqd_message', '{}', 1)")
	execute(t, g.owner, "ALTER TABLE river_job DISABLE TRIGGER dlq_capture") // detach must also find a disabled trigger
	found, err := g.migrator.Find(t.Context(), false, false)
	require.NoError(t, err)
	done, err := g.migrator.Detach(t.Context(), *found, false)
	require.NoError(t, err)
	require.Equal(t, []string{"dlq_capture", "dlq_follow"}, done.Triggers)
	text := ""
	for _, left := range done.Left {
		text += left.What + "\n"
		for _, how := range left.How {
			statement, _, _ := strings.Cut(how, " --")
			if !strings.HasPrefix(statement, "DROP ROLE") { // all tests share the roles
				execute(t, postgrestest.Open(t, g.Admin), statement)
			}
		}
	}
	require.Contains(t, text, "the tables of schema dlq, with the dead letters in them")
	require.Contains(t, text, "roles dlq_admin, dlq_operator, dlq_reader")
	require.Contains(t, text, "rights of this role")
	require.Contains(t, text, "markers in the metadata of 1 jobs")
	require.Contains(t, text, "1 messages that were submitted to dlqd and are not delivered")
	require.Equal(t, job+1, int64(count(t, g.owner, "SELECT max(id) FROM river_job WHERE metadata = '{}'")))
	require.NotContains(t, strings.Join(catalog(t, g.owner), "\n"), "dlq")
	execute(t, postgrestest.Open(t, g.Admin), "DROP ROLE "+g.DLQDRole) // fails if an object still depends on the role
	execute(t, postgrestest.Open(t, g.Admin), "CREATE ROLE "+g.DLQDRole)
}

// Detach retries while locks of the application block it.
func TestDetach_RetriesUnderLoad(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	failed := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := g.app.Exec(ctx, `WITH j AS (INSERT INTO river_job (kind, args, max_attempts, state)
				VALUES ('k', '{}', 1, 'running') RETURNING id) SELECT id FROM j`); err != nil && ctx.Err() == nil {
				failed <- err
				return
			}
			if _, err := g.app.Exec(ctx, `UPDATE river_job SET state = 'discarded', finalized_at = now()
				WHERE state = 'running'`); err != nil && ctx.Err() == nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	for range 3 {
		found, err := g.migrator.Find(t.Context(), false, false)
		require.NoError(t, err)
		_, err = g.migrator.Detach(t.Context(), *found, false)
		require.NoError(t, err)
		require.NoError(t, g.migrator.Attach(t.Context()))
	}
	stop()
	require.NoError(t, <-failed, "the application's statements")
}
