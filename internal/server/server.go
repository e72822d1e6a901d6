// Package server is the program behind "dlqd serve". It starts the parts in order, and stops them within one deadline.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/console"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
	"github.com/dlqd/dlqd/internal/reconcile"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/replica"
	"github.com/dlqd/dlqd/internal/restored"
	"github.com/dlqd/dlqd/internal/retention"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/version"
	"github.com/dlqd/dlqd/internal/worker"
)

// Defaults of a server.
const (
	DefaultListen      = "127.0.0.1:7353"
	DefaultStopTimeout = 30 * time.Second

	// readHeaderTimeout limits how long a client may take to send its headers.
	readHeaderTimeout = 10 * time.Second
	// maxHeaderBytes is the maximum size of a request's headers; net/http adds 4 KB.
	maxHeaderBytes = 64 << 10
	// idleTimeout is how long an unused connection stays open.
	idleTimeout = 2 * time.Minute
	// DefaultDatabaseWait is shorter than the startup probe of the Helm chart (3 min), so that a pod ends by itself, with
	// the reason in its log.
	DefaultDatabaseWait = time.Minute
	// firstPause and longestPause bound the pauses between attempts to reach the database.
	firstPause, longestPause = time.Second, 10 * time.Second
	// attemptStop limits the time to stop the parts that a failed attempt to start has started.
	attemptStop = 2 * time.Second
	// forgetTimeout limits one turn of the loop that deletes the places of completed ordered messages.
	forgetTimeout = 10 * time.Minute
)

// Config configures a [Server].
type Config struct {
	// DatabaseURL is the URL of a Postgres database; empty starts an embedded server in DataDir.
	DatabaseURL string
	// ReplicaURL is the URL of a streaming standby of the database, for reads of the API; empty for none.
	ReplicaURL string
	// DatabaseWait is how long a start waits for a database that does not answer; 0 means that the start fails at once.
	DatabaseWait time.Duration
	DataDir      string
	PostgresBin  string
	Schemas      postgres.Schemas
	// API, Process and DLQWorkers select the parts that run in this process.
	API, Process, DLQWorkers bool
	// Listen lists the addresses of the API: host:port, or unix: and a path. Without API, only
	// metrics and health are served there.
	Listen []string
	// Insecure allows addresses that other machines reach without authentication.
	Insecure bool
	Policy   *policy.Policy
	// Source is where Policy was read from. If it is a directory, dlqd reads the policy again when a file there changes.
	Source       policy.Source
	MaxBodyBytes int64
	// BodyGrace is added to the time that a client may take to send a body, which is the time at the rate
	// door.MinBodyRate; 0 means door.DefaultBodyGrace.
	BodyGrace time.Duration
	// Door configures which requests are let in. The hosts of Listen are added to Door.Hosts. If Door.Client is nil, the
	// client of a request is its authenticated caller or, without authentication, its peer.
	Door door.Config
	// MaxConnections limits the TCP connections to the API; 0 means door.DefaultMaxConnections.
	MaxConnections int64
	// TLS are the files for encrypted TCP connections; the zero value means no encryption.
	TLS door.CertificateFiles
	// MaxPending limits the messages that wait for their commit; 0 means ingest.DefaultMaxPending.
	MaxPending int
	// MaxBodiesBytes limits the total size of request bodies in memory; 0 means
	// api.DefaultMaxBodiesBytes.
	MaxBodiesBytes int64
	// WriteTimeout is how long a client may leave part of a response unread; 0 means
	// api.DefaultWriteTimeout.
	WriteTimeout time.Duration
	// PollInterval is how often DLQ workers look for due entries if no notification arrives.
	PollInterval time.Duration
	// PollOnly disables LISTEN, which transaction poolers do not support. If dlqd detects a pooler, it sets PollOnly,
	// unless Listens is set.
	PollOnly bool
	// Listens says that the pooler in front of the database gives each client its own session, so that LISTEN works.
	Listens bool
	// StopTimeout limits the whole stop, even if the database hangs. Running jobs may use most of that time to finish. 0
	// means DefaultStopTimeout.
	StopTimeout time.Duration
	// RiverUI is the address of River UI, for the console's links to jobs; empty for no links.
	RiverUI string
	// MaxConns is the maximum size of the connection pool; 0 means the URL's pool_max_conns, or
	// postgres.DefaultMaxConns.
	MaxConns int32
	// Archive is the directory or URL where closed entries are archived before they are dropped;
	// see archive.Open. Empty means no archive.
	Archive string
	Logger  *slog.Logger
	// LogLevel is the level of Logger; nil if the level cannot be changed at run time.
	LogLevel *slog.LevelVar
	// OTLPEndpoint is the base URL of an OpenTelemetry collector for traces, metrics and logs;
	// empty for none.
	OTLPEndpoint string
	// OpenSources connects to the clusters of the policy's sources; nil if the program was built without Kafka.
	OpenSources source.Open
	// Measure returns the load of the machine and the database; nil means that the breaker.Conditions measure the load.
	Measure func(context.Context) (breaker.Load, error)
}

// Server runs the parts of dlqd.
type Server struct {
	config  Config
	logger  *slog.Logger
	metrics *metrics.Metrics
	// telemetry sends traces, metrics and logs to the collector, if there is one.
	telemetry *telemetry.Telemetry

	embedded  *postgres.Embedded
	pool      *pgxpool.Pool
	analytics *analytics.Store
	groups    *group.Store
	store     *deadletter.Store
	archive   *archive.Archive
	ingester  *ingest.Ingester
	replica   *replica.Replica // nil without a ReplicaURL or without the API
	breakers  *breaker.Breakers
	delivery  *delivery.Worker
	traffic   *delivery.Traffic
	river     *delivery.Client
	sources   *source.Client // nil: this process reads none
	process   *process.Process
	// presencePool is the connection pool of the heartbeats and of the rescue of messages: see register.
	presencePool *pgxpool.Pool
	guard        atomic.Pointer[restored.Guard] // nil until register
	worker       *worker.Worker
	attached     bool                  // River belongs to an application
	detached     atomic.Pointer[error] // not nil while dlqd is detached from the database
	http         *http.Server
	access       *access.Authenticator
	// certificates are the API's TLS certificates; nil without TLS.
	certificates *door.Certificates
	listeners    []net.Listener

	conditions  *breaker.Conditions
	planner     atomic.Pointer[strategy.Planner] // of the policy in force
	reloading   sync.Mutex
	reloadErr   atomic.Pointer[error]         // the error of the last reload; nil if the reload succeeded
	published   atomic.Pointer[policy.Policy] // the policy whose masks are in force in the database
	unpublished atomic.Bool                   // publishing the policy to the database failed, and is retried
	authWays    atomic.Pointer[[]string]      // the last ways of authentication that a policy configured; nil if none did

	loops        background.Group
	wakeApproved func()           // starts approved operations; nil if this process has no DLQ workers
	wakeRuns     func()           // continues replay runs; nil if this process has no DLQ workers
	queues       *background.Loop // applies the policy's queues to River's client
	presence     *background.Loop // announces this process and its queues to the others
	failed       chan error       // receives the error of a part that has stopped
	stopping     atomic.Bool
	began        time.Time
}

// CheckSources returns an error if the policy has sources or feeds, this configuration runs Process or DLQWorkers, and
// OpenSources is nil. Such a process could not publish, and would fail each redelivery of a source's records.
func (c *Config) CheckSources(p *policy.Policy) error {
	if !c.Process && !c.DLQWorkers {
		return nil
	}
	return c.OpenSources.Check(p)
}

// Start starts all parts. If a part fails to start, Start stops the parts that run already, and returns the error.
func Start(ctx context.Context, config Config) (*Server, error) {
	if config.StopTimeout == 0 {
		config.StopTimeout = DefaultStopTimeout
	}
	if err := config.Schemas.Validate(); err != nil {
		return nil, err
	}
	if err := config.Door.Check(); err != nil {
		return nil, err
	}
	if !config.API && !config.Process && !config.DLQWorkers {
		return nil, errors.New("no part is enabled: use --api, --process or --dlq-workers")
	}
	s, err := startParts(ctx, config)
	if err != nil {
		return nil, err
	}
	if s.listens() {
		if err := s.startAPI(ctx); err != nil {
			return nil, errors.Join(err, s.stop(context.WithoutCancel(ctx)))
		}
	}
	return s, nil
}

// startParts starts all parts but the API. If the database at DatabaseURL does not answer, startParts stops these parts
// and tries again until DatabaseWait is over.
func startParts(ctx context.Context, config Config) (*Server, error) {
	deadline := time.Now().Add(config.DatabaseWait)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		s := &Server{config: config, metrics: metrics.New(), failed: make(chan error, 8), began: time.Now()}
		var err error
		s.telemetry, err = telemetry.Start(ctx, telemetry.Config{
			Endpoint: config.OTLPEndpoint, Version: version.String(), Instance: postgres.ProcessName(),
			Gatherer: s.metrics.Gatherer(), Logger: slog.New(s.metrics.Logged(config.Logger.Handler())),
		})
		if err != nil {
			return nil, err
		}
		s.logger = s.telemetry.Logger
		s.loops.Logger, s.loops.Observe = s.logger, s.metrics.ObserveTurn
		if err = s.start(ctx); err == nil {
			return s, nil
		}
		waits := config.DatabaseURL != "" && ctx.Err() == nil && postgres.IsUnanswered(err) &&
			time.Now().Add(pause).Before(deadline)
		if waits {
			s.logger.WarnContext(ctx, "waiting for the database, which does not answer", "error", err,
				"until", deadline.Format(time.RFC3339))
		}
		if waits {
			s.config.StopTimeout = min(config.StopTimeout, attemptStop)
		}
		if stopErr := s.stop(context.WithoutCancel(ctx)); !waits {
			return nil, errors.Join(err, stopErr)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(pause):
		}
	}
}

// start starts all parts but the API.
func (s *Server) start(ctx context.Context) error {
	if err := s.openDatabase(ctx); err != nil {
		return err
	}
	status, err := s.migrator().Status(ctx)
	if err != nil {
		return err
	}
	// openDatabase has checked the version of a River that belongs to dlqd; only an application's River can be older.
	if s.config.Process && status.RiverVersion < status.RiverLatest {
		return fmt.Errorf("the schema of River is at version %d, and delivering messages needs version %d: "+
			"run River's migrations, or serve with only --api and --dlq-workers", status.RiverVersion, status.RiverLatest)
	}
	s.attached = status.Attached
	s.store = deadletter.NewStore(s.pool, s.config.Schemas)
	s.analytics = analytics.NewStore(s.pool, s.config.Schemas)
	s.groups = &group.Store{Store: s.store}
	if s.config.Archive != "" {
		if s.archive, err = archive.Open(ctx, s.config.Archive); err != nil {
			return fmt.Errorf("%w; set --archive to where closed dead letters are archived before they are dropped, "+
				"or to \"none\"", err)
		}
	}
	s.metrics.WatchPool(s.pool)
	if err := s.register(ctx); err != nil {
		return err
	}

	if err := s.startPolicyAndBreakers(ctx); err != nil {
		return err
	}
	if err := s.openReplica(ctx); err != nil {
		return err
	}
	s.publishPolicy(ctx)
	s.startMaintenance()
	if s.config.Process || s.config.DLQWorkers {
		s.loops.Add((&facts.Applier{Store: s.store}).Loop())
	}
	if s.config.OpenSources != nil && (s.config.Process || s.config.DLQWorkers) {
		s.sources = &source.Client{
			Open: s.config.OpenSources, Policy: s.policy, Logger: s.logger.With("part", "sources"),
			Store: s.sourceStore(), Entries: s.store,
			Masked: func() bool { return s.published.Load() == s.policy() },
		}
		s.loops.Add(s.sources.Loop(), s.sources.ReturnedLoop(), s.sources.FeedLoop())
	}
	if s.config.Process {
		if err := s.startProcessing(ctx); err != nil {
			return err
		}
	}
	if s.config.DLQWorkers {
		if err := s.startDLQWorker(); err != nil {
			return err
		}
	}
	if s.listens() && s.config.TLS != (door.CertificateFiles{}) {
		if s.certificates, err = door.LoadCertificates(s.config.TLS); err != nil {
			return err
		}
		s.loops.Add(s.certificates.Loop())
	}
	s.loops.Idle = s.idle
	s.loops.Add(s.attachmentLoop())
	s.metrics.WatchLoops(s.loops.Statuses)
	s.loops.Start()
	s.logMode(ctx)
	return nil
}

// listens reports whether this process serves HTTP requests: the API or, without the API, metrics and health.
func (s *Server) listens() bool { return s.config.API || len(s.config.Listen) > 0 }

// startPolicyAndBreakers starts what all parts use: the policy, the circuit breakers and the conditions.
func (s *Server) startPolicyAndBreakers(ctx context.Context) error {
	s.traffic = delivery.NewTraffic(s.store.DB())
	s.breakers = breaker.New(breaker.Config{
		DB: s.store.DB(), Policy: s.policy, Actor: postgres.ProcessName(), Logger: s.logger,
	})
	s.conditions = breaker.NewConditions(breaker.ConditionsConfig{
		DB: s.pool, Policy: s.policy, Breakers: s.breakers, Measure: s.config.Measure,
	})
	planner, err := strategy.NewPlanner(s.config.Policy, s.conditions)
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	s.planner.Store(planner)
	if err := s.breakers.Sync(ctx); err != nil {
		return err
	}
	s.metrics.WatchDatabase(s.store.DB(), s.policy, s.logger)
	s.metrics.WatchPolicy(s.policy, func() bool { return s.reloadErr.Load() == nil })
	s.metrics.WatchBreakers(s.breakers)
	s.loops.Add(s.breakers.Loop())
	if s.config.DLQWorkers {
		s.loops.Add(s.conditions.Loop())
	}
	if s.config.Source.Dir != "" {
		// Reload logs its own errors.
		s.loops.Add(policy.Watch(s.config.Source, s.policy, func(ctx context.Context) { _ = s.Reload(ctx) }))
		s.loops.Add(background.New(background.Config{
			Name: "policy-version", Interval: versionInterval, WhenIdle: true,
			Failing: "reloading the policy after a commit failed",
			Once:    background.Each(s.reloadCommitted),
		}))
	}
	return nil
}

// policy returns the policy in force.
func (s *Server) policy() *policy.Policy { return s.planner.Load().Policy() }

func (s *Server) migrator() *postgres.Migrator {
	return &postgres.Migrator{Pool: s.pool, Schemas: s.config.Schemas, Logger: s.logger, OwnRiver: s.embedded != nil}
}

// openDatabase opens the database of the URL or, without a URL, an embedded one, which it starts and migrates. Of a
// database with a URL, it only checks the schema, because the database's owner decides when the schema changes.
func (s *Server) openDatabase(ctx context.Context) error {
	url := s.config.DatabaseURL
	if url == "" {
		embedded, err := postgres.StartEmbedded(ctx, postgres.EmbeddedConfig{
			DataDir: s.config.DataDir, BinDir: s.config.PostgresBin, Logger: s.logger,
		})
		if err != nil {
			return err
		}
		s.embedded = embedded
		url = embedded.URL()
		s.logger.Info("embedded Postgres started", "data_dir", s.config.DataDir)
	}
	var err error
	if s.pool, err = postgres.OpenWith(ctx, url, s.config.MaxConns, s.checkRestored); err != nil {
		return err
	}
	if postgres.IsPooled(s.pool) && !s.config.PollOnly && !s.config.Listens {
		// A transaction pooler would give other clients the session in which dlqd listens.
		s.config.PollOnly = true
		s.logger.Info("the database is behind a pooler, so dlqd polls; " +
			"use --poll-only=false if the pooler gives each client its own session")
	}
	if s.embedded != nil {
		return s.migrator().Up(ctx)
	}
	return s.migrator().Check(ctx)
}

// openReplica opens the read replica if one is configured and this process serves the API.
func (s *Server) openReplica(ctx context.Context) (err error) {
	if s.config.ReplicaURL == "" || !s.config.API {
		return nil
	}
	if s.replica, err = replica.Open(ctx, replica.Config{
		Primary: s.pool, Schemas: s.config.Schemas, URL: s.config.ReplicaURL, Logger: s.logger.With("part", "replica"),
		MaxLag:  func() time.Duration { return s.policy().Monitoring.Replica.MaxLag },
		Observe: s.metrics.ObserveReplica,
	}); err != nil {
		return err
	}
	s.metrics.WatchReplica(func() bool {
		ok, _ := s.replica.Status()
		return ok || s.idle() != nil // while dlqd is detached, the replica's loop waits, and its status is not a problem
	}, s.replica.AsOf)
	s.loops.Add(s.replica.Loop())
	return nil
}

func (s *Server) startProcessing(ctx context.Context) error {
	s.delivery = delivery.NewWorker(delivery.Config{
		Logger:  s.logger.With("part", "delivery"),
		Planner: s.planner.Load, Breakers: s.breakers, DB: s.store.DB(),
		Observe: func(d delivery.Delivered) {
			s.metrics.ObserveDelivery(d)
			s.traffic.Observe(&d, time.Now())
		}, Tracer: s.telemetry.Tracer,
		InDoubt: s.process.InDoubt, Holds: s.guard.Load().Holds, Publisher: s.publisher(),
	})
	var err error
	var shared func(context.Context, []string) ([]string, error)
	if s.attached {
		shared = func(ctx context.Context, queues []string) ([]string, error) {
			return process.SharedQueues(ctx, s.store.DB(), queues)
		}
	}
	if s.river, err = delivery.NewClient(ctx, delivery.ClientConfig{
		ID: s.process.ID().String(), Pool: s.pool, Schemas: s.config.Schemas, Policy: s.policy, Worker: s.delivery,
		Logger:   s.logger.With("part", "processing"),
		PollOnly: s.config.PollOnly, Attached: s.attached, SoftStopTimeout: s.config.StopTimeout - s.reserve(),
		SystemState: s.systemState, Shared: shared, Idle: s.idle, Changed: func() { s.presence.Wake() },
	}); err != nil {
		return fmt.Errorf("processing: %w", err)
	}
	if err := s.river.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("processing: %w", err)
	}
	s.queues = s.river.Loop()
	releaser := &delivery.Releaser{
		DB: s.store.DB(), Policy: s.policy, Breakers: s.breakers, Logger: s.logger,
		Restored: func() bool { return s.guard.Load().Held() != nil },
	}
	s.loops.Add(s.queues, releaser.Loop(), s.traffic.Loop())
	return s.process.Once(ctx) // announces the queues
}

func (s *Server) sourceStore() *source.Store {
	return &source.Store{DB: s.store.DB(), Policy: s.policy, Logger: s.logger.With("part", "sources")}
}

// offsetAt returns the function that finds the offsets of a topic by time, or nil if this process reads no sources.
func (s *Server) offsetAt() api.OffsetAt {
	if s.sources == nil {
		return nil
	}
	return s.sources.OffsetAt
}

// publisher returns the publisher of entries' records, or nil if this process reads no sources.
func (s *Server) publisher() source.Publisher {
	if s.sources == nil {
		return nil
	}
	return s.sources
}

// systemState returns the last measured load of this machine, in percent rounded to one decimal. It returns false if
// this process has measured nothing: only processes with DLQ workers measure.
func (s *Server) systemState() (riverdlq.SystemState, bool) {
	load, measured := s.conditions.Load()
	return riverdlq.SystemState{CPU: math.Round(load.CPU*10) / 10, Memory: math.Round(load.Memory*10) / 10}, measured
}

func (s *Server) startDLQWorker() error {
	regrouper := &group.Regrouper{
		Store: s.groups, Logger: s.logger.With("part", "groups"), Actor: "worker:" + postgres.ProcessName(),
	}
	config := worker.Config{
		Store: s.store, Planner: s.planner.Load, Logger: s.logger.With("part", "dlq-workers"),
		PollInterval: s.config.PollInterval, WakeTopic: s.config.Schemas.WakeTopic(),
		Observe: s.metrics.ObserveWorker, ObserveStage: s.metrics.ObserveStage, Parked: s.notifyParked,
		TryLock: s.guard.Load().TryLock, BeforeFiling: regrouper.AliasMarked, Tracer: s.telemetry.Tracer,
	}
	if !s.config.PollOnly {
		config.Listen = s.pool
	}
	s.worker = worker.New(config)
	s.loops.Add(s.worker.Loops()...)
	s.loops.Add(regrouper.Loop())
	runner := replay.NewRunner(s.store, s.planner.Load, s.logger.With("part", "replay"), s.guard.Load().MaySend)
	runner.Worse, runner.JobsWorse = s.traffic.Worse, s.traffic.JobsWorse
	runner.Reached, runner.Strain = s.traffic.Reached, s.traffic.Strain
	runs := runner.Loop()
	s.loops.Add(runs)
	s.wakeRuns = runs.Wake
	s.loops.Add((&replay.Fixes{
		Replayer: s.replayer(), Logger: s.logger.With("part", "replay"), MaySend: s.guard.Load().MaySend,
	}).Loop())
	riverAdmin, err := s.riverAdmin()
	if err != nil {
		return err
	}
	approvals := &approval.Runner{
		Store: s.store, Replayer: s.replayer(), Archive: s.archive,
		CancelJob: func(ctx context.Context, job int64, act deadletter.Act) error {
			return s.cancelJob(ctx, riverAdmin, job, act)
		},
		Logger: s.logger.With("part", "approvals"), Observe: s.metrics.ObserveApproval,
	}
	if s.replica != nil {
		approvals.Acted = s.replica.Acted
	}
	approved := approvals.Loop()
	s.loops.Add(approved)
	s.wakeApproved = approved.Wake
	queues := &breaker.Queues{Pool: s.pool, Schemas: s.config.Schemas, River: riverAdmin, Breakers: s.breakers}
	s.loops.Add(queues.Loop())
	return nil
}

func (s *Server) replayer() *replay.Replayer {
	return &replay.Replayer{
		Store: s.store, Planner: s.planner.Load, Wake: s.wakeRuns, Tracer: s.telemetry.Tracer,
		Groups: s.config.OpenSources.Groups,
	}
}

// startMaintenance adds the maintenance loops: partitions, places of ordered messages, browser sessions, retention,
// rollups, the metrics sample and the reconciler.
func (s *Server) startMaintenance() {
	keeper := &retention.Keeper{
		Store: s.store, Archive: s.archive, Policy: s.policy, Logger: s.logger, Observe: s.metrics.ObserveRetention,
	}
	s.loops.Add(
		background.New(background.Config{
			Name: "partitions", Interval: postgres.PartitionInterval,
			Failing: "creating partitions failed; rows of a missing partition go to the default one",
			Once: background.Each(func(ctx context.Context) error {
				return postgres.EnsurePartitions(ctx, s.pool,
					s.config.Schemas)
			}),
		}),
		background.New(background.Config{
			Name: "ordered-places", Interval: postgres.PartitionInterval, Timeout: forgetTimeout,
			Failing: "deleting the places of completed ordered messages failed",
			Once: background.Each(func(ctx context.Context) error {
				return delivery.ForgetOrdered(ctx, s.store.DB())
			}),
		}),
		background.New(background.Config{
			Name: "sessions", Interval: time.Hour, Failing: "deleting ended browser sessions failed",
			Once: background.Each(func(ctx context.Context) error {
				return access.NewStore(s.pool, s.config.Schemas).TrimSessions(ctx, s.policy().Access.Rules().Sessions)
			}),
		}),
		keeper.Loop(),
	)
	s.loops.Add(s.analytics.Loops()...)
	s.loops.Add((&metrics.Sampler{Store: s.store, Schemas: s.config.Schemas, Policy: s.policy}).Loop())
	s.loops.Add(reconcile.New(reconcile.Config{DB: s.store.DB(), Logger: s.logger.With("part", "reconciler")}).Loop())
}

// cancelJob cancels a job for an approved request. It succeeds if the job is cancelled already: the process that
// executed the request before may have cancelled the job and then died.
func (s *Server) cancelJob(ctx context.Context, client *river.Client[pgx.Tx], id int64, act deadletter.Act) error {
	job, _, _, err := delivery.FindJob(ctx, s.store.DB(), id)
	switch {
	case err != nil:
		return err
	case job == nil:
		return &deadletter.MoveError{Kind: deadletter.ErrNotFound, Detail: fmt.Sprintf("job %d: there is no such job", id)}
	case job.State == "cancelled":
		return nil
	}
	return s.store.RecordDone(ctx, "queue "+job.Queue, act, func(tx pgx.Tx) (string, error) {
		return delivery.CancelJob(ctx, client, tx, s.store.In(tx), id, nil)
	})
}

// riverAdmin returns a River client that works no queue. It lists, pauses and resumes queues, and cancels and retries
// jobs.
func (s *Server) riverAdmin() (*river.Client[pgx.Tx], error) {
	client, err := river.NewClient(postgres.NewDriver(s.pool), &river.Config{
		Schema: s.config.Schemas.River, Logger: slog.New(delivery.RiverLog(s.logger.Handler())),
	})
	if err != nil {
		return nil, fmt.Errorf("create the River client that lists and pauses queues: %w", err)
	}
	return client, nil
}

// notifyParked logs the dead letters that a worker parked, except those of muted groups. Entries that SQL or an
// operator parked do not pass through here; the metric dlqd_needs_person counts all entries that wait for an operator.
func (s *Server) notifyParked(parked []worker.Parked) {
	type parkedGroup struct {
		group.Key

		class string
	}
	counts, keys := map[parkedGroup]int{}, make([]group.Key, 0, len(parked))
	for _, p := range parked {
		key := group.Key{Queue: p.Queue, Fingerprint: p.Fingerprint}
		counts[parkedGroup{key, p.Class}]++
		keys = append(keys, key)
	}
	// The worker's context may have ended with the turn of its loop. Each statement has its own timeout.
	marks, err := s.groups.Marks(context.Background(), keys)
	if err != nil {
		// Log a muted group rather than miss one that is not muted.
		s.logger.Error("reading which failure groups are muted failed; all parked entries are logged", "error", err)
	}
	for g, n := range counts {
		if mark := marks[g.Key]; !mark.Muted {
			s.logger.Warn("dead letters need a person", "queue", g.Queue, "error_class", g.class, "fingerprint", g.Fingerprint,
				"entries", n, "owner", mark.Owner, "regressed", mark.Fixed)
		}
	}
}

// exposedAddress returns the first address that other machines can reach, or "".
func exposedAddress(addresses []string) string {
	for _, address := range addresses {
		host, _, err := net.SplitHostPort(address)
		if !strings.HasPrefix(address, "unix:") && (err != nil || !access.IsLoopback(host)) {
			return address
		}
	}
	return ""
}

// checkAccess returns an error if other machines could connect without authentication, unless Insecure is set, or if
// the policy has authentication by certificates and TLS.ClientCA is empty.
func (s *Server) checkAccess() error {
	if slices.Contains(s.policy().Access.Authentication, access.ViaCertificate+"s") && s.config.TLS.ClientCA == "" {
		return errors.New("access.yaml: authentication by certificates needs --tls-client-ca, " +
			"the certificate authority that issues them")
	}
	address := exposedAddress(s.config.Listen)
	if address == "" || len(s.policy().Access.Authentication) > 0 {
		return nil
	}
	if !s.config.Insecure {
		return fmt.Errorf("--listen %s: other machines could read and purge everything without authentication; "+
			"configure it in access.yaml (authentication: [tokens]), or use --insecure", address)
	}
	s.logger.Warn("INSECURE: every client that reaches this address has full access without authentication (--insecure)",
		"address", address)
	return nil
}

// accessHealth returns the health of authentication. It reports a failure if other machines can connect without
// authentication, or if a reload removed all ways of authentication.
func (s *Server) accessHealth() api.Part {
	ways := s.policy().Access.Authentication
	address := exposedAddress(s.config.Listen)
	previous := s.authWays.Load()
	switch {
	case len(ways) > 0:
		part := api.Part{Name: "access", OK: true, Detail: "callers authenticate by " + strings.Join(ways, ", ")}
		// The part stays healthy: dlqd's own tokens still work.
		if since := s.access.ProviderDown(); !since.IsZero() {
			part.Detail += "; the OpenID Connect provider has not answered since " + since.UTC().Format(time.RFC3339)
		}
		return part
	case previous != nil:
		return api.Part{Name: "access", Detail: "access.yaml no longer configures authentication; " +
			"until a restart, callers authenticate by " + strings.Join(*previous, ", ")}
	case address == "":
		return api.Part{Name: "access", OK: true, Detail: "no authentication; only users of this machine can connect"}
	default:
		return api.Part{
			Name:   "access",
			Detail: "INSECURE: every client that reaches " + address + " has full access (--insecure)",
		}
	}
}

// rules returns the rules of authentication in force. Once a policy has configured authentication, no reload can switch
// authentication off: a line that is lost in an edit must not give everyone access.
func (s *Server) rules() access.Rules {
	rules := s.policy().Access.Rules()
	if len(rules.Ways) > 0 {
		s.authWays.Store(&rules.Ways)
	} else if previous := s.authWays.Load(); previous != nil {
		rules.Ways = *previous
	}
	return rules
}

// startIntake starts the ingester, which stores submitted messages.
func (s *Server) startIntake() (err error) {
	var queues *process.Queues
	if s.attached {
		queues = process.NewQueues(s.store.DB())
	}
	s.ingester, err = ingest.New(ingest.Config{
		Pool: s.pool, Schemas: s.config.Schemas, Policy: s.policy,
		Breakers: s.breakers, Logger: s.logger, Observe: s.metrics.ObserveInsert,
		MaxPending: s.config.MaxPending, Worked: queues,
	})
	if err != nil {
		return err
	}
	s.metrics.WatchPending(s.ingester.Pending)
	return nil
}

func (s *Server) startAPI(ctx context.Context) error {
	err := s.checkAccess()
	if err != nil {
		return err
	}
	if s.config.API {
		if err := s.startIntake(); err != nil {
			return err
		}
	}
	riverAdmin, err := s.riverAdmin()
	if err != nil {
		return err
	}
	s.rules() // stores the ways for later reloads
	s.config.Door.Hosts = slices.Concat(s.config.Door.Hosts, door.HostsOf(s.config.Listen))
	s.access = &access.Authenticator{
		Tokens: access.NewStore(s.pool, s.config.Schemas), Rules: s.rules,
		Open: s.config.Insecure || exposedAddress(s.config.Listen) == "", Logger: s.logger,
	}
	handler := api.New(api.Config{
		Access: s.access, Replica: s.replica, Ingester: s.ingester, Store: s.store, Analytics: s.analytics, Groups: s.groups,
		Archive: s.archive, Planner: s.planner.Load,
		Breakers: s.breakers, Sources: s.sourceStore(), OffsetAt: s.offsetAt(), River: riverAdmin, Metrics: s.metrics,
		Logger:       s.logger,
		MaxBodyBytes: s.config.MaxBodyBytes, MaxBodiesBytes: s.config.MaxBodiesBytes,
		WriteTimeout: s.config.WriteTimeout, BodyGrace: s.config.BodyGrace, Door: s.config.Door,
		Tracer: s.telemetry.Tracer, Replayer: s.replayer(),
		Approvals: &approval.Store{Store: s.store, Wake: s.wakeApproved},
		Parked:    s.notifyParked, Health: s.health, Queues: s.queueHealth, Ready: s.ready,
		Reach: s.reach, Idle: s.idle, LogLevel: s.config.LogLevel, StatusOnly: !s.config.API,
		Draft: s.draft, DraftFiles: s.config.Source.DraftFiles(),
		Examine: func(ctx context.Context) []doctor.Finding {
			return append(doctor.Examine(ctx, s.migrator()), doctor.Replica(ctx, s.pool, s.config.ReplicaURL)...)
		},
		Console: func(operations, notServed http.Handler) api.Console {
			return console.New(console.Config{
				API: operations, NotServed: notServed, Policy: s.policy, Environment: s.config.Source.Env,
				Ready: s.ready, Reach: s.pool.Ping, Logger: s.logger.With("part", "console"),
				Requests:   (&approval.Store{Store: s.store}).Version,
				SignInWays: s.access.SignInWays, RiverUI: strings.TrimSuffix(s.config.RiverUI, "/"),
			})
		},
	})
	s.http = &http.Server{
		Handler: handler, ConnContext: access.ConnContext, ReadHeaderTimeout: readHeaderTimeout,
		MaxHeaderBytes: maxHeaderBytes, IdleTimeout: idleTimeout,
		ErrorLog: slog.NewLogLogger(s.logger.Handler(), slog.LevelWarn),
	}
	if s.certificates != nil {
		s.http.TLSConfig = s.certificates.Config()
	}
	connections := door.NewQuota(cmp.Or(s.config.MaxConnections, door.DefaultMaxConnections))
	for _, address := range s.config.Listen {
		listener, err := api.Listen(ctx, address)
		if err != nil {
			return err
		}
		s.listeners = append(s.listeners, listener)
		if s.config.API {
			s.logger.Info("API is listening", "address", listener.Addr().String())
		} else {
			s.logger.Info("metrics and health are listening", "address", listener.Addr().String())
		}
		serve := s.http.Serve
		if listener.Addr().Network() != "unix" {
			listener = door.Listener(listener, connections, s.metrics.Refused)
			if s.certificates != nil {
				serve = func(l net.Listener) error { return s.http.ServeTLS(l, "", "") }
			}
		}
		go func() {
			if err := serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
				s.failed <- fmt.Errorf("API: %w", err)
			}
		}()
	}
	if s.embedded != nil {
		return s.embedded.SetHolder(", which serves " + strings.Join(s.Addresses(), " and "))
	}
	return nil
}

// Addresses returns the URLs or socket paths at which the API is served.
func (s *Server) Addresses() []string {
	addresses := make([]string, len(s.listeners))
	for i, l := range s.listeners {
		addresses[i] = api.URL(l, s.certificates != nil)
	}
	return addresses
}

// Policy returns the policy in force.
func (s *Server) Policy() *policy.Policy { return s.policy() }

// Pool returns the server's connection pool.
func (s *Server) Pool() *pgxpool.Pool { return s.pool }
