package access

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/dlqd/dlqd/internal/postgres"
)

// Scope is where somebody may do something: what any of its parts lets through. Nil is everywhere. As JSON it is what dlq.scope() has:
// the database decides of entries by it (dlq.in_scope).
type Scope []Part

// Part is a part of a scope.
type Part struct {
	Queues []string `json:"queues,omitempty"` // patterns, in which * stands for any text; none: every queue
	Kinds  []string `json:"kinds,omitempty"`  // likewise
}

// Scope is where somebody has a role: of all grants that include it.
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

// HasQueue reports whether all of a queue is in the scope, whatever its kinds.
func (s Scope) HasQueue(name string) bool {
	return s == nil || slices.ContainsFunc(s, func(part Part) bool { return all(part.Kinds) && matches(part.Queues, name) })
}

// Limit limits what is done in ctx to a scope.
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

// ScopeOf is to what ctx is limited.
func ScopeOf(ctx context.Context) Scope {
	text := postgres.Scope(ctx)
	if text == "" {
		return nil
	}
	scope := Scope{} // (what cannot be read is nowhere)
	_ = json.Unmarshal([]byte(text), &scope)
	return scope
}
