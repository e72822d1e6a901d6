package console_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
)

// TestTabs_ShowCounts checks that the tabs of states, of the viewer and of saved views show their numbers of dead
// letters, and so do the titles of pages. An action changes the numbers.
func TestTabs_ShowCounts(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 3)
	o.eventually(3, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	b := o.tab()
	b.signIn(o.token("kim", access.Operator))
	// counts reloads the page until it shows the counts of the tabs: a page does not wait for all of them.
	counts := func(path, want string) {
		b.Helper()
		b.await(want+" in the tabs of "+path, func() bool {
			b.open(path)
			return b.texts(".tabs a:has(b)") == want
		})
	}
	counts("/dead-letters", "All 3\nNeeds a person 3\nPending 0\nProcessing 0\nFailed 0\nReturned 0\nMine 0\nResolved 0")
	b.open(listOf("queue:reports"))
	require.Contains(t, b.value("document.title"), "queue:reports · Dead letters")
	b.click(b.button("Save as a view"))
	b.fill("form[action^='/views'] input[name=name]", "nightly")
	b.follow("form[action^='/views'] button")
	b.waitForText("Saved view nightly.")
	b.await("the tab of the view", func() bool { return b.texts(".tabs [aria-current=page]") == "☆ nightly 3" })
	b.open("/dead-letters/" + o.text("SELECT id::text FROM dlq.dead_letter_open LIMIT 1"))
	b.fill("input[name=assignee]", "kim")
	b.navigate(func() { b.press("\r") })
	b.waitForText("Assigned to kim.")
	counts("/dead-letters",
		"All 3\nNeeds a person 3\nPending 0\nProcessing 0\nFailed 0\nReturned 0\nMine 1\nResolved 0\n☆ nightly 3")
	require.Equal(t, "All 3", b.texts(".tabs [aria-current=page]"))
	counts("/review?whose=me", "All 3\nAssigned to me 1\nUnassigned 2")
	require.Equal(t, "Assigned to me 1", b.texts(".tabs [aria-current=page]"))
	require.Equal(t, "1", b.texts("h1 .of"))
	b.await("the count of the audit page", func() bool { // the page omits the count while the database is slow
		b.open("/audit")
		return regexp.MustCompile(`^\d+$`).MatchString(b.texts("h1 .of"))
	})
}

// TestReview_CountsItsTab checks that the review says how many dead letters wait in its tab, which is more than it
// lists. Each listed dead letter begins with its cause, which is also the title of the open one.
func TestReview_CountsItsTab(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	o.fail("reports", "report.daily", "no such report", 24)
	o.exec(`SELECT dlq.act_where('assign', '{"queue": "reports"}', 'lee', p_args => '{"assignee": "kim"}', p_limit => 22)`)
	b := o.tab()
	b.signIn(o.token("kim", access.Operator))
	b.await("the count of the tab", func() bool { // a page does not wait for all counts
		b.open("/review?whose=me")
		return strings.HasPrefix(b.texts("#sentence"), "22 dead letters wait")
	})
	require.Equal(t, "22", b.texts("h1 .of"))
	require.Equal(t, "no such report", b.texts(".review h2.cause"))
	require.Equal(t, "no such report", b.value(`document.querySelector("#waiting .two-lines > span").innerText`))
	for query, matching := range map[string]string{
		"assigned:kim": "22 matches", "id:" + o.text("SELECT id::text FROM dlq.dead_letter_open LIMIT 1"): "1 match",
	} {
		b.await(matching, func() bool { // with a slow database, the list may be incomplete
			b.open(listOf(query))
			return b.texts("#matching") == matching
		})
	}
}
