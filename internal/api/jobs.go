package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/ingest"
)

// JobsInput selects jobs of a queue in a state.
type JobsInput struct {
	Queue  string `query:"queue" required:"true" minLength:"1" maxLength:"127" doc:"Name of the queue." example:"payment-processing"`
	State  string `query:"state" required:"true" enum:"available,cancelled,completed,discarded,pending,retryable,running,scheduled" doc:"River's state of the jobs." example:"retryable"`
	Limit  int    `query:"limit" minimum:"1" maximum:"200" default:"50" doc:"Jobs in a page."`
	Cursor string `query:"cursor" pattern:"^-?[0-9]{1,17}-[0-9]{1,18}$" doc:"next of the previous page."`
}

// JobPage is a page of jobs.
type JobPage struct {
	Jobs []delivery.Job `json:"jobs" doc:"Jobs of this page."`
	Next string         `json:"next,omitempty" doc:"Cursor of the next page; absent on the last. A caller who sees only some kinds of the queue may get a page without jobs."`
}

// JobDetail is everything about a job.
type JobDetail struct {
	delivery.Job

	Errors     []delivery.Failure     `json:"errors" doc:"Failed attempts that River keeps, oldest first."`
	Args       json.RawMessage        `json:"args,omitempty" doc:"The message, or the args of the application's job; absent if the caller does not see payloads."`
	DeadLetter *ingest.DeadLetterLink `json:"deadLetter,omitempty" doc:"Dead letter of the job, or whose redelivery it is."`
}

// JobInput names a job.
type JobInput struct {
	ID int64 `path:"id" minimum:"1" doc:"Id of the job." example:"41"`
}

// JobActionInput is an action on a job.
type JobActionInput struct {
	JobInput

	Body *Action
}

// Operations on River's jobs.
var (
	ListJobs  = Operation[JobsInput, JobPage]{"list-jobs", http.MethodGet, "/api/jobs"}
	GetJob    = Operation[JobInput, JobDetail]{"get-job", http.MethodGet, "/api/jobs/{id}"}
	CancelJob = Operation[JobActionInput, JobDetail]{"cancel-job", http.MethodPost, "/api/jobs/{id}/cancel"}
	RetryJob  = Operation[JobActionInput, JobDetail]{"retry-job", http.MethodPost, "/api/jobs/{id}/retry"}
)

// jobsForgotten describes how long jobs can be found.
const jobsForgotten = "River deletes jobs after they ended: by its defaults, completed and cancelled ones after 24 hours, " +
	"and discarded ones, which have a dead letter, after 7 days."

func (s *service) registerJobs(api huma.API) {
	tags := []string{"jobs"}
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	job := delivery.Job{
		ID: 41, State: "retryable", Queue: "default", Kind: "payment.captured", MessageID: messageExample, Priority: 2,
		Attempt: 1, MaxAttempts: 3, CreatedAt: noon, ScheduledAt: noon.Add(time.Minute), AttemptedAt: &noon,
		Error: "503 Service Unavailable",
	}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List the jobs of a queue in a state",
		Description: "Jobs that have not ended are in the order of their time, the others begin with the latest. Each page " +
			"costs the same, however many jobs there are. " + jobsForgotten,
		Errors: []int{422, 503},
	}
	example(&list, http.StatusOK, JobPage{Jobs: []delivery.Job{job}, Next: "1795262460000000-41"})
	register(s, api, ListJobs, list, s.listJobs)

	detail := JobDetail{Job: job, Errors: []delivery.Failure{{At: &noon, Attempt: 1, Error: job.Error}}}
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get a job: its state, next attempt and failed attempts", Description: jobsForgotten,
		Errors: []int{404, 422, 503},
	}
	example(&get, http.StatusOK, detail)
	register(s, api, GetJob, get, s.getJob)

	for _, verb := range []struct {
		operation                  Operation[JobActionInput, JobDetail]
		done                       string
		summary, description, from string
		run                        func(ctx context.Context, tx pgx.Tx, id int64) (act string, err error)
	}{
		{
			CancelJob, "cancelled", "Cancel a job that has not ended",
			"A job that is cancelled gets no dead letter. A running job is asked to end; if its worker ignores the " +
				"cancellation, the attempt continues, and no other follows. A redelivery that is cancelled counts as failed: its " +
				"dead letter is pending again, and the policy may redeliver it. If the policy requires a second person to " +
				"discard a dead letter of the queue, cancelling a job that is no redelivery requires one, too.",
			"available, pending, retryable, running and scheduled",
			func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
				db := s.Store.In(tx)
				return delivery.CancelJob(ctx, s.River, tx, db, id,
					func() error { return approval.RequireForCancel(ctx, db, id) })
			},
		},
		{
			RetryJob, "retried", "Run a waiting job now",
			"The next attempt begins as soon as a worker is free. A message whose destination's circuit breaker is open, or " +
				"that waits for an earlier message with its ordering key, is held again. A cancelled job without a dead " +
				"letter and without an ordering key is put back.", "retryable, scheduled and cancelled",
			func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
				return delivery.RetryJob(ctx, s.River, tx, s.Store.In(tx), id)
			},
		},
	} {
		op := huma.Operation{
			Tags: tags, Summary: verb.summary,
			Description: verb.description + " Allowed from " + verb.from + ". Answers 409 if the job's state does not allow " +
				"it, or if another session has locked the job.",
			Errors: []int{400, 404, 409, 422, 503},
		}
		example(&op, http.StatusOK, detail)
		register(s, api, verb.operation, op, func(ctx context.Context, in *JobActionInput) (*JobDetail, error) {
			before, err := s.getJob(ctx, &in.JobInput)
			if err != nil {
				return nil, err
			}
			if verb.operation == RetryJob && before.State == "cancelled" && before.DeadLetter != nil {
				return nil, huma.Error409Conflict(
					fmt.Sprintf("job %d: has dead letter %s; replay that", in.ID, before.DeadLetter.ID))
			}
			if err := s.Store.RecordDone(ctx, "queue "+before.Queue, in.Body.act(ctx), func(tx pgx.Tx) (string, error) {
				return verb.run(ctx, tx, in.ID)
			}); err != nil {
				return nil, s.approvalOrProblem(ctx, err, approval.Cancel, approval.Cancellation{Job: in.ID}, in.Body)
			}
			after, err := s.getJob(ctx, &in.JobInput)
			if problem, ok := errors.AsType[huma.StatusError](err); ok && problem.GetStatus() == http.StatusNotFound {
				before.State = verb.done // a redelivery's job may have been deleted after it ended
				return before, nil
			}
			return after, err
		})
	}
}

func (s *service) listJobs(ctx context.Context, in *JobsInput) (*JobPage, error) {
	var after *delivery.JobPlace
	// The cursor is microseconds and id; huma has checked its format.
	if i := strings.LastIndex(in.Cursor, "-"); i > 0 {
		us, _ := strconv.ParseInt(in.Cursor[:i], 10, 64)
		id, _ := strconv.ParseInt(in.Cursor[i+1:], 10, 64)
		after = &delivery.JobPlace{At: time.UnixMicro(us), ID: id}
	}
	jobs, next, err := delivery.ListJobs(ctx, s.Store.DB(), in.Queue, in.State, after, in.Limit)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	page := &JobPage{Jobs: append([]delivery.Job{}, jobs...)}
	if next != nil {
		page.Next = fmt.Sprintf("%d-%d", next.At.UnixMicro(), next.ID)
	}
	return page, nil
}

func (s *service) getJob(ctx context.Context, in *JobInput) (*JobDetail, error) {
	job, failures, args, err := delivery.FindJob(ctx, s.Store.DB(), in.ID)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	if job == nil {
		return nil, huma.Error404NotFound(
			fmt.Sprintf("job %d: no such job; it never existed, or River has deleted it", in.ID))
	}
	out := &JobDetail{Job: *job, Errors: failures}
	if string(args) != "null" {
		out.Args = args
	}
	page := deadletter.Page{Filter: filter.Filter{JobID: []int64{in.ID}}, Limit: 1}
	found, err := s.Store.Search(ctx, page, searchBudget)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	if len(found.Entries) == 0 && !found.SearchedTo.IsZero() {
		return nil, huma.Error503ServiceUnavailable(unreachable)
	}
	if len(found.Entries) > 0 {
		out.DeadLetter = ingest.LinkTo(found.Entries[0].ID, string(found.Entries[0].Status))
	}
	return out, nil
}
