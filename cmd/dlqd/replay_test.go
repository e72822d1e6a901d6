package main_test

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// startPriceless starts a receiver that refuses every message until the test sets mended to true.
func startPriceless(t *testing.T) (url string, mended *atomic.Bool) {
	t.Helper()
	mended = &atomic.Bool{}
	return startReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		if !mended.Load() {
			w.Header().Set("X-Error-Type", "PRICE_MISSING")
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}), mended
}

// An edited replay of a job with a checkpoint needs --resume or --from-start, and each of these flags has its own
// effect.
func TestReplay_RequiresCheckpointChoice(t *testing.T) {
	t.Parallel()
	var looking sync.RWMutex // locked while the test reads a redelivery's job, which is gone after its failure
	receiver := startReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		looking.RLock()
		defer looking.RUnlock()
		w.WriteHeader(http.StatusUnprocessableEntity)
	})
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	s := serve(t, "--database-url", url, "--destination", receiver)
	api := "--api-url=" + s.api
	ok(t, "send", api, "--kind", "order.placed", `{"article": "A-81"}`)
	var id string
	require.Eventually(t, func() bool {
		return pool.QueryRow(t.Context(), `UPDATE dlq.dead_letter_queue SET metadata = metadata
			|| '{"river:resumable_step": "charge"}' WHERE status = 'dlq_manual' RETURNING id`).Scan(&id) == nil
	}, 5*time.Minute, 50*time.Millisecond)
	require.Regexp(t, `checkpoint +resumes after step charge`, ok(t, "show", api, id))
	out := ok(t, "replay", api, "--all", "--merge-patch", `{"price": 100}`, "--dry-run")
	require.Contains(t, out, "1 have a checkpoint")
	require.Contains(t, out, "  resumes after step charge\n")
	for _, which := range []string{id, "--all"} {
		_, stderr, code := run(t, "replay", api, which, "--merge-patch", `{"price": 100}`)
		require.Equal(t, 1, code)
		require.Contains(t, stderr, "1 have a checkpoint among the dead letters to be edited")
	}
	for _, flag := range []string{"--resume", "--from-start"} {
		looking.Lock()
		require.Contains(t, ok(t, "replay", api, id, "--merge-patch", `{"price": 100}`, flag), "is dlq_processing")
		var resumes bool
		err := pool.QueryRow(t.Context(),
			"SELECT metadata ? 'river:resumable_step' FROM river_job ORDER BY id DESC LIMIT 1").Scan(&resumes)
		looking.Unlock()
		require.NoError(t, err)
		require.Equal(t, flag == "--resume", resumes, flag)
		require.Eventually(t, func() bool {
			tag, err := pool.Exec(t.Context(), `UPDATE dlq.dead_letter_queue SET metadata = metadata
				|| '{"river:resumable_step": "charge"}' WHERE status = 'dlq_manual'`)
			return err == nil && tag.RowsAffected() == 1
		}, 5*time.Minute, 50*time.Millisecond, "it fails again")
	}
	require.Zero(t, s.stop(syscall.SIGTERM))
}

func TestReplay_Commands(t *testing.T) {
	t.Parallel()
	receiver, mended := startPriceless(t)
	s := serve(t, "--database-url", postgrestest.URL(t), "--destination", receiver)
	api := "--api-url=" + s.api
	for range 7 {
		ok(t, "send", api, "--kind", "order.placed", `{"article": "A-81"}`)
	}
	manual := regexp.MustCompile(`PRICE_MISSING`)
	require.Eventually(t, func() bool {
		return len(manual.FindAllString(ok(t, "list", api, "--status", "dlq_manual"), -1)) == 7
	}, 5*time.Minute, 50*time.Millisecond)

	_, stderr, code := run(t, "replay", api)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "the filter is empty: give a filter (see --help), or --all for every entry")
	out := ok(t, "replay", api, "--error-type", "PRICE_MISSING", "--start-date", "2020-01-01", "--end-date", "2100-01-01",
		"--batch-size", "100",
		"--merge-patch", `{"price": 100}`, "--dry-run")
	require.Contains(t, out, "7 dead letters would be replayed")
	require.Regexp(t, `error type +PRICE_MISSING +7`, out)
	require.Contains(t, out, "  add /price: 100\n", "the change is shown")
	require.Contains(t, out, "0 of 7 are out of date (--skip-stale skips them)\n0 of 7 have been done by a later job")
	one := regexp.MustCompile(`[0-9a-f-]{36}`).FindString(out)
	out = ok(t, "replay", api, one, "--payload", `{"article": "A-82", "price": 9007199254740993}`, "--dry-run")
	require.Contains(t, out, "1 dead letters would be replayed")
	require.Contains(t, out, "  replace /article: \"A-81\" -> \"A-82\"\n  add /price: 9007199254740993\n")
	out = ok(t, "replay", api, one, "--merge-patch", `{"price": 100}`, "--to-destination", "default", "--dry-run")
	require.Contains(t, out, "1 dead letters would be replayed, to destination default")
	require.Contains(t, out, "  add /price: 100\n")
	require.Len(t, manual.FindAllString(ok(t, "list", api, "--status", "dlq_manual"), -1), 7, "nothing was changed")
	out = ok(t, "replay", api, one, "--patch", `[{"op": "replace", "path": "/article", "value": "A-82"}]`,
		"--to-destination", "default")
	require.Regexp(t, one+` is dlq_processing, with job \d+\n  replace /article: "A-81" -> "A-82"\n`, out)
	require.Eventually(t, func() bool {
		return len(manual.FindAllString(ok(t, "list", api, "--status", "dlq_manual"), -1)) == 7
	}, 5*time.Minute, 50*time.Millisecond)
	_, stderr, code = run(t, "replay", api, one, "--to-destination", "nowhere")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `the policy has no destination "nowhere"`)
	require.Contains(t, ok(t, "replay", api, "--error-type", "OTHER", "--dry-run"),
		"0 dead letters would be replayed; nothing")
	require.Regexp(t, `default +- +0 +0 +0 +0 +0 +7`, ok(t, "queues", "list", api))
	require.Equal(t, ok(t, "queues", "list", api), ok(t, "queues", api))
	require.Equal(t, ok(t, "replays", "list", api), ok(t, "replays", api))
	require.Contains(t, ok(t, "breakers", api), "destination:default")
	require.Equal(t, "queue default is paused\n", ok(t, "queues", "pause", "default", api))
	require.Equal(t, "queue default is resumed\n", ok(t, "queues", "resume", "default", api))
	_, stderr, code = run(t, "queues", "pause", "nowhere", api)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `queue "nowhere" does not exist`)
	require.Regexp(t, `^assign: 7 of 7 dead letters\nundo: dlqd undo [0-9a-f-]{36}\n$`,
		ok(t, "assign", api, "--to", "ann", "--queue", "default", "--note", "prices are yours"))
	require.Regexp(t, `^tag: 7 of 7 dead letters\nundo: dlqd undo `, ok(t, "tag", api, "--add", "prices", "--all"))
	require.Contains(t, ok(t, "discard", api, "--tag", "prices", "--dry-run"), "7 dead letters match; nothing was changed")
	csv := ok(t, "export", api, "--error-class", "validation", "--format", "csv")
	require.Len(t, regexp.MustCompile(`(?m),ann,"\[""prices""\]"`).FindAllString(csv, -1), 7)
	require.Len(t, regexp.MustCompile(`(?m)^\{"id"`).FindAllString(ok(t, "export", api, "--kind", "order.*"), -1), 7)
	mended.Store(true)
	out = ok(t, "replay", api, "--error-type", "PRICE_MISSING", "--rate", "100", "--note", "prices are there",
		"--skip-stale", "--skip-superseded")
	require.Contains(t, out, ": 7 dead letters")
	require.Contains(t, out, "completed: 7 replayed, 7 succeeded, 0 failed, 0 skipped of 7")
	list := ok(t, "replays", "list", api)
	require.Contains(t, list, "prices are there")
	id := regexp.MustCompile(`[0-9a-f-]{36}`).FindString(list)
	out = ok(t, "replays", "show", id, api)
	require.Contains(t, out, "completed: 7 replayed")
	require.Contains(t, out, "of 7 dead letters, 7 recovered, 0 failed the same way")
	require.Contains(t, out, "each has an outcome")
	require.Regexp(t, `7 +recovered +recovered`, ok(t, "replays", "diff", id, id, api))
	_, stderr, code = run(t, "replays", "pause", id, api)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "cannot move from completed to paused")
	require.Zero(t, s.stop(syscall.SIGTERM))
}

// The state of a progressive run is in the database. A dlqd process is killed while the run continues, and the next
// process continues the run at the step that it had reached.
func TestReplay_ProgressiveSurvivesKills(t *testing.T) {
	t.Parallel()
	receiver, mended := startPriceless(t)
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	start := func() *served { return serve(t, "--database-url", url, "--destination", receiver) }
	s := start()
	for i := range 60 {
		ok(t, "send", "--api-url="+s.api, "--kind", "order.placed", fmt.Sprintf(`{"article": %d}`, i))
	}
	await := func(sql string, n int) {
		t.Helper()
		require.Eventually(t, func() bool { return countOf(t, pool, sql) >= n }, 5*time.Minute, 20*time.Millisecond, sql)
	}
	await("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'", 60)
	mended.Store(true)
	t.Cleanup(func() {
		if t.Failed() {
			var seen string
			_ = pool.QueryRow(context.WithoutCancel(t.Context()), `SELECT concat_ws(E'\n', (SELECT row(status, reason)::text
				FROM dlq.replay_runs), (SELECT row(g.*)::text FROM dlq.replay_run_groups g), (SELECT string_agg(a.n::text || ' ' ||
				coalesce(a.outcome, '-') || coalesce(a.state, '-') || coalesce(a.detail, ''), E'\n') FROM (SELECT count(*) AS n,
				e.outcome, j.state::text, left(e.detail, 200) AS detail FROM dlq.replay_run_entries e
				LEFT JOIN river_job j ON j.id = e.job_id GROUP BY 2, 3, 4) a))`).Scan(&seen)
			t.Log(seen)
		}
	})
	out := ok(t, "replay", "--api-url="+s.api, "--all", "--progressive", "--rate", "15", "--detach")
	require.Contains(t, out, ": 60 dead letters, in steps, in 1 failure groups")
	id := regexp.MustCompile(`[0-9a-f-]{36}`).FindString(out)
	// A redelivery that is under way in a killed process fails. This failure is new, so the run stops the group. reach
	// lets the group continue, as an operator would.
	reach := func(sql string, n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			if countOf(t, pool, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'stopped'") > 0 {
				ok(t, "replays", "go-on", id, "--api-url="+s.api, "--note", "its process was killed")
			}
			return countOf(t, pool, sql) >= n
		}, 5*time.Minute, 20*time.Millisecond, sql)
	}
	for _, sent := range []int{2, 8, 35} {
		reach("SELECT sent FROM dlq.replay_run_groups", sent)
		next := start()
		require.NoError(t, s.cmd.Process.Kill())
		s = next
	}
	// A run can be completed before the last outcomes of its redeliveries are counted.
	reach("SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed' AND NOT unsettled", 1)
	require.Equal(t, 60, countOf(t, pool, `SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'succeeded'
		OR detail LIKE 'Stuck job rescued by dlqd%'`))
	require.Equal(t, 60, countOf(t, pool, "SELECT count(DISTINCT job_id) FROM dlq.entry_jobs WHERE run_id IS NOT NULL"))
	out = ok(t, "replays", "show", id, "--api-url="+s.api)
	require.Contains(t, out, "done: of 60 sent")
	require.Equal(t, 1, countOf(t, pool, "SELECT count(*) FROM dlq.acts WHERE act = 'group done'"))
	require.LessOrEqual(t, countOf(t, pool, "SELECT count(*) FROM dlq.acts WHERE act = 'group goes on'"), 3,
		"no step is passed twice")
	require.Zero(t, s.stop(syscall.SIGTERM))
}

func countOf(t *testing.T, pool *pgxpool.Pool, sql string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&n))
	return n
}
