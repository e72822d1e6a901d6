// Package server is the program behind "dlqd serve": it builds the parts, starts them in order, and stops them in the
// reverse one.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/conditions"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/retention"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
	"github.com/dlqd/dlqd/riverdlq"
)

// Defaults of a server.
const (
	DefaultListen      = "127.0.0.1:7353"
	DefaultStopTimeout = 30 * time.Second

	// fetchCooldown is the least time between two fetches of a queue. River's default of 100 ms bounds a queue to
	// concurrency / 0.1 s (measured: 5 ms gives 18,000 jobs/s at 1,000 workers).
	fetchCooldown = 5 * time.Millisecond
	// releaseInterval is how often held messages are looked at.
	releaseInterval = time.Second
	// fetchPollInterval finds new jobs where NOTIFY does not reach.
	fetchPollInterval = time.Second
	// rescueSlack is how much longer than the longest timeout a job must run before River takes its process for dead.
	rescueSlack = time.Minute
	// readHeaderTimeout bounds how long a client may take over its headers.
	readHeaderTimeout = 10 * time.Second
	// idleTimeout closes connections that are kept and not used.
	idleTimeout = 2 * time.Minute
	// hardStopTimeout is how long jobs get to return once their contexts are cancelled.
	hardStopTimeout = 5 * time.Second
)

// ErrStoppedAtOnce says that a second signal, or the stop's time limit, cut the stop short. Nothing accepted is lost:
// jobs that were cut off run again.
var ErrStoppedAtOnce = errors.New("stopped at once; jobs that were running will run again")

// Config is what a [Server] needs.
type Config struct {
	// DatabaseURL names a Postgres; empty starts an embedded one in DataDir.
	DatabaseURL string
	DataDir     string
	PostgresBin string
	Schemas     postgres.Schemas
	// Which parts run in this process.
	API, Process, DLQWorkers bool
	// Listen are addresses of the API: host:port, or unix: and a path.
	Listen []string
	Policy *policy.Policy
	// Source is where Policy was read from: with a directory, it is read again when its files change.
	Source       policy.Source
	MaxBodyBytes int64
	// MaxPending bounds the messages that wait for their commit; 0 means ingest.DefaultMaxPending.
	MaxPending int
	// MaxBodiesBytes bounds the bodies of submissions, all together; 0 means api.DefaultMaxBodiesBytes.
	MaxBodiesBytes int64
	// PollInterval is how often DLQ workers look for due entries when nothing wakes them.
	PollInterval time.Duration
	// PollOnly does without LISTEN, which transaction poolers lack.
	PollOnly bool
	// StopTimeout is how long running jobs may take to finish at a stop.
	StopTimeout time.Duration
	// MaxConns bounds the connections to the database; 0 means postgres.DefaultMaxConns.
	MaxConns int32
	// Archive is where closed entries go before they are dropped, a directory or a URL: see archive.Open. Empty: nowhere.
	Archive string
	Logger  *slog.Logger
	// Measure says how loaded machine and database are; nil to measure them.
	Measure func(context.Context) (conditions.Load, error)
}

// Server is the program.
type Server struct {
	config  Config
	logger  *slog.Logger
	metrics *metrics.Metrics

	embedded  *postgres.Embedded
	pool      *pgxpool.Pool
	analytics *analytics.Store
	store     *deadletter.Store
	archive   *archive.Archive
	ingester  *ingest.Ingester
	breakers  *breaker.Breakers
	delivery  *delivery.Worker
	river     *river.Client[pgx.Tx]
	dlqWorker *worker.Worker
	http      *http.Server
	listeners []net.Listener

	conditions *conditions.Conditions
	planner    atomic.Pointer[strategy.Planner] // by the policy that is in force
	reloading  sync.Mutex
	reloadErr  atomic.Pointer[error] // of the last reload; nil where it worked

	queuesChanged chan struct{} // the policy's queues may not be those that River's client works
	stopQueues    context.CancelFunc

	background sync.WaitGroup // all that runs until stopWork
	stopWork   context.CancelFunc
	failed     chan error // a part died
	stopping   atomic.Bool
}

// Start starts all parts. On an error, those that had started are stopped again.
func Start(ctx context.Context, config Config) (*Server, error) {
	if config.StopTimeout == 0 {
		config.StopTimeout = DefaultStopTimeout
	}
	if config.MaxConns == 0 {
		config.MaxConns = postgres.DefaultMaxConns
	}
	if err := config.Schemas.Validate(); err != nil {
		return nil, err
	}
	if !config.API && !config.Process && !config.DLQWorkers {
		return nil, errors.New("no part is switched on: use --api, --process or --dlq-workers")
	}
	s := &Server{config: config, logger: config.Logger, metrics: metrics.New(), failed: make(chan error, 8), queuesChanged: make(chan struct{}, 1)}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.stop(context.WithoutCancel(ctx)))
	}
	return s, nil
}

func (s *Server) start(ctx context.Context) error {
	if err := s.openDatabase(ctx); err != nil {
		return err
	}
	status, err := s.migrator().Status(ctx)
	if err != nil {
		return err
	}
	if s.config.Process && status.RiverVersion < status.RiverLatest { // an application's: Check saw to our own
		return fmt.Errorf("the River here is at version %d, and this dlqd's client needs %d to deliver messages: run River's migrations, or serve with --api and --dlq-workers alone", status.RiverVersion, status.RiverLatest)
	}
	s.store = deadletter.NewStore(s.pool, s.config.Schemas)
	s.analytics = analytics.NewStore(s.pool, s.config.Schemas)
	if s.config.Archive != "" {
		if s.archive, err = archive.Open(ctx, s.config.Archive); err != nil {
			return fmt.Errorf("%w; say with --archive where closed dead letters go before they are dropped, or \"none\"", err)
		}
	}
	s.metrics.WatchBacklog(s.store, s.pool, s.config.Schemas, s.logger)

	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	s.stopWork = stopWork
	if err := s.startJudgement(ctx, work); err != nil {
		return err
	}
	s.protect(ctx)
	s.background.Go(func() { s.keepHouse(work) })
	s.background.Go(func() { s.analytics.Run(work, s.logger) })
	if s.config.Process {
		if err := s.startProcessing(work, status.Attached); err != nil {
			return err
		}
	}
	if s.config.DLQWorkers {
		if err := s.startDLQWorker(work); err != nil {
			return err
		}
	}
	if s.config.API {
		return s.startAPI(ctx)
	}
	return nil
}

// startJudgement starts what all parts ask: the policy, the circuit breakers, and the conditions.
func (s *Server) startJudgement(ctx, work context.Context) error {
	s.breakers = breaker.New(breaker.Config{
		Queries: s.store.Queries(), Policy: s.policy, Actor: postgres.ProcessName(), Logger: s.logger,
	})
	s.conditions = conditions.New(conditions.Config{
		DB: s.pool, Policy: s.policy, Breakers: s.breakers, Logger: s.logger, Measure: s.config.Measure,
	})
	planner, err := strategy.NewPlanner(s.config.Policy, s.conditions)
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	s.planner.Store(planner)
	if err := s.breakers.Sync(ctx); err != nil {
		return err
	}
	s.metrics.WatchPolicy(s.policy, func() bool { return s.reloadErr.Load() == nil })
	s.metrics.WatchBreakers(s.breakers)
	s.background.Go(func() { s.breakers.Run(work) })
	if s.config.DLQWorkers {
		s.background.Go(func() { s.conditions.Run(work) })
	}
	if s.config.Source.Dir != "" {
		return s.watchPolicy(work)
	}
	return nil
}

// policy is the policy that is in force.
func (s *Server) policy() *policy.Policy { return s.planner.Load().Policy() }

func (s *Server) migrator() *postgres.Migrator {
	return &postgres.Migrator{Pool: s.pool, Schemas: s.config.Schemas, Logger: s.logger, OwnRiver: s.embedded != nil}
}

// openDatabase opens the database. The embedded one is brought up to date; another is only checked, because whoever
// owns it decides when its schema changes.
func (s *Server) openDatabase(ctx context.Context) error {
	url := s.config.DatabaseURL
	if url == "" {
		embedded, err := postgres.StartEmbedded(ctx, postgres.EmbeddedConfig{DataDir: s.config.DataDir, BinDir: s.config.PostgresBin, Logger: s.logger})
		if err != nil {
			return err
		}
		s.embedded = embedded
		url = embedded.URL()
		s.logger.Info("embedded Postgres is up", "data_dir", s.config.DataDir)
	}
	var err error
	if s.pool, err = postgres.Open(ctx, url, s.config.MaxConns); err != nil {
		return err
	}
	if s.embedded != nil {
		return s.migrator().Up(ctx)
	}
	return s.migrator().Check(ctx)
}

func (s *Server) startProcessing(ctx context.Context, attached bool) error {
	s.delivery = delivery.NewWorker(delivery.Config{
		Planner: s.planner.Load, Breakers: s.breakers, Queries: s.store.Queries(), Observe: s.metrics.ObserveDelivery,
	})
	workers := river.NewWorkers()
	river.AddWorker(workers, s.delivery)
	queues, worked := map[string]river.QueueConfig{}, map[string]int{}
	for _, name := range s.config.Policy.QueueNames() {
		worked[name] = s.config.Policy.Concurrency(name)
		queues[name] = river.QueueConfig{MaxWorkers: worked[name]}
	}
	var err error
	s.river, err = river.NewClient(riverpgxv5.New(s.pool), &river.Config{
		Schema:            s.config.Schemas.River,
		Logger:            slog.New(riverLog{s.logger.With("part", "processing").Handler()}),
		Queues:            queues,
		Workers:           workers,
		Middleware:        []rivertype.Middleware{riverdlq.NewMiddleware()},
		FetchCooldown:     fetchCooldown,
		FetchPollInterval: fetchPollInterval,
		PollOnly:          s.config.PollOnly,
		// A queue may be shared with an application whose kinds this client does not know.
		FetchOnlyKnownKinds: true,
		// River's leader discards stuck jobs of kinds it does not know, and deletes old jobs by its own settings: on a
		// River that an application owns, that is for the application's clients.
		LeaderElectionDisabled: attached,
		JobTimeout:             s.config.Policy.MaxTimeout() + rescueSlack,
		RescueStuckJobsAfter:   s.config.Policy.MaxTimeout() + 2*rescueSlack,
		SoftStopTimeout:        s.config.StopTimeout,
	})
	if err != nil {
		return fmt.Errorf("processing: %w", err)
	}
	if err := s.river.Start(ctx); err != nil {
		return fmt.Errorf("processing: %w", err)
	}
	changes, stopQueues := context.WithCancel(ctx)
	s.stopQueues = stopQueues
	s.background.Go(func() { s.changeQueues(changes, worked) })
	releaser := &delivery.Releaser{Queries: s.store.Queries(), Policy: s.policy, Breakers: s.breakers, Logger: s.logger, Interval: releaseInterval}
	s.background.Go(func() { releaser.Run(ctx) })
	return nil
}

// riverLog lets River's warnings through, and its informational lines (one for every job that fails, and one for every
// queue every few seconds) only where debug lines are wanted.
type riverLog struct{ slog.Handler }

func (h riverLog) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, level) && (level >= slog.LevelWarn || h.Handler.Enabled(ctx, slog.LevelDebug))
}

func (h riverLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return riverLog{h.Handler.WithAttrs(attrs)}
}

func (h riverLog) WithGroup(name string) slog.Handler { return riverLog{h.Handler.WithGroup(name)} }

func (s *Server) startDLQWorker(ctx context.Context) error {
	config := worker.Config{
		Store: s.store, Planner: s.planner.Load, Logger: s.logger.With("part", "dlq-workers"),
		PollInterval: s.config.PollInterval, WakeTopic: s.config.Schemas.WakeTopic(), Observe: s.metrics.ObserveWorker, Parked: s.tellPeople,
	}
	if !s.config.PollOnly {
		config.Listen = s.pool
	}
	s.dlqWorker = worker.New(config)
	s.background.Go(func() { s.dlqWorker.Run(ctx) })

	runner := replay.NewRunner(s.store, s.logger.With("part", "replay"))
	s.background.Go(func() { runner.Run(ctx) })

	steering, err := s.steering()
	if err != nil {
		return err
	}
	queues := &breaker.Queues{Pool: s.pool, Schemas: s.config.Schemas, River: steering, Breakers: s.breakers, Logger: s.logger}
	s.background.Go(func() { queues.Run(ctx) })
	return nil
}

// steering is a client of River's that works no queue: it sees queues, and pauses them.
func (s *Server) steering() (*river.Client[pgx.Tx], error) {
	client, err := river.NewClient(riverpgxv5.New(s.pool), &river.Config{Schema: s.config.Schemas.River, Logger: s.logger})
	if err != nil {
		return nil, fmt.Errorf("queues: %w", err)
	}
	return client, nil
}

// tellPeople says that dead letters need a person. Whatever else tells people, tells them from here.
func (s *Server) tellPeople(parked []worker.Parked) {
	type group struct {
		queue, fingerprint string
		class              riverdlq.Class
	}
	counts := map[group]int{}
	for _, p := range parked {
		counts[group{p.Queue, p.Fingerprint, p.Class}]++
	}
	for g, n := range counts {
		s.logger.Warn("dead letters need a person", "queue", g.queue, "class", g.class, "fingerprint", g.fingerprint, "entries", n)
	}
}

func (s *Server) startAPI(ctx context.Context) error {
	var err error
	s.ingester, err = ingest.New(ingest.Config{
		Pool: s.pool, Schemas: s.config.Schemas, Policy: s.policy, Breakers: s.breakers, Logger: s.logger, Observe: s.metrics.ObserveInsert,
		MaxPending: s.config.MaxPending,
	})
	if err != nil {
		return err
	}
	s.metrics.WatchPending(s.ingester.Pending)
	steering, err := s.steering()
	if err != nil {
		return err
	}
	handler := api.New(api.Config{
		Ingester: s.ingester, Store: s.store, Analytics: s.analytics, Archive: s.archive, Planner: s.planner.Load, Breakers: s.breakers, River: steering, Replayer: &replay.Replayer{Store: s.store, Planner: s.planner.Load}, Metrics: s.metrics, Logger: s.logger, MaxBodyBytes: s.config.MaxBodyBytes, MaxBodiesBytes: s.config.MaxBodiesBytes,
		Health: s.health, Ready: s.ready,
	})
	s.http = &http.Server{Handler: handler, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, ErrorLog: slog.NewLogLogger(s.logger.Handler(), slog.LevelWarn)}
	for _, address := range s.config.Listen {
		listener, err := listen(ctx, address)
		if err != nil {
			return err
		}
		s.listeners = append(s.listeners, listener)
		s.logger.Info("API is up", "address", listener.Addr().String())
		go func() {
			if err := s.http.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
				s.failed <- fmt.Errorf("API: %w", err)
			}
		}()
	}
	if s.embedded != nil {
		return s.embedded.SetHolder(", which serves " + strings.Join(s.Addresses(), " and "))
	}
	return nil
}

// listen opens a TCP address or a Unix socket. A socket file that nobody listens on is a dead process's, and goes.
func listen(ctx context.Context, address string) (net.Listener, error) {
	path, unix := strings.CutPrefix(address, "unix:")
	if !unix {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err != nil {
			return nil, fmt.Errorf("--listen %s: %w", address, err)
		}
		return listener, nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("--listen %s: another process listens there", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("--listen %s: %w", address, err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("--listen %s: %w", address, err)
	}
	return listener, os.Chmod(path, 0o660) //nolint:gosec // the group may submit
}

// Addresses are the URLs, or socket paths, that the API is served at.
func (s *Server) Addresses() []string {
	addresses := make([]string, len(s.listeners))
	for i, l := range s.listeners {
		if l.Addr().Network() == "unix" {
			addresses[i] = "unix:" + l.Addr().String()
			continue
		}
		addresses[i] = "http://" + l.Addr().String()
	}
	return addresses
}

// Pool is the server's pool.
func (s *Server) Pool() *pgxpool.Pool { return s.pool }

// Wait waits until ctx is done or a part dies, and then stops everything: intake first, then what was accepted is
// written, then running jobs finish within the limit, then the database. hard cuts that short.
func (s *Server) Wait(ctx, hard context.Context) error {
	var exited <-chan struct{}
	if s.embedded != nil {
		exited = s.embedded.Exited()
	}
	var died error
	select {
	case <-ctx.Done():
	case died = <-s.failed:
	case <-exited:
		died = fmt.Errorf("embedded Postgres died; its log is %s", s.embedded.LogPath())
	}
	if died != nil {
		s.logger.Error("stopping: a part died", "error", died)
	}
	return errors.Join(died, s.stop(hard))
}

func (s *Server) stop(hard context.Context) error {
	s.stopping.Store(true)
	var errs []error
	if s.http != nil {
		ctx, cancel := context.WithTimeout(hard, s.config.StopTimeout)
		if err := s.http.Shutdown(ctx); err != nil {
			_ = s.http.Close()
			errs = append(errs, fmt.Errorf("API: %w", err))
		}
		cancel()
	}
	if s.ingester != nil {
		s.ingester.Stop()
	}
	if s.stopQueues != nil {
		s.stopQueues() // a queue that is being removed must not hold up the stop
	}
	if s.river != nil {
		ctx, cancel := context.WithTimeout(hard, s.config.StopTimeout)
		if err := s.river.Stop(ctx); err != nil {
			s.logger.Warn("jobs did not finish in time; they will run again", "error", err)
			now, cancelNow := context.WithTimeout(context.WithoutCancel(hard), hardStopTimeout)
			_ = s.river.StopAndCancel(now)
			cancelNow()
			errs = append(errs, ErrStoppedAtOnce)
		}
		cancel()
		s.delivery.Close()
	}
	if s.stopWork != nil {
		s.stopWork()
		s.background.Wait()
	}
	if s.archive != nil {
		errs = append(errs, s.archive.Close())
	}
	if s.pool != nil {
		s.pool.Close()
	}
	if s.embedded != nil {
		errs = append(errs, s.embedded.Stop())
	}
	return errors.Join(errs...)
}

// protect has the role dlq_reader see what the policy says. Without the right to grant, what was granted stays.
func (s *Server) protect(ctx context.Context) {
	if err := s.store.Protect(ctx, s.policy().Data.SensitiveColumns); err != nil {
		s.logger.Error("policy: data.sensitiveColumns is not in force for dlq_reader; the database user must own dlqd's schema", "error", err)
	}
}

// keepHouse makes partitions ahead, and takes away what nobody needs, for as long as the server runs.
func (s *Server) keepHouse(ctx context.Context) {
	keeper := &retention.Keeper{Store: s.store, Archive: s.archive, Policy: s.policy, Logger: s.logger}
	ticker := time.NewTicker(postgres.PartitionInterval)
	defer ticker.Stop()
	for {
		if err := postgres.EnsurePartitions(ctx, s.pool, s.config.Schemas); err != nil && ctx.Err() == nil {
			s.logger.Error("partitions were not made ahead; rows go to the default partition meanwhile", "error", err)
		}
		if _, err := keeper.Run(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("retention: the next round tries again", "error", err)
		}
		if err := s.analytics.Trim(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("analytics: old rollups were not taken away", "error", err)
		}
		if _, err := s.store.Queries().ForgetOrdered(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("places of ordered messages whose work is done were not taken away", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (s *Server) ready() error {
	if s.stopping.Load() {
		return errors.New("stopping")
	}
	return nil
}

// health says how each part is. A part that runs elsewhere is not listed.
func (s *Server) health(ctx context.Context) []api.Part {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	start := time.Now()
	database := api.Part{Name: "database", OK: true}
	if err := s.pool.Ping(ctx); err != nil {
		database.OK, database.Detail = false, "does not answer"
		s.logger.Error("health: database", "error", err)
	} else {
		database.Detail = fmt.Sprintf("answered in %.1f ms", float64(time.Since(start).Microseconds())/1000)
	}
	parts := []api.Part{database}
	if s.embedded != nil {
		part := api.Part{Name: "embedded-postgres", OK: true, Detail: "runs"}
		select {
		case <-s.embedded.Exited():
			part.OK, part.Detail = false, "has exited"
		default:
		}
		parts = append(parts, part)
	}
	schema := api.Part{Name: "schema", OK: true, Detail: "up to date"}
	if database.OK {
		if err := s.migrator().Check(ctx); err != nil {
			schema.OK, schema.Detail = false, err.Error()
		}
	} else {
		schema.OK, schema.Detail = false, "unknown"
	}
	parts = append(parts, schema, s.policyHealth(), s.automaticHealth(ctx))
	if s.ingester != nil {
		messages, bytes := s.ingester.Pending()
		parts = append(parts, api.Part{
			Name: "ingest", OK: messages < ingest.DefaultMaxPending && bytes < ingest.DefaultMaxPendingBytes,
			Detail: fmt.Sprintf("%d messages (%d bytes) wait for their commit", messages, bytes),
		})
	}
	if s.river != nil {
		part := api.Part{Name: "processing", OK: true, Detail: fmt.Sprintf("delivers %d queues", len(s.policy().Queues))}
		select {
		case <-s.river.Stopped():
			part.OK, part.Detail = false, "has stopped"
		default:
		}
		parts = append(parts, part)
	}
	if s.dlqWorker != nil {
		part := api.Part{Name: "dlq-workers", OK: true, Detail: "last batch went well"}
		if err := s.dlqWorker.Err(); err != nil {
			part.OK, part.Detail = false, "last batch failed; the log says why"
		}
		parts = append(parts, part)
	}
	return parts
}
