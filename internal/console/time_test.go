package console_test

import (
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
)

// chooseTimes chooses windows, ranges and a time zone, with and without scripts.
func chooseTimes(b *tab, group string) {
	b.Helper()
	filterIs := func(pattern string) {
		b.Helper()
		b.until(`location.pathname === "/dead-letters" && ` + pattern +
			`.test(new URLSearchParams(location.search).get("q"))`)
	}
	const chosen = `document.querySelector(".windows [aria-current]").innerText`

	b.open("/")
	require.Equal(b, "24 h", b.value(chosen))
	b.follow(b.button("6 h"))
	require.Equal(b, "6 h", b.value(chosen))
	b.value(`document.querySelector(".chart").scrollIntoView({block: "center"})`)
	var box []float64
	require.True(b, b.tryEvaluate(`(() => { const r = document.querySelector(".chart").getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()`, &box))
	y := box[1] + box[3]/2
	b.navigate(func() {
		b.run(mouse(input.MousePressed, box[0]+box[2]*0.5, y))
		for _, part := range []float64{0.6, 0.75} {
			b.run(mouse(input.MouseMoved, box[0]+box[2]*part, y))
		}
		b.until(`document.querySelector(".brush")?.getBoundingClientRect().width > 20`)
		b.run(mouse(input.MouseReleased, box[0]+box[2]*0.75, y))
	})
	filterIs(`/^failed:\S+Z\.\.\S+Z$/`)
	require.NotEqual(b, "Any time", b.texts("#when > summary"))

	// A group that is some minutes old shows its last hour.
	b.open(group)
	require.Equal(b, "1 h", b.value(chosen))
	b.open("/groups")
	b.until(`document.querySelector(".c-trend small").innerText === "1 h"`)

	b.open("/access")
	b.fill("[data-zone-field]", "Asia/Kathmandu")
	b.navigate(func() { b.press(kb.Enter) })
	b.waitForText("Times are shown in Asia/Kathmandu.")
	b.open(listOf("queue:payments"))
	b.until(live)
	require.Regexp(b, `\d \+0545$`, b.value(`document.querySelector("[data-row] time").title`))

	b.script(false)
	b.open(listOf("queue:payments age:<7d"))
	require.Equal(b, "Last 7 d", b.texts("#when > summary"))
	b.click("#when > summary")
	b.value(`[["from", "2026-11-20T05:45"], ["to", "2026-11-21T05:45"]].forEach(([name, value]) => document.querySelector("#when [name=" + name + "]").value = value)`)
	b.follow("#when button")
	filterIs(`/^queue:payments failed:2026-11-20T00:00Z\.\.2026-11-21T00:00Z$/`)
	require.Equal(b, "20 Nov 05:45 +0545 – 21 Nov 05:45 +0545", b.texts("#when > summary"))
}

// lookUp uses the search box that Ctrl+K opens.
func lookUp(b *tab) {
	b.Helper()
	b.open("/queues")
	b.value(`document.querySelector(".who, .zone").focus(); window.before = document.activeElement`)
	open := func() {
		b.Helper()
		b.run(input.DispatchKeyEvent(input.KeyDown).WithKey("k").WithCode("KeyK").WithModifiers(input.ModifierCtrl),
			input.DispatchKeyEvent(input.KeyUp).WithKey("k").WithCode("KeyK").WithModifiers(input.ModifierCtrl))
		b.until(`document.getElementById("look").open && document.activeElement.id === "look-for"`)
	}
	open()
	b.run(insert("pay"))
	b.until(`document.querySelectorAll("#look [data-found] a").length > 1`)
	links := `[...document.querySelectorAll("#look [data-found] a")]`
	b.press(kb.ArrowDown)
	b.until(`document.activeElement === ` + links + `[0]`)
	b.press(kb.ArrowDown)
	b.until(`document.activeElement === ` + links + `[1]`)
	b.press(kb.ArrowUp + kb.ArrowUp)
	b.until(`document.activeElement.id === "look-for"`)
	b.press(kb.ArrowUp) // from the first to the last
	b.until(`document.activeElement === ` + links + `.at(-1)`)
	b.press(kb.Escape)
	b.until(`!document.getElementById("look").open && document.activeElement === before`)

	open()
	require.Equal(b, "pay", b.value(`getSelection().toString() || document.getElementById("look-for").value`))
	b.run(insert("seed-manual"))
	b.until(links + `.some(a => a.innerText.includes("seed-manual"))`)
	b.press(kb.ArrowDown)
	b.until(`document.activeElement === ` + links + `[0]`)
	b.navigate(func() { b.press(kb.Enter) })
	require.NotEqual(b, "/queues", b.value("location.pathname"))

	b.open("/queues")
	open()
	b.run(insert("payments"))
	b.navigate(func() { b.press(kb.Enter) }) // the field sends its form, to the search page
	require.Contains(b, b.value("location.href"), "payments")
}
