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
	// lookInterval is the maximum age of an answer that a queue is worked. It bounds the queries
	// that submissions cause.
	lookInterval = time.Second
	// lookTimeout bounds one query, for which a submission waits.
	lookTimeout = 2 * time.Second
)

// Work says whether a queue's messages are delivered.
type Work string

// Values of Work.
const (
	Worked   Work = "worked"   // a live dlqd process works it
	Away     Work = "away"     // none does, but one did in the last 15 minutes
	Unworked Work = "unworked" // none did
)

// Queues knows which queues a database's dlqd processes work. While the queues that are asked for
// are worked, it queries the database at most once a second.
type Queues struct {
	queries *dbsqlc.Queries
	asking  chan struct{} // holds one element while a caller queries the database
	latest  atomic.Pointer[answer]
}

// answer is the result of one query.
type answer struct {
	asked time.Time
	live  map[string]bool // by queue; false if its process is away
	err   error
}

// NewQueues returns a Queues that queries db.
func NewQueues(db postgres.DB) *Queues {
	return &Queues{queries: dbsqlc.New(db), asking: make(chan struct{}, 1)}
}

// Of returns whether a queue is worked and, if it is not, the queues that are. An answer older than
// the call does not make a queue away or unworked: a process may have started since.
func (q *Queues) Of(ctx context.Context, queue string) (work Work, worked []string, err error) {
	arrived := time.Now()
	if a := q.latest.Load(); a != nil && a.live[queue] && arrived.Sub(a.asked) < lookInterval {
		return Worked, nil, nil
	}
	a, err := q.ask(ctx, arrived)
	if err != nil {
		return "", nil, fmt.Errorf("which queues are worked: %w", err)
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

// ask returns an answer that was queried after the given time. Callers that wait at the same time
// share the answer, or its error.
func (q *Queues) ask(ctx context.Context, after time.Time) (*answer, error) {
	select {
	case q.asking <- struct{}{}:
		defer func() { <-q.asking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if a := q.latest.Load(); a != nil && a.asked.After(after) {
		return a, a.err
	}
	// Other callers share this query, so a client that hangs up must not cancel it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	defer cancel()
	a := &answer{asked: time.Now(), live: map[string]bool{}}
	rows, err := q.queries.WorkedQueues(ctx, dbsqlc.WorkedQueuesParams{LiveFor: LiveFor, AwayFor: awayFor})
	for _, row := range rows {
		a.live[row.Queue] = row.Live
	}
	a.err = err
	q.latest.Store(a)
	return a, err
}

// SharedQueues returns those of queues that River clients other than dlqd's work, too.
func SharedQueues(ctx context.Context, db postgres.DB, queues []string) ([]string, error) {
	return dbsqlc.New(db).SharedQueues(ctx, queues)
}
