package console

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/savedview"
)

const (
	// listEvery is the render interval of an open list.
	listEvery = 10 * time.Second
	// listPage is the number of dead letters per page.
	listPage = "25"
)

// columns returns the optional columns of the list.
func columns() []string {
	return []string{"queue", "class", "error", "tries", "next", "owner"}
}

type list struct {
	Query   string
	Order   string
	Entries []deadletter.Summary
	Count   *api.Count
	Next    string // address of the next page; "" on the last
	First   string // address of the first page; "" on it
	Problem *Problem
	Columns map[string]bool
	Choices []string // of columns
	Chosen  []string // the chosen columns; nil for all

	Otherwise string // address of the list in the other order
	Verbs     []bulkVerb
	Operator  bool
	Copies    []copyText
	Searched  *time.Time // time to which a text search has looked back
	Views     []savedview.SavedView
	Me        string // the viewer, who may delete views of their own
}

// ViewPath returns the address of the list with a saved view.
func (l *list) ViewPath(v savedview.SavedView) string {
	query := url.Values{"q": {v.Query}}
	if v.Order != "" {
		query.Set("order", v.Order)
	}
	if len(v.Columns) > 0 {
		query["column"] = v.Columns
	}
	return "/dead-letters?" + query.Encode()
}

// bulkVerb is an action on many entries. From lists the statuses that it applies to.
type bulkVerb struct {
	Name, Label, Consequence string
	From                     []deadletter.Status
	Danger                   bool
}

// Statuses returns From for console.js.
func (v *bulkVerb) Statuses() string {
	names := make([]string, len(v.From))
	for i, status := range v.From {
		names[i] = string(status)
	}
	return strings.Join(names, " ")
}

func bulkVerbs() []bulkVerb {
	whatever := []deadletter.Status{deadletter.Pending, deadletter.Manual, deadletter.Failed, deadletter.Resolved, deadletter.Archived, deadletter.Processing}
	return []bulkVerb{
		{"replay", "Replay", "sends them back, at a pace, and stops by itself when too many fail again", movesFrom("replay"), false},
		{"assign", "Assign", "gives them to somebody", whatever, false},
		{"tag", "Tag", "adds tags to theirs", whatever, false},
		{"note", "Note", "leaves a note on each", whatever, false},
		{"park", "Park", "takes them out of the automatic path: nothing happens to them by itself", movesFrom("park"), false},
		{"unpark", "Back to automatic", "has dlqd decide again what happens next", movesFrom("unpark"), false},
		{"resolve", "Resolve", "closes them: their work was done elsewhere", movesFrom("resolve"), false},
		{"discard", "Discard", "closes them: their work is not wanted any more", movesFrom("discard"), true},
		{"reopen", "Reopen", "puts them in front of a person again", movesFrom("reopen"), false},
	}
}

func (c *Console) deadLetters(in *request) (*view, error) {
	asked := in.URL.Query()
	l := &list{
		Query: asked.Get("q"), Order: asked.Get("order"), Verbs: bulkVerbs(), Operator: in.me().May(access.Operator), Choices: columns(), Columns: map[string]bool{},
	}
	l.Chosen = asked["column"]
	for _, name := range l.Choices {
		l.Columns[name] = len(l.Chosen) == 0 || slices.Contains(l.Chosen, name)
	}
	first := url.Values{"q": {l.Query}, "column": l.Chosen}
	if l.Order != "oldest" {
		first.Set("order", "oldest")
	}
	l.Otherwise = "?" + first.Encode()
	v := &view{Template: "deadletters", Title: "Dead letters", Data: l, Every: listEvery}
	if _, live := isLive(in.Context()); !live {
		var views struct {
			Views []savedview.SavedView `json:"views"`
		}
		if err := in.get(api.ViewsPath, nil, &views); err != nil {
			return nil, err
		}
		l.Views, l.Me = views.Views, in.me().Name
		if in.me().Via == access.ViaNothing {
			l.Me = "api"
		}
	}
	query := url.Values{"limit": {listPage}, "count": {"true"}}
	for name, value := range map[string]string{"q": l.Query, "order": l.Order, "cursor": asked.Get("cursor")} {
		if value != "" {
			query.Set(name, value)
		}
	}
	var page api.EntryPage
	err := in.get("/api/dlq/entries", query, &page)
	if problem, ok := errors.AsType[*Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		l.Problem, v.Status, v.Every = problem, problem.Status, 0
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	l.Entries, l.Count, l.Searched = page.Entries, page.Count, page.SearchedTo
	if page.Next != "" {
		l.Next = in.with("cursor", page.Next)
	}
	if asked.Get("cursor") != "" {
		l.First = in.with("cursor", "")
		v.Every = 0 // older pages do not change on their own
	}
	l.Copies = in.listCopies(l.Query, l.Order == "oldest", listPage)
	return v, nil
}

// saveView saves the list as a view.
func (c *Console) saveView(in *request) (*done, error) {
	name := strings.TrimSpace(in.PostFormValue("name"))
	if name == "" {
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Detail: "a view needs a name"}
	}
	saved := savedview.SavedView{Query: in.PostFormValue("q"), Order: in.PostFormValue("order"), Columns: in.PostForm["column"]}
	body := map[string]any{"query": saved.Query, "shared": in.PostFormValue("shared") != ""}
	if saved.Order != "" {
		body["order"] = saved.Order
	}
	if len(saved.Columns) > 0 {
		body["columns"] = saved.Columns
	}
	if err := in.call(http.MethodPut, api.ViewsPath+"/"+url.PathEscape(name), nil, body, nil); err != nil {
		return nil, err
	}
	return &done{To: (&list{}).ViewPath(saved), Flash: flash{Text: "Saved as the view " + name + "."}}, nil
}

// deleteView deletes a view.
func (c *Console) deleteView(in *request) (*done, error) {
	if err := in.call(http.MethodDelete, api.ViewsPath+"/"+url.PathEscape(in.PathValue("name")), nil, nil, nil); err != nil {
		return nil, err
	}
	return &done{To: "/dead-letters", Flash: flash{Text: "The view " + in.PathValue("name") + " is gone."}}, nil
}

// with returns the address of the page with one parameter changed, or removed if value is "".
func (in *request) with(name, value string) string {
	query := in.URL.Query()
	if value == "" {
		query.Del(name)
	} else {
		query.Set(name, value)
	}
	address := url.URL{Path: in.URL.Path, RawQuery: query.Encode()}
	return address.String()
}
