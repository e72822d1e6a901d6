package server_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// repaired is a receiver that rejects every message at first, then accepts some kinds, and finally accepts all
// messages.
type repaired struct {
	mu       sync.Mutex
	phase    int            // 0: nothing works; 1: some kinds do; 2: all do
	received map[string]int // messages since phase 1, by kind
	times    map[string]int // deliveries since phase 1, by message
	ofRuns   int            // deliveries since phase 1 that name a replay run
}

func (r *repaired) ServeHTTP(w http.ResponseWriter, in *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kind := in.Header.Get("Dlqd-Kind")
	refuse := func(errorType, class string) {
		w.Header().Set("X-Error-Type", errorType)
		w.Header().Set("X-Error-Class", class)
		w.WriteHeader(http.StatusUnprocessableEntity)
	}
	if r.phase == 0 {
		refuse("AS_"+strings.ToUpper(kind), "business")
		return
	}
	if in.Header.Get("Dlqd-Run-Id") != "" {
		r.ofRuns++
	}
	r.received[kind]++
	r.times[in.Header.Get("Webhook-Id")]++
	switch {
	case r.phase == 2 || kind == "fixed" || kind == "few":
	case kind == "broken" || kind == "mixed" && r.received[kind] == 3:
		refuse("AS_"+strings.ToUpper(kind), "business")
	case kind == "moved":
		refuse("MOVED_AWAY", "transient")
	}
}

func (r *repaired) set(phase int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.phase, r.received, r.times, r.ofRuns = phase, map[string]int{}, map[string]int{}, 0
}

func (r *repaired) seen(kind string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.received[kind]
}

// A progressive run replays five groups. The cause of one is fixed, one is as broken as before, one recovers in part,
// one fails in a new way, and one has only three messages.
func TestProgressive_FiveGroupsAtARealReceiver(t *testing.T) {
	t.Parallel()
	receiver := &repaired{}
	b := setup(t, options{receiver: receiver.ServeHTTP})
	sizes := map[string]int{"fixed": 40, "broken": 10, "mixed": 10, "moved": 10, "few": 3}
	for kind, n := range sizes {
		for i := range n {
			status, out, _ := b.call("POST", "/api/messages",
				fmt.Sprintf(`{"messageId": "%s-%d", "queue": "default", "kind": %q, "payload": 1}`, kind, i, kind))
			require.Equal(t, http.StatusAccepted, status, out)
		}
	}
	b.awaitCount(73, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND fingerprint IS NOT NULL")
	receiver.set(1)
	status, out, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"queue": ["default"]}, "progressive": true}`)
	require.Equal(t, http.StatusAccepted, status, out)
	run := out["run"].(map[string]any)["id"].(string)
	b.awaitCount(1, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'stopped'")
	b.awaitCount(2, "SELECT count(*) FROM dlq.replay_run_groups WHERE state = 'done'") // both have their last outcomes
	groups := func() map[string]map[string]any {
		_, out, _ := b.call("GET", "/api/dlq/replays/"+run, "")
		byType := map[string]map[string]any{}
		for _, g := range out["groups"].([]any) {
			g := g.(map[string]any)
			byType[g["errorType"].(string)] = g
		}
		return byType
	}
	of := groups()
	require.Equal(t, "done", of["AS_FIXED"]["state"], of["AS_FIXED"])
	require.Equal(t, "done", of["AS_FEW"]["state"], of["AS_FEW"])
	require.Equal(t, "stopped", of["AS_BROKEN"]["state"], of["AS_BROKEN"])
	require.Contains(t, of["AS_BROKEN"]["reason"], "2 of 2 failed again")
	require.Equal(t, "held", of["AS_MIXED"]["state"], of["AS_MIXED"])
	require.Contains(t, of["AS_MIXED"]["reason"], "4 of 5 recovered")
	require.Equal(t, "held", of["AS_MOVED"]["state"], of["AS_MOVED"])
	require.Contains(t, of["AS_MOVED"]["reason"], "failed in a new way")
	for kind, n := range map[string]int{"fixed": 40, "few": 3, "broken": 5, "mixed": 5, "moved": 5} {
		require.Equal(t, n, receiver.seen(kind), kind)
	}
	require.Equal(t, 58, receiver.ofRuns)
	// The entries that failed in a new way are transient, but dlqd does not redeliver them automatically before the run
	// has ended.
	b.awaitCount(5, `SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND error_type = 'MOVED_AWAY'
		AND waiting_for = 'run'`)
	require.Equal(t, 5, receiver.seen("moved"))
	require.Equal(t, 5, b.count(`SELECT count(*) FROM dlq.replay_run_entries r JOIN dlq.dead_letter_open e
		ON e.id = r.entry_id WHERE r.error_class = 'transient' AND r.fingerprint = e.fingerprint`))

	page := func(path string) string {
		t.Helper()
		answer, err := http.Get(b.base + path)
		require.NoError(t, err)
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, answer.StatusCode)
		return string(text)
	}
	shown := page("/replays/" + run)
	require.Contains(t, shown, "4 of 5 recovered")
	require.Contains(t, shown, `name="do" value="go-on"`)
	require.Contains(t, page("/replays/new?q=queue:default"), `name="progressive" value="yes">`, "below 100: not checked")

	receiver.set(2)
	status, out, _ = b.call("POST", "/api/dlq/replays/"+run+"/go-on",
		fmt.Sprintf(`{"groups": [%v, %v], "note": "mended"}`, of["AS_MIXED"]["number"], of["AS_MOVED"]["number"]))
	require.Equal(t, http.StatusOK, status, out)
	status, out, _ = b.call("POST", "/api/dlq/replays/"+run+"/end",
		fmt.Sprintf(`{"groups": [%v]}`, of["AS_BROKEN"]["number"]))
	require.Equal(t, http.StatusOK, status, out)
	b.awaitCount(1, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed' AND NOT unsettled")
	of = groups()
	require.Equal(t, "done", of["AS_MIXED"]["state"])
	require.Equal(t, "ended", of["AS_BROKEN"]["state"])
	// After the end of the run, dlqd redelivers the entries that failed in it.
	b.awaitCount(0, "SELECT count(*) FROM dlq.dead_letter_open WHERE error_type = 'MOVED_AWAY'")
	require.Equal(t, 11, b.count("SELECT count(*) FROM dlq.dead_letter_open"), "those of AS_BROKEN, and one of AS_MIXED")
	receiver.mu.Lock()
	defer receiver.mu.Unlock()
	for message, n := range receiver.times {
		require.Equal(t, 1, n, message)
	}
	_, out, _ = b.call("GET", "/api/dlq/audit?text=4+of+5+recovered", "")
	require.Contains(t, fmt.Sprint(out), "group held", "the decision is in the trail")
}

// A receiver accepts a few requests a second and answers further ones with 429. The progressive run slows down, and the
// receiver accepts each message once.
func TestProgressive_SlowsForARealReceiver(t *testing.T) {
	t.Parallel()
	const takes = 3 // requests a second
	var mu sync.Mutex
	isFixed, isWell, second, inSecond, refused, arrived := false, false, int64(0), 0, 0, map[string]int{}
	receiver := func(w http.ResponseWriter, in *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now().Unix(); now != second {
			second, inSecond = now, 0
		}
		switch inSecond++; {
		case !isFixed:
			w.Header().Set("X-Error-Class", "business")
			w.WriteHeader(http.StatusUnprocessableEntity)
		case !isWell && inSecond > takes:
			refused++
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			arrived[in.Header.Get("Webhook-Id")]++
		}
	}
	set := func(which *bool) {
		mu.Lock()
		defer mu.Unlock()
		*which = true
	}
	b := setup(t, options{receiver: receiver})
	for i := range 60 {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": "m-%d", "queue": "default", "kind": "order", "payload": 1}`, i))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	b.awaitCount(60, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND fingerprint IS NOT NULL")
	set(&isFixed)
	status, out, _ := b.call("POST", "/api/dlq/replay",
		`{"filter": {"queue": ["default"]}, "progressive": true, "rate": 1000}`)
	require.Equal(t, http.StatusAccepted, status, out)
	run := out["run"].(map[string]any)["id"].(string)
	b.awaitCount(1, "SELECT least(count(*), 1) FROM dlq.acts WHERE act = 'rate lowered'")
	set(&isWell)
	b.awaitCount(1, "SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed'")
	_, out, _ = b.call("GET", "/api/dlq/replays/"+run, "")
	require.InDelta(t, 60, out["succeeded"], 0)
	require.Contains(t, fmt.Sprint(out["decisions"]), "the rate of default was lowered from 1000 to 500 a second")
	answer, err := http.Get(b.base + "/replays/" + run)
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	page, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Contains(t, string(page), "the rate of default was lowered from 1000 to 500 a second")
	mu.Lock()
	defer mu.Unlock()
	require.Positive(t, refused)
	require.Len(t, arrived, 60)
	for message, n := range arrived {
		require.Equal(t, 1, n, message)
	}
}
