package console_test

import (
	"testing"

	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
)

// TestKeyboard uses the console with the keyboard only.
func TestKeyboard(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.submit("payments", "m1", "payment.captured", map[string]any{"answer": 422, "amount": 1})
	first := o.entry("m1", "dlq_manual")
	o.fail("reports", "report.daily", "no such report", 3)
	b := o.tab()
	b.open("/")
	b.navigate(func() { b.press("gd") })
	b.until(`location.pathname === "/dead-letters"`)

	b.press("?")
	b.until(`document.getElementById("keys").open`)
	b.press(kb.Escape)
	b.until(`!document.getElementById("keys").open`)

	b.press("jjx")
	b.until(`document.querySelectorAll("input[name=id]:checked").length === 1 && document.querySelectorAll("[data-row]")[1].querySelector("input").checked`)
	b.press("kx")
	b.until(`document.querySelector("[data-selected]").innerText === "2"`)
	b.press(".")
	b.until(`document.activeElement.closest("#selection") !== null`)
	require.Equal(t, true, b.value(
		`(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2; })()`), "the focus is not visible")
	b.press("jj")
	row, _ := b.value(`document.querySelector("[data-row].cursor").dataset.id`).(string)
	b.navigate(func() { b.press(kb.Enter) })
	require.Equal(t, "/dead-letters/"+row, b.value("location.pathname"))

	b.navigate(func() { b.press("gd") })
	b.press("/")
	b.until(`document.activeElement.matches("[data-filter]")`)
	b.run(insert("status:man"))
	b.completed("status:man")
	b.press(kb.ArrowDown)
	b.until(`document.querySelector("[data-filter]").hasAttribute("aria-activedescendant")`)
	b.press(kb.Enter)
	b.until(`document.querySelector("[data-filter]").value.startsWith("status:manual")`)
	b.run(insert(" queue:payments"))
	b.until(`document.querySelector("[data-filter]").value.includes("payments")`)
	b.navigate(func() { b.press(kb.Enter) })
	b.rows(1)
	b.press("j")
	b.navigate(func() { b.press(kb.Enter) })
	require.Equal(t, "/dead-letters/"+first, b.value("location.pathname"))

	// A live change of the page keeps the focus.
	b.until(live)
	b.press("a")
	b.until(`document.activeElement.name === "assignee"`)
	b.run(insert("ki"))
	o.exec("SELECT dlq.act_on('note', ARRAY[$1::uuid], 'ann', 'seen by ann')", first)
	b.until(`document.getElementById("trail").innerText.includes("seen by ann")`)
	b.run(insert("m"))
	b.navigate(func() { b.press(kb.Enter) })
	b.waitForText("Assigned to kim.")

	b.press("e")
	b.until(`document.activeElement.name === "payload"`)
	b.value(`document.activeElement.select()`)
	b.run(insert(`{"amount": 2}`))
	b.press(kb.Tab)
	b.navigate(func() { b.press(kb.Enter) })
	b.waitForText("Value to send")
	b.press(kb.Tab) // from the payload, which has the focus, to the note
	b.run(insert("mended"))
	b.press(kb.Tab + kb.Tab)
	b.until(`document.activeElement.value === "yes"`)
	b.navigate(func() { b.press(kb.Enter) })
	b.waitForText("Replayed with edits as job")
	o.entry("m1", "dlq_resolved")
	require.Equal(t, 1, o.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE note = 'mended'"))

	// One key decides in the review and opens the next entry; u undoes.
	b.navigate(func() { b.press("gr") })
	before := b.texts(".review .crumbs")
	b.press(".")
	b.until(`document.activeElement.closest("#act") !== null`)
	b.navigate(func() { b.click("#act [value=discard]") })
	require.NotEqual(t, before, b.texts(".review .crumbs"), "the review shows the same entry")
	o.eventually(2, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND kind = 'report.daily'")
	b.navigate(func() { b.press("u") })
	b.waitForText("Undone for 1 dead letter.")
	o.eventually(3, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND kind = 'report.daily'")
}

// TestKeyboard_IgnoresOutdatedCompletions checks that completions belong to the current text: while the completions of
// a new text load, completions of an earlier text cannot be chosen.
func TestKeyboard_IgnoresOutdatedCompletions(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	b := o.tab()
	b.open("/dead-letters")
	b.value(`(() => {
		const ask = window.fetch;
		window.answer = Promise.resolve();
		window.fetch = async (...args) => { await window.answer; return ask(...args); };
	})()`)
	b.press("/")
	b.completed("")
	b.value(`void (window.answer = new Promise(release => { window.release = release; }))`)
	b.run(insert("status:man"))
	b.until(`document.querySelector("[data-filter]").value === "status:man"`)
	const chosen = `document.querySelector("[data-filter][aria-activedescendant], #completions [aria-selected=true]") !== null`
	b.press(kb.ArrowDown)
	require.Equal(t, false, b.value(chosen))
	b.value(`document.querySelector("#completions li").dispatchEvent(new MouseEvent("mousedown", {cancelable: true}))`)
	require.Equal(t, "status:man", b.value(`document.querySelector("[data-filter]").value`))
	b.value("void release()")
	b.completed("status:man")
	b.press(kb.ArrowDown)
	b.until(chosen)
	b.press(kb.Enter)
	b.until(`document.querySelector("[data-filter]").value.startsWith("status:manual")`)
	b.navigate(func() { b.press(kb.Enter) })
	b.until(`new URLSearchParams(location.search).get("q").trim() === "status:manual"`)
}

// TestScriptOff reads, filters, edits and acts on one and on many entries without scripts.
func TestScriptOff(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.submit("payments", "m1", "payment.captured", map[string]any{"answer": 422, "amount": 1})
	id := o.entry("m1", "dlq_manual")
	o.fail("reports", "report.daily", "no such report", 30)
	b := o.tab()
	b.script(false)
	b.open("/dead-letters")
	b.rows(25)
	require.Equal(t, true, b.value(`document.querySelector("[data-connection]").hidden`))
	b.follow(b.button("Next page"))
	b.rows(6)
	b.fill("[data-filter]", "queue:payments")
	b.navigate(func() { b.press(kb.Enter) })
	b.follow("[data-row] a")
	require.Equal(t, "/dead-letters/"+id, b.value("location.pathname"))

	b.click(b.button("Edit and replay"))
	b.fill("textarea[name=payload]", `{"amount": 2`)
	b.allow("status of 422")
	b.follow(b.button("Preview changes"))
	b.waitForText("the payload is not JSON")
	b.fill("textarea[name=payload]", `{"amount": 2, "big": 12345678901234567890}`)
	b.follow(b.button("Preview changes"))
	b.waitForText("12345678901234567890")
	b.follow(b.button("Replay with these changes"))
	b.waitForText("Replayed with edits")
	o.entry("m1", "dlq_resolved")

	b.open(listOf("queue:reports"))
	b.click("[data-row]:nth-child(1) input")
	b.click("[data-row]:nth-child(2) input")
	b.follow("#selection [value=discard]")
	b.waitForText("the selected dead letters")
	b.fill("textarea[name=note]", "not wanted")
	b.follow(b.button("Discard 2"))
	b.waitForText("Discard: 2 dead letters.")
	b.follow(b.button("Undo"))
	b.waitForText("Undone for 2 dead letters.")
	b.open(listOf("queue:reports status:manual"))
	b.follow("[data-row] a")
	b.follow("#act [value=discard]")
	b.waitForText("Discarded.")
	b.follow("#act [value=reopen]")
	b.waitForText("Reopened")
	require.Equal(t, 0, o.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'"))
}
