package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

type chargeArgs struct {
	Customer string `json:"customer"`
}

func (chargeArgs) Kind() string { return "charge" }

// TestGuest_LeavesTheApplicationUnchanged goes through all steps of a team that runs River in production: attach,
// capture, serve, replay, upgrade and detach. There are four roles: River's owner, the application, dlqd and an
// operator. No role is a superuser or a member of another role. The steps leave the application unchanged, and none of
// the application's statements fails.
func TestGuest_LeavesTheApplicationUnchanged(t *testing.T) {
	t.Parallel()
	g := postgrestest.NewGuest(t)
	owner := postgrestest.Open(t, g.Owner)
	g.Grant(t, postgres.DefaultSchemas())
	dlqd := postgrestest.Open(t, g.DLQD)
	migrator := &postgres.Migrator{Pool: dlqd, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	count := func(sql string, args ...any) (n int) {
		t.Helper()
		require.NoError(t, dlqd.QueryRow(t.Context(), sql, args...).Scan(&n), sql)
		return n
	}

	// The application's worker fails while the bank is down.
	app, err := pgxpool.New(t.Context(), g.App)
	require.NoError(t, err)
	t.Cleanup(app.Close)
	var bankIsDown atomic.Bool
	bankIsDown.Store(true)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[chargeArgs]) error {
		if bankIsDown.Load() {
			return errors.New("dial tcp: connection refused")
		}
		return nil
	}))
	client, err := river.NewClient(riverpgxv5.New(app), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}, Workers: workers, RetryPolicy: atOnce{},
		FetchCooldown: time.Millisecond, FetchPollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(t.Context()))
	t.Cleanup(func() { _ = client.Stop(context.Background()) })
	charge := func(n int) {
		t.Helper()
		for range n {
			_, err := client.Insert(t.Context(), chargeArgs{Customer: "cus_81"}, &river.InsertOpts{MaxAttempts: 2})
			require.NoError(t, err)
		}
	}
	await := func(n int, sql string) {
		t.Helper()
		require.Eventually(t, func() bool { return count(sql) == n }, 5*time.Minute, 50*time.Millisecond, sql)
	}
	const discarded = "SELECT count(*) FROM river_job WHERE state = 'discarded'"

	// Only backfill files failures from before dlqd was attached.
	charge(2)
	await(2, discarded)
	require.NoError(t, migrator.Attach(t.Context()))
	n, err := migrator.Backfill(t.Context(), func(int) {})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	charge(3)
	await(3, "SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'capture'")

	var log bytes.Buffer
	guest := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.Process, c.Logger = g.DLQD, false, slog.New(slog.NewTextHandler(&log, nil))
	}})
	status, out, _ := guest.call(http.MethodGet, "/readyz", "")
	require.Equal(t, http.StatusOK, status, out)
	// Entries are observed: classified, but not redelivered. Backfilled ones are parked.
	await(3, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND waiting_for = 'automatic'")
	await(2, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND captured_by = 'backfill'")

	// Entries are replayed through the API, and by an operator in psql.
	bankIsDown.Store(false)
	_, list, _ := guest.call(http.MethodGet, "/api/dlq/entries", "")
	first := list["entries"].([]any)[0].(map[string]any)["id"].(string)
	status, out, _ = guest.call(http.MethodPost, "/api/dlq/entries/"+first+"/replay", "{}")
	require.Equal(t, http.StatusAccepted, status, out)
	await(1, "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'")
	operator, err := pgx.Connect(t.Context(), g.Operator)
	require.NoError(t, err)
	defer func() { _ = operator.Close(context.WithoutCancel(t.Context())) }()
	_, err = operator.Exec(t.Context(), `SELECT dlq.replay(id, p_note => 'the bank is back') FROM dlq.dead_letter_queue
		WHERE status <> 'dlq_resolved' LIMIT 1`)
	require.NoError(t, err)
	await(2, "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'")
	_, err = operator.Exec(t.Context(), "SELECT count(*) FROM river_job")
	require.ErrorContains(t, err, "permission denied")

	// The error names a missing right instead of an unavailable database.
	_, err = owner.Exec(t.Context(), "REVOKE INSERT ON river_job FROM "+g.DLQDRole)
	require.NoError(t, err)
	_, list, _ = guest.call(http.MethodGet, "/api/dlq/entries?status=dlq_pending", "")
	status, out, _ = guest.call(http.MethodPost,
		"/api/dlq/entries/"+list["entries"].([]any)[0].(map[string]any)["id"].(string)+"/replay", "{}")
	require.Equal(t, http.StatusServiceUnavailable, status, out)
	require.Contains(t, out["detail"], "dlqd's role lacks a privilege")
	_, err = owner.Exec(t.Context(), "GRANT INSERT ON river_job TO "+g.DLQDRole)
	require.NoError(t, err)

	// Upgrade while the application works.
	bankIsDown.Store(true)
	charge(20)
	_, err = dlqd.Exec(t.Context(), `UPDATE dlq.settings SET value = 'older'
		WHERE key IN ('code_version', 'river_triggers')`)
	require.NoError(t, err)
	require.NoError(t, migrator.Attach(t.Context()))
	await(25, "SELECT count(*) FROM dlq.dead_letter_queue")
	require.Zero(t, count(`SELECT count(*) FROM river_job j WHERE j.state = 'discarded'
		AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.river_job_id = j.id)`), "every failure has a dead letter")

	// Detach under a running server: the server becomes unready and idle.
	found, err := migrator.Find(t.Context(), false, false)
	require.NoError(t, err)
	// The first statement of a detach.
	_, err = dlqd.Exec(t.Context(), "DROP FUNCTION dlq.capture() CASCADE")
	require.NoError(t, err)
	status, out, _ = guest.call(http.MethodGet, "/readyz", "")
	require.Equal(t, http.StatusServiceUnavailable, status, "without waiting for the loop")
	require.Contains(t, out["detail"], "dlqd was detached from this database")
	_, err = migrator.Detach(t.Context(), *found, false)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		status, out, _ = guest.call(http.MethodGet, "/api/dlq/entries", "")
		return status == http.StatusServiceUnavailable && strings.Contains(fmt.Sprint(out["detail"]), "dlqd was detached")
	}, 5*time.Minute, 50*time.Millisecond)
	response, err := http.Get(guest.base + "/api/health")
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	var health api.Health
	require.NoError(t, json.NewDecoder(response.Body).Decode(&health))
	idle := 0
	for _, part := range health.Parts {
		switch part.Name {
		case "dlq-workers", "gates", "retention", "presence", "redeliveries", "rollups":
			require.Contains(t, part.Detail, "idle: dlqd was detached", part.Name)
			idle++
		case "schema":
			require.False(t, part.OK)
		}
	}
	require.Equal(t, 6, idle)
	charge(1)
	// The jobs of the two resolved entries are completed.
	await(24, discarded+" AND NOT metadata ? 'dlq:entry_id'")
	require.Equal(t, 25, count("SELECT count(*) FROM dlq.dead_letter_queue"), "nothing is captured while detached")

	// Attach again: the server continues.
	require.NoError(t, migrator.Attach(t.Context()))
	require.Eventually(t, func() bool {
		status, out, _ = guest.call(http.MethodGet, "/readyz", "")
		return status == http.StatusOK
	}, 5*time.Minute, 50*time.Millisecond, out)
	charge(1)
	await(26, "SELECT count(*) FROM dlq.dead_letter_queue")
	guest.stop()
	require.Contains(t, log.String(), "River belongs to an application")
	require.Contains(t, log.String(), "observing: dead letters are classified and shown, and not redelivered "+
		"automatically")
	require.Contains(t, log.String(), "idle: dlqd was detached from this database")
	require.Contains(t, log.String(), "dlqd is attached again")

	found, err = migrator.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = migrator.Detach(t.Context(), *found, true)
	require.NoError(t, err)
	require.Zero(t, count("SELECT count(*) FROM pg_namespace WHERE nspname = 'dlq'"))
	require.Zero(t, count("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'dlq%'"))
	charge(1)
	await(26, discarded+" AND NOT metadata ? 'dlq:entry_id'")
}

// TestGuest_DeliversWithTheDocumentedRights runs all parts as dlqd's role: the documented rights suffice for River's
// client.
func TestGuest_DeliversWithTheDocumentedRights(t *testing.T) {
	t.Parallel()
	g := postgrestest.AttachedGuest(t)
	guest := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL = g.DLQD
		c.Policy.Queues["mine"] = c.Policy.Queues[river.QueueDefault]
	}, receiver: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnprocessableEntity) }})
	status, out, _ := guest.call(http.MethodPost, "/api/messages",
		`{"messageId": "m1", "queue": "mine", "kind": "order.placed", "payload": {"n": 1}}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool {
		_, list, _ := guest.call(http.MethodGet, "/api/dlq/entries?status=dlq_manual", "")
		entries, ok := list["entries"].([]any)
		return ok && len(entries) == 1
	}, 5*time.Minute, 50*time.Millisecond)
	status, out, _ = guest.call(http.MethodPost, "/api/queues/mine/pause", "")
	require.Equal(t, http.StatusOK, status, out)
}

// atOnce is a retry policy that retries a job immediately.
type atOnce struct{}

// NextRetry implements river.ClientRetryPolicy.
func (atOnce) NextRetry(*rivertype.JobRow) time.Time { return time.Now() }

// TestAttach_PublishesThePolicyToNewTables checks that a server publishes its policy to new tables.
func TestAttach_PublishesThePolicyToNewTables(t *testing.T) {
	t.Parallel()
	a := runApplication(t)
	b := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.Process = a.url, false
		c.Policy.Data.SensitiveColumns = []string{"notes"}
	}})
	written := func() bool {
		return a.count(t, `SELECT count(*) FROM dlq.settings s WHERE s.key = 'automatic'
			AND NOT has_column_privilege('dlq_reader', 'dlq.dead_letter_queue', 'notes', 'SELECT')
			AND has_column_privilege('dlq_reader', 'dlq.dead_letter_queue', 'original_event', 'SELECT')`) == 1
	}
	require.Eventually(t, written, time.Minute, 50*time.Millisecond)
	migrator := &postgres.Migrator{Pool: a.pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	found, err := migrator.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = migrator.Detach(t.Context(), *found, true)
	require.NoError(t, err)
	require.Eventually(t, func() bool { _, detail := b.part("observed"); return strings.HasPrefix(detail, "idle: ") },
		time.Minute, 50*time.Millisecond)
	require.NoError(t, migrator.Attach(t.Context()))
	require.Eventually(t, written, time.Minute, 50*time.Millisecond)
}
