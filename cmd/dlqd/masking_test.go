package main_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestMasking_CommandsMaskOutput checks that commands mask the data that the policy declares sensitive, unless the user
// gives a reason.
func TestMasking_CommandsMaskOutput(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	dir := policytest.Dir(t, policytest.Files{"retry-policies": "data: {sensitivePaths: [payload..email], " +
		"sensitivePatterns: [cardNumbers, tokens]}"})
	require.Contains(t, ok(t, "config", "show", "--config-dir", dir), "sensitivePaths")
	s := serve(t, "--database-url", url, "--api", "--dlq-workers", "--config-dir", dir, "--destination",
		policytest.Destination)
	api := "--api-url=" + s.api
	for _, sql := range []string{
		`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ('order.paid', '{"amount": 4200, "buyer": {"email": "kim@example.com"}, "free": "4111 1111 1111 1111"}', 'q',
				1, 'running')`,
		`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY[jsonb_build_object('error', 'no such mailbox: kim@example.com; card 4111111111111111; Bearer abcdefgh12345678', 'attempt', 1)]`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	var id string
	require.Eventually(t, func() bool {
		return pool.QueryRow(t.Context(), "SELECT id::text FROM dlq.dead_letter_open").Scan(&id) == nil
	}, 5*time.Minute, 50*time.Millisecond)
	hidden := []string{"kim@example.com", "4111 1111 1111 1111", "4111111111111111", "abcdefgh12345678"}
	for _, command := range [][]string{
		{"show", id},
		{"show", id, "--json"},
		{"list"},
		{"list", "--json"},
		{"export"},
		{"export", "--format", "csv"},
		{"audit"},
		{"stats"},
		{"stats", "groups"},
		{"replay", "--queue", "q", "--dry-run", "--json"},
	} {
		out, stderr, _ := run(t, append(command, api)...)
		for _, secret := range hidden {
			require.NotContains(t, out+stderr, secret, strings.Join(command, " "))
		}
	}
	require.Contains(t, ok(t, "show", id, api), "no such mailbox: ***; card ***; ***")
	_, stderr, code := run(t, "show", id, api, "--reveal", "")
	require.NotZero(t, code)
	require.Contains(t, stderr, "note")
	for _, command := range [][]string{
		{"show", id, "--reveal", "ticket 7"},
		{"export", "--queue", "q", "--reveal", "ticket 8"},
	} {
		out := ok(t, append(command, api)...)
		require.Contains(t, out, "kim@example.com")
		require.Contains(t, out, "4111 1111 1111 1111")
	}
	out := ok(t, "audit", api)
	require.Contains(t, out, "ticket 7")
	require.Contains(t, out, "ticket 8")
	require.NotContains(t, s.log.String(), "kim@example.com")
}
