package server_test

import (
	"bytes"
	"fmt"
	"net/url"
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

func (b *bundle) write(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// sendBack replays an entry.
func (b *bundle) sendBack(id string) {
	b.Helper()
	status, answer := b.replay(id, `{}`)
	require.Less(b, status, 300, answer)
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
	place, ok := e["record"].(map[string]any)
	require.True(t, ok, e)
	require.Equal(t, "dlq.prod.pay", place["topic"])
	require.EqualValues(t, 0, place["offset"])

	status, answer, _ := b.call("POST", "/api/dlq/entries/"+id+"/replay", `{"note": "mended"}`)
	require.Less(t, status, 300, answer)
	b.await("dlq_returned", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	sent := broker.Records("in.pay")
	require.Len(t, sent, 1)
	require.Equal(t, "cus_1", string(sent[0].Key))
	require.True(t, bytes.Equal([]byte(`{"amount": 1.50,  "currency":"EUR"}`), sent[0].Value), "byte for byte")
	require.Equal(t, []byte{0xff, 0}, []byte(header(sent[0], "trace")))
	require.Contains(t, sent[0].Headers, source.Header{Key: "none"}, "null is not empty")
	require.Equal(t, id, header(sent[0], source.HeaderEntry))
	delivery := header(sent[0], source.HeaderDelivery)
	require.Equal(t, "true", b.one(`SELECT (entry_id = $2 AND acknowledged_at IS NOT NULL AND partition IS NOT NULL AND
		"offset" = 0 AND topic = 'in.pay')::text FROM dlq.source_deliveries WHERE id = $1`, delivery, id))

	// The consumer fails again, and its framework sends the record to the dead-letter topic.
	again := sent[0]
	again.Headers = append(slices.Clone(again.Headers[1:]), source.Header{
		Key: sourcetest.HeaderError, Value: []byte("still declined"),
	})
	broker.Add("dlq.prod.pay", again)
	b.await("dlq_manual: still declined",
		"SELECT status || ': ' || error_message FROM dlq.dead_letter_queue WHERE id = $1", id)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"), "the same entry")
	status, answer, _ = b.call("POST", "/api/dlq/entries/"+id+"/replay", `{}`)
	require.Less(t, status, 300, answer)
	b.await("dlq_returned", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	sent = broker.Records("in.pay")
	require.Len(t, sent, 2)
	require.NotEqual(t, delivery, header(sent[1], source.HeaderDelivery))
}

func TestReturn_IgnoresForgedDelivery(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": `
  other: {cluster: main, topics: [other.dlt], replayTo: other}
`})
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await("dlq_manual", "SELECT coalesce(min(status::text), '') FROM dlq.dead_letter_queue")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	b.sendBack(id)
	b.await("dlq_returned", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)

	forged := broker.Records("in.pay")[0]
	broker.Add("other.dlt", forged)
	b.await("2", "SELECT count(*)::text FROM dlq.dead_letter_queue")
	require.Equal(t, "dlq_returned", b.one("SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id),
		"a record of another queue does not touch the entry")
	require.Equal(t, "0", b.one("SELECT count(*)::text FROM dlq.job_facts WHERE fact = 'returned'"))

	// After a purge, the record becomes a new entry.
	b.write("SELECT dlq.resolve($1)", id)
	require.Equal(t, "1", b.one("SELECT dlq.delete_entries(ARRAY[$1::uuid])::text", id))
	broker.Add("dlq.prod.pay", forged)
	b.await("1", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE queue = 'orders' AND stage <> 'inbox'")
	require.NotEqual(t, id, b.one("SELECT id::text FROM dlq.dead_letter_queue WHERE queue = 'orders'"))
}

func TestPublish_RepeatsWithTheSameDelivery(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	b.write(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN RAISE EXCEPTION 'the process dies after the publish'; END$$`)
	b.write(`CREATE TRIGGER refuse BEFORE UPDATE OF acknowledged_at ON dlq.source_deliveries
		FOR EACH ROW WHEN (NEW.acknowledged_at IS NOT NULL) EXECUTE FUNCTION refuse()`)
	fail(broker, "dlq.prod.pay", "cus_1", `{"amount": 1}`, "declined")
	b.await("dlq_manual", "SELECT coalesce(min(status::text), '') FROM dlq.dead_letter_queue")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	b.sendBack(id)
	require.Eventually(t, func() bool { return len(broker.Records("in.pay")) == 1 }, 3*time.Minute, 20*time.Millisecond)
	b.await("true", "SELECT (status <> 'dlq_processing')::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	require.Equal(t, "1 0", b.one(`SELECT count(*) || ' ' || count(acknowledged_at) FROM dlq.source_deliveries`),
		"the intent is committed before the record is published")
	require.Equal(t, header(broker.Records("in.pay")[0], source.HeaderDelivery),
		b.one("SELECT id::text FROM dlq.source_deliveries"))
	require.Equal(t, "true", b.one(`SELECT (dlq.begin_delivery(entry_id, queue, job_id, job_created_at, cluster, topic) = id)::text
		FROM dlq.source_deliveries`), "the same job has the same delivery")
}

// Records of one key are published in their order, even if an operator replays a later one first.
func TestPublish_KeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"retry-policies": "queues: {orders: {ordering: true}, default: {}}\n" +
		"destinations: {default: {url: 'http://127.0.0.1:1/'}}\n"})
	for i := range 5 {
		fail(broker, "dlq.prod.pay", "cus_1", `{"n": `+string(rune('1'+i))+`}`, "declined")
	}
	b.await("5", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'")
	var first, last string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT (array_agg(id ORDER BY (record)."offset"))[1]::text,
		(array_agg(id ORDER BY (record)."offset"))[5]::text FROM dlq.dead_letter_queue`).Scan(&first, &last))
	b.sendBack(last)
	b.await("true", `SELECT coalesce(bool_or(metadata @> '{"dlq:held": "order"}'), false)::text FROM river_job`)
	require.Empty(t, broker.Records("in.pay"), "the last one waits for those before it")
	status, answer, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"queue": ["orders"]}}`)
	require.Less(t, status, 300, answer)
	b.await("5", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE status = 'dlq_returned'")
	var sent []string
	for _, m := range broker.Records("in.pay") {
		sent = append(sent, string(m.Value))
	}
	require.Equal(t, []string{`{"n": 1}`, `{"n": 2}`, `{"n": 3}`, `{"n": 4}`, `{"n": 5}`}, sent)
	require.Equal(t, "0", b.one("SELECT count(*)::text FROM dlq.ordered_jobs"))
}

// An entry of a record and one of a job go through the same moves, lists, filters, exports, pages and undo.
func TestSources_BehaveLikeJobs(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	fail(broker, "dlq.prod.pay", "cus_1", `{"customer": "c1"}`, "declined")
	b.write(`INSERT INTO river_job (kind, args, max_attempts, queue) VALUES ('k', '{"customer": "c1"}', 3, 'app')`)
	b.write(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3, errors = ARRAY[
		'{"at": "2026-01-01T00:00:00Z", "attempt": 3, "error": "declined", "trace": ""}'::jsonb]`)
	b.await("2", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE stage = 'open' AND status = 'dlq_manual'")
	for _, queue := range []string{"orders", "app"} {
		id := b.one("SELECT id::text FROM dlq.dead_letter_queue WHERE queue = $1", queue)
		get := func(path string) map[string]any {
			status, answer, _ := b.call("GET", path, "")
			require.Equal(t, 200, status, "%s %s: %v", queue, path, answer)
			return answer
		}
		found := func(filter string) {
			answer := get("/api/dlq/entries?" + filter)
			require.Len(t, answer["entries"], 1, "%s %s", queue, filter)
		}
		found("queue=" + queue)
		found("queue=" + queue + "&status=dlq_manual")
		found("q=" + url.QueryEscape(`queue:`+queue+` payload.customer:c1 declined`))
		for _, format := range []string{"csv", "ndjson"} {
			status, answer, _ := b.call("POST", "/api/dlq/export",
				`{"filter": {"queue": ["`+queue+`"]}, "format": "`+format+`"}`)
			require.Equal(t, 200, status, answer)
			require.Contains(t, answer["text"], id)
			if queue == "orders" {
				place := map[string]string{
					"csv": ",dlq.prod.pay,%s,%s,", "ndjson": `"topic":"dlq.prod.pay","partition":%s,"offset":%s,`,
				}
				require.Contains(t, answer["text"], fmt.Sprintf(place[format],
					b.one("SELECT (record).partition::text FROM dlq.dead_letter_queue WHERE id = $1", id),
					b.one(`SELECT (record)."offset"::text FROM dlq.dead_letter_queue WHERE id = $1`, id)))
			}
		}
		page, _, _ := b.call("GET", "/dead-letters/"+id, "")
		require.Equal(t, 200, page)
		listed := get("/api/dlq/entries?queue=" + queue)["entries"].([]any)[0].(map[string]any)
		status, list, _ := b.call("GET", "/dead-letters?q="+url.QueryEscape("queue:"+queue), "")
		require.Equal(t, 200, status)
		if queue == "orders" {
			require.Equal(t, get("/api/dlq/entries/" + id)["record"], listed["record"])
			require.Contains(t, list["text"], ">Topic/partition · offset · node</th>")
			require.Regexp(t, `<td>dlq\.prod\.pay/\d <span class="faint"> · 0</span></td>`, list["text"])
		} else {
			require.NotContains(t, listed, "record")
			require.NotContains(t, list["text"], "Topic/partition")
		}
		move := func(verb, body, want string) {
			status, answer, _ := b.call("POST", "/api/dlq/entries/"+id+"/"+verb, body)
			require.Less(t, status, 300, "%s %s: %v", queue, verb, answer)
			require.Equal(t, want, b.one("SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id), verb)
		}
		move("resolve", `{"note": "by hand"}`, "dlq_resolved")
		move("reopen", `{"note": "not done"}`, "dlq_manual")
		move("discard", `{"note": "not wanted"}`, "dlq_archived")
		status, answer, _ := b.call("POST", "/api/dlq/undo/"+b.one(`SELECT operation::text FROM dlq.dead_letter_transitions
			WHERE entry_id = $1 AND reason = 'discarded'`, id), `{}`)
		require.Less(t, status, 300, answer)
		require.Equal(t, "dlq_manual", b.one("SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id), "undo")
		require.Equal(t, "0", b.one("SELECT count(*)::text FROM dlq.dead_letter_transitions WHERE entry_id = $1 AND reason IS NULL", id))

		// Archive and restore.
		move("discard", `{"note": "not wanted"}`, "dlq_archived")
		before := b.one("SELECT to_jsonb(e)::text FROM dlq.dead_letter_queue e WHERE id = $1", id)
		require.Equal(t, "1", b.one("SELECT dlq.delete_entries(ARRAY[$1::uuid])::text", id))
		b.write("SELECT dlq.restore_entries(jsonb_build_array($1::jsonb), now() + interval '1 day')", before)
		require.JSONEq(t, before, b.one("SELECT to_jsonb(e)::text FROM dlq.dead_letter_queue e WHERE id = $1", id))

		// Erasure.
		status, answer, _ = b.call("POST", "/api/dlq/erasures", `{"filter": {"ids": ["`+id+`"]}, "note": "request 7"}`)
		require.Less(t, status, 300, answer)
		b.await(`{"erased": true}`, "SELECT original_event::text FROM dlq.dead_letter_queue WHERE id = $1", id)
		require.Equal(t, "true", b.one(`SELECT ((record).value IS NULL AND (record).key IS NULL
			AND (record).header_values IS NULL)::text FROM dlq.dead_letter_queue WHERE id = $1`, id))
	}
}

func TestSources_AreOffForAutomaticRedelivery(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	m := source.Message{Key: []byte("k"), Value: []byte("1"), Headers: []source.Header{
		{Key: "error-transient", Value: []byte("x")},
	}}
	broker.Add("dlq.prod.pay", m)
	b.await("1", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE stage = 'open' AND strategy IS NOT NULL")
	require.Equal(t, "false", b.one("SELECT dlq.automatic_for('orders', 'dlq.prod.pay', 'transient', 'dlqd_message')::text"))
	require.Eventually(t, func() bool {
		_, answer, _ := b.call("GET", "/api/sources", "")
		partitions, _ := answer["partitions"].([]any)
		return len(partitions) == sourcetest.Partitions
	}, 3*time.Minute, 100*time.Millisecond)
}

// A share group that copies no records leaves only a reference to the record. If the record was not fetched when dlqd
// read the reference, it is fetched and published when the entry is redelivered. If it is gone, dlqd refuses, because
// it would publish null.
func TestPublish_FetchesTheRecordOfAReference(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": "    envelope: share\n"})
	at := broker.Add("pay", source.Message{
		Key: []byte("cus_1"), Value: []byte(`{"n": 1}`), Headers: []source.Header{{Key: "trace", Value: []byte("00-1")}},
	})
	dead := func(place string) (id string) {
		broker.Add("dlq.prod.pay", source.Message{
			Time: time.Now(), Headers: []source.Header{
				{Key: sourcetest.HeaderError, Value: []byte(place)},
				{Key: sourcetest.HeaderTopic, Value: []byte("pay")},
				{Key: sourcetest.HeaderPlace, Value: []byte(place)},
			},
		})
		of := "SELECT coalesce(min(id::text), '') FROM dlq.dead_letter_queue WHERE status = 'dlq_manual' AND error_message = $1"
		require.Eventually(t, func() bool { return b.one(of, place) != "" }, 3*time.Minute, 20*time.Millisecond)
		return b.one(of, place)
	}
	id := dead(fmt.Sprintf("%d/%d", at.Partition, at.Offset))
	b.sendBack(id)
	b.await("dlq_returned", "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1", id)
	sent := broker.Records("in.pay")
	require.Len(t, sent, 1)
	require.Equal(t, []string{"cus_1", `{"n": 1}`, "00-1", id}, []string{
		string(sent[0].Key), string(sent[0].Value), header(sent[0], "trace"), header(sent[0], source.HeaderEntry),
	})
	for place, reason := range map[string]string{
		fmt.Sprintf("%d/7", at.Partition): "the record is gone: there is no such record: edit the payload",
		"unknown":                         "the record is gone: the dead letter does not name its place in the topic pay: edit",
	} {
		id := dead(place)
		b.sendBack(id)
		b.await("true", `SELECT (status = 'dlq_manual' AND error_message LIKE '%copies no records%' || $2 || '%')::text
			FROM dlq.dead_letter_queue WHERE id = $1`, id, reason)
	}
	require.Len(t, broker.Records("in.pay"), 1)
}
