package console

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay"
)

// bulk is an action on many dead letters: choose an action, preview it, give a note, confirm.
type bulk struct {
	Verb    *bulkVerb // nil if no action is chosen yet
	Verbs   []bulkVerb
	Query   string
	IDs     []string
	All     bool // all entries that match Query; otherwise the entries in IDs
	Total   int64
	ByQueue []share
	ByType  []share
	ByAge   []share
	Preview *replay.Preview // preview of a replay
	Notes   []string        // sentences about Preview; see estimates
	Steps   bool            // whether the replay run is progressive
	Typed   bool            // the operator must type the number of entries to confirm
	Problem *api.Problem
	Form    url.Values
	New     bool                              // whether the page is /replays/new, which begins with a filter
	Groups  []analytics.TopGroup              // suggestions for the filter
	States  []stateChoice                     // more suggestions
	Letters map[uuid.UUID]*deadletter.Summary // entries of the preview's samples
	Copies  []copyText
}

// share is the number of entries of one part of a whole, such as a queue.
type share struct {
	Name    string
	Entries int64
}

// typeShares returns the shares of error types. It shows types of HTTP answers as the words of their status line.
func typeShares(of map[string]int64) []share {
	list := shares(of)
	for i := range list {
		list[i].Name = typeInWords(list[i].Name)
	}
	return list
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

// newBulk reads the action and the selection from a form. It returns an error if no dead letters are selected, or more
// than maxIDs by their ids.
func newBulk(form url.Values) (*bulk, error) {
	b := &bulk{
		Query: form.Get("q"), IDs: form["id"], All: form.Get("all") != "",
		Form: form, Verbs: bulkVerbs(), New: form.Get("new") != "",
	}
	if len(b.IDs) > maxIDs {
		return nil, &api.Problem{
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
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "No dead letters selected",
			Detail: "select dead letters in the list, or all that match",
		}
	}
	return b, nil
}

// filter returns the filter of the selection.
func (b *bulk) filter() api.EntryFilter {
	if b.All {
		return api.EntryFilter{Q: b.Query}
	}
	return idFilter(b.IDs...)
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

// number parses a numeric field of the form; 0 if the field is empty.
func (b *bulk) number(name string) (float64, error) {
	text := strings.TrimSpace(b.Form.Get(name))
	if text == "" {
		return 0, nil
	}
	n, ok := parsedNumber(text)
	if !ok {
		return 0, &api.Problem{Status: http.StatusUnprocessableEntity, Detail: name + " must be a number, not " + text}
	}
	return n, nil
}

// choice parses a yes-or-no field of the form. Nil means that the policy decides.
func (b *bulk) choice(name string) *bool {
	if text := b.Form.Get(name); text != "" {
		return new(text != "no")
	}
	return nil
}

// replayRequest returns the API's request for a replay run of the selection.
func (b *bulk) replayRequest() (r api.ReplayRequest, err error) {
	r = api.ReplayRequest{
		Action: api.Action{Note: b.Form.Get("note")}, Filter: b.filter(), All: b.everything(),
		Order: b.Form.Get("order"), Destination: b.Form.Get("destination"), Force: b.Form.Get("force") != "",
		OtherGroups: b.Form.Get("otherGroups") != "",
		Progressive: b.Form.Get("progressive") != "", SkipStale: b.choice("skipStale"),
		SkipDone: b.choice("skipSuperseded"),
	}
	if r.Rate, err = b.number("rate"); err != nil {
		return r, err
	}
	concurrency, err := b.number("concurrency")
	if err != nil {
		return r, err
	}
	if r.Concurrency = int(concurrency); float64(r.Concurrency) != concurrency {
		return r, &api.Problem{
			Status: http.StatusUnprocessableEntity,
			Detail: "concurrency must be a whole number, not " + b.Form.Get("concurrency"),
		}
	}
	r.StopAt, err = b.number("stopAt")
	if err == nil && r.StopAt == 0 && strings.TrimSpace(b.Form.Get("stopAt")) != "" {
		err = &api.Problem{Status: http.StatusUnprocessableEntity, Detail: "stopAt must be from 1 to 100, not 0"}
	}
	return r, err
}

// actionRequest returns the API's request for another action on the selection.
func (b *bulk) actionRequest() api.BulkRequest {
	r := api.BulkRequest{
		Action: api.Action{Note: b.Form.Get("note")}, Filter: b.filter(), All: b.everything(), Do: b.Verb.Name,
	}
	switch b.Verb.Name {
	case "assign":
		r.Assignee = b.Form.Get("assignee")
	case "tag":
		r.Tags = strings.FieldsFunc(b.Form.Get("tags"), func(r rune) bool { return r == ',' || r == ' ' })
	}
	return r
}

// estimates returns sentences about a preview: its estimates above 0, the expected recoveries, and the load.
func estimates(p *replay.Preview, words replay.Words) []string {
	notes := p.Notes(words)
	list := make([]string, 0, len(p.Estimates)+len(notes))
	for _, e := range p.Estimates {
		if e.Entries > 0 || !e.Exact(p.Total) { // omit exact zeros
			list = append(list, e.Text(words, p.Total))
		}
	}
	return append(list, notes...)
}

// replayWords returns the formats of a preview's texts for pages: times in the viewer's zone, numbers with separators,
// and short fingerprints.
func (in *request) replayWords() replay.Words {
	return replay.Words{
		Number: number, Time: in.clock, Group: func(fingerprint string) string { return "group " + short(fingerprint) },
	}
}

// loadPreview asks the API for a preview, and decides whether the operator must type the number of entries (Typed).
func (b *bulk) loadPreview(in *request) error {
	if b.Verb.Name == "replay" {
		request, err := b.replayRequest()
		if err != nil {
			return err
		}
		request.DryRun = true
		input := api.StartReplayInput{Body: request}
		answer, err := call(in, api.StartReplay, input)
		if err != nil {
			return err
		}
		words := in.replayWords()
		words.Unlimited = request.Rate == 0
		b.Preview, b.Notes = answer.Preview, estimates(answer.Preview, words)
		// The form sends "options" together with its check boxes. In a form without "options", the default applies.
		b.Steps = request.Progressive || b.Form.Get("options") == "" && b.Preview.Total > replay.ProgressiveAbove
		b.Total, b.ByQueue, b.ByType, b.ByAge = b.Preview.Total, shares(b.Preview.ByQueue),
			typeShares(b.Preview.ByErrorType), shares(b.Preview.ByAge)
		b.readSamples(in)
		b.Copies = b.copies(in, curlPost(in, api.StartReplay, input))
	} else {
		request := b.actionRequest()
		request.DryRun = true
		if b.Verb.Name == "tag" && len(b.Form.Get("tags")) == 0 {
			request.Tags = []string{"tag"} // the API requires a tag; a dry run only counts
		}
		input := api.BulkInput{Body: request}
		answer, err := call(in, api.Bulk, input)
		if err != nil {
			return err
		}
		b.Total, b.ByQueue, b.ByType = answer.Chosen, shares(answer.ByQueue), typeShares(answer.ByType)
		b.Copies = b.copies(in, curlPost(in, api.Bulk, input))
	}
	b.Typed = b.Total > in.console.Policy().Access.ExpectAbove &&
		!slices.Contains([]string{"assign", "tag", "note"}, b.Verb.Name)
	return nil
}

// readSamples reads the kinds and errors of the preview's samples. If that fails, the page shows only their ids.
func (b *bulk) readSamples(in *request) {
	ids := make([]string, len(b.Preview.Samples))
	for i, s := range b.Preview.Samples {
		ids[i] = s.ID.String()
	}
	b.Letters = in.summaries(ids)
}

// copies returns the command, SQL and curl texts for the preview. The command has --dry-run; without this flag it
// carries out the action.
func (b *bulk) copies(in *request, curl string) []copyText {
	command, filter := "dlqd "+b.Verb.Name, in.filterJSON(b.Query)
	switch {
	case !b.All:
		command, filter = command+" --id "+shellQuoted(strings.Join(b.IDs, ",")), jsonOf(b.filter())
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
	if b.Verb.Name == "tag" {
		words := "TAG" // placeholder: no tag typed yet
		if b.Form.Get("tags") != "" {
			words = shellQuoted(strings.Join(b.actionRequest().Tags, ","))
		}
		command += " --add " + words
	}
	if b.Form.Get("order") == "newest" {
		command += " --newest-first"
	}
	if b.Form.Get("force") != "" {
		command += " --force"
	}
	if b.Form.Get("otherGroups") != "" {
		command += " --other-groups"
	}
	if b.Steps {
		command += " --progressive"
	}
	for _, flag := range []struct{ name, field string }{
		{"skip-stale", "skipStale"}, {"skip-superseded", "skipSuperseded"},
	} {
		switch skips := b.choice(flag.field); {
		case skips == nil:
		case *skips:
			command += " --" + flag.name
		default:
			command += " --" + flag.name + "=false"
		}
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
	return copies(command, "SELECT * FROM dlq.preview("+chosen+");", curl) //nolint:unqueryvet // for people
}

// bulkPreview shows a preview of the action.
func (c *Console) bulkPreview(in *request) (*view, error) {
	b, err := newBulk(in.URL.Query())
	if err != nil {
		return nil, err
	}
	return b.page(in)
}

// stateChoice is a suggested filter, with its count if it is known soon.
type stateChoice struct {
	Name, Query string
	Count       *api.Count
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
	groups, _, err := callIfAllowed(in, api.GetTopGroups, topGroupsInput("24h", groupsRead))
	if err != nil {
		return nil, err
	}
	b.Groups = mostOpen(groups.Rows, overviewGroups)
	b.Groups = slices.DeleteFunc(b.Groups, func(g analytics.TopGroup) bool { return g.Open == 0 })
	b.States = []stateChoice{
		{Name: "Manual or failed", Query: "status:manual,failed"},
		{Name: "Outages", Query: "class:outage"},
		{Name: "Pending", Query: "status:pending"},
	}
	counts := c.counts.get(in, []string{b.States[0].Query, b.States[1].Query, b.States[2].Query})
	for i := range b.States {
		b.States[i].Count = counts[b.States[i].Query]
	}
	return &view{Template: "bulk", Title: "New replay run", Data: b, Section: "/replays"}, nil
}

// limitVerbs keeps the actions that the states of the selected dead letters may allow.
func (b *bulk) limitVerbs(in *request) error {
	var stats api.Stats
	if err := readIfAllowed(in, api.GetStats, api.None{}, &stats)(); err != nil {
		return err
	}
	has := mayHave(b.Query, stats.ByStatus, in.actor())
	if !b.All {
		chosen := in.summaries(b.IDs)
		has = func(status deadletter.Status) bool {
			for _, e := range chosen {
				if e.Status == status {
					return true
				}
			}
			return len(chosen) == 0
		}
	}
	b.Verbs = slices.DeleteFunc(b.Verbs, func(v bulkVerb) bool { return !slices.ContainsFunc(v.From, has) })
	return nil
}

func (b *bulk) page(in *request) (*view, error) {
	v := &view{Template: "bulk", Title: "Bulk action", Data: b, Section: "/dead-letters"}
	if b.New {
		v.Section = "/replays"
	}
	if b.Verb == nil {
		return v, b.limitVerbs(in)
	}
	v.Title = b.Verb.Label
	err := b.loadPreview(in)
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status < http.StatusInternalServerError {
		b.Problem, v.Status = problem, problem.Status
		return v, nil
	}
	return v, err
}

// bulkDo carries out the action. It shows the preview again if the form asks for it or the API refuses the action, and
// redirects to the request for approval if the action needs one.
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
		return nil, &api.Problem{Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose an action"}
	}
	again := func(problem *api.Problem) (*done, error) {
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
	refused := func(err error) (*done, error) {
		if d, ok := approvalRedirect(err); ok {
			return d, nil
		}
		if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status < http.StatusInternalServerError {
			return again(problem)
		}
		return nil, err
	}
	var expect *int64
	if text := digitsOf(in.PostFormValue("expect")); text != "" && b.Verb.Name != "assign" && b.Verb.Name != "tag" &&
		b.Verb.Name != "note" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return again(&api.Problem{Status: http.StatusUnprocessableEntity, Detail: text + " is not a number; type the " +
				"number of dead letters"})
		}
		expect = &n
	}
	if b.Verb.Name == "replay" {
		request, err := b.replayRequest()
		if err != nil {
			return refused(err)
		}
		request.Expect = expect
		answer, err := call(in, api.StartReplay, api.StartReplayInput{Body: request})
		if err != nil {
			return refused(err)
		}
		return &done{To: "/replays/" + answer.Run.ID.String(), Flash: flash{Text: "The replay run has started."}}, nil
	}
	request := b.actionRequest()
	request.Expect = expect
	out, err := call(in, api.Bulk, api.BulkInput{Body: request})
	if err != nil {
		return refused(err)
	}
	text := b.Verb.Label + ": " + plural(out.Changed, "dead letter") + "."
	if left := out.Chosen - out.Changed; left > 0 {
		text += " " + plural(left, "was", "were") + " skipped: their state does not allow the action."
	}
	to := "/dead-letters"
	if b.Query != "" {
		to += "?q=" + url.QueryEscape(b.Query)
	}
	f := flash{Text: text, Undo: undoOf(out.Undo)}
	if f.Undo != "" {
		f.To = "/operations/" + f.Undo
	}
	return &done{To: to, Flash: f}, nil
}
