package delivery_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFetch_PutsBackJobsOfLostFetch breaks the connection during a client's fetch. One job is running with the client's
// id although no fetch returned the job, as if the answer to a fetch was lost. The client puts this job back and
// delivers it. Another job is being delivered, and the client does not put it back.
func TestFetch_PutsBackJobsOfLostFetch(t *testing.T) {
	t.Parallel()
	l := setupLate(t, "")
	l.run(0)
	l.submit("")
	require.Equal(t, "1", <-l.arrived)
	_, err := l.pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, metadata, state, attempt,
			attempted_at, attempted_by)
		SELECT kind, args || '{"messageId": "msg-2"}', queue, max_attempts, metadata, state, attempt, attempted_at, attempted_by
		FROM river_job`)
	require.NoError(t, err)

	tx, err := l.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return l.count(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%JobGetAvailable%'`) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	select {
	case attempt := <-l.arrived:
		require.Equal(t, "1", attempt, "the lost fetch counts as an attempt")
	case <-time.After(5 * time.Minute):
		require.Fail(t, "the job waits for River's rescuer")
	}
	require.Equal(t, 2, l.count("SELECT count(*) FROM river_job WHERE state = 'running' AND attempt = 1"))
	l.answers["1"] <- http.StatusOK
	l.answers["1"] <- http.StatusOK
	require.Eventually(t, func() bool {
		return l.count("SELECT count(*) FROM river_job WHERE state = 'completed'") == 2
	}, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, 2, l.count("SELECT sum(attempt) FROM river_job"))
}
