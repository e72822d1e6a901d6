package source_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A record contains the payload, the headers and the key. A reader from whom one of these is hidden does not see the
// record.
func TestRecord_IsHiddenFromReaders(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sees := func(table, column string) string {
		return b.one("SELECT has_column_privilege('dlq_reader', $1, $2, 'SELECT')::text", table, column)
	}
	require.Equal(t, "false", sees("dlq.dead_letter_queue", "record"), "by default")
	for _, hidden := range []string{"original_event", "error_message", "error_stack_trace", "metadata"} {
		b.exec("SELECT dlq.protect(ARRAY[$1])", hidden)
		require.Equal(t, "false", sees("dlq.dead_letter_queue", "record"), hidden)
		require.Equal(t, "false", sees("dlq.source_deliveries", "content"), "%s: a hash of few values tells them", hidden)
		require.Equal(t, "false", sees("dlq.job_facts", "job"), "%s: a fact \"returned\" has the record", hidden)
	}
	b.exec("SELECT dlq.protect('{}')")
	require.Equal(t, "true", sees("dlq.dead_letter_queue", "record"))
	require.Equal(t, "true", sees("dlq.source_deliveries", "content"))
	require.Equal(t, "true", b.one("SELECT relrowsecurity::text FROM pg_class WHERE oid = 'dlq.sources'::regclass"))
}
