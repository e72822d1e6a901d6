package api

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/filter"
)

// EntryFilter chooses dead letters. What is not given chooses all.
type EntryFilter struct {
	filter.Filter

	Q string `json:"q,omitempty" maxLength:"4096" doc:"The same as text, such as status:manual queue:payments \"timed out\" (docs/filter.md). What it says is not said in another field, too." example:"queue:payments age:<2d"`
}

// resolve is the filter as the database takes it.
func (f *EntryFilter) resolve(ctx context.Context) (json.RawMessage, error) {
	out, err := merged(ctx, f.Filter, "body.filter.q", f.Q)
	if err != nil {
		return nil, err
	}
	return out.JSON(), nil
}

// merged is a filter, and what a text says, which is at a place of the request.
func merged(ctx context.Context, f filter.Filter, location, text string) (filter.Filter, error) {
	if text == "" {
		return f, nil
	}
	parsed, err := filter.Parse(text, access.From(ctx).Name)
	var wrong *filter.Error
	if errors.As(err, &wrong) {
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
