package console

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/group"
)

// groupsInterval is the render interval of open group pages. Their trends are as old as the rollups.
const groupsInterval = 15 * time.Second

type groups struct {
	Sentence string
	Groups   []group.Group
	Status   string
	Orders   []groupOrder
	Queue    string
	Owner    string
	Next     string
	Problem  *api.Problem
	Copies   []copyText
	AsOf     time.Time
	Operator bool
	Window   window
	Windows  []choice
	Young    map[string][]int64 // trends of the last hour for groups younger than an hour, by path
}

// groupOrder is a column by which the list can be ordered.
type groupOrder struct {
	Name, Words   string
	Column, Class string
	Path          string
	Current       bool
	Sort          string // aria-sort of the column; empty unless current
}

func (in *request) groupOrders(current string) []groupOrder {
	orders := []groupOrder{
		{Name: "status", Words: "state", Column: "State", Class: "c-state"},
		{Name: "failures", Words: "most failures", Column: "Failures", Class: "c-n n"},
		{Name: "open", Words: "most open", Column: "Open", Class: "c-n n"},
		{Name: "latest", Words: "latest failure", Column: "Last seen", Class: "c-when"},
		{Name: "newest", Words: "newest group", Column: "First seen", Class: "c-when"},
		{Name: "owner", Words: "owner", Column: "Owner", Class: "c-owner"},
	}
	for i := range orders {
		o := &orders[i]
		o.Path, o.Current = in.with("cursor", "", "order", o.Name), o.Name == cmp.Or(current, "latest")
		if o.Current {
			o.Sort = "descending"
			if o.Name == "owner" {
				o.Sort = "ascending"
			}
		}
	}
	return orders
}

// LastHour returns the trend of the last hour for a group younger than an hour; nil for other groups.
func (g *groups) LastHour(of group.Group) []int64 { return g.Young[g.GroupPath(of)] }

// GroupPath returns the part of a group's address that identifies the group.
func (g *groups) GroupPath(of group.Group) string {
	return url.PathEscape(of.Queue) + "/" + of.Fingerprint
}

func (c *Console) groups(in *request) (*view, error) {
	params := in.URL.Query()
	g := &groups{
		Status: params.Get("status"), Orders: in.groupOrders(params.Get("order")),
		Queue: params.Get("queue"), Owner: params.Get("owner"), Window: in.window("24h"),
	}
	g.Windows = in.windowChoices(g.Window)
	g.Operator = in.me().May(access.Operator)
	v := &view{Template: "groups", Title: "Groups", Data: g, Interval: groupsInterval}
	input := api.GroupsInput{
		Order: params.Get("order"), Queue: g.Queue, Owner: g.Owner, Over: g.Window.Over, HasOpen: params.Get("hasOpen"),
		Cursor: params.Get("cursor"), Limit: 50,
	}
	if g.Status != "" {
		input.Status = strings.Split(g.Status, ",")
	}
	page, err := call(in, api.ListGroups, input)
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		g.Problem, v.Status, v.Interval = problem, problem.Status, 0
		g.Sentence = "The selection is invalid."
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	g.Groups, g.AsOf = page.Groups, page.AsOf
	if page.Next != "" {
		g.Next = in.with("cursor", page.Next)
	}
	isNew := func(of group.Group) bool { return isYoung(of.FirstSeen, in.now) }
	if g.Window.Over != "1h" && slices.ContainsFunc(g.Groups, isNew) {
		lastHour := input
		lastHour.Over = "1h"
		recent, err := call(in, api.ListGroups, lastHour)
		if err != nil {
			return nil, err
		}
		g.Young = map[string][]int64{}
		for i := range recent.Groups {
			if isNew(recent.Groups[i]) {
				g.Young[g.GroupPath(recent.Groups[i])] = recent.Groups[i].Trend
			}
		}
	}
	var failures, regressed int64
	for i := range g.Groups {
		failures += g.Groups[i].InWindow
		if g.Groups[i].Status == group.Regressed {
			regressed++
		}
	}
	switch {
	case len(g.Groups) == 0:
		g.Sentence = "No failure group matches."
	default:
		g.Sentence = fmt.Sprintf("%s, %s within %s.", plural(len(g.Groups), "failure group"), plural(failures, "failure"),
			g.Window.Name)
		if page.Next != "" {
			g.Sentence = "The first " + g.Sentence
		}
		if regressed > 0 {
			g.Sentence += " " + plural(regressed, "has", "have") + " regressed after being marked as fixed."
		}
	}
	input.Cursor = ""
	g.Copies = in.groupCopies(input)
	return v, nil
}

type groupPage struct {
	api.GroupDetail

	Sentence string
	// FixSentence says in which version the group is fixed and which version runs. It is empty if no version is recorded.
	FixSentence string
	Chart       *chart
	Window      window
	Windows     []choice
	Shares      []shareBy
	Operator    bool
	Query       string // filter that finds the group's entries in the list
	Asked       askedFor
	Copies      []copyText
}

// shareBy is the distribution of a group's failures by version, host or source.
type shareBy struct {
	By     string
	Shares []group.Share
}

func groupPath(queue, fingerprint string) string {
	return "/groups/" + url.PathEscape(queue) + "/" + url.PathEscape(fingerprint)
}

// groupInput returns the group that a request's path names.
func groupInput(in *request) api.GroupInput {
	return api.GroupInput{Queue: in.PathValue("queue"), Fingerprint: in.PathValue("fingerprint")}
}

func (c *Console) group(in *request) (*view, error) {
	w := in.window("7d")
	input := api.GetGroupInput{GroupInput: groupInput(in), Over: w.Over}
	detail, err := call(in, api.GetGroup, input)
	if err != nil {
		return nil, err
	}
	if fit := fitting(in.now.Sub(detail.FirstSeen), w); in.URL.Query().Get("over") == "" && fit != w {
		w, input.Over = fit, fit.Over
		found, err := call(in, api.ListGroups, api.GroupsInput{
			Queue: detail.Queue, Fingerprint: detail.Fingerprint, Over: fit.Over, Limit: 1,
		})
		if err != nil {
			return nil, err
		}
		if len(found.Groups) == 1 { // none if another session has removed the group
			detail.Group = found.Groups[0]
		}
	}
	g := &groupPage{
		GroupDetail: *detail, Operator: in.me().May(access.Operator),
		Query: query("group", detail.Fingerprint, "queue", detail.Queue),
	}
	for _, by := range []string{"version", "host", "source"} {
		s := shareBy{By: by}
		for _, share := range detail.Shares {
			if share.By == by {
				s.Shares = append(s.Shares, share)
			}
		}
		if len(s.Shares) > 0 {
			g.Shares = append(g.Shares, s)
		}
	}
	g.Window, g.Windows = w, in.windowChoices(w)
	g.Chart = in.failuresChart(&detail.Group, w)
	g.Chart.Filter = &g.Query
	g.Sentence = in.groupSentence(&detail.Group, w)
	if detail.Fix != nil {
		g.FixSentence = in.fixSentence(detail.Fix)
	}
	g.Asked = in.askedForAll(detail.Entries)
	chosen := sqlQuoted(jsonOf(map[string]string{"queue": detail.Queue, "fingerprint": detail.Fingerprint}))
	of := sqlQuoted(detail.Queue) + ", " + sqlQuoted(detail.Fingerprint)
	g.Copies = copies("dlqd groups show "+shellQuoted(detail.Queue)+" "+shellQuoted(detail.Fingerprint)+" --over "+w.Over,
		"SELECT * FROM dlq.groups("+chosen+", p_over => '"+w.Over+"'); SELECT * FROM dlq.group_shares("+of+"); SELECT dlq.group_entries("+of+");", in.curl(address(api.GetGroup, input))) //nolint:unqueryvet // for people
	title := clip(80, cmp.Or(headlineOf(detail.Title, detail.ErrorType, nil).String(), "Group"))
	return &view{
		Template: "group", Title: title + " · " + short(detail.Fingerprint), Data: g, Interval: groupsInterval,
		Section: "/groups",
	}, nil
}

// failuresChart returns a chart of a group's failures in a window.
func (in *request) failuresChart(g *group.Group, w window) *chart {
	file := groupPath(g.Queue, g.Fingerprint) + "/chart/failures"
	return &chart{
		Title: "Failures, " + w.Name, Starts: w.trendStarts(in.now, len(g.Trend)), Step: w.Trend,
		Bands: []band{{"failures", g.Trend}}, Zone: in.zone(), Bars: true,
		File: file + ".csv?over=" + w.Over, Image: file + ".svg?over=" + w.Over,
	}
}

func (in *request) groupSentence(g *group.Group, w window) string {
	text := fmt.Sprintf("%s in queue %s, %s of them within %s. %s.", plural(g.Failures, "failure"), g.Queue,
		number(g.InWindow), w.Name, upper(plural(g.Open, "dead letter is", "dead letters are")+" open"))
	if class := classOf(g.ErrorClass); g.Open > 0 && class["Means"] != "" && class["Name"] != "unknown" {
		text += " Class " + class["Name"] + ": " + class["Means"] + "."
	}
	switch g.Status {
	case group.Regressed:
		text += fmt.Sprintf(" The group has regressed: %s marked it as fixed %s.", deref(g.FixedBy), ago(g.FixedAt))
	case group.Fixed:
		text += fmt.Sprintf(" %s marked it as fixed %s; no failure since.", deref(g.FixedBy), ago(g.FixedAt))
	case group.Muted:
		text += fmt.Sprintf(" %s muted it: dlqd sends no notifications", deref(g.MutedBy))
		if g.MuteUntil != nil {
			text += " until " + in.clock(*g.MuteUntil)
		}
		if g.MuteLeft != nil {
			text += ", or until " + plural(*g.MuteLeft, "more failure")
		}
		text += "."
	}
	return text
}

// fixSentence says in which version a group is fixed, which version runs, and how many open dead letters are from
// before the fix.
func (in *request) fixSentence(f *group.Fix) string {
	switch {
	case f.DeployedAt == nil && f.Deployed == "":
		return fmt.Sprintf("Fixed in version %s. No deploy was reported.", f.FixedIn)
	case f.DeployedAt == nil:
		return fmt.Sprintf("Fixed in version %s; version %s runs.", f.FixedIn, f.Deployed)
	}
	text := fmt.Sprintf("Fixed in version %s; version %s runs since %s.", f.FixedIn, f.Deployed, in.clock(*f.DeployedAt))
	if f.Run == nil && f.Request == nil && f.Waiting > 0 {
		text += " " + upper(plural(f.Waiting, "dead letter is", "dead letters are")) + " from before the fix."
	}
	return text
}

// setGroup assigns, annotates, mutes, fixes or reopens a group.
func (c *Console) setGroup(in *request) (*done, error) {
	change := api.GroupChange{Why: in.PostFormValue("why")}
	var text string
	switch do := in.PostFormValue("do"); do {
	case "assign":
		change.Owner = new(in.PostFormValue("owner"))
		text = "Assigned to " + in.PostFormValue("owner") + "."
		if in.PostFormValue("owner") == "" {
			text = "Unassigned."
		}
	case "note":
		change.Note = new(in.PostFormValue("note"))
		text = "Note saved."
	case "fixed", "open":
		change.Status = do
		if do == group.Fixed {
			change.FixedIn = strings.TrimSpace(in.PostFormValue("version"))
		}
		text = map[string]string{"fixed": "Marked as fixed. The next failure marks it as regressed.", "open": "Reopened."}[do]
		if change.FixedIn != "" {
			text = "Marked as fixed in version " + change.FixedIn + ". Failures from when it is deployed mark it as regressed."
		}
	case "mute":
		change.Status = group.Muted
		if failures := strings.TrimSpace(in.PostFormValue("failures")); failures != "" {
			n, err := strconv.ParseInt(failures, 10, 64)
			if err != nil {
				return nil, &api.Problem{
					Status: http.StatusUnprocessableEntity,
					Detail: "the number of failures must be a whole number, not " + failures,
				}
			}
			change.MuteFailures = &n
		}
		if hours := strings.TrimSpace(in.PostFormValue("hours")); hours != "" {
			n, ok := parsedNumber(hours)
			if !ok || n <= 0 || n > 24*365 {
				return nil, &api.Problem{
					Status: http.StatusUnprocessableEntity,
					Detail: "the number of hours must be above 0 and at most 8760, not " + hours,
				}
			}
			change.MuteUntil = new(in.now.Add(time.Duration(n * float64(time.Hour))))
		}
		text = "Muted: dlqd sends no notifications for this group for now."
	default:
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity,
			Detail: "unknown action: choose assign, note, fixed, open or mute",
		}
	}
	changed, err := call(in, api.SetGroup, api.SetGroupInput{GroupInput: groupInput(in), Body: change})
	if err != nil {
		return nil, err
	}
	if changed.Assigned > 0 {
		text += " " + plural(changed.Assigned, "dead letter is", "dead letters are") + " assigned, too."
	}
	return &done{To: groupPath(in.PathValue("queue"), in.PathValue("fingerprint")), Flash: flash{Text: text}}, nil
}

// maxChosenGroups limits a selection of groups to the groups of one page.
const maxChosenGroups = 50

// actOnGroups acts on up to maxChosenGroups groups: on their dead letters, after a preview and only for groups of one
// queue, or on the groups themselves. If a group cannot be changed, the groups before it stay changed.
func (c *Console) actOnGroups(in *request) (*done, error) {
	refused := func(text string) (*done, error) {
		return nil, &api.Problem{Status: http.StatusUnprocessableEntity, Detail: text}
	}
	var inputs []api.GroupInput
	for _, path := range in.PostForm["group"] {
		queue, fingerprint, _ := strings.Cut(path, "/")
		name, err := url.PathUnescape(queue)
		if err != nil || fingerprint == "" {
			return refused("there is no group " + path)
		}
		inputs = append(inputs, api.GroupInput{Queue: name, Fingerprint: fingerprint})
	}
	if len(inputs) == 0 || len(inputs) > maxChosenGroups {
		return refused("select from 1 to " + strconv.Itoa(maxChosenGroups) + " groups")
	}
	var change api.GroupChange
	var text string
	switch do := in.PostFormValue("do"); do {
	case "replay", "resolve", "discard":
		prints := make([]string, len(inputs))
		for i := range inputs {
			if inputs[i].Queue != inputs[0].Queue { // with two queues and two groups, the filter would select four groups
				return refused("select groups of one queue to act on their dead letters")
			}
			prints[i] = quoted(inputs[i].Fingerprint)
		}
		chosen := query("queue", inputs[0].Queue) + " group:" + strings.Join(prints, ",")
		return &done{To: "/bulk?" + url.Values{"all": {"1"}, "do": {do}, "q": {chosen}}.Encode()}, nil
	case "fixed", "open":
		change.Status = do
		text = map[string]string{"fixed": "Marked as fixed", "open": "Reopened"}[do]
	case "mute":
		change.Status, change.MuteUntil = group.Muted, new(in.now.Add(24*time.Hour))
		text = "Muted for 24 hours"
	case "assign":
		change.Owner = new(in.PostFormValue("owner"))
		text = "Assigned to " + in.PostFormValue("owner")
		if in.PostFormValue("owner") == "" {
			text = "Unassigned"
		}
	default:
		return refused("unknown action: choose replay, resolve, discard, assign, fixed, open or mute")
	}
	for i := range inputs {
		_, err := call(in, api.SetGroup, api.SetGroupInput{GroupInput: inputs[i], Body: change})
		if problem, ok := errors.AsType[*api.Problem](err); ok && i > 0 { // earlier groups have already been changed
			problem.Detail = fmt.Sprintf("%s: only the first %d of %s. Group %s of queue %s: %s", text, i,
				plural(len(inputs), "group"), short(inputs[i].Fingerprint), inputs[i].Queue, problem.Detail)
		}
		if err != nil {
			return nil, err
		}
	}
	return &done{To: "/groups", Flash: flash{Text: text + ": " + plural(len(inputs), "group") + "."}}, nil
}
