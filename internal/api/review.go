package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
)

// reviewTag is the tag of the operation that hands out dead letters.
const reviewTag = "review"

// reviewCandidates is the number of dead letters from which one is handed out. The other operators may each have one of
// them in review.
const reviewCandidates = 50

// ReviewRequest selects the dead letter that is handed out.
type ReviewRequest struct {
	Q     string `json:"q,omitempty" maxLength:"4096" doc:"Only dead letters that this filter selects (docs/filter.md), without a state: those in dlq_manual are handed out." example:"queue:payments age:<2d"`
	Entry string `json:"entry,omitempty" format:"uuid" doc:"Only this one."`
	After string `json:"after,omitempty" format:"uuid" doc:"The next one after this entry, in order of capture; the oldest if there is none."`
	Actor string `json:"actor,omitempty" maxLength:"255" doc:"The operator, if authentication is off; \"api\" if absent." example:"lee"`
}

// ReviewInput is a request to hand out a dead letter.
type ReviewInput struct{ Body *ReviewRequest }

// HandedOut is the dead letter that was handed out.
type HandedOut struct {
	ID *uuid.UUID `json:"id,omitempty" doc:"Id of the entry; absent if none is left, or if other operators have all in review."`
}

// ReviewNext hands out a dead letter to the caller.
var ReviewNext = Operation[ReviewInput, HandedOut]{"review-next", http.MethodPost, "/api/dlq/review"}

func (s *service) registerReview(api huma.API) {
	next := huma.Operation{
		Tags:    []string{reviewTag},
		Summary: "Hand out the next dead letter that needs a person",
		Description: "Operators who work at the same time get different dead letters. The field review of an entry " +
			"says who has it. Any operator can act on it: a review is no lock.",
		Errors: []int{400, 422, 503},
	}
	id := uuid.MustParse(entryExample)
	example(&next, http.StatusOK, HandedOut{ID: &id})
	register(s, api, ReviewNext, next, s.reviewNext)
}

func (s *service) reviewNext(ctx context.Context, in *ReviewInput) (*HandedOut, error) {
	asked := in.Body
	if asked == nil {
		asked = &ReviewRequest{}
	}
	chosen := filter.Filter{Status: []string{string(deadletter.Manual)}}
	if asked.Entry != "" {
		chosen.IDs = []string{uuid.MustParse(asked.Entry).String()} // huma has checked the format
	}
	chosen, err := mergeText(ctx, chosen, "body.q", asked.Q)
	if err != nil {
		return nil, err
	}
	page := deadletter.Page{Filter: chosen, Oldest: true, Limit: reviewCandidates}
	if asked.After != "" {
		page.Cursor = uuid.MustParse(asked.After)
	}
	actor := (&Action{Actor: asked.Actor}).person(ctx).Actor
	for {
		found, err := s.Store.Search(ctx, page, searchBudget)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		ids := make([]uuid.UUID, len(found.Entries))
		for i := range found.Entries {
			ids[i] = found.Entries[i].ID
		}
		id, err := s.Store.ReviewNext(ctx, ids, actor)
		switch {
		case err != nil:
			return nil, s.problem(ctx, err)
		case id != uuid.Nil:
			return &HandedOut{ID: &id}, nil
		case page.Cursor == uuid.Nil:
			return &HandedOut{}, nil
		}
		page.Cursor = uuid.Nil
	}
}
