package server_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/source/sourcetest"
)

const statusOfEntry = "SELECT status::text FROM dlq.dead_letter_queue WHERE id = $1"

// returned adds a dead letter to a topic, replays its entry, and waits until the entry is dlq_returned. It returns the
// entry's id.
func returned(b *bundle, broker *sourcetest.Broker, key string) string {
	b.Helper()
	fail(broker, "dlq.prod.pay", key, `{"amount": 1}`, "declined")
	of := `SELECT coalesce(min(id::text), '') FROM dlq.dead_letter_queue WHERE status = 'dlq_manual' AND ordering_key = $1`
	require.Eventually(b, func() bool { return b.one(of, key) != "" }, 3*time.Minute, 20*time.Millisecond)
	id := b.one(of, key)
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	return id
}

// comeBack adds m, a record that dlqd published, to the dead-letter topic again, with these headers and without the
// headers of dlqd.
func comeBack(broker *sourcetest.Broker, m source.Message, headers ...source.Header) {
	m.Headers = append([]source.Header{{Key: sourcetest.HeaderError, Value: []byte("still declined")}}, headers...)
	broker.Add("dlq.prod.pay", m)
}

func TestReturned_IsResolvedOnceItsGroupIsPastIt(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": "    group: payments\n    quiet: 0s\n"})
	id := returned(b, broker, "cus_1")
	other := returned(b, broker, "cus_2")
	require.Equal(t, "0", b.one(`SELECT count(*)::text FROM dlq.dead_letter_queue WHERE status = 'dlq_returned'
		AND (closed_at IS NULL OR stage <> 'returned' OR redelivery_job_id IS NOT NULL)`))
	var partition int32
	var offset int64
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT partition, "offset" FROM dlq.source_deliveries
		WHERE entry_id = $1 AND consumer_group = 'payments'`, id).Scan(&partition, &offset))
	require.Equal(t, "0", b.one(`SELECT dlq.mark_read('main', 'payments', '{in.pay}', ARRAY[$1::integer],
		ARRAY[$2::bigint])::text`, partition, offset), "the group reads this record next")
	require.Equal(t, "0", b.one("SELECT dlq.resolve_returned('orders', '0', '0')::text"))

	broker.Commit("payments", "in.pay", partition, offset+1)
	b.await("dlq_resolved", statusOfEntry, id)
	require.Equal(t, fmt.Sprintf("source: consumer group payments is past in.pay/%d at offset %d", partition, offset),
		b.one(`SELECT actor || ': ' || reason FROM dlq.dead_letter_transitions WHERE entry_id = $1
			AND to_status = 'dlq_resolved'`, id))
	if b.one(`SELECT partition::text FROM dlq.source_deliveries WHERE entry_id = $1`, other) != fmt.Sprint(partition) {
		require.Equal(t, "dlq_returned", b.one(statusOfEntry, other))
	}
}

func TestReturned_WaitsForTheQuietTime(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{"sources": "    group: payments\n"})
	id := returned(b, broker, "cus_1")
	broker.Commit("payments", "in.pay", 0, 1)
	broker.Commit("payments", "in.pay", 1, 1)
	broker.Commit("payments", "in.pay", 2, 1)
	b.await("true", "SELECT (consumed_at IS NOT NULL)::text FROM dlq.source_deliveries WHERE entry_id = $1", id)
	require.Equal(t, "0", b.one("SELECT dlq.resolve_returned('orders', '1 hour', '1 hour')::text"))
	require.Equal(t, "dlq_returned", b.one(statusOfEntry, id))
	b.write("UPDATE dlq.source_deliveries SET consumed_at = consumed_at - interval '2 hours'")
	b.await("dlq_resolved", statusOfEntry, id)
}

// If no consumer group is known, an entry stays returned until returnedFor has passed or an operator moves it.
func TestReturned_WaitsForReturnedForWithoutGroup(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	id := returned(b, broker, "cus_1")
	require.Equal(t, "0", b.one("SELECT count(*)::text FROM dlq.unread_groups()"))
	require.Equal(t, "0", b.one("SELECT dlq.resolve_returned('orders', '0', '0')::text"))
	require.Equal(t, "0", b.one("SELECT dlq.resolve_returned('orders', '0', '1 hour')::text"))
	require.Equal(t, "0", b.one("SELECT dlq.resolve_returned('other', '0', '1 microsecond')::text"))
	require.Equal(t, "1", b.one("SELECT dlq.resolve_returned('orders', '0', '1 microsecond')::text"))
	require.Equal(t, "dlq_resolved", b.one(statusOfEntry, id))
}

func TestReturned_MovesOfAnOperator(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	id := returned(b, broker, "cus_1")
	call := func(method, path, body string, want int) map[string]any {
		status, answer, _ := b.call(method, path, body)
		require.Equal(t, want, status, "%s: %v", path, answer)
		return answer
	}
	entries := func(q string) int {
		list, ok := call("GET", "/api/dlq/entries?"+q, "", 200)["entries"].([]any)
		require.True(t, ok)
		return len(list)
	}
	require.Equal(t, 1, entries("status=dlq_returned"))
	require.Equal(t, 1, entries("q=status:returned"))
	require.Equal(t, 1, entries("q=status:closed"))
	require.Equal(t, 1, entries("queue=orders"))
	require.Equal(t, 0, entries("q=status:open"))
	call("GET", "/dead-letters/"+id, "", 200)
	call("GET", "/dead-letters?q=status:returned", "", 200)
	refused := call("POST", "/api/dlq/entries/"+id+"/park", `{}`, 409)
	require.Contains(t, fmt.Sprint(refused), "dlq_returned")
	_, err := b.pool.Exec(t.Context(), "DELETE FROM dlq.dead_letter_queue WHERE id = $1", id)
	require.ErrorContains(t, err, "only resolved and archived entries can be deleted")

	// A bulk replay does not publish the record twice.
	call("POST", "/api/dlq/replay", `{"filter": {"queue": ["orders"]}}`, 202)
	require.Len(t, broker.Records("in.pay"), 1)

	// An operator publishes the record again.
	b.sendBack(id)
	b.await("2", "SELECT count(*)::text FROM dlq.source_deliveries WHERE acknowledged_at IS NOT NULL")
	b.await("dlq_returned", statusOfEntry, id)
	require.Len(t, broker.Records("in.pay"), 2)

	move := func(verb, want string) {
		call("POST", "/api/dlq/entries/"+id+"/"+verb, `{"note": "seen"}`, 200)
		require.Equal(t, want, b.one(statusOfEntry, id), verb)
	}
	move("resolve", "dlq_resolved")
	move("reopen", "dlq_manual")
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	move("discard", "dlq_archived")
	require.Equal(t, "0", b.one(`SELECT count(*)::text FROM dlq.dead_letter_transitions
		WHERE reason IS NULL AND entry_id = $1 AND from_status IS NOT NULL`, id))
}

func TestReturned_ComesBackWithoutHeaders(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	count := "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE stage <> 'inbox'"
	history := `SELECT jsonb_array_length(retry_history)::text FROM dlq.dead_letter_queue WHERE id = $1`

	// The place at which dlqd published the record identifies the entry.
	id := returned(b, broker, "cus_1")
	m := broker.Records("in.pay")[0]
	place := b.one(`SELECT partition || '/' || "offset" FROM dlq.source_deliveries WHERE entry_id = $1`, id)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")},
		source.Header{Key: sourcetest.HeaderPlace, Value: []byte(place)})
	b.await("2", history, id)
	b.await("dlq_manual", statusOfEntry, id)
	require.Equal(t, "1", b.one(count), "the same entry")

	// Without the place, the key, value and topic of a record identify the entry. A second record with the same key,
	// value and topic becomes another entry.
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")})
	b.await("3", history, id)
	b.await("dlq_manual", statusOfEntry, id)
	require.Equal(t, "1", b.one(count), "the same entry")
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")})
	b.await("2", count)

	// A record with another place, or with another topic, becomes another entry.
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")},
		source.Header{Key: sourcetest.HeaderPlace, Value: []byte("0/4711")})
	b.await("3", count)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("elsewhere")})
	b.await("4", count)
	require.Equal(t, "3", b.one(history, id))

	// A record that comes back reopens its closed entry. After a purge, it becomes a new entry.
	b.write("SELECT dlq.resolve($1, 'kim')", id)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")})
	b.await("dlq_manual came-back",
		"SELECT status || ' ' || coalesce(rule, '') FROM dlq.dead_letter_queue WHERE id = $1", id)
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	b.write("SELECT dlq.discard($1)", id)
	b.write("SELECT dlq.delete_entries(ARRAY[$1::uuid])", id)
	comeBack(broker, m, source.Header{Key: sourcetest.HeaderTopic, Value: []byte("in.pay")})
	b.await("4", count)
}

// A dead letter may have the time of the record's first failure. It still comes back to its entry.
func TestReturned_FailsAgainWithAnOldTime(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{})
	id := returned(b, broker, "cus_1")
	m := broker.Records("in.pay")[0]
	m.Headers = append(m.Headers, source.Header{Key: sourcetest.HeaderError, Value: []byte("still declined")})
	m.Time = time.Now().Add(-time.Hour)
	broker.Add("dlq.prod.pay", m)
	again := "SELECT status || ': ' || error_message FROM dlq.dead_letter_queue WHERE id = $1"
	b.await("dlq_manual: still declined", again, id)

	// The record was published twice, and comes back to the open entry.
	m.Headers[len(m.Headers)-1].Value = []byte("declined for good")
	broker.Add("dlq.prod.pay", m)
	b.await("dlq_manual: declined for good", again, id)

	// The redeliveries of the entry are used up.
	b.sendBack(id)
	b.await("dlq_returned", statusOfEntry, id)
	b.write("UPDATE dlq.dead_letter_queue SET dlq_max_retries = dlq_retry_count WHERE id = $1", id)
	m.Headers[len(m.Headers)-1].Value = []byte("declined at last")
	broker.Add("dlq.prod.pay", m)
	b.await("dlq_failed: declined at last", again, id)
	m.Headers[len(m.Headers)-1].Value = []byte("declined after that")
	broker.Add("dlq.prod.pay", m)
	b.await("dlq_failed: declined after that", again, id)
	require.Equal(t, "5 5", b.one(`SELECT jsonb_array_length(retry_history) || ' ' || (SELECT count(DISTINCT t.failed_at)
		FROM dlq.dead_letter_transitions t WHERE t.entry_id = e.id) FROM dlq.dead_letter_queue e WHERE id = $1`, id))
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"))
}

const toOriginal = `
  pays: {cluster: main, topics: [pay.dlt], group: payments}
`

// A record that is published to its own topic reaches every consumer group that reads the topic. So dlqd refuses the
// replay if other groups than the failed one read it, or if the groups are not known, unless the operator confirms it.
func TestReaders_OfOtherGroupsAreRefused(t *testing.T) {
	t.Parallel()
	b, broker := setupSources(t, policytest.Files{
		"sources": toOriginal, "retry-policies": "data: {sensitivePatterns: [tokens]}\n",
	})
	m := source.Message{Key: []byte("cus_1"), Value: []byte(`{"amount": 1}`), Headers: []source.Header{
		{Key: sourcetest.HeaderError, Value: []byte("declined")}, {Key: sourcetest.HeaderTopic, Value: []byte("pay")},
	}}
	broker.Add("pay.dlt", m)
	b.await("dlq_manual", "SELECT coalesce(min(status::text), '') FROM dlq.dead_letter_queue")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	preview := func() string {
		status, answer, _ := b.call("POST", "/api/dlq/replay", `{"filter": {"queue": ["pays"]}, "dryRun": true}`)
		require.Equal(t, 200, status, answer)
		shown, ok := answer["preview"].(map[string]any)
		require.True(t, ok, answer)
		return fmt.Sprint(shown["readers"])
	}
	refused := func(why string) {
		for path, body := range map[string]string{
			"/api/dlq/entries/" + id + "/replay": `{}`, "/api/dlq/replay": `{"filter": {"queue": ["pays"]}, "force": true}`,
		} {
			status, answer, _ := b.call("POST", path, body)
			require.Equal(t, 409, status, answer)
			require.Contains(t, fmt.Sprint(answer), why)
		}
		require.Empty(t, broker.Records("pay"))
	}
	require.NotContains(t, preview(), "refusal")
	broker.Commit("payments", "pay", 0, 1)
	require.NotContains(t, preview(), "refusal", "only the group that failed reads it")
	broker.Commit("audit", "pay", 0, 1)
	require.Contains(t, preview(), "at least these consumer groups read it: audit, payments; payments failed")
	refused("audit, payments")

	broker.Fail(errors.New("dial tcp: refused: " + secrets[5]))
	require.Contains(t, preview(), "its consumer groups are not known (dial tcp: refused: ***)")
	require.NotContains(t, preview(), secrets[5])
	refused("not known")

	status, answer, _ := b.call("GET", "/dead-letters/"+id, "")
	require.Equal(t, 200, status)
	require.Contains(t, answer["text"], `name="otherGroups"`)
	status, answer, _ = b.call("POST", "/api/dlq/replay", `{"filter": {"queue": ["pays"]}, "otherGroups": true}`)
	require.Equal(t, 202, status, answer)
	b.await("dlq_returned", statusOfEntry, id)
	require.Len(t, broker.Records("pay"), 1)
}
