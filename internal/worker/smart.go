package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// maxGroups bounds the failure groups that one check for smart retries reads.
const maxGroups = 1000

// maxClaimPages bounds how many pages of a group a claim reads to get past entries that may not be
// redelivered automatically.
const maxClaimPages = 10

// smartPrefix precedes the queue and the fingerprint in the name of a smart retry's gate.
const smartPrefix = "smart:"

// SmartRetry checks once each failure group with parked or failed entries, up to maxGroups, of the queues that have
// smart retry on. If the cause of a group is probably fixed, it retries a few of the group's entries first and, if
// these succeed, the others.
func (w *Worker) SmartRetry(ctx context.Context) error {
	planner := w.config.Planner()
	if !planner.Policy().SmartRetryAnywhere() {
		return nil
	}
	var groups []dbsqlc.StuckGroupsRow
	_, err := inTx(ctx, w.config.Store, func(tx transaction) (err error) {
		groups, err = tx.StuckGroups(ctx, maxGroups)
		return err
	})
	if err != nil {
		return err
	}
	var errs []error // one failure does not block the other groups
	for _, g := range groups {
		if !planner.Policy().SmartRetryOn(g.Queue) {
			continue
		}
		if err := w.smartGate(ctx, g.Queue, g.Fingerprint); err != nil {
			errs = append(errs, fmt.Errorf("smart retry of queue %s, group %s: %w", g.Queue, g.Fingerprint, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (w *Worker) smartGate(ctx context.Context, queue, fingerprint string) error {
	p := w.config.Planner().Policy()
	smart := &p.Routing.SmartRetry
	if !p.SmartRetryOn(queue) { // smart retry was switched off after the gate opened
		return w.queries.DeleteGate(ctx, smartPrefix+queue+":"+fingerprint)
	}
	name := smartPrefix + queue + ":" + fingerprint
	start := time.Now()
	err := w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		decider, err := w.readSwitches(ctx, tx, w.config.Planner())
		if err != nil || decider.switches.Stopped != nil {
			return err
		}
		if decider.planner.UnmetBreaker(queue) != "" {
			return nil // the destination's breaker is open: redeliveries would be held
		}
		since := w.now().Add(-smart.Over)
		failed, err := tx.GroupFailures(ctx, dbsqlc.GroupFailuresParams{
			Queue: queue, Fingerprint: fingerprint, Since: deadletter.FirstID(since),
		})
		if err != nil {
			return err
		}
		// needed is the lowest number of ended jobs, but at least MinJobs, at which the share of the failures is below the
		// error rate.
		needed := smart.MinJobs
		if failed > 0 {
			needed = max(needed, int(math.Floor(100*float64(failed)/max(smart.ErrorRate, math.SmallestNonzeroFloat64)))+1)
		}
		if needed > math.MaxInt32 {
			return tx.DeleteGate(ctx, name)
		}
		completed, err := tx.JobsCompleted(ctx, dbsqlc.JobsCompletedParams{Since: since, Queue: queue, Most: int32(needed)})
		if err != nil {
			return err
		}
		if completed+failed < int64(needed) {
			return tx.DeleteGate(ctx, name)
		}
		return w.advance(ctx, tx, &gate{
			name: name, pace: p.PaceOf(queue), probes: smart.Probes, shutTime: smart.Over,
			reason: fmt.Sprintf("smart retry: %d of %d or more jobs of queue %s in the last %s failed with this error",
				failed, completed+failed, queue, strings.TrimSuffix(smart.Over.String(), "0s")),
			claim: func(ctx context.Context, tx transaction, most int) ([]uuid.UUID, error) {
				return claimParkedOrFailed(ctx, tx, decider, dbsqlc.ClaimStuckParams{
					Queue: queue, Fingerprint: fingerprint, Before: since, Classes: smart.Classes,
				}, most)
			},
		}, counts)
	})
	w.recordStage(ctx, StageGate, start, err)
	if errors.Is(err, errSwitchChanging) {
		return nil
	}
	if postgres.IsRefusal(err) { // the database refused the entries: they stay as they are
		w.config.Logger.Error("DLQ worker: the database refused a smart retry", "queue", queue, "fingerprint",
			fingerprint, "error", err)
		until := w.now().Add(smart.Over)
		err = w.queries.SetGate(ctx, dbsqlc.SetGateParams{
			Name: name, State: gateShut, Probes: []uuid.UUID{}, Now: w.now(), Until: &until,
		})
	}
	return err
}

// claimParkedOrFailed locks and returns up to most entries of a failure group that may be redelivered automatically. It
// leaves out entries that a replay run holds, and entries whose job was rescued strategy.ManyRescues times. It reads at
// most maxClaimPages pages. It may also lock other entries of the group; it does not change them.
func claimParkedOrFailed(ctx context.Context, tx transaction, decider *decider, params dbsqlc.ClaimStuckParams,
	most int,
) ([]uuid.UUID, error) {
	var ids []uuid.UUID
	params.Most = int32(max(most, maxRelease))
	for range maxClaimPages {
		rows, err := tx.ClaimStuck(ctx, params)
		if err != nil {
			return nil, err
		}
		held, err := heldByRuns(ctx, tx, column(rows, func(r *dbsqlc.ClaimStuckRow) uuid.UUID { return r.ID }))
		if err != nil {
			return nil, err
		}
		for i := range rows {
			row := &rows[i]
			params.After = row.ID
			due := &dbsqlc.ClaimDueRow{
				Queue: row.Queue, Kind: row.Kind, ErrorClass: row.ErrorClass, JobKind: row.JobKind,
				CapturedBy: row.CapturedBy, MaxRetries: row.MaxRetries, Rule: row.Rule, Rescues: row.Rescues,
			}
			// A job that was rescued strategy.ManyRescues times or more may kill its worker again.
			_, isHeld := held[row.ID]
			if !isHeld && rescuesOf(due) < strategy.ManyRescues && decider.switches.Of(automaticEntry(due)).On {
				ids = append(ids, row.ID)
			}
			if len(ids) == most {
				return ids, nil
			}
		}
		if len(rows) < int(params.Most) {
			break
		}
	}
	return ids, nil
}
