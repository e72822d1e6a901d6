package source_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/source/sourcetest"
)

// fileOne appends a record, and files its entry.
func (b *bundle) fileOne(offset int64) (entry string) {
	b.Helper()
	batch := b.batch(offset, offset+1, offset)
	batch.Start = offset == 0
	_, err := b.store.Append(b.Context(), batch)
	require.NoError(b, err)
	entry = b.one("SELECT id::text FROM dlq.dead_letter_inbox")
	b.exec("SELECT dlq.file(ARRAY[$1::uuid])", entry)
	return entry
}

// publish replays an entry and publishes its record at an offset of the topic "in", as an operator and the delivery
// would.
func (b *bundle) publish(entry string, offset int64) {
	b.Helper()
	job, delivery := b.begin(entry)
	b.exec("SELECT dlq.end_delivery($1, 1, $2)", delivery, offset)
	b.complete(entry, job)
}

// begin replays an entry and records that its record is about to be published.
func (b *bundle) begin(entry string) (job, delivery string) {
	b.Helper()
	job = b.one("SELECT dlq.replay($1)::text", entry)
	return job, b.one(`SELECT dlq.begin_delivery($1, 'orders', id, created_at, 'main', 'in', 'pay', $2)::text FROM river_job
		WHERE id = $3::bigint`, entry, source.Content([]byte("k"), []byte(`{"a": 1}`)), job)
}

// complete completes the job that published an entry's record.
func (b *bundle) complete(entry, job string) {
	b.Helper()
	b.exec("UPDATE river_job SET state = 'completed', attempt = 1, finalized_at = now() WHERE id = $1::bigint", job)
	b.exec("SELECT dlq.apply_facts()")
	require.Equal(b, "dlq_returned", b.status(entry))
}

func (b *bundle) status(entry string) string {
	return b.one("SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", entry)
}

// comesBack appends a record equal to the one that publish published, and applies the fact that results, if any.
func (b *bundle) comesBack(offset int64, original source.Origin) source.Stored {
	b.Helper()
	batch := b.batch(offset, offset+1, offset)
	batch.Records[0].Failure.Original = original
	batch.Records[0].Time = time.Now().Add(-time.Hour) // its envelope has the time of the first failure
	stored, err := b.store.Append(b.Context(), batch)
	require.NoError(b, err)
	b.exec("SELECT dlq.apply_facts()")
	return stored
}

var unknown = source.Origin{Topic: "in", Partition: source.Unknown, Offset: source.Unknown}

func TestReturned_LoopResolvesWhatItsGroupIsPast(t *testing.T) {
	t.Parallel()
	b := setup(t)
	broker := sourcetest.New()
	p := b.store.Policy()
	p.Sources.Sources["orders"].Quiet = 0
	client := &source.Client{
		Open: broker.Open, Policy: b.store.Policy, Store: b.store, Logger: slog.New(slog.DiscardHandler),
	}
	entry, other := b.fileOne(0), b.fileOne(1)
	b.publish(entry, 7)
	b.publish(other, 8)
	broker.Commit("pay", "in", 1, 7)
	group := background.Group{Logger: slog.New(slog.DiscardHandler)}
	group.Add(client.Loop(), client.ReturnedLoop())
	group.Start()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, group.Stop(ctx))
	}()
	broker.Commit("pay", "in", 1, 8)
	require.Eventually(t, func() bool { return b.status(entry) == "dlq_resolved" }, 3*time.Minute, 50*time.Millisecond)
	require.Equal(t, "dlq_returned", b.status(other), "the group reads it next")
}

// resolved calls dlq.resolve_returned, and returns the number of entries that it resolved.
func (b *bundle) resolved() string {
	b.Helper()
	return b.one("SELECT dlq.resolve_returned('orders', '0', '0')::text")
}

// The process died after the broker had acknowledged the record, and the record was published again. The group is past
// the first copy only.
func TestReturned_WaitsForTheLastCopy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	entry := b.fileOne(0)
	job, delivery := b.begin(entry)
	b.exec("SELECT dlq.end_delivery($1, 1, 7)", delivery)
	require.Equal(t, "1", b.one("SELECT dlq.mark_read('main', 'pay', '{in}', '{1}', '{8}')::text"))
	b.exec("SELECT dlq.end_delivery($1, 1, 9)", delivery)
	b.complete(entry, job)
	require.Equal(t, "0", b.resolved())
	require.Equal(t, "1", b.one("SELECT dlq.mark_read('main', 'pay', '{in}', '{1}', '{10}')::text"))
	require.Equal(t, "1", b.resolved())
	require.Equal(t, "dlq_resolved", b.status(entry))
}

// The group is past the record before the end of the redelivery is applied to the entry.
func TestReturned_WaitsForTheEndOfItsRedelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	entry := b.fileOne(0)
	job, delivery := b.begin(entry)
	b.exec("SELECT dlq.end_delivery($1, 1, 7)", delivery)
	require.Equal(t, "1", b.one("SELECT dlq.mark_read('main', 'pay', '{in}', '{1}', '{8}')::text"))
	require.Equal(t, "0", b.resolved())
	b.complete(entry, job)
	require.Equal(t, "1", b.resolved())
	require.Equal(t, "dlq_resolved", b.status(entry))
}

func TestUnreadGroups_AreThoseOfReturnedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	groups := func() string {
		return b.one("SELECT coalesce(string_agg(consumer_group, ','), '') FROM dlq.unread_groups()")
	}
	entry := b.fileOne(0)
	b.publish(entry, 7)
	require.Equal(t, "pay", groups())
	b.exec("SELECT dlq.resolve($1, 'kim')", entry)
	require.Empty(t, groups(), "nothing waits for the group")
	b.exec(`INSERT INTO dlq.source_deliveries (id, entry_id, queue, job_id, job_created_at, cluster, topic, consumer_group,
		partition, "offset") SELECT gen_random_uuid(), gen_random_uuid(), 'orders', -i, now(), 'main', 'in', 'pay', 1, 100 + i
		FROM generate_series(1, 1000) i`)
	require.Equal(t, "pay", groups(), "among many deliveries, it is not looked for")
}

// A topic that was created again has other records at the offsets of the old topic.
func TestReturned_ComparesTheTopicsID(t *testing.T) {
	t.Parallel()
	b := setup(t)
	entry, old := b.fileOne(0), uuid.New()
	b.publish(entry, 7)
	b.exec("UPDATE dlq.source_deliveries SET topic_id = $1", old)
	other := source.Origin{Topic: "in", TopicID: uuid.New(), Partition: 1, Offset: 7}
	require.Equal(t, 1, b.comesBack(1, other).Entries, "a record of the new topic")
	require.Equal(t, "dlq_returned", b.status(entry))
	other.TopicID = old
	require.Equal(t, 1, b.comesBack(2, other).Returned)
	b.publish(entry, 8)
	other.TopicID, other.Offset = uuid.Nil, 8
	require.Equal(t, 1, b.comesBack(3, other).Returned, "an id that is not known is not compared")
}

func TestReturned_ComesBackToItsEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	entry := b.fileOne(0)
	b.publish(entry, 7)
	back := source.Stored{Returned: 1}
	of := func(stored source.Stored) source.Stored { stored.Next = 0; return stored }
	require.Equal(t, back, of(b.comesBack(1, source.Origin{Topic: "in", Partition: 1, Offset: 7})), "by its place")
	require.Equal(t, "dlq_pending", b.status(entry))
	require.Equal(t, "2 true", b.one(`SELECT jsonb_array_length(retry_history) || ' ' || (last_failed_at > first_failed_at)
		FROM dlq.dead_letter_queue WHERE id = $1`, entry), "its old time does not lose it")

	require.Equal(t, back, of(b.comesBack(2, source.Origin{Topic: "in", Partition: 1, Offset: 7})), "published twice")
	require.Equal(t, "3", b.one(
		"SELECT jsonb_array_length(retry_history)::text FROM dlq.dead_letter_queue WHERE id = $1", entry))

	b.publish(entry, 8)
	made := source.Stored{Entries: 1}
	require.Equal(t, made, of(b.comesBack(3, source.Origin{Topic: "in", Partition: 1, Offset: 9})), "another record")
	require.Equal(t, made, of(b.comesBack(4, source.Origin{Topic: "out", Partition: -1, Offset: -1})), "another topic")
	require.Equal(t, "dlq_returned", b.status(entry))
	batch := b.batch(5, 7, 5, 6)
	batch.Records[0].Failure.Original, batch.Records[1].Failure.Original = unknown, unknown
	stored, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Returned: 1, Entries: 1}, of(stored), "of two equal records, one was published")
	b.exec("SELECT dlq.apply_facts()")

	// The entry has used up its redeliveries. A failure after that is recorded, too.
	b.publish(entry, 10)
	b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = dlq_retry_count WHERE id = $1", entry)
	require.Equal(t, back, of(b.comesBack(7, unknown)))
	require.Equal(t, "dlq_failed", b.status(entry))
	require.Equal(t, back, of(b.comesBack(8, source.Origin{Topic: "in", Partition: 1, Offset: 10})))
	require.Equal(t, "dlq_failed 6", b.one(`SELECT status || ' ' || jsonb_array_length(retry_history)
		FROM dlq.dead_letter_queue WHERE id = $1`, entry))

	// A closed entry is reopened. A deleted entry is not, and the order of its key stays.
	b.publish(entry, 11)
	b.exec("SELECT dlq.resolve($1)", entry)
	require.Equal(t, back, of(b.comesBack(9, source.Origin{Topic: "in", Partition: 1, Offset: 11})))
	require.Equal(t, "dlq_manual", b.status(entry))
	b.publish(entry, 12)
	b.exec("SELECT dlq.discard($1)", entry)
	b.exec("SELECT dlq.delete_entries(ARRAY[$1::uuid])", entry)
	require.Equal(t, made, of(b.comesBack(10, source.Origin{Topic: "in", Partition: 1, Offset: 12})))
}

func TestReturned_KeepsTheOrderOfADeletedEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`SELECT dlq.return_record(dlq.uuid_v7(), jsonb_build_object('ordered', true, 'row', jsonb_build_object('id',
		dlq.entry_id(-7, now()), 'river_job_id', -7, 'job_created_at', now(), 'queue', 'orders', 'kind', 'k', 'job_kind',
		'dlqd_message', 'ordering_key', 'cus_1', 'original_event', '{}'::jsonb, 'retry_history', '[]'::jsonb, 'retry_count',
		1, 'max_retries', 2, 'metadata', '{}'::jsonb, 'first_failed_at', now(), 'last_failed_at', now())))`)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.ordered_jobs WHERE job_id = -7"))
}

func TestAppend_GivesEarlierAttemptsATime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	batch := b.batch(0, 1, 0)
	batch.Start = true
	batch.Records[0].Failure.Attempts = []source.Attempt{{Error: "first"}}
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, "true", b.one(`SELECT bool_and((a ->> 'at')::timestamptz = last_failed_at)::text
		FROM dlq.dead_letter_inbox, jsonb_array_elements(retry_history) a`))
}

// Two partitions have equal records, and their readers store them concurrently: each delivery is matched with one
// record. The delivery of a deleted entry is matched with none.
func TestReturned_TakesADeliveryByItsHashOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, second, deleted := b.fileOne(0), b.fileOne(1), b.fileOne(2)
	b.publish(deleted, 6)
	b.exec("SELECT dlq.discard($1)", deleted)
	b.exec("SELECT dlq.delete_entries(ARRAY[$1::uuid])", deleted)
	b.publish(first, 7)
	b.publish(second, 8)
	const take = `SELECT coalesce(entry_id::text, '') FROM dlq.take_delivery('orders', 'main', $1, NULL, 'in', NULL, NULL,
		'pay', $2)`
	content := source.Content([]byte("k"), []byte(`{"a": 1}`))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	var taken string
	require.NoError(t, tx.QueryRow(t.Context(), take, "a", content).Scan(&taken))
	require.Equal(t, first, taken, "not that of a deleted entry")
	other := make(chan string)
	go func() {
		var id string
		if err := b.pool.QueryRow(t.Context(), take, "b", content).Scan(&id); err != nil {
			id = err.Error()
		}
		other <- id
	}()
	require.Eventually(t, func() bool {
		return b.one(`SELECT count(*)::text FROM pg_stat_activity WHERE wait_event_type = 'Lock'
			AND datname = current_database() AND query LIKE '%take_delivery%'`) == "1"
	}, 3*time.Minute, 20*time.Millisecond)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, second, <-other)
	require.Empty(t, b.one(take, "c", content))
}

// silentCluster is a broker whose cluster "dead" does not answer.
type silentCluster struct{ *sourcetest.Broker }

func (s silentCluster) Committed(ctx context.Context, cluster, group string) ([]source.Committed, error) {
	if cluster == "dead" {
		<-ctx.Done()
		return nil, errors.New("dial tcp: refused")
	}
	return s.Broker.Committed(ctx, cluster, group)
}

// A cluster that does not answer does not keep dlqd from asking the other clusters, however many groups it has.
func TestReturned_LoopAsksASilentClusterOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := policytest.Load(t, policytest.Files{"sources": `
clusters: {dead: {brokers: [127.0.0.1:9]}, main: {brokers: [127.0.0.1:9]}}
sources: {orders: {cluster: main, topics: [dlt], quiet: 0s}}
`})
	broker := silentCluster{sourcetest.New()}
	broker.Commit("pay", "in", 1, 8)
	client := &source.Client{
		Open:   func(*policy.Policy) (source.Broker, error) { return broker, nil },
		Policy: func() *policy.Policy { return p }, Store: b.store, Logger: slog.New(slog.DiscardHandler),
	}
	b.exec(`INSERT INTO dlq.source_deliveries (id, entry_id, queue, job_id, job_created_at, cluster, topic, consumer_group,
			acknowledged_at, partition, "offset")
		SELECT dlq.uuid_v7(), dlq.uuid_v7(), 'orders', row_number() OVER (), now(), c, 'in', 'pay' || n, now(), 1, 7
		FROM generate_series(1, 30) n, unnest('{dead,removed}'::text[]) c`)
	entry := b.fileOne(0)
	b.publish(entry, 7)
	group := background.Group{Logger: slog.New(slog.DiscardHandler)}
	group.Add(client.Loop(), client.ReturnedLoop())
	group.Start()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, group.Stop(ctx))
	}()
	require.Eventually(t, func() bool { return b.status(entry) == "dlq_resolved" }, 3*time.Minute, 50*time.Millisecond)
}
