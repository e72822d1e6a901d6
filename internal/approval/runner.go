package approval

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/dlqd/dlqd/internal/approval/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
)

const (
	// interval is the time between two checks for approved requests.
	interval = time.Second
	// lease is how long a request stays reserved for the process that executes it, unless that process renews the lease.
	// The process renews it every renewInterval.
	lease         = time.Minute
	renewInterval = 15 * time.Second
	// turnTimeout limits the execution of one request. It is long, because an erasure reads the whole archive.
	turnTimeout = 2 * time.Hour
)

// Runner executes approved requests in the name and the scope of the requester, on the entries that the approval froze.
// One process at a time executes a request. If that process is interrupted, the next one handles the remaining entries
// (dlq.approval_entries.done_at). A replay run is started only once.
type Runner struct {
	Store    *deadletter.Store
	Replayer *replay.Replayer
	Archive  *archive.Archive // nil if there is none
	// CancelJob cancels a job. It returns nil if the job was cancelled before.
	CancelJob func(ctx context.Context, job int64, act deadletter.Act) error
	Logger    *slog.Logger
	// Observe, if not nil, is called after each execution of a request with its duration and error. It is not called if
	// a stop cancelled the execution.
	Observe func(took time.Duration, err error)
	// Acted, if not nil, is called after each execution with the names of the requester and the approver.
	Acted func(ctx context.Context, actors ...string)
}

// Loop returns the loop that executes approved requests.
func (r *Runner) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "approvals", Interval: interval, Timeout: turnTimeout,
		Patience: turnTimeout, Failing: "executing approved requests failed",
		Once: func(ctx context.Context) (time.Duration, error) {
			worked, err := r.RunOnce(ctx)
			if worked {
				return background.More, err
			}
			return 0, err
		},
	})
}

// RunOnce ends the requests that have expired, and then executes one approved request, if there is one. worked is true
// if it executed a request without an error.
func (r *Runner) RunOnce(ctx context.Context) (worked bool, err error) {
	q := dbsqlc.New(r.Store.DB())
	if err := q.Expire(ctx); err != nil {
		return false, err
	}
	taken, err := q.Take(ctx, dbsqlc.TakeParams{
		During: lease, Operations: []string{Replay, Bulk, Erase, Cancel, Export},
	})
	if err != nil || len(taken) == 0 {
		return false, err
	}
	a := &taken[0]
	working, stop := context.WithCancel(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		ticks := time.NewTicker(renewInterval)
		defer ticks.Stop()
		for {
			select {
			case <-working.Done():
				return
			case <-ticks.C:
				// If no renewal succeeds before the lease ends, another process executes the request.
				_ = q.ExtendReservation(working, dbsqlc.ExtendReservationParams{ID: a.ID, During: lease})
			}
		}
	}()
	err = r.execute(working, a)
	if r.Acted != nil {
		r.Acted(ctx, a.Actor, a.DecidedBy)
	}
	stop()
	<-renewed
	if ctx.Err() != nil {
		_ = q.EndReservation(context.WithoutCancel(ctx), a.ID) // if this fails, the reservation ends with the lease
	}
	if err != nil {
		return false, fmt.Errorf("approval %s: %w", a.ID, err)
	}
	return true, nil
}

func (r *Runner) execute(ctx context.Context, a *dbsqlc.TakeRow) error {
	ctx = deadletter.WithOrigin(ctx, a.Origin+", approved by "+a.DecidedBy)
	ctx = deadletter.WithApproval(postgres.WithScope(ctx, a.Scope), a.ID)
	start := time.Now()
	end, err := r.do(ctx, a)
	if r.Observe != nil && (err == nil || !errors.Is(ctx.Err(), context.Canceled)) {
		r.Observe(time.Since(start), err)
	}
	var refused *deadletter.MoveError
	if errors.As(err, &refused) || errors.Is(err, errRequest) || postgres.IsRefusal(err) {
		r.Logger.Warn("approved request failed", "approval", a.ID, "error", err)
		end, err = &dbsqlc.EndParams{Problem: err.Error()}, nil
	}
	if err != nil || end == nil {
		return err
	}
	end.ID = a.ID
	err = r.Store.InTx(ctx, func(tx postgres.DB) error { return dbsqlc.New(tx).End(ctx, *end) })
	if errors.Is(deadletter.AsMoveError(err), deadletter.ErrNotAllowed) {
		return nil // the approval has ended already
	}
	return err
}

// errRequest means that a request cannot be decoded, for example because it was made with SQL.
var errRequest = errors.New("the request cannot be decoded")

// do executes a request. It returns the outcome, or nil if the outcome is recorded already.
func (r *Runner) do(ctx context.Context, a *dbsqlc.TakeRow) (*dbsqlc.EndParams, error) {
	act := deadletter.Act{Actor: a.Actor, Note: a.Note}
	switch a.Operation {
	case Replay:
		request := replay.Request{Act: act}
		if err := json.Unmarshal(a.Request, &request); err != nil {
			return nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		_, err := r.Replayer.Start(ctx, &request) // also ends the approval, so the run starts only once
		return nil, err
	case Bulk:
		act.Operation = a.ID // if another process resumes the request, it continues this operation
		bulk := deadletter.Bulk{Act: act}
		if err := json.Unmarshal(a.Request, &bulk); err != nil {
			return nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		_, _, err := r.Store.Bulk(ctx, bulk) // dlq.act_where counts the changes of each batch
		return &dbsqlc.EndParams{}, err
	case Cancel:
		var request Cancellation
		if err := json.Unmarshal(a.Request, &request); err != nil {
			return nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		return &dbsqlc.EndParams{Changed: new(int64(1))}, r.CancelJob(ctx, request.Job, act)
	case Export:
		return &dbsqlc.EndParams{}, nil // the requester downloads the export later
	case Erase:
		var erasure Erasure
		if err := json.Unmarshal(a.Request, &erasure); err != nil {
			return nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		record, err := archive.EraseEverywhere(ctx, r.Store, r.Archive, erasure.Filter, act)
		return &dbsqlc.EndParams{Changed: &record.Entries, Outcome: new(record.ID)}, err
	default:
		return nil, fmt.Errorf("%w: unknown operation %q", errRequest, a.Operation)
	}
}
