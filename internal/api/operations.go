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
	// Queues does not affect OK: a queue over its limits does not mean that dlqd fails.
	Queues []QueueHealth `json:"queues" doc:"Health of each queue of the policy, and of other queues with open dead letters. A queue that is down does not make ok false, because dlqd itself works. Empty while the database does not answer."`
}

type healthOutput struct {
	Status int
	Body   Health
}

// Examination is the result of doctor's checks.
type Examination struct {
	OK       bool             `json:"ok" doc:"Whether all checks passed."`
	Findings []doctor.Finding `json:"findings" doc:"Results of the checks."`
}

type examinationOutput struct{ Body Examination }

type statusOutput struct {
	Body struct {
		Status string `json:"status" doc:"Always ok." example:"ok"`
	}
}

func (s *service) registerOperations(api huma.API) {
	tags := []string{operationsTag}
	health := huma.Operation{
		OperationID: "get-health", Method: http.MethodGet, Path: "/api/health", Tags: tags,
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
	huma.Register(api, health, func(ctx context.Context, _ *struct{}) (*healthOutput, error) {
		out := &healthOutput{Status: http.StatusOK, Body: Health{OK: true, Parts: s.Health(ctx), Queues: s.Queues(ctx)}}
		for _, part := range out.Body.Parts {
			if !part.OK {
				out.Status, out.Body.OK = http.StatusServiceUnavailable, false
			}
		}
		return out, nil
	})

	examine := huma.Operation{
		OperationID: "examine", Method: http.MethodPost, Path: "/api/doctor", Tags: tags,
		Summary: "Run the checks of dlqd doctor",
		Description: "Runs the checks of \"dlqd doctor\", except for those of the policy's files, and recommends fixes. " +
			"It changes nothing and takes seconds. Answers 409 while another run is in progress.",
		Errors: []int{http.StatusConflict, http.StatusServiceUnavailable},
	}
	example(&examine, http.StatusOK,
		Examination{OK: true, Findings: []doctor.Finding{{Name: "triggers", OK: true, Detail: "are there, and enabled"}}})
	huma.Register(api, examine, func(ctx context.Context, _ *struct{}) (*examinationOutput, error) {
		if !s.examining.TryLock() {
			return nil, huma.Error409Conflict("another run of the checks is in progress; try again")
		}
		defer s.examining.Unlock()
		out := &examinationOutput{Body: Examination{OK: true, Findings: s.Examine(ctx)}}
		for _, f := range out.Body.Findings {
			out.Body.OK = out.Body.OK && f.OK
		}
		return out, nil
	})

	live := huma.Operation{
		OperationID: "livez", Method: http.MethodGet, Path: "/livez", Tags: tags,
		Summary: "Check that the process runs; restart it if this does not answer",
		Errors:  []int{http.StatusUnprocessableEntity, http.StatusServiceUnavailable},
	}
	example(&live, http.StatusOK, map[string]string{"status": "ok"})
	huma.Register(api, live, func(context.Context, *struct{}) (*statusOutput, error) {
		out := &statusOutput{}
		out.Body.Status = "ok"
		return out, nil
	})

	ready := huma.Operation{
		OperationID: "readyz", Method: http.MethodGet, Path: "/readyz", Tags: tags,
		Summary: "Check that the process can serve requests; it cannot while it starts or stops, or while the database " +
			"does not answer",
		Errors: []int{http.StatusUnprocessableEntity, http.StatusServiceUnavailable},
	}
	example(&ready, http.StatusOK, map[string]string{"status": "ok"})
	huma.Register(api, ready, func(ctx context.Context, _ *struct{}) (*statusOutput, error) {
		err := s.Ready()
		if err == nil {
			err = s.Reach(ctx)
		}
		if err != nil {
			return nil, huma.Error503ServiceUnavailable(err.Error())
		}
		out := &statusOutput{}
		out.Body.Status = "ok"
		return out, nil
	})
}
