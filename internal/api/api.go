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
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/replica"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/worker"
)

// DefaultMaxBodyBytes is the default maximum size of a message.
const DefaultMaxBodyBytes = 1 << 20

// DefaultMaxBodiesBytes is the default limit of the total size of all request bodies that are being read or answered.
// If four batches of maximum size are larger, the default is their size, because one client may use only half of the
// limit.
const DefaultMaxBodiesBytes = 256 << 20

// maxBatchBodies is the maximum size of a batch, as a number of messages of maximum size.
const maxBatchBodies = 16

// messagesTag is the tag of operations on messages.
const messagesTag = "messages"

// operationsTag is the tag of operations that examine the program.
const operationsTag = "operations"

// policyTag is the tag of operations that show and try policies.
const policyTag = "policy"

// tagsWithoutPages are the tags of operations that do not change the console's pages. The console ignores messages,
// which arrive all the time; the other operations only examine or try something.
var tagsWithoutPages = []string{messagesTag, operationsTag, policyTag}

// documentVersion is the major version of dlqd. It changes only with a change that breaks clients of the API. The
// document does not contain the program's version, so that every build of a commit has the same document.
const documentVersion = "0"

// Part is the health of one part of the program.
type Part struct {
	Name   string `json:"name" doc:"Name of the component." example:"database"`
	OK     bool   `json:"ok" doc:"Whether the component works."`
	Detail string `json:"detail,omitempty" doc:"Details."`
	// LastSuccess is nil for parts that are not loops, and for loops before their first successful run.
	LastSuccess *time.Time `json:"lastSuccess,omitempty" doc:"When the last run in this process succeeded, if the component is a loop; absent before the first success."`
}

// QueueHealth reports whether a queue's dead letters are within its limits.
type QueueHealth struct {
	Queue         string   `json:"queue" doc:"The queue." example:"payment-processing"`
	Status        string   `json:"status" enum:"up,down" doc:"down: a limit of monitoring.yaml is exceeded."`
	Reasons       []string `json:"reasons" doc:"Exceeded limits, with value and limit." example:"[\"size 127 exceeds 100\"]"`
	Warnings      []string `json:"warnings" doc:"Limits that are at least 80 % used."`
	Open          int64    `json:"open" doc:"Open dead letters." example:"127"`
	OldestSeconds float64  `json:"oldestSeconds" doc:"Age of the oldest open dead letter; 0 if there is none."`
	MaxOpen       int64    `json:"maxOpen" doc:"Maximum number of open dead letters." example:"100"`
	MaxAgeSeconds float64  `json:"maxAgeSeconds" doc:"Maximum age of an open dead letter."`
}

// Config configures the API.
type Config struct {
	Ingester  *ingest.Ingester
	Store     *deadletter.Store
	Analytics *analytics.Store
	Archive   *archive.Archive         // nil: no archive
	Planner   func() *strategy.Planner // returns the planner of the policy in force
	// Draft returns the planner of a policy in which text replaces one of the files. DraftFiles lists the files that can
	// be replaced.
	Draft        func(file, text string) (*strategy.Planner, error)
	DraftFiles   []string
	Parked       func([]worker.Parked) // called with the entries that a reclassification parked; nil: not called
	Breakers     *breaker.Breakers
	Sources      *source.Store
	OffsetAt     OffsetAt // nil if this process reads no sources
	Replayer     *replay.Replayer
	Approvals    *approval.Store
	Groups       *group.Store
	River        *river.Client[pgx.Tx] // lists and pauses queues, cancels and retries jobs; this client works no jobs
	Access       *access.Authenticator // nil: no authentication
	Replica      *replica.Replica      // nil: every operation reads from the primary
	Metrics      *metrics.Metrics
	Tracer       trace.Tracer // nil: requests are not traced
	Logger       *slog.Logger
	MaxBodyBytes int64 // of one message; 0 means DefaultMaxBodyBytes
	// MaxBodiesBytes bounds the total size of all bodies at a time; 0 means DefaultMaxBodiesBytes.
	MaxBodiesBytes int64
	// BodyGrace is how long a body may take in addition to the time that it takes at door.MinBodyRate; 0 means
	// door.DefaultBodyGrace.
	BodyGrace time.Duration
	// Door configures which requests are let in. A body uses the quota of the client that Door.Client returns. If
	// Door.Client is nil, the client is the authenticated caller or, without authentication, the peer. New sets
	// Door.Refused.
	Door door.Config
	// WriteTimeout is how long a client may leave part of a response unread; 0 means
	// DefaultWriteTimeout.
	WriteTimeout time.Duration
	// Health returns the health of each part of the program.
	//
	// Queues returns the health of each queue, or nil if the database does not answer.
	//
	// Ready returns an error if this process should get no requests. It does not query the database.
	//
	// Reach returns an error if the database does not answer.
	//
	// Idle may be nil. While Idle returns an error, all operations are refused with that error, except operations that
	// examine the program.
	Health func(ctx context.Context) []Part
	Queues func(ctx context.Context) []QueueHealth
	Ready  func() error
	Reach  func(ctx context.Context) error
	Idle   func() error
	// StatusOnly serves only statusPaths.
	StatusOnly bool
	// LogLevel is the log level of this process; nil if it cannot be changed.
	LogLevel *slog.LevelVar
	// Examine runs the checks of "dlqd doctor".
	Examine func(ctx context.Context) []doctor.Finding
	// Console returns the handler of the console's pages, which calls the API's operations and answers unknown paths with
	// notFound. Nil means that there are no pages.
	Console func(operations, notFound http.Handler) Console
}

// Console serves dlqd's pages.
type Console interface {
	http.Handler

	// SignInFailed answers a browser whose sign-in failed.
	SignInFailed(w http.ResponseWriter, r *http.Request, status int, why string)
	// Unavailable answers a browser whose request for a page, or whose form, dlqd did not handle.
	Unavailable(w http.ResponseWriter, r *http.Request, status int, why string)
	// Changed is called after an operation that may have changed what pages show, with the operation's tag.
	Changed(tag string)
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
	config.Door.TooMany = func(w http.ResponseWriter, r *http.Request, detail string) {
		s.unavailable(w, r, http.StatusTooManyRequests, detail)
	}
	var served http.Handler = mux
	if config.StatusOnly {
		served = statusOnly(mux)
	}
	served = s.recoverPanics(door.Guard(config.Door, s.signIn(door.Limit(config.Door, served))))
	return withWriteTimeout(served, cmp.Or(config.WriteTimeout, DefaultWriteTimeout))
}

// statusPaths are the paths that a process serves without the API.
var statusPaths = []string{"/metrics", "/livez", "/readyz", "/api/health", "/api/log-level"}

func statusOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(statusPaths, r.URL.Path) {
			door.Problem(w, http.StatusNotFound, "this dlqd runs without --api and serves only "+strings.Join(statusPaths, ", "))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// client returns a name for the client of a request, to which limits apply: the authenticated caller or, without
// authentication, the peer.
func client(r *http.Request) string {
	if p := access.From(r.Context()); p.Name != "" {
		return p.Via + " " + p.Name
	}
	return door.Peer(r)
}

// OpenAPI returns the API's description as JSON.
func OpenAPI() ([]byte, error) { return describe().MarshalJSON() }

// OpenAPIYAML returns the API's description as YAML. It takes three times as long as [OpenAPI].
func OpenAPIYAML() ([]byte, error) { return describe().YAML() }

func describe() *huma.OpenAPI {
	_, _, api := build(Config{Metrics: metrics.New(), Logger: slog.New(slog.DiscardHandler)})
	return api.OpenAPI()
}

func build(config Config) (*service, *http.ServeMux, huma.API) {
	config.MaxBodyBytes = cmp.Or(config.MaxBodyBytes, DefaultMaxBodyBytes)
	config.MaxBodiesBytes = cmp.Or(config.MaxBodiesBytes, max(DefaultMaxBodiesBytes, 4*maxBatchBodies*config.MaxBodyBytes))
	config.Tracer = telemetry.Tracer(config.Tracer)
	s := &service{Config: config, bodies: door.Bodies{
		Quota: door.NewQuota(config.MaxBodiesBytes), Grace: cmp.Or(config.BodyGrace, door.DefaultBodyGrace),
	}}
	mux := http.NewServeMux()
	humaConfig := huma.DefaultConfig("dlqd", documentVersion)
	humaConfig.CreateHooks = nil // no $schema links in answers
	humaConfig.DocsPath = ""     // registered below, without resources of other sites
	humaConfig.SchemasPath = ""
	humaConfig.Formats = map[string]huma.Format{"application/json": jsonFormat(), "json": jsonFormat()}
	humaConfig.RejectUnknownQueryParameters = true // a filter with a misspelt parameter must not select everything
	humaConfig.Info.Description = "A dead-letter office for Postgres. Submit messages, follow their delivery, and " +
		"inspect, edit and replay dead letters."
	humaConfig.Info.License = &huma.License{Name: "MIT", Identifier: "MIT"}
	humaConfig.Servers = []*huma.Server{{URL: "/", Description: "The dlqd that serves this document"}}
	humaConfig.Tags = []*huma.Tag{
		{Name: messagesTag, Description: "Submit messages and look up their state."},
		{Name: "dead letters", Description: "Find, inspect, replay and close the entries of jobs that failed for good."},
		{Name: reviewTag, Description: "Dead letters handed out to operators for a decision."},
		{Name: "failure groups", Description: "Dead letters of a queue with the same cause, with the owner, note and state " +
			"of the group."},
		{Name: "saved views", Description: "Saved filters of dead letters."},
		{Name: "automatic redelivery", Description: "Which dead letters dlqd redelivers automatically, and which it only " +
			"observes."},
		{Name: "capture", Description: "How failures become dead letters, and which failures capture missed."},
		{Name: "replay runs", Description: "Replay many dead letters at a limited rate, and follow the progress."},
		{Name: "analytics", Description: "Dead letters over time, from rollups of the audit trail."},
		{Name: "approvals", Description: "Operations that need the approval of a second person."},
		{Name: "sessions", Description: "Browser sessions."},
		{Name: policyTag, Description: "The policy in force, and how it classifies an error."},
		{Name: "tokens", Description: "API tokens: create, list and revoke them."},
		{Name: "audit", Description: "The audit trail, and erasure of personal data."},
		{Name: "queues", Description: "List, pause and resume queues."},
		{Name: "jobs", Description: "River's jobs: messages, and jobs of applications, that are no dead letters yet or any more."},
		{Name: "circuit breakers", Description: "Breakers that stop deliveries to a failing destination."},
		{Name: "sources", Description: "Topics whose dead letters dlqd reads."},
		{Name: operationsTag, Description: "Health and settings of dlqd itself."},
	}
	api := humago.New(mux, humaConfig)
	observe := func(ctx huma.Context, next func(huma.Context)) { s.observe(api, ctx, next) }
	api.UseMiddleware(observe, s.authorize(api), s.refuseWhenIdle(api), refuseUnstorable(api), joinLists(api),
		s.readBodies(api), s.submitDirectly(api))
	s.registerMessages(api)
	s.registerEntries(api)
	s.registerReview(api)
	s.registerReplays(api)
	s.registerBulk(api)
	s.registerUndo(api)
	s.registerGroups(api)
	s.registerViews(api)
	s.registerAnalytics(api)
	s.registerAudit(api)
	s.registerQueues(api)
	s.registerJobs(api)
	s.registerApprovals(api) // after the operations that may need approval
	s.registerAutomatic(api)
	s.registerRestored(api)
	s.registerCapture(api)
	s.registerReclassify(api)
	s.registerBreakers(api)
	s.registerSources(api)
	s.registerOperations(api)
	s.registerLogLevel(api)
	s.registerAccess(api)
	s.registerTokens(api)
	s.registerPolicy(api)
	s.registerSessions(api)
	describeNeeds(api)
	describeReads(api)
	describeStrategies(api.OpenAPI().Components.Schemas)

	mux.Handle("GET /metrics", config.Metrics.Handler())
	mux.HandleFunc("GET "+runbooksPath+"{name}", runbook)
	var pages http.Handler = notFound(mux)
	var failed func(http.ResponseWriter, *http.Request, int, string)
	if config.Console != nil {
		s.console = config.Console(mux, pages)
		pages, failed = s.console, s.console.SignInFailed
	}
	if config.Access != nil {
		(&access.SignIn{Access: config.Access, IsOwnHost: config.Door.IsOwnHost, Failed: failed}).Register(mux)
	}
	mux.Handle("/", pages)
	return s, mux, api
}

// panicDetail is the detail of the problem that a client gets after a panic. The text of the panic may contain secrets.
const panicDetail = "internal error; dlqd's log has the cause"

// recoverPanics answers a request with a problem if the request's handler panics. If part of the answer was already
// sent, recoverPanics closes the connection instead, so that the client sees that the answer is incomplete.
func (s *service) recoverPanics(next http.Handler) http.Handler {
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

// handleOperation handles a request to an operation. If the operation panics before it answers, handleOperation answers
// with a problem. [service.recoverPanics] is not enough for two reasons: requests of the console do not pass through
// it, and it does not know the operation, by which failed requests are counted.
func (s *service) handleOperation(api huma.API, ctx huma.Context, next func(huma.Context)) {
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
	s.Logger.ErrorContext(ctx, "request panicked", "path", path, "error", p.Value, "stack", p.Stack)
}

// observe counts, times and traces a request, and notifies the console if the request may have changed its pages.
func (s *service) observe(api huma.API, ctx huma.Context, next func(huma.Context)) {
	start := time.Now()
	operation := ctx.Operation().OperationID
	remote := telemetry.Extract(ctx.Context(), ctx.Header("Traceparent"), tracestate(ctx))
	traced, span := s.Tracer.Start(remote, operation, trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	x := &exchange{operation: operation, setHeader: ctx.SetHeader}
	x.changes = ctx.Method() != http.MethodGet && !slices.Contains(tagsWithoutPages, ctx.Operation().Tags[0])
	traced = context.WithValue(traced, exchangeKey{}, x)
	s.handleOperation(api, huma.WithContext(ctx, deadletter.WithOrigin(traced, origin(ctx))), next)
	if s.console != nil && x.changes && ctx.Status() < http.StatusBadRequest {
		s.console.Changed(ctx.Operation().Tags[0])
	}
	if span.IsRecording() {
		span.SetAttributes(attribute.String("http.request.method", ctx.Method()),
			attribute.String("http.route", ctx.Operation().Path), attribute.Int("http.response.status_code", ctx.Status()))
		if ctx.Status() >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, "")
		}
	}
	s.Metrics.Requests.WithLabelValues(operation, strconv.Itoa(ctx.Status())).Inc()
	s.Metrics.RequestSeconds.WithLabelValues(operation).Observe(time.Since(start).Seconds())
}

// tracestate joins the values of all tracestate headers, of which a request may have several.
func tracestate(ctx huma.Context) string {
	r, _ := humago.Unwrap(ctx)
	return strings.Join(r.Header.Values("Tracestate"), ",")
}

// refuseWhenIdle answers 503 while Idle returns an error, except to operations that examine the program.
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

// maxAgent is the maximum number of bytes of a User-Agent in an origin. Browsers have their name at the end of a
// User-Agent.
const maxAgent = 200

var brackets = strings.NewReplacer("(", "[", ")", "]")

// origin returns where a request comes from, for the audit trail: the address and the User-Agent.
func origin(ctx huma.Context) string {
	host, _, err := net.SplitHostPort(ctx.RemoteAddr())
	if err != nil {
		host = "a local socket"
	}
	agent := ctx.Header("User-Agent")
	// Replace parentheses, so that a client cannot end the parenthesized User-Agent and add further text.
	if agent = strings.ToValidUTF8(agent[:min(len(agent), maxAgent)], "?"); agent != "" {
		agent = " (" + brackets.Replace(agent) + ")"
	}
	return "API, from " + host + agent
}

// readBodies reads the bodies of requests, within the limit MaxBodiesBytes. If it cannot read a body, it answers the
// request with 429 (no memory left), 408 (too slow) or 400 (incomplete).
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
		case errors.Is(err, door.ErrNoQuota):
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
			_ = huma.WriteErr(api, ctx, http.StatusBadRequest, "the request body is incomplete")
		}
	}
}

// maxPooledBuffer is the maximum size of a reused buffer, in bytes.
const maxPooledBuffer = 64 << 10

// humaContext is huma.Context under another name: an embedded field named Context would hide the method Context.
type humaContext huma.Context

// readContext is the context of a request whose body is already read.
type readContext struct {
	humaContext

	body *bytes.Buffer
}

// BodyReader returns the body that was already read.
func (c readContext) BodyReader() io.Reader { return c.body }

// SetReadDeadline does nothing. The body has already arrived, and a deadline would end the request during the response.
func (c readContext) SetReadDeadline(time.Time) error { return nil }

// Unwrap implements the interface of humago.Unwrap.
func (c readContext) Unwrap() huma.Context { return c.humaContext }

// joinLists lets clients repeat a list parameter (status=a&status=b). huma itself only accepts values separated by
// commas. joinLists refuses other parameters that occur twice, because huma would silently use the first.
func joinLists(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		url := ctx.URL()
		if url.RawQuery == "" {
			next(ctx)
			return
		}
		lists := listContext{humaContext: ctx, joined: map[string]string{}}
		query := url.Query()
		for _, p := range ctx.Operation().Parameters {
			switch values := query[p.Name]; {
			case p.In != "query" || len(values) < 2:
			case p.Schema.Type == huma.TypeArray:
				lists.joined[p.Name] = strings.Join(values, ",")
			default:
				_ = huma.WriteErr(api, ctx, http.StatusUnprocessableEntity, "validation failed", &huma.ErrorDetail{
					Location: "query." + p.Name, Message: "given " + strconv.Itoa(len(values)) + " times; it takes one value",
				})
				return
			}
		}
		if len(lists.joined) > 0 {
			ctx = lists
		}
		next(ctx)
	}
}

// listContext is the context of a request that repeats list parameters.
type listContext struct {
	humaContext

	joined map[string]string
}

// Query returns the value of a parameter. If the request repeats a list parameter, its values are joined by
// commas.
func (c listContext) Query(name string) string {
	if joined, ok := c.joined[name]; ok {
		return joined
	}
	return c.humaContext.Query(name)
}

// Unwrap implements the interface of humago.Unwrap.
func (c listContext) Unwrap() huma.Context { return c.humaContext }

// problem returns the response for an error. An error that the client cannot fix is logged, and the response does not
// contain its text.
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
		// The text of the error names an argument of SQL: name the field of the API instead.
		return huma.NewError(status, strings.ReplaceAll(move.Error(), "p_all => true", `"all": true`))
	case errors.Is(err, ingest.ErrNoMessage):
		return huma.Error404NotFound(err.Error() + "; it was never submitted, or River has deleted its job")
	case ctx.Err() != nil:
		return huma.NewError(statusClientClosedRequest, "the request was cancelled")
	}
	answer := databaseProblem(err)
	if answer.GetStatus() >= http.StatusInternalServerError && !postgres.StandbyFailed(ctx) { // else the primary answers
		s.Logger.ErrorContext(ctx, "request failed", "error", err)
	}
	return answer
}

// statusClientClosedRequest is nginx's status for a client that disconnected. Only metrics use it.
const statusClientClosedRequest = 499

// example sets the example of the response of an operation.
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

// describeBody documents the body of a registered operation whose handler decodes the body itself. huma only knows that
// the body consists of bytes.
func describeBody[T any](api huma.API, path, description string, value any) {
	schema := api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
	api.OpenAPI().Paths[path].Post.RequestBody = &huma.RequestBody{
		Description: description,
		Required:    true,
		Content:     map[string]*huma.MediaType{"application/json": {Schema: schema, Example: value}},
	}
}
