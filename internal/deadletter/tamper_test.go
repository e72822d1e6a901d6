package deadletter_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func ownerSession(t *testing.T, pool *pgxpool.Pool) *session {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return &session{T: t, conn: conn.Conn()}
}

// dlqd connects as the owner of the schema. The owner cannot bypass the state table or the audit trail with a plain
// statement on any table.
func TestOwner_CannotForgeRows(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	exec := func(sql string) error {
		_, err := pool.Exec(t.Context(), sql)
		return err
	}
	require.NoError(t, exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = river_job_id, move = '{"actor": "worker:1"}'`))
	require.NoError(t, exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_failed'"))
	require.NoError(t, exec("CALL dlq.ensure_partitions(4)"))
	now, later := time.Now().UTC().Format("200601"),
		time.Now().UTC().AddDate(0, 3, 3-time.Now().UTC().Day()).Format("200601")
	forged := func(table, status string) string {
		return fmt.Sprintf(`INSERT INTO dlq.%s (id, river_job_id, job_created_at, queue, kind, job_kind, priority,
			original_event, status, stage, closed_at, first_failed_at, last_failed_at, move)
			VALUES (gen_random_uuid(), 1, now(), 'q', 'k', 'k', 1, '{}', 'dlq_%s', '%[2]s', now(), now(), now(),
				'{"moved": true}')`, table, status)
	}
	refused := map[string]string{}
	for _, status := range []string{"resolved", "failed", "archived"} {
		for _, table := range []string{"dead_letter_queue", "dead_letter_" + status, "dead_letter_" + status + "_" + now} {
			refused[forged(table, status)] = "cannot be inserted unless it is dlq_pending"
		}
		for _, table := range []string{"", "_default", "_" + now, "_" + later} {
			refused["TRUNCATE dlq.dead_letter_"+status+table] = "it would delete entries without audit rows"
		}
	}
	for _, table := range []string{"dead_letter_queue", "dead_letter_failed", "dead_letter_failed_" + now} {
		refused["DELETE FROM dlq."+table] = "only resolved and archived entries can be deleted"
	}
	for _, table := range []string{"", "_default", "_" + now, "_" + later} {
		refused["DELETE FROM dlq.dead_letter_transitions"+table] = "the audit trail is append-only"
		refused["TRUNCATE dlq.dead_letter_transitions"+table] = "the audit trail is append-only"
	}
	refused["UPDATE dlq.dead_letter_transitions_"+now+" SET actor = 'x'"] = "it is append-only"
	for _, stage := range []string{"open", "inbox"} { // also for open entries that are not pending
		refused[strings.Replace(forged("dead_letter_queue", "manual"), "'manual', now(),", "'"+stage+"', NULL,",
			1)] = "cannot be inserted unless it is dlq_pending"
	}
	require.NoError(t, exec(`INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind, detail)
		VALUES (gen_random_uuid(), 'dlq_manual', 'kim', 'q', 'k', '{"payload": {"card": "4711"}}')`))
	require.NoError(t, exec(`SELECT dlq.erase_begin('{"tags": ["cus_81"]}', 'request 1')`))
	refused[`UPDATE dlq.dead_letter_transitions SET detail = '{"erased": true}'`] = "it is append-only"
	refused["DELETE FROM dlq.erasures"] = "records of erasures are permanent"
	refused["TRUNCATE dlq.erasures"] = "records of erasures are permanent"
	refused["UPDATE dlq.erasures SET actor = 'x'"] = "cannot be changed"
	refused["UPDATE dlq.erasures SET note = NULL"] = "cannot be changed"
	refused["DELETE FROM dlq.acts"] = "the audit trail is append-only"
	refused["UPDATE dlq.acts SET actor = 'x'"] = "the audit trail is append-only"
	refused["TRUNCATE dlq.acts"] = "the audit trail is append-only"
	require.NoError(t, exec("SELECT dlq.act_on('note', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim', 'seen')"))
	for _, sql := range []string{
		"UPDATE dlq.operations SET actor = 'x'", "UPDATE dlq.operations SET note = NULL",
		"UPDATE dlq.operations SET changed = 0", "DELETE FROM dlq.operations", "TRUNCATE dlq.operations CASCADE",
	} {
		refused[sql] = "the audit trail is append-only"
	}
	for _, table := range []string{"dead_letter_queue", "dead_letter_failed", "dead_letter_failed_" + now} {
		refused["UPDATE dlq."+table+" SET original_event = '{}'"] = "without an audit row"
		refused["UPDATE dlq."+table+" SET error_message = 'x'"] = "without an audit row"
	}
	for sql, want := range refused {
		require.ErrorContains(t, exec(sql), want, sql)
	}
	// An UPDATE of an entry in the inbox files the entry, with the audit row of its capture.
	require.NoError(t, exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
		VALUES ('k', '{"n": 1}', 'q', 1, 'running')`))
	require.NoError(t, exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "timeout", "attempt": 1}'::jsonb] WHERE state = 'running'`))
	for _, table := range []string{"dead_letter_queue", "dead_letter_inbox"} {
		for _, column := range []string{"original_event = '{}'", "error_message = 'x'"} {
			sql := "UPDATE dlq." + table + " SET " + column + " WHERE stage = 'inbox'"
			require.ErrorContains(t, exec(sql), "without an audit row", sql)
		}
	}
	require.Equal(t, "1", ownerSession(t, pool).text("SELECT count(*)::text FROM dlq.dead_letter_inbox"))
	require.Equal(t, "4", ownerSession(t, pool).text(`SELECT count(*)::text FROM dlq.dead_letter_queue
		WHERE status = 'dlq_failed'`))
}

// A statement that moves many entries (dlq.on_moves) writes the same audit rows as dlq.on_move does for each entry.
func TestMoves_BatchWritesRowsOfSingleMoves(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	s.can("INSERT INTO dlq.settings (key, value) VALUES ('policy_version', '2') ON CONFLICT (key) DO UPDATE SET value = '2'")
	s.can("UPDATE dlq.dead_letter_queue SET config_version = '1', error_class = 'validation', fingerprint = 'f'")
	redeliver := func(actor string) {
		s.can("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open), '" + actor +
			`', 'sent', 'a note', true, '{"run": 1}')`)
	}
	rows := func() string {
		return s.text(`SELECT string_agg((to_jsonb(t) - '{id,at,xid,river_job_id}'::text[])::text, E'\n' ORDER BY t.entry_id)
			FROM dlq.dead_letter_transitions t JOIN dlq.dead_letter_open e ON e.id = t.entry_id
				AND e.redelivery_job_id = t.river_job_id`)
	}
	for _, actor := range []string{"kim", "worker:1"} {
		redeliver(actor)
		batch := rows()
		require.Equal(t, 4, strings.Count(batch, `"to_status": "dlq_processing"`))
		s.can("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual'")
		for _, table := range []string{"dead_letter_queue", "dead_letter_open"} { // as during an upgrade
			s.can("ALTER TABLE dlq." + table + " DISABLE TRIGGER dead_letter_moves")
		}
		redeliver(actor)
		require.Equal(t, batch, rows())
		s.can("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual'")
		for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
			s.can("ALTER TABLE dlq." + table + " ENABLE TRIGGER dead_letter_moves")
		}
	}
}

// An action on many entries writes the same audit rows as dlq.on_move does for each entry.
func TestMoves_BulkActWritesRowsOfSingleMoves(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	s.can("INSERT INTO dlq.settings (key, value) VALUES ('policy_version', '2') ON CONFLICT (key) DO UPDATE SET value = '2'")
	s.can("UPDATE dlq.dead_letter_queue SET config_version = '1', error_class = 'validation', fingerprint = 'f'")
	s.can("UPDATE dlq.dead_letter_open SET status = 'dlq_manual'")
	ids := s.text("SELECT array_agg(id)::text FROM dlq.dead_letter_open")
	acted := func(action string) string {
		operation := uuid.NewString()
		s.can("SELECT dlq.act_on('" + action + "', '" + ids + "', 'kim', 'a note', '{\"operation\": \"" + operation + "\"}')")
		rows := s.text(`SELECT string_agg((to_jsonb(t) - '{id,at,xid,operation}'::text[])::text, E'\n' ORDER BY t.entry_id)
			FROM dlq.dead_letter_transitions t WHERE t.operation = '` + operation + "'")
		s.can("SELECT dlq.act_on('reopen', '" + ids + "', 'kim')")
		return rows
	}
	for _, action := range []string{"discard", "resolve"} {
		acted(action) // both calls that are compared find the notes of this call
		batch := acted(action)
		require.Equal(t, 4, strings.Count(batch, `"from_status": "dlq_manual"`))
		for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
			s.can("ALTER TABLE dlq." + table + " DISABLE TRIGGER dead_letter_moves")
		}
		require.Equal(t, batch, acted(action))
		for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
			s.can("ALTER TABLE dlq." + table + " ENABLE TRIGGER dead_letter_moves")
		}
	}
}

// The setting dlq.moves hides no move. If the owner sets it, a move has the actor and the reason of the setting. If an
// operator sets it, it is ignored.
func TestMoves_SettingHidesNoMove(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	id := s.text("SELECT min(id::text) FROM dlq.dead_letter_open")
	last := func() string {
		return s.text(`SELECT concat_ws(' ', t.actor = session_user, t.reason, t.from_status, t.to_status)
			FROM dlq.dead_letter_transitions t WHERE t.entry_id = '` + id + "' ORDER BY t.at DESC, t.id DESC LIMIT 1")
	}
	s.can("BEGIN")
	s.can("SELECT dlq.redeliver(ARRAY['" + id + "']::uuid[], 'kim', 'sent')")
	require.Equal(t, "f sent dlq_manual dlq_processing", last())
	s.can("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual' WHERE id = '" + id + "'")
	require.Equal(t, "t dlq_processing dlq_manual", last(), "the setting of the statement before has ended")
	s.can("COMMIT")
	moves := func() string { return s.text("SELECT count(*)::text FROM dlq.dead_letter_transitions") }
	for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
		s.can(`SET dlq.moves = '{"actor": "kim", "reason": "x"}'`)
		before := moves()
		for _, sql := range []string{
			"SET status = 'dlq_processing', redelivery_job_id = 1, river_job_id = -1", "SET status = 'dlq_failed'",
		} {
			_, err := s.conn.Exec(t.Context(), "UPDATE dlq."+table+" "+sql+" WHERE id = '"+id+"'")
			require.ErrorContains(t, err, "DLQ01")
		}
		require.Equal(t, before, moves())
		s.can("UPDATE dlq." + table + " SET status = 'dlq_pending', next_retry_at = now() WHERE id = '" + id + "'")
		require.Equal(t, "f x dlq_manual dlq_pending", last())
		s.can("RESET dlq.moves")
		s.can("UPDATE dlq." + table + " SET status = 'dlq_manual' WHERE id = '" + id + "'")
		require.Equal(t, "t dlq_pending dlq_manual", last())
	}
	asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
		operator := &session{T: t, conn: conn}
		operator.can(`SET dlq.moves = '{"actor": "kim", "reason": "x"}'`)
		operator.can("SELECT dlq.unpark('" + id + "')")
		require.Equal(t, "f returned to the automatic path dlq_manual dlq_pending", last())
		operator.can("SELECT dlq.replay('" + id + "', p_force => true)")
		require.Equal(t, "f replayed dlq_pending dlq_processing", last())
		require.Equal(t, "1", s.text(`SELECT count(DISTINCT actor)::text FROM dlq.dead_letter_transitions
			WHERE entry_id = '`+id+"' AND reason IN ('returned to the automatic path', 'replayed') AND actor LIKE 'dlq_operator_%'"))
	})
}

// The statement of a redelivery calls some functions for each entry. They must be inlined, because otherwise Postgres
// would start an executor for each call.
func TestRedeliver_ExpressionsAreInlined(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	rows, err := pool.Query(t.Context(), `EXPLAIN (VERBOSE) SELECT dlq.carried_metadata(metadata, 'discard'),
		dlq.is_superseded(state::text, attempt, metadata) FROM river_job`)
	require.NoError(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotContains(t, strings.Join(plan, " "), "dlq.")
}

// A redelivery does not read all pending entries, even if the statistics are from a time without pending entries.
func TestRedeliver_ReadsOnlyItsEntries(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	for _, sql := range []string{
		"ALTER TABLE dlq.dead_letter_open SET (autovacuum_enabled = off)",
		`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			SELECT 'k', '{}', 'q', 1, 'running' FROM generate_series(1, 5000)`,
		"UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'",
		"SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))",
		"UPDATE dlq.dead_letter_open SET status = 'dlq_processing', redelivery_job_id = river_job_id",
		"VACUUM ANALYZE dlq.dead_letter_open",
		"UPDATE dlq.dead_letter_open SET status = 'dlq_pending', next_retry_at = now()",
		"BEGIN",
		"SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 10), 'kim', 'sent')",
	} {
		s.can(sql)
	}
	require.Equal(t, "true", s.text(`SELECT (sum(pg_stat_get_xact_tuples_returned(indexrelid)) < 5000)::text FROM pg_index
		WHERE indrelid = 'dlq.dead_letter_open'::regclass AND indexrelid <> 'dlq.dead_letter_open_pkey'::regclass`))
	require.Equal(t, "10", s.text("SELECT count(*)::text FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
}

// The trigger dead_letter_move skips redeliveries that dlqd makes with one statement, because dlq.on_moves writes their
// audit rows. Any other UPDATE that looks like a redelivery must leave an audit row, too, for every role.
func TestMoves_NoUpdateHidesRedelivery(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	owner := ownerSession(t, pool)
	id := owner.text("SELECT min(id::text) FROM dlq.dead_letter_open")
	// redeliver moves the entry as dlq.redeliver_now does, and returns the audit row.
	redeliver := func(s *session, table, more string) string {
		owner.can("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual' WHERE id = '" + id + "'")
		before := owner.text("SELECT count(*)::text FROM dlq.dead_letter_transitions")
		_, err := s.conn.Exec(t.Context(), "UPDATE dlq."+table+` SET status = 'dlq_processing', redelivery_job_id = 1,
			next_retry_at = NULL, waiting_for = NULL, parked_by = NULL, updated_at = now()`+more+" WHERE id = '"+id+"'")
		require.NoError(t, err)
		return owner.text(`SELECT string_agg(concat_ws(' ', t.actor, t.from_status, t.to_status), ', ')
			FROM (SELECT * FROM dlq.dead_letter_transitions ORDER BY at, id OFFSET ` + before + ") t")
	}
	const set = `SET dlq.moves = '{"actor": "kim"}'`
	wrong := func(s *session, table string) {
		owner.can("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual' WHERE id = '" + id + "'")
		const processing = "status = 'dlq_processing', redelivery_job_id = 1, parked_by = NULL, "
		for _, change := range []string{
			"status = 'dlq_failed'", processing + "river_job_id = -1", processing + "id = gen_random_uuid()",
		} {
			_, err := s.conn.Exec(t.Context(), "UPDATE dlq."+table+" SET updated_at = now(), "+change+" WHERE id = '"+id+"'")
			require.ErrorContains(t, err, "DLQ01", change)
		}
	}
	me := owner.text("SELECT session_user")
	for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
		require.Equal(t, me+" dlq_manual dlq_processing", redeliver(owner, table, ""))
		require.Equal(t, "kim dlq_manual dlq_processing",
			redeliver(owner, table, `, move = '{"actor": "kim"}'`))
		owner.can(set)
		require.Equal(t, "kim dlq_manual dlq_processing", redeliver(owner, table, ""))
		wrong(owner, table)
		owner.can("RESET dlq.moves")
	}
	// The trigger does not skip an UPDATE whose columns do not match the new status. It corrects these columns.
	owner.can(set)
	owner.can("UPDATE dlq.dead_letter_open SET status = 'dlq_pending', next_retry_at = now() WHERE id = '" + id + "'")
	owner.can(`UPDATE dlq.dead_letter_open SET status = 'dlq_processing', redelivery_job_id = 1, waiting_for = 'x',
		parked_by = 'x', updated_at = now() WHERE id = '` + id + "'")
	require.Empty(t, owner.text(`SELECT concat(next_retry_at, waiting_for, parked_by, closed_at, move)
		FROM dlq.dead_letter_open WHERE id = '`+id+"'"))
	owner.can("RESET dlq.moves")

	// Row level security hides all entries from statements of other roles, unless a role has BYPASSRLS.
	admin, err := pgx.Connect(t.Context(), postgrestest.Superuser(t, url))
	require.NoError(t, err)
	t.Cleanup(func() { _ = admin.Close(context.WithoutCancel(t.Context())) })
	for _, privilege := range []string{"SELECT, UPDATE", "ALL"} {
		asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
			s := &session{T: t, conn: conn}
			name := s.text("SELECT session_user")
			for _, sql := range []string{
				"ALTER ROLE " + name + " BYPASSRLS",
				"GRANT " + privilege + " ON dlq.dead_letter_queue, dlq.dead_letter_open TO " + name,
			} {
				_, err := admin.Exec(t.Context(), sql)
				require.NoError(t, err, sql)
			}
			s.can(set)
			for _, table := range []string{"dead_letter_queue", "dead_letter_open"} {
				require.Equal(t, name+" dlq_manual dlq_processing", redeliver(s, table, ""), privilege)
				wrong(s, table)
			}
			_, err := admin.Exec(t.Context(), "DROP OWNED BY "+name)
			require.NoError(t, err)
		})
	}
}

// A trigger of the application on river_job may reset settings. A redelivery then still has its audit row, or fails.
func TestMoves_ResetByTriggerHidesNone(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	owner := ownerSession(t, pool)
	owner.can(`CREATE FUNCTION reset_all() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM set_config('dlq.moves', '', false); RETURN NEW; END $$`)
	const redeliver = `SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 1), 'kim',
		'the reason')`
	owner.can("CREATE TRIGGER reset_all AFTER INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION reset_all()")
	_, err := pool.Exec(t.Context(), redeliver)
	require.ErrorContains(t, err, "a trigger has reset dlq.moves")
	owner.can("DROP TRIGGER reset_all ON river_job")
	owner.can("CREATE TRIGGER reset_all BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION reset_all()")
	owner.can(redeliver)
	require.Equal(t, "1", owner.text(`SELECT count(*)::text FROM dlq.dead_letter_transitions
		WHERE to_status = 'dlq_processing' AND actor = 'kim' AND reason = 'the reason'`))
}

// A manual UPDATE moved entries to dlq_processing without a job, or with a job of another entry. The sweep returns
// these entries to pending.
func TestSweep_ReturnsEntriesMovedWithoutJob(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	_, err := pool.Exec(t.Context(), `WITH n AS (SELECT id, row_number() OVER (ORDER BY id) AS n FROM dlq.dead_letter_open)
		UPDATE dlq.dead_letter_queue e SET status = 'dlq_processing', redelivery_job_id = CASE WHEN n.n = 1 THEN 999999
			WHEN n.n = 2 THEN (SELECT min(id) FROM river_job) ELSE e.river_job_id END
		FROM n WHERE n.id = e.id AND n.n <= 3`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE dlq.dead_letter_queue SET status = 'dlq_processing'
		WHERE status = 'dlq_manual'`)
	require.ErrorContains(t, err, "columns_follow_status", "dlq_processing requires a job")
	sweep, err := store.SweepRedeliveries(t.Context(), uuid.Nil)
	require.NoError(t, err)
	require.EqualValues(t, 3, sweep.Requeued)
	s := ownerSession(t, pool)
	require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_open WHERE status = 'dlq_pending'"))
	require.Equal(t, "3", s.text(`SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE actor = 'sweep'
		AND reason LIKE 'job % is gone'`))
	require.Equal(t, "3", s.text(`SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing'
		AND origin IS NOT NULL`), "the audit trail has the origin of the moves")
}

// A dlq_admin can drop only a month that retention would drop: one that has expired and is archived.
func TestRoles_AdminDropsOnlyExpiredPartitions(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	now := time.Now().UTC().Format("200601")
	for _, parent := range []string{"transitions", "resolved"} {
		exec("SELECT dlq.ensure_partition('dlq.dead_letter_" + parent + "', '2020-01-01Z')")
	}
	exec("SELECT dlq.act_on('resolve', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'owner')")
	admin := asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		refused := func(sql, want string) {
			t.Helper()
			_, err := conn.Exec(t.Context(), sql)
			require.ErrorContains(t, err, want, sql)
		}
		s := &session{T: t, conn: conn}
		for _, month := range []string{
			"dead_letter_transitions_" + now, "dead_letter_resolved_" + now,
			"dead_letter_transitions_202001",
		} {
			// dlqd has not published the retention yet
			refused("SELECT dlq.drop_partition('"+month+"')", "its retention has not expired")
		}
		exec(`INSERT INTO dlq.settings (key, value)
			VALUES ('retention', '{"periods": {"defaults": {"resolved": "30 days", "failed": "90 days", "archived": "365 days"}}, "audit": "1100 days"}')`)
		for _, month := range []string{"dead_letter_transitions_" + now, "dead_letter_resolved_" + now} {
			refused("SELECT dlq.drop_partition('"+month+"')", "its retention has not expired")
			refused("SELECT dlq.drop_partition('"+month+"', 0, 0)", "its retention has not expired")
		}
		refused("SELECT dlq.drop_partition('dead_letter_transitions_202001')", "it has not been archived")
		refused("SELECT dlq.drop_partition('dead_letter_resolved_202001', 0, 0)", "it has not been archived")
		s.cannot("SELECT dlq.note_archived('dead_letter_resolved_202001', 0, 0, 'nowhere')")
		exec("SELECT dlq.note_archived('dead_letter_resolved_202001', 1, 0, 'file:///archive')")
		refused("SELECT dlq.drop_partition('dead_letter_resolved_202001', 0, 0)", "has changed since it was archived")
		exec("SELECT dlq.note_archived('dead_letter_resolved_202001', 0, 0, 'file:///archive')")
		s.can("SELECT dlq.drop_partition('dead_letter_resolved_202001', p_note => 'disk full')")
		s.can(`SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue ORDER BY id LIMIT 1),
			p_note => 'request 1')`)
		require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_queue"))
	})
	s := ownerSession(t, pool)
	require.Equal(t, "1", s.text("SELECT count(*)::text FROM dlq.acts WHERE subject = 'partition "+
		"dead_letter_resolved_202001' AND act = 'dropped' AND note = 'disk full' AND db_user = '"+admin+
		"' AND detail = '{\"rows\": 0, \"archive\": \"file:///archive\"}'"))
	require.Equal(t, "1", s.text("SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE reason = 'deleted' AND "+
		"note = 'request 1' AND actor = '"+admin+"'"))
}

// Every action of an operator leaves an audit row with the actor, the database user, the origin and the version of the
// policy.
func TestAudit_RecordsActionsOtherThanMoves(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	_, err := pool.Exec(t.Context(), "INSERT INTO dlq.settings (key, value) VALUES ('policy_version', 'v7')")
	require.NoError(t, err)
	operator := asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		s.can("SET dlq.origin = 'API, from 10.0.0.7'")
		s.can("SET application_name = 'API, from 10.0.0.8'")
		run := s.text(`SELECT dlq.replay_start('{"queue": "q"}', p_note => 'mended', p_force => true)::text`)
		for _, sql := range []string{
			"SELECT dlq.replay_set_rate('" + run + "', 5)", "SELECT dlq.replay_pause('" + run + "')",
			"SELECT dlq.replay_resume('" + run + "')", "SELECT dlq.replay_cancel('" + run + "')",
			"SELECT dlq.open_breaker('destination:bank', p_reason => 'as requested', p_for => '1 hour')",
			"SELECT dlq.reset_breaker('destination:bank')",
			"SELECT dlq.stop_automatic(p_note => 'storm')", "SELECT dlq.resume_automatic()",
			"SELECT dlq.set_automatic('queue', 'q', true)",
			`SELECT dlq.replay(id, p_note => 'edited', p_payload => '{"card": "4711"}') FROM dlq.find('{}', 1)`,
		} {
			s.can(sql)
		}
		found := func(filter string) string {
			return s.text("SELECT string_agg(reason, '; ' ORDER BY at, id) FROM dlq.audit('" + filter + "')")
		}
		require.Equal(t, fmt.Sprintf("replay run %[1]s: started; replay run %[1]s: rate changed; replay run %[1]s: paused; "+
			"replay run %[1]s: resumed; replay run %[1]s: cancelled; "+
			"circuit breaker destination:bank: opened; circuit breaker destination:bank: reset; automatic redelivery: stop: "+
			"stopped; automatic redelivery: stop: switch taken away; automatic redelivery: queue q: switched on; edited and "+
			"replayed", run),
			found(`{"configVersion": "v7"}`))
		require.Equal(t, "circuit breaker destination:bank: opened", found(`{"text": "as requested"}`))
		require.Equal(t, `{"rate": 5}`, s.text(`SELECT detail::text FROM dlq.audit('{"text": "rate changed"}')`))
		require.JSONEq(t, `{"payload": {"card": "4711"}}`, s.text(`SELECT detail::text
			FROM dlq.audit('{"text": "edited and replayed"}')`), "dlq.audit returns the edit")
		require.Equal(t, "edited and replayed", found(`{"queue": "q", "configVersion": "v7"}`))
		require.Equal(t, "(null)", found(`{"origin": "10.0.0.7"}`), "an operator cannot set the origin")
		require.Equal(t, "11", s.text(`SELECT count(*)::text FROM dlq.audit('{"configVersion": "v7"}')
			WHERE origin = 'SQL, from a local socket (API, from 10.0.0.8)' AND db_user = session_user`))
		require.Equal(t, "7", s.text(`SELECT count(*)::text
			FROM (SELECT at, id FROM dlq.audit('{"configVersion": "v7", "people": true}', 4) ORDER BY at, id LIMIT 1) f,
			dlq.audit('{"configVersion": "v7", "people": true}', 100, f.at, f.id)`), "the next page")
	})
	asRole(t, url, "dlq_reader", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		require.Equal(t, "(null)", s.text(`SELECT detail::text FROM dlq.audit('{"text": "edited and replayed"}')`))
		require.Equal(t, "11", s.text(`SELECT count(*)::text FROM dlq.audit('{"dbUser": "`+operator+`"}')`))
	})
}

// Parameters that a dlq_admin passes to a SECURITY DEFINER function are only values. Postgres executes no part of them
// as SQL.
func TestRoles_ParametersAreNotExecuted(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	require.Equal(t, "0", s.text("SELECT count(*)::text FROM pg_proc p WHERE p.pronamespace = 'dlq'::regnamespace AND "+
		"p.prosecdef AND NOT coalesce(p.proconfig, '{}') @> '{\"search_path=pg_catalog, pg_temp\"}'"))
	acts := s.text("SELECT count(*)::text FROM dlq.acts")
	rows, err := pool.Query(t.Context(), `SELECT p.oid::regprocedure::text, p.proname, ARRAY(SELECT format_type(a, NULL)
		FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY u (a, n) ORDER BY n)
		FROM pg_proc p WHERE p.pronamespace = 'dlq'::regnamespace AND p.prosecdef AND p.prokind = 'f'
			AND p.prorettype <> 'trigger'::regtype AND has_function_privilege('dlq_admin', p.oid, 'EXECUTE')`)
	require.NoError(t, err)
	type function struct {
		Signature, Name string
		Types           []string
	}
	functions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	require.Greater(t, len(functions), 30)
	const statement = "CREATE TABLE dlq.injected ()"
	value := func(of, text string, n int) string {
		quoted := "'" + strings.ReplaceAll(text, "'", "''") + "'"
		switch of {
		case "text":
			return quoted
		case "text[]":
			return "ARRAY[" + quoted + "]"
		case "jsonb": // valid as a filter, rows, arguments and periods
			return fmt.Sprintf(`jsonb_build_object('queue', %[1]s, 'payload', jsonb_build_object(%[1]s, %[1]s), 'tags', jsonb_build_array(%[1]s), 'defaults', jsonb_build_object('failed', %[1]s))`, quoted)
		case "regclass":
			return "'scratch.\"" + strings.ReplaceAll(strings.ReplaceAll(text, `"`, `""`), "'", "''") + "\"'"
		case "uuid", "uuid[]", "bigint[]":
			return "NULL"
		case "timestamp with time zone":
			return fmt.Sprintf("'2031-%02d-01Z'", n+1)
		case "interval":
			return "'1 day'"
		case "boolean":
			return "true"
		default:
			return "'1'"
		}
	}
	admin, err := pgx.Connect(t.Context(), postgrestest.Superuser(t, url))
	require.NoError(t, err)
	defer func() { _ = admin.Close(context.WithoutCancel(t.Context())) }()
	_, err = admin.Exec(t.Context(), "CREATE SCHEMA scratch; GRANT ALL ON SCHEMA scratch TO dlq_admin")
	require.NoError(t, err)
	asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		for i, text := range []string{
			"id, at)); " + statement + "; SELECT ((1", "'; " + statement + "; --",
			"x'); " + statement + "; --", `"; ` + statement + "; --", statement, "id)); " + statement + "; --",
			"id)); " + statement + "; SELECT ((1",
		} {
			_, err := conn.Exec(t.Context(),
				fmt.Sprintf(`CREATE TABLE scratch."%s" (id uuid, at timestamptz, closed_at timestamptz)`,
					strings.ReplaceAll(text, `"`, `""`)))
			require.NoError(t, err)
			for _, f := range functions {
				// Each text parameter is hostile in turn, while the others are existing names. In the last call all are
				// hostile.
				for hostile := -1; hostile < len(f.Types); hostile++ {
					args := make([]string, len(f.Types))
					for n, of := range f.Types {
						switch {
						case hostile == -1 || n == hostile:
							args[n] = value(of, text, n)
						case of == "regclass":
							args[n] = "'dlq.dead_letter_transitions'"
						default:
							args[n] = value(of, fmt.Sprintf("zz%d", i), n)
						}
					}
					_, _ = conn.Exec(t.Context(), "SELECT dlq."+f.Name+"("+strings.Join(args, ", ")+")")
					require.Equal(t, "(null)", s.text("SELECT to_regclass('dlq.injected')::text"), "%s %v", f.Signature, args)
				}
			}
		}
		_, err = conn.Exec(t.Context(), "DROP OWNED BY CURRENT_USER")
		require.NoError(t, err)
	})
	require.GreaterOrEqual(t, s.text("SELECT lpad(count(*)::text, 9, '0') FROM dlq.acts"), fmt.Sprintf("%09s", acts))
	require.Equal(t, "0", s.text(`SELECT count(*)::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
		WHERE c.relnamespace = 'dlq'::regnamespace AND t.tgenabled <> 'O'`))
	require.Equal(t, "0", s.text(`SELECT count(*)::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
		WHERE c.relname LIKE 'zz%'`))
}

// Only dlqd's own monthly tables get partitions. A call creates one month, by the table's name.
func TestRoles_AdminCreatesOnlyMonthsOfMonthlyTables(t *testing.T) {
	t.Parallel()
	url, _ := createRoleEntries(t)
	asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		for sql, want := range map[string]string{
			"SELECT dlq.ensure_partition('dlq.acts', now())":                           "is not partitioned by month",
			"SELECT dlq.ensure_partition('dlq.dead_letter_queue', now())":              "is not partitioned by month",
			"SELECT dlq.ensure_partition(NULL, now())":                                 "is not partitioned by month",
			"SELECT dlq.ensure_partition('dlq.dead_letter_transitions', NULL)":         "cannot create a partition for",
			"SELECT dlq.ensure_partition('dlq.dead_letter_transitions', 'infinity')":   "cannot create a partition for",
			"SELECT dlq.ensure_partition('dlq.dead_letter_transitions', '9999-01-01')": "cannot create a partition for",
			"SELECT dlq.ensure_partition('dlq.dead_letter_transitions', '1969-01-01')": "cannot create a partition for",
		} {
			_, err := conn.Exec(t.Context(), sql)
			require.ErrorContains(t, err, want, sql)
			require.ErrorContains(t, err, "DLQ04", sql)
		}
		s := &session{T: t, conn: conn}
		s.can("SET timezone = 'Pacific/Kiritimati'")
		s.can("SELECT dlq.ensure_partition('dlq.dead_letter_transitions', '2020-05-31 23:59:59Z')")
		require.Equal(t, "A month of dlq.dead_letter_transitions, from 2020-05-01 00:00:00+00.",
			s.text("SELECT obj_description('dlq.dead_letter_transitions_202005'::regclass)"))
	})
}

// A caller does not choose the time of a deletion: a dlq_admin cannot call those functions of retention that have a
// parameter for the time. An erasure accepts only the filter that its record has.
func TestRoles_AdminCannotChooseDeletionTime(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		a := &session{T: t, conn: conn}
		for _, sql := range []string{
			"SELECT dlq.forget_old(1000000, '2100-01-01')", "SELECT dlq.trim_rollups('2100-01-01')",
			`SELECT dlq.age_out('{"defaults": {"failed": "0"}}', 1000, '2100-01-01')`,
			`SELECT dlq.drop_empty_month('{"defaults": {"failed": "0"}}', '2100-01-01')`,
			`SELECT dlq.expired_entries('{"defaults": {"resolved": "0"}}', 1000, '2100-01-01')`,
		} {
			a.cannot(sql)
		}
		id := a.text(`SELECT dlq.erase_begin('{"tags": ["cus_81"]}', 'request 1')::text`)
		_, err := conn.Exec(t.Context(), "SELECT dlq.erase_step($1, '{}')", id)
		require.ErrorContains(t, err, "another filter")
		a.can(`SELECT dlq.erase_step('` + id + `', '{"tags": ["cus_81"]}')`)
	})
	require.Equal(t, "4", s.text("SELECT count(*)::text FROM dlq.dead_letter_queue WHERE original_event <> "+
		"'{\"erased\": true}'"))

	// A dlq_admin cannot declare an entry archived, because only dlqd knows whether the entry is archived. Opening a
	// breaker leaves an audit row.
	entry := s.text("SELECT min(id::text) FROM dlq.dead_letter_queue")
	s.can("SELECT dlq.resolve('" + entry + "', 'owner')")
	s.can(`INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, queue, kind, detail)
		VALUES ('` + entry + `', 'dlq_manual', 'dlq_manual', 'owner', 'q', 'k', '{"payload": {"card": "4711"}}')`)
	hash := s.text("SELECT hashtextextended(e::text, 0)::text FROM dlq.dead_letter_queue e WHERE id = '" + entry + "'")
	asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		a := &session{T: t, conn: conn}
		require.Equal(t, "1", a.text("SELECT dlq.delete_entries(ARRAY['"+entry+"'::uuid], ARRAY["+hash+"])::text"))
		a.can("SELECT dlq.open_breaker('destination:bank', p_forced => false)")
		require.Equal(t, "1", a.text("SELECT count(*)::text FROM dlq.audit('{\"dbUser\": \""+conn.Config().User+
			"\", \"text\": \"destination:bank: opened\"}')"))
	})
	require.Equal(t, "0", s.text(
		"SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE detail::text LIKE '%4711%'"))
}

// The audit trail lists the latest action first. It cannot order rows by id: each session takes 32 ids at once from the
// sequence (CACHE 32).
func TestAudit_ListsLatestFirst(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	early, late := ownerSession(t, pool), ownerSession(t, pool)
	early.can("SELECT dlq.open_breaker('destination:a')")
	for range 5 {
		late.can("SELECT dlq.act_where('note', '{\"queue\": \"q\"}', p_note => 'x')")
	}
	early.can("SELECT dlq.reset_breaker('destination:a')")
	early.can("SELECT dlq.note(id, 'the last') FROM dlq.find('{}', 1)")
	require.Equal(t, "noted: the last; circuit breaker destination:a: reset: reset by an operator",
		early.text(`SELECT string_agg(reason || ': ' || note, '; ' ORDER BY n)
			FROM dlq.audit('{}', 2) WITH ORDINALITY a (id, at, actor, db_user, origin, entry_id, from_status, to_status, reason,
				note, queue, kind, error_class, river_job_id, config_version, detail, n)`))
	// For the switch of capture, too, the latest change counts.
	early.can("SELECT dlq.set_capture('strict', p_actor => 'a')")
	late.can("SELECT dlq.set_capture('off', p_actor => 'b')")
	early.can("SELECT dlq.set_capture('on', p_actor => 'c')")
	require.Equal(t, "c", early.text("SELECT changed_by FROM dlq.capture_status()"))
	// The pages together contain each row once, in order.
	all := early.text("SELECT string_agg(id::text, ' ' ORDER BY at DESC, id DESC) FROM dlq.audit('{}', 1000)")
	require.Equal(t, all, early.text(`WITH RECURSIVE page AS (
			SELECT 1 AS n, p.ids, p.at, p.id FROM (SELECT array_agg(a.id ORDER BY a.at DESC, a.id DESC) AS ids, min(a.at) AS at,
				(array_agg(a.id ORDER BY a.at, a.id))[1] AS id FROM dlq.audit('{}', 3) a) p
			UNION ALL
			SELECT page.n + 1, p.ids, p.at, p.id FROM page CROSS
			JOIN LATERAL (SELECT array_agg(a.id ORDER BY a.at DESC, a.id DESC) AS ids, min(a.at) AS at,
				(array_agg(a.id ORDER BY a.at, a.id))[1] AS id FROM dlq.audit('{}', 3, page.at, page.id) a) p
			WHERE p.id IS NOT NULL)
		SELECT string_agg(i.id::text, ' ' ORDER BY page.n, i.o) FROM page CROSS
		JOIN LATERAL unnest(page.ids) WITH ORDINALITY i (id, o)`))
}
