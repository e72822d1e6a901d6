package facts_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Values of River's unique_states: the job states in which a unique key counts.
const (
	statesDefault = "B'11110101'" // all but cancelled and discarded
	statesAll     = "B'11111111'" // the value of dlqd's messages
)

func uniqueKey(key, states string) []string {
	return []string{"unique_key", "'" + key + "'", "unique_states", states}
}

// redeliver redelivers entries as a DLQ worker does.
func (b *bundle) redeliver(ids ...uuid.UUID) (all []deadletter.Redelivery) {
	b.Helper()
	require.NoError(b, b.store.InTx(b.Context(), func(tx postgres.DB) (err error) {
		all, err = b.store.Redeliver(b.Context(), tx, ids, "worker:x", "due", "")
		return err
	}))
	return all
}

func (b *bundle) verdict(id uuid.UUID) (string, int64) {
	b.Helper()
	all := b.redeliver(id)
	require.Len(b, all, 1)
	require.Equal(b, id, all[0].EntryID)
	return all[0].Verdict, all[0].JobID
}

func (b *bundle) key(job int64) string {
	b.Helper()
	return b.text("SELECT coalesce(encode(unique_key, 'escape'), '') FROM river_job WHERE id = $1", job)
}

func TestRedeliver_ChecksOriginalJob(t *testing.T) {
	t.Parallel()
	b := setup(t)

	// The job was retried and waits: the entry follows the job.
	job, id := b.createEntry()
	b.exec("SELECT dlq.set_capture('off')") // the retry is not captured
	b.retry(job)
	b.exec("SELECT dlq.set_capture('on')")
	verdict, other := b.verdict(id)
	require.Equal(t, deadletter.VerdictFollows, verdict)
	require.Equal(t, job, other)
	b.requireStatus(id, deadletter.Processing)
	b.startJob(job)
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)

	// The job is running, so dlqd cannot write a marker to it.
	job, id = b.createEntry()
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(job)
	b.exec("SELECT dlq.set_capture('on')")
	b.startJob(job)
	got, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	require.Equal(t, job, got, "the replay returns the job that is followed")
	b.apply()
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Zero(t, b.countFacts())

	// The job has completed.
	job, id = b.createEntry()
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(job)
	b.endJob(job, "completed")
	b.exec("SELECT dlq.set_capture('on')")
	verdict, other = b.verdict(id)
	require.Equal(t, deadletter.VerdictResolved, verdict)
	require.Equal(t, job, other)
	b.requireStatus(id, deadletter.Resolved)

	// Another session has locked the job.
	job, id = b.createEntry()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id = $1 FOR UPDATE", job)
	require.NoError(t, err)
	verdict, _ = b.verdict(id)
	require.Equal(t, deadletter.VerdictBusy, verdict)
	b.requireStatus(id, deadletter.Pending)
	_, err = b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.ErrorContains(t, err, "Try again")
	require.NoError(t, tx.Rollback(t.Context()))
	verdict, _ = b.verdict(id)
	require.Equal(t, deadletter.VerdictSent, verdict)

	// River has deleted the job.
	job, id = b.createEntry()
	b.exec("DELETE FROM river_job WHERE id = $1", job)
	verdict, other = b.verdict(id)
	require.Equal(t, deadletter.VerdictSent, verdict)
	b.endJob(other, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
}

// When the entry was resolved, its job lost its unique key. Then the job is retried while an equal job is live. The
// entry follows its own job and not the equal one.
func TestRedeliver_FollowsOwnJobBeforeEqualJob(t *testing.T) {
	t.Parallel()
	for _, completes := range []bool{false, true} {
		b := setup(t)
		job, id := b.createEntry(uniqueKey("k", statesDefault)...)
		require.NoError(t, b.store.Park(t.Context(), id, kim))
		require.NoError(t, b.store.Resolve(t.Context(), id, kim))
		require.Empty(t, b.key(job))
		require.NoError(t, b.store.Reopen(t.Context(), id, kim))
		equal := b.insert(uniqueKey("k", statesDefault)...)
		b.exec("SELECT dlq.set_capture('off')")
		b.retry(job)
		if completes {
			b.startJob(job)
			b.endJob(job, "completed")
		}
		b.exec("SELECT dlq.set_capture('on')")
		verdict, other := b.verdict(id)
		require.Equal(t, job, other, "not job %d", equal)
		require.EqualValues(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue e WHERE e.id = $1
			AND (e.redelivery_job_id = $2 OR e.replay_attempts -> -1 -> 'jobId' = to_jsonb($2::bigint))`, id, job))
		if completes {
			require.Equal(t, deadletter.VerdictResolved, verdict)
		} else {
			require.Equal(t, deadletter.VerdictFollows, verdict)
		}
	}
}

func TestRedeliver_TakesUniqueKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry(uniqueKey("default", statesDefault)...)
	redelivery := b.replay(id)
	require.Equal(t, "default", b.key(redelivery), "River skips an equal insert, as it did while the original was live")
	b.endJob(redelivery, "completed")
	b.apply()
	require.Equal(t, "completed", b.state(original))
	require.Empty(t, b.key(original))

	// If the unique key counts in all states, the discarded original keeps the key.
	original, id = b.createEntry(uniqueKey("all", statesAll)...)
	redelivery = b.replay(id)
	require.Empty(t, b.key(redelivery))
	b.endJob(redelivery, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Equal(t, "completed", b.state(original))
	require.Equal(t, "all", b.key(original))

	// If River has deleted the original, the redelivery gets the key.
	original, id = b.createEntry(uniqueKey("gone", statesAll)...)
	b.exec("DELETE FROM river_job WHERE id = $1", original)
	redelivery = b.replay(id)
	require.Equal(t, "gone", b.key(redelivery))

	// A unique key without unique_states has no effect.
	_, id = b.createEntry("unique_key", "'old'")
	require.Empty(t, b.key(b.replay(id)))
}

func TestRedeliver_RejectsIfEqualJobHoldsKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry(uniqueKey("key", statesDefault)...)
	equal := b.insert(uniqueKey("key", statesDefault)...)

	verdict, other := b.verdict(id)
	require.Equal(t, deadletter.VerdictLive, verdict)
	require.Equal(t, equal, other)
	_, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.ErrorContains(t, err, fmt.Sprintf("job %d with the same unique key is live", equal))

	b.endJob(equal, "completed")
	verdict, other = b.verdict(id)
	require.Equal(t, deadletter.VerdictDone, verdict)
	require.Equal(t, equal, other)
	_, err = b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.ErrorContains(t, err, fmt.Sprintf("job %d with the same unique key has ended", equal))
	b.requireStatus(id, deadletter.Pending)

	job, err := b.store.Replay(t.Context(), id, deadletter.Replay{Force: true, Act: kim})
	require.NoError(t, err)
	require.Empty(t, b.key(job), "a forced redelivery takes no key")
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
}

// If one statement redelivers two entries with the same unique key, only one of them is sent.
func TestRedeliver_SendsOneOfEqualEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, one := b.createEntry(uniqueKey("key", statesDefault)...)
	_, two := b.createEntry(uniqueKey("key", statesDefault)...)
	all := b.redeliver(one, two)
	require.Len(t, all, 2)
	verdicts := map[string]deadletter.Redelivery{}
	for _, r := range all {
		verdicts[r.Verdict] = r
	}
	require.Equal(t, verdicts[deadletter.VerdictSent].JobID, verdicts[deadletter.VerdictLive].JobID)
	require.EqualValues(t, 1, b.count("SELECT count(*) FROM river_job WHERE state = 'available'"))
	require.EqualValues(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
}

func TestRedeliver_SendsManyAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 20 {
		b.insert()
	}
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	var ids []uuid.UUID
	rows, err := b.pool.Query(t.Context(), "SELECT id FROM dlq.dead_letter_queue")
	require.NoError(t, err)
	for rows.Next() {
		var id pgtype.UUID
		require.NoError(t, rows.Scan(&id))
		ids = append(ids, id.Bytes)
	}
	for _, r := range b.redeliver(ids...) {
		require.Equal(t, deadletter.VerdictSent, r.Verdict)
	}
	require.EqualValues(t, 20, b.count(`SELECT count(*) FROM dlq.entry_jobs m JOIN river_job j ON j.id = m.job_id
		AND j.created_at = m.job_created_at WHERE j.state = 'available'`))
	require.Empty(t, b.redeliver(ids...), "the entries are already being redelivered")
}

func TestReplay_RejectsEditWhileJobIsLive(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(job)
	_, err := b.store.Replay(t.Context(), id, deadletter.Replay{Payload: []byte(`{"amount": 3}`), Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.ErrorContains(t, err, "with its original payload")
	_, err = b.store.Replay(t.Context(), id, deadletter.Replay{Payload: []byte(`{"amount": 3}`), Force: true, Act: kim})
	require.NoError(t, err)
}

// River UI's button that retries every discarded job calls JobRetryTx of the client for each job.
func TestRetryAll_SkipsResolvedWork(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var resolved []int64
	for range 5 {
		job, id := b.createEntry()
		b.endJob(b.replay(id), "discarded")
		b.apply()
		b.endJob(b.replay(id), "completed")
		b.apply()
		b.requireStatus(id, deadletter.Resolved)
		resolved = append(resolved, job)
	}
	// There are three entries: one that an operator resolved, one that is open, and one whose redelivery failed.
	parked, id := b.createEntry()
	require.NoError(t, b.store.Park(t.Context(), id, kim))
	require.NoError(t, b.store.Resolve(t.Context(), id, kim))
	resolved = append(resolved, parked)
	open, openID := b.createEntry()
	again, againID := b.createEntry()
	b.endJob(b.replay(againID), "discarded")
	b.apply()

	discarded := []int64{}
	rows, err := b.pool.Query(t.Context(), `SELECT id FROM river_job WHERE state IN ('discarded', 'cancelled')
		ORDER BY id`)
	require.NoError(t, err)
	for rows.Next() {
		var job int64
		require.NoError(t, rows.Scan(&job))
		discarded = append(discarded, job)
	}
	require.Equal(t, []int64{open, again}, discarded, "one job for each unresolved entry")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	for _, job := range discarded {
		_, err := b.river.JobRetryTx(t.Context(), tx, job)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Commit(t.Context()))
	for _, job := range resolved {
		require.Equal(t, "completed", b.state(job))
	}
	b.apply()
	b.requireStatus(openID, deadletter.Processing)
	b.requireStatus(againID, deadletter.Processing)
}

// An application's transaction takes the unique keys of entries in another order than dlqd. If dlqd waited for that
// transaction, the two would deadlock, and Postgres might cancel the application's transaction.
func TestRedeliver_DoesNotWaitForUniqueKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const insert = "INSERT INTO river_job (args, kind, max_attempts, unique_key, unique_states) VALUES ('{}', 'x', 1, " +
		"$1::text::bytea, " + statesDefault + ")" +
		` ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND unique_states IS NOT NULL
			AND river_job_state_in_bitmask(unique_states, state) DO NOTHING`
	_, first := b.createEntry(uniqueKey("first", statesDefault)...)
	_, second := b.createEntry(uniqueKey("second", statesDefault)...)
	_, plain := b.createEntry()

	app, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = app.Rollback(t.Context()) }()
	_, err = app.Exec(t.Context(), insert, "second")
	require.NoError(t, err)
	verdicts := map[uuid.UUID]string{}
	for _, r := range b.redeliver(first, second, plain) { // must not wait for the application
		verdicts[r.EntryID] = r.Verdict
	}
	require.Equal(t, map[uuid.UUID]string{
		first: deadletter.VerdictSent, second: deadletter.VerdictBusy, plain: deadletter.VerdictSent,
	}, verdicts)
	b.requireStatus(second, deadletter.Pending)
	_, err = b.store.Replay(t.Context(), second, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.ErrorContains(t, err, "Try again")
	_, err = app.Exec(t.Context(), insert, "first") // this insert no longer waits for dlqd
	require.NoError(t, err)
	require.NoError(t, app.Rollback(t.Context()))
	verdict, _ := b.verdict(second)
	require.Equal(t, deadletter.VerdictSent, verdict)
}

// Two operators act on the same entries, of which one is open and one is failed. Both actions lock the entries in the
// same order.
func TestRedeliver_LocksInOrderOfBulkActions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, failed := b.createEntry()
	_, open := b.createEntry()
	job := b.replay(failed)
	b.exec("UPDATE dlq.dead_letter_open SET dlq_max_retries = 1 WHERE id = $1", failed)
	b.endJob(job, "discarded")
	b.apply()
	b.requireStatus(failed, deadletter.Failed)
	ids := []uuid.UUID{failed, open}

	held, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = held.Rollback(t.Context()) }()
	_, err = held.Exec(t.Context(), "SELECT FROM dlq.dead_letter_queue WHERE id = $1 FOR UPDATE", open)
	require.NoError(t, err)
	errs := make(chan error, 2)
	for i, sql := range []string{
		`SELECT dlq.act_on('tag', $1, 'kim', NULL, '{"tags": ["seen"]}')`,
		"SELECT dlq.redeliver($1, 'kim', 'replayed')",
	} {
		go func() {
			_, err := b.pool.Exec(t.Context(), sql, ids)
			errs <- err
		}()
		require.Eventually(t, func() bool {
			return b.count(`SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'
				AND datname = current_database()`) > int64(i)
		},
			time.Minute, 50*time.Millisecond)
	}
	require.NoError(t, held.Rollback(t.Context()))
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
}
