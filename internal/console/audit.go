package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/replay"
)

// auditInterval is the render interval of the first page of the audit trail. Older pages are not live.
const auditInterval = 15 * time.Second

// auditField is a search field of the audit trail.
type auditField struct {
	Name, Flag, Label, Hint string
	Choices                 []string
	Value                   string

	into *string // the parameter of the operation that the value sets
}

// auditFields returns the search fields. Each sets a parameter of in.
func auditFields(in *api.AuditInput) []auditField {
	states := make([]string, 0, len(marks))
	for status := range marks {
		states = append(states, string(status))
	}
	slices.Sort(states)
	return []auditField{
		{Name: "actor", Flag: "actor", Label: "Actor", Hint: "kim", into: &in.Actor},
		{Name: "text", Flag: "text", Label: "Text", Hint: "in the reason or note", into: &in.Text},
		{Name: "origin", Flag: "origin", Label: "Origin", Hint: "10.0.0.7", into: &in.Origin},
		{Name: "queue", Flag: "queue", Label: "Queue", into: &in.Queue},
		{Name: "kind", Flag: "kind", Label: "Kind", into: &in.Kind},
		{Name: "entryId", Flag: "id", Label: "Dead letter", Hint: "id", into: &in.EntryID},
		{Name: "from", Flag: "from", Label: "From state", Choices: states, into: &in.From},
		{Name: "to", Flag: "to", Label: "To state", Choices: states, into: &in.To},
		{Name: "dbUser", Flag: "db-user", Label: "Database user", into: &in.DBUser},
		{Name: "configVersion", Flag: "policy", Label: "Policy version", into: &in.ConfigVersion},
		{Name: "after", Flag: "after", Label: "At or after", Hint: "2026-11-22T09:00", into: &in.After},
		{Name: "before", Flag: "before", Label: "Before", Hint: "2026-11-22T10:00", into: &in.Before},
	}
}

// auditRow is an act, or a whole operation with its entries.
type auditRow struct {
	deadletter.AuditRow

	Day      string      // heading of the day, if the row is the first of its day; otherwise ""
	DayStart time.Time   // start of Day
	Ran      *replay.Run // the replay run that the row says was started; nil for other rows
}

// Run returns the id of the replay run that the row's reason names, or "". The run moved the row's entry, or
// the row is an act on the run, such as its start.
func (r *auditRow) Run() string {
	rest, ok := strings.CutPrefix(fmt.Sprint(deref(r.Reason)), "replay run ")
	if id, err := uuid.Parse(rest[:min(len(rest), 36)]); ok && err == nil {
		return id.String()
	}
	return ""
}

// Whole reports whether the row stands for an operation with all of its entries.
func (r *auditRow) Whole() bool { return r.EntryID == nil && r.Operation != nil }

// operationDone is the detail of an operation in the audit trail.
type operationDone struct {
	Filter   json.RawMessage `json:"filter"`
	Entries  int64           `json:"entries"`
	Changed  int64           `json:"changed"`
	Assignee *string         `json:"assignee"`
	Tags     []string        `json:"tags"`
}

func (r *auditRow) done() (d operationDone) {
	_ = json.Unmarshal(r.Detail, &d) // a hidden detail leaves d empty
	return d
}

// Entries returns the number of entries of the operation.
func (r *auditRow) Entries() int64 { return r.done().Entries }

// Approval returns the id of the approval that the row is an act on, or "".
func (r *auditRow) Approval() string {
	rest, ok := strings.CutPrefix(fmt.Sprint(deref(r.Reason)), "approval ")
	if id, err := uuid.Parse(rest[:min(len(rest), 36)]); ok && err == nil && r.EntryID == nil {
		return id.String()
	}
	return ""
}

// actVerbs maps an act on a replay run or an approval to the verb that describes what a person did.
var actVerbs = map[string]string{
	"started": "started", "paused": "paused", "resumed": "resumed", "cancelled": "cancelled",
	"rate changed": "changed the rate of", "requested": "requested", "requested again": "requested again",
	"approved": "approved", "refused": "refused", "withdrawn": "withdrew",
}

// FilterText returns the filter of the operation or replay run in the filter language, or "".
func (r *auditRow) FilterText() string {
	if r.Ran != nil {
		return filterWords(r.Ran.Filter)
	}
	if f, err := filter.FromJSON(r.done().Filter); err == nil {
		return f.Print()
	}
	return ""
}

// operationVerbs maps the action of an operation to the verb that describes what a person did.
var operationVerbs = map[string]string{
	"discard": "discarded", "expire": "expired", "resolve": "resolved", "park": "parked",
	"unpark": "returned to automatic", "reopen": "reopened", "assign": "assigned", "tag": "tagged", "note": "noted",
	"purge": "purged", "undo": "undid an operation on",
}

// idInText matches ids in a text. Pages show only their beginning and end.
var idInText = regexp.MustCompile(`\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)

// Words describes the act.
func (r *auditRow) Words() string {
	reason := fmt.Sprint(deref(r.Reason))
	if run := r.Ran; run != nil {
		text := "replayed "
		if run.FinishedAt == nil {
			text += number(run.Replayed) + " of " + plural(run.Total, "dead letter") + " so far"
		} else {
			text += plural(run.Replayed, "dead letter")
		}
		text += ": " + number(run.Succeeded) + " recovered"
		if run.Failed > 0 {
			text += ", " + number(run.Failed) + " failed again"
		}
		if run.Skipped > 0 {
			text += ", " + number(run.Skipped) + " skipped"
		}
		return text
	}
	if subject, of, act := strings.Cut(reason, ": "); act && r.EntryID == nil && actVerbs[of] != "" &&
		(r.Run() != "" || r.Approval() != "") {
		reason = actVerbs[of] + " " + subject
	}
	if !r.Whole() {
		return idInText.ReplaceAllStringFunc(reason, func(id string) string { return short(id) })
	}
	d := r.done()
	verb := operationVerbs[reason]
	if verb == "" {
		verb = reason
	}
	text := verb + " " + plural(d.Changed, "dead letter")
	switch {
	case reason == "assign" && d.Assignee != nil && *d.Assignee != "":
		text += " to " + *d.Assignee
	case reason == "assign" && d.Assignee != nil:
		text = "unassigned " + plural(d.Changed, "dead letter")
	case len(d.Tags) > 0:
		text += " " + strings.Join(d.Tags, ", ")
	}
	if d.Entries > d.Changed {
		text += "; " + number(d.Entries-d.Changed) + " unchanged"
	}
	return text
}

// From describes the origin of the act.
func (r *auditRow) From() string { return originInWords(fmt.Sprint(deref(r.Origin))) }

var (
	// originParts are the interface, the address and the program of an origin; see api.origin and dlq.origin.
	originParts = regexp.MustCompile(`^(API|SQL), from (.*?)(?: \((.*?)\))?(, on behalf of .*)?$`)
	browsers    = [][2]string{
		{"Edg/", "Edge"},
		{"OPR/", "Opera"},
		{"Firefox/", "Firefox"},
		{"Chrome/", "Chrome"},
		{"CriOS/", "Chrome"},
		{"FxiOS/", "Firefox"},
		{"Safari/", "Safari"},
	}
	systems = [][2]string{
		{"iPhone", "iPhone"},
		{"iPad", "iPad"},
		{"Android", "Android"},
		{"Macintosh", "Mac"},
		{"Windows", "Windows"},
		{"CrOS", "ChromeOS"},
		{"Linux", "Linux"},
	}
)

// originInWords shortens the origin of an act. For an act from a browser, it keeps the names of the browser and the
// system, and the address.
func originInWords(origin string) string {
	parts := originParts.FindStringSubmatch(origin)
	if parts == nil {
		return origin
	}
	agent, browser := strings.CutPrefix(parts[3], "console, ")
	if !browser {
		if program, _, _ := strings.Cut(agent, " "); parts[1] == "API" && program != "" {
			return program + " from " + parts[2] + parts[4]
		}
		return origin
	}
	return browserInWords(agent) + ", " + parts[2] + parts[4]
}

// browserInWords names the browser and the system of a User-Agent, as in "Chrome on Mac".
func browserInWords(agent string) string {
	in := func(names [][2]string, otherwise string) string {
		for _, name := range names {
			if strings.Contains(agent, name[0]) {
				return name[1]
			}
		}
		return otherwise
	}
	words := in(browsers, "a browser")
	if system := in(systems, ""); system != "" {
		words += " on " + system
	}
	return words
}

// auditTab is a quick choice of rows.
type auditTab struct {
	Name, Path string
	Current    bool
}

type audit struct {
	Sentence string
	Tabs     []auditTab
	Fields   []auditField
	Used     bool // a field other than People, Each and Day is set
	People   bool
	Each     bool   // show a row for each entry of an operation
	Day      string // show only this day, such as 2026-11-25
	Rows     []auditRow
	Next     string
	First    string
	Problem  *api.Problem
	Copies   []copyText
}

// auditTabs returns the quick choices. The current one is the one whose address is the address of the page without the
// cursor.
func auditTabs(in *request) []auditTab {
	day := func(ago int) string { return in.today().AddDate(0, 0, -ago).Format(time.DateOnly) }
	tabs := []auditTab{
		{Name: "By people", Path: "/audit"},
		{Name: "Mine", Path: "/audit?people=true&actor=" + url.QueryEscape(in.actor())},
		{Name: "Today", Path: "/audit?people=true&day=" + day(0)},
		{Name: "Yesterday", Path: "/audit?people=true&day=" + day(1)},
		{Name: "Everything", Path: "/audit?each=true"},
	}
	now, err := url.Parse(in.with("cursor", ""))
	for i := range tabs {
		if of, wrong := url.Parse(tabs[i].Path); err == nil && wrong == nil {
			tabs[i].Current = of.Query().Encode() == now.Query().Encode()
		}
	}
	return tabs
}

func (c *Console) audit(in *request) (*view, error) {
	params := in.URL.Query()
	input := api.AuditInput{People: len(params) == 0 || params.Get("people") == "true", Limit: listPage}
	a := &audit{
		Fields: auditFields(&input), People: input.People, Tabs: auditTabs(in), Each: params.Get("each") == "true",
		Day: params.Get("day"),
	}
	input.Grouped = !a.Each
	chosen, flags := map[string]any{}, []string{"dlqd audit"}
	if a.People {
		chosen["people"], flags = true, append(flags, "--people")
	}
	for i := range a.Fields {
		f := &a.Fields[i]
		f.Value = strings.TrimSpace(params.Get(f.Name))
		if f.Value == "" {
			continue
		}
		a.Used = true
		value := f.Value
		if f.Name == "after" || f.Name == "before" {
			value = in.timeAsTyped(value)
		}
		*f.into = value
		chosen[f.Name], flags = value, append(flags, "--"+f.Flag+" "+shellQuoted(value))
	}
	start, err := time.ParseInLocation(time.DateOnly, a.Day, in.zone())
	if err == nil && input.After == "" && input.Before == "" {
		input.After, input.Before = start.Format(time.RFC3339), start.AddDate(0, 0, 1).Format(time.RFC3339)
		chosen["after"], chosen["before"] = input.After, input.Before
		flags = append(flags, "--after "+input.After, "--before "+input.Before)
	}
	if input.Grouped {
		chosen["grouped"], flags = true, append(flags, "--grouped")
	}
	limit := strconv.Itoa(listPage)
	a.Copies = copies(strings.Join(append(flags, "--limit "+limit), " "), "SELECT * FROM dlq.audit("+sqlQuoted(jsonOf(chosen))+", "+limit+");", in.curl(address(api.SearchAudit, input))) //nolint:unqueryvet // for people
	v := &view{Template: "audit", Title: "Audit", Data: a, Interval: auditInterval}
	if input.Cursor = params.Get("cursor"); input.Cursor != "" {
		a.First, v.Interval = in.with("cursor", ""), 0
	}
	page, err := call(in, api.SearchAudit, input)
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		a.Problem, v.Status, v.Interval = problem, problem.Status, 0
		a.Sentence = "The search is invalid."
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	for i := range page.Moves {
		row := auditRow{AuditRow: page.Moves[i]}
		day := dayOf(row.At, in.zone())
		if i == 0 || !day.Equal(dayOf(page.Moves[i-1].At, in.zone())) {
			row.Day, row.DayStart = in.dayInWords(day), day
		}
		a.Rows = append(a.Rows, row)
	}
	if err := a.readRuns(in); err != nil {
		return nil, err
	}
	if page.Next != "" {
		a.Next = in.with("cursor", page.Next)
		if len(params) == 0 {
			a.Next = "/audit?people=true&cursor=" + url.QueryEscape(page.Next)
		}
	}
	a.Sentence = a.summary(in)
	return v, nil
}

// dayInWords names a day.
func (in *request) dayInWords(day time.Time) string {
	switch today := in.today(); {
	case day.Equal(today):
		return "Today"
	case day.Equal(today.AddDate(0, 0, -1)):
		return "Yesterday"
	}
	return day.Format("Monday, 2 January 2006")
}

// readRuns reads the results of the replay runs whose starts the page has.
func (a *audit) readRuns(in *request) error {
	var starts []*auditRow
	for i := range a.Rows {
		row := &a.Rows[i]
		if row.EntryID == nil && row.Run() != "" && strings.HasSuffix(fmt.Sprint(deref(row.Reason)), ": started") {
			starts = append(starts, row)
		}
	}
	if len(starts) == 0 {
		return nil
	}
	list, _, err := callIfAllowed(in, api.ListReplays, api.None{})
	for _, row := range starts {
		if i := slices.IndexFunc(list.Runs, func(r *replay.Run) bool { return r.ID.String() == row.Run() }); i >= 0 {
			row.Ran = list.Runs[i]
		}
	}
	return err
}

// timeAsTyped converts a time to RFC 3339 in UTC. A time without a zone is in the viewer's zone. Other texts are
// returned unchanged, for the API to parse.
func (in *request) timeAsTyped(text string) string {
	if at, ok := in.parseTime(text); ok {
		return at.UTC().Format(time.RFC3339)
	}
	return text
}

func (a *audit) summary(in *request) string {
	by := "dlqd and people"
	if a.People {
		by = "people"
	}
	when := ""
	if start, err := time.ParseInLocation(time.DateOnly, a.Day, in.zone()); err == nil {
		when = ", " + in.dayInWords(start)
		if !strings.Contains(when, " 20") {
			when = strings.ToLower(when)
		}
	}
	if len(a.Rows) == 0 {
		if a.Used || a.Day != "" {
			return "No action by " + by + " matches" + when + "."
		}
		return "No actions by " + by + " yet. This page shows each move of a dead letter and each action of a user."
	}
	actors := map[string]int{}
	var names []string
	for i := range a.Rows {
		if actors[a.Rows[i].Actor]++; actors[a.Rows[i].Actor] == 1 {
			names = append(names, a.Rows[i].Actor)
		}
	}
	who := strings.Join(names[:min(len(names), 4)], ", ")
	if more := len(names) - 4; more > 0 {
		who += " and " + number(more) + " more"
	}
	latest := &a.Rows[0]
	return map[bool]string{true: "Matching actions by ", false: "Actions by "}[a.Used] + by + when + ": " + who +
		" on this page; the latest by " + latest.Actor + ", " + ago(latest.At) + "."
}
