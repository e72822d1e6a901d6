package breaker_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

const (
	bank    = "destination:default"
	timeout = 30 * time.Second // the timeout of a delivery
)

// bundle is a database with several processes, which share a clock that the test sets.
type bundle struct {
	*testing.T

	pool   *pgxpool.Pool
	policy *policy.Policy

	mu  sync.Mutex
	now time.Time
}

func setup(t *testing.T, breakers string) *bundle {
	t.Helper()
	return &bundle{
		T: t, pool: postgrestest.Pool(t), now: time.Now().Truncate(time.Millisecond),
		policy: policytest.Load(t, policytest.Files{"circuit-breaker": breakers}),
	}
}

func (b *bundle) clock() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

func (b *bundle) pass(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now = b.now.Add(d)
}

// process returns the breakers of a process that has just started.
func (b *bundle) process(name string) *breaker.Breakers {
	b.Helper()
	p := b.breakers(name, b.pool, func() *policy.Policy { return b.policy })
	require.NoError(b, p.Sync(b.Context()))
	return p
}

func (b *bundle) breakers(name string, db postgres.DB, rules func() *policy.Policy) *breaker.Breakers {
	return breaker.New(breaker.Config{
		DB: db, Policy: rules, Actor: name, Logger: slog.New(slog.DiscardHandler), Now: b.clock,
	})
}

// deliver makes a delivery that succeeds or fails, and reports whether the breaker allowed it.
func (b *bundle) deliver(p *breaker.Breakers, ok bool) bool {
	b.Helper()
	permit := b.permit(p)
	if permit == nil {
		return false
	}
	permit.Done(b.Context(), ok)
	return true
}

func (b *bundle) permit(p *breaker.Breakers) *breaker.Permit {
	b.Helper()
	permit, err := p.Allow(b.Context(), "default", timeout)
	require.NoError(b, err)
	return permit
}

func (b *bundle) requireState(p *breaker.Breakers, want breaker.State) {
	b.Helper()
	require.NoError(b, p.Sync(b.Context()))
	state, _ := p.State(bank)
	require.Equal(b, want, state)
}

func TestBreaker_FailureRateOpensItInEveryProcess(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	one, two := b.process("one"), b.process("two")
	for range 4 {
		require.True(t, b.deliver(one, true))
		require.True(t, b.deliver(one, false))
	}
	require.True(t, b.deliver(one, true))
	status, _ := one.Find(bank)
	require.Equal(t, 9, status.Deliveries)
	require.InDelta(t, 44.4, status.FailureRate, 0.5)
	b.requireState(one, breaker.Closed)
	require.True(t, b.deliver(one, false))
	b.requireState(b.process("three"), breaker.Open) // five of ten deliveries failed
	require.NoError(t, two.Sync(t.Context()))
	for _, p := range []*breaker.Breakers{one, two, b.process("restarted")} {
		state, wait := p.State(bank)
		require.Equal(t, breaker.Open, state)
		require.Equal(t, 30*time.Second, wait)
		require.Nil(t, b.permit(p))
	}
}

func TestBreaker_ConsecutiveFailuresOpenIt(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	one, two := b.process("one"), b.process("two")
	for range 1000 {
		require.True(t, b.deliver(one, true))
	}
	for range 2 {
		require.True(t, b.deliver(one, true), "a success ends a row of failures")
		for range 19 {
			require.True(t, b.deliver(one, false))
		}
	}
	b.requireState(one, breaker.Closed)
	require.True(t, b.deliver(one, false))
	state, _ := one.State(bank)
	require.Equal(t, breaker.Open, state, "this process opens it at once")
	status, _ := one.Find(bank)
	require.Equal(t, "20 consecutive failures", status.Reason)
	b.requireState(two, breaker.Open)

	// Half-open: all processes together get ten probes, and no more.
	b.pass(29 * time.Second)
	require.Nil(t, b.permit(two))
	b.pass(time.Second)
	var permits []*breaker.Permit
	for i := range 14 {
		if permit := b.permit([]*breaker.Breakers{one, two}[i%2]); permit != nil {
			permits = append(permits, permit)
		}
	}
	require.Len(t, permits, 10)
	b.requireState(two, breaker.HalfOpen)
	for _, permit := range permits[:7] {
		permit.Done(t.Context(), true)
	}
	permits[7].Done(t.Context(), false)
	permits[8].Done(t.Context(), false)
	b.requireState(one, breaker.HalfOpen)
	permits[9].Done(t.Context(), true) // eight of ten probes succeeded
	b.requireState(one, breaker.Closed)
	b.requireState(two, breaker.Closed)
	require.True(t, b.deliver(one, false), "failures from before it opened do not count")
	b.requireState(one, breaker.Closed)

	rows, err := b.pool.Query(t.Context(), `SELECT coalesce(from_state::text, '-') || ' ' || to_state::text || ' ' || actor
		FROM dlq.circuit_breaker_changes ORDER BY id`)
	require.NoError(t, err)
	var changes []string
	for rows.Next() {
		var c string
		require.NoError(t, rows.Scan(&c))
		changes = append(changes, c)
	}
	require.Equal(t, []string{"- open one", "open half_open one", "half_open closed " + closer(changes)}, changes)
}

// closer returns the name of the process that reported the last probe.
func closer(changes []string) string {
	last := changes[len(changes)-1]
	return last[len(last)-3:]
}

func TestBreaker_FailedProbesReopenIt(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1}")
	p := b.process("one")
	require.True(t, b.deliver(p, false))
	b.pass(30 * time.Second)
	late := b.permit(p)
	for range 3 {
		require.True(t, b.deliver(p, false))
	}
	b.requireState(p, breaker.Open)
	_, wait := p.State(bank)
	require.Equal(t, 30*time.Second, wait)

	// A probe of an earlier half-open period that reports late does not count in the next period.
	b.pass(30 * time.Second)
	require.True(t, b.deliver(p, true))
	late.Done(t.Context(), false)
	status, ok := p.Find(bank)
	require.True(t, ok)
	require.Equal(t, 1, status.ProbesSucceeded)
	require.Zero(t, status.ProbesFailed)

	// If a process dies, its probes lose their places. Outcomes that they reported before still count.
	for b.permit(p) != nil {
	}
	b.pass(39 * time.Second)
	require.Nil(t, b.permit(p))
	b.pass(time.Second)
	for range 7 {
		require.True(t, b.deliver(p, true))
	}
	b.requireState(p, breaker.Closed)
}

func TestBreaker_OperatorOpensAndResets(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p, other := b.process("one"), b.process("two")
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "they asked us to", 0))
	b.requireState(other, breaker.Open)
	b.pass(24 * time.Hour)
	require.Nil(t, b.permit(other), "until it is reset")
	status, _ := other.Find(bank)
	require.True(t, status.Forced)
	require.Equal(t, "kim", status.ChangedBy)
	require.Nil(t, status.OpenUntil)
	was, err := p.Reset(t.Context(), bank, "kim", "")
	require.NoError(t, err)
	require.True(t, was)
	b.requireState(other, breaker.Closed)
	was, err = p.Reset(t.Context(), bank, "kim", "")
	require.NoError(t, err)
	require.False(t, was)

	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "", time.Minute))
	_, wait := p.State(bank)
	require.Equal(t, time.Minute, wait)
	_, found := p.Find("destination:nowhere")
	require.False(t, found)
}

func TestBreaker_OperatorOpensItForATime(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p := breaker.New(breaker.Config{ // Now is not set, so the machine's clock is used
		DB: b.pool, Policy: func() *policy.Policy { return b.policy }, Actor: "one", Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "", time.Hour))
	b.requireState(p, breaker.Open)
	_, wait := p.State(bank)
	require.Greater(t, wait, 50*time.Minute)
	require.LessOrEqual(t, wait, time.Hour)
}

func TestBreaker_DisabledNeverOpens(t *testing.T) {
	t.Parallel()
	b := setup(t, "destinations: {default: {enabled: false}}")
	p := b.process("one")
	for range 100 {
		require.True(t, b.deliver(p, false))
	}
	b.requireState(p, breaker.Closed)
}

func TestBreaker_FailureRateNeedsMinimumCount(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {minimumCount: 10, consecutiveFailures: 0}")
	p := b.process("one")
	for range 9 {
		require.True(t, b.deliver(p, false))
	}
	b.requireState(p, breaker.Closed)
	require.True(t, b.deliver(p, false))
	b.requireState(p, breaker.Open)
}

// Without the database, a process opens a breaker by its own deliveries.
func TestBreaker_OpensWithoutDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2}")
	p := b.process("one")
	ctx, cancel := context.WithCancel(t.Context())
	b.pool.Close()
	for range 2 {
		permit, err := p.Allow(ctx, "default", timeout)
		require.NoError(t, err)
		permit.Done(ctx, false)
	}
	cancel()
	state, wait := p.State(bank)
	require.Equal(t, breaker.Open, state)
	require.Equal(t, 30*time.Second, wait)
	require.Error(t, p.Sync(t.Context()))
}

// failingDB is a database that a test can switch off.
type failingDB struct {
	postgres.DB

	off atomic.Bool
}

func (a *failingDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if a.off.Load() {
		sql = "SELECT 1/0"
		args = nil
	}
	return a.DB.QueryRow(ctx, sql, args...)
}

// If a breaker opens for the first time while the database is unavailable, the process writes the opening afterwards.
// Only then can the breaker become half-open, and an operator can reset it.
func TestBreaker_WritesOpeningAfterDatabaseReturns(t *testing.T) {
	t.Parallel()
	for _, reset := range []bool{false, true} {
		b := setup(t, "defaults: {consecutiveFailures: 2, probes: 1}")
		db := &failingDB{DB: b.pool}
		p := b.breakers("one", db, func() *policy.Policy { return b.policy })
		db.off.Store(true)
		require.True(t, b.deliver(p, false))
		require.True(t, b.deliver(p, false))
		require.Nil(t, b.permit(p))
		b.pass(31 * time.Second)
		db.off.Store(false)
		if reset {
			was, err := p.Reset(t.Context(), bank, "kim", "")
			require.NoError(t, err)
			require.True(t, was)
			b.requireState(p, breaker.Closed)
			b.requireState(b.process("two"), breaker.Closed)
			continue
		}
		require.NoError(t, b.process("three").ForceOpen(t.Context(), "queue:emails", "kim", "", 0))
		b.requireState(p, breaker.Open)
		state, _ := p.State("queue:emails")
		require.Equal(t, breaker.Open, state, "the shared state was read, too")
		b.requireState(b.process("two"), breaker.Open)
		require.True(t, b.deliver(p, true), "a probe")
		b.requireState(p, breaker.Closed)
	}
}

// If a breaker opened while the database was unavailable, and any process has reset the breaker since, the opening is
// not written.
func TestBreaker_LateOpeningDoesNotUndoReset(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2}")
	db := &failingDB{DB: b.pool}
	p := b.breakers("one", db, func() *policy.Policy { return b.policy })
	db.off.Store(true)
	require.True(t, b.deliver(p, false))
	require.True(t, b.deliver(p, false))
	state, _ := p.State(bank)
	require.Equal(t, breaker.Open, state)

	b.pass(time.Second)
	two := b.process("two")
	require.NoError(t, two.ForceOpen(t.Context(), bank, "kim", "", 0))
	was, err := two.Reset(t.Context(), bank, "kim", "the bank is back")
	require.NoError(t, err)
	require.True(t, was)
	db.off.Store(false)
	b.requireState(p, breaker.Closed)
	b.requireState(two, breaker.Closed)
	require.True(t, b.deliver(p, true))
}

// A delivery that began before its breaker opened and fails afterwards does not change the breaker.
func TestBreaker_LateFailureDoesNotOpenIt(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2}")
	p := b.process("one")
	permits := []*breaker.Permit{b.permit(p), b.permit(p), b.permit(p)}
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "the bank is down", 0))
	for _, permit := range permits {
		permit.Done(t.Context(), false)
	}
	status, _ := p.Find(bank)
	require.Equal(t, breaker.Open, status.State)
	require.True(t, status.Forced)
	require.Nil(t, status.OpenUntil, "open until it is reset")
	require.Equal(t, "kim", status.ChangedBy)
}

// An operator opens a breaker. Then a process that does not know this yet opens the same breaker. The operator's
// opening stays in force.
func TestBreaker_OperatorsOpeningOverridesProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2}")
	one, two := b.process("one"), b.process("two")
	require.NoError(t, one.ForceOpen(t.Context(), bank, "kim", "the bank is down", 0))
	require.True(t, b.deliver(two, false))
	require.True(t, b.deliver(two, false))
	b.pass(time.Hour)
	for _, p := range []*breaker.Breakers{one, two, b.process("three")} {
		b.requireState(p, breaker.Open)
		require.Nil(t, b.permit(p), "until it is reset")
		status, _ := p.Find(bank)
		require.True(t, status.Forced)
		require.Equal(t, "kim", status.ChangedBy)
	}
}

// A probe loses its place ten seconds after its timeout, even if the open period is shorter. The outcome of the probe
// still counts.
func TestBreaker_LostProbeFreesItsPlace(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 2, probes: 2, successRate: 100, openFor: 1s}")
	p, other := b.process("one"), b.process("two")
	require.True(t, b.deliver(p, false))
	require.True(t, b.deliver(p, false))
	b.pass(time.Second)
	lost := b.permit(p)
	require.NotNil(t, lost)
	b.pass(30 * time.Second)
	require.True(t, b.deliver(p, true), "the second place")
	require.Nil(t, b.permit(p), "one success is missing, and one probe is running")
	b.requireState(other, breaker.HalfOpen)
	require.Nil(t, b.permit(other))
	b.pass(9 * time.Second)
	require.Nil(t, b.permit(p))
	b.pass(time.Second)
	require.NotNil(t, b.permit(other), "the process that had the probe may have died")
	require.Nil(t, b.permit(p))
	b.requireState(p, breaker.HalfOpen)
	lost.Done(t.Context(), true)
	b.requireState(p, breaker.Closed)
}

// Every held message asks for a permit, so Allow queries the database only if a place may be free.
func TestBreaker_AsksDatabaseOnlyIfAPlaceMayBeFree(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1, probes: 1}")
	db := &failingDB{DB: b.pool}
	p := b.breakers("one", db, func() *policy.Policy { return b.policy })
	require.True(t, b.deliver(p, false))
	b.pass(31 * time.Second)
	require.NotNil(t, b.permit(p))
	b.requireState(p, breaker.HalfOpen)
	db.off.Store(true)
	require.Nil(t, b.permit(p), "the probe runs")
	b.pass(time.Minute)
	_, err := p.Allow(t.Context(), "default", timeout)
	require.Error(t, err, "the probe has lost its place")
}

// If a change of the policy allows fewer probes than have reported already, one more probe is allowed, and its outcome
// decides.
func TestBreaker_LoweredProbesLeaveOnePlace(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1}")
	p := b.process("one")
	require.True(t, b.deliver(p, false))
	b.pass(time.Minute)
	for range 3 {
		require.True(t, b.deliver(p, true))
	}
	b.policy = policytest.Load(t, policytest.Files{"circuit-breaker": "defaults: {consecutiveFailures: 1, probes: 2}"})
	require.True(t, b.deliver(p, true))
	b.requireState(p, breaker.Closed)
}

// Only a failed delivery opens the breaker, by the failure rate in the window at that time.
func TestBreaker_SuccessDoesNotOpenIt(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p := b.process("one")
	for range 5 {
		require.True(t, b.deliver(p, false))
	}
	for range 5 {
		require.True(t, b.deliver(p, true)) // the tenth delivery: half have failed
	}
	b.requireState(p, breaker.Closed)
	for range 10_000 {
		require.True(t, b.deliver(p, true))
	}
	require.True(t, b.deliver(p, false))
	b.requireState(p, breaker.Closed)
	status, _ := p.Find(bank)
	require.Equal(t, 10_011, status.Deliveries)
}

func TestBreaker_ResetReportsWhetherItWasOpen(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	p := b.process("one")
	require.NoError(t, p.ForceOpen(t.Context(), bank, "kim", "", 0))
	for _, want := range []bool{true, false} {
		was, err := p.Reset(t.Context(), bank, "kim", "")
		require.NoError(t, err)
		require.Equal(t, want, was)
	}
}

func TestBreaker_WithoutConsecutiveFailuresOnlyTheRateOpensIt(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 0, minimumCount: 10}")
	p := b.process("one")
	for range 9 {
		require.True(t, b.deliver(p, false))
	}
	b.requireState(p, breaker.Closed)
	require.True(t, b.deliver(p, false))
	b.requireState(p, breaker.Open)
}

// The outcome of a delivery that cannot be stored is logged.
func TestPermit_LogsErrors(t *testing.T) {
	t.Parallel()
	b := setup(t, "defaults: {consecutiveFailures: 1}")
	var log strings.Builder
	p := breaker.New(breaker.Config{
		DB: b.pool, Policy: func() *policy.Policy { return b.policy }, Actor: "one",
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	require.True(t, b.deliver(p, true))
	require.Empty(t, log.String())
	b.pool.Close()
	require.True(t, b.deliver(p, false))
	require.Contains(t, log.String(), "storing the outcome of a delivery failed")
}

type appArgs struct {
	Fail bool `json:"fail"`
}

func (appArgs) Kind() string { return "app" }

// A breaker that opens pauses the queue, so the application's own River client fetches no more jobs from it.
func TestQueues_PauseAndResumeRiverQueue(t *testing.T) {
	t.Parallel()
	b := setup(t, "riverQueues: {emails: {minimumCount: 4, probes: 3, openFor: 10s}}")
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[appArgs]) error {
		if job.Args.Fail {
			return errors.New("smtp: connection refused")
		}
		return nil
	}))
	logger := slog.New(slog.DiscardHandler)
	client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{
		Queues: map[string]river.QueueConfig{"emails": {MaxWorkers: 5}}, Workers: workers, Logger: logger,
		FetchCooldown: time.Millisecond, FetchPollInterval: 10 * time.Millisecond, TestOnly: true,
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(t.Context()))
	t.Cleanup(func() { require.NoError(t, client.Stop(context.Background())) })

	p := b.process("one")
	watch := &breaker.Queues{Pool: b.pool, Schemas: postgres.DefaultSchemas(), River: client, Breakers: p}
	insert := func(n int, fail bool) {
		for range n {
			_, err := client.Insert(t.Context(), appArgs{fail}, &river.InsertOpts{Queue: "emails", MaxAttempts: 1})
			require.NoError(t, err)
		}
	}
	count := func(states string) int {
		var n int
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM river_job
			WHERE state::text = ANY (string_to_array($1, ','))`, states).Scan(&n))
		return n
	}
	paused := func() bool {
		queue, err := client.QueueGet(t.Context(), "emails")
		require.NoError(t, err)
		return queue.PausedAt != nil
	}
	// awaitState runs the check until the breaker is in the wanted state, because jobs end asynchronously.
	awaitState := func(want breaker.State) {
		require.Eventually(t, func() bool {
			require.NoError(t, watch.RunOnce(t.Context()))
			require.NoError(t, p.Sync(t.Context()))
			state, _ := p.State("queue:emails")
			return state == want
		}, 5*time.Minute, 50*time.Millisecond)
	}

	insert(3, true)
	require.Eventually(t, func() bool { return count("discarded") == 3 }, 5*time.Minute, 50*time.Millisecond)
	require.NoError(t, watch.RunOnce(t.Context()))
	require.False(t, paused(), "three are too few")
	insert(1, true)
	require.Eventually(t, func() bool { return count("discarded") == 4 }, 5*time.Minute, 50*time.Millisecond)
	awaitState(breaker.Open)
	require.True(t, paused())

	// Half-open: jobs still fail, and the breaker opens again.
	b.pass(10 * time.Second)
	b.exec(t, "UPDATE river_job SET finalized_at = finalized_at - interval '1 hour' WHERE finalized_at IS NOT NULL")
	b.setNow(time.Now())
	b.exec(t, "UPDATE dlq.circuit_breakers SET open_until = $1", b.clock())
	awaitState(breaker.HalfOpen)
	require.False(t, paused())
	// Jobs that dlqd completed are not probes of the queue.
	b.exec(t, `INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at, metadata)
		SELECT 'app', '{}', 'emails', 1, 'completed', now() + interval '1 minute', '{"dlq:done_by": 1}'
		FROM generate_series(1, 10)`)
	awaitState(breaker.HalfOpen)
	b.exec(t, "DELETE FROM river_job WHERE state = 'completed'")
	insert(3, true)
	require.Eventually(t, func() bool { return count("discarded") == 7 }, 5*time.Minute, 50*time.Millisecond)
	awaitState(breaker.Open)
	require.True(t, paused())

	// Half-open: jobs succeed, and the breaker closes.
	b.exec(t, "UPDATE river_job SET finalized_at = finalized_at - interval '1 hour' WHERE finalized_at IS NOT NULL")
	b.setNow(time.Now())
	b.exec(t, "UPDATE dlq.circuit_breakers SET open_until = $1", b.clock())
	awaitState(breaker.HalfOpen)
	insert(3, false)
	require.Eventually(t, func() bool { return count("completed") == 3 }, 5*time.Minute, 50*time.Millisecond)
	awaitState(breaker.Closed)
	require.False(t, paused())

	// An operator opens the breaker and resets it.
	require.NoError(t, p.ForceOpen(t.Context(), "queue:emails", "kim", "", 0))
	require.NoError(t, watch.RunOnce(t.Context()))
	require.True(t, paused())
	_, err = p.Reset(t.Context(), "queue:emails", "kim", "")
	require.NoError(t, err)
	require.NoError(t, watch.RunOnce(t.Context()))
	require.False(t, paused())

	// A queue that an operator paused stays paused.
	require.NoError(t, client.QueuePause(t.Context(), "emails", nil))
	require.NoError(t, p.ForceOpen(t.Context(), "queue:emails", "kim", "", 0))
	require.NoError(t, watch.RunOnce(t.Context()))
	_, err = p.Reset(t.Context(), "queue:emails", "kim", "")
	require.NoError(t, err)
	require.NoError(t, watch.RunOnce(t.Context()))
	require.True(t, paused())
}

// Failures from before a reset do not count again. Jobs that an operator cancelled do not count as failures.
func TestQueues_CountFailuresOnce(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {minimumCount: 4}}", "emails")
	end := func(state, metadata string) {
		b.exec(t, `INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at, metadata)
			SELECT 'app', '{}', 'emails', 1, $1::river_job_state, $2, $3::jsonb FROM generate_series(1, 4)`,
			state, b.clock(), metadata)
	}
	end("cancelled", `{"cancel_attempted_at": "2026-01-01T00:00:00Z"}`)
	b.requireQueue("emails", breaker.Closed, false)
	end("discarded", "{}")
	b.requireQueue("emails", breaker.Open, true)
	b.pass(time.Second)
	_, err := b.process.Reset(t.Context(), "queue:emails", "kim", "")
	require.NoError(t, err)
	b.requireQueue("emails", breaker.Closed, false)
	b.requireQueue("emails", breaker.Closed, false)
	b.pass(time.Second)
	end("discarded", "{}")
	b.requireQueue("emails", breaker.Open, true)
}

// If the policy no longer names a queue that its breaker paused, the queue is resumed. If an operator opened the
// breaker, it stays open until an operator resets it.
func TestQueues_ResumeQueueThatPolicyNoLongerNames(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {emails: {}, sms: {}}", "emails", "sms")
	b.exec(t, "SELECT dlq.open_breaker('queue:emails', 'one', 'it fails', '10 s', false, $1)", b.clock())
	require.NoError(t, b.process.ForceOpen(t.Context(), "queue:sms", "kim", "", 0))
	b.requireQueue("emails", breaker.Open, true)
	b.requireQueue("sms", breaker.Open, true)

	b.policy = policytest.Load(t, nil)
	b.requireQueue("emails", breaker.Closed, false)
	b.requireQueue("sms", breaker.Open, true)
	status, _ := b.process.Find("queue:emails")
	require.Equal(t, "the policy no longer names the queue", status.Reason)

	_, err := b.process.Reset(t.Context(), "queue:sms", "kim", "")
	require.NoError(t, err)
	b.requireQueue("sms", breaker.Closed, false)
	require.NoError(t, b.watch.RunOnce(t.Context()))
}

// The error of RunOnce names the queue. RunOnce still checks the other queues.
func TestQueues_CheckOthersAfterAnError(t *testing.T) {
	t.Parallel()
	b := setupQueues(t, "riverQueues: {broken: {minimumCount: 1}, emails: {minimumCount: 1}}", "broken", "emails")
	b.exec(t, "ALTER TABLE dlq.circuit_breakers ADD CONSTRAINT works CHECK (name <> 'queue:broken')")
	b.exec(t, `INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at)
		SELECT 'app', '{}', q, 1, 'discarded', $1 FROM unnest(ARRAY['broken', 'emails']) q`, b.clock())
	require.ErrorContains(t, b.watch.RunOnce(t.Context()), "queue broken: ")
	require.NoError(t, b.process.Sync(t.Context()))
	state, _ := b.process.State("queue:emails")
	require.Equal(t, breaker.Open, state)

	// The policy no longer names the queues. The breaker of emails closes, although the breaker of broken cannot be
	// written.
	b.exec(t, "ALTER TABLE dlq.circuit_breakers DROP CONSTRAINT works")
	b.requireQueue("broken", breaker.Open, true)
	b.exec(t, "ALTER TABLE dlq.circuit_breakers ADD CHECK (name <> 'queue:broken') NOT VALID")
	b.policy = policytest.Load(t, nil)
	require.ErrorContains(t, b.watch.RunOnce(t.Context()), "queue broken: ")
	require.NoError(t, b.process.Sync(t.Context()))
	state, _ = b.process.State("queue:emails")
	require.Equal(t, breaker.Closed, state)
}

// queues is a bundle with River queues that no client works, and with one process that checks their breakers.
type queues struct {
	*bundle

	client  *river.Client[pgx.Tx]
	process *breaker.Breakers
	watch   *breaker.Queues
}

func setupQueues(t *testing.T, breakers string, names ...string) *queues {
	t.Helper()
	b := setup(t, breakers)
	client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{
		Logger: slog.New(slog.DiscardHandler), TestOnly: true,
	})
	require.NoError(t, err)
	for _, name := range names {
		b.exec(t, "INSERT INTO river_queue (name, created_at, updated_at) VALUES ($1, now(), now())", name)
	}
	q := &queues{bundle: b, client: client, process: b.process("one")}
	q.watch = &breaker.Queues{Pool: b.pool, Schemas: postgres.DefaultSchemas(), River: client, Breakers: q.process}
	return q
}

// requireQueue checks the queues once. It requires that the breaker of one queue has the state want, and that the queue
// is paused or not.
func (q *queues) requireQueue(name string, want breaker.State, paused bool) {
	q.Helper()
	require.NoError(q, q.watch.RunOnce(q.Context()))
	require.NoError(q, q.process.Sync(q.Context()))
	state, _ := q.process.State(breaker.QueuePrefix + name)
	require.Equal(q, want, state)
	queue, err := q.client.QueueGet(q.Context(), name)
	require.NoError(q, err)
	require.Equal(q, paused, queue.PausedAt != nil)
}

func (b *bundle) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func (b *bundle) setNow(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now = now
}
