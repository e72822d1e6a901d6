// Package access says who calls, and what they may do: tokens, operating system users on a Unix socket, what a proxy says of its
// users, tokens of an OpenID Connect provider; roles, each limited to queues and kinds.
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

// Role is what somebody may do. People's are the database's: dlq_reader, dlq_operator and dlq_admin.
type Role string

// The roles. Each of reader, operator and admin may do what those before it may; sender and metrics are for machines, and may do
// one thing alone.
const (
	// Reader sees dead letters, but for what the policy marks as sensitive, the audit trail and analytics.
	Reader Role = "reader"
	// Operator also sees payloads (but for what the policy masks until they say why they look), moves dead letters, starts and steers replay runs, breakers and queues.
	Operator Role = "operator"
	// Admin also erases, switches capture, and keeps tokens.
	Admin Role = "admin"
	// Sender submits messages.
	Sender Role = "sender"
	// Metrics reads metrics and health.
	Metrics Role = "metrics"
)

// Roles lists all of them.
func Roles() []Role { return []Role{Reader, Operator, Admin, Sender, Metrics} }

// Includes reports whether a role may do what another one may. Senders' and metrics' part is also that of people: who may send dead
// letters back may submit, and who may read may read metrics.
func (r Role) Includes(other Role) bool {
	if r == other {
		return slices.Contains(Roles(), r)
	}
	if least, machines := map[Role]Role{Sender: Operator, Metrics: Reader}[other]; machines {
		other = least
	}
	people := []Role{Reader, Operator, Admin}
	return slices.Contains(people, other) && slices.Index(people, r) >= slices.Index(people, other)
}

// Grant is a role, in the queues and for the kinds that match.
type Grant struct {
	Role    Role
	Queues  []string // patterns, in which * stands for any text; none: every queue
	Kinds   []string // likewise
	Sources []string // as which a sender may submit, likewise
}

// everything reports whether a grant is not limited.
func (g Grant) everything() bool {
	return all(g.Queues) && all(g.Kinds) && all(g.Sources)
}

// all reports whether patterns let everything through.
func all(patterns []string) bool { return len(patterns) == 0 || slices.Contains(patterns, "*") }

// Ways in which callers are known.
const (
	ViaToken  = "token"
	ViaSocket = "socket"
	ViaProxy  = "proxy"
	ViaOIDC   = "oidc"
	// ViaCertificate is of a client that showed a certificate.
	ViaCertificate = "certificate"
	// ViaNothing is of a dlqd that asks nobody who they are: it listens where only the machine's own users are.
	ViaNothing = ""
)

// Principal is somebody who calls.
type Principal struct {
	Name   string // the actor of the audit trail
	Via    string
	Grants []Grant
	// TokenBy made the token by which they are known; empty where they are known otherwise.
	TokenBy string
	// Session is the id of the session by which they are known; empty where there is none.
	Session string
}

// Anybody is who calls a dlqd that asks nobody who they are.
func Anybody() *Principal { return &Principal{Grants: []Grant{{Role: Admin}}} }

// May reports whether somebody has a role, wherever it is.
func (p *Principal) May(role Role) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) })
}

// MayEverywhere reports whether somebody has a role in every queue and for every kind.
func (p *Principal) MayEverywhere(role Role) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && g.everything() })
}

// SeesPayloads reports whether somebody who does what needs a role sees all that an operator sees: where some of their grants for it
// are a reader's, what they do is.
func (p *Principal) SeesPayloads(role Role) bool {
	return p.MayEverywhere(Operator) || !slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && !g.Role.Includes(Operator) })
}

// MayIn reports whether somebody has a role for anything of a queue.
func (p *Principal) MayIn(role Role, queue string) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool { return g.Role.Includes(role) && matches(g.Queues, queue) })
}

// MayFor reports whether somebody has a role for this queue, kind and source.
func (p *Principal) MayFor(role Role, queue, kind, source string) bool {
	return slices.ContainsFunc(p.Grants, func(g Grant) bool {
		return g.Role.Includes(role) && matches(g.Queues, queue) && matches(g.Kinds, kind) && matches(g.Sources, source)
	})
}

// RoleName is the highest role that somebody has anywhere.
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

// MatchPattern reports whether a text matches a pattern in which * stands for any text.
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
	for _, part := range parts[:last] { // each where it comes first: that leaves the most to the others
		at := strings.Index(text, part)
		if at < 0 {
			return false
		}
		text = text[at+len(part):]
	}
	return strings.HasSuffix(text, parts[last])
}

type principalKey struct{}

// With has what is done in ctx done by somebody.
func With(ctx context.Context, p *Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

type againKey struct{}

// WithAgain has [Still] find out again who makes a request.
func WithAgain(ctx context.Context, again func() (*Principal, error)) context.Context {
	return context.WithValue(ctx, againKey{}, again)
}

// Still reports whether who calls would be let in now as they were at first: for what takes long.
func Still(ctx context.Context) bool {
	again, ok := ctx.Value(againKey{}).(func() (*Principal, error))
	if !ok {
		return true
	}
	p, err := again()
	return err == nil && reflect.DeepEqual(p, From(ctx))
}

// From is who calls; [Anybody] where nobody was asked.
func From(ctx context.Context) *Principal {
	if p, ok := ctx.Value(principalKey{}).(*Principal); ok {
		return p
	}
	return Anybody()
}

// Errors of sign-in.
var (
	// ErrUnknown is of a caller that nobody knows.
	ErrUnknown = errors.New("who calls is not known")
	// ErrRefused is of credentials that do not count: malformed, unknown, expired or revoked.
	ErrRefused = errors.New("the token is not valid")
)

// Token is a key to the API. What it is made of is shown once, when it is made; the database has a hash.
type Token struct {
	ID        string     `json:"id" doc:"By what it is revoked. It signs nobody in."`
	Name      string     `json:"name" doc:"Who holds it: the actor in the audit trail."`
	Role      Role       `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"What they may do."`
	Queues    []string   `json:"queues,omitempty" doc:"Patterns of queues; absent: every queue."`
	Kinds     []string   `json:"kinds,omitempty" doc:"Patterns of kinds; absent: every kind."`
	Sources   []string   `json:"sources,omitempty" doc:"Patterns of sources as which a sender may submit; absent: every source."`
	Note      string     `json:"note,omitempty" doc:"What it is for."`
	CreatedBy string     `json:"createdBy" doc:"Who made it."`
	CreatedAt time.Time  `json:"createdAt" doc:"When."`
	ExpiresAt *time.Time `json:"expiresAt,omitempty" doc:"Until when it is good; absent: for ever."`
	UsedAt    *time.Time `json:"usedAt,omitempty" doc:"When it was last used, within a minute or so."`
	RevokedAt *time.Time `json:"revokedAt,omitempty" doc:"From when it is refused."`
	RevokedBy string     `json:"revokedBy,omitempty" doc:"Who revoked it."`
}

// grant is what a token may do.
func (t *Token) grant() Grant {
	return Grant{Role: t.Role, Queues: t.Queues, Kinds: t.Kinds, Sources: t.Sources}
}

// State says in a word how a token is.
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

// checkName refuses a name that no trail could show as it is, and those by which dlqd itself acts, as dlq.is_person has it.
func checkName(name string) error {
	switch {
	case name == "" || len(name) > 255:
		return errors.New("a name has 1 to 255 characters")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("the name %q holds what cannot be printed", name)
	case strings.HasPrefix(name, "worker:") || slices.Contains([]string{"capture", "reconciler", "sweep", "retention", "backfill"}, name):
		return fmt.Errorf("dlqd itself acts as %s: whose name that were would be in no audit of people", name)
	}
	return nil
}

// CheckGrant refuses a grant that means nothing.
func CheckGrant(g Grant) error {
	if !slices.Contains(Roles(), g.Role) {
		return fmt.Errorf("there is no role %q (there are: reader, operator, admin, sender, metrics)", g.Role)
	}
	if len(g.Sources) > 0 && g.Role != Sender {
		return fmt.Errorf("sources are for senders, and not for the role %s", g.Role)
	}
	if g.Role == Metrics && !g.everything() {
		return errors.New("metrics are of all queues: the role metrics cannot be limited")
	}
	for _, pattern := range slices.Concat(g.Queues, g.Kinds, g.Sources) {
		if pattern == "" || len(pattern) > 255 {
			return fmt.Errorf("%q is no pattern: 1 to 255 characters, * stands for any text", pattern)
		}
	}
	return nil
}
