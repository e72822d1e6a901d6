package deadletter_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What is run again for one reason runs once, and once more for the next one: the copy, which was the last to do the work. A copy does
// not inherit what River noted about the old job.
func TestRunAgain(t *testing.T) {
	t.Parallel()
	_, pool := roleEntries(t)
	s := owner(t, pool)
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	again := func(note string) string {
		t.Helper()
		return s.text("SELECT dlq.run_again(now() - interval '1 hour', '" + note + "', 'r')::text")
	}
	complete := func() { exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE queue = 'r' AND state = 'available'") }
	exec(`INSERT INTO river_job (kind, args, queue, max_attempts, metadata) SELECT 'k', jsonb_build_object('n', n), 'r', 1,
		'{"tenant": "acme", "cancel_attempted_at": "2026-01-01T00:00:00Z", "output": 7, "snoozes": 2, "river:log": []}' FROM generate_series(1, 2) n`)
	complete()
	require.Equal(t, "2", again("first incident"))
	require.Equal(t, "0", again("first incident"))
	require.Equal(t, "0", again("second incident"), "they are under way")
	require.JSONEq(t, `{"tenant": "acme", "dlq:run_again": "first incident"}`, s.text("SELECT metadata::text FROM river_job WHERE queue = 'r' AND state = 'available' LIMIT 1"))

	complete()
	require.Equal(t, "0", again("first incident"))
	require.Equal(t, "2", again("second incident"), "each once, and not its first job besides its copy")
	require.Equal(t, "0", again("second incident"))
	require.Equal(t, "6", s.text("SELECT count(*)::text FROM river_job WHERE queue = 'r'"))

	// The worker of a copy gives up: that is a failure, although somebody had once tried to cancel the first job.
	exec(`UPDATE river_job SET state = 'running', attempted_at = now(), attempt = 1 WHERE queue = 'r' AND state = 'available'`)
	exec(`UPDATE river_job SET state = 'cancelled', finalized_at = now(), errors = ARRAY['{"error": "JobCancelError: no such account"}'::jsonb] WHERE queue = 'r' AND state = 'running'`)
	require.Equal(t, "2", s.text("SELECT count(*)::text FROM dlq.dead_letter_queue WHERE queue = 'r'"))
}
