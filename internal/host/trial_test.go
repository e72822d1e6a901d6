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

// The application works while everything around it is switched, locked, restored and purged at random. When it is quiet again, there is
// a dead letter for each failure, and one only. DLQD_TRIAL is how long that goes on ("10m"; 5 seconds otherwise), DLQD_TRIAL_SEED
// repeats the choices of an earlier run, though not its timing.
func TestHost_trial(t *testing.T) {
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
	h := newHost(t)
	// What has failed, ever: jobs are retried, restored and purged.
	h.exec(h.admin, `CREATE TABLE failures (job_id bigint, job_created_at timestamptz, at timestamptz);
		CREATE FUNCTION record_failure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
			IF dlq.is_failure(to_jsonb(NEW), to_jsonb(OLD)) THEN
				INSERT INTO public.failures VALUES (NEW.id, NEW.created_at, NEW.finalized_at);
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

	// The application: what it runs must not fail. A lock on River's own table, as a restore takes, it waits for.
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
			mine := fmt.Sprintf("app%d", n)
			must("INSERT INTO river_job (kind, args, max_attempts, state, metadata) SELECT $1, '{}', 3, 'running', CASE WHEN i % 5 = 0 THEN '{\"dlq:entry_id\": \"0198aaaa-0000-7000-8000-000000000000\"}' ELSE '{}' END::jsonb FROM generate_series(1, $2::integer) i", mine, 1+random.IntN(20))
			end := "UPDATE river_job SET state = CASE id % 4 WHEN 0 THEN 'completed' WHEN 1 THEN 'cancelled' ELSE 'discarded' END::river_job_state, finalized_at = clock_timestamp(), errors = errors || '{\"error\": \"x\", \"attempt\": 1}'::jsonb WHERE kind = $1 AND state IN ('running', 'available')"
			must("BEGIN")
			switch random.IntN(8) {
			case 0:
				must("SAVEPOINT s")
				must(end, mine)
				must("ROLLBACK TO s")
				must(end, mine)
				must("COMMIT")
			case 1:
				prepared++
				must(end, mine)
				id := fmt.Sprintf("'%s_%d_%d'", h.DLQDRole, n, prepared)
				must("PREPARE TRANSACTION " + id)
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
				must("COMMIT PREPARED " + id)
			case 2:
				must(end, mine)
				must("ROLLBACK")
			case 3:
				must("UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id IN (SELECT id FROM river_job WHERE kind = $1 AND state IN ('discarded', 'cancelled') ORDER BY random() LIMIT 3 FOR UPDATE SKIP LOCKED)", mine)
				must("COMMIT")
			default:
				must(end, mine)
				must("COMMIT")
			}
		})
	}

	// dlqd, and its people.
	try := func(pool *pgxpool.Pool, sql string) { // may meet a lock, a move that is not allowed, a row that moves
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
	actor(103, func(random *rand.Rand) {
		switch random.IntN(4) {
		case 0:
			try(h.dlqd, "SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status IN ('dlq_pending', 'dlq_manual') ORDER BY random() LIMIT 5), 'x')")
		case 1:
			try(h.dlqd, "SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status IN ('dlq_resolved', 'dlq_archived') ORDER BY random() LIMIT 3))")
		case 2:
			try(h.dlqd, "SELECT dlq.note(id, 'x') FROM dlq.dead_letter_queue ORDER BY random() LIMIT 3")
		default:
			try(h.dlqd, "SELECT dlq.redeliver(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending' ORDER BY random() LIMIT 5), 'x', 'x')")
		}
		time.Sleep(20 * time.Millisecond)
	})

	// And everything that goes wrong.
	lock := func(random *rand.Rand, table, mode string) {
		tx, err := h.admin.Begin(t.Context())
		if err != nil {
			return
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		if _, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '1s'; LOCK TABLE "+table+" IN "+mode+" MODE"); err == nil {
			time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
		}
	}
	actor(200, func(random *rand.Rand) {
		pick := func(of ...string) string { return of[random.IntN(len(of))] }
		switch random.IntN(6) {
		case 0:
			try(h.admin, "SELECT dlq.set_capture('"+pick("on", "on", "off", "strict")+"', '"+pick("1 min", "250 ms", "1 ms")+"')")
		case 1:
			try(h.admin, "SET lock_timeout = '500ms'; ALTER TABLE river_job "+pick("DISABLE", "ENABLE", "ENABLE")+" TRIGGER "+pick("dlq_capture", "dlq_follow"))
		case 2:
			lock(random, "ONLY dlq."+pick("dead_letter_queue", "dead_letter_inbox", "job_facts", "entry_jobs"), pick("SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"))
		case 3: // a replication role
			conn, err := pgx.Connect(t.Context(), h.Admin)
			if err != nil {
				return
			}
			restoring.RLock()
			_, _ = conn.Exec(t.Context(), "SET session_replication_role = replica")
			_, _ = conn.Exec(t.Context(), "UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = errors || '{}'::jsonb WHERE id IN (SELECT id FROM river_job WHERE state IN ('running', 'available') AND kind LIKE 'app%' LIMIT 3 FOR UPDATE SKIP LOCKED)")
			restoring.RUnlock()
			_ = conn.Close(t.Context())
		case 4: // a restore of what there was, less the latest jobs, whose ids come again
			restoring.Lock()
			try(h.admin, `BEGIN; LOCK TABLE river_job; SET LOCAL session_replication_role = replica;
				CREATE TEMP TABLE backup ON COMMIT DROP AS SELECT * FROM river_job ORDER BY id LIMIT (SELECT greatest(count(*) - 20, 0) FROM river_job);
				TRUNCATE river_job; INSERT INTO river_job SELECT * FROM backup; SELECT setval('river_job_id_seq', greatest(coalesce((SELECT max(id) FROM river_job), 1), 1)); COMMIT`)
			restoring.Unlock()
		default:
			try(h.dlqd, "CALL dlq.ensure_partitions()")
			try(h.dlqd, "SELECT dlq.refresh_rollups()")
		}
		time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
	})

	all.Wait()
	require.False(t, t.Failed())
	h.exec(h.admin, "ALTER TABLE river_job ENABLE TRIGGER dlq_capture; ALTER TABLE river_job ENABLE TRIGGER dlq_follow; SELECT dlq.set_capture('on', '1 min')")
	for h.count("SELECT count(*) FROM dlq.job_facts WHERE fact <> 'following'") > 0 {
		require.NoError(t, t.Context().Err())
		h.exec(h.dlqd, "SELECT dlq.apply_facts()")
	}
	t.Logf("at the end: %d unfiled, %d open, %d jobs, %d retired, %d entry_jobs", h.count("SELECT count(*) FROM dlq.dead_letter_inbox"), h.count("SELECT count(*) FROM dlq.dead_letter_open"), h.count("SELECT count(*) FROM river_job"), h.count("SELECT count(*) FROM dlq.retired_jobs"), h.count("SELECT count(*) FROM dlq.entry_jobs"))
	h.reconcile()
	t.Logf("%d jobs, %d failed; %d entries, %d of them by the reconciler, %d retired", h.count("SELECT count(*) FROM river_job"), h.count("SELECT count(*) FROM river_job j WHERE dlq.is_failure(to_jsonb(j))"),
		h.count("SELECT count(*) FROM dlq.dead_letter_queue"), h.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'reconciler'"), h.count("SELECT count(*) FROM dlq.retired_jobs"))
	h.exact()
	require.Empty(t, h.strings(`SELECT e.captured_by || ' ' || e.id || ' ' || e.river_job_id || ' ' || e.status FROM dlq.dead_letter_queue e
		WHERE NOT EXISTS (SELECT FROM failures f WHERE f.job_id = e.river_job_id AND f.job_created_at = e.job_created_at AND dlq.entry_id(f.job_id, f.at) = e.id)`), "dead letters without a failure")
}
