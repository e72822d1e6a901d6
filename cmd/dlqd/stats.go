package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
)

const (
	// sparkWidth is the maximum number of characters of a sparkline.
	sparkWidth = 32
	// topGroups is the maximum number of failure groups, and of error types, that stats lists.
	topGroups = 5
)

// report is the data of stats. --json prints it as JSON.
type report struct {
	Now        api.Stats                        `json:"now"`
	Flow       api.Report[analytics.Series]     `json:"flow"`
	Open       api.Report[analytics.Series]     `json:"open"`
	Queues     api.Report[analytics.QueueStats] `json:"queues"`
	Times      api.Report[analytics.Times]      `json:"times"`
	ErrorTypes api.Report[analytics.ErrorType]  `json:"errorTypes"`
	Groups     api.Report[analytics.TopGroup]   `json:"groups"`
}

func newStats() *cobra.Command {
	var c client
	var over, queue string
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Show open dead letters and recent activity",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var r report
			window := api.WindowInput{Over: over, Queue: queue}
			for _, read := range []func() error{
				into(cmd, &c, api.GetStats, api.None{}, &r.Now),
				into(cmd, &c, api.GetFlow, api.FlowInput{WindowInput: window, By: "all"}, &r.Flow),
				into(cmd, &c, api.GetFlow, api.FlowInput{WindowInput: window, By: "queue"}, &r.Open),
				into(cmd, &c, api.GetQueueStats, window, &r.Queues),
				into(cmd, &c, api.GetTimes, api.TimesInput{WindowInput: window, By: "queue"}, &r.Times),
				into(cmd, &c, api.GetErrorTypes, api.TopInput{WindowInput: window}, &r.ErrorTypes),
				into(cmd, &c, api.GetTopGroups, api.TopInput{WindowInput: window, Limit: topGroups}, &r.Groups),
			} {
				if err := read(); err != nil {
					return err
				}
			}
			if c.asJSON {
				raw, err := json.Marshal(r)
				if err != nil {
					return err
				}
				return c.printAnswer(cmd.OutOrStdout(), raw)
			}
			if len(r.Queues.Rows) == 0 {
				c.noteUnknownQueues(cmd, "", queue)
			}
			return r.print(cmd, over)
		},
	}
	c.registerTable(cmd)
	cmd.Flags().StringVar(&over, "over", "24h", "how far back, such as 90m, 24h or 30d")
	cmd.Flags().StringVar(&queue, "queue", "", "only this queue")
	cmd.AddCommand(newHeatMap(), newOldest(), newPolicies(), newSources())
	return cmd
}

// into returns a function that calls an operation and stores the operation's answer in out.
func into[In, Out any](cmd *cobra.Command, c *client, operation api.Operation[In, Out], input In,
	out *Out,
) func() error {
	return func() error {
		answer, _, err := fetch(cmd, c, operation, input)
		if err == nil {
			*out = *answer
		}
		return err
	}
}

func (r *report) print(cmd *cobra.Command, over string) error {
	w, row := table(cmd, "LAST "+strings.ToUpper(over)+"\t\tSUM")
	buckets := []analytics.Bucket{}
	if len(r.Flow.Rows) > 0 {
		buckets = r.Flow.Rows[0].Buckets
	}
	for _, line := range []struct {
		name string
		of   func(analytics.Bucket) int64
	}{
		{"captured", func(b analytics.Bucket) int64 { return b.Captured }},
		{"redelivered", func(b analytics.Bucket) int64 { return b.Redelivered }},
		{"resolved", func(b analytics.Bucket) int64 { return b.Resolved }},
		{"failed for good", func(b analytics.Bucket) int64 { return b.Failed }},
		{"archived", func(b analytics.Bucket) int64 { return b.Archived }},
	} {
		values, sum := make([]int64, len(buckets)), int64(0)
		for i, b := range buckets {
			values[i] = line.of(b)
			sum += values[i]
		}
		row(line.name, sparkline(values, add), sum)
	}
	open := map[string]string{}
	for _, s := range r.Open.Rows {
		values := make([]int64, len(s.Buckets))
		for i, b := range s.Buckets {
			values[i] = b.Open
		}
		open[s.Name] = sparkline(values, last)
	}
	times := map[string]analytics.Times{}
	for _, t := range r.Times.Rows {
		if t.Measure == "in_dlq" && t.Queue != nil {
			times[*t.Queue] = t
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w, row = table(cmd, "\nQUEUE\tOPEN\tTREND\tPARKED\tCAPTURED\tRESOLVED\tRATE\tREPLAYS OK\tHALF CLOSED IN\t95 % IN")
	for _, q := range r.Queues.Rows {
		if q.Queue == nil {
			row("(all)", q.Open, "", q.Manual, q.Captured, q.Resolved, percent(q.ResolutionRate),
				percent(q.ReplaySuccess), "", "")
			continue
		}
		row(*q.Queue, q.Open, open[*q.Queue], q.Manual, q.Captured, q.Resolved, percent(q.ResolutionRate),
			percent(q.ReplaySuccess), formatSeconds(times[*q.Queue].P50), formatSeconds(times[*q.Queue].P95))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w, row = table(cmd, "\nFAILURES\tTREND\tOPEN\tQUEUE\tTYPE\tFIRST SEEN\tLAST SEEN\tERROR")
	for _, g := range r.Groups.Rows {
		row(g.InWindow, sparkline(g.Trend, add), g.Open, g.Queue, text(g.ErrorType), ago(g.FirstSeen)+" ago",
			ago(g.LastSeen)+" ago", text(g.Title))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w, row = table(cmd, "\nFAILURES\tSHARE\tTYPE")
	for _, e := range r.ErrorTypes.Rows[:min(len(r.ErrorTypes.Rows), topGroups)] {
		row(e.Failures, percent(e.Share), cmp.Or(e.ErrorType, "(none)"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	_, err := fmt.Fprintf(out, "\nopen now: %d", r.Now.Open)
	if r.Now.OldestOpen != nil {
		_, err = fmt.Fprintf(out, ", the oldest for %s", ago(*r.Now.OldestOpen))
	}
	if r.Now.Observed > 0 {
		atLeast := ""
		if r.Now.Observed >= api.MostCounted {
			atLeast = " or more"
		}
		_, err = fmt.Fprintf(out, "\nobserved, not redelivered automatically: %d%s (see dlqd automatic)",
			r.Now.Observed, atLeast)
	}
	if r.Now.AutomaticStopped != nil {
		_, _ = fmt.Fprintln(out)
		printStop(out, r.Now.AutomaticStopped)
	}
	_, _ = fmt.Fprintf(out, "\nlast 24 hours: %d captured, %d replayed, %d resolved, %d failed for good, %d archived\n",
		r.Now.LastDay.Captured, r.Now.LastDay.Replayed, r.Now.LastDay.Resolved, r.Now.LastDay.Failed, r.Now.LastDay.Archived)
	return err
}

func add(sum, next int64) int64 { return sum + next }
func last(_, next int64) int64  { return next }

// sparkline draws one character for each value, the oldest first. If there are more values than sparkWidth, join
// combines adjacent values.
func sparkline(values []int64, join func(so, next int64) int64) string {
	each := (len(values) + sparkWidth - 1) / sparkWidth
	var drawn []int64
	most := int64(1)
	for i := 0; i < len(values); i += each {
		value := int64(0)
		for _, v := range values[i:min(i+each, len(values))] {
			value = join(value, v)
		}
		drawn = append(drawn, value)
		most = max(most, value)
	}
	return bars(drawn, most)
}

// bars draws each value as one character. The highest character stands for most.
func bars(values []int64, most int64) string {
	heights := []rune("▁▂▃▄▅▆▇█")
	line := make([]rune, len(values))
	for i, value := range values {
		line[i] = heights[max(0, value)*int64(len(heights)-1)/max(1, most)]
	}
	return string(line)
}

func percent(share *float64) string {
	if share == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100**share)
}

func formatSeconds(s analytics.Seconds) string {
	if s == 0 {
		return "-"
	}
	d := time.Duration(float64(s) * float64(time.Second))
	if d > time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(time.Millisecond).String()
}
