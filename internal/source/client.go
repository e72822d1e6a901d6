package source

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
)

const (
	// interval is the time between two looks for a changed policy, and between two writes of what readers report.
	interval = time.Second
	// restartAfter is the pause before a reader that ended is started again.
	restartAfter = 5 * time.Second
)

// errNoBroker is returned for a record to publish while there is no client.
var errNoBroker = errors.New("the client of the sources is not connected")

// Client reads the sources of the policy in force, and publishes. It connects again when the policy's
// sources change. Any number may run, in any number of processes.
type Client struct {
	Open   Open
	Policy func() *policy.Policy
	Store  *Store
	Logger *slog.Logger

	mu     sync.RWMutex // read-locked while the broker publishes
	broker Broker

	read policy.Sources // what the readers read
	stop func()         // nil without readers
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

// Loop returns the background loop that starts and stops the readers, and writes what they report.
func (c *Client) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "sources", Interval: interval, Failing: "connecting to the clusters of sources, or writing their state, failed",
		Once: background.Each(func(ctx context.Context) error {
			return errors.Join(c.follow(ctx), c.Store.writeProgress(ctx))
		}),
		End: c.end,
	})
}

// follow starts the readers of the policy's sources, and stops earlier ones.
func (c *Client) follow(ctx context.Context) error {
	p := c.Policy()
	if reflect.DeepEqual(p.Sources, c.read) {
		return nil
	}
	c.end()
	if len(p.Sources.Sources) == 0 {
		c.read = p.Sources
		return nil
	}
	broker, err := c.Open(p)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.broker = broker
	c.mu.Unlock()
	var readers sync.WaitGroup
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // the turn's context ends with the turn
	for _, source := range p.Sources.Sources {
		readers.Go(func() { c.readSource(ctx, broker, source) })
	}
	c.read = p.Sources
	c.stop = func() {
		cancel()
		readers.Wait()
		c.mu.Lock()
		c.broker = nil
		c.mu.Unlock()
		broker.Close()
	}
	return nil
}

// end stops the readers, waits for them, and disconnects.
func (c *Client) end() {
	c.read = policy.Sources{}
	if c.stop != nil {
		c.stop()
		c.stop = nil
	}
}

// readSource reads a source until ctx is done.
func (c *Client) readSource(ctx context.Context, broker Broker, source *policy.TopicSource) {
	for ctx.Err() == nil {
		if err := broker.Read(ctx, source, c.Store); err != nil && ctx.Err() == nil {
			c.Logger.ErrorContext(ctx, "reading a source failed", "source", source.Name, "error", err)
			c.Store.Progress(Progress{
				Partition: Partition{Cluster: source.Cluster, Partition: Unknown}, Source: source.Name,
				State: StateFailing, Next: Unknown, End: Unknown, Error: err.Error(),
			})
		}
		select {
		case <-ctx.Done():
		case <-time.After(restartAfter):
		}
	}
}
