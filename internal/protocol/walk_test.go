package protocol_test

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/protocol"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

const (
	traces   = 500
	maxSteps = 35
	// leastTaken is how often each rule must be taken at least. While a rule was taken less often, further traces follow,
	// up to maxTraces in all.
	leastTaken = 20
	maxTraces  = 2 * traces
	minSteps   = 15
	databases  = 2
)

// Random traces of the model run on a real Postgres. After each step, the database and the model have the same state.
// DLQD_WALK_SEED selects other traces.
func TestProtocol_DatabaseMatchesModel(t *testing.T) {
	t.Parallel()
	seed := uint64(1) // the same traces in each run, so that a failure points to a change of the code
	if set, err := strconv.ParseUint(os.Getenv("DLQD_WALK_SEED"), 10, 64); err == nil {
		seed = set
	}
	t.Logf("DLQD_WALK_SEED=%d", seed)
	var mu sync.Mutex
	taken := map[protocol.Rule]int{}
	kills := 0
	missing := func() bool {
		mu.Lock()
		defer mu.Unlock()
		for rule := range protocol.AllRules() {
			if taken[rule] < leastTaken {
				return true
			}
		}
		return false
	}
	outer := t
	t.Run("traces", func(t *testing.T) {
		for n := range databases {
			t.Run(strconv.Itoa(n), func(t *testing.T) {
				t.Parallel()
				d := newDatabase(t)
				for trace := n; !outer.Failed() && (trace < traces || trace < maxTraces && missing()); trace += databases {
					n, of := d.walk(rand.New(rand.NewPCG(seed, uint64(trace))), trace)
					mu.Lock()
					kills += n
					for rule, times := range of {
						taken[rule] += times
					}
					mu.Unlock()
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	for rule := range protocol.AllRules() {
		require.GreaterOrEqual(t, taken[rule], leastTaken, "%s was taken %d times", rule, taken[rule])
	}
	t.Logf("%v; %d killed", taken, kills)
}

// walk takes the trace with the number trace. It returns how many sessions it terminated, and how often it took each
// rule.
func (d *database) walk(random *rand.Rand, trace int) (kills int, taken map[protocol.Rule]int) {
	d.Helper()
	taken = map[protocol.Rule]int{}
	c := newChooser(random)
	d.begin(c.model)
	// Each sequence of rare is the beginning of one of the first traces, and of some later ones.
	if trace < len(rare) || random.IntN(20) == 0 {
		for _, step := range rare[trace%len(rare)] {
			taken[d.take(step, false).Rule]++
		}
	}
	held := 0
	for range minSteps + random.IntN(maxSteps-minSteps) {
		c.state = d.state
		if d.scan == nil && random.IntN(3) == 0 && !c.can(protocol.Scan) {
			d.scanFindsNothing()
		}
		step, ok := c.choose(held >= 2)
		if !ok {
			break
		}
		kill := random.IntN(25) == 0 && step.Rule != protocol.CrashWorker && d.scan == nil && step.Rule != protocol.Scan
		step = d.take(step, kill)
		if kill {
			kills++
		} else {
			taken[step.Rule]++
		}
		held++
		if d.scan == nil {
			held = 0
		}
	}
	if d.scan != nil {
		d.take(protocol.Step{Rule: protocol.Append}, false)
	}
	require.GreaterOrEqual(d, len(d.taken), minSteps, d.trace())
	return kills, taken
}

// missed is a job that fails, is retried and fails again. Capture misses the second failure, and
// the reconciler appends it.
var missed = []protocol.Step{
	{Rule: protocol.Insert},
	{Rule: protocol.StartJob},
	{Rule: protocol.Fail},
	{Rule: protocol.RetryJob},
	{Rule: protocol.StartJob},
	{Rule: protocol.Fail, Capture: protocol.Misses},
	{Rule: protocol.Scan},
	{Rule: protocol.Append},
}

// rare lists beginnings of traces that random choices hardly ever produce.
var rare = [][]protocol.Step{
	// A row of the reconciler waits in the inbox. Meanwhile an entry receives the row's failure and is closed.
	slices.Concat(missed, []protocol.Step{
		{Rule: protocol.ApplyFacts},
		{Rule: protocol.Discard},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
	}),
	// A redelivery has resolved an entry. The entry's own job fails again and gets another entry. Then the redelivery is
	// retried.
	{
		{Rule: protocol.Insert},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
		{Rule: protocol.Replay},
		{Rule: protocol.StartJob, On: 1},
		{Rule: protocol.Complete, On: 1},
		{Rule: protocol.ApplyFacts},
		{Rule: protocol.RetryJob, Capture: protocol.Misses},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
		{Rule: protocol.RetryJob, On: 1},
		{Rule: protocol.ApplyFacts},
	},
	// The job's earlier entry begins to follow the job. The job has already ended, and its later failure has another
	// entry.
	slices.Concat(missed, []protocol.Step{
		{Rule: protocol.Discard, On: 1},
		{Rule: protocol.Replay},
		{Rule: protocol.ApplyFacts},
	}),
	// A success resolves the later entry of a job. Then an operator reopens the job's earlier entry.
	{
		{Rule: protocol.Insert},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
		{Rule: protocol.Discard},
		{Rule: protocol.RetryJob, Capture: protocol.Misses},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
		{Rule: protocol.RetryJob},
		{Rule: protocol.ApplyFacts},
		{Rule: protocol.StartJob},
		{Rule: protocol.Complete},
		{Rule: protocol.ApplyFacts},
		{Rule: protocol.Reopen},
		{Rule: protocol.FindSuccesses},
	},
}

// likely has the weights of rules. Steps that move an entry towards a late state weigh more than 1. Steps that end a
// trace early, or that are nearly always possible, weigh less than 1.
var likely = map[protocol.Rule]float64{
	protocol.StartJob: 4, protocol.Fail: 6, protocol.Complete: 3, protocol.RetryJob: 2,
	protocol.ReadInbox: 4, protocol.File: 8, protocol.FileParked: 4, protocol.Claim: 6,
	protocol.ReadUndecided: 4, protocol.Decide: 5, protocol.Park: 5, protocol.ApplyFacts: 3,
	protocol.Scan: 3, protocol.Discard: 1.5, protocol.Reopen: 1.5, protocol.Delete: 0.7, protocol.Undo: 1.5,
	protocol.Insert: 0.7, protocol.FindSuccesses: 10, protocol.Sweep: 2, protocol.DeleteJob: 0.1, protocol.CancelJob: 0.1,
	protocol.Attempt: 0.8, protocol.ReuseID: 1, protocol.InsertMarked: 0.5, protocol.CrashWorker: 1, protocol.Force: 0.5,
}

// chooser chooses the steps of a trace at random, with the weights of likely. It rarely chooses steps that change
// nothing.
type chooser struct {
	random *rand.Rand
	model  *protocol.Model
	state  protocol.State
}

func newChooser(random *rand.Rand) *chooser {
	return &chooser{random: random, state: protocol.Start(), model: &protocol.Model{Bounds: protocol.Bounds{
		Jobs: 2, Failures: 6, Workers: 2, Moves: 8, Retries: 4, Misses: 2, Deletes: 2,
		Attempts: 1, Sent: 3, Isolated: 2, Lost: 1, Keys: random.IntN(2) == 0,
	}}}
}

// can reports whether a rule can be taken.
func (c *chooser) can(rule protocol.Rule) (yes bool) {
	c.model.Steps(&c.state, func(step protocol.Step) { yes = yes || step.Rule == rule })
	return yes
}

// choose returns a step, or false if no step is possible. If held is true, the reconciler waits for a lock, and its
// next step must come soon.
func (c *chooser) choose(held bool) (protocol.Step, bool) {
	var can []protocol.Step
	var weights []float64
	sum := 0.0
	c.model.Steps(&c.state, func(step protocol.Step) {
		after, _, ok := c.model.Apply(c.state, step)
		if !ok || held && step.Rule != protocol.Append && step.Rule != protocol.CrashReconciler {
			return
		}
		weight := 1.0
		if factor, ok := likely[step.Rule]; ok {
			weight = factor
		}
		if step.Capture != protocol.Captures {
			weight /= 4
		}
		if after == c.state {
			weight /= 100
		}
		can, weights, sum = append(can, step), append(weights, weight), sum+weight
	})
	if len(can) == 0 {
		return protocol.Step{}, false
	}
	at, n := c.random.Float64()*sum, 0
	for ; n < len(can)-1 && at > weights[n]; n++ {
		at -= weights[n]
	}
	return can[n], true
}
