package host_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHost_SurvivesLocks takes every lock mode on every relation of schema dlq. Meanwhile it runs the application's
// statements in two sessions: one in which capture has run before, and a new one.
func TestHost_SurvivesLocks(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	touched := []string{"dlq.dead_letter_queue", "dlq.dead_letter_inbox", "dlq.entry_jobs", "dlq.job_facts"}
	appended := map[string]bool{"dlq.dead_letter_inbox": true, "dlq.job_facts": true}
	tables := h.strings(`SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace
		AND c.relkind IN ('r', 'p') ORDER BY 1`)
	others := "ONLY " + strings.Join(slices.DeleteFunc(tables,
		func(table string) bool { return slices.Contains(touched, table) }), ", ONLY ")
	warm := h.application()
	batches := h.prepare(100)
	next := func() (j jobs) {
		j, batches = batches[0], batches[1:]
		return j
	}
	require.Empty(t, warm.run(next(), "no locks are held"))
	holds := func(statement string) (skipped int) {
		t.Helper()
		require.True(t, h.while(statement, func() {
			for _, app := range []*application{warm, h.application()} {
				batch := next()
				if warnings := app.run(batch, statement); len(warnings) > 0 {
					skipped++
				} else {
					require.True(t, h.captured(batch), statement)
				}
			}
		}), statement)
		return skipped
	}
	for _, mode := range []string{
		"ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE",
		"SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE",
	} {
		for _, table := range touched {
			// Capture skips a job only if a lock conflicts with capture's own: one mode conflicts with its reads, four modes
			// with its appends.
			skipped := 0
			if mode == "ACCESS EXCLUSIVE" ||
				(appended[table] && slices.Contains([]string{"SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE"}, mode)) {
				skipped = 2
			}
			require.Equal(t, skipped, holds(fmt.Sprintf("LOCK TABLE ONLY %s IN %s MODE", table, mode)), "%s on %s", mode, table)
		}
		require.Zero(t, holds(fmt.Sprintf("LOCK TABLE %s IN %s MODE", others, mode)), "capture uses none of these tables")
	}
	var sequences []string
	for _, sequence := range h.strings(`SELECT c.oid::regclass::text FROM pg_class c
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind = 'S' ORDER BY 1`) {
		sequences = append(sequences, fmt.Sprintf("ALTER SEQUENCE %s INCREMENT 1", sequence))
	}
	require.Zero(t, holds(strings.Join(sequences, "; ")))
	var indexes []string
	for _, index := range h.strings(`SELECT c.oid::regclass::text FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('i', 'I') AND NOT i.indrelid::regclass::text = ANY ($1)
		ORDER BY 1`, touched) {
		// This statement takes ACCESS EXCLUSIVE on the index only.
		indexes = append(indexes, fmt.Sprintf("ALTER INDEX %s SET TABLESPACE pg_default", index))
	}
	require.Zero(t, holds(strings.Join(indexes, "; ")))

	// The reconciler finds the failures that capture skipped.
	h.reconcile()
	h.requireExact()
}
