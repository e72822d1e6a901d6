// Package deadletter defines dead letters: their data, their moves, and the queries on them.
package deadletter

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// Status is the state of a dead letter. The database defines the allowed moves (dlq.allowed_moves).
type Status string

// The states of a dead letter.
const (
	Pending    Status = "dlq_pending"
	Processing Status = "dlq_processing"
	Manual     Status = "dlq_manual"
	Returned   Status = "dlq_returned" // its record is published again, but the consumer group may not have read it
	Resolved   Status = "dlq_resolved"
	Failed     Status = "dlq_failed"
	Archived   Status = "dlq_archived"
)

// Open reports whether an entry of this status is open.
func (s Status) Open() bool { return s == Pending || s == Processing || s == Manual }

// Summary is the part of an entry that lists show.
type Summary struct {
	ID             uuid.UUID  `json:"id" doc:"Identifies the entry (UUIDv7); ids sort by time of failure." db:"id"`
	Status         Status     `json:"status" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"State of the entry." db:"status"`
	Queue          string     `json:"queue" doc:"River queue of the job." db:"queue"`
	Kind           string     `json:"kind" doc:"Kind of the message, or of the job if dlqd did not submit it." db:"kind"`
	EventID        *string    `json:"messageId,omitempty" doc:"Id of the message; absent if dlqd did not submit the job." db:"event_id"`
	RiverJobID     int64      `json:"jobId" doc:"The job that failed first." db:"river_job_id"`
	Source         *string    `json:"source,omitempty" doc:"Sender of the message." db:"source"`
	SubscriberID   *string    `json:"subscriberId,omitempty" doc:"Subscriber that the message concerns." db:"subscriber_id"`
	Priority       int16      `json:"priority" doc:"River's priority, from 1 (most urgent) to 4 (least urgent)." db:"priority"`
	ErrorClass     *string    `json:"errorClass,omitempty" doc:"Class of the error; absent until a worker has decided it." db:"error_class"`
	ErrorType      *string    `json:"errorType,omitempty" doc:"Type of the error." db:"error_type"`
	ErrorCode      *string    `json:"errorCode,omitempty" doc:"Code of the error." db:"error_code"`
	ErrorTitle     *string    `json:"errorTitle,omitempty" doc:"Short text that is the same for each occurrence of the error, from the worker or the destination." db:"error_title"`
	ErrorMessage   *string    `json:"errorMessage,omitempty" doc:"Error of the last attempt; lists show its first 500 characters." db:"error_message"`
	Destination    *string    `json:"destination,omitempty" doc:"Destination of the failed delivery." db:"destination"`
	DestinationURL *string    `json:"destinationUrl,omitempty" doc:"URL of the destination, without parts that may be secret." db:"destination_url"`
	Fingerprint    *string    `json:"fingerprint,omitempty" doc:"Failure group: the same for entries of a queue that failed for the same reason." db:"fingerprint"`
	AssignedTo     *string    `json:"assignedTo,omitempty" doc:"Assignee." db:"assigned_to"`
	Strategy       *string    `json:"strategy,omitempty" doc:"How the entry is handled next; absent until a worker has decided it." db:"strategy"`
	NextRetryAt    *time.Time `json:"nextRetryAt,omitempty" doc:"Time at which a worker handles the entry next." db:"next_retry_at"`
	WaitingFor     *string    `json:"waitingFor,omitempty" doc:"What the entry waits for besides nextRetryAt: automatic (automatic redelivery is off for it, so it is only observed), condition: followed by the unmet condition, pace, order (an earlier entry with its ordering key), or run (a progressive replay run that has not ended)." db:"waiting_for"`
	Next           *string    `json:"next,omitempty" doc:"Description of the next step; absent for closed entries." db:"next"`
	DLQRetryCount  int32      `json:"dlqRetryCount" doc:"Number of redeliveries so far." db:"dlq_retry_count"`
	FirstFailedAt  time.Time  `json:"firstFailedAt" doc:"Time at which the first attempt failed." db:"first_failed_at"`
	LastFailedAt   time.Time  `json:"lastFailedAt" doc:"Time at which the last attempt or redelivery failed." db:"last_failed_at"`
	CreatedAt      time.Time  `json:"createdAt" doc:"Time of capture." db:"created_at"`
	UpdatedAt      time.Time  `json:"updatedAt" doc:"Time of the last move." db:"updated_at"`
	ClosedAt       *time.Time `json:"closedAt,omitempty" doc:"Time at which the entry was closed." db:"closed_at"`
	Record         *Record    `json:"record,omitempty" doc:"The record of a topic from which the entry was made." db:"record"`
	Review         *Review    `json:"review,omitempty" doc:"The operator who has the entry in review; absent if none has." db:"-"`
}

// Record describes the record from which an entry was made, without the record's bytes.
type Record struct {
	Cluster           string    `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic             string    `json:"topic" doc:"The topic that dlqd read it from."`
	Partition         int32     `json:"partition" doc:"Partition of the topic."`
	Offset            int64     `json:"offset" doc:"Offset in the partition."`
	At                time.Time `json:"at" doc:"Timestamp of the record."`
	Group             string    `json:"group,omitempty" doc:"The consumer group that failed."`
	Node              string    `json:"node,omitempty" doc:"The node of a pipeline that failed."`
	OriginalTopic     string    `json:"originalTopic,omitempty" doc:"The topic in which the record failed."`
	OriginalPartition *int32    `json:"originalPartition,omitempty" doc:"The partition in which it failed."`
	OriginalOffset    *int64    `json:"originalOffset,omitempty" doc:"The offset at which it failed."`
	Form              string    `json:"form" doc:"Form of the value: json, text, binary, decoded, null, or absent if it is larger than maxRecordBytes."`
	Bytes             *int64    `json:"bytes,omitempty" doc:"Size of the value."`
}

// Place returns the topic, the partition and the offset as a text.
func (r *Record) Place() string {
	return fmt.Sprintf("%s/%d at offset %d", r.Topic, r.Partition, r.Offset)
}

// Entry is a dead letter with all its data.
type Entry struct {
	Summary

	SourceType          *string         `json:"sourceType,omitempty" doc:"Type of the sender." db:"source_type"`
	SourceID            *string         `json:"sourceId,omitempty" doc:"Identifies the sender." db:"source_id"`
	SourceName          *string         `json:"sourceName,omitempty" doc:"Display name of the sender." db:"source_name"`
	Version             *string         `json:"version,omitempty" doc:"Version of the message format." db:"event_version"`
	JobKind             string          `json:"jobKind" doc:"River's kind of the job." db:"job_kind"`
	Tags                []string        `json:"tags" doc:"Tags of the job." db:"tags"`
	OriginalEvent       json.RawMessage `json:"originalEvent" doc:"The complete message (the job's args). It never changes." db:"original_event"`
	EditedEvent         json.RawMessage `json:"editedEvent,omitempty" doc:"Message that redeliveries carry instead, after an edit." db:"edited_event"`
	ErrorStackTrace     *string         `json:"errorStackTrace,omitempty" doc:"Stack trace of a panic." db:"error_stack_trace"`
	ErrorContext        json.RawMessage `json:"errorContext,omitempty" doc:"Context that the worker recorded with the error." db:"error_context"`
	RetryHistory        json.RawMessage `json:"retryHistory" doc:"Attempts of the job, from River. processingDuration is the duration of an attempt in seconds: of every attempt if the worker uses riverdlq, otherwise of the last one. systemState is the load of the worker's machine." db:"retry_history"`
	SystemState         json.RawMessage `json:"systemState,omitempty" doc:"Load of the worker's machine at the last failure: cpu and memory, in percent. Absent if the worker does not report it." db:"system_state"`
	RetryCount          int32           `json:"retryCount" doc:"Number of attempts of the job when it failed." db:"retry_count"`
	MaxRetries          int32           `json:"maxRetries" doc:"Maximum number of attempts of the job." db:"max_retries"`
	DLQMaxRetries       int32           `json:"dlqMaxRetries" doc:"Number of redeliveries after which a failure closes the entry as dlq_failed." db:"dlq_max_retries"`
	ReplayAttempts      json.RawMessage `json:"replayAttempts" doc:"Redeliveries that have ended. The strategy is manual for those of an operator or a replay run." db:"replay_attempts"`
	Rule                *string         `json:"rule,omitempty" doc:"The rule that chose class and strategy." db:"rule"`
	RedeliveryJobID     *int64          `json:"redeliveryJobId,omitempty" doc:"Job that the entry waits for." db:"redelivery_job_id"`
	LockedBy            *string         `json:"lockedBy,omitempty" doc:"Worker or user that started the redelivery." db:"locked_by"`
	LockedAt            *time.Time      `json:"lockedAt,omitempty" doc:"Time at which the redelivery started." db:"locked_at"`
	ReportedClass       *string         `json:"reportedClass,omitempty" doc:"Class that the failing worker gave the error." db:"reported_class"`
	OrderingKey         *string         `json:"orderingKey,omitempty" doc:"orderingKey of the message." db:"ordering_key"`
	ParkedBy            *string         `json:"parkedBy,omitempty" doc:"User that parked the entry; absent if its class requires manual handling." db:"parked_by"`
	Notes               *string         `json:"notes,omitempty" doc:"Latest note of an operator." db:"notes"`
	ResolutionStrategy  *string         `json:"resolutionStrategy,omitempty" enum:"automatic_retry,manual_retry,manual_resolution,discard,expired" doc:"How it was closed." db:"resolution_strategy"`
	ResolvedBy          *string         `json:"resolvedBy,omitempty" doc:"User or worker that closed the entry." db:"resolved_by"`
	ResolutionNotes     *string         `json:"resolutionNotes,omitempty" doc:"Note of the user that closed it." db:"resolution_notes"`
	ResolutionTimestamp *time.Time      `json:"resolutionTimestamp,omitempty" doc:"Time at which the entry was closed." db:"resolution_timestamp"`
	ConfigVersion       *string         `json:"configVersion,omitempty" doc:"Version of the policy that last decided the entry." db:"config_version"`
	Metadata            json.RawMessage `json:"metadata" doc:"Metadata of the job." db:"metadata"`
}

// Transition is one move of an entry, which is a row of the audit trail.
type Transition struct {
	At            time.Time       `json:"at" doc:"When." db:"at"`
	FromStatus    *Status         `json:"fromStatus,omitempty" doc:"Absent for the capture." db:"from_status"`
	ToStatus      Status          `json:"toStatus" doc:"Status after the move." db:"to_status"`
	Actor         string          `json:"actor" doc:"User, worker or part of dlqd that made the move." db:"actor"`
	DBUser        string          `json:"dbUser" doc:"Database user of the session." db:"db_user"`
	Reason        *string         `json:"reason,omitempty" doc:"Reason of the move." db:"reason"`
	Note          *string         `json:"note,omitempty" doc:"Note of the operator." db:"note"`
	Strategy      *string         `json:"strategy,omitempty" doc:"The strategy after the move." db:"strategy"`
	Rule          *string         `json:"rule,omitempty" doc:"The rule after the move." db:"rule"`
	NextRetryAt   *time.Time      `json:"nextRetryAt,omitempty" doc:"Time at which a worker handles the entry next." db:"next_retry_at"`
	RiverJobID    *int64          `json:"jobId,omitempty" doc:"The job that caused the move." db:"river_job_id"`
	ConfigVersion *string         `json:"configVersion,omitempty" doc:"Version of the policy that last decided the entry." db:"config_version"`
	Origin        *string         `json:"origin,omitempty" doc:"Interface and address that the move came from; absent for automatic moves." db:"origin"`
	Detail        json.RawMessage `json:"detail,omitempty" doc:"Further data on the move." db:"detail"`
	Operation     *uuid.UUID      `json:"operation,omitempty" doc:"Operation that the move is part of: GET /api/dlq/operations/{id}." db:"operation"`
}
