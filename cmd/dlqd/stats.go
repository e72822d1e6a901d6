package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

const (
	// sparkWidth is how many characters a sparkline has at most.
	sparkWidth = 32
	// topGroups is how many failure groups, and types of error, stats names.
	topGroups = 5
)

// report is what stats asks for. Its JSON is what --json prints.
type report struct {
	Now        api.Stats                        `json:"now"`
	Flow       api.Report[analytics.Series]     `json:"flow"`
	Open       api.Report[analytics.Series]     `json:"open"`
	Queues     api.Report[analytics.QueueStats] `json:"queues"`
	Times      api.Report[analytics.Times]      `json:"times"`
	ErrorTypes api.Report[analytics.ErrorType]  `json:"errorTypes"`
	Groups     api.Report[analytics.Group]      `json:"groups"`
}

func newStats() *cobra.Command {
	var c client
	var over, queue string
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Say what is open, and what has happened of late",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var r report
			window := url.Values{"over": {over}}
			if queue != "" {
				window.Set("queue", queue)
			}
			of := "?" + window.Encode()
			for _, ask := range []struct {
				path string
				out  any
			}{
				{"stats", &r.Now},
				{"analytics/flow" + of + "&by=all", &r.Flow},
				{"analytics/flow" + of + "&by=queue", &r.Open},
				{"analytics/queues" + of, &r.Queues},
				{"analytics/times" + of + "&by=queue", &r.Times},
				{"analytics/error-types" + of, &r.ErrorTypes},
				{"analytics/groups" + of + "&limit=" + strconv.Itoa(topGroups), &r.Groups},
			} {
				raw, err := c.raw(cmd, http.MethodGet, "/api/dlq/"+ask.path, nil)
				if err != nil {
					return err
				}
				if err := json.Unmarshal(raw, ask.out); err != nil {
					return err
				}
			}
			if c.asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
			}
			return r.print(cmd, over)
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&over, "over", "24h", "how far back, such as 90m, 24h or 30d")
	cmd.Flags().StringVar(&queue, "queue", "", "of this queue alone")
	return cmd
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
			row("(all)", q.Open, "", q.Manual, q.Captured, q.Resolved, percent(q.ResolutionRate), percent(q.ReplaySuccess), "", "")
			continue
		}
		row(*q.Queue, q.Open, open[*q.Queue], q.Manual, q.Captured, q.Resolved, percent(q.ResolutionRate), percent(q.ReplaySuccess), took(times[*q.Queue].P50), took(times[*q.Queue].P95))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w, row = table(cmd, "\nFAILURES\tTREND\tOPEN\tQUEUE\tTYPE\tFIRST SEEN\tLAST SEEN\tERROR")
	for _, g := range r.Groups.Rows {
		row(g.InWindow, sparkline(g.Trend, add), g.Open, g.Queue, text(g.ErrorType), ago(g.FirstSeen)+" ago", ago(g.LastSeen)+" ago", shorten(text(g.Title), 60))
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
	_, _ = fmt.Fprintf(out, "\nlast 24 hours: %d captured, %d replayed, %d resolved, %d failed for good, %d archived\n",
		r.Now.LastDay.Captured, r.Now.LastDay.Replayed, r.Now.LastDay.Resolved, r.Now.LastDay.Failed, r.Now.LastDay.Archived)
	return err
}

func add(sum, next int64) int64 { return sum + next }
func last(_, next int64) int64  { return next }

// sparkline draws values, oldest first, of which as many share a character as it takes.
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
	bars := []rune("▁▂▃▄▅▆▇█")
	line := make([]rune, len(drawn))
	for i, value := range drawn {
		line[i] = bars[max(0, value)*int64(len(bars)-1)/most]
	}
	return string(line)
}

func percent(share *float64) string {
	if share == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100**share)
}

func took(s analytics.Seconds) string {
	if s == 0 {
		return "-"
	}
	d := time.Duration(float64(s) * float64(time.Second))
	if d > time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(time.Millisecond).String()
}

func newAudit() *cobra.Command {
	var c client
	filters := map[string]*string{}
	var people bool
	var limit int
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Search the audit trail: who did what to which dead letter, when, from where and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			query := url.Values{"limit": {strconv.Itoa(limit)}}
			for name, value := range filters {
				if *value != "" {
					query.Set(name, *value)
				}
			}
			if people {
				query.Set("people", "true")
			}
			var page api.AuditPage
			if err := c.call(cmd, http.MethodGet, "/api/dlq/audit?"+query.Encode(), nil, &page); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tBY\tFROM WHERE\tENTRY\tFROM\tTO\tWHAT\tNOTE\tPOLICY")
			for _, m := range page.Moves {
				row(m.At.Format(time.RFC3339), m.Actor, text(m.Origin), m.EntryID, text(m.FromStatus), m.ToStatus, text(m.Reason), text(m.Note), text(m.ConfigVersion))
			}
			if err := w.Flush(); err != nil || page.Next == "" {
				return err
			}
			_, err := fmt.Fprintln(cmd.ErrOrStderr(), "more: --cursor", page.Next)
			return err
		},
	}
	c.register(cmd)
	for _, f := range []struct{ flag, name, help string }{
		{"actor", "actor", "what this person or worker did"},
		{"db-user", "dbUser", "what this database user did"},
		{"origin", "origin", "from where, or a part of it, such as an address"},
		{"id", "entryId", "what was done to this entry"},
		{"queue", "queue", "to entries of this queue"},
		{"kind", "kind", "to entries of this kind"},
		{"from", "from", "from this state"},
		{"to", "to", "to this state"},
		{"text", "text", "with these words in reason or note"},
		{"policy", "configVersion", "under this version of the policy"},
		{"after", "after", "at or after (RFC 3339)"},
		{"before", "before", "before (RFC 3339)"},
		{"cursor", "cursor", "where the page before ended"},
	} {
		filters[f.name] = cmd.Flags().String(f.flag, "", f.help)
	}
	cmd.Flags().BoolVar(&people, "people", false, "what people did, and not dlqd by itself")
	cmd.Flags().IntVar(&limit, "limit", 50, "moves in a page, at most 500")
	return cmd
}

func newErase() *cobra.Command {
	var c client
	var filter filterFlags
	var in api.EraseRequest
	cmd := &cobra.Command{
		Use:   "erase",
		Short: "Erase somebody's data from dead letters, their jobs and the archive",
		Long: "Payloads, error texts, metadata, subscriber, tags and notes go, of the entries that the flags choose; open and failed ones are\n" +
			"archived. A record stays that says that it was done, and not whose data it was.",
		Example: `  dlqd erase --payload-contains '{"customer": "cus_81"}' --note "request 42"`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if in.Filter, err = filter.filter(); err != nil {
				return err
			}
			in.Actor = actor()
			c.timeout = bulkTimeout
			var out api.EraseAnswer
			if err := c.call(cmd, http.MethodPost, "/api/dlq/erasures", in, &out); err != nil || c.asJSON {
				return err
			}
			if out.DryRun {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters of the database are chosen; nothing was changed, and the archive was not looked through\n", out.Entries)
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "erasure %s: %d dead letters and %d jobs of the database, %d dead letters in %d units of the archive\n", out.ID, out.Entries, out.Jobs, out.Archived, out.Archives)
			if out.UnderWay > 0 {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters were left, because they are being redelivered: erase again when that has ended\n", out.UnderWay)
			}
			return err
		},
	}
	c.register(cmd)
	filter.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "why, such as the number of the request")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only count the dead letters of the database")
	return cmd
}

func newErasures() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "erasures", Short: "List the records of erasures", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out struct {
				Erasures []deadletter.Erasure `json:"erasures"`
			}
			if err := c.call(cmd, http.MethodGet, "/api/dlq/erasures?limit=200", nil, &out); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tID\tBY\tNOTE\tFIELDS\tENTRIES\tJOBS\tLEFT\tARCHIVED\tUNITS\tDONE")
			for _, e := range out.Erasures {
				row(e.At.Format(time.RFC3339), e.ID, e.Actor, text(e.Note), strings.Join(e.Fields, ","), e.Entries, e.Jobs, e.UnderWay, e.Archived, e.Archives, e.FinishedAt != nil)
			}
			return w.Flush()
		},
	}
	c.register(cmd)
	return cmd
}
