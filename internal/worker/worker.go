// Package worker is the DLQ worker: it claims due dead letters, has the planner decide what happens to those that just
// failed, and redelivers those whose time has come.
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

// Defaults of a worker.
const (
	DefaultPollInterval  = 30 * time.Second
	DefaultSweepInterval = time.Minute
	DefaultGateInterval  = time.Second
	// DefaultSmartInterval is how often parked and failed entries are looked at for a smart retry. One that has begun goes
	// on with the gates.
	DefaultSmartInterval = 15 * time.Second

	// batchTimeout bounds one batch: one short transaction, or one for each entry that the database refused.
	batchTimeout = 30 * time.Second
	// gateTimeout bounds one look at all gates, each of which may redeliver maxRelease entries.
	gateTimeout = time.Minute
	// heldByOther is how long to wait where an entry is due and could not be claimed.
	heldByOther = time.Second
	// A wake-up is followed by others while jobs fail: gather them for so long.
	wakeDelay = 20 * time.Millisecond
	// orderPoll is how long an entry waits behind another of its ordering key before it looks again.
	orderPoll = 5 * time.Minute
	// maxSwitching is how long a change of a switch may hold everything up before that counts as a failure: a change is one
	// short transaction, which waits 5 s at most.
	maxSwitching = 15 * time.Second
	// maxSwitchingGap is between two looks that met changes which count as one: some loop looks every second.
	maxSwitchingGap = time.Minute
	// aloneStep is between two entries of a queue whose jobs were rescued twice or more: one of them is sent at a time.
	aloneStep = time.Minute
	// busyPause is how long an entry is put off whose job another transaction holds.
	busyPause = 10 * time.Second
	// sweepPages is how many pages of entries in dlq_processing one sweep looks through.
	sweepPages = 20
	// paceGrain is what is not worth waiting for.
	paceGrain = 100 * time.Millisecond
	// placeKept is how long after its time an entry still has its place in a pace.
	placeKept = time.Minute
	// maxRetryAfter bounds how long a destination can put off an entry.
	maxRetryAfter = 7 * 24 * time.Hour
)

// Observer is told of every entry that a worker moved: what it did ("filed", "repeated", "claimed", "decided", "parked", "placed",
// "released", "redelivered", "put_off", "settled", "requeued"), how many, and of every batch's duration.
type Observer func(action string, entries int, took time.Duration)

// Stages of the way of a dead letter that are told of by themselves: a batch is claimed; what failed is judged, and what comes of it written;
// places in a pace are reserved; one gate is looked at.
const (
	StageClaim    = "claim"
	StageDecision = "decision"
	StagePace     = "pace"
	StageGate     = "gate"
)

// Config is what a [Worker] needs.
type Config struct {
	Store         *deadletter.Store
	Planner       func() *strategy.Planner // by the policy that is in force
	Logger        *slog.Logger
	Name          string        // in locked_by and the audit trail; empty for host and process id
	PollInterval  time.Duration // between looks for due entries, when nothing wakes it; 0 means DefaultPollInterval
	SweepInterval time.Duration // between looks at the jobs of entries in dlq_processing; 0 means DefaultSweepInterval
	GateInterval  time.Duration // between looks at entries that wait for a condition; 0 means DefaultGateInterval
	SmartInterval time.Duration // between looks for a smart retry; 0 means DefaultSmartInterval
	BatchSize     int           // entries in one transaction; 0 means the policy's
	// Listen is the pool whose connections may LISTEN; nil to poll only (transaction poolers lack LISTEN).
	Listen    *pgxpool.Pool
	WakeTopic string
	// Now is the time that decides what is due; nil for the database's.
	Now     func() time.Time
	Observe Observer
	// ObserveStage is told of every step of a stage: how long it took, and its error. Nil for nobody.
	ObserveStage func(stage string, took time.Duration, err error)
	// Tracer makes a span of the filing of each entry that was submitted in a trace; nil: there is none.
	Tracer trace.Tracer
	// TryLock is automatic.TryLock, or restored.Guard.TryLock, which also looks whether the database was restored.
	TryLock func(ctx context.Context, tx postgres.DB) (bool, error)
	// BeforeFiling, if not nil, is called once before the first entry is filed or judged. Its error is logged.
	BeforeFiling func(ctx context.Context) error
	// Parked, if not nil, is called after a commit with the entries that the worker parked. Entries that SQL parks (see
	// db/code/04_facts.sql) and those that failed for good do not pass through here: dlqd_needs_person counts all.
	Parked func([]Parked)
}

// Parked is an entry that needs a person.
type Parked struct {
	ID          uuid.UUID
	Queue, Kind string
	Class       riverdlq.Class
	Rule        string
	Fingerprint string
}

// Worker claims due entries and carries their strategy out. Any number may run, in any number of processes.
type Worker struct {
	config  Config
	actor   string
	batches *background.Loop
	// published is the policy whose switches of automatic redelivery this process told SQL last.
	published atomic.Pointer[policy.Policy]
	// switching is the change of a switch that is under way; nil where the last look met none.
	switching atomic.Pointer[switching]
	swept     uuid.UUID // the last entry that the sweep has looked at
	queries   *dbsqlc.Queries
	inbox     inbox
	prepare   sync.Once // calls BeforeFiling
}

// New returns a worker that does not run yet.
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

// Loops are what a worker does, each at its own pace: a backlog that is due holds up neither new failures nor redeliveries nor gates nor
// smart retry. A batch or a release that is under way at a stop ends by itself: it is one short transaction.
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

// transaction is a transaction, a worker's queries in it, and the entries that it parks: whatever parks one says so here.
type transaction struct {
	*dbsqlc.Queries
	postgres.DB

	parked  *[]Parked
	version string // of the policy by which entries are moved in it
}

func (tx *transaction) parks(entries ...Parked) { *tx.parked = append(*tx.parked, entries...) }

// maxTries is how often a transaction is tried that another one was in the way of: an entry was
// moved to another partition after a statement began, which SKIP LOCKED does not skip.
const maxTries = 10

// inTx runs fn in a transaction of [deadletter.Store.InTx], again after a collision: fn begins anew
// each time. It returns what that has parked.
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

// observed runs one transaction. It tells the observer what that did, and people what it parked, after the commit.
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

// step tells that a step of a stage has ended, but for one that was cut short or is made again.
func (w *Worker) step(ctx context.Context, stage string, start time.Time, err error) {
	if !errors.Is(err, errSwitching) && (err == nil || !errors.Is(ctx.Err(), context.Canceled)) {
		w.config.ObserveStage(stage, time.Since(start), err)
	}
}

// untilNextDue is the poll interval, or less where an entry is due sooner.
func (w *Worker) untilNextDue(ctx context.Context) time.Duration {
	next, err := w.queries.NextDue(ctx)
	if err != nil {
		return w.config.PollInterval // nothing is pending, or the database is away: the next look says more
	}
	until := time.Until(next)
	if until <= 0 {
		until = heldByOther // due, and not claimed
	}
	return min(max(until, wakeDelay), w.config.PollInterval)
}

// RunOnce handles one batch of due entries that are filed, in one transaction. It reports whether there may be more.
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

// oneByOne handles the entries of a batch that the database refused, each in a transaction of its own, and parks those
// that it refuses alone: one entry that cannot be redelivered must not hold up the others.
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

// storable is an error's text as the database takes it.
func storable(err error) string {
	return strings.ToValidUTF8(strings.ReplaceAll(err.Error(), "\x00", "?"), "?")
}

// batch claims and handles at most size entries. It returns what it claimed, also where it failed.
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

// decide judges entries that failed again, and writes what comes of those that are undecided still.
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

// judged is what one look of a worker goes by.
type judged struct {
	planner  *strategy.Planner
	switches *automatic.Switches
}

// version is the policy's.
func (j *judged) version() string { return j.planner.Policy().Version() }

// judgements are what a policy makes of some entries. They are made outside of transactions, which patterns of operators and
// texts of strangers would keep open.
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

// rescuedTogether is with how many others each of those entries was rescued last whose worker may not be what was wrong.
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

// rescuesOf is how often an attempt of an application's job was ended by River's rescuer. The worker of a message is dlqd itself: that
// it died says nothing of the message.
func rescuesOf(row *dbsqlc.ClaimDueRow) int {
	if row.JobKind == message.JobKind {
		return 0
	}
	return int(row.Rescues)
}

// errSwitching says that a switch of automatic redelivery is being changed this moment: the next look goes by it.
var errSwitching = errors.New("automatic redelivery is being switched")

// judge reads what a transaction that redelivers goes by. From then on, no switch changes before it ends.
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

// switching is a change of a switch that looks have met, of batches, gates or releases.
type switching struct{ first, last time.Time }

// metSwitching is errSwitching, or, where a change is under way for so long that somebody must look, the error that it is.
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

// handle redelivers decided entries that are due, or has them wait.
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

// inOrder puts off those entries that have undone work of their ordering key before them.
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
	behind, err := tx.BehindOthers(ctx, ordered)
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

// inPace gives entries their places in the paces that they share, and puts off those whose place is later. An entry that
// comes back for its place has it, unless so much later that everybody would come at once: dlqd was down meanwhile.
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
	// In one order, so that two workers that reserve in several paces cannot deadlock.
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

// reserve takes up to so many places in a pace: see pace.Reserve.
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
		case deadletter.VerdictLive: // whether to run both is a person's decision
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

// entryOf is a decided entry as the planner sees it.
func entryOf(row *dbsqlc.ClaimDueRow) *strategy.Entry { return entryWith(row, row.ErrorClass) }

// entryWith is an entry as the planner sees it, with the class that was reported, or decided.
func entryWith(row *dbsqlc.ClaimDueRow, class string) *strategy.Entry {
	var said struct {
		RetryAfterSeconds float64 `json:"retryAfterSeconds"`
	}
	_ = json.Unmarshal(row.ErrorContext, &said) // an application's: what cannot be read says nothing
	of := struct {
		Payload json.RawMessage   `json:"payload"`
		Headers map[string]string `json:"headers"`
	}{Payload: row.Message}
	if row.JobKind == message.JobKind {
		of.Payload = nil
		_ = json.Unmarshal(row.Message, &of) // what was edited by hand into something else says nothing
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

// switched is an entry as the switches of automatic redelivery see it, of the class that was decided.
func switched(row *dbsqlc.ClaimDueRow) *automatic.Entry {
	return &automatic.Entry{
		Queue: row.Queue, Kind: row.Kind, Class: row.ErrorClass, JobKind: row.JobKind,
		Backfilled: row.CapturedBy == automatic.CapturedByBackfill, SingleAttempt: row.MaxRetries == 1, Unparked: row.Rule == policy.RuleUnparked,
	}
}

// decide is what the switches of automatic redelivery make of the planner's decision: an entry that would go by
// itself is observed where that is off, and some are a person's.
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

// sweep looks at the jobs of some of the entries in dlq_processing, and goes on after them the next time.
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

// PublishAgain has the worker tell SQL what the policy says though it has not changed: dlqd's tables are new.
func (w *Worker) PublishAgain() { w.published.Store(nil) }

// notify has the next batch claimed now.
func (w *Worker) notify() { w.batches.Wake() }
