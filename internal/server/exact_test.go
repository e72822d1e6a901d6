package server_test

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/server"
)

// bodies is a receiver that records the body of each request. It refuses all requests until takes is set.
type bodies struct {
	mu    sync.Mutex
	got   []string
	takes bool
}

func (r *bodies) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	raw, _ := io.ReadAll(request.Body)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = append(r.got, string(raw))
	if !r.takes {
		w.WriteHeader(http.StatusUnprocessableEntity)
	}
}

func (r *bodies) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got
}

func (r *bodies) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.takes = true
}

// asWritten is JSON that the database would write differently.
const asWritten = "{ \"zeta\" : 1.0,\n\t\"n\":[1e3 ,-0.0,1E+2, 9007199254740993],\"alpha\":\"\\u00e9\\/<&>\u2028\",  " +
	"\"b\":{ }, \"customer\": \"cus_81\" }"

func setupExact(t *testing.T, payload string) (*bundle, *bodies) {
	t.Helper()
	receiver := &bodies{}
	return setup(t, options{
		receiver: receiver.ServeHTTP, config: func(c *server.Config) { c.Policy.Queues["default"].Payload = payload },
	}), receiver
}

func (b *bundle) submitPayload(id, payload string) (status int, out map[string]any) {
	b.Helper()
	status, out, _ = b.call("POST", "/api/messages",
		fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "order.placed", "payload": %s}`, id, payload))
	return status, out
}

func (b *bundle) parked(id string) string {
	b.Helper()
	entry := b.awaitMessage(id, "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(entry, "dlq_manual")
	return entry
}

func TestExact_DeliversPayloadsByteForByte(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadExact)
	status, out := b.submitPayload("m1", asWritten)
	require.Equal(t, http.StatusAccepted, status, out)
	entry := b.parked("m1")
	require.Equal(t, []string{asWritten}, receiver.all())

	status, out = b.submitPayload("m1",
		`{"customer": "cus_81", "b": {}, "alpha": "é/<&>\u2028", "n": [1000, 0.0, 100, 9007199254740993], "zeta": 1.0}`)
	require.Equal(t, http.StatusOK, status, "the same content, written differently: %v", out)
	status, out = b.submitPayload("m1", `{"customer": "cus_82"}`)
	require.Equal(t, http.StatusConflict, status, out)

	// Filters read the parsed copy.
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.find('{"payload": {"customer": "cus_81", "n": [1000]}}')`))

	receiver.take()
	status, out, _ = b.call("POST", "/api/dlq/entries/"+entry+"/replay", `{}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitEntry(entry, "dlq_resolved")
	require.Equal(t, []string{asWritten, asWritten}, receiver.all())
}

func TestExact_DeliversBatchesByteForByte(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadExact)
	receiver.take()
	status, out, _ := b.call("POST", "/api/messages/batch",
		fmt.Sprintf(`{"messages": [{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload":   %s  }]}`,
			asWritten))
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitMessage("m1", "completed")
	require.Equal(t, []string{asWritten}, receiver.all())
}

// dlqd delivers a payload that an operator edits exactly as typed. With a merge patch, the text of the values that the
// patch does not name stays the same. With a JSON patch, only the numbers among these values keep their text.
func TestExact_DeliversEditsAsTyped(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadExact)
	const payload = `{"z": 1.0,  "a": [1e3], "customer": "cus_81"}`
	status, out := b.submitPayload("m1", payload)
	require.Equal(t, http.StatusAccepted, status, out)
	entry := b.parked("m1")

	const typed = `{"z" : 2.0, "a":[ 1E3 ]}`
	status, out, _ = b.call("POST", "/api/dlq/entries/"+entry+"/replay", `{"payload":   `+typed+` }`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool { return len(receiver.all()) == 2 }, 5*time.Minute, 50*time.Millisecond)
	b.awaitEntry(entry, "dlq_manual")
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open
		WHERE edited_event -> 'payload' = '{"z": 2.0, "a": [1000]}' AND original_event -> 'payload' @> '{"z": 1.0}'`))

	status, out, _ = b.call("POST", "/api/dlq/replay",
		fmt.Sprintf(`{"filter": {"ids": [%q]}, "mergePatch": {"b": 3}}`, entry))
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool { return len(receiver.all()) == 3 }, 5*time.Minute, 50*time.Millisecond)
	b.awaitEntry(entry, "dlq_manual")

	receiver.take()
	status, out, _ = b.call("POST", "/api/dlq/replay",
		fmt.Sprintf(`{"filter": {"ids": [%q]}, "patch": [{"op": "remove", "path": "/b"}]}`, entry))
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitEntry(entry, "dlq_resolved")
	require.Equal(t, []string{payload, typed, `{"z":2.0,"a":[ 1E3 ],"b":3}`, `{"z":2.0,"a":[1E3]}`}, receiver.all())
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue
		WHERE edited_event -> 'payload' = '{"z": 2.0, "a": [1000]}'`), "the parsed copy has the same edit")
}

func TestExact_DeliversEditsInTheConsoleAsTyped(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadExact)
	status, out := b.submitPayload("m1", `{"z":1.0}`)
	require.Equal(t, http.StatusAccepted, status, out)
	entry := b.parked("m1")
	receiver.take()
	const typed = "{\"z\" : 2.0,\n \"a\":[ 1E3 ], \"b\": \"<&>\"}"
	sent := strings.ReplaceAll(typed, "\n", "\r\n") // as browsers send a line break of a form
	console := &scopeBundle{bundle: b}
	status, told, _ := console.send("", "/dead-letters/"+entry+"/edit",
		url.Values{"payload": {sent}, "seen": {sent}, "confirmed": {"yes"}})
	require.Equal(t, http.StatusSeeOther, status, told)
	b.awaitEntry(entry, "dlq_resolved")
	require.Equal(t, []string{`{"z":1.0}`, typed}, receiver.all())
}

func TestExact_OffByDefault(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadParsed)
	receiver.take()
	status, out := b.submitPayload("m1", `{"z" : 1e3}`)
	require.Equal(t, http.StatusAccepted, status, out)
	b.awaitMessage("m1", "completed")
	require.Equal(t, []string{`{"z": 1000}`}, receiver.all())
	require.Zero(t, b.count("SELECT count(*) FROM river_job WHERE args ? 'payloadText'"))
	for _, body := range []string{`"payloadText": "x"`, `"payloadText": null`} {
		status, out, _ = b.call("POST", "/api/messages",
			`{"queue": "default", "kind": "order.placed", "payload": 1, `+body+`}`)
		require.Equal(t, http.StatusBadRequest, status, out)
		require.Contains(t, fmt.Sprint(out), "payloadText")
	}
}

func TestExact_DeliversEditsInSQLAsTyped(t *testing.T) {
	t.Parallel()
	b, receiver := setupExact(t, policy.PayloadExact)
	status, out := b.submitPayload("m1", `{"z":1.0}`)
	require.Equal(t, http.StatusAccepted, status, out)
	entry := b.parked("m1")
	replay := func(edit string) error {
		_, err := b.pool.Exec(t.Context(), "SELECT dlq.replay(id, 'kim', "+edit+") FROM dlq.dead_letter_open WHERE id = $1",
			entry)
		return err
	}
	require.ErrorContains(t, replay(`p_payload => '1', p_payload_text => '1'`), "exclude each other")
	require.ErrorContains(t, replay(`p_payload_text => '{'`), "invalid input syntax for type json")
	require.NoError(t, replay(`p_payload => original_event -> 'payload' || '{"b":2}'`))
	require.Eventually(t, func() bool { return len(receiver.all()) == 2 }, 5*time.Minute, 50*time.Millisecond)
	b.awaitEntry(entry, "dlq_manual")
	receiver.take()
	require.NoError(t, replay(`p_payload_text => '{"b" :3}'`))
	b.awaitEntry(entry, "dlq_resolved")
	require.Equal(t, []string{`{"z":1.0}`, `{"b": 2, "z": 1.0}`, `{"b" :3}`}, receiver.all())
}
