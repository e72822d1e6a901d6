package postgres_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func TestSmoke(t *testing.T) {
	pool := postgrestest.Pool(t)
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), "select count(*) from dlq.dead_letter_queue").Scan(&n))
}
