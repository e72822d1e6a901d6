// Package replay implements replay runs, and replays of one entry with an edited payload. A replay run is a bulk replay
// that a dlqd process executes in the background, at the rate that its request sets. Its progress and report are in the
// database.
package replay

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
)

const (
	// unlimitedRate is the approximate number of redeliveries per second on two cores (docs/benchmarks.md),
	// for estimates.
	unlimitedRate = 10_000
	// DefaultStopAt is the percentage of failures among the last stopWindow outcomes that stops a run, unless the run
	// is progressive.
	DefaultStopAt = 50
	stopWindow    = 50
	// DefaultBatchSize is the number of entries in a batch. A run with neither a rate nor a concurrency sends several
	// batches in one transaction.
	DefaultBatchSize = 100
	// maxOperations is the maximum number of operations of a JSON Patch.
	maxOperations = 100
	// maxPatchedBytes limits the size of a patched payload: 1 MiB, the default maximum size of a message. A payload that
	// was already larger may keep its size.
	maxPatchedBytes = 1 << 20
	// maxSamples is the number of entries that a preview shows.
	maxSamples = 5
)

// Patch changes payloads. At most one field is set.
type Patch struct {
	JSONPatch  json.RawMessage `json:"patch,omitempty"`      // RFC 6902
	MergePatch json.RawMessage `json:"mergePatch,omitempty"` // RFC 7396
}

// Replacement returns the operation of a JSON Patch that replaces the whole payload.
func Replacement(payload json.RawMessage) json.RawMessage {
	return slices.Concat([]byte(`{"op":"replace","path":"","value":`), payload, []byte(`}`))
}

// Validate returns an error if the patch is invalid.
func (p *Patch) Validate() error {
	if p.JSONPatch != nil && p.MergePatch != nil {
		return errors.New("patch and mergePatch cannot be combined: give one of them")
	}
	if p.MergePatch != nil {
		if err := message.CheckJSON(p.MergePatch); err != nil {
			return fmt.Errorf("mergePatch: %w", err)
		}
		if string(bytes.TrimSpace(p.MergePatch)) == "null" {
			return errors.New("mergePatch: null would replace every payload with null")
		}
	}
	if p.JSONPatch != nil {
		operations, err := jsonpatch.DecodePatch(p.JSONPatch)
		if err != nil {
			return fmt.Errorf("patch: not a JSON Patch (RFC 6902): %w", err)
		}
		if len(operations) > maxOperations {
			return fmt.Errorf("patch: %d operations; at most %d", len(operations), maxOperations)
		}
	}
	return nil
}

// Event applies the patch to the payload of an event: the message's payload, or the args of an
// application's job.
func (p *Patch) Event(jobKind string, event json.RawMessage) (json.RawMessage, error) {
	if jobKind != message.JobKind {
		return p.apply(event)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(event, &fields); err != nil {
		return nil, err
	}
	payload, err := Payload(jobKind, event)
	if err != nil {
		return nil, err
	}
	if payload, err = p.apply(payload); err != nil {
		return nil, err
	}
	fields["payload"] = payload
	if fields["payloadText"] != nil {
		if fields["payloadText"], err = json.Marshal(string(payload)); err != nil {
			return nil, err
		}
	}
	return json.Marshal(fields)
}

func (p *Patch) apply(payload json.RawMessage) (out json.RawMessage, err error) {
	switch {
	case p.MergePatch != nil:
		out, err = mergePatch(payload, p.MergePatch)
	case p.JSONPatch != nil:
		var operations jsonpatch.Patch
		if operations, err = jsonpatch.DecodePatch(p.JSONPatch); err == nil {
			// "copy" can double a document with each operation: a kilobyte of patch would produce gigabytes.
			out, err = operations.ApplyWithOptions(payload, &jsonpatch.ApplyOptions{
				SupportNegativeIndices: true, AccumulatedCopySizeLimit: maxPatchedBytes,
			})
		}
	default:
		return payload, nil
	}
	if err != nil {
		return nil, err
	}
	if len(out) > max(maxPatchedBytes, len(payload)) {
		return nil, fmt.Errorf("the patched payload has %d bytes; at most %d", len(out), maxPatchedBytes)
	}
	return out, message.CheckJSON(out)
}

// Request describes a run. An approval covers its JSON.
type Request struct {
	Patch

	Filter      json.RawMessage `json:"filter"`
	All         bool            `json:"all,omitempty"` // accept a filter that selects every entry
	NewestFirst bool            `json:"newestFirst,omitempty"`
	BatchSize   int             `json:"batchSize,omitempty"`     // 0 means DefaultBatchSize
	Rate        float64         `json:"rate,omitempty"`          // entries per second; 0 means no limit
	Concurrency int             `json:"concurrency,omitempty"`   // redeliveries in progress at once; 0 means no limit
	Queue       string          `json:"queue,omitempty"`         // overrides the queue of redeliveries
	Destination string          `json:"toDestination,omitempty"` // overrides the destination of messages
	// Checkpoint is deadletter.Resume or deadletter.Discard. A patch requires it if entries have a checkpoint.
	Checkpoint string `json:"checkpoint,omitempty"`
	Force      bool   `json:"force,omitempty"`
	// OtherGroups accepts that consumer groups that did not fail read records again. See [Readers].
	OtherGroups bool `json:"otherGroups,omitempty"`
	// StopAt is the percentage of failures among the last outcomes that stops the run; 0 means DefaultStopAt. A
	// progressive run ignores it.
	StopAt float64 `json:"stopAt,omitempty"`
	// Progressive sends each failure group in steps, and holds a group that does not recover.
	Progressive bool `json:"progressive,omitempty"`
	// StepDeadline is the number of seconds after which a group of a progressive run is held if redeliveries are
	// in progress without an outcome; 0 means DefaultStepDeadline.
	StepDeadline float64 `json:"stepDeadline,omitempty"`
	// SkipStale skips work that is out of date, and SkipSuperseded work that a later job has done. If nil, the policy
	// decides by the queue and kind of each entry ([policy.Skips]).
	SkipStale      *bool `json:"skipStale,omitempty"`
	SkipSuperseded *bool `json:"skipSuperseded,omitempty"`
	// ForFix is set if the policy starts the run, for the entries of one failure group (see [Fixes]).
	ForFix *FixedGroup    `json:"forFix,omitempty"`
	Act    deadletter.Act `json:"-"`
	// Forecast is set by [Replayer.Start], also if it refuses the run: a request for approval stores the forecast.
	Forecast *Forecast `json:"-"`
}

// Preview is the result of a dry run.
type Preview struct {
	Total        int64             `json:"total" doc:"Number of entries that the filter selects now."`
	ByErrorType  map[string]int64  `json:"byErrorType" doc:"Number of entries by error type."`
	ByQueue      map[string]int64  `json:"byQueue" doc:"Number of entries by queue."`
	ByAge        map[string]int64  `json:"byAge" doc:"Number of entries by age."`
	Seconds      float64           `json:"seconds" doc:"Estimated duration in seconds."`
	Destination  string            `json:"toDestination,omitempty" doc:"Destination that overrides those of the queues."`
	Checkpoints  int64             `json:"checkpoints,omitempty" doc:"With a patch: number of entries whose resumable job has completed a step. Starting the run then requires checkpoint."`
	Unhealthy    []string          `json:"unhealthy" doc:"Reasons not to start the run now; force overrides them."`
	Approval     string            `json:"approval,omitempty" doc:"Why the start needs the consent of a second person; absent if it does not."`
	Estimates    []Estimate        `json:"estimates" doc:"Numbers of entries that were counted in a sample of at most 1,000: those that need not be repeated, or do not go."`
	Expect       *Expectation      `json:"expect" doc:"How many entries will recover, as far as earlier replay runs tell."`
	Load         []Load            `json:"load" doc:"Redeliveries over time by queue, the most entries first, beside the last hour."`
	Destinations []DestinationLoad `json:"destinations,omitempty" doc:"Redeliveries over time by destination, the most entries first, beside the last hour."`
	Subscribers  *Subscribers      `json:"subscribers,omitempty" doc:"Whom the messages concern; absent if no sampled message names a subscriber."`
	Unworked     []UnworkedKind    `json:"unworkedKinds,omitempty" doc:"Kinds that no worker seems to know. This is inferred from errors; it does not stop a run."`
	Ends         *Ending           `json:"ends,omitempty" doc:"When the run will have ended, if no failure group is held; absent if that is not known."`
	EndsUnknown  string            `json:"endsNotKnown,omitempty" enum:"attempts,workers" doc:"Why it is not known when the run will have ended. attempts: fewer than five recent attempts have a known duration. workers: it is not known how many redeliveries an application works at a time; a concurrency, or a low rate, limits them."`
	Skips        policy.Skips      `json:"skips,omitzero" doc:"What the run skips because the policy says so, and the request does not say otherwise: queues, and kinds, which come first."`
	Readers      []Readers         `json:"readers,omitempty" doc:"Who reads the topics that records would be published to."`
	Samples      []Sample          `json:"samples" doc:"Up to five of the entries, of different failure groups if there are several."`
}

// Ending is the interval in which a run is expected to end.
type Ending struct {
	Earliest float64   `json:"earliest" doc:"Seconds after the start: the lower end of the interval."`
	Latest   float64   `json:"latest" doc:"The upper end."`
	EndsFrom time.Time `json:"endsFrom,omitzero" doc:"The lower end, if the run starts now."`
	EndsBy   time.Time `json:"endsAt,omitzero" doc:"The upper end, if the run starts now."`
}

// endText describes when the run is expected to end.
func (p *Preview) endText(w Words) string {
	switch {
	case p.Total == 0:
		return ""
	case p.Ends != nil:
		return fmt.Sprintf("it will have ended between %s and %s after its start, by %s, if no failure group is held",
			wholeSeconds(p.Ends.Earliest), wholeSeconds(p.Ends.Latest),
			w.Time(p.Ends.EndsBy.Truncate(time.Minute).Add(time.Minute)))
	case p.EndsUnknown == "workers":
		return "when it will have ended is not known: the application decides how many redeliveries it works at a time"
	case p.EndsUnknown != "":
		return "when it will have ended is not known: too few recent attempts have a known duration"
	}
	return "" // an older server
}

func wholeSeconds(s float64) time.Duration {
	return time.Duration(math.Ceil(s)) * time.Second
}

// Sample shows how an entry would be replayed.
type Sample struct {
	ID         uuid.UUID              `json:"id" doc:"The entry."`
	Event      json.RawMessage        `json:"event" doc:"Message of a redelivery without the patch."`
	Patched    json.RawMessage        `json:"patched,omitempty" doc:"Message of a redelivery with the patch."`
	Changes    []Change               `json:"changes,omitempty" doc:"Changes that the patch makes to the payload."`
	Problem    string                 `json:"problem,omitempty" doc:"Reason why the patch does not apply."`
	Checkpoint *deadletter.Checkpoint `json:"checkpoint,omitempty" doc:"Progress of the entry's resumable job. A redelivery resumes there unless checkpoint is discard."`
}

// visibleSample returns the result of the patch on an event as the viewer may see it. If data is masked, the patch is
// applied to the masked event, because a patch could otherwise move a masked value to a visible place.
func (p *Patch) visibleSample(ctx context.Context, queries *dbsqlc.Queries, e *dbsqlc.EventsRow) (Sample, error) {
	s := p.sample(e)
	if masked, err := queries.IsMasked(ctx); err != nil || !masked {
		return s, err // nothing is masked: show the JSON as written
	}
	masked, err := queries.MaskSample(ctx, dbsqlc.MaskSampleParams{
		Event: e.Event, JobKind: e.JobKind, Patched: json.RawMessage("null"), Changes: json.RawMessage("[]"),
	})
	if err != nil {
		return s, err
	}
	seen := p.sample(&dbsqlc.EventsRow{ID: e.ID, JobKind: e.JobKind, Event: masked.Event})
	if seen.Problem == "" {
		return seen, seen.mask(ctx, queries, e.JobKind)
	}
	seen.Problem += " (*** stands for masked data)"
	if s.Problem == "" && !p.hasTests() { // the patch applies, but its result must not be visible
		seen.Problem, seen.Patched = "", json.RawMessage(`"***"`)
	}
	return seen, nil
}

// hasTests reports whether the patch contains "test" operations, which could reveal payload values.
func (p *Patch) hasTests() bool {
	type operation struct {
		Op string `json:"op"`
	}
	var operations []operation
	return json.Unmarshal(p.JSONPatch, &operations) == nil &&
		slices.ContainsFunc(operations, func(o operation) bool { return o.Op == "test" })
}

// mask masks values in the patched event and in the changes, because the patch itself can write values that the policy
// masks.
func (s *Sample) mask(ctx context.Context, queries *dbsqlc.Queries, jobKind string) error {
	params := dbsqlc.MaskSampleParams{Event: json.RawMessage("null"), JobKind: jobKind, Patched: json.RawMessage("null")}
	if s.Patched != nil {
		params.Patched = s.Patched
	}
	var err error
	if params.Changes, err = json.Marshal(s.Changes); err != nil {
		return err
	}
	masked, err := queries.MaskSample(ctx, params)
	if err != nil {
		return err
	}
	if s.Patched != nil {
		s.Patched = masked.Patched
	}
	var result struct {
		Changes []Change `json:"changes"`
	}
	err = json.Unmarshal(masked.Details, &result)
	s.Changes = result.Changes
	return err
}

// Replayer starts and controls runs.
type Replayer struct {
	Store   *deadletter.Store
	Planner func() *strategy.Planner
	// Tracer creates a span for each run. If nil, runs have no spans.
	Tracer trace.Tracer
	// Groups returns the consumer groups of topics (source.Open.Groups). If nil, the readers of topics are unknown.
	Groups func(ctx context.Context, p *policy.Policy, cluster string, topics []string) (map[string][]string, error)
	// Wake is called when a run can continue. It is nil if the process has no [Runner]; runs then begin
	// within a second.
	Wake func()

	outcomes outcomes
}

// startConditions returns the conditions under which a run may start without force.
func startConditions() *policy.Conditions {
	yes, most := true, 95.0
	return &policy.Conditions{Breaker: &yes, Probe: &yes, ConnectionsBelow: &most}
}

// transaction is a database transaction with the queries for replay runs.
type transaction struct {
	*dbsqlc.Queries
	postgres.DB
}

// inTx runs fn in a transaction of [deadletter.Store.InTx].
func inTx(ctx context.Context, store *deadletter.Store, fn func(tx transaction) error) error {
	return store.InTx(ctx, func(db postgres.DB) error { return fn(transaction{dbsqlc.New(db), db}) })
}

// Preview returns the expected result of a run, without starting it. It changes nothing.
func (r *Replayer) Preview(ctx context.Context, in *Request) (*Preview, error) {
	if err := in.Validate(); err != nil {
		return nil, &deadletter.MoveError{Kind: deadletter.ErrInvalid, Detail: err.Error()}
	}
	if err := r.checkDestination(in.Destination); err != nil {
		return nil, err
	}
	p := &Preview{
		Destination: in.Destination, ByErrorType: map[string]int64{}, ByQueue: map[string]int64{},
		ByAge: map[string]int64{}, Unhealthy: []string{}, Estimates: []Estimate{}, Load: []Load{},
		Samples: []Sample{},
	}
	rate := cmp.Or(in.Rate, unlimitedRate)
	var filter json.RawMessage
	err := inTx(ctx, r.Store, func(tx transaction) (err error) {
		if filter, err = tx.Replayable(ctx, in.Filter); err != nil {
			return err
		}
		if err := tx.CheckDestination(ctx, dbsqlc.CheckDestinationParams{Filter: filter, Destination: in.Destination}); err !=
			nil {
			return err
		}
		rows, err := tx.CountGroups(ctx, dbsqlc.CountGroupsParams{Filter: filter, Most: sampleSize})
		if err != nil {
			return err
		}
		var sample []uuid.UUID
		for i := range rows {
			row := &rows[i]
			p.Total += row.Entries
			p.ByErrorType[row.ErrorType] += row.Entries
			p.ByQueue[row.Queue] += row.Entries
			p.ByAge[row.Age] += row.Entries
			sample = append(sample, row.Sample...)
		}
		goes, err := r.addEstimates(ctx, tx, in, sample, p)
		if err != nil {
			return err
		}
		if err := p.addKeyed(ctx, tx, filter, sample); err != nil {
			return err
		}
		if p.Expect, err = expect(ctx, tx, rows, goes); err != nil {
			return err
		}
		if err := p.addLoad(ctx, tx, in, rate, r.Planner().Policy(), rows); err != nil {
			return err
		}
		if err := p.addSubscribers(ctx, tx, sample); err != nil {
			return err
		}
		if err := p.addUnworked(ctx, tx, sample); err != nil {
			return err
		}
		if p.Approval, err = needsApproval(ctx, tx, in, filter); err != nil {
			return err
		}
		return p.addSamples(ctx, tx, in, filter, samplesOf(rows))
	})
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	queues := slices.Sorted(maps.Keys(p.ByQueue))
	if in.Queue != "" {
		queues = []string{in.Queue}
	}
	for _, queue := range queues {
		unmet := r.Planner().UnmetBy(queue, in.Destination, startConditions())
		if unmet != "" && !slices.Contains(p.Unhealthy, unmet) { // a different queue may have the same destination
			p.Unhealthy = append(p.Unhealthy, unmet)
		}
	}
	unworked, err := dbsqlc.New(r.Store.DB()).UnworkedQueues(ctx, queues)
	if err != nil {
		return nil, err
	}
	for _, queue := range unworked {
		p.Unhealthy = append(p.Unhealthy, "no River client works queue "+queue+": redeliveries would wait there")
	}
	p.Seconds = float64(p.Total) / rate
	if p.Readers, err = r.readersOf(ctx, filter, in.Queue, in.Destination); err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	return p, nil
}

// samplesOf returns at most maxSamples of the sampled entries. It spreads them over the failure groups: it takes the
// first entry of each group, the largest group first, then the second of each, and so on.
func samplesOf(cells []dbsqlc.CountGroupsRow) (ids []uuid.UUID) {
	at := map[groupKey]int{}
	var groups [][]uuid.UUID
	for i := range cells {
		key := groupKey{cells[i].Queue, cells[i].Fingerprint}
		if _, ok := at[key]; !ok {
			at[key] = len(groups)
			groups = append(groups, nil)
		}
		groups[at[key]] = append(groups[at[key]], cells[i].Sample...)
	}
	left := true
	for n := 0; left && len(ids) < maxSamples; n++ {
		left = false
		for _, group := range groups {
			if n == 0 {
				slices.SortFunc(group, byID)
			}
			if n < len(group) && len(ids) < maxSamples {
				ids, left = append(ids, group[n]), true
			}
		}
	}
	slices.SortFunc(ids, byID)
	return ids
}

func byID(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) }

// addSamples adds samples of entries as the run would send them and, if the run has a patch, the number of entries with
// a checkpoint.
func (p *Preview) addSamples(ctx context.Context, tx transaction, in *Request, filter []byte, ids []uuid.UUID) error {
	events, err := tx.Events(ctx, ids)
	if err != nil {
		return err
	}
	for _, e := range events {
		sample, err := in.visibleSample(ctx, tx.Queries, &e)
		if err != nil {
			return err
		}
		p.Samples = append(p.Samples, sample)
	}
	if err := p.readCheckpoints(ctx, tx, ids); err != nil || in.JSONPatch == nil && in.MergePatch == nil {
		return err
	}
	p.Checkpoints, err = tx.CountCheckpoints(ctx, filter)
	return err
}

// readCheckpoints adds the checkpoints of the samples' jobs.
func (p *Preview) readCheckpoints(ctx context.Context, tx transaction, ids []uuid.UUID) error {
	rows, err := tx.Checkpoints(ctx, ids)
	for _, row := range rows {
		for i := range p.Samples {
			if p.Samples[i].ID == row.ID {
				p.Samples[i].Checkpoint = deadletter.CheckpointOf(row.Metadata)
			}
		}
	}
	return err
}

// checkDestination returns an error if the policy does not have the destination.
func (r *Replayer) checkDestination(name string) error {
	known := r.Planner().Policy().Destinations
	if name == "" || known[name] != nil {
		return nil
	}
	return &deadletter.MoveError{
		Kind: deadletter.ErrInvalid, Detail: fmt.Sprintf("the policy has no destination %q", name),
		Hint: "Destinations: " + strings.Join(slices.Sorted(maps.Keys(known)), ", ") + ".",
	}
}

func (p *Patch) sample(e *dbsqlc.EventsRow) Sample {
	s := Sample{ID: e.ID, Event: e.Event}
	patched, err := p.Event(e.JobKind, e.Event)
	switch {
	case err != nil:
		s.Problem = err.Error()
	case !bytes.Equal(patched, e.Event):
		s.Patched = patched
		before, _ := Payload(e.JobKind, e.Event) // cannot fail: the patch was applied to it
		after, _ := Payload(e.JobKind, patched)
		s.Changes = Changes(before, after)
	}
	return s
}

// Run is a run with its progress.
type Run struct {
	ID             uuid.UUID       `json:"id" doc:"Identifies the run."`
	Status         string          `json:"status" enum:"running,paused,completed,cancelled,stopped" doc:"stopped: too many redeliveries failed."`
	Reason         string          `json:"reason,omitempty" doc:"Reason for the status."`
	Held           bool            `json:"held,omitempty" doc:"Whether the run is held because the database was restored: it may already have sent these entries (see resume-restored)."`
	Filter         json.RawMessage `json:"filter" doc:"Filter that selected the entries."`
	Total          int64           `json:"total" doc:"Number of entries that the filter selected at the start."`
	Replayed       int64           `json:"replayed" doc:"Number of redeliveries started so far."`
	Succeeded      int64           `json:"succeeded" doc:"Number of redeliveries that succeeded."`
	Failed         int64           `json:"failed" doc:"Number of redeliveries that failed."`
	Skipped        int64           `json:"skipped" doc:"Number of skipped entries: they had moved meanwhile, have a live equal job, or the patch does not apply."`
	PerSecond      float64         `json:"perSecond" doc:"Entries per second while sending, without pauses and without the time before the first and after the last entry."`
	SecondsLeft    float64         `json:"secondsLeft" doc:"Estimated time left in seconds."`
	Rate           *float64        `json:"rate,omitempty" doc:"Requested rate in entries per second."`
	BatchSize      int32           `json:"batchSize" doc:"Number of entries per step. A run without rate and concurrency commits several steps together, up to 500 entries."`
	Concurrency    *int32          `json:"concurrency,omitempty" doc:"Maximum number of redeliveries in progress at once."`
	Queue          *string         `json:"queue,omitempty" doc:"Queue that overrides those of the entries."`
	Destination    *string         `json:"toDestination,omitempty" doc:"Destination that overrides those of the queues."`
	Checkpoint     string          `json:"checkpoint,omitempty" enum:"resume,discard" doc:"Whether resumable jobs resume after their last completed step or discard their progress."`
	Patch          json.RawMessage `json:"patch,omitempty" doc:"JSON Patch applied to each payload."`
	MergePatch     json.RawMessage `json:"mergePatch,omitempty" doc:"JSON Merge Patch applied to each payload."`
	Actor          string          `json:"actor" doc:"User that started the run."`
	Origin         string          `json:"origin,omitempty" doc:"Interface and address that the start came from."`
	Note           *string         `json:"note,omitempty" doc:"Note of the user."`
	CreatedAt      time.Time       `json:"createdAt" doc:"Time of the start."`
	FinishedAt     *time.Time      `json:"finishedAt,omitempty" doc:"Time of the end."`
	Forecast       *Forecast       `json:"forecast,omitempty" doc:"Result of the dry run at the start; absent for runs started through SQL."`
	Progressive    bool            `json:"progressive,omitempty" doc:"Whether the run sends each failure group in steps."`
	SkipStale      bool            `json:"skipStale,omitempty" doc:"Whether the request skips work that is out of date."`
	SkipSuperseded bool            `json:"skipSuperseded,omitempty" doc:"Whether the request skips work that a later job has done."`
	Skips          policy.Skips    `json:"skips,omitzero" doc:"What the run skips because the policy said so at its start, or when it was requested for approval."`
	Figures        []Figure        `json:"figures,omitempty" doc:"The figures of the forecast beside what happened, once the run and all its redeliveries have ended."`
	NotKnown       int64           `json:"notKnown,omitempty" doc:"With skipSuperseded: entries that were sent although it is not known whether a later job has done their work."`
	KeyedJobs      int64           `json:"keyedJobs,omitempty" doc:"Jobs of applications whose args have the ordering key that the policy named at the start. The run keeps the order of each key; live jobs of the key pass them, and sequences of River Pro are left to River."`
	// StepDeadline, Groups and Decisions are set for progressive runs; the last two not in lists.
	StepDeadline float64       `json:"stepDeadline,omitempty" doc:"Seconds without an outcome after which a group is held while redeliveries are under way; absent unless progressive."`
	Groups       []RunGroup    `json:"groups,omitempty" doc:"Failure groups of a progressive run; absent in lists of runs."`
	Decisions    []RunDecision `json:"decisions,omitempty" doc:"The last decisions about groups and rates, newest first; absent in lists of runs."`
}

// RunGroup is a failure group of a progressive run.
type RunGroup struct {
	Number      int32  `json:"number" doc:"Number of the group in the run, by size. The group of all failure groups after the 20 largest has the number 21."`
	Queue       string `json:"queue,omitempty" doc:"Queue of its entries; absent for the group of all others."`
	Fingerprint string `json:"fingerprint,omitempty" doc:"Failure group of its entries at the start of the run; absent for the group of all others, and for entries that had none."`
	ErrorType   string `json:"errorType,omitempty" doc:"Error type of one of its entries."`
	Title       string `json:"title,omitempty" doc:"Title of the failure group; absent if it has none, or if the caller may not see it."`
	State       string `json:"state" enum:"going,held,stopped,done,ended" doc:"held or stopped: an operator decides. done: every entry was sent or skipped. ended: an operator ended it."`
	Reason      string `json:"reason,omitempty" doc:"The last decision, with its figures."`
	Step        int32  `json:"step" doc:"0 for the canary of five entries; 1, 2 and 3 for the steps up to 10, 50 and 100 % of its entries."`
	Quota       int64  `json:"quota" doc:"How many entries may be sent up to the end of the step."`
	Entries     int64  `json:"entries" doc:"Number of its entries."`
	Sent        int64  `json:"sent" doc:"Number of entries sent."`
	Succeeded   int64  `json:"succeeded" doc:"Number of redeliveries that succeeded."`
	Failed      int64  `json:"failed" doc:"Number of redeliveries that failed."`
	Skipped     int64  `json:"skipped" doc:"Number of skipped entries."`
}

// RunDecision is a decision about a group of a progressive run, or about its rate to a destination.
type RunDecision struct {
	At     time.Time `json:"at" doc:"Time of the decision."`
	Group  int32     `json:"group" doc:"Number of the group; 0 for a decision about the rate to a destination."`
	Act    string    `json:"act" doc:"Act in the audit trail." example:"group held"`
	Actor  string    `json:"actor" doc:"Operator, or the process of dlqd that decided."`
	Reason string    `json:"reason" doc:"The decision in a sentence, with its figures."`
	Note   string    `json:"note,omitempty" doc:"Note of the operator."`
}

// maxDecisions limits the decisions in the report of a run.
const maxDecisions = 200

// Forecast is the result of the dry run when a run was started.
type Forecast struct {
	Entries      int64             `json:"entries" doc:"Number of entries."`
	Seconds      float64           `json:"seconds" doc:"Estimated time to send them, in seconds."`
	ByQueue      map[string]int64  `json:"byQueue" doc:"Number of entries by queue."`
	Unhealthy    []string          `json:"unhealthy" doc:"Reasons not to start the run at that time."`
	Estimates    []Estimate        `json:"estimates,omitempty" doc:"Estimates of the dry run."`
	Ends         *Ending           `json:"ends,omitempty" doc:"When the run would have ended, in seconds from its start; absent if that was not known."`
	Expect       *Expectation      `json:"expect,omitempty" doc:"How many entries will recover, as far as earlier replay runs told."`
	Load         []Load            `json:"load,omitempty" doc:"Redeliveries over time by queue: the 20 queues with the most entries."`
	Destinations []DestinationLoad `json:"destinations,omitempty" doc:"Redeliveries over time by destination: the 20 destinations with the most entries."`
	Subscribers  *Subscribers      `json:"subscribers,omitempty" doc:"How many subscribers the messages concern, without names."`
	Unworked     []UnworkedKind    `json:"unworkedKinds,omitempty" doc:"Kinds that no worker seemed to know."`
	Readers      []Readers         `json:"readers,omitempty" doc:"Who read the topics that records are published to."`
	Changes      []ForecastChange  `json:"changes,omitempty" doc:"For an approved run: figures that had changed by more than 10 % since the request."`
}

// Start starts a run. Unless in.Force is set, it returns an error if the preview fails or gives reasons not to start
// the run now. An invalid request is an error even with in.Force.
func (r *Replayer) Start(ctx context.Context, in *Request) (*Run, error) {
	return r.start(ctx, in, nil)
}

// start starts a run. It calls before, if not nil, first in the transaction that starts it. It starts no run that is
// invalid, nor, unless in.Force is set, a run whose preview fails or finds a condition unmet (ErrUnhealthy).
func (r *Replayer) start(ctx context.Context, in *Request, before func(tx transaction) error) (*Run, error) {
	preview, err := r.Preview(ctx, in)
	if _, refused := errors.AsType[*deadletter.MoveError](err); err != nil && (!in.Force || refused) {
		return nil, err
	}
	if err == nil && len(preview.Unhealthy) > 0 && !in.Force {
		return nil, &deadletter.MoveError{
			Kind: deadletter.ErrUnhealthy, Detail: "replay run not started: " + strings.Join(preview.Unhealthy, "; "),
			Hint: "Wait until they have passed, or start the run with force.",
		}
	}
	if err := r.refuseOthers(ctx, in, preview); err != nil {
		return nil, err
	}
	in.Forecast = nil // stays nil if a forced run starts although its preview failed
	if preview != nil {
		in.Forecast = &Forecast{
			Entries: preview.Total, Seconds: preview.Seconds, ByQueue: preview.ByQueue, Unhealthy: preview.Unhealthy,
			Estimates: preview.Estimates, Expect: preview.Expect, Ends: preview.Ends,
			Load:         preview.Load[:min(len(preview.Load), shownGroups)],
			Destinations: preview.Destinations[:min(len(preview.Destinations), shownGroups)],
			Unworked:     preview.Unworked, Readers: preview.Readers,
		}
		if preview.Subscribers != nil { // without names: others who see the run may not see these
			subscribers := *preview.Subscribers
			subscribers.Largest = nil
			in.Forecast.Subscribers = &subscribers
		}
		if in.Forecast.Ends != nil {
			in.Forecast.Ends = &Ending{Earliest: preview.Ends.Earliest, Latest: preview.Ends.Latest}
		}
	}
	params := dbsqlc.StartReplayParams{
		Filter: in.Filter, Actor: in.Act.Actor, Note: in.Act.Note, AllEntries: in.All,
		NewestFirst: in.NewestFirst, BatchSize: int32(cmp.Or(in.BatchSize, DefaultBatchSize)),
		Rate: in.Rate, Concurrency: int32(in.Concurrency), Patch: in.JSONPatch, MergePatch: in.MergePatch,
		Queue: in.Queue, Destination: in.Destination, Checkpoint: in.Checkpoint,
		Force: in.Force, StopAt: cmp.Or(in.StopAt, DefaultStopAt), StopOf: stopWindow,
		Progressive: in.Progressive, StepDeadline: cmp.Or(in.StepDeadline, DefaultStepDeadline.Seconds()),
		SkipStale: in.SkipStale, SkipSuperseded: in.SkipSuperseded,
	}
	var id uuid.UUID
	err = inTx(ctx, r.Store, func(tx transaction) error {
		if before != nil {
			if err := before(tx); err != nil {
				return err
			}
		}
		started, err := tx.StartReplay(ctx, params)
		if err != nil {
			return err
		}
		id = started
		if err := in.ForFix.record(ctx, tx, id); err != nil || in.Forecast == nil {
			return err
		}
		if err := in.Forecast.compare(ctx, tx); err != nil {
			return err
		}
		forecast, err := json.Marshal(in.Forecast)
		if err != nil {
			return err
		}
		return tx.SetForecast(ctx, dbsqlc.SetForecastParams{ID: id, Forecast: forecast})
	})
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	telemetry.StartRun(ctx, r.Tracer, id).End() // redeliveries link to this span
	r.wake()
	return r.Get(ctx, id)
}

func (r *Replayer) wake() {
	if r.Wake != nil {
		r.Wake()
	}
}

// Get returns a run with its progress, or [deadletter.ErrNotFound].
func (r *Replayer) Get(ctx context.Context, id uuid.UUID) (*Run, error) {
	runs, err := r.runs(ctx, []uuid.UUID{id})
	if err != nil {
		return nil, err
	}
	if len(runs) == 0 {
		return nil, &deadletter.MoveError{
			Kind: deadletter.ErrNotFound, Detail: fmt.Sprintf("replay run %s: there is no such run", id),
		}
	}
	if runs[0].Progressive {
		return runs[0], r.addGroups(ctx, runs[0])
	}
	return runs[0], nil
}

// addGroups adds the groups of a progressive run and up to maxDecisions decisions about them.
func (r *Replayer) addGroups(ctx context.Context, run *Run) error {
	queries := dbsqlc.New(r.Store.DB())
	groups, err := queries.RunGroups(ctx, run.ID)
	if err != nil {
		return err
	}
	for i := range groups {
		g := &groups[i]
		run.Groups = append(run.Groups, RunGroup{
			Number: g.Number, Queue: g.Queue, Fingerprint: g.Fingerprint, Title: g.Title, ErrorType: g.ErrorType,
			State: g.State, Reason: g.Reason, Step: g.Step, Quota: g.Quota, Entries: g.Entries, Sent: g.Sent,
			Succeeded: g.Succeeded, Failed: g.Failed, Skipped: g.Skipped,
		})
	}
	decisions, err := queries.RunDecisions(ctx, dbsqlc.RunDecisionsParams{ID: run.ID, Most: maxDecisions})
	if err != nil {
		return err
	}
	for i := range decisions {
		d := &decisions[i]
		run.Decisions = append(run.Decisions, RunDecision{
			At: d.At, Group: d.Number, Act: d.Act, Actor: d.Actor, Reason: d.Reason, Note: d.Note,
		})
	}
	return nil
}

// outcomes caches how many redeliveries of a run succeeded and failed. A run is cached once it and all its redeliveries
// have ended, so that the database counts them once.
type outcomes struct {
	mu sync.Mutex
	of map[uuid.UUID][2]int64 // succeeded, failed
}

// maxOutcomes limits the number of cached runs.
const maxOutcomes = 1000

// cached returns the cached outcomes of some runs.
func (o *outcomes) cached(ids []uuid.UUID) map[uuid.UUID][2]int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := map[uuid.UUID][2]int64{}
	for _, id := range ids {
		if counts, ok := o.of[id]; ok {
			found[id] = counts
		}
	}
	return found
}

// store caches the outcomes of a run if the run and all its redeliveries have ended.
func (o *outcomes) store(run *Run) {
	if run.Status != "completed" && run.Status != "cancelled" || run.Succeeded+run.Failed < run.Replayed {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of == nil || len(o.of) >= maxOutcomes {
		o.of = map[uuid.UUID][2]int64{}
	}
	o.of[run.ID] = [2]int64{run.Succeeded, run.Failed}
}

// runs returns runs by id, newest first. It omits runs that do not exist or that the caller may not
// see.
func (r *Replayer) runs(ctx context.Context, ids []uuid.UUID) ([]*Run, error) {
	known := r.outcomes.cached(ids)
	rows, err := dbsqlc.New(r.Store.DB()).RunsByID(ctx,
		dbsqlc.RunsByIDParams{Ids: ids, Known: slices.AppendSeq([]uuid.UUID{}, maps.Keys(known))})
	if err != nil {
		return nil, err
	}
	runs := make([]*Run, len(rows))
	for i := range rows {
		row := &rows[i]
		if counts, ok := known[row.ID]; ok {
			row.Succeeded, row.Failed = counts[0], counts[1]
		}
		if runs[i], err = runOf(row); err != nil {
			return nil, err
		}
		r.outcomes.store(runs[i])
	}
	return runs, nil
}

func runOf(row *dbsqlc.RunsByIDRow) (*Run, error) {
	var request struct {
		Filter     json.RawMessage `json:"filter"`
		Patch      json.RawMessage `json:"patch"`
		MergePatch json.RawMessage `json:"mergePatch"`
	}
	if err := json.Unmarshal(row.Details, &request); err != nil {
		return nil, err
	}
	run := &Run{
		ID: row.ID, Status: row.Status, Reason: row.Reason, Held: row.Held,
		Filter: request.Filter, Total: row.Total, Replayed: row.Replayed, Succeeded: row.Succeeded,
		Failed: row.Failed, Skipped: row.Skipped, Rate: row.Rate, BatchSize: row.BatchSize,
		Concurrency: row.Concurrency, Queue: row.Queue, Destination: row.Destination,
		Checkpoint: row.Checkpoint, Patch: request.Patch, MergePatch: request.MergePatch,
		Actor: row.Actor, Origin: row.Origin, CreatedAt: row.CreatedAt, FinishedAt: row.FinishedAt,
		Progressive: row.Progressive, SkipStale: row.SkipStale, SkipSuperseded: row.SkipSuperseded,
		NotKnown: row.NotKnown, KeyedJobs: row.KeyedJobs,
	}
	if err := errors.Join(json.Unmarshal(row.Skips, &run.Skips), json.Unmarshal(row.Figures, &run.Figures)); err != nil {
		return nil, err
	}
	if row.Progressive {
		run.StepDeadline = row.StepDeadline
	}
	if row.Note != "" {
		run.Note = &row.Note
	}
	if err := json.Unmarshal(row.Forecast, &run.Forecast); err != nil {
		return nil, err
	}
	if row.Sending > 0 {
		run.PerSecond = float64(run.Replayed) / row.Sending
	}
	rate := run.PerSecond
	if run.Rate != nil && (rate == 0 || *run.Rate < rate) {
		rate = *run.Rate // the rate was just changed, or nothing has been sent yet
	}
	if left := float64(run.Total - run.Replayed - run.Skipped); left > 0 && rate > 0 && run.Status == "running" {
		run.SecondsLeft = left / rate
	}
	return run, nil
}

// List returns up to most runs, newest first.
func (r *Replayer) List(ctx context.Context, most int) ([]*Run, error) {
	ids, err := dbsqlc.New(r.Store.DB()).ReplayRuns(ctx, int32(most))
	if err != nil {
		return nil, err
	}
	return r.runs(ctx, ids)
}

// RunEntry is an entry of a run with its outcome in the run.
type RunEntry struct {
	ID          uuid.UUID  `json:"id" doc:"The entry."`
	Outcome     string     `json:"outcome" enum:"succeeded,failed,skipped,to_go" doc:"to_go: the redelivery is in progress or has not been sent yet."`
	Detail      string     `json:"detail,omitempty" doc:"Error of the redelivery, or the reason why the entry was skipped."`
	JobID       *int64     `json:"jobId,omitempty" doc:"Job of the redelivery."`
	EndedAt     *time.Time `json:"endedAt,omitempty" doc:"Time at which the redelivery ended or the entry was skipped."`
	Status      string     `json:"status,omitempty" doc:"Status of the entry now; absent if the entry was deleted."`
	Queue       string     `json:"queue,omitempty" doc:"Queue of the entry."`
	Kind        string     `json:"kind,omitempty" doc:"Kind of the entry."`
	Fingerprint string     `json:"fingerprint,omitempty" doc:"Failure group of the entry now."`
	ErrorClass  string     `json:"errorClass,omitempty" doc:"Class of the failure of this redelivery, if it failed and was judged."`
	FailedAs    string     `json:"failedAs,omitempty" doc:"Failure group of the failure of this redelivery."`
	Group       *int32     `json:"group,omitempty" doc:"Number of the group of a progressive run."`
	Closure     string     `json:"closure" enum:"recovered,failed_same,failed_new,failed,skipped,taken_over,expired,in_progress,to_go" doc:"What became of it. failed_same: it failed in its failure group at the start of the run. failed_new: it failed in another one (failedAs). failed: one of the groups is not known. taken_over: a person moved it before its turn. expired: it was expired before its turn."`
	SentAt      *time.Time `json:"sentAt,omitempty" doc:"Time at which the run sent it."`
	TakenBy     string     `json:"takenBy,omitempty" doc:"Who took it over."`
	Was         string     `json:"was,omitempty" doc:"Its failure group at the start of the run."`
}

// Entries returns a page of a run's entries, most recently captured first. outcome, if not empty, and before, if not
// nil, filter them. Entries returns [deadletter.ErrNotFound] if there is no such run or the caller may not see it.
func (r *Replayer) Entries(ctx context.Context, id uuid.UUID, outcome string, before *uuid.UUID,
	most int,
) ([]RunEntry, error) {
	rows, err := dbsqlc.New(r.Store.DB()).ReplayEntries(ctx, dbsqlc.ReplayEntriesParams{
		ID: id, Outcome: outcome, Before: before, Most: int32(most),
	})
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		if _, err := r.Get(ctx, id); err != nil { // the run does not exist, or the caller may not see it
			return nil, err
		}
	}
	entries := make([]RunEntry, len(rows))
	for i := range rows {
		row := &rows[i]
		entries[i] = RunEntry{
			ID: row.ID, Outcome: row.Outcome, Detail: row.Detail, JobID: row.JobID, EndedAt: row.EndedAt,
			Status: row.Status, Queue: row.Queue, Kind: row.Kind, Fingerprint: row.Fingerprint,
			ErrorClass: row.ErrorClass, FailedAs: row.FailedAs, Group: row.GroupNumber,
			Closure: row.Closure, SentAt: row.SentAt, TakenBy: row.TakenBy, Was: row.Was,
		}
	}
	return entries, nil
}

// Control pauses, resumes or cancels a run.
func (r *Replayer) Control(ctx context.Context, id uuid.UUID, verb, actor string) error {
	defer r.wake()
	return deadletter.AsMoveError(inTx(ctx, r.Store, func(tx transaction) error {
		return tx.MoveReplay(ctx, dbsqlc.MoveReplayParams{Verb: verb, ID: id, Actor: actor})
	}))
}

// Steer moves groups of a progressive run: "go-on" lets them go on, "back" lets them go on with a smaller step, "end"
// ends them. If groups is empty, it moves all groups that are held or stopped.
func (r *Replayer) Steer(ctx context.Context, id uuid.UUID, verb string, groups []int32, act deadletter.Act) error {
	defer r.wake()
	if len(groups) == 0 {
		groups = nil // NULL stands for all groups that are held or stopped
	}
	return deadletter.AsMoveError(inTx(ctx, r.Store, func(tx transaction) error {
		return tx.SteerReplay(ctx, dbsqlc.SteerReplayParams{
			Verb: verb, ID: id, Groups: groups, Actor: act.Actor, Note: act.Note,
		})
	}))
}

// SetRate changes the rate of a run that has not ended; 0 means no limit.
func (r *Replayer) SetRate(ctx context.Context, id uuid.UUID, perSecond float64, actor string) error {
	return deadletter.AsMoveError(inTx(ctx, r.Store, func(tx transaction) error {
		return tx.SetReplayRate(ctx, dbsqlc.SetReplayRateParams{ID: id, Rate: perSecond, Actor: actor})
	}))
}
