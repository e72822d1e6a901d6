package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// OperationInput names an operator's action on one or many entries.
type OperationInput struct {
	ID string `path:"id" format:"uuid" doc:"Id of the operation: the field undo of its response." example:"0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"`
}

// OperationDetail is an operator's action and its entries.
type OperationDetail struct {
	deadletter.Operation

	Entries []deadletter.Touched `json:"entries" doc:"A page of the operation's entries, in order of capture. Up to 10,000 entries that it left unchanged are recorded."`
	Next    string               `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// GetOperationInput names an operation and a page of its entries.
type GetOperationInput struct {
	OperationInput

	Cursor string `query:"cursor" format:"uuid" doc:"next of the previous page."`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Entries in a page."`
}

// UndoInput is a request to undo an operation.
type UndoInput struct {
	OperationInput

	Body *Action
}

// Operations on operators' actions.
var (
	GetOperation = Operation[GetOperationInput, OperationDetail]{
		"get-operation", http.MethodGet, "/api/dlq/operations/{id}",
	}
	Undo = Operation[UndoInput, deadletter.Undone]{"undo", http.MethodPost, "/api/dlq/undo/{id}"}
)

func (s *service) registerUndo(api huma.API) {
	tags := []string{"dead letters"}
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	id := uuid.MustParse(entryExample)
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get an operator's action: its filter, the entries that it changed, and why it left others unchanged",
		Errors:  []int{404, 422, 503},
	}
	example(&get, http.StatusOK, OperationDetail{Operation: deadletter.Operation{
		ID: id, Action: "discard", Filter: []byte(`{"queue":["payments"]}`), Actor: "kim", DBUser: "dlqd", StartedAt: at,
		LastAt: at, Looked: 812, Changed: 810, Unchanged: map[string]int64{"cannot discard from dlq_processing": 2},
	}, Entries: []deadletter.Touched{{ID: id, Changed: true, Reason: "discarded"}}})
	register(s, api, GetOperation, get, func(ctx context.Context, in *GetOperationInput) (*OperationDetail, error) {
		var after *uuid.UUID
		if in.Cursor != "" {
			// huma has checked the format.
			cursor := uuid.MustParse(in.Cursor)
			after = &cursor
		}
		operation, entries, err := s.Store.Operation(ctx, uuid.MustParse(in.ID), after, in.Limit+1)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &OperationDetail{Operation: *operation, Entries: entries}
		if len(entries) > in.Limit {
			out.Entries = entries[:in.Limit]
			out.Next = entries[in.Limit-1].ID.String()
		}
		return out, nil
	})

	undo := huma.Operation{
		Tags:    tags,
		Summary: "Undo an operator's action",
		Description: "Undoes discard, expire, resolve, park, unpark, assign, tag and note, of one dead letter or of many. " +
			"Entries that are still in the state that the action gave them return to the state before it; discarded, expired " +
			"and resolved ones become dlq_manual. Entries that have changed since are left unchanged.",
		Errors: []int{400, 404, 409, 422, 503},
	}
	example(&undo, http.StatusOK, deadletter.Undone{
		Operation: id, Looked: 810, Changed: 808, Became: map[string]int64{"dlq_manual": 808},
	})
	register(s, api, Undo, undo, func(ctx context.Context, in *UndoInput) (*deadletter.Undone, error) {
		undone, err := s.Store.Undo(ctx, uuid.MustParse(in.ID), in.Body.act(ctx))
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return undone, nil
	})
}
