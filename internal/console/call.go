package console

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/background"
)

// heading returns the heading of the page that shows a problem.
func heading(p *api.Problem) string {
	switch p.Status {
	case http.StatusNotFound:
		return "Not found"
	case http.StatusForbidden:
		return "Permission denied"
	case http.StatusConflict:
		return "Changed meanwhile"
	}
	if p.Status == http.StatusServiceUnavailable && strings.Contains(p.Detail, "database") {
		return "The database does not answer"
	}
	return cmp.Or(p.Title, http.StatusText(p.Status))
}

// call calls an operation of the API as the viewer. It returns an *api.Problem if the API refuses, and an
// *api.ApprovalRequestedError if the operation needs approval.
func call[In, Out any](in *request, operation api.Operation[In, Out], input In) (*Out, error) {
	r, err := operation.Request(&input)
	if err != nil {
		return nil, err
	}
	answer, err := in.exchange(r)
	if err != nil {
		return nil, err
	}
	return operation.Answer(answer.status, answer.header, answer.Bytes())
}

// exchange sends a request to the API as the viewer, and returns the response. If the API redirects, exchange returns a
// Problem with status 404.
func (in *request) exchange(r *api.Request) (*response, error) {
	answer, err := in.console.send(in.Context(), in.Request, r)
	if err != nil {
		return nil, err
	}
	in.frame.noteAsOf(answer.header)
	if answer.status >= http.StatusMultipleChoices && answer.status < http.StatusBadRequest {
		return nil, &api.Problem{Status: http.StatusNotFound, Detail: "there is no " + r.Path}
	}
	return answer, nil
}

// callIfAllowed is like call, for data that the viewer may not be allowed to see. It returns false and an empty answer
// if the API answers 403 or 404.
func callIfAllowed[In, Out any](in *request, operation api.Operation[In, Out], input In) (*Out, bool, error) {
	out, err := call(in, operation, input)
	if problem, ok := errors.AsType[*api.Problem](err); ok && (problem.Status == http.StatusForbidden ||
		problem.Status == http.StatusNotFound) {
		return new(Out), false, nil
	}
	if err != nil {
		return new(Out), false, err
	}
	return out, true, nil
}

// address returns the address of an operation in the API, for texts to copy.
func address[In, Out any](operation api.Operation[In, Out], input In) string {
	r, err := operation.Request(&input)
	if err != nil {
		return operation.Path // unreachable: the page has called the operation
	}
	return r.Path
}

// inParallel runs up to four requests at once.
func inParallel(requests ...func() error) error { return background.Together(4, requests...) }

// response records an answer of the API.
type response struct {
	bytes.Buffer

	header http.Header
	status int
}

// Header implements http.ResponseWriter.
func (r *response) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *response) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
}

// send sends a request to the API in this process as the principal in ctx. The audit trail takes the address and the
// user agent from from, the browser's request. A panic becomes an error: callers such as live renderings run outside of
// net/http, which would recover a panic.
func (c *Console) send(ctx context.Context, from *http.Request, sent *api.Request) (answer *response, err error) {
	answer = &response{header: http.Header{}}
	if err := c.serve(ctx, from, sent, answer); err != nil {
		return nil, err
	}
	return answer, nil
}

// serve is like send, but the API writes its answer to w.
func (c *Console) serve(ctx context.Context, from *http.Request, sent *api.Request, w http.ResponseWriter) (err error) {
	defer func() {
		p := recover()
		if p == http.ErrAbortHandler { //nolint:errorlint,err113 // as net/http compares it
			panic(p)
		}
		if p != nil {
			err = fmt.Errorf("%s %s: %w", sent.Method, sent.Path, background.Panicked(p))
		}
	}()
	r, err := http.NewRequestWithContext(ctx, sent.Method, sent.Path, bytes.NewReader(sent.Body))
	if err != nil {
		return err
	}
	r.RemoteAddr, r.Host = from.RemoteAddr, from.Host
	r.Header.Set("User-Agent", "console, "+from.UserAgent())
	if sent.Body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	c.API.ServeHTTP(w, r)
	return nil
}
