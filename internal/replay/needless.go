package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// lookupTime limits the search for later work of a batch. The run sends the entries for which the search has no result
// by then.
const lookupTime = time.Second

// skipping says which work a run skips: by the policy for some queues and kinds (Skips), or for all of them.
type skipping struct {
	policy.Skips

	stale, superseded bool // the request skips such work in every queue and kind
}

// place is the queue and the kind of an entry.
type place struct{ queue, kind string }

func (s *skipping) skipsStale(p place) bool { return s.stale || s.Stale.Of(p.queue, p.kind) }
func (s *skipping) skipsSuperseded(p place) bool {
	return s.superseded || s.Superseded.Of(p.queue, p.kind)
}

// looksForLaterWork reports whether the run may skip entries whose work a later job has done.
func (s *skipping) looksForLaterWork() bool { return s.superseded || s.Superseded != nil }

// skippingOf returns which work a run skips.
func skippingOf(run *dbsqlc.LockReplayRow) (*skipping, error) {
	s := &skipping{stale: run.SkipStale, superseded: run.SkipSuperseded}
	return s, json.Unmarshal(run.Skips, &s.Skips)
}

// placesOf returns the queues and kinds of entries.
func placesOf(ctx context.Context, tx transaction, ids []uuid.UUID) (map[uuid.UUID]place, error) {
	rows, err := tx.Places(ctx, ids)
	places := make(map[uuid.UUID]place, len(rows))
	for i := range rows {
		places[rows[i].ID] = place{rows[i].Queue, rows[i].Kind}
	}
	return places, err
}

// skip is why an entry is skipped.
type skip struct {
	reason string // an identifier, such as reasonStale
	why    string
}

// needless returns the entries of a batch that the run skips, with the reason of each: their work is out of date, a
// later job has done the work, or the run was started for a fix and must leave the entry out (notForPolicy). unknown
// are entries for which the search for later work had no result.
func (r *Runner) needless(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow,
	ids []uuid.UUID,
) (skips map[uuid.UUID]skip, unknown []uuid.UUID, err error) {
	skips = map[uuid.UUID]skip{}
	add := func(reason string, more map[uuid.UUID]string) {
		for id, why := range more {
			if _, ok := skips[id]; !ok {
				skips[id] = skip{reason, why}
			}
		}
	}
	if run.ForFix {
		held, err := notForPolicy(ctx, tx, r.planner().Policy(), run.Filter, ids)
		if err != nil {
			return nil, nil, err
		}
		add(reasonHeld, held)
	}
	skipping, err := skippingOf(run)
	if err != nil {
		return nil, nil, err
	}
	// among returns the entries whose queue and kind permit skipping. Only these are looked up.
	among := func(all bool, of *policy.Skip) ([]uuid.UUID, error) {
		if all {
			return ids, nil
		}
		if of == nil {
			return nil, nil
		}
		places, err := placesOf(ctx, tx, ids)
		return slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool {
			return !of.Of(places[id].queue, places[id].kind)
		}), err
	}
	if some, err := among(skipping.stale, skipping.Stale); err != nil {
		return nil, nil, err
	} else if len(some) > 0 {
		outOfDate, err := stale(ctx, tx.Queries, r.planner().Policy(), some, time.Now())
		if err != nil {
			return nil, nil, err
		}
		add(reasonStale, outOfDate)
	}
	if some, err := among(skipping.superseded, skipping.Superseded); err != nil {
		return nil, nil, err
	} else if len(some) > 0 {
		done, notKnown, err := superseded(ctx, tx.Queries, some)
		if err != nil {
			return nil, nil, err
		}
		add(reasonSuperseded, done)
		unknown = notKnown
	}
	return skips, unknown, nil
}

// stale returns the entries whose work is out of date, with the reason of each.
func stale(ctx context.Context, queries *dbsqlc.Queries, p *policy.Policy, ids []uuid.UUID,
	now time.Time,
) (map[uuid.UUID]string, error) {
	rows, err := queries.Expiries(ctx, ids)
	if err != nil {
		return nil, err
	}
	reasons := map[uuid.UUID]string{}
	for i := range rows {
		row := &rows[i]
		if why := p.OutOfDate(row.Queue, row.Kind, row.ExpiresAt, row.DueAt, now); why != "" {
			reasons[row.ID] = "its work is out of date: " + why
		}
	}
	return reasons, nil
}

// limited runs a search, in a transaction, and reports whether Postgres cancelled it after the limit. It restores the
// transaction's statement timeout.
func limited(ctx context.Context, queries *dbsqlc.Queries, limit time.Duration, search func() error) (
	cancelled bool, err error,
) {
	if err := queries.SaveBeforeLookup(ctx); err != nil {
		return false, err
	}
	if err := queries.LimitStatements(ctx, strconv.FormatInt(limit.Milliseconds(), 10)); err != nil {
		return false, err
	}
	err = search()
	cancelled = postgres.IsCancelled(err)
	if err != nil && !cancelled {
		return false, err
	}
	return cancelled, queries.BackBeforeLookup(ctx) // also restores the timeout
}

// superseded returns the entries whose work a later job has done, with the reason of each. unknown are the entries
// without a result: all of them if Postgres cancels the search. superseded must run in a transaction.
func superseded(ctx context.Context, queries *dbsqlc.Queries,
	ids []uuid.UUID,
) (reasons map[uuid.UUID]string, unknown []uuid.UUID, err error) {
	var rows []dbsqlc.SupersededRow
	cancelled, err := limited(ctx, queries, lookupTime, func() (err error) {
		rows, err = queries.Superseded(ctx, ids)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("look for later work: %w", err)
	}
	reasons = map[uuid.UUID]string{}
	if cancelled {
		return reasons, ids, nil
	}
	for i := range rows {
		if row := &rows[i]; row.JobID != 0 {
			reasons[row.EntryID] = fmt.Sprintf("job %d with the same %s has completed since", row.JobID, row.Same)
		} else {
			unknown = append(unknown, row.EntryID)
		}
	}
	return reasons, unknown, nil
}
