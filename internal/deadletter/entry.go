// Package deadletter defines dead letters: their data, their moves, and the queries on them.
package deadletter

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
)

// Status is the state of a dead letter. The database defines the legal moves (dlq.allowed_moves).
type Status string

// The states of a dead letter.
const (
	Pending    Status = "dlq_pending"
	Processing Status = "dlq_processing"
	Manual     Status = "dlq_manual"
	Resolved   Status = "dlq_resolved"
	Failed     Status = "dlq_failed"
	Archived   Status = "dlq_archived"
)

// Open reports whether an entry of this status is open.
func (s Status) Open() bool { return s == Pending || s == Processing || s == Manual }

// Summary is the part of an entry that lists show.
type Summary struct {
	ID             uuid.UUID  `json:"id" doc:"Identifies the entry; sorts by time of capture." db:"id"`
	Status         Status     `json:"status" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_resolved,dlq_failed,dlq_archived" doc:"Where the entry stands." db:"status"`
	Queue          string     `json:"queue" doc:"River queue of the job." db:"queue"`
	Kind           string     `json:"kind" doc:"Kind of the message, or of the job where dlqd did not submit it." db:"kind"`
	EventID        *string    `json:"messageId,omitempty" doc:"The message, where dlqd submitted the job." db:"event_id"`
	RiverJobID     int64      `json:"jobId" doc:"The job that failed first." db:"river_job_id"`
	Source         *string    `json:"source,omitempty" doc:"Who sent the message." db:"source"`
	SubscriberID   *string    `json:"subscriberId,omitempty" doc:"Whom it concerns." db:"subscriber_id"`
	Priority       int16      `json:"priority" doc:"1 is the most urgent, 4 the least." db:"priority"`
	ErrorClass     *string    `json:"errorClass,omitempty" doc:"What kind of trouble it is; absent while undecided." db:"error_class"`
	ErrorType      *string    `json:"errorType,omitempty" doc:"Type of the error." db:"error_type"`
	ErrorCode      *string    `json:"errorCode,omitempty" doc:"Code of the error." db:"error_code"`
	ErrorTitle     *string    `json:"errorTitle,omitempty" doc:"What went wrong, the same text each time, as the worker or the destination says it." db:"error_title"`
	ErrorMessage   *string    `json:"errorMessage,omitempty" doc:"The error of the last attempt (in lists its first 500 characters)." db:"error_message"`
	Destination    *string    `json:"destination,omitempty" doc:"Destination to which the failed delivery went." db:"destination"`
	DestinationURL *string    `json:"destinationUrl,omitempty" doc:"URL of that destination, without what may be secret in it." db:"destination_url"`
	Fingerprint    *string    `json:"fingerprint,omitempty" doc:"Its failure group: equal for entries of a queue that failed for the same reason." db:"fingerprint"`
	AssignedTo     *string    `json:"assignedTo,omitempty" doc:"Who looks after it." db:"assigned_to"`
	Strategy       *string    `json:"strategy,omitempty" enum:"immediate,scheduled,conditional,manual" doc:"What happens next; absent while undecided." db:"strategy"`
	NextRetryAt    *time.Time `json:"nextRetryAt,omitempty" doc:"When a worker looks at it next." db:"next_retry_at"`
	WaitingFor     *string    `json:"waitingFor,omitempty" doc:"What it waits for besides that time: automatic (that automatic redelivery is switched on for it: it is observed), condition: and what does not hold, pace, or order." db:"waiting_for"`
	Next           *string    `json:"next,omitempty" doc:"What happens next, in words; absent once it is closed." db:"next"`
	DLQRetryCount  int32      `json:"dlqRetryCount" doc:"Redeliveries made so far." db:"dlq_retry_count"`
	FirstFailedAt  time.Time  `json:"firstFailedAt" doc:"When the first attempt failed." db:"first_failed_at"`
	LastFailedAt   time.Time  `json:"lastFailedAt" doc:"When the last attempt or redelivery failed." db:"last_failed_at"`
	CreatedAt      time.Time  `json:"createdAt" doc:"When it was captured." db:"created_at"`
	UpdatedAt      time.Time  `json:"updatedAt" doc:"When it last moved." db:"updated_at"`
	ClosedAt       *time.Time `json:"closedAt,omitempty" doc:"When it was closed." db:"closed_at"`
}

// Entry is a dead letter with all its data.
type Entry struct {
	Summary

	SourceType          *string         `json:"sourceType,omitempty" doc:"What kind of thing sent the message." db:"source_type"`
	SourceID            *string         `json:"sourceId,omitempty" doc:"Identifies the sender." db:"source_id"`
	SourceName          *string         `json:"sourceName,omitempty" doc:"Name of the sender, for people." db:"source_name"`
	Version             *string         `json:"version,omitempty" doc:"Version of the form that the message has." db:"event_version"`
	JobKind             string          `json:"jobKind" doc:"River's kind of the job." db:"job_kind"`
	Tags                []string        `json:"tags" doc:"Tags of the job." db:"tags"`
	OriginalEvent       json.RawMessage `json:"originalEvent" doc:"The message whole (the job's args). Never changed." db:"original_event"`
	EditedEvent         json.RawMessage `json:"editedEvent,omitempty" doc:"What redeliveries carry instead, once a person has edited it." db:"edited_event"`
	ErrorStackTrace     *string         `json:"errorStackTrace,omitempty" doc:"Stack trace of a panic." db:"error_stack_trace"`
	ErrorContext        json.RawMessage `json:"errorContext,omitempty" doc:"What the worker recorded beside the error." db:"error_context"`
	RetryHistory        json.RawMessage `json:"retryHistory" doc:"Attempts of the job, as River kept them. processingDuration is how long one took, in seconds: of all that riverdlq saw, else of the last one. systemState is how busy the worker's machine was." db:"retry_history"`
	SystemState         json.RawMessage `json:"systemState,omitempty" doc:"How busy the worker's machine was at the last failure: cpu and memory, in percent. Absent where the worker does not say." db:"system_state"`
	RetryCount          int32           `json:"retryCount" doc:"Attempts that the job had made when it failed." db:"retry_count"`
	MaxRetries          int32           `json:"maxRetries" doc:"Attempts that the job was allowed." db:"max_retries"`
	DLQMaxRetries       int32           `json:"dlqMaxRetries" doc:"Redeliveries after which a failure closes the entry as dlq_failed." db:"dlq_max_retries"`
	ReplayAttempts      json.RawMessage `json:"replayAttempts" doc:"Redeliveries that ended: with their strategy, which is manual where a person or a replay run made one." db:"replay_attempts"`
	Rule                *string         `json:"rule,omitempty" doc:"The rule that chose class and strategy." db:"rule"`
	RedeliveryJobID     *int64          `json:"redeliveryJobId,omitempty" doc:"The job that it waits for." db:"redelivery_job_id"`
	LockedBy            *string         `json:"lockedBy,omitempty" doc:"Worker or person that started the redelivery." db:"locked_by"`
	LockedAt            *time.Time      `json:"lockedAt,omitempty" doc:"When the redelivery was started." db:"locked_at"`
	ReportedClass       *string         `json:"reportedClass,omitempty" doc:"The class that the worker which failed gave the error." db:"reported_class"`
	OrderingKey         *string         `json:"orderingKey,omitempty" doc:"orderingKey of the message." db:"ordering_key"`
	ParkedBy            *string         `json:"parkedBy,omitempty" doc:"Who parked it; absent where its class did." db:"parked_by"`
	Notes               *string         `json:"notes,omitempty" doc:"The last note that a person left." db:"notes"`
	ResolutionStrategy  *string         `json:"resolutionStrategy,omitempty" enum:"automatic_retry,manual_retry,manual_resolution,discard" doc:"How it was closed." db:"resolution_strategy"`
	ResolvedBy          *string         `json:"resolvedBy,omitempty" doc:"Who closed it." db:"resolved_by"`
	ResolutionNotes     *string         `json:"resolutionNotes,omitempty" doc:"What they said." db:"resolution_notes"`
	ResolutionTimestamp *time.Time      `json:"resolutionTimestamp,omitempty" doc:"When it was closed." db:"resolution_timestamp"`
	ConfigVersion       *string         `json:"configVersion,omitempty" doc:"Version of the policy that decided last." db:"config_version"`
	Metadata            json.RawMessage `json:"metadata" doc:"Metadata of the job." db:"metadata"`
}

// Transition is one move of an entry: a row of the audit trail.
type Transition struct {
	At            time.Time       `json:"at" doc:"When." db:"at"`
	FromStatus    *Status         `json:"fromStatus,omitempty" doc:"Absent for the capture." db:"from_status"`
	ToStatus      Status          `json:"toStatus" doc:"Where it went." db:"to_status"`
	Actor         string          `json:"actor" doc:"Who moved it." db:"actor"`
	DBUser        string          `json:"dbUser" doc:"Database user of the session." db:"db_user"`
	Reason        *string         `json:"reason,omitempty" doc:"Why." db:"reason"`
	Note          *string         `json:"note,omitempty" doc:"What the person said." db:"note"`
	Strategy      *string         `json:"strategy,omitempty" doc:"The strategy after the move." db:"strategy"`
	Rule          *string         `json:"rule,omitempty" doc:"The rule after the move." db:"rule"`
	NextRetryAt   *time.Time      `json:"nextRetryAt,omitempty" doc:"When a worker looks at it next." db:"next_retry_at"`
	RiverJobID    *int64          `json:"jobId,omitempty" doc:"The job that the move is about." db:"river_job_id"`
	ConfigVersion *string         `json:"configVersion,omitempty" doc:"Version of the policy that decided last." db:"config_version"`
	Origin        *string         `json:"origin,omitempty" doc:"From where a person made the move." db:"origin"`
	Detail        json.RawMessage `json:"detail,omitempty" doc:"More about the move." db:"detail"`
	Operation     *uuid.UUID      `json:"operation,omitempty" doc:"What the person did in one go, of which it is a part: GET /api/dlq/operations/{id}." db:"operation"`
}
