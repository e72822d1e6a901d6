package delivery

import (
	"context"
	"errors"
	"strings"

	"github.com/riverqueue/river"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/telemetry"
)

// startSpan starts the span of an attempt, in the trace of the message's submission. A redelivery may come weeks later.
// So its span is linked to the submission and to the replay run or request that asked for the redelivery and, if dlqd
// exports traces, it starts a trace of its own.
func (w *Worker) startSpan(ctx context.Context, job *river.Job[Args], meta *metadata) (context.Context, trace.Span) {
	ctx = telemetry.Extract(ctx, meta.Parent, meta.State)
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer)}
	if meta.EntryID != nil {
		if submission := trace.SpanContextFromContext(ctx); submission.IsValid() {
			options = append(options, telemetry.Link(submission, "submission"))
		}
		if meta.RunID != nil {
			options = append(options, telemetry.Link(telemetry.RunSpanContext(*meta.RunID), "replay run"))
		}
		parent, state, _ := strings.Cut(meta.Trace, " ")
		if replay := trace.SpanContextFromContext(telemetry.Extract(context.Background(), parent, state)); replay.IsValid() {
			options = append(options, telemetry.Link(replay, "replay"))
		}
		if telemetry.Exports(w.config.Tracer) { // else the receiver gets the trace context unchanged
			ctx = telemetry.WithNewTrace(ctx)
		}
	}
	ctx, span := w.config.Tracer.Start(ctx, "process "+job.Queue, options...)
	if !span.IsRecording() {
		return ctx, span
	}
	span.SetAttributes(
		attribute.String("messaging.system", "river"), attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.destination.name", job.Queue),
		attribute.String("messaging.message.id", job.Args.MessageID), attribute.String("dlqd.kind", job.Args.EventKind),
		attribute.Int64("dlqd.job_id", job.ID), attribute.Int("dlqd.attempt", job.Attempt),
	)
	if meta.EntryID != nil {
		span.SetAttributes(attribute.String("dlqd.entry_id", meta.EntryID.String()))
	}
	if meta.RunID != nil {
		span.SetAttributes(attribute.String("dlqd.run_id", meta.RunID.String()))
	}
	return ctx, span
}

// endSpan ends an attempt's span. It does not end the span of a held message, so that this span is never exported: the
// message was not sent, and is checked repeatedly.
func endSpan(span trace.Span, outcome string, err error) {
	if outcome == OutcomeHeld {
		return
	}
	if span.IsRecording() {
		span.SetAttributes(attribute.String("dlqd.outcome", outcome))
		markFailed(span, err)
	}
	span.End()
}

// endRequestSpan ends the span of a request. status is 0 if there was no answer.
func endRequestSpan(span trace.Span, destination *policy.Destination, status int, err error) {
	if span.IsRecording() {
		span.SetAttributes(attribute.String("http.request.method", "POST"),
			attribute.String("url.full", destination.ShownURL()), attribute.String("dlqd.destination", destination.Name))
		if status != 0 {
			span.SetAttributes(attribute.Int("http.response.status_code", status))
		}
		markFailed(span, err)
	}
	span.End()
}

// markFailed records the type of an error in a span. It leaves out the error's message, in which a receiver may repeat
// the payload.
func markFailed(span trace.Span, err error) {
	if err == nil {
		return
	}
	span.SetStatus(codes.Error, "")
	if structured, ok := errors.AsType[*riverdlq.Error](err); ok {
		span.SetAttributes(attribute.String("error.type", structured.Type))
	}
}
