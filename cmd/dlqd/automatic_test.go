package main_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestAutomatic_Commands(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("UPDATE dlq.settings SET value = 'attached' WHERE key = 'river'")
	s := serve(t, "--database-url", url, "--api", "--dlq-workers")
	api := "--api-url=" + s.api
	exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'report.daily', '{}', 'mailers', 3,
		'running' FROM generate_series(1, 3)`)
	exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() - interval '1 hour', attempt = 3, errors = ARRAY['{"error": "connection refused", "attempt": 3}'::jsonb]`)
	require.Eventually(t, func() bool {
		var n int
		return pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'automatic'").Scan(
			&n) == nil && n == 3
	}, 5*time.Minute, 50*time.Millisecond)
	out := ok(t, "automatic", api)
	require.Regexp(t, `all +off +default`, out)
	require.Regexp(t, `3 +3 +mailers +report.daily +transient +off`, out)
	require.Regexp(t, `would be sent again at .* by rule connection: automatic is off`, ok(t, "list", api))
	require.Contains(t, ok(t, "stats", api), "observed, not redelivered automatically: 3")

	out = ok(t, "automatic", "on", api, "--kind", "report.*", "--dry-run")
	require.Regexp(t, `3 +3 +mailers +report.daily +transient +100 a second`, out)
	require.Contains(t, out, "nothing was changed (--dry-run)")
	require.Contains(t, ok(t, "automatic", "stop", api, "--note", "a release"),
		"all automatic redelivery is stopped; resume it with: dlqd automatic resume")
	require.Contains(t, ok(t, "automatic", "on", api, "--kind", "report.*"),
		"(a release); resume it with: dlqd automatic resume\nkind report.*: on")
	for _, command := range [][]string{{"automatic"}, {"stats"}} {
		require.Contains(t, ok(t, append(command, api)...), "(a release); resume it with: dlqd automatic resume")
	}
	_, stderr, _ := run(t, "list", api)
	require.Contains(t, stderr, "(a release); resume it with: dlqd automatic resume")
	stdout, _, code := run(t, "doctor", "--database-url", url)
	require.Equal(t, 1, code)
	require.Regexp(t, `WRONG +automatic redelivery +all of it is stopped, by .*: a release`, stdout)
	require.Contains(t, ok(t, "automatic", "resume", api), "automatic redelivery is resumed; the switches apply again")
	require.Eventually(t, func() bool {
		var n int
		return pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'").Scan(
			&n) == nil && n == 3
	}, 5*time.Minute, 50*time.Millisecond)
	require.Contains(t, ok(t, "automatic", "off", api, "--class", "transient", "--note", "too early"),
		"class transient: off")
	require.Contains(t, ok(t, "automatic", "reset", api, "--class", "transient"),
		"class transient: removed, the policy decides")
	require.Regexp(t, `class transient: off +\S+ +too early`, ok(t, "automatic", api))

	for _, args := range [][]string{
		{"on"},
		{"off", "--queue", "a", "--all"},
		{"off", "--all", "--include", "backfilled"},
		{"on", "--queue", ""},
		{"on", "--all=false"},
		{"stop", "--all"},
		{"on", "--all", "mailers"},
	} {
		_, stderr, code := run(t, append([]string{"automatic"}, args...)...)
		require.Equal(t, 2, code, "%v: %s", args, stderr)
	}
	require.Zero(t, s.stop(syscall.SIGTERM))
}
