package delivery

import (
	"context"
	"sync"
	"time"

	"github.com/riverqueue/river/riverdriver"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
)

// A fetch marks jobs as running and returns them. If the connection breaks in between, the database may have committed
// the fetch, and no process delivers its jobs: they would wait for River's rescuer, minutes beyond the longest timeout.
// The client therefore remembers the jobs that its fetches returned, and after a failed fetch puts back the others that
// are running in its name.

const (
	// lostFor is how long after a failed fetch its jobs are looked for, because its statement may still run on the
	// server, or be on its way there. It is twice the time limit of a fetch (postgres.DefaultTimeout).
	lostFor = 2 * time.Minute
	// lostInterval is how often they are looked for.
	lostInterval = time.Second
	// maxPutBack bounds the jobs that one statement puts back.
	maxPutBack = 500
)

// fetches are the jobs of a client.
type fetches struct {
	mu sync.Mutex
	// delivering counts the attempts of each job from the fetch that returned it until its outcome is recorded. A job may
	// be fetched again before this process knows that the outcome of its attempt before is recorded.
	delivering map[int64]int
	lost       map[string]*lost // by queue
}

// lost are failed fetches of a queue.
type lost struct{ until, next time.Time }

// failed records a failed fetch of a queue.
func (f *fetches) failed(queue string, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost[queue] = &lost{until: now.Add(lostFor), next: now}
}

// due reports whether to look for jobs of failed fetches of a queue, and returns the jobs that the client delivers.
// A queue has one producer, whose fetches follow each other, so no other fetch of the queue is in progress.
func (f *fetches) due(queue string, now time.Time) (delivering []int64, due bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.lost[queue]
	if l == nil || now.Before(l.next) {
		return nil, false
	}
	if now.After(l.until) {
		delete(f.lost, queue) // after a last look
	}
	l.next = now.Add(lostInterval)
	delivering = make([]int64, 0, len(f.delivering))
	for id := range f.delivering {
		delivering = append(delivering, id)
	}
	return delivering, true
}

// JobGetAvailable implements riverdriver.Executor. After a failed fetch it first puts back the jobs that the fetch may
// have marked as running.
func (e *executor) JobGetAvailable(ctx context.Context,
	params *riverdriver.JobGetAvailableParams,
) (*riverdriver.JobGetAvailableResult, error) {
	f := &e.driver.fetches
	if delivering, due := f.due(params.Queue, time.Now()); due {
		if err := e.putBack(ctx, params, delivering); err != nil {
			f.failed(params.Queue, time.Now())
			return nil, err
		}
	}
	result, err := e.Executor.JobGetAvailable(ctx, params)
	if err != nil {
		f.failed(params.Queue, time.Now())
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, job := range result.Jobs {
		f.delivering[job.ID]++
	}
	return result, nil
}

// putBack puts back the jobs of failed fetches of a queue: those that run in the client's name and that it does not
// deliver.
func (e *executor) putBack(ctx context.Context, params *riverdriver.JobGetAvailableParams, delivering []int64) error {
	config := e.driver.config
	q := dbsqlc.New(config.Schemas.Rendered(config.Pool))
	// The statement may reach the server late, when later fetches have marked other jobs. So it puts back only jobs that
	// were fetched before this time.
	now, err := q.Clock(ctx)
	if err != nil {
		return err
	}
	jobs, err := q.PutBackFetched(ctx, dbsqlc.PutBackFetchedParams{
		Client: params.ClientID, Queue: params.Queue, Delivering: delivering, MaxJobs: maxPutBack, FetchedBefore: now,
	})
	if jobs > 0 {
		config.Logger.WarnContext(ctx, "messages whose fetch was lost were put back", "queue", params.Queue, "jobs", jobs)
	}
	return err
}

// recorded forgets the attempts of jobs whose outcomes are recorded.
func (f *fetches) recorded(jobs []int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range jobs {
		if f.delivering[id]--; f.delivering[id] <= 0 {
			delete(f.delivering, id)
		}
	}
}
