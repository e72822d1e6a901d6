package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

// A dry run of an erasure only counts. It makes no record, so its answer has the time of the count.
func TestErase_DryRunGivesTheTimeOfTheCount(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	status, out, _ := b.call("POST", "/api/dlq/erasures", `{"filter": {"tags": ["x"]}, "note": "n", "dryRun": true}`)
	require.Equal(t, http.StatusOK, status, out)
	at, err := time.Parse(time.RFC3339Nano, out["at"].(string))
	require.NoError(t, err)
	require.False(t, at.IsZero())
	require.EqualValues(t, 0, out["entries"])
}

func TestAnalytics_AnswersEveryFigure(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	const n = 6
	for i := range n {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Eventually(t, func() bool {
		_, out, _ := b.call("GET", "/api/dlq/analytics/queues?over=24h", "")
		rows := out["rows"].([]any)
		return len(rows) == 2 && rows[0].(map[string]any)["manual"] == float64(n)
	}, 5*time.Minute, 50*time.Millisecond, "within seconds")
	for path, rows := range map[string]int{
		"flow?over=1h": 1, "flow?over=7d&by=queue&step=day": 1, "flow?by=class&queue=default": 1,
		"queues?queue=default": 1, "times?by=queue": 0, "error-types?limit=5": 1,
		"groups?over=24h": 1, "heat-map?timezone=Asia/Kolkata": 168,
		"replays": 0, "oldest?limit=4": 4, "sources?over=30d": 0, "retry-cost": 1,
	} {
		status, out, _ := b.call("GET", "/api/dlq/analytics/"+path, "")
		require.Equal(t, http.StatusOK, status, out)
		require.Len(t, out["rows"], rows, path)
		at, err := time.Parse(time.RFC3339Nano, out["asOf"].(string))
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), at, time.Hour)
	}
	for path, want := range map[string]string{
		"flow?over=x": "over must be a duration", "flow?over=0s": "over must be a duration",
		"flow?over=99d&step=minute": "for buckets of one minute",
		"heat-map?timezone=Mars":    "timezone must be a name", "oldest?limit=0": "",
		"flow?by=moon": "", "groups?colour=red": "",
	} {
		status, out, _ := b.call("GET", "/api/dlq/analytics/"+path, "")
		require.Equal(t, http.StatusUnprocessableEntity, status, path)
		require.Contains(t, out["detail"], want)
	}
}

func TestAudit_FiltersMovesAndActs(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	for i := range 3 {
		b.submit(fmt.Sprintf("m%d", i))
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == 3
	}, 5*time.Minute, 50*time.Millisecond)
	status, _, _ := b.call("POST", "/api/dlq/bulk",
		`{"do": "resolve", "filter": {}, "all": true, "actor": "kim", "note": "by hand, ticket 7"}`)
	require.Equal(t, http.StatusOK, status)
	search := func(query string) (moves []map[string]any, next string) {
		status, out, _ := b.call("GET", "/api/dlq/audit?"+query, "")
		require.Equal(t, http.StatusOK, status, out)
		for _, m := range out["moves"].([]any) {
			moves = append(moves, m.(map[string]any))
		}
		next, _ = out["next"].(string)
		return moves, next
	}
	moves, _ := search("actor=kim")
	require.Len(t, moves, 3)
	require.Equal(t, "by hand, ticket 7", moves[0]["note"])
	require.Contains(t, moves[0]["origin"], "API, from 127.0.0.1 (Go-http-client")
	require.NotEmpty(t, moves[0]["configVersion"])
	require.NotEmpty(t, moves[0]["dbUser"])
	people, _ := search("people=true")
	require.Len(t, people, 3, "without moves by workers and triggers")
	all, _ := search("limit=500")
	require.GreaterOrEqual(t, len(all), 6)
	for query, want := range map[string]int{
		"text=TICKET": 3, "text=ticket+8": 0, "origin=127.0.0.1": 3, "to=dlq_resolved": 3,
		"from=dlq_manual&to=dlq_resolved": 3, "queue=elsewhere": 0, "kind=elsewhere": 0,
		"before=2020-01-01T00:00:00Z": 0, "after=2020-01-01T00:00:00Z&actor=kim": 3,
		"entryId=" + moves[0]["entryId"].(string) + "&people=true":           1,
		"configVersion=" + moves[0]["configVersion"].(string) + "&actor=kim": 3, "dbUser=nobody": 0,
	} {
		found, _ := search(query)
		require.Len(t, found, want, query)
	}
	seen := map[any]bool{}
	for cursor := ""; ; {
		page, next := search("limit=2" + cursor)
		for _, m := range page {
			require.False(t, seen[m["id"]])
			seen[m["id"]] = true
		}
		if next == "" {
			break
		}
		cursor = "&cursor=" + next
	}
	require.Len(t, seen, len(all))
	for cursor, want := range map[string]int{
		"0-0": http.StatusOK, "1795000000000000-2147483648": http.StatusOK,
		"99999999999999999-999999999999999999": http.StatusOK,
		"7":                                    http.StatusUnprocessableEntity, "-": http.StatusUnprocessableEntity,
	} {
		status, out, _ := b.call("GET", "/api/dlq/audit?cursor="+cursor, "")
		require.Equal(t, want, status, "%s: %v", cursor, out)
	}
	// The audit trail also has actions on queues, breakers and replay runs, with their caller.
	require.Eventually(t, func() bool { return b.count("SELECT count(*) FROM river_queue WHERE name = 'default'") == 1 },
		time.Minute, 50*time.Millisecond)
	for _, path := range []string{
		"/api/queues/default/pause", "/api/queues/default/resume",
		"/api/circuit-breakers/destination:default/open", "/api/circuit-breakers/destination:default/reset",
	} {
		status, out, _ := b.call("POST", path, `{"actor": "trillian", "note": "ticket 8"}`)
		require.Equal(t, http.StatusOK, status, out)
	}
	acts, _ := search("actor=trillian")
	reasons := []any{}
	for _, act := range acts {
		reasons = append(reasons, act["reason"])
		require.Contains(t, act["origin"], "API, from 127.0.0.1 (Go-http-client")
		require.Equal(t, "ticket 8", act["note"])
		require.Equal(t, moves[0]["configVersion"], act["configVersion"])
	}
	require.Equal(t, []any{
		"circuit breaker destination:default: reset", "circuit breaker destination:default: opened",
		"queue default: resumed", "queue default: paused",
	}, reasons)
	status, _, _ = b.call("GET", "/api/dlq/audit?entryId=7", "")
	require.Equal(t, http.StatusUnprocessableEntity, status)
}

// everywhere returns everything that the database and the archive hold, as text.
func everywhere(t *testing.T, b *bundle, cold *archive.Archive) string {
	t.Helper()
	var all strings.Builder
	for _, table := range []string{
		"dlq.acts", "dlq.replay_runs", "dlq.job_facts", "dlq.dead_letter_queue",
		"dlq.dead_letter_transitions", "dlq.erasures", "dlq.replay_run_entries", "dlq.failure_groups",
		"dlq.settings", "river_job",
	} {
		var text *string
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT string_agg(to_jsonb(t)::text, E'\\n') FROM "+
			table+" t").Scan(&text))
		if text != nil {
			all.WriteString(*text)
		}
	}
	units, _, err := cold.Units(t.Context())
	require.NoError(t, err)
	for _, m := range units {
		require.NoError(t, cold.Verify(t.Context(), &m))
		add := func(line []byte) error { all.Write(line); return nil }
		require.NoError(t, cold.Entries(t.Context(), &m, add))
		require.NoError(t, cold.Audit(t.Context(), &m, add))
	}
	return all.String()
}

// TestErase_RemovesACustomerEverywhere searches the database and the archive for a customer's name, before and after.
func TestErase_RemovesACustomerEverywhere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) { c.Archive = dir }})
	cold, err := archive.Open(t.Context(), dir)
	require.NoError(t, err)
	t.Cleanup(func() { _ = cold.Close() })
	submit := func(id, customer string) {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "subscriberId": %q, "tags": [%q], "payload": {"customer": {"name": %q}, "n": 1}}`, id, customer, customer, customer))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	for i := range 3 {
		submit(fmt.Sprintf("z%d", i), "zaphod")
		submit(fmt.Sprintf("t%d", i), "trillian")
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == 6
	}, 5*time.Minute, 50*time.Millisecond)
	entry := func(message string) string {
		_, position, _ := b.call("GET", "/api/messages/"+message, "")
		return position["deadLetter"].(map[string]any)["id"].(string)
	}
	// One entry is resolved and will be archived, one was edited and resolved, and one is open.
	z0, z1 := entry("z0"), entry("z1")
	for _, id := range []string{z0, entry("t0")} {
		status, _, _ := b.call("POST", "/api/dlq/entries/"+id+"/resolve", `{"note": "zaphod called"}`)
		require.Equal(t, http.StatusOK, status)
	}
	b.exec(fmt.Sprintf("SELECT dlq.replay('%s', 'kim', NULL, '{\"customer\": {\"name\": \"zaphod\"}, \"n\": 2}')", z1))
	require.Eventually(t, func() bool {
		return b.count(fmt.Sprintf(`SELECT count(*) FROM dlq.dead_letter_queue WHERE id = '%s' AND status = 'dlq_manual'
			AND dlq_retry_count = 1`, z1)) == 1
	}, 5*time.Minute, 50*time.Millisecond)
	status, _, _ := b.call("POST", "/api/dlq/entries/"+z1+"/resolve", "")
	require.Equal(t, http.StatusOK, status)
	store := deadletter.NewStore(b.pool, postgres.DefaultSchemas())
	month := time.Now().UTC().Format("dead_letter_resolved_200601")
	held, err := cold.Partition(t.Context(), store, archive.Manifest{Unit: month, Partition: month}, false)
	require.NoError(t, err)
	require.EqualValues(t, 3, held.Rows)
	// By the time retention deletes an archived entry, River has deleted its job.
	b.exec(fmt.Sprintf(`DELETE FROM river_job WHERE id IN (SELECT river_job_id FROM dlq.dead_letter_transitions
		WHERE entry_id = '%s')`, z0))
	b.exec(fmt.Sprintf("SELECT dlq.delete_entries(ARRAY['%s'::uuid])", z0))
	trail := time.Now().UTC().Format("dead_letter_transitions_200601")
	_, err = cold.Partition(t.Context(), store, archive.Manifest{Unit: trail, Partition: trail}, true)
	require.NoError(t, err)
	require.Positive(t, strings.Count(everywhere(t, b, cold), "zaphod"))

	status, out, _ := b.call("POST", "/api/dlq/erasures",
		`{"filter": {"payload": {"customer": {"name": "zaphod"}}}, "note": "request 42", "dryRun": true}`)
	require.Equal(t, http.StatusOK, status, out)
	require.EqualValues(t, 2, out["entries"])
	require.Equal(t, true, out["dryRun"])
	status, out, _ = b.call("POST", "/api/dlq/erasures",
		`{"filter": {"payload": {"customer": {"name": "zaphod"}}}, "note": "request 42", "actor": "kim"}`)
	require.Equal(t, http.StatusOK, status, out)
	require.EqualValues(t, 2, out["entries"], "in the database")
	require.EqualValues(t, 2, out["archived"], "in the archive")
	require.EqualValues(t, 2, out["archives"], "units looked through")
	require.NotEmpty(t, out["finishedAt"])
	left := everywhere(t, b, cold)
	require.NotContains(t, strings.ReplaceAll(left, "zaphod called", ""), "zaphod", "except in the operator's own note")
	require.Contains(t, left, "trillian")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived' AND "+
		"original_event = '{\"erased\": true}'"), "the open one was archived")
	require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'erased' AND actor = 'kim'
		AND note = 'request 42'`))

	units, _, err := cold.Units(t.Context())
	require.NoError(t, err)
	for _, m := range units {
		require.Len(t, m.Erasures, 1)
		files, err := os.ReadDir(filepath.Join(dir, m.Unit))
		require.NoError(t, err)
		for _, f := range files {
			require.False(t, f.Name() == "entries.ndjson.gz" || f.Name() == "audit.ndjson.gz", "old files are gone")
		}
	}
	_, list, _ := b.call("GET", "/api/dlq/erasures", "")
	record, err := json.Marshal(list["erasures"].([]any)[0])
	require.NoError(t, err)
	require.NotContains(t, string(record), "zaphod", "the record does not contain the name")

	// The next erasure deletes the files that an interrupted erasure left. It does not delete files of a unit that
	// retention has not finished: these files stay until retention writes the unit again, so the erasure is not complete.
	stray, unfinished := filepath.Join(dir, month, "entries.ndjson.gz"),
		filepath.Join(dir, "unfinished", "entries.ndjson.gz")
	require.NoError(t, os.MkdirAll(filepath.Dir(unfinished), 0o700))
	for _, file := range []string{stray, unfinished} {
		require.NoError(t, os.WriteFile(file, []byte("zaphod"), 0o600))
	}
	_, out, _ = b.call("POST", "/api/dlq/erasures",
		`{"filter": {"payload": {"customer": {"name": "zaphod"}}}, "note": "again"}`)
	require.Contains(t, out["detail"], "erase again")
	require.NoFileExists(t, stray)
	require.FileExists(t, unfinished)
	require.NoError(t, os.RemoveAll(filepath.Dir(unfinished)))
	_, out, _ = b.call("POST", "/api/dlq/erasures",
		`{"filter": {"payload": {"customer": {"name": "zaphod"}}}, "note": "again"}`)
	require.EqualValues(t, 0, out["entries"])
	require.EqualValues(t, 0, out["archived"])
	_, out, _ = b.call("POST", "/api/dlq/erasures", `{"filter": {"tags": ["trillian"]}, "note": "by tag"}`)
	require.EqualValues(t, 3, out["entries"])
	require.EqualValues(t, 1, out["archived"])
	require.Zero(t, b.count(`SELECT count(*) FROM dlq.dead_letter_queue
		WHERE to_jsonb(dead_letter_queue)::text LIKE '%trillian%'`))
	for _, body := range []string{
		`{"filter": {}, "note": "all"}`, `{"filter": {"queue": ["default"]}}`,
		`{"filter": {"queue": ["default"]}, "note": ""}`,
	} {
		status, _, _ = b.call("POST", "/api/dlq/erasures", body)
		require.Equal(t, http.StatusUnprocessableEntity, status, body)
	}
}
