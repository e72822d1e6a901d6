package server_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/server"
)

// With one connection in the pool, code that needs a second one while it holds the first would wait
// forever.
func TestServe_WorksWithOneConnection(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) {
		c.MaxConns = 1
		c.Archive = t.TempDir()
	}})
	const n = 12
	for i := range n {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n
	}, 5*time.Minute, 50*time.Millisecond)
	id := b.text("SELECT id FROM dlq.dead_letter_open WHERE event_id = 'm0'")
	require.Eventually(t, func() bool { // each loop has had the connection
		status, _, _ := b.call("GET", "/api/health", "")
		return status == http.StatusOK
	}, 5*time.Minute, 50*time.Millisecond)
	for _, ask := range []struct{ method, path, body string }{
		{"GET", "/api/dlq/entries", ""},
		{"GET", "/api/dlq/entries/" + id, ""},
		{"GET", "/api/dlq/stats", ""},
		{"GET", "/api/queues", ""},
		{"GET", "/api/health", ""},
		{"GET", "/metrics", ""},
		{"GET", "/api/dlq/automatic", ""},
		{"GET", "/api/dlq/capture", ""},
		{"GET", "/api/dlq/audit", ""},
		{"GET", "/api/circuit-breakers", ""},
		{"POST", "/api/queues/default/pause", ""},
		{"POST", "/api/queues/default/resume", ""},
		{"POST", "/api/dlq/reclassify", "{}"},
		{"POST", "/api/dlq/export", `{"filter": {}}`},
		{"POST", "/api/dlq/replay", `{"filter": {"ids": ["` + id + `"]}, "dryRun": true}`},
		{"POST", "/api/dlq/entries/" + id + "/replay", "{}"},
		{
			"POST", "/api/messages/batch",
			`{"messages": [{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload": {"n": 1}}]}`,
		},
		{"POST", "/api/dlq/automatic/stop", "{}"},
		{"POST", "/api/dlq/automatic/resume", "{}"},
		{"POST", "/api/circuit-breakers/destination:default/reset", "{}"},
		{"POST", "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["default"]}}`},
	} {
		status, out, _ := b.call(ask.method, ask.path, ask.body)
		require.Less(t, status, 300, "%s %s: %v", ask.method, ask.path, out)
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			status, out, _ := b.call("POST", "/api/dlq/erasures",
				fmt.Sprintf(`{"note": "request %d", "filter": {"payload": {"n": %d}}}`, i, i))
			if status != http.StatusOK {
				t.Errorf("erasure: %d %v", status, out)
			}
		})
	}
	all.Wait()
}
