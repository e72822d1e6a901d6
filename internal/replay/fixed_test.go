package replay_test

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

const (
	fixedGroup  = "aaaaaaaaaaaaaaaaaaaa"
	formerGroup = "aaaaaaaaaaaaaaaa"
)

func setupFixes(t *testing.T) *bundle {
	t.Helper()
	b := setup(t)
	planner, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{
		"dlq-routing": "queues:\n  a: {replayWhenFixed: true}\n",
	}), b)
	require.NoError(t, err)
	b.replayer.Planner = func() *strategy.Planner { return planner }
	b.runner = b.newRunner()
	return b
}

// die makes n jobs of a kind fail for good in a failure group. The class of the failures needs an operator.
func (b *bundle) die(n int, queue, fingerprint, kind, rule string) {
	b.Helper()
	b.registerQueue(queue)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state) SELECT $1,
		jsonb_build_object('n', i), $2, 5, 5, 'running' FROM generate_series(1, $3) i`, kind, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY[jsonb_build_object('error', 'nil map', 'attempt', attempt)] WHERE kind = $1`, kind)
	b.exec(`SELECT dlq.file_as(i.ids, 'worker:1', NULL, array_fill('dlq_manual'::text, s),
			array_fill('manual'::text, s), array_fill('code_bug'::text, s), array_fill($2::text, s),
			array_fill($3::text, s))
		FROM (SELECT array_agg(id) AS ids, ARRAY[count(*)::integer] AS s FROM dlq.dead_letter_queue WHERE kind = $1) i`,
		kind, rule, fingerprint)
	b.exec(postgrestest.RefreshRollups)
}

func (b *bundle) fixedIn(queue, fingerprint, version string) {
	b.Helper()
	b.exec("SELECT dlq.set_group($1, $2, jsonb_build_object('status', 'fixed', 'fixedIn', $3::text), 'kim')", queue,
		fingerprint, version)
}

func (b *bundle) deploy(version string) {
	b.Helper()
	b.exec("SELECT dlq.record_deploy($1, ARRAY['a', 'b'], 'ci')", version)
}

// look runs Fixes once in each of n concurrent processes.
func (b *bundle) look(n int) {
	b.Helper()
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		fixes := &replay.Fixes{Replayer: b.replayer, Logger: slog.New(slog.DiscardHandler)}
		all.Go(func() { errs[i] = fixes.RunOnce(b.Context()) })
	}
	all.Wait()
	for _, err := range errs {
		require.NoError(b, err)
	}
}

func (b *bundle) runs() int {
	b.Helper()
	return b.count("SELECT count(*)::integer FROM dlq.replay_runs")
}

func TestFixes_StartOneRunOnceTheVersionIsDeployed(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.die(3, "b", fixedGroup, "mail.sent", "bug")
	b.deploy("4.1.9")
	b.fixedIn("a", fixedGroup, "4.2")
	b.fixedIn("b", fixedGroup, "4.2")
	b.look(1)
	require.Zero(t, b.runs(), "the version with the fix does not run")

	b.deploy("4.10.0-rc.1")
	b.look(4)
	require.Equal(t, 1, b.runs(), "one run, in the queue for which the policy says so")
	runs, err := b.replayer.List(t.Context(), 10)
	require.NoError(t, err)
	run := runs[0]
	require.Equal(t, "policy", run.Actor)
	require.True(t, run.Progressive)
	require.Equal(t, "fixed in 4.2, which is deployed", *run.Note)
	require.EqualValues(t, 8, run.Total)
	b.turn()
	require.EqualValues(t, 5, b.get(run).Replayed, "the canary")
	b.look(2)
	require.Equal(t, 1, b.runs(), "not a second time")
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.group_marks WHERE fix_run = $1", run.ID))

	b.deploy("4.1.9")
	b.deploy("4.2.0")
	b.look(1)
	require.Equal(t, 2, b.runs(), "after a rollback, the fix that runs again is a new one")
}

func TestFixes_WaitForRegressedGroups(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(3, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	status := func() string {
		var text string
		b.exec(postgrestest.RefreshRollups)
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT status FROM dlq.groups('{}')").Scan(&text))
		return text
	}
	b.die(1, "a", fixedGroup, "order.late", "bug")
	require.Equal(t, "fixed", status(), "the earlier version still runs")
	b.deploy("4.2.0")
	require.Equal(t, "fixed", status())
	b.die(1, "a", fixedGroup, "order.again", "bug")
	require.Equal(t, "regressed", status())
	b.look(1)
	require.Zero(t, b.runs())
}

func TestFixes_TakeNothingThatAnOperatorHas(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(1, "a", fixedGroup, "free", "bug")
	b.die(1, "a", fixedGroup, "parked", "bug")
	b.die(1, "a", fixedGroup, "assigned", "bug")
	b.die(1, "a", fixedGroup, "reviewed", "bug")
	b.die(1, "a", fixedGroup, "lost", "worker-lost")
	b.die(1, "a", fixedGroup, "single", "bug")
	b.die(1, "a", formerGroup, "former", "bug")
	b.die(1, "a", fixedGroup, "later", "bug")
	b.exec("INSERT INTO dlq.group_aliases (queue, former, fingerprint, main) VALUES ('a', $1, $2, true)", formerGroup,
		fixedGroup)
	b.exec("UPDATE dlq.dead_letter_queue SET parked_by = 'kim' WHERE kind = 'parked'")
	b.exec("UPDATE dlq.dead_letter_queue SET max_retries = 1 WHERE kind = 'single'")
	b.exec("SELECT dlq.assign(id, 'kim') FROM dlq.dead_letter_queue WHERE kind = 'assigned'")
	b.exec("SELECT dlq.review_next(array_agg(id), 'kim') FROM dlq.dead_letter_queue WHERE kind = 'reviewed'")
	// A review ends after two minutes; the test may take longer.
	b.exec("UPDATE dlq.reviews SET at = now() + interval '1 hour'")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.look(1)
	require.Equal(t, 1, b.runs())
	b.exec("SELECT dlq.assign(id, 'ann') FROM dlq.dead_letter_queue WHERE kind = 'later'")
	b.turn()
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM river_job WHERE state = 'available'"))
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM river_job WHERE state = 'available' AND kind = 'free'"))
	rows, err := b.pool.Query(t.Context(), `SELECT e.kind, coalesce(x.detail, '') FROM dlq.replay_run_entries x
		JOIN dlq.dead_letter_queue e ON e.id = x.entry_id WHERE x.outcome = 'skipped'`)
	require.NoError(t, err)
	why := map[string]string{}
	for rows.Next() {
		var kind, detail string
		require.NoError(t, rows.Scan(&kind, &detail))
		why[kind] = detail
	}
	require.NoError(t, rows.Err())
	for kind, reason := range map[string]string{
		"parked": "parked by kim", "assigned": "assigned to kim", "reviewed": "in review by kim", "lost": "rule worker-lost",
		"single": "one attempt", "former": "another failure group", "later": "assigned to ann",
	} {
		require.Contains(t, why[kind], reason, fmt.Sprint(why))
	}
}

func TestFixes_StartNothingWhereDlqdObserves(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.exec(`INSERT INTO dlq.settings AS s (key, value) VALUES ('river', 'attached')
		ON CONFLICT (key) DO UPDATE SET value = excluded.value`)
	b.die(3, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.look(1)
	require.Zero(t, b.runs(), "dlqd observes")
	b.exec("SELECT dlq.set_automatic('queue', 'a', true, '{}', 'kim')")
	b.exec("SELECT dlq.stop_automatic('kim')")
	b.look(1)
	require.Zero(t, b.runs(), "automatic redelivery is stopped")
	b.exec("SELECT dlq.resume_automatic('kim')")
	b.look(1)
	require.Equal(t, 1, b.runs())
	b.exec("SELECT dlq.stop_automatic('kim')")
	b.turn()
	require.Zero(t, b.count("SELECT count(*)::integer FROM river_job WHERE state = 'available'"))
	b.exec("SELECT dlq.resume_automatic('kim')")
	b.turn()
	require.Equal(t, 3, b.count("SELECT count(*)::integer FROM river_job WHERE state = 'available'"))
}

func TestFixes_RequestApproval(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.askForApproval()
	b.die(3, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.look(4)
	b.look(1)
	require.Zero(t, b.runs())
	require.Equal(t, 1, b.count(`SELECT count(*)::integer FROM dlq.approvals a JOIN dlq.group_marks m ON m.fix_request = a.id
		WHERE a.actor = 'policy' AND a.entries = 3 AND (a.request -> 'progressive')::boolean`))
	var id uuid.UUID
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id FROM dlq.approvals").Scan(&id))
	b.exec("SELECT dlq.approve($1, 3, p_actor => 'lee')", id)
	b.exec("SELECT dlq.assign(entry_id, 'kim') FROM (SELECT entry_id FROM dlq.approval_entries LIMIT 1) e")
	run := b.carryOut(id)
	require.True(t, run.Progressive)
	b.turn()
	require.EqualValues(t, 2, b.get(run).Replayed)
	require.EqualValues(t, 1, b.get(run).Skipped, "an approved run leaves what an operator has, too")
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.group_marks WHERE fix_run = $1", run.ID))
}

// TestFixes_EndWithTheFix rolls the version back: first while the run is in progress, then before an approved request
// is carried out.
func TestFixes_EndWithTheFix(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(20, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.look(1)
	b.deploy("4.1.0")
	b.turn()
	require.Zero(t, b.count("SELECT count(*)::integer FROM river_job WHERE state = 'available'"))
	runs, err := b.replayer.List(t.Context(), 10)
	require.NoError(t, err)
	require.Len(t, runs, 1)
	require.Equal(t, "cancelled", runs[0].Status)
	require.Contains(t, runs[0].Reason, "the fix no longer runs")

	b.askForApproval()
	b.deploy("4.2.0")
	b.look(1)
	id := b.approveAll()
	b.deploy("4.1.0")
	b.refuseToCarryOut(id, "does not run")
	b.deploy("4.2.0")
	b.look(1)
	b.carryOut(b.approveAll())
	require.Equal(t, 2, b.runs(), "the fix runs again")
}

// TestFixes_WaitForTheEndOfAnUpgrade: while two versions run, a process of the earlier one would also send entries that
// the run must leave out.
func TestFixes_WaitForTheEndOfAnUpgrade(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(3, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.exec(`INSERT INTO dlq.processes (id, name, version, parts, seen_at)
		VALUES (gen_random_uuid(), 'host/1', 'earlier', '{dlq-workers}', now() + interval '1 hour')`)
	b.look(1)
	require.Zero(t, b.runs())
	b.exec("UPDATE dlq.processes SET stopped_at = now()")
	b.look(1)
	require.Equal(t, 1, b.runs())
}

// TestFixes_RequestsForOtherGroupsDoNotCount: a client may request approval for any group. Such a request does not
// start a run of that group.
func TestFixes_RequestsForOtherGroupsDoNotCount(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(3, "a", fixedGroup, "order.paid", "bug")
	b.die(3, "b", fixedGroup, "mail.sent", "bug")
	b.fixedIn("a", fixedGroup, "4.2.0")
	b.deploy("4.2.0")
	b.exec(`SELECT dlq.request_approval('replay', jsonb_build_object('filter', '{"queue": "b"}'::jsonb, 'forFix',
		jsonb_build_object('queue', 'a', 'fingerprint', $1::text)), 'x', 'eve')`, fixedGroup)
	b.refuseToCarryOut(b.approveAll(), "is not the policy's")
	b.look(1)
	require.Equal(t, 1, b.runs())
}

// approveAll approves the request that waits, and returns its id.
func (b *bundle) approveAll() (id uuid.UUID) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT id FROM dlq.approvals WHERE state = 'requested'").Scan(&id))
	b.exec("SELECT dlq.approve($1, 1000, p_actor => 'lee')", id)
	return id
}

// refuseToCarryOut carries out an approved request, which fails.
func (b *bundle) refuseToCarryOut(id uuid.UUID, problem string) {
	b.Helper()
	runner := &approval.Runner{Store: b.store, Replayer: b.replayer, Logger: slog.New(slog.DiscardHandler)}
	_, err := runner.RunOnce(b.Context())
	require.NoError(b, err)
	a, err := (&approval.Store{Store: b.store}).Get(b.Context(), id)
	require.NoError(b, err)
	require.Equal(b, "failed", a.State)
	require.Contains(b, a.Problem, problem)
}

func TestVersions_AreOrdered(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, c := range []struct {
		version, fixedIn string
		has              bool
	}{
		{"4.2.0", "4.2.0", true},
		{"v4.10.0", "4.9", true},
		{"4.2.0-rc.2", "4.2.0", false},
		{"4.2.0", "4.2.0-rc.10", true},
		{"4.2.0-rc.2", "4.2.0-rc.10", false},
		{"4.2.0+b7", "4.2.0+b9", true},
		{"deploy-1", "deploy-2", false},
		{"deploy-3", "deploy-2", true},
		{"deploy-3", "unknown", false},
		{"5.0.0", "deploy-2", false},
		{"1234567", "12", false},
	} {
		if i == 0 {
			for n := 1; n <= 3; n++ {
				b.deploy("deploy-" + strconv.Itoa(n))
			}
		}
		require.Equal(t, c.has, b.count("SELECT dlq.has_fix('a', $1, $2)::integer", c.version, c.fixedIn) == 1, c)
	}
}

// completeReporting makes n jobs of a queue complete with metadata.
func (b *bundle) completeReporting(n int, queue, metadata string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, attempted_at, finalized_at, metadata)
		SELECT 'order.other', '{}', $1, 5, 1, 'completed', clock_timestamp(), clock_timestamp(), $2
		FROM generate_series(1, $3) i`, queue, metadata, n)
}

// Workers report their version with the jobs that they complete, so Fixes works without reports of deploys.
func TestFixes_LearnVersionsFromJobs(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	running := func() (version string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT coalesce(dlq.deployed_version('a'), '')").Scan(&version))
		return version
	}
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.completeReporting(20, "a", `{"dlq:version": "4.1.9"}`)
	b.look(1)
	require.Empty(t, running(), "no group is fixed in a version: nothing is read")

	b.fixedIn("a", fixedGroup, "4.2")
	b.completeReporting(20, "b", `{"dlq:version": "4.2.0"}`)
	b.look(1)
	require.Equal(t, "4.1.9", running(), "versions of other queues say nothing")
	b.completeReporting(20, "a", `{"dlq:version": "4.2.0"}`)
	b.look(1)
	require.Equal(t, "4.1.9", running(), "a deploy is under way")

	b.exec("UPDATE river_job SET finalized_at = now() - interval '6 minutes' WHERE metadata ->> 'dlq:version' = '4.1.9'")
	b.look(1)
	require.Equal(t, "4.1.9", running(), "a version is taken once in five minutes")
	b.exec("UPDATE dlq.deploys SET last_at = now() - interval '6 minutes'")
	b.completeReporting(20, "a", `{"dlq:version": "4.3; DROP TABLE"}`)
	b.completeReporting(20, "a", `{"dlq:version": {"n": 4}}`)
	b.completeReporting(20, "a", `{"dlq:version": "4.1.0", "dlq:done": {"attempt": 1}}`)
	b.look(4)
	require.Equal(t, "4.2.0", running(), "what is no version, and what no worker worked, says nothing")
	require.Equal(t, 1, b.runs())
	require.Equal(t, 2, b.count("SELECT count(*)::integer FROM dlq.acts WHERE subject = 'queue a' AND act LIKE 'deployed %'"),
		"once for each version")

	b.exec("UPDATE river_job SET finalized_at = now() - interval '6 minutes' WHERE state = 'completed'")
	b.exec("UPDATE dlq.deploys SET last_at = now() - interval '6 minutes'")
	b.completeReporting(9, "a", `{"dlq:version": "4.1.9"}`)
	b.look(1)
	require.Equal(t, "4.2.0", running(), "nine jobs are too few")
	b.completeReporting(1, "a", `{"dlq:version": "4.1.9"}`)
	b.look(1)
	require.Equal(t, "4.1.9", running(), "a rollback")
}

// Any client of River can write metadata. Fixes ignores a long text, and does not search it.
func TestFixes_LearnNothingFromLongTexts(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2")
	b.completeReporting(20, "a", `{"dlq:version": "`+strings.Repeat("4", 1<<20)+`"}`)
	b.look(1)
	require.Zero(t, b.count("SELECT count(*)::integer FROM dlq.deploys"))
	b.completeReporting(10, "a", `{"dlq:version": "`+strings.Repeat("4", 100)+`"}`)
	b.look(1)
	require.Equal(t, 1, b.count("SELECT count(*)::integer FROM dlq.deploys"), "100 characters are a version")
}

// TestReportedNames_AreTheSameInSQL checks that SQL and Go accept the same stages and versions.
func TestReportedNames_AreTheSameInSQL(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for value, want := range map[string][2]string{ // stage and version
		`"charged"`: {"charged", "charged"}, `"a b/c:d._-"`: {"a b/c:d._-", ""}, `"4.2.0+build-1_x"`: {"", "4.2.0+build-1_x"},
		`""`: {}, `"-x"`: {}, `" x"`: {}, `"x\n"`: {}, `"é"`: {}, `4`: {}, `null`: {}, `{"a": 1}`: {}, `["a"]`: {},
		`"` + strings.Repeat("9", 100) + `"`: {strings.Repeat("9", 100), strings.Repeat("9", 100)},
		`"` + strings.Repeat("9", 101) + `"`: {}, `"` + strings.Repeat("9", 1<<20) + `"`: {},
	} {
		metadata := []byte(`{"dlq:stage": ` + value + `, "dlq:version": ` + value + `}`)
		var stage, version string
		require.NoError(t, b.pool.QueryRow(t.Context(),
			"SELECT coalesce(dlq.reported_stage($1), ''), coalesce(dlq.reported_version($1), '')", metadata).Scan(
			&stage, &version))
		require.Equal(t, want, [2]string{stage, version}, "SQL: %.60s", value)
		require.Equal(t, want, [2]string{deadletter.StageOf(metadata), deadletter.VersionOf(metadata)}, "Go: %.60s", value)
	}
}

// An operator reports a rollback. Jobs that the newer version completed before do not make it the deployed version
// again.
func TestFixes_LearnNothingFromJobsBeforeAReport(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.die(8, "a", fixedGroup, "order.paid", "bug")
	b.fixedIn("a", fixedGroup, "4.2")
	b.completeReporting(20, "a", `{"dlq:version": "4.2.0"}`)
	b.deploy("4.1.9")
	b.look(1)
	require.Equal(t, 1, b.count("SELECT (dlq.deployed_version('a') = '4.1.9')::integer"))
	require.Zero(t, b.runs())
}

// The order of reports decides which version runs, not the clock.
func TestDeploys_DoNotFollowTheClock(t *testing.T) {
	t.Parallel()
	b := setupFixes(t)
	b.deploy("4.1.9")
	b.exec("UPDATE dlq.deploys SET last_at = now() + interval '1 hour'") // the clock was set back since
	b.deploy("4.2.0")
	var version string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT dlq.deployed_version('a')").Scan(&version))
	require.Equal(t, "4.2.0", version)
}

// A preview separates the outcomes with the last version from earlier outcomes.
func TestPreview_SaysWhatToExpectByVersion(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(16, "a", "TIMEOUT_ERROR")
	b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = 'f'")
	run := b.start(replay.Request{All: true, BatchSize: 16})
	b.turn()
	b.exec(`UPDATE river_job SET metadata = metadata || '{"dlq:version": "4.1"}' WHERE state = 'available'`)
	b.endJobs("discarded", 7)
	b.turn()
	b.exec(`UPDATE river_job SET metadata = metadata || '{"dlq:version": "4.2"}' WHERE state = 'available'`)
	b.endJobs("completed", 9)
	b.turn()
	require.EqualValues(t, 16, b.get(run).Replayed)
	b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = 'f' WHERE status = 'dlq_pending'")
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.Len(t, preview.Expect.Groups, 1)
	g := preview.Expect.Groups[0]
	require.Equal(t, []any{"4.2", int64(9), int64(0), int64(0), int64(7)},
		[]any{g.Version, g.Recovered, g.Failed, g.RecoveredBefore, g.FailedBefore})
	require.Contains(t, g.Text(replay.PlainWords()), "9 of 9 recovered with 4.2 since ")
	require.Contains(t, g.Text(replay.PlainWords()), ", 0 of 7 before; of 7, about ")
	require.Equal(t, 7, b.count(`SELECT count(*)::integer FROM dlq.dead_letter_queue
		WHERE metadata ->> 'dlq:version' = '4.1' AND status = 'dlq_pending'`))
}

// A preview says how far the work got: the stage that the worker reported, and whether a receiver answered.
func TestPreview_SaysHowFarTheWorkCame(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(6, "a", "TIMEOUT_ERROR")
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || CASE original_event ->> 'n'
			WHEN '1' THEN '{"dlq:stage": "charged"}' WHEN '2' THEN '{"dlq:stage": "charged"}'
			WHEN '3' THEN '{"dlq:stage": "card 4111\u003b"}' ELSE '{}' END::jsonb,
		job_kind = CASE WHEN original_event ->> 'n' IN ('4', '5', '6') THEN 'dlqd_message' ELSE job_kind END,
		error_context = CASE WHEN original_event ->> 'n' IN ('5', '6') THEN '{"status": 500}'::jsonb END`)
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	var texts []string
	for _, e := range preview.Estimates {
		if e.Entries > 0 {
			texts = append(texts, e.Text(replay.PlainWords(), preview.Total))
		}
	}
	require.Subset(t, texts, []string{
		"2 of 6 had reached stage charged", "2 of 6 were answered by the receiver, with an error",
		"1 of 6 got no answer from the receiver, which may have done the work",
	})
	require.NotContains(t, fmt.Sprint(texts), "4111", "a text that is no name of a stage")
}

// A redelivery does not inherit the stage and version of its entry; the entry takes them from its redelivery.
func TestRedelivery_ReportsItsOwnStage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "a", "TIMEOUT_ERROR")
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"dlq:stage": "reserved", "dlq:version": "4.1"}'`)
	b.start(replay.Request{All: true})
	b.turn()
	require.Zero(t, b.count(`SELECT count(*)::integer FROM river_job
		WHERE state = 'available' AND metadata ?| '{dlq:stage,dlq:version}'`))
	b.exec(`UPDATE river_job SET metadata = metadata || '{"dlq:stage": "charged"}' WHERE state = 'available'`)
	b.endJobs("discarded", 1)
	b.turn()
	require.Equal(t, 1, b.count(`SELECT count(*)::integer FROM dlq.dead_letter_queue
		WHERE metadata ->> 'dlq:stage' = 'charged' AND NOT metadata ? 'dlq:version'`))
}
