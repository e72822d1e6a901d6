package console

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/replay"
)

// act makes one move of one dead letter. If the move needs approval, act redirects to the request.
func (c *Console) act(in *request) (*done, error) {
	verb, id := in.PostFormValue("do"), in.PathValue("id")
	if !slices.Contains([]string{"replay", "discard", "expire", "resolve", "park", "unpark", "reopen"}, verb) {
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action",
			Detail: "choose replay, resolve, unpark, park, discard, expire or reopen",
		}
	}
	to := "/dead-letters/" + url.PathEscape(id)
	if from := in.PostFormValue("next"); access.LocalPath(from) {
		to = from
	}
	out, err := move(in, id, verb)
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	text := map[string]string{
		"replay": "Replayed as job " + number(out.JobID) + ".", "discard": "Discarded.", "expire": "Expired.",
		"resolve": "Resolved.", "park": "Parked: needs a person.", "unpark": "Unparked: dlqd decides what happens next.",
		"reopen": "Reopened: needs a person.",
	}[verb]
	return &done{To: to, Flash: flash{
		Text: short(id) + ": " + text, Undo: undoOf(out.Undo), To: "/dead-letters/" + url.PathEscape(id),
	}}, nil
}

// move makes a move. The answer has a job only for a replay.
func move(in *request, id, verb string) (*api.Replayed, error) {
	entry, note := api.EntryInput{ID: id}, api.Action{Note: in.PostFormValue("note")}
	if verb == "replay" {
		return call(in, api.ReplayEntry, api.ReplayEntryInput{EntryInput: entry, Body: &api.ReplayAction{
			Action: note, OtherGroups: in.PostFormValue("otherGroups") != "",
		}})
	}
	moved, err := call(in, api.MoveEntry(verb), api.EntryActionInput{EntryInput: entry, Body: &note})
	if err != nil {
		return nil, err
	}
	return &api.Replayed{Moved: *moved}, nil
}

// undoOf returns the id of an operation that can be undone, or "".
func undoOf(operation *uuid.UUID) string {
	if operation == nil {
		return ""
	}
	return operation.String()
}

// approvalRedirect returns a redirect to the request for approval if err says that the action needs a second person.
// The result is false for any other error.
func approvalRedirect(err error) (*done, bool) {
	needs, ok := errors.AsType[*api.ApprovalRequestedError](err)
	if !ok {
		return nil, false
	}
	a := needs.Approval
	text := "This requires a second person. dlqd made a request for approval; nothing was done yet."
	if needs.Existing {
		text = a.Actor + " asked for the same " + ago(a.RequestedAt) + ", and it waits for a second person. " +
			"dlqd made no second request; nothing was done yet."
	}
	return &done{To: "/approvals/" + a.ID.String(), Flash: flash{Text: text}}, true
}

// assign assigns a dead letter to a user, or unassigns it if the field is empty.
func (c *Console) assign(in *request) (*done, error) {
	id := in.PathValue("id")
	out, err := call(in, api.Bulk, api.BulkInput{Body: api.BulkRequest{
		Do: "assign", Filter: idFilter(id), Assignee: in.PostFormValue("assignee"),
		Action: api.Action{Note: in.PostFormValue("note")},
	}})
	if err != nil {
		return nil, err
	}
	text := "Assigned to " + in.PostFormValue("assignee") + "."
	if in.PostFormValue("assignee") == "" {
		text = "Unassigned."
	}
	return &done{To: "/dead-letters/" + url.PathEscape(id), Flash: flash{Text: text, Undo: undoOf(out.Undo)}}, nil
}

// idFilter returns the filter that selects dead letters by id.
func idFilter(ids ...string) api.EntryFilter { return api.EntryFilter{Filter: filter.Filter{IDs: ids}} }

// edit is the page that previews an edited payload and then replays with it.
type edit struct {
	Entry   *deadLetterPage
	Payload string
	Note    string
	Changed bool // the payload changed after the preview, so nothing was sent
	Preview api.ReplayAnswer
	Problem *api.Problem
	// Checkpoint is the operator's choice for a resumable job: resume, discard or "" (not chosen yet).
	Checkpoint string
}

func (c *Console) edit(in *request) (*done, error) {
	id, payload := in.PathValue("id"), in.formText("payload")
	entry := api.EntryInput{ID: id}
	detail, err := call(in, api.GetEntry, entry)
	if err != nil {
		return nil, err
	}
	e := &edit{
		Entry: newDeadLetterPage(in, detail), Payload: payload,
		Note: in.PostFormValue("note"), Checkpoint: in.PostFormValue("checkpoint"),
	}
	v := &view{Template: "edit", Title: "Edit and replay", Data: e, Section: "/dead-letters"}
	if !json.Valid([]byte(payload)) {
		var syntax *json.SyntaxError
		var read json.RawMessage
		problem := &api.Problem{Status: http.StatusUnprocessableEntity, Detail: "the payload is not JSON"}
		if err := json.Unmarshal([]byte(payload), &read); errors.As(err, &syntax) {
			problem.Detail = "the payload is not JSON: " + syntax.Error() + ", at " + placeOf(payload, syntax.Offset)
		}
		e.Problem, v.Status = problem, problem.Status
		return &done{View: v}, nil
	}
	// A payload is sent only after a preview of the same payload.
	if in.PostFormValue("confirmed") == "" || in.formText("seen") != payload {
		e.Changed = in.PostFormValue("confirmed") != ""
		preview, err := call(in, api.StartReplay, api.StartReplayInput{Body: api.ReplayRequest{
			DryRun: true, Filter: idFilter(id),
			Patch: []json.RawMessage{replay.Replacement(json.RawMessage(payload))},
		}})
		if problem, ok := errors.AsType[*api.Problem](err); ok {
			e.Problem, v.Status = problem, problem.Status
		} else if err != nil {
			return nil, err
		} else {
			e.Preview = *preview
		}
		return &done{View: v}, nil
	}
	out, err := call(in, api.ReplayEntry, api.ReplayEntryInput{EntryInput: entry, Body: &api.ReplayAction{
		Payload: json.RawMessage(payload), Action: api.Action{Note: e.Note}, Checkpoint: e.Checkpoint,
		OtherGroups: in.PostFormValue("otherGroups") != "",
	}})
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if problem, ok := errors.AsType[*api.Problem](err); ok {
		e.Problem, v.Status = problem, problem.Status
		return &done{View: v}, nil
	}
	if err != nil {
		return nil, err
	}
	return &done{
		To:    "/dead-letters/" + url.PathEscape(id),
		Flash: flash{Text: "Replayed with edits as job " + number(out.JobID) + ". The original is below."},
	}, nil
}

// formText returns a field of the form with LF line breaks. Browsers send each line break as CR LF.
func (in *request) formText(name string) string {
	return strings.ReplaceAll(in.PostFormValue(name), "\r\n", "\n")
}

// placeOf returns the line and column of an offset in a text.
func placeOf(text string, offset int64) string {
	line, column := 1, 1
	for i, r := range text {
		if int64(i) >= offset-1 {
			break
		}
		column++
		if r == '\n' {
			line, column = line+1, 1
		}
	}
	return "line " + number(line) + ", column " + number(column)
}

// undo reverts an operation.
func (c *Console) undo(in *request) (*done, error) {
	to := "/"
	if from := in.PostFormValue("from"); access.LocalPath(from) {
		to = from
	}
	out, err := call(in, api.Undo, api.UndoInput{OperationInput: api.OperationInput{ID: in.PathValue("operation")}})
	if err != nil {
		return nil, err
	}
	text := "Undone for " + plural(out.Changed, "dead letter") + "."
	if n := out.Became[string(deadletter.Manual)]; n > 0 {
		text += " " + plural(n, "dead letter needs", "dead letters need") + " a person now."
	}
	if left := out.Looked - out.Changed; left > 0 {
		text += " " + number(left) + " skipped: changed meanwhile."
	}
	return &done{To: to, Flash: flash{Text: text, To: "/operations/" + out.Operation.String()}}, nil
}

// reveal records the viewer's note through the API and leads to the unmasked dead letter. The API refuses a
// reveal without a note.
func (c *Console) reveal(in *request) (*done, error) {
	id := in.PathValue("id")
	if _, err := call(in, api.RevealEntry, api.RevealInput{
		EntryInput: api.EntryInput{ID: id}, Body: api.RevealAction{Note: in.PostFormValue("note")},
	}); err != nil {
		return nil, err
	}
	return &done{To: "/dead-letters/" + url.PathEscape(id) + "/reveal"}, nil
}

// revealed shows a dead letter unmasked for some time after the viewer has revealed it; later it shows the dead letter
// masked.
func (c *Console) revealed(in *request) (*view, error) {
	id := in.PathValue("id")
	detail, err := call(in, api.GetRevealedEntry, api.EntryInput{ID: id})
	if err != nil {
		return nil, err
	}
	l := newDeadLetterPage(in, detail)
	v := &view{
		Template: "deadletter", Title: firstLine(detail.Kind) + " " + short(detail.ID), Data: l, Section: "/dead-letters",
	}
	if detail.RevealedUntil == nil {
		v.Interval, v.Live = deadLetterInterval, "/dead-letters/"+url.PathEscape(id)
		return v, nil
	}
	l.Revealed, l.Masked = true, false
	v.Until = *detail.RevealedUntil
	return v, nil
}
