// Package postgrestest gives each test its own database on a real Postgres. A role without special privileges owns the
// database: like the role of a user of dlqd, it is no superuser and cannot create roles or databases.
//
// The server is the one in DLQD_TEST_DATABASE_URL (make test starts one for all packages). If that variable is not set,
// each test binary starts and stops a server.
package postgrestest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/dlqd/dlqd/db"
	"github.com/dlqd/dlqd/internal/postgres"
)

// URLVariable names the environment variable with the server's URL.
const URLVariable = "DLQD_TEST_DATABASE_URL"

// Role owns the tests' databases.
const Role = "dlqd_test"

// MaxConns is the pool size of servers under test. A new session of a new database uses 0.2 s of processor time until
// the statements of dlqd's loops are planned, and a larger pool would use all its sessions at the start.
const MaxConns = 6

var server struct {
	sync.Mutex

	embedded *postgres.Embedded
	dir      string
	url      string
	err      error
	once     sync.Once
	roles    sync.Once
	migrated templateDatabase // with River and dlqd
	attached templateDatabase // with dlqd attached to an application's River
}

// templateDatabase is a database that is copied for each test.
type templateDatabase struct {
	once sync.Once
	name string // "" until it exists
}

// Main runs a package's tests, and stops the server if the tests started one.
func Main(m *testing.M) {
	code := m.Run()
	Stop()
	os.Exit(code)
}

// Start returns the URL of the server for tests: the value of URLVariable or, if that is not set, the URL of a
// throwaway server that the first call starts.
func Start(ctx context.Context) (string, error) {
	server.once.Do(func() {
		if server.url = os.Getenv(URLVariable); server.url != "" {
			return
		}
		if server.dir, server.err = os.MkdirTemp(dir(), "dlqd-test-"); server.err != nil {
			return
		}
		if server.embedded, server.err = postgres.StartEmbedded(ctx, postgres.EmbeddedConfig{
			DataDir: server.dir, BinDir: os.Getenv("DLQD_TEST_POSTGRES_BIN"),
			Throwaway: true, Logger: slog.New(slog.DiscardHandler),
		}); server.err == nil {
			server.url = server.embedded.URL()
		}
	})
	return server.url, server.err
}

// dir returns the directory for a server's files: /dev/shm if at least 8 GiB are free there, because each test creates
// and deletes hundreds of files; otherwise "", the default for temporary files.
func dir() string {
	const memory, plenty = "/dev/shm", 8 << 30
	var found unix.Statfs_t
	if unix.Statfs(memory, &found) == nil && found.Type == unix.TMPFS_MAGIC && found.Bavail*uint64(found.Bsize) >= plenty {
		return memory
	}
	return ""
}

// Stop stops the server that Start started.
func Stop() {
	if server.embedded != nil {
		_ = server.embedded.Stop()
	}
	if server.dir != "" {
		_ = os.RemoveAll(server.dir)
	}
}

// Superuser returns url with the server's superuser as its user, for steps of an administrator in a test.
func Superuser(tb testing.TB, url string) string {
	tb.Helper()
	base, err := Start(tb.Context())
	require.NoError(tb, err)
	return WithUser(url, user(base))
}

// Empty returns the URL of a new, empty database.
func Empty(tb testing.TB) string {
	tb.Helper()
	return create(tb, "template0")
}

// URL returns the URL of a new database with River's schema and dlqd's.
func URL(tb testing.TB) string {
	tb.Helper()
	return create(tb, migrated(tb))
}

// Pool returns a pool on a new database with River's schema and dlqd's.
func Pool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return Open(tb, URL(tb))
}

// Open opens a pool for the length of the test.
func Open(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	pool, err := postgres.Open(tb.Context(), url, 10)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

func create(tb testing.TB, from string) string {
	tb.Helper()
	base := withRoles(tb)
	name := createDatabase(tb, base, "test_"+randomName(), from, Role)
	if file := os.Getenv(FunctionsVariable); file != "" {
		tb.Cleanup(func() { recordFunctions(tb, WithDatabase(base, name), file) })
	}
	return WithDatabase(WithUser(base, Role), name)
}

// createDatabase creates a database, which is dropped at the end of the test, and returns its name. For a template of
// hundreds of small files, FILE_COPY takes half of the processor time of WAL_LOG, the default.
func createDatabase(tb testing.TB, base, name, from, owner string) string {
	tb.Helper()
	admin(tb.Context(), tb, base,
		fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s OWNER %s STRATEGY file_copy", name, from, owner))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(tb.Context()), tb, base, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	})
	return name
}

// withRoles creates the roles that all tests share, once per server, and returns the server's URL.
func withRoles(tb testing.TB) string {
	tb.Helper()
	base, err := Start(tb.Context())
	require.NoError(tb, err)
	server.roles.Do(func() {
		admin(tb.Context(), tb, base, `DO $$
			DECLARE v_role text;
			BEGIN
				PERFORM pg_advisory_xact_lock(713);
				FOREACH v_role IN ARRAY ARRAY['`+Role+` LOGIN', 'dlq_reader', 'dlq_operator', 'dlq_admin',
					'`+sharedGuestRoles.owner+` LOGIN', '`+sharedGuestRoles.app+` LOGIN', '`+sharedGuestRoles.dlqd+` LOGIN',
					'`+sharedGuestRoles.operator+` LOGIN IN ROLE dlq_operator'] LOOP
					IF NOT EXISTS (SELECT FROM pg_roles
						WHERE rolname = split_part(v_role, ' ', 1)) THEN EXECUTE 'CREATE ROLE ' || v_role; END IF;
				END LOOP;
			END $$`)
	})
	return base
}

// sourceHash returns a hash of the sources of a template database. The hash is part of the template's name: a server
// may outlive a test binary, and a binary with changed SQL must create a new template instead of copying the old one.
func sourceHash(migrations, code fs.FS, more ...string) (string, error) {
	hash := sha256.New()
	add := func(text string) { _, _ = fmt.Fprintf(hash, "%d %s", len(text), text) } // a hash never fails to write
	for _, files := range []fs.FS{migrations, code} {
		if err := fs.WalkDir(files, ".", func(path string, file fs.DirEntry, err error) error {
			if err != nil || file.IsDir() {
				return err
			}
			raw, err := fs.ReadFile(files, path)
			add(path)
			add(string(raw))
			return err
		}); err != nil {
			return "", err
		}
	}
	for _, text := range more {
		add(text)
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

// riverMigrations returns the statements that create River's newest schema.
func riverMigrations() ([]string, error) {
	migrator, err := rivermigrate.New(riverpgxv5.New(nil), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	var all []string
	for _, migration := range migrator.AllVersions() {
		all = append(all, migration.SQLUp)
	}
	return all, nil
}

// migrated returns the name of the template database with River and dlqd.
func migrated(tb testing.TB) string {
	tb.Helper()
	base := withRoles(tb)
	return template(tb, &server.migrated, "template_", Role, func(database string) {
		pool, err := postgres.Open(tb.Context(), WithDatabase(WithUser(base, Role), database), 4)
		require.NoError(tb, err)
		defer pool.Close()
		migrator := &postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
		require.NoError(tb, migrator.Up(tb.Context()))
		allowSlowCapture(tb, pool)
	})
}

// ExecUndisturbed executes a statement that takes several locks. It repeats the statement after a deadlock.
func ExecUndisturbed(tb testing.TB, pool *pgxpool.Pool, sql string) {
	tb.Helper()
	var err error
	require.Eventually(tb, func() bool {
		_, err = pool.Exec(tb.Context(), sql)
		return !postgres.IsCollision(err)
	}, 5*time.Minute, time.Millisecond)
	require.NoError(tb, err, sql)
}

// RefreshRollups is a statement that refreshes the rollups. While another session refreshes them, dlq.refresh_rollups
// does nothing and returns null, so the statement repeats the call.
const RefreshRollups = "DO $$ BEGIN WHILE dlq.refresh_rollups() IS NULL LOOP PERFORM pg_sleep(0.01); END LOOP; END $$"

// allowSlowCapture raises capture's time limit, so that capture skips no job on a busy machine. Tests of the limit set
// a limit of their own.
func allowSlowCapture(tb testing.TB, pool *pgxpool.Pool) {
	tb.Helper()
	_, err := pool.Exec(tb.Context(), "SELECT dlq.put_capture('on', '1 min')")
	require.NoError(tb, err)
}

// template returns the name of a template database. If the server does not have the template yet, build fills it. Test
// binaries may share a server; an advisory lock lets only one of them create the template.
func template(tb testing.TB, of *templateDatabase, prefix, owner string, build func(database string)) string {
	tb.Helper()
	base := withRoles(tb)
	of.once.Do(func() {
		rivers, err := riverMigrations()
		require.NoError(tb, err)
		hash, err := sourceHash(db.Migrations, db.Code, append(rivers, db.Triggers, db.RiverTriggers)...)
		require.NoError(tb, err)
		ctx := tb.Context()
		conn, err := pgx.Connect(ctx, base)
		require.NoError(tb, err)
		defer func() { _ = conn.Close(ctx) }()
		_, err = conn.Exec(ctx, "SELECT pg_advisory_lock(712)")
		require.NoError(tb, err)
		var has bool
		require.NoError(tb, conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
			prefix+hash).Scan(&has))
		if !has {
			building := "building_" + randomName()
			_, err = conn.Exec(ctx, "CREATE DATABASE "+building+" TEMPLATE template0 OWNER "+owner)
			require.NoError(tb, err)
			build(building)
			_, err = conn.Exec(ctx, "ALTER DATABASE "+building+" RENAME TO "+prefix+hash)
			require.NoError(tb, err)
		}
		of.name = prefix + hash
	})
	return of.name
}

// admins are idle sessions of the server's superuser. A new session would take 6 ms of processor time; a copy of the
// template takes 35 ms.
var admins = make(chan *pgx.Conn, 4)

func admin(ctx context.Context, tb testing.TB, base, statement string) {
	tb.Helper()
	conn, err := adminSession(ctx, base)
	require.NoError(tb, err)
	defer func() {
		if base == server.url && !conn.IsClosed() {
			select {
			case admins <- conn:
				return
			default:
			}
		}
		_ = conn.Close(ctx)
	}()
	for range 50 { // a template cannot be copied while another test copies it
		if _, err = conn.Exec(ctx, statement); err == nil {
			return
		}
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "55006" {
			break
		}
	}
	require.NoError(tb, err)
}

func adminSession(ctx context.Context, base string) (*pgx.Conn, error) {
	if base == server.url {
		select {
		case conn := <-admins:
			if conn.Ping(ctx) == nil { // a test may have ended the session
				return conn, nil
			}
		default:
		}
	}
	return pgx.Connect(ctx, base)
}

func randomName() string {
	raw := make([]byte, 6)
	_, _ = rand.Read(raw) // never fails
	return hex.EncodeToString(raw)
}

// WithDatabase returns base with another database name.
func WithDatabase(base, name string) string {
	u := parse(base)
	u.Path = "/" + name
	return u.String()
}

// WithUser returns base with another user. The tests' server requires no password.
func WithUser(base, name string) string {
	u := parse(base)
	u.User = url.User(name)
	return u.String()
}

func user(base string) string { return parse(base).User.Username() }

func parse(base string) *url.URL {
	u, err := url.Parse(base)
	if err != nil {
		panic(err)
	}
	return u
}
