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
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/pace"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// HeldKey is the key of a job's metadata that says what a message is held for.
const HeldKey = "dlq:held"

// What a message is held for.
const (
	HeldForBreaker = "breaker" // its destination's breaker is open
	HeldForOrder   = "order"   // another of its ordering key comes first
	// HeldForRedirected is for a redelivery to another destination than its queue's, whose breaker is open.
	HeldForRedirected = "redirected"
	// HeldForRestored is for what a database that was restored may have delivered since.
	HeldForRestored = "restored"
)

const (
	// releaseInterval is how often held messages are looked at.
	releaseInterval = time.Second
	// holdTime is how long a message is held at most: what it waits for releases it, and this is for what nobody saw.
	// Each look costs as much as a delivery.
	holdTime = 15 * time.Minute
	// maxRelease bounds what is released at once.
	maxRelease = 1000
	// lingerDoublings is for how many seconds after a breaker has closed messages may still come to be held.
	lingerDoublings = 10
	// restoredLinger is for how long after a restored database goes on messages may still come to be held.
	restoredLinger = time.Minute
	// maxDoublings is after how many seconds the ramp has long passed every pace.
	maxDoublings = 20
)

// HoldTime is how long to hold a message, spread so that messages that were held together do not come back together.
func HoldTime() time.Duration { return spread(holdTime) }

func spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (1 - jitterShare + 2*jitterShare*mathrand.Float64()))
}

// hold puts a message off without spending an attempt. err, if any, is why it is not known whether it may go.
func hold(ctx context.Context, job *river.Job[Args], reason string, err error) (string, error) {
	if err != nil {
		return OutcomeHeld, errors.Join(river.JobSnooze(time.Second), err)
	}
	if err := river.MetadataSet(ctx, HeldKey, reason); err != nil {
		return OutcomeHeld, err
	}
	most := holdTime
	if reason != HeldForBreaker && reason != HeldForRestored {
		// What it waits for may have ended since it was asked, and before this message can be found held; and who releases a
		// queue's messages knows the queue's destination alone: look again soon, and ever later.
		most = min(time.Second<<min(metadataOf(job).Snoozes, maxDoublings), holdTime)
	}
	return OutcomeHeld, river.JobSnooze(spread(most))
}

// Releaser lets held messages go when their destination's breaker lets them: a few as probes, and once it has closed all
// of them, the more the longer it stays closed, up to the destination's pace.
type Releaser struct {
	DB       postgres.DB // with the schemas' names put into queries
	Policy   func() *policy.Policy
	Breakers *breaker.Breakers
	Logger   *slog.Logger
	// Restored, if not nil, reports whether messages are held since the database was restored.
	Restored func() bool

	goesOn  time.Time            // since when they are not; zero once all were released
	closed  map[string]time.Time // since when each breaker is closed, while messages may be held for it
	drained map[string]bool      // no message is held
}

// Loop keeps releasing.
func (r *Releaser) Loop() *background.Loop {
	r.closed, r.drained, r.goesOn = map[string]time.Time{}, map[string]bool{}, time.Now()
	return background.New(background.Config{
		Name: "held-messages", Interval: releaseInterval, Once: background.Each(r.once), Failing: "held messages are not released",
	})
}

// once looks once at every destination.
func (r *Releaser) once(ctx context.Context) error {
	errs := []error{r.goOn(ctx)}
	for name := range r.Policy().Destinations {
		if err := r.look(ctx, name); err != nil {
			errs = append(errs, fmt.Errorf("destination %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (r *Releaser) look(ctx context.Context, destination string) error {
	p := r.Policy()
	settings := p.Breaker(destination)
	status, wait := r.Breakers.State(breaker.DestinationPrefix + destination)
	if status != breaker.Closed {
		delete(r.closed, destination)
		r.drained[destination] = false
		if status == breaker.Open && wait > 0 {
			return nil
		}
		_, err := r.release(ctx, destination, settings.Probes)
		return err
	}
	if r.drained[destination] {
		return nil
	}
	now := time.Now()
	if r.closed[destination].IsZero() {
		r.closed[destination] = now
	}
	doublings := min(int(now.Sub(r.closed[destination])/time.Second), maxDoublings)
	most := min(settings.Probes<<doublings, maxRelease)
	if rate := p.Destinations[destination].RedeliveriesPerSecond; rate > 0 {
		within := releaseInterval
		places, err := pace.Reserve(ctx, r.DB, breaker.DestinationPrefix+destination, rate, most, now, &within)
		if err != nil {
			return err
		}
		most = places.Granted
	}
	if most == 0 {
		return nil
	}
	released, err := r.release(ctx, destination, most)
	// A message that was being held the moment that it closed is found a little later.
	r.drained[destination] = err == nil && released < most && doublings >= lingerDoublings
	return err
}

// goOn releases what was held since the database was restored, once a person let it go on; at a start, what another process left.
func (r *Releaser) goOn(ctx context.Context) error {
	if r.Restored == nil {
		return nil
	}
	if r.Restored() {
		r.goesOn = time.Now()
		return nil
	}
	if r.goesOn.IsZero() {
		return nil
	}
	released, err := dbsqlc.New(r.DB).ReleaseHeld(ctx, dbsqlc.ReleaseHeldParams{
		Queues: r.Policy().QueueNames(), MaxJobs: maxRelease, Horizon: holdTime * 2, Held: HeldForRestored,
	})
	// Another process may not know yet that they go on.
	if err == nil && released < maxRelease && time.Since(r.goesOn) > restoredLinger {
		r.goesOn = time.Time{}
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

// ForgetOrdered takes away the places of ordered messages whose work is done.
func ForgetOrdered(ctx context.Context, db postgres.DB) error {
	_, err := dbsqlc.New(db).ForgetOrdered(ctx)
	return err
}

// LiveJobs are the jobs of a queue in a state, and how many of them are held.
type LiveJobs = dbsqlc.LiveJobsRow

// CountLiveJobs counts the jobs that have not ended.
func CountLiveJobs(ctx context.Context, db postgres.DB) ([]LiveJobs, error) {
	return dbsqlc.New(db).LiveJobs(ctx)
}
