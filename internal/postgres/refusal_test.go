package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestIsRefusal_DependsOnSQLState(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	// An application's trigger may raise any SQLSTATE. dlq.may_pass must give the same results as the list in Go.
	for code, want := range map[string]bool{
		"22001": true, "23505": true, "54000": true, "P0001": true, "P0002": true, "APP01": true,
		"ZZ999": true, "DLQ01": true, "21000": true, "44000": true, "38000": true, "XX001": true,
		"0A000": false, "08006": false, "25006": false, "40001": false, "40P01": false, "42501": false,
		"42P01": false, "53100": false, "55P03": false, "57P01": false, "57014": false, "58030": false, "XX000": false,
	} {
		require.Equal(t, want, postgres.IsRefusal(fmt.Errorf("redeliver: %w", &pgconn.PgError{Code: code})), code)
		var mayPass bool
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.may_pass($1)", code).Scan(&mayPass))
		require.Equal(t, !want, mayPass, code)
	}

	// If a listening session keeps a transaction open, notifications fill the queue. Then every commit that sends a
	// notification fails.
	full := &pgconn.PgError{Code: "54000", Routine: "PreCommit_Notify"}
	require.False(t, postgres.IsRefusal(fmt.Errorf("insert: %w", full)))

	_, unencodable := json.Marshal(math.Inf(1))
	_, time10000 := json.Marshal(time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC))
	for _, err := range []error{unencodable, time10000} {
		require.True(t, postgres.IsRefusal(fmt.Errorf("insert: %w", err)), err)
	}
	_, closed := pool.Exec(canceledContext(t), "SELECT 1")
	_, refused := pgconn.Connect(t.Context(), "postgres://127.0.0.1:1/x?connect_timeout=5")
	gone, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer gone.Release()
	require.NoError(t, gone.Conn().Close(t.Context()))
	_, dead := gone.Exec(t.Context(), "SELECT 1")
	for _, err := range []error{
		nil, closed, refused, dead, io.ErrUnexpectedEOF, &net.OpError{Err: io.EOF},
		context.DeadlineExceeded, errors.New("write failed: connection cut"),
	} {
		require.False(t, postgres.IsRefusal(err), err)
	}
	require.Error(t, dead)
}

func canceledContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestIsAway_TellsServersFromRefusals(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	separator := "&"
	if !strings.Contains(url, "?") {
		separator = "?"
	}
	for at, away := range map[string]bool{
		"postgres://u@127.0.0.1:1/x":                       true, // no server listens on this port
		"postgres://u@127.0.0.1:1,127.0.0.1:2/x":           true,
		"host=" + t.TempDir() + " user=u dbname=x":         true, // the directory has no socket
		postgrestest.WithDatabase(url, "missing"):          false,
		postgrestest.WithUser(url, "absent_role"):          false,
		url + separator + "target_session_attrs=read-only": true, // no host of this kind
	} {
		_, err := postgres.Open(t.Context(), at, 1)
		require.Error(t, err, at)
		require.Equal(t, away, postgres.IsAway(err), "%s: %s", at, err)
	}
	for code, away := range map[string]bool{"57P03": true, "53300": true, "28P01": false, "28000": false, "3D000": false} {
		require.Equal(t, away, postgres.IsAway(&pgconn.PgError{Code: code}), code)
	}
	_, err := os.ReadFile("absent.pem")
	require.False(t, postgres.IsAway(fmt.Errorf("certificate: %w", err)))
}
