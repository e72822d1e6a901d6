package server_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Accounts 9007199254740993 and 9007199254740992 belong to different customers. As a float64, both are the same number.
func TestNumbers_AreExactFromEndToEnd(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	delivered := map[string]string{}
	b := setup(t, options{receiver: func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		delivered[r.Header.Get("Webhook-Id")] = string(body)
		if !strings.Contains(string(body), "mended") {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}})
	const n = 10
	account := func(i int) int64 { return 9007199254740990 + int64(i) }
	for i := range n {
		status, out, _ := b.call("POST", "/api/messages",
			fmt.Sprintf(`{"messageId": "m%d", "queue": "default", "kind": "k", "payload": {"acct": %d, "sum": 0.12345678901234567890123}}`, i, account(i)))
		require.Equal(t, http.StatusAccepted, status, out)
	}
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == n
	}, 5*time.Minute, 50*time.Millisecond)
	ask := func(path, body string) map[string]any {
		status, out, _ := b.call("POST", path, body)
		require.Less(t, status, 300, "%s %s: %v", path, body, out)
		return out
	}
	filterFor := func(i int) string { return fmt.Sprintf(`{"payload": {"acct": %d}}`, account(i)) }
	statusOf := func(i int) string {
		return b.text(fmt.Sprintf("SELECT status FROM dlq.dead_letter_queue WHERE event_id = 'm%d'", i))
	}

	require.EqualValues(t, 1, ask("/api/dlq/bulk", `{"do": "discard", "filter": `+filterFor(3)+`}`)["changed"])
	require.Equal(t, "dlq_archived", statusOf(3))
	require.Equal(t, "dlq_manual", statusOf(2))

	require.EqualValues(t, 1, ask("/api/dlq/erasures", `{"note": "request 42", "filter": `+filterFor(5)+`}`)["entries"])
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event = '{"erased": true}'
		AND event_id IS NULL`))
	require.Contains(t, b.text("SELECT original_event FROM dlq.dead_letter_queue WHERE event_id = 'm4'"),
		"9007199254740994")

	_, out, _ := b.call("POST", "/api/dlq/export", `{"filter": `+filterFor(7)+`}`)
	require.Equal(t, 1, strings.Count(fmt.Sprint(out["text"]), "9007199254740997"), out)

	for i, edit := range map[int]string{
		6: `"mergePatch": {"mended": 1234567890123456788}`,
		8: `"patch": [{"op": "add", "path": "/mended", "value": 1234567890123456788}]`,
	} {
		preview := ask("/api/dlq/replay", `{"dryRun": true, "filter": `+filterFor(i)+`, `+edit+
			`}`)["preview"].(map[string]any)
		require.EqualValues(t, 1, preview["total"])
		ask("/api/dlq/replay", `{"filter": `+filterFor(i)+`, `+edit+`}`)
	}
	id := b.text("SELECT id FROM dlq.dead_letter_queue WHERE event_id = 'm9'")
	ask("/api/dlq/entries/"+id+"/replay",
		`{"payload": {"acct": 9007199254740999, "sum": 0.12345678901234567890123, "mended": 1234567890123456788}}`)
	for _, i := range []int{6, 8, 9} {
		b.awaitMessage(fmt.Sprintf("m%d", i), "completed")
		mu.Lock()
		require.JSONEq(t, `{"acct": "`+fmt.Sprint(account(i))+
			`", "sum": "0.12345678901234567890123", "mended": "1234567890123456788"}`,
			quoteNumbers(delivered[fmt.Sprintf("m%d", i)]))
		mu.Unlock()
	}
}

// quoteNumbers puts the numbers of a JSON text in quotes, so that a comparison of two texts compares the digits.
func quoteNumbers(body string) string {
	var out strings.Builder
	inside := false
	for _, r := range body {
		number := r >= '0' && r <= '9' || r == '.' || r == '-'
		if number != inside {
			out.WriteByte('"')
			inside = number
		}
		out.WriteRune(r)
	}
	return out.String()
}

// text returns the only value of a query, as text.
func (b *bundle) text(sql string) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT ("+sql+")::text").Scan(&text), sql)
	return text
}
