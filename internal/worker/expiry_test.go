package worker_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
)

// expiring is a policy that expires dead letters of the queue reports after an hour, and dead letters of the queue
// quotes at the time that their jobs have set.
var expiring = policytest.Files{"dlq-routing": `
queues:
  reports: {staleAfter: 1h, expireStale: true}
  prices: {staleAfter: 1h}
  quotes: {expireStale: true}
`}

// age makes the jobs of a queue's open entries some hours older.
func (j *policyBundle) age(queue string, hours int) {
	j.Helper()
	j.exec(`WITH older AS (UPDATE river_job SET created_at = created_at - make_interval(hours => $2) WHERE queue = $1
		RETURNING id, created_at)
		UPDATE dlq.dead_letter_open e SET job_created_at = o.created_at FROM older o WHERE e.river_job_id = o.id`, queue, hours)
}

func (j *policyBundle) expired(queue string) int {
	j.Helper()
	return j.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE queue = $1 AND status = 'dlq_archived'
		AND resolution_strategy = 'expired' AND resolved_by = 'worker:test'`, queue)
}

// If the policy says so, the worker expires due and waiting entries whose work is out of date, instead of redelivering
// them.
func TestExpiry_FollowsThePolicy(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, expiring)
	j.failMany(1, "reports", "dial tcp: connection refused")
	j.failMany(2, "prices", "dial tcp: connection refused")
	j.once()
	j.age("reports", 2)
	j.age("prices", 2)
	j.now = j.now.Add(10 * time.Minute)
	j.once()
	require.Equal(t, 1, j.expired("reports"))
	require.Contains(t, j.one(`SELECT reason FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_archived'`),
		"expired: it is older than staleAfter of queue reports, 1h0m0s")
	require.Equal(t, 2, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"),
		"the queue prices does not expire its work")

	j.failMany(3, "reports", "card was declined")
	j.failMany(2, "quotes", "card was declined")
	j.once()
	require.NoError(t, j.worker.Expire(t.Context()))
	require.Equal(t, 1, j.expired("reports"), "the others are not out of date")
	j.age("reports", 4)
	j.exec(`UPDATE dlq.dead_letter_open SET metadata = '{"dlqd:expires_at": "2020-01-01T00:00:00Z"}'
		WHERE id = (SELECT id FROM dlq.dead_letter_open WHERE queue = 'quotes' LIMIT 1)`)
	require.NoError(t, j.worker.Expire(t.Context()))
	require.Equal(t, 4, j.expired("reports"))
	require.Equal(t, 1, j.expired("quotes"))
	require.Zero(t, j.count(`SELECT count(*) FROM river_job WHERE queue IN ('reports', 'quotes') AND state <> 'discarded'`))
}

// dlqd does not expire entries that an operator works on, entries that a replay run will send, or entries with a live
// job.
func TestExpiry_LeavesWantedAndLiveWork(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, expiring)
	j.failMany(6, "reports", "card was declined")
	j.once()
	j.age("reports", 2)
	ids := strings.Fields(j.one("SELECT string_agg(id::text, ' ' ORDER BY id) FROM dlq.dead_letter_open"))
	require.Len(t, ids, 6)
	j.exec("SELECT dlq.discard($1::uuid, 'kim')", ids[0])
	j.exec("SELECT dlq.reopen($1::uuid, 'kim')", ids[0])
	j.exec("SELECT dlq.unpark($1::uuid, 'kim')", ids[1])
	j.exec(`SELECT dlq.replay_start(jsonb_build_object('ids', jsonb_build_array($1::text)), 'kim', p_rate => 1,
		p_force => true)`, ids[2])
	const of = " WHERE id = (SELECT river_job_id FROM dlq.dead_letter_queue WHERE id = $1::uuid)"
	j.exec("UPDATE river_job SET state = 'available', finalized_at = NULL, attempt = 0"+of, ids[3])
	tx, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job"+of+" FOR UPDATE", ids[4])
	require.NoError(t, err)

	require.NoError(t, j.worker.Expire(t.Context()))
	require.Equal(t, 1, j.expired("reports"))
	require.Equal(t, ids[5], j.one("SELECT id::text FROM dlq.dead_letter_queue WHERE resolution_strategy = 'expired'"))
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, j.worker.Expire(t.Context()))
	require.Equal(t, 2, j.expired("reports"), "its job is no longer locked")

	// An operator can reopen an expired entry like any closed one. It then stays open.
	j.exec("SELECT dlq.reopen($1::uuid, 'kim')", ids[5])
	require.NoError(t, j.worker.Expire(t.Context()))
	require.Equal(t, 1, j.expired("reports"))
}

// Expiry reads only the rows of its entries, however many jobs and unapplied facts exist. This also holds for a plan
// that Postgres made while the tables were empty.
func TestExpiry_ReadsOnlyRowsOfItsEntries(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, expiring)
	conn, err := j.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	const expire = `SELECT count(*) FROM dlq.expire_stale($1::uuid[], $2::text[], 'worker:test', 'v1')`
	for range 6 {
		_, err := conn.Exec(t.Context(), expire, []string{"00000000-0000-0000-0000-000000000000"}, []string{""})
		require.NoError(t, err)
	}
	for range 2 {
		j.failMany(20, "reports", "card was declined")
		j.once()
		ids := strings.Fields(j.one("SELECT string_agg(id::text, ' ') FROM dlq.dead_letter_open"))
		require.Len(t, ids, 20)
		j.exec(`WITH jobs AS (INSERT INTO river_job (kind, args, queue, max_attempts, state)
				SELECT 'k', '{}', 'others', 3, 'available' FROM generate_series(1, 5000) RETURNING id, created_at),
			followed AS (INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id)
				SELECT id, created_at, gen_random_uuid() FROM jobs)
			INSERT INTO dlq.job_facts (job_id, job_created_at, fact) SELECT id, created_at, 'following' FROM jobs`)

		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		var expired int
		require.NoError(t, tx.QueryRow(t.Context(), expire, ids, make([]string, len(ids))).Scan(&expired))
		require.Equal(t, len(ids), expired)
		rows, err := tx.Query(t.Context(), `SELECT relname::text, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
			FROM pg_stat_xact_user_tables WHERE relname IN ('river_job', 'entry_jobs', 'job_facts', 'replay_run_entries')`)
		require.NoError(t, err)
		read := map[string]int{}
		var table string
		var tuples int
		_, err = pgx.ForEachRow(rows, []any{&table, &tuples}, func() error { read[table] = tuples; return nil })
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		for table, tuples := range read {
			require.Less(t, tuples, 5000, table)
		}
	}
}
