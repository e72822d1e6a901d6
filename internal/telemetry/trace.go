package telemetry

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"strings"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// maxTraceState is the length, in bytes, to which a tracestate is shortened. W3C Trace Context requires that at least
// this length is propagated.
const maxTraceState = 512

// The headers of W3C Trace Context. They are also the keys in a job's metadata.
const (
	parentHeader = "traceparent"
	stateHeader  = "tracestate"
)

// Tracer returns t. If t is nil, it returns a tracer that only passes on an existing trace context.
func Tracer(t trace.Tracer) trace.Tracer {
	if t == nil {
		return noop.Tracer{}
	}
	return t
}

// Extract returns ctx with the trace context of a traceparent and a tracestate. It ignores a tracestate that is
// invalid. If the traceparent is empty or invalid, Extract adds no trace context.
func Extract(ctx context.Context, parent, state string) context.Context {
	if parent == "" {
		return ctx
	}
	state = shorten(state)
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{parentHeader: parent, stateHeader: state})
}

// maxStateMember is the maximum length, in bytes, of a member that a shortened tracestate keeps. W3C Trace Context
// recommends to drop longer members first, and then members at the end.
const maxStateMember = 128

func shorten(state string) string {
	if len(state) <= maxTraceState {
		return state
	}
	kept := ""
	for member := range strings.SplitSeq(state, ",") {
		if len(strings.TrimSpace(member)) > maxStateMember {
			continue
		}
		if kept != "" {
			member = "," + member
		}
		if len(kept)+len(member) > maxTraceState {
			break
		}
		kept += member
	}
	return kept
}

// WithNewTrace returns ctx for a new trace. The new trace keeps the tracestate of the trace in ctx.
func WithNewTrace(ctx context.Context) context.Context {
	state := trace.SpanContextFromContext(ctx).TraceState()
	return trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{TraceState: state}))
}

// Link returns an option that links a span to another trace. The reason and the tracestate are attributes of the link.
// The tracestate is an attribute because the exporter omits the tracestate of a link.
func Link(to trace.SpanContext, reason string) trace.SpanStartOption {
	attributes := []attribute.KeyValue{attribute.String("dlqd.link", reason)}
	if state := to.TraceState().String(); state != "" {
		attributes = append(attributes, attribute.String("dlqd.tracestate", state))
	}
	return trace.WithLinks(trace.Link{SpanContext: to, Attributes: attributes})
}

// Exports reports whether the spans of a tracer are exported.
func Exports(t trace.Tracer) bool {
	_, off := Tracer(t).(noop.Tracer)
	return !off
}

// Inject returns the trace context of ctx as a traceparent and a tracestate. Both are empty if ctx has no trace
// context.
func Inject(ctx context.Context) (parent, state string) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return "", ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[parentHeader], carrier[stateHeader]
}

// RunSpanContext returns the trace context of a replay run. The id of the trace is the id of the run. So an operator
// finds one by the other, and a redelivery, whose job has the run's id, can be linked to the trace.
func RunSpanContext(run uuid.UUID) trace.SpanContext {
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID(run), SpanID: trace.SpanID(run[8:]), TraceFlags: trace.FlagsSampled,
	})
}

type runKey struct{}

// StartRun starts the span of a replay run, in a new trace that is linked to the trace of ctx.
func StartRun(ctx context.Context, tracer trace.Tracer, run uuid.UUID) trace.Span {
	options := []trace.SpanStartOption{trace.WithNewRoot()}
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: span}))
	}
	_, span := Tracer(tracer).Start(context.WithValue(ctx, runKey{}, run), "replay run", options...) //nolint:spancheck // the caller ends it
	return span                                                                                      //nolint:spancheck // likewise
}

// ids generates the ids of traces and spans. They are random, except for replay runs.
type ids struct{}

func (ids) NewIDs(ctx context.Context) (t trace.TraceID, s trace.SpanID) {
	if run, ok := ctx.Value(runKey{}).(uuid.UUID); ok {
		span := RunSpanContext(run)
		return span.TraceID(), span.SpanID()
	}
	for !t.IsValid() {
		binary.NativeEndian.PutUint64(t[:8], rand.Uint64())
		binary.NativeEndian.PutUint64(t[8:], rand.Uint64())
	}
	return t, ids{}.NewSpanID(ctx, t)
}

func (ids) NewSpanID(context.Context, trace.TraceID) (s trace.SpanID) {
	for !s.IsValid() {
		binary.NativeEndian.PutUint64(s[:], rand.Uint64())
	}
	return s
}
