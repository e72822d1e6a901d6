package console_test

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

	"github.com/dlqd/dlqd/internal/access"
)

// focusIn waits until an element in a part of the page has the focus, or the part itself.
func (b *tab) focusIn(selector string) {
	b.Helper()
	b.until("document.activeElement?.closest(" + quoted(selector) + ")")
}

// TestFocus_ReturnsAfterActions acts on an entry, a group, a queue, a saved view and in the review. Afterwards the
// focus is in the form or its section, also if the address has a fragment, and a live update does not move it. Without
// scripts, the address leads to the section, and the tab key continues there.
func TestFocus_ReturnsAfterActions(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("payments", "payment.captured", "no such account", 4)
	o.eventually(4, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	id := o.text("SELECT id::text FROM dlq.dead_letter_open ORDER BY id DESC LIMIT 1")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_open WHERE id = $1::uuid", id)
	b := o.tab()
	b.signIn(o.token("kim", access.Operator))

	b.open("/dead-letters/" + id + "#actions")
	b.follow("#act [value=discard]")
	b.waitForText("Discarded.")
	b.focusIn("#act")
	b.until(live)
	o.exec("SELECT dlq.act_on('note', ARRAY[$1::uuid], 'ann', 'seen by ann')", id)
	b.until(`document.getElementById("trail").innerText.includes("seen by ann")`)
	b.focusIn("#act")
	b.follow("#act [value=reopen]")
	b.waitForText("Reopened")
	b.focusIn("#act")
	// Another operator moves the entry, so the section is rendered again.
	b.until(live)
	o.exec("SELECT dlq.act_on('resolve', ARRAY[$1::uuid], 'ann', 'done')", id)
	b.until(`document.getElementById("head").innerText.includes("resolved")`)
	b.focusIn("#actions")

	b.open(group + "#entries")
	b.follow(b.button("Mark as fixed"))
	b.waitForText("Marked as fixed")
	b.focusIn("#actions")
	b.follow("#owner [value=note]")
	b.waitForText("Note saved.")
	b.focusIn("#owner [value=note]")

	const queue = `tr[id="payments"]`
	b.open("/queues#payments")
	b.click(queue + " summary")
	b.follow(queue + " [value=pause]")
	b.waitForText("paused")
	b.focusIn(queue + " summary")

	for _, name := range []string{"first view", "second"} {
		b.open(listOf("queue:" + strings.Fields(name)[0]))
		b.click("#save-view > summary")
		b.fill("#save-view input[name=name]", name)
		b.follow("#save-view form button")
		b.waitForText("Saved view " + name + ".")
		b.focusIn("#save-view")
	}
	const view = `[id="view-first view"]`
	b.open("/dead-letters")
	b.click("#save-view > summary")
	b.follow(view + " [value=down]")
	b.focusIn(view + " [value=down]")

	b.open("/review#actions")
	b.follow("#act [value=discard]")
	b.waitForText("Discarded.")
	b.focusIn("#act")

	b.open("/access#zone")
	b.fill("[data-zone-field]", "Europe/Paris")
	b.navigate(func() { b.press(kb.Enter) })
	b.waitForText("Times are shown in Europe/Paris.")
	b.focusIn("#zone")

	b.script(false)
	leadsTo := func(fragment, selector string) {
		b.Helper()
		b.until("decodeURIComponent(location.hash) === " + quoted("#"+fragment))
		b.until(`document.querySelector(":target")?.checkVisibility()`)
		b.press(kb.Tab)
		b.focusIn(selector)
	}
	b.open(group)
	b.follow(b.button("Reopen"))
	b.waitForText("Reopened.")
	b.until(`document.elementFromPoint(400, document.querySelector(".flash").getBoundingClientRect().top + 5)
		?.closest(".flash")`)
	leadsTo("actions", "#actions")
	b.open("/dead-letters")
	b.click("#save-view > summary")
	b.follow(view + " [value=up]")
	leadsTo("view-first view", view)
	b.open("/queues")
	b.click(queue + " summary")
	b.follow(queue + " [value=resume]")
	b.waitForText("resume")
	leadsTo("payments", queue)
	b.open("/review")
	b.follow("#act [value=discard]")
	b.waitForText("Discarded.")
	leadsTo("actions", "#actions")
}
