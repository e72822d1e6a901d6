package analytics

import (
	"context"
	"errors"
	"time"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// refreshInterval is how old the rollups get.
	refreshInterval = time.Second
	// refreshShare bounds what refreshing costs: a refresh that took long is followed by a rest of so many times as long.
	refreshShare = 10
	// rebuildTimeout bounds a refresh. One that finds a restored database counts the whole audit trail.
	rebuildTimeout = 30 * time.Minute
	// trimInterval is how often old rollups are taken away, and trimTimeout bounds that.
	trimInterval = time.Hour
	trimTimeout  = 10 * time.Minute
)

// Refresh brings the rollups up to now, unless another process is at it.
func (s *Store) Refresh(ctx context.Context) error {
	return s.queries.RefreshRollups(ctx)
}

// Trim takes away rollups that are finer than their age deserves, and gives the most frequent names counters of their own.
func (s *Store) Trim(ctx context.Context) error {
	return errors.Join(s.queries.TrimRollups(ctx), s.queries.TrimCounters(ctx))
}

// Loops keep the rollups up to date, and take away what is too fine for its age.
func (s *Store) Loops() []*background.Loop {
	return []*background.Loop{
		background.New(background.Config{
			Name: "rollups", Interval: refreshInterval, Timeout: rebuildTimeout, Patience: rebuildTimeout, OneProcess: true,
			Failing: "analytics: the rollups are not brought up to date",
			Once: func(ctx context.Context) (time.Duration, error) {
				start := time.Now()
				err := s.Refresh(ctx)
				return max(refreshInterval, refreshShare*time.Since(start)), err
			},
		}),
		background.New(background.Config{
			Name: "rollup-trimming", Interval: trimInterval, Timeout: trimTimeout, Once: background.Each(s.Trim),
			Failing: "analytics: old rollups are not taken away",
		}),
	}
}
