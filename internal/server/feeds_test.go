package server_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/source"
)

// The feed's topic is one that the source reads.
const feedYAML = `
feeds:
  deaths: {cluster: main, queues: [orders], topic: "dlq.prod.{queue}"}
`

const feedsDone = `SELECT count(*) || ' ' || count(acknowledged_at) || ' ' || count(failure) FROM dlq.feed_records`

func TestFeed_PublishesEntriesAndRecognizesThem(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": feedYAML})
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1.50}`, "declined")
	b.await("1 1 0", feedsDone)
	sent := broker.Records("dlq.prod.orders")
	require.Len(t, sent, 1)
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	require.Equal(t, "cus_1", string(sent[0].Key))
	require.Equal(t, id, header(sent[0], source.HeaderEntry))
	require.Equal(t, "deaths", header(sent[0], source.HeaderFeed))
	require.Equal(t, "application/json", header(sent[0], "content-type"))
	require.Equal(t, b.one("SELECT id::text FROM dlq.feed_records"), header(sent[0], source.HeaderDelivery))
	var value map[string]any
	require.NoError(t, json.Unmarshal(sent[0].Value, &value))
	require.Equal(t, id, value["id"])
	require.Equal(t, "declined", value["errorMessage"])
	require.NotContains(t, string(sent[0].Value), "amount", "readers do not see the payload")

	b.await("1", `SELECT coalesce(max(next_offset), 0)::text FROM dlq.source_positions WHERE topic = 'dlq.prod.orders'`)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"), "its own record is no dead letter")
	_, entry, _ := b.call("GET", "/api/dlq/entries/"+id, "")
	published, ok := entry["published"].([]any)
	require.True(t, ok, entry)
	place, ok := published[0].(map[string]any)
	require.True(t, ok, entry)
	require.Equal(t, []any{"deaths", "main", "dlq.prod.orders", 0.0}, []any{
		place["feed"], place["cluster"], place["topic"], place["offset"],
	})
	_, sources, _ := b.call("GET", "/api/sources", "")
	require.Contains(t, fmt.Sprint(sources["feeds"]), "published:1")

	// A record that a feed published, and that is read from another topic, becomes an entry and is not published again.
	broker.Add("dlq.prod.copy", sent[0])
	b.await("2", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE stage <> 'inbox'")
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 3}`, "declined")
	b.await("2 2 0", feedsDone)
	require.Equal(t, "3", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"))
}

// If a process dies after it published a record and before it marked the record as acknowledged, the record is
// published again with the same delivery id.
func TestFeed_RepeatsWithTheSameDelivery(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": feedYAML})
	b.write(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN RAISE EXCEPTION 'the process dies after the publish'; END$$`)
	b.write(`CREATE TRIGGER refuse BEFORE UPDATE OF acknowledged_at ON dlq.feed_records
		FOR EACH ROW EXECUTE FUNCTION refuse()`)
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	require.Eventually(t, func() bool { return len(broker.Records("dlq.prod.orders")) > 1 }, 3*time.Minute,
		20*time.Millisecond)
	b.write("DROP TRIGGER refuse ON dlq.feed_records")
	b.await("1 1 0", feedsDone)
	for _, r := range broker.Records("dlq.prod.orders") {
		require.Equal(t, b.one("SELECT id::text FROM dlq.feed_records"), header(r, source.HeaderDelivery))
	}
	b.await("true", `SELECT (max(next_offset) > 1)::text FROM dlq.source_positions WHERE topic = 'dlq.prod.orders'`)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"), "both are recognized")
}

// Publications fail at random. Records of one key are published in the order of their failures, and a topic that fails
// for good does not block another one.
func TestFeed_KeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	refusals := 0
	b, broker := setupSources(t, policytest.Files{"sources": `
feeds:
  deaths: {cluster: main, queues: ["*"], topic: "out.{queue}", view: operator}
  gone: {cluster: main, queues: ["ord*"], topic: gone}
`})
	broker.Refuse = func(target source.Target, m source.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if target.Topic == "gone" || strings.HasSuffix(header(m, source.HeaderDelivery), "7") && refusals < 5 {
			refusals++
			return errors.New("not now")
		}
		return nil
	}
	const each = 60
	for i := range each {
		for _, key := range []string{"a", "b", "c"} {
			fail(broker, "dlq.prod.pay", key, fmt.Sprintf(`{"n": %d}`, i), "declined")
		}
	}
	b.await(fmt.Sprint(3*each), "SELECT count(*)::text FROM dlq.feed_records WHERE acknowledged_at IS NOT NULL")
	seen := map[string][]int{}
	for _, r := range broker.Records("out.orders") {
		var value struct {
			OriginalEvent struct{ Payload struct{ N int } }
		}
		require.NoError(t, json.Unmarshal(r.Value, &value))
		seen[string(r.Key)] = append(seen[string(r.Key)], value.OriginalEvent.Payload.N)
	}
	for _, key := range []string{"a", "b", "c"} {
		require.Len(t, seen[key], each)
		require.True(t, slices.IsSorted(seen[key]), seen[key])
	}
	b.await("not now", "SELECT coalesce(error, '') FROM dlq.feeds WHERE name = 'gone'")
	require.Equal(t, "180 180", b.one("SELECT waiting || ' ' || (SELECT published FROM dlq.feeds WHERE name = 'deaths') "+
		"FROM dlq.feed_figures() WHERE feed = 'gone'"))
}

// The feed publishes over Kafka's protocol. No broker of the second cluster answers: dlqd continues to file, and that
// cluster's feed waits.
func TestFeed_PublishesToKafka(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(4, "orders.DLT", "dlq.orders"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	b := setup(t, options{config: func(c *server.Config) {
		c.Policy = policytest.Load(t, policytest.Files{"sources": fmt.Sprintf(`
clusters:
  main: {brokers: [%s]}
  away: {brokers: ["127.0.0.1:9"]}
sources:
  orders: {cluster: main, topics: ["*.DLT"]}
feeds:
  deaths: {cluster: main, queues: [orders], topic: "dlq.{queue}", form: cloudevents, view: operator}
  away: {cluster: away, queues: [orders], topic: "dlq.{queue}"}
`, cluster.ListenAddrs()[0])})
		c.OpenSources = kafka.Open
	}})
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics("dlq.orders"))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	const records = 20
	for i := range records {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{
			Topic: "orders.DLT", Key: []byte("cus_1"), Value: fmt.Appendf(nil, `{"n": %d}`, i),
		}).FirstErr())
	}
	var got []int
	for len(got) < records {
		fetched := client.PollFetches(t.Context())
		require.NoError(t, fetched.Err())
		for _, r := range fetched.Records() {
			var event struct {
				ID, SpecVersion, Type, Subject string
				Data                           struct {
					ID            string
					OriginalEvent struct{ Payload struct{ N int } }
				}
			}
			require.NoError(t, json.Unmarshal(r.Value, &event))
			require.Equal(t, "1.0 dlqd.deadletter.filed", event.SpecVersion+" "+event.Type)
			require.Equal(t, event.Data.ID, event.Subject)
			require.Equal(t, "cus_1", string(r.Key))
			got = append(got, event.Data.OriginalEvent.Payload.N)
			b.await(fmt.Sprint("dlq.orders ", r.Partition, " ", r.Offset), `SELECT coalesce(max(concat_ws(' ', topic, partition,
				"offset")), '') FROM dlq.feed_records WHERE id = $1 AND acknowledged_at IS NOT NULL`, event.ID)
		}
	}
	require.True(t, slices.IsSorted(got), got)
	b.await("true", "SELECT (coalesce(error, '') <> '')::text FROM dlq.feeds WHERE name = 'away'")
	require.Equal(t, "20", b.one("SELECT waiting::text FROM dlq.feed_figures() WHERE feed = 'away'"))
	require.Equal(t, "20", b.one("SELECT count(*)::text FROM dlq.dead_letter_open"))
}

// If a publication panics, only the publication's topic is affected, and dlqd publishes to it again later.
func TestFeed_ContainsPanics(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": `
feeds:
  bad: {cluster: main, queues: [orders], topic: bad}
  deaths: {cluster: main, queues: [orders], topic: out}
`})
	var panicked atomic.Bool
	broker.Refuse = func(target source.Target, _ source.Message) error {
		if target.Topic == "bad" && panicked.CompareAndSwap(false, true) {
			panic("a fault of the program")
		}
		return nil
	}
	before := background.Panics()
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await("panicked: a fault of the program", "SELECT coalesce(error, '') FROM dlq.feeds WHERE name = 'bad'")
	require.Greater(t, background.Panics(), before)
	b.await("2 2 0", feedsDone)
	b.await("", "SELECT coalesce(error, '') FROM dlq.feeds WHERE name = 'bad'")
}

func TestFeed_IsPausedAndRewound(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": feedYAML})
	status, feed, _ := b.call("POST", "/api/feeds/deaths/pause", `{"note": "the topic moves"}`)
	require.Equal(t, 200, status, feed)
	require.Equal(t, "paused", feed["state"])
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await("1 0 0", feedsDone)
	found := b.one("SELECT at::text FROM dlq.feeds")
	b.await("true", "SELECT (at > $1::timestamptz)::text FROM dlq.feeds", found) // it looked again
	require.Empty(t, broker.Records("dlq.prod.orders"))
	_, sources, _ := b.call("GET", "/api/sources", "")
	require.Contains(t, fmt.Sprint(sources["feeds"]), "waiting:1")
	status, feed, _ = b.call("POST", "/api/feeds/deaths/resume", "")
	require.Equal(t, 200, status, feed)
	require.NotEqual(t, "paused", feed["state"])
	b.await("1 1 0", feedsDone)
	status, _, _ = b.call("POST", "/api/feeds/none/pause", "")
	require.Equal(t, 404, status)

	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 2}`, "declined")
	b.await("2 2 0", feedsDone)
	b.write("UPDATE dlq.feed_records SET at = at - interval '1 hour' WHERE place = 1")
	status, rewound, _ := b.call("POST", "/api/feeds/deaths/rewind",
		fmt.Sprintf(`{"since": %q}`, time.Now().Add(-time.Minute).Format(time.RFC3339)))
	require.Equal(t, 200, status, rewound)
	require.EqualValues(t, 1, rewound["records"])
	b.await("2 2 0", feedsDone)
	sent := broker.Records("dlq.prod.orders")
	require.Len(t, sent, 3)
	require.Equal(t, header(sent[1], source.HeaderDelivery), header(sent[2], source.HeaderDelivery))
	require.Equal(t, "3 3 0", b.one("SELECT concat_ws(' ', records, published, failed) FROM dlq.feeds"))
	require.Equal(t, "paused resumed rewound", b.one(
		"SELECT string_agg(act, ' ' ORDER BY id) FROM dlq.acts WHERE subject = 'feed deaths'"))
}

// The policy does not list every queue. So the name of a feed's topic may turn out to be too long only when a queue has
// a dead letter.
func TestFeed_FailsForLongNamesOfTopics(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": fmt.Sprintf(`
feeds:
  deaths: {cluster: main, queues: ["*"], topic: "%s{queue}"}
`, strings.Repeat("x", 240))})
	b.write(`INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind, river_job_id, failed_at)
		VALUES (dlq.uuid_v7(), 'dlq_pending', 'capture', 'a-long-name', 'k', 1, now())`)
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await("2 1 1", feedsDone)
	require.Equal(t, "the name of the topic has 251 characters; Kafka permits 249", b.one(
		"SELECT max(failure) FROM dlq.feed_records"))
}

// A transaction files more entries than a feed collects at a time. The feed finds them all, once, and goes on.
func TestFeed_PassesALargeTransaction(t *testing.T) {
	t.Parallel()
	const entries = 20_001 // 2 * maxCollected + 1
	b, broker := setupSources(t, policytest.Files{"sources": feedYAML})
	b.await("1", "SELECT count(*)::text FROM dlq.feeds")
	b.write("SELECT dlq.pause_feed('deaths')")
	before := b.one("SELECT txid_current()::text")
	// These entries have only rows of the audit trail, so their records count as failed. Most are marked at once.
	b.write(`INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind, river_job_id, failed_at)
		SELECT dlq.uuid_v7(), 'dlq_pending', 'capture', 'orders', 'k', n, now() FROM generate_series(1, $1::integer) n`,
		entries)
	b.await(fmt.Sprint(entries, " 0 0"), feedsDone)
	b.write(`SELECT dlq.mark_feed('deaths', array_agg(id), array_agg(0), array_agg(0::bigint), array_agg('gone'::text))
		FROM (SELECT id FROM dlq.feed_records ORDER BY place LIMIT 19990) r`)
	b.write("SELECT dlq.resume_feed('deaths')")
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await(fmt.Sprint(entries+1, " 1 ", entries), feedsDone)
	require.Len(t, broker.Records("dlq.prod.orders"), 1)
	require.Equal(t, fmt.Sprint(entries+1, " ", entries+1, " true"), b.one(`SELECT concat_ws(' ', records,
		(SELECT count(DISTINCT entry_id) FROM dlq.feed_records), (txid_snapshot_xmax(snapshot) > $1::bigint)::text)
		FROM dlq.feeds`, before))
}
