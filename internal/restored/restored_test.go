package restored_test

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/restored"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func newGuard(pool *pgxpool.Pool) (*restored.Guard, postgres.DB) {
	schemas := postgres.DefaultSchemas()
	return restored.New(restored.Config{
		Schemas: schemas, Process: uuid.New(), Name: "test", Logger: slog.New(slog.DiscardHandler),
	}, pool), schemas.Rendered(pool)
}

// watch calls dlq.watch_server as a process that last wrote mark on timeline.
func watch(t *testing.T, pool *pgxpool.Pool, process uuid.UUID, mark,
	timeline int64,
) (written int64, verdict string, held bool) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT w.mark, w.verdict, w.held_at IS NOT NULL
		FROM dlq.watch_server($1, 'test', $2, $3) w`, process, mark, timeline).Scan(&written, &verdict, &held))
	return written, verdict, held
}

// A process concludes that a standby was promoted only if it wrote its last mark (processes.mark) on the previous
// timeline and finds the mark. A process whose mark is lost concludes that the database was restored.
func TestWatchServer_DistinguishesPromotionFromRestore(t *testing.T) {
	t.Parallel()
	pool, running := postgrestest.Pool(t), uuid.New()
	promote := func() {
		_, err := pool.Exec(t.Context(), `UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{timeline}', '7')
			WHERE key = 'server'`)
		require.NoError(t, err)
	}
	mark, verdict, held := watch(t, pool, running, 0, 0)
	require.Equal(t, "unknown", verdict)
	require.False(t, held)

	promote()
	_, verdict, held = watch(t, pool, uuid.New(), 0, 0)
	require.Equal(t, "timeline", verdict, "a process that has just started cannot know")
	require.True(t, held)
	mark, verdict, held = watch(t, pool, running, mark, 7)
	require.Equal(t, "promoted", verdict)
	require.False(t, held)

	promote()
	mark, verdict, held = watch(t, pool, running, mark, 6)
	require.Equal(t, "timeline", verdict, "the process last wrote before the known timeline")
	require.True(t, held)
	_, verdict, _ = watch(t, pool, uuid.New(), 5, 7)
	require.Equal(t, "lost", verdict)
	_, verdict, held = watch(t, pool, running, mark, 7)
	require.Equal(t, "same", verdict, "the mark of another process is lost")
	require.True(t, held)
}

// A backup from before dlqd recorded the server does not identify it; a process that ran during the
// restore detects it.
func TestWatchServer_DetectsBackupWithoutServerRecord(t *testing.T) {
	t.Parallel()
	pool, running := postgrestest.Pool(t), uuid.New()
	mark, verdict, _ := watch(t, pool, running, 0, 0)
	require.Equal(t, "unknown", verdict)
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("DELETE FROM dlq.settings WHERE key = 'server'")
	_, verdict, held := watch(t, pool, running, mark, 1)
	require.Equal(t, "unknown", verdict, "nothing is lost")
	require.False(t, held)
	exec("DELETE FROM dlq.settings WHERE key = 'server'")
	exec("DELETE FROM dlq.processes")
	_, verdict, held = watch(t, pool, running, mark, 1)
	require.Equal(t, "lost", verdict)
	require.True(t, held)
}

// A hosted Postgres may deny the functions that identify the server. The marks of processes remain.
func TestWatchServer_NeedsNoControlFunctions(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool, super, running := postgrestest.Open(t, url), postgrestest.Open(t, postgrestest.Superuser(t, url)), uuid.New()
	mark, verdict, _ := watch(t, pool, running, 0, 0)
	require.Equal(t, "unknown", verdict)
	_, err := super.Exec(t.Context(), `REVOKE EXECUTE ON FUNCTION pg_control_system(), pg_control_checkpoint(),
		pg_current_wal_insert_lsn() FROM PUBLIC`)
	require.NoError(t, err)
	var keys int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM jsonb_object_keys(dlq.server_identity()) k
		WHERE k IN ('system', 'timeline')`).Scan(&keys))
	require.Zero(t, keys)
	mark, verdict, held := watch(t, pool, running, mark, 1)
	require.Equal(t, "same", verdict)
	require.False(t, held)
	_, err = pool.Exec(t.Context(), "UPDATE dlq.processes SET mark = 1")
	require.NoError(t, err)
	_, verdict, held = watch(t, pool, running, mark, 1)
	require.Equal(t, "lost", verdict)
	require.True(t, held)
}

// If several processes start at once on a restored database, dlqd records one hold, and no process may
// send before the hold or during it.
func TestGuard_HoldsOnceForConcurrentProcesses(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	first, db := newGuard(pool)
	require.NoError(t, first.Check(t.Context(), pool))
	may, err := first.MaySend(t.Context(), db)
	require.NoError(t, err)
	require.True(t, may)

	_, err = pool.Exec(t.Context(), `UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{database}', '7')
		WHERE key = 'server'`)
	require.NoError(t, err)
	may, err = first.MaySend(t.Context(), db)
	require.NoError(t, err)
	require.False(t, may, "the check is in the transaction that sends")
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			g, db := newGuard(pool)
			if err := g.Check(t.Context(), pool); err != nil {
				t.Error(err)
				return
			}
			if may, err := g.MaySend(t.Context(), db); may || err != nil {
				t.Errorf("may send: %v, %v", may, err)
			}
			if !g.Holds(time.Now().Add(-time.Hour)) || g.Holds(time.Now().Add(time.Hour)) {
				t.Error("must hold only earlier jobs")
			}
		})
	}
	all.Wait()
	var changes int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM dlq.automatic_changes WHERE scope = 'stop'
		AND name = 'restored'`).Scan(&changes))
	require.Equal(t, 1, changes)

	was, err := restored.Resume(t.Context(), db, "kim", "compared")
	require.NoError(t, err)
	require.True(t, was)
	require.NoError(t, first.Check(t.Context(), pool))
	require.Nil(t, first.Held())
	may, err = first.MaySend(t.Context(), db)
	require.NoError(t, err)
	require.True(t, may)
	was, err = restored.Resume(t.Context(), db, "kim", "")
	require.NoError(t, err)
	require.False(t, was)
}

// An operator can declare a restore that dlqd cannot detect.
func TestHoldRestored_HoldsForAnOperator(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	g, db := newGuard(pool)
	require.NoError(t, g.Check(t.Context(), pool))
	_, err := pool.Exec(t.Context(), "SELECT dlq.hold_restored('kim', 'the snapshot of 04:00')")
	require.NoError(t, err)
	require.NoError(t, g.Check(t.Context(), pool))
	require.Equal(t, "the snapshot of 04:00", g.Held().Note)
	may, err := g.MaySend(t.Context(), db)
	require.NoError(t, err)
	require.False(t, may)
}

// A job from before the restored time that fails only now may have been done since; a new job
// cannot.
func TestPreview_IncludesJobsThatFailLater(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	_, db := newGuard(pool)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	begins := func(kind string) {
		exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state)
			VALUES ('dlqd_message', jsonb_build_object('kind', $1::text, 'payload', 1), 'default', 1, 1, 'running')`, kind)
	}
	begins("old")
	exec("SELECT dlq.hold_restored('kim', 'the snapshot of 04:00')")
	begins("new")
	exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "Stuck job rescued by dlqd", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	exec("UPDATE dlq.dead_letter_queue SET strategy = 'immediate'")
	repeats, err := restored.Preview(t.Context(), db)
	require.NoError(t, err)
	require.Len(t, repeats, 1)
	require.Equal(t, "dead letter that goes by itself", repeats[0].What)
	require.EqualValues(t, 1, repeats[0].Items, "only the old job")
}
