package console

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

const (
	// reviewInterval is the render interval of an open review.
	reviewInterval = 10 * time.Second
	// reviewPage is the number of dead letters that the review lists.
	reviewPage = 20
)

// review is the list of entries that need a person, oldest first, with one of them open for a
// decision.
type review struct {
	Sentence string
	Whose    string // me, nobody, or "" for all
	Query    string
	Entries  []deadletter.Summary
	More     bool
	Entry    *deadLetterPage // nil: no entry is left, or the one on an open page was decided meanwhile
	Next     string          // address after the decision
	Copies   []copyText
}

// At returns the address of the review with another entry open.
func (r *review) At(id uuid.UUID) string {
	query := url.Values{"at": {id.String()}}
	if r.Whose != "" {
		query.Set("whose", r.Whose)
	}
	return "/review?" + query.Encode()
}

func (c *Console) review(in *request) (*view, error) {
	r := &review{Whose: in.URL.Query().Get("whose"), Query: "status:manual"}
	switch r.Whose {
	case "me":
		r.Query += " assigned:me"
		if in.me().Name == "" {
			r.Whose, r.Query = "", "status:manual"
		}
	case "nobody":
		r.Query += " assigned:nobody"
	default:
		r.Whose = ""
	}
	if q := strings.TrimSpace(in.URL.Query().Get("q")); q != "" {
		r.Query += " " + q
	}
	page, err := call(in, api.ListEntries, api.ListInput{Q: r.Query, Order: "oldest", Limit: reviewPage})
	if err != nil {
		return nil, err
	}
	r.Copies = in.listCopies(r.Query, true, reviewPage)
	r.Entries, r.More = page.Entries, page.Next != ""
	at := max(slices.IndexFunc(r.Entries,
		func(e deadletter.Summary) bool { return e.ID.String() == in.URL.Query().Get("at") }), 0)
	switch n := len(r.Entries); {
	case n == 0:
		r.Sentence = map[string]string{
			"": "No dead letters wait for a person.", "me": "No dead letters assigned to you wait for a person.",
			"nobody": "All dead letters that wait for a person are assigned.",
		}[r.Whose]
	case r.More:
		r.Sentence = fmt.Sprintf("More than %d dead letters wait for a person, the oldest captured %s.", n,
			ago(r.Entries[0].CreatedAt))
	default:
		r.Sentence = fmt.Sprintf("%s, the oldest captured %s.",
			plural(n, "dead letter waits for a person", "dead letters wait for a person"), ago(r.Entries[0].CreatedAt))
	}
	v := &view{Template: "review", Title: "Review", Data: r, Interval: reviewInterval}
	if _, live := isLive(in.Context()); live &&
		(len(r.Entries) == 0 || r.Entries[at].ID.String() != in.URL.Query().Get("at")) {
		r.Sentence += " The dead letter shown below no longer waits."
		return v, nil
	}
	if len(r.Entries) > 0 {
		v.Live = in.with("at", r.Entries[at].ID.String()) // a live rendering shows this entry even if the list changes
		detail, err := call(in, api.GetEntry, api.EntryInput{ID: r.Entries[at].ID.String()})
		if err != nil {
			return nil, err
		}
		r.Entry = newDeadLetterPage(in, detail)
		r.Next = in.with("at", "")
		if at+1 < len(r.Entries) {
			r.Next = in.with("at", r.Entries[at+1].ID.String())
		}
	}
	return v, nil
}
