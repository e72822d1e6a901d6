package server_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

// browser is a browser with a user's session.
type browser struct {
	*bundle

	cookie string // name=value
}

// signIn creates a token and signs a user in with it.
func (b *bundle) signIn(name string, role access.Role) *browser {
	b.Helper()
	secret, err := access.NewStore(b.pool, postgres.DefaultSchemas()).Create(b.Context(),
		&access.Token{Name: name, Role: role}, "test")
	require.NoError(b, err)
	one := &browser{bundle: b}
	response, body := one.asks("POST", "/sign-in", url.Values{"token": {secret}}.Encode(), "Content-Type",
		"application/x-www-form-urlencoded")
	require.Equal(b, http.StatusSeeOther, response.StatusCode, body)
	require.NotEmpty(b, one.cookie)
	return one
}

func (b *browser) request(method, path, body string, headers ...string) *http.Request {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Sec-Fetch-Site", "same-origin")
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Cookie", b.cookie)
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	return request
}

func (b *browser) asks(method, path, body string, headers ...string) (*http.Response, string) {
	b.Helper()
	response, err := (&http.Client{CheckRedirect: func(*http.Request,
		[]*http.Request,
	) error {
		return http.ErrUseLastResponse
	}}).Do(b.request(method, path, body, headers...))
	require.NoError(b, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	for _, cookie := range response.Cookies() {
		if strings.HasPrefix(cookie.Value, "dlqds_") {
			b.cookie = cookie.Name + "=" + cookie.Value
		}
	}
	return response, string(raw)
}

// status sends a request and returns the status.
func (b *browser) status(method, path, body string, headers ...string) int {
	b.Helper()
	response, _ := b.asks(method, path, body, headers...)
	return response.StatusCode
}

// sessions returns the names of the sessions that the user sees, and their ids by name. The key
// "current" has the id of the browser's own session.
func (b *browser) sessions() (names []string, ids map[string]string) {
	b.Helper()
	response, body := b.asks("GET", "/api/sessions", "")
	require.Equal(b, http.StatusOK, response.StatusCode, body)
	var out struct {
		Sessions []struct {
			ID, Name, Address string
			Current           bool
		}
	}
	require.NoError(b, json.Unmarshal([]byte(body), &out))
	ids = map[string]string{}
	for _, s := range out.Sessions {
		require.Equal(b, "127.0.0.1", s.Address)
		names = append(names, s.Name)
		ids[s.Name] = s.ID
		if s.Current {
			ids["current"] = s.ID
		}
	}
	return names, ids
}

// The console's script uses the API with the rights of the session, in every process. Pages of other sites cannot use
// the session.
func TestSessions_AuthenticateAPIRequests(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"})
	b := setup(t, options{config: func(c *server.Config) {
		c.Source = policy.Source{Dir: dir, Destination: policytest.Destination}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy, c.Process, c.DLQWorkers = rules, false, false
	}})
	kim := b.signIn("kim", access.Operator)
	response, body := kim.asks("GET", "/api/whoami", "")
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Contains(t, body, `"name":"kim","via":"token"`)
	require.Equal(t, http.StatusNotFound,
		kim.status("POST", "/api/dlq/entries/0198a0b0-0000-7000-8000-000000000000/discard", `{}`), "the entry does not exist")
	require.Equal(t, http.StatusForbidden,
		kim.status("POST", "/api/dlq/erasures", `{"filter": {"tags": ["x"]}, "note": "n"}`), "operators may not erase")
	require.Equal(t, http.StatusForbidden,
		kim.status("POST", "/api/dlq/entries/0198a0b0-0000-7000-8000-000000000000/discard", `{}`,
			"Sec-Fetch-Site", "cross-site"))
	require.Equal(t, http.StatusUnauthorized, kim.status("GET", "/api/dlq/entries", "", "Sec-Fetch-Site", "same-site"))

	// Changed rights apply at once. The event stream of a replay run continues when its user's cookie is replaced, and
	// ends when the user's rights change or the user signs out.
	b.exec(`INSERT INTO dlq.replay_runs (id, filter, actor, total, status)
		VALUES ('0198a0b0-0000-7000-8000-000000000000', '{}', 'kim', 1, 'paused')`)
	follow, err := http.DefaultClient.Do(kim.request("GET", "/api/dlq/replays/0198a0b0-0000-7000-8000-000000000000/events",
		""))
	require.NoError(t, err)
	defer follow.Body.Close()
	require.Equal(t, http.StatusOK, follow.StatusCode)
	before := kim.cookie
	b.exec("UPDATE dlq.sessions SET rotated_at = now() - interval '2 hours'")
	require.Eventually(t, func() bool { kim.status("GET", "/api/whoami", ""); return kim.cookie != before }, time.Minute,
		100*time.Millisecond)
	require.Equal(t, http.StatusOK, kim.status("GET", "/api/whoami", ""))
	// New requests cannot use the cookie with which the stream began any more.
	b.exec("UPDATE dlq.sessions SET previous_until = now()")
	events := bufio.NewScanner(follow.Body)
	for range 6 { // one event a second, longer in total than lookups are cached
		for events.Scan() && !strings.HasPrefix(events.Text(), "data:") {
		}
		require.Contains(t, events.Text(), `"paused"`)
	}
	b.exec("UPDATE dlq.tokens SET role = 'reader'")
	require.Eventually(t, func() bool {
		return kim.status("POST", "/api/dlq/bulk",
			`{"do": "note", "filter": {"queue": ["q"]}, "note": "n", "dryRun": true}`) == http.StatusForbidden
	}, 5*time.Minute, 100*time.Millisecond)
	for events.Scan() { // ends because the user's rights changed
	}
	require.NoError(t, events.Err())
	follow, err = http.DefaultClient.Do(kim.request("GET", "/api/dlq/replays/0198a0b0-0000-7000-8000-000000000000/events",
		""))
	require.NoError(t, err)
	defer follow.Body.Close()
	require.Equal(t, http.StatusOK, follow.StatusCode)
	require.Equal(t, http.StatusSeeOther, kim.status("POST", "/sign-out", ""))
	_, err = io.Copy(io.Discard, follow.Body) // the stream ends
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, kim.status("GET", "/api/whoami", ""))

	// A reload that removes the authentication by tokens ends the sessions that began with a token.
	anna := b.signIn("anna", access.Reader)
	require.Equal(t, http.StatusOK, anna.status("GET", "/api/whoami", ""))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "access.yaml"), []byte("authentication: [socket]"), 0o600))
	require.NoError(t, b.server.Reload(t.Context()))
	require.Equal(t, http.StatusUnauthorized, anna.status("GET", "/api/whoami", ""))
}

// A user sees and ends only the user's own sessions. An admin without limits sees and ends all sessions.
func TestSessions_OnlyAdminsEndThoseOfOthers(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) {
		c.Process, c.DLQWorkers = false, false
		c.Policy.Access.Authentication = []string{"tokens"}
	}})
	kim, lee, root := b.signIn("kim", access.Operator), b.signIn("lee", access.Reader), b.signIn("root", access.Admin)
	names, own := kim.sessions()
	require.Equal(t, []string{"kim"}, names)
	require.Equal(t, own["kim"], own["current"])
	all, ids := root.sessions()
	require.Equal(t, []string{"root", "lee", "kim"}, all)
	_, body := kim.asks("GET", "/api/sessions?name=lee", "")
	require.JSONEq(t, `{"sessions": []}`, body)

	require.Equal(t, http.StatusNotFound, kim.status("DELETE", "/api/sessions/"+ids["lee"], ""),
		"the same answer as for an unknown session")
	require.Equal(t, http.StatusForbidden, kim.status("POST", "/api/sessions/end", `{"name": "lee"}`))
	require.Equal(t, http.StatusForbidden, lee.status("DELETE", "/api/sessions/"+ids["lee"], "",
		"Sec-Fetch-Site", "cross-site"))
	require.Equal(t, http.StatusOK, lee.status("GET", "/api/whoami", ""))
	require.Equal(t, http.StatusOK, root.status("DELETE", "/api/sessions/"+ids["lee"]+"?note=left", ""))
	require.Equal(t, http.StatusUnauthorized, lee.status("GET", "/api/whoami", ""))
	require.Equal(t, http.StatusNotFound, root.status("DELETE", "/api/sessions/"+ids["lee"], ""))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.acts WHERE subject = 'sessions' AND act = 'ended'
		AND actor = 'root' AND note = 'left' AND detail ->> 'of' = 'lee' AND origin LIKE 'API, from 127.0.0.1%'`))

	second := &browser{bundle: b}
	second.cookie = kim.cookie
	response, body := kim.asks("POST", "/api/sessions/end", "")
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.JSONEq(t, `{"ended": 1}`, body)
	require.Equal(t, http.StatusUnauthorized, second.status("GET", "/api/whoami", ""))
	response, body = root.asks("POST", "/api/sessions/end", `{"name": "nobody"}`)
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.JSONEq(t, `{"ended": 0}`, body)
}

// If a browser sends a form without a session, dlqd answers with the sign-in page. After the sign-in, the form shows
// the typed values once, and the user sends it again. Programs get problem details.
func TestSessions_KeepWhatWasTyped(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"})
	b := setup(t, options{config: func(c *server.Config) {
		c.Source = policy.Source{Dir: dir, Destination: policytest.Destination}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy, c.Process, c.DLQWorkers = rules, false, false
	}})
	secret, err := access.NewStore(b.pool, postgres.DefaultSchemas()).Create(t.Context(),
		&access.Token{Name: "kim", Role: access.Admin}, "test")
	require.NoError(t, err)
	form := url.Values{
		"from": {"/access"}, "name": {`ci "bot"`}, "role": {"operator"}, "note": {"for the <pipeline>"},
	}
	send := b.visitor()
	status, page := send("POST", "/access/tokens", form)
	require.Equal(t, http.StatusUnauthorized, status)
	has(t, page, `<input type="hidden" name="to" value="/access">`)
	has(t, page, "nothing was done")
	status, page = send("POST", "/sign-in", url.Values{"token": {secret}, "to": {"/access"}})
	require.Equal(t, http.StatusOK, status)
	has(t, page, `value="ci &#34;bot&#34;"`)
	has(t, page, `value="for the &lt;pipeline&gt;"`)
	has(t, page, `<option value="operator" selected="">`)
	has(t, page, "nothing was done")
	_, page = send("GET", "/access", nil)
	require.NotContains(t, page, "nothing was done")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.tokens WHERE name LIKE 'ci%'"))

	// A text that no cookie can hold is shown on the sign-in page.
	send = b.visitor()
	form.Set("note", strings.Repeat("for the pipeline ", 500))
	status, page = send("POST", "/access/tokens", form)
	require.Equal(t, http.StatusUnauthorized, status)
	has(t, page, "Too long to keep: copy “note”")
	has(t, page, form.Get("note"))
	form.Set("note", strings.Repeat("x", 100_000))
	status, page = send("POST", "/access/tokens", form)
	require.Equal(t, http.StatusUnauthorized, status)
	has(t, page, "too large to keep")
	_, page = send("POST", "/sign-in", url.Values{"token": {secret}, "to": {"/access"}})
	require.NotContains(t, page, "nothing was done")

	send = b.visitor()
	status, page = send("POST", "/access/tokens", form, "Accept", "*/*")
	require.Equal(t, http.StatusUnauthorized, status)
	has(t, page, `"status":401`)
	status, _ = send("POST", "/access/tokens", form, "Sec-Fetch-Site", "cross-site")
	require.Equal(t, http.StatusForbidden, status)
	_, page = send("POST", "/sign-in", url.Values{"token": {secret}, "to": {"/access"}})
	require.NotContains(t, page, "nothing was done", "a page of another site typed into a form")
}

// visitor returns a function that sends requests as a new browser does, and follows redirects.
func (b *bundle) visitor() func(method, path string, form url.Values, headers ...string) (int, string) {
	b.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(b, err)
	return func(method, path string, form url.Values, headers ...string) (int, string) {
		b.Helper()
		request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(form.Encode()))
		require.NoError(b, err)
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		request.Header.Set("Accept", "text/html")
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		for i := 0; i < len(headers); i += 2 {
			request.Header.Set(headers[i], headers[i+1])
		}
		response, err := (&http.Client{Jar: jar}).Do(request)
		require.NoError(b, err)
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		require.NoError(b, err)
		return response.StatusCode, string(raw)
	}
}

// setupAdmin returns a dlqd with sign-in by tokens, and the token of an admin.
func setupAdmin(t *testing.T, change func(*server.Config)) (b *bundle, secret string) {
	t.Helper()
	b = setup(t, options{config: func(c *server.Config) {
		c.Policy.Access.Authentication = []string{"tokens"}
		c.Process, c.DLQWorkers = false, false
		if change != nil {
			change(c)
		}
	}})
	secret, err := access.NewStore(b.pool, postgres.DefaultSchemas()).Create(t.Context(),
		&access.Token{Name: "kim", Role: access.Admin}, "test")
	require.NoError(t, err)
	return b, secret
}

// If dlqd cannot handle a form now, it answers with a page that shows the typed values and a button to send them again.
func TestForms_KeepWhatWasTypedWhenRefused(t *testing.T) {
	t.Parallel()
	form := url.Values{
		"from": {"/access"}, "name": {`ci "bot"`}, "role": {"operator"}, "note": {"for the <pipeline>\r\nof ann"},
	}
	isAgain := func(t *testing.T, page string) {
		t.Helper()
		has(t, page, `<form method="post" action="/access/tokens" class="form" id="again">`)
		has(t, page, `<input type="hidden" name="from" value="/access">`)
		has(t, page, `<input type="hidden" name="role" value="operator">`)
		has(t, page, `name="note" value="for the &lt;pipeline&gt;`)
		has(t, page, "<dt>note</dt>")
	}
	t.Run("rate", func(t *testing.T) {
		t.Parallel()
		b, secret := setupAdmin(t, func(c *server.Config) { c.Door.Rate = door.Rate{Requests: 20, Per: 24 * time.Hour} })
		send := b.visitor()
		_, _ = send("POST", "/sign-in", url.Values{"token": {secret}})
		require.Eventually(t, func() bool {
			status, page := send("GET", "/access", nil)
			return status == http.StatusTooManyRequests && strings.Contains(page, "<h1>Too Many Requests</h1>")
		}, 5*time.Minute, time.Millisecond)
		status, page := send("POST", "/access/tokens", form)
		require.Equal(t, http.StatusTooManyRequests, status, page)
		isAgain(t, page)
		has(t, page, "rate limit exceeded")
		require.NotContains(t, page, "cannot tell whether this was done")
		big := url.Values{"note": {strings.Repeat("x", 100_000)}}
		status, page = send("POST", "/access/tokens", big)
		require.Equal(t, http.StatusTooManyRequests, status, page)
		has(t, page, "too large to keep")
		status, page = send("POST", "/access/tokens", form, "Accept", "*/*")
		require.Equal(t, http.StatusTooManyRequests, status)
		has(t, page, `"status":429`)
	})
	t.Run("database", func(t *testing.T) {
		t.Parallel()
		b, secret := setupAdmin(t, nil)
		send := b.visitor()
		_, _ = send("POST", "/sign-in", url.Values{"token": {secret}})
		b.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN RAISE EXCEPTION ''no space left'' USING ERRCODE = ''disk_full''; END'`)
		b.exec("CREATE TRIGGER refuse BEFORE INSERT ON dlq.tokens FOR EACH ROW EXECUTE FUNCTION refuse()")
		status, page := send("POST", "/access/tokens", form)
		require.Equal(t, http.StatusServiceUnavailable, status, page)
		isAgain(t, page)
		has(t, page, "cannot tell whether this was done") // an error may also follow the commit
		has(t, page, `<a href="/access">Look</a>`)
		b.exec("ALTER TABLE dlq.sessions RENAME TO gone")
		require.Eventually(t, func() bool { // the process caches sessions for some seconds
			status, page = send("POST", "/access/tokens", form)
			return strings.Contains(page, "nothing was done")
		}, 5*time.Minute, 50*time.Millisecond)
		require.NotContains(t, page, "cannot tell whether this was done")
		require.GreaterOrEqual(t, status, http.StatusInternalServerError)
		isAgain(t, page)
		status, page = send("GET", "/audit", nil)
		require.GreaterOrEqual(t, status, http.StatusInternalServerError)
		has(t, page, "<!doctype html>")
		b.exec("ALTER TABLE dlq.gone RENAME TO sessions")
		b.exec("DROP TRIGGER refuse ON dlq.tokens")
		require.Eventually(t, func() bool {
			status, page = send("POST", "/access/tokens", form)
			return status == http.StatusOK && strings.Contains(page, "Token created")
		}, 5*time.Minute, 50*time.Millisecond)
		require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.tokens WHERE name LIKE 'ci%'"))
	})
}

// A browser gets the page that shows a new token with a GET request. Loading the page again creates no other token and
// shows no secret.
func TestTokens_ReloadMakesNoOther(t *testing.T) {
	t.Parallel()
	b, secret := setupAdmin(t, nil)
	send := b.visitor()
	_, _ = send("POST", "/sign-in", url.Values{"token": {secret}})
	response, body := b.signIn("ann", access.Admin).asks("POST", "/access/tokens",
		url.Values{"name": {"other"}, "role": {"reader"}}.Encode(), "Content-Type", "application/x-www-form-urlencoded")
	require.Equal(t, http.StatusSeeOther, response.StatusCode, body)
	require.Equal(t, "/access", response.Header.Get("Location"))

	status, page := send("POST", "/access/tokens", url.Values{"name": {"ci"}, "role": {"sender"}, "from": {"/access"}})
	require.Equal(t, http.StatusOK, status, page)
	has(t, page, "Token created: ci")
	has(t, page, `data-copy="dlqd_`)
	_, page = send("GET", "/access", nil)
	require.NotContains(t, page, `data-copy="dlqd_`)
	require.NotContains(t, page, "Token created")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.tokens WHERE name = 'ci'"))
}
