// Package api is the REST API: its huma operations, one file per resource, and the OpenAPI document
// generated from them.
package api

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/savedview"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/worker"
)

// DefaultMaxBodyBytes is the default maximum size of a message.
const DefaultMaxBodyBytes = 1 << 20

// DefaultMaxBodiesBytes is the default total size of the request bodies that are being read or
// answered. The default is higher if four of the largest batches need more, because one client may
// use only half of it.
const DefaultMaxBodiesBytes = 256 << 20

// maxBatchBodies is the maximum size of a batch, in messages of maximum size.
const maxBatchBodies = 16

// messagesTag is the tag of operations on messages.
const messagesTag = "messages"

// operationsTag is the tag of operations that examine the program.
const operationsTag = "operations"

// policyTag is the tag of operations that show and try policies.
const policyTag = "policy"

// unshownTags are the tags of operations that change nothing on the console's pages. Messages
// arrive all the time; the others only examine or try something.
var unshownTags = []string{messagesTag, operationsTag, policyTag}

// Version is the version of the API.
const Version = "0.1.0"

// Part is the health of one part of the program.
type Part struct {
	Name   string `json:"name" doc:"The part." example:"database"`
	OK     bool   `json:"ok" doc:"Whether it works."`
	Detail string `json:"detail,omitempty" doc:"More about it."`
	// LastSuccess is nil for parts that are not loops, and before the first successful run.
	LastSuccess *time.Time `json:"lastSuccess,omitempty" doc:"When a turn of it in this process succeeded last, of what runs in the background; absent before the first."`
}

// QueueHealth reports whether a queue's dead letters are within its limits.
type QueueHealth struct {
	Queue         string   `json:"queue" doc:"The queue." example:"payment-processing"`
	Status        string   `json:"status" enum:"up,down" doc:"down: a limit of monitoring.yaml is passed."`
	Reasons       []string `json:"reasons" doc:"Which ones, and by how much." example:"[\"size 127 exceeds 100\"]"`
	Warnings      []string `json:"warnings" doc:"Limits of which 80 % are used."`
	Open          int64    `json:"open" doc:"Open dead letters." example:"127"`
	OldestSeconds float64  `json:"oldestSeconds" doc:"Age of the oldest of them; 0 where there is none."`
	MaxOpen       int64    `json:"maxOpen" doc:"The limit of their number." example:"100"`
	MaxAgeSeconds float64  `json:"maxAgeSeconds" doc:"The limit of their age."`
}

// Config configures the API.
type Config struct {
	Ingester  *ingest.Ingester
	Store     *deadletter.Store
	Analytics *analytics.Store
	Archive   *archive.Archive         // nil: no archive
	Planner   func() *strategy.Planner // by the policy in force
	// Draft returns the planner of the policy with text in place of one of its files, which
	// DraftFiles lists.
	Draft        func(file, text string) (*strategy.Planner, error)
	DraftFiles   []string
	Parked       func([]worker.Parked) // called with the entries that a reclassification parked; may be nil
	Breakers     *breaker.Breakers
	Replayer     *replay.Replayer
	Approvals    *approval.Store
	Groups       *group.Store
	Views        *savedview.Store
	River        *river.Client[pgx.Tx] // lists and pauses queues; works no jobs
	Access       *access.Authenticator // nil: no authentication
	Metrics      *metrics.Metrics
	Tracer       trace.Tracer // nil: requests are not traced
	Logger       *slog.Logger
	MaxBodyBytes int64 // of one message; 0 means DefaultMaxBodyBytes
	// MaxBodiesBytes bounds all bodies at once; 0 means DefaultMaxBodiesBytes.
	MaxBodiesBytes int64
	// BodyGrace is how long a body may take in addition to its time at door.MinBodyRate; 0 means
	// door.DefaultBodyGrace.
	BodyGrace time.Duration
	// Door configures which requests are let in. Its Client also tells whose room a body takes; nil
	// means that of the authenticated caller. Its Refused is ignored.
	Door door.Config
	// WriteTimeout is how long a client may leave part of a response unread; 0 means
	// DefaultWriteTimeout.
	WriteTimeout time.Duration
	// Health returns the health of each part, and Queues that of each queue, or nothing if the
	// database does not answer. Ready returns an error if requests should not be sent to this
	// process; it does not check the database, which Reach does. Idle, if not nil, returns why all
	// operations except those about the program itself are refused now.
	Health func(ctx context.Context) []Part
	Queues func(ctx context.Context) []QueueHealth
	Ready  func() error
	Reach  func(ctx context.Context) error
	Idle   func() error
	// StatusOnly serves only statusPaths.
	StatusOnly bool
	// LogLevel is the log level of this process; nil if it cannot be changed.
	LogLevel *slog.LevelVar
	// Examine runs doctor's checks.
	Examine func(ctx context.Context) []doctor.Finding
	// Console builds the pages from the API's operations and the handler for unknown paths; nil for
	// no pages.
	Console func(operations, notServed http.Handler) Console
}

// Console serves dlqd's pages.
type Console interface {
	http.Handler

	// SignInFailed answers a failed sign-in of a browser.
	SignInFailed(w http.ResponseWriter, r *http.Request, status int, why string)
	// Acted is called after an operation that may have changed what pages show, with the operation's tag.
	Acted(tag string)
}

type service struct {
	Config

	examining, previewing sync.Mutex

	bodies  door.Bodies
	console Console // nil if there are no pages
}

// New returns the API's handler.
func New(config Config) http.Handler {
	if config.Door.Client == nil {
		config.Door.Client = client
	}
	config.Door.Refused = config.Metrics.Refused
	s, mux, _ := build(config)
	var served http.Handler = mux
	if config.StatusOnly {
		served = statusOnly(mux)
	}
	served = s.recovered(door.Guard(config.Door, s.signIn(door.Limit(config.Door, served))))
	return cutOffUnread(served, cmp.Or(config.WriteTimeout, DefaultWriteTimeout))
}

// statusPaths are the paths that a process without the API serves.
var statusPaths = []string{"/metrics", "/livez", "/readyz", "/api/health", "/api/log-level"}

func statusOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(statusPaths, r.URL.Path) {
			door.Problem(w, http.StatusNotFound, "this dlqd runs without --api: it serves "+strings.Join(statusPaths, ", ")+" alone")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// client identifies the client of a request for limits: the authenticated caller or, without
// authentication, the peer.
func client(r *http.Request) string {
	if p := access.From(r.Context()); p.Name != "" {
		return p.Via + " " + p.Name
	}
	return door.Peer(r)
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
	config.MaxBodiesBytes = cmp.Or(config.MaxBodiesBytes, max(DefaultMaxBodiesBytes, 4*maxBatchBodies*config.MaxBodyBytes))
	config.Tracer = telemetry.Tracer(config.Tracer)
	s := &service{Config: config, bodies: door.Bodies{Room: door.NewRoom(config.MaxBodiesBytes), Grace: cmp.Or(config.BodyGrace, door.DefaultBodyGrace)}}
	mux := http.NewServeMux()
	humaConfig := huma.DefaultConfig("dlqd", Version)
	humaConfig.CreateHooks = nil // no $schema links in answers
	humaConfig.DocsPath = ""     // registered below, without resources of other sites
	humaConfig.SchemasPath = ""
	humaConfig.Formats = map[string]huma.Format{"application/json": jsonFormat(), "json": jsonFormat()}
	humaConfig.RejectUnknownQueryParameters = true // a mistyped filter must not choose everything
	humaConfig.Info.Description = "A dead-letter office for Postgres: submit messages, see what became of them, and bring dead letters back."
	humaConfig.Info.License = &huma.License{Name: "MIT", Identifier: "MIT"}
	humaConfig.Servers = []*huma.Server{{URL: "/", Description: "The dlqd that serves this document"}}
	humaConfig.Tags = []*huma.Tag{
		{Name: messagesTag, Description: "Submit messages, and follow them."},
		{Name: "dead letters", Description: "See and steer jobs that ended as failures."},
		{Name: "failure groups", Description: "Dead letters of a queue that failed for the same reason: who looks after them, and what is known of them."},
		{Name: "saved views", Description: "Lists of dead letters that people come back to."},
		{Name: "automatic redelivery", Description: "For what dlqd redelivers by itself, and what it only observes."},
		{Name: "capture", Description: "How failures become dead letters, and what was missed."},
		{Name: "replay runs", Description: "Send many dead letters back, at a pace, and see how it goes."},
		{Name: "analytics", Description: "What happens to dead letters over time, from rollups of the audit trail."},
		{Name: "approvals", Description: "What needs a second person."},
		{Name: "sessions", Description: "Who is signed in with a browser."},
		{Name: policyTag, Description: "The policy in force, and what it makes of an error."},
		{Name: "tokens", Description: "Keys to the API: make, list and revoke them."},
		{Name: "audit", Description: "Who did what, and erasure of somebody's data."},
		{Name: "queues", Description: "See queues, pause and resume them."},
		{Name: "circuit breakers", Description: "See and steer what keeps deliveries from a destination that is in trouble."},
		{Name: operationsTag, Description: "How the program is."},
	}
	api := humago.New(mux, humaConfig)
	observe := func(ctx huma.Context, next func(huma.Context)) { s.observe(api, ctx, next) }
	api.UseMiddleware(observe, s.authorize(api), s.refuseWhenIdle(api), refuseUnstorable(api), s.readBodies(api))
	s.registerMessages(api)
	s.registerEntries(api)
	s.registerReplays(api)
	s.registerBulk(api)
	s.registerUndo(api)
	s.registerGroups(api)
	s.registerViews(api)
	s.registerAnalytics(api)
	s.registerAudit(api)
	s.registerApprovals(api)
	s.registerQueues(api)
	s.registerAutomatic(api)
	s.registerRestored(api)
	s.registerCapture(api)
	s.registerReclassify(api)
	s.registerBreakers(api)
	s.registerOperations(api)
	s.registerLogLevel(api)
	s.registerAccess(api)
	s.registerTokens(api)
	s.registerPolicy(api)
	s.registerSessions(api)
	describeNeeds(api)

	mux.Handle("GET /metrics", config.Metrics.Handler())
	mux.HandleFunc("GET "+runbooksPath+"{name}", runbook)
	var pages http.Handler = notServed(mux)
	var failed func(http.ResponseWriter, *http.Request, int, string)
	if config.Console != nil {
		s.console = config.Console(mux, pages)
		pages, failed = s.console, s.console.SignInFailed
	}
	if config.Access != nil {
		(&access.SignIn{Access: config.Access, Ours: config.Door.Ours, Failed: failed}).Register(mux)
	}
	mux.Handle("/", pages)
	return s, mux, api
}

// panicDetail is what a client is sent after a panic. The panic's own text may be secret.
const panicDetail = "the request failed by a fault of this program; its log has the reason"

// recovered answers a request whose handler panics with a problem. If the answer has begun, it closes
// the connection instead, so that the client does not take the part that it has for the whole.
func (s *service) recovered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			p := recover()
			if p == nil {
				return
			}
			if p == http.ErrAbortHandler { //nolint:errorlint,err113 // as net/http compares it
				panic(p)
			}
			s.logPanic(r.Context(), r.URL.Path, background.Panicked(p))
			if hasBegun(w) {
				panic(http.ErrAbortHandler)
			}
			door.Problem(w, http.StatusInternalServerError, panicDetail)
		}()
		next.ServeHTTP(w, r)
	})
}

// attempt handles a request to an operation, and answers it with a problem if it panics before it
// answers. [service.recovered] would not do: the console calls operations without net/http, and a
// failed request is counted with its operation.
func (s *service) attempt(api huma.API, ctx huma.Context, next func(huma.Context)) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		_, w := humago.Unwrap(ctx)
		if p == http.ErrAbortHandler || ctx.Status() != 0 || hasBegun(w) { //nolint:errorlint,err113 // as above
			panic(p)
		}
		s.logPanic(ctx.Context(), ctx.Operation().Path, background.Panicked(p))
		_ = huma.WriteErr(api, ctx, http.StatusInternalServerError, panicDetail)
	}()
	next(ctx)
}

func (s *service) logPanic(ctx context.Context, path string, p *background.PanicError) {
	s.Logger.ErrorContext(ctx, "a request panicked", "path", path, "error", p.Value, "stack", p.Stack)
}

// observe counts, times and traces a request, and notifies the console of changes.
func (s *service) observe(api huma.API, ctx huma.Context, next func(huma.Context)) {
	start := time.Now()
	operation := ctx.Operation().OperationID
	remote := telemetry.Extract(ctx.Context(), ctx.Header("Traceparent"), tracestate(ctx))
	traced, span := s.Tracer.Start(remote, operation, trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	acts := ctx.Method() != http.MethodGet && !slices.Contains(unshownTags, ctx.Operation().Tags[0])
	traced = context.WithValue(traced, actsKey{}, &acts)
	s.attempt(api, huma.WithContext(ctx, deadletter.WithOrigin(traced, origin(ctx))), next)
	if s.console != nil && acts && ctx.Status() < http.StatusBadRequest {
		s.console.Acted(ctx.Operation().Tags[0])
	}
	if span.IsRecording() {
		span.SetAttributes(attribute.String("http.request.method", ctx.Method()), attribute.String("http.route", ctx.Operation().Path), attribute.Int("http.response.status_code", ctx.Status()))
		if ctx.Status() >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, "")
		}
	}
	s.Metrics.Requests.WithLabelValues(operation, strconv.Itoa(ctx.Status())).Inc()
	s.Metrics.RequestSeconds.WithLabelValues(operation).Observe(time.Since(start).Seconds())
}

type actsKey struct{}

// changesNothing notes that the request of ctx changes nothing although it is no GET: it is a dry run, a
// preview or an export. Open pages of the console are not rendered again for it.
func changesNothing(ctx context.Context) {
	if acts, ok := ctx.Value(actsKey{}).(*bool); ok {
		*acts = false
	}
}

// tracestate joins the values of all tracestate headers, of which a request may have several.
func tracestate(ctx huma.Context) string {
	r, _ := humago.Unwrap(ctx)
	return strings.Join(r.Header.Values("Tracestate"), ",")
}

// refuseWhenIdle answers 503 while Idle returns an error, except for operations about the program
// itself.
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

// maxAgent is how much of a User-Agent is kept, in bytes.
const maxAgent = 100

// origin returns where a request comes from, for the audit trail.
func origin(ctx huma.Context) string {
	host, _, err := net.SplitHostPort(ctx.RemoteAddr())
	if err != nil {
		host = "a local socket"
	}
	agent := ctx.Header("User-Agent")
	// The client must not close the bracket.
	if agent = strings.ToValidUTF8(agent[:min(len(agent), maxAgent)], "?"); agent != "" {
		agent = " (" + strings.NewReplacer("(", "[", ")", "]").Replace(agent) + ")"
	}
	return "API, from " + host + agent
}

// readBodies reads the bodies of requests, limited by MaxBodiesBytes.
func (s *service) readBodies(api huma.API) func(huma.Context, func(huma.Context)) {
	buffers := sync.Pool{New: func() any { return new(bytes.Buffer) }}
	return func(ctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(ctx)
		operation := ctx.Operation()
		if operation.RequestBody == nil || r.ContentLength == 0 {
			next(ctx)
			return
		}
		buffer, _ := buffers.Get().(*bytes.Buffer)
		defer func() {
			if buffer.Cap() <= maxPooledBuffer {
				buffer.Reset()
				buffers.Put(buffer)
			}
		}()
		done, err := s.bodies.Read(w, r, s.Door.Client(r), operation.MaxBodyBytes, buffer)
		defer done()
		switch {
		case err == nil:
			next(readContext{ctx, buffer})
		case errors.Is(err, door.ErrNoRoom):
			s.Metrics.Refused(door.RefusedBodies)
			if slices.Contains(operation.Tags, messagesTag) {
				s.count("", "overflow", 1)
			}
			ctx.SetHeader("Retry-After", retryAfterSeconds)
			_ = huma.WriteErr(api, ctx, http.StatusTooManyRequests, err.Error())
		case errors.Is(err, door.ErrSlow):
			s.Metrics.Refused(door.RefusedSlow)
			ctx.SetHeader("Connection", "close")
			_ = huma.WriteErr(api, ctx, http.StatusRequestTimeout, err.Error())
		default:
			_ = huma.WriteErr(api, ctx, http.StatusBadRequest, "the body did not come whole")
		}
	}
}

// maxPooledBuffer is the maximum size of a reused buffer, in bytes.
const maxPooledBuffer = 64 << 10

// humaContext allows embedding: a field named Context would hide the method.
type humaContext huma.Context

// readContext is the context of a request whose body is already read.
type readContext struct {
	humaContext

	body *bytes.Buffer
}

// BodyReader returns the body that was read.
func (c readContext) BodyReader() io.Reader { return c.body }

// SetReadDeadline does nothing: the body has arrived, and a deadline would end the request during
// the response.
func (c readContext) SetReadDeadline(time.Time) error { return nil }

// Unwrap implements the interface of humago.Unwrap.
func (c readContext) Unwrap() huma.Context { return c.humaContext }

// problem returns the response for an error. Errors that a client cannot fix are logged; the
// response does not repeat them.
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
		// Replace the SQL argument by the API's field.
		return huma.NewError(status, strings.ReplaceAll(move.Error(), "p_all => true", `"all": true`))
	case errors.Is(err, ingest.ErrNoMessage):
		return huma.Error404NotFound(err.Error() + "; it was never stored, or it ended longer ago than jobs are kept")
	case ctx.Err() != nil:
		return huma.NewError(statusClientClosedRequest, "the request was cancelled")
	}
	answer := databaseProblem(err)
	if answer.GetStatus() >= http.StatusInternalServerError {
		s.Logger.ErrorContext(ctx, "request failed", "error", err)
	}
	return answer
}

// statusClientClosedRequest is nginx's status for a client that disconnected. Only metrics use it.
const statusClientClosedRequest = 499

// example sets the example of an operation's response.
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

// describeBody documents the body of a registered operation whose handler decodes it itself. huma
// only knows that it is bytes.
func describeBody[T any](api huma.API, path, description string, value any) {
	schema := api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
	api.OpenAPI().Paths[path].Post.RequestBody = &huma.RequestBody{
		Description: description,
		Required:    true,
		Content:     map[string]*huma.MediaType{"application/json": {Schema: schema, Example: value}},
	}
}
