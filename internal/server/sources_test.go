package server_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/source/sourcetest"
)

const sourcesYAML = `
clusters:
  main: {brokers: [127.0.0.1:9]}
sources:
  orders:
    cluster: main
    topics: [dlq.prod.*]
    replayTo: in.{*}
`

// setupSources starts dlqd with a source that reads topics of a broker in memory.
func setupSources(t *testing.T, files policytest.Files) (*bundle, *sourcetest.Broker) {
	t.Helper()
	broker := sourcetest.New()
	files["sources"] = sourcesYAML + files["sources"]
	return setup(t, options{config: func(c *server.Config) {
		c.Policy = policytest.Load(t, files)
		c.OpenSources = broker.Open
		for _, defaults := range c.Policy.Routing.Strategies {
			defaults.Delays = []time.Duration{20 * time.Millisecond}
		}
	}}), broker
}

// fail adds a dead letter to a topic.
func fail(b *sourcetest.Broker, topic, key, value, text string) {
	b.Add(topic, source.Message{
		Key: []byte(key), Value: []byte(value), Time: time.Now(),
		Headers: []source.Header{
			{Key: sourcetest.HeaderError, Value: []byte(text)}, {Key: "trace", Value: []byte{0xff, 0}}, {Key: "none"},
		},
	})
}

// await waits until a query returns a text.
func (b *bundle) await(want, sql string, args ...any) {
	b.Helper()
	var got string
	require.Eventually(b, func() bool {
		require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&got))
		return got == want
	}, 3*time.Minute, 20*time.Millisecond, "%s: %s", want, sql)
}

func (b *bundle) one(sql string, args ...any) string {
	b.Helper()
	var got string
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&got))
	return got
}

func header(m source.Message, key string) string {
	for _, h := range m.Headers {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

func TestPublish_SendsBytesBackAndReturns(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1.50,  "currency":"EUR"}`, "declined")
	b.await("dlq_manual", "SELECT coalesce(min(status::text), '') FROM dlq.dead_letter_queue")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")

	status, entry, _ := b.call("GET", "/api/dlq/entries/"+id, "")
	require.Equal(t, 200, status)
	e, ok := entry["entry"].(map[string]any)
	if !ok {
		e = entry
	}
	require.Equal(t, "orders", e["queue"])
	require.Equal(t, "dlq.prod.pay", e["kind"])
	require.Equal(t, "declined", e["errorMessage"])
	require.Equal(t, "business", e["errorClass"])

	status, answer, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{"note": "mended"}`)
	require.Less(t, status, 300, answer)
	b.await("dlq_resolved", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	sent := broker.Records("in.pay")
	require.Len(t, sent, 1)
	require.Equal(t, "cus_1", string(sent[0].Key))
	require.Equal(t, `{"amount": 1.50,  "currency":"EUR"}`, string(sent[0].Value), "byte for byte")
	require.Equal(t, []byte{0xff, 0}, []byte(header(sent[0], "trace")))
	require.True(t, slices.ContainsFunc(sent[0].Headers, func(h source.Header) bool { return h.Key == "none" && h.Value == nil }))
	require.Equal(t, id, header(sent[0], source.HeaderEntry))
	delivery := header(sent[0], source.HeaderDelivery)
	require.Equal(t, "true", b.one(`SELECT (entry_id = $2 AND acknowledged_at IS NOT NULL AND partition IS NOT NULL AND
		"offset" = 0 AND topic = 'in.pay')::text FROM dlq.source_deliveries WHERE id = $1`, delivery, id))

	// The consumer fails again, and its framework sends the record to the dead-letter topic.
	again := sent[0]
	again.Headers = append(slices.Clone(again.Headers[1:]), source.Header{Key: sourcetest.HeaderError, Value: []byte("still declined")})
	broker.Add("dlq.prod.pay", again)
	b.await("dlq_manual: still declined", "SELECT status || ': ' || error_message FROM dlq.dead_letter_queue WHERE id = $1", id)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"), "the same entry")
	status, answer, _ = b.call("POST", "/api/dlq/entries/"+id+"/replay", `{}`)
	require.Less(t, status, 300, answer)
	b.await("dlq_resolved", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	sent = broker.Records("in.pay")
	require.Len(t, sent, 2)
	require.NotEqual(t, delivery, header(sent[1], source.HeaderDelivery))
}
