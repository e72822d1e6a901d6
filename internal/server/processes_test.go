package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/version"
)

// application is an application that does not use dlqd. dlqd is attached to its River.
type application struct {
	url  string
	pool *pgxpool.Pool
}

type emailArgs struct {
	To string `json:"to"`
}

func (emailArgs) Kind() string { return "send_email" }

// runApplication runs an application whose client works the queue default.
func runApplication(t *testing.T) *application {
	t.Helper()
	a := &application{url: postgrestest.Empty(t)}
	a.pool = postgrestest.Open(t, a.url)
	postgrestest.MigrateRiver(t, a.pool, "", 0)
	require.NoError(t, (&postgres.Migrator{
		Pool: a.pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}).Attach(t.Context()))

	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(
		func(context.Context, *river.Job[emailArgs]) error { return errors.New("no such mailbox") }))
	client, err := river.NewClient(riverpgxv5.New(a.pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}, Workers: workers,
		FetchCooldown: time.Millisecond, FetchPollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(t.Context()))
	t.Cleanup(func() { _ = client.Stop(context.Background()) })
	return a
}

func (a *application) count(t *testing.T, sql string, args ...any) int {
	t.Helper()
	var n int
	require.NoError(t, a.pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

// An application's clients fetch every job of their queues, and fail jobs of unknown kinds. So dlqd refuses messages
// for a queue that only the application works.
func TestSubmit_RefusesQueuesOfTheApplicationAlone(t *testing.T) {
	t.Parallel()
	a := runApplication(t)
	front := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.Process, c.DLQWorkers = a.url, false, false
		c.Policy.Queues["mine"] = c.Policy.Queues[river.QueueDefault]
	}})
	message := `{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload": 1}`

	status, out, _ := front.call("POST", "/api/messages", message)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Contains(t, out["detail"], `no dlqd process delivers the messages of queue "default"`)
	require.Contains(t, out["detail"], "dlqd serve --process")
	require.Equal(t, "body.queue", out["errors"].([]any)[0].(map[string]any)["location"])
	status, out, _ = front.call("POST", "/api/messages/batch", `{"messages": [`+message+`]}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Equal(t, "body.messages[0].queue", out["errors"].([]any)[0].(map[string]any)["location"])
	require.Zero(t, a.count(t, "SELECT count(*) FROM river_job"), "nothing was stored")

	// A dlqd does not work the application's queue even if the policy names that queue. If the policy names no other
	// queue, dlqd does not start.
	_, err := server.Start(t.Context(), server.Config{
		DatabaseURL: a.url, Schemas: postgres.DefaultSchemas(), Process: true,
		Policy: policyOf(t, "default"), Logger: slog.New(slog.DiscardHandler),
	})
	require.ErrorContains(t, err, "no queue to deliver: other clients work default")
	deliver := a.deliver(t, "mine", "default")
	status, out, _ = front.call("POST", "/api/messages", message)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Contains(t, out["detail"], "(delivered queues: mine)")

	message = strings.Replace(message, "default", "mine", 1)
	status, out, _ = front.call("POST", "/api/messages", message)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job WHERE args ->> 'messageId' = 'm1'"))

	deliver.stop()
	var header http.Header
	// The API reads the list of processes at most once a second. Until it sees that the process has stopped, it answers
	// that the message is a duplicate.
	require.Eventually(t, func() bool {
		status, out, header = front.call("POST", "/api/messages", message)
		return status == http.StatusServiceUnavailable
	}, 5*time.Minute, 50*time.Millisecond)
	require.Contains(t, out["detail"], "is not running")
	require.Equal(t, "10", header.Get("Retry-After"))
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"))

	_, err = a.pool.Exec(t.Context(), "UPDATE dlq.processes SET seen_at = now() - interval '16 minutes', stopped_at = "+
		"now() - interval '16 minutes'")
	require.NoError(t, err)
	a.deliver(t, "mine", "elsewhere")
	status, out, _ = front.call("POST", "/api/messages/batch",
		`{"messages": [{"queue": "mine", "kind": "k", "payload": 1}, {"queue": "default", "kind": "k", "payload": 2}]}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Contains(t, out["detail"], "(delivered queues: mine)", "the queues in this API's policy")
	require.Equal(t, "body.messages[1].queue", out["errors"].([]any)[0].(map[string]any)["location"])
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"), "a batch is stored as a whole or not at all")

	_, err = a.pool.Exec(t.Context(), "ALTER TABLE dlq.processes RENAME TO elsewhere")
	require.NoError(t, err)
	status, out, header = front.call("POST", "/api/messages", `{"queue": "default", "kind": "order.placed", "payload": 2}`)
	require.Equal(t, http.StatusServiceUnavailable, status, out)
	require.Contains(t, out["detail"], "cannot determine whether a dlqd process delivers")
	require.NotEmpty(t, header.Get("Retry-After"))
	_, err = a.pool.Exec(t.Context(), "ALTER TABLE dlq.elsewhere RENAME TO processes")
	require.NoError(t, err)
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"))
}

// deliver runs a dlqd that delivers these queues on the application's River.
func (a *application) deliver(t *testing.T, queues ...string) *bundle {
	t.Helper()
	return setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.API, c.DLQWorkers = a.url, false, false
		c.Policy = policyOf(t, queues...)
	}})
}

// policyOf returns a policy with these queues.
func policyOf(t *testing.T, queues ...string) *policy.Policy {
	t.Helper()
	p, err := policy.Default("http://127.0.0.1:1/")
	require.NoError(t, err)
	standard := p.Queues[river.QueueDefault]
	delete(p.Queues, river.QueueDefault)
	for _, name := range queues {
		p.Queues[name] = standard
	}
	return p
}

// On its own River only dlqd fetches messages, so a message waits for the next process.
func TestSubmit_AcceptsWithoutAProcessIfRiverBelongsToDLQD(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.Process = false }})
	b.submit("m1")
	b.awaitMessage("m1", "queued")
}

func TestProcesses_RegisterAndUnregister(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	b := setup(t, options{config: func(c *server.Config) {
		c.API = false
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	}})
	rows, err := b.pool.Query(t.Context(), `SELECT name, version, array_to_string(parts, ' '),
		array_to_string(queues, ' '), stopped_at IS NULL FROM dlq.processes`)
	require.NoError(t, err)
	type process struct {
		Name, Version, Parts, Queues string
		Runs                         bool
	}
	processes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[process])
	require.NoError(t, err)
	require.Len(t, processes, 1)
	require.Equal(t, process{
		Name: postgres.ProcessName(), Version: version.String(), Parts: "process dlq-workers", Queues: "default", Runs: true,
	}, processes[0])
	b.stop()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.processes WHERE stopped_at IS NOT NULL"))
	require.Contains(t, log.String(),
		`msg="River belongs to dlqd" automatic="on: dead letters are redelivered automatically"`)
}

// If requests use all connections of a process's pool, the process still announces itself. Otherwise other processes
// would rescue its messages.
func TestProcesses_StayRegisteredWhileThePoolIsExhausted(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.MaxConns = 5 }})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.saved_views")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var requests sync.WaitGroup
	for range 20 {
		requests.Go(func() {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.base+"/api/dlq/views", http.NoBody)
			if err != nil {
				return
			}
			if response, err := http.DefaultClient.Do(request); err == nil {
				_ = response.Body.Close()
			}
		})
	}
	defer requests.Wait()
	defer cancel()
	exhausted := func() bool { return b.server.Pool().Stat().AcquiredConns() == 5 }
	require.Eventually(t, exhausted, time.Minute, 10*time.Millisecond)
	// A heartbeat that began before the pool was exhausted ends within 6 s, so a later one has begun since.
	at := b.count("SELECT floor(extract(epoch FROM clock_timestamp()))::integer + 6")
	require.Eventually(t, func() bool {
		return b.count(fmt.Sprintf("SELECT count(*) FROM dlq.processes WHERE extract(epoch FROM seen_at) > %d", at)) == 1
	}, 30*time.Second, 100*time.Millisecond)
}

// A start logs whether automatic redelivery is on, whether the policy, an operator's switch or a stop decides that.
func TestStart_LogsTheModeInForce(t *testing.T) {
	t.Parallel()
	a := runApplication(t)
	start := func() string {
		t.Helper()
		var log bytes.Buffer
		setup(t, options{config: func(c *server.Config) {
			c.DatabaseURL, c.API, c.Process = a.url, false, false
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		}}).stop()
		return log.String()
	}
	require.Contains(t, start(), "observing: dead letters are classified and shown, and not redelivered automatically")
	_, err := a.pool.Exec(t.Context(), "SELECT dlq.set_automatic('all', '', true, p_actor => 'kim')")
	require.NoError(t, err)
	log := start()
	require.Contains(t, log, `msg="River belongs to an application`)
	require.Contains(t, log, `automatic="on: dead letters are redelivered automatically"`)
	require.NotContains(t, log, "stopped by")
	_, err = a.pool.Exec(t.Context(), "SELECT dlq.stop_automatic('kim')")
	require.NoError(t, err)
	require.Contains(t, start(), "all automatic redelivery was stopped by kim")
}
