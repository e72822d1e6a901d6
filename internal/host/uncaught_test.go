package host_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"
)

// TestHost_SurvivesPartitionChanges removes or detaches partitions, or inserts unexpected rows into them.
func TestHost_SurvivesPartitionChanges(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.tryChanges(append(h.strings(`
		SELECT format(f, i.inhparent::regclass, c.oid::regclass) FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid,
			unnest(ARRAY['ALTER TABLE %s DETACH PARTITION %s', 'DROP TABLE %2$s CASCADE']) f
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p')`),
		// dead_letter_queue has no partition but the inbox, or the audit trail has no partition.
		"DROP TABLE dlq.dead_letter_open, dlq.dead_letter_resolved, dlq.dead_letter_failed, dlq.dead_letter_archived CASCADE",
		`DO $$ DECLARE p regclass; BEGIN FOR p IN SELECT inhrelid FROM pg_inherits
			WHERE inhparent = 'dlq.dead_letter_transitions'::regclass LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$`,
		// The inbox is detached, and another partition takes its place, or the inbox becomes the default partition.
		"ALTER TABLE dlq.dead_letter_queue DETACH PARTITION dlq.dead_letter_inbox; CREATE TABLE dlq.another PARTITION OF "+
			"dlq.dead_letter_queue FOR VALUES IN ('inbox')",
		"ALTER TABLE dlq.dead_letter_queue DETACH PARTITION dlq.dead_letter_inbox; ALTER TABLE dlq.dead_letter_queue "+
			"ATTACH PARTITION dlq.dead_letter_inbox DEFAULT",
		// The default partition of the audit trail has rows of months whose partitions are then to be created.
		`INSERT INTO dlq.dead_letter_transitions (at, entry_id, to_status, actor, queue, kind)
			SELECT now() + m * interval '1 month', gen_random_uuid(), 'dlq_pending', 'x', 'x', 'x'
			FROM generate_series(1, 100) m`,
	))
}

// TestHost_SurvivesChangedRights changes privileges and row level security on both schemas, for dlqd's role and for the
// application's.
func TestHost_SurvivesChangedRights(t *testing.T) {
	t.Parallel()
	h := newHostWithRoles(t)
	h.exec(h.admin, "CREATE TABLE secrets (id bigint)")
	dlqd, app := h.DLQDRole, h.application().Config().ConnConfig.User
	var database string
	require.NoError(t, h.admin.QueryRow(t.Context(), "SELECT current_database()").Scan(&database))
	own := fmt.Sprintf("CREATE POLICY own ON river_job TO %s USING (true) WITH CHECK (true); ", app)
	h.tryChanges([]string{
		"REVOKE ALL ON river_job FROM " + dlqd, "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM " + dlqd + ", PUBLIC",
		"REVOKE ALL ON ALL TABLES IN SCHEMA dlq FROM " + dlqd + ", PUBLIC",
		"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA dlq FROM " + dlqd + ", PUBLIC",
		"REVOKE ALL ON ALL SEQUENCES IN SCHEMA dlq FROM " + dlqd + ", PUBLIC",
		"REVOKE ALL ON SCHEMA dlq FROM " + dlqd + ", PUBLIC",
		"REVOKE CONNECT, TEMP ON DATABASE " + database + " FROM " + dlqd + ", PUBLIC",
		"REVOKE USAGE ON TYPE river_job_state FROM PUBLIC",
		"ALTER ROLE " + dlqd + " NOLOGIN CONNECTION LIMIT 0 VALID UNTIL '2000-01-01'",
		"ALTER ROLE " + dlqd + " SET default_transaction_read_only = on",
		"ALTER ROLE " + dlqd + " SET search_path = ''", "ALTER ROLE " + dlqd + " SET row_security = off",
		own + "ALTER TABLE river_job ENABLE ROW LEVEL SECURITY",
		own + "ALTER TABLE river_job ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
		"DO $$ DECLARE r regclass; BEGIN FOR r IN SELECT c.oid FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace " +
			"AND c.relkind IN ('r', 'p') LOOP " +
			"EXECUTE 'ALTER TABLE ' || r || ' ENABLE ROW LEVEL SECURITY'; EXECUTE 'ALTER TABLE ' || r || ' FORCE ROW LEVEL " +
			"SECURITY'; END LOOP; END $$",
		`CREATE POLICY p ON dlq.dead_letter_inbox
			USING (1 / (SELECT count(*) FROM secrets) > 0); ALTER TABLE dlq.dead_letter_inbox ENABLE ROW LEVEL SECURITY,
				FORCE ROW LEVEL SECURITY`,
		"CREATE POLICY p ON dlq.job_facts WITH CHECK (false); ALTER TABLE dlq.job_facts ENABLE ROW LEVEL SECURITY, FORCE " +
			"ROW LEVEL SECURITY",
	})
}

// TestHost_SurvivesShortTimeouts sets short timeouts in the application's session while another session locks the
// tables that capture needs.
func TestHost_SurvivesShortTimeouts(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	settings := []string{
		"lock_timeout = '1ms'", "statement_timeout = '2s'", "idle_in_transaction_session_timeout = '2s'",
		"deadlock_timeout = '1ms'",
	}
	batches := h.prepare(2 * len(settings))
	for i, setting := range settings {
		if strings.HasPrefix(setting, "deadlock") {
			h.exec(h.admin, "GRANT SET ON PARAMETER deadlock_timeout TO PUBLIC")
		}
		app := h.application(setting)
		require.Empty(t, app.run(batches[2*i], setting))
		require.True(t, h.captured(batches[2*i]), setting)
		require.True(t, h.while("LOCK TABLE dlq.dead_letter_queue, dlq.entry_jobs, dlq.job_facts IN ACCESS EXCLUSIVE MODE",
			func() {
				require.NotEmpty(t, app.run(batches[2*i+1], setting+" while the tables are locked"))
				tx, err := app.Begin(t.Context())
				require.NoError(t, err)
				river := riverpgxv5.New(nil).UnwrapExecutor(tx)
				require.NoError(t, complete(t.Context(), river, batches[2*i+1]), "again, in a transaction that continues")
				h.exec(tx, "SELECT 1")
				require.NoError(t, tx.Commit(t.Context()))
				app.takeWarnings()
			}))
	}
	h.reconcile()
	h.requireExact()
}

// TestHost_CapturesEachStatementOnItsOwn checks that a skip in one statement of a transaction does not affect the next
// statement.
func TestHost_CapturesEachStatementOnItsOwn(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	batches := h.prepare(3)
	app := h.application()
	tx, err := app.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	river := riverpgxv5.New(nil).UnwrapExecutor(tx)
	ends := func(j jobs) {
		require.NoError(t, complete(t.Context(), river, j))
		require.NoError(t, retry(t.Context(), river, j))
	}
	require.True(t, h.while("LOCK TABLE dlq.dead_letter_inbox, dlq.job_facts IN ACCESS EXCLUSIVE MODE",
		func() { ends(batches[0]) }))
	require.Len(t, app.takeWarnings(), 2)
	ends(batches[1])
	ends(batches[2])
	require.Empty(t, app.takeWarnings())
	require.NoError(t, tx.Commit(t.Context()))
	require.False(t, h.captured(batches[0]))
	require.True(t, h.captured(batches[1]))
	require.True(t, h.captured(batches[2]))
	h.reconcile()
	h.requireExact()
}

// TestHost_ReconcilesBesidePreparedTransactions checks that the reconciler does not wait for a prepared transaction
// with failures, and that each of these failures is filed once after the commit.
func TestHost_ReconcilesBesidePreparedTransactions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	batches := h.prepare(3)
	for i, capture := range []string{"on", "off", "on"} {
		h.exec(h.dlqd, "SELECT dlq.set_capture($1)", capture)
		tx, err := h.application().Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, complete(t.Context(), riverpgxv5.New(nil).UnwrapExecutor(tx), batches[i]))
		h.exec(tx, fmt.Sprintf("PREPARE TRANSACTION '%s_%d'", h.Database, i))
		_ = tx.Rollback(t.Context()) // tells pgx that the transaction has ended
	}
	const entries = "SELECT count(*) FROM dlq.dead_letter_queue WHERE kind <> 'retried'" // retried jobs had failed before
	h.reconcile()
	require.Zero(t, h.count(entries))
	h.exec(h.application(), fmt.Sprintf("COMMIT PREPARED '%s_0'", h.Database))
	h.exec(h.application(), fmt.Sprintf("COMMIT PREPARED '%s_1'", h.Database))
	h.reconcile()
	require.Equal(t, 6, h.count(entries))
	require.Equal(t, 3, h.count(entries+" AND captured_by = 'reconciler'"))
	h.exec(h.application(), fmt.Sprintf("COMMIT PREPARED '%s_2'", h.Database))
	h.reconcile()
	require.Equal(t, 9, h.count(entries))
	h.requireExact()
}

const (
	alterRoot, alterInbox = "ALTER TABLE dlq.dead_letter_queue ", "ALTER TABLE dlq.dead_letter_inbox "
	// apply_facts appends facts without an entry to the inbox. file is a separate statement, because its snapshot must
	// include these rows.
	empty = `SELECT dlq.apply_facts(); SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox)); DELETE
		FROM dlq.job_facts; `
	refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$; "
)

// TestHost_SurvivesConstraintsAndTriggers adds constraints, triggers and rules that reject the rows of capture.
func TestHost_SurvivesConstraintsAndTriggers(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.tryChanges([]string{
		alterInbox + "ADD CONSTRAINT refused CHECK (river_job_id < 0) NOT VALID",
		alterRoot + "ADD CONSTRAINT refused CHECK (river_job_id < 0) NOT VALID",
		empty + alterRoot + "ADD COLUMN refused text; " + alterInbox + "ALTER COLUMN refused SET NOT NULL",
		empty + "ALTER TABLE dlq.job_facts ADD COLUMN refused text NOT NULL",
		"ALTER TABLE dlq.job_facts ADD CONSTRAINT refused CHECK (job_id < 0) NOT VALID",
		refuse + "CREATE TRIGGER refused BEFORE INSERT ON dlq.dead_letter_inbox FOR EACH ROW EXECUTE FUNCTION refuse()",
		refuse + "CREATE TRIGGER refused AFTER INSERT ON dlq.job_facts FOR EACH ROW EXECUTE FUNCTION refuse()",
		refuse + "CREATE TRIGGER refused BEFORE INSERT ON dlq.dead_letter_inbox FOR EACH STATEMENT EXECUTE FUNCTION refuse()",
		"CREATE RULE refused AS ON INSERT TO dlq.dead_letter_inbox DO ALSO SELECT 1 / 0",
		// The inbox gets other partition bounds.
		empty + alterRoot + "DETACH PARTITION dlq.dead_letter_archived; " + alterRoot +
			"DETACH PARTITION dlq.dead_letter_inbox; " + alterRoot + "ATTACH PARTITION dlq.dead_letter_inbox FOR VALUES IN " +
			"('archived')",
	})
}

// TestHost_UncaughtErrorsEndWithCaptureOff covers a constraint that accepts the first row of a statement and rejects a
// later one (docs/host.md, "What is not caught"). The application's statement fails with the constraint's error until
// capture is switched off.
func TestHost_UncaughtErrorsEndWithCaptureOff(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	app := h.application()
	h.exec(app, `INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'late', '{}', 1, 'running'
		FROM generate_series(1, 5)`)
	h.exec(h.admin, fmt.Sprintf(alterInbox+"ADD CONSTRAINT refused CHECK (river_job_id <> %d)",
		h.count("SELECT max(id) FROM river_job")))
	const fail = "UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE kind = 'late'"
	_, err := app.Exec(t.Context(), fail)
	require.ErrorContains(t, err, "refused")
	h.exec(h.dlqd, "SELECT dlq.set_capture('off')")
	h.exec(app, fail)
	require.Empty(t, app.takeWarnings())
	h.exec(h.dlqd, "SELECT dlq.set_capture('on')")
	h.exec(h.admin, alterInbox+"DROP CONSTRAINT refused")
	h.reconcile()
	h.requireExact()
	require.Equal(t, 5, h.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}
