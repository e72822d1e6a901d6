package console

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

const (
	// reviewInterval is the render interval of an open review.
	reviewInterval = 10 * time.Second
	// reviewPage is the number of dead letters that the review lists.
	reviewPage = 20
)

// review lists the entries that need an operator, oldest first, and shows one of them for a decision. Operators who
// review at the same time get different entries.
type review struct {
	Sentence string
	Count    string                // number of entries that wait
	Counts   map[string]*api.Count // of the tabs, by their filter
	Whose    string                // me, nobody, or "" for all
	Query    string
	Entries  []deadletter.Summary
	More     bool
	Entry    *deadLetterPage // the entry that is shown; nil if none is free, or if it was decided while the page was open
	Next     string          // address to go to after the decision
	Copies   []copyText

	search string // the filter in the page's address
}

// At returns the address of the review with another entry open.
func (r *review) At(id uuid.UUID) string { return r.address("at", id) }

// address returns the address of the review with a parameter: "at" shows an entry, "after" hands out the entry after
// one.
func (r *review) address(name string, id uuid.UUID) string {
	query := url.Values{name: {id.String()}}
	if r.Whose != "" {
		query.Set("whose", r.Whose)
	}
	if r.search != "" {
		query.Set("q", r.search)
	}
	return "/review?" + query.Encode()
}

// reviewTabs returns the filters of the tabs.
func reviewTabs() []string {
	return []string{"status:manual", "status:manual assigned:me", "status:manual assigned:nobody"}
}

// newReview returns the review for a request, and the filter of the review without its status.
func newReview(in *request) (r *review, chosen string) {
	params := in.URL.Query()
	r = &review{Whose: params.Get("whose"), search: strings.TrimSpace(params.Get("q"))}
	switch {
	case r.Whose == "me" && in.me().Name != "":
		chosen = "assigned:me"
	case r.Whose == "nobody":
		chosen = "assigned:nobody"
	default:
		r.Whose = ""
	}
	chosen = strings.TrimSpace(chosen + " " + r.search)
	r.Query = strings.TrimSpace("status:manual " + chosen)
	return r, chosen
}

func (c *Console) review(in *request) (*view, error) {
	r, chosen := newReview(in)
	at, _ := uuid.Parse(in.URL.Query().Get("at"))
	_, live := isLive(in.Context())
	var given uuid.UUID // entry that the API hands out to the viewer
	hands := !live && in.me().May(access.Operator)
	if hands {
		asked := api.ReviewRequest{Q: chosen}
		if at != uuid.Nil {
			asked.Entry = at.String()
		} else if after, err := uuid.Parse(in.URL.Query().Get("after")); err == nil {
			asked.After = after.String()
		}
		var err error
		if given, err = handOut(in, asked); err != nil {
			return nil, err
		}
	}
	page, err := call(in, api.ListEntries, api.ListInput{Q: r.Query, Order: "oldest", Limit: reviewPage})
	if err != nil {
		return nil, err
	}
	r.Copies = in.listCopies(r.Query, true, reviewPage)
	r.Entries, r.More = page.Entries, page.Next != ""
	for i := range r.Entries {
		if with := r.Entries[i].Review; with != nil && with.Actor == in.actor() {
			r.Entries[i].Review = nil // a row shows only reviews of other operators
		}
	}
	free := slices.IndexFunc(r.Entries, func(e deadletter.Summary) bool { return e.Review == nil })
	listed := slices.ContainsFunc(r.Entries, func(e deadletter.Summary) bool { return e.ID == at })
	wanted := []string{r.Query}
	if !live {
		wanted = append(wanted, reviewTabs()...)
	}
	slices.Sort(wanted)
	r.Counts = c.counts.get(in, slices.Compact(wanted))
	all := c.sidebar.get(in).Counts["review"]
	if r.Whose != "" || r.search != "" {
		all = ""
		if count := r.Counts[r.Query]; count != nil {
			all = number(count.Entries) + map[bool]string{true: "+"}[count.AtLeast]
		}
	}
	r.summarize(free < 0, all)
	switch {
	case given != uuid.Nil:
		at = given
	case live, listed: // keep at: the page was loaded with this entry, or another operator has it in review
	case hands && at != uuid.Nil: // the entry at was decided: hand out another one
		if at, err = handOut(in, api.ReviewRequest{Q: chosen}); err != nil {
			return nil, err
		}
	default:
		at = uuid.Nil
	}
	if at == uuid.Nil && len(r.Entries) > 0 && !in.me().MayEverywhere(access.Operator) {
		at = r.Entries[max(free, 0)].ID // a viewer who may not decide on every entry sees one to read
	}
	v := &view{Template: "review", Title: "Review", Data: r, Interval: reviewInterval}
	if at == uuid.Nil {
		return v, nil
	}
	if !live || listed || r.More {
		detail, err := call(in, api.GetEntry, api.EntryInput{ID: at.String()})
		if err != nil {
			return nil, err
		}
		if !live || detail.Status == deadletter.Manual {
			r.Entry = newDeadLetterPage(in, detail)
		}
	}
	if r.Entry == nil {
		r.Sentence += " The dead letter shown below no longer waits."
		return v, nil
	}
	if with := r.Entry.Review; with != nil && with.Actor == in.actor() {
		r.Entry.Review = nil
	}
	r.Next = r.address("after", at)
	v.Live = r.At(at) // a live rendering shows this entry even if the list changes
	return v, nil
}

// summarize sets the sentence. taken means that other operators have all listed entries in review. all is the number of
// waiting entries in this review, or "" if it is unknown.
func (r *review) summarize(taken bool, all string) {
	r.Count = number(len(r.Entries))
	if r.More {
		r.Count += "+"
	}
	switch n := len(r.Entries); {
	case n == 0:
		r.Sentence = map[string]string{
			"": "No dead letters wait for a person.", "me": "No dead letters assigned to you wait for a person.",
			"nobody": "All dead letters that wait for a person are assigned.",
		}[r.Whose]
		return
	case r.More && all != "":
		r.Count = all
		r.Sentence = fmt.Sprintf("%s dead letters wait for a person, the oldest captured %s.", all,
			ago(r.Entries[0].CreatedAt))
	case r.More:
		r.Sentence = fmt.Sprintf("More than %d dead letters wait for a person, the oldest captured %s.", n,
			ago(r.Entries[0].CreatedAt))
	default:
		r.Sentence = fmt.Sprintf("%s, the oldest captured %s.",
			plural(n, "dead letter waits for a person", "dead letters wait for a person"), ago(r.Entries[0].CreatedAt))
	}
	if taken {
		r.Sentence += " Other operators are looking at them."
	}
}

// handOut returns the entry that the API hands out to the viewer, or uuid.Nil if it hands out none.
func handOut(in *request, asked api.ReviewRequest) (uuid.UUID, error) {
	out, _, err := callIfAllowed(in, api.ReviewNext, api.ReviewInput{Body: &asked})
	if err != nil || out.ID == nil {
		return uuid.Nil, err
	}
	return *out.ID, nil
}
