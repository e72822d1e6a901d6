package postgres_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// An upgrade of large tables builds indexes partition by partition, without blocking writes, and resumes an interrupted
// build.
func TestIndexes_AreBuiltConcurrently(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	const indexes = `SELECT count(*) FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid
		WHERE c.relnamespace = 'dlq'::regnamespace AND x.indisvalid
		AND c.relname ~ '^dead_letter_.*_by_(code|destination)$' AND c.relkind = $1`
	parents, leaves := count(t, pool, indexes, "I"),
		count(t, pool, "SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent "+
			"WHERE c.relname LIKE '%\\_by\\_code' AND c.relkind = 'I'")
	require.NotZero(t, parents)
	require.NotZero(t, leaves)
	execute(t, pool, `DROP INDEX dlq.dead_letter_open_by_code, dlq.dead_letter_failed_by_code,
		dlq.dead_letter_resolved_by_code, dlq.dead_letter_archived_by_destination`)
	// An interrupted upgrade leaves the table's index without indexes of its partitions, and one index of a
	// partition that is not attached to the table's index.
	execute(t, pool, "CREATE INDEX dead_letter_failed_by_code ON ONLY dlq.dead_letter_failed (error_code, id) "+
		"WHERE error_code IS NOT NULL")
	execute(t, pool, "CREATE INDEX dead_letter_failed_default_by_code ON dlq.dead_letter_failed_default (error_code, "+
		"id) WHERE error_code IS NOT NULL")
	m := newMigrator(pool)
	m.Concurrently = true
	require.NoError(t, m.Up(t.Context()))
	require.Equal(t, parents, count(t, pool, indexes, "I"))
	require.Equal(t, leaves,
		count(t, pool, "SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent "+
			"WHERE c.relname LIKE '%\\_by\\_code' AND c.relkind = 'I'"))
	require.Zero(t, count(t, pool,
		"SELECT count(*) FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid "+
			"WHERE c.relnamespace = 'dlq'::regnamespace AND NOT x.indisvalid"))
	drift, err := m.Drift(t.Context())
	require.NoError(t, err)
	require.Empty(t, drift)
	require.NoError(t, m.Up(t.Context()), "a second run changes nothing")
}
