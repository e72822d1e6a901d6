package deadletter_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// createUnfiled makes a job fail and returns the id of its entry, which is in the inbox.
func (b *bundle) createUnfiled() uuid.UUID {
	b.Helper()
	id := b.insert(nil)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY['{"attempt": 1, "error": "no money"}'::jsonb],
		metadata = '{"dlq:error": {"attempt": 1, "type": "CardDeclined", "class": "business"}}' WHERE id = $1`, id)
	var entry uuid.UUID
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT id FROM dlq.dead_letter_inbox WHERE river_job_id = $1",
		id).Scan(&entry))
	return entry
}

// A failure in the inbox is visible in the table, in lists and in counts from the commit of the job's end on.
func TestUnfiled_IsListedAndCounted(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createUnfiled()
	list, err := b.store.List(t.Context(),
		deadletter.Page{Filter: filter.Filter{Status: []string{"dlq_pending"}, Queue: []string{"default"}}, Limit: 10})
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, id, list[0].ID)
	require.Equal(t, "no money", *list[0].ErrorMessage)
	require.Nil(t, list[0].ErrorClass)
	entry, trail, err := b.store.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Empty(t, trail)
	backlog, err := b.store.Backlog(t.Context())
	require.NoError(t, err)
	require.Equal(t, []deadletter.Backlog{{Status: "dlq_pending", Queue: "default", ErrorClass: "undecided", Entries: 1}},
		backlog)
	require.Equal(t, 1, b.count("SELECT entries FROM dlq.backlog WHERE error_class IS NULL AND NOT more"))
	chosen, err := b.store.Preview(t.Context(), json.RawMessage(`{"queue": "default"}`))
	require.NoError(t, err)
	require.Len(t, chosen, 1)
	oldest, err := b.store.OldestOpen(t.Context())
	require.NoError(t, err)
	require.NotNil(t, oldest)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.find('{\"payload\": {\"value\": \"x\"}}')"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.oldest_entries()"))
	for _, f := range []filter.Filter{
		{Status: []string{"dlq_manual"}},
		{ErrorClass: []string{"business"}},
		{Queue: []string{"other"}},
	} {
		list, err = b.store.List(t.Context(), deadletter.Page{Filter: f, Limit: 10})
		require.NoError(t, err)
		require.Empty(t, list)
	}
}

// The inbox is counted up to 10,000.
func TestUnfiled_IsCountedUpToLimit(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.exec("SELECT dlq.set_capture('strict')")
	b.exec(`INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'k', '{}', 1, 'running'
		FROM generate_series(1, 10001)`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	backlog, err := b.store.Backlog(t.Context())
	require.NoError(t, err)
	require.Equal(t, []deadletter.Backlog{{
		Status: "dlq_pending", Queue: "default", ErrorClass: "undecided",
		Entries: 10_000, More: true,
	}}, backlog)
}

// Every action on an unfiled entry files the entry first, so that the entry's audit trail begins with the failure.
func TestUnfiled_IsFiledByEveryAction(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		sql    string
		status deadletter.Status
		moves  int
	}{
		"replay":  {"SELECT dlq.replay($1)", deadletter.Processing, 2},
		"edit":    {"SELECT dlq.replay($1, p_payload => '{\"value\": \"y\"}')", deadletter.Processing, 2},
		"discard": {"SELECT dlq.discard($1)", deadletter.Archived, 2},
		"park":    {"SELECT dlq.park($1)", deadletter.Manual, 2},
		"note":    {"SELECT dlq.note($1, 'seen')", deadletter.Pending, 2},
		"assign":  {"SELECT dlq.assign($1, 'kim')", deadletter.Pending, 2},
		"tag": {
			"SELECT dlq.act_on('tag', ARRAY[$1::uuid], 'kim', NULL, '{\"tags\": [\"bank\"]}')",
			deadletter.Pending, 2,
		},
		"many": {
			"SELECT dlq.act_where('park', jsonb_build_object('ids', ARRAY[$1::uuid]))",
			deadletter.Manual, 2,
		},
		"erase":  {"SELECT dlq.erase_entries(ARRAY[$1::uuid], 'kim', 'request 7')", deadletter.Archived, 3},
		"file":   {"SELECT dlq.file(ARRAY[$1::uuid])", deadletter.Pending, 1},
		"update": {"UPDATE dlq.dead_letter_queue SET notes = 'x' WHERE id = $1", deadletter.Pending, 1},
		"update and close": {
			"UPDATE dlq.dead_letter_queue SET status = 'dlq_archived' WHERE id = $1",
			deadletter.Archived, 2,
		},
		"update error type": {
			"UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', error_type = 'Custom' WHERE id = $1",
			deadletter.Manual, 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, succeed)
			id := b.createUnfiled()
			b.exec(test.sql, id)
			require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
			require.Equal(t, 1, b.count(
				"SELECT count(*) FROM dlq.dead_letter_queue WHERE move IS NULL AND filed_at IS NOT NULL"))
			entry, trail, err := b.store.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, test.status, entry.Status)
			require.Equal(t, "business", *entry.ErrorClass)
			require.Equal(t, map[bool]string{true: "Custom", false: "CardDeclined"}[name == "update error type"],
				*entry.ErrorType)
			require.Len(t, trail, test.moves)
			require.Nil(t, trail[0].FromStatus)
			require.Equal(t, "capture", trail[0].Actor)
			require.Equal(t, fmt.Sprintf("job %d failed", entry.RiverJobID), *trail[0].Reason)
			require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions t
				JOIN dlq.dead_letter_queue e ON t.failed_at = e.last_failed_at WHERE t.from_status IS NULL
					AND t.error_type = 'CardDeclined'`))
		})
	}
}

// An action on an entry that another session is filing waits for that session. It then acts on the filed entry.
func TestFile_WaitsForConcurrentFiling(t *testing.T) {
	t.Parallel()
	for name, file := range map[string]string{
		"worker":      "SELECT dlq.file_as(ARRAY[$1::uuid])",
		"operator":    "SELECT dlq.park($1, 'ann')",
		"rolled back": "SELECT dlq.file_as(ARRAY[$1::uuid]), 1/0",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, succeed)
			id := b.createUnfiled()
			tx, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			_, err = tx.Exec(t.Context(), "SELECT FROM dlq.dead_letter_inbox WHERE id = $1 FOR UPDATE", id)
			require.NoError(t, err)
			discarded := make(chan error, 1)
			go func() { discarded <- b.store.Discard(t.Context(), id, kim) }()
			require.Eventually(t, func() bool {
				return b.count(`SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
					WHERE a.datname = current_database() AND NOT l.granted`) > 0
			}, 5*time.Minute, 5*time.Millisecond)
			_, err = tx.Exec(t.Context(), file, id)
			if name == "rolled back" {
				require.Error(t, err)
				require.NoError(t, tx.Rollback(t.Context()))
			} else {
				require.NoError(t, err)
				require.NoError(t, tx.Commit(t.Context()))
			}
			require.NoError(t, <-discarded)
			entry, trail, err := b.store.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, deadletter.Archived, entry.Status)
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE from_status IS NULL"))
			require.Equal(t, deadletter.Archived, trail[len(trail)-1].ToStatus)
		})
	}
}

func TestFile_WorksInRepeatableRead(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createUnfiled()
	act := func(before func()) error {
		return pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
			var n int
			require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM dlq.dead_letter_queue").Scan(&n))
			before()
			_, err := tx.Exec(t.Context(), "SELECT dlq.park($1)", id)
			return err
		})
	}
	require.ErrorContains(t, act(func() { b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id) }), "40001",
		"the snapshot is older than the filing: the caller must retry")
	require.NoError(t, act(func() {}))
	id = b.createUnfiled()
	require.NoError(t, act(func() {}))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))
}

// A failure has one id. If an open entry has that id, filing the failure only removes it from the inbox, even if the
// job's created_at has changed since.
func TestFile_RemovesFailureThatIsOpen(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createUnfiled()
	b.exec("CREATE TABLE again AS SELECT * FROM dlq.dead_letter_inbox")
	require.Equal(t, 1, b.count("SELECT dlq.file(ARRAY[$1::uuid])", id))
	b.exec("UPDATE again SET job_created_at = job_created_at + interval '1 hour'")
	b.exec("INSERT INTO dlq.dead_letter_inbox SELECT * FROM again")
	require.Equal(t, 1, b.count("SELECT dlq.file(ARRAY[$1::uuid])", id))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
}

// A failure that is in the inbox twice is filed only once.
func TestFile_FilesDuplicateOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createUnfiled()
	b.exec("INSERT INTO dlq.dead_letter_inbox SELECT * FROM dlq.dead_letter_inbox")
	b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
}

// If a job fails again before its first failure is filed, it gets one entry with both failures.
func TestFile_AddsFurtherFailuresToEntry(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	job := b.insert(nil)
	fail := func(message string) {
		b.exec("UPDATE river_job SET state = 'running', finalized_at = NULL WHERE id = $1", job)
		b.exec("DELETE FROM dlq.job_facts") // the retry was not recorded
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), attempt = 1,
			errors = ARRAY[jsonb_build_object('attempt', 1, 'error', $2::text)] WHERE id = $1`, job, message)
	}
	failures := "SELECT count(*) FROM dlq.dead_letter_transitions WHERE error_type IS NOT NULL"
	fail("first")
	fail("second")
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	entry, trail := b.entry()
	require.Equal(t, "second", *entry.ErrorMessage)
	require.Len(t, trail, 2)
	require.Contains(t, *trail[1].Reason, "failed again")
	require.Equal(t, 2, b.count(failures))

	// The job of an open entry fails again. Until that failure is filed, it is not in lists and counts, and an UPDATE
	// does not change it.
	fail("third")
	backlog, err := b.store.Backlog(t.Context())
	require.NoError(t, err)
	require.Equal(t, []deadletter.Backlog{{Status: "dlq_pending", Queue: "default", ErrorClass: "undecided", Entries: 1}},
		backlog)
	list, err := b.store.List(t.Context(), deadletter.Page{Limit: 10})
	require.NoError(t, err)
	require.Len(t, list, 1)
	b.exec("UPDATE dlq.dead_letter_queue SET notes = 'x'")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.NoError(t, b.store.Park(t.Context(), entry.ID, kim))
	entry, trail = b.entry()
	require.Equal(t, deadletter.Manual, entry.Status, "a manual entry stays manual")
	require.Equal(t, "third", *entry.ErrorMessage)
	require.Len(t, trail, 4)

	// The reconciler may record the same failure again.
	b.exec(`INSERT INTO dlq.dead_letter_inbox (id, river_job_id, job_created_at, queue, kind, job_kind, priority,
		original_event, first_failed_at, last_failed_at)
		SELECT dlq.uuid_v7(), river_job_id, job_created_at, queue, kind, job_kind, priority, original_event, first_failed_at,
			last_failed_at FROM dlq.dead_letter_open`)
	_, trail = b.entry()
	require.Len(t, trail, 4)

	// If the entry waits for the job that failed, the failure ends the redelivery.
	b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = river_job_id, locked_by " +
		"= 'kim'")
	fail("fourth")
	entry, _ = b.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, "fourth", *entry.ErrorMessage)
	require.Zero(t, b.count("SELECT (SELECT count(*) FROM dlq.dead_letter_inbox) + (SELECT count(*) FROM dlq.job_facts)"))
	require.Equal(t, 4, b.count(failures))
}

// If a redelivery has lost its marker, its failure is recorded in the inbox. Filing the failure ends the redelivery of
// the entry, and makes no new entry.
func TestFile_EndsRedeliveryThatLostItsMarker(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createUnfiled()
	job, err := b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	// An application overwrites the metadata.
	b.exec("UPDATE river_job SET state = 'running', attempt = 1, metadata = '{}' WHERE id = $1", job)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
		errors = ARRAY['{"attempt": 1, "error": "no money again"}'::jsonb] WHERE id = $1`, job)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_inbox WHERE river_job_id = $1", job))
	entry, _ := b.entry() // the only one
	require.Equal(t, id, entry.ID)
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, "no money again", *entry.ErrorMessage)
	require.EqualValues(t, 1, entry.DLQRetryCount)
	require.Zero(t, b.count("SELECT (SELECT count(*) FROM dlq.dead_letter_inbox) + (SELECT count(*) FROM dlq.job_facts)"))
}

// With more than 20,000 entries, the backlog is read from the rollups and not counted at each call.
func TestBacklog_ReadsRollupsIfLarge(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.exec("SELECT dlq.set_capture('strict')")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', 'orders', 1, 'running'
		FROM generate_series(1, 20001)`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	b.exec("SELECT dlq.rebuild_rollups()")
	b.exec("UPDATE dlq.rollup_state SET at = now() + interval '30 minutes'") // fresh even on a slow machine
	counts := func(entries int64) {
		t.Helper()
		backlog, err := b.store.Backlog(t.Context())
		require.NoError(t, err)
		require.Equal(t, []deadletter.Backlog{{
			Status: "dlq_pending", Queue: "orders", ErrorClass: "undecided",
			Entries: entries,
		}}, backlog)
	}
	counts(20_001)
	discard := "SELECT dlq.discard((SELECT id FROM dlq.dead_letter_open LIMIT 1), 'kim')"
	b.exec(discard)
	counts(20_001)
	b.exec(postgrestest.RefreshRollups)
	counts(20_000)
	b.exec(discard)
	counts(19_999)

	// Rollups of any age are read if no entry has moved since they were refreshed.
	b.exec("UPDATE dlq.rollup_backlog SET pending = 30000")
	b.exec("UPDATE dlq.rollup_state SET at = now() - interval '1 hour'")
	counts(19_999)
	b.exec(postgrestest.RefreshRollups)
	b.exec("UPDATE dlq.rollup_state SET at = now() - interval '1 hour'")
	counts(29_999)
}
