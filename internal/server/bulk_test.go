package server_test

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/server"
)

func TestBulk_ActsOnFilteredEntries(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	const n = 12
	for i := range n {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n
	}, 5*time.Minute, 50*time.Millisecond)
	bulk := func(body string) map[string]any {
		status, out, _ := b.call("POST", "/api/dlq/bulk", body)
		require.Equal(t, http.StatusOK, status, out)
		return out
	}
	entryOf := func(i int) string {
		_, position, _ := b.call("GET", fmt.Sprintf("/api/messages/m%d", i), "")
		return position["deadLetter"].(map[string]any)["id"].(string)
	}

	out := bulk(`{"do": "discard", "filter": {"errorClass": ["not_found"]}, "dryRun": true}`)
	require.EqualValues(t, n, out["chosen"])
	require.Equal(t, map[string]any{"default": float64(n)}, out["byQueue"])
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))

	out = bulk(`{"do": "assign", "assignee": "ann", "filter": {}, "all": true, "actor": "kim", "note": "yours"}`)
	require.EqualValues(t, n, out["changed"])
	out = bulk(fmt.Sprintf(`{"do": "tag", "tags": ["bank-fault"], "filter": {"ids": [%q, %q]}}`, entryOf(0), entryOf(1)))
	require.EqualValues(t, 2, out["changed"])
	require.Equal(t, n, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'assigned to ann'
		AND actor = 'kim' AND note = 'yours'`))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.find('{\"tags\": [\"bank-fault\"]}') WHERE assigned_to = 'ann'"))

	out = bulk(fmt.Sprintf(`{"do": "resolve", "filter": {"ids": [%q, %q]}, "actor": "kim", "note": "by hand"}`,
		entryOf(0), entryOf(1)))
	require.EqualValues(t, 2, out["changed"])
	out = bulk(fmt.Sprintf(`{"do": "park", "filter": {"ids": [%q]}}`, entryOf(2)))
	require.EqualValues(t, 1, out["chosen"])
	require.EqualValues(t, 0, out["changed"], "its status does not allow it")
	out = bulk(`{"do": "discard", "filter": {"status": ["dlq_manual"]}, "actor": "kim", "note": "gone customers"}`)
	require.EqualValues(t, n-2, out["changed"])
	require.Equal(t, n-2, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'
		AND resolved_by = 'kim'`))

	out = bulk(fmt.Sprintf(`{"do": "purge", "filter": {"ids": [%q]}, "note": "asked to"}`, entryOf(5)))
	require.EqualValues(t, 1, out["changed"])
	require.Equal(t, n-1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'purged'
		AND note = 'asked to'`), "the audit row stays")

	_, err := b.pool.Exec(t.Context(), "SELECT dlq.act_on('tag', '{}', 'kim', NULL, jsonb_build_object('tags', "+
		"ARRAY[repeat('x', 256)]))")
	require.ErrorContains(t, err, "a tag must be 3 to 255")
	for _, long := range []string{"'note', '{}', 'kim', repeat('x', 10001)", "'assign', '{}', 'kim', NULL, " +
		"jsonb_build_object('assignee', repeat('x', 256))", "'tag', '{}', 'kim', NULL, jsonb_build_object('tags', " +
		"array_fill('tag'::text, '{33}'))"} {
		_, err = b.pool.Exec(t.Context(), "SELECT dlq.act_on("+long+")")
		require.ErrorContains(t, err, "too long")
	}
	for body, want := range map[string]string{
		`{"do": "discard", "filter": {}}`:                              "an empty filter matches every entry",
		`{"do": "explode", "filter": {}}`:                              "validation failed",
		`{"do": "tag", "filter": {}, "all": true}`:                     "tag needs tags",
		`{"do": "tag", "tags": ["no"], "filter": {}, "all": true}`:     "invalid tag",
		`{"do": "park", "tags": ["abc"], "filter": {}, "all": true}`:   "park does not take tags",
		`{"do": "tag", "tags": ["abc"], "force": true, "filter": {}}`:  "tag does not take force",
		`{"do": "discard", "assignee": "kim", "filter": {}}`:           "discard does not take assignee",
		`{"do": "park", "filter": {"before": "2020-13-01T00:00:00Z"}}`: "",
	} {
		status, out, _ := b.call("POST", "/api/dlq/bulk", body)
		require.Equal(t, http.StatusUnprocessableEntity, status, "%s: %v", body, out)
		require.Contains(t, out["detail"], want)
	}
}

func TestBulk_PurgeOfOpenEntriesNeedsForce(t *testing.T) {
	t.Parallel()
	b := setup(t, options{
		receiver: answering(http.StatusNotFound), config: func(c *server.Config) { c.DLQWorkers = false },
	})
	b.submit("m1")
	b.awaitMessage("m1", "dead-lettered")
	status, out, _ := b.call("POST", "/api/dlq/bulk", `{"do": "purge", "filter": {}, "all": true}`)
	require.Equal(t, http.StatusOK, status)
	require.EqualValues(t, 0, out["changed"])
	status, out, _ = b.call("POST", "/api/dlq/bulk", `{"do": "purge", "filter": {}, "all": true, "force": true}`)
	require.Equal(t, http.StatusOK, status)
	require.EqualValues(t, 1, out["changed"])
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"), "captured, discarded, purged")
}

func TestExport_WritesNDJSONAndCSV(t *testing.T) {
	t.Parallel()
	b := setup(t, options{
		receiver: answering(http.StatusNotFound), config: func(c *server.Config) { c.DLQWorkers = false },
	})
	const n = 450 // more than two pages
	_, err := b.pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state)
		SELECT '=cmd()', jsonb_build_object('n', i), 'q', 1, 'running' FROM generate_series(1, $1) i`, n)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(),
		`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "a, \"b\"\nc"}'::jsonb]`)
	require.NoError(t, err)
	status, out, header := b.call("POST", "/api/dlq/export", `{"filter": {"queue": ["q"]}}`)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "application/x-ndjson", header.Get("Content-Type"))
	lines := strings.Split(strings.TrimSpace(out["text"].(string)), "\n")
	require.Len(t, lines, n)
	last := ""
	for _, line := range lines {
		var entry map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &entry))
		require.Greater(t, entry["id"].(string), last, "in order of capture")
		last = entry["id"].(string)
		require.NotEmpty(t, entry["originalEvent"])
	}
	_, out, _ = b.call("POST", "/api/dlq/export", `{"filter": {"queue": ["q"]}, "format": "csv"}`)
	rows, err := csv.NewReader(strings.NewReader(out["text"].(string))).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, n+1)
	require.Equal(t, "'=cmd()", rows[1][3], "a spreadsheet must not take it for a formula")
	require.Equal(t, "a, \"b\"\nc", rows[1][12])
	status, _, _ = b.call("POST", "/api/dlq/export", `{"filter": {"queue": ["none"]}}`)
	require.Equal(t, http.StatusOK, status)
	status, _, _ = b.call("POST", "/api/dlq/export", `{"filter": {"maxAge": "a while"}}`)
	require.Equal(t, http.StatusUnprocessableEntity, status)
}

func TestQueues_PauseAndResume(t *testing.T) {
	t.Parallel()
	b := setup(t, options{})
	b.submit("m0")
	b.awaitMessage("m0", "completed")
	queue := func() map[string]any {
		_, out, _ := b.call("GET", "/api/queues", "")
		require.Len(t, out["queues"], 1)
		return out["queues"].([]any)[0].(map[string]any)
	}
	require.Equal(t, "default", queue()["destination"])
	status, out, _ := b.call("POST", "/api/queues/default/pause", "")
	require.Equal(t, http.StatusOK, status, out)
	require.NotEmpty(t, out["pausedAt"])
	// River's client learns of the pause later. It delivers the jobs that it fetches until then.
	require.Eventually(t, func() bool {
		b.submit(fmt.Sprintf("p%d", time.Now().UnixNano()))
		return queue()["available"].(float64) >= 2
	}, 5*time.Minute, 100*time.Millisecond)
	status, out, _ = b.call("POST", "/api/queues/default/resume", "")
	require.Equal(t, http.StatusOK, status, out)
	require.Nil(t, out["pausedAt"])
	require.Eventually(t, func() bool { return queue()["available"].(float64) == 0 }, 5*time.Minute, 50*time.Millisecond)
	for _, verb := range []string{"pause", "resume"} { // River takes * for all queues
		status, _, _ = b.call("POST", "/api/queues/%2A/"+verb, "")
		require.Equal(t, http.StatusNotFound, status)
	}
	var paused, acts int
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM river_queue WHERE paused_at IS NOT NULL),
		(SELECT count(*) FROM dlq.acts WHERE subject = 'queue *')`).Scan(&paused, &acts))
	require.Zero(t, paused)
	require.Zero(t, acts)
	status, out, _ = b.call("POST", "/api/queues/nowhere/pause", "")
	require.Equal(t, http.StatusNotFound, status)
	require.Contains(t, out["detail"], "nowhere")
}
