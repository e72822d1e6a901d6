package server_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/source"
)

// A consumer with Spring Kafka fails, and dlqd makes an entry of the record. An operator replays the entry, the
// consumer fails again, and the record comes back to the same entry. The operator replays it again.
func TestKafka_RecordGoesBackToItsTopic(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(4, "orders", "orders.DLT"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	b := setup(t, options{config: func(c *server.Config) {
		c.Policy = policytest.Load(t, policytest.Files{"sources": fmt.Sprintf(`
clusters:
  main: {brokers: [%s]}
sources:
  orders:
    cluster: main
    topics: ["*.DLT"]
    envelope: spring
    consumerGroup: dlqd
    replayTo: "{original}"
    kind: "{topic}"
`, cluster.ListenAddrs()[0])})
		c.OpenSources = kafka.Open
	}})
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ConsumeTopics("orders"))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	value := []byte(`{"amount": 1.50,  "card":"x"}`)
	die := func(headers []kgo.RecordHeader, partition int32, offset int64, class, message string) {
		trace := class + ": " + message + "\n\tat com.shop.Pay.run(Pay.java:1)"
		partitionBytes := binary.BigEndian.AppendUint32(nil, uint32(partition))
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{
			Topic: "orders.DLT", Partition: partition, Key: []byte("cus_1"), Value: value,
			Headers: append(headers,
				kgo.RecordHeader{Key: "kafka_dlt-exception-fqcn", Value: []byte(class)},
				kgo.RecordHeader{Key: "kafka_dlt-exception-message", Value: []byte(message)},
				kgo.RecordHeader{Key: "kafka_dlt-exception-stacktrace", Value: []byte(trace)},
				kgo.RecordHeader{Key: "kafka_dlt-original-topic", Value: []byte("orders")},
				kgo.RecordHeader{Key: "kafka_dlt-original-partition", Value: partitionBytes},
				kgo.RecordHeader{Key: "kafka_dlt-original-offset", Value: binary.BigEndian.AppendUint64(nil, uint64(offset))},
				kgo.RecordHeader{Key: "kafka_dlt-original-consumer-group", Value: []byte("payments")},
			),
		}).FirstErr())
	}
	returned := func() *kgo.Record {
		var records []*kgo.Record
		for len(records) == 0 {
			fetched := client.PollFetches(t.Context())
			require.NoError(t, fetched.Err())
			records = fetched.Records()
		}
		require.Len(t, records, 1)
		return records[0]
	}
	of := func(record *kgo.Record, key string) string {
		for _, header := range record.Headers {
			if header.Key == key {
				return string(header.Value)
			}
		}
		return ""
	}

	trace := kgo.RecordHeader{Key: "traceparent", Value: []byte("00-1")}
	die([]kgo.RecordHeader{trace}, 2, 41, "com.shop.CardDeclined", "payment declined")
	b.await("dlq_manual", "SELECT coalesce(min(status::text), '') FROM dlq.dead_letter_queue")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	require.Equal(t, "orders com.shop.CardDeclined payment declined business",
		b.one(`SELECT concat_ws(' ', kind, error_type, error_message, error_class) FROM dlq.dead_letter_queue`))
	require.Equal(t, "orders 2 41 payments", b.one(`SELECT concat_ws(' ', (record).original_topic,
		(record).original_partition, (record).original_offset, (record).consumer_group) FROM dlq.dead_letter_queue`))

	status, answer, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{"note": "mended"}`)
	require.Less(t, status, 300, answer)
	first := returned()
	require.Equal(t, int32(2), first.Partition)
	require.Equal(t, "cus_1", string(first.Key))
	require.Equal(t, value, first.Value)
	require.Equal(t, id, of(first, source.HeaderEntry))
	require.WithinDuration(t, time.Now(), first.Timestamp, time.Hour)
	require.NotEmpty(t, of(first, kafka.HeaderTimestamp))
	require.Equal(t, "00-1", of(first, "traceparent"))
	require.Empty(t, of(first, "kafka_dlt-exception-fqcn"))
	b.await("true", `SELECT coalesce((SELECT (acknowledged_at IS NOT NULL AND partition = 2 AND "offset" = $2)::text
		FROM dlq.source_deliveries WHERE id = $1), 'none')`, of(first, source.HeaderDelivery), first.Offset)

	die(first.Headers, first.Partition, first.Offset, "com.shop.CardDeclined", "payment declined again")
	b.await("dlq_manual: payment declined again",
		"SELECT status || ': ' || error_message FROM dlq.dead_letter_queue WHERE id = $1", id)
	status, answer, _ = b.call("POST", "/api/dlq/entries/"+id+"/replay", `{}`)
	require.Less(t, status, 300, answer)
	second := returned()
	require.NotEqual(t, of(first, source.HeaderDelivery), of(second, source.HeaderDelivery))
	require.Len(t, second.Headers, len(first.Headers), "headers grow with each failure")
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"), "the same entry")
}

// Records in Avro are decoded by a schema registry. A redelivery publishes their bytes; an edit is encoded with the
// same schema, or refused.
func TestKafka_EditsARecordBySchema(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "dlq.a", "in.a"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	registry := srfake.New()
	t.Cleanup(registry.Close)
	registry.SeedSchema("orders", 1, 7, sr.Schema{Schema: `{"type":"record","name":"Order","fields":[
		{"name":"id","type":"long"},
		{"name":"amount","type":{"type":"bytes","logicalType":"decimal","precision":30,"scale":2}},
		{"name":"note","type":["null","string"]}]}`})
	b := setup(t, options{config: func(c *server.Config) {
		c.Policy = policytest.Load(t, policytest.Files{"sources": fmt.Sprintf(`
clusters:
  main: {brokers: [%s]}
registries:
  main: {url: %s}
sources:
  orders: {cluster: main, topics: [dlq.*], replayTo: "in.{*}", registry: main}
`, cluster.ListenAddrs()[0], registry.URL())})
		c.OpenSources = kafka.Open
	}})
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics("in.a"))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	head := "\x00\x00\x00\x00\x07"
	id := string(binary.AppendVarint(nil, math.MaxInt64))
	// The array of a decimal may be longer than it must be: an encoder would not write these bytes.
	value := []byte(head + id + "\x1a\x00" + "\x00\x0f\x9e\xdb\xa4\xfb\xd6\x0a\x11\x6a\x7c\x5a" + "\x00")
	for range 3 {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: "dlq.a", Value: value}).FirstErr())
	}
	require.NoError(t, client.ProduceSync(t.Context(),
		&kgo.Record{Topic: "dlq.a", Value: []byte("\x00\x00\x00\x00\x09x")}).FirstErr())
	b.await("4", "SELECT count(*)::text FROM dlq.dead_letter_queue")
	entry := func(offset int) string {
		return b.one(`SELECT id::text FROM dlq.dead_letter_queue WHERE (record)."offset" = $1`, offset)
	}
	payload := func(offset int) string {
		return b.one(`SELECT original_event ->> 'payload' FROM dlq.dead_letter_queue WHERE (record)."offset" = $1`, offset)
	}
	require.Equal(t, `{"id": 9223372036854775807, "note": null, "amount": 188840729237959640609250.18}`, payload(0))
	require.Contains(t, payload(3), `"notDecoded": "schema 9: registry main has no such schema (404)"`)
	require.Equal(t, "3", b.one(`SELECT count(*)::text FROM dlq.dead_letter_queue
		WHERE original_event -> 'payload' ->> 'id' = '9223372036854775807'`))
	replay := func(offset int, body string) {
		status, answer, _ := b.call("POST", "/api/dlq/entries/"+entry(offset)+"/replay", body)
		require.Less(t, status, 300, answer)
	}
	returned := func() []byte {
		for {
			fetched := client.PollFetches(t.Context())
			require.NoError(t, fetched.Err())
			if records := fetched.Records(); len(records) > 0 {
				require.Len(t, records, 1)
				return records[0].Value
			}
		}
	}
	replay(0, `{}`)
	require.Equal(t, value, returned(), "without an edit, the bytes are unchanged")
	replay(1, `{"payload": {"id": 9223372036854775806, "amount": -0.01, "note": "mended"}}`)
	require.Equal(t, head+string(binary.AppendVarint(nil, math.MaxInt64-1))+"\x02\xff\x02\x0cmended", string(returned()))
	replay(2, `{"payload": {"id": 1, "amount": 0.001, "note": null}}`)
	b.await("encoding the edited payload: schema 7: payload.amount must be a number without exponent, of at most "+
		"30 digits, 2 of them after the point",
		`SELECT error_message FROM dlq.dead_letter_queue WHERE (record)."offset" = 2`)
}
