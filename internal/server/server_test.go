package server_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

func TestMain(m *testing.M) {
	code := m.Run()
	func() {
		defer postgrestest.Stop() // also if the stop of the shared dlqd panics
		shared.stop()
	}()
	os.Exit(code)
}

// bundle is a complete dlqd on its own database.
type bundle struct {
	*testing.T

	server *server.Server
	base   string
	url    string
	pool   *pgxpool.Pool
	stop   func()
}

type options struct {
	receiver http.HandlerFunc
	config   func(*server.Config)
}

// setup starts a dlqd for the length of the test.
func setup(t *testing.T, o options) *bundle {
	t.Helper()
	b := start(t, o)
	b.T = t
	return b
}

// start starts a dlqd until the cleanup of tb.
func start(tb testing.TB, o options) *bundle {
	tb.Helper()
	if o.receiver == nil {
		o.receiver = func(http.ResponseWriter, *http.Request) {}
	}
	receiver := httptest.NewServer(o.receiver)
	tb.Cleanup(receiver.Close)
	rules, err := policy.Default(receiver.URL)
	require.NoError(tb, err)
	url := postgrestest.URL(tb)
	config := server.Config{
		DatabaseURL: url, Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
		Listen: []string{"127.0.0.1:0"}, Policy: rules, Logger: slog.New(slog.DiscardHandler),
		MaxConns: postgrestest.MaxConns, StopTimeout: time.Minute,
		Measure: func(context.Context) (breaker.Load, error) { return breaker.Load{}, nil },
	}
	soon := []time.Duration{20 * time.Millisecond}
	for _, defaults := range rules.Routing.Strategies {
		defaults.Delays = soon
	}
	if o.config != nil {
		o.config(&config)
	}
	s, err := server.Start(tb.Context(), config)
	require.NoError(tb, err)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(ctx, context.Background()) }()
	once := false
	b := &bundle{server: s, url: config.DatabaseURL, pool: postgrestest.Open(tb, config.DatabaseURL)}
	if len(s.Addresses()) > 0 {
		b.base = s.Addresses()[0]
	}
	b.stop = func() {
		if !once {
			once = true
			cancel()
			require.NoError(tb, <-stopped)
		}
	}
	tb.Cleanup(b.stop)
	return b
}

// call sends a request and decodes the answer.
func (b *bundle) call(method, path, body string) (int, map[string]any, http.Header) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	out := map[string]any{}
	if strings.Contains(response.Header.Get("Content-Type"), "json") &&
		!strings.Contains(response.Header.Get("Content-Type"), "ndjson") {
		require.NoError(b, json.Unmarshal(raw, &out), string(raw))
		if response.StatusCode >= 400 && path != "/api/health" {
			require.Contains(b, response.Header.Get("Content-Type"), "application/problem+json")
		}
		requireNoNullArrays(b, out, method+" "+path)
	} else {
		out["text"] = string(raw)
	}
	return response.StatusCode, out, response.Header
}

// requireNoNullArrays fails if an answer has null for a field that the API's document calls an array.
func requireNoNullArrays(tb testing.TB, answer any, label string) {
	tb.Helper()
	switch answer := answer.(type) {
	case map[string]any:
		for name, value := range answer {
			require.False(tb, value == nil && arrays()[name], "%s: %s is null", label, name)
			requireNoNullArrays(tb, value, label)
		}
	case []any:
		for _, value := range answer {
			requireNoNullArrays(tb, value, label)
		}
	}
}

// arrays says for each name of a field in the API's schemas whether the field is an array in every schema that has it.
var arrays = sync.OnceValue(func() map[string]bool {
	raw, err := api.OpenAPI()
	if err != nil {
		panic(err)
	}
	var document struct {
		Components struct {
			Schemas map[string]struct {
				Properties map[string]struct{ Type any }
			}
		}
	}
	if err := json.Unmarshal(raw, &document); err != nil {
		panic(err)
	}
	names := map[string]bool{}
	for _, schema := range document.Components.Schemas {
		for name, property := range schema.Properties {
			is, seen := names[name]
			names[name] = property.Type == "array" && (is || !seen)
		}
	}
	return names
})

func (b *bundle) submit(id string) {
	b.Helper()
	status, out, _ := b.call("POST", "/api/messages",
		fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`, id))
	require.Equal(b, http.StatusAccepted, status, out)
}

// awaitMessage waits until a message is in a state, and returns its fields (ingest.Position).
func (b *bundle) awaitMessage(id, state string) map[string]any {
	b.Helper()
	var out map[string]any
	require.Eventually(b, func() bool {
		_, out, _ = b.call("GET", "/api/messages/"+id, "")
		return out["state"] == state
	}, 5*time.Minute, 50*time.Millisecond)
	return out
}

func (b *bundle) awaitEntry(id, status string) map[string]any {
	b.Helper()
	var out map[string]any
	require.Eventually(b, func() bool {
		_, out, _ = b.call("GET", "/api/dlq/entries/"+id, "")
		return out["status"] == status
	}, 5*time.Minute, 50*time.Millisecond)
	return out
}

func answering(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
}

func TestMessage_CompletesAndAnswersDuplicates(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	id := uuid.NewString()
	b.submit(id)
	out := b.awaitMessage(id, "completed")
	require.EqualValues(t, 1, out["attempt"])

	body := fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`, id)
	status, out, _ := b.call("POST", "/api/messages", body)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, true, out["duplicate"])
	require.Equal(t, "completed", out["position"].(map[string]any)["state"])
	status, out, _ = b.call("POST", "/api/messages", strings.Replace(body, `"n": 1`, `"n": 2`, 1))
	require.Equal(t, http.StatusConflict, status, out)
	status, _, _ = b.call("GET", "/api/messages/unknown", "")
	require.Equal(t, http.StatusNotFound, status)
}

func TestMessage_DeadLetterIsRedeliveredAutomatically(t *testing.T) {
	t.Parallel()
	fail := make(chan struct{})
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-fail:
		default:
			w.WriteHeader(http.StatusBadGateway)
		}
	}, config: func(c *server.Config) { c.Policy.Queues["default"].MaxAttempts = 1 }})
	b.submit("m1")
	position := b.awaitMessage("m1", "dead-lettered")
	id := position["deadLetter"].(map[string]any)["id"].(string)
	close(fail)
	entry := b.awaitEntry(id, "dlq_resolved")
	require.Equal(t, "transient", entry["errorClass"])
	require.Equal(t, "automatic_retry", entry["resolutionStrategy"])
	require.Equal(t, "m1", entry["messageId"])
	require.GreaterOrEqual(t, len(entry["transitions"].([]any)), 3) // filed, redelivered, resolved
}

func TestEntry_ReplaysWithAnEditedPayload(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); !bytes.Contains(body, []byte("mended")) {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}})
	b.submit("m1")
	id := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(id, "dlq_manual")
	status, out, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{"payload": "a\u0000b"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	status, out, _ = b.call("POST", "/api/dlq/entries/"+id+"/replay",
		`{"actor": "kim", "note": "amount mended", "payload": {"n": "mended"}}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Equal(t, "dlq_processing", out["status"])
	entry := b.awaitEntry(id, "dlq_resolved")
	require.Equal(t, map[string]any{"n": 1.0}, entry["originalEvent"].(map[string]any)["payload"])
	require.Equal(t, map[string]any{"n": "mended"}, entry["editedEvent"].(map[string]any)["payload"])
	require.Equal(t, "kim", entry["resolvedBy"])

	status, out, _ = b.call("POST", "/api/dlq/entries/"+id+"/discard", `{"actor": "kim"}`)
	require.Equal(t, http.StatusConflict, status)
	require.Contains(t, out["detail"], "cannot discard from dlq_resolved (allowed: ")
}

func TestEntry_AllowsOperatorMovesByStatus(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	for _, id := range []string{"m1", "m2"} {
		b.submit(id)
	}
	first := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	second := b.awaitMessage("m2", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(first, "dlq_manual")
	b.awaitEntry(second, "dlq_manual")
	for _, step := range []struct {
		path, body string
		status     int
		want       string
	}{
		{first + "/park", `{}`, 409, "cannot park from dlq_manual"},
		{first + "/unpark", `{"actor": "kim", "note": "again"}`, 200, "dlq_pending"},
		{second + "/resolve", `{"actor": "kim", "note": "by hand"}`, 200, "dlq_resolved"},
		{second + "/resolve", ``, 409, "cannot resolve from dlq_resolved"},
		{"0198a0b0-0000-7000-8000-000000000000/discard", `{}`, 404, "no such entry"},
		{"nonsense/discard", `{}`, 422, "validation failed"},
		{"urn:uuid:0198a0b0-0000-7000-8000-000000000000/discard", `{}`, 404, "no such entry"},
		{"{0198a0b0-0000-7000-8000-000000000000}/discard", `{}`, 404, "no such entry"},
	} {
		status, out, _ := b.call("POST", "/api/dlq/entries/"+step.path, step.body)
		require.Equal(t, step.status, status, "%s: %v", step.path, out)
		require.Contains(t, fmt.Sprint(out["detail"], out["status"]), step.want)
	}
	b.awaitEntry(first, "dlq_manual") // redelivered, and answered 404 again
	status, _, _ := b.call("POST", "/api/dlq/entries/"+first+"/discard", "")
	require.Equal(t, http.StatusOK, status, "a body is optional")

	_, stats, _ := b.call("GET", "/api/dlq/stats", "")
	require.EqualValues(t, 0, stats["open"])
	require.EqualValues(t, 2, stats["lastDay"].(map[string]any)["captured"])
	require.EqualValues(t, 1, stats["lastDay"].(map[string]any)["archived"])
	require.EqualValues(t, 1, stats["lastDay"].(map[string]any)["resolved"])
}

func TestEntries_ListPagesAndFilters(t *testing.T) {
	t.Parallel()
	b := setup(t, options{
		receiver: answering(http.StatusNotFound), config: func(c *server.Config) { c.DLQWorkers = false },
	})
	for i := range 5 {
		b.submit(fmt.Sprintf("m%d", i))
		b.awaitMessage(fmt.Sprintf("m%d", i), "dead-lettered")
	}
	var got []string
	path := "/api/dlq/entries?limit=2&order=oldest"
	for path != "" {
		status, page, _ := b.call("GET", path, "")
		require.Equal(t, http.StatusOK, status, page)
		for _, e := range page["entries"].([]any) {
			got = append(got, e.(map[string]any)["messageId"].(string))
		}
		path = ""
		if next, ok := page["next"].(string); ok {
			path = "/api/dlq/entries?limit=2&order=oldest&cursor=" + next
		}
	}
	require.Equal(t, []string{"m0", "m1", "m2", "m3", "m4"}, got)
	// Entries that are not filed yet are in lists, but have no error type.
	_, page, _ := b.call("GET", "/api/dlq/entries?errorType=HTTP_404", "")
	require.Empty(t, page["entries"])
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	for query, want := range map[string]int{
		"status=dlq_pending,dlq_manual": 5, "status=dlq_failed": 0,
		"status=dlq_failed&status=dlq_pending&status=dlq_manual": 5, "status=dlq_failed,dlq_resolved&status=dlq_pending": 5,
		"queue=default": 5, "kind=order.placed": 5, "kind=other": 0,
		"errorType=HTTP_404": 5, "errorClass=not_found": 0, "source=x": 0, "after=2020-01-01T00:00:00Z": 5,
		"before=" + url.QueryEscape("2020-01-01T00:00:00+02:00"): 0,
	} {
		status, page, _ := b.call("GET", "/api/dlq/entries?"+query, "")
		require.Equal(t, http.StatusOK, status, "%s: %v", query, page)
		require.Len(t, page["entries"], want, query)
	}
	for _, query := range []string{
		"status=open", "limit=0", "limit=501", "order=random", "cursor=abc", "after=yesterday",
		"queeu=default", "status=&status=dlq_failed", "status=dlq_failed&status=open",
	} {
		status, _, _ := b.call("GET", "/api/dlq/entries?"+query, "")
		require.Equal(t, http.StatusUnprocessableEntity, status, query)
	}
}

func TestSubmit_AnswersAlikeInBothHandlers(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	id := uuid.NewString()
	b.submit(id)
	b.awaitMessage(id, "completed")
	body := fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "order.placed", "payload": {"n": 1}}`, id)
	for _, body := range []string{
		body, strings.Replace(body, `"n": 1`, `"n": 2`, 1), strings.Replace(body, "default", "nowhere", 1), "{", "",
	} {
		type answer struct {
			status int
			header http.Header
			body   string
		}
		answers := map[string]answer{}
		for _, accept := range []string{"*/*", "application/json;q=0.9"} { // huma's handler answers the second one
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.base+"/api/messages",
				strings.NewReader(body))
			require.NoError(t, err)
			request.Header.Set("Accept", accept)
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			raw, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			require.NoError(t, err)
			response.Header.Del("Date")
			answers[accept] = answer{response.StatusCode, response.Header, string(raw)}
		}
		require.Equal(t, answers["application/json;q=0.9"], answers["*/*"], body)
	}
}

func TestSubmit_InvalidInputStoresNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.MaxBodyBytes = 10_000 }})
	for name, test := range map[string]struct {
		body, location string
		status         int
	}{
		"unknown queue": {`{"queue": "nowhere", "kind": "k", "payload": 1}`, "body.queue", 422},
		"bad JSON":      {`{"queue": `, "body", 400},
		"empty":         {``, "", 400},
		"NUL":           {`{"queue": "default", "kind": "k", "payload": "\u0000"}`, "body.payload", 400},
		"invalid UTF-8": {"{\"queue\": \"default\", \"kind\": \"k\", \"payload\": \"\xff\"}", "body.payload", 400},
		"too deep": {`{"queue": "default", "kind": "k", "payload": ` + strings.Repeat("[", 99) + strings.Repeat("]",
			99) + `}`, "body.payload" + strings.Repeat("[0]", 63), 400},
		"negative priority": {`{"queue": "default", "kind": "k", "payload": 1, "priority": -1}`, "body.priority", 422},
		"date": {
			`{"queue": "default", "kind": "k", "payload": 1, "scheduledAt": "tomorrow"}`,
			"body.scheduledAt", 422,
		},
		"too large": {`{"queue": "default", "kind": "k", "payload": "` + strings.Repeat("x", 10_000) + `"}`, "", 413},
	} {
		status, out, _ := b.call("POST", "/api/messages", test.body)
		require.Equal(t, test.status, status, "%s: %v", name, out)
		if test.location != "" {
			require.Equal(t, test.location, out["errors"].([]any)[0].(map[string]any)["location"], name)
		}
	}
	good := `{"queue": "default", "kind": "k", "payload": 1}`
	status, out, _ := b.call("POST", "/api/messages/batch",
		`{"messages": [`+good+`, {"queue": "nowhere", "kind": "k", "payload": 1}]}`)
	require.Equal(t, 422, status)
	require.Equal(t, "body.messages[1].queue", out["errors"].([]any)[0].(map[string]any)["location"])
	status, _, _ = b.call("POST", "/api/messages/batch", `{"messages": [`+good+strings.Repeat(`,`+good, 1000)+`]}`)
	require.Equal(t, 422, status)
	var n int
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM river_job").Scan(&n))
	require.Zero(t, n)

	status, out, _ = b.call("POST", "/api/messages/batch", `{"messages": [`+good+`,`+good+`]}`)
	require.Equal(t, 202, status)
	require.Len(t, out["messages"], 2)
}

func TestAPI_ServesHealthAndItsDocument(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	b.awaitMessage("m1", "dead-lettered")
	// A loop may be late on a busy machine.
	require.Eventually(t, func() bool { return b.health().OK }, 5*time.Minute, 50*time.Millisecond)
	var names []string
	for _, p := range b.health().Parts {
		names = append(names, p.Name)
	}
	require.Equal(t, []string{
		"database", "schema", "policy", "access", "automatic", "restored", "capture", "ingest", "processing",
		"presence", "server", "rescue", "circuit-breakers", "conditions", "partitions", "ordered-places", "sessions",
		"retention", "rollups", "rollup-trimming", "metrics", "reconciler", "facts", "policy-queues", "held-messages",
		"traffic", "filing", "dlq-workers", "redeliveries", "expiry", "gates", "observed", "smart-retry", "wake-ups",
		"regrouping", "replay-runs", "fixes", "approvals", "queue-breakers", "attachment",
	}, names)
	for _, path := range []string{"/livez", "/readyz"} {
		status, _, _ := b.call("GET", path, "")
		require.Equal(t, 200, status, path)
	}
	status, page, header := b.call("GET", "/docs", "")
	require.Equal(t, 200, status)
	require.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'")
	require.Contains(t, page["text"], "/api/dlq/entries/{id}/replay")
	_, spec, _ := b.call("GET", "/openapi.json", "")
	require.Equal(t, "3.1.0", spec["openapi"])
	status, yaml, _ := b.call("GET", "/openapi.yaml", "")
	require.Equal(t, 200, status)
	committed, err := os.ReadFile("../../openapi/openapi.yaml")
	require.NoError(t, err)
	require.Equal(t, string(committed), yaml["text"], "make generate")
	for path, operations := range spec["paths"].(map[string]any) {
		for method, o := range operations.(map[string]any) {
			op := o.(map[string]any)
			require.NotEmpty(t, op["summary"], "%s %s", method, path)
			examples, problems := 0, 0
			for code, r := range op["responses"].(map[string]any) {
				contents, _ := r.(map[string]any)["content"].(map[string]any)
				if code == "204" {
					examples++ // responses with content have an example; a 204 has no content
				}
				for kind, content := range contents {
					if kind == "application/problem+json" {
						problems++
					} else if code < "300" && content.(map[string]any)["example"] != nil {
						examples++
					}
				}
			}
			require.NotZero(t, examples, "%s %s has an example", method, path)
			require.NotZero(t, problems, "%s %s says how it fails", method, path)
		}
	}
	status, out, _ := b.call("GET", "/nowhere", "")
	require.Equal(t, 404, status)
	require.Contains(t, out["detail"], "/nowhere")
}

func TestMetrics_CountAMessage(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	b.awaitEntry(b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string), "dlq_manual")
	var text string
	require.Eventually(t, func() bool { // database figures are sampled every two seconds
		_, out, _ := b.call("GET", "/metrics", "")
		text, _ = out["text"].(string)
		return strings.Contains(text, `dlqd_dead_letters{error_class="not_found",queue="default",status="dlq_manual"} 1`) &&
			strings.Contains(text, `dlqd_messages_submitted_total{outcome="overflow",queue="default"} 0`)
	}, 5*time.Minute, 100*time.Millisecond)
	for _, want := range []string{
		`dlqd_http_requests_total{code="202",operation="submit-message"} 1`,
		`dlqd_messages_submitted_total{outcome="accepted",queue="default"} 1`,
		`dlqd_ingest_inserts_total{outcome="ok"} 1`,
		`dlqd_ingest_pending_messages 0`,
		`dlqd_deliveries_total{destination="default",outcome="not_found",queue="default"} 1`,
		`dlqd_delivery_seconds_count{destination="default",outcome="not_found"} 1`,
		`dlqd_delivery_wait_seconds_count{queue="default"} 1`,
		`dlqd_ingest_wait_seconds_count 1`,
		`dlqd_loop_turn_seconds_count{loop="dlq-workers"}`,
		`dlqd_pool_connections{state="used"}`,
		`dlqd_build_info{`,
		`dlqd_worker_entries_total{action="parked"} 1`,
		`dlqd_dead_letter_oldest_seconds{queue="default"}`,
		`dlq_jobs_total{queue="default"} 1`,
		`dlqd_dead_letters_captured_total{error_class="not_found",queue="default"} 1`,
		`dlqd_database_up 1`,
	} {
		require.Contains(t, text, want)
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	require.NoError(t, err)
	require.Empty(t, problems)
}

func TestSubmit_OverflowAnswers429(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.MaxPending = 1 }})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job IN SHARE MODE")
	require.NoError(t, err)
	body := `{"queue": "default", "kind": "k", "payload": 1}`
	first := make(chan int, 1)
	go func() {
		status, _, _ := b.call("POST", "/api/messages", body)
		first <- status
	}()
	require.Eventually(t, func() bool {
		_, out, _ := b.call("GET", "/metrics", "")
		return strings.Contains(out["text"].(string), "dlqd_ingest_pending_messages 1")
	}, 5*time.Minute, 5*time.Millisecond)
	status, out, header := b.call("POST", "/api/messages", body)
	require.Equal(t, http.StatusTooManyRequests, status, out)
	require.Equal(t, "1", header.Get("Retry-After"))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, http.StatusAccepted, <-first)
}

func TestSubmit_LimitsTheMemoryOfAllBodies(t *testing.T) {
	t.Parallel()
	// The limit has room for two bodies. One client may use half of it.
	b := setup(t, options{config: func(c *server.Config) { c.MaxBodiesBytes = 12 << 10 }})
	body := `{"queue": "default", "kind": "k", "payload": "` + strings.Repeat("x", 700) + `"}`
	refused := func() bool {
		status, _, header := b.call("POST", "/api/messages", body)
		return status == http.StatusTooManyRequests && header.Get("Retry-After") == "1"
	}
	// A client sends its message except for the end; until the end arrives, there is no room. On a
	// busy machine another request may come first, so that this message is refused or its end comes
	// too late.
	held := func() bool {
		conn, err := net.Dial("tcp", strings.TrimPrefix(b.base, "http://"))
		require.NoError(t, err)
		defer conn.Close()
		_, err = fmt.Fprintf(conn, "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"+
			"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n", len(body))
		require.NoError(t, err)
		answers := bufio.NewReader(conn)
		response, err := http.ReadResponse(answers, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusContinue, response.StatusCode)
		_, err = fmt.Fprint(conn, body[:len(body)-1])
		require.NoError(t, err)
		answer := make(chan int, 1)
		go func() {
			status := 0
			if response, err := http.ReadResponse(answers, nil); err == nil {
				status = response.StatusCode
				_ = response.Body.Close()
			}
			answer <- status
		}()
		for !refused() { // until the server has read the first part
			select {
			case <-answer:
				return false
			default:
			}
		}
		_, _ = fmt.Fprint(conn, body[len(body)-1:])
		return <-answer == http.StatusAccepted
	}
	require.Eventually(t, held, time.Minute, time.Millisecond)
	status, out, _ := b.call("POST", "/api/messages", body)
	require.Equal(t, http.StatusAccepted, status, out)
}

func TestAPI_RefusesOtherOrigins(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	request, err := http.NewRequestWithContext(t.Context(), "POST", b.base+"/api/messages",
		strings.NewReader(`{"queue": "default", "kind": "k", "payload": 1}`))
	require.NoError(t, err)
	request.Header.Set("Origin", "https://evil.example")
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusForbidden, response.StatusCode)
}

func TestParts_RunInSeparateProcesses(t *testing.T) {
	t.Parallel()
	only := func(api, process, dlqWorkers bool) func(*server.Config) {
		return func(c *server.Config) { c.API, c.Process, c.DLQWorkers = api, process, dlqWorkers }
	}
	front := setup(t, options{config: only(true, false, false)})
	front.submit("m1")
	require.Equal(t, "queued", front.awaitMessage("m1", "queued")["state"])

	receiver := httptest.NewServer(answering(http.StatusOK))
	t.Cleanup(receiver.Close)
	rules, err := policy.Default(receiver.URL)
	require.NoError(t, err)
	s, err := server.Start(t.Context(), server.Config{
		DatabaseURL: front.url, Schemas: postgres.DefaultSchemas(),
		Process: true, Policy: rules, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	front.awaitMessage("m1", "completed")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, s.Wait(ctx, context.Background()))
}

func TestListen_UnixSocket(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "dlqd-s")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "api.sock")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	stale.SetUnlinkOnClose(false)
	require.NoError(t, stale.Close()) // as after a kill
	b := setup(t, options{config: func(c *server.Config) { c.Listen = append(c.Listen, "unix:"+path) }})
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _,
		_ string,
	) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
	response, err := client.Post("http://dlqd/api/messages", "application/json",
		strings.NewReader(`{"messageId": "u1", "queue": "default", "kind": "k", "payload": 1}`))
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, 202, response.StatusCode)
	client.CloseIdleConnections()
	b.awaitMessage("u1", "completed")
	_, err = server.Start(t.Context(), server.Config{
		DatabaseURL: b.url, Schemas: postgres.DefaultSchemas(), API: true, Listen: []string{"unix:" + path},
		Policy: &policy.Policy{}, Logger: slog.New(slog.DiscardHandler),
	})
	require.ErrorContains(t, err, "another process listens there")
}

func TestStart_RefusesAnOldSchema(t *testing.T) {
	t.Parallel()
	_, err := server.Start(t.Context(), server.Config{
		DatabaseURL: postgrestest.Empty(t), Schemas: postgres.DefaultSchemas(),
		API: true, Logger: slog.New(slog.DiscardHandler),
	})
	require.ErrorIs(t, err, postgres.ErrSchemaOld)
	require.ErrorContains(t, err, "dlqd migrate up")
}

// startLater starts a server in the background, and stops it after a successful start. It returns the server's log, and
// a channel that receives the error of the start or the stop, or nil.
func startLater(t *testing.T, url string) (log *lockedBuffer, started <-chan error) {
	t.Helper()
	log = new(lockedBuffer)
	done := make(chan error, 1)
	go func() {
		s, err := server.Start(t.Context(), server.Config{
			DatabaseURL: url, DatabaseWait: time.Hour, Schemas: postgres.DefaultSchemas(), API: true,
			Listen: []string{"127.0.0.1:0"}, Policy: &policy.Policy{}, Logger: slog.New(slog.NewTextHandler(log, nil)),
		})
		if err == nil {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			err = s.Wait(ctx, context.Background())
		}
		done <- err
	}()
	return log, done
}

// A start waits for a database that does not accept connections yet. It does not wait if the database refuses the user.
func TestStart_WaitsForTheDatabase(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	postgrestest.Alter(t, url, "CONNECTION LIMIT 0")
	log, started := startLater(t, url)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "waiting for the database") }, time.Minute,
		10*time.Millisecond)
	postgrestest.Alter(t, url, "CONNECTION LIMIT -1")
	require.NoError(t, <-started)

	_, started = startLater(t, postgrestest.WithUser(url, "absent_role"))
	require.ErrorContains(t, <-started, "absent_role")
}

// A start tries again if the database accepts connections but does not answer a later statement in time.
func TestStart_TriesAgainAfterATimeout(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	tx, err := postgrestest.Open(t, url).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.processes")
	require.NoError(t, err)
	postgrestest.Alter(t, url, "SET lock_timeout = '100ms'")
	log, started := startLater(t, url)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "waiting for the database") },
		2*time.Minute, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-started)
}

// An application may have an older version of River's schema. On it, dlqd handles dead letters but does not deliver
// messages.
func TestStart_RefusesToDeliverOnAnOlderRiver(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	pool := postgrestest.Open(t, url)
	postgrestest.MigrateRiver(t, pool, "", 6)
	require.NoError(t, (&postgres.Migrator{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}).Attach(t.Context()))
	config := server.Config{
		DatabaseURL: url, Schemas: postgres.DefaultSchemas(), Process: true,
		Policy: &policy.Policy{}, Logger: slog.New(slog.DiscardHandler),
	}
	_, err := server.Start(t.Context(), config)
	require.ErrorContains(t, err, "run River's migrations")

	b := setup(t, options{config: func(c *server.Config) { c.DatabaseURL, c.Process = url, false }})
	_, err = pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1)`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now()`)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, page, _ := b.call("GET", "/api/dlq/entries?status=dlq_manual", "")
		return len(page["entries"].([]any)) == 1
	}, 5*time.Minute, 50*time.Millisecond)
}

func TestStop_LetsRunningJobsFinish(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}), make(chan struct{})
	b := setup(t, options{receiver: func(http.ResponseWriter, *http.Request) {
		close(arrived)
		<-release
	}})
	b.submit("m1")
	<-arrived
	go func() {
		for b.ready() { // until the stop has begun
			time.Sleep(time.Millisecond)
		}
		close(release)
	}()
	b.stop()
	var state string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT state FROM river_job").Scan(&state))
	require.Equal(t, "completed", state)
}

func (b *bundle) count(sql string) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql).Scan(&n))
	return n
}

func (b *bundle) ready() bool {
	response, err := http.Get(b.base + "/readyz")
	if err != nil {
		return false
	}
	_ = response.Body.Close()
	return response.StatusCode == http.StatusOK
}

func TestStop_LeavesNoGoroutines(t *testing.T) { //nolint:paralleltest // it looks at all goroutines of the process
	_, err := postgrestest.Start(t.Context()) // the test's server keeps running
	require.NoError(t, err)
	shared.stop() // with -count, an earlier run of the tests has started it
	before := goleak.IgnoreCurrent()
	b := setup(t, options{})
	b.submit("m1")
	b.awaitMessage("m1", "completed")
	b.stop()
	b.pool.Close()
	http.DefaultClient.CloseIdleConnections()
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("net/http/httptest.(*Server).goServe.func1"))
}

func TestSchemas_CustomNames(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	schemas := postgres.Schemas{DLQ: "dead_letters", River: "jobs"}
	migrator := &postgres.Migrator{
		Pool: postgrestest.Open(t, url), Schemas: schemas, Logger: slog.New(slog.DiscardHandler),
	}
	require.NoError(t, migrator.Up(t.Context()))
	b := setup(t, options{receiver: answering(http.StatusNotFound), config: func(c *server.Config) {
		c.DatabaseURL,
			c.Schemas = url, schemas
	}})
	b.submit("m1")
	id := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(id, "dlq_manual")
	status, out, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{}`)
	require.Equal(t, 202, status, out)
	b.awaitEntry(id, "dlq_manual")
	_, list, _ := b.call("GET", "/api/dlq/entries?queue=default", "")
	require.Len(t, list["entries"], 1)
	b.pool = migrator.Pool
	require.NotZero(t, b.count(`SELECT count(*) FROM dead_letters.dead_letter_transitions
		WHERE origin LIKE 'API, from 127.0.0.1%'`))
}

// Scopes also work in schemas with other names.
func TestSchemas_CustomNamesWithScopes(t *testing.T) {
	t.Parallel()
	url := postgrestest.Empty(t)
	schemas := postgres.Schemas{DLQ: "dead_letters", River: "jobs"}
	migrator := &postgres.Migrator{
		Pool: postgrestest.Open(t, url), Schemas: schemas, Logger: slog.New(slog.DiscardHandler),
	}
	require.NoError(t, migrator.Up(t.Context()))
	b := setup(t, options{config: func(c *server.Config) {
		c.DatabaseURL, c.Schemas, c.Process, c.DLQWorkers = url, schemas, false, false
		c.Policy.Access.Authentication = []string{"tokens"}
	}})
	b.pool = migrator.Pool
	_, err := b.pool.Exec(t.Context(), `INSERT INTO jobs.river_job (kind, args, queue, max_attempts, state)
		VALUES ('a', '{}', 'mail', 1, 'running')`)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), "UPDATE jobs.river_job SET state = 'discarded', finalized_at = now()")
	require.NoError(t, err)
	secret, err := access.NewStore(b.pool, schemas).Create(t.Context(), &access.Token{
		Name: "kim", Role: access.Operator, Queues: []string{"payments"},
	}, "test")
	require.NoError(t, err)
	require.Equal(t, 200, b.as(secret, "POST", "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dead_letters.dead_letter_queue WHERE status = 'dlq_pending'"))
}
