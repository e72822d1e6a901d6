package background

import (
	"slices"
	"time"
)

// restTurns is how many turns a [Rest] goes by.
const restTurns = 5

// Rest keeps a loop's turns to a share of the time. It goes by the median of the last turns, so that one that hung does not
// put off the next.
type Rest struct {
	Times int           // how many times as long as a turn takes
	Most  time.Duration // the longest rest

	took []time.Duration // of the last turns, the newest last
}

// After takes in how long a turn took, and returns how long to rest after it.
func (r *Rest) After(took time.Duration) time.Duration {
	if len(r.took) == restTurns {
		r.took = r.took[1:]
	}
	r.took = append(r.took, took)
	sorted := slices.Sorted(slices.Values(r.took))
	return min(time.Duration(r.Times)*sorted[(len(sorted)-1)/2], r.Most)
}
