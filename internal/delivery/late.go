package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// A process that was paused or cut off from the database for 30 s may still run attempts of jobs
// that another process has rescued and runs. River's completer sets a job's state by the job's id
// and ignores the attempt: a late failure would end the job while the other process's attempt still
// runs, and that attempt's success would be lost. A process that may have been considered dead ("in
// doubt") therefore checks the attempt before it sends a message and before it records outcomes. A
// process that was seen all the time checks nothing.

// errNotOurs is the reason not to send a message.
var errNotOurs = errors.New("another process may deliver the message by now")

// inDoubt reports whether another process may have rescued a job that this process runs.
func (w *Worker) inDoubt() bool {
	return w.config.InDoubt != nil && w.config.InDoubt(w.config.Planner().Policy().MaxTimeout()+2*rescueSlack)
}

// runs reports whether the job's current attempt is still this one.
func (w *Worker) runs(ctx context.Context, job *river.Job[Args]) (bool, error) {
	return dbsqlc.New(w.config.DB).AttemptRuns(ctx, dbsqlc.AttemptRunsParams{
		Job: job.ID, CreatedAt: job.CreatedAt, Attempt: int32(job.Attempt),
	})
}

// driver is River's driver, except that a client in doubt records only outcomes of current
// attempts.
type driver struct {
	*postgres.Driver

	config  *ClientConfig
	inDoubt func() bool
}

var _ riverdriver.Driver[pgx.Tx] = (*driver)(nil)

// GetExecutor implements riverdriver.Driver.
func (d *driver) GetExecutor() riverdriver.Executor {
	return &executor{Executor: d.Driver.GetExecutor(), driver: d}
}

// updates are the outcomes of attempts, with one array per column.
type updates = riverdriver.JobSetStateIfRunningManyParams

type executor struct {
	riverdriver.Executor

	driver *driver
}

// JobSetStateIfRunningMany implements riverdriver.Executor. If the process is in doubt, it skips
// the outcomes of attempts that no longer run.
func (e *executor) JobSetStateIfRunningMany(ctx context.Context, params *updates) (rows []*rivertype.JobRow, err error) {
	if !e.driver.inDoubt() {
		return e.Executor.JobSetStateIfRunningMany(ctx, params)
	}
	attempts := make([]int32, len(params.ID))
	for i := range params.ID {
		attempts[i] = attemptOf(params, i)
	}
	config := e.driver.config
	err = postgres.BeginFunc(ctx, config.Pool, func(tx pgx.Tx) error {
		current, err := dbsqlc.New(config.Schemas.Rendered(tx)).LockAttempts(ctx, dbsqlc.LockAttemptsParams{
			Jobs: params.ID, Attempts: attempts, Client: config.ID,
		})
		if err != nil || len(current) == 0 {
			return err
		}
		rows, err = e.driver.UnwrapExecutor(tx).JobSetStateIfRunningMany(ctx, only(params, current))
		return err
	})
	return rows, err
}

// only returns the updates of the given jobs.
func only(params *updates, jobs []int64) *updates {
	kept := &updates{Now: params.Now, Schema: params.Schema}
	for i, id := range params.ID {
		if !slices.Contains(jobs, id) {
			continue
		}
		kept.ID = append(kept.ID, id)
		kept.Attempt = append(kept.Attempt, params.Attempt[i])
		kept.ErrData = append(kept.ErrData, params.ErrData[i])
		kept.FinalizedAt = append(kept.FinalizedAt, params.FinalizedAt[i])
		kept.MetadataDoMerge = append(kept.MetadataDoMerge, params.MetadataDoMerge[i])
		kept.MetadataUpdates = append(kept.MetadataUpdates, params.MetadataUpdates[i])
		kept.ScheduledAt = append(kept.ScheduledAt, params.ScheduledAt[i])
		kept.State = append(kept.State, params.State[i])
	}
	return kept
}

// attemptOf returns the attempt whose outcome an update records: a failure has it in its error, and
// a snooze restores the attempt before it. It returns 0 if the update does not say, as for a
// success.
func attemptOf(params *updates, i int) int32 {
	var failure rivertype.AttemptError
	switch {
	case params.ErrData[i] != nil && json.Unmarshal(params.ErrData[i], &failure) == nil:
		return int32(failure.Attempt)
	case params.Attempt[i] != nil:
		return int32(*params.Attempt[i]) + 1
	}
	return 0
}
