package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
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

// followEvery is the interval at which a command that follows a run polls its progress.
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
	flags.StringSliceVar(&f.Kind, "kind", nil, "only these kinds; * stands for any text")
	flags.StringSliceVar(&f.ErrorType, "error-type", nil, "only these types of error")
	flags.StringSliceVar(&f.ErrorClass, "error-class", nil, "only these classes")
	flags.StringSliceVar(&f.ErrorCode, "error-code", nil, "only these codes")
	flags.StringSliceVar(&f.Destination, "destination", nil, "only what failed at these destinations")
	flags.StringSliceVar(&f.Fingerprint, "fingerprint", nil, "only these failure groups")
	flags.StringSliceVar(&f.Source, "source", nil, "only these sources")
	flags.StringSliceVar(&f.SubscriberID, "subscriber", nil, "only these subscribers")
	flags.StringSliceVar(&f.Tags, "tag", nil, "only with all these tags")
	flags.StringSliceVar(&f.IDs, "id", nil, "only these entries")
	flags.StringVar(&f.After, "start-date", "", "captured at or after: 2026-11-21 or 2026-11-21T08:00:00Z")
	flags.StringVar(&f.Before, "end-date", "", "captured before")
	flags.StringVar(&f.MaxAge, "max-age", "", "captured no longer ago, such as \"2 days\"")
	flags.IntVar(&f.minRetryCount, "min-retry-count", -1, "with so many redeliveries or more")
	flags.IntVar(&f.maxRetryMax, "max-retry-count", -1, "with so many redeliveries or fewer")
	flags.StringVar(&f.payload, "payload-contains", "", "whose payload contains this JSON")
}

// isID reports whether the argument is the id of a dead letter. Anything that is neither an id nor
// a filter is rejected: as a text search, a mistyped id would select entries with that text in
// their error.
func isID(args []string) (bool, error) {
	if len(args) != 1 {
		return false, nil
	}
	if _, err := uuid.Parse(args[0]); err == nil {
		return true, nil
	}
	if !strings.ContainsAny(args[0], `:"`) {
		return false, &usageError{fmt.Errorf(`%s: is neither the id of a dead letter nor a filter, such as 'status:manual queue:payments'; a text of its error is "%s", in quotes`, args[0], args[0])}
	}
	return false, nil
}

// textOf joins the arguments to a filter and checks its syntax.
func textOf(args []string) (string, error) {
	text := strings.Join(args, " ")
	if _, err := filter.Parse(text, "me"); err != nil { // a placeholder: the API knows the user
		return "", &usageError{err}
	}
	return text, nil
}

// filter returns the filter given by the flags and arguments.
func (f *filterFlags) filter(args []string) (api.EntryFilter, error) {
	out := f.EntryFilter
	var err error
	if out.Q, err = textOf(args); err != nil {
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

// chosen returns the filter given by the flags and arguments. An empty filter is an error without
// --all.
func (f *filterFlags) chosen(args []string, all bool) (api.EntryFilter, error) {
	out, err := f.filter(args)
	if err == nil && !all && reflect.ValueOf(out).IsZero() {
		err = &usageError{errors.New("an empty filter chooses every entry: choose some (--help says how), or say so with --all")}
	}
	return out, err
}

// jsonFlag returns the JSON value of a flag as it was typed.
func jsonFlag(name, value string) (json.RawMessage, error) {
	var raw json.RawMessage
	if err := json.Unmarshal([]byte(value), &raw); err != nil {
		return nil, &usageError{fmt.Errorf("--%s: %w", name, err)}
	}
	return raw, nil
}

func newReplay() *cobra.Command { //nolint:gocognit // flags, one after the other
	var c client
	var many api.ReplayRequest
	var chosen filterFlags
	var payload, patch, mergePatch string
	var detach, newest, resume, fromStart bool
	cmd := &cobra.Command{
		Use:   "replay [ID | FILTER]",
		Short: "Redeliver a dead letter now, or every one that a filter chooses",
		Long: "With an ID, replay redelivers that dead letter, edited if --payload or a patch is given. Without one, it starts a replay run in the\n" +
			"server over all that a filter and the flags choose, and follows it; a run goes on when this command ends. --dry-run says first what\n" +
			"it would do. Choosing everything needs --all.",
		Example: "  dlqd replay 'status:manual queue:payments class:outage age:<2d' --dry-run",
		RunE: func(cmd *cobra.Command, args []string) error {
			if patch != "" {
				if err := json.Unmarshal([]byte(patch), &many.Patch); err != nil {
					return &usageError{fmt.Errorf("--patch: %w", err)}
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
			many.Checkpoint = checkpointOf(resume, fromStart)
			many.Actor = actor()
			if one {
				if err := actsOn(cmd, "with an ID", "note", "force", "payload", "patch", "merge-patch", "to-destination", "resume", "from-start", "dry-run", "json", "api-url"); err != nil {
					return err
				}
				var whole json.RawMessage
				if payload != "" {
					if err := ignores(cmd, "with --payload", "patch", "merge-patch"); err != nil {
						return err
					}
					if whole, err = jsonFlag("payload", payload); err != nil {
						return err
					}
				}
				if many.DryRun {
					return c.previewOne(cmd, args[0], whole, &many)
				}
				return c.replayOne(cmd, args[0], whole, &many)
			}
			if err := ignores(cmd, "without an ID", "payload"); err != nil {
				return err
			}
			if many.Filter, err = chosen.chosen(args, many.All); err != nil {
				return err
			}
			if newest {
				many.Order = "newest"
			}
			var answer api.ReplayAnswer
			if err := c.confirmed(cmd, "/api/dlq/replay", &many, &many.Expect, &answer); err != nil || c.asJSON {
				return err
			}
			if answer.Preview != nil {
				return printPreview(cmd, answer.Preview)
			}
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "replay run %s: %d dead letters%s\n", answer.Run.ID, answer.Run.Total, toDestination(many.Destination))
			if detach {
				return nil
			}
			return c.follow(cmd, answer.Run)
		},
	}
	c.register(cmd)
	chosen.register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&many.Note, "note", "", "why")
	flags.BoolVar(&many.Force, "force", false, "replay although an equal job is live, or a destination is in trouble")
	flags.StringVar(&payload, "payload", "", "with an ID: JSON to send in place of the payload; the original is kept")
	flags.BoolVar(&many.All, "all", false, "choose every dead letter that can be replayed")
	flags.BoolVar(&many.DryRun, "dry-run", false, "only say what it would do")
	registerExpect(cmd, &many.Expect)
	flags.IntVar(&many.BatchSize, "batch-size", 100, "entries in one transaction")
	flags.Float64Var(&many.Rate, "rate", 0, "entries a second; 0 for as fast as it goes")
	flags.IntVar(&many.Concurrency, "concurrency", 0, "redeliveries under way at once; 0 for no limit")
	flags.StringVar(&patch, "patch", "", "JSON Patch (RFC 6902) of each payload")
	flags.StringVar(&mergePatch, "merge-patch", "", "JSON Merge Patch (RFC 7396) of each payload")
	flags.StringVar(&many.Queue, "to-queue", "", "send them to this queue instead of their own")
	flags.StringVar(&many.Destination, "to-destination", "", "deliver messages to this destination instead of their queues'")
	flags.BoolVar(&resume, "resume", false, "with an edit: resumable jobs go on after the last step that they have done")
	flags.BoolVar(&fromStart, "from-start", false, "resumable jobs do all their steps again")
	cmd.MarkFlagsMutuallyExclusive("resume", "from-start")
	flags.BoolVar(&newest, "newest-first", false, "newest first; oldest first otherwise")
	flags.Float64Var(&many.StopAt, "stop-at", replay.DefaultStopAt, "percent of the last 50 redeliveries that fail and so stop the run")
	flags.BoolVar(&detach, "detach", false, "start the run, and do not follow it")
	return cmd
}

// checkpointOf returns what --resume and --from-start mean for checkpoints.
func checkpointOf(resume, fromStart bool) string {
	switch {
	case resume:
		return deadletter.Resume
	case fromStart:
		return deadletter.Discard
	}
	return ""
}

// replayOne replays one dead letter. whole, if not nil, replaces its payload.
func (c *client) replayOne(cmd *cobra.Command, id string, whole json.RawMessage, in *api.ReplayRequest) error {
	body, err := withPayload(api.ReplayAction{Action: in.Action, Patch: in.Patch, MergePatch: in.MergePatch, Destination: in.Destination, Checkpoint: in.Checkpoint, Force: in.Force}, whole)
	if err != nil {
		return err
	}
	var replayed api.Replayed
	if err := c.call(cmd, http.MethodPost, "/api/dlq/entries/"+url.PathEscape(id)+"/replay", body, &replayed); err != nil || c.asJSON {
		return err
	}
	sayf(cmd.OutOrStdout(), "%s is %s, with job %d\n", replayed.ID, replayed.Status, replayed.JobID)
	printChanges(cmd.OutOrStdout(), replayed.Changes)
	if replayed.Warning != "" {
		sayf(cmd.ErrOrStderr(), "%s\n", replayed.Warning)
	}
	return nil
}

// previewOne previews the replay of one dead letter. It uses a run of this one entry, with a patch
// if the payload is replaced.
func (c *client) previewOne(cmd *cobra.Command, id string, payload json.RawMessage, in *api.ReplayRequest) error {
	in.Filter.IDs = []string{id}
	if payload != nil {
		whole, err := json.Marshal(map[string]any{"op": "replace", "path": "", "value": payload})
		if err != nil {
			return err
		}
		in.Patch = []json.RawMessage{whole}
	}
	var answer api.ReplayAnswer
	if err := c.call(cmd, http.MethodPost, "/api/dlq/replay", in, &answer); err != nil || c.asJSON {
		return err
	}
	if answer.Preview == nil {
		return errors.New("the API answered without a preview")
	}
	return printPreview(cmd, answer.Preview)
}

func printPreview(cmd *cobra.Command, p *replay.Preview) error {
	out := cmd.OutOrStdout()
	_, _ = fmt.Fprintf(out, "%d dead letters would be replayed%s%s; nothing was changed\n", p.Total, toDestination(p.Destination), inAbout(p))
	for _, what := range p.Unhealthy {
		sayf(out, "not now: %s (--force overrides)\n", what)
	}
	if p.Checkpoints > 0 {
		sayf(out, "%d have a checkpoint: their jobs have done some steps; say whether they go on after these (--resume) or do all again (--from-start)\n", p.Checkpoints)
	}
	printSplit(cmd, "error type", p.ByErrorType)
	printSplit(cmd, "queue", p.ByQueue)
	printSplit(cmd, "age", p.ByAge)
	for _, s := range p.Samples {
		_, _ = fmt.Fprintf(out, "sample %s\n", s.ID)
		switch {
		case s.Problem != "":
			sayf(out, "  the patch does not apply: %s\n", s.Problem)
		case s.Patched != nil:
			printChanges(out, s.Changes)
		}
		if s.Checkpoint != nil {
			sayf(out, "  %s\n", s.Checkpoint)
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

func inAbout(p *replay.Preview) string {
	switch took := time.Duration(p.Seconds * float64(time.Second)); {
	case p.Total == 0:
		return ""
	case took < time.Second:
		return ", in less than a second"
	default:
		return ", in about " + took.Round(time.Second).String()
	}
}

// printChanges prints the changes of an edit.
func printChanges(out io.Writer, changes []replay.Change) {
	for _, c := range changes {
		path := cmp.Or(c.Path, "(all)")
		switch c.Op {
		case "add":
			sayf(out, "  add %s: %s\n", path, c.Value)
		case "remove":
			sayf(out, "  remove %s: %s\n", path, c.Was)
		default:
			sayf(out, "  replace %s: %s -> %s\n", path, c.Was, c.Value)
		}
	}
}

// follow shows the progress of a run until it ends: as a progress bar if standard error is a
// terminal.
func (c *client) follow(cmd *cobra.Command, run *replay.Run) error {
	show, end := func() {}, func() {}
	if info, err := os.Stderr.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		show, end = progressBar(cmd, run)
	}
	for run.Status == "running" {
		select {
		case <-cmd.Context().Done():
			end()
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "the run goes on: dlqd replays follow %s\n", run.ID)
			return nil
		case <-time.After(followEvery):
		}
		next := replay.Run{}
		if err := c.call(cmd, http.MethodGet, "/api/dlq/replays/"+run.ID.String(), nil, &next); err != nil {
			end()
			return err
		}
		*run = next
		show()
	}
	end()
	return printRun(cmd, run)
}

func progressBar(cmd *cobra.Command, run *replay.Run) (show, end func()) {
	var mu sync.Mutex // guards line, which bars draws in another goroutine
	var line string
	bars := mpb.New(mpb.WithOutput(cmd.ErrOrStderr()), mpb.WithAutoRefresh(), mpb.WithWidth(60))
	total := max(run.Total, 1)
	bar := bars.AddBar(total, mpb.PrependDecorators(decor.CountersNoUnit("%d / %d")), mpb.AppendDecorators(decor.Any(func(decor.Statistics) string {
		mu.Lock()
		defer mu.Unlock()
		return line
	})))
	show = func() {
		mu.Lock()
		line = fmt.Sprintf(" %s%s  %d ok, %d failed, %d skipped", perSecond(run), timeLeft(run), run.Succeeded, run.Failed, run.Skipped)
		mu.Unlock()
		bar.SetCurrent(min(run.Replayed+run.Skipped, total-1)) // full only at the end
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

// perSecond formats the rate of a run, with two digits for slow runs.
func perSecond(run *replay.Run) string {
	if run.PerSecond < 10 {
		return fmt.Sprintf("%.2g/s", run.PerSecond)
	}
	return fmt.Sprintf("%.0f/s", run.PerSecond)
}

// timeLeft formats the estimated time left of a run; "" if unknown or over.
func timeLeft(run *replay.Run) string {
	if run.SecondsLeft == 0 {
		return ""
	}
	return ", about " + max(time.Duration(run.SecondsLeft*float64(time.Second)).Round(time.Second), time.Second).String() + " left"
}

func printRun(cmd *cobra.Command, run *replay.Run) error {
	reason := ""
	if run.Reason != "" {
		reason = " (" + run.Reason + ")"
	}
	if run.Held {
		reason = " (held: the database was restored, see dlqd restored)"
	}
	sayf(cmd.OutOrStdout(), "%s: %d replayed, %d succeeded, %d failed, %d skipped of %d, %s%s%s\n",
		run.Status, run.Replayed, run.Succeeded, run.Failed, run.Skipped, run.Total, perSecond(run), timeLeft(run), reason)
	return nil
}

func newReplays() *cobra.Command {
	cmd := &cobra.Command{Use: "replays", Short: "List the newest replay runs; see and steer them", Args: cobra.NoArgs}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List the newest replay runs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out struct {
				Runs []replay.Run `json:"runs"`
			}
			if err := c.call(cmd, http.MethodGet, "/api/dlq/replays", nil, &out); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ID\tSTATUS\tREPLAYED\tOK\tFAILED\tSKIPPED\tBY\tNOTE")
			for _, r := range out.Runs {
				if r.Held {
					r.Status = "held"
				}
				row(r.ID, r.Status, fmt.Sprintf("%d of %d", r.Replayed, r.Total), r.Succeeded, r.Failed, r.Skipped, r.Actor, text(r.Note))
			}
			return w.Flush()
		},
	}
	asList(cmd, list, &c)
	for _, verb := range []struct{ name, short string }{
		{"show", "Say how far a replay run is"},
		{"follow", "Follow a replay run"},
		{"pause", "Pause a replay run"},
		{"resume", "Go on with a replay run"},
		{"cancel", "End a replay run"},
	} {
		var c client
		sub := &cobra.Command{
			Use: verb.name + " ID", Short: verb.short, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				path, method, body := "/api/dlq/replays/"+url.PathEscape(args[0]), http.MethodGet, any(nil)
				if verb.name != "show" && verb.name != "follow" {
					path, method, body = path+"/"+verb.name, http.MethodPost, api.Action{Actor: actor()}
				}
				var run replay.Run
				if err := c.call(cmd, method, path, body, &run); err != nil || c.asJSON {
					return err
				}
				if verb.name == "follow" {
					return c.follow(cmd, &run)
				}
				return printRun(cmd, &run)
			},
		}
		c.register(sub)
		cmd.AddCommand(sub)
	}
	var rateClient client
	var perSecond float64
	rate := &cobra.Command{
		Use: "rate ID", Short: "Change the rate of a replay run", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var run replay.Run
			if err := rateClient.call(cmd, http.MethodPost, "/api/dlq/replays/"+url.PathEscape(args[0])+"/rate", api.RateAction{Action: api.Action{Actor: actor()}, Rate: perSecond}, &run); err != nil || rateClient.asJSON {
				return err
			}
			return printRun(cmd, &run)
		},
	}
	rateClient.register(rate)
	rate.Flags().Float64Var(&perSecond, "per-second", 0, "entries a second; 0 for as fast as it goes")
	cmd.AddCommand(rate)
	return cmd
}
