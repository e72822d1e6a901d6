package server_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/server"
)

// setupTwo starts a dlqd with two receivers. The only queue delivers to the receiver own, which refuses messages. The
// receiver other is the destination "second" and accepts messages.
func setupTwo(t *testing.T) (b *bundle, own, other *bodies) {
	t.Helper()
	own, other = &bodies{}, &bodies{takes: true}
	second := httptest.NewServer(other)
	t.Cleanup(second.Close)
	return setup(t, options{receiver: own.ServeHTTP, config: func(c *server.Config) {
		c.Policy.Destinations["second"] = &policy.Destination{Name: "second", URL: second.URL}
	}}), own, other
}

func (b *bundle) replay(entry, body string) (status int, out map[string]any) {
	b.Helper()
	status, out, _ = b.call("POST", "/api/dlq/entries/"+entry+"/replay", body)
	return status, out
}

func (b *bundle) attempts(entry string) string {
	b.Helper()
	_, out, _ := b.call("GET", "/api/dlq/entries/"+entry, "")
	return fmt.Sprint(out["replayAttempts"])
}

func TestReplay_ToAnotherDestination(t *testing.T) {
	t.Parallel()
	b, own, other := setupTwo(t)
	b.submit("m1")
	entry := b.parked("m1")
	status, out := b.replay(entry, `{"toDestination": "third"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Equal(t, `the policy has no destination "third". Destinations: default, second.`, out["detail"])
	status, out = b.replay(entry, `{"actor": "kim", "toDestination": "second"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitEntry(entry, "dlq_resolved")
	require.Len(t, own.all(), 1)
	require.Len(t, other.all(), 1)
	require.Contains(t, b.attempts(entry), "destination:second")
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing'
		AND detail = '{"destination": "second"}' AND actor = 'kim'`))
}

// The requested destination applies to one redelivery. The next redelivery uses the destination of the queue.
func TestReplay_ToAnotherDestinationAppliesOnce(t *testing.T) {
	t.Parallel()
	b, own, other := setupTwo(t)
	b.submit("m1")
	entry := b.parked("m1")
	other.mu.Lock()
	other.takes = false
	other.mu.Unlock()
	status, out := b.replay(entry, `{"toDestination": "second"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool { return strings.Contains(b.attempts(entry), "destination:second") }, time.Minute,
		50*time.Millisecond)
	b.awaitEntry(entry, "dlq_manual")
	_, detail, _ := b.call("GET", "/api/dlq/entries/"+entry, "")
	require.Equal(t, "second", detail["errorContext"].(map[string]any)["destination"])
	own.take()
	status, out = b.replay(entry, `{}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitEntry(entry, "dlq_resolved")
	require.Len(t, own.all(), 2)
	require.Len(t, other.all(), 1)
}

func TestReplay_RunToAnotherDestination(t *testing.T) {
	t.Parallel()
	b, own, other := setupTwo(t)
	for _, id := range []string{"m1", "m2", "m3"} {
		b.submit(id)
		b.parked(id)
	}
	run := func(extra string) (int, map[string]any) {
		status, out, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"errorType": ["HTTP_422"]}`+extra+`}`)
		return status, out
	}
	status, out := run(`, "toDestination": "third"`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	// The breaker of the requested destination decides; the breaker of the queue's destination does not.
	for name, verb := range map[string]string{"default": "open", "second": "open"} {
		status, out, _ := b.call("POST", "/api/circuit-breakers/destination:"+name+"/"+verb, `{}`)
		require.Equal(t, http.StatusOK, status, out)
	}
	status, out = run(`, "toDestination": "second", "dryRun": true`)
	require.Equal(t, http.StatusOK, status)
	preview := out["preview"].(map[string]any)
	require.Equal(t, "second", preview["toDestination"])
	require.Equal(t, []any{"circuit breaker destination:second is open"}, preview["unhealthy"])
	status, out = run(`, "toDestination": "second"`)
	require.Equal(t, http.StatusConflict, status, out)
	_, err := b.pool.Exec(t.Context(), "SELECT dlq.replay_start('{}', p_all => true, p_destination => 'second')")
	require.ErrorContains(t, err, "open circuit breakers: destination:second")

	status, out, _ = b.call("POST", "/api/circuit-breakers/destination:second/reset", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	status, out = run(`, "toDestination": "second"`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Equal(t, "second", out["run"].(map[string]any)["toDestination"])
	require.Eventually(t, func() bool { return len(other.all()) == 3 }, 5*time.Minute, 50*time.Millisecond)
	require.Len(t, own.all(), 3)
	require.Equal(t, 3, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions t
		JOIN dlq.replay_runs r ON t.detail = jsonb_build_object('run', r.id, 'destination', r.destination)
		WHERE r.destination = 'second'`))
}

// If the breaker of the requested destination opens, the redelivery waits until that breaker
// closes.
func TestReplay_WaitsForTheBreakerOfAnotherDestination(t *testing.T) {
	t.Parallel()
	b, _, other := setupTwo(t)
	b.submit("m1")
	entry := b.parked("m1")
	status, out, _ := b.call("POST", "/api/circuit-breakers/destination:second/open", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	status, out = b.replay(entry, `{"toDestination": "second"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM river_job WHERE state = 'scheduled'
			AND metadata @> '{"dlq:held": "redirected", "dlq:destination": "second"}'`) == 1
	}, 5*time.Minute, 50*time.Millisecond)
	require.Empty(t, other.all())
	status, out, _ = b.call("POST", "/api/circuit-breakers/destination:second/reset", `{}`)
	require.Equal(t, http.StatusOK, status, out)
	b.awaitEntry(entry, "dlq_resolved")
	require.Len(t, other.all(), 1)
}

// A job of an application has no destination, so a replay of its entry to a destination is refused.
func TestReplay_RefusesADestinationForAnApplicationsJob(t *testing.T) {
	t.Parallel()
	b, _, _ := setupTwo(t)
	_, err := b.pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state)
		VALUES ('mail', '{}', 'mails', 1, 1, 'running')`)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb] WHERE kind = 'mail'`)
	require.NoError(t, err)
	var entry string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id::text FROM dlq.dead_letter_queue WHERE kind = 'mail'").Scan(
		&entry))
	b.awaitEntry(entry, "dlq_manual")
	status, out := b.replay(entry, `{"toDestination": "second"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Contains(t, out["detail"], entry+": is an application's job, which has no destination")
	for _, dry := range []string{"false", "true"} {
		status, out, _ = b.call("POST", "/api/dlq/replay",
			`{"filter": {"kind": ["mail"]}, "force": true, "toDestination": "second", "dryRun": `+dry+`}`)
		require.Equal(t, http.StatusUnprocessableEntity, status)
		require.Contains(t, out["detail"], "which has no destination")
	}
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs"))
}

// A replay to a destination that the policy does not have fails with a delivery error.
func TestReplay_ToARemovedDestinationFails(t *testing.T) {
	t.Parallel()
	b, _, other := setupTwo(t)
	b.submit("m1")
	entry := b.parked("m1")
	_, err := b.pool.Exec(t.Context(), "SELECT dlq.replay($1, 'kim', p_destination => 'third')", entry)
	require.NoError(t, err, "the database has no list of destinations")
	require.Eventually(t, func() bool { return strings.Contains(b.attempts(entry), "destination:third") }, time.Minute,
		50*time.Millisecond)
	out := b.awaitEntry(entry, "dlq_manual")
	require.Equal(t, "UNKNOWN_DESTINATION", out["errorType"])
	require.Empty(t, other.all())
}

func TestReplay_ListsWhatTheEditChanged(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	entry := b.parked("m1")
	for i, c := range []struct{ edit, want string }{
		{`{"payload": {"n": 2}}`, "[map[op:replace path:/n value:2 was:1]]"},
		{`{"mergePatch": {"b": [{"c": null}]}}`, "[map[op:add path:/b value:[map[c:<nil>]]]]"},
		{`{"patch": [{"op": "remove", "path": "/n"}]}`, "[map[op:remove path:/n was:2]]"},
		{`{"payload": null}`, "<nil>"},
	} {
		status, out := b.replay(entry, c.edit)
		require.Equal(t, http.StatusAccepted, status, out)
		require.Equal(t, c.want, fmt.Sprint(out["changes"]))
		require.Eventually(t, func() bool { return strings.Count(b.attempts(entry), "jobId") == i+1 }, time.Minute,
			50*time.Millisecond)
		b.awaitEntry(entry, "dlq_manual")
	}
	for _, bad := range []string{
		`{"patch": [{"op": "remove", "path": "/x"}]}`, `{"mergePatch": null}`,
		`{"payload": 1, "mergePatch": {}}`,
	} {
		status, out := b.replay(entry, bad)
		require.Equal(t, http.StatusUnprocessableEntity, status, "%s: %v", bad, out)
	}
	status, out := b.replay("0198a0b0-0000-7000-8000-000000000000", `{"mergePatch": {}}`)
	require.Equal(t, http.StatusNotFound, status, out)
}
