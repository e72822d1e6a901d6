// Package api is the REST API: huma operations, one file per resource, and the OpenAPI document they make.
package api

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"golang.org/x/sync/semaphore"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// DefaultMaxBodyBytes is the largest message that is accepted, unless configured otherwise.
const DefaultMaxBodyBytes = 1 << 20

// DefaultMaxBodiesBytes bounds the bodies of submissions that are being read or wait for their commit, all together.
const DefaultMaxBodiesBytes = 256 << 20

// bodyReadTimeout bounds how long a client may take to send a submission.
const bodyReadTimeout = 30 * time.Second

// maxBatchBodies is how many times larger a batch may be than one message.
const maxBatchBodies = 16

// operationsTag is of what asks how the program is.
const operationsTag = "operations"

// Version is the API's.
const Version = "0.1.0"

// Part is one part of the program, and how it is.
type Part struct {
	Name   string `json:"name" doc:"The part." example:"database"`
	OK     bool   `json:"ok" doc:"Whether it works."`
	Detail string `json:"detail,omitempty" doc:"More about it."`
}

// Config is what the API serves.
type Config struct {
	Ingester     *ingest.Ingester
	Store        *deadletter.Store
	Analytics    *analytics.Store
	Archive      *archive.Archive         // nil: there is none
	Planner      func() *strategy.Planner // by the policy that is in force
	Parked       func([]worker.Parked)    // is told of entries that a reclassification parked; nil for nobody
	Breakers     *breaker.Breakers
	Replayer     *replay.Replayer
	River        *river.Client[pgx.Tx] // to see queues and pause them; it works none
	Access       *access.Authenticator // nil: nobody is asked who they are
	Metrics      *metrics.Metrics
	Logger       *slog.Logger
	MaxBodyBytes int64 // of one message; 0 means DefaultMaxBodyBytes
	// MaxBodiesBytes bounds all bodies at once; 0 means DefaultMaxBodiesBytes.
	MaxBodiesBytes int64
	// WriteTimeout is how long a client may leave a part of an answer unread; 0 means DefaultWriteTimeout.
	WriteTimeout time.Duration
	// Health says how each part is. Ready says whether requests should be sent here. Idle says why none is answered at the
	// moment, but those about the program itself; nil for never.
	Health func(ctx context.Context) []Part
	Ready  func() error
	Idle   func() error
}

type service struct {
	Config

	bodies *semaphore.Weighted
}

// New returns the API's handler.
func New(config Config) http.Handler {
	s, mux, _ := build(config)
	// A page of another site, open in a browser on this machine, must not move anything.
	return cutOffUnread(http.NewCrossOriginProtection().Handler(s.signIn(mux)), cmp.Or(config.WriteTimeout, DefaultWriteTimeout))
}

// OpenAPI returns the API's description as YAML and as JSON.
func OpenAPI() (yaml, asJSON []byte, err error) {
	_, _, api := build(Config{Metrics: metrics.New(), Logger: slog.New(slog.DiscardHandler)})
	if yaml, err = api.OpenAPI().YAML(); err != nil {
		return nil, nil, err
	}
	asJSON, err = api.OpenAPI().MarshalJSON()
	return yaml, asJSON, err
}

func build(config Config) (*service, *http.ServeMux, huma.API) {
	config.MaxBodyBytes = cmp.Or(config.MaxBodyBytes, DefaultMaxBodyBytes)
	config.MaxBodiesBytes = cmp.Or(config.MaxBodiesBytes, DefaultMaxBodiesBytes)
	s := &service{Config: config, bodies: semaphore.NewWeighted(config.MaxBodiesBytes)}
	mux := http.NewServeMux()
	humaConfig := huma.DefaultConfig("dlqd", Version)
	humaConfig.CreateHooks = nil // no $schema links in answers
	humaConfig.DocsPath = ""     // ours needs nothing from elsewhere
	humaConfig.SchemasPath = ""
	humaConfig.Formats = map[string]huma.Format{"application/json": jsonFormat(), "json": jsonFormat()}
	humaConfig.RejectUnknownQueryParameters = true // a mistyped filter must not choose everything
	humaConfig.Info.Description = "A dead-letter office for Postgres: submit messages, see what became of them, and bring dead letters back."
	humaConfig.Info.License = &huma.License{Name: "MIT", Identifier: "MIT"}
	humaConfig.Servers = []*huma.Server{{URL: "/", Description: "The dlqd that serves this document"}}
	humaConfig.Tags = []*huma.Tag{
		{Name: "messages", Description: "Submit messages, and follow them."},
		{Name: "dead letters", Description: "See and steer jobs that ended as failures."},
		{Name: "automatic redelivery", Description: "For what dlqd redelivers by itself, and what it only observes."},
		{Name: "capture", Description: "How failures become dead letters, and what was missed."},
		{Name: "replay runs", Description: "Send many dead letters back, at a pace, and see how it goes."},
		{Name: "analytics", Description: "What happens to dead letters over time, from rollups of the audit trail."},
		{Name: "audit", Description: "Who did what, and erasure of somebody's data."},
		{Name: "queues", Description: "See queues, pause and resume them."},
		{Name: "circuit breakers", Description: "See and steer what keeps deliveries from a destination that is in trouble."},
		{Name: operationsTag, Description: "How the program is."},
	}
	api := humago.New(mux, humaConfig)
	api.UseMiddleware(s.observe, s.authorize(api), s.refuseWhenIdle(api), refuseUnstorable(api))
	s.registerMessages(api)
	s.registerEntries(api)
	s.registerReplays(api)
	s.registerBulk(api)
	s.registerAnalytics(api)
	s.registerAudit(api)
	s.registerQueues(api)
	s.registerAutomatic(api)
	s.registerCapture(api)
	s.registerReclassify(api)
	s.registerBreakers(api)
	s.registerOperations(api)
	s.registerAccess(api)
	describeNeeds(api)

	mux.Handle("GET /metrics", config.Metrics.Handler())
	mux.Handle("GET /docs", docsPage(api))
	mux.HandleFunc("/", notServed(mux))
	return s, mux, api
}

// observe counts requests and times them.
func (s *service) observe(ctx huma.Context, next func(huma.Context)) {
	start := time.Now()
	next(huma.WithContext(ctx, deadletter.WithOrigin(ctx.Context(), origin(ctx))))
	operation := ctx.Operation().OperationID
	s.Metrics.Requests.WithLabelValues(operation, strconv.Itoa(ctx.Status())).Inc()
	s.Metrics.RequestSeconds.WithLabelValues(operation).Observe(time.Since(start).Seconds())
}

// refuseWhenIdle answers 503 while nothing is to be done, unless somebody asks how the program is.
func (s *service) refuseWhenIdle(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		if s.Idle != nil && !slices.Contains(ctx.Operation().Tags, operationsTag) {
			if err := s.Idle(); err != nil {
				ctx.SetHeader("Retry-After", retryAfterSeconds)
				_ = huma.WriteErr(api, ctx, http.StatusServiceUnavailable, err.Error())
				return
			}
		}
		next(ctx)
	}
}

// maxAgent bounds what is kept of what a client calls itself.
const maxAgent = 100

// origin is from where a request comes, for the audit trail.
func origin(ctx huma.Context) string {
	host, _, err := net.SplitHostPort(ctx.RemoteAddr())
	if err != nil {
		host = "a local socket"
	}
	agent := strings.ToValidUTF8(ctx.Header("User-Agent"), "?")
	return strings.TrimSpace("API, from " + host + " " + agent[:min(len(agent), maxAgent)])
}

// boundBodies takes the room that a submission's body needs before it is read.
func (s *service) boundBodies(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		size := min(ctx.Operation().MaxBodyBytes, s.MaxBodiesBytes) // not said, or more than is read
		if said, err := strconv.ParseInt(ctx.Header("Content-Length"), 10, 64); err == nil && said >= 0 {
			size = min(size, said)
		}
		if !s.bodies.TryAcquire(size) {
			s.count("", "overflow", 1)
			ctx.SetHeader("Retry-After", retryAfterSeconds)
			_ = huma.WriteErr(api, ctx, http.StatusTooManyRequests, "too many submissions at once; send it again later")
			return
		}
		defer s.bodies.Release(size)
		next(ctx)
	}
}

// problem makes the answer to an error. Errors that a client can do nothing about are logged, not told.
func (s *service) problem(ctx context.Context, err error) error {
	var move *deadletter.MoveError
	switch {
	case errors.As(err, &move):
		status := http.StatusConflict
		switch {
		case errors.Is(err, deadletter.ErrNotFound):
			status = http.StatusNotFound
		case errors.Is(err, deadletter.ErrInvalid):
			status = http.StatusUnprocessableEntity
		case errors.Is(err, deadletter.ErrForbidden):
			status = http.StatusForbidden
		}
		return huma.NewError(status, strings.ReplaceAll(move.Error(), "p_all => true", `"all": true`)) // psql's words, and the API's
	case errors.Is(err, ingest.ErrNoMessage):
		return huma.Error404NotFound(err.Error() + "; it was never stored, or it ended longer ago than jobs are kept")
	case ctx.Err() != nil:
		return huma.NewError(statusClientClosedRequest, "the request was cancelled")
	}
	answer := databaseProblem(err)
	if answer.GetStatus() >= http.StatusInternalServerError {
		s.Logger.Error("request failed", "error", err)
	}
	return answer
}

// statusClientClosedRequest is nginx's status for a client that hung up: nobody reads it but the metrics.
const statusClientClosedRequest = 499

// example gives an operation's answer an example.
func example(op *huma.Operation, status int, value any) {
	if op.Responses == nil {
		op.Responses = map[string]*huma.Response{}
	}
	response := op.Responses[strconv.Itoa(status)]
	if response == nil {
		response = &huma.Response{Description: http.StatusText(status)}
		op.Responses[strconv.Itoa(status)] = response
	}
	if response.Content == nil {
		response.Content = map[string]*huma.MediaType{}
	}
	response.Content["application/json"] = &huma.MediaType{Example: value}
}

// describeBody describes the body of a registered operation whose handler decodes it by itself: huma knows only that it
// is bytes.
func describeBody[T any](api huma.API, path, description string, value any) {
	schema := api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
	api.OpenAPI().Paths[path].Post.RequestBody = &huma.RequestBody{
		Description: description,
		Required:    true,
		Content:     map[string]*huma.MediaType{"application/json": {Schema: schema, Example: value}},
	}
}
