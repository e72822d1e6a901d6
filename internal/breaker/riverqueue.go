package breaker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// QueuePrefix precedes the name of the River queue in a breaker's name.
const QueuePrefix = "queue:"

// queueProbeTime is how long a half-open queue waits for a running job before it lets further jobs run: River's default
// job timeout plus probeGrace.
const queueProbeTime = river.JobTimeoutDefault + probeGrace

// Queues runs the breakers of River queues that an application works. dlqd does not see the attempts of these jobs, so
// it computes the failure rate from the database. A breaker that opens pauses its queue through River, so the
// application's clients fetch no more jobs from it.
type Queues struct {
	Pool     *pgxpool.Pool
	Schemas  postgres.Schemas
	River    *river.Client[pgx.Tx]
	Breakers *Breakers
}

// Loop returns the loop that calls [Queues.RunOnce]. Only one process at a time runs it.
func (w *Queues) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "queue-breakers", Interval: w.Breakers.config.Interval, OneProcess: true, Once: background.Each(w.RunOnce),
		Failing: "circuit breakers of River queues: checking a queue failed",
	})
}

// RunOnce checks each River queue of the policy once. If the policy no longer names a queue that a breaker paused,
// RunOnce resumes the queue, unless an operator opened the breaker.
func (w *Queues) RunOnce(ctx context.Context) error {
	p := w.Breakers.config.Policy()
	var errs []error
	for _, queue := range slices.Sorted(maps.Keys(p.Breakers.RiverQueues)) {
		if err := w.checkQueue(ctx, queue, p.Breakers.RiverQueues[queue]); err != nil {
			errs = append(errs, fmt.Errorf("queue %s: %w", queue, err))
		}
	}
	rows, err := w.Breakers.queries.PausedQueues(ctx)
	errs = append(errs, err)
	for _, name := range rows {
		if queue := strings.TrimPrefix(name, QueuePrefix); p.Breakers.RiverQueues[queue] == nil {
			if err := w.releaseQueue(ctx, queue); err != nil {
				errs = append(errs, fmt.Errorf("queue %s: %w", queue, err))
			}
		}
	}
	return errors.Join(errs...)
}

// releaseQueue resumes a queue that the policy no longer names, and closes its breaker. If an operator opened the
// breaker, releaseQueue changes nothing.
func (w *Queues) releaseQueue(ctx context.Context, queue string) error {
	name := QueuePrefix + queue
	return postgres.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		q := dbsqlc.New(w.Schemas.Rendered(tx))
		if locked, err := q.LockQueueBreaker(ctx, name); err != nil || !locked {
			return err
		}
		row, err := q.QueueBreaker(ctx, name)
		if err != nil || !row.Paused || row.Forced {
			return err
		}
		if _, err := q.ResetBreaker(ctx, dbsqlc.ResetBreakerParams{
			Name: name, Actor: w.Breakers.config.Actor,
			Reason: "the policy no longer names the queue", Now: w.Breakers.config.Now(),
		}); err != nil {
			return err
		}
		return w.resume(ctx, tx, q, queue, true)
	})
}

// checkQueue evaluates the breaker of a queue once. It does nothing while another process evaluates this breaker.
func (w *Queues) checkQueue(ctx context.Context, queue string, settings *policy.Breaker) error {
	name := QueuePrefix + queue
	now := w.Breakers.config.Now()
	return postgres.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		q := dbsqlc.New(w.Schemas.Rendered(tx))
		if locked, err := q.LockQueueBreaker(ctx, name); err != nil || !locked {
			return err
		}
		row, err := q.QueueBreaker(ctx, name)
		if errors.Is(err, pgx.ErrNoRows) {
			row, err = dbsqlc.QueueBreakerRow{State: string(Closed)}, nil
		}
		if err != nil {
			return err
		}
		switch State(row.State) {
		case Closed:
			if row.Paused { // the breaker was reset, so resume the queue that it paused
				return w.resume(ctx, tx, q, queue, true)
			}
			return w.openIfFailing(ctx, tx, q, queue, settings, row.Since, now)
		case Open:
			if row.OpenUntil != nil && !row.OpenUntil.After(now) {
				if err := q.HalfOpenQueue(ctx, dbsqlc.HalfOpenQueueParams{
					Name: name, Now: now, Actor: w.Breakers.config.Actor,
				}); err != nil {
					return err
				}
				return w.resume(ctx, tx, q, queue, row.Paused)
			}
			if !row.Paused { // an operator opened the breaker, or no client worked the queue when it opened
				return w.pause(ctx, tx, q, queue)
			}
		case HalfOpen:
			return w.evaluateProbes(ctx, tx, q, queue, settings, &row, now)
		}
		return nil
	})
}

// openIfFailing opens a closed breaker and pauses its queue if the queue's failure rate is too high.
func (w *Queues) openIfFailing(ctx context.Context, tx pgx.Tx, q *dbsqlc.Queries, queue string,
	settings *policy.Breaker, since, now time.Time,
) error {
	if !settings.Enabled {
		return nil
	}
	from := now.Add(-settings.Window)
	if since.After(from) {
		from = since // earlier failures were counted before the breaker last closed
	}
	ended, err := q.QueueOutcomes(ctx, dbsqlc.QueueOutcomesParams{Since: from, Queue: queue, RunningSince: now})
	if err != nil {
		return err
	}
	total := ended.Succeeded + int64(ended.Failed)
	if total < int64(settings.MinimumCount) || 100*float64(ended.Failed) < settings.FailureRate*float64(total) {
		return nil
	}
	reason := fmt.Sprintf("%d of %d jobs failed", ended.Failed, total)
	if _, err := q.OpenBreaker(ctx, dbsqlc.OpenBreakerParams{
		Name: QueuePrefix + queue, Actor: w.Breakers.config.Actor, Reason: reason, For: &settings.OpenFor, Now: now,
	}); err != nil {
		return err
	}
	return w.pause(ctx, tx, q, queue)
}

// evaluateProbes evaluates a half-open breaker. It pauses the queue while enough jobs run as probes, and closes or
// opens the breaker by the outcomes of these jobs.
func (w *Queues) evaluateProbes(ctx context.Context, tx pgx.Tx, q *dbsqlc.Queries, queue string,
	settings *policy.Breaker, row *dbsqlc.QueueBreakerRow, now time.Time,
) error {
	name := QueuePrefix + queue
	ended, err := q.QueueOutcomes(ctx, dbsqlc.QueueOutcomesParams{
		Since: row.Since, Queue: queue, RunningSince: now.Add(-queueProbeTime),
	})
	if err != nil {
		return err
	}
	failed := int64(ended.Failed)
	total := ended.Succeeded + failed
	switch {
	case total == 0 && ended.Running == 0:
		// No job has been available yet, or the jobs that ran at the pause were snoozed or have run for longer than
		// queueProbeTime.
		return w.resume(ctx, tx, q, queue, row.Paused)
	case total < int64(settings.Probes) && ended.Running > 0:
		if !row.Paused {
			return w.pause(ctx, tx, q, queue)
		}
		return nil
	}
	reason := fmt.Sprintf("%d of %d probes succeeded", ended.Succeeded, total)
	if 100*float64(ended.Succeeded) >= settings.SuccessRate*float64(total) {
		if _, err := q.ResetBreaker(ctx, dbsqlc.ResetBreakerParams{
			Name: name, Actor: w.Breakers.config.Actor, Reason: reason, Now: now,
		}); err != nil {
			return err
		}
		return w.resume(ctx, tx, q, queue, row.Paused)
	}
	if err := q.ReopenQueue(ctx, dbsqlc.ReopenQueueParams{
		Name: name, Now: now, OpenUntil: now.Add(settings.OpenFor), Succeeded: int32(ended.Succeeded),
		Failed: int32(failed), Reason: reason, Actor: w.Breakers.config.Actor,
	}); err != nil {
		return err
	}
	return w.pause(ctx, tx, q, queue)
}

// pause pauses a queue through River and records that the breaker paused it, so that resume does not resume a queue
// that an operator paused.
func (w *Queues) pause(ctx context.Context, tx pgx.Tx, q *dbsqlc.Queries, queue string) error {
	row, err := w.River.QueueGetTx(ctx, tx, queue)
	if errors.Is(err, river.ErrNotFound) {
		return nil // no client works the queue yet
	}
	if err != nil || row.PausedAt != nil { // an operator paused the queue before
		return err
	}
	if err := w.River.QueuePauseTx(ctx, tx, queue, nil); err != nil {
		return err
	}
	return q.SetPaused(ctx, dbsqlc.SetPausedParams{Name: QueuePrefix + queue, Paused: true})
}

// resume resumes a queue if paused is true, that is, if the breaker paused the queue.
func (w *Queues) resume(ctx context.Context, tx pgx.Tx, q *dbsqlc.Queries, queue string, paused bool) error {
	if !paused {
		return nil
	}
	if err := w.River.QueueResumeTx(ctx, tx, queue, nil); err != nil && !errors.Is(err, river.ErrNotFound) {
		return err
	}
	return q.SetPaused(ctx, dbsqlc.SetPausedParams{Name: QueuePrefix + queue, Paused: false})
}
