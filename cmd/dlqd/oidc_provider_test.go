package main_test

import (
	"bufio"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/require"
)

// realProvider is npm's certified oidc-provider, running as a process on loopback.
type realProvider struct {
	*testing.T

	issuer string
	in     io.Writer
	out    *bufio.Scanner
}

func newRealProvider(t *testing.T, installed string) *realProvider {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "node", "testdata/oidc-provider.mjs", installed)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	p := &realProvider{T: t, in: in, out: bufio.NewScanner(out)}
	p.issuer = p.line()
	require.Contains(t, p.issuer, "http://127.0.0.1:")
	return p
}

func (p *realProvider) line() string {
	p.Helper()
	require.True(p, p.out.Scan(), "the provider has ended")
	return p.out.Text()
}

// command sends the provider one of the commands that testdata/oidc-provider.mjs reads from standard input.
func (p *realProvider) command(command string) {
	p.Helper()
	_, err := fmt.Fprintln(p.in, command)
	require.NoError(p, err)
	require.Equal(p, "done", p.line())
}

// keys returns the provider's signing keys.
func (p *realProvider) keys() jose.JSONWebKeySet {
	p.Helper()
	response, err := http.Get(p.issuer + "/jwks")
	require.NoError(p, err)
	defer response.Body.Close()
	var keys jose.JSONWebKeySet
	require.NoError(p, json.NewDecoder(response.Body).Decode(&keys))
	return keys
}

// renewed gets a new ID token for a signed-in user with the user's refresh token, and returns the ID token.
func (p *realProvider) renewed(kim *person) string {
	p.Helper()
	response, err := http.PostForm(p.issuer+"/token", url.Values{
		"grant_type": {"refresh_token"}, "client_id": {"dlqd"}, "refresh_token": {kim.loginFile()["refreshToken"].(string)},
	})
	require.NoError(p, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(p, err)
	var tokens struct {
		IDToken string `json:"id_token"`
	}
	require.NoError(p, json.Unmarshal(raw, &tokens))
	require.NotEmpty(p, tokens.IDToken, "%s", raw)
	return tokens.IDToken
}

// loginFile returns the content of the file that "dlqd login" writes.
func (p *person) loginFile() (out map[string]any) {
	p.Helper()
	raw, err := os.ReadFile(p.file())
	require.NoError(p, err)
	require.NoError(p, json.Unmarshal(raw, &out))
	return out
}

// browse opens an address in a browser that keeps cookies.
func (p *person) browse(address string) {
	p.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(p, err)
	response, err := (&http.Client{Jar: jar}).Get(address)
	require.NoError(p, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(p, err)
	require.Contains(p, string(raw), "Return to your terminal")
}

// status returns the HTTP status with which the API answers a request that has the token.
func status(t *testing.T, api, token string) int {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, api+"/api/whoami", nil)
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode
}

// TestLogin_RealProvider signs in at npm's oidc-provider. DLQD_TEST_OIDC_PROVIDER is the directory where npm has
// installed the provider (npm install --prefix DIR oidc-provider); .ci/run sets the variable. Without the variable,
// sign-in is only tested with accesstest's provider, by the other tests here and the tests TestOIDC_… of
// internal/access.
func TestLogin_RealProvider(t *testing.T) {
	t.Parallel()
	installed := os.Getenv("DLQD_TEST_OIDC_PROVIDER")
	if installed == "" {
		t.Skip("DLQD_TEST_OIDC_PROVIDER is not set")
	}
	provider := newRealProvider(t, installed)
	s := serveOIDC(t, provider.issuer)
	kim := newPerson(t, s.api)
	signIn := func() {
		t.Helper()
		out, failed := kim.login(kim.browse)
		require.False(t, failed, out)
		require.Contains(t, out, "kim@example.com (by oidc)\nreader everywhere\noperator queue payments*\n")
	}
	signIn()
	good := kim.loginFile()["idToken"].(string)
	require.Equal(t, http.StatusOK, status(t, s.api, good))

	// dlqd rejects a token with a wrong audience, issuer or algorithm.
	another := serveAccess(t, `authentication: [oidc]
oidc: {issuer: "`+provider.issuer+`", clientID: another}
`)
	require.Equal(t, http.StatusUnauthorized, status(t, another.api, good), "the token is for another client")
	other := newRealProvider(t, installed)
	require.Equal(t, http.StatusUnauthorized, status(t, serveOIDC(t, other.issuer).api, good),
		"the token is from another provider")
	key := provider.keys().Keys[0]
	public, err := x509.MarshalPKIXPublicKey(key.Key)
	require.NoError(t, err)
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(good, ".")[1])
	require.NoError(t, err)
	for _, shared := range [][]byte{public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})} {
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: shared},
			(&jose.SignerOptions{}).WithHeader("kid", key.KeyID))
		require.NoError(t, err)
		signed, err := signer.Sign(payload)
		require.NoError(t, err)
		forged, err := signed.CompactSerialize()
		require.NoError(t, err)
		require.Equal(t, http.StatusUnauthorized, status(t, s.api, forged))
	}
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"` + key.KeyID + `"}`))
	require.Equal(t, http.StatusUnauthorized, status(t, s.api, none+"."+strings.Split(good, ".")[1]+"."))

	// dlqd accepts a token signed with a new key. It does not fetch keys again within five seconds.
	provider.command("rotate")
	renewed := provider.renewed(kim)
	require.NotEqual(t, key.KeyID, provider.keys().Keys[0].KeyID)
	require.Eventually(t, func() bool { return status(t, s.api, renewed) == http.StatusOK }, time.Minute,
		500*time.Millisecond)
	require.Equal(t, http.StatusUnauthorized, status(t, s.api, good), "the key that signed it is withdrawn")

	// Clocks may differ by up to a minute. An ID token lives for two minutes. A token from a provider whose clock is 150
	// s behind expired 30 s ago, and dlqd accepts it. With a life of one minute, the token expired 90 s ago, and dlqd
	// rejects it.
	for _, ahead := range []int{45, -150} {
		provider.command(fmt.Sprintf("clock %d", ahead))
		signIn()
		require.Contains(t, kim.ok("whoami"), "kim@example.com")
	}
	provider.command("life 60")
	require.Equal(t, http.StatusUnauthorized, status(t, s.api, provider.renewed(kim)))
	out, failed := kim.login(kim.browse)
	require.True(t, failed)
	require.Contains(t, out, "token is expired")

	provider.command("clock 0")
	provider.command("life 120")
	signIn()
	kept := kim.loginFile()
	require.Contains(t, kim.ok("logout"), "signed out")
	response, err := http.PostForm(provider.issuer+"/token",
		url.Values{"grant_type": {"refresh_token"}, "client_id": {"dlqd"}, "refresh_token": {kept["refreshToken"].(string)}})
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusBadRequest, response.StatusCode, "the refresh token is revoked")
	require.NotContains(t, s.log.String(), "eyJ")
}
