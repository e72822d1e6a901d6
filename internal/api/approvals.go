package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// ApprovalsPath is the path of requests for approval.
const ApprovalsPath = "/api/dlq/approvals"

// Asked is the response to an operation that requires a second person. The operation was not carried out; a request for
// approval waits instead.
type Asked struct {
	Approval *approval.Approval `json:"approval" doc:"The request for approval, which another person must approve."`
	Existing bool               `json:"existing,omitempty" doc:"Whether the request waited already: it is for the same operation, and no second one was made."`
}

// ApprovalRequestedError is the error for [Asked]. The function that carries out an operation returns this error
// instead of an answer. [Operation.Answer] returns it to the caller of the operation.
type ApprovalRequestedError struct{ Asked }

func (a *ApprovalRequestedError) Error() string {
	return "requires a second person: approval " + a.Approval.ID.String()
}

// GetStatus implements huma.StatusError.
func (a *ApprovalRequestedError) GetStatus() int { return http.StatusAccepted }

// approvalOrProblem returns the response to an operation that was refused with an error. If the operation requires
// approval, approvalOrProblem creates the request for approval.
func (s *service) approvalOrProblem(ctx context.Context, refusal error, operation string, request any,
	action *Action,
) error {
	if !errors.Is(deadletter.AsMoveError(refusal), deadletter.ErrApproval) {
		return s.problem(ctx, refusal)
	}
	a, existing, err := s.Approvals.Request(ctx, operation, request, action.person(ctx))
	if err != nil {
		return s.problem(ctx, err)
	}
	return huma.ErrorWithHeaders(&ApprovalRequestedError{Asked{a, existing}},
		http.Header{"Location": {ApprovalsPath + "/" + a.ID.String()}})
}

// person returns the caller of a request as an approval.Person, with the note of the action.
func (a *Action) person(ctx context.Context) approval.Person {
	if a == nil {
		a = &Action{}
	}
	p := access.From(ctx)
	by := approval.Person{Act: deadletter.Act{Actor: p.Name, Note: a.Note}, TokenBy: p.TokenBy}
	switch {
	case p.Via == access.ViaNothing && a.Actor == "":
		by.Actor = "api"
	case p.Via == access.ViaNothing:
		by.Actor = a.Actor
	case a.Actor != p.Name:
		by.OnBehalfOf = a.Actor // "" if the action has no actor
		actsFor(ctx, &by.OnBehalfOf)
	}
	return by
}

// checkExpected compares the number of entries that filter selects with expect. If the number exceeds the policy's
// expectAbove, expect is required. If expect is given, it must equal the number.
func (s *service) checkExpected(ctx context.Context, filter json.RawMessage, replay bool, expect *int64) error {
	above := s.Planner().Policy().Access.ExpectAbove
	if expect == nil {
		if n, err := s.Store.CountUpTo(ctx, filter, replay, above+1); err != nil || n <= above {
			if err != nil {
				return s.problem(ctx, err)
			}
			return nil
		}
	}
	n, err := s.Store.Count(ctx, filter, replay)
	switch {
	case err != nil:
		return s.problem(ctx, err)
	case expect == nil && n > above:
		return huma.Error422UnprocessableEntity(
			fmt.Sprintf("the filter selects %d dead letters: above %d, expect must be their number", n, above),
			&huma.ErrorDetail{Location: "body.expect", Message: "is required", Value: n})
	case expect != nil && *expect != n:
		return huma.Error409Conflict(
			fmt.Sprintf("the filter selects %d dead letters, not %d; nothing was changed", n, *expect),
			&huma.ErrorDetail{Location: "body.expect", Message: "is not the number of selected dead letters", Value: n})
	}
	return nil
}

// ApprovalInput names a request for approval.
type ApprovalInput struct {
	ID string `path:"id" format:"uuid" doc:"Id of the request." example:"0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"`
}

// GetApprovalInput names a request for approval.
type GetApprovalInput struct {
	ApprovalInput

	Matches bool `query:"matches" doc:"Count what approving the request would change now, if it waits."`
}

// ApproveAction approves a request.
type ApproveAction struct {
	Action

	Expect int64 `json:"expect" minimum:"0" doc:"Number of entries that the approver saw. If the filter now selects more, the response is 409."`
}

// ApprovalsInput selects requests for approval.
type ApprovalsInput struct {
	State string `query:"state" enum:"requested,approved,done,failed,refused,expired,withdrawn" doc:"Only requests in this state."`
	Limit int    `query:"limit" minimum:"1" maximum:"500" default:"50" doc:"Maximum number of requests."`

	Entries []string `query:"entries" maxItems:"200" doc:"Only requests that wait and select one of these entries now."`
}

// ApprovalsOutputBody lists requests for approval.
type ApprovalsOutputBody struct {
	Approvals []*approval.Approval `json:"approvals" doc:"Requests, latest first."`
}

// ApproveInput is the approval of a request.
type ApproveInput struct {
	ApprovalInput

	Body ApproveAction
}

// DecisionInput is the refusal or withdrawal of a request.
type DecisionInput struct {
	ApprovalInput

	Body *Action
}

// Operations on requests for approval.
var (
	ListApprovals = Operation[ApprovalsInput, ApprovalsOutputBody]{"list-approvals", http.MethodGet, ApprovalsPath}
	GetApproval   = Operation[GetApprovalInput, approval.Approval]{
		"get-approval", http.MethodGet, ApprovalsPath + "/{id}",
	}
	Approve = Operation[ApproveInput, approval.Approval]{
		"approve", http.MethodPost, ApprovalsPath + "/{id}/approve",
	}
	Refuse   = Operation[DecisionInput, approval.Approval]{"refuse", http.MethodPost, ApprovalsPath + "/{id}/refuse"}
	Withdraw = Operation[DecisionInput, approval.Approval]{
		"withdraw", http.MethodPost, ApprovalsPath + "/{id}/withdraw",
	}
)

func (s *service) registerApprovals(api huma.API) {
	tags := []string{"approvals"}
	requested := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	shown := approval.Approval{
		ID: uuid.MustParse(entryExample), Operation: approval.Bulk,
		Request: json.RawMessage(`{"do":"discard","filter":{"queue":["payments"]}}`),
		Entries: 4200, ByQueue: json.RawMessage(`{"payments":4200}`),
		State: approval.Requested, Actor: "kim", RequestedAt: requested, ExpiresAt: requested.Add(24 * time.Hour),
	}
	list := huma.Operation{
		Tags: tags, Summary: "List requests for approval", Errors: []int{422, 503},
	}
	example(&list, http.StatusOK, map[string]any{"approvals": []approval.Approval{shown}})
	register(s, api, ListApprovals, list, func(ctx context.Context, in *ApprovalsInput) (*ApprovalsOutputBody, error) {
		var approvals []*approval.Approval
		var err error
		if len(in.Entries) > 0 {
			ids := make([]uuid.UUID, len(in.Entries))
			for i, text := range in.Entries {
				if ids[i], err = uuid.Parse(text); err != nil {
					return nil, huma.Error422UnprocessableEntity("entries must be ids of dead letters",
						&huma.ErrorDetail{Location: "query.entries", Message: "is not a UUID", Value: text})
				}
			}
			if in.State == "" || in.State == approval.Requested {
				approvals, err = s.Approvals.ListFor(ctx, ids, in.Limit)
			} else { // the selected requests all wait for approval
				approvals = []*approval.Approval{}
			}
		} else {
			approvals, err = s.Approvals.List(ctx, in.State, in.Limit)
		}
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &ApprovalsOutputBody{approvals}, nil
	})

	get := huma.Operation{
		Tags:    tags,
		Summary: "Get a request for approval, with its decision and outcome", Errors: []int{404, 422, 503},
	}
	example(&get, http.StatusOK, shown)
	register(s, api, GetApproval, get, func(ctx context.Context, in *GetApprovalInput) (*approval.Approval, error) {
		a, err := s.approval(ctx, in.ID)
		if err != nil || !in.Matches || a.State != approval.Requested {
			return a, err
		}
		if a.Matches, err = s.Approvals.Matches(ctx, a.ID); err != nil {
			return nil, s.problem(ctx, err)
		}
		return a, nil
	})

	approve := huma.Operation{
		Tags: tags, Summary: "Approve the request of another person",
		Description: "dlqd then executes the operation for exactly the entries that its filter selects now. Answers 409 " +
			"if these are more than expect. The approver needs the role that the operation needs (admin for purge and " +
			"erase) in the whole scope of the requester, and must be another person: not the requester, the person named " +
			"in the request, or the creator of the requester's token.",
		Errors: []int{400, 403, 404, 409, 422, 503},
	}
	example(&approve, http.StatusOK, shown)
	register(s, api, Approve, approve, func(ctx context.Context, in *ApproveInput) (*approval.Approval, error) {
		return s.decide(ctx, in.ID, &in.Body.Action, func(ctx context.Context, id uuid.UUID, by approval.Person) error {
			return s.Approvals.Approve(ctx, id, in.Body.Expect, by)
		})
	})
	for _, verb := range []struct {
		operation Operation[DecisionInput, approval.Approval]
		summary   string
		do        func(context.Context, uuid.UUID, deadletter.Act) error
	}{
		{Refuse, "Refuse a request for approval", func(ctx context.Context, id uuid.UUID, by deadletter.Act) error {
			return s.Approvals.Refuse(ctx, id, by)
		}},
		{
			Withdraw, "Withdraw a request for approval that the caller made",
			func(ctx context.Context, id uuid.UUID, by deadletter.Act) error {
				return s.Approvals.Withdraw(ctx, id, by)
			},
		},
	} {
		op := huma.Operation{Tags: tags, Summary: verb.summary, Errors: []int{400, 403, 404, 409, 422, 503}}
		example(&op, http.StatusOK, shown)
		register(s, api, verb.operation, op, func(ctx context.Context, in *DecisionInput) (*approval.Approval, error) {
			return s.decide(ctx, in.ID, in.Body,
				func(ctx context.Context, id uuid.UUID, by approval.Person) error { return verb.do(ctx, id, by.Act) })
		})
	}
	s.describeApprovals(api, shown)
}

// describeApprovals documents the response of operations that may require approval.
func (s *service) describeApprovals(api huma.API, shown approval.Approval) {
	document := api.OpenAPI()
	schema := document.Components.Schemas.Schema(reflect.TypeFor[Asked](), true, "Asked")
	for _, path := range []string{
		"/api/dlq/bulk", "/api/dlq/replay", "/api/dlq/erasures", "/api/dlq/export", "/api/dlq/entries/{id}/replay",
		"/api/dlq/entries/{id}/discard", "/api/dlq/entries/{id}/expire", "/api/dlq/entries/{id}/resolve",
		"/api/dlq/entries/{id}/unpark", "/api/jobs/{id}/cancel",
	} {
		operation := document.Paths[path].Post
		operation.Description += " If the operation needs a second person (access.yaml: approvals), nothing is changed, " +
			"and the response is 202 with the request for approval, whose address is in Location."
		status := strconv.Itoa(http.StatusAccepted)
		response := operation.Responses[status]
		if response == nil {
			response = &huma.Response{
				Description: "The operation needs a second person: approval was requested",
				Content: map[string]*huma.MediaType{
					"application/json": {Schema: schema, Example: Asked{Approval: &shown}},
				},
			}
			operation.Responses[status] = response
		} else {
			content := response.Content["application/json"]
			content.Schema = &huma.Schema{OneOf: []*huma.Schema{content.Schema, schema}}
		}
		if response.Headers == nil {
			response.Headers = map[string]*huma.Param{}
		}
		response.Headers["Location"] = &huma.Param{
			Description: "Address of the request for approval", Schema: &huma.Schema{Type: "string"},
		}
	}
}

func (s *service) approval(ctx context.Context, id string) (*approval.Approval, error) {
	// huma has checked the format.
	a, err := s.Approvals.Get(ctx, uuid.MustParse(id))
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return a, nil
}

// decide calls do for a request for approval. It requires authentication. If the requested operation requires admin,
// decide does, too.
func (s *service) decide(ctx context.Context, id string, action *Action,
	do func(context.Context, uuid.UUID, approval.Person) error,
) (*approval.Approval, error) {
	out, err := s.approval(ctx, id)
	if err != nil {
		return nil, err
	}
	p := access.From(ctx)
	if p.Via == access.ViaNothing {
		return nil, huma.Error403Forbidden(
			"authentication is off (access.yaml: authentication): approvals need authenticated callers")
	}
	if admin, everywhere := out.Needs(); admin {
		if ctx, err = s.limitTo(ctx, need{access.Admin, !everywhere}); err != nil {
			return nil, err
		}
	}
	action.act(ctx) // records on whose behalf the caller acts
	actsFor(ctx, &out.Actor, out.OnBehalfOf, out.TokenBy)
	if err := do(ctx, out.ID, action.person(ctx)); err != nil {
		return nil, s.problem(ctx, err)
	}
	return s.approval(ctx, id)
}
