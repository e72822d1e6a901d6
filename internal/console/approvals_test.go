package console_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/server"
)

// withApprovals makes replays and discards need a second person.
func withApprovals(c *server.Config) {
	withTokens(c)
	c.Policy.Access.Approvals.Rules = []policy.ApprovalRule{{Operations: []string{"discard", "replay"}}}
}

// failManual inserts n failed jobs and waits until their dead letters need a person.
func (o *testServer) failManual(n int) {
	o.Helper()
	o.fail("reports", "report.daily", "no such report", n)
	o.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_open), 'test')")
	o.eventually(n, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
}

// signedIn returns a tab of an operator who is signed in, at a page.
func (o *testServer) signedIn(name, path string) *tab {
	o.Helper()
	b := o.tab()
	b.signIn(o.token(name, access.Operator))
	b.open(path)
	return b
}

const discardReports = `SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {"kind": "report.daily"}}',
	'ticket 7', 'pat')::text`

// TestApprovals_PageIsLive opens a request in two tabs. Both follow the number of entries. When one of the two
// approves, the other can no longer decide, although it has a draft.
func TestApprovals_PageIsLive(t *testing.T) {
	t.Parallel()
	o := open(t, withApprovals)
	o.failManual(5)
	id := o.text(discardReports)
	lee, ann := o.signedIn("lee", "/approvals/"+id), o.signedIn("ann", "/approvals/"+id)
	list := o.signedIn("kim", "/approvals")
	for _, b := range []*tab{lee, ann, list} {
		b.until(live)
	}
	lee.waitForText("same number now")
	ann.fill("input[name=expect]", "5")
	o.exec("SELECT dlq.act_on('resolve', ARRAY(SELECT id FROM dlq.dead_letter_open LIMIT 2), 'kim')")
	for _, b := range []*tab{lee, ann} {
		b.waitForText("now 3: 2 were resolved meanwhile")
		b.until(`document.querySelector("#decide [value=approve]").innerText === "Approve: Discard 3"`)
	}
	require.Equal(t, "5", ann.value(`document.querySelector("input[name=expect]").value`), "a draft stays")
	lee.fill("input[name=expect]", "3")
	lee.follow("#decide [value=approve]")
	ann.until(`!document.querySelector("#decide").checkVisibility()`)
	ann.waitForText("lee approved it")
	list.until(`document.querySelector("#ended").innerText.includes("Discard 5 dead letters")`)
	require.Equal(t, 3, o.count("SELECT frozen FROM dlq.approvals"))
}
