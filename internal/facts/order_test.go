package facts_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// awaitLockWaits waits until at least n sessions of this database wait for a lock.
func (b *bundle) awaitLockWaits(n int64) {
	b.Helper()
	require.Eventually(b, func() bool {
		return b.count("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "+
			"AND datname = current_database()") >= n
	}, 5*time.Minute, 5*time.Millisecond)
}

// An action locks entries in the order of their ids, as actions on a failure group do. It does so even if it gets an
// entry and a later failure of another entry's job that is still in the inbox.
func TestAct_LocksEntriesInOrderOfIDs(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]string{
		"act_on":    `SELECT dlq.act_on('assign', $1, 'kim', NULL, '{"assignee": "kim"}')`,
		"redeliver": "SELECT dlq.redeliver($1, 'kim', 'replayed')",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			_, first := b.createEntry()
			job, second := b.createEntry()
			b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
			b.exec("UPDATE dlq.dead_letter_open SET fingerprint = 'f00d'")
			b.exec(postgrestest.RefreshRollups)
			b.exec("INSERT INTO dlq.failure_groups (queue, fingerprint, failures, first_seen, last_seen, title, " +
				"error_class) SELECT queue, 'f00d', 2, now(), now(), 't', 'x' FROM dlq.dead_letter_open LIMIT 1 " +
				"ON CONFLICT DO NOTHING")
			// The job fails again in a SERIALIZABLE transaction, in which capture cannot check whether the job has an entry.
			b.exec("UPDATE river_job SET state = 'running', finalized_at = NULL WHERE id = $1", job)
			require.NoError(t, pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable},
				func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(),
						"UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = errors "+
							"|| ARRAY['{\"error\": \"boom\"}'::jsonb] WHERE id = $1", job)
					return err
				}))
			unfiled := uuid.MustParse(b.text("SELECT id FROM dlq.dead_letter_inbox WHERE river_job_id = $1", job))

			held, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = held.Rollback(t.Context()) }()
			_, err = held.Exec(t.Context(), "SELECT FROM dlq.dead_letter_open WHERE id = $1 FOR UPDATE", second)
			require.NoError(t, err)
			errs := make(chan error, 2)
			go func() {
				_, err := b.pool.Exec(t.Context(), act, []uuid.UUID{first, unfiled})
				errs <- err
			}()
			b.awaitLockWaits(1)
			go func() {
				_, err := b.pool.Exec(t.Context(),
					"SELECT dlq.assign_group((SELECT queue FROM dlq.dead_letter_open LIMIT 1), 'f00d', 'ann', 'ann')")
				errs <- err
			}()
			b.awaitLockWaits(2)
			require.NoError(t, held.Rollback(t.Context()))
			require.NoError(t, <-errs)
			require.NoError(t, <-errs)
		})
	}
}

// If an entry moves to another partition while a redelivery waits for its lock, the entry is not sent.
func TestRedeliver_SkipsEntriesMovedWhileWaiting(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, first := b.createEntry()
	_, second := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	held, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = held.Rollback(t.Context()) }()
	_, err = held.Exec(t.Context(), "SELECT dlq.discard($1, 'ann')", first)
	require.NoError(t, err)
	var sent []deadletter.Redelivery
	errs := make(chan error, 1)
	go func() {
		errs <- b.store.InTx(t.Context(), func(tx postgres.DB) (err error) {
			sent, err = b.store.Redeliver(t.Context(), tx, []uuid.UUID{first, second}, "worker:x", "due", "")
			return err
		})
	}()
	b.awaitLockWaits(1)
	require.NoError(t, held.Commit(t.Context()))
	require.NoError(t, <-errs)
	require.Len(t, sent, 1)
	require.Equal(t, second, sent[0].EntryID)
	require.Equal(t, deadletter.VerdictSent, sent[0].Verdict)
}

// While a redelivery of an entry is in progress, the original job is retried outside dlqd and fails. The audit row has
// the time of the failure, and analytics count it once.
func TestApply_RecordsTimeOfOtherFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	redelivery := b.replay(id)
	b.retry(job)
	b.apply()
	b.startJob(job)
	b.endJob(job, "discarded")
	b.apply()
	b.requireStatus(id, deadletter.Processing)
	failures := "SELECT count(*) FROM dlq.dead_letter_transitions WHERE entry_id = $1 AND failed_at IS NOT NULL " +
		"AND error_type IS NOT NULL"
	require.EqualValues(t, 1, b.count(failures+` AND reason LIKE '%which the entry does not wait for, was discarded'
		AND failed_at = (SELECT finalized_at FROM river_job WHERE id = $2)`, id, job))
	require.EqualValues(t, 2, b.count(failures, id), "including the first failure")

	// The redelivery fails. Afterwards, while no redelivery is in progress, the job runs again and fails. Each of these
	// two failures counts once, too.
	b.endJob(redelivery, "discarded")
	b.apply()
	b.requireStatus(id, deadletter.Pending)
	require.EqualValues(t, 3, b.count(failures, id))
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "discarded")
	b.apply()
	require.EqualValues(t, 4, b.count(failures, id))
	require.EqualValues(t, 4,
		b.count("SELECT count(DISTINCT failed_at) FROM dlq.dead_letter_transitions WHERE entry_id = $1", id))
}
