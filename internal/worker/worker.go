// Package worker is the DLQ worker: it claims due dead letters, has the planner decide what happens to those that just
// failed, and redelivers those whose time has come.
package worker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/riverdlq"
)

// Defaults of a worker.
const (
	DefaultPollInterval  = 30 * time.Second
	DefaultBatchSize     = 100
	DefaultSweepInterval = time.Minute

	// How long to wait after an error that may pass.
	errorBackoff = time.Second
	// A wake-up is followed by others while jobs fail: gather them for so long.
	wakeDelay = 20 * time.Millisecond
	// listenRetry is how long to wait before listening again after the connection broke.
	listenRetry = 5 * time.Second
)

// Observer is told of every entry that a worker moved: what it did ("decided", "parked", "redelivered", "put_off"), how
// many, and of every batch's duration.
type Observer func(action string, entries int, took time.Duration)

// Config is what a [Worker] needs.
type Config struct {
	Store         *deadletter.Store
	Planner       *strategy.Planner
	Logger        *slog.Logger
	Name          string        // in locked_by and the audit trail; empty for host and process id
	PollInterval  time.Duration // between looks for due entries, when nothing wakes it; 0 means DefaultPollInterval
	SweepInterval time.Duration // between looks at expired leases; 0 means DefaultSweepInterval
	BatchSize     int           // entries in one transaction; 0 means DefaultBatchSize
	ConfigVersion string        // of the policy, kept with each decision
	// Listen is the pool whose connections may LISTEN; nil to poll only (transaction poolers lack LISTEN).
	Listen    *pgxpool.Pool
	WakeTopic string
	// Now is the time that decides what is due; nil for the database's.
	Now     func() time.Time
	Observe Observer
}

// Worker claims due entries and carries their strategy out. Any number may run, in any number of processes.
type Worker struct {
	config Config
	actor  string
	wake   chan struct{}
	failed atomic.Pointer[error] // of the last batch; nil where it worked
}

// Err is why the last batch failed, nil where it worked.
func (w *Worker) Err() error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// New returns a worker that does not run yet.
func New(config Config) *Worker {
	if config.PollInterval == 0 {
		config.PollInterval = DefaultPollInterval
	}
	if config.SweepInterval == 0 {
		config.SweepInterval = DefaultSweepInterval
	}
	if config.BatchSize == 0 {
		config.BatchSize = DefaultBatchSize
	}
	if config.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown"
		}
		config.Name = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	if config.Observe == nil {
		config.Observe = func(string, int, time.Duration) {}
	}
	return &Worker{config: config, actor: "worker:" + config.Name, wake: make(chan struct{}, 1)}
}

// Run works until ctx is done. A batch that is under way then ends by itself: it is one short transaction.
func (w *Worker) Run(ctx context.Context) {
	if w.config.Listen != nil {
		listening := make(chan struct{})
		go func() {
			defer close(listening)
			w.listen(ctx)
		}()
		defer func() { <-listening }()
	}
	sweep := time.NewTicker(w.config.SweepInterval)
	defer sweep.Stop()
	w.sweep(ctx)
	for ctx.Err() == nil {
		full, err := w.RunOnce(context.WithoutCancel(ctx))
		wait := w.untilNextDue(ctx)
		switch {
		case err != nil:
			w.config.Logger.Error("DLQ worker: batch failed", "error", err)
			wait = errorBackoff
		case full:
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-w.wake:
			sleep(ctx, wakeDelay)
		case <-sweep.C:
			w.sweep(ctx)
		}
		timer.Stop()
	}
}

// untilNextDue is the poll interval, or less where an entry is due sooner.
func (w *Worker) untilNextDue(ctx context.Context) time.Duration {
	next, err := w.config.Store.Queries().NextDue(ctx)
	if err != nil {
		return w.config.PollInterval // nothing is pending, or the database is away: the next look says more
	}
	until := time.Until(next)
	if until <= 0 {
		until = errorBackoff // due, and not claimed: another holds it
	}
	return min(max(until, wakeDelay), w.config.PollInterval)
}

// RunOnce handles one batch of due entries, in one transaction. It reports whether there may be more.
func (w *Worker) RunOnce(ctx context.Context) (bool, error) {
	claimed, err := w.batch(ctx, w.config.BatchSize)
	if postgres.IsRefusal(err) && len(claimed) > 0 {
		err = w.oneByOne(ctx, len(claimed))
	}
	if err != nil {
		w.failed.Store(&err)
		w.config.Observe("error", 1, 0)
		return false, err
	}
	w.failed.Store(nil)
	return len(claimed) == w.config.BatchSize, nil
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
	start := time.Now()
	counts := map[string]int{}
	err = w.config.Store.InTx(ctx, func(q *dbsqlc.Queries, tx pgx.Tx) error {
		params := dbsqlc.ClaimDueParams{MaxEntries: int32(size)}
		now := time.Now()
		if w.config.Now != nil {
			now = w.config.Now()
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
		return w.handle(ctx, q, tx, rows, now, counts)
	})
	if err == nil {
		for action, n := range counts {
			w.config.Observe(action, n, time.Since(start))
		}
	}
	return claimed, err
}

func (w *Worker) handle(ctx context.Context, q *dbsqlc.Queries, tx pgx.Tx, rows []dbsqlc.ClaimDueRow, now time.Time, counts map[string]int) error {
	decide := dbsqlc.DecideParams{Actor: w.actor, ConfigVersion: w.config.ConfigVersion}
	putOff := dbsqlc.PutOffParams{Actor: w.actor}
	var redeliver []uuid.UUID
	for i := range rows {
		row := &rows[i]
		entry := entryOf(row)
		if row.Strategy == nil {
			d := w.config.Planner.Decide(entry, now)
			status, action := deadletter.Pending, "decided"
			if d.Strategy == strategy.Manual {
				status, action = deadletter.Manual, "parked"
			}
			decide.Ids = append(decide.Ids, row.ID)
			decide.Statuses = append(decide.Statuses, string(status))
			decide.Strategies = append(decide.Strategies, d.Strategy)
			decide.ErrorClasses = append(decide.ErrorClasses, string(d.Class))
			decide.Rules = append(decide.Rules, d.Rule)
			decide.Fingerprints = append(decide.Fingerprints, d.Fingerprint)
			decide.NextRetryAts = append(decide.NextRetryAts, d.Next)
			decide.Reasons = append(decide.Reasons, d.Reason)
			counts[action]++
			continue
		}
		if v := w.config.Planner.Due(entry, *row.Strategy, now); v.Redeliver {
			redeliver = append(redeliver, row.ID)
		} else {
			putOff.Ids = append(putOff.Ids, row.ID)
			putOff.NextRetryAts = append(putOff.NextRetryAts, v.Again)
			putOff.Reasons = append(putOff.Reasons, v.Reason)
			counts["put_off"]++
		}
	}
	if len(decide.Ids) > 0 {
		if err := q.Decide(ctx, decide); err != nil {
			return fmt.Errorf("decide: %w", err)
		}
	}
	if len(putOff.Ids) > 0 {
		if err := q.PutOff(ctx, putOff); err != nil {
			return fmt.Errorf("put off: %w", err)
		}
	}
	if len(redeliver) > 0 {
		return w.redeliver(ctx, q, tx, redeliver, counts)
	}
	return nil
}

func (w *Worker) redeliver(ctx context.Context, q *dbsqlc.Queries, tx pgx.Tx, ids []uuid.UUID, counts map[string]int) error {
	redeliveries, err := w.config.Store.Redeliver(ctx, tx, ids, w.actor, "due")
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

func entryOf(row *dbsqlc.ClaimDueRow) strategy.Entry {
	value := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	return strategy.Entry{
		Facts: strategy.Facts{
			Type: value(row.ErrorType), Code: value(row.ErrorCode), Message: row.ErrorMessage,
			Class: riverdlq.Class(value(row.ErrorClass)), Panic: row.ErrorStackTrace != "",
		},
		Trace: row.ErrorStackTrace, Queue: row.Queue, RetryCount: int(row.DlqRetryCount), LastFailedAt: row.LastFailedAt,
	}
}

func (w *Worker) sweep(ctx context.Context) {
	found, err := w.config.Store.SweepLeases(ctx)
	if err != nil {
		if ctx.Err() == nil {
			w.config.Logger.Error("DLQ worker: sweep of leases failed", "error", err)
		}
		return
	}
	if found.Settled+found.Requeued > 0 {
		w.config.Logger.Warn("DLQ worker: redeliveries whose end nobody saw", "settled", found.Settled, "requeued", found.Requeued)
	}
	w.config.Observe("lease_settled", found.Settled, 0)
	w.config.Observe("lease_requeued", found.Requeued, 0)
}

// listen wakes Run at every NOTIFY. It is an optimisation: without it entries wait for the next poll.
func (w *Worker) listen(ctx context.Context) {
	for ctx.Err() == nil {
		if err := w.listenOnce(ctx); err != nil && ctx.Err() == nil {
			w.config.Logger.Warn("DLQ worker: not listening, polling only for now", "error", err)
			sleep(ctx, listenRetry)
		}
	}
}

func (w *Worker) listenOnce(ctx context.Context) error {
	conn, err := w.config.Listen.Acquire(ctx)
	if err != nil {
		return err
	}
	// The connection goes back without its LISTEN, or not at all.
	defer func() { _ = conn.Hijack().Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{w.config.WakeTopic}.Sanitize()); err != nil {
		return err
	}
	w.notify() // what was sent while nobody listened
	for {
		if _, err := conn.Conn().WaitForNotification(ctx); err != nil {
			return err
		}
		w.notify()
	}
}

func (w *Worker) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
