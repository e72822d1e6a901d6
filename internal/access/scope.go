package access

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/dlqd/dlqd/internal/postgres"
)

// Scope is the queues and kinds in which a caller may act: the union of its parts. Nil means all of them. The database
// filters entries by the JSON of a scope, which is the value of dlq.scope() (dlq.in_scope).
type Scope []Part

// Part is one part of a scope.
type Part struct {
	Queues []string `json:"queues,omitempty"` // patterns, in which * matches any text; none: every queue
	Kinds  []string `json:"kinds,omitempty"`  // patterns; none: every kind
}

// Scope returns the scope in which the caller has the role: the union of all grants that include the role. It is nil
// for the role "", and for a caller who has the role everywhere.
func (p *Principal) Scope(role Role) Scope {
	if role == "" || p.MayEverywhere(role) {
		return nil
	}
	scope := Scope{}
	for _, g := range p.Grants {
		if g.Role.Includes(role) {
			scope = append(scope, Part{Queues: g.Queues, Kinds: g.Kinds})
		}
	}
	return scope
}

// HasQueue reports whether the scope covers all kinds of a queue.
func (s Scope) HasQueue(name string) bool {
	return s == nil || slices.ContainsFunc(s,
		func(part Part) bool { return all(part.Kinds) && matches(part.Queues, name) })
}

// Limit returns a context whose database statements are limited to the scope. A nil scope limits nothing.
func Limit(ctx context.Context, scope Scope) (context.Context, error) {
	if scope == nil {
		return ctx, nil
	}
	raw, err := json.Marshal(scope)
	if err != nil {
		return nil, err
	}
	return postgres.WithScope(ctx, string(raw)), nil
}

// ScopeOf returns the scope to which ctx is limited, or nil if ctx has no limit.
func ScopeOf(ctx context.Context) Scope {
	text := postgres.Scope(ctx)
	if text == "" {
		return nil
	}
	scope := Scope{} // an unreadable scope covers nothing
	_ = json.Unmarshal([]byte(text), &scope)
	return scope
}
