package process

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process/internal/dbsqlc"
)

const (
	// maxAnswerAge is how long an answer is reused if it says that the queue is worked. It bounds the number of queries
	// that submissions cause.
	maxAnswerAge = time.Second
	// queryTimeout bounds one query. A submission waits for its result.
	queryTimeout = 2 * time.Second
)

// Work says whether a queue's messages are being delivered.
type Work string

// Values of Work.
const (
	Worked   Work = "worked"   // a live dlqd process works the queue
	Away     Work = "away"     // no live process works the queue, but one did in the last 15 minutes
	Unworked Work = "unworked" // no process has worked the queue in the last 15 minutes
)

// Queues knows which queues the dlqd processes of a database work. As long as all requested queues are worked, it
// queries the database at most once a second.
type Queues struct {
	queries  *dbsqlc.Queries
	querying chan struct{} // holds one element while a caller queries the database
	latest   atomic.Pointer[answer]
}

// answer is the result of one query.
type answer struct {
	queriedAt time.Time
	live      map[string]bool // by queue: true if a live process works the queue, false if the process is away
	err       error
}

// NewQueues returns a Queues that queries db.
func NewQueues(db postgres.DB) *Queues {
	return &Queues{queries: dbsqlc.New(db), querying: make(chan struct{}, 1)}
}

// Lookup returns whether a queue is worked. If it is not worked, Lookup also returns the queues that are worked. Only
// an answer that is newer than the call can say that a queue is away or unworked, because a process may have started
// since an older one.
func (q *Queues) Lookup(ctx context.Context, queue string) (work Work, worked []string, err error) {
	arrived := time.Now()
	if a := q.latest.Load(); a != nil && a.live[queue] && arrived.Sub(a.queriedAt) < maxAnswerAge {
		return Worked, nil, nil
	}
	a, err := q.query(ctx, arrived)
	if err != nil {
		return "", nil, fmt.Errorf("look up which process works queue %q: %w", queue, err)
	}
	live, known := a.live[queue]
	switch {
	case live:
		return Worked, nil, nil
	case known:
		work = Away
	default:
		work = Unworked
	}
	for name := range maps.Keys(a.live) {
		if a.live[name] {
			worked = append(worked, name)
		}
	}
	slices.Sort(worked)
	return work, worked, nil
}

// query returns an answer whose query began after the given time. Callers that wait at the same time share one answer,
// or its error.
func (q *Queues) query(ctx context.Context, after time.Time) (*answer, error) {
	select {
	case q.querying <- struct{}{}:
		defer func() { <-q.querying }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if a := q.latest.Load(); a != nil && a.queriedAt.After(after) {
		return a, a.err
	}
	// Other callers share this query, so it must not end when one client disconnects.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), queryTimeout)
	defer cancel()
	a := &answer{queriedAt: time.Now(), live: map[string]bool{}}
	rows, err := q.queries.WorkedQueues(ctx, dbsqlc.WorkedQueuesParams{LiveFor: LiveFor, AwayFor: awayFor})
	for _, row := range rows {
		a.live[row.Queue] = row.Live
	}
	a.err = err
	q.latest.Store(a)
	return a, err
}

// SharedQueues returns which of the given queues are also worked by River clients of other programs.
func SharedQueues(ctx context.Context, db postgres.DB, queues []string) ([]string, error) {
	return dbsqlc.New(db).SharedQueues(ctx, queues)
}
