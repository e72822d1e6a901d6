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

// SessionLimits limits how long a browser stays signed in.
type SessionLimits struct {
	Idle     time.Duration // time since the last request
	Absolute time.Duration // time since the sign-in
}

// Defaults of SessionLimits: a working day, and a week.
const (
	DefaultSessionIdle     = 12 * time.Hour
	DefaultSessionAbsolute = 7 * 24 * time.Hour
)

const (
	// rotateAfter is the age at which a session gets a new cookie.
	rotateAfter = time.Hour
	// arriveWithin is how long the browser may take to send the new cookie. After that time dlqd assumes that the new
	// cookie did not arrive, and gives the browser another one.
	arriveWithin = time.Minute
	// keepPrevious is how long the old cookie works after the browser has first sent the new one. The browser may have
	// sent other requests with the old cookie before.
	keepPrevious = time.Minute
	// maxSessions is the maximum number of sessions of a user. A further sign-in ends the oldest session.
	maxSessions = 100
)

// cookieName is the name of the session cookie. Because of its prefix, browsers accept the cookie only from the host
// itself, over https, and for all paths. Browsers refuse that prefix over http on loopback; there the cookie has the
// name plainCookieName.
const (
	cookieName      = "__Host-dlqd"
	plainCookieName = "dlqd"
)

// Session is a user's session in a browser.
type Session struct {
	ID        string    `json:"id" format:"uuid" doc:"Id of the session, for ending it. It is not a credential."`
	Name      string    `json:"name" doc:"The user."`
	Via       string    `json:"via" enum:"token,oidc" doc:"How the user signed in."`
	Address   string    `json:"address" doc:"Address from which the user signed in."`
	Agent     string    `json:"agent" doc:"User-Agent of the browser."`
	CreatedAt time.Time `json:"createdAt" doc:"When the user signed in."`
	SeenAt    time.Time `json:"seenAt" doc:"When the session was last used, accurate to a minute."`
	ExpiresAt time.Time `json:"expiresAt" doc:"When the session ends if it is not used again."`
}

// ErrNoSession means that no session has the id.
var ErrNoSession = errors.New("session not found")

// session is a session that was found in the database.
type session struct {
	id        string
	name, via string
	grant     *Grant // the grant of the token with which the session began; nil for sessions by OIDC
	tokenBy   string
	issuer    string // the OpenID Connect provider's issuer; "" for sessions by token
	groups    []string
	rotate    bool // whether the cookie is due for replacement
}

// principal returns the session's user with the rights that the policy in force gives. It returns nil if s is nil, if
// the policy no longer allows the way by which the user signed in, or if the policy names another provider.
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

// identity has the data that a sign-in proves about a user, and that a new session stores.
type identity struct {
	name, via       string
	tokenID         *uuid.UUID
	issuer, subject *string
	groups          []string
}

// origin is where a sign-in came from.
type origin struct{ address, agent string }

// maxAgent is the maximum number of bytes of a User-Agent that a session stores.
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
	if o.agent != "" { // a bracket in the client's text must not end the part in brackets
		text += " (" + strings.NewReplacer("(", "[", ")", "]").Replace(o.agent) + ")"
	}
	return text
}

// begin starts a session and returns the value of its cookie. If instead is the cookie of another session, begin ends
// that session. If the user has more than maxSessions, begin ends the oldest ones.
func (s *Store) begin(ctx context.Context, p *identity, from origin, instead string) (secret string, err error) {
	secret, hash, err := newSecret(sessionPrefix)
	if err != nil {
		return "", err
	}
	id := uuid.Must(uuid.NewV7())
	a := &auditRow{
		"sessions", "signed in", p.name, from.String(), "",
		map[string]any{"session": id, "via": p.via, "token": p.tokenID},
	}
	return secret, s.withAudit(ctx, a, func(q *dbsqlc.Queries) error {
		if err := q.EndOldSessions(ctx, dbsqlc.EndOldSessionsParams{
			Name: p.name, Keep: maxSessions - 1, Instead: hashOf(instead),
		}); err != nil {
			return err
		}
		return q.InsertSession(ctx, dbsqlc.InsertSessionParams{
			ID: id, Hash: hash, Name: p.name, Via: p.via, TokenID: p.tokenID, Issuer: p.issuer,
			Subject: p.subject, Groups: nonNil(p.groups), Address: from.address, Agent: from.agent,
		})
	})
}

// findSession returns the session that has the cookie's hash or the id, or nil. If the cookie was replaced and has
// stopped working, the request has a copy: findSession ends the session and returns nil.
func (s *Store) findSession(ctx context.Context, hash []byte, id uuid.UUID, limits SessionLimits) (*session, error) {
	row, err := s.queries.FindSession(ctx, dbsqlc.FindSessionParams{
		Hash: hash, ID: id, RotateAfter: rotateAfter,
		ArriveWithin: arriveWithin, Absolute: limits.Absolute, Idle: limits.Idle,
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil //nolint:nilnil // none
	case err != nil:
		return nil, err
	case row.Replaced: // the cookie was copied: end the session, which the user notices by having to sign in again
		_, err := s.End(ctx, Ending{ID: row.ID.String(), By: "sweep", Note: "a replaced cookie was used again: the cookie " +
			"was copied"})
		if errors.Is(err, ErrNoSession) {
			err = nil
		}
		return nil, err
	}
	if row.Touch && hash != nil {
		if err := s.queries.TouchSession(ctx, dbsqlc.TouchSessionParams{
			ID: row.ID, Hash: hash, KeepPrevious: keepPrevious,
		}); err != nil && ctx.Err() != nil {
			return nil, err
		}
	}
	found := &session{id: row.ID.String(), name: row.Name, via: row.Via, groups: row.Groups, rotate: row.Rotate}
	if row.Role != nil {
		found.grant, found.tokenBy = &Grant{
			Role: Role(*row.Role), Queues: row.Queues, Kinds: row.Kinds, Sources: row.Sources,
		}, *row.CreatedBy
	}
	if row.Issuer != nil {
		found.issuer = *row.Issuer
	}
	return found, nil
}

// Sessions returns the active sessions of a user or, if name is empty, of all users, the latest
// first.
func (s *Store) Sessions(ctx context.Context, name string, limits SessionLimits) ([]Session, error) {
	limits = limits.orDefault()
	rows, err := s.queries.Sessions(ctx, dbsqlc.SessionsParams{Name: name, Absolute: limits.Absolute, Idle: limits.Idle})
	sessions := make([]Session, len(rows))
	for i, r := range rows {
		sessions[i] = Session(r)
	}
	return sessions, err
}

// Ending selects the sessions to end, and says who ends them.
type Ending struct {
	ID     string // the session to end; if Name is set, the session must be that user's
	Name   string // without an ID: the user all of whose sessions end
	By     string
	Origin string // address and program of the caller
	Note   string
}

// End ends the selected sessions and returns their number. All processes refuse these sessions within five seconds. It
// fails with [ErrNoSession] if there is no such session.
func (s *Store) End(ctx context.Context, e Ending) (n int, err error) {
	params := dbsqlc.EndSessionsParams{Name: e.Name}
	if e.ID != "" {
		parsed, err := uuid.Parse(e.ID)
		if err != nil {
			return 0, ErrNoSession
		}
		params.ID = &parsed
	}
	a := &auditRow{subject: "sessions", act: "ended", by: e.By, origin: e.Origin, note: e.Note}
	err = s.withAudit(ctx, a, func(q *dbsqlc.Queries) error {
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

// TrimSessions deletes expired sessions, and sessions of expired or revoked tokens.
func (s *Store) TrimSessions(ctx context.Context, limits SessionLimits) error {
	limits = limits.orDefault()
	_, err := s.queries.TrimSessions(ctx, dbsqlc.TrimSessionsParams{Absolute: limits.Absolute, Idle: limits.Idle})
	return err
}

func (l SessionLimits) orDefault() SessionLimits {
	return SessionLimits{Idle: cmp.Or(l.Idle, DefaultSessionIdle), Absolute: cmp.Or(l.Absolute, DefaultSessionAbsolute)}
}

// cookieOf returns the name of the session cookie for this request.
func cookieOf(r *http.Request) string {
	if isSecure(r) {
		return cookieName
	}
	return plainCookieName
}

// isSecure reports whether the session cookie of a request must be for https only: if the request came over TLS,
// through a proxy with https, or to any host but loopback. Browsers drop such a cookie over plain http, where the
// network could read the cookie. A client that forges X-Forwarded-Proto only gets a stricter cookie.
func isSecure(r *http.Request) bool {
	return r.TLS != nil || !IsLoopback(door.Host(r)) || r.Header.Get("X-Forwarded-Proto") == "https"
}

// SetCookie sets a cookie of dlqd's pages, or deletes it if value is empty. The cookie's name is the session cookie's
// name and suffix. Browsers protect the cookie like the session cookie.
func SetCookie(w http.ResponseWriter, r *http.Request, suffix, value string, life time.Duration) {
	//nolint:gosec // Secure wherever browsers accept such a cookie
	cookie := &http.Cookie{
		Name: cookieOf(r) + suffix, Value: value, Path: "/", MaxAge: int(life.Seconds()),
		Secure: isSecure(r), HttpOnly: true, SameSite: http.SameSiteLaxMode,
	}
	if value == "" {
		cookie.MaxAge = -1
	}
	http.SetCookie(w, cookie)
}

// Cookie returns the value of a cookie that [SetCookie] set, or "" if the request has none or several with that name.
func Cookie(r *http.Request, suffix string) string {
	cookies := r.CookiesNamed(cookieOf(r) + suffix)
	if len(cookies) != 1 {
		return ""
	}
	return cookies[0].Value
}

// sessionCookie returns the value of the session cookie, or "" if the request has none or several, or if the value is
// malformed.
func sessionCookie(r *http.Request) string {
	value := Cookie(r, "")
	if !wellFormed(sessionPrefix, value) {
		return ""
	}
	return value
}

// isOwnPage reports whether a request comes from a page of dlqd, or from a browser that opens a page of dlqd by its
// address or by a link. The session cookie is accepted only from such requests. Browsers send Sec-Fetch-Site. Older
// browsers send only Origin, with requests that change something. A request with neither header is a read of an older
// browser, or comes from another program.
func isOwnPage(r *http.Request) bool {
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
		return (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
			r.Header.Get("Sec-Fetch-Dest") == "document"
	}
}

// authenticateSession returns the caller of a request with a valid session cookie, or nil if the request has none or
// does not come from a page of dlqd.
func (a *Authenticator) authenticateSession(r *http.Request, rules *Rules) (*Principal, error) {
	secret := sessionCookie(r)
	if secret == "" || !isOwnPage(r) {
		return nil, nil //nolint:nilnil // none
	}
	key := [32]byte(hashOf(secret))
	found, fresh, err := a.cachedOrFind(r, key, true, func(ctx context.Context) (l lookup, err error) {
		l.session, err = a.Tokens.findSession(ctx, key[:], uuid.Nil, rules.Sessions.orDefault())
		return l, err
	})
	if err != nil {
		return nil, err
	}
	if found.session == nil && fresh {
		a.failures.record(door.Peer(r), time.Now())
	}
	return found.session.principal(rules), nil
}

// Reauthenticate authenticates a request again that [Authenticator.Authenticate] authenticated before. It looks up a
// session by the session's id, because the cookie may have been replaced since. It fails as Authenticate does.
func (a *Authenticator) Reauthenticate(r *http.Request, before *Principal) (*Principal, error) {
	if before.Session == "" {
		return a.Authenticate(r)
	}
	id, err := uuid.Parse(before.Session)
	if err != nil {
		return nil, err
	}
	rules, key := a.Rules(), [32]byte(hashOf(before.Session))
	found, _, err := a.cachedOrFind(r, key, true, func(ctx context.Context) (l lookup, err error) {
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

// Renew replaces the session's cookie if the cookie is due, before the request is answered. This limits how long a
// stolen copy of the cookie works.
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
		a.log().Warn("replacing a session cookie failed", "session", p.Session, "error", err)
		return
	}
	a.forget(key)
	if secret != "" {
		a.setSessionCookie(w, r, secret)
	}
}

func (a *Authenticator) setSessionCookie(w http.ResponseWriter, r *http.Request, secret string) {
	rules := a.Rules()
	SetCookie(w, r, "", secret, rules.Sessions.orDefault().Absolute)
}

// forget removes cached lookups, so that the next request queries the database.
func (a *Authenticator) forget(keys ...[32]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, key := range keys {
		delete(a.known, key)
	}
}

// EndSessions ends sessions as [Store.End] does. This process refuses the ended sessions at once.
func (a *Authenticator) EndSessions(ctx context.Context, e Ending) (int, error) {
	n, err := a.Tokens.End(ctx, e)
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.known, func(_ [32]byte, l lookup) bool { return l.session != nil })
	if a.ended != nil {
		close(a.ended)
		a.ended = nil
	}
	return n, err
}

// SessionsEnded returns a channel that the next call of [Authenticator.EndSessions] closes.
func (a *Authenticator) SessionsEnded() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended == nil {
		a.ended = make(chan struct{})
	}
	return a.ended
}

// rotate replaces the value of a session's cookie and returns the new value, or "" if another request replaced the
// value first.
func (s *Store) rotate(ctx context.Context, id string, hash []byte) (secret string, err error) {
	secret, next, err := newSecret(sessionPrefix)
	if err != nil {
		return "", err
	}
	n, err := s.queries.RotateSession(ctx, dbsqlc.RotateSessionParams{
		ID: uuid.MustParse(id), Hash: hash, NewHash: next, RotateAfter: rotateAfter, ArriveWithin: arriveWithin,
	})
	if n == 0 {
		secret = ""
	}
	return secret, err
}
