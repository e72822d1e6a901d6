package archive_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// One process at a time writes the archive. If that process dies, its lease remains until it expires.
func TestRunExclusive_TakesOverFromDeadProcess(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	take := func(holder uuid.UUID, during string) (taken bool) {
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.take_duty('archive', $1, $2::interval)", holder,
			during).Scan(&taken))
		return taken
	}
	runExclusive := func() (ran bool) {
		ran, err := archive.RunExclusive(t.Context(), store, 0, func(context.Context) error {
			require.False(t, take(uuid.New(), "1 hour"), "this process holds the lease")
			return nil
		})
		require.NoError(t, err)
		return ran
	}
	other := uuid.New()
	require.True(t, take(other, "1 hour"))
	require.False(t, runExclusive(), "another process holds the lease")
	require.True(t, take(other, "-1 second"), "the other process renews the lease, which then expires")
	require.True(t, runExclusive())
	require.True(t, runExclusive(), "the lease was released")

	// A process that returns after its lease expired does not end the lease of another process.
	require.True(t, take(other, "1 hour"))
	_, err := pool.Exec(t.Context(), "SELECT dlq.end_duty('archive', $1)", uuid.New())
	require.NoError(t, err)
	require.False(t, runExclusive())
}
