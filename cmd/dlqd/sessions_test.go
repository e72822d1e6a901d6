package main_test

import (
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

	"github.com/dlqd/dlqd/internal/access/accesstest"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// visitor is a browser that keeps cookies and follows redirects.
type visitor struct {
	*testing.T
	*http.Client

	api  string
	last *url.URL // address of the last redirect from the provider to dlqd
}

func newVisitor(t *testing.T, api string) *visitor {
	t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	v := &visitor{T: t, api: api}
	v.Client = &http.Client{Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if r.URL.Path == "/sign-in/callback" {
			v.last = r.URL
		}
		return nil
	}}
	return v
}

func (v *visitor) answer(response *http.Response, err error) (int, string) {
	v.Helper()
	require.NoError(v, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(v, err)
	return response.StatusCode, string(raw)
}

// TestSessions lists and ends sessions with the command line. A user can end the user's own sessions, and an admin all
// sessions.
func TestSessions(t *testing.T) {
	t.Parallel()
	url, config := postgrestest.URL(t), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(config, "access.yaml"), []byte("authentication: [tokens]\n"), 0o600))
	s := serve(t, "--database-url", url, "--config-dir", config)
	as := func(name, role string) (secret string, flags []string) {
		secret = strings.TrimSpace(ok(t, "tokens", "create", "--name", name, "--role", role, "--database-url", url))
		return secret, []string{"--api-url", s.api, "--token-file", writeFile(t, secret)}
	}
	kim, byKim := as("kim", "reader")
	_, byRoot := as("root", "admin")
	with := func(who []string, args ...string) []string { return append(args, who...) }
	signIn := func() *visitor {
		v := newVisitor(t, s.api)
		status, body := v.answer(v.PostForm(s.api+"/sign-in", map[string][]string{"token": {kim}, "to": {"/api/whoami"}}))
		require.Equal(t, http.StatusOK, status, body)
		require.Contains(t, body, `"name":"kim"`)
		return v
	}
	signedIn := func(v *visitor) bool {
		status, _ := v.answer(v.Get(s.api + "/api/whoami"))
		return status == http.StatusOK
	}
	first := signIn()
	listed := ok(t, with(byKim, "sessions")...)
	require.Regexp(t, `(?m)^[0-9a-f-]{36} +kim +token +127.0.0.1 .* Go-http-client`, listed)
	id := strings.Fields(strings.Split(listed, "\n")[1])[0]
	_, lee := as("lee", "operator")
	require.NotContains(t, ok(t, with(lee, "sessions")...), "kim")
	_, stderr, code := run(t, with(lee, "sessions", "end", id)...)
	require.Equal(t, 1, code, stderr)
	require.True(t, signedIn(first))
	require.Contains(t, ok(t, with(byRoot, "sessions", "end", id, "--note", "a lost phone")...), "has ended")
	require.False(t, signedIn(first))
	require.Contains(t, ok(t, with(byRoot, "audit", "--json")...), "a lost phone")

	second, third := signIn(), signIn()
	require.Contains(t, ok(t, with(byRoot, "sessions", "list", "--name", "kim", "--json")...), `"name":"kim"`)
	require.Contains(t, ok(t, with(byRoot, "sessions", "end-all", "--name", "kim")...), "2 sessions have ended")
	require.False(t, signedIn(second))
	require.False(t, signedIn(third))
	signIn()
	require.Contains(t, ok(t, with(byKim, "sessions", "end-all")...), "1 sessions have ended")
}

// serveConsole starts a dlqd with a console. At the provider, the console is another client than "dlqd login", and has
// a client secret.
func serveConsole(t *testing.T, issuer, client, secret string) *served {
	t.Helper()
	dir := policytest.Dir(t, policytest.Files{"access": `authentication: [oidc]
oidc: {issuer: "` + issuer + `", clientID: ` + client + `, clientSecretFile: console.secret}
grants:
  - {users: [kim@example.com], role: reader}
`})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "console.secret"), []byte(secret+"\n"), 0o600))
	return serve(t, "--database-url", postgrestest.URL(t), "--config-dir", dir)
}

// TestSessions_ClientSecretGoesOnlyToProvider checks that dlqd reads a client secret from a file and sends it only to
// the provider.
func TestSessions_ClientSecretGoesOnlyToProvider(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	issuer.Secret("a secret: of% the client")
	s := serveConsole(t, issuer.URL, accesstest.ClientID, "a secret: of% the client")
	v := newVisitor(t, s.api)
	status, body := v.answer(v.Get(s.api + "/sign-in/oidc?to=/api/whoami"))
	require.Equal(t, http.StatusOK, status, body)
	require.Contains(t, body, `"name":"kim@example.com","via":"oidc"`)
	issuer.Secret("another")
	v = newVisitor(t, s.api)
	status, body = v.answer(v.Get(s.api + "/sign-in/oidc"))
	require.Equal(t, http.StatusUnauthorized, status, body)
	require.Eventually(t, func() bool {
		return strings.Contains(s.log.String(), "sign-in with the OpenID Connect provider rejected")
	}, 5*time.Minute, 50*time.Millisecond)
	require.NotContains(t, body+s.log.String(), "of% the client")
}

// TestSessions_RealProvider signs in with a browser at npm's oidc-provider. It needs DLQD_TEST_OIDC_PROVIDER: see
// TestLogin_RealProvider.
func TestSessions_RealProvider(t *testing.T) {
	t.Parallel()
	installed := os.Getenv("DLQD_TEST_OIDC_PROVIDER")
	if installed == "" {
		t.Skip("DLQD_TEST_OIDC_PROVIDER is not set")
	}
	provider := newRealProvider(t, installed)
	for _, s := range []*served{
		serveOIDC(t, provider.issuer),
		serveConsole(t, provider.issuer, "console", "a secret of the console's"),
	} {
		kim := newVisitor(t, s.api)
		signIn := func() {
			t.Helper()
			status, body := kim.answer(kim.Get(s.api + "/sign-in/oidc?to=/api/whoami"))
			require.Equal(t, http.StatusOK, status, body)
			require.Contains(t, body, `"name":"kim@example.com","via":"oidc"`)
		}
		signIn()
		status, _ := kim.answer(kim.Get(kim.last.String()))
		require.Equal(t, http.StatusBadRequest, status, "a sign-in answer works twice")
		status, body := newVisitor(t, s.api).answer(http.Get(kim.last.String()))
		require.Equal(t, http.StatusBadRequest, status, body)

		// The provider changes its signing key, and then its clock differs. A user who has signed in stays signed in: a
		// session does not depend on the ID token.
		provider.command("rotate")
		require.Equal(t, http.StatusOK,
			func() int { status, _ := kim.answer(kim.Get(s.api + "/api/whoami")); return status }())
		require.Eventually(t, func() bool {
			status, _ := kim.answer(kim.Get(s.api + "/sign-in/oidc?to=/api/whoami"))
			return status == http.StatusOK
		}, 5*time.Minute, time.Second)
		provider.command("clock 45")
		signIn()
		provider.command("clock 0")

		status, _ = kim.answer(kim.PostForm(s.api+"/sign-out", nil))
		require.Equal(t, http.StatusOK, status, "the page to sign in")
		status, _ = kim.answer(kim.Get(s.api + "/api/whoami"))
		require.Equal(t, http.StatusUnauthorized, status)
		require.NotContains(t, s.log.String(), "eyJ")
	}
}
