package server_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/server"
)

type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Any hostile value in any input gets a short client error without internals of dlqd.
func TestHostileValues_GetShortClientErrors(t *testing.T) {
	t.Parallel()
	log := &lockedBuffer{}
	b := setup(t, options{
		receiver: answering(http.StatusNotFound),
		config:   func(c *server.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) },
	})
	b.submit("m1")
	b.awaitMessage("m1", "dead-lettered")
	const id = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"
	refused := func(method, path, body string) {
		status, out, _ := b.call(method, path, body)
		name := method + " " + path + " " + body[:min(len(body), 200)]
		require.GreaterOrEqual(t, status, 400, name)
		require.Less(t, status, 500, "%s: %v", name, out)
		require.Less(t, len(fmt.Sprint(out)), 4000, name)
	}
	for _, value := range []string{"%00", "a%00b", "%ff", "%c3%28", "%ed%a0%80"} {
		for _, parameter := range []string{
			"queue", "kind", "errorType", "errorClass", "source", "after", "before", "order",
			"cursor", "limit", "status",
		} {
			refused("GET", "/api/dlq/entries?"+parameter+"="+value, "")
		}
		for _, parameter := range []string{"actor", "dbUser", "origin", "entryId", "text", "configVersion", "cursor"} {
			refused("GET", "/api/dlq/audit?"+parameter+"="+value, "")
		}
		for _, path := range []string{"flow?over=", "flow?queue=", "heat-map?timezone=", "groups?queue=", "queues?queue="} {
			refused("GET", "/api/dlq/analytics/"+path+value, "")
		}
		refused("GET", "/api/messages/"+value, "")
		refused("GET", "/api/dlq/entries/"+value, "")
		refused("POST", "/api/queues/"+value+"/pause", "")
		refused("POST", "/api/circuit-breakers/"+value+"/reset", "{}")
	}
	long := strings.Repeat("x", 500_000)
	deep := strings.Repeat("[", 5000) + strings.Repeat("]", 5000)
	for _, value := range []string{
		`"\u0000"`, `"\ud800"`, "\"\xff\"", "99999999999", "1e400000", deep, `"` + long + `"`,
		`{"a": 1, "a": 2}`,
	} {
		for _, body := range []string{
			`{"filter": {"minRetryCount": %s}}`, `{"filter": {"queue": [%s]}, "dryRun": %s}`,
			`{"filter": {"after": %s}}`, `{"filter": {"maxAge": %s}}`, `{"filter": {"ids": [%s]}}`,
			`{"filter": {"queue": ["a"]}, "concurrency": %s}`,
			`{"filter": {"queue": ["a"]}, "batchSize": %s}`, `{"filter": {"queue": ["a"]}, "patch": %s}`,
			`{"filter": {"queue": ["a"]}, "note": %s, "actor": %s}`,
		} {
			refused("POST", "/api/dlq/replay", strings.ReplaceAll(body, "%s", value))
		}
		for _, body := range []string{
			`{"do": "tag", "tags": [%s], "filter": {"queue": ["a"]}}`,
			`{"do": "assign", "assignee": %s, "dryRun": %s, "filter": {"queue": ["a"]}}`,
		} {
			refused("POST", "/api/dlq/bulk", strings.ReplaceAll(body, "%s", value))
		}
		refused("POST", "/api/dlq/entries/"+id+"/replay", `{"payload": 1, "note": `+value+`}`)
		refused("POST", "/api/messages", `{"queue": "default", "kind": `+value+`, "payload": 1}`)
		refused("POST", "/api/dlq/automatic/set", `{"scope": "queue", "name": `+value+`, "enabled": `+value+`}`)
		refused("POST", "/api/circuit-breakers/destination:default/open", `{"for": `+value+`}`)
	}
	refused("POST", "/api/dlq/replay", `{"Filter": {"queue": ["a"]}, "dryRun": true}`)
	refused("POST", "/api/dlq/replay", `{"filter": {"Queue": ["a"]}, "dryRun": true}`)
	refused("POST", "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["a"]}, "filter": {}, "all": true}`)
	refused("GET", "/"+long[:7000], "")

	for _, path := range []string{"/api/messages", "/api/dlq/replay", "/api/dlq/entries/" + id + "/discard"} {
		status, out, header := b.call("GET", path, "")
		require.Equal(t, http.StatusMethodNotAllowed, status, out)
		require.Equal(t, "POST", header.Get("Allow"))
	}
	status, _, _ := b.call("GET", "/api/nothing", "")
	require.Equal(t, http.StatusNotFound, status)
	for line := range strings.SplitSeq(log.String(), "\n") { // on a busy machine a loop may be late
		require.False(t, strings.Contains(line, "level=ERROR") && strings.Contains(line, `msg="request `), line)
	}

	// An invalid trace context is ignored.
	for _, state := range []string{strings.Repeat("a=b,", 15_000), "a=\xff"} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.base+"/api/messages",
			strings.NewReader(`{"messageId": "t`+fmt.Sprint(len(state))+`", "queue": "default", "kind": "k", "payload": 1}`))
		require.NoError(t, err)
		request.Header.Set("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		request.Header.Set("Tracestate", state)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusAccepted, response.StatusCode)
	}
	require.Equal(t, 2, b.count(`SELECT count(*) FROM river_job WHERE metadata ? 'traceparent'
		AND NOT metadata ? 'tracestate'`))
}

// An export that the client does not read is cut off. A client that disconnects causes no error in
// the log.
func TestExport_CutsOffClientsThatDoNotRead(t *testing.T) {
	t.Parallel()
	log := &lockedBuffer{}
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
		c.WriteTimeout = time.Second
	}})
	const n = 32 // 16 MB, more than the buffers of a connection
	for i := range n {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": "m%d", "queue": "default", "kind": "k", "payload": %q}`, i, strings.Repeat("x", 500_000)))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n
	}, 5*time.Minute, 50*time.Millisecond)
	begin := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(b.base, "http://"))
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4096))
		_, err = fmt.Fprintf(conn, "POST /api/dlq/export HTTP/1.1\r\nHost: localhost\r\nContent-Type: "+
			"application/json\r\nContent-Length: 14\r\n\r\n{\"filter\": {}}")
		require.NoError(t, err)
		return conn
	}
	ended := func(exports int) {
		require.Eventually(t, func() bool {
			_, out, _ := b.call("GET", "/metrics", "")
			return strings.Contains(out["text"].(string),
				fmt.Sprintf(`dlqd_http_request_seconds_count{operation="export"} %d`, exports))
		}, 5*time.Minute, 50*time.Millisecond) // dlqd reads 16 MB first
	}
	unread := begin()
	defer unread.Close()
	ended(1)
	hangsUp := begin()
	_, err := io.ReadFull(hangsUp, make([]byte, 100))
	require.NoError(t, err)
	require.NoError(t, hangsUp.Close())
	ended(2)
	for line := range strings.Lines(log.String()) { // on a busy machine a statement may reach its time limit
		require.False(t, strings.Contains(line, "level=ERROR") && !strings.Contains(line, "deadline exceeded"), line)
	}
	rows := func(n int) bool {
		_, out, _ := b.call("GET", "/metrics", "")
		return strings.Contains(out["text"].(string),
			fmt.Sprintf(`dlqd_default_partition_rows{partition="audit trail"} %d`, n))
	}
	require.Eventually(t, func() bool { return rows(0) }, 5*time.Minute, 50*time.Millisecond)
	b.exec(`INSERT INTO dlq.dead_letter_transitions_default (at, entry_id, to_status, actor, queue, kind)
		VALUES (now() + interval '400 days', gen_random_uuid(), 'dlq_pending', 'a', 'q', 'k')`)
	require.Eventually(t, func() bool { return rows(1) }, 5*time.Minute, 50*time.Millisecond)
}

func TestMessage_DuplicatesInABatchNameTheFirst(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	first, second := uuid.NewString(), uuid.NewString()
	batch := fmt.Sprintf(`{"messages": [{"messageId": %q, "queue": "default", "kind": "k", "payload": 1},
		{"messageId": %q, "queue": "default", "kind": "k", "payload": 1}]}`, first, second)
	status, out, _ := b.call("POST", "/api/messages/batch", batch)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitMessage(first, "completed")
	b.awaitMessage(second, "completed")
	status, out, _ = b.call("POST", "/api/messages/batch", batch)
	require.Equal(t, http.StatusOK, status, out)
	for _, m := range out["messages"].([]any) {
		require.Equal(t, "completed", m.(map[string]any)["position"].(map[string]any)["state"])
	}
	document, err := api.OpenAPI()
	require.NoError(t, err)
	require.Contains(t, string(document), "The same message was submitted before")
}

// The error of a refused move lists the moves that the entry allows.
func TestMoves_RefusalListsTheAllowedMoves(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	position := b.awaitMessage("m1", "dead-lettered")
	id := position["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(id, "dlq_manual")
	for _, step := range []struct{ refused, detail, then string }{
		{"park", "Allowed from dlq_manual: replay, discard, expire, resolve, unpark.", "discard"},
		{"replay", "Allowed from dlq_archived: reopen.", ""},
	} {
		status, out, _ := b.call("POST", "/api/dlq/entries/"+id+"/"+step.refused, "{}")
		require.Equal(t, http.StatusConflict, status)
		require.Contains(t, out["detail"], step.detail)
		if step.then != "" {
			status, out, _ = b.call("POST", "/api/dlq/entries/"+id+"/"+step.then, "{}")
			require.Equal(t, http.StatusOK, status, out)
		}
	}
}
