package server_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// scopes are the scopes of TestScope_LimitsEveryOperation, with the entries in each.
var scopes = []struct {
	name    string
	scope   access.Scope
	entries []string // queue/kind
	byQueue bool     // whether the scope covers whole queues
	queues  []string // the queues that the scope covers
}{
	{
		"everything", nil,
		[]string{"pay_eu/order.paid", "pay_eu/user.mail", "mailqueue/order.paid", "mailqueue/user.mail"},
		true,
		[]string{"pay_eu", "mailqueue"},
	},
	{
		"a queue",
		access.Scope{{Queues: []string{"pay_eu"}}},
		[]string{"pay_eu/order.paid", "pay_eu/user.mail"},
		true,
		[]string{"pay_eu"},
	},
	{
		"a pattern",
		access.Scope{{Queues: []string{"*queue"}}},
		[]string{"mailqueue/order.paid", "mailqueue/user.mail"},
		true,
		[]string{"mailqueue"},
	},
	{
		"kinds",
		access.Scope{{Kinds: []string{"order.*"}}},
		[]string{"pay_eu/order.paid", "mailqueue/order.paid"},
		false, nil,
	},
	{
		"a queue and kinds",
		access.Scope{{Queues: []string{"pay_*"}, Kinds: []string{"user.*", "x"}}},
		[]string{"pay_eu/user.mail"},
		false, nil,
	},
	{"elsewhere", access.Scope{{Queues: []string{"pay", "PAY_EU", "pay_e", "p_y_eu", "%"}}}, nil, true, nil},
}

// scopeBundle is a dlqd with token authentication on a database with four dead letters.
type scopeBundle struct {
	*bundle

	tokens    *access.Store
	ids       map[string]string // of entries, by queue/kind
	jobs      map[string]string // ids of the entries' jobs, by queue/kind
	runs      map[string]string // of replay runs, by queue
	approvals map[string]string // ids of requests for approval, by queue
	done      map[string]string // ids of operations, by queue
}

func scopeSetup(t *testing.T, configs ...func(*server.Config)) *scopeBundle {
	t.Helper()
	b := &scopeBundle{bundle: setup(t, options{config: func(c *server.Config) {
		c.Process, c.DLQWorkers = false, false
		c.Policy.Access.Authentication = []string{"tokens"}
		for _, config := range configs {
			config(c)
		}
	}})}
	b.ids, b.jobs, b.runs = map[string]string{}, map[string]string{}, map[string]string{}
	b.approvals, b.done = map[string]string{}, map[string]string{}
	b.tokens = access.NewStore(b.pool, postgres.DefaultSchemas())
	exec := func(sql string, args ...any) {
		_, err := b.pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	exec("SELECT setval('river_job_id_seq', 7123456789)") // ids that are part of no other number
	for _, queue := range []string{"pay_eu", "mailqueue"} {
		for _, kind := range []string{"order.paid", "user.mail"} {
			exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
				VALUES ($2, jsonb_build_object('secret', 'payload of ' || $1::text || $2::text), $1, 1, 'running')`, queue, kind)
		}
		exec("INSERT INTO river_queue (name, created_at, updated_at) VALUES ($1, now(), now())", queue)
		exec("SELECT dlq.open_breaker('queue:' || $1, 'kim', 'drill')", queue)
		exec("INSERT INTO dlq.sources (name, cluster, queue) VALUES ($1, 'c', $1)", queue)
		exec(`INSERT INTO dlq.source_positions (cluster, topic_id, partition, topic, source, queue, first_offset, next_offset)
			VALUES ('c', gen_random_uuid(), 0, 'dlt', $1, $1, 0, 5)`, queue)
		exec("SELECT dlq.record_act('queue ' || $1, 'paused', 'kim')", queue)
	}
	exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY[jsonb_build_object('error', 'secret of ' || queue || kind)]`)
	exec(`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim', 'note')`)
	// This makes one failure group per queue.
	exec(`UPDATE dlq.dead_letter_queue SET fingerprint = 'same', move = '{"actor": "worker:1", "reason": "judged"}'`)
	rows, err := b.pool.Query(t.Context(),
		"SELECT queue || '/' || kind, id::text, river_job_id::text FROM dlq.dead_letter_queue")
	require.NoError(t, err)
	var name, id, job string
	_, err = pgx.ForEachRow(rows, []any{&name, &id, &job}, func() error {
		b.ids[name], b.jobs[name] = id, job
		return nil
	})
	require.NoError(t, err)
	// dlqd may be refreshing the rollups at the same time.
	exec(postgrestest.RefreshRollups)
	for _, queue := range []string{"pay_eu", "mailqueue"} {
		status, out := b.as(b.token(access.Operator, access.Scope{{Queues: []string{queue}}}), "POST", "/api/dlq/replay",
			`{"filter": {}, "all": true, "force": true, "rate": 0.001}`)
		require.Equal(t, http.StatusAccepted, status, out)
		var answer struct{ Run struct{ ID string } }
		require.NoError(t, json.Unmarshal([]byte(out), &answer))
		b.runs[queue] = answer.Run.ID
		b.approvals[queue] = b.requestAs("kim", access.Scope{{Queues: []string{queue}}})
		status, out = b.as(b.token(access.Operator, access.Scope{{Queues: []string{queue}}}), "POST", "/api/dlq/bulk",
			`{"do": "assign", "assignee": "kim", "filter": {}, "all": true}`)
		require.Equal(t, http.StatusOK, status, out)
		var done struct{ Undo string }
		require.NoError(t, json.Unmarshal([]byte(out), &done))
		b.done[queue] = done.Undo
	}
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.replay_run_entries"),
		"a run takes the entries in the scope of the user who starts it")
	admin := b.token(access.Admin, nil)
	require.Eventually(t, func() bool {
		_, out := b.as(admin, "GET", "/api/circuit-breakers", "")
		return strings.Contains(out, "queue:pay_eu") && strings.Contains(out, "queue:mailqueue")
	}, 5*time.Minute, 50*time.Millisecond, "the breakers' state is loaded")
	return b
}

// requestAs requests an approval as a user who is limited to a scope, and returns the request's id.
func (b *scopeBundle) requestAs(name string, scope access.Scope) (id string) {
	b.Helper()
	raw, err := json.Marshal(scope)
	require.NoError(b, err)
	require.NoError(b, pgx.BeginFunc(b.Context(), b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.Context(), "SELECT set_config('dlq.scope', $1, true)", string(raw)); err != nil {
			return err
		}
		return tx.QueryRow(b.Context(),
			`SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {}, "all": true}', p_actor => $1)::text`,
			name).Scan(&id)
	}))
	return id
}

func (b *scopeBundle) token(role access.Role, scope access.Scope) string {
	b.Helper()
	t := &access.Token{Name: "token-" + uuid.NewString(), Role: role}
	if scope != nil {
		require.Len(b, scope, 1)
		t.Queues, t.Kinds = scope[0].Queues, scope[0].Kinds
	}
	secret, err := b.tokens.Create(b.Context(), t, "test")
	require.NoError(b, err)
	return secret
}

func (b *scopeBundle) as(token, method, path, body string) (int, string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	defer response.Body.Close()
	if strings.Contains(response.Header.Get("Content-Type"), "event-stream") {
		line := make([]byte, 4096) // one event at most
		n, _ := response.Body.Read(line)
		return response.StatusCode, string(line[:n])
	}
	raw, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	var answer any
	if json.Unmarshal(raw, &answer) == nil {
		requireNoNullArrays(b, answer, method+" "+path)
	}
	return response.StatusCode, string(raw)
}

// hidden returns the texts that no answer to a caller with the scope may contain: ids, payloads,
// error texts, names of queues, and runs.
func (b *scopeBundle) hidden(scope int) (hidden []string) {
	s := scopes[scope]
	for name, id := range b.ids {
		if !slices.Contains(s.entries, name) {
			hidden = append(hidden, id, b.jobs[name], strings.ReplaceAll(name, "/", ""))
		}
	}
	for _, queue := range []string{"pay_eu", "mailqueue"} {
		if !slices.ContainsFunc(s.entries, func(name string) bool { return strings.HasPrefix(name, queue) }) {
			// An operation's id is in the audit trail of its entries.
			hidden = append(hidden, queue, b.done[queue])
		}
		if !slices.Contains(s.queues, queue) {
			hidden = append(hidden, b.runs[queue], b.approvals[queue])
		}
	}
	return hidden
}

// operation is an operation of the OpenAPI document, and the request that TestScope_LimitsEveryOperation sends. Tests
// of scopes, masks and hostile requests that cover the console, too, use the function doors.
type operation struct {
	id, method, path string
	role             access.Role
	body             string
	targetType       string // the type of {id}: entry, queue, breaker, run; empty without {id}
	need             string // everything, queues (refused for callers limited to kinds), or empty
}

var operations = []operation{
	{"list-entries", "GET", "/api/dlq/entries?limit=3", access.Reader, "", "", ""},
	{"complete-filter", "GET", "/api/dlq/filter?q=status:manual%20queue:", access.Reader, "", "", ""},
	{"get-entry", "GET", "/api/dlq/entries/{id}", access.Reader, "", "entry", ""},
	{"get-stats", "GET", "/api/dlq/stats", access.Reader, "", "", ""},
	{"export", "POST", "/api/dlq/export", access.Operator, `{"filter": {}}`, "", ""},
	{"bulk", "POST", "/api/dlq/bulk", access.Operator, `{"do": "note", "filter": {}, "all": true, "note": "n"}`, "", ""},
	{"reveal-entry", "POST", "/api/dlq/entries/{id}/reveal", access.Operator, `{"note": "n"}`, "entry", ""},
	{"get-revealed-entry", "GET", "/api/dlq/entries/{id}/reveal", access.Operator, "", "entry", ""},
	{"replay-entry", "POST", "/api/dlq/entries/{id}/replay", access.Operator, "", "entry", ""},
	{"discard-entry", "POST", "/api/dlq/entries/{id}/discard", access.Operator, "", "entry", ""},
	{"expire-entry", "POST", "/api/dlq/entries/{id}/expire", access.Operator, "", "entry", ""},
	{"resolve-entry", "POST", "/api/dlq/entries/{id}/resolve", access.Operator, "", "entry", ""},
	{"park-entry", "POST", "/api/dlq/entries/{id}/park", access.Operator, "", "entry", ""},
	{"unpark-entry", "POST", "/api/dlq/entries/{id}/unpark", access.Operator, "", "entry", ""},
	{"reopen-entry", "POST", "/api/dlq/entries/{id}/reopen", access.Operator, "", "entry", ""},
	{"review-next", "POST", "/api/dlq/review", access.Operator, "", "", ""},
	{"get-operation", "GET", "/api/dlq/operations/{id}", access.Reader, "", "operation", ""},
	{"undo", "POST", "/api/dlq/undo/{id}", access.Operator, "", "operation", ""},
	{"list-groups", "GET", "/api/dlq/groups?limit=200", access.Reader, "", "", "queues"},
	{"get-group", "GET", "/api/dlq/groups/{id}/same", access.Reader, "", "queue", "queues"},
	{"set-group", "PATCH", "/api/dlq/groups/{id}/same", access.Operator, `{"status": "open"}`, "queue", "queues"},
	{"record-deploy", "POST", "/api/deploys", access.Operator, `{"version": "1"}`, "", "everything"},
	{"list-views", "GET", "/api/dlq/views", access.Reader, "", "", ""},
	{"get-view", "GET", "/api/dlq/views/none", access.Reader, "", "none", ""},
	{"save-view", "PUT", "/api/dlq/views/of%20the%20walk", access.Reader, `{"query": "status:manual"}`, "", ""},
	{"order-views", "POST", "/api/dlq/views-order", access.Operator, `{"names": ["of the walk"]}`, "", ""},
	{"delete-view", "DELETE", "/api/dlq/views/none", access.Reader, "", "none", ""},
	{"list-replays", "GET", "/api/dlq/replays", access.Reader, "", "", ""},
	{"get-replay", "GET", "/api/dlq/replays/{id}", access.Reader, "", "run", ""},
	{"list-replay-entries", "GET", "/api/dlq/replays/{id}/entries", access.Reader, "", "run", ""},
	{"get-replay-report", "GET", "/api/dlq/replays/{id}/report", access.Reader, "", "run", ""},
	{"get-replay-calibration", "GET", "/api/dlq/replays/calibration", access.Reader, "", "", ""},
	{"diff-replays", "GET", "/api/dlq/replays/{id}/diff/{id}", access.Reader, "", "run", ""},
	{"follow-replay", "GET", "/api/dlq/replays/{id}/events", access.Reader, "", "stream", ""},
	{"start-replay", "POST", "/api/dlq/replay", access.Operator, `{"filter": {}, "dryRun": true}`, "", ""},
	{"pause-replay", "POST", "/api/dlq/replays/{id}/pause", access.Operator, "", "run", ""},
	{"resume-replay", "POST", "/api/dlq/replays/{id}/resume", access.Operator, "", "run", ""},
	{"go-on-replay", "POST", "/api/dlq/replays/{id}/go-on", access.Operator, "", "run", ""},
	{"back-replay", "POST", "/api/dlq/replays/{id}/back", access.Operator, "", "run", ""},
	{"end-replay", "POST", "/api/dlq/replays/{id}/end", access.Operator, "", "run", ""},
	{"set-replay-rate", "POST", "/api/dlq/replays/{id}/rate", access.Operator, `{"rate": 0.002}`, "run", ""},
	{"cancel-replay", "POST", "/api/dlq/replays/{id}/cancel", access.Operator, "", "run", ""},
	{"list-approvals", "GET", "/api/dlq/approvals", access.Operator, "", "", ""},
	{"get-approval", "GET", "/api/dlq/approvals/{id}", access.Operator, "", "approval", ""},
	{"approve", "POST", "/api/dlq/approvals/{id}/approve", access.Operator, `{"expect": 9}`, "approval", ""},
	{"refuse", "POST", "/api/dlq/approvals/{id}/refuse", access.Operator, "", "approval", ""},
	{"withdraw", "POST", "/api/dlq/approvals/{id}/withdraw", access.Operator, "", "approval", ""},
	{"search-audit", "GET", "/api/dlq/audit?limit=100", access.Reader, "", "", ""},
	{"list-erasures", "GET", "/api/dlq/erasures", access.Reader, "", "", "everything"},
	{"erase", "POST", "/api/dlq/erasures", access.Admin, `{"filter": {"tags": ["x"]}, "note": "n"}`, "", "everything"},
	{"list-queues", "GET", "/api/queues", access.Reader, "", "", ""},
	{"pause-queue", "POST", "/api/queues/{id}/pause", access.Operator, "", "queue", ""},
	{"resume-queue", "POST", "/api/queues/{id}/resume", access.Operator, "", "queue", ""},
	{"list-jobs", "GET", "/api/jobs?queue=pay_eu&state=discarded", access.Reader, "", "", ""},
	{"get-job", "GET", "/api/jobs/{id}", access.Reader, "", "job", ""},
	{"cancel-job", "POST", "/api/jobs/{id}/cancel", access.Operator, "", "job", ""},
	{"retry-job", "POST", "/api/jobs/{id}/retry", access.Operator, "", "job", ""},
	{"list-circuit-breakers", "GET", "/api/circuit-breakers", access.Reader, "", "", ""},
	{"open-circuit-breaker", "POST", "/api/circuit-breakers/queue:{id}/open", access.Operator, "", "queue", ""},
	{"reset-circuit-breaker", "POST", "/api/circuit-breakers/queue:{id}/reset", access.Operator, "", "queue", ""},
	{"list-sources", "GET", "/api/sources", access.Reader, "", "", ""},
	{"get-source", "GET", "/api/sources/{id}", access.Reader, "", "queue", ""},
	{"pause-source", "POST", "/api/sources/{id}/pause", access.Operator, "", "queue", ""},
	{"resume-source", "POST", "/api/sources/{id}/resume", access.Operator, "", "queue", ""},
	{
		"rewind-source", "POST", "/api/sources/{id}/rewind", access.Operator,
		`{"topic": "dlt", "partition": 0, "offset": 2}`, "queue", "",
	},
	{"pause-feed", "POST", "/api/feeds/none/pause", access.Operator, "", "none", "everything"},
	{"resume-feed", "POST", "/api/feeds/none/resume", access.Operator, "", "none", "everything"},
	{
		"rewind-feed", "POST", "/api/feeds/none/rewind", access.Operator, `{"since": "2026-11-28T08:00:00Z"}`, "none",
		"everything",
	},
	{"get-automatic", "GET", "/api/dlq/automatic", access.Reader, "", "", "everything"},
	{
		"set-automatic", "POST", "/api/dlq/automatic/set", access.Operator, `{"queue": "pay_eu", "enabled": false}`,
		"", "everything",
	},
	{"reset-automatic", "POST", "/api/dlq/automatic/reset", access.Operator, `{"queue": "pay_eu"}`, "", "everything"},
	{"stop-automatic", "POST", "/api/dlq/automatic/stop", access.Operator, "", "", "everything"},
	{"resume-automatic", "POST", "/api/dlq/automatic/resume", access.Operator, "", "", "everything"},
	{"get-restored", "GET", "/api/dlq/restored", access.Operator, "", "", "everything"},
	{"resume-restored", "POST", "/api/dlq/restored/resume", access.Operator, "", "", "everything"},
	{"get-capture", "GET", "/api/dlq/capture", access.Reader, "", "", "everything"},
	{"set-capture", "PUT", "/api/dlq/capture", access.Admin, `{"mode": "on"}`, "", "everything"},
	{"reclassify", "POST", "/api/dlq/reclassify", access.Operator, `{"dryRun": true}`, "", "everything"},
	{"get-analytics-flow", "GET", "/api/dlq/analytics/flow?by=queue", access.Reader, "", "", "queues"},
	{"get-analytics-queues", "GET", "/api/dlq/analytics/queues", access.Reader, "", "", "queues"},
	{"get-analytics-times", "GET", "/api/dlq/analytics/times", access.Reader, "", "", "queues"},
	{"get-analytics-error-types", "GET", "/api/dlq/analytics/error-types", access.Reader, "", "", "queues"},
	{"get-analytics-groups", "GET", "/api/dlq/analytics/groups", access.Reader, "", "", "queues"},
	{"get-analytics-heat-map", "GET", "/api/dlq/analytics/heat-map", access.Reader, "", "", "queues"},
	{"get-analytics-replays", "GET", "/api/dlq/analytics/replays", access.Reader, "", "", "queues"},
	{"get-analytics-retry-cost", "GET", "/api/dlq/analytics/retry-cost", access.Reader, "", "", "queues"},
	{"get-analytics-oldest", "GET", "/api/dlq/analytics/oldest", access.Reader, "", "", ""},
	{"get-analytics-sources", "GET", "/api/dlq/analytics/sources", access.Reader, "", "", "everything"},
	{"get-analytics-policies", "GET", "/api/dlq/analytics/policies", access.Reader, "", "", ""},
	{"get-analytics-rules", "GET", "/api/dlq/analytics/rules", access.Reader, "", "", ""},
	{"get-message", "GET", "/api/messages/none", access.Reader, "", "none", ""},
	{"submit-message", "POST", "/api/messages", access.Sender, `{}`, "invalid", ""},
	{"submit-batch", "POST", "/api/messages/batch", access.Sender, `{}`, "invalid", ""},
	{"get-health", "GET", "/api/health", access.Metrics, "", "", "everything"},
	{"get-log-level", "GET", "/api/log-level", access.Metrics, "", "", "everything"},
	{"set-log-level", "PUT", "/api/log-level", access.Admin, `{"level": "info"}`, "", "everything"},
	// A caller who is not an admin sees only the caller's own sessions: see TestSessions_OnlyAdminsEndThoseOfOthers.
	{"list-sessions", "GET", "/api/sessions", "", "", "", ""},
	{"end-session", "DELETE", "/api/sessions/0198a0b0-0000-7000-8000-000000000000", "", "", "none", ""},
	{"end-sessions", "POST", "/api/sessions/end", "", "", "", ""},
	{"list-tokens", "GET", "/api/tokens", access.Admin, "", "", "everything"},
	{"create-token", "POST", "/api/tokens", access.Admin, `{"name": "walker", "role": "sender"}`, "", "everything"},
	{"revoke-token", "DELETE", "/api/tokens/0198a0b0-0000-7000-8000-000000000000", access.Admin, "", "none", "everything"},
	{"get-policy", "GET", "/api/policy", access.Reader, "", "", ""},
	{"test-policy", "POST", "/api/policy/test", access.Reader, `{"status": 503}`, "", "everything"},
	{
		"preview-policy", "POST", "/api/policy/preview", access.Operator, `{"file": "dlq-routing", "text": ""}`,
		"", "everything",
	},
	{"examine", "POST", "/api/doctor", access.Admin, "", "", "everything"},
	{"whoami", "GET", "/api/whoami", "", "", "", ""},
	{"get-login", "GET", "/api/login", "", "", "none", ""},
	{"livez", "GET", "/livez", "", "", "open", ""},
	{"readyz", "GET", "/readyz", "", "", "open", ""},
}

// The test sends every operation of the document, in the API and in the console, for every role, in every scope. A
// caller without the right gets 403, ids outside the scope get 404, and no answer contains a hidden text.
func TestScope_LimitsEveryOperation(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	_, document, _ := b.call("GET", "/openapi.json", "")
	var documented, requested []string
	for _, path := range document["paths"].(map[string]any) {
		for _, o := range path.(map[string]any) {
			documented = append(documented, o.(map[string]any)["operationId"].(string))
		}
	}
	for _, o := range operations {
		requested = append(requested, o.id)
	}
	require.ElementsMatch(t, documented, requested, "each operation must be in the list")

	roles := []access.Role{access.Admin, access.Operator, access.Reader, access.Sender}
	unknown := map[string]string{} // answers for unknown ids
	for i, s := range scopes {
		hidden := b.hidden(i)
		for _, role := range roles {
			if role != access.Admin && i > 1 {
				continue // scopes work the same for all roles
			}
			token := b.token(role, s.scope)
			for _, o := range doors() {
				may := o.role == "" || role.Includes(o.role)
				everywhere := s.scope == nil || o.need == ""
				if o.need == "queues" && s.byQueue {
					everywhere = true
				}
				targets := map[string]bool{"": true}
				switch o.targetType {
				case "entry":
					targets = map[string]bool{}
					for name, id := range b.ids {
						targets[id] = slices.Contains(s.entries, name)
					}
				case "job":
					targets = map[string]bool{}
					for name, id := range b.jobs {
						targets[id] = slices.Contains(s.entries, name)
					}
				case "queue":
					targets = map[string]bool{
						"pay_eu": slices.Contains(s.queues, "pay_eu"), "mailqueue": slices.Contains(s.queues, "mailqueue"),
					}
				case "approval":
					targets = map[string]bool{
						b.approvals["pay_eu"]:    slices.Contains(s.queues, "pay_eu"),
						b.approvals["mailqueue"]: slices.Contains(s.queues, "mailqueue"),
					}
				case "operation":
					targets = map[string]bool{
						b.done["pay_eu"]:    slices.Contains(s.queues, "pay_eu"),
						b.done["mailqueue"]: slices.Contains(s.queues, "mailqueue"),
					}
				case "run", "stream":
					targets = map[string]bool{
						b.runs["pay_eu"]:    slices.Contains(s.queues, "pay_eu"),
						b.runs["mailqueue"]: slices.Contains(s.queues, "mailqueue"),
					}
				}
				for target, inScope := range targets {
					if role != access.Admin && o.targetType != "" && (inScope || o.role == access.Reader) {
						continue // the same as for an admin
					}
					label := fmt.Sprintf("%s: %s, %s: %s %s, %s", s.name, role, o.id, o.method, o.path, target)
					if inScope && (o.targetType == "entry" || o.targetType == "job" || o.targetType == "run" ||
						o.targetType == "operation" || o.targetType == "approval" && o.method == "POST") && may &&
						o.role == access.Operator {
						continue // would change the data of other cases; see TestScope_LimitsMoves
					}
					if o.need == "everything" && o.method != "GET" && s.scope == nil && may {
						continue
					}
					status, out := b.through(token, &o, target)
					for _, word := range hidden {
						if word != target && (may || target == "") {
							require.NotContains(t, out, word, label)
						}
					}
					switch {
					case o.targetType == "open":
						require.Equal(t, http.StatusOK, status, label)
					case o.page && (!may || !everywhere) && !inScope: // a form may first read its target
						require.Contains(t, []int{http.StatusForbidden, http.StatusNotFound}, status, label+out)
					case !may || !everywhere:
						require.Equal(t, http.StatusForbidden, status, label+out)
					case o.targetType == "stream":
						require.Equal(t, inScope, status == http.StatusOK && strings.Contains(out, target), label)
						require.Equal(t, !inScope, status == http.StatusNotFound, label)
					case !inScope || o.targetType == "none":
						require.Equal(t, http.StatusNotFound, status, label+out)
						if o.targetType == "none" || o.page { // pages also show values that change
							continue
						}
						other := uuid.NewString()
						switch o.targetType {
						case "queue":
							other = "unknown"
						case "job":
							other = "7999999999"
						}
						if unknown[o.id] == "" {
							_, out := b.as(token, o.method, strings.ReplaceAll(o.path, "{id}", other), o.body)
							unknown[o.id] = strings.ReplaceAll(out, other, "X")
						}
						require.Equal(t, unknown[o.id], strings.ReplaceAll(out, target, "X"), "the same answer as for an unknown id")
					case o.targetType == "invalid":
						require.Contains(t, []int{http.StatusUnprocessableEntity, http.StatusForbidden}, status, label+out)
					default:
						// A busy machine may be unhealthy.
						require.True(t, status < 300 || o.page && status == http.StatusSeeOther ||
							o.id == "get-health" && status == http.StatusServiceUnavailable, label+out)
						require.NotContains(t, out, "internal error", label)
					}
				}
			}
		}
	}
}

// A user sees the same entries in the API, through the SQL functions and in the tables.
func TestScope_SameInSQL(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	ctx := t.Context()
	admin, err := pgx.Connect(ctx, postgrestest.Superuser(t, b.url))
	require.NoError(t, err)
	t.Cleanup(func() { _ = admin.Close(ctx) })
	for _, s := range scopes {
		login := "scoped_" + strings.ReplaceAll(uuid.NewString(), "-", "")
		_, err := admin.Exec(ctx, "CREATE ROLE "+login+" LOGIN IN ROLE dlq_operator")
		require.NoError(t, err)
		raw := []byte(`[{"queues": ["nothing", "*"], "kinds": ["*"]}]`) // also covers everything
		if s.scope != nil {
			raw, err = json.Marshal(s.scope)
			require.NoError(t, err)
		}
		_, err = b.pool.Exec(ctx, "SELECT dlq.set_role_scope($1, $2)", login, string(raw))
		require.NoError(t, err)
		conn, err := pgx.Connect(ctx, postgrestest.WithUser(b.url, login))
		require.NoError(t, err)
		var want []string
		for _, name := range s.entries {
			want = append(want, b.ids[name])
		}
		_, out := b.as(b.token(access.Reader, s.scope), "GET", "/api/dlq/entries", "")
		var page struct{ Entries []struct{ ID string } }
		require.NoError(t, json.Unmarshal([]byte(out), &page))
		var listed []string
		for _, e := range page.Entries {
			listed = append(listed, e.ID)
		}
		require.ElementsMatch(t, want, listed, s.name)
		list := func(sql string) (ids []string) {
			rows, err := conn.Query(ctx, sql)
			require.NoError(t, err)
			ids, err = pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err, sql)
			return ids
		}
		for _, sql := range []string{
			"SELECT id::text FROM dlq.find()", "SELECT id::text FROM dlq.entries", "SELECT id::text FROM dlq.dead_letter_queue",
			"SELECT dlq.find_ids('{}', 100)::text", "SELECT id::text FROM dlq.oldest_entries()",
			"SELECT DISTINCT entry_id::text FROM dlq.dead_letter_transitions",
			"SELECT DISTINCT entry_id::text FROM dlq.audit() WHERE entry_id IS NOT NULL",
			"SELECT DISTINCT entry_id::text FROM dlq.dead_letter_queue e, dlq.trail(e.id)",
		} {
			require.ElementsMatch(t, want, list(sql), s.name+": "+sql)
		}
		// Query plans reveal nothing outside the scope.
		if s.scope != nil && !slices.ContainsFunc(s.entries, func(name string) bool {
			return strings.HasPrefix(name,
				"mailqueue")
		}) {
			_, err = b.pool.Exec(ctx, "UPDATE dlq.dead_letter_queue SET resolution_notes = 'for Anna' WHERE queue = 'mailqueue'")
			require.NoError(t, err)
			plan := func(word string) string {
				return strings.ReplaceAll(
					strings.Join(list("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT id FROM dlq.entries WHERE "+
						"resolution_notes >= '"+word+"' AND resolution_notes < '"+word+"~'"), "\n"), word, "X")
			}
			require.Equal(t, plan("nobody"), plan("for Anna"), s.name)
		}
		// A GRANT on all tables shows the same rows.
		_, err = b.pool.Exec(ctx, "GRANT SELECT ON ALL TABLES IN SCHEMA dlq TO "+login)
		require.NoError(t, err)
		require.ElementsMatch(t, want, list(`SELECT id::text FROM dlq.dead_letter_inbox UNION ALL SELECT id::text
			FROM dlq.dead_letter_open
			UNION ALL SELECT id::text FROM dlq.dead_letter_resolved UNION ALL SELECT id::text FROM dlq.dead_letter_failed
			UNION ALL SELECT id::text FROM dlq.dead_letter_archived`), s.name)
		require.Empty(t, list("SELECT name FROM dlq.tokens"))
		_, err = b.pool.Exec(ctx, "REVOKE SELECT ON ALL TABLES IN SCHEMA dlq FROM "+login)
		require.NoError(t, err)
		for name, id := range b.ids {
			trail := list("SELECT entry_id::text FROM dlq.trail('" + id + "')")
			require.Equal(t, slices.Contains(s.entries, name), len(trail) > 0)
			if !slices.Contains(s.entries, name) {
				for _, move := range []string{"replay", "discard", "resolve", "park", "unpark", "reopen"} {
					_, err := conn.Exec(ctx, "SELECT dlq."+move+"($1)", id)
					require.ErrorContains(t, err, "there is no such entry", s.name)
				}
				_, err := conn.Exec(ctx, "SELECT dlq.note($1, 'x')", id)
				require.ErrorContains(t, err, "there is no such entry")
			}
		}
		sum := func(sql string) (n int) {
			require.NoError(t, conn.QueryRow(ctx, sql).Scan(&n), sql)
			return n
		}
		require.Equal(t, len(want), sum("SELECT coalesce(sum(entries), 0)::int FROM dlq.preview('{}')"))
		require.Equal(t, len(want), sum("SELECT coalesce(sum(entries), 0)::int FROM dlq.backlog"))
		require.Equal(t, len(want), sum("SELECT count(*)::int FROM dlq.jobs()"))
		require.Equal(t, len(want), sum("SELECT changed FROM dlq.act_where('note', '{}', p_note => 'seen', p_all => true)"))
		queues := []string{}
		queues = append(queues, s.queues...)
		require.ElementsMatch(t, queues,
			list("SELECT name FROM (SELECT substr(name, 7) AS name FROM dlq.circuit_breakers) b"))
		require.ElementsMatch(t, queues, list("SELECT DISTINCT queue FROM dlq.rollup_backlog"))
		require.Len(t, list("SELECT id::text FROM dlq.replay_runs"), len(queues))
		require.Len(t, list("SELECT DISTINCT run_id::text FROM dlq.replay_run_entries"), len(queues))
		if s.byQueue {
			require.ElementsMatch(t, queues, list("SELECT queue FROM dlq.stats() WHERE queue IS NOT NULL"))
			require.Equal(t, len(want), sum("SELECT coalesce(max(open), 0)::int FROM dlq.stats()"))
			require.Equal(t, len(want), sum("SELECT coalesce(sum(captured), 0)::int FROM dlq.flow()"))
			require.Equal(t, len(want), sum("SELECT coalesce(sum(failures), 0)::int FROM dlq.heat_map()"))
			require.Equal(t, len(want), sum("SELECT coalesce(sum(failures), 0)::int FROM dlq.error_types()"))
			require.ElementsMatch(t, queues, list("SELECT queue FROM dlq.groups"))
		} else {
			for _, f := range []string{
				"stats()", "flow()", "times()", "heat_map()", "error_types()", "top_groups()", "groups()",
				"retry_cost()", "replay_success()",
			} {
				_, err := conn.Exec(ctx, "SELECT * FROM dlq."+f)
				require.ErrorContains(t, err, "limited to some kinds", f)
			}
		}
		if s.scope != nil {
			for _, sql := range []string{
				"SELECT dlq.stop_automatic()", "SELECT * FROM dlq.capture_status()", "SELECT * FROM dlq.sweep_redeliveries()",
				"SELECT * FROM dlq.noisiest_sources()", "SELECT dlq.set_automatic('all', '', true)",
				"SELECT dlq.replay_start('{}', p_all => true, p_queue => 'default', p_force => true)",
			} {
				_, err := conn.Exec(ctx, sql)
				require.ErrorContains(t, err, "DLQ06", sql)
			}
			for _, table := range []string{"job_facts", "entry_jobs", "rollup_sources", "erasures", "role_scopes"} {
				require.Zero(t, sum("SELECT count(*)::int FROM dlq."+table), table)
			}
			// A user cannot leave the scope with SET ROLE, with dlqd's settings, or with a function
			// that sees rows before the policy filters them.
			_, err := conn.Exec(ctx, "SET ROLE dlq_operator; SET dlq.scope = ''; SET row_security = on")
			require.NoError(t, err)
			require.ElementsMatch(t, want, list("SELECT id::text FROM dlq.find()"))
			require.ElementsMatch(t, want, list("SELECT id::text FROM dlq.dead_letter_queue"))
			_, err = conn.Exec(ctx, "RESET ROLE")
			require.NoError(t, err)
			_, err = conn.Exec(ctx, `CREATE FUNCTION pg_temp.peep(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS $$ BEGIN RAISE NOTICE 'saw %', $1; PERFORM set_config('peep.saw', coalesce(current_setting('peep.saw', true), '') || $1, false); RETURN true; END $$`)
			require.NoError(t, err)
			for _, sql := range []string{
				"SELECT id::text FROM dlq.entries WHERE pg_temp.peep(id::text)",
				"SELECT id::text FROM dlq.dead_letter_queue WHERE pg_temp.peep(id::text)",
				"SELECT queue FROM dlq.backlog WHERE pg_temp.peep(queue)",
			} {
				list(sql)
			}
			var saw *string
			require.NoError(t, conn.QueryRow(ctx, "SELECT current_setting('peep.saw', true)").Scan(&saw))
			for name, id := range b.ids {
				if saw != nil && !slices.Contains(s.entries, name) {
					require.NotContains(t, *saw, id, s.name)
				}
			}
		}
		_, err = conn.Exec(ctx, "DROP FUNCTION IF EXISTS pg_temp.peep(text)")
		require.NoError(t, err)
		require.NoError(t, conn.Close(ctx))
		_, err = b.pool.Exec(ctx, "SELECT dlq.set_role_scope($1, NULL, 'left')", login)
		require.NoError(t, err)
		_, err = admin.Exec(ctx, "DROP ROLE "+login)
		require.NoError(t, err)
	}
	require.Equal(t, 1, b.count(`SELECT count(*) FROM pg_class WHERE oid = 'dlq.visible_entries'::regclass
		AND reloptions @> '{security_barrier=false}'`), "without scopes there is no security barrier")
	require.NotZero(t, b.count(`SELECT count(*) FROM dlq.acts WHERE subject LIKE 'role scoped_%' AND act = 'limited'
		AND actor IS NOT NULL`))
}

// Scopes mean the same in Go, in SQL for a constant, and in SQL for many rows, with any characters
// in names and patterns.
func TestScope_PatternsAgreeInGoAndSQL(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	names := []string{"", "a", "ab", "A", "a\x01b", "\x01", "a%", "a_", `a\`, ":a", "b\x01:a", "ä", "a\nb", "*"}
	patterns := []string{"a", "a*", "*b", "a*b", "*", "a%", "a_", `a\`, "\x01*", "*:a", "ä", "%"}
	var scopes []access.Scope
	for _, p := range patterns {
		scopes = append(scopes, access.Scope{{Queues: []string{p}}}, access.Scope{{Kinds: []string{p, "nothing"}}},
			access.Scope{{Queues: []string{"a*"}, Kinds: []string{p}}},
			access.Scope{{Queues: []string{"nothing"}}, {Queues: []string{p}, Kinds: []string{"a"}}})
	}
	for _, scope := range append(scopes, access.Scope{}, access.Scope{{}}) {
		who := &access.Principal{}
		for _, part := range scope {
			who.Grants = append(who.Grants, access.Grant{Role: access.Reader, Queues: part.Queues, Kinds: part.Kinds})
		}
		raw, err := json.Marshal(scope)
		require.NoError(t, err)
		rows, err := pool.Query(t.Context(), `SELECT q, k, dlq.in_scope(q, k, $1::jsonb),
			dlq.in_patterns(q, k, (SELECT dlq.scope_patterns($1::jsonb))) FROM unnest($2::text[]) q,
				unnest($2::text[] || NULL) k`, string(raw), names)
		require.NoError(t, err)
		var queue string
		var kind *string
		var constant, many *bool
		_, err = pgx.ForEachRow(rows, []any{&queue, &kind, &constant, &many}, func() error {
			want := scope.HasQueue(queue)
			if kind != nil {
				want = who.MayFor(access.Reader, queue, *kind, "")
			}
			require.Equal(t, []*bool{&want, &want}, []*bool{constant, many}, "%s: %q %v", raw, queue, kind)
			return nil
		})
		require.NoError(t, err)
	}
	var unlimited, nothing bool
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT dlq.in_scope('q', 'k', NULL), dlq.in_scope('q', NULL, '[{"queues": [null]}]')`).Scan(&unlimited, &nothing))
	require.True(t, unlimited)
	require.False(t, nothing, "an invalid pattern matches nothing")
}

// A limited operator moves only entries in scope, one by one and in bulk, and a run that the
// operator starts is limited, too.
func TestScope_LimitsMoves(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	operator := b.token(access.Operator, access.Scope{{Queues: []string{"pay_*"}, Kinds: []string{"order.*"}}})
	own := b.ids["pay_eu/order.paid"]
	status, out := b.as(operator, "POST", "/api/dlq/entries/"+own+"/unpark", "")
	require.Equal(t, http.StatusOK, status, out)
	_, told, _ := b.send(operator, "/dead-letters/"+b.ids["mailqueue/order.paid"]+"/assign",
		url.Values{"assignee": {"lee"}})
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE assigned_to = 'lee'"), told)
	status, out = b.as(operator, "POST", "/api/dlq/bulk", `{"do": "park", "filter": {}, "all": true, "dryRun": true}`)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, out, `"chosen":1,`)
	for filter, chosen := range map[string]string{
		`{}`: "1", `{"queue": ["mailqueue"]}`: "0", `{"ids": ["` + b.ids["mailqueue/order.paid"] + `"]}`: "0",
		`{"kind": ["*"], "ids": ["` + own + `"]}`: "1",
	} {
		status, out = b.as(operator, "POST", "/api/dlq/bulk", `{"do": "note", "filter": `+filter+
			`, "all": true, "note": "n"}`)
		require.Equal(t, http.StatusOK, status, out)
		require.Contains(t, out, `"chosen":`+chosen+`,"changed":`+chosen, filter)
	}
	status, out = b.as(operator, "POST", "/api/dlq/bulk", `{"do": "note", "filter": {"scope": []}, "all": true}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, "a client cannot set its own scope", out)
	status, out = b.as(operator, "POST", "/api/dlq/replay", `{"filter": {}, "all": true, "force": true, "rate": 0.001}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Contains(t, out, `"total":1,`)
	for _, queue := range []string{"mailqueue", "pay_eu"} {
		for _, dry := range []string{"true", "false"} {
			status, out = b.as(operator, "POST", "/api/dlq/replay", `{"filter": {}, "all": true, "force": true, "queue": "`+
				queue+`", "dryRun": `+dry+`}`)
			require.Equal(t, http.StatusForbidden, status, out)
		}
	}
	for _, body := range []string{`{"patch": [{"op": "test", "path": "/secret", "value": "payload of mailqueueorder.paid"}]}`, `{"patch": [{"op": "test", "path": "/secret", "value": "x"}]}`, `{"patch": [{"op": "remove", "path": "/nothing"}]}`, `{"payload": {}}`} {
		status, out = b.as(operator, "POST", "/api/dlq/entries/"+b.ids["mailqueue/order.paid"]+"/replay", body)
		require.Equal(t, http.StatusNotFound, status, "a patch does not test entries outside the scope: "+out)
	}
	status, out = b.as(operator, "POST", "/api/dlq/entries/"+own+"/replay", `{"toDestination": "default"}`)
	require.Equal(t, http.StatusForbidden, status, out)
	// A caller sees a run whose scope the caller's scope covers.
	runs := func(scope access.Scope) int {
		_, out := b.as(b.token(access.Reader, scope), "GET", "/api/dlq/replays", "")
		return strings.Count(out, `"createdAt"`)
	}
	require.Equal(t, 3, runs(nil))
	require.Equal(t, 2, runs(access.Scope{{Queues: []string{"pay_eu", "pay_*"}}}))
	require.Equal(t, 1, runs(access.Scope{{Queues: []string{"pay*"}, Kinds: []string{"o*"}}}))
	require.Zero(t, runs(access.Scope{{Queues: []string{"pay_e*"}, Kinds: []string{"order.*"}}}))
	require.Zero(t, runs(access.Scope{{Kinds: []string{"order.paid"}}}))
	status, _ = b.as(operator, "POST", "/api/dlq/entries/"+own+"/replay", `{"force": true}`)
	require.Equal(t, http.StatusAccepted, status)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status <> 'dlq_manual'"),
		"only the entry in scope moved")
	// The sums by queue equal the numbers of entries, for each queue alone and for both queues.
	for scope, captured := range map[string]int{"pay_eu": 2, "mail*": 2, "*": 4} {
		_, out = b.as(b.token(access.Reader, access.Scope{{Queues: []string{scope}}}), "GET", "/api/dlq/analytics/queues", "")
		require.Contains(t, out, fmt.Sprintf(`"open":%d,`, captured), scope)
		_, out = b.as(b.token(access.Reader, access.Scope{{Queues: []string{scope}}}), "GET", "/api/dlq/stats", "")
		require.Contains(t, out, fmt.Sprintf(`"open":%d,`, captured), scope)
		require.Contains(t, out, fmt.Sprintf(`"captured":%d,`, captured), scope)
	}
	_, out = b.as(operator, "GET", "/api/dlq/stats", "")
	require.Contains(t, out, `"open":1,`)
	require.Contains(t, out, `"captured":1,`)
}

func TestScope_LimitsSenders(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	sender := b.token(access.Sender, access.Scope{{Queues: []string{"default"}, Kinds: []string{"order.*"}}})
	message := func(id, kind string) string {
		return `{"messageId": "` + id + `", "queue": "default", "kind": "` + kind + `", "payload": {}}`
	}
	status, out := b.as(sender, "POST", "/api/messages", message("m1", "order.paid"))
	require.Equal(t, http.StatusAccepted, status, out)
	// A sender gets no information about queues and jobs outside of the sender's scope.
	status, out = b.as(sender, "POST", "/api/messages", strings.Replace(message("m1", "order.paid"), "{}", "1", 1))
	require.Equal(t, http.StatusConflict, status, out)
	require.NotContains(t, out, "job")
	wide := b.token(access.Sender, access.Scope{{Queues: []string{"pay*"}}})
	status, out = b.as(wide, "POST", "/api/messages",
		strings.Replace(message("m3", "order.paid"), `"default"`, `"payx"`, 1))
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.NotContains(t, out, "default")
	status, out = b.as(sender, "POST", "/api/messages", message("m2", "user.mail"))
	require.Equal(t, http.StatusForbidden, status, out)
	for scope, found := range map[string]int{
		`{"queues": ["default"]}`: http.StatusOK, `{"kinds": ["order*"]}`: http.StatusOK,
		`{"kinds": ["user*"]}`: http.StatusNotFound, `{"queues": ["pay_eu"]}`: http.StatusNotFound,
	} {
		var part access.Part
		require.NoError(t, json.Unmarshal([]byte(scope), &part))
		status, out := b.as(b.token(access.Reader, access.Scope{part}), "GET", "/api/messages/m1", "")
		require.Equal(t, found, status, scope+out)
	}
}
