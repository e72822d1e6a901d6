package source_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// A feed finds each entry once, for any order of commits, also if it reads in parts, and after a dump was
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
	for collect(2) == "2" {
	}
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

// A feed that is far behind reads entries transaction by transaction, and moves its position with them. It reads a
// transaction with more entries than maxCollected in parts. Entries of an open transaction follow later.
func TestFeed_CatchesUpInParts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("SELECT dlq.publish_feeds('{f}', '{main}', ARRAY['dlq.{queue}'])")
	const file = `INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind, river_job_id, failed_at)
		SELECT dlq.uuid_v7(), 'dlq_pending', 'capture', 'orders', 'k', $1::integer, clock_timestamp()
		FROM generate_series(1, $2::integer)`
	late, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = late.Rollback(context.Background()) }()
	_, err = late.Exec(t.Context(), file, 0, 7)
	require.NoError(t, err)
	for job := range 30 {
		b.exec(file, job, 5)
	}
	b.exec(file, 30, 100)
	before := b.one("SELECT txid_snapshot_xmax(snapshot)::text FROM dlq.feeds")
	collect := func() string { return b.one("SELECT dlq.collect_feed('f', '{orders}', 20)::text") }
	require.Equal(t, "20", collect())
	require.Equal(t, "true true", b.one(`SELECT (count(*) <= 20) || ' '
		|| ((SELECT txid_snapshot_xmax(snapshot) FROM dlq.feeds) > $1::bigint) FROM dlq.feed_records`, before))
	for collect() != "0" {
	}
	require.Equal(t, "250 250", b.one("SELECT count(*) || ' ' || (SELECT records FROM dlq.feeds) FROM dlq.feed_records"))
	require.Equal(t, "true", b.one(`SELECT (array_agg(t.river_job_id ORDER BY r.place)
		= array_agg(t.river_job_id ORDER BY t.river_job_id, r.place))::text
		FROM dlq.feed_records r JOIN dlq.dead_letter_transitions t USING (entry_id)`))
	require.NoError(t, late.Commit(t.Context()))
	require.Equal(t, "7", collect())
	require.Equal(t, "0", collect())
}
