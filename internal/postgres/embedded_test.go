package postgres_test

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// dataDir returns a directory that the server's user can reach, even if root runs the tests.
func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dlqd-embedded-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func start(t *testing.T, dir string) (*postgres.Embedded, error) {
	t.Helper()
	return postgres.StartEmbedded(t.Context(), postgres.EmbeddedConfig{
		DataDir: dir, BinDir: os.Getenv("DLQD_TEST_POSTGRES_BIN"), Throwaway: true, Logger: slog.New(slog.DiscardHandler),
	})
}

func query(t *testing.T, url, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	var out string
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&out))
	return out
}

func TestEmbedded_KeepsDataAndLocksDirectory(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	first, err := start(t, dir)
	require.NoError(t, err)
	require.Empty(t, query(t, first.URL(), "SHOW listen_addresses"), "the server listens only on its socket")
	require.Equal(t, "0700", query(t, first.URL(), "SHOW unix_socket_permissions"))
	require.Equal(t, "on", query(t, first.URL(), "SHOW synchronous_commit"))

	_, err = start(t, dir)
	var held *postgres.HeldError
	require.ErrorAs(t, err, &held)
	require.Contains(t, err.Error(), "process id "+strconv.Itoa(os.Getpid()))

	url, err := postgres.EmbeddedURL(dir)
	require.NoError(t, err)
	require.Equal(t, first.URL(), url)
	info, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	require.NoError(t, first.Stop())
	_, err = postgres.EmbeddedURL(dir)
	require.ErrorContains(t, err, "no server runs")

	second, err := start(t, dir)
	require.NoError(t, err)
	require.NoError(t, second.Stop())
}

// A killed dlqd leaves its server running. The next dlqd shuts that server down and starts a server on the same data.
func TestEmbedded_RecoversAfterKill(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	first, err := start(t, dir)
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), first.URL())
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "CREATE TABLE saved AS SELECT 42 AS n")
	require.NoError(t, err)
	require.NoError(t, first.Abandon())

	second, err := start(t, dir)
	require.NoError(t, err)
	<-first.Exited()
	require.Equal(t, "42", query(t, second.URL(), "SELECT n::text FROM saved"))

	// The server itself is killed. The next start recovers its data.
	raw, err := os.ReadFile(filepath.Join(dir, "pgdata", "postmaster.pid"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.SplitN(string(raw), "\n", 2)[0])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	<-second.Exited()
	require.NoError(t, second.Stop())
	third, err := start(t, dir)
	require.NoError(t, err)
	require.Equal(t, "42", query(t, third.URL(), "SELECT n::text FROM saved"))
	require.NoError(t, third.Stop())
}

func TestEmbedded_ReplacesUnfinishedInitdb(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "pgdata.new", "base"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata.new", "PG_VERSION"), []byte("15\n"), 0o600))
	e, err := start(t, dir)
	require.NoError(t, err)
	require.NoError(t, e.Stop())
}

func TestEmbedded_AcceptsLongPaths(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(dataDir(t), strings.Repeat("long", 30))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))
	e, err := start(t, dir)
	require.NoError(t, err)
	require.Equal(t, "1", query(t, e.URL(), "SELECT '1'"))
	socket := query(t, e.URL(), "SHOW unix_socket_directories")
	require.NotContains(t, socket, dir)
	require.NoError(t, e.Stop())
	require.NoDirExists(t, socket)
}

func TestEmbedded_RejectsVersionThatIsNotInstalled(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "pgdata"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata", "PG_VERSION"), []byte("9\n"), 0o600))
	_, err := start(t, dir)
	require.ErrorIs(t, err, postgres.ErrNoBinaries)
	require.ErrorContains(t, err, "version 9, which created this data directory")
}

func TestEmbedded_RootNeedsReachableDirectory(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // only root runs the server as another user
	}
	closed := dataDir(t) // 0700
	_, err := start(t, filepath.Join(closed, "data"))
	require.ErrorContains(t, err, "cannot enter")
	require.ErrorContains(t, err, "--data-dir")
}

func TestFindBinaries_ChecksVersions(t *testing.T) {
	t.Parallel()
	_, err := postgres.FindBinaries(t.Context(), t.TempDir(), 0)
	require.ErrorIs(t, err, postgres.ErrNoBinaries)
	require.ErrorContains(t, err, "Install it with: ")

	// FindBinaries ignores versions outside the supported range.
	fake := func(version string) string {
		dir := t.TempDir()
		for _, program := range []string{"postgres", "initdb"} {
			script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
			require.NoError(t, os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755))
		}
		return dir
	}
	for version, ok := range map[string]bool{"14.9": false, "15.2": true, "18.1": true, "19beta1": false} {
		_, err := postgres.FindBinaries(t.Context(), fake(version), 0)
		require.Equal(t, ok, err == nil, "%s: %v", version, err)
	}

	// FindBinaries follows a symbolic link to the directory with the server's other programs.
	real := fake("16.4")
	linked := t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(real, "postgres"), filepath.Join(linked, "postgres")))
	found, err := postgres.FindBinaries(t.Context(), linked, 0)
	require.NoError(t, err)
	require.Equal(t, 16, found.Major)
	resolved, err := exec.LookPath(found.Path("initdb"))
	require.NoError(t, err)
	require.Equal(t, filepath.Join(real, "initdb"), resolved)
}
