package worker

import (
	"context"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// expiryPage is the number of entries that one transaction of the expiry checks.
const expiryPage = 500

// Expire expires open entries whose work is out of date, in the queues whose policy says so (expireStale). It checks
// sweepPages pages of entries; the next call continues after the last page.
func (w *Worker) Expire(ctx context.Context) error {
	for range sweepPages {
		p := w.config.Planner().Policy()
		if !p.ExpiresAny() {
			w.looked = uuid.Nil
			return nil
		}
		var last uuid.UUID
		if err := w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
			last = uuid.Nil
			rows, err := tx.OpenPage(ctx, dbsqlc.OpenPageParams{After: w.looked, MaxEntries: expiryPage})
			if err != nil {
				return err
			}
			if len(rows) == expiryPage {
				last = rows[expiryPage-1].ID
			}
			rows = slices.DeleteFunc(rows, func(row dbsqlc.OpenPageRow) bool { return !p.Expires(row.Queue, row.Kind) })
			_, err = w.expire(ctx, tx, p, column(rows, func(r *dbsqlc.OpenPageRow) uuid.UUID { return r.ID }), w.now(), counts)
			return err
		}); err != nil {
			return err
		}
		if w.looked = last; last == uuid.Nil {
			return nil
		}
	}
	return nil
}

// expireDue expires due entries whose work is out of date, if the policy says so, and returns the other entries.
func (w *Worker) expireDue(ctx context.Context, tx transaction, p *policy.Policy, due []*dbsqlc.ClaimDueRow,
	now time.Time, counts map[string]int,
) ([]*dbsqlc.ClaimDueRow, error) {
	var ids []uuid.UUID
	for _, row := range due {
		if p.Expires(row.Queue, row.Kind) {
			ids = append(ids, row.ID)
		}
	}
	expired, err := w.expire(ctx, tx, p, ids, now, counts)
	return slices.DeleteFunc(due, func(row *dbsqlc.ClaimDueRow) bool { return slices.Contains(expired, row.ID) }), err
}

// expire expires the given entries whose work is out of date and returns their ids. dlq.expire_stale may leave some of
// them open.
func (w *Worker) expire(ctx context.Context, tx transaction, p *policy.Policy, ids []uuid.UUID, now time.Time,
	counts map[string]int,
) ([]uuid.UUID, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := tx.EntryExpiries(ctx, ids)
	if err != nil {
		return nil, err
	}
	params := dbsqlc.ExpireStaleParams{Actor: w.actor, ConfigVersion: tx.version}
	for i := range rows {
		row := &rows[i]
		if why := p.OutOfDate(row.Queue, row.Kind, row.ExpiresAt, row.DueAt, now); why != "" {
			params.Ids = append(params.Ids, row.ID)
			params.Reasons = append(params.Reasons, "expired: "+why)
		}
	}
	if len(params.Ids) == 0 {
		return nil, nil
	}
	expired, err := tx.ExpireStale(ctx, params)
	if len(expired) > 0 {
		counts["expired"] += len(expired)
	}
	return expired, err
}
