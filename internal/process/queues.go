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
	// lookInterval is how old an answer may be that says that a queue is worked. It bounds the questions that submissions
	// cost.
	lookInterval = time.Second
	// lookTimeout bounds one question. A submission waits for it.
	lookTimeout = 2 * time.Second
)

// Work says whether a queue's messages are delivered.
type Work string

// Whether a queue's messages are delivered.
const (
	Worked   Work = "worked"   // a dlqd process works it
	Away     Work = "away"     // one did a few minutes ago
	Unworked Work = "unworked" // none does
)

// Queues knows which queues the dlqd processes of a database work. It asks the database once a second at most while the
// answer is that they do.
type Queues struct {
	queries *dbsqlc.Queries
	asking  chan struct{} // holds one: whoever asks the database
	latest  atomic.Pointer[answer]
}

// answer is what the database said.
type answer struct {
	asked time.Time
	live  map[string]bool // by queue; false for those whose process is away
	err   error
}

// NewQueues returns a Queues that asks db.
func NewQueues(db postgres.DB) *Queues {
	return &Queues{queries: dbsqlc.New(db), asking: make(chan struct{}, 1)}
}

// Of says whether a queue is worked, and which ones are. A queue is not called away or unworked by an answer that is older
// than the question: the process may have started since.
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

// ask returns an answer to a question that was put after a time. Those who wait for the same one share it, an error too.
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
	// It is not this caller's question alone: a client that hangs up does not end it.
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

// SharedQueues are those of some queues that others work, too.
func SharedQueues(ctx context.Context, db postgres.DB, queues []string) ([]string, error) {
	return dbsqlc.New(db).SharedQueues(ctx, queues)
}
