package server_test

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
)

// TestMoves_RefusalSaysWhoDecided checks that a refused move names the earlier one: in the API with
// its time, on a page with how long ago it was.
func TestMoves_RefusalSaysWhoDecided(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t)
	b.fail("payments", 1)
	id := b.text("SELECT id::text FROM dlq.dead_letter_queue")
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	status, out := b.as(lee, "POST", "/api/dlq/entries/"+id+"/resolve", `{"note": "ticket <4711>"}`)
	require.Equal(t, http.StatusOK, status, out)
	at := b.text(`SELECT to_char(max(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
		FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_resolved'`)

	status, out = b.as(kim, "POST", "/api/dlq/entries/"+id+"/discard", "")
	require.Equal(t, http.StatusConflict, status, out)
	var problem api.Problem
	require.NoError(t, json.Unmarshal([]byte(out), &problem))
	require.Equal(t, "Conflict", problem.Title)
	require.Equal(t, "dead letter "+id+": cannot discard from dlq_resolved (allowed: dlq_pending, dlq_manual, "+
		"dlq_failed). lee resolved it at "+at+`: "ticket <4711>". Allowed from dlq_resolved: reopen.`, problem.Detail)

	_, told, to := b.send(kim, "/dead-letters/"+id+"/act", url.Values{
		"do": {"discard"}, "from": {"/dead-letters/" + id},
	})
	require.Equal(t, problem.Detail, told)
	flash, err := json.Marshal(map[string]any{"t": told, "b": true})
	require.NoError(t, err)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.base+to, nil)
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+kim)
	request.AddCookie(&http.Cookie{Name: "dlqd-flash", Value: base64.RawURLEncoding.EncodeToString(flash)})
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	has(t, string(page), `lee resolved it <time datetime="`+at+`"`)
	has(t, string(page), `</time>: &#34;ticket &lt;4711&gt;&#34;. Allowed from dlq_resolved: reopen.`)
}
