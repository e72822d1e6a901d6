package delivery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"time"

	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// HeldKey is the key of a job's metadata that says why its message is held.
const HeldKey = "dlq:held"

// Reasons to hold a message.
const (
	HeldForBreaker = "breaker" // its destination's breaker is open
	HeldForOrder   = "order"   // an earlier message of its ordering key is not done
	// HeldForRedirected: the message is a redelivery to a destination other than its queue's, and
	// that destination's breaker is open.
	HeldForRedirected = "redirected"
	// HeldForRestored: the database was restored, and the message may have been delivered since the
	// backup.
	HeldForRestored = "restored"
)

const (
	// releaseInterval is the time between two rounds of the releaser.
	releaseInterval = time.Second
	// holdTime is the longest time until a held message is checked again, before jitter. Usually
	// the releaser or the predecessor releases the message earlier; holdTime covers a release that
	// was missed. Each recheck costs as much as a delivery.
	holdTime = 15 * time.Minute
	// maxWake bounds the ordering keys that one round looks at. A key takes some 0.1 ms.
	maxWake = 500
	// maxRelease bounds the messages of a destination that one round releases.
	maxRelease = 1000
	// restoredLinger is how long messages may still become held after an operator has resumed a restored database.
	restoredLinger = time.Minute
	// maxDoublings bounds the doublings of a hold time: 20 exceed holdTime.
	maxDoublings = 20
)

// HoldTime returns how long to hold a message, spread so that messages held together do not return
// together.
func HoldTime() time.Duration { return spread(holdTime) }

func spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (1 - jitterShare + 2*jitterShare*mathrand.Float64()))
}

// hold postpones a message without spending an attempt. If err is not nil, the check itself failed,
// and the message is checked again in a second.
func hold(ctx context.Context, job *river.Job[Args], reason string, err error) (string, error) {
	if err != nil {
		return OutcomeHeld, errors.Join(river.JobSnooze(time.Second), err)
	}
	if err := river.MetadataSet(ctx, HeldKey, reason); err != nil {
		return OutcomeHeld, err
	}
	most := holdTime
	if reason != HeldForBreaker && reason != HeldForRestored {
		// The releaser does not handle redirected destinations, and it can miss a message whose predecessor ends before
		// the message is visible as held. So these messages are checked after a second, and then at doubling intervals.
		// The releaser usually releases an ordered message earlier.
		most = min(time.Second<<min(metadataOf(job).Snoozes, maxDoublings), holdTime)
	}
	return OutcomeHeld, river.JobSnooze(spread(most))
}

// Releaser releases held messages. Those held for a breaker are released as the breaker permits: a
// few as probes and, after it has closed, as many as the destination takes ([breaker.Breakers.Places]), up to
// maxRelease and the destination's pace. Releaser also releases messages whose predecessor is done, and those of a
// restored database after it was resumed.
type Releaser struct {
	DB       postgres.DB // renders schema names in queries
	Policy   func() *policy.Policy
	Breakers *breaker.Breakers
	Logger   *slog.Logger
	// Restored, if not nil, reports whether messages are held because the database was restored.
	Restored func() bool

	// resumedAt is when Restored last returned true, or when the loop started. It is zero once no
	// message is held for a restore.
	resumedAt time.Time
	// queue and orderingKey identify the last ordering key that the previous round read. The next round begins after
	// it.
	queue, orderingKey string

	drained map[string]bool // by destination: no message is held
}

// Loop returns the loop that releases held messages.
func (r *Releaser) Loop() *background.Loop {
	r.drained, r.resumedAt = map[string]bool{}, time.Now()
	return background.New(background.Config{
		Name: "held-messages", Interval: releaseInterval,
		Once: background.Each(r.once), Failing: "releasing held messages failed",
	})
}

// once runs one round. It releases messages held for a restored database, then the first messages of
// ordering keys, then messages held for breakers that permit it.
func (r *Releaser) once(ctx context.Context) error {
	errs := []error{r.releaseRestored(ctx), r.wakeOrdered(ctx)}
	for name := range r.Policy().Destinations {
		if err := r.releaseFor(ctx, name); err != nil {
			errs = append(errs, fmt.Errorf("destination %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// wakeOrdered releases messages whose predecessor is done. Usually the end of a message releases
// the next one of its key. That fails if the next one is just becoming held or is locked, if the
// predecessor was deleted, or if the process that worked on the predecessor died.
func (r *Releaser) wakeOrdered(ctx context.Context) error {
	last, err := dbsqlc.New(r.DB).WakeOrdered(ctx, dbsqlc.WakeOrderedParams{
		MaxKeys: maxWake, Queue: r.queue, OrderingKey: r.orderingKey,
	})
	if err != nil {
		return fmt.Errorf("ordered messages: %w", err)
	}
	r.queue, r.orderingKey = last.Queue, last.OrderingKey
	if last.Woken > 0 {
		r.Logger.Debug("messages held for their order released", "messages", last.Woken)
	}
	return nil
}

// releaseFor releases messages of a destination as its breaker, the breaker's ramp and redeliveriesPerSecond permit.
func (r *Releaser) releaseFor(ctx context.Context, destination string) error {
	p := r.Policy()
	settings := p.Breaker(destination)
	status, wait := r.Breakers.State(breaker.DestinationPrefix + destination)
	if status != breaker.Closed {
		r.drained[destination] = false
		if status == breaker.Open && wait > 0 {
			return nil
		}
		_, err := r.release(ctx, destination, settings.Probes)
		return err
	}
	// The breaker may have opened and closed between two rounds.
	if r.drained[destination] && !r.Breakers.Paces(destination) {
		return nil
	}
	places := r.Breakers.Places(destination, maxRelease)
	if rate := p.Destinations[destination].RedeliveriesPerSecond; rate > 0 && places > 0 {
		within := releaseInterval
		paced, err := deadletter.ReservePlaces(ctx, r.DB, breaker.DestinationPrefix+destination, rate, places, time.Now(),
			&within)
		if err != nil {
			return err
		}
		places = paced.Granted
	}
	if places == 0 {
		return nil
	}
	released, err := r.release(ctx, destination, places)
	r.drained[destination] = err == nil && r.Breakers.Released(destination, released, places)
	return err
}

// releaseRestored releases the messages that are held because the database was restored, after an
// operator has resumed them. After a start it also releases messages that another process left
// held.
func (r *Releaser) releaseRestored(ctx context.Context) error {
	if r.Restored == nil {
		return nil
	}
	if r.Restored() {
		r.resumedAt = time.Now()
		return nil
	}
	if r.resumedAt.IsZero() {
		return nil
	}
	released, err := dbsqlc.New(r.DB).ReleaseHeld(ctx, dbsqlc.ReleaseHeldParams{
		Queues: r.Policy().QueueNames(), MaxJobs: maxRelease, Horizon: holdTime * 2, Held: HeldForRestored,
	})
	// For a moment, other processes may still hold messages.
	if err == nil && released < maxRelease && time.Since(r.resumedAt) > restoredLinger {
		r.resumedAt = time.Time{}
	}
	return err
}

func (r *Releaser) release(ctx context.Context, destination string, most int) (int, error) {
	released, err := dbsqlc.New(r.DB).ReleaseHeld(ctx, dbsqlc.ReleaseHeldParams{
		Queues: r.Policy().QueuesOf(destination), MaxJobs: int32(most), Horizon: holdTime * 2, Held: HeldForBreaker,
	})
	if released > 0 {
		r.Logger.Debug("held messages released", "destination", destination, "messages", released)
	}
	return int(released), err
}

// ForgetOrdered deletes the order rows of messages whose work is done.
func ForgetOrdered(ctx context.Context, db postgres.DB) error {
	_, err := dbsqlc.New(db).ForgetOrdered(ctx)
	return err
}

// LiveJobs is the number of jobs of a queue in a state, and how many of them are held.
type LiveJobs = dbsqlc.LiveJobsRow

// QueueFlow is when the oldest ready job of a queue became ready, and how many jobs completed since a time. A time that
// is absent is the epoch.
type QueueFlow = dbsqlc.QueueFlowRow

// FlowOf returns the flow of each of the queues.
func FlowOf(ctx context.Context, db postgres.DB, queues []string) ([]QueueFlow, error) {
	return dbsqlc.New(db).QueueFlow(ctx, queues)
}

// CountLiveJobs counts jobs that have not ended, by queue and state.
func CountLiveJobs(ctx context.Context, db postgres.DB) ([]LiveJobs, error) {
	return dbsqlc.New(db).LiveJobs(ctx)
}
