package reconcile_test

import (
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
)

// justNow is the finalized_at of a failure from a client whose clock is correct.
const justNow = "clock_timestamp()"

// retry retries a job as River UI does. The client that fetches the job later increments attempt.
func (b *testBundle) retry(id int64) {
	b.Helper()
	b.exec(`UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now(),
		metadata = metadata - 'cancel_attempted_at',
		max_attempts = CASE WHEN attempt = max_attempts THEN max_attempts + 1 ELSE max_attempts END WHERE id = $1
			AND state <> 'running'`, id)
}

// failAt runs a job and fails it as River's completer does. at is an SQL expression for finalized_at.
func (b *testBundle) failAt(id int64, at string) {
	b.Helper()
	b.exec("UPDATE river_job SET state = 'running', attempt = attempt + 1, attempted_at = now() WHERE id = $1", id)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = `+at+`,
		errors = errors || jsonb_build_object('at', clock_timestamp(), 'attempt', attempt, 'error', 'timeout', 'trace', '') WHERE id = $1`, id)
}

// endIn runs a job and ends it in the given state with an error message.
func (b *testBundle) endIn(id int64, state, message string) {
	b.Helper()
	b.exec("UPDATE river_job SET state = 'running', attempt = attempt + 1 WHERE id = $1", id)
	b.exec(`UPDATE river_job SET state = $2::text::river_job_state, finalized_at = clock_timestamp(),
		errors = errors || jsonb_build_object('error', $3::text, 'attempt', attempt) WHERE id = $1`, id, state, message)
}

// createFailed inserts a job, fails it at the given time, and files the failure.
func (b *testBundle) createFailed(at string) (id int64) {
	b.Helper()
	id = b.insertJob()
	b.failAt(id, at)
	b.processInbox()
	return id
}

// failUncaptured retries a job and makes it fail at the given time while capture is off.
func (b *testBundle) failUncaptured(id int64, at string) {
	b.Helper()
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(id)
	b.failAt(id, at)
	b.exec("SELECT dlq.set_capture('on')")
}

// processInbox applies facts and files the inbox, until no fact and no row of the inbox is left.
func (b *testBundle) processInbox() {
	b.Helper()
	for range 3 {
		b.exec("SELECT dlq.apply_facts()")
		b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	}
	require.Zero(b, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Zero(b, b.count("SELECT count(*) FROM dlq.job_facts WHERE fact <> 'following'"))
}

func (b *testBundle) discardOpen() {
	b.Helper()
	b.exec("SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open")
}

func (b *testBundle) countEntries() int { return b.count("SELECT count(*) FROM dlq.dead_letter_queue") }

// countFailures returns the number of failures in entries: those from which entries were made, and further failures of
// the same jobs.
func (b *testBundle) countFailures() int {
	return b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE failed_at IS NOT NULL")
}

// fileMissed runs a scan of recent failures, a whole scan and a backfill, and files the failures that they find. It
// returns the number of these failures.
func (b *testBundle) fileMissed() int {
	b.Helper()
	n := b.scan(b.pool, false) + b.scan(b.pool, true) + b.count("SELECT dlq.backfill()")
	b.processInbox()
	return n
}

// createDiscardedTwice makes a job fail, discards its entry, and retries the job, which reopens the entry. The job then
// fails again, which adds the failure to the entry. Then the entry is discarded again.
func (b *testBundle) createDiscardedTwice(first, second string) (id int64) {
	b.Helper()
	id = b.createFailed(first)
	b.discardOpen()
	b.retry(id)
	b.processInbox()
	require.Equal(b, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'done-twice'"))
	b.failAt(id, second)
	b.processInbox()
	require.Equal(b, 1, b.countEntries())
	require.Equal(b, 2, b.countFailures())
	b.discardOpen()
	return id
}

func TestKnownFailures_AreNotFiledAgainAfterClose(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.createDiscardedTwice(justNow, justNow)
	require.Zero(t, b.fileMissed())
	require.Equal(t, 1, b.countEntries())

	// After another retry, the job's failure is added to the same entry, once.
	b.retry(id)
	b.processInbox()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'done-twice'"))
	b.failAt(id, justNow)
	b.processInbox()
	require.Equal(t, 3, b.countFailures())
	b.discardOpen()
	require.Zero(t, b.fileMissed())

	// A newer failure that capture misses is filed once.
	b.failUncaptured(id, justNow)
	require.Equal(t, 1, b.fileMissed())
	require.Equal(t, 2, b.countEntries())
	require.Zero(t, b.fileMissed())
	b.discardOpen()
	require.Zero(t, b.fileMissed())
}

// The clocks of River's clients differ, so a later failure may have an earlier time.
func TestKnownFailures_NewFailureWithEarlierClockIsFiled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.createDiscardedTwice(justNow, "clock_timestamp() - interval '10 minutes'")
	require.Zero(t, b.fileMissed())
	b.failUncaptured(id, "clock_timestamp() - interval '20 minutes'")
	require.Equal(t, 1, b.fileMissed())
	require.Zero(t, b.fileMissed())
}

// All failures of a job with an invalid finalized_at have the same id.
func TestKnownFailures_DistinguishInvalidTimes(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"infinity", "294276-01-01", "2100-01-01"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			at := "'" + at + "'::timestamptz"
			id := b.createDiscardedTwice(at, at)
			require.Zero(t, b.fileMissed())
			// A newer failure is not taken for the failure of the closed entry, although both have the same id.
			b.failUncaptured(id, at)
			require.Equal(t, 1, b.fileMissed())
			require.Equal(t, 2, b.countEntries())
			require.Equal(t, 2, b.count("SELECT count(DISTINCT id) FROM dlq.dead_letter_queue"))
			require.Zero(t, b.fileMissed())
			b.discardOpen()
			require.Zero(t, b.fileMissed())
			b.retry(id)
			b.processInbox()
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
			b.failAt(id, at)
			b.processInbox()
			b.discardOpen()
			require.Zero(t, b.fileMissed())
			b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
			require.Zero(t, b.fileMissed())
			// Two such failures are in the inbox at once, and another job has the same id.
			for range 2 {
				b.retry(id)
				b.exec("DELETE FROM dlq.job_facts")
				b.failAt(id, at)
			}
			require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
			before := b.countFailures()
			b.processInbox()
			require.Equal(t, before+2, b.countFailures())
			b.discardOpen()
			b.exec("DELETE FROM river_job WHERE id = $1", id)
			b.exec(`INSERT INTO river_job (id, kind, args, max_attempts, attempt, state, errors)
				VALUES ($1, 'mail', '{}', 25, (SELECT max(retry_count) FROM dlq.dead_letter_queue) - 1, 'running', '{}')`, id)
			n := b.countEntries()
			b.failAt(id, at)
			b.processInbox()
			require.Equal(t, n+1, b.countEntries())
			b.discardOpen()
			require.Zero(t, b.fileMissed())
		})
	}
}

// A failure is still known after its entry was closed or deleted, in whichever way that happened.
func TestKnownFailures_StayKnownAfterEntryChanges(t *testing.T) {
	t.Parallel()
	const all = "ARRAY(SELECT id FROM dlq.dead_letter_queue)"
	for name, do := range map[string]func(b *testBundle, id int64){
		"undo of a second discard": func(b *testBundle, _ int64) {
			b.exec("SELECT dlq.act_on('reopen', " + all + ", 'kim')")
			b.exec("SELECT dlq.act_on('discard', " + all + ", 'kim')")
			b.exec("SELECT dlq.undo((SELECT id FROM dlq.operations ORDER BY id DESC LIMIT 1))")
			require.Equal(b, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
			require.Zero(b, b.fileMissed())
			b.discardOpen()
		},
		"reopened and resolved": func(b *testBundle, _ int64) {
			b.exec("SELECT dlq.reopen(id, 'kim') FROM dlq.dead_letter_queue")
			b.exec("SELECT dlq.resolve(id, 'kim') FROM dlq.dead_letter_queue")
		},
		"erased":    func(b *testBundle, _ int64) { b.exec(`CALL dlq.erase('{"kind": "mail"}', 'request 1')`) },
		"purged":    func(b *testBundle, _ int64) { b.exec("SELECT dlq.delete_entries(" + all + ")") },
		"retention": func(b *testBundle, _ int64) { b.dropMonths() },
		"restored": func(b *testBundle, _ int64) {
			var rows string
			require.NoError(b, b.pool.QueryRow(b.Context(),
				"SELECT jsonb_agg(to_jsonb(e))::text FROM dlq.dead_letter_queue e").Scan(&rows))
			b.dropMonths()
			require.Zero(b, b.fileMissed())
			b.exec("SELECT dlq.restore_entries($1::jsonb, now() + interval '1 day')", rows)
			require.Equal(b, 1, b.countEntries())
		},
		"deleted with its job, and the job restored": func(b *testBundle, id int64) {
			b.exec("CREATE TABLE backup AS SELECT * FROM river_job")
			b.exec("SELECT dlq.delete_entries(" + all + ")")
			b.exec("DELETE FROM river_job WHERE id = $1", id)
			require.Zero(b, b.fileMissed())
			b.execWithoutTriggers("INSERT INTO river_job SELECT * FROM backup")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createDiscardedTwice(justNow, justNow)
			do(b, id)
			require.Zero(t, b.fileMissed())
			require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
			if name == "restored" {
				return
			}
			b.failUncaptured(id, justNow)
			require.Equal(t, 1, b.fileMissed())
			require.Zero(t, b.fileMissed())
		})
	}
}

// dropMonths drops the months of closed entries, as retention does.
func (b *testBundle) dropMonths() {
	b.Helper()
	rows, err := b.pool.Query(b.Context(), `SELECT DISTINCT c.relname::text FROM dlq.dead_letter_queue e
		JOIN pg_class c ON c.oid = e.tableoid`)
	require.NoError(b, err)
	months, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(b, err)
	for _, month := range months {
		b.exec("SELECT dlq.drop_partition($1)", month)
	}
	require.Zero(b, b.countEntries())
}

// A failure is known, no matter whether the reconciler or a backfill filed it.
func TestKnownFailures_IncludeReconcilerAndBackfill(t *testing.T) {
	t.Parallel()
	for _, filer := range []string{"dlq.reconcile(p_whole => true)", "dlq.backfill()"} {
		t.Run(filer, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec("SELECT dlq.set_capture('off')")
			id := b.insertJob()
			fails := func() {
				b.failAt(id, justNow)
				b.exec("SELECT " + filer)
			}
			fails()
			b.processInbox()
			require.Equal(t, 1, b.countEntries())
			// The job's entry is open, so the further failure is added to it. The failure is still known after the entry
			// closes.
			b.retry(id)
			fails()
			b.processInbox()
			require.Equal(t, 1, b.countEntries())
			require.Equal(t, 2, b.countFailures())
			b.discardOpen()
			require.Zero(t, b.fileMissed())
			// A newer failure makes a new entry, because the old entry is closed.
			b.retry(id)
			fails()
			b.processInbox()
			require.Equal(t, 2, b.countEntries())
			b.discardOpen()
			require.Zero(t, b.fileMissed())
		})
	}
}

// The retry and the failure after it are facts that are not applied yet. The scans leave the failure to its fact.
func TestKnownFailures_IncludeUnappliedFacts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.createFailed(justNow)
	b.discardOpen()
	b.retry(id)
	b.failAt(id, justNow)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.job_facts"))
	require.Zero(t, b.scan(b.pool, false))
	require.Zero(t, b.scan(b.pool, true))
	require.Zero(t, b.count("SELECT dlq.backfill()"))
	b.processInbox()
	require.Equal(t, 1, b.countEntries())
	require.Equal(t, 2, b.countFailures())
	b.discardOpen()
	require.Zero(t, b.fileMissed())

	// A fact that was refused still waits.
	b.retry(id)
	b.failAt(id, justNow)
	b.exec("UPDATE dlq.job_facts SET fact = 'refused', job = coalesce(job, '{}') || jsonb_build_object('fact', fact, " +
		"'refusal', 'x', 'refusedAt', now() - interval '1 hour')")
	require.Zero(t, b.scan(b.pool, true))
	for range 2 {
		b.exec("SELECT dlq.apply_facts(p_careful => true)")
	}
	require.Equal(t, 3, b.countFailures())
	b.discardOpen()
	require.Zero(t, b.fileMissed())

	// The entry is closed after the first fact and before the second. No entry has the failure, so it is filed once.
	b.retry(id)
	b.failAt(id, justNow)
	b.exec("SELECT dlq.apply_facts(1)")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'done-twice'"))
	b.discardOpen()
	b.processInbox()
	require.Zero(t, b.fileMissed())
	require.Equal(t, 2, b.countEntries())
	require.Equal(t, 4, b.countFailures())
	b.discardOpen()
	require.Zero(t, b.fileMissed())
}

// The failure is a fact that is not applied yet. River has deleted the job, and the entry is purged. The failure makes
// a new entry with the data of the purged one.
func TestKnownFailures_CopyDataOfPurgedEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.createFailed(justNow)
	b.discardOpen()
	b.retry(id)
	b.failAt(id, justNow)
	b.exec("DELETE FROM river_job WHERE id = $1", id)
	b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	b.processInbox()
	require.Equal(t, 2, b.countFailures())
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE retry_count = 5 AND original_event = "+
		"'{\"n\": 1}'"))
}

// A job whose entry was deleted is retried and fails, and River deletes the job before dlqd applies the facts. The
// payload is then lost, so the failure becomes an archived entry. Its audit trail says that the payload is lost.
func TestKnownFailures_AreArchivedIfPayloadIsLost(t *testing.T) {
	t.Parallel()
	const all = "ARRAY(SELECT id FROM dlq.dead_letter_queue)"
	fails := func(b *testBundle, id int64) {
		b.retry(id)
		b.failAt(id, justNow)
	}
	for name, do := range map[string]func(b *testBundle, id int64){
		"purged": func(b *testBundle, id int64) {
			b.exec("SELECT dlq.delete_entries(" + all + ")")
			fails(b, id)
		},
		"purged while open": func(b *testBundle, id int64) {
			b.exec("SELECT dlq.reopen(id, 'kim') FROM dlq.dead_letter_queue")
			b.exec("SELECT dlq.act_on('purge', " + all + `, 'kim', NULL, '{"force": true}')`)
			fails(b, id)
		},
		"retention": func(b *testBundle, id int64) {
			b.dropMonths()
			fails(b, id)
		},
		"cancelled": func(b *testBundle, id int64) {
			b.exec("SELECT dlq.delete_entries(" + all + ")")
			fails(b, id)
			b.exec("UPDATE dlq.job_facts SET fact = 'cancelled', job = job || '{\"state\": \"cancelled\"}' " +
				"WHERE fact = 'discarded'")
		},
		"rejected for an hour": func(b *testBundle, id int64) {
			b.exec("SELECT dlq.delete_entries(" + all + ")")
			fails(b, id)
			b.exec(`UPDATE dlq.job_facts SET fact = 'refused', job = coalesce(job, '{}')
				|| jsonb_build_object('fact', fact, 'refusal', 'x', 'refusedAt', now() - interval '1 hour')`)
		},
		"record deleted by the reconciler": func(b *testBundle, id int64) {
			b.exec("SELECT dlq.delete_entries(" + all + ")")
			fails(b, id)
			b.exec("DELETE FROM river_job")
			b.exec("UPDATE dlq.retired_jobs SET at = now() - interval '2 days'")
			b.exec("SELECT dlq.forget_jobs()")
		},
		"deleted concurrently": func(b *testBundle, id int64) {
			tx, err := b.pool.Begin(b.Context())
			require.NoError(b, err)
			_, err = tx.Exec(b.Context(), "SELECT dlq.delete_entries("+all+")")
			require.NoError(b, err)
			fails(b, id)
			require.NoError(b, tx.Commit(b.Context()))
		},
	} {
		for how, follow := range map[string]bool{"": false, ", followed job": true} {
			t.Run(name+how, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				id := b.createFailed(justNow)
				if follow {
					b.retry(id)
					b.processInbox()
					b.failAt(id, justNow)
					b.processInbox()
				}
				b.discardOpen()
				before := b.countFailures()
				do(b, id)
				b.exec("DELETE FROM river_job WHERE id = $1", id)
				for range 2 {
					b.exec("SELECT dlq.apply_facts(p_careful => true)")
				}
				b.processInbox()
				require.Equal(t, before+1, b.countFailures())
				require.Equal(t, 1, b.countEntries())
				require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'
					AND queue = 'default'
					AND kind = 'mail' AND error_message = 'timeout' AND original_event = '{"erased": true}'
					AND river_job_id = $1`, id))
				require.Zero(t, b.fileMissed())
				require.Equal(t, 1, b.countEntries())
			})
		}
	}
}

// Before dlqd applies the facts of a retry, an operator closes the entry and River deletes the job. The payload then
// comes from the entry.
func TestKnownFailures_TakePayloadFromClosedEntry(t *testing.T) {
	t.Parallel()
	for name, closes := range map[string]func(b *testBundle){
		"before the facts": (*testBundle).discardOpen,
		"between the facts": func(b *testBundle) {
			b.discardOpen()
			b.exec("UPDATE dlq.job_facts SET at = at + interval '1 minute'") // the retry was later
			require.Equal(b, 1, b.count("SELECT dlq.apply_facts(1)"))
			b.discardOpen()
		},
		"and purged": func(b *testBundle) {
			b.discardOpen()
			b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
		},
		"and purged while the fact is rejected": func(b *testBundle) {
			b.discardOpen()
			b.exec(`UPDATE dlq.job_facts SET fact = 'refused', job = coalesce(job, '{}')
				|| jsonb_build_object('fact', fact, 'refusal', 'x', 'refusedAt', now() - interval '1 hour')`)
			b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createFailed(justNow)
			b.retry(id)
			b.failAt(id, justNow)
			b.exec("DELETE FROM river_job")
			require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.job_facts"))
			closes(b)
			for range 2 {
				b.exec("SELECT dlq.apply_facts(p_careful => true)")
			}
			b.processInbox()
			require.Equal(t, 2, b.countFailures())
			require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE retry_count = 5
				AND original_event = '{"n": 1}'`))
		})
	}
}

// The failure of a redelivery belongs to the entry that was redelivered, and is deleted with it.
func TestKnownFailures_OfRedeliveryAreDeletedWithEntry(t *testing.T) {
	t.Parallel()
	const entry, jobs = "SELECT dlq.delete_entries(ARRAY(SELECT id " +
		"FROM dlq.dead_letter_queue))", "DELETE FROM river_job"
	for name, deletes := range map[string][]string{"before the jobs": {entry, jobs}, "after the jobs": {jobs, entry}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createFailed(justNow)
			b.exec("UPDATE river_job SET unique_key = NULL, unique_states = NULL")
			b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open), 'kim', 'replayed')")
			redelivery := int64(b.count("SELECT redelivery_job_id FROM dlq.dead_letter_open"))
			b.exec("UPDATE river_job SET unique_key = NULL, unique_states = NULL")
			b.retry(id)
			b.processInbox()
			b.exec("UPDATE river_job SET state = 'completed', finalized_at = clock_timestamp() WHERE id = $1", id)
			b.exec("UPDATE river_job SET state = 'running' WHERE id = $1", redelivery)
			b.processInbox()
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'"))
			b.failAt(redelivery, justNow)
			for _, sql := range deletes {
				b.exec(sql)
			}
			b.processInbox()
			require.Zero(t, b.countEntries())
		})
	}
}

// A failure whose fact is not applied yet is still counted after its entry was erased.
func TestKnownFailures_CountAfterErasure(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"discarded", "cancelled"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createFailed(justNow)
			b.retry(id)
			b.endIn(id, state, "kim@example.com")
			require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.job_facts"))
			b.exec(`CALL dlq.erase('{"kind": "mail"}', 'request 1')`)
			b.processInbox()
			require.Equal(t, 2, b.countFailures())
			require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue e WHERE e::text LIKE '%kim@%'"))
		})
	}
}

// An erased payload is never sent. Failures after the erasure become archived entries. So do earlier failures that are
// applied after the erasure.
func TestKnownFailures_ErasedPayloadIsNotSent(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"discarded", "cancelled"} {
		for name, deleted := range map[string]bool{"": false, ", deleted job": true} {
			t.Run(state+name, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				id := b.createFailed(justNow)
				b.retry(id)
				b.endIn(id, state, "timeout")
				b.exec(`CALL dlq.erase('{"kind": "mail"}', 'request 1')`)
				if deleted {
					b.exec("DELETE FROM river_job")
				}
				b.processInbox()
				require.Equal(t, 2, b.countFailures())
				require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.dead_letter_queue
					WHERE status = 'dlq_archived' AND original_event = '{"erased": true}'`))
				require.Zero(t, b.fileMissed())
				b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open), 'worker:1', 'automatic')")
				require.Zero(t, b.count("SELECT count(*) FROM river_job WHERE state = 'available'"))
			})
		}
	}
}

// A failure with an invalid finalized_at has the id of another failure, so its entry gets a new id. Without a payload,
// the entry is not sent.
func TestKnownFailures_InvalidTimeWithoutPayloadIsNotSent(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"infinity", "2100-01-01"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			at := "'" + at + "'::timestamptz"
			id := b.createFailed(at)
			b.discardOpen()
			b.failUncaptured(id, at)
			require.Equal(t, 1, b.fileMissed())
			b.discardOpen()
			b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue ORDER BY closed_at DESC " +
				"LIMIT 1))")
			b.retry(id)
			b.failAt(id, at)
			b.exec("DELETE FROM river_job")
			b.processInbox()
			require.Equal(t, 3, b.countFailures())
			require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue
				WHERE status = 'dlq_archived' AND retry_count = 6 AND original_event = '{"erased": true}'
				AND metadata = '{}'`))
			require.Equal(t, 2, b.countEntries())
			require.Zero(t, b.fileMissed())
		})
	}
}

// The failure of a followed job belongs to the entry. A fact, the sweep or the reconciler may find it first.
func TestKnownFailures_IncludeFollowedJobs(t *testing.T) {
	t.Parallel()
	for name, see := range map[string]func(b *testBundle){
		"fact":  func(*testBundle) {},
		"sweep": func(b *testBundle) { b.exec("DELETE FROM dlq.job_facts"); b.exec("SELECT dlq.sweep_redeliveries()") },
		"reconciler": func(b *testBundle) {
			b.exec("DELETE FROM dlq.job_facts")
			require.Zero(b, b.scan(b.pool, true))
			b.exec("SELECT dlq.sweep_redeliveries()")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createFailed(justNow)
			b.retry(id)
			b.processInbox()
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
			b.failAt(id, justNow)
			see(b)
			b.processInbox()
			require.Equal(t, 1, b.countEntries())
			require.Equal(t, 2, b.countFailures())
			b.discardOpen()
			require.Zero(t, b.fileMissed())
		})
	}
}

// If the same failure is in the inbox twice, it counts once, even if its entry was closed in between.
func TestKnownFailures_CountInboxDuplicateOnce(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"first failure": false, "further failure": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.insertJob()
			b.exec("CREATE TABLE inbox_copy AS SELECT * FROM dlq.dead_letter_inbox")
			b.failAt(id, justNow)
			if again {
				b.processInbox()
				b.exec("SELECT dlq.set_capture('off')")
				b.retry(id)
				b.exec("SELECT dlq.set_capture('on')")
				b.failAt(id, justNow)
			}
			b.exec("INSERT INTO inbox_copy SELECT * FROM dlq.dead_letter_inbox")
			b.exec("UPDATE inbox_copy SET captured_by = 'reconciler'")
			b.exec("INSERT INTO dlq.dead_letter_inbox SELECT * FROM inbox_copy")
			b.processInbox()
			require.Equal(t, 1, b.countEntries())
			failures := b.countFailures()
			b.discardOpen()
			b.exec("INSERT INTO dlq.dead_letter_inbox SELECT * FROM inbox_copy")
			b.processInbox()
			require.Equal(t, 1, b.countEntries())
			require.Equal(t, failures, b.countFailures())
			require.Zero(t, b.fileMissed())
		})
	}
}

// An entry that an operator closed is not sent, even if automatic redelivery is on.
func TestKnownFailures_ClosedEntryIsNotSent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createDiscardedTwice(justNow, justNow)
	require.Zero(t, b.fileMissed())
	b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_queue), 'worker:1', 'automatic')")
	require.Equal(t, 1, b.count("SELECT count(*) FROM river_job"))
}

// The upgrade to schema version 9 records the failures of existing entries. It has no time limit. Later scans add only
// failures that have changed since.
func TestKnownFailures_AreRecordedByUpgrade(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createDiscardedTwice(justNow, justNow)
	resetToOldVersion := func() {
		b.exec("DELETE FROM dlq.retired_jobs")
		b.exec(`INSERT INTO dlq.settings (key, value) VALUES ('remember_taken', 'upgrade') ON CONFLICT (key) DO UPDATE
			SET value = 'upgrade', updated_at = now()`)
	}
	resetToOldVersion()
	require.Zero(t, b.fileMissed(), "a scan before the upgrade's statement records the failures")
	require.Equal(t, 1, b.countEntries())

	resetToOldVersion()
	require.NoError(t, b.migrator().Up(t.Context()))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.retired_jobs"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.settings WHERE key = 'remember_taken' AND value <> 'upgrade'"))

	// A function of the old version was running during the upgrade and commits afterwards.
	b.exec("DELETE FROM dlq.retired_jobs")
	require.Zero(t, b.fileMissed())
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.retired_jobs"))

	// Entries that have not changed since are not compared with River's jobs again.
	b.exec("DELETE FROM dlq.retired_jobs")
	b.exec("UPDATE dlq.dead_letter_queue SET updated_at = now() - interval '2 hours'")
	b.exec("SELECT dlq.remember_taken()")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.retired_jobs"))

	resetToOldVersion()
	b.exec("UPDATE dlq.settings SET updated_at = now() - interval '11 minutes' WHERE key = 'remember_taken'")
	require.Zero(t, b.fileMissed())
	require.Zero(t, b.count("SELECT count(*) FROM dlq.settings WHERE key = 'remember_taken'"))
}

// Two other queries must agree: the survey of failures without a dead letter, and the check whether the next message of
// an ordering key has to wait.
func TestKnownFailures_AgreeWithSurveyAndOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	requireCounts := func(missed, unresolved int) {
		t.Helper()
		s, err := doctor.TakeSurvey(t.Context(), b.pool, postgres.DefaultSchemas())
		require.NoError(t, err)
		require.Equal(t, missed, s.Failures.Count)
		require.Equal(t, unresolved, b.count("SELECT count(*) FROM river_job j WHERE dlq.is_undone(j.id, j.created_at)"))
	}
	id := b.createDiscardedTwice(justNow, justNow)
	requireCounts(0, 0)
	// The failure is first a fact that is not applied yet, and then part of the entry. Then the entry is closed.
	b.retry(id)
	b.failAt(id, justNow)
	requireCounts(0, 1)
	b.processInbox()
	requireCounts(0, 1)
	b.discardOpen()
	requireCounts(0, 0)
	// Capture misses the failure. Then the reconciler files it. Then its entry is closed.
	b.failUncaptured(id, justNow)
	requireCounts(1, 1)
	require.Equal(t, 1, b.fileMissed())
	requireCounts(0, 1)
	b.discardOpen()
	requireCounts(0, 0)
	b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	requireCounts(0, 0)
}

// Failures from before a detach are still known after an attach. A failure between detach and attach is filed once.
func TestKnownFailures_SurviveDetachAndAttach(t *testing.T) {
	t.Parallel()
	b := setup(t)
	m := &postgres.Migrator{Pool: b.pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	again := func(meanwhile func()) {
		t.Helper()
		found, err := m.Find(t.Context(), true, true)
		require.NoError(t, err)
		_, err = m.Detach(t.Context(), *found, false)
		require.NoError(t, err)
		meanwhile()
		require.NoError(t, m.Attach(t.Context()))
	}
	id := b.createDiscardedTwice(justNow, justNow)
	again(func() {})
	require.Zero(t, b.fileMissed())
	again(func() {
		b.retry(id)
		b.failAt(id, justNow)
	})
	require.Equal(t, 1, b.fileMissed())
	require.Equal(t, 2, b.countEntries())
	b.discardOpen()
	require.Zero(t, b.fileMissed())
}

// The fact of a retry may be applied long after the retry has failed. Meanwhile the reconciler has filed that failure,
// which capture skipped; a redelivery has failed, too; and an operator has parked the entry.
func TestKnownFailures_CountLateRetryOnce(t *testing.T) {
	t.Parallel()
	for name, own := range map[string]bool{"included failure": false, "first failure": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			id := b.createFailed(justNow)
			if own {
				b.discardOpen()
			}
			b.retry(id) // its fact is not applied yet
			b.exec("SELECT dlq.set_capture('off')")
			b.failAt(id, justNow)
			require.Equal(t, 1, b.scan(b.pool, true))
			b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
			b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open), 'worker:1', 'automatic')")
			b.failAt(int64(b.count("SELECT redelivery_job_id FROM dlq.dead_letter_open")), justNow)
			b.exec("SELECT dlq.sweep_redeliveries()")
			b.exec("SELECT dlq.set_capture('on')")
			require.Equal(t, 3, b.countFailures())
			b.exec("SELECT dlq.park(id, 'kim') FROM dlq.dead_letter_open")

			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.job_facts WHERE fact = 'retried'"))
			b.processInbox()
			require.Equal(t, 3, b.countFailures())
			require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open
				WHERE status = 'dlq_manual' AND dlq_retry_count = 1`))
			require.Zero(t, b.fileMissed())
		})
	}
}

// A restore returns a followed job to its state before the retry: failed, with a failure that the entry already has.
func TestKnownFailures_CountRestoredFailureOnce(t *testing.T) {
	t.Parallel()
	for name, own := range map[string]bool{"original job": true, "redelivery": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			restore := func() {
				b.execWithoutTriggers("DELETE FROM river_job")
				b.execWithoutTriggers("INSERT INTO river_job SELECT * FROM backup")
			}
			redeliver := func() (id int64) {
				b.exec("SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_open), 'worker:1', 'automatic')")
				id = int64(b.count("SELECT redelivery_job_id FROM dlq.dead_letter_open"))
				b.failAt(id, justNow)
				return id
			}
			id := b.createFailed(justNow)
			redelivery := redeliver()
			b.exec("CREATE TABLE backup AS SELECT * FROM river_job")
			b.processInbox()
			redeliver()
			b.processInbox()
			require.Equal(t, 3, b.countFailures())
			restore()
			if !own {
				id = redelivery
			}
			b.retry(id)
			b.processInbox()
			require.Equal(t, int(id), b.count("SELECT redelivery_job_id FROM dlq.dead_letter_open"))
			const last = "SELECT extract(epoch FROM last_failed_at) * 1000000 FROM dlq.dead_letter_open"
			failed := b.count(last)
			restore()
			b.exec("SELECT dlq.sweep_redeliveries()")
			require.Equal(t, 3, b.countFailures())
			require.Equal(t, failed, b.count(last))
			require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open
				WHERE status = 'dlq_pending' AND strategy IS NULL`))
			require.Zero(t, b.fileMissed())
		})
	}
}
