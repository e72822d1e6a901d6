package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/sse"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/replay"
)

// progressInterval is the time between two events of a progress stream.
const progressInterval = time.Second

// readTimeout bounds the time to read a run for a progress stream. After that time, the stream sends the last state
// again. With this limit and the limit of the caller's check, a stream sends an event at least every 15 s. Proxies
// close streams that are silent for longer (nginx: 60 s).
const readTimeout = 10 * time.Second

// ReplayRequest is a request for a replay run.
type ReplayRequest struct {
	Action

	Filter      EntryFilter       `json:"filter" doc:"Entries to replay. Without a status it selects pending, manual and failed ones."`
	All         bool              `json:"all,omitempty" doc:"Confirms that an empty filter selects every entry."`
	DryRun      bool              `json:"dryRun,omitempty" doc:"Only return what the run would do."`
	Expect      *int64            `json:"expect,omitempty" minimum:"0" doc:"Expected number of entries: required above the policy's expectAbove. A different number answers 409."`
	Order       string            `json:"order,omitempty" enum:"oldest,newest" doc:"Order of the replays; oldest if absent."`
	BatchSize   int               `json:"batchSize,omitempty" minimum:"1" maximum:"10000" doc:"Entries that are replayed in one step; 100 if absent. A run without rate and concurrency commits several steps together, up to 500 entries."`
	Rate        float64           `json:"rate,omitempty" minimum:"0" maximum:"1000000" doc:"Entries a second, at least 0.001; unlimited if absent."`
	Concurrency int               `json:"concurrency,omitempty" minimum:"0" maximum:"1000000" doc:"Maximum number of redeliveries in progress; unlimited if absent."`
	Patch       []json.RawMessage `json:"patch,omitempty" doc:"JSON Patch (RFC 6902) of each payload."`
	MergePatch  json.RawMessage   `json:"mergePatch,omitempty" doc:"JSON Merge Patch (RFC 7396) of each payload."`
	Queue       string            `json:"queue,omitempty" maxLength:"127" doc:"Redeliver to this queue instead of the entry's queue."`
	Destination string            `json:"toDestination,omitempty" maxLength:"127" doc:"Deliver messages to this destination instead of the destination of their queue. Rejected if the filter selects an application's job, which has no destination."`
	Checkpoint  string            `json:"checkpoint,omitempty" enum:"resume,discard" doc:"Whether resumable jobs that have completed a step continue after it (resume) or repeat all steps (discard). Required for a patch if the filter selects such jobs; otherwise resume if absent."`
	Force       bool              `json:"force,omitempty" doc:"Start although a destination is unhealthy, and replay entries although an equal job is live."`
	OtherGroups bool              `json:"otherGroups,omitempty" doc:"Publish records even if consumer groups that did not fail read, or may read, their topics."`
	StopAt      float64           `json:"stopAt,omitempty" minimum:"1" maximum:"100" doc:"Percentage of failures among the last 50 redeliveries at which the run stops; 50 if absent. A progressive run judges each failure group instead."`
	Progressive bool              `json:"progressive,omitempty" doc:"Send each failure group in steps: 5 entries, then 10, 50 and 100 %. A group that does not recover is held or stopped alone."`
	SkipStale   *bool             `json:"skipStale,omitempty" doc:"Skip entries whose work is out of date: past the message's expiresAt or the job's metadata dlqd:expires_at, or older than staleAfter of the policy. Absent: the policy decides by queue and kind."`
	SkipDone    *bool             `json:"skipSuperseded,omitempty" doc:"Skip entries whose work a later job has done: one with the same unique key or ordering key, or of the same kind with equal args or payload, that has completed, among the jobs that River keeps. Absent: the policy decides by queue and kind."`
	Deadline    float64           `json:"stepDeadline,omitempty" minimum:"1" maximum:"2592000" doc:"Seconds without an outcome after which a group of a progressive run is held while redeliveries are under way; 900 if absent."`
}

// ReplayAnswer is a started run, or the result of a dry run.
type ReplayAnswer struct {
	Run     *replay.Run     `json:"run,omitempty" doc:"The replay run."`
	Preview *replay.Preview `json:"preview,omitempty" doc:"The result of a dry run."`
}

func (a *ReplayAnswer) status() int {
	if a.Run != nil {
		return http.StatusAccepted
	}
	return http.StatusOK
}

// RunInput names a replay run.
type RunInput struct {
	ID string `path:"id" format:"uuid" doc:"The replay run." example:"0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"`
}

// EndedRun is the last event of a progress stream: the report of the run.
type EndedRun struct{ replay.Run }

// RateAction changes the rate of a run.
type RateAction struct {
	Action

	Rate float64 `json:"rate" minimum:"0" maximum:"1000000" doc:"Entries a second, at least 0.001; 0 for no limit."`
}

// StartReplayInput is a request for a replay run.
type StartReplayInput struct{ Body ReplayRequest }

// RunsOutputBody lists replay runs.
type RunsOutputBody struct {
	Runs []*replay.Run `json:"runs" doc:"Runs, newest first."`
}

// RunEntriesInput selects the entries of a run.
type RunEntriesInput struct {
	RunInput

	Outcome string `query:"outcome" enum:"succeeded,failed,skipped,to_go" doc:"Only those with this outcome."`
	Cursor  string `query:"cursor" format:"uuid" doc:"next of the page before."`
	Limit   int    `query:"limit" minimum:"1" maximum:"500" default:"50" doc:"Entries in a page."`
}

// RunEntriesPage is a page of the entries of a run.
type RunEntriesPage struct {
	Entries []replay.RunEntry `json:"entries" doc:"Entries of this page, latest capture first."`
	Next    string            `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// RunsInput names two replay runs.
type RunsInput struct {
	RunInput

	Other string `path:"other" format:"uuid" doc:"The later replay run." example:"0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"`
}

// RunActionInput is a request to pause, resume or cancel a run.
type RunActionInput struct {
	RunInput

	Body *Action
}

// RunGroupsAction names failure groups of a progressive run.
type RunGroupsAction struct {
	Action

	Groups []int32 `json:"groups,omitempty" maxItems:"21" doc:"Numbers of the groups; all that are held or stopped if absent."`
}

// RunGroupsInput is a request to continue or end failure groups of a progressive run.
type RunGroupsInput struct {
	RunInput

	Body *RunGroupsAction
}

// RateInput is a request to change the rate of a run.
type RateInput struct {
	RunInput

	Body RateAction
}

// Operations on replay runs. The answer of FollowReplay is a stream of events.
var (
	StartReplay       = Operation[StartReplayInput, ReplayAnswer]{"start-replay", http.MethodPost, "/api/dlq/replay"}
	ListReplays       = Operation[None, RunsOutputBody]{"list-replays", http.MethodGet, "/api/dlq/replays"}
	GetReplay         = Operation[RunInput, replay.Run]{"get-replay", http.MethodGet, "/api/dlq/replays/{id}"}
	ListReplayEntries = Operation[RunEntriesInput, RunEntriesPage]{
		"list-replay-entries", http.MethodGet, "/api/dlq/replays/{id}/entries",
	}
	GetReplayReport = Operation[RunInput, replay.RunReport]{
		"get-replay-report", http.MethodGet, "/api/dlq/replays/{id}/report",
	}
	GetReplayCalibration = Operation[None, replay.Calibration]{
		"get-replay-calibration", http.MethodGet, "/api/dlq/replays/calibration",
	}
	DiffReplays = Operation[RunsInput, replay.RunComparison]{
		"diff-replays", http.MethodGet, "/api/dlq/replays/{id}/diff/{other}",
	}
	SetReplayRate = Operation[RateInput, replay.Run]{
		"set-replay-rate", http.MethodPost, "/api/dlq/replays/{id}/rate",
	}
	FollowReplay = Operation[RunInput, None]{"follow-replay", http.MethodGet, "/api/dlq/replays/{id}/events"}
)

// ControlReplay returns the operation that pauses, resumes or cancels a run.
func ControlReplay(verb string) Operation[RunActionInput, replay.Run] {
	return Operation[RunActionInput, replay.Run]{verb + "-replay", http.MethodPost, "/api/dlq/replays/{id}/" + verb}
}

// SteerReplay returns the operation that continues groups of a progressive run (go-on), continues them with a smaller
// step (back), or ends them (end).
func SteerReplay(verb string) Operation[RunGroupsInput, replay.Run] {
	return Operation[RunGroupsInput, replay.Run]{verb + "-replay", http.MethodPost, "/api/dlq/replays/{id}/" + verb}
}

func (s *service) registerReplays(api huma.API) {
	tags := []string{"replay runs"}
	run := replay.Run{
		ID: uuid.MustParse(entryExample), Status: "running", Filter: json.RawMessage(`{"errorType":["TIMEOUT_ERROR"]}`),
		Total: 4200, Replayed: 1200, Succeeded: 1100, Failed: 10,
		PerSecond: 400, SecondsLeft: 7.5, BatchSize: 100, Actor: "kim",
		CreatedAt: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC),
	}
	start := huma.Operation{
		Tags:    tags,
		Summary: "Replay many dead letters",
		Description: "Starts a run in the server and answers 202. A dry run answers 200 and changes nothing. A run " +
			"replays the entries that its filter selects now. Answers 409 if a destination is unhealthy (force overrides).",
		Errors: []int{400, 409, 413, 422, 503}, DefaultStatus: http.StatusAccepted, MaxBodyBytes: s.MaxBodyBytes,
	}
	example(&start, http.StatusAccepted, ReplayAnswer{Run: &run})
	register(s, api, StartReplay, start, s.startReplay)
	describeResponse(api, StartReplay.Path, http.StatusOK, http.StatusAccepted, "The result of a dry run",
		ReplayAnswer{Preview: &replay.Preview{
			Total: 4200, ByErrorType: map[string]int64{"TIMEOUT_ERROR": 4200},
			ByQueue: map[string]int64{"default": 4200}, ByAge: map[string]int64{"hour": 4200}, Seconds: 8.4,
			Unhealthy: []string{}, Samples: []replay.Sample{},
			Estimates: []replay.Estimate{{What: "stale", Entries: 420, Low: 345, High: 506, Sampled: 1000}},
			Load: []replay.Load{{
				Queue: "default", Destination: "default", Entries: 4200, PerSecond: []float64{500, 500},
				Redelivered: 120, Failures: 4300,
			}},
			Destinations: []replay.DestinationLoad{{
				Destination: "default", Entries: 4200, PerSecond: []float64{500, 500},
				LastHour: &replay.DestinationHour{Deliveries: 90_000, Failures: 4300, MostPerSecond: 41.5},
			}},
			Subscribers: &replay.Subscribers{
				Subscribers: 37, Entries: 4200, Low: 4184, High: 4200, Sampled: 1000,
				Largest: []replay.Subscriber{{ID: "sub_81", Entries: 420}},
			},
			Expect: &replay.Expectation{Tried: 4000, Untried: 200, Recover: 3100, Low: 2400, High: 3700},
		}})

	list := huma.Operation{
		Tags: tags, Summary: "List the newest replay runs", Errors: []int{503},
	}
	example(&list, http.StatusOK, map[string]any{"runs": []replay.Run{run}})
	register(s, api, ListReplays, list, func(ctx context.Context, _ *None) (*RunsOutputBody, error) {
		runs, err := s.Replayer.List(ctx, maxRuns)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &RunsOutputBody{runs}, nil
	})

	get := huma.Operation{
		Tags:    tags,
		Summary: "Get a replay run, with its progress or report", Errors: []int{404, 422, 503},
	}
	example(&get, http.StatusOK, run)
	register(s, api, GetReplay, get, func(ctx context.Context, in *RunInput) (*replay.Run, error) {
		return s.run(ctx, in.ID, nil)
	})

	entries := huma.Operation{
		Tags:    tags,
		Summary: "List the entries of a replay run, with their outcomes", Errors: []int{404, 422, 503},
	}
	example(&entries, http.StatusOK,
		RunEntriesPage{Entries: []replay.RunEntry{{
			ID: run.ID, Outcome: "failed", Detail: "HTTP 503", Status: "dlq_pending",
			Queue: "payments", Kind: "payment.captured", Closure: "failed_same",
		}}})
	register(s, api, ListReplayEntries, entries, s.runEntries)

	s.registerReports(api, tags, run.ID)
	for _, verb := range []struct{ name, summary string }{
		{"pause", "Pause a replay run"},
		{"resume", "Resume a replay run that is paused, or that stopped because too many redeliveries failed"},
		{"cancel", "Cancel a replay run; redeliveries that it has started continue"},
	} {
		op := huma.Operation{Tags: tags, Summary: verb.summary, Errors: []int{400, 404, 409, 422, 503}}
		example(&op, http.StatusOK, run)
		register(s, api, ControlReplay(verb.name), op, func(ctx context.Context, in *RunActionInput) (*replay.Run, error) {
			return s.run(ctx, in.ID, func(id uuid.UUID) error {
				return s.Replayer.Control(ctx, id, verb.name,
					in.Body.act(ctx).Actor)
			})
		})
	}
	for _, verb := range []struct{ name, summary string }{
		{"go-on", "Continue groups of a progressive replay run that are held or stopped"},
		{"back", "Continue groups of a progressive replay run with a step as large as the previous one"},
		{"end", "End groups of a progressive replay run; their remaining entries are skipped"},
	} {
		op := huma.Operation{Tags: tags, Summary: verb.summary, Errors: []int{400, 404, 409, 422, 503}}
		example(&op, http.StatusOK, run)
		register(s, api, SteerReplay(verb.name), op, func(ctx context.Context, in *RunGroupsInput) (*replay.Run, error) {
			body := in.Body
			if body == nil {
				body = &RunGroupsAction{}
			}
			return s.run(ctx, in.ID, func(id uuid.UUID) error {
				return s.Replayer.Steer(ctx, id, verb.name, body.Groups, body.act(ctx))
			})
		})
	}
	rate := huma.Operation{
		Tags:    tags,
		Summary: "Change the rate of a replay run", Errors: []int{400, 404, 409, 422, 503},
		Description: "A rate above the one that a second person has approved answers 409: it needs a new request.",
	}
	example(&rate, http.StatusOK, run)
	register(s, api, SetReplayRate, rate, func(ctx context.Context, in *RateInput) (*replay.Run, error) {
		return s.run(ctx, in.ID, func(id uuid.UUID) error {
			return s.Replayer.SetRate(ctx, id, in.Body.Rate,
				in.Body.act(ctx).Actor)
		})
	})

	events := huma.Operation{
		Tags:    tags,
		Summary: "Stream the progress of a replay run: one event a second, and the report when it ends",
		Errors:  []int{404, 422},
	}
	events.Middlewares = huma.Middlewares{s.refuseUnknownRun(api), unbuffered}
	events = FollowReplay.describe(events)
	sse.Register(api, events, map[string]any{"progress": replay.Run{}, "ended": EndedRun{}}, s.followReplay)
	stream := api.OpenAPI().Paths[events.Path].Get.Responses["200"].Content["text/event-stream"]
	stream.Example = []any{map[string]any{"event": "progress", "data": run}}
}

func (s *service) registerReports(api huma.API, tags []string, run uuid.UUID) {
	report := huma.Operation{
		Tags: tags, Summary: "Get what became of the dead letters of a replay run, by failure group",
		Description: "Reads every dead letter of the run.", Errors: []int{404, 422, 503},
	}
	counts := replay.RunCounts{Recovered: 90, FailedSame: 7, Skipped: 3}
	example(&report, http.StatusOK, replay.RunReport{
		Run: run, Complete: true, Entries: 100, Counts: counts, Groups: []replay.RunGroupReport{{
			RunCounts: counts, Fingerprint: "c0ffee0123456789abcd", Queue: "payments", ErrorType: "TIMEOUT_ERROR", Entries: 100,
			Median: 0.2, Slowest: 4.1,
			Reasons: []replay.RunReason{{Closure: "skipped", What: "its work is out of date", Entries: 3}},
		}},
	})
	register(s, api, GetReplayReport, report, func(ctx context.Context, in *RunInput) (*replay.RunReport, error) {
		out, err := s.Replayer.Report(ctx, uuid.MustParse(in.ID))
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
	calibration := huma.Operation{
		Tags: tags, Summary: "Get how often the forecasts of ended replay runs were right", Errors: []int{503},
	}
	example(&calibration, http.StatusOK, replay.Calibration{
		Runs: 20, Groups: 61, Judged: 50, Held: 41, Expected: 3100, Recovered: 3050,
		Figures: []replay.FigureCalibration{{
			What: "goes", Runs: 18, Held: 17, Forecast: 9_800, Actual: 9_650, Off: 12.5,
		}},
		Latest: []replay.CalibrationGroup{{
			Run: run, Queue: "payments", Fingerprint: "c0ffee0123456789abcd", Entries: 22, Expected: 17, Low: 12, High: 21,
			Recovered: 18, Failed: 4, Judged: true, Held: true,
		}},
	})
	register(s, api, GetReplayCalibration, calibration, func(ctx context.Context, _ *None) (*replay.Calibration, error) {
		out, err := s.Replayer.Calibration(ctx)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
	diff := huma.Operation{
		Tags: tags, Summary: "Compare what became of the dead letters of two replay runs",
		Description: "Reads every dead letter of both runs.", Errors: []int{404, 422, 503},
	}
	example(&diff, http.StatusOK, replay.RunComparison{
		Before: run, After: run, Changes: []replay.RunChange{{
			Fingerprint: "c0ffee0123456789abcd", Before: "failed_same", After: "recovered", Entries: 7,
		}},
	})
	register(s, api, DiffReplays, diff, func(ctx context.Context, in *RunsInput) (*replay.RunComparison, error) {
		out, err := s.Replayer.Compare(ctx, uuid.MustParse(in.ID), uuid.MustParse(in.Other))
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
}

// maxRuns is the maximum number of runs in a list.
const maxRuns = 50

func (s *service) startReplay(ctx context.Context, in *StartReplayInput) (*ReplayAnswer, error) {
	body := &in.Body
	request := &replay.Request{
		All: body.All, NewestFirst: body.Order == "newest",
		BatchSize: body.BatchSize, Rate: body.Rate, Concurrency: body.Concurrency,
		Queue: body.Queue, Destination: body.Destination, Checkpoint: body.Checkpoint,
		Force: body.Force, OtherGroups: body.OtherGroups, StopAt: body.StopAt, Progressive: body.Progressive,
		StepDeadline: body.Deadline,
		SkipStale:    body.SkipStale, SkipSuperseded: body.SkipDone, Act: body.act(ctx),
	}
	var err error
	if request.Filter, err = body.Filter.resolve(ctx); err != nil {
		return nil, err
	}
	if request.Patch, err = patchOf(body.Patch, body.MergePatch); err != nil {
		return nil, err
	}
	if err := checkSendTo(ctx, body.Queue, body.Destination); err != nil {
		return nil, err
	}
	if body.DryRun {
		markUnchanged(ctx)
		preview, err := s.Replayer.Preview(ctx, request)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &ReplayAnswer{Preview: preview}, nil
	}
	if err := s.checkExpected(ctx, request.Filter, true, body.Expect); err != nil {
		return nil, err
	}
	run, err := s.Replayer.Start(ctx, request)
	if err != nil {
		return nil, s.approvalOrProblem(ctx, err, approval.Replay, request, &body.Action)
	}
	return &ReplayAnswer{Run: run}, nil
}

// checkSendTo refuses redeliveries to a queue outside the caller's scope. A destination belongs to no queue, so callers
// with a limited scope may not choose one.
func checkSendTo(ctx context.Context, queue, destination string) error {
	scope := access.ScopeOf(ctx)
	if queue != "" && !scope.HasQueue(queue) {
		return huma.Error403Forbidden("you may not redeliver to queue " + queue)
	}
	if destination != "" && scope != nil {
		return huma.Error403Forbidden("you are limited to some queues or kinds and may not redeliver to another destination")
	}
	return nil
}

// patchOf returns the patch of a request.
func patchOf(operations []json.RawMessage, merge json.RawMessage) (replay.Patch, error) {
	patch := replay.Patch{MergePatch: merge}
	if operations == nil {
		return patch, nil
	}
	var err error
	if patch.JSONPatch, err = json.Marshal(operations); err != nil {
		return patch, huma.Error422UnprocessableEntity(err.Error())
	}
	return patch, nil
}

func (s *service) runEntries(ctx context.Context, in *RunEntriesInput) (*RunEntriesPage, error) {
	var before *uuid.UUID
	if in.Cursor != "" {
		// huma has checked the format.
		before = new(uuid.MustParse(in.Cursor))
	}
	entries, err := s.Replayer.Entries(ctx, uuid.MustParse(in.ID), in.Outcome, before, in.Limit+1)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	page := &RunEntriesPage{Entries: entries}
	if len(entries) > in.Limit {
		page.Entries = entries[:in.Limit]
		page.Next = page.Entries[in.Limit-1].ID.String()
	}
	return page, nil
}

// run applies change, unless it is nil, and returns the run.
func (s *service) run(ctx context.Context, text string, change func(uuid.UUID) error) (*replay.Run, error) {
	id := uuid.MustParse(text) // huma has checked the format
	if change != nil {
		if err := change(id); err != nil {
			return nil, s.problem(ctx, err)
		}
	}
	run, err := s.Replayer.Get(ctx, id)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return run, nil
}

// refuseUnknownRun answers 404 for an unknown run before the stream begins. Afterwards the status is already 200.
func (s *service) refuseUnknownRun(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		if id, err := uuid.Parse(ctx.Param("id")); err == nil { // otherwise huma refuses the format
			if _, err := s.Replayer.Get(ctx.Context(), id); err != nil {
				err := s.problem(ctx.Context(), err)
				status := http.StatusInternalServerError
				if known, ok := errors.AsType[huma.StatusError](err); ok {
					status = known.GetStatus()
				}
				_ = huma.WriteErr(api, ctx, status, err.Error())
				return
			}
		}
		next(ctx)
	}
}

// unbuffered makes nginx pass on each event of a stream at once. By default nginx waits until its buffer is full.
func unbuffered(ctx huma.Context, next func(huma.Context)) {
	ctx.SetHeader("X-Accel-Buffering", "no")
	next(ctx)
}

func (s *service) followReplay(ctx context.Context, in *RunInput, send sse.Sender) {
	id := uuid.MustParse(in.ID)
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	var run *replay.Run
	var unchecked error // the error of the check of the caller; after an error, the last state is sent again
	for {
		if unchecked == nil {
			timed, cancel := context.WithTimeout(ctx, readTimeout)
			latest, err := s.Replayer.Get(timed, id)
			late := timed.Err() != nil && ctx.Err() == nil
			cancel()
			switch {
			case err == nil:
				run = latest
			case run == nil || !late: // late: the database does not answer, so the last state is sent again
				return
			}
		}
		if run.Status != "running" && run.Status != "paused" {
			_ = send.Data(EndedRun{*run}) // a client that disconnected gets no report
			return
		}
		if send.Data(*run) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-access.SessionsEnded(ctx):
		case <-ticker.C:
		}
		var still bool
		still, unchecked = access.StillAuthenticated(ctx)
		if s.Ready() != nil || unchecked == nil && !still { // an open stream must not delay the end of the process
			return
		}
	}
}
