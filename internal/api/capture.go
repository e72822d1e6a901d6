package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile"
)

// CaptureAction switches capture.
type CaptureAction struct {
	Action

	Mode  string `json:"mode" enum:"on,off,strict" doc:"New mode of capture."`
	Limit string `json:"limit,omitempty" doc:"How long capture may work in one statement of the application; unchanged if absent." example:"250ms"`
}

// SetCaptureInput is a request to set the mode of capture.
type SetCaptureInput struct{ Body CaptureAction }

// Operations on capture.
var (
	GetCapture = Operation[None, reconcile.Capture]{"get-capture", http.MethodGet, "/api/dlq/capture"}
	SetCapture = Operation[SetCaptureInput, reconcile.Switched]{"set-capture", http.MethodPut, "/api/dlq/capture"}
)

func (s *service) registerCapture(api huma.API) {
	tags := []string{"capture"}
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get the mode of capture, and the failures that it missed and the reconciler found", Errors: []int{503},
	}
	example(&get, http.StatusOK, reconcile.Capture{
		Mode: reconcile.ModeOn, Limit: "00:00:00.25", Triggers: reconcile.TriggersEnabled,
	})
	register(s, api, GetCapture, get, func(ctx context.Context, _ *None) (*reconcile.Capture, error) {
		status, err := reconcile.ReadCapture(ctx, s.Store.DB())
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return status, nil
	})

	put := huma.Operation{
		Tags:    tags,
		Summary: "Switch capture on, off, or to strict",
		Description: "The change waits for no table lock, so it works while applications are blocked. It takes effect " +
			"in each session at its next statement, and is recorded in the audit trail.",
		Errors: []int{400, 422, 503},
	}
	example(&put, http.StatusOK, reconcile.Switched{
		Mode: reconcile.ModeOff, Writing: 2, Recorded: true,
		Message: "From each session's next statement on, dlqd does nothing in the application's transactions.",
	})
	register(s, api, SetCapture, put, func(ctx context.Context, in *SetCaptureInput) (*reconcile.Switched, error) {
		act := in.Body.act(ctx)
		change := reconcile.Switch{Mode: in.Body.Mode, Actor: act.Actor, Note: act.Note}
		if in.Body.Limit != "" {
			var err error
			if change.Limit, err = policy.ParseDuration(in.Body.Limit); err != nil {
				return nil, huma.Error422UnprocessableEntity("invalid duration",
					&huma.ErrorDetail{Location: "body.limit", Message: "must be a duration such as 250ms or 1s", Value: in.Body.Limit})
			}
		}
		var done *reconcile.Switched
		err := s.Store.InTx(ctx, func(tx postgres.DB) (err error) {
			done, err = reconcile.SetCapture(ctx, tx, change)
			return err
		})
		if err != nil {
			return nil, s.problem(ctx, deadletter.AsMoveError(err))
		}
		return done, nil
	})
}
