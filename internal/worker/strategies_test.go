package worker_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// fakeConditions are conditions that a test controls.
type fakeConditions struct{ unmet atomic.Pointer[string] }

func (s *fakeConditions) Unmet(_, _ string, want *policy.Conditions) string {
	if want.CPUBelow != nil && *want.CPUBelow == 1 {
		return "99 % of this machine's processors are in use (must be below 1 %)"
	}
	if unmet := s.unmet.Load(); unmet != nil {
		return *unmet
	}
	return ""
}

func (s *fakeConditions) set(unmet string) {
	s.unmet.Store(&unmet)
}

// policyBundle is a bundle whose worker follows a policy written by the test, with conditions that the
// test controls.
type policyBundle struct {
	*bundle

	conditions fakeConditions
	planner    atomic.Pointer[strategy.Planner]
	parked     []worker.Parked
	failure    string
}

func setupWithPolicy(t *testing.T, files policytest.Files) *policyBundle {
	t.Helper()
	j := &policyBundle{bundle: setup(t)}
	j.reload(files)
	j.worker = worker.New(worker.Config{
		Store: j.store, Planner: j.planner.Load, Logger: slog.New(slog.DiscardHandler),
		Name: "test", Now: func() time.Time { return j.now },
		Parked: func(p []worker.Parked) { j.parked = append(j.parked, p...) },
	})
	return j
}

func (j *policyBundle) reload(files policytest.Files) {
	j.Helper()
	planner, err := strategy.NewPlanner(policytest.Load(j.T, files), &j.conditions)
	require.NoError(j, err)
	j.planner.Store(planner)
}

// failMany makes n jobs of a queue fail with an error.
func (j *policyBundle) failMany(n int, queue, message string) {
	j.Helper()
	j.failure = message
	j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', $1, 3, 'running'
		FROM generate_series(1, $2)`, queue, n)
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', 1, 'at', now())] WHERE state = 'running'`, message)
}

// endRedeliveries ends the jobs of redeliveries as River does. Failures carry the error of the last
// failMany.
func (j *policyBundle) endRedeliveries(state string) {
	j.Helper()
	j.exec(`UPDATE river_job SET state = $1::river_job_state, finalized_at = now(), attempt = 1,
		errors = CASE WHEN $1 = 'completed' THEN errors ELSE ARRAY[jsonb_build_object('error', $2::text, 'attempt', 1)] END
		WHERE state = 'available' AND metadata ? 'dlq:entry_id'`, state, j.failure)
	j.settle()
}

// all runs batches until nothing is left to do at the current time.
func (j *policyBundle) all() {
	j.Helper()
	for j.once() {
	}
}

func (j *policyBundle) gates() {
	j.Helper()
	require.NoError(j, j.worker.Gates(j.Context()))
}

func (j *policyBundle) inStatus(status deadletter.Status) int {
	j.Helper()
	return j.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = $1::dlq.dead_letter_status", string(status))
}

// passDelay advances the clock past the delays of a first failure and runs the worker.
func (j *policyBundle) passDelay() {
	j.Helper()
	j.now = j.now.Add(2 * time.Minute)
	j.all()
}

const outage = "503 Service Unavailable"

func TestConditional_WaitsThenSendsProbesFirst(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 1000\n"})
	j.conditions.set("circuit breaker destination:bank is open")
	j.failMany(40, "default", outage)
	j.all()
	require.Zero(t, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for IS NOT NULL"),
		"the delay comes before the conditions")
	j.gates()
	require.Zero(t, j.inStatus(deadletter.Processing))
	j.passDelay()
	require.Equal(t, 40, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'conditional'
		AND waiting_for = 'condition: circuit breaker destination:bank is open'`))

	// While the condition is unmet, the entries are not claimed and nothing is written.
	moves := j.count("SELECT count(*) FROM dlq.dead_letter_transitions")
	j.now = j.now.Add(10 * time.Minute)
	j.all()
	j.gates()
	require.Equal(t, moves, j.count("SELECT count(*) FROM dlq.dead_letter_transitions"))

	j.conditions.set("")
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Processing), "the probes")
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Processing), "the rest wait for the probes")

	// If the probes fail, the gate shuts and tries again later.
	j.conditions.set("circuit breaker destination:bank is open")
	j.endRedeliveries("discarded")
	j.all()
	j.passDelay()
	j.conditions.set("")
	j.gates()
	j.gates()
	require.Zero(t, j.inStatus(deadletter.Processing))
	j.now = j.now.Add(time.Minute)
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Processing))
	j.endRedeliveries("completed")
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Resolved))
	require.Equal(t, 35, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"),
		"the rest follow")
	j.gates()
	require.Zero(t, j.count("SELECT count(*) FROM dlq.gates"), "no entry waits")
	require.Equal(t, 35, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason = 'its conditions are met, and the probes succeeded'`))
}

func TestConditional_OnlyDelayedWhileConditionsAreMet(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.failMany(1, "default", outage)
	j.all()
	entry := j.entry()
	require.Equal(t, "conditional", *entry.Strategy)
	require.Nil(t, entry.WaitingFor)
	j.now = entry.NextRetryAt.Add(time.Second)
	j.conditions.set("91 % of this machine's processors are in use (must be below 80 %)")
	j.all()
	entry = j.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, "condition: 91 % of this machine's processors are in use (must be below 80 %)", *entry.WaitingFor)
	j.conditions.set("")
	j.gates()
	require.Equal(t, deadletter.Processing, j.entry().Status)
}

// An entry with a stricter condition does not block other entries.
func TestConditional_StricterConditionDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 1000\nrules: [{name: strict, match: " +
		"{message: nightly}, class: outage, plan: {conditions: {cpuBelow: 1}}}]\n"})
	j.conditions.set("x")
	j.failMany(3, "default", outage+", nightly")
	j.failMany(7, "default", outage)
	j.all()
	j.passDelay()
	require.Equal(t, 10, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for LIKE 'condition: %'"))
	j.conditions.set("")
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Processing))
	j.endRedeliveries("completed")
	j.gates()
	require.Equal(t, 2, j.inStatus(deadletter.Processing))
	j.gates()
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND rule = 'strict'
		AND dlq_retry_count = 0`))
}

// While the breaker is open, entries of every class wait, because a delivery would only be held. The wait uses no
// retry, and the entries show the condition.
func TestDue_EveryClassWaitsForOpenBreaker(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "strategies: {scheduled: {hours: []}}\n"})
	j.failMany(2, "default", "connection refused")
	j.failMany(2, "default", "too many requests")
	j.failMany(1, "default", "the moon is in the wrong house")
	j.all()
	j.exec("SELECT dlq.unpark(id) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	require.Equal(t, 3, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'immediate'"))
	const open = "circuit breaker destination:default is open"
	j.conditions.set(open)
	j.now = j.now.Add(24 * time.Hour)
	j.all()
	require.Equal(t, 5, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'
		AND dlq_retry_count = 0 AND waiting_for = 'condition: ' || $1`, open))
	require.Zero(t, j.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:entry_id'"))
	require.Equal(t, 5, j.count("SELECT count(*) FROM dlq.entries WHERE next = 'waits for: ' || $1", open))
	j.conditions.set("")
	j.gates()
	require.Equal(t, 5, j.inStatus(deadletter.Processing))
}

// An entry that comes due while its gate probes must not bypass the gate.
func TestGate_LimitsConcurrentReleases(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.conditions.set("x")
	j.failMany(20, "default", outage)
	j.all()
	j.passDelay()
	j.conditions.set("")
	j.gates()
	j.now = j.now.Add(3 * time.Hour)
	j.all()
	require.Equal(t, 5, j.inStatus(deadletter.Processing))
	require.Equal(t, 15, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'condition: x'"))
}

// A rejected entry blocks neither the gate nor the other entries.
func TestGate_RefusedEntryDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{
		"dlq-routing": "redeliveriesPerSecond: 0\n", "retry-policies": "destinationDefaults: {redeliveriesPerSecond: 0}\n",
	})
	j.conditions.set("x")
	j.failMany(4, "default", outage)
	j.all()
	j.passDelay()
	j.exec(`UPDATE dlq.dead_letter_queue SET tags = '{poison}' WHERE id = (SELECT id FROM dlq.dead_letter_open
		ORDER BY id DESC LIMIT 1)`)
	j.exec(`ALTER TABLE river_job ADD CONSTRAINT no_poison CHECK (NOT tags @> '{poison}')`)
	j.conditions.set("")
	j.gates()
	j.all()
	require.Equal(t, 3, j.inStatus(deadletter.Processing))
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND tags = '{poison}' AND parked_by IS NOT NULL`))
}

// A gate can release fewer than one entry per check.
func TestPace_BelowOnePerSecond(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 0.5\nstrategies: {conditional: " +
		"{conditions: {probes: 1}}}\n"})
	j.conditions.set("x")
	j.failMany(12, "jobs", outage)
	j.all()
	j.passDelay()
	j.conditions.set("")
	j.gates()
	require.Equal(t, 1, j.inStatus(deadletter.Processing))
	j.endRedeliveries("completed")
	for range 8 {
		j.now = j.now.Add(time.Second)
		j.gates()
	}
	require.InDelta(t, 4, j.inStatus(deadletter.Processing), 1)
}

func TestPace_SpreadsRedeliveries(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 10\nstrategies: {immediate: " +
		"{jitter: 0}}\n"})
	j.failMany(100, "jobs", "connection refused")
	j.all()
	j.now = j.now.Add(2 * time.Minute)
	start := j.now
	j.all()
	require.LessOrEqual(t, j.inStatus(deadletter.Processing), 2, "the places within a tenth of a second")
	require.GreaterOrEqual(t, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'pace'"), 98)
	for second := 1; second <= 10; second++ {
		j.now = start.Add(time.Duration(second) * time.Second)
		j.all()
		require.InDelta(t, 10*second+1, j.inStatus(deadletter.Processing), 1, "ten per second")
	}
	require.Equal(t, 100, j.inStatus(deadletter.Processing))
	require.LessOrEqual(t, j.count(`SELECT max(n) FROM (SELECT count(*) AS n FROM dlq.dead_letter_transitions
		WHERE reason LIKE 'waits for its place in the pace%' GROUP BY entry_id) m`), 1,
		"each is deferred once: its place stays reserved")

	// After a downtime, entries whose places have passed get new places.
	j.failMany(50, "jobs", "connection refused")
	j.all()
	j.now = j.now.Add(2 * time.Minute)
	j.all()
	j.now = j.now.Add(time.Hour)
	before := j.inStatus(deadletter.Processing)
	j.all()
	require.LessOrEqual(t, j.inStatus(deadletter.Processing)-before, 2, "they are not all sent at once")
}

func TestScheduled_UsesOffPeakHoursOrRetryAfter(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "strategies: {scheduled: {hours: [2], timeZone: " +
		"Asia/Kolkata}}\n"})
	kolkata, err := time.LoadLocation("Asia/Kolkata")
	require.NoError(t, err)
	j.failMany(50, "jobs", "429 Too Many Requests")
	j.all()
	require.Equal(t, 50, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'scheduled'"))
	rows, err := j.pool.Query(t.Context(), "SELECT next_retry_at FROM dlq.dead_letter_open")
	require.NoError(t, err)
	minutes := map[int]bool{}
	for rows.Next() {
		var at time.Time
		require.NoError(t, rows.Scan(&at))
		require.Equal(t, 2, at.In(kolkata).Hour())
		require.Less(t, at.Sub(j.now), 25*time.Hour)
		minutes[at.Minute()/10] = true
	}
	require.Len(t, minutes, 6, "spread over the hour")

	j.exec("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = (SELECT min(id) FROM river_job)")
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 2,
		metadata = metadata || '{"dlq:error": {"attempt": 2, "message": "429", "code": "429", "context": {"status": 429, "retryAfterSeconds": 1800}}}',
		errors = errors || '{"error": "429", "attempt": 2}'::jsonb WHERE state = 'available'`)
	j.now = time.Now().Add(time.Second) // on a busy machine the test's clock is behind
	j.all()
	var wait float64
	require.NoError(t, j.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM next_retry_at - last_failed_at)
		FROM dlq.dead_letter_open WHERE dlq_retry_count = 1`).Scan(&wait))
	require.GreaterOrEqual(t, wait, 1800.0)
	require.LessOrEqual(t, wait, 1800*1.2+1)
}

func TestRules_SetClassPriorityTagsAndAssignee(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": `
rules:
  - name: bank
    match: {queue: payments, message: "code 51"}
    class: business
    priority: 1
    tags: [bank-said-no]
    assignee: payments-team
  - name: hiccup
    match: {message: hiccup}
    class: unknown
    plan: {strategy: immediate, delays: [7s], jitter: 0, maxRetries: 1}
`})
	j.failMany(1, "payments", "refused with code 51")
	j.all()
	entry := j.entry()
	require.Equal(t, deadletter.Manual, entry.Status)
	require.Equal(t, "business", *entry.ErrorClass)
	require.Equal(t, "bank", *entry.Rule)
	require.EqualValues(t, 1, entry.Priority)
	require.Equal(t, []string{"bank-said-no"}, entry.Tags)
	require.Equal(t, "payments-team", *entry.AssignedTo)
	require.Nil(t, entry.ParkedBy)
	require.Len(t, j.parked, 1, "the parked entry is reported")
	require.Equal(t, "bank", j.parked[0].Rule)

	require.NoError(t, j.store.Discard(t.Context(), entry.ID, deadletter.Act{Actor: "kim"}))
	j.failMany(1, "jobs", "a hiccup")
	j.all()
	j.now = j.now.Add(8 * time.Second)
	j.all()
	require.Equal(t, 1, j.inStatus(deadletter.Processing))
	j.endRedeliveries("discarded")
	require.Equal(t, 1, j.inStatus(deadletter.Failed), "the rule allows one retry")
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_failed'
		AND error_class = 'unknown' AND fingerprint IS NOT NULL`), "it keeps its class and fingerprint")
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE rule = 'hiccup'
		AND to_status = 'dlq_pending' AND config_version = $1`, j.planner.Load().Policy().Version()))
}

// A crash of the application during a redelivery says nothing about the cause of the failure: an entry that was manual
// becomes manual again.
func TestDecide_CrashInRedeliveryKeepsClass(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "rules: [{name: bank, match: {message: code 51}, class: " +
		"business}]\n"})
	rescued := func() {
		j.failure = "Stuck job rescued by JobRescuer"
		j.endRedeliveries("discarded")
		j.all()
	}
	j.failMany(1, "jobs", "refused with code 51")
	j.all()
	j.exec("SELECT dlq.replay(id, 'kim') FROM dlq.dead_letter_open")
	rescued()
	entry := j.entry()
	require.Equal(t, deadletter.Manual, entry.Status)
	require.Equal(t, "business", *entry.ErrorClass)
	require.Equal(t, "stuck-job", *entry.Rule)
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE 'class business, as before (rule stuck-job)%'`))
	j.exec("SELECT dlq.replay(id, 'kim') FROM dlq.dead_letter_open")
	rescued()
	require.Equal(t, deadletter.Manual, j.entry().Status, "after a second crash")
	result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, false)
	require.NoError(t, err)
	require.Empty(t, result.Changed, "reclassify keeps the class")
	j.exec("SELECT dlq.discard(id) FROM dlq.dead_letter_open")

	j.failMany(1, "jobs", "Stuck job rescued by JobRescuer")
	j.all()
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE error_class = 'transient'"),
		"it had no class before")
}

// Every way to park an entry reports it, once.
func TestParked_ReportsEveryParkOnce(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "redeliveriesPerSecond: 1000\n"})
	requireParked := func(entries int, queue, class string) {
		t.Helper()
		require.Len(t, j.parked, entries)
		for _, p := range j.parked {
			require.Equal(t, queue, p.Queue)
			require.Equal(t, "k", p.Kind)
			require.Equal(t, class, p.Class)
			require.NotEmpty(t, p.Fingerprint)
		}
		j.parked = nil
		require.Equal(t, entries,
			j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND queue = $1", queue))
	}
	j.failMany(1, "class", "card was declined")
	j.all()
	requireParked(1, "class", "business")

	j.failMany(3, "rules", "connection refused")
	j.all()
	require.Empty(t, j.parked)
	j.reload(policytest.Files{"dlq-routing": "rules: [{name: r, match: {queue: rules}, class: validation}]\n"})
	result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, true)
	require.NoError(t, err)
	require.Empty(t, result.Parked, "a dry run")
	result, err = worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, false)
	require.NoError(t, err)
	require.Len(t, result.Changed, 1, result)
	j.parked = result.Parked
	requireParked(3, "rules", "validation")

	j.failMany(2, "live", "connection refused")
	j.all()
	j.exec(`UPDATE dlq.dead_letter_queue SET unique_key = river_job_id::text::bytea, unique_states = B'11111111'
		WHERE queue = 'live'`)
	j.exec(`INSERT INTO river_job (kind, args, max_attempts, queue, unique_key, unique_states, state, finalized_at)
		SELECT 'k', '{}', 1, 'other', unique_key, unique_states, CASE WHEN n = 1 THEN 'available'
			ELSE 'completed' END::river_job_state, CASE WHEN n = 2 THEN now() END
		FROM (SELECT unique_key, unique_states::bit(8), row_number() OVER (ORDER BY id) AS n FROM dlq.dead_letter_open
		WHERE queue = 'live') e`)
	j.passDelay()
	requireParked(2, "live", "transient")

	// A gate also parks entries.
	j.failMany(1, "gate", outage)
	j.conditions.set("x")
	j.all()
	j.passDelay()
	j.exec(`UPDATE dlq.dead_letter_queue SET unique_key = '\x02', unique_states = B'11111111' WHERE queue = 'gate'`)
	j.exec(`INSERT INTO river_job (kind, args, max_attempts, queue, unique_key, unique_states)
		VALUES ('k', '{}', 1, 'other', '\x02', B'11111111')`)
	j.conditions.set("")
	j.gates()
	requireParked(1, "gate", "outage")

	j.exec(`ALTER TABLE river_job ADD CONSTRAINT no_poison CHECK (NOT (state = 'available' AND queue = 'refused'))`)
	j.failMany(1, "refused", "connection refused")
	j.all()
	j.passDelay()
	requireParked(1, "refused", "transient")
}

// The rule table of a new version applies to new failures. Earlier decisions stay until they are
// reclassified; the dry run reports the changes.
func TestReclassify_AfterAnUpgrade(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": `
rules: # as the table of an earlier version
  - {name: connection, match: {message: NotFound}, class: transient}
  - {name: none, match: {message: NetworkError}, class: unknown}
`})
	j.failMany(3, "jobs", "FileNotFoundError: /srv/in/81.csv")
	j.failMany(2, "jobs", "NetworkError: try again")
	j.failMany(1, "jobs", "card was declined")
	j.all()
	decided := "SELECT count(*) FROM dlq.dead_letter_open WHERE (error_class, rule) IN (('transient', 'connection'), " +
		"('unknown', 'none'), ('business', 'business'))"
	require.Equal(t, 6, j.count(decided))

	j.reload(policytest.Files{})
	j.all()
	require.Equal(t, 6, j.count(decided), "an upgrade changes no open entry")
	result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, true)
	require.NoError(t, err)
	require.Equal(t, 6, j.count(decided), "nor does the dry run")
	require.Equal(t, 6, result.Looked)
	require.Len(t, result.Changed, 2)
	require.Equal(t, 3, result.Changed[0].Entries)
	require.Equal(t, worker.Judgement{Class: "transient", Rule: "connection", Strategy: "immediate"},
		result.Changed[0].From)
	require.Equal(t, worker.Judgement{Class: "not_found", Rule: "not-found", Strategy: "manual"}, result.Changed[0].To)
	require.Equal(t, 2, result.Changed[1].Entries)
	require.Equal(t, worker.Judgement{Class: "transient", Rule: "connection", Strategy: "immediate"},
		result.Changed[1].To)
}

func TestReclassify(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.failMany(3, "jobs", "the moon is in the wrong house")
	j.failMany(2, "jobs", "connection refused")
	j.all()
	parked := j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	require.Equal(t, 3, parked)
	j.exec(`SELECT dlq.park(id, 'kim', 'I handle it')
		FROM (SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_pending' LIMIT 1) e`)
	reclassify := func(dryRun bool) *worker.Reclassified {
		result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(),
			deadletter.Act{Actor: "kim", Note: "new rules"}, dryRun)
		require.NoError(t, err)
		return result
	}
	require.Empty(t, reclassify(false).Changed, "the same rules decide the same")

	j.reload(policytest.Files{"dlq-routing": `
rules:
  - {name: moon, match: {message: moon}, class: transient}
  - {name: refused, match: {message: refused}, class: business}
`})
	moves := j.count("SELECT count(*) FROM dlq.dead_letter_transitions")
	result := reclassify(true)
	require.Equal(t, moves, j.count("SELECT count(*) FROM dlq.dead_letter_transitions"), "a dry run changes nothing")
	require.Equal(t, 4, result.Looked, "entries that an operator parked are skipped")
	require.Len(t, result.Changed, 2)
	require.Equal(t, worker.Judgement{Class: "unknown", Rule: "none", Strategy: "manual"}, result.Changed[0].From)
	require.Equal(t, worker.Judgement{Class: "transient", Rule: "moon", Strategy: "immediate"}, result.Changed[0].To)
	require.Equal(t, 3, result.Changed[0].Entries)

	require.Equal(t, result.Changed, reclassify(false).Changed)
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND rule = 'moon'
		AND strategy = 'immediate'`))
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND rule = 'refused'`))
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND parked_by = 'kim'`))
	require.Equal(t, 4, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE actor = 'kim'
		AND reason LIKE 'reclassified: %' AND note = 'new rules'`))
	require.Empty(t, reclassify(false).Changed)

	// A change of only the rule is recorded, and moves no entry.
	j.reload(policytest.Files{"dlq-routing": "rules: [{name: refused-again, match: {message: refused}, class: " +
		"business}, {name: moon, match: {message: moon}, class: transient}]"})
	require.Len(t, reclassify(false).Changed, 1)
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND rule = 'refused-again'`))

	// Changes of all other settings of rules and plans are recorded, too.
	rules := "rules: [{name: refused-again, match: {message: refused}, class: business}, {name: moon, match: {message: " +
		"moon}, class: transient%s}]"
	for _, change := range []struct{ settings, also string }{
		{", tags: [lunar]", "tags"},
		{", tags: [lunar], priority: 3", "priority"},
		{", tags: [lunar], priority: 3, assignee: kim", "assignee"},
		{", tags: [lunar], priority: 3, assignee: kim, plan: {maxRetries: 9}", "maxRetries"},
		{", tags: [lunar], priority: 3, assignee: kim, plan: {maxRetries: 9, delays: [2h]}", "nextRetryAt"},
		{", tags: [lunar], priority: 3, assignee: kim, plan: {maxRetries: 9, delays: [30m]}", "nextRetryAt"},
	} {
		j.reload(policytest.Files{"dlq-routing": fmt.Sprintf(rules, change.settings)})
		changed := reclassify(true).Changed
		require.Len(t, changed, 1, change.settings)
		require.Equal(t, []string{change.also}, changed[0].Also)
		require.Equal(t, 3, changed[0].Entries)
		require.Equal(t, changed, reclassify(false).Changed)
		require.Empty(t, reclassify(false).Changed, "%s: the same rules decide the same", change.settings)
	}
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE tags = '{lunar}' AND priority = 3
		AND assigned_to = 'kim' AND dlq_max_retries = 9 AND next_retry_at < last_failed_at + interval '37 minutes'`))
}

// Operators' patterns run on arbitrary texts while nothing is locked. If an operator acts in that time, the worker
// keeps the operator's change.
func TestWorker_JudgesOutsideTransactions(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	calls, judging := 0, 2 // the first call decides whether to read messages
	meanwhile := func() {}
	w := worker.New(worker.Config{
		Store: j.store, Logger: slog.New(slog.DiscardHandler), Name: "test", Now: func() time.Time { return j.now },
		Planner: func() *strategy.Planner {
			if calls++; calls == judging {
				meanwhile()
			}
			return j.planner.Load()
		},
	})
	j.worker = w
	j.failMany(2, "jobs", "the moon is in the wrong house")
	meanwhile = func() {
		j.exec("SELECT dlq.park(id, 'kim', 'I handle it') FROM (SELECT id FROM dlq.dead_letter_inbox LIMIT 1) e")
	}
	_, err := w.File(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE parked_by = 'kim' AND rule IS NULL"))
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE parked_by IS NULL AND rule = 'none'"))

	j.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_pending', strategy = NULL, parked_by = NULL, next_retry_at = " +
		"now() - interval '1 hour'")
	calls, judging = 0, 3 // the third call reads the version, before the claim
	meanwhile = func() {
		j.exec("SELECT dlq.park(id, 'kim', 'I handle it') FROM (SELECT id FROM dlq.dead_letter_open LIMIT 1) e")
	}
	_, err = w.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE parked_by = 'kim'
		AND strategy = 'manual'`))
	require.Equal(t, 1, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE parked_by IS NULL
		AND strategy = 'manual'`))
}

// smartRouting has a smart retry with thresholds for a test.
const smartRouting = "smartRetry: {enabled: %t, over: 1h, minJobs: 10, errorRate: 10, probes: " +
	"3}\nredeliveriesPerSecond: 1000\n"

func TestSmartRetry(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": fmt.Sprintf(smartRouting, true)})
	runSmartRetry := func() {
		require.NoError(t, j.worker.SmartRetry(t.Context()))
		j.gates()
	}
	completed := func(n int, at string) {
		j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at) SELECT 'k', '{}', 'jobs', 1,
			'completed', now() + $2::interval FROM generate_series(1, $1)`, n, at)
	}
	j.failMany(10, "jobs", "TypeError: undefined is not a function")
	j.failMany(2, "jobs", "card was declined")
	j.all()
	require.Equal(t, 12, j.inStatus(deadletter.Manual))
	j.exec(`SELECT dlq.replay(id, 'kim') FROM (SELECT id FROM dlq.dead_letter_open WHERE error_class = 'code_bug'
		ORDER BY id LIMIT 1) e`)
	j.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE status = 'dlq_processing'")
	j.endRedeliveries("discarded")
	require.Equal(t, 1, j.inStatus(deadletter.Failed))
	j.exec("UPDATE dlq.dead_letter_queue SET last_failed_at = last_failed_at - interval '30 minutes'")

	completed(50, "-10 minutes")
	j.now = j.now.Add(45 * time.Minute)
	runSmartRetry()
	require.Zero(t, j.inStatus(deadletter.Processing), "10 of 60 failed in this hour")
	completed(50, "-10 minutes")
	j.exec("UPDATE dlq.dead_letter_queue SET last_failed_at = last_failed_at + interval '30 minutes'")
	runSmartRetry()
	require.Zero(t, j.inStatus(deadletter.Processing), "10 of 110, and they are not an hour old")
	j.now = j.now.Add(45 * time.Minute)
	runSmartRetry()
	require.Zero(t, j.inStatus(deadletter.Processing), "no job ran in this hour")
	completed(20, "90 minutes")
	j.exec(`UPDATE river_job SET metadata = '{"dlq:done_by": 1}' WHERE state = 'completed'
		AND finalized_at > now() + interval '1 hour'`)
	runSmartRetry()
	require.Zero(t, j.inStatus(deadletter.Processing), "jobs that dlqd completed do not count")
	completed(20, "90 minutes")
	runSmartRetry()
	require.Equal(t, 3, j.inStatus(deadletter.Processing))
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE 'smart retry: 0 of 10 or more jobs of queue jobs in the last 1h0m failed with this error: one of 3 probes'`))
	runSmartRetry()
	require.Equal(t, 3, j.inStatus(deadletter.Processing))
	j.endRedeliveries("completed")
	runSmartRetry()
	j.endRedeliveries("completed")
	require.Equal(t, 10, j.inStatus(deadletter.Resolved), "parked and failed entries")
	require.Equal(t, 2, j.inStatus(deadletter.Manual), "class business is not retried")
	require.Zero(t, j.inStatus(deadletter.Failed))
}

func TestSmartRetry_StopsWhenProbesFail(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": fmt.Sprintf(smartRouting, true)})
	j.failMany(10, "jobs", "TypeError: x")
	j.all()
	j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at) SELECT 'k', '{}', 'jobs', 1,
		'completed', now() + interval '90 minutes' FROM generate_series(1, 50)`)
	j.now = j.now.Add(2 * time.Hour)
	require.NoError(t, j.worker.SmartRetry(t.Context()))
	require.Equal(t, 3, j.inStatus(deadletter.Processing))
	j.endRedeliveries("discarded")
	j.all()
	j.exec("UPDATE dlq.dead_letter_queue SET last_failed_at = $1 WHERE dlq_retry_count = 1", j.now)
	j.gates()
	require.NoError(t, j.worker.SmartRetry(t.Context()))
	require.Zero(t, j.inStatus(deadletter.Processing), "the gate is shut for an hour")
	require.Equal(t, 1, j.count("SELECT count(*) FROM dlq.gates WHERE state = 'shut'"))

	j.reload(policytest.Files{"dlq-routing": fmt.Sprintf(smartRouting, false)})
	j.now = j.now.Add(2 * time.Hour)
	require.NoError(t, j.worker.SmartRetry(t.Context()))
	j.gates()
	require.Zero(t, j.inStatus(deadletter.Processing), "smart retry is off")
}

func TestOrder_RedeliveriesKeepOrder(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{
		"retry-policies": "queues: {stock: {ordering: true}}\ndestinations: {default: {url: 'http://127.0.0.1:1/', " +
			"redeliveriesPerSecond: 0}}\n",
		"dlq-routing": "strategies: {immediate: {jitter: 0}}\n",
	})
	for n := range 3 {
		j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ('dlqd_message', jsonb_build_object('kind', 'k', 'orderingKey', 'A-81', 'messageId', 'm' || $1::text),
				'stock', 1, 'running')`, fmt.Sprint(n))
	}
	j.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at) SELECT 'stock', 'A-81', id,
		created_at FROM river_job ORDER BY id`)
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1, errors = ARRAY['{"error": "connection refused", "attempt": 1}'::jsonb]`)
	j.all()
	var order []string
	for range 3 {
		j.now = j.now.Add(10 * time.Minute)
		j.all()
		require.Equal(t, 1, j.inStatus(deadletter.Processing), "one at a time")
		var id string
		require.NoError(t, j.pool.QueryRow(t.Context(), `SELECT event_id FROM dlq.dead_letter_open
			WHERE status = 'dlq_processing'`).Scan(&id))
		order = append(order, id)
		j.endRedeliveries("completed")
	}
	require.Equal(t, []string{"m0", "m1", "m2"}, order)
	require.Zero(t, j.count("SELECT count(*) FROM dlq.ordered_jobs"), "closed entries leave the order")
}

// A closed entry leaves the order, so that the next entry can go. A replay or reopening restores the entry's place.
func TestOrder_ReplayAndReopenRestorePlace(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	for n := range 4 {
		j.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ('dlqd_message', jsonb_build_object('kind', 'k', 'orderingKey', 'A-81', 'messageId', 'm' || $1::text),
				'stock', 1, 'running')`, fmt.Sprint(n))
	}
	j.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at) SELECT 'stock', 'A-81', id,
		created_at FROM river_job ORDER BY id`)
	// The jobs fail in a different order than they were submitted; their entries close as failed.
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() - id * interval '1 s', attempt = 1, errors = ARRAY['{"error": "connection refused", "attempt": 1}'::jsonb]`)
	j.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	j.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1")
	entry := func(n int) string {
		var id string
		require.NoError(t, j.pool.QueryRow(t.Context(), "SELECT id FROM dlq.dead_letter_queue WHERE event_id = 'm' || $1",
			fmt.Sprint(n)).Scan(&id))
		return id
	}
	for n := range 3 {
		j.exec("SELECT dlq.replay($1, 'kim')", entry(n))
		j.endRedeliveries("discarded")
	}
	require.Equal(t, 3, j.inStatus(deadletter.Failed))
	before := func(job string) int {
		return j.count("SELECT coalesce(dlq.order_predecessor('stock', 'A-81', id, created_at), 0) FROM river_job "+
			"WHERE id = ("+job+")", entry(2))
	}
	original := "SELECT river_job_id FROM dlq.dead_letter_queue WHERE event_id = 'm3' AND $1::text <> ''"
	require.Zero(t, before(original), "failed entries do not block later ones")

	for _, n := range []int{2, 0, 1} {
		j.exec("SELECT dlq.replay($1, 'kim')", entry(n))
	}
	redelivery := "SELECT redelivery_job_id FROM dlq.dead_letter_queue WHERE id = $1::uuid"
	require.Equal(t, j.count("SELECT river_job_id FROM dlq.dead_letter_queue WHERE event_id = 'm0'"), before(redelivery))
	require.NotZero(t, before(original))
	// Hold the redeliveries after that of m0. Each redelivery that completes releases the next one.
	j.exec(`UPDATE river_job SET state = 'scheduled', scheduled_at = now() + interval '1 hour',
		metadata = metadata || '{"dlq:held": "order"}' WHERE state = 'available' AND args ->> 'messageId' <> 'm0'`)
	j.endRedeliveries("completed")
	require.Equal(t, 1, j.count(
		"SELECT count(*) FROM river_job WHERE state = 'available' AND args ->> 'messageId' = 'm1'"))
	j.endRedeliveries("completed")
	require.Zero(t, before(redelivery))
	j.endRedeliveries("completed")
	require.Equal(t, 3, j.inStatus(deadletter.Resolved))
	j.exec("SELECT dlq.reopen($1)", entry(2))
	require.NotZero(t, before(original), "a reopened entry has its place again")
}

// If the gate of one queue fails transiently, Gates still releases the entries of the queues after it.
func TestGate_FailingQueueDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{
		"dlq-routing": "redeliveriesPerSecond: 0\n", "retry-policies": "destinationDefaults: {redeliveriesPerSecond: 0}\n",
	})
	j.conditions.set("x")
	j.failMany(2, "a", outage)
	j.failMany(2, "b", outage)
	j.all()
	j.passDelay()
	j.exec(`CREATE FUNCTION away() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.queue = 'a' THEN RAISE EXCEPTION
		USING ERRCODE = '40001'; END IF; RETURN NEW; END $$`)
	j.exec("CREATE TRIGGER away BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION away()")
	j.conditions.set("")
	require.ErrorContains(t, j.worker.Gates(t.Context()), "gate of queue a")
	require.Equal(t, 2, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'
		AND queue = 'b'`))
}

// Each stage reports its steps, including failed ones, and their results.
func TestWorker_ReportsEachStage(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{
		"dlq-routing": "redeliveriesPerSecond: 5\n", "retry-policies": "destinationDefaults: {redeliveriesPerSecond: 5}\n",
	})
	entries, steps := map[string]int{}, map[string]int{}
	take := func() (map[string]int, map[string]int) {
		e, s := entries, steps
		entries, steps = map[string]int{}, map[string]int{}
		return e, s
	}
	j.worker = worker.New(worker.Config{
		Store: j.store, Planner: j.planner.Load, Logger: slog.New(slog.DiscardHandler),
		Name: "test", Now: func() time.Time { return j.now },
		Observe: func(action string, n int, _ time.Duration) { entries[action] += n },
		ObserveStage: func(stage string, took time.Duration, err error) {
			require.Positive(t, took)
			outcome := " ok"
			if err != nil {
				outcome = " error"
			}
			steps[stage+outcome]++
		},
	})
	j.conditions.set("x")
	j.failMany(2, "a", outage)
	j.file()
	done, made := take()
	require.Equal(t, map[string]int{"filed": 2, "decided": 2}, done)
	require.Equal(t, map[string]int{"decision ok": 1}, made)
	j.now = j.now.Add(2 * time.Minute)
	j.once()
	done, made = take()
	require.Equal(t, map[string]int{"claimed": 2, "put_off": 2}, done)
	require.Equal(t, 1, made["claim ok"])
	j.conditions.set("")
	j.gates()
	done, made = take()
	require.Equal(t, map[string]int{"released": 2, "redelivered": 2}, done)
	require.Equal(t, map[string]int{"gate ok": 1}, made)
	j.endRedeliveries("discarded")
	j.once()
	done, made = take()
	require.Equal(t, 2, done["decided"])
	require.Equal(t, 1, made["decision ok"])

	// Next: entries that get a place in a pace, and stages that fail.
	j.failMany(1, "b", "connection refused")
	j.file()
	j.now = j.now.Add(10 * time.Minute)
	j.once()
	done, made = take()
	require.Equal(t, 3, done["placed"])
	require.Equal(t, 2, made["pace ok"], "one per queue")
	j.conditions.set("x")
	j.failMany(1, "c", outage)
	j.file()
	j.now = j.now.Add(2 * time.Minute)
	j.once()
	j.conditions.set("")
	j.exec(`CREATE FUNCTION away() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION
		USING ERRCODE = '40001'; END $$`)
	j.exec("CREATE TRIGGER away BEFORE INSERT ON dlq.gates FOR EACH ROW EXECUTE FUNCTION away()")
	require.Error(t, j.worker.Gates(t.Context()))
	_, made = take()
	require.Equal(t, 1, made["gate error"])
	j.exec("ALTER TABLE dlq.paces RENAME TO gone")
	j.failMany(1, "b", "connection refused")
	j.file()
	j.now = j.now.Add(10 * time.Minute)
	_, err := j.worker.RunOnce(t.Context())
	require.Error(t, err)
	_, made = take()
	require.Positive(t, made["pace error"])
}

// Rules see the payload and headers of a message, and the args of an application's job. They do not
// see data that is too large.
func TestRules_MatchPayloadAndHeaders(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": `rules: [{name: large, match: {when: 'payload.amount > 10000 && (kind == "k" || headers["x-region"] == "eu")'}, class: business}]`})
	exact := `{"amount": 20000, "list": [` + strings.Repeat(`"x", `, 12_000) + `0]}` // stored as JSON beside its text
	text, err := json.Marshal(exact)
	require.NoError(t, err)
	for _, test := range []struct{ kind, args, rule string }{
		{"k", `{"amount": 20000}`, "large"},
		{"dlqd_message", `{"kind": "paid", "messageId": "m3", "payload": ` + exact + `, "payloadText": ` + string(text) +
			`, "headers": {"X-Region": "eu"}}`, "large"},
		{"k", `{"amount": 200}`, "transport"},
		{
			"dlqd_message", `{"kind": "paid", "messageId": "m1", "payload": {"amount": 20000}, "headers": {"X-Region": "eu"}}`,
			"large",
		},
		{
			"dlqd_message", `{"kind": "paid", "messageId": "m2", "payload": {"amount": 20000}, "headers": {"X-Region": "us"}}`,
			"transport",
		},
		{"k", `{"amount": 20000, "note": "` + strings.Repeat("x", 200_000) + `"}`, "transport"},
	} {
		j.exec(`INSERT INTO river_job (kind, args, max_attempts) VALUES ($1, $2, 3)`, test.kind, test.args)
		j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3,
			errors = ARRAY['{"error": "TIMEOUT_ERROR", "attempt": 3}'::jsonb] WHERE state = 'available'`)
		j.all()
		j.file()
		require.Equal(t, test.rule, j.one("SELECT rule FROM dlq.dead_letter_open ORDER BY id DESC LIMIT 1"),
			"%.80s", test.args)
	}
	// Reclassification uses the payload that the next redelivery sends.
	j.exec(`UPDATE dlq.dead_letter_queue SET edited_event = '{"amount": 5}' WHERE kind = 'k' AND rule = 'large'`)
	result, err := worker.Reclassify(t.Context(), j.store, j.planner.Load(), deadletter.Act{Actor: "kim"}, false)
	require.NoError(t, err)
	require.Len(t, result.Changed, 1)
	require.Equal(t, "transport", result.Changed[0].To.Rule)
}

// A destination's Retry-After is respected by every strategy.
func TestRetryAfter_AppliesToEveryStrategy(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	for _, status := range []int{500, 503, 429} {
		j.exec(`INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 3)`)
		j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3,
			errors = ARRAY['{"error": "x", "attempt": 3}'::jsonb],
			metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 3, 'message', 'x', 'code', $1::text,
				'context', '{"retryAfterSeconds": 86400}'::jsonb)) WHERE state = 'available'`, fmt.Sprint(status))
	}
	j.file()
	require.Equal(t, 3, j.count(`SELECT count(DISTINCT strategy) FROM dlq.dead_letter_open
		WHERE next_retry_at BETWEEN last_failed_at + interval '24 hours' AND last_failed_at + interval '30 hours'`))
}

// Every move of a worker records the policy version that was in force: deferring, parking,
// releasing and redelivering.
func TestConfigVersion_IsRecordedByEveryMove(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	version := 0
	next := func(more string) string {
		version++
		j.reload(policytest.Files{"monitoring": fmt.Sprintf("defaults: {maxOpen: %d}", version), "dlq-routing": more})
		return j.planner.Load().Policy().Version()
	}
	last := func() string {
		return j.one(`SELECT t.config_version || ' ' || t.reason FROM dlq.dead_letter_transitions t
			JOIN dlq.dead_letter_queue e ON e.id = t.entry_id AND e.config_version = t.config_version
			ORDER BY t.id DESC LIMIT 1`)
	}
	j.conditions.set("the moon is up")
	v := next("")
	j.failMany(1, "default", outage)
	j.all()
	require.Contains(t, last(), v)
	v = next("")
	j.passDelay()
	require.Contains(t, last(), v+" waits for the moon is up")
	v = next("")
	j.conditions.set("")
	j.gates()
	require.Contains(t, last(), v+" its conditions are met: one of 1 probes")

	v = next("automatic: {all: {enabled: false}}")
	j.failMany(1, "default", "connection refused")
	j.all()
	require.Contains(t, last(), v)
	v = next("automatic: {all: {enabled: true}}")
	j.now = j.now.Add(time.Hour)
	require.NoError(t, j.worker.Release(t.Context()))
	require.Contains(t, last(), v+" automatic redelivery is on")
	v = next("")
	j.all()
	require.Contains(t, last(), v+" due")
}
