// Package telemetry exports traces, metrics and logs to an OpenTelemetry collector, if an endpoint is set. Even without
// an endpoint, it passes the trace context of a submission on to its deliveries.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/bridges/otelslog"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdklog "go.opentelemetry.io/otel/sdk/log"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// scope is the instrumentation scope of dlqd's spans and log records.
const scope = "github.com/dlqd/dlqd"

// Config configures [Start].
type Config struct {
	// Endpoint is the collector's base URL (OTLP over HTTP: http://localhost:4318). If it is empty, nothing is exported.
	// OpenTelemetry's environment variables set everything else: OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER,
	// OTEL_SERVICE_NAME …
	Endpoint string
	// Version and Instance identify this process.
	Version, Instance string
	// Gatherer provides the metrics.
	Gatherer prometheus.Gatherer
	Logger   *slog.Logger
}

// Telemetry exports traces, metrics and logs of this process, or nothing if no endpoint is set.
type Telemetry struct {
	// Tracer creates spans. Without an endpoint, it only passes on an existing trace context.
	Tracer trace.Tracer
	// Logger is the logger of the config, and adds trace ids to records. Its records also go to the collector.
	Logger *slog.Logger

	stops []func(context.Context) error
}

// EndpointOfEnvironment returns the endpoint in OpenTelemetry's environment variables. It returns "" if they set none,
// or if they disable the SDK.
func EndpointOfEnvironment() string {
	if os.Getenv("OTEL_SDK_DISABLED") == "true" {
		return ""
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")
}

// CheckEndpoint returns an error for an invalid endpoint.
func CheckEndpoint(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return errors.New("must be the http or https URL of a collector, such as http://localhost:4318")
	}
	if u.User != nil {
		return errors.New("must not contain a password: set the collector's headers in $OTEL_EXPORTER_OTLP_HEADERS")
	}
	return nil
}

// isOn reports whether a signal ("traces", "metrics", "logs") is exported. The environment can turn a signal off, for
// example with OTEL_TRACES_EXPORTER=none.
func isOn(signal string) bool {
	return os.Getenv("OTEL_"+strings.ToUpper(signal)+"_EXPORTER") != "none"
}

// Start starts the export. Only [Telemetry.Stop] waits for the collector; data for which the export queues have no room
// is dropped.
func Start(ctx context.Context, config Config) (*Telemetry, error) {
	local := &handler{local: config.Logger.Handler()}
	t := &Telemetry{Tracer: noop.Tracer{}, Logger: slog.New(local)}
	if config.Endpoint == "" {
		return t, nil
	}
	if err := CheckEndpoint(config.Endpoint); err != nil {
		return nil, fmt.Errorf("OTLP endpoint: %w", err)
	}
	// Do not use t.Logger, because it would export the errors of the export.
	otel.SetErrorHandler(&errorLogger{logger: config.Logger})
	process, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "dlqd"), attribute.String("service.version", config.Version),
			attribute.String("service.instance.id", config.Instance)),
		resource.WithTelemetrySDK(), resource.WithFromEnv()) // later sources override earlier ones
	if err != nil {
		return nil, fmt.Errorf("OpenTelemetry: describe this process: %w", err)
	}
	endpoint := func(signal string) string { return strings.TrimSuffix(config.Endpoint, "/") + "/v1/" + signal }
	if isOn("traces") {
		exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint("traces")))
		if err != nil {
			return nil, fmt.Errorf("OpenTelemetry: create the exporter of traces: %w", err)
		}
		provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter),
			sdktrace.WithResource(process), sdktrace.WithIDGenerator(ids{}))
		t.Tracer, t.stops = provider.Tracer(scope, trace.WithInstrumentationVersion(config.Version)),
			append(t.stops, provider.Shutdown)
	}
	if isOn("metrics") {
		exporter, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(endpoint("metrics")))
		if err != nil {
			return nil, fmt.Errorf("OpenTelemetry: create the exporter of metrics: %w", err)
		}
		reader := sdkmetric.NewPeriodicReader(exporter,
			sdkmetric.WithProducer(bridge.NewMetricProducer(bridge.WithGatherer(config.Gatherer))))
		provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader), sdkmetric.WithResource(process))
		t.stops = append(t.stops, provider.Shutdown)
	}
	if isOn("logs") {
		exporter, err := otlploghttp.New(ctx, otlploghttp.WithEndpointURL(endpoint("logs")))
		if err != nil {
			return nil, fmt.Errorf("OpenTelemetry: create the exporter of logs: %w", err)
		}
		provider := sdklog.NewLoggerProvider(sdklog.WithProcessor(sdklog.NewBatchProcessor(exporter)),
			sdklog.WithResource(process))
		t.stops = append(t.stops, provider.Shutdown)
		local.export = otelslog.NewHandler(scope, otelslog.WithLoggerProvider(provider), otelslog.WithVersion(config.Version))
	}
	return t, nil
}

const (
	// A failure that persists is logged at once, again after logAgain, and then at growing intervals, up to maxLogAgain.
	// If nothing has failed for logAgain, the collector works again, because each signal is sent more often than that.
	logAgain    = 2 * time.Minute
	maxLogAgain = time.Hour
)

// errorLogger logs the errors of the export.
type errorLogger struct {
	logger *slog.Logger

	mu         sync.Mutex
	last, next time.Time // time of the last failure, and the time from which failures are logged again
	after      time.Duration
	unlogged   int
}

// Handle implements otel.ErrorHandler.
func (l *errorLogger) Handle(err error) { l.handle(err, time.Now()) }

func (l *errorLogger) handle(err error, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) > logAgain {
		l.after, l.next = 0, now
	}
	l.last = now
	if now.Before(l.next) {
		l.unlogged++
		return
	}
	l.after = max(logAgain, min(2*l.after, maxLogAgain))
	l.next = now.Add(l.after)
	l.logger.Warn("OpenTelemetry: exporting to the collector failed", "error", err, "unlogged", l.unlogged)
	l.unlogged = 0
}

// Stop exports the data in the export queues, until ctx is done.
func (t *Telemetry) Stop(ctx context.Context) {
	var wg sync.WaitGroup
	for _, stop := range t.stops {
		wg.Go(func() {
			if err := stop(ctx); err != nil {
				otel.Handle(err)
			}
		})
	}
	wg.Wait()
}

// handler adds the ids of the current span to log records, and exports the records.
type handler struct{ local, export slog.Handler } // export is nil if nothing is exported

func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.local.Enabled(ctx, level)
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	var err error
	if h.export != nil {
		exported := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
		r.Attrs(func(a slog.Attr) bool {
			exported.AddAttrs(exportable(a))
			return true
		})
		err = h.export.Handle(ctx, exported)
	}
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		r.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	return errors.Join(err, h.local.Handle(ctx, r))
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	changed := &handler{local: h.local.WithAttrs(attrs)}
	if h.export != nil {
		exported := make([]slog.Attr, len(attrs))
		for i, a := range attrs {
			exported[i] = exportable(a)
		}
		changed.export = h.export.WithAttrs(exported)
	}
	return changed
}

// exportable returns a field with the text that log/slog would write. It does so for types that the OpenTelemetry
// bridge does not know (named types) or sends as plain numbers (times and durations).
func exportable(a slog.Attr) slog.Attr {
	value := a.Value.Resolve()
	switch value.Kind() { //nolint:exhaustive // the others are sent as they are
	case slog.KindGroup:
		members := make([]slog.Attr, len(value.Group()))
		for i, member := range value.Group() {
			members[i] = exportable(member)
		}
		return slog.Attr{Key: a.Key, Value: slog.GroupValue(members...)}
	case slog.KindDuration, slog.KindTime:
		return slog.String(a.Key, formatted(value))
	case slog.KindAny:
		return slog.Attr{Key: a.Key, Value: exportableValue(value)}
	default:
		return slog.Attr{Key: a.Key, Value: value}
	}
}

// formatted returns the text that log/slog writes for a value.
func formatted(value slog.Value) string {
	if value.Kind() == slog.KindTime {
		return value.Time().Format(time.RFC3339Nano)
	}
	return value.String()
}

func exportableValue(value slog.Value) slog.Value {
	content := value.Any()
	found := reflect.ValueOf(content)
	for found.Kind() == reflect.Pointer && !found.IsNil() {
		if formatsItself(found.Interface()) {
			break
		}
		found = found.Elem()
	}
	if !found.IsValid() || found.Kind() == reflect.Pointer && found.IsNil() {
		return slog.StringValue("")
	}
	if formatsItself(found.Interface()) {
		return slog.StringValue(fmt.Sprint(found.Interface()))
	}
	switch found.Kind() { //nolint:exhaustive // the others have no such text
	case reflect.String:
		return slog.StringValue(found.String())
	case reflect.Bool:
		return slog.BoolValue(found.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return slog.Int64Value(found.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return slog.Uint64Value(found.Uint())
	case reflect.Float32, reflect.Float64:
		return slog.Float64Value(found.Float())
	default:
		return slog.StringValue(fmt.Sprintf("%+v", content))
	}
}

// formatsItself reports whether a value has a method that formats it: Error or String.
func formatsItself(value any) bool {
	switch value.(type) {
	case error, fmt.Stringer:
		return true
	}
	return false
}

func (h *handler) WithGroup(name string) slog.Handler {
	return h.with(func(inner slog.Handler) slog.Handler { return inner.WithGroup(name) })
}

func (h *handler) with(change func(slog.Handler) slog.Handler) slog.Handler {
	changed := &handler{local: change(h.local)}
	if h.export != nil {
		changed.export = change(h.export)
	}
	return changed
}
