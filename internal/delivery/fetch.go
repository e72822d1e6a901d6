package delivery

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
)

// A fetch marks jobs as running and returns them. In three cases a job stays running although no process delivers it.
// River's rescuer would release it minutes after the longest timeout:
//
//   - The connection breaks during a fetch that the database has committed.
//   - The promoted standby has the fetch of a message, but not its outcome.
//   - The fetch returns the id of a job that the client still delivers. Ids are given again after a promotion
//     (attempt.go), and River's client knows jobs by id. The client withholds such a job from River until the outcome of
//     the earlier one is recorded, however often River's completer retries that.
//
// The client therefore remembers the jobs that its fetches returned. After each of these events it looks for other jobs
// that are running with its id in attempted_by, and puts them back.

const (
	// lookFor is how long a client looks for jobs to put back, because the statement of a failed fetch may still run on
	// the server, or be on its way there. It is twice the time limit of a fetch (postgres.DefaultTimeout).
	lookFor = 2 * time.Minute
	// lookInterval is how often it looks.
	lookInterval = time.Second
	// maxPutBack bounds the jobs that one statement puts back.
	maxPutBack = 500
)

// fetches are the jobs of a client.
type fetches struct {
	mu sync.Mutex
	// delivering are jobs by id, from the fetch that returned them until their outcome is recorded.
	delivering map[int64]*fetched
	servers    map[string]string // of the last fetch, by queue
	looks      map[string]*look  // by queue
}

// fetched is a job that the client delivers.
type fetched struct {
	createdAt time.Time
	server    string // that it was fetched from, or "" if that is not known
	withheld  string // the queue of a job with the same id that a later fetch returned, or ""
}

// look is a period during which the client looks for jobs of a queue to put back: its end, and when to look next.
type look struct{ until, next time.Time }

// look makes the client look for jobs of a queue to put back.
func (f *fetches) look(queue string, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.beginLook(queue, now)
}

// beginLook does what look does, for a caller that holds the lock.
func (f *fetches) beginLook(queue string, now time.Time) {
	l := f.looks[queue]
	if l == nil {
		l = &look{next: now}
		f.looks[queue] = l
	}
	l.until = now.Add(lookFor)
}

// due reports whether to look for jobs of a queue to put back, and returns the jobs that the client delivers. A queue
// has one producer, whose fetches follow each other, so no other fetch of the queue is in progress.
func (f *fetches) due(queue string, now time.Time) (delivering []int64, due bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.looks[queue]
	if l == nil || now.Before(l.next) {
		return nil, false
	}
	if now.After(l.until) {
		delete(f.looks, queue) // after a last look
	}
	l.next = now.Add(lookInterval)
	return slices.AppendSeq([]int64{}, maps.Keys(f.delivering)), true // not nil, which would be NULL
}

// add records the jobs that a fetch of a queue returned, and returns those that are not withheld.
func (f *fetches) add(queue, server string, jobs []*rivertype.JobRow) []*rivertype.JobRow {
	f.mu.Lock()
	defer f.mu.Unlock()
	if last, has := f.servers[queue]; server == "" || has && server != last {
		f.beginLook(queue, time.Now())
	}
	f.servers[queue] = server
	return slices.DeleteFunc(jobs, func(job *rivertype.JobRow) bool {
		if earlier := f.delivering[job.ID]; earlier != nil {
			earlier.withheld = queue
			return true
		}
		f.delivering[job.ID] = &fetched{createdAt: job.CreatedAt, server: server}
		return false
	})
}

// fetchedFrom returns when jobs were created, and reports whether all of them were fetched from the given server.
func (f *fetches) fetchedFrom(server string, jobs []int64) (createdAt []time.Time, same bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	createdAt, same = make([]time.Time, len(jobs)), server != ""
	for i, id := range jobs {
		job := f.delivering[id]
		if job == nil {
			same = false
			continue
		}
		createdAt[i] = job.createdAt
		same = same && job.server == server
	}
	return createdAt, same
}

// recorded forgets jobs whose outcomes are recorded. If err is not nil, the outcomes may be recorded nevertheless, and
// the jobs may run again. So recorded forgets the server of these jobs, and the next try checks their attempts.
func (f *fetches) recorded(jobs []int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range jobs {
		job := f.delivering[id]
		switch {
		case job == nil:
		case err != nil:
			job.server = ""
		default:
			delete(f.delivering, id)
			if job.withheld != "" {
				f.beginLook(job.withheld, time.Now())
			}
		}
	}
}

// JobGetAvailable implements riverdriver.Executor. If one of the events above may have left jobs that no process
// delivers, it first puts them back.
func (e *executor) JobGetAvailable(ctx context.Context,
	params *riverdriver.JobGetAvailableParams,
) (result *riverdriver.JobGetAvailableResult, err error) {
	d := e.driver
	if delivering, due := d.fetches.due(params.Queue, time.Now()); due {
		if err := e.putBack(ctx, params, delivering); err != nil {
			d.fetches.look(params.Queue, time.Now())
			return nil, err
		}
	}
	err = d.OnServer(ctx, func(db pgx.Tx, server string) error {
		result, err = d.UnwrapExecutor(db).JobGetAvailable(ctx, params)
		if err == nil {
			result.Jobs = d.fetches.add(params.Queue, server, result.Jobs)
		}
		return err
	})
	if err != nil {
		d.fetches.look(params.Queue, time.Now())
	}
	return result, err
}

// putBack puts back the jobs of a queue that are running with the client's id and that the client does not deliver.
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
		config.Logger.WarnContext(ctx, "messages that were running without a process were put back", "queue", params.Queue,
			"jobs", jobs)
	}
	return err
}
