package replay_test

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay"
)

// failAs makes n jobs fail, in a failure group of their own.
func (b *bundle) failAs(n int, queue, group string) {
	b.Helper()
	b.fail(n, queue, group)
	b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = $1 WHERE error_type = $1", group)
}

// endGroup ends the n oldest live redeliveries of a group in a state.
func (b *bundle) endGroup(state, group string, n int) {
	b.Helper()
	tag, err := b.pool.Exec(b.Context(), `UPDATE river_job SET state = $1::river_job_state, finalized_at = now(), attempt = 1,
		errors = CASE WHEN $1 = 'completed' THEN errors ELSE ARRAY['{"error": "still wrong", "attempt": 1}'::jsonb] END
		WHERE id IN (SELECT j.id FROM river_job j JOIN dlq.dead_letter_open e ON e.redelivery_job_id = j.id
			WHERE j.state = 'available' AND e.error_type = $2 ORDER BY j.id LIMIT $3)`, state, group, n)
	require.NoError(b, err)
	require.EqualValues(b, n, tag.RowsAffected(), "redeliveries of group %s under way", group)
}

// turn counts and judges outcomes, decides, and sends, until nothing is left to do.
func (b *bundle) turn() {
	b.Helper()
	for range 4 {
		b.runOnce()
	}
}

// groups returns the groups of a run by error type.
func (b *bundle) groups(run *replay.Run) map[string]replay.RunGroup {
	b.Helper()
	groups := map[string]replay.RunGroup{}
	for _, g := range b.get(run).Groups {
		groups[g.ErrorType] = g
	}
	return groups
}

func (b *bundle) steer(run *replay.Run, verb string, groups ...int32) {
	b.Helper()
	require.NoError(b, b.replayer.Steer(b.Context(), run.ID, verb, groups, deadletter.Act{Actor: "ann", Note: "mended"}))
}

func TestProgressive_GoesInStepsByGroup(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(100, "a", "FIXED")
	b.failAs(20, "a", "BROKEN")
	b.failAs(3, "a", "FEW")
	run := b.start(replay.Request{All: true, Progressive: true, StepDeadline: 60})
	require.True(t, run.Progressive)
	require.Len(t, run.Groups, 3)
	b.turn()
	groups := b.groups(run)
	require.EqualValues(t, 5, groups["FIXED"].Sent)
	require.EqualValues(t, 5, groups["BROKEN"].Sent)
	require.EqualValues(t, 3, groups["FEW"].Sent, "a group below five goes whole")
	require.Equal(t, "running", b.get(run).Status)

	b.endGroup("completed", "FIXED", 5)
	b.endGroup("discarded", "BROKEN", 2)
	b.endGroup("completed", "FEW", 3)
	b.turn()
	groups = b.groups(run)
	require.EqualValues(t, 10, groups["FIXED"].Sent)
	require.EqualValues(t, 1, groups["FIXED"].Step)
	require.Contains(t, groups["FIXED"].Reason, "5 of 5 recovered")
	require.Equal(t, "held", groups["BROKEN"].State, "an error without a type is a new failure group here")
	require.Contains(t, groups["BROKEN"].Reason, "2 of 2 failed in a new way")
	require.Equal(t, "done", groups["FEW"].State)
	require.Equal(t, "running", b.get(run).Status, "a group is held alone")

	b.endGroup("completed", "FIXED", 5)
	b.turn()
	require.EqualValues(t, 50, b.groups(run)["FIXED"].Sent)
	b.endGroup("completed", "FIXED", 40)
	b.turn()
	require.EqualValues(t, 100, b.groups(run)["FIXED"].Sent)
	b.endGroup("completed", "FIXED", 50)
	b.turn()
	got := b.get(run)
	require.Equal(t, "stopped", got.Status)
	require.Contains(t, got.Reason, "15 of the 15 dead letters that are left are in 1 group that is held or stopped")

	// An operator lets the group go on. The failure is no longer new, and the test of the group begins again.
	held := b.groups(run)["BROKEN"]
	b.steer(run, "go-on", held.Number)
	require.Equal(t, "running", b.get(run).Status)
	b.turn()
	require.EqualValues(t, 15, b.groups(run)["BROKEN"].Sent)
	b.endGroup("discarded", "BROKEN", 2)
	b.turn()
	require.Contains(t, b.groups(run)["BROKEN"].Reason, "stopped in the step to 50 %: 2 of 2 failed again")
	b.steer(run, "end")
	b.turn()
	require.Equal(t, "ended", b.groups(run)["BROKEN"].State)
	b.endGroup("completed", "BROKEN", 11)
	b.turn()
	got = b.get(run)
	require.Equal(t, "completed", got.Status)
	require.EqualValues(t, 5, got.Skipped)
	require.EqualValues(t, 118, got.Replayed)
	require.Equal(t, 5, b.count(`SELECT count(*) FROM dlq.replay_run_entries
		WHERE detail LIKE 'its group was ended: ann ended it%'`))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs WHERE unsettled"))

	// Each decision is in the report and in the trail.
	require.Equal(t, len(got.Decisions), b.count(`SELECT count(*) FROM dlq.audit('{}', 500)
		WHERE reason LIKE 'replay run %: group %'`))
	var acts []string
	for _, d := range got.Decisions {
		require.NotEmpty(t, d.Reason)
		require.Equal(t, d.Act == "group let go on" || d.Act == "group ended", d.Actor == "ann", "%+v", d)
		acts = append(acts, d.Act)
	}
	require.Subset(t, acts, []string{
		"group goes on", "group held", "group stopped", "group let go on", "group ended", "group done",
	})
}

// An outcome has the class and the fingerprint of its own failure. This also holds if the entry is dlq_failed, which
// keeps the class and fingerprint of the earlier failure.
func TestRun_JudgesEachFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(2, "a", "T")
	b.exec("UPDATE dlq.dead_letter_queue SET error_class = 'validation', dlq_max_retries = 1")
	b.exec(`UPDATE dlq.dead_letter_queue SET dlq_max_retries = 9 WHERE id = (SELECT id FROM dlq.dead_letter_queue
		ORDER BY id DESC LIMIT 1)`)
	run := b.start(replay.Request{All: true})
	b.turn()
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "dial tcp: connection refused", "attempt": 1}'::jsonb] WHERE metadata ? 'dlq:run_id'`)
	b.turn()
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_failed'
		AND fingerprint = 'T' AND error_class = 'validation'`))
	require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'failed'
		AND error_class = 'transient' AND fingerprint IS NOT NULL AND fingerprint <> 'T'`))
	require.Equal(t, 1, b.count("SELECT count(DISTINCT fingerprint) FROM dlq.replay_run_entries"))
	entries, err := b.replayer.Entries(t.Context(), run.ID, "failed", nil, 10)
	require.NoError(t, err)
	require.Equal(t, "transient", entries[0].ErrorClass)
	require.NotEmpty(t, entries[0].FailedAs)
	require.Equal(t, "completed", b.get(run).Status)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs WHERE unsettled"))
}

// A redelivery that is lost with its process says nothing about its group. The step sends another entry instead, but
// not more than five. The job of an application may have ended its process itself, so its failure counts.
func TestProgressive_IgnoresWhatIsLostWithItsProcess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, group := range []string{"MESSAGES", "LOST", "JOBS"} {
		b.failAs(100, "a", group)
	}
	b.exec("UPDATE dlq.dead_letter_queue SET error_class = 'business'")
	lose := func(group, by string, n int) {
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
			errors = ARRAY[jsonb_build_object('error', 'Stuck job rescued by ' || $2, 'attempt', 1)]
			WHERE id IN (SELECT j.id FROM river_job j JOIN dlq.dead_letter_open e ON e.redelivery_job_id = j.id
				WHERE j.state = 'available' AND e.error_type = $1 ORDER BY j.id LIMIT $3)`, group, by, n)
		b.turn()
	}
	const silent = "dlqd: its process was silent"
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	b.endGroup("completed", "MESSAGES", 3)
	lose("MESSAGES", silent, 2)
	group := b.groups(run)["MESSAGES"]
	require.Equal(t, "going", group.State, group.Reason)
	require.EqualValues(t, 7, group.Sent)
	require.EqualValues(t, 2, group.Failed)
	b.endGroup("completed", "MESSAGES", 2)
	b.turn()
	require.Contains(t, b.groups(run)["MESSAGES"].Reason, "goes on after the canary: 5 of 5 recovered")
	report, err := b.replayer.Report(t.Context(), run.ID)
	require.NoError(t, err)
	at := slices.IndexFunc(report.Groups, func(g replay.RunGroupReport) bool { return g.Fingerprint == "MESSAGES" })
	require.Equal(t, []replay.RunReason{
		{Closure: "failed", Reason: "process_lost", What: "its process was lost", Entries: 2},
	}, report.Groups[at].Reasons)

	lose("LOST", silent, 5)
	require.Equal(t, "going", b.groups(run)["LOST"].State)
	lose("LOST", silent, 5)
	group = b.groups(run)["LOST"]
	require.EqualValues(t, 10, group.Sent)
	require.Contains(t, group.Reason, "held at the end of the canary: 0 of 0 recovered")

	lose("JOBS", "Rescuer", 1)
	require.Contains(t, b.groups(run)["JOBS"].Reason, "1 of 1 failed in a new way")
}

func TestProgressive_GoesBackAStep(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(100, "a", "T")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	b.endGroup("completed", "T", 4)
	b.endGroup("discarded", "T", 1)
	b.turn()
	require.Equal(t, "stopped", b.get(run).Status, "most is held")
	require.Equal(t, "held", b.groups(run)["T"].State)
	b.steer(run, "back", 1)
	b.turn()
	require.EqualValues(t, 10, b.groups(run)["T"].Sent, "another canary")
	b.endGroup("completed", "T", 5)
	b.turn()
	require.EqualValues(t, 50, b.groups(run)["T"].Sent, "10 % are sent already")
	require.ErrorIs(t, b.replayer.Steer(t.Context(), run.ID, "go-on", nil, deadletter.Act{Actor: "ann"}),
		deadletter.ErrNotAllowed, "no group is held")
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "ann"))
	require.ErrorIs(t, b.replayer.Steer(t.Context(), run.ID, "go-on", nil, deadletter.Act{Actor: "ann"}),
		deadletter.ErrNotAllowed)
	other := b.start(replay.Request{All: true})
	require.ErrorIs(t, b.replayer.Steer(t.Context(), other.ID, "go-on", nil, deadletter.Act{Actor: "ann"}),
		deadletter.ErrNotAllowed, "the run is not progressive")
}

// Without outcomes a group never passes a step: it is held after the deadline.
func TestProgressive_HoldsWithoutOutcomes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(20, "a", "T")
	run := b.start(replay.Request{All: true, Progressive: true, StepDeadline: 1})
	require.Eventually(t, func() bool {
		b.runOnce()
		return b.get(run).Status == "stopped"
	}, 5*time.Minute, 20*time.Millisecond)
	require.Contains(t, b.groups(run)["T"].Reason, "no outcome for 1s, although 5 of 5 sent are under way")
	require.EqualValues(t, 5, b.get(run).Replayed)
}

// The reason of a hold says how many redeliveries the destination refused, and when they are sent again.
func TestProgressive_SaysWhatWasRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(20, "a", "T")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	b.exec(`UPDATE river_job j SET state = 'scheduled', metadata = j.metadata || '{"dlq:postponed": 2}',
			scheduled_at = '2100-01-01Z'::timestamptz + n.number * interval '1 minute'
		FROM (SELECT id, row_number() OVER (ORDER BY id) AS number FROM river_job WHERE state = 'available') n
		WHERE j.id = n.id AND n.number <= 3`)
	b.unmet = "circuit breaker x is open"
	b.turn()
	require.Equal(t, "held in the canary: circuit breaker x is open; the destination asked for fewer requests (429 or "+
		"Retry-After) in answer to 3 of the redeliveries under way, which are sent again from 2100-01-01T00:01:00Z to "+
		"2100-01-01T00:03:00Z",
		b.groups(run)["T"].Reason)
}

// A new failure holds its group, even if more outcomes are left than one transaction counts.
func TestProgressive_DecidesWithOutcomesUncounted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.runner.SetOutcomesAtOnce(2)
	b.failAs(100, "a", "T")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	b.endGroup("discarded", "T", 1)
	b.exec("SELECT dlq.apply_facts()")
	b.endGroup("completed", "T", 4)
	b.exec("SELECT dlq.apply_facts()")
	b.turn()
	group := b.groups(run)["T"]
	require.Equal(t, "held", group.State)
	require.Contains(t, group.Reason, "1 of 2 failed in a new way")
	require.EqualValues(t, 4, group.Succeeded, "the other outcomes are counted, too")
	require.Equal(t, "stopped", b.get(run).Status, "most is held")
}

// Entries that failed again or were not sent wait for the end of their group or run, but not for other redeliveries in
// progress.
func TestProgressive_ReleasesWhatFailed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(20, "a", "ONE")
	b.failAs(20, "a", "TWO")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	b.endGroup("discarded", "ONE", 2)
	b.endGroup("discarded", "TWO", 1)
	b.turn()
	b.exec(`UPDATE dlq.dead_letter_queue SET waiting_for = 'run', next_retry_at = now() + interval '1 hour', move = '{}'
		WHERE id IN (SELECT entry_id FROM dlq.held_by_runs(ARRAY(SELECT id FROM dlq.dead_letter_queue)))`)
	waiting := func() int {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND waiting_for = 'run'")
	}
	require.Equal(t, 15+2+15+1, waiting())
	b.steer(run, "end", b.groups(run)["ONE"].Number)
	b.turn()
	require.Equal(t, 15+1, waiting(), "those of the other group")
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "ann"))
	b.turn()
	require.Zero(t, waiting())
	require.Zero(t, b.count("SELECT count(*) FROM dlq.held_by_runs(ARRAY(SELECT id FROM dlq.dead_letter_queue))"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_runs WHERE unsettled"), "redeliveries are under way")
	require.Equal(t, "ended", b.groups(run)["TWO"].State)
	require.Contains(t, b.groups(run)["TWO"].Reason, "cancelled by")
}

// Each of the 20 largest groups is tested alone, and all others together.
func TestProgressive_PoolsSmallGroups(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(300, "a", "T")
	b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = 'f' || least((original_event ->> 'n')::int % 24, 22)")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	got := b.get(run)
	require.Len(t, got.Groups, 21)
	pool := got.Groups[20]
	require.EqualValues(t, 21, pool.Number)
	require.Empty(t, pool.Queue)
	require.Equal(t, 300, b.count("SELECT sum(entries) FROM dlq.replay_run_groups"))
	require.EqualValues(t, 21*5, got.Replayed)
	require.Equal(t, 3, b.count("SELECT cardinality(known) FROM dlq.replay_run_groups WHERE number = 21"))
}

// A group is held while other deliveries to the destination are worse than before the run. After an operator has let
// the group go on, only deliveries since the hold count.
func TestProgressive_HoldsWhileOthersAreHarmed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var asked []string
	var since []time.Time
	const worse = "12 of 40 other deliveries to default failed"
	var seen time.Time // when a process saw the failures
	b.runner.Worse = func(_ context.Context, destination string, run uuid.UUID, began, from, now time.Time) (
		string, string, error,
	) {
		asked, since = append(asked, destination), append(since, from)
		require.NotEqual(t, uuid.Nil, run)
		require.False(t, from.Before(began))
		if seen.IsZero() {
			seen = now
		}
		if from.After(seen) {
			return "", "not known", nil
		}
		return worse, "", nil
	}
	b.failAs(20, "default", "GROUP")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	group := b.groups(run)["GROUP"]
	require.Equal(t, "held", group.State)
	require.Equal(t, "held in the canary: "+worse, group.Reason)
	require.Equal(t, "default", asked[0])
	b.turn()
	b.steer(run, "go-on", group.Number)
	// Another process saw the same failures, and does not know yet that the group was held.
	other := b.newRunner()
	other.Worse, b.runner = b.runner.Worse, other
	b.turn()
	require.Equal(t, "going", b.groups(run)["GROUP"].State)
	require.True(t, since[len(since)-1].After(since[0]))
}

// Jobs of applications have no destination. A group is held while other jobs of the kinds that the group sends next are
// worse than before the run. If no comparison is possible, the group goes on, and the decision says why.
func TestProgressive_HoldsWhileOtherJobsAreHarmed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	answers := map[string][2]string{
		"refund":           {"12 of 40 other jobs of kind refund failed", ""},
		"payment.captured": {"", "not known whether other jobs are worse"},
	}
	b.runner.JobsWorse = func(_ context.Context, kind string, _ uuid.UUID, _, _, _ time.Time) (string, string, error) {
		require.Contains(t, answers, kind)
		return answers[kind][0], answers[kind][1], nil
	}
	b.failAs(20, "a", "HARMS")
	b.exec("UPDATE dlq.dead_letter_queue SET job_kind = 'refund', kind = 'refund'")
	b.failAs(20, "a", "UNKNOWN")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	require.Equal(t, "held", b.groups(run)["HARMS"].State)
	require.Equal(t, "held in the canary: 12 of 40 other jobs of kind refund failed", b.groups(run)["HARMS"].Reason)
	b.endGroup("completed", "UNKNOWN", 5)
	b.turn()
	group := b.groups(run)["UNKNOWN"]
	require.Equal(t, "going", group.State)
	require.Contains(t, group.Reason, "at least +2.94; not known whether other jobs are worse")
}

// Followers of an ordering key wait for their predecessor, even if it is in another group.
func TestProgressive_KeepsTheOrderOfKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(20, "a", "FIRST")
	b.failAs(20, "a", "SECOND")
	b.exec("UPDATE dlq.dead_letter_queue SET ordering_key = 'k' || (original_event ->> 'n'), order_place = river_job_id")
	run := b.start(replay.Request{All: true, Progressive: true})
	b.turn()
	require.EqualValues(t, 5, b.groups(run)["FIRST"].Sent)
	require.Zero(t, b.groups(run)["SECOND"].Sent)
	b.endGroup("completed", "FIRST", 4)
	b.endGroup("discarded", "FIRST", 1)
	b.turn()
	require.Equal(t, "held", b.groups(run)["FIRST"].State)
	require.EqualValues(t, 4, b.groups(run)["SECOND"].Sent)
	require.EqualValues(t, 1, b.groups(run)["SECOND"].Skipped)
	b.endGroup("completed", "SECOND", 4)
	b.turn()
	require.Equal(t, "stopped", b.get(run).Status, "the rest waits behind a group that is held")
	require.Contains(t, b.get(run).Reason, "wait behind one that is held")
	require.Zero(t, b.count(`SELECT count(*) FROM dlq.replay_run_entries e JOIN dlq.replay_run_entries p
		ON p.run_id = e.run_id AND p.entry_id = e.behind WHERE e.job_id IS NOT NULL AND p.outcome IS NULL`))
}

// Several processes share a progressive run, and each may stop at any time: no entry is sent twice, and no group sends
// more than its step allows.
func TestProgressive_SeveralProcessesKeepThePlan(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(120, "a", "ONE")
	b.failAs(60, "a", "TWO")
	run := b.start(replay.Request{All: true, Progressive: true, BatchSize: 3})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				// In each turn, two processes end suddenly, as if they were killed.
				ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
				if i < 2 {
					time.AfterFunc(time.Duration(5+i*95)*time.Millisecond, cancel)
				}
				if _, err := b.newRunner().RunOnce(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	defer wg.Wait()
	defer close(stop)
	require.Eventually(t, func() bool {
		if n := b.count(`SELECT count(*) FROM dlq.replay_run_groups WHERE sent > quota OR sent <> (SELECT count(*)
			FROM dlq.replay_run_entries e WHERE e.run_id = replay_run_groups.run_id AND e.group_number = number
			AND e.job_id IS NOT NULL)`); n > 0 {
			t.Errorf("%d groups sent more than their step allows", n)
			return true
		}
		b.exec(`UPDATE river_job SET state = 'completed', finalized_at = now(), attempt = 1 WHERE id IN (SELECT id FROM river_job
			WHERE state = 'available' AND metadata ? 'dlq:run_id' ORDER BY id LIMIT 7 FOR UPDATE SKIP LOCKED)`)
		b.exec("SELECT dlq.apply_facts()")
		return b.get(run).Status != "running"
	}, 3*time.Minute, 10*time.Millisecond)
	require.Equal(t, "completed", b.get(run).Status, b.get(run).Reason)
	require.Eventually(t, func() bool { // the last outcomes are counted in the turn after the end
		b.exec("SELECT dlq.apply_facts()") // a runner may have locked an entry before
		return b.count("SELECT count(*) FROM dlq.replay_runs WHERE unsettled") == 0
	}, time.Minute, 10*time.Millisecond)
	got := b.get(run)
	require.EqualValues(t, 180, got.Succeeded)
	require.Equal(t, 180, b.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:run_id'"))
	for _, g := range got.Groups {
		require.Equal(t, "done", g.State, g.Reason)
		require.Equal(t, g.Entries, g.Succeeded)
	}
}

func TestProgressive_SQL(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(20, "a", "T")
	b.exec(`SELECT dlq.replay_start('{"queue": "a"}', p_actor => 'kim', p_progressive => true, p_step_deadline => '1 hour')`)
	runs, err := b.replayer.List(t.Context(), 1)
	require.NoError(t, err)
	run := runs[0]
	require.InDelta(t, 3600, run.StepDeadline, 0)
	b.turn()
	b.endGroup("completed", "T", 4)
	b.endGroup("discarded", "T", 1)
	b.turn()
	require.Equal(t, 1, b.count("SELECT dlq.replay_go_on($1)", run.ID))
	b.turn()
	require.EqualValues(t, 15, b.get(run).Replayed)
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.replay_back($1, '{7}')", run.ID)
	require.ErrorContains(t, err, "group 7 is not held or stopped")
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.replay_start('{\"queue\": \"a\"}', p_step_deadline => '1 ms')")
	require.ErrorContains(t, err, "invalid step deadline")
	b.exec(`SELECT dlq.replay_start('{"queue": "none"}', p_force => true, p_progressive => NULL,
		p_step_deadline => NULL)`)
	require.Equal(t, 1, b.count("SELECT dlq.replay_end($1, '{1}')", run.ID))
	_, err = b.replayer.Start(t.Context(), withDefaults(replay.Request{
		Filter: json.RawMessage(`{"queue": "a"}`), Progressive: true, StepDeadline: 1e9,
	}))
	require.ErrorIs(t, err, deadletter.ErrInvalid)
}
