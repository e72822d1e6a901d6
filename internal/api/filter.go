package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// EntryFilter selects dead letters. An empty field selects all of them.
type EntryFilter struct {
	filter.Filter

	Q string `json:"q,omitempty" maxLength:"4096" doc:"The filter as text, such as status:manual queue:payments \"timed out\" (docs/filter.md). A field may be set here or as JSON, not both." example:"queue:payments age:<2d"`
}

// resolve returns the filter in the form that the database reads.
func (f *EntryFilter) resolve(ctx context.Context) (json.RawMessage, error) {
	out, err := mergeText(ctx, f.Filter, "body.filter.q", f.Q)
	if err != nil {
		return nil, err
	}
	return out.JSON(), nil
}

// mergeText returns f combined with the filter that text describes. Errors name location, which is the place of text in
// the request.
func mergeText(ctx context.Context, f filter.Filter, location, text string) (filter.Filter, error) {
	if text == "" {
		return f, nil
	}
	parsed, err := filter.Parse(text, access.From(ctx).Name)
	if wrong, ok := errors.AsType[*filter.Error](err); ok {
		details := make([]error, len(wrong.Terms))
		for i, t := range wrong.Terms {
			details[i] = &huma.ErrorDetail{Location: location, Message: t.Problem, Value: t}
		}
		return f, huma.Error422UnprocessableEntity(err.Error(), details...)
	}
	out, err := filter.Merge(f, parsed)
	if err != nil {
		return f, huma.Error422UnprocessableEntity(err.Error(), &huma.ErrorDetail{Location: location, Message: err.Error()})
	}
	return out, nil
}

// describeStrategies documents the values of fields with the name of a strategy. A field's tag cannot list these
// values, because extensions can add strategies.
func describeStrategies(schemas huma.Registry) {
	for _, t := range []reflect.Type{
		reflect.TypeFor[deadletter.Summary](), reflect.TypeFor[EntryDetail](),
		reflect.TypeFor[filter.Filter](), reflect.TypeFor[EntryFilter](),
	} {
		field := schemas.SchemaFromRef(schemas.Schema(t, true, "").Ref).Properties["strategy"]
		if field.Items != nil {
			field = field.Items
		}
		for _, name := range strategies.Names() {
			field.Enum = append(field.Enum, name)
		}
		field.PrecomputeMessages()
	}
}

// FilterReading shows how a text is read as a filter, with completions.
type FilterReading struct {
	Filter filter.Filter `json:"filter" doc:"The filter of the valid terms."`
	Terms  []filter.Term `json:"terms" doc:"All terms of the text, in order, including invalid ones."`
	// From and To delimit the part of the text that a completion replaces, in characters.
	From        int          `json:"from" doc:"Start of the text that a completion replaces, in characters (Unicode code points)."`
	To          int          `json:"to" doc:"End of the text that a completion replaces."`
	Completions []Completion `json:"completions" doc:"Completions at the cursor, likeliest first: fields, or values of open entries."`
}

// Completion completes a filter.
type Completion struct {
	Insert string `json:"insert" doc:"Text to insert."`
	Name   string `json:"name" doc:"The field or the value."`
	Doc    string `json:"doc,omitempty" doc:"Description of the field or the value."`
}

// CompleteInput is a text and the position of its cursor.
type CompleteInput struct {
	Q  string `query:"q" maxLength:"4096" doc:"A filter as text (docs/filter.md)." example:"queue:payments st"`
	At int    `query:"at" minimum:"-1" maximum:"4096" default:"-1" doc:"Position of the cursor, in characters (Unicode code points); -1 is the end." example:"17"`
}

// CompleteFilter parses and completes a filter.
var CompleteFilter = Operation[CompleteInput, FilterReading]{"complete-filter", http.MethodGet, "/api/dlq/filter"}

// maxCompletions is the maximum number of completions in a response.
const maxCompletions = 20

func (s *service) registerFilter(api huma.API) {
	complete := huma.Operation{
		Tags:    []string{"dead letters"},
		Summary: "Parse a filter's text and complete it",
		Description: "Suggests values of open dead letters that an index or the last 2,000 entries have. Invalid terms " +
			"do not fail the request: each has a problem in the response.",
		Errors: []int{422, 503},
	}
	example(&complete, http.StatusOK, FilterReading{
		Filter: filter.Filter{Queue: []string{"payments"}}, From: 15, To: 17,
		Terms: []filter.Term{
			{Field: "queue", Values: []string{"payments"}, To: 14},
			{Field: "error", Values: []string{"st"}, From: 15, To: 17},
		},
		Completions: []Completion{{Insert: "status:", Name: "status", Doc: "State. open and closed select all open and all " +
			"closed states."}},
	})
	register(s, api, CompleteFilter, complete, s.completeFilter)
}

func (s *service) completeFilter(ctx context.Context, in *CompleteInput) (*FilterReading, error) {
	out := &FilterReading{Completions: []Completion{}}
	out.Filter, out.Terms = filter.Read(in.Q, access.From(ctx).Name)
	if out.Terms == nil {
		out.Terms = []filter.Term{}
	}
	at := in.At
	if at < 0 {
		at = utf8.RuneCountInString(in.Q)
	}
	typing, ok := filter.At(in.Q, at)
	if !ok {
		return out, nil
	}
	out.From, out.To = typing.From, typing.To
	add := func(name, doc string, ofLanguage bool) {
		if len(out.Completions) < maxCompletions {
			out.Completions = append(out.Completions, Completion{
				Insert: typing.Insert(name, ofLanguage), Name: name, Doc: doc,
			})
		}
	}
	for _, f := range typing.Complete() {
		doc := f.Doc
		if doc != "" {
			doc += " " + f.Example
		}
		add(f.Name, doc, true)
	}
	i := slices.IndexFunc(filter.Fields(), func(f filter.Field) bool { return f.Name == typing.Field })
	if i < 0 || filter.Fields()[i].Values != nil {
		return out, nil
	}
	values, err := s.Store.FilterValues(ctx, filter.Fields()[i].JSON, typing.Prefix, maxCompletions)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	for _, v := range values {
		add(v.Value, v.Note, false)
	}
	return out, nil
}
