package breaker

import (
	"math"
	"time"
)

// After a breaker has closed, a ramp limits the redeliveries and the released messages that this process sends to the
// destination. The ramp starts at a low rate. The rate rises only while less than rampShare of the deliveries fail. It
// doubles up to half of the rate at which the destination failed last, and then rises by rampRaise at a time, as TCP's
// congestion control does (RFC 5681). The ramp ends once no message is held.
const (
	rampStart  = 1.0         // messages a second
	rampRaise  = 1.0         // messages a second, each rampStep
	rampStep   = time.Second // between two changes of the rate
	rampReach  = time.Second // places are reserved at most this far ahead, so that later messages get places, too
	rampLinger = 10 * time.Second
	// rampShare is the share of failed deliveries at which the rate is halved.
	rampShare = 0.1
)

// ramp is the state of the ramp of a destination whose breaker has opened.
type ramp struct {
	rate, threshold   float64 // messages a second; below the threshold, the rate doubles
	since             time.Time
	succeeded, failed int       // deliveries after since
	free              time.Time // the time of the next free place
	needed            time.Time // when the breaker was first seen closed, or a message last found no place
}

// fall restarts the ramp at the lowest rate, because the breaker has opened.
func (r *ramp) fall() {
	*r = ramp{rate: rampStart, threshold: max(r.rate/2, rampStart)}
}

// adjust changes the rate by the outcomes of the deliveries since the last change. It raises the rate only if there
// were at least half as many deliveries as the rate allowed.
func (r *ramp) adjust(now time.Time) {
	if r.since.IsZero() {
		r.since, r.needed, r.succeeded, r.failed = now, now, 0, 0 // deliveries from before the breaker opened may end late
	}
	passed := now.Sub(r.since)
	if passed < rampStep {
		return
	}
	switch total := float64(r.succeeded + r.failed); {
	case r.failed > 0 && float64(r.failed) >= rampShare*total:
		r.threshold = max(r.rate/2, rampStart)
		r.rate = r.threshold
	case total < r.rate*passed.Seconds()/2:
	case r.rate < r.threshold:
		r.rate = min(2*r.rate, r.threshold)
	default:
		r.rate += rampRaise
	}
	r.since, r.succeeded, r.failed = now, 0, 0
}

// take reserves up to most places, of which none is later than now plus reach. It returns the number of reserved
// places.
func (r *ramp) take(now time.Time, most int, reach time.Duration) int {
	r.adjust(now)
	first := r.free
	if first.Before(now) {
		first = now
	}
	places := min(most, int(1+math.Floor(now.Add(reach).Sub(first).Seconds()*r.rate)))
	if places <= 0 {
		return 0
	}
	r.free = first.Add(time.Duration(float64(places) / r.rate * float64(time.Second)))
	return places
}

// Places reserves up to most places for held messages of a destination whose breaker is closed. It returns how many
// messages may be released in the next second.
func (b *Breakers) Places(destination string, most int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.ramps[DestinationPrefix+destination]; r != nil {
		return r.take(b.config.Now(), most, rampReach)
	}
	return min(most, int(rampStart)) // one place is enough to detect whether a message is held
}

// Released records that messages were released with the places that [Breakers.Places] returned. drained is true if no
// message is held; then none will be held until the breaker opens again.
func (b *Breakers) Released(destination string, messages, places int) (drained bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name := DestinationPrefix + destination
	r := b.ramps[name]
	if r != nil { // the other places are free for redeliveries
		r.free = r.free.Add(-time.Duration(float64(places-messages) / r.rate * float64(time.Second)))
	}
	switch {
	case r == nil && messages == 0:
		return true
	case r == nil: // another process held the messages, or an earlier run of this one
		b.ramps[name] = &ramp{rate: rampStart, threshold: math.Inf(1)}
		return false
	case messages < places && b.config.Now().Sub(r.needed) > rampLinger:
		delete(b.ramps, name)
		return true
	}
	return false
}

// Paces reports whether a ramp limits deliveries to a destination: the destination's breaker has opened, and messages
// may still be held.
func (b *Breakers) Paces(destination string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ramps[DestinationPrefix+destination] != nil
}

// TakePlace reports whether a redelivery to a destination may be sent now. If it returns false, the caller holds the
// message, which later gets a place from [Breakers.Places].
func (b *Breakers) TakePlace(destination string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	name := DestinationPrefix + destination
	r := b.ramps[name]
	if state, _ := b.state(name); r == nil || state != Closed {
		return true // the breaker decides
	}
	now := b.config.Now()
	if r.take(now, 1, 0) == 1 {
		return true
	}
	r.needed = now
	return false
}

// fall restarts the ramp of a breaker that has opened, or starts a ramp if there is none.
func (b *Breakers) fall(name string) {
	if r := b.ramps[name]; r != nil {
		r.fall()
		return
	}
	b.ramps[name] = &ramp{rate: rampStart, threshold: math.Inf(1)}
}

// countForRamp counts a delivery through a closed breaker.
func (b *Breakers) countForRamp(name string, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.ramps[name]; r != nil && ok {
		r.succeeded++
	} else if r != nil {
		r.failed++
	}
}
