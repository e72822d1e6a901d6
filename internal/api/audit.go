package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// AuditInput selects acts of the audit trail.
type AuditInput struct {
	Actor         string `query:"actor" doc:"Only acts of this person or worker."`
	People        bool   `query:"people" doc:"Only acts of people, not of dlqd itself."`
	DBUser        string `query:"dbUser" doc:"Only acts of this database user."`
	Origin        string `query:"origin" doc:"Only acts whose origin contains this text, such as an address."`
	EntryID       string `query:"entryId" format:"uuid" doc:"Only acts on this entry."`
	Queue         string `query:"queue" doc:"Only acts on entries of this queue."`
	Kind          string `query:"kind" doc:"Only acts on entries of this kind."`
	From          string `query:"from" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"Only changes from this state."`
	To            string `query:"to" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"Only changes to this state."`
	Text          string `query:"text" doc:"Only acts with this text in reason or note."`
	ConfigVersion string `query:"configVersion" doc:"Only acts under this version of the policy."`
	After         string `query:"after" format:"date-time" doc:"Only acts at or after this time."`
	Before        string `query:"before" format:"date-time" doc:"Only acts before this time."`
	Limit         int    `query:"limit" minimum:"1" maximum:"500" default:"50" doc:"Acts in a page."`
	Cursor        string `query:"cursor" pattern:"^[0-9]{1,17}-[0-9]{1,18}$" doc:"next of the previous page."`
	Grouped       bool   `query:"grouped" doc:"One act for each operation of a user, in place of one for each of its entries: reason is its action, detail has its filter and the number of its entries (entries) and of those that it changed (changed). A replay run has only its own acts. Ignored with entryId, queue, kind, from, to or configVersion, and for callers with a scope."`
}

// AuditPage is a page of the audit trail.
type AuditPage struct {
	Moves []deadletter.AuditRow `json:"moves" doc:"Acts, latest first."`
	Next  string                `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// EraseRequest is a request to erase data.
type EraseRequest struct {
	Filter EntryFilter `json:"filter" doc:"Entries to erase, usually by payload, subscriberId or tags."`
	Note   string      `json:"note" minLength:"1" maxLength:"4000" doc:"Reason, such as the number of the request."`
	Actor  string      `json:"actor,omitempty" maxLength:"255" doc:"Without authentication: the actor, \"api\" if absent. With authentication: the person on whose behalf the caller acts."`
	DryRun bool        `json:"dryRun,omitempty" doc:"Only count the entries in the database."`
	Expect *int64      `json:"expect,omitempty" minimum:"0" doc:"Expected number of entries in the database: required above the policy's expectAbove. A different number answers 409."`
}

// EraseAnswer is the record of an erasure, or the count of a dry run.
type EraseAnswer struct {
	deadletter.Erasure

	DryRun bool `json:"dryRun,omitempty" doc:"Whether this was a dry run, which changes nothing: at is the time of the count, entries is the number that the filter selects, and the other fields are empty."`
}

// EraseInput is a request to erase data.
type EraseInput struct{ Body EraseRequest }

// ErasuresOutputBody lists records of erasures.
type ErasuresOutputBody struct {
	Erasures []deadletter.Erasure `json:"erasures" doc:"Erasures, latest first."`
}

// Operations on the audit trail, and erasure.
var (
	SearchAudit  = Operation[AuditInput, AuditPage]{"search-audit", http.MethodGet, "/api/dlq/audit"}
	Erase        = Operation[EraseInput, EraseAnswer]{"erase", http.MethodPost, "/api/dlq/erasures"}
	ListErasures = Operation[LimitInput, ErasuresOutputBody]{"list-erasures", http.MethodGet, "/api/dlq/erasures"}
)

func (s *service) registerAudit(api huma.API) {
	tags := []string{"audit"}
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	id := uuid.MustParse("01980000-0000-7000-8000-000000000000")
	archived, queue, kind := deadletter.Archived, "default", "payment.captured"
	why, from := "discarded", "API, from 10.0.0.7 (curl/8.14.1)"
	search := huma.Operation{
		Tags:    tags,
		Summary: "Search the audit trail", Errors: []int{422, 503},
	}
	example(&search, http.StatusOK,
		AuditPage{Moves: []deadletter.AuditRow{{
			ID: 7, At: noon, Actor: "kim", DBUser: "dlqd", Origin: &from, EntryID: &id,
			ToStatus: &archived, Reason: &why, Queue: &queue, Kind: &kind,
		}}})
	register(s, api, SearchAudit, search, s.searchAudit)

	erase := huma.Operation{
		Tags:    tags,
		Summary: "Erase personal data from entries, their jobs and the archive",
		Description: "Erases payloads, error texts, metadata, subscribers, tags and notes of the selected open and " +
			"closed entries, and archives open and failed ones. The record of the erasure does not say whose data it was. " +
			"Entries with a redelivery in progress are skipped and counted: erase again when it has ended. The answer says " +
			"which rows stay that may name the person. Answers when all is done; repeat an interrupted request.",
		Errors: []int{409, 422, 503},
	}
	record := deadletter.Erasure{
		ID: id, At: noon, Actor: "kim", DBUser: "dlqd",
		FilterSHA256: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		Fields:       []string{"payload"}, Entries: 3, Jobs: 2,
	}
	erased := record
	erased.Leaves = []deadletter.Leaves{{
		Table: "rollup_sources", Columns: []string{"source"}, Rows: 3,
		Query: "SELECT t.* FROM dlq.rollup_sources t WHERE t.source IN (…)",
	}}
	example(&erase, http.StatusOK, EraseAnswer{Erasure: erased})
	register(s, api, Erase, erase, s.erase)

	list := huma.Operation{
		Tags:    tags,
		Summary: "List the records of erasures", Errors: []int{422, 503},
	}
	example(&list, http.StatusOK, map[string]any{"erasures": []deadletter.Erasure{record}})
	register(s, api, ListErasures, list, func(ctx context.Context, in *LimitInput) (*ErasuresOutputBody, error) {
		erasures, err := s.Store.Erasures(ctx, in.Limit)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &ErasuresOutputBody{erasures}, nil
	})
}

func (s *service) searchAudit(ctx context.Context, in *AuditInput) (*AuditPage, error) {
	f := deadletter.AuditFilter{
		Actor: in.Actor, People: in.People, DBUser: in.DBUser,
		Origin: in.Origin, EntryID: in.EntryID, Queue: in.Queue, Kind: in.Kind,
		From: in.From, To: in.To, Text: in.Text, ConfigVersion: in.ConfigVersion,
		Grouped: in.Grouped,
	}
	f.After, f.Before = timeOf(in.After), timeOf(in.Before)
	var cursor deadletter.AuditCursor
	// The cursor is microseconds and id; huma has checked its format.
	if at, id, found := strings.Cut(in.Cursor, "-"); found {
		us, _ := strconv.ParseInt(at, 10, 64)
		cursor.At = time.UnixMicro(us)
		cursor.ID, _ = strconv.ParseInt(id, 10, 64)
	}
	moves, err := s.Store.Audit(ctx, f, in.Limit+1, cursor)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	page := &AuditPage{Moves: moves}
	if len(moves) > in.Limit {
		page.Moves = moves[:in.Limit]
		last := page.Moves[in.Limit-1]
		page.Next = fmt.Sprintf("%d-%d", last.At.UnixMicro(), last.ID)
	}
	return page, nil
}

// timeOf returns the time in a parameter, or nil if the parameter is absent. huma has checked the format.
func timeOf(text string) *time.Time {
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return nil
	}
	return &at
}

func (s *service) erase(ctx context.Context, in *EraseInput) (*EraseAnswer, error) {
	filter, err := in.Body.Filter.resolve(ctx)
	if err != nil {
		return nil, err
	}
	if all, err := s.Store.SelectsAll(ctx, filter); err != nil {
		return nil, s.problem(ctx, err)
	} else if all {
		return nil, huma.Error422UnprocessableEntity("an empty filter selects all data", &huma.ErrorDetail{
			Location: "body.filter", Message: "select the person's data by payload, subscriberId or tags",
		})
	}
	if in.Body.DryRun {
		markUnchanged(ctx)
		rows, err := s.Store.Preview(ctx, filter)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &EraseAnswer{Erasure: deadletter.Erasure{At: time.Now(), Fields: []string{}}, DryRun: true}
		for _, row := range rows {
			out.Entries += row.Entries
		}
		return out, nil
	}
	if err := s.checkExpected(ctx, filter, false, in.Body.Expect); err != nil {
		return nil, err
	}
	action := &Action{Actor: in.Body.Actor, Note: in.Body.Note}
	record, err := archive.EraseEverywhere(ctx, s.Store, s.Archive, filter, action.act(ctx))
	switch {
	case errors.Is(err, archive.ErrIncomplete):
		s.Logger.Error("erasing archives failed", "error", err)
		return nil, huma.Error503ServiceUnavailable(archive.ErrIncomplete.Error() + "; dlqd's log has the cause")
	case err != nil:
		return nil, s.approvalOrProblem(ctx, err, approval.Erase, approval.Erasure{Filter: filter}, action)
	}
	return &EraseAnswer{Erasure: record}, nil
}
