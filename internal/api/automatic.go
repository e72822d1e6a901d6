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

	DryRun bool `json:"dryRun,omitempty" doc:"Only return what would be redelivered, and what would stay."`
}

// SwitchAction names a switch of automatic redelivery.
type SwitchAction struct {
	AutomaticAction

	Scope string `json:"scope" enum:"all,queue,kind,class" doc:"Scope of the switch."`
	Name  string `json:"name,omitempty" maxLength:"255" doc:"Name of the queue or class, or pattern of the kind; absent for all." example:"mailers"`
}

// SetAction sets a switch of automatic redelivery.
type SetAction struct {
	SwitchAction

	Enabled bool     `json:"enabled" doc:"Whether automatic redelivery is on."`
	Include []string `json:"include,omitempty" enum:"backfilled,single-attempt" doc:"Dead letters to include that otherwise need manual handling: backfilled ones, and those of jobs with a single attempt."`
}

// AutomaticChanged is the effect of a change of automatic redelivery.
type AutomaticChanged struct {
	automatic.Preview

	DryRun  bool            `json:"dryRun" doc:"Whether this was a dry run, which changes nothing."`
	Stopped *automatic.Stop `json:"stopped,omitempty" doc:"Set if all automatic redelivery is stopped. Until it is resumed, switches that are on have no effect."`
}

// AutomaticInput is a request to stop or resume automatic redelivery.
type AutomaticInput struct{ Body *AutomaticAction }

// SetAutomaticInput is a request to set a switch.
type SetAutomaticInput struct{ Body SetAction }

// ResetAutomaticInput is a request to reset a switch.
type ResetAutomaticInput struct{ Body SwitchAction }

// Operations on automatic redelivery.
var (
	GetAutomatic = Operation[None, automatic.Overview]{"get-automatic", http.MethodGet, "/api/dlq/automatic"}
	SetAutomatic = Operation[SetAutomaticInput, AutomaticChanged]{
		"set-automatic", http.MethodPost, "/api/dlq/automatic/set",
	}
	ResetAutomatic = Operation[ResetAutomaticInput, AutomaticChanged]{
		"reset-automatic", http.MethodPost, "/api/dlq/automatic/reset",
	}
	StopAutomatic = Operation[AutomaticInput, AutomaticChanged]{
		"stop-automatic", http.MethodPost, "/api/dlq/automatic/stop",
	}
	ResumeAutomatic = Operation[AutomaticInput, AutomaticChanged]{
		"resume-automatic", http.MethodPost, "/api/dlq/automatic/resume",
	}
)

func (s *service) registerAutomatic(api huma.API) {
	tags := []string{"automatic redelivery"}
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	group := automatic.ObservedGroup{
		Queue: "mailers", Kind: "report.daily", ErrorClass: "transient", Entries: 812, Due: 800,
	}
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get the switches of automatic redelivery, and the dead letters that are only observed", Errors: []int{503},
	}
	example(&get, http.StatusOK, automatic.Overview{
		Attached: true, Switches: []automatic.Switch{{Scope: automatic.ScopeAll, Source: automatic.FromDefault}},
		Observed: []automatic.ObservedGroup{group}, Changes: []automatic.SwitchChange{},
	})
	register(s, api, GetAutomatic, get, func(ctx context.Context, _ *None) (*automatic.Overview, error) {
		status, err := automatic.ReadOverview(ctx, s.Store.DB(), s.Planner().Policy())
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return status, nil
	})

	change := func(summary, description string) huma.Operation {
		op := huma.Operation{
			Tags: tags, Summary: summary,
			Description: description + " When the request returns, the change is in force in all processes. " +
				"It is recorded in the audit trail.",
			Errors: []int{400, 409, 422, 503},
		}
		going := automatic.Going{ObservedGroup: group, PerSecond: 100, Until: new(at.Add(8 * time.Second))}
		going.On = true
		example(&op, http.StatusOK, AutomaticChanged{DryRun: true, Preview: automatic.Preview{
			Goes: []automatic.Going{going}, Stays: []automatic.Staying{},
		}})
		return op
	}
	register(s, api, SetAutomatic, change("Switch automatic redelivery on or off", "Waiting dead letters are redelivered "+
		"at the pace of their queue."), func(ctx context.Context, in *SetAutomaticInput) (*AutomaticChanged, error) {
		b := &in.Body
		return s.changeAutomatic(ctx, &b.AutomaticAction, b.Scope, b.Name, &b.Enabled, b.Include)
	})
	register(s, api, ResetAutomatic, change("Remove an operator's switch, so that the policy applies again",
		"Without such a switch, nothing changes."),
		func(ctx context.Context, in *ResetAutomaticInput) (*AutomaticChanged, error) {
			return s.changeAutomatic(ctx, &in.Body.AutomaticAction, in.Body.Scope, in.Body.Name, nil, nil)
		})
	register(s, api, StopAutomatic, change("Stop all automatic redelivery", "Replays and replay runs continue."),
		func(ctx context.Context, in *AutomaticInput) (*AutomaticChanged, error) {
			return s.changeAutomatic(ctx, in.Body, automatic.ScopeStop, "", new(true), nil)
		})
	register(s, api, ResumeAutomatic, change("Resume automatic redelivery after a stop", "The switches apply again."),
		func(ctx context.Context, in *AutomaticInput) (*AutomaticChanged, error) {
			return s.changeAutomatic(ctx, in.Body, automatic.ScopeStop, "", nil, nil)
		})
}

// changeAutomatic sets a switch, or removes it if enabled is nil. A dry run changes nothing and returns the effect.
func (s *service) changeAutomatic(ctx context.Context, action *AutomaticAction, scope, name string, enabled *bool,
	include []string,
) (*AutomaticChanged, error) {
	if action == nil {
		action = &AutomaticAction{}
	}
	name = strings.TrimSpace(name)
	act, p := action.act(ctx), s.Planner().Policy()
	var out *AutomaticChanged
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
		out = &AutomaticChanged{Preview: *preview, DryRun: action.DryRun, Stopped: after.Stopped}
		if action.DryRun {
			markUnchanged(ctx)
			return nil
		}
		return automatic.Change(ctx, tx, scope, name, enabled, include, act.Actor, act.Note)
	}))
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}
