package deadletter_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// dlq.run_again runs a job again once for each reason (note). With another reason, it copies only the last copy of the
// job. A copy does not get the metadata that River wrote to the first job.
func TestRunAgain_CopiesEachJobOnceForEachReason(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	again := func(note string) string {
		t.Helper()
		return s.text("SELECT dlq.run_again(now() - interval '1 hour', '" + note + "', 'r')::text")
	}
	complete := func() {
		exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE queue = 'r' AND state = 'available'")
	}
	exec(`INSERT INTO river_job (kind, args, queue, max_attempts, metadata) SELECT 'k', jsonb_build_object('n', n), 'r', 1,
		'{"tenant": "acme", "cancel_attempted_at": "2026-01-01T00:00:00Z", "output": 7, "snoozes": 2, "river:log": []}'
			FROM generate_series(1, 2) n`)
	complete()
	require.Equal(t, "2", again("first incident"))
	require.Equal(t, "0", again("first incident"))
	require.Equal(t, "0", again("second incident"), "the copies are in progress")
	require.JSONEq(t, `{"tenant": "acme", "dlq:run_again": "first incident"}`,
		s.text("SELECT metadata::text FROM river_job WHERE queue = 'r' AND state = 'available' LIMIT 1"))

	complete()
	require.Equal(t, "0", again("first incident"))
	require.Equal(t, "2", again("second incident"), "each copy once, and not its first job as well")
	require.Equal(t, "0", again("second incident"))
	require.Equal(t, "6", s.text("SELECT count(*)::text FROM river_job WHERE queue = 'r'"))

	// The copy is cancelled by its worker. That is a failure, although the metadata of the first job has a request for
	// cancellation.
	exec(`UPDATE river_job SET state = 'running', attempted_at = now(), attempt = 1 WHERE queue = 'r'
		AND state = 'available'`)
	exec(`UPDATE river_job SET state = 'cancelled', finalized_at = now(),
		errors = ARRAY['{"error": "JobCancelError: no such account"}'::jsonb] WHERE queue = 'r' AND state = 'running'`)
	require.Equal(t, "2", s.text("SELECT count(*)::text FROM dlq.dead_letter_queue WHERE queue = 'r'"))
}

// The runbooks for a restored backup and for a burst of failures park all pending entries, however many there are.
// They neither resolve nor redeliver entries that were parked before.
func TestRunbooks_ParkAndReturnTheSameEntries(t *testing.T) {
	t.Parallel()
	for file, entries := range map[string]struct{ kind, args, waits string }{
		"restored-from-backup": {
			"payment.captured", `jsonb_build_object('paymentId', 'pay_' || n % 2)`,
			`'{"paymentId": "pay_1"}'`,
		},
		"dlq-grows-fast": {"order.placed", `'{}'`, `'{}'`},
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			url, pool := createRoleEntries(t)
			s := ownerSession(t, pool)
			fail := func(n, args string) {
				t.Helper()
				s.can("INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT '" + entries.kind + "', " + args +
					", 'p', 1, 'running' FROM generate_series(1, " + n + ") n")
				s.can(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
					errors = ARRAY['{"error": "it failed", "attempt": 1}'::jsonb],
					metadata = '{"dlq:error": {"attempt": 1, "type": "PRICE_MISSING", "class": "transient", "message": "it failed"}}'
						WHERE state = 'running'`)
				s.can("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'))")
			}
			fail("1", entries.waits)
			s.can("UPDATE dlq.dead_letter_queue SET error_type = 'PRICE_MISSING' WHERE queue = 'p'")
			s.can("SELECT dlq.act_where('park', '{\"queue\": \"p\"}', 'kim', 'may have been booked: look before it is sent " +
				"again')")
			fail("1500", entries.args)
			s.can("UPDATE dlq.dead_letter_queue SET error_type = 'PRICE_MISSING' WHERE queue = 'p'")
			text, err := os.ReadFile("../../runbooks/" + file + ".md")
			require.NoError(t, err)
			acts := regexp.MustCompile(`SELECT \* FROM dlq\.act_where.*;`).FindAllString(string(text), -1)
			require.Greater(t, len(acts), 1)
			asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
				o := &session{T: t, conn: conn}
				o.can(acts[0])
				require.Equal(t, "0", s.text(`SELECT count(*)::text FROM dlq.dead_letter_queue WHERE queue = 'p'
					AND status = 'dlq_pending'`), "no entry is redelivered automatically")
				for _, act := range acts[1:] {
					o.can(act)
				}
			})
			require.Equal(t, "may have been booked: look before it is sent again",
				s.text("SELECT string_agg(notes, '; ') FROM dlq.dead_letter_queue WHERE queue = 'p' AND status = 'dlq_manual'"))
		})
	}
}
