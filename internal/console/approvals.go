package console

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
)

const (
	// approvalsInterval is the render interval of open approval pages.
	approvalsInterval = 5 * time.Second
	// countingTimeout limits the time to count the entries of a request. An open page waits countingShare times the
	// duration of its last count before it counts again, so counting takes at most a twentieth of the time.
	countingTimeout = 3 * time.Second
	countingShare   = 20
)

// approvalView is a request for approval as pages show it.
type approvalView struct {
	*approval.Approval
}

// Verb returns the requested action with a capital.
func (a approvalView) Verb() string { return upper(a.Do()) }

// What describes the subject of the operation: a number of dead letters, or a job.
func (a approvalView) What() string {
	if job := a.Job(); job != 0 {
		return "job " + strconv.FormatInt(job, 10)
	}
	what := plural(a.Entries, "dead letter")
	var export approval.Exporting
	if a.Operation == approval.Export && json.Unmarshal(a.Request, &export) == nil && export.Reveal {
		what += ", unmasked"
	}
	return what
}

// filter returns the filter of the request, as JSON.
func (a approvalView) filter() json.RawMessage {
	var request struct {
		Filter json.RawMessage `json:"filter"`
	}
	_ = json.Unmarshal(a.Request, &request)
	return request.Filter
}

// Words returns the filter in the filter language.
func (a approvalView) Words() string { return filterWords(a.filter()) }

// Open reports whether the request still waits for a decision.
func (a approvalView) Open() bool { return a.State == approval.Requested }

// Mark returns the mark of the request's state.
func (a approvalView) Mark() mark {
	switch a.State {
	case approval.Requested:
		return mark{"requested", "requested", "◆", "warn"}
	case "approved":
		return mark{"approved", "approved, in progress", "◐", "info"}
	case "done":
		return mark{"done", "done", "✓", "ok"}
	case "failed":
		return mark{"failed", "failed", "✕", "bad"}
	}
	return mark{a.State, a.State, "▢", "neutral"}
}

// Queues returns the number of entries by queue.
func (a approvalView) Queues() []share {
	of := map[string]int64{}
	_ = json.Unmarshal(a.ByQueue, &of)
	return shares(of)
}

// Sentence describes the request and its outcome.
func (a approvalView) Sentence() string {
	asks := a.Actor + " requests to " + strings.ToLower(a.Do()) + " " + a.What() + "."
	by := ""
	if a.DecidedBy != nil {
		by = *a.DecidedBy
	}
	switch a.State {
	case approval.Requested:
		return asks + " Nothing was done yet. A second person can approve it; it expires " +
			until(a.ExpiresAt) + "."
	case "approved":
		return asks + " " + by + " approved it, and dlqd executes it."
	case "done":
		if a.Operation == approval.Export {
			return asks + " " + by + " approved it: " + a.Actor + " can download " + plural(deref(a.Frozen), "dead letter") +
				" for a day."
		}
		text := asks + " " + by + " approved it, and it was done"
		if a.Changed != nil && a.Job() == 0 {
			text += ": " + plural(*a.Changed, "dead letter", "dead letters") + " changed"
		}
		return text + "."
	case "failed":
		return asks + " " + by + " approved it, but it failed: " + a.Problem
	case "refused":
		return asks + " " + by + " refused it; nothing was done."
	case "withdrawn":
		return asks + " It was withdrawn; nothing was done."
	case "expired":
		return asks + " It expired without a decision; nothing was done."
	}
	return asks
}

// askedFor has the requests for approval that wait and select entries of a page, latest first.
type askedFor []approvalView

// For returns the latest of the requests that select an entry, or nil.
func (a askedFor) For(entry uuid.UUID) *approvalView {
	for i := range a {
		if slices.Contains(a[i].Selects, entry) {
			return &a[i]
		}
	}
	return nil
}

// askedFor returns the waiting requests that select one of the entries and that the viewer may see. If the requests
// cannot be read, it returns none.
func (in *request) askedFor(entries ...uuid.UUID) askedFor {
	if len(entries) == 0 || !in.me().May(access.Operator) {
		return nil
	}
	ids := make([]string, len(entries))
	for i, id := range entries {
		ids[i] = id.String()
	}
	list, _, _ := callIfAllowed(in, api.ListApprovals, api.ApprovalsInput{Entries: ids})
	requests := make(askedFor, len(list.Approvals))
	for i, a := range list.Approvals {
		requests[i] = approvalView{a}
	}
	return requests
}

// askedForAll returns the waiting requests for approval that select entries of a list.
func (in *request) askedForAll(entries []deadletter.Summary) askedFor {
	ids := make([]uuid.UUID, len(entries))
	for i := range entries {
		ids[i] = entries[i].ID
	}
	return in.askedFor(ids...)
}

// Ending tells the requester how the request ended.
func (a approvalView) Ending() string {
	text := "Your request to " + strings.ToLower(a.Do()) + " " + a.What()
	by := ""
	if a.DecidedBy != nil {
		by = *a.DecidedBy
	}
	switch a.State {
	case "done":
		text += " was approved by " + by + ", and dlqd executed it"
		if a.Changed != nil && a.Job() == 0 {
			text += ": " + number(*a.Changed) + " changed"
		}
	case "failed":
		text += " was approved by " + by + ", but it failed: " + a.Problem
	case "refused":
		text += " was refused by " + by
		if a.Decision != "" {
			text += ": " + a.Decision
		}
	case approval.Expired:
		text += " expired without a decision"
	default:
		text += " was " + a.State + " by " + by
	}
	return text + "."
}

type approvals struct {
	Sentence string
	Open     []approvalView
	Ended    []approvalView
	Copies   []copyText
}

// approvalColumns are the columns of dlq.approvals that every role with access to the table may
// read.
const approvalColumns = "id, operation, state, entries, by_queue, actor, requested_at, expires_at, decided_by, " +
	"decided_at, changed, outcome"

func (c *Console) approvals(in *request) (*view, error) {
	list, err := call(in, api.ListApprovals, api.ApprovalsInput{})
	if err != nil {
		return nil, err
	}
	p := &approvals{Copies: copies("dlqd approvals", "SELECT "+approvalColumns+" FROM dlq.approvals ORDER BY id DESC;",
		in.curl(api.ListApprovals.Path))}
	forMe := 0
	for _, a := range list.Approvals {
		if a.State != approval.Requested {
			p.Ended = append(p.Ended, approvalView{a})
			continue
		}
		p.Open = append(p.Open, approvalView{a})
		if in.me().Via != access.ViaNothing && mayApprove(in.me(), a) {
			forMe++
		}
	}
	var sentences []string
	if forMe > 0 {
		sentences = append(sentences, plural(forMe, "request waits", "requests wait")+" for you.")
	}
	if others := len(p.Open) - forMe; others > 0 {
		sentences = append(sentences, plural(others, "request waits", "requests wait")+" for another person.")
	}
	p.Sentence = cmp.Or(strings.Join(sentences, " "), "No open requests.")
	return &view{
		Template: "approvals", Title: "Approvals", Data: p, Interval: approvalsInterval,
		Seen: outcomesFor(in.me(), list.Approvals...),
	}, nil
}

type approvalDetail struct {
	approvalView

	Now        *int64 // number of entries that approval would change now; nil if it is unknown
	Since      string // why Now differs from the number at the time of the request; "" if it does not
	WhyApprove string // why the viewer cannot approve the request; "" if the viewer can
	WhyRefuse  string
	Mine       bool
	// MayDownload reports whether the viewer may download the approved export.
	MayDownload bool
	Rest        json.RawMessage // the other parameters of the operation
	Result      *approvalResult // nil until dlqd has executed the request
	Copies      []copyText
}

// approvalResult is the result of an executed request: numbers of unchanged entries by reason, and the page that lists
// the changed entries.
type approvalResult struct {
	Left     []share // numbers of entries, by reason
	To, Name string  // page of the bulk operation or of the replay run; "" if there is none
	CanUndo  bool    // the bulk operation, which has the id of the request, can be undone
}

func (c *Console) approval(in *request) (*view, error) {
	input := api.GetApprovalInput{ApprovalInput: api.ApprovalInput{ID: in.PathValue("id")}}
	requested, err := call(in, api.GetApproval, input)
	if err != nil {
		return nil, err
	}
	a := &approvalDetail{approvalView: approvalView{requested}}
	me := in.me()
	a.Mine = me.Via != access.ViaNothing && a.Actor == me.Name
	_, refused := a.MayExport(in.actor())
	a.MayDownload = refused == nil
	needs := access.Operator
	if admin, _ := a.Needs(); admin {
		needs = access.Admin
	}
	switch {
	case !a.Open():
		a.WhyRefuse = "the request is " + a.State
	case me.Via == access.ViaNothing:
		a.WhyRefuse = "authentication is off (access.yaml), so dlqd cannot tell a second person from the first"
	default:
		a.WhyRefuse = missingRole(me, needs)
	}
	if a.WhyApprove = a.WhyRefuse; a.WhyApprove == "" && a.RequestedBy(me.Name, me.TokenBy) {
		a.WhyApprove = "you count as the requester; another person must approve it"
	}
	counting := time.Duration(0)
	if a.Open() {
		counting = a.countMatches(in, input)
	}
	if err := a.findResult(in); err != nil {
		return nil, err
	}
	rest := map[string]json.RawMessage{}
	_ = json.Unmarshal(a.Request, &rest)
	delete(rest, "filter")
	delete(rest, "do")
	if len(rest) > 0 {
		if raw, err := json.Marshal(rest); err == nil {
			a.Rest = raw
		}
	}
	id := a.ID.String()
	a.Copies = copies("dlqd approvals show "+id, "SELECT "+approvalColumns+" FROM dlq.approvals WHERE id = '"+id+"';",
		in.curl(address(api.GetApproval, input)))
	return &view{
		Template: "approval", Title: a.Verb() + " " + a.What(), Data: a,
		Interval: max(approvalsInterval, countingShare*counting), Seen: outcomesFor(me, requested),
	}, nil
}

// findResult sets Result once dlqd has executed the request, in whole or in part.
func (a *approvalDetail) findResult(in *request) error {
	if a.State != "done" && a.State != "failed" || a.Frozen == nil || a.Operation == approval.Export {
		return nil
	}
	r, left := &approvalResult{}, map[string]int64{}
	switch a.Operation {
	case approval.Bulk:
		operation, ok, err := callIfAllowed(in, api.GetOperation, api.GetOperationInput{
			OperationInput: api.OperationInput{ID: a.ID.String()}, Limit: 1,
		})
		if err != nil {
			return err
		}
		if ok { // an operation that found no entry is not recorded
			r.To, r.Name = "/operations/"+a.ID.String(), "Bulk operation"
			r.CanUndo = operation.Action != "purge" && operation.Changed > 0 && in.me().May(access.Operator)
		}
		maps.Copy(left, operation.Unchanged)
		left["no longer matched the filter after the approval"] = *a.Frozen - operation.Looked
	case approval.Replay:
		if a.Outcome != nil {
			r.To, r.Name = "/replays/"+a.Outcome.String(), "Replay run"
		}
		if a.Changed != nil {
			left["changed state after the approval"] = *a.Frozen - *a.Changed
		}
	}
	maps.DeleteFunc(left, func(_ string, n int64) bool { return n <= 0 })
	r.Left = shares(left)
	a.Result = r
	return nil
}

// countMatches counts the entries that approval would change now, and returns the duration of the count. If the count
// fails, Now stays nil, and the page shows only the number at the time of the request.
func (a *approvalDetail) countMatches(in *request, input api.GetApprovalInput) time.Duration {
	began := time.Now()
	ctx, cancel := context.WithTimeout(in.Context(), countingTimeout)
	defer cancel()
	input.Matches = true
	counted, err := call(&request{Request: in.WithContext(ctx), console: in.console}, api.GetApproval, input)
	if err == nil && counted.Matches != nil {
		a.Now, a.Since = &counted.Matches.Entries, sinceRequest(a.Entries, counted.Matches)
	}
	return time.Since(began)
}

// sinceRequest returns why a request that selected a number of entries selects another number now, such as "3 were
// resolved meanwhile"; "" if nothing changed. Closed may count entries that the request did not select (see
// dlq.approval_matches): if it is above the number of entries that left, the text names no states.
func sinceRequest(before int64, now *approval.Matches) string {
	var why []string
	left, closed := before+now.Arrived-now.Entries, int64(0)
	for _, n := range now.Closed {
		closed += n
	}
	if closed <= left {
		left -= closed
		for _, state := range []deadletter.Status{
			deadletter.Returned, deadletter.Resolved, deadletter.Archived, deadletter.Failed,
		} {
			if n := now.Closed[string(state)]; n > 0 {
				word := statusOf(state).Word + " meanwhile"
				why = append(why, plural(n, "was "+word, "were "+word))
			}
		}
	}
	if left > 0 {
		why = append(why, plural(left, "no longer matches", "no longer match"))
	}
	if now.Arrived > 0 {
		why = append(why, number(now.Arrived)+" arrived")
	}
	return strings.Join(why, ", ")
}

// decide approves, refuses or withdraws a request.
func (c *Console) decide(in *request) (*done, error) {
	verb, id := in.PostFormValue("do"), in.PathValue("id")
	input, note := api.ApprovalInput{ID: id}, api.Action{Note: in.PostFormValue("note")}
	text := map[string]string{
		"approve": "Approved: dlqd executes it.", "refuse": "Refused: nothing is done.",
		"withdraw": "Withdrawn: nothing is done.",
	}[verb]
	switch verb {
	case "approve":
		expect, err := strconv.ParseInt(digitsOf(in.PostFormValue("expect")), 10, 64)
		if err != nil {
			return nil, &api.Problem{
				Status: http.StatusUnprocessableEntity, Title: "Number required",
				Detail: "type the number that the page shows; if more match by then, dlqd refuses",
			}
		}
		if _, err := call(in, api.Approve, api.ApproveInput{
			ApprovalInput: input, Body: api.ApproveAction{Action: note, Expect: expect},
		}); err != nil {
			return nil, err
		}
	case "refuse", "withdraw":
		operation := api.Refuse
		if verb == "withdraw" {
			operation = api.Withdraw
		}
		if _, err := call(in, operation, api.DecisionInput{ApprovalInput: input, Body: &note}); err != nil {
			return nil, err
		}
	default:
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose approve, refuse or withdraw",
		}
	}
	return &done{To: "/approvals/" + url.PathEscape(id), Flash: flash{Text: text}}, nil
}
