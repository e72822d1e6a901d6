package replay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

// judgedAtOnce limits the failures of a run that one turn judges.
const judgedAtOnce = 500

// settle judges new outcomes of a run and, if the run is progressive, moves its groups. It marks an ended run as
// settled once no outcome is missing. It reports whether more outcomes may be left to judge or count.
func (r *Runner) settle(ctx context.Context, run *dbsqlc.UnsettledReplaysRow) (more bool, err error) {
	if run.ToSteer { // outcomes of the time when dlqd did not run must be known before steer checks for silence
		if err := facts.ApplyRun(ctx, r.store, run.ID); err != nil {
			return false, err
		}
	}
	if run.ToSteer || run.Status != "running" { // of other running runs, batch judges the failures
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
		delete(r.released, groupOf{run: run.ID}) // the last release may have left out locked entries: release again
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

// judge writes the class and the fingerprint of failed redeliveries of a run, as the current policy judges them. It
// judges at most judgedAtOnce; more reports whether others may be left. It judges outside of a transaction, because
// operators' patterns can take long on arbitrary texts.
func (r *Runner) judge(ctx context.Context, id uuid.UUID) (more bool, err error) {
	queries, planner := dbsqlc.New(r.store.DB()), r.planner()
	rows, err := queries.UnjudgedFailures(ctx, dbsqlc.UnjudgedFailuresParams{
		ID: id, ReadMessages: planner.ReadsMessages(), Most: judgedAtOnce,
	})
	if err != nil || len(rows) == 0 {
		return false, err
	}
	judged := dbsqlc.WriteJudgementsParams{Run: id, Ids: []uuid.UUID{}, Lost: []uuid.UUID{}}
	for i := range rows {
		class, fingerprint := riverdlq.ClassUnknown, ""
		if row := &rows[i]; row.HasFailure {
			decision := planner.Decide(failureOf(row), time.Now())
			class, fingerprint = decision.Class, decision.Fingerprint
			if isLost(row) {
				fingerprint = ""
				judged.Lost = append(judged.Lost, row.EntryID)
			}
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

// isLost reports whether a redelivery of a message ended because the process of dlqd that delivered it was lost
// (dlq.put_back). That says nothing about the failure group. The job of an application is different: it may have ended
// its process itself.
func isLost(row *dbsqlc.UnjudgedFailuresRow) bool {
	return row.ReportedClass == "" && strings.HasPrefix(row.ErrorMessage, strategy.RescuedBy+" dlqd: ")
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

// groupOf identifies a group of a run. Number 0 stands for the whole run.
type groupOf struct {
	run    uuid.UUID
	number int32
}

// release makes entries due that waited for the end of a run or group: entries that failed again, and entries that were
// not sent. It does so once for each run or group, because entries that fail after the end do not wait.
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
