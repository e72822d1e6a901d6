package ingest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/message"
)

// State is the state of a message.
type State string

// The states of a message. A message ends as completed, dead-lettered, or cancelled by an operator.
const (
	Queued       State = "queued"
	Running      State = "running"
	Retrying     State = "retrying"
	Completed    State = "completed"
	DeadLettered State = "dead-lettered"
	Cancelled    State = "cancelled"
)

// ErrNoMessage means that a message is unknown: it was never stored, it ended longer ago than River keeps jobs and has
// no dead letter, or it is outside the caller's scope.
var ErrNoMessage = errors.New("no such message")

// Position is the current state of a message.
type Position struct {
	MessageID      string          `json:"messageId" doc:"Id of the message."`
	State          State           `json:"state" enum:"queued,running,retrying,completed,dead-lettered,cancelled" doc:"State of the message."`
	JobID          int64           `json:"jobId,omitempty" doc:"Id of the message's job; absent once River has deleted the job."`
	Attempt        int             `json:"attempt,omitempty" doc:"Attempts made so far."`
	MaxAttempts    int             `json:"maxAttempts,omitempty" doc:"Attempts after which a failing message becomes a dead letter."`
	SubmittedAt    *time.Time      `json:"submittedAt,omitempty" doc:"When the message was stored."`
	NextAttemptAt  *time.Time      `json:"nextAttemptAt,omitempty" doc:"Time of the next delivery, if the message waits."`
	HeldFor        string          `json:"heldFor,omitempty" enum:"breaker,order,redirected,restored" doc:"Why the message is held. breaker: the circuit breaker of its destination is open. redirected: that of the destination to which an operator sent it is open. order: an earlier message of its ordering key is not done. restored: the database was restored from a backup, and no operator has resumed yet."`
	FinishedAt     *time.Time      `json:"finishedAt,omitempty" doc:"When the message's job ended."`
	LogicalFailure json.RawMessage `json:"logicalFailure,omitempty" doc:"Answer of a receiver that reported a logical failure: a 2xx status with success: false."`
	DeadLetter     *DeadLetterLink `json:"deadLetter,omitempty" doc:"Dead letter of the message, if there is one."`
}

// DeadLetterLink points to a message's dead letter.
type DeadLetterLink struct {
	ID     uuid.UUID `json:"id" doc:"Id of the entry."`
	Status string    `json:"status" doc:"Status of the entry."`
	URL    string    `json:"url" doc:"Path of the entry in this API."`
}

// Lookup returns the state of a message, or ErrNoMessage.
func (i *Ingester) Lookup(ctx context.Context, messageID string) (*Position, error) {
	queries := dbsqlc.New(i.config.Schemas.Rendered(i.config.Pool))
	position := &Position{MessageID: messageID}
	job, err := queries.MessageJob(ctx, message.UniqueKey(messageID))
	switch {
	case err == nil:
		position.JobID = job.ID
		position.Attempt, position.MaxAttempts = int(job.Attempt), int(job.MaxAttempts)
		position.SubmittedAt, position.FinishedAt = &job.CreatedAt, job.FinalizedAt
		position.State = stateOf(rivertype.JobState(job.State), position.Attempt)
		if position.State == Queued || position.State == Retrying {
			position.NextAttemptAt = &job.ScheduledAt
		}
		var metadata map[string]json.RawMessage
		_ = json.Unmarshal(job.Metadata, &metadata) // metadata that is not an object has no logical failure
		position.LogicalFailure = metadata["dlq:logical_failure"]
		if job.State == string(rivertype.JobStateScheduled) {
			_ = json.Unmarshal(metadata[delivery.HeldKey], &position.HeldFor) // not held if the key has no text
		}
		if position.State != Cancelled {
			return position, nil
		}
	case !errors.Is(err, pgx.ErrNoRows):
		return nil, err
	}

	entries, err := queries.EntriesByEvent(ctx, messageID)
	if err != nil {
		return nil, err
	}
	switch {
	case len(entries) > 0:
		position.State = DeadLettered
		position.DeadLetter = LinkTo(entries[0].ID, entries[0].Status)
	case position.JobID == 0:
		return nil, fmt.Errorf("message %s: %w", messageID, ErrNoMessage)
	}
	return position, nil
}

// LinkTo returns the link to a dead letter.
func LinkTo(entry uuid.UUID, status string) *DeadLetterLink {
	return &DeadLetterLink{ID: entry, Status: status, URL: "/api/dlq/entries/" + entry.String()}
}

// stateOf returns the message state for a job state. For a job that ended without success it returns Cancelled: only
// the dead letters show whether the job became a dead letter.
func stateOf(state rivertype.JobState, attempt int) State {
	switch state { //nolint:exhaustive // the rest wait
	case rivertype.JobStateRunning:
		return Running
	case rivertype.JobStateCompleted:
		return Completed
	case rivertype.JobStateCancelled, rivertype.JobStateDiscarded:
		return Cancelled
	default:
		if attempt > 0 {
			return Retrying
		}
		return Queued
	}
}
