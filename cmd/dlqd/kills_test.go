package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// inTrial reports whether this is a trial ("make trial-kills" and others). Tests that read inTrial then run at full
// length and check figures.
var inTrial = os.Getenv("DLQD_TRIAL") != ""

// ordered is a database with processes that deliver messages with ordering keys. The receiver, ledger, records the
// messages.
type ordered struct {
	*testing.T

	url    string
	pool   *pgxpool.Pool
	config string // directory
	ledger ledger
}

// arrival is a delivery that the receiver answered with success.
type arrival struct {
	id string
	n  int // the message's position in the sequence of its key
	at time.Time
}

// ledger is the receiver. For each key it records the messages that it accepts, in the order of their arrival. It also
// records the messages that it has refused.
type ledger struct {
	mu      sync.Mutex
	keys    map[string][]arrival
	refused map[string]bool
	// If wait is not nil, the receiver calls it with the id of each message that it accepts, before it answers.
	wait func(id string)
}

// ServeHTTP implements http.Handler. Message ids have the form key-number. The receiver refuses every 50th message of a
// key once.
func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("Webhook-Id")
	key, number, _ := strings.Cut(id, "-")
	n, err := strconv.Atoi(number)
	if err != nil {
		panic(err)
	}
	l.mu.Lock()
	refuse := n%50 == 49 && !l.refused[id]
	if refuse {
		l.refused[id] = true
	} else {
		l.keys[key] = append(l.keys[key], arrival{id, n, time.Now()})
	}
	wait := l.wait
	l.mu.Unlock()
	if refuse {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	if wait != nil {
		wait(id)
	}
}

// counts returns the number of messages, the number of repeated deliveries, the greatest number of deliveries of one
// message, and the number of repeated deliveries that arrived after a later message of the same key. It requires that
// the first deliveries of a key's messages are in order.
func (o *ordered) counts() (messages, repeats, most, behind int) {
	o.Helper()
	o.ledger.mu.Lock()
	defer o.ledger.mu.Unlock()
	for key, arrivals := range o.ledger.keys {
		times := map[int]int{}
		latest := -1
		for _, a := range arrivals {
			times[a.n]++
			most = max(most, times[a.n])
			switch {
			case times[a.n] == 1:
				require.Equal(o, latest+1, a.n, "key %s: the first delivery of each message is in order", key)
				latest = a.n
				messages++
				continue
			case a.n < latest:
				behind++
				o.Logf("%s came again behind %s-%d", a.id, key, latest)
			}
			repeats++
		}
	}
	return messages, repeats, most, behind
}

func newOrdered(t *testing.T) *ordered {
	t.Helper()
	o := &ordered{T: t, url: postgrestest.URL(t), config: dataDir(t)}
	o.pool = postgrestest.Open(t, o.url)
	o.ledger.keys, o.ledger.refused = map[string][]arrival{}, map[string]bool{}
	receiver := startReceiver(t, o.ledger.ServeHTTP)
	for name, content := range map[string]string{
		"retry-policies.yaml": fmt.Sprintf("queues: {default: {ordering: true, maxAttempts: 6, backoff: {delay: 10ms}, "+
			"timeout: 10s}}\ndestinations: {default: {url: %q}}\n", receiver),
		"circuit-breaker.yaml": "defaults: {enabled: false}\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(o.config, name), []byte(content), 0o600))
	}
	return o
}

func (o *ordered) serve(url string) *served {
	o.Helper()
	return serve(o.T, "--database-url", url, "--config-dir", o.config)
}

// process returns the id that dlq.processes has for a running process.
func (o *ordered) process(s *served) (id string) {
	o.Helper()
	require.NoError(o, o.pool.QueryRow(o.Context(), `SELECT id FROM dlq.processes WHERE name LIKE '%/' || $1
		ORDER BY started_at DESC LIMIT 1`, strconv.Itoa(s.cmd.Process.Pid)).Scan(&id))
	return id
}

func (o *ordered) count(sql string, args ...any) (n int) {
	o.Helper()
	require.NoError(o, o.pool.QueryRow(o.Context(), sql, args...).Scan(&n))
	return n
}

// submit submits messages in one request. It tries the processes in turn until one accepts the request.
func (o *ordered) submit(ids []string, apis func() []string) {
	o.Helper()
	type message struct {
		ID      string `json:"messageId"`
		Queue   string `json:"queue"`
		Kind    string `json:"kind"`
		Key     string `json:"orderingKey"`
		Payload int    `json:"payload"`
	}
	var body struct {
		Messages []message `json:"messages"`
	}
	for _, id := range ids {
		key, _, _ := strings.Cut(id, "-")
		body.Messages = append(body.Messages, message{id, "default", "k", key, 1})
	}
	raw, err := json.Marshal(body)
	require.NoError(o, err)
	client := &http.Client{Timeout: 5 * time.Second}
	require.Eventually(o, func() bool {
		for _, api := range apis() {
			response, err := client.Post(api+"/api/messages/batch", "application/json", bytes.NewReader(raw))
			if err != nil {
				continue
			}
			_ = response.Body.Close()
			if response.StatusCode == http.StatusAccepted || response.StatusCode == http.StatusOK {
				return true
			}
		}
		return false
	}, 5*time.Minute, 10*time.Millisecond)
}

// settle waits until all jobs are completed. It requires that their number is messages, and that there are no dead
// letters.
func (o *ordered) settle(messages int) {
	o.Helper()
	require.Eventually(o, func() bool { return o.count("SELECT count(*) FROM river_job WHERE state <> 'completed'") == 0 },
		6*time.Minute, 50*time.Millisecond)
	require.Equal(o, messages, o.count("SELECT count(*) FROM river_job"))
	require.Zero(o, o.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Eventually(o, func() bool {
		return o.count("SELECT count(*) FROM dlq.ordered_jobs o WHERE dlq.is_undone(o.job_id, o.job_created_at)") == 0
	}, 5*time.Minute, 50*time.Millisecond)
}

// TestServe_KeepsOrderWhenKilledBeforeCompletion kills a process after the receiver has answered a delivery and before
// River has recorded the answer: the test locks the job's row, so the process waits for the row. Later messages of the
// key must not be delivered until the message has been delivered again.
func TestServe_KeepsOrderWhenKilledBeforeCompletion(t *testing.T) {
	t.Parallel()
	o := newOrdered(t)
	arrived, answer := make(chan string, 10), make(chan struct{})
	o.ledger.wait = func(id string) {
		arrived <- id
		if id == "a-0" {
			<-answer
		}
	}
	first := o.serve(o.url)
	o.submit([]string{"a-0", "a-1", "a-2"}, func() []string { return []string{first.api} })
	require.Equal(t, "a-0", <-arrived)

	tx, err := o.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE args ->> 'messageId' = 'a-0' FOR UPDATE")
	require.NoError(t, err)
	close(answer)
	require.Eventually(t, func() bool {
		return o.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND cardinality(pg_blocking_pids(pid)) > 0 AND query ~* 'river_job|complete_ordered'`) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, first.cmd.Process.Kill())
	_ = first.cmd.Wait()
	// End the killed process's session in the database, which still waits for the row, so that the session writes nothing
	// later.
	_, err = o.pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
	require.NoError(t, err)

	second := o.serve(o.url)
	require.NoError(t, tx.Rollback(t.Context()))
	o.settle(3)
	messages, repeats, _, behind := o.counts()
	require.Equal(t, 3, messages)
	require.LessOrEqual(t, repeats, 1)
	require.Zero(t, behind, "repeats behind later messages of their key")
	require.Zero(t, second.stop(syscall.SIGTERM), second.log.String())
}

// cut blocks all traffic through the proxies for the time d. For the processes that use the proxies, the database
// hangs.
func cut(d time.Duration, proxies ...*postgrestest.Proxy) {
	for _, p := range proxies {
		p.Hold()
	}
	time.Sleep(d)
	for _, p := range proxies {
		p.Release()
	}
}

// TestServe_KeepsOrderThroughKills delivers messages with two processes and kills one of them. A trial has 10,000
// messages with 200 keys. It kills twice, stops a process for 40 s, cuts a process off from the database for 40 s, and
// lets the database hang for 40 s.
func TestServe_KeepsOrderThroughKills(t *testing.T) {
	t.Parallel()
	o := newOrdered(t)
	keys, perKey, pause, slowest, few := 20, 20, 20*time.Millisecond, 40, 1
	if inTrial {
		keys, perKey, pause, slowest, few = 200, 50, 2*time.Second, 1000, 10
	}
	o.ledger.wait = func(string) { time.Sleep(time.Duration(rand.IntN(slowest)) * time.Millisecond) }

	proxies := []*postgrestest.Proxy{postgrestest.NewProxy(t, o.url), postgrestest.NewProxy(t, o.url)}
	var mu sync.Mutex
	servers := make([]*served, len(proxies))
	start := func(i int) {
		s := o.serve(proxies[i].URL)
		mu.Lock()
		defer mu.Unlock()
		servers[i] = s
	}
	for i := range servers {
		start(i)
	}
	apis := func() (apis []string) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range servers {
			apis = append(apis, s.api)
		}
		return apis
	}
	submitted := make(chan struct{})
	go func() {
		defer close(submitted)
		for n := range perKey {
			for from := 0; from < keys; from += 20 {
				var ids []string
				for key := from; key < from+20; key++ {
					ids = append(ids, fmt.Sprintf("k%d-%d", key, n))
				}
				o.submit(ids, apis)
				time.Sleep(pause / 10)
			}
			time.Sleep(pause)
		}
	}()
	running := func(process string) []string {
		rows, err := o.pool.Query(t.Context(), `SELECT args ->> 'messageId' FROM river_job WHERE state = 'running'
			AND attempted_by[cardinality(attempted_by)] = $1`, process)
		require.NoError(t, err)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return ids
	}
	rescued := func() int {
		return o.count(`SELECT count(*) FROM river_job
			WHERE EXISTS (SELECT FROM unnest(errors) e WHERE e ->> 'error' LIKE 'Stuck job rescued by dlqd%')`)
	}
	busy := func(i int) (process string) {
		process = o.process(servers[i])
		require.Eventually(t, func() bool { return len(running(process)) >= few }, 2*time.Minute, time.Millisecond)
		return process
	}
	kill := func(i int) {
		process := busy(i)
		at := time.Now()
		require.NoError(t, servers[i].cmd.Process.Kill())
		_ = servers[i].cmd.Wait()
		left := running(process)
		start(i)
		require.Eventually(t, func() bool { return len(running(process)) == 0 }, 2*time.Minute, 50*time.Millisecond,
			"messages of the killed process")
		require.NotContains(t, o.text("SELECT coalesce(string_agg(metadata::text, ' '), '') FROM river_job"),
			"river:rescue_count")
		t.Logf("kill -9: %d messages were running, and were rescued after %s", len(left),
			time.Since(at).Round(100*time.Millisecond))
		if inTrial {
			require.Less(t, time.Since(at), 45*time.Second)
		}
	}
	kill(0)
	if inTrial {
		before := rescued()
		busy(1)
		cut(40*time.Second, proxies...)
		time.Sleep(10 * time.Second)
		require.Equal(t, before, rescued(), "a database that hangs rescues no message")

		process := busy(1)
		require.NoError(t, servers[1].cmd.Process.Signal(syscall.SIGSTOP))
		n := len(running(process))
		time.Sleep(40 * time.Second)
		require.NoError(t, servers[1].cmd.Process.Signal(syscall.SIGCONT))
		t.Logf("SIGSTOP for 40 s: %d messages were running, %d rescued", n, rescued()-before)

		before = rescued()
		process = busy(0)
		n = len(running(process))
		cut(40*time.Second, proxies[0])
		t.Logf("cut off for 40 s: %d messages were running, %d rescued", n, rescued()-before)
		kill(1)
	}
	<-submitted
	o.settle(keys * perKey)
	messages, repeats, most, behind := o.counts()
	t.Logf("%d messages, %d repeats (a message came %d times at most), %d behind later ones of their key; %d were rescued",
		messages, repeats, most, behind, rescued())
	require.Equal(t, keys*perKey, messages)
	require.LessOrEqual(t, most, 2, "at most one repeat")
	require.Zero(t, behind, "repeats behind later messages of their key")
	for _, s := range servers {
		require.Zero(t, s.stop(syscall.SIGTERM), s.log.String())
	}
}

func (o *ordered) text(sql string) (text string) {
	o.Helper()
	require.NoError(o, o.pool.QueryRow(o.Context(), sql).Scan(&text))
	return text
}
