package api_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// recordingConsole sends the tag of each call of Changed to changes.
type recordingConsole struct {
	console

	changes chan string
}

func (w recordingConsole) Changed(tag string) { w.changes <- tag }

type noConditions struct{}

func (noConditions) Unmet(string, string, *policy.Conditions) string { return "" }

// The console is notified of operations that change something. It is not notified of dry runs, previews and checks.
func TestOperations_NotifyTheConsoleOfChanges(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	planner, err := strategy.NewPlanner(policytest.Load(t, nil), noConditions{})
	require.NoError(t, err)
	plan := func() *strategy.Planner { return planner }
	changes := make(chan string, 1)
	server := httptest.NewServer(api.New(api.Config{
		Metrics: metrics.New(), Logger: slog.New(slog.DiscardHandler), LogLevel: &slog.LevelVar{},
		Store: store, Planner: plan,
		Replayer: &replay.Replayer{Store: store, Planner: plan},
		Examine:  func(context.Context) []doctor.Finding { return nil },
		Console:  func(http.Handler, http.Handler) api.Console { return recordingConsole{changes: changes} },
	}))
	t.Cleanup(server.Close)
	for _, c := range []struct{ method, path, body, tag string }{
		{"POST", "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["a"]}, "dryRun": true}`, ""},
		{"POST", "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["a"]}}`, "dead letters"},
		{"POST", "/api/dlq/export", `{"filter": {"queue": ["a"]}}`, "dead letters"},
		{"POST", "/api/dlq/export", `{"filter": {"queue": ["a"]}, "reveal": true, "note": "n"}`, "dead letters"},
		{"POST", "/api/dlq/replay", `{"filter": {"queue": ["a"]}, "dryRun": true}`, ""},
		{"POST", "/api/dlq/replay", `{"filter": {"queue": ["a"]}}`, "replay runs"},
		{"POST", "/api/dlq/reclassify", `{"dryRun": true}`, ""},
		{"POST", "/api/dlq/reclassify", `{}`, "dead letters"},
		{"POST", "/api/dlq/erasures", `{"filter": {"subscriberId": ["s"]}, "note": "n", "dryRun": true}`, ""},
		{"POST", "/api/dlq/automatic/stop", `{"dryRun": true}`, ""},
		{"POST", "/api/dlq/automatic/stop", `{}`, "automatic redelivery"},
		{"POST", "/api/dlq/restored/resume", `{"dryRun": true}`, ""},
		{"POST", "/api/dlq/restored/resume", `{}`, "automatic redelivery"},
		{"PUT", "/api/dlq/views/mine", `{"query": "queue:a"}`, "saved views"},
		{"POST", "/api/doctor", ``, ""},
		{"POST", "/api/policy/test", `{"message": "x"}`, ""},
		{"PUT", "/api/log-level", `{"level": "debug"}`, ""},
		{"GET", "/api/dlq/entries", ``, ""},
		{"POST", "/api/dlq/bulk", `{"do": "discard", "filter": {}}`, "refused"},
	} {
		request, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, strings.NewReader(c.body))
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, c.tag == "refused", response.StatusCode >= http.StatusBadRequest,
			"%s %s %s: %s", c.method, c.path, c.body, response.Status)
		got := ""
		select {
		case got = <-changes: // sent before the response ends
		default:
		}
		require.Equal(t, strings.TrimSuffix(c.tag, "refused"), got, "%s %s %s", c.method, c.path, c.body)
	}
}
