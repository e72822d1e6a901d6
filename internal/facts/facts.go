// Package facts applies facts to entries. Capture records facts in applications' transactions: ends of redeliveries,
// and retries made outside dlqd.
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
	// interval is the pause after a turn that applied less than a batch. Capture cannot wake the loop with NOTIFY:
	// transactions that send a NOTIFY wait for one another at commit.
	interval = 50 * time.Millisecond
	// retryInterval is the longest pause after failed turns.
	retryInterval = 5 * time.Second
	// batch is the maximum number of facts that one transaction applies.
	batch = 500
	// timeout limits one transaction.
	timeout = 30 * time.Second
	// maxScanTime is the longest time for which each turn reads the whole table. If reading the table takes longer, a
	// turn reads only the table's end, and every wholeInterval the whole table.
	maxScanTime   = 20 * time.Millisecond
	wholeInterval = 10 * time.Second
	// factTime is the estimated time to apply one fact. A turn's duration less that time for each fact is the time of
	// reading.
	factTime = time.Millisecond
	// endPages is the number of pages that count as the table's end. They hold several thousand facts.
	endPages = 256
	// refusedInterval is the time between retries of facts that the database rejected. In a turn with retries, all facts
	// are applied one by one.
	refusedInterval = time.Minute
	// maxTries is how often a batch is run at most, if other transactions collide with it or lock its rows, or if the
	// database rejects a fact.
	maxTries = 5
)

// Store gives access to the database. [deadletter.Store] implements it.
type Store interface{ DB() postgres.DB }

// Applier applies facts to entries. Any number of appliers may run, in any number of processes.
type Applier struct {
	Store Store

	// fromPage is the page from which a turn reads the table's end. While an old transaction is open, vacuum cannot
	// remove deleted facts, so the pages before fromPage may be full of deleted facts.
	fromPage int64
	whole    time.Time     // when the whole table was last read
	took     time.Duration // how long reading the whole table took, without the time for applying facts
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
// otherwise only the table's end, where new facts are. A fact of a long transaction may lie before the end. The next
// read of the whole table finds that fact.
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

// All applies facts until there are none that can be applied now.
func (a *Applier) All(ctx context.Context) error {
	for {
		applied, err := a.Once(ctx)
		if err != nil || applied == 0 {
			return err
		}
	}
}

// ApplyRun applies only facts about the jobs of a replay run: all that are recorded now.
func ApplyRun(ctx context.Context, store Store, run uuid.UUID) error {
	for {
		row, err := apply(ctx, store, dbsqlc.ApplyParams{Most: batch, Run: &run})
		if err != nil || row.Applied == 0 {
			return err
		}
	}
}

// apply runs one statement without BEGIN, as a transaction of its own. Most statements find no fact, and BEGIN with its
// settings and COMMIT would cost more than the statement. dlq.apply_facts sets the settings that it needs.
func apply(ctx context.Context, store Store, params dbsqlc.ApplyParams) (row dbsqlc.ApplyRow, err error) {
	for range maxTries {
		row, err = dbsqlc.New(store.DB()).Apply(ctx, params)
		if (postgres.IsRefusal(err) || postgres.IsLocked(err)) && !params.Careful {
			params.Careful = true // apply facts one by one, so that a rejected fact does not block the others
			continue
		}
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return row, err
}
