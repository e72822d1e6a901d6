package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/replay"
)

// followEvery is the time between two requests for the progress of a run that a command follows.
const followEvery = 300 * time.Millisecond

// filterFlags are the flags that select dead letters.
type filterFlags struct {
	api.EntryFilter

	payload                    string
	minRetryCount, maxRetryMax int
}

func (f *filterFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.Status, "status", nil, "only these states")
	flags.StringSliceVar(&f.Queue, "queue", nil, "only these queues")
	flags.StringSliceVar(&f.Kind, "kind", nil, "only these kinds; * matches any text")
	flags.StringSliceVar(&f.ErrorType, "error-type", nil, "only these error types")
	flags.StringSliceVar(&f.ErrorClass, "error-class", nil, "only these error classes")
	flags.StringSliceVar(&f.ErrorCode, "error-code", nil, "only these error codes")
	flags.StringSliceVar(&f.Destination, "destination", nil, "only failures at these destinations")
	flags.StringSliceVar(&f.Fingerprint, "fingerprint", nil, "only these failure groups")
	flags.StringSliceVar(&f.Source, "source", nil, "only these sources")
	flags.StringSliceVar(&f.SubscriberID, "subscriber", nil, "only these subscribers")
	flags.StringSliceVar(&f.Tags, "tag", nil, "only entries with all these tags")
	flags.StringSliceVar(&f.IDs, "id", nil, "only these entries")
	flags.StringVar(&f.After, "start-date", "", "only captured at or after this time, such as 2026-11-21 or "+
		"2026-11-21T08:00:00Z")
	flags.StringVar(&f.Before, "end-date", "", "only captured before this time")
	flags.StringVar(&f.MaxAge, "max-age", "", "only captured within this time, such as \"2 days\"")
	flags.IntVar(&f.minRetryCount, "min-retry-count", -1, "only entries with at least this many redeliveries")
	flags.IntVar(&f.maxRetryMax, "max-retry-count", -1, "only entries with at most this many redeliveries")
	flags.StringVar(&f.payload, "payload-contains", "", "only entries whose payload contains this JSON")
}

// isID reports whether the only argument is the id of a dead letter. If the argument is not an id and contains neither
// : nor ", isID returns an error: the argument may be a mistyped id, and a text search for it would select entries with
// that text in their error.
func isID(args []string) (bool, error) {
	if len(args) != 1 {
		return false, nil
	}
	if _, err := uuid.Parse(args[0]); err == nil {
		return true, nil
	}
	if !strings.ContainsAny(args[0], `:"`) {
		return false, &usageError{fmt.Errorf(
			`%s: neither the id of a dead letter nor a filter such as 'status:manual queue:payments'; to search error texts, quote it: "%s"`,
			args[0], args[0])}
	}
	return false, nil
}

// checkID rejects an argument that is not an id.
func checkID(id string) error {
	if _, err := uuid.Parse(id); err != nil {
		return &usageError{fmt.Errorf("%s is not the id of a dead letter, such as %s; \"dlqd list\" prints ids",
			id, exampleID)}
	}
	return nil
}

// filterText joins the arguments into a filter and checks the filter's syntax.
func filterText(args []string) (string, error) {
	text := strings.Join(args, " ")
	if _, err := filter.Parse(text, "me"); err != nil { // "me" is a placeholder: the API knows the user
		return "", &usageError{err}
	}
	return text, nil
}

// filter returns the filter that the flags and the arguments make.
func (f *filterFlags) filter(args []string) (api.EntryFilter, error) {
	out := f.EntryFilter
	var err error
	if out.Q, err = filterText(args); err != nil {
		return out, err
	}
	for _, date := range []*string{&out.After, &out.Before} {
		if at, err := time.Parse(time.DateOnly, *date); err == nil {
			*date = at.UTC().Format(time.RFC3339)
		}
	}
	if f.minRetryCount >= 0 {
		out.MinRetryCount = &f.minRetryCount
	}
	if f.maxRetryMax >= 0 {
		out.MaxRetryCount = &f.maxRetryMax
	}
	if f.payload != "" {
		if out.Payload, err = jsonFlag("payload-contains", f.payload); err != nil {
			return out, err
		}
	}
	return out, nil
}

// requiredFilter returns the filter that the flags and the arguments make. An empty filter is an error unless all, the
// flag --all, is set.
func (f *filterFlags) requiredFilter(args []string, all bool) (api.EntryFilter, error) {
	out, err := f.filter(args)
	if err == nil && !all && reflect.ValueOf(out).IsZero() {
		err = &usageError{errors.New("the filter is empty: give a filter (see --help), or --all for every entry")}
	}
	return out, err
}

// jsonFlag returns the JSON value of a flag as the user typed it. An invalid value is a usage error.
func jsonFlag(name, value string) (json.RawMessage, error) {
	var raw json.RawMessage
	if err := json.Unmarshal([]byte(value), &raw); err != nil {
		return nil, &usageError{fmt.Errorf("--%s: %s is not valid JSON", name, shorten(value, 80))}
	}
	return raw, nil
}

func newReplay() *cobra.Command { //nolint:gocognit // flags, one after the other
	var c client
	var many api.ReplayRequest
	var filter filterFlags
	var payload, patch, mergePatch string
	var detach, newest, resume, fromStart, allAtOnce, skipStale, skipDone bool
	var deadline time.Duration
	cmd := &cobra.Command{
		Use:   "replay [ID | FILTER]",
		Short: "Redeliver a dead letter now, or all that match a filter",
		Long: "With an ID, replay redelivers that dead letter, edited if --payload or a patch is given. Without an ID, it " +
			"starts\n" +
			"a replay run in the server over the dead letters that the filter and the flags select, and shows its progress.\n" +
			"The run continues if this command ends. --dry-run only shows what replay would do. An empty filter needs --all.",
		Example: "  dlqd replay 'status:manual queue:payments class:outage age:<2d' --dry-run",
		RunE: func(cmd *cobra.Command, args []string) error {
			if patch != "" {
				if err := json.Unmarshal([]byte(patch), &many.Patch); err != nil {
					return &usageError{errors.New("--patch: must be a JSON Patch (RFC 6902), such as " +
						`[{"op": "remove", "path": "/note"}]`)}
				}
			}
			one, err := isID(args)
			if err != nil {
				return err
			}
			if mergePatch != "" {
				if many.MergePatch, err = jsonFlag("merge-patch", mergePatch); err != nil {
					return err
				}
			}
			if resume {
				if err := rejectFlags(cmd, "with --resume", "from-start"); err != nil {
					return err
				}
			}
			many.Checkpoint = checkpointMode(resume, fromStart)
			many.Actor = actor()
			if one {
				if err := allowOnlyFlags(cmd, "with an ID", "note", "force", "other-groups", "payload", "patch", "merge-patch",
					"to-destination",
					"resume", "from-start", "dry-run"); err != nil {
					return err
				}
				var replacement json.RawMessage
				if payload != "" {
					if err := rejectFlags(cmd, "with --payload", "patch", "merge-patch"); err != nil {
						return err
					}
					if replacement, err = jsonFlag("payload", payload); err != nil {
						return err
					}
				}
				if many.DryRun {
					return c.previewOne(cmd, args[0], replacement, &many)
				}
				return c.replayOne(cmd, args[0], replacement, &many)
			}
			if err := rejectFlags(cmd, "without an ID", "payload"); err != nil {
				return err
			}
			if many.Filter, err = filter.requiredFilter(args, many.All); err != nil {
				return err
			}
			if newest {
				many.Order = "newest"
			}
			if allAtOnce {
				if err := rejectFlags(cmd, "with --all-at-once", "progressive"); err != nil {
					return err
				}
			}
			if cmd.Flags().Changed("skip-stale") {
				many.SkipStale = &skipStale
			}
			if cmd.Flags().Changed("skip-superseded") {
				many.SkipDone = &skipDone
			}
			if cmd.Flags().Changed("step-deadline") {
				many.Deadline = deadline.Seconds()
			}
			if !cmd.Flags().Changed("progressive") && !allAtOnce && !many.DryRun && !c.asJSON && !detach &&
				terminalWidth(cmd.OutOrStdout()) > 0 {
				if many.Progressive, err = c.isLarge(cmd, many); err != nil {
					return err
				}
			}
			input := api.StartReplayInput{Body: many}
			answer, err := callConfirmed(cmd, &c, api.StartReplay, &input, &input.Body.Expect)
			if err != nil || c.asJSON {
				return err
			}
			if answer.Preview != nil && answer.Preview.Total == 0 || answer.Run != nil && answer.Run.Total == 0 {
				c.noteUnknownQueues(cmd, many.Filter.Q, many.Filter.Queue...)
			}
			if answer.Preview != nil {
				return printPreview(cmd, answer.Preview)
			}
			how := ""
			if answer.Run.Progressive {
				how = fmt.Sprintf(", in steps, in %d failure groups", len(answer.Run.Groups))
			}
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "replay run %s: %d dead letters%s%s\n", answer.Run.ID, answer.Run.Total,
				toDestination(many.Destination), how)
			if detach {
				return nil
			}
			return c.follow(cmd, answer.Run)
		},
	}
	c.register(cmd)
	filter.register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&many.Note, "note", "", "reason")
	flags.BoolVar(&many.Force, "force", false, "replay even if an equal job is live or the destination is failing")
	flags.BoolVar(&many.OtherGroups, "other-groups", false, "publish records even if consumer groups that did not fail "+
		"read their topics, or may")
	flags.StringVar(&payload, "payload", "", "with an ID: JSON to send instead of the payload; dlqd keeps the original")
	flags.BoolVar(&many.All, "all", false, "select every dead letter that can be replayed")
	flags.BoolVar(&many.DryRun, "dry-run", false, "only show what replay would do")
	registerExpect(cmd, &many.Expect)
	flags.IntVar(&many.BatchSize, "batch-size", 100, "entries per transaction")
	flags.Float64Var(&many.Rate, "rate", 0, "entries per second; 0 for no limit")
	flags.IntVar(&many.Concurrency, "concurrency", 0, "maximum number of redeliveries in progress; 0 for no limit")
	flags.StringVar(&patch, "patch", "", "JSON Patch (RFC 6902) for each payload")
	flags.StringVar(&mergePatch, "merge-patch", "", "JSON Merge Patch (RFC 7396) for each payload")
	flags.StringVar(&many.Queue, "to-queue", "", "redeliver in this queue instead of the original one")
	flags.StringVar(&many.Destination, "to-destination", "", "deliver messages to this destination instead of their "+
		"queue's")
	flags.BoolVar(&resume, "resume", false, "with an edited payload: resumable jobs continue after their last "+
		"completed step")
	flags.BoolVar(&fromStart, "from-start", false, "resumable jobs run all their steps again")
	flags.BoolVar(&newest, "newest-first", false, "replay the newest entries first (default: oldest first)")
	flags.Float64Var(&many.StopAt, "stop-at", replay.DefaultStopAt, "percentage of failures among the last 50 "+
		"redeliveries that stops the run")
	flags.BoolVar(&many.Progressive, "progressive", false, "send each failure group in steps, and hold it if it does not "+
		"recover (default at a terminal above 100 dead letters)")
	flags.BoolVar(&allAtOnce, "all-at-once", false, "send all dead letters without steps")
	flags.DurationVar(&deadline, "step-deadline", replay.DefaultStepDeadline, "with --progressive: hold a group without "+
		"an outcome for this time")
	flags.BoolVar(&skipStale, "skip-stale", false, "skip dead letters whose work is out of date (default: as the policy "+
		"says)")
	flags.BoolVar(&skipDone, "skip-superseded", false, "skip dead letters whose work a later job has done (default: as "+
		"the policy says)")
	flags.BoolVar(&detach, "detach", false, "start the run without following it")
	return cmd
}

// isLarge asks the API whether a run of the request would replay more than replay.ProgressiveAbove dead letters.
func (c *client) isLarge(cmd *cobra.Command, request api.ReplayRequest) (bool, error) {
	request.DryRun = true
	answer, err := call(cmd, c, api.StartReplay, api.StartReplayInput{Body: request})
	if err != nil {
		return false, err
	}
	return answer.Preview != nil && answer.Preview.Total > replay.ProgressiveAbove, nil
}

// checkpointMode returns the API's value for --resume and --from-start. Without either flag, it returns "".
func checkpointMode(resume, fromStart bool) string {
	switch {
	case resume:
		return deadletter.Resume
	case fromStart:
		return deadletter.Discard
	}
	return ""
}

// replayOne replays one dead letter. A payload that is not nil replaces the dead letter's payload.
func (c *client) replayOne(cmd *cobra.Command, id string, payload json.RawMessage, in *api.ReplayRequest) error {
	replayed, err := call(cmd, c, api.ReplayEntry, api.ReplayEntryInput{
		EntryInput: api.EntryInput{ID: id}, Body: &api.ReplayAction{
			Action: in.Action, Payload: payload, Patch: in.Patch, MergePatch: in.MergePatch,
			Destination: in.Destination, Checkpoint: in.Checkpoint, Force: in.Force, OtherGroups: in.OtherGroups,
		},
	})
	if err != nil || c.asJSON {
		return err
	}
	printSafef(cmd.OutOrStdout(), "%s is %s, with job %d\n", replayed.ID, replayed.Status, replayed.JobID)
	printChanges(cmd.OutOrStdout(), replayed.Changes)
	if replayed.Warning != "" {
		printSafef(cmd.ErrOrStderr(), "%s\n", replayed.Warning)
	}
	return nil
}

// previewOne previews the replay of one dead letter as a run of this entry. If payload is not nil, the run has a patch
// that replaces the entry's payload.
func (c *client) previewOne(cmd *cobra.Command, id string, payload json.RawMessage, in *api.ReplayRequest) error {
	in.Filter.IDs = []string{id}
	if payload != nil {
		in.Patch = []json.RawMessage{replay.Replacement(payload)}
	}
	answer, err := call(cmd, c, api.StartReplay, api.StartReplayInput{Body: *in})
	if err != nil || c.asJSON {
		return err
	}
	if answer.Preview == nil {
		return errors.New("the API's response has no preview")
	}
	return printPreview(cmd, answer.Preview)
}

func printPreview(cmd *cobra.Command, p *replay.Preview) error {
	out, words := cmd.OutOrStdout(), replay.PlainWords()
	_, _ = fmt.Fprintf(out, "%d dead letters would be replayed%s%s; nothing was changed\n", p.Total,
		toDestination(p.Destination), durationText(p))
	for _, problem := range p.Unhealthy {
		printSafef(out, "unhealthy: %s (--force replays anyway)\n", problem)
	}
	for i := range p.Readers {
		if refusal := p.Readers[i].Refusal; refusal != "" {
			printSafef(out, "refused: %s (--other-groups replays anyway)\n", refusal)
		}
	}
	if p.Approval != "" {
		printSafef(out, "approval: it %s\n", p.Approval)
	}
	skipped := map[string]int64{}
	for _, e := range p.Estimates {
		skipped[e.What] = e.Entries
	}
	for _, e := range p.Estimates {
		hint := map[string]string{
			"stale": " (--skip-stale skips them)", "superseded": " (--skip-superseded skips them)",
		}[e.What]
		if e.Entries > 0 && skipped["skipped_"+e.What] == e.Entries { // the request or the policy skips them already
			hint = ""
		}
		printSafef(out, "%s%s\n", e.Text(words, p.Total), hint)
	}
	for _, text := range p.Notes(words) {
		printSafef(out, "%s\n", text)
	}
	if p.Checkpoints > 0 {
		printSafef(out, "%d have a checkpoint: their jobs completed some steps; --resume continues after these, "+
			"--from-start runs all again\n",
			p.Checkpoints)
	}
	printSplit(cmd, "error type", p.ByErrorType)
	printSplit(cmd, "queue", p.ByQueue)
	printSplit(cmd, "age", p.ByAge)
	for _, s := range p.Samples {
		_, _ = fmt.Fprintf(out, "sample %s\n", s.ID)
		switch {
		case s.Problem != "":
			printSafef(out, "  the patch does not apply: %s\n", s.Problem)
		case s.Patched != nil:
			printChanges(out, s.Changes)
		}
		if s.Checkpoint != nil {
			printSafef(out, "  %s\n", s.Checkpoint)
		}
	}
	return nil
}

func toDestination(name string) string {
	if name == "" {
		return ""
	}
	return ", to destination " + name
}

func durationText(p *replay.Preview) string {
	switch duration := time.Duration(p.Seconds * float64(time.Second)); {
	case p.Total == 0:
		return ""
	case duration < time.Second:
		return ", in less than a second"
	default:
		return ", in about " + duration.Round(time.Second).String()
	}
}

// printChanges prints the changes of an edit.
func printChanges(out io.Writer, changes []replay.Change) {
	for _, c := range changes {
		path := cmp.Or(c.Path, "(all)")
		switch c.Op {
		case "add":
			printSafef(out, "  add %s: %s\n", path, c.Value)
		case "remove":
			printSafef(out, "  remove %s: %s\n", path, c.Was)
		default:
			printSafef(out, "  replace %s: %s -> %s\n", path, c.Was, c.Value)
		}
	}
}

// follow waits until a run ends, and prints the run's result. If standard error is a terminal, follow shows a progress
// bar meanwhile. If the user interrupts the command, the run continues, and follow prints the command with which to
// follow the run again.
func (c *client) follow(cmd *cobra.Command, run *replay.Run) error {
	show, end := func() {}, func() {}
	if info, err := os.Stderr.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		show, end = progressBar(cmd, run)
	}
	for run.Status == "running" {
		select {
		case <-cmd.Context().Done():
			end()
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "the run continues; follow it with: dlqd replays follow %s\n", run.ID)
			return nil
		case <-time.After(followEvery):
		}
		next, err := call(cmd, c, api.GetReplay, api.RunInput{ID: run.ID.String()})
		if err != nil {
			end()
			return err
		}
		*run = *next
		show()
	}
	end()
	return printRun(cmd, run)
}

func progressBar(cmd *cobra.Command, run *replay.Run) (show, end func()) {
	var mu sync.Mutex // guards line: bars draws line in another goroutine
	var line string
	bars := mpb.New(mpb.WithOutput(cmd.ErrOrStderr()), mpb.WithAutoRefresh(), mpb.WithWidth(60))
	total := max(run.Total, 1)
	bar := bars.AddBar(total, mpb.PrependDecorators(decor.CountersNoUnit("%d / %d")),
		mpb.AppendDecorators(decor.Any(func(decor.Statistics) string {
			mu.Lock()
			defer mu.Unlock()
			return line
		})))
	show = func() {
		mu.Lock()
		line = fmt.Sprintf(" %s%s  %d ok, %d failed, %d skipped", perSecond(run), timeLeft(run), run.Succeeded,
			run.Failed, run.Skipped)
		mu.Unlock()
		bar.SetCurrent(min(run.Replayed+run.Skipped, total-1)) // fill the bar only when the run has ended
	}
	end = func() {
		if run.Status == "completed" {
			bar.SetCurrent(total)
		} else {
			bar.Abort(false)
		}
		bars.Wait()
	}
	return show, end
}

// perSecond formats the rate of a run. Below 10 a second, it prints two significant digits, else no decimals.
func perSecond(run *replay.Run) string {
	if run.PerSecond < 10 {
		return fmt.Sprintf("%.2g/s", run.PerSecond)
	}
	return fmt.Sprintf("%.0f/s", run.PerSecond)
}

// timeLeft formats the estimated time until a run ends, or returns "" if the estimate is missing or the run has ended.
func timeLeft(run *replay.Run) string {
	if run.SecondsLeft == 0 {
		return ""
	}
	return ", about " + max(time.Duration(run.SecondsLeft*float64(time.Second)).Round(time.Second),
		time.Second).String() + " left"
}

func printRun(cmd *cobra.Command, run *replay.Run) error {
	reason := ""
	if run.Reason != "" {
		reason = " (" + run.Reason + ")"
	}
	if run.Held {
		reason = " (held because the database was restored: see dlqd restored)"
	}
	printSafef(cmd.OutOrStdout(), "%s: %d replayed, %d succeeded, %d failed, %d skipped of %d, %s%s%s\n",
		run.Status, run.Replayed, run.Succeeded, run.Failed, run.Skipped, run.Total, perSecond(run), timeLeft(run), reason)
	if run.Forecast != nil && run.Forecast.Expect != nil && run.Forecast.Expect.Tried > 0 {
		printSafef(cmd.OutOrStdout(), "forecast: %s\n", run.Forecast.Expect.Summary(replay.PlainWords()))
	}
	if run.Forecast != nil {
		for _, change := range run.Forecast.Changes {
			printSafef(cmd.OutOrStdout(), "since the request: %s\n", change)
		}
	}
	for _, text := range replay.SkipTexts(run.Skips, nil, nil) {
		printSafef(cmd.OutOrStdout(), "%s\n", text)
	}
	if text := replay.KeyedText(run.KeyedJobs, replay.PlainWords()); text != "" {
		printSafef(cmd.OutOrStdout(), "%s\n", text)
	}
	if run.NotKnown > 0 {
		printSafef(cmd.OutOrStdout(), "%d were sent although it is not known whether a later job has done their work\n",
			run.NotKnown)
	}
	if len(run.Groups) == 0 {
		return nil
	}
	w, row := table(cmd, "GROUP\tSTATE\tSENT\tOK\tFAILED\tQUEUE\tERROR TYPE\tFAILURE GROUP\tLAST DECISION")
	for i := range run.Groups {
		g := &run.Groups[i]
		row(g.Number, g.State, fmt.Sprintf("%d of %d", g.Sent, g.Entries), g.Succeeded, g.Failed, cmp.Or(g.Queue, "(others)"),
			cmp.Or(g.ErrorType, "-"), cmp.Or(g.Fingerprint, "-"), cmp.Or(g.Reason, "-"))
	}
	return w.Flush()
}

// report prints the number of a run's dead letters with each outcome, and the cost of the run.
func (c *client) report(cmd *cobra.Command, id string) error {
	report, err := call(cmd, c, api.GetReplayReport, api.RunInput{ID: id})
	if err != nil || c.asJSON {
		return err
	}
	complete := "each has an outcome"
	if !report.Complete {
		complete = fmt.Sprintf("%d are under way, and %d are not sent", report.Counts.InProgress, report.Counts.ToGo)
	}
	_, _ = fmt.Fprintf(cmd.OutOrStdout(), "of %d dead letters, %d recovered, %d failed the same way, %d in a new way, "+
		"%d in an unknown way; %d were skipped, %d taken over by a person, %d expired; %s\n", report.Entries,
		report.Counts.Recovered, report.Counts.FailedSame, report.Counts.FailedNew, report.Counts.Failed,
		report.Counts.Skipped, report.Counts.TakenOver, report.Counts.Expired, complete)
	printSafef(cmd.OutOrStdout(), "it cost %d redeliveries, which ran for %s\n", report.Requests,
		time.Duration(report.Worked*float64(time.Second)).Round(time.Millisecond))
	for _, figure := range report.Figures {
		printSafef(cmd.OutOrStdout(), "%s\n", figure.Text())
	}
	w, row := table(cmd, "FAILURE GROUP\tENTRIES\tRECOVERED\tSAME\tNEW\tUNKNOWN\tSKIPPED\tTAKEN\tEXPIRED\tUNDER WAY"+
		"\tMEDIAN\tWORKED\tQUEUE")
	for i := range report.Groups {
		g := &report.Groups[i]
		row(cmp.Or(g.Fingerprint, "-"), g.Entries, g.Recovered, g.FailedSame, g.FailedNew, g.Failed, g.Skipped, g.TakenOver,
			g.Expired, underWay(g), seconds(g.Median), seconds(g.Worked), cmp.Or(g.Queue, "-"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i := range report.Groups {
		for _, why := range report.Groups[i].Reasons {
			printSafef(cmd.OutOrStdout(), "%s: %d %s: %s\n", cmp.Or(report.Groups[i].Fingerprint, "-"), why.Entries,
				closureWords(why.Closure), why.What)
		}
	}
	return nil
}

// underWay formats the number of a group's redeliveries that are under way, and the time at which the oldest was sent.
func underWay(g *replay.RunGroupReport) string {
	if g.Since == nil {
		return "0"
	}
	return fmt.Sprintf("%d since %s", g.InProgress, g.Since.UTC().Format(time.RFC3339))
}

// seconds formats a number of seconds, and 0 as "-".
func seconds(s float64) string {
	if s == 0 {
		return "-"
	}
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
}

// closureWords returns an outcome of dead letters in words.
func closureWords(closure string) string {
	words := map[string]string{
		"failed_same": "failed the same way", "failed_new": "failed in a new way", "failed": "failed",
		"taken_over": "taken over by", "expired": "expired by", "in_progress": "under way", "to_go": "not sent",
		"absent": "not in the run",
	}
	return cmp.Or(words[closure], closure)
}

func newDiff() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "diff BEFORE AFTER", Short: "Compare what became of the dead letters of two replay runs",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			diff, err := call(cmd, &c, api.DiffReplays, api.RunsInput{RunInput: api.RunInput{ID: args[0]}, Other: args[1]})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ENTRIES\tBEFORE\tAFTER\tFAILURE GROUP")
			for _, change := range diff.Changes {
				row(change.Entries, closureWords(change.Before), closureWords(change.After), cmp.Or(change.Fingerprint, "-"))
			}
			return w.Flush()
		},
	}
	c.register(cmd)
	return cmd
}

func newCalibration() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "calibration", Short: "Show how often the forecasts of ended replay runs were right", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.GetReplayCalibration, api.None{})
			if err != nil || c.asJSON {
				return err
			}
			return printCalibration(cmd, out)
		},
	}
	c.register(cmd)
	return cmd
}

func printCalibration(cmd *cobra.Command, c *replay.Calibration) error {
	_, _ = fmt.Fprintln(cmd.OutOrStdout(), cmp.Or(c.Text(replay.PlainWords()),
		"no forecast of an ended replay run can be judged yet"))
	if unjudged := c.Groups - c.Judged; unjudged > 0 {
		_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d are not judged, because some of their dead letters were not redelivered\n",
			unjudged)
	}
	if len(c.Figures) > 0 {
		w, row := table(cmd, "FIGURE\tRUNS\tHELD\tFORECAST\tACTUAL\tMEAN DIFFERENCE")
		for _, f := range c.Figures {
			row(f.What, f.Runs, f.Held, f.Forecast, f.Actual, f.Off)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(c.Latest) == 0 {
		return nil
	}
	w, row := table(cmd, "RUN\tFAILURE GROUP\tENTRIES\tEXPECTED\tINTERVAL\tRECOVERED\tHELD\tQUEUE")
	for i := range c.Latest {
		g := &c.Latest[i]
		held := "-"
		if g.Judged {
			held = map[bool]string{true: "yes", false: "no"}[g.Held]
		}
		row(g.Run, g.Fingerprint, g.Entries, g.Expected, fmt.Sprintf("%d to %d", g.Low, g.High), g.Recovered, held, g.Queue)
	}
	return w.Flush()
}

// newSteer returns a command that changes groups of a progressive run. Without --group, the API changes all groups that
// are held or stopped.
func newSteer(verb, short string) *cobra.Command {
	var c client
	var note string
	var groups []int32
	cmd := &cobra.Command{
		Use: verb + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			run, err := call(cmd, &c, api.SteerReplay(verb), api.RunGroupsInput{
				RunInput: api.RunInput{ID: args[0]},
				Body:     &api.RunGroupsAction{Action: api.Action{Actor: actor(), Note: note}, Groups: groups},
			})
			if err != nil || c.asJSON {
				return err
			}
			return printRun(cmd, run)
		},
	}
	c.register(cmd)
	cmd.Flags().Int32SliceVar(&groups, "group", nil, "numbers of the groups (default: all that are held or stopped)")
	cmd.Flags().StringVar(&note, "note", "", "reason")
	return cmd
}

func newReplays() *cobra.Command {
	cmd := &cobra.Command{Use: "replays", Short: "List replay runs; follow, pause and cancel them", Args: cobra.NoArgs}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List the newest replay runs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListReplays, api.None{})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ID\tSTATUS\tREPLAYED\tOK\tFAILED\tSKIPPED\tBY\tNOTE")
			for _, r := range out.Runs {
				if r.Held {
					r.Status = "held"
				}
				row(r.ID, r.Status, fmt.Sprintf("%d of %d", r.Replayed, r.Total), r.Succeeded, r.Failed, r.Skipped,
					r.Actor, text(r.Note))
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, list, &c, "runs", "id")
	for _, verb := range []struct{ name, short string }{
		{"show", "Show the progress of a replay run, and what became of its dead letters"},
		{"follow", "Follow a replay run until it ends"},
		{"pause", "Pause a replay run"},
		{"resume", "Resume a paused replay run"},
		{"cancel", "Cancel a replay run"},
	} {
		var c client
		var onlyReport bool
		sub := &cobra.Command{
			Use: verb.name + " ID", Short: verb.short, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				if onlyReport {
					return c.report(cmd, args[0])
				}
				var run *replay.Run
				var err error
				if in := (api.RunInput{ID: args[0]}); verb.name == "show" || verb.name == "follow" {
					run, err = call(cmd, &c, api.GetReplay, in)
				} else {
					run, err = call(cmd, &c, api.ControlReplay(verb.name), api.RunActionInput{
						RunInput: in, Body: &api.Action{Actor: actor()},
					})
				}
				if err != nil || c.asJSON {
					return err
				}
				if verb.name == "follow" {
					return c.follow(cmd, run)
				}
				if err := printRun(cmd, run); err != nil || verb.name != "show" {
					return err
				}
				return c.report(cmd, args[0])
			},
		}
		c.register(sub)
		if verb.name == "show" {
			sub.Flags().BoolVar(&onlyReport, "report", false, "show only what became of the dead letters")
		}
		cmd.AddCommand(sub)
	}
	cmd.AddCommand(newDiff(), newCalibration())
	cmd.AddCommand(newSteer("go-on", "Continue groups of a progressive run that are held or stopped"),
		newSteer("back", "Continue groups of a progressive run with a step as large as the previous one"),
		newSteer("end", "End groups of a progressive run; their remaining dead letters are skipped"))
	var rateClient client
	var perSecond float64
	rate := &cobra.Command{
		Use: "rate ID", Short: "Change the rate of a replay run", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			run, err := call(cmd, &rateClient, api.SetReplayRate, api.RateInput{
				RunInput: api.RunInput{ID: args[0]},
				Body:     api.RateAction{Action: api.Action{Actor: actor()}, Rate: perSecond},
			})
			if err != nil || rateClient.asJSON {
				return err
			}
			return printRun(cmd, run)
		},
	}
	rateClient.register(rate)
	rate.Flags().Float64Var(&perSecond, "per-second", 0, "entries per second; 0 for no limit")
	cmd.AddCommand(rate)
	return cmd
}
