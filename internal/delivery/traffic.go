package delivery

import (
	"fmt"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	// trafficSlot is the length of a slot: the times of a comparison are rounded to it.
	trafficSlot = 10 * time.Second
	// trafficBefore is the period before a run whose deliveries are compared with those during the run.
	trafficBefore = time.Hour
	// trafficDuring limits the deliveries during a run to the last ones, so that those of its beginning do not hide
	// what has changed since.
	trafficDuring = 2 * time.Minute
	// trafficKept is how long slots are kept: longer than runs usually take.
	trafficKept = 6 * time.Hour
	// trafficLeast is the number of deliveries below which a comparison says nothing.
	trafficLeast = 30
	// trafficShare is the share of the deliveries of the hour before that are slower than its 95th percentile.
	trafficShare = 0.05
	// trafficError is the probability at which a difference by chance is reported. A run compares about once a second, so
	// it is smaller than that of a single comparison.
	trafficError = 0.001
	// trafficLevels is the number of classes of durations: powers of the square root of 2, from 1 ms on. A
	// failure has the last one.
	trafficLevels = 48
)

// Traffic counts this process's deliveries by destination, so that a replay run sees whether it harms the others.
type Traffic struct {
	mu    sync.Mutex
	slots map[string]map[trafficSlotOf]*[trafficLevels]uint32 // by destination
}

type trafficSlotOf struct {
	run  uuid.UUID // uuid.Nil: of no replay run
	slot int64
}

// NewTraffic returns counts of no delivery.
func NewTraffic() *Traffic {
	return &Traffic{slots: map[string]map[trafficSlotOf]*[trafficLevels]uint32{}}
}

func slotOf(at time.Time) int64 { return at.Unix() / int64(trafficSlot/time.Second) }

// Observe counts a delivery that ended at a time. It is for [Config.Observe].
func (t *Traffic) Observe(d *Delivered, at time.Time) {
	if d.Destination == "" || d.Outcome == OutcomeHeld {
		return
	}
	level := trafficLevels - 1
	if d.Available {
		level = min(int(2*math.Log2(max(d.Took.Seconds()*1000, 1))), trafficLevels-2)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	slots, key := t.slots[d.Destination], trafficSlotOf{d.Run, slotOf(at)}
	if slots == nil {
		slots = map[trafficSlotOf]*[trafficLevels]uint32{}
		t.slots[d.Destination] = slots
	}
	if slots[key] == nil {
		maps.DeleteFunc(slots, func(old trafficSlotOf, _ *[trafficLevels]uint32) bool {
			return old.slot < slotOf(at.Add(-trafficKept))
		})
		slots[key] = &[trafficLevels]uint32{}
	}
	slots[key][level]++
}

// Worse returns how the deliveries to a destination that are not of a run have become worse since it began, compared
// with the hour before: a greater share fails, or is slower than the 95th percentile of that hour, by Fisher's exact
// test. It looks at those from a time on. It returns "" if they have not, or if there are too few to tell.
func (t *Traffic) Worse(destination string, run uuid.UUID, began, from, now time.Time) string {
	before := t.count(destination, run, slotOf(began.Add(-trafficBefore)), slotOf(began))
	if from.Before(now.Add(-trafficDuring)) {
		from = now.Add(-trafficDuring)
	}
	during := t.count(destination, run, slotOf(from)+1, slotOf(now)+1)
	total, totalBefore := sum(during[:]), sum(before[:])
	if total < trafficLeast || totalBefore < trafficLeast {
		return ""
	}
	// Failures are worse than any time, also if more than one in twenty failed before.
	slow := trafficLevels - 1
	for slow > 0 && float64(sum(before[slow-1:])) <= trafficShare*float64(totalBefore) {
		slow--
	}
	bad, badBefore := sum(during[slow:]), sum(before[slow:])
	if fisher(bad, total, badBefore, totalBefore) > trafficError {
		return ""
	}
	return fmt.Sprintf("%d of %d other deliveries to %s failed or were slower than the 95th percentile of the hour "+
		"before the run; in that hour, %d of %d", bad, total, destination, badBefore, totalBefore)
}

// count counts the deliveries that are not of a run, from a slot on and before another.
func (t *Traffic) count(destination string, run uuid.UUID, from, before int64) (levels [trafficLevels]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, slot := range t.slots[destination] {
		if key.run != run && key.slot >= from && key.slot < before {
			for level, n := range slot {
				levels[level] += int(n)
			}
		}
	}
	return levels
}

func sum(counts []int) (total int) {
	for _, n := range counts {
		total += n
	}
	return total
}

// fisher returns the probability that at least bad of total are bad, if the bad ones of both samples are spread at
// random (Fisher's exact test, one-sided); 1 if their share is not larger than in the other sample.
func fisher(bad, total, otherBad, otherTotal int) float64 {
	all, allBad := total+otherTotal, bad+otherBad
	if bad*otherTotal <= otherBad*total {
		return 1 // not worse
	}
	p := 0.0
	for k := bad; k <= min(total, allBad); k++ { // from the most probable number on, so that the terms become smaller
		term := math.Exp(logChoose(allBad, k) + logChoose(all-allBad, total-k) - logChoose(all, total))
		if p += term; term < p/1e9 {
			break
		}
	}
	return min(p, 1)
}

// logChoose returns the logarithm of the number of ways to choose k of n.
func logChoose(n, k int) float64 {
	if k < 0 || k > n {
		return math.Inf(-1)
	}
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(k + 1))
	c, _ := math.Lgamma(float64(n - k + 1))
	return a - b - c
}
