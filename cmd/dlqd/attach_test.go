package main_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestGrants_MatchDocs compares the output of "dlqd grants" with docs/attach.md.
func TestGrants_MatchDocs(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/attach.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)```sql grants\n(.*?)```").FindSubmatch(page)
	require.NotNil(t, block)
	require.Equal(t, string(block[1]), ok(t, "grants", "--database-url", "postgres://river_owner:secret@localhost/app"))

	out := ok(t, "grants", "--role", `d"x`, "--river-schema", "jobs", "--part", "api")
	require.Equal(t, "-- api\nGRANT INSERT ON TABLE jobs.river_job TO \"d\"\"x\"; -- replay dead letters and accept "+
		"messages\n"+
		"GRANT USAGE ON SEQUENCE jobs.river_job_id_seq TO \"d\"\"x\"; -- assign ids to these jobs\nGRANT SELECT, UPDATE ON "+
		"TABLE jobs.river_queue TO \"d\"\"x\"; -- list queues; pause and resume them\n", out)
	_, stderr, code := run(t, "grants", "--part", "nothing")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "known: attach, dlq-workers, api, process, doctor")
}

// TestAttach_UnprivilegedRole follows the first steps of docs/attach.md as a role without privileges.
func TestAttach_UnprivilegedRole(t *testing.T) {
	t.Parallel()
	g := postgrestest.NewGuest(t)
	stdout, stderr, code := run(t, "attach", "--dry-run", "--database-url", g.DLQD)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "cannot attach: role "+g.DLQDRole+" lacks rights; nothing was changed")
	require.Contains(t, stderr, "GRANT TRIGGER ON TABLE public.river_job TO "+g.DLQDRole+"; -- to run capture in")
	require.Contains(t, stdout, "GRANT INSERT ON TABLE public.river_job TO "+g.DLQDRole+"; -- dlq-workers: to insert "+
		"redeliveries")

	owner := postgrestest.Open(t, g.Owner)
	grants := strings.ReplaceAll(ok(t, "grants", "--role", g.DLQDRole, "--database-url", g.Owner),
		"GRANT pg_read_all_stats", "--")
	_, err := owner.Exec(t.Context(), grants)
	require.NoError(t, err)
	require.Contains(t, ok(t, "attach", "--dry-run", "--database-url", g.DLQD),
		"create trigger dlq_capture on public.river_job")
	out := ok(t, "attach", "--database-url", g.DLQD)
	require.Contains(t, out, "dlqd observes")

	_, stderr, code = run(t, "detach", "--schema", "typo", "--database-url", g.DLQD)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "there is no dlqd in schema typo on the River in schema public; found: --schema dlq "+
		"--river-schema public")
	out = ok(t, "detach", "--drop-data", "--database-url", g.DLQD)
	require.Contains(t, out, "detached from public.river_job: dropped triggers dlq_capture, dlq_follow")
	require.Contains(t, out, "dropped its data")
	require.Contains(t, ok(t, "detach", "--database-url", g.DLQD), "nothing to remove")
}
