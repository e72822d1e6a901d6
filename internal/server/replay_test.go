package server_test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/server"
)

// A deploy broke one kind of message. After the fix, all its dead letters are replayed, and the
// test follows the progress.
func TestReplay_RunRecoversAllEntriesOfAKind(t *testing.T) {
	t.Parallel()
	var mended atomic.Bool
	b := setup(t, options{receiver: func(w http.ResponseWriter, _ *http.Request) {
		if !mended.Load() {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}})
	const n = 30
	for i := range n {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n
	}, 5*time.Minute, 50*time.Millisecond)

	status, out, _ := b.call("POST", "/api/dlq/replay",
		`{"filter": {"errorType": ["HTTP_422"]}, "dryRun": true, "mergePatch": {"n": 2}}`)
	require.Equal(t, http.StatusOK, status, out)
	preview := out["preview"].(map[string]any)
	require.EqualValues(t, n, preview["total"])
	require.Len(t, preview["samples"], 5)
	require.EqualValues(t, 2,
		preview["samples"].([]any)[0].(map[string]any)["patched"].(map[string]any)["payload"].(map[string]any)["n"])
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))

	status, out, _ = b.call("POST", "/api/dlq/replay", `{"filter": {}}`)
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Contains(t, out["detail"], "an empty filter matches every entry. To select all entries, pass \"all\": true.")
	status, _, _ = b.call("POST", "/api/dlq/replay", `{"filter": {"errorTipe": ["x"]}}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, "a misspelt field is refused")

	mended.Store(true)
	status, out, _ = b.call("POST", "/api/dlq/replay",
		`{"filter": {"errorType": ["HTTP_422"]}, "actor": "kim", "note": "deploy 81 reverted", "rate": 200}`)
	require.Equal(t, http.StatusAccepted, status, out)
	id := out["run"].(map[string]any)["id"].(string)

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.base+"/api/dlq/replays/"+id+"/events", nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, "text/event-stream", response.Header.Get("Content-Type"))
	last := ""
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			last = data
		}
	}
	require.Contains(t, last, `"status":"completed"`)
	require.Contains(t, last, fmt.Sprintf(`"succeeded":%d`, n))
	_, run, _ := b.call("GET", "/api/dlq/replays/"+id, "")
	require.EqualValues(t, n, run["replayed"])
	require.Equal(t, "kim", run["actor"])
	status, _, _ = b.call("POST", "/api/dlq/replays/"+id+"/pause", `{}`)
	require.Equal(t, http.StatusConflict, status)
	status, _, _ = b.call("GET", "/api/dlq/replays/0198a0b0-0000-7000-8000-000000000000", "")
	require.Equal(t, http.StatusNotFound, status)
	_, runs, _ := b.call("GET", "/api/dlq/replays", "")
	require.Len(t, runs["runs"], 1)
}

func TestReplay_RefusedWhileTheBreakerIsOpen(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	b.awaitMessage("m1", "dead-lettered")
	status, out, _ := b.call("POST", "/api/circuit-breakers/destination:default/open", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	status, out, _ = b.call("POST", "/api/dlq/replay", `{"filter": {}, "all": true}`)
	require.Equal(t, http.StatusConflict, status)
	require.Contains(t, out["detail"], "circuit breaker destination:default is open")
	status, out, _ = b.call("POST", "/api/dlq/replay", `{"filter": {}, "all": true, "force": true}`)
	require.Equal(t, http.StatusAccepted, status, out)
}

// A stop does not wait for clients that follow a run.
func TestStop_DoesNotWaitForEventStreams(t *testing.T) {
	t.Parallel()
	b := setup(t, options{
		receiver: answering(http.StatusNotFound), config: func(c *server.Config) { c.StopTimeout = 12 * time.Second },
	})
	b.submit("m1")
	b.awaitMessage("m1", "dead-lettered")
	_, out, _ := b.call("POST", "/api/dlq/replay", `{"filter": {}, "all": true}`)
	id := out["run"].(map[string]any)["id"].(string)
	status, out, _ := b.call("POST", "/api/dlq/replays/"+id+"/pause", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	response, err := http.Get(b.base + "/api/dlq/replays/" + id + "/events")
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	require.True(t, lines.Scan())
	b.stop()
}

// Each entry's audit trail contains the edit of the run.
func TestReplay_PatchIsAudited(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	id := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(id, "dlq_manual")
	for _, edit := range []string{`"mergePatch": {"n": null}`, `"patch": [{"op": "add", "path": "/b", "value": 2}]`} {
		status, out, _ := b.call("POST", "/api/dlq/replay", fmt.Sprintf(`{"filter": {"ids": [%q]}, %s}`, id, edit))
		require.Equal(t, http.StatusAccepted, status, out)
		require.Eventually(t, func() bool {
			return b.count(fmt.Sprintf("SELECT count(*) FROM dlq.dead_letter_transitions WHERE detail @> '{%s}'", edit)) == 1
		}, 5*time.Minute, 50*time.Millisecond)
		b.awaitEntry(id, "dlq_manual")
	}
}

func TestReplay_EventsOfAnUnknownRunAnswerAProblem(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	for id, want := range map[string]int{
		"0198a0b0-0000-7000-8000-000000000000": http.StatusNotFound, "x": http.StatusUnprocessableEntity,
	} {
		status, out, _ := b.call("GET", "/api/dlq/replays/"+id+"/events", "")
		require.Equal(t, want, status, out)
		require.InDelta(t, want, out["status"], 0, "a problem document")
	}
}
