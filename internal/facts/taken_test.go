package facts_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// While a failure that the reconciler found is being filed, another transaction adds the same failure to an entry,
// closes that entry and commits. The failure then gets no entry of its own.
func TestFile_LeavesFailureTakenWhileWaiting(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY[$1]::uuid[])", id)
	b.exec("UPDATE dlq.dead_letter_open SET dlq_max_retries = 1 WHERE id = $1", id)
	b.retry(job)
	b.startJob(job)
	b.exec("SELECT dlq.set_capture('off')")
	b.endJob(job, "discarded")
	b.exec("SELECT dlq.set_capture('on')")
	b.exec("SELECT dlq.reconcile()")
	found := b.text("SELECT id FROM dlq.dead_letter_inbox WHERE river_job_id = $1", job)

	taken, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = taken.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = taken.Exec(t.Context(), "SELECT dlq.apply_facts()")
	require.NoError(t, err)
	filed := make(chan error, 1)
	go func() {
		_, err := b.pool.Exec(t.Context(), "SELECT dlq.file(ARRAY[$1]::uuid[])", found)
		filed <- err
	}()
	b.awaitLockWaits(1)
	require.NoError(t, taken.Commit(t.Context()))
	require.NoError(t, <-filed)

	require.Equal(t, "dlq_failed", b.text("SELECT status FROM dlq.dead_letter_queue WHERE id = $1", id))
	require.Equal(t, id.String(), b.text(`SELECT string_agg(id::text, ' ') FROM dlq.dead_letter_queue
		WHERE river_job_id = $1`, job))
}
