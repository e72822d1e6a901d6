package access

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"github.com/dlqd/dlqd/internal/door"
)

// Paths of sign-in and sign-out. A GET of SignInPath shows the console's page.
const (
	SignInPath   = "/sign-in"
	ProviderPath = "/sign-in/oidc"
	CallbackPath = "/sign-in/callback"
	SignOutPath  = "/sign-out"
)

const (
	// signInTimeout is how long a sign-in at the provider may take.
	signInTimeout = 10 * time.Minute
	// maxSignInBody is the maximum size of the form with a token, in bytes. signInBodyTime limits how long the form may
	// take to arrive.
	maxSignInBody  = 16 << 10
	signInBodyTime = 10 * time.Second
	// maxReturnTo is the maximum length, in bytes, of the address of the page to which a sign-in returns.
	maxReturnTo = 2000
)

// SignIn begins and ends sessions of browsers.
type SignIn struct {
	Access *Authenticator
	// IsOwnHost reports whether the Host of a request is one of dlqd's own names. The provider redirects browsers to that
	// Host.
	IsOwnHost func(*http.Request) bool
	// Failed, if not nil, answers a failed sign-in; nil means an answer with problem details.
	Failed func(w http.ResponseWriter, r *http.Request, status int, why string)
}

// Register adds to mux: POST /sign-in (form: token, to), GET /sign-in/oidc (query: to), GET /sign-in/callback and POST
// /sign-out (form: everywhere). These paths need no authentication. [door.Guard] refuses POSTs from pages of other
// sites.
func (s *SignIn) Register(mux *http.ServeMux) {
	mux.HandleFunc("POST "+SignInPath, s.signInWithToken)
	mux.HandleFunc("GET "+ProviderPath, s.redirectToProvider)
	mux.HandleFunc("GET "+CallbackPath, s.signInWithProvider)
	mux.HandleFunc("POST "+SignOutPath, s.signOut)
}

// SignInWays reports whether a session can begin with a token, and with the OpenID Connect
// provider.
func (a *Authenticator) SignInWays() (token, provider bool) {
	ways := a.Rules().Ways
	return slices.Contains(ways, ViaToken+"s"), slices.Contains(ways, ViaOIDC)
}

// SignInURL returns the URL of the sign-in page. If the request is a GET, the sign-in returns to the requested page.
func SignInURL(r *http.Request) string {
	to := "/"
	if r.Method == http.MethodGet {
		to = ReturnTo(r.URL.RequestURI())
	}
	if to == "/" {
		return SignInPath
	}
	return SignInPath + "?to=" + url.QueryEscape(to)
}

// ReturnTo returns text if it is a path of one of dlqd's pages. It returns "/" for the pages of sign-in and sign-out,
// for a text longer than maxReturnTo, and for any text that could lead to another site.
func ReturnTo(text string) string {
	u, err := url.Parse(text)
	if err != nil || !LocalPath(text) || len(text) > maxReturnTo || strings.HasPrefix(u.Path, SignInPath) ||
		strings.HasPrefix(u.Path, SignOutPath) {
		return "/"
	}
	return text
}

// LocalPath reports whether an address is a path on the same site. //name and /\name are not: browsers take them for
// another site.
func LocalPath(address string) bool {
	u, err := url.Parse(address)
	return err == nil && strings.HasPrefix(address, "/") && !strings.HasPrefix(address, "//") && u.Host == "" &&
		u.Scheme == "" &&
		!strings.ContainsFunc(address, func(c rune) bool {
			return c == '\\' || c > unicode.MaxASCII ||
				!unicode.IsPrint(c)
		}) &&
		!strings.Contains(u.Path, "//") && !strings.Contains(u.Path, "\\")
}

// answerFailure answers that the sign-in failed, with a status and the reason.
func (s *SignIn) answerFailure(w http.ResponseWriter, r *http.Request, status int, why string) {
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="dlqd"`)
	}
	if s.Failed == nil {
		door.Problem(w, status, why)
		return
	}
	s.Failed(w, r, status, why)
}

// answerError answers with the status that belongs to the error.
func (s *SignIn) answerError(w http.ResponseWriter, r *http.Request, err error) {
	var retry *RetryError
	switch {
	case errors.As(err, &retry):
		w.Header().Set("Retry-After", door.Seconds(retry.After))
		s.answerFailure(w, r, http.StatusTooManyRequests, err.Error())
	case errors.Is(err, ErrProvider):
		w.Header().Set("Retry-After", door.Seconds(providerInterval))
		s.answerFailure(w, r, http.StatusServiceUnavailable, ErrProvider.Error()+"; sign in with a token of dlqd")
	case errors.Is(err, ErrRefused), errors.Is(err, errProviderAnswer):
		s.answerFailure(w, r, http.StatusUnauthorized, err.Error())
	default:
		s.Access.log().Error("sign-in failed", "error", err)
		w.Header().Set("Retry-After", door.Seconds(time.Second))
		s.answerFailure(w, r, http.StatusServiceUnavailable, "the database does not answer; try again")
	}
}

// signInWithToken signs in the holder of a token. The token needs the role reader, operator or admin.
func (s *SignIn) signInWithToken(w http.ResponseWriter, r *http.Request) {
	if tokens, _ := s.Access.SignInWays(); !tokens {
		s.answerFailure(w, r, http.StatusNotFound, "sign-in with a token is off (access.yaml: authentication)")
		return
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(signInBodyTime))
	r.Body = http.MaxBytesReader(w, r.Body, maxSignInBody)
	if err := r.ParseForm(); err != nil {
		s.answerFailure(w, r, http.StatusBadRequest, "the form is incomplete or too large")
		return
	}
	_ = control.SetReadDeadline(time.Time{})
	if strings.HasPrefix(r.Header.Get("Origin"), "http:") && isSecure(r) {
		s.answerFailure(w, r, http.StatusBadRequest, "http would send the token unencrypted: "+
			"sign in with https, or on the machine itself (http://127.0.0.1)")
		return
	}
	secret := strings.TrimSpace(r.PostForm.Get("token"))
	p, err := s.Access.authenticateToken(r, secret)
	if err != nil {
		s.answerError(w, r, err)
		return
	}
	if !p.May(Reader) {
		s.answerFailure(w, r, http.StatusForbidden, "a token with the role "+string(p.RoleName())+
			" cannot sign in: use one with the role reader, operator or admin")
		return
	}
	row, err := s.Access.Tokens.queries.FindToken(r.Context(), hashOf(secret))
	if err != nil {
		s.answerError(w, r, err)
		return
	}
	s.begin(w, r, &identity{name: row.Name, via: ViaToken, tokenID: &row.ID}, r.PostForm.Get("to"))
}

// begin starts a session and sets its cookie. The cookie's value is always new: an attacker could know a value that the
// browser already had.
func (s *SignIn) begin(w http.ResponseWriter, r *http.Request, p *identity, to string) {
	secret, err := s.Access.Tokens.begin(r.Context(), p, originOf(r), sessionCookie(r))
	if err != nil {
		s.answerError(w, r, err)
		return
	}
	s.Access.setSessionCookie(w, r, secret)
	http.Redirect(w, r, ReturnTo(to), http.StatusSeeOther) //nolint:gosec // a path of dlqd
}

// signOut ends the session of the caller or, with everywhere in the form, all sessions of the caller.
func (s *SignIn) signOut(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, maxSignInBody)
	rules := s.Access.Rules()
	p, err := s.Access.authenticateSession(r, &rules)
	if err == nil && p != nil {
		e := Ending{ID: p.Session, Name: p.Name, By: p.Name, Origin: originOf(r).String()}
		if r.PostFormValue("everywhere") != "" {
			e.ID = ""
		}
		_, err = s.Access.EndSessions(r.Context(), e)
	}
	if err != nil && !errors.Is(err, ErrNoSession) {
		s.answerError(w, r, err)
		return
	}
	SetCookie(w, r, "", "", 0)
	http.Redirect(w, r, SignInPath, http.StatusSeeOther)
}

// pendingSignIn is a sign-in that waits for the provider's answer. Its cookie contains all of its state: the page to
// return to, and a secret from which state, nonce and PKCE verifier are derived. So an answer is valid only in the
// browser that began the sign-in. Each sign-in has its own cookie, named by its state, so that several tabs can sign in
// at once.
type pendingSignIn struct{ secret, to string }

const (
	pendingCookie = "-sign-in-"
	// maxPending limits the total size of the cookies of pending sign-ins, in bytes. A proxy accepts 8 KiB of cookies in
	// all (nginx).
	maxPending = 3 << 10
)

// pendingSuffix returns the suffix of the name of the cookie for the sign-in with the given state.
func pendingSuffix(state string) string { return pendingCookie + state[:min(len(state), 12)] }

func (p *pendingSignIn) String() string {
	return p.secret + "." + base64.RawURLEncoding.EncodeToString([]byte(p.to))
}

// keep sets the cookie of this sign-in. If the cookies of all pending sign-ins together exceed maxPending, it deletes
// the oldest ones; browsers send the latest cookie last (RFC 6265, 5.4).
func (p *pendingSignIn) keep(w http.ResponseWriter, r *http.Request) {
	left := maxPending - len(p.String())
	for _, other := range slices.Backward(r.Cookies()) {
		suffix, ok := strings.CutPrefix(other.Name, cookieOf(r))
		if !ok || !strings.HasPrefix(suffix, pendingCookie) {
			continue
		}
		if left -= len(other.Name) + len(other.Value); left < 0 {
			SetCookie(w, r, suffix, "", 0)
		}
	}
	SetCookie(w, r, pendingSuffix(p.derive("state")), p.String(), signInTimeout)
}

// pendingOf returns the sign-in with the given state from the request's cookie, or nil if there is none.
func pendingOf(r *http.Request, state string) *pendingSignIn {
	secret, encoded, ok := strings.Cut(Cookie(r, pendingSuffix(state)), ".")
	to, err := base64.RawURLEncoding.DecodeString(encoded)
	if !ok || err != nil || len(secret) != len(rand.Text()) {
		return nil
	}
	p := &pendingSignIn{secret, ReturnTo(string(to))}
	if subtle.ConstantTimeCompare([]byte(state), []byte(p.derive("state"))) != 1 {
		return nil
	}
	return p
}

// derive returns a value for the given purpose. Only a holder of the secret can compute it.
func (p *pendingSignIn) derive(what string) string {
	sum := sha256.Sum256([]byte(what + " " + p.secret))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// client returns the OAuth client for this request, with a callback to the host of the request.
func (s *SignIn) client(r *http.Request, rules *Rules) (*oauth2.Config, error) {
	if !s.IsOwnHost(r) {
		return nil, errUnknownHost
	}
	endpoint, err := s.Access.providerOf(rules.OIDC.Issuer).endpointNow(r.Context(), rules.OIDC.ClientSecret != "")
	if err != nil {
		return nil, err
	}
	// dlqd does not renew a session at the provider, so it does not request offline access, which only "dlqd login"
	// needs.
	scopes := slices.DeleteFunc(slices.Clone(rules.OIDC.Scopes),
		func(scope string) bool { return scope == oidc.ScopeOfflineAccess })
	return &oauth2.Config{
		ClientID: rules.OIDC.ClientID, ClientSecret: rules.OIDC.ClientSecret,
		Endpoint: endpoint, Scopes: scopes, RedirectURL: SignInOrigin(r) + CallbackPath,
	}, nil
}

// SignInOrigin returns the origin to which the provider redirects the browser after the sign-in. It differs from the
// origin in the browser's address bar if a proxy in front of dlqd does not forward the host or the scheme.
func SignInOrigin(r *http.Request) string {
	if isSecure(r) {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

var errProviderAnswer = errors.New("the answer of the OpenID Connect provider was rejected; dlqd's log has the reason")

var errUnknownHost = errors.New("unknown host name; --allowed-host adds it")

// redirectToProvider starts a sign-in: it sets the cookie of the pending sign-in and redirects the browser to the
// provider. If there is no provider, it answers with an error.
func (s *SignIn) redirectToProvider(w http.ResponseWriter, r *http.Request) {
	_, config := s.provider(w, r)
	if config == nil {
		return
	}
	p := &pendingSignIn{rand.Text(), ReturnTo(r.URL.Query().Get("to"))}
	p.keep(w, r)
	address := config.AuthCodeURL(p.derive("state"), oidc.Nonce(p.derive("nonce")),
		oauth2.S256ChallengeOption(p.derive("verifier")))
	http.Redirect(w, r, address, http.StatusSeeOther) //nolint:gosec // the provider's
}

// provider returns the rules in force and the OAuth client. If it fails, it answers the request with an error and
// returns nil for both.
func (s *SignIn) provider(w http.ResponseWriter, r *http.Request) (*Rules, *oauth2.Config) {
	rules := s.Access.Rules()
	if !slices.Contains(rules.Ways, ViaOIDC) {
		s.answerFailure(w, r, http.StatusNotFound,
			"sign-in with an OpenID Connect provider is off (access.yaml: authentication)")
		return nil, nil
	}
	config, err := s.client(r, &rules)
	switch {
	case errors.Is(err, errUnknownHost):
		s.answerFailure(w, r, http.StatusMisdirectedRequest, err.Error())
		return nil, nil
	case err != nil:
		s.answerError(w, r, err)
		return nil, nil
	}
	return &rules, config
}

// signInWithProvider signs in the user whom the provider has redirected back to dlqd. It refuses a redirect if this
// browser has no cookie with its state.
func (s *SignIn) signInWithProvider(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	state := query.Get("state")
	p := pendingOf(r, state)
	if p == nil { // no cookie has this state: another browser began the sign-in, or the sign-in took too long
		s.answerFailure(w, r, http.StatusBadRequest,
			"this browser did not start this sign-in, or the sign-in took too long: sign in again")
		return
	}
	SetCookie(w, r, pendingSuffix(state), "", 0)
	rules, config := s.provider(w, r)
	if config == nil {
		return
	}
	if code := query.Get("error"); code != "" {
		s.answerFailure(w, r, http.StatusForbidden, fmt.Sprintf("the OpenID Connect provider refused the sign-in: %.100q",
			cmp.Or(query.Get("error_description"), code)))
		return
	}
	if iss := query.Get("iss"); iss != "" && iss != rules.OIDC.Issuer { // RFC 9207
		s.answerFailure(w, r, http.StatusBadRequest, "the answer is from another OpenID Connect provider")
		return
	}
	user, err := s.Access.exchange(r, rules, config, query.Get("code"), p)
	if err != nil {
		s.answerError(w, r, err)
		return
	}
	s.begin(w, r, user, p.to)
}

// exchange redeems a code at the provider and returns the user's identity. It fails with
// [ErrProvider], errProviderAnswer, a [*RetryError], or the error of the request's context.
func (a *Authenticator) exchange(r *http.Request, rules *Rules, config *oauth2.Config, code string,
	p *pendingSignIn,
) (*identity, error) {
	from := door.Peer(r)
	if a.failures.wait(from, time.Now()) > 0 { // such peers exchange codes one at a time: see waitTurn
		done, err := a.waitTurn(r.Context())
		if err != nil {
			return nil, err
		}
		defer done()
	}
	user, err := a.providerOf(rules.OIDC.Issuer).exchange(r.Context(), rules, config, code, p)
	if err == nil || errors.Is(err, ErrProvider) {
		return user, err
	}
	refused := a.refuse(from)
	if errors.Is(refused, ErrRefused) {
		a.log().Warn("sign-in with the OpenID Connect provider rejected", "from", from, "why", truncated(err))
		return nil, errProviderAnswer
	}
	return nil, refused
}

func (p *provider) exchange(ctx context.Context, rules *Rules, config *oauth2.Config, code string,
	pending *pendingSignIn,
) (*identity, error) {
	ctx, cancel := context.WithTimeout(oidc.ClientContext(ctx, ProviderClient()), providerTimeout)
	defer cancel()
	token, err := config.Exchange(ctx, code, oauth2.VerifierOption(pending.derive("verifier")))
	if refused, ok := errors.AsType[*oauth2.RetrieveError](err); ok && refused.Response != nil &&
		refused.Response.StatusCode < http.StatusInternalServerError {
		return nil, fmt.Errorf("exchanging the code: %s %s", refused.Response.Status, refused.ErrorCode)
	}
	if err != nil {
		return nil, errors.Join(ErrProvider, err)
	}
	raw, _ := token.Extra("id_token").(string)
	id, claims, err := p.verify(ctx, raw)
	if err != nil {
		return nil, err
	}
	if azp, ok := claims["azp"]; !slices.Contains(id.Audience, rules.OIDC.ClientID) || ok && azp != rules.OIDC.ClientID {
		return nil, fmt.Errorf("the token is for the audience %q", id.Audience)
	}
	if subtle.ConstantTimeCompare([]byte(id.Nonce), []byte(pending.derive("nonce"))) != 1 {
		return nil, errors.New("the token is for another sign-in (nonce)")
	}
	name, err := rules.OIDC.name(claims)
	if err != nil {
		return nil, err
	}
	return &identity{
		name: name, via: ViaOIDC, issuer: &rules.OIDC.Issuer,
		subject: &id.Subject, groups: claimStrings(claims[rules.OIDC.GroupsClaim]),
	}, nil
}
