package replay_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(workerURL); url != "" {
		if err := work(url); err != nil {
			panic(err)
		}
		return
	}
	postgrestest.Main(m)
}

// bundle is a database with dead letters, a replayer and a runner.
type bundle struct {
	*testing.T

	pool     *pgxpool.Pool
	store    *deadletter.Store
	replayer *replay.Replayer
	runner   *replay.Runner
	unmet    string
}

func (b *bundle) Unmet(_, _ string, _ *policy.Conditions) string { return b.unmet }

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{T: t, pool: postgrestest.Pool(t)}
	planner, err := strategy.NewPlanner(policytest.Load(t, nil), b)
	require.NoError(t, err)
	b.store = deadletter.NewStore(b.pool, postgres.DefaultSchemas())
	b.replayer = &replay.Replayer{Store: b.store, Planner: func() *strategy.Planner { return planner }}
	b.runner = b.newRunner()
	return b
}

func (b *bundle) newRunner() *replay.Runner {
	return replay.NewRunner(b.store, b.replayer.Planner, slog.New(slog.DiscardHandler), nil)
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *bundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

// fail makes n jobs of a queue fail with a type of error, and files them. Their args number them.
func (b *bundle) fail(n int, queue, errorType string) {
	b.Helper()
	b.registerQueue(queue)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'payment.captured',
		jsonb_build_object('n', i, 'amount', 10), $1, 1, 'running' FROM generate_series(1, $2) i`, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb],
		metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 1, 'type', $1::text, 'message', 'x'))
			WHERE state = 'running'`, errorType)
	b.file()
}

// registerQueue registers a queue as worked by a River client.
func (b *bundle) registerQueue(queue string) {
	b.Helper()
	b.exec("INSERT INTO river_queue (name, created_at, updated_at) VALUES ($1, now(), now()) ON CONFLICT DO NOTHING",
		queue)
}

// file files failures, so that filters by type or class find them.
func (b *bundle) file() {
	b.Helper()
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
}

// endJobs ends the n oldest live redeliveries in a state.
func (b *bundle) endJobs(state string, n int) {
	b.Helper()
	b.exec(`UPDATE river_job SET state = $1::river_job_state, finalized_at = now(), attempt = 1,
		errors = CASE WHEN $1 = 'completed' THEN errors ELSE ARRAY['{"error": "still wrong", "attempt": 1}'::jsonb] END
		WHERE id IN (SELECT id FROM river_job WHERE state = 'available' ORDER BY id LIMIT $2)`, state, n)
}

func (b *bundle) start(request replay.Request) *replay.Run {
	b.Helper()
	run, err := b.replayer.Start(b.Context(), withDefaults(request))
	require.NoError(b, err)
	return run
}

func withDefaults(request replay.Request) *replay.Request {
	if request.Filter == nil {
		request.Filter = json.RawMessage(`{}`)
	}
	if request.BatchSize == 0 {
		request.BatchSize = 10
	}
	request.StopAt, request.Act = 50, deadletter.Act{Actor: "kim", Note: "after the fix"}
	return &request
}

// runOnce advances all runs by one batch.
func (b *bundle) runOnce() {
	b.Helper()
	_, err := b.runner.RunOnce(b.Context())
	require.NoError(b, err)
}

func (b *bundle) get(run *replay.Run) *replay.Run {
	b.Helper()
	got, err := b.replayer.Get(b.Context(), run.ID)
	require.NoError(b, err)
	return got
}

func TestRun_ReplaysSelectedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(25, "a", "TIMEOUT_ERROR")
	b.fail(5, "a", "OTHER")
	run := b.start(replay.Request{Filter: json.RawMessage(`{"errorType": "TIMEOUT_ERROR", "kind": "payment.*"}`)})
	require.EqualValues(t, 25, run.Total)
	b.fail(3, "a", "TIMEOUT_ERROR") // later: not part of the run
	for range 3 {
		b.runOnce()
	}
	got := b.get(run)
	require.EqualValues(t, 25, got.Replayed)
	require.Equal(t, "running", got.Status)
	require.Equal(t, 25, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'
		AND locked_by = 'kim' AND notes = 'after the fix'`))
	b.runOnce()
	require.Equal(t, "running", b.get(run).Status, "the run ends after its redeliveries")
	b.endJobs("completed", 20)
	b.endJobs("discarded", 5)
	b.runOnce()
	got = b.get(run)
	require.Equal(t, "completed", got.Status)
	require.EqualValues(t, 20, got.Succeeded)
	require.EqualValues(t, 5, got.Failed)
	require.Zero(t, got.Skipped)
	require.NotNil(t, got.FinishedAt)
	require.Equal(t, 20, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'
		AND resolution_strategy = 'manual_retry' AND resolved_by = 'kim'`))
	require.Equal(t, 25, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'replay run ' || $1
		AND actor = 'kim' AND note = 'after the fix'`, run.ID.String()))
	require.Equal(t, 5, b.count(`SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'failed'
		AND detail = 'still wrong'`))

	// Redeliveries are in the order of capture.
	require.Equal(t, 0, b.count(`SELECT count(*)
		FROM (SELECT (args ->> 'n')::int - lag((args ->> 'n')::int) OVER (ORDER BY id) AS step FROM river_job
		WHERE metadata ? 'dlq:run_id') s WHERE step < 0`))
}

func TestRun_SeveralProcessesReplayEachEntryOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(300, "a", "T")
	first := b.start(replay.Request{All: true, BatchSize: 7})
	second := b.start(replay.Request{All: true, BatchSize: 7}) // the same entries again
	var wg sync.WaitGroup
	for range 4 {
		runner := b.newRunner()
		wg.Go(func() {
			for b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'") > 0 {
				if _, err := runner.RunOnce(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.Equal(t, 300, b.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:run_id'"))
	b.endJobs("completed", 300)
	for range 100 {
		b.runOnce()
	}
	one, two := b.get(first), b.get(second)
	require.Equal(t, "completed", one.Status)
	require.Equal(t, "completed", two.Status)
	require.EqualValues(t, 300, one.Replayed+two.Replayed)
	require.EqualValues(t, 300, one.Succeeded+two.Succeeded)
}

// A batch that timed out on a lock is retried.
func TestRun_RetriesAfterLockTimeout(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "a", "T")
	b.exec("CREATE SEQUENCE public.tries")
	b.exec(`CREATE FUNCTION locked_at_first() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN IF nextval('public.tries') = 1 THEN RAISE lock_not_available; END IF; RETURN NEW; END $$`)
	b.exec("CREATE TRIGGER locked_at_first BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION locked_at_first()")
	run := b.start(replay.Request{All: true})
	b.runOnce()
	require.EqualValues(t, 3, b.get(run).Replayed)
}

func TestRun_PausesResumesAndCancels(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(30, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 1000}) // one batch at a time
	b.runOnce()
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "pause", "ann"))
	b.runOnce()
	require.EqualValues(t, 10, b.get(run).Replayed)
	require.Equal(t, "paused by ann", b.get(run).Reason)
	require.ErrorIs(t, b.replayer.Control(t.Context(), run.ID, "pause", "ann"), deadletter.ErrNotAllowed)
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "resume", "ann"))
	b.runner = b.newRunner() // as after a restart of dlqd
	b.runOnce()
	require.EqualValues(t, 20, b.get(run).Replayed, "the run continues where it stopped")
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "ann"))
	b.runOnce()
	require.EqualValues(t, 20, b.get(run).Replayed)
	require.ErrorIs(t, b.replayer.Control(t.Context(), run.ID, "resume", "ann"), deadletter.ErrNotAllowed)
	require.ErrorIs(t, b.replayer.Control(t.Context(), uuid.New(), "pause", "ann"), deadletter.ErrNotFound)
	require.ErrorIs(t, b.replayer.SetRate(t.Context(), run.ID, 5, "kim"), deadletter.ErrNotFound)
	runs, err := b.replayer.List(t.Context(), 10)
	require.NoError(t, err)
	require.Len(t, runs, 1)
}

func TestRun_StopsIfTooManyFail(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(200, "a", "T")
	run := b.start(replay.Request{All: true, BatchSize: 60, Concurrency: 1000})
	b.runOnce()
	b.endJobs("completed", 20)
	b.endJobs("discarded", 30)
	b.runOnce()
	got := b.get(run)
	require.Equal(t, "stopped", got.Status)
	require.Contains(t, got.Reason, "30 of the last 50 redeliveries failed")
	require.EqualValues(t, 60, got.Replayed)
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "resume", "ann"))
	b.runOnce()
	require.EqualValues(t, 120, b.get(run).Replayed, "failures before the resume do not stop the run again")
}

func TestRun_LimitsConcurrency(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(30, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 4})
	for range 3 {
		b.runOnce()
	}
	require.EqualValues(t, 4, b.get(run).Replayed)
	b.endJobs("completed", 3)
	b.runOnce()
	require.EqualValues(t, 7, b.get(run).Replayed)
}

// The time between two entries of a slow run exceeds a step.
func TestRun_AcceptsLowRates(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(5, "a", "T")
	slow := b.start(replay.Request{All: true, Rate: 0.001})
	b.runOnce()
	wait, err := b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, time.Second, wait, "the runner does not poll for a slot that is far off")
	got := b.get(slow)
	require.EqualValues(t, 1, got.Replayed)
	require.InDelta(t, 4000, got.SecondsLeft, 1)
	require.NoError(t, b.replayer.SetRate(t.Context(), slow.ID, 1000, "kim"))
	b.runOnce()
	require.EqualValues(t, 5, b.get(slow).Replayed, "the run does not wait for its slot at the old rate")
	b.endJobs("completed", 5)
	b.runOnce()

	for _, rate := range []float64{1e-300, 1e7} {
		_, err := b.replayer.Start(t.Context(), withDefaults(replay.Request{All: true, Rate: rate}))
		require.ErrorIs(t, err, deadletter.ErrInvalid)
		require.ErrorIs(t, b.replayer.SetRate(t.Context(), slow.ID, rate, "kim"), deadletter.ErrInvalid)
	}
	for _, rate := range []string{"0", "-1", "'NaN'", "'Infinity'"} {
		_, err := b.pool.Exec(t.Context(), "SELECT dlq.replay_start('{}', p_all => true, p_rate => "+rate+")")
		require.ErrorContains(t, err, "replay: invalid rate", rate)
	}
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.replay_start('{}', p_all => true, p_patch => '[]', p_merge_patch "+
		"=> '{}')")
	require.ErrorContains(t, err, "replay: a patch and a merge patch exclude each other")
}

// The reported rate covers the time of sending, without pauses and without waiting for redeliveries
// to end.
func TestRun_ReportsRateWhileSending(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(20, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 1000})
	age := func() { // an hour passes
		b.exec("UPDATE dlq.replay_runs SET created_at = created_at - interval '1 hour', updated_at = updated_at - interval " +
			"'1 hour', stepped_at = stepped_at - interval '1 hour'")
	}
	require.Zero(t, b.get(run).PerSecond)
	age()
	b.runOnce()
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "pause", "ann"))
	age()
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "resume", "ann"))
	b.runOnce()
	age()
	b.endJobs("completed", 20)
	b.runOnce()
	got := b.get(run)
	require.Equal(t, "completed", got.Status)
	require.Greater(t, got.PerSecond, 0.01, "20 in three hours would be 0.002")
	require.Less(t, b.count("SELECT round(sending) FROM dlq.replay_runs"), 600)
}

func TestRun_PatchesPayloads(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "a", "T")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
		VALUES ('dlqd_message', '{"messageId": "m1", "kind": "order.placed", "payload": {"amount": 10, "note": "x"}}', 'a', 1,
			'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'`)
	b.file()
	b.exec(`UPDATE dlq.dead_letter_open SET original_event = '[]', move = '{"actor": "kim"}'
		WHERE id = (SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 1)`)
	patch := replay.Patch{JSONPatch: json.RawMessage(`[{"op": "replace", "path": "/amount", "value": 20}]`)}

	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true, Patch: patch}))
	require.NoError(t, err)
	require.EqualValues(t, 4, preview.Total)
	require.Len(t, preview.Samples, 4)
	require.NotEmpty(t, preview.Samples[0].Problem)
	require.JSONEq(t, `{"n": 2, "amount": 20}`, string(preview.Samples[1].Patched))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs"), "a dry run changes nothing")

	run := b.start(replay.Request{All: true, Patch: patch})
	b.runOnce()
	got := b.get(run)
	require.EqualValues(t, 3, got.Replayed)
	require.EqualValues(t, 1, got.Skipped)
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'skipped'
		AND detail LIKE 'the patch does not apply: %'`))
	require.Equal(t, 3, b.count(`SELECT count(*) FROM river_job WHERE state = 'available'
		AND coalesce(args -> 'payload', args) ->> 'amount' = '20'`))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM river_job WHERE state = 'available'
		AND args @> '{"messageId": "m1", "payload": {"amount": 20, "note": "x"}}'`))
	require.Equal(t, 3, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE edited_event IS NOT NULL
		AND coalesce(original_event -> 'payload', original_event) ->> 'amount' = '10'`), "the original is never lost")

	merged, err := (&replay.Patch{MergePatch: json.RawMessage(`{"note": null, "currency": "EUR"}`)}).Event("dlqd_message",
		json.RawMessage(`{"messageId": "m1", "payload": {"amount": 10, "note": "x"}}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"messageId": "m1", "payload": {"amount": 10, "currency": "EUR"}}`, string(merged))
}

func TestRun_SendsToOtherQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "old", "T")
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true, Queue: "new"}))
	require.NoError(t, err)
	require.Equal(t, []string{"no River client works queue new: redeliveries would wait there"}, preview.Unhealthy)
	_, err = b.replayer.Start(t.Context(), withDefaults(replay.Request{All: true, Queue: "new"}))
	require.ErrorIs(t, err, deadletter.ErrUnhealthy)
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.replay_start('{}', p_all => true, p_queue => 'new')")
	require.ErrorContains(t, err, "no River client works these queues: new")
	b.exec("UPDATE river_queue SET updated_at = now() - interval '1 hour'")
	_, err = b.replayer.Start(t.Context(), withDefaults(replay.Request{All: true}))
	require.ErrorContains(t, err, "no River client works queue old", "the client stopped")
	b.registerQueue("new")
	b.start(replay.Request{All: true, Queue: "new"})
	b.runOnce()
	require.Equal(t, 2, b.count("SELECT count(*) FROM river_job WHERE state = 'available' AND queue = 'new'"))
}

// Entries of one ordering key are sent one after another in the order of their messages, for any
// order of failures and any first entry of the run.
func TestRun_KeepsOrderOfEachKey(t *testing.T) {
	t.Parallel()
	for _, newest := range []bool{false, true} {
		for _, ordered := range []bool{false, true} { // also as in a queue that keeps the order
			b := setup(t)
			b.fail(2, "a", "T")
			const insert = `INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'dlqd_message',
				jsonb_build_object('messageId', $1::text || i, 'kind', 'k', 'orderingKey', $1::text, 'payload', i), 'a', 1,
					'running' FROM generate_series(1, 6) i`
			b.exec(insert, "x")
			b.exec(insert, "y")
			if ordered {
				b.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
					SELECT queue, args ->> 'orderingKey', id, created_at FROM river_job WHERE state = 'running' ORDER BY id DESC`)
			}
			b.exec(`UPDATE river_job SET state = 'discarded',
				finalized_at = now() - hashtext(args ->> 'messageId') % 1000 * interval '1 s', attempt = 1,
					errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb] WHERE state = 'running'`)
			b.file()
			if ordered {
				b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual'") // or any other move
				b.exec("DELETE FROM dlq.ordered_jobs")
			}
			run := b.start(replay.Request{All: true, NewestFirst: newest, BatchSize: 3})
			sent := map[string][]int{}
			for range 30 {
				b.runOnce()
				rows, err := b.pool.Query(t.Context(), `SELECT args ->> 'orderingKey', (args ->> 'payload')::int FROM river_job
					WHERE state = 'available' AND args ? 'orderingKey'`)
				require.NoError(t, err)
				inProgress := map[string]int{}
				for rows.Next() {
					var key string
					var n int
					require.NoError(t, rows.Scan(&key, &n))
					inProgress[key]++
					if list := sent[key]; len(list) == 0 || list[len(list)-1] != n {
						sent[key] = append(list, n)
					}
				}
				require.NoError(t, rows.Err())
				require.LessOrEqual(t, max(inProgress["x"], inProgress["y"]), 1)
				b.endJobs("completed", 100)
			}
			want := []int{1, 2, 3, 4, 5, 6}
			if ordered {
				want = []int{6, 5, 4, 3, 2, 1}
			}
			require.Equal(t, map[string][]int{"x": want, "y": want}, sent)
			require.Equal(t, "completed", b.get(run).Status)
			require.EqualValues(t, 14, b.get(run).Replayed)
		}
	}
}

// failKey makes messages of an ordering key fail, from 1 on, and files them.
func (b *bundle) failKey(key string, messages int, more string) {
	b.Helper()
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'dlqd_message',
		jsonb_build_object('messageId', $1::text || i, 'kind', 'k', 'orderingKey', $1::text, 'payload', i)
			|| CASE i WHEN 1 THEN $3::jsonb ELSE '{}' END, 'a', 1, 'running' FROM generate_series(1, $2) i`,
		key, messages, more)
	b.exec(`UPDATE river_job SET state = 'discarded', attempt = 1,
		finalized_at = now() - hashtext(args ->> 'messageId') % 1000 * interval '1 s',
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	b.file()
}

// closuresOf returns the closures of a key's messages in a run, in the order of the messages.
func (b *bundle) closuresOf(run *replay.Run, key string) (closures []string) {
	b.Helper()
	rows, err := b.pool.Query(b.Context(), `SELECT coalesce(x.outcome, 'to_go') || coalesce(': ' || x.detail, '')
		FROM dlq.replay_run_entries x JOIN dlq.dead_letter_queue e ON e.id = x.entry_id
		WHERE x.run_id = $1 AND e.ordering_key = $2 ORDER BY e.river_job_id`, run.ID, key)
	require.NoError(b, err)
	closures, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(b, err)
	return closures
}

// An entry of an ordering key goes only after its predecessor in the run has succeeded, or was closed.
func TestRun_FollowersWaitForSuccess(t *testing.T) {
	t.Parallel()
	for _, newest := range []bool{false, true} {
		for _, progressive := range []bool{false, true} {
			b := setup(t)
			b.failKey("good", 3, `{}`)
			b.failKey("bad", 5, `{}`)
			b.failKey("closed", 3, `{}`)
			b.failKey("stale", 3, `{"expiresAt": "2020-01-01T00:00:00Z"}`)
			run := b.start(replay.Request{All: true, NewestFirst: newest, Progressive: progressive, SkipStale: new(true)})
			b.exec(`SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE event_id = 'closed1'), 'kim')`)
			for range 10 {
				b.turn()
				b.exec(`UPDATE river_job SET finalized_at = now(), attempt = 1,
					state = CASE args ->> 'messageId' WHEN 'bad2' THEN 'discarded' ELSE 'completed' END::river_job_state,
					errors = CASE args ->> 'messageId' WHEN 'bad2' THEN ARRAY['{"error": "x", "attempt": 1}'::jsonb] END
					WHERE state = 'available'`)
				if progressive {
					b.exec("SELECT dlq.replay_go_on($1) FROM dlq.replay_run_groups WHERE state IN ('held', 'stopped')", run.ID)
				}
			}
			require.Equal(t, []string{"succeeded", "succeeded", "succeeded"}, b.closuresOf(run, "good"))
			bad := b.closuresOf(run, "bad")
			require.Equal(t, []string{"succeeded", "failed: x"}, bad[:2])
			for _, follower := range bad[2:] {
				require.Regexp(t, "^skipped: an earlier one of its ordering key failed again: dead letter [0-9a-f-]+$", follower)
			}
			require.Equal(t, []string{"succeeded", "succeeded"}, b.closuresOf(run, "closed")[1:])
			stale := b.closuresOf(run, "stale")
			require.Contains(t, stale[0], "skipped: its work is out of date")
			for _, follower := range stale[1:] {
				require.Regexp(t, "^skipped: an earlier one of its ordering key was skipped: dead letter [0-9a-f-]+$", follower)
			}
			got := b.get(run)
			require.Equal(t, "completed", got.Status)
			require.EqualValues(t, 7, got.Skipped)
			require.EqualValues(t, 7, got.Replayed)
		}
	}
}

// There are many keys, several processes that stop at any time, and redeliveries that fail at random. No entry is sent
// before its predecessor has succeeded.
func TestRun_NoFollowerOvertakes(t *testing.T) {
	t.Parallel()
	for _, progressive := range []bool{false, true} {
		b := setup(t)
		random := rand.New(rand.NewPCG(1, 2))
		for key := range 12 {
			b.failKey("k"+strconv.Itoa(key), 1+random.IntN(6), `{}`)
		}
		run := b.start(replay.Request{All: true, BatchSize: 3, Progressive: progressive, NewestFirst: random.IntN(2) == 0})
		for b.get(run).Status != "completed" {
			var wg sync.WaitGroup
			for range 3 {
				runner, patience := b.newRunner(), time.Duration(1+random.IntN(50))*time.Millisecond
				wg.Go(func() {
					ctx, cut := context.WithTimeout(t.Context(), patience)
					defer cut()
					for ctx.Err() == nil {
						_, _ = runner.RunOnce(ctx) // it is cut off
					}
				})
			}
			wg.Wait()
			b.turn()
			b.endJobs("completed", random.IntN(8))
			b.endJobs("discarded", random.IntN(2))
			if progressive {
				b.exec(`SELECT dlq.replay_go_on($1) FROM dlq.replay_runs
					WHERE EXISTS (SELECT FROM dlq.replay_run_groups WHERE state IN ('held', 'stopped'))`, run.ID)
			} else if b.get(run).Status == "stopped" {
				require.NoError(t, b.replayer.Control(t.Context(), run.ID, "resume", "kim"))
			}
		}
		const ordered = `SELECT count(*) FROM (
			SELECT x.outcome, x.job_id, x.sent_at, lag(x.outcome) OVER k AS before, lag(x.ended_at) OVER k AS ended_before
			FROM dlq.replay_run_entries x JOIN dlq.dead_letter_queue e ON e.id = x.entry_id
			WINDOW k AS (PARTITION BY e.ordering_key ORDER BY e.river_job_id)) o WHERE before IS NOT NULL AND `
		require.Zero(t, b.count(ordered+"job_id IS NOT NULL AND (before <> 'succeeded' OR ended_before > sent_at)"))
		require.Positive(t, b.count(ordered+"outcome = 'skipped' AND before = 'failed'"))
		require.Positive(t, b.count(ordered+"outcome = 'succeeded'"))
	}
}

// A redelivery whose job was deleted has ended: it neither blocks the run nor counts towards its
// concurrency.
func TestRun_CountsDeletedRedeliveryAsFailed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "a", "T")
	run := b.start(replay.Request{All: true, Concurrency: 1})
	b.runOnce()
	b.exec("DELETE FROM river_job WHERE state = 'available'")
	_, err := b.store.SweepRedeliveries(t.Context(), uuid.Nil)
	require.NoError(t, err)
	b.runOnce()
	require.EqualValues(t, 2, b.get(run).Replayed)
	b.endJobs("completed", 1)
	b.runOnce()
	got := b.get(run)
	require.Equal(t, "completed", got.Status)
	require.EqualValues(t, 1, got.Failed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_run_entries WHERE detail LIKE 'job % is gone'"))
}

// An entry that the database rejects is skipped and does not block the others.
func TestRun_SkipsRejectedEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(12, "a", "T")
	b.exec(`ALTER TABLE river_job ADD CONSTRAINT no_seven CHECK (NOT (state = 'available' AND args @> '{"n": 7}'))`)
	run := b.start(replay.Request{All: true, BatchSize: 5})
	for range 20 {
		b.runOnce()
	}
	got := b.get(run)
	require.EqualValues(t, 11, got.Replayed)
	require.EqualValues(t, 1, got.Skipped)
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.replay_run_entries
		WHERE detail LIKE 'the database rejected it: %no_seven%'`))
}

// An entry of the batch is resolved while the batch waits for its lock, for example because its job
// was retried elsewhere.
func TestRun_SkipsEntryThatMoved(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "default", "TIMEOUT_ERROR")
	b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual'")
	run := b.start(replay.Request{All: true})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `UPDATE dlq.dead_letter_queue SET status = 'dlq_resolved', resolved_by = 'kim',
		resolution_strategy = 'manual_retry' WHERE original_event ->> 'n' = '1'`)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := b.runner.RunOnce(t.Context())
		ended <- err
	}()
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'`) > 0
	}, 5*time.Minute, 50*time.Millisecond)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-ended)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_run_entries WHERE run_id = $1 AND job_id IS NOT NULL",
		run.ID))
}

func TestStart_RejectsInvalidRequests(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "a", "T")
	for _, test := range []struct {
		request replay.Request
		kind    error
		want    string
	}{
		{replay.Request{}, deadletter.ErrInvalid, "an empty filter matches every entry"},
		{replay.Request{Filter: json.RawMessage(`{"errorTipe": "T"}`)}, deadletter.ErrInvalid, "there is no field errorTipe"},
		{
			replay.Request{Filter: json.RawMessage(`{"status": "open"}`)},
			deadletter.ErrInvalid,
			"filter: invalid input value for enum",
		},
		{
			replay.Request{Filter: json.RawMessage(`{"after": "yesterdayish"}`)},
			deadletter.ErrInvalid,
			"filter: invalid input syntax",
		},
		{
			replay.Request{Filter: json.RawMessage(`{"ids": ["x"]}`)},
			deadletter.ErrInvalid,
			"filter: invalid input syntax for type uuid",
		},
		{replay.Request{Filter: json.RawMessage(`[]`)}, deadletter.ErrInvalid, "must be a JSON object"},
		{
			replay.Request{All: true, Patch: replay.Patch{JSONPatch: json.RawMessage(`{}`)}},
			deadletter.ErrInvalid,
			"not a JSON Patch",
		},
		{
			replay.Request{All: true, Patch: replay.Patch{JSONPatch: json.RawMessage(`[]`), MergePatch: json.RawMessage(`{}`)}},
			deadletter.ErrInvalid, "cannot be combined",
		},
	} {
		_, err := b.replayer.Start(t.Context(), withDefaults(test.request))
		require.ErrorIs(t, err, test.kind, test.want)
		require.ErrorContains(t, err, test.want)
	}
	b.unmet = "circuit breaker destination:bank is open"
	_, err := b.replayer.Start(t.Context(), withDefaults(replay.Request{All: true}))
	require.ErrorIs(t, err, deadletter.ErrUnhealthy)
	require.ErrorContains(t, err, "circuit breaker destination:bank is open")
	b.start(replay.Request{All: true, Force: true})
}

func TestFilter_SelectsByEveryField(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "a", "T")
	b.fail(1, "b", "U_%")
	b.exec(`UPDATE dlq.dead_letter_open SET error_class = 'outage', error_code = '503', fingerprint = 'f', source = 's',
		subscriber_id = 'sub', tags = '{x_y,z}', dlq_retry_count = 2, kind = 'order_placed' WHERE queue = 'b'`)
	var id string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id FROM dlq.dead_letter_open WHERE queue = 'b'").Scan(&id))
	for filter, want := range map[string]int{
		`{}`: 3, `{"queue": "a"}`: 2, `{"queue": ["a", "b"]}`: 3, `{"kind": "payment.*"}`: 2,
		`{"kind": "order_*"}`: 1, `{"kind": "order.*"}`: 0, `{"kind": "*"}`: 3,
		`{"kind": ["order_placed", "nothing"]}`: 1, `{"errorType": "U_%"}`: 1,
		`{"errorClass": "outage"}`: 1, `{"errorCode": "503"}`: 1, `{"fingerprint": "f"}`: 1,
		`{"source": "s"}`: 1, `{"subscriberId": "sub"}`: 1, `{"tags": ["x_y", "z"]}`: 1,
		`{"tags": ["x_y", "w"]}`: 0, `{"minRetryCount": 1}`: 1, `{"maxRetryCount": 1}`: 2,
		`{"after": "2020-01-01T00:00:00Z"}`: 3, `{"before": "2020-01-01T00:00:00Z"}`: 0,
		`{"maxAge": "1 hour"}`: 3, `{"status": ["dlq_pending"]}`: 3, `{"status": "dlq_manual"}`: 0,
		`{"payload": {"n": 1}}`: 2, `{"payload": {"n": 1}, "queue": "b"}`: 1,
		`{"ids": ["` + id + `"]}`: 1, `{"queue": "a' OR true --"}`: 0,
	} {
		require.Equal(t, want, b.count("SELECT count(*) FROM dlq.find($1)", filter), filter)
		require.Equal(t, want, b.count("SELECT coalesce(sum(entries), 0) FROM dlq.preview($1)", filter), filter)
	}
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.find('{}', 1)"))
}

// A run that fails temporarily does not block the runs after it.
func TestRun_FailedRunDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "a", "A")
	b.fail(3, "b", "B")
	first := b.start(replay.Request{Filter: json.RawMessage(`{"errorType": ["A"]}`)})
	second := b.start(replay.Request{Filter: json.RawMessage(`{"errorType": ["B"]}`)})
	b.exec(`CREATE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.queue = 'a' THEN RAISE EXCEPTION
		USING ERRCODE = '40001'; END IF; RETURN NEW; END $$`)
	b.exec("CREATE TRIGGER collide BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION collide()")
	_, err := b.runner.RunOnce(t.Context())
	require.ErrorContains(t, err, first.ID.String())
	require.Zero(t, b.get(first).Replayed)
	require.EqualValues(t, 3, b.get(second).Replayed)
}

// A run covers the entries that its filter selected at its start. Later matches are not included;
// entries that no longer match are in its report.
func TestRun_SelectsEntriesAtStart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(10, "a", "T")
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 5), 'kim')")
	for _, newest := range []bool{false, true} {
		run := b.start(replay.Request{Filter: json.RawMessage(`{"status": "dlq_manual"}`), BatchSize: 2, NewestFirst: newest})
		require.EqualValues(t, 5, run.Total)
		b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_pending'), 'kim')")
		b.exec(`SELECT dlq.act_on('discard', ARRAY(SELECT entry_id FROM dlq.replay_run_entries WHERE run_id = $1
			ORDER BY entry_id LIMIT 1), 'kim')`, run.ID)
		for range 5 {
			b.runOnce()
		}
		b.endJobs("completed", 10)
		b.runOnce()
		got := b.get(run)
		require.Equal(t, "completed", got.Status)
		require.EqualValues(t, 4, got.Replayed)
		require.EqualValues(t, 1, got.Skipped)
		require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.replay_run_entries WHERE run_id = $1 AND outcome = 'skipped'
			AND detail = 'the entry had moved meanwhile'`, run.ID))
	}
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
}

// A dry run counts the entries that would be sent.
func TestPreview_CountsReplayableEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(4, "a", "T")
	b.exec("SELECT dlq.discard(id) FROM (SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 1) e")
	b.exec("SELECT dlq.replay(id) FROM (SELECT id FROM dlq.dead_letter_open ORDER BY id LIMIT 1) e")
	for filter, want := range map[string]int64{
		`{}`:                         2,
		`{"queue": "a"}`:             2,
		`{"status": "dlq_archived"}`: 0,
		`{"status": ["dlq_pending", "dlq_processing", "dlq_archived"]}`: 2,
	} {
		preview, err := b.replayer.Preview(t.Context(),
			withDefaults(replay.Request{All: true, Filter: json.RawMessage(filter)}))
		require.NoError(t, err)
		require.Equal(t, want, preview.Total, filter)
		require.Len(t, preview.Samples, int(want), filter)
	}
	_, err := b.replayer.Preview(t.Context(),
		withDefaults(replay.Request{Filter: json.RawMessage(`{"status": "dlq_lost"}`)}))
	require.ErrorContains(t, err, "dlq_lost")
}

// Every bulk action requires confirmation of a filter that selects all entries.
func TestFilter_SelectingEverythingNeedsConfirmation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "a", "T")
	for _, filter := range []string{
		`{}`, `{"payload": {}}`, `{"tags": []}`, `{"payload": {}, "tags": []}`, `{"kind": "*"}`, `{"kind": ["x", "**"]}`,
		`{"minRetryCount": 0}`, `{"minRetryCount": "-1"}`, `{"after": "-infinity", "before": "infinity"}`,
	} {
		for _, sql := range []string{
			"SELECT dlq.replay_start($1)", "SELECT dlq.act_where('discard', $1, 'kim')",
			"SELECT dlq.erase_begin($1, 'x')",
		} {
			_, err := b.pool.Exec(t.Context(), sql, filter)
			require.ErrorContains(t, err, "an empty filter matches", "%s of %s", sql, filter)
		}
	}
	for _, filter := range []string{
		`{"payload": {"n": 3}}`, `{"tags": ["x"]}`, `{"kind": "x*"}`, `{"minRetryCount": 1}`,
		`{"after": "2999-01-01"}`, `{"payload": {}, "queue": "x"}`,
	} {
		b.exec("SELECT dlq.act_where('discard', $1, 'kim')", filter)
	}
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
}

// A kilobyte of JSON Patch must not produce gigabytes.
func TestPatch_LimitsSize(t *testing.T) {
	t.Parallel()
	event := json.RawMessage(`{"a": ["` + strings.Repeat("x", 200) + `"]}`)
	var bomb []string
	for range 30 {
		bomb = append(bomb, `{"op": "copy", "from": "/a", "path": "/a/-"}`)
	}
	patch := replay.Patch{JSONPatch: json.RawMessage("[" + strings.Join(bomb, ",") + "]")}
	require.NoError(t, patch.Validate())
	_, err := patch.Event("k", event)
	require.ErrorContains(t, err, "copy")
	long := replay.Patch{JSONPatch: json.RawMessage("[" + strings.Repeat(bomb[0]+",", 100) + bomb[0] + "]")}
	require.ErrorContains(t, long.Validate(), "101 operations; at most 100")
	large := replay.Patch{MergePatch: json.RawMessage(`{"b": "` + strings.Repeat("x", 1<<20) + `"}`)}
	_, err = large.Event("k", event)
	require.ErrorContains(t, err, "the patched payload has")
	wide := replay.Patch{MergePatch: json.RawMessage(`{"b": [` + strings.Repeat("1e1000,", 1000) + `1]}`)}
	_, err = wide.Event("k", event)
	require.ErrorContains(t, err, "written out")
}

// An entry that a run with a patch does not send stays unedited: a later redelivery must not carry
// the patch.
func TestRun_DoesNotEditUnsentEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(5, "a", "T")
	b.file()
	job := func(n string) string {
		return "(SELECT id FROM river_job WHERE args @> '{\"n\": " + n + "}' AND NOT metadata ? 'dlq:entry_id')"
	}
	b.exec("UPDATE dlq.dead_letter_queue SET edited_event = '{\"n\": 4, \"edited\": true}' WHERE original_event @> " +
		"'{\"n\": 4}'")
	// One entry has a live equal job, one has a job that ran again and completed without capture, and
	// two have jobs that another session holds.
	b.exec("SELECT dlq.set_capture('off')")
	b.exec("UPDATE dlq.dead_letter_queue SET unique_key = 'k', unique_states = B'11111111' WHERE original_event @> " +
		"'{\"n\": 1}'")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, unique_key, unique_states)
		VALUES ('k', '{}', 'a', 1, 'available', 'k', B'11111111')`)
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = " + job("2"))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id IN ("+job("3")+", "+job("4")+") FOR UPDATE")
	require.NoError(t, err)
	run := b.start(replay.Request{All: true, Patch: replay.Patch{MergePatch: json.RawMessage(`{"amount": 999}`)}})
	b.runOnce()
	require.NoError(t, tx.Rollback(t.Context()))
	require.EqualValues(t, 1, b.get(run).Replayed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM river_job WHERE args @> '{\"n\": 5, \"amount\": 999}'"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE edited_event @> '{\"amount\": 999}'"),
		"the entry that was sent")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE edited_event = '{\"n\": 4, "+
		"\"edited\": true}'"), "an earlier edit stays")
}

// An entry's own job runs again, and a run follows it. If that job is deleted, or its failure belongs to another entry,
// the run still gets an outcome, and the group is done.
func TestRun_EndsIfFollowedJobGivesNoFailure(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]string{
		"the job is gone": "DELETE FROM river_job WHERE state = 'available'",
		"its failure is another entry's": `WITH ended AS (
				UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 2,
					errors = errors || '{"error": "again", "attempt": 2}'::jsonb WHERE state = 'available'
				RETURNING id, created_at, to_jsonb(river_job) - 'args' AS job)
			INSERT INTO dlq.retired_jobs (job_id, job_created_at, failure, attempt, entry_id, at)
			SELECT id, created_at, dlq.failure_of(id, job), 2, '0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c', now() FROM ended`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.fail(1, "a", "T")
			b.exec("UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now()")
			run := b.start(replay.Request{All: true, Progressive: true})
			b.runOnce()
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_run_entries WHERE job_id IS NOT NULL"), "it follows")
			b.exec(end)
			b.exec("SELECT dlq.apply_facts()")
			b.turn()
			got := b.get(run)
			require.Equal(t, "completed", got.Status)
			require.EqualValues(t, 1, got.Failed)
			require.Equal(t, "done", got.Groups[0].State)
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))
		})
	}
}

// In a restored database no run sends: neither a run that was in progress, nor one whose turn begins later.
func TestRun_WaitsInARestoredDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "default", "x")
	run := b.start(replay.Request{All: true})
	refused := replay.NewRunner(b.store, b.replayer.Planner, slog.New(slog.DiscardHandler),
		func(context.Context, postgres.DB) (bool, error) { return false, nil })
	_, err := refused.RunOnce(t.Context())
	require.NoError(t, err)
	require.Zero(t, b.get(run).Replayed)
	b.exec("SELECT dlq.hold_restored('ann', 'the snapshot of 04:00')")
	b.runOnce()
	require.Zero(t, b.get(run).Replayed)
	b.exec("SELECT dlq.resume_restored('ann', 'compared')")
	b.runOnce()
	require.EqualValues(t, 2, b.get(run).Replayed)
}

// A session plans the statements of a step while Postgres does not know the table yet.
func TestStep_ReadsOnlyItsEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(600, "a", "X")
	run := b.start(replay.Request{All: true})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	var read int
	for skipped := range 4 {
		before := read
		for range 8 { // after some executions Postgres uses a generic plan
			_, err = tx.Exec(t.Context(), `SELECT dlq.replay_step($1, n.ids, n.ids[1:$2], array_fill('x'::text, ARRAY[$2]),
				array_fill('stale'::text, ARRAY[$2])) FROM (SELECT ARRAY(SELECT e.entry_id FROM dlq.replay_run_entries e
				WHERE e.run_id = $1 AND e.job_id IS NULL AND e.outcome IS NULL LIMIT 4) AS ids OFFSET 0) n`, run.ID, skipped)
			require.NoError(t, err)
		}
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT idx_tup_fetch FROM pg_stat_xact_user_tables
			WHERE relid = 'dlq.replay_run_entries'::regclass`).Scan(&read))
		require.Less(t, read-before, 1000, "8 steps of 4 entries, %d of them skipped, read rows", skipped)
	}
}
