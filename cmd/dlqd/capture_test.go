package main_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestCapture(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	database := "--database-url=" + url
	require.Regexp(t, `CAPTURE +on\nlimit +00:01:00 of a statement\ntriggers +enabled\nunfiled entries +0\nunapplied facts +0\nlast reconciler scan +not yet\n$`, ok(t, "capture", "status", database))

	require.Contains(t, ok(t, "capture", "off", database, "--actor", "kim", "--note", "stuck"),
		"capture is off. From each session's next statement on, dlqd does nothing")
	require.Regexp(t, `CAPTURE +off \(by kim at .*: stuck\)`, ok(t, "capture", "status", database))
	require.Contains(t, ok(t, "capture", "strict", database, "--limit", "2s"), "capture is strict. ")
	require.Contains(t, ok(t, "capture", "on", database, "--limit", "100ms"), "capture is on. ")
	var status map[string]any
	require.NoError(t, json.Unmarshal([]byte(ok(t, "capture", "status", "--json", database)), &status))
	require.Equal(t, "on", status["mode"])
	require.Equal(t, "00:00:00.1", status["limit"])
	require.Equal(t, "enabled", status["triggers"])

	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"on", "--limit", "2h"}, 1, "invalid limit"},
		{[]string{"on", "--limit", "soon"}, 2, "limit"},
		{[]string{"off", "--limit", "1s"}, 2, "limit"},
		{[]string{"off", "now"}, 2, "now"},
		{[]string{"maybe"}, 2, ""},
	} {
		_, stderr, code := run(t, append([]string{"capture", database}, c.args...)...)
		require.Equal(t, c.code, code, "%v: %s", c.args, stderr)
		require.Contains(t, stderr, c.want)
	}

	// Capture can be switched off while another session locks the tables in which dlqd would record who switched it off.
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.acts, dlq.dead_letter_queue, river_job IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	stdout, stderr, code := run(t, "capture", "off", database)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "capture is off")
	require.Contains(t, stderr, "the change is not in the audit trail")
	require.Regexp(t, `unfiled entries +unknown: another session holds a lock on the table`,
		ok(t, "capture", "status", database))
	require.NoError(t, tx.Rollback(t.Context()))

	_, err = pool.Exec(t.Context(), "ALTER TABLE river_job DISABLE TRIGGER dlq_capture")
	require.NoError(t, err)
	require.Regexp(t, `WRONG +the triggers on River's table are disabled`, ok(t, "capture", "status", database))
}
