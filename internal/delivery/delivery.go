// Package delivery is the River worker that takes a message to its destination over HTTP, and says what the answer
// means.
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
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/riverdlq"
)

const (
	// connectTimeout bounds the connection alone, so that a host that is gone does not use up the whole timeout.
	connectTimeout = 5 * time.Second
	// maxExcerpt is how much of an answer's body is kept with the error.
	maxExcerpt = 2 << 10
	// maxRetryAfter bounds how long a destination can put off its next attempt. What it asked for is recorded whole: its dead letter
	// comes back no sooner.
	maxRetryAfter = time.Hour
	// maxIdleConns keeps a connection for every delivery that may run at once, so that each is used again.
	maxIdleConns = 10_000
	// recordTime is what a job gets beyond its delivery's timeout, to record the outcome.
	recordTime = 5 * time.Second
	// jitterShare is the most that a backoff is longer or shorter than its nominal length.
	jitterShare = 0.2
	// LogicalFailureKey is the key of a job's metadata under which a logical failure is recorded.
	LogicalFailureKey = "dlq:logical_failure"
)

// Error types of deliveries that got no answer.
const (
	TypeTimeout           = "TIMEOUT_ERROR"
	TypeConnectionRefused = "CONNECTION_REFUSED"
	TypeConnectionReset   = "CONNECTION_RESET"
	TypeConnection        = "CONNECTION_ERROR"
	TypeDNS               = "DNS_ERROR"
	TypeTLS               = "TLS_ERROR"
	TypeLogicalFailure    = "LOGICAL_FAILURE"
)

// Args are the args of a delivery's job: the message, and what Work tells NextRetry of the same attempt.
type Args struct {
	message.Message

	retryAfter *time.Duration
}

// Outcomes of deliveries, beside the classes of errors.
const (
	OutcomeOK   = "ok"
	OutcomeHeld = "held" // not tried yet
)

// Delivered is how a delivery went.
type Delivered struct {
	Queue       string
	Destination string        // empty where the policy does not say which
	Outcome     string        // OutcomeOK, OutcomeHeld, or the class of the error
	Waited      time.Duration // from when its job was due until the attempt began
	Took        time.Duration
}

// Observer is told of every delivery.
type Observer func(Delivered)

// Config is what a [Worker] needs.
type Config struct {
	Planner  func() *strategy.Planner // by the policy that is in force
	Breakers *breaker.Breakers
	DB       postgres.DB // with the schemas' names put into queries
	Observe  Observer
	Tracer   trace.Tracer // nil: deliveries hand on the trace that their message came with
	Logger   *slog.Logger
	// InDoubt reports whether other processes may have put back a job of this process that began in the last within;
	// nil for never.
	InDoubt func(within time.Duration) bool
	// Holds, if not nil, reports whether a job that was made at a time is held, since the database was restored.
	Holds func(createdAt time.Time) bool
}

// Worker delivers messages. It is a River worker for jobs of kind [message.JobKind].
type Worker struct {
	river.WorkerDefaults[Args]

	config Config
	client *http.Client
}

// NewWorker returns a worker for a policy's queues.
func NewWorker(config Config) *Worker {
	config.Tracer = telemetry.Tracer(config.Tracer)
	return &Worker{config: config, client: &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}).DialContext,
			TLSHandshakeTimeout:   connectTimeout,
			ForceAttemptHTTP2:     true,
			MaxIdleConnsPerHost:   maxIdleConns,
			IdleConnTimeout:       90 * time.Second,
			ExpectContinueTimeout: time.Second,
		},
		// A redirect to another host would carry the payload to somebody the policy does not name; one that turns the
		// POST into a GET would lose it.
		CheckRedirect: func(next *http.Request, via []*http.Request) error {
			if next.URL.Host != via[0].URL.Host || next.URL.Scheme != via[0].URL.Scheme || next.Method != http.MethodPost || len(via) >= 3 {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}}
}

// Close closes idle connections.
func (w *Worker) Close() {
	w.client.CloseIdleConnections()
}

// Timeout implements river.Worker: the queue's, and a moment to record the outcome.
func (w *Worker) Timeout(job *river.Job[Args]) time.Duration {
	p := w.config.Planner().Policy()
	if q := p.Queues[job.Queue]; q != nil {
		return q.Timeout + recordTime
	}
	return p.Defaults.Timeout
}

// NextRetry implements river.Worker: the queue's backoff, or what the destination asked for with Retry-After where that is later.
// (One that says "now", or a time that has passed, must not have all attempts spent at once.)
func (w *Worker) NextRetry(job *river.Job[Args]) time.Time {
	p := w.config.Planner().Policy()
	backoff := p.Defaults.Backoff
	if q := p.Queues[job.Queue]; q != nil {
		backoff = q.Backoff
	}
	delay := Backoff(backoff, job.Attempt, mathrand.Float64())
	if job.Args.retryAfter != nil {
		delay = max(delay, min(*job.Args.retryAfter, maxRetryAfter))
	}
	return time.Now().Add(delay)
}

// Backoff is the delay, doubled with each attempt where it is exponential, longer or shorter by up to 20 %; attempt is
// the one that failed, from 1, and random is in [0, 1).
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
	made := Delivered{Queue: job.Queue}
	if job.AttemptedAt != nil {
		made.Waited = max(job.AttemptedAt.Sub(job.ScheduledAt), 0)
	}
	about := metadataOf(job)
	ctx, span := w.startSpan(ctx, job, &about)
	var err error
	made.Outcome, err = w.work(ctx, job, &about, &made.Destination)
	endSpan(span, made.Outcome, err)
	made.Took = time.Since(start)
	w.config.Logger.DebugContext(ctx, "delivery", "queue", job.Queue, "job", job.ID, "attempt", job.Attempt, "outcome", made.Outcome)
	w.config.Observe(made)
	return err
}

// work delivers a message, unless it has to wait, and says to which destination, and how that ended: ok, held, or the class of the error.
func (w *Worker) work(ctx context.Context, job *river.Job[Args], about *metadata, to *string) (outcome string, err error) {
	if w.config.Holds != nil && w.config.Holds(job.CreatedAt) {
		return hold(ctx, job, HeldForRestored, nil)
	}
	planner := w.config.Planner()
	queue := planner.Policy().Queues[job.Queue]
	if queue == nil {
		return w.judge(planner, job, &riverdlq.Error{Type: "UNKNOWN_QUEUE", Class: riverdlq.ClassUnknown, Message: fmt.Sprintf("the policy has no queue %q", job.Queue)})
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
	destination, waitsFor := queue.Destination, HeldForBreaker
	if about.Destination != "" {
		destination, waitsFor = about.Destination, HeldForRedirected
	}
	target := planner.Policy().Destinations[destination]
	if target == nil {
		return w.judge(planner, job, &riverdlq.Error{Type: "UNKNOWN_DESTINATION", Class: riverdlq.ClassUnknown, Message: fmt.Sprintf("the policy has no destination %q", destination)})
	}
	*to = destination
	if w.inDoubt() {
		if runs, err := w.runs(ctx, job); err != nil || !runs {
			return hold(ctx, job, waitsFor, errors.Join(errNotOurs, err))
		}
	}
	permit, err := w.config.Breakers.Allow(ctx, destination, w.Timeout(job))
	if err != nil || permit == nil {
		return hold(ctx, job, waitsFor, err)
	}
	err = w.deliver(ctx, &planner.Policy().Data, target, queue, job, about)
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) { // else it was cut off, which says nothing
		permit.Done(ctx, isWell(err))
	}
	if err != nil {
		return w.judge(planner, job, err)
	}
	if ordered {
		return OutcomeOK, w.completeOrdered(ctx, job)
	}
	return OutcomeOK, nil
}

// completeOrdered completes the job of an ordered message that was delivered, and lets the next of its key go. What
// fails here does not make a delivery fail that was made: River completes the job, and the next message's own look
// finds that.
func (w *Worker) completeOrdered(ctx context.Context, job *river.Job[Args]) error {
	completed, err := dbsqlc.New(w.config.DB).CompleteOrdered(ctx, dbsqlc.CompleteOrderedParams{
		Queue: job.Queue, Key: job.Args.OrderingKey, Job: job.ID, CreatedAt: job.CreatedAt, Attempt: int32(job.Attempt),
	})
	switch {
	case err != nil:
		w.config.Logger.WarnContext(ctx, "delivered; the next message of its ordering key is not woken, and looks by itself", "queue", job.Queue, "job", job.ID, "error", err)
	case !completed: // the attempt that counts is another process's
		w.config.Logger.WarnContext(ctx, "delivered, but the message had been put back meanwhile: its receiver gets it again",
			"queue", job.Queue, "job", job.ID)
		return river.JobSnooze(time.Second) // which says what attempt this was: see executor
	}
	return nil
}

// judge says what class an error is of, by the rules, and ends the job at once where running it again cannot help.
func (w *Worker) judge(planner *strategy.Planner, job *river.Job[Args], err error) (outcome string, _ error) {
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

// factsOf is what rules go by.
func factsOf(failure *riverdlq.Error, job *river.Job[Args]) strategy.Facts {
	said, err := json.Marshal(failure.Context)
	if err != nil {
		said = nil // rules that ask for it do not match
	}
	return strategy.Facts{
		Type: failure.Type, Code: failure.Code, Title: failure.Title, Message: failure.Message,
		Class: failure.Class, Context: said,
		Kind: job.Args.EventKind, Queue: job.Queue, Source: job.Args.Source, Payload: job.Args.Payload, Headers: job.Args.Headers,
	}
}

// isWell reports whether a delivery's end speaks for its destination: it answered, and not that it is in trouble itself.
func isWell(err error) bool {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return err == nil
	}
	status, answered := structured.Context["status"].(int)
	if status == http.StatusLocked || status == http.StatusTooEarly {
		return true // they are about one request
	}
	class := strategy.ClassifyStatus(status)
	return answered && class != riverdlq.ClassTransient && class != riverdlq.ClassOutage
}

func (w *Worker) deliver(
	ctx context.Context, data *policy.Data, destination *policy.Destination, queue *policy.Queue, job *river.Job[Args],
	about *metadata,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, queue.Timeout)
	defer cancel()
	ctx, span := w.config.Tracer.Start(ctx, http.MethodPost, trace.WithSpanKind(trace.SpanKindClient)) //nolint:spancheck // endRequestSpan ends it
	status := 0
	defer func() { endRequestSpan(span, destination, status, err) }()
	request, err := newRequest(ctx, destination, job, about)
	if err != nil {
		return &riverdlq.Error{Type: "REQUEST_ERROR", Class: riverdlq.ClassMalformed, Message: destination.Hide(redact.Text(err.Error()))} //nolint:spancheck // likewise
	}
	hide := hider(data, destination, job)
	response, err := w.client.Do(request)
	if err != nil {
		return transportError(ctx, destination, err, hide)
	}
	defer func() { _ = response.Body.Close() }()
	status = response.StatusCode
	if response.StatusCode < http.StatusOK { // 101: what follows is no answer, and lasts as long as the receiver likes
		return answerError(destination, response, nil, hide)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, cause.MaxBytes))
	switch success := response.StatusCode <= 299; {
	case err != nil && (success || stopped(ctx)):
		return transportError(ctx, destination, err, hide)
	case success:
		return w.success(ctx, job, queue, destination, response, body, hide)
	}
	// The status of an answer that was cut off says that it is a failure; its body is what has come
	// of it.
	failure := answerError(destination, response, body, hide)
	if after, ok := retryAfter(response.Header.Get("Retry-After"), time.Now()); ok {
		job.Args.retryAfter = &after
		failure.Context["retryAfterSeconds"] = int(after.Seconds())
	}
	return failure
}

// metadata is what deliveries read of a job's metadata.
type metadata struct {
	Parent  string     `json:"traceparent"`
	State   string     `json:"tracestate"`
	EntryID *uuid.UUID `json:"dlq:entry_id"`
	RunID   *uuid.UUID `json:"dlq:run_id"` // the replay run that made this redelivery
	Trace   string     `json:"dlq:trace"`  // of the request that asked for it: traceparent and tracestate
	Snoozes int        `json:"snoozes"`    // River's count
	// Destination is where a person sent this redelivery instead of its queue's destination.
	Destination string `json:"dlq:destination"`
}

func metadataOf(job *river.Job[Args]) metadata {
	var m metadata
	// Metadata is open to everyone; what cannot be read of it is left out.
	_ = json.Unmarshal(job.Metadata, &m)
	return m
}

// newRequest makes the POST: the payload as the body, and around it what lets a receiver drop a repeat (webhook-id),
// know the attempt, check the signature and continue the trace.
func newRequest(ctx context.Context, destination *policy.Destination, job *river.Job[Args], about *metadata) (*http.Request, error) {
	body := job.Args.Body()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, destination.URL, bytes.NewReader(body))
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
	if about.EntryID != nil {
		set("Dlqd-Entry-Id", about.EntryID.String())
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

// hider returns a function that takes out of a text what must not be shown: many receivers repeat
// what they were sent, and where. It reads the message at its first call, so that a delivery that
// succeeds costs nothing.
func hider(data *policy.Data, destination *policy.Destination, job *river.Job[Args]) func(text string) string {
	mask := sync.OnceValue(func() func(string) string {
		return data.Mask(func() map[string]any { return eventOf(job) })
	})
	return func(text string) string { return mask()(destination.Hide(text)) }
}

// eventOf returns the parts of a job that sensitive paths name.
func eventOf(job *river.Job[Args]) map[string]any {
	event := map[string]any{}
	for root, raw := range map[string]json.RawMessage{"payload": job.Args.Body(), "metadata": job.Args.Metadata} {
		decoder := json.NewDecoder(bytes.NewReader(raw))
		decoder.UseNumber()
		var value any
		_ = decoder.Decode(&value) // it was checked when it was submitted
		event[root] = value
	}
	headers := map[string]any{}
	for name, value := range job.Args.Headers {
		headers[name] = value
	}
	event["headers"] = headers
	return event
}

// success looks into a 2xx answer for a receiver that says no all the same.
func (w *Worker) success(
	ctx context.Context, job *river.Job[Args], queue *policy.Queue, destination *policy.Destination,
	response *http.Response, body []byte, hide func(string) string,
) error {
	var answer struct {
		Success *bool `json:"success"`
	}
	_ = json.Unmarshal(body, &answer) // an answer that is no JSON says nothing
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

// statusLine is what the headline of a failure begins with.
func statusLine(status int) string {
	return strings.TrimSpace(fmt.Sprintf("%d %s", status, http.StatusText(status)))
}

// answerError is what an answer other than a success means.
func answerError(
	destination *policy.Destination, response *http.Response, body []byte, hide func(string) string,
) *riverdlq.Error {
	status := response.StatusCode
	answer := cause.Answer{
		Status: status, ContentType: response.Header.Get("Content-Type"),
		Type: response.Header.Get("X-Error-Type"), Code: response.Header.Get("X-Error-Code"),
		Body: body, Paths: cause.Paths(destination.ErrorPaths), Hide: hide,
	}
	said := answer.Cause()
	failure := &riverdlq.Error{
		Type:    cmp.Or(said.Type, "HTTP_"+strconv.Itoa(status)),
		Code:    cmp.Or(said.Code, strconv.Itoa(status)),
		Title:   said.Title,
		Message: statusLine(status),
		Context: map[string]any{"status": status, "destination": destination.Name, "url": destination.ShownURL()},
	}
	if text := said.String(); text != "" {
		failure.Message += ": " + text
	}
	if class := riverdlq.Class(response.Header.Get("X-Error-Class")); slices.Contains(riverdlq.Classes(), class) {
		failure.Class = class
	}
	mediaType, _, err := mime.ParseMediaType(answer.ContentType)
	hidden := hide(string(body))
	if err == nil && mediaType == "application/problem+json" && json.Valid([]byte(hidden)) {
		failure.Context["problem"] = json.RawMessage(hidden)
	} else {
		failure.Context["body"] = excerpt(hidden)
	}
	return failure
}

// stopped reports whether a delivery was cut off by its own process: the program is stopping, or an
// operator cancelled the job.
func stopped(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded)
}

// transportError is what it means that there was no answer.
func transportError(
	ctx context.Context, destination *policy.Destination, err error, hide func(string) string,
) error {
	if stopped(ctx) {
		return err // River knows why
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
		err = outer.Err // its text repeats the URL, with the password if there is one
	}
	failure.Message = hide(err.Error()) // an answer that is not HTTP is quoted in it
	return failure
}

// retryAfter reads the header of RFC 9110, 10.2.3: seconds, or a date.
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

// excerpt is the start of an answer, as text that jsonb can hold.
func excerpt(body string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(body[:min(len(body), maxExcerpt)], "\uFFFD"), "\x00", "\uFFFD")
}
