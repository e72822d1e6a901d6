package access

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dlqd/dlqd/internal/door"
)

// Rules configure how callers are authenticated, and which rights callers without a token have.
type Rules struct {
	Ways   []string // some of "tokens", "socket", "proxy", "oidc" and "certificates"; empty: authentication is off
	Proxy  Proxy
	OIDC   OIDC
	Grants []UserGrant
	// Sessions limits how long browsers stay signed in; zero values mean the defaults.
	Sessions SessionLimits
}

// principal returns a caller who has each grant for which names returns true.
func (r *Rules) principal(name, via string, names func(*UserGrant) bool) *Principal {
	p := &Principal{Name: name, Via: via}
	for _, g := range r.Grants {
		if names(&g) {
			p.Grants = append(p.Grants, g.Grant)
		}
	}
	return p
}

// user returns a caller whom a proxy or a provider authenticated, with the grants that list the name or one of the
// groups.
func (r *Rules) user(name, via string, groups []string) *Principal {
	p := r.principal(name, via, func(g *UserGrant) bool {
		return slices.Contains(g.Users, name) ||
			slices.ContainsFunc(g.Groups, func(group string) bool { return slices.Contains(groups, group) })
	})
	p.Groups = groups
	return p
}

// Proxy is a reverse proxy that authenticates users and names them in headers.
type Proxy struct {
	From         []netip.Prefix
	Socket       bool // whether the proxy connects through the Unix socket
	UserHeader   string
	GroupsHeader string
}

// UserGrant is a grant for the listed users, groups, operating system users and certificates.
type UserGrant struct {
	Grant

	Users, Groups, OSUsers, Certificates []string
}

// Authenticator authenticates callers.
type Authenticator struct {
	Tokens *Store
	Rules  func() Rules // returns the rules of the policy in force
	// Open gives every caller all rights if the policy configures no authentication. The server sets it if only users of
	// this machine can connect, or if the operator asked for it.
	Open   bool
	Logger *slog.Logger
	// Now is the clock for the expiry of the provider's tokens; nil means time.Now.
	Now func() time.Time

	provider *provider // the provider of the policy in force; nil until first used
	flights  singleflight.Group
	mu       sync.Mutex
	known    map[[32]byte]lookup
	ended    chan struct{} // closed by EndSessions; nil until a request waits on it
	turn     chan struct{} // held during a lookup or code exchange of a peer with too many failures; see waitTurn
	failures failedSignIns
}

// lookup is the result of one lookup of a token or a session.
type lookup struct {
	at        time.Time
	principal *Principal // the token's holder; nil: no such token
	session   *session   // the cookie's session; nil: no such session
}

const (
	// tokenTTL is how long the result of a lookup is used, from the start of the lookup on.
	tokenTTL = 3 * time.Second
	// lookupTimeout limits a lookup. It is long, so that a slow database, for instance in an incident, does not lock out
	// operators.
	lookupTimeout = 20 * time.Second
)

// maxCached is the maximum number of cached lookups. It is also the maximum number of peers whose failures are counted.
const maxCached = 10_000

type peerKey struct{}

// ConnContext records the user id of a Unix socket's peer. It is a ConnContext of http.Server.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return ctx
	}
	var uid uint32
	var peerErr error
	if err := raw.Control(func(fd uintptr) { uid, peerErr = peerUID(int(fd)) }); err != nil || peerErr != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, uid)
}

// RetryError is the error for a caller who has to wait for After before the next attempt.
type RetryError struct{ After time.Duration }

func (e *RetryError) Error() string {
	return fmt.Sprintf("too many failed sign-ins from this address; try again in %s", e.After.Round(time.Second))
}

// Authenticate returns the caller of a request. If the policy configures no authentication and Open is set, each caller
// is unrestricted. If it refuses the caller, it fails with [ErrUnknown], [ErrRefused] or a [*RetryError] ([IsRefusal]).
// Otherwise it fails with [ErrProvider], or an error of the database or of the request's context.
func (a *Authenticator) Authenticate(r *http.Request) (*Principal, error) {
	rules := a.Rules()
	if len(rules.Ways) == 0 {
		if a.Open {
			return Unrestricted(), nil
		}
		return nil, fmt.Errorf("%w: the policy configures none (access.yaml: authentication), "+
			"and this dlqd does not listen only on loopback", ErrUnknown)
	}
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	tokens, provider := slices.Contains(rules.Ways, ViaToken+"s"), slices.Contains(rules.Ways, ViaOIDC)
	if len(r.Header.Values("Authorization")) > 1 { // a proxy in front of dlqd may have checked only one of them
		return nil, a.refuse(door.Peer(r))
	}
	if strings.EqualFold(scheme, "Bearer") && (tokens || provider) {
		if provider && (isJWT(secret) || !tokens) {
			return a.authenticateJWT(r, &rules, secret)
		}
		return a.authenticateToken(r, secret)
	}
	if p, err := a.authenticateSession(r, &rules); p != nil || err != nil {
		return p, err
	}
	// A proxy may forward the credentials of its own users in Authorization, for example with the scheme Basic. So a
	// request with another scheme than Bearer is refused only if it has no other way of authentication.
	if p := proxyUser(r, &rules); p != nil {
		return p, nil
	}
	if p := socketUser(r, &rules); p != nil {
		return p, nil
	}
	if p := certificateUser(r, &rules); p != nil {
		return p, nil
	}
	if scheme != "" && (tokens || provider) {
		return nil, a.refuse(door.Peer(r))
	}
	return nil, ErrUnknown
}

// refuse returns the error for invalid credentials: ErrRefused or, after too many failures of the peer, a RetryError.
// It is called only after a check of the credentials, so that valid credentials always work, even from an address that
// sent invalid ones. That is safe because a secret is too long to guess.
func (a *Authenticator) refuse(from string) error {
	if wait := a.failures.wait(from, time.Now()); wait > 0 {
		return &RetryError{After: wait}
	}
	a.failures.record(from, time.Now())
	return ErrRefused
}

func (a *Authenticator) authenticateToken(r *http.Request, secret string) (*Principal, error) {
	key := [32]byte(hashOf(secret))
	found, _, err := a.cachedOrFind(r, key, wellFormed(secretPrefix, secret),
		func(ctx context.Context) (l lookup, err error) {
			l.principal, err = a.Tokens.find(ctx, key[:])
			return l, err
		})
	if err != nil {
		return nil, err
	}
	if found.principal == nil {
		return nil, a.refuse(door.Peer(r))
	}
	return found.principal, nil
}

// cachedOrFind returns the cached lookup of key if it is younger than tokenTTL. Otherwise it looks key up with find and
// returns fresh as true. If possible is false, because the secret is malformed, it returns an empty lookup and does not
// call find.
func (a *Authenticator) cachedOrFind(r *http.Request, key [32]byte, possible bool,
	find func(context.Context) (lookup, error),
) (found lookup, fresh bool, err error) {
	a.mu.Lock()
	found = a.known[key]
	a.mu.Unlock()
	if !possible || time.Since(found.at) < tokenTTL {
		return found, false, nil
	}
	// A peer with too many failures has to wait for its turn, unless the secret has a cached lookup. So all such peers
	// together query the database one at a time.
	if found.at.IsZero() && a.failures.wait(door.Peer(r), time.Now()) > 0 {
		done, err := a.waitTurn(r.Context())
		if err != nil {
			return lookup{}, false, err
		}
		defer done()
	}
	found, err = a.lookUp(r.Context(), key, find)
	return found, true, err
}

// waitTurn waits until it holds a.turn, and returns the function that releases a.turn.
func (a *Authenticator) waitTurn(ctx context.Context) (done func(), err error) {
	a.mu.Lock()
	if a.turn == nil {
		a.turn = make(chan struct{}, 1)
	}
	turn := a.turn
	a.mu.Unlock()
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// lookUp queries the database with find and caches the result. Concurrent requests for the same key share a query that
// began less than tokenTTL ago. The age of a result counts from the start of its query.
func (a *Authenticator) lookUp(ctx context.Context, key [32]byte, find func(context.Context) (lookup, error)) (lookup,
	error,
) {
	flight := a.flights.DoChan(string(key[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
		defer cancel()
		at := time.Now()
		defer time.AfterFunc(tokenTTL, func() { a.flights.Forget(string(key[:])) }).Stop()
		result, err := find(ctx)
		if err != nil {
			return nil, err
		}
		result.at = at
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.known == nil || len(a.known) >= maxCached {
			a.known = map[[32]byte]lookup{}
		}
		if a.known[key].at.Before(at) {
			a.known[key] = result
		}
		return result, nil
	})
	select {
	case done := <-flight:
		result, _ := done.Val.(lookup)
		return result, done.Err
	case <-ctx.Done():
		return lookup{}, ctx.Err()
	}
}

func proxyUser(r *http.Request, rules *Rules) *Principal {
	if !slices.Contains(rules.Ways, ViaProxy) {
		return nil
	}
	address, err := netip.ParseAddrPort(r.RemoteAddr)
	from := err == nil && slices.ContainsFunc(rules.Proxy.From,
		func(n netip.Prefix) bool { return n.Contains(address.Addr().Unmap()) })
	if _, socket := r.Context().Value(peerKey{}).(uint32); !from && (!socket || !rules.Proxy.Socket) {
		return nil
	}
	users, groupHeaders := r.Header.Values(rules.Proxy.UserHeader), r.Header.Values(rules.Proxy.GroupsHeader)
	if len(users) != 1 || len(groupHeaders) > 1 || checkName(strings.TrimSpace(users[0])) != nil {
		return nil // no header, or the client sent one in addition to the proxy's
	}
	var groups []string
	for group := range strings.SplitSeq(strings.Join(groupHeaders, ","), ",") {
		if group = strings.TrimSpace(group); group != "" {
			groups = append(groups, group)
		}
	}
	return rules.user(strings.TrimSpace(users[0]), ViaProxy, groups)
}

func socketUser(r *http.Request, rules *Rules) *Principal {
	uid, ok := r.Context().Value(peerKey{}).(uint32)
	if !ok || !slices.Contains(rules.Ways, ViaSocket) {
		return nil
	}
	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	return rules.principal(name, ViaSocket, func(g *UserGrant) bool { return slices.Contains(g.OSUsers, name) })
}

// certificateUser returns the holder of a client certificate. The holder's name is the common name or, if that is
// missing or invalid, the first valid alternative name. A grant may list any of the valid names. certificateUser checks
// the expiry again, because a connection may outlive the certificate.
func certificateUser(r *http.Request, rules *Rules) *Principal {
	certificate := door.ClientCertificate(r)
	if certificate == nil || !slices.Contains(rules.Ways, ViaCertificate+"s") || time.Now().After(certificate.NotAfter) {
		return nil
	}
	names := slices.Concat([]string{certificate.Subject.CommonName}, certificate.DNSNames, certificate.EmailAddresses)
	for _, uri := range certificate.URIs {
		names = append(names, uri.String())
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		return checkName(name) != nil
	})
	if len(names) == 0 {
		return nil
	}
	return rules.principal(names[0], ViaCertificate, func(g *UserGrant) bool {
		return slices.ContainsFunc(g.Certificates, func(name string) bool { return slices.Contains(names, name) })
	})
}

// failedSignIns counts failed sign-ins by [door.Peer].
type failedSignIns struct {
	mu     sync.Mutex
	byPeer map[string]*peerFailures
}

type peerFailures struct {
	since time.Time
	n     int
}

// A peer may fail maxFailures times within failureWindow. Until the end of the window, each further failure gets a
// RetryError.
const (
	maxFailures   = 20
	failureWindow = time.Minute
)

func (s *failedSignIns) wait(from string, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.byPeer[from]; f != nil && f.n >= maxFailures && now.Before(f.since.Add(failureWindow)) {
		return f.since.Add(failureWindow).Sub(now)
	}
	return 0
}

func (s *failedSignIns) record(from string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byPeer == nil || len(s.byPeer) >= maxCached {
		s.byPeer = map[string]*peerFailures{}
	}
	f := s.byPeer[from]
	if f == nil || now.After(f.since.Add(failureWindow)) {
		f = &peerFailures{since: now}
		s.byPeer[from] = f
	}
	f.n++
}

// IsRefusal reports whether an error of [Authenticator.Authenticate] is a refusal of the caller. Other errors are those
// of the database, the provider or the request's context.
func IsRefusal(err error) bool {
	var retry *RetryError
	return errors.Is(err, ErrUnknown) || errors.Is(err, ErrRefused) || errors.As(err, &retry)
}
