package main_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestGrants_areThoseOfThePage compares what the command prints with what the page says.
func TestGrants_areThoseOfThePage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/attach.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)```sql grants\n(.*?)```").FindSubmatch(page)
	require.NotNil(t, block)
	require.Equal(t, string(block[1]), ok(t, "grants", "--database-url", "postgres://river_owner:secret@localhost/app"))

	out := ok(t, "grants", "--role", `d"x`, "--river-schema", "jobs", "--part", "api")
	require.Equal(t, "-- api\nGRANT INSERT ON TABLE jobs.river_job TO \"d\"\"x\"; -- replay, and take messages\n"+
		"GRANT USAGE ON SEQUENCE jobs.river_job_id_seq TO \"d\"\"x\"; -- number those jobs\nGRANT SELECT, UPDATE ON TABLE jobs.river_queue TO \"d\"\"x\"; -- list queues; pause and resume them\n", out)
	_, stderr, code := run(t, "grants", "--part", "nothing")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "there are: attach, dlq-workers, api, process, doctor")
}

// A dry run names all rights that are missing, of attach and of the other parts, also where attach is refused for its own.
func TestAttach_dryRunNamesAllMissingRights(t *testing.T) {
	t.Parallel()
	g := postgrestest.NewGuest(t)
	stdout, stderr, code := run(t, "attach", "--dry-run", "--database-url", g.DLQD)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "GRANT TRIGGER ON TABLE public.river_job TO "+g.DLQDRole)
	require.Contains(t, stdout, "GRANT INSERT ON TABLE public.river_job TO "+g.DLQDRole)
	require.Contains(t, stdout, "GRANT USAGE ON SEQUENCE public.river_job_id_seq TO "+g.DLQDRole)
}
