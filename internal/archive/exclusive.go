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
	// dutyTime is how long the duty of a process that died lasts after its last renewal; dutyWord
	// is the time between renewals.
	dutyTime = 5 * time.Minute
	dutyWord = time.Minute
	// dutyPause is how often a waiting process tries to take the duty.
	dutyPause = 250 * time.Millisecond
)

var errLostDuty = errors.New("another process writes the archive: this one was not heard of for too long")

// Exclusively runs fn while no other process writes the archive or removes what goes there. It
// returns false if another process keeps the duty for longer than wait. It holds no connection and
// no transaction while fn runs.
func Exclusively(ctx context.Context, store *deadletter.Store, wait time.Duration, fn func(ctx context.Context) error) (ran bool, err error) {
	holder := uuid.New()
	q := dbsqlc.New(store.DB())
	take := func(ctx context.Context) (bool, error) {
		return q.TakeDuty(ctx, dbsqlc.TakeDutyParams{Holder: holder, During: dutyTime})
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
		case <-time.After(dutyPause):
		}
	}
	working, cancel := context.WithCancelCause(ctx)
	said := make(chan struct{})
	go func() {
		defer close(said)
		ticks := time.NewTicker(dutyWord)
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
			} else if err == nil || time.Since(last) > dutyTime-dutyWord {
				cancel(errLostDuty)
				return
			}
		}
	}()
	defer func() {
		cancel(nil)
		<-said
		_ = q.EndDuty(context.WithoutCancel(ctx), holder) // if this fails, the duty expires
	}()
	if err = fn(working); err != nil && errors.Is(context.Cause(working), errLostDuty) {
		err = errors.Join(errLostDuty, err)
	}
	return true, err
}
