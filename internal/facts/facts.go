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
	// batch is how many facts one transaction applies.
	batch = 500
	// timeout bounds one transaction.
	timeout = 30 * time.Second
	// maxTries bounds how often a batch is tried again that met somebody who moved one of its entries.
	maxTries = 5
)

// Store runs transactions. [deadletter.Store] is one.
type Store interface {
	InTx(ctx context.Context, fn func(tx postgres.DB) error) error
}

// Applier applies facts. Any number may run, in any number of processes.
type Applier struct{ Store Store }

// Loop keeps applying facts.
func (a *Applier) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "facts", Interval: interval, Timeout: timeout, Patience: timeout, Finish: true,
		Failing: "ends of redeliveries and retries made outside dlqd do not reach their entries",
		Once: func(ctx context.Context) (time.Duration, error) {
			applied, err := a.Once(ctx)
			if err != nil || applied < batch {
				return 0, err
			}
			return background.More, nil
		},
	})
}

// Once applies a batch of facts, and returns how many it applied.
func (a *Applier) Once(ctx context.Context) (int, error) { return Apply(ctx, a.Store, nil) }

// All applies facts until none is left that can be applied now.
func (a *Applier) All(ctx context.Context) error {
	for {
		applied, err := a.Once(ctx)
		if err != nil || applied == 0 {
			return err
		}
	}
}

// Apply applies a batch of facts, of a replay run alone if run is not nil, and returns how many it applied.
func Apply(ctx context.Context, store Store, run *uuid.UUID) (int, error) {
	var applied int32
	var err error
	for range maxTries {
		err = store.InTx(ctx, func(tx postgres.DB) (err error) {
			applied, err = dbsqlc.New(tx).Apply(ctx, dbsqlc.ApplyParams{Most: batch, Run: run})
			return err
		})
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return int(applied), err
}
