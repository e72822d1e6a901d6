package console

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
)

const (
	// listInterval is the render interval of an open list.
	listInterval = 10 * time.Second
	// listPage is the number of dead letters per page.
	listPage = 25
)

// columns returns the optional columns of a list. Only entries of a source have a record.
func columns(entries []deadletter.Summary) []string {
	names := []string{"queue", "class", "error", "tries", "next", "owner"}
	if slices.ContainsFunc(entries, func(e deadletter.Summary) bool { return e.Record != nil }) {
		names = slices.Insert(names, 1, "record")
	}
	return names
}

// choose sets the columns of the list.
func (l *list) choose() {
	l.Choices, l.Columns = columns(l.Entries), map[string]bool{}
	for _, name := range l.Choices {
		l.Columns[name] = len(l.Chosen) == 0 || slices.Contains(l.Chosen, name)
	}
}

type list struct {
	Query   string
	Order   string
	Entries []deadletter.Summary
	Asked   askedFor
	Count   *api.Count
	Next    string // address of the next page; "" on the last page
	First   string // address of the first page; "" on the first page
	Problem *api.Problem
	Columns map[string]bool
	Choices []string // names of all optional columns
	Chosen  []string // the chosen columns; nil for all

	Otherwise string // address of the list in the opposite order
	Verbs     []bulkVerb
	Acts      []bulkVerb // actions that the states of the matching entries may allow
	Tabs      []quickView
	Counts    map[string]*api.Count // counts of tabs and saved views, by filter
	Operator  bool
	Copies    []copyText
	Searched  *time.Time // time back to which a text search has looked
	Views     []deadletter.SavedView
	Me        string // name of the viewer, who may delete their own views
	Time      *timeRange
}

// quickView is a tab of the list.
type quickView struct {
	Name, Query string
	Current     bool
}

// quickViews returns the tabs for a query.
func quickViews(query string) []quickView {
	tabs := []quickView{
		{Name: "All"},
		{Name: "Needs a person", Query: "status:manual"},
		{Name: "Pending", Query: "status:pending"},
		{Name: "Processing", Query: "status:processing"},
		{Name: "Failed", Query: "status:failed"},
		{Name: "Returned", Query: "status:returned"},
		{Name: "Mine", Query: "assigned:me"},
		{Name: "Resolved", Query: "status:resolved"},
	}
	for i := range tabs {
		tabs[i].Current = strings.TrimSpace(query) == tabs[i].Query
	}
	return tabs
}

// openCounts returns the counts of open entries by the filters of their tabs.
func openCounts(byStatus map[string]int64) map[string]*api.Count {
	counts := map[string]*api.Count{}
	if byStatus != nil {
		for query, status := range map[string]deadletter.Status{
			"status:manual": deadletter.Manual, "status:pending": deadletter.Pending,
			"status:processing": deadletter.Processing,
		} {
			counts[query] = &api.Count{Entries: int(byStatus[string(status)])}
		}
	}
	return counts
}

// counted returns the filters whose counts the page needs and that known does not have: the filter of the list, then
// the filters of the tabs and of the first saved views.
func (l *list) counted(known map[string]*api.Count) []string {
	queries := make([]string, 0, 1+len(l.Tabs)+len(l.Views))
	queries = append(queries, strings.TrimSpace(l.Query))
	for _, tab := range l.Tabs {
		queries = append(queries, tab.Query)
	}
	for _, v := range l.Views[:min(len(l.Views), maxCounted)] {
		queries = append(queries, v.Query)
	}
	return slices.DeleteFunc(queries, func(query string) bool { return known[query] != nil })
}

// count returns the number of matching entries. It is exact if the page lists all of them. Otherwise it is the number
// in Counts or, if Counts has none or an old one, at least the number of entries on the page.
func (l *list) count() *api.Count {
	listed := &api.Count{Entries: len(l.Entries), AtLeast: l.Next != "" || l.First != ""}
	known := l.Counts[strings.TrimSpace(l.Query)]
	if !listed.AtLeast || known == nil || known.Entries < listed.Entries ||
		known.Entries == listed.Entries && l.Next != "" {
		return listed
	}
	return known
}

// possibleActs returns the actions that the states of the matching entries may allow. If the page lists all matching
// entries, it uses their states; otherwise the states that [mayHave] allows.
func (l *list) possibleActs(byStatus map[string]int64, me string) (acts []bulkVerb) {
	may := mayHave(l.Query, byStatus, me)
	has := func(status deadletter.Status) bool {
		return slices.ContainsFunc(l.Entries, func(e deadletter.Summary) bool { return e.Status == status }) ||
			(l.Next != "" || l.First != "") && may(status)
	}
	for _, verb := range l.Verbs {
		if slices.ContainsFunc(verb.From, has) {
			acts = append(acts, verb)
		}
	}
	return acts
}

// mayHave returns a function that reports whether an entry that matches the filter may have a state. If the filter
// names states, these are the possible ones. Otherwise all states are possible, except open states without any entry.
func mayHave(query string, byStatus map[string]int64, me string) func(deadletter.Status) bool {
	if chosen, err := filter.Parse(query, me); err == nil && len(chosen.Status) > 0 {
		return func(status deadletter.Status) bool { return slices.Contains(chosen.Status, string(status)) }
	}
	return func(status deadletter.Status) bool {
		n, known := byStatus[string(status)]
		return !known && !status.Open() || byStatus == nil || n > 0
	}
}

// CurrentView reports whether the list shows a saved view.
func (l *list) CurrentView(v deadletter.SavedView) bool {
	return v.Query == l.Query && v.Order == l.Order
}

// ViewPath returns the address of the list with a saved view.
func (l *list) ViewPath(v deadletter.SavedView) string {
	query := url.Values{"q": {v.Query}}
	if v.Order != "" {
		query.Set("order", v.Order)
	}
	if len(v.Columns) > 0 {
		query["column"] = v.Columns
	}
	return "/dead-letters?" + query.Encode()
}

// bulkVerb is an action on many entries. From has the statuses of entries to which the action applies.
type bulkVerb struct {
	Name, Label, Consequence string
	From                     []deadletter.Status
	Danger                   bool
}

// Statuses returns the statuses in From as a text, separated by blanks, which console.js reads.
func (v *bulkVerb) Statuses() string {
	names := make([]string, len(v.From))
	for i, status := range v.From {
		names[i] = string(status)
	}
	return strings.Join(names, " ")
}

func bulkVerbs() []bulkVerb {
	anyStatus := []deadletter.Status{
		deadletter.Pending, deadletter.Manual, deadletter.Failed, deadletter.Returned, deadletter.Resolved,
		deadletter.Archived, deadletter.Processing,
	}
	return []bulkVerb{
		{
			"replay", "Replay", "redelivers them at a limited rate, and stops if too many fail again",
			[]deadletter.Status{deadletter.Pending, deadletter.Manual, deadletter.Failed},
			false,
		},
		{"assign", "Assign", "assigns them to a user", anyStatus, false},
		{"tag", "Tag", "adds tags", anyStatus, false},
		{"note", "Note", "adds a note to each", anyStatus, false},
		{"park", "Park", "moves them to manual: dlqd does not redeliver them automatically", movesFrom("park"), false},
		{"unpark", "Back to automatic", "returns them to dlqd, which decides what happens next", movesFrom("unpark"), false},
		{"resolve", "Resolve", "closes them as done elsewhere", movesFrom("resolve"), false},
		{"discard", "Discard", "closes them as not wanted", movesFrom("discard"), true},
		{"expire", "Expire", "closes them as out of date", movesFrom("expire"), true},
		{"reopen", "Reopen", "moves closed ones to manual again", movesFrom("reopen"), false},
	}
}

func (c *Console) deadLetters(in *request) (*view, error) {
	params := in.URL.Query()
	l := &list{
		Query: params.Get("q"), Order: params.Get("order"), Verbs: bulkVerbs(),
		Operator: in.me().May(access.Operator), Chosen: params["column"],
	}
	l.choose()
	first := url.Values{"q": {l.Query}, "column": l.Chosen}
	if l.Order != "oldest" {
		first.Set("order", "oldest")
	}
	l.Otherwise = "?" + first.Encode()
	v := &view{Template: "deadletters", Title: "Dead letters", Data: l, Interval: listInterval}
	if query := strings.TrimSpace(l.Query); query != "" {
		v.Title = clip(80, query) + " · Dead letters"
	}
	chosen, problem := in.ranged(l.Query)
	switch l.Time = in.timeRange(l.Query, in.URL.Path); {
	case problem != nil:
		l.Problem, v.Status, v.Interval, l.Tabs = problem, problem.Status, 0, quickViews(l.Query)
		return v, nil //nolint:nilerr // the page shows the problem
	case chosen != l.Query: // redirect to an address with the range in its filter only
		return &view{To: in.with("from", "", "to", "", "cursor", "", "q", chosen)}, nil
	}
	_, live := isLive(in.Context())
	l.Tabs = quickViews(l.Query)
	var page *api.EntryPage
	requests := []func() error{func() (err error) {
		page, err = call(in, api.ListEntries, api.ListInput{
			Q: l.Query, Order: l.Order, Cursor: params.Get("cursor"), Limit: listPage, Count: live,
		})
		return err
	}}
	var stats api.Stats
	if live { // no viewer waits for a live rendering
		requests = append(requests, readIfAllowed(in, api.GetStats, api.None{}, &stats))
	} else {
		requests = append(requests, func() error {
			views, err := call(in, api.ListViews, api.ViewsInput{})
			if err == nil {
				l.Views, l.Me = views.Views, in.actor()
			}
			return err
		})
		c.counts.refresh(in, l.counted(openCounts(map[string]int64{}))) // read concurrently with the list
	}
	err := inParallel(requests...)
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		l.Problem, v.Status, v.Interval = problem, problem.Status, 0
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	l.Entries, l.Searched = page.Entries, page.SearchedTo
	l.choose()
	l.Asked = in.askedForAll(page.Entries)
	if page.Next != "" {
		l.Next = in.with("cursor", page.Next)
	}
	if params.Get("cursor") != "" {
		l.First = in.with("cursor", "")
		v.Interval = 0 // older pages do not change on their own
	}
	if !live {
		stats.ByStatus = c.sidebar.get(in).ByStatus
	}
	l.Counts = openCounts(stats.ByStatus)
	if !live {
		maps.Copy(l.Counts, c.counts.get(in, l.counted(l.Counts)))
	}
	if page.Count != nil {
		l.Counts[strings.TrimSpace(l.Query)] = page.Count
	}
	l.Count = l.count()
	l.Counts[strings.TrimSpace(l.Query)] = l.Count
	l.Acts = l.possibleActs(stats.ByStatus, in.actor())
	l.Copies = in.listCopies(l.Query, l.Order == "oldest", listPage)
	return v, nil
}

// maxSummaries limits how many dead letters a page reads by id: a filter has at most 4,096 characters.
const maxSummaries = 100

// summaries returns dead letters by id, if the viewer may see them. It returns none if there are more than maxSummaries
// ids or if the API refuses; the page then omits details about them.
func (in *request) summaries(ids []string) map[uuid.UUID]*deadletter.Summary {
	found := map[uuid.UUID]*deadletter.Summary{}
	if len(ids) == 0 || len(ids) > maxSummaries {
		return found
	}
	page, err := call(in, api.ListEntries, api.ListInput{Q: "id:" + strings.Join(ids, ","), Limit: len(ids)})
	if err != nil {
		return found
	}
	for i := range page.Entries {
		found[page.Entries[i].ID] = &page.Entries[i]
	}
	return found
}

// saveView saves the list as a view.
func (c *Console) saveView(in *request) (*done, error) {
	name := strings.TrimSpace(in.PostFormValue("name"))
	if name == "" {
		return nil, &api.Problem{Status: http.StatusUnprocessableEntity, Detail: "a saved view requires a name"}
	}
	saved := deadletter.SavedView{
		Query: in.PostFormValue("q"), Order: in.PostFormValue("order"), Columns: in.PostForm["column"],
	}
	if _, err := call(in, api.SaveView, api.SaveViewInput{ViewInput: api.ViewInput{Name: name}, Body: api.ViewBody{
		Query: saved.Query, Order: saved.Order, Columns: saved.Columns, Shared: in.PostFormValue("shared") != "",
	}}); err != nil {
		return nil, err
	}
	return &done{To: (&list{}).ViewPath(saved), Flash: flash{Text: "Saved view " + name + "."}}, nil
}

// deleteView deletes a view.
func (c *Console) deleteView(in *request) (*done, error) {
	view := api.DeleteViewInput{ViewInput: api.ViewInput{Name: in.PathValue("name")}}
	if _, err := call(in, api.DeleteView, view); err != nil {
		return nil, err
	}
	return &done{To: "/dead-letters", Flash: flash{Text: "Deleted view " + in.PathValue("name") + "."}}, nil
}

// moveView moves a view to the left or to the right among the views that the viewer sees. The views of a team have one
// order for all its members.
func (c *Console) moveView(in *request) (*done, error) {
	if why := missingRole(in.me(), access.Operator); why != "" {
		return nil, &api.Problem{Status: http.StatusForbidden, Detail: "ordering the saved views " + why}
	}
	views, err := call(in, api.ListViews, api.ViewsInput{})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, v := range views.Views {
		if !slices.Contains(names, v.Name) {
			names = append(names, v.Name)
		}
	}
	at := slices.Index(names, in.PathValue("name"))
	if at < 0 {
		return nil, &api.Problem{Status: http.StatusNotFound, Detail: "saved view " + in.PathValue("name") + ": not found"}
	}
	to := max(at-1, 0)
	if in.PostFormValue("to") == "down" {
		to = min(at+1, len(names)-1)
	}
	names[at], names[to] = names[to], names[at]
	if _, err := call(in, api.OrderViews, api.OrderViewsInput{Body: api.OrderViewsBody{Names: names}}); err != nil {
		return nil, err
	}
	return &done{To: "/dead-letters"}, nil
}

// with returns the address of the page with some parameters changed, or removed if their value is "".
func (in *request) with(namesAndValues ...string) string {
	query := in.URL.Query()
	for i := 0; i+1 < len(namesAndValues); i += 2 {
		if name, value := namesAndValues[i], namesAndValues[i+1]; value == "" {
			query.Del(name)
		} else {
			query.Set(name, value)
		}
	}
	address := url.URL{Path: in.URL.Path, RawQuery: query.Encode()}
	return address.String()
}
