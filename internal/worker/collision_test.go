package worker_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
)

// An entry moves to another partition after a claim began to read and before the claim reaches it.
// SKIP LOCKED does not skip it: Postgres rejects the claim (40001), and the worker repeats it.
func TestWorker_ClaimsAgainAfterACollision(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{})
	j.failMany(2, "a", "connection refused")
	j.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	var first, second uuid.UUID
	require.NoError(t, j.pool.QueryRow(t.Context(),
		"SELECT min(id::text), max(id::text) FROM dlq.dead_letter_open").Scan(&first, &second))
	j.exec("UPDATE dlq.dead_letter_open SET priority = 2 WHERE id = $1", second)
	// The claim reads the urgent entry first, and blocks on it.
	j.exec(`CREATE OR REPLACE FUNCTION dlq.rescues(p_metadata jsonb) RETURNS integer LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN 0; END $$`)
	held, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = held.Exec(t.Context(), "SELECT pg_advisory_xact_lock(4711)")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := j.worker.RunOnce(t.Context())
		done <- err
	}()
	j.waitForLock("advisory")
	j.exec("SELECT dlq.discard($1, 'kim')", second)
	require.NoError(t, held.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE id = $1 AND strategy IS NOT NULL",
		first))
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE id = $1 AND status = 'dlq_archived'",
		second))
}

// waitForLock waits until a session of this database waits for a lock of a type.
func (b *bundle) waitForLock(locktype string) {
	b.Helper()
	require.Eventually(b, func() bool {
		return b.count("SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) "+
			"WHERE a.datname = current_database() AND NOT l.granted AND l.locktype = $1", locktype) > 0
	}, 5*time.Minute, 5*time.Millisecond)
}
