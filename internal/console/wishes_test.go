package console_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
)

// TestWishes covers features that users of other consoles asked for in public issues. The name of a
// subtest has the number.
func TestWishes(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	kim, ann := o.token("kim", access.Operator), o.token("ann", access.Operator)
	// signed returns the testServer for the subtest, and a tab of a user who is signed in.
	signed := func(t *testing.T, token string) (*testServer, *tab) {
		t.Helper()
		o := o.in(t)
		b := o.tab()
		b.signIn(token)
		return o, b
	}
	replayAll := func(b *tab, q, rate string) (run string) {
		b.Helper()
		b.open("/bulk?all=1&do=replay&q=" + url.QueryEscape(q))
		if rate != "" {
			b.fill("input[name=rate]", rate)
		}
		b.click("input[name=force]") // needed, because no worker runs these jobs
		b.follow("form.split button.primary")
		b.until(`location.pathname.startsWith("/replays/")`)
		run, _ = b.value(`location.pathname.split("/")[2]`).(string)
		return run
	}

	t.Run("riverui#383 filter by args", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("args", "report.daily", "no such report", 200)
		b.open("/dead-letters")
		b.fill("[data-filter]", "queue:args payload.customer:42")
		b.navigate(func() { b.press("\r") })
		b.rows(2)
		found, _ := b.value(`[...document.querySelectorAll("[data-row]")].map(row => row.dataset.id)`).([]any)
		b.follow("[data-row] a")
		require.Contains(t, b.texts(".tree"), "42")
		b.follow(`.tree a.find[href*="customer"]`) // from a value to all entries with it, in other queues too
		require.Contains(t, b.value(`document.querySelector("[data-filter]").value`), "payload.customer:42")
		for _, id := range found {
			b.until(fmt.Sprintf(`document.querySelector('[data-row][data-id="%s"]') !== null`, id))
		}
	})
	t.Run("riverui#590 act on all that match", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("all", "report.daily", "no such report", 60)
		b.open(listOf("queue:all"))
		b.click("#pick-all")
		b.until(`document.querySelector("[data-selected]").innerText === "25"`)
		b.follow("#selection button[name=all]")
		b.follow(b.button("Discard"))
		b.waitForText("60 dead letters")
		require.Equal(t, 60, o.count("SELECT count(*) FROM dlq.dead_letter_open WHERE queue = 'all'"),
			"done before the confirmation")
		b.follow("form.split button.danger")
		b.waitForText("Discard: 60 dead letters.")
		require.Zero(t, o.count("SELECT count(*) FROM dlq.dead_letter_open WHERE queue = 'all'"))
	})
	t.Run("ServicePulse#1212 #391 #265 show all replay runs with user and origin", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("everyretry", "report.daily", "no such report", 3)
		run := replayAll(b, "queue:everyretry", "")
		_, other := signed(t, ann)
		other.open("/replays")
		other.until(fmt.Sprintf(`document.querySelector('a[href="/replays/%s"]')?.closest("tr").innerText.includes("kim")`,
			run))
		other.follow(`a[href="/replays/` + run + `"]`)
		other.waitForText("Started by")
		require.Contains(t, other.texts("#facts"), "127.0.0.1")
		require.Contains(t, other.texts("#facts"), "Chrome on ")
	})
	t.Run("ServicePulse#389 show new failures since the start of a run", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("joined", "report.daily", "no such report", 3)
		run := replayAll(b, "queue:joined", "")
		o.fail("joined", "report.daily", "no such report", 2)
		b.open("/replays/" + run)
		b.waitForText("2 new failures")
		b.follow(b.button("2 new failures"))
		b.rows(2)
	})
	t.Run("ServicePulse#341 change the rate of a run and cancel it", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("pace", "report.daily", "no such report", 50)
		run := replayAll(b, "queue:pace", "0.05") // slow enough to be still running on any machine
		b.follow("#steer [value=pause]")
		b.waitForText("paused")
		b.fill("#steer input[name=rate]", "0.025")
		b.follow("#steer [value=rate]")
		b.until(`document.querySelector("#steer input[name=rate]").value === "0.025"`)
		b.follow("#steer [value=cancel]")
		b.until(`document.getElementById("steer").innerText.includes("ended")`)
		require.Equal(t, "cancelled", o.text("SELECT status FROM dlq.replay_runs WHERE id = $1", run))
		const left = "SELECT count(*) FROM dlq.dead_letter_open WHERE queue = 'pace' AND status = 'dlq_manual'"
		require.Positive(t, o.count(left), "a cancelled run replayed all entries")
	})
	t.Run("temporal#4947 #5133 show the filter, the changed and the skipped entries of a bulk operation",
		func(t *testing.T) {
			t.Parallel()
			o, b := signed(t, kim)
			o.fail("traced", "report.daily", "no such report", 5)
			o.exec(`SELECT dlq.discard(id, 'ann', 'elsewhere') FROM (SELECT id FROM dlq.dead_letter_open WHERE queue = 'traced'
				ORDER BY id LIMIT 2) e`)
			b.open("/bulk?all=1&do=resolve&q=queue:traced")
			b.fill("textarea[name=note]", "done by hand")
			b.follow("form.split button.primary, form.split .buttons button:first-child")
			b.waitForText("3 dead letters")
			b.follow(b.button("View"))
			require.Regexp(t, `^/operations/`, b.value("location.pathname"))
			b.waitForText("queue:traced")
			b.waitForText("kim")
			b.waitForText("done by hand")
			require.InDelta(t, 5, b.value(
				`new Set([...document.querySelectorAll('main a[href^="/dead-letters/"]')].map(a => a.href)).size`), 0,
				"the page does not show all five entries")
			b.waitForText("cannot resolve from dlq_archived")
		})
	t.Run("oban#793 limit the cost of searches", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("searched", "report.daily", "an unusual needle", 3)
		b.open(listOf("needle"))
		b.rows(3)
		b.open(listOf(strings.Repeat(`"%_%_%" `, 200)))
		b.open(listOf(`payload.` + strings.Repeat("a.", 60) + `b:1`))
		o.eventually(0, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'
			AND pid <> pg_backend_pid() AND now() - query_start > interval '15 seconds'`)
	})
	t.Run("bull-board#478 edit a payload and keep the original", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("edited", "report.daily", "no such report", 1)
		id := o.text("SELECT id::text FROM dlq.dead_letter_open WHERE queue = 'edited'")
		b.open("/dead-letters/" + id)
		b.click(b.button("Edit and replay"))
		b.fill("textarea[name=payload]", `{"n": "mended"}`)
		b.follow(b.button("Preview changes"))
		b.waitForText("Value to send")
		b.follow(b.button("Replay with these changes"))
		b.waitForText("Replayed with edits")
		b.click(b.button("Original"))
		b.waitForText(`"customer": 1`)
		require.Contains(t, b.texts(".tree"), "mended")
	})
	t.Run("bull-board#862 show the newest error first", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, attempted_at, state, errors)
			VALUES ('k', '{}', 'newest', 3, 3, now(), 'running', ARRAY[
			'{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "the first", "trace": ""}'::jsonb,
				'{"at": "2026-01-01T00:01:00Z", "attempt": 2, "error": "the second", "trace": ""}',
					'{"at": "2026-01-01T00:02:00Z", "attempt": 3, "error": "the third", "trace": ""}'])`)
		o.exec("UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE queue = 'newest'")
		o.eventually(1, "SELECT count(*) FROM dlq.dead_letter_open WHERE queue = 'newest'")
		b.open("/dead-letters/" + o.text("SELECT id::text FROM dlq.dead_letter_open WHERE queue = 'newest'"))
		require.Regexp(t, `(?s)the third.*the second.*the first`, b.texts("#attempts"))
		require.Contains(t, b.texts("#error"), "the third")
	})
	t.Run("good_job#1624 offer only valid actions", func(t *testing.T) {
		t.Parallel()
		o, b := signed(t, kim)
		o.fail("valid", "report.daily", "no such report", 2)
		id := o.text("SELECT id::text FROM dlq.dead_letter_open WHERE queue = 'valid' LIMIT 1")
		o.exec("SELECT dlq.discard($1, 'ann', 'elsewhere')", id)
		offered := `[...document.querySelectorAll("%s button")].filter(b => !b.disabled && b.value).map(b => b.value).join(" ")`
		b.open("/dead-letters/" + id)
		b.until(fmt.Sprintf(offered, "#act .buttons") + ` === "reopen"`)
		b.open(listOf("queue:valid"))
		b.click(`[value="` + id + `"]`)
		b.until(fmt.Sprintf(offered, "#selection .buttons") + ` === "assign tag note reopen"`)
		b.click(`[name=id]:not([value="` + id + `"])`) // with both selected, each action shows its number of entries
		b.until(`document.querySelector("#selection [value=reopen]").innerText.split(/\s+/).join(" ") === "Reopen 1" && document.querySelector("#selection [value=assign]").innerText.split(/\s+/).join(" ") === "Assign 2"`)
	})
}

// TestWishes_ReplaySurvivesServerRestart covers ServicePulse#390: a restart during a replay loses no
// entry silently.
func TestWishes_ReplaySurvivesServerRestart(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for i := range 40 {
		o.submit("orders", fmt.Sprint("m", i), "order.placed", map[string]any{"answer": 422})
	}
	o.eventually(40, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	o.receiverWorks.Store(true)
	b := o.tab()
	for _, part := range []string{"ERR_", "/events", "/api/whoami"} {
		b.allow(part)
	}
	b.open("/bulk?all=1&do=replay&q=queue:orders")
	b.fill("input[name=rate]", "0.5") // runs longer than any machine takes to stop the server
	b.follow("form.split button.primary")
	b.until(live)
	o.eventually(1, "SELECT least(count(*), 1) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'")
	o.stop()
	require.Less(t, o.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'"), 40,
		"the run ended before the restart")
	o.exec("SELECT dlq.replay_set_rate(id, 100) FROM dlq.replay_runs")
	o.start()
	b.waitForText("40 recovered, 0 failed again of 40")
	require.Equal(t, 40, o.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'"))
}

// TestBulk_ConfirmsLargeNumbers discards 10,000 entries, and then all, by filter. The operator
// types the number of entries to confirm.
func TestBulk_ConfirmsLargeNumbers(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for range 20 {
		o.fail("reports", "report.daily", "no such report", 500)
	}
	o.fail("orders", "order.placed", "no such order", 100)
	b := o.tab()
	b.allow("status of 409")
	b.allow("status of 422")
	b.open(listOf("queue:reports"))
	b.click("#pick-all")
	b.follow("#selection button[name=all]")
	b.follow(b.button("Discard"))
	b.waitForText("Discard 10\u202f000 dead letters")
	b.fill("input[name=expect]", "9999")
	b.follow("form.split button.danger")
	b.until(`document.querySelector(".flash.bad") !== null`)
	require.Equal(t, 10100, o.count("SELECT count(*) FROM dlq.dead_letter_open"), "done although the number was wrong")
	b.fill("input[name=expect]", "10000")
	b.follow("form.split button.danger")
	b.waitForText("Discard: 10\u202f000 dead letters.")
	require.Equal(t, 100, o.count("SELECT count(*) FROM dlq.dead_letter_open"))

	b.open("/dead-letters")
	b.click("#act-on summary")
	b.follow(b.button("Discard …"))
	b.waitForText("all dead letters")
	b.fill("input[name=expect]", "10,100")
	b.follow("form.split button.danger")
	b.waitForText("Discard: 100 dead letters. 10\u202f000 were skipped")
	require.Zero(t, o.count("SELECT count(*) FROM dlq.dead_letter_open"))
}
