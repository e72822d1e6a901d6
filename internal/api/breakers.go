package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
)

// OpenAction opens a circuit breaker.
type OpenAction struct {
	Action

	For string `json:"for,omitempty" doc:"How long the breaker stays open, such as 10m; until it is reset if absent." example:"10m"`
}

// BreakerInput names a circuit breaker.
type BreakerInput struct {
	Name string `path:"name" maxLength:"255" doc:"destination: and the name of a destination, or queue: and the name of a River queue." example:"destination:payments"`
}

// BreakersOutputBody lists circuit breakers.
type BreakersOutputBody struct {
	Breakers []breaker.Status `json:"breakers" doc:"Circuit breakers, by name."`
}

// OpenBreakerInput is a request to open a circuit breaker.
type OpenBreakerInput struct {
	BreakerInput

	Body *OpenAction
}

// ResetBreakerInput is a request to close a circuit breaker.
type ResetBreakerInput struct {
	BreakerInput

	Body *Action
}

// Operations on circuit breakers.
var (
	ListBreakers = Operation[None, BreakersOutputBody]{"list-circuit-breakers", http.MethodGet, "/api/circuit-breakers"}
	OpenBreaker  = Operation[OpenBreakerInput, breaker.Status]{
		"open-circuit-breaker", http.MethodPost, "/api/circuit-breakers/{name}/open",
	}
	ResetBreaker = Operation[ResetBreakerInput, breaker.Status]{
		"reset-circuit-breaker", http.MethodPost, "/api/circuit-breakers/{name}/reset",
	}
)

func (s *service) registerBreakers(api huma.API) {
	tags := []string{"circuit breakers"}
	status := breaker.Status{Name: "destination:payments", State: breaker.Closed, Deliveries: 812, FailureRate: 1.5}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List all circuit breakers", Errors: []int{503},
	}
	example(&list, http.StatusOK, map[string]any{"breakers": []breaker.Status{status}})
	register(s, api, ListBreakers, list, func(ctx context.Context, _ *None) (*BreakersOutputBody, error) {
		return &BreakersOutputBody{slices.DeleteFunc(s.Breakers.List(),
			func(b breaker.Status) bool { return !hasBreaker(ctx, b.Name) })}, nil
	})

	open := huma.Operation{
		Tags:        tags,
		Summary:     "Open a circuit breaker",
		Description: "Stops deliveries to the breaker's destination, for a time or until the breaker is reset.",
		Errors:      []int{400, 404, 422, 503},
	}
	opened := status
	opened.State, opened.Forced, opened.ChangedBy = breaker.Open, true, "kim"
	example(&open, http.StatusOK, opened)
	register(s, api, OpenBreaker, open, s.openBreaker)

	reset := huma.Operation{
		Tags:    tags,
		Summary: "Close a circuit breaker", Errors: []int{400, 404, 422, 503},
	}
	example(&reset, http.StatusOK, status)
	register(s, api, ResetBreaker, reset, s.resetBreaker)
}

func (s *service) openBreaker(ctx context.Context, in *OpenBreakerInput) (*breaker.Status, error) {
	if in.Body == nil {
		in.Body = &OpenAction{}
	}
	duration := time.Duration(0)
	if in.Body.For != "" {
		var err error
		if duration, err = policy.ParseDuration(in.Body.For); err != nil || duration <= 0 {
			return nil, huma.Error422UnprocessableEntity("invalid duration", &huma.ErrorDetail{
				Location: "body.for", Message: "must be a duration such as 30s, 10m or 2h", Value: in.Body.For,
			})
		}
	}
	return s.changeBreaker(ctx, in.Name, func() error {
		act := in.Body.act(ctx)
		return s.Breakers.ForceOpen(ctx, in.Name, act.Actor, act.Note, duration)
	})
}

func (s *service) resetBreaker(ctx context.Context, in *ResetBreakerInput) (*breaker.Status, error) {
	return s.changeBreaker(ctx, in.Name, func() error {
		act := in.Body.act(ctx)
		_, err := s.Breakers.Reset(ctx, in.Name, act.Actor, act.Note)
		return err
	})
}

// hasBreaker reports whether the caller may see a circuit breaker. To see the breaker of a destination, the caller
// needs an unlimited scope, because messages of many queues go to one destination. dlq.breaker_in_scope has the same
// rule.
func hasBreaker(ctx context.Context, name string) bool {
	scope := access.ScopeOf(ctx)
	queue, ok := strings.CutPrefix(name, breaker.QueuePrefix)
	return scope == nil || ok && scope.HasQueue(queue)
}

func (s *service) changeBreaker(ctx context.Context, name string, change func() error) (*breaker.Status, error) {
	if _, ok := s.Breakers.Find(name); !ok || !hasBreaker(ctx, name) {
		return nil, huma.Error404NotFound(fmt.Sprintf("circuit breaker %q not found; GET /api/circuit-breakers lists them",
			name))
	}
	if err := change(); err != nil {
		return nil, s.problem(ctx, err)
	}
	status, _ := s.Breakers.Find(name)
	return &status, nil
}
