package deadletter_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// For any default isolation level, a statement in InTx sees what other sessions committed before it. So a worker that
// has claimed entries sees an operator's stop of automatic redelivery.
func TestStoreInTx_SeesConcurrentCommits(t *testing.T) {
	t.Parallel()
	b := setup(t, nil)
	config := b.pool.Config()
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	require.NoError(t, store.InTx(t.Context(), func(tx postgres.DB) error {
		stops := func() (n int) {
			require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM dlq.automatic_switches WHERE scope = 'stop'").Scan(
				&n))
			return n
		}
		require.Zero(t, stops())
		b.exec("SELECT dlq.stop_automatic('kim')")
		require.Equal(t, 1, stops())
		return nil
	}))
}
