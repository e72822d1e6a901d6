package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

const (
	// interval is the time between two checks for a changed policy, and between two writes of the readers' progress.
	interval = time.Second
	// restartAfter is the pause before a reader that ended is started again.
	restartAfter = 5 * time.Second
)

// errNoBroker is returned by Publish while the client has no connection to the clusters.
var errNoBroker = errors.New("the client of the sources is not connected")

// Client reads the sources of the current policy, and publishes records. It connects again when the policy's clusters
// or sources change. Several processes may each have a Client.
type Client struct {
	Open   Open
	Policy func() *policy.Policy
	Store  *Store
	// Entries reads the entries that feeds publish.
	Entries *deadletter.Store
	// Masked reports whether the policy's masks are stored in the database; feeds publish only then. If nil, feeds always
	// publish.
	Masked func() bool
	Logger *slog.Logger

	mu     sync.RWMutex // read-locked while the broker publishes
	broker Broker

	read    policy.Sources     // the clusters and sources for which the readers were started
	readers map[string]*reader // by the name of the source; nil if there are none
	earlier []Broker           // clients of earlier policies; readers that a new policy did not change still use them
}

// reader reads one source.
type reader struct {
	broker  Broker
	stop    func() // stops the reader and waits until it has ended; nil while the source is paused
	changes int64  // dlq.sources.changes when the reader began
	paused  bool
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

// Original implements [Publisher].
func (c *Client) Original(ctx context.Context, cluster string, at Origin, died time.Time) (Message, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.broker == nil {
		return Message{}, errNoBroker
	}
	return c.broker.Original(ctx, cluster, at, died)
}

// Encode implements [Publisher].
func (c *Client) Encode(ctx context.Context, source string, value []byte, edited json.RawMessage) ([]byte, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.broker == nil {
		return nil, errNoBroker
	}
	return c.broker.Encode(ctx, source, value, edited)
}

// OffsetAt implements [Broker].
func (c *Client) OffsetAt(
	ctx context.Context, source *policy.TopicSource, topic string, partition int32, at time.Time,
) (int64, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.broker == nil {
		return 0, errNoBroker
	}
	return c.broker.OffsetAt(ctx, source, topic, partition, at)
}

// Loop returns the background loop that starts and stops the readers, and writes their progress.
func (c *Client) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "sources", Interval: interval, Failing: "connecting to the clusters of sources, or writing their state, failed",
		Once: background.Each(func(ctx context.Context) error {
			return errors.Join(c.follow(), c.control(ctx), c.Store.writeProgress(ctx))
		}),
		End: c.end,
	})
}

// follow connects to the clusters if the policy's clusters or sources have changed. It stops the readers of sources
// that were removed or changed; the other readers continue. If no source and no feed is left, it stops all readers and
// disconnects.
func (c *Client) follow() error {
	p := c.Policy()
	before, now := c.read, p.Sources
	if reflect.DeepEqual(now, before) {
		return nil
	}
	if len(now.Sources)+len(now.Feeds) == 0 {
		c.end()
		c.read = now
		return nil
	}
	if c.broker != nil && reflect.DeepEqual(now.Clusters, before.Clusters) &&
		reflect.DeepEqual(now.Registries, before.Registries) && reflect.DeepEqual(now.Sources, before.Sources) {
		c.read = now
		return nil
	}
	broker, err := c.Open(p)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if c.broker != nil {
		c.earlier = append(c.earlier, c.broker)
	}
	c.broker = broker
	c.mu.Unlock()
	changed := map[string]*reader{}
	for name, r := range c.readers {
		was, is := before.Sources[name], now.Sources[name]
		if is == nil || !reflect.DeepEqual(was, is) ||
			!reflect.DeepEqual(before.Clusters[was.Cluster], now.Clusters[is.Cluster]) ||
			!reflect.DeepEqual(before.Registries[was.Registry], now.Registries[is.Registry]) {
			changed[name] = r
			delete(c.readers, name)
		}
	}
	stop(changed)
	c.read = now
	if c.readers == nil {
		c.readers = map[string]*reader{}
	}
	return nil
}

// control starts readers, and stops the readers of paused sources. If an operator changed a source, its reader is
// restarted, so that it uses the new position. control closes the earlier brokers that no reader uses any more.
func (c *Client) control(ctx context.Context) error {
	if c.readers == nil {
		return nil
	}
	states, err := c.Store.see(ctx, c.read)
	if err != nil {
		return err
	}
	for name, source := range c.read.Sources {
		var state dbsqlc.SeeSourcesRow // before the policy is published, a source has no row and is not paused
		if i := slices.IndexFunc(states, func(s dbsqlc.SeeSourcesRow) bool { return s.Name == name }); i >= 0 {
			state = states[i]
		}
		r := c.readers[name]
		if r != nil && r.changes == state.Changes && r.paused == state.Paused {
			continue
		}
		if r != nil && r.stop != nil {
			r.stop()
		}
		r = &reader{changes: state.Changes, paused: state.Paused}
		c.readers[name] = r
		if !state.Paused {
			r.broker, r.stop = c.broker, c.start(ctx, source)
		}
	}
	c.earlier = slices.DeleteFunc(c.earlier, func(broker Broker) bool {
		for _, r := range c.readers {
			if r.broker == broker {
				return false
			}
		}
		broker.Close()
		return true
	})
	return nil
}

// start starts a reader. The returned function stops the reader and waits until it has ended.
func (c *Client) start(ctx context.Context, source *policy.TopicSource) func() {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // the reader outlives the turn of the loop
	var done sync.WaitGroup
	done.Go(func() { c.readSource(ctx, c.broker, source) })
	return func() {
		cancel()
		done.Wait()
	}
}

// end stops the readers, waits until they have ended, and disconnects.
func (c *Client) end() {
	c.read = policy.Sources{}
	stop(c.readers)
	c.readers = nil
	c.mu.Lock()
	brokers := c.earlier
	if c.broker != nil {
		brokers = append(brokers, c.broker)
	}
	c.broker, c.earlier = nil, nil
	c.mu.Unlock()
	for _, broker := range brokers {
		broker.Close()
	}
}

// stop stops readers and waits until they have ended.
func stop(readers map[string]*reader) {
	var stopping sync.WaitGroup
	for _, r := range readers {
		if r.stop != nil {
			stopping.Go(r.stop)
		}
	}
	stopping.Wait()
}

// readSource reads a source until ctx is done. After an error, it logs and reports the error, and reads again after
// restartAfter.
func (c *Client) readSource(ctx context.Context, broker Broker, source *policy.TopicSource) {
	for ctx.Err() == nil {
		err := background.Guard(func() error { return broker.Read(ctx, source, c.Store) })
		if err != nil && ctx.Err() == nil {
			c.Logger.ErrorContext(ctx, "reading a source failed", "source", source.Name, "error", err)
			c.Store.Progress(Progress{
				Partition: Partition{Cluster: source.Cluster, Partition: Unknown}, Source: source.Name,
				State: StateFailing, Next: Unknown, End: Unknown, Start: Unknown, Error: withoutStack(err),
			})
		}
		select {
		case <-ctx.Done():
		case <-time.After(restartAfter):
		}
	}
}

// withoutStack returns the text of an error. It omits the stack of a panic, which is in the log.
func withoutStack(err error) string {
	if panicked, ok := errors.AsType[*background.PanicError](err); ok {
		return fmt.Sprintf("panicked: %v", panicked.Value)
	}
	return err.Error()
}
