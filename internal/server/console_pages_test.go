package server_test

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// browse requests a page as a browser does, with a token.
func (b *scopeBundle) browse(token, path string) (int, string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, b.base+path, nil)
	require.NoError(b, err)
	request.Header.Set("Accept", "text/html")
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultClient.Do(request)
	require.NoError(b, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	return response.StatusCode, string(raw)
}

// send posts a form. It returns the message that the user sees, on the page or in a cookie, and the
// redirect.
func (b *scopeBundle) send(token, path string, form url.Values) (status int, told, to string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), http.MethodPost, b.base+path, strings.NewReader(form.Encode()))
	require.NoError(b, err)
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("Accept", "text/html")
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultTransport.RoundTrip(request)
	require.NoError(b, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	for _, cookie := range response.Cookies() {
		if cookie.Name == "dlqd-flash" && cookie.Value != "" {
			text, err := base64.RawURLEncoding.DecodeString(cookie.Value)
			require.NoError(b, err)
			var flash struct {
				Text string `json:"t"`
			}
			require.NoError(b, json.Unmarshal(text, &flash))
			return response.StatusCode, flash.Text, response.Header.Get("Location")
		}
	}
	return response.StatusCode, string(raw), response.Header.Get("Location")
}

// hostile is a text with markup, and with a character that reverses the text after it.
const hostile = "<script>alert(1)</script>\u202eevil"

// notMarkup checks that a page does not contain hostile as markup, nor its invisible character.
func notMarkup(t *testing.T, page string) {
	t.Helper()
	require.False(t, strings.Contains(page, "<script>alert") || strings.Contains(page, "\u202e"), "a text is markup")
}

// has checks that a page contains a text.
func has(t *testing.T, page, text string) {
	t.Helper()
	require.Contains(t, page, text, "not on the page: %s", text)
}

// The test checks what each role sees on the pages for operators, what the forms do, and that each action leaves an
// audit row.
func TestConsole_OperatorPages(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}, Above: 2})
	b.fail("payments", 3)
	b.fail("mail", 2)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := b.pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	count := func(sql string, args ...any) (n int) {
		t.Helper()
		require.NoError(t, b.pool.QueryRow(t.Context(), sql, args...).Scan(&n), sql)
		return n
	}
	for _, queue := range []string{"payments", "mail"} {
		exec("INSERT INTO river_queue (name, created_at, updated_at) VALUES ($1, now(), now())", queue)
	}
	admin, kim, lee := b.named("anna", access.Admin, "root"), b.named("kim", access.Operator, "root"),
		b.named("lee", access.Operator, "root")
	reader, limited := b.named("rita", access.Reader, "root"), b.named("lim", access.Operator, "root", "pay*")
	start := func(token, body string) string {
		t.Helper()
		status, out := b.as(token, "POST", "/api/dlq/replay", body)
		require.Equal(t, http.StatusAccepted, status, out)
		var answer struct{ Run struct{ ID string } }
		require.NoError(t, json.Unmarshal([]byte(out), &answer))
		return answer.Run.ID
	}
	note, err := json.Marshal(hostile)
	require.NoError(t, err)
	run := start(kim, `{"filter": {"queue": ["payments"]}, "force": true, "note": `+string(note)+`}`)
	mailRun := start(kim, `{"filter": {"queue": ["mail"]}, "force": true, "rate": 0.001}`)
	asked := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true, "note": "of everything"}`)

	t.Run("visibility by role", func(t *testing.T) {
		for path, want := range map[string][4]int{ // admin, operator, reader, operator of pay*
			"/queues": {200, 200, 200, 200}, "/sources": {200, 200, 200, 200}, "/replays": {200, 200, 200, 200},
			"/replays/" + run: {200, 200, 200, 404}, "/replays/" + mailRun: {200, 200, 200, 404},
			"/approvals": {200, 200, 403, 200}, "/approvals/" + asked: {200, 200, 403, 404},
			"/audit": {200, 200, 200, 200}, "/audit?people=false": {200, 200, 200, 200},
			"/access": {200, 200, 200, 200}, "/system": {200, 200, 200, 200},
			"/policy": {200, 200, 200, 200}, "/docs": {200, 200, 200, 200},
			"/replays/nonsense": {404, 404, 404, 404}, "/audit?cursor=x": {422, 422, 422, 422},
			"/replays/calibration":                          {200, 200, 200, 200},
			"/replays/0198a0b0-0000-7000-8000-000000000000": {404, 404, 404, 404},
		} {
			for i, token := range []string{admin, kim, reader, limited} {
				status, page := b.browse(token, path)
				require.Equal(t, want[i], status, "%s %d %s", path, i, page)
				notMarkup(t, page)
				if path != "/docs" {
					require.Regexp(t, `<h1|class="lead"`, page, path)
				}
				if i == 3 && path != "/docs" {
					require.NotRegexp(t, `\bmail\b`, page, "%s shows another queue", path)
				}
			}
		}
	})
	t.Run("addresses of nothing", func(t *testing.T) {
		for _, parent := range []string{
			"/replays/", "/runs/", "/dead-letters/", "/operations/", "/approvals/", "/groups/payments/", "/groups/nonsense/",
			"/jobs/", "/messages/", "/chart/", "/queues/", "/docs/",
		} {
			for _, name := range []string{
				"nonsense", "events", "stats", "Calibration", "calibration/x", "..%2fcalibration", "%2e%2e%2fcalibration", "%00",
				"%ff", "-1", "0", "99999999999999999999", "{id}", "0198a0b0-0000-7000-8000-00000000000", strings.Repeat("n", 300),
			} {
				status, page := b.browse(kim, parent+name)
				require.Equal(t, http.StatusNotFound, status, "%s%s", parent, name)
				has(t, page, "<h1>Not found</h1>")
			}
		}
	})
	t.Run("overview", func(t *testing.T) {
		was := b.text("SELECT dlq.policy_version()")
		// Two processes publish the policy; the second changes nothing.
		for range 2 {
			exec(`SELECT dlq.publish_policy('3d5ebe1c5944', (SELECT value FROM dlq.settings WHERE key = 'approvals'),
				'worker:test')`)
		}
		exec(postgrestest.RefreshRollups)
		require.Equal(t, 1, count(`SELECT count(*) FROM dlq.acts WHERE subject = 'policy' AND act = 'came into force'
			AND detail ->> 'before' = $1`, was))
		status, out := b.as(reader, "GET", "/api/dlq/analytics/policies?over=1h", "")
		require.Equal(t, http.StatusOK, status, out)
		require.Contains(t, out, `"version":"3d5ebe1c5944"`)
		for _, token := range []string{reader, limited} {
			_, page := b.browse(token, "/")
			has(t, page, `class="marker marker-policy"`)
			has(t, page, "policy 3d5ebe1c5944 in force at ")     // in the chart's summary
			has(t, page, "<li>▲ policy 3d5ebe1c5944 in force, ") // beside its table
		}
		_, page := b.browse(admin, "/audit?people=false&text=came+into+force")
		has(t, page, "policy: came into force")
	})
	t.Run("queues and breakers", func(t *testing.T) {
		status, told, to := b.send(kim, "/queues/act", url.Values{
			"do": {"pause"}, "name": {"payments"}, "note": {"drill <b>"}, "from": {"/queues"},
		})
		require.Equal(t, http.StatusSeeOther, status, told)
		require.Equal(t, "/queues#payments", to)
		_, page := b.browse(reader, "/queues")
		require.Regexp(t, `among the last 3,000 of all queues">0\.[1-9] in</span>`, page)
		has(t, page, "Queue payments is paused.")
		require.Regexp(t, `<button disabled title="requires the role operator">Resume</button>`, page)
		_, told, _ = b.send(kim, "/queues/act", url.Values{"do": {"resume"}, "name": {"payments"}})
		require.Contains(t, told, "is resumed")
		_, told, _ = b.send(kim, "/queues/act", url.Values{
			"do": {"open"}, "name": {"destination:default"}, "for": {"10m"}, "note": {"drill of the bank"},
		})
		require.Contains(t, told, "is open for 10m")
		_, page = b.browse(kim, "/queues")
		has(t, page, "kim opened the breaker of default.")
		has(t, page, `id="destination:default"`)
		status, told, _ = b.send(reader, "/queues/act", url.Values{
			"do": {"reset"}, "name": {"destination:default"}, "from": {"/queues"},
		})
		require.Equal(t, http.StatusSeeOther, status)
		require.Contains(t, told, "this needs the role operator")
		status, _, to = b.send(reader, "/queues/act", url.Values{
			"do": {"reset"}, "name": {"destination:default"}, "from": {"//elsewhere.example"},
		})
		require.Equal(t, http.StatusForbidden, status, "redirected to another site: "+to)
		_, told, _ = b.send(kim, "/queues/act", url.Values{"do": {"reset"}, "name": {"destination:default"}})
		require.Contains(t, told, "is closed")
		_, page = b.browse(admin, "/audit?people=true&text=drill")
		has(t, page, "drill of the bank")
		has(t, page, "drill &lt;b&gt;")
		_, page = b.browse(limited, "/queues")
		has(t, page, "Pause payments")
	})
	t.Run("replay run", func(t *testing.T) {
		require.Eventually(t, func() bool {
			return count("SELECT count(*) FROM dlq.replay_run_entries WHERE job_id IS NOT NULL AND run_id = $1::uuid", run) == 3
		}, 5*time.Minute, 50*time.Millisecond)
		exec(`UPDATE river_job SET state = 'discarded', attempt = 1, finalized_at = now(),
			errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', 1, 'at', now())] WHERE queue = 'payments'
				AND state = 'available'`, hostile)
		require.Eventually(t, func() bool {
			return count("SELECT count(*) FROM dlq.replay_run_entries WHERE outcome = 'failed' AND run_id = $1::uuid", run) == 3
		}, 5*time.Minute, 50*time.Millisecond)
		status, page := b.browse(kim, "/replays/"+run+"?outcome=failed")
		require.Equal(t, http.StatusOK, status)
		notMarkup(t, page)
		has(t, page, "&lt;script&gt;alert(1)&lt;/script&gt;<span class=\"hidden-character\"")
		has(t, page, "0 recovered, 3 failed again, 0 skipped, 0 remaining")
		has(t, page, "queue:payments")
		has(t, page, "API, from 127.0.0.1")
		require.Equal(t, 3, strings.Count(page, "failed again</span></td>"))
		_, page = b.browse(kim, "/replays/"+run+"?outcome=succeeded")
		has(t, page, "None.")
		for _, step := range []struct{ do, rate, told string }{
			{"pause", "", "Paused"},
			{"rate", "0.002", "Rate changed"},
			{"rate", "fast", "must be a number"},
			{"resume", "", "Resumed"},
			{"cancel", "", "Cancelled"},
		} {
			status, told, _ := b.send(kim, "/replays/"+mailRun+"/steer", url.Values{
				"do": {step.do}, "rate": {step.rate}, "from": {"/replays/" + mailRun},
			})
			require.Equal(t, http.StatusSeeOther, status, told)
			require.Contains(t, told, step.told)
		}
		_, page = b.browse(kim, "/replays/"+mailRun)
		has(t, page, "Cancelled by kim")
		has(t, page, "Compared with the previous run")
		_, page = b.browse(kim, "/audit?people=true&text="+url.QueryEscape("replay run "+mailRun))
		for _, act := range []string{"paused", "changed the rate of", "resumed", "cancelled"} {
			has(t, page, act)
		}
		_, page = b.browse(kim, "/replays/"+run)
		require.Regexp(t, `<th scope="row">dead letters</th><td>3</td>\s*<td>3 replayed</td>`, page)

		_, page = b.browse(reader, "/replays")
		has(t, page, `disabled title="requires the role operator"`)
	})
	t.Run("approvals", func(t *testing.T) {
		_, page := b.browse(kim, "/approvals/"+asked)
		has(t, page, "another person must approve it")
		has(t, page, "Withdraw</button>")
		_, page = b.browse(lee, "/approvals")
		has(t, page, "1 request waits for you.")
		_, page = b.browse(lee, "/approvals/"+asked)
		// Entries that the replay runs had sent before the request was made are not counted.
		require.Regexp(t, `kim requests to discard [1-5] dead letters?\.`, page)
		match := regexp.MustCompile(`Approve: Discard (\d+)`).FindStringSubmatch(page)
		require.Len(t, match, 2)
		now := match[1] // the number that the page shows: more entries have failed since
		_, told, _ := b.send(lee, "/approvals/"+asked+"/decide",
			url.Values{"do": {"approve"}, "from": {"/approvals/" + asked}})
		require.Contains(t, told, "type the number")
		_, told, _ = b.send(lee, "/approvals/"+asked+"/decide", url.Values{
			"do": {"approve"}, "expect": {"1"}, "from": {"/approvals/" + asked},
		})
		require.Contains(t, told, now)
		_, told, _ = b.send(kim, "/approvals/"+asked+"/decide", url.Values{
			"do": {"approve"}, "expect": {now}, "from": {"/approvals/" + asked},
		})
		require.NotContains(t, told, "Approved")
		_, told, _ = b.send(lee, "/approvals/"+asked+"/decide",
			url.Values{"do": {"approve"}, "expect": {now}, "note": {"seen"}})
		require.Contains(t, told, "Approved")
		require.Eventually(t, func() bool {
			_, page = b.browse(kim, "/approvals/"+asked)
			return strings.Contains(page, "lee approved it, and it was done")
		}, 5*time.Minute, 50*time.Millisecond)
		for _, verb := range []string{"refuse", "withdraw"} {
			b.fail("payments", 3)
			id := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["payments"]}}`)
			who := map[string]string{"refuse": lee, "withdraw": kim}[verb]
			status, told, to := b.send(who, "/approvals/"+id+"/decide", url.Values{"do": {verb}, "note": {"not these"}})
			require.Equal(t, http.StatusSeeOther, status, told)
			require.Equal(t, "/approvals/"+id, to)
			_, page = b.browse(who, "/approvals/"+id)
			has(t, page, "nothing was done")
		}
	})
	t.Run("audit", func(t *testing.T) {
		_, page := b.browse(admin, "/audit?actor=kim&after=2026-01-01T00:00&to=dlq_processing")
		has(t, page, "dlqd audit --actor &#39;kim&#39; --to &#39;dlq_processing&#39; --after")
		has(t, page, "SELECT * FROM dlq.audit(")
		has(t, page, `href="/replays/`+run+`"`)
		_, page = b.browse(admin, "/audit?actor=nobody")
		has(t, page, "matches.")
	})
	t.Run("system", func(t *testing.T) {
		status, page, _ := b.send(admin, "/system/checks", url.Values{"from": {"/system"}})
		require.Equal(t, http.StatusOK, status)
		has(t, page, "tables and functions")
		_, told, _ := b.send(kim, "/system/checks", url.Values{"from": {"/system"}})
		require.Contains(t, told, "this needs the role admin")
		_, page = b.browse(kim, "/system")
		has(t, page, `disabled title="requires the role admin`)
		_, told, _ = b.send(kim, "/system/automatic", url.Values{"do": {"stop"}, "note": {"the bank asks"}})
		require.Contains(t, told, "is stopped")
		_, page = b.browse(reader, "/system")
		has(t, page, "kim has stopped all automatic redelivery.")
		has(t, page, "the bank asks")
		_, told, _ = b.send(kim, "/system/automatic", url.Values{"do": {"resume"}})
		require.Contains(t, told, "lifted")
		_, page = b.browse(limited, "/system")
		has(t, page, "require access to every queue")
	})
	t.Run("access", func(t *testing.T) {
		status, page := b.visitor()("POST", "/access/tokens", url.Values{
			"name": {"ci"}, "role": {"sender"}, "queues": {"payments*, mail"}, "expires": {"30d"}, "from": {"/access"},
		}, "Authorization", "Bearer "+admin)
		require.Equal(t, http.StatusOK, status, page)
		secret := regexp.MustCompile(`data-copy="(dlqd_[A-Za-z0-9]+)"`).FindStringSubmatch(page)
		require.Len(t, secret, 2)
		has(t, page, "sender in queues payments*, mail")
		require.Equal(t, http.StatusOK, b.bundle.as(secret[1], "GET", "/api/whoami", ""))
		_, page = b.browse(admin, "/access")
		require.NotContains(t, page, secret[1], "the secret is shown again")
		var id string
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id::text FROM dlq.tokens WHERE name = 'ci'").Scan(&id))
		_, told, _ := b.send(kim, "/access/tokens", url.Values{"revoke": {id}, "from": {"/access"}})
		require.Contains(t, told, "this needs the role admin")
		_, told, _ = b.send(admin, "/access/tokens", url.Values{"revoke": {id}, "note": {"left"}})
		require.Contains(t, told, "revoked")
		require.Equal(t, 2, count("SELECT count(*) FROM dlq.audit('{\"actor\": \"anna\", \"origin\": \"API, from "+
			"127.0.0.1\"}') WHERE reason LIKE 'tokens%'"))
		for name, form := range map[string]url.Values{"role": {"name": {"ci"}, "role": {"root"}}, "expires": {
			"name": {"ci"},
			"role": {"reader"}, "expires": {"99999d"},
		}, "name": {"name": {"worker:1"}, "role": {"reader"}}} {
			form.Set("from", "/access")
			status, told, to := b.send(admin, "/access/tokens", form)
			require.Equal(t, http.StatusSeeOther, status, "%s: %s", name, told)
			require.Equal(t, "/access", to)
		}
		_, told, _ = b.send(admin, "/access/tokens", url.Values{
			"name": {"another"}, "role": {"operator"}, "from": {"/access"},
		})
		require.Contains(t, told, "could request and approve", "an admin created a token that could act as a second person")
		_, page = b.browse(kim, "/access")
		has(t, page, "You are kim, authenticated by a token: operator everywhere.")
		require.NotContains(t, page, "Create token")
	})
	t.Run("policy", func(t *testing.T) {
		_, page := b.browse(reader, "/policy?status=503&message="+url.QueryEscape(hostile))
		require.NotContains(t, page, "<script>alert")
		has(t, page, "outage")
		has(t, page, "If it failed now")
		_, page = b.browse(reader, "/policy?status=422")
		has(t, page, "needs a person")
		status, page := b.browse(reader, "/policy?status=abc")
		require.Equal(t, http.StatusUnprocessableEntity, status)
		has(t, page, "such as 503")

		// A proposed change of the policy.
		exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'order.paid', '{}', 'mail', 1, 'running'
			FROM generate_series(1, 4)`)
		exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb]
			WHERE state = 'running'`)
		status, told, _ := b.send(kim, "/policy",
			url.Values{"file": {"dlq-routing"}, "text": {"rules:\n- {name: a, match: {message: '('}, class: outage}\n- {name: " +
				"b, match: {status: 9xx}, class: outage}\n"}})
		require.Equal(t, http.StatusUnprocessableEntity, status)
		has(t, told, "dlq-routing.yaml:2: rules[0].match.message: error parsing regexp")
		has(t, told, "dlq-routing.yaml:3: rules[1].match.status: &#34;9xx&#34; is not an HTTP status")
		status, told, _ = b.send(kim, "/policy",
			url.Values{"file": {"dlq-routing"}, "text": {"rules:\n- name: new-rule\n  match: {queue: [payments, mail]}\n  " +
				"class: business\n  plan: {strategy: scheduled, delays: [1h]}\n"}})
		require.Equal(t, http.StatusOK, status, told)
		has(t, told, "rule new-rule: new: ")
		has(t, told, "<b>scheduled</b>")
		require.Regexp(t, `(?s)<td class="n">[1-9][0-9]*</td>.*new-rule`, told)
		status, told, _ = b.send(kim, "/policy", url.Values{"file": {"../retry-policies"}, "text": {""}})
		require.Equal(t, http.StatusUnprocessableEntity, status)
		has(t, told, "unknown file of the policy")
		_, told, _ = b.send(kim, "/policy",
			url.Values{
				"file": {"retry-policies"},
				"text": {"queues: {payments: {destination: d}}\ndestinations: {d: {urlFile: /etc/hostname, secretFile: " +
					"/etc/hostname}}\n"},
			})
		hostname, err := os.ReadFile("/etc/hostname")
		require.NoError(t, err)
		require.NotContains(t, told, strings.TrimSpace(string(hostname)), "a draft reads files")
		require.Zero(t, count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE rule = 'new-rule'"),
			"a preview changed an entry")
		status, out := b.as(limited, "GET", "/api/dlq/analytics/rules?over=1h", "")
		require.Equal(t, http.StatusOK, status, out)
		require.Contains(t, out, `"rows":[{"rule":`)
		_, all := b.as(reader, "GET", "/api/dlq/analytics/rules?over=1h", "")
		require.NotEqual(t, out, all, "a scope does not limit the rules")
	})
	// The form has three steps: choose, preview, start.
	t.Run("new replay run", func(t *testing.T) {
		_, page := b.browse(kim, "/replays/new")
		has(t, page, "Select dead letters to replay")
		_, page = b.browse(kim, "/replays/new?q=queue:mail")
		has(t, page, "<h1>Replay 4 dead letters</h1>")
		has(t, page, "no earlier replay run has outcomes of the failure groups of 4: they were never tried")
		has(t, page, `<input type="hidden" name="q" value="queue:mail">`)
		status, page := b.browse(kim, "/replays/new?q=nonsense:x")
		require.Equal(t, http.StatusUnprocessableEntity, status)
		has(t, page, "Nothing was done.")
		status, told, to := b.send(kim, "/bulk", url.Values{
			"do": {"replay"}, "all": {"1"}, "q": {"queue:mail"}, "force": {"yes"}, "rate": {"0.002"}, "expect": {"4"},
		})
		require.Equal(t, http.StatusSeeOther, status, told)
		_, page = b.browse(kim, to)
		has(t, page, `<th scope="row">duration</th><td>33 min</td>`) // four entries at 0.002 per second
		_, out := b.as(kim, "GET", "/api/dlq"+to, "")
		require.Contains(t, out, `"forecast":{"entries":4,"seconds":2000,"byQueue":{"mail":4},"unhealthy":[],`)
		_, _, _ = b.send(kim, to+"/steer", url.Values{"do": {"cancel"}})
	})
}
