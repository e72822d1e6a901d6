package postgrestest

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Pooler starts a PgBouncer in front of the database whose URL is direct, and returns PgBouncer's URL for the same
// role. PgBouncer pools transactions, with at most servers connections to the database. It must be installed
// (scripts/install.sh pgbouncer). Its other settings are defaults: it refuses session parameters that it does not know.
func Pooler(tb testing.TB, direct string, servers int) string {
	tb.Helper()
	return pooler(tb, direct, "transaction", servers)
}

// IgnoringPooler is [Pooler] with a PgBouncer that accepts dlqd's session parameters and does not pass them on.
func IgnoringPooler(tb testing.TB, direct string, servers int) string {
	tb.Helper()
	return pooler(tb, direct, "transaction", servers,
		"ignore_startup_parameters = row_security,jit,default_transaction_isolation")
}

// SessionPooler is [Pooler] with one server session for each client.
func SessionPooler(tb testing.TB, direct string) string {
	tb.Helper()
	const plenty = 50
	return pooler(tb, direct, "session", plenty)
}

// Alter runs ALTER DATABASE with change, as the server's administrator.
func Alter(tb testing.TB, url, change string) {
	tb.Helper()
	base, err := Start(tb.Context())
	require.NoError(tb, err)
	admin(tb.Context(), tb, base, "ALTER DATABASE "+strings.TrimPrefix(parse(url).Path, "/")+" "+change)
}

func pooler(tb testing.TB, direct, mode string, servers int, more ...string) string {
	tb.Helper()
	config, err := pgx.ParseConfig(direct)
	require.NoError(tb, err)
	listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(tb, err)
	require.NoError(tb, listener.Close())

	dir := tb.TempDir()
	path := filepath.Join(dir, "pgbouncer.ini")
	users := filepath.Join(dir, "users.txt")
	role := fmt.Sprintf("%q \"\"\n", config.User)
	require.NoError(tb, os.WriteFile(users, []byte(role), 0o644)) //nolint:gosec // read by another user
	lines := append([]string{
		"[databases]",
		fmt.Sprintf("%s = host=%s port=%d", config.Database, config.Host, config.Port),
		"[pgbouncer]",
		"listen_addr = 127.0.0.1", "listen_port = " + port, "unix_socket_dir =",
		"auth_type = trust", "auth_file = " + users,
		"pool_mode = " + mode, fmt.Sprintf("default_pool_size = %d", servers), "max_client_conn = 500",
	}, more...)
	require.NoError(tb, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644)) //nolint:gosec // likewise
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = log.Close() })

	program, err := exec.LookPath("pgbouncer")
	if err != nil { // Debian installs PgBouncer in a directory that is only on root's PATH
		program = "/usr/sbin/pgbouncer"
	}
	cmd := exec.Command(program, path) //nolint:gosec,noctx // a test helper, which stops it below
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if os.Getuid() == 0 { // PgBouncer refuses to run as root, and only the server's user can reach the socket
		socket, err := os.Stat(config.Host)
		require.NoError(tb, err)
		stat, ok := socket.Sys().(*syscall.Stat_t)
		require.True(tb, ok)
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: stat.Uid, Gid: stat.Gid}
		for parent := dir; parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
			require.NoError(tb, os.Chmod(parent, 0o755)) //nolint:gosec // that user has to come in
		}
	}
	require.NoError(tb, cmd.Start(), "scripts/install.sh pgbouncer")
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	pooled := (&url.URL{
		Scheme: "postgres", User: url.User(config.User), Host: "127.0.0.1:" + port,
		Path: "/" + config.Database, RawQuery: "sslmode=disable",
	}).String()
	require.Eventually(tb, func() bool {
		select {
		case <-ended:
			raw, _ := os.ReadFile(log.Name())
			require.Fail(tb, "pgbouncer ended", string(raw))
		default:
		}
		conn, err := pgx.Connect(tb.Context(), pooled)
		if err != nil {
			return false
		}
		return conn.Close(tb.Context()) == nil
	}, time.Minute, 20*time.Millisecond)
	return pooled
}
