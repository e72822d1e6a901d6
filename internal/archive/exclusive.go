package archive

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/archive/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
)

const (
	// leaseTime is how long a lease lasts after its last renewal, for example if its process has died. renewInterval is
	// the time between renewals.
	leaseTime     = 5 * time.Minute
	renewInterval = time.Minute
	// pollInterval is the time between attempts of a waiting process to take the lease.
	pollInterval = 250 * time.Millisecond
)

var errLostLease = errors.New("this process lost its lease on the archive: it did not renew it in time")

// RunExclusive runs fn while no other process writes the archive or removes data that is archived. It returns false if
// another process holds the lease for longer than wait. While fn runs, RunExclusive holds no connection and no
// transaction. If it loses the lease, it cancels fn's context, and its error includes errLostLease.
func RunExclusive(ctx context.Context, store *deadletter.Store, wait time.Duration,
	fn func(ctx context.Context) error,
) (ran bool, err error) {
	holder := uuid.New()
	q := dbsqlc.New(store.DB())
	take := func(ctx context.Context) (bool, error) {
		return q.TakeDuty(ctx, dbsqlc.TakeDutyParams{Holder: holder, During: leaseTime})
	}
	for end := time.Now().Add(wait); ; {
		taken, err := take(ctx)
		if err != nil {
			return false, err
		}
		if taken {
			break
		}
		if time.Now().After(end) {
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(pollInterval):
		}
	}
	working, cancel := context.WithCancelCause(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		ticks := time.NewTicker(renewInterval)
		defer ticks.Stop()
		for last := time.Now(); ; {
			select {
			case <-working.Done():
				return
			case <-ticks.C:
			}
			taken, err := take(working)
			if err == nil && taken {
				last = time.Now()
			} else if err == nil || time.Since(last) > leaseTime-renewInterval {
				cancel(errLostLease)
				return
			}
		}
	}()
	defer func() {
		cancel(nil)
		<-stopped
		_ = q.EndDuty(context.WithoutCancel(ctx), holder) // if this fails, the lease expires
	}()
	if err = fn(working); err != nil && errors.Is(context.Cause(working), errLostLease) {
		err = errors.Join(errLostLease, err)
	}
	return true, err
}
