package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay"
)

const (
	// overviewInterval is the render interval of an open overview, which takes some fifteen statements.
	overviewInterval = 20 * time.Second
	// groupsRead is the number of failure groups with the most failures among which the overview chooses, and
	// overviewGroups the number that it shows.
	groupsRead     = 20
	overviewGroups = 8
)

type overview struct {
	Stopped   *automatic.Stop // not nil while all automatic redelivery is stopped
	Sentence  string
	Stats     api.Stats
	In, Out   rate     // captured entries; resolved, failed or archived entries
	Change    int64    // change of the backlog in the last hour
	Resolved  *float64 // share of resolved entries among the entries closed in a day
	Recovery  *analytics.Times
	Chart     *chart
	Window    window
	Windows   []choice
	Young     map[string][]int64 // trends of the last hour for groups younger than an hour, by path
	Groups    []analytics.TopGroup
	Breakers  []breaker.Status
	Waiting   []waiting
	Runs      []*replay.Run
	Approvals []approvalView
	Oldest    []analytics.Oldest
	AsOf      time.Time
	Copies    []copyText
}

// waiting is the number of pending entries that wait for the same thing.
type waiting struct {
	What    string
	Entries int64
	More    bool
	Query   string
}

func (c *Console) overview(in *request) (*view, error) {
	v := &view{Template: "overview", Title: "Overview", Interval: overviewInterval}
	if !in.me().May(access.Reader) {
		v.Interval = 0
		return c.noRole(in, v), nil
	}
	o := &overview{Copies: copies("dlqd stats --over 24h", "SELECT * FROM dlq.stats('24 hours'); SELECT * FROM dlq.flow('24 hours', 'class'); SELECT * FROM dlq.top_groups('24 hours', p_limit => 20); SELECT * FROM dlq.oldest_entries(1);", //nolint:unqueryvet // for people
		in.curl(api.GetStats.Path,
			address(api.GetFlow, api.FlowInput{WindowInput: api.WindowInput{Over: "24h"}, By: "class"}),
			address(api.GetTopGroups, topGroupsInput("24h", groupsRead)), address(api.GetOldest, api.LimitInput{Limit: 1})))}
	o.Window = in.window("24h")
	o.Windows = in.windowChoices(o.Window)
	chosen, lastDay := api.WindowInput{Over: o.Window.Over}, api.WindowInput{Over: "24h"}
	var flow, minutes api.Report[analytics.Series]
	var queues api.Report[analytics.QueueStats]
	var times api.Report[analytics.Times]
	var groups api.Report[analytics.TopGroup]
	var oldest api.Report[analytics.Oldest]
	var policies api.Report[analytics.PolicyChange]
	var breakers api.BreakersOutputBody
	var runs api.RunsOutputBody
	var approvals api.ApprovalsOutputBody
	if err := inParallel(
		func() error {
			stats, err := call(in, api.GetStats, api.None{})
			if err == nil {
				o.Stats = *stats
			}
			return err
		},
		readIfAllowed(in, api.GetFlow, api.FlowInput{WindowInput: chosen, By: "class", Step: o.Window.Step}, &flow),
		readIfAllowed(in, api.GetFlow, api.FlowInput{WindowInput: api.WindowInput{Over: "1h"}, Step: "minute"}, &minutes),
		readIfAllowed(in, api.GetQueueStats, lastDay, &queues),
		readIfAllowed(in, api.GetTimes, api.TimesInput{WindowInput: lastDay}, &times),
		readIfAllowed(in, api.GetTopGroups, topGroupsInput(o.Window.Over, groupsRead), &groups),
		readIfAllowed(in, api.GetOldest, api.LimitInput{Limit: 1}, &oldest),
		readIfAllowed(in, api.GetPolicies, api.OverInput{Over: o.Window.Over}, &policies),
		readIfAllowed(in, api.ListBreakers, api.None{}, &breakers),
		readIfAllowed(in, api.ListReplays, api.None{}, &runs),
		readIfAllowed(in, api.ListApprovals, api.ApprovalsInput{State: approval.Requested, Limit: 5}, &approvals),
	); err != nil {
		return nil, err
	}
	o.AsOf, o.Groups, o.Oldest = flow.AsOf, mostOpen(groups.Rows, overviewGroups), oldest.Rows
	if len(flow.Rows) > 0 {
		o.Chart = in.backlogChart(flow.Rows, o.Window)
		for _, p := range policies.Rows {
			o.Chart.Markers = append(o.Chart.Markers, marker{p.At, "policy", "policy " + p.Version + " in force"})
		}
	}
	if len(minutes.Rows) > 0 {
		o.addMinutes(minutes.Rows[0].Buckets)
	}
	for _, q := range queues.Rows {
		if q.Queue == nil {
			o.Resolved = q.ResolutionRate
		}
	}
	for i := range times.Rows {
		if times.Rows[i].Measure == "to_recovery" && times.Rows[i].Entries > 0 {
			o.Recovery = &times.Rows[i]
		}
	}
	o.addRunsAndBreakers(breakers.Breakers, runs.Runs)
	for _, a := range approvals.Approvals {
		o.Approvals = append(o.Approvals, approvalView{a})
	}
	if err := inParallel(
		func() error { return o.countWaiting(in) },
		func() error { return o.readYoung(in) },
	); err != nil {
		return nil, err
	}
	o.Stopped = o.Stats.AutomaticStopped
	o.Sentence = o.summary(in)
	v.Data = o
	return v, nil
}

// readIfAllowed returns a function that calls an operation, and sets out unless the API answers 403 or 404.
func readIfAllowed[In, Out any](in *request, operation api.Operation[In, Out], input In, out *Out) func() error {
	return func() error {
		answer, _, err := callIfAllowed(in, operation, input)
		*out = *answer
		return err
	}
}

// topGroupsInput requests the failure groups with the most failures in a window.
func topGroupsInput(over string, limit int) api.TopInput {
	return api.TopInput{WindowInput: api.WindowInput{Over: over}, Limit: limit}
}

// mostOpen returns the groups with the most open dead letters, at most limit. Groups with the same number keep their
// order. A group whose failures have all recovered comes last, because it does not explain current failures.
func mostOpen(groups []analytics.TopGroup, limit int) []analytics.TopGroup {
	slices.SortStableFunc(groups, func(a, b analytics.TopGroup) int { return cmp.Compare(b.Open, a.Open) })
	return groups[:min(len(groups), limit)]
}

// readYoung reads the trends of the last hour for groups younger than an hour.
func (o *overview) readYoung(in *request) error {
	if o.Window.Over == "1h" || !slices.ContainsFunc(o.Groups, func(g analytics.TopGroup) bool {
		return isYoung(g.FirstSeen, in.now)
	}) {
		return nil
	}
	lastHour, _, err := callIfAllowed(in, api.GetTopGroups, topGroupsInput("1h", groupsRead))
	o.Young = map[string][]int64{}
	for _, g := range lastHour.Rows {
		if isYoung(g.FirstSeen, in.now) {
			o.Young[groupPath(g.Queue, g.Fingerprint)] = g.Trend
		}
	}
	return err
}

// LastHour returns the trend of the last hour for a group younger than an hour; nil for other groups.
func (o *overview) LastHour(g analytics.TopGroup) []int64 {
	return o.Young[groupPath(g.Queue, g.Fingerprint)]
}

// addRunsAndBreakers adds breakers that are not closed, replay runs that are running, paused or stopped within a day,
// and the markers of breakers and all runs in the chart.
func (o *overview) addRunsAndBreakers(breakers []breaker.Status, runs []*replay.Run) {
	o.Breakers = slices.DeleteFunc(breakers, func(b breaker.Status) bool { return b.State == breaker.Closed })
	for _, run := range runs {
		if run.Status == "running" || run.Status == "paused" || run.Status == "stopped" &&
			time.Since(run.CreatedAt) < 24*time.Hour {
			o.Runs = append(o.Runs, run)
		}
		if o.Chart != nil {
			o.Chart.Markers = append(o.Chart.Markers, marker{run.CreatedAt, "replay", "replay by " + run.Actor})
		}
	}
	if o.Chart != nil {
		for _, b := range o.Breakers {
			if b.Since != nil {
				o.Chart.Markers = append(o.Chart.Markers, marker{*b.Since, "breaker", b.Name + " " + string(b.State)})
			}
		}
	}
}

// rate is the number of events in the last hour.
type rate struct {
	PerMinute float64 // over the last ten minutes
	Hour      int64
}

func (r *rate) add(n int64, recent bool) {
	r.Hour += n
	if recent {
		r.PerMinute += float64(n) / 10
	}
}

// addMinutes adds up the captured and the closed entries of the last hour, without the current minute. Change is the
// change of the number of open entries from the first of these minutes to the last.
func (o *overview) addMinutes(minutes []analytics.Bucket) {
	if len(minutes) > 1 {
		minutes = minutes[:len(minutes)-1]
	}
	for i, b := range minutes {
		recent := i >= len(minutes)-10
		o.In.add(b.Captured, recent)
		o.Out.add(b.Resolved+b.Failed+b.Archived, recent)
	}
	if len(minutes) > 0 {
		o.Change = minutes[len(minutes)-1].Open - minutes[0].Open
	}
}

// backlogChart returns a chart of open entries by class in a window. Each of the largest classes has its own band. With
// more than six classes, the sixth band is the sum of the others.
func (in *request) backlogChart(series []analytics.Series, w window) *chart {
	const bands = 6
	c := &chart{
		Title: "Open dead letters by class, " + w.Name, Step: w.Every, Zone: in.zone(), Filter: new(""),
		File: "/chart/backlog.csv?over=" + w.Over, Image: "/chart/backlog.svg?over=" + w.Over,
	}
	for i := range series {
		series[i].Buckets = merged(series[i].Buckets, w.Every)
	}
	slices.SortStableFunc(series, func(a, b analytics.Series) int {
		return int(min(max(sumOpen(b)-sumOpen(a), -1), 1))
	})
	for _, s := range series {
		values := make([]int64, len(s.Buckets))
		for i, b := range s.Buckets {
			values[i] = max(b.Open, 0)
		}
		if c.Starts == nil {
			for _, b := range s.Buckets {
				c.Starts = append(c.Starts, b.Start)
			}
		}
		switch {
		case sumOpen(s) == 0 || len(values) != len(c.Starts):
		case len(c.Bands) < bands:
			c.Bands = append(c.Bands, band{classOf(s.Name)["Name"], values})
		default:
			last := &c.Bands[bands-1]
			last.Name = "other"
			for i, v := range values {
				last.Values[i] += v
			}
		}
	}
	return c
}

func sumOpen(s analytics.Series) (sum int64) {
	for _, b := range s.Buckets {
		sum += b.Open
	}
	return sum
}

// countWaiting counts the pending entries by what they wait for: a condition, the pace, their ordering key, the switch
// of automatic redelivery, or only their time. If the other counts are lower bounds, it omits the last one, which is
// computed from them.
func (o *overview) countWaiting(in *request) error {
	if o.Stats.ByStatus[string(deadletter.Pending)] == 0 {
		return nil
	}
	known := []waiting{
		{What: "a condition: a breaker or the load of the machine", Query: "status:pending waiting:condition"},
		{What: "the pace of their queue", Query: "status:pending waiting:pace"},
		{What: "earlier dead letters of their ordering key", Query: "status:pending waiting:order"},
		{What: "automatic redelivery to be switched on", Query: "status:pending waiting:automatic"},
	}
	requests := make([]func() error, len(known))
	for i := range known {
		requests[i] = func() error {
			page, err := call(in, api.ListEntries, api.ListInput{Q: known[i].Query, CountOnly: true})
			if err == nil && page.Count != nil {
				known[i].Entries, known[i].More = int64(page.Count.Entries), page.Count.AtLeast
			}
			return err
		}
	}
	if err := inParallel(requests...); err != nil {
		return err
	}
	left, exact := o.Stats.ByStatus[string(deadletter.Pending)], true
	for _, w := range known {
		exact = exact && !w.More
		if w.Entries > 0 {
			o.Waiting = append(o.Waiting, w)
			left -= w.Entries
		}
	}
	if left > 0 && exact {
		o.Waiting = append(o.Waiting, waiting{
			What: "the next try", Entries: left, Query: "status:pending",
		})
	}
	return nil
}

// Manual returns the number of entries that need an operator.
func (o *overview) Manual() int64 { return o.Stats.NeedsPerson }

// Most returns the first of the groups, or nil if there is none.
func (o *overview) Most() *analytics.TopGroup {
	if len(o.Groups) == 0 {
		return nil
	}
	return &o.Groups[0]
}

// summary describes what needs attention.
func (o *overview) summary(in *request) string {
	var sentences []string
	switch {
	case o.Stopped != nil && o.Stopped.Restored:
		sentences = append(sentences, "The database was restored to an earlier time. dlqd holds what it would send until "+
			"an operator resumes sending.")
	case o.Stopped != nil:
		sentences = append(sentences, upper(o.Stopped.String())+".")
	}
	manual := o.Manual()
	switch {
	case o.Stats.Open == 0:
		sentences = append(sentences, "No dead letters are open.")
	case manual == 0 && len(o.Approvals) == 0:
		sentences = append(sentences, "Nothing needs a person.")
	case manual > 0:
		sentences = append(sentences, plural(manual, "dead letter needs", "dead letters need")+" a person.")
	}
	if n := len(o.Approvals); n > 0 {
		sentences = append(sentences, plural(n, "request waits", "requests wait")+" for approval.")
	}
	if o.Stats.Open > 0 {
		trend := "steady"
		if o.Change > 0 {
			trend = fmt.Sprintf("rising (+%s in the last hour)", number(o.Change))
		} else if o.Change < 0 {
			trend = fmt.Sprintf("falling (%s in the last hour)", number(o.Change))
		}
		sentences = append(sentences, fmt.Sprintf("Backlog %s, %s.", number(o.Stats.Open), trend))
	}
	for _, b := range o.Breakers {
		sentences = append(sentences, in.breakerInWords(breakerRow{Status: b}.Label(), &b))
	}
	if n := o.Stats.Observed; n > 0 && o.Stopped == nil {
		only := plural(n, "dead letter is", "dead letters are") + " only observed: automatic redelivery is off for them."
		if n >= api.MostCounted {
			only = "At least " + only
		}
		sentences = append(sentences, only)
	}
	return strings.Join(sentences, " ")
}
