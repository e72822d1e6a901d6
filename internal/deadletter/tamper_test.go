package deadletter_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

func owner(t *testing.T, pool *pgxpool.Pool) *session {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return &session{T: t, conn: conn.Conn()}
}

// The owner of the schema, as whom dlqd works, gets past neither the state table nor the audit trail by a plain statement, whichever
// table it names.
func TestOwner_cannotForge(t *testing.T) {
	t.Parallel()
	_, pool := roleEntries(t)
	exec := func(sql string) error {
		_, err := pool.Exec(t.Context(), sql)
		return err
	}
	require.NoError(t, exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = river_job_id, move = '{"actor": "worker:1"}'`))
	require.NoError(t, exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_failed'"))
	require.NoError(t, exec("CALL dlq.ensure_partitions(4)"))
	now, later := time.Now().UTC().Format("200601"), time.Now().UTC().AddDate(0, 3, 3-time.Now().UTC().Day()).Format("200601")
	forged := func(table, status string) string {
		return fmt.Sprintf(`INSERT INTO dlq.%s (id, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event, status, stage, closed_at, first_failed_at, last_failed_at, move)
			VALUES (gen_random_uuid(), 1, now(), 'q', 'k', 'k', 1, '{}', 'dlq_%s', '%[2]s', now(), now(), now(), '{"moved": true}')`, table, status)
	}
	refused := map[string]string{}
	for _, status := range []string{"resolved", "failed", "archived"} {
		for _, table := range []string{"dead_letter_queue", "dead_letter_" + status, "dead_letter_" + status + "_" + now} {
			refused[forged(table, status)] = "an entry is closed by a move, and not inserted"
		}
		for _, table := range []string{"", "_default", "_" + now, "_" + later} {
			refused["TRUNCATE dlq.dead_letter_"+status+table] = "it would lose entries without a trace"
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
	refused["DELETE FROM dlq.acts"] = "the audit trail is append-only"
	refused["UPDATE dlq.acts SET actor = 'x'"] = "the audit trail is append-only"
	refused["TRUNCATE dlq.acts"] = "the audit trail is append-only"
	for sql, want := range refused {
		require.ErrorContains(t, exec(sql), want, sql)
	}
	require.Equal(t, "4", owner(t, pool).text("SELECT count(*)::text FROM dlq.dead_letter_queue WHERE status = 'dlq_failed'"))
}

// An entry that somebody moved to dlq_processing by hand has no job, or one that is another's: the sweep sends it back.
func TestSweep_ofAnEntryMovedByHand(t *testing.T) {
	t.Parallel()
	_, pool := roleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	_, err := pool.Exec(t.Context(), `WITH n AS (SELECT id, row_number() OVER (ORDER BY id) AS n FROM dlq.dead_letter_open)
		UPDATE dlq.dead_letter_queue e SET status = 'dlq_processing', redelivery_job_id = CASE WHEN n.n = 1 THEN 999999 WHEN n.n = 2 THEN (SELECT min(id) FROM river_job) ELSE e.river_job_id END
		FROM n WHERE n.id = e.id AND n.n <= 3`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "UPDATE dlq.dead_letter_queue SET status = 'dlq_processing' WHERE status = 'dlq_manual'")
	require.ErrorContains(t, err, "columns_follow_status", "without any job")
	sweep, err := store.SweepRedeliveries(t.Context(), uuid.Nil)
	require.NoError(t, err)
	require.EqualValues(t, 3, sweep.Requeued)
	s := owner(t, pool)
	require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_open WHERE status = 'dlq_pending'"))
	require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE actor = 'sweep' AND reason LIKE 'job % is gone'"))
	require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing' AND origin IS NOT NULL"), "who moved them is in the trail")
}

// A dlq_admin drops what retention would, and nothing else: a month whose time is over, and that is in the archive.
func TestRoles_adminAndPartitions(t *testing.T) {
	t.Parallel()
	url, pool := roleEntries(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	now := time.Now().UTC().Format("200601")
	for _, parent := range []string{"transitions", "resolved"} {
		key := map[string]string{"transitions": "id, at", "resolved": "id"}[parent]
		exec(fmt.Sprintf("SELECT dlq.ensure_partition('dlq.dead_letter_%s', 'dead_letter_%[1]s_202001', '2020-01-01Z', '2020-02-01Z', '%s')", parent, key))
	}
	exec("SELECT dlq.act_on('resolve', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'owner')")
	admin := as(t, url, "dlq_admin", func(conn *pgx.Conn) {
		refused := func(sql, want string) {
			t.Helper()
			_, err := conn.Exec(t.Context(), sql)
			require.ErrorContains(t, err, want, sql)
		}
		s := &session{T: t, conn: conn}
		for _, month := range []string{"dead_letter_transitions_" + now, "dead_letter_resolved_" + now, "dead_letter_transitions_202001"} {
			refused("SELECT dlq.drop_partition('"+month+"')", "its time is not over") // dlqd has not said what the retention is
		}
		exec(`INSERT INTO dlq.settings (key, value) VALUES ('retention', '{"periods": {"defaults": {"resolved": "30 days", "failed": "90 days", "archived": "365 days"}}, "audit": "1100 days"}')`)
		for _, month := range []string{"dead_letter_transitions_" + now, "dead_letter_resolved_" + now} {
			refused("SELECT dlq.drop_partition('"+month+"')", "its time is not over")
			refused("SELECT dlq.drop_partition('"+month+"', 0, 0)", "its time is not over")
		}
		refused("SELECT dlq.drop_partition('dead_letter_transitions_202001')", "it has not been archived")
		refused("SELECT dlq.drop_partition('dead_letter_resolved_202001', 0, 0)", "it has not been archived")
		s.cannot("SELECT dlq.note_archived('dead_letter_resolved_202001', 0, 0, 'nowhere')")
		exec("SELECT dlq.note_archived('dead_letter_resolved_202001', 1, 0, 'file:///archive')")
		refused("SELECT dlq.drop_partition('dead_letter_resolved_202001', 0, 0)", "has changed since it was archived")
		exec("SELECT dlq.note_archived('dead_letter_resolved_202001', 0, 0, 'file:///archive')")
		s.can("SELECT dlq.drop_partition('dead_letter_resolved_202001', p_note => 'disk full')")
		s.can("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue ORDER BY id LIMIT 1), p_note => 'asked to')")
		require.Equal(t, "3", s.text("SELECT count(*)::text FROM dlq.dead_letter_queue"))
	})
	s := owner(t, pool)
	require.Equal(t, "1", s.text("SELECT count(*)::text FROM dlq.acts WHERE subject = 'partition dead_letter_resolved_202001' AND act = 'dropped' AND note = 'disk full' AND db_user = '"+admin+"' AND detail = '{\"rows\": 0, \"archive\": \"file:///archive\"}'"))
	require.Equal(t, "1", s.text("SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE reason = 'deleted' AND note = 'asked to' AND actor = '"+admin+"'"))
}

// Whatever a person does leaves an audit row: who, as which database user, from where, under which policy.
func TestAudit_ofWhatIsNoMove(t *testing.T) {
	t.Parallel()
	url, pool := roleEntries(t)
	_, err := pool.Exec(t.Context(), "INSERT INTO dlq.settings (key, value) VALUES ('policy_version', 'v7')")
	require.NoError(t, err)
	operator := as(t, url, "dlq_operator", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		s.can("SET dlq.origin = 'API, from 10.0.0.7'")
		s.can("SET application_name = 'API, from 10.0.0.8'")
		run := s.text(`SELECT dlq.replay_start('{"queue": "q"}', p_note => 'mended', p_force => true)::text`)
		for _, sql := range []string{
			"SELECT dlq.replay_set_rate('" + run + "', 5)", "SELECT dlq.replay_pause('" + run + "')", "SELECT dlq.replay_resume('" + run + "')", "SELECT dlq.replay_cancel('" + run + "')",
			"SELECT dlq.open_breaker('destination:bank', p_reason => 'they asked', p_for => '1 hour')", "SELECT dlq.reset_breaker('destination:bank')",
			"SELECT dlq.stop_automatic(p_note => 'storm')", "SELECT dlq.resume_automatic()", "SELECT dlq.set_automatic('queue', 'q', true)",
			`SELECT dlq.replay(id, p_note => 'edited', p_payload => '{"card": "4711"}') FROM dlq.find('{}', 1)`,
		} {
			s.can(sql)
		}
		found := func(filter string) string {
			return s.text("SELECT string_agg(reason, '; ' ORDER BY id) FROM dlq.audit('" + filter + "')")
		}
		require.Equal(t, fmt.Sprintf("replay run %[1]s: started; replay run %[1]s: rate changed; replay run %[1]s: paused; replay run %[1]s: resumed; replay run %[1]s: cancelled; "+
			"circuit breaker destination:bank: opened; circuit breaker destination:bank: reset; automatic redelivery: stop: stopped; automatic redelivery: stop: switch taken away; automatic redelivery: queue q: switched on; edited and replayed", run),
			found(`{"configVersion": "v7"}`))
		require.Equal(t, "circuit breaker destination:bank: opened", found(`{"text": "they asked"}`))
		require.Equal(t, `{"rate": 5}`, s.text(`SELECT detail::text FROM dlq.audit('{"text": "rate changed"}')`))
		require.JSONEq(t, `{"payload": {"card": "4711"}}`, s.text(`SELECT detail::text FROM dlq.audit('{"text": "edited and replayed"}')`), "a search shows the edit")
		require.Equal(t, "edited and replayed", found(`{"queue": "q", "configVersion": "v7"}`))
		require.Equal(t, "(null)", found(`{"origin": "10.0.0.7"}`), "an operator does not say from where")
		require.Equal(t, "11", s.text(`SELECT count(*)::text FROM dlq.audit('{"configVersion": "v7"}') WHERE origin = 'SQL, from a local socket (API, from 10.0.0.8)' AND db_user = session_user`))
		first := s.text(`SELECT min(id)::text FROM dlq.audit('{"configVersion": "v7", "people": true}', 4)`)
		require.Equal(t, "7", s.text(`SELECT count(*)::text FROM dlq.audit('{"configVersion": "v7", "people": true}', 100, `+first+`)`), "the page after")
	})
	as(t, url, "dlq_reader", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		require.Equal(t, "(null)", s.text(`SELECT detail::text FROM dlq.audit('{"text": "edited and replayed"}')`))
		require.Equal(t, "11", s.text(`SELECT count(*)::text FROM dlq.audit('{"dbUser": "`+operator+`"}')`))
	})
}
