package deadletter_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestLocks counts the locks of what people open most, in a database that has kept three years: the lock table is shared by all
// databases of the server, so an entry must not cost what the history is long.
func TestLocks(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec(`SELECT dlq.ensure_partition(p.parent::regclass, replace(p.parent, 'dlq.', '') || '_' || to_char(m, 'YYYYMM'), m, m + interval '1 month', p.key)
		FROM (VALUES ('dlq.dead_letter_transitions', 'id, at'), ('dlq.dead_letter_resolved', 'id'), ('dlq.dead_letter_archived', 'id')) p (parent, key),
			generate_series(date_trunc('month', now(), 'UTC') - interval '36 months', now(), interval '1 month') m`)
	// One that has just failed, one that was closed today, and one that was closed a year ago and failed a month before that.
	exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', 'q', 1, 'running' FROM generate_series(1, 2)`)
	exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	var fresh, closed uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT min(id::text), max(id::text) FROM dlq.dead_letter_queue").Scan(&fresh, &closed))
	require.NoError(t, store.Discard(t.Context(), closed, deadletter.Act{Actor: "kim"}))
	var old uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), `WITH noted AS (INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind) SELECT dlq.entry_id(7, now() - interval '13 months'), 'dlq_archived', 'restored', 'q', 'k')
		INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event, status, first_failed_at, last_failed_at, created_at, closed_at, stage, move)
		SELECT dlq.entry_id(7, f), 7, f, 'q', 'k', 'k', 1, '{}', 'dlq_archived', f, f, f, f + interval '1 month', 'archived', '{"moved": true}' FROM (SELECT now() - interval '13 months') t (f) RETURNING id`).Scan(&old))

	locks := func(sql string, args ...any) (n int) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			rows, err := tx.Query(t.Context(), sql, args...)
			if err != nil {
				return err
			}
			rows.Close()
			require.NoError(t, rows.Err())
			require.Equal(t, int64(1), rows.CommandTag().RowsAffected(), sql)
			return tx.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()").Scan(&n)
		}))
		return n
	}
	page := func(id uuid.UUID) (string, []any) { return store.GetSQL(id, id == fresh, deadletter.ClosedSince(id)) }
	for name, look := range map[string]struct {
		id   uuid.UUID
		most int
	}{
		"has just failed": {fresh, 100}, "closed today": {closed, 300}, "closed a year ago": {old, 900},
	} {
		sql, args := page(look.id)
		require.Less(t, locks(sql, args...), look.most, name)
		t.Log(name, "entry", locks(sql, args...))
		trail := "SELECT count(*) FROM dlq.trail($1)"
		require.Less(t, locks(trail, look.id), look.most, name)
		t.Log(name, "trail", locks(trail, look.id))
		require.Less(t, locks("SELECT count(*) FROM dlq.audit(jsonb_build_object('entryId', $1::uuid))", look.id), look.most, name)
		for _, act := range []string{"note", "tag", "assign"} {
			t.Log(name, act, locks("SELECT dlq.act_on($1, ARRAY[$2::uuid], 'kim', 'x', '{\"tags\": [\"a\"]}')", act, look.id))
			require.Less(t, locks("SELECT dlq.act_on($1, ARRAY[$2::uuid], 'kim', 'x', '{\"tags\": [\"a\"]}')", act, look.id), look.most, name)
		}
	}
	t.Log("audit", locks("SELECT count(*) FROM dlq.audit('{}', 100)"))
	require.Less(t, locks("SELECT count(*) FROM dlq.audit('{}', 100)"), 300, "the whole trail")
	require.Less(t, locks("SELECT count(*) FROM dlq.audit(jsonb_build_object('after', now() - interval '7 days'), 100)"), 60, "a week of it")
	sql, args := store.ListSQL(deadletter.Filter{Statuses: []deadletter.Status{"dlq_pending"}, Limit: 50})
	t.Log("list", locks(sql, args...))
	require.Less(t, locks(sql, args...), 60, "open ones")
	require.Less(t, locks(`SELECT count(*) FROM dlq.find('{"status": "dlq_pending"}')`), 60, "open ones, in psql")

	// What is done to an old entry finds it.
	n := 0
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.act_on('purge', ARRAY[$1::uuid], 'kim')", old).Scan(&n))
	require.Equal(t, 1, n)
}
