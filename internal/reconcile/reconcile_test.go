package reconcile_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type testBundle struct {
	*testing.T

	pool *pgxpool.Pool
}

func setup(t *testing.T) *testBundle {
	t.Helper()
	return &testBundle{t, postgrestest.Pool(t)}
}

func (b *testBundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *testBundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

// insertJob inserts a running job, as the application does.
func (b *testBundle) insertJob() (id int64) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), `INSERT INTO river_job (kind, args, max_attempts, state, attempt, tags,
		metadata, unique_key, unique_states)
		VALUES ('mail', '{"n": 1}', 3, 'running', 3, '{a,b}', '{"k": 1}', decode(md5(random()::text), 'hex'), B'11110101')
		RETURNING id`).Scan(&id))
	return id
}

const fail = `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
	errors = errors || jsonb_build_object('error', 'timeout', 'attempt', 3) WHERE id = $1`

// execWithoutTriggers runs a statement in a session in which triggers do not fire.
func (b *testBundle) execWithoutTriggers(sql string, args ...any) {
	b.Helper()
	base := postgrestest.Superuser(b, b.pool.Config().ConnString())
	conn, err := pgx.Connect(b.Context(), base)
	require.NoError(b, err)
	defer func() { _ = conn.Close(context.WithoutCancel(b.Context())) }()
	_, err = conn.Exec(b.Context(), "SET session_replication_role = replica")
	require.NoError(b, err)
	_, err = conn.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// scan runs a whole scan, or a scan of recent failures, to its end.
func (b *testBundle) scan(db postgres.DB, whole bool) (filed int) {
	b.Helper()
	for {
		var n int
		var done bool
		require.NoError(b, db.QueryRow(b.Context(), "SELECT filed, done FROM dlq.reconcile(2, $1)", whole).Scan(&n, &done))
		filed += n
		if done {
			return filed
		}
	}
}

func TestReconcile_FilesSameEntryAsCapture(t *testing.T) {
	t.Parallel()
	b := setup(t)
	captured, missed := b.insertJob(), b.insertJob()
	b.exec(fail, captured)
	b.execWithoutTriggers(fail, missed)
	b.exec(`UPDATE river_job SET finalized_at = (SELECT finalized_at FROM river_job WHERE id = $1),
		created_at = (SELECT created_at FROM river_job WHERE id = $1), unique_key = NULL WHERE id = $2`, captured, missed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 1, b.scan(b.pool, false))
	require.Zero(t, b.scan(b.pool, false))
	require.Zero(t, b.scan(b.pool, true))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE stage = 'inbox'"))
	rows, err := b.pool.Query(t.Context(),
		`SELECT (to_jsonb(e) - '{id,river_job_id,created_at,updated_at,next_retry_at,captured_by,unique_key}'::text[])::text
			FROM dlq.dead_letter_queue e`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, texts[0], texts[1])
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'reconciler'
		AND id = dlq.entry_id(river_job_id, last_failed_at) AND river_job_id = $1`, missed))
	require.Equal(t, 1, b.count("SELECT entries FROM dlq.reconcile_findings WHERE why = 'missed'"))
}

// insertDiscarded inserts n failed jobs, as a COPY or a restore does. finalizedAt is an SQL expression.
func (b *testBundle) insertDiscarded(n int, finalizedAt string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, max_attempts, state, attempt, finalized_at, errors)
		SELECT 'mail', '{}', 1, 'discarded', 1, `+finalizedAt+`, '{"{\"error\": \"x\"}"}' FROM generate_series(1, $1)`, n)
}

func (b *testBundle) causes() (causes string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT string_agg(why || ' ' || entries, ', ' ORDER BY why)
		FROM dlq.reconcile_findings`).Scan(&causes))
	return causes
}

func TestReconcile_FindsMissedFailures(t *testing.T) {
	t.Parallel()
	for name, miss := range map[string]struct {
		do  func(b *testBundle)
		why string
	}{
		"capture off": {func(b *testBundle) {
			b.exec("SELECT dlq.set_capture('off')")
			b.exec(fail, b.insertJob())
			b.exec("SELECT dlq.set_capture('on')")
		}, "capture_off 1"},
		"trigger disabled": {func(b *testBundle) {
			b.exec("ALTER TABLE river_job DISABLE TRIGGER dlq_capture")
			b.exec(fail, b.insertJob())
		}, "trigger_disabled 1"},
		"trigger disabled until the next scan": {func(b *testBundle) {
			b.exec("ALTER TABLE river_job ENABLE REPLICA TRIGGER dlq_capture")
			require.Zero(b, b.scan(b.pool, false))
			b.exec(fail, b.insertJob())
			b.exec("ALTER TABLE river_job ENABLE TRIGGER dlq_capture")
		}, "trigger_disabled 1"},
		"trigger dropped": {func(b *testBundle) {
			b.exec("DROP TRIGGER dlq_capture ON river_job")
			b.exec(fail, b.insertJob())
		}, "trigger_missing 1"},
		"replica role": {func(b *testBundle) { b.execWithoutTriggers(fail, b.insertJob()) }, "missed 1"},
		"COPY":         {func(b *testBundle) { b.insertDiscarded(3, "now()") }, "missed 3"},
		"old failures": {func(b *testBundle) { b.insertDiscarded(3, "now() - interval '3 days'") }, "missed 3"},
		"invalid times": {func(b *testBundle) {
			b.insertDiscarded(1, "'infinity'")
			b.insertDiscarded(1, "'1969-01-01'")
			b.insertDiscarded(1, "'2999-01-01'")
		}, "missed 3"},
		"one skipped job": {func(b *testBundle) { // another session locks the queue
			tx, err := b.pool.Begin(b.Context())
			require.NoError(b, err)
			_, err = tx.Exec(b.Context(), "LOCK TABLE dlq.dead_letter_queue IN ACCESS EXCLUSIVE MODE")
			require.NoError(b, err)
			b.exec(fail, b.insertJob())
			require.NoError(b, tx.Rollback(b.Context()))
		}, "missed 1"},
		"cancelled by its worker": {func(b *testBundle) {
			b.execWithoutTriggers(`UPDATE river_job SET state = 'cancelled', finalized_at = now(),
				errors = '{"{\"error\": \"JobCancelError: no\"}"}' WHERE id = $1`, b.insertJob())
		}, "missed 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			miss.do(b)
			missed := b.count("SELECT count(*) FROM river_job")
			require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
			// As after several scans, the scan of recent failures reads only those of the last minute.
			b.exec("UPDATE dlq.reconcile_looks SET since = now() - interval '1 minute' WHERE look = 'recent'")
			b.scan(b.pool, name == "old failures" || name == "invalid times")
			require.Equal(t, missed, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'reconciler'"))
			require.Equal(t, miss.why, b.causes())
			require.Zero(t, b.scan(b.pool, true), "a second scan finds nothing")
			require.Zero(t, b.count("SELECT dlq.backfill()"))
		})
	}
}

func TestReconcile_IgnoresOtherJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, max_attempts, state, finalized_at, errors, metadata) VALUES
		('k', '{}', 1, 'completed', now(), NULL, '{}'),
		('k', '{}', 1, 'cancelled', now(), NULL, '{}'),
		('k', '{}', 1, 'cancelled', now(), '{"{\"error\": \"x\"}"}', '{"cancel_attempted_at": "x"}'),
		('k', '{}', 1, 'discarded', now(), '{"{\"error\": \"x\"}"}', '{"unique_key_conflict": "scheduler_discarded"}'),
		('k', '{}', 1, 'available', NULL, NULL, '{}')`)
	require.Zero(t, b.scan(b.pool, false))
	require.Zero(t, b.scan(b.pool, true))
	require.Zero(t, b.count("SELECT dlq.backfill()"))
}

// Jobs that dlqd creates or follows do not get entries of their own when they fail.
func TestReconcile_IgnoresJobsOfEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(fail, b.insertJob())
	id := b.count("SELECT 1 FROM dlq.dead_letter_queue")
	require.Equal(t, 1, id)
	b.insertDiscarded(1, "now()") // a redelivery whose end was not captured
	b.exec(`INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id) SELECT j.id, j.created_at, e.id
		FROM river_job j, dlq.dead_letter_queue e WHERE j.max_attempts = 1`)
	// A job with an open entry fails again, and capture misses it. The failure is added to that entry.
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	b.execWithoutTriggers("UPDATE river_job SET finalized_at = finalized_at + interval '1 second' WHERE max_attempts = 3")
	require.Equal(t, 1, b.scan(b.pool, true))
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason LIKE '%failed again'"))
	require.Zero(t, b.scan(b.pool, true))

	// After River's sequence was restarted, another job gets the same id.
	b.exec("UPDATE river_job SET created_at = created_at + interval '1 hour' WHERE max_attempts = 3")
	require.Equal(t, 1, b.scan(b.pool, true))
}

// The scan waits for transactions that end long after the finalized_at of their jobs. That includes prepared
// transactions.
func TestReconcile_WaitsForOpenTransactions(t *testing.T) {
	t.Parallel()
	for _, prepared := range []bool{false, true} {
		b := setup(t)
		late := b.insertJob()
		base := postgrestest.Superuser(b, b.pool.Config().ConnString())
		conn, err := pgx.Connect(t.Context(), base)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		run := func(sql string, args ...any) {
			t.Helper()
			_, err := conn.Exec(t.Context(), sql, args...)
			require.NoError(t, err)
		}
		run("SET session_replication_role = replica")
		run("BEGIN")
		run("UPDATE river_job SET state = 'discarded', finalized_at = now() - interval '2 hours', errors = '{\"{}\"}' "+
			"WHERE id = $1", late)
		b.exec("UPDATE dlq.reconcile_looks SET since = now() - interval '2 hours' WHERE look = 'recent'")
		b.scan(b.pool, false)
		b.exec("UPDATE dlq.reconcile_looks SET since = now() - interval '2 hours' WHERE look = 'recent'")
		if prepared {
			run("PREPARE TRANSACTION 'late'")
		}
		for range 3 {
			require.Zero(t, b.scan(b.pool, false))
			require.Zero(t, b.count(`SELECT count(*) FROM dlq.reconcile_looks WHERE look = 'recent'
				AND since > now() - interval '1 hour'`), "the scan does not advance")
		}
		run(map[bool]string{false: "COMMIT", true: "COMMIT PREPARED 'late'"}[prepared])
		require.Equal(t, 1, b.scan(b.pool, false))
		require.Zero(t, b.scan(b.pool, false))
		// Open transactions of other tests on this server delay the scan, too.
		require.Eventually(t, func() bool {
			b.scan(b.pool, false)
			return b.count(`SELECT count(*) FROM dlq.reconcile_looks WHERE look = 'recent'
				AND since > now() - interval '1 hour'`) == 1
		}, 3*time.Minute, 100*time.Millisecond)
	}
}

// A job that dlqd followed fails again after its entry was closed, and capture misses the failure.
func TestReconcile_FilesFailureOfFollowedJob(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fails := "UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = ARRAY['{\"error\": " +
		"\"x\"}'::jsonb] WHERE id = 1"
	b.exec("INSERT INTO river_job (kind, args, max_attempts, state) VALUES ('k', '{}', 1, 'running')")
	b.exec(fails)
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	b.exec("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = 1")
	b.exec("SELECT dlq.apply_facts()")
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp() WHERE id = 1")
	b.exec("SELECT dlq.apply_facts()")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'"))
	require.Zero(t, b.scan(b.pool, true))
	b.exec("SELECT dlq.set_capture('off')")
	b.exec("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = 1")
	b.exec(fails)
	b.exec("SELECT dlq.set_capture('on')")
	require.Equal(t, 1, b.scan(b.pool, true))
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE river_job_id = 1
		AND status = 'dlq_pending'`))
	require.Zero(t, b.scan(b.pool, true))
}

// The scan does not wait for a locked job. A later scan files it.
func TestReconcile_SkipsLockedJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.insertDiscarded(3, "now()")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id = 2 FOR UPDATE")
	require.NoError(t, err)
	require.Equal(t, 2, b.scan(b.pool, false))
	require.Zero(t, b.scan(b.pool, true))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 1, b.scan(b.pool, false))
}

// If one job cannot be filed, the scan still files the others.
func TestReconcile_SkipsRejectedJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.insertDiscarded(3, "now()")
	b.exec("ALTER TABLE dlq.dead_letter_queue ADD CONSTRAINT hostile CHECK (river_job_id <> 2)")
	require.Equal(t, 2, b.scan(b.pool, false))
	b.exec("ALTER TABLE dlq.dead_letter_queue DROP CONSTRAINT hostile")
	require.Equal(t, 1, b.scan(b.pool, false))
}

func TestReconcile_SkipsPurgedAndDeletedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 3 {
		b.exec(fail, b.insertJob())
	}
	ids := func(n int) string {
		return fmt.Sprintf("ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = %d)", n)
	}
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	b.exec(`SELECT dlq.act_on('purge', ` + ids(1) + `, 'kim', NULL, '{"force": true}')`)
	b.exec("SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim')")
	b.exec("SELECT dlq.delete_entries(" + ids(2) + ")")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	var month string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT c.relname FROM dlq.dead_letter_queue e
		JOIN pg_class c ON c.oid = e.tableoid`).Scan(&month))
	b.exec("SELECT dlq.drop_partition($1)", month)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.retired_jobs"))
	require.Zero(t, b.scan(b.pool, true))
	require.Zero(t, b.count("SELECT dlq.backfill()"))

	// The same holds for a job that ended in the future.
	for _, at := range []string{"infinity", "294276-01-01", "2100-01-01"} {
		id := b.insertJob()
		b.exec("UPDATE river_job SET state = 'discarded', finalized_at = $2, attempt = max_attempts WHERE id = $1", id, at)
		b.exec(`SELECT dlq.act_on('purge', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim', NULL, '{"force": true}')`)
		require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue"), at)
		require.Zero(t, b.scan(b.pool, true), at)
		b.exec("DELETE FROM river_job WHERE id = $1", id)
		b.exec("DELETE FROM dlq.retired_jobs WHERE job_id = $1", id)
	}

	// A later failure of the same job is filed.
	b.exec("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = 1")
	b.execWithoutTriggers(fail, 1)
	require.Equal(t, 1, b.scan(b.pool, true))

	// The record of a purged job is deleted some time after River has deleted the job. It is kept until then, because the
	// job may return from a backup.
	b.exec("DELETE FROM river_job WHERE id = 2")
	b.scan(b.pool, true)
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.retired_jobs"))
	b.exec("UPDATE dlq.retired_jobs SET at = at - interval '2 days'")
	b.scan(b.pool, true)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.retired_jobs"))
}

func TestReconcile_SkipsErasedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(fail, b.insertJob())
	b.exec(`CALL dlq.erase('{"kind": "mail"}', 'request 1')`)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event = '{\"erased\": true}'"))
	require.Zero(t, b.scan(b.pool, true))
}

// River's table is restored from a backup, and the sequence of its ids restarts.
func TestReconcile_WorksAfterRestore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 3 {
		b.exec(fail, b.insertJob())
	}
	b.exec("CREATE TABLE saved AS SELECT * FROM river_job")
	b.exec("TRUNCATE river_job")
	b.exec("ALTER SEQUENCE river_job_id_seq RESTART")
	b.scan(b.pool, true)
	b.exec("INSERT INTO river_job SELECT * FROM saved WHERE id <> 2")
	require.Zero(t, b.scan(b.pool, true), "the restored jobs have entries")
	b.exec("SELECT nextval('river_job_id_seq')")
	require.EqualValues(t, 2, b.insertJob())
	b.execWithoutTriggers(fail, 2)
	require.Equal(t, 1, b.scan(b.pool, true), "a different job with the same id")
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

// After a restore on another server, transaction ids that the database has stored may stay ahead of the server's
// forever.
func TestReconcile_AdvancesAfterRestoreToOtherServer(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.scan(b.pool, false)
	b.exec(`UPDATE dlq.reconcile_looks SET since = now() - interval '2 hours', seen_at = now() - interval '2 hours',
		seen_xid = 1000000000000 WHERE look = 'recent'`)
	require.Eventually(t, func() bool {
		b.scan(b.pool, false)
		return b.count(`SELECT count(*) FROM dlq.reconcile_looks
			WHERE look = 'recent' AND since > now() - interval '1 hour'`) == 1
	}, 5*time.Minute, 100*time.Millisecond, "the scan advances")
}

func TestReconcile_FilesEachFailureOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const jobs = 400
	done := make(chan error, 6)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for i := range cap(done) {
		go func() {
			var err error
			for ctx.Err() == nil && err == nil {
				switch i {
				case 0:
					_, err = b.pool.Exec(t.Context(), `SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue
						WHERE stage = 'inbox' LIMIT 50))`)
				case 1:
					_, err = b.pool.Exec(t.Context(), "SELECT dlq.backfill(20)")
				default:
					_, err = b.pool.Exec(t.Context(), "SELECT dlq.reconcile(20, $1)", i%2 == 0)
				}
			}
			done <- err
		}()
	}
	for n := range jobs {
		if n%2 == 0 {
			b.exec(fail, b.insertJob())
		} else {
			b.insertDiscarded(1, "clock_timestamp()")
		}
	}
	stop()
	for range cap(done) {
		require.NoError(t, <-done)
	}
	b.scan(b.pool, true)
	require.Equal(t, jobs, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, jobs, b.count("SELECT count(DISTINCT (river_job_id, job_created_at)) FROM dlq.dead_letter_queue"))
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	require.Equal(t, jobs, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE from_status IS NULL"))
}

// A scan that another caller began may have passed a failure already. began_at tells when the scan began.
func TestReconcile_ReportsWhenScanBegan(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var before, began time.Time
	var done bool
	b.insertDiscarded(3, "now()")
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT done, began_at FROM dlq.reconcile(3, true)").Scan(&done,
		&began))
	require.False(t, done)
	b.insertDiscarded(1, "now() - interval '1 hour'")
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT now()").Scan(&before))
	require.Zero(t, b.scan(b.pool, true))
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT done, began_at FROM dlq.reconcile(3, true)").Scan(&done,
		&began))
	require.False(t, began.Before(before))
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

// The cost of a page does not depend on the number of jobs with the same finalized_at.
func TestReconcile_PagesThroughEqualTimes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const jobs = 25000
	b.insertDiscarded(jobs, "'2026-01-01'")
	b.insertDiscarded(5, "'2025-01-01'")
	b.insertDiscarded(5, "'2026-01-02'")
	b.exec("ANALYZE river_job")
	for calls, done := 0, false; !done; calls++ {
		require.LessOrEqual(t, calls, jobs/1000+1)
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		const stats = `SELECT seq_scan, seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables
			WHERE relid = 'river_job'::regclass`
		// The counts include earlier transactions until their statistics are reported.
		var scansBefore, readBefore, scans, read int
		require.NoError(t, tx.QueryRow(t.Context(), stats).Scan(&scansBefore, &readBefore))
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT done FROM dlq.reconcile(1000, true)").Scan(&done))
		require.NoError(t, tx.QueryRow(t.Context(), stats).Scan(&scans, &read))
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, scansBefore, scans)
		if calls > 0 { // the first call sorts the jobs
			require.Less(t, read-readBefore, 20000)
		}
	}
	require.Equal(t, jobs+10, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

// Several processes together scan as often as one process.
func TestReconcile_RunsInOneProcessAtATime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var done bool
	var filed int
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT filed, done FROM dlq.reconcile(2000, false, '1 minute')").Scan(
		&filed, &done))
	require.True(t, done)
	b.insertDiscarded(1, "now()")
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT filed, done FROM dlq.reconcile(2000, false, '1 minute')").Scan(
		&filed, &done))
	require.True(t, done)
	require.Zero(t, filed, "the last scan is less than a minute old")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.reconcile()")
	require.NoError(t, err)
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT filed, done FROM dlq.reconcile(2000, false, '1 us')").Scan(
		&filed, &done))
	require.True(t, done)
	require.Zero(t, filed, "another session is scanning")
	require.NoError(t, tx.Rollback(t.Context()))
}

// On an application's River, failures from before the attach are left to a backfill.
func TestReconcile_SkipsFailuresBeforeAttach(t *testing.T) {
	t.Parallel()
	g := postgrestest.NewGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	b := &testBundle{t, postgrestest.Open(t, g.Owner)}
	b.insertDiscarded(1, "clock_timestamp()")
	dlqd := postgrestest.Open(t, g.DLQD)
	m := &postgres.Migrator{Pool: dlqd, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	require.NoError(t, m.Attach(t.Context()))
	b.insertDiscarded(1, "clock_timestamp()")
	require.Equal(t, 1, b.scan(dlqd, true))
	require.NoError(t, m.Attach(t.Context()))
	found, err := m.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = m.Detach(t.Context(), *found, false)
	require.NoError(t, err)
	b.insertDiscarded(1, "clock_timestamp()")
	require.NoError(t, m.Attach(t.Context()))
	require.Zero(t, b.scan(dlqd, true))
	n, err := m.Backfill(t.Context(), func(int) {})
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

// Filing checks for existing entries once per batch. It does so only if the batch has rows that capture did not append.
func TestReconcile_ChecksRowsOncePerBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	conn, err := pgx.Connect(t.Context(), postgrestest.Superuser(t, b.pool.Config().ConnString()))
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	files := func(rows int) (calledFunctions map[string]int64) {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		_, err = tx.Exec(t.Context(), "SET LOCAL track_functions = 'pl'")
		require.NoError(t, err)
		var filed int
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT cardinality(dlq.file_as(ARRAY(SELECT id "+
			"FROM dlq.dead_letter_inbox)))").Scan(&filed))
		require.Equal(t, rows, filed)
		calledFunctions = map[string]int64{}
		found, err := tx.Query(t.Context(), `SELECT funcname::text, calls FROM pg_stat_xact_user_functions
			WHERE schemaname = 'dlq' AND funcname IN ('to_be_filed', 'may_be_filed', 'is_taken')`)
		require.NoError(t, err)
		for found.Next() {
			var name string
			var calls int64
			require.NoError(t, found.Scan(&name, &calls))
			calledFunctions[name] = calls
		}
		require.NoError(t, found.Err())
		return calledFunctions
	}
	for range 3 {
		b.exec(fail, b.insertJob())
	}
	require.Empty(t, files(3))
	b.insertDiscarded(4, "clock_timestamp()")
	require.Equal(t, 4, b.scan(b.pool, true))
	require.Equal(t, map[string]int64{"to_be_filed": 1}, files(7))
}
