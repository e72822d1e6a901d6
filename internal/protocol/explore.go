package protocol

import (
	"context"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Found is the result of [Explorer.Explore] or [Explorer.Wander].
type Found struct {
	States    uint64
	Depth     int    // the last level that was explored completely; for Wander, the number of steps of Trace
	Frontier  uint64 // states that were reached but not expanded
	Exhausted bool   // every state within the bounds was visited
	Wrong     string // the invariant that broke, with details; "" if none did
	Trace     []Step // the steps to Wrong: a shortest trace (Explore), or one of which each step is needed (Wander)
}

func (f *Found) String() string {
	text := fmt.Sprintf("%d states, depth %d", f.States, f.Depth)
	if f.Exhausted {
		text += ", all within the bounds"
	} else {
		text += fmt.Sprintf(", %d states left at the frontier", f.Frontier)
	}
	if f.Wrong == "" {
		return text
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s\nbroken: %s\n", text, f.Wrong)
	for n, step := range f.Trace {
		fmt.Fprintf(&out, "  %2d. %s\n", n+1, step)
	}
	return out.String()
}

// Explorer visits the states of a model in the order of their distance from the start, so that it finds shortest
// traces.
type Explorer struct {
	Model *Model
	// QuietEvery is the sampling of [Model.CheckQuiet]: on average, one state in QuietEvery is checked; 0 means none.
	QuietEvery uint64
	// MaxStates limits the number of states, and so the memory: about 50 bytes for each visited state, and 500 for each
	// state that is not expanded yet.
	MaxStates uint64
	// Only, if not empty, names the only invariant that is checked.
	Only string
	// Report, if not nil, is called once a minute with the result so far.
	Report func(Found)
	// Procs is the number of goroutines that expand a level.
	Procs int
}

// shards is the number of sets of visited states, each with a lock of its own. chunkSize is how many states a goroutine
// takes at once.
const (
	shards    = 256
	chunkSize = 256
)

// visited is a set of hashes of states, each with the state and the step from which it was reached.
type visited struct {
	sync.Mutex

	from map[uint64]origin
}

type origin struct {
	parent uint64
	step   Step
}

type node struct {
	state State
	print uint64
}

// Explore visits states until it has visited all, an invariant breaks, MaxStates is exceeded, or ctx ends.
func (x *Explorer) Explore(ctx context.Context) Found { //nolint:gocognit // one search, and what its goroutines share
	seed := maphash.MakeSeed()
	fingerprint := func(s *State) uint64 { return maphash.Comparable(seed, *s) }
	var seen [shards]visited
	for i := range seen {
		seen[i].from = map[uint64]origin{}
	}
	start := Start()
	start.normalize()
	root := fingerprint(&start)
	level := [][]node{{{start, root}}}
	seen[root%shards].from[root] = origin{}
	var states atomic.Uint64
	states.Store(1)
	found := Found{}
	trace := func(last uint64, steps ...Step) []Step {
		for last != root {
			shard := &seen[last%shards]
			shard.Lock()
			o := shard.from[last]
			shard.Unlock()
			steps = append(steps, o.step)
			last = o.parent
		}
		slices.Reverse(steps)
		return steps
	}
	for depth := 0; len(level) > 0; depth++ {
		var mu sync.Mutex
		var next [][]node
		var cursor, left, reached atomic.Int64
		for _, chunk := range level {
			left.Add(int64(len(chunk)))
		}
		stop := x.report(func() Found {
			return Found{States: states.Load(), Depth: depth, Frontier: uint64(max(0, left.Load()) + reached.Load())}
		})
		var group sync.WaitGroup
		var wrong atomic.Bool
		for range max(1, x.Procs) {
			group.Go(func() {
				var reachedHere []node
				flush := func() {
					if len(reachedHere) > 0 {
						mu.Lock()
						next = append(next, reachedHere)
						mu.Unlock()
						reachedHere = nil
					}
				}
				defer flush()
				for ctx.Err() == nil && !wrong.Load() && states.Load() <= x.MaxStates {
					at := int(cursor.Add(1)) - 1
					if at >= len(level) {
						break
					}
					chunk := level[at]
					level[at] = nil // free the memory of expanded states
					left.Add(-int64(len(chunk)))
					for i := range chunk {
						n := &chunk[i]
						broken := func(text string) bool { return text != "" && strings.HasPrefix(text, x.Only) }
						fail := func(text string, steps ...Step) {
							mu.Lock()
							defer mu.Unlock()
							if found.Wrong == "" {
								found.Wrong, found.Trace = text, trace(n.print, steps...)
							}
							wrong.Store(true)
						}
						if x.QuietEvery > 0 && n.print%x.QuietEvery == 0 {
							if text := x.Model.CheckQuiet(n.state); broken(text) {
								fail(text)
							}
						}
						x.Model.Steps(&n.state, func(step Step) {
							after, text, ok := x.Model.Apply(n.state, step)
							if !ok {
								return
							}
							p := fingerprint(&after)
							shard := &seen[p%shards]
							shard.Lock()
							_, known := shard.from[p]
							if !known {
								shard.from[p] = origin{n.print, step}
							}
							shard.Unlock()
							if !broken(text) && !known { // a known state was checked when it was first reached
								text = x.Model.Check(&after)
							}
							if broken(text) {
								fail(text, step)
								return
							}
							if !known {
								states.Add(1)
								reached.Add(1)
								if reachedHere == nil {
									reachedHere = make([]node, 0, chunkSize)
								}
								if reachedHere = append(reachedHere, node{after, p}); len(reachedHere) == chunkSize {
									flush()
								}
							}
						})
					}
				}
			})
		}
		group.Wait()
		stop()
		found.States, found.Frontier = states.Load(), uint64(left.Load()+reached.Load())
		if found.Wrong != "" || ctx.Err() != nil || states.Load() > x.MaxStates {
			return found
		}
		found.Depth = depth + 1
		level = next
	}
	found.Exhausted = true
	return found
}

// Wander takes random traces of up to length steps until ctx ends or an invariant breaks. It reaches depths for which
// [Explorer.Explore] lacks the memory. If an invariant breaks, the returned trace is minimal: without any one of its
// steps, it does not break the invariant. traces is the number of traces taken.
func (x *Explorer) Wander(ctx context.Context, length int) (traces uint64, found Found) {
	var taken atomic.Uint64
	var mu sync.Mutex
	var wrong atomic.Bool
	var group sync.WaitGroup
	for range max(1, x.Procs) {
		group.Go(func() {
			var steps []Step
			for ctx.Err() == nil && !wrong.Load() {
				state, trace, text := Start(), []Step(nil), ""
				for len(trace) < length && text == "" {
					steps = steps[:0]
					x.Model.Steps(&state, func(step Step) { steps = append(steps, step) })
					if len(steps) == 0 {
						break
					}
					step := steps[rand.IntN(len(steps))]
					if after, broken, ok := x.Model.Apply(state, step); ok {
						state, trace, text = after, append(trace, step), broken
					}
					if text == "" {
						text = x.Model.Check(&state)
					}
				}
				if text == "" {
					text = x.Model.CheckQuiet(state)
				}
				taken.Add(1)
				if text != "" && !wrong.Swap(true) {
					trace, text = x.shorten(trace, text)
					mu.Lock()
					found = Found{Wrong: text, Trace: trace, Depth: len(trace)}
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return taken.Load(), found
}

// broken returns the invariant that breaks during a trace, or after the trace when facts, filing, sweep and reconciler
// run on without any other actor. It returns "" if none breaks, or if a step of the trace is impossible.
func (x *Explorer) broken(trace []Step) string {
	state := Start()
	for _, step := range trace {
		possible := false
		x.Model.Steps(&state, func(s Step) { possible = possible || s == step })
		after, text, ok := x.Model.Apply(state, step)
		if !possible || !ok {
			return ""
		}
		if text == "" {
			text = x.Model.Check(&after)
		}
		if text != "" {
			return text
		}
		state = after
	}
	return x.Model.CheckQuiet(state)
}

// shorten removes from a trace all steps that it does not need to break the same invariant.
func (x *Explorer) shorten(trace []Step, text string) (short []Step, wrong string) {
	invariant, _, _ := strings.Cut(text, ":")
	for size := max(1, len(trace)/2); size > 0; {
		shorter := false
		for at := 0; at+size <= len(trace); {
			without := slices.Concat(trace[:at], trace[at+size:])
			if broken := x.broken(without); strings.HasPrefix(broken, invariant) {
				trace, text, shorter = without, broken, true
			} else {
				at++
			}
		}
		if !shorter {
			size /= 2
		}
	}
	return trace, text
}

// report calls Report once a minute, until the caller calls stop.
func (x *Explorer) report(found func() Found) (stop func()) {
	if x.Report == nil {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(time.Minute)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				x.Report(found())
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}
