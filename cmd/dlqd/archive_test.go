package main_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestArchive_Commands(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	for _, sql := range []string{
		`INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'k', jsonb_build_object('n', i), 1, 'running'
			FROM generate_series(1, 3) i`,
		"UPDATE river_job SET state = 'discarded', finalized_at = now()",
		"SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim')",
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	var id string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT max(id::text) FROM dlq.dead_letter_queue").Scan(&id))
	dir := t.TempDir()
	cold, err := archive.Open(t.Context(), dir)
	require.NoError(t, err)
	month := time.Now().UTC().Format("dead_letter_archived_200601")
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	held, err := cold.Partition(t.Context(), store, archive.Manifest{Unit: month, Partition: month}, false)
	require.NoError(t, err)
	require.NoError(t, cold.Close())
	_, err = pool.Exec(t.Context(), "SELECT dlq.drop_partition($1, $2, $3::text::numeric)", month, held.Rows, held.Hash)
	require.NoError(t, err)

	with := func(args ...string) []string { return append(append([]string{"archive"}, args...), "--archive", dir) }
	require.Regexp(t, month+` +3 +6 +`, ok(t, with("list")...))
	require.True(t, json.Valid([]byte(ok(t, with("list", "--json")...))))
	require.Contains(t, ok(t, with("verify")...), "ok    "+month+": 3 entries, 6 moves")
	require.Len(t, strings.Split(strings.TrimSpace(ok(t, with("show", month)...)), "\n"), 3)
	require.Equal(t, 3, strings.Count(ok(t, with("show", month, "--audit")...), `"actor": "kim"`))

	require.Contains(t, ok(t, with("restore", month, "--database-url", url, "--id", id, "--note", "why")...),
		"restored 1 entries of "+month+", for 168h0m0s")
	require.Contains(t, ok(t, with("restore", month, "--database-url", url)...), "restored 2 entries of "+month)
	_, stderr, code := run(t, with("restore", month, "--database-url", url, "--id", "7")...)
	require.Equal(t, 2, code, stderr)
	_, stderr, code = run(t, with("show", "elsewhere")...)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "there is no such unit: elsewhere")

	require.NotContains(t, ok(t, with("verify", "--database-url", url)...), "BAD")
	manifest := filepath.Join(dir, month, "manifest.json")
	whole, err := os.ReadFile(manifest)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(manifest, 0))
	out, stderr, code := run(t, with("verify")...)
	require.Equal(t, 1, code, "a manifest that cannot be read")
	require.Contains(t, out, "BAD")
	require.Contains(t, stderr, "1 of 1 units do not match their manifests")
	require.Contains(t, stderr, "not compared with the database")
	_, stderr, code = run(t, with("list")...)
	require.Zero(t, code)
	require.Contains(t, stderr, month)
	require.NoError(t, os.Remove(manifest))
	ok(t, with("verify")...)
	out, stderr, code = run(t, with("verify", "--database-url", url)...)
	require.Equal(t, 1, code, "a manifest that is gone")
	require.Contains(t, out, "BAD")
	require.Contains(t, stderr, "the archive lacks")
	// --archive may spell the archive's location in another way than the database. If the database has no unit at the
	// location, verify must fail instead of comparing nothing.
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	for _, location := range []string{
		"file://" + dir, "file://" + dir + "/", dir + "/../" + filepath.Base(dir) + "/", link,
	} {
		out, stderr, code = run(t, "archive", "verify", "--database-url", url, "--archive", location)
		require.Equal(t, 1, code, location)
		require.Contains(t, out, "BAD", location)
		require.Contains(t, stderr, "the archive lacks", location)
	}
	_, stderr, code = run(t, "archive", "verify", "--database-url", url, "--archive", t.TempDir())
	require.Equal(t, 1, code)
	require.Contains(t, stderr, dir+" (1)")
	require.Contains(t, stderr, "the database names no unit in it")
	require.NoError(t, os.WriteFile(manifest, whole, 0o600))

	files, err := filepath.Glob(filepath.Join(dir, month, "entries*"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(files[0], []byte("rot"), 0o600))
	out, stderr, code = run(t, with("verify", month)...)
	require.Equal(t, 1, code)
	require.Contains(t, out, "BAD")
	require.Contains(t, stderr, "1 of 1 units do not match their manifests")
}
