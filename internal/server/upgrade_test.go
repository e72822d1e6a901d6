package server_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// TestUpgrade_OlderProcessesGoOn upgrades the schema as the next release would, while processes run: tables get
// columns, and functions get parameters. Running processes continue, and restarted ones start. make trial-upgrade does
// the same with programs of both versions.
func TestUpgrade_OlderProcessesGoOn(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]int{}
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		id := r.Header.Get("Webhook-Id")
		seen[id]++
		switch first := seen[id] == 1; {
		case first && strings.HasPrefix(id, "late"):
			w.WriteHeader(http.StatusBadGateway)
		case first && strings.HasPrefix(id, "bad"):
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}, config: func(c *server.Config) { c.Policy.Queues["default"].MaxAttempts = 1 }})
	older := func(o options) *bundle {
		change := o.config
		o.config = func(c *server.Config) {
			c.DatabaseURL = b.url
			change(c)
		}
		other := setup(t, o)
		other.url, other.pool = b.url, b.pool
		return other
	}
	withSessions := options{config: func(c *server.Config) {
		c.Source = policy.Source{
			Dir:         policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"}),
			Destination: policytest.Destination,
		}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy, c.Process, c.DLQWorkers = rules, false, false
	}}
	kim := older(withSessions).signIn("kim", access.Operator)

	// Each turn has a message that is delivered, one that is redelivered, and one that a replay run delivers.
	turn := func(b *bundle, n int) {
		t.Helper()
		entry := func(id, status string) {
			t.Helper()
			require.Eventually(t, func() bool {
				var n int
				err := b.pool.QueryRow(t.Context(), `SELECT count(*) FROM dlq.dead_letter_queue WHERE status = $2
					AND original_event ->> 'messageId' = $1`, id, status).Scan(&n)
				return err == nil && n == 1
			}, 5*time.Minute, 20*time.Millisecond, "%s: no entry is %s", id, status)
		}
		name := func(kind string) string { return fmt.Sprintf("%s-%d", kind, n) }
		for _, kind := range []string{"good", "late", "bad"} {
			b.submit(name(kind))
		}
		b.awaitMessage(name("good"), "completed")
		entry(name("late"), "dlq_resolved")
		entry(name("bad"), "dlq_manual")
		status, out, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"status": ["dlq_manual"]}}`)
		require.Equal(t, http.StatusAccepted, status, out)
		entry(name("bad"), "dlq_resolved")
	}
	turn(b, 1)

	// Clients submit without a pause meanwhile.
	ctx, cancel := context.WithCancel(t.Context())
	var accepted []string
	var clients sync.WaitGroup
	clients.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			id := fmt.Sprintf("m-%d", n)
			response, err := http.Post(b.base+"/api/messages", "application/json", strings.NewReader(
				fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1}`, id)))
			if err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusAccepted {
				accepted = append(accepted, id)
			}
		}
	})
	latest, err := postgres.LatestVersion()
	require.NoError(t, err)
	postgrestest.Newer(t, b.pool, latest)
	turn(b, 2)
	cancel()
	clients.Wait()

	health := func(b *bundle) string {
		response, err := http.Get(b.base + "/api/health")
		require.NoError(t, err)
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return string(body)
	}
	require.Contains(t, health(b), "of dlqd 0.9.0, on which this dlqd")
	require.Equal(t, http.StatusOK, kim.status("GET", "/api/whoami", ""), "a session that began before")
	restarted := older(options{config: func(c *server.Config) { c.Policy.Queues["default"].MaxAttempts = 1 }})
	require.Equal(t, http.StatusOK, older(withSessions).signIn("lee", access.Operator).status("GET", "/api/whoami", ""))
	b.stop()
	restarted.submit("good-3")
	restarted.awaitMessage("good-3", "completed")
	require.NotEmpty(t, accepted)
	for _, id := range accepted {
		restarted.awaitMessage(id, "completed")
	}

	// The schema of a later release may work with newer programs only.
	b.exec(fmt.Sprintf("UPDATE dlq.settings SET value = '%d' WHERE key = 'oldest_program'", latest+1))
	require.Contains(t, health(restarted), "database schema is too new for this dlqd")
	_, err = server.Start(t.Context(), server.Config{
		DatabaseURL: b.url, Schemas: postgres.DefaultSchemas(), API: true, Logger: slog.New(slog.DiscardHandler),
	})
	require.ErrorIs(t, err, postgres.ErrSchemaNew)
}
