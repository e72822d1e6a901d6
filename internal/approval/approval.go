// Package approval implements operations that need a second person: requests, decisions, and the runner that executes
// approved requests. The database decides by the policy which operations need an approval (dlq.require_approval).
package approval

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/approval/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
)

// Operations that can be requested.
const (
	Replay = "replay" // a [replay.Request]
	Bulk   = "bulk"   // a [deadletter.Bulk]
	Erase  = "erase"  // an [Erasure]
	Cancel = "cancel" // a [Cancellation]
	Export = "export" // an [Exporting]
)

// States of a request. [Approval] lists all of them.
const (
	Requested = "requested"
	Approved  = "approved" // approved, but not executed completely yet
	Expired   = "expired"
)

// Erasure is the request of an [Erase] operation.
type Erasure struct {
	Filter json.RawMessage `json:"filter"`
}

// Cancellation is the request of a [Cancel] operation.
type Cancellation struct {
	Job int64 `json:"job"`
}

// Exporting is the request of an [Export] operation.
type Exporting struct {
	Filter json.RawMessage `json:"filter"`
	Reveal bool            `json:"reveal,omitempty"`
	All    bool            `json:"all"` // required if the filter is empty, which selects every entry
}

// ExportPeriod is how long the requester may download an approved export.
const ExportPeriod = 24 * time.Hour

// MayExport returns the approved export, or an error if the caller may not download it. Only the requester may download
// it, within [ExportPeriod] after the approval was carried out.
func (a *Approval) MayExport(actor string) (*Exporting, error) {
	refused := func(kind error, detail, hint string) error {
		return &deadletter.MoveError{Kind: kind, Detail: fmt.Sprintf("approval %s: %s", a.ID, detail), Hint: hint}
	}
	var request Exporting
	switch {
	case a.Operation != Export:
		return nil, refused(deadletter.ErrInvalid, "is not for an export", "")
	case !strings.EqualFold(a.Actor, actor):
		return nil, refused(deadletter.ErrForbidden, "only the requester "+a.Actor+" can download the export", "")
	case a.State != "done" || a.EndedAt == nil:
		return nil, refused(deadletter.ErrNotAllowed, "the export is not approved: the request is "+a.State, "")
	case time.Since(*a.EndedAt) > ExportPeriod:
		return nil, refused(deadletter.ErrNotAllowed, "the export was approved more than a day ago", "Request it again.")
	}
	return &request, json.Unmarshal(a.Request, &request)
}

// Approval is a request for an operation, with its decision and its outcome.
type Approval struct {
	ID          uuid.UUID       `json:"id" doc:"Id of the request."`
	Operation   string          `json:"operation" enum:"replay,bulk,erase,cancel,export" doc:"Operation: a replay run, a bulk action, an erasure, the cancellation of a job (the one entry of its request), or an export."`
	Request     json.RawMessage `json:"request" doc:"The complete request: its filter and the other parameters of the operation."`
	Entries     int64           `json:"entries" doc:"Number of entries that the filter selected when approval was requested."`
	ByQueue     json.RawMessage `json:"byQueue" doc:"Number of entries by queue."`
	Skips       policy.Skips    `json:"skips,omitzero" doc:"For a replay run: what it will skip because the policy said so at the request, and the request does not say otherwise."`
	State       string          `json:"state" enum:"requested,approved,done,failed,refused,expired,withdrawn" doc:"requested, until it is decided or expires; approved, until the operation is done or failed; refused, withdrawn, expired."`
	Actor       string          `json:"actor" doc:"The requester, who is also the actor of the approved operation."`
	OnBehalfOf  *string         `json:"onBehalfOf,omitempty" doc:"Person on whose behalf the requester acts."`
	TokenBy     *string         `json:"tokenBy,omitempty" doc:"Who created the token with which the request was made."`
	Note        string          `json:"note,omitempty" doc:"Reason for the request."`
	RequestedAt time.Time       `json:"requestedAt" doc:"When approval was requested."`
	ExpiresAt   time.Time       `json:"expiresAt" doc:"When the request expires."`
	DecidedBy   *string         `json:"decidedBy,omitempty" doc:"Who approved, refused or withdrew the request."`
	DecidedAt   *time.Time      `json:"decidedAt,omitempty" doc:"When the request was approved, refused or withdrawn."`
	Decision    string          `json:"decision,omitempty" doc:"Note of that person."`
	Frozen      *int64          `json:"frozen,omitempty" doc:"Number of entries that the filter selected at approval. The operation acts only on these."`
	Changed     *int64          `json:"changed,omitempty" doc:"Number of these entries that the operation changed. The others had changed state in the meantime."`
	Outcome     *uuid.UUID      `json:"outcome,omitempty" doc:"The replay run or the erasure that was started."`
	Problem     string          `json:"problem,omitempty" doc:"Why the operation failed."`
	EndedAt     *time.Time      `json:"endedAt,omitempty" doc:"When the request was done, failed, was refused or withdrawn, or expired."`
	Selects     []uuid.UUID     `json:"selects,omitempty" doc:"With entries: those of them that the request selects now."`
	Matches     *Matches        `json:"matches,omitempty" doc:"With matches: what approving the request would change now."`
}

// Matches is what the operation would change if the request was approved now.
type Matches struct {
	Entries int64            `json:"entries" doc:"Number of entries that the operation would change."`
	Arrived int64            `json:"arrived" doc:"How many of them were captured after the request."`
	Closed  map[string]int64 `json:"closed" doc:"Number of entries that the request selected before and that were closed since, by their state."`
}

// Do returns the requested operation. For a bulk operation, it returns the action, such as "discard".
func (a *Approval) Do() string {
	var bulk deadletter.Bulk
	if a.Operation == Bulk && json.Unmarshal(a.Request, &bulk) == nil {
		return bulk.Action
	}
	return a.Operation
}

// SkipTexts describes the work that the requested replay run skips or sends because its request says so and, where the
// request says nothing, the work that the policy skips. It returns nil if the request is not for a replay run.
func (a *Approval) SkipTexts() []string {
	var request replay.Request
	if a.Operation != Replay || json.Unmarshal(a.Request, &request) != nil {
		return nil
	}
	return replay.SkipTexts(a.Skips, request.SkipStale, request.SkipSuperseded)
}

// Job returns the id of the job that the request asks to cancel, or 0.
func (a *Approval) Job() int64 {
	var request Cancellation
	if a.Operation == Cancel {
		_ = json.Unmarshal(a.Request, &request)
	}
	return request.Job
}

// Needs reports whether the approver needs the role admin instead of operator, and whether the approver needs that role
// for every queue and kind.
func (a *Approval) Needs() (admin, everywhere bool) {
	return a.Operation == Erase || a.Do() == "purge", a.Operation == Erase
}

// RequestedBy reports whether a person counts as the requester, and therefore cannot approve the request. The
// requester, the person on whose behalf the request was made, and the creator of the requester's token count as the
// requester. So does a person who uses a token that the requester created. RequestedBy is for the console; the database
// decides (dlq.require_second_person).
func (a *Approval) RequestedBy(name, tokenBy string) bool {
	for _, requester := range []*string{&a.Actor, a.OnBehalfOf, a.TokenBy} {
		if requester != nil && strings.EqualFold(*requester, name) {
			return true
		}
	}
	return strings.EqualFold(tokenBy, a.Actor)
}

// Person is the person who requests or decides.
type Person struct {
	deadletter.Act

	OnBehalfOf string
	TokenBy    string // the creator of the token with which the person is signed in
}

// Store reads and writes requests.
type Store struct {
	Store *deadletter.Store
	// Wake, if not nil, is called after an approval, to wake the [Runner] of this process. Without Wake, a runner starts
	// the request within a second.
	Wake func()
}

func (s *Store) inTx(ctx context.Context, fn func(q *dbsqlc.Queries) error) error {
	return deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error { return fn(dbsqlc.New(tx)) }))
}

// RequireForCancel returns an error ([deadletter.ErrApproval]) if the policy requires a second person to cancel a job.
func RequireForCancel(ctx context.Context, tx postgres.DB, job int64) error {
	return deadletter.AsMoveError(dbsqlc.New(tx).RequireForCancel(ctx, job))
}

// Request creates a request for an operation. If an equal request waits already, Request returns that request, and
// existing is true.
func (s *Store) Request(ctx context.Context, operation string, request any, by Person) (a *Approval, existing bool,
	err error,
) {
	raw, err := json.Marshal(request)
	if err != nil {
		return nil, false, err
	}
	var row dbsqlc.RequestApprovalRow
	if err := s.inTx(ctx, func(q *dbsqlc.Queries) (err error) {
		row, err = q.RequestApproval(ctx, dbsqlc.RequestApprovalParams{
			Operation: operation, Request: raw, Note: by.Note, Actor: by.Actor, OnBehalfOf: by.OnBehalfOf, TokenBy: by.TokenBy,
		})
		if run, ok := request.(*replay.Request); ok && err == nil && run.Forecast != nil {
			var forecast []byte
			if forecast, err = json.Marshal(run.Forecast); err == nil {
				err = q.ForecastApproval(ctx, dbsqlc.ForecastApprovalParams{ID: row.ID, Forecast: forecast})
			}
		}
		return err
	}); err != nil {
		return nil, false, err
	}
	a, err = s.Get(ctx, row.ID)
	return a, row.Existing, err
}

// Approve approves a request for the entries that the request's filter selects now. It returns an error if these are
// more than expect, or if the approver counts as the requester.
func (s *Store) Approve(ctx context.Context, id uuid.UUID, expect int64, by Person) error {
	if s.Wake != nil {
		defer s.Wake()
	}
	return s.inTx(ctx, func(q *dbsqlc.Queries) error {
		return q.Approve(ctx, dbsqlc.ApproveParams{
			ID: id, Expect: expect, Note: by.Note, Actor: by.Actor, OnBehalfOf: by.OnBehalfOf, TokenBy: by.TokenBy,
		})
	})
}

// Refuse refuses a request that waits.
func (s *Store) Refuse(ctx context.Context, id uuid.UUID, by deadletter.Act) error {
	return s.inTx(ctx, func(q *dbsqlc.Queries) error {
		return q.Refuse(ctx, dbsqlc.RefuseParams{ID: id, Note: by.Note, Actor: by.Actor})
	})
}

// Withdraw withdraws a request. Only the person who made the request, or on whose behalf it was made, can withdraw it.
func (s *Store) Withdraw(ctx context.Context, id uuid.UUID, by deadletter.Act) error {
	return s.inTx(ctx, func(q *dbsqlc.Queries) error {
		return q.Withdraw(ctx, dbsqlc.WithdrawParams{ID: id, Note: by.Note, Actor: by.Actor})
	})
}

// Get returns a request, or an error ([deadletter.ErrNotFound]) if there is none in the caller's scope.
func (s *Store) Get(ctx context.Context, id uuid.UUID) (*Approval, error) {
	list, err := s.find(ctx, dbsqlc.ApprovalsParams{ID: &id, Most: 1})
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, &deadletter.MoveError{
			Kind: deadletter.ErrNotFound, Detail: fmt.Sprintf("approval %s: request not found", id),
		}
	}
	return list[0], nil
}

// Version returns a text that changes whenever any request is made, decided or ended.
func (s *Store) Version(ctx context.Context) (string, error) {
	return dbsqlc.New(s.Store.DB()).Version(ctx)
}

// Matches counts what the operation would change if a waiting request was approved now.
func (s *Store) Matches(ctx context.Context, id uuid.UUID) (*Matches, error) {
	row, err := dbsqlc.New(s.Store.DB()).Matches(ctx, id)
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	m := &Matches{Entries: row.Entries, Arrived: row.Arrived}
	return m, json.Unmarshal(row.Closed, &m.Closed)
}

// List returns the requests in a state, or all requests if state is "", latest first, at most limit.
func (s *Store) List(ctx context.Context, state string, limit int) ([]*Approval, error) {
	return s.find(ctx, dbsqlc.ApprovalsParams{State: state, Most: int32(limit)})
}

// ListFor returns the waiting requests that select one of the given entries now, latest first, at most limit. Only the
// latest 50 waiting requests are checked (dlq.requests_for).
func (s *Store) ListFor(ctx context.Context, entries []uuid.UUID, limit int) ([]*Approval, error) {
	found, err := dbsqlc.New(s.Store.DB()).RequestsFor(ctx, entries)
	if err != nil || len(found) == 0 {
		return []*Approval{}, deadletter.AsMoveError(err)
	}
	selects := map[uuid.UUID][]uuid.UUID{}
	for _, f := range found {
		selects[f.ApprovalID] = append(selects[f.ApprovalID], f.EntryID)
	}
	list, err := s.List(ctx, Requested, maxRequestsFor)
	for _, a := range list {
		a.Selects = selects[a.ID]
	}
	list = slices.DeleteFunc(list, func(a *Approval) bool { return len(a.Selects) == 0 })
	return list[:min(len(list), limit)], err
}

// maxRequestsFor is more than the number of requests that dlq.requests_for examines.
const maxRequestsFor = 60

func (s *Store) find(ctx context.Context, which dbsqlc.ApprovalsParams) ([]*Approval, error) {
	rows, err := dbsqlc.New(s.Store.DB()).Approvals(ctx, which)
	list := make([]*Approval, len(rows))
	for i := range rows {
		list[i] = approval(&rows[i])
		if err := json.Unmarshal(rows[i].Skips, &list[i].Skips); err != nil {
			return nil, err
		}
	}
	return list, err
}

func approval(row *dbsqlc.ApprovalsRow) *Approval {
	a := &Approval{
		ID: row.ID, Operation: row.Operation, Request: row.Request, Entries: row.Entries,
		ByQueue: row.ByQueue, State: row.State, Actor: row.Actor, OnBehalfOf: row.OnBehalfOf,
		TokenBy: row.TokenBy, Note: row.Note, RequestedAt: row.RequestedAt, ExpiresAt: row.ExpiresAt,
		DecidedBy: row.DecidedBy, DecidedAt: row.DecidedAt, Decision: row.Decision,
		Frozen: row.Frozen, Changed: row.Changed, Outcome: row.Outcome, Problem: row.Problem, EndedAt: row.EndedAt,
	}
	if a.State == Requested && !time.Now().Before(a.ExpiresAt) {
		a.State = Expired // the runner writes this state to the database later
	}
	return a
}
