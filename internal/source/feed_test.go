package source_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Entries are found when their transactions commit, in any order, each once; also in parts, and after a dump was
// restored into another server.
func TestFeed_FindsEntriesThatCommitLate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("SELECT dlq.publish_feeds('{f}', '{main}', ARRAY['dlq.{queue}'])")
	const file = `INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind, river_job_id, failed_at)
		VALUES (dlq.uuid_v7(), 'dlq_pending', 'capture', $1, 'k', $2::integer, now() - make_interval(secs => $2::integer))`
	collect := func(most int) string {
		t.Helper()
		return b.one("SELECT dlq.collect_feed('f', '{ord*,x.y}', $1)::text", most)
	}
	late, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = late.Rollback(context.Background()) }()
	_, err = late.Exec(t.Context(), file, "orders", 1)
	require.NoError(t, err)
	b.exec(file, "orders", 2)
	b.exec(file, "other", 3)
	require.Equal(t, "1", collect(10))
	require.Equal(t, "0", collect(10))
	b.exec(file, "x.y", 4)
	require.Equal(t, "1", collect(10))
	require.NoError(t, late.Commit(t.Context()))
	require.Equal(t, "1", collect(10))
	require.Equal(t, "0", collect(10))
	require.Equal(t, "dlq.orders dlq.x.y dlq.orders", b.one("SELECT string_agg(topic, ' ' ORDER BY place) FROM dlq.feed_records"))

	for job := range 5 {
		b.exec(file, "a/b", 10+job)
		b.exec(file, "orders", 10+job)
	}
	require.Equal(t, "2", collect(2))
	require.Equal(t, "2", collect(2))
	require.Equal(t, "1", collect(2))
	require.Equal(t, "0", collect(2))
	require.Equal(t, "8 8", b.one("SELECT count(DISTINCT entry_id) || ' ' || (SELECT records FROM dlq.feeds) FROM dlq.feed_records"))

	b.exec(file, "orders", 20)
	b.exec("UPDATE dlq.feeds SET snapshot = '9000000000:9000000000:'")
	require.Equal(t, "1", collect(10))
	b.exec(file, "orders", 21)
	require.Equal(t, "1", collect(10))
}

func TestFeed_ForgetsOldRecords(t *testing.T) {
	t.Parallel()
	b := setup(t)
	entry := b.fileOne(0)
	b.exec(`INSERT INTO dlq.feed_records (id, feed, entry_id, queue, cluster, topic, at, failure)
		SELECT dlq.uuid_v7(), 'f', e, 'orders', 'main', 'x', now() - a, f
		FROM (VALUES ($1::uuid, interval '390 days', 'x'), (dlq.uuid_v7(), '80 days', 'x'), (dlq.uuid_v7(), '401 days', 'x'),
			(dlq.uuid_v7(), '401 days', NULL)) v (e, a, f)`, entry)
	b.exec("SELECT dlq.forget_jobs()")
	require.Equal(t, "3 2", b.one("SELECT count(*) || ' ' || count(failure) FROM dlq.feed_records"))
}
