package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// part returns the health of one part.
func (b *bundle) part(name string) (ok bool, detail string) {
	b.Helper()
	health := b.health()
	for _, part := range health.Parts {
		if part.Name == name {
			return part.OK, part.Detail
		}
	}
	return false, "there is no such part"
}

func (b *bundle) health() (health api.Health) {
	b.Helper()
	response, err := http.Get(b.base + "/api/health")
	require.NoError(b, err)
	defer response.Body.Close()
	require.NoError(b, json.NewDecoder(response.Body).Decode(&health))
	require.Equal(b, health.OK, response.StatusCode == http.StatusOK)
	return health
}

// TestLoops_StartAndStopConcurrently starts and stops all loops of a server concurrently; afterwards the server
// still works.
func TestLoops_StartAndStopConcurrently(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	loops := b.server.Loops()
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 20 {
				if rand.IntN(2) == 0 {
					loops.Start()
				} else {
					_ = loops.Stop(t.Context())
				}
			}
		})
	}
	callers.Wait()
	require.NoError(t, loops.Stop(t.Context()))
	for _, status := range loops.Statuses() {
		require.Equal(t, "not running", status.Problem, status.Name)
	}
	loops.Start()
	for _, l := range loops.Loops() {
		<-l.Started()
	}
	b.submit("m1")
	b.awaitEntry(b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string), "dlq_manual")
	_, out, _ := b.call("GET", "/metrics", "")
	for _, status := range loops.Statuses() {
		require.Contains(t, out["text"], fmt.Sprintf("dlqd_loop_last_success_timestamp_seconds{loop=%q} ", status.Name))
		require.Contains(t, out["text"], fmt.Sprintf("dlqd_loop_turns_total{loop=%q,outcome=\"error\"} ", status.Name))
	}
}

// TestHealth_ReportsAHangingWorker blocks a worker on a lock while the database answers.
func TestHealth_ReportsAHangingWorker(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.PollInterval = 100 * time.Millisecond }})
	healthy := func() bool { ok, _ := b.part("dlq-workers"); return ok }
	require.Eventually(t, healthy, time.Minute, 50*time.Millisecond)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.dead_letter_queue")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return !healthy() }, 5*time.Minute, 50*time.Millisecond)
	_, detail := b.part("dlq-workers")
	require.Contains(t, detail, "no turn has succeeded since")
	ok, _ := b.part("database")
	require.True(t, ok)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Eventually(t, healthy, time.Minute, 50*time.Millisecond)
}

// TestReload_RetriesAddingAQueue makes the database refuse a new queue for a
// while.
func TestReload_RetriesAddingAQueue(t *testing.T) {
	t.Parallel()
	var dir, files string
	b := setup(t, options{config: func(c *server.Config) {
		files = fmt.Sprintf("queues: {one: {destination: d}}\ndestinations: {d: {url: %q}}\n",
			c.Policy.Destinations["default"].URL)
		dir = policytest.Dir(t, policytest.Files{"retry-policies": files})
		c.Source = policy.Source{Dir: dir}
		var err error
		c.Policy, err = policy.Load(c.Source)
		require.NoError(t, err)
	}})
	_, err := b.pool.Exec(t.Context(), "ALTER TABLE river_queue ADD CONSTRAINT not_two CHECK (name <> 'two')")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"),
		[]byte(strings.Replace(files, "queues: {", "queues: {two: {destination: d}, ", 1)), 0o600))
	require.NoError(t, b.server.Reload(t.Context()))
	require.Eventually(t, func() bool {
		_, out, _ := b.call("GET", "/metrics", "")
		return !strings.Contains(out["text"].(string), `dlqd_loop_turns_total{loop="policy-queues",outcome="error"} 0`)
	}, 5*time.Minute, 50*time.Millisecond)
	_, err = b.pool.Exec(t.Context(), "ALTER TABLE river_queue DROP CONSTRAINT not_two")
	require.NoError(t, err)
	status, out, _ := b.call("POST", "/api/messages", `{"messageId": "m1", "queue": "two", "kind": "k", "payload": 1}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitMessage("m1", "completed")
}

// TestStop_EndsByItsDeadlineIfTheDatabaseHangs freezes all processes of Postgres: health fails, and the
// stop ends by its deadline.
func TestStop_EndsByItsDeadlineIfTheDatabaseHangs(t *testing.T) {
	t.Parallel()
	for name, embedded := range map[string]bool{"embedded": true, "external": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "dlqd-hang-")
			require.NoError(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			const limit = 4 * time.Second
			config := server.Config{
				Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true, Listen: []string{"127.0.0.1:0"},
				Logger: slog.New(slog.DiscardHandler), StopTimeout: limit, PollInterval: time.Second,
				DataDir: dir, PostgresBin: os.Getenv("DLQD_TEST_POSTGRES_BIN"),
			}
			if !embedded {
				config.DatabaseURL = startPostgres(t, dir)
			}
			config.Policy, err = policy.Default("http://127.0.0.1:1")
			require.NoError(t, err)
			s, err := server.Start(t.Context(), config)
			require.NoError(t, err)
			b := &bundle{T: t, server: s, base: s.Addresses()[0]}
			require.Eventually(t, func() bool { return b.health().OK }, 5*time.Minute, 50*time.Millisecond)

			freeze(t, dir)
			frozen := time.Now()
			waiting := make(chan struct{})
			go func() { // the message waits for its commit
				defer close(waiting)
				response, err := http.Post(b.base+"/api/messages", "application/json",
					strings.NewReader(`{"queue": "default", "kind": "k", "payload": 1}`))
				if err == nil {
					_ = response.Body.Close()
				}
			}()
			for _, loop := range []string{"database", "circuit-breakers", "dlq-workers"} {
				require.Eventually(t, func() bool { ok, _ := b.part(loop); return !ok }, 5*time.Minute, 50*time.Millisecond, loop)
			}
			t.Logf("health failed after %s", time.Since(frozen).Round(100*time.Millisecond))

			stopped := make(chan error, 1)
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			start := time.Now()
			go func() { stopped <- s.Wait(ctx, context.Background()) }()
			select {
			case err := <-stopped:
				require.ErrorIs(t, err, server.ErrStoppedAtOnce)
			case <-time.After(30 * time.Second):
				t.Fatalf("a stop with a limit of %s took longer than 30 s", limit)
			}
			t.Logf("the stop took %s of %s", time.Since(start).Round(100*time.Millisecond), limit)
			<-waiting
		})
	}
}

// startPostgres starts a separate server with dlqd's schema.
func startPostgres(t *testing.T, dir string) (url string) {
	t.Helper()
	e, err := postgres.StartEmbedded(t.Context(), postgres.EmbeddedConfig{
		DataDir: dir, BinDir: os.Getenv("DLQD_TEST_POSTGRES_BIN"), Throwaway: true, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Stop() })
	require.NoError(t, (&postgres.Migrator{
		Pool: postgrestest.Open(t, e.URL()), Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}).Up(t.Context()))
	return e.URL()
}

// freeze stops all processes of a data directory's Postgres until the test ends.
func freeze(t *testing.T, dir string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "pgdata", "postmaster.pid"))
	require.NoError(t, err)
	postmaster, _, _ := strings.Cut(string(raw), "\n")
	pid, err := strconv.Atoi(postmaster)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP)) // a stopped postmaster starts no further children
	all := []int{pid}
	processes, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	for _, path := range processes {
		stat, _ := os.ReadFile(path) // pid (name) state parent ...
		fields := strings.Fields(string(stat[strings.LastIndex(string(stat), ")")+1:]))
		if len(fields) < 2 || fields[1] != postmaster {
			continue
		}
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		require.NoError(t, err)
		_ = syscall.Kill(child, syscall.SIGSTOP)
		all = append(all, child)
	}
	t.Cleanup(func() {
		for _, pid := range all {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	})
}

// TestReload_KeepsAQueueThatReturnsDuringItsRemoval removes a queue while one of its jobs runs, and adds
// it again before the job ends.
func TestReload_KeepsAQueueThatReturnsDuringItsRemoval(t *testing.T) {
	t.Parallel()
	arrived, answer := make(chan struct{}, 10), make(chan struct{})
	var once sync.Once
	finish := func() { once.Do(func() { close(answer) }) }
	t.Cleanup(finish)
	var dir, files string
	b := setup(t, options{
		receiver: func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-answer },
		config: func(c *server.Config) {
			files = fmt.Sprintf("queues: {one: {destination: d}, two: {destination: d}}\ndestinations: {d: {url: %q}}\n",
				c.Policy.Destinations["default"].URL)
			dir = policytest.Dir(t, policytest.Files{"retry-policies": files})
			var err error
			c.Source = policy.Source{Dir: dir}
			c.Policy, err = policy.Load(c.Source)
			require.NoError(t, err)
		},
	})
	t.Cleanup(finish) // before the server stops
	reload := func(files string) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"), []byte(files), 0o600))
		since := time.Now()
		require.NoError(t, b.server.Reload(t.Context()))
		require.Eventually(t, func() bool { // until the loop has run once more
			for _, status := range b.server.Loops().Statuses() {
				if status.Name == "policy-queues" && status.LastSuccess.After(since) {
					return true
				}
			}
			return false
		}, 5*time.Minute, 50*time.Millisecond)
	}
	submit := func(id string) {
		t.Helper()
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": "two", "kind": "k", "payload": 1}`, id))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	submit("m1")
	<-arrived
	reload(strings.Replace(files, ", two: {destination: d}", "", 1))
	reload(files)
	finish()
	b.awaitMessage("m1", "completed")
	submit("m2")
	b.awaitMessage("m2", "completed")
}

// TestHealth_ReportsQueuesOverTheirLimits brings a queue near its limit, and then over it.
func TestHealth_ReportsQueuesOverTheirLimits(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) {
		files := policytest.Files{
			"retry-policies": fmt.Sprintf("queues: {one: {destination: d}, two: {destination: "+
				"d}}\ndestinations: {d: {url: %q}}\n", c.Policy.Destinations["default"].URL),
			"monitoring": "queues: {one: {maxOpen: 5, maxAge: 2h}}",
		}
		c.Policy = policytest.Load(t, files)
	}})
	queue := func(name string) api.QueueHealth {
		for _, q := range b.health().Queues {
			if q.Queue == name {
				return q
			}
		}
		return api.QueueHealth{}
	}
	require.Equal(t, "up", queue("two").Status)
	fail := func(n int) {
		for range n {
			status, out, _ := b.call("POST", "/api/messages", `{"queue": "one", "kind": "k", "payload": 1}`)
			require.Equal(t, http.StatusAccepted, status, out)
		}
	}
	fail(4)
	require.Eventually(t, func() bool { return queue("one").Open == 4 }, 5*time.Minute, 50*time.Millisecond)
	near := queue("one")
	require.Equal(t, "up", near.Status)
	require.Equal(t, []string{"size 4 is 80 % of 5"}, near.Warnings)
	require.EqualValues(t, 5, near.MaxOpen)
	fail(2)
	require.Eventually(t, func() bool { return queue("one").Open == 6 }, 5*time.Minute, 50*time.Millisecond)
	full := queue("one")
	require.Equal(t, "down", full.Status)
	require.Equal(t, []string{"size 6 exceeds 5"}, full.Reasons)
	require.Equal(t, "up", queue("two").Status)
	require.Eventually(t, func() bool { return b.health().OK }, 5*time.Minute, 50*time.Millisecond,
		"queues do not affect dlqd's own health")
	_, metrics, _ := b.call("GET", "/metrics", "")
	require.Contains(t, metrics["text"], `dlqd_queue_up{queue="one"} 0`)
	require.Contains(t, metrics["text"], `dlq_size{queue="one"} 6`)
	status, _, _ := b.call("GET", "/readyz", "")
	require.Equal(t, http.StatusOK, status, "the process stays ready")
	for _, part := range b.health().Parts {
		if part.Name == "dlq-workers" {
			require.WithinDuration(t, time.Now(), *part.LastSuccess, time.Minute)
		}
	}
}

// After an outage, figures are old until the loops have run. Health does not fail because of such figures.
func TestHealth_IgnoresFiguresOlderThanTheProcess(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(config *server.Config) {
		conn := postgrestest.Open(t, config.DatabaseURL)
		_, err := conn.Exec(t.Context(), "UPDATE dlq.rollup_state SET at = at - interval '10 minutes'")
		require.NoError(t, err)
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0))")
		require.NoError(t, err)
	}})
	ok, detail := b.part("rollups")
	require.True(t, ok, detail)
	require.Eventually(t, func() bool { ok, _ := b.part("rollups"); return !ok }, 5*time.Minute, 50*time.Millisecond)
}

// If figures are not updated, health fails in all processes until they are updated again.
func TestHealth_ReportsStaleFigures(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusOK)})
	require.Eventually(t, func() bool { return b.health().OK }, 5*time.Minute, 50*time.Millisecond)
	for part, test := range map[string]struct{ lock, age string }{
		"metrics": {"dlq.metrics_sample", "UPDATE dlq.metrics_sample SET at = at - interval '2 minutes'"},
		"rollups": {"dlq.refresh_rollups", "UPDATE dlq.rollup_state SET at = at - interval '10 minutes'"},
	} {
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", test.lock)
		require.NoError(t, err)
		require.Eventually(t, func() bool { // repeated: an update of the figures may have been running
			_, err := b.pool.Exec(t.Context(), test.age)
			require.NoError(t, err)
			ok, detail := b.part(part)
			return !ok && strings.Contains(detail, " old")
		}, 5*time.Minute, 50*time.Millisecond, part)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Eventually(t, func() bool { ok, _ := b.part(part); return ok }, 5*time.Minute, 50*time.Millisecond, part)
	}
}
