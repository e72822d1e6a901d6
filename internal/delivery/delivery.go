// Package delivery has the River client and worker that deliver messages to their destinations over HTTP and gRPC and
// classify the answers. It also holds messages that may not be sent yet, and releases these messages later.
package delivery

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	mathrand "math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/cause"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
)

const (
	// connectTimeout bounds connecting, so that an unreachable host does not use up the whole
	// timeout.
	connectTimeout = 5 * time.Second
	// maxExcerpt is the maximum number of bytes of an answer's body in the error.
	maxExcerpt = 2 << 10
	// maxRetryAfter is the longest time by which a Retry-After header can delay the next attempt. The error records the
	// value of the header, which the redelivery of the dead letter respects.
	maxRetryAfter = time.Hour
	// maxIdleConns limits the idle connections to a host. It is so large that every concurrent
	// delivery can reuse one.
	maxIdleConns = 10_000
	// recordTime is added to a delivery's timeout for recording the outcome.
	recordTime = 5 * time.Second
	// jitterShare is the largest share of its nominal length by which a backoff or a hold time is made shorter or longer.
	jitterShare = 0.2
	// maxPostponed is how often at most a redelivery is postponed because its destination asks for fewer requests. With
	// the default backoff, that takes a quarter of an hour. Then a progressive run is held, because outcomes are missing.
	maxPostponed = 10
	// LogicalFailureKey is the key in a job's metadata that marks a logical failure: a 2xx answer that reports a failure.
	LogicalFailureKey = "dlq:logical_failure"
	// postponedKey is the key of the number of times that a redelivery was postponed, because its destination asked for
	// fewer requests.
	postponedKey = "dlq:postponed"
	// placeKey is the key of the place of a redelivery in the pace of its replay run, for which the redelivery waits.
	placeKey = "dlq:place"
	// keepsPlace is how long the first attempt of a redelivery may wait for a worker and keep the place that its replay
	// run took for it, even if the run has become slower in the meantime.
	keepsPlace = time.Second
	// placeSlack is how long before its place a redelivery may be sent. The clock of this process may differ a little
	// from the clock of the database.
	placeSlack = 50 * time.Millisecond
	// missedPlace is how long after its place a redelivery may still be sent at once. Otherwise all whose places passed
	// while no process delivered would be sent together.
	missedPlace = 10 * time.Second
	// placeLook is the longest time for which a redelivery waits for its place before it looks again whether it needs
	// one: the run may have ended, or an operator may have changed its rate.
	placeLook = time.Minute
)

// Error types of deliveries without an answer, and of an answer that reports a logical failure.
const (
	TypeTimeout           = "TIMEOUT_ERROR"
	TypeConnectionRefused = "CONNECTION_REFUSED"
	TypeConnectionReset   = "CONNECTION_RESET"
	TypeConnection        = "CONNECTION_ERROR"
	TypeDNS               = "DNS_ERROR"
	TypeTLS               = "TLS_ERROR"
	TypeLogicalFailure    = "LOGICAL_FAILURE"
)

// Error types of messages that were not sent.
const (
	TypeRequest    = "REQUEST_ERROR"         // no request can be made from the message
	TypeDescriptor = "GRPC_DESCRIPTOR_ERROR" // the gRPC method's descriptor is not available
)

// Args are the args of a delivery's job: the message, and the Retry-After that Work passes to
// NextRetry.
type Args struct {
	message.Message

	retryAfter *time.Duration
}

// Outcomes of deliveries, in addition to the error classes.
const (
	OutcomeOK   = "ok"
	OutcomeHeld = "held" // postponed without spending an attempt
)

// Delivered describes how a delivery ended.
type Delivered struct {
	Queue       string
	Destination string        // empty if the delivery ended before its destination was known
	Outcome     string        // OutcomeOK, OutcomeHeld, or the class of the error
	Available   bool          // whether the destination was available, though it may have rejected the message
	Limited     bool          // whether the destination asked for fewer requests
	Run         uuid.UUID     // the replay run that sent the message; uuid.Nil for none
	Waited      time.Duration // from when the job was due until the attempt began
	Took        time.Duration
}

// Observer is called after each delivery, even if the message was only held.
type Observer func(Delivered)

// Config configures a [Worker].
type Config struct {
	Planner  func() *strategy.Planner // returns the planner of the current policy
	Breakers *breaker.Breakers
	DB       postgres.DB // renders schema names in queries
	// Publisher publishes the records of entries; nil without sources.
	Publisher source.Publisher
	Observe   Observer
	Tracer    trace.Tracer // nil: deliveries pass on the trace context of their message unchanged
	Logger    *slog.Logger
	// InDoubt, if not nil, reports whether another process may have rescued a job that this process runs or has run
	// within the given duration.
	InDoubt func(within time.Duration) bool
	// Holds, if not nil, reports whether a job created at the given time is held because the
	// database was restored.
	Holds func(createdAt time.Time) bool
}

// Worker delivers messages. It is a River worker for jobs of kind [message.JobKind].
type Worker struct {
	river.WorkerDefaults[Args]

	config    Config
	client    *http.Client
	calls     *http.Client // of gRPC methods
	reflected grpc.Reflected
}

// NewWorker returns a worker for the policy's queues.
func NewWorker(config Config) *Worker {
	config.Tracer = telemetry.Tracer(config.Tracer)
	transport := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   connectTimeout,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   maxIdleConns,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	return &Worker{config: config, calls: callsOver(grpc.Transport(transport)), client: &http.Client{
		Transport: transport,
		// A redirect to another host would send the payload to a host that is not in the policy. A redirect that turns the
		// POST into a GET would lose the payload.
		CheckRedirect: func(next *http.Request, via []*http.Request) error {
			if next.URL.Host != via[0].URL.Host || next.URL.Scheme != via[0].URL.Scheme || next.Method != http.MethodPost ||
				len(via) >= 3 {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}}
}

// Close closes idle connections.
func (w *Worker) Close() {
	w.client.CloseIdleConnections()
	w.calls.CloseIdleConnections()
}

// Timeout implements river.Worker. It returns the queue's timeout plus recordTime, or the policy's
// default timeout for an unknown queue.
func (w *Worker) Timeout(job *river.Job[Args]) time.Duration {
	p := w.config.Planner().Policy()
	if q := p.Queues[job.Queue]; q != nil {
		return q.Timeout + recordTime
	}
	return p.Defaults.Timeout
}

// NextRetry implements river.Worker. The delay is the queue's backoff or, if that is longer, the destination's
// Retry-After. A Retry-After of zero or in the past must not use up all attempts at once.
func (w *Worker) NextRetry(job *river.Job[Args]) time.Time {
	return time.Now().Add(w.retryDelay(job, job.Attempt))
}

// retryDelay returns the delay before the next attempt. attempt is the number of the failed attempt, from 1.
func (w *Worker) retryDelay(job *river.Job[Args], attempt int) time.Duration {
	p := w.config.Planner().Policy()
	backoff := p.Defaults.Backoff
	if q := p.Queues[job.Queue]; q != nil {
		backoff = q.Backoff
	}
	delay := Backoff(backoff, attempt, mathrand.Float64())
	if job.Args.retryAfter != nil {
		delay = max(delay, min(*job.Args.retryAfter, maxRetryAfter))
	}
	return delay
}

// isPostponed reports whether a redelivery whose destination asked for fewer requests is made again later instead of
// failing. A redelivery of a progressive run is made again, at most maxPostponed times, until the run or the group of
// the entry has ended. The run then sends less, and counts no outcome of the redelivery yet.
func (w *Worker) isPostponed(ctx context.Context, job *river.Job[Args], meta *metadata) bool {
	if meta.RunID == nil || meta.Postponed >= maxPostponed {
		return false
	}
	progressive, err := dbsqlc.New(w.config.DB).IsProgressive(ctx, dbsqlc.IsProgressiveParams{
		Run: *meta.RunID, Entry: meta.EntryID,
	})
	if err != nil {
		w.config.Logger.WarnContext(ctx, "a redelivery failed, because it is not known whether its replay run is progressive",
			"queue", job.Queue, "job", job.ID, "run", *meta.RunID, "error", err)
	}
	return progressive
}

// place is a place of a redelivery in the pace of its replay run.
type place struct {
	At    time.Time `json:"at"`    // the redelivery is sent at this time
	Taken time.Time `json:"taken"` // if the run became slower after this time, the place is lost
	// Late says that the redelivery missed an earlier place. It does not lose this one by being late, so that it is sent
	// even if each redelivery waits long for a worker.
	Late bool `json:"late,omitempty"`
}

// untilPlace returns how long a redelivery of a progressive run has to wait for its place in the pace of the run to the
// destination. The run took a place for the first attempt when it sent the entry. If that place is lost, and for every
// other attempt, untilPlace takes one. It returns 0 if the redelivery may be sent now.
func (w *Worker) untilPlace(ctx context.Context, job *river.Job[Args], meta *metadata, destination string,
	waited time.Duration,
) (time.Duration, error) {
	isFirst := meta.Place == nil && meta.Snoozes == 0 && job.Attempt <= 1
	if meta.RunID == nil || isFirst && waited < keepsPlace {
		return 0, nil
	}
	had := meta.Place
	if isFirst {
		had = &place{At: job.CreatedAt, Taken: job.CreatedAt}
	}
	isLate := had != nil && (had.Late || time.Since(had.At) > missedPlace)
	params := dbsqlc.RunPlaceParams{Run: *meta.RunID, Destination: destination}
	if had != nil && (had.Late || !isLate) {
		params.At, params.Taken = &had.At, &had.Taken
	}
	has, err := dbsqlc.New(w.config.DB).RunPlace(ctx, params)
	if err != nil {
		return 0, fmt.Errorf("take a place in the pace of replay run %s: %w", *meta.RunID, err)
	}
	wait := time.Duration(has.Wait * float64(time.Second))
	if wait > placeSlack {
		return min(wait, placeLook), river.MetadataSet(ctx, placeKey, place{has.PlaceAt, has.TakenAt, isLate})
	}
	if meta.Place == nil {
		return 0, nil
	}
	return 0, river.MetadataSet(ctx, placeKey, nil) // the next attempt needs another place
}

// Backoff returns the delay before the next attempt, varied at random by up to 20 %. An exponential backoff doubles
// with each attempt, up to 24 hours before the variation. attempt is the number of the failed attempt, from 1; random
// is in [0, 1).
func Backoff(b policy.Backoff, attempt int, random float64) time.Duration {
	const most = 24 * time.Hour
	nominal := float64(b.Delay)
	if b.Kind != policy.BackoffFixed {
		nominal = min(nominal*math.Pow(2, float64(max(attempt, 1)-1)), float64(most))
	}
	return time.Duration(nominal * (1 - jitterShare + 2*jitterShare*random))
}

// Work implements river.Worker.
func (w *Worker) Work(ctx context.Context, job *river.Job[Args]) error {
	start := time.Now()
	result := Delivered{Queue: job.Queue}
	if job.AttemptedAt != nil {
		result.Waited = max(job.AttemptedAt.Sub(job.ScheduledAt), 0)
	}
	meta := metadataOf(job)
	if meta.RunID != nil {
		result.Run = *meta.RunID
	}
	ctx, span := w.startSpan(ctx, job, &meta)
	var err error
	result.Outcome, err = w.work(ctx, job, &meta, &result)
	endSpan(span, result.Outcome, err)
	result.Took = time.Since(start)
	w.config.Logger.DebugContext(ctx, "delivery", "queue", job.Queue, "job", job.ID, "attempt", job.Attempt,
		"outcome", result.Outcome)
	w.config.Observe(result)
	return err
}

// work delivers or holds a message. It sets the destination of result, and whether the destination was available. It
// returns the outcome: OutcomeOK, OutcomeHeld or the class of the error. err tells River to retry, cancel or snooze the
// job; a held message is snoozed.
func (w *Worker) work(ctx context.Context, job *river.Job[Args], meta *metadata,
	result *Delivered,
) (outcome string, err error) {
	if w.config.Holds != nil && w.config.Holds(job.CreatedAt) {
		return hold(ctx, job, HeldForRestored, nil)
	}
	planner := w.config.Planner()
	queue := planner.Policy().Queues[job.Queue]
	if queue == nil {
		return w.classify(planner, job, &riverdlq.Error{
			Type: "UNKNOWN_QUEUE", Class: riverdlq.ClassUnknown, Message: fmt.Sprintf("the policy has no queue %q", job.Queue),
		})
	}
	ordered := queue.Ordering && job.Args.OrderingKey != ""
	if ordered {
		before, err := dbsqlc.New(w.config.DB).OrderPredecessor(ctx, dbsqlc.OrderPredecessorParams{
			Queue: job.Queue, Key: job.Args.OrderingKey, Job: job.ID, CreatedAt: job.CreatedAt,
		})
		if err != nil || before != 0 {
			return hold(ctx, job, HeldForOrder, err)
		}
	}
	destination, heldFor := queue.Destination, HeldForBreaker
	if meta.Destination != "" {
		destination, heldFor = meta.Destination, HeldForRedirected
	}
	target := planner.Policy().Destinations[destination]
	if target == nil {
		return w.classify(planner, job, &riverdlq.Error{
			Type: "UNKNOWN_DESTINATION", Class: riverdlq.ClassUnknown,
			Message: fmt.Sprintf("the policy has no destination %q", destination),
		})
	}
	result.Destination = destination
	if meta.Record && target.Source == nil && meta.Destination == "" {
		return w.classify(planner, job, requestError(target, fmt.Errorf("the record is not sent to %s: the policy has no "+
			"source with the queue %s any more. Put the source back, or replay it to a destination", destination, job.Queue)))
	}
	if w.inDoubt() {
		if current, err := w.isCurrentAttempt(ctx, job); err != nil || !current {
			return hold(ctx, job, heldFor, errors.Join(errAttemptLost, err))
		}
	}
	if wait, err := w.untilPlace(ctx, job, meta, destination, result.Waited); err != nil || wait > 0 {
		return OutcomeHeld, errors.Join(river.JobSnooze(cmp.Or(wait, time.Second)), err)
	}
	// The releaser takes a place for each message that it releases, and removes HeldKey. A message that still has HeldKey
	// was not released but became due, so it has no place yet. A redelivery at its first attempt has no place either.
	if meta.Held != "" || meta.EntryID != nil && meta.Snoozes == 0 {
		if !w.config.Breakers.TakePlace(destination) {
			return hold(ctx, job, heldFor, nil)
		}
	}
	permit, err := w.config.Breakers.Allow(ctx, destination, w.Timeout(job))
	if err != nil || permit == nil {
		return hold(ctx, job, heldFor, err)
	}
	err = w.deliver(ctx, &planner.Policy().Data, target, queue, job, meta)
	// The breaker does not count a delivery that a stop or a cancellation cut off, nor a message that was not sent:
	// neither shows whether the destination is available.
	unknown := isStopped(ctx) || isUnsent(err)
	result.Available = isAvailable(err) || unknown
	result.Limited = isLimited(err, result.Available)
	if !unknown {
		permit.Done(ctx, result.Available)
	}
	if err != nil {
		outcome, failure := w.classify(planner, job, err)
		// The rules end what another attempt cannot help: a quota that is used up, for example.
		_, ends := errors.AsType[*river.JobCancelError](failure)
		if result.Limited && !ends && w.isPostponed(ctx, job, meta) {
			times := meta.Postponed + 1
			return outcome, errors.Join(river.JobSnooze(w.retryDelay(job, times)), river.MetadataSet(ctx, postponedKey, times))
		}
		return outcome, failure
	}
	if ordered {
		return OutcomeOK, w.completeOrdered(ctx, job)
	}
	return OutcomeOK, nil
}

// completeOrdered completes the job of a delivered ordered message and releases the next message of the ordering key.
// If the query fails, the delivery still succeeds: River completes the job, and the next message is checked again after
// its hold time. If another process has rescued the job, completeOrdered returns a snooze.
func (w *Worker) completeOrdered(ctx context.Context, job *river.Job[Args]) error {
	completed, err := dbsqlc.New(w.config.DB).CompleteOrdered(ctx, dbsqlc.CompleteOrderedParams{
		Queue: job.Queue, Key: job.Args.OrderingKey, Job: job.ID, CreatedAt: job.CreatedAt, Attempt: int32(job.Attempt),
	})
	switch {
	case err != nil:
		w.config.Logger.WarnContext(ctx, "delivered, but releasing the next message of its ordering key failed; that "+
			"message checks again later", "queue", job.Queue, "job", job.ID, "error", err)
	case !completed: // another process runs the job's current attempt
		w.config.Logger.WarnContext(ctx, "delivered, but another process had rescued the job; the receiver gets the "+
			"message again",
			"queue", job.Queue, "job", job.ID)
		// Unlike a success, a snooze records its attempt: see attemptOf.
		return river.JobSnooze(time.Second)
	}
	return nil
}

// classify classifies the error of a delivery by the policy's rules, and cancels the job if another attempt cannot
// help. If the error is not a [riverdlq.Error], its class is unknown and the job is not cancelled.
func (w *Worker) classify(planner *strategy.Planner, job *river.Job[Args], err error) (outcome string, _ error) {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return string(riverdlq.ClassUnknown), err
	}
	class, _, rule := planner.Classify(factsOf(structured, job))
	if planner.Ends(class, rule) {
		err = river.JobCancel(err)
	}
	return string(class), err
}

// factsOf returns the facts of a failure that rules match.
func factsOf(failure *riverdlq.Error, job *river.Job[Args]) strategy.Facts {
	details, err := json.Marshal(failure.Context)
	if err != nil {
		details = nil // without a context, no rule with a condition on the context applies
	}
	return strategy.Facts{
		Type: failure.Type, Code: failure.Code, Title: failure.Title, Message: failure.Message,
		Class: failure.Class, Context: details,
		Kind: job.Args.EventKind, Queue: job.Queue, Source: job.Args.Source,
		Payload: job.Args.Payload, Headers: job.Args.Headers,
	}
}

// isAvailable reports whether a delivery's result shows that its destination is available: the
// destination answered, and the answer is not a transient failure or an outage.
func isAvailable(err error) bool {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return err == nil
	}
	if status, called := structured.Context["grpcStatus"].(string); called {
		return !slices.Contains(unavailable, status)
	}
	if structured.Context[contextTopic] != nil { // the cluster refused the record, or there was no answer
		return !slices.Contains([]riverdlq.Class{"", riverdlq.ClassTransient, riverdlq.ClassOutage}, structured.Class)
	}
	status, answered := structured.Context["status"].(int)
	if status == http.StatusLocked || status == http.StatusTooEarly {
		return true // only this one request is the problem
	}
	class := strategy.ClassifyStatus(status)
	return answered && class != riverdlq.ClassTransient && class != riverdlq.ClassOutage
}

// isLimited reports whether a destination asked for fewer requests: it answered 429 or RESOURCE_EXHAUSTED, or it was
// not available and said after which time to try again (Retry-After, RetryInfo).
func isLimited(err error, available bool) bool {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return false
	}
	return structured.Context["status"] == http.StatusTooManyRequests ||
		structured.Context["grpcStatus"] == "RESOURCE_EXHAUSTED" ||
		structured.Context["retryAfterSeconds"] != nil && !available
}

// isUnsent reports whether a message was not sent.
func isUnsent(err error) bool {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	return ok && (structured.Type == TypeRequest || structured.Type == TypeDescriptor)
}

func (w *Worker) deliver(
	ctx context.Context, data *policy.Data, destination *policy.Destination, queue *policy.Queue, job *river.Job[Args],
	meta *metadata,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, queue.Timeout)
	defer cancel()
	ctx, span := w.config.Tracer.Start(ctx, http.MethodPost, trace.WithSpanKind(trace.SpanKindClient))
	status := 0
	defer func() { endRequestSpan(span, destination, status, err) }()
	exchange := w.post
	switch {
	case destination.Source != nil:
		exchange = w.publish
	case grpc.IsURL(destination.URL):
		exchange = w.call
	}
	status, err = exchange(ctx, queue, destination, job, meta, newMasker(data, destination, job))
	return err
}

// post sends a message over HTTP. It returns the HTTP status of the answer, or 0 if there was no answer.
func (w *Worker) post(ctx context.Context, queue *policy.Queue, destination *policy.Destination,
	job *river.Job[Args], meta *metadata, hide func(string) string,
) (status int, err error) {
	request, err := newRequest(ctx, destination, destination.URL, job.Args.Body(), job, meta)
	if err != nil {
		return 0, requestError(destination, err)
	}
	response, err := w.client.Do(request)
	if err != nil {
		return 0, transportError(ctx, destination, err, hide)
	}
	defer func() { _ = response.Body.Close() }()
	reportVersion(ctx, meta, response.Header.Get(versionHeader))
	if response.StatusCode < http.StatusOK { // 101: the receiver may keep the connection open without end
		return response.StatusCode, answerError(destination, response, nil, hide)
	}
	return response.StatusCode, w.judge(ctx, queue, destination, job, response, hide)
}

// versionHeader is the header of an answer in which a receiver may report its version.
const versionHeader = "Dlqd-Version"

// reportVersion records in the job's metadata the version that a receiver reported, as riverdlq records the version of
// a worker. It ignores the version of a receiver to which an operator redirected the message, because that receiver is
// not the queue's destination. It also ignores a value that does not have the form of a version.
func reportVersion(ctx context.Context, meta *metadata, reported string) {
	if meta.Destination == "" && deadletter.IsVersion(reported) {
		_ = river.MetadataSet(ctx, riverdlq.VersionKey, reported) // fails only outside of a worker
	}
}

// requestError returns the error of a message that cannot be turned into a request.
func requestError(destination *policy.Destination, err error) error {
	return &riverdlq.Error{
		Type: TypeRequest, Class: riverdlq.ClassMalformed, Message: destination.Hide(redact.Text(err.Error())),
	}
}

// judge returns the error of an HTTP answer, or nil for a success (see success). It reads at most cause.MaxBytes of the
// body, and keeps the answer's Retry-After for the next attempt.
func (w *Worker) judge(ctx context.Context, queue *policy.Queue, destination *policy.Destination,
	job *river.Job[Args], response *http.Response, hide func(string) string,
) error {
	body, err := io.ReadAll(io.LimitReader(response.Body, cause.MaxBytes))
	switch success := response.StatusCode <= 299; {
	case err != nil && (success || isStopped(ctx)):
		return transportError(ctx, destination, err, hide)
	case success:
		return w.success(ctx, job, queue, destination, response, body, hide)
	}
	// If the body was cut off, the failure has the status and the part of the body that arrived.
	failure := answerError(destination, response, body, hide)
	if after, ok := retryAfter(response.Header.Get("Retry-After"), time.Now()); ok {
		job.Args.retryAfter = &after
		failure.Context["retryAfterSeconds"] = int(after.Seconds())
	}
	return failure
}

// metadata is the part of a job's metadata that deliveries read.
type metadata struct {
	Parent  string     `json:"traceparent"`
	State   string     `json:"tracestate"`
	EntryID *uuid.UUID `json:"dlq:entry_id"`
	RunID   *uuid.UUID `json:"dlq:run_id"` // the replay run that made this redelivery
	Replay  int        `json:"dlq:replay"` // the number of this redelivery of the entry, from 1
	Trace   string     `json:"dlq:trace"`  // traceparent and tracestate of the request that asked for the replay
	Snoozes int        `json:"snoozes"`    // the number of snoozes, which River counts
	Held    string     `json:"dlq:held"`   // HeldKey
	Place   *place     `json:"dlq:place"`  // placeKey

	Postponed int `json:"dlq:postponed"` // postponedKey

	// Record says that the entry was made from a record of a source. The redelivery publishes the record.
	Record bool `json:"dlq:record"`
	// Destination is where an operator sent this redelivery, or "" for the queue's destination.
	Destination string `json:"dlq:destination"`
}

func metadataOf(job *river.Job[Args]) metadata {
	var m metadata
	// Any client of River can write metadata. Fields that cannot be decoded stay empty.
	_ = json.Unmarshal(job.Metadata, &m)
	return m
}

// newRequest returns the POST request with body: the payload, or an encoded gRPC request. Its headers let a receiver
// recognize a repeated message (Webhook-Id), see the attempt, verify the signature and continue the trace. They replace
// headers of the message with the same names. newRequest fails if the URL is invalid or the signer returns an error.
func newRequest(ctx context.Context, destination *policy.Destination, address string, body []byte,
	job *river.Job[Args], meta *metadata,
) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for name, value := range job.Args.Headers {
		request.Header.Set(name, value)
	}
	now := time.Now()
	set := request.Header.Set
	set("Content-Type", "application/json")
	set("User-Agent", "dlqd")
	set("Webhook-Id", job.Args.MessageID)
	set("Webhook-Timestamp", strconv.FormatInt(now.Unix(), 10))
	set("Dlqd-Attempt", strconv.Itoa(job.Attempt))
	set("Dlqd-Kind", job.Args.EventKind)
	set("Dlqd-Queue", job.Queue)
	if meta.EntryID != nil {
		set("Dlqd-Entry-Id", meta.EntryID.String())
		if meta.Replay > 0 {
			set("Dlqd-Replay", strconv.Itoa(meta.Replay))
		}
	}
	if meta.RunID != nil {
		set("Dlqd-Run-Id", meta.RunID.String())
	}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(request.Header))
	if sign := destination.Signer(); sign != nil {
		signature, err := sign(job.Args.MessageID, now, body)
		if err != nil {
			return nil, err
		}
		set("Webhook-Signature", signature)
	}
	return request, nil
}

// newMasker returns a function that masks sensitive values and the destination's secrets in a text, because many
// receivers repeat the message and the URL in their answer. The function decodes the message only at its first call, so
// that successful deliveries do not spend time on it.
func newMasker(data *policy.Data, destination *policy.Destination, job *river.Job[Args]) func(text string) string {
	mask := sync.OnceValue(func() func(string) string {
		return data.Mask(func() map[string]any { return eventOf(job) })
	})
	return func(text string) string { return mask()(destination.Hide(text)) }
}

// eventOf returns the parts of a job to which the policy's sensitive paths refer.
func eventOf(job *river.Job[Args]) map[string]any {
	event := map[string]any{}
	for root, raw := range map[string]json.RawMessage{"payload": job.Args.Body(), "metadata": job.Args.Metadata} {
		decoder := json.NewDecoder(bytes.NewReader(raw))
		decoder.UseNumber()
		var value any
		_ = decoder.Decode(&value) // the JSON was validated at submission
		event[root] = value
	}
	headers := map[string]any{}
	for name, value := range job.Args.Headers {
		headers[name] = value
	}
	event["headers"] = headers
	return event
}

// success handles a 2xx answer. If the answer reports a logical failure ("success": false), success returns an error if
// the queue has DeadLetterLogicalFailures. Otherwise it records the logical failure in the job's metadata.
func (w *Worker) success(
	ctx context.Context, job *river.Job[Args], queue *policy.Queue, destination *policy.Destination,
	response *http.Response, body []byte, hide func(string) string,
) error {
	var answer struct {
		Success *bool `json:"success"`
	}
	_ = json.Unmarshal(body, &answer) // an answer that is not JSON counts as a success
	if answer.Success == nil || *answer.Success {
		return nil
	}
	status := response.StatusCode
	if queue.DeadLetterLogicalFailures {
		failure := answerError(destination, response, body, hide)
		failure.Type, failure.Class = TypeLogicalFailure, riverdlq.ClassBusiness
		failure.Message = "the receiver answered success: false" + strings.TrimPrefix(failure.Message, statusLine(status))
		return failure
	}
	return river.MetadataSet(ctx, LogicalFailureKey, map[string]any{
		"at": time.Now().UTC().Format(time.RFC3339Nano), "attempt": job.Attempt, "status": status,
		"body": excerpt(hide(string(body))),
	})
}

// statusLine returns the beginning of a failure's message.
func statusLine(status int) string {
	return strings.TrimSpace(fmt.Sprintf("%d %s", status, http.StatusText(status)))
}

// answerError returns the error of an answer that is not a success, with the type, code, class and text that the answer
// states. The context has the status, and the headers and the body without masked values.
func answerError(
	destination *policy.Destination, response *http.Response, body []byte, hide func(string) string,
) *riverdlq.Error {
	status := response.StatusCode
	answer := cause.Answer{
		Status: status, ContentType: response.Header.Get("Content-Type"),
		Type: response.Header.Get("X-Error-Type"), Code: response.Header.Get("X-Error-Code"),
		Body: body, Paths: cause.Paths(destination.ErrorPaths), Hide: hide,
	}
	found := answer.Cause()
	failure := &riverdlq.Error{
		Type:    cmp.Or(found.Type, "HTTP_"+strconv.Itoa(status)),
		Code:    cmp.Or(found.Code, strconv.Itoa(status)),
		Title:   found.Title,
		Message: statusLine(status),
		Context: map[string]any{"status": status, "destination": destination.Name, "url": destination.ShownURL()},
	}
	if text := found.String(); text != "" {
		failure.Message += ": " + text
	}
	if class := riverdlq.Class(response.Header.Get("X-Error-Class")); slices.Contains(riverdlq.Classes(), class) {
		failure.Class = class
	}
	mediaType, _, err := mime.ParseMediaType(answer.ContentType)
	hidden := hide(string(body))
	if headers := shownHeaders(response.Header, hide); len(headers) > 0 {
		failure.Context["headers"] = headers
	}
	if err == nil && mediaType == "application/problem+json" && json.Valid([]byte(hidden)) {
		failure.Context["problem"] = json.RawMessage(hidden)
	} else {
		failure.Context["body"] = excerpt(hidden)
	}
	return failure
}

// maxHeader limits the value of an answer's header that an entry stores, in bytes.
const maxHeader = 200

// shownHeaders returns the headers of an answer that help to find its cause, masked and truncated to maxHeader. Other
// headers may be secret (Set-Cookie).
func shownHeaders(of http.Header, hide func(string) string) map[string]string {
	shown := map[string]string{}
	for _, name := range []string{
		"Content-Type", "Retry-After", "Server", "Via", "X-Request-Id", "Request-Id", "X-Correlation-Id", "Allow",
	} {
		if value := excerpt(hide(of.Get(name))); value != "" {
			shown[name] = strings.ToValidUTF8(value[:min(len(value), maxHeader)], "")
		}
	}
	return shown
}

// isStopped reports whether the delivery was cut off because the process is stopping or an operator
// cancelled the job.
func isStopped(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded)
}

// transportError returns the error of a delivery without a complete answer, or err unchanged if the delivery was
// stopped.
func transportError(
	ctx context.Context, destination *policy.Destination, err error, hide func(string) string,
) error {
	if isStopped(ctx) {
		return err // River records the reason
	}
	failure := &riverdlq.Error{
		Type: TypeConnection, Err: err,
		Context: map[string]any{"destination": destination.Name, "url": destination.ShownURL()},
	}
	var timeout interface{ Timeout() bool }
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns):
		failure.Type = TypeDNS
	case errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout():
		failure.Type = TypeTimeout
	case errors.Is(err, syscall.ECONNREFUSED):
		failure.Type = TypeConnectionRefused
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
		failure.Type = TypeConnectionReset
	case strings.Contains(err.Error(), "tls:") || strings.Contains(err.Error(), "x509:"):
		failure.Type = TypeTLS
	}
	if outer, ok := errors.AsType[*url.Error](err); ok {
		err = outer.Err // the text of err repeats the URL, which may contain a password
	}
	failure.Message = hide(err.Error()) // the text may quote an answer that is not HTTP
	return failure
}

// retryAfter parses a Retry-After header (RFC 9110, 10.2.3), which has seconds or a date. It returns false if there is
// none or it is invalid.
func retryAfter(value string, now time.Time) (time.Duration, bool) {
	if value == "" {
		return 0, false
	}
	if seconds, err := strconv.Atoi(value); err == nil && seconds >= 0 {
		return time.Duration(min(seconds, int(math.MaxInt64/time.Second))) * time.Second, true
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0, false
	}
	return max(at.Sub(now), 0), true
}

// excerpt returns the beginning of an answer as text that jsonb can store.
func excerpt(body string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(body[:min(len(body), maxExcerpt)], "\uFFFD"), "\x00", "\uFFFD")
}
