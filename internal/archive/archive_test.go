package archive_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
)

// Arrays that are sent to the database are bounded in bytes. Without a bound, 1,000 large entries would exceed the size
// of a jsonb array (256 MB), and the archive could neither be erased nor restored.
func TestBatches_AreBoundedInBytes(t *testing.T) {
	t.Parallel()
	cold, err := archive.Open(t.Context(), t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { _ = cold.Close() })
	const large, small = 40, 2500
	unit := cold.NewUnit(archive.Manifest{Unit: "u"})
	for i := range large + small {
		size := 1 << 20
		if i >= large {
			size = 10
		}
		require.NoError(t, unit.Entry(t.Context(), fmt.Sprintf(`{"n": %d, "blob": %q}`, i, strings.Repeat("x", size)),
			time.Now()))
	}
	m, err := unit.Close(t.Context())
	require.NoError(t, err)
	n, batches := 0, 0
	require.NoError(t, cold.Batches(t.Context(), m, func(batch []json.RawMessage) error {
		size := 0
		for _, line := range batch {
			size += len(line)
		}
		require.Less(t, size, 32<<20)
		require.LessOrEqual(t, len(batch), 1000)
		n, batches = n+len(batch), batches+1
		return nil
	}))
	require.Equal(t, large+small, n)
	require.LessOrEqual(t, batches, 6)
}

// If the disk is full when the manifest is written, the unit gets no manifest. An empty manifest would end the listing
// of all units. Instead of filling a disk, the test limits the size of files, in a separate process.
func TestUnit_LeavesNoManifestOnFullDisk(t *testing.T) {
	t.Parallel()
	const inside = "DLQD_TEST_FULL_DISK"
	dir := os.Getenv(inside)
	if dir == "" {
		dir = t.TempDir()
		limited := exec.CommandContext(t.Context(), "sh", "-c", `ulimit -f 2; exec "$0" -test.run '^'"$1"'$'`, os.Args[0],
			t.Name())
		limited.Env = append(os.Environ(), inside+"="+dir)
		out, err := limited.CombinedOutput()
		require.NoError(t, err, string(out))
		files, err := filepath.Glob(filepath.Join(dir, "u", "*"))
		require.NoError(t, err)
		require.Len(t, files, 1, "the entries; the manifest did not fit")
		return
	}
	signal.Ignore(syscall.SIGXFSZ)
	cold, err := archive.Open(t.Context(), dir)
	require.NoError(t, err)
	unit := cold.NewUnit(archive.Manifest{Unit: "u", Policy: strings.Repeat("x", 4096)})
	require.NoError(t, unit.Entry(t.Context(), `{"n": 1}`, time.Now()))
	_, err = unit.Close(t.Context())
	require.ErrorIs(t, err, syscall.EFBIG)
	units, incomplete, err := cold.Units(t.Context())
	require.NoError(t, err)
	require.Empty(t, units)
	require.Len(t, incomplete, 1)
}

// If the store cannot read one manifest, the listing still has the other units. If it can read none, the listing
// returns the error.
func TestUnits_ListsOthersIfStoreCannotReadManifest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cold, err := archive.Open(t.Context(), dir)
	require.NoError(t, err)
	t.Cleanup(func() { _ = cold.Close() })
	write := func(name string) {
		unit := cold.NewUnit(archive.Manifest{Unit: name})
		require.NoError(t, unit.Entry(t.Context(), `{"n": 1}`, time.Now()))
		_, err := unit.Close(t.Context())
		require.NoError(t, err)
	}
	write("a")
	// The invalid attributes file makes the manifest unreadable, as a bad sector would.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a", "manifest.json.attrs"), nil, 0o600))
	_, _, err = cold.Units(t.Context())
	require.Error(t, err)
	require.NotErrorIs(t, err, archive.ErrNoUnit, "its name must not be used again")

	write("b")
	units, incomplete, err := cold.Units(t.Context())
	require.NoError(t, err)
	require.Len(t, units, 1)
	require.Len(t, incomplete, 1)
	require.ErrorIs(t, incomplete[0], archive.ErrUnreadable)
	require.ErrorContains(t, incomplete[0], "a:")
}

// A bucket may have several archives, so the prefix is part of an archive's location. Secrets are not.
func TestOpen_KeepsPrefixInLocation(t *testing.T) {
	t.Parallel()
	for at, want := range map[string]string{
		"s3://cold?region=eu-west-1&prefix=dlqd/": "s3://cold?prefix=dlqd/",
		"s3://cold?region=eu-west-1":              "s3://cold",
	} {
		cold, err := archive.Open(t.Context(), at)
		require.NoError(t, err)
		require.Equal(t, want, cold.String())
		require.NoError(t, cold.Close())
	}
}
