package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/policy"
)

// Report is the answer to an analytics query.
type Report[T any] struct {
	AsOf time.Time `json:"asOf" doc:"The report counts all events before this time."`
	Rows []T       `json:"rows" doc:"Rows of the report."`
}

// WindowInput is the time range of a query. The range ends now. It begins at the start of a minute, hour, day or week.
type WindowInput struct {
	Over  string `query:"over" default:"7d" doc:"Length of the window, such as 90m, 24h or 30d." example:"24h"`
	Queue string `query:"queue" maxLength:"127" doc:"Only this queue."`
}

func (in *WindowInput) window() (analytics.Window, error) {
	over, err := policy.ParseDuration(in.Over)
	if err == nil && (over < time.Minute || over > maxWindow) {
		err = fmt.Errorf("must be from 1m to %s", maxWindow)
	}
	if err != nil {
		return analytics.Window{}, huma.Error422UnprocessableEntity("over must be a duration such as 90m, 24h or 7d",
			&huma.ErrorDetail{Location: "query.over", Message: err.Error(), Value: in.Over})
	}
	return analytics.Window{Over: over, Queue: in.Queue}, nil
}

// maxWindow is the maximum length of a time range.
const maxWindow = 10 * 365 * 24 * time.Hour

// FlowInput selects the series of a flow.
type FlowInput struct {
	WindowInput

	By   string `query:"by" enum:"all,queue,class" default:"all" doc:"Series to return: one for all entries, one for each queue, or one for each class."`
	Step string `query:"step" enum:"minute,hour,day,week" doc:"Length of a bucket. If absent: minutes for windows up to three hours, hours up to three days, else days."`
}

// TimesInput selects the rows of times.
type TimesInput struct {
	WindowInput

	By string `query:"by" enum:"all,queue" default:"all" doc:"Rows to return: one for all entries, or one for each queue."`
}

// TopInput is a time range and a number of rows.
type TopInput struct {
	WindowInput

	Limit int `query:"limit" minimum:"1" maximum:"200" default:"20" doc:"Maximum number of rows."`
}

// HeatMapInput selects a heat map.
type HeatMapInput struct {
	Over     string `query:"over" default:"28d" doc:"Length of the window, such as 28d." example:"28d"`
	Queue    string `query:"queue" maxLength:"127" doc:"Only this queue."`
	Timezone string `query:"timezone" default:"UTC" maxLength:"63" doc:"Time zone of weekdays and hours, such as Europe/Paris."`
}

// LimitInput is a number of rows.
type LimitInput struct {
	Limit int `query:"limit" minimum:"1" maximum:"200" default:"20" doc:"Maximum number of rows."`
}

// The reports of analytics.
var (
	GetFlow          = reportOperation[FlowInput, analytics.Series]("flow")
	GetQueueStats    = reportOperation[WindowInput, analytics.QueueStats]("queues")
	GetTimes         = reportOperation[TimesInput, analytics.Times]("times")
	GetErrorTypes    = reportOperation[TopInput, analytics.ErrorType]("error-types")
	GetTopGroups     = reportOperation[TopInput, analytics.TopGroup]("groups")
	GetHeatMap       = reportOperation[HeatMapInput, analytics.Cell]("heat-map")
	GetReplaySuccess = reportOperation[WindowInput, analytics.ReplaySuccess]("replays")
	GetOldest        = reportOperation[LimitInput, analytics.Oldest]("oldest")
	GetSources       = reportOperation[SourcesInput, analytics.Source]("sources")
	GetRetryCost     = reportOperation[WindowInput, analytics.RetryCost]("retry-cost")
	GetPolicies      = reportOperation[OverInput, analytics.PolicyChange]("policies")
	GetRules         = reportOperation[OverInput, analytics.RuleCount]("rules")
)

func reportOperation[In, Row any](name string) Operation[In, Report[Row]] {
	return Operation[In, Report[Row]]{"get-analytics-" + name, http.MethodGet, "/api/dlq/analytics/" + name}
}

func (s *service) registerAnalytics(api huma.API) {
	half := 0.5
	queue := "payment-processing"
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	bucket := analytics.Bucket{Start: noon, Captured: 8, Failures: 9, Redelivered: 6, Succeeded: 5, Resolved: 5, Open: 3}
	report(s, api, GetFlow, "Get the numbers of events and of open entries over time",
		[]analytics.Series{{Name: "all", Buckets: []analytics.Bucket{bucket}}},
		func(ctx context.Context, in *FlowInput) ([]analytics.Series, error) {
			w, err := in.window()
			if err != nil {
				return nil, err
			}
			return s.Analytics.Flow(ctx, w, in.By, in.Step)
		})
	report(s, api, GetQueueStats, "Get the open entries and the resolution and success rates of each queue",
		[]analytics.QueueStats{{Queue: &queue, Open: 3, Manual: 3, Captured: 8, Resolved: 5, ResolutionRate: &half}},
		windowed(s.Analytics.Stats))
	report(s, api, GetTimes, "Get how long entries were open, and how long recovery took",
		[]analytics.Times{{Measure: "in_dlq", Entries: 5, Average: 61.5, P50: 58, P95: 120, P99: 180}},
		func(ctx context.Context, in *TimesInput) ([]analytics.Times, error) {
			w, err := in.window()
			if err != nil {
				return nil, err
			}
			return s.Analytics.Times(ctx, w, in.By)
		})
	report(s, api, GetErrorTypes, "Count failures by error type",
		[]analytics.ErrorType{{ErrorType: "TIMEOUT_ERROR", Failures: 8, Share: &half}}, limited(s.Analytics.ErrorTypes))
	report(s, api, GetTopGroups, "List the failure groups with the most failures, and their trends",
		[]analytics.TopGroup{{
			Queue: queue, Fingerprint: "1f6c0b3a9d2e4f57", InWindow: 8, Trend: []int64{0, 3, 5},
			Failures: 12, Open: 3, FirstSeen: noon, LastSeen: noon,
		}}, limited(s.Analytics.TopGroups))
	report(s, api, GetHeatMap, "Count failures by weekday and hour", []analytics.Cell{{Weekday: 1, Hour: 9, Failures: 42}},
		func(ctx context.Context, in *HeatMapInput) ([]analytics.Cell, error) {
			w, err := (&WindowInput{Over: in.Over, Queue: in.Queue}).window()
			if err != nil {
				return nil, err
			}
			if _, err := time.LoadLocation(in.Timezone); err != nil || in.Timezone == "" || in.Timezone == "Local" {
				return nil, huma.Error422UnprocessableEntity("timezone must be a name such as Europe/Paris",
					&huma.ErrorDetail{Location: "query.timezone", Message: "unknown time zone", Value: in.Timezone})
			}
			return s.Analytics.HeatMap(ctx, w, in.Timezone)
		})
	report(s, api, GetReplaySuccess, "Count the outcomes of redeliveries by queue and class",
		[]analytics.ReplaySuccess{{
			Queue: queue, ErrorClass: "transient", Redelivered: 6, Succeeded: 3,
			Failed: 3, Success: &half,
		}},
		windowed(s.Analytics.ReplaySuccess))
	report(s, api, GetOldest, "List the oldest open entries",
		[]analytics.Oldest{{
			ID: uuid.MustParse("01980000-0000-7000-8000-000000000000"), Age: 3600, Status: "dlq_manual",
			Queue: queue, Kind: "payment.captured",
		}},
		func(ctx context.Context, in *LimitInput) ([]analytics.Oldest, error) {
			return s.Analytics.Oldest(ctx, in.Limit)
		})
	report(s, api, GetSources, "List the sources with the most dead letters",
		[]analytics.Source{{Source: "shop", Captured: 8, Share: &half}},
		func(ctx context.Context, in *SourcesInput) ([]analytics.Source, error) {
			w, err := (&WindowInput{Over: in.Over}).window()
			if err != nil {
				return nil, err
			}
			return s.Analytics.NoisiestSources(ctx, w, in.Limit)
		})
	report(s, api, GetRetryCost, "Get the cost of retries by queue",
		[]analytics.RetryCost{{
			Queue: queue, Captured: 8, Attempts: 40, Redelivered: 6, Succeeded: 5, Resolved: 5,
			Wasted: &half,
		}}, windowed(s.Analytics.RetryCost))
	report(s, api, GetPolicies, "List the changes of the policy in force",
		[]analytics.PolicyChange{{At: noon, Version: "3d5ebe1c5944"}}, over(s.Analytics.PolicyChanges))
	report(s, api, GetRules, "Count new dead letters by the rule that classified them",
		[]analytics.RuleCount{{Rule: "bank-down", Entries: 42}}, over(s.Analytics.ByRule))
}

// OverInput is the length of a time range that ends now.
type OverInput struct {
	Over string `query:"over" default:"24h" doc:"Length of the window, such as 24h or 30d." example:"24h"`
}

func over[T any](query func(context.Context, analytics.Window) ([]T, error)) func(context.Context,
	*OverInput) ([]T, error) {
	return func(ctx context.Context, in *OverInput) ([]T, error) {
		w, err := (&WindowInput{Over: in.Over}).window()
		if err != nil {
			return nil, err
		}
		return query(ctx, w)
	}
}

// SourcesInput is the length of a time range and a number of rows.
type SourcesInput struct {
	Over  string `query:"over" default:"7d" doc:"Length of the window, such as 24h or 30d." example:"24h"`
	Limit int    `query:"limit" minimum:"1" maximum:"200" default:"20" doc:"Maximum number of rows."`
}

func windowed[T any](query func(context.Context, analytics.Window) ([]T, error)) func(context.Context,
	*WindowInput) ([]T, error) {
	return func(ctx context.Context, in *WindowInput) ([]T, error) {
		w, err := in.window()
		if err != nil {
			return nil, err
		}
		return query(ctx, w)
	}
}

func limited[T any](query func(context.Context, analytics.Window, int) ([]T, error)) func(context.Context,
	*TopInput) ([]T, error) {
	return func(ctx context.Context, in *TopInput) ([]T, error) {
		w, err := in.window()
		if err != nil {
			return nil, err
		}
		return query(ctx, w, in.Limit)
	}
}

// report registers a report with its query.
func report[I, T any](s *service, api huma.API, o Operation[I, Report[T]], summary string, rows []T,
	query func(context.Context, *I) ([]T, error),
) {
	op := huma.Operation{Tags: []string{"analytics"}, Summary: summary, Errors: []int{422, 503}}
	example(&op, http.StatusOK, Report[T]{AsOf: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC), Rows: rows})
	register(s, api, o, op, func(ctx context.Context, in *I) (*Report[T], error) {
		out := &Report[T]{}
		var err error
		if out.AsOf, err = s.Analytics.AsOf(ctx); err == nil {
			out.Rows, err = query(ctx, in)
		}
		if _, ok := err.(huma.StatusError); ok { //nolint:errorlint // made here, never wrapped
			return nil, err
		}
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
}
