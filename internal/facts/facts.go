// Package facts applies what applications' transactions have appended: ends of redeliveries, and retries made outside dlqd, reach
// their entries here.
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
	// interval is how often facts are looked for. Nothing tells of them: a notification would have the application's
	// transactions wait for one another at their commit.
	interval = 50 * time.Millisecond
	// retry is between turns that fail, at most.
	retry = 5 * time.Second
	// batch is how many facts one transaction applies.
	batch = 500
	// timeout bounds one transaction.
	timeout = 30 * time.Second
	// quick is how long a look at the whole table may take to be made every time, and wholeInterval how often it is made otherwise.
	quick         = 20 * time.Millisecond
	wholeInterval = 10 * time.Second
	// workTime is what a fact may take to be applied: what a look takes beyond it, it takes to find nothing.
	workTime = time.Millisecond
	// endPages is how much of the table's end is looked at otherwise: several thousand facts.
	endPages = 256
	// refusedInterval is how often facts that the database refused are tried again, with all others one by one.
	refusedInterval = time.Minute
	// maxTries bounds how often a batch is tried again that met somebody who moved one of its entries.
	maxTries = 5
)

// Store runs transactions. [deadletter.Store] is one.
type Store interface {
	InTx(ctx context.Context, fn func(tx postgres.DB) error) error
}

// Applier applies facts. Any number may run, in any number of processes.
type Applier struct {
	Store Store

	// What was deleted lies before it, as long as somebody's open transaction has vacuum leave it.
	fromPage int64
	whole    time.Time     // when all was looked at last
	took     time.Duration // how long that took, but for the work
	refused  time.Time     // when those were tried last that the database had refused
}

// Loop keeps applying facts.
func (a *Applier) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "facts", Interval: retry, Timeout: timeout, Patience: timeout, Finish: true,
		Failing: "ends of redeliveries and retries made outside dlqd do not reach their entries",
		Once: func(ctx context.Context) (time.Duration, error) {
			applied, err := a.Once(ctx)
			if err != nil || applied == batch {
				return background.More, err
			}
			return interval, nil
		},
	})
}

// Once applies a batch of facts, and returns how many it applied. It looks at the whole table where that is quick, and else
// at its end: there is what is new. The rest, of applications' transactions that took long, follows now and then.
func (a *Applier) Once(ctx context.Context) (int, error) {
	start := time.Now()
	careful := start.Sub(a.refused) > refusedInterval
	whole := careful || a.took < quick || start.Sub(a.whole) > wholeInterval
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
		a.whole, a.took = start, time.Since(start)-time.Duration(row.Applied)*workTime
	}
	a.fromPage = max(0, row.Pages-endPages)
	return int(row.Applied), nil
}

// All applies facts until none is left that can be applied now.
func (a *Applier) All(ctx context.Context) error {
	for {
		applied, err := a.Once(ctx)
		if err != nil || applied == 0 {
			return err
		}
	}
}

// OfRun applies what there is of a replay run's facts, and of no others.
func OfRun(ctx context.Context, store Store, run uuid.UUID) error {
	for {
		row, err := apply(ctx, store, dbsqlc.ApplyParams{Most: batch, Run: &run})
		if err != nil || row.Applied == 0 {
			return err
		}
	}
}

func apply(ctx context.Context, store Store, params dbsqlc.ApplyParams) (row dbsqlc.ApplyRow, err error) {
	for range maxTries {
		err = store.InTx(ctx, func(tx postgres.DB) (err error) {
			row, err = dbsqlc.New(tx).Apply(ctx, params)
			return err
		})
		if (postgres.IsRefusal(err) || postgres.IsLocked(err)) && !params.Careful {
			params.Careful = true // one by one, so that it holds up no other
			continue
		}
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return row, err
}
