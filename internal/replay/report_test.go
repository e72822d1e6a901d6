package replay_test

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
)

// end ends the redelivery of the entry whose args have this n: with success if text is empty, otherwise with the error
// text.
func (b *bundle) end(n int, text string) {
	b.Helper()
	tag, err := b.pool.Exec(b.Context(), `UPDATE river_job SET finalized_at = now(), attempt = 1,
		state = CASE WHEN $2 = '' THEN 'completed' ELSE 'discarded' END::river_job_state,
		errors = CASE WHEN $2 <> '' THEN ARRAY[jsonb_build_object('error', $2::text, 'attempt', 1)] END
		WHERE state = 'available' AND args ->> 'n' = $1`, strconv.Itoa(n), text)
	require.NoError(b, err)
	require.EqualValues(b, 1, tag.RowsAffected(), "redelivery %d", n)
}

func (b *bundle) report(run *replay.Run) *replay.RunReport {
	b.Helper()
	report, err := b.replayer.Report(b.Context(), run.ID)
	require.NoError(b, err)
	return report
}

func TestReport_SaysWhatBecameOfEachEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(8, "a", "T")
	before := b.start(replay.Request{All: true, StopAt: 100})
	b.runOnce()
	for n := 1; n <= 8; n++ {
		b.end(n, "dial tcp: connection refused")
	}
	b.turn()
	report := b.report(before)
	require.True(t, report.Complete)
	require.EqualValues(t, 8, report.Counts.Failed, "the entries had no failure group")
	b.exec(`UPDATE dlq.dead_letter_queue e SET fingerprint = r.fingerprint, status = 'dlq_manual', strategy = 'manual',
		metadata = CASE WHEN original_event ->> 'n' = '4' THEN '{"dlqd:expires_at": "2020-01-01T00:00:00Z"}' ELSE metadata END
		FROM dlq.replay_run_entries r WHERE r.entry_id = e.id AND r.fingerprint IS NOT NULL`)

	run := b.start(replay.Request{Filter: []byte(`{"queue": "a"}`), SkipStale: new(true)})
	b.exec(`SELECT dlq.discard(id, 'ann') FROM dlq.dead_letter_open WHERE original_event ->> 'n' = '5'`)
	b.exec(`SELECT dlq.expire(id, 'bea') FROM dlq.dead_letter_open WHERE original_event ->> 'n' = '8'`)
	b.runOnce()
	b.end(1, "")
	b.end(2, "dial tcp: connection refused")
	b.end(3, "null value in column \"price\" violates not-null constraint (SQLSTATE 23502)")
	b.turn()
	report = b.report(run)
	require.False(t, report.Complete)
	require.Equal(t, replay.RunCounts{
		Recovered: 1, FailedSame: 1, FailedNew: 1, Skipped: 1, TakenOver: 1, Expired: 1, InProgress: 2,
	}, report.Counts)
	require.Len(t, report.Groups, 1)
	group := report.Groups[0]
	require.EqualValues(t, 8, group.Entries)
	require.Equal(t, report.Counts, group.RunCounts)
	require.Equal(t, "a", group.Queue)
	require.NotNil(t, group.Since)
	require.Positive(t, group.Slowest)
	why := map[string]string{}
	for _, reason := range group.Reasons {
		why[reason.Closure] = reason.What
	}
	require.Equal(t, "ann", why["taken_over"])
	require.Equal(t, "bea", why["expired"])
	require.Equal(t, "its work is out of date", why["skipped"])
	require.NotEqual(t, group.Fingerprint, why["failed_new"])
	require.Len(t, why["failed_new"], 20)

	entries, err := b.replayer.Entries(t.Context(), run.ID, "skipped", nil, 10)
	require.NoError(t, err)
	closures := map[string]string{}
	for i := range entries {
		closures[entries[i].Closure] = entries[i].TakenBy
	}
	require.Equal(t, map[string]string{"skipped": "", "taken_over": "ann", "expired": "bea"}, closures)

	b.end(6, "")
	b.end(7, "")
	b.turn()
	require.True(t, b.report(run).Complete)
	diff, err := b.replayer.Compare(t.Context(), before.ID, run.ID)
	require.NoError(t, err)
	changes := map[string]int64{}
	for _, c := range diff.Changes {
		require.Equal(t, group.Fingerprint, c.Fingerprint)
		require.Equal(t, "failed", c.Before)
		changes[c.After] = c.Entries
	}
	require.Equal(t, map[string]int64{
		"recovered": 3, "failed_same": 1, "failed_new": 1, "skipped": 1, "taken_over": 1, "expired": 1,
	}, changes)
	_, err = b.replayer.Compare(t.Context(), before.ID, uuid.New())
	require.ErrorIs(t, err, deadletter.ErrNotFound)
}

func TestReport_CountsUnsentEntriesOfCancelledRunAsSkipped(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 1})
	b.runOnce()
	require.EqualValues(t, 2, b.report(run).Counts.ToGo)
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "kim"))
	b.endJobs("completed", 1)
	b.exec("SELECT dlq.apply_facts()")
	report := b.report(run)
	require.True(t, report.Complete)
	require.EqualValues(t, 2, report.Counts.Skipped)
	require.Equal(t, "the run was cancelled", report.Groups[0].Reasons[0].What)
}

// The report is complete only when all failures have a class: a failure without one may still turn out to be new.
func TestReport_IsCompleteOnceFailuresAreJudged(t *testing.T) {
	t.Parallel()
	for _, cancelled := range []bool{false, true} {
		b := setup(t)
		b.fail(1, "a", "T")
		run := b.start(replay.Request{All: true})
		b.runOnce()
		if cancelled {
			require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "kim"))
		}
		b.endJobs("discarded", 1)
		b.exec("SELECT dlq.apply_facts()")
		require.False(t, b.report(run).Complete)
		for range 10 {
			b.runOnce()
			unjudged := b.count("SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'failed' AND error_class IS NULL")
			if b.get(run).Status == "completed" || b.report(run).Complete {
				require.Zero(t, unjudged)
			}
		}
		require.True(t, b.report(run).Complete)
	}
}

func TestRun_RestIsANewRun(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(6, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 3})
	b.runOnce()
	b.endJobs("completed", 1)
	b.endJobs("discarded", 1)
	b.runOnce() // sends two others
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "kim"))
	ids := func(field string, of uuid.UUID) int {
		return b.count("SELECT count(*)::integer FROM dlq.find(jsonb_build_object($1::text, $2::uuid))", field, of)
	}
	require.Equal(t, 1, ids("rest", run.ID), "not sent; three are under way")
	require.Equal(t, 1, ids("again", run.ID))
	require.Zero(t, ids("rest", uuid.New()))
	rest := b.start(replay.Request{Filter: json.RawMessage(`{"rest": "` + run.ID.String() + `"}`)})
	require.EqualValues(t, 1, rest.Total)
	again := b.start(replay.Request{Filter: json.RawMessage(`{"again": ["` + run.ID.String() + `"]}`)})
	require.EqualValues(t, 1, again.Total)
	_, err := b.replayer.Start(t.Context(), withDefaults(replay.Request{Filter: json.RawMessage(`{"rest": "x"}`)}))
	require.ErrorIs(t, err, deadletter.ErrInvalid)

	// A caller gets no report of a run whose queues are outside of the caller's scope.
	scoped := postgres.WithScope(t.Context(), `[{"queues": ["b"]}]`)
	_, err = b.replayer.Start(scoped, withDefaults(replay.Request{
		Filter: json.RawMessage(`{"rest": "` + run.ID.String() + `"}`),
	}))
	require.NoError(t, err)
	require.Zero(t, b.count("SELECT total::integer FROM dlq.replay_runs ORDER BY id DESC LIMIT 1"))
}

// The schema of the API has no null in these answers: a list without elements is empty.
func TestAnswers_HaveNoNulls(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "a", "T")
	of := func(answer any, err error) {
		t.Helper()
		require.NoError(t, err)
		raw, err := json.Marshal(answer)
		require.NoError(t, err)
		require.NotContains(t, string(raw), ":null")
	}
	of(b.replayer.Calibration(t.Context()))
	for _, filter := range []string{`{"queue": "none"}`, `{}`} {
		request := withDefaults(replay.Request{Filter: []byte(filter), All: true})
		of(b.replayer.Preview(t.Context(), request))
		run := b.start(*request)
		of(run, nil)
		of(b.replayer.Report(t.Context(), run.ID))
		of(b.replayer.Compare(t.Context(), run.ID, run.ID))
		b.turn()
		of(b.replayer.Report(t.Context(), run.ID))
		of(b.replayer.List(t.Context(), 10))
		of(b.replayer.Entries(t.Context(), run.ID, "", nil, 10))
	}
	of(b.replayer.Calibration(t.Context()))
}
