package postgres_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// A function of a newer schema may have more columns, with which SELECT * would fail.
func TestColumnsOf_LeavesOutNewerColumns(t *testing.T) {
	t.Parallel()
	type inner struct {
		Queue string `db:"queue"`
	}
	type row struct {
		inner

		Open int64  `db:"open"`
		Text string `db:"-"`
	}
	conn, err := pgx.Connect(t.Context(), postgrestest.Empty(t))
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	const newer = ` FROM (SELECT 1 AS newer, 'mail' AS queue, 2::bigint AS open) f`
	rows, err := conn.Query(t.Context(), "SELECT *"+newer)
	require.NoError(t, err)
	_, err = pgx.CollectRows(rows, pgx.RowToStructByName[row])
	require.Error(t, err)
	rows, err = conn.Query(t.Context(), "SELECT "+postgres.ColumnsOf[row]()+newer)
	require.NoError(t, err)
	read, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	require.NoError(t, err)
	require.Equal(t, []row{{inner: inner{Queue: "mail"}, Open: 2}}, read)
}
