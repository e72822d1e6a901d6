package host_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// failedJobs are failed jobs of which dlqd parked one, is redelivering one, and has not filed one.
type failedJobs struct {
	parked, processing, unfiled int64 // ids of the failed jobs
	redelivery                  int64 // id of the running redelivery of processing
}

// fail makes three jobs of the application fail. dlqd parks the first and redelivers the second; the third stays in the
// inbox.
func (h *host) fail(app *application) failedJobs {
	h.Helper()
	var d failedJobs
	fail := func() (id int64) {
		require.NoError(h, app.QueryRow(h.Context(), `INSERT INTO river_job (kind, args, max_attempts, state)
			VALUES ('mail', '{"n": 1}', 1, 'running') RETURNING id`).Scan(&id))
		h.exec(app, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
			errors = ARRAY['{"error": "timeout", "attempt": 1}'::jsonb] WHERE id = $1`, id)
		return id
	}
	d.parked, d.processing, d.unfiled = fail(), fail(), fail()
	h.exec(h.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = ANY ($1)))",
		[]int64{d.parked, d.processing})
	h.exec(h.dlqd, "SELECT dlq.park(id) FROM dlq.dead_letter_queue WHERE river_job_id = $1", d.parked)
	require.NoError(h, h.dlqd.QueryRow(h.Context(), `SELECT dlq.replay(id) FROM dlq.dead_letter_queue
		WHERE river_job_id = $1`, d.processing).Scan(&d.redelivery))
	h.exec(app, "UPDATE river_job SET state = 'running' WHERE id = $1", d.redelivery)
	return d
}

// TestHost_SurvivesOpenTransactions runs the application's statements while an operator, a worker or a program has
// changed the same entries in a transaction that is still open.
func TestHost_SurvivesOpenTransactions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	app := h.application()
	const (
		parked, processing, unfiled = "(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $parked)",
			"(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $processing)",
			"(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $unfiled)"
		all = "ARRAY[" + parked + ", " + processing + ", " + unfiled + "]"
	)
	statements := []struct {
		sql string
		// locksEnded is set if the statement locks the original jobs, which have ended. Retries and deletions of these jobs
		// wait for the statement's transaction.
		locksEnded bool
	}{
		{sql: "SELECT dlq.note(" + parked + ", 'x'), dlq.note(" + processing + ", 'x'), dlq.note(" + unfiled + ", 'x')"},
		{sql: "SELECT dlq.assign(" + parked + ", 'x'), dlq.assign(" + processing + ", 'x'), dlq.assign(" +
			unfiled + ", 'x')"},
		{sql: "SELECT dlq.act_on('tag', " + all + `, 'x', NULL, '{"add": ["x"]}')`},
		{sql: "SELECT dlq.discard(" + parked + "), dlq.discard(" + unfiled + ")"},
		{sql: "SELECT dlq.resolve(" + parked + ")", locksEnded: true},
		{sql: "SELECT dlq.park(" + unfiled + ")"},
		{sql: "SELECT dlq.unpark(" + parked + ")"},
		{sql: "SELECT dlq.replay(" + parked + "), dlq.replay(" + unfiled + ")", locksEnded: true},
		{sql: "SELECT dlq.redeliver(" + all + ", 'x', 'x')", locksEnded: true},
		{sql: "SELECT dlq.act_where('note', '{}', 'x', 'x', p_all => true)"},
		{sql: "SELECT dlq.act_where('discard', '{}', 'x', 'x', p_all => true)", locksEnded: true},
		{sql: "SELECT dlq.erase_entries(" + all + ", 'x', 'x')", locksEnded: true},
		{sql: "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))"},
		{sql: "SELECT dlq.apply_facts()", locksEnded: true},
		{sql: "SELECT dlq.reconcile()", locksEnded: true},
		{sql: "SELECT dlq.reconcile(10000, true)", locksEnded: true},
		{sql: "SELECT dlq.backfill()", locksEnded: true},
		{sql: "SELECT dlq.sweep_redeliveries()", locksEnded: true},
		{sql: "SELECT dlq.refresh_rollups()"},
		{sql: "SELECT dlq.rebuild_rollups()"},
		{sql: "SELECT dlq.ensure_partition(m.parent, m.month) FROM dlq.missing_partitions(24) m"},
		{sql: `SELECT dlq.age_out('{}')`},
		{sql: `SELECT dlq.replay_start('{}', p_all => true, p_force => true)`},
		{sql: "SELECT dlq.set_capture('on', '1 min')"},
		{sql: "SELECT dlq.stop_automatic()"},
		{sql: "SELECT dlq.open_breaker('x')"},
		{sql: "SELECT dlq.install_roles()"},
		{sql: "SELECT dlq.protect('{error_message}')"},
		{sql: "SELECT dlq.forget_jobs()"},
		{sql: "UPDATE dlq.dead_letter_queue SET notes = 'x'"},
		{sql: `SELECT (SELECT count(*) FROM (SELECT FROM dlq.dead_letter_queue FOR UPDATE) l),
			(SELECT count(*) FROM (SELECT FROM dlq.job_facts FOR UPDATE) l),
			(SELECT count(*) FROM (SELECT FROM dlq.entry_jobs FOR UPDATE) l),
				(SELECT count(*) FROM (SELECT FROM dlq.retired_jobs FOR UPDATE) l),
			(SELECT count(*) FROM (SELECT FROM dlq.settings FOR UPDATE) l)`},
		{sql: "DELETE FROM dlq.job_facts"},
		{sql: "DELETE FROM dlq.entry_jobs"},
		{sql: "CREATE INDEX ON dlq.dead_letter_open (updated_at)"},
		{sql: "CREATE INDEX ON dlq.dead_letter_queue (updated_at)"},
		{sql: "ALTER TABLE dlq.dead_letter_queue ADD COLUMN another text"},
		{sql: "CREATE PUBLICATION everything FOR TABLE dlq.dead_letter_queue, dlq.job_facts"},
	}
	for _, s := range statements {
		t.Log(s.sql)
		d := h.fail(app)
		sql := strings.NewReplacer("$parked", fmt.Sprint(d.parked), "$processing", fmt.Sprint(d.processing), "$unfiled",
			fmt.Sprint(d.unfiled)).Replace(s.sql)
		require.True(t, h.while(sql, func() {
			app.run(h.prepare(1)[0], sql)
			run := func(statement, sql string, args ...any) {
				t.Helper()
				begun := time.Now()
				_, err := app.Exec(context.WithoutCancel(t.Context()), statement, args...)
				require.NoError(t, err, "%s while %s", statement, sql)
				require.Less(t, time.Since(begun), limit, "%s while %s", statement, sql)
			}
			run("UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp() WHERE id = $1", sql, d.redelivery)
			run("INSERT INTO river_job (kind, args, max_attempts) VALUES ('mail', '{}', 1)", sql)
			if !s.locksEnded {
				for _, id := range []int64{d.parked, d.unfiled} {
					var failedAt time.Time
					require.NoError(t, app.QueryRow(t.Context(), "SELECT finalized_at FROM river_job WHERE id = $1",
						id).Scan(&failedAt))
					run("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", sql, id)
					// the same failure once more
					run("UPDATE river_job SET state = 'discarded', finalized_at = $2 WHERE id = $1", sql, id, failedAt)
					run("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", sql, id)
					run("UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE id = $1", sql, id)
				}
			}
			run(`DELETE FROM river_job WHERE id IN (SELECT id FROM river_job
				WHERE state IN ('completed', 'cancelled', 'discarded')
					AND finalized_at < now() - interval '1 hour' LIMIT 100)`, sql)
		}), sql)
		app.takeWarnings()
	}
}

// TestHost_LiveJobsEndDespiteOpenTransactions checks jobs that run or wait while an open transaction of an operator
// acts on their entries. The end of a job does not wait for that transaction. River's scheduler would wait for locked
// jobs, and none of these is locked.
func TestHost_LiveJobsEndDespiteOpenTransactions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	app := h.application()
	for _, state := range []string{"running", "retryable", "available"} {
		for _, function := range []string{"dlq.replay", "dlq.resolve", "dlq.discard"} {
			d := h.fail(app)
			id := h.strings("SELECT id::text FROM dlq.dead_letter_queue WHERE river_job_id = $1", d.parked)[0]
			h.exec(h.dlqd, "SELECT dlq.set_capture('off')") // so that dlqd does not learn that the job is live
			h.exec(app, `UPDATE river_job SET state = $2, finalized_at = NULL, scheduled_at = now() - interval '1 minute'
				WHERE id = $1`, d.parked, state)
			h.exec(h.dlqd, "SELECT dlq.set_capture('on')")
			sql := "SELECT " + function + "('" + id + "')"
			require.True(t, h.while(sql, func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err := app.Exec(ctx, `SELECT FROM river_job WHERE state IN ('retryable', 'scheduled') AND scheduled_at <= now()
					ORDER BY id FOR UPDATE`)
				require.NoError(t, err, "River's scheduler, while %s of a job that is %s", sql, state)
				_, err = app.Exec(ctx, "UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp() WHERE id = $1",
					d.parked)
				require.NoError(t, err, "River's completer, while %s of a job that is %s", sql, state)
			}), sql)
			app.takeWarnings()
		}
	}
}

// TestHost_JobsCanBeRetriedWhileDLQDWaits checks that dlqd holds locks on an application's jobs only briefly while it
// waits for one of its own tables. So the application can retry these jobs.
func TestHost_JobsCanBeRetriedWhileDLQDWaits(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	app := h.application()
	store := deadletter.NewStore(h.dlqd, postgres.DefaultSchemas())
	for _, table := range []string{
		"dead_letter_inbox", "dead_letter_open", "dead_letter_transitions", "entry_jobs",
		"job_facts", "reconcile_findings",
	} {
		d := h.fail(app)
		missed := d.unfiled
		h.exec(h.admin, "ALTER TABLE river_job DISABLE TRIGGER dlq_capture")
		require.NoError(t, app.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, max_attempts, state)
			VALUES ('mail', '{}', 1, 'running') RETURNING id`).Scan(&missed))
		h.exec(app, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
			errors = ARRAY['{"error": "timeout", "attempt": 1}'::jsonb] WHERE id = $1`, missed)
		h.exec(h.admin, "ALTER TABLE river_job ENABLE TRIGGER dlq_capture")
		var all sync.WaitGroup
		var over atomic.Int64
		require.True(t, h.while("LOCK TABLE dlq."+table+" IN SHARE MODE", func() {
			for _, sql := range []string{
				"SELECT dlq.reconcile()",
				fmt.Sprintf(`SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE river_job_id IN (%d, %d)
					AND status IN ('dlq_pending', 'dlq_manual')), 'worker:1', 'x')`, d.parked, d.unfiled),
				"SELECT dlq.apply_facts()",
			} {
				all.Go(func() {
					defer over.Add(1)
					_ = store.InTx(t.Context(), func(tx postgres.DB) error { // it may fail at its lock timeout
						_, err := tx.Exec(t.Context(), sql)
						return err
					})
				})
			}
			require.Eventually(t, func() bool { // each statement waits for the table or has failed
				const waiting = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
					AND wait_event_type = 'Lock'`
				return over.Load()+int64(h.count(waiting)) == 3
			}, 5*time.Minute, time.Millisecond)
			for _, job := range []int64{missed, d.parked, d.unfiled, d.processing} {
				began := time.Now()
				h.exec(app, `UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now(),
					max_attempts = max_attempts + 1 WHERE id = $1 AND state = 'discarded'`, job)
				require.Less(t, time.Since(began), limit, "%s, job %d", table, job)
			}
		}))
		all.Wait()
		h.exec(app, "UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp() WHERE state = 'available'")
	}
}
