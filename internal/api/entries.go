package api

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// EntryPage is one page of a list.
type EntryPage struct {
	Entries []deadletter.Summary `json:"entries" doc:"Entries of this page."`
	Next    string               `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
	// SearchedTo is set if the search ran out of time, which can happen if no single index covers the filter.
	SearchedTo *time.Time `json:"searchedTo,omitempty" doc:"Set if the search stopped at its time limit: the time of capture up to which it searched. next continues from there. The page may have fewer entries than requested, or none."`
	Count      *Count     `json:"count,omitempty" doc:"Number of entries that the filter selects, if requested."`
	// AutomaticStopped is part of every list, so that each viewer sees it.
	AutomaticStopped *automatic.Stop `json:"automaticStopped,omitempty" doc:"Set if all automatic redelivery is stopped, by an operator or because the database was restored."`
}

// Count is the number of entries that a filter selects.
type Count struct {
	Entries int  `json:"entries" doc:"Number of entries, up to 10,000."`
	AtLeast bool `json:"atLeast,omitempty" doc:"Whether there are or may be more, because the count stopped at 10,000 or at its time limit."`
}

const (
	// searchBudget bounds the time of the search for the entries of one request.
	searchBudget = 300 * time.Millisecond
	// countBudget bounds the time of the count that runs beside the search. The count must not delay the page. It always
	// reads the first 1,000 entries of each part, even if that takes longer.
	countBudget = 40 * time.Millisecond
	// MostCounted is the number of entries at which the count of a list stops.
	MostCounted = 10_000
)

// EntryDetail is everything about an entry.
type EntryDetail struct {
	deadletter.Entry

	Transitions      []deadletter.Transition `json:"transitions" doc:"Audit trail of the entry, oldest change first."`
	Checkpoint       *deadletter.Checkpoint  `json:"checkpoint,omitempty" doc:"Progress of its resumable job: a redelivery skips the completed steps."`
	StageReached     string                  `json:"stageReached,omitempty" doc:"The last stage that a worker of its jobs reported (riverdlq.Stage): what a redelivery may do again."`
	Published        []source.Published      `json:"published,omitempty" doc:"Where feeds publish the entry."`
	WorkerVersion    string                  `json:"workerVersion,omitempty" doc:"Version of the worker, or of the destination, that made the last failure, as it reported it."`
	AutomaticStopped *automatic.Stop         `json:"automaticStopped,omitempty" doc:"Set if all automatic redelivery is stopped, by an operator or because the database was restored."`
	RevealedUntil    *time.Time              `json:"revealedUntil,omitempty" doc:"Only of get-revealed-entry: until when it returns the entry unmasked; absent: the entry is masked."`
}

// Action is the actor and the note of an operator's action.
type Action struct {
	Actor string `json:"actor,omitempty" maxLength:"255" doc:"Without authentication: the actor, \"api\" if absent. With authentication: the person on whose behalf the caller acts." example:"kim"`
	Note  string `json:"note,omitempty" maxLength:"10000" doc:"Reason, for the audit trail." example:"customer refunded by hand"`
}

// RevealAction is the actor and the note of a reveal of masked data.
type RevealAction struct {
	Actor string `json:"actor,omitempty" maxLength:"255" doc:"Without authentication: the viewer, \"api\" if absent. With authentication: the person on whose behalf the caller acts." example:"kim"`
	Note  string `json:"note" minLength:"1" maxLength:"10000" doc:"Reason, for the audit trail." example:"ticket 7: which card was charged twice"`
}

// ReplayAction replays an entry, possibly edited.
type ReplayAction struct {
	Action

	Payload     json.RawMessage   `json:"payload,omitempty" doc:"New payload; null is the same as absent. The original payload is stored, too."`
	Patch       []json.RawMessage `json:"patch,omitempty" doc:"JSON Patch (RFC 6902) of the payload."`
	MergePatch  json.RawMessage   `json:"mergePatch,omitempty" doc:"JSON Merge Patch (RFC 7396) of the payload."`
	Destination string            `json:"toDestination,omitempty" maxLength:"127" doc:"Deliver the message to this destination instead of its queue's."`
	Checkpoint  string            `json:"checkpoint,omitempty" enum:"resume,discard" doc:"Whether a resumable job that has completed a step continues after it (resume) or repeats all steps (discard). Required for an edit of such a job; otherwise resume if absent."`
	Force       bool              `json:"force,omitempty" doc:"Replay although an equal job is live."`
	OtherGroups bool              `json:"otherGroups,omitempty" doc:"Publish a record even if consumer groups that did not fail read, or may read, its topic."`
}

// Moved is the response to an action on an entry.
type Moved struct {
	ID     uuid.UUID         `json:"id" doc:"Id of the entry."`
	Status deadletter.Status `json:"status" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"State of the entry after the action."`
	Undo   *uuid.UUID        `json:"undo,omitempty" doc:"Id of the operation, for POST /api/dlq/undo/{id}; absent if the action cannot be undone."`
}

// Replayed is the response to a replay.
type Replayed struct {
	Moved

	JobID   int64           `json:"jobId" doc:"River job of the redelivery."`
	Warning string          `json:"warning,omitempty" doc:"Warning that the database was restored, and that the work may have been done since."`
	Changes []replay.Change `json:"changes,omitempty" doc:"Changes of the payload by the edit."`
}

// Stats are counts of dead letters.
type Stats struct {
	Open     int64            `json:"open" doc:"Number of open entries. Above 20,000 the count is about a second old. Entries that no worker has classified are counted up to 10,000."`
	Backlog  []BacklogRow     `json:"backlog" doc:"Open entries by status, queue and class."`
	ByStatus map[string]int64 `json:"byStatus" doc:"Open entries by status."`
	// NeedsPerson is the number that overviews show.
	NeedsPerson int64      `json:"needsPerson" doc:"Entries in dlq_manual, except those of muted failure groups."`
	Muted       int64      `json:"muted" doc:"Entries in dlq_manual of muted failure groups, counted up to 10,000 for each group."`
	LastDay     MovesOfDay `json:"lastDay" doc:"State changes of the last 24 hours, from the audit trail."`
	OldestOpen  *time.Time `json:"oldestOpen,omitempty" doc:"When the oldest open entry was captured."`
	// Observed entries are also counted as pending.
	Observed         int64           `json:"observed" doc:"Pending entries for which automatic redelivery is off, counted up to 10,000."`
	AutomaticStopped *automatic.Stop `json:"automaticStopped,omitempty" doc:"Set if all automatic redelivery is stopped, by an operator or because the database was restored."`
}

// BacklogRow is a number of open entries.
type BacklogRow struct {
	Status     string `json:"status" doc:"State of the entries."`
	Queue      string `json:"queue" doc:"Queue of the entries."`
	ErrorClass string `json:"errorClass" doc:"Class of the entries; \"undecided\" before a worker has classified them."`
	Entries    int64  `json:"entries" doc:"Number of entries."`
	More       bool   `json:"more,omitempty" doc:"Whether there are more: entries that no worker has classified are counted up to 10,000."`
}

// MovesOfDay are the numbers of moves of a day.
type MovesOfDay struct {
	Captured int64 `json:"captured" doc:"Jobs that became dead letters."`
	Resolved int64 `json:"resolved" doc:"Entries that were resolved."`
	Failed   int64 `json:"failed" doc:"Entries that used up their redeliveries."`
	Archived int64 `json:"archived" doc:"Entries that were discarded or aged out."`
	Replayed int64 `json:"replayed" doc:"Redeliveries started."`
}

// ListInput selects entries of a list.
type ListInput struct {
	Q          string   `query:"q" maxLength:"4096" doc:"A filter as text, such as status:manual queue:payments \"timed out\" (docs/filter.md). A field may be set here or as a parameter, not both." example:"queue:payments age:<2d"`
	Status     []string `query:"status" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"Only these states: several values are separated by commas, or the parameter is repeated."`
	Queue      string   `query:"queue" doc:"Only this queue."`
	Kind       string   `query:"kind" doc:"Only this kind."`
	ErrorType  string   `query:"errorType" doc:"Only this error type."`
	ErrorClass string   `query:"errorClass" enum:"transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown" doc:"Only this class."`
	Source     string   `query:"source" doc:"Only messages of this source."`
	After      string   `query:"after" format:"date-time" doc:"Captured at or after this time."`
	Before     string   `query:"before" format:"date-time" doc:"Captured before this time."`
	Order      string   `query:"order" enum:"newest,oldest" default:"newest" doc:"Order of the entries."`
	Cursor     string   `query:"cursor" format:"uuid" doc:"next of the previous page."`
	Limit      int      `query:"limit" minimum:"1" maximum:"500" default:"50" doc:"Entries in a page."`
	Count      bool     `query:"count" doc:"Count the entries, up to 10,000."`
	CountOnly  bool     `query:"countOnly" doc:"Count the entries, and return none of them."`
}

// filter returns the filter of all parameters but q.
func (in *ListInput) filter() filter.Filter {
	f := filter.Filter{Status: in.Status, After: in.After, Before: in.Before}
	for _, of := range []struct {
		into *[]string
		word string
	}{
		{&f.Queue, in.Queue},
		{&f.Kind, in.Kind},
		{&f.ErrorType, in.ErrorType},
		{&f.ErrorClass, in.ErrorClass},
		{&f.Source, in.Source},
	} {
		if of.word != "" {
			*of.into = []string{of.word}
		}
	}
	return f
}

// EntryInput names an entry. It is exported because huma reads only exported embedded structs.
type EntryInput struct {
	ID string `path:"id" format:"uuid" doc:"Id of the entry." example:"0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"`
}

// RevealInput is a request to reveal an entry.
type RevealInput struct {
	EntryInput

	Body RevealAction
}

// EntryActionInput is an action on an entry.
type EntryActionInput struct {
	EntryInput

	Body *Action
}

// ReplayEntryInput is a request to replay an entry.
type ReplayEntryInput struct {
	EntryInput

	Body *ReplayAction
}

// Operations on entries.
var (
	ListEntries = Operation[ListInput, EntryPage]{"list-entries", http.MethodGet, "/api/dlq/entries"}
	GetEntry    = Operation[EntryInput, EntryDetail]{"get-entry", http.MethodGet, "/api/dlq/entries/{id}"}
	RevealEntry = Operation[RevealInput, EntryDetail]{
		"reveal-entry", http.MethodPost, "/api/dlq/entries/{id}/reveal",
	}
	GetRevealedEntry = Operation[EntryInput, EntryDetail]{
		"get-revealed-entry", http.MethodGet, "/api/dlq/entries/{id}/reveal",
	}
	ReplayEntry = Operation[ReplayEntryInput, Replayed]{
		"replay-entry", http.MethodPost, "/api/dlq/entries/{id}/replay",
	}
	GetStats = Operation[None, Stats]{"get-stats", http.MethodGet, "/api/dlq/stats"}
)

// MoveEntry returns the operation for a move of an entry: discard, expire, resolve, park, unpark or reopen.
func MoveEntry(move string) Operation[EntryActionInput, Moved] {
	return Operation[EntryActionInput, Moved]{move + "-entry", http.MethodPost, "/api/dlq/entries/{id}/" + move}
}

const entryExample = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"

func (s *service) registerEntries(api huma.API) {
	tags := []string{"dead letters"}
	summary := map[string]any{
		"id": entryExample, "status": "dlq_manual", "queue": "default",
		"kind": "payment.captured", "jobId": 41, "priority": 2,
		"errorClass": "validation", "errorType": "HTTP_422", "errorCode": "INVALID_IBAN",
		"errorMessage": "422 Unprocessable Entity: the IBAN is not valid (INVALID_IBAN)",
		"destination":  "bank", "destinationUrl": "http://127.0.0.1:9000/",
		"dlqRetryCount": 0, "firstFailedAt": "2026-11-21T10:00:00Z", "lastFailedAt": "2026-11-21T10:00:00Z",
		"createdAt": "2026-11-21T10:00:00Z", "updatedAt": "2026-11-21T10:00:01Z",
	}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List dead letters",
		Description: "Pages have a cursor, so each costs the same, however many entries there are. Filters that no " +
			"index answers, such as texts of errors and values in payloads, are searched in page order for 0.3 seconds: " +
			"searchedTo is the position that the search reached, and next continues there.",
		Errors: []int{422, 503},
	}
	example(&list, http.StatusOK, map[string]any{"entries": []any{summary}, "next": entryExample})
	register(s, api, ListEntries, list, s.listEntries)

	s.registerFilter(api)

	get := huma.Operation{
		Tags:    tags,
		Summary: "Get a dead letter, with its attempts and audit trail",
		Errors:  []int{404, 422, 503},
	}
	detail := maps.Clone(summary)
	maps.Copy(detail, map[string]any{
		"jobKind": "dlqd_message", "tags": []string{}, "retryCount": 1, "maxRetries": 3,
		"dlqMaxRetries": 5, "replayAttempts": []any{}, "metadata": map[string]any{},
		"originalEvent": map[string]any{
			"messageId": messageExample, "queue": "default",
			"kind": "payment.captured", "payload": map[string]any{"amount": 4200},
		},
		"retryHistory": []any{map[string]any{"at": "2026-11-21T10:00:00Z", "attempt": 1, "error": "HTTP_422"}},
		"transitions": []any{map[string]any{
			"at": "2026-11-21T10:00:00Z", "toStatus": "dlq_pending", "actor": "capture",
			"dbUser": "dlqd", "reason": "job 41 failed", "jobId": 41,
		}},
	})
	example(&get, http.StatusOK, detail)
	register(s, api, GetEntry, get, s.getEntry)

	reveal := huma.Operation{
		Tags:    tags,
		Summary: "Get a dead letter with its masked data, for a reason",
		Description: "All other responses show masked data (data.sensitivePaths, data.sensitivePatterns) as ***. The " +
			"audit trail records the note before the response is sent.",
		Errors: []int{400, 404, 422, 503},
	}
	example(&reveal, http.StatusOK, detail)
	register(s, api, RevealEntry, reveal, s.revealEntry)

	revealed := huma.Operation{
		Tags:    tags,
		Summary: "Get a dead letter that the caller has revealed",
		Description: "For ten minutes after the caller has revealed it, the entry has its masked data, and revealedUntil. " +
			"Otherwise it is masked. The audit trail gets no further row: that of the reveal covers this time.",
		Errors: []int{404, 422, 503},
	}
	example(&revealed, http.StatusOK, detail)
	register(s, api, GetRevealedEntry, revealed, s.revealedEntry)

	replayOp := huma.Operation{
		Tags:    tags,
		Summary: "Replay a dead letter now, unchanged or edited",
		Description: "Allowed from dlq_pending, dlq_manual, dlq_failed and dlq_returned. Answers 409 if the entry's state does not " +
			"allow it, or if an equal job is live (force overrides). Answers 422 if an edit needs checkpoint.",
		Errors: []int{400, 404, 409, 413, 422, 503}, DefaultStatus: http.StatusAccepted, MaxBodyBytes: s.MaxBodyBytes,
	}
	example(&replayOp, http.StatusAccepted,
		Replayed{Moved: Moved{ID: uuid.MustParse(entryExample), Status: deadletter.Processing}, JobID: 57})
	register(s, api, ReplayEntry, replayOp, s.replayEntry)

	for _, a := range []struct {
		name, summary, from string
		to                  deadletter.Status
		run                 func(context.Context, uuid.UUID, deadletter.Act) error
	}{
		{
			"discard", "Discard a dead letter whose work is no longer wanted",
			"dlq_pending, dlq_manual, dlq_failed and dlq_returned",
			deadletter.Archived, s.Store.Discard,
		},
		{
			"expire", "Expire a dead letter whose work is out of date", "dlq_pending, dlq_manual and dlq_failed",
			deadletter.Archived, s.Store.Expire,
		},
		{
			"resolve", "Close a parked dead letter whose work was done outside dlqd, or a returned one",
			"dlq_manual and dlq_returned", deadletter.Resolved, s.Store.Resolve,
		},
		{"park", "Park a pending dead letter for manual handling", "dlq_pending", deadletter.Manual, s.Store.Park},
		{"unpark", "Return a parked dead letter to automatic processing", "dlq_manual", deadletter.Pending, s.Store.Unpark},
		{
			"reopen", "Reopen a closed dead letter for manual handling", "dlq_resolved, dlq_archived and dlq_returned",
			deadletter.Manual, s.Store.Reopen,
		},
	} {
		op := huma.Operation{
			Tags: tags, Summary: a.summary,
			Description: "Allowed from " + a.from + ". Answers 409 if the entry's state does not allow it.",
			Errors:      []int{400, 404, 409, 422, 503},
		}
		example(&op, http.StatusOK, Moved{ID: uuid.MustParse(entryExample), Status: a.to})
		register(s, api, MoveEntry(a.name), op, func(ctx context.Context, in *EntryActionInput) (*Moved, error) {
			// huma has checked the format.
			id := uuid.MustParse(in.ID)
			act := in.Body.act(ctx)
			act.Operation = deadletter.NewOperation()
			if err := a.run(ctx, id, act); err != nil {
				return nil, s.approvalOrProblem(ctx, err, approval.Bulk, deadletter.Bulk{Action: a.name, Filter: filterOf(id)},
					in.Body)
			}
			moved := &Moved{ID: id, Status: a.to}
			if a.name != "reopen" {
				moved.Undo = &act.Operation
			}
			return moved, nil
		})
	}

	stats := huma.Operation{
		Tags:    tags,
		Summary: "Count open dead letters, and the state changes of the last day",
		Errors:  []int{503},
	}
	example(&stats, http.StatusOK, Stats{
		Open: 3, ByStatus: map[string]int64{"dlq_manual": 3}, LastDay: MovesOfDay{Captured: 8, Resolved: 5, Replayed: 5},
		Backlog: []BacklogRow{{
			Status: "dlq_manual", Queue: "default", ErrorClass: string(riverdlq.ClassValidation),
			Entries: 3,
		}},
	})
	register(s, api, GetStats, stats, s.stats)
}

func (s *service) listEntries(ctx context.Context, in *ListInput) (*EntryPage, error) {
	page := deadletter.Page{Oldest: in.Order == "oldest", Limit: in.Limit + 1}
	var err error
	if page.Filter, err = mergeText(ctx, in.filter(), "query.q", in.Q); err != nil {
		return nil, err
	}
	if in.Cursor != "" {
		page.Cursor = uuid.MustParse(in.Cursor) // huma has checked the format
	}
	var found *deadletter.Found
	var count Count
	var queries []func() error
	if in.CountOnly {
		in.Count, found = true, &deadletter.Found{Entries: []deadletter.Summary{}}
	} else {
		queries = append(queries, func() (err error) {
			found, err = s.Store.Search(ctx, page, searchBudget)
			return err
		})
	}
	if in.Count {
		queries = append(queries, func() (err error) {
			count.Entries, count.AtLeast, err = s.Store.CountWithin(ctx, page.Filter, MostCounted, countBudget)
			return err
		})
	}
	var stopped *automatic.Stop
	queries = append(queries, func() (err error) { stopped, err = automatic.ReadStop(ctx, s.Store.DB()); return err })
	if err := background.Together(len(queries), queries...); err != nil {
		return nil, s.problem(ctx, err)
	}
	shown := make([]*deadletter.Summary, len(found.Entries))
	for i := range found.Entries {
		shown[i] = &found.Entries[i]
	}
	if err := s.Store.ReadReviews(ctx, shown...); err != nil {
		return nil, s.problem(ctx, err)
	}
	out := &EntryPage{Entries: found.Entries, AutomaticStopped: stopped}
	if len(out.Entries) > in.Limit {
		out.Entries = out.Entries[:in.Limit]
		found.Next = out.Entries[in.Limit-1].ID
	}
	if found.Next != uuid.Nil {
		out.Next = found.Next.String()
	}
	if !found.SearchedTo.IsZero() {
		out.SearchedTo = &found.SearchedTo
	}
	if in.Count {
		out.Count = &count
	}
	return out, nil
}

func (s *service) getEntry(ctx context.Context, in *EntryInput) (*EntryDetail, error) {
	entry, transitions, err := s.Store.Get(ctx, uuid.MustParse(in.ID))
	return s.detail(ctx, entry, transitions, err)
}

func (s *service) revealEntry(ctx context.Context, in *RevealInput) (*EntryDetail, error) {
	entry, transitions, err := s.Store.Reveal(ctx, uuid.MustParse(in.ID),
		(&Action{Actor: in.Body.Actor, Note: in.Body.Note}).act(ctx))
	return s.detail(ctx, entry, transitions, err)
}

func (s *service) revealedEntry(ctx context.Context, in *EntryInput) (*EntryDetail, error) {
	entry, transitions, until, err := s.Store.Revealed(ctx, uuid.MustParse(in.ID), (&Action{}).act(ctx).Actor)
	detail, err := s.detail(ctx, entry, transitions, err)
	if err == nil && !until.IsZero() {
		detail.RevealedUntil = &until
	}
	return detail, err
}

func (s *service) detail(ctx context.Context, entry *deadletter.Entry, transitions []deadletter.Transition,
	err error,
) (*EntryDetail, error) {
	if err == nil {
		err = s.Store.ReadReviews(ctx, &entry.Summary)
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	stopped, err := automatic.ReadStop(ctx, s.Store.DB())
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	published, err := s.Sources.PublishedTo(ctx, entry.ID)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &EntryDetail{
		Entry: *entry, Transitions: transitions, Published: published,
		Checkpoint: deadletter.CheckpointOf(entry.Metadata), StageReached: deadletter.StageOf(entry.Metadata),
		WorkerVersion: deadletter.VersionOf(entry.Metadata), AutomaticStopped: stopped,
	}, nil
}

func (s *service) replayEntry(ctx context.Context, in *ReplayEntryInput) (*Replayed, error) {
	id := uuid.MustParse(in.ID)
	if in.Body == nil {
		in.Body = &ReplayAction{}
	}
	if string(in.Body.Payload) == "null" {
		in.Body.Payload = nil // some clients send null for an absent field
	}
	if in.Body.Payload != nil {
		if err := message.CheckJSON(in.Body.Payload); err != nil {
			return nil, huma.Error422UnprocessableEntity(err.Error(),
				&huma.ErrorDetail{Location: "body.payload", Message: err.Error()})
		}
	}
	if err := checkSendTo(ctx, "", in.Body.Destination); err != nil {
		return nil, err
	}
	patch, err := patchOf(in.Body.Patch, in.Body.MergePatch)
	if err != nil {
		return nil, err
	}
	if in.Body.Payload != nil && (in.Body.Patch != nil || in.Body.MergePatch != nil) {
		return nil, huma.Error422UnprocessableEntity("give either a payload or a patch, not both")
	}
	job, changes, err := s.Replayer.Replay(ctx, id, deadletter.Replay{
		Payload: in.Body.Payload, Destination: in.Body.Destination, Checkpoint: in.Body.Checkpoint, Force: in.Body.Force,
		OtherGroups: in.Body.OtherGroups, Act: in.Body.act(ctx),
	}, patch)
	if err != nil {
		if in.Body.Payload != nil { // replay.Request has only patches, no payload
			patch.JSONPatch = slices.Concat([]byte{'['}, replay.Replacement(in.Body.Payload), []byte{']'})
		}
		return nil, s.approvalOrProblem(ctx, err, approval.Replay, replay.Request{
			Patch: patch, Filter: filterOf(id), Destination: in.Body.Destination,
			Checkpoint: in.Body.Checkpoint, Force: in.Body.Force, OtherGroups: in.Body.OtherGroups,
		}, &in.Body.Action)
	}
	out := &Replayed{Moved: Moved{ID: id, Status: deadletter.Processing}, JobID: job, Changes: changes}
	// An error while reading the stop must not fail the request, because the replay has started.
	if stop, err := automatic.ReadStop(ctx, s.Store.DB()); err == nil && stop != nil && stop.Restored {
		out.Warning = "the database was restored: the receiver may already have had this message since (" +
			stop.Note + ")"
	}
	return out, nil
}

// filterOf returns the filter that selects one entry.
func filterOf(id uuid.UUID) json.RawMessage {
	return json.RawMessage(`{"ids":["` + id.String() + `"]}`)
}

func (s *service) stats(ctx context.Context, _ *None) (*Stats, error) {
	var rows []deadletter.Backlog
	var moves analytics.Moves
	var oldest *time.Time
	var stopped *automatic.Stop
	var observed, muted int64
	if err := background.Together(3,
		func() (err error) { rows, err = s.Store.Backlog(ctx); return err },
		func() (err error) { moves, err = s.Analytics.MovesLastDay(ctx); return err },
		func() (err error) { oldest, err = s.Store.OldestOpen(ctx); return err },
		func() (err error) { stopped, err = automatic.ReadStop(ctx, s.Store.DB()); return err },
		func() (err error) {
			observed, err = automatic.CountObserved(ctx, s.Store.DB(), MostCounted)
			return err
		},
		func() (err error) { muted, err = s.Groups.MutedEntries(ctx); return err },
	); err != nil {
		return nil, s.problem(ctx, err)
	}
	stats := &Stats{
		Muted: muted, Observed: observed, Backlog: []BacklogRow{},
		ByStatus: map[string]int64{}, OldestOpen: oldest, AutomaticStopped: stopped,
		LastDay: MovesOfDay(moves),
	}
	for _, r := range rows {
		stats.Open += r.Entries
		stats.ByStatus[r.Status] += r.Entries
		stats.Backlog = append(stats.Backlog, BacklogRow(r))
	}
	stats.NeedsPerson = max(0, stats.ByStatus[string(deadletter.Manual)]-muted)
	return stats, nil
}
