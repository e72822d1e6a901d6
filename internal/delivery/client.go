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
	"github.com/dlqd/dlqd/riverdlq"
)

const (
	// fetchCooldown is the least time between two fetches of a queue. River's default of 100 ms bounds a queue to
	// concurrency / 0.1 s (measured: 5 ms gives 18,000 jobs/s at 1,000 workers).
	fetchCooldown = 5 * time.Millisecond
	// fetchPollInterval finds new jobs where NOTIFY does not reach.
	fetchPollInterval = time.Second
	// rescueSlack is how much longer than the longest timeout a job must run before River takes its process for dead.
	rescueSlack = time.Minute

	// queuesInterval is how often the queues that the client works are compared with the policy's, beside at every reload.
	queuesInterval = 10 * time.Second
	// removeTimeout is how long one wait for the running jobs of a queue that is removed takes: River's client adds none
	// meanwhile. removeAgain is between two waits.
	removeTimeout = time.Second
	removeAgain   = time.Second
)

// ClientConfig is what a [Client] needs.
type ClientConfig struct {
	// ID is the process's in dlq.processes: by that others know whose jobs to put back when it dies. Empty for one of
	// River's making.
	ID      string
	Pool    *pgxpool.Pool
	Schemas postgres.Schemas
	Policy  func() *policy.Policy
	Worker  *Worker
	Logger  *slog.Logger
	// PollOnly does without LISTEN.
	PollOnly bool
	// Attached says that an application owns this River: River's leader discards stuck jobs of kinds it does not know, and
	// deletes old jobs by its own settings, so that is for the application's clients.
	Attached bool
	// Shared says which of some queues others work, too, who would take messages' jobs; nil where nobody does. The client does
	// not work those.
	Shared func(ctx context.Context, queues []string) ([]string, error)
	// Idle says why no queue is to be worked at the moment, if so; nil for never.
	Idle func() error
	// Changed is told when the client works other queues than before; nil for nobody.
	Changed func()
	// SystemState, if not nil, returns how busy this machine is. It is recorded with failed
	// attempts.
	SystemState func() (riverdlq.SystemState, bool)
	// SoftStopTimeout is how long running jobs may take to finish at a stop.
	SoftStopTimeout time.Duration
}

// Client is River's client that works the policy's queues.
type Client struct {
	*river.Client[pgx.Tx]

	config ClientConfig
	worked map[string]int           // concurrency of the queues that it works
	ending map[string]bool          // those of them that fetch nothing any more: once begun, a removal must go on
	names  atomic.Pointer[[]string] // of those queues, for others
	shared atomic.Pointer[[]string] // queues of the policy that it does not work, since others do
}

// Shared are the queues of the policy that the client does not work, since others do.
func (c *Client) Shared() []string { return *c.shared.Load() }

// own leaves out of the policy's queues those that others work.
func (c *Client) own(ctx context.Context, names []string) ([]string, error) {
	if c.config.Shared == nil || len(names) == 0 {
		return names, nil
	}
	shared, err := c.config.Shared(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("which queues others work: %w", err)
	}
	for _, name := range shared {
		if !slices.Contains(*c.shared.Load(), name) {
			c.config.Logger.Warn("a queue of the policy is one that other clients work: they would take messages' jobs and fail them; it is not delivered, and messages for it are refused. Give dlqd queues of its own (retry-policies.yaml)", "queue", name)
		}
	}
	c.shared.Store(&shared)
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(shared, name) }), nil
}

// Worked are the queues that the client works at the moment.
func (c *Client) Worked() []string {
	select {
	case <-c.Stopped():
		return nil
	default:
		return *c.names.Load()
	}
}

// note keeps the names of the queues that the client works, and says whether they have changed.
func (c *Client) note() bool {
	names := slices.Sorted(maps.Keys(c.worked))
	old := c.names.Swap(&names)
	return old == nil || !slices.Equal(*old, names)
}

// NewClient returns a client that does not run yet.
func NewClient(ctx context.Context, config ClientConfig) (*Client, error) {
	c := &Client{config: config}
	c.shared.Store(&[]string{})
	workers := river.NewWorkers()
	river.AddWorker(workers, config.Worker)
	p := config.Policy()
	names, err := c.own(ctx, p.QueueNames())
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("there is no queue to deliver: other clients work %s. Give dlqd queues of its own (retry-policies.yaml), or serve with --api and --dlq-workers alone", strings.Join(p.QueueNames(), ", "))
	}
	queues, worked := map[string]river.QueueConfig{}, map[string]int{}
	for _, name := range names {
		worked[name] = p.Concurrency(name)
		queues[name] = river.QueueConfig{MaxWorkers: worked[name]}
	}
	d := &driver{Driver: postgres.NewDriver(config.Pool), config: &c.config, inDoubt: config.Worker.inDoubt}
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
		// A queue may be shared with an application whose kinds this client does not know.
		FetchOnlyKnownKinds:    true,
		LeaderElectionDisabled: config.Attached,
		JobTimeout:             p.MaxTimeout() + rescueSlack,
		RescueStuckJobsAfter:   p.MaxTimeout() + 2*rescueSlack,
		SoftStopTimeout:        config.SoftStopTimeout,
	})
	if err != nil {
		return nil, err
	}
	c.worked, c.ending = worked, map[string]bool{}
	c.note()
	return c, nil
}

// panics counts deliveries that panic. River logs them and records them as errors of their jobs.
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

// Loop keeps the client working the queues of the policy in force. Wake it when that changes.
func (c *Client) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "policy-queues", Interval: queuesInterval, WhenIdle: true, Once: c.follow, Failing: "policy: a queue is not worked, or as before",
	})
}

// follow makes the changes that are due. Removing a queue waits for its running jobs, however long: it is tried again and
// again, so that other queues and reloads go on meanwhile.
func (c *Client) follow(ctx context.Context) (time.Duration, error) {
	p := c.config.Policy()
	names := p.QueueNames()
	if c.config.Idle != nil && c.config.Idle() != nil {
		names = nil
	}
	names, err := c.own(ctx, names)
	if err != nil {
		return 0, err
	}
	defer func() {
		if c.note() && c.config.Changed != nil {
			c.config.Changed()
		}
	}()
	var errs []error
	add := func(name string) {
		concurrency := p.Concurrency(name)
		if err := c.Queues().Add(name, river.QueueConfig{MaxWorkers: concurrency}); err != nil {
			// River keeps a queue that it could not start, and would refuse to add it again.
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
		case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil: // its jobs run
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

// RiverLog returns a handler of River's log lines. It gives their fields the names that dlqd's own
// lines have, leaves out the errors of jobs, and passes informational lines (one for each job that
// fails, and one for each queue every few seconds) only where the level is debug.
func RiverLog(next slog.Handler) slog.Handler { return riverLog{next, false} }

type riverLog struct {
	slog.Handler

	ofJob bool // a field that was added before says that all lines are about a job
}

// fieldNames are dlqd's names for River's fields.
var fieldNames = map[string]string{
	"job_id": "job", "job_kind": "kind", "err": "error", "client_id": "client",
	"panic_val": "error", "goroutine_dump": "stack",
}

func (h riverLog) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, level) && (level >= slog.LevelWarn || h.Handler.Enabled(ctx, slog.LevelDebug))
}

// Handle leaves out what the error of a job says: that may be what nobody is to see, and the dead letter has it.
func (h riverLog) Handle(ctx context.Context, r slog.Record) error {
	var attrs []slog.Attr
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	attrs, _ = h.named(attrs)
	named := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	named.AddAttrs(attrs...)
	return h.Handler.Handle(ctx, named)
}

// named returns fields with dlqd's names, without the error of a job if they are of one, and
// whether they are.
func (h riverLog) named(attrs []slog.Attr) (named []slog.Attr, ofJob bool) {
	ofJob = h.ofJob || slices.ContainsFunc(attrs, func(a slog.Attr) bool {
		return a.Key == "job_id" || a.Key == "job_kind"
	})
	for _, a := range attrs {
		a.Key = cmp.Or(fieldNames[a.Key], a.Key)
		if !ofJob || a.Key != "error" {
			named = append(named, a)
		}
	}
	return named, ofJob
}

func (h riverLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	named, ofJob := h.named(attrs)
	return riverLog{h.Handler.WithAttrs(named), ofJob}
}

func (h riverLog) WithGroup(name string) slog.Handler {
	return riverLog{h.Handler.WithGroup(name), h.ofJob}
}
