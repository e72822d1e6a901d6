package worker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// maxEntries is the number of entries in one sequence. It is small, so that many events happen to each entry.
const maxEntries = 3

// machinePolicies are the policies of the property test with the model's view of them: the strategy
// of each class, and the maximum number of redeliveries.
var machinePolicies = []struct {
	files      string
	strategies map[string]string
	retries    int
}{
	{
		"redeliveriesPerSecond: 0\nstrategies: {immediate: {maxRetries: 2}, scheduled: {maxRetries: 2}, conditional: " +
			"{maxRetries: 2}}\n",
		map[string]string{
			"transient": "immediate", "rate_limited": "scheduled", "outage": "conditional", "code_bug": "manual",
		},
		2,
	},
	{
		"redeliveriesPerSecond: 0\nclasses: {transient: {strategy: conditional}, outage: {strategy: immediate}, " +
			"rate_limited: {strategy: manual}, code_bug: {strategy: scheduled}}\n" +
			"strategies: {immediate: {maxRetries: 3}, scheduled: {maxRetries: 3}, conditional: {maxRetries: 3}}\n",
		map[string]string{
			"transient": "conditional", "rate_limited": "manual", "outage": "immediate", "code_bug": "scheduled",
		},
		3,
	},
}

var machineErrors = map[string]string{
	"connection refused": "transient", "429 Too Many Requests": "rate_limited",
	"503 Service Unavailable": "outage", "TypeError: x": "code_bug",
}

// modelEntry is the expected state of an entry.
type modelEntry struct {
	job       int64 // first failed job
	status    deadletter.Status
	message   string // of the last error
	undecided bool
	waits     bool // for a condition
	observed  bool // automatic redelivery was off for it when a worker last checked
	parked    bool // parked by an operator, or by a worker for a reason other than the class
	retries   int
	most      int   // maximum redeliveries; 0 before the first decision
	live      int64 // job of the redelivery, while dlq_processing
}

// machine runs the model beside the real database.
type machine struct {
	*bundle

	rt         *rapid.T
	queue      string
	policy     int
	planners   []*strategy.Planner
	current    *atomic.Pointer[strategy.Planner]
	conditions *fakeConditions
	unmet      bool
	off        bool // automatic redelivery is off for this queue
	entries    map[uuid.UUID]*modelEntry
}

func (m *machine) do(sql string, args ...any) {
	_, err := m.pool.Exec(m.Context(), sql, args...)
	require.NoError(m.rt, err, sql)
}

// pick draws an entry in one of some states, nil if there is none.
func (m *machine) pick(states ...deadletter.Status) (uuid.UUID, *modelEntry) {
	var ids []uuid.UUID
	for id, e := range m.entries {
		if len(states) == 0 || slices.Contains(states, e.status) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return uuid.Nil, nil
	}
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
	id := rapid.SampledFrom(ids).Draw(m.rt, "entry")
	return id, m.entries[id]
}

func (m *machine) drawError() string {
	names := make([]string, 0, len(machineErrors))
	for name := range machineErrors {
		names = append(names, name)
	}
	slices.Sort(names)
	return rapid.SampledFrom(names).Draw(m.rt, "error")
}

// end ends a job as River does.
func (m *machine) end(job int64, state, message string) {
	m.do(`UPDATE river_job SET state = $2::river_job_state, finalized_at = now(), attempt = greatest(attempt, 1),
		errors = CASE WHEN $2 = 'completed' THEN errors
			ELSE errors || jsonb_build_object('error', $3::text, 'attempt', greatest(attempt, 1)) END
		WHERE id = $1`, job, state, message)
	m.settle()
}

func (m *machine) capture() {
	if len(m.entries) == maxEntries {
		return
	}
	message := m.drawError()
	var job int64
	require.NoError(m.rt, m.pool.QueryRow(m.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state)
		VALUES ('k', '{}', $1, 3, 'running') RETURNING id`, m.queue).Scan(&job))
	m.end(job, "discarded", message)
	var id uuid.UUID
	require.NoError(m.rt, m.pool.QueryRow(m.Context(), "SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $1",
		job).Scan(&id))
	if rapid.Bool().Draw(m.rt, "an operator acts on it before a worker does") {
		m.do("SELECT dlq.file(ARRAY[$1::uuid])", id)
	}
	m.entries[id] = &modelEntry{job: job, status: deadletter.Pending, message: message, undecided: true}
}

// decide applies the rules in force to an entry.
func (m *machine) decide(e *modelEntry) {
	p := machinePolicies[m.policy]
	name := p.strategies[machineErrors[e.message]]
	e.undecided, e.waits, e.observed = false, false, false
	e.status = deadletter.Pending
	if name == strategy.Manual {
		e.status = deadletter.Manual
		return
	}
	e.most = p.retries
}

// work runs the worker until nothing is left to do at the current time.
func (m *machine) work() {
	if soon := time.Now().Add(time.Second); m.now.Before(soon) {
		m.now = soon // makes returned entries due
	}
	for {
		m.settle()
		filed, err := m.worker.File(m.Context())
		require.NoError(m.rt, err)
		more, err := m.worker.RunOnce(m.Context())
		require.NoError(m.rt, err)
		if !filed && !more && m.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'
			AND waiting_for IS DISTINCT FROM 'automatic' AND next_retry_at <= $1`, m.now) == 0 {
			break
		}
	}
	for id, e := range m.entries {
		if e.status != deadletter.Pending {
			continue
		}
		if e.undecided {
			m.decide(e)
		}
		if e.status != deadletter.Pending {
			continue
		}
		// The time of a redelivery is tested elsewhere. This test checks that an entry is redelivered or
		// deferred, and that a deferred one is not due.
		actual := m.read(id)
		switch {
		case actual.Status == deadletter.Processing && !e.waits:
			require.False(m.rt, m.off || e.observed, "%s was redelivered although automatic redelivery is off", id)
			m.redelivered(id, e)
		case actual.WaitingFor != nil && *actual.WaitingFor == strategy.WaitsForAutomatic:
			require.True(m.rt, m.off || e.observed, "%s is observed although automatic redelivery is on", id)
			e.waits, e.observed = false, true
		case actual.WaitingFor != nil && strategy.WaitsForCondition(*actual.WaitingFor):
			require.True(m.rt, e.waits || m.unmet, "%s waits for %s", id, *actual.WaitingFor)
			e.waits = true
		default:
			require.True(m.rt, actual.NextRetryAt.After(m.now))
		}
	}
}

func (m *machine) redelivered(id uuid.UUID, e *modelEntry) {
	actual := m.read(id)
	require.NotNil(m.rt, actual.RedeliveryJobID, "%s is %s", id, actual.Status)
	e.status, e.live, e.waits, e.observed, e.undecided, e.parked = deadletter.Processing, *actual.RedeliveryJobID,
		false, false, false, false
	e.retries++
}

func (m *machine) read(id uuid.UUID) *deadletter.Entry {
	entry, _, err := m.store.Get(m.Context(), id)
	require.NoError(m.rt, err)
	return entry
}

// gates checks the gates. Other tests check which entries, and how many, a gate releases.
func (m *machine) gates() {
	require.NoError(m.rt, m.worker.Gates(m.Context()))
	for id, e := range m.entries {
		actual := m.read(id)
		if e.waits && actual.WaitingFor != nil && *actual.WaitingFor == strategy.WaitsForAutomatic {
			require.True(m.rt, m.off)
			e.waits, e.observed = false, true
		}
		if e.waits && actual.Status == deadletter.Processing {
			require.False(m.rt, m.off, "%s was released although automatic redelivery is off", id)
			// A different policy may have no conditions for the entry.
			conditional := machinePolicies[m.policy].strategies[machineErrors[e.message]] == strategy.Conditional
			require.False(m.rt, m.unmet && conditional, "%s was released although its conditions are unmet", id)
			m.redelivered(id, e)
		}
	}
}

// flipSwitch switches automatic redelivery for the queue.
func (m *machine) flipSwitch() {
	m.off = !m.off
	m.do("SELECT dlq.set_automatic('queue', $1, $2, p_actor => 'kim')", m.queue, !m.off)
}

// release releases observed entries if automatic redelivery is on for the queue. It redelivers nothing.
func (m *machine) release() {
	require.NoError(m.rt, m.worker.Release(m.Context()))
	for id, e := range m.entries {
		if e.observed {
			actual := m.read(id)
			require.Equal(m.rt, m.off, actual.WaitingFor != nil && *actual.WaitingFor == strategy.WaitsForAutomatic, "%s", id)
			e.observed = m.off
		}
	}
}

func (m *machine) outcome() {
	_, e := m.pick(deadletter.Processing)
	if e == nil {
		return
	}
	state := rapid.SampledFrom([]string{"completed", "discarded", "cancelled"}).Draw(m.rt, "outcome")
	message, live := m.drawError(), e.live
	m.end(live, state, message)
	e.live = 0
	most := e.most
	if most == 0 {
		most = 5 // the column's default
	}
	switch {
	case state == "completed":
		e.status = deadletter.Resolved
	case e.retries >= most:
		e.status, e.message = deadletter.Failed, message
	default:
		e.status, e.message, e.undecided = deadletter.Pending, message, true
	}
	if rapid.Bool().Draw(m.rt, "reported twice") {
		m.do(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id) SELECT m.job_id, m.job_created_at,
			'completed', m.entry_id FROM dlq.entry_jobs m JOIN river_job j ON j.id = m.job_id WHERE j.id = $1
				AND j.state = 'completed'`, live)
	}
}

// operate makes an operator's move, legal or not.
func (m *machine) operate() {
	id, e := m.pick()
	if e == nil {
		return
	}
	verb := rapid.SampledFrom([]string{"replay", "discard", "resolve", "park", "unpark"}).Draw(m.rt, "verb")
	from := map[string][]deadletter.Status{
		"replay":  {deadletter.Pending, deadletter.Manual, deadletter.Failed},
		"discard": {deadletter.Pending, deadletter.Manual, deadletter.Failed},
		"resolve": {deadletter.Manual}, "park": {deadletter.Pending}, "unpark": {deadletter.Manual},
	}[verb]
	act := deadletter.Act{Actor: "kim"}
	var err error
	switch verb {
	case "replay":
		_, err = m.store.Replay(m.Context(), id, deadletter.Replay{Act: act})
	case "discard":
		err = m.store.Discard(m.Context(), id, act)
	case "resolve":
		err = m.store.Resolve(m.Context(), id, act)
	case "park":
		err = m.store.Park(m.Context(), id, act)
	case "unpark":
		err = m.store.Unpark(m.Context(), id, act)
	}
	if !slices.Contains(from, e.status) {
		require.ErrorIs(m.rt, err, deadletter.ErrNotAllowed, "%s from %s", verb, e.status)
		return
	}
	require.NoError(m.rt, err, "%s from %s", verb, e.status)
	e.undecided, e.waits, e.observed, e.parked = false, false, false, false
	switch verb {
	case "replay":
		m.redelivered(id, e)
	case "discard":
		e.status = deadletter.Archived
	case "resolve":
		e.status = deadletter.Resolved
	case "park":
		e.status, e.parked = deadletter.Manual, true
	case "unpark":
		e.status = deadletter.Pending
	}
}

// retryInRiverUI retries the job of an entry as River UI does, but does not increment max_attempts.
func (m *machine) retryInRiverUI() {
	id, e := m.pick(deadletter.Pending, deadletter.Manual, deadletter.Failed)
	if e == nil || m.count("SELECT count(*) FROM river_job WHERE id = $1 AND state = 'discarded'", e.job) == 0 {
		return
	}
	m.do("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", e.job)
	m.settle()
	m.redelivered(id, e)
	require.Equal(m.rt, e.job, e.live)
}

// loseJob deletes the job of a redelivery, and sweeps.
func (m *machine) loseJob() {
	_, e := m.pick(deadletter.Processing)
	if e == nil || e.live == e.job {
		return
	}
	m.do("DELETE FROM river_job WHERE id = $1", e.live)
	_, err := m.store.SweepRedeliveries(m.Context(), uuid.Nil)
	require.NoError(m.rt, err)
	e.status, e.undecided, e.live = deadletter.Pending, true, 0
}

var errAborted = errors.New("aborted")

// abortBatch rolls back a worker's transaction halfway.
func (m *machine) abortBatch() {
	err := m.store.InTx(m.Context(), func(tx postgres.DB) error {
		rows, err := dbsqlc.New(tx).ClaimDue(m.Context(), dbsqlc.ClaimDueParams{Now: &m.now, MaxEntries: 100})
		require.NoError(m.rt, err)
		for i := range rows {
			_, err := m.store.Redeliver(m.Context(), tx, []uuid.UUID{rows[i].ID}, "worker:dead", "due", "")
			require.NoError(m.rt, err)
		}
		return errAborted
	})
	require.ErrorIs(m.rt, err, errAborted)
}

func (m *machine) reload() {
	m.policy = 1 - m.policy
	m.current.Store(m.planners[m.policy])
}

func (m *machine) switchConditions() {
	m.unmet = !m.unmet
	m.conditions.set(map[bool]string{true: "the moon is up", false: ""}[m.unmet])
}

// reclassify judges open entries again by the rules in force.
func (m *machine) reclassify() {
	_, err := worker.Reclassify(m.Context(), m.store, m.current.Load(), deadletter.Act{Actor: "kim"}, false)
	require.NoError(m.rt, err)
	for id, e := range m.entries {
		if (e.status != deadletter.Pending && e.status != deadletter.Manual) || e.undecided || e.parked {
			continue
		}
		// Only a change of class, rule or strategy is written, so an entry may continue to wait.
		actual, was := m.read(id), *e
		m.decide(e)
		e.waits = actual.WaitingFor != nil && strategy.WaitsForCondition(*actual.WaitingFor)
		require.True(m.rt, !e.waits || was.waits)
		e.observed = actual.WaitingFor != nil && *actual.WaitingFor == strategy.WaitsForAutomatic
		require.True(m.rt, !e.observed || was.observed || m.off)
		e.most = int(actual.DLQMaxRetries)
	}
}

// check compares the database with the model and checks the audit trail.
func (m *machine) check(after string) {
	require.Equal(m.rt, len(m.entries), m.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE queue = $1", m.queue),
		"after %s: no entry is lost or doubled", after)
	for id, e := range m.entries {
		entry, transitions, err := m.store.Get(m.Context(), id)
		require.NoError(m.rt, err)
		require.Equal(m.rt, e.status, entry.Status, "after %s: %s", after, id)
		require.Equal(m.rt, e.retries, int(entry.DLQRetryCount), "after %s: %s", after, id)
		require.Equal(m.rt, e.undecided, entry.Status == deadletter.Pending && entry.Strategy == nil,
			"after %s: %s", after, id)
		require.Equal(m.rt, e.parked, entry.ParkedBy != nil, "after %s: %s", after, id)
		if e.live != 0 {
			require.Equal(m.rt, e.live, *entry.RedeliveryJobID)
		}
		if m.count("SELECT count(*) FROM dlq.dead_letter_inbox WHERE id = $1", id) == 1 {
			require.Empty(m.rt, transitions, "after %s: %s is not filed", after, id)
			continue
		}
		// The moves form an unbroken chain from the capture to the current state.
		require.Nil(m.rt, transitions[0].FromStatus)
		at := transitions[0].ToStatus
		for _, move := range transitions[1:] {
			require.Equal(m.rt, at, *move.FromStatus, "after %s: %s", after, id)
			require.NotEmpty(m.rt, move.Actor)
			require.NotNil(m.rt, move.Reason)
			at = move.ToStatus
		}
		require.Equal(m.rt, entry.Status, at, "after %s: %s", after, id)
	}
	require.Equal(m.rt, 0, m.count(`SELECT count(*) FROM dlq.dead_letter_transitions t
		WHERE t.queue = $1 AND t.from_status IS NOT NULL
			AND NOT t.to_status = ANY (dlq.allowed_moves(t.from_status))`, m.queue), "no illegal move")
}

// TestStateMachine runs random sequences of events of dead letters against the real database and a
// model.
func TestStateMachine(t *testing.T) {
	t.Parallel()
	b := setup(t)
	conditions := &fakeConditions{}
	current := &atomic.Pointer[strategy.Planner]{}
	var planners []*strategy.Planner
	for _, p := range machinePolicies {
		planner, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{"dlq-routing": p.files}), conditions)
		require.NoError(t, err)
		planners = append(planners, planner)
	}
	w := worker.New(worker.Config{
		Store: b.store, Planner: current.Load, Logger: slog.New(slog.DiscardHandler),
		Name: "test", BatchSize: 3, Now: func() time.Time { return b.now },
	})
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		b.worker = w
		conditions.set("")
		current.Store(planners[0])
		m := &machine{
			bundle: b, rt: rt, queue: fmt.Sprintf("machine-%d", round), planners: planners,
			current: current, conditions: conditions, entries: map[uuid.UUID]*modelEntry{},
		}
		require.NoError(rt, b.pool.QueryRow(context.WithoutCancel(t.Context()),
			"SELECT clock_timestamp() + interval '20 seconds'").Scan(&b.now))
		actions := map[string]func(){
			"capture": m.capture, "work": m.work, "gates": m.gates, "outcome": m.outcome,
			"operate": m.operate, "retryInRiverUI": m.retryInRiverUI,
			"loseJob": m.loseJob, "abortBatch": m.abortBatch, "reload": m.reload,
			"switchConditions": m.switchConditions, "reclassify": m.reclassify,
			"flipSwitch": m.flipSwitch, "release": m.release,
			"clock": func() {
				b.now = b.now.Add(time.Duration(rapid.Int64Range(1, 26*60).Draw(rt, "minutes")) * time.Minute)
			},
		}
		names := []string{
			"capture", "capture", "work", "work", "work", "gates", "outcome",
			"outcome", "outcome", "operate", "operate", "clock", "clock",
			"retryInRiverUI", "loseJob", "abortBatch", "reload",
			"switchConditions", "reclassify", "flipSwitch", "release", "release",
		}
		for range rapid.IntRange(1, 50).Draw(rt, "steps") {
			name := rapid.SampledFrom(names).Draw(rt, "action")
			actions[name]()
			m.check(name)
		}
		// Close the remaining entries, so that they do not affect the next round.
		m.do("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE finalized_at IS NULL")
		m.do("UPDATE dlq.dead_letter_queue SET status = 'dlq_archived' WHERE status IN ('dlq_pending', 'dlq_manual')")
	})
}
