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

// retryAfterSeconds is the usual value of Retry-After in answers that refuse a request for now. It is small, because
// quota becomes free within milliseconds, when a group of messages is committed.
const retryAfterSeconds = "1"

// Submission is a message in the form in which a client submits it.
type Submission struct {
	MessageID    string                     `json:"messageId,omitempty" maxLength:"128" pattern:"^[A-Za-z0-9][A-Za-z0-9._:~@+=-]*$" doc:"Id of the message. A second message with the same id is a duplicate and is not delivered. Generated if absent."`
	Queue        string                     `json:"queue" doc:"Name of a queue of the policy." example:"default"`
	Kind         string                     `json:"kind" maxLength:"127" pattern:"^[A-Za-z0-9_-]+(\\.[A-Za-z0-9_-]+)*$" doc:"Kind of the event: words joined by dots." example:"payment.captured"`
	Payload      json.RawMessage            `json:"payload" doc:"Body of the delivery: any JSON."`
	Source       string                     `json:"source,omitempty" maxLength:"255" doc:"Sender of the message." example:"checkout"`
	SubscriberID string                     `json:"subscriberId,omitempty" maxLength:"255" doc:"Subscriber whom the message concerns." example:"sub_81"`
	Priority     int                        `json:"priority,omitempty" minimum:"1" maximum:"4" doc:"1 is the most urgent, 4 the least; 2 if absent."`
	Tags         []string                   `json:"tags,omitempty" maxItems:"32" doc:"Tags of three or more letters, digits, _ and -."`
	Headers      map[string]string          `json:"headers,omitempty" doc:"HTTP headers of the delivery, sent unchanged."`
	Metadata     map[string]json.RawMessage `json:"metadata,omitempty" doc:"Stored with the message, not delivered."`
	ScheduledAt  string                     `json:"scheduledAt,omitempty" format:"date-time" doc:"Earliest time of the delivery."`
	ExpiresAt    string                     `json:"expiresAt,omitempty" format:"date-time" doc:"Time after which the message is out of date. dlqd still delivers it; replay runs can skip its dead letter."`
	OrderingKey  string                     `json:"orderingKey,omitempty" maxLength:"255" doc:"In ordered queues, messages with the same key are delivered in the order of their submission." example:"order_81"`
}

// SubmissionBatch is a batch in the form in which a client submits it.
type SubmissionBatch struct {
	Messages []Submission `json:"messages" minItems:"1" maxItems:"1000" doc:"Messages, which are stored all or none."`
}

// Accepted is the response to a submission.
type Accepted struct {
	MessageID string           `json:"messageId" doc:"Id of the message."`
	JobID     int64            `json:"jobId" doc:"River job that delivers the message."`
	Duplicate bool             `json:"duplicate,omitempty" doc:"Whether the same message was submitted before; then nothing is stored."`
	Position  *ingest.Position `json:"position,omitempty" doc:"For a duplicate: state of the first submission."`
}

// SubmitInput is a message or a batch. The operation decodes the body itself.
type SubmitInput struct {
	Trace

	RawBody []byte `contentType:"application/json"`
}

// Trace documents the W3C trace context of a request, which [service.observe] reads. An invalid trace context is
// ignored, because the message itself may be valid.
type Trace struct {
	TraceParent string `header:"traceparent" doc:"W3C trace context, which deliveries continue."`
	TraceState  string `header:"tracestate" doc:"W3C trace context, stored up to 512 characters."`
}

// traceOf returns the trace context that deliveries of the submission continue.
func traceOf(ctx context.Context) ingest.Trace {
	parent, state := telemetry.Inject(ctx)
	return ingest.Trace{Parent: parent, State: state}
}

func (a *Accepted) status() int {
	if a.Duplicate { // nothing was stored
		return http.StatusOK
	}
	return http.StatusAccepted
}

// BatchOutputBody is the response to a batch.
type BatchOutputBody struct {
	Messages []Accepted `json:"messages" doc:"Results, in the order of the request."`
}

func (b *BatchOutputBody) status() int {
	if slices.ContainsFunc(b.Messages, func(a Accepted) bool { return !a.Duplicate }) {
		return http.StatusAccepted
	}
	return http.StatusOK
}

// MessageInput names a message.
type MessageInput struct {
	MessageID string `path:"messageId" maxLength:"128" doc:"Id of the message." example:"0199f2b0-8f6e-7cc3-9d1b-3b1f5a0e7f11"`
}

// Operations on messages.
var (
	SubmitMessage = Operation[SubmitInput, Accepted]{"submit-message", http.MethodPost, "/api/messages"}
	SubmitBatch   = Operation[SubmitInput, BatchOutputBody]{"submit-batch", http.MethodPost, "/api/messages/batch"}
	GetMessage    = Operation[MessageInput, ingest.Position]{
		"get-message", http.MethodGet, "/api/messages/{messageId}",
	}
)

const messageExample = "0199f2b0-8f6e-7cc3-9d1b-3b1f5a0e7f11"

var submissionExample = map[string]any{
	"queue": "default", "kind": "payment.captured", "source": "checkout",
	"payload": map[string]any{"paymentId": "pay_1029", "amount": 4200, "currency": "EUR"},
}

// duplicates describes how long dlqd recognizes a messageId that was used before.
const duplicates = "A messageId that was used before answers 200 with the state of the first message if the content " +
	"is the same, and 409 if it differs. Neither stores a message. This holds while River keeps the message's job " +
	"(24 hours after it completed, 7 days after it failed, by River's defaults) and, beyond that, while the message " +
	"has an open dead letter."

// undeliveredQueues describes when a message is rejected because no dlqd process delivers its queue.
const undeliveredQueues = " If an application owns River, a message for a queue that no dlqd process delivers is " +
	"rejected, because the application's clients would fetch it and fail: with 422 and the queues that are delivered, " +
	"or with 503 and Retry-After if a process delivered the queue a few minutes ago."

func (s *service) registerMessages(api huma.API) {
	submit := huma.Operation{
		Tags:          []string{messagesTag},
		Summary:       "Submit a message",
		Description:   "Answers 202 once the message is on disk. " + duplicates + undeliveredQueues,
		Errors:        []int{400, 408, 409, 413, 422, 429, 503},
		DefaultStatus: http.StatusAccepted, MaxBodyBytes: s.MaxBodyBytes, SkipValidateBody: true,
	}
	example(&submit, http.StatusAccepted, Accepted{MessageID: messageExample, JobID: 41})
	register(s, api, SubmitMessage, submit, s.submit)
	describeResponse(api, SubmitMessage.Path, http.StatusOK, http.StatusAccepted, "The same message was submitted before",
		Accepted{
			MessageID: messageExample, JobID: 41, Duplicate: true,
			Position: &ingest.Position{
				MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3,
			},
		})
	describeBody[Submission](api, SubmitMessage.Path, "The message.", submissionExample)

	batch := huma.Operation{
		Tags:    []string{messagesTag},
		Summary: "Submit up to 1,000 messages, all or none",
		Description: "One transaction: if one message is invalid or in conflict, none is stored. " +
			duplicates + undeliveredQueues,
		Errors: []int{400, 408, 409, 413, 422, 429, 503}, DefaultStatus: http.StatusAccepted,
		MaxBodyBytes: s.MaxBodyBytes * maxBatchBodies, SkipValidateBody: true,
	}
	example(&batch, http.StatusAccepted, map[string]any{"messages": []Accepted{{MessageID: messageExample, JobID: 41}}})
	register(s, api, SubmitBatch, batch, s.submitBatch)
	describeResponse(api, SubmitBatch.Path, http.StatusOK, http.StatusAccepted, "All messages were submitted before",
		map[string]any{"messages": []Accepted{{
			MessageID: messageExample, JobID: 41, Duplicate: true,
			Position: &ingest.Position{
				MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3,
			},
		}}})
	describeBody[SubmissionBatch](api, SubmitBatch.Path, "The messages.",
		map[string]any{"messages": []any{submissionExample}})

	get := huma.Operation{
		Tags:    []string{messagesTag},
		Summary: "Get the state of a message",
		Errors:  []int{404, 422, 503},
	}
	example(&get, http.StatusOK, ingest.Position{
		MessageID: messageExample, State: ingest.Completed, JobID: 41, Attempt: 1, MaxAttempts: 3,
	})
	register(s, api, GetMessage, get, s.getMessage)
}

type refusedKey struct{}

// submitDirectly answers submit-message without huma's handler, which takes a tenth of the time of a submission. Errors
// still pass through huma's handler, and so do requests that huma may refuse or answer in another format.
func (s *service) submitDirectly(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		read, ok := ctx.(readContext)
		accept := ctx.Header("Accept")
		if url := ctx.URL(); !ok || ctx.Operation().OperationID != SubmitMessage.ID || url.RawQuery != "" ||
			accept != "" && accept != "*/*" && accept != "application/json" ||
			read.body.Len() == 0 || int64(read.body.Len()) >= s.MaxBodyBytes {
			next(ctx)
			return
		}
		var out *Accepted
		err := s.carryOut(ctx.Context(), func(ctx context.Context) (err error) {
			out, err = s.accept(ctx, read.body.Bytes())
			return err
		})
		if err != nil {
			next(huma.WithValue(ctx, refusedKey{}, err))
			return
		}
		ctx.SetHeader("Content-Type", "application/json")
		ctx.SetStatus(out.status())
		_ = api.Marshal(ctx.BodyWriter(), "application/json", out)
	}
}

func (s *service) submit(ctx context.Context, in *SubmitInput) (*Accepted, error) {
	if err, refused := ctx.Value(refusedKey{}).(error); refused {
		return nil, err
	}
	return s.accept(ctx, in.RawBody)
}

// accept stores a message. For a duplicate it returns the state of the earlier message.
func (s *service) accept(ctx context.Context, body []byte) (*Accepted, error) {
	msg, err := message.Parse(body)
	if err != nil {
		return nil, s.rejected(ctx, err, "", "", 1)
	}
	if err := checkSubmit(ctx, msg.Queue, msg.EventKind, msg.Source); err != nil {
		s.count("", "forbidden", 1)
		return nil, err
	}
	receipt, err := s.Ingester.Submit(ctx, msg, traceOf(ctx))
	if err != nil {
		return nil, s.rejected(ctx, err, msg.Queue, msg.MessageID, 1)
	}
	out := &Accepted{MessageID: receipt.MessageID, JobID: receipt.JobID, Duplicate: receipt.Duplicate}
	if !receipt.Duplicate {
		s.count(msg.Queue, "accepted", 1)
		return out, nil
	}
	s.count(msg.Queue, "duplicate", 1)
	if out.Position, err = s.Ingester.Lookup(ctx, msg.MessageID); err != nil && !errors.Is(err, ingest.ErrNoMessage) {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

func (s *service) submitBatch(ctx context.Context, in *SubmitInput) (*BatchOutputBody, error) {
	messages, err := message.ParseBatch(in.RawBody, MaxBatch, s.MaxBodyBytes)
	if err != nil {
		return nil, s.rejected(ctx, err, "", "", 1)
	}
	for _, msg := range messages {
		if err := checkSubmit(ctx, msg.Queue, msg.EventKind, msg.Source); err != nil {
			s.count("", "forbidden", len(messages))
			return nil, err
		}
	}
	receipts, err := s.Ingester.SubmitBatch(ctx, messages, traceOf(ctx))
	if err != nil {
		return nil, s.rejected(ctx, err, messages[0].Queue, "", len(messages))
	}
	out := &BatchOutputBody{make([]Accepted, len(receipts))}
	for i, r := range receipts {
		out.Messages[i] = Accepted{MessageID: r.MessageID, JobID: r.JobID, Duplicate: r.Duplicate}
		if r.Duplicate {
			s.count(messages[i].Queue, "duplicate", 1)
			if out.Messages[i].Position, err = s.Ingester.Lookup(ctx, r.MessageID); err != nil &&
				!errors.Is(err, ingest.ErrNoMessage) {
				return nil, s.problem(ctx, err)
			}
			continue
		}
		s.count(messages[i].Queue, "accepted", 1)
	}
	return out, nil
}

func (s *service) getMessage(ctx context.Context, in *MessageInput) (*ingest.Position, error) {
	position, err := s.Ingester.Lookup(ctx, in.MessageID)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return position, nil
}

// count counts submissions. It leaves the queue of an invalid submission out of the labels, because clients could
// create any number of queue names.
func (s *service) count(queue, outcome string, messages int) {
	if outcome == "invalid" {
		queue = ""
	}
	s.Metrics.Submitted.WithLabelValues(queue, outcome).Add(float64(messages))
}

// rejected counts a failed submission and returns its response.
func (s *service) rejected(ctx context.Context, err error, queue, messageID string, messages int) error {
	outcome, response := s.rejection(ctx, err, messageID)
	s.count(queue, outcome, messages)
	return response
}

// rejection returns the outcome of a failed submission, for the metric, and the response, which names the invalid
// fields. If it is uncertain whether the message was stored, the response names the messageId with which the client can
// retry.
func (s *service) rejection(ctx context.Context, err error, messageID string) (outcome string, response error) {
	var invalid *message.InvalidError
	var unknown *ingest.UnknownQueueError
	var conflict *ingest.ConflictError
	var refused *ingest.RefusedError
	var open *ingest.OpenError
	var unworked *ingest.UnworkedQueueError
	var away *ingest.AwayError
	switch {
	case errors.As(err, &open):
		return "open", retryLater(open, open.RetryAfter)
	case errors.As(err, &away):
		if away.Err != nil {
			s.Logger.ErrorContext(ctx, "submission rejected", "queue", away.Queue, "error", away.Err)
		}
		return "away", retryLater(away, away.RetryAfter)
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
		return "invalid", huma.NewError(status, invalid.Error(), details...)
	case errors.As(err, &unknown):
		p := access.From(ctx)
		unknown.Known = slices.DeleteFunc(slices.Clone(unknown.Known),
			func(queue string) bool { return !p.MayIn(access.Sender, queue) })
		return "invalid", huma.Error422UnprocessableEntity("invalid message: "+unknown.Error(),
			&huma.ErrorDetail{
				Location: locate("queue", unknown.Index, messageID), Message: unknown.Error(), Value: unknown.Queue,
			})
	case errors.As(err, &unworked):
		return "unworked", huma.Error422UnprocessableEntity("message rejected: "+unworked.Error()+"; nothing was stored",
			&huma.ErrorDetail{
				Location: locate("queue", unworked.Index, messageID), Message: "is not delivered", Value: unworked.Queue,
			})
	case errors.As(err, &conflict):
		if !access.From(ctx).MayEverywhere(access.Reader) { // the first job may be outside the sender's scope
			conflict.JobID = 0
		}
		return "conflict", huma.Error409Conflict(conflict.Error(),
			&huma.ErrorDetail{
				Location: locate("messageId", conflict.Index, messageID),
				Message:  "was used for other content", Value: conflict.MessageID,
			})
	case errors.As(err, &refused):
		return "refused", huma.Error422UnprocessableEntity(refused.Error())
	case errors.Is(err, ingest.ErrFull):
		return "overflow", huma.ErrorWithHeaders(huma.Error429TooManyRequests(err.Error()+"; send it again later"),
			retryAfter())
	case errors.Is(err, ingest.ErrStopped):
		return "error", huma.ErrorWithHeaders(huma.Error503ServiceUnavailable("dlqd is stopping; nothing was stored"),
			retryAfter())
	case errors.Is(err, ingest.ErrUncertain):
		s.Logger.ErrorContext(ctx, "submission uncertain", "message_id", messageID, "error", err)
		detail := ingest.ErrUncertain.Error()
		if messageID != "" {
			detail += " (" + messageID + ")"
		}
		return "error", huma.ErrorWithHeaders(huma.Error503ServiceUnavailable(detail,
			&huma.ErrorDetail{Location: "body.messageId", Message: "retry with this messageId", Value: messageID}), retryAfter())
	}
	return "error", s.problem(ctx, err)
}

// locate returns the location of a message's field in the request. If messageId is empty, the message is part of a
// batch.
func locate(field string, index int, messageID string) string {
	if messageID == "" {
		return fmt.Sprintf("body.messages[%d].%s", index, field)
	}
	return "body." + field
}

// retryLater returns the response to a submission that was not stored and can be retried later.
func retryLater(err error, after time.Duration) error {
	return huma.ErrorWithHeaders(huma.Error503ServiceUnavailable(err.Error()+"; nothing was stored"),
		http.Header{"Retry-After": {door.Seconds(after)}})
}

func retryAfter() http.Header { return http.Header{"Retry-After": {retryAfterSeconds}} }
