package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/replay"
)

const (
	// activeRunInterval is the minimum render interval of the page of a running run, and idleRunInterval of the page of
	// any other run.
	activeRunInterval, idleRunInterval = 2 * time.Second, 30 * time.Second
	// runsInterval is the render interval of an open list of runs.
	runsInterval = 5 * time.Second
	// runPage is the number of entries on the page of a run. runFailures is the number of failures
	// whose reasons it groups.
	runPage, runFailures = 25, 200
)

// replayRun is a replay run as pages show it.
type replayRun struct {
	*replay.Run
}

// Active reports whether the run is running or paused.
func (r replayRun) Active() bool { return r.Status == "running" || r.Status == "paused" }

// UnderWay returns the number of redeliveries that have not ended.
func (r replayRun) UnderWay() int64 { return max(r.Replayed-r.Succeeded-r.Failed, 0) }

// ToGo returns the number of entries without an outcome, including redeliveries in progress.
func (r replayRun) ToGo() int64 { return max(r.Total-r.Succeeded-r.Failed-r.Skipped, 0) }

// Took returns the duration of the run; if it has not ended, the time since its start.
func (r replayRun) Took() time.Duration {
	if r.FinishedAt != nil {
		return r.FinishedAt.Sub(r.CreatedAt)
	}
	return time.Since(r.CreatedAt)
}

// Share returns the share of successes among the ended redeliveries, or nil if none has ended.
func (r replayRun) Share() *float64 {
	if r.Succeeded+r.Failed == 0 {
		return nil
	}
	return new(float64(r.Succeeded) / float64(r.Succeeded+r.Failed))
}

// runGroup is a group of a progressive run as its page shows it.
type runGroup struct{ replay.RunGroup }

// StepGroups returns the groups of a progressive run.
func (r replayRun) StepGroups() []runGroup {
	groups := make([]runGroup, len(r.Groups))
	for i := range r.Groups {
		groups[i] = runGroup{r.Groups[i]}
	}
	return groups
}

// Waits reports whether an operator has to decide about the group.
func (g runGroup) Waits() bool { return g.State == "held" || g.State == "stopped" }

// StepName names the group's step.
func (g runGroup) StepName() string {
	return [...]string{"canary", "10 %", "50 %", "100 %"}[min(max(g.Step, 0), 3)]
}

// Mark returns the mark of the group's state.
func (g runGroup) Mark() mark {
	switch g.State {
	case "going":
		return mark{"going", "going", "◐", "info"}
	case "held":
		return mark{"held", "held", "‖", "warn"}
	case "stopped":
		return mark{"stopped", "stopped", "■", "bad"}
	case "done":
		return mark{"done", "done", "✓", "ok"}
	}
	return mark{g.State, g.State, "▢", "neutral"}
}

// Words returns the filter in the filter language.
func (r replayRun) Words() string { return filterWords(r.Filter) }

// Mark returns the mark of the run's state.
func (r replayRun) Mark() mark {
	switch r.Status {
	case "running":
		if r.Held {
			return mark{"held", "held", "■", "bad"}
		}
		return mark{"running", "running", "◐", "info"}
	case "paused":
		return mark{"paused", "paused", "‖", "warn"}
	case "completed":
		return mark{"completed", "done", "✓", "ok"}
	case "stopped":
		return mark{"stopped", "stopped", "■", "bad"}
	}
	return mark{r.Status, r.Status, "▢", "neutral"}
}

// parts returns the number of entries by outcome.
func (r replayRun) parts() []runPart {
	return []runPart{
		{"recovered", "ok", r.Succeeded},
		{"failed again", "bad", r.Failed},
		{"skipped", "skipped", r.Skipped},
		{"remaining", "to-go", r.ToGo()},
	}
}

type runPart struct {
	Name, Hue string
	Entries   int64
}

// Parts exports parts to templates.
func (r replayRun) Parts() []runPart { return r.parts() }

// Bar draws the entries by outcome, in four parts.
func (r replayRun) Bar() template.HTML {
	words := make([]string, 0, len(r.parts()))
	var svg strings.Builder
	total, at := float64(max(r.Total, r.Succeeded+r.Failed+r.Skipped, 1)), 0.0
	for _, p := range r.parts() {
		words = append(words, number(p.Entries)+" "+p.Name)
		width := 1000 * float64(p.Entries) / total
		if p.Entries > 0 {
			width = max(width, 4) // keeps one entry of a million visible
			fmt.Fprintf(&svg, `<rect class="part-%s" x="%.1f" y="0" width="%.1f" height="10"><title>%s</title></rect>`, p.Hue,
				min(at, 1000-width), width, words[len(words)-1])
		}
		at += width
	}
	return template.HTML(`<svg class="outcomes" role="img" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-label="` + strings.Join(words, ", ") + `">` + svg.String() + `</svg>`) //nolint:gosec // numbers, and words of ours
}

func perSecond(v float64) string {
	if v < 10 {
		return strconv.FormatFloat(v, 'g', 2, 64) + " per second"
	}
	return number(v) + " per second"
}

// Expected returns the forecast's expectation of recoveries, or nil if the forecast has none.
func (r replayRun) Expected() *replay.Expectation {
	if r.Forecast == nil || r.Forecast.Expect == nil || r.Forecast.Expect.Tried == 0 {
		return nil
	}
	return r.Forecast.Expect
}

// Ends returns when the forecast expects the run to end, or nil if the forecast does not say.
func (r replayRun) Ends() *replay.Ending {
	if r.Forecast == nil {
		return nil
	}
	return r.Forecast.Ends
}

// SkipTexts describes what the run skips because the policy says so.
func (r replayRun) SkipTexts() []string { return replay.SkipTexts(r.Skips, nil, nil) }

// KeyedText describes the order of the run's jobs that have an ordering key, or returns "".
func (r replayRun) KeyedText() string {
	return replay.KeyedText(r.KeyedJobs, replay.Words{Number: number})
}

// Sentence summarizes the progress or the result of the run.
func (r replayRun) Sentence() string {
	reason := upper(r.Reason)
	outcome := number(r.Succeeded) + " recovered, " + number(r.Failed) + " failed again"
	if r.Skipped > 0 {
		outcome += ", " + plural(r.Skipped, "was skipped", "were skipped")
	}
	underWay := ""
	if n := r.UnderWay(); n > 0 {
		underWay = " " + plural(n, "redelivery is", "redeliveries are") + " still under way."
	}
	replayed := number(r.Replayed) + " of " + plural(r.Total, "dead letter") + " replayed"
	switch r.Status {
	case "running":
		if r.Held {
			return "Held, because the database was restored: " + replayed + ", " + outcome + "." + underWay +
				" The rest may have been replayed after the backup."
		}
		text := replayed
		if r.PerSecond > 0 {
			text += ", " + perSecond(r.PerSecond)
		}
		if r.SecondsLeft > 0 {
			text += ", about " + lasted(max(r.SecondsLeft, 1)) + " left"
		}
		return text + ": " + outcome + "."
	case "paused":
		return cmp.Or(reason, "Paused") + ": " + replayed + ", " + outcome + "." + underWay
	case "stopped":
		return "Stopped automatically: " + cmp.Or(r.Reason, "too many dead letters failed again") + ". " + upper(replayed) +
			", " + outcome + "." +
			underWay + " Resume continues with the rest."
	case "cancelled":
		return cmp.Or(reason, "Cancelled") + ": " + replayed + ", " + outcome + "." + underWay
	}
	if r.Total == 0 {
		return "No dead letter matched."
	}
	return "Done in " + lasted(r.Took()) + ": " + outcome + " of " + number(r.Total) + "." + underWay
}

// filterWords prints a filter in the filter language, or as JSON if the language cannot express it.
func filterWords(raw json.RawMessage) string {
	f, err := filter.FromJSON(raw)
	if err != nil {
		return string(raw)
	}
	return f.Print()
}

type replays struct {
	Sentence string
	Forecast string // how often forecasts were right; "" if no forecast can be judged
	Runs     []replayRun
	Why      string // why the viewer cannot start a run; "" if they can
	Copies   []copyText
}

// runColumns are the columns of dlq.replay_runs that every role with access to the table may read.
const runColumns = "id, status, actor, total, replayed, skipped, rate, reason, created_at, finished_at"

func (c *Console) replays(in *request) (*view, error) {
	runs, err := in.runs()
	if err != nil {
		return nil, err
	}
	p := &replays{Runs: runs, Why: missingRole(in.me(), access.Operator), Copies: copies("dlqd replays",
		"SELECT "+runColumns+" FROM dlq.replay_runs ORDER BY id DESC LIMIT 50;", in.curl(api.ListReplays.Path))}
	p.Sentence = p.summary()
	calibration, err := call(in, api.GetReplayCalibration, api.None{})
	if err != nil {
		return nil, err
	}
	p.Forecast = calibration.Text(in.replayWords())
	return &view{Template: "replays", Title: "Replays", Data: p, Interval: runsInterval}, nil
}

// calibration shows the page that compares the forecasts of ended runs with their outcomes.
func (c *Console) calibration(in *request) (*view, error) {
	shown, err := call(in, api.GetReplayCalibration, api.None{})
	if err != nil {
		return nil, err
	}
	return &view{
		Template: "calibration", Title: "Forecasts of replay runs", Data: &calibration{
			Calibration: shown, Sentence: cmp.Or(shown.Text(in.replayWords()), "No forecast of an ended run can be judged yet"),
			Copies: copies("dlqd replays calibration",
				"SELECT * FROM dlq.replay_calibration(); SELECT * FROM dlq.replay_figure_calibration();", //nolint:unqueryvet // for people
				in.curl(api.GetReplayCalibration.Path)),
		}, Section: "/replays",
	}, nil
}

type calibration struct {
	*replay.Calibration

	Sentence string
	Copies   []copyText
}

// Unjudged returns the number of groups that were not judged.
func (c *calibration) Unjudged() int64 { return c.Groups - c.Judged }

// missingRole says why the viewer may not use a role. It returns "" if the viewer has the role in at least one queue.
func missingRole(p *access.Principal, role access.Role) string {
	if p.May(role) {
		return ""
	}
	return "requires the role " + string(role)
}

func (in *request) runs() ([]replayRun, error) {
	list, err := call(in, api.ListReplays, api.None{})
	if err != nil {
		return nil, err
	}
	runs := make([]replayRun, len(list.Runs))
	for i, r := range list.Runs {
		runs[i] = replayRun{r}
	}
	return runs, nil
}

func (p *replays) summary() string {
	if len(p.Runs) == 0 {
		return "No replay runs yet."
	}
	var sentences []string
	for _, r := range p.Runs {
		if r.Active() {
			sentences = append(sentences, upper(r.Mark().Word)+", by "+r.Actor+": "+number(r.Replayed)+" of "+number(r.Total)+
				" replayed, "+number(r.Failed)+" failed again.")
		}
	}
	if len(sentences) == 0 {
		last := p.Runs[0]
		sentences = append(sentences, "No active run. The last run, by "+last.Actor+" "+ago(last.CreatedAt)+", recovered "+
			number(last.Succeeded)+" of "+number(last.Total)+".")
	}
	return strings.Join(sentences, " ")
}

type runDetail struct {
	replayRun

	Why      string // why the viewer cannot control the run; "" if the viewer can
	Failures []runFailure
	More     bool // more than runFailures entries failed
	Tabs     []tab
	Entries  []replay.RunEntry
	Letters  map[uuid.UUID]*deadletter.Summary // dead letters of the Entries that have no Detail, for their errors
	Next     string
	Outcome  string
	Before   *replayRun
	Same     bool              // whether Before has the same filter
	Report   *replay.RunReport // report at the time when the page was opened
	Since    *api.Count
	SinceURL string
	Copies   []copyText
}

// tab selects which entries the list shows.
type tab struct {
	Name, To string
	Count    int64
	Current  bool
}

// runFailure is a reason why entries of a run failed again.
type runFailure struct {
	Text, Fingerprint, Queue string
	Entries                  int64
}

func (c *Console) replayRun(in *request) (*view, error) {
	input, id := api.RunInput{ID: in.PathValue("id")}, url.PathEscape(in.PathValue("id"))
	shown, err := call(in, api.GetReplay, input)
	if err != nil {
		return nil, err
	}
	r := &runDetail{
		replayRun: replayRun{shown}, Why: missingRole(in.me(), access.Operator), Outcome: in.URL.Query().Get("outcome"),
	}
	if r.Failed > 0 {
		failed, err := call(in, api.ListReplayEntries, api.RunEntriesInput{
			RunInput: input, Outcome: "failed", Limit: runFailures,
		})
		if err != nil {
			return nil, err
		}
		r.Failures, r.More = reasons(failed.Entries), failed.Next != ""
	}
	page, err := call(in, api.ListReplayEntries, api.RunEntriesInput{
		RunInput: input, Outcome: r.Outcome, Cursor: in.URL.Query().Get("cursor"), Limit: runPage,
	})
	if err != nil {
		return nil, err
	}
	r.Entries = page.Entries
	var unexplained []string
	for i := range r.Entries {
		if e := &r.Entries[i]; e.Detail == "" && e.Outcome != "succeeded" && e.Status != "" {
			unexplained = append(unexplained, e.ID.String())
		}
	}
	r.Letters = in.summaries(unexplained)
	if page.Next != "" {
		r.Next = "/replays/" + id + "?" + url.Values{"outcome": {r.Outcome}, "cursor": {page.Next}}.Encode() + "#entries"
	}
	for _, t := range []tab{
		{Name: "all", Count: r.Total},
		{Name: "failed", Count: r.Failed},
		{Name: "skipped", Count: r.Skipped},
		{Name: "succeeded", Count: r.Succeeded},
		{Name: "to_go", Count: r.ToGo()},
	} {
		t.To = "/replays/" + id + "?outcome=" + t.Name + "#entries"
		if t.Name == "all" {
			t.To = "/replays/" + id + "#entries"
		}
		t.Current = t.Name == cmp.Or(r.Outcome, "all")
		t.Name = map[string]string{"succeeded": "recovered", "failed": "failed again", "to_go": "remaining"}[t.Name] +
			map[bool]string{true: t.Name}[t.Name == "all" || t.Name == "skipped"]
		r.Tabs = append(r.Tabs, t)
	}
	if _, live := isLive(in.Context()); !live { // the comparison does not change while the page is open
		if err := r.compare(in); err != nil {
			return nil, err
		}
		if r.Report, err = call(in, api.GetReplayReport, input); err != nil {
			return nil, err
		}
	}
	run := r.ID.String()
	r.Copies = copies("dlqd replays show "+run, "SELECT "+runColumns+" FROM dlq.replay_runs WHERE id = '"+run+
		"'; SELECT entry_id, job_id, outcome, ended_at FROM dlq.replay_run_entries WHERE run_id = '"+run+"';",
		in.curl(address(api.GetReplay, input), address(api.ListReplayEntries, api.RunEntriesInput{RunInput: input})))
	every := idleRunInterval
	if r.Status == "running" {
		every = activeRunInterval
	}
	return &view{Template: "replay", Title: "Replay " + short(r.ID), Data: r, Interval: every}, nil
}

// Closures returns the reasons of a group's outcomes as sentences.
func (r *runDetail) Closures(g replay.RunGroupReport) []string {
	list := make([]string, len(g.Reasons))
	for i, why := range g.Reasons {
		word := map[string]string{
			"failed_new": "failed in a new way, in group ", "skipped": "skipped: ", "taken_over": "taken over by ",
			"expired": "expired by ", "failed": "failed: ",
		}[why.Closure]
		list[i] = number(why.Entries) + " " + word + why.What
	}
	return list
}

// reasons groups failures by fingerprint and queue, most frequent first.
func reasons(entries []replay.RunEntry) []runFailure {
	var list []runFailure
	for i := range entries {
		e := &entries[i]
		at := slices.IndexFunc(list, func(f runFailure) bool { return f.Fingerprint == e.Fingerprint && f.Queue == e.Queue })
		if at < 0 {
			at = len(list)
			list = append(list, runFailure{
				Text: cmp.Or(firstLine(e.Detail), "error hidden from your role"), Fingerprint: e.Fingerprint, Queue: e.Queue,
			})
		}
		list[at].Entries++
	}
	slices.SortStableFunc(list, func(a, b runFailure) int { return cmp.Compare(b.Entries, a.Entries) })
	return list
}

// compare finds the previous run, preferably one with the same filter. It also counts the entries that match the filter
// and were captured after this run started.
func (r *runDetail) compare(in *request) error {
	runs, err := in.runs()
	if err != nil {
		return err
	}
	for i := range runs {
		if !runs[i].CreatedAt.Before(r.CreatedAt) {
			continue
		}
		same := bytes.Equal(runs[i].Filter, r.Filter)
		if r.Before == nil || same {
			r.Before, r.Same = &runs[i], same
		}
		if same {
			break
		}
	}
	chosen, err := filter.FromJSON(r.Filter)
	if err != nil || chosen.IDs != nil || bytes.Contains(r.Filter, []byte(`"***"`)) ||
		r.Why != "" {
		return nil //nolint:nilerr // no later entry can match the filter, or the viewer may not count them
	}
	chosen.After = r.CreatedAt.Format(time.RFC3339Nano)
	page, err := call(in, api.ListEntries, api.ListInput{Q: chosen.Print(), CountOnly: true})
	if err != nil {
		return nil //nolint:nilerr // the page omits the comparison
	}
	r.Since, r.SinceURL = page.Count, "/dead-letters?"+url.Values{"q": {chosen.Print()}}.Encode()
	return nil
}

// controlRun pauses, resumes or cancels a run, changes its rate, or continues or ends groups of a progressive run.
func (c *Console) controlRun(in *request) (*done, error) {
	id := in.PathValue("id")
	to, verb := "/replays/"+url.PathEscape(id), in.PostFormValue("do")
	input := api.RunInput{ID: id}
	text := map[string]string{
		"pause": "Paused. Redeliveries under way continue.", "resume": "Resumed.",
		"cancel": "Cancelled. Redeliveries under way continue.", "rate": "Rate changed.",
		"go-on": "The group continues.", "back": "The group continues with a smaller step.",
		"end": "Ended. The other dead letters are skipped.",
	}[verb]
	if text == "" {
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action",
			Detail: "choose pause, resume, cancel, rate, go-on, back or end",
		}
	}
	switch verb {
	case "go-on", "back", "end":
		action := &api.RunGroupsAction{Action: api.Action{Note: in.PostFormValue("note")}}
		if text := in.PostFormValue("group"); text != "" {
			number, err := strconv.ParseInt(text, 10, 32)
			if err != nil {
				return nil, &api.Problem{Status: http.StatusUnprocessableEntity, Detail: text + " is not the number of a group"}
			}
			action.Groups = []int32{int32(number)}
		}
		if _, err := call(in, api.SteerReplay(verb), api.RunGroupsInput{RunInput: input, Body: action}); err != nil {
			return nil, err
		}
	case "rate":
		perSecond, ok := parsedNumber(cmp.Or(strings.TrimSpace(in.PostFormValue("rate")), "0"))
		if !ok {
			return nil, &api.Problem{
				Status: http.StatusUnprocessableEntity, Title: "Invalid rate",
				Detail: "the rate must be a number of entries per second, or empty for no limit",
			}
		}
		rate := api.RateInput{RunInput: input, Body: api.RateAction{Rate: perSecond}}
		if _, err := call(in, api.SetReplayRate, rate); err != nil {
			return nil, err
		}
	default:
		if _, err := call(in, api.ControlReplay(verb), api.RunActionInput{RunInput: input}); err != nil {
			return nil, err
		}
	}
	return &done{To: to, Flash: flash{Text: text}}, nil
}
