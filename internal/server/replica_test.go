package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// replicated starts a dlqd whose database has a streaming standby, which answers reads. It also returns the servers and
// the configuration of that dlqd.
func replicated(t *testing.T) (*scopeBundle, *postgrestest.Replicated, server.Config) {
	t.Helper()
	servers := postgrestest.NewReplicated(t, false)
	servers.Migrate()
	var config server.Config
	b := scopeSetup(t, func(c *server.Config) {
		c.DatabaseURL, c.ReplicaURL = servers.PrimaryURL, servers.StandbyURL
		c.Policy.Monitoring.Replica.MaxLag = time.Hour // a busy machine delays the loop
		config = *c
	})
	return b, servers, config
}

// get sends a request with a token. It returns the status, the answer, and the time of the answer's data if the replica
// answered, or "" if the primary did.
func (b *scopeBundle) get(token, method, path, body string) (status int, out, asOf string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, b.base+path, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	defer answer.Body.Close()
	var text strings.Builder
	_, err = bufio.NewReader(answer.Body).WriteTo(&text)
	require.NoError(b, err)
	return answer.StatusCode, text.String(), answer.Header.Get(api.AsOfHeader)
}

// fromReplica waits until the replica answers reads with the token. Until the replica has replayed the holder's last
// change, the primary answers.
func (b *scopeBundle) fromReplica(token string) {
	b.Helper()
	require.Eventually(b, func() bool {
		_, _, asOf := b.get(token, "GET", "/api/dlq/entries", "")
		return asOf != ""
	}, 2*time.Minute, 20*time.Millisecond)
}

// reads returns the number of reads with an outcome, from the metric dlqd_replica_reads_total.
func (b *scopeBundle) reads(token, outcome string) int {
	b.Helper()
	_, out, _ := b.get(token, "GET", "/metrics", "")
	found := regexp.MustCompile(`dlqd_replica_reads_total\{outcome="` + outcome + `"\} (\d+)`).FindStringSubmatch(out)
	require.NotNil(b, found, out)
	n, err := strconv.Atoi(found[1])
	require.NoError(b, err)
	return n
}

// TestReplica_AnswersListedOperations runs each operation and each page on a real standby. The operations that the
// API's document marks read from the standby, without an error there. The other operations do not.
func TestReplica_AnswersListedOperations(t *testing.T) {
	t.Parallel()
	b, servers, config := replicated(t)
	document, err := api.OpenAPI()
	require.NoError(t, err)
	var described struct {
		Paths map[string]map[string]struct {
			OperationID string `json:"operationId"`
			Responses   map[string]struct{ Headers map[string]any }
		}
	}
	require.NoError(t, json.Unmarshal(document, &described))
	var listed []string
	for _, item := range described.Paths {
		for _, o := range item {
			if o.Responses["200"].Headers[api.AsOfHeader] != nil {
				listed = append(listed, o.OperationID)
			}
		}
	}
	require.Subset(t, listed, []string{"list-entries", "search-audit", "export", "get-analytics-flow"})
	admin := b.token(access.Admin, nil)
	targets := map[string]string{
		"entry": b.ids["pay_eu/order.paid"], "job": b.jobs["pay_eu/order.paid"], "queue": "pay_eu", "run": b.runs["pay_eu"],
		"operation": b.done["pay_eu"], "approval": b.approvals["pay_eu"], "none": "none",
	}
	tried := 0
	for _, o := range operations {
		isListed := slices.Contains(listed, o.id)
		if !isListed && (o.method != "GET" || o.targetType == "stream") {
			continue
		}
		path := strings.Replace(o.path, "{id}", targets[o.targetType], 1)
		if !isListed {
			b.fromReplica(admin)
			_, _, asOf := b.get(admin, o.method, path, o.body)
			require.Empty(t, asOf, "%s is not in the list", o.id)
			continue
		}
		tried++
		require.True(t, o.method == "GET" || o.id == "export", "%s may change something", o.id)
		require.Eventually(t, func() bool { // a read that takes too long is repeated on the primary
			status, out, asOf := b.get(admin, o.method, path, o.body)
			require.Equal(t, http.StatusOK, status, "%s: %s", o.id, out)
			at, err := time.Parse(time.RFC3339Nano, asOf)
			return err == nil && time.Since(at) < time.Hour
		}, 2*time.Minute, 20*time.Millisecond, "%s: the standby did not answer", o.id)
	}
	require.Equal(t, len(listed), tried)
	for _, scope := range []access.Scope{{{Queues: []string{"pay_eu"}}}, {{Kinds: []string{"order.*"}}}} {
		limited := b.token(access.Reader, scope) // each statement of this caller needs settings
		b.fromReplica(limited)
		for _, path := range []string{
			"/api/dlq/entries?count=true&q=timeout", "/api/dlq/audit", "/api/dlq/filter?q=queue:",
		} {
			require.Eventually(t, func() bool {
				status, out, asOf := b.get(limited, "GET", path, "")
				require.Equal(t, http.StatusOK, status, out)
				return asOf != ""
			}, 2*time.Minute, 20*time.Millisecond, path)
		}
	}

	tellsOf := map[string]bool{ // whether the page reads from the replica
		"/": true, "/dead-letters": true, "/dead-letters?q=timeout": true, "/dead-letters/" + targets["entry"]: false,
		"/dead-letters/export": true, "/groups": true, "/groups/pay_eu/same": true, "/review": false, "/queues": true,
		"/jobs?queue=pay_eu&state=discarded": true, "/replays": false, "/replays/" + b.runs["pay_eu"]: true,
		"/operations/" + b.done["pay_eu"]: true, "/approvals": false, "/audit": true, "/access": false, "/policy": false,
		"/system": false, "/docs": false, "/search?q=order": true,
	}
	for path, tells := range tellsOf {
		b.fromReplica(admin)
		if tells {
			require.Eventually(t, func() bool {
				status, page := b.browse(admin, path)
				require.Equal(t, http.StatusOK, status, path)
				return strings.Contains(page, "From the read replica, as of")
			}, 2*time.Minute, 20*time.Millisecond, path)
			continue
		}
		status, page := b.browse(admin, path)
		require.Equal(t, http.StatusOK, status, path)
		if !strings.HasPrefix(path, "/dead-letters/") && path != "/review" && path != "/policy" {
			require.NotContains(t, page, "From the read replica", path)
		}
	}
	require.Positive(t, b.reads(admin, "replica"))

	_, out, _ := b.get(admin, "GET", "/api/health", "")
	require.Regexp(t, `"name":"replica","ok":true,"detail":"its data is at most`, out)
	healthy := regexp.MustCompile(`"name":"replica","ok":true,"detail":"is a standby of this database, \d+ bytes`)
	require.Eventually(t, func() bool { // on a busy machine, the check of the replica may exceed its time limit
		_, out, _ = b.get(admin, "POST", "/api/doctor", "")
		return healthy.MatchString(out)
	}, 5*time.Minute, 100*time.Millisecond)
	found := doctor.Replica(t.Context(), b.pool, servers.PrimaryURL)
	require.Contains(t, found[0].Detail, "is not a standby of the database: it is a primary")
	require.False(t, found[0].OK)
	config.ReplicaURL = postgrestest.URL(t)
	_, err = server.Start(t.Context(), config)
	require.ErrorIs(t, err, postgres.ErrOtherDatabase, "a start with another server's URL is refused")
}

// TestReplica_ShowsOwnActs checks that an actor sees the actor's own change although the standby does not have it: in
// the process that made the change and in another one, in lists, on pages, and on pages that are open. Other viewers
// see older data, without the change, and the time of that data.
func TestReplica_ShowsOwnActs(t *testing.T) {
	t.Parallel()
	b, servers, config := replicated(t)
	s, err := server.Start(t.Context(), config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(ctx, context.WithoutCancel(t.Context())) }()
	defer func() {
		cancel()
		require.NoError(t, <-stopped)
	}()
	other := &scopeBundle{bundle: &bundle{T: t, base: s.Addresses()[0]}}
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	// kim acts with a token that root created, on behalf of rob, and decides on pat's request.
	reader := func(name string) string { return b.named(name, access.Reader, "x") }
	root, rob, pat := reader("root"), reader("rob"), reader("pat")
	request := b.requestAs("pat", access.Scope{{Queues: []string{"mailqueue"}, Kinds: []string{"order.*"}}})
	for _, process := range []*scopeBundle{b, other} {
		for _, token := range []string{kim, lee, root, rob, pat} {
			process.fromReplica(token)
		}
	}
	open := func(token string) <-chan string { // the live sections of the list
		address := b.base + "/events?page=/dead-letters"
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, http.NoBody)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+token)
		answer, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		t.Cleanup(func() { _ = answer.Body.Close() })
		events := make(chan string, 1000)
		go func() {
			defer close(events)
			lines := bufio.NewScanner(answer.Body)
			lines.Buffer(nil, 8<<20)
			for lines.Scan() {
				events <- lines.Text()
			}
		}()
		return events
	}
	open(lee) // lee's request renders the page that both lee and kim watch
	watched := open(kim)
	awaitLine := func(text string) {
		t.Helper()
		require.Eventually(t, func() bool {
			select {
			case line := <-watched:
				return strings.Contains(line, text)
			default:
				return false
			}
		}, 2*time.Minute, time.Millisecond, text)
	}
	awaitLine("From the read replica, as of")
	servers.Pause()
	id := b.ids["pay_eu/order.paid"]
	status, out, _ := b.get(kim, "POST", "/api/dlq/bulk",
		`{"do": "assign", "assignee": "mallory", "actor": "rob", "filter": {"ids": ["`+id+`"]}}`)
	require.Equal(t, http.StatusOK, status, out)
	var done struct{ Undo string }
	require.NoError(t, json.Unmarshal([]byte(out), &done))
	status, out, asOf := b.get(lee, "GET", "/api/dlq/operations/"+done.Undo, "")
	require.Equal(t, http.StatusOK, status, "the primary has what the replica does not have yet: %s", out)
	require.Empty(t, asOf)
	require.Equal(t, http.StatusOK, b.decide(kim, request, "refuse", `{"note": "not now"}`))
	for name, token := range map[string]string{"root": root, "rob": rob, "pat": pat} {
		_, _, asOf = b.get(token, "GET", "/api/dlq/entries", "")
		require.Empty(t, asOf, "kim's change is one of %s", name)
	}
	for name, process := range map[string]*scopeBundle{"the same": b, "another": other} {
		_, out, asOf := process.get(kim, "GET", "/api/dlq/entries", "")
		require.Contains(t, out, "mallory", "%s process", name)
		require.Empty(t, asOf)
		_, out, asOf = process.get(lee, "GET", "/api/dlq/entries", "")
		require.NotContains(t, out, "mallory", "%s process", name)
		require.NotEmpty(t, asOf)
		_, page := process.browse(kim, "/dead-letters?q=assigned:mallory")
		require.Contains(t, page, id)
		require.NotContains(t, page, "From the read replica")
		_, page = process.browse(lee, "/dead-letters?q=assigned:mallory")
		require.NotContains(t, page, id)
		require.Contains(t, page, "From the read replica, as of")
	}
	awaitLine("mallory")
	servers.Resume()
	for _, process := range []*scopeBundle{b, other} {
		process.fromReplica(kim)
		_, out, _ := process.get(kim, "GET", "/api/dlq/entries", "")
		require.Contains(t, out, "mallory")
	}
}
