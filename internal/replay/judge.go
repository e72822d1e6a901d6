package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

// judgedAtOnce limits the failures that are judged in one turn of a run.
const judgedAtOnce = 500

// settle judges the outcomes of the runs that are not settled, and moves the groups of progressive ones.
// It reports whether there may be more to do.
func (r *Runner) settle(ctx context.Context, run *dbsqlc.UnsettledReplaysRow) (more bool, err error) {
	if run.ToSteer { // outcomes that came while dlqd did not run are not silence
		if err := facts.ApplyRun(ctx, r.store, run.ID); err != nil {
			return false, err
		}
	}
	if run.ToSteer || run.Status != "running" { // otherwise batch judges
		if more, err = r.judge(ctx, run.ID); err != nil {
			return false, err
		}
	}
	if run.ToSteer {
		uncounted, ended, err := r.steer(ctx, run.ID)
		if err != nil {
			return false, err
		}
		for _, number := range ended {
			if err := r.release(ctx, groupOf{run.ID, number}); err != nil {
				return false, err
			}
		}
		more = more || uncounted
	}
	if more || run.Status == "running" || run.Status == "paused" || run.Status == "stopped" {
		return more, nil
	}
	queries := dbsqlc.New(r.store.DB())
	unsettled, err := queries.Unsettled(ctx, run.ID)
	if err != nil {
		return false, err
	}
	if !unsettled {
		delete(r.released, groupOf{run: run.ID}) // look again, for those that were locked
	}
	if run.Progressive {
		if err := r.release(ctx, groupOf{run: run.ID}); err != nil {
			return false, err
		}
	}
	if unsettled {
		return false, nil
	}
	return false, queries.Settle(ctx, run.ID)
}

// judge writes the class and the fingerprint of failed redeliveries of a run, as the policy judges them
// now. It judges outside of a transaction: operators' patterns can take long on arbitrary texts.
func (r *Runner) judge(ctx context.Context, id uuid.UUID) (more bool, err error) {
	queries, planner := dbsqlc.New(r.store.DB()), r.planner()
	rows, err := queries.UnjudgedFailures(ctx, dbsqlc.UnjudgedFailuresParams{
		ID: id, ReadMessages: planner.ReadsMessages(), Most: judgedAtOnce,
	})
	if err != nil || len(rows) == 0 {
		return false, err
	}
	judged := dbsqlc.WriteJudgementsParams{Run: id}
	for i := range rows {
		class, fingerprint := riverdlq.ClassUnknown, ""
		if row := &rows[i]; row.HasFailure {
			decision := planner.Decide(failureOf(row), time.Now())
			class, fingerprint = decision.Class, decision.Fingerprint
		}
		judged.Ids = append(judged.Ids, rows[i].EntryID)
		judged.ErrorClasses = append(judged.ErrorClasses, string(class))
		judged.Fingerprints = append(judged.Fingerprints, fingerprint)
	}
	if err := queries.WriteJudgements(ctx, judged); err != nil {
		return false, fmt.Errorf("judge failures: %w", err)
	}
	return len(rows) == judgedAtOnce, nil
}

// failureOf returns the failure of an entry for the planner.
func failureOf(row *dbsqlc.UnjudgedFailuresRow) *strategy.Entry {
	e := &strategy.Entry{
		Facts: strategy.Facts{
			Type: row.ErrorType, Code: row.ErrorCode, Title: row.ErrorTitle, Message: row.ErrorMessage,
			Class: riverdlq.Class(row.ReportedClass), Panic: row.ErrorStackTrace != "", Context: row.ErrorContext,
			Kind: row.Kind, Queue: row.Queue, Source: row.Source,
		},
		ID: row.EntryID, Trace: row.ErrorStackTrace, Before: riverdlq.Class(row.ErrorClass),
	}
	e.ReadMessage(row.JobKind, row.Message)
	return e
}

// groupOf is a group of a run, or with number 0 the whole run.
type groupOf struct {
	run    uuid.UUID
	number int32
}

// release makes the entries due that failed in a run or group that has ended, or were not sent, and
// waited for that. It does so once: what fails later does not wait.
func (r *Runner) release(ctx context.Context, ended groupOf) error {
	if r.released[ended] {
		return nil
	}
	after := uuid.Nil
	for {
		var last []uuid.UUID
		if err := inTx(ctx, r.store, func(tx transaction) (err error) {
			last, err = tx.ReleaseFailed(ctx, dbsqlc.ReleaseFailedParams{
				ID: ended.run, GroupNumber: ended.number, After: after, Most: judgedAtOnce, Actor: r.actor,
			})
			return err
		}); err != nil {
			return err
		}
		if len(last) == 0 {
			r.released[ended] = true
			return nil
		}
		after = last[0]
	}
}
