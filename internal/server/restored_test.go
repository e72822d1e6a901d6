package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

// ledger is a receiver that counts the messages that it accepts. It refuses messages of the kinds in refuses.
type ledger struct {
	mu      sync.Mutex
	taken   map[string]int // by message id: how often it was accepted
	refuses map[string]int // by kind: the status of the answer
}

func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	l.mu.Lock()
	defer l.mu.Unlock()
	if status := l.refuses[r.Header.Get("Dlqd-Kind")]; status != 0 {
		w.WriteHeader(status)
		return
	}
	l.taken[r.Header.Get("Webhook-Id")]++
}

func (l *ledger) answer(kind string, status int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuses[kind] = status
}

// forget sets the counts of accepted messages to zero. The kinds in refuses stay refused.
func (l *ledger) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken = map[string]int{}
}

func (l *ledger) ids() (ids []string, most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.taken {
		ids, most = append(ids, id), max(most, n)
	}
	return ids, most
}

// cluster is a separate Postgres server that archives its WAL, with a database that a plain role
// owns.
type cluster struct {
	*testing.T

	embedded *postgres.Embedded
	dir      string
	archive  string // directory of WAL files
	bin      string // directory of the server's executables
	app      string // URL of the plain role
}

const plainRole = "team"

// newCluster starts a server and migrates a database that a plain role owns.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	found, err := postgres.FindBinaries(t.Context(), os.Getenv("DLQD_TEST_POSTGRES_BIN"), 0)
	require.NoError(t, err)
	// The path of t.TempDir is too long for a socket, and the server's user cannot enter it.
	dir, err := os.MkdirTemp("", "dlqd-restored-")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &cluster{T: t, dir: filepath.Join(dir, "one"), archive: filepath.Join(dir, "archive"), bin: found.Dir}
	c.start()
	require.NoError(t, os.Mkdir(c.archive, 0o777))
	require.NoError(t, os.Chmod(c.archive, 0o777))
	c.admin("ALTER SYSTEM SET archive_mode = on", "ALTER SYSTEM SET archive_command = 'cp %p "+c.archive+"/%f'")
	require.NoError(t, c.embedded.Stop())
	c.start()
	c.admin("CREATE ROLE "+plainRole+" LOGIN", "CREATE DATABASE app OWNER "+plainRole)
	c.app = c.url("app", plainRole)
	pool, err := postgres.Open(t.Context(), c.app, 4)
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, (&postgres.Migrator{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}).Up(t.Context()))
	return c
}

func (c *cluster) start() {
	c.Helper()
	embedded, err := postgres.StartEmbedded(c.Context(), postgres.EmbeddedConfig{
		DataDir: c.dir, BinDir: c.bin, Throwaway: true, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(c, err)
	c.embedded = embedded
	c.Cleanup(func() { _ = embedded.StopWithin(10 * time.Second) })
}

func (c *cluster) url(database, role string) string {
	return strings.NewReplacer("//dlqd@", "//"+role+"@", "/dlqd?", "/"+database+"?").Replace(c.embedded.URL())
}

// admin runs statements as the superuser.
func (c *cluster) admin(statements ...string) {
	c.Helper()
	conn, err := pgx.Connect(c.Context(), c.embedded.URL())
	require.NoError(c, err)
	defer func() { _ = conn.Close(context.WithoutCancel(c.Context())) }()
	for _, statement := range statements {
		_, err = conn.Exec(c.Context(), statement)
		require.NoError(c, err, statement)
	}
}

// copy takes a base backup into the data directory of a new cluster.
func (c *cluster) copy(name string, more ...string) *cluster {
	c.Helper()
	other := &cluster{T: c.T, dir: filepath.Join(filepath.Dir(c.dir), name), archive: c.archive, bin: c.bin}
	require.NoError(c, os.Mkdir(other.dir, 0o700))
	data := filepath.Join(other.dir, "pgdata")
	arguments := append([]string{
		"--pgdata", data, "--checkpoint", "fast", "--wal-method", "stream", "--dbname",
		c.embedded.URL(),
	}, more...)
	out, err := exec.CommandContext(c.Context(), filepath.Join(c.bin, "pg_basebackup"), arguments...).CombinedOutput()
	require.NoError(c, err, string(out))
	return other
}

// owned makes the user that runs the server of c the owner of the files of a copy.
func (c *cluster) owned(other *cluster) {
	c.Helper()
	info, err := os.Stat(filepath.Join(c.dir, "pgdata"))
	require.NoError(c, err)
	owner, ok := info.Sys().(*syscall.Stat_t)
	require.True(c, ok)
	require.NoError(c, filepath.WalkDir(filepath.Join(other.dir, "pgdata"),
		func(path string, _ fs.DirEntry, err error) error {
			if err != nil || os.Geteuid() != 0 {
				return err
			}
			return os.Lchown(path, int(owner.Uid), int(owner.Gid))
		}))
}

// configure adds lines to the configuration of a stopped server.
func (c *cluster) configure(lines ...string) {
	c.Helper()
	file, err := os.OpenFile(filepath.Join(c.dir, "pgdata", "postgresql.auto.conf"), os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(c, err)
	_, err = io.WriteString(file, strings.Join(lines, "\n")+"\n")
	require.NoError(c, err)
	require.NoError(c, file.Close())
}

// writable waits until a server has left recovery.
func (c *cluster) writable() {
	c.Helper()
	require.Eventually(c, func() bool {
		conn, err := pgx.Connect(c.Context(), c.embedded.URL())
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close(c.Context()) }()
		var recovers bool
		return conn.QueryRow(c.Context(), "SELECT pg_is_in_recovery()").Scan(&recovers) == nil && !recovers
	}, 5*time.Minute, 50*time.Millisecond)
}

// restoredBundle starts a dlqd on a cluster.
func restoredBundle(t *testing.T, url string, l *ledger) *bundle {
	t.Helper()
	b := setup(t, options{receiver: l.ServeHTTP, config: func(c *server.Config) {
		c.DatabaseURL, c.PollInterval = url, 100*time.Millisecond
		c.Policy.Queues["default"].Backoff = policy.Backoff{Kind: policy.BackoffFixed, Delay: time.Second}
		c.Policy.Queues["default"].MaxAttempts = 100 // order.late must still have attempts when the backup ends
	}})
	b.url = url
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	b.pool = pool
	return b
}

// wholeHealth returns the status and body of /api/health. Unlike call, it accepts the status 503.
func (b *bundle) wholeHealth() (status int, document map[string]any) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, b.base+"/api/health", nil)
	require.NoError(b, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	defer func() { _ = response.Body.Close() }()
	require.NoError(b, json.NewDecoder(response.Body).Decode(&document))
	return response.StatusCode, document
}

func (b *bundle) send(id, kind string) {
	b.Helper()
	status, out, _ := b.call("POST", "/api/messages",
		fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": %q, "payload": 1}`, id, kind))
	require.Less(b, status, 300, out)
}

func (b *bundle) awaitCount(n int, sql string) {
	b.Helper()
	require.Eventually(b, func() bool {
		var found int
		return b.pool.QueryRow(b.Context(), sql).Scan(&found) == nil && found == n
	}, 5*time.Minute, 50*time.Millisecond, "%d: %s", n, sql)
}

func (b *bundle) awaitTaken(l *ledger, n int) {
	b.Helper()
	require.Eventually(b, func() bool { ids, _ := l.ids(); return len(ids) >= n }, 5*time.Minute, 20*time.Millisecond)
}

// turns waits until each of the named loops has had a successful turn that began after the call.
func (b *bundle) turns(names ...string) {
	b.Helper()
	for range 2 {
		began := time.Now()
		for _, name := range names {
			require.Eventually(b, func() bool {
				_, health := b.wholeHealth()
				for _, p := range health["parts"].([]any) {
					part := p.(map[string]any)
					if part["name"] == name && part["lastSuccess"] != nil {
						at, err := time.Parse(time.RFC3339Nano, part["lastSuccess"].(string))
						return err == nil && at.After(began)
					}
				}
				return false
			}, 5*time.Minute, 50*time.Millisecond, name)
		}
	}
}

// A base backup and WAL are restored to the middle of a replay run. Until an operator resumes sending, dlqd sends
// nothing automatically that the receiver may already have.
func TestRestored_HoldsWhatMayHaveBeenSent(t *testing.T) {
	t.Parallel()
	const entries = 40
	c, l := newCluster(t), &ledger{
		taken: map[string]int{}, refuses: map[string]int{
			"order.placed": http.StatusUnprocessableEntity, "order.late": http.StatusInternalServerError,
		},
	}
	before := restoredBundle(t, c.app, l)
	for i := range entries {
		before.send(fmt.Sprintf("m%d", i), "order.placed")
	}
	before.awaitCount(entries, "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'")
	backup := c.copy("two")
	c.owned(backup)

	l.answer("order.placed", 0)
	status, answer, _ := before.call("POST", "/api/dlq/replay",
		`{"filter": {"status": ["dlq_manual"]}, "rate": 10, "actor": "kim"}`)
	require.Less(t, status, 300, answer)
	before.send("late", "order.late") // fails, and waits for its next attempt
	before.awaitCount(1, `SELECT count(*) FROM river_job WHERE state IN ('retryable', 'available', 'scheduled')
		AND args ->> 'kind' = 'order.late'`)
	before.awaitTaken(l, 5)
	c.admin("SELECT pg_create_restore_point('middle')")
	ids, _ := l.ids()
	require.Less(t, len(ids), entries)
	l.answer("order.late", 0)
	before.awaitTaken(l, entries+1)
	before.awaitCount(1, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed'")
	before.stop()
	c.admin("SELECT pg_switch_wal()")
	require.NoError(t, c.embedded.Stop()) // archives the last WAL segment

	backup.configure("restore_command = 'cp "+c.archive+"/%f %p'", "recovery_target_name = 'middle'",
		"recovery_target_action = 'promote'", "archive_mode = off")
	require.NoError(t, os.WriteFile(filepath.Join(backup.dir, "pgdata", "recovery.signal"), nil, 0o644))
	backup.start()
	backup.writable()
	l.forget()

	after := restoredBundle(t, backup.url("app", plainRole), l)
	require.Equal(t, 1, after.count(`SELECT count(*) FROM dlq.automatic_switches WHERE scope = 'stop' AND name = 'restored'
		AND note LIKE 'the server is on timeline 2, and was on 1 before: %; its last record is of %'`))
	// The test does at once what River's rescuer would do after minutes.
	after.exec("UPDATE river_job SET state = 'available' WHERE state = 'running' AND args ->> 'kind' <> 'order.new'")
	after.send("new", "order.new")
	after.awaitTaken(l, 1) // new messages are delivered
	after.awaitCount(1, `SELECT count(*) FROM river_job WHERE state = 'scheduled'
		AND metadata @> '{"dlq:held": "restored"}' AND args ->> 'kind' = 'order.late'`)
	after.turns("replay-runs", "dlq-workers", "gates", "observed")
	ids, _ = l.ids()
	require.Equal(t, []string{"new"}, ids, "nothing is sent automatically")

	_, document, _ := after.call("GET", "/api/dlq/restored", "")
	require.Contains(t, document["hold"].(map[string]any)["note"], "timeline 2")
	text := fmt.Sprint(document["mayRepeat"])
	require.Contains(t, text, "what:replay run")
	require.Contains(t, text, "what:message in River's queues")
	_, page, _ := after.call("GET", "/system", "")
	require.Contains(t, page["text"], "may be sent twice")
	require.Contains(t, page["text"], "Resume sending")
	runID := answer["run"].(map[string]any)["id"].(string)
	_, run, _ := after.call("GET", "/api/dlq/replays/"+runID, "")
	require.Equal(t, "running", run["status"])
	require.Equal(t, true, run["held"])

	// dlqd sends an operator's replay of a single entry.
	var left string
	require.NoError(t, after.pool.QueryRow(t.Context(), `SELECT entry_id FROM dlq.replay_run_entries WHERE job_id IS NULL
		AND outcome IS NULL ORDER BY entry_id DESC LIMIT 1`).Scan(&left))
	status, out, _ := after.call("POST", "/api/dlq/entries/"+left+"/replay", `{"actor": "kim"}`)
	require.Less(t, status, 300, out)
	require.Contains(t, out["warning"], "restored")
	after.awaitTaken(l, 2)

	status, out, _ = after.call("POST", "/api/dlq/restored/resume",
		`{"actor": "kim", "note": "the receiver drops repeats"}`)
	require.Equal(t, http.StatusOK, status, out)
	after.awaitCount(1, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed'")
	after.awaitCount(0, "SELECT count(*) FROM river_job WHERE args ->> 'kind' = 'order.late' AND state <> 'completed'")
	require.Equal(t, 1, after.count(`SELECT count(*) FROM dlq.acts WHERE subject = 'server' AND act = 'acknowledged'
		AND actor = 'kim' AND note = 'the receiver drops repeats'`))

	// After the acknowledgement, a restarted process accepts the server.
	after.stop()
	again := restoredBundle(t, backup.url("app", plainRole), l)
	require.Zero(t, again.count("SELECT count(*) FROM dlq.automatic_switches"))
}

// A standby is promoted while dlqd runs. The standby has the last write of this dlqd, so dlqd continues without an
// operator.
func TestRestored_ContinuesAfterAPromotion(t *testing.T) {
	t.Parallel()
	c, l := newCluster(t), &ledger{taken: map[string]int{}, refuses: map[string]int{}}
	standby := c.copy("two", "--write-recovery-conf")
	c.owned(standby)
	standby.start()
	both := strings.Replace(c.app, "host=", "host="+hostOf(t, standby)+",", 1) + "&target_session_attrs=read-write"
	b := restoredBundle(t, both, l)
	b.send("m1", "order.placed")
	b.awaitTaken(l, 1)
	// Wait until the standby streams: the primary's clean stop below then sends it all WAL.
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), standby.embedded.URL())
		require.NoError(t, err)
		defer func() { _ = conn.Close(t.Context()) }()
		var streams bool
		return conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')").Scan(
			&streams) == nil && streams
	}, 5*time.Minute, 50*time.Millisecond)
	require.NoError(t, c.embedded.Stop()) // a clean stop sends all WAL to the standby
	standby.admin("SELECT pg_promote()")
	standby.writable()
	b.awaitCount(1, "SELECT count(*) FROM dlq.acts WHERE subject = 'server' AND act = 'promoted'")
	b.awaitCount(0, "SELECT count(*) FROM dlq.automatic_switches")
	b.send("m2", "order.placed")
	b.awaitTaken(l, 2)
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.settings WHERE key = 'server'
		AND value::jsonb ->> 'timeline' = '2'`))
}

func hostOf(t *testing.T, c *cluster) string {
	t.Helper()
	config, err := pgx.ParseConfig(c.embedded.URL())
	require.NoError(t, err)
	return config.Host
}

// Besides a new timeline, dlqd recognizes a restore by another server, by another database, by tables that come from a
// dump, and by the loss of the last write of a process. An operator's stop of automatic redelivery stays in force.
func TestRestored_DetectsAndReportsARestore(t *testing.T) {
	t.Parallel()
	for name, becomes := range map[string]struct{ sql, note string }{
		"another server": {
			`UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{system}', '"1"') WHERE key = 'server'`,
			"this is another server (system identifier ",
		},
		"another database": {
			`UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{database}', '1') WHERE key = 'server'`,
			"this is another database of the same server",
		},
		"a dump": {
			`UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{table}', '1') WHERE key = 'server'`,
			"its tables were restored from a dump",
		},
		"a lost mark":    {`UPDATE dlq.processes SET mark = 0`, "is missing: the database was set back while it ran"},
		"a lost process": {`DELETE FROM dlq.processes`, "is missing: the database was set back while it ran"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &lockedBuffer{}
			b := setup(t, options{config: func(c *server.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) }})
			b.awaitCount(1, "SELECT count(*) FROM dlq.processes WHERE mark > 1")
			b.exec("SELECT dlq.stop_automatic('kim', 'a release')")
			b.exec(becomes.sql)
			b.awaitCount(1, "SELECT count(*) FROM dlq.automatic_switches WHERE name = 'restored'")
			for _, path := range []string{"/api/dlq/entries", "/api/dlq/stats"} {
				_, document, _ := b.call("GET", path, "")
				stopped := document["automaticStopped"].(map[string]any)
				require.Contains(t, stopped["note"], becomes.note)
				require.Equal(t, true, stopped["restored"])
				require.Equal(t, true, stopped["byPerson"], "the operator's stop stays in force")
			}
			code, health := b.wholeHealth()
			require.Equal(t, http.StatusServiceUnavailable, code)
			require.Contains(t, fmt.Sprint(health["parts"]), "the database was restored: replay runs")
			logged := regexp.MustCompile(`level=ERROR msg="the database was restored: .* reason=".*` +
				regexp.QuoteMeta(becomes.note))
			require.Eventually(t, func() bool { return logged.MatchString(log.String()) }, 5*time.Minute, 10*time.Millisecond)
			_, page, _ := b.call("GET", "/queues", "")
			require.Contains(t, page["text"], "database restored: deliveries are held", "every page says so")
			code, _, _ = b.call("GET", "/readyz", "")
			require.Equal(t, http.StatusOK, code, "messages are accepted and delivered")
			require.Eventually(t, func() bool {
				_, metrics, _ := b.call("GET", "/metrics", "")
				return strings.Contains(metrics["text"].(string), "dlqd_restored 1\n")
			}, 5*time.Minute, 100*time.Millisecond)

			code, out, _ := b.call("POST", "/api/dlq/automatic/resume", `{}`)
			require.Equal(t, http.StatusOK, code, out)
			stopped := out["stopped"].(map[string]any)
			require.Equal(t, true, stopped["restored"], "resume lifts only the operator's stop")
			require.NotContains(t, stopped, "byPerson")
			code, out, _ = b.call("POST", "/api/dlq/restored/resume", `{"dryRun": true}`)
			require.Equal(t, http.StatusOK, code, out)
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.automatic_switches"))
			code, out, _ = b.call("POST", "/api/dlq/restored/resume", `{"actor": "kim"}`)
			require.Equal(t, http.StatusOK, code, out)
			require.Zero(t, b.count("SELECT count(*) FROM dlq.automatic_switches"))
			b.turns("server")
			require.Zero(t, b.count("SELECT count(*) FROM dlq.automatic_switches"), "the server is the known one now")
			code, health = b.wholeHealth()
			require.Equal(t, http.StatusOK, code, health)
		})
	}
}
