package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/doctor"
)

// Health is the health of the program and of the queues.
type Health struct {
	OK    bool   `json:"ok" doc:"Whether every component works."`
	Parts []Part `json:"parts" doc:"Health of each component."`
	// Queues does not affect OK: a queue that exceeds its limits is not a failure of dlqd.
	Queues []QueueHealth `json:"queues" doc:"Health of each queue of the policy, and of other queues with open dead letters. A queue that is down does not make ok false, because dlqd itself works. Empty while the database does not answer."`
}

func (h *Health) status() int {
	if h.OK {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

// Examination has the results of the checks of "dlqd doctor".
type Examination struct {
	OK       bool             `json:"ok" doc:"Whether all checks passed."`
	Findings []doctor.Finding `json:"findings" doc:"Results of the checks."`
}

// StatusOutputBody says that a check passed.
type StatusOutputBody struct {
	Status string `json:"status" doc:"Always ok." example:"ok"`
}

// Operations that examine the program.
var (
	GetHealth = Operation[None, Health]{"get-health", http.MethodGet, "/api/health"}
	Examine   = Operation[None, Examination]{"examine", http.MethodPost, "/api/doctor"}
	Livez     = Operation[None, StatusOutputBody]{"livez", http.MethodGet, "/livez"}
	Readyz    = Operation[None, StatusOutputBody]{"readyz", http.MethodGet, "/readyz"}
)

func (s *service) registerOperations(api huma.API) {
	tags := []string{operationsTag}
	health := huma.Operation{
		Tags:    tags,
		Summary: "Get the health of dlqd's components and of the queues",
		Description: "Answers 503, with the same body, while a component does not work. The health of queues is a few " +
			"seconds old.",
		Errors: []int{503},
	}
	example(&health, http.StatusOK,
		Health{OK: true, Parts: []Part{{Name: "database", OK: true, Detail: "answered in 0.4 ms"}}, Queues: []QueueHealth{{
			Queue: "payment-processing", Status: "down", Reasons: []string{"size 127 exceeds 100"},
			Warnings: []string{}, Open: 127, OldestSeconds: 840, MaxOpen: 100, MaxAgeSeconds: 1800,
		}}})
	register(s, api, GetHealth, health, func(ctx context.Context, _ *None) (*Health, error) {
		out := &Health{OK: true, Parts: s.Health(ctx), Queues: s.Queues(ctx)}
		for _, part := range out.Parts {
			out.OK = out.OK && part.OK
		}
		return out, nil
	})

	examine := huma.Operation{
		Tags:    tags,
		Summary: "Run the checks of dlqd doctor",
		Description: "Runs the checks of \"dlqd doctor\", except for those of the policy's files, and recommends fixes. " +
			"It changes nothing and takes seconds. Answers 409 while another run is in progress.",
		Errors: []int{http.StatusConflict, http.StatusServiceUnavailable},
	}
	example(&examine, http.StatusOK,
		Examination{OK: true, Findings: []doctor.Finding{{Name: "triggers", OK: true, Detail: "are there, and enabled"}}})
	register(s, api, Examine, examine, func(ctx context.Context, _ *None) (*Examination, error) {
		if !s.examining.TryLock() {
			return nil, huma.Error409Conflict("another run of the checks is in progress; try again")
		}
		defer s.examining.Unlock()
		out := &Examination{OK: true, Findings: s.Examine(ctx)}
		for _, f := range out.Findings {
			out.OK = out.OK && f.OK
		}
		return out, nil
	})

	live := huma.Operation{
		Tags:    tags,
		Summary: "Check that the process runs; restart it if this does not answer",
		Errors:  []int{http.StatusUnprocessableEntity, http.StatusServiceUnavailable},
	}
	example(&live, http.StatusOK, map[string]string{"status": "ok"})
	register(s, api, Livez, live, func(context.Context, *None) (*StatusOutputBody, error) {
		return &StatusOutputBody{"ok"}, nil
	})

	ready := huma.Operation{
		Tags: tags,
		Summary: "Check that the process can serve requests; it cannot while it starts or stops, or while the database " +
			"does not answer",
		Errors: []int{http.StatusUnprocessableEntity, http.StatusServiceUnavailable},
	}
	example(&ready, http.StatusOK, map[string]string{"status": "ok"})
	register(s, api, Readyz, ready, func(ctx context.Context, _ *None) (*StatusOutputBody, error) {
		err := s.Ready()
		if err == nil {
			err = s.Reach(ctx)
		}
		if err != nil {
			return nil, huma.Error503ServiceUnavailable(err.Error())
		}
		return &StatusOutputBody{"ok"}, nil
	})
}
