// Package access authenticates callers and decides what they may do. It knows tokens, sessions of
// browsers, operating system users on a Unix socket, users named by a proxy, client certificates
// and tokens of an OpenID Connect provider. Every role but metrics can be limited to queues and
// kinds, and the role sender also to sources.
package access

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Role is a set of operations that a caller may use. Reader, operator and admin correspond to the database roles
// dlq_reader, dlq_operator and dlq_admin.
type Role string

// The roles. Reader, operator and admin each include the roles before them. Sender and metrics are for machines, and
// each of the two allows only the operations in its comment.
const (
	// Reader sees the audit trail, analytics, and dead letters without the data that the policy marks
	// as sensitive.
	Reader Role = "reader"
	// Operator also sees payloads (masked values only after giving a reason), moves dead letters,
	// starts and controls replay runs, and controls breakers and queues.
	Operator Role = "operator"
	// Admin also erases data, switches capture on and off, and manages tokens.
	Admin Role = "admin"
	// Sender submits messages.
	Sender Role = "sender"
	// Metrics reads metrics and health.
	Metrics Role = "metrics"
)

// Roles returns all roles.
func Roles() []Role { return []Role{Reader, Operator, Admin, Sender, Metrics} }

// Includes reports whether r allows everything that other allows. Operators and admins are also senders: a caller who
// may replay dead letters may submit messages. Readers, operators and admins may also read metrics.
func (r Role) Includes(other Role) bool {
	if r == other {
		return slices.Contains(Roles(), r)
	}
	if least, machines := map[Role]Role{Sender: Operator, Metrics: Reader}[other]; machines {
		other = least
	}
	personRoles := []Role{Reader, Operator, Admin}
	return slices.Contains(personRoles, other) && slices.Index(personRoles, r) >= slices.Index(personRoles, other)
}

// Grant is a role, limited to the queues, kinds and sources that match its patterns.
type Grant struct {
	Role    Role
	Queues  []string // patterns, in which * matches any text; none: every queue
	Kinds   []string // patterns; none: every kind
	Sources []string // patterns of the sources that a sender may submit as; none: every source
}

// everything reports whether the grant has no limit.
func (g Grant) everything() bool {
	return all(g.Queues) && all(g.Kinds) && all(g.Sources)
}

// all reports whether the patterns match every text.
func all(patterns []string) bool { return len(patterns) == 0 || slices.Contains(patterns, "*") }

// Ways in which a caller is authenticated.
const (
	ViaToken  = "token"
	ViaSocket = "socket"
	ViaProxy  = "proxy"
	ViaOIDC   = "oidc"
	// ViaCertificate means that the client authenticated with a TLS certificate.
	ViaCertificate = "certificate"
	// ViaNothing means that the policy configures no authentication. dlqd serves such a caller only if
	// [Authenticator.Open] is set.
	ViaNothing = ""
)

// Principal is an authenticated caller.
type Principal struct {
	Name   string // the actor of the audit trail
	Via    string
	Grants []Grant
	// Groups are the groups of the user, as the provider or the proxy sent them.
	Groups []string
	// TokenBy is the creator of the caller's token; empty for callers without a token.
	TokenBy string
	// Session is the id of the caller's browser session; empty for callers without a session.
	Session string
}

// Unrestricted returns the principal of every caller if authentication is off: an admin without a name.
func Unrestricted() *Principal { return &Principal{Grants: []Grant{{Role: Admin}}} }

// May reports whether the caller has the role anywhere, in any scope.
func (p *Principal) May(role Role) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) })
}

// MayEverywhere reports whether one of the caller's grants allows the role without a limit on queues,
// kinds or sources.
func (p *Principal) MayEverywhere(role Role) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && g.everything() })
}

// SeesPayloads reports whether an operation that requires role shows payloads to the caller. The caller must be
// operator everywhere, or each of the caller's grants that includes role must also include operator. Otherwise the
// whole operation shows only what a reader may see.
func (p *Principal) SeesPayloads(role Role) bool {
	return p.MayEverywhere(Operator) ||
		!slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && !g.Role.Includes(Operator) })
}

// MayIn reports whether the caller has the role for the queue, or at least for some of its kinds or sources.
func (p *Principal) MayIn(role Role, queue string) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && matches(g.Queues, queue) })
}

// MayFor reports whether the caller has the role for this queue, kind and source.
func (p *Principal) MayFor(role Role, queue, kind, source string) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool {
		return g.Role.Includes(role) && matches(g.Queues, queue) && matches(g.Kinds, kind) && matches(g.Sources, source)
	})
}

// RoleName returns the highest role that the caller has in any scope, or "" for a caller without a
// role.
func (p *Principal) RoleName() Role {
	for _, role := range []Role{Admin, Operator, Reader, Sender, Metrics} {
		if slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role == role }) {
			return role
		}
	}
	return ""
}

func matches(patterns []string, text string) bool {
	return len(patterns) == 0 || slices.ContainsFunc(patterns, func(p string) bool { return MatchPattern(p, text) })
}

// MatchPattern reports whether text matches pattern, in which * matches any text.
func MatchPattern(pattern, text string) bool {
	first, rest, wild := strings.Cut(pattern, "*")
	if !wild {
		return pattern == text
	}
	text, ok := strings.CutPrefix(text, first)
	if !ok {
		return false
	}
	parts := strings.Split(rest, "*")
	last := len(parts) - 1
	for _, part := range parts[:last] { // the first match of a part leaves the longest text for the parts after it
		at := strings.Index(text, part)
		if at < 0 {
			return false
		}
		text = text[at+len(part):]
	}
	return strings.HasSuffix(text, parts[last])
}

type principalKey struct{}

// With returns a context in which p is the caller.
func With(ctx context.Context, p *Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

type reauthenticationKey struct{}

type reauthentication struct {
	again func() (*Principal, error)
	ended func() <-chan struct{}
}

// WithReauthentication returns a context for [StillAuthenticated] and [SessionsEnded]. StillAuthenticated authenticates
// the caller with again; SessionsEnded returns the channel of ended.
func WithReauthentication(ctx context.Context, again func() (*Principal, error),
	ended func() <-chan struct{},
) context.Context {
	return context.WithValue(ctx, reauthenticationKey{}, reauthentication{again, ended})
}

// StillAuthenticated reports whether the caller would now be authenticated with the same name and grants as at the
// start of the request. Long-running requests check that. It returns an error if the check failed, for example because
// the database does not answer. Without [WithReauthentication] it returns true.
func StillAuthenticated(ctx context.Context) (bool, error) {
	r, ok := ctx.Value(reauthenticationKey{}).(reauthentication)
	if !ok {
		return true, nil
	}
	p, err := r.again()
	if err != nil && !IsRefusal(err) {
		return false, err
	}
	return err == nil && reflect.DeepEqual(p, From(ctx)), nil
}

// SessionsEnded returns a channel that the next [Authenticator.EndSessions] in this process closes. A long-running
// request waits on it, to call [StillAuthenticated] at once. Without [WithReauthentication] it returns nil.
func SessionsEnded(ctx context.Context) <-chan struct{} {
	r, ok := ctx.Value(reauthenticationKey{}).(reauthentication)
	if !ok {
		return nil
	}
	return r.ended()
}

// From returns the caller of ctx, or [Unrestricted] if ctx has none.
func From(ctx context.Context) *Principal {
	if p, ok := ctx.Value(principalKey{}).(*Principal); ok {
		return p
	}
	return unrestricted
}

var unrestricted = Unrestricted() // never changed

// Errors of authentication.
var (
	// ErrUnknown means that the request has no credentials, or only credentials of a kind that the policy does not
	// accept.
	ErrUnknown = errors.New("authentication required")
	// ErrRefused means that the credentials were rejected, for example a malformed, unknown,
	// expired or revoked token.
	ErrRefused = errors.New("the token is not valid")
)

// Token is a key to the API. Its secret is shown only once, when the token is created; the database stores a hash.
type Token struct {
	ID        string     `json:"id" doc:"Id of the token, for revoking it. It is not a credential."`
	Name      string     `json:"name" doc:"Name of the holder: the actor in the audit trail."`
	Role      Role       `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"Role of the holder."`
	Queues    []string   `json:"queues,omitempty" doc:"Patterns of queues; absent: every queue."`
	Kinds     []string   `json:"kinds,omitempty" doc:"Patterns of kinds; absent: every kind."`
	Sources   []string   `json:"sources,omitempty" doc:"Patterns of sources that a sender may submit as; absent: every source."`
	Note      string     `json:"note,omitempty" doc:"Purpose of the token."`
	CreatedBy string     `json:"createdBy" doc:"Creator of the token."`
	CreatedAt time.Time  `json:"createdAt" doc:"When the token was created."`
	ExpiresAt *time.Time `json:"expiresAt,omitempty" doc:"When the token expires; absent: never."`
	UsedAt    *time.Time `json:"usedAt,omitempty" doc:"When the token was last used, accurate to a minute."`
	RevokedAt *time.Time `json:"revokedAt,omitempty" doc:"Time from which the token is rejected; in the future for a rotated token that is still valid."`
	RevokedBy string     `json:"revokedBy,omitempty" doc:"Actor who revoked the token."`
}

// grant returns the grant of the token's holder.
func (t *Token) grant() Grant {
	return Grant{Role: t.Role, Queues: t.Queues, Kinds: t.Kinds, Sources: t.Sources}
}

// State returns "active", "expired", "revoked", or, for a token that a rotation replaced and that still works, "until"
// and the time from which the token is refused.
func (t *Token) State(now time.Time) string {
	switch {
	case t.RevokedAt != nil && !now.Before(*t.RevokedAt):
		return "revoked"
	case t.ExpiresAt != nil && !now.Before(*t.ExpiresAt):
		return "expired"
	case t.RevokedAt != nil:
		return "until " + t.RevokedAt.Format(time.RFC3339)
	default:
		return "active"
	}
}

// checkName returns an error for an empty name, a name of more than 255 bytes, a name that an audit trail cannot print,
// and the names under which dlqd itself acts (see dlq.is_person).
func checkName(name string) error {
	switch {
	case name == "" || len(name) > 255:
		return errors.New("a name must have 1 to 255 bytes")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("the name %q has characters that cannot be printed", name)
	case strings.HasPrefix(name, "worker:") ||
		slices.Contains([]string{"capture", "source", "reconciler", "sweep", "retention", "backfill", "policy"}, name):
		return fmt.Errorf("the name %s is reserved for actions of dlqd itself; choose another name", name)
	}
	return nil
}

// CheckGrant returns an error if the grant has an unknown role, a limit that the role cannot have, or an empty pattern
// or one of more than 255 bytes.
func CheckGrant(g Grant) error {
	if !slices.Contains(Roles(), g.Role) {
		return fmt.Errorf("unknown role %q (roles: reader, operator, admin, sender, metrics)", g.Role)
	}
	if len(g.Sources) > 0 && g.Role != Sender {
		return fmt.Errorf("sources are only for the role sender, not for %s", g.Role)
	}
	if g.Role == Metrics && !g.everything() {
		return errors.New("the role metrics cannot be limited: metrics cover all queues")
	}
	for _, pattern := range slices.Concat(g.Queues, g.Kinds, g.Sources) {
		if pattern == "" || len(pattern) > 255 {
			return fmt.Errorf("invalid pattern %q: must have 1 to 255 bytes; * stands for any text", pattern)
		}
	}
	return nil
}
