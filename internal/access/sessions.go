package access

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/access/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/door"
)

// SessionLimits say how long people stay signed in with a browser.
type SessionLimits struct {
	Idle     time.Duration // without asking for anything
	Absolute time.Duration // at all
}

// Defaults of SessionLimits: a day's work, and a week.
const (
	DefaultSessionIdle     = 12 * time.Hour
	DefaultSessionAbsolute = 7 * 24 * time.Hour
)

const (
	// rotateAfter is how long a cookie is good before another one takes its place.
	rotateAfter = time.Hour
	// arriveWithin is how long the other one may take to arrive; then it is taken for lost, and the browser gets one again.
	arriveWithin = time.Minute
	// keepPrevious is how long the one before is good once the browser has shown the new one: requests that were on their way have it.
	keepPrevious = time.Minute
	// maxSessions is how many sessions somebody may have; the oldest end.
	maxSessions = 100
)

// cookieName is the session's cookie. Browsers take one by that name from the host itself alone, by https, and for all of its paths.
// By http on loopback, the cookie has plainCookieName: no browser would take the other there.
const (
	cookieName      = "__Host-dlqd"
	plainCookieName = "dlqd"
)

// Session is somebody's, with a browser.
type Session struct {
	ID        string
	Name      string // who signed in
	Via       string // ViaToken or ViaOIDC
	Address   string // from where they signed in
	Agent     string // what their browser calls itself
	CreatedAt time.Time
	SeenAt    time.Time // within a minute or so
	ExpiresAt time.Time // unless they are seen again
}

// ErrNoSession is of an id that no session has.
var ErrNoSession = errors.New("there is no such session")

// session is what was found of one.
type session struct {
	id        string
	name, via string
	grant     *Grant // of its token
	tokenBy   string
	issuer    string // its provider
	groups    []string
	rotate    bool // another cookie is to take the place of this one
}

// principal says who has a session, by the policy in force: nil where that knows nobody that way any more.
func (s *session) principal(rules *Rules) *Principal {
	var p *Principal
	switch {
	case s == nil:
		return nil
	case s.via == ViaToken && s.grant != nil && slices.Contains(rules.Ways, ViaToken+"s"):
		p = &Principal{Name: s.name, Via: ViaToken, TokenBy: s.tokenBy, Grants: []Grant{*s.grant}}
	case s.via == ViaOIDC && slices.Contains(rules.Ways, ViaOIDC) && s.issuer == rules.OIDC.Issuer:
		p = rules.user(s.name, ViaOIDC, s.groups)
	default:
		return nil
	}
	p.Session = s.id
	return p
}

// proof is how somebody showed who they are.
type proof struct {
	name, via       string
	tokenID         *uuid.UUID
	issuer, subject *string
	groups          []string
}

// origin is from where somebody signs in.
type origin struct{ address, agent string }

// maxAgent bounds what is kept of what a browser calls itself, in bytes.
const maxAgent = 200

func originOf(r *http.Request) origin {
	o := origin{address: "a local socket", agent: r.UserAgent()}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		o.address = host
	}
	o.agent = strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, strings.ToValidUTF8(o.agent[:min(len(o.agent), maxAgent)], "?"))
	return o
}

func (o origin) String() string {
	text := "console, from " + o.address
	if o.agent != "" { // what it says of itself ends at its bracket
		text += " (" + strings.NewReplacer("(", "[", ")", "]").Replace(o.agent) + ")"
	}
	return text
}

// begin begins a session in place of the one, if any, whose cookie this is, and returns what its own cookie holds.
func (s *Store) begin(ctx context.Context, p *proof, from origin, instead string) (secret string, err error) {
	secret, hash, err := newSecret(sessionPrefix)
	if err != nil {
		return "", err
	}
	id := uuid.Must(uuid.NewV7())
	a := &act{"sessions", "signed in", p.name, from.String(), "", map[string]any{"session": id, "via": p.via, "token": p.tokenID}}
	return secret, s.recorded(ctx, a, func(q *dbsqlc.Queries) error {
		if err := q.EndOldSessions(ctx, dbsqlc.EndOldSessionsParams{Name: p.name, Keep: maxSessions - 1, Instead: hashOf(instead)}); err != nil {
			return err
		}
		return q.InsertSession(ctx, dbsqlc.InsertSessionParams{
			ID: id, Hash: hash, Name: p.name, Via: p.via, TokenID: p.tokenID, Issuer: p.issuer, Subject: p.subject, Groups: list(p.groups), Address: from.address, Agent: from.agent,
		})
	})
}

// findSession returns the session of a cookie, or that of an id; nil where there is none.
func (s *Store) findSession(ctx context.Context, hash []byte, id uuid.UUID, limits SessionLimits) (*session, error) {
	row, err := s.queries.FindSession(ctx, dbsqlc.FindSessionParams{
		Hash: hash, ID: id, RotateAfter: rotateAfter, ArriveWithin: arriveWithin, Absolute: limits.Absolute, Idle: limits.Idle,
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil //nolint:nilnil // none
	case err != nil:
		return nil, err
	case row.Replaced: // somebody has a copy, and the one who has not is told so by having to sign in again
		_, err := s.End(ctx, Ending{ID: row.ID.String(), By: "sweep", Note: "a cookie came again that had been changed: somebody has a copy"})
		if errors.Is(err, ErrNoSession) {
			err = nil
		}
		return nil, err
	}
	if row.Touch && hash != nil {
		if err := s.queries.TouchSession(ctx, dbsqlc.TouchSessionParams{ID: row.ID, Hash: hash, KeepPrevious: keepPrevious}); err != nil && ctx.Err() != nil {
			return nil, err
		}
	}
	found := &session{id: row.ID.String(), name: row.Name, via: row.Via, groups: row.Groups, rotate: row.Rotate}
	if row.Role != nil {
		found.grant, found.tokenBy = &Grant{Role: Role(*row.Role), Queues: row.Queues, Kinds: row.Kinds, Sources: row.Sources}, *row.CreatedBy
	}
	if row.Issuer != nil {
		found.issuer = *row.Issuer
	}
	return found, nil
}

// Sessions lists the sessions that are good, of somebody or (name empty) of all, the latest first.
func (s *Store) Sessions(ctx context.Context, name string, limits SessionLimits) ([]Session, error) {
	limits = limits.orDefault()
	rows, err := s.queries.Sessions(ctx, dbsqlc.SessionsParams{Name: name, Absolute: limits.Absolute, Idle: limits.Idle})
	sessions := make([]Session, len(rows))
	for i, r := range rows {
		sessions[i] = Session{ID: r.ID.String(), Name: r.Name, Via: r.Via, Address: r.Address, Agent: r.Agent, CreatedAt: r.CreatedAt, SeenAt: r.SeenAt, ExpiresAt: r.ExpiresAt}
	}
	return sessions, err
}

// Ending says which sessions end, and who has them end.
type Ending struct {
	ID     string // that one, if it is of Name, or Name is empty
	Name   string // without an ID: all of this person's
	By     string
	Origin string // from where
	Note   string
}

// End ends sessions, and returns how many. Every process refuses them within five seconds. It fails with [ErrNoSession].
func (s *Store) End(ctx context.Context, e Ending) (n int, err error) {
	params := dbsqlc.EndSessionsParams{Name: e.Name}
	if e.ID != "" {
		parsed, err := uuid.Parse(e.ID)
		if err != nil {
			return 0, ErrNoSession
		}
		params.ID = &parsed
	}
	a := &act{subject: "sessions", act: "ended", by: e.By, origin: e.Origin, note: e.Note}
	err = s.recorded(ctx, a, func(q *dbsqlc.Queries) error {
		names, err := q.EndSessions(ctx, params)
		if err != nil {
			return err
		}
		if n = len(names); n == 0 {
			return ErrNoSession
		}
		if names[0] == e.By {
			a.act = "signed out"
		}
		a.detail = map[string]any{"of": names[0], "session": params.ID, "sessions": n}
		return nil
	})
	return n, err
}

// TrimSessions takes away sessions that are good no more.
func (s *Store) TrimSessions(ctx context.Context, limits SessionLimits) error {
	limits = limits.orDefault()
	_, err := s.queries.TrimSessions(ctx, dbsqlc.TrimSessionsParams{Absolute: limits.Absolute, Idle: limits.Idle})
	return err
}

func (l SessionLimits) orDefault() SessionLimits {
	return SessionLimits{Idle: cmp.Or(l.Idle, DefaultSessionIdle), Absolute: cmp.Or(l.Absolute, DefaultSessionAbsolute)}
}

// cookieOf is the name of the cookie of a request's session.
func cookieOf(r *http.Request) string {
	if secure(r) {
		return cookieName
	}
	return plainCookieName
}

// secure reports whether a browser that makes a request sees https: dlqd's own, or that of a proxy before it. Without either there are
// sessions on loopback alone, since anybody on the way could take the cookie. (Who is not a browser may say what it likes: it gets a cookie that
// browsers are more careful with.)
func secure(r *http.Request) bool {
	return r.TLS != nil || !IsLoopback(door.Host(r)) || r.Header.Get("X-Forwarded-Proto") == "https"
}

// setCookie has the browser keep something, or (empty) forget it.
func setCookie(w http.ResponseWriter, r *http.Request, name, value string, life time.Duration) {
	//nolint:gosec // Secure wherever the browser takes it so
	cookie := &http.Cookie{Name: name, Value: value, Path: "/", MaxAge: int(life.Seconds()), Secure: secure(r), HttpOnly: true, SameSite: http.SameSiteLaxMode}
	if value == "" {
		cookie.MaxAge = -1
	}
	http.SetCookie(w, cookie)
}

// sessionCookie is what a request's cookie holds; empty where there is none, or several.
func sessionCookie(r *http.Request) string {
	cookies := r.CookiesNamed(cookieOf(r))
	if len(cookies) != 1 || !wellFormed(sessionPrefix, cookies[0].Value) {
		return ""
	}
	return cookies[0].Value
}

// ownPage reports whether a request is made by dlqd's own pages, or by somebody who follows a link to one: a cookie counts for nothing
// else. Browsers say so in Sec-Fetch-Site, and older ones in Origin; who says neither is none, or reads.
func ownPage(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "same-origin", "none":
		return true
	case "":
		origin := r.Header.Get("Origin")
		if origin == "" {
			return true
		}
		u, err := url.Parse(origin)
		return err == nil && u.Host == r.Host
	default:
		return (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	}
}

// bySession says who makes a request by the cookie of their session; nil where there is none that counts.
func (a *Authenticator) bySession(r *http.Request, rules *Rules) (*Principal, error) {
	secret := sessionCookie(r)
	if secret == "" || !ownPage(r) {
		return nil, nil //nolint:nilnil // none
	}
	key := [32]byte(hashOf(secret))
	found, fresh, err := a.knownOr(r, key, true, func(ctx context.Context) (l looked, err error) {
		l.session, err = a.Tokens.findSession(ctx, key[:], uuid.Nil, rules.Sessions.orDefault())
		return l, err
	})
	if err != nil {
		return nil, err
	}
	if found.session == nil && fresh {
		a.attempts.failed(door.Peer(r), time.Now())
	}
	return found.session.principal(rules), nil
}

// Again says who makes a request that [Authenticator.Authenticate] let in before: of a session, it is the same one, whose cookie may have
// changed meanwhile.
func (a *Authenticator) Again(r *http.Request, before *Principal) (*Principal, error) {
	if before.Session == "" {
		return a.Authenticate(r)
	}
	id, err := uuid.Parse(before.Session)
	if err != nil {
		return nil, err
	}
	rules, key := a.Rules(), [32]byte(hashOf(before.Session))
	found, _, err := a.knownOr(r, key, true, func(ctx context.Context) (l looked, err error) {
		l.session, err = a.Tokens.findSession(ctx, nil, id, rules.Sessions.orDefault())
		return l, err
	})
	if err != nil {
		return nil, err
	}
	if p := found.session.principal(&rules); p != nil {
		return p, nil
	}
	return nil, ErrUnknown
}

// Renew changes the cookie of a session now and then, before a request is answered: a copy that somebody has is of no use for longer.
func (a *Authenticator) Renew(w http.ResponseWriter, r *http.Request, p *Principal) {
	if p.Session == "" {
		return
	}
	old := sessionCookie(r)
	key := [32]byte(hashOf(old))
	a.mu.Lock()
	found := a.known[key]
	a.mu.Unlock()
	if found.session == nil || !found.session.rotate {
		return
	}
	secret, err := a.Tokens.rotate(r.Context(), found.session.id, key[:])
	if err != nil {
		a.log().Warn("the cookie of a session was not changed; it is tried again", "session", p.Session, "error", err)
		return
	}
	a.forget(key)
	if secret != "" {
		a.setSessionCookie(w, r, secret)
	}
}

func (a *Authenticator) setSessionCookie(w http.ResponseWriter, r *http.Request, secret string) {
	rules := a.Rules()
	setCookie(w, r, cookieOf(r), secret, rules.Sessions.orDefault().Absolute)
}

// forget has the database asked about sessions by the next request.
func (a *Authenticator) forget(keys ...[32]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, key := range keys {
		delete(a.known, key)
	}
}

// EndSessions ends sessions as [Store.End] does, by this process at once.
func (a *Authenticator) EndSessions(ctx context.Context, e Ending) (int, error) {
	n, err := a.Tokens.End(ctx, e)
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.known, func(_ [32]byte, l looked) bool { return l.session != nil })
	return n, err
}

// rotate changes what the cookie of a session holds, and returns that; empty where another request has.
func (s *Store) rotate(ctx context.Context, id string, hash []byte) (secret string, err error) {
	secret, next, err := newSecret(sessionPrefix)
	if err != nil {
		return "", err
	}
	n, err := s.queries.RotateSession(ctx, dbsqlc.RotateSessionParams{ID: uuid.MustParse(id), Hash: hash, NewHash: next, RotateAfter: rotateAfter, ArriveWithin: arriveWithin})
	if n == 0 {
		secret = ""
	}
	return secret, err
}
