package main_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestLogLevel raises the log level of a running dlqd for a while. The log is in JSON. It contains the sizes of
// payloads, not the payloads.
func TestLogLevel(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) }))
	t.Cleanup(receiver.Close)
	url := postgrestest.URL(t)
	s := serve(t, "--database-url", url, "--destination", receiver.URL, "--log-format", "json")
	api := "--api-url=" + s.api
	send := func(id string) {
		ok(t, "send", api, "--kind", "k", "--message-id", id, `{"card": "4111111111111111"}`)
	}
	logged := func(msg string) (lines []map[string]any) {
		for line := range strings.Lines(s.log.String()) {
			var fields map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &fields), line)
			if fields["msg"] == msg {
				lines = append(lines, fields)
			}
		}
		return lines
	}
	require.Equal(t, "info\n", ok(t, "log-level", api))
	send("m1")
	require.Eventually(t, func() bool { return len(logged("dead letters need a person")) == 1 }, time.Minute,
		50*time.Millisecond)
	require.Equal(t, "default", logged("dead letters need a person")[0]["queue"])
	require.Empty(t, logged("delivery"))
	require.Equal(t, "debug\n", ok(t, "log-level", api, "debug"))
	send("m2")
	require.Eventually(t, func() bool { return len(logged("delivery")) == 1 }, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, "validation", logged("delivery")[0]["outcome"])
	require.Equal(t, "error\n", ok(t, "log-level", api, "error"))
	require.Equal(t, "error\n", ok(t, "log-level", api))
	changes := logged("log level changed")
	require.Len(t, changes, 2)
	require.Equal(t, []any{"debug", "error"}, []any{changes[1]["from"], changes[1]["to"]})
	var recorded string
	require.NoError(t, postgrestest.Open(t, url).QueryRow(t.Context(), `SELECT string_agg(act, ', ' ORDER BY at)
		FROM dlq.acts WHERE subject LIKE 'log level of %' AND origin IS NOT NULL`).Scan(&recorded))
	require.Equal(t, "set to debug, set to error", recorded)
	_, stderr, code := run(t, "log-level", api, "loud")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "debug, info, warn, error")
	require.NotContains(t, s.log.String(), "4111")

	for _, args := range [][]string{{"serve", "--log-format", "xml"}, {"serve", "--log-level", "loud"}} {
		_, _, code := run(t, args...)
		require.Equal(t, 2, code, args)
	}
}
