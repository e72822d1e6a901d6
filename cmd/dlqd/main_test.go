package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// program is the path of the dlqd binary. TestMain builds it once, in a directory that any user can read.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "dlqd-e2e-")
	if err != nil {
		panic(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "dlqd")
	build := exec.Command("go", "build", "-ldflags=-w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as "make build" does
	if out, err := build.CombinedOutput(); err != nil {
		panic(string(out))
	}
	code := m.Run()
	postgrestest.Stop()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// run runs dlqd and waits for its exit.
func run(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runProgram(t, program, args...)
}

// runProgram runs dlqd from the binary program, such as another version, and waits for its exit.
func runProgram(t *testing.T, program string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// ok runs dlqd, requires that it succeeds, and returns its standard output.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, code := run(t, args...)
	require.Zero(t, code, "dlqd %s\n%s%s", strings.Join(args, " "), stdout, stderr)
	return stdout
}

// served is a running "dlqd serve".
type served struct {
	t   *testing.T
	cmd *exec.Cmd
	api string
	log *syncBuffer

	stderr io.Closer
	read   chan struct{} // closed when the test has read all of the log
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

var servesAt = regexp.MustCompile(`api(?:=|":)\["?(http://[^\]\s"]+)`)

// serve starts dlqd on a free port and without an archive.
func serve(t *testing.T, args ...string) *served {
	t.Helper()
	return serveOnly(t, append([]string{"--listen", "127.0.0.1:0", "--archive", "none"}, args...)...)
}

func serveOnly(t *testing.T, args ...string) *served {
	t.Helper()
	return serveProgram(t, program, args...)
}

// serveProgram starts "dlqd serve" from the binary program, such as another version.
func serveProgram(t *testing.T, program string, args ...string) *served {
	t.Helper()
	s := &served{t: t, log: &syncBuffer{}, read: make(chan struct{})}
	s.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), program,
		append([]string{"serve"}, args...)...)
	pipe, err := s.cmd.StderrPipe()
	require.NoError(t, err)
	s.stderr = pipe
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() { _ = s.cmd.Process.Signal(syscall.SIGTERM); _ = s.cmd.Wait() })
	ready := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(pipe)
		for lines.Scan() {
			_, _ = fmt.Fprintln(s.log, lines.Text())
			if match := servesAt.FindStringSubmatch(lines.Text()); match != nil {
				ready <- match[1]
			}
		}
		close(ready)
		close(s.read)
	}()
	select {
	case s.api = <-ready:
	case <-time.After(5 * time.Minute):
	}
	require.NotEmpty(t, s.api, s.log.String())
	return s
}

// stop sends a signal and returns the exit code.
func (s *served) stop(signal syscall.Signal) int {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(signal))
	select { // Wait closes the pipe, and unread output would be lost
	case <-s.read:
	case <-time.After(time.Minute):
	}
	_ = s.cmd.Wait()
	return s.cmd.ProcessState.ExitCode()
}

func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dlqd-data-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func embedded(t *testing.T, dir string) []string {
	t.Helper()
	return []string{"--data-dir", dir, "--postgres-bin", os.Getenv("DLQD_TEST_POSTGRES_BIN")}
}

func startReceiver(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func TestCommands_CallAPI(t *testing.T) {
	t.Parallel()
	receiver := startReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); !bytes.Contains(body, []byte("mended")) {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	s := serve(t, "--database-url", postgrestest.URL(t), "--destination", receiver)
	api := []string{"--api-url", s.api}
	with := func(args ...string) []string { return append(args, api...) }

	var ids []string
	for i := range 4 {
		out := ok(t, with("send", "--kind", "payment.captured", "--message-id", fmt.Sprintf("m%d", i), "--source",
			"shop\x1b[31m", "--tag", "abc", `{"amount": 1}`)...)
		require.Contains(t, out, fmt.Sprintf("message m%d is accepted, as job ", i))
	}
	require.Contains(t, ok(t, with("send", "--kind", "payment.captured", "--message-id", "m0", "--source", "shop\x1b[31m",
		"--tag", "abc", `{"amount": 1}`)...), "a duplicate")
	require.Eventually(t, func() bool {
		var page struct {
			Entries []struct{ ID string }
		}
		require.NoError(t, json.Unmarshal([]byte(ok(t, with("list", "--json", "--status", "dlq_manual")...)), &page))
		ids = nil
		for _, e := range page.Entries {
			ids = append(ids, e.ID)
		}
		return len(ids) == 4
	}, 5*time.Minute, 50*time.Millisecond)

	list := ok(t, with("list", "--error-class", "validation", "--limit", "2")...)
	require.Contains(t, list, "HTTP_422")
	require.Contains(t, list, ids[0])
	require.NotContains(t, list, ids[3])
	require.NotContains(t, list, "PARTITION", "the entries are not of a source")
	show := ok(t, with("show", ids[0])...)
	require.Contains(t, show, "class validation (rule http-status) needs a person")
	require.NotContains(t, show, "\x1b", "untrusted text has no control characters")

	require.Contains(t, ok(t, with("replay", ids[0], "--payload", `{"amount": "mended"}`, "--note", "mended")...),
		"dlq_processing, with job ")
	require.Contains(t, ok(t, with("discard", ids[1], "--note", "not wanted")...), "dlq_archived")
	require.Contains(t, ok(t, with("resolve", ids[2])...), "dlq_resolved")
	require.Contains(t, ok(t, with("unpark", ids[3])...), "dlq_pending")
	_, stderr, code := run(t, with("resolve", ids[1])...)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "cannot resolve from dlq_archived (allowed: dlq_manual, dlq_returned)")
	require.Regexp(t, ` discarded it at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: "not wanted"\. Allowed from dlq_archived: `,
		stderr)
	require.Contains(t, ok(t, with("stats")...), "last 24 hours: 4 captured")
	require.True(t, json.Valid([]byte(ok(t, with("stats", "--json")...))))

	_, stderr, code = run(t, "list", "--api-url", "http://127.0.0.1:1")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `is "dlqd serve" running there?`)
	require.Zero(t, s.stop(syscall.SIGTERM), s.log.String())
	require.Contains(t, s.log.String(), "clean=true")
}

func TestServe_ExitCodes(t *testing.T) {
	t.Parallel()
	_, stderr, code := run(t, "serve", "--no-such-flag")
	require.Equal(t, 2, code, stderr)
	for _, args := range [][]string{
		{"no-such-command"},
		{"show"},
		{"serve", "now"},
		{"send", "{}"},
		{"attach"},
		{"serve", "--schema", "A b"},
	} {
		_, stderr, code = run(t, args...)
		require.Equal(t, 2, code, "%v: %s", args, stderr)
	}
	_, stderr, code = run(t, "serve", "--database-url", postgrestest.Empty(t))
	require.Equal(t, 3, code, stderr)
	require.Contains(t, stderr, "dlqd migrate up")
	_, stderr, code = run(t, "serve", "--data-dir", dataDir(t), "--postgres-bin", t.TempDir())
	require.Equal(t, 6, code, stderr)
	require.Contains(t, stderr, "Install it with")
	_, stderr, code = run(t, "serve", "--database-url", "postgres://u:hunter2@127.0.0.1:1/x?connect_timeout=2",
		"--database-wait", "1500ms")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "waiting for the database, which does not answer")
	require.NotContains(t, stderr, "hunter2")
	help, _, _ := run(t, "serve", "--help")
	require.Contains(t, help, "DATABASE_URL")
}

// TestServe_SecondSignalStopsImmediately checks that dlqd, after a second signal, does not wait for a receiver that
// hangs, and that the interrupted job runs again.
func TestServe_SecondSignalStopsImmediately(t *testing.T) {
	t.Parallel()
	arrived := make(chan struct{}, 10)
	receiver := startReceiver(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	url := postgrestest.URL(t)
	s := serve(t, "--database-url", url, "--destination", receiver, "--stop-timeout", "5m")
	ok(t, "send", "--api-url", s.api, "--kind", "k", "1")
	<-arrived
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { // the stop has begun
		response, err := http.Get(s.api + "/livez")
		if err == nil {
			_ = response.Body.Close()
		}
		return err != nil
	}, 5*time.Minute, 5*time.Millisecond)
	require.Equal(t, 5, s.stop(syscall.SIGTERM), s.log.String())
	s = serve(t, "--database-url", url, "--destination", receiver)
	<-arrived
	require.NoError(t, s.cmd.Process.Kill())
}

func TestServe_EmbeddedPostgres(t *testing.T) {
	t.Parallel()
	parent := dataDir(t)
	require.NoError(t, os.Chmod(parent, 0o755)) // the server runs as another user
	dir := filepath.Join(parent, "my data, and more")
	s := serve(t, embedded(t, dir)...)
	_, stderr, code := run(t, append([]string{"serve", "--listen", "127.0.0.1:0"}, embedded(t, dir)...)...)
	require.Equal(t, 4, code)
	require.Contains(t, stderr, "is in use by dlqd with process id "+strconv.Itoa(s.cmd.Process.Pid)+
		", which serves "+s.api)

	psql := append(append([]string{"psql"}, embedded(t, dir)...), "-Atc", "SELECT count(*) FROM dead_letter_queue")
	if os.Getenv("DLQD_TEST_POSTGRES_BIN") != "" { // that directory has only the server; psql is elsewhere
		psql = []string{"psql", "-Atc", "SELECT count(*) FROM dead_letter_queue", "--data-dir", dir}
	}
	require.Equal(t, "0\n", ok(t, psql...))
	require.Contains(t, ok(t, append([]string{"migrate", "status"}, embedded(t, dir)...)...), "up to date")
	require.Zero(t, s.stop(syscall.SIGINT), s.log.String())
	require.Contains(t, ok(t, append([]string{"migrate", "status"}, embedded(t, dir)...)...), "up to date",
		"migrate status starts the server")
}

// TestServe_SurvivesAClosedLog checks that serve continues after the program that reads the log has ended (dlqd serve
// 2>&1 | head), and that serve, when it stops, also stops its Postgres.
func TestServe_SurvivesAClosedLog(t *testing.T) {
	t.Parallel()
	parent := dataDir(t)
	require.NoError(t, os.Chmod(parent, 0o755)) // the server runs as another user
	dir := filepath.Join(parent, "data")
	s := serve(t, embedded(t, dir)...)
	require.NoError(t, s.stderr.Close())
	ok(t, "log-level", "debug", "--api-url", s.api)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGHUP)) // makes dlqd write to the log
	ok(t, "send", "--api-url", s.api, "--kind", "k", "1")
	require.Zero(t, s.stop(syscall.SIGTERM), "not ended by SIGPIPE")
	require.NoFileExists(t, filepath.Join(dir, "pgdata", "postmaster.pid"), "Postgres has stopped")
}

// TestPsql_HidesPassword checks that the password is not among the arguments of psql, because other users of the
// machine can read the arguments.
func TestPsql_HidesPassword(t *testing.T) {
	t.Parallel()
	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, "psql"),
		[]byte("#!/bin/sh\nprintf '%s\\n' \"$@\"; echo \"password $PGPASSWORD\"\n"), 0o700))
	psql := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), program, append([]string{"psql"}, args...)...)
		cmd.Env = append(os.Environ(), "DLQD_DATABASE_URL=postgres://ann:hunter2@db/x?pool_max_conns=3",
			"PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	const to = "--dbname\npostgres://ann@db/x\n"
	require.Equal(t, to+"-c\nSELECT 1\npassword hunter2\n", psql("-c", "SELECT 1"))
	require.Equal(t, to+"-c\nSELECT 1\n-At\npassword hunter2\n", psql("-c", "SELECT 1", "--schema", "dlq", "-At",
		"--river-schema=public"))
	require.Equal(t, to+"-c\n--schema\n-f\n--\npassword hunter2\n", psql("--", "-c", "--schema", "-f", "--"))
	require.Equal(t, to+"-c\n--schema\npassword hunter2\n", psql("-c", "--schema"))
	require.Contains(t, psql("--help"), "Arguments that are not flags of this command go to psql")
}

func TestMigrate_UnprivilegedUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // not root: all other tests run as a normal user
	}
	nobody, err := user.Lookup("nobody")
	require.NoError(t, err)
	uid, err := strconv.Atoi(nobody.Uid)
	require.NoError(t, err)
	gid, err := strconv.Atoi(nobody.Gid)
	require.NoError(t, err)
	dir := dataDir(t)
	require.NoError(t, os.Chown(dir, uid, gid))
	cmd := exec.CommandContext(t.Context(), program, append([]string{"migrate", "up"}, embedded(t, dir)...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "up to date")
}

func TestAttach_CommandsOnEmptyRiver(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	_, stderr, code := run(t, "attach", "--database-url", url)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "there is no River in schema")
	require.Contains(t, ok(t, "migrate", "up", "--database-url", url), "up to date")
	require.Contains(t, ok(t, "detach", "--database-url", url, "--drop-data"), "dropped its data")
	dry := ok(t, "attach", "--dry-run", "--database-url", url)
	require.Contains(t, dry, "create trigger dlq_capture on public.river_job")
	require.NotContains(t, dry, "attached")
	require.Contains(t, ok(t, "attach", "--dry-run", "--backfill", "--database-url", url), "backfill would record 0 jobs")
	require.Contains(t, dry, "River in schema public has no jobs")
	for range 2 {
		require.Contains(t, ok(t, "attach", "--backfill", "--database-url", url), "attached\nbackfill: recorded 0 jobs")
		require.Contains(t, ok(t, "migrate", "status", "--database-url", url),
			"attached: River belongs to another application")
	}
	require.Contains(t, ok(t, "attach", "--database-url", url), "Next steps:\n- Capture is on: ")
	front := serve(t, "--database-url", url, "--api", "--destination", "http://127.0.0.1:1/")
	require.Contains(t, front.log.String(), "River belongs to an application")
	_, stderr, code = run(t, "send", "--api-url", front.api, "--kind", "k", "1")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `no dlqd process delivers the messages of queue "default"`)
	require.Zero(t, front.stop(syscall.SIGTERM), front.log.String())
	for range 2 {
		require.Contains(t, ok(t, "detach", "--database-url", url), "stays: the tables of schema dlq, with the dead "+
			"letters in them")
	}
	_, stderr, code = run(t, "serve", "--database-url", url)
	require.Equal(t, 3, code)
	require.Contains(t, stderr, `run "dlqd attach"`)
}

// TestServe_KeepsMessagesThroughKills submits messages while dlqd is killed repeatedly. In the end, each accepted
// message has one job. The message has been delivered, or, if the receiver refuses it, has one dead letter.
func TestServe_KeepsMessagesThroughKills(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	taken := map[string]bool{}
	receiver := startReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Webhook-Id")
		n, _ := strconv.Atoi(strings.TrimPrefix(id, "m"))
		switch {
		case n%5 == 0:
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		case n%7 == 0 && r.Header.Get("Dlqd-Attempt") == "1" && r.Header.Get("Dlqd-Entry-Id") == "":
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		mu.Lock()
		taken[id] = true
		mu.Unlock()
	})
	config := dataDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(config, "retry-policies.yaml"), fmt.Appendf(nil,
		"queues: {default: {maxAttempts: 3, backoff: {delay: 10ms}, timeout: 2s}}\ndestinations: {default: {url: %q}}\n",
		receiver), 0o600))
	// The receiver answers many messages with 502. A breaker would open for minutes.
	require.NoError(t, os.WriteFile(filepath.Join(config, "circuit-breaker.yaml"),
		[]byte("defaults: {enabled: false}\n"), 0o600))
	dir := dataDir(t)
	args := append(embedded(t, dir), "--config-dir", config)

	accepted := map[string]bool{}
	next := 0
	submit := func(api string, until time.Time) {
		client := &http.Client{Timeout: 5 * time.Second}
		for time.Now().Before(until) {
			id := fmt.Sprintf("m%d", next)
			body := fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": %d}`, id, next)
			response, err := client.Post(api+"/api/messages", "application/json", strings.NewReader(body))
			if err != nil {
				return // killed; submit the message again after the restart
			}
			_ = response.Body.Close()
			if response.StatusCode == http.StatusAccepted || response.StatusCode == http.StatusOK {
				accepted[id] = true
				next++
			}
		}
	}
	for range 4 {
		s := serve(t, args...)
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			time.Sleep(time.Duration(200+rand.IntN(600)) * time.Millisecond)
			_ = s.cmd.Process.Kill()
		}()
		submit(s.api, time.Now().Add(10*time.Second))
		<-killed
		_ = s.cmd.Wait()
	}
	s := serve(t, args...)
	for len(accepted) <= 50 {
		submit(s.api, time.Now().Add(200*time.Millisecond))
	}

	url := strings.TrimSpace(ok(t, append(append([]string{"psql"}, "--data-dir", dir), "--", "-Atc",
		"SELECT trim('\"' FROM current_setting('unix_socket_directories'))")...))
	conn, err := pgx.Connect(t.Context(), "postgres://dlqd@/dlqd?host="+url)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	// dlqd rescues the jobs of a killed process after half a minute (kills_test.go). Rescue them here, to save that time.
	var left string
	assert.Eventually(t, func() bool {
		_, err := conn.Exec(t.Context(), `UPDATE river_job SET state = 'available', attempt = 0 WHERE state = 'running'
			AND attempted_at < now() - interval '5 seconds'`)
		require.NoError(t, err)
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT coalesce(string_agg(j::text, E'\n'), '') FROM (SELECT * FROM "+
			"river_job WHERE finalized_at IS NULL LIMIT 3) j").Scan(&left))
		return left == ""
	}, 5*time.Minute, 100*time.Millisecond)
	require.Empty(t, left, "jobs have not ended")

	rows, err := conn.Query(t.Context(), `
		SELECT j.args ->> 'messageId', j.state::text, (SELECT count(*) FROM dlq.dead_letter_queue e
		WHERE e.event_id = j.args ->> 'messageId')
		FROM river_job j WHERE NOT j.metadata ? 'dlq:entry_id'`)
	require.NoError(t, err)
	type row struct {
		ID, State string
		Entries   int
	}
	jobs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	stored := map[string]bool{}
	mu.Lock()
	defer mu.Unlock()
	for _, j := range jobs {
		require.False(t, stored[j.ID], "message %s has two jobs", j.ID)
		stored[j.ID] = true
		n, _ := strconv.Atoi(strings.TrimPrefix(j.ID, "m"))
		if n%5 == 0 {
			require.Equal(t, "cancelled", j.State, j.ID)
			require.Equal(t, 1, j.Entries, j.ID)
			continue
		}
		require.True(t, taken[j.ID], "%s is %s and was not delivered", j.ID, j.State)
	}
	for id := range accepted {
		require.True(t, stored[id], "message %s was accepted and has no job", id)
	}
	require.Zero(t, s.stop(syscall.SIGTERM), s.log.String())
}

// freePort returns a port that is not in use at the moment.
func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

var testedBlock = regexp.MustCompile("(?s)```sh test\n(.*?)```")

// runBlocks runs the tested blocks of a document as one script and returns the script's output. The script uses free
// ports, lets curl retry more often, and runs the dlqd that the tests have built.
func runBlocks(t *testing.T, path string, blocks int) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	script := "set -eu\ntrap 'kill $(jobs -p); wait' EXIT\n"
	found := testedBlock.FindAllStringSubmatch(string(raw), -1)
	require.Len(t, found, blocks)
	for _, block := range found {
		script += block[1]
	}
	api := freePort(t)
	script = strings.NewReplacer("make build\n", "", "bin/dlqd serve", program+" serve --listen "+api, "bin/dlqd", program,
		"127.0.0.1:9090", freePort(t), "127.0.0.1:7353", api,
		"--retry 50", "--retry 500").Replace(script) // on a busy machine the server takes minutes to start
	dir := dataDir(t)
	require.NoError(t, os.Chmod(dir, 0o711))
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DLQD_API=http://"+api)
	var out syncBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Run(), out.String())
	return out.String()
}

// TestREADME runs the commands of the README's quick start.
func TestREADME(t *testing.T) {
	t.Parallel()
	out := runBlocks(t, "../../README.md", 2)
	for _, want := range []string{
		`{"messageId":"pay-1","jobId":1}`, `"state":`, "is accepted, as job 2", "ID  ",
		"last 24 hours:", "error_class",
	} {
		require.Contains(t, out, want)
	}
}

// TestTutorial runs the commands of docs/tutorial.md.
func TestTutorial(t *testing.T) {
	t.Parallel()
	out := runBlocks(t, "../../docs/tutorial.md", 11)
	for _, want := range []string{
		"CustomerNotFound", "no such customer", "invoices went to the old archive", "dlq_resolved",
	} {
		require.Contains(t, out, want)
	}
	require.Contains(t, out, `{"messages": 60, "repeats": 0}`, "each invoice arrived once")
}

// TestServe_ExampleConfig serves with the policy in config/, to which docs/operations.md refers.
func TestServe_ExampleConfig(t *testing.T) {
	t.Parallel()
	s := serve(t, "--database-url", postgrestest.URL(t), "--config-dir", "../../config")
	require.Contains(t, s.log.String(), "inventory-management notification-sending order-processing payment-processing")
	require.Zero(t, s.stop(syscall.SIGTERM))
}
