package server_test

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// pooledSession is the state of a pooler's session with the server, as the pooler's next client finds it.
type pooledSession struct {
	Settings map[string]string
	Prepared []string
	Channels []string
	Advisory int
}

// pooledSessions returns the state of all sessions that a pooler has with the server, as another client of the pooler
// finds them. To reach all of them, it holds one transaction in each session at the same time. A pooler replaces the
// session of a client that disconnects during a statement.
func pooledSessions(t *testing.T, pooled string, servers int) []pooledSession {
	t.Helper()
	config, err := pgx.ParseConfig(pooled)
	require.NoError(t, err)
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	config.RuntimeParams["application_name"] = "another"
	var found []pooledSession
	for range servers {
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		_, err = tx.Exec(t.Context(), "DO $$ BEGIN END $$") // loads plpgsql, which adds settings
		require.NoError(t, err)
		var raw []byte
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT json_build_object(
			'settings', (SELECT json_object_agg(name, setting) FROM pg_settings),
			'prepared', (SELECT json_agg(name) FROM pg_prepared_statements),
			'channels', (SELECT json_agg(c) FROM pg_listening_channels() c),
			'advisory', (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()))`).
			Scan(&raw))
		var session pooledSession
		require.NoError(t, json.Unmarshal(raw, &session))
		require.NotEmpty(t, session.Settings)
		found = append(found, session)
	}
	return found
}

// dlqd leaves no setting, prepared statement, channel or lock in a pooler's sessions. In the test, the database's
// default isolation is serializable; dlqd's transactions must not use it.
func TestServe_LeavesNoStateInPooledSessions(t *testing.T) {
	t.Parallel()
	const servers = 4
	var direct, pooled string
	var before []pooledSession
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) {
		postgrestest.Alter(t, c.DatabaseURL, "SET default_transaction_isolation = 'serializable'")
		direct, pooled = c.DatabaseURL, postgrestest.Pooler(t, c.DatabaseURL, servers)
		before = pooledSessions(t, pooled, servers)
		c.DatabaseURL, c.PollInterval = pooled, 50*time.Millisecond
	}})
	// While this transaction is open, Postgres keeps the SIRead locks of every later serializable transaction, also
	// after its commit: locks() below finds them.
	application, err := pgx.Connect(t.Context(), postgrestest.WithUser(direct, postgrestest.Role))
	require.NoError(t, err)
	defer func() { _ = application.Close(context.WithoutCancel(t.Context())) }()
	tx, err := application.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(),
		"INSERT INTO river_job (kind, args, max_attempts, queue) VALUES ('application', '{}', 1, 'application')")
	require.NoError(t, err)
	locks := func() (locked []string) {
		require.NoError(t, tx.QueryRow(t.Context(), `
			SELECT coalesce(array_agg(DISTINCT relation::regclass::text), '{}') FROM pg_locks WHERE mode = 'SIReadLock'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND relation::regclass::text LIKE '%river_job%' AND pid IS DISTINCT FROM pg_backend_pid()`).Scan(&locked))
		return locked
	}
	own := locks()

	b.submit("m1")
	id := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(id, "dlq_manual")
	status, out, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{"payload": {"n": 2}}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitEntry(id, "dlq_manual")
	status, _, _ = b.call("GET", "/api/dlq/entries?status=dlq_manual,dlq_pending&queue=default", "")
	require.Equal(t, http.StatusOK, status)
	status, out, _ = b.call("POST", "/api/messages",
		`{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Eventually(t, func() bool { // a busy machine may not answer within the time limit of a health check
		status, out = b.wholeHealth()
		return status == http.StatusOK
	}, 5*time.Minute, 50*time.Millisecond, "%v", &out)

	require.Equal(t, own, locks(), "dlqd read River's jobs in a serializable transaction")
	require.Equal(t, before, pooledSessions(t, pooled, servers), "while dlqd runs")
	require.Zero(t, b.count(listeners))
	b.stop()
	require.Equal(t, before, pooledSessions(t, pooled, servers), "when dlqd has stopped")
}

const listeners = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"

// Behind a pooler that gives each client its own session, dlqd uses LISTEN if the configuration says so.
func TestServe_ListensThroughAPoolerIfConfigured(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.Listens = postgrestest.SessionPooler(t, c.DatabaseURL), true
	}})
	require.Eventually(t, func() bool {
		return b.count(listeners) > 0
	}, 5*time.Minute, 20*time.Millisecond)
}
