package console

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// moveAnswer is the part of a move's answer that the console shows.
type moveAnswer struct {
	JobID int64  `json:"jobId"`
	Undo  string `json:"undo"`
}

// act makes one move of one dead letter.
func (c *Console) act(in *request) (*done, error) {
	verb, id := in.PostFormValue("do"), in.PathValue("id")
	if !slices.Contains([]string{"replay", "discard", "resolve", "park", "unpark", "reopen"}, verb) {
		return nil, &Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action",
			Detail: "choose replay, resolve, unpark, park, discard or reopen",
		}
	}
	to := "/dead-letters/" + url.PathEscape(id)
	if from := in.PostFormValue("next"); access.LocalPath(from) {
		to = from
	}
	var out moveAnswer
	err := in.post("/api/dlq/entries/"+url.PathEscape(id)+"/"+verb, map[string]any{"note": in.PostFormValue("note")}, &out)
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	text := map[string]string{
		"replay": "Replayed as job " + number(out.JobID) + ".", "discard": "Discarded.", "resolve": "Resolved.",
		"park": "Parked: needs a person.", "unpark": "Unparked: dlqd decides what happens next.",
		"reopen": "Reopened: needs a person.",
	}[verb]
	return &done{To: to, Flash: flash{
		Text: short(id) + ": " + text, Undo: out.Undo, To: "/dead-letters/" + url.PathEscape(id),
	}}, nil
}

// approvalRedirect returns a redirect to the approval if err says that the action needs a second person.
func approvalRedirect(err error) (*done, bool) {
	needs, ok := errors.AsType[*approvalRequiredError](err)
	if !ok {
		return nil, false
	}
	return &done{
		To:    "/approvals/" + needs.Approval.ID.String(),
		Flash: flash{Text: "This requires a second person. dlqd made a request for approval; nothing was done yet."},
	}, true
}

// assign assigns a dead letter to a user, or unassigns it if the field is empty.
func (c *Console) assign(in *request) (*done, error) {
	id := in.PathValue("id")
	var out moveAnswer
	if err := in.post("/api/dlq/bulk", map[string]any{
		"do": "assign", "filter": map[string]any{"ids": []string{id}},
		"assignee": in.PostFormValue("assignee"), "note": in.PostFormValue("note"),
	}, &out); err != nil {
		return nil, err
	}
	text := "Assigned to " + in.PostFormValue("assignee") + "."
	if in.PostFormValue("assignee") == "" {
		text = "Unassigned."
	}
	return &done{To: "/dead-letters/" + url.PathEscape(id), Flash: flash{Text: text, Undo: out.Undo}}, nil
}

// edit is the page that previews an edited payload and then replays with it.
type edit struct {
	Entry   *deadLetterPage
	Payload string
	Note    string
	Changed bool // the payload changed after the preview; nothing was sent
	Preview api.ReplayAnswer
	Problem *Problem
	// Checkpoint is the operator's choice for a resumable job: resume, discard or "" (not chosen yet).
	Checkpoint string
}

func (c *Console) edit(in *request) (*done, error) {
	id, payload := in.PathValue("id"), in.PostFormValue("payload")
	path := "/api/dlq/entries/" + url.PathEscape(id)
	var detail api.EntryDetail
	if err := in.get(path, nil, &detail); err != nil {
		return nil, err
	}
	e := &edit{
		Entry: newDeadLetterPage(in, &detail), Payload: payload,
		Note: in.PostFormValue("note"), Checkpoint: in.PostFormValue("checkpoint"),
	}
	v := &view{Template: "edit", Title: "Edit and replay", Data: e, Section: "/dead-letters"}
	if !json.Valid([]byte(payload)) {
		var syntax *json.SyntaxError
		var read json.RawMessage
		problem := &Problem{Status: http.StatusUnprocessableEntity, Detail: "the payload is not JSON"}
		if err := json.Unmarshal([]byte(payload), &read); errors.As(err, &syntax) {
			problem.Detail = "the payload is not JSON: " + syntax.Error() + ", at " + placeOf(payload, syntax.Offset)
		}
		e.Problem, v.Status = problem, problem.Status
		return &done{View: v}, nil
	}
	patch := []any{map[string]any{"op": "replace", "path": "", "value": json.RawMessage(payload)}}
	// A payload is sent only after a preview of the same payload.
	if in.PostFormValue("confirmed") == "" || in.PostFormValue("seen") != payload {
		e.Changed = in.PostFormValue("confirmed") != ""
		err := in.post("/api/dlq/replay", map[string]any{
			"dryRun": true, "filter": map[string]any{"ids": []string{id}}, "patch": patch,
		}, &e.Preview)
		if problem, ok := errors.AsType[*Problem](err); ok {
			e.Problem, v.Status = problem, problem.Status
		} else if err != nil {
			return nil, err
		}
		return &done{View: v}, nil
	}
	var out moveAnswer
	body := map[string]any{"payload": json.RawMessage(payload), "note": e.Note}
	if e.Checkpoint != "" {
		body["checkpoint"] = e.Checkpoint
	}
	err := in.post(path+"/replay", body, &out)
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if problem, ok := errors.AsType[*Problem](err); ok {
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
	var out deadletter.Undone
	if err := in.post("/api/dlq/undo/"+url.PathEscape(in.PathValue("operation")), map[string]any{}, &out); err != nil {
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

// reveal shows a dead letter unmasked, once. The API requires a note and records it.
func (c *Console) reveal(in *request) (*done, error) {
	var detail api.EntryDetail
	if err := in.post("/api/dlq/entries/"+url.PathEscape(in.PathValue("id"))+"/reveal",
		map[string]any{"note": in.PostFormValue("note")}, &detail); err != nil {
		return nil, err
	}
	l := newDeadLetterPage(in, &detail)
	l.Revealed, l.Masked = true, false
	return &done{View: &view{
		Template: "deadletter", Title: firstLine(detail.Kind) + " " + short(detail.ID), Data: l, Section: "/dead-letters",
	}}, nil
}
