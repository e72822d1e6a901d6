package replay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// Closures of entries: see dlq.closure_of.
const (
	closureRecovered  = "recovered"
	closureFailedSame = "failed_same"
	closureFailedNew  = "failed_new"
	closureFailed     = "failed"
	closureSkipped    = "skipped"
	closureTakenOver  = "taken_over"
	closureExpired    = "expired"
	closureInProgress = "in_progress"
	closureToGo       = "to_go"
)

// maxReportRows limits the rows of a report or of a comparison. A row counts the entries of a failure group with the
// same closure and reason.
const maxReportRows = 1000

// RunReport counts the entries of a run by closure, in all and by failure group.
type RunReport struct {
	Run      uuid.UUID        `json:"runId" doc:"The run."`
	Complete bool             `json:"complete" doc:"Whether the run has ended, each entry has an outcome, and each failure has its class and failure group."`
	Entries  int64            `json:"entries" doc:"Number of entries."`
	Counts   RunCounts        `json:"counts" doc:"Number of entries by what became of them."`
	Groups   []RunGroupReport `json:"groups" doc:"By failure group at the start of the run, the largest first."`
	Requests int64            `json:"requests" doc:"Number of redeliveries that the run sent: each is one attempt, and one request if it is a message."`
	Worked   float64          `json:"workedSeconds" doc:"Seconds that its redeliveries worked, those that failed included. Each of them repeats work."`
	Figures  []Figure         `json:"figures,omitempty" doc:"The figures of the forecast beside what happened, once the run and all its redeliveries have ended."`
	Changes  []ForecastChange `json:"changes,omitempty" doc:"For an approved run: figures of the forecast that had changed by more than 10 % between the request and the start."`
	More     bool             `json:"more,omitempty" doc:"Whether small groups or rare reasons are left out; counts has all."`
}

// RunCounts has the number of entries for each closure.
type RunCounts struct {
	Recovered  int64 `json:"recovered" doc:"Recovered."`
	FailedSame int64 `json:"failedSame" doc:"Failed in the same failure group as at the start of the run."`
	FailedNew  int64 `json:"failedNew" doc:"Failed in another failure group."`
	Failed     int64 `json:"failed" doc:"Failed, and one of the failure groups is not known."`
	Skipped    int64 `json:"skipped" doc:"Skipped."`
	TakenOver  int64 `json:"takenOver" doc:"Taken over: a person moved them before their turn."`
	Expired    int64 `json:"expired" doc:"Expired before their turn, by a person or by the policy."`
	InProgress int64 `json:"inProgress" doc:"Redeliveries under way."`
	ToGo       int64 `json:"toGo" doc:"Not sent yet."`
}

// of returns the count of a closure.
func (c *RunCounts) of(closure string) *int64 {
	return map[string]*int64{
		closureRecovered: &c.Recovered, closureFailedSame: &c.FailedSame, closureFailedNew: &c.FailedNew,
		closureFailed: &c.Failed, closureSkipped: &c.Skipped, closureTakenOver: &c.TakenOver,
		closureExpired: &c.Expired, closureInProgress: &c.InProgress, closureToGo: &c.ToGo,
	}[closure]
}

// RunGroupReport counts the entries of a failure group by closure.
type RunGroupReport struct {
	RunCounts

	Fingerprint string      `json:"fingerprint,omitempty" doc:"The failure group at the start of the run; absent if it is not known."`
	Queue       string      `json:"queue,omitempty" doc:"Queue of one of the entries."`
	ErrorType   string      `json:"errorType,omitempty" doc:"Error type of one of the entries now."`
	Title       string      `json:"title,omitempty" doc:"Title of the failure group; absent if it has none, or if the caller may not see it."`
	Entries     int64       `json:"entries" doc:"Number of entries."`
	Since       *time.Time  `json:"since,omitempty" doc:"Time at which the oldest redelivery under way was sent."`
	Median      float64     `json:"medianSeconds,omitempty" doc:"Median time from the redelivery to the recovery, in seconds."`
	Slowest     float64     `json:"slowestSeconds,omitempty" doc:"Longest time from the redelivery to the recovery, in seconds."`
	Requests    int64       `json:"requests" doc:"Number of redeliveries that the run sent."`
	Worked      float64     `json:"workedSeconds" doc:"Seconds that they worked."`
	Reasons     []RunReason `json:"reasons,omitempty" doc:"New failure groups, reasons why entries were skipped, lost processes, and who took entries over or expired them."`
}

// RunReason is a reason of a closure, with its number of entries.
type RunReason struct {
	Closure string `json:"closure" enum:"failed_new,failed,skipped,taken_over,expired" doc:"What became of the entries."`
	Reason  string `json:"reason,omitempty" enum:"moved,stale,superseded,patch,checkpoint,held,ordering_key,live_job,done_job,open_entry,busy,resolved,group_ended,rejected,cancelled,process_lost" doc:"For skipped and failed: the identifier of the reason; absent in runs of earlier versions."`
	What    string `json:"what" doc:"The new failure group, the reason of the skip (# stands for numbers), that the process of the redelivery was lost, or who took them over or expired them."`
	Entries int64  `json:"entries" doc:"Number of entries."`
}

// Report counts the closures of a run's entries. It reads each entry, and returns at most maxReportRows counts.
// Complete is set once the run has ended and all outcomes are known.
func (r *Replayer) Report(ctx context.Context, id uuid.UUID) (*RunReport, error) {
	run, err := r.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	rows, err := dbsqlc.New(r.Store.DB()).RunReport(ctx, dbsqlc.RunReportParams{ID: id, Most: maxReportRows + 1})
	if err != nil {
		return nil, err
	}
	report := &RunReport{Run: id, Groups: []RunGroupReport{}}
	if run.Forecast != nil {
		report.Changes = run.Forecast.Changes
	}
	report.Figures = run.Figures
	if len(rows) > maxReportRows {
		rows, report.More = rows[:maxReportRows], true
	}
	at := map[string]int{}
	for i := range rows {
		row := &rows[i]
		if row.IsTotal {
			*report.Counts.of(row.Closure) += row.Entries
			report.Entries += row.Entries
			report.Requests, report.Worked = report.Requests+row.Requests, report.Worked+row.Worked
			continue
		}
		if _, ok := at[row.Was]; !ok {
			at[row.Was] = len(report.Groups)
			report.Groups = append(report.Groups, RunGroupReport{
				Fingerprint: row.Was, Queue: row.Queue, ErrorType: row.ErrorType, Title: row.Title,
			})
		}
		report.Groups[at[row.Was]].add(row)
	}
	slices.SortStableFunc(report.Groups, func(a, b RunGroupReport) int { return cmp.Compare(b.Entries, a.Entries) })
	ended := run.Status == "completed" || run.Status == "cancelled"
	if !ended || report.Counts.InProgress+report.Counts.ToGo > 0 {
		return report, nil
	}
	unsettled, err := dbsqlc.New(r.Store.DB()).Unsettled(ctx, id)
	report.Complete = !unsettled
	return report, err
}

func (g *RunGroupReport) add(row *dbsqlc.RunReportRow) {
	*g.of(row.Closure) += row.Entries
	g.Entries += row.Entries
	g.Requests, g.Worked = g.Requests+row.Requests, g.Worked+row.Worked
	switch row.Closure {
	case closureRecovered:
		g.Median, g.Slowest = row.Median, row.Slowest
	case closureInProgress:
		g.Since = &row.Since
	}
	if row.What != "" {
		g.Reasons = append(g.Reasons, RunReason{
			Closure: row.Closure, Reason: row.Reason, What: row.What, Entries: row.Entries,
		})
	}
}

// RunComparison compares the closures of entries that are in two runs.
type RunComparison struct {
	Before  uuid.UUID   `json:"before" doc:"One run."`
	After   uuid.UUID   `json:"after" doc:"The other run."`
	Changes []RunChange `json:"changes" doc:"Numbers of entries by failure group and by what became of them in each run, the largest first."`
	More    bool        `json:"more,omitempty" doc:"Whether small numbers are left out."`
}

// RunChange counts entries that have the same closures in two runs.
type RunChange struct {
	Fingerprint string `json:"fingerprint,omitempty" doc:"Failure group at the start of the later run, or else of the other one; absent if it is not known."`
	Before      string `json:"before" enum:"recovered,failed_same,failed_new,failed,skipped,taken_over,expired,in_progress,to_go,absent" doc:"What became of them in the run before; absent if it did not choose them."`
	After       string `json:"after" enum:"recovered,failed_same,failed_new,failed,skipped,taken_over,expired,in_progress,to_go,absent" doc:"What became of them in the run after."`
	Entries     int64  `json:"entries" doc:"Number of entries."`
}

// Compare counts the entries of two runs by failure group and by what became of them in each run. It returns at most
// maxReportRows counts.
func (r *Replayer) Compare(ctx context.Context, before, after uuid.UUID) (*RunComparison, error) {
	for _, id := range []uuid.UUID{before, after} {
		if _, err := r.Get(ctx, id); err != nil {
			return nil, err
		}
	}
	rows, err := dbsqlc.New(r.Store.DB()).DiffRuns(ctx, dbsqlc.DiffRunsParams{
		A: before, B: after, Most: maxReportRows + 1,
	})
	if err != nil {
		return nil, err
	}
	c := &RunComparison{Before: before, After: after, Changes: []RunChange{}}
	if len(rows) > maxReportRows {
		rows, c.More = rows[:maxReportRows], true
	}
	for i := range rows {
		row := &rows[i]
		c.Changes = append(c.Changes, RunChange{
			Fingerprint: row.Was, Before: row.Before, After: row.After, Entries: row.Entries,
		})
	}
	return c, nil
}

// Figure compares a figure of a run's forecast with the actual value.
type Figure struct {
	What     string `json:"what" doc:"The figure: what an estimate of the forecast counts, recover (entries that recover), or ends (seconds until the run has ended)."`
	Forecast int64  `json:"forecast" doc:"The forecast."`
	Low      int64  `json:"low" doc:"Lower end of its interval."`
	High     int64  `json:"high" doc:"Upper end of its interval."`
	Actual   int64  `json:"actual" doc:"What happened. ran_long, ran_not_known and repeated are estimated again from 1,000 entries."`
}

// Held reports whether the actual value is in the interval of the forecast.
func (f Figure) Held() bool { return f.Low <= f.Actual && f.Actual <= f.High }

// Words describes what the figure counts.
func (f Figure) Words() string { return figureWords(f.What) }

func figureWords(what string) string {
	switch what {
	case "ends":
		return "seconds until it has ended"
	case "recover":
		return "recover"
	}
	return cmp.Or(estimateWords[what], what)
}

// Off returns the actual value minus the forecast.
func (f Figure) Off() int64 { return f.Actual - f.Forecast }

// Text describes the figure.
func (f Figure) Text() string {
	held := "outside of its interval"
	if f.Held() {
		held = "in its interval"
	}
	return fmt.Sprintf("%s: forecast %d (%d to %d), actual %d (%+d), %s", f.What, f.Forecast, f.Low, f.High, f.Actual,
		f.Off(), held)
}
