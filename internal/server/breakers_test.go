package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/server"
)

// down is a receiver that answers 503 while the flag is set. It counts attempts and records the accepted messages.
type down struct {
	atomic.Bool

	mu    sync.Mutex
	tries int
	taken []string
}

func (d *down) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tries++
	if d.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	d.taken = append(d.taken, r.Header.Get("Webhook-Id"))
}

func (d *down) seen() (tries int, taken []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tries, slices.Clone(d.taken)
}

func (b *bundle) breaker(name string) map[string]any {
	b.Helper()
	_, out, _ := b.call("GET", "/api/circuit-breakers", "")
	for _, one := range out["breakers"].([]any) {
		if status := one.(map[string]any); status["name"] == name {
			return status
		}
	}
	return nil
}

func (b *bundle) awaitBreaker(state string) {
	b.Helper()
	require.Eventually(b, func() bool { return b.breaker("destination:default")["state"] == state }, time.Minute,
		50*time.Millisecond)
}

func TestBreaker_Answers503WhileOpen(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	receiver.Store(true)
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) {
		c.Policy.Breakers.Defaults.ConsecutiveFailures = 3
		c.Policy.Breakers.Defaults.OpenFor = 300 * time.Millisecond
		c.Policy.Queues["default"].Backoff.Delay = 20 * time.Millisecond
	}})
	b.submit("m1")
	b.awaitBreaker("open")
	body := `{"messageId": "m2", "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`
	require.Eventually(t, func() bool { // repeated, because a request that is a probe gets another answer
		status, out, header := b.call("POST", "/api/messages", body)
		return status == http.StatusServiceUnavailable && header.Get("Retry-After") == "1" &&
			strings.Contains(out["detail"].(string), "circuit breaker of its destination default is open")
	}, 5*time.Minute, 50*time.Millisecond)

	// Once the breaker is half-open, new messages and the waiting dead letter are its probes.
	receiver.Store(false)
	n := 0
	require.Eventually(t, func() bool {
		n++
		_, _, _ = b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": "p%d", "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`, n))
		return b.breaker("destination:default")["state"] == "closed"
	}, 5*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE event_id = 'm1' AND status = 'dlq_resolved'") == 1
	}, 5*time.Minute, 50*time.Millisecond)
}

func TestBreaker_ReleasesHeldMessagesWhenItCloses(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	receiver.Store(true)
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) {
		c.Policy.Breakers.Defaults.ConsecutiveFailures = 3
		c.Policy.Breakers.Defaults.OpenFor = 200 * time.Millisecond
		q := c.Policy.Queues["default"]
		q.WhenOpen, q.MaxAttempts, q.Backoff.Delay = policy.WhenOpenAccept, 3, 20*time.Millisecond
	}})
	b.submit("m0")
	b.awaitBreaker("open")
	const n = 50
	for i := 1; i <= n; i++ {
		b.submit(fmt.Sprintf("m%d", i))
	}
	// Probes fail for a while. Only probes use up attempts; messages that are held do not.
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.circuit_breaker_changes WHERE to_state = 'half_open'") >= 2
	}, 5*time.Minute, 50*time.Millisecond)
	receiver.Store(false)
	require.Eventually(t, func() bool {
		_, taken := receiver.seen()
		slices.Sort(taken)
		return len(slices.Compact(taken)) == n+1
	}, 5*time.Minute, 50*time.Millisecond)
	tries, _ := receiver.seen()
	changes := b.count("SELECT count(*) FROM dlq.circuit_breaker_changes WHERE to_state = 'half_open'")
	require.LessOrEqual(t, tries, n+1+3+10*changes, "only probes are delivered while it is open")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))
}

// After a breaker has closed, held messages are released one a second while the destination does not answer.
func TestBreaker_PacesHeldMessagesUntilTheDestinationAnswers(t *testing.T) {
	t.Parallel()
	receiver, answer := &down{}, make(chan struct{})
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		<-answer
		receiver.ServeHTTP(w, r)
	}, config: func(c *server.Config) { c.Policy.Queues["default"].WhenOpen = policy.WhenOpenAccept }})
	t.Cleanup(sync.OnceFunc(func() { close(answer) }))
	status, out, _ := b.call("POST", "/api/circuit-breakers/destination:default/open", `{"for": "2h"}`)
	require.Equal(t, http.StatusOK, status, out)
	const n = 40
	for i := range n {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Equal(t, n, b.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:held'"))
	start := time.Now()
	status, out, _ = b.call("POST", "/api/circuit-breakers/destination:default/reset", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Eventually(t, func() bool {
		released := n - b.count("SELECT count(*) FROM river_job WHERE metadata ? 'dlq:held'")
		return !assert.LessOrEqual(t, float64(released), 3+time.Since(start).Seconds()) || released >= 5
	}, 5*time.Minute, 50*time.Millisecond)
}

func TestBreaker_OperatorOpensAndResets(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	b := setup(t, options{receiver: receiver.ServeHTTP})
	status, out, _ := b.call("POST", "/api/circuit-breakers/destination:default/open",
		`{"actor": "kim", "note": "they asked us to", "for": "2h"}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, "open", out["state"])
	status, _, header := b.call("POST", "/api/messages", `{"queue": "default", "kind": "k", "payload": 1}`)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, header.Get("Retry-After"))
	for _, line := range []string{
		`dlqd_circuit_breaker_state{name="destination:default",state="open"} 1`,
		`dlqd_alert_max_open{queue="default"} 1000`, `dlqd_policy_up_to_date 1`,
	} {
		require.Eventually(t, func() bool { // after the next sample
			_, metrics, _ := b.call("GET", "/metrics", "")
			return strings.Contains(metrics["text"].(string), line)
		}, 5*time.Minute, 50*time.Millisecond, line)
	}
	status, out, _ = b.call("POST", "/api/circuit-breakers/destination:default/reset", `{"actor": "kim"}`)
	require.Equal(t, http.StatusOK, status, out)
	b.submit("m1")
	b.awaitMessage("m1", "completed")

	for path, want := range map[string]int{"destination:nowhere/open": 404, "destination:nowhere/reset": 404} {
		status, _, _ = b.call("POST", "/api/circuit-breakers/"+path, `{}`)
		require.Equal(t, want, status, path)
	}
	status, out, _ = b.call("POST", "/api/circuit-breakers/destination:default/open", `{"for": "soon"}`)
	require.Equal(t, 422, status)
	require.Equal(t, "body.for", out["errors"].([]any)[0].(map[string]any)["location"])
}

// While a dead letter of an ordering key is open, later messages of that key wait. Messages of other keys do not wait.
func TestOrdering_DeadLetterHoldsItsKey(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	var fail atomic.Bool
	fail.Store(true)
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Webhook-Id") == "a1" && fail.Load() {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		}
		receiver.ServeHTTP(w, r)
	}, config: func(c *server.Config) { c.Policy.Queues["default"].Ordering = true }})
	submit := func(id, key string) {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1, "orderingKey": %q}`, id, key))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	submit("a1", "a")
	entry := b.awaitMessage("a1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(entry, "dlq_manual")
	status, out, _ := b.call("POST", "/api/messages/batch", `{"messages": [
		{"messageId": "a2z", "queue": "default", "kind": "k", "payload": 1, "orderingKey": "a"},
		{"messageId": "a2a", "queue": "default", "kind": "k", "payload": 1, "orderingKey": "a"},
		{"messageId": "b1", "queue": "default", "kind": "k", "payload": 1, "orderingKey": "b"}]}`)
	require.Equal(t, http.StatusAccepted, status, out)
	submit("a3", "a")
	b.awaitMessage("b1", "completed")
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM river_job WHERE state = 'scheduled' AND metadata @> '{"dlq:held": "order"}'`) ==
			3
	}, 5*time.Minute, 50*time.Millisecond)
	_, taken := receiver.seen()
	require.Equal(t, []string{"b1"}, taken)
	_, position, _ := b.call("GET", "/api/messages/a3", "")
	require.Equal(t, "order", position["heldFor"])

	fail.Store(false)
	status, out, _ = b.call("POST", "/api/dlq/entries/"+entry+"/replay", `{}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitMessage("a3", "completed")
	_, taken = receiver.seen()
	require.Equal(t, []string{"b1", "a1", "a2z", "a2a", "a3"}, taken, "in the order of their submission")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.ordered_jobs"))

	// Discarding a dead letter also releases the next message.
	b.awaitEntry(entry, "dlq_resolved")
	fail.Store(true)
	b.exec(`UPDATE river_job SET unique_key = NULL`)
	submit("a1", "c")
	entry = b.awaitMessage("a1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	submit("c2", "c")
	b.awaitEntry(entry, "dlq_manual")
	status, _, _ = b.call("POST", "/api/dlq/entries/"+entry+"/discard", `{}`)
	require.Equal(t, http.StatusOK, status)
	b.awaitMessage("c2", "completed")
}

// The predecessor of a held message may end without releasing the message. dlqd then releases the message long before
// its hold time ends. The test first prevents the release at the predecessor's end with a lock, and then deletes the
// first waiting message.
func TestOrdering_ReleasesMessagesWithoutPredecessor(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("Webhook-Id"), "first") {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		}
		receiver.ServeHTTP(w, r)
	}, config: func(c *server.Config) { c.Policy.Queues["default"].Ordering = true }})
	submit := func(id, key string) {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1, "orderingKey": %q}`, id, key))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	for _, key := range []string{"a", "b"} {
		submit("first-"+key, key)
		entry := b.awaitMessage("first-"+key, "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
		b.awaitEntry(entry, "dlq_manual")
		for _, n := range []string{"2", "3", "4"} {
			submit(key+n, key)
		}
	}
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM river_job WHERE state = 'scheduled' AND metadata @> '{"dlq:held": "order"}'`) ==
			6
	}, 5*time.Minute, 50*time.Millisecond)
	b.exec(`UPDATE river_job SET scheduled_at = now() + interval '1 day' WHERE state = 'scheduled'`)

	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE args ->> 'messageId' IN ('a2', 'b2') FOR UPDATE")
	require.NoError(t, err)
	b.exec("SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_open), 'kim')")
	require.Eventually(t, func() bool { return b.count("SELECT count(*) FROM dlq.job_facts") == 0 }, time.Minute,
		50*time.Millisecond)
	_, err = tx.Exec(t.Context(), "DELETE FROM river_job WHERE args ->> 'messageId' = 'b2'")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	b.awaitMessage("a4", "completed")
	b.awaitMessage("b4", "completed")
	_, taken := receiver.seen()
	slices.SortStableFunc(taken, func(x, y string) int { return strings.Compare(x[:1], y[:1]) })
	require.Equal(t, []string{"a2", "a3", "a4", "b3", "b4"}, taken)
}

// A replay run redelivers the dead letters of an ordering key in the order in which they failed.
func TestOrdering_ReplayRunKeepsTheOrder(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	var fail atomic.Bool
	fail.Store(true)
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		if fail.Load() {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		}
		receiver.ServeHTTP(w, r)
	}, config: func(c *server.Config) { c.Policy.Queues["default"].Ordering = true }})
	for _, id := range []string{"o1", "o2", "o3"} {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1, "orderingKey": "a"}`, id))
		require.Equal(t, http.StatusAccepted, status, out)
		entry := b.awaitMessage(id, "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
		b.awaitEntry(entry, "dlq_manual")
		b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE status = 'dlq_manual'")
		status, out, _ = b.call("POST", "/api/dlq/entries/"+entry+"/replay", `{}`)
		require.Equal(t, http.StatusAccepted, status, out)
		b.awaitEntry(entry, "dlq_failed")
	}
	require.Zero(t, b.count("SELECT count(*) FROM dlq.ordered_jobs"))
	fail.Store(false)
	status, out, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"status": ["dlq_failed"]}, "order": "newest"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed' AND replayed = 3") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	_, taken := receiver.seen()
	require.Equal(t, []string{"o1", "o2", "o3"}, taken)
}

// Completed messages that are run again are delivered in the order of their completion. Of each key, only one message
// is delivered at a time.
func TestOrdering_RunAgainKeepsTheOrder(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	var again atomic.Bool
	var refused sync.Map
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Webhook-Id")
		if _, before := refused.LoadOrStore(id, again.Load()); !before && again.Load() && strings.HasSuffix(id, "4") {
			// Without ordering, the next message of the key would be delivered first.
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		receiver.ServeHTTP(w, r)
	}, config: func(c *server.Config) { c.Policy.Queues["default"].Ordering = true }})
	var done []string
	for i := range 4 {
		for _, key := range []string{"b", "a"} { // so that the order of completion is not the order of the names
			id := fmt.Sprint(key, 4-i)
			status, out, _ := b.call("POST", "/api/messages",
				fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1, "orderingKey": %q}`, id, key))
			require.Equal(t, http.StatusAccepted, status, out)
			b.awaitMessage(id, "completed")
			done = append(done, id)
		}
	}
	_, taken := receiver.seen()
	require.Equal(t, done, taken)

	refused.Clear()
	again.Store(true)
	require.Equal(t, 8, b.count("SELECT dlq.run_again(now() - interval '1 hour', 'the receiver lost them')"))
	require.Zero(t, b.count("SELECT dlq.run_again(now() - interval '1 hour', 'the receiver lost them')"),
		"each message is run again once")
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM river_job WHERE state = 'completed' AND metadata ? 'dlq:run_again'`) == 16
	}, 5*time.Minute, 50*time.Millisecond)
	_, taken = receiver.seen()
	require.Len(t, taken, 16)
	for _, key := range []string{"a", "b"} {
		ofKey := func(ids []string) []string {
			return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !strings.HasPrefix(id, key) })
		}
		require.Equal(t, ofKey(done), ofKey(taken[8:]))
	}
	require.Zero(t, b.count("SELECT count(*) FROM dlq.ordered_jobs"))
}

func (b *bundle) exec(sql string) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql)
	require.NoError(b, err)
}

func (b *bundle) policyPart() (version string, ok bool) {
	b.Helper()
	response, err := http.Get(b.base + "/api/health")
	require.NoError(b, err)
	defer response.Body.Close()
	var health api.Health
	require.NoError(b, json.NewDecoder(response.Body).Decode(&health))
	i := slices.IndexFunc(health.Parts, func(p api.Part) bool { return p.Name == "policy" })
	return health.Parts[i].Detail, health.Parts[i].OK
}

// When the policy's files change, all of the new policy comes into force, or none of it.
func TestReload_AppliesThePolicyAsAWhole(t *testing.T) {
	t.Parallel()
	receiver := &down{}
	var dir string
	b := setup(t, options{receiver: receiver.ServeHTTP, config: func(c *server.Config) {
		url := c.Policy.Destinations["default"].URL
		dir = policytest.Dir(t, policytest.Files{"retry-policies": fmt.Sprintf("queues: {one: {destination: "+
			"d}}\ndestinations: {d: {url: %q}}\n", url)})
		c.Source = policy.Source{Dir: dir}
		var err error
		c.Policy, err = policy.Load(c.Source)
		require.NoError(t, err)
	}})
	first, ok := b.policyPart()
	require.True(t, ok)
	submit := func(id, queue string) int {
		status, _, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": %q, "kind": "k", "payload": 1}`, id, queue))
		return status
	}
	require.Equal(t, 202, submit("m1", "one"))
	b.awaitMessage("m1", "completed")
	require.Equal(t, 422, submit("m2", "two"))

	file := filepath.Join(dir, "retry-policies.yaml")
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	good := string(raw)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "worker-pool.yaml"), []byte("queues: {one: {concurrency: 0}}\n"),
		0o600))
	require.Eventually(t, func() bool { _, ok := b.policyPart(); return !ok }, 5*time.Minute, 50*time.Millisecond)
	detail, _ := b.policyPart()
	require.Contains(t, detail, first+" stays in force; the files are invalid: ")
	require.Contains(t, detail, "worker-pool.yaml:1: queues.one.concurrency: is 0; must be at least 1")
	_, metrics, _ := b.call("GET", "/metrics", "")
	require.Contains(t, metrics["text"], "dlqd_policy_up_to_date 0")
	require.Contains(t, metrics["text"], `dlqd_policy_reloads_total{outcome="error"}`)
	require.Equal(t, 202, submit("m3", "one"), "the old policy stays in force")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "worker-pool.yaml"), []byte("queues: {one: {concurrency: 3}}\n"),
		0o600))
	require.NoError(t, os.WriteFile(file,
		[]byte(strings.Replace(good, "queues: {", "queues: {two: {destination: d}, ", 1)), 0o600))
	require.Eventually(t, func() bool { return submit("m4", "two") == 202 }, 5*time.Minute, 50*time.Millisecond)
	b.awaitMessage("m4", "completed")
	require.Equal(t, 202, submit("m5", "one"))
	b.awaitMessage("m5", "completed") // the queue is still worked after its concurrency changed
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.processes WHERE queues = '{one,two}'") ==
			1
	}, 5*time.Minute, 50*time.Millisecond)
	second, ok := b.policyPart()
	require.True(t, ok)
	require.NotEqual(t, first, second)

	// Restore the old files, and reload as SIGHUP does.
	require.NoError(t, os.WriteFile(file, []byte(good), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "worker-pool.yaml"), nil, 0o600))
	require.ErrorContains(t, b.server.Reload(t.Context()), "missing or empty", "the file may be half written")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "worker-pool.yaml"), []byte("{}\n"), 0o600))
	require.NoError(t, b.server.Reload(t.Context()))
	third, _ := b.policyPart()
	require.Equal(t, first, third)
	require.Equal(t, 422, submit("m6", "two"))
}

// The operator rolls the policy back with "git revert", even if the revert removes a file. dlqd refuses a policy from
// which a file was removed without a commit.
func TestReload_AcceptsACommittedRemoval(t *testing.T) {
	t.Parallel()
	for name, kept := range map[string]bool{"file beside others": true, "only file": false} {
		for _, folder := range []string{"", "policy", "deploy/policy"} {
			t.Run(name+" "+folder, func(t *testing.T) {
				t.Parallel()
				testCommittedRemoval(t, folder, kept)
			})
		}
	}
}

// gitIn returns a function that runs git in a directory.
func gitIn(t *testing.T, dir string) func(args ...string) {
	t.Helper()
	return func(args ...string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "git", append([]string{
			"-C", dir, "-c", "user.name=t", "-c", "user.email=t@example.com",
		}, args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
}

// testCommittedRemoval reverts the commit that added a file to the policy in a folder of a repository. If keep is true,
// the policy keeps another file.
func testCommittedRemoval(t *testing.T, folder string, keep bool) {
	t.Helper()
	repository := t.TempDir()
	dir := filepath.Join(repository, folder)
	git := gitIn(t, repository)
	commit := func(name, text string) {
		require.NoError(t, os.MkdirAll(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		git("add", ".")
		git("commit", "--quiet", "-m", name)
	}
	git("init", "--quiet")
	if keep {
		commit("worker-pool.yaml", "{}")
	} else {
		git("commit", "--quiet", "--allow-empty", "-m", "first")
	}
	commit("dlq-routing.yaml", "rules: [{name: gone-page, match: {status: 404}, class: outage}]\n")
	source := policy.Source{Dir: dir, Destination: "http://127.0.0.1:9/"}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	b := setup(t, options{config: func(c *server.Config) { c.Source, c.Policy = source, loaded }})
	await := func(rule, ok bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			_, up := b.policyPart()
			_, out, _ := b.call("GET", "/api/policy", "")
			return up == ok && strings.Contains(fmt.Sprint(out["rules"]), "name:gone-page") == rule
		}, 5*time.Minute, 50*time.Millisecond)
	}
	await(true, true)
	git("revert", "--no-edit", "HEAD")
	await(false, true)
	git("revert", "--no-edit", "HEAD")
	await(true, true)
	git("rm", "--quiet", filepath.Join(dir, "dlq-routing.yaml"))
	await(true, false) // the removal is refused until it is committed
	git("commit", "--quiet", "-m", "remove")
	await(false, true)
}

// A commit that removes the environment in use is refused. reloadCommitted does not reload, refuse and log the same
// commit again.
func TestReload_RefusesTheRemovalOfItsEnvironment(t *testing.T) {
	t.Parallel()
	repository := t.TempDir()
	dir := filepath.Join(repository, "policy")
	git := gitIn(t, repository)
	prod := filepath.Join(dir, policy.EnvironmentsDir, "prod")
	require.NoError(t, os.MkdirAll(prod, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(prod, "worker-pool.yaml"), []byte("{}"), 0o600))
	git("init", "--quiet")
	git("commit", "--quiet", "--allow-empty", "-m", "first")
	git("add", ".")
	git("commit", "--quiet", "-m", "prod")
	source := policy.Source{Dir: dir, Env: "prod", Destination: "http://127.0.0.1:9/"}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	b := setup(t, options{config: func(c *server.Config) { c.Source, c.Policy = source, loaded }})
	git("revert", "--no-edit", "HEAD")
	require.Eventually(t, func() bool { _, ok := b.policyPart(); return !ok }, 5*time.Minute, 50*time.Millisecond)
	require.NoError(t, b.server.ReloadCommitted(t.Context()), "it is refused and logged again")
	git("revert", "--no-edit", "HEAD")
	require.Eventually(t, func() bool { _, ok := b.policyPart(); return ok }, 5*time.Minute, 50*time.Millisecond)
}

// If files of the policy are missing, the policy in force stays: the built-in defaults do not replace it. dlqd notices
// when the files are there again, whether a deployment replaces files or directories.
func TestReload_MissingFilesKeepThePolicyInForce(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(answering(http.StatusOK))
	t.Cleanup(receiver.Close)
	parent := t.TempDir()
	write := func(version, queue, secret string) string {
		dir := filepath.Join(parent, version)
		require.NoError(t, os.MkdirAll(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"),
			fmt.Appendf(nil, "queues: {%s: {destination: d}}\ndestinations: {d: {url: %q, secretFile: key}}\n", queue,
				receiver.URL), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), []byte(secret), 0o600))
		return dir
	}
	link := filepath.Join(parent, "current")
	switchTo := func(to string) { // replaces a symbolic link, as a ConfigMap's mount does
		require.NoError(t, os.Symlink(to, link+".new"))
		require.NoError(t, os.Rename(link+".new", link))
	}
	first := write("v1", "one", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	switchTo(first)
	source := policy.Source{Dir: link, Destination: receiver.URL}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	b := setup(t, options{config: func(c *server.Config) { c.Source, c.Policy = source, loaded }})
	submit := func(queue string) int {
		status, _, _ := b.call("POST", "/api/messages", fmt.Sprintf(`{"queue": %q, "kind": "k", "payload": 1}`, queue))
		return status
	}
	awaitServed := func(queue string) {
		t.Helper()
		require.Eventually(t, func() bool { _, ok := b.policyPart(); return ok && submit(queue) == 202 }, time.Minute,
			50*time.Millisecond, queue)
	}
	awaitRefused := func(problem, queue string) {
		t.Helper()
		require.Eventually(t, func() bool { detail, ok := b.policyPart(); return !ok && strings.Contains(detail, problem) },
			time.Minute, 50*time.Millisecond, problem)
		require.Equal(t, 202, submit(queue), "the previous policy stays in force")
	}
	awaitServed("one")
	switchTo(write("v2", "two", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
	awaitServed("two")
	require.NoError(t, os.Remove(link))
	awaitRefused("no such file", "two")
	require.NoError(t, os.Mkdir(link, 0o700)) // the directory has no files
	awaitRefused("missing or empty", "two")
	require.NoError(t, os.Remove(link))
	switchTo(first)
	awaitServed("one")
	file := filepath.Join(first, "retry-policies.yaml")
	require.NoError(t, os.Rename(file, file+".away"))
	awaitRefused("retry-policies: missing or empty", "one")
	require.NoError(t, os.Rename(file+".away", file))
	awaitServed("one")

	// The same holds for files with secrets.
	require.NoError(t, os.WriteFile(filepath.Join(first, "key"), nil, 0o600))
	awaitRefused("key is empty", "one")
	require.NoError(t, os.WriteFile(filepath.Join(first, "key"), []byte("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"), 0o600))
	awaitServed("one")
	require.Equal(t, "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", string(b.server.Policy().Destinations["d"].Secret))
}

// A build without Kafka would fail each redelivery of a source's records, so it refuses a policy with sources and keeps
// the previous one.
func TestReload_RefusesSourcesWithoutKafka(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	source := policy.Source{Dir: dir, Destination: "http://127.0.0.1:9/"}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	b := setup(t, options{config: func(c *server.Config) { c.Source, c.Policy = source, loaded }})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sources.yaml"), []byte(
		"clusters: {main: {brokers: ['127.0.0.1:1']}}\nsources: {orders: {cluster: main, topics: [dead]}}\n"), 0o600))
	require.ErrorContains(t, b.server.Reload(t.Context()), "this program has no Kafka: use dlqd-full of the same release")
	require.Empty(t, b.server.Policy().Sources.Sources, "the previous policy stays in force")
}
