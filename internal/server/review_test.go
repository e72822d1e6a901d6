package server_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
)

// TestMoves_RefusalSaysWhoDecided checks that the refusal of a move names the earlier move: in the API with its time,
// on a page with how long ago it was.
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
		"dlq_failed, dlq_returned). lee resolved it at "+at+
		`: "ticket <4711>". Allowed from dlq_resolved: reopen.`, problem.Detail)

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

// decision matches the form of the review's page. It finds the id of the entry, and the address of the page after the
// decision.
var decision = regexp.MustCompile(
	`action="/dead-letters/([0-9a-f-]{36})/act#actions"[^>]*>\s*<input[^>]*>\s*` +
		`<input type="hidden" name="next" value="([^"]*)">`)

// reviewed opens the review. It returns the id of the entry on the page ("" for none), the address of the page after
// the decision, and the page.
func (b *scopeBundle) reviewed(token, path string) (id, next, page string) {
	b.Helper()
	status, page := b.browse(token, path)
	require.Equal(b, http.StatusOK, status, path)
	if found := decision.FindStringSubmatch(page); found != nil {
		return found[1], html.UnescapeString(found[2]), page
	}
	return "", "", page
}

// handedOut asks for an entry to review, and returns the entry's id, or "" if there is none.
func (b *scopeBundle) handedOut(token, body string) string {
	b.Helper()
	status, out := b.as(token, "POST", "/api/dlq/review", body)
	require.Equal(b, http.StatusOK, status, out)
	var answer api.HandedOut
	require.NoError(b, json.Unmarshal([]byte(out), &answer))
	if answer.ID == nil {
		return ""
	}
	return answer.ID.String()
}

// In TestReview_SharesTheEntries four operators decide about 40 entries, two of them through the console. No decision
// is refused because an entry was handed out twice.
func TestReview_SharesTheEntries(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t)
	b.fail("payments", 40)
	var operators sync.WaitGroup
	var mu sync.Mutex
	var refused []string
	left := func() int { return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") }
	decide := func(name string, one func(token string) (decided bool, problem string)) {
		token := b.named(name, access.Operator, "root")
		operators.Go(func() {
			for {
				decided, problem := one(token)
				if problem != "" {
					mu.Lock()
					refused = append(refused, name+": "+problem)
					mu.Unlock()
				}
				if decided {
					continue
				}
				if left() == 0 {
					return
				}
				time.Sleep(10 * time.Millisecond) // others decide about the last ones
			}
		})
	}
	for _, name := range []string{"ann", "kim"} {
		decide(name, func(token string) (bool, string) {
			id := b.handedOut(token, "")
			if id == "" {
				return false, ""
			}
			if status, out := b.as(token, "POST", "/api/dlq/entries/"+id+"/resolve", ""); status != http.StatusOK {
				return true, out
			}
			return true, ""
		})
	}
	for _, name := range []string{"lee", "pat"} {
		path := "/review"
		decide(name, func(token string) (bool, string) {
			id, next, _ := b.reviewed(token, path)
			if id == "" {
				return false, ""
			}
			status, told, to := b.send(token, "/dead-letters/"+id+"/act", url.Values{
				"do": {"discard"}, "from": {path}, "next": {next},
			})
			if status != http.StatusSeeOther || !strings.HasSuffix(told, ": Discarded.") {
				return true, told
			}
			path = to
			return true, ""
		})
	}
	operators.Wait()
	require.Empty(t, refused)
	require.Equal(t, 40,
		b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status IN ('dlq_resolved', 'dlq_archived')"))
}

// TestReview_ShowsWhoLooks checks that two operators get different entries, and that pages and the API show who has an
// entry in review. A review does not hinder other operators. A reader cannot review entries.
func TestReview_ShowsWhoLooks(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t)
	b.fail("payments", 3)
	first := b.text("SELECT min(id::text) FROM dlq.dead_letter_open")
	last := b.text("SELECT max(id::text) FROM dlq.dead_letter_open")
	kim, lee, pat := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root"),
		b.named("pat", access.Operator, "root")
	reader := b.named("rita", access.Reader, "root")
	const looks = "lee is looking at this"

	id, _, page := b.reviewed(lee, "/review")
	require.Equal(t, first, id)
	require.NotContains(t, page, looks, "the page shows only other operators")
	id, next, page := b.reviewed(kim, "/review")
	require.NotEqual(t, first, id)
	require.Equal(t, "/review?after="+id, next)
	has(t, page, looks)
	again, _, _ := b.reviewed(kim, "/review")
	require.Equal(t, id, again, "a reload changes nothing")
	for _, token := range []string{kim, reader} {
		_, page = b.browse(token, "/dead-letters/"+first)
		has(t, page, looks)
		_, page = b.browse(token, "/dead-letters?q=status:manual")
		require.Equal(t, 1, strings.Count(page, looks))
	}
	status, out := b.as(reader, "GET", "/api/dlq/entries/"+first, "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, out, `"review":{"actor":"lee","at":"`)
	status, _ = b.as(reader, "POST", "/api/dlq/review", "")
	require.Equal(t, http.StatusForbidden, status)
	opened, _, _ := b.reviewed(reader, "/review")
	require.Equal(t, last, opened, "the first one that no operator looks at")

	// kim opens another entry, so the first entry is no longer in review.
	onward, _, _ := b.reviewed(kim, next)
	require.Equal(t, last, onward)
	require.Equal(t, id, b.handedOut(pat, ""))
	require.Empty(t, b.handedOut(b.named("ann", access.Operator, "root"), ""), "others have all in review")
	none, _, page := b.reviewed(b.named("bea", access.Operator, "root"), "/review")
	require.Empty(t, none)
	has(t, page, "Other operators are looking at them.")
	has(t, page, fmt.Sprintf(`href="/review?at=%s"`, first))

	// An operator who chooses an entry from the list reviews that entry and may act on it.
	chosen, _, page := b.reviewed(kim, "/review?at="+first)
	require.Equal(t, first, chosen)
	has(t, page, looks)
	_, told, _ := b.send(kim, "/dead-letters/"+first+"/act", url.Values{"do": {"park"}, "from": {"/review?at=" + first}})
	require.Contains(t, told, "cannot park from dlq_manual")
	_, told, _ = b.send(kim, "/dead-letters/"+first+"/act", url.Values{"do": {"resolve"}})
	require.Contains(t, told, "Resolved.")
	_, page = b.browse(kim, "/dead-letters/"+first)
	require.NotContains(t, page, looks)
	elsewhere, _, _ := b.reviewed(kim, "/review?at="+first)
	require.Equal(t, last, elsewhere, "the entry was decided, so the next one is handed out")
	require.Empty(t, b.handedOut(lee, `{"entry": "`+first+`"}`))
	require.Empty(t, b.handedOut(lee, `{"q": "queue:mail"}`))
	status, out = b.as(lee, "POST", "/api/dlq/review", `{"q": "status:pending"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
}
