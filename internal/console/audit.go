package console

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// auditInterval is the render interval of the first page of the audit trail. Older pages are not live.
const auditInterval = 15 * time.Second

// auditField is a search field of the audit trail.
type auditField struct {
	Name, Flag, Label, Hint string
	Choices                 []string
	Value                   string

	into *string // the parameter of the operation
}

// auditFields returns the fields. Their values go into in.
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
		{Name: "after", Flag: "after", Label: "At or after (UTC)", Hint: "2026-11-22T09:00", into: &in.After},
		{Name: "before", Flag: "before", Label: "Before (UTC)", Hint: "2026-11-22T10:00", into: &in.Before},
	}
}

type auditRow struct{ deadletter.AuditRow }

// Run returns the id of the replay run that wrote the row, or "".
func (r auditRow) Run() string {
	rest, ok := strings.CutPrefix(fmt.Sprint(deref(r.Reason)), "replay run ")
	if id, err := uuid.Parse(rest[:min(len(rest), 36)]); ok && err == nil {
		return id.String()
	}
	return ""
}

type audit struct {
	Sentence string
	Fields   []auditField
	Used     bool // a field other than People is set
	People   bool
	Rows     []auditRow
	Next     string
	First    string
	Problem  *api.Problem
	Copies   []copyText
}

func (c *Console) audit(in *request) (*view, error) {
	params := in.URL.Query()
	input := api.AuditInput{People: len(params) == 0 || params.Get("people") == "true", Limit: listPage}
	a := &audit{Fields: auditFields(&input), People: input.People}
	filter, flags := map[string]any{}, []string{"dlqd audit"}
	if a.People {
		filter["people"], flags = true, append(flags, "--people")
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
			value = timeAsTyped(value)
		}
		*f.into = value
		filter[f.Name], flags = value, append(flags, "--"+f.Flag+" "+shellQuoted(value))
	}
	limit := strconv.Itoa(listPage)
	a.Copies = copies(strings.Join(append(flags, "--limit "+limit), " "), "SELECT * FROM dlq.audit("+sqlQuoted(jsonOf(filter))+", "+limit+");", in.curl(address(api.SearchAudit, input))) //nolint:unqueryvet // for people
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
		a.Rows = append(a.Rows, auditRow{page.Moves[i]})
	}
	if page.Next != "" {
		a.Next = in.with("cursor", page.Next)
		if len(params) == 0 {
			a.Next = "/audit?people=true&cursor=" + url.QueryEscape(page.Next)
		}
	}
	a.Sentence = a.summary()
	return v, nil
}

// timeAsTyped converts a time without zone or seconds to RFC 3339 in UTC. Other texts are returned
// as they are, for the API to parse.
func timeAsTyped(text string) string {
	for _, layout := range []string{
		"2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04",
		time.DateTime, time.DateOnly,
	} {
		if at, err := time.Parse(layout, text); err == nil {
			return at.Format(time.RFC3339)
		}
	}
	return text
}

func (a *audit) summary() string {
	by := "dlqd and people"
	if a.People {
		by = "people"
	}
	if len(a.Rows) == 0 {
		if a.Used {
			return "No action by " + by + " matches."
		}
		return "No actions by " + by + " yet. This page shows each move of a dead letter and each action of a user."
	}
	actors := map[string]bool{}
	for i := range a.Rows {
		actors[a.Rows[i].Actor] = true
	}
	latest := &a.Rows[0]
	return map[bool]string{true: "Matching actions by ", false: "Actions by "}[a.Used] + by + ": " +
		plural(len(actors), "actor") + " on this page; the latest action by " + latest.Actor + ", " + ago(latest.At) + "."
}
