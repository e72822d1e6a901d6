package background

import (
	"slices"
	"time"
)

// restTurns is the number of turns that a [Rest] remembers.
const restTurns = 5

// Rest limits the share of time in which a loop works. It uses the median duration of the last turns, so that one turn
// that hung does not delay the next.
type Rest struct {
	Multiple int           // the rest after a turn, as a multiple of the median duration
	Max      time.Duration // the longest rest

	took []time.Duration // durations of the last turns, the newest last
}

// After records the duration of a turn, and returns how long the loop must rest after that turn.
func (r *Rest) After(took time.Duration) time.Duration {
	if len(r.took) == restTurns {
		r.took = r.took[1:]
	}
	r.took = append(r.took, took)
	sorted := slices.Sorted(slices.Values(r.took))
	return min(time.Duration(r.Multiple)*sorted[(len(sorted)-1)/2], r.Max)
}
