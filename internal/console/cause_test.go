package console

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/reconcile"
	"github.com/dlqd/dlqd/internal/replay"
)

// TestHeadline_PutsTheCauseFirst checks that the headline of an answer shows its status and code before its
// text, and repeats no part.
func TestHeadline_PutsTheCauseFirst(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ message, kind, code, want string }{
		{
			"402 Payment Required: card declined (INSUFFICIENT_FUNDS)", "card_error", "INSUFFICIENT_FUNDS",
			"402 Payment Required · INSUFFICIENT_FUNDS: card declined",
		},
		{"422 Unprocessable Entity: no price", "HTTP_422", "422", "422 Unprocessable Entity · no price"},
		{"400 Bad Request: invalid_grant: expired", "", "invalid_grant", "400 Bad Request · invalid_grant: expired"},
		{"404 Not Found", "HTTP_404", "404", "404 Not Found"},
		{"500 Internal Server Error: (E17)", "", "", "500 Internal Server Error · E17"},
		{"POST https://bank.example/v1: 503 Service Unavailable", "HTTP_503", "", "503 Service Unavailable"},
		{"HTTP_429: 429 Too Many Requests: slow down", "", "", "429 Too Many Requests · slow down"},
		{"JobCancelError: HTTP_410: 410 Gone: no such price", "", "", "410 Gone · no such price"}, // as River stores it
		{"dial tcp: connection refused", "CONNECTION_REFUSED", "", "CONNECTION_REFUSED: dial tcp: connection refused"},
		{"no such report\nsecond line", "", "", "no such report"},
		{"500 rows are locked", "*errors.errorString", "", "500 rows are locked"},
		{"", "HTTP_402", "402", "402 Payment Required"}, // the viewer may not see the message
		{"", "", "", ""},
	} {
		require.Equal(t, test.want, headlineOf(test.message, test.kind, test.code).String(), test.message)
	}
}

// TestExchange_MarksTheReason checks that the body of an answer is split at the text that the headline took
// from it.
func TestExchange_MarksTheReason(t *testing.T) {
	t.Parallel()
	var text, marked strings.Builder
	const body = `{"code": "E17", "message": "card declined"}`
	for _, part := range markReason(body, headline{Name: "E17", Text: "card declined"}) {
		text.WriteString(part.Text)
		if part.Marked {
			marked.WriteString("<" + part.Text + ">")
		}
	}
	require.Equal(t, body, text.String()) //nolint:testifylint // the text, not what it says
	require.Equal(t, "<E17><card declined>", marked.String())
	require.Equal(t, []piecePart{{Text: "***"}}, markReason("***", headline{Text: "***"}))
}

// TestExchange_KeepsHiddenPayloads checks that viewers who may not see a payload see none.
func TestExchange_KeepsHiddenPayloads(t *testing.T) {
	t.Parallel()
	text := func(value string) *string { return &value }
	l := &deadLetterPage{EntryDetail: api.EntryDetail{Entry: deadletter.Entry{
		Summary: deadletter.Summary{
			Destination: text("bank"), DestinationURL: text("https://bank.example"),
			ErrorMessage: text("402 Payment Required: declined"),
		},
		JobKind: message.JobKind, ErrorContext: []byte(`{"status": 402, "body": "{\"detail\": \"declined\"}"}`),
	}}, Hidden: true, Payload: []byte(`{"secret": 1}`)}
	x := l.exchangeOf()
	require.True(t, x.BodyHidden)
	require.Empty(t, x.Body)
	require.Equal(t, "402 Payment Required", x.Status)
	require.Equal(t, "{\n  \"detail\": \"", x.Reply[0].Text)
	require.Equal(t, piecePart{"declined", true}, x.Reply[1])

	l.ErrorContext, l.ErrorMessage = nil, nil // hidden by the policy
	require.Empty(t, l.exchangeOf().Reply)
	l.JobKind = "report.daily"
	require.Nil(t, l.exchangeOf(), "a job of an application sends nothing that dlqd knows")
}

// TestLike_DescribesRunsOfTheGroup checks that only runs whose filter selects the group are named.
func TestLike_DescribesRunsOfTheGroup(t *testing.T) {
	t.Parallel()
	run := func(filter string, succeeded int64) *replay.Run {
		return &replay.Run{
			ID: uuid.New(), Filter: []byte(filter), Actor: "kim",
			Replayed: succeeded + 1, Succeeded: succeeded, Failed: 1, CreatedAt: time.Date(2026, 3, 3, 9, 0, 0, 0, time.UTC),
		}
	}
	const of, recovered = "kim replayed 17 of this group on ", "3 Mar 2026: 16 recovered, 1 failed again."
	require.Equal(t, []string{of + recovered}, runsOfGroup(
		[]*replay.Run{
			run(`{"fingerprint": ["abcd"], "queue": ["payments"]}`, 16),
			run(`{"fingerprint": ["abcd"], "queue": ["orders"]}`, 2),
			run(`{"fingerprint": ["abcd"], "queue": ["orders", "mails"]}`, 5),
			run(`{"queue": ["payments"]}`, 3), run(`{"fingerprint": ["ffff"]}`, 4),
		}, "payments", "abcdef", time.UTC))
	for _, several := range []string{ // filters that also select other groups
		`{"fingerprint": ["abcd", "ffff"], "queue": ["payments"]}`, `{"fingerprint": ["abcd"], "queue": ["pay*"]}`,
		`{"fingerprint": ["abcd"], "queue": ["payments", "orders"]}`, `{"fingerprint": ["abcd"]}`,
	} {
		require.Equal(t,
			[]string{"kim replayed 17 dead letters of this and perhaps of other groups on " + recovered},
			runsOfGroup([]*replay.Run{run(several, 16)}, "payments", "abcdef", time.UTC), several)
	}
}

// TestOverview_ListsOpenGroupsFirst checks that groups whose failures have all recovered come after groups with open
// dead letters.
func TestOverview_ListsOpenGroupsFirst(t *testing.T) {
	t.Parallel()
	groups := mostOpen([]analytics.TopGroup{
		{Queue: "recovered", InWindow: 90},
		{Queue: "few", InWindow: 30, Open: 1},
		{Queue: "gone", InWindow: 20},
		{Queue: "many", InWindow: 9, Open: 9},
	}, 3)
	queues := make([]string, len(groups))
	for i, g := range groups {
		queues[i] = g.Queue
	}
	require.Equal(t, []string{"many", "few", "recovered"}, queues)
}

// TestAttempts_ShowWaits checks that an attempt shows the time since the previous attempt.
func TestAttempts_ShowWaits(t *testing.T) {
	t.Parallel()
	list := attemptsOf(&deadletter.Entry{RetryHistory: []byte(`[
		{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "a"},
		{"at": "2026-01-01T00:05:00Z", "attempt": 2, "error": "b"}]`)})
	require.Len(t, list, 2)
	require.Equal(t, 5*time.Minute, list[0].Wait)
	require.Zero(t, list[1].Wait)
}

// TestList_OffersWhatStatesAllow offers only the actions that the states of the matching entries allow.
func TestList_OffersWhatStatesAllow(t *testing.T) {
	t.Parallel()
	names := func(l *list, byStatus map[string]int64) (names []string) {
		l.Verbs = bulkVerbs()
		for _, verb := range l.possibleActs(byStatus, "kim") {
			names = append(names, verb.Name)
		}
		return names
	}
	always := []string{"assign", "tag", "note"}
	entry := deadletter.Summary{Status: deadletter.Archived}
	require.Equal(t, append(always, "reopen"), names(&list{Entries: []deadletter.Summary{entry}}, nil))
	byStatus := map[string]int64{"dlq_manual": 4, "dlq_pending": 0}
	require.NotContains(t, names(&list{Next: "more"}, byStatus), "park")
	require.Contains(t, names(&list{Next: "more"}, byStatus), "resolve")
	listed := []deadletter.Summary{{Status: deadletter.Pending}}
	require.Contains(t, names(&list{Next: "more", Entries: listed}, byStatus), "park", "a count may be old")
	require.Equal(t, []string{"replay", "assign", "tag", "note", "park", "discard", "expire"},
		names(&list{Next: "more", Query: "status:pending"}, nil))
}

// TestList_CountIsALowerBoundUntilKnown shows a count as exact only if the page lists all entries, or if the count is
// known and not contradicted by the page.
func TestList_CountIsALowerBoundUntilKnown(t *testing.T) {
	t.Parallel()
	count := func(l *list, known *api.Count) api.Count {
		l.Query, l.Entries = "queue:a ", make([]deadletter.Summary, 25)
		l.Counts = map[string]*api.Count{"queue:a": known}
		return *l.count()
	}
	require.Equal(t, api.Count{Entries: 25}, count(&list{}, &api.Count{Entries: 7}), "the page lists all")
	require.Equal(t, api.Count{Entries: 25, AtLeast: true}, count(&list{Next: "more"}, nil))
	require.Equal(t, api.Count{Entries: 90}, count(&list{Next: "more"}, &api.Count{Entries: 90}))
	require.Equal(t, api.Count{Entries: 90}, count(&list{First: "first"}, &api.Count{Entries: 90}))
	for _, old := range []int{0, 24, 25} {
		require.Equal(t, api.Count{Entries: 25, AtLeast: true}, count(&list{Next: "more"}, &api.Count{Entries: old}))
	}
	require.Equal(t, api.Count{Entries: 1000, AtLeast: true},
		count(&list{Next: "more"}, &api.Count{Entries: 1000, AtLeast: true}))
}

// TestShares_NameStatuses names the error types of HTTP answers by their status lines.
func TestShares_NameStatuses(t *testing.T) {
	t.Parallel()
	require.Equal(t, []share{{"card_error", 3}, {"402 Payment Required", 2}, {"599", 1}},
		typeShares(map[string]int64{"HTTP_402": 2, "card_error": 3, "HTTP_599": 1}))
	require.Equal(t, "under 1 ms", lasted(0.0))
}

// TestVisible_KeepsEmoji checks that a zero-width joiner within an emoji stays, and that any other is shown as
// hidden.
func TestVisible_KeepsEmoji(t *testing.T) {
	t.Parallel()
	require.Equal(t, []run{{Text: "a 👩‍💻 b"}}, visible("a 👩‍💻 b"))
	require.Equal(t, []run{{Text: "a"}, {Text: "U+200D", Hidden: true}, {Text: "b"}}, visible("a\u200db"))
}

// TestWarnings_SayLimits checks that the text about a queue with too many dead letters contains the limit.
func TestWarnings_SayLimits(t *testing.T) {
	t.Parallel()
	require.Equal(t, "100\u202f387 dead letters (limit 1\u202f000), the oldest is open for 26 h (limit 24 h), other",
		reasonsInWords([]string{
			"size 100387 exceeds 1000", "the oldest is open for 26h3m5s, which exceeds 24h0m0s", "other",
		}))
}

// TestNotes_AreInThePagesWords checks the notes of a preview: times are in the viewer's zone, numbers have separators,
// and fingerprints are short. Names stay as they are, even if they look like a time, a number or a fingerprint.
func TestNotes_AreInThePagesWords(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	r.AddCookie(&http.Cookie{Name: zoneCookie, Value: "Asia/Tokyo"})
	const fingerprint = "01234567890123234567"
	p := &replay.Preview{
		Total: 6000, Estimates: []replay.Estimate{{What: "stage_reached", Stage: "12345 done", Entries: 4200, Sampled: 6000}},
		Unworked: []replay.UnworkedKind{{Kind: fingerprint, Unknown: 1000, Sampled: 1000}},
		Expect: &replay.Expectation{Untried: 1000, Groups: []replay.GroupExpectation{{
			Queue: "2026-11-28 10:05 UTC", Fingerprint: fingerprint, Recovered: 5, Failed: 5995, Entries: 6000,
			Since: time.Date(2026, 11, 28, 10, 5, 0, 0, time.UTC),
		}}},
		Load: []replay.Load{{Queue: "10000", Entries: 6000, PerSecond: []float64{2000, 12.5}, Redelivered: 1000}},
	}
	words := (&request{Request: r}).replayWords()
	require.Equal(t, []string{
		"4\u202f200 of 6\u202f000 had reached stage 12345 done",
		"no worker seems to know kind " + fingerprint + ": inferred from 1\u202f000 of 1\u202f000 last attempts, with the latest " +
			"of them",
		"group 01234567…234567 in 2026-11-28 10:05 UTC: 5 of 6\u202f000 recovered since 28 Nov 19:05 JST; of 6\u202f000, about " +
			"0 (0 to 0) will",
		"no earlier replay run has outcomes of the failure groups of 1\u202f000: they were never tried",
		"queue 10000 gets 6\u202f000, at most 2\u202f000 per second; in the last hour, 1\u202f000 were redelivered and 0 " +
			"failed; how many succeeded is not known",
	}, estimates(p, words))
	words.Unlimited = true
	notes := p.Notes(words)
	require.Equal(t, "queue 10000 gets 6\u202f000; in the last hour, 1\u202f000 were redelivered and 0 failed; how many "+
		"succeeded is not known", notes[len(notes)-1])
}

// TestCaptureLimit_IsADuration checks how the System page shows the limit of capture, an interval of Postgres.
func TestCaptureLimit_IsADuration(t *testing.T) {
	t.Parallel()
	for limit, want := range map[string]string{
		"00:00:00.25": "250 ms", "00:00:01.5": "1.5s", "00:01:00": "1 min", "1 day 00:00:00": "1 day 00:00:00",
	} {
		require.Equal(t, want, (&system{Capture: &reconcile.Capture{Limit: limit}}).CaptureLimit(), limit)
	}
}

// TestNoticed_SplitsAtTimes checks that the times in notices become times of the page.
func TestNoticed_SplitsAtTimes(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	require.Equal(t, []piece{{Text: "kim resolved it "}, {At: at}, {Text: "."}},
		noticed("kim resolved it at 2026-11-22T10:00:00Z."))
	require.Equal(t, []piece{{Text: "has not succeeded since "}, {At: at}, {Text: "; retrying"}},
		noticed("no turn has succeeded since 2026-11-22T10:00:00Z; retrying"))
}

// TestAuditRow_NamesRunsAndApprovals checks that an act on a replay run reads as an act, and that an act on an approval
// names it for the link.
func TestAuditRow_NamesRunsAndApprovals(t *testing.T) {
	t.Parallel()
	id := uuid.NewString()
	row := func(reason string) *auditRow { return &auditRow{AuditRow: deadletter.AuditRow{Reason: &reason}} }
	require.Equal(t, "paused replay run "+short(id), row("replay run "+id+": paused").Words())
	require.Equal(t, "replay run "+short(id)+": group goes on", row("replay run "+id+": group goes on").Words())
	require.Equal(t, id, row("approval "+id+": requested").Approval())
	require.Equal(t, "requested approval "+short(id), row("approval "+id+": requested").Words())
	require.Empty(t, row("approval of kim").Approval())
	started := row("replay run " + id + ": started")
	started.Ran = &replay.Run{Filter: json.RawMessage(`{"queue": ["payments"]}`), Total: 9, Replayed: 2, Succeeded: 1}
	require.Equal(t, "replayed 2 of 9 dead letters so far: 1 recovered", started.Words())
	started.Ran.FinishedAt = new(time.Now())
	require.Equal(t, "replayed 2 dead letters: 1 recovered", started.Words())
	require.Equal(t, "queue:payments", started.FilterText())
}
