package server_test

import (
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/server"
)

// A group appears with its first entry. It is assigned, marked as fixed, regresses and is muted. Entries of a muted
// group are not logged.
func TestGroups_LifeCycleInTheAPI(t *testing.T) {
	t.Parallel()
	log := &lockedBuffer{}
	b := setup(t, options{
		receiver: answering(http.StatusNotFound),
		config:   func(c *server.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) },
	})
	manual := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n &&
				b.count("SELECT coalesce(sum(open), 0)::int FROM dlq.failure_groups") == n
		}, 5*time.Minute, 50*time.Millisecond)
	}
	b.submit("m1")
	manual(1)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "dead letters need a person") }, time.Minute,
		50*time.Millisecond)

	_, page, _ := b.call("GET", "/api/dlq/groups?status=open&hasOpen=true&owner=nobody", "")
	require.Len(t, page["groups"], 1, page)
	g := page["groups"].([]any)[0].(map[string]any)
	require.EqualValues(t, 1, g["open"])
	path := "/api/dlq/groups/default/" + g["fingerprint"].(string)
	change := func(body string) map[string]any {
		t.Helper()
		status, out, _ := b.call("PATCH", path, body)
		require.Equal(t, http.StatusOK, status, out)
		return out
	}
	out := change(`{"owner": "anna", "actor": "kim", "why": "on call"}`)
	require.Equal(t, "anna", out["owner"])
	require.EqualValues(t, 1, out["assigned"])
	require.Equal(t, "fixed", change(`{"status": "fixed", "note": "the route is back"}`)["status"])
	b.submit("m2")
	manual(2)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE assigned_to = 'anna'"),
		"entries that join the group are assigned to its owner")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "owner=anna regressed=true") }, time.Minute,
		50*time.Millisecond)

	status, out, _ := b.call("GET", path[:len(path)-8], "")
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, "regressed", out["status"])
	require.Equal(t, "the route is back", out["note"])
	require.Len(t, out["entries"], 2)
	require.Contains(t, out["shares"].([]any)[0], "share")

	logged := strings.Count(log.String(), "dead letters need a person")
	require.Equal(t, "muted", change(`{"status": "muted", "muteFailures": 100}`)["status"])
	_, stats, _ := b.call("GET", "/api/dlq/stats", "")
	require.EqualValues(t, 0, stats["needsPerson"])
	require.EqualValues(t, 2, stats["muted"])
	b.submit("m3")
	manual(3)
	b.submit("m4")
	manual(4)
	require.Equal(t, logged, strings.Count(log.String(), "dead letters need a person"),
		"entries of a muted group are not logged")
	_, page, _ = b.call("GET", "/api/dlq/groups?status=muted", "")
	require.Len(t, page["groups"], 1, "a muted group is still listed")
	change(`{"status": "open"}`)
	_, stats, _ = b.call("GET", "/api/dlq/stats", "")
	require.EqualValues(t, 4, stats["needsPerson"])

	_, audit, _ := b.call("GET", "/api/dlq/audit?people=true&actor=kim", "")
	require.Contains(t, audit["moves"].([]any)[0].(map[string]any)["reason"], "assigned to anna")
	for _, bad := range []string{
		`{}`, `{"status": "muted"}`, `{"status": "regressed"}`,
		`{"muteUntil": "2020-01-01T00:00:00Z"}`, `{"who": 1}`,
	} {
		status, out, _ := b.call("PATCH", path, bad)
		require.Equal(t, http.StatusUnprocessableEntity, status, out)
	}
	status, _, _ = b.call("PATCH", "/api/dlq/groups/default/none", `{"status": "fixed"}`)
	require.Equal(t, http.StatusNotFound, status)
	status, _, _ = b.call("GET", "/api/dlq/groups?cursor=x", "")
	require.Equal(t, http.StatusUnprocessableEntity, status)
}

// A group is marked as fixed in a version. If the policy has replayWhenFixed, dlqd replays the group when a deploy of
// that version or a later one is reported.
func TestGroups_PolicyReplaysFixedGroup(t *testing.T) {
	t.Parallel()
	var fixed atomic.Bool
	b := setup(t, options{
		receiver: func(w http.ResponseWriter, _ *http.Request) {
			if !fixed.Load() {
				w.WriteHeader(http.StatusNotFound)
			}
		},
		config: func(c *server.Config) {
			c.Policy.Routing.Queues = map[string]*policy.QueueRouting{"default": {ReplayWhenFixed: true}}
		},
	})
	b.submit("m1")
	b.submit("m2")
	require.Eventually(t, func() bool {
		return b.count("SELECT coalesce(sum(open), 0)::int FROM dlq.failure_groups") == 2
	}, 5*time.Minute, 50*time.Millisecond)
	_, page, _ := b.call("GET", "/api/dlq/groups", "")
	path := "/api/dlq/groups/default/" + page["groups"].([]any)[0].(map[string]any)["fingerprint"].(string)
	status, out, _ := b.call("PATCH", path, `{"status": "fixed", "fixedIn": "4.2.0"}`)
	require.Equal(t, http.StatusOK, status, out)
	for _, bad := range []string{`{"fixedIn": "4.2.0"}`, `{"status": "open", "fixedIn": "4.2.0"}`} {
		status, out, _ := b.call("PATCH", path, bad)
		require.Equal(t, http.StatusUnprocessableEntity, status, out)
	}
	fixed.Store(true)
	status, out, _ = b.call("POST", "/api/deploys", `{"version": "4.3.1", "actor": "ci"}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'") == 2
	}, 5*time.Minute, 50*time.Millisecond)
	_, shown, _ := b.call("GET", path, "")
	fix := shown["fix"].(map[string]any)
	require.Equal(t, "4.2.0", fix["fixedIn"])
	require.Equal(t, "4.3.1", fix["deployed"])
	require.NotEmpty(t, fix["run"])
	deployed, err := time.Parse(time.RFC3339Nano, fix["deployedAt"].(string))
	require.NoError(t, err)
	require.Contains(t, fix["query"], "before:"+deployed.UTC().Format(time.RFC3339Nano), "to the microsecond")
}
