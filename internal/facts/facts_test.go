package facts_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

var kim = deadletter.Act{Actor: "kim"}

type bundle struct {
	*testing.T

	pool    *pgxpool.Pool
	store   *deadletter.Store
	applier *facts.Applier
	river   *river.Client[pgx.Tx]
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	require.NoError(t, err)
	return &bundle{T: t, pool: pool, store: store, applier: &facts.Applier{Store: store}, river: client}
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *bundle) count(sql string, args ...any) (n int64) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

func (b *bundle) text(sql string, args ...any) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&text))
	return text
}

// insert inserts a running job. more has the names and SQL values of further columns in turn.
func (b *bundle) insert(more ...string) int64 {
	b.Helper()
	columns, values := "", ""
	for i := 0; i < len(more); i += 2 {
		columns, values = columns+", "+more[i], values+", "+more[i+1]
	}
	return b.count("INSERT INTO river_job (kind, args, queue, state, attempt, max_attempts, errors" + columns +
		") VALUES ('k', '{}', 'default', 'running', 1, 1, '{}'" + values + ") RETURNING id")
}

// endJob ends a job as River's completer does.
func (b *bundle) endJob(job int64, state string) {
	b.Helper()
	b.exec(`UPDATE river_job SET state = $2::river_job_state, finalized_at = clock_timestamp(),
		errors = CASE WHEN $2 = 'completed' THEN errors
			ELSE array_append(errors, jsonb_build_object('at', now(), 'attempt', attempt, 'error', 'boom ' || id, 'trace',
				'')) END WHERE id = $1`, job, state)
}

// createEntry inserts a job that fails, and returns the job and its entry.
func (b *bundle) createEntry(more ...string) (int64, uuid.UUID) {
	b.Helper()
	job := b.insert(more...)
	b.endJob(job, "discarded")
	return job, b.entryOf(job)
}

func (b *bundle) entryOf(job int64) uuid.UUID {
	b.Helper()
	return uuid.MustParse(b.text("SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $1 ORDER BY id DESC LIMIT 1",
		job))
}

func (b *bundle) replay(entry uuid.UUID) int64 {
	b.Helper()
	job, err := b.store.Replay(b.Context(), entry, deadletter.Replay{Act: kim})
	require.NoError(b, err)
	b.exec("UPDATE river_job SET state = 'running', attempt = 1 WHERE id = $1", job)
	return job
}

// retry retries a job as River UI does.
func (b *bundle) retry(job int64) {
	b.Helper()
	_, err := b.river.JobRetry(b.Context(), job)
	require.NoError(b, err)
}

func (b *bundle) startJob(job int64) {
	b.Helper()
	b.exec("UPDATE river_job SET state = 'running', attempt = attempt + 1 WHERE id = $1 AND state = 'available'", job)
}

func (b *bundle) apply() {
	b.Helper()
	require.NoError(b, b.applier.All(b.Context()))
}

func (b *bundle) entry(id uuid.UUID) *deadletter.Entry {
	b.Helper()
	entry, _, err := b.store.Get(b.Context(), id)
	require.NoError(b, err)
	return entry
}

func (b *bundle) state(job int64) string {
	b.Helper()
	return b.text("SELECT coalesce((SELECT state::text FROM river_job WHERE id = $1), 'gone')", job)
}

// reason returns the reason of an entry's last move.
func (b *bundle) reason(id uuid.UUID) string {
	b.Helper()
	_, trail, err := b.store.Get(b.Context(), id)
	require.NoError(b, err)
	return *trail[len(trail)-1].Reason
}

// countFacts returns the number of facts that are recorded but not applied.
func (b *bundle) countFacts() int64 {
	b.Helper()
	return b.count("SELECT count(*) FROM dlq.job_facts")
}

func (b *bundle) requireStatus(id uuid.UUID, status deadletter.Status) {
	b.Helper()
	require.Equal(b, status, b.entry(id).Status)
}

func TestApply_AppliesEndsOfRedeliveries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	first := b.replay(id)
	b.endJob(first, "discarded")
	b.requireStatus(id, deadletter.Processing)
	b.apply()
	b.requireStatus(id, deadletter.Pending)
	require.Equal(t, fmt.Sprintf("boom %d", first), *b.entry(id).ErrorMessage)
	require.Equal(t, "gone", b.state(first), "River keeps one discarded job for each entry")
	require.Equal(t, "discarded", b.state(original))

	second := b.replay(id)
	b.endJob(second, "completed")
	b.apply()
	entry := b.entry(id)
	require.Equal(t, deadletter.Resolved, entry.Status)
	require.Equal(t, "kim", *entry.ResolvedBy)
	require.Equal(t, "manual_retry", *entry.ResolutionStrategy)
	var attempts []struct {
		JobID   int64  `json:"jobId"`
		Outcome string `json:"outcome"`
	}
	require.NoError(t, json.Unmarshal(entry.ReplayAttempts, &attempts))
	require.Len(t, attempts, 2)
	require.Equal(t, second, attempts[1].JobID)
	require.Equal(t, "completed", b.state(original), "River UI does not offer to retry it")
	require.Equal(t, second, b.count("SELECT (metadata ->> 'dlq:done_by')::bigint FROM river_job WHERE id = $1", original))
	require.Zero(t, b.countFacts())
}

// One statement applies the ends of many redeliveries. Each entry gets its own audit row.
func TestApply_RecordsEachEntryOfBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs := map[uuid.UUID]int64{}
	for range 3 {
		_, id := b.createEntry()
		jobs[id] = b.replay(id)
	}
	for _, job := range jobs {
		b.endJob(job, "completed")
	}
	require.Equal(t, int64(3), b.count("SELECT dlq.apply_facts()"))
	for id, job := range jobs {
		require.Equal(t, fmt.Sprintf("capture: job %d completed", job), b.text(`SELECT actor || ': ' || reason
			FROM dlq.dead_letter_transitions WHERE entry_id = $1 AND from_status = 'dlq_processing'
				AND to_status = 'dlq_resolved' AND river_job_id = $2 AND first_failed_at IS NOT NULL AND origin IS NULL`, id, job))
	}
	require.Equal(t, int64(3), b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_resolved'"))
}

func TestApply_WorksWithoutDeleteRight(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	b.exec("REVOKE DELETE ON river_job FROM " + postgrestest.Role)
	first := b.replay(id)
	b.endJob(first, "discarded")
	b.apply()
	require.Equal(t, "discarded", b.state(first))
	b.endJob(b.replay(id), "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Equal(t, "completed", b.state(first))
	require.Equal(t, "completed", b.state(original))
	require.Zero(t, b.countFacts())
}

func TestApply_ReturnsEntryOfCancelledRedelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	job, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	_, err = b.river.JobCancel(t.Context(), job)
	require.NoError(t, err)
	b.apply()
	b.requireStatus(id, deadletter.Pending)
	require.Equal(t, "redelivery was cancelled by an operator", *b.entry(id).ErrorMessage)
}

// dlqd follows a retried job that runs for long until the job ends. While the job runs, its fact does not count as one
// that waits, and applying facts assigns no transaction id.
func TestApply_FollowsLongRunningJob(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.retry(job)
	b.startJob(job)
	b.apply()
	require.Equal(t, int64(1), b.count("SELECT count(*) FROM dlq.job_facts WHERE fact = 'following'"))
	require.Zero(t, b.count("SELECT facts FROM dlq.capture_status()"))
	require.Equal(t, "false",
		b.text("SELECT (applied > 0 OR pg_current_xact_id_if_assigned() IS NOT NULL)::text FROM dlq.apply_facts() applied"))
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// If capture skipped a failure, its message keeps its place in the order of the key until the reconciler has found the
// failure.
func TestOrder_KeepsPlaceOfSkippedFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, second := b.insert(), b.insert()
	b.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at) SELECT 'default', 'a', id,
		created_at FROM river_job ORDER BY id`)
	before := func() int64 {
		t.Helper()
		return b.count(`SELECT coalesce(dlq.order_predecessor('default', 'a', id, created_at), 0) FROM river_job
			WHERE id = $1`, second)
	}
	b.exec("SELECT dlq.set_capture('off')")
	b.endJob(first, "discarded")
	require.Equal(t, first, before())
	b.exec("SELECT dlq.reconcile()")
	require.Equal(t, first, before())
	b.exec("SELECT dlq.discard(id) FROM dlq.dead_letter_queue")
	require.Zero(t, before())
}

// An operator closes an entry and reopens it in a transaction that is still open. Meanwhile another session deletes the
// places of finished work. The entry keeps its place.
func TestOrder_KeepsPlaceOfEntryBeingReopened(t *testing.T) {
	t.Parallel()
	for name, read := range map[string]string{
		"order_predecessor": "SELECT dlq.order_predecessor('default', 'a', id, created_at) FROM river_job ORDER BY id DESC LIMIT 1",
		"wake_ordered":      "SELECT dlq.wake_ordered(10)",
		"forget_ordered":    "SELECT dlq.forget_ordered()",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec(`INSERT INTO river_job (kind, args, queue, state, attempt, max_attempts) SELECT 'dlqd_message',
				'{"kind": "k", "orderingKey": "a"}', 'default', 'running', 1, 1 FROM generate_series(1, 2)`)
			first := b.count("SELECT min(id) FROM river_job")
			b.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at) SELECT 'default', 'a', id,
				created_at FROM river_job ORDER BY id`)
			b.endJob(first, "discarded")
			b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
			b.exec("SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open")
			tx, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(t.Context()) }()
			_, err = tx.Exec(t.Context(), "SELECT dlq.reopen(id, 'kim') FROM dlq.dead_letter_queue")
			require.NoError(t, err)
			b.exec(read)
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, int64(2), b.count("SELECT count(*) FROM dlq.ordered_jobs"), "the reopened entry lost its place")
			require.Equal(t, "false",
				b.text("SELECT dlq.forget_place(id, created_at)::text FROM river_job WHERE id = $1", first))
			require.Equal(t, first, b.count(`SELECT coalesce(dlq.order_predecessor('default', 'a', id, created_at), 0)
				FROM river_job WHERE id <> $1`, first))
			b.exec("SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open")
			require.Equal(t, int64(1), b.count("SELECT dlq.forget_ordered()"))
		})
	}
}

// If an application copied a marker to another job, or forged one, the marker creates and closes no entry.
func TestApply_IgnoresCopiedMarker(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	redelivery := b.replay(id)
	mark := b.text("SELECT quote_literal(metadata) FROM river_job WHERE id = $1", redelivery)
	child := b.insert("metadata", mark)
	b.endJob(child, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Processing)
	other, otherID := b.createEntry("metadata", mark)
	b.apply()
	b.requireStatus(id, deadletter.Processing)
	require.NotEqual(t, id, otherID)
	b.requireStatus(otherID, deadletter.Pending)
	b.endJob(redelivery, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	b.requireStatus(otherID, deadletter.Pending)
	require.Equal(t, "discarded", b.state(other))
}

// If River's table is restored, or its sequence restarts, ids of jobs are used again. dlqd identifies a job by its id
// and its creation time.
func TestApply_DistinguishesReusedJobIDs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	redelivery := b.replay(id)
	b.exec("DELETE FROM river_job WHERE id IN ($1, $2)", original, redelivery)
	again := b.insert("id", fmt.Sprint(original), "created_at", "now() + interval '1 second'")
	b.endJob(again, "discarded")
	require.EqualValues(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE river_job_id = $1", original))
	newJob := b.insert("id", fmt.Sprint(redelivery), "created_at", "now() + interval '1 second'", "metadata",
		fmt.Sprintf(`'{"dlq:entry_id": "%s"}'`, id))
	b.endJob(newJob, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Processing)
	_, err := b.store.SweepRedeliveries(t.Context(), uuid.Nil)
	require.NoError(t, err)
	b.requireStatus(id, deadletter.Pending)
	require.Contains(t, b.reason(id), "is gone")
	// A retry of the new job does not affect the entry of the old job.
	b.retry(again)
	b.apply()
	b.requireStatus(id, deadletter.Pending)
	b.requireStatus(b.entryOf(original), deadletter.Processing)
	// A redelivery of the old entry ignores the new job.
	b.endJob(b.replay(id), "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Equal(t, "available", b.state(again))
}

// An entry is resolved by the first of its jobs that succeeds.
func TestApply_ResolvesOnSuccessOfEarlierRedelivery(t *testing.T) {
	t.Parallel()
	for _, status := range []deadletter.Status{
		deadletter.Pending, deadletter.Manual, deadletter.Failed,
		deadletter.Processing,
	} {
		t.Run(string(status), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			original, id := b.createEntry()
			early := b.replay(id)
			// An operator returned the entry to pending.
			b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_pending', next_retry_at = now() WHERE id = $1", id)
			var late int64
			switch status { //nolint:exhaustive // closed states have their own tests
			case deadletter.Manual:
				require.NoError(t, b.store.Park(t.Context(), id, kim))
			case deadletter.Failed:
				b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE id = $1", id)
				b.endJob(b.replay(id), "discarded")
				b.apply()
			case deadletter.Processing:
				late = b.replay(id)
			}
			b.requireStatus(id, status)
			b.endJob(early, "completed")
			b.apply()
			b.requireStatus(id, deadletter.Resolved)
			require.Equal(t, fmt.Sprintf("an earlier redelivery, job %d, completed", early), b.reason(id))
			require.Equal(t, "completed", b.state(original))
			if late != 0 {
				b.endJob(late, "completed")
				b.apply()
				b.requireStatus(id, deadletter.Resolved)
				require.Equal(t, fmt.Sprintf("job %d completed, too", late), b.reason(id))
			}
			require.Zero(t, b.countFacts())
		})
	}
}

func TestResolveBy_MovesOpenAndFailedEntriesOfBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	failedJob, failed := b.createEntry()
	early := b.replay(failed)
	b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_pending', next_retry_at = now(), dlq_max_retries = 1
		WHERE id = $1`, failed)
	b.endJob(b.replay(failed), "discarded")
	b.apply()
	b.requireStatus(failed, deadletter.Failed)
	openJob, open := b.createEntry()
	job := b.replay(open)
	b.exec("UPDATE dlq.entry_jobs SET destination = 'elsewhere' WHERE job_id IN ($1, $2)", early, job)

	b.exec(`SELECT dlq.resolve_by(ARRAY[$1, $2]::uuid[], ARRAY[$3, $4]::bigint[], ARRAY[now(), now()], 'capture')`,
		failed, open, early, job)
	for id, want := range map[uuid.UUID]string{
		failed: fmt.Sprintf(`job %[1]d {"jobId": %[1]d, "outcome": "completed", "strategy": "manual", `+
			`"destination": "elsewhere"}`, early),
		open: fmt.Sprintf(`kim {"actor": "kim", "jobId": %d, "outcome": "completed", "strategy": "manual", `+
			`"destination": "elsewhere"}`, job),
	} {
		b.requireStatus(id, deadletter.Resolved)
		require.Equal(t, want, b.text(`SELECT resolved_by || ' ' || ((replay_attempts -> -1) - '{at,endedAt}'::text[])
			FROM dlq.dead_letter_queue WHERE id = $1`, id))
		require.Equal(t, int64(1), b.count(`SELECT count(*) FROM dlq.dead_letter_transitions
			WHERE entry_id = $1 AND to_status = 'dlq_resolved'`, id))
	}
	require.Equal(t, fmt.Sprintf("an earlier redelivery, job %d, completed", early), b.reason(failed))
	require.Equal(t, fmt.Sprintf("job %d completed", job), b.reason(open))
	require.Equal(t, "completed", b.state(failedJob))
	require.Equal(t, "completed", b.state(openJob))
}

func TestApply_DeletesWaitingRedeliveryAfterSuccess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	early := b.replay(id)
	b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_pending', next_retry_at = now() WHERE id = $1", id)
	waiting, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	b.endJob(early, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Equal(t, "gone", b.state(waiting))
}

func TestApply_FollowsRetriesOutsideDlqd(t *testing.T) {
	t.Parallel()
	for _, status := range []string{"unfiled", "pending", "manual", "failed"} {
		for _, end := range []string{"completed", "discarded"} {
			t.Run(status+" "+end, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				job, id := b.createEntry()
				switch status {
				case "pending":
					b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
				case "manual":
					require.NoError(t, b.store.Park(t.Context(), id, kim))
				case "failed":
					b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
					b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE id = $1", id)
					b.endJob(b.replay(id), "discarded")
					b.apply()
					b.requireStatus(id, deadletter.Failed)
				}
				b.retry(job)
				b.apply()
				entry := b.entry(id)
				require.Equal(t, deadletter.Processing, entry.Status)
				require.Equal(t, job, *entry.RedeliveryJobID)
				require.Equal(t, "river:"+postgrestest.Role, *entry.LockedBy)
				b.startJob(job)
				b.endJob(job, end)
				b.apply()
				if end == "completed" {
					b.requireStatus(id, deadletter.Resolved)
				} else {
					require.NotEqual(t, deadletter.Processing, b.entry(id).Status)
					require.Equal(t, "discarded", b.state(job), "River's lists show it for the entry")
				}
				require.EqualValues(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
				require.Zero(t, b.countFacts())
			})
		}
	}
}

// In the test, all of this happens before dlqd applies the first fact: a retry fails, and another retry succeeds.
func TestApply_AppliesFactsInOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "discarded")
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "completed") // the job has no marker: the end is found when the retry is applied
	require.EqualValues(t, 3, b.countFacts())
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.EqualValues(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.EqualValues(t, 2, b.entry(id).DLQRetryCount)
	require.Zero(t, b.countFacts())
}

// A vacuum frees space in the table, so later facts may lie before earlier ones. They are applied in the order of their
// times.
func TestApply_OrdersFactsByTimeNotPosition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	redelivery := b.replay(id)
	b.endJob(redelivery, "discarded")
	b.retry(redelivery)
	b.startJob(redelivery)
	b.endJob(redelivery, "completed")
	require.EqualValues(t, 3, b.countFacts())
	b.exec(`WITH gone AS (DELETE FROM dlq.job_facts RETURNING *) INSERT INTO dlq.job_facts SELECT * FROM gone
		ORDER BY at DESC`)
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// If dlqd wrote to a running job, a worker's REPEATABLE READ transaction could not end the job.
func TestApply_DoesNotWriteToRunningJob(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"completed", "discarded"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			job, id := b.createEntry()
			b.retry(job)
			b.startJob(job)
			tx, err := b.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), "SELECT 1 FROM river_job")
			require.NoError(t, err)
			b.apply()
			b.requireStatus(id, deadletter.Processing)
			b.apply()
			_, err = tx.Exec(t.Context(), "UPDATE river_job SET state = $2::river_job_state, finalized_at = now(), errors = "+
				"array_append(errors, '{\"error\": \"again\"}') WHERE id = $1", job, end)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
			b.apply()
			if end == "completed" {
				b.requireStatus(id, deadletter.Resolved)
			} else {
				b.requireStatus(id, deadletter.Pending)
				require.Equal(t, "again", *b.entry(id).ErrorMessage)
			}
			require.Zero(t, b.countFacts())
			require.EqualValues(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
		})
	}
}

func TestApply_ParksEntryIfRetriedJobIsGone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.retry(job)
	b.exec("DELETE FROM river_job WHERE id = $1", job)
	b.apply()
	b.requireStatus(id, deadletter.Manual)
	require.Equal(t, fmt.Sprintf("retried outside dlqd as job %d, which is gone", job), b.reason(id))
}

func TestApply_HandlesRetryOfOriginalDuringRedelivery(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"original", "redelivery"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			original, id := b.createEntry()
			redelivery := b.replay(id)
			b.retry(original)
			b.apply()
			b.requireStatus(id, deadletter.Processing)
			require.Equal(t, redelivery, *b.entry(id).RedeliveryJobID)
			if first == "redelivery" {
				b.endJob(redelivery, "completed")
				b.apply()
				b.requireStatus(id, deadletter.Resolved)
				require.Equal(t, "completed", b.state(original), "the retry had not started")
				require.Zero(t, b.countFacts())
				return
			}
			b.startJob(original)
			b.endJob(original, "completed")
			b.apply()
			b.requireStatus(id, deadletter.Resolved)
			require.Equal(t, fmt.Sprintf("the original, job %d, completed", original), b.reason(id))
			b.endJob(redelivery, "discarded")
			b.apply()
			b.requireStatus(id, deadletter.Resolved)
			require.Equal(t, "gone", b.state(redelivery))
			require.Zero(t, b.countFacts())
		})
	}
}

func TestApply_ReopensClosedEntryOnRetry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	require.NoError(t, b.store.Discard(t.Context(), id, kim))
	b.retry(job)
	b.apply()
	b.requireStatus(id, deadletter.Manual)
	require.Contains(t, b.reason(id), "done twice?")

	// Another session had locked the original job when the entry was resolved, so dlqd could not complete the job.
	held, heldID := b.createEntry()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	redelivery := b.replay(heldID)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id = $1 FOR UPDATE", held)
	require.NoError(t, err)
	b.endJob(redelivery, "completed")
	b.apply()
	b.requireStatus(heldID, deadletter.Resolved)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "discarded", b.state(held))
	b.retry(held)
	b.apply()
	b.requireStatus(heldID, deadletter.Manual)
	require.Contains(t, b.reason(heldID), "done twice?")
	require.Nil(t, b.entry(heldID).ClosedAt)
}

// An operator's decision about an entry stays, even if a retry from before the decision is applied after it.
func TestApply_OlderRetryDoesNotReopen(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.retry(job)
	require.NoError(t, b.store.Discard(t.Context(), id, kim))
	b.apply()
	b.requireStatus(id, deadletter.Archived)
	require.Equal(t, fmt.Sprintf("job %d was retried outside dlqd before the entry was discarded", job), b.reason(id))

	late, lateID := b.createEntry()
	b.retry(late)
	require.NoError(t, b.store.Expire(t.Context(), lateID, kim))
	b.apply()
	b.requireStatus(lateID, deadletter.Archived)
	require.Equal(t, fmt.Sprintf("job %d was retried outside dlqd before the entry was expired", late), b.reason(lateID))

	resolved, resolvedID := b.createEntry()
	require.NoError(t, b.store.Park(t.Context(), resolvedID, kim))
	b.retry(resolved)
	b.startJob(resolved)
	require.NoError(t, b.store.Resolve(t.Context(), resolvedID, kim))
	b.apply()
	b.requireStatus(resolvedID, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// Two failures of a job are in the inbox, and an operator closes the entry of the later one. The entry of the earlier
// failure does not get the later failure, too.
func TestApply_KeepsFailuresOfSeparateEntriesApart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, first := b.createEntry()
	b.retry(job)
	b.startJob(job)
	b.exec("SELECT dlq.set_capture('off')")
	b.endJob(job, "discarded")
	b.exec("SELECT dlq.set_capture('on')")
	b.exec("SELECT dlq.reconcile(p_whole => true)")
	second := b.entryOf(job)
	require.NotEqual(t, first, second)
	require.NoError(t, b.store.Discard(t.Context(), second, kim))
	b.apply()
	b.requireStatus(first, deadletter.Manual)
	require.Equal(t, fmt.Sprintf("job %d was discarded, which is entry %s", job, second), b.reason(first))
	b.requireStatus(second, deadletter.Archived)
	require.Zero(t, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions t WHERE t.entry_id = $1
		AND t.failed_at = (SELECT finalized_at FROM river_job WHERE id = $2)`, first, job))
	require.Zero(t, b.countFacts())
}

// A page of River UI is out of date, and an operator uses it to retry a job that has completed since. River retries
// completed jobs, too.
func TestApply_ReopensEntryIfSupersededJobRuns(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	b.endJob(b.replay(id), "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	b.retry(original)
	b.startJob(original)
	b.endJob(original, "completed") // before the retry is applied
	b.apply()
	b.requireStatus(id, deadletter.Manual)
	require.Contains(t, b.reason(id), "done twice?")
	require.Zero(t, b.countFacts())
}

// A retry commits while a redelivery of the entry succeeds. dlqd undoes the retry if the retried job has not started.
func TestApply_UndoesRetryConcurrentWithSuccess(t *testing.T) {
	t.Parallel()
	for _, runs := range []bool{false, true} {
		t.Run(fmt.Sprint(runs), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			original, id := b.createEntry()
			redelivery := b.replay(id)
			tx, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = b.river.JobRetryTx(t.Context(), tx, original)
			require.NoError(t, err)
			b.endJob(redelivery, "completed")
			b.apply()
			b.requireStatus(id, deadletter.Resolved)
			require.NoError(t, tx.Commit(t.Context()))
			if runs {
				b.startJob(original)
			}
			b.apply()
			if runs {
				b.requireStatus(id, deadletter.Manual)
				require.Contains(t, b.reason(id), "done twice?")
			} else {
				b.requireStatus(id, deadletter.Resolved)
				require.Equal(t, "completed", b.state(original))
				require.Equal(t, redelivery, b.count("SELECT (metadata ->> 'dlq:done_by')::bigint FROM river_job WHERE id = $1",
					original))
			}
			require.Zero(t, b.countFacts())
		})
	}
}

// A redelivery that waits for an entry's lock must not lock jobs meanwhile, because the application has to end them.
func TestRedeliver_HoldsNoJobsWhileWaiting(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	_, held := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY[$1, $2]::uuid[])", id, held)
	b.retry(job)
	b.startJob(job)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "SELECT dlq.note($1, 'hm')", held)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := b.pool.Exec(t.Context(), "SELECT dlq.redeliver(ARRAY[$1, $2]::uuid[], 'kim', 'replayed')", id, held)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'`) > 0
	}, 5*time.Minute, 50*time.Millisecond)
	b.exec("SELECT FROM river_job WHERE id = $1 FOR UPDATE NOWAIT", job)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-ended)
}

// A retry outside dlqd succeeds. A replay finds that success before the fact of the retry is applied. The work counts
// as done once.
func TestApply_CountsSuccessOfRetryOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "completed")
	done, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	require.Equal(t, job, done)
	b.requireStatus(id, deadletter.Resolved)
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// An operator's open transaction delays only the entries that it locks.
func TestApply_SkipsLockedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, held := b.createEntry()
	_, free := b.createEntry()
	first, second := b.replay(held), b.replay(free)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.note($1, 'hm')", held)
	require.NoError(t, err)
	b.endJob(first, "completed")
	b.endJob(second, "completed")
	b.apply()
	b.requireStatus(free, deadletter.Resolved)
	require.EqualValues(t, 1, b.countFacts())
	require.NoError(t, tx.Commit(t.Context()))
	b.apply()
	b.requireStatus(held, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// A fact that the database rejects is tried again later. It does not block other facts.
func TestApply_DefersRejectedFacts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, rejected := b.createEntry()
	_, free := b.createEntry()
	first, second := b.replay(rejected), b.replay(free)
	b.exec(`CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rejected'
		USING ERRCODE = 'APP01'; END $$`)
	b.exec(fmt.Sprintf(`CREATE TRIGGER a_rejection BEFORE UPDATE ON dlq.dead_letter_queue FOR EACH ROW
		WHEN (NEW.status = 'dlq_resolved' AND NEW.id = '%s') EXECUTE FUNCTION reject()`, rejected))
	b.endJob(first, "completed")
	b.endJob(second, "completed")
	b.apply()
	b.requireStatus(free, deadletter.Resolved)
	b.requireStatus(rejected, deadletter.Processing)
	require.Contains(t, b.text("SELECT job ->> 'refusal' FROM dlq.job_facts WHERE fact = 'refused'"), "rejected")
	b.apply()
	require.EqualValues(t, 1, b.countFacts())

	// The rejected fact is tried again.
	const later = `UPDATE dlq.job_facts SET job = job || jsonb_build_object('refusedAt', now() - interval '2 minutes')
		WHERE fact = 'refused'`
	const careful = "SELECT dlq.apply_facts(p_careful => true)"
	b.exec(careful)
	b.exec(later)
	b.exec(careful)
	require.EqualValues(t, 1, b.count(`SELECT count(*) FROM dlq.job_facts WHERE fact = 'refused'
		AND (job ->> 'refusedAt')::timestamptz > now() - interval '1 minute'`))
	b.exec("DROP TRIGGER a_rejection ON dlq.dead_letter_queue")
	b.exec(careful)
	require.EqualValues(t, 1, b.countFacts(), "the next retry is a minute later")
	b.exec(later)
	b.exec(careful)
	b.requireStatus(rejected, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// The original job runs beside a redelivery of its entry, and fails again. That failure leaves an audit row, whether it
// is filed from the inbox or applied as a fact.
func TestApply_RecordsFailureOfOriginalDuringRedelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	redelivery := b.replay(id)
	const again = `SELECT string_agg(from_status || ' ' || to_status || ' ' || reason, ', ')
		FROM dlq.dead_letter_transitions WHERE entry_id = $1 AND reason LIKE '% failed again' AND failed_at IS NOT NULL`
	// The retry was not captured, so the failure is in the inbox.
	b.exec("ALTER TABLE river_job DISABLE TRIGGER dlq_follow")
	b.retry(original)
	b.exec("ALTER TABLE river_job ENABLE TRIGGER dlq_follow")
	b.startJob(original)
	b.endJob(original, "discarded")
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	one := fmt.Sprintf("dlq_processing dlq_processing job %d failed again", original)
	require.Equal(t, one, b.text(again, id))
	// A further failure is recorded as a fact.
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, job) SELECT id, created_at, 'discarded',
		jsonb_build_object('state', state, 'attempt', 3, 'finalized_at', now(), 'errors',
			jsonb_build_array(jsonb_build_object('attempt', 3, 'error', 'at last', 'at', now())), 'metadata', metadata)
				FROM river_job WHERE id = $1`, original)
	b.apply()
	require.Equal(t, one+", "+one, b.text(again, id))
	require.Equal(t, "at last", *b.entry(id).ErrorMessage)
	require.EqualValues(t, 3,
		b.count("SELECT jsonb_array_length(retry_history) FROM dlq.dead_letter_queue WHERE id = $1", id))
	b.endJob(redelivery, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Equal(t, one+", "+one, b.text(again, id))
}

// An erasure also erases facts that are not applied yet.
func TestErase_IncludesFacts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
	b.exec("INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job) SELECT id, created_at, 'refused', "+
		"$2, jsonb_build_object('fact', 'discarded', 'refusal', 'secret', 'errors', errors, 'metadata', '{\"name\": "+
		"\"secret\"}'::jsonb) FROM river_job WHERE id = $1", original, id)
	b.exec(`CALL dlq.erase('{"kind": "k"}', 'request 1')`)
	require.JSONEq(t, `{"fact": "discarded", "errors": [], "metadata": {}}`, b.text("SELECT job::text FROM dlq.job_facts"))
}

// ApplyRun applies all facts about the jobs of a run, in as many batches as needed, and no other facts.
func TestApplyRun_AppliesAllFactsOfRun(t *testing.T) {
	t.Parallel()
	b := setup(t)
	run := uuid.MustParse("0198aaaa-0000-7000-8000-000000000001")
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact) SELECT i, now(), 'completed'
		FROM generate_series(1, 1300) i`)
	b.exec(`INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id, run_id) SELECT f.job_id, f.job_created_at,
		gen_random_uuid(), CASE WHEN f.job_id <= 1200 THEN $1::uuid END FROM dlq.job_facts f`, run)
	require.NoError(t, facts.ApplyRun(t.Context(), b.store, run))
	require.EqualValues(t, 100, b.count("SELECT count(*) FROM dlq.job_facts"))
}

// If a constraint of the application on River's table prevents dlqd from completing the original job, the entry is
// resolved nevertheless.
func TestApply_ResolvesIfOriginalCannotBeCompleted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	original, id := b.createEntry()
	_, other := b.createEntry()
	b.exec(fmt.Sprintf("ALTER TABLE river_job ADD CONSTRAINT no CHECK (NOT (id = %d AND state = 'completed'))", original))
	b.endJob(b.replay(id), "completed")
	b.endJob(b.replay(other), "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	b.requireStatus(other, deadletter.Resolved)
	require.Equal(t, "discarded", b.state(original))
	require.EqualValues(t, 1, b.count("SELECT count(*) FROM river_job WHERE state = 'discarded'"))
	require.Zero(t, b.countFacts())
}

// While an open transaction keeps vacuum from removing deleted facts, dlqd finds new facts at the end of the table.
func TestApply_FindsNewFactsUnderOldSnapshot(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	job := b.replay(id)
	old, err := b.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = old.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = old.Exec(t.Context(), "SELECT FROM dlq.job_facts")
	require.NoError(t, err)
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact) SELECT 1000000 + i, now(), 'completed'
		FROM generate_series(1, 30000) i`)
	b.exec("DELETE FROM dlq.job_facts")
	b.apply()
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
}

// Any number of processes apply facts concurrently.
func TestApply_RunsConcurrently(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const entries = 200
	for range entries {
		b.insert()
	}
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_queue), 'worker:x', 'due')")
	b.exec(`UPDATE river_job SET state = CASE WHEN id % 2 = 0 THEN 'completed' ELSE 'discarded' END::river_job_state,
		finalized_at = now() WHERE state = 'available'`)
	errs := make(chan error)
	for range 4 {
		go func() { errs <- (&facts.Applier{Store: b.applier.Store}).All(t.Context()) }()
	}
	for range 4 {
		require.NoError(t, <-errs)
	}
	b.apply()
	require.Zero(t, b.countFacts())
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_processing'"))
	require.EqualValues(t, entries, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.EqualValues(t, entries, b.count("SELECT sum(jsonb_array_length(replay_attempts)) FROM dlq.dead_letter_queue"))
}

func TestLoop_AppliesFacts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	job := b.replay(id)
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	group.Add(b.applier.Loop())
	group.Start()
	defer func() { require.NoError(t, group.Stop(context.WithoutCancel(t.Context()))) }()
	b.endJob(job, "completed")
	require.Eventually(t, func() bool { return b.entry(id).Status == deadletter.Resolved }, time.Minute,
		50*time.Millisecond)
}

// In a SERIALIZABLE transaction capture cannot check whether a job is a redelivery. It is checked when the failure is
// filed.
func TestApply_RecognizesRedeliveryFailedInSerializable(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, closed := range []bool{false, true} {
		_, id := b.createEntry()
		job := b.replay(id)
		if closed { // another job completed the work
			b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id) SELECT river_job_id, job_created_at,
				'completed', id FROM dlq.dead_letter_open WHERE id = $1`, id)
			b.exec("UPDATE river_job SET state = 'running' WHERE id = $1", job)
			b.apply()
			b.requireStatus(id, deadletter.Resolved)
		}
		before := b.count("SELECT count(*) FROM dlq.dead_letter_queue")
		tx, err := b.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now(),
			errors = ARRAY['{"attempt": 1, "error": "again"}'::jsonb] WHERE id = $1`, job)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
		b.apply()
		require.Equal(t, before, b.count("SELECT count(*) FROM dlq.dead_letter_queue"), "the failure creates no other entry")
		require.Zero(t, b.countFacts())
		if !closed {
			b.requireStatus(id, deadletter.Pending)
		} else {
			b.requireStatus(id, deadletter.Resolved)
		}
	}
}

// A lock timeout does not reject a fact: the fact stays unchanged and is tried again.
func TestApply_KeepsFactOnLockTimeout(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, id := b.createEntry()
	b.endJob(b.replay(id), "completed")
	b.exec(`CREATE FUNCTION away() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION
		USING ERRCODE = '55P03'; END $$`)
	b.exec("CREATE TRIGGER away BEFORE UPDATE ON dlq.dead_letter_open FOR EACH ROW EXECUTE FUNCTION away()")
	b.exec("SELECT dlq.apply_facts(p_careful => true)")
	require.Equal(t, "completed", b.text("SELECT string_agg(fact, ', ') FROM dlq.job_facts"))
	b.exec("DROP TRIGGER away ON dlq.dead_letter_open")
	b.apply()
	b.requireStatus(id, deadletter.Resolved)
	require.Zero(t, b.countFacts())
}

// River UI can run completed jobs again, including jobs that dlqd created or followed. dlqd records such a run and its
// failure.
func TestApply_ReopensEntryIfCompletedJobRuns(t *testing.T) {
	t.Parallel()
	for _, which := range []string{"followed original", "redelivery"} {
		for _, end := range []string{"completed", "discarded"} {
			t.Run(which+", "+end, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				job, id := b.createEntry()
				if which == "redelivery" {
					job = b.replay(id)
				} else {
					b.retry(job)
					b.apply()
				}
				b.endJob(job, "completed")
				b.apply()
				b.requireStatus(id, deadletter.Resolved)
				b.retry(job)
				b.apply()
				b.requireStatus(id, deadletter.Manual)
				require.Contains(t, b.reason(id), "done twice?")
				b.startJob(job)
				b.endJob(job, end)
				b.apply()
				b.requireStatus(id, deadletter.Manual)
				if end == "discarded" {
					require.Contains(t, b.reason(id), "failed again")
					require.Contains(t, *b.entry(id).ErrorMessage, fmt.Sprintf("boom %d", job))
				}
				require.Zero(t, b.countFacts())
			})
		}
	}
}

// A job has only one open entry at a time. A replay or a retry that would open a second one is refused with that
// reason, and leaves no fact.
func TestApply_RejectsSecondOpenEntryOfJob(t *testing.T) {
	t.Parallel()
	twin := func(b *bundle, job int64) uuid.UUID { // records a further failure that only the reconciler sees
		b.exec("ALTER TABLE river_job DISABLE TRIGGER USER")
		b.exec("UPDATE river_job SET finalized_at = clock_timestamp(), errors = errors || errors WHERE id = $1", job)
		b.exec("ALTER TABLE river_job ENABLE TRIGGER USER")
		b.exec("SELECT dlq.reconcile(p_whole => true)")
		id := b.entryOf(job)
		b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
		b.requireStatus(id, deadletter.Pending)
		return id
	}
	t.Run("retry of a closed entry's redelivery", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		job, id := b.createEntry()
		sent := b.replay(id)
		b.endJob(sent, "cancelled")
		b.apply()
		b.exec("SELECT dlq.discard($1, 'kim')", id)
		open := twin(b, job)
		require.NotEqual(t, id, open)
		b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, db_user) SELECT job_id, job_created_at,
			'retried', entry_id, 'app' FROM dlq.entry_jobs WHERE job_id = $1`, sent)
		b.apply()
		require.Zero(t, b.countFacts())
		b.requireStatus(id, deadletter.Archived)
		b.requireStatus(open, deadletter.Pending)
		require.Contains(t, b.reason(id), "has an open entry")
	})
	t.Run("replay or retry of a failed entry", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		job, id := b.createEntry()
		b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
		b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE id = $1", id)
		sent := b.replay(id)
		b.endJob(sent, "discarded")
		b.apply()
		b.requireStatus(id, deadletter.Failed)
		open := twin(b, job)
		require.NotEqual(t, id, open)
		_, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
		require.ErrorContains(t, err, "has an open entry")
		require.ErrorIs(t, err, deadletter.ErrNotAllowed)
		_, err = b.store.Replay(t.Context(), id, deadletter.Replay{Force: true, Act: kim})
		require.ErrorContains(t, err, "has an open entry")
		b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, db_user) SELECT job_id, job_created_at,
			'retried', entry_id, 'app' FROM dlq.entry_jobs WHERE job_id = $1`, sent)
		b.apply()
		require.Zero(t, b.countFacts())
		b.requireStatus(id, deadletter.Failed)
		b.requireStatus(open, deadletter.Pending)
	})
	t.Run("retry of a job that a closed entry followed", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		job, id := b.createEntry()
		b.retry(job)
		b.apply()
		b.startJob(job)
		b.endJob(job, "discarded")
		b.apply()
		b.exec("SELECT dlq.discard($1, 'kim')", id)
		open := twin(b, job)
		b.retry(job)
		b.apply()
		require.Zero(t, b.countFacts())
		b.requireStatus(open, deadletter.Processing)
		b.startJob(job)
		b.endJob(job, "completed")
		b.apply()
		require.Zero(t, b.countFacts())
		b.requireStatus(id, deadletter.Archived)
		b.requireStatus(open, deadletter.Resolved)
	})
}

// Another session locks a partition, a month of closed entries. Facts about other entries are applied, and no job stays
// locked for long.
func TestApply_SkipsLockedMonth(t *testing.T) {
	t.Parallel()
	b := setup(t)
	open, id := b.createEntry()
	closed, other := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY[$1::uuid, $2::uuid]), dlq.discard($2, 'kim')", id, other)
	b.retry(closed)
	b.retry(open)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.dead_letter_archived IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	b.apply()
	require.EqualValues(t, 1, b.count("SELECT count(*) FROM dlq.job_facts WHERE fact <> 'following'"),
		"the fact of the closed entry waits")
	require.Equal(t, "dlq_processing", b.text("SELECT status::text FROM dlq.dead_letter_open WHERE id = $1", id))
	require.NoError(t, tx.Rollback(t.Context()))
	b.apply()
	b.requireStatus(other, deadletter.Manual)
}

// The reconciler finds a job that was retried and succeeded without capture, as long as River keeps the job. The fact
// that it appends is applied once.
func TestApply_AppliesUncapturedSuccess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, id := b.createEntry()
	b.exec("SELECT dlq.file(ARRAY[$1::uuid]), dlq.park($1, 'kim')", id)
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "completed")
	b.exec("SELECT dlq.set_capture('on')")
	reconcile := func() {
		b.exec("SELECT dlq.reconcile(p_whole => true)")
		b.apply()
		require.Zero(t, b.countFacts())
	}
	reconcile()
	b.requireStatus(id, deadletter.Resolved)
	b.exec("SELECT dlq.reopen($1, 'kim')", id)
	reconcile()
	b.requireStatus(id, deadletter.Manual)

	// An entry is parked as "done twice?" and an operator decides about it. No later scan adds a note to its audit trail.
	job, id = b.createEntry()
	b.exec("SELECT dlq.discard($1, 'kim')", id)
	b.retry(job)
	b.apply()
	require.Equal(t, "done-twice", b.text("SELECT rule FROM dlq.dead_letter_open WHERE id = $1", id))
	b.startJob(job)
	b.endJob(job, "completed")
	b.apply()
	const moves = "SELECT count(*)::text FROM dlq.dead_letter_transitions"
	before := b.text(moves)
	reconcile()
	b.requireStatus(id, deadletter.Manual)
	require.Equal(t, before, b.text(moves))
}

// A job succeeds, is retried and fails again. A restore of River's table then brings the success back. The success is
// older than the entry's failure and does not resolve the entry, even if the clock of the job's client was ahead.
func TestApply_RestoredSuccessDoesNotResolve(t *testing.T) {
	t.Parallel()
	for name, ended := range map[string]string{
		"earlier": "clock_timestamp()", "ahead": "clock_timestamp() + interval '10 minutes'", "infinite": "'infinity'",
	} {
		for _, redelivered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, redelivered %t", name, redelivered), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				job, id := b.createEntry()
				b.exec("SELECT dlq.file(ARRAY[$1::uuid]), dlq.park($1, 'kim')", id)
				b.exec("SELECT dlq.set_capture('off')")
				b.retry(job)
				b.startJob(job)
				b.endJob(job, "completed")
				b.exec("UPDATE river_job SET finalized_at = "+ended+" WHERE id = $1", job)
				b.exec("CREATE TABLE backup AS SELECT * FROM river_job")
				b.exec("SELECT dlq.set_capture('on')")
				b.retry(job)
				if redelivered {
					b.exec("SELECT dlq.follow_job($1, j.id, j.created_at, 'kim', 'test') FROM river_job j WHERE j.id = $2", id, job)
				}
				b.startJob(job)
				b.endJob(job, "discarded")
				b.apply()
				b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
				b.apply()
				before := b.entry(id)
				require.Equal(t, fmt.Sprintf("boom %d", job), *before.ErrorMessage)

				b.exec("SELECT dlq.set_capture('off')")
				b.exec("DELETE FROM river_job; INSERT INTO river_job SELECT * FROM backup")
				b.exec("SELECT dlq.set_capture('on')")
				b.exec("SELECT dlq.reconcile(p_whole => true)")
				b.apply()
				require.Equal(t, before.Status, b.entry(id).Status)
			})
		}
	}
}

// A job's success resolves only one of its entries. If an operator then reopens an earlier entry of the job, that entry
// stays open.
func TestApply_SuccessResolvesOneEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	job, first := b.createEntry()
	b.exec("SELECT dlq.discard($1, 'kim')", first)
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(job)
	b.startJob(job)
	b.endJob(job, "discarded")
	b.exec("SELECT dlq.set_capture('on')")
	b.exec("SELECT dlq.reconcile(p_whole => true)")
	second := b.entryOf(job)
	require.NotEqual(t, first, second)
	b.exec("SELECT dlq.file(ARRAY[$1::uuid]), dlq.park($1, 'kim')", second)
	b.retry(job)
	b.apply()
	b.startJob(job)
	b.endJob(job, "completed")
	b.apply()
	b.requireStatus(second, deadletter.Resolved)

	b.exec("SELECT dlq.reopen($1, 'kim')", first)
	b.exec("SELECT dlq.reconcile(p_whole => true)")
	b.apply()
	b.requireStatus(first, deadletter.Manual)
	b.requireStatus(second, deadletter.Resolved)
}
