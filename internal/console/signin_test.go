package console_test

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/access/accesstest"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/server"
)

// TestSignIn_Token sends a visitor to the sign-in page and then back to the requested page. Actions
// that the role does not permit are disabled or explained.
func TestSignIn_Token(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 1)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")

	kim := o.tab()
	kim.open("/dead-letters/" + id + "?x=1")
	require.Equal(t, "/sign-in", kim.value("location.pathname"))
	require.NotContains(t, kim.texts("body"), "report", "a visitor who is not signed in sees data")
	kim.allow("status of 401")
	kim.fill("input[name=token]", "dlqd_"+strings.Repeat("x", 40))
	kim.navigate(func() { kim.press("\r") })
	kim.waitForText("✕")
	kim.fill("input[name=token]", o.token("kim", access.Operator))
	kim.navigate(func() { kim.press("\r") })
	require.Equal(t, "/dead-letters/"+id+"?x=1", kim.value("location.pathname + location.search"))
	require.Contains(t, kim.texts(".top"), "kim operator")
	require.Equal(t, false, kim.value(`document.querySelector("#act [value=discard]").disabled`))

	reader := o.tab()
	reader.signIn(o.token("anna", access.Reader))
	reader.open("/dead-letters/" + id)
	reader.waitForText("no such report")
	require.Equal(t, true, reader.value(
		`[...document.querySelectorAll("#act button")].every(b => b.disabled && b.title !== "")`),
		"a button is enabled, or has no reason")
	reader.open("/dead-letters")
	require.InDelta(t, 0, reader.value(`document.querySelectorAll("input[name=id]").length`), 0)

	// If the session ends, an open page leads to the sign-in page and back.
	kim.allow("/events")
	kim.until(live)
	o.exec("DELETE FROM dlq.sessions WHERE name = 'kim'")
	kim.until(`location.pathname === "/sign-in"`)
	require.Contains(t, kim.value("decodeURIComponent(location.search)"), id)
	kim.fill("input[name=token]", o.token("kim2", access.Operator))
	kim.navigate(func() { kim.press("\r") })
	kim.waitForText("no such report")

	// If the session ends under a page with unsent text, the page says so and keeps the text.
	kim.until(live)
	kim.fill("#act input[name=note]", "called the customer")
	o.exec("DELETE FROM dlq.sessions WHERE name = 'kim2'")
	kim.until(`document.querySelector("[data-connection]").innerText.startsWith("signed out")`)
	require.Equal(t, "called the customer", kim.value(`document.querySelector("#act input[name=note]").value`))

	reader.allow("401") // its stream may end before the answer arrives
	reader.follow(reader.button("Sign out"))
	require.Equal(t, "/sign-in", reader.value("location.pathname"))
}

// TestSignIn_KeepsWhatWasTyped sends a decision about a dead letter after the session has ended. After the sign-in, the
// note is in the form and stays there; the decision was not carried out.
func TestSignIn_KeepsWhatWasTyped(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 1)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	kim := o.tab()
	kim.allow("401")
	kim.signIn(o.token("kim", access.Operator))
	kim.open("/dead-letters/" + id)
	kim.until(live)
	const note, words = `document.querySelector("#act input[name=note]").value`, "called the customer: “paid”"
	kim.fill("#act input[name=note]", words)
	o.exec("DELETE FROM dlq.sessions")
	kim.until(`document.querySelector("[data-connection]").innerText.startsWith("signed out")`)
	kim.follow("#act [value=resolve]")
	kim.waitForText("nothing was done")
	kim.fill("input[name=token]", o.token("kim2", access.Operator))
	kim.navigate(func() { kim.press("\r") })
	require.Equal(t, "/dead-letters/"+id, kim.value("location.pathname"))
	require.Equal(t, words, kim.value(note))
	require.Equal(t, 1, o.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))
	kim.until(live)
	o.exec("SELECT dlq.note($1, 'seen', 'ann')", id)
	kim.until(`document.getElementById("trail").innerText.includes("ann")`)
	require.Equal(t, words, kim.value(note), "a live update replaced the note")
	kim.follow("#act [value=resolve]")
	kim.waitForText("Resolved.")
	require.Equal(t, words, o.text("SELECT resolution_notes FROM dlq.dead_letter_queue WHERE id = $1", id))
	kim.open("/dead-letters/" + id)
	require.Empty(t, kim.value(note), "the note is there again")
}

// TestSignIn_EverywhereEndsOtherBrowsers signs a user out everywhere. A page without live sections leads to the
// sign-in page, too.
func TestSignIn_EverywhereEndsOtherBrowsers(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	secret := o.token("kim", access.Operator)
	first, second := o.tab(), o.tab()
	for _, b := range []*tab{first, second} {
		b.allow("401")
		b.signIn(secret)
	}
	first.open("/policy")
	second.open("/access")
	require.Contains(t, second.texts("#sessions"), "Chrome on ")
	require.NotContains(t, second.texts("#sessions"), "Mozilla")
	second.follow(second.button("Sign me out everywhere"))
	second.until(`location.pathname === "/sign-in"`)
	first.until(`location.pathname + location.search === "/sign-in?to=%2Fpolicy"`)
}

func TestSignIn_OpenIDConnect(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	dir := policytest.Dir(t, policytest.Files{"access": `authentication: [tokens, oidc]
oidc: {issuer: "` + issuer.URL + `", clientID: dlqd}
grants:
  - {groups: [ops], role: operator}
`})
	o := open(t, func(c *server.Config) {
		c.Source = policy.Source{Dir: dir, Destination: policytest.Destination}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy = rules
	})
	b := o.tab()
	b.open(listOf("status:manual"))
	require.Equal(t, true, b.value(`document.querySelector("[data-origin]").hidden`), "a warning without a reason")
	b.follow(b.button("Sign in with OpenID Connect"))
	b.until(`location.pathname + location.search === ` + quoted(listOf("status:manual")))
	b.waitForText("kim@example.com operator")

	// The proxy does not forward the host, so the provider would send the browser to dlqd's own address.
	upstream, err := url.Parse(o.base)
	require.NoError(t, err)
	forward := httputil.NewSingleHostReverseProxy(upstream)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Host = upstream.Host
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.Close)
	behind := o.tab()
	behind.run(chromedp.Navigate(proxy.URL + "/sign-in"))
	behind.until(`!document.querySelector("[data-origin]").hidden`)
	require.Contains(t, behind.texts("[data-origin]"), o.base)
}

// TestSignIn_NoRole signs in a user without a role. Pages that the user may not see show the groups that the provider
// sent. The navigation links only to pages that the user may see.
func TestSignIn_NoRole(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	dir := policytest.Dir(t, policytest.Files{"access": `authentication: [oidc]
oidc: {issuer: "` + issuer.URL + `", clientID: dlqd}
grants:
  - {groups: [payments-oncall], role: operator}
`})
	o := open(t, func(c *server.Config) {
		c.Source = policy.Source{Dir: dir, Destination: policytest.Destination}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy = rules
	})
	b := o.tab()
	b.open("/")
	b.follow(b.button("Sign in with OpenID Connect"))
	b.waitForText("kim@example.com has no role")
	require.Equal(t, "ops", b.texts("#groups li"))
	require.Contains(t, b.texts("main"), "claim groups")
	require.Equal(t, "/ /access /docs", b.value(`[...document.querySelectorAll(".rail li a")].map(a => a.pathname).join(" ")`))
	b.allow("status of 403")
	b.open("/dead-letters")
	require.Equal(t, "ops", b.texts("#groups li"))
	b.open("/access")
	b.waitForText("You are kim@example.com")
}

// TestSignIn_ShowsTheEnvironment checks that the environment's name is shown on its colour: on the sign-in page, and on
// the other pages, in both themes and at the end of a long page.
func TestSignIn_ShowsTheEnvironment(t *testing.T) {
	t.Parallel()
	o := open(t, func(c *server.Config) {
		withTokens(c)
		c.Source.Env, c.Policy.Monitoring.Console.Color = "prod", "#facc15"
	})
	b := o.tab()
	shown := func() {
		b.Helper()
		require.Equal(t, "prod", b.texts(".band"))
		require.Equal(t, "rgb(250, 204, 21) rgb(0, 0, 0) 0", b.value(`(() => {
			scrollTo(0, document.body.scrollHeight);
			const band = document.querySelector(".band"), style = getComputedStyle(band);
			return style.backgroundColor + " " + style.color + " " + band.getBoundingClientRect().top;
		})()`))
	}
	b.open("/sign-in")
	shown()
	b.signIn(o.token("kim", access.Operator))
	b.size(1280, 500)
	for _, theme := range []string{"light", "dark"} {
		b.theme(theme)
		for _, path := range []string{"/policy", "/access", "/nothing"} {
			b.allow("status of 404")
			b.open(path)
			shown()
			require.Empty(t, b.value(sideways), path)
		}
	}
}
