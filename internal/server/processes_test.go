package server_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// application is an application that knows nothing of dlqd, with dlqd attached to its River.
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
	migrations, err := rivermigrate.New(riverpgxv5.New(a.pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	_, err = migrations.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	require.NoError(t, (&postgres.Migrator{Pool: a.pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}).Attach(t.Context()))

	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[emailArgs]) error { return errors.New("no such mailbox") }))
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

// An application's clients fetch every job of their queues, and fail those whose kind they do not know.
func TestSubmit_refusedWhereOnlyTheApplicationWorksTheQueue(t *testing.T) {
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

	deliver := a.deliver(t, "default")
	status, out, _ = front.call("POST", "/api/messages", message)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job WHERE args ->> 'messageId' = 'm1'"))

	deliver.stop()
	var header http.Header
	require.Eventually(t, func() bool { // until what the API knows is a second old, the message is a duplicate
		status, out, header = front.call("POST", "/api/messages", message)
		return status == http.StatusServiceUnavailable
	}, 30*time.Second, 10*time.Millisecond)
	require.Contains(t, out["detail"], "is away")
	require.Equal(t, "10", header.Get("Retry-After"))
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"))

	_, err := a.pool.Exec(t.Context(), "UPDATE dlq.processes SET seen_at = now() - interval '16 minutes', stopped_at = now() - interval '16 minutes'")
	require.NoError(t, err)
	a.deliver(t, "mine", "elsewhere")
	status, out, _ = front.call("POST", "/api/messages/batch", `{"messages": [{"queue": "mine", "kind": "k", "payload": 1}, {"queue": "default", "kind": "k", "payload": 2}]}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Contains(t, out["detail"], "(delivered are: mine)", "those that this API's policy has")
	require.Equal(t, "body.messages[1].queue", out["errors"].([]any)[0].(map[string]any)["location"])
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"), "all or none")

	_, err = a.pool.Exec(t.Context(), "ALTER TABLE dlq.processes RENAME TO elsewhere")
	require.NoError(t, err)
	status, out, header = front.call("POST", "/api/messages", `{"queue": "default", "kind": "order.placed", "payload": 2}`)
	require.Equal(t, http.StatusServiceUnavailable, status, out)
	require.Contains(t, out["detail"], "could not be found out")
	require.NotEmpty(t, header.Get("Retry-After"))
	_, err = a.pool.Exec(t.Context(), "ALTER TABLE dlq.elsewhere RENAME TO processes")
	require.NoError(t, err)
	require.Equal(t, 1, a.count(t, "SELECT count(*) FROM river_job"))
}

// Who delivers messages in the application's queue is told at the start, and in which mode.
func TestServe_saysThatTheApplicationWorksTheQueue(t *testing.T) {
	t.Parallel()
	a := runApplication(t)
	start := func(queue string) string {
		var log bytes.Buffer
		b := setup(t, options{config: func(c *server.Config) {
			c.DatabaseURL, c.API, c.DLQWorkers = a.url, false, false
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c.Policy.Queues["mine"] = c.Policy.Queues[river.QueueDefault]
			for name := range c.Policy.Queues {
				if name != queue {
					delete(c.Policy.Queues, name)
				}
			}
		}})
		b.stop()
		return log.String()
	}
	const shared = "the application's jobs are in this queue, too"
	log := start(river.QueueDefault)
	require.NotContains(t, log, shared, "nothing is known yet")
	require.Contains(t, log, "automatic=\"observing: dead letters are judged and shown, and none is redelivered by itself\"")

	_, err := a.pool.Exec(t.Context(), "INSERT INTO river_job (kind, args, max_attempts) VALUES ('send_email', '{}', 1)")
	require.NoError(t, err)
	_, err = a.pool.Exec(t.Context(), "SELECT dlq.stop_automatic('kim', 'a release')")
	require.NoError(t, err)
	log = start(river.QueueDefault)
	require.Contains(t, log, shared)
	require.Contains(t, log, "queue=default")
	require.Contains(t, log, "all automatic redelivery was stopped by kim")
	require.NotContains(t, start("mine"), shared)
}

// deliver runs a dlqd that delivers some queues on the application's River.
func (a *application) deliver(t *testing.T, queues ...string) *bundle {
	t.Helper()
	return setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.API, c.DLQWorkers = a.url, false, false
		for _, name := range queues {
			c.Policy.Queues[name] = c.Policy.Queues[river.QueueDefault]
		}
		if queues[0] != river.QueueDefault {
			delete(c.Policy.Queues, river.QueueDefault)
		}
	}})
}

// On its own River nobody else fetches a message: it waits for the next process.
func TestSubmit_acceptedOnOwnRiverWithoutAProcess(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.Process = false }})
	b.submit("m1")
	b.awaitMessage("m1", "queued")
}

func TestProcesses(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	b := setup(t, options{config: func(c *server.Config) {
		c.API = false
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	}})
	rows, err := b.pool.Query(t.Context(), "SELECT name, version, array_to_string(parts, ' '), array_to_string(queues, ' '), stopped_at IS NULL FROM dlq.processes")
	require.NoError(t, err)
	type process struct {
		Name, Version, Parts, Queues string
		Runs                         bool
	}
	processes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[process])
	require.NoError(t, err)
	require.Len(t, processes, 1)
	require.Equal(t, process{Name: postgres.ProcessName(), Version: api.Version, Parts: "process dlq-workers", Queues: "default", Runs: true}, processes[0])
	b.stop()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.processes WHERE stopped_at IS NOT NULL"))
	require.Contains(t, log.String(), "mode: automatic on dlqd's own River")
}
