package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/restored"
)

// Restored describes a database that was restored: the hold on deliveries, and the work that may be done a second time.
type Restored struct {
	Hold      *automatic.Stop   `json:"hold,omitempty" doc:"Since when, and why, dlqd holds deliveries because of a restore; absent if it holds none."`
	MayRepeat []restored.Repeat `json:"mayRepeat" doc:"Work that may be done a second time after resuming; empty if nothing is held."`
}

// RestoredResumed is the answer to resuming.
type RestoredResumed struct {
	Restored

	DryRun bool `json:"dryRun" doc:"Whether this was a dry run, which changes nothing."`
}

// Operations on a restored database.
var (
	GetRestored    = Operation[None, Restored]{"get-restored", http.MethodGet, "/api/dlq/restored"}
	ResumeRestored = Operation[AutomaticInput, RestoredResumed]{
		"resume-restored", http.MethodPost, "/api/dlq/restored/resume",
	}
)

func (s *service) registerRestored(api huma.API) {
	tags := []string{"automatic redelivery"}
	held := Restored{
		Hold: &automatic.Stop{
			At: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC), Actor: "worker:dlqd-1/7", Restored: true,
			Note: "the server is on timeline 2, and was on 1 before: it was restored, or promoted while no dlqd ran; its last " +
				"record is of 2026-11-21 09:12:40 UTC",
		},
		MayRepeat: []restored.Repeat{{
			What: "replay run", Held: true, Items: 332,
			Detail: "run 0198f1c2-8a10-7c3e-9d55-1f6f1c6b7a01 of kim: sent 168 of 500",
		}},
	}
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get whether the database was restored to an earlier time, and what may be sent a second time",
		Errors:  []int{503},
	}
	example(&get, http.StatusOK, held)
	register(s, api, GetRestored, get, func(ctx context.Context, _ *None) (*Restored, error) {
		state, err := readRestored(ctx, s.Store.DB())
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return state, nil
	})

	resume := huma.Operation{
		Tags:    tags,
		Summary: "Resume deliveries after a restore",
		Description: "Held replay runs, redeliveries and messages continue, and dlqd accepts this server from now on. " +
			"The change is recorded in the audit trail. If nothing is held, nothing changes. The response lists the work " +
			"that may be done a second time.",
		Errors: []int{400, 409, 422, 503},
	}
	example(&resume, http.StatusOK, RestoredResumed{DryRun: true, Restored: held})
	register(s, api, ResumeRestored, resume, func(ctx context.Context, in *AutomaticInput) (*RestoredResumed, error) {
		action := in.Body
		if action == nil {
			action = &AutomaticAction{}
		}
		act, out := action.act(ctx), &RestoredResumed{}
		err := deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error {
			state, err := readRestored(ctx, tx)
			if err != nil {
				return err
			}
			*out = RestoredResumed{Restored: *state, DryRun: action.DryRun}
			if action.DryRun {
				markUnchanged(ctx)
				return nil
			}
			_, err = restored.Resume(ctx, tx, act.Actor, act.Note)
			return err
		}))
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
}

func readRestored(ctx context.Context, db postgres.DB) (*Restored, error) {
	state := &Restored{MayRepeat: []restored.Repeat{}}
	stop, err := automatic.ReadStop(ctx, db)
	if err != nil || stop == nil || !stop.Restored {
		return state, err
	}
	state.Hold = stop
	state.MayRepeat, err = restored.Preview(ctx, db)
	return state, err
}
