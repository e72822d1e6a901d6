// Package retention lets closed dead letters go when their time is over: whole months are dropped, what is left over is
// deleted in small steps, and failed entries are archived. Open entries are kept for ever.
package retention

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
)

const (
	// batchSize is how many entries one step archives or deletes.
	batchSize = 1000
	// maxSteps bounds one round, so that a backlog does not hold up what else keeps house.
	maxSteps = 1000
)

// Keeper enforces a policy's retention. Any number may run; one works at a time.
type Keeper struct {
	Store  *deadletter.Store
	Policy func() *policy.Policy
	Logger *slog.Logger
	Now    func() time.Time // nil means time.Now
}

// Run enforces the retention once. It returns how many entries were archived, deleted, and dropped with their months
// (as far as Postgres knows their number).
func (k *Keeper) Run(ctx context.Context) (map[string]int64, error) {
	periods, err := periodsOf(k.Policy())
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if k.Now != nil {
		now = k.Now()
	}
	done := map[string]int64{}
	for range maxSteps {
		steps, err := k.Store.EnforceRetention(ctx, periods, batchSize, now)
		if err != nil {
			return done, err
		}
		more := false
		for _, step := range steps {
			done[step.Action] += step.Entries
			more = more || step.Entries >= batchSize && step.Action != "dropped"
			if step.Action == "dropped" {
				k.Logger.Info("retention: month dropped", "partition", step.What, "entries", step.Entries)
			}
		}
		if !more {
			break
		}
	}
	return done, nil
}

// periodsOf are a policy's periods as dlq.enforce_retention reads them.
func periodsOf(p *policy.Policy) (json.RawMessage, error) {
	of := func(r policy.Retention) map[string]string {
		seconds := func(d time.Duration) string { return fmt.Sprintf("%d seconds", int64(d.Seconds())) }
		return map[string]string{"resolved": seconds(r.Resolved), "failed": seconds(r.Failed), "archived": seconds(r.Archived)}
	}
	queues := map[string]map[string]string{}
	for name, q := range p.Queues {
		queues[name] = of(q.Retention)
	}
	return json.Marshal(map[string]any{"defaults": of(p.Defaults.Retention), "queues": queues})
}
