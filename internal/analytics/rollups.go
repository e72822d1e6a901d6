package analytics

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

const (
	// refreshInterval is how old the rollups get.
	refreshInterval = time.Second
	// refreshShare bounds what refreshing costs: a refresh that took long is followed by a rest of so many times as long.
	refreshShare = 10
)

// Refresh brings the rollups up to now, unless another process is at it.
func (s *Store) Refresh(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, s.schemas.Render("SELECT dlq.refresh_rollups()"))
	return err
}

// Trim takes away rollups that are finer than their age deserves.
func (s *Store) Trim(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, s.schemas.Render("SELECT dlq.trim_rollups()"))
	return err
}

// Run refreshes the rollups until ctx is done.
func (s *Store) Run(ctx context.Context, logger *slog.Logger) {
	for {
		start := time.Now()
		if err := s.Refresh(ctx); err != nil && !errors.Is(err, context.Canceled) {
			logger.Error("analytics: the rollups were not brought up to date; the next round tries again", "error", err)
		}
		timer := time.NewTimer(max(refreshInterval, refreshShare*time.Since(start)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}
