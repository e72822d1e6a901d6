package console_test

import (
	"bufio"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

const live = `document.querySelector("[data-connection]").innerText === "live"`

// TestLive_UpdatesInPlace changes an open page in place: rows keep their positions, new rows wait behind a
// link, and the focus stays.
func TestLive_UpdatesInPlace(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 3)
	b := o.tab()
	b.open("/dead-letters")
	b.until(live)
	b.value(`window.rows = [...document.querySelectorAll("[data-row]")]; window.second = rows[1]; rows[1].querySelector("a").focus()`)
	id, _ := b.value("rows[1].dataset.id").(string)
	o.exec("SELECT dlq.discard($1, 'ann', 'elsewhere')", id)
	o.fail("reports", "report.weekly", "no such report", 2)
	b.until(`second.querySelector(".mark .hide").textContent === "archived"`)
	b.until(`!document.getElementById("new-rows").hidden && document.getElementById("new-rows").innerText === "2 new"`)
	b.rows(3)
	require.Equal(t, true, b.value(
		`rows.every((row, i) => row === document.querySelectorAll("[data-row]")[i]) && second.contains(document.activeElement)`))
	b.follow("#new-rows")
	b.rows(5)
}

// TestLive_ReviewKeepsItsEntry checks that an open review keeps showing the entry with which it was loaded, and never
// mixes two entries.
func TestLive_ReviewKeepsItsEntry(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 1)
	first := o.text("SELECT id::text FROM dlq.dead_letter_open")
	o.fail("reports", "report.weekly", "not the same problem", 1)
	b := o.tab()
	b.open("/review")
	b.until(live)
	require.Contains(t, b.texts("#error"), "no such report")
	o.exec("SELECT dlq.discard($1, 'ann', 'elsewhere')", first)
	b.until(`document.getElementById("sentence").innerText.includes("no longer waits")`)
	require.Contains(t, b.texts("#error"), "no such report")
	require.Contains(t, b.value(`document.getElementById("act").action`), first)
	b.follow("#act [value=resolve]")
	b.waitForText("cannot resolve from dlq_archived")
	require.Equal(t, 1, o.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'"))
}

// TestLive_MarksRows checks three things: a list marks rows that no longer match; an empty list announces new rows; a
// hidden page closes its stream until it is visible again.
func TestLive_MarksRows(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	b := o.tab()
	b.open("/dead-letters?q=status:manual")
	b.until(live)
	o.fail("reports", "report.daily", "no such report", 3)
	b.until(`document.getElementById("new-rows").innerText === "3 new"`)
	b.follow("#new-rows")
	b.until(live)
	look := func(away bool) {
		b.value(fmt.Sprintf(`Object.defineProperty(document, "hidden", {configurable: true, value: %t}); document.dispatchEvent(new Event("visibilitychange"))`, away))
	}
	look(true)
	b.value(`window.rows = [...document.querySelectorAll("[data-row]")]; rows[1].querySelector("input").click()`)
	id, _ := b.value("rows[1].dataset.id").(string)
	o.exec("SELECT dlq.discard($1, 'ann', 'elsewhere')", id)
	look(false)
	b.until(`rows[1].classList.contains("gone") && rows[1].querySelector("input").disabled && document.getElementById("selection").hidden`)
	require.Equal(t, false, b.value(`rows[0].classList.contains("gone") || rows[2].classList.contains("gone")`))
}

// TestLive_TwoOperators lets two operators decide about one entry. The second operator sees the decision of the first,
// and only one decision takes effect.
func TestLive_TwoOperators(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 1)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	kim, ann, lee := o.tab(), o.tab(), o.tab()
	for name, b := range map[string]*tab{"kim": kim, "ann": ann, "lee": lee} {
		b.signIn(o.token(name, access.Operator))
		b.open("/dead-letters/" + id)
		b.until(live)
	}
	// ann presses the button and has not released the mouse yet.
	ann.value(`document.querySelector("#act [value=discard]").dispatchEvent(new PointerEvent("pointerdown", {bubbles: true}))`)
	kim.follow("#act [value=resolve]")
	kim.waitForText("Resolved.")
	// lee, who only watches, sees the new state and its actions.
	lee.until(`document.getElementById("head").innerText.includes("resolved")`)
	lee.until(`document.querySelector("#act [value=discard]").disabled`)
	ann.follow("#act [value=discard]")
	ann.waitForText("cannot discard from dlq_resolved")
	ann.waitForText("kim")
	require.Equal(t, 1, o.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'
		AND resolved_by = 'kim'`))
}

// TestLive_SurvivesServerRestart restarts the server under an open page: the page stays, shows that it is
// stale, and recovers.
func TestLive_SurvivesServerRestart(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 1)
	b := o.tab()
	b.allow("ERR_")
	b.allow("/events")
	b.allow("/api/whoami")
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	b.open("/dead-letters/" + id)
	b.until(live)
	b.value("window.same = true")
	b.fill("#act input[name=note]", "called the customer")
	o.stop()
	b.until(`document.querySelector("[data-connection]").innerText.startsWith("connection lost, showing ") && document.body.classList.contains("stale")`)
	require.Contains(t, b.texts("main"), "no such report")
	o.exec("SELECT dlq.discard($1, 'ann', 'elsewhere')", id)
	o.start()
	b.until(live)
	b.until(`document.getElementById("head").innerText.includes("archived")`)
	require.Equal(t, true, b.value("window.same"), "the page was reloaded")
	require.Equal(t, "called the customer", b.value(`document.querySelector("#act input[name=note]").value`))
}

// isStale returns an expression that matches the line about the connection: why the page is not live, and the time of
// its content in UTC.
func isStale(why string) string {
	return fmt.Sprintf(`/^%s, showing \d\d:\d\d:\d\d UTC\s+(just now|\d.* ago)(\s+sign in)?$/.test(document.querySelector("[data-connection]").innerText)`+
		` && document.body.classList.contains("stale")`, why)
}

// shownAt returns the time of day that the line about the connection shows.
func (b *tab) shownAt() time.Time {
	b.Helper()
	text, _ := b.value(`document.querySelector("[data-connection]").innerText`).(string)
	at, err := time.Parse("15:04:05 UTC", regexp.MustCompile(`\d\d:\d\d:\d\d UTC`).FindString(text))
	require.NoError(b, err, text)
	return at
}

// awayFromUTC returns a tab in another time zone.
func (o *testServer) awayFromUTC() *tab {
	b := o.tab()
	b.run(emulation.SetTimezoneOverride("Asia/Kathmandu"))
	return b
}

// requireNow requires that a time of day is at most a few minutes ago.
func requireNow(t *testing.T, of time.Time) {
	t.Helper()
	now := time.Now().UTC()
	ago := time.Duration(now.Hour()-of.Hour())*time.Hour + time.Duration(now.Minute()-of.Minute())*time.Minute
	require.Less(t, (ago+24*time.Hour)%(24*time.Hour), 10*time.Minute, "%s", of)
}

// TestLive_ShowsLostServer checks that a page whose server stops says so, with the time of
// its content.
func TestLive_ShowsLostServer(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	b := o.awayFromUTC()
	b.allow("ERR_")
	b.allow("/events")
	b.allow("/api/whoami")
	b.open("/dead-letters")
	b.until(live)
	o.stop()
	b.until(isStale("connection lost"))
	requireNow(t, b.shownAt())
}

// TestLive_ShowsOffline checks that a page whose browser is offline says so at once, and recovers.
func TestLive_ShowsOffline(t *testing.T) {
	t.Parallel()
	b := open(t, nil).awayFromUTC()
	b.open("/dead-letters")
	b.until(live)
	b.value(`dispatchEvent(new Event("offline"))`)
	b.until(isStale("offline"))
	requireNow(t, b.shownAt())
	b.value(`dispatchEvent(new Event("online"))`)
	b.until(live)
}

// TestLive_ShowsLostDatabase checks that a page whose database hangs says so, and recovers
// when the database answers again.
func TestLive_ShowsLostDatabase(t *testing.T) {
	t.Parallel()
	var database *postgrestest.Proxy
	o := open(t, func(c *server.Config) {
		database = postgrestest.NewProxy(t, c.DatabaseURL)
		c.DatabaseURL = database.URL
	})
	o.fail("reports", "report.daily", "no such report", 1)
	b := o.awayFromUTC()
	b.open("/dead-letters")
	b.until(live)
	b.value("window.same = true")
	database.Hold()
	release := sync.OnceFunc(database.Release)
	defer release()
	b.until(isStale("the database does not answer"))
	requireNow(t, b.shownAt())
	release()
	b.until(live)
	require.Equal(t, true, b.value("window.same"), "the page was reloaded")
}

// TestLive_ShowsSignOut revokes the token of a viewer. The viewer's page goes to the sign-in page. A page with a draft
// stays open, says that the viewer is signed out, and recovers after a sign-in in another tab.
func TestLive_ShowsSignOut(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 1)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	secret := o.token("kim", access.Operator)
	b, draft := o.tab(), o.awayFromUTC()
	for _, tab := range []*tab{b, draft} {
		tab.allow("401")
		tab.signIn(secret)
		tab.open("/dead-letters/" + id)
		tab.until(live)
	}
	draft.fill("#act input[name=note]", "called the customer")
	o.exec("UPDATE dlq.tokens SET revoked_at = now(), revoked_by = 'ann'")
	b.until(`location.pathname === "/sign-in"`)
	draft.until(isStale("signed out"))
	requireNow(t, draft.shownAt())
	require.Equal(t, "called the customer", draft.value(`document.querySelector("#act input[name=note]").value`))
	link := draft.value(`document.querySelector("[data-connection] a").href`)
	require.Contains(t, link, "/sign-in?to=%2Fdead-letters%2F"+id)
}

// TestLive_SharesRenderings checks that two hundred open pages of viewers with the same permissions
// share each rendering.
func TestLive_SharesRenderings(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 1)
	var mu sync.Mutex
	var following sync.WaitGroup
	made := map[string]int{} // number of streams by time of rendering
	for range 200 {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			o.base+"/events?page="+url.QueryEscape("/replays"), nil)
		require.NoError(t, err)
		response, err := (&http.Client{Transport: &http.Transport{}}).Do(request)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode)
		following.Go(func() {
			defer response.Body.Close()
			for lines, event := bufio.NewScanner(response.Body), ""; lines.Scan(); {
				name, value, _ := strings.Cut(lines.Text(), ": ")
				switch {
				case name == "event":
					event = value
				case name == "id" || name == "data" && event == "same":
					mu.Lock()
					made[value]++
					mu.Unlock()
				}
			}
		})
	}
	// All streams get the same renderings, except for streams that start after the first rendering or are too slow for
	// one.
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		reached := 0
		for _, streams := range made {
			if streams == 200 {
				reached++
			}
		}
		return reached >= 3
	}, waitTimeout, 50*time.Millisecond)
	o.stop()
	following.Wait()
}
