package worker_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/worker"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// attached is a bundle on a River that an application owns.
func attached(t *testing.T, files policytest.Files) *policyBundle {
	t.Helper()
	j := setupWithPolicy(t, files)
	j.exec("UPDATE dlq.settings SET value = 'attached' WHERE key = 'river'")
	return j
}

// failJobs inserts n jobs of a queue and makes them fail. attempts is their maximum number of attempts.
func (j *policyBundle) failJobs(n, attempts int, queue, kind, message string) {
	j.Helper()
	j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
		SELECT $3, jsonb_build_object('messageId', gen_random_uuid(), 'kind', 'order.placed'), $1, $4, 'running'
		FROM generate_series(1, $2)`, queue, n, kind, attempts)
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', 1, 'at', now())] WHERE state = 'running'`, message)
}

func (j *policyBundle) release() {
	j.Helper()
	require.NoError(j, j.worker.Release(j.Context()))
}

func (j *policyBundle) observed() int {
	j.Helper()
	return j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND waiting_for = 'automatic'")
}

func (j *policyBundle) text(sql string, args ...any) string {
	j.Helper()
	var text string
	require.NoError(j, j.pool.QueryRow(j.Context(), sql, args...).Scan(&text), sql)
	return text
}

const refused = "connection refused"

// On a River that an application owns, entries are judged and shown, and not redelivered
// automatically.
func TestAutomatic_ObservesOnAttachedRiver(t *testing.T) {
	t.Parallel()
	j := attached(t, nil)
	j.failJobs(1, 3, "mails", "report", refused)
	j.all()
	entry := j.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, "transient", *entry.ErrorClass)
	require.Equal(t, "connection", *entry.Rule)
	require.Equal(t, "immediate", *entry.Strategy)
	require.Equal(t, "automatic", *entry.WaitingFor)
	require.NotEmpty(t, *entry.Fingerprint)
	require.True(t, entry.NextRetryAt.After(entry.LastFailedAt.Add(time.Minute)), "NextRetryAt is when it would be sent")
	require.Equal(t, "would be sent again at "+entry.NextRetryAt.UTC().Format("2006-01-02 15:04 UTC")+
		" by rule connection: automatic is off", *entry.Next)

	moves := j.count("SELECT count(*) FROM dlq.dead_letter_transitions")
	j.now = j.now.Add(24 * time.Hour)
	j.all()
	j.gates()
	j.release()
	require.Equal(t, moves, j.count("SELECT count(*) FROM dlq.dead_letter_transitions"),
		"observed entries are not touched")
	_, err := dbsqlc.New(j.store.DB()).NextDue(t.Context())
	require.Error(t, err, "no entry is due")

	// An operator can replay an observed entry. If the replay fails, the entry is observed again.
	_, err = j.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: deadletter.Act{Actor: "kim"}})
	require.NoError(t, err)
	j.failure = refused
	j.endRedeliveries("discarded")
	j.now = j.now.Add(time.Second)
	j.all()
	require.Equal(t, 1, j.observed())
	require.EqualValues(t, 1, j.entry().DLQRetryCount)

	// Messages, which dlqd delivers, are redelivered as usual.
	j.failJobs(1, 1, "default", "dlqd_message", refused)
	j.all()
	j.passDelay()
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'
		AND job_kind = 'dlqd_message'`))
}

// Entries that wait for automatic redelivery are not claimed. They are older than the due entries, and would otherwise
// fill every batch.
func TestClaim_SkipsEntriesThatWaitForAutomatic(t *testing.T) {
	t.Parallel()
	j := attached(t, nil)
	j.failJobs(3, 3, "mails", "report", refused)
	j.failJobs(1, 3, "default", "dlqd_message", refused)
	j.all()
	require.Equal(t, 3, j.observed())
	j.now = j.now.Add(time.Hour)
	j.exec("UPDATE dlq.dead_letter_queue SET next_retry_at = $1 WHERE waiting_for = 'automatic'", j.now.Add(-2*time.Hour))
	small := worker.New(worker.Config{
		Store: j.store, Planner: j.planner.Load, Logger: slog.New(slog.DiscardHandler),
		Name: "small", BatchSize: 2, Now: func() time.Time { return j.now },
	})
	full, err := small.RunOnce(t.Context())
	require.NoError(t, err)
	require.False(t, full, "one is due")
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'
		AND job_kind = 'dlqd_message'`))

	// The entries are not claimed after the switch is on, either: Release sends them, at their pace.
	j.exec("SELECT dlq.set_automatic('all', NULL, true, p_actor => 'kim')")
	_, err = small.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, j.observed())
	require.Equal(t, 1, j.inStatus(deadletter.Processing))
}

// After automatic redelivery is switched on, observed entries are released at the pace of their queue, oldest first.
// Entries that are not due keep their time.
func TestAutomatic_ReleasesAtPaceWhenSwitchedOn(t *testing.T) {
	t.Parallel()
	j := attached(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 10\nstrategies: {immediate: {jitter: 0}}\n"})
	j.failJobs(45, 3, "mails", "report.daily", refused)
	j.failJobs(5, 3, "mails", "invoice", refused)
	j.all()
	require.Equal(t, 50, j.observed())
	j.now = j.now.Add(2 * time.Minute)
	j.exec(`UPDATE dlq.dead_letter_queue SET next_retry_at = $1 WHERE id IN (SELECT id FROM dlq.dead_letter_open
		WHERE kind = 'report.daily' ORDER BY id DESC LIMIT 3)`, j.now.Add(time.Hour))
	j.exec("SELECT dlq.set_automatic('kind', 'report.*', true, p_actor => 'kim')")
	start := j.now
	for second := range 6 {
		j.now = start.Add(time.Duration(second) * time.Second)
		j.release()
		j.all()
		require.LessOrEqual(t, j.inStatus(deadletter.Processing), 10*(second+1), "second %d", second)
	}
	j.now = start.Add(7 * time.Second)
	j.all()
	require.Equal(t, 42, j.inStatus(deadletter.Processing), "the due entries")
	require.Equal(t, 5, j.observed(), "the other kind stays observed")
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'
		AND waiting_for IS NULL AND next_retry_at > $1`, j.now))
	require.Equal(t, 45, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason = 'automatic redelivery is on' AND actor = 'worker:test'`))
	j.now = start.Add(2 * time.Hour)
	j.all()
	j.now = j.now.Add(time.Second)
	j.all()
	require.Equal(t, 45, j.inStatus(deadletter.Processing))
}

// Release also works with a pace below one entry per second.
func TestAutomatic_ReleasesAtPaceBelowOnePerSecond(t *testing.T) {
	t.Parallel()
	j := attached(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 0.1\nautomatic: {queues: {slow: {enabled: " +
		"true}}}\n"})
	j.exec("SELECT dlq.set_automatic('queue', 'slow', false, p_actor => 'kim')")
	j.failJobs(3, 3, "slow", "report", refused)
	j.all()
	j.now = j.now.Add(time.Hour)
	j.exec("SELECT dlq.reset_automatic('queue', 'slow', 'kim')")
	start := j.now
	for second := range 25 {
		j.now = start.Add(time.Duration(second) * time.Second)
		j.release()
		j.all()
	}
	require.Equal(t, 3, j.inStatus(deadletter.Processing), "one per ten seconds")
}

// Release and batches reserve paces in the same order. If the order of queues differs from the order of their paces, a
// release could otherwise deadlock with a batch.
func TestAutomatic_ReservesPacesInFixedOrder(t *testing.T) {
	t.Parallel()
	j := attached(t, nil)
	j.failJobs(1, 3, "a", "report", refused)       // pace queue:a
	j.failJobs(1, 3, "default", "report", refused) // pace destination:default
	j.all()
	require.Equal(t, 2, j.observed())
	j.now = j.now.Add(2 * time.Minute)
	j.exec("SELECT dlq.set_automatic('all', '', true, p_actor => 'kim')")
	j.exec("INSERT INTO dlq.paces (name, free_at) VALUES ('queue:a', now()), ('destination:default', now())")

	batch, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = batch.Rollback(context.WithoutCancel(t.Context())) }()
	var pid int
	require.NoError(t, batch.QueryRow(t.Context(), `SELECT pg_backend_pid() FROM dlq.paces
		WHERE name = 'destination:default' FOR UPDATE`).Scan(&pid))
	released := make(chan error, 1)
	go func() { released <- j.worker.Release(t.Context()) }()
	require.Eventually(t, func() bool {
		return j.count("SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pid) > 0
	}, 5*time.Minute, 50*time.Millisecond, "the release waits for the first pace")
	_, err = batch.Exec(t.Context(), "SELECT FROM dlq.paces WHERE name = 'queue:a' FOR UPDATE NOWAIT")
	require.NoError(t, err, "the release has not locked the second pace")
	require.NoError(t, batch.Rollback(t.Context()))
	require.NoError(t, <-released)
	require.Zero(t, j.observed())
}

// Backfilled entries, and entries of jobs with one attempt, become manual, unless a switch names their rule.
func TestAutomatic_ParksSingleAttemptAndBackfilledUnlessIncluded(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil) // applies to dlqd's own River, too
	j.failJobs(1, 1, "mails", "once", refused)
	j.failJobs(1, 3, "mails", "old", refused)
	j.exec("UPDATE dlq.dead_letter_queue SET captured_by = 'backfill' WHERE kind = 'old'")
	j.all()
	require.Equal(t, 2, j.inStatus(deadletter.Manual))
	require.Len(t, j.parked, 2, "both are reported")
	require.Equal(t, "needs a person: its job had one attempt",
		j.text(`SELECT next FROM dlq.entries WHERE kind = 'once' AND rule = 'single-attempt' AND error_class = 'transient'
			AND parked_by IS NULL`))
	require.Equal(t, "needs a person: its job failed before dlqd was attached",
		j.text("SELECT next FROM dlq.entries WHERE kind = 'old' AND rule = 'backfilled'"))
	require.Regexp(t, `^job \d+ failed: class transient \(rule connection\): its job had one attempt; an operator decides whether it may run again$`,
		j.text("SELECT t.reason FROM dlq.dead_letter_transitions t WHERE t.kind = 'once' AND t.to_status = 'dlq_manual'"))

	// After a switch includes backfilled and single-attempt entries, reclassify makes them pending.
	reclassify := func() *worker.Reclassified {
		result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, false)
		require.NoError(t, err)
		return result
	}
	require.Empty(t, reclassify().Changed)
	j.exec("SELECT dlq.set_automatic('kind', 'o*', true, '{single-attempt}', 'kim')")
	result := reclassify()
	require.Len(t, result.Changed, 1)
	require.Equal(t, worker.Judgement{Class: "transient", Rule: "single-attempt", Strategy: "manual"},
		result.Changed[0].From)
	require.Equal(t, worker.Judgement{Class: "transient", Rule: "connection", Strategy: "immediate"}, result.Changed[0].To)
	j.passDelay()
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE kind = 'once'
		AND status = 'dlq_processing'`))

	// An unparked entry is redelivered.
	j.exec("SELECT dlq.unpark(id, 'kim') FROM dlq.dead_letter_open WHERE kind = 'old'")
	require.Contains(t, j.text("SELECT next FROM dlq.entries WHERE kind = 'old'"), ", because an operator returned it")
	j.passDelay()
	require.Equal(t, 2, j.inStatus(deadletter.Processing))
}

// Some entries were decided before switches existed, or while a switch named their rule. If no switch names it any
// more, they become manual when they come due or are released.
func TestAutomatic_ParksEntriesNoLongerIncluded(t *testing.T) {
	t.Parallel()
	j := attached(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 0\n"})
	j.exec("SELECT dlq.set_automatic('all', '', true, '{single-attempt}', 'kim')")
	j.failJobs(2, 1, "mails", "once", refused)
	j.all()
	require.Equal(t, 2, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'
		AND waiting_for IS NULL`))
	j.exec(`UPDATE dlq.dead_letter_queue SET waiting_for = 'automatic', move = '{}'
		WHERE id = (SELECT id FROM dlq.dead_letter_open LIMIT 1)`)
	j.exec("SELECT dlq.set_automatic('all', '', true, p_actor => 'kim')")
	j.passDelay()
	require.Equal(t, 1, j.inStatus(deadletter.Manual), "the due entry")
	j.release()
	require.Equal(t, 2, j.inStatus(deadletter.Manual), "and the observed entry")
}

// After automatic redelivery is switched off, due entries are deferred and new failures are observed.
func TestAutomatic_DefersWhenSwitchedOff(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.failJobs(3, 3, "mails", "report", refused)
	j.failJobs(2, 3, "jobs", "report", refused)
	j.all()
	j.exec("SELECT dlq.set_automatic('queue', 'mails', false, p_actor => 'kim', p_note => 'they are in trouble')")
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.entries
		WHERE next LIKE 'would be sent again at %: automatic is off'`), "shown at once")
	j.passDelay()
	require.Equal(t, 3, j.observed())
	require.Equal(t, 2, j.inStatus(deadletter.Processing), "the other queue is still redelivered")
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason = 'observed: automatic redelivery is off for queue mails'`))
	j.exec("SELECT dlq.reset_automatic('queue', 'mails', 'kim')")
	j.release()
	j.now = j.now.Add(time.Second)
	j.all()
	require.Equal(t, 5, j.inStatus(deadletter.Processing))
}

// After a stop returns, no worker redelivers automatically until the stop is lifted. An operator's
// replay still works.
func TestAutomatic_StopAppliesToAllWorkers(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 0\n"})
	const n = 200
	j.failJobs(n, 3, "mails", "report", refused)
	j.all()
	j.now = j.now.Add(2 * time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	defer workers.Wait()
	defer cancel()
	begun := make(chan struct{}, 2*n)
	for range 2 {
		w := worker.New(worker.Config{
			Store: j.store, Planner: j.planner.Load, Logger: slog.New(slog.DiscardHandler),
			BatchSize: 2, Now: func() time.Time { return j.now },
			Observe: func(action string, _ int, _ time.Duration) {
				if action == "redelivered" {
					begun <- struct{}{}
				}
			},
		})
		workers.Go(func() {
			for ctx.Err() == nil {
				for _, once := range []func(context.Context) (bool, error){w.File, w.RunOnce} {
					if _, err := once(context.WithoutCancel(ctx)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	<-begun
	j.exec("SELECT dlq.stop_automatic('kim', 'a release')")
	sent := j.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:entry_id'")
	require.Eventually(t, func() bool { return j.observed() == n-sent }, 5*time.Minute, 50*time.Millisecond,
		"due entries are deferred")
	require.Equal(t, sent, j.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:entry_id'"),
		"no redelivery after the stop")
	cancel()
	workers.Wait()
	require.Less(t, sent, n)

	require.Contains(t, j.text("SELECT next FROM dlq.entries WHERE waiting_for = 'automatic' LIMIT 1"),
		": all automatic redelivery is stopped by kim")
	j.release()
	require.Equal(t, n-sent, j.observed())
	j.exec(`SELECT dlq.replay(id, 'kim')
		FROM (SELECT id FROM dlq.dead_letter_open WHERE waiting_for = 'automatic' LIMIT 1) e`)
	require.Equal(t, n-sent-1, j.observed())
	j.exec("SELECT dlq.resume_automatic('kim')")
	j.release()
	for j.inStatus(deadletter.Processing) < n {
		j.all()
	}
}

// While a switch is being changed, workers change nothing and do not wait. If the change does not
// end, they fail.
func TestAutomatic_WorkersSkipWhileSwitchChanges(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.failJobs(1, 3, "mails", "report", refused)
	j.all()
	j.now = j.now.Add(2 * time.Minute)
	tx, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "SELECT dlq.stop_automatic('kim')")
	require.NoError(t, err)
	j.all()
	j.gates()
	j.release()
	require.Zero(t, j.inStatus(deadletter.Processing))
	j.now = j.now.Add(time.Minute)
	_, err = j.worker.RunOnce(t.Context())
	require.ErrorContains(t, err, "for 1m0s", "a change that does not end is an error")
	require.NoError(t, tx.Rollback(t.Context()))
	j.all()
	require.Equal(t, 1, j.inStatus(deadletter.Processing))
}

// Gates follow the switches: entries whose automatic redelivery is off do not block others.
func TestAutomatic_GatesObeySwitches(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 0\nstrategies: {conditional: " +
		"{conditions: {probes: 2}}}\n"})
	j.conditions.set("x")
	j.failJobs(3, 3, "mails", "report", outage)
	j.failJobs(4, 3, "mails", "invoice", outage)
	j.all()
	j.passDelay()
	require.Equal(t, 7, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'condition: x'"))
	j.exec("SELECT dlq.stop_automatic('kim')")
	j.conditions.set("")
	j.gates()
	require.Zero(t, j.inStatus(deadletter.Processing))
	j.exec("SELECT dlq.resume_automatic('kim')")
	j.exec("SELECT dlq.set_automatic('kind', 'report', false, p_actor => 'kim')")
	j.gates()
	require.Equal(t, 3, j.observed(), "deferred as observed")
	require.Equal(t, 2, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'
		AND kind = 'invoice'`), "the probes")
	j.endRedeliveries("completed")
	j.gates()
	j.endRedeliveries("completed")
	require.Equal(t, 4, j.inStatus(deadletter.Resolved))
	j.exec("SELECT dlq.set_automatic('kind', 'report', true, p_actor => 'kim')")
	j.conditions.set("y")
	j.release()
	j.all()
	require.Equal(t, 3, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'condition: y'"),
		"a released entry still waits for its condition")
}

// Smart retry follows the switches.
func TestAutomatic_SmartRetryObeysSwitches(t *testing.T) {
	t.Parallel()
	j := attached(t, policytest.Files{"dlq-routing": "smartRetry: {enabled: true, over: 1h, minJobs: 10, errorRate: 10, " +
		"probes: 3}\nredeliveriesPerSecond: 0\n"})
	const bug = "TypeError: undefined is not a function"
	j.failJobs(4, 1, "jobs", "once", bug)
	j.failJobs(4, 3, "jobs", "report", bug)
	j.failJobs(4, 3, "jobs", "invoice", bug)
	j.all()
	require.Equal(t, 12, j.inStatus(deadletter.Manual))
	j.now = j.now.Add(2 * time.Hour)
	j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at) SELECT 'report', '{}', 'jobs', 1,
		'completed', now() + interval '90 minutes' FROM generate_series(1, 50)`)
	require.NoError(t, j.worker.SmartRetry(t.Context()))
	require.Zero(t, j.inStatus(deadletter.Processing), "observed entries are not retried")
	j.exec("SELECT dlq.set_automatic('kind', 'report', true, p_actor => 'kim')")
	j.exec("SELECT dlq.set_automatic('kind', 'once', true, p_actor => 'kim')")
	for range 3 {
		require.NoError(t, j.worker.SmartRetry(t.Context()))
		j.gates()
		j.endRedeliveries("completed")
	}
	require.Equal(t, 4, j.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'
		AND kind = 'report'`))
	require.Equal(t, 8, j.inStatus(deadletter.Manual), "the kind that is off, and entries with one attempt")
}

// If a release is rolled back, it has not written the new policy's switches. The next release writes them.
func TestAutomatic_PublishesSwitchesOnCommitOnly(t *testing.T) {
	t.Parallel()
	j := attached(t, nil)
	j.failJobs(1, 3, "mails", "report", refused)
	j.all()
	require.Equal(t, 1, j.observed())
	j.now = j.now.Add(2 * time.Minute)
	j.release()
	published := func() string { return j.text("SELECT value FROM dlq.settings WHERE key = 'automatic'") }
	before := published()
	j.reload(policytest.Files{"dlq-routing": "automatic: {kinds: {report: {enabled: true}}}\n"})
	j.exec("ALTER TABLE dlq.dead_letter_queue ADD CONSTRAINT observed CHECK (waiting_for = 'automatic') NOT VALID")
	require.Error(t, j.worker.Release(t.Context()))
	require.Equal(t, before, published())
	j.exec("ALTER TABLE dlq.dead_letter_queue DROP CONSTRAINT observed")
	j.release()
	require.NotEqual(t, before, published())
}

// A switch change that does not end is reported as a failure even if no entry is due, because entries may wait for a
// release or a condition.
func TestAutomatic_HangingSwitchChangeFailsRelease(t *testing.T) {
	t.Parallel()
	j := attached(t, nil)
	tx, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT dlq.set_automatic('kind', 'report', true, p_actor => 'kim')")
	require.NoError(t, err)
	j.release()
	j.now = j.now.Add(20 * time.Second)
	require.ErrorContains(t, j.worker.Release(t.Context()), "deciding and redelivering have been blocked for 20s")
	require.NoError(t, tx.Rollback(t.Context()))
	j.release()
}
