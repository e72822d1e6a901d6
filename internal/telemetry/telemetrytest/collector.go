// Package telemetrytest is an OpenTelemetry collector in the test's own process.
package telemetrytest

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	collectorlogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	metrics "go.opentelemetry.io/proto/otlp/metrics/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Collector keeps the data that was sent to it.
type Collector struct {
	URL string

	mu       sync.Mutex
	services map[string]bool
	spans    []*trace.Span
	records  []*logs.LogRecord
	metrics  map[string]*metrics.Metric
}

// NewCollector returns a collector that accepts OTLP over HTTP until the test ends.
func NewCollector(t *testing.T) *Collector {
	t.Helper()
	c := &Collector{services: map[string]bool{}, metrics: map[string]*metrics.Metric{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", handle(func(r *collectortrace.ExportTraceServiceRequest) {
		for _, resource := range r.GetResourceSpans() {
			for _, a := range resource.GetResource().GetAttributes() {
				if a.GetKey() == "service.name" {
					c.services[a.GetValue().GetStringValue()] = true
				}
			}
			for _, scope := range resource.GetScopeSpans() {
				c.spans = append(c.spans, scope.GetSpans()...)
			}
		}
	}, &c.mu))
	mux.HandleFunc("POST /v1/metrics", handle(func(r *collectormetrics.ExportMetricsServiceRequest) {
		for _, resource := range r.GetResourceMetrics() {
			for _, scope := range resource.GetScopeMetrics() {
				for _, m := range scope.GetMetrics() {
					c.metrics[m.GetName()] = m
				}
			}
		}
	}, &c.mu))
	mux.HandleFunc("POST /v1/logs", handle(func(r *collectorlogs.ExportLogsServiceRequest) {
		for _, resource := range r.GetResourceLogs() {
			for _, scope := range resource.GetScopeLogs() {
				c.records = append(c.records, scope.GetLogRecords()...)
			}
		}
	}, &c.mu))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	c.URL = server.URL
	return c
}

// message is a pointer to a T that is a protobuf message.
type message[T any] interface {
	*T
	proto.Message
}

func handle[T any, M message[T]](fn func(M), mu *sync.Mutex) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			unzipped, err := gzip.NewReader(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			body = unzipped
		}
		raw, err := io.ReadAll(body)
		request := M(new(T))
		if err == nil {
			err = proto.Unmarshal(raw, request)
		}
		if err != nil || r.Header.Get("Content-Type") != "application/x-protobuf" {
			http.Error(w, "not OTLP", http.StatusBadRequest)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		fn(request)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}
}

// Services returns the names of the services that sent spans.
func (c *Collector) Services() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := make([]string, 0, len(c.services))
	for name := range c.services {
		names = append(names, name)
	}
	return names
}

// Spans returns the spans with a name, in the order in which they arrived.
func (c *Collector) Spans(name string) []*trace.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*trace.Span
	for _, span := range c.spans {
		if span.GetName() == name {
			found = append(found, span)
		}
	}
	return found
}

// Records returns the log records with a message.
func (c *Collector) Records(message string) []*logs.LogRecord {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*logs.LogRecord
	for _, record := range c.records {
		if record.GetBody().GetStringValue() == message {
			found = append(found, record)
		}
	}
	return found
}

// Metric returns the last state of a metric, or nil if it was never sent.
func (c *Collector) Metric(name string) *metrics.Metric {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.metrics[name]
}
