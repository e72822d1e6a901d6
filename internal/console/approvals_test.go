package console_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/server"
)

// withApprovals makes replays and discards require approval.
func withApprovals(c *server.Config) {
	withTokens(c)
	c.Policy.Access.Approvals.Rules = []policy.ApprovalRule{{Operations: []string{"discard", "replay"}}}
}

// failManual inserts n failed jobs and waits until their dead letters need an operator.
func (o *testServer) failManual(n int) {
	o.Helper()
	o.fail("reports", "report.daily", "no such report", n)
	o.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_open), 'test')")
	o.eventually(n, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
}

// signedIn returns a tab, open at a page, of an operator who is signed in.
func (o *testServer) signedIn(name, path string) *tab {
	o.Helper()
	b := o.tab()
	b.signIn(o.token(name, access.Operator))
	b.open(path)
	return b
}

// TestApprovals_AreShownWhereTheyApply checks that an entry, the list and the group show who requested which action,
// and that another operator who requests the same action gets to the first request.
func TestApprovals_AreShownWhereTheyApply(t *testing.T) {
	t.Parallel()
	o := open(t, withApprovals)
	o.failManual(1)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_open")
	pat, list := o.signedIn("pat", "/dead-letters/"+id), o.signedIn("lee", "/dead-letters")
	list.until(live)
	pat.follow("#act [value=discard]")
	pat.waitForText("dlqd made a request for approval")
	list.until(`document.querySelector("#asked-for").innerText.includes("Discard asked for by pat")`)
	list.until(`document.querySelector("#rows").innerText.includes("Discard asked for")`)
	for _, path := range []string{group, "/dead-letters/" + id, "/review"} {
		list.open(path)
		list.waitForText("Discard asked for by pat")
	}
	list.follow("#act [value=discard]")
	list.waitForText("pat asked for the same")
	require.Equal(t, "/approvals/"+o.text("SELECT id::text FROM dlq.approvals"), list.value("location.pathname"))
	require.Equal(t, 1, o.count("SELECT count(*) FROM dlq.approvals"))
}

// TestApprovals_TellWhomTheyConcern creates a request for approval outside of the server, as another process would. An
// operator who may approve the request sees it on any page, in the title and in the icon of the tab; the requester does
// not. Any page shows the requester the outcome, until the requester has opened the request.
func TestApprovals_TellWhomTheyConcern(t *testing.T) {
	t.Parallel()
	o := open(t, withApprovals)
	o.failManual(3)
	pat, lee := o.signedIn("pat", "/dead-letters"), o.signedIn("lee", "/queues")
	for _, b := range []*tab{pat, lee} {
		b.until(live)
	}
	const of = `document.getElementById("waits-approvals").textContent === "%s" && document.title.startsWith("(") === %t` +
		` && document.querySelector("link[rel=icon]").href.endsWith("/%s")`
	waiting, quiet := fmt.Sprintf(of, "1", true, "icon-waiting.svg"), fmt.Sprintf(of, "", false, "icon.svg")
	lee.until(quiet)
	id := o.text(discardReports)
	lee.until(waiting)
	lee.open("/policy")
	lee.until(waiting)
	pat.until(`document.querySelector("#asked-for").innerText.includes("pat")`)
	pat.until(quiet)

	lee.open("/approvals")
	lee.waitForText("1 request waits for you.")
	lee.open("/approvals/" + id)
	lee.fill("input[name=expect]", "3")
	lee.follow("#decide [value=approve]")
	lee.until(quiet)
	const outcome = "Your request to discard 3 dead letters was approved by lee, and dlqd executed it: 3 changed."
	pat.waitForText(outcome)
	pat.script(false)
	pat.open("/policy")
	require.Contains(t, pat.texts("#outcomes"), outcome)
	pat.open("/approvals/" + id)
	pat.open("/policy")
	require.Empty(t, pat.texts("#outcomes"))
	require.Empty(t, lee.texts("#outcomes"))
}

// TestApprovals_TellHiddenPages checks that the tab of a hidden page shows that a request waits.
func TestApprovals_TellHiddenPages(t *testing.T) {
	t.Parallel()
	o := open(t, withApprovals)
	o.failManual(1)
	lee := o.signedIn("lee", "/queues")
	lee.until(live)
	lee.value(`Object.defineProperty(document, "hidden", {configurable: true, value: true}); document.dispatchEvent(new Event("visibilitychange"))`)
	o.text(discardReports)
	lee.until(`document.title.startsWith("(1) ")`)
}

// TestApprovals_ShowTheResultWithUndo executes an approved request after another operator has changed one of its
// entries. The page shows which entry was left unchanged and why, and can undo the operation.
func TestApprovals_ShowTheResultWithUndo(t *testing.T) {
	t.Parallel()
	o := open(t, withApprovals)
	o.failManual(3)
	id := o.text(discardReports)
	lee := o.signedIn("lee", "/approvals/"+id)
	lee.until(live)
	// One transaction approves the request and moves the entry, so that the request is not executed before the
	// move.
	tx, err := o.pool.Begin(t.Context())
	require.NoError(t, err)
	for _, sql := range []string{
		"SELECT dlq.approve(id, 3, p_actor => 'ann') FROM dlq.approvals",
		"SELECT dlq.discard((SELECT min(entry_id::text)::uuid FROM dlq.approval_entries), 'kim')",
	} {
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	require.NoError(t, tx.Commit(t.Context()))
	lee.until(`document.querySelector("#result").checkVisibility()`)
	lee.waitForText("2 dead letters were changed.")
	require.Contains(t, lee.texts("#result"), "Left as they were")
	lee.follow("#result button")
	lee.waitForText("Undone for 2 dead letters.")
	require.Equal(t, "/approvals/"+id, lee.value("location.pathname"))
	lee.follow("#result a")
	require.Equal(t, "/operations/"+id, lee.value("location.pathname"))
}

const discardReports = `SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {"kind": "report.daily"}}',
	'ticket 7', 'pat')::text`

// TestApprovals_PageIsLive opens a request in two tabs. Both show the current number of entries. After one tab
// approves, the other can no longer decide, even with a draft of a note.
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
