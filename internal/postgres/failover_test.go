package postgres_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// onServer returns the name of the server on which a statement runs.
func onServer(ctx context.Context, pool *pgxpool.Pool) (server string, err error) {
	err = postgres.NewDriver(pool).OnServer(ctx, func(db pgx.Tx, s string) error {
		server = s
		return db.QueryRow(ctx, "SELECT 1").Scan(new(int))
	})
	return server, err
}

func TestDriver_NamesServerOfStatement(t *testing.T) {
	t.Parallel()
	servers := postgrestest.NewReplicated(t, false)
	pool := postgrestest.Open(t, servers.URL)
	before, err := onServer(t.Context(), pool)
	require.NoError(t, err)
	require.NotEmpty(t, before)
	again, err := onServer(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, before, again)
	servers.Fail()
	var after string
	require.Eventually(t, func() bool {
		after, err = onServer(t.Context(), pool)
		return err == nil
	}, 5*time.Minute, 50*time.Millisecond)
	require.NotEmpty(t, after)
	require.NotEqual(t, before, after)
}

// The server is unknown behind a pooler, whose connections survive a change of the server, and for a server that does
// not report its start time.
func TestDriver_DoesNotKnowEveryServer(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	server, err := onServer(t.Context(), postgrestest.Open(t, postgrestest.Pooler(t, url, 1)))
	require.NoError(t, err)
	require.Empty(t, server)
	_, err = postgrestest.Open(t, postgrestest.Superuser(t, url)).Exec(t.Context(),
		"REVOKE EXECUTE ON FUNCTION pg_postmaster_start_time() FROM PUBLIC")
	require.NoError(t, err)
	server, err = onServer(t.Context(), postgrestest.Open(t, url))
	require.NoError(t, err)
	require.Empty(t, server)
}

// After a backend was killed, its server restarts all sessions and may have lost commits that it acknowledged, for
// example with synchronous_commit off.
func TestDriver_NamesServerAnewAfterCrash(t *testing.T) {
	t.Parallel()
	servers := postgrestest.NewReplicated(t, false)
	pool := postgrestest.Open(t, servers.PrimaryURL)
	before, err := onServer(t.Context(), pool)
	require.NoError(t, err)
	var backend int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&backend))
	require.NoError(t, syscall.Kill(backend, syscall.SIGKILL))
	var after string
	require.Eventually(t, func() bool {
		after, err = onServer(t.Context(), pool)
		return err == nil && after != before // the server accepts connections until it notices the kill
	}, 5*time.Minute, 50*time.Millisecond)
	require.NotEmpty(t, after)
}

// OnServer must return River's error for a closed pool: River's completer retries other errors for seconds.
func TestDriver_SaysThatPoolIsClosed(t *testing.T) {
	t.Parallel()
	pool, err := postgres.Open(t.Context(), postgrestest.URL(t), 1)
	require.NoError(t, err)
	pool.Close()
	_, err = onServer(t.Context(), pool)
	require.ErrorIs(t, err, riverdriver.ErrClosedPool)
}
