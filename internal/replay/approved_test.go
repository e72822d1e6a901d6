package replay_test

import (
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay"
)

// approve requests a run, calls meanwhile, approves the request, and returns the run that starts.
func (b *bundle) approve(request *replay.Request, meanwhile func()) *replay.Run {
	b.Helper()
	ctx := deadletter.WithOrigin(b.Context(), "API, from a test")
	_, err := b.replayer.Start(ctx, request)
	require.ErrorIs(b, err, deadletter.ErrApproval)
	approvals := &approval.Store{Store: b.store}
	a, _, err := approvals.Request(ctx, approval.Replay, request, approval.Person{Act: request.Act})
	require.NoError(b, err)
	meanwhile()
	require.NoError(b, approvals.Approve(ctx, a.ID, 1000, approval.Person{Act: deadletter.Act{Actor: "lee"}}))
	return b.carryOut(a.ID)
}

// carryOut carries out an approved request for a run, and returns the run.
func (b *bundle) carryOut(id uuid.UUID) *replay.Run {
	b.Helper()
	runner := &approval.Runner{Store: b.store, Replayer: b.replayer, Logger: slog.New(slog.DiscardHandler)}
	worked, err := runner.RunOnce(b.Context())
	require.NoError(b, err)
	require.True(b, worked)
	a, err := (&approval.Store{Store: b.store}).Get(b.Context(), id)
	require.NoError(b, err)
	require.Equal(b, "done", a.State, a.Problem)
	run, err := b.replayer.Get(b.Context(), *a.Outcome)
	require.NoError(b, err)
	return run
}

func (b *bundle) askForApproval() {
	b.Helper()
	b.exec(`INSERT INTO dlq.settings (key, value) VALUES ('approvals', '{"rules": [{"operations": ["replay"], "above": 2}]}')`)
}

// setRate returns the error of changing the rate of a run.
func (b *bundle) setRate(run uuid.UUID, perSecond float64) error {
	return b.replayer.SetRate(b.Context(), run, perSecond, "kim")
}

func TestApproved_ShowsWhatChangedSinceTheRequest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.askForApproval()
	b.fail(20, "a", "T")
	b.fail(10, "b", "T")
	request := withDefaults(replay.Request{All: true, Filter: json.RawMessage(`{"queue": ["a", "b"]}`), Rate: 100})
	run := b.approve(request, func() {
		b.exec("SELECT dlq.discard(id, 'ann') FROM (SELECT id FROM dlq.dead_letter_open WHERE queue = 'b' LIMIT 4) e")
	})
	require.EqualValues(t, 26, run.Total)
	require.Equal(t, []replay.ForecastChange{
		{What: "entries", Before: 30, Now: 26},
		{What: "queue:b", Before: 10, Now: 6},
		{What: "estimate:goes", Before: 30, Now: 26},
		{What: "estimate:ran_not_known", Before: 30, Now: 26},
	}, run.Forecast.Changes, "queue a and the duration in seconds are as before")
	report, err := b.replayer.Report(t.Context(), run.ID)
	require.NoError(t, err)
	require.Equal(t, run.Forecast.Changes, report.Changes)
	require.Equal(t, "queue:b 6, before 10", report.Changes[1].String())
}

func TestApproved_RefusesAGreaterRate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	free := b.start(replay.Request{All: true, Rate: 1})
	require.NoError(t, b.setRate(free.ID, 0))
	b.askForApproval()
	b.fail(3, "a", "T")
	run := b.approve(withDefaults(replay.Request{All: true, Rate: 5}), func() {})
	require.Empty(t, run.Forecast.Changes)
	require.NoError(t, b.setRate(run.ID, 2))
	require.NoError(t, b.setRate(run.ID, 5), "the rate that was approved")
	for _, greater := range []float64{6, 0} {
		err := b.setRate(run.ID, greater)
		require.ErrorIs(t, err, deadletter.ErrNotAllowed)
		require.ErrorContains(t, err, "approved for 5 a second")
	}
	for request, mayRise := range map[string]bool{
		`{"all": true, "filter": {"kind": "*"}, "rate": 0}`:  true,  // no limit
		`{"all": true, "filter": {"queue": "a"}, "Rate": 5}`: false, // Go reads keys in any case
	} {
		b.exec("SELECT dlq.request_approval('replay', $1::jsonb, 'x', 'eve')", request)
		run := b.carryOut(b.approveAll())
		require.Equal(t, mayRise, b.setRate(run.ID, 50) == nil, request)
	}
}
