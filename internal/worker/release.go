package worker

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// maxObservedGroups bounds the groups of observed entries that one release reads.
const maxObservedGroups = 10_000

// releaseGate is the name of the lock that limits the release of observed entries to one process at
// a time.
const releaseGate = "automatic"

// Release releases observed entries for which automatic redelivery is on again, at the pace of their queue. In each
// group (queue, kind and class) the most urgent entries come first, then the oldest. One call releases at most
// maxRelease entries, and none while automatic redelivery is stopped, a switch is being changed or another process
// releases. If the policy has changed, Release also writes the policy's switches to the database.
func (w *Worker) Release(ctx context.Context) error {
	released := false
	var published *policy.Policy // the policy whose switches this transaction wrote
	err := w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		released, published = false, nil
		if locked, err := tx.LockGate(ctx, releaseGate); err != nil || !locked {
			return err
		}
		decider, err := w.readSwitches(ctx, tx, w.config.Planner())
		if err != nil {
			return err
		}
		p := decider.planner.Policy()
		if w.published.Load() != p {
			if err := automatic.Publish(ctx, tx, p); err != nil {
				return err
			}
			published = p
		}
		if decider.switches.Stopped != nil {
			return nil
		}
		groups, err := tx.ObservedGroups(ctx, maxObservedGroups)
		if err != nil {
			return err
		}
		// Reserve in the order in which batches reserve. Otherwise two transactions that reserve in several paces could
		// deadlock.
		slices.SortStableFunc(groups, func(a, b dbsqlc.ObservedGroupsRow) int {
			return strings.Compare(p.PaceOf(a.Queue).Name, p.PaceOf(b.Queue).Name)
		})
		deferred := deferred{}
		for i := range groups {
			g := &groups[i]
			e := automatic.Entry{Queue: g.Queue, Kind: g.Kind, Class: g.ErrorClass, JobKind: g.JobKind}
			if left := maxRelease - len(deferred.waiting); left <= 0 {
				break
			} else if decider.switches.Of(&e).On {
				if err := w.releaseGroup(ctx, tx, decider, g, left, &deferred, counts); err != nil {
					return err
				}
			}
		}
		released = len(deferred.waiting) > 0
		return deferred.write(ctx, tx, w.actor, counts)
	})
	if errors.Is(err, errSwitchChanging) {
		return nil
	}
	if err == nil && published != nil {
		w.published.Store(published)
	}
	if err == nil && released {
		w.notify() // after the commit: an earlier batch would not see the released entries
	}
	return err
}

// releaseGroup releases the first entries of a group: at most most, and at most as many as the pace allows in a
// GateInterval. Due entries get places in the pace; the others keep their time. Entries that need manual handling are
// parked.
func (w *Worker) releaseGroup(
	ctx context.Context, tx transaction, decider *decider, g *dbsqlc.ObservedGroupsRow, most int, deferred *deferred,
	counts map[string]int,
) error {
	limit, now := decider.planner.Policy().PaceOf(g.Queue), w.now()
	if limit.PerSecond > 0 {
		most = min(most, max(1, int(math.Ceil(limit.PerSecond*w.config.GateInterval.Seconds()))))
	}
	rows, err := tx.ClaimObserved(ctx, dbsqlc.ClaimObservedParams{
		Queue: g.Queue, JobKind: g.JobKind, Kind: g.Kind, ErrorClass: g.ErrorClass, MaxEntries: int32(most),
	})
	if err != nil {
		return err
	}
	var due []dbsqlc.ClaimObservedRow
	for _, row := range rows {
		v := decider.switches.Of(automaticEntry(&dbsqlc.ClaimDueRow{
			Queue: g.Queue, Kind: g.Kind, ErrorClass: g.ErrorClass, JobKind: g.JobKind,
			CapturedBy: row.CapturedBy, MaxRetries: row.MaxRetries, Rule: row.Rule,
		}))
		switch next := row.NextRetryAt; {
		case deferred.deferUnlessAutomatic(row.ID, next, v):
			// the entry needs manual handling: no switch names its rule any more, or another version of dlqd observed it
		case next.After(now):
			deferred.wait(row.ID, next, "", v.Reason)
		default:
			due = append(due, row)
		}
	}
	places, gap := deadletter.Places{First: now, Granted: len(due)}, time.Duration(0)
	if limit.PerSecond > 0 && len(due) > 0 {
		gap = time.Duration(float64(time.Second) / limit.PerSecond)
		if places, err = w.reserve(ctx, tx, limit, len(due), now, &w.config.GateInterval, counts); err != nil {
			return err
		}
	}
	for i, row := range due[:places.Granted] {
		deferred.wait(row.ID, places.First.Add(time.Duration(i)*gap), strategy.WaitsForPace, "automatic redelivery is on")
	}
	return nil
}
