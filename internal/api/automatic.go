package api

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// AutomaticAction changes automatic redelivery.
type AutomaticAction struct {
	Action

	DryRun bool `json:"dryRun,omitempty" doc:"Only say what would go, and what would stay."`
}

// SwitchAction names a switch of automatic redelivery.
type SwitchAction struct {
	AutomaticAction

	Scope string `json:"scope" enum:"all,queue,kind,class" doc:"What the switch is for."`
	Name  string `json:"name,omitempty" maxLength:"255" doc:"Name of the queue or class, or pattern of the kind; absent for all." example:"mailers"`
}

// SetAction sets a switch of automatic redelivery.
type SetAction struct {
	SwitchAction

	Enabled bool     `json:"enabled" doc:"On or off."`
	Include []string `json:"include,omitempty" enum:"backfilled,single-attempt" doc:"Dead letters that stay a person's unless they are named: backfilled, and of jobs that had one attempt."`
}

// AutomaticChanged is the effect of a change of automatic redelivery.
type AutomaticChanged struct {
	automatic.Preview

	DryRun  bool            `json:"dryRun" doc:"Nothing was changed."`
	Stopped *automatic.Stop `json:"stopped,omitempty" doc:"All automatic redelivery is stopped: a switch that is on lets nothing go meanwhile."`
}

type automaticOutput struct{ Body automatic.Overview }

type automaticChangedOutput struct{ Body AutomaticChanged }

func (s *service) registerAutomatic(api huma.API) {
	tags := []string{"automatic redelivery"}
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	group := automatic.ObservedGroup{Queue: "mailers", Kind: "report.daily", ErrorClass: "transient", Entries: 812, Due: 800}
	get := huma.Operation{
		OperationID: "get-automatic", Method: http.MethodGet, Path: "/api/dlq/automatic", Tags: tags,
		Summary: "For what dead letters are redelivered by themselves, and which are observed", Errors: []int{503},
	}
	example(&get, http.StatusOK, automatic.Overview{
		Attached: true, Switches: []automatic.Switch{{Scope: automatic.ScopeAll, Source: automatic.FromDefault}}, Observed: []automatic.ObservedGroup{group}, Changes: []automatic.SwitchChange{},
	})
	huma.Register(api, get, func(ctx context.Context, _ *struct{}) (*automaticOutput, error) {
		status, err := automatic.ReadOverview(ctx, s.Store.DB(), s.Planner().Policy())
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &automaticOutput{Body: *status}, nil
	})

	operation := func(verb, summary, description string) huma.Operation {
		op := huma.Operation{
			OperationID: verb + "-automatic", Method: http.MethodPost, Path: "/api/dlq/automatic/" + verb, Tags: tags,
			Summary: summary, Description: description + " The change is in force over all processes when this answers, and leaves an audit row.",
			Errors: []int{400, 409, 422, 503},
		}
		going := automatic.Going{ObservedGroup: group, PerSecond: 100, Until: new(at.Add(8 * time.Second))}
		going.On = true
		example(&op, http.StatusOK, AutomaticChanged{DryRun: true, Preview: automatic.Preview{Goes: []automatic.Going{going}, Stays: []automatic.Staying{}}})
		return op
	}
	type setInput struct{ Body SetAction }
	huma.Register(api, operation("set", "Switch automatic redelivery on or off", "What waits goes at the pace of its queue."), func(ctx context.Context, in *setInput) (*automaticChangedOutput, error) {
		b := &in.Body
		return s.changeAutomatic(ctx, &b.AutomaticAction, b.Scope, b.Name, &b.Enabled, b.Include)
	})
	type resetInput struct{ Body SwitchAction }
	huma.Register(api, operation("reset", "Take a person's switch away, so that the policy counts again", "Where there is none, nothing changes."), func(ctx context.Context, in *resetInput) (*automaticChangedOutput, error) {
		return s.changeAutomatic(ctx, &in.Body.AutomaticAction, in.Body.Scope, in.Body.Name, nil, nil)
	})
	type stopInput struct{ Body *AutomaticAction }
	huma.Register(api, operation("stop", "Stop all automatic redelivery", "What a person replays goes on."), func(ctx context.Context, in *stopInput) (*automaticChangedOutput, error) {
		return s.changeAutomatic(ctx, in.Body, automatic.ScopeStop, "", new(true), nil)
	})
	huma.Register(api, operation("resume", "Lift the stop of all automatic redelivery", "The switches count again."), func(ctx context.Context, in *stopInput) (*automaticChangedOutput, error) {
		return s.changeAutomatic(ctx, in.Body, automatic.ScopeStop, "", nil, nil)
	})
}

// changeAutomatic sets a switch, or removes it if enabled is nil. A dry run only returns the
// effect.
func (s *service) changeAutomatic(ctx context.Context, action *AutomaticAction, scope, name string, enabled *bool, include []string) (*automaticChangedOutput, error) {
	if action == nil {
		action = &AutomaticAction{}
	}
	name = strings.TrimSpace(name)
	act, p := action.act(ctx), s.Planner().Policy()
	var out *automaticChangedOutput
	err := deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error {
		if err := automatic.Check(ctx, tx, scope, name, enabled, include); err != nil {
			return err
		}
		before, err := automatic.Read(ctx, tx, p)
		if err != nil {
			return err
		}
		after := before.With(p, scope, name, enabled, include)
		if after.Stopped != nil && !after.Stopped.Restored && scope == automatic.ScopeStop {
			*after.Stopped = automatic.Stop{At: time.Now(), Actor: act.Actor, Note: act.Note, ByPerson: true}
		}
		preview, err := after.Preview(ctx, tx, p, time.Now())
		if err != nil {
			return err
		}
		out = &automaticChangedOutput{Body: AutomaticChanged{Preview: *preview, DryRun: action.DryRun, Stopped: after.Stopped}}
		if action.DryRun {
			changesNothing(ctx)
			return nil
		}
		return automatic.Make(ctx, tx, scope, name, enabled, include, act.Actor, act.Note)
	}))
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}
