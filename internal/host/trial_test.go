package host_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// TestHost_SurvivesRandomFaults runs the application while random faults happen: capture is switched, tables are
// locked, River's table is restored, entries are purged. Afterwards there is exactly one dead letter for each failure.
// DLQD_TRIAL is the duration ("10m"; default 5 s). DLQD_TRIAL_SEED repeats the choices of an earlier run, but not its
// timing.
func TestHost_SurvivesRandomFaults(t *testing.T) {
	t.Parallel()
	length := 5 * time.Second
	if set, err := time.ParseDuration(os.Getenv("DLQD_TRIAL")); err == nil {
		length = set
	}
	seed := rand.Uint64()
	if set, err := strconv.ParseUint(os.Getenv("DLQD_TRIAL_SEED"), 10, 64); err == nil {
		seed = set
	}
	t.Logf("DLQD_TRIAL_SEED=%d", seed)
	h := newHostWithRoles(t)
	// The table failures records all failures, because jobs are retried, restored and purged. The column captured says
	// whether capture recorded the failure; such a failure ends up in an entry, even if the job is deleted.
	h.exec(h.admin, `CREATE TABLE failures (job_id bigint, job_created_at timestamptz, at timestamptz, attempt integer,
		captured boolean);
		CREATE FUNCTION record_failure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
			IF dlq.is_failure(to_jsonb(NEW), to_jsonb(OLD)) THEN -- (the error of a redelivery is in its entry's replay_attempts, or a note)
				INSERT INTO public.failures VALUES (NEW.id, NEW.created_at, NEW.finalized_at, NEW.attempt,
					NOT EXISTS (SELECT FROM dlq.entry_jobs k JOIN dlq.dead_letter_queue e ON e.id = k.entry_id WHERE k.job_id = NEW.id
						AND k.job_created_at = NEW.created_at AND e.river_job_id <> NEW.id)
					AND (EXISTS (SELECT FROM dlq.dead_letter_inbox i WHERE i.id = dlq.entry_id(NEW.id, NEW.finalized_at))
					     OR EXISTS (SELECT FROM dlq.job_facts f WHERE f.job_id = NEW.id
					     AND dlq.failure_of(f.job_id, f.job) = dlq.entry_id(NEW.id, NEW.finalized_at))));
			END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER record_failure AFTER UPDATE OF state ON river_job FOR EACH ROW EXECUTE FUNCTION record_failure();
		ALTER TABLE river_job ENABLE ALWAYS TRIGGER record_failure`)
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var all sync.WaitGroup
	actor := func(n uint64, run func(random *rand.Rand)) {
		random := rand.New(rand.NewPCG(seed, n))
		all.Go(func() {
			for ctx.Err() == nil && !t.Failed() {
				run(random)
			}
		})
	}

	// The application's statements must not fail. The mutex separates them from a restore, which locks River's own table.
	// Without dlqd, too, statements would wait for that lock.
	var restoring sync.RWMutex
	for n := range uint64(3) {
		conn, err := pgx.Connect(t.Context(), h.App)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		must := func(sql string, args ...any) {
			if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
				t.Errorf("%s: %v", sql, err)
			}
		}
		prepared := 0
		actor(n, func(random *rand.Rand) {
			restoring.RLock()
			defer restoring.RUnlock()
			kind := fmt.Sprintf("app%d", n)
			must("INSERT INTO river_job (kind, args, max_attempts, state, metadata) SELECT $1, '{}', 3, 'running', CASE WHEN "+
				"i % 5 = 0 THEN '{\"dlq:entry_id\": \"0198aaaa-0000-7000-8000-000000000000\"}' ELSE '{}' END::jsonb FROM "+
				"generate_series(1, $2::integer) i", kind, 1+random.IntN(20))
			end := `UPDATE river_job SET state = CASE (id + attempt) % 4 WHEN 0 THEN 'completed' WHEN 1 THEN 'cancelled'
				ELSE 'discarded' END::river_job_state, finalized_at = clock_timestamp(), attempt = attempt + 1,
					errors = errors || jsonb_build_object('error', 'x', 'at', clock_timestamp(), 'attempt', attempt + 1)
						WHERE kind = $1 AND state IN ('running', 'available')`
			must("BEGIN")
			switch random.IntN(8) {
			case 0:
				must("SAVEPOINT s")
				must(end, kind)
				must("ROLLBACK TO s")
				must(end, kind)
				must("COMMIT")
			case 1:
				prepared++
				must(end, kind)
				id := fmt.Sprintf("'%s_%d_%d'", h.DLQDRole, n, prepared)
				must("PREPARE TRANSACTION " + id)
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
				must("COMMIT PREPARED " + id)
			case 2:
				must(end, kind)
				must("ROLLBACK")
			case 3: // as River UI does: JobRetry and JobDelete
				must("COMMIT")
				must(`UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now(),
					metadata = metadata - 'cancel_attempted_at',
						max_attempts = CASE WHEN attempt = max_attempts THEN max_attempts + 1 ELSE max_attempts END
					WHERE id IN (SELECT id FROM river_job WHERE kind = $1 AND state IN ('discarded', 'cancelled')
					ORDER BY random() LIMIT 8 FOR UPDATE SKIP LOCKED)`, kind)
				if random.IntN(4) == 0 {
					must(`DELETE FROM river_job WHERE id IN (SELECT id FROM river_job WHERE kind = $1 AND state <> 'running'
						ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED)`, kind)
				}
			default:
				must(end, kind)
				must("COMMIT")
			}
		})
	}

	// The actors of dlqd, and operators.
	try := func(pool *pgxpool.Pool, sql string) { // may fail by a lock, a forbidden move or a concurrent change
		if _, err := pool.Exec(t.Context(), sql); err != nil && os.Getenv("DLQD_TRIAL_VERBOSE") != "" {
			t.Logf("%s: %v", sql, err)
		}
	}
	actor(100, func(*rand.Rand) {
		try(h.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox LIMIT 500))")
	})
	actor(101, func(*rand.Rand) { try(h.dlqd, "SELECT dlq.apply_facts()") })
	actor(102, func(random *rand.Rand) {
		try(h.dlqd, fmt.Sprintf("SELECT dlq.reconcile(p_whole => %t)", random.IntN(5) == 0))
		time.Sleep(50 * time.Millisecond)
	})
	// Eight operators, and the worker's automatic redelivery. Each acts on any entry, so that their actions collide.
	choose := func(statuses string, n int) string {
		return fmt.Sprintf(`ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage <> 'inbox' AND status IN (%s)
			ORDER BY random() LIMIT %d)`, statuses, n)
	}
	const open, closed = "'dlq_pending', 'dlq_manual'", "'dlq_resolved', 'dlq_archived'"
	one := func(function, statuses, args string) string {
		return "SELECT dlq." + function + "((" + choose(statuses, 1) + ")[1]" + args + ")"
	}
	for n, act := range []func(*rand.Rand) string{
		func(*rand.Rand) string { return "SELECT dlq.act_on('discard', " + choose(open, 5) + ", 'ann')" },
		func(*rand.Rand) string {
			return "SELECT dlq.act_on('resolve', " + choose("'dlq_manual'", 5) + ", 'bea')"
		},
		func(*rand.Rand) string { return "SELECT dlq.act_on('reopen', " + choose(closed, 3) + ", 'cem')" },
		func(random *rand.Rand) string {
			if random.IntN(2) == 0 {
				return one("replay", open, ", 'dan'")
			}
			return one("replay", open, `, 'dan', NULL, '{"edited": true}'`)
		},
		func(*rand.Rand) string {
			return `SELECT dlq.undo((SELECT id FROM dlq.operations WHERE action IN ('discard', 'resolve', 'park', 'unpark')
				ORDER BY id DESC LIMIT 1 OFFSET floor(random() * 5)), 'eve')`
		},
		func(random *rand.Rand) string {
			if random.IntN(2) == 0 {
				return "SELECT dlq.act_on('park', " + choose("'dlq_pending'", 5) + ", 'fay')"
			}
			return "SELECT dlq.act_on('unpark', " + choose("'dlq_manual'", 5) + ", 'fay')"
		},
		func(*rand.Rand) string {
			return "SELECT dlq.delete_entries(" + choose(closed, 3) + ", p_actor => 'gil')"
		},
		func(random *rand.Rand) string {
			return [...]string{
				"SELECT dlq.note(id, 'x', 'hal') FROM dlq.dead_letter_queue ORDER BY random() LIMIT 3",
				"SELECT dlq.sweep_redeliveries()",
				"SELECT dlq.act_on('discard', " + choose("'dlq_manual'", 3) + ", 'hal')",
			}[random.IntN(3)]
		},
		func(*rand.Rand) string {
			return "SELECT dlq.redeliver(" + choose("'dlq_pending'", 5) + ", 'worker:1', 'automatic')"
		},
	} {
		actor(110+uint64(n), func(random *rand.Rand) {
			try(h.dlqd, act(random))
			time.Sleep(20 * time.Millisecond)
		})
	}
	// Redelivered jobs complete or fail.
	actor(120, func(random *rand.Rand) {
		restoring.RLock()
		defer restoring.RUnlock()
		try(h.owner, fmt.Sprintf(`UPDATE river_job SET state = CASE WHEN id %% 3 = %d THEN 'completed'
			ELSE 'discarded' END::river_job_state, finalized_at = clock_timestamp(), attempt = attempt + 1,
			errors = errors || jsonb_build_object('error', 'y', 'at', clock_timestamp(), 'attempt', attempt + 1)
			WHERE id IN (SELECT id FROM river_job WHERE state = 'available' AND metadata ? 'dlq:entry_id' AND kind LIKE 'app%%'
				AND max_attempts = 1 LIMIT 10 FOR UPDATE SKIP LOCKED)`, random.IntN(3)))
		time.Sleep(20 * time.Millisecond)
	})
	// Sessions of dlqd and of operators end in the middle of a transaction.
	actor(121, func(random *rand.Rand) {
		try(h.admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "+
			"usename = '"+h.DLQDRole+"' AND state <> 'idle' ORDER BY random() LIMIT 1")
		time.Sleep(time.Duration(50+random.IntN(200)) * time.Millisecond)
	})

	// Faults.
	lock := func(random *rand.Rand, table, mode string) {
		tx, err := h.admin.Begin(t.Context())
		if err != nil {
			return
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		if _, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '1s'; LOCK TABLE "+table+" IN "+mode+
			" MODE"); err == nil {
			time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
		}
	}
	actor(200, func(random *rand.Rand) {
		pick := func(of ...string) string { return of[random.IntN(len(of))] }
		switch random.IntN(6) {
		case 0:
			try(h.admin, "SELECT dlq.set_capture('"+pick("on", "off", "strict")+"', '"+pick("1 min", "250 ms", "1 ms")+"')")
			time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
			try(h.admin, "SELECT dlq.set_capture('on', '1 min')")
		case 1:
			trigger := pick("dlq_capture", "dlq_follow")
			try(h.admin, "SET lock_timeout = '500ms'; ALTER TABLE river_job DISABLE TRIGGER "+trigger)
			time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
			try(h.admin, "ALTER TABLE river_job ENABLE TRIGGER "+trigger)
		case 2:
			lock(random, "ONLY dlq."+pick("dead_letter_queue", "dead_letter_inbox", "job_facts", "entry_jobs"),
				pick("SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"))
		case 3: // in a session with session_replication_role = replica, triggers do not fire
			conn, err := pgx.Connect(t.Context(), h.Admin)
			if err != nil {
				return
			}
			restoring.RLock()
			_, _ = conn.Exec(t.Context(), "SET session_replication_role = replica")
			_, _ = conn.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
				errors = errors || '{}'::jsonb WHERE id IN (SELECT id FROM river_job WHERE state IN ('running', 'available')
					AND kind LIKE 'app%' LIMIT 3 FOR UPDATE SKIP LOCKED)`)
			restoring.RUnlock()
			_ = conn.Close(t.Context())
		case 4: // a restore loses the latest jobs, and their ids are used again
			restoring.Lock()
			try(h.admin, `BEGIN; LOCK TABLE river_job; SET LOCAL session_replication_role = replica;
				CREATE TEMP TABLE backup ON COMMIT DROP AS SELECT * FROM river_job
					ORDER BY id LIMIT (SELECT greatest(count(*) - 20, 0) FROM river_job);
				TRUNCATE river_job; INSERT INTO river_job SELECT * FROM backup;
					SELECT setval('river_job_id_seq', greatest(coalesce((SELECT max(id) FROM river_job), 1), 1)); COMMIT`)
			restoring.Unlock()
		default:
			try(h.dlqd, "CALL dlq.ensure_partitions()")
			try(h.dlqd, "SELECT dlq.refresh_rollups()")
		}
		time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
	})

	all.Wait()
	require.False(t, t.Failed())
	h.exec(h.admin, "ALTER TABLE river_job ENABLE TRIGGER dlq_capture; ALTER TABLE river_job ENABLE TRIGGER dlq_follow; "+
		"SELECT dlq.set_capture('on', '1 min')")
	settle := func() {
		for h.count(`SELECT (SELECT count(*) FROM dlq.job_facts WHERE fact <> 'following') + (SELECT count(*)
			FROM dlq.dead_letter_inbox)`) > 0 {
			require.NoError(t, t.Context().Err())
			h.exec(h.dlqd, "SELECT dlq.apply_facts()")
			h.exec(h.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
		}
	}
	settle()
	t.Logf("at the end: %d open, %d jobs, %d remembered, %d entry_jobs",
		h.count("SELECT count(*) FROM dlq.dead_letter_open"), h.count("SELECT count(*) FROM river_job"),
		h.count("SELECT count(*) FROM dlq.retired_jobs"), h.count("SELECT count(*) FROM dlq.entry_jobs"))
	h.reconcile()
	settle()
	t.Logf("%d failures, %d of them captured; %d jobs failed; %d entries, %d of them by the reconciler, %d without a "+
		"payload; %d moves by operators, %d redeliveries", h.count("SELECT count(*) FROM failures"),
		h.count("SELECT count(*) FROM failures WHERE captured"),
		h.count("SELECT count(*) FROM river_job j WHERE dlq.is_failure(to_jsonb(j))"),
		h.count("SELECT count(*) FROM dlq.dead_letter_queue"),
		h.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'reconciler'"),
		h.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event = '{"erased": true}'`),
		h.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE origin IS NOT NULL"),
		h.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing'
			AND from_status <> to_status`))
	h.requireExact()
	h.requireFiledOnce()
	require.Empty(t, h.strings(`SELECT e.captured_by || ' ' || e.id || ' ' || e.river_job_id || ' ' || e.status
		FROM dlq.dead_letter_queue e
		WHERE NOT EXISTS (SELECT FROM failures f WHERE f.job_id = e.river_job_id AND f.job_created_at = e.job_created_at
			AND dlq.entry_id(f.job_id, f.at) = e.id)`), "dead letters without a failure")

	// All entries are discarded. The reconciler must not file any of their failures again.
	h.exec(h.dlqd, `SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue
		WHERE status IN ('dlq_pending', 'dlq_manual', 'dlq_failed')), 'kim')`)
	before := h.count("SELECT count(*) FROM dlq.dead_letter_queue")
	h.reconcile()
	require.Equal(t, before, h.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

// requireFiledOnce compares the audit trail, which outlives entries and jobs, with the table failures. Each failure
// that capture recorded must be in exactly one entry. An entry that an operator closed must not be redelivered before
// an operator or a newer failure reopens it.
func (h *host) requireFiledOnce() {
	h.Helper()
	h.exec(h.admin, `CREATE TABLE filed AS
		SELECT t.entry_id, t.river_job_id AS job_id, t.failed_at AS at FROM dlq.dead_letter_transitions t
		WHERE t.failed_at IS NOT NULL
		UNION SELECT r.entry_id, r.job_id, f.at FROM dlq.retired_jobs r JOIN failures f ON f.job_id = r.job_id
			AND f.job_created_at = r.job_created_at AND dlq.entry_id(f.job_id, f.at) = r.failure;
		CREATE INDEX ON filed (job_id, at)`)
	require.Empty(h, h.strings(
		`SELECT f.job_id || ' ' || f.at || ' ' || f.attempt || ': ' || coalesce((SELECT string_agg(concat_ws(' ', t.at,
			t.entry_id, t.to_status, t.actor, t.reason), '; ' ORDER BY t.at)
			FROM dlq.dead_letter_transitions t WHERE t.river_job_id = f.job_id),
				'') || coalesce((SELECT ' now ' || to_jsonb(j)::text FROM river_job j WHERE j.id = f.job_id), ' gone')
		FROM failures f WHERE f.captured AND NOT EXISTS (SELECT FROM filed t WHERE t.job_id = f.job_id
			AND t.at = f.at)`), "captured failures that are in no entry")
	require.Empty(h, h.strings(`SELECT t.job_id || ' ' || t.at || ': ' || string_agg(t.entry_id::text, ' ') || '; '
			|| (SELECT string_agg(concat_ws(' ', a.at, a.entry_id, a.to_status, a.actor, a.reason), '; ' ORDER BY a.at)
				FROM dlq.dead_letter_transitions a WHERE a.entry_id = ANY (array_agg(t.entry_id)))
		FROM filed t JOIN failures f ON f.job_id = t.job_id AND f.at = t.at
		GROUP BY t.job_id, t.at HAVING count(DISTINCT t.entry_id) > 1`), "failures that are in two entries")
	require.Empty(h, h.strings(`SELECT t.entry_id || ' ' || t.failed_at || ': ' || count(*)
		FROM dlq.dead_letter_transitions t WHERE t.failed_at IS NOT NULL
		GROUP BY t.entry_id, t.failed_at HAVING count(*) > 1`), "failures that an entry counts twice")
	require.Empty(h, h.strings(`SELECT s.entry_id || ' ' || s.at FROM dlq.dead_letter_transitions s
		JOIN LATERAL (SELECT c.at FROM dlq.dead_letter_transitions c WHERE c.entry_id = s.entry_id AND c.at < s.at
			AND c.to_status IN ('dlq_resolved', 'dlq_archived') AND c.from_status <> c.to_status AND c.origin IS NOT NULL
		              ORDER BY c.at DESC LIMIT 1) closed ON true
		WHERE s.to_status = 'dlq_processing' AND s.from_status <> s.to_status AND s.actor = 'worker:1'
		  AND NOT EXISTS (SELECT FROM dlq.dead_letter_transitions a WHERE a.entry_id = s.entry_id AND a.at >= closed.at
		  AND a.at <= s.at AND a.origin IS NOT NULL
		  AND a.from_status IN ('dlq_resolved', 'dlq_archived'))`), "entries redelivered after an operator closed them")
}
