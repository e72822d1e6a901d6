// Package reconcile finds the failures that capture missed, among the jobs that River keeps, and knows how capture is: on, off or
// strict, and whether its triggers are there.
package reconcile

import (
	"context"
	"log/slog"
	"time"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile/internal/dbsqlc"
)

const (
	// interval is between two looks at what failed lately, and wholeInterval between two at all that River keeps, by all
	// processes together.
	interval      = time.Minute
	wholeInterval = time.Hour
	// slack is by how much a look may come early: the loops of processes do not beat together.
	slack = 5 * time.Second
	// maxJobs is how many ended jobs one transaction looks at. It locks those that it files, at most so many, for as long as
	// filing takes: some tens of milliseconds.
	maxJobs = 2000
)

// Config is what a [Reconciler] needs.
type Config struct {
	DB     postgres.DB // with the schemas' names put into queries
	Logger *slog.Logger
}

// Reconciler files failures that capture missed. Any number may run; one works at a time.
type Reconciler struct{ config Config }

// New returns a reconciler.
func New(config Config) *Reconciler { return &Reconciler{config} }

// Loop keeps looking.
func (r *Reconciler) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "reconciler", Interval: interval, OneProcess: true,
		Failing: "failures that capture missed are not found; River keeps their jobs for a while",
		Once:    r.once,
	})
}

// once takes a step of each look that is due, a transaction each.
func (r *Reconciler) once(ctx context.Context) (time.Duration, error) {
	next := time.Duration(0)
	for _, look := range []struct {
		whole bool
		every time.Duration
	}{{false, interval - slack}, {true, wholeInterval - slack}} {
		step, err := dbsqlc.New(r.config.DB).Reconcile(ctx, dbsqlc.ReconcileParams{MaxJobs: maxJobs, Whole: look.whole, Every: look.every})
		if err != nil {
			return 0, err
		}
		if step.Filed > 0 {
			r.config.Logger.Warn("failures that capture had missed were filed", "entries", step.Filed, "whole", look.whole)
		}
		if !step.Done {
			next = background.More
		}
	}
	return next, nil
}
