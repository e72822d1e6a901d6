package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"gonum.org/v1/gonum/mathext"

	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

const (
	// sampleSize is the number of entries from which a preview estimates. If the filter selects fewer entries, the counts
	// are exact.
	sampleSize = 1000
	// patchSample is the number of sampled entries whose payloads the preview reads, to apply the patch.
	patchSample = 100
	// longAttempt is the duration from which an attempt is likely to have done part of its work before it failed: most
	// refusals come within a second, and many clients give up after 5 s.
	longAttempt = 5 * time.Second
	// orderTime limits the search for earlier jobs of ordering keys, which reads all entries that the filter selects.
	orderTime = 500 * time.Millisecond
	// outside is the probability that the true count is below its interval, and the probability that it is above.
	outside = 0.025
)

// Values of [Estimate].What.
const (
	estimateStale      = "stale"
	estimateSuperseded = "superseded"
	estimateNotKnown   = "superseded_not_known"
	estimateOtherRun   = "other_run"
	estimatePatchFails = "patch_fails"
	estimateRanLong    = "ran_long"
	estimateRanUnknown = "ran_not_known"
	estimateRepeated   = "repeated"
	estimateStepsDone  = "steps_done"
	estimateStage      = "stage_reached"
	estimateAnswered   = "answered"
	estimateNoAnswer   = "no_answer"
	// Entries that the run sends, entries that it skips (the prefix, then the identifier of the reason), and entries that
	// an operator works on.
	estimateGoes     = "goes"
	estimateSkipped  = "skipped_"
	estimateLiveJob  = "live_job"
	estimateBehind   = "behind"
	estimateKeyed    = "keyed"
	estimateAssigned = "assigned"
	estimateParked   = "parked"
	estimateInReview = "in_review"
	// Jobs of applications that wait for an earlier one of their ordering key.
	estimateBehindJob        = "behind_job"
	estimateBehindJobUnknown = "behind_job_not_known"
)

// Reasons why a run skips an entry. The database stores these identifiers (replay_run_entries.reason): do not change
// them.
const (
	reasonStale      = "stale"
	reasonSuperseded = "superseded"
	reasonHeld       = "held"
	reasonPatch      = "patch"
	reasonCheckpoint = "checkpoint"
	reasonRejected   = "rejected"
)

// Estimate is a number of entries, estimated from a sample.
type Estimate struct {
	What    string `json:"what" enum:"goes,skipped_stale,skipped_superseded,skipped_held,live_job,behind,keyed,behind_job,behind_job_not_known,assigned,parked,in_review,stale,superseded,superseded_not_known,other_run,patch_fails,ran_long,ran_not_known,repeated,steps_done,stage_reached,answered,no_answer" doc:"What is counted. goes: the run sends it, if nothing changes and the patch applies. skipped_stale, skipped_superseded: the run skips it as out of date, or because a later job has done the work. skipped_held: the policy starts the run, and an operator has the entry. live_job: skipped unless force, because another job has its unique key. behind: another message of its ordering key is before it, so that it goes only after that one's success. keyed: a job of an application whose args have the ordering key that the policy names; live jobs of the key pass it, and sequences of River Pro are left to River. behind_job: an earlier job of its ordering key is among the entries, so that it goes only after that one's success. behind_job_not_known: whether an earlier one exists is not known, because the search took too long. assigned, parked, in_review: an operator has it; it goes all the same. stale: the work is out of date. superseded: a later job has done the work. superseded_not_known: whether one has is not known. other_run: another replay run has not sent the entry yet, or holds it. patch_fails: the patch does not apply. ran_long: its last attempt ran for more than 5 s. ran_not_known: it is not known how long its last attempt ran. repeated: it was attempted more than once, redeliveries included. steps_done: its resumable job has completed a step. stage_reached: a worker reported the stage. answered: the receiver answered its last attempt, with an error. no_answer: none came, and the receiver may have done the work."`
	Stage   string `json:"stage,omitempty" doc:"Of stage_reached: the stage."`
	Entries int64  `json:"entries" doc:"Estimated number of entries."`
	Low     int64  `json:"low" doc:"Lower end of the 95 % interval (Clopper-Pearson)."`
	High    int64  `json:"high" doc:"Upper end of the 95 % interval."`
	Sampled int64  `json:"sampled" doc:"Number of entries looked at, at random. If it is the total of the preview, entries is exact."`
}

// Exact reports whether the sample was all of the total entries.
func (e Estimate) Exact(total int64) bool { return e.Sampled >= total }

// estimateWords describes the entries that each estimate counts.
var estimateWords = map[string]string{
	estimateStale:      "are out of date",
	estimateSuperseded: "have been done by a later job",
	estimateNotKnown:   "may have been done by a later job: no index of River answers",
	estimateOtherRun:   "are also in another replay run, which skips what this run has sent",
	estimatePatchFails: "will be skipped, because the patch does not apply",
	estimateRanLong: "ran for more than " + longAttempt.String() +
		" before the failure, and may have done something",
	estimateRanUnknown:                 "ran for an unknown time before the failure",
	estimateRepeated:                   "were attempted more than once",
	estimateStepsDone:                  "completed a step of a resumable job",
	estimateAnswered:                   "were answered by the receiver, with an error",
	estimateNoAnswer:                   "got no answer from the receiver, which may have done the work",
	estimateGoes:                       "will be sent",
	estimateSkipped + reasonStale:      "will be skipped, because the work is out of date",
	estimateSkipped + reasonSuperseded: "will be skipped, because a later job has done the work",
	estimateSkipped + reasonHeld: "will be skipped, because an operator has the dead letter, or dlqd does not redeliver " +
		"it automatically",
	estimateLiveJob: "will be skipped unless forced, because another job has the unique key",
	estimateBehind:  "will wait for the success of an earlier message of the ordering key",
	estimateKeyed: "have an ordering key in the args, whose order the run keeps; live jobs of the key pass, and " +
		"sequences of River Pro are left to River",
	estimateBehindJob:        "will wait for the success of an earlier job of the ordering key",
	estimateBehindJobUnknown: "may have to wait for an earlier job of the ordering key: the search took too long",
	estimateAssigned:         "are assigned to an operator; this does not hold them",
	estimateParked:           "were parked by an operator; this does not hold them",
	estimateInReview:         "are in review by an operator; this does not hold them",
}

// Text describes the estimate, of total entries, in a sentence.
func (e Estimate) Text(w Words, total int64) string {
	words := estimateWords[e.What]
	if e.What == estimateStage {
		words = "had reached stage " + e.Stage
	}
	if e.Entries == 1 {
		verb, rest, _ := strings.Cut(words, " ")
		if singular := map[string]string{"are": "is", "were": "was", "have": "has"}[verb]; singular != "" {
			words = singular + " " + strings.Replace(rest, "hold them", "hold it", 1)
		}
	}
	if e.Exact(total) {
		return fmt.Sprintf("%s of %s %s", w.Number(e.Entries), w.Number(total), words)
	}
	return fmt.Sprintf("about %s (%s to %s) of %s %s; estimated from %s at random", w.Number(e.Entries), w.Number(e.Low),
		w.Number(e.High), w.Number(total), words, w.Number(e.Sampled))
}

// estimate returns the estimate for total entries if hits of the sampled entries have the property named what. It is
// exact if all entries were sampled.
func estimate(what string, hits, sampled, total int64) Estimate {
	e := Estimate{What: what, Entries: hits, Low: hits, High: hits, Sampled: sampled}
	if sampled >= total || sampled == 0 {
		return e
	}
	k, n, all := float64(hits), float64(sampled), float64(total)
	e.Entries = int64(math.Round(all * k / n))
	if hits > 0 {
		e.Low = max(hits, int64(all*mathext.InvRegIncBeta(k, n-k+1, outside)))
	}
	e.High = total - (sampled - hits)
	if hits < sampled {
		e.High = min(e.High, int64(math.Ceil(all*mathext.InvRegIncBeta(k+1, n-k, 1-outside))))
	}
	return e
}

// spread returns at most n of the ids, evenly spaced.
func spread(ids []uuid.UUID, n int) []uuid.UUID {
	if len(ids) <= n {
		return ids
	}
	chosen := make([]uuid.UUID, n)
	for i := range chosen {
		chosen[i] = ids[i*len(ids)/n]
	}
	return chosen
}

// judged returns a map with the value false for each entry to which the preview applies the patch, or for all entries
// if there is no patch.
func judged(ids []uuid.UUID, fails map[uuid.UUID]bool) map[uuid.UUID]bool {
	goes := map[uuid.UUID]bool{}
	for _, id := range ids {
		if _, applied := fails[id]; applied || fails == nil {
			goes[id] = false
		}
	}
	return goes
}

// addEstimates adds estimates from a sample of the entries, whose ids are ordered by failure group. It returns whether
// the run sends each sampled entry. With a patch, the result has only the entries to which the preview applies the
// patch. It also sets p.Skips and the expected end of the run.
func (r *Replayer) addEstimates(ctx context.Context, tx transaction, in *Request, ids []uuid.UUID, p *Preview) (
	map[uuid.UUID]bool, error,
) {
	places, err := placesOf(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	skips, err := in.skips(ctx, tx, places)
	if err != nil {
		return nil, err
	}
	p.Skips = skips.Skips
	outOfDate, err := stale(ctx, tx.Queries, r.Planner().Policy(), ids, time.Now())
	if err != nil {
		return nil, err
	}
	done, unknown, err := superseded(ctx, tx.Queries, ids)
	if err != nil {
		return nil, err
	}
	held := map[uuid.UUID]string{}
	if in.ForFix != nil {
		if held, err = notForPolicy(ctx, tx, r.Planner().Policy(), in.Filter, ids); err != nil {
			return nil, err
		}
	}
	rows, err := tx.BeforeReplay(ctx, ids)
	if err != nil {
		return nil, err
	}
	fails, err := in.failures(ctx, tx, spread(ids, patchSample))
	if err != nil {
		return nil, err
	}
	counts, goes := map[string]int{}, judged(ids, fails)
	var seconds []float64
	for i := range rows {
		row := &rows[i]
		_, isStale := outOfDate[row.EntryID]
		_, isDone := done[row.EntryID]
		place := places[row.EntryID]
		switch { // in the order of Runner.needless
		case held[row.EntryID] != "":
			counts[estimateSkipped+reasonHeld]++
		case isStale && skips.skipsStale(place):
			counts[estimateSkipped+reasonStale]++
		case isDone && skips.skipsSuperseded(place):
			counts[estimateSkipped+reasonSuperseded]++
		case fails[row.EntryID]:
			counts[estimatePatchFails]++
		default:
			_, isKnown := goes[row.EntryID]
			switch {
			case !isKnown:
			case row.LiveJob && !in.Force:
				counts[estimateLiveJob]++
			default:
				counts[estimateGoes]++
				goes[row.EntryID] = true
			}
		}
		for what, is := range map[string]bool{
			estimateStale: isStale, estimateSuperseded: isDone, estimateOtherRun: row.OtherRun, estimateBehind: row.Behind,
			estimateAssigned: row.AssignedTo != "", estimateParked: row.ParkedBy != "", estimateInReview: row.InReview != "",
			estimateRanLong: row.Seconds > longAttempt.Seconds(), estimateRanUnknown: row.Seconds < 0,
			estimateRepeated: row.Attempts > 1, estimateStepsDone: row.Checkpoint,
		} {
			if is {
				counts[what]++
			}
		}
		if row.Seconds >= 0 {
			seconds = append(seconds, row.Seconds)
		}
	}
	counts[estimateNotKnown] = len(unknown)
	add := func(what string, hits, sampled int) {
		p.Estimates = append(p.Estimates, estimate(what, int64(hits), int64(sampled), p.Total))
	}
	for _, what := range []string{
		estimateGoes, estimateSkipped + reasonHeld, estimateSkipped + reasonStale, estimateSkipped + reasonSuperseded,
		estimateLiveJob, estimateBehind, estimateStale, estimateSuperseded, estimateNotKnown, estimateOtherRun,
		estimateAssigned, estimateParked, estimateInReview, estimateRanLong, estimateRanUnknown, estimateRepeated,
		estimateStepsDone,
	} {
		always := what == estimateGoes || what == estimateStale || what == estimateSuperseded
		sampled := len(ids)
		if what == estimateGoes || what == estimateLiveJob {
			sampled = len(goes)
		}
		if counts[what] > 0 || always {
			add(what, counts[what], sampled)
		}
	}
	far, err := tx.HowFar(ctx, ids)
	if err != nil {
		return nil, err
	}
	for i := range far {
		add(far[i].What, int(far[i].Entries), len(ids))
		p.Estimates[len(p.Estimates)-1].Stage = far[i].Stage
	}
	if err := r.addEnding(ctx, tx, in, seconds, p); err != nil {
		return nil, err
	}
	if counts[estimatePatchFails] > 0 {
		add(estimatePatchFails, counts[estimatePatchFails], len(goes))
	}
	return goes, nil
}

// addKeyed estimates how many entries are jobs with an ordering key, and how many of these are behind an earlier one.
func (p *Preview) addKeyed(ctx context.Context, tx transaction, filter json.RawMessage, ids []uuid.UUID) error {
	keyed, err := tx.CountKeyed(ctx, ids)
	if err != nil || keyed == 0 {
		return err
	}
	what, behind := estimateBehindJob, int64(0)
	cancelled, err := limited(ctx, tx.Queries, orderTime, func() (err error) {
		behind, err = tx.CountBehind(ctx, dbsqlc.CountBehindParams{Filter: filter, Ids: ids})
		return err
	})
	if cancelled {
		what, behind = estimateBehindJobUnknown, keyed
	}
	p.Estimates = append(p.Estimates, estimate(estimateKeyed, keyed, int64(len(ids)), p.Total))
	if behind > 0 {
		p.Estimates = append(p.Estimates, estimate(what, behind, int64(len(ids)), p.Total))
	}
	return err
}

// skips returns which work a run skips. The request decides; where it sets nothing, the policy's defaults for the
// queues and kinds in places apply.
func (in *Request) skips(ctx context.Context, tx transaction, places map[uuid.UUID]place) (skips skipping, err error) {
	skips.stale = in.SkipStale != nil && *in.SkipStale
	skips.superseded = in.SkipSuperseded != nil && *in.SkipSuperseded
	queues, kinds := map[string]bool{}, map[string]bool{}
	for _, place := range places {
		queues[place.queue], kinds[place.kind] = true, true
	}
	raw, err := tx.SkipDefaults(ctx, dbsqlc.SkipDefaultsParams{
		Stale: in.SkipStale, Superseded: in.SkipSuperseded,
		Queues: slices.Collect(maps.Keys(queues)), Kinds: slices.Collect(maps.Keys(kinds)),
	})
	if err != nil {
		return skips, err
	}
	return skips, json.Unmarshal(raw, &skips.Skips)
}

// failures returns the entries to which the patch does not apply. The result is nil without a patch, and also if data
// is masked, because a result could reveal values.
func (p *Patch) failures(ctx context.Context, tx transaction, ids []uuid.UUID) (map[uuid.UUID]bool, error) {
	if p.JSONPatch == nil && p.MergePatch == nil {
		return nil, nil
	}
	if masked, err := tx.IsMasked(ctx); err != nil || masked {
		return nil, err
	}
	events, err := tx.Events(ctx, ids)
	fails := make(map[uuid.UUID]bool, len(events))
	for i := range events {
		_, err := p.Event(events[i].JobKind, events[i].Event)
		fails[events[i].ID] = err != nil
	}
	return fails, err
}

// UnworkedKind is a kind of job that no worker seems to know.
type UnworkedKind struct {
	Kind    string `json:"kind" doc:"Kind of the jobs."`
	Unknown int64  `json:"unknown" doc:"Number of sampled entries of the kind whose last attempt failed because the kind is not registered."`
	Sampled int64  `json:"sampled" doc:"Number of sampled entries of the kind."`
}

// text describes the kind and the evidence.
func (k *UnworkedKind) text(w Words) string {
	return fmt.Sprintf("no worker seems to know kind %s: inferred from %s of %s last attempts, with the latest of them",
		k.Kind, w.Number(k.Unknown), w.Number(k.Sampled))
}

// addUnworked adds the kinds of the sample that no worker seems to know.
func (p *Preview) addUnworked(ctx context.Context, tx transaction, ids []uuid.UUID) error {
	rows, err := tx.UnworkedKinds(ctx, ids)
	for i := range rows {
		p.Unworked = append(p.Unworked, UnworkedKind{Kind: rows[i].Kind, Unknown: rows[i].Unknown, Sampled: rows[i].Entries})
	}
	return err
}

// needsApproval returns why a run needs the approval of a second person, or "".
func needsApproval(ctx context.Context, tx transaction, in *Request, filter json.RawMessage) (string, error) {
	operations := []string{"replay"}
	if in.JSONPatch != nil || in.MergePatch != nil {
		operations = append(operations, "patch")
	}
	if in.Queue != "" || in.Destination != "" {
		operations = append(operations, "redirect")
	}
	why, err := tx.NeedsApproval(ctx, dbsqlc.NeedsApprovalParams{Operations: operations, Filter: filter, Queue: in.Queue})
	return strings.TrimPrefix(why, "replay: "), err
}

// addEnding estimates when the run will have ended, or sets p.EndsUnknown to the reason why that is not known. seconds
// are the durations of the last attempts of sampled entries.
func (r *Replayer) addEnding(ctx context.Context, tx transaction, in *Request, seconds []float64, p *Preview) error {
	end, err := tx.ReplayEnds(ctx, dbsqlc.ReplayEndsParams{
		Entries: p.Total, Seconds: seconds, Rate: in.Rate, Concurrency: float64(in.Concurrency),
		Workers: r.workers(in, p), Progressive: in.Progressive,
	})
	if p.EndsUnknown = end.NotKnown; err != nil || p.EndsUnknown != "" {
		return err
	}
	after := func(s float64) time.Time { return time.Now().Add(time.Duration(s * float64(time.Second))) }
	p.Ends = &Ending{
		Earliest: end.Earliest, Latest: end.Latest, EndsFrom: after(end.Earliest), EndsBy: after(end.Latest),
	}
	return nil
}

// workers returns the average number of redeliveries of the run that one process of dlqd works at a time. It assumes
// that the run ends when its slowest queue ends. It returns 0 if an application works any of the queues.
func (r *Replayer) workers(in *Request, p *Preview) float64 {
	known := r.Planner().Policy()
	longest := 0.0
	for queue, entries := range p.ByQueue {
		if queue = cmp.Or(in.Queue, queue); known.Queues[queue] == nil {
			return 0
		}
		if in.Queue != "" {
			entries = p.Total
		}
		longest = max(longest, float64(entries)/float64(known.Concurrency(queue)))
	}
	if longest == 0 {
		return 0
	}
	return float64(p.Total) / longest
}
