package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/worker"
)

// ReclassifyAction is a request to classify open entries again.
type ReclassifyAction struct {
	Action

	DryRun bool `json:"dryRun,omitempty" doc:"Only return what would change."`
}

// ReclassifyInput is a request to classify open entries again.
type ReclassifyInput struct{ Body *ReclassifyAction }

// Reclassify classifies open entries again.
var Reclassify = Operation[ReclassifyInput, worker.Reclassified]{
	"reclassify", http.MethodPost, "/api/dlq/reclassify",
}

func (s *service) registerReclassify(api huma.API) {
	reclassify := huma.Operation{
		Tags:    []string{"dead letters"},
		Summary: "Classify open dead letters again by the rules in force",
		Description: "Skips dead letters that an operator has parked or that are being redelivered. Answers when all " +
			"are done; an interrupted request has classified part of them.",
		Errors: []int{400, 422, 503},
	}
	judged := worker.Rejudged{
		From: worker.Judgement{Class: "unknown", Rule: "none", Strategy: "manual"}, To: worker.Judgement{
			Class: "transient", Rule: "bank-hiccup", Strategy: "immediate",
		}, Also: []string{"priority", "nextRetryAt"}, Entries: 812,
	}
	example(&reclassify, http.StatusOK, worker.Reclassified{
		DryRun: true, Looked: 4021, Changed: []worker.Rejudged{judged},
	})
	register(s, api, Reclassify, reclassify, s.reclassify)
}

func (s *service) reclassify(ctx context.Context, in *ReclassifyInput) (*worker.Reclassified, error) {
	if in.Body == nil {
		in.Body = &ReclassifyAction{}
	}
	if in.Body.DryRun {
		markUnchanged(ctx)
	}
	result, err := worker.Reclassify(ctx, s.Store, s.Planner(), in.Body.act(ctx), in.Body.DryRun)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	if len(result.Parked) > 0 && s.Parked != nil {
		s.Parked(result.Parked)
	}
	return result, nil
}
