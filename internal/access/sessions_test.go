package access_test

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/access/accesstest"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/postgres"
)

// console is a server with sign-in. For a browser, it answers as the console does, with the caller.
type console struct {
	*bundle

	url    string
	access *access.Authenticator
}

func (b *bundle) console(rules func() access.Rules, tls bool) *console {
	b.Helper()
	a := &access.Authenticator{Tokens: access.NewStore(b.pool, postgres.DefaultSchemas()), Rules: rules}
	config := door.Config{Hosts: []string{"dlqd.example"}}
	mux := http.NewServeMux()
	(&access.SignIn{Access: a, IsOwnHost: config.IsOwnHost}).Register(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		p, err := a.Authenticate(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		a.Renew(w, r, p)
		_, _ = fmt.Fprintf(w, "%s %s %s", p.Via, p.Name, p.RoleName())
	})
	server := httptest.NewUnstartedServer(door.Guard(config, mux))
	if tls {
		server.StartTLS()
	} else {
		server.Start()
	}
	b.Cleanup(server.Close)
	return &console{b, server.URL, a}
}

// browser keeps cookies and follows no redirects.
type browser struct {
	*console

	cookies map[string]string
}

func (c *console) browser() *browser { return &browser{c, map[string]string{}} }

// send sends a request with the headers that a page of dlqd sends, unless headers replaces them.
func (b *browser) send(method, path string, form url.Values, headers ...string) (*http.Response, string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.url+path, strings.NewReader(form.Encode()))
	require.NoError(b, err)
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("Sec-Fetch-Site", "same-origin")
	request.Header.Set("User-Agent", "Browser (test)")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Del(headers[i])
		if headers[i] == "Host" {
			request.Host = headers[i+1]
		} else if headers[i+1] != "" {
			request.Header.Set(headers[i], headers[i+1])
		}
	}
	for name, value := range b.cookies {
		request.AddCookie(&http.Cookie{Name: name, Value: value})
	}
	response, err := (&http.Client{
		Transport: insecure, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}).Do(request)
	require.NoError(b, err)
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	for _, cookie := range response.Cookies() {
		if cookie.MaxAge < 0 {
			delete(b.cookies, cookie.Name)
		} else {
			b.cookies[cookie.Name] = cookie.Value
		}
	}
	return response, string(body)
}

var insecure = func() *http.Transport {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	return server.Client().Transport.(*http.Transport)
}()

// caller returns the caller that the server recognizes, or "" if the server refuses the request.
func (b *browser) caller(headers ...string) string {
	b.Helper()
	response, caller := b.send(http.MethodGet, "/", nil, headers...)
	if response.StatusCode == http.StatusUnauthorized {
		return ""
	}
	require.Equal(b, http.StatusOK, response.StatusCode, caller)
	return caller
}

func (b *browser) signIn(token string, headers ...string) *http.Response {
	b.Helper()
	response, body := b.send(http.MethodPost, "/sign-in",
		url.Values{"token": {token}, "to": {"/dead-letters?q=status:manual"}}, headers...)
	require.Equal(b, http.StatusSeeOther, response.StatusCode, body)
	return response
}

// awaitCaller waits until caller returns want, which may take until cached lookups have expired.
func (b *browser) awaitCaller(want string) {
	b.Helper()
	require.Eventually(b, func() bool { return b.caller() == want }, 5*time.Minute, 50*time.Millisecond)
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err, sql)
}

func (b *bundle) text(sql string) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), sql).Scan(&text), sql)
	return text
}

func TestSessions_SignInAndOut(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}}), false)
	secret, id := b.token(access.Token{Name: "kim", Role: access.Operator})
	kim := c.browser()
	require.Empty(t, kim.caller())
	response := kim.signIn(secret)
	require.Equal(t, "/dead-letters?q=status:manual", response.Header.Get("Location"))
	require.Regexp(t, `^dlqd=dlqds_[0-9A-Za-z]{36}; Path=/; Max-Age=604800; HttpOnly; SameSite=Lax$`,
		response.Header.Get("Set-Cookie"), "over http on loopback")
	require.Equal(t, "token kim operator", kim.caller())
	require.Equal(t, "token kim operator", c.bundle.console(rules(access.Rules{Ways: []string{"tokens"}}),
		false).with(kim.cookies).caller(), "in another process")

	// The database stores no secret. The audit trail records who signed in, and from where.
	for _, sql := range []string{
		"SELECT string_agg(s::text, ' ') FROM dlq.sessions s",
		"SELECT string_agg(a::text, ' ') FROM dlq.acts a",
	} {
		rows := b.text(sql)
		require.NotContains(t, rows, kim.cookies["dlqd"][6:20], sql)
		require.NotContains(t, rows, secret[5:20], sql)
	}
	require.Equal(t, "console, from 127.0.0.1 (Browser [test])",
		b.text("SELECT origin FROM dlq.acts WHERE subject = 'sessions' AND act = 'signed in' AND actor = 'kim'"))
	sessions, err := b.store.Sessions(t.Context(), "kim", access.SessionLimits{})
	require.NoError(t, err)
	require.Len(t, sessions, 1)
	require.Equal(t, []string{"kim", "token", "127.0.0.1", "Browser (test)"},
		[]string{sessions[0].Name, sessions[0].Via, sessions[0].Address, sessions[0].Agent})
	require.WithinDuration(t, time.Now().Add(12*time.Hour), sessions[0].ExpiresAt, time.Minute)

	require.Equal(t, "false true", b.text(`SELECT concat_ws(' ',
		bool_or(has_table_privilege(r, 'dlq.sessions', 'SELECT'))::text, (SELECT c.relrowsecurity::text FROM pg_class c
			WHERE c.oid = 'dlq.sessions'::regclass)) FROM unnest(ARRAY['dlq_reader', 'dlq_operator', 'dlq_admin']) r`))

	// A token takes precedence over the session cookie. If a token is revoked, the sessions that began with it end.
	reader, _ := b.token(access.Token{Name: "anna", Role: access.Reader})
	require.Equal(t, "token anna reader", kim.caller("Authorization", "Bearer "+reader))
	anna := c.browser()
	anna.signIn(reader)
	require.NoError(t, b.store.Revoke(t.Context(), id, "anna", ""))
	kim.awaitCaller("")
	require.Equal(t, "token anna reader", anna.caller())

	// A sign-out ends this session, or all sessions of the user. A copy of the cookie is refused afterwards, too.
	second := c.browser()
	second.signIn(reader)
	copied := map[string]string{"dlqd": anna.cookies["dlqd"]}
	response, _ = anna.send(http.MethodPost, "/sign-out", nil)
	require.Equal(t, "/sign-in", response.Header.Get("Location"))
	require.Empty(t, anna.cookies)
	require.Empty(t, c.with(copied).caller())
	require.Equal(t, "token anna reader", second.caller())
	third := c.browser()
	third.signIn(reader)
	ended := c.access.SessionsEnded()
	third.send(http.MethodPost, "/sign-out", url.Values{"everywhere": {"1"}})
	require.Empty(t, second.caller())
	select {
	case <-ended: // event streams end at once
	default:
		require.Fail(t, "the end of the sessions was not announced")
	}
	require.Equal(t, "2", b.text(`SELECT count(*) FROM dlq.acts WHERE subject = 'sessions' AND act = 'signed out'
		AND actor = 'anna'`))
	require.Equal(t, "2", b.text(`SELECT detail ->> 'sessions' FROM dlq.acts WHERE subject = 'sessions'
		ORDER BY id DESC LIMIT 1`))
}

func (c *console) with(cookies map[string]string) *browser {
	return &browser{c, maps.Clone(cookies)}
}

// Over https, browsers accept the cookie only from this host, and send the cookie only to this host.
func TestSessions_UseHostCookieOverHTTPS(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}}), true)
	secret, _ := b.token(access.Token{Name: "kim", Role: access.Reader})
	kim := c.browser()
	response := kim.signIn(secret, "Host", "dlqd.example")
	require.Regexp(t, `^__Host-dlqd=dlqds_[0-9A-Za-z]{36}; Path=/; Max-Age=604800; HttpOnly; Secure; SameSite=Lax$`,
		response.Header.Get("Set-Cookie"))
	require.Equal(t, "token kim reader", kim.caller())
	require.Empty(t, c.with(map[string]string{"dlqd": kim.cookies["__Host-dlqd"]}).caller(),
		"another host of the site could set this cookie")

	// A request that a proxy received over https counts as https. Over http, sign-in with a token is refused.
	plain := b.console(rules(access.Rules{Ways: []string{"tokens"}}), false)
	for _, headers := range [][]string{
		{"Host", "dlqd.example", "Origin", "https://dlqd.example"},
		{"X-Forwarded-Proto", "https"},
	} {
		require.Contains(t, plain.browser().signIn(secret, headers...).Header.Get("Set-Cookie"), "__Host-dlqd=", headers)
	}
	response, body := plain.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {secret}}, "Host",
		"dlqd.example", "Origin", "http://dlqd.example")
	require.Equal(t, http.StatusBadRequest, response.StatusCode)
	require.Contains(t, body, "sign in with https")
	require.Empty(t, response.Cookies())
}

// The cookie is replaced every hour without a failed request. The old cookie works for one more minute after the
// browser has first sent the new one. A later request with the old cookie ends the session, because the cookie was
// copied.
func TestSessions_RotateCookie(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}}), false)
	secret, _ := b.token(access.Token{Name: "kim", Role: access.Reader})
	// fresh returns a process that has cached no lookup.
	fresh := func() *console { return b.console(rules(access.Rules{Ways: []string{"tokens"}}), false) }
	kim := c.browser()
	kim.signIn(secret)
	before := kim.cookies["dlqd"]
	require.Equal(t, "token kim reader", kim.caller())
	require.Equal(t, before, kim.cookies["dlqd"])

	b.exec("UPDATE dlq.sessions SET rotated_at = now() - interval '61 minutes'")
	var wg sync.WaitGroup
	parallel := fresh()
	browsers := make([]*browser, 8)
	for i := range browsers {
		browsers[i] = parallel.with(kim.cookies)
		wg.Go(func() { browsers[i].caller() })
	}
	wg.Wait()
	var changed []string
	for _, one := range browsers {
		if one.cookies["dlqd"] != before {
			changed = append(changed, one.cookies["dlqd"])
		}
	}
	require.Len(t, changed, 1, "one of several concurrent requests gets a new cookie")
	require.Equal(t, "token kim reader", fresh().with(map[string]string{"dlqd": before}).caller(),
		"the old cookie works until the new one is used")

	// If the new cookie did not arrive, the browser gets another one.
	b.exec("UPDATE dlq.sessions SET rotated_at = now() - interval '2 minutes'")
	again := fresh().with(map[string]string{"dlqd": before})
	require.Equal(t, "token kim reader", again.caller())
	require.NotEqual(t, before, again.cookies["dlqd"])
	require.Empty(t, fresh().with(map[string]string{"dlqd": changed[0]}).caller(), "the cookie that never arrived")

	require.Equal(t, "token kim reader", again.caller())
	require.Equal(t, "token kim reader", fresh().with(map[string]string{"dlqd": before}).caller(), "requests in flight")
	require.Equal(t, "1", b.text(`SELECT count(*) FROM dlq.sessions
		WHERE previous_until BETWEEN now() AND now() + interval '1 minute'`))
	b.exec("UPDATE dlq.sessions SET previous_until = now() - interval '1 second'")
	require.Equal(t, "token kim reader", again.caller())
	require.Empty(t, fresh().with(map[string]string{"dlqd": before}).caller())
	again.awaitCaller("")
	require.Contains(t, b.text(`SELECT note FROM dlq.acts WHERE subject = 'sessions' AND act = 'ended'
		AND actor = 'sweep'`), "the cookie was copied")
}

// No browser is signed in by a cookie that an attacker planted, invented or changed, or that is too old.
func TestSessions_RejectHostileCookies(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limits := access.SessionLimits{Idle: time.Hour, Absolute: 10 * time.Hour}
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}, Sessions: limits}), false)
	secret, _ := b.token(access.Token{Name: "kim", Role: access.Reader})

	// Session fixation fails: a sign-in replaces the cookie that the browser had before.
	evil := c.browser()
	evil.signIn(secret)
	given := evil.cookies["dlqd"]
	kim := c.with(evil.cookies)
	kim.signIn(secret)
	require.NotEqual(t, given, kim.cookies["dlqd"])
	evil.awaitCaller("")
	kim = c.with(map[string]string{"dlqd": "dlqds_" + strings.Repeat("a", 36)})
	kim.signIn(secret)
	good := kim.cookies["dlqd"]

	for _, bad := range []string{
		"", "x", good[:len(good)-1], good + "a", strings.ToLower(good), "dlqd_" + good[6:],
		secret, strings.Repeat(good, 200), b.text("SELECT id FROM dlq.sessions"),
		b.text("SELECT encode(hash, 'hex') FROM dlq.sessions"),
	} {
		if bad != good {
			require.Empty(t, c.with(map[string]string{"dlqd": bad}).caller(), "%.60q", bad)
		}
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.url+"/", nil)
	require.NoError(t, err)
	request.Header.Set("Cookie", "dlqd="+given+"; dlqd="+good)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusUnauthorized, response.StatusCode, "one of two cookies is from another host")
	_, caller := b.send(c.url, good)
	require.NotContains(t, caller, "kim", "a session cookie is not a token")

	// dlqd accepts the cookie from its own pages, and from a browser that opens a link to dlqd.
	for _, test := range []struct {
		headers []string
		known   bool
	}{
		{[]string{"Sec-Fetch-Site", "same-origin"}, true},
		{[]string{"Sec-Fetch-Site", "none"}, true},
		{[]string{"Sec-Fetch-Site", ""}, true},
		{[]string{"Sec-Fetch-Site", "", "Origin", c.url}, true},
		{[]string{"Sec-Fetch-Site", "", "Origin", "http://evil.example"}, false},
		{[]string{"Sec-Fetch-Site", "", "Origin", "null"}, false},
		{[]string{"Sec-Fetch-Site", "same-site"}, false},
		{[]string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "image"}, false},
		{[]string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, false},
		{[]string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors", "Sec-Fetch-Dest", "empty"}, false},
		// The user opens a link on another site.
		{[]string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, true},
	} {
		require.Equal(t, test.known, kim.caller(test.headers...) != "", "%v", test.headers)
	}
	for _, path := range []string{"/sign-out", "/sign-in", "/anything"} {
		for _, headers := range [][]string{
			{"Sec-Fetch-Site", "cross-site"},
			{"Sec-Fetch-Site", "same-site"},
			{"Sec-Fetch-Site", "", "Origin", "http://evil.example"},
			{
				"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode",
				"navigate", "Sec-Fetch-Dest", "document",
			},
		} {
			response, _ := kim.send(http.MethodPost, path, url.Values{"token": {secret}}, headers...)
			require.Equal(t, http.StatusForbidden, response.StatusCode, "%s %v", path, headers)
			require.Empty(t, response.Cookies())
		}
	}
	require.Equal(t, "token kim reader", kim.caller())

	// A session ends at its limits. The time of its last request is recorded at most once a minute.
	fresh := func() *browser {
		return b.console(rules(access.Rules{Ways: []string{"tokens"}, Sessions: limits}), false).with(kim.cookies)
	}
	b.exec("UPDATE dlq.sessions SET seen_at = now() - interval '59 minutes'")
	require.Equal(t, "token kim reader", fresh().caller())
	require.Equal(t, "t", b.text("SELECT left(bool_or(seen_at > now() - interval '1 minute')::text, 1) FROM dlq.sessions"),
		"the last use is recorded")
	b.exec("UPDATE dlq.sessions SET seen_at = now() - interval '61 minutes'")
	require.Empty(t, fresh().caller(), "idle")
	b.exec("UPDATE dlq.sessions SET seen_at = now(), created_at = now() - interval '601 minutes'")
	require.Empty(t, fresh().caller(), "absolute")
	require.NoError(t, b.store.TrimSessions(t.Context(), limits))
	require.Equal(t, "0", b.text("SELECT count(*) FROM dlq.sessions"))

	// A client that guesses tokens has to wait; a client with a valid token does not.
	for range 25 {
		response, _ := c.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {"dlqd_" + strings.Repeat("b", 36)}})
		require.Contains(t, []int{http.StatusUnauthorized, http.StatusTooManyRequests}, response.StatusCode)
	}
	refused, _ := c.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {"nonsense"}})
	require.Equal(t, http.StatusTooManyRequests, refused.StatusCode)
	require.NotEmpty(t, refused.Header.Get("Retry-After"))
	c.browser().signIn(secret)
	machine, _ := b.token(access.Token{Name: "shop", Role: access.Sender})
	refused, _ = c.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {machine}})
	require.Equal(t, http.StatusForbidden, refused.StatusCode)
	large, _ := c.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {strings.Repeat("x", 1<<20)}})
	require.Equal(t, http.StatusBadRequest, large.StatusCode)
}

// A session that began with a token ends when the token expires, and is no longer listed.
func TestSessions_EndWhenTheirTokenExpires(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}}), false)
	later := time.Now().Add(time.Hour)
	secret, id := b.token(access.Token{Name: "kim", Role: access.Operator, ExpiresAt: &later})
	kim := c.browser()
	kim.signIn(secret)
	require.Equal(t, "token kim operator", kim.caller())
	list := func() []access.Session {
		sessions, err := b.store.Sessions(t.Context(), "kim", access.SessionLimits{})
		require.NoError(t, err)
		return sessions
	}
	require.Len(t, list(), 1)
	require.WithinDuration(t, later, list()[0].ExpiresAt, time.Second)

	b.exec("UPDATE dlq.tokens SET expires_at = now() - interval '1 second' WHERE id = $1", id)
	require.Empty(t, c.bundle.console(rules(access.Rules{Ways: []string{"tokens"}}), false).with(kim.cookies).caller(),
		"in another process")
	kim.awaitCaller("")
	require.Empty(t, list())
	require.NoError(t, b.store.TrimSessions(t.Context(), access.SessionLimits{}))
	require.Equal(t, "0", b.text("SELECT count(*) FROM dlq.sessions"))
}

// A user whom a proxy names needs no session. After a sign-in, the caller is the user of the session and not the one
// whom the proxy names, until the user signs out. If authentication is off, an old cookie is ignored.
func TestSessions_TakePrecedenceOverProxy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	proxied := access.Rules{
		Ways: []string{"tokens", "proxy"},
		Proxy: access.Proxy{
			From: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, UserHeader: "X-User", GroupsHeader: "X-Groups",
		},
		Grants: []access.UserGrant{{Grant: access.Grant{Role: access.Reader}, Users: []string{"kim"}}},
	}
	c := b.console(rules(proxied), false)
	secret, _ := b.token(access.Token{Name: "kim-as-admin", Role: access.Admin})
	kim := c.browser()
	require.Equal(t, "proxy kim reader", kim.caller("X-User", "kim"))
	kim.signIn(secret, "X-User", "kim")
	require.Equal(t, "token kim-as-admin admin", kim.caller("X-User", "kim"))
	cookies := maps.Clone(kim.cookies)
	kim.send(http.MethodPost, "/sign-out", nil, "X-User", "kim")
	require.Equal(t, "proxy kim reader", kim.caller("X-User", "kim"))
	require.Equal(t, "proxy kim reader", c.with(cookies).caller("X-User", "kim"))

	open := b.console(rules(access.Rules{}), false)
	open.access.Open = true
	require.Equal(t, "  admin", open.with(cookies).caller())
	response, _ := open.browser().send(http.MethodPost, "/sign-in", url.Values{"token": {secret}})
	require.Equal(t, http.StatusNotFound, response.StatusCode)
	response, _ = open.browser().send(http.MethodGet, "/sign-in/oidc", nil)
	require.Equal(t, http.StatusNotFound, response.StatusCode)
}

// A session ends while requests use it. Once a process has refused it, that process does not accept it again.
func TestSessions_StayEndedWhileUsed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	inForce := rules(access.Rules{Ways: []string{"tokens"}})
	c, other := b.console(inForce, false), b.console(inForce, false)
	secret, _ := b.token(access.Token{Name: "kim", Role: access.Reader})
	kim := c.browser()
	kim.signIn(secret)
	require.NotEmpty(t, kim.caller())
	// The cookie is due, so every request also tries to replace it.
	b.exec("UPDATE dlq.sessions SET rotated_at = now() - interval '2 hours'")
	var wg sync.WaitGroup
	for _, process := range []*console{c, other, c, other} {
		one := process.with(kim.cookies)
		wg.Go(func() {
			for one.caller() != "" {
			}
			for range 20 {
				if one.caller() != "" {
					t.Error("an ended session was accepted again")
				}
			}
		})
	}
	n, err := c.access.EndSessions(t.Context(), access.Ending{Name: "kim", By: "root"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	wg.Wait()
	_, err = c.access.EndSessions(t.Context(), access.Ending{Name: "kim", By: "root"})
	require.ErrorIs(t, err, access.ErrNoSession)
}

// A user has at most maxSessions sessions, even if a program signs in again and again.
func TestSessions_LimitPerUser(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.console(rules(access.Rules{Ways: []string{"tokens"}}), false)
	secret, id := b.token(access.Token{Name: "kim", Role: access.Reader})
	b.exec(`INSERT INTO dlq.sessions (id, hash, name, via, token_id, address, agent) SELECT lpad(n::text, 32, '0')::uuid,
		sha256(n::text::bytea), CASE WHEN n > 120 THEN 'lee' ELSE 'kim' END, 'token', $1, '', ''
			FROM generate_series(1, 130) n`, id)
	kim := c.browser()
	kim.signIn(secret)
	require.Equal(t, "token kim reader", kim.caller())
	require.Equal(t, "100 10", b.text(`SELECT concat_ws(' ', count(*) FILTER (WHERE name = 'kim'),
		count(*) FILTER (WHERE name = 'lee')) FROM dlq.sessions`))
}

// After a sign-in, the browser is redirected only to pages of dlqd.
func TestReturnTo_AcceptsOnlyOwnPaths(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/", "/dead-letters", "/dead-letters?q=a:b%20c&x=//y", "/groups/3f2a#top"} {
		require.Equal(t, path, access.ReturnTo(path))
	}
	for _, path := range []string{
		"", "x", "//evil.example", "/\\evil.example", "\\\\evil", "https://evil.example", "javascript:alert(1)",
		"/\t/evil.example", "/\n/evil", "/a\r\nSet-Cookie: x=y", " //evil", "/%5cevil", "/%2f/evil", "/a//evil",
		"/\u2028/evil", "/é", "/sign-in", "/sign-in?to=/sign-in", "/sign-out", "/" + strings.Repeat("a", 3000), "/%zz",
	} {
		require.Equal(t, "/", access.ReturnTo(path), "%.40q", path)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/dead-letters?q=a", nil)
	require.Equal(t, "/sign-in?to=%2Fdead-letters%3Fq%3Da", access.SignInURL(r))
}

func oidcRules(issuer string) access.Rules {
	return access.Rules{
		Ways: []string{access.ViaOIDC, "tokens"},
		OIDC: access.OIDC{
			Issuer: issuer, ClientID: accesstest.ClientID, Audiences: []string{accesstest.ClientID},
			GroupsClaim: "groups", Scopes: []string{"openid", "offline_access"},
		},
		Grants: []access.UserGrant{
			{Grant: access.Grant{Role: access.Operator}, Groups: []string{"ops"}},
			{Grant: access.Grant{Role: access.Reader}, Users: []string{"kim@example.com"}},
		},
	}
}

// provider sends the browser to the provider, and returns the path of dlqd's callback to which the provider redirects
// the browser.
func (b *browser) provider() string {
	b.Helper()
	return b.providerFrom("/groups")
}

// providerFrom does the same as provider, for a sign-in that returns to the page at the path to.
func (b *browser) providerFrom(to string) string {
	b.Helper()
	response, body := b.send(http.MethodGet, "/sign-in/oidc?to="+url.QueryEscape(to), nil)
	require.Equal(b, http.StatusSeeOther, response.StatusCode, body)
	address, err := url.Parse(response.Header.Get("Location"))
	require.NoError(b, err)
	require.Equal(b, b.url+"/sign-in/callback", address.Query().Get("redirect_uri"))
	require.Equal(b, "openid", address.Query().Get("scope"))
	back, err := (&http.Client{CheckRedirect: func(*http.Request,
		[]*http.Request,
	) error {
		return http.ErrUseLastResponse
	}}).Get(address.String())
	require.NoError(b, err)
	require.NoError(b, back.Body.Close())
	require.Equal(b, http.StatusFound, back.StatusCode)
	path, ok := strings.CutPrefix(back.Header.Get("Location"), b.url)
	require.True(b, ok, back.Header.Get("Location"))
	return path
}

// back opens the callback path as a browser does that the provider has redirected.
func (b *browser) back(path string) (int, string) {
	b.Helper()
	response, body := b.send(http.MethodGet, path, nil, "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate",
		"Sec-Fetch-Dest", "document")
	if response.StatusCode == http.StatusSeeOther {
		body = response.Header.Get("Location")
	}
	return response.StatusCode, body
}

func TestSessions_SignInWithProvider(t *testing.T) {
	t.Parallel()
	b := setup(t)
	issuer := accesstest.New(t)
	var mu sync.Mutex
	inForce := oidcRules(issuer.URL)
	change := func(how func(*access.Rules)) {
		mu.Lock()
		defer mu.Unlock()
		how(&inForce)
	}
	c := b.console(func() access.Rules {
		mu.Lock()
		defer mu.Unlock()
		r := inForce
		r.Grants = slices.Clone(r.Grants)
		return r
	}, false)
	kim := c.browser()
	path := kim.provider()
	status, to := kim.back(path)
	require.Equal(t, []any{http.StatusSeeOther, "/groups"}, []any{status, to})
	require.Equal(t, "oidc kim@example.com operator", kim.caller())
	require.Len(t, kim.cookies, 1, "the cookie of the sign-in is deleted")
	require.Zero(t, issuer.Sessions()-1, "the sign-in requests tokens once")

	// Login CSRF: the callback arrives in another browser, again, or with invented values.
	for name, change := range map[string]func(*browser, url.Values){
		"another browser": func(victim *browser, _ url.Values) { clear(victim.cookies) },
		"another sign-in": func(victim *browser, q url.Values) {
			before := q.Get("state")
			clear(victim.cookies)
			_, query, _ := strings.Cut(victim.provider(), "?")
			other, err := url.ParseQuery(query)
			require.NoError(t, err)
			// The victim has the cookie of another sign-in, under the name of the cookie of this sign-in.
			victim.cookies = map[string]string{
				"dlqd-sign-in-" + before[:12]: slices.Collect(maps.Values(victim.cookies))[0],
			}
			q.Set("code", other.Get("code"))
		},
		"invented": func(victim *browser, _ url.Values) {
			for name := range victim.cookies {
				victim.cookies[name] = "x.y"
			}
		},
		"no state":         func(_ *browser, q url.Values) { q.Del("state") },
		"another state":    func(_ *browser, q url.Values) { q.Set("state", "x") },
		"another code":     func(_ *browser, q url.Values) { q.Set("code", "x") },
		"no code":          func(_ *browser, q url.Values) { q.Del("code") },
		"another provider": func(_ *browser, q url.Values) { q.Set("iss", "https://evil.example") },
		"refused":          func(_ *browser, q url.Values) { q.Set("error", "access_denied\x1b[31m") },
	} {
		victim := c.browser()
		path, query, _ := strings.Cut(victim.provider(), "?")
		values, err := url.ParseQuery(query)
		require.NoError(t, err)
		change(victim, values)
		status, body := victim.back(path + "?" + values.Encode())
		require.Contains(t, []int{400, 401, 403}, status, name+body)
		require.NotContains(t, body, "\x1b", name)
		require.Empty(t, victim.caller(), name)
	}
	twice := c.browser()
	path = twice.provider()
	cookies := maps.Clone(twice.cookies)
	status, _ = twice.back(path)
	require.Equal(t, http.StatusSeeOther, status)
	copied := c.with(cookies)
	status, _ = copied.back(path)
	require.Equal(t, http.StatusUnauthorized, status, "a code is valid once")
	require.Empty(t, copied.caller())
	issuer.Nonce("of another sign-in")
	status, body := kim.back(kim.provider())
	require.Equal(t, http.StatusUnauthorized, status)
	require.Contains(t, body, "was rejected")
	issuer.Nonce("")
	var response *http.Response
	for _, host := range []string{
		"evil.example", "127.0.0.1:1@evil.example", "localhost:80/@evil.example",
		"localhost@evil.example", "dlqd.example.evil.example", "dlqd.example:evil",
	} {
		response, _ = c.browser().send(http.MethodGet, "/sign-in/oidc", nil, "Host", host)
		require.Equal(t, http.StatusMisdirectedRequest, response.StatusCode, host)
	}

	// Changes of the policy apply at once to sessions.
	change(func(r *access.Rules) { r.Grants = r.Grants[1:] })
	require.Equal(t, "oidc kim@example.com reader", kim.caller())
	change(func(r *access.Rules) { r.Grants = nil })
	require.Equal(t, "oidc kim@example.com ", kim.caller())
	change(func(r *access.Rules) { r.Ways = []string{"tokens"} })
	require.Empty(t, kim.caller())
	change(func(r *access.Rules) { r.Ways, r.OIDC.Issuer = []string{"oidc"}, "https://another.example" })
	require.Empty(t, kim.caller(), "users of another provider are different users")
	change(func(r *access.Rules) { r.OIDC.Issuer = issuer.URL })
	require.Equal(t, "oidc kim@example.com ", kim.caller())

	issuer.Down(true)
	require.Equal(t, "oidc kim@example.com ", kim.caller(), "existing sessions continue")
	down := b.console(func() access.Rules { return oidcRules(issuer.URL) }, false).browser()
	response, _ = down.send(http.MethodGet, "/sign-in/oidc", nil)
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
}

// Several tabs of a browser sign in at once. Each tab returns to its own page.
func TestSessions_SignInFromTwoTabs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	issuer := accesstest.New(t)
	kim := b.console(rules(oidcRules(issuer.URL)), false).browser()
	first, second := kim.providerFrom("/groups"), kim.providerFrom("/queues?q=a")
	status, to := kim.back(first)
	require.Equal(t, []any{http.StatusSeeOther, "/groups"}, []any{status, to})
	status, to = kim.back(second)
	require.Equal(t, []any{http.StatusSeeOther, "/queues?q=a"}, []any{status, to})
	require.Equal(t, "oidc kim@example.com operator", kim.caller())
	require.Len(t, kim.cookies, 1, "the cookies of the sign-ins are deleted")

	// The cookies of sign-ins that never end stay below 4 KiB in all: with more, a proxy would refuse all requests.
	for range 20 {
		kim.providerFrom("/" + strings.Repeat("a", 1500))
		size := 0
		for name, value := range kim.cookies {
			size += len(name) + len(value)
		}
		require.Less(t, size, 4<<10)
	}
	status, to = kim.back(kim.providerFrom("/groups"))
	require.Equal(t, []any{http.StatusSeeOther, "/groups"}, []any{status, to}, "the latest sign-in counts")
}
