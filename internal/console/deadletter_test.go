package console_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// TestDeadLetter_Sections checks the page of a dead letter: the message's headers, the rule's line, the link to
// entries of the same ordering key, and the search in the payload.
func TestDeadLetter_Sections(t *testing.T) {
	t.Parallel()
	o := open(t, func(c *server.Config) {
		c.Policy.Data.SensitivePaths = []string{"headers.Authorization", "payload.pin"}
	})
	send := func(id, more string) {
		o.post(`{"messageId": "` + id +
			`", "queue": "payments", "kind": "payment.captured", "orderingKey": "order 81", "subscriberId": "cus_81"` +
			more + `}`)
	}
	send("m1", `, "headers": {"X-Tenant": "seven & 7", "Authorization": "Bearer hush-hush"}, "payload": {"answer": 422, "deep": {"er": {"lines": [{"sku": "A-1"}, {"sku": "B-2", "note": "sku"}]}}, "tenant": "SKU", "from": "x\u202ey"}`)
	send("m2", `, "payload": {"answer": 422, "pin": "4711", "amount": 1}`)
	id := o.entry("m1", "dlq_manual")
	other := o.entry("m2", "dlq_manual")
	b := o.tab()
	b.open("/dead-letters/" + id)

	headers := b.texts("#headers")
	require.Contains(t, headers, "X-Tenant")
	require.Contains(t, headers, "seven & 7")
	require.Contains(t, headers, "Authorization\n***")
	curl := b.value(`[...document.querySelectorAll("#payload [data-copy]")].map(e => e.dataset.copy).join()`)
	require.Contains(t, curl, "-H 'X-Tenant: seven & 7'")
	require.NotContains(t, b.value("document.documentElement.outerHTML"), "hush")

	// The search expands nodes, counts and steps through matches; a new search collapses them.
	require.Equal(t, false, b.value(`document.querySelector(".tree").innerText.includes("B-2")`))
	b.press("/")
	b.until(`document.activeElement.matches("[data-tree-search]")`)
	b.run(insert("sku"))
	b.until(`document.querySelectorAll(".tree .hit").length === 4`) // two keys, two values
	b.waitForTextOf("[data-found-count]", "1 of 4")
	require.Equal(t, true, b.value(`[...document.querySelectorAll(".tree .hit")].every(e => e.checkVisibility())`))
	b.press(kb.Enter)
	b.waitForTextOf("[data-found-count]", "2 of 4")
	b.until(`document.querySelectorAll(".tree .now").length === 1`)
	b.click(`[data-step="-1"]`)
	b.waitForTextOf("[data-found-count]", "1 of 4")
	b.click(`[data-step="-1"]`)
	b.waitForTextOf("[data-found-count]", "4 of 4")
	b.fill("[data-tree-search]", "U+202E")
	b.waitForTextOf("[data-found-count]", "1 of 1")
	require.Equal(t, false, b.value(`document.querySelector(".tree").innerText.includes("B-2")`),
		"the new search collapses what the previous one expanded")
	b.fill("[data-tree-search]", "nowhere")
	b.waitForTextOf("[data-found-count]", "no match")

	// The editor shows hidden characters as escapes. They do not count as a change.
	require.Contains(t, b.value(`document.querySelector("textarea[name=payload]").value`), `"x\u202ey"`)
	b.click(".edit summary")
	b.follow(b.button("Preview changes"))
	b.waitForText("No changes")
	require.Contains(t, b.value(`document.querySelector("textarea[name=payload]").value`), `"x\u202ey"`)

	b.open("/dead-letters/" + id)
	b.follow(b.button("same ordering key"))
	b.rows(2)
	require.Equal(t, `queue:payments key:"order 81"`, b.value(`document.querySelector("[data-filter]").value`))
	require.Contains(t, b.value(`document.querySelector("[data-row] a").href`), min(id, other), "not oldest first")

	// Masking one value leaves the rest of the payload as it is.
	b.open("/dead-letters/" + other)
	require.Contains(t, b.texts(".tree"), "pin ***")
	require.NotContains(t, b.texts(".tree"), "messageId")

	// Without scripts, the page shows the tree but not its search field.
	b.script(false)
	b.open("/dead-letters/" + id)
	require.Equal(t, false, b.value(`document.querySelector(".tree-search").checkVisibility()`))
	require.Equal(t, true, b.value(`document.querySelector(".tree").checkVisibility()`))
}

// TestDeadLetter_SenderAndAttempts checks that the page shows who sent the event and the known details of each
// attempt, without rows for unknown ones.
func TestDeadLetter_SenderAndAttempts(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.post(`{"messageId": "m1", "queue": "payments", "kind": "payment.captured", "payload": {"answer": 422}, "version": "2.1",
		"source": "checkout", "sourceType": "service", "sourceId": "checkout-7f9c2d81", "sourceName": "Checkout & Co"}`)
	id := o.entry("m1", "dlq_manual")
	o.exec("SELECT dlq.replay($1, 'kim')", id)
	o.eventually(1, `SELECT count(*) FROM dlq.dead_letter_open WHERE id = $1 AND status = 'dlq_manual'
		AND dlq_retry_count = 1`, id)
	o.exec(`UPDATE dlq.dead_letter_open SET retry_history = jsonb_build_array(retry_history -> 0
		|| '{"processingDuration": 75.2, "systemState": {"cpu": 41.5, "memory": 63}}') WHERE id = $1`, id)
	b := o.tab()
	b.open("/dead-letters/" + id)
	for _, fact := range []string{
		"Source name\nCheckout & Co", "Source type\nservice", "Source id\ncheckout-7f9c2d81", "Event version\n2.1",
	} {
		require.Contains(t, b.texts("#facts"), fact)
	}
	require.Regexp(t, `attempt 1 of job \d+ .*· took 1 min · CPU 41.5 %, memory 63 %`, b.texts("#attempts"))
	require.Regexp(t, `redelivery 1, job \d+: \w+ by kim .*· strategy manual · took (under )?\d`, b.texts("#attempts"))

	o.fail("reports", "report.daily", "no such report", 1)
	b.open("/dead-letters/" + o.text("SELECT id::text FROM dlq.dead_letter_open WHERE queue = 'reports'"))
	for _, unknown := range []string{"Source", "Event version", "CPU", "strategy"} {
		require.NotContains(t, b.texts("#facts, #attempts"), unknown+"\n")
	}
	require.NotRegexp(t, "CPU|strategy", b.texts("#attempts"))
}

// TestDeadLetter_ShowsTheCause checks that the list, the titles of the entry and its group, and the overview show the
// cause. The page of the entry shows the request and its answer.
func TestDeadLetter_ShowsTheCause(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.submit("payments", "m1", "payment.captured", map[string]any{
		"answer": 402, "says": `{"error": {"code": "INSUFFICIENT_FUNDS", "message": "card declined"}}`, "amount": 4200,
	})
	id := o.entry("m1", "dlq_manual")
	o.exec(postgrestest.RefreshRollups)
	const cause = "402 Payment Required · INSUFFICIENT_FUNDS: card declined"
	b := o.tab()
	b.open("/dead-letters/" + id)
	require.Contains(t, b.texts("h1"), cause)
	require.Contains(t, b.texts(".exchange"), "4200")
	require.Contains(t, b.texts(".exchange"), "402 Payment Required")
	require.Equal(t, "INSUFFICIENT_FUNDS\ncard declined", b.texts(".exchange mark"))
	require.Contains(t, b.texts("#like"), "1 failure, the first")
	b.open("/dead-letters")
	require.Contains(t, b.texts("[data-row]"), cause)
	b.open("/")
	require.Contains(t, b.texts("#groups"), cause)
	b.open(o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE id = $1", id))
	require.Contains(t, b.texts("h1"), cause)
}

// TestGroups_ActOnSeveral selects groups, marks them as fixed, and previews a replay of their entries. An
// action on the entries of groups of two queues is refused.
func TestGroups_ActOnSeveral(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.submit("payments", "m1", "payment.captured", map[string]any{"answer": 422, "says": "amount is missing"})
	o.submit("payments", "m2", "payment.captured", map[string]any{"answer": 404, "says": "no such customer"})
	o.submit("orders", "m3", "order.placed", map[string]any{"answer": 400, "says": "price is missing"})
	o.eventually(3, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	o.exec(postgrestest.RefreshRollups)
	b := o.tab()
	b.allow("status of 422")
	pick := func(queue string) {
		b.rows(3)
		for _, group := range []int{0, 1, 2} {
			row := fmt.Sprintf("[data-row]:nth-child(%d)", group+1)
			if strings.Contains(b.texts(row+" .row-meta"), queue) {
				b.click(row + " input")
				b.until(fmt.Sprintf("document.querySelector(%s).checked", quoted(row+" input")))
			}
		}
	}
	b.open("/groups")
	require.Equal(t, false, b.value(`document.querySelector(".selection").checkVisibility()`))
	pick("payments")
	b.follow(".selection [value=replay]")
	b.waitForText("Replay 2 dead letters")
	b.open("/groups")
	pick("payments")
	b.follow(".selection [value=fixed]")
	b.waitForText("Marked as fixed: 2 groups.")
	require.Equal(t, 2, o.count("SELECT count(*) FROM dlq.group_marks WHERE fixed_by IS NOT NULL"))
	pick("payments")
	pick("orders")
	b.follow(".selection [value=discard]")
	b.waitForText("select groups of one queue")
}
