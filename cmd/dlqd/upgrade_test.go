package main_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// firstRelease is the commit that counts as v0.1.0. It was not published.
const firstRelease = "0aa003ff"

// upgrades is the set-up of a trial of an upgrade: a database, a receiver, and clients that submit messages to the
// processes that apis names.
type upgrades struct {
	*testing.T

	url, config string // the database's URL, and the policy's directory
	conn        *pgx.Conn
	sent        submissions
	stop        func()

	mu   sync.Mutex
	apis []string // addresses of the processes that take messages
	seen map[string]int
}

// release builds a version of dlqd from a commit and returns the path of the binary. Before the build, change may add
// files.
func release(t *testing.T, commit, version string, change func(dir string)) string {
	t.Helper()
	dir := filepath.Join(dataDir(t), "src")
	git := func(in string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = in
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "git %s: %s", strings.Join(args, " "), out)
	}
	git(".", "clone", "--quiet", "--no-tags", "--no-checkout", "../..", dir)
	git(dir, "checkout", "--quiet", "--detach", commit)
	if change != nil {
		change(dir)
		git(dir, "add", "--all")
		git(dir, "-c", "user.name=trial", "-c", "user.email=trial@localhost", "commit", "--quiet", "-m", "a later release")
	}
	git(dir, "tag", version)
	out := filepath.Join(dir, "dlqd")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=true", "-o", out, "./cmd/dlqd")
	cmd.Dir = dir
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
	stdout, _, _ := runProgram(t, out, "--version")
	require.Contains(t, stdout, strings.TrimPrefix(version, "v"))
	return out
}

// nextRelease returns a change that adds a migration and changes functions, as a later release may.
func nextRelease(t *testing.T) func(dir string) {
	t.Helper()
	return func(dir string) {
		t.Helper()
		latest, err := postgres.LatestVersion()
		require.NoError(t, err)
		for from, to := range map[string]string{
			"migration.sql": fmt.Sprintf("db/migrations/%05d_newer.sql", latest+1), "code.sql": "db/code/99_newer.sql",
		} {
			text, err := os.ReadFile(filepath.Join("../../internal/postgres/postgrestest/newer", from))
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, to), text, 0o600))
		}
	}
}

// The receiver fails at the first delivery of messages whose ids end with these digits.
const (
	needsOperator = "7"
	isRedelivered = "3"
)

func fails(id string) bool {
	return strings.HasSuffix(id, needsOperator) || strings.HasSuffix(id, isRedelivered)
}

// newUpgrades starts the receiver. At the first delivery, the receiver refuses a message that needs an operator, and
// answers 502 to a message that is redelivered.
func newUpgrades(t *testing.T) *upgrades {
	t.Helper()
	u := &upgrades{T: t, url: postgrestest.Empty(t), config: dataDir(t), seen: map[string]int{}}
	u.sent.accepted = map[string]time.Time{}
	receiver := startReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Webhook-Id")
		u.mu.Lock()
		defer u.mu.Unlock()
		u.seen[id]++
		switch first := u.seen[id] == 1; {
		case first && strings.HasSuffix(id, needsOperator):
			w.WriteHeader(http.StatusUnprocessableEntity)
		case first && strings.HasSuffix(id, isRedelivered):
			w.WriteHeader(http.StatusBadGateway)
		}
	})
	for name, text := range map[string]string{
		"retry-policies.yaml": fmt.Sprintf("queues: {default: {maxAttempts: 1}}\ndestinations: {default: {url: %q}}\n",
			receiver),
		"dlq-routing.yaml":     "queues: {default: {classes: {transient: {strategy: immediate, delays: [1s, 1s]}}}}\n",
		"circuit-breaker.yaml": "defaults: {enabled: false}\n",
		// A fast machine makes thousands of dead letters. By default, a request to replay more than 1,000 dead letters must
		// contain their number.
		"access.yaml": "expectAbove: 1000000\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(u.config, name), []byte(text), 0o600))
	}
	return u
}

func (u *upgrades) runs(program string, args ...string) string {
	u.Helper()
	stdout, stderr, code := runProgram(u.T, program, append(args, "--database-url", u.url)...)
	require.Zero(u, code, "dlqd %s\n%s%s", strings.Join(args, " "), stdout, stderr)
	return stdout
}

// connect opens the connection to the database that the trial's counts use.
func (u *upgrades) connect() {
	u.Helper()
	var err error
	u.conn, err = pgx.Connect(u.Context(), u.url)
	require.NoError(u, err)
	u.Cleanup(func() { _ = u.conn.Close(u.Context()) })
}

func (u *upgrades) serve(program string, args ...string) *served {
	u.Helper()
	return serveProgram(u.T, program, append([]string{
		"--database-url", u.url, "--config-dir", u.config, "--archive", "none", "--listen", "127.0.0.1:0",
		"--max-conns", "8",
	}, args...)...)
}

// to directs the clients to the given processes from now on.
func (u *upgrades) to(processes ...*served) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.apis = nil
	for _, s := range processes {
		u.apis = append(u.apis, s.api)
	}
}

// processes returns the addresses of the processes that take messages now.
func (u *upgrades) processes() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.apis
}

// load starts clients that submit messages without a pause.
func (u *upgrades) load() {
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for client := range 3 {
		clients.Go(func() {
			for n := 0; ; n++ {
				if !u.sent.submitOne(client, n, u.processes, stop) {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	u.stop = sync.OnceFunc(func() { close(stop); clients.Wait() })
	u.Cleanup(u.stop)
}

// grows waits until dlqd has accepted more messages, at least as many as by, and has resolved another dead letter.
func (u *upgrades) grows(by int) {
	u.Helper()
	before, resolved := u.sent.count(), u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'")
	require.Eventually(u, func() bool {
		return u.sent.count() >= before+by &&
			u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'") > resolved
	}, 2*time.Minute, 20*time.Millisecond, "messages are accepted, filed and redelivered")
}

func (u *upgrades) count(sql string) (n int) {
	u.Helper()
	require.NoError(u, u.conn.QueryRow(u.Context(), sql).Scan(&n))
	return n
}

// replays starts a replay run of the entries that need an operator, and returns the run's id.
func (u *upgrades) replays(api, rate string) string {
	u.Helper()
	response, err := http.Post(api+"/api/dlq/replay", "application/json",
		strings.NewReader(`{"filter": {"status": ["dlq_manual"]}`+rate+`}`))
	require.NoError(u, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(u, err)
	require.NoError(u, response.Body.Close())
	require.Equal(u, http.StatusAccepted, response.StatusCode, "%s", body)
	var id string
	require.NoError(u, u.conn.QueryRow(u.Context(), "SELECT id FROM dlq.replay_runs ORDER BY id DESC LIMIT 1").Scan(
		&id))
	return id
}

// balances stops the clients and waits until no work is left. It requires that no accepted message is lost, that no job
// has two dead letters, and that all dead letters are resolved.
func (u *upgrades) balances(api string) {
	u.Helper()
	u.stop()
	failing := 0 // more may have failed: accepted messages whose answer was lost
	for id := range u.sent.accepted {
		if fails(id) {
			failing++
		}
	}
	// While the migration held locks, capture skipped failures. The reconciler files them.
	require.Eventually(u, func() bool {
		return u.count(`SELECT count(*) FROM river_job
			WHERE state IN ('available', 'running', 'retryable', 'scheduled')`) == 0 &&
			u.count("SELECT count(*) FROM dlq.dead_letter_inbox") == 0 &&
			u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'") == 0 &&
			u.count("SELECT count(*) FROM dlq.dead_letter_queue") >= failing
	}, 4*time.Minute, 50*time.Millisecond, "work is left")
	if u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'") > 0 {
		u.replays(api, "")
	}
	require.Eventually(u, func() bool {
		return u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status <> 'dlq_resolved'") == 0
	}, 2*time.Minute, 50*time.Millisecond, "dead letters are left")
	u.mu.Lock()
	twice := 0
	for id := range u.sent.accepted {
		want := 1
		if fails(id) {
			want = 2
		}
		require.GreaterOrEqual(u, u.seen[id], want, "%s was lost", id)
		twice += u.seen[id] - want
	}
	u.mu.Unlock()
	require.Zero(u, u.count("SELECT count(*) - count(DISTINCT river_job_id) FROM dlq.dead_letter_queue"),
		"jobs with more than one dead letter")
	entries := u.count("SELECT count(*) FROM dlq.dead_letter_queue")
	u.Logf("%d messages accepted, none lost; %d dead letters, one for each failure, all redelivered; %d delivered twice",
		len(u.sent.accepted), entries, twice)
}

// TestServe_UpgradesBesideOlderProcesses upgrades dlqd under load. For the upgrade from 0.1 to 0.2, the older processes
// stop first. From 0.2 on, processes of both versions run at the same time.
func TestServe_UpgradesBesideOlderProcesses(t *testing.T) {
	t.Parallel()
	if !inTrial {
		t.Skip("builds three versions: make trial-upgrade. TestUpgrade_OlderProcessesGoOn is short")
	}
	released := release(t, "HEAD", "v0.2.0", nil)
	t.Run("from 0.1", func(t *testing.T) { upgradeFromFirst(t, release(t, firstRelease, "v0.1.0", nil), released) })
	t.Run("from 0.2", func(t *testing.T) {
		upgradeBeside(t, released, release(t, "HEAD", "v0.3.0", nextRelease(t)))
	})
}

func upgradeFromFirst(t *testing.T, older, newer string) {
	t.Helper()
	u := newUpgrades(t)
	u.runs(older, "migrate", "up")
	u.connect()
	old := u.serve(older)
	u.to(old)
	u.load()
	u.grows(200)

	_, stderr, code := runProgram(t, newer, "migrate", "up", "--database-url", u.url)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "cannot run beside programs for a schema version below")
	require.Contains(t, stderr, "(dlqd 0.1.0), and run this again")
	t.Log(strings.TrimSpace(stderr))
	u.grows(100)

	stopped := time.Now()
	require.Zero(t, old.stop(syscall.SIGTERM))
	u.runs(newer, "migrate", "up")
	migrated := time.Since(stopped)
	s := u.serve(newer)
	t.Logf("without a process for %s, %s of it the migration", time.Since(stopped).Round(100*time.Millisecond),
		migrated.Round(100*time.Millisecond))
	u.to(s)
	u.grows(200)
	_, stderr, code = runProgram(t, older, "serve", "--database-url", u.url, "--archive", "none", "--listen",
		"127.0.0.1:0")
	require.Equal(t, 3, code, stderr)
	t.Log("0.1.0 on the schema of 0.2.0: " + strings.TrimSpace(stderr))
	u.balances(s.api)
}

func upgradeBeside(t *testing.T, older, newer string) {
	t.Helper()
	u := newUpgrades(t)
	u.runs(older, "migrate", "up")
	u.connect()
	first, second := u.serve(older), u.serve(older)
	u.to(first, second)
	u.load()
	u.grows(300)

	// page is a console with authentication.
	access := dataDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(access, "access.yaml"), []byte("authentication: [tokens]\n"), 0o600))
	console := func(program string) *served {
		return serveProgram(t, program, "--api", "--database-url", u.url, "--config-dir", access, "--archive", "none",
			"--listen", "127.0.0.1:0", "--max-conns", "6", "--destination", "http://127.0.0.1:1/")
	}
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	browser := &http.Client{Jar: jar}
	asks := func(method, at, body string) int {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), method, at, strings.NewReader(body))
		require.NoError(t, err)
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		response, err := browser.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	page := console(older)
	token := strings.TrimSpace(u.runs(older, "tokens", "create", "--name", "kim", "--role", "operator"))
	require.Equal(t, http.StatusOK, asks("POST", page.api+"/sign-in", url.Values{"token": {token}}.Encode()))
	require.Equal(t, http.StatusOK, asks("GET", page.api+"/api/whoami", ""))

	// A slow replay run continues during the upgrade. Its rate depends on the number of entries, so that it takes half a
	// minute.
	var manual int
	require.Eventually(t, func() bool {
		manual = u.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'")
		return manual >= 20
	}, 2*time.Minute, 20*time.Millisecond)
	slow := u.replays(first.api, fmt.Sprintf(`, "rate": %d`, 1+manual/30))

	began := time.Now()
	u.runs(newer, "migrate", "up")
	t.Logf("migrated under load in %s", time.Since(began).Round(100*time.Millisecond))
	u.grows(300)
	require.Equal(t, http.StatusOK, asks("GET", page.api+"/api/whoami", ""), "a session that began before the upgrade")
	require.Contains(t, u.runs(older, "migrate", "up"), "installed by dlqd 0.3.0", "an older program changes nothing")

	third := u.serve(newer)
	u.to(second, third)
	require.NoError(t, first.cmd.Process.Kill())
	u.grows(100)
	restarted := u.serve(older)
	u.to(restarted, third)
	require.Zero(t, second.stop(syscall.SIGTERM))
	u.grows(300)
	require.Zero(t, page.stop(syscall.SIGTERM))
	page = console(newer)
	require.Equal(t, http.StatusOK, asks("GET", page.api+"/api/whoami", ""), "a session goes on in the newer version")
	require.Eventually(t, func() bool {
		return u.count("SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed' AND id::text = '"+slow+"'") == 1
	}, 2*time.Minute, 50*time.Millisecond, "the replay run that began before the upgrade")
	u.balances(third.api)
	for _, s := range []*served{restarted, third} {
		for line := range strings.Lines(s.log.String()) {
			if strings.Contains(line, "level=ERROR") {
				t.Log(strings.TrimSpace(line))
			}
		}
	}

	// The older version is installed again.
	for _, s := range []*served{restarted, third, page} {
		require.Zero(t, s.stop(syscall.SIGTERM), s.log.String())
	}
	entries := u.count("SELECT count(*) FROM dlq.dead_letter_queue")
	latest, err := postgres.LatestVersion()
	require.NoError(t, err)
	_, stderr, code := runProgram(t, older, "migrate", "down", "--to", fmt.Sprint(latest), "--database-url", u.url)
	require.Equal(t, 1, code, stderr)
	require.Contains(t, stderr, `run "dlqd migrate down" of dlqd 0.3.0`)
	u.runs(newer, "migrate", "down", "--to", fmt.Sprint(latest))
	require.Contains(t, u.runs(older, "migrate", "up"), "up to date")
	require.Equal(t, entries, u.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	back := u.serve(older)
	require.Zero(t, back.stop(syscall.SIGTERM))
}
