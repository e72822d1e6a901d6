package delivery_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/strategy"
)

// late is a message that two processes deliver. The first process is considered dead, the second rescues the message's
// job, and then the first continues.
type late struct {
	*testing.T

	pool    *pgxpool.Pool
	planner *strategy.Planner
	doubt   atomic.Bool         // whether the first process is in doubt
	arrived chan string         // attempt numbers, or message ids
	answers map[string]chan int // the status to answer, by attempt number or message id
	clients [2]*delivery.Client // one for each process
	ended   [2]chan string      // outcomes, by process
}

func setupLate(t *testing.T, queue string) *late {
	t.Helper()
	return setupLateIn(t, postgrestest.Pool(t), queue, "Dlqd-Attempt", "1", "2", "3")
}

// setupLateIn returns a late whose receiver distinguishes requests by the value of a header.
func setupLateIn(t *testing.T, pool *pgxpool.Pool, queue, header string, values ...string) *late {
	t.Helper()
	l := &late{T: t, pool: pool, arrived: make(chan string, 10), answers: map[string]chan int{}}
	for _, value := range values {
		l.answers[value] = make(chan int, 1)
	}
	receiver := answering(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then the server notices that a client has gone
		value := r.Header.Get(header)
		l.arrived <- value
		select {
		case status := <-l.answers[value]:
			w.WriteHeader(status)
		case <-r.Context().Done():
		}
	})
	rules := policytest.Load(t, policytest.Files{
		"retry-policies": fmt.Sprintf("queues: {default: {maxAttempts: 5, backoff: {delay: 1ms}, timeout: "+
			"1m%s}}\ndestinations: {default: {url: %q}}\n", queue, receiver),
		"circuit-breaker": "defaults: {enabled: false}\n",
	})
	var err error
	l.planner, err = strategy.NewPlanner(rules, nil)
	require.NoError(t, err)
	return l
}

// run starts process i.
func (l *late) run(i int) {
	l.Helper()
	logger := slog.New(slog.DiscardHandler)
	l.ended[i] = make(chan string, 10)
	config := delivery.Config{
		Planner: func() *strategy.Planner { return l.planner }, DB: l.pool, Logger: logger,
		Observe:  func(d delivery.Delivered) { l.ended[i] <- d.Outcome },
		Breakers: breaker.New(breaker.Config{DB: l.pool, Policy: l.planner.Policy, Actor: "test", Logger: logger}),
	}
	if i == 0 {
		config.InDoubt = func(time.Duration) bool { return l.doubt.Load() }
	}
	worker := delivery.NewWorker(config)
	var err error
	l.clients[i], err = delivery.NewClient(l.Context(), delivery.ClientConfig{
		ID: uuid.NewString(), Pool: l.pool, Schemas: postgres.DefaultSchemas(),
		Policy: l.planner.Policy, Worker: worker, Logger: logger,
	})
	require.NoError(l, err)
	require.NoError(l, l.clients[i].Start(l.Context()))
	l.Cleanup(func() { l.halt(i); worker.Close() })
}

func (l *late) halt(i int) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = l.clients[i].StopAndCancel(ctx)
}

func (l *late) submit(extra string) (job int64) {
	l.Helper()
	return l.submitAs("msg-1", extra)
}

func (l *late) submitAs(id, extra string) (job int64) {
	l.Helper()
	ingester, err := ingest.New(ingest.Config{
		Pool: l.pool, Schemas: postgres.DefaultSchemas(), Policy: l.planner.Policy, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(l, err)
	l.Cleanup(func() { ingester.Stop(context.Background()) })
	msg, err := message.Parse(fmt.Appendf(nil, `{"queue": "default", "kind": "k", "messageId": %q, "payload": 1%s}`, id,
		extra))
	require.NoError(l, err)
	receipt, err := ingester.Submit(l.Context(), msg, ingest.Trace{})
	require.NoError(l, err)
	return receipt.JobID
}

// stopFetching makes a process fetch no more jobs. The jobs that it runs continue.
func (l *late) stopFetching(i int) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), time.Second)
	defer cancel()
	require.ErrorIs(l, l.clients[i].Queues().Remove(ctx, "default"), context.DeadlineExceeded, "its jobs still run")
}

// rescueJob makes the first process fetch no more jobs and look dead, and rescues its job.
func (l *late) rescueJob() {
	l.Helper()
	l.stopFetching(0)
	_, err := l.pool.Exec(l.Context(), `INSERT INTO dlq.processes (id, name, version, parts, queues, seen_at)
		VALUES ($1, 'first', '1', '{}', '{}', now() - interval '31 seconds')`, l.clients[0].ID())
	require.NoError(l, err)
	var retried int
	require.NoError(l, l.pool.QueryRow(l.Context(), `SELECT retried
		FROM dlq.rescue_messages(now() - interval '30 seconds', 10)`).Scan(&retried))
	require.Equal(l, 1, retried)
}

func (l *late) job(id int64) *rivertype.JobRow {
	l.Helper()
	job, err := l.clients[1].JobGet(l.Context(), id)
	require.NoError(l, err)
	return job
}

func (l *late) count(sql string) (n int) {
	l.Helper()
	require.NoError(l, l.pool.QueryRow(l.Context(), sql).Scan(&n))
	return n
}

// The outcome of an attempt whose job was rescued does not affect the attempt that another process runs. River's
// completer applies the outcome of any attempt to the job: without dlqd's check, a late failure would turn a delivered
// message into a dead letter.
func TestLateAttempt_DoesNotAffectCurrentAttempt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		ordered bool
		status  int
		unaware bool // the first process does not know that it was considered dead
		state   rivertype.JobState
	}{
		"success":           {status: http.StatusOK, state: rivertype.JobStateRunning},
		"failure":           {status: http.StatusInternalServerError, state: rivertype.JobStateRunning},
		"permanent failure": {status: http.StatusUnprocessableEntity, state: rivertype.JobStateRunning},
		"ordered success":   {ordered: true, status: http.StatusOK, state: rivertype.JobStateRunning},
		"ordered failure": {
			ordered: true, status: http.StatusInternalServerError,
			state: rivertype.JobStateRunning,
		},
		"unaware, failure": {
			status: http.StatusUnprocessableEntity, unaware: true,
			state: rivertype.JobStateCancelled,
		},
		"unaware, ordered failure": {
			ordered: true, status: http.StatusUnprocessableEntity, unaware: true,
			state: rivertype.JobStateCancelled,
		},
		"unaware, success": {status: http.StatusOK, unaware: true, state: rivertype.JobStateCompleted},
		"unaware, retryable failure": {
			status: http.StatusInternalServerError, unaware: true,
			state: rivertype.JobStateAvailable,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			queue, extra, places := "", "", 0
			if test.ordered {
				queue, extra, places = ", ordering: true", `, "orderingKey": "a"`, 1
			}
			l := setupLate(t, queue)
			l.run(0)
			id := l.submit(extra)
			require.Equal(t, "1", <-l.arrived)
			l.rescueJob()
			l.run(1)
			require.Equal(t, "2", <-l.arrived)
			l.doubt.Store(!test.unaware)
			if test.state == rivertype.JobStateAvailable { // otherwise the second process would run the job again
				l.stopFetching(1)
			}
			l.answers["1"] <- test.status
			<-l.ended[0]
			l.halt(0) // stopping the client flushes the outcomes of its jobs
			require.Equal(t, test.state, l.job(id).State)
			require.Equal(t, places, l.count("SELECT count(*) FROM dlq.ordered_jobs"))
			if test.unaware {
				return
			}
			require.Equal(t, 2, l.job(id).Attempt)
			l.answers["2"] <- http.StatusOK
			require.Equal(t, delivery.OutcomeOK, <-l.ended[1])
			require.Eventually(t, func() bool { return l.job(id).State == rivertype.JobStateCompleted }, time.Minute,
				5*time.Millisecond)
			require.Zero(t, l.count("SELECT count(*) FROM dlq.dead_letter_queue"))
			require.Zero(t, l.count("SELECT count(*) FROM dlq.ordered_jobs"))
			require.Empty(t, l.arrived, "the message was sent once more")
		})
	}
}

// If a job is rescued before its process has sent the message, that process does not send it.
func TestLateAttempt_DoesNotSendRescuedMessage(t *testing.T) {
	t.Parallel()
	l := setupLate(t, ", ordering: true")
	id := l.submit(`, "orderingKey": "a"`)
	tx, err := l.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.ordered_jobs")
	require.NoError(t, err)
	l.run(0)
	require.Eventually(t, func() bool {
		return l.count(`SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE a.datname = current_database() AND NOT l.granted AND l.relation = 'dlq.ordered_jobs'::regclass`) == 1
	}, 5*time.Minute, 5*time.Millisecond)
	l.doubt.Store(true)
	l.rescueJob()
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, delivery.OutcomeHeld, <-l.ended[0])
	l.halt(0)
	require.Empty(t, l.arrived)

	l.run(1)
	require.Equal(t, "2", <-l.arrived)
	l.answers["2"] <- http.StatusOK
	require.Equal(t, delivery.OutcomeOK, <-l.ended[1])
	require.Eventually(t, func() bool { return l.job(id).State == rivertype.JobStateCompleted }, time.Minute,
		5*time.Millisecond)
}

// If the answer to the statement that records an outcome is lost, the outcome may be recorded nevertheless. The job may
// run again by the time when River's completer repeats the statement.
func TestLateAttempt_IsCheckedWhenOutcomeIsRepeated(t *testing.T) {
	t.Parallel()
	l := setupLate(t, "")
	l.run(0)
	l.submit("")
	require.Equal(t, "1", <-l.arrived)
	l.stopFetching(0)
	tx, err := l.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job IN SHARE MODE")
	require.NoError(t, err)
	l.answers["1"] <- http.StatusUnprocessableEntity
	require.Eventually(t, func() bool {
		return l.count(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%JobSetStateIfRunningMany%'`) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	_, err = tx.Exec(t.Context(), "UPDATE river_job SET attempt = 2")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	l.halt(0) // stopping the client flushes the outcomes of its jobs
	require.Equal(t, 1, l.count(`SELECT count(*) FROM river_job
		WHERE state = 'running' AND attempt = 2 AND errors IS NULL`))
}
