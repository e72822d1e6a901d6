package process

import (
	"context"
	"fmt"
	"time"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/process/internal/dbsqlc"
)

const (
	// silence is how long a process must be unseen, by the database's clock, before its running
	// messages are put back. It is six beats.
	silence = 30 * time.Second
	// maxGap is the longest time between two beats of this process, by the database's clock, during
	// which the database counts as answering. After a shorter stall, a process is seen again within
	// silence: the stall, a beat that times out and the pause after it take 25 s.
	maxGap = 15 * time.Second
	// trust is how long after the start of its last beat a process may assume that its jobs were
	// not put back. The rest of silence is for a statement to reach the database.
	trust = 20 * time.Second
	// dutyTime is how long a process holds the duty to rescue, which it renews every interval.
	dutyTime = 15 * time.Second
	// rescueTimeout bounds a turn.
	rescueTimeout = 20 * time.Second
	// maxRescue bounds the messages that one transaction puts back.
	maxRescue = 500
)

// beats records when the database wrote that this process is alive.
type beats struct {
	since   time.Time // by the database's clock: the first of the latest beats without a gap
	last    time.Time // by the database's clock: the latest beat
	began   time.Time // by this machine's clock: when the latest beat was sent
	doubted time.Time // by this machine's clock: when a beat was so late that others may have put back jobs
}

func (b *beats) add(began, seenAt time.Time) {
	if gap := seenAt.Sub(b.last); gap > maxGap || gap < 0 {
		b.since = seenAt
	}
	if !b.last.IsZero() && (began.Sub(b.began) > trust || seenAt.Sub(b.last) > trust) {
		b.doubted = time.Now()
	}
	b.last, b.began = seenAt, began
}

// lostBefore returns a time by the database's clock: a process that was last seen before it counts
// as dead. It returns false if this process has not seen the database answer for long enough to
// judge.
func (b *beats) lostBefore() (time.Time, bool) {
	before := b.last.Add(-silence)
	return before, !b.last.IsZero() && !b.since.After(before)
}

// inDoubt reports whether other processes may have put back a job that this process runs now, or
// has run since now minus within.
func (b *beats) inDoubt(now time.Time, within time.Duration) bool {
	return now.Sub(b.began) > trust || !b.doubted.IsZero() && now.Sub(b.doubted) < within
}

// InDoubt reports whether other processes may have put back a job that this process began no longer
// ago than within.
func (p *Process) InDoubt(within time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.beats.inDoubt(time.Now(), within)
}

// Rescue returns the loop that puts back the messages that dead processes were delivering. Of all
// processes, only the one that holds the duty does it.
func (p *Process) Rescue() *background.Loop {
	return background.New(background.Config{
		Name: "rescue", Interval: Interval, Timeout: rescueTimeout, OneProcess: true, Once: p.rescue,
		Failing: "messages that a process was delivering when it died wait for River's rescuer, minutes longer",
	})
}

func (p *Process) rescue(ctx context.Context) (time.Duration, error) {
	p.mu.Lock()
	before, sure := p.beats.lostBefore()
	p.mu.Unlock()
	if !sure {
		return 0, nil
	}
	queries := dbsqlc.New(p.config.DB)
	taken, err := queries.TakeRescue(ctx, dbsqlc.TakeRescueParams{Holder: p.id, During: dutyTime})
	if err != nil || !taken {
		return 0, err
	}
	messages, err := queries.RescueMessages(ctx, dbsqlc.RescueMessagesParams{SeenBefore: before, MaxJobs: maxRescue})
	if err != nil {
		return 0, fmt.Errorf("messages of processes that died: %w", err)
	}
	if messages.Retried+messages.Ended > 0 {
		p.config.Logger.Warn("messages of a process that was not seen any more were put back",
			"retried", messages.Retried, "ended", messages.Ended)
	}
	if messages.Retried+messages.Ended == maxRescue {
		return background.More, nil
	}
	return 0, nil
}
