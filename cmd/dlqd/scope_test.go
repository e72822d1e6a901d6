package main_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// commandRequests lists commands, each with the API request that it makes. In a command, {entry}, {queue}, {run} and
// {approval} (a request for approval) stand for an object of one queue. The test runs a command with such a placeholder
// for two queues, and any other command once.
var commandRequests = []struct {
	operation, command string // with --json, if the command has that flag
	path, body         string // the method is POST if there is a body
	elsewhere          bool   // use only an object that is out of the caller's scope: the command changes it
}{
	{"list-entries", "list --json", "/api/dlq/entries", "", false},
	{"get-entry", "show {entry} --json", "/api/dlq/entries/{entry}", "", false},
	// stats makes several requests. path is the path of the first request that the scope limits.
	{"get-stats", "stats --json", "/api/dlq/analytics/flow", "", false},
	{"export", "export", "/api/dlq/export", `{"filter": {}}`, false},
	{
		"bulk", "tag --add seen --all --json", "/api/dlq/bulk", `{"do": "tag", "tags": ["seen"], "filter": {}, "all": true}`,
		false,
	},
	{
		"bulk", "discard --queue {queue} --dry-run --json", "/api/dlq/bulk",
		`{"do": "discard", "filter": {"queue": ["{queue}"]}, "dryRun": true}`, false,
	},
	{"replay-entry", "replay {entry} --force --json", "/api/dlq/entries/{entry}/replay", `{"force": true}`, true},
	{"discard-entry", "discard {entry} --json", "/api/dlq/entries/{entry}/discard", `{}`, true},
	{"expire-entry", "expire {entry} --json", "/api/dlq/entries/{entry}/expire", `{}`, true},
	{"resolve-entry", "resolve {entry} --json", "/api/dlq/entries/{entry}/resolve", `{}`, true},
	{"park-entry", "park {entry} --json", "/api/dlq/entries/{entry}/park", `{}`, true},
	{"unpark-entry", "unpark {entry} --json", "/api/dlq/entries/{entry}/unpark", `{}`, true},
	{"reopen-entry", "reopen {entry} --json", "/api/dlq/entries/{entry}/reopen", `{}`, true},
	{"list-replays", "replays --json", "/api/dlq/replays", "", false},
	{"get-replay", "replays show {run} --json", "/api/dlq/replays/{run}", "", false},
	{"get-replay-report", "replays show {run} --report --json", "/api/dlq/replays/{run}/report", "", false},
	{"get-replay-calibration", "replays calibration --json", "/api/dlq/replays/calibration", "", false},
	{"diff-replays", "replays diff {run} {run} --json", "/api/dlq/replays/{run}/diff/{run}", "", false},
	{"follow-replay", "replays follow {run}", "/api/dlq/replays/{run}", "", true}, // polls this path
	{
		"start-replay", "replay --queue {queue} --dry-run --json", "/api/dlq/replay",
		`{"filter": {"queue": ["{queue}"]}, "dryRun": true}`, false,
	},
	{"pause-replay", "replays pause {run} --json", "/api/dlq/replays/{run}/pause", `{}`, true},
	{"resume-replay", "replays resume {run} --json", "/api/dlq/replays/{run}/resume", `{}`, true},
	{"cancel-replay", "replays cancel {run} --json", "/api/dlq/replays/{run}/cancel", `{}`, true},
	{"go-on-replay", "replays go-on {run} --json", "/api/dlq/replays/{run}/go-on", `{}`, true},
	{"back-replay", "replays back {run} --json", "/api/dlq/replays/{run}/back", `{}`, true},
	{"end-replay", "replays end {run} --json", "/api/dlq/replays/{run}/end", `{}`, true},
	{
		"set-replay-rate", "replays rate {run} --per-second 0.002 --json", "/api/dlq/replays/{run}/rate",
		`{"rate": 0.002}`, false,
	},
	{"search-audit", "audit --limit 3 --json", "/api/dlq/audit?limit=3", "", false},
	{"search-audit", "audit --queue {queue} --limit 3 --json", "/api/dlq/audit?limit=3&queue={queue}", "", false},
	{"list-erasures", "erasures --json", "/api/dlq/erasures", "", false},
	{
		"erase", "erase --queue {queue} --dry-run --note n --json", "/api/dlq/erasures",
		`{"filter": {"queue": ["{queue}"]}, "dryRun": true, "note": "n"}`, false,
	},
	{"list-queues", "queues --json", "/api/queues", "", false},
	{"pause-queue", "queues pause {queue} --json", "/api/queues/{queue}/pause", `{}`, false},
	{"resume-queue", "queues resume {queue} --json", "/api/queues/{queue}/resume", `{}`, false},
	{"list-circuit-breakers", "breakers --json", "/api/circuit-breakers", "", false},
	{
		"open-circuit-breaker", "breakers open queue:{queue} --json", "/api/circuit-breakers/queue:{queue}/open",
		`{}`, false,
	},
	{
		"reset-circuit-breaker", "breakers reset queue:{queue} --json", "/api/circuit-breakers/queue:{queue}/reset",
		`{}`, false,
	},
	{"list-sources", "sources --json", "/api/sources", "", false},
	{"get-source", "sources show {queue} --json", "/api/sources/{queue}", "", false},
	{"pause-source", "sources pause {queue} --json", "/api/sources/{queue}/pause", `{}`, true},
	{"resume-source", "sources resume {queue} --json", "/api/sources/{queue}/resume", `{}`, true},
	{
		"rewind-source", "sources rewind {queue} --topic dlt --offset 2 --json", "/api/sources/{queue}/rewind",
		`{"topic": "dlt", "partition": 0, "offset": 2}`, true,
	},
	{"pause-feed", "feeds pause {queue} --json", "/api/feeds/{queue}/pause", `{}`, true},
	{"resume-feed", "feeds resume {queue} --json", "/api/feeds/{queue}/resume", `{}`, true},
	{
		"rewind-feed", "feeds rewind {queue} --since 2026-11-28T08:00:00Z --json", "/api/feeds/{queue}/rewind",
		`{"since": "2026-11-28T08:00:00Z"}`, true,
	},
	{"get-automatic", "automatic --json", "/api/dlq/automatic", "", false},
	{
		"set-automatic", "automatic off --queue {queue} --json", "/api/dlq/automatic/set",
		`{"queue": "{queue}", "enabled": false}`, false,
	},
	{
		"reset-automatic", "automatic reset --queue {queue} --json", "/api/dlq/automatic/reset",
		`{"queue": "{queue}"}`, false,
	},
	{"stop-automatic", "automatic stop --json", "/api/dlq/automatic/stop", `{}`, false},
	{"resume-automatic", "automatic resume --json", "/api/dlq/automatic/resume", `{}`, false},
	{"get-restored", "restored --json", "/api/dlq/restored", "", false},
	{"resume-restored", "restored resume --json", "/api/dlq/restored/resume", `{}`, false},
	{"reclassify", "reclassify --dry-run --json", "/api/dlq/reclassify", `{"dryRun": true}`, false},
	{"get-analytics-heat-map", "stats heat-map --json", "/api/dlq/analytics/heat-map", "", false},
	{"get-analytics-oldest", "stats oldest --json", "/api/dlq/analytics/oldest", "", false},
	{"get-analytics-sources", "stats sources --json", "/api/dlq/analytics/sources", "", false},
	{"get-analytics-policies", "stats policies --json", "/api/dlq/analytics/policies?over=7d", "", false},
	{
		"submit-message", `send {} --queue {queue} --kind order.paid --message-id {queue} --json`, "/api/messages",
		`{"queue": "{queue}", "kind": "order.paid", "payload": {}, "messageId": "{queue}"}`, true,
	},
	{
		"reveal-entry", "show {entry} --reveal because --json", "/api/dlq/entries/{entry}/reveal",
		`{"note": "because"}`, true,
	},
	{"list-approvals", "approvals --json", "/api/dlq/approvals", "", false},
	{"get-approval", "approvals show {approval} --json", "/api/dlq/approvals/{approval}", "", false},
	{
		"approve", "approvals approve {approval} --expect 9 --json", "/api/dlq/approvals/{approval}/approve",
		`{"expect": 9}`, true,
	},
	{"refuse", "approvals refuse {approval} --json", "/api/dlq/approvals/{approval}/refuse", `{}`, true},
	{"withdraw", "approvals withdraw {approval} --json", "/api/dlq/approvals/{approval}/withdraw", `{}`, true},
	{"get-log-level", "log-level --json", "/api/log-level", "", false},
	{"list-sessions", "sessions --json", "/api/sessions", "", false},
	{"end-sessions", "sessions end-all --json", "/api/sessions/end", `{}`, false},
	{"whoami", "whoami --json", "/api/whoami", "", false},
}

// withoutCommand are operations that no command calls, and operations whose command prints something else than the
// API's answer: stats calls several reports, and capture reads the database.
var withoutCommand = []string{
	"end-session", // TestSessions
	"get-message", "submit-batch", "get-health", "livez", "readyz", "get-capture", "set-capture", "set-log-level",
	"get-login", "get-analytics-flow", "get-analytics-queues", "get-analytics-times", "get-analytics-error-types",
	"get-analytics-groups", "get-analytics-replays", "get-analytics-retry-cost", "get-analytics-rules", "preview-policy",
	// The console calls these operations; the commands read files or the database instead.
	"complete-filter", "get-policy", "test-policy", "examine", "get-revealed-entry",
	"list-replay-entries", "list-tokens", "create-token", "revoke-token",
	// TestScope_LimitsEveryOperation of package server covers these operations.
	"list-groups", "get-group", "set-group", "record-deploy",
	"list-views", "get-view", "save-view", "delete-view", "order-views",
	"get-operation", "undo",
	"review-next", "list-jobs", "get-job", "cancel-job", "retry-job",
}

// TestScope_CommandsMatchAPI checks that a command shows a caller the same entries, runs and queues as the API, or the
// same refusal.
func TestScope_CommandsMatchAPI(t *testing.T) {
	t.Parallel()
	url, config := postgrestest.URL(t), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(config, "access.yaml"), []byte("authentication: [tokens]\n"), 0o600))
	s := serve(t, "--database-url", url, "--config-dir", config)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	queues, kinds := []string{"pay_eu", "mailqueue"}, []string{"order.paid", "user.mail"}
	execute := func(sql string, args ...any) {
		_, err := conn.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	for _, queue := range queues {
		for _, kind := range kinds {
			execute(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ($2, '{}', $1, 1, 'running')`,
				queue, kind)
		}
		execute("INSERT INTO river_queue (name, created_at, updated_at) VALUES ($1, now(), now())", queue)
		execute("SELECT dlq.open_breaker('queue:' || $1, 'kim', 'drill')", queue)
		execute("INSERT INTO dlq.sources (name, cluster, queue) VALUES ($1, 'c', $1)", queue)
		execute(`INSERT INTO dlq.source_positions (cluster, topic_id, partition, topic, source, queue, first_offset, next_offset)
			VALUES ('c', gen_random_uuid(), 0, 'dlt', $1, $1, 0, 5)`, queue)
	}
	execute(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY[jsonb_build_object('error', 'secret of ' || queue || kind)] WHERE state = 'running'`)
	execute(`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim', 'note')`)
	token := func(args ...string) string {
		return strings.TrimSpace(
			ok(t, append([]string{"tokens", "create", "--database-url", url, "--name", "caller"}, args...)...))
	}
	ask := func(token, path, body string) (int, string) {
		method := http.MethodGet
		if body != "" {
			method = http.MethodPost
		}
		request, err := http.NewRequestWithContext(t.Context(), method, s.api+path, strings.NewReader(body))
		if err != nil {
			return 0, err.Error()
		}
		request.Header.Set("Authorization", "Bearer "+token)
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, err.Error()
		}
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		if err != nil {
			return 0, err.Error()
		}
		return response.StatusCode, string(raw)
	}
	of := map[string]map[string]string{}
	words := slices.Clone(queues)
	for _, queue := range queues {
		of[queue] = map[string]string{"{queue}": queue}
		rows, err := conn.Query(t.Context(), "SELECT id::text FROM dlq.dead_letter_queue WHERE queue = $1 ORDER BY kind",
			queue)
		require.NoError(t, err)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Len(t, ids, 2)
		of[queue]["{entry}"] = ids[0]
		status, out := ask(token("--role", "operator", "--queue", queue), "/api/dlq/replay",
			`{"filter": {}, "all": true, "force": true, "rate": 0.001}`)
		require.Equal(t, http.StatusAccepted, status, out)
		var answer struct{ Run struct{ ID string } }
		require.NoError(t, json.Unmarshal([]byte(out), &answer))
		of[queue]["{run}"] = answer.Run.ID
		var approval string
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SELECT set_config('dlq.scope', jsonb_build_array(jsonb_build_object('queues', "+
				"ARRAY[$1::text]))::text, true)", queue); err != nil {
				return err
			}
			return tx.QueryRow(t.Context(),
				`SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {}, "all": true}', p_actor => 'kim')::text`).Scan(
				&approval)
		}))
		of[queue]["{approval}"] = approval
		words = append(words, append(ids, answer.Run.ID, approval)...)
	}
	admin := token("--role", "admin")
	require.Eventually(t, func() bool {
		_, out := ask(admin, "/api/circuit-breakers", "")
		return strings.Contains(out, "queue:pay_eu") && strings.Contains(out, "queue:mailqueue")
	}, 5*time.Minute, 50*time.Millisecond)

	_, document := ask(admin, "/openapi.json", "")
	var spec struct {
		Paths map[string]map[string]struct{ OperationID string }
	}
	require.NoError(t, json.Unmarshal([]byte(document), &spec))
	known := slices.Clone(withoutCommand)
	for _, w := range commandRequests {
		known = append(known, w.operation)
	}
	for _, path := range spec.Paths {
		for _, o := range path {
			require.Contains(t, known, o.OperationID, "add the operation to commandRequests or withoutCommand")
		}
	}

	in := func(text string) (found []string) {
		for _, word := range words {
			if strings.Contains(text, word) {
				found = append(found, word)
			}
		}
		return found
	}
	type caller struct{ name, token, queue string } // queue: the one in the caller's scope, or ""
	var callers errgroup.Group
	callers.SetLimit(4)
	for _, p := range []caller{
		{"an admin of a queue", token("--role", "admin", "--queue", "pay_*"), "pay_eu"},
		{"a reader of a kind", token("--role", "reader", "--kind", "order.*"), ""},
		{"an admin of another queue", token("--role", "admin", "--queue", "elsewhere"), ""},
		{"a sender", token("--role", "sender"), ""},
	} {
		callers.Go(func() error {
			for _, w := range commandRequests {
				for _, queue := range queues {
					if w.elsewhere && queue == p.queue || queue == "mailqueue" && !strings.Contains(w.command+w.path, "{") {
						continue
					}
					if w.operation == "submit-message" && p.name == "a sender" {
						continue
					}
					var pairs []string
					for name, value := range of[queue] {
						pairs = append(pairs, name, value)
					}
					put := strings.NewReplacer(pairs...)
					status, answer := ask(p.token, put.Replace(w.path), put.Replace(w.body))
					args := strings.Fields(put.Replace(w.command))
					cmd := exec.CommandContext(t.Context(), program, append(args, "--api-url", s.api)...)
					cmd.Env = append(os.Environ(), "DLQD_TOKEN="+p.token)
					var out, errOut bytes.Buffer
					cmd.Stdout, cmd.Stderr = &out, &errOut
					err := cmd.Run()
					name := p.name + ": dlqd " + strings.Join(args, " ")
					if status < 300 != (err == nil) {
						t.Errorf("%s: %v, %s%s; the API: %d %s", name, err, out.String(), errOut.String(), status, answer)
						continue
					}
					if status < 300 {
						output := out.String()
						// Try again: between the two requests, a run may have moved an entry.
						for range 10 {
							if w.operation == "get-stats" || !strings.HasPrefix(w.command, "audit") || slices.Equal(in(answer), in(output)) {
								break
							}
							_, answer = ask(p.token, put.Replace(w.path), put.Replace(w.body))
							again := exec.CommandContext(t.Context(), program, append(args, "--api-url", s.api)...)
							again.Env = cmd.Env
							raw, _ := again.Output()
							output = string(raw)
						}
						if a, b := in(answer), in(output); w.operation != "get-stats" && !slices.Equal(a, b) {
							t.Errorf("%s has %v; the API: %v\n%s\n%s", name, b, a, output, answer)
						}
						continue
					}
					var problem struct{ Detail string }
					if json.Unmarshal([]byte(answer), &problem) != nil || !strings.Contains(errOut.String(), problem.Detail) {
						t.Errorf("%s: %s; the API: %s", name, errOut.String(), answer)
					}
				}
			}
			return nil
		})
	}
	require.NoError(t, callers.Wait())
}
