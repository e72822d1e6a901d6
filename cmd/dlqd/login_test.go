package main_test

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access/accesstest"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// person is a user who has a home directory of their own.
type person struct {
	*testing.T

	home string
	api  string
}

func newPerson(t *testing.T, api string) *person {
	t.Helper()
	return &person{T: t, home: t.TempDir(), api: api}
}

func (p *person) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(p.Context(), program, append(args, "--api-url", p.api)...)
	cmd.Env = append(os.Environ(), "HOME="+p.home, "XDG_CONFIG_HOME="+filepath.Join(p.home, ".config"), "DLQD_TOKEN=",
		"DLQD_TOKEN_FILE=", "DISPLAY=", "WAYLAND_DISPLAY=")
	return cmd
}

// run runs dlqd and waits for its exit.
func (p *person) run(args ...string) (out string, failed bool) {
	p.Helper()
	raw, err := p.command(args...).CombinedOutput()
	return string(raw), err != nil
}

func (p *person) ok(args ...string) string {
	p.Helper()
	out, failed := p.run(args...)
	require.False(p, failed, out)
	return out
}

func (p *person) fails(args ...string) string {
	p.Helper()
	out, failed := p.run(args...)
	require.True(p, failed, out)
	return out
}

var address = regexp.MustCompile(`^https?://\S+$`)

// login runs "dlqd login" and calls browse with the address that the command prints.
func (p *person) login(browse func(address string), args ...string) (out string, failed bool) {
	p.Helper()
	cmd := p.command(append([]string{"login", "--no-browser"}, args...)...)
	pipe, err := cmd.StderrPipe()
	require.NoError(p, err)
	var stdout, stderr bytes.Buffer
	cmd.Stdout = &stdout
	require.NoError(p, cmd.Start())
	lines := bufio.NewScanner(pipe)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		stderr.WriteString(lines.Text() + "\n")
		if address.MatchString(lines.Text()) {
			browse(lines.Text())
		}
	}
	err = cmd.Wait()
	return stderr.String() + stdout.String(), err != nil
}

// get requests an address and follows redirects, as a browser does when the user enters nothing.
func (p *person) get(address string) string {
	p.Helper()
	response, err := http.Get(address)
	require.NoError(p, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(p, err)
	return string(raw)
}

// file returns the path of the file that "dlqd login" wrote, or "" if there is none.
func (p *person) file() string {
	p.Helper()
	found, err := filepath.Glob(filepath.Join(p.home, ".config", "dlqd", "logins", "*.json"))
	require.NoError(p, err)
	require.LessOrEqual(p, len(found), 1)
	return strings.Join(found, "")
}

func serveOIDC(t *testing.T, issuer string) *served {
	t.Helper()
	return serveAccess(t, `authentication: [tokens, oidc]
oidc: {issuer: "`+issuer+`", clientID: dlqd}
grants:
  - {users: [kim@example.com], role: reader}
  - {groups: [ops], role: operator, queues: ["payments*"]}
`)
}

func serveAccess(t *testing.T, access string) *served {
	t.Helper()
	return serve(t, "--database-url", postgrestest.URL(t), "--config-dir",
		policytest.Dir(t, policytest.Files{"access": access}))
}

func TestLogin(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := serveOIDC(t, issuer.URL)
	kim := newPerson(t, s.api)
	require.Contains(t, kim.fails("whoami"), "authentication required")
	require.Contains(t, kim.ok("logout"), "not signed in")

	out, failed := kim.login(func(address string) {
		require.Contains(t, address, "code_challenge_method=S256")
		require.Contains(t, kim.get(address), "Return to your terminal")
	})
	require.False(t, failed, out)
	require.Contains(t, out, "kim@example.com (by oidc)\nreader everywhere\noperator queue payments*\n")
	info, err := os.Stat(kim.file())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	require.Contains(t, kim.ok("list"), "STATUS")
	require.Contains(t, kim.ok("whoami"), "kim@example.com (by oidc)")
	require.Contains(t, newPerson(t, s.api).fails("list"), "authentication required", "another user is signed in")

	// The login is valid for kim's API only.
	elsewhere := *kim
	elsewhere.api = serveOIDC(t, issuer.URL).api
	require.Contains(t, elsewhere.fails("list"), "authentication required")

	// dlqd rejects a login file that other users can read.
	require.NoError(t, os.Chmod(kim.file(), 0o640))
	require.Contains(t, kim.fails("list"), "other users can read this file")

	require.Equal(t, 1, issuer.Sessions())
	require.Contains(t, kim.ok("logout"), "signed out")
	require.Empty(t, kim.file())
	require.Contains(t, kim.fails("list"), "authentication required")
	require.NotContains(t, s.log.String(), "eyJ", "the log has a token")
}

func TestLogin_RenewsTokens(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := serveOIDC(t, issuer.URL)
	kim := newPerson(t, s.api)
	issuer.SetLifetime(time.Second) // an ID token always expires soon
	out, failed := kim.login(func(address string) { kim.get(address) })
	require.False(t, failed, out)
	before, err := os.ReadFile(kim.file())
	require.NoError(t, err)
	require.Contains(t, kim.ok("whoami"), "kim@example.com")
	after, err := os.ReadFile(kim.file())
	require.NoError(t, err)
	require.NotEqual(t, before, after)

	// A refresh token may be used only once, so commands that run at the same time must renew the sign-in one after the
	// other.
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			if out, failed := kim.run("whoami"); failed {
				t.Error(out)
			}
		})
	}
	all.Wait()
	require.Equal(t, 1, issuer.Sessions())

	// The provider changes its signing key. dlqd has just fetched the provider's keys, and does not fetch keys again
	// within five seconds.
	issuer.Rotate()
	require.Eventually(t, func() bool {
		_, failed := kim.run("whoami")
		return !failed
	}, 5*time.Minute, 100*time.Millisecond)

	require.Contains(t, kim.ok("logout"), "signed out")
	require.Zero(t, issuer.Sessions(), "the session is revoked at the provider")

	out, failed = kim.login(func(address string) { kim.get(address) })
	require.False(t, failed, out)
	issuer.EndSessions()
	issuer.SetLifetime(-time.Hour)
	require.NoError(t, os.WriteFile(kim.file(), expired(t, kim.file()), 0o600))
	require.Contains(t, kim.fails("whoami"), "your sign-in has ended; sign in again: dlqd login --api-url "+s.api)
}

// expired returns the content of a login file with the ID token's expiry set to a time in the past.
func expired(t *testing.T, file string) []byte {
	t.Helper()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	return regexp.MustCompile(`"expiry": "\d+`).ReplaceAll(raw, []byte(`"expiry": "2001`))
}

func TestLogin_DeviceCode(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	kim := newPerson(t, serveOIDC(t, issuer.URL).api)
	out := kim.ok("login", "--device")
	require.Contains(t, out, "Sign in at "+issuer.URL+"/activate with the code ABCD-EFGH")
	require.Contains(t, out, "kim@example.com (by oidc)")
}

// TestLogin_RejectsForeignAnswers checks that dlqd login, which listens on a local port for the provider's redirect,
// rejects a redirect that does not belong to the sign-in.
func TestLogin_RejectsForeignAnswers(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := serveOIDC(t, issuer.URL)
	kim := newPerson(t, s.api)
	// back returns the address to which the provider redirects the browser.
	back := func(address string) string {
		client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		response, err := client.Get(address)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.Header.Get("Location")
	}
	state := regexp.MustCompile(`state=[^&]*`)
	out, failed := kim.login(func(address string) {
		at := back(address)
		require.Contains(t, kim.get(state.ReplaceAllString(at, "state=another")), "does not belong to the pending sign-in")
		require.Contains(t, kim.get(state.ReplaceAllString(at, "")), "does not belong to the pending sign-in")
		require.Contains(t, kim.get(strings.Replace(at, "/callback", "/", 1)), "does not belong to the pending sign-in")
		kim.get(at)
	})
	require.False(t, failed, "foreign requests ended the sign-in: %s", out)
	kim.ok("logout")

	for want, change := range map[string]func(at string) string{
		"invalid_grant": func(at string) string {
			return regexp.MustCompile(`code=[^&]*`).ReplaceAllString(at,
				"code=another")
		},
		"the answer comes from another OpenID Connect provider": func(at string) string {
			return regexp.MustCompile(`iss=[^&]*`).ReplaceAllString(at, "iss=https%3A%2F%2Fanother.example")
		},
		"the OpenID Connect provider refused the sign-in: access_denied no [31m": func(at string) string {
			return regexp.MustCompile(`code=[^&]*`).ReplaceAllString(at, "error=access_denied&error_description=no%1b%20[31m")
		},
	} {
		out, failed := kim.login(func(address string) { kim.get(change(back(address))) })
		require.True(t, failed)
		require.Contains(t, strings.ReplaceAll(out, "  ", " "), want)
		require.Empty(t, kim.file())
	}

	issuer.Nonce("another")
	out, failed = kim.login(func(address string) { kim.get(address) })
	require.True(t, failed)
	require.Contains(t, out, "belongs to another sign-in (nonce)")
	require.Empty(t, kim.file())

	// A stolen code is useless without the code verifier (PKCE), which only the dlqd that began the sign-in has.
	issuer.Nonce("")
	out, failed = kim.login(func(address string) {
		kim.get(back(regexp.MustCompile(`code_challenge=[^&]*`).ReplaceAllString(address, "code_challenge=another")))
	})
	require.True(t, failed)
	require.Contains(t, out, "invalid_grant")

	kim.api = "http://dlqd.example.com"
	require.Contains(t, kim.fails("login"), "use https, or a tunnel")
	kim.api = serve(t, "--database-url", postgrestest.URL(t)).api
	require.Contains(t, kim.fails("login"), "sign-in with an OpenID Connect provider is off")
}

// TestLogin_ProviderDown checks that only the provider's users are affected if the provider is down.
func TestLogin_ProviderDown(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	issuer.Down(true)
	url := postgrestest.URL(t)
	dir := policytest.Dir(t, policytest.Files{"access": "authentication: [tokens, oidc]\noidc: {issuer: \"" + issuer.URL +
		"\", clientID: dlqd}\n"})
	s := serve(t, "--database-url", url, "--config-dir", dir)
	kim := newPerson(t, s.api)
	get := func(token string) *http.Response {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.api+"/api/whoami", nil)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		t.Cleanup(func() { _ = response.Body.Close() })
		return response
	}
	response := get(issuer.Token(nil))
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.NotEmpty(t, response.Header.Get("Retry-After"))
	require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
	require.Equal(t, http.StatusUnauthorized, get("dlqd_none").StatusCode)

	token, _, code := run(t, "tokens", "create", "--database-url", url, "--name", "way-in", "--role", "admin")
	require.Zero(t, code)
	require.Equal(t, http.StatusOK, get(strings.TrimSpace(token)).StatusCode)
	health := func() (int, string) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.api+"/api/health", nil)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(token))
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(raw)
	}
	status, body := health()
	require.Equal(t, http.StatusOK, status, "dlqd itself is healthy: %s", body)
	require.Contains(t, body, "the OpenID Connect provider has not answered since ")
	out, failed := kim.login(func(string) {})
	require.True(t, failed)
	require.Contains(t, out, "502")
	issuer.Down(false)
	require.Eventually(t, func() bool {
		_, body := health()
		return !strings.Contains(body, "has not answered")
	}, 5*time.Minute, 100*time.Millisecond)
}
