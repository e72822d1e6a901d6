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
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
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
	// paceGrain is what is not worth waiting for.
	paceGrain = 100 * time.Millisecond
	// placeKept is how long after its time an entry still has its place in a pace.
	placeKept = time.Minute
	// maxRetryAfter bounds how long a destination can put off an entry.
	maxRetryAfter = 7 * 24 * time.Hour
)

// Observer is told of every entry that a worker moved: what it did ("decided", "parked", "redelivered", "put_off"), how
// many, and of every batch's duration.
type Observer func(action string, entries int, took time.Duration)

// Config is what a [Worker] needs.
type Config struct {
	Store         *deadletter.Store
	Planner       func() *strategy.Planner // by the policy that is in force
	Logger        *slog.Logger
	Name          string        // in locked_by and the audit trail; empty for host and process id
	PollInterval  time.Duration // between looks for due entries, when nothing wakes it; 0 means DefaultPollInterval
	SweepInterval time.Duration // between looks at expired leases; 0 means DefaultSweepInterval
	GateInterval  time.Duration // between looks at entries that wait for a condition; 0 means DefaultGateInterval
	SmartInterval time.Duration // between looks for a smart retry; 0 means DefaultSmartInterval
	BatchSize     int           // entries in one transaction; 0 means the policy's
	// Listen is the pool whose connections may LISTEN; nil to poll only (transaction poolers lack LISTEN).
	Listen    *pgxpool.Pool
	WakeTopic string
	// Now is the time that decides what is due; nil for the database's.
	Now     func() time.Time
	Observe Observer
	// Parked is told, after the commit, of entries whose class needs a person: the one place where people are told.
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
	// switching is since when batches have met a change of a switch that is under way; nil where the last one did not.
	switching atomic.Pointer[time.Time]
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
	w := &Worker{config: config, actor: "worker:" + config.Name}
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

// Loops are what a worker does, each at its own pace: a backlog that is due holds up neither leases nor gates nor smart
// retry. A batch or a release that is under way at a stop ends by itself: it is one short transaction.
func (w *Worker) Loops() []*background.Loop {
	loops := []*background.Loop{
		w.batches,
		background.New(background.Config{
			Name: "leases", Interval: w.config.SweepInterval, Once: background.Each(w.sweep),
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

// observed runs one transaction, and tells the observer what it did.
func (w *Worker) observed(ctx context.Context, fn func(q *dbsqlc.Queries, tx pgx.Tx, counts map[string]int) error) error {
	start := time.Now()
	counts := map[string]int{}
	err := w.config.Store.InTx(ctx, func(q *dbsqlc.Queries, tx pgx.Tx) error { return fn(q, tx, counts) })
	if err != nil {
		return err
	}
	for action, n := range counts {
		w.config.Observe(action, n, time.Since(start))
	}
	return nil
}

// untilNextDue is the poll interval, or less where an entry is due sooner.
func (w *Worker) untilNextDue(ctx context.Context) time.Duration {
	next, err := w.config.Store.Queries().NextDue(ctx)
	if err != nil {
		return w.config.PollInterval // nothing is pending, or the database is away: the next look says more
	}
	until := time.Until(next)
	if until <= 0 {
		until = heldByOther // due, and not claimed
	}
	return min(max(until, wakeDelay), w.config.PollInterval)
}

// RunOnce handles one batch of due entries, in one transaction. It reports whether there may be more.
func (w *Worker) RunOnce(ctx context.Context) (bool, error) {
	size := cmp.Or(w.config.BatchSize, w.config.Planner().Policy().Workers.DLQWorkers.BatchSize)
	claimed, err := w.batch(ctx, size)
	if !errors.Is(err, errSwitching) {
		w.switching.Store(nil)
	} else if err = w.switchingTooLong(err); err == nil {
		return false, nil
	}
	if postgres.IsRefusal(err) && len(claimed) > 0 {
		err = w.oneByOne(ctx, len(claimed))
	}
	if err != nil {
		w.config.Observe("error", 1, 0)
		return false, err
	}
	return len(claimed) == size, nil
}

// switchingTooLong is the error that a change of a switch is under way for so long that somebody must look; nil before that.
func (w *Worker) switchingTooLong(err error) error {
	now := w.now()
	since := w.switching.Load()
	if since == nil {
		w.switching.Store(&now)
		return nil
	}
	took := now.Sub(*since)
	if took < maxSwitching {
		return nil
	}
	return fmt.Errorf("nothing has been judged or redelivered for %s: %w, and the transaction that does that does not end (advisory locks in pg_locks, and pg_stat_activity, say whose it is)", took.Round(time.Second), err)
}

// oneByOne handles the entries of a batch that the database refused, each in a transaction of its own, and parks those
// that it refuses alone: one entry that cannot be redelivered must not hold up the others.
func (w *Worker) oneByOne(ctx context.Context, entries int) error {
	for range entries {
		claimed, err := w.batch(ctx, 1)
		if postgres.IsRefusal(err) && len(claimed) == 1 {
			w.config.Logger.Error("DLQ worker: entry refused by the database; parking it", "entry", claimed[0], "error", err)
			reason := "the database refused to redeliver it: " + strings.ToValidUTF8(err.Error(), "?")
			err = w.config.Store.InTx(ctx, func(q *dbsqlc.Queries, _ pgx.Tx) error {
				return q.Park(ctx, dbsqlc.ParkParams{Actor: w.actor, Ids: claimed, Reasons: []string{reason}})
			})
			w.config.Observe("parked", 1, 0)
		}
		if err != nil || len(claimed) == 0 {
			return err
		}
	}
	return nil
}

// batch claims and handles at most size entries. It returns what it claimed, also where it failed.
func (w *Worker) batch(ctx context.Context, size int) (claimed []uuid.UUID, err error) {
	var parked []Parked
	err = w.observed(ctx, func(q *dbsqlc.Queries, tx pgx.Tx, counts map[string]int) error {
		params := dbsqlc.ClaimDueParams{MaxEntries: int32(size)}
		now := w.now()
		if w.config.Now != nil {
			params.Now = &now
		}
		rows, err := q.ClaimDue(ctx, params)
		if err != nil {
			return fmt.Errorf("claim: %w", err)
		}
		if len(rows) == 0 {
			return nil
		}
		for i := range rows {
			claimed = append(claimed, rows[i].ID)
		}
		parked, err = w.handle(ctx, q, tx, rows, now, counts)
		return err
	})
	if err == nil && len(parked) > 0 && w.config.Parked != nil {
		w.config.Parked(parked)
	}
	return claimed, err
}

// judged is what one look of a worker goes by.
type judged struct {
	planner  *strategy.Planner
	switches *automatic.Switches
}

// errSwitching says that a switch of automatic redelivery is being changed this moment: the next look goes by it.
var errSwitching = errors.New("automatic redelivery is being switched")

// judge reads what a transaction that redelivers goes by. From then on, no switch changes before it ends.
func (w *Worker) judge(ctx context.Context, q *dbsqlc.Queries) (*judged, error) {
	if locked, err := q.TryLockAutomatic(ctx); err != nil || !locked {
		return nil, cmp.Or(err, errSwitching)
	}
	planner := w.config.Planner()
	switches, err := automatic.Read(ctx, q, planner.Policy())
	return &judged{planner, switches}, err
}

func (w *Worker) handle(ctx context.Context, q *dbsqlc.Queries, tx pgx.Tx, rows []dbsqlc.ClaimDueRow, now time.Time, counts map[string]int) (parked []Parked, err error) {
	by, err := w.judge(ctx, q)
	if err != nil {
		return nil, err
	}
	planner := by.planner
	decide, aside := decisions{}, aside{}
	wait := func(row *dbsqlc.ClaimDueRow, until time.Time, waitingFor, reason string) {
		aside.wait(row.ID, until, waitingFor, reason)
	}
	var due []*dbsqlc.ClaimDueRow
	for i := range rows {
		row := &rows[i]
		entry := entryOf(row)
		if row.Strategy == nil {
			d := by.decide(row, entry, now)
			counts[decide.add(row.ID, &d)]++
			if d.Strategy == strategy.Manual {
				parked = append(parked, Parked{ID: row.ID, Queue: row.Queue, Kind: row.Kind, Class: d.Class, Rule: d.Rule, Fingerprint: d.Fingerprint})
			}
			continue
		}
		if v := by.switches.Of(switched(row)); aside.unlessOn(row.ID, value(row.NextRetryAt), v) {
			if v.Reserved != "" {
				parked = append(parked, Parked{ID: row.ID, Queue: row.Queue, Kind: row.Kind, Class: entry.Class, Rule: v.Reserved, Fingerprint: value(row.Fingerprint)})
			}
			continue
		}
		if v := planner.Due(entry, *row.Strategy, now); v.Redeliver {
			due = append(due, row)
		} else {
			wait(row, v.Again, v.WaitingFor, v.Reason)
		}
	}
	if due, err = w.inOrder(ctx, q, planner, due, now, wait); err != nil {
		return nil, fmt.Errorf("order: %w", err)
	}
	if due, err = w.inPace(ctx, q, planner, due, now, wait); err != nil {
		return nil, fmt.Errorf("pace: %w", err)
	}
	if err := decide.write(ctx, q, w.actor, planner.Policy().Version()); err != nil {
		return nil, fmt.Errorf("decide: %w", err)
	}
	if err := aside.write(ctx, q, w.actor, counts); err != nil {
		return nil, err
	}
	if len(due) > 0 {
		ids := make([]uuid.UUID, len(due))
		for i, row := range due {
			ids[i] = row.ID
		}
		return parked, w.redeliver(ctx, q, tx, ids, "due", counts)
	}
	return parked, nil
}

// inOrder puts off those entries that have undone work of their ordering key before them.
func (w *Worker) inOrder(ctx context.Context, q *dbsqlc.Queries, planner *strategy.Planner, due []*dbsqlc.ClaimDueRow, now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string),
) ([]*dbsqlc.ClaimDueRow, error) {
	var ordered []uuid.UUID
	for _, row := range due {
		if queue := planner.Policy().Queues[row.Queue]; queue != nil && queue.Ordering && row.OrderingKey != nil {
			ordered = append(ordered, row.ID)
		}
	}
	if len(ordered) == 0 {
		return due, nil
	}
	behind, err := q.BehindOthers(ctx, ordered)
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
func (w *Worker) inPace(ctx context.Context, q *dbsqlc.Queries, planner *strategy.Planner, due []*dbsqlc.ClaimDueRow, now time.Time,
	wait func(*dbsqlc.ClaimDueRow, time.Time, string, string),
) ([]*dbsqlc.ClaimDueRow, error) {
	ready := make([]*dbsqlc.ClaimDueRow, 0, len(due))
	without := map[policy.Pace][]*dbsqlc.ClaimDueRow{}
	for _, row := range due {
		pace := planner.Policy().PaceOf(row.Queue)
		has := row.WaitingFor != nil && *row.WaitingFor == strategy.WaitsForPace && row.NextRetryAt != nil && now.Sub(*row.NextRetryAt) < placeKept
		if pace.PerSecond == 0 || has {
			ready = append(ready, row)
			continue
		}
		without[pace] = append(without[pace], row)
	}
	// In one order, so that two workers that reserve in several paces cannot deadlock.
	for _, pace := range slices.SortedFunc(maps.Keys(without), func(a, b policy.Pace) int { return strings.Compare(a.Name, b.Name) }) {
		rows := without[pace]
		place, err := q.ReservePace(ctx, dbsqlc.ReservePaceParams{Name: pace.Name, Rate: pace.PerSecond, Count: int32(len(rows)), Now: now})
		if err != nil {
			return nil, err
		}
		for i, row := range rows {
			at := place.FirstAt.Add(time.Duration(float64(i) / pace.PerSecond * float64(time.Second)))
			if at.Sub(now) <= paceGrain {
				ready = append(ready, row)
				continue
			}
			wait(row, at, strategy.WaitsForPace, fmt.Sprintf("its place in the pace of %s, %g a second", pace.Name, pace.PerSecond))
		}
	}
	return ready, nil
}

func (w *Worker) redeliver(ctx context.Context, q *dbsqlc.Queries, tx pgx.Tx, ids []uuid.UUID, reason string, counts map[string]int) error {
	redeliveries, err := w.config.Store.Redeliver(ctx, tx, ids, w.actor, reason)
	if err != nil {
		return fmt.Errorf("redeliver: %w", err)
	}
	live := dbsqlc.ParkParams{Actor: w.actor}
	for _, r := range redeliveries {
		if r.LiveJobID != nil { // whether to run both is a person's decision
			live.Ids = append(live.Ids, r.EntryID)
			live.Reasons = append(live.Reasons, fmt.Sprintf("job %d with the same unique key is live; replay with force to run both", *r.LiveJobID))
			counts["parked"]++
			continue
		}
		counts["redelivered"]++
	}
	if len(live.Ids) > 0 {
		if err := q.Park(ctx, live); err != nil {
			return fmt.Errorf("park: %w", err)
		}
	}
	return nil
}

func entryOf(row *dbsqlc.ClaimDueRow) *strategy.Entry {
	class := value(row.ReportedClass)
	if row.Strategy != nil {
		class = value(row.ErrorClass) // decided
	}
	return entryWith(row, class)
}

// entryWith is an entry as the planner sees it, with the class that was reported, or decided.
func entryWith(row *dbsqlc.ClaimDueRow, class string) *strategy.Entry {
	var said struct {
		RetryAfterSeconds float64 `json:"retryAfterSeconds"`
	}
	_ = json.Unmarshal(row.ErrorContext, &said) // an application's: what cannot be read says nothing
	return &strategy.Entry{
		Facts: strategy.Facts{
			Type: value(row.ErrorType), Code: value(row.ErrorCode), Message: row.ErrorMessage, Class: riverdlq.Class(class),
			Panic: row.ErrorStackTrace != "", Context: row.ErrorContext, Kind: row.Kind, Queue: row.Queue, Source: value(row.Source),
		},
		Trace: row.ErrorStackTrace, Rule: value(row.Rule), WaitingFor: value(row.WaitingFor),
		RetryCount: int(row.DlqRetryCount), LastFailedAt: row.LastFailedAt,
		RetryAfter: time.Duration(min(max(said.RetryAfterSeconds, 0), maxRetryAfter.Seconds()) * float64(time.Second)),
	}
}

// switched is an entry as the switches of automatic redelivery see it, of the class that was decided.
func switched(row *dbsqlc.ClaimDueRow) *automatic.Entry {
	return &automatic.Entry{
		Queue: row.Queue, Kind: row.Kind, Class: value(row.ErrorClass), JobKind: row.JobKind,
		Backfilled: row.CapturedBy == automatic.CapturedByBackfill, SingleAttempt: row.MaxRetries == 1, Unparked: value(row.Rule) == policy.RuleUnparked,
	}
}

// decide is the planner's decision, and what the switches of automatic redelivery make of it: an entry that would go by
// itself is observed where that is off, and some are a person's.
func (j *judged) decide(row *dbsqlc.ClaimDueRow, entry *strategy.Entry, now time.Time) strategy.Decision {
	d := j.planner.Decide(entry, now)
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

func value[T any](v *T) T {
	if v == nil {
		var none T
		return none
	}
	return *v
}

// aside gathers decided entries that do not go now, and writes them in one statement for each kind of reason.
type aside struct {
	putOff   dbsqlc.PutOffParams
	reserved dbsqlc.ReserveParams
}

// wait has an entry wait until a time, and for something else if that is not empty.
func (a *aside) wait(id uuid.UUID, until time.Time, waitingFor, reason string) {
	a.putOff.Ids = append(a.putOff.Ids, id)
	a.putOff.NextRetryAts = append(a.putOff.NextRetryAts, until)
	a.putOff.WaitingFors = append(a.putOff.WaitingFors, waitingFor)
	a.putOff.Reasons = append(a.putOff.Reasons, reason)
}

// unlessOn puts an entry aside, unless it may go by itself: it is observed, or a person's. It reports whether it did.
func (a *aside) unlessOn(id uuid.UUID, next time.Time, v automatic.Verdict) bool {
	switch {
	case v.Reserved != "":
		a.reserved.Ids = append(a.reserved.Ids, id)
		a.reserved.Rules = append(a.reserved.Rules, v.Reserved)
		a.reserved.Reasons = append(a.reserved.Reasons, v.Reason)
	case !v.On:
		a.wait(id, next, strategy.WaitsForAutomatic, "observed: "+v.Reason)
	default:
		return false
	}
	return true
}

// write writes what was gathered, if anything.
func (a *aside) write(ctx context.Context, q *dbsqlc.Queries, actor string, counts map[string]int) error {
	a.putOff.Actor, a.reserved.Actor = actor, actor
	if n := len(a.putOff.Ids); n > 0 {
		if err := q.PutOff(ctx, a.putOff); err != nil {
			return fmt.Errorf("put off: %w", err)
		}
		counts["put_off"] += n
	}
	if n := len(a.reserved.Ids); n > 0 {
		if err := q.Reserve(ctx, a.reserved); err != nil {
			return fmt.Errorf("park: %w", err)
		}
		counts["parked"] += n
	}
	return nil
}

// decisions are gathered, and written in one statement.
type decisions struct{ params dbsqlc.DecideParams }

// add gathers the decision on an entry, and returns what it comes to: "decided" or "parked".
func (d *decisions) add(id uuid.UUID, of *strategy.Decision) string {
	p := &d.params
	status, action := deadletter.Pending, "decided"
	if of.Strategy == strategy.Manual {
		status, action = deadletter.Manual, "parked"
	}
	tags := of.Tags
	if tags == nil {
		tags = []string{}
	}
	raw, _ := json.Marshal(tags) //nolint:errchkjson // strings
	p.Ids = append(p.Ids, id)
	p.Statuses = append(p.Statuses, string(status))
	p.Strategies = append(p.Strategies, of.Strategy)
	p.ErrorClasses = append(p.ErrorClasses, string(of.Class))
	p.Rules = append(p.Rules, of.Rule)
	p.Fingerprints = append(p.Fingerprints, of.Fingerprint)
	p.NextRetryAts = append(p.NextRetryAts, of.Next)
	p.WaitingFors = append(p.WaitingFors, of.WaitingFor)
	p.MaxRetries = append(p.MaxRetries, int32(of.MaxRetries))
	p.Priorities = append(p.Priorities, int16(of.Priority))
	p.Tags = append(p.Tags, raw)
	p.Assignees = append(p.Assignees, of.Assignee)
	p.Reasons = append(p.Reasons, of.Reason)
	return action
}

// write writes what was gathered, if anything.
func (d *decisions) write(ctx context.Context, q *dbsqlc.Queries, actor, configVersion string) error {
	if len(d.params.Ids) == 0 {
		return nil
	}
	d.params.Actor, d.params.ConfigVersion = actor, configVersion
	return q.Decide(ctx, d.params)
}

// sweep looks once for redeliveries whose end nobody saw.
func (w *Worker) sweep(ctx context.Context) error {
	found, err := w.config.Store.SweepLeases(ctx)
	if err != nil {
		return err
	}
	if found.Settled+found.Requeued > 0 {
		w.config.Logger.Warn("DLQ worker: redeliveries whose end nobody saw", "settled", found.Settled, "requeued", found.Requeued)
	}
	w.config.Observe("lease_settled", found.Settled, 0)
	w.config.Observe("lease_requeued", found.Requeued, 0)
	return nil
}

// notify has the next batch claimed now.
func (w *Worker) notify() { w.batches.Wake() }
