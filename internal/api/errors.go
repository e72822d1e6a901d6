package api

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// maxEcho is the maximum size, in bytes, of a client's value that a response repeats.
	maxEcho = 200
	// maxDetail is the maximum size of one error's text in a response, in bytes.
	maxDetail = 2000
	// maxProblems is the maximum number of errors in a response.
	maxProblems = 100
)

// init changes huma's defaults and bounds all error responses. That includes huma's own, which would otherwise repeat a
// whole request body of up to a megabyte.
func init() { //nolint:gochecknoinits // huma has these as variables of the package
	// By default, huma accepts "Filter" for "filter", as encoding/json does. Other parsers do not.
	huma.ValidateStrictCasing = true
	// Answers have empty arrays, not null.
	huma.DefaultArrayNullable = false
	standard := huma.NewError
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		e := standard(status, truncate(msg, maxDetail), errs[:min(len(errs), maxProblems)]...)
		problem, ok := e.(*huma.ErrorModel)
		if !ok {
			return e
		}
		for i, detail := range problem.Errors {
			if detail == nil {
				continue
			}
			body, whole := detail.Value.(string)
			if whole = whole && detail.Location == "body"; whole && status == http.StatusBadRequest && json.Valid([]byte(body)) {
				problem.Status, problem.Title = http.StatusUnprocessableEntity, http.StatusText(http.StatusUnprocessableEntity)
			}
			bounded := &huma.ErrorDetail{
				Location: truncate(detail.Location, maxDetail),
				Message:  truncate(detail.Message, maxDetail), Value: echo(detail.Value),
			}
			if whole {
				bounded.Value = nil
			}
			problem.Errors[i] = bounded
		}
		return e
	}
}

// echo returns a client's value for an error response. It cuts a long text, and returns nil for another value that is
// too long.
func echo(value any) any {
	if text, ok := value.(string); ok {
		return truncate(text, maxEcho)
	}
	if raw, err := json.Marshal(value); err != nil || len(raw) > maxEcho {
		return nil
	}
	return value
}

func truncate(text string, most int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most] + "…"
}

// jsonFormat returns the format that decodes bodies. It refuses JSON that the database cannot store, and JSON that two
// parsers may read differently.
func jsonFormat() huma.Format {
	format := huma.DefaultJSONFormat
	format.Unmarshal = func(raw []byte, into any) error {
		if err := message.CheckJSON(raw); err != nil {
			var invalid *message.InvalidError
			if errors.As(err, &invalid) && len(invalid.Fields) > 0 {
				return errors.New(strings.TrimPrefix(invalid.Fields[0].Field+" "+invalid.Fields[0].Message, " "))
			}
			return err
		}
		return json.Unmarshal(raw, into)
	}
	return format
}

// refuseUnstorable refuses requests whose path or query the database cannot store as text.
func refuseUnstorable(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		url := ctx.URL()
		location := ""
		if unstorable(url.Path) {
			location = "path"
		}
		for name, values := range url.Query() {
			for _, value := range append(values, name) {
				if unstorable(value) {
					location = "query." + name
				}
			}
		}
		if location != "" {
			_ = huma.WriteErr(api, ctx, http.StatusUnprocessableEntity, "validation failed",
				&huma.ErrorDetail{Location: location, Message: "has a NUL character or invalid UTF-8"})
			return
		}
		next(ctx)
	}
}

func unstorable(text string) bool { return strings.ContainsRune(text, 0) || !utf8.ValidString(text) }

// methods are the HTTP methods that a path may be served for.
var methods = []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// notFound answers 404 for an unknown path, and 405 for a path that is served for other methods.
func notFound(mux *http.ServeMux) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var allowed []string
		for _, method := range methods {
			other := r.Clone(r.Context())
			other.Method = method
			if _, pattern := mux.Handler(other); pattern != "/" {
				allowed = append(allowed, method)
			}
		}
		status, detail := http.StatusNotFound, truncate(r.Method+" "+r.URL.Path, maxEcho)+" not found; see /docs"
		if len(allowed) > 0 {
			w.Header().Set("Allow", strings.Join(allowed, ", "))
			status, detail = http.StatusMethodNotAllowed, truncate(r.URL.Path, maxEcho)+" allows only "+strings.Join(allowed,
				", ")+"; see /docs"
		}
		door.Problem(w, status, detail)
	}
}

// databaseProblem returns the response to a database error. Failures of the server or of the connection, and missing
// privileges, get 503, which tells the client to retry.
func databaseProblem(err error) huma.StatusError {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		if isConnection(err) {
			return huma.Error503ServiceUnavailable(unreachable)
		}
		return huma.Error500InternalServerError("internal error; dlqd's log has the cause")
	}
	if postgres.IsNotifyQueueFull(err) {
		return huma.Error503ServiceUnavailable("the database's queue of notifications is full; try again")
	}
	switch pgErr.Code[:2] {
	case "22": // data exception: a type cannot hold the value
		return huma.Error422UnprocessableEntity("the database rejected a value: " + pgErr.Message)
	case "08", "25", "40", "53", "55", "57", "58":
		// SQLSTATE classes: connection, read-only standby, rollback, resources, locks, shutdown, system
		return huma.Error503ServiceUnavailable(unreachable)
	case "42":
		if pgErr.Code == "42501" {
			return huma.Error503ServiceUnavailable("the database denied access: dlqd's role lacks a privilege, " +
				"or row level security hides jobs from it; run \"dlqd doctor\"")
		}
	default:
	}
	return huma.Error500InternalServerError("internal error; dlqd's log has the cause")
}

const unreachable = "the database did not answer; try again"

// isConnection reports whether an error is a failed or lost connection.
func isConnection(err error) bool {
	var network net.Error
	var connect *pgconn.ConnectError
	return errors.As(err, &network) || errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(err.Error(), "conn closed") ||
		strings.Contains(err.Error(), "closed pool")
}

// describeResponse documents a further response, with the given status, of the POST operation at path. The response has
// the schema that the operation's response with the status like has. value is an example.
func describeResponse(api huma.API, path string, status, like int, description string, value any) {
	responses := api.OpenAPI().Paths[path].Post.Responses
	schema := responses[strconv.Itoa(like)].Content["application/json"].Schema
	responses[strconv.Itoa(status)] = &huma.Response{
		Description: description, Content: map[string]*huma.MediaType{"application/json": {Schema: schema, Example: value}},
	}
}
