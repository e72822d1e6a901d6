package console_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// pages are the console's pages, on what seed has left behind.
func pages(o *office) []string {
	id := o.entry("seed-manual", "dlq_manual")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE id = $1", id)
	return []string{
		"/", "/dead-letters", listOf("status:manual"), listOf("queue:"), "/dead-letters/" + id, "/dead-letters/nobody", "/bulk?all=1&q=status:manual", "/bulk?all=1&do=replay&q=status:manual",
		"/bulk?all=1&do=discard&q=queue:payments", "/groups", group, "/review", "/replays", "/queues", "/policy", "/approvals", "/audit", "/access", "/system", "/docs", "/sign-in", "/nowhere",
	}
}

// seed leaves a bit of everything behind: what waits, what needs a person, what was resolved, discarded and replayed.
func seed(o *office) {
	o.submit("payments", "seed-manual", "payment.captured", map[string]any{"answer": 422, "says": "amount is missing", "customer": "42", "lines": []any{1, 2, map[string]any{"sku": "A-1"}}})
	o.submit("orders", "seed-gone", "order.placed", map[string]any{"answer": 404})
	o.submit("payments", "seed-outage", "payment.captured", map[string]any{"answer": 503})
	o.fail("reports", "report.daily", "runtime error: index out of range [3] with length 3", 40)
	o.entry("seed-manual", "dlq_manual")
	o.entry("seed-gone", "dlq_manual")
	o.exec("SELECT dlq.discard(id, 'kim', 'not wanted') FROM dlq.dead_letter_queue WHERE event_id = 'seed-gone'")
}

// What runs sideways: the page itself, or what sticks out of it.
const sideways = `(() => {
	const wide = document.documentElement.clientWidth, out = [];
	if (document.documentElement.scrollWidth > wide) {
		for (const e of document.querySelectorAll("body *")) {
			const r = e.getBoundingClientRect();
			if (r.right > wide + 1 && r.width > 0 && e.checkVisibility()) out.push(e.tagName + "." + e.className + "#" + e.id + " to " + Math.round(r.right));
		}
		out.unshift("the page is " + document.documentElement.scrollWidth + " wide");
	}
	return out.slice(0, 6).join(", ");
})()`

// Every page loads without a complaint of the browser's, and nothing of it runs sideways at any width.
func TestPages_load(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	seed(o)
	b := o.tab()
	b.expect("the server responded with a status of 404")
	b.expect("the server responded with a status of 422")
	for _, path := range pages(o) {
		b.open(path)
		require.NotEmpty(t, b.value("document.title"), path)
		require.NotContains(t, b.texts("main"), "cannot be made", path)
		for _, width := range []int64{360, 820, 1440, 2560} {
			b.size(width, 900)
			if wide := b.value(sideways); wide != "" {
				t.Errorf("%s at %d: %s", path, width, wide)
			}
		}
	}
}
