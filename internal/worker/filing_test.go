package worker_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/worker"
)

func (b *bundle) file() {
	b.Helper()
	for {
		more, err := b.worker.File(b.Context())
		require.NoError(b, err)
		if !more {
			return
		}
	}
}

// One audit row records the failure and the decision; analytics count both.
func TestFile_RecordsFailureAndDecisionInOneRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var parked []worker.Parked
	b.worker = worker.New(worker.Config{
		Store: b.store, Planner: builtIn, Logger: slog.New(slog.DiscardHandler), Name: "test",
		BatchSize: 2, Parked: func(p []worker.Parked) { parked = append(parked, p...) },
	})
	b.fail(2, "connection refused")
	b.fail(2, "connection refused")
	b.fail(2, "card was declined")
	b.exec("INSERT INTO dlq.dead_letter_inbox SELECT * FROM dlq.dead_letter_inbox") // each failure twice
	b.file()
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Equal(t, 3, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions t
		JOIN dlq.dead_letter_open e ON e.id = t.entry_id
		WHERE t.from_status IS NULL AND t.to_status = e.status AND t.actor = 'worker:test' AND t.strategy = e.strategy
			AND t.rule = e.rule AND t.error_class = e.error_class
			AND t.joined_group = e.fingerprint AND t.config_version = e.config_version AND t.failed_at = e.last_failed_at
			AND t.next_retry_at IS NOT DISTINCT FROM e.next_retry_at
			AND t.attempts = 1 AND t.origin IS NULL AND t.reason LIKE 'job ' || e.river_job_id || ' failed: %'
			AND e.filed_at IS NOT NULL AND e.move IS NULL`))
	require.Len(t, parked, 1)
	require.Equal(t, "card was declined", b.one(`SELECT error_message FROM dlq.dead_letter_open WHERE id = $1
		AND status = 'dlq_manual' AND parked_by IS NULL`, parked[0].ID))
	b.exec(postgrestest.RefreshRollups)
	rolled := func() []string {
		return []string{
			b.one(`SELECT captured || ' ' || failures || ' ' || parked || ' ' || open_change FROM dlq.rollup_flow
				WHERE step = 'day' AND scope = 'all'`),
			b.one("SELECT sum(pending) || ' ' || sum(manual) FROM dlq.rollup_backlog"),
			b.one("SELECT string_agg(failures || ' ' || open, ', ' ORDER BY failures) FROM dlq.failure_groups"),
		}
	}
	want := []string{"3 3 1 3", "2 1", "1 1, 2 2"}
	require.Equal(t, want, rolled())
	b.exec("SELECT dlq.rebuild_rollups()")
	require.Equal(t, want, rolled())
}

// A further failure of a locked entry stays in the inbox. It is not reported as parked on each
// scan, twenty times a second.
func TestFile_FurtherFailureOfLockedEntryStaysInInbox(t *testing.T) {
	t.Parallel()
	b := setup(t)
	parked, observed := 0, map[string]int{}
	b.worker = worker.New(worker.Config{
		Store: b.store, Planner: builtIn, Logger: slog.New(slog.DiscardHandler),
		Name: "test", Parked: func(p []worker.Parked) { parked += len(p) },
		Observe: func(action string, n int, _ time.Duration) { observed[action] += n },
	})
	b.fail(2, "card was declined")
	b.file()
	require.Equal(t, 1, parked)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM dlq.dead_letter_queue FOR UPDATE")
	require.NoError(t, err)
	b.exec("SELECT dlq.set_capture('off')")
	b.exec("UPDATE river_job SET state = 'available', finalized_at = NULL")
	b.exec("SELECT dlq.set_capture('on')")
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	b.file()
	b.file()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Equal(t, 1, parked)
	require.NoError(t, tx.Rollback(t.Context()))
	b.file()
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Equal(t, 1, parked)
	require.Equal(t, map[string]int{"filed": 1, "parked": 1, "repeated": 1}, observed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason LIKE '%failed again'"))
}

func (b *bundle) one(sql string, args ...any) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&text), sql)
	return text
}

// A rejected entry does not block the others. It is filed as manual without the decision; if that
// is rejected too, it stays in the inbox.
func TestFile_RefusedEntryDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 5 {
		b.exec(`INSERT INTO river_job (kind, args, max_attempts) VALUES (CASE $1::int WHEN 1 THEN 'undecidable'
			WHEN 3 THEN 'poison' ELSE 'k' END, '{}', 3)`, i)
	}
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "timeout"}'::jsonb]`)
	b.exec(`ALTER TABLE dlq.dead_letter_open ADD CONSTRAINT no_poison CHECK (kind <> 'poison' AND NOT (kind = 'undecidable' AND strategy = 'immediate'))`)
	b.file()
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'immediate'"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE kind = 'undecidable'
		AND status = 'dlq_manual' AND parked_by = 'worker:test'`))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE '%the database refused the worker''s decision on it' AND detail ->> 'refusal' LIKE '%no_poison%'`))
	// The database's error may contain personal data.
	b.exec(`SELECT dlq.erase_entries(ARRAY(SELECT entry_id FROM dlq.dead_letter_transitions WHERE detail ? 'refusal'),
		'kim', 'request 9')`)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_transitions t WHERE t::text LIKE '%no_poison%'"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_inbox WHERE kind = 'poison'"))
	b.fail(2, "timeout")
	b.file()
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'immediate'"),
		"the refused entry does not block a new one")
}

// The loop also files older failures: jobs' transactions do not commit in the order of the
// failures.
func TestFile_LoopFindsOlderFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	filed := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL") == n
		}, 5*time.Minute, 5*time.Millisecond)
	}
	run(t, b.worker)
	b.fail(2, "timeout")
	filed(1)
	b.exec(`INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 3)`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() - interval '1 day',
		errors = ARRAY['{"error": "timeout"}'::jsonb] WHERE state = 'available'`)
	filed(2)
}

// Workers and operators act on the same entries concurrently: each entry is filed once.
func TestFile_ConcurrentWithOperators(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 200
	b.exec(`INSERT INTO river_job (kind, args, max_attempts) SELECT 'k', '{}', 3 FROM generate_series(1, $1)`, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "timeout"}'::jsonb]`)
	list, err := b.store.List(t.Context(), deadletter.Page{Limit: n})
	require.NoError(t, err)
	var all sync.WaitGroup
	for part := range 2 {
		all.Go(func() {
			for more := true; more; {
				var err error
				if more, err = b.worker.File(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() {
			for i := part; i < n; i += 2 {
				if err := b.store.Park(context.WithoutCancel(t.Context()), list[i].ID, deadletter.Act{Actor: "kim"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Equal(t, n, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND parked_by = 'kim'`))
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE from_status IS NULL"))
	require.Equal(t, 2*n, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
}
