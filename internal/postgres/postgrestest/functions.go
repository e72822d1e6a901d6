package postgrestest

import (
	"context"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// FunctionsVariable names an environment variable with the path of a file. If the variable is set, each test with a
// database appends a line to the file when the test ends: the test's name, and the functions of its database whose
// calls Postgres counted. "make mutate" reads the file.
const FunctionsVariable = "DLQD_TEST_FUNCTIONS"

func recordFunctions(tb testing.TB, url, file string) {
	tb.Helper()
	ctx := context.WithoutCancel(tb.Context())
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return // the test has dropped its database
	}
	defer func() { _ = conn.Close(ctx) }()
	// A session adds its last calls to the statistics when it ends.
	_, err = conn.Exec(ctx, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	require.NoError(tb, err)
	var line string
	require.NoError(tb, conn.QueryRow(ctx, `SELECT concat_ws(' ', $1::text,
		(SELECT string_agg(DISTINCT schemaname || '.' || funcname, ' ') FROM pg_stat_user_functions))`,
		tb.Name()).Scan(&line))
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	require.NoError(tb, err)
	defer func() { _ = out.Close() }()
	_, err = out.WriteString(line + "\n")
	require.NoError(tb, err)
}
