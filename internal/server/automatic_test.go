package server_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/server"
)

// On an application's River, dlqd first only observes dead letters. The test previews automatic redelivery, switches it
// on and stops it, and checks what dlqd reports.
func TestAutomatic_SwitchesAndStops(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.Process = false }})
	b.exec("UPDATE dlq.settings SET value = 'attached' WHERE key = 'river'")
	fail := func(kind, attempts string) {
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT '` + kind + `', '{}', 'mailers', ` +
			attempts + `, 'running' FROM generate_series(1, 3)`)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
			errors = ARRAY['{"error": "connection refused", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	}
	await := func(n int, where string) {
		t.Helper()
		require.Eventually(t, func() bool { return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE "+where) == n },
			time.Minute, 50*time.Millisecond, where)
	}
	const observed = "status = 'dlq_pending' AND waiting_for = 'automatic'"
	fail("report.daily", "3")
	fail("once", "1")
	await(3, observed)
	await(3, "status = 'dlq_manual'")

	_, list, _ := b.call("GET", "/api/dlq/entries?status=dlq_pending", "")
	entries := list["entries"].([]any)
	require.Len(t, entries, 3)
	require.Regexp(t, `^would be sent again at .* UTC by rule connection: automatic is off$`,
		entries[0].(map[string]any)["next"])
	require.NotContains(t, list, "automaticStopped")
	_, status, _ := b.call("GET", "/api/dlq/automatic", "")
	require.Equal(t, true, status["attached"])
	require.Equal(t, []any{map[string]any{"scope": "all", "enabled": false, "source": "default"}}, status["switches"])
	group := status["observed"].([]any)[0].(map[string]any)
	require.Equal(t, "report.daily", group["kind"])
	require.EqualValues(t, 3, group["entries"])
	_, health, _ := b.call("GET", "/api/health", "")
	require.Equal(t, true, health["ok"])
	require.Contains(t, health["parts"], map[string]any{
		"name": "automatic", "ok": true,
		"detail": "observing: dead letters are classified and shown, and not redelivered automatically",
	})

	// A dry run returns the effect and changes nothing.
	on := `{"scope": "queue", "name": "mailers", "enabled": true, "actor": "kim", "note": "tried"`
	code, preview, _ := b.call("POST", "/api/dlq/automatic/set", on+`, "dryRun": true}`)
	require.Equal(t, http.StatusOK, code, preview)
	require.Equal(t, true, preview["dryRun"])
	going := preview["goes"].([]any)[0].(map[string]any)
	require.EqualValues(t, 3, going["entries"])
	require.EqualValues(t, 100, going["perSecond"])
	staying := preview["stays"].([]any)[0].(map[string]any)
	require.Equal(t, "once", staying["kind"])
	require.Contains(t, staying["why"], "its job had one attempt")
	_, preview, _ = b.call("POST", "/api/dlq/automatic/set", on+`, "dryRun": true, "include": ["single-attempt"]}`)
	require.Contains(t, preview["stays"].([]any)[0].(map[string]any)["why"],
		"dlqd reclassify releases the entries that are parked already")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.automatic_changes"))
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE "+observed))

	// While everything is stopped, a switch has no effect, and every answer says so.
	_, preview, _ = b.call("POST", "/api/dlq/automatic/stop", `{"dryRun": true}`)
	require.Equal(t, "all automatic redelivery is stopped by api", preview["stays"].([]any)[0].(map[string]any)["why"])
	code, out, _ := b.call("POST", "/api/dlq/automatic/stop", `{"actor": "ada", "note": "a release"}`)
	require.Equal(t, http.StatusOK, code, out)
	require.Equal(t, "all automatic redelivery is stopped by ada", out["stays"].([]any)[0].(map[string]any)["why"])
	code, out, _ = b.call("POST", "/api/dlq/automatic/set", on+`}`)
	require.Equal(t, http.StatusOK, code, out)
	require.Equal(t, "ada", out["stopped"].(map[string]any)["actor"])
	require.Contains(t, out["stays"].([]any)[0].(map[string]any)["why"], "stopped by ada")
	for _, path := range []string{
		"/api/dlq/entries", "/api/dlq/stats",
		"/api/dlq/entries/" + entries[0].(map[string]any)["id"].(string),
	} {
		_, document, _ := b.call("GET", path, "")
		require.Equal(t, "a release", document["automaticStopped"].(map[string]any)["note"], path)
	}
	_, health, _ = b.call("GET", "/api/health", "")
	require.Equal(t, true, health["ok"])
	require.Regexp(t, "all automatic redelivery was stopped by ada at .* UTC .a release.; resume it with: "+
		"dlqd automatic resume", health["parts"])
	require.Eventually(t, func() bool {
		_, metrics, _ := b.call("GET", "/metrics", "")
		text := metrics["text"].(string)
		return strings.Contains(text, "dlqd_automatic_stopped 1\n") &&
			strings.Contains(text, `dlqd_dead_letters_observed{queue="mailers"} 3`)
	}, 5*time.Minute, 100*time.Millisecond)

	code, out, _ = b.call("POST", "/api/dlq/automatic/resume", `{"actor": "ada"}`)
	require.Equal(t, http.StatusOK, code, out)
	await(3, "status = 'dlq_processing'")
	_, status, _ = b.call("GET", "/api/dlq/automatic", "")
	require.Len(t, status["changes"], 3)
	require.Contains(t, status["changes"].([]any)[1].(map[string]any)["origin"], "API, from 127.0.0.1")
	code, out, _ = b.call("POST", "/api/dlq/automatic/reset", `{"scope": "queue", "name": "mailers"}`)
	require.Equal(t, http.StatusOK, code, out)

	for body, want := range map[string]int{
		`{"scope": "topic", "name": "x", "enabled": true}`:                             422,
		`{"scope": "queue", "enabled": true, "dryRun": true}`:                          422,
		`{"scope": "class", "name": "bug", "enabled": true}`:                           422,
		`{"scope": "queue", "name": "x", "enabled": false, "include": ["backfilled"]}`: 422,
		`{"scope": "queue", "name": "x", "enabled": true, "include": ["old"]}`:         422,
		`{"scope": "queue", "name": "x"}`:                                              422,
	} {
		code, out, _ := b.call("POST", "/api/dlq/automatic/set", body)
		require.Equal(t, want, code, "%s %v", body, out)
	}
}
