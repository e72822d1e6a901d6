package protocol_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/protocol"
)

// explore goes through a model of one job, until the invariant is broken (any, where it is empty).
func explore(t *testing.T, rules protocol.Rules, bounds protocol.Bounds, only string) protocol.Found {
	t.Helper()
	x := &protocol.Explorer{Model: &protocol.Model{Rules: rules, Bounds: bounds}, Only: only, MaxStates: 20_000_000, Procs: runtime.NumCPU()}
	return x.Explore(t.Context())
}

// calm is a job whose failures and facts are taken in before anybody goes on: what goes wrong there goes wrong every time.
var calm = protocol.Bounds{Jobs: 1, Failures: 2, Workers: 1, Moves: 2, Retries: 1, Sent: 1, Calm: true}

// A failure that was folded into an entry was forgotten once that was closed, and the reconciler filed it again.
func TestExplorer_FindsFoldedFailuresFiledTwice(t *testing.T) {
	t.Parallel()
	for _, invariant := range []string{protocol.FiledOnce, protocol.NotSentBack} {
		found := explore(t, protocol.Rules{}, calm, invariant)
		t.Log(found.String())
		require.Contains(t, found.Wrong, invariant)
	}
}

// What the explorer found is what Postgres does: see TestExplorer_FindsFoldedFailuresFiledTwice.
func TestProtocol_FilesFoldedFailuresOnce(t *testing.T) {
	t.Parallel()
	found := explore(t, protocol.Rules{}, calm, protocol.NotSentBack)
	d := newDatabase(t)
	d.begin(&protocol.Model{Bounds: calm})
	for _, step := range found.Trace {
		after, _, ok := d.model.Apply(d.state, step)
		require.True(t, ok)
		if step.Rule != protocol.Scan {
			d.commit(d.transactionOf(step, &after))
		}
		d.state, d.taken = after, append(d.taken, step.String())
	}
	d.filedOnce()
}

// filedOnce requires that no failure is in two entries, or in one and in the inbox.
func (d *database) filedOnce() {
	d.Helper()
	for f, failure := range d.failures {
		require.LessOrEqual(d, d.count(`SELECT count(*) FROM (SELECT t.entry_id FROM dlq.dead_letter_transitions t WHERE t.failed_at = $1
			UNION SELECT e.id FROM dlq.dead_letter_queue e WHERE e.id = $2) t`, failure.at, failure.id), 1, "failure %d came into two entries, after\n%s", f, d.trace())
	}
}
