package analytics

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/analytics/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// refreshInterval is how old the rollups get.
	refreshInterval = time.Second
	// refreshRest bounds what refreshing costs: it is followed by a rest of so many times as long as the last ones took, at most
	// maxRefreshRest.
	refreshRest    = 10
	maxRefreshRest = 30 * time.Second
	// refreshTimeout bounds a refresh: one that hangs would hold up the next. Where there is more to count than fits, each that is cut off
	// gives the next twice as long.
	refreshTimeout = 5 * time.Second
	// rebuildTimeout bounds a refresh. One that finds a restored database counts the whole audit trail.
	rebuildTimeout = 30 * time.Minute
	// trimInterval is how often old rollups are taken away, and trimTimeout bounds that.
	trimInterval = time.Hour
	trimTimeout  = 10 * time.Minute
)

// Refresh brings the rollups up to now, unless another process is at it.
func (s *Store) Refresh(ctx context.Context) error {
	_, err := s.refresh(ctx, rebuildTimeout)
	return err
}

// Trim takes away rollups that are finer than their age deserves, and gives the most frequent names counters of their own.
func (s *Store) Trim(ctx context.Context) error {
	return errors.Join(s.queries.TrimRollups(ctx), s.queries.TrimCounters(ctx))
}

// refresh brings the rollups up to now, in a limited time. It returns how long that took, without waiting for a connection.
func (s *Store) refresh(ctx context.Context, limit time.Duration) (took time.Duration, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	began := time.Now()
	begin := postgres.BeginQuery(fmt.Sprintf("statement_timeout = %d", limit.Milliseconds()))
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{BeginQuery: begin}, func(tx pgx.Tx) error {
		return dbsqlc.New(s.schemas.Rendered(tx)).RefreshRollups(ctx)
	})
	return time.Since(began), err
}

// Loops keep the rollups up to date, and take away what is too fine for its age.
func (s *Store) Loops() []*background.Loop {
	rest, limit := background.Rest{Times: refreshRest, Most: maxRefreshRest}, refreshTimeout
	return []*background.Loop{
		background.New(background.Config{
			Name: "rollups", Interval: refreshInterval, Timeout: rebuildTimeout, Patience: rebuildTimeout, OneProcess: true,
			Failing: "analytics: the rollups are not brought up to date",
			Once: func(ctx context.Context) (time.Duration, error) {
				took, err := s.refresh(ctx, limit)
				if err != nil {
					if took >= limit {
						limit = min(2*limit, rebuildTimeout)
					}
					return 0, err
				}
				limit = refreshTimeout
				return max(refreshInterval, rest.After(took)), nil
			},
		}),
		background.New(background.Config{
			Name: "rollup-trimming", Interval: trimInterval, Timeout: trimTimeout, Once: background.Each(s.Trim),
			Failing: "analytics: old rollups are not taken away",
		}),
	}
}
