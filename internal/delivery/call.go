package delivery

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/cause"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// unavailable are the gRPC statuses that correspond to HTTP 5xx: the destination is in trouble.
var unavailable = []string{"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "DATA_LOSS"}

// callsOver returns an HTTP client for gRPC calls. It follows no redirect, because gRPC has none.
func callsOver(transport http.RoundTripper) *http.Client {
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

// call sends a message as the request of a gRPC method. It returns the HTTP status of the answer, or 0 if there was no
// answer. It returns an error if the answer is not gRPC, or if its gRPC status is not OK.
func (w *Worker) call(ctx context.Context, queue *policy.Queue, destination *policy.Destination,
	job *river.Job[Args], meta *metadata, hide func(string) string,
) (status int, err error) {
	target, err := grpc.ParseURL(destination.URL)
	if err != nil {
		return 0, requestError(destination, err)
	}
	method, message, err := w.requestOf(ctx, destination, target, job)
	if err != nil {
		return 0, unmapped(ctx, destination, err, hide)
	}
	request, err := newRequest(ctx, destination, target.URL(), message, job, meta)
	if err != nil {
		return 0, requestError(destination, err)
	}
	grpc.Prepare(request, message)
	response, err := w.calls.Do(request)
	if err != nil {
		return 0, transportError(ctx, destination, grpc.DeadlineError(ctx, err), hide)
	}
	defer func() { _ = response.Body.Close() }()
	switch answered := grpc.IsAnswer(response); {
	case !answered && response.StatusCode >= http.StatusMultipleChoices: // from a proxy
		return response.StatusCode, w.judge(ctx, queue, destination, job, response, hide)
	case !answered:
		failure := answerError(destination, response, nil, hide)
		failure.Message += ": the answer is not gRPC"
		return response.StatusCode, failure
	}
	answers, outcome, err := grpc.ReadAnswer(response, cause.MaxBytes)
	switch {
	case err != nil:
		return response.StatusCode, transportError(ctx, destination, grpc.DeadlineError(ctx, err), hide)
	case !outcome.OK():
		reportVersion(ctx, meta, grpc.Metadata(response, versionHeader))
		failure := callError(destination, outcome, hide)
		if class := riverdlq.Class(grpc.Metadata(response, "X-Error-Class")); slices.Contains(riverdlq.Classes(), class) {
			failure.Class = class
		}
		if outcome.RetryDelay != nil {
			job.Args.retryAfter = outcome.RetryDelay
		}
		return response.StatusCode, failure
	}
	reportVersion(ctx, meta, grpc.Metadata(response, versionHeader))
	var document []byte
	if len(answers) == 1 && answers[0] != nil {
		document = method.Answer(answers[0])
	}
	return response.StatusCode, w.success(ctx, job, queue, destination, response, document, hide)
}

// requestOf returns the method of a gRPC destination, and a message encoded as that method's request. If the message
// does not fit a cached description of the method, requestOf asks the server for the description again.
func (w *Worker) requestOf(ctx context.Context, destination *policy.Destination, target *grpc.Target,
	job *river.Job[Args],
) (method *grpc.Method, request []byte, err error) {
	if method = destination.Method; method != nil {
		request, err = method.Request(job.Args.Body())
		return method, request, err
	}
	method, kept, err := w.reflected.Method(ctx, w.calls, target, false)
	if err != nil {
		return nil, nil, err
	}
	if request, err = method.Request(job.Args.Body()); err == nil || !kept {
		return method, request, err
	}
	// The description of the method was cached, and the server may have been replaced since by one with another
	// description. Fetch the description again.
	if method, _, err = w.reflected.Method(ctx, w.calls, target, true); err != nil {
		return nil, nil, err
	}
	request, err = method.Request(job.Args.Body())
	return method, request, err
}

// unmapped returns the error of a message that was not sent because it could not be encoded as a request: the payload
// does not fit the method, the method's descriptor cannot be used, or the server did not describe the method.
func unmapped(ctx context.Context, destination *policy.Destination, err error, hide func(string) string) error {
	if _, ok := errors.AsType[*grpc.MappingError](err); ok {
		return &riverdlq.Error{
			Type: TypeRequest, Class: riverdlq.ClassMalformed, Message: excerpt(hide(err.Error())),
			Context: contextOf(destination),
		}
	}
	if _, ok := errors.AsType[*grpc.DescriptorError](err); ok {
		return &riverdlq.Error{
			Type: TypeDescriptor, Class: riverdlq.ClassCodeBug, Message: excerpt(hide(err.Error())),
			Context: contextOf(destination),
		}
	}
	if status, ok := errors.AsType[*grpc.StatusError](err); ok {
		return callError(destination, status, hide)
	}
	return transportError(ctx, destination, grpc.DeadlineError(ctx, err), hide)
}

// callError returns the error of a call to which the server answered with a gRPC status other than OK.
func callError(destination *policy.Destination, status *grpc.StatusError, hide func(string) string) *riverdlq.Error {
	answer := cause.Answer{Code: status.Reason, Body: []byte(status.Message), Hide: hide}
	found := answer.Cause()
	failure := &riverdlq.Error{
		Type:    cmp.Or(found.Type, "GRPC_"+status.Name),
		Code:    cmp.Or(found.Code, status.Name),
		Title:   found.Title,
		Message: status.Name,
		Context: contextOf(destination),
	}
	if text := found.String(); text != "" {
		failure.Message += ": " + text
	}
	failure.Context["grpcStatus"] = status.Name
	failure.Context["body"] = excerpt(hide(status.Message))
	if status.RetryDelay != nil {
		failure.Context["retryAfterSeconds"] = int(status.RetryDelay.Seconds())
	}
	return failure
}

// contextOf returns the part of an error's context that the errors of all deliveries have.
func contextOf(destination *policy.Destination) map[string]any {
	return map[string]any{"destination": destination.Name, "url": destination.ShownURL()}
}
