package access_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/access/accesstest"
)

// signIn is an Authenticator with a clock that the test controls, and with the Authenticator's log.
type signIn struct {
	*access.Authenticator

	later atomic.Int64 // offset of the clock from the start, in nanoseconds
	rules access.Rules
	log   *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newSignIn(issuer string) *signIn {
	start := time.Now()
	s := &signIn{log: &lockedBuffer{}, rules: access.Rules{
		Ways: []string{access.ViaOIDC},
		OIDC: access.OIDC{
			Issuer: issuer, ClientID: accesstest.ClientID,
			Audiences: []string{accesstest.ClientID, "dlqd-api"}, GroupsClaim: "groups",
		},
		Grants: []access.UserGrant{
			{Grant: access.Grant{Role: access.Operator, Queues: []string{"payments*"}}, Groups: []string{"ops"}},
			{Grant: access.Grant{Role: access.Reader}, Users: []string{"kim@example.com"}},
			{Grant: access.Grant{Role: access.Admin}, OSUsers: []string{"kim@example.com"}},
		},
	}}
	s.Authenticator = &access.Authenticator{
		Rules: func() access.Rules { return s.rules }, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
		Now: func() time.Time { return start.Add(time.Duration(s.later.Load())) },
	}
	return s
}

// from authenticates a request that comes from an address and has a token.
func (s *signIn) from(t *testing.T, address, token string) (*access.Principal, error) {
	t.Helper()
	request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api/whoami", nil)
	request.RemoteAddr = address + ":1"
	request.Header.Set("Authorization", "Bearer "+token)
	return s.Authenticate(request)
}

func TestOIDC_MapsClaimsToNameAndGrants(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := newSignIn(issuer.URL)
	authenticate := func(claims map[string]any) *access.Principal {
		t.Helper()
		p, err := s.from(t, "10.0.0.1", issuer.Token(claims))
		require.NoError(t, err, s.log.String())
		return p
	}
	operator, ops := access.Grant{Role: access.Operator, Queues: []string{"payments*"}}, []string{"ops"}
	require.Equal(t, &access.Principal{
		Name: "kim@example.com", Via: "oidc", Grants: []access.Grant{operator, {Role: access.Reader}}, Groups: ops,
	}, authenticate(nil))
	require.Equal(t, &access.Principal{Name: "u-1", Via: "oidc", Grants: []access.Grant{operator}, Groups: ops},
		authenticate(map[string]any{"email_verified": false}), "an unverified email is ignored")
	require.Equal(t, &access.Principal{Name: "u-1", Via: "oidc"},
		authenticate(map[string]any{"email": nil, "groups": nil}))
	require.Equal(t, []access.Grant{operator}, authenticate(map[string]any{"email": nil, "groups": "ops"}).Grants,
		"one group, as text")
	require.Equal(t, "kim@example.com", authenticate(map[string]any{"email_verified": "true"}).Name,
		"as some providers write it")
	require.Equal(t, "kim@example.com", authenticate(map[string]any{"aud": []string{"another", "dlqd-api"}}).Name)

	s.rules.OIDC.UsernameClaim, s.rules.OIDC.GroupsClaim = "preferred_username", "https://example.com/teams"
	require.Equal(t, &access.Principal{Name: "kim", Via: "oidc", Grants: []access.Grant{operator}, Groups: ops},
		authenticate(map[string]any{
			"preferred_username": "kim", "groups": nil, "https://example.com/teams": []any{1, "ops"},
		}))
	_, err := s.from(t, "10.0.0.1", issuer.Token(nil))
	require.ErrorIs(t, err, access.ErrRefused, "only the configured claim counts")
	s.rules.OIDC.UsernameClaim = "email"
	_, err = s.from(t, "10.0.0.1", issuer.Token(map[string]any{"email_verified": nil}))
	require.ErrorIs(t, err, access.ErrRefused)
}

// Only the log has the reason for a refusal. It contains no part of the token.
func TestOIDC_RejectsInvalidTokens(t *testing.T) {
	t.Parallel()
	issuer, other := accesstest.New(t), accesstest.New(t)
	key, kid := issuer.Key()
	header := map[jose.HeaderKey]any{"kid": kid}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	require.NoError(t, err)
	asPEM := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})
	stranger, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	good := issuer.Token(nil)
	parts := strings.Split(good, ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"` + kid + `"}`))
	ago := func(d time.Duration) int64 { return time.Now().Add(-d).Unix() }

	for name, test := range map[string]struct{ token, want string }{
		"audience":                {issuer.Token(map[string]any{"aud": "another"}), "is for the audience"},
		"no audience":             {issuer.Token(map[string]any{"aud": nil}), "is for the audience"},
		"issuer":                  {issuer.Token(map[string]any{"iss": other.URL}), "issued by a different provider"},
		"issuer with a slash":     {issuer.Token(map[string]any{"iss": issuer.URL + "/"}), "issued by a different provider"},
		"key of another issuer":   {other.Token(map[string]any{"iss": issuer.URL}), "no key of the provider"},
		"another key with its id": {issuer.Sign(jose.RS256, stranger, header, nil), "no key of the provider"},
		"a key in the token": {issuer.Sign(jose.RS256, stranger,
			map[jose.HeaderKey]any{"jwk": jose.JSONWebKey{Key: &stranger.PublicKey}}, nil), "no key of the provider"},
		"expired":                 {issuer.Token(map[string]any{"exp": ago(2 * time.Minute)}), "token is expired"},
		"no expiry":               {issuer.Token(map[string]any{"exp": nil}), "token is expired"},
		"not valid yet":           {issuer.Token(map[string]any{"nbf": ago(-10 * time.Minute)}), "before the nbf"},
		"algorithm none":          {none + "." + parts[1] + ".", "unexpected signature algorithm"},
		"none, with signature":    {none + "." + parts[1] + "." + parts[2], "unexpected signature algorithm"},
		"HS256, public as PEM":    {issuer.Sign(jose.HS256, asPEM, header, nil), "unexpected signature algorithm"},
		"HS256, public as DER":    {issuer.Sign(jose.HS256, public, header, nil), "unexpected signature algorithm"},
		"ES256, id of an RSA key": {issuer.Sign(jose.ES256, curve, header, nil), "no key of the provider"},
		"changed": {parts[0] + "." + base64.RawURLEncoding.EncodeToString(
			[]byte(`{"iss":"`+issuer.URL+`","aud":"dlqd","exp":9999999999,"email":"root@example.com","email_verified":true}`)) +
			"." + parts[2], "no key of the provider"},
		"no signature": {parts[0] + "." + parts[1] + ".", "no key of the provider"},
		"logout event": {
			issuer.Token(
				map[string]any{"events": map[string]any{"http://schemas.openid.net/event/backchannel-logout": map[string]any{}}}),
			"but a security event",
		},
		"typ of a logout": {issuer.Sign(jose.RS256, key,
			map[jose.HeaderKey]any{"kid": kid, jose.HeaderType: "logout+jwt"}, nil), "neither an ID token"},
		"invalid JSON": {parts[0] + ".e30x." + parts[2], "no key of the provider"},
		"dots":         {"..", "malformed"},
		"no subject": {
			issuer.Token(map[string]any{"sub": nil, "email": nil}),
			"claim sub: a name must have 1 to 255",
		},
		"blank": {
			issuer.Token(map[string]any{"sub": " ", "email": nil}),
			"claim sub: a name must have 1 to 255",
		},
		"terminal escape": {
			issuer.Token(map[string]any{"sub": "a\x1b[31m", "email": nil}),
			"characters that cannot be printed",
		},
		"reserved name": {
			issuer.Token(map[string]any{"sub": "worker:x", "email": nil}),
			"the name worker:x is reserved",
		},
		"looks like an email": {
			issuer.Token(map[string]any{"sub": "kim@example.com", "email_verified": false}),
			"looks like an email",
		},
		"too long":        {issuer.Token(map[string]any{"more": strings.Repeat("x", 40_000)}), "is longer than"},
		"a token of dlqd": {"dlqd_000000000000000000000000000000abcdef", "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSignIn(issuer.URL)
			p, err := s.from(t, "10.0.0.1", test.token)
			require.ErrorIs(t, err, access.ErrRefused)
			require.Equal(t, "the token is not valid", err.Error(), "the response does not contain the reason")
			require.Nil(t, p)
			log := s.log.String()
			require.Contains(t, log, test.want)
			for part := range strings.SplitSeq(test.token, ".") {
				if len(part) > 8 {
					require.NotContains(t, log, part, "the log contains no part of the token")
				}
			}
			_, err = s.from(t, "10.0.0.1", good)
			require.NoError(t, err)
		})
	}
}

// The provider's clock may differ by one minute, but not by more.
func TestOIDC_ToleratesOneMinuteOfClockSkew(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := newSignIn(issuer.URL)
	token := issuer.Token(map[string]any{
		"exp": time.Now().Add(time.Hour).Unix(), "nbf": time.Now().Add(time.Minute).Unix(),
		"iat": time.Now().Add(time.Minute).Unix(),
	})
	_, err := s.from(t, "10.0.0.1", token)
	require.NoError(t, err, "from a clock that is ahead")
	s.later.Store(int64(time.Hour + 30*time.Second))
	_, err = s.from(t, "10.0.0.1", token)
	require.NoError(t, err, "expired by the local clock, but within the tolerance")
	s.later.Store(int64(time.Hour + 90*time.Second))
	_, err = s.from(t, "10.0.0.1", token)
	require.ErrorIs(t, err, access.ErrRefused)
}

// A new key is accepted at the first token that it signed. A withdrawn key is refused after a few minutes.
func TestOIDC_FollowsKeyRotation(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	s := newSignIn(issuer.URL)
	before := issuer.Token(nil)
	_, err := s.from(t, "10.0.0.1", before)
	require.NoError(t, err)
	issuer.Rotate()
	after := issuer.Token(nil)
	_, err = s.from(t, "10.0.0.1", before)
	require.NoError(t, err, "the keys were not fetched since the withdrawal")
	s.later.Store(int64(10 * time.Second))
	_, err = s.from(t, "10.0.0.1", after)
	require.NoError(t, err)
	_, err = s.from(t, "10.0.0.1", before)
	require.ErrorIs(t, err, access.ErrRefused)
	require.Equal(t, 2, issuer.Fetched())

	// The provider replaces its key, but no token with the new key arrives.
	issuer.Rotate()
	s.later.Store(int64(20 * time.Minute))
	require.Eventually(t, func() bool {
		_, err := s.from(t, "10.0.0.1", after)
		return err != nil
	}, 5*time.Minute, 50*time.Millisecond)
}

// Many tokens with unknown keys cause only few requests to the provider.
func TestOIDC_BoundsKeyRequests(t *testing.T) {
	t.Parallel()
	issuer, other := accesstest.New(t), accesstest.New(t)
	s := newSignIn(issuer.URL)
	_, err := s.from(t, "10.0.0.1", issuer.Token(nil))
	require.NoError(t, err)
	s.later.Store(int64(10 * time.Second))
	var all sync.WaitGroup
	stranger, _ := other.Key()
	for range 50 {
		bogus := issuer.Sign(jose.RS256, stranger, map[jose.HeaderKey]any{"kid": rand.Text()}, nil)
		all.Go(func() { _, _ = s.from(t, "10.0.0.2", bogus) })
		all.Go(func() { _, _ = s.from(t, "10.0.0.3", bogus) })
	}
	all.Wait()
	require.Equal(t, 2, issuer.Fetched())
	require.LessOrEqual(t, strings.Count(s.log.String(), "rejected"), 40, "rejected tokens do not fill the log")

	// Further invalid tokens from an address are answered with a time to wait, but a valid token from that address is
	// accepted.
	_, err = s.from(t, "10.0.0.2", other.Token(nil))
	var retry *access.RetryError
	require.ErrorAs(t, err, &retry)
	_, err = s.from(t, "10.0.0.2", issuer.Token(nil))
	require.NoError(t, err)
}

func TestOIDC_UsesCachedKeysWhileProviderIsDown(t *testing.T) {
	t.Parallel()
	issuer := accesstest.New(t)
	issuer.Down(true)
	s := newSignIn(issuer.URL)
	token := issuer.Token(nil)
	for range 100 { // more requests than an address may fail
		_, err := s.from(t, "10.0.0.1", token)
		require.ErrorIs(t, err, access.ErrProvider)
		require.False(t, access.IsRefusal(err))
	}
	require.Equal(t, 1, strings.Count(s.log.String(), "does not answer"), "the failure is logged once")
	issuer.Down(false)
	s.later.Store(int64(10 * time.Second))
	_, err := s.from(t, "10.0.0.1", token)
	require.NoError(t, err)
	require.Contains(t, s.log.String(), "answers again")

	// The provider is down again. Tokens are accepted until the cached keys are too old.
	issuer.Down(true)
	s.later.Store(int64(30 * time.Minute))
	_, err = s.from(t, "10.0.0.1", issuer.Token(map[string]any{"exp": time.Now().Add(3 * time.Hour).Unix()}))
	require.NoError(t, err)
	s.later.Store(int64(2 * time.Hour))
	_, err = s.from(t, "10.0.0.1", issuer.Token(map[string]any{"exp": time.Now().Add(3 * time.Hour).Unix()}))
	require.ErrorIs(t, err, access.ErrProvider)
}

// The metadata at the issuer's URL must name that issuer, and a URL of its keys with https or on this machine.
func TestOIDC_RejectsFalseProvider(t *testing.T) {
	t.Parallel()
	real := accesstest.New(t)
	for name, body := range map[string]string{
		"another issuer": `{"issuer": "https://another.example", "jwks_uri": "` + real.URL + `/keys"}`,
		"keys in clear":  `{"issuer": "ISSUER", "jwks_uri": "http://keys.example/keys"}`,
		"no keys":        `{"issuer": "ISSUER"}`,
		"nothing":        `<html>`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var url string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte(strings.ReplaceAll(body, "ISSUER", url)))
			}))
			defer server.Close()
			url = server.URL
			_, err := newSignIn(url).from(t, "10.0.0.1", real.Token(map[string]any{"iss": url}))
			require.ErrorIs(t, err, access.ErrProvider)
		})
	}
	moved := httptest.NewServer(http.RedirectHandler(real.URL+"/.well-known/openid-configuration", http.StatusFound))
	defer moved.Close()
	_, err := newSignIn(moved.URL).from(t, "10.0.0.1", real.Token(nil))
	require.ErrorIs(t, err, access.ErrProvider)
}

func TestCheckProviderURL(t *testing.T) {
	t.Parallel()
	for _, good := range []string{
		"https://login.example.com", "https://login.example.com/realms/a",
		"http://127.0.0.1:8080", "http://localhost:5556/dex", "http://[::1]:1",
	} {
		require.NoError(t, access.CheckProviderURL(good))
	}
	for _, bad := range []string{
		"", "login.example.com", "http://login.example.com", "http://127.0.0.1.example.com",
		"https://user:secret@login.example.com", "file:///etc", "https://a#b",
	} {
		require.Error(t, access.CheckProviderURL(bad), bad)
	}
}
