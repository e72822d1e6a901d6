package postgrestest

import (
	"context"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// Replicated is a Postgres server with a streaming standby. Clients reach both through listeners on loopback.
type Replicated struct {
	URL string // of a database of Role, with both hosts
	// PrimaryURL and StandbyURL are URLs of the same database, with one host each.
	PrimaryURL, StandbyURL string

	tb       testing.TB
	primary  *postgres.Embedded
	standby  *postgres.Embedded
	dir      string
	stream   *Proxy      // from the primary to the standby
	reads    *Proxy      // to the standby, for clients
	stopping bool        // Lag was called
	hanging  atomic.Bool // Hang was called
}

// NewReplicated starts both servers and stops them at the end of the test. If synchronous, each commit waits for the
// standby.
func NewReplicated(tb testing.TB, synchronous bool) *Replicated {
	tb.Helper()
	dir, err := os.MkdirTemp(dir(), "dlqd-replicated-") //nolint:usetesting // tb.TempDir is closed to the servers' user
	require.NoError(tb, err)
	require.NoError(tb, os.Chmod(dir, 0o711)) //nolint:gosec // the servers' user has to come in
	r := &Replicated{tb: tb, dir: dir}
	tb.Cleanup(func() {
		r.resume()
		r.Answer()
		for _, server := range []*postgres.Embedded{r.standby, r.primary} {
			if server != nil {
				_ = server.StopWithin(10 * time.Second)
			}
		}
		_ = os.RemoveAll(dir)
	})
	r.primary = r.start("primary")
	r.stream = NewProxy(tb, r.primary.URL())
	r.exec(r.primary.URL(), "CREATE ROLE "+Role+" LOGIN")
	for _, role := range []string{"dlq_reader", "dlq_operator", "dlq_admin"} {
		r.exec(r.primary.URL(), "CREATE ROLE "+role)
	}
	r.exec(r.primary.URL(), "CREATE DATABASE replicated OWNER "+Role)
	r.copyPrimary()
	r.standby = r.start("standby")
	if synchronous {
		r.exec(r.primary.URL(), "ALTER SYSTEM SET synchronous_standby_names = '*'")
		r.exec(r.primary.URL(), "SELECT pg_reload_conf()")
	}
	want := map[bool]string{true: "sync", false: "async"}[synchronous]
	require.Eventually(tb, func() bool {
		return r.text(r.primary.URL(), "SELECT coalesce(max(sync_state), '') FROM pg_stat_replication") == want
	}, time.Minute, 10*time.Millisecond, "the standby is %s", want)

	r.reads = NewProxy(tb, r.standby.URL())
	primary, standby := parse(NewProxy(tb, r.primary.URL()).URL).Host, parse(r.reads.URL).Host
	at := func(hosts ...string) string {
		return (&url.URL{
			Scheme: "postgres", User: url.User(Role), Host: strings.Join(hosts, ","), Path: "/replicated",
			RawQuery: "sslmode=disable",
		}).String()
	}
	r.URL, r.PrimaryURL, r.StandbyURL = at(primary, standby), at(primary), at(standby)
	return r
}

// Migrate creates River's schema and dlqd's on both servers, and returns a pool on the primary.
func (r *Replicated) Migrate() *pgxpool.Pool {
	r.tb.Helper()
	pool := Open(r.tb, r.PrimaryURL)
	require.NoError(r.tb, (&postgres.Migrator{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}).Up(r.tb.Context()))
	r.CatchUp()
	return pool
}

// Pooler starts a [Pooler] in front of the standby and returns its URL.
func (r *Replicated) Pooler() string {
	r.tb.Helper()
	return Pooler(r.tb, WithDatabase(WithUser(r.standby.URL(), Role), "replicated"), 4)
}

// Exec runs a statement on the standby, as its superuser.
func (r *Replicated) Exec(sql string) {
	r.tb.Helper()
	r.exec(r.standby.URL(), sql)
}

// Pause stops the replay on the standby, and Resume continues it.
func (r *Replicated) Pause() {
	r.tb.Helper()
	r.Exec("SELECT pg_wal_replay_pause()")
	require.Eventually(r.tb, func() bool {
		return r.text(r.standby.URL(), "SELECT pg_get_wal_replay_pause_state()") == "paused"
	}, time.Minute, time.Millisecond)
}

// Resume ends Pause.
func (r *Replicated) Resume() {
	r.tb.Helper()
	r.Exec("SELECT pg_wal_replay_resume()")
}

// CatchUp waits until the standby has replayed all WAL that the primary has flushed.
func (r *Replicated) CatchUp() {
	r.tb.Helper()
	position := r.text(r.primary.URL(), "SELECT pg_current_wal_flush_lsn()::text")
	require.Eventually(r.tb, func() bool {
		return r.text(r.standby.URL(), "SELECT (pg_last_wal_replay_lsn() >= '"+position+"')::text") == "true"
	}, time.Minute, time.Millisecond)
}

// Hang makes the standby seem to hang until Answer is called. The methods of r still reach the standby.
func (r *Replicated) Hang() {
	r.reads.Hold()
	r.hanging.Store(true)
}

// Answer ends Hang.
func (r *Replicated) Answer() {
	if r.hanging.Swap(false) {
		r.reads.Release()
	}
}

// Promote makes the standby a primary.
func (r *Replicated) Promote() {
	r.tb.Helper()
	require.Equal(r.tb, "true", r.text(r.standby.URL(), "SELECT pg_promote()::text"))
}

func (r *Replicated) start(name string) *postgres.Embedded {
	r.tb.Helper()
	server, err := postgres.StartEmbedded(r.tb.Context(), postgres.EmbeddedConfig{
		DataDir: filepath.Join(r.dir, name), BinDir: os.Getenv("DLQD_TEST_POSTGRES_BIN"), Throwaway: true,
		Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(r.tb, err)
	return server
}

// copyPrimary copies the primary's files for the standby, as the user that the servers run as.
func (r *Replicated) copyPrimary() {
	r.tb.Helper()
	of, err := os.Stat(filepath.Join(r.dir, "primary", "pgdata"))
	require.NoError(r.tb, err)
	stat, ok := of.Sys().(*syscall.Stat_t)
	require.True(r.tb, ok)
	to := filepath.Join(r.dir, "standby")
	require.NoError(r.tb, os.Mkdir(to, 0o700))
	require.NoError(r.tb, os.Chown(to, int(stat.Uid), int(stat.Gid)))
	binaries, err := postgres.FindBinaries(r.tb.Context(), os.Getenv("DLQD_TEST_POSTGRES_BIN"), 0)
	require.NoError(r.tb, err)
	from := parse(r.stream.URL)
	from.Path = "/postgres"
	cmd := exec.CommandContext(r.tb.Context(), binaries.Path("pg_basebackup"), //nolint:gosec // a test helper
		"--dbname", from.String(), "--pgdata", filepath.Join(to, "pgdata"), "--write-recovery-conf",
		"--checkpoint", "fast", "--no-sync")
	cmd.Dir = "/"
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stat.Uid, Gid: stat.Gid}}
	}
	out, err := cmd.CombinedOutput()
	require.NoError(r.tb, err, string(out))
}

// Lag stops the stream to the standby until Fail is called. The standby has everything that was committed before the
// time that Lag returns.
func (r *Replicated) Lag() time.Time {
	r.tb.Helper()
	at := time.Now()
	position := r.text(r.primary.URL(), "SELECT pg_current_wal_lsn()::text")
	require.Eventually(r.tb, func() bool {
		return r.text(r.standby.URL(), "SELECT (pg_last_wal_receive_lsn() >= '"+position+"')::text") == "true"
	}, time.Minute, time.Millisecond)
	r.stream.Hold()
	r.stopping = true
	return at
}

// Fail kills the primary and promotes the standby.
func (r *Replicated) Fail() {
	r.tb.Helper()
	raw, err := os.ReadFile(filepath.Join(r.dir, "primary", "pgdata", "postmaster.pid"))
	require.NoError(r.tb, err)
	pid, err := strconv.Atoi(strings.SplitN(string(raw), "\n", 2)[0])
	require.NoError(r.tb, err)
	require.NoError(r.tb, syscall.Kill(pid, syscall.SIGKILL))
	<-r.primary.Exited()
	r.Promote()
	r.resume() // the WAL that the stream held back arrives after the promotion
}

// Return starts the primary that Fail killed, as a standby that does not follow the new primary, and returns the URL of
// its database.
func (r *Replicated) Return() string {
	r.tb.Helper()
	require.NoError(r.tb, r.primary.StopWithin(time.Second)) // releases its directory
	path := filepath.Join(r.dir, "primary", "pgdata", "standby.signal")
	require.NoError(r.tb, os.WriteFile(path, nil, 0o600))
	of, err := os.Stat(filepath.Dir(path))
	require.NoError(r.tb, err)
	stat, ok := of.Sys().(*syscall.Stat_t)
	require.True(r.tb, ok)
	require.NoError(r.tb, os.Chown(path, int(stat.Uid), int(stat.Gid)))
	r.primary = r.start("primary")
	return WithDatabase(WithUser(r.primary.URL(), Role), "replicated")
}

func (r *Replicated) resume() {
	if r.stopping {
		r.stream.Release()
		r.stopping = false
	}
}

func (r *Replicated) exec(url, sql string) {
	r.tb.Helper()
	admin(r.tb.Context(), r.tb, url, sql)
}

func (r *Replicated) text(url, sql string) (text string) {
	r.tb.Helper()
	conn, err := pgx.Connect(r.tb.Context(), url)
	require.NoError(r.tb, err)
	defer func() { _ = conn.Close(context.WithoutCancel(r.tb.Context())) }()
	require.NoError(r.tb, conn.QueryRow(r.tb.Context(), sql).Scan(&text))
	return text
}
