package console

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
)

// approvalsEvery is the render interval of open approval pages.
const approvalsEvery = 5 * time.Second

// asking is a request for approval as pages show it.
type asking struct {
	*approval.Approval
}

// Verb returns the requested action with a capital.
func (a asking) Verb() string { return upper(a.Do()) }

// filter returns the filter of the request, as JSON.
func (a asking) filter() json.RawMessage {
	var request struct {
		Filter json.RawMessage `json:"filter"`
	}
	_ = json.Unmarshal(a.Request, &request)
	return request.Filter
}

// Words returns the filter in the filter language.
func (a asking) Words() string { return filterWords(a.filter()) }

// Open reports whether the request still waits for a decision.
func (a asking) Open() bool { return a.State == approval.Requested }

// Mark returns the mark of the request's state.
func (a asking) Mark() mark {
	switch a.State {
	case approval.Requested:
		return mark{"requested", "waits for a second person", "◆", "warn"}
	case "approved":
		return mark{"approved", "approved, being carried out", "◐", "info"}
	case "done":
		return mark{"done", "done", "✓", "ok"}
	case "failed":
		return mark{"failed", "failed", "✕", "bad"}
	}
	return mark{a.State, a.State, "▢", "neutral"}
}

// Queues returns the number of entries by queue.
func (a asking) Queues() []share {
	of := map[string]int64{}
	_ = json.Unmarshal(a.ByQueue, &of)
	return shares(of)
}

// Sentence describes the request and its outcome.
func (a asking) Sentence() string {
	asks := a.Actor + " asks to " + strings.ToLower(a.Do()) + " " + plural(a.Entries, "dead letter") + "."
	by := ""
	if a.DecidedBy != nil {
		by = *a.DecidedBy
	}
	switch a.State {
	case approval.Requested:
		return asks + " Nothing was done yet: it waits for a second person, until " + a.ExpiresAt.UTC().Format("Mon 15:04 UTC") + "."
	case "approved":
		return asks + " " + by + " approved it, and dlqd carries it out."
	case "done":
		said := asks + " " + by + " approved it, and it was done"
		if a.Changed != nil {
			said += ": " + plural(*a.Changed, "dead letter was", "dead letters were") + " touched"
		}
		return said + "."
	case "failed":
		return asks + " " + by + " approved it, but it failed: " + a.Problem
	case "refused":
		return asks + " " + by + " refused it; nothing was done."
	case "withdrawn":
		return asks + " It was withdrawn; nothing was done."
	case "expired":
		return asks + " Nobody decided in time; nothing was done."
	}
	return asks
}

type approvals struct {
	Sentence string
	Open     []asking
	Ended    []asking
	Copies   []copyText
}

// approvalColumns are the columns of dlq.approvals that every role with access to the table may
// read.
const approvalColumns = "id, operation, state, entries, by_queue, actor, requested_at, expires_at, decided_by, decided_at, changed, outcome"

func (c *Console) approvals(in *request) (*view, error) {
	var list struct {
		Approvals []*approval.Approval `json:"approvals"`
	}
	if err := in.get(api.ApprovalsPath, nil, &list); err != nil {
		return nil, err
	}
	p := &approvals{Copies: copies("dlqd approvals", "SELECT "+approvalColumns+" FROM dlq.approvals ORDER BY id DESC;", in.curl(api.ApprovalsPath))}
	mine := 0
	for _, a := range list.Approvals {
		if a.State != approval.Requested {
			p.Ended = append(p.Ended, asking{a})
			continue
		}
		p.Open = append(p.Open, asking{a})
		if a.Actor == in.me().Name {
			mine++
		}
	}
	switch n := len(p.Open); {
	case n == 0:
		p.Sentence = "Nothing waits for a second person."
	case mine == n:
		p.Sentence = plural(n, "request of yours waits", "requests of yours wait") + " for a second person."
	default:
		p.Sentence = plural(n-mine, "request waits", "requests wait") + " for you."
		if mine > 0 {
			p.Sentence += " " + plural(mine, "of your own waits", "of your own wait") + " for somebody else."
		}
	}
	return &view{Template: "approvals", Title: "Approvals", Data: p, Every: approvalsEvery}, nil
}

type approvalDetail struct {
	asking

	Now        *int64 // number of entries that match now; nil if it is unknown
	WhyApprove string // why the viewer cannot approve; "" if they can
	WhyRefuse  string
	Mine       bool
	Rest       json.RawMessage // the other parameters of the operation
	Copies     []copyText
}

func (c *Console) approval(in *request) (*view, error) {
	a := &approvalDetail{asking: asking{&approval.Approval{}}}
	path := api.ApprovalsPath + "/" + url.PathEscape(in.PathValue("id"))
	if err := in.get(path, nil, a.Approval); err != nil {
		return nil, err
	}
	me := in.me()
	a.Mine = me.Via != access.ViaNothing && a.Actor == me.Name
	needs := access.Operator
	if admin, _ := a.Needs(); admin {
		needs = access.Admin
	}
	switch {
	case !a.Open():
		a.WhyRefuse = "it is " + a.State
	case me.Via == access.ViaNothing:
		a.WhyRefuse = "nobody is asked who they are here (access.yaml: authentication), and so nobody can be a second person"
	default:
		a.WhyRefuse = mayNot(me, needs)
	}
	if a.WhyApprove = a.WhyRefuse; a.WhyApprove == "" && a.Mine {
		a.WhyApprove = "you asked for it: it takes another person"
	}
	if _, live := isLive(in.Context()); a.Open() && !live { // counting is expensive: only when the page is loaded
		a.look(in)
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
	a.Copies = copies("dlqd approvals show "+id, "SELECT "+approvalColumns+" FROM dlq.approvals WHERE id = '"+id+"';", in.curl(path))
	return &view{Template: "approval", Title: a.Verb() + " " + plural(a.Entries, "dead letter"), Data: a, Every: approvalsEvery}, nil
}

// look counts the entries that the operation would touch now. If the count fails, Now stays nil and
// the page shows only the number at the time of the request.
func (a *approvalDetail) look(in *request) {
	var body map[string]any
	if json.Unmarshal(a.Request, &body) != nil {
		return
	}
	ask := map[string]any{"dryRun": true, "filter": a.filter()}
	var found struct {
		Chosen  int64 `json:"chosen"`
		Entries int64 `json:"entries"`
		Preview *struct {
			Total int64 `json:"total"`
		} `json:"preview"`
	}
	switch a.Operation {
	case approval.Replay:
		ask["all"] = true
		if in.post("/api/dlq/replay", ask, &found) == nil && found.Preview != nil {
			a.Now = &found.Preview.Total
		}
	case approval.Bulk:
		for _, name := range []string{"do", "all", "assignee", "tags", "force"} {
			if value, has := body[name]; has {
				ask[name] = value
			}
		}
		if in.post("/api/dlq/bulk", ask, &found) == nil {
			a.Now = &found.Chosen
		}
	default:
		ask["note"] = "a look before it is approved"
		if in.post("/api/dlq/erasures", ask, &found) == nil {
			a.Now = &found.Entries
		}
	}
}

// decide approves, refuses or withdraws a request.
func (c *Console) decide(in *request) (*done, error) {
	verb, id := in.PostFormValue("do"), url.PathEscape(in.PathValue("id"))
	body := map[string]any{"note": in.PostFormValue("note")}
	said := map[string]string{"approve": "Approved: dlqd carries it out.", "refuse": "Refused: nothing is done.", "withdraw": "Withdrawn: nothing is done."}[verb]
	switch verb {
	case "approve":
		expect, err := strconv.ParseInt(digitsOf(in.PostFormValue("expect")), 10, 64)
		if err != nil {
			return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "How many?", Detail: "type how many dead letters you saw that it touches: it is refused where they have become more"}
		}
		body["expect"] = expect
	case "refuse", "withdraw":
	default:
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "No such action", Detail: "a request can be approved, refused and withdrawn"}
	}
	if err := in.post(api.ApprovalsPath+"/"+id+"/"+verb, body, nil); err != nil {
		return nil, err
	}
	return &done{To: "/approvals/" + id, Flash: flash{Text: said}}, nil
}
