package process

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process judges others only after it has seen the database answer for as long as they are
// silent: after a stall, all of them are.
func TestBeats_judgeOnlyWhatTheySaw(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b beats
	beat := func(at time.Duration) { b.add(start.Add(at), start.Add(at)) }
	before := func() time.Duration {
		lost, sure := b.lostBefore()
		if !sure {
			return -1
		}
		return lost.Sub(start)
	}
	require.EqualValues(t, -1, before(), "before the first beat")
	for at := time.Duration(0); at < silence; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "it has just begun")
	}
	beat(silence)
	require.EqualValues(t, 0, before())
	beat(silence + maxGap)
	require.Equal(t, maxGap, before(), "a short stall")

	back := silence + maxGap + 40*time.Second
	beat(back) // the database hung
	for at := back; at < back+silence; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "whatever was silent meanwhile could not write")
	}
	beat(back + silence)
	require.Equal(t, back, before())

	beat(0) // another server's clock, after a failover
	require.EqualValues(t, -1, before())
}

func TestBeats_doubt(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b beats
	b.add(start, start)
	require.False(t, b.inDoubt(start.Add(trust), time.Hour))
	require.True(t, b.inDoubt(start.Add(trust+1), time.Hour), "others may take this process for dead soon")
	b.add(start.Add(Interval), start.Add(Interval))
	require.False(t, b.inDoubt(start.Add(Interval), time.Hour))
	late := start.Add(Interval + silence)
	b.add(late, late)
	require.True(t, b.inDoubt(time.Now(), time.Hour), "what ran before the gap may have been put back")
	require.False(t, b.inDoubt(late, 0))

	b = beats{}
	b.add(start, start)
	b.add(start.Add(Interval), start.Add(silence)) // the machine was suspended, and its clock with it
	require.True(t, b.inDoubt(start.Add(Interval), time.Hour))
}
