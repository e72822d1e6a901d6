package background

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Group is the loops of a program.
type Group struct {
	Logger *slog.Logger
	// Idle says why no loop may make a turn at the moment; nil where they may, as is a nil Idle. Every loop asks before every turn: it must
	// be quick. Loops that are idle neither fail nor count as silent.
	Idle func() error
	// Observe is told of every turn: whose it was, how long it took, and its error; nil for nobody.
	Observe func(loop string, took time.Duration, err error)

	mu    sync.Mutex
	loops []*Loop
}

// Add adds loops, which the next Start starts.
func (g *Group) Add(loops ...*Loop) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.loops = append(g.loops, loops...)
}

// Loops are the loops, in the order in which they were added.
func (g *Group) Loops() []*Loop {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clip(g.loops)
}

// Start starts all loops that do not run.
func (g *Group) Start() {
	for _, l := range g.Loops() {
		l.start(g)
	}
}

// Stop stops all loops at once, and returns when they have ended, or soon after ctx is done: its error names those whose
// turns did not end.
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

// Statuses say how the loops are.
func (g *Group) Statuses() []Status {
	loops := g.Loops()
	statuses := make([]Status, len(loops))
	var why error
	if g.Idle != nil {
		why = g.Idle()
	}
	for i, l := range loops {
		statuses[i] = l.Status()
		if why != nil && !l.config.WhenIdle && statuses[i].Idle == "" { // it will find out when it next asks
			statuses[i].Idle, statuses[i].Problem = why.Error(), ""
		}
	}
	return statuses
}
