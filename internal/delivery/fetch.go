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

// A fetch marks jobs as running and returns them. In three cases a job stays running although no process delivers it,
// until River's rescuer releases it minutes after the longest timeout:
//
//   - The connection breaks during a fetch that the database has committed.
//   - A standby is promoted that has the fetch of a message, but not the message's outcome.
//   - The fetch returns the id of a job that the client still delivers. River assigns ids again after a promotion
//     (attempt.go), and River's client knows jobs by id. So the client withholds the new job from River until the
//     outcome of the earlier job is recorded, however often River's completer has to try.
//
// The client therefore remembers the jobs that its fetches returned. After each of these events it looks for other jobs
// that are running with the client's id in attempted_by, and puts those jobs back: it makes them available again.

const (
	// lookFor is how long a client looks for jobs to put back. The statement of a failed fetch may still run on the
	// server, or be on its way to the server. So lookFor is twice the time limit of a fetch (postgres.DefaultTimeout).
	lookFor = 2 * time.Minute
	// lookInterval is the time between two looks.
	lookInterval = time.Second
	// maxPutBack bounds the jobs that one statement puts back.
	maxPutBack = 500
)

// fetches has the jobs that a client's fetches returned.
type fetches struct {
	mu sync.Mutex
	// delivering has, by id, each job from its fetch until its outcome is recorded.
	delivering map[int64]*fetched
	servers    map[string]string // the server of the last fetch, by queue; "" if it is not known
	looks      map[string]*look  // by queue
}

// fetched is a job that the client delivers.
type fetched struct {
	createdAt time.Time
	server    string // the server from which the job was fetched, or "" if that is not known
	withheld  string // the queue of another job with the same id, which a later fetch returned, or ""
}

// look is a period during which the client looks for jobs of a queue to put back. until is its end, next the time of
// the next look.
type look struct{ until, next time.Time }

// look begins or extends the period during which the client looks for jobs of a queue to put back.
func (f *fetches) look(queue string, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.beginLook(queue, now)
}

// beginLook does the same as look. The caller holds the lock.
func (f *fetches) beginLook(queue string, now time.Time) {
	l := f.looks[queue]
	if l == nil {
		l = &look{next: now}
		f.looks[queue] = l
	}
	l.until = now.Add(lookFor)
}

// due reports whether the client has to look now for jobs of a queue to put back, and returns the jobs that the client
// delivers. River fetches for a queue one fetch after the other, so no other fetch of the queue is in progress.
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
	return slices.AppendSeq([]int64{}, maps.Keys(f.delivering)), true // not nil, because nil would be NULL in SQL
}

// add records the jobs that a fetch of a queue returned. It withholds the jobs whose id the client still delivers, and
// returns the others.
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

// fetchedFrom returns when each of the jobs was created, and reports whether all of the jobs were fetched from the
// given server. It reports false if that server, or one of the jobs, is not known.
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

// recorded is called after the statement that records the outcomes of jobs. If err is nil, recorded forgets the jobs.
// Otherwise the database may have recorded the outcomes nevertheless, and the jobs may run again. So recorded forgets
// the server of the jobs, and the next try then checks the attempts of the jobs.
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

// JobGetAvailable implements riverdriver.Executor. After an event that may have left jobs which no process delivers
// (see the top of this file), it first puts such jobs back.
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

// putBack makes jobs of a queue available again that are running with the client's id but that the client does not
// deliver.
func (e *executor) putBack(ctx context.Context, params *riverdriver.JobGetAvailableParams, delivering []int64) error {
	config := e.driver.config
	q := dbsqlc.New(config.Schemas.Rendered(config.Pool))
	// The statement may reach the server late, when later fetches have marked other jobs as running. So the statement
	// puts back only jobs that were fetched before the time now.
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
