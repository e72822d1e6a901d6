package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Job is a job of River as the caller may see it: an application's job, or a job that delivers a message.
type Job struct {
	ID          int64      `json:"id" doc:"Id of the job."`
	State       string     `json:"state" enum:"available,cancelled,completed,discarded,pending,retryable,running,scheduled" doc:"River's state of the job."`
	Queue       string     `json:"queue" doc:"Queue of the job."`
	Kind        string     `json:"kind" doc:"Kind of the message or job."`
	MessageID   string     `json:"messageId,omitempty" doc:"Id of the message, if the job delivers one."`
	Priority    int        `json:"priority" doc:"1 is the most urgent, 4 the least."`
	Attempt     int        `json:"attempt" doc:"Attempts made so far."`
	MaxAttempts int        `json:"maxAttempts" doc:"Attempts after which a failing job is discarded."`
	CreatedAt   time.Time  `json:"createdAt" doc:"When the job was inserted."`
	ScheduledAt time.Time  `json:"scheduledAt" doc:"Earliest time of the next attempt, or of the last one."`
	AttemptedAt *time.Time `json:"attemptedAt,omitempty" doc:"When the last attempt began."`
	AttemptedBy string     `json:"attemptedBy,omitempty" doc:"River client of the last attempt."`
	FinalizedAt *time.Time `json:"finalizedAt,omitempty" doc:"When the job ended."`
	HeldFor     string     `json:"heldFor,omitempty" doc:"Why the message is held: breaker, order, redirected or restored; see GET /api/messages/{messageId}."`
	Cancelling  bool       `json:"cancelling,omitempty" doc:"Whether its cancellation was requested. A running job ends as cancelled if its worker heeds that."`
	EntryID     *uuid.UUID `json:"entryId,omitempty" doc:"Dead letter whose redelivery this is."`
	Error       string     `json:"error,omitempty" doc:"Error of the last failed attempt."`
}

// Failure is a failed attempt of a job.
type Failure struct {
	At      *time.Time `json:"at,omitempty" doc:"When the attempt failed."`
	Attempt int        `json:"attempt" doc:"Number of the attempt."`
	Error   string     `json:"error" doc:"Error of the attempt."`
}

// JobPlace is the place of a job in a list.
type JobPlace struct {
	At time.Time
	ID int64
}

// endedStates are the states of jobs that have ended.
var endedStates = map[string]bool{"cancelled": true, "completed": true, "discarded": true}

// HasEnded reports whether the job ended.
func (j *Job) HasEnded() bool { return endedStates[j.State] }

// ListJobs returns up to limit jobs of a queue in a state. The page begins after the place after, or with the first job
// if after is nil. next is the place after which the next page begins; it is nil on the last page. Jobs that have not
// ended are in the order of their time; of ended jobs, the latest is first. For a caller who sees only some kinds, a
// page may have fewer jobs than limit, or none, although further pages have jobs.
func ListJobs(ctx context.Context, db postgres.DB, queue, state string, after *JobPlace, limit int,
) (jobs []Job, next *JobPlace, err error) {
	queries := dbsqlc.New(db)
	input := dbsqlc.ListJobsParams{Queue: queue, State: state, MaxJobs: int32(limit + 1)}
	if after != nil {
		input.After, input.AfterID = &after.At, &after.ID
	}
	found, err := queries.ListJobs(ctx, input)
	if err != nil {
		return nil, nil, err
	}
	var ids []int64
	for i, row := range found {
		if len(ids) == limit {
			next = &JobPlace{found[i-1].At, found[i-1].ID}
			break
		}
		if row.Visible {
			ids = append(ids, row.ID)
		}
	}
	// The query reads limit+1 places. If it found all of them, more jobs may follow.
	if next == nil && len(found) > limit {
		next = &JobPlace{found[len(found)-1].At, found[len(found)-1].ID}
	}
	rows, err := queries.ShowJobs(ctx, dbsqlc.ShowJobsParams{Ids: ids})
	if err != nil {
		return nil, nil, err
	}
	byID := make(map[int64]*dbsqlc.ShowJobsRow, len(rows))
	for i := range rows {
		byID[rows[i].ID] = &rows[i]
	}
	for _, id := range ids {
		if row := byID[id]; row != nil && row.State == state { // else the job's state has changed since the list was read
			job, _, err := jobOf(row)
			if err != nil {
				return nil, nil, err
			}
			jobs = append(jobs, *job)
		}
	}
	return jobs, next, nil
}

// FindJob returns a job, its failed attempts, and its args (null if the caller may not see the args). The job is nil if
// no job has the id, or if the job is outside of the caller's scope.
func FindJob(ctx context.Context, db postgres.DB, id int64) (*Job, []Failure, json.RawMessage, error) {
	rows, err := dbsqlc.New(db).ShowJobs(ctx, dbsqlc.ShowJobsParams{Ids: []int64{id}, Everything: true})
	if err != nil || len(rows) == 0 {
		return nil, nil, nil, err
	}
	job, failures, err := jobOf(&rows[0])
	return job, failures, rows[0].Args, err
}

// CancelJob cancels a job that has not ended, in a transaction. If the job is running, CancelJob asks the job's worker
// to end the job. It returns the act for the audit trail. allowed, if not nil, is called before the change; an error of
// allowed prevents the change. CancelJob fails instead of waiting if another session has locked the job.
func CancelJob(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, db postgres.DB, id int64,
	allowed func() error,
) (act string, err error) {
	job, err := lockJob(ctx, db, id, "cancel", "available", "pending", "retryable", "running", "scheduled")
	if err == nil && allowed != nil {
		err = allowed()
	}
	if err == nil {
		_, err = client.JobCancelTx(ctx, tx, id)
	}
	if err != nil {
		return "", err
	}
	if job.State == "running" { // the job's worker may still complete it
		return fmt.Sprintf("asked running job %d to end", id), nil
	}
	return fmt.Sprintf("cancelled job %d", id), nil
}

// RetryJob makes a job available in a transaction, and returns the act for the audit trail. The job must be retryable
// or scheduled, or cancelled without a dead letter and without a place in an order. RetryJob fails instead of waiting
// if another session has locked the job.
func RetryJob(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, db postgres.DB, id int64,
) (act string, err error) {
	job, err := lockJob(ctx, db, id, "retry", "retryable", "scheduled", "cancelled")
	switch {
	case err != nil:
		return "", err
	case job.State == "cancelled" && job.HasEntry:
		return "", notAllowed("", "job %d: has a dead letter; replay that", id)
	case job.State == "cancelled" && job.HasOrder:
		return "", notAllowed("Submit the message again, with another messageId.",
			"job %d: later messages with its ordering key no longer wait for it", id)
	}
	_, err = client.JobRetryTx(ctx, tx, id)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "23505" {
		return "", notAllowed("", "job %d: another job has its unique key", id)
	}
	return fmt.Sprintf("retried job %d", id), err
}

func notAllowed(hint, detail string, args ...any) error {
	return &deadletter.MoveError{Kind: deadletter.ErrNotAllowed, Detail: fmt.Sprintf(detail, args...), Hint: hint}
}

// lockJob locks a job until the end of the transaction, so that River finds the state that lockJob checked. It returns
// an error if the job is in none of the allowed states, if another session has locked the job, or if there is no such
// job.
func lockJob(ctx context.Context, tx postgres.DB, id int64, verb string,
	allowed ...string,
) (*dbsqlc.LockJobRow, error) {
	job, err := dbsqlc.New(tx).LockJob(ctx, id)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, notAllowed("Try again.", "job %d: is locked by another session, or just ended", id)
	case err == nil && !slices.Contains(allowed, job.State):
		return nil, notAllowed("", "job %d: cannot %s from %s (allowed: %s)", id, verb, job.State,
			strings.Join(allowed, ", "))
	}
	return &job, err
}

func jobOf(row *dbsqlc.ShowJobsRow) (*Job, []Failure, error) {
	job := &Job{
		ID: row.ID, State: row.State, Queue: row.Queue, Kind: row.Kind, MessageID: row.MessageID,
		Priority: int(row.Priority), Attempt: int(row.Attempt), MaxAttempts: int(row.MaxAttempts),
		CreatedAt: row.CreatedAt, ScheduledAt: row.ScheduledAt, AttemptedBy: row.AttemptedBy, HeldFor: row.HeldFor,
		Cancelling: row.Cancelling,
	}
	if !row.AttemptedAt.Equal(time.Unix(0, 0)) {
		job.AttemptedAt = &row.AttemptedAt
	}
	if !row.FinalizedAt.Equal(time.Unix(0, 0)) {
		job.FinalizedAt = &row.FinalizedAt
	}
	if row.EntryID != uuid.Nil {
		job.EntryID = &row.EntryID
	}
	failures := []Failure{}
	if err := json.Unmarshal(row.Errors, &failures); err != nil {
		return nil, nil, err
	}
	if len(failures) > 0 {
		job.Error = failures[len(failures)-1].Error
	}
	return job, failures, nil
}
