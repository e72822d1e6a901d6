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
	HeldForBreaker = "breaker" // the breaker of the message's destination is open
	HeldForOrder   = "order"   // an earlier message with the same ordering key is not done
	// HeldForRedirected: the message is a redelivery to a destination other than its queue's, and
	// that destination's breaker is open.
	HeldForRedirected = "redirected"
	// HeldForRestored: the database was restored from a backup, and the message may have been delivered after that
	// backup.
	HeldForRestored = "restored"
)

const (
	// releaseInterval is the time between two rounds of the releaser.
	releaseInterval = time.Second
	// holdTime is the longest time until a held message is checked again, before jitter. Usually the releaser or the
	// predecessor releases the message earlier; holdTime is for a release that was missed. Each check costs as much as a
	// delivery.
	holdTime = 15 * time.Minute
	// maxWake is the maximum number of ordering keys in one round. A key takes some 0.1 ms.
	maxWake = 500
	// maxRelease is the maximum number of messages that one round releases for a destination, and for a restored
	// database.
	maxRelease = 1000
	// restoredLinger is how long other processes may still hold messages after an operator has resumed sending.
	restoredLinger = time.Minute
	// maxDoublings is the maximum number of doublings of a hold time of 1 s. 20 doublings exceed holdTime.
	maxDoublings = 20
)

// HoldTime returns how long to hold a message. It is spread at random, so that messages held together do not return
// together.
func HoldTime() time.Duration { return spread(holdTime) }

func spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (1 - jitterShare + 2*jitterShare*mathrand.Float64()))
}

// hold postpones a message for the given reason, without spending an attempt. If err is not nil, the check failed and
// its result is unknown: the message is checked again in a second.
func hold(ctx context.Context, job *river.Job[Args], reason string, err error) (string, error) {
	if err != nil {
		return OutcomeHeld, errors.Join(river.JobSnooze(time.Second), err)
	}
	if err := river.MetadataSet(ctx, HeldKey, reason); err != nil {
		return OutcomeHeld, err
	}
	most := holdTime
	if reason != HeldForBreaker && reason != HeldForRestored {
		// The releaser does not handle redirected destinations. It can also miss a message whose predecessor ends before
		// the message is visible as held. So these messages are checked after a second, and then at doubling intervals. The
		// releaser usually releases an ordered message earlier.
		most = min(time.Second<<min(metadataOf(job).Snoozes, maxDoublings), holdTime)
	}
	return OutcomeHeld, river.JobSnooze(spread(most))
}

// Releaser releases held messages. For an open breaker it releases a few messages as probes. After the breaker has
// closed, it releases as many as the destination takes ([breaker.Breakers.Places]), up to maxRelease and the
// destination's pace. It also releases messages whose predecessor is done, and the messages of a restored database
// after an operator has resumed sending.
type Releaser struct {
	DB       postgres.DB // renders schema names in queries
	Policy   func() *policy.Policy
	Breakers *breaker.Breakers
	Logger   *slog.Logger
	// Restored, if not nil, reports whether messages are held because the database was restored.
	Restored func() bool

	// resumedAt is when Restored last returned true, or when the loop started. It is zero once no message is held because
	// of a restore.
	resumedAt time.Time
	// queue and orderingKey identify the last ordering key that the previous round read. The next round begins after that
	// key.
	queue, orderingKey string

	drained map[string]bool // by destination: whether no message is held for its breaker
}

// Loop returns the loop that releases held messages.
func (r *Releaser) Loop() *background.Loop {
	r.drained, r.resumedAt = map[string]bool{}, time.Now()
	return background.New(background.Config{
		Name: "held-messages", Interval: releaseInterval,
		Once: background.Each(r.once), Failing: "releasing held messages failed",
	})
}

// once runs one round. It releases messages held because of a restore, then the first messages of ordering keys, then
// the messages that the breakers of their destinations let through.
func (r *Releaser) once(ctx context.Context) error {
	errs := []error{r.releaseRestored(ctx), r.wakeOrdered(ctx)}
	for name := range r.Policy().Destinations {
		if err := r.releaseFor(ctx, name); err != nil {
			errs = append(errs, fmt.Errorf("destination %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// wakeOrdered releases messages whose predecessor is done. Usually the end of a message releases the next one of its
// key. That fails if the next message is locked or not yet visible as held, if the predecessor was deleted, or if the
// process that worked on the predecessor died.
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

// releaseFor releases messages of a destination as its breaker, the breaker's ramp and redeliveriesPerSecond permit:
// none while the breaker is open, and as many as it takes probes once it is half-open.
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

// releaseRestored releases the messages that were held because the database was restored, once an operator has resumed
// sending. After the start of this process, it also releases messages that another process left held.
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
	// Other processes may hold further messages for restoredLinger after the resume.
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

// ForgetOrdered deletes the rows of dlq.ordered_jobs that belong to messages whose work is done.
func ForgetOrdered(ctx context.Context, db postgres.DB) error {
	_, err := dbsqlc.New(db).ForgetOrdered(ctx)
	return err
}

// LiveJobs has the number of jobs of a queue that are in a state, and how many of these jobs are held.
type LiveJobs = dbsqlc.LiveJobsRow

// QueueFlow has, for a queue, when its oldest ready job became ready, how many jobs that were due since Since have
// completed, and how many jobs were inserted since InsertedSince. A time that is absent is the epoch. See
// dlq.queue_flow.
type QueueFlow = dbsqlc.QueueFlowRow

// FlowOf returns the flow of each of the given queues.
func FlowOf(ctx context.Context, db postgres.DB, queues []string) ([]QueueFlow, error) {
	return dbsqlc.New(db).QueueFlow(ctx, queues)
}

// CountLiveJobs counts jobs that have not ended, by queue and state.
func CountLiveJobs(ctx context.Context, db postgres.DB) ([]LiveJobs, error) {
	return dbsqlc.New(db).LiveJobs(ctx)
}
