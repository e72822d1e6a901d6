package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"

	"github.com/danielgtaylor/huma/v2"
)

// Operation is an operation of the API. In has its parameters and its body, in the form that huma reads. Out is the
// body of its answer. The API registers an operation by the same value with which the console and the command line call
// it. So code that uses a former name of a field does not compile.
//
// The methods of Operation call functions without type parameters, because the compiler would copy generic code for
// each of about a hundred operations.
type Operation[In, Out any] struct{ ID, Method, Path string }

// None is the input of an operation without parameters and body.
type None = struct{}

// Request is a request for an operation. It has neither the address of the API nor the caller's credentials.
type Request struct {
	Method string
	Path   string // with the query
	Body   []byte // JSON; nil for no body
}

// Request returns the request for an operation. It omits parameters with their zero value, so the API's defaults apply
// to them.
func (o Operation[In, Out]) Request(in *In) (*Request, error) {
	return newRequest(o.Method, o.Path, in)
}

// newRequest returns a request with the parameters and the body of in, which is a pointer to the input of an operation.
// It returns a Problem if a parameter of the path is empty, "." or "..".
func newRequest(method, path string, in any) (*Request, error) {
	r := &Request{Method: method, Path: path}
	query, input := url.Values{}, reflect.ValueOf(in).Elem()
	for _, field := range reflect.VisibleFields(input.Type()) {
		value := input.FieldByIndex(field.Index)
		if name := field.Tag.Get("path"); name != "" {
			text := parameterText(value)
			if text == "" || text == "." || text == ".." { // the path would name another operation
				return nil, &Problem{
					Status: http.StatusUnprocessableEntity, Title: "Invalid name",
					Detail: "a name must not be empty, \".\" or \"..\"",
				}
			}
			r.Path = strings.Replace(r.Path, "{"+name+"}", url.PathEscape(text), 1)
		}
		if name := field.Tag.Get("query"); name != "" && !value.IsZero() {
			query.Set(name, parameterText(value))
		}
		switch {
		case field.Name == "RawBody":
			r.Body = value.Bytes()
		case field.Name == "Body" && (value.Kind() != reflect.Pointer || !value.IsNil()):
			var err error
			if r.Body, err = encodeBody(value.Interface()); err != nil {
				return nil, err
			}
		}
	}
	if len(query) > 0 {
		r.Path += "?" + query.Encode()
	}
	return r, nil
}

// parameterText returns the text of a parameter in the form that huma parses.
func parameterText(value reflect.Value) string {
	if list, ok := reflect.TypeAssert[[]string](value); ok {
		return strings.Join(list, ",")
	}
	return fmt.Sprint(value.Interface())
}

// encodeBody returns a body as JSON. It keeps the payload of a replay as the user typed it. encoding/json would
// reformat the payload, and queues with exact payloads deliver its text.
func encodeBody(body any) ([]byte, error) {
	action, ok := body.(*ReplayAction)
	if !ok || action.Payload == nil {
		return json.Marshal(body)
	}
	rest := *action
	rest.Payload = nil
	return withPayload(rest, action.Payload)
}

// Encode returns a message as JSON, with the payload as the user typed it.
func (s *Submission) Encode() ([]byte, error) {
	return withPayload(struct {
		Submission

		Payload json.RawMessage `json:"payload,omitempty"` // hides that of Submission
	}{Submission: *s}, s.Payload)
}

// withPayload encodes an object without a payload, and then adds the unchanged payload.
func withPayload(object any, payload json.RawMessage) ([]byte, error) {
	raw, err := json.Marshal(object)
	if err != nil || payload == nil {
		return raw, err
	}
	raw = raw[:len(raw)-1]
	if len(raw) > 1 {
		raw = append(raw, ',')
	}
	return append(append(append(raw, `"payload":`...), payload...), '}'), nil
}

// Problem is an error answer of the API (RFC 9457).
type Problem struct { //nolint:errname // the RFC's word
	Status int            `json:"status"`
	Title  string         `json:"title"`
	Detail string         `json:"detail"`
	Errors []ProblemCause `json:"errors"`
}

// ProblemCause is one cause of a problem. It says which part of the request is wrong, and why.
type ProblemCause struct {
	Location string          `json:"location"`
	Message  string          `json:"message"`
	Value    json.RawMessage `json:"value"`
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

// Answer returns the answer of an operation. For an error answer it returns a [*Problem]. If approval is required, it
// returns an [*ApprovalRequestedError]; the operation was then not carried out.
func (o Operation[In, Out]) Answer(status int, header http.Header, body []byte) (*Out, error) {
	out := new(Out)
	if err := decodeAnswer(status, header, body, out); err != nil {
		return nil, err
	}
	return out, nil
}

// decodeAnswer decodes the body of an answer into out, which is a pointer.
func decodeAnswer(status int, header http.Header, body []byte, out any) error {
	if status >= http.StatusBadRequest {
		problem := &Problem{}
		if json.Unmarshal(body, problem) == nil && problem.Detail != "" {
			problem.Status = status
			return problem
		}
		// A 503 of get-health has the usual body. A 503 for another operation may come from a proxy and have other JSON.
		_, isHealth := out.(*Health)
		if !isHealth || status != http.StatusServiceUnavailable || json.Unmarshal(body, out) != nil {
			return fmt.Errorf("the API answered %d %s", status, http.StatusText(status))
		}
		return nil
	}
	if status == http.StatusAccepted && strings.HasPrefix(header.Get("Location"), ApprovalsPath) {
		requested := &ApprovalRequestedError{}
		if err := json.Unmarshal(body, &requested.Asked); err != nil || requested.Approval == nil {
			return errors.Join(errors.New("approval is needed, but the API's response names no request for approval"), err)
		}
		return requested
	}
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fmt.Errorf("the response is not one of dlqd's API: %w", err)
	}
	return nil
}

// output is the answer to an operation, in the form from which huma writes it.
type output[Out any] struct {
	Status int
	Body   Out
}

// withStatus is a body whose content determines the status of the answer.
type withStatus interface{ status() int }

// register registers the function that carries out an operation.
func register[In, Out any](s *service, api huma.API, o Operation[In, Out], described huma.Operation,
	carryOut func(context.Context, *In) (*Out, error),
) {
	status := cmp.Or(described.DefaultStatus, http.StatusOK)
	huma.Register(api, o.describe(described), func(ctx context.Context, in *In) (*output[Out], error) {
		var out *Out
		err := s.carryOut(ctx, func(ctx context.Context) (err error) {
			out, err = carryOut(ctx, in)
			return err
		})
		if err != nil {
			return nil, err
		}
		if s, ok := any(out).(withStatus); ok {
			return &output[Out]{s.status(), *out}, nil
		}
		return &output[Out]{status, *out}, nil
	})
}

// describe adds the id, method and path of the operation to its description.
func (o Operation[In, Out]) describe(described huma.Operation) huma.Operation {
	described.OperationID, described.Method, described.Path = o.ID, o.Method, o.Path
	return described
}
