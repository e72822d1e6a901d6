package server_test

import (
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/telemetry/telemetrytest"
)

const (
	parentTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	parentSpan  = "00f067aa0ba902b7"
)

// traced is a receiver that records trace contexts.
type traced struct {
	status atomic.Int32

	mu      sync.Mutex
	parents []string
}

func (r *traced) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	r.parents = append(r.parents, request.Header.Get("Traceparent")+" "+request.Header.Get("Tracestate"))
	r.mu.Unlock()
	w.WriteHeader(int(r.status.Load()))
}

func (r *traced) seen() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.parents
}

// submitTraced submits a message with a trace context, waits until its dead letter is parked, and returns the id of
// that entry.
func (b *bundle) submitTraced(id string) string {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), http.MethodPost, b.base+"/api/messages",
		strings.NewReader(fmt.Sprintf(
			`{"messageId": %q, "queue": "default", "kind": "payment.captured", "payload": {"card": "4111"}}`, id)))
	require.NoError(b, err)
	request.Header.Set("Traceparent", "00-"+parentTrace+"-"+parentSpan+"-01")
	request.Header.Set("Tracestate", "vendor=1")
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	require.NoError(b, response.Body.Close())
	require.Equal(b, http.StatusAccepted, response.StatusCode)
	var entry uuid.UUID
	require.Eventually(b, func() bool {
		return b.pool.QueryRow(b.Context(), `SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'
			AND event_id = $1`, id).Scan(&entry) == nil
	}, 5*time.Minute, 50*time.Millisecond)
	return entry.String()
}

// replayAll replays all entries in a run, waits until the entry is resolved, and returns the run's id.
func (b *bundle) replayAll() string {
	b.Helper()
	status, run, _ := b.call("POST", "/api/dlq/replay",
		`{"filter": {"queue": ["default"]}, "force": true, "note": "fixed"}`)
	require.Equal(b, http.StatusAccepted, status, run)
	require.Eventually(b, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	started, ok := run["run"].(map[string]any)
	require.True(b, ok, run)
	return started["id"].(string)
}

func attributes(span *trace.Span) map[string]string {
	all := map[string]string{}
	for _, a := range span.GetAttributes() {
		all[a.GetKey()] = a.GetValue().GetStringValue()
		if n := a.GetValue().GetIntValue(); n != 0 {
			all[a.GetKey()] = fmt.Sprint(n)
		}
	}
	return all
}

func linkAttributes(link *trace.Span_Link) map[string]string {
	return attributes(&trace.Span{Attributes: link.GetAttributes()})
}

// Traces connect a submission with its job and its delivery, and a redelivery with both the
// submission and the replay run. Logs and metrics go to the same collector.
func TestTelemetry_TracesAMessage(t *testing.T) {
	t.Parallel()
	collector := telemetrytest.NewCollector(t)
	receiver := &traced{}
	receiver.status.Store(http.StatusNotFound)
	log := &lockedBuffer{}
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) {
		c.OTLPEndpoint = collector.URL
		c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}})
	entry := b.submitTraced("traced")
	receiver.status.Store(http.StatusOK)
	run := b.replayAll()
	b.stop() // sends the remaining spans

	require.Equal(t, []string{"dlqd"}, collector.Services())
	one := func(name string, n, count int) *trace.Span {
		spans := collector.Spans(name)
		require.Len(t, spans, count, name)
		return spans[n]
	}
	submission := one("submit-message", 0, 1)
	require.Equal(t, parentTrace, hex.EncodeToString(submission.GetTraceId()))
	require.Equal(t, parentSpan, hex.EncodeToString(submission.GetParentSpanId()))
	require.Equal(t, "/api/messages", attributes(submission)["http.route"])
	require.Equal(t, "202", attributes(submission)["http.response.status_code"])

	job := one("process default", 0, 2)
	require.Equal(t, submission.GetTraceId(), job.GetTraceId())
	require.Equal(t, submission.GetSpanId(), job.GetParentSpanId())
	require.Equal(t, "traced", attributes(job)["messaging.message.id"])
	require.Equal(t, "not_found", attributes(job)["dlqd.outcome"])
	require.Equal(t, trace.Status_STATUS_CODE_ERROR, job.GetStatus().GetCode())

	delivery := one("POST", 0, 2)
	require.Equal(t, job.GetSpanId(), delivery.GetParentSpanId())
	require.Equal(t, "404", attributes(delivery)["http.response.status_code"])
	require.Equal(t, "HTTP_404", attributes(delivery)["error.type"])
	seen := receiver.seen()
	require.Len(t, seen, 2)
	require.Equal(t, "00-"+parentTrace+"-"+hex.EncodeToString(delivery.GetSpanId())+"-01 vendor=1", seen[0])

	redelivery := one("process default", 1, 2)
	require.NotEqual(t, submission.GetTraceId(), redelivery.GetTraceId(), "a redelivery has its own trace")
	require.Empty(t, redelivery.GetParentSpanId())
	require.Equal(t, entry, attributes(redelivery)["dlqd.entry_id"])
	require.Equal(t, "ok", attributes(redelivery)["dlqd.outcome"])
	require.Len(t, redelivery.GetLinks(), 2)
	require.Equal(t, submission.GetSpanId(), redelivery.GetLinks()[0].GetSpanId())
	require.Equal(t, submission.GetTraceId(), redelivery.GetLinks()[0].GetTraceId())
	runSpan := one("replay run", 0, 1)
	require.Equal(t, strings.ReplaceAll(run, "-", ""), hex.EncodeToString(runSpan.GetTraceId()),
		"the trace's id is the run's id")
	require.Equal(t, runSpan.GetTraceId(), redelivery.GetLinks()[1].GetTraceId())
	require.Equal(t, runSpan.GetSpanId(), redelivery.GetLinks()[1].GetSpanId())
	require.Equal(t, "vendor=1", linkAttributes(redelivery.GetLinks()[0])["dlqd.tracestate"])
	require.Equal(t, "vendor=1", redelivery.GetTraceState())
	request := one("start-replay", 0, 1)
	require.Equal(t, request.GetSpanId(), runSpan.GetLinks()[0].GetSpanId())
	handedOn := hex.EncodeToString(redelivery.GetTraceId()) + "-" + hex.EncodeToString(one("POST", 1, 2).GetSpanId())
	require.Equal(t, seen[1], "00-"+handedOn+"-01 vendor=1")

	filing := one("file default", 0, 1)
	require.Equal(t, submission.GetTraceId(), filing.GetTraceId())
	require.Equal(t, submission.GetSpanId(), filing.GetParentSpanId())
	require.Equal(t, entry, attributes(filing)["dlqd.entry_id"])
	require.Equal(t, "not_found", attributes(filing)["dlqd.error_class"])
	require.Equal(t, "manual", attributes(filing)["dlqd.strategy"])
	require.LessOrEqual(t, filing.GetStartTimeUnixNano(), filing.GetEndTimeUnixNano())

	// Log records have the id of their trace, at the collector and in the text log.
	records := collector.Records("delivery")
	require.Len(t, records, 2)
	require.Equal(t, job.GetTraceId(), records[0].GetTraceId())
	require.Equal(t, job.GetSpanId(), records[0].GetSpanId())
	require.Contains(t, log.String(), "trace_id="+parentTrace+" span_id="+hex.EncodeToString(job.GetSpanId()))
	require.NotContains(t, log.String(), "4111")

	submitted := collector.Metric("dlqd_messages_submitted_total")
	require.NotNil(t, submitted)
	require.InDelta(t, 1, submitted.GetSum().GetDataPoints()[0].GetAsDouble(), 0)
	require.NotNil(t, collector.Metric("dlqd_http_request_seconds").GetExponentialHistogram(),
		"native histograms are exported")
	require.NotNil(t, collector.Metric("dlqd_database_up"))
}

// The trace of a single entry's replay is linked to the trace of the request that asked for it, and has that request's
// tracestate.
func TestTelemetry_LinksSingleReplays(t *testing.T) {
	t.Parallel()
	collector := telemetrytest.NewCollector(t)
	receiver := &traced{}
	receiver.status.Store(http.StatusNotFound)
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) { c.OTLPEndpoint = collector.URL }})
	entry := b.submitTraced("traced")
	replay := func(status int32, until string) {
		receiver.status.Store(status)
		url, body := b.base+"/api/dlq/entries/"+entry+"/replay", strings.NewReader(`{"note": "fixed"}`)
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
		require.NoError(t, err)
		request.Header.Set("Traceparent", "00-"+parentTrace+"-1111111111111111-01")
		request.Header.Add("Tracestate", "one=1")
		request.Header.Add("Tracestate", "two=2")
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusAccepted, response.StatusCode)
		b.awaitEntry(entry, until)
	}
	replay(http.StatusNotFound, "dlq_manual")
	replay(http.StatusOK, "dlq_resolved")
	b.stop()
	requests := collector.Spans("replay-entry")
	require.Len(t, requests, 2)
	attempts := collector.Spans("process default")
	require.Len(t, attempts, 3)
	for i, attempt := range attempts[1:] {
		require.Empty(t, attempt.GetParentSpanId())
		require.Len(t, attempt.GetLinks(), 2, "links to the submission and to its own request")
		link := attempt.GetLinks()[1]
		require.Equal(t, requests[i].GetSpanId(), link.GetSpanId())
		require.Equal(t, parentTrace, hex.EncodeToString(link.GetTraceId()))
		require.Equal(t, map[string]string{"dlqd.link": "replay", "dlqd.tracestate": "one=1,two=2"}, linkAttributes(link))
	}
}

// Without an endpoint, dlqd sends no telemetry. It forwards a trace context unchanged, as W3C Trace Context requires of
// a service that does not take part in tracing, and creates none.
func TestTelemetry_DisabledForwardsTraceContexts(t *testing.T) {
	t.Parallel()
	receiver := &traced{}
	receiver.status.Store(http.StatusNotFound)
	b := setup(t, options{receiver: receiver.ServeHTTP})
	b.submitTraced("traced")
	receiver.status.Store(http.StatusOK)
	b.replayAll()
	status, out, _ := b.call("POST", "/api/messages", `{"queue": "default", "kind": "k", "payload": 1}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool { return len(receiver.seen()) == 3 }, 5*time.Minute, 50*time.Millisecond)
	as := "00-" + parentTrace + "-" + parentSpan + "-01 vendor=1"
	require.Equal(t, []string{as, as, " "}, receiver.seen())
}

// An unavailable collector delays neither deliveries nor a stop, and is logged only sometimes.
func TestTelemetry_UnavailableCollectorDelaysNothing(t *testing.T) {
	t.Parallel()
	receiver := &traced{}
	receiver.status.Store(http.StatusNotFound)
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) {
		c.OTLPEndpoint = "http://127.0.0.1:1"
		c.StopTimeout = 4 * time.Second
	}})
	b.submitTraced("traced")
	b.stop()
}
