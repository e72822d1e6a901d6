package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"
	"golang.org/x/oauth2"

	"github.com/dlqd/dlqd/internal/door"
)

// OIDC is an OpenID Connect provider that authenticates users.
type OIDC struct {
	Issuer        string
	ClientID      string   // client of "dlqd login" and of sessions
	Audiences     []string // a token is accepted if it has one of these audiences
	UsernameClaim string   // empty: the email if the provider has verified it, else the subject
	GroupsClaim   string
	Scopes        []string // requested at sign-in
	ClientSecret  string   // for sessions; empty: a public client
}

// ErrProvider means that dlqd cannot verify a token or sign a user in now: the provider does not answer, and the
// provider's keys or endpoints are not cached.
var ErrProvider = errors.New("the OpenID Connect provider does not answer")

const (
	// clockSkew is how long after its expiry a token is still accepted, because the provider's clock may differ. A token
	// that is not valid yet is accepted if it becomes valid within go-oidc's five minutes less clockSkew.
	clockSkew = time.Minute
	// refreshKeysAfter is the age from which keys are fetched again in the background, while requests still use the old
	// ones. A withdrawn key is refused once that fetch has succeeded.
	refreshKeysAfter = 5 * time.Minute
	// maxKeysAge is how long keys are used if the provider does not answer.
	maxKeysAge = time.Hour
	// providerInterval is the minimum time between two fetches of the provider's metadata and keys, even if many tokens
	// name an unknown key.
	providerInterval = 5 * time.Second
	// providerTimeout limits a request to the provider. providerWait limits how long a caller's request waits for that
	// request.
	providerTimeout = 10 * time.Second
	providerWait    = 2 * time.Second
	// maxJWT is the maximum size of a token, in bytes. The tokens of users in hundreds of groups have several thousand
	// bytes.
	maxJWT = 32 << 10
	// maxKeysBytes is the maximum size of the provider's key set, in bytes.
	maxKeysBytes = 1 << 20
)

// algorithms are the accepted signature algorithms. All of them sign with a private key. With "none", any caller could
// make a token. With a shared secret (HS256), any caller who knows the provider's public key could sign a token.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.ES256, jose.ES384, jose.ES512, jose.PS256, jose.PS384, jose.PS512, jose.EdDSA,
}

// Algorithms returns the names of the accepted signature algorithms, as go-oidc expects them.
func Algorithms() []string {
	names := make([]string, len(algorithms))
	for i, a := range algorithms {
		names[i] = string(a)
	}
	return names
}

// CheckProviderURL returns an error unless the URL has the scheme https, or http and a host on this machine, and has no
// user and no fragment. With http to another host, any machine on the network could answer in place of the provider.
func CheckProviderURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.User != nil || u.Fragment != "" {
		return fmt.Errorf("invalid URL %q of an OpenID Connect provider", text)
	}
	if u.Scheme == "https" || u.Scheme == "http" && IsLoopback(u.Hostname()) {
		return nil
	}
	return fmt.Errorf("%q must be https, or http on this machine (127.0.0.1)", text)
}

// IsLoopback reports whether the host of a URL is localhost or a loopback address.
func IsLoopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && address.IsLoopback()
}

// ProviderClient returns the HTTP client for providers. It follows no redirects: a provider's endpoints are the URLs in
// its metadata.
func ProviderClient() *http.Client {
	return &http.Client{
		Timeout:       providerTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// isJWT reports whether a bearer token has the form of a JWT: three parts between dots. Tokens of dlqd have no dots.
func isJWT(secret string) bool { return strings.Count(secret, ".") == 2 }

// provider caches the keys and endpoints of an OpenID Connect provider. A request waits for the provider only if it
// needs keys or endpoints that are not cached.
type provider struct {
	issuer string
	now    func() time.Time
	logger *slog.Logger

	mu           sync.Mutex
	keys         []jose.JSONWebKey
	endpoints    endpoints
	fetchedAt    time.Time     // when keys were fetched
	requestedAt  time.Time     // when the last request to the provider began
	refreshing   chan struct{} // closed when the current request ends; nil without one
	err          error         // the error of the last request; nil if the request succeeded
	failingSince time.Time     // when the first failed request since the last success ended
}

// refresh starts a request for the provider's keys and endpoints, unless one is running or began less than
// providerInterval ago. The returned channel is closed once no request is running.
func (p *provider) refresh() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refreshing != nil {
		return p.refreshing
	}
	done := make(chan struct{})
	if !p.requestedAt.IsZero() && p.now().Sub(p.requestedAt) < providerInterval {
		close(done)
		return done
	}
	p.requestedAt, p.refreshing = p.now(), done
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), providerTimeout)
		defer cancel()
		keys, endpoints, err := discover(ctx, p.issuer)
		p.mu.Lock()
		defer p.mu.Unlock()
		switch {
		case err == nil:
			p.keys, p.endpoints, p.fetchedAt = keys, endpoints, p.now()
			if p.err != nil {
				p.logger.Info("the OpenID Connect provider answers again", "issuer", p.issuer)
			}
		case p.err == nil:
			p.failingSince = p.now()
			p.logger.Warn("the OpenID Connect provider does not answer: new sign-ins fail",
				"issuer", p.issuer, "error", truncated(err))
		}
		p.err, p.refreshing = err, nil
	}()
	return done
}

// wait waits until answered is closed or ctx is done, for at most providerWait.
func wait(ctx context.Context, answered <-chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, providerWait)
	defer cancel()
	select {
	case <-answered:
	case <-ctx.Done():
	}
}

// cachedKeys returns the keys, their age, and the error of the last request. If there are no keys, or they are as old
// as maxKeysAge, it returns nil and maxKeysAge.
func (p *provider) cachedKeys() (keys []jose.JSONWebKey, age time.Duration, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if age = p.now().Sub(p.fetchedAt); p.fetchedAt.IsZero() || age >= maxKeysAge {
		return nil, maxKeysAge, p.err
	}
	return p.keys, age, p.err
}

// endpoints are the provider's endpoints for the sign-in of browsers.
type endpoints struct {
	oauth2.Endpoint

	secretInHeader bool // the client sends its secret as HTTP Basic, not in the form
}

// endpointNow returns the sign-in endpoints, with the way in which a client sends its secret if it has one. It fails
// with ErrProvider if the endpoints are not cached and the provider does not answer, or if the provider has no such
// endpoints.
func (p *provider) endpointNow(ctx context.Context, hasSecret bool) (oauth2.Endpoint, error) {
	if keys, _, _ := p.cachedKeys(); keys == nil {
		wait(ctx, p.refresh())
		if keys, _, err := p.cachedKeys(); keys == nil {
			return oauth2.Endpoint{}, errors.Join(ErrProvider, err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	endpoint := p.endpoints.Endpoint
	if endpoint.AuthURL == "" || endpoint.TokenURL == "" {
		return endpoint, errors.Join(ErrProvider,
			errors.New("its metadata has no authorization_endpoint or no token_endpoint"))
	}
	endpoint.AuthStyle = oauth2.AuthStyleInParams
	if hasSecret && p.endpoints.secretInHeader {
		endpoint.AuthStyle = oauth2.AuthStyleInHeader
	}
	return endpoint, nil
}

// discover fetches a provider's signing keys and its sign-in endpoints. It skips keys that it cannot use, and fails if
// none is left or if an address is not one that CheckProviderURL accepts.
func discover(ctx context.Context, issuer string) (keys []jose.JSONWebKey, found endpoints, err error) {
	client := ProviderClient()
	discovered, err := oidc.NewProvider(oidc.ClientContext(ctx, client), issuer)
	if err != nil {
		return nil, found, err
	}
	var metadata struct {
		JWKS        string   `json:"jwks_uri"`
		AuthMethods []string `json:"token_endpoint_auth_methods_supported"`
	}
	if err := discovered.Claims(&metadata); err != nil {
		return nil, found, err
	}
	found.Endpoint, found.secretInHeader = discovered.Endpoint(), metadata.AuthMethods == nil ||
		slices.Contains(metadata.AuthMethods, "client_secret_basic")
	for name, address := range map[string]string{
		"jwks_uri": metadata.JWKS, "authorization_endpoint": found.AuthURL, "token_endpoint": found.TokenURL,
	} {
		if err := CheckProviderURL(address); err != nil && (address != "" || name == "jwks_uri") {
			return nil, found, fmt.Errorf("%s: %w", name, err)
		}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, metadata.JWKS, nil)
	if err != nil {
		return nil, found, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, found, err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return nil, found, fmt.Errorf("fetching its keys: %s", response.Status)
	}
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxKeysBytes)).Decode(&set); err != nil {
		return nil, found, fmt.Errorf("decoding its keys: %w", err)
	}
	for _, raw := range set.Keys {
		var key jose.JSONWebKey
		// Skip keys of unknown types and keys that are not for signatures.
		if key.UnmarshalJSON(raw) == nil && key.Valid() && key.IsPublic() && (key.Use == "" || key.Use == "sig") {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		return nil, found, errors.New("its key set has no signing key")
	}
	return keys, found, nil
}

var errSignature = errors.New("no key of the provider matches the signature")

// payload returns the content of token if the provider signed it.
func (p *provider) payload(ctx context.Context, token *jose.JSONWebSignature) ([]byte, error) {
	keys, age, _ := p.cachedKeys()
	if keys == nil {
		wait(ctx, p.refresh())
		var err error
		if keys, _, err = p.cachedKeys(); keys == nil {
			return nil, errors.Join(ErrProvider, err)
		}
	} else if age >= refreshKeysAfter {
		p.refresh()
	}
	payload, tried := signed(token, keys)
	if payload != nil {
		return payload, nil
	}
	// The token may be signed with a new key.
	wait(ctx, p.refresh())
	keys, _, err := p.cachedKeys()
	if payload, _ = signed(token, keys); payload != nil {
		return payload, nil
	}
	if err != nil && !tried {
		return nil, errors.Join(ErrProvider, err)
	}
	return nil, errSignature
}

// signed returns the content of token if one of the keys signed it. tried is true if a key has the token's key id (or
// the token has none) and the token's algorithm (or the key names none).
func signed(token *jose.JSONWebSignature, keys []jose.JSONWebKey) (payload []byte, tried bool) {
	header := token.Signatures[0].Protected
	for _, key := range keys {
		if header.KeyID != "" && key.KeyID != header.KeyID || key.Algorithm != "" && key.Algorithm != header.Algorithm {
			continue
		}
		tried = true
		if payload, err := token.Verify(&key); err == nil {
			return payload, true
		}
	}
	return nil, tried
}

// signatures is the key set for go-oidc. It stores the last error, because go-oidc returns only that error's text.
type signatures struct {
	provider *provider
	err      error
}

func (s *signatures) VerifySignature(ctx context.Context, raw string) (payload []byte, err error) {
	defer func() { s.err = err }()
	token, err := jose.ParseSignedCompact(raw, algorithms)
	if err != nil {
		return nil, err
	}
	// If the token has a type (typ), it must be that of an access token or an ID token. A provider also signs other
	// tokens for the same audience, such as logout tokens.
	if kind, ok := token.Signatures[0].Protected.ExtraHeaders[jose.HeaderType]; ok {
		name, _ := kind.(string)
		if name = strings.TrimPrefix(strings.ToLower(name), "application/"); name != "jwt" && name != "at+jwt" {
			return nil, fmt.Errorf("the token is neither an ID token nor an access token, but %.40q", name)
		}
	}
	return s.provider.payload(ctx, token)
}

// userOf returns the holder of a token. It fails with ErrProvider, or with the reason why the token is refused. That
// reason is for the log only.
func (p *provider) userOf(ctx context.Context, rules *Rules, raw string) (*Principal, error) {
	token, claims, err := p.verify(ctx, raw)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(token.Audience, func(a string) bool { return slices.Contains(rules.OIDC.Audiences, a) }) {
		return nil, fmt.Errorf("the token is for the audience %q", token.Audience)
	}
	name, err := rules.OIDC.name(claims)
	if err != nil {
		return nil, err
	}
	return rules.user(name, ViaOIDC, claimStrings(claims[rules.OIDC.GroupsClaim])), nil
}

// verify returns a token of any audience, and the token's claims. It fails as userOf does.
func (p *provider) verify(ctx context.Context, raw string) (*oidc.IDToken, map[string]any, error) {
	if len(raw) > maxJWT {
		return nil, nil, fmt.Errorf("the token is longer than %d bytes", maxJWT)
	}
	keys := &signatures{provider: p}
	token, err := oidc.NewVerifier(p.issuer, keys, &oidc.Config{
		SkipClientIDCheck: true, SupportedSigningAlgs: Algorithms(), Now: func() time.Time { return p.now().Add(-clockSkew) },
	}).Verify(ctx, raw)
	if errors.Is(keys.err, ErrProvider) {
		return nil, nil, keys.err
	}
	if err != nil {
		return nil, nil, err
	}
	claims := map[string]any{}
	if err := token.Claims(&claims); err != nil {
		return nil, nil, err
	}
	if _, event := claims["events"]; event {
		return nil, nil, errors.New("the token is neither an ID token nor an access token, but a security event")
	}
	return token, claims, nil
}

// name returns the user's name from the configured claim or, without one, the verified email, else the subject. It
// fails if the configured claim is email and the email is not verified, if no claim is configured and the subject looks
// like an email, or if the name is invalid.
func (o *OIDC) name(claims map[string]any) (string, error) {
	claim := o.UsernameClaim
	email := claimStrings(claims["email"])
	verified := len(email) == 1 && (claims["email_verified"] == true || claims["email_verified"] == "true")
	switch {
	case claim == "" && verified:
		claim = "email"
	case claim == "":
		claim = "sub"
	case claim == "email" && !verified:
		return "", errors.New("the token has no verified email")
	}
	name, _ := claims[claim].(string)
	name = strings.TrimSpace(name)
	if o.UsernameClaim == "" && claim == "sub" && strings.Contains(name, "@") {
		return "", errors.New("the token has no verified email, and its subject looks like an email " +
			"(oidc.usernameClaim: sub accepts it)")
	}
	if err := checkName(name); err != nil {
		return "", fmt.Errorf("claim %s: %w", claim, err)
	}
	return name, nil
}

// claimStrings returns the strings of a claim, which is a string or an array.
func claimStrings(claim any) []string {
	switch claim := claim.(type) {
	case string:
		return []string{claim}
	case []any:
		var all []string
		for _, one := range claim {
			if text, ok := one.(string); ok {
				all = append(all, text)
			}
		}
		return all
	}
	return nil
}

// truncated returns at most 300 bytes of an error's text, for the log. The text may quote a long answer of another
// system.
func truncated(err error) string {
	text := err.Error()
	return text[:min(len(text), 300)]
}

// authenticateJWT returns the caller of a request that has a token of the provider.
func (a *Authenticator) authenticateJWT(r *http.Request, rules *Rules, raw string) (*Principal, error) {
	p, err := a.providerOf(rules.OIDC.Issuer).userOf(r.Context(), rules, raw)
	if err == nil || errors.Is(err, ErrProvider) {
		return p, err
	}
	refused := a.refuse(door.Peer(r))
	if errors.Is(refused, ErrRefused) {
		a.log().Warn("token of the OpenID Connect provider rejected", "from", door.Peer(r), "why", truncated(err))
	}
	return nil, refused
}

// providerOf returns the cached provider, or a new one if the issuer is another than that of the cached one.
func (a *Authenticator) providerOf(issuer string) *provider {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.provider == nil || a.provider.issuer != issuer {
		a.provider = &provider{issuer: issuer, now: time.Now, logger: a.log()}
		if a.Now != nil {
			a.provider.now = a.Now
		}
	}
	return a.provider
}

// ProviderDown returns the time since which the OpenID Connect provider has not answered, or the zero time if it
// answers. While the provider is down, a call starts another request to the provider, at most one per providerInterval.
func (a *Authenticator) ProviderDown() time.Time {
	rules := a.Rules()
	if !slices.Contains(rules.Ways, ViaOIDC) {
		return time.Time{}
	}
	p := a.providerOf(rules.OIDC.Issuer)
	p.mu.Lock()
	failed, err := p.failingSince, p.err
	p.mu.Unlock()
	if err == nil {
		return time.Time{}
	}
	p.refresh()
	return failed
}

func (a *Authenticator) log() *slog.Logger {
	if a.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return a.Logger
}
