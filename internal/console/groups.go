package console

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/group"
)

// groupsEvery is the render interval of open group pages. Their trends are as old as the rollups.
const groupsEvery = 15 * time.Second

type groups struct {
	Sentence string
	Groups   []group.Group
	Status   string
	Order    string
	Queue    string
	Owner    string
	Over     string
	Next     string
	Problem  *Problem
	Copies   []copyText
	AsOf     time.Time
}

func (c *Console) groups(in *request) (*view, error) {
	asked := in.URL.Query()
	g := &groups{Status: asked.Get("status"), Order: asked.Get("order"), Queue: asked.Get("queue"), Owner: asked.Get("owner"), Over: asked.Get("over")}
	v := &view{Template: "groups", Title: "Groups", Data: g, Every: groupsEvery}
	query := url.Values{"limit": {"50"}}
	for _, name := range []string{"status", "order", "queue", "owner", "over", "cursor", "hasOpen"} {
		if value := asked.Get(name); value != "" {
			query.Set(name, value)
		}
	}
	var page api.GroupPage
	err := in.get("/api/dlq/groups", query, &page)
	if problem, ok := errors.AsType[*Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		g.Problem, v.Status, v.Every = problem, problem.Status, 0
		g.Sentence = "This is no choice of failure groups."
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	g.Groups, g.AsOf = page.Groups, page.AsOf
	if page.Next != "" {
		g.Next = in.with("cursor", page.Next)
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
		g.Sentence = "No failure group is as asked for."
	default:
		g.Sentence = fmt.Sprintf("%s, %s in the window.", plural(len(g.Groups), "failure group"), plural(failures, "failure"))
		if page.Next != "" {
			g.Sentence = "The first " + g.Sentence
		}
		if regressed > 0 {
			g.Sentence += " " + plural(regressed, "is", "are") + " back after being marked as fixed."
		}
	}
	query.Del("cursor")
	g.Copies = in.groupCopies(query)
	return v, nil
}

type groupPage struct {
	api.GroupDetail

	Sentence string
	Shares   []shareBy
	Operator bool
	Query    string // finds the group's entries in the list
	Copies   []copyText
}

// shareBy is the distribution of a group's failures by version, host or source.
type shareBy struct {
	By     string
	Shares []group.Share
}

func groupPath(queue, fingerprint string) string {
	return "/groups/" + url.PathEscape(queue) + "/" + url.PathEscape(fingerprint)
}

func (c *Console) group(in *request) (*view, error) {
	var detail api.GroupDetail
	path := "/api/dlq" + groupPath(in.PathValue("queue"), in.PathValue("fingerprint"))
	if err := in.get(path, url.Values{"over": {"7d"}}, &detail); err != nil {
		return nil, err
	}
	g := &groupPage{GroupDetail: detail, Operator: in.me().May(access.Operator), Query: query("group", detail.Fingerprint, "queue", detail.Queue)}
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
	g.Sentence = groupSentence(&detail.Group)
	chosen := sqlQuoted(jsonOf(map[string]string{"queue": detail.Queue, "fingerprint": detail.Fingerprint}))
	of := sqlQuoted(detail.Queue) + ", " + sqlQuoted(detail.Fingerprint)
	g.Copies = copies("dlqd groups show "+shellQuoted(detail.Queue)+" "+shellQuoted(detail.Fingerprint)+" --over 7d",
		"SELECT * FROM dlq.groups("+chosen+", p_over => '7 days'); SELECT * FROM dlq.group_shares("+of+"); SELECT dlq.group_entries("+of+");", in.curl(path+"?over=7d")) //nolint:unqueryvet // for people
	return &view{Template: "group", Title: "Group " + short(detail.Fingerprint), Data: g, Every: groupsEvery, Section: "/groups"}, nil
}

func groupSentence(g *group.Group) string {
	said := fmt.Sprintf("%s in %s, %s of them in the last 7 days. %s.", plural(g.Failures, "failure"), g.Queue, number(g.InWindow), upper(plural(g.Open, "dead letter is", "dead letters are")+" open"))
	switch g.Status {
	case group.Regressed:
		said += fmt.Sprintf(" It is back: %s marked it as fixed %s.", deref(g.FixedBy), ago(g.FixedAt))
	case group.Fixed:
		said += fmt.Sprintf(" %s marked it as fixed %s, and it has not failed since.", deref(g.FixedBy), ago(g.FixedAt))
	case group.Muted:
		said += fmt.Sprintf(" %s muted it: nobody is told of it", deref(g.MutedBy))
		if g.MuteUntil != nil {
			said += " until " + g.MuteUntil.UTC().Format("2 Jan 15:04 UTC")
		}
		if g.MuteLeft != nil {
			said += ", or until " + plural(*g.MuteLeft, "more failure")
		}
		said += "."
	}
	return said
}

// setGroup assigns, notes, mutes, fixes or reopens a group.
func (c *Console) setGroup(in *request) (*done, error) {
	queue, fingerprint := in.PathValue("queue"), in.PathValue("fingerprint")
	change := map[string]any{"why": in.PostFormValue("why")}
	var said string
	switch do := in.PostFormValue("do"); do {
	case "assign":
		change["owner"] = in.PostFormValue("owner")
		said = "Assigned to " + in.PostFormValue("owner") + "."
		if in.PostFormValue("owner") == "" {
			said = "Nobody looks after it now."
		}
	case "note":
		change["note"] = in.PostFormValue("note")
		said = "Noted."
	case "fixed", "open":
		change["status"] = do
		said = map[string]string{"fixed": "Marked as fixed: it is regressed as soon as it fails again.", "open": "Open again."}[do]
	case "mute":
		change["status"] = group.Muted
		if failures := strings.TrimSpace(in.PostFormValue("failures")); failures != "" {
			n, err := strconv.ParseInt(failures, 10, 64)
			if err != nil {
				return nil, &Problem{Status: http.StatusUnprocessableEntity, Detail: "until how many more failures? " + failures + " is no number"}
			}
			change["muteFailures"] = n
		}
		if hours := strings.TrimSpace(in.PostFormValue("hours")); hours != "" {
			n, ok := parsedNumber(hours)
			if !ok || n <= 0 || n > 24*365 {
				return nil, &Problem{Status: http.StatusUnprocessableEntity, Detail: "for how many hours? " + hours + " is no number of them"}
			}
			change["muteUntil"] = in.now.Add(time.Duration(n * float64(time.Hour)))
		}
		said = "Muted: nobody is told of it for now."
	default:
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Detail: "a group can be assigned, noted, marked as fixed, muted, or opened again"}
	}
	var changed api.GroupChanged
	if err := in.call(http.MethodPatch, "/api/dlq"+groupPath(queue, fingerprint), nil, change, &changed); err != nil {
		return nil, err
	}
	if changed.Assigned > 0 {
		said += " " + plural(changed.Assigned, "entry is", "entries are") + " theirs."
	}
	return &done{To: groupPath(queue, fingerprint), Flash: flash{Text: said}}, nil
}
