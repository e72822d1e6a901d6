package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
)

// The pages of a list have every job of its queue and state exactly once, in the order of the jobs' times, for all
// priorities.
func TestJobs_ListInOrder(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	_, err := b.pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state, priority, scheduled_at, finalized_at)
		SELECT CASE n % 3 WHEN 0 THEN 'order.paid' ELSE 'user.mail' END, '{}', q, 3, s::river_job_state, 1 + n % 4,
			timestamptz '2027-01-01' + (n * 7 % 31) * interval '1 second', CASE s WHEN 'completed' THEN now() END
		FROM generate_series(1, 31) n, (VALUES ('pay_eu'), ('mailqueue')) q (q), (VALUES ('scheduled'), ('completed')) s (s)`)
	require.NoError(t, err)
	list := func(token, state string) (times []string) {
		cursor := ""
		for {
			status, out := b.as(token, "GET", "/api/jobs?queue=pay_eu&limit=4&state="+state+"&cursor="+cursor, "")
			require.Equal(t, http.StatusOK, status, out)
			var page struct {
				Jobs []struct{ Queue, State, ScheduledAt string }
				Next string
			}
			require.NoError(t, json.Unmarshal([]byte(out), &page))
			for _, job := range page.Jobs {
				require.Equal(t, []string{"pay_eu", state}, []string{job.Queue, job.State})
				times = append(times, job.ScheduledAt)
			}
			if cursor = page.Next; cursor == "" {
				return times
			}
		}
	}
	reader := b.token(access.Reader, nil)
	scheduled, completed := list(reader, "scheduled"), list(reader, "completed")
	require.Len(t, scheduled, 31)
	require.IsIncreasing(t, scheduled, "what waits: the earliest first")
	require.Len(t, completed, 31)
	require.IsDecreasing(t, completed, "what has ended: the latest first")
	require.Len(t, list(b.token(access.Reader, access.Scope{{Kinds: []string{"order.*"}}}), "scheduled"), 10)
	foreign := b.token(access.Reader, access.Scope{{Queues: []string{"mailqueue"}}})
	require.Empty(t, list(foreign, "scheduled"))
	_, out := b.as(foreign, "GET", "/api/jobs?queue=pay_eu&state=scheduled&limit=4", "")
	require.NotContains(t, out, "next", "a cursor has the place of a job")
	for _, query := range []string{
		"state=running", "queue=pay_eu", "queue=pay_eu&state=dead", "queue=pay_eu&state=running&cursor=x",
	} {
		status, out := b.as(reader, "GET", "/api/jobs?"+query, "")
		require.Equal(t, http.StatusUnprocessableEntity, status, out)
	}
}

// An operator cancels a job, puts the cancelled job back, and lets a waiting job run at once. If the job's state does
// not allow that, or another session has locked the job, the operator gets the answer at once.
func TestJobs_CancelAndRetry(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	insert := func(state string) (id string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, scheduled_at, finalized_at, errors)
			VALUES ('order.paid', '{"secret": "payload"}', 'pay_eu', 3, 1, $1::text::river_job_state, now() + interval '1 hour',
			CASE WHEN $1::text IN ('completed', 'cancelled') THEN now() END, ARRAY['{"at": "2026-11-25T08:00:00Z", "attempt": 1, "error": "refused"}'::jsonb])
			RETURNING id::text`, state).Scan(&id))
		return id
	}
	operator, reader := b.token(access.Operator, access.Scope{{Queues: []string{"pay_eu"}}}), b.token(access.Reader, nil)
	act := func(token, id, verb string) (int, string) {
		return b.as(token, "POST", "/api/jobs/"+id+"/"+verb, `{"note": "ticket 7"}`)
	}
	state := func(id string) string { return b.text("SELECT state::text FROM river_job WHERE id = " + id) }

	job := insert("retryable")
	status, out := b.as(operator, "GET", "/api/jobs/"+job, "")
	require.Equal(t, http.StatusOK, status, out)
	for _, part := range []string{`"secret":"payload"`, `"error":"refused"`, `"attempt":1`, `"maxAttempts":3`} {
		require.Contains(t, out, part)
	}
	_, out = b.as(reader, "GET", "/api/jobs/"+job, "")
	require.Contains(t, out, `"error":"refused"`)
	require.NotContains(t, out, "payload", "payloads are hidden from readers")

	for _, verb := range []string{"cancel", "retry"} {
		status, out = act(reader, job, verb)
		require.Equal(t, http.StatusForbidden, status, out)
	}

	for refusal, columns := range map[string]string{
		"has a dead letter":     `'order.paid', '{}', '{}'`, // cancelled by its worker
		"with its ordering key": `'dlqd_message', '{"kind": "order.paid", "orderingKey": "a"}', '{"cancel_attempted_at": "x"}'`,
	} {
		var id string
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, metadata, queue, max_attempts,
			attempt, state, finalized_at, errors)
			SELECT `+columns+`, 'pay_eu', 3, 1, 'cancelled', now(), ARRAY['{"at": "x", "attempt": 1, "error": "e"}'::jsonb]
			RETURNING id::text`).Scan(&id))
		status, out = act(operator, id, "retry")
		require.Equal(t, http.StatusConflict, status, out)
		require.Contains(t, out, refusal)
		require.Equal(t, "cancelled", state(id))
	}
	status, out = act(operator, job, "cancel")
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, "cancelled", state(job))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE river_job_id = "+job), "it is no failure")
	status, out = act(operator, job, "cancel")
	require.Equal(t, http.StatusConflict, status, out)
	require.Contains(t, out, "cannot cancel from cancelled")
	status, out = act(operator, job, "retry")
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, "available", state(job), "the cancellation is taken back")

	waiting := insert("scheduled")
	status, out = act(operator, waiting, "retry")
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, 1, b.count("SELECT count(*) FROM river_job WHERE state = 'available' AND scheduled_at <= now() AND id = "+waiting))
	done := insert("completed")
	status, out = act(operator, done, "retry")
	require.Equal(t, http.StatusConflict, status, "the work is not done twice: "+out)
	status, out = act(operator, b.jobs["pay_eu/order.paid"], "retry")
	require.Equal(t, http.StatusConflict, status, "a job with a dead letter is replayed: "+out)

	// River asks the worker of a running job to end the job. The worker may still complete the job.
	running := insert("running")
	status, out = act(operator, running, "cancel")
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, "running", state(running))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.acts WHERE act = 'asked running job "+running+" to end'"))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.acts WHERE act = 'cancelled job "+running+"'"))

	// A job with the same unique key was inserted after the cancellation.
	unique := insert("cancelled")
	b.exec(`UPDATE river_job SET finalized_at = now(), unique_key = '\x01', unique_states = B'00000001',
		metadata = '{"cancel_attempted_at": "x"}' WHERE id = ` + unique)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, unique_key, unique_states)
		VALUES ('order.paid', '{}', 'pay_eu', 3, 'available', '\x01', B'00000001')`)
	status, out = act(operator, unique, "retry")
	require.Equal(t, http.StatusConflict, status, out)
	require.Contains(t, out, "another job has its unique key")
	require.Equal(t, "cancelled", state(unique))

	locked := insert("retryable")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river_job WHERE id = "+locked+" FOR UPDATE")
	require.NoError(t, err)
	status, out = act(operator, locked, "cancel")
	require.Equal(t, http.StatusConflict, status, out)
	require.Contains(t, out, "locked by another session")
	require.NoError(t, tx.Rollback(t.Context()))

	_, out = b.as(operator, "GET", "/api/dlq/audit?people=true&text="+url.QueryEscape("job "+job), "")
	require.Equal(t, 2, strings.Count(out, `"note":"ticket 7"`), out)

	// The console shows the job and cancels it, too.
	status, page := b.browse(operator, "/jobs/"+locked)
	require.Equal(t, http.StatusOK, status)
	has(t, page, "Attempt 1 of 3 failed")
	status, told, to := b.send(operator, "/jobs/"+locked+"/act", url.Values{"do": {"cancel"}, "note": {"no"}})
	require.Equal(t, []any{http.StatusSeeOther, "/jobs/" + locked}, []any{status, to}, told)
	require.Equal(t, "cancelled", state(locked))
}

// Jobs in River's state pending wait for a client of River, not for a time, so they are counted separately. Pages that
// show no numbers of jobs do not count them.
func TestQueues_CountPendingJobs(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, scheduled_at)
		SELECT 'order.paid', '{}', q, 3, s::river_job_state, now() + interval '1 hour'
		FROM (VALUES ('pay_eu'), ('only_jobs')) q (q), (VALUES ('pending'), ('pending'), ('scheduled')) s (s)`)
	reader := b.token(access.Reader, nil)
	list := func(query string) map[string]map[string]any {
		status, out := b.as(reader, "GET", "/api/queues"+query, "")
		require.Equal(t, http.StatusOK, status, out)
		var body struct{ Queues []map[string]any }
		require.NoError(t, json.Unmarshal([]byte(out), &body))
		queues := map[string]map[string]any{}
		for _, q := range body.Queues {
			queues[q["name"].(string)] = q
		}
		return queues
	}
	all := list("")
	require.EqualValues(t, 2, all["pay_eu"]["pending"])
	require.EqualValues(t, 3, all["pay_eu"]["scheduled"])
	require.Contains(t, all, "only_jobs")
	names := list("?withoutJobs=true")
	require.EqualValues(t, 0, names["pay_eu"]["scheduled"])
	require.Equal(t, all["pay_eu"]["deadLetters"], names["pay_eu"]["deadLetters"])
	require.NotContains(t, names, "only_jobs")

	_, page := b.browse(reader, "/jobs?queue=pay_eu&state=pending")
	has(t, page, "2 jobs of pay_eu are pending.")
	_, page = b.browse(reader, "/jobs?queue=pay_eu&state=scheduled")
	has(t, page, "1 job of pay_eu is scheduled.")
}

// An action on several groups stops at the first refusal. The message says how many groups were changed before.
func TestGroups_SayHowManyWereChanged(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	operator := b.token(access.Operator, nil)
	_, told, _ := b.send(operator, "/groups", url.Values{
		"do": {"fixed"}, "group": {"pay_eu/same", "pay_eu/00000000000000000000"}, "from": {"/groups"},
	})
	require.Contains(t, told, "only the first 1 of 2 groups")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.group_marks WHERE fixed_at IS NOT NULL"))
}

// If the text is the id of an entry, job, run, operation or approval, the search redirects to its page. Otherwise it
// lists the things whose names contain the text.
func TestSearch_FindsByIDAndName(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	admin := b.token(access.Admin, nil)
	entry, job := b.ids["pay_eu/order.paid"], b.jobs["pay_eu/order.paid"]
	to := func(token, text string) string {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			b.base+"/search?q="+url.QueryEscape(text), nil)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+token)
		request.Header.Set("Accept", "text/html")
		response, err := http.DefaultTransport.RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Less(t, response.StatusCode, 400)
		return response.Header.Get("Location")
	}
	for text, path := range map[string]string{
		entry: "/dead-letters/" + entry, " " + strings.ToUpper(entry): "/dead-letters/" + entry,
		b.runs["pay_eu"]: "/replays/" + b.runs["pay_eu"], b.done["pay_eu"]: "/operations/" + b.done["pay_eu"],
		b.approvals["pay_eu"]: "/approvals/" + b.approvals["pay_eu"], job: "/jobs/" + job,
		"pay": "", "nothing like this": "",
	} {
		require.Equal(t, path, to(admin, text), text)
	}
	elsewhere := b.token(access.Admin, access.Scope{{Queues: []string{"mailqueue"}}})
	for _, id := range []string{entry, b.runs["pay_eu"], b.done["pay_eu"], b.approvals["pay_eu"], job} {
		require.Empty(t, to(elsewhere, id))
	}
	_, page := b.browse(admin, "/search?q=pay")
	has(t, page, `href="/queues#pay_eu"`)
	_, page = b.browse(elsewhere, "/search?q=pay")
	require.NotContains(t, page, "pay_eu")
	_, page = b.browse(admin, "/search?q=audit")
	has(t, page, `href="/audit"`)
	_, page = b.browse(admin, "/search?list=1&q="+entry)
	has(t, page, fmt.Sprintf(`href="/dead-letters/%s"`, entry))
	status, page := b.browse(admin, "/messages/never-seen")
	require.Equal(t, http.StatusNotFound, status)
	has(t, page, "River deletes jobs a day after they completed")
}
