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
)

const (
	// maxEcho is how much of what a client sent an answer repeats, in bytes.
	maxEcho = 200
	// maxDetail bounds what an answer says of one thing that is wrong, in bytes.
	maxDetail = 2000
	// maxProblems is how many things that are wrong an answer lists.
	maxProblems = 100
)

// Errors of huma's go through here as well: they would repeat all that was sent, a megabyte of it.
func init() { //nolint:gochecknoinits // huma has these as variables of the package
	huma.ValidateStrictCasing = true // encoding/json takes "Filter" for "filter", and others do not
	standard := huma.NewError
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		e := standard(status, cut(msg, maxDetail), errs[:min(len(errs), maxProblems)]...)
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
			bounded := &huma.ErrorDetail{Location: cut(detail.Location, maxDetail), Message: cut(detail.Message, maxDetail), Value: echo(detail.Value)}
			if whole {
				bounded.Value = nil
			}
			problem.Errors[i] = bounded
		}
		return e
	}
}

// echo is a value as an answer repeats it, nil where it is too long.
func echo(value any) any {
	if text, ok := value.(string); ok {
		return cut(text, maxEcho)
	}
	if raw, err := json.Marshal(value); err != nil || len(raw) > maxEcho {
		return nil
	}
	return value
}

func cut(text string, most int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most] + "…"
}

// jsonFormat reads bodies: what the database cannot hold, or a parser may read in two ways, is refused before anything looks at it.
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

// refuseUnstorable refuses paths and queries that are no text of the database's.
func refuseUnstorable(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		url := ctx.URL()
		where := ""
		if unstorable(url.Path) {
			where = "path"
		}
		for name, values := range url.Query() {
			for _, value := range append(values, name) {
				if unstorable(value) {
					where = "query." + name
				}
			}
		}
		if where != "" {
			_ = huma.WriteErr(api, ctx, http.StatusUnprocessableEntity, "validation failed", &huma.ErrorDetail{Location: where, Message: "has a NUL character or invalid UTF-8"})
			return
		}
		next(ctx)
	}
}

func unstorable(text string) bool { return strings.ContainsRune(text, 0) || !utf8.ValidString(text) }

// methods of HTTP that an address may be served for.
var methods = []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// notServed answers where no operation is: 405 where the address is served for other methods.
func notServed(mux *http.ServeMux) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var allowed []string
		for _, method := range methods {
			other := r.Clone(r.Context())
			other.Method = method
			if _, pattern := mux.Handler(other); pattern != "/" {
				allowed = append(allowed, method)
			}
		}
		status, detail := http.StatusNotFound, cut(r.Method+" "+r.URL.Path, maxEcho)+" is not served here; see /docs"
		if len(allowed) > 0 {
			w.Header().Set("Allow", strings.Join(allowed, ", "))
			status, detail = http.StatusMethodNotAllowed, cut(r.URL.Path, maxEcho)+" is served for "+strings.Join(allowed, ", ")+"; see /docs"
		}
		door.Problem(w, status, detail)
	}
}

// databaseProblem is the answer to an error of the database: only where it, or the way there, is in trouble is trying again any
// use.
func databaseProblem(err error) huma.StatusError {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		if isConnection(err) {
			return huma.Error503ServiceUnavailable(unreachable)
		}
		return huma.Error500InternalServerError("an error of dlqd's, which its log describes")
	}
	switch pgErr.Code[:2] {
	case "22": // data exception: a value that a type does not hold
		return huma.Error422UnprocessableEntity("a value is refused by the database: " + pgErr.Message)
	case "08", "25", "40", "53", "55", "57", "58": // connection, read-only standby, rollback, resources, locks, shutdown, system
		return huma.Error503ServiceUnavailable(unreachable)
	case "42":
		if pgErr.Code == "42501" {
			return huma.Error503ServiceUnavailable("the database refused it: dlqd's role lacks a right, or row level security hides jobs from it; \"dlqd doctor\" says which")
		}
	default:
	}
	return huma.Error500InternalServerError("an error of dlqd's, which its log describes")
}

const unreachable = "the database did not answer; try again"

// isConnection recognises that there was no connection, or none any more.
func isConnection(err error) bool {
	var network net.Error
	var connect *pgconn.ConnectError
	return errors.As(err, &network) || errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(err.Error(), "conn closed") || strings.Contains(err.Error(), "closed pool")
}

// alsoAnswers describes an answer of an operation beside its standard one, of the same form.
func alsoAnswers(api huma.API, path string, status, like int, description string, value any) {
	responses := api.OpenAPI().Paths[path].Post.Responses
	schema := responses[strconv.Itoa(like)].Content["application/json"].Schema
	responses[strconv.Itoa(status)] = &huma.Response{
		Description: description, Content: map[string]*huma.MediaType{"application/json": {Schema: schema, Example: value}},
	}
}
