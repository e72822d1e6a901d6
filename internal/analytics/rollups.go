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
	// refreshInterval is the shortest time between two refreshes.
	refreshInterval = time.Second
	// The pause after a refresh is refreshRest times the median duration of the last five refreshes, at most
	// maxRefreshRest.
	refreshRest    = 10
	maxRefreshRest = 30 * time.Second
	// refreshTimeout bounds a refresh, so that a hanging refresh does not block the next one. After each refresh that was
	// cancelled, the limit doubles, until a refresh succeeds. Otherwise a refresh after a long pause might never succeed,
	// because it has more moves to count than the limit allows.
	refreshTimeout = 5 * time.Second
	// rebuildTimeout is the upper limit of every refresh. A refresh that finds a restored database counts the whole audit
	// trail.
	rebuildTimeout = 30 * time.Minute
	// trimInterval is the time between two trims of old rollups. trimTimeout bounds one trim.
	trimInterval = time.Hour
	trimTimeout  = 10 * time.Minute
)

// Refresh updates the rollups. It does nothing if another process is updating them.
func (s *Store) Refresh(ctx context.Context) error {
	_, _, err := s.refresh(ctx, rebuildTimeout)
	return err
}

// Trim deletes rollups that are too fine-grained for their age. It also gives separate counters to the error types that
// are now the most frequent.
func (s *Store) Trim(ctx context.Context) error {
	return errors.Join(s.queries.TrimRollups(ctx), s.queries.TrimCounters(ctx))
}

// refresh updates the rollups within a time limit. took excludes the wait for a connection. refreshed is false if
// another process was updating the rollups.
func (s *Store) refresh(ctx context.Context, limit time.Duration) (took time.Duration, refreshed bool, err error) {
	var began time.Time
	begin := postgres.BeginQuery(fmt.Sprintf("statement_timeout = %d", limit.Milliseconds()))
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{BeginQuery: begin}, func(tx pgx.Tx) error {
		began = time.Now()
		refreshed, err = dbsqlc.New(s.schemas.Rendered(tx)).RefreshRollups(ctx)
		return err
	})
	if began.IsZero() {
		return 0, false, err
	}
	return time.Since(began), refreshed, err
}

// Loops returns the loops that refresh and trim the rollups.
func (s *Store) Loops() []*background.Loop {
	rest, limit := background.Rest{Multiple: refreshRest, Max: maxRefreshRest}, refreshTimeout
	return []*background.Loop{
		background.New(background.Config{
			Name: "rollups", Interval: refreshInterval, Timeout: rebuildTimeout, Patience: rebuildTimeout, OneProcess: true,
			Failing: "refreshing the analytics rollups failed",
			Once: func(ctx context.Context) (time.Duration, error) {
				took, refreshed, err := s.refresh(ctx, limit)
				switch {
				case err != nil && took >= limit:
					limit = min(2*limit, rebuildTimeout)
					return 0, err
				case err != nil || !refreshed:
					return 0, err
				}
				limit = refreshTimeout
				return max(refreshInterval, rest.After(took)), nil
			},
		}),
		background.New(background.Config{
			Name: "rollup-trimming", Interval: trimInterval, Timeout: trimTimeout, Once: background.Each(s.Trim),
			Failing: "trimming the analytics rollups failed",
		}),
	}
}
