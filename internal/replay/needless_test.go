package replay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

// why returns the reason why a run skipped the entry whose args or payload have this n. It is "" if the run sent the
// entry.
func (b *bundle) why(run *replay.Run, n int) string {
	b.Helper()
	var why string
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT coalesce(r.detail, '') FROM dlq.replay_run_entries r
		JOIN dlq.dead_letter_queue e ON e.id = r.entry_id
		WHERE r.run_id = $1 AND coalesce(e.original_event #>> '{payload,n}', e.original_event ->> 'n') = $2::int::text`,
		run.ID, n).Scan(&why))
	return why
}

// complete inserts a job that has completed.
func (b *bundle) complete(kind, queue, args, metadata string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at, metadata)
		VALUES ($1, $2::jsonb, $3, 1, 'completed', now(), $4::jsonb)`, kind, args, queue, metadata)
}

// failMessage makes a message fail and files it.
func (b *bundle) failMessage(queue, args string) {
	b.Helper()
	b.registerQueue(queue)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('dlqd_message', $2, $1, 1, 'running')`,
		queue, args)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	b.file()
}

func TestRun_SkipsSupersededWork(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const kind = "payment.captured" // kind of the jobs that fail inserts
	b.complete(kind, "a", `{"n": 1, "amount": 10}`, `{}`)
	b.fail(4, "a", "T")
	b.failMessage("m", `{"messageId": "m11", "kind": "k", "orderingKey": "x", "payload": {"n": 11}}`)
	b.failMessage("m", `{"messageId": "m12", "kind": "k", "orderingKey": "y", "payload": {"n": 12}}`)
	b.failMessage("m", `{"messageId": "m13", "kind": "k", "payload": {"n": 13}}`)
	b.failMessage("m", `{"messageId": "m14", "kind": "k", "payload": {"n": 14}}`)
	b.complete(kind, "b", `{"n": 2, "amount": 10}`, `{}`)
	b.complete(kind, "a", `{"n": 3, "amount": 10}`, `{"dlq:entry_id": "00000000-0000-0000-0000-000000000001"}`)
	b.complete(kind, "a", `{"n": 4, "amount": 10, "more": true}`, `{}`)
	b.complete("dlqd_message", "m", `{"messageId": "m21", "kind": "k", "orderingKey": "x", "payload": 1}`, `{}`)
	b.complete("dlqd_message", "other", `{"messageId": "m22", "kind": "k", "orderingKey": "y", "payload": 1}`, `{}`)
	b.complete("dlqd_message", "m", `{"messageId": "m23", "kind": "k", "payload": {"n": 13}}`, `{}`)
	b.complete("dlqd_message", "m", `{"messageId": "m24", "kind": "other", "payload": {"n": 14}}`, `{}`)

	run := b.start(replay.Request{All: true, SkipSuperseded: new(true), BatchSize: 100})
	b.runOnce()
	for n, why := range map[int]string{
		1: "", 2: "with the same args has completed since", 3: "", 4: "",
		11: "with the same ordering key has completed since", 12: "", 13: "with the same payload has completed since", 14: "",
	} {
		if got := b.why(run, n); why == "" {
			require.Empty(t, got, n)
		} else {
			require.Contains(t, got, why, n)
		}
	}
	got := b.get(run)
	require.True(t, got.SkipSuperseded)
	require.EqualValues(t, 3, got.Skipped)
	require.EqualValues(t, 5, got.Replayed)
	require.Zero(t, got.NotKnown)
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status <> 'dlq_processing'"),
		"a skipped entry keeps its state")
}

func TestRun_SkipsWorkWithTheSameUniqueKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, unique_key, unique_states)
		VALUES ('sync', '{"n": 1}', 'a', 1, 'running', 'k', B'11110101')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb]`)
	b.file()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at, unique_key, unique_states)
		VALUES ('sync', '{"n": 2}', 'a', 1, 'completed', now(), 'k', B'11110101')`)
	run := b.start(replay.Request{All: true, SkipSuperseded: new(true), Force: true})
	b.runOnce()
	require.Contains(t, b.why(run, 1), "with the same unique key has completed since")
}

// Args without a value would read the whole index. Instead, the jobs of the kind are compared, if there are few of
// them.
func TestRun_SendsIfSupersededIsNotKnown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('few', '{}', 'a', 1, 'running'),
		('many', '{}', 'a', 1, 'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb]`)
	b.file()
	b.complete("few", "a", `{}`, `{}`)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at)
		SELECT 'many', jsonb_build_object('n', i), 'a', 1, 'completed', now() FROM generate_series(1, 1001) i`)
	run := b.start(replay.Request{All: true, SkipSuperseded: new(true)})
	b.runOnce()
	got := b.get(run)
	require.EqualValues(t, 1, got.Skipped)
	require.EqualValues(t, 1, got.Replayed)
	require.EqualValues(t, 1, got.NotKnown)

	// Without River's index, the table is not read.
	b.fail(1, "a", "T")
	b.exec("DROP INDEX river_job_args_index")
	run = b.start(replay.Request{All: true, SkipSuperseded: new(true), Filter: []byte(`{"errorType": ["T"]}`)})
	b.runOnce()
	require.EqualValues(t, 1, b.get(run).NotKnown)
}

// These jobs do not count as later work: copies of completed jobs (dlq.run_again), the entry's own jobs, and a later
// job that failed again and has an open entry.
func TestRun_CountsNoRepeatedWorkAsLaterWork(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const kind = "payment.captured"
	b.complete(kind, "a", `{"n": 1, "amount": 10}`, `{}`)
	b.fail(4, "a", "T")
	b.complete(kind, "a", `{"n": 4, "amount": 10}`, `{}`)
	for _, note := range []string{"first incident", "second incident"} {
		b.exec("SELECT dlq.run_again('2020-01-01', $1)", note)
		b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'available'")
	}
	b.exec(`WITH j AS (INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at)
			VALUES ($1, '{"n": 2, "amount": 10}', 'a', 1, 'completed', now()) RETURNING id, created_at)
		INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id)
		SELECT j.id, j.created_at, e.id FROM j JOIN dlq.dead_letter_queue e ON e.original_event ->> 'n' = '2'`, kind)
	b.fail(3, "a", "LATER")
	b.exec(`UPDATE river_job SET state = 'completed', finalized_at = now()
		WHERE id = (SELECT max(id) FROM river_job WHERE state = 'discarded' AND args ->> 'n' = '3')`)
	b.exec("SELECT dlq.apply_facts()")
	b.exec(`SELECT dlq.act_on('reopen', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE error_type = 'LATER'
		AND status = 'dlq_resolved'), 'kim')`)
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE error_type = 'LATER'"))

	run := b.start(replay.Request{Filter: []byte(`{"errorType": ["T"]}`), SkipSuperseded: new(true)})
	b.runOnce()
	for n := 1; n <= 3; n++ {
		require.Empty(t, b.why(run, n), n)
	}
	require.Contains(t, b.why(run, 4), "with the same args has completed since")
}

// Any client can write infinite times.
func TestRun_TakesInfiniteTimes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	planner, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{
		"dlq-routing": "queues:\n  old: {staleAfter: 1h}\n",
	}), b)
	require.NoError(t, err)
	b.replayer.Planner = func() *strategy.Planner { return planner }
	b.runner = b.newRunner()
	b.failMessage("old", `{"messageId": "m1", "kind": "k", "payload": {"n": 1}, "scheduledAt": "infinity"}`)
	b.failMessage("old", `{"messageId": "m2", "kind": "k", "payload": {"n": 2}, "scheduledAt": "-infinity"}`)
	b.failMessage("old", `{"messageId": "m3", "kind": "k", "payload": {"n": 3}, "expiresAt": "infinity"}`)
	b.failMessage("old", `{"messageId": "m4", "kind": "k", "payload": {"n": 4}}`)
	b.failMessage("old", `{"messageId": "m5", "kind": "k", "payload": {"n": 5}}`)
	b.exec("UPDATE dlq.dead_letter_queue SET job_created_at = '-infinity' WHERE original_event #>> '{payload,n}' = '4'")
	b.complete("dlqd_message", "old", `{"messageId": "m6", "kind": "k", "payload": {"n": 5}}`, `{}`)
	b.exec("UPDATE river_job SET finalized_at = 'infinity' WHERE state = 'completed'")
	run := b.start(replay.Request{All: true, SkipStale: new(true), SkipSuperseded: new(true)})
	b.runOnce()
	for n, why := range map[int]string{4: "older than staleAfter", 5: "with the same payload has completed since"} {
		require.Contains(t, b.why(run, n), why)
	}
	require.EqualValues(t, 3, b.get(run).Replayed)
}

// wrapSuperseded makes dlq.superseded run a statement before each search for later work.
func (b *bundle) wrapSuperseded(statement string) {
	b.Helper()
	b.exec("ALTER FUNCTION dlq.superseded RENAME TO superseded_before")
	b.exec(`CREATE FUNCTION dlq.superseded(p_ids uuid[])
		RETURNS TABLE (entry_id uuid, known boolean, job_id bigint, same text) LANGUAGE plpgsql AS $$
		BEGIN ` + statement + `; RETURN QUERY SELECT * FROM dlq.superseded_before(p_ids); END $$`)
}

// A search for later work can take a second. An application must not wait that long for jobs that the run has locked.
func TestRun_LooksForLaterWorkWithoutLockingJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(30, "a", "T")
	b.wrapSuperseded(`IF EXISTS (SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid()
			AND l.relation = 'river_job'::regclass AND l.mode <> 'AccessShareLock') THEN
			RAISE EXCEPTION 'the transaction has locked jobs';
		END IF`)
	run := b.start(replay.Request{All: true, SkipSuperseded: new(true), BatchSize: 10})
	for range 3 {
		b.runOnce()
	}
	require.EqualValues(t, 30, b.get(run).Replayed)
}

// If Postgres cancels the search for later work, the run sends the entry, and the transaction of the batch continues.
func TestRun_SendsIfTheLookForLaterWorkIsCancelled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(3, "a", "T")
	b.wrapSuperseded("PERFORM pg_sleep(300)")
	run := b.start(replay.Request{All: true, SkipSuperseded: new(true)})
	b.runOnce()
	got := b.get(run)
	require.EqualValues(t, 3, got.Replayed)
	require.EqualValues(t, 3, got.NotKnown)
}

func TestRun_SkipsStaleWork(t *testing.T) {
	t.Parallel()
	b := setup(t)
	planner, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{"dlq-routing": `
queues:
  old: {staleAfter: 1h}
kinds:
  payment.*: {staleAfter: 2h}
  kept: {plan: {strategy: manual}}
`}), b)
	require.NoError(t, err)
	b.replayer.Planner = func() *strategy.Planner { return planner }
	b.runner = b.newRunner()
	message := func(n int, kind, more string) {
		b.failMessage("old", `{"messageId": "m`+string(rune('a'+n))+`", "kind": "`+kind+`", "payload": {"n": `+
			string(rune('0'+n))+`}`+more+`}`)
	}
	past := time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)
	future := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	message(1, "fresh", "")
	message(2, "fresh", `, "expiresAt": "`+past+`"`)
	message(3, "fresh", `, "expiresAt": "`+future+`"`)
	message(4, "kept", "")
	message(5, "payment.captured", "")
	message(6, "payment.captured", "")
	b.exec(`UPDATE dlq.dead_letter_queue SET job_created_at = now() - interval '90 minutes'
		WHERE original_event #>> '{payload,n}' IN ('4', '5')`)
	b.exec(`UPDATE dlq.dead_letter_queue SET job_created_at = now() - interval '150 minutes'
		WHERE original_event #>> '{payload,n}' = '6'`)
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, metadata) VALUES
		('sync', '{"n": 7}', 'a', 1, 'running', jsonb_build_object('dlqd:expires_at', $1::text)),
		('sync', '{"n": 8}', 'a', 1, 'running', '{"dlqd:expires_at": "soon"}')`, past)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	b.file()

	run := b.start(replay.Request{All: true, SkipStale: new(true), Progressive: true})
	b.turn()
	for n, why := range map[int]string{
		1: "", 2: "out of date: it expired at " + past, 3: "", 4: "out of date: it is older than staleAfter of queue old, 1h0m0s",
		5: "", 6: "out of date: it is older than staleAfter of kind payment.captured, 2h0m0s",
		7: "out of date: it expired at " + past, 8: "",
	} {
		if got := b.why(run, n); why == "" {
			require.Empty(t, got, n)
		} else {
			require.Contains(t, got, why, n)
		}
	}
	b.endJobs("completed", 10)
	b.turn()
	got := b.get(run)
	require.Equal(t, "completed", got.Status)
	require.EqualValues(t, 4, got.Skipped)
	require.EqualValues(t, 4, got.Succeeded)
}

func TestPreview_EstimatesWhatNeedNotGo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(4, "a", "T")
	b.complete("payment.captured", "a", `{"n": 2, "amount": 10}`, `{}`)
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"dlqd:expires_at": "2020-01-01T00:00:00Z"}'
		WHERE original_event ->> 'n' IN ('3', '4')`)
	other := b.start(replay.Request{Filter: []byte(`{"payload": {"n": 1}}`), Rate: 0.001})
	require.NoError(t, b.replayer.Control(t.Context(), other.ID, "pause", "kim"))
	b.exec(`INSERT INTO dlq.settings (key, value) VALUES ('approvals', '{"rules": [{"operations": ["replay"], "above": 2}]}')
		ON CONFLICT (key) DO UPDATE SET value = excluded.value`)
	ctx := deadletter.WithOrigin(t.Context(), "API")
	preview, err := b.replayer.Preview(ctx, withDefaults(replay.Request{All: true, Patch: replay.Patch{
		JSONPatch: []byte(`[{"op": "test", "path": "/n", "value": 1}]`),
	}}))
	require.NoError(t, err)
	require.Equal(t, []replay.Estimate{
		{What: "goes", Entries: 1, Low: 1, High: 1, Sampled: 4},
		{What: "stale", Entries: 2, Low: 2, High: 2, Sampled: 4},
		{What: "superseded", Entries: 1, Low: 1, High: 1, Sampled: 4},
		{What: "other_run", Entries: 1, Low: 1, High: 1, Sampled: 4},
		{What: "ran_not_known", Entries: 4, Low: 4, High: 4, Sampled: 4},
		{What: "patch_fails", Entries: 3, Low: 3, High: 3, Sampled: 4},
	}, preview.Estimates)
	require.Equal(t, "needs a second person for more than 2 dead letters", preview.Approval)
	words := replay.PlainWords()
	require.Equal(t, "3 of 4 will be skipped, because the patch does not apply",
		preview.Estimates[5].Text(words, preview.Total))
	require.Contains(t, replay.Estimate{What: "stale", Entries: 420, Low: 345, High: 506, Sampled: 1000}.Text(words, 4200),
		"about 420 (345 to 506) of 4200 are out of date; estimated from 1000 at random")
	require.Equal(t, "1 of 4 is also in another replay run, which skips what this run has sent",
		preview.Estimates[3].Text(words, preview.Total))
	require.Equal(t, "1 of 2 is assigned to an operator; this does not hold it",
		replay.Estimate{What: "assigned", Entries: 1, Sampled: 2}.Text(words, 2))
}

// With a patch, the preview reads 100 payloads. It counts only these entries as going or not going.
func TestPreview_CountsEntriesThePatchDoesNotFitAsNotGoing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'payment.captured',
		jsonb_build_object('n', i, CASE WHEN i % 2 = 0 THEN 'price' ELSE 'amount' END, 10), 'a', 1, 'running'
		FROM generate_series(1, 150) i`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb]`)
	b.file()
	b.complete("payment.captured", "a", `{"n": 1, "amount": 10}`, `{}`)
	request := withDefaults(replay.Request{All: true, SkipSuperseded: new(true), Patch: replay.Patch{
		JSONPatch: []byte(`[{"op": "test", "path": "/amount", "value": 10}]`),
	}})
	preview, err := b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	found := map[string]replay.Estimate{}
	for _, e := range preview.Estimates {
		found[e.What] = e
	}
	require.EqualValues(t, 100, found["goes"].Sampled)
	require.InDelta(t, 75, found["goes"].Entries, 45)
	require.InDelta(t, 75, found["patch_fails"].Entries, 45)
	require.Equal(t, found["goes"].Entries, preview.Expect.Untried)

	request.Filter = []byte(`{"payload": {"amount": 10}}`)
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.NotContains(t, estimates(preview), "patch_fails")
	request.Filter = []byte(`{"payload": {"n": 2}}`)
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Zero(t, preview.Expect.Untried)
	require.Equal(t, map[string]int64{
		"goes": 0, "stale": 0, "superseded": 0, "ran_not_known": 1, "patch_fails": 1,
	}, estimates(preview))
	run := b.start(*request)
	b.runOnce()
	require.Contains(t, b.why(run, 2), "the patch does not apply")
}

// dlq.count_groups counts by queue, failure group, error type and age, and samples at random.
func TestCountGroups_SamplesAtRandom(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(60, "a", "T")
	b.fail(30, "b", "U")
	b.exec("UPDATE dlq.dead_letter_open SET fingerprint = CASE WHEN queue = 'a' THEN 'f1' ELSE 'f2' END")
	for filter, want := range map[string]string{
		`{}`:                    "a f1 T under 1 hour 60, b f2 U under 1 hour 30",
		`{"fingerprint": "f2"}`: "b f2 U under 1 hour 30",
		`{"queue": "none"}`:     "",
	} {
		var got string
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(concat_ws(' ', queue, fingerprint,
			error_type, age, entries), ', ' ORDER BY entries DESC), '') FROM dlq.count_groups($1)`, filter).Scan(&got))
		require.Equal(t, want, got)
	}
	sampled := func(most int) int {
		return b.count(`SELECT count(DISTINCT e.id) FROM dlq.count_groups('{}', $1) c CROSS JOIN unnest(c.sample) s (id)
			JOIN dlq.dead_letter_open e ON e.id = s.id AND (e.queue, e.fingerprint) = (c.queue, c.fingerprint)`, most)
	}
	require.Equal(t, 90, sampled(1000))
	require.Equal(t, 40, sampled(40))
	require.Zero(t, sampled(0))

	// Every entry has the same chance, at each place in the pass. Of queue b, the first pass has fewer than 9 candidates
	// in a tenth of the cases. Kinds are not in the index.
	b.exec("VACUUM ANALYZE dlq.dead_letter_open")
	const most = 9
	for _, filter := range []string{`{}`, `{"queue": "b"}`, `{"kind": "payment.captured"}`} {
		rows, err := b.pool.Query(t.Context(), `SELECT e.id::text, count(s.id)::integer, sum(count(s.id)) OVER ()::integer,
				count(*) OVER ()::integer
			FROM dlq.dead_letter_open e
			LEFT JOIN (SELECT s.id FROM generate_series(1, 400) i CROSS JOIN LATERAL dlq.count_groups(
				CASE WHEN i > 0 THEN $1::jsonb END, $2) c CROSS JOIN unnest(c.sample) s (id)) s ON s.id = e.id
			WHERE $1::jsonb ->> 'queue' IS NULL OR e.queue = 'b' GROUP BY 1`, filter, most)
		require.NoError(t, err)
		for rows.Next() {
			var id string
			var times, samples, entries int
			require.NoError(t, rows.Scan(&id, &times, &samples, &entries))
			require.Equal(t, 400*most, samples, filter)
			require.InDelta(t, 400*most/entries, times, 50, "%s: an entry is in as many samples as the others", filter)
		}
		require.NoError(t, rows.Err())
	}
}

// The count of groups reads only the index.
func TestCountGroups_ReadsOneIndex(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(200, "a", "T")
	b.exec("VACUUM ANALYZE dlq.dead_letter_open")
	var where, plan string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT dlq.filter_where(dlq.replayable('{}'))").Scan(&where))
	require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"); err != nil {
			return err
		}
		return tx.QueryRow(t.Context(), `EXPLAIN (FORMAT json) SELECT e.queue, e.fingerprint, e.error_type, e.id
			FROM dlq.dead_letter_queue e WHERE `+where+
			" AND (e.stage <> 'inbox' OR NOT dlq.is_repeat(e.river_job_id, e.job_created_at))").Scan(&plan)
	}))
	require.Regexp(t, `(?s)"Node Type": "Index Only Scan"[^}]*"Index Name": "dead_letter_open_groups"`, plan)
}

// The preview says what an earlier attempt may have done: the last attempt of the job or of the last redelivery.
func TestPreview_SaysWhatRanBefore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, attempt, errors, metadata)
		SELECT 'sync', jsonb_build_object('n', i), 'a', 3, 'running', a.attempt,
			ARRAY[jsonb_build_object('error', 'x', 'attempt', a.attempt, 'at', now() - a.seconds * interval '1 second')],
			a.metadata::jsonb
		FROM (VALUES (1, 6, 1, '{}'), (2, 4, 3, '{}'), (3, 60, 2, '{"river:resumable_step": "charge"}'),
			(4, NULL, 1, '{}')) a (i, seconds, attempt, metadata)`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'")
	b.file()
	request := withDefaults(replay.Request{All: true})
	preview, err := b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, []replay.Estimate{
		{What: "ran_long", Entries: 2, Low: 2, High: 2, Sampled: 4},
		{What: "ran_not_known", Entries: 1, Low: 1, High: 1, Sampled: 4},
		{What: "repeated", Entries: 2, Low: 2, High: 2, Sampled: 4},
		{What: "steps_done", Entries: 1, Low: 1, High: 1, Sampled: 4},
	}, preview.Estimates[3:])
	require.Equal(t, "2 of 4 ran for more than 5s before the failure, and may have done something",
		preview.Estimates[3].Text(replay.PlainWords(), preview.Total))

	// After a redelivery has failed, its attempt is the last one.
	run := b.start(*request)
	b.runOnce()
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('error', 'x', 'attempt', 1, 'at', now() - interval '7 seconds')]
		WHERE state = 'available'`)
	b.turn()
	require.EqualValues(t, 4, b.get(run).Failed)
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, "ran_long", preview.Estimates[3].What)
	require.EqualValues(t, 4, preview.Estimates[3].Entries)
	require.Equal(t, "repeated", preview.Estimates[4].What)
	require.EqualValues(t, 4, preview.Estimates[4].Entries)
}

// The preview uses earlier redeliveries of the same failure groups, and the run stores the expectation.
func TestPreview_SaysWhatToExpect(t *testing.T) {
	t.Parallel()
	b := setup(t)
	grouped := func() {
		b.exec("UPDATE dlq.dead_letter_open SET fingerprint = CASE queue WHEN 'a' THEN 'f' ELSE 'g' END")
	}
	b.fail(9, "a", "T")
	grouped()
	request := withDefaults(replay.Request{All: true})
	preview, err := b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, &replay.Expectation{Untried: 9}, preview.Expect)
	require.Equal(t, []string{"no earlier replay run has outcomes of the failure groups of 9: they were never tried"},
		preview.Expect.Texts(replay.PlainWords()))

	b.start(*request)
	b.turn()
	b.endJobs("discarded", 9)
	b.turn()
	grouped()
	second := b.start(*request)
	require.EqualValues(t, 9, second.Forecast.Expect.Tried)
	b.turn()
	b.endJobs("completed", 7)
	b.endJobs("discarded", 2)
	b.turn()

	b.fail(20, "a", "T")
	b.fail(3, "b", "U")
	grouped()
	run := b.start(*request)
	e := run.Forecast.Expect
	require.Equal(t, [3]int64{22, 3, 17}, [3]int64{e.Tried, e.Untried, e.Recover})
	require.Less(t, e.Low, e.Recover)
	require.Greater(t, e.High, e.Recover)
	require.Len(t, e.Groups, 1)
	g := e.Groups[0]
	require.Equal(t, [6]int64{22, 7, 2, 0, 9, 17},
		[6]int64{g.Entries, g.Recovered, g.Failed, g.RecoveredBefore, g.FailedBefore, g.Recover})
	require.Contains(t, g.Text(replay.PlainWords()), "f in a: 7 of 9 recovered since ")
	require.Contains(t, g.Text(replay.PlainWords()), ", 0 of 9 before; of 22, about 17 (")

	// The run skips these entries, so the expectation excludes them.
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"dlqd:expires_at": "2020-01-01T00:00:00Z"}'
		WHERE status = 'dlq_pending' AND (queue = 'b' OR (original_event ->> 'n')::integer > 10)`)
	request.SkipStale = new(true)
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	goes := estimates(preview)["goes"]
	require.Positive(t, goes)
	require.Less(t, goes, int64(22))
	require.Equal(t, [2]int64{goes, 0}, [2]int64{preview.Expect.Tried, preview.Expect.Untried})
	require.Equal(t, goes, preview.Expect.Groups[0].Entries)
	require.Less(t, preview.Expect.Recover, int64(17))

	// The forecasts of ended runs are compared with the outcomes: all 9 entries failed before, and 7 recovered.
	b.exec("SELECT dlq.replay_cancel($1, 'kim')", run.ID)
	b.turn()
	c, err := b.replayer.Calibration(t.Context())
	require.NoError(t, err)
	require.Equal(t, [5]int64{2, 2, 1, 0, 7}, [5]int64{c.Runs, c.Groups, c.Judged, c.Held, c.Recovered})
	require.Less(t, c.Latest[1].High, int64(7))
	require.Equal(t, replay.CalibrationGroup{
		Run: second.ID, Queue: "a", Fingerprint: "f", Entries: 9, Expected: c.Latest[1].Expected, Low: c.Latest[1].Low,
		High: c.Latest[1].High, Recovered: 7, Failed: 2, Judged: true,
	}, c.Latest[1])
	require.False(t, c.Latest[0].Judged, "its entries were not sent")
	require.Contains(t, c.Text(replay.PlainWords()), "0 of 1 forecasts of a failure group held their 80 % interval (0 %)")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_calibration() WHERE judged AND NOT held"))
}

// The preview says how much each queue gets over time, and how much it got in the last hour.
func TestPreview_SaysTheLoad(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(5, "a", "T")
	b.fail(15, "b", "T")
	b.exec("SELECT dlq.refresh_rollups()")
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true, Rate: 8}))
	require.NoError(t, err)
	require.Equal(t, []replay.Load{
		{Queue: "b", Entries: 15, PerSecond: []float64{0, 0, 4, 8, 8, 8, 8, 8, 8, 8}, Failures: 15},
		{Queue: "a", Entries: 5, PerSecond: []float64{8, 8, 4, 0, 0, 0, 0, 0, 0, 0}, Failures: 5},
	}, preview.Load)
	require.Equal(t, "queue b gets 15, at most 8 per second; in the last hour, 0 were redelivered and 15 failed; how "+
		"many succeeded is not known", preview.Load[0].Text(replay.PlainWords()))
	require.Empty(t, preview.Destinations)
	require.Nil(t, preview.Subscribers)

	preview, err = b.replayer.Preview(t.Context(), withDefaults(replay.Request{
		All: true, Rate: 8, Queue: "c",
		NewestFirst: true,
	}))
	require.NoError(t, err)
	require.Len(t, preview.Load, 1)
	require.EqualValues(t, 20, preview.Load[0].Entries)
	require.Equal(t, "c", preview.Load[0].Queue)
}

// The preview says whom the messages concern, and what each destination got in the last hour, as far as dlqd counts it.
func TestPreview_SaysWhoElseIsHit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for n, subscriber := range []string{"sub_1", "sub_2", "sub_2", ""} {
		b.failMessage("default", fmt.Sprintf(`{"messageId": "m%d", "kind": "k", "subscriberId": %q, "payload": {"n": %[1]d}}`,
			n, subscriber))
	}
	b.exec("UPDATE dlq.dead_letter_queue SET destination = 'default'")
	b.fail(1, "a", "T")
	b.exec("SELECT dlq.refresh_rollups()")
	request := withDefaults(replay.Request{All: true, Rate: 8})
	preview, err := b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Nil(t, preview.Destinations[0].LastHour)
	require.Equal(t, "destination default gets 4, at most 8 per second; its last hour is not known",
		preview.Destinations[0].Text(replay.PlainWords()))

	traffic, now := delivery.NewTraffic(b.pool), time.Now()
	for i := range 30 {
		traffic.Observe(&delivery.Delivered{
			Destination: "default", Available: i%3 > 0, Limited: i%5 == 0, Took: time.Millisecond,
		}, now)
	}
	traffic.Observe(&delivery.Delivered{Destination: "default", Available: true}, now.Add(-2*time.Hour))
	require.NoError(t, traffic.Write(t.Context()))
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	destinations := []replay.DestinationLoad{{
		Destination: "default", Entries: 4, PerSecond: []float64{8, 8, 8, 8, 8, 8, 8, 8, 0, 0},
		LastHour: &replay.DestinationHour{Deliveries: 30, Failures: 10, MostPerSecond: 3},
	}}
	require.Equal(t, destinations, preview.Destinations)
	require.Equal(t, &replay.Subscribers{
		Subscribers: 2, Entries: 3, Low: 3, High: 3, Sampled: 5,
		Largest: []replay.Subscriber{{ID: "sub_2", Entries: 2}, {ID: "sub_1", Entries: 1}},
	}, preview.Subscribers)
	require.Subset(t, preview.Notes(replay.PlainWords()), []string{
		"3 of 5 concern 2 subscribers; the most: sub_2 (2), sub_1 (1)",
		"destination default gets 4, at most 8 per second; in the last hour, it got 30, at most 3 per second, and 10 failed",
	})
	for what, detail := range map[string]string{
		"subscribers": "concern 2 subscribers; the most sub_2, sub_1",
		"destination_load": "failed at destination default: 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 0.0, 0.0 per second in " +
			"each tenth of the run; in the last hour, 30 deliveries, at most 3 per second; 10 failed",
	} {
		require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.preview_replay('{}', 8) WHERE what = $1 AND detail = $2", what,
			detail), what)
	}
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.preview_replay('{}') WHERE what = 'queue_load'"))

	// A destination gets messages of other queues, too.
	limited, err := access.Limit(t.Context(), access.Scope{{Queues: []string{"default"}}})
	require.NoError(t, err)
	preview, err = b.replayer.Preview(limited, request)
	require.NoError(t, err)
	require.Nil(t, preview.Destinations[0].LastHour)
	require.EqualValues(t, 2, preview.Subscribers.Subscribers)
	require.EqualValues(t, 4, preview.Load[0].Failures)
	// A queue has jobs of other kinds, too.
	limited, err = access.Limit(t.Context(), access.Scope{{Queues: []string{"default"}, Kinds: []string{"dlqd*", "k"}}})
	require.NoError(t, err)
	preview, err = b.replayer.Preview(limited, request)
	require.NoError(t, err)
	require.NotEmpty(t, preview.Load)
	require.Zero(t, preview.Load[0].Failures)

	forecast := b.get(b.start(replay.Request{All: true, Rate: 8})).Forecast
	require.Equal(t, destinations, forecast.Destinations)
	require.Len(t, forecast.Load, 2)
	require.EqualValues(t, 2, forecast.Subscribers.Subscribers)
	require.Empty(t, forecast.Subscribers.Largest, "viewers of the run may not see subscribers")

	b.exec(`INSERT INTO dlq.settings (key, value) VALUES ('sensitive', '{"where": "card"}')
		ON CONFLICT (key) DO UPDATE SET value = excluded.value`)
	preview, err = b.replayer.Preview(t.Context(), request)
	require.NoError(t, err)
	require.Empty(t, preview.Subscribers.Largest)
}

// The samples are spread over the failure groups, although the entries of one group failed first.
func TestPreview_SamplesEachGroup(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, group := range []struct {
		n    int
		name string
	}{{10, "f"}, {2, "g"}, {3, "h"}} {
		b.fail(group.n, "a", "T")
		b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = $1 WHERE fingerprint NOT IN ('f', 'g') OR fingerprint IS NULL",
			group.name)
	}
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	var ids []uuid.UUID
	for _, s := range preview.Samples {
		ids = append(ids, s.ID)
	}
	require.Len(t, ids, 5)
	for group, n := range map[string]int{"f": 2, "g": 1, "h": 2} {
		require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE fingerprint = $1 AND id = ANY ($2)",
			group, ids), group)
	}
}

func TestSubscribers_SayWhatIsEstimated(t *testing.T) {
	t.Parallel()
	p := &replay.Preview{Total: 4200, Subscribers: &replay.Subscribers{
		Subscribers: 37, Entries: 2100, Low: 1968, High: 2232, Sampled: 1000,
		Largest: []replay.Subscriber{{ID: "sub_81", Entries: 420}},
	}}
	require.Equal(t, []string{"about 2100 (1968 to 2232) of 4200 concern at least 37 subscribers; the most: sub_81 (420)" +
		"; estimated from 1000 at random"}, p.Notes(replay.PlainWords()))
}

// A kind counts as unworked if its latest attempt says so and no job of the kind has completed since.
func TestPreview_InfersUnworkedKinds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.registerQueue("a")
	failed := func(kind, message string, ago int) {
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ($1, '{"n": 1}', 'a', 1, 'running')`, kind)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() - $2 * interval '1 minute', attempt = 1,
			errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', 1)] WHERE state = 'running'`, message, ago)
	}
	const unknown = "job kind is not registered in the client's Workers bundle: x"
	failed("gone", "timeout", 20)
	failed("gone", unknown, 10)
	failed("back", unknown, 20)
	failed("back", "timeout", 10)
	failed("works", unknown, 10)
	b.complete("works", "a", `{"n": 2}`, `{}`)
	b.file()
	preview, err := b.replayer.Preview(t.Context(), withDefaults(replay.Request{All: true}))
	require.NoError(t, err)
	require.Equal(t, []replay.UnworkedKind{{Kind: "gone", Unknown: 1, Sampled: 2}}, preview.Unworked)
	require.Contains(t, preview.Notes(replay.PlainWords()),
		"no worker seems to know kind gone: inferred from 1 of 2 last attempts, with the latest of them")
	require.Empty(t, preview.Unhealthy, "an inference does not stop a run")
}
