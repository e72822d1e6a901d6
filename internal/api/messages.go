package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/telemetry"
)

// MaxBatch is the maximum number of messages in a batch.
const MaxBatch = 1000

// retryAfterSeconds is when a client should retry what was refused for lack of room: a group is
// committed every few milliseconds.
const retryAfterSeconds = "1"

// Submission is a message as a client submits it.
type Submission struct {
	MessageID    string                     `json:"messageId,omitempty" maxLength:"128" pattern:"^[A-Za-z0-9][A-Za-z0-9._:~@+=-]*$" doc:"Identifies the message: the same id again does no second work. Made if absent."`
	Queue        string                     `json:"queue" doc:"Queue, as the policy names it." example:"default"`
	Kind         string                     `json:"kind" maxLength:"127" pattern:"^[A-Za-z0-9_-]+(\\.[A-Za-z0-9_-]+)*$" doc:"What happened, as words joined by dots." example:"payment.captured"`
	Payload      json.RawMessage            `json:"payload" doc:"Any JSON. It is the body of the delivery."`
	Source       string                     `json:"source,omitempty" maxLength:"255" doc:"Who sends it." example:"checkout"`
	SubscriberID string                     `json:"subscriberId,omitempty" maxLength:"255" doc:"Whom it concerns." example:"sub_81"`
	Priority     int                        `json:"priority,omitempty" minimum:"1" maximum:"4" default:"2" doc:"1 is the most urgent, 4 the least."`
	Tags         []string                   `json:"tags,omitempty" maxItems:"32" doc:"Three or more letters, digits, _ and - each."`
	Headers      map[string]string          `json:"headers,omitempty" doc:"Sent to the destination as they are."`
	Metadata     map[string]json.RawMessage `json:"metadata,omitempty" doc:"Kept with the message, and not sent."`
	ScheduledAt  string                     `json:"scheduledAt,omitempty" format:"date-time" doc:"Not to be delivered before."`
	OrderingKey  string                     `json:"orderingKey,omitempty" maxLength:"255" doc:"In queues that keep the order, messages with the same key are delivered in the order of their submission." example:"order_81"`
}

// SubmissionBatch is a batch as a client submits it.
type SubmissionBatch struct {
	Messages []Submission `json:"messages" minItems:"1" maxItems:"1000" doc:"Stored together, or not at all."`
}

// Accepted is the response to a submission.
type Accepted struct {
	MessageID string           `json:"messageId" doc:"Identifies the message."`
	JobID     int64            `json:"jobId" doc:"River's job that delivers it."`
	Duplicate bool             `json:"duplicate,omitempty" doc:"The same message was submitted before; nothing was stored now."`
	Position  *ingest.Position `json:"position,omitempty" doc:"Where the first one is, for a duplicate."`
}

type submitInput struct {
	Trace

	RawBody []byte `contentType:"application/json"`
}

// Trace documents the W3C trace context of a request; [service.observe] reads it. An invalid one is
// ignored, because it is no fault of the message.
type Trace struct {
	TraceParent string `header:"traceparent" doc:"W3C trace context: deliveries continue the trace."`
	TraceState  string `header:"tracestate" doc:"W3C trace context; kept up to 512 characters."`
}

// traceOf returns the trace context that the deliveries of a submission continue.
func traceOf(ctx context.Context) ingest.Trace {
	parent, state := telemetry.Inject(ctx)
	return ingest.Trace{Parent: parent, State: state}
}

type submitOutput struct {
	Status int
	Body   Accepted
}

type batchOutput struct {
	Status int
	Body   struct {
		Messages []Accepted `json:"messages" doc:"In the order of the request."`
	}
}

type messageInput struct {
	MessageID string `path:"messageId" maxLength:"128" doc:"The message." example:"0199f2b0-8f6e-7cc3-9d1b-3b1f5a0e7f11"`
}

type messageOutput struct{ Body ingest.Position }

const messageExample = "0199f2b0-8f6e-7cc3-9d1b-3b1f5a0e7f11"

var submissionExample = map[string]any{
	"queue": "default", "kind": "payment.captured", "source": "checkout",
	"payload": map[string]any{"paymentId": "pay_1029", "amount": 4200, "currency": "EUR"},
}

// duplicates describes how long a messageId is remembered.
const duplicates = "The same messageId with the same content does no second work and answers 200 with the first one's state; with other content it answers 409. " +
	"This holds while River keeps the message's job (24 hours after it completed, 7 days after it failed, by River's defaults) and, beyond that, while the message has an open dead letter."

// unworked describes when messages are refused because no dlqd process would deliver them.
const unworked = " On a River that an application owns, a message for a queue that no dlqd process delivers answers 422, with the queues that are delivered, " +
	"or 503 with Retry-After where one did a few minutes ago: the application's clients would fetch it, and fail."

func (s *service) registerMessages(api huma.API) {
	submit := huma.Operation{
		OperationID: "submit-message", Method: http.MethodPost, Path: "/api/messages", Tags: []string{messagesTag},
		Summary:     "Submit a message",
		Description: "Answers 202 once the message is on disk. " + duplicates + unworked,
		Errors:      []int{400, 408, 409, 413, 422, 429, 503}, DefaultStatus: http.StatusAccepted, MaxBodyBytes: s.MaxBodyBytes, SkipValidateBody: true,
	}
	example(&submit, http.StatusAccepted, Accepted{MessageID: messageExample, JobID: 41})
	huma.Register(api, submit, s.submit)
	alsoAnswers(api, submit.Path, http.StatusOK, http.StatusAccepted, "The same message was submitted before", Accepted{
		MessageID: messageExample, JobID: 41, Duplicate: true,
		Position: &ingest.Position{MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3},
	})
	describeBody[Submission](api, submit.Path, "The message.", submissionExample)

	batch := huma.Operation{
		OperationID: "submit-batch", Method: http.MethodPost, Path: "/api/messages/batch", Tags: []string{messagesTag},
		Summary:     "Submit up to 1,000 messages, all or none",
		Description: "One transaction: if one message is invalid or in conflict, none is stored. " + duplicates + unworked,
		Errors:      []int{400, 408, 409, 413, 422, 429, 503}, DefaultStatus: http.StatusAccepted, MaxBodyBytes: s.MaxBodyBytes * maxBatchBodies, SkipValidateBody: true,
	}
	example(&batch, http.StatusAccepted, map[string]any{"messages": []Accepted{{MessageID: messageExample, JobID: 41}}})
	huma.Register(api, batch, s.submitBatch)
	alsoAnswers(api, batch.Path, http.StatusOK, http.StatusAccepted, "All of them were submitted before", map[string]any{"messages": []Accepted{{
		MessageID: messageExample, JobID: 41, Duplicate: true,
		Position: &ingest.Position{MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3},
	}}})
	describeBody[SubmissionBatch](api, batch.Path, "The messages.", map[string]any{"messages": []any{submissionExample}})

	get := huma.Operation{
		OperationID: "get-message", Method: http.MethodGet, Path: "/api/messages/{messageId}", Tags: []string{messagesTag},
		Summary: "Where a message is now",
		Errors:  []int{404, 422, 503},
	}
	example(&get, http.StatusOK, ingest.Position{MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3})
	huma.Register(api, get, s.getMessage)
}

func (s *service) submit(ctx context.Context, in *submitInput) (*submitOutput, error) {
	msg, err := message.Parse(in.RawBody)
	if err != nil {
		s.count("", "invalid", 1)
		return nil, s.submitProblem(ctx, err, "")
	}
	if err := mayNotSubmit(ctx, msg.Queue, msg.EventKind, msg.Source); err != nil {
		s.count("", "forbidden", 1)
		return nil, err
	}
	receipt, err := s.Ingester.Submit(ctx, msg, traceOf(ctx))
	if err != nil {
		s.count(msg.Queue, outcomeOf(err), 1)
		return nil, s.submitProblem(ctx, err, msg.MessageID)
	}
	out := &submitOutput{Status: http.StatusAccepted, Body: Accepted{MessageID: receipt.MessageID, JobID: receipt.JobID}}
	if !receipt.Duplicate {
		s.count(msg.Queue, "accepted", 1)
		return out, nil
	}
	s.count(msg.Queue, "duplicate", 1)
	out.Status, out.Body.Duplicate = http.StatusOK, true
	if out.Body.Position, err = s.Ingester.Lookup(ctx, msg.MessageID); err != nil && !errors.Is(err, ingest.ErrNoMessage) {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

func (s *service) submitBatch(ctx context.Context, in *submitInput) (*batchOutput, error) {
	messages, err := message.ParseBatch(in.RawBody, MaxBatch, s.MaxBodyBytes)
	if err != nil {
		s.count("", "invalid", 1)
		return nil, s.submitProblem(ctx, err, "")
	}
	for _, msg := range messages {
		if err := mayNotSubmit(ctx, msg.Queue, msg.EventKind, msg.Source); err != nil {
			s.count("", "forbidden", len(messages))
			return nil, err
		}
	}
	receipts, err := s.Ingester.SubmitBatch(ctx, messages, traceOf(ctx))
	if err != nil {
		s.count(messages[0].Queue, outcomeOf(err), len(messages))
		return nil, s.submitProblem(ctx, err, "")
	}
	out := &batchOutput{Status: http.StatusOK}
	out.Body.Messages = make([]Accepted, len(receipts))
	for i, r := range receipts {
		out.Body.Messages[i] = Accepted{MessageID: r.MessageID, JobID: r.JobID, Duplicate: r.Duplicate}
		if r.Duplicate {
			s.count(messages[i].Queue, "duplicate", 1)
			if out.Body.Messages[i].Position, err = s.Ingester.Lookup(ctx, r.MessageID); err != nil && !errors.Is(err, ingest.ErrNoMessage) {
				return nil, s.problem(ctx, err)
			}
			continue
		}
		out.Status = http.StatusAccepted // at least one message was stored
		s.count(messages[i].Queue, "accepted", 1)
	}
	return out, nil
}

func (s *service) getMessage(ctx context.Context, in *messageInput) (*messageOutput, error) {
	position, err := s.Ingester.Lookup(ctx, in.MessageID)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &messageOutput{Body: *position}, nil
}

// count counts submissions. The queue of an invalid submission is not a label: clients could create
// any number of them.
func (s *service) count(queue, outcome string, messages int) {
	if outcome == "invalid" {
		queue = ""
	}
	s.Metrics.Submitted.WithLabelValues(queue, outcome).Add(float64(messages))
}

func outcomeOf(err error) string {
	var unknown *ingest.UnknownQueueError
	var conflict *ingest.ConflictError
	var refused *ingest.RefusedError
	var open *ingest.OpenError
	var unworked *ingest.UnworkedQueueError
	var away *ingest.AwayError
	switch {
	case errors.As(err, &unknown):
		return "invalid"
	case errors.As(err, &unworked):
		return "unworked"
	case errors.As(err, &away):
		return "away"
	case errors.As(err, &conflict):
		return "conflict"
	case errors.As(err, &open):
		return "open"
	case errors.As(err, &refused):
		return "refused"
	case errors.Is(err, ingest.ErrFull):
		return "overflow"
	default:
		return "error"
	}
}

// submitProblem returns the response to a failed submission. It names the invalid fields. If the
// outcome is uncertain, it names the messageId with which a retry settles it.
func (s *service) submitProblem(ctx context.Context, err error, messageID string) error {
	var invalid *message.InvalidError
	var unknown *ingest.UnknownQueueError
	var conflict *ingest.ConflictError
	var refused *ingest.RefusedError
	var open *ingest.OpenError
	var unworked *ingest.UnworkedQueueError
	var away *ingest.AwayError
	switch {
	case errors.As(err, &open):
		return notNow(open, open.RetryAfter)
	case errors.As(err, &away):
		if away.Err != nil {
			s.Logger.ErrorContext(ctx, "submission refused", "queue", away.Queue, "error", away.Err)
		}
		return notNow(away, away.RetryAfter)
	case errors.As(err, &invalid):
		details := make([]error, len(invalid.Fields))
		for i, f := range invalid.Fields {
			location := "body"
			if f.Field != "" {
				location += "." + f.Field
			}
			details[i] = &huma.ErrorDetail{Location: location, Message: f.Message}
		}
		status := http.StatusUnprocessableEntity
		if invalid.Malformed {
			status = http.StatusBadRequest
		}
		return huma.NewError(status, invalid.Error(), details...)
	case errors.As(err, &unknown):
		p := access.From(ctx)
		unknown.Known = slices.DeleteFunc(slices.Clone(unknown.Known), func(queue string) bool { return !p.MayIn(access.Sender, queue) })
		return huma.Error422UnprocessableEntity("invalid message: "+unknown.Error(),
			&huma.ErrorDetail{Location: locate("queue", unknown.Index, messageID), Message: unknown.Error(), Value: unknown.Queue})
	case errors.As(err, &unworked):
		return huma.Error422UnprocessableEntity("message refused: "+unworked.Error()+"; nothing was stored",
			&huma.ErrorDetail{Location: locate("queue", unworked.Index, messageID), Message: "is not delivered", Value: unworked.Queue})
	case errors.As(err, &conflict):
		if !access.From(ctx).MayEverywhere(access.Reader) { // the job may be outside the sender's scope
			conflict.JobID = 0
		}
		return huma.Error409Conflict(conflict.Error(), &huma.ErrorDetail{Location: locate("messageId", conflict.Index, messageID), Message: "has been used for other content", Value: conflict.MessageID})
	case errors.As(err, &refused):
		return huma.Error422UnprocessableEntity(refused.Error())
	case errors.Is(err, ingest.ErrFull):
		return huma.ErrorWithHeaders(huma.Error429TooManyRequests(err.Error()+"; send it again later"), retryAfter())
	case errors.Is(err, ingest.ErrStopped):
		return huma.ErrorWithHeaders(huma.Error503ServiceUnavailable("dlqd is stopping; nothing was stored"), retryAfter())
	case errors.Is(err, ingest.ErrUncertain):
		s.Logger.ErrorContext(ctx, "submission uncertain", "message_id", messageID, "error", err)
		detail := ingest.ErrUncertain.Error()
		if messageID != "" {
			detail += " (" + messageID + ")"
		}
		return huma.ErrorWithHeaders(huma.Error503ServiceUnavailable(detail, &huma.ErrorDetail{Location: "body.messageId", Message: "settles whether it was stored", Value: messageID}), retryAfter())
	}
	return s.problem(ctx, err)
}

// locate returns the location of a message's field. An empty messageId means that the message is
// part of a batch.
func locate(field string, index int, messageID string) string {
	if messageID == "" {
		return fmt.Sprintf("body.messages[%d].%s", index, field)
	}
	return "body." + field
}

// notNow returns the response to a submission that was not stored and can be retried later.
func notNow(err error, after time.Duration) error {
	return huma.ErrorWithHeaders(huma.Error503ServiceUnavailable(err.Error()+"; nothing was stored"), http.Header{"Retry-After": {door.Seconds(after)}})
}

func retryAfter() http.Header { return http.Header{"Retry-After": {retryAfterSeconds}} }
