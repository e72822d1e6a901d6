package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/delivery"
)

// maxQueues is the maximum number of queues that are read from River.
const maxQueues = 1000

// Queue is a River queue, of dlqd or of an application.
type Queue struct {
	Name        string     `json:"name" doc:"Name of the queue." example:"payment-processing"`
	PausedAt    *time.Time `json:"pausedAt,omitempty" doc:"When the queue was paused; absent if it is not. No client works a paused queue."`
	Destination string     `json:"destination,omitempty" doc:"Destination of its messages, if dlqd delivers them."`
	Concurrency int        `json:"concurrency,omitempty" doc:"Maximum number of concurrent deliveries of one process, if dlqd delivers its messages."`
	Available   int64      `json:"available" doc:"Jobs that can run now."`
	Running     int64      `json:"running" doc:"Jobs that are running."`
	Retryable   int64      `json:"retryable" doc:"Jobs that wait for their next attempt."`
	Scheduled   int64      `json:"scheduled" doc:"Jobs that wait for their time, including held and pending ones."`
	Pending     int64      `json:"pending" doc:"Jobs in River's state pending, which a client of River has to release."`
	Held        int64      `json:"held" doc:"Messages that wait for a circuit breaker, or for another message with their ordering key."`
	DeadLetters int64      `json:"deadLetters" doc:"Open dead letters."`
	// OldestReady and the rates come from a limited number of rows of River's indexes (dlq.queue_flow).
	OldestReady        *time.Time `json:"oldestReady,omitempty" doc:"When the job that has been ready longest became ready; absent if none is ready."`
	CompletedPerMinute float64    `json:"completedPerMinute" doc:"Completed jobs per minute: those that were due within the last ten minutes, or the last 300."`
	InsertedPerMinute  float64    `json:"insertedPerMinute" doc:"Inserted jobs per minute: of the last ten minutes, or among the last 3,000 jobs of all queues."`
}

// QueuesInput selects which data of queues is read.
type QueuesInput struct {
	WithoutJobs bool `query:"withoutJobs" doc:"Leave the jobs out: their numbers are 0, and queues that only jobs name are absent. Counting takes time with the number of live jobs."`
}

// QueueInput names a queue.
type QueueInput struct {
	Name string `path:"name" maxLength:"127" doc:"Name of the queue." example:"payment-processing"`
}

// QueueActionInput is a request to pause or resume a queue.
type QueueActionInput struct {
	QueueInput

	Body *Action
}

// QueuesOutputBody lists queues.
type QueuesOutputBody struct {
	Queues []Queue `json:"queues" doc:"Queues, by name."`
}

// Operations on queues.
var (
	ListQueues  = Operation[QueuesInput, QueuesOutputBody]{"list-queues", http.MethodGet, "/api/queues"}
	PauseQueue  = Operation[QueueActionInput, Queue]{"pause-queue", http.MethodPost, "/api/queues/{name}/pause"}
	ResumeQueue = Operation[QueueActionInput, Queue]{"resume-queue", http.MethodPost, "/api/queues/{name}/resume"}
)

func (s *service) registerQueues(api huma.API) {
	tags := []string{"queues"}
	queue := Queue{
		Name: "payment-processing", Destination: "payments", Concurrency: 20, Available: 3, Running: 2, DeadLetters: 1,
		CompletedPerMinute: 120, InsertedPerMinute: 123,
	}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List all queues, with their live jobs and open dead letters", Errors: []int{503},
	}
	example(&list, http.StatusOK, map[string]any{"queues": []Queue{queue}})
	register(s, api, ListQueues, list, func(ctx context.Context, in *QueuesInput) (*QueuesOutputBody, error) {
		queues, err := s.queues(ctx, !in.WithoutJobs)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &QueuesOutputBody{queues}, nil
	})
	for _, verb := range []struct {
		operation     Operation[QueueActionInput, Queue]
		done, summary string
		run           func(context.Context, pgx.Tx, string) error
	}{
		{
			PauseQueue, "paused", "Pause a queue for all River clients",
			func(ctx context.Context, tx pgx.Tx, name string) error {
				return s.River.QueuePauseTx(ctx, tx, name, nil)
			},
		},
		{
			ResumeQueue, "resumed", "Resume a queue",
			func(ctx context.Context, tx pgx.Tx, name string) error {
				return s.River.QueueResumeTx(ctx, tx, name, nil)
			},
		},
	} {
		op := huma.Operation{Tags: tags, Summary: verb.summary, Errors: []int{404, 422, 503}}
		example(&op, http.StatusOK, queue)
		register(s, api, verb.operation, op, func(ctx context.Context, in *QueueActionInput) (*Queue, error) {
			unknown := huma.Error404NotFound(fmt.Sprintf("queue %q does not exist in River; GET /api/queues lists the queues",
				in.Name))
			if !access.ScopeOf(ctx).HasQueue(in.Name) {
				return nil, unknown
			}
			err := s.Store.Record(ctx, "queue "+in.Name, verb.done, in.Body.act(ctx), func(tx pgx.Tx) error {
				// River takes "*" as all queues, so require a queue with that name.
				if _, err := s.River.QueueGetTx(ctx, tx, in.Name); err != nil {
					return err
				}
				return verb.run(ctx, tx, in.Name)
			})
			if errors.Is(err, river.ErrNotFound) {
				return nil, unknown
			}
			if err != nil {
				return nil, s.problem(ctx, err)
			}
			queues, err := s.queues(ctx, true)
			if err != nil {
				return nil, s.problem(ctx, err)
			}
			i := slices.IndexFunc(queues, func(q Queue) bool { return q.Name == in.Name })
			if i < 0 { // beyond maxQueues, or just removed
				return &Queue{Name: in.Name}, nil
			}
			return &queues[i], nil
		})
	}
}

// queues returns the queues of River (the first maxQueues), of the policy and of dead letters. If jobs is true, it adds
// the queues of live jobs. It omits queues of which the caller may not see all kinds.
func (s *service) queues(ctx context.Context, jobs bool) ([]Queue, error) {
	found := map[string]*Queue{}
	of := func(name string) *Queue {
		if found[name] == nil {
			found[name] = &Queue{Name: name}
		}
		return found[name]
	}
	known, err := s.River.QueueList(ctx, river.NewQueueListParams().First(maxQueues))
	if err != nil {
		return nil, err
	}
	for _, q := range known.Queues {
		of(q.Name).PausedAt = q.PausedAt
	}
	policy := s.Planner().Policy()
	for name, q := range policy.Queues {
		of(name).Destination, of(name).Concurrency = q.Destination, policy.Concurrency(name)
	}
	if jobs {
		if err := s.countJobs(ctx, of); err != nil {
			return nil, err
		}
	}
	backlog, err := s.Store.Backlog(ctx)
	if err != nil {
		return nil, err
	}
	for _, row := range backlog {
		of(row.Queue).DeadLetters += row.Entries
	}
	if jobs {
		if err := s.readFlow(ctx, found); err != nil {
			return nil, err
		}
	}
	list := make([]Queue, 0, len(found))
	scope := access.ScopeOf(ctx)
	for _, q := range found {
		if scope.HasQueue(q.Name) {
			list = append(list, *q)
		}
	}
	slices.SortFunc(list, func(a, b Queue) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// countJobs adds the numbers of live jobs to the queues.
func (s *service) countJobs(ctx context.Context, of func(name string) *Queue) error {
	jobs, err := delivery.CountLiveJobs(ctx, s.Store.DB())
	if err != nil {
		return err
	}
	for _, row := range jobs {
		q := of(row.Queue)
		q.Held += row.Held
		switch row.State {
		case "available":
			q.Available = row.Jobs
		case "running":
			q.Running = row.Jobs
		case "retryable":
			q.Retryable = row.Jobs
		case "pending":
			q.Pending = row.Jobs
			q.Scheduled += row.Jobs
		default:
			q.Scheduled += row.Jobs
		}
	}
	return nil
}

// perMinute returns the rate of jobs per minute, rounded to a tenth. A duration below a second counts as a second.
func perMinute(jobs int64, within time.Duration) float64 {
	return math.Round(float64(jobs)/max(within, time.Second).Minutes()*10) / 10
}

// readFlow sets, for each queue, when the oldest ready job became ready, and how many jobs are inserted and completed
// per minute.
func (s *service) readFlow(ctx context.Context, queues map[string]*Queue) error {
	flow, err := delivery.FlowOf(ctx, s.Store.DB(), slices.Collect(maps.Keys(queues)))
	if err != nil {
		return err
	}
	now := time.Now()
	for _, row := range flow {
		q := queues[row.Queue]
		if row.OldestReady.Unix() > 0 {
			q.OldestReady = &row.OldestReady
		}
		q.CompletedPerMinute = perMinute(row.Completed, now.Sub(row.Since))
		q.InsertedPerMinute = perMinute(row.Inserted, now.Sub(row.InsertedSince))
	}
	return nil
}
