package background

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Group is a set of loops that start and stop together.
type Group struct {
	Logger *slog.Logger
	// Idle returns the reason why loops without WhenIdle may run no turn now, or nil if they may. If Idle is nil, the
	// loops always run. A loop calls Idle before each turn, so Idle must be quick. An idle loop counts neither as failing
	// nor as overdue.
	Idle func() error
	// Observe, if not nil, is called after each turn with the loop's name, the duration and the
	// error. Turns that a stop cancels are skipped.
	Observe func(loop string, took time.Duration, err error)

	mu    sync.Mutex
	loops []*Loop
}

// Add adds loops to the group. It does not start them; the next Start does.
func (g *Group) Add(loops ...*Loop) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.loops = append(g.loops, loops...)
}

// Loops returns the loops in the order in which they were added.
func (g *Group) Loops() []*Loop {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clip(g.loops)
}

// Start starts all loops that are not running.
func (g *Group) Start() {
	for _, l := range g.Loops() {
		l.start(g)
	}
}

// Stop stops all loops concurrently. It returns when they have ended, or shortly after ctx is done. Its error names the
// loops whose turns did not end.
func (g *Group) Stop(ctx context.Context) error {
	loops := g.Loops()
	errs := make([]error, len(loops))
	var stopping sync.WaitGroup
	for i, l := range loops {
		stopping.Go(func() { errs[i] = l.Stop(ctx) })
	}
	stopping.Wait()
	return errors.Join(errs...)
}

// Statuses returns the status of each loop.
func (g *Group) Statuses() []Status {
	loops := g.Loops()
	statuses := make([]Status, len(loops))
	var reason error
	if g.Idle != nil {
		reason = g.Idle()
	}
	for i, l := range loops {
		statuses[i] = l.Status()
		if reason != nil && !l.config.WhenIdle && statuses[i].Idle == "" { // the loop has not called Idle yet
			statuses[i].Idle, statuses[i].Problem = reason.Error(), ""
		}
	}
	return statuses
}
