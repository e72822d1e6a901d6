package replay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/strategy"
)

const (
	// interval is how often the runner looks for active runs.
	interval = time.Second
	// paceStep is the length of a step of a run with a rate. Shorter steps cost more transactions, and longer steps send
	// bursts.
	paceStep = 50 * time.Millisecond
	// commitEntries limits the entries that one transaction sends for a run with neither a rate nor a concurrency. Such a
	// transaction sends several batches, because each commit waits for the disk. It sends only one batch if the batch is
	// larger than commitEntries, or if the run looks for later work.
	commitEntries = 500
	// turnTimeout bounds one pass over all active runs.
	turnTimeout = time.Minute
)

// Runner executes runs. Several processes may have a Runner: a run is locked while one of them sends a batch.
type Runner struct {
	// Worse, if not nil, compares the deliveries to a destination since from, without the deliveries of the run, with the
	// deliveries before the run began. It describes how they became worse, or returns "". unknown says why a comparison
	// is not possible (delivery.Traffic.Worse). JobsWorse does the same for jobs of a kind.
	Worse, JobsWorse func(ctx context.Context, name string, run uuid.UUID, began, from, now time.Time) (
		worse, unknown string, err error)
	// Reached, if not nil, returns the destinations that recently had deliveries of a run. Strain, if not nil, returns
	// how a destination copes with the deliveries since from (delivery.Traffic).
	Reached func(ctx context.Context, run uuid.UUID, now time.Time) ([]string, error)
	Strain  func(ctx context.Context, destination string, run uuid.UUID, began, from, now time.Time) (
		breaker.Strain, error)

	store   *deadletter.Store
	logger  *slog.Logger
	planner func() *strategy.Planner // of the active policy
	actor   string                   // actor of decisions in the audit trail
	maySend func(ctx context.Context, tx postgres.DB) (bool, error)
	now     func() time.Time  // clock for the rates of runs; nil means the clock of the database
	singly  map[uuid.UUID]int // entries left to send one by one after the database rejected a batch, by run

	watched        map[uuid.UUID]watched // how long this process has watched each progressive run
	released       map[groupOf]bool      // runs and groups whose waiting entries were made due (see release)
	outcomesAtOnce int32
}

// NewRunner returns a runner. planner returns the planner of the active policy, which judges failures.
// maySend, if not nil, is called in each transaction before it sends (restored.Guard.MaySend).
func NewRunner(store *deadletter.Store, planner func() *strategy.Planner, logger *slog.Logger,
	maySend func(ctx context.Context, tx postgres.DB) (bool, error),
) *Runner {
	return &Runner{
		store: store, planner: planner, actor: "worker:" + postgres.ProcessName(), logger: logger, maySend: maySend,
		singly: map[uuid.UUID]int{}, watched: map[uuid.UUID]watched{}, released: map[groupOf]bool{},
		outcomesAtOnce: outcomesAtOnce,
	}
}

// clock returns the time for the rates of runs. database is the time of the database, which all processes share.
func (r *Runner) clock(database time.Time) time.Time {
	if r.now != nil {
		return r.now()
	}
	return database
}

// Times until the next batch of a run is tried.
const (
	idle = interval        // nothing to do until a redelivery ends
	soon = paceStep / 2    // the concurrency or the rate delays the run for a moment
	sent = background.More // a batch was sent
)

// Loop returns the background loop of runs. A batch that is in progress at shutdown finishes: it is
// one short transaction.
func (r *Runner) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "replay-runs", Interval: interval, Timeout: turnTimeout,
		Patience: turnTimeout, Finish: true, Failing: "advancing replay runs failed",
		Once: r.RunOnce,
	})
}

// RunOnce settles new outcomes of runs (see settle), advances every active run by one batch, and returns the time until
// the next turn. An error of one run does not block the others. If the database rejects a batch, the run sends its next
// maxSingly entries one by one.
func (r *Runner) RunOnce(ctx context.Context) (wait time.Duration, err error) {
	runs, err := dbsqlc.New(r.store.DB()).ActiveReplays(ctx)
	if err != nil {
		return idle, err
	}
	maps.DeleteFunc(r.singly, func(id uuid.UUID, _ int) bool { return !slices.Contains(runs, id) })
	wait = idle
	var errs []error
	unsettled, err := dbsqlc.New(r.store.DB()).UnsettledReplays(ctx)
	if err != nil {
		return idle, err
	}
	maps.DeleteFunc(r.released, func(ended groupOf, _ bool) bool {
		return !slices.ContainsFunc(unsettled, func(u dbsqlc.UnsettledReplaysRow) bool { return u.ID == ended.run })
	})
	maps.DeleteFunc(r.watched, func(id uuid.UUID, _ watched) bool {
		return !slices.ContainsFunc(unsettled, func(u dbsqlc.UnsettledReplaysRow) bool { return u.ID == id })
	})
	for i := range unsettled {
		more, err := r.settle(ctx, &unsettled[i])
		if err != nil && !postgres.IsCollision(err) && !postgres.IsLocked(err) { // the next turn tries again
			errs = append(errs, fmt.Errorf("outcomes of replay run %s: %w", unsettled[i].ID, err))
		}
		if more {
			wait = sent
		}
	}
	for _, id := range runs {
		p, err := r.batch(ctx, id)
		for try := 1; (postgres.IsCollision(err) || postgres.IsLocked(err)) && try < maxTries && ctx.Err() == nil; try++ {
			p, err = r.batch(ctx, id) // try again: an entry moved, or another transaction (perhaps of another run) held a lock
		}
		if postgres.IsRefusal(err) && r.singly[id] == 0 {
			r.logger.Warn("replay run: the database rejected a batch; sending its entries one by one", "run", id, "error", err)
			r.singly[id] = maxSingly
			p, err = sent, nil
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("replay run %s: %w", id, err))
			if ctx.Err() != nil {
				break
			}
			continue
		}
		wait = min(wait, p)
	}
	return wait, errors.Join(errs...)
}

// maxTries is how often a batch is tried while it collides with other transactions.
const maxTries = 10

// maxSingly is the number of entries sent one by one after a rejection: the size of the largest
// batch.
const maxSingly = 10_000

// batch advances a run by one batch, in one transaction. If the run has neither a rate nor a
// concurrency, and does not look for later work, the transaction sends several batches.
func (r *Runner) batch(ctx context.Context, id uuid.UUID) (p time.Duration, err error) {
	p = idle
	// Apply the facts first, to know the redeliveries in progress and the recent outcomes. The failures are judged before
	// the run can end.
	if err := facts.ApplyRun(ctx, r.store, id); err != nil {
		return idle, err
	}
	unjudged, err := r.judge(ctx, id)
	if err != nil {
		return idle, err
	}
	singly := r.singly[id] > 0
	var refused uuid.UUID
	err = inTx(ctx, r.store, func(tx transaction) error {
		run, may, err := r.lock(ctx, tx, id)
		if err != nil || !may {
			return err
		}
		size, next, err := r.capacity(ctx, tx, &run, singly)
		if err != nil || size == 0 {
			p = next
			return err
		}
		steps := 1
		// Commit each batch before the next search for later work: the transaction locks jobs, and the search can take
		// lookupTime.
		skipping, err := skippingOf(&run)
		if err != nil {
			return err
		}
		if isUnlimited(&run) && !singly && !skipping.looksForLaterWork() {
			steps = max(1, commitEntries/size)
		}
		for step := range steps {
			next := dbsqlc.ReplayNextParams{ID: id, NewestFirst: run.NewestFirst, After: run.Cursor, Most: int32(size)}
			ids, wait, err := r.nextEntries(ctx, tx, &run, next)
			if err != nil {
				return err
			}
			if len(ids) == 0 && wait > 0 {
				p = min(p, wait)
				return nil
			}
			if len(ids) == 0 && step == 0 {
				refused, err = r.sendAlone(ctx, tx, &run, size)
				return err
			}
			if len(ids) == 0 {
				return nil
			}
			refused = ids[len(ids)-1]
			p = sent
			if err := r.send(ctx, tx, &run, ids); err != nil {
				return err
			}
			run.Cursor = &ids[len(ids)-1]
		}
		return nil
	})
	if singly && postgres.IsRefusal(err) {
		r.singly[id]--
		return sent, r.skip(ctx, id, refused, err)
	}
	if singly && err == nil && p == sent {
		r.singly[id]--
	}
	if unjudged {
		p = sent
	}
	return p, err
}

// lock locks a run. It returns false if another process has locked the run, if the run is not running, or if nothing
// may be sent now.
func (r *Runner) lock(ctx context.Context, tx transaction, id uuid.UUID,
) (run dbsqlc.LockReplayRow, may bool, err error) {
	if r.maySend != nil {
		if may, err := r.maySend(ctx, tx); err != nil || !may {
			return run, false, err
		}
	}
	run, err = tx.LockReplay(ctx, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return run, false, nil
	}
	if err == nil && run.ForFix {
		may, err := r.maySendFix(ctx, tx, run.ID)
		return run, may, err
	}
	return run, err == nil, err
}

// nextEntries returns the next entries of a run, and the wait that nextOfGroups returned.
func (r *Runner) nextEntries(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow,
	next dbsqlc.ReplayNextParams,
) (ids []uuid.UUID, wait time.Duration, err error) {
	if run.Progressive {
		return r.nextOfGroups(ctx, tx, run, int(next.Most))
	}
	ids, err = tx.ReplayNext(ctx, next)
	if err == nil && len(ids) == 0 && run.Cursor != nil {
		next.After = nil // start over: entries before the cursor may have waited for a predecessor of their ordering key
		ids, err = tx.ReplayNext(ctx, next)
	}
	return ids, 0, err
}

// sendAlone sends entries whose jobs were rescued twice or more. It is called after all other entries were sent, and
// has at most one such redelivery per queue in progress. If no such entry is left, it ends the run once the run's
// redeliveries have ended. It returns the last entry that it tried to send.
func (r *Runner) sendAlone(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow,
	size int,
) (last uuid.UUID, err error) {
	ids, err := tx.NextRescued(ctx, dbsqlc.NextRescuedParams{ID: run.ID, Most: int32(size)})
	if err != nil {
		return last, err
	}
	if len(ids) == 0 {
		return last, r.finish(ctx, tx, run.ID)
	}
	return ids[len(ids)-1], r.send(ctx, tx, run, ids)
}

func isUnlimited(run *dbsqlc.LockReplayRow) bool { return run.Rate == nil && run.Concurrency == nil }

// capacity returns how many entries may be sent now. If none may, it returns the time after which to ask again. It
// stops a run if too many of the last redeliveries failed.
func (r *Runner) capacity(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow,
	singly bool,
) (size int, wait time.Duration, err error) {
	// In a progressive run, steer judges each failure group instead.
	if !run.Progressive && run.Ended >= int64(run.StopOf) && 100*float64(run.Failed) >= run.StopAt*float64(run.Ended) {
		reason := fmt.Sprintf("%d of the last %d redeliveries failed; check them, then resume or cancel the run",
			run.Failed, run.Ended)
		r.logger.Warn("replay run stopped", "run", run.ID, "reason", reason)
		return 0, idle, tx.EndReplay(ctx, dbsqlc.EndReplayParams{ID: run.ID, Status: "stopped", Reason: reason})
	}
	size = int(run.BatchSize)
	if singly {
		size = 1
	}
	if run.Concurrency != nil {
		inProgress, err := tx.ReplayUnderWay(ctx, run.ID)
		if err != nil {
			return 0, idle, err
		}
		if size = min(size, int(*run.Concurrency)-int(inProgress)); size <= 0 {
			return 0, soon, nil
		}
	}
	if run.Rate != nil {
		step, now := paceStep, r.clock(run.Now)
		slots, err := deadletter.ReservePlaces(ctx, tx, "replay:"+run.ID.String(), *run.Rate, size, now, &step)
		if err != nil || slots.Granted == 0 {
			return 0, min(max(slots.First.Sub(now)-step, soon), idle), err
		}
		size = slots.Granted
	}
	return size, sent, nil
}

// finish ends a run that has nothing left to send, once its redeliveries have ended.
func (r *Runner) finish(ctx context.Context, tx transaction, id uuid.UUID) error {
	unfinished, err := tx.ReplayUnfinished(ctx, id)
	if err != nil || unfinished {
		return err
	}
	return tx.EndReplay(ctx, dbsqlc.EndReplayParams{
		ID: id, Status: "completed", Reason: "every entry was replayed or skipped",
	})
}

// send sends a batch. It skips the entries that needless returns and the entries to which the patch does not apply.
func (r *Runner) send(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow, ids []uuid.UUID) error {
	step := dbsqlc.ReplayStepParams{
		ID: run.ID, Ids: ids, Skipped: []uuid.UUID{}, Why: []string{}, Reasons: []string{},
	}
	leave := func(id uuid.UUID, reason, why string) {
		step.Skipped, step.Why = append(step.Skipped, id), append(step.Why, why)
		step.Reasons = append(step.Reasons, reason)
	}
	needless, unknown, err := r.needless(ctx, tx, run, ids)
	if err != nil {
		return err
	}
	for id, s := range needless {
		leave(id, s.reason, s.why)
	}
	if run.Patch != nil || run.MergePatch != nil {
		left := slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool { return needless[id].reason != "" })
		undo, err := r.edit(ctx, tx, run, left, leave)
		if err != nil {
			return err
		}
		if err := tx.ReplayStep(ctx, step); err != nil {
			return err
		}
		if err := tx.UndoEdits(ctx, undo); err != nil {
			return err
		}
	} else if err := tx.ReplayStep(ctx, step); err != nil {
		return err
	}
	if len(unknown) > 0 {
		if err := tx.CountNotKnown(ctx, dbsqlc.CountNotKnownParams{ID: run.ID, Ids: unknown}); err != nil {
			return err
		}
	}
	if !run.Progressive {
		return nil
	}
	return tx.CountSent(ctx, dbsqlc.CountSentParams{ID: run.ID, Ids: ids})
}

// skip skips an entry that the database refuses to redeliver.
func (r *Runner) skip(ctx context.Context, run, entry uuid.UUID, refusal error) error {
	return inTx(ctx, r.store, func(tx transaction) error {
		return tx.ReplayStep(ctx, dbsqlc.ReplayStepParams{
			ID: run, Ids: []uuid.UUID{entry}, Skipped: []uuid.UUID{entry},
			Why:     []string{"the database rejected it: " + strings.ToValidUTF8(refusal.Error(), "?")},
			Reasons: []string{reasonRejected},
		})
	})
}

// edit patches the payloads of entries and returns a function that undoes the edits. It calls leave for each entry to
// which the patch does not apply, and for each entry whose job has a checkpoint if the run does not say what to do with
// checkpoints.
func (r *Runner) edit(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow, ids []uuid.UUID,
	leave func(id uuid.UUID, reason, why string),
) (undo dbsqlc.UndoEditsParams, err error) {
	undo = dbsqlc.UndoEditsParams{Run: run.ID}
	events, err := tx.Events(ctx, ids)
	if err != nil {
		return undo, err
	}
	edits := dbsqlc.EditEventsParams{}
	for _, e := range events {
		if e.Resumes && run.Checkpoint == "" { // the job got a checkpoint after the start of the run
			leave(e.ID, reasonCheckpoint, "its job has a checkpoint now, and the run does not say whether to resume it")
			continue
		}
		edited, err := (&Patch{JSONPatch: run.Patch, MergePatch: run.MergePatch}).Event(e.JobKind, e.Event)
		if err != nil {
			leave(e.ID, reasonPatch, "the patch does not apply: "+err.Error())
			continue
		}
		edits.Ids = append(edits.Ids, e.ID)
		edits.Events = append(edits.Events, edited)
		undo.Ids, undo.Befores = append(undo.Ids, e.ID), append(undo.Befores, e.Edited)
	}
	return undo, tx.EditEvents(ctx, edits)
}
