package worker

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// reclassifyPage is how many entries are judged in one transaction.
const reclassifyPage = 500

// Judgement is what an error was taken for.
type Judgement struct {
	Class    string `json:"class" doc:"What kind of error it is."`
	Rule     string `json:"rule" doc:"The rule that chose the class."`
	Strategy string `json:"strategy" doc:"What happens next."`
}

// Rejudged are entries whose judgement changes in the same way.
type Rejudged struct {
	From    Judgement `json:"from" doc:"What they were taken for."`
	To      Judgement `json:"to" doc:"What they are taken for now."`
	Entries int       `json:"entries" doc:"How many."`
	Example uuid.UUID `json:"example" doc:"One of them."`
}

// Reclassified says what came of judging open entries anew.
type Reclassified struct {
	DryRun  bool       `json:"dryRun" doc:"Nothing was changed."`
	Looked  int        `json:"looked" doc:"Open entries that were looked at: those that rules had judged, and no person."`
	Changed []Rejudged `json:"changed" doc:"Those whose judgement changes, the most first."`
}

// Reclassify judges open entries anew, by the rules that are in force. Entries that a person has parked, or that are
// being redelivered, are left alone; so are those that a worker or another reclassification holds at the moment. A dry
// run changes nothing.
func Reclassify(ctx context.Context, store *deadletter.Store, planner *strategy.Planner, act deadletter.Act, dryRun bool) (*Reclassified, error) {
	type change struct{ from, to Judgement }
	changes := map[change]*Rejudged{}
	result := &Reclassified{DryRun: dryRun, Changed: []Rejudged{}}
	version := planner.Policy().Version()
	for after := uuid.Nil; ; {
		var rows []dbsqlc.DecidedAfterRow
		err := inTx(ctx, store, func(tx transaction) error {
			var err error
			if rows, err = tx.DecidedAfter(ctx, dbsqlc.DecidedAfterParams{After: after, MaxEntries: reclassifyPage}); err != nil {
				return err
			}
			switches, err := automatic.Read(ctx, tx, planner.Policy())
			if err != nil {
				return err
			}
			by, now := judged{planner, switches}, time.Now()
			decide := decisions{}
			for i := range rows {
				row := dbsqlc.ClaimDueRow(rows[i])
				d := by.decide(&row, entryWith(&row, row.ReportedClass), now)
				c := change{Judgement{row.ErrorClass, row.Rule, row.Strategy}, Judgement{string(d.Class), d.Rule, d.Strategy}}
				if c.from == c.to {
					continue
				}
				if changes[c] == nil {
					changes[c] = &Rejudged{From: c.from, To: c.to, Example: row.ID}
				}
				changes[c].Entries++
				d.Reason = "reclassified: " + d.Reason
				decide.add(row.ID, &d)
			}
			if dryRun {
				return nil
			}
			return decide.write(ctx, tx, act, version)
		})
		if err != nil {
			return nil, err
		}
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
