package server_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCapture_IsSwitchedAndAudited(t *testing.T) {
	t.Parallel()
	b := setup(t, options{})
	read := func() map[string]any {
		t.Helper()
		status, out, _ := b.call("GET", "/api/dlq/capture", "")
		require.Equal(t, http.StatusOK, status, out)
		return out
	}
	out := read()
	require.Equal(t, "on", out["mode"])
	require.Equal(t, "00:01:00", out["limit"], "the limit in tests")
	require.Equal(t, "enabled", out["triggers"])
	require.EqualValues(t, 0, out["missed"])
	require.NotContains(t, out, "changedBy")

	for _, c := range []struct{ mode, body, limit, message string }{
		{
			"off", `{"mode": "off", "actor": "kim", "note": "stuck"}`, "00:01:00",
			"dlqd does nothing in the application's transactions",
		},
		{
			"strict", `{"mode": "strict", "limit": "2s", "actor": "kim", "note": "stuck"}`, "00:00:02",
			"a job cannot end as a failure unless its dead letter can be written",
		},
		{"on", `{"mode": "on", "limit": "100ms", "actor": "kim", "note": "stuck"}`, "00:00:00.1", "Failures are captured"},
	} {
		status, done, _ := b.call("PUT", "/api/dlq/capture", c.body)
		require.Equal(t, http.StatusOK, status, done)
		require.Equal(t, c.mode, done["mode"])
		require.Equal(t, true, done["recorded"])
		require.Contains(t, done["message"], c.message)
		out := read()
		require.Equal(t, c.mode, out["mode"])
		require.Equal(t, c.limit, out["limit"])
		require.Equal(t, "kim", out["changedBy"])
		require.Equal(t, "stuck", out["note"])
	}
	_, audit, _ := b.call("GET", "/api/dlq/audit?actor=kim&people=true", "")
	var trail []string
	for _, m := range audit["moves"].([]any) {
		move := m.(map[string]any)
		trail = append(trail, fmt.Sprint(move["reason"], ", ", move["note"], ", ", move["detail"]))
		require.Contains(t, move["origin"], "API, from ")
	}
	require.Equal(t, []string{
		"capture: on, stuck, map[limit:00:00:00.1]", "capture: strict, stuck, map[limit:00:00:02]",
		"capture: off, stuck, map[limit:00:01:00]",
	}, trail)

	for body, detail := range map[string]string{
		``: "", `{}`: "", `{"mode": "maybe", "actor": "kim"}`: "",
		`{"mode": "on", "limit": "soon", "actor": "kim"}`:  "invalid duration",
		`{"mode": "on", "limit": "2h", "actor": "kim"}`:    "invalid limit",
		`{"mode": "on", "limit": "-1s", "actor": "kim"}`:   "",
		`{"mode": "on", "limit": "1us", "actor": "kim"}`:   "invalid limit",
		`{"mode": "off", "actor": "kim", "colour": "red"}`: "",
	} {
		status, out, _ := b.call("PUT", "/api/dlq/capture", body)
		require.Contains(t, []int{http.StatusBadRequest, http.StatusUnprocessableEntity}, status, "%s: %v", body, out)
		require.Contains(t, out["detail"], detail, body)
	}
	require.Equal(t, "on", read()["mode"])
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.acts WHERE subject = 'capture'"))
}
