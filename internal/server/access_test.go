package server_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
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

// as sends a request with a token and returns the status.
func (b *bundle) as(token, method, path, body string) int {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	require.NoError(b, response.Body.Close())
	return response.StatusCode
}

// The actor in the audit trail is the authenticated caller. If the body names another actor, the audit trail has that
// name, too.
func TestAccess_ActorIsTheAuthenticatedCaller(t *testing.T) {
	t.Parallel()
	b := setup(t, options{
		receiver: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnprocessableEntity) },
		config:   func(c *server.Config) { c.Policy.Access.Authentication = []string{"tokens"} },
	})
	tokens := access.NewStore(b.pool, postgres.DefaultSchemas())
	token := func(role access.Role) string {
		secret, err := tokens.Create(t.Context(), &access.Token{Name: "the-" + string(role), Role: role}, "kim")
		require.NoError(t, err)
		return secret
	}
	operator, reader, sender, metrics := token(access.Operator), token(access.Reader), token(access.Sender),
		token(access.Metrics)
	require.Equal(t, 202, b.as(sender, "POST", "/api/messages",
		`{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload": 1}`))
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	var id string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id::text FROM dlq.dead_letter_open").Scan(&id))
	for secret, want := range map[string]int{reader: 403, sender: 403, metrics: 403, "dlqd_nonsense": 401, operator: 200} {
		require.Equal(t, want, b.as(secret, "POST", "/api/dlq/entries/"+id+"/discard",
			`{"actor": "worker:1", "note": "by phone"}`))
	}
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_archived'
		AND actor = 'the-operator' AND origin LIKE 'API, from 127.0.0.1 (%), on behalf of worker:1' AND note = 'by phone'`))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE resolved_by = 'the-operator'"))

	for path, want := range map[string]map[string]int{
		"/metrics": {reader: 200, sender: 403, metrics: 200, "": 401}, "/api/health": {metrics: 200, sender: 403, "": 401},
		"/livez": {"": 200}, "/readyz": {"": 200}, "/docs": {"": 200}, "/openapi.json": {"": 200},
		"/runbooks/destination-down": {"": 200}, "/runbooks/README.md": {"": 200},
		"/runbooks/runbooks.go": {"": 404}, "/": {"": 401, reader: 200}, "/api/nothing": {"": 401, reader: 404},
	} {
		for secret, status := range want {
			require.Equal(t, status, b.as(secret, "GET", path, ""), "%s %s", path, secret)
		}
	}
}

// dlqd does not start if other machines could connect without authentication, unless Insecure is set.
func TestAccess_RefusesExposedAddressesWithoutAuthentication(t *testing.T) {
	t.Parallel()
	rules, err := policy.Default("http://127.0.0.1:9/")
	require.NoError(t, err)
	config := server.Config{
		DatabaseURL: postgrestest.URL(t), Schemas: postgres.DefaultSchemas(), API: true,
		Policy: rules, Logger: slog.New(slog.DiscardHandler), StopTimeout: 20 * time.Second,
	}
	for _, address := range []string{"0.0.0.0:0", ":0", "[::]:0"} {
		config.Listen = []string{"127.0.0.1:0", address}
		_, err := server.Start(t.Context(), config)
		require.ErrorContains(t, err, "--listen "+address, address)
		require.ErrorContains(t, err, "access.yaml", address)
	}
	config.API, config.DLQWorkers = false, true // serves only metrics and health
	_, err = server.Start(t.Context(), config)
	require.ErrorContains(t, err, "--listen [::]:0")
	config.API, config.DLQWorkers = true, false
	config.Listen, config.Insecure = []string{"0.0.0.0:0"}, true
	s, err := server.Start(t.Context(), config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, s.Wait(ctx, context.Background()))
}

// A process without the API serves only metrics and health. Both require authentication.
func TestAccess_ProcessWithoutAPIServesMetricsAndHealth(t *testing.T) {
	t.Parallel()
	source := policy.Source{
		Dir: policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"}), Destination: policytest.Destination,
	}
	rules, err := policy.Load(source)
	require.NoError(t, err)
	b := setup(t, options{config: func(c *server.Config) {
		c.API, c.Process, c.Policy, c.LogLevel = false, false, rules, new(slog.LevelVar)
	}})
	tokens := access.NewStore(b.pool, postgres.DefaultSchemas())
	secrets := map[access.Role]string{"": ""}
	for _, role := range []access.Role{access.Metrics, access.Admin} {
		secrets[role], err = tokens.Create(t.Context(), &access.Token{Name: string(role), Role: role}, "anna")
		require.NoError(t, err)
	}
	for _, test := range []struct {
		role         access.Role
		method, path string
		want         int
	}{
		{"", "GET", "/livez", 200},
		{"", "GET", "/readyz", 200},
		{"", "GET", "/metrics", 401},
		{"", "GET", "/api/health", 401},
		{access.Metrics, "GET", "/metrics", 200},
		{access.Metrics, "GET", "/api/health", 200},
		{access.Metrics, "PUT", "/api/log-level", 403},
		{access.Admin, "PUT", "/api/log-level", 200},
		{access.Admin, "POST", "/api/messages", 404},
		{access.Admin, "GET", "/api/dlq/entries", 404},
		{access.Admin, "GET", "/api/whoami", 404},
		{access.Admin, "GET", "/", 404},
		{"", "POST", "/api/login", 404},
		{"", "GET", "/docs", 404},
	} {
		require.Equal(t, test.want, b.as(secrets[test.role], test.method, test.path, `{"level": "debug"}`), "%+v", test)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.base+"/metrics", nil)
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+secrets[access.Metrics])
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	for _, want := range []string{
		"dlqd_database_up 1", `dlqd_stage_seconds_count{outcome="ok",stage="claim"}`,
		`dlqd_loop_healthy{loop="dlq-workers"} 1`,
	} {
		require.Contains(t, string(text), want)
	}
}

// A reload of an access.yaml in which a line was lost gives no caller more access. The event stream of a replay run
// ends when the token of the viewer is revoked.
func TestAccess_ReloadGrantsNothing(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"})
	b := setup(t, options{config: func(c *server.Config) {
		c.Source = policy.Source{Dir: dir, Destination: policytest.Destination}
		rules, err := policy.Load(c.Source)
		require.NoError(t, err)
		c.Policy, c.Process = rules, false
	}})
	tokens := access.NewStore(b.pool, postgres.DefaultSchemas())
	token := &access.Token{Name: "kim", Role: access.Operator}
	secret, err := tokens.Create(t.Context(), token, "anna")
	require.NoError(t, err)
	b.exec(`INSERT INTO dlq.replay_runs (id, filter, actor, total, status)
		VALUES ('0198a0b0-0000-7000-8000-000000000000', '{}', 'kim', 1, 'paused')`)
	require.Equal(t, 401, b.as("", "GET", "/api/whoami", ""))
	for _, text := range []string{"grants: []", "authentication: []"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "access.yaml"), []byte(text), 0o600))
		require.NoError(t, b.server.Reload(t.Context()))
		require.Equal(t, 401, b.as("", "GET", "/api/whoami", ""), text)
		require.Equal(t, 200, b.as(secret, "GET", "/api/whoami", ""), text)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "access.yaml"), []byte("# nothing"), 0o600))
	require.ErrorContains(t, b.server.Reload(t.Context()), "missing or empty")

	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		b.base+"/api/dlq/replays/0198a0b0-0000-7000-8000-000000000000/events", nil)
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+secret)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, 200, response.StatusCode)
	require.NoError(t, tokens.Revoke(t.Context(), token.ID, "anna", ""))
	_, err = io.Copy(io.Discard, response.Body) // the stream ends
	require.NoError(t, err)
}
