package server_test

import (
	"html"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

var (
	badFlash = regexp.MustCompile(`(?s)<div class="flash bad" role="status">(.*?)</div>`)
	markup   = regexp.MustCompile(`<[^>]*>`)
	listRow  = regexp.MustCompile(`(?s)<tr data-row[^>]*>.*?</tr>`)
	rowLink  = regexp.MustCompile(`href="/dead-letters/([0-9a-f-]{36})"`)
)

// teamTally counts what four operators did.
type teamTally struct {
	mu                         sync.Mutex
	acts, refused, unexplained int
	refusals                   map[string]int
}

func (t *teamTally) add(refusal string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.acts++
	if refusal == "" {
		return
	}
	t.refused++
	if !strings.Contains(refusal, " it ") { // "lee resolved it 12 s ago"
		t.unexplained++
	}
	t.refusals[regexp.MustCompile(`[0-9a-f-]{36}|\d+`).ReplaceAllString(refusal, "#")]++
}

// In TestTeam_FourOperators four operators in browser sessions decide about dead letters as fast as they can, while new
// ones arrive: three use the review, one uses the list. A refusal is an act that dlqd refused, such as one about an
// entry that a colleague has closed. A contradiction is an entry that two operators closed in different ways.
// DLQD_TRIAL is the duration ("10m"; default: until 40 acts).
func TestTeam_FourOperators(t *testing.T) {
	t.Parallel()
	length, enough := 10*time.Minute, 40
	if set, err := time.ParseDuration(os.Getenv("DLQD_TRIAL")); err == nil {
		length, enough = set, 0
	}
	b, _ := setupAdmin(t, func(c *server.Config) { c.DLQWorkers = true })
	tally, end := &teamTally{refusals: map[string]int{}}, time.Now().Add(length)
	over := func() bool {
		tally.mu.Lock()
		defer tally.mu.Unlock()
		return time.Now().After(end) || enough > 0 && tally.acts >= enough || t.Failed()
	}
	more := func() {
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'order.paid',
			jsonb_build_object('n', i), 'payments', 1, 'running' FROM generate_series(1, 100) i`)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb]
			WHERE state = 'running'`)
		b.exec(`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'), 'test')`)
	}
	more()
	var team sync.WaitGroup
	for i, name := range []string{"ann", "kim", "lee", "pat"} {
		secret, err := access.NewStore(b.pool, postgres.DefaultSchemas()).Create(t.Context(),
			&access.Token{Name: name, Role: access.Operator}, "test")
		require.NoError(t, err)
		send := b.visitor()
		status, page := send("POST", "/sign-in", url.Values{"token": {secret}, "to": {"/review"}})
		require.Equal(t, http.StatusOK, status, page)
		work := func(turn int) { page = b.reviewTurn(tally, send, page, name, turn) }
		if i == 3 {
			work = func(turn int) { b.listTurn(tally, send, name, turn) }
		}
		team.Go(func() {
			for turn := 0; !over(); turn++ {
				work(turn)
			}
		})
	}
	team.Go(func() {
		for !over() {
			if b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") < 60 {
				more()
			}
			select {
			case <-t.Context().Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	team.Wait()
	contradictions := b.count(`SELECT count(*) FROM (SELECT t.entry_id FROM dlq.dead_letter_transitions t
		WHERE t.to_status IN ('dlq_resolved', 'dlq_archived') GROUP BY t.entry_id
		HAVING count(DISTINCT t.actor) > 1) twice`)
	t.Logf("%d acts, %d refused (%d without who did what), %d contradictions", tally.acts, tally.refused,
		tally.unexplained, contradictions)
	for refusal, n := range tally.refusals {
		t.Logf("%d × %s", n, refusal)
	}
	require.GreaterOrEqual(t, tally.acts, enough)
	require.Zero(t, contradictions)
	require.Zero(t, tally.unexplained, "a refusal does not say who did what")
}

// act sends an operator's decision about an entry, and returns the page after it.
func (b *bundle) act(tally *teamTally, send func(string, string, url.Values, ...string) (int, string),
	id, name, from, next string, turn int,
) string {
	verb := []string{"resolve", "discard"}[turn%2]
	status, page := send("POST", "/dead-letters/"+id+"/act", url.Values{
		"do": {verb}, "note": {name + " decided"}, "from": {from}, "next": {next},
	})
	refusal := ""
	if found := badFlash.FindStringSubmatch(page); found != nil {
		refusal = strings.Join(strings.Fields(html.UnescapeString(markup.ReplaceAllString(found[1], ""))), " ")
	} else if status != http.StatusOK {
		refusal = http.StatusText(status)
	}
	tally.add(refusal)
	return page
}

// reviewTurn decides about the entry that a page of the review hands out, and returns the next page.
func (b *bundle) reviewTurn(tally *teamTally, send func(string, string, url.Values, ...string) (int, string),
	page, name string, turn int,
) string {
	found := decision.FindStringSubmatch(page)
	if found == nil {
		_, page = send("GET", "/review", nil)
		return page
	}
	return b.act(tally, send, found[1], name, "/review", html.UnescapeString(found[2]), turn)
}

// listTurn opens the list, chooses an entry that no colleague is looking at, opens it, and decides.
func (b *bundle) listTurn(tally *teamTally, send func(string, string, url.Values, ...string) (int, string),
	name string, turn int,
) {
	_, page := send("GET", "/dead-letters?q=status%3Amanual", nil)
	rows := slices.DeleteFunc(listRow.FindAllString(page, -1), func(row string) bool {
		return strings.Contains(row, "is looking at this")
	})
	if len(rows) == 0 {
		return
	}
	id := rowLink.FindStringSubmatch(rows[turn%len(rows)])
	if id == nil {
		return
	}
	path := "/dead-letters/" + id[1]
	_, page = send("GET", path, nil)
	if strings.Contains(page, "is looking at this") || !strings.Contains(page, `action="`+path+`/act#actions"`) {
		return // a colleague began since the list was read
	}
	b.act(tally, send, id[1], name, path, "", turn)
}
