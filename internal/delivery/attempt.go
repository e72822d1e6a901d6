package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// River's completer sets a job's state by the job's id. It checks neither which attempt the outcome belongs to, nor
// whether the id still belongs to the same job. An outcome can therefore end an attempt that another process runs:
//
//   - A process that was paused or cut off from the database for 30 s may still run attempts of jobs that another
//     process has rescued and runs. A late failure would end the job while the other process's attempt still runs, and
//     that attempt's success would be lost. A process that may have been considered dead ("in doubt") checks the attempt
//     before it sends a message and before it records outcomes.
//   - After the promotion of an asynchronous standby, River assigns ids again that the standby did not have. The
//     outcome of a lost message would end the new message with the same id. An outcome is checked if it is recorded on
//     another server than the one from which the job was fetched, or if one of the two servers is not known.
//
// Other outcomes are recorded without a check.

// errAttemptLost is the error of an attempt in which the message is not sent, because another process may have rescued
// the job.
var errAttemptLost = errors.New("the attempt is over: another process may deliver the message")

// inDoubt reports whether another process may have rescued a job that this process runs.
func (w *Worker) inDoubt() bool {
	return w.config.InDoubt != nil && w.config.InDoubt(w.config.Planner().Policy().MaxTimeout()+2*rescueSlack)
}

// isCurrentAttempt reports whether job is still running, in the attempt that this worker runs.
func (w *Worker) isCurrentAttempt(ctx context.Context, job *river.Job[Args]) (bool, error) {
	return dbsqlc.New(w.config.DB).AttemptRuns(ctx, dbsqlc.AttemptRunsParams{
		Job: job.ID, CreatedAt: job.CreatedAt, Attempt: int32(job.Attempt),
	})
}

// driver is River's driver. If the client must check outcomes, driver records only those of current attempts.
type driver struct {
	*postgres.Driver

	config  *ClientConfig
	inDoubt func() bool
	fetches fetches
}

var _ riverdriver.Driver[pgx.Tx] = (*driver)(nil)

// GetExecutor implements riverdriver.Driver.
func (d *driver) GetExecutor() riverdriver.Executor {
	return &executor{Executor: d.Driver.GetExecutor(), driver: d}
}

// updates are the outcomes of attempts, in one array for each column of river_job.
type updates = riverdriver.JobSetStateIfRunningManyParams

type executor struct {
	riverdriver.Executor

	driver *driver
}

// JobSetStateIfRunningMany implements riverdriver.Executor. If the process is in doubt, or the jobs were not all
// fetched from the connection's server, it records only the outcomes of current attempts. It checks both conditions
// after it has acquired a connection, because they can change while it waits for one.
func (e *executor) JobSetStateIfRunningMany(ctx context.Context,
	params *updates,
) (rows []*rivertype.JobRow, err error) {
	d := e.driver
	err = d.OnServer(ctx, func(db pgx.Tx, server string) error {
		createdAt, same := d.fetches.fetchedFrom(server, params.ID)
		if same && !d.inDoubt() {
			rows, err = d.UnwrapExecutor(db).JobSetStateIfRunningMany(ctx, params)
			return err
		}
		rows, err = d.setCurrent(ctx, db, params, createdAt)
		return err
	})
	d.fetches.recorded(params.ID, err)
	return rows, err
}

// setCurrent records the outcomes of attempts that are still current: this client runs the job, at the same attempt.
func (d *driver) setCurrent(ctx context.Context, db pgx.Tx, params *updates,
	createdAt []time.Time,
) (rows []*rivertype.JobRow, err error) {
	attempts := make([]int32, len(params.ID))
	for i := range params.ID {
		attempts[i] = attemptOf(params, i)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		current, err := dbsqlc.New(d.config.Schemas.Rendered(tx)).LockAttempts(ctx, dbsqlc.LockAttemptsParams{
			Jobs: params.ID, CreatedAt: createdAt, Attempts: attempts, Client: d.config.ID,
		})
		if err != nil || len(current) == 0 {
			return err
		}
		rows, err = d.UnwrapExecutor(tx).JobSetStateIfRunningMany(ctx, updatesOf(params, current))
		return err
	})
	return rows, err
}

// updatesOf returns the updates of the given jobs.
func updatesOf(params *updates, jobs []int64) *updates {
	filtered := &updates{Now: params.Now, Schema: params.Schema}
	for i, id := range params.ID {
		if !slices.Contains(jobs, id) {
			continue
		}
		filtered.ID = append(filtered.ID, id)
		filtered.Attempt = append(filtered.Attempt, params.Attempt[i])
		filtered.ErrData = append(filtered.ErrData, params.ErrData[i])
		filtered.FinalizedAt = append(filtered.FinalizedAt, params.FinalizedAt[i])
		filtered.MetadataDoMerge = append(filtered.MetadataDoMerge, params.MetadataDoMerge[i])
		filtered.MetadataUpdates = append(filtered.MetadataUpdates, params.MetadataUpdates[i])
		filtered.ScheduledAt = append(filtered.ScheduledAt, params.ScheduledAt[i])
		filtered.State = append(filtered.State, params.State[i])
	}
	return filtered
}

// attemptOf returns the number of the attempt whose outcome an update records. A failure has that number in its error.
// A snooze sets the job's attempt back by one, so attemptOf adds one. It returns 0 if the update does not contain the
// number, as for a success.
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
