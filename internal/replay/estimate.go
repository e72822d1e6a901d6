package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/google/uuid"
	"gonum.org/v1/gonum/mathext"

	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

const (
	// sampleSize is the number of entries from which a preview estimates. With fewer entries, its counts are exact.
	sampleSize = 1000
	// patchSample is the number of those to which a preview applies the patch, which reads their payloads.
	patchSample = 100
	// longAttempt is the duration from which on an attempt may well have done something before it failed: most
	// refusals come within a second, and many clients give up after 5 s.
	longAttempt = 5 * time.Second
	// outside is the probability that a count is outside of its interval, on each side.
	outside = 0.025
)

// What an [Estimate] counts.
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
)

// Estimate is a number of entries, estimated from a sample.
type Estimate struct {
	What    string `json:"what" enum:"stale,superseded,superseded_not_known,other_run,patch_fails,ran_long,ran_not_known,repeated,steps_done" doc:"What is counted. stale: the work is out of date. superseded: a later job has done the work. superseded_not_known: whether one has is not known. other_run: another replay run has not sent the entry yet, or holds it. patch_fails: the patch does not apply. ran_long: its last attempt ran for more than 5 s. ran_not_known: it is not known how long its last attempt ran. repeated: it was attempted more than once, redeliveries included. steps_done: its resumable job has completed a step."`
	Entries int64  `json:"entries" doc:"Estimated number of entries."`
	Low     int64  `json:"low" doc:"Lower end of the 95 % interval (Clopper-Pearson)."`
	High    int64  `json:"high" doc:"Upper end of the 95 % interval."`
	Sampled int64  `json:"sampled" doc:"Number of entries looked at, at random. If it is the total of the preview, entries is exact."`
}

// Exact reports whether every one of total entries was looked at.
func (e Estimate) Exact(total int64) bool { return e.Sampled >= total }

// Text describes the estimate, of total entries.
func (e Estimate) Text(total int64) string {
	of := map[string]string{
		estimateStale:      "out of date",
		estimateSuperseded: "done by a later job",
		estimateNotKnown:   "perhaps done by a later job: no index of River answers",
		estimateOtherRun:   "also in another replay run, which skips them once this one has sent them",
		estimatePatchFails: "skipped, because the patch does not apply",
		estimateRanLong:    "ran for more than " + longAttempt.String() + " before they failed: they may have done something",
		estimateRanUnknown: "it is not known how long the last attempt ran",
		estimateRepeated:   "attempted more than once",
		estimateStepsDone:  "completed a step of their resumable jobs",
	}[e.What]
	if e.Exact(total) {
		return fmt.Sprintf("%d: %s", e.Entries, of)
	}
	return fmt.Sprintf("about %d (%d to %d): %s; estimated from %d at random", e.Entries, e.Low, e.High, of, e.Sampled)
}

// estimate returns how many of total entries are like hits of sampled ones.
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

// spread returns at most n of some ids, at equal distances.
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

// addEstimates adds what is estimated from a sample of the entries, which is in the order of their groups.
func (r *Replayer) addEstimates(ctx context.Context, tx transaction, in *Request, ids []uuid.UUID, p *Preview) error {
	outOfDate, err := stale(ctx, tx.Queries, r.Planner().Policy(), ids, time.Now())
	if err != nil {
		return err
	}
	done, unknown, err := superseded(ctx, tx.Queries, ids)
	if err != nil {
		return err
	}
	elsewhere, err := tx.InRuns(ctx, ids)
	if err != nil {
		return err
	}
	add := func(what string, hits, sampled int) {
		p.Estimates = append(p.Estimates, estimate(what, int64(hits), int64(sampled), p.Total))
	}
	add(estimateStale, len(outOfDate), len(ids))
	add(estimateSuperseded, len(done), len(ids))
	if len(unknown) > 0 {
		add(estimateNotKnown, len(unknown), len(ids))
	}
	if elsewhere > 0 {
		add(estimateOtherRun, int(elsewhere), len(ids))
	}
	ran, err := tx.RanBefore(ctx, dbsqlc.RanBeforeParams{Ids: ids, LongSeconds: int32(longAttempt / time.Second)})
	if err != nil {
		return err
	}
	for _, count := range []struct {
		what string
		hits int64
	}{
		{estimateRanLong, ran.RanLong},
		{estimateRanUnknown, ran.RanNotKnown},
		{estimateRepeated, ran.Repeated},
		{estimateStepsDone, ran.StepsDone},
	} {
		if count.hits > 0 {
			add(count.what, int(count.hits), len(ids))
		}
	}
	if in.JSONPatch == nil && in.MergePatch == nil {
		return nil
	}
	fails, applied, err := in.failures(ctx, tx, spread(ids, patchSample))
	if err == nil && fails > 0 {
		add(estimatePatchFails, fails, applied)
	}
	return err
}

// failures returns to how many of some entries the patch does not apply, and how many were read. If data is masked, it
// reads none: the number could reveal values.
func (p *Patch) failures(ctx context.Context, tx transaction, ids []uuid.UUID) (fails, read int, err error) {
	if masked, err := tx.IsMasked(ctx); err != nil || masked {
		return 0, 0, err
	}
	events, err := tx.Events(ctx, ids)
	for i := range events {
		if _, err := p.Event(events[i].JobKind, events[i].Event); err != nil {
			fails++
		}
	}
	return fails, len(events), err
}

// UnworkedKind is a kind of job that no worker seems to know.
type UnworkedKind struct {
	Kind    string `json:"kind" doc:"Kind of the jobs."`
	Unknown int64  `json:"unknown" doc:"Number of sampled entries of the kind whose last attempt failed because the kind is not registered."`
	Sampled int64  `json:"sampled" doc:"Number of sampled entries of the kind."`
}

// Text says what is inferred, and from what.
func (k *UnworkedKind) Text() string {
	return fmt.Sprintf("no worker seems to know kind %s: inferred from %d of %d last attempts, with the latest of them",
		k.Kind, k.Unknown, k.Sampled)
}

// addUnworked adds the kinds of the sample that no worker seems to know.
func (p *Preview) addUnworked(ctx context.Context, tx transaction, ids []uuid.UUID) error {
	rows, err := tx.UnworkedKinds(ctx, ids)
	for i := range rows {
		p.Unworked = append(p.Unworked, UnworkedKind{Kind: rows[i].Kind, Unknown: rows[i].Unknown, Sampled: rows[i].Entries})
	}
	return err
}

// needsApproval returns why a run needs a second person; "" if it does not.
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
