package process

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process judges others only after the database has answered it for as long as they have been silent: after a
// stall, all others look silent.
func TestHeartbeats_JudgeOnlyWhileTheDatabaseAnswers(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b heartbeats
	beat := func(at time.Duration) { b.record(start.Add(at), start.Add(at)) }
	before := func() time.Duration {
		deadBefore, sure := b.deadBefore()
		if !sure {
			return -1
		}
		return deadBefore.Sub(start)
	}
	require.EqualValues(t, -1, before(), "before the first heartbeat")
	for at := time.Duration(0); at < deadAfter; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "not enough heartbeats yet")
	}
	beat(deadAfter)
	require.EqualValues(t, 0, before())
	beat(deadAfter + maxGap)
	require.Equal(t, maxGap, before(), "a short stall")

	back := deadAfter + maxGap + 40*time.Second
	beat(back) // a late heartbeat: the database hung
	for at := back; at < back+deadAfter; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "other processes could not write meanwhile either")
	}
	beat(back + deadAfter)
	require.Equal(t, back, before())

	beat(0) // an earlier time: the clock of another server, after a failover
	require.EqualValues(t, -1, before())
}

func TestHeartbeats_LateHeartbeatPutsJobsInDoubt(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b heartbeats
	b.record(start, start)
	require.False(t, b.inDoubt(start.Add(heartbeatValidFor), time.Hour))
	require.True(t, b.inDoubt(start.Add(heartbeatValidFor+1), time.Hour),
		"other processes may soon consider this one dead")
	b.record(start.Add(Interval), start.Add(Interval))
	require.False(t, b.inDoubt(start.Add(Interval), time.Hour))
	late := start.Add(Interval + deadAfter)
	b.record(late, late)
	require.True(t, b.inDoubt(time.Now(), time.Hour), "jobs from before the gap may have been put back")
	require.False(t, b.inDoubt(late, 0))

	b = heartbeats{}
	b.record(start, start)
	b.record(start.Add(Interval), start.Add(deadAfter)) // the machine was suspended, and its clock with it
	require.True(t, b.inDoubt(start.Add(Interval), time.Hour))
}
