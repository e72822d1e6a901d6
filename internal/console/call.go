package console

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/background"
)

// Problem is an error answer of the API (RFC 9457).
type Problem struct { //nolint:errname // the RFC's word
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Errors []struct {
		Location string `json:"location"`
		Message  string `json:"message"`
		Value    any    `json:"value"`
	} `json:"errors"`
}

func (p *Problem) Error() string {
	text := p.Detail
	for _, e := range p.Errors {
		if e.Message != "" && !strings.Contains(text, e.Message) {
			text += "; " + strings.TrimPrefix(strings.TrimPrefix(e.Location, "body."), "query.") + ": " + e.Message
		}
	}
	return text
}

func (p *Problem) heading() string {
	switch p.Status {
	case http.StatusNotFound:
		return "Not found"
	case http.StatusForbidden:
		return "Permission denied"
	case http.StatusConflict:
		return "Changed meanwhile"
	case http.StatusServiceUnavailable:
		return "Temporarily unavailable"
	}
	return cmp.Or(p.Title, http.StatusText(p.Status))
}

// approvalRequiredError is returned for an operation that was not executed: a request for its
// approval was made instead.
type approvalRequiredError struct{ api.Asked }

func (e *approvalRequiredError) Error() string {
	return "requires a second person: approval " + e.Approval.ID.String()
}

// get reads from the API and decodes the answer into out.
func (in *request) get(path string, query url.Values, out any) error {
	return in.call(http.MethodGet, path, query, nil, out)
}

// getIfAllowed is get for data that the viewer may not be allowed to see. It returns false if the API
// answers 403 or 404.
func (in *request) getIfAllowed(path string, query url.Values, out any) (bool, error) {
	err := in.get(path, query, out)
	if problem, ok := errors.AsType[*Problem](err); ok && (problem.Status == http.StatusForbidden ||
		problem.Status == http.StatusNotFound) {
		return false, nil
	}
	return err == nil, err
}

// inParallel runs up to four requests at once.
func inParallel(requests ...func() error) error { return background.Together(4, requests...) }

// post calls an operation that changes something. It returns an *approvalRequiredError if the operation needs
// approval.
func (in *request) post(path string, body, out any) error {
	return in.call(http.MethodPost, path, nil, body, out)
}

func (in *request) call(method, path string, query url.Values, body, out any) error {
	answer, err := in.console.call(in.Context(), in.Request, method, path, query, body)
	if err != nil {
		return err
	}
	if answer.status >= http.StatusMultipleChoices && answer.status < http.StatusBadRequest {
		return &Problem{Status: http.StatusNotFound, Detail: "there is no " + path}
	}
	if answer.status >= http.StatusBadRequest && (answer.status != http.StatusServiceUnavailable ||
		strings.Contains(answer.header.Get("Content-Type"), "problem")) {
		problem := &Problem{}
		if err := json.Unmarshal(answer.Bytes(), problem); err != nil {
			return err
		}
		problem.Status = answer.status
		return problem
	}
	if answer.status == http.StatusAccepted && answer.header.Get("Location") != "" {
		e := &approvalRequiredError{}
		if err := json.Unmarshal(answer.Bytes(), &e.Asked); err == nil && e.Approval != nil {
			return e
		}
	}
	if out == nil || answer.Len() == 0 {
		return nil
	}
	return json.Unmarshal(answer.Bytes(), out)
}

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

// call runs an operation of the API in this process as the principal in ctx. The audit trail takes
// the address and the user agent from the browser's request, from. A panic becomes an error:
// callers such as live renderings run outside of net/http, which would recover it.
func (c *Console) call(ctx context.Context, from *http.Request, method, path string, query url.Values,
	body any,
) (answer *response, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s %s: %w", method, path, background.Panicked(p))
		}
	}()
	var raw []byte
	if body != nil {
		if raw, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	if strings.Contains(path, "//") || strings.Contains(path+"/", "/./") || strings.Contains(path+"/", "/../") ||
		strings.HasSuffix(path, "/") {
		return nil, &Problem{
			Status: http.StatusUnprocessableEntity, Title: "Invalid name", Detail: "a name must not be empty, \".\" or \"..\"",
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, path, bytes.NewReader(raw)) //nolint:gosec // a handler of this process serves it
	if err != nil {
		return nil, err
	}
	r.URL.RawQuery = query.Encode()
	r.RemoteAddr, r.Host = from.RemoteAddr, from.Host
	r.Header.Set("User-Agent", "console, "+from.UserAgent())
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	answer = &response{header: http.Header{}}
	c.API.ServeHTTP(answer, r)
	return answer, nil
}
