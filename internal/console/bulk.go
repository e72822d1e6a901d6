package console

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/replay"
)

// bulk is an action on many dead letters: choose an action, preview it, give a note, confirm.
type bulk struct {
	Verb    *bulkVerb // nil: not chosen yet
	Verbs   []bulkVerb
	Query   string
	IDs     []string
	All     bool // all that match Query; otherwise those of IDs
	Total   int64
	ByQueue []share
	ByType  []share
	ByAge   []share
	Preview *replay.Preview // of a replay
	Typed   bool            // the operator must type the number of entries to confirm
	Problem *Problem
	Form    url.Values
	New     bool                 // the page is /replays/new, which begins with a filter
	Groups  []analytics.TopGroup // suggestions for the filter
	Copies  []copyText
}

// share is the number of entries of one part of a whole, such as a queue.
type share struct {
	Name    string
	Entries int64
}

func shares(of map[string]int64) []share {
	list := make([]share, 0, len(of))
	for name, n := range of {
		list = append(list, share{name, n})
	}
	sort.Slice(list, func(i, j int) bool {
		if list[i].Entries != list[j].Entries {
			return list[i].Entries > list[j].Entries
		}
		return list[i].Name < list[j].Name
	})
	return list
}

// maxIDs limits a selection by id. Larger selections use a filter.
const maxIDs = 500

// newBulk reads the action and the selection from a form.
func newBulk(form url.Values) (*bulk, error) {
	b := &bulk{
		Query: form.Get("q"), IDs: form["id"], All: form.Get("all") != "",
		Form: form, Verbs: bulkVerbs(), New: form.Get("new") != "",
	}
	if len(b.IDs) > maxIDs {
		return nil, &Problem{
			Status: http.StatusUnprocessableEntity, Title: "Too many dead letters",
			Detail: "select at most " + number(maxIDs) + ", or all that match",
		}
	}
	if b.All {
		b.IDs = nil
	}
	if at := slices.IndexFunc(b.Verbs, func(v bulkVerb) bool { return v.Name == form.Get("do") }); at >= 0 {
		b.Verb = &b.Verbs[at]
	}
	if !b.All && len(b.IDs) == 0 {
		return nil, &Problem{
			Status: http.StatusUnprocessableEntity, Title: "No dead letters selected",
			Detail: "select dead letters in the list, or all that match",
		}
	}
	return b, nil
}

// filter returns the filter of the selection, as the API takes it.
func (b *bulk) filter() map[string]any {
	if b.All {
		return map[string]any{"q": b.Query}
	}
	return map[string]any{"ids": b.IDs}
}

// Words describes the selection.
func (b *bulk) Words() string {
	switch {
	case !b.All:
		return "the selected dead letters"
	case strings.TrimSpace(b.Query) == "":
		return "all dead letters"
	default:
		return "all dead letters that match " + b.Query
	}
}

// everything reports whether the filter matches all dead letters. The API requires "all" for that.
func (b *bulk) everything() bool { return b.All && strings.TrimSpace(b.Query) == "" }

// number parses a numeric field of the form; nil if the field is empty.
func (b *bulk) number(name string) (any, error) {
	text := strings.TrimSpace(b.Form.Get(name))
	if text == "" {
		return nil, nil //nolint:nilnil // an empty field is no number, and no error
	}
	n, ok := parsedNumber(text)
	if !ok {
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Detail: name + " must be a number, not " + text}
	}
	return n, nil
}

// body returns the API request for the action.
func (b *bulk) body() (map[string]any, error) {
	body := map[string]any{"filter": b.filter(), "all": b.everything()}
	if note := b.Form.Get("note"); note != "" {
		body["note"] = note
	}
	if b.Verb.Name == "replay" {
		for _, name := range []string{"rate", "concurrency", "stopAt"} {
			n, err := b.number(name)
			if err != nil {
				return nil, err
			}
			if n != nil {
				body[name] = n
			}
		}
		if order := b.Form.Get("order"); order != "" {
			body["order"] = order
		}
		if to := b.Form.Get("destination"); to != "" {
			body["toDestination"] = to
		}
		if b.Form.Get("force") != "" {
			body["force"] = true
		}
		return body, nil
	}
	body["do"] = b.Verb.Name
	switch b.Verb.Name {
	case "assign":
		body["assignee"] = b.Form.Get("assignee")
	case "tag":
		body["tags"] = strings.FieldsFunc(b.Form.Get("tags"), func(r rune) bool { return r == ',' || r == ' ' })
	}
	return body, nil
}

func (b *bulk) path() string {
	if b.Verb.Name == "replay" {
		return "/api/dlq/replay"
	}
	return "/api/dlq/bulk"
}

// loadPreview asks the API for a preview.
func (b *bulk) loadPreview(in *request) error {
	body, err := b.body()
	if err != nil {
		return err
	}
	body["dryRun"] = true
	if b.Verb.Name == "tag" && len(b.Form.Get("tags")) == 0 {
		body["tags"] = []string{"tag"} // no tag typed yet; a dry run only counts
	}
	if b.Verb.Name == "replay" {
		var answer api.ReplayAnswer
		if err := in.post(b.path(), body, &answer); err != nil {
			return err
		}
		b.Preview = answer.Preview
		b.Total, b.ByQueue, b.ByType, b.ByAge = b.Preview.Total, shares(b.Preview.ByQueue), shares(b.Preview.ByErrorType),
			shares(b.Preview.ByAge)
	} else {
		var answer api.BulkAnswer
		if err := in.post(b.path(), body, &answer); err != nil {
			return err
		}
		b.Total, b.ByQueue, b.ByType = answer.Chosen, shares(answer.ByQueue), shares(answer.ByType)
	}
	b.Typed = b.Total > in.console.Policy().Access.ExpectAbove &&
		!slices.Contains([]string{"assign", "tag", "note"}, b.Verb.Name)
	b.Copies = b.copies(in, body)
	return nil
}

// copies returns the equivalents of the preview. The command has --dry-run; without it the command
// carries out the action.
func (b *bulk) copies(in *request, body map[string]any) []copyText {
	command, filter := "dlqd "+b.Verb.Name, in.filterJSON(b.Query)
	switch {
	case !b.All:
		command, filter = command+" --id "+shellQuoted(strings.Join(b.IDs, ",")), jsonOf(map[string]any{"ids": b.IDs})
	case b.everything():
		command += " --all"
	default:
		command += " " + shellQuoted(b.Query)
	}
	for _, flag := range []struct{ name, field string }{
		{"rate", "rate"},
		{"concurrency", "concurrency"},
		{"stop-at", "stopAt"},
		{"to-destination", "destination"},
		{"to", "assignee"},
		{"note", "note"},
	} {
		if value := strings.TrimSpace(b.Form.Get(flag.field)); value != "" {
			command = flagged(command, flag.name, value)
		}
	}
	if tags, ok := body["tags"].([]string); ok {
		words := "TAG" // placeholder: no tag typed yet
		if b.Form.Get("tags") != "" {
			words = shellQuoted(strings.Join(tags, ","))
		}
		command += " --add " + words
	}
	if b.Form.Get("order") == "newest" {
		command += " --newest-first"
	}
	if b.Form.Get("force") != "" {
		command += " --force"
	}
	if b.Verb.Name == "note" {
		command = "" // no command of dlqd adds a note to many entries
	} else {
		command += " --dry-run"
	}
	chosen := sqlQuoted(filter)
	if b.Verb.Name == "replay" {
		chosen = "dlq.replayable(" + chosen + ")"
	}
	return copies(command, "SELECT * FROM dlq.preview("+chosen+");", in.curlPost(b.path(), body)) //nolint:unqueryvet // for people
}

// bulkPreview shows a preview of the action.
func (c *Console) bulkPreview(in *request) (*view, error) {
	b, err := newBulk(in.URL.Query())
	if err != nil {
		return nil, err
	}
	return b.page(in)
}

// newReplay is the page that prepares a replay run from a filter instead of a selection.
func (c *Console) newReplay(in *request) (*view, error) {
	form := in.URL.Query()
	form["id"], form["all"], form["do"] = nil, []string{"1"}, []string{"replay"}
	b, err := newBulk(form)
	if err != nil {
		return nil, err
	}
	b.New = true
	if form.Has("q") {
		v, err := b.page(in)
		v.Section = "/replays"
		return v, err
	}
	b.Verb = nil
	var groups api.Report[analytics.TopGroup]
	if _, err := in.getIfAllowed("/api/dlq/analytics/groups", url.Values{"over": {"24h"}, "limit": {"6"}},
		&groups); err != nil {
		return nil, err
	}
	b.Groups = slices.DeleteFunc(groups.Rows, func(g analytics.TopGroup) bool { return g.Open == 0 })
	return &view{Template: "bulk", Title: "New replay run", Data: b, Section: "/replays"}, nil
}

func (b *bulk) page(in *request) (*view, error) {
	v := &view{Template: "bulk", Title: "Bulk action", Data: b, Section: "/dead-letters"}
	if b.New {
		v.Section = "/replays"
	}
	if b.Verb == nil {
		return v, nil
	}
	v.Title = b.Verb.Label
	err := b.loadPreview(in)
	if problem, ok := errors.AsType[*Problem](err); ok && problem.Status < http.StatusInternalServerError {
		b.Problem, v.Status = problem, problem.Status
		return v, nil
	}
	return v, err
}

// bulkDo carries out the action.
func (c *Console) bulkDo(in *request) (*done, error) {
	b, err := newBulk(in.PostForm)
	if err != nil {
		return nil, err
	}
	if in.PostFormValue("preview") != "" {
		v, err := b.page(in)
		return &done{View: v}, err
	}
	if b.Verb == nil {
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose an action"}
	}
	again := func(problem *Problem) (*done, error) {
		v, err := b.page(in)
		if err != nil {
			return nil, err
		}
		if b.Problem == nil {
			b.Problem = problem
		}
		v.Status = problem.Status
		return &done{View: v}, nil
	}
	body, err := b.body()
	if problem, ok := errors.AsType[*Problem](err); ok {
		return again(problem)
	}
	if text := digitsOf(in.PostFormValue("expect")); text != "" && b.Verb.Name != "assign" && b.Verb.Name != "tag" &&
		b.Verb.Name != "note" {
		expect, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return again(&Problem{Status: http.StatusUnprocessableEntity, Detail: text + " is not a number; type the number " +
				"of dead letters"})
		}
		body["expect"] = expect
	}
	var out struct {
		Run     *replay.Run `json:"run"`
		Chosen  int64       `json:"chosen"`
		Changed int64       `json:"changed"`
		Undo    string      `json:"undo"`
	}
	err = in.post(b.path(), body, &out)
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if problem, ok := errors.AsType[*Problem](err); ok && problem.Status < http.StatusInternalServerError {
		return again(problem)
	}
	if err != nil {
		return nil, err
	}
	if out.Run != nil {
		return &done{To: "/replays/" + out.Run.ID.String(), Flash: flash{Text: "The replay run has started."}}, nil
	}
	text := b.Verb.Label + ": " + plural(out.Changed, "dead letter") + "."
	if left := out.Chosen - out.Changed; left > 0 {
		text += " " + plural(left, "was", "were") + " skipped: their state does not allow the action."
	}
	to := "/dead-letters"
	if b.Query != "" {
		to += "?q=" + url.QueryEscape(b.Query)
	}
	f := flash{Text: text, Undo: out.Undo}
	if out.Undo != "" {
		f.To = "/operations/" + out.Undo
	}
	return &done{To: to, Flash: f}, nil
}
