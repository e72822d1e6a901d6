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
	"golang.org/x/sys/unix"

	"github.com/dlqd/dlqd/internal/door"
)

// Rules say how callers are known, and what those may do who have no token.
type Rules struct {
	Ways   []string // of the Via constants; none: nobody is asked
	Proxy  Proxy
	OIDC   OIDC
	Grants []UserGrant
	// Sessions say how long people stay signed in with a browser; zero values mean the defaults.
	Sessions SessionLimits
}

// principal is somebody, with what the grants say of them that name them.
func (r *Rules) principal(name, via string, names func(*UserGrant) bool) *Principal {
	p := &Principal{Name: name, Via: via}
	for _, g := range r.Grants {
		if names(&g) {
			p.Grants = append(p.Grants, g.Grant)
		}
	}
	return p
}

// user is somebody whom a proxy or a provider knows.
func (r *Rules) user(name, via string, groups []string) *Principal {
	return r.principal(name, via, func(g *UserGrant) bool {
		return slices.Contains(g.Users, name) || slices.ContainsFunc(g.Groups, func(group string) bool { return slices.Contains(groups, group) })
	})
}

// Proxy is a proxy that has users sign in.
type Proxy struct {
	From         []netip.Prefix
	Socket       bool // it comes by the Unix socket
	UserHeader   string
	GroupsHeader string
}

// UserGrant is what users may do.
type UserGrant struct {
	Grant

	Users, Groups, OSUsers, Certificates []string
}

// Authenticator finds out who calls.
type Authenticator struct {
	Tokens *Store
	Rules  func() Rules // in force
	// Open says that who is not asked may do anything: only the machine's own users reach this dlqd, or somebody wants it so.
	Open   bool
	Logger *slog.Logger
	// Now is the clock by which tokens of the provider expire; nil for time.Now.
	Now func() time.Time

	provider *provider // of the policy in force; nil before somebody came by it
	flights  singleflight.Group
	mu       sync.Mutex
	known    map[[32]byte]looked
	turn     chan struct{} // of whoever may ask for a token, of those who come from where many were refused
	attempts attempts
}

// looked is what a look at the tokens, or sessions, found.
type looked struct {
	at        time.Time
	principal *Principal // who holds a token; nil: nobody
	session   *session   // whose cookie it is; nil: nobody's
}

// tokenTTL is how long a look at the tokens and sessions counts: a revoked one is refused within it, and the time that a look takes.
const tokenTTL = 3 * time.Second

// maxKnown bounds the looks that are kept.
const maxKnown = 10_000

type peerKey struct{}

// ConnContext keeps who is at the other end of a Unix socket, for http.Server.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return ctx
	}
	var peer *unix.Ucred
	if err := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil || peer == nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, peer.Uid)
}

// RetryError is of a caller who must wait before trying again.
type RetryError struct{ After time.Duration }

func (e *RetryError) Error() string {
	return fmt.Sprintf("too many attempts to sign in from here; try again in %s", e.After.Round(time.Second))
}

// Authenticate says who makes a request. It fails with [ErrUnknown], [ErrRefused], a [*RetryError], [ErrProvider], or an error of the database.
func (a *Authenticator) Authenticate(r *http.Request) (*Principal, error) {
	rules := a.Rules()
	if len(rules.Ways) == 0 {
		if a.Open {
			return Anybody(), nil
		}
		return nil, fmt.Errorf("%w: the policy says nothing of how callers are known (access.yaml), and this dlqd does not listen on loopback alone", ErrUnknown)
	}
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	tokens, provider := slices.Contains(rules.Ways, ViaToken+"s"), slices.Contains(rules.Ways, ViaOIDC)
	if len(r.Header.Values("Authorization")) > 1 { // whoever stands before dlqd may have believed the other one
		return nil, a.refuse(door.Peer(r))
	}
	if strings.EqualFold(scheme, "Bearer") && (tokens || provider) {
		if provider && (isJWT(secret) || !tokens) {
			return a.byJWT(r, &rules, secret)
		}
		return a.byToken(r, secret)
	}
	if p, err := a.bySession(r, &rules); p != nil || err != nil {
		return p, err
	}
	// (A proxy may pass on by what it knows its users: Basic, for one.)
	if p := byProxy(r, &rules); p != nil {
		return p, nil
	}
	if p := bySocket(r, &rules); p != nil {
		return p, nil
	}
	if p := byCertificate(r, &rules); p != nil {
		return p, nil
	}
	if scheme != "" && (tokens || provider) {
		return nil, a.refuse(door.Peer(r))
	}
	return nil, ErrUnknown
}

// refuse is what is said of credentials that do not count. (Whether they do is found out first: a good one does not suffer from what
// others at its address do, and guessing is of no use.)
func (a *Authenticator) refuse(from string) error {
	if wait := a.attempts.wait(from, time.Now()); wait > 0 {
		return &RetryError{After: wait}
	}
	a.attempts.failed(from, time.Now())
	return ErrRefused
}

func (a *Authenticator) byToken(r *http.Request, secret string) (*Principal, error) {
	key := [32]byte(hashOf(secret))
	found, _, err := a.knownOr(r, key, wellFormed(secretPrefix, secret), func(ctx context.Context) (l looked, err error) {
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

// knownOr is what was found a moment ago or, if it can be anything at all, what is found now, which is then fresh.
func (a *Authenticator) knownOr(r *http.Request, key [32]byte, possible bool, find func(context.Context) (looked, error)) (found looked, fresh bool, err error) {
	a.mu.Lock()
	found = a.known[key]
	a.mu.Unlock()
	if !possible || time.Since(found.at) < tokenTTL {
		return found, false, nil
	}
	// Who comes from where many were refused lately asks the database one at a time.
	if found.at.IsZero() && a.attempts.wait(door.Peer(r), time.Now()) > 0 {
		done, err := a.queue(r.Context())
		if err != nil {
			return looked{}, false, err
		}
		defer done()
	}
	found, err = a.look(r.Context(), key, find)
	return found, true, err
}

// queue waits until nobody else is in the queue.
func (a *Authenticator) queue(ctx context.Context) (done func(), err error) {
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

// look asks the database: once for all requests that come meanwhile. Its answer counts from before it was asked.
func (a *Authenticator) look(ctx context.Context, key [32]byte, find func(context.Context) (looked, error)) (looked, error) {
	flight := a.flights.DoChan(string(key[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tokenTTL)
		defer cancel()
		at := time.Now()
		look, err := find(ctx)
		if err != nil {
			return nil, err
		}
		look.at = at
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.known == nil || len(a.known) >= maxKnown {
			a.known = map[[32]byte]looked{}
		}
		a.known[key] = look
		return look, nil
	})
	select {
	case done := <-flight:
		look, _ := done.Val.(looked)
		return look, done.Err
	case <-ctx.Done():
		return looked{}, ctx.Err()
	}
}

func byProxy(r *http.Request, rules *Rules) *Principal {
	if !slices.Contains(rules.Ways, ViaProxy) {
		return nil
	}
	address, err := netip.ParseAddrPort(r.RemoteAddr)
	from := err == nil && slices.ContainsFunc(rules.Proxy.From, func(n netip.Prefix) bool { return n.Contains(address.Addr().Unmap()) })
	if _, socket := r.Context().Value(peerKey{}).(uint32); !from && (!socket || !rules.Proxy.Socket) {
		return nil
	}
	users, said := r.Header.Values(rules.Proxy.UserHeader), r.Header.Values(rules.Proxy.GroupsHeader)
	if len(users) != 1 || len(said) > 1 || checkName(strings.TrimSpace(users[0])) != nil {
		return nil // none, or one that somebody put beside the proxy's
	}
	var groups []string
	for group := range strings.SplitSeq(strings.Join(said, ","), ",") {
		if group = strings.TrimSpace(group); group != "" {
			groups = append(groups, group)
		}
	}
	return rules.user(strings.TrimSpace(users[0]), ViaProxy, groups)
}

func bySocket(r *http.Request, rules *Rules) *Principal {
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

// byCertificate says who shows a certificate: its common name, or the first of its other names where it has none. Grants may name any of
// them. (A connection may outlive its certificate.)
func byCertificate(r *http.Request, rules *Rules) *Principal {
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

// attempts counts sign-ins that failed, by [door.Peer].
type attempts struct {
	mu sync.Mutex
	of map[string]*failures
}

type failures struct {
	since time.Time
	n     int
}

// From one address, maxFailures sign-ins may fail in failureWindow; then the rest of it is waited out.
const (
	maxFailures   = 20
	failureWindow = time.Minute
)

func (a *attempts) wait(from string, now time.Time) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.of[from]; f != nil && f.n >= maxFailures && now.Before(f.since.Add(failureWindow)) {
		return f.since.Add(failureWindow).Sub(now)
	}
	return 0
}

func (a *attempts) failed(from string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil || len(a.of) >= maxKnown {
		a.of = map[string]*failures{}
	}
	f := a.of[from]
	if f == nil || now.After(f.since.Add(failureWindow)) {
		f = &failures{since: now}
		a.of[from] = f
	}
	f.n++
}

// IsRefusal reports whether an error is about the caller, rather than of the database.
func IsRefusal(err error) bool {
	var retry *RetryError
	return errors.Is(err, ErrUnknown) || errors.Is(err, ErrRefused) || errors.As(err, &retry)
}
