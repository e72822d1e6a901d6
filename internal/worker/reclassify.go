package worker

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// reclassifyPage is the number of entries that one transaction judges at most.
const reclassifyPage = 500

// Judgement is the class, rule and strategy of an entry.
type Judgement struct {
	Class    string `json:"class" doc:"Class of the error."`
	Rule     string `json:"rule" doc:"Rule that chose the class."`
	Strategy string `json:"strategy" doc:"Strategy that decides when the entry is redelivered."`
}

// Rejudged counts entries whose judgement changes in the same way.
type Rejudged struct {
	From    Judgement `json:"from" doc:"Judgement before."`
	To      Judgement `json:"to" doc:"Judgement by the current rules."`
	Also    []string  `json:"also" doc:"Other fields that change: priority, tags, assignee, maxRetries, nextRetryAt."`
	Entries int       `json:"entries" doc:"Number of entries."`
	Example uuid.UUID `json:"example" doc:"Id of one of these entries."`
}

// Reclassified is the result of judging open entries again.
type Reclassified struct {
	DryRun  bool       `json:"dryRun" doc:"Whether this was a dry run, which changes no entry."`
	Looked  int        `json:"looked" doc:"Number of open entries that were judged again. Entries that an operator parked are skipped."`
	Changed []Rejudged `json:"changed" doc:"Entries whose judgement changes, grouped by change, largest group first."`
	Parked  []Parked   `json:"-"` // entries that became manual, for notifications
}

// Reclassify judges pending and manual entries again by the planner's rules. It skips entries that have not been
// decided yet, entries that an operator or a worker parked (parked_by), and entries that fail again or are locked by
// another session meanwhile. A dry run changes nothing.
//
//nolint:gocognit // the steps of one batch follow each other
func Reclassify(
	ctx context.Context, store *deadletter.Store, planner *strategy.Planner, act deadletter.Act, dryRun bool,
) (*Reclassified, error) {
	type change struct {
		from, to Judgement
		also     string
	}
	changes := map[change]*Rejudged{}
	result := &Reclassified{DryRun: dryRun, Changed: []Rejudged{}}
	for after := uuid.Nil; ; {
		var rows []dbsqlc.ClaimDueRow
		if _, err := inTx(ctx, store, func(tx transaction) error {
			decided, err := tx.DecidedEntries(ctx, dbsqlc.DecidedEntriesParams{
				ReadMessages: planner.ReadsMessages(), After: after, MaxEntries: reclassifyPage,
			})
			rows = column(decided, func(r *dbsqlc.DecidedEntriesRow) dbsqlc.ClaimDueRow { return dbsqlc.ClaimDueRow(*r) })
			return err
		}); err != nil {
			return nil, err
		}
		now := time.Now()
		judged, err := judgeEntries(ctx, dbsqlc.New(store.DB()), planner, rows, now)
		if err != nil {
			return nil, err
		}
		page := map[change]*Rejudged{}
		parked, err := inTx(ctx, store, func(tx transaction) error {
			clear(page)
			claimed, err := tx.ClaimDecided(ctx, dbsqlc.ClaimDecidedParams{
				Ids:           column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }),
				LastFailedAts: column(rows, func(r *dbsqlc.ClaimDueRow) time.Time { return r.LastFailedAt }),
			})
			if err != nil {
				return err
			}
			claimedByID := make(map[uuid.UUID]*dbsqlc.ClaimDecidedRow, len(claimed))
			for i := range claimed {
				claimedByID[claimed[i].ID] = &claimed[i]
			}
			switches, err := automatic.Read(ctx, tx, planner.Policy())
			if err != nil {
				return err
			}
			decider := decider{planner, switches}
			decided := decisions{}
			for i := range rows {
				row := &rows[i]
				if claimedByID[row.ID] == nil {
					continue
				}
				d := decider.decide(row, judged.byID[row.ID])
				also := alsoChanged(row, claimedByID[row.ID], &d, now)
				c := change{
					Judgement{row.ErrorClass, row.Rule, row.Strategy},
					Judgement{string(d.Class), d.Rule, d.Strategy},
					strings.Join(also, ","),
				}
				if c.from == c.to && len(also) == 0 {
					continue
				}
				if page[c] == nil {
					page[c] = &Rejudged{From: c.from, To: c.to, Also: also, Example: row.ID}
				}
				page[c].Entries++
				d.Reason = "reclassified: " + d.Reason
				decided.add(row, &d)
			}
			if dryRun {
				return nil
			}
			return decided.write(ctx, tx, act, decider.version())
		})
		if err != nil {
			return nil, err
		}
		for c, changed := range page {
			if changes[c] == nil {
				changes[c] = changed
			} else {
				changes[c].Entries += changed.Entries
			}
		}
		result.Parked = append(result.Parked, parked...)
		result.Looked += len(rows)
		if len(rows) < reclassifyPage {
			break
		}
		after = rows[len(rows)-1].ID
	}
	for _, c := range changes {
		result.Changed = append(result.Changed, *c)
	}
	slices.SortFunc(result.Changed, func(a, b Rejudged) int {
		return cmp.Or(cmp.Compare(b.Entries, a.Entries), cmp.Compare(a.Example.String(), b.Example.String()))
	})
	return result, nil
}

// alsoChanged lists which of priority, tags, assignee, maxRetries and nextRetryAt a decision changes in an entry.
func alsoChanged(row *dbsqlc.ClaimDueRow, current *dbsqlc.ClaimDecidedRow, d *strategy.Decision,
	now time.Time,
) []string {
	also := []string{}
	if d.Priority != 0 && d.Priority != int(current.Priority) {
		also = append(also, "priority")
	}
	if slices.ContainsFunc(d.Tags, func(tag string) bool { return !slices.Contains(current.Tags, tag) }) {
		also = append(also, "tags")
	}
	if d.Assignee != "" && current.AssignedTo == "" {
		also = append(also, "assignee")
	}
	if d.MaxRetries != 0 && d.MaxRetries != int(current.DlqMaxRetries) {
		also = append(also, "maxRetries")
	}
	// NextRetryAt is compared only if the entry waits for its time or for automatic redelivery. For an entry that waits
	// for a condition, its pace or its order, NextRetryAt does not come from the strategy.
	if next := d.Next.Truncate(time.Microsecond); row.NextRetryAt != nil && !d.Next.IsZero() &&
		!next.Equal(*row.NextRetryAt) &&
		(next.After(now) || row.NextRetryAt.After(now)) &&
		(row.WaitingFor == "" || row.WaitingFor == strategy.WaitsForAutomatic) {
		also = append(also, "nextRetryAt")
	}
	return also
}
