package protocol_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/protocol"
)

// explore explores a model until an invariant breaks: the invariant named by only, or any invariant if only is empty.
func explore(t *testing.T, rules protocol.Rules, bounds protocol.Bounds, only string) protocol.Found {
	t.Helper()
	x := &protocol.Explorer{
		Model: &protocol.Model{Rules: rules, Bounds: bounds}, Only: only,
		QuietEvery: 16, MaxStates: 20_000_000, Procs: runtime.NumCPU(),
	}
	if only != "" {
		x.QuietEvery = 0 // explore until the invariant breaks
	}
	return x.Explore(t.Context())
}

// The test explores all states of one job, three failures, two workers, an operator, and processes that may die between
// any two transactions.
func TestProtocol_KeepsInvariants(t *testing.T) {
	t.Parallel()
	for name, bounds := range map[string]protocol.Bounds{
		"retries outside dlqd":        {Jobs: 1, Failures: 3, Workers: 2, Moves: 2, Retries: 2, Sent: 1},
		"capture skips":               {Jobs: 1, Failures: 3, Workers: 2, Moves: 2, Retries: 1, Misses: 1, Sent: 1},
		"SERIALIZABLE":                {Jobs: 1, Failures: 3, Workers: 2, Moves: 2, Retries: 1, Isolated: 1, Sent: 1},
		"redeliveries":                {Jobs: 1, Failures: 3, Workers: 2, Moves: 2, Sent: 2, Attempts: 1, Lost: 1},
		"deleted jobs and reused ids": {Jobs: 1, Failures: 3, Workers: 1, Moves: 1, Retries: 1, Deletes: 2, Sent: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := explore(t, protocol.Rules{}, bounds, "")
			t.Log(found.String())
			require.Empty(t, found.Wrong)
			require.True(t, found.Exhausted)
		})
	}
}

// "make model" runs this test, with two jobs and larger bounds. DLQD_MODEL is the duration ("1h"). DLQD_MODEL_STATES is
// the number of states to explore. Random traces take the rest of the duration.
func TestProtocol_KeepsInvariantsForLong(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("DLQD_MODEL"))
	if err != nil {
		t.Skip("make model")
	}
	debug.SetGCPercent(20)       // nearly all of the heap is states
	states := uint64(20_000_000) // about 10 GiB
	if set, err := strconv.ParseUint(os.Getenv("DLQD_MODEL_STATES"), 10, 64); err == nil {
		states = set
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	x := &protocol.Explorer{
		QuietEvery: 64, MaxStates: states, Procs: runtime.NumCPU(),
		Model: &protocol.Model{Bounds: protocol.Bounds{
			Jobs: 2, Failures: 4, Workers: 2, Moves: 4, Retries: 3, Misses: 1,
			Deletes: 2, Attempts: 1, Sent: 2, Isolated: 1, Keys: true,
		}},
	}
	x.Report = func(f protocol.Found) { fmt.Printf("%s: %s\n", time.Since(began).Round(time.Second), &f) } //nolint:forbidigo // go test would keep it until the end
	found := x.Explore(ctx)
	fmt.Printf("%s: %s\n", time.Since(began).Round(time.Second), &found) //nolint:forbidigo // likewise
	require.Empty(t, found.Wrong)
	for total := uint64(0); ctx.Err() == nil && !found.Exhausted; {
		minute, stop := context.WithTimeout(ctx, time.Minute)
		traces, strayed := x.Wander(minute, 60)
		stop()
		total += traces
		fmt.Printf("%s: %d random traces of up to 60 steps\n", time.Since(began).Round(time.Second), total) //nolint:forbidigo // likewise
		require.Empty(t, strayed.Wrong, strayed.String())
	}
}

// sequential are bounds for one job whose failures and facts are all handled before the next step. An invariant that
// breaks within them needs no race.
var sequential = protocol.Bounds{Jobs: 1, Failures: 2, Workers: 1, Moves: 2, Retries: 1, Sent: 1, Sequential: true}

// Under the earlier rule, dlqd forgot the failures that it had added to an open entry when the entry closed. The
// reconciler then filed such a failure again.
func TestExplorer_FindsFoldedFailuresFiledTwice(t *testing.T) {
	t.Parallel()
	for _, invariant := range []string{protocol.FiledOnce, protocol.ClosedStaysClosed} {
		found := explore(t, protocol.Rules{Forgetful: true}, sequential, invariant)
		t.Log(found.String())
		require.Contains(t, found.Wrong, invariant)
	}
}

// The current rules break no invariant, so the test builds states that a fault would produce.
func TestModel_NoticesBrokenInvariants(t *testing.T) {
	t.Parallel()
	model := &protocol.Model{}
	after := func(s protocol.State, steps ...protocol.Step) (_ protocol.State, wrong string) {
		t.Helper()
		for _, step := range steps {
			require.Empty(t, wrong)
			var ok bool
			s, wrong, ok = model.Apply(s, step)
			require.True(t, ok)
		}
		return s, wrong
	}
	failed, wrong := after(protocol.Start(), protocol.Step{Rule: protocol.Insert}, protocol.Step{Rule: protocol.StartJob},
		protocol.Step{Rule: protocol.Fail})
	require.Empty(t, wrong)
	filed, wrong := after(failed, protocol.Step{Rule: protocol.ReadInbox}, protocol.Step{Rule: protocol.File})
	require.Empty(t, wrong)
	sent, wrong := after(filed, protocol.Step{Rule: protocol.Claim})
	require.Empty(t, wrong)

	s := failed // the job counts as a redelivery of an entry that was deleted
	s.NInbox, s.Jobs[0].Entry, s.Entries[1].Status = 0, 1, protocol.Deleted
	require.Contains(t, model.Check(&s), protocol.InOneEntry)

	s = sent // the entry does not wait for its redelivery any more
	s.Entries[0].Status, s.Entries[0].Waits = protocol.Pending, -1
	_, wrong = after(s, protocol.Step{Rule: protocol.Claim})
	require.Contains(t, wrong, protocol.OneRedelivery)

	s, wrong = after(sent, protocol.Step{Rule: protocol.StartJob, On: 1}, protocol.Step{Rule: protocol.Complete, On: 1})
	require.Empty(t, wrong)
	s.Jobs[1].Entry = -1 // the job is a redelivery of no entry
	_, wrong = after(s, protocol.Step{Rule: protocol.ApplyFacts})
	require.Contains(t, wrong, protocol.ClosesOwnEntry)

	s, wrong = after(filed, protocol.Step{Rule: protocol.RetryJob}, protocol.Step{Rule: protocol.Discard})
	require.Empty(t, wrong)
	s.Entries[0].Closed = 0 // the retry seems to be newer than the discard
	_, wrong = after(s, protocol.Step{Rule: protocol.ApplyFacts})
	require.Contains(t, wrong, protocol.NotUndone)

	// After all other actors have stopped, the reconciler files a failure again.
	model.Rules.Forgetful = true
	s, wrong = after(
		filed, protocol.Step{Rule: protocol.Discard}, protocol.Step{Rule: protocol.RetryJob},
		protocol.Step{Rule: protocol.ApplyFacts}, protocol.Step{Rule: protocol.StartJob}, protocol.Step{Rule: protocol.Fail},
		protocol.Step{Rule: protocol.ReadInbox}, protocol.Step{Rule: protocol.File}, protocol.Step{Rule: protocol.Discard},
	)
	require.Empty(t, wrong)
	require.Empty(t, model.Check(&s))
	require.Contains(t, model.CheckQuiet(s), protocol.FiledOnce)
}

// This is the first trace that the explorer found to break an invariant of the earlier rules, under which dlqd forgot
// failures. The trace needs no race.
func TestProtocol_FilesFoldedFailuresOnce(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	d.begin(&protocol.Model{Rules: protocol.Rules{Forgetful: true}, Bounds: sequential})
	for _, step := range []protocol.Step{
		{Rule: protocol.Insert},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},
		{Rule: protocol.Discard},
		{Rule: protocol.RetryJob},
		{Rule: protocol.ApplyFacts}, // the entry is parked with the reason "done twice?"
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File}, // the failure becomes part of the entry
		{Rule: protocol.Discard},
		{Rule: protocol.Scan},
		{Rule: protocol.Append},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.File},         // filed again
		{Rule: protocol.Claim, On: 1}, // and redelivered
	} {
		after, _, ok := d.model.Apply(d.state, step)
		require.True(t, ok)
		if step.Rule != protocol.Scan {
			d.commit(d.transactionOf(step, &after))
		}
		d.state, d.taken = after, append(d.taken, step.String())
	}
	d.filedOnce()
	require.Len(t, d.jobs, 1, "it was redelivered")
}

// A job failed, and before the fact about this failure was applied, an operator resolved the job's entry. That
// completed the job, which then lost its unique key. The failure was filed afterwards, so its entry had no key, and was
// redelivered although an equal job existed.
func TestProtocol_KeepsUniqueKeyOfFailureInFact(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	resolved := []protocol.Step{
		{Rule: protocol.InsertKeyed},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.ReadInbox},
		{Rule: protocol.FileParked},
		{Rule: protocol.RetryJob},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail}, // a fact
		{Rule: protocol.ResolveEntry},
	}
	for _, then := range [][]protocol.Step{
		{{Rule: protocol.ApplyFacts}, {Rule: protocol.Replay, On: 1}},
		{{Rule: protocol.ApplyFacts}, {Rule: protocol.InsertKeyed}, {Rule: protocol.Replay, On: 1}},
		{{Rule: protocol.Delete}, {Rule: protocol.Replay, On: 1}},
	} {
		d.begin(&protocol.Model{})
		for _, step := range slices.Concat(resolved, then) {
			d.take(step, false)
		}
	}
}

// A redelivery is retried outside dlqd. Before it runs, another job resolves the entry, so dlqd drops the redelivery.
// The work was then done once, and must not be reported as done twice.
func TestProtocol_DroppedRedeliveryIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	d.begin(&protocol.Model{})
	for _, step := range []protocol.Step{
		{Rule: protocol.Insert},
		{Rule: protocol.StartJob},
		{Rule: protocol.Fail},
		{Rule: protocol.Replay},
		{Rule: protocol.StartJob, On: 1},
		{Rule: protocol.Fail, On: 1},
		{Rule: protocol.RetryJob},
		{Rule: protocol.StartJob},
		{Rule: protocol.Complete},
		{Rule: protocol.RetryJob, On: 1},
		{Rule: protocol.ApplyFacts}, // job 0 resolves the entry, and job 1 is dropped
		{Rule: protocol.ApplyFacts},
	} {
		d.take(step, false)
	}
	require.Equal(t, protocol.Resolved, d.state.Entries[0].Status)
}

// filedOnce requires that no failure is in two entries, or in both an entry and the inbox.
func (d *database) filedOnce() {
	d.Helper()
	for f, failure := range d.failures {
		require.LessOrEqual(d, d.count(`SELECT count(*) FROM (SELECT t.entry_id FROM dlq.dead_letter_transitions t
			WHERE t.failed_at = $1
			UNION SELECT e.id FROM dlq.dead_letter_queue e
			WHERE e.id = $2) t`, failure.at, failure.id), 1, "failure %d is in two entries, after\n%s", f, d.trace())
	}
}
