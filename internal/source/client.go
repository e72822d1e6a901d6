package source

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/dlqd/dlqd/internal/policy"
)

const (
	// policyInterval is the time between two looks for a changed policy.
	policyInterval = time.Second
	// restartAfter is the pause before a reader that ended is started again.
	restartAfter = 5 * time.Second
)

// errNoBroker is returned for a record to publish while there is no client.
var errNoBroker = errors.New("the client of the sources is not connected")

// Client reads the sources of the policy in force, and publishes. It connects again when the policy's
// sources change.
type Client struct {
	Open   Open
	Policy func() *policy.Policy
	Store  Appender
	Logger *slog.Logger

	mu     sync.RWMutex // read-locked while the broker is used
	broker Broker
}

// Publish implements [Publisher].
func (c *Client) Publish(ctx context.Context, target Target, message Message) (Acknowledgement, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.broker == nil {
		return Acknowledgement{}, errNoBroker
	}
	return c.broker.Publish(ctx, target, message)
}

// Run reads until ctx is done.
func (c *Client) Run(ctx context.Context) {
	for ctx.Err() == nil {
		p := c.Policy()
		if len(p.Sources.Sources) == 0 {
			wait(ctx, policyInterval)
			continue
		}
		broker, err := c.Open(p)
		if err != nil {
			c.Logger.ErrorContext(ctx, "connecting to the clusters of sources failed", "error", err)
			wait(ctx, restartAfter)
			continue
		}
		c.set(broker)
		c.read(ctx, p, broker)
		c.set(nil)
		broker.Close()
	}
}

func (c *Client) set(broker Broker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broker = broker
}

// read reads all sources until ctx is done or the policy's sources change.
func (c *Client) read(ctx context.Context, p *policy.Policy, broker Broker) {
	ctx, cancel := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	for _, source := range p.Sources.Sources {
		readers.Go(func() {
			for ctx.Err() == nil {
				if err := broker.Read(ctx, source, c.Store); err != nil && ctx.Err() == nil {
					c.Logger.ErrorContext(ctx, "reading a source failed", "source", source.Name, "error", err)
					c.Store.Progress(Progress{
						Partition: Partition{Cluster: source.Cluster, Partition: Unknown}, Source: source.Name,
						State: StateFailing, Next: Unknown, End: Unknown, Error: err.Error(),
					})
				}
				wait(ctx, restartAfter)
			}
		})
	}
	for ctx.Err() == nil && (c.Policy() == p || reflect.DeepEqual(c.Policy().Sources, p.Sources)) {
		wait(ctx, policyInterval)
	}
}

// wait waits for a time, or until ctx is done.
func wait(ctx context.Context, during time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(during):
	}
}
