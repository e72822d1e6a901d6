// Package accesstest provides an OpenID Connect provider for tests: real HTTP, real signatures, and
// a user who always consents.
package accesstest

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/require"
)

// ClientID is the id of the only client of an issuer.
const ClientID = "dlqd"

// Issuer is an OpenID Connect provider.
type Issuer struct {
	URL string

	tb       testing.TB
	mu       sync.Mutex
	key      *rsa.PrivateKey
	kid      string
	down     bool
	fetched  int // number of requests for the issuer's keys
	user     map[string]any
	lifetime time.Duration
	nonce    string                   // sent in place of the nonce in the request; "" for the nonce in the request
	codes    map[string]authorization // by code
	refresh  map[string]string        // the keys are the valid tokens; all values are ""
	secret   string                   // the client's secret; empty: a public client
	pending  int                      // number of polls with a device code before the user consents
}

type authorization struct{ nonce, challenge, redirect string }

// New starts an issuer.
func New(tb testing.TB) *Issuer {
	tb.Helper()
	i := &Issuer{
		tb: tb, lifetime: time.Hour, codes: map[string]authorization{}, refresh: map[string]string{}, pending: 1,
		user: map[string]any{"sub": "u-1", "email": "kim@example.com", "email_verified": true, "groups": []string{"ops"}},
	}
	i.Rotate()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]any{
			"issuer": i.URL, "jwks_uri": i.URL + "/keys",
			"authorization_endpoint": i.URL + "/authorize", "token_endpoint": i.URL + "/token",
			"device_authorization_endpoint": i.URL + "/device", "revocation_endpoint": i.URL + "/revoke",
			"id_token_signing_alg_values_supported": []string{"RS256"},
		})
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) {
		i.fetched++
		answer(w, http.StatusOK, jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{
			Key:   &i.key.PublicKey,
			KeyID: i.kid, Use: "sig",
		}}})
	})
	mux.HandleFunc("GET /authorize", i.authorize)
	mux.HandleFunc("POST /token", i.token)
	mux.HandleFunc("POST /device", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]any{
			"device_code": "device", "user_code": "ABCD-EFGH",
			"verification_uri": i.URL + "/activate", "expires_in": 60, "interval": 1,
		})
	})
	mux.HandleFunc("POST /revoke",
		func(_ http.ResponseWriter, r *http.Request) { delete(i.refresh, r.PostFormValue("token")) })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.mu.Lock()
		defer i.mu.Unlock()
		if i.down {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	tb.Cleanup(server.Close)
	i.URL = server.URL
	return i
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) //nolint:errchkjson // tests see what is missing
}

// locked calls change while the issuer serves no request.
func (i *Issuer) locked(change func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	change()
}

// Rotate replaces the signing key. The issuer no longer publishes the old key.
func (i *Issuer) Rotate() {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(i.tb, err)
	i.locked(func() { i.key, i.kid = key, rand.Text() })
}

// Down makes the issuer fail all requests, or answer them again.
func (i *Issuer) Down(down bool) { i.locked(func() { i.down = down }) }

// SetLifetime sets how long ID tokens issued from now on are valid.
func (i *Issuer) SetLifetime(lifetime time.Duration) { i.locked(func() { i.lifetime = lifetime }) }

// Nonce sets the nonce of ID tokens that are issued for a code; "" means the nonce in the request.
func (i *Issuer) Nonce(nonce string) { i.locked(func() { i.nonce = nonce }) }

// Secret sets the secret that the client must send to get tokens; "" for a public client.
func (i *Issuer) Secret(secret string) { i.locked(func() { i.secret = secret }) }

// Fetched returns the number of requests for the keys.
func (i *Issuer) Fetched() (n int) {
	i.locked(func() { n = i.fetched })
	return n
}

// Sessions returns the number of sign-ins that can be renewed.
func (i *Issuer) Sessions() (n int) {
	i.locked(func() { n = len(i.refresh) })
	return n
}

// EndSessions revokes all refresh tokens.
func (i *Issuer) EndSessions() { i.locked(func() { clear(i.refresh) }) }

// Key returns the current signing key and its id.
func (i *Issuer) Key() (key *rsa.PrivateKey, kid string) {
	i.locked(func() { key, kid = i.key, i.kid })
	return key, kid
}

// Token returns an ID token of the user in which the given claims replace others; a nil claim is removed.
func (i *Issuer) Token(claims map[string]any) string {
	key, kid := i.Key()
	return i.Sign(jose.RS256, key, map[jose.HeaderKey]any{"kid": kid, jose.HeaderType: "JWT"}, claims)
}

// Sign returns a token with the same claims as [Issuer.Token], but with the given signature and header.
func (i *Issuer) Sign(algorithm jose.SignatureAlgorithm, key any, header map[jose.HeaderKey]any,
	claims map[string]any,
) string {
	all := maps.Clone(i.user)
	maps.Copy(all, map[string]any{
		"iss": i.URL, "aud": ClientID, "iat": time.Now().Unix(), "exp": time.Now().Add(i.lifetime).Unix(),
	})
	maps.Copy(all, claims)
	maps.DeleteFunc(all, func(_ string, value any) bool { return value == nil })
	raw, err := json.Marshal(all)
	require.NoError(i.tb, err)
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: algorithm, Key: key},
		&jose.SignerOptions{ExtraHeaders: header})
	require.NoError(i.tb, err)
	signed, err := signer.Sign(raw)
	require.NoError(i.tb, err)
	token, err := signed.CompactSerialize()
	require.NoError(i.tb, err)
	return token
}

func (i *Issuer) authorize(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	back, err := url.Parse(q.Get("redirect_uri"))
	if err != nil || q.Get("client_id") != ClientID || q.Get("response_type") != "code" ||
		q.Get("code_challenge_method") != "S256" || q.Get("state") == "" || q.Get("nonce") == "" {
		answer(w, http.StatusBadRequest, map[string]any{"error": "invalid_request"})
		return
	}
	code := rand.Text()
	i.codes[code] = authorization{
		nonce: q.Get("nonce"), challenge: q.Get("code_challenge"), redirect: q.Get("redirect_uri"),
	}
	back.RawQuery = url.Values{"code": {code}, "state": {q.Get("state")}, "iss": {i.URL}}.Encode()
	http.Redirect(w, r, back.String(), http.StatusFound) //nolint:gosec // to the test that asks
}

func (i *Issuer) token(w http.ResponseWriter, r *http.Request) {
	claims := map[string]any{}
	if i.secret != "" {
		id, secret, _ := r.BasicAuth()
		if secret, err := url.QueryUnescape(secret); err != nil || id != ClientID || secret != i.secret {
			answer(w, http.StatusUnauthorized, map[string]any{"error": "invalid_client"})
			return
		}
	}
	switch r.PostFormValue("grant_type") {
	case "authorization_code":
		code := r.PostFormValue("code")
		authorization, ok := i.codes[code]
		delete(i.codes, code)
		sum := sha256.Sum256([]byte(r.PostFormValue("code_verifier")))
		if !ok || base64.RawURLEncoding.EncodeToString(sum[:]) != authorization.challenge ||
			r.PostFormValue("redirect_uri") != authorization.redirect {
			answer(w, http.StatusBadRequest, map[string]any{"error": "invalid_grant"})
			return
		}
		claims["nonce"] = authorization.nonce
		if i.nonce != "" {
			claims["nonce"] = i.nonce
		}
	case "refresh_token":
		token := r.PostFormValue("refresh_token")
		if _, ok := i.refresh[token]; !ok {
			answer(w, http.StatusBadRequest, map[string]any{"error": "invalid_grant"})
			return
		}
		delete(i.refresh, token) // each refresh token is valid only once
	case "urn:ietf:params:oauth:grant-type:device_code":
		if i.pending--; i.pending >= 0 {
			answer(w, http.StatusBadRequest, map[string]any{"error": "authorization_pending"})
			return
		}
	default:
		answer(w, http.StatusBadRequest, map[string]any{"error": "unsupported_grant_type"})
		return
	}
	refresh := rand.Text()
	i.refresh[refresh] = ""
	answer(w, http.StatusOK, map[string]any{
		"token_type": "Bearer", "access_token": rand.Text(),
		"refresh_token": refresh, "expires_in": int(i.lifetime.Seconds()),
		"id_token": i.Sign(jose.RS256, i.key, map[jose.HeaderKey]any{"kid": i.kid, jose.HeaderType: "JWT"}, claims),
	})
}
