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
	"github.com/dlqd/dlqd/internal/pace"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
	"github.com/dlqd/dlqd/riverdlq"
)

// Default intervals of a worker.
const (
	DefaultPollInterval  = 30 * time.Second
	DefaultSweepInterval = time.Minute
	DefaultGateInterval  = time.Second
	// DefaultSmartInterval is the time between looks for parked and failed entries to retry. A smart
	// retry that has begun continues at the interval of the gates.
	DefaultSmartInterval = 15 * time.Second

	// batchTimeout bounds one batch: one short transaction, or one per entry after the database
	// rejected the batch.
	batchTimeout = 30 * time.Second
	// gateTimeout bounds one pass over all gates. Each gate releases up to maxRelease entries.
	gateTimeout = time.Minute
	// heldByOther is the pause if an entry is due but could not be claimed.
	heldByOther = time.Second
	// wakeDelay is how long a wake-up waits for others. They come in bursts while jobs fail.
	wakeDelay = 20 * time.Millisecond
	// orderPoll is how long an entry waits behind another of its ordering key before the next check.
	orderPoll = 5 * time.Minute
	// maxSwitching is how long a change of a switch may block workers before that counts as a failure.
	// A change is one short transaction that waits at most 5 s.
	maxSwitching = 15 * time.Second
	// maxSwitchingGap is the longest gap between two blocked looks that count as the same change. Some
	// loop looks every second.
	maxSwitchingGap = time.Minute
	// aloneStep spaces entries of a queue whose jobs were rescued twice or more: they are sent one at a
	// time.
	aloneStep = time.Minute
	// busyPause is how long an entry waits if another transaction holds its job.
	busyPause = 10 * time.Second
	// sweepPages limits the pages of entries in dlq_processing that one sweep checks.
	sweepPages = 20
	// paceGrain is the shortest wait for a place in a pace; shorter ones are skipped.
	paceGrain = 100 * time.Millisecond
	// placeKept is how long an entry keeps its place in a pace after the place's time.
	placeKept = time.Minute
	// maxRetryAfter limits how long a destination can delay an entry.
	maxRetryAfter = 7 * 24 * time.Hour
)

// Observer is called after a transaction for each of its actions ("filed", "repeated", "claimed",
// "decided", "parked", "placed", "released", "redelivered", "put_off"), with the number of entries
// and the transaction's duration. A sweep calls it with "settled" and "requeued" and no duration.
type Observer func(action string, entries int, took time.Duration)

// Stages that are observed separately: claiming a batch; deciding failures and writing the
// decisions; reserving places in a pace; one look at a gate.
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
	PollInterval  time.Duration // between looks for due entries without a wake-up; 0 means DefaultPollInterval
	SweepInterval time.Duration // between checks of the jobs of entries in dlq_processing; 0 means DefaultSweepInterval
	GateInterval  time.Duration // between looks at the gates; 0 means DefaultGateInterval
	SmartInterval time.Duration // between looks for smart retries; 0 means DefaultSmartInterval
	BatchSize     int           // entries per transaction; 0 means the policy's
	// Listen is a pool whose connections can LISTEN; nil to poll only, because transaction poolers lack
	// LISTEN.
	Listen    *pgxpool.Pool
	WakeTopic string
	// Now decides what is due; nil for the current time.
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
	// db/code/04_facts.sql) and those that failed for good do not pass through here: dlqd_needs_person counts all.
	Parked func([]Parked)
}

// Parked describes an entry that needs manual handling.
type Parked struct {
	ID          uuid.UUID
	Queue, Kind string
	Class       riverdlq.Class
	Rule        string
	Fingerprint string
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
	// switching is the switch change that the last look met; nil if it met none.
	switching atomic.Pointer[switching]
	swept     uuid.UUID // the last entry that the sweep checked
	queries   *dbsqlc.Queries
	inbox     inbox
	prepare   sync.Once // calls BeforeFiling
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
		Failing: "DLQ worker: batches fail",
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

// Loops returns the worker's background loops. They are separate, so that a backlog of due entries
// delays neither filing nor sweeps, gates or smart retries. A batch or release that is in progress
// at shutdown finishes: it is one short transaction.
func (w *Worker) Loops() []*background.Loop {
	loops := []*background.Loop{
		background.New(background.Config{
			Name: "filing", Interval: fileRetry, Timeout: batchTimeout, Finish: true,
			Failing: "DLQ worker: failed jobs stay in the inbox",
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
			Failing: "DLQ worker: redeliveries whose end nobody saw are not looked for",
		}),
		background.New(background.Config{
			Name: "gates", Interval: w.config.GateInterval, Timeout: gateTimeout, Patience: gateTimeout, Finish: true, OneProcess: true, Once: background.Each(w.Gates),
			Failing: "DLQ worker: entries that wait for a condition are not released",
		}),
		background.New(background.Config{
			Name: "observed", Interval: w.config.GateInterval, Timeout: gateTimeout, Patience: gateTimeout, Finish: true, OneProcess: true, Once: background.Each(w.Release),
			Failing: "DLQ worker: observed entries are not released where automatic is on",
		}),
		background.New(background.Config{
			Name: "smart-retry", Interval: w.config.SmartInterval, Timeout: gateTimeout, Finish: true, OneProcess: true, Once: background.Each(w.SmartRetry),
			Failing: "DLQ worker: parked and failed entries are not looked at for a smart retry",
		}),
	}
	if w.config.Listen != nil {
		l := &listener{pool: w.config.Listen, topic: w.config.WakeTopic, notify: w.notify}
		loops = append(loops, background.New(background.Config{
			Name: "wake-ups", Interval: listenTurn, Timeout: 2 * listenTurn, Retry: listenRetry, Once: l.once, End: l.close,
			Failing: "DLQ worker: not listening, polling only for now",
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

func (tx *transaction) parks(entries ...Parked) { *tx.parked = append(*tx.parked, entries...) }

// maxTries limits how often a transaction is run after collisions. In a collision, an entry moves
// to another partition after a statement began; SKIP LOCKED does not skip it.
const maxTries = 10

// inTx runs fn in a transaction of [deadletter.Store.InTx], and again after a collision. It returns
// the entries that the committed run parked.
func inTx(ctx context.Context, store *deadletter.Store, fn func(tx transaction) error) (parked []Parked, err error) {
	for range maxTries {
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

// observed runs fn in a transaction. After the commit it calls Observe for each count, and Parked
// with the parked entries.
func (w *Worker) observed(ctx context.Context, fn func(tx transaction, counts map[string]int) error) error {
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

// step reports a finished step of a stage. It skips steps that were cancelled or will be retried.
func (w *Worker) step(ctx context.Context, stage string, start time.Time, err error) {
	if !errors.Is(err, errSwitching) && (err == nil || !errors.Is(ctx.Err(), context.Canceled)) {
		w.config.ObserveStage(stage, time.Since(start), err)
	}
}

// untilNextDue returns the time until the next entry is due, at most the poll interval.
func (w *Worker) untilNextDue(ctx context.Context) time.Duration {
	next, err := w.queries.NextDue(ctx)
	if err != nil {
		return w.config.PollInterval // none is pending, or the database is unavailable: the next batch tells
	}
	until := time.Until(next)
	if until <= 0 {
		until = heldByOther // due, but held by another worker
	}
	return min(max(until, wakeDelay), w.config.PollInterval)
}

// RunOnce handles one batch of due, filed entries in one transaction. It reports whether there may
// be more.
func (w *Worker) RunOnce(ctx context.Context) (bool, error) {
	size := cmp.Or(w.config.BatchSize, w.config.Planner().Policy().Workers.DLQWorkers.BatchSize)
	claimed, err := w.batch(ctx, size)
	if errors.Is(err, errSwitching) {
		return false, nil
	}
	if postgres.IsRefusal(err) && len(claimed) > 0 {
		err = w.oneByOne(ctx, len(claimed))
	}
	if err != nil {
		return false, err
	}
	return len(claimed) == size, nil
}

// oneByOne retries a rejected batch with one transaction per entry and parks the entries that are
// rejected again, so that one bad entry does not block the rest.
func (w *Worker) oneByOne(ctx context.Context, entries int) error {
	for range entries {
		claimed, err := w.batch(ctx, 1)
		if postgres.IsRefusal(err) && len(claimed) == 1 {
			w.config.Logger.Error("DLQ worker: entry refused by the database; parking it", "entry", claimed[0], "error", err)
			refused := reserved{ID: claimed[0], Reason: "the database refused to redeliver it", Refusal: storable(err)}
			err = w.observed(ctx, func(tx transaction, counts map[string]int) error {
				counts["parked"]++
				return park(ctx, tx, w.actor, []reserved{refused})
			})
		}
		if err != nil || len(claimed) == 0 {
			return err
		}
	}
	return nil
}

// storable returns an error's text without characters that Postgres rejects.
func storable(err error) string {
	return strings.ToValidUTF8(strings.ReplaceAll(err.Error(), "\x00", "?"), "?")
}

// batch claims and handles at most size entries. It returns the claimed ids even if it fails.
func (w *Worker) batch(ctx context.Context, size int) (claimed []uuid.UUID, err error) {
	var undecided []dbsqlc.ClaimDueRow
	params, now := dbsqlc.ClaimDueParams{ReadMessages: w.config.Planner().ReadsMessages(), MaxEntries: int32(size)}, w.now()
	if w.config.Now != nil {
		params.Now = &now
	}
	err = w.observed(ctx, func(tx transaction, counts map[string]int) error {
		start := time.Now()
		rows, err := tx.ClaimDue(ctx, params)
		w.step(ctx, StageClaim, start, err)
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

// decide judges entries that failed again, and writes the decisions on those that are still
// undecided.
func (w *Worker) decide(ctx context.Context, rows []dbsqlc.ClaimDueRow) (err error) {
	if len(rows) == 0 {
		return nil
	}
	w.prepare.Do(func() { w.beforeFiling(ctx) })
	start := time.Now()
	defer func() { w.step(ctx, StageDecision, start, err) }()
	made, err := w.judgements(ctx, rows)
	if err != nil {
		return err
	}
	return w.observed(ctx, func(tx transaction, counts map[string]int) error {
		ids, err := tx.ClaimUndecided(ctx, dbsqlc.ClaimUndecidedParams{
			Ids:           column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }),
			LastFailedAts: column(rows, func(r *dbsqlc.ClaimDueRow) time.Time { return r.LastFailedAt }),
		})
		if err != nil || len(ids) == 0 {
			return err
		}
		by, err := w.judge(ctx, tx, made.planner)
		if err != nil {
			return err
		}
		decide := decisions{}
		for i := range rows {
			row := &rows[i]
			if !slices.Contains(ids, row.ID) {
				continue
			}
			d := by.decide(row, made.of[row.ID])
			counts[decide.add(row, &d)]++
		}
		if err := decide.write(ctx, tx, deadletter.Act{Actor: w.actor}, by.version()); err != nil {
			return fmt.Errorf("decide: %w", err)
		}
		return nil
	})
}

// judged combines the planner and the switches that apply to one transaction.
type judged struct {
	planner  *strategy.Planner
	switches *automatic.Switches
}

// version returns the version of the policy.
func (j *judged) version() string { return j.planner.Policy().Version() }

// judgements are the planner's decisions on some entries. They are made outside of transactions:
// operators' patterns can take long on arbitrary texts, and would keep a transaction open.
type judgements struct {
	planner *strategy.Planner
	of      map[uuid.UUID]strategy.Decision
}

func (w *Worker) judgements(ctx context.Context, rows []dbsqlc.ClaimDueRow) (*judgements, error) {
	return judgementsBy(ctx, w.queries, w.config.Planner(), rows, w.now())
}

func judgementsBy(ctx context.Context, queries *dbsqlc.Queries, planner *strategy.Planner, rows []dbsqlc.ClaimDueRow, now time.Time) (*judgements, error) {
	together, err := rescuedTogether(ctx, queries, rows)
	if err != nil {
		return nil, err
	}
	j := &judgements{planner, make(map[uuid.UUID]strategy.Decision, len(rows))}
	for i := range rows {
		e := entryWith(&rows[i], rows[i].ReportedClass)
		e.Together = together[e.ID]
		j.of[e.ID] = planner.Decide(e, now)
	}
	return j, nil
}

// rescuedTogether returns, for entries whose job may have killed its worker ([strategy.ManyRescues]
// rescues or more), how many other jobs the rescuer discarded together with the last one. The reason
// of the decision shows the count.
func rescuedTogether(ctx context.Context, queries *dbsqlc.Queries, rows []dbsqlc.ClaimDueRow) (map[uuid.UUID]int, error) {
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
		return nil, fmt.Errorf("look at what was rescued together: %w", err)
	}
	together := make(map[uuid.UUID]int, len(counts))
	for _, c := range counts {
		together[c.ID] = int(c.Others)
	}
	return together, nil
}

// rescuesOf returns how many attempts of an application's job the rescuer ended. It returns 0 for a
// message: its worker is dlqd, whose death says nothing about the message.
func rescuesOf(row *dbsqlc.ClaimDueRow) int {
	if row.JobKind == message.JobKind {
		return 0
	}
	return int(row.Rescues)
}

// errSwitching means that a switch of automatic redelivery is being changed. The worker skips this
// look; the next one sees the change.
var errSwitching = errors.New("automatic redelivery is being switched")

// judge reads the switches that apply to a transaction, which then keeps them from changing until
// it ends. It returns errSwitching if a change is in progress, and a different error if the change
// takes too long.
func (w *Worker) judge(ctx context.Context, tx transaction, planner *strategy.Planner) (*judged, error) {
	switch locked, err := w.config.TryLock(ctx, tx); {
	case err != nil:
		return nil, err
	case !locked:
		return nil, w.metSwitching()
	}
	w.switching.Store(nil)
	switches, err := automatic.Read(ctx, tx, planner.Policy())
	return &judged{planner, switches}, err
}

// switching is a switch change that blocked batches, gates or releases: when it did first and last.
type switching struct{ first, last time.Time }

// metSwitching returns errSwitching, or an error for the operator if a change has blocked workers
// for maxSwitching.
func (w *Worker) metSwitching() error {
	now := w.now()
	met := &switching{now, now}
	if before := w.switching.Load(); before != nil && now.Sub(before.last) <= maxSwitchingGap {
		met.first = before.first
	}
	w.switching.Store(met)
	took := now.Sub(met.first)
	if took < maxSwitching {
		return errSwitching
	}
	return fmt.Errorf("nothing has been judged or redelivered for %s: %s, and the transaction that does that does not end (advisory locks in pg_locks, and pg_stat_activity, say whose it is)", took.Round(time.Second), errSwitching.Error())
}

// handle redelivers due, decided entries, or defers them.
func (w *Worker) handle(ctx context.Context, tx transaction, rows []dbsqlc.ClaimDueRow, now time.Time, counts map[string]int) error {
	by, err := w.judge(ctx, tx, w.config.Planner())
	if err != nil {
		return err
	}
	planner := by.planner
	aside := aside{}
	wait := func(row *dbsqlc.ClaimDueRow, until time.Time, waitingFor, reason string) {
		aside.wait(row.ID, until, waitingFor, reason)
	}
	var due []*dbsqlc.ClaimDueRow
	for i := range rows {
		row := &rows[i]
		if v := by.switches.Of(switched(row)); aside.unlessOn(row.ID, *row.NextRetryAt, v) {
			continue
		}
		if v := planner.Due(entryOf(row), row.Strategy, now); v.Redeliver {
			due = append(due, row)
		} else {
			wait(row, v.Again, v.WaitingFor, v.Reason)
		}
	}
	if due, err = w.inOrder(ctx, tx, planner, due, now, wait); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	if due, err = w.inPace(ctx, tx, planner, due, now, wait, counts); err != nil {
		return fmt.Errorf("pace: %w", err)
	}
	if err := aside.write(ctx, tx, w.actor, counts); err != nil {
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

// inOrder defers entries that have unfinished work of their ordering key before them, and returns
// the rest.
func (w *Worker) inOrder(ctx context.Context, tx transaction, planner *strategy.Planner, due []*dbsqlc.ClaimDueRow, now time.Time,
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
		wait(row, now.Add(orderPoll), strategy.WaitsForOrder, "work of its ordering key that comes before it is not done")
		return true
	}), nil
}

// inPace reserves places in shared paces, defers entries whose place is later, and returns the
// rest. An entry that comes back for its place keeps it for placeKept. After a longer downtime it
// reserves again, or all such entries would be sent at once.
func (w *Worker) inPace(ctx context.Context, tx transaction, planner *strategy.Planner, due []*dbsqlc.ClaimDueRow, now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string), counts map[string]int,
) ([]*dbsqlc.ClaimDueRow, error) {
	ready := make([]*dbsqlc.ClaimDueRow, 0, len(due))
	without := map[policy.Pace][]*dbsqlc.ClaimDueRow{}
	for _, row := range due {
		of := planner.Policy().PaceOf(row.Queue)
		has := row.WaitingFor == strategy.WaitsForPace && now.Sub(*row.NextRetryAt) < placeKept
		if of.PerSecond == 0 || has {
			ready = append(ready, row)
			continue
		}
		without[of] = append(without[of], row)
	}
	// A fixed order: two workers that reserve in several paces would otherwise deadlock.
	for _, of := range slices.SortedFunc(maps.Keys(without), func(a, b policy.Pace) int { return strings.Compare(a.Name, b.Name) }) {
		rows := without[of]
		places, err := w.reserve(ctx, tx, of, len(rows), now, nil, counts)
		if err != nil {
			return nil, err
		}
		for i, row := range rows {
			at := places.First.Add(time.Duration(float64(i) / of.PerSecond * float64(time.Second)))
			if at.Sub(now) <= paceGrain {
				ready = append(ready, row)
				continue
			}
			wait(row, at, strategy.WaitsForPace, fmt.Sprintf("its place in the pace of %s, %g a second", of.Name, of.PerSecond))
		}
	}
	return ready, nil
}

// reserve takes up to so many places in a pace: see [pace.Reserve].
func (w *Worker) reserve(ctx context.Context, tx transaction, of policy.Pace, entries int, now time.Time, within *time.Duration, counts map[string]int) (pace.Places, error) {
	start := time.Now()
	places, err := pace.Reserve(ctx, tx, of.Name, of.PerSecond, entries, now, within)
	w.step(ctx, StagePace, start, err)
	counts["placed"] += places.Granted
	return places, err
}

func (w *Worker) redeliver(ctx context.Context, tx transaction, ids []uuid.UUID, reason string, counts map[string]int) error {
	redeliveries, err := w.config.Store.Redeliver(ctx, tx, ids, w.actor, reason, tx.version)
	if err != nil {
		return fmt.Errorf("redeliver: %w", err)
	}
	var left []reserved
	aside := aside{}
	alone := 0
	for _, r := range redeliveries {
		switch r.Verdict {
		case deadletter.VerdictLive: // an operator decides whether to run both
			left = append(left, reserved{ID: r.EntryID, Reason: fmt.Sprintf("job %d with the same unique key is live; replay with force to run both", r.JobID)})
			counts["parked"]++
		case deadletter.VerdictDone:
			left = append(left, reserved{ID: r.EntryID, Reason: fmt.Sprintf("done by job %d? It has the same unique key, and has ended; resolve the entry, or replay with force", r.JobID)})
			counts["parked"]++
		case deadletter.VerdictBusy:
			aside.wait(r.EntryID, w.now().Add(busyPause), "", fmt.Sprintf("another transaction holds its job %d, or that one's unique key", r.JobID))
		case deadletter.VerdictAlone:
			alone++
			aside.wait(r.EntryID, w.now().Add(time.Duration(alone)*aloneStep), strategy.WaitsForOrder,
				"its job was rescued twice or more, and another such redelivery is under way in its queue")
		case deadletter.VerdictSent:
			counts["redelivered"]++
		case deadletter.VerdictFollows, deadletter.VerdictResolved, deadletter.VerdictOpen: // no job was needed
		}
	}
	if err := aside.write(ctx, tx, w.actor, counts); err != nil {
		return err
	}
	return park(ctx, tx, w.actor, left)
}

// entryOf returns a decided entry for the planner.
func entryOf(row *dbsqlc.ClaimDueRow) *strategy.Entry { return entryWith(row, row.ErrorClass) }

// entryWith returns an entry for the planner with the given class: the reported or the decided one.
func entryWith(row *dbsqlc.ClaimDueRow, class string) *strategy.Entry {
	var said struct {
		RetryAfterSeconds float64 `json:"retryAfterSeconds"`
	}
	_ = json.Unmarshal(row.ErrorContext, &said) // written by applications: ignored if malformed
	of := struct {
		Payload json.RawMessage   `json:"payload"`
		Headers map[string]string `json:"headers"`
	}{Payload: row.Message}
	if row.JobKind == message.JobKind {
		of.Payload = nil
		_ = json.Unmarshal(row.Message, &of) // ignored if an edit by hand malformed it
	}
	return &strategy.Entry{
		Facts: strategy.Facts{
			Type: row.ErrorType, Code: row.ErrorCode, Title: row.ErrorTitle, Message: row.ErrorMessage,
			Class: riverdlq.Class(class),
			Panic: row.ErrorStackTrace != "", Context: row.ErrorContext, Kind: row.Kind, Queue: row.Queue, Source: row.Source,
			Payload: of.Payload, Headers: of.Headers,
		},
		ID: row.ID, Trace: row.ErrorStackTrace, Before: riverdlq.Class(row.ErrorClass), Rule: row.Rule, WaitingFor: row.WaitingFor,
		RetryCount: int(row.DlqRetryCount), LastFailedAt: row.LastFailedAt, Rescues: rescuesOf(row),
		RetryAfter: time.Duration(min(max(said.RetryAfterSeconds, 0), maxRetryAfter.Seconds()) * float64(time.Second)),
	}
}

// switched returns an entry for the switches of automatic redelivery, with its decided class.
func switched(row *dbsqlc.ClaimDueRow) *automatic.Entry {
	return &automatic.Entry{
		Queue: row.Queue, Kind: row.Kind, Class: row.ErrorClass, JobKind: row.JobKind,
		Backfilled: row.CapturedBy == automatic.CapturedByBackfill, SingleAttempt: row.MaxRetries == 1, Unparked: row.Rule == policy.RuleUnparked,
	}
}

// decide applies the switches to the planner's decision. An entry that would be redelivered
// automatically is observed instead if that is off, and parked if it is reserved.
func (j *judged) decide(row *dbsqlc.ClaimDueRow, d strategy.Decision) strategy.Decision {
	if d.Strategy == strategy.Manual {
		return d
	}
	of := switched(row)
	of.Class, of.Unparked = string(d.Class), false
	switch v := j.switches.Of(of); {
	case v.Reserved != "":
		d.Reason += ": " + v.Reason
		d.Strategy, d.Rule, d.Next, d.WaitingFor = strategy.Manual, v.Reserved, time.Time{}, ""
	case !v.On:
		d.Reason += "; observed: " + v.Reason
		d.WaitingFor = strategy.WaitsForAutomatic
	}
	return d
}

// sweep checks the jobs of some entries in dlq_processing. The next call continues after the last
// of them.
func (w *Worker) sweep(ctx context.Context) error {
	for range sweepPages {
		found, err := w.config.Store.SweepRedeliveries(ctx, w.swept)
		if err != nil {
			return err
		}
		if found.Settled+found.Requeued > 0 {
			w.config.Logger.Warn("DLQ worker: redeliveries whose end nobody saw", "settled", found.Settled, "requeued", found.Requeued)
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

// PublishAgain makes the worker write the policy's switches again although the policy has not
// changed: dlqd's tables were recreated.
func (w *Worker) PublishAgain() { w.published.Store(nil) }

// notify wakes the loop that claims batches.
func (w *Worker) notify() { w.batches.Wake() }
