// Package reconcile finds failures among River's jobs that capture missed. It also reads and
// switches capture.
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
	// interval is the time between two scans of recent failures. wholeInterval is the time between two scans of all jobs
	// in River. Both apply to all processes of a database together.
	interval      = time.Minute
	wholeInterval = time.Hour
	// slack is how much earlier a scan may begin, because the loops of several processes are not synchronized.
	slack = 5 * time.Second
	// maxJobs is the maximum number of ended jobs that one transaction reads. The transaction locks only jobs whose
	// failures it appends to the inbox, for some tens of milliseconds.
	maxJobs = 2000
)

// Config configures a [Reconciler].
type Config struct {
	DB     postgres.DB // renders the schema names in queries
	Logger *slog.Logger
}

// Reconciler finds failures that capture missed and appends them to the inbox. Any number may run; one works at a time.
type Reconciler struct{ config Config }

// New returns a reconciler.
func New(config Config) *Reconciler { return &Reconciler{config} }

// Loop returns the background loop of the reconciler.
func (r *Reconciler) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "reconciler", Interval: interval, OneProcess: true,
		Failing: "scanning River's jobs for missed failures failed",
		Once:    r.once,
	})
}

// once advances each scan that is due by one batch. Each scan has its own transaction.
func (r *Reconciler) once(ctx context.Context) (time.Duration, error) {
	next := time.Duration(0)
	for _, scan := range []struct {
		whole bool
		every time.Duration
	}{{false, interval - slack}, {true, wholeInterval - slack}} {
		step, err := dbsqlc.New(r.config.DB).Reconcile(ctx, dbsqlc.ReconcileParams{
			MaxJobs: maxJobs, Whole: scan.whole, Every: scan.every,
		})
		if err != nil {
			return 0, err
		}
		if step.Filed > 0 {
			r.config.Logger.Warn("filed failures that capture had missed", "entries", step.Filed, "whole", scan.whole)
		}
		if !step.Done {
			next = background.More
		}
	}
	return next, nil
}
