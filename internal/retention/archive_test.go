package retention_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// archiveMonth creates n resolved entries, archives and drops their month, and returns the unit's name.
func (b *bundle) archiveMonth(n int) (unit string) {
	b.Helper()
	b.createClosed(n, "payments", "dlq_resolved")
	y, m0, _ := time.Now().UTC().Date()
	b.now = time.Date(y, m0+4, 10, 12, 0, 0, 0, time.UTC)
	require.Equal(b, n, b.run().Archived)
	return time.Now().UTC().Format("dead_letter_resolved_200601")
}

// scan returns the archive's units, the errors of incomplete units, and the errors of recorded units that are missing
// from the archive.
func (b *bundle) scan() (units []archive.Manifest, incomplete, missing []error) {
	b.Helper()
	units, incomplete, err := b.cold.Units(b.Context())
	require.NoError(b, err)
	missing, err = b.cold.Missing(b.Context(), b.keeper.Store, units)
	require.NoError(b, err)
	return units, incomplete, missing
}

// A full disk left a unit with an unreadable manifest. Lists and erasures treat that unit as missing and include the
// others. The next round writes the unit again.
func TestArchive_WritesUnreadableUnitAgain(t *testing.T) {
	t.Parallel()
	for name, manifest := range map[string]string{"empty": "", "cut": `{"unit": "dead_`, "of another unit": `{}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			unit := time.Now().UTC().Format("dead_letter_resolved_200601")
			dir := filepath.Join(b.cold.String(), unit)
			require.NoError(t, os.MkdirAll(dir, 0o700))
			require.NoError(t, os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(manifest), 0o600))
			require.NoError(t, os.WriteFile(filepath.Join(dir, "entries.ndjson.gz"), []byte("cut"), 0o600))

			b.createClosed(2, "mails", "dlq_resolved")
			now := b.now
			b.now = b.now.Add(8 * 24 * time.Hour)
			require.Equal(t, 2, b.run().Deleted, "another unit")
			b.now = now
			units, incomplete, missing := b.scan()
			require.Len(t, units, 1)
			require.Len(t, incomplete, 1)
			require.ErrorIs(t, incomplete[0], archive.ErrUnreadable)
			require.ErrorContains(t, incomplete[0], unit)
			require.Empty(t, missing)
			store := b.keeper.Store
			e, err := store.Erase(t.Context(), json.RawMessage(`{"queue": "mails"}`), deadletter.Act{Actor: "kim"})
			require.NoError(t, err)
			done, err := b.cold.Erase(t.Context(), store, e.ID, json.RawMessage(`{"queue": "mails"}`))
			require.ErrorIs(t, err, archive.ErrUnreadable, "the erasure says which unit it did not search")
			require.EqualValues(t, 2, done.Entries, "the other unit is erased")

			require.Equal(t, unit, b.archiveMonth(3))
			units, incomplete, missing = b.scan()
			require.Len(t, units, 2)
			require.Empty(t, incomplete)
			require.Empty(t, missing)
			require.EqualValues(t, 3, b.units()[unit][0].Entries.Lines)
			_, err = b.cold.Erase(t.Context(), store, e.ID, json.RawMessage(`{"queue": "mails"}`))
			require.NoError(t, err)
		})
	}
}

// The database records which units are complete, so a recorded unit that is missing from the archive is reported. If
// only the manifest is missing, the unit's files are not overwritten, because its rows are no longer in the database.
func TestArchive_MissesUnitsThatAreGone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(2, "mails", "dlq_resolved")
	now := b.now
	b.now = b.now.Add(8 * 24 * time.Hour)
	require.Equal(t, 2, b.run().Deleted)
	b.now = now
	unit := b.archiveMonth(3)
	units, _, missing := b.scan()
	require.Len(t, units, 2)
	require.Empty(t, missing)
	_, err := b.cold.Restore(t.Context(), b.keeper.Store, &b.units()[unit][0], uuid.Nil, b.now,
		deadletter.Act{Actor: "kim"})
	require.NoError(t, err)

	dir := b.cold.String()
	require.NoError(t, os.Remove(filepath.Join(dir, unit, "manifest.json")))
	_, incomplete, missing := b.scan()
	require.Len(t, incomplete, 1)
	require.ErrorIs(t, incomplete[0], archive.ErrNoUnit)
	require.Len(t, missing, 2, "the unit, and the partition that was dropped")
	require.ErrorContains(t, missing[0], unit)
	before, err := os.ReadFile(filepath.Join(dir, unit, "entries.ndjson.gz"))
	require.NoError(t, err)
	b.now = b.now.Add(time.Hour)
	require.Equal(t, 3, b.run().Archived, "the restored entries")
	after, err := os.ReadFile(filepath.Join(dir, unit, "entries.ndjson.gz"))
	require.NoError(t, err)
	require.Equal(t, before, after)
	require.Equal(t, unit+"~2", b.units()[unit][0].Unit)

	single, err := filepath.Glob(filepath.Join(dir, "entries_*"))
	require.NoError(t, err)
	require.Len(t, single, 1)
	require.NoError(t, os.RemoveAll(single[0]))
	_, _, missing = b.scan()
	require.Len(t, missing, 2, "the unit without a manifest, and the batch; the second unit has the partition's rows")
	require.ErrorContains(t, missing[1], filepath.Base(single[0]))

	remove := func(unit string) {
		b.exec(`SELECT dlq.record_act('archive unit ' || $1, 'removed', 'kim', 'kept for 7 years',
			jsonb_build_object('archive', $2::text))`, unit, dir)
	}
	remove(filepath.Base(single[0]))
	_, _, missing = b.scan()
	require.Len(t, missing, 1)
	remove(unit)
	_, _, missing = b.scan()
	require.Empty(t, missing)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, unit+"~2")))
	_, _, missing = b.scan()
	require.Len(t, missing, 1, "the unit that was written after the first one")
}

// A process was killed before it wrote a manifest. The unit's files may have the person's data, so the erasure is
// incomplete until retention has written the unit again.
func TestErase_IncludesInterruptedUnits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	unit := time.Now().UTC().Format("dead_letter_resolved_200601")
	dir := filepath.Join(b.cold.String(), unit)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "entries.ndjson.gz"), []byte("cut"), 0o600))
	erase := func() error {
		_, err := b.cold.Erase(t.Context(), b.keeper.Store, uuid.New(), json.RawMessage(`{"kind": "k"}`))
		return err
	}
	require.ErrorContains(t, erase(), unit+": it has no manifest")
	require.Equal(t, unit, b.archiveMonth(1))
	require.NoError(t, erase())
}

// Retention may write a unit while another process compares the archive with the database. That unit is not reported as
// missing.
func TestArchive_MissesNoUnitThatIsNewerThanTheList(t *testing.T) {
	t.Parallel()
	b := setup(t)
	units, _, _ := b.scan()
	b.archiveMonth(1)
	missing, err := b.cold.Missing(t.Context(), b.keeper.Store, units)
	require.NoError(t, err)
	require.Empty(t, missing)
}

// A unit is checked before the first entry is written.
func TestRestore_RestoresNothingFromCorruptUnit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	unit := b.archiveMonth(1500) // more than a batch
	m := b.units()[unit][0]
	sum := m.Entries.SHA256
	m.Entries.SHA256 = strings.Repeat("0", 64)
	restore := func(only uuid.UUID) (int, error) {
		return b.cold.Restore(t.Context(), b.keeper.Store, &m, only, b.now.Add(time.Hour), deadletter.Act{Actor: "kim"})
	}
	n, err := restore(uuid.Nil)
	require.ErrorContains(t, err, "SHA-256")
	require.Zero(t, n)
	require.Zero(t, b.countIn("dlq_resolved"))
	m.Entries.SHA256 = sum
	n, err = restore(uuid.Nil)
	require.NoError(t, err)
	require.Equal(t, 1500, n)
}

// A restore restores all entries of a unit or none. In this test, the database refuses the second batch.
func TestRestore_RestoresAllOrNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	unit := b.archiveMonth(1500)
	m := b.units()[unit][0]
	b.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF (SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'restored from the archive') > 1000 THEN
			RAISE 'refused';
		END IF;
		RETURN NULL;
	END $$`)
	b.exec(`CREATE TRIGGER refuse AFTER INSERT ON dlq.dead_letter_queue FOR EACH STATEMENT EXECUTE FUNCTION refuse()`)
	n, err := b.cold.Restore(t.Context(), b.keeper.Store, &m, uuid.Nil, b.now.Add(time.Hour), deadletter.Act{Actor: "kim"})
	require.ErrorContains(t, err, "refused")
	require.Zero(t, n)
	require.Zero(t, b.countIn("dlq_resolved"))
}

// If one unit is damaged, an erasure still erases data from the other units, and its error names the damaged one.
func TestErase_ContinuesAfterDamagedUnit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(2, "mails", "dlq_resolved")
	now := b.now
	b.now = b.now.Add(8 * 24 * time.Hour)
	b.run()
	b.now = now
	unit := b.archiveMonth(1)
	file := filepath.Join(b.cold.String(), unit, "entries.ndjson.gz")
	require.NoError(t, os.WriteFile(file, []byte("rot"), 0o600))
	done, err := b.cold.Erase(t.Context(), b.keeper.Store, uuid.New(), json.RawMessage(`{"kind": "k"}`))
	require.ErrorContains(t, err, unit)
	require.EqualValues(t, 2, done.Entries)
}

// The audit trail also records each sign-in and each change of a queue, so units are found by an index.
func TestArchive_FindsUnitsByIndex(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO dlq.acts (subject, act, actor, detail) SELECT 'sessions', 'signed in', 'kim', '{}'
		FROM generate_series(1, 20000)`)
	b.exec("ANALYZE dlq.acts")
	b.createClosed(2, "mails", "dlq_resolved")
	b.now = b.now.Add(8 * 24 * time.Hour)
	require.Equal(t, 2, b.run().Deleted)
	b.scan()
	require.Eventually(t, func() bool {
		b.exec("SELECT pg_stat_force_next_flush()")
		return b.count("SELECT coalesce(sum(idx_scan), 0) FROM pg_stat_user_indexes WHERE indexrelname = 'acts_archive'") >= 4
	}, 5*time.Minute, 50*time.Millisecond)
}
