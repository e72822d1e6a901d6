package worker

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/pace"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// maxObservedGroups bounds how many groups of observed entries one look takes in.
const maxObservedGroups = 10_000

// releaseGate is the name of the lock by which one process at a time releases observed entries.
const releaseGate = "automatic"

// Release looks once at the groups of observed entries, and lets those go for which automatic redelivery has been switched
// on: at the pace of their queue, the oldest first. It also tells SQL what the policy says of it, where that has changed.
func (w *Worker) Release(ctx context.Context) error {
	released := false
	var told *policy.Policy // in this transaction
	err := w.observed(ctx, func(tx transaction, counts map[string]int) error {
		released, told = false, nil
		if mine, err := tx.LockGate(ctx, releaseGate); err != nil || !mine {
			return err
		}
		by, err := w.judge(ctx, tx, w.config.Planner())
		if err != nil {
			return err
		}
		p := by.planner.Policy()
		if w.published.Load() != p {
			if err := automatic.Publish(ctx, tx, p); err != nil {
				return err
			}
			told = p
		}
		if by.switches.Stopped != nil {
			return nil
		}
		groups, err := tx.ObservedGroups(ctx, maxObservedGroups)
		if err != nil {
			return err
		}
		// In one order, as a batch does, so that two that reserve in several paces cannot deadlock.
		slices.SortStableFunc(groups, func(a, b dbsqlc.ObservedGroupsRow) int {
			return strings.Compare(p.PaceOf(a.Queue).Name, p.PaceOf(b.Queue).Name)
		})
		aside := aside{}
		for i := range groups {
			g := &groups[i]
			of := automatic.Entry{Queue: g.Queue, Kind: g.Kind, Class: g.ErrorClass, JobKind: g.JobKind}
			if left := maxRelease - len(aside.waiting); left <= 0 {
				break
			} else if by.switches.Of(&of).On {
				if err := w.releaseGroup(ctx, tx, by, g, left, &aside, counts); err != nil {
					return err
				}
			}
		}
		released = len(aside.waiting) > 0
		return aside.write(ctx, tx, w.actor, counts)
	})
	if errors.Is(err, errSwitching) {
		return nil
	}
	if err == nil && told != nil {
		w.published.Store(told)
	}
	if err == nil && released {
		w.notify() // after the commit: before it, a batch sees none of them
	}
	return err
}

// releaseGroup lets the first entries of a group go: those that are due get their places in the pace, and the others are
// due when they would have been anyway.
func (w *Worker) releaseGroup(ctx context.Context, tx transaction, by *judged, g *dbsqlc.ObservedGroupsRow, most int, aside *aside, counts map[string]int) error {
	of, now := by.planner.Policy().PaceOf(g.Queue), w.now()
	if of.PerSecond > 0 {
		most = min(most, max(1, int(math.Ceil(of.PerSecond*w.config.GateInterval.Seconds()))))
	}
	rows, err := tx.ClaimObserved(ctx, dbsqlc.ClaimObservedParams{Queue: g.Queue, JobKind: g.JobKind, Kind: g.Kind, ErrorClass: g.ErrorClass, MaxEntries: int32(most)})
	if err != nil {
		return err
	}
	var due []dbsqlc.ClaimObservedRow
	for _, row := range rows {
		v := by.switches.Of(switched(&dbsqlc.ClaimDueRow{
			Queue: g.Queue, Kind: g.Kind, ErrorClass: g.ErrorClass, JobKind: g.JobKind, CapturedBy: row.CapturedBy, MaxRetries: row.MaxRetries, Rule: row.Rule,
		}))
		switch next := row.NextRetryAt; {
		case aside.unlessOn(row.ID, next, v): // a person's: it was observed before switches were, or by another dlqd
		case next.After(now):
			aside.wait(row.ID, next, "", v.Reason)
		default:
			due = append(due, row)
		}
	}
	places, gap := pace.Places{First: now, Granted: len(due)}, time.Duration(0)
	if of.PerSecond > 0 && len(due) > 0 {
		gap = time.Duration(float64(time.Second) / of.PerSecond)
		if places, err = w.reserve(ctx, tx, of, len(due), now, &w.config.GateInterval, counts); err != nil {
			return err
		}
	}
	for i, row := range due[:places.Granted] {
		aside.wait(row.ID, places.First.Add(time.Duration(i)*gap), strategy.WaitsForPace, "automatic is on")
	}
	return nil
}
