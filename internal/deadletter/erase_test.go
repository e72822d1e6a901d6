package deadletter_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
)

// An entry with a redelivery under way is left: its job has the payload. Its data goes once that has ended.
func TestErase_leavesWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	_, pool := roleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("SELECT dlq.replay((SELECT min(id::text)::uuid FROM dlq.dead_letter_open))")
	filter, act := json.RawMessage(`{"payload": {"card": "4242"}}`), deadletter.Act{Actor: "kim", Note: "request 1"}
	e, err := store.Erase(t.Context(), filter, act)
	require.NoError(t, err)
	require.EqualValues(t, 3, e.Entries)
	require.EqualValues(t, 3, e.Jobs)
	require.EqualValues(t, 1, e.UnderWay)
	require.Nil(t, e.FinishedAt)

	exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE metadata ? 'dlq:entry_id' AND state = 'available'")
	require.NoError(t, (&facts.Applier{Store: store}).All(t.Context()))
	e, err = store.Erase(t.Context(), filter, act)
	require.NoError(t, err)
	require.EqualValues(t, 1, e.Entries)
	require.EqualValues(t, 2, e.Jobs, "the first, and the redelivery")
	require.Zero(t, e.UnderWay)
	var left int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM river_job WHERE args::text LIKE '%4242%') + (SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event::text LIKE '%4242%')").Scan(&left))
	require.Zero(t, left)
	_, err = store.Erase(t.Context(), json.RawMessage(`{}`), act)
	require.ErrorIs(t, err, deadletter.ErrInvalid)
}

// A month that is being archived would bring the data to the archive after it was looked through.
func TestErase_waitsForRetention(t *testing.T) {
	t.Parallel()
	_, pool := roleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	erased := make(chan error, 1)
	require.NoError(t, store.InTx(t.Context(), func(tx postgres.DB) error {
		var locked bool
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT pg_try_advisory_xact_lock(hashtextextended('dlq.retention', 0))").Scan(&locked))
		require.True(t, locked)
		go func() {
			_, err := store.Erase(t.Context(), json.RawMessage(`{"payload": {"card": "4242"}}`), deadletter.Act{Actor: "kim", Note: "request 1"})
			erased <- err
		}()
		require.Eventually(t, func() bool {
			var waits bool
			require.NoError(t, tx.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted)").Scan(&waits))
			return waits
		}, 20*time.Second, 10*time.Millisecond)
		return nil
	}))
	require.NoError(t, <-erased)
}
