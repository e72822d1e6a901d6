// Package facts applies the facts that capture recorded in applications' transactions to entries:
// ends of redeliveries, and retries made outside dlqd.
package facts

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/facts/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// interval is the pause after a read of the table of facts that applied less than a batch. Capture sends no
	// NOTIFY, because the applications' transactions that send one would wait for one another at commit.
	interval = 50 * time.Millisecond
	// retryInterval is the longest pause after failures.
	retryInterval = 5 * time.Second
	// batch is the number of facts that one transaction applies at most.
	batch = 500
	// timeout bounds one transaction.
	timeout = 30 * time.Second
	// maxScanTime is the duration up to which each turn reads the whole table. If that takes longer, turns read the
	// table's end, and the whole table every wholeInterval.
	maxScanTime   = 20 * time.Millisecond
	wholeInterval = 10 * time.Second
	// factTime is the estimated time to apply one fact. It is subtracted from a turn's duration to get the time of
	// reading.
	factTime = time.Millisecond
	// endPages is the number of pages that count as the table's end. They hold several thousand facts.
	endPages = 256
	// refusedInterval is the time between retries of facts that the database rejected. A turn that retries applies all
	// facts one by one.
	refusedInterval = time.Minute
	// maxTries limits how often a batch is run if other transactions collide with it or lock its rows, or if the
	// database rejects a fact.
	maxTries = 5
)

// Store gives access to the database. [deadletter.Store] implements it.
type Store interface{ DB() postgres.DB }

// Applier applies facts to entries. Any number may run, in any number of processes.
type Applier struct {
	Store Store

	// fromPage is the page from which a turn reads the table's end. Earlier pages may be full of deleted facts, which
	// vacuum cannot remove while an old transaction is open.
	fromPage int64
	whole    time.Time     // when the whole table was last read
	took     time.Duration // how long that took, less the time for applying facts
	refused  time.Time     // when rejected facts were last retried
}

// Loop returns the background loop that applies facts.
func (a *Applier) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "facts", Interval: retryInterval, Timeout: timeout, Patience: timeout, Finish: true,
		Failing: "applying ends of redeliveries and outside retries to their entries failed",
		Once: func(ctx context.Context) (time.Duration, error) {
			applied, err := a.Once(ctx)
			if err != nil || applied == batch {
				return background.More, err
			}
			return interval, nil
		},
	})
}

// Once applies a batch of facts and returns how many it applied. It reads the whole table if that is quick, and
// otherwise only the table's end, where new facts are. A fact of a long transaction can be before the end; the next
// read of the whole table finds it.
func (a *Applier) Once(ctx context.Context) (int, error) {
	start := time.Now()
	careful := start.Sub(a.refused) > refusedInterval
	whole := careful || a.took < maxScanTime || start.Sub(a.whole) > wholeInterval
	params := dbsqlc.ApplyParams{Most: batch, FromPage: a.fromPage, Careful: careful}
	if careful {
		a.refused = start
	}
	if whole {
		params.FromPage = 0
	}
	row, err := apply(ctx, a.Store, params)
	if err != nil {
		return 0, err
	}
	if whole {
		a.whole, a.took = start, time.Since(start)-time.Duration(row.Applied)*factTime
	}
	a.fromPage = max(0, row.Pages-endPages)
	return int(row.Applied), nil
}

// All applies facts until none can be applied now.
func (a *Applier) All(ctx context.Context) error {
	for {
		applied, err := a.Once(ctx)
		if err != nil || applied == 0 {
			return err
		}
	}
}

// ApplyRun applies the present facts of a replay run's jobs, and no others.
func ApplyRun(ctx context.Context, store Store, run uuid.UUID) error {
	for {
		row, err := apply(ctx, store, dbsqlc.ApplyParams{Most: batch, Run: &run})
		if err != nil || row.Applied == 0 {
			return err
		}
	}
}

// apply runs one statement, which is a transaction of its own: most statements find no fact, and then BEGIN with its
// settings and COMMIT would cost more than the statement. dlq.apply_facts sets what it needs.
func apply(ctx context.Context, store Store, params dbsqlc.ApplyParams) (row dbsqlc.ApplyRow, err error) {
	for range maxTries {
		row, err = dbsqlc.New(store.DB()).Apply(ctx, params)
		if (postgres.IsRefusal(err) || postgres.IsLocked(err)) && !params.Careful {
			params.Careful = true // one by one: a rejected fact must not block the others
			continue
		}
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return row, err
}
