package delivery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

const (
	// fetchCooldown is the shortest time between two fetches of a queue. River's default of 100 ms limits a queue to
	// concurrency / 0.1 s (measured: 18,000 jobs/s with 5 ms and 1,000 workers).
	fetchCooldown = 5 * time.Millisecond
	// fetchPollInterval is how soon new jobs are found if NOTIFY does not arrive.
	fetchPollInterval = time.Second
	// rescueSlack is added to the longest timeout once for River's job timeout, and twice for the
	// time after which River rescues a job as stuck.
	rescueSlack = time.Minute

	// queuesInterval is how often the client compares its queues with the policy's, in addition to each reload.
	queuesInterval = 10 * time.Second
	// removeTimeout limits each wait for the running jobs of a queue that is removed, because River's client adds no
	// queue during the wait. removeAgain is the pause between two waits.
	removeTimeout = time.Second
	removeAgain   = time.Second
)

// ClientConfig configures a [Client].
type ClientConfig struct {
	// ID is the id of this process in dlq.processes. When this process dies, other processes use the id to find the jobs
	// to rescue. If empty, River generates one.
	ID      string
	Pool    *pgxpool.Pool
	Schemas postgres.Schemas
	Policy  func() *policy.Policy
	Worker  *Worker
	Logger  *slog.Logger
	// PollOnly polls instead of using LISTEN.
	PollOnly bool
	// Attached means that River belongs to an application. The client then never becomes River's leader: a leader
	// discards stuck jobs whose kinds are unknown to its own client, and deletes old jobs by its own settings.
	Attached bool
	// Shared, if not nil, returns which of the given queues other clients also work. This client does not work them,
	// because those clients would fetch the jobs of messages.
	Shared func(ctx context.Context, queues []string) ([]string, error)
	// Idle, if not nil, returns the reason why the client must work no queue now, or nil if it may work queues.
	Idle func() error
	// Changed, if not nil, is called when the set of worked queues has changed.
	Changed func()
	// SystemState, if not nil, returns the load of this machine, or false if it is unknown. Failed attempts record it.
	SystemState func() (riverdlq.SystemState, bool)
	// SoftStopTimeout is how long running jobs may take to finish when the client stops.
	SoftStopTimeout time.Duration
}

// Client is the River client that works the policy's queues.
type Client struct {
	*river.Client[pgx.Tx]

	config ClientConfig
	worked map[string]int           // concurrency by queue
	ending map[string]bool          // queues that fetch no more jobs, because their removal has begun and must be finished
	names  atomic.Pointer[[]string] // the names of the worked queues, for other goroutines
	shared atomic.Pointer[[]string] // queues of the policy that are not worked because other clients work them
}

// Shared returns the queues of the policy that the client does not work because other clients work
// them.
func (c *Client) Shared() []string { return *c.shared.Load() }

// withoutShared returns names without the queues that other clients work.
func (c *Client) withoutShared(ctx context.Context, names []string) ([]string, error) {
	if c.config.Shared == nil || len(names) == 0 {
		return names, nil
	}
	shared, err := c.config.Shared(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("find the queues that other clients work: %w", err)
	}
	for _, name := range shared {
		if !slices.Contains(*c.shared.Load(), name) {
			c.config.Logger.Warn("queue is not delivered, and messages for it are refused: other clients work it, and "+
				"would fail "+
				"messages' jobs; choose queues that only dlqd works (retry-policies.yaml)", "queue", name)
		}
	}
	c.shared.Store(&shared)
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(shared, name) }), nil
}

// Worked returns the queues that the client works now; none once the client has stopped.
func (c *Client) Worked() []string {
	select {
	case <-c.Stopped():
		return nil
	default:
		return *c.names.Load()
	}
}

// storeNames stores the names of the worked queues and reports whether they have changed.
func (c *Client) storeNames() bool {
	names := slices.Sorted(maps.Keys(c.worked))
	old := c.names.Swap(&names)
	return old == nil || !slices.Equal(*old, names)
}

// NewClient returns a client, which the caller starts. It fails if no queue of the policy is left to work.
func NewClient(ctx context.Context, config ClientConfig) (*Client, error) {
	c := &Client{config: config}
	c.shared.Store(&[]string{})
	workers := river.NewWorkers()
	river.AddWorker(workers, config.Worker)
	p := config.Policy()
	names, err := c.withoutShared(ctx, p.QueueNames())
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no queue to deliver: other clients work %s; choose queues that only dlqd works "+
			"(retry-policies.yaml), "+
			"or run dlqd serve with only --api and --dlq-workers", strings.Join(p.QueueNames(), ", "))
	}
	queues, worked := map[string]river.QueueConfig{}, map[string]int{}
	for _, name := range names {
		worked[name] = p.Concurrency(name)
		queues[name] = river.QueueConfig{MaxWorkers: worked[name]}
	}
	d := &driver{
		Driver: postgres.NewDriver(config.Pool), config: &c.config, inDoubt: config.Worker.inDoubt,
		fetches: fetches{delivering: map[int64]*fetched{}, servers: map[string]string{}, looks: map[string]*look{}},
	}
	c.Client, err = river.NewClient(d, &river.Config{
		ID:                config.ID,
		Schema:            config.Schemas.River,
		Logger:            slog.New(RiverLog(config.Logger.Handler())),
		ErrorHandler:      panics{},
		Queues:            queues,
		Workers:           workers,
		Middleware:        []rivertype.Middleware{&riverdlq.Middleware{SystemState: config.SystemState}},
		FetchCooldown:     fetchCooldown,
		FetchPollInterval: fetchPollInterval,
		PollOnly:          config.PollOnly,
		// An application may share the queue, with kinds that this client does not know.
		FetchOnlyKnownKinds:    true,
		LeaderElectionDisabled: config.Attached,
		JobTimeout:             p.MaxTimeout() + rescueSlack,
		RescueStuckJobsAfter:   p.MaxTimeout() + 2*rescueSlack,
		SoftStopTimeout:        config.SoftStopTimeout,
	})
	if err != nil {
		return nil, err
	}
	c.config.ID = c.ID()
	c.worked, c.ending = worked, map[string]bool{}
	c.storeNames()
	return c, nil
}

// panics counts deliveries that panic. River itself logs each panic and records it as the job's error.
type panics struct{}

// HandleError implements river.ErrorHandler.
func (panics) HandleError(context.Context, *rivertype.JobRow, error) *river.ErrorHandlerResult {
	return nil
}

// HandlePanic implements river.ErrorHandler.
func (panics) HandlePanic(_ context.Context, _ *rivertype.JobRow, value any, _ string) *river.ErrorHandlerResult {
	_ = background.Panicked(value)
	return nil
}

// Loop returns the loop that adds and removes the client's queues as the current policy requires. The caller wakes it
// when the policy changes.
func (c *Client) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "policy-queues", Interval: queuesInterval, WhenIdle: true,
		Once: c.updateQueues, Failing: "policy: updating the worked queues failed",
	})
}

// updateQueues adds and removes queues as the policy requires; while Idle returns an error, it removes all. A queue
// whose concurrency has changed is removed and added again. The removal of a queue has to wait for the queue's running
// jobs. updateQueues waits for removeTimeout and tries again in its next turn, so that other queues and reloads do not
// wait.
func (c *Client) updateQueues(ctx context.Context) (time.Duration, error) {
	p := c.config.Policy()
	names := p.QueueNames()
	if c.config.Idle != nil && c.config.Idle() != nil {
		names = nil
	}
	names, err := c.withoutShared(ctx, names)
	if err != nil {
		return 0, err
	}
	defer func() {
		if c.storeNames() && c.config.Changed != nil {
			c.config.Changed()
		}
	}()
	var errs []error
	add := func(name string) {
		concurrency := p.Concurrency(name)
		if err := c.Queues().Add(name, river.QueueConfig{MaxWorkers: concurrency}); err != nil {
			// If River fails to start a queue, it keeps the queue and would refuse to add it again.
			_ = c.Queues().Remove(ctx, name)
			errs = append(errs, fmt.Errorf("queue %s: %w", name, err))
			return
		}
		c.worked[name] = concurrency
	}
	for _, name := range names {
		if _, known := c.worked[name]; !known {
			add(name)
		}
	}
	wait := time.Duration(0)
	for name, concurrency := range c.worked {
		wanted := slices.Contains(names, name)
		if wanted && p.Concurrency(name) == concurrency && !c.ending[name] {
			continue
		}
		c.ending[name] = true
		removing, cancel := context.WithTimeout(ctx, removeTimeout)
		err := c.Queues().Remove(removing, name)
		cancel()
		switch {
		case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil: // the queue's jobs still run: try again
			wait = removeAgain
		case err != nil:
			errs = append(errs, fmt.Errorf("queue %s: %w", name, err))
		default:
			delete(c.worked, name)
			delete(c.ending, name)
			if wanted {
				add(name)
			}
		}
	}
	return wait, errors.Join(errs...)
}

// RiverLog returns a handler for River's log lines. It renames fields to dlqd's names and drops the errors of jobs. It
// passes informational lines only if next is enabled at debug level: River logs one for each failed job, and one for
// each queue every few seconds.
func RiverLog(next slog.Handler) slog.Handler { return riverLog{next, false} }

type riverLog struct {
	slog.Handler

	ofJob bool // WithAttrs has added a field of a job, so all lines are about that job
}

// fieldNames maps River's field names to dlqd's.
var fieldNames = map[string]string{
	"job_id": "job", "job_kind": "kind", "err": "error", "client_id": "client",
	"panic_val": "error", "goroutine_dump": "stack",
}

func (h riverLog) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, level) && (level >= slog.LevelWarn || h.Handler.Enabled(ctx, slog.LevelDebug))
}

// Handle drops the error text of a job, which may contain sensitive data. The dead letter records that text.
func (h riverLog) Handle(ctx context.Context, r slog.Record) error {
	var attrs []slog.Attr
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	attrs, _ = h.renamed(attrs)
	renamed := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	renamed.AddAttrs(attrs...)
	return h.Handler.Handle(ctx, renamed)
}

// renamed returns the fields with dlqd's names but without the error of a job, and reports whether the fields are about
// a job.
func (h riverLog) renamed(attrs []slog.Attr) (renamed []slog.Attr, ofJob bool) {
	ofJob = h.ofJob || slices.ContainsFunc(attrs, func(a slog.Attr) bool {
		return a.Key == "job_id" || a.Key == "job_kind"
	})
	for _, a := range attrs {
		a.Key = cmp.Or(fieldNames[a.Key], a.Key)
		if !ofJob || a.Key != "error" {
			renamed = append(renamed, a)
		}
	}
	return renamed, ofJob
}

func (h riverLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	renamed, ofJob := h.renamed(attrs)
	return riverLog{h.Handler.WithAttrs(renamed), ofJob}
}

func (h riverLog) WithGroup(name string) slog.Handler {
	return riverLog{h.Handler.WithGroup(name), h.ofJob}
}
