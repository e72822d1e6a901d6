// Package worker is the DLQ worker: it files failed jobs, decides what happens to them, and
// redelivers due dead letters.
package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// Default intervals of a worker.
const (
	DefaultPollInterval  = 30 * time.Second
	DefaultSweepInterval = time.Minute
	DefaultGateInterval  = time.Second
	// DefaultSmartInterval is the time between searches for parked and failed entries to retry. A smart retry in progress
	// is checked at the interval of the gates.
	DefaultSmartInterval = 15 * time.Second

	// batchTimeout limits one batch. A batch has a few short transactions or, after the database rejected it, a few per
	// entry.
	batchTimeout = 30 * time.Second
	// gateTimeout limits one pass over all gates, each of which releases up to maxRelease entries. It also limits one
	// release of observed entries, and one check for smart retries.
	gateTimeout = time.Minute
	// claimRetry is the pause if an entry is due but could not be claimed.
	claimRetry = time.Second
	// wakeDelay is how long a wake-up waits for further wake-ups: while jobs fail, they come in bursts.
	wakeDelay = 20 * time.Millisecond
	// orderPoll is how long an entry waits behind an earlier entry of its ordering key before it is checked again.
	orderPoll = 5 * time.Minute
	// runPoll is how long an entry that a replay run holds waits before it is checked again. The end of the run makes the
	// entry due earlier.
	runPoll = time.Hour
	// maxBlocked is how long a change of a switch may block workers before the worker reports a failure.
	// A change is one short transaction that waits at most 5 s for the workers' lock.
	maxBlocked = 15 * time.Second
	// maxBlockedGap is the longest gap between two blocked transactions that count as the same change.
	// Some loop starts a transaction every second.
	maxBlockedGap = time.Minute
	// rescuedSpacing is how long an entry whose job was rescued twice or more waits if another such redelivery is
	// running in its queue. The nth such entry of a batch waits n times as long.
	rescuedSpacing = time.Minute
	// busyPause is how long an entry waits if another transaction has locked its job or the job's unique key.
	busyPause = 10 * time.Second
	// sweepPages limits the pages of dlq_processing entries that one sweep checks, and the pages of expiryPage entries
	// that one call of Expire checks.
	sweepPages = 20
	// minPaceWait is the shortest wait for a place in a pace; shorter waits are skipped.
	minPaceWait = 100 * time.Millisecond
	// reservationTTL is how long a place in a pace stays reserved for an entry after the place's time.
	reservationTTL = time.Minute
	// maxRetryAfter limits the delay that a failure asks for (retryAfterSeconds in the error's context).
	maxRetryAfter = 7 * 24 * time.Hour
)

// Observer is called after a transaction for each of its actions ("filed", "repeated", "claimed",
// "decided", "parked", "placed", "released", "redelivered", "put_off", "expired"), with the number of entries
// and the transaction's duration. A sweep calls it with "settled" and "requeued" and no duration.
type Observer func(action string, entries int, took time.Duration)

// Stages that are observed separately: claiming a batch; deciding failures and writing the
// decisions; reserving places in a pace; one check of a gate.
const (
	StageClaim    = "claim"
	StageDecision = "decision"
	StagePace     = "pace"
	StageGate     = "gate"
)

// Config configures a [Worker].
type Config struct {
	Store         *deadletter.Store
	Planner       func() *strategy.Planner // returns the planner of the active policy
	Logger        *slog.Logger
	Name          string        // used in locked_by and the audit trail; empty means host and process id
	PollInterval  time.Duration // longest pause between checks for due entries; 0 means DefaultPollInterval
	SweepInterval time.Duration // between checks of the jobs of entries in dlq_processing; 0 means DefaultSweepInterval
	GateInterval  time.Duration // between checks of the gates; 0 means DefaultGateInterval
	SmartInterval time.Duration // between checks for smart retries; 0 means DefaultSmartInterval
	BatchSize     int           // entries per transaction; 0 means fileBatch for filing, the policy's for due entries
	// Listen is a pool whose connections can LISTEN; nil to poll only, because transaction poolers lack
	// LISTEN.
	Listen    *pgxpool.Pool
	WakeTopic string
	// Now returns the time that decides which entries are due; nil means the current time.
	Now     func() time.Time
	Observe Observer
	// ObserveStage, if not nil, is called after each step of a stage with its duration and error.
	ObserveStage func(stage string, took time.Duration, err error)
	// Tracer, if not nil, creates a span when an entry is filed whose message was submitted in a trace.
	Tracer trace.Tracer
	// TryLock is automatic.TryLock, or restored.Guard.TryLock, which also detects a restored database.
	TryLock func(ctx context.Context, tx postgres.DB) (bool, error)
	// BeforeFiling, if not nil, is called once before the first entry is filed or judged. Its error is logged.
	BeforeFiling func(ctx context.Context) error
	// Parked, if not nil, is called after a commit with the entries that the worker parked. Entries that SQL parks (see
	// db/code/04_facts.sql) and entries that failed for good do not pass through here; the metric dlqd_needs_person
	// counts all of them.
	Parked func([]Parked)
}

// Parked describes an entry that the worker parked.
type Parked struct {
	ID                                    uuid.UUID
	Queue, Kind, Class, Rule, Fingerprint string
}

// Worker claims due entries and applies their strategies. Any number of workers may run, in any
// number of processes.
type Worker struct {
	config  Config
	actor   string
	batches *background.Loop
	// published is the policy whose automatic-redelivery switches this process last wrote to the
	// database.
	published atomic.Pointer[policy.Policy]
	// blocked has the first and the last time at which a switch change blocked this worker. It is nil if the last
	// transaction was not blocked.
	blocked atomic.Pointer[blocked]
	swept   uuid.UUID // the last entry that the sweep checked
	looked  uuid.UUID // the last entry that the expiry checked
	queries *dbsqlc.Queries
	inbox   inbox
	prepare sync.Once // calls BeforeFiling
}

// New returns a worker. Its [Worker.Loops] run it.
func New(config Config) *Worker {
	if config.PollInterval == 0 {
		config.PollInterval = DefaultPollInterval
	}
	if config.SweepInterval == 0 {
		config.SweepInterval = DefaultSweepInterval
	}
	if config.GateInterval == 0 {
		config.GateInterval = DefaultGateInterval
	}
	if config.SmartInterval == 0 {
		config.SmartInterval = DefaultSmartInterval
	}
	if config.Name == "" {
		config.Name = postgres.ProcessName()
	}
	if config.Observe == nil {
		config.Observe = func(string, int, time.Duration) {}
	}
	if config.ObserveStage == nil {
		config.ObserveStage = func(string, time.Duration, error) {}
	}
	if config.TryLock == nil {
		config.TryLock = automatic.TryLock
	}
	w := &Worker{config: config, actor: "worker:" + config.Name, queries: dbsqlc.New(config.Store.DB())}
	w.batches = background.New(background.Config{
		Name: "dlq-workers", Interval: config.PollInterval, Timeout: batchTimeout, Gather: wakeDelay, Finish: true,
		Failing: "DLQ worker: processing a batch failed",
		Once: func(ctx context.Context) (time.Duration, error) {
			full, err := w.RunOnce(ctx)
			if err != nil || full {
				return background.More, err
			}
			return w.untilNextDue(ctx), nil
		},
	})
	return w
}

// Loops returns the worker's background loops. They are separate, so that a backlog of due entries does not delay
// filing, sweeps, gates or smart retries. At shutdown, a batch or release in progress may finish, because its
// transactions are short.
func (w *Worker) Loops() []*background.Loop {
	loops := []*background.Loop{
		background.New(background.Config{
			Name: "filing", Interval: fileRetry, Timeout: batchTimeout, Finish: true,
			Failing: "DLQ worker: filing failed jobs failed",
			Once: func(ctx context.Context) (time.Duration, error) {
				full, err := w.File(ctx)
				if err != nil || full {
					return background.More, err
				}
				return fileInterval, nil
			},
		}),
		w.batches,
		background.New(background.Config{
			Name: "redeliveries", Interval: w.config.SweepInterval, Once: background.Each(w.sweep),
			Failing: "DLQ worker: sweeping redeliveries failed",
		}),
		background.New(background.Config{
			Name: "expiry", Interval: w.config.SweepInterval, Timeout: gateTimeout, Finish: true, OneProcess: true,
			Once: background.Each(w.Expire), Failing: "DLQ worker: expiring dead letters failed",
		}),
		background.New(background.Config{
			Name: "gates", Interval: w.config.GateInterval, Timeout: gateTimeout,
			Patience: gateTimeout, Finish: true, OneProcess: true, Once: background.Each(w.Gates),
			Failing: "DLQ worker: releasing entries that wait for conditions failed",
		}),
		background.New(background.Config{
			Name: "observed", Interval: w.config.GateInterval, Timeout: gateTimeout,
			Patience: gateTimeout, Finish: true, OneProcess: true, Once: background.Each(w.Release),
			Failing: "DLQ worker: releasing observed entries failed",
		}),
		background.New(background.Config{
			Name: "smart-retry", Interval: w.config.SmartInterval, Timeout: gateTimeout,
			Finish: true, OneProcess: true, Once: background.Each(w.SmartRetry),
			Failing: "DLQ worker: smart retry failed",
		}),
	}
	if w.config.Listen != nil {
		l := &listener{pool: w.config.Listen, topic: w.config.WakeTopic, notify: w.notify}
		loops = append(loops, background.New(background.Config{
			Name: "wake-ups", Interval: listenTurn, Timeout: 2 * listenTurn, Retry: listenRetry, Once: l.once, End: l.close,
			Failing: "DLQ worker: listening for notifications failed; polling until it succeeds",
		}))
	}
	return loops
}

func (w *Worker) now() time.Time {
	if w.config.Now != nil {
		return w.config.Now()
	}
	return time.Now()
}

// transaction is a database transaction with the worker's queries. It collects the entries that it
// parks.
type transaction struct {
	*dbsqlc.Queries
	postgres.DB

	parked  *[]Parked
	version string // version of the policy that the transaction's moves record
}

func (tx *transaction) addParked(entries ...Parked) { *tx.parked = append(*tx.parked, entries...) }

// minMoves is the number of moves from which the two extra statements of [transaction.move] cost less than one insert
// per audit row.
const minMoves = 10

// move runs a statement that moves entries, and writes their audit rows with one insert. reasons has the reason of each
// entry in ids.
func (tx *transaction) move(ctx context.Context, act deadletter.Act, ids []uuid.UUID, reasons []string,
	statement func() error,
) error {
	if len(ids) < minMoves {
		return statement()
	}
	set, err := tx.SetMoves(ctx, dbsqlc.SetMovesParams{Actor: act.Actor, Note: act.Note, Ids: ids, Reasons: reasons})
	if err != nil {
		return err
	}
	if err := statement(); err != nil || !set {
		return err
	}
	return tx.ClearMoves(ctx)
}

// maxTxAttempts limits how often a transaction is run if it collides with another one. A collision is a deadlock, or an
// entry that moved to another partition after the statement began, which SKIP LOCKED does not skip.
const maxTxAttempts = 10

// inTx runs fn in a transaction of [deadletter.Store.InTx], and after each collision again, up to maxTxAttempts times.
// It returns the entries that the committed run parked.
func inTx(ctx context.Context, store *deadletter.Store, fn func(tx transaction) error) (parked []Parked, err error) {
	for range maxTxAttempts {
		err = store.InTx(ctx, func(db postgres.DB) error {
			parked = nil
			return fn(transaction{Queries: dbsqlc.New(db), DB: db, parked: &parked})
		})
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return parked, nil
}

// inObservedTx runs fn in a transaction. After the commit it calls Observe for each count, and Parked
// with the parked entries.
func (w *Worker) inObservedTx(ctx context.Context, fn func(tx transaction, counts map[string]int) error) error {
	start := time.Now()
	counts := map[string]int{}
	parked, err := inTx(ctx, w.config.Store, func(tx transaction) error {
		tx.version = w.config.Planner().Policy().Version()
		clear(counts)
		return fn(tx, counts)
	})
	if err != nil {
		return err
	}
	for action, n := range counts {
		w.config.Observe(action, n, time.Since(start))
	}
	if len(parked) > 0 && w.config.Parked != nil {
		w.config.Parked(parked)
	}
	return nil
}

// recordStage reports a finished step of a stage. It skips steps that were cancelled, or
// that a change of a switch blocked: they are retried.
func (w *Worker) recordStage(ctx context.Context, stage string, start time.Time, err error) {
	if !errors.Is(err, errSwitchChanging) && (err == nil || !errors.Is(ctx.Err(), context.Canceled)) {
		w.config.ObserveStage(stage, time.Since(start), err)
	}
}

// untilNextDue returns the time until the next entry is due, at most the poll interval.
func (w *Worker) untilNextDue(ctx context.Context) time.Duration {
	next, err := w.queries.NextDue(ctx)
	if err != nil {
		return w.config.PollInterval // no entry is pending; or the query failed, and the next batch reports that
	}
	until := time.Until(next)
	if until <= 0 {
		until = claimRetry // the entry is due but another worker has locked it
	}
	return min(max(until, wakeDelay), w.config.PollInterval)
}

// RunOnce handles one batch of due, filed entries. One transaction redelivers or defers the entries that have a
// decision; another decides the entries that failed again. If the database rejects the batch, RunOnce handles its
// entries one by one. It handles nothing while a switch is being changed. It reports whether more entries may be due.
func (w *Worker) RunOnce(ctx context.Context) (bool, error) {
	size := cmp.Or(w.config.BatchSize, w.config.Planner().Policy().Workers.DLQWorkers.BatchSize)
	claimed, err := w.batch(ctx, size)
	if errors.Is(err, errSwitchChanging) {
		return false, nil
	}
	if postgres.IsRefusal(err) && len(claimed) > 0 {
		err = w.retryOneByOne(ctx, len(claimed))
	}
	if err != nil {
		return false, err
	}
	return len(claimed) == size, nil
}

// retryOneByOne retries a rejected batch with one transaction per entry and parks the entries that are
// rejected again, so that one bad entry does not block the rest.
func (w *Worker) retryOneByOne(ctx context.Context, entries int) error {
	for range entries {
		claimed, err := w.batch(ctx, 1)
		if postgres.IsRefusal(err) && len(claimed) == 1 {
			w.config.Logger.Error("DLQ worker: the database refused a redelivery; parking the entry", "entry",
				claimed[0], "error", err)
			refused := manualEntry{ID: claimed[0], Reason: "the database refused its redelivery", Refusal: storableText(err)}
			err = w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
				counts["parked"]++
				return park(ctx, tx, w.actor, []manualEntry{refused})
			})
		}
		if err != nil || len(claimed) == 0 {
			return err
		}
	}
	return nil
}

// storableText returns an error's text without characters that Postgres rejects.
func storableText(err error) string {
	return strings.ToValidUTF8(strings.ReplaceAll(err.Error(), "\x00", "?"), "?")
}

// batch claims and handles at most size entries. It returns the claimed ids also with an error.
func (w *Worker) batch(ctx context.Context, size int) (claimed []uuid.UUID, err error) {
	var undecided []dbsqlc.ClaimDueRow
	params, now := dbsqlc.ClaimDueParams{ReadMessages: w.config.Planner().ReadsMessages(), MaxEntries: int32(size)},
		w.now()
	if w.config.Now != nil {
		params.Now = &now
	}
	err = w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		start := time.Now()
		rows, err := tx.ClaimDue(ctx, params)
		w.recordStage(ctx, StageClaim, start, err)
		if err != nil {
			return fmt.Errorf("claim: %w", err)
		}
		if len(rows) > 0 {
			counts["claimed"] = len(rows)
		}
		claimed = column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID })
		undecided = undecided[:0]
		rows = slices.DeleteFunc(rows, func(row dbsqlc.ClaimDueRow) bool {
			if row.Strategy == "" {
				undecided = append(undecided, row)
			}
			return row.Strategy == ""
		})
		if len(rows) == 0 {
			return nil
		}
		return w.handle(ctx, tx, rows, now, counts)
	})
	if err == nil {
		err = w.decide(ctx, undecided)
	}
	return claimed, err
}

// decide judges entries that failed again, and writes the decisions on the entries that no other session has decided
// meanwhile.
func (w *Worker) decide(ctx context.Context, rows []dbsqlc.ClaimDueRow) (err error) {
	if len(rows) == 0 {
		return nil
	}
	w.prepare.Do(func() { w.callBeforeFiling(ctx) })
	start := time.Now()
	defer func() { w.recordStage(ctx, StageDecision, start, err) }()
	judged, err := w.judge(ctx, rows)
	if err != nil {
		return err
	}
	return w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		ids, err := tx.ClaimUndecided(ctx, dbsqlc.ClaimUndecidedParams{
			Ids:           column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }),
			LastFailedAts: column(rows, func(r *dbsqlc.ClaimDueRow) time.Time { return r.LastFailedAt }),
		})
		if err != nil || len(ids) == 0 {
			return err
		}
		decider, err := w.readSwitches(ctx, tx, judged.planner)
		if err != nil {
			return err
		}
		decided := decisions{}
		for i := range rows {
			row := &rows[i]
			if !slices.Contains(ids, row.ID) {
				continue
			}
			d := decider.decide(row, judged.byID[row.ID])
			counts[decided.add(row, &d)]++
		}
		if err := decided.write(ctx, tx, deadletter.Act{Actor: w.actor}, decider.version()); err != nil {
			return fmt.Errorf("decide: %w", err)
		}
		return nil
	})
}

// decider combines the planner and the switches that apply to one transaction.
type decider struct {
	planner  *strategy.Planner
	switches *automatic.Switches
}

// version returns the version of the policy.
func (d *decider) version() string { return d.planner.Policy().Version() }

// judgements are the planner's decisions on some entries. They are made outside of transactions:
// operators' patterns can take long on arbitrary texts, and would keep a transaction open.
type judgements struct {
	planner *strategy.Planner
	byID    map[uuid.UUID]strategy.Decision
}

func (w *Worker) judge(ctx context.Context, rows []dbsqlc.ClaimDueRow) (*judgements, error) {
	return judgeEntries(ctx, w.queries, w.config.Planner(), rows, w.now())
}

func judgeEntries(ctx context.Context, queries *dbsqlc.Queries, planner *strategy.Planner, rows []dbsqlc.ClaimDueRow,
	now time.Time,
) (*judgements, error) {
	together, err := rescuedTogether(ctx, queries, rows)
	if err != nil {
		return nil, err
	}
	j := &judgements{planner, make(map[uuid.UUID]strategy.Decision, len(rows))}
	for i := range rows {
		e := entryWith(&rows[i], rows[i].ReportedClass)
		e.Together = together[e.ID]
		j.byID[e.ID] = planner.Decide(e, now)
	}
	return j, nil
}

// rescuedTogether returns, for entries whose job may have killed its worker ([strategy.ManyRescues]
// rescues or more), how many other jobs the rescuer discarded together with the entry's job. The reason
// of the decision shows the count.
func rescuedTogether(ctx context.Context, queries *dbsqlc.Queries,
	rows []dbsqlc.ClaimDueRow,
) (map[uuid.UUID]int, error) {
	var ids []uuid.UUID
	for i := range rows {
		if rescuesOf(&rows[i]) >= strategy.ManyRescues && strings.HasPrefix(rows[i].ErrorMessage, strategy.RescuedBy) {
			ids = append(ids, rows[i].ID)
		}
	}
	if len(ids) == 0 {
		return nil, nil //nolint:nilnil // nothing was rescued twice
	}
	counts, err := queries.RescuedTogether(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("count jobs rescued together: %w", err)
	}
	together := make(map[uuid.UUID]int, len(counts))
	for _, c := range counts {
		together[c.ID] = int(c.Others)
	}
	return together, nil
}

// rescuesOf returns how many attempts of an application's job the rescuer ended. It returns 0 for a
// message: its worker is dlqd, and a crash of dlqd is not caused by the message.
func rescuesOf(row *dbsqlc.ClaimDueRow) int {
	if row.JobKind == message.JobKind {
		return 0
	}
	return int(row.Rescues)
}

// errSwitchChanging means that a switch of automatic redelivery is being changed. The worker skips this
// transaction; the next one reads the new switches.
var errSwitchChanging = errors.New("an automatic redelivery switch is being changed")

// readSwitches reads the switches that apply to a transaction, and locks them until the transaction ends. It returns
// errSwitchChanging if a change is in progress, and another error if the change takes longer than maxBlocked.
func (w *Worker) readSwitches(ctx context.Context, tx transaction, planner *strategy.Planner) (*decider, error) {
	switch locked, err := w.config.TryLock(ctx, tx); {
	case err != nil:
		return nil, err
	case !locked:
		return nil, w.recordBlocked()
	}
	w.blocked.Store(nil)
	switches, err := automatic.Read(ctx, tx, planner.Policy())
	return &decider{planner, switches}, err
}

// blocked has the first and the last time at which a switch change blocked batches, gates or releases.
type blocked struct{ first, last time.Time }

// recordBlocked returns errSwitchChanging or, if a change has blocked workers for maxBlocked, an error for the
// operator.
func (w *Worker) recordBlocked() error {
	now := w.now()
	b := &blocked{now, now}
	if before := w.blocked.Load(); before != nil && now.Sub(before.last) <= maxBlockedGap {
		b.first = before.first
	}
	w.blocked.Store(b)
	took := now.Sub(b.first)
	if took < maxBlocked {
		return errSwitchChanging
	}
	return fmt.Errorf("deciding and redelivering have been blocked for %s: %s by a transaction that does not end; "+
		"find its session by the advisory locks in pg_locks and pg_stat_activity, and end it",
		took.Round(time.Second), errSwitchChanging.Error())
}

// handle redelivers, defers or expires due entries that have a decision. It parks an entry if a rule of automatic
// redelivery requires manual handling, or if a redelivery might repeat the work of another job (deadletter.VerdictLive
// and VerdictDone).
func (w *Worker) handle(ctx context.Context, tx transaction, rows []dbsqlc.ClaimDueRow, now time.Time,
	counts map[string]int,
) error {
	decider, err := w.readSwitches(ctx, tx, w.config.Planner())
	if err != nil {
		return err
	}
	planner := decider.planner
	deferred := deferred{}
	wait := func(row *dbsqlc.ClaimDueRow, until time.Time, waitingFor, reason string) {
		deferred.wait(row.ID, until, waitingFor, reason)
	}
	var due []*dbsqlc.ClaimDueRow
	for i := range rows {
		row := &rows[i]
		if v := decider.switches.Of(automaticEntry(row)); deferred.deferUnlessAutomatic(row.ID, *row.NextRetryAt, v) {
			continue
		}
		if v := planner.Due(entryOf(row), row.Strategy, now); v.Redeliver {
			due = append(due, row)
		} else {
			wait(row, v.Again, v.WaitingFor, v.Reason)
		}
	}
	if due, err = w.expireDue(ctx, tx, planner.Policy(), due, now, counts); err != nil {
		return fmt.Errorf("expire: %w", err)
	}
	if due, err = w.deferHeld(ctx, tx, due, now, wait); err != nil {
		return fmt.Errorf("replay runs: %w", err)
	}
	if due, err = w.deferBehindOthers(ctx, tx, planner, due, now, wait); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	if due, err = w.deferForPace(ctx, tx, planner, due, now, wait, counts); err != nil {
		return fmt.Errorf("pace: %w", err)
	}
	if err := deferred.write(ctx, tx, w.actor, counts); err != nil {
		return err
	}
	if len(due) > 0 {
		ids := make([]uuid.UUID, len(due))
		for i, row := range due {
			ids[i] = row.ID
		}
		return w.redeliver(ctx, tx, ids, "due", counts)
	}
	return nil
}

// heldByRuns returns which of the given entries a progressive replay run in progress holds, with the id of the run:
// entries that failed again in the run, and entries that it has not sent yet.
func heldByRuns(ctx context.Context, tx transaction, ids []uuid.UUID) (map[uuid.UUID]uuid.UUID, error) {
	if len(ids) == 0 {
		return nil, nil //nolint:nilnil // no entry is held
	}
	rows, err := tx.HeldByRuns(ctx, ids)
	held := make(map[uuid.UUID]uuid.UUID, len(rows))
	for _, row := range rows {
		held[row.EntryID] = row.RunID
	}
	return held, err
}

func heldReason(run uuid.UUID) string {
	return "is in replay run " + run.String() + ", which has not ended"
}

// deferHeld defers entries that a progressive replay run holds (heldByRuns) until the run ends, and returns the other
// entries.
func (w *Worker) deferHeld(ctx context.Context, tx transaction, due []*dbsqlc.ClaimDueRow, now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string),
) ([]*dbsqlc.ClaimDueRow, error) {
	held, err := heldByRuns(ctx, tx, column(due, func(row **dbsqlc.ClaimDueRow) uuid.UUID { return (*row).ID }))
	if err != nil || len(held) == 0 {
		return due, err
	}
	return slices.DeleteFunc(due, func(row *dbsqlc.ClaimDueRow) bool {
		run, isHeld := held[row.ID]
		if isHeld {
			wait(row, now.Add(runPoll), strategy.WaitsForRun, heldReason(run))
		}
		return isHeld
	}), nil
}

// deferBehindOthers defers entries that have unfinished earlier work of the same ordering key, and returns the other
// entries.
func (w *Worker) deferBehindOthers(ctx context.Context, tx transaction, planner *strategy.Planner,
	due []*dbsqlc.ClaimDueRow, now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string),
) ([]*dbsqlc.ClaimDueRow, error) {
	var ordered []uuid.UUID
	for _, row := range due {
		if queue := planner.Policy().Queues[row.Queue]; queue != nil && queue.Ordering && row.OrderingKey != "" {
			ordered = append(ordered, row.ID)
		}
	}
	if len(ordered) == 0 {
		return due, nil
	}
	behind, err := tx.BlockedByOrder(ctx, ordered)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(due, func(row *dbsqlc.ClaimDueRow) bool {
		if !slices.Contains(behind, row.ID) {
			return false
		}
		wait(row, now.Add(orderPoll), strategy.WaitsForOrder, "earlier work of its ordering key is not done")
		return true
	}), nil
}

// deferForPace reserves places in shared paces, defers entries whose place is later, and returns the other entries. A
// place stays reserved for reservationTTL after its time; an entry that comes later reserves a new place. Without this
// limit, all entries that became due while no worker ran would be sent at once.
func (w *Worker) deferForPace(ctx context.Context, tx transaction, planner *strategy.Planner, due []*dbsqlc.ClaimDueRow,
	now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string), counts map[string]int,
) ([]*dbsqlc.ClaimDueRow, error) {
	ready := make([]*dbsqlc.ClaimDueRow, 0, len(due))
	unplaced := map[policy.Pace][]*dbsqlc.ClaimDueRow{}
	for _, row := range due {
		pace := planner.Policy().PaceOf(row.Queue)
		reserved := row.WaitingFor == strategy.WaitsForPace && now.Sub(*row.NextRetryAt) < reservationTTL
		if pace.PerSecond == 0 || reserved {
			ready = append(ready, row)
			continue
		}
		unplaced[pace] = append(unplaced[pace], row)
	}
	// Reserve in a fixed order. Otherwise two workers that reserve in several paces could deadlock.
	for _, pace := range slices.SortedFunc(maps.Keys(unplaced), func(a, b policy.Pace) int {
		return strings.Compare(a.Name,
			b.Name)
	}) {
		rows := unplaced[pace]
		places, err := w.reserve(ctx, tx, pace, len(rows), now, nil, counts)
		if err != nil {
			return nil, err
		}
		for i, row := range rows {
			at := places.First.Add(time.Duration(float64(i) / pace.PerSecond * float64(time.Second)))
			if at.Sub(now) <= minPaceWait {
				ready = append(ready, row)
				continue
			}
			wait(row, at, strategy.WaitsForPace, fmt.Sprintf("waits for its place in the pace of %s (%g per second)",
				pace.Name, pace.PerSecond))
		}
	}
	return ready, nil
}

// reserve reserves up to the given number of places in a pace: see [deadletter.ReservePlaces].
func (w *Worker) reserve(ctx context.Context, tx transaction, of policy.Pace, entries int, now time.Time,
	within *time.Duration, counts map[string]int,
) (deadletter.Places, error) {
	start := time.Now()
	places, err := deadletter.ReservePlaces(ctx, tx, of.Name, of.PerSecond, entries, now, within)
	w.recordStage(ctx, StagePace, start, err)
	counts["placed"] += places.Granted
	return places, err
}

func (w *Worker) redeliver(ctx context.Context, tx transaction, ids []uuid.UUID, reason string,
	counts map[string]int,
) error {
	redeliveries, err := w.config.Store.Redeliver(ctx, tx, ids, w.actor, reason, tx.version)
	if err != nil {
		return fmt.Errorf("redeliver: %w", err)
	}
	var parked []manualEntry
	deferred := deferred{}
	alone := 0
	for _, r := range redeliveries {
		switch r.Verdict {
		case deadletter.VerdictLive: // park the entry: an operator decides whether to run both jobs
			parked = append(parked, manualEntry{
				ID: r.EntryID, Reason: fmt.Sprintf("job %d with the same unique key is live; replay with force to run both",
					r.JobID),
			})
			counts["parked"]++
		case deadletter.VerdictDone:
			parked = append(parked, manualEntry{
				ID: r.EntryID, Reason: fmt.Sprintf("done by job %d? It has the same unique key and has ended; resolve the entry, "+
					"or replay with force to run it again", r.JobID),
			})
			counts["parked"]++
		case deadletter.VerdictBusy:
			deferred.wait(r.EntryID, w.now().Add(busyPause), "",
				fmt.Sprintf("another transaction has locked job %d or its unique key", r.JobID))
		case deadletter.VerdictAlone:
			alone++
			deferred.wait(r.EntryID, w.now().Add(time.Duration(alone)*rescuedSpacing), strategy.WaitsForOrder,
				"its job was rescued twice or more, and another such redelivery is running in its queue")
		case deadletter.VerdictSent:
			counts["redelivered"]++
		case deadletter.VerdictFollows, deadletter.VerdictResolved, deadletter.VerdictOpen: // dlq.redeliver made no new job
		}
	}
	if err := deferred.write(ctx, tx, w.actor, counts); err != nil {
		return err
	}
	return park(ctx, tx, w.actor, parked)
}

// capturedBySource is the captured_by of an entry that a source stored for a record (dlq.store_records).
const capturedBySource = "source"

// entryOf returns a decided entry for the planner.
func entryOf(row *dbsqlc.ClaimDueRow) *strategy.Entry { return entryWith(row, row.ErrorClass) }

// entryWith returns an entry for the planner with the given class: the class that the application reported, or the
// decided one.
func entryWith(row *dbsqlc.ClaimDueRow, class string) *strategy.Entry {
	var reported struct {
		RetryAfterSeconds float64 `json:"retryAfterSeconds"`
	}
	_ = json.Unmarshal(row.ErrorContext, &reported) // written by applications: ignored if malformed
	e := &strategy.Entry{
		Facts: strategy.Facts{
			Type: row.ErrorType, Code: row.ErrorCode, Title: row.ErrorTitle, Message: row.ErrorMessage,
			Class:   riverdlq.Class(class),
			Panic:   strategy.IsPanic(row.ErrorStackTrace, row.ErrorType, row.CapturedBy == capturedBySource),
			Context: row.ErrorContext, Kind: row.Kind, Queue: row.Queue, Source: row.Source,
		},
		ID: row.ID, Trace: row.ErrorStackTrace, Before: riverdlq.Class(row.ErrorClass),
		Rule: row.Rule, WaitingFor: row.WaitingFor,
		RetryCount: int(row.DlqRetryCount), LastFailedAt: row.LastFailedAt, Rescues: rescuesOf(row),
		RetryAfter: time.Duration(min(max(reported.RetryAfterSeconds, 0), maxRetryAfter.Seconds()) * float64(time.Second)),
	}
	e.ReadMessage(row.JobKind, row.Message)
	return e
}

// automaticEntry returns an entry for the switches of automatic redelivery, with its decided class.
func automaticEntry(row *dbsqlc.ClaimDueRow) *automatic.Entry {
	return &automatic.Entry{
		Queue: row.Queue, Kind: row.Kind, Class: row.ErrorClass, JobKind: row.JobKind,
		Backfilled:    row.CapturedBy == automatic.CapturedByBackfill,
		SingleAttempt: row.MaxRetries == 1, Unparked: row.Rule == policy.RuleUnparked,
	}
}

// decide applies the switches to the planner's decision. If the planner would redeliver an entry automatically but
// automatic redelivery is off for it, the entry is observed; if a rule of automatic redelivery requires manual
// handling, it is parked.
func (d *decider) decide(row *dbsqlc.ClaimDueRow, decision strategy.Decision) strategy.Decision {
	if decision.Strategy == strategy.Manual {
		return decision
	}
	e := automaticEntry(row)
	e.Class, e.Unparked = string(decision.Class), false
	switch v := d.switches.Of(e); {
	case v.ManualRule != "":
		decision.Reason += ": " + v.Reason
		decision.Strategy, decision.Rule = strategy.Manual, v.ManualRule
		decision.Next, decision.WaitingFor = time.Time{}, ""
	case !v.On:
		decision.Reason += "; observed: " + v.Reason
		decision.WaitingFor = strategy.WaitsForAutomatic
	}
	return decision
}

// sweep checks the jobs of some entries in dlq_processing. The next call continues after the last of these entries.
func (w *Worker) sweep(ctx context.Context) error {
	for range sweepPages {
		found, err := w.config.Store.SweepRedeliveries(ctx, w.swept)
		if err != nil {
			return err
		}
		if found.Settled+found.Requeued > 0 {
			w.config.Logger.Warn("DLQ worker: the sweep found redeliveries whose end was not recorded", "settled", found.Settled,
				"requeued", found.Requeued)
		}
		w.config.Observe("settled", int(found.Settled), 0)
		w.config.Observe("requeued", int(found.Requeued), 0)
		w.swept = found.Last
		if found.Last == uuid.Nil {
			return nil
		}
	}
	return nil
}

// RepublishSwitches makes the worker write the policy's switches to the database again. Call it after dlqd's tables
// were recreated: the worker otherwise writes the switches only when the policy changes.
func (w *Worker) RepublishSwitches() { w.published.Store(nil) }

// notify wakes the loop that claims batches.
func (w *Worker) notify() { w.batches.Wake() }
