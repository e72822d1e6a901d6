package telemetry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/telemetry/telemetrytest"
)

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// An invalid trace context is ignored, as W3C Trace Context requires.
func TestExtract_IgnoresInvalidContexts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ parent, state, wantParent, wantState string }{
		{parent, "vendor=1", parent, "vendor=1"},
		{parent, "", parent, ""},
		{"", "vendor=1", "", ""},
		{"00-aa-bb-01", "vendor=1", "", ""},
		{"00-00000000000000000000000000000000-00f067aa0ba902b7-01", "", "", ""},
		{"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "", "", ""},
		{"cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-the-future-will-be-like", "", parent, ""},
		{parent, "a=\xff", parent, ""},
		// A state of more than 512 characters first loses members of more than 128 characters, and then members at its end.
		{parent, "a=1,b=" + strings.Repeat("x", 256) + ",c=3,d=" + strings.Repeat("x", 254), parent, "a=1,c=3"},
		{parent, members("xyzvw"), parent, members("xyzv")},
	} {
		gotParent, gotState := telemetry.Inject(telemetry.Extract(t.Context(), c.parent, c.state))
		require.Equal(t, c.wantParent, gotParent, c)
		require.Equal(t, c.wantState, gotState, c)
	}
}

func TestCheckEndpoint_RejectsInvalidURLs(t *testing.T) {
	t.Parallel()
	for _, valid := range []string{"", "http://localhost:4318", "https://collector.example/otlp/"} {
		require.NoError(t, telemetry.CheckEndpoint(valid))
	}
	for _, invalid := range []string{
		"localhost:4318", "grpc://localhost:4317", "http://",
		"http://user:secret@collector.example", "\x7f",
	} {
		err := telemetry.CheckEndpoint(invalid)
		require.Error(t, err, invalid)
		require.NotContains(t, err.Error(), "secret")
	}
}

// members returns a tracestate with a member of 122 characters for each letter.
func members(letters string) string {
	var all []string
	for _, letter := range letters {
		all = append(all, strings.Repeat(string(letter), 120)+"=1")
	}
	return strings.Join(all, ",")
}

// The original handler gets records with the ids of their trace. A record below that handler's level is neither logged
// nor exported.
func TestStart_LoggerAddsTraceIDsAndExports(t *testing.T) {
	t.Parallel()
	collector := telemetrytest.NewCollector(t)
	var written bytes.Buffer
	sent, err := telemetry.Start(t.Context(), telemetry.Config{
		Endpoint: collector.URL + "/", Gatherer: prometheus.NewRegistry(),
		Logger: slog.New(slog.NewTextHandler(&written, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	require.NoError(t, err)
	logger := sent.Logger.With("part", "test").WithGroup("g")
	ctx := telemetry.Extract(t.Context(), parent, "")
	logger.InfoContext(ctx, "not written")
	logger.WarnContext(ctx, "written", "key", "value")
	sent.Logger.Warn("without a trace")
	sent.Stop(t.Context())

	lines := strings.Split(strings.TrimSpace(written.String()), "\n")
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], "msg=written part=test g.key=value")
	require.Contains(t, lines[0], "trace_id=4bf92f3577b34da6a3ce929d0e0e4736")
	require.NotContains(t, lines[1], "trace_id")
	require.Empty(t, collector.Records("not written"))
	records := collector.Records("written")
	require.Len(t, records, 1)
	require.Equal(t, "WARN", records[0].GetSeverityText())
	require.Equal(t, byte(0x4b), records[0].GetTraceId()[0])
	require.Len(t, collector.Records("without a trace"), 1)
}

type (
	class  string
	count  int
	share  float64
	truth  bool
	number uint16
	named  int
	lists  []class
)

func (named) String() string { return "by its name" }

type secret struct{ text string }

func (secret) LogValue() slog.Value { return slog.AnyValue(class("shown")) }

// A field of any type is exported in the form in which it is logged.
func TestStart_ExportsFieldsAsLogged(t *testing.T) {
	t.Parallel()
	collector := telemetrytest.NewCollector(t)
	var written bytes.Buffer
	sent, err := telemetry.Start(t.Context(), telemetry.Config{
		Endpoint: collector.URL, Gatherer: prometheus.NewRegistry(), Logger: slog.New(slog.NewTextHandler(&written, nil)),
	})
	require.NoError(t, err)
	fields := []any{
		"class", class("validation"), "pointer", new(class("transient")), "none", (*class)(nil), "nothing", nil,
		"count", count(3), "share", share(0.5), "truth", truth(true), "number", number(9), "named", named(1),
		"at", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), "took", 3 * time.Second, "id", uuid.Nil,
		"error", errors.New("it failed"), "secret",
		secret{"x"},
		"classes",
		lists{"a", "b"},
		"group", slog.GroupValue(slog.Any("class", class("inner"))), "channel", make(chan int),
	}
	sent.Logger.Warn("logged", fields...)
	sent.Logger.With(fields...).Warn("with")
	sent.Stop(t.Context())
	for _, message := range []string{"logged", "with"} {
		records := collector.Records(message)
		require.Len(t, records, 1)
		text := records[0].String()
		require.NotContains(t, text, "unhandled", message)
		for key, want := range map[string]string{
			"class": "validation", "pointer": "transient", "named": "by its name", "at": "2026-01-02T03:04:05Z", "took": "3s",
			"id": "00000000-0000-0000-0000-000000000000", "error": "it failed", "secret": "shown",
		} {
			var found string
			for _, a := range records[0].GetAttributes() {
				if a.GetKey() == key {
					found = a.GetValue().GetStringValue()
				}
			}
			require.Equal(t, want, found, "%s: %s", message, key)
		}
	}
}

// The id of a replay run is the id of its trace.
func TestStartRun_TraceIDIsTheRunID(t *testing.T) {
	t.Parallel()
	collector := telemetrytest.NewCollector(t)
	sent, err := telemetry.Start(t.Context(), telemetry.Config{
		Endpoint: collector.URL, Gatherer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	run := uuid.Must(uuid.NewV7())
	telemetry.StartRun(t.Context(), sent.Tracer, run).End()
	sent.Stop(t.Context())
	span := telemetry.RunSpanContext(run)
	require.Equal(t, strings.ReplaceAll(run.String(), "-", ""), span.TraceID().String())
	spans := collector.Spans("replay run")
	require.Len(t, spans, 1)
	traceID, spanID := span.TraceID(), span.SpanID()
	require.Equal(t, traceID[:], spans[0].GetTraceId())
	require.Equal(t, spanID[:], spans[0].GetSpanId())
}

// BenchmarkTelemetry_Disabled measures the cost of telemetry without an endpoint for a submission and a delivery:
// extracting a trace context, starting three spans, and injecting the context.
func BenchmarkTelemetry_Disabled(b *testing.B) {
	for name, parent := range map[string]string{"without a trace": "", "with a trace": parent} {
		b.Run(name, func(b *testing.B) {
			tracer := telemetry.Tracer(nil)
			b.ReportAllocs()
			for b.Loop() {
				ctx := telemetry.Extract(context.Background(), parent, "")
				for range 3 {
					var span trace.Span
					ctx, span = tracer.Start(ctx, "span", trace.WithSpanKind(trace.SpanKindClient)) //nolint:fatcontext // three deep
					if span.IsRecording() {
						b.Fatal("the span records")
					}
					span.End()
				}
				telemetry.Inject(ctx)
			}
		})
	}
}
