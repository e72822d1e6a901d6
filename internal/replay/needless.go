package replay

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// lookupTime limits how long the search for later work of a batch may take. Entries without an answer by then are
// sent.
const lookupTime = time.Second

// needless returns the entries of a batch that the run skips because their work is out of date, a later job has done
// it, or the run is for a fix and an operator has them, with the reason of each. Whether a later job has done the work
// of the unknown ones is not known.
func (r *Runner) needless(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow,
	ids []uuid.UUID,
) (reasons map[uuid.UUID]string, unknown []uuid.UUID, err error) {
	reasons = map[uuid.UUID]string{}
	add := func(more map[uuid.UUID]string) {
		for id, reason := range more {
			if reasons[id] == "" {
				reasons[id] = reason
			}
		}
	}
	if run.ForFix {
		held, err := notForPolicy(ctx, tx, r.planner().Policy(), run.Filter, ids)
		if err != nil {
			return nil, nil, err
		}
		add(held)
	}
	if run.SkipStale {
		outOfDate, err := stale(ctx, tx.Queries, r.planner().Policy(), ids, time.Now())
		if err != nil {
			return nil, nil, err
		}
		add(outOfDate)
	}
	if run.SkipSuperseded {
		done, notKnown, err := superseded(ctx, tx.Queries, ids)
		if err != nil {
			return nil, nil, err
		}
		add(done)
		unknown = notKnown
	}
	return reasons, unknown, nil
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

// superseded returns the entries whose work a later job has done, with the reason of each, and those of which that is
// not known: all of them if Postgres cancels the statement. It needs a transaction, whose timeout it does not change.
func superseded(ctx context.Context, queries *dbsqlc.Queries,
	ids []uuid.UUID,
) (reasons map[uuid.UUID]string, unknown []uuid.UUID, err error) {
	if err := queries.SaveBeforeLookup(ctx); err != nil {
		return nil, nil, err
	}
	if err := queries.LimitStatements(ctx, strconv.FormatInt(lookupTime.Milliseconds(), 10)); err != nil {
		return nil, nil, err
	}
	rows, err := queries.Superseded(ctx, ids)
	cancelled := postgres.IsCancelled(err)
	if err != nil && !cancelled {
		return nil, nil, fmt.Errorf("look for later work: %w", err)
	}
	if err := queries.BackBeforeLookup(ctx); err != nil { // also resets the timeout
		return nil, nil, err
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
