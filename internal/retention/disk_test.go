package retention_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// TestArchive_SurvivesFullDisk fills a small file system with the archive. While the disk is full, and after it has
// become larger, units can be listed and verified, and every dead letter is in the database or in a complete unit.
// While the disk is full, an erasure ends with an error and is not recorded as finished; afterwards it succeeds.
// Mounting requires root, so the test runs only if DLQD_TRIAL is set.
func TestArchive_SurvivesFullDisk(t *testing.T) {
	t.Parallel()
	if os.Getenv("DLQD_TRIAL") == "" {
		t.Skip("make trial-archive runs it, as root")
	}
	dir := t.TempDir()
	const mountFlags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", mountFlags, "size=512k"), "the trial needs root")
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	b := setup(t)
	cold, err := archive.Open(t.Context(), dir)
	require.NoError(t, err)
	t.Cleanup(func() { _ = cold.Close() })
	b.cold, b.keeper.Archive = cold, cold
	store := b.keeper.Store

	created := 0
	create := func() {
		const n = 100
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', jsonb_build_object('customer',
			'cus_' || i % 10, 'blob', (SELECT string_agg(md5(random()::text || l), '') FROM generate_series(1 + 0 * i, 60) l)),
			'mails', 1, 'running' FROM (SELECT i FROM generate_series(1, $1) i) i`, n)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb]
			WHERE state = 'running'`)
		b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = river_job_id,
			move = '{"actor": "worker:1", "reason": "redelivered"}' WHERE status = 'dlq_pending'`)
		b.exec("UPDATE dlq.dead_letter_queue SET status = 'dlq_resolved' WHERE status = 'dlq_processing'")
		created += n
	}
	// check lists and verifies all units, and looks for each dead letter.
	check := func(when string) (archived int) {
		t.Helper()
		units, incomplete, missing := b.scan()
		require.Empty(t, missing, when)
		for _, err := range incomplete {
			require.NotErrorIs(t, err, archive.ErrUnreadable, when)
		}
		found := map[string]bool{}
		for _, m := range units {
			require.NoError(t, cold.Verify(t.Context(), &m), when)
			require.NoError(t, cold.Entries(t.Context(), &m, func(line []byte) error {
				var e struct{ ID string }
				err := json.Unmarshal(line, &e)
				found[e.ID] = true
				return err
			}))
		}
		archived = len(found)
		rows, err := b.pool.Query(t.Context(), "SELECT id::text FROM dlq.dead_letter_queue")
		require.NoError(t, err)
		for rows.Next() {
			var id string
			require.NoError(t, rows.Scan(&id))
			found[id] = true
		}
		require.NoError(t, rows.Err())
		require.Len(t, found, created, "%s: a dead letter is neither in the database nor in a complete unit", when)
		t.Logf("%s: %d units, %d incomplete, %d of %d dead letters in complete units", when, len(units), len(incomplete),
			archived, created)
		return archived
	}

	full, now := 0, b.now
	for range 50 {
		create()
		b.now = now.Add(8 * 24 * time.Hour)
		if _, err := b.keeper.Run(t.Context()); err != nil {
			require.ErrorIs(t, err, syscall.ENOSPC)
			check("full disk")
			if full++; full == 3 {
				break
			}
		}
	}
	require.Equal(t, 3, full, "the disk did not fill")
	check("before the erasure")

	filler, err := os.Create(filepath.Join(dir, "filler"))
	require.NoError(t, err)
	for err == nil {
		_, err = filler.Write(make([]byte, 1024))
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, filler.Close())
	erase := func() (deadletter.Erasure, error) {
		return archive.EraseEverywhere(t.Context(), store, cold, json.RawMessage(`{"payload": {"customer": "cus_7"}}`),
			deadletter.Act{Actor: "kim", Note: "request 42"})
	}
	record, err := erase()
	require.ErrorIs(t, err, archive.ErrIncomplete)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.Nil(t, record.FinishedAt)
	require.NotZero(t, record.Entries, "those in the database are erased")
	check("after an erasure on the full disk")

	require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", mountFlags|syscall.MS_REMOUNT, "size=64m"))
	record, err = erase()
	require.NoError(t, err)
	require.NotNil(t, record.FinishedAt)
	require.NotZero(t, record.Archived)
	check("after an erasure with room")
	b.run()
	require.Equal(t, created, check("after a round of retention with room"))
	require.Empty(t, b.find("cus_7"))
	_, incomplete, _ := b.scan()
	require.Empty(t, incomplete)

	units, _, err := cold.Units(t.Context())
	require.NoError(t, err)
	n, err := cold.Restore(t.Context(), store, &units[0], uuid.Nil, b.now.Add(time.Hour), deadletter.Act{Actor: "kim"})
	require.NoError(t, err)
	require.EqualValues(t, units[0].Entries.Lines, n)
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}
