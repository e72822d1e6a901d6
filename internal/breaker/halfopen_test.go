package breaker_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

// There is a delivery only every 40 s, which is longer than openFor. Eight of ten probes have to succeed. Each delivery
// succeeds, so the eighth one closes the breaker.
func TestBreaker_ClosesAtLowTraffic(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1}")
	one, two := b.process("one"), b.process("two")
	require.True(t, b.deliver(one, false))
	for i := range 8 {
		b.pass(40 * time.Second)
		p := []*breaker.Breakers{one, two}[i%2]
		require.NoError(t, p.Sync(t.Context()))
		state, _ := p.State(bank)
		require.NotEqual(t, breaker.Closed, state, "after %d successes", i)
		require.True(t, b.deliver(p, true), "after %d successes", i)
	}
	b.requireState(one, breaker.Closed)
	b.requireState(two, breaker.Closed)
}

// walk is a breaker whose destination works again, on a clock that the test sets. Deliveries come at random intervals
// and take random times. Some probes never report, as if their process had died.
type walk struct {
	*bundle

	name              string
	settings          policy.Breaker
	timeout           time.Duration
	gap               time.Duration // between deliveries
	lost              float64       // share of probes that never report
	failing           int           // probes that fail before the destination works again
	random            *rand.Rand
	processes         []*breaker.Breakers
	inFlight          []probe
	lastAllowed       time.Time // when the breaker last allowed a probe, or opened
	reported, allowed int
}

// probe is a delivery that a half-open breaker allowed.
type probe struct {
	permit *breaker.Permit
	began  time.Time
	ends   time.Time // when the probe reports; zero if it never does
	ok     bool
	epoch  int64
}

func (w *walk) epoch() (epoch int64, state breaker.State) {
	w.Helper()
	row := w.pool.QueryRow(w.Context(), "SELECT epoch, state FROM dlq.circuit_breakers WHERE name = $1", w.name)
	require.NoError(w, row.Scan(&epoch, &state))
	return epoch, state
}

// outcomes returns how many probes have succeeded in this half-open period, and how many have reported.
func (w *walk) outcomes() (succeeded, ended int) {
	w.Helper()
	row := w.pool.QueryRow(w.Context(),
		"SELECT probes_succeeded, probes_succeeded + probes_failed FROM dlq.circuit_breakers WHERE name = $1", w.name)
	require.NoError(w, row.Scan(&succeeded, &ended))
	return succeeded, ended
}

// report reports the outcomes of the probes that have ended by now, in the order of their ends.
func (w *walk) report() {
	w.Helper()
	slices.SortStableFunc(w.inFlight, func(a, b probe) int { return a.ends.Compare(b.ends) })
	for i := 0; i < len(w.inFlight); {
		p := w.inFlight[i]
		if p.ends.IsZero() || p.ends.After(w.clock()) {
			i++
			continue
		}
		w.inFlight = slices.Delete(w.inFlight, i, i+1)
		before, state := w.epoch()
		_, ended := w.outcomes()
		p.permit.Done(w.Context(), p.ok)
		succeeded, after := w.outcomes()
		now, newState := w.epoch()
		require.Equal(w, before, now, "a report starts no new period")
		if state != breaker.HalfOpen || p.epoch != before {
			require.Equal(w, state, newState, "a probe of an earlier period changes nothing")
			require.Equal(w, ended, after, "a probe of an earlier period is not counted")
			continue
		}
		require.Equal(w, ended+1, after, "the probe is counted")
		w.reported++
		if newState == breaker.Open {
			w.lastAllowed = w.clock()
		}
		if needed := int(float64(w.settings.Probes)*w.settings.SuccessRate/100 + 0.999999); succeeded >= needed {
			require.Equal(w, breaker.Closed, newState, "%d successes of %d needed", succeeded, needed)
		}
	}
}

// runUntilClosed makes deliveries until the breaker is closed.
func (w *walk) runUntilClosed() {
	w.Helper()
	for step := 0; ; step++ {
		require.Less(w, step, 20_000, "the breaker closes")
		w.pass(time.Duration((0.5 + w.random.Float64()) * float64(w.gap)))
		w.report()
		before, state := w.epoch()
		if state == breaker.Closed {
			return
		}
		p := w.processes[w.random.IntN(len(w.processes))]
		require.NoError(w, p.Sync(w.Context())) // as the loop of each process does every second
		permit, err := p.Allow(w.Context(), w.name[len(breaker.DestinationPrefix):], w.timeout)
		require.NoError(w, err)
		now, _ := w.epoch()
		if state == breaker.HalfOpen {
			require.Equal(w, before, now, "only outcomes end a half-open period")
		}
		if permit == nil {
			// Either the breaker is open, or each place belongs to a probe that may still report.
			most := max(w.settings.OpenFor, w.timeout+10*time.Second)
			require.Less(w, w.clock().Sub(w.lastAllowed), most, "a probe is allowed in time")
			continue
		}
		w.lastAllowed = w.clock()
		w.allowed++
		began := probe{permit: permit, began: w.clock(), epoch: now, ok: w.allowed > w.failing}
		if w.random.Float64() >= w.lost {
			began.ends = w.clock().Add(time.Duration(w.random.Float64() * float64(w.timeout)))
		}
		w.inFlight = append(w.inFlight, began)
		held := 0
		for _, u := range w.inFlight {
			if u.epoch == now && w.clock().Sub(u.began) < w.timeout+10*time.Second {
				held++
			}
		}
		require.LessOrEqual(w, held, w.settings.Probes, "no more concurrent probes than places")
	}
}

// A breaker whose destination works again closes after the required successes. It never goes without a probe for longer
// than a probe may take or openFor. This holds at any delivery rate, over two processes, with lost probes.
func TestBreaker_HalfOpenAlwaysEnds(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	b := setup(t, "")
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range 30 {
		gaps := []time.Duration{time.Second, 7 * time.Second, time.Minute, 10 * time.Minute, time.Hour}
		timeouts := []time.Duration{time.Second, 30 * time.Second, 5 * time.Minute}
		w := &walk{
			bundle: b, name: fmt.Sprintf("%scase-%d", breaker.DestinationPrefix, i), random: random,
			gap: gaps[i%len(gaps)], timeout: timeouts[random.IntN(len(timeouts))],
			lost: []float64{0, 0.2, 0.6}[i/len(gaps)%3], failing: random.IntN(8),
		}
		rules := policytest.Load(t, policytest.Files{"circuit-breaker": fmt.Sprintf(
			"defaults: {consecutiveFailures: 1, probes: %d, successRate: %d, openFor: %ds}",
			1+random.IntN(10), 50+random.IntN(51), 1+random.IntN(120))})
		w.settings = rules.Breaker("")
		for _, name := range []string{"one", "two"} {
			p := b.breakers(name, b.pool, func() *policy.Policy { return rules })
			require.NoError(t, p.Sync(t.Context()))
			w.processes = append(w.processes, p)
		}
		permit, err := w.processes[0].Allow(t.Context(), w.name[len(breaker.DestinationPrefix):], w.timeout)
		require.NoError(t, err)
		permit.Done(t.Context(), false)
		w.lastAllowed = b.clock()
		w.runUntilClosed()
		t.Logf("case %d: a delivery each %s, timeout %s, %d probes of which %g %% must succeed, %g lost: "+
			"%d let through, %d counted",
			i, w.gap, w.timeout, w.settings.Probes, w.settings.SuccessRate, w.lost, w.allowed, w.reported)
	}
}

// For a breaker that is not closed, Since is when it was last closed, even if many probes failed since. LastTried is
// when the last probe began.
func TestBreaker_SinceIsWhenItWasLastClosed(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1, probes: 1, openFor: 30s}")
	p := b.process("one")
	status, _ := p.Find(bank)
	require.Equal(t, breaker.Status{Name: bank, State: breaker.Closed}, status, "it has never opened")
	opened := b.clock()
	require.True(t, b.deliver(p, false))
	status, _ = p.Find(bank)
	require.True(t, opened.Equal(*status.Since), "in this process")
	for range 3 {
		b.pass(31 * time.Second)
		require.True(t, b.deliver(p, false))
		status, _ = p.Find(bank)
		require.Equal(t, breaker.Open, status.State)
		require.True(t, opened.Equal(*status.Since), "%s, not %s", opened, status.Since)
		require.True(t, b.clock().Equal(*status.LastTried))
	}
	b.pass(31 * time.Second)
	tried := b.permit(p)
	require.NoError(t, p.Sync(t.Context()))
	status, _ = p.Find(bank)
	require.Equal(t, breaker.HalfOpen, status.State)
	require.True(t, opened.Equal(*status.Since))
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "", 0))
	status, _ = b.process("two").Find(bank)
	require.True(t, opened.Equal(*status.Since), "opening an open breaker does not change since")
	tried.Done(t.Context(), true)
	b.pass(time.Second)
	_, err := p.Reset(t.Context(), bank, "kim", "")
	require.NoError(t, err)
	status, _ = p.Find(bank)
	require.True(t, b.clock().Equal(*status.Since), "closed since the reset")
	require.Nil(t, status.LastTried)
	b.pass(time.Second)
	require.True(t, b.deliver(p, false))
	status, _ = p.Find(bank)
	require.True(t, b.clock().Equal(*status.Since))
	require.Nil(t, status.LastTried)
}

// running inserts a running job into the queue emails.
func (q *queues) running() {
	q.Helper()
	q.exec(q.T, `INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, attempted_at)
		VALUES ('app', '{}', 'emails', 1, 1, 'running', $1)`, q.clock())
}

// end ends all running jobs with the given state.
func (q *queues) end(state string) {
	q.Helper()
	q.exec(q.T, "UPDATE river_job SET state = $1::river_job_state, finalized_at = $2 WHERE state = 'running'",
		state, q.clock())
}

// A half-open River queue stays paused while its jobs run, unless they were snoozed or have run for over a minute.
func TestQueues_HalfOpenAlwaysEnds(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {openFor: 10s}}", "emails")
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	opened := b.clock()
	b.requireQueue("emails", breaker.Open, true)
	b.pass(10 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, false)
	status, _ := b.process.Find("queue:emails")
	require.True(t, opened.Equal(*status.Since))
	require.True(t, b.clock().Equal(*status.LastTried))

	b.running()
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.exec(t, "UPDATE river_job SET state = 'scheduled'")
	b.requireQueue("emails", breaker.HalfOpen, false)

	b.pass(time.Second)
	b.running()
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.pass(69 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.pass(time.Second)
	b.requireQueue("emails", breaker.HalfOpen, false)
	b.end("completed")
	b.requireQueue("emails", breaker.Closed, false)
}

// If a half-open breaker paused its queue and the probe failed, an operator's reset resumes the queue.
func TestQueues_ResetAfterFailedProbe(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {openFor: 10s}}", "emails")
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	b.requireQueue("emails", breaker.Open, true)
	b.pass(10 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, false)
	b.running()
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.end("discarded")
	b.requireQueue("emails", breaker.Open, true)
	b.requireQueue("emails", breaker.Open, true)
	_, err := b.process.Reset(t.Context(), "queue:emails", "kim", "")
	require.NoError(t, err)
	b.requireQueue("emails", breaker.Closed, false)
}

// A queue that an operator paused stays paused through all states of its breaker.
func TestQueues_StayPausedByOperator(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {openFor: 10s}}", "emails")
	b.running()
	require.NoError(t, b.client.QueuePause(t.Context(), "emails", nil))
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	b.requireQueue("emails", breaker.Open, true)
	b.pass(10 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.end("completed")
	b.requireQueue("emails", breaker.Closed, true)
}

// If an operator resumes a paused queue, the queue is not paused again until its breaker changes.
func TestQueues_StayResumedByOperator(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {openFor: 10s}}", "emails")
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	b.requireQueue("emails", breaker.Open, true)
	require.NoError(t, b.client.QueueResume(t.Context(), "emails", nil))
	b.requireQueue("emails", breaker.Open, false)
	b.pass(10 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, false)
	b.running()
	b.requireQueue("emails", breaker.HalfOpen, true)
	require.NoError(t, b.client.QueueResume(t.Context(), "emails", nil))
	b.requireQueue("emails", breaker.HalfOpen, false)
}

func TestQueues_ResumeWhenProbesSucceed(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {openFor: 10s}}", "emails")
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	b.requireQueue("emails", breaker.Open, true)
	b.pass(10 * time.Second)
	b.requireQueue("emails", breaker.HalfOpen, false)
	b.running()
	b.requireQueue("emails", breaker.HalfOpen, true)
	b.end("completed")
	b.requireQueue("emails", breaker.Closed, false)
}

// While another process evaluates the breaker of a queue, nothing changes.
func TestQueues_AreEvaluatedByOneProcess(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {minimumCount: 1}}", "emails")
	whileLocked := func(want breaker.State, paused bool) {
		t.Helper()
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(),
			"SELECT pg_advisory_xact_lock(hashtextextended('dlq.queue_breaker queue:emails', 0))")
		require.NoError(t, err)
		b.requireQueue("emails", want, paused)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	b.running()
	b.end("discarded")
	whileLocked(breaker.Closed, false)
	b.requireQueue("emails", breaker.Open, true)
	b.policy = policytest.Load(t, nil)
	whileLocked(breaker.Open, true)
	b.requireQueue("emails", breaker.Closed, false)
}
