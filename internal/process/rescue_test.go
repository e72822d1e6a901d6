package process_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/process"
)

// running inserts a running job that the given processes have attempted; the last of them is running it now.
func (b *bundle) running(kind string, attempt, most int, metadata string, processes ...string) (id int64) {
	b.Helper()
	require.NoError(b, b.db.QueryRow(b.Context(), `
		INSERT INTO river_job (kind, args, queue, state, attempt, max_attempts, metadata, attempted_at, attempted_by,
			scheduled_at)
		VALUES ($1, '{"messageId": "m", "kind": "k"}', 'mail', 'running', $2, $3, $4, now(), $5, '2026-01-01Z')
		RETURNING id`, kind, attempt, most, metadata, processes).Scan(&id))
	return id
}

type rescued struct {
	State, Errors  string
	Due, Finalized bool
	Entries        int
}

func (b *bundle) job(id int64) (r rescued) {
	b.Helper()
	rows, err := b.db.Pool.Query(b.Context(), `
		SELECT j.state::text, coalesce(to_jsonb(j.errors), '[]')::text, j.scheduled_at > now() - interval '1 minute',
			j.finalized_at IS NOT NULL,
		       (SELECT count(*) FROM dlq.dead_letter_queue e WHERE e.river_job_id = j.id)
		FROM river_job j WHERE j.id = $1`, id)
	require.NoError(b, err)
	r, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[rescued])
	require.NoError(b, err)
	return r
}

// rescue rescues the running messages of processes that have been silent for 30 seconds.
func (b *bundle) rescue(most int) (retried, ended int) {
	b.Helper()
	require.NoError(b, b.db.QueryRow(b.Context(), `SELECT retried, ended
		FROM dlq.rescue_messages(now() - interval '30 seconds', $1)`, most).Scan(&retried, &ended))
	return retried, ended
}

func TestRescue_PutsBackMessagesOfADeadProcess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	dead, living := b.start("mail").ID().String(), b.start("mail").ID().String()
	message := b.running("dlqd_message", 1, 3, "{}", living, dead)
	last := b.running("dlqd_message", 3, 3, "{}", dead)
	cancelled := b.running("dlqd_message", 1, 3, `{"cancel_attempted_at": "2026-01-01T00:00:00Z"}`, dead)
	others := []int64{
		b.running("send_email", 1, 3, "{}", dead), b.running("dlqd_message", 1, 3, "{}", dead, living),
		b.running("dlqd_message", 1, 3, "{}", "host_2026"),
	}
	retried, ended := b.rescue(100)
	require.Zero(t, retried+ended, "all processes are alive")

	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '31 seconds' WHERE id = '" + dead + "'")
	retried, ended = b.rescue(100)
	require.Equal(t, []int{1, 2}, []int{retried, ended})
	job := b.job(message)
	require.Equal(t, rescued{State: "available", Errors: job.Errors, Due: true}, job)
	var errs []struct {
		Attempt int
		Error   string
	}
	require.NoError(t, json.Unmarshal([]byte(job.Errors), &errs))
	require.Len(t, errs, 1)
	require.Equal(t, 1, errs[0].Attempt)
	require.Contains(t, errs[0].Error, "Stuck job rescued by dlqd")
	job = b.job(last)
	require.Equal(t, rescued{State: "discarded", Errors: job.Errors, Finalized: true, Entries: 1}, job)
	job = b.job(cancelled)
	require.Equal(t, rescued{State: "cancelled", Errors: job.Errors, Finalized: true}, job,
		"cancelled by an operator: no dead letter")
	for _, id := range others {
		require.Equal(t, rescued{State: "running", Errors: "[]"}, b.job(id))
	}
	var counted int
	require.NoError(t, b.db.QueryRow(t.Context(),
		"SELECT count(*) FROM river_job WHERE metadata ? 'river:rescue_count'").Scan(&counted))
	require.Zero(t, counted, "River counts only rescues of jobs that may have killed their worker")
}

func TestRescue_WorksInBatchesAndSkipsLockedJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	dead := b.start("mail").ID().String()
	ids := make([]int64, 5)
	for i := range ids {
		ids[i] = b.running("dlqd_message", 1, 3, "{}", dead)
	}
	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '31 seconds'")
	tx, err := b.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id = $1 FOR UPDATE", ids[0])
	require.NoError(t, err)
	retried, _ := b.rescue(3)
	require.Equal(t, 3, retried)
	retried, _ = b.rescue(3)
	require.Equal(t, 1, retried)
	require.NoError(t, tx.Rollback(t.Context()))
	retried, _ = b.rescue(3)
	require.Equal(t, 1, retried)
	require.Equal(t, "available", b.job(ids[0]).State)
}

// River may have a million ended jobs. A rescue does not read them, even with outdated statistics.
func TestRescue_ReadsOnlyRunningJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, state, attempt, max_attempts, attempted_by, finalized_at)
		SELECT 'dlqd_message', '{}', 'mail', CASE WHEN n % 5 = 0 THEN 'running' ELSE 'completed' END::river_job_state, 1, 3,
			'{other}', CASE WHEN n % 5 > 0 THEN now() END
		FROM generate_series(1, 10000) n`)
	b.exec("ANALYZE river_job")
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'running'")
	b.exec(`INSERT INTO dlq.processes (id, name, version, parts, queues) SELECT gen_random_uuid(), 'before', '1', '{}',
		'{}' FROM generate_series(1, 50)`)
	dead := b.start("mail").ID().String()
	for range 5 {
		b.running("dlqd_message", 1, 3, "{}", dead)
	}
	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '31 seconds'")
	tx, err := b.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	var retried, read int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT retried
		FROM dlq.rescue_messages(now() - interval '30 seconds', 10)`).Scan(&retried))
	require.Equal(t, 5, retried)
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT idx_tup_fetch FROM pg_stat_xact_user_tables
		WHERE relid = 'river_job'::regclass`).Scan(&read))
	require.Less(t, read, 100)
}

// A stopping process may still run jobs, so it stays registered until it has ended.
func TestProcess_StaysRegisteredWhileItStops(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.start("mail")
	require.NoError(t, p.Stop(t.Context()))
	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '31 seconds'")
	require.NoError(t, p.Once(t.Context()))
	id := b.running("dlqd_message", 1, 3, "{}", p.ID().String())
	retried, _ := b.rescue(10)
	require.Zero(t, retried)
	require.Equal(t, "running", b.job(id).State)
	work, _ := b.lookup("mail")
	require.Equal(t, process.Away, work)
}
