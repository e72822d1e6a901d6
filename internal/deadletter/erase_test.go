package deadletter_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
)

// An erasure skips an entry while its redelivery is in progress, because the job contains the payload. A second
// erasure, after the end of the job, erases the entry.
func TestErase_SkipsRedeliveriesInProgress(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("SELECT dlq.replay((SELECT min(id::text)::uuid FROM dlq.dead_letter_queue))")
	filter, act := json.RawMessage(`{"payload": {"card": "4242"}}`), deadletter.Act{Actor: "kim", Note: "request 1"}
	e, err := store.Erase(t.Context(), filter, act)
	require.NoError(t, err)
	require.EqualValues(t, 3, e.Entries)
	require.EqualValues(t, 3, e.Jobs)
	require.EqualValues(t, 1, e.UnderWay)
	require.Nil(t, e.FinishedAt)

	exec(`UPDATE river_job SET state = 'completed', finalized_at = now() WHERE metadata ? 'dlq:entry_id'
		AND state = 'available'`)
	require.NoError(t, (&facts.Applier{Store: store}).All(t.Context()))
	e, err = store.Erase(t.Context(), filter, act)
	require.NoError(t, err)
	require.EqualValues(t, 1, e.Entries)
	require.EqualValues(t, 2, e.Jobs, "the original job and the redelivery")
	require.Zero(t, e.UnderWay)
	var left int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM river_job
		WHERE args::text LIKE '%4242%') + (SELECT count(*) FROM dlq.dead_letter_queue
		WHERE original_event::text LIKE '%4242%')`).Scan(&left))
	require.Zero(t, left)
	_, err = store.Erase(t.Context(), json.RawMessage(`{}`), act)
	require.ErrorIs(t, err, deadletter.ErrInvalid)
}

// An erasure skips and counts entries and jobs that another transaction has locked. It does not wait for any lock, not
// even for the lock that retention holds.
func TestErase_SkipsLockedRows(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	filter, act := json.RawMessage(`{"payload": {"card": "4242"}}`), deadletter.Act{Actor: "kim", Note: "request 1"}
	require.NoError(t, store.InTx(t.Context(), func(tx postgres.DB) error {
		for _, sql := range []string{
			"SELECT pg_advisory_xact_lock(hashtextextended('dlq.retention', 0))",
			"SELECT FROM dlq.dead_letter_queue WHERE id = (SELECT min(id::text)::uuid FROM dlq.dead_letter_queue) FOR UPDATE",
			"SELECT FROM river_job WHERE id = (SELECT max(id) FROM river_job) FOR UPDATE",
		} {
			_, err := tx.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		e, err := store.Erase(t.Context(), filter, act)
		require.NoError(t, err)
		require.EqualValues(t, 2, e.Entries)
		require.EqualValues(t, 2, e.UnderWay)
		return nil
	}))
	e, err := store.Erase(t.Context(), filter, act)
	require.NoError(t, err)
	require.EqualValues(t, 2, e.Entries)
	require.Zero(t, e.UnderWay)
}

// One CALL in psql commits a transaction for each batch.
func TestErase_ProcedureCommitsBatches(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	var id string
	require.NoError(t, pool.QueryRow(t.Context(),
		`CALL dlq.erase('{"payload": {"card": "4242"}}', 'request 1', 'kim')`).Scan(&id))
	var transactions, entries int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(DISTINCT t.xid), max(r.entries)
		FROM dlq.dead_letter_transitions t, dlq.erasures r WHERE r.id = $1 AND t.reason = 'erased'
			AND t.note = r.note`, id).Scan(&transactions, &entries))
	require.Equal(t, 4, entries)
	require.Equal(t, 1, transactions, "one batch")
}
