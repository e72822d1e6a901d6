package postgres_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An upgrade runs beside a busy application. No statement that completes its jobs fails, and none waits longer than a
// migration may lock River's tables. Failures that capture skips meanwhile are filed afterwards.
func TestAttach_UpgradesUnderLoad(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	const batch, workers = 60, 3
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	var mu sync.Mutex
	var longest time.Duration
	errs := make(chan error, workers)
	for range workers {
		go func() {
			for ctx.Err() == nil {
				start := time.Now()
				// As River's completer does: successes and failures in one statement.
				tag, err := g.app.Exec(t.Context(), `WITH j AS (SELECT id FROM river_job WHERE state = 'available'
					ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
					UPDATE river_job r SET state = (CASE WHEN r.id % 3 = 0 THEN 'discarded' ELSE 'completed' END)::river_job_state,
						finalized_at = now(),
						errors = CASE WHEN r.id % 3 = 0 THEN ARRAY['{"error": "timeout"}'::jsonb] END
					FROM j WHERE r.id = j.id`, batch)
				took := time.Since(start)
				if err == nil && tag.RowsAffected() == 0 {
					_, err = g.app.Exec(t.Context(), `INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'mail', '{}', 1,
						'available' FROM generate_series(1, 600)`)
				}
				if err != nil {
					errs <- err
					return
				}
				mu.Lock()
				longest = max(longest, took)
				mu.Unlock()
			}
			errs <- nil
		}()
	}
	for range 4 {
		execute(t, g.dlqd, `UPDATE dlq.settings SET value = 'older'
			WHERE key IN ('code_version', 'triggers', 'river_triggers')`)
		require.NoError(t, g.migrator.Attach(t.Context()))
	}
	stop()
	for range workers {
		require.NoError(t, <-errs, "the application's statements")
	}
	// The lock timeout is 0.2 s; the limit is higher for slow machines.
	require.Less(t, longest, 5*time.Second)
	t.Log("the application's longest statement took", longest)
	g.reconcile()
	failures := count(t, g.owner, "SELECT count(*) FROM river_job WHERE state = 'discarded'")
	require.NotZero(t, failures)
	require.Equal(t, failures, g.countEntries())
}

// Triggers are installed table by table. If another session locks one table, the changes to the tables before it are
// kept.
func TestMigrator_InstallsTriggersOfOtherTables(t *testing.T) {
	t.Parallel()
	g := attachedGuest(t)
	execute(t, g.dlqd, "UPDATE dlq.settings SET value = 'older' WHERE key = 'triggers'")
	execute(t, g.dlqd, "DROP POLICY in_scope ON dlq.acts")
	tx, err := g.dlqd.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.paces IN ROW EXCLUSIVE MODE")
	require.NoError(t, err)
	g.migrator.Tries = 1
	require.ErrorContains(t, g.migrator.Attach(t.Context()), "install triggers: other sessions still hold locks")
	require.Equal(t, 1, count(t, g.dlqd, `SELECT count(*) FROM pg_policy WHERE polname = 'in_scope'
		AND polrelid = 'dlq.acts'::regclass`))
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, g.migrator.Attach(t.Context()))
	require.NoError(t, g.migrator.Check(t.Context()))
}
