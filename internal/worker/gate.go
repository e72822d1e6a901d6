package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

const (
	// gateShutTime is how long a condition gate stays shut after its probes failed. It is short, because the breaker of a
	// destination that keeps failing opens, and a closed breaker is a condition, too.
	gateShutTime = 10 * time.Second
	// gateIdleTime is the time after which an open gate that was not advanced, for example because its conditions are
	// unmet, sends probes again.
	gateIdleTime = 10 * time.Second
	// probeSuccess is the share of probes that must succeed before the gate releases the other entries.
	probeSuccess = 0.8
	// maxRelease limits the entries that one check of a gate releases, or one release of observed entries.
	maxRelease = 1000
	// maxGroupsWaiting limits the groups of a queue that one check of a gate reads.
	maxGroupsWaiting = 10_000
)

// States of a gate in dlq.gates. A gate without a row sends probes at its next check.
const (
	gateProbing = "probing"
	gateShut    = "shut"
	gateOpen    = "open"
)

// gate controls the release of entries that wait together: it releases a few probes first and, if the probes succeed,
// the other entries.
type gate struct {
	name     string
	pace     policy.Pace
	probes   int           // number of probes
	shutTime time.Duration // how long the gate stays shut after failed probes
	reason   string        // reason in the audit trail
	// claim locks waiting entries, not more than most, and returns their ids.
	claim func(ctx context.Context, tx transaction, most int) ([]uuid.UUID, error)
}

// Gates advances, by one step, the gate of each queue with entries that wait for a condition, and the
// gates of smart retries in progress. A step sends probes, waits for their outcomes, or
// evaluates them and releases the other entries.
func (w *Worker) Gates(ctx context.Context) error {
	var queues, smart []string
	_, err := inTx(ctx, w.config.Store, func(tx transaction) (err error) {
		if queues, err = tx.WaitingQueues(ctx); err != nil {
			return err
		}
		smart, err = tx.SmartGates(ctx)
		return err
	})
	if err != nil {
		return err
	}
	var errs []error // one failure does not block the other gates
	for _, queue := range queues {
		if err := w.conditionGate(ctx, queue); err != nil {
			errs = append(errs, fmt.Errorf("gate of queue %s: %w", queue, err))
		}
		if ctx.Err() != nil {
			return errors.Join(errs...)
		}
	}
	for _, name := range smart {
		queue, fingerprint, _ := strings.Cut(strings.TrimPrefix(name, smartPrefix), ":")
		if err := w.smartGate(ctx, queue, fingerprint); err != nil {
			errs = append(errs, fmt.Errorf("gate %s: %w", name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (w *Worker) conditionGate(ctx context.Context, queue string) error {
	start := time.Now()
	err := w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		decider, err := w.readSwitches(ctx, tx, w.config.Planner())
		if err != nil || decider.switches.Stopped != nil {
			return err
		}
		planner := decider.planner
		// A group has the entries of one kind, class and rule, which have the same conditions. The conditions are checked
		// once per group, so that a group whose conditions are unmet does not block the others. (The load of the machine is
		// a condition, so they may be met for a process on another machine.)
		groups, err := tx.WaitingGroups(ctx, dbsqlc.WaitingGroupsParams{Queue: queue, Most: maxGroupsWaiting})
		if err != nil {
			return err
		}
		groups = slices.DeleteFunc(groups,
			func(g dbsqlc.WaitingGroupsRow) bool { return planner.Unmet(entryOfGroup(queue, &g)) != "" })
		if len(groups) == 0 {
			return nil
		}
		g := &gate{
			name: "conditions:" + queue, pace: planner.Policy().PaceOf(queue),
			probes: planner.Probes(entryOfGroup(queue, &groups[0])), shutTime: gateShutTime,
			reason: "its conditions are met",
			claim: func(ctx context.Context, tx transaction, most int) ([]uuid.UUID, error) {
				ids, err := w.claimWaiting(ctx, tx, decider, queue, groups, most, counts)
				if err == nil && len(ids) == 0 && most < maxRelease {
					ids, err = w.claimWaiting(ctx, tx, decider, queue, groups, maxRelease, counts)
				}
				return ids[:min(most, len(ids))], err
			},
		}
		return w.advance(ctx, tx, g, counts)
	})
	w.recordStage(ctx, StageGate, start, err)
	if errors.Is(err, errSwitchChanging) {
		return nil
	}
	if !postgres.IsRefusal(err) {
		return err
	}
	// One rejected entry would block the others forever. Make all of them due instead: if the database rejects a batch of
	// due entries, the worker retries them one by one.
	w.config.Logger.Error("DLQ worker: the database refused a release; retrying its entries one by one", "queue",
		queue, "error", err)
	err = w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		groups, err := tx.WaitingGroups(ctx, dbsqlc.WaitingGroupsParams{Queue: queue, Most: maxGroupsWaiting})
		if err != nil {
			return err
		}
		rows, err := tx.ClaimWaiting(ctx, claimParams(queue, groups, maxRelease))
		if err != nil {
			return err
		}
		deferred := deferred{}
		for i := range rows {
			deferred.wait(rows[i].ID, w.now(), "", "its conditions are met; released one by one")
		}
		return deferred.write(ctx, tx, w.actor, counts)
	})
	w.notify()
	return err
}

// claimWaiting claims entries of groups whose conditions are met, and returns the entries that may be redelivered. It
// defers entries that an unfinished replay run holds and entries whose automatic redelivery is off, and parks entries
// that need manual handling: otherwise these would be claimed again and block the others.
func (w *Worker) claimWaiting(ctx context.Context, tx transaction, decider *decider, queue string,
	groups []dbsqlc.WaitingGroupsRow, most int, counts map[string]int,
) ([]uuid.UUID, error) {
	rows, err := tx.ClaimWaiting(ctx, claimParams(queue, groups, most))
	if err != nil {
		return nil, err
	}
	held, err := heldByRuns(ctx, tx, column(rows, func(r *dbsqlc.ClaimWaitingRow) uuid.UUID { return r.ID }))
	if err != nil {
		return nil, err
	}
	var ids []uuid.UUID
	deferred, now := deferred{}, w.now()
	for i := range rows {
		if run, isHeld := held[rows[i].ID]; isHeld {
			deferred.wait(rows[i].ID, now.Add(runPoll), strategy.WaitsForRun, heldReason(run))
		} else if !deferred.deferUnlessAutomatic(rows[i].ID, now, decider.switches.Of(automaticWaiting(&rows[i]))) {
			ids = append(ids, rows[i].ID)
		}
	}
	return ids, deferred.write(ctx, tx, w.actor, counts)
}

func claimParams(queue string, groups []dbsqlc.WaitingGroupsRow, most int) dbsqlc.ClaimWaitingParams {
	return dbsqlc.ClaimWaitingParams{
		Queue: queue, MaxEntries: int32(most),
		Kinds:        column(groups, func(g *dbsqlc.WaitingGroupsRow) string { return g.Kind }),
		ErrorClasses: column(groups, func(g *dbsqlc.WaitingGroupsRow) string { return g.ErrorClass }),
		Rules:        column(groups, func(g *dbsqlc.WaitingGroupsRow) string { return g.Rule }),
	}
}

// entryOfGroup returns an entry of a group for the planner.
func entryOfGroup(queue string, g *dbsqlc.WaitingGroupsRow) *strategy.Entry {
	return &strategy.Entry{
		Facts: strategy.Facts{Class: riverdlq.Class(g.ErrorClass), Queue: queue, Kind: g.Kind}, Rule: g.Rule,
	}
}

func automaticWaiting(row *dbsqlc.ClaimWaitingRow) *automatic.Entry {
	return automaticEntry(&dbsqlc.ClaimDueRow{
		Queue: row.Queue, Kind: row.Kind, ErrorClass: row.ErrorClass, JobKind: row.JobKind,
		CapturedBy: row.CapturedBy, MaxRetries: row.MaxRetries, Rule: row.Rule,
	})
}

// advance advances a gate by one step: it sends probes, waits for their outcomes, or evaluates them and releases the
// other entries at their pace. If less than the share probeSuccess of the probes succeeded, it shuts the gate for
// shutTime. It does nothing while the gate is shut or another process advances it.
func (w *Worker) advance(ctx context.Context, tx transaction, g *gate, counts map[string]int) error {
	if locked, err := tx.LockGate(ctx, g.name); err != nil || !locked {
		return err
	}
	now := w.now()
	state, err := tx.Gate(ctx, g.name)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return w.sendProbes(ctx, tx, g, now, counts)
	case err != nil:
		return err
	}
	switch state.State {
	case gateOpen:
		if now.Sub(state.StartedAt) > gateIdleTime { // the gate was not advanced for that time
			return w.sendProbes(ctx, tx, g, now, counts)
		}
	case gateShut:
		if state.Until != nil && state.Until.After(now) {
			return nil
		}
		return w.sendProbes(ctx, tx, g, now, counts)
	case gateProbing:
		outcome, err := tx.ProbeOutcomes(ctx, state.Probes)
		if err != nil || outcome.UnderWay > 0 {
			return err
		}
		if float64(outcome.Succeeded) < probeSuccess*float64(len(state.Probes)) {
			until := now.Add(g.shutTime)
			return tx.SetGate(ctx, dbsqlc.SetGateParams{
				Name: g.name, State: gateShut, Probes: []uuid.UUID{}, Now: now, Until: &until,
			})
		}
	}
	return w.releaseRest(ctx, tx, g, now, counts)
}

func (w *Worker) sendProbes(ctx context.Context, tx transaction, g *gate, now time.Time, counts map[string]int) error {
	ids, err := g.claim(ctx, tx, g.probes)
	if err != nil || len(ids) == 0 {
		return err
	}
	if err := tx.SetGate(ctx, dbsqlc.SetGateParams{Name: g.name, State: gateProbing, Probes: ids, Now: now}); err != nil {
		return err
	}
	counts["released"] += len(ids)
	return w.redeliver(ctx, tx, ids, fmt.Sprintf("%s: one of %d probes", g.reason, len(ids)), counts)
}

// releaseRest releases entries after successful probes, as many as their pace allows until the next check, and at most
// maxRelease. If no entry is left, it deletes the gate.
func (w *Worker) releaseRest(ctx context.Context, tx transaction, g *gate, now time.Time, counts map[string]int) error {
	ids, err := g.claim(ctx, tx, maxRelease)
	if err != nil {
		return err
	}
	claimed := len(ids)
	if g.pace.PerSecond > 0 && claimed > 0 {
		places, err := w.reserve(ctx, tx, g.pace, len(ids), now, &w.config.GateInterval, counts)
		if err != nil {
			return err
		}
		ids = ids[:places.Granted]
	}
	if len(ids) == claimed && claimed < maxRelease { // no entry is left behind the gate
		err = tx.DeleteGate(ctx, g.name)
	} else {
		err = tx.SetGate(ctx, dbsqlc.SetGateParams{Name: g.name, State: gateOpen, Probes: []uuid.UUID{}, Now: now})
	}
	if err != nil {
		return err
	}
	if len(ids) == 0 {
		return nil
	}
	counts["released"] += len(ids)
	return w.redeliver(ctx, tx, ids, g.reason+", and the probes succeeded", counts)
}
