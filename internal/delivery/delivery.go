// Package delivery is the River worker that takes a message to its destination over HTTP, and says what the answer
// means.
package delivery

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	mathrand "math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/riverdlq"
)

const (
	// connectTimeout bounds the connection alone, so that a host that is gone does not use up the whole timeout.
	connectTimeout = 5 * time.Second
	// maxAnswerBytes is how much of an answer is read: enough for a problem document, and no way to fill our memory.
	maxAnswerBytes = 64 << 10
	// maxExcerpt is how much of an answer's body is kept with the error.
	maxExcerpt = 2 << 10
	// maxRetryAfter bounds how long a destination can put off its next attempt.
	maxRetryAfter = time.Hour
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

// Observer is told of every delivery: its queue, how it ended ("ok", or an error class), and how long it took.
type Observer func(queue, outcome string, took time.Duration)

// Worker delivers messages. It is a River worker for jobs of kind [message.JobKind].
type Worker struct {
	river.WorkerDefaults[Args]

	policy  *policy.Policy
	observe Observer
	clients map[string]*http.Client // by destination
}

// NewWorker returns a worker for a policy's queues.
func NewWorker(p *policy.Policy, observe Observer) *Worker {
	w := &Worker{policy: p, observe: observe, clients: map[string]*http.Client{}}
	concurrency := map[string]int{}
	for _, q := range p.Queues {
		concurrency[q.Destination] += q.Concurrency
	}
	for name := range p.Destinations {
		w.clients[name] = newClient(concurrency[name])
	}
	return w
}

// newClient keeps as many idle connections as there may be deliveries at once, so that each is used again.
func newClient(concurrency int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}).DialContext,
			TLSHandshakeTimeout:   connectTimeout,
			ForceAttemptHTTP2:     true,
			MaxIdleConns:          concurrency,
			MaxIdleConnsPerHost:   concurrency,
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
	}
}

// Close closes idle connections.
func (w *Worker) Close() {
	for _, c := range w.clients {
		c.CloseIdleConnections()
	}
}

// Timeout implements river.Worker: the queue's, and a moment to record the outcome.
func (w *Worker) Timeout(job *river.Job[Args]) time.Duration {
	if q := w.policy.Queues[job.Queue]; q != nil {
		return q.Timeout + 5*time.Second
	}
	return policy.DefaultTimeout
}

// NextRetry implements river.Worker: what the destination asked for with Retry-After, or the queue's backoff.
func (w *Worker) NextRetry(job *river.Job[Args]) time.Time {
	if job.Args.retryAfter != nil {
		return time.Now().Add(*job.Args.retryAfter)
	}
	base := policy.DefaultBackoff
	if q := w.policy.Queues[job.Queue]; q != nil {
		base = q.Backoff
	}
	return time.Now().Add(Backoff(base, job.Attempt, mathrand.Float64()))
}

// Backoff is base · 2^(attempt-1), longer or shorter by up to 20 %; attempt is the one that failed, from 1, and random
// is in [0, 1).
func Backoff(base time.Duration, attempt int, random float64) time.Duration {
	const most = 24 * time.Hour
	nominal := min(float64(base)*math.Pow(2, float64(max(attempt, 1)-1)), float64(most))
	return time.Duration(nominal * (1 - jitterShare + 2*jitterShare*random))
}

// Work implements river.Worker.
func (w *Worker) Work(ctx context.Context, job *river.Job[Args]) error {
	start := time.Now()
	err := w.deliver(ctx, job)
	outcome := "ok"
	if structured, ok := errors.AsType[*riverdlq.Error](err); ok {
		outcome = string(structured.Class)
	} else if err != nil {
		outcome = string(riverdlq.ClassUnknown)
	}
	w.observe(job.Queue, outcome, time.Since(start))
	return err
}

func (w *Worker) deliver(ctx context.Context, job *river.Job[Args]) error {
	queue := w.policy.Queues[job.Queue]
	if queue == nil {
		return &riverdlq.Error{Type: "UNKNOWN_QUEUE", Class: riverdlq.ClassUnknown, Message: fmt.Sprintf("the policy has no queue %q", job.Queue)}
	}
	destination := w.policy.Destinations[queue.Destination]
	ctx, cancel := context.WithTimeout(ctx, queue.Timeout)
	defer cancel()
	request, err := newRequest(ctx, destination, job)
	if err != nil {
		return &riverdlq.Error{Type: "REQUEST_ERROR", Class: riverdlq.ClassMalformed, Message: err.Error(), Err: err}
	}
	response, err := w.clients[destination.Name].Do(request)
	if err != nil {
		return transportError(ctx, destination, err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes))
	if err != nil {
		return transportError(ctx, destination, err)
	}
	if response.StatusCode >= 200 && response.StatusCode <= 299 {
		return w.success(ctx, job, queue, response.StatusCode, body)
	}
	failure := answerError(destination, response, body)
	if after, ok := retryAfter(response.Header.Get("Retry-After"), time.Now()); ok {
		job.Args.retryAfter = &after
		failure.Context["retryAfterSeconds"] = int(after.Seconds())
	}
	return failure
}

// newRequest makes the POST: the payload as the body, and around it what lets a receiver drop a repeat (webhook-id),
// know the attempt, check the signature and continue the trace.
func newRequest(ctx context.Context, destination *policy.Destination, job *river.Job[Args]) (*http.Request, error) {
	body := []byte(job.Args.Payload)
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
	var metadata struct {
		Parent  string `json:"traceparent"`
		State   string `json:"tracestate"`
		EntryID string `json:"dlq:entry_id"`
	}
	// Metadata is open to everyone; what cannot be read of it is left out.
	_ = json.Unmarshal(job.Metadata, &metadata)
	if metadata.EntryID != "" {
		set("Dlqd-Entry-Id", metadata.EntryID)
	}
	set("Traceparent", childTrace(metadata.Parent))
	if metadata.State != "" {
		set("Tracestate", metadata.State)
	}
	if sign := destination.Signer(); sign != nil {
		signature, err := sign(job.Args.MessageID, now, body)
		if err != nil {
			return nil, err
		}
		set("Webhook-Signature", signature)
	}
	return request, nil
}

var traceParent = regexp.MustCompile(`^00-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})$`)

// childTrace is a span of our own in the trace that a message came with, or in a new one (W3C Trace Context).
func childTrace(parent string) string {
	var random [24]byte
	_, _ = rand.Read(random[:]) // never fails
	trace, flags := hex.EncodeToString(random[:16]), "00"
	if match := traceParent.FindStringSubmatch(parent); match != nil {
		trace, flags = match[1], match[2]
	}
	return "00-" + trace + "-" + hex.EncodeToString(random[16:]) + "-" + flags
}

// success looks into a 2xx answer for a receiver that says no all the same.
func (w *Worker) success(ctx context.Context, job *river.Job[Args], queue *policy.Queue, status int, body []byte) error {
	var answer struct {
		Success *bool `json:"success"`
	}
	_ = json.Unmarshal(body, &answer) // an answer that is no JSON says nothing
	if answer.Success == nil || *answer.Success {
		return nil
	}
	if queue.DeadLetterLogicalFailures {
		return &riverdlq.Error{
			Type: TypeLogicalFailure, Code: strconv.Itoa(status), Class: riverdlq.ClassBusiness,
			Message: "the receiver answered success: false", Context: map[string]any{"status": status, "body": excerpt(body)},
		}
	}
	return river.MetadataSet(ctx, LogicalFailureKey, map[string]any{
		"at": time.Now().UTC().Format(time.RFC3339Nano), "attempt": job.Attempt, "status": status, "body": excerpt(body),
	})
}

// answerError is what an answer other than 2xx means.
func answerError(destination *policy.Destination, response *http.Response, body []byte) *riverdlq.Error {
	status := response.StatusCode
	failure := &riverdlq.Error{
		Type:  "HTTP_" + strconv.Itoa(status),
		Code:  strconv.Itoa(status),
		Class: strategy.ClassifyStatus(status),
		Context: map[string]any{
			"status": status, "destination": destination.Name, "url": redacted(destination.URL), "body": excerpt(body),
		},
	}
	said := strings.TrimSpace(fmt.Sprintf("%d %s", status, http.StatusText(status)))
	if mediaType, _, err := mime.ParseMediaType(response.Header.Get("Content-Type")); err == nil && mediaType == "application/problem+json" {
		var problem struct {
			Type   string `json:"type"`
			Title  string `json:"title"`
			Detail string `json:"detail"`
		}
		if json.Unmarshal(body, &problem) == nil {
			if problem.Type != "" && problem.Type != "about:blank" {
				failure.Type = problem.Type
			}
			var saidSb299 strings.Builder
			for _, part := range []string{problem.Title, problem.Detail} {
				if part != "" {
					saidSb299.WriteString(": " + part)
				}
			}
			said += saidSb299.String()
			failure.Context["problem"] = json.RawMessage(body)
			delete(failure.Context, "body")
		}
	}
	if v := response.Header.Get("X-Error-Type"); v != "" {
		failure.Type = v
	}
	if v := response.Header.Get("X-Error-Code"); v != "" {
		failure.Code = v
	}
	failure.Message = "POST " + redacted(destination.URL) + ": " + said
	return failure
}

// transportError is what it means that there was no answer.
func transportError(ctx context.Context, destination *policy.Destination, err error) error {
	if ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return err // the program is stopping, or an operator cancelled the job: River knows which
	}
	failure := &riverdlq.Error{
		Type: TypeConnection, Class: riverdlq.ClassTransient, Err: err,
		Context: map[string]any{"destination": destination.Name, "url": redacted(destination.URL)},
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
	failure.Message = "POST " + redacted(destination.URL) + ": " + err.Error()
	return failure
}

// retryAfter reads the header of RFC 9110, 10.2.3: seconds, or a date.
func retryAfter(value string, now time.Time) (time.Duration, bool) {
	if value == "" {
		return 0, false
	}
	if seconds, err := strconv.Atoi(value); err == nil && seconds >= 0 {
		return min(time.Duration(min(seconds, int(maxRetryAfter.Seconds())))*time.Second, maxRetryAfter), true
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0, false
	}
	return min(max(at.Sub(now), 0), maxRetryAfter), true
}

func redacted(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	u.RawQuery = "" // where some put a token
	return u.Redacted()
}

// excerpt is the start of an answer, as text that jsonb can hold.
func excerpt(body []byte) string {
	return strings.ReplaceAll(strings.ToValidUTF8(string(body[:min(len(body), maxExcerpt)]), "\uFFFD"), "\x00", "\uFFFD")
}
