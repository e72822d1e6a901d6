package process

import (
	"context"
	"fmt"
	"time"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/process/internal/dbsqlc"
)

const (
	// deadAfter is how long a process must be silent, by the database's clock, before other processes put its running
	// messages back. It is six heartbeats.
	deadAfter = 30 * time.Second
	// maxGap is the longest time between two heartbeats of this process, by the database's clock, in which the database
	// counts as answering. After a shorter stall of the database, every live process is seen again within deadAfter: the
	// stall, a heartbeat that times out and the pause after that heartbeat take 25 s together.
	maxGap = 15 * time.Second
	// heartbeatValidFor is how long after the start of its last heartbeat a process may assume that its jobs were not
	// rescued. The remaining time until deadAfter is for a statement to reach the database.
	heartbeatValidFor = 20 * time.Second
	// rescueLease is how long a process may rescue messages before it must renew its lease. It renews the lease every
	// interval. Other processes rescue nothing meanwhile.
	rescueLease = 15 * time.Second
	// rescueTimeout bounds one turn of the rescue.
	rescueTimeout = 20 * time.Second
	// maxRescue is the maximum number of messages that one transaction rescues.
	maxRescue = 500
)

// heartbeats records when the database confirmed that this process is alive.
type heartbeats struct {
	since  time.Time // by the database's clock: the first of the latest heartbeats that have no gap between them
	last   time.Time // by the database's clock: the latest heartbeat
	began  time.Time // by this machine's clock: when the latest heartbeat was sent
	lateAt time.Time // by this machine's clock: the last heartbeat that was so late that jobs may have been rescued
}

func (b *heartbeats) record(began, seenAt time.Time) {
	if gap := seenAt.Sub(b.last); gap > maxGap || gap < 0 {
		b.since = seenAt
	}
	if !b.last.IsZero() && (began.Sub(b.began) > heartbeatValidFor || seenAt.Sub(b.last) > heartbeatValidFor) {
		b.lateAt = time.Now()
	}
	b.last, b.began = seenAt, began
}

// deadBefore returns a time by the database's clock. A process whose last heartbeat is older counts as dead. deadBefore
// returns false if the database has not answered this process for long enough to decide that.
func (b *heartbeats) deadBefore() (time.Time, bool) {
	before := b.last.Add(-deadAfter)
	return before, !b.last.IsZero() && !b.since.After(before)
}

// inDoubt reports whether another process may have rescued a job of this process, so that the job may run twice: a job
// that runs now, or that ran after now.Add(-within).
func (b *heartbeats) inDoubt(now time.Time, within time.Duration) bool {
	return now.Sub(b.began) > heartbeatValidFor || !b.lateAt.IsZero() && now.Sub(b.lateAt) < within
}

// InDoubt reports whether another process may have rescued a job of this process, so that the job may run twice: a job
// that runs now, or that ran after time.Now().Add(-within).
func (p *Process) InDoubt(within time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.heartbeats.inDoubt(time.Now(), within)
}

// Rescue returns the loop that rescues the messages that dead processes were delivering. Only the process with the
// lease does so.
func (p *Process) Rescue() *background.Loop {
	return background.New(background.Config{
		Name: "rescue", Interval: Interval, Timeout: rescueTimeout, OneProcess: true, Once: p.rescue,
		Failing: "rescuing the messages of dead processes failed; River's rescuer puts them back minutes later",
	})
}

func (p *Process) rescue(ctx context.Context) (time.Duration, error) {
	p.mu.Lock()
	before, sure := p.heartbeats.deadBefore()
	p.mu.Unlock()
	if !sure {
		return 0, nil
	}
	queries := dbsqlc.New(p.config.DB)
	taken, err := queries.TakeRescue(ctx, dbsqlc.TakeRescueParams{Holder: p.id, During: rescueLease})
	if err != nil || !taken {
		return 0, err
	}
	messages, err := queries.RescueMessages(ctx, dbsqlc.RescueMessagesParams{SeenBefore: before, MaxJobs: maxRescue})
	if err != nil {
		return 0, fmt.Errorf("rescue messages of dead processes: %w", err)
	}
	if messages.Retried+messages.Ended > 0 {
		p.config.Logger.Warn("messages of dead processes were rescued",
			"retried", messages.Retried, "ended", messages.Ended)
	}
	if messages.Retried+messages.Ended == maxRescue {
		return background.More, nil
	}
	return 0, nil
}
