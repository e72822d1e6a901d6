package replay_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

// publish puts a routing in force, as the server does.
func (b *bundle) publish(routing string) {
	b.Helper()
	p := policytest.Load(b.T, policytest.Files{"dlq-routing": routing})
	planner, err := strategy.NewPlanner(p, b)
	require.NoError(b, err)
	b.replayer.Planner = func() *strategy.Planner { return planner }
	b.runner = b.newRunner()
	skips, err := json.Marshal(p.Skips())
	require.NoError(b, err)
	keys, err := json.Marshal(p.OrderingKeys())
	require.NoError(b, err)
	b.exec("SELECT dlq.publish_policy('test', coalesce((SELECT value FROM dlq.settings WHERE key = 'approvals'), '{}'), "+
		"'worker:test', $1, $2)", string(skips), string(keys))
}

const skippingPolicy = `
queues:
  old: {staleAfter: 1h, skipStale: true, skipSuperseded: true}
kinds:
  kept.*: {skipStale: false, skipSuperseded: false}
`

// failOld makes messages of these kinds, whose work is out of date, fail in a queue.
func (b *bundle) failOld(queue string, kinds ...string) {
	b.Helper()
	for i, kind := range kinds {
		b.failMessage(queue, `{"messageId": "`+queue+string(rune('a'+i))+`", "kind": "`+kind+`", "payload": {"n": "`+kind+
			`"}, "expiresAt": "2020-01-01T00:00:00Z"}`)
	}
}

func estimates(p *replay.Preview) map[string]int64 {
	found := map[string]int64{}
	for _, e := range p.Estimates {
		found[e.What] = e.Entries
	}
	return found
}

func TestSkips_AreThoseOfThePolicyUnlessTheRequestSays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish(skippingPolicy)
	b.failOld("old", "price", "kept.price")
	b.failOld("new", "price")
	for _, tt := range []struct {
		says      *bool
		goes, not int64
	}{{nil, 2, 1}, {new(true), 0, 3}, {new(false), 3, 0}} {
		preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true, SkipStale: tt.says}))
		require.NoError(t, err)
		require.Equal(t, tt.says == nil, preview.Skips.Stale != nil)
		require.Equal(t, tt.goes, estimates(preview)["goes"])
		require.Equal(t, tt.not, estimates(preview)["skipped_stale"])
		require.EqualValues(t, 3, estimates(preview)["stale"])
	}
	b.exec("SELECT dlq.replay_start('{}', 'kim', p_all => true)") // SQL
	b.runOnce()
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.replay_run_entries WHERE reason = 'stale'"))
	runs, err := b.replayer.List(t.Context(), 1)
	require.NoError(t, err)
	require.EqualValues(t, 2, runs[0].Replayed)
	require.Equal(t, []string{"old"}, runs[0].Skips.Stale.Queues)
	require.Equal(t, "the policy skips work that is out of date, of queues old; not kinds kept.*",
		replay.SkipTexts(runs[0].Skips, nil, nil)[0])
}

// A run keeps the skips of the policy at its start; an approved run keeps the skips at the time of its request.
func TestSkips_AreBoundByTheRequest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.askForApproval()
	b.publish(skippingPolicy)
	b.failOld("old", "a", "b", "c")
	run := b.approve(withDefaults(replay.Request{All: true, Filter: json.RawMessage(`{"queue": "old"}`)}), func() {
		b.publish("queues: {}")
	})
	b.publish("queues: {}")
	b.runOnce()
	require.EqualValues(t, 3, b.get(run).Skipped, "the policy said so when the run was requested")

	run = b.approve(withDefaults(replay.Request{All: true, Filter: json.RawMessage(`{"queue": ["old"]}`)}), func() {
		b.publish(skippingPolicy)
	})
	b.runOnce()
	require.EqualValues(t, 3, b.get(run).Replayed)
}

// The policy's skips name queues and kinds. A caller with a scope sees only those in the scope.
func TestSkips_ShowALimitedCallerNoOtherQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish(`
queues:
  old: {skipStale: true}
  secret: {skipStale: true, skipSuperseded: true}
kinds:
  kept.*: {skipStale: false, skipSuperseded: true}
`)
	b.failOld("old", "price", "kept.price")
	b.failOld("secret", "price")
	limited, err := access.Limit(t.Context(), access.Scope{{Queues: []string{"old"}}})
	require.NoError(t, err)
	preview, err := b.replayer.Preview(limited, withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.Equal(t, policy.Skips{
		Stale:      &policy.Skip{Queues: []string{"old"}, Kinds: map[string]*bool{"kept.*": new(false)}},
		Superseded: &policy.Skip{Kinds: map[string]*bool{"kept.*": new(true)}},
	}, preview.Skips, "the kind is one of the entries")
	require.Contains(t, preview.Notes(replay.PlainWords()),
		"the policy skips work that is out of date, of queues old; not kinds kept.*")
	ofKind, err := access.Limit(t.Context(), access.Scope{{Kinds: []string{"price"}}})
	require.NoError(t, err)
	other, err := b.replayer.Preview(ofKind, withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.Nil(t, other.Skips.Stale.Kinds, "no entry that the caller sees is of that kind")
	require.Equal(t, []string{"secret"}, other.Skips.Superseded.Queues)
	run, err := b.replayer.Start(limited, withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.Equal(t, preview.Skips, run.Skips)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs r WHERE r.skips::text LIKE '%secret%'"),
		"a role with a scope reads the column")
	b.runOnce()
	require.EqualValues(t, 1, b.get(run).Skipped)
	require.EqualValues(t, 1, b.get(run).Replayed)
}

func TestPreview_SaysWhoHasTheEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(6, "a", "T")
	one := func(n string) string {
		return "(SELECT id FROM dlq.dead_letter_queue WHERE original_event ->> 'n' = '" + n + "')"
	}
	b.exec("SELECT dlq.assign(" + one("1") + ", 'ann')")
	b.exec("SELECT dlq.park(" + one("2") + ", 'bea')")
	b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual' WHERE id = " + one("3"))
	b.exec("SELECT dlq.review_next(ARRAY[" + one("3") + "], 'cem')")
	b.exec("UPDATE dlq.reviews SET at = now() + interval '1 hour'")
	b.exec(`UPDATE dlq.dead_letter_queue SET unique_key = 'k', unique_states = B'11111111' WHERE id = ` + one("4"))
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, unique_key, unique_states)
		VALUES ('payment.captured', '{}', 'a', 1, 'available', 'k', B'11111111')`)
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	got := estimates(preview)
	for what, n := range map[string]int64{"assigned": 1, "parked": 1, "in_review": 1, "live_job": 1, "goes": 5} {
		require.Equal(t, n, got[what], what)
	}
	require.Equal(t, "attempts", preview.EndsUnknown)
	require.Equal(t, 1, b.count("SELECT entries::integer FROM dlq.preview_replay('{}') WHERE what = 'in_review'"))
	require.Equal(t, 6, b.count("SELECT entries::integer FROM dlq.preview_replay('{}') WHERE what = 'entries'"))
	require.Equal(t, 1, b.count(`SELECT count(*)::integer FROM dlq.preview_replay('{}')
		WHERE detail = 'not known: attempts'`))
	require.Equal(t, 6, b.count(`SELECT entries::integer FROM dlq.preview_groups('{}')
		WHERE NOT tried AND expected IS NULL`))
}

// dlq.preview_groups estimates successes only among the entries that go, as the preview of the API does.
func TestPreviewGroups_ExpectsSuccessesOfEntriesThatGo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(10, "a", "T")
	b.exec("UPDATE dlq.dead_letter_open SET fingerprint = 'f1'")
	b.start(replay.Request{All: true, BatchSize: 100})
	b.runOnce()
	b.endJobs("completed", 10)
	b.runOnce()
	b.fail(100, "a", "T")
	b.exec("UPDATE dlq.dead_letter_open SET fingerprint = 'f1'")
	b.exec(`UPDATE dlq.dead_letter_open SET unique_key = 'k', unique_states = B'11111111'
		WHERE (original_event ->> 'n')::integer > 20`)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, unique_key, unique_states)
		VALUES ('payment.captured', '{}', 'a', 1, 'available', 'k', B'11111111')`)
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.EqualValues(t, 20, preview.Expect.Tried)
	require.EqualValues(t, 19, preview.Expect.Recover)
	require.Equal(t, 19, b.count("SELECT expected::integer FROM dlq.preview_groups('{}') WHERE entries = 100"))
}

func TestPreview_SaysWhenTheRunWillHaveEnded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(20, "a", "T")
	b.exec(`UPDATE dlq.dead_letter_queue SET retry_history = jsonb_build_array(jsonb_build_object('processingDuration',
		CASE WHEN original_event ->> 'n' = '20' THEN 9 ELSE 2 END))`)
	ends := func(request replay.Request) *replay.Preview {
		request.All = true
		p, err := b.replayer.Preview(t.Context(), withDefaults(request))
		require.NoError(t, err)
		return p
	}
	require.Equal(t, "workers", ends(replay.Request{}).EndsUnknown, "an application works them")
	p := ends(replay.Request{Concurrency: 4})
	require.InDelta(t, 12, p.Ends.Earliest, 0.1, "20 of 2 s, 4 at a time, and the last one")
	require.InDelta(t, 10+9+2, p.Ends.Latest, 0.1)
	require.Regexp(t, `between 12s and 21s after its start, by \d{4}-\d\d-\d\d \d\d:\d\d UTC, if`,
		p.Notes(replay.PlainWords())[0])
	require.WithinRange(t, p.Ends.EndsBy, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	p = ends(replay.Request{Concurrency: 4, Progressive: true})
	require.InDelta(t, 10+4*2, p.Ends.Earliest, 0.1, "each step waits for its last redelivery")
	require.InDelta(t, 10+9+3*2+4*2, p.Ends.Latest, 0.1)
	p = ends(replay.Request{Rate: 0.2})
	require.InDelta(t, 100+2, p.Ends.Earliest, 0.1, "one worker is enough")
	b.registerQueue("default")
	p = ends(replay.Request{Queue: "default"})
	require.NotNil(t, p.Ends, "dlqd works it")
	require.NotEmpty(t, p.Notes(replay.PlainWords()))
}

// TestReport_SaysHowFarOffEachFigureWas runs a run to its end. The forecast is right about the skipped entries and
// wrong about the duration.
func TestReport_SaysHowFarOffEachFigureWas(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(10, "a", "T")
	b.exec(`UPDATE dlq.dead_letter_queue SET retry_history = '[{"processingDuration": 7}]',
		metadata = CASE WHEN original_event ->> 'n' = '4' THEN '{"dlqd:expires_at": "2020-01-01T00:00:00Z"}'
			ELSE metadata END`)
	run := b.start(replay.Request{All: true, SkipStale: new(true), Concurrency: 10, StopAt: 100})
	b.exec("SELECT dlq.discard(id, 'ann') FROM dlq.dead_letter_open WHERE original_event ->> 'n' = '5'")
	b.runOnce()
	b.exec("UPDATE river_job SET attempted_at = now() - interval '90 seconds' WHERE state = 'available'")
	for n := 1; n <= 3; n++ {
		b.end(n, "still wrong")
	}
	b.endJobs("completed", 10)
	b.turn()
	report := b.report(run)
	require.True(t, report.Complete)
	require.EqualValues(t, 8, report.Requests)
	require.GreaterOrEqual(t, report.Worked, 8*90.0, "each redelivery worked for 90 s, and for as long as this test took")
	figures := map[string]replay.Figure{}
	for _, f := range report.Figures {
		figures[f.What] = f
	}
	require.Equal(t, replay.Figure{What: "goes", Forecast: 9, Low: 9, High: 9, Actual: 8}, figures["goes"])
	require.False(t, figures["goes"].Held(), "ann took one over")
	require.Equal(t, replay.Figure{What: "skipped_stale", Forecast: 1, Low: 1, High: 1, Actual: 1},
		figures["skipped_stale"])
	require.Equal(t, replay.Figure{What: "ran_long", Forecast: 10, Low: 10, High: 10, Actual: 10}, figures["ran_long"])
	require.Contains(t, figures, "ends")
	reasons := map[string]bool{}
	for _, g := range report.Groups {
		for _, why := range g.Reasons {
			reasons[why.Closure+" "+why.Reason] = true
		}
	}
	require.Equal(t, map[string]bool{"skipped stale": true, "taken_over ": true}, reasons)
	calibration, err := b.replayer.Calibration(t.Context())
	require.NoError(t, err)
	for _, f := range calibration.Figures {
		if f.What == "goes" {
			require.Equal(t, replay.FigureCalibration{What: "goes", Runs: 1, Forecast: 9, Actual: 8, Off: 1}, f)
			return
		}
	}
	t.Fatal("no figure: goes")
}

// Any client of River can write the times of a job.
func TestRun_CountsNoWorkOfImpossibleTimes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(6, "a", "T")
	run := b.start(replay.Request{All: true, StopAt: 100})
	b.runOnce()
	b.exec("UPDATE river_job SET attempted_at = now() - interval '90 seconds' WHERE state = 'available'")
	b.exec("UPDATE river_job SET attempted_at = 'infinity' WHERE args ->> 'n' IN ('1', '4') AND state = 'available'")
	b.exec("UPDATE river_job SET attempted_at = '-infinity' WHERE args ->> 'n' = '2' AND state = 'available'")
	b.end(4, "still wrong")
	b.endJobs("completed", 6)
	b.turn()
	require.EqualValues(t, 5, b.get(run).Succeeded)
	report := b.report(run)
	require.EqualValues(t, 6, report.Requests)
	require.GreaterOrEqual(t, report.Worked, 3*90.0)
	require.Equal(t, 3, b.count("SELECT count(*)::integer FROM dlq.replay_run_entries WHERE worked IS NULL"))
}

// Any client of River can write durations that do not fit a float8 or are impossible.
func TestPreview_TakesImpossibleDurations(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(6, "a", "T")
	for _, duration := range []string{"1e-400", "1e400", "-1", "1e9"} {
		b.exec(`UPDATE dlq.dead_letter_queue SET retry_history = jsonb_build_array(
			jsonb_build_object('processingDuration', $1::text::numeric))`, duration)
		preview, err := b.replayer.Preview(t.Context(),
			withDefaults(replay.Request{All: true, Rate: 0.001, Concurrency: 1}))
		require.NoError(t, err, duration)
		_, err = json.Marshal(preview)
		require.NoError(t, err, duration)
		require.Equal(t, duration == "1e-400" || duration == "1e9", preview.Ends != nil, duration)
		require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.preview_replay('{}', 0.001, 1) WHERE what = 'ends'"))
	}
	require.Equal(t, 1, b.count(`SELECT (now() + make_interval(secs => e.latest) > now())::integer
		FROM dlq.replay_ends(9000000000000000000, array_fill(1e9::float8, '{9}'), 0.001, 1, NULL, true) e`))
}

func TestFixes_LogARefusalOnceAndWait(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.deploy("4.2")
	b.fixedIn("a", fixedGroup, "4.2")
	b.unmet = "the circuit breaker of queue a is open"
	var log bytes.Buffer
	fixes := &replay.Fixes{Replayer: b.replayer, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	began := time.Now()
	for range 3 {
		require.NoError(t, fixes.RunOnce(t.Context()))
	}
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
	require.Zero(t, b.runs())
	b.unmet = ""
	require.NoError(t, fixes.RunOnce(t.Context()))
	if time.Since(began) < 15*time.Second { // on a slow machine, 15 s may have passed and the next try may be due
		require.Zero(t, b.runs(), "the next try is later")
	}
}

// The policy's run and request are limited to their queue, and their actor is the policy, not an operator.
func TestFixes_HaveTheScopeOfTheirQueue(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.askForApproval()
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.deploy("4.2")
	b.fixedIn("a", fixedGroup, "4.2")
	b.look(1)
	seen := func(queue string) int {
		ctx := postgres.WithScope(t.Context(), `[{"queues": ["`+queue+`"], "kinds": []}]`)
		list, err := (&approval.Store{Store: b.store}).List(ctx, "", 10)
		require.NoError(t, err)
		return len(list)
	}
	require.Equal(t, 1, seen("a"))
	require.Zero(t, seen("b"))
	run := b.carryOut(b.approveAll())
	require.Equal(t, "policy", run.Actor)
	for _, act := range []string{"started", "requested"} {
		require.Zero(t, b.count(`SELECT count(*)::integer FROM dlq.audit('{"people": true}') WHERE actor = 'policy'
			AND reason LIKE '%' || $1`, act))
		require.Equal(t, 1, b.count(`SELECT count(*)::integer FROM dlq.audit('{}') WHERE actor = 'policy'
			AND reason LIKE '%' || $1`, act))
	}
}

func TestDeploys_OfALimitedActorAreBounded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO dlq.deploys (queue, version, actor, last_at) SELECT 'shop-' || i, '1', 'eve',
		now() - i * interval '1 s' FROM generate_series(1, 10100) i`)
	b.exec(`INSERT INTO dlq.deploys (queue, version, actor, last_at)
		VALUES ('shop-0', '1', 'ci', now() - interval '1 year')`)
	ctx := postgres.WithScope(t.Context(), `[{"queues": ["shop-*"], "kinds": []}]`)
	require.NoError(t, b.store.InTx(ctx, func(tx postgres.DB) error {
		_, err := tx.Exec(ctx, "SELECT dlq.record_deploy('2', ARRAY['shop-1'], 'eve')")
		return err
	}))
	require.Equal(t, 10000, b.count("SELECT count(*)::integer FROM dlq.deploys WHERE actor = 'eve'"))
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.deploys WHERE actor = 'ci'"))
}
