package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// approvalsSetup starts a dlqd whose policy has these approval rules.
func approvalsSetup(t *testing.T, rules ...policy.ApprovalRule) *scopeBundle {
	t.Helper()
	b := &scopeBundle{bundle: setup(t, options{config: func(c *server.Config) {
		c.Process = false
		c.Policy.Access.Authentication = []string{"tokens"}
		c.Policy.Access.Approvals.Rules = rules
	}})}
	b.tokens = access.NewStore(b.pool, postgres.DefaultSchemas())
	return b
}

// fail inserts n failed jobs of a queue and waits until their dead letters are parked.
func (b *scopeBundle) fail(queue string, n int) {
	b.Helper()
	for _, sql := range []string{
		fmt.Sprintf(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'order.paid',
			jsonb_build_object('n', i), '%s', 1, 'running' FROM generate_series(1, %d) i`, queue, n),
		`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb]
			WHERE state = 'running'`,
		`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'test')`,
	} {
		_, err := b.pool.Exec(b.Context(), sql)
		require.NoError(b, err, sql)
	}
	require.Eventually(b, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'") == 0
	}, 5*time.Minute, 50*time.Millisecond)
}

func (b *scopeBundle) named(name string, role access.Role, by string, queues ...string) string {
	b.Helper()
	secret, err := b.tokens.Create(b.Context(), &access.Token{Name: name, Role: role, Queues: queues}, by)
	require.NoError(b, err)
	return secret
}

// ask sends a request that needs approval, and returns the id of the approval.
func (b *scopeBundle) ask(token, path, body string) string {
	b.Helper()
	status, out := b.as(token, "POST", path, body)
	require.Equal(b, http.StatusAccepted, status, out)
	var answer struct{ Approval approval.Approval }
	require.NoError(b, json.Unmarshal([]byte(out), &answer))
	require.Equal(b, "requested", answer.Approval.State, out)
	return answer.Approval.ID.String()
}

func (b *scopeBundle) approval(token, id string) (a approval.Approval) {
	b.Helper()
	status, out := b.as(token, "GET", "/api/dlq/approvals/"+id, "")
	require.Equal(b, http.StatusOK, status, out)
	require.NoError(b, json.Unmarshal([]byte(out), &a))
	return a
}

func (b *scopeBundle) awaitApproval(token, id, state string) (a approval.Approval) {
	b.Helper()
	require.Eventually(b, func() bool { a = b.approval(token, id); return a.State == state }, time.Minute,
		50*time.Millisecond, "%+v", a)
	return a
}

func (b *scopeBundle) decide(token, id, verb, body string) int {
	b.Helper()
	status, out := b.as(token, "POST", "/api/dlq/approvals/"+id+"/"+verb, body)
	b.Log(verb, status, out)
	return status
}

// TestApprovals_OfExports checks that an approved export has exactly the dead letters that matched at the approval, and
// that only the requester gets the export.
func TestApprovals_OfExports(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"export"}, Above: 2})
	b.fail("payments", 3)
	b.fail("mail", 2)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	export := func(token, body string) (int, int) {
		status, out := b.as(token, "POST", "/api/dlq/export", body)
		return status, strings.Count(out, `"id":`)
	}
	status, n := export(kim, `{"filter": {"queue": ["mail"]}}`)
	require.Equal(t, []int{http.StatusOK, 2}, []int{status, n}, "below the rule's number")
	id := b.ask(kim, "/api/dlq/export", `{"filter": {"queue": ["payments"]}}`)
	require.Equal(t, id, b.ask(kim, "/api/dlq/export", `{"filter": {"queue": ["payments"]}}`))
	approved := `{"filter": {}, "approval": "` + id + `"}`
	status, _ = export(kim, approved)
	require.Equal(t, http.StatusConflict, status, "it is not approved yet")
	require.Equal(t, http.StatusForbidden, b.decide(kim, id, "approve", `{"expect": 3}`))
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 3}`))
	b.awaitApproval(kim, id, "done")
	b.fail("payments", 1)
	status, n = export(kim, approved)
	require.Equal(t, []int{http.StatusOK, 3}, []int{status, n}, "without the dead letter that came later")
	status, _ = export(lee, approved)
	require.Equal(t, http.StatusForbidden, status)
	status, _ = export(kim, `{"filter": {"queue": ["mail"]}, "approval": "`+id+`"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.acts WHERE subject = 'export' AND note = 'approval `+id+`'`))
	status, n = export(kim, strings.Replace(approved, "{", `{"note": "for the auditor", `, 1))
	require.Equal(t, []int{http.StatusOK, 3}, []int{status, n})
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.acts WHERE subject = 'export'
		AND note = 'approval `+id+`: for the auditor'`))
	_, err := b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET ended_at = now() - interval '25 hours'")
	require.NoError(t, err)
	status, _ = export(kim, approved)
	require.Equal(t, http.StatusConflict, status, "the approval was for a day")
}

func TestApprovals_RequireASecondPerson(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{
		Operations: []string{"discard", "purge"}, Queues: []string{"pay*"}, Above: 2,
	}, policy.ApprovalRule{Operations: []string{"erase"}})
	b.fail("payments", 3)
	b.fail("mail", 5)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")

	status, out := b.as(kim, "POST", "/api/dlq/bulk", `{"do": "note", "filter": {}, "all": true, "note": "n"}`)
	require.Equal(t, http.StatusOK, status, out)
	status, out = b.as(kim, "POST", "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["mail"]}, "dryRun": true}`)
	require.Equal(t, http.StatusOK, status, out)
	id := b.ask(kim, "/api/dlq/bulk",
		`{"do": "discard", "filter": {"kind": ["order.*"]}, "note": "ticket 7", "actor": "ann"}`)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'"),
		"nothing changes before the approval")
	a := b.approval(lee, id)
	require.EqualValues(t, 8, a.Entries)
	require.JSONEq(t, `{"payments": 3, "mail": 5}`, string(a.ByQueue))
	require.JSONEq(t, `{"do": "discard", "filter": {"kind": ["order.*"]}}`, string(a.Request))
	require.Equal(t, []string{"kim", "ann", "ticket 7"}, []string{a.Actor, *a.OnBehalfOf, a.Note})

	// The requester cannot approve: not with another token, and not with another spelling of the name. Neither can the
	// person whom the requester acts for, the creator of the requester's token, or the holder of a token that the
	// requester created. The approver needs the operation's role, and a scope that covers the request.
	for name, token := range map[string]string{
		"kim": kim, "another token with the same name": b.named("kim", access.Admin, "root"),
		"the name in capitals":                 b.named("KIM", access.Operator, "root"),
		"the person acted for":                 b.named("ann", access.Operator, "root"),
		"the creator of the requester's token": b.named("root", access.Operator, "root"),
		"a token that the requester created":   b.named("x", access.Operator, "kim"),
		"a reader":                             b.named("reader", access.Reader, "root"),
	} {
		require.Equal(t, http.StatusForbidden, b.decide(token, id, "approve", `{"expect": 8}`), name)
	}
	require.Equal(t, http.StatusForbidden, b.decide(lee, id, "approve", `{"expect": 8, "actor": "kim"}`),
		"on behalf of the requester")
	limited := b.named("limited", access.Operator, "root", "payments")
	require.Equal(t, http.StatusNotFound, b.decide(limited, id, "approve", `{"expect": 8}`))
	_, list := b.as(limited, "GET", "/api/dlq/approvals", "")
	require.NotContains(t, list, id)
	require.Equal(t, http.StatusUnprocessableEntity, b.decide(lee, id, "approve", `{}`))
	require.Equal(t, http.StatusForbidden, b.decide(lee, id, "withdraw", ""), "only the requester may withdraw")
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 7}`), "more than expected")

	// If an entry arrives before the approval, the approver has to send the new number as expect. The operation does not
	// touch entries that arrive after the approval.
	b.fail("mail", 1)
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 8}`))
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 9, "note": "fine"}`))
	a = b.awaitApproval(lee, id, "done")
	require.EqualValues(t, 9, *a.Frozen)
	require.EqualValues(t, 9, *a.Changed)
	require.Equal(t, 9, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_archived'
		AND actor = 'kim' AND note = 'ticket 7' AND origin LIKE 'API, from 127.0.0.1 %, on behalf of ann, approved by lee'`))
	require.Equal(t, "requested kim, approved lee, done kim", b.text(`SELECT string_agg(act || ' ' || actor, ', '
		ORDER BY at) FROM dlq.acts WHERE subject = 'approval `+id+`'`))
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 9}`))
	require.Equal(t, http.StatusConflict, b.decide(kim, id, "withdraw", ""))

	// Purging requires admin, both to request and to approve.
	status, _ = b.as(kim, "POST", "/api/dlq/bulk", `{"do": "purge", "filter": {}, "all": true}`)
	require.Equal(t, http.StatusForbidden, status)
	boss, other := b.named("boss", access.Admin, "root"), b.named("other", access.Admin, "root")
	id = b.ask(boss, "/api/dlq/bulk", `{"do": "purge", "filter": {}, "all": true}`)
	require.Equal(t, http.StatusForbidden, b.decide(lee, id, "approve", `{"expect": 9}`))
	require.Equal(t, http.StatusForbidden, b.decide(lee, id, "refuse", `{}`))
	require.Equal(t, http.StatusOK, b.decide(other, id, "refuse", `{"note": "no"}`))
	require.Equal(t, http.StatusConflict, b.decide(other, id, "approve", `{"expect": 9}`))

	id = b.ask(boss, "/api/dlq/erasures", `{"filter": {"payload": {"n": 1}}, "note": "request 42"}`)
	require.Equal(t, http.StatusOK, b.decide(boss, id, "withdraw", ""))
	require.JSONEq(t, `{"erased": true}`, string(b.approval(boss, id).Request), "the request contains personal data")
	id = b.ask(boss, "/api/dlq/erasures", `{"filter": {"payload": {"n": 1}}, "note": "request 42"}`)
	require.Equal(t, http.StatusOK, b.decide(other, id, "approve", `{"expect": 3}`))
	a = b.awaitApproval(boss, id, "done")
	require.EqualValues(t, 3, *a.Changed)
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event = '{\"erased\": true}'"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.erasures WHERE id = '"+a.Outcome.String()+
		"' AND actor = 'boss' AND origin LIKE '%, approved by other' AND finished_at IS NOT NULL"))
	require.JSONEq(t, `{"erased": true}`, string(a.Request))
	_, out = b.as(boss, "GET", "/metrics", "")
	require.Contains(t, out, `dlqd_stage_seconds_count{outcome="ok",stage="approval"} 2`)
}

// An approved operation changes only entries that were frozen at the approval. Of these, it leaves out the entries that
// have moved since.
func TestApprovals_TouchOnlyFrozenEntries(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"replay"}})
	b.fail("payments", 4)
	_, err := b.pool.Exec(t.Context(), `INSERT INTO river_queue (name, created_at, updated_at)
		VALUES ('payments', now(), now())`)
	require.NoError(t, err)
	kim, lee := b.named("kim", access.Operator, "root", "pay*"), b.named("lee", access.Operator, "root")

	id := b.ask(kim, "/api/dlq/replay",
		`{"filter": {"queue": ["payments", "mail"]}, "mergePatch": {"fixed": true}, "note": "fixed"}`)
	b.fail("mail", 1) // outside kim's scope
	// The approval freezes the entries. Then one entry is added and one moves, before the operation runs.
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.approve($1, 4, p_actor => 'lee')", id)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "UPDATE dlq.approvals SET taken_until = now() + interval '1 hour' WHERE id = $1", id)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	b.fail("payments", 1)
	require.Equal(t, 6, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'"))
	_, err = b.pool.Exec(t.Context(), `SELECT dlq.discard((SELECT min(entry_id::text)::uuid FROM dlq.approval_entries),
		'ann')`)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET taken_until = NULL WHERE id = $1", id)
	require.NoError(t, err)
	a := b.awaitApproval(lee, id, "done")
	require.EqualValues(t, 4, *a.Frozen)
	require.EqualValues(t, 3, *a.Changed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_runs WHERE id = '"+a.Outcome.String()+
		"' AND total = 3 AND actor = 'kim' AND note = 'fixed' AND origin LIKE '%, approved by lee' AND scope IS NOT NULL "+
		"AND merge_patch IS NOT NULL"))
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing' AND actor = 'kim'
			AND origin LIKE '%, approved by lee'`) == 3
	}, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'"),
		"the later entry, and the one outside the scope")

	// An approval is also needed to unpark a single entry, and to replay it with another payload.
	left := b.text("SELECT id::text FROM dlq.dead_letter_queue WHERE status = 'dlq_manual' AND queue = 'payments'")
	id = b.ask(kim, "/api/dlq/entries/"+left+"/unpark", "")
	require.Equal(t, http.StatusOK, b.decide(kim, id, "withdraw", ""))
	id = b.ask(kim, "/api/dlq/entries/"+left+"/replay", `{"payload": {"whole": 1.50}}`)
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 1}`))
	b.awaitApproval(lee, id, "done")
	require.Eventually(t, func() bool {
		return b.count(`SELECT count(*) FROM river_job WHERE args = '{"whole": 1.50}'`) ==
			1
	}, 5*time.Minute, 50*time.Millisecond)
}

// A request shows how many entries its operation can still change, how many arrived since, and by status how many were
// closed.
func TestApprovals_CountWhatTheyWouldChange(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}})
	b.fail("payments", 5)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	id := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["payments"]}}`)
	require.EqualValues(t, 5, b.approval(lee, id).Entries)
	require.Nil(t, b.approval(lee, id).Matches)
	_, err := b.pool.Exec(t.Context(),
		"SELECT dlq.act_on('resolve', ARRAY(SELECT id FROM dlq.dead_letter_queue ORDER BY id LIMIT 2), 'ann')")
	require.NoError(t, err)
	b.fail("payments", 1)
	b.fail("mail", 1)

	matches := func(token string) *approval.Matches {
		status, out := b.as(token, "GET", "/api/dlq/approvals/"+id+"?matches=true", "")
		require.Equal(t, http.StatusOK, status, out)
		var a approval.Approval
		require.NoError(t, json.Unmarshal([]byte(out), &a))
		return a.Matches
	}
	want := &approval.Matches{Entries: 4, Arrived: 1, Closed: map[string]int64{"dlq_resolved": 2}}
	require.Equal(t, want, matches(lee))
	require.Equal(t, want, matches(kim))
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 3}`))
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 4}`))
	a := b.awaitApproval(kim, id, "done")
	require.EqualValues(t, 4, *a.Frozen)
	require.EqualValues(t, 4, *a.Changed)
	require.Nil(t, matches(lee), "the request was decided")

	// The preview of an operation counts only the entries that the operation can change. The preview of an unknown
	// operation counts all entries.
	for do, entries := range map[string]int64{
		"discard": 1, "expire": 1, "resolve": 1, "unpark": 1, "purge": 6, `purge", "force": true, "x": "`: 7,
	} {
		require.EqualValues(t, entries, b.count(`SELECT sum(p.entries)::bigint
			FROM dlq.preview(dlq.approval_filter('bulk', '{"filter": {}, "do": "`+do+`"}')) p`), do)
	}
}

// If two people ask for the same operation with the same scope, the second one joins the request that waits. Another
// operation or another scope makes a new request.
func TestApprovals_EqualRequestsAreOne(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard", "replay"}})
	b.fail("payments", 2)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	const discard = `{"do": "discard", "filter": {"queue": ["payments"]}, "note": "ticket 7"}`
	id := b.ask(kim, "/api/dlq/bulk", discard)
	for name, token := range map[string]string{"kim": kim, "lee": lee} {
		status, out := b.as(token, "POST", "/api/dlq/bulk",
			`{"filter": {"queue": ["payments"]}, "do": "discard", "note": "me too"}`)
		require.Equal(t, http.StatusAccepted, status, out)
		require.Contains(t, out, `"existing":true`, name)
		require.Contains(t, out, `"id":"`+id+`"`, name)
		require.Contains(t, out, `"actor":"kim"`, name)
	}
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.approvals"))
	require.Equal(t, "kim: me too, lee: me too", b.text(`SELECT string_agg(actor || ': ' || note, ', ' ORDER BY actor)
		FROM dlq.acts WHERE subject = 'approval `+id+`' AND act = 'requested again'`))

	status, out := b.as(b.named("limited", access.Operator, "root", "payments"), "POST", "/api/dlq/bulk", discard)
	require.Equal(t, http.StatusAccepted, status, out)
	require.NotContains(t, out, "existing")
	status, out = b.as(lee, "POST", "/api/dlq/replay", `{"filter": {"queue": ["payments"]}, "force": true}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.NotContains(t, out, "existing")
	require.Equal(t, http.StatusOK, b.decide(lee, id, "refuse", `{}`))
	status, out = b.as(lee, "POST", "/api/dlq/bulk", discard)
	require.Equal(t, http.StatusAccepted, status, out)
	require.NotContains(t, out, "existing", "a request that was decided does not count")
}

// The list of requests for some entries has the requests that wait for a decision and select one of these entries,
// within the caller's scope.
func TestApprovals_AreListedForEntries(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard", "resolve"}})
	b.fail("payments", 2)
	b.fail("mail", 1)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	ids := strings.Split(b.text("SELECT string_agg(id::text, ',' ORDER BY queue DESC, id) FROM dlq.dead_letter_queue"),
		",")
	more := "" // of the query
	list := func(token string, of ...string) (found map[string]int) {
		status, out := b.as(token, "GET", "/api/dlq/approvals?entries="+strings.Join(of, ",")+more, "")
		require.Equal(t, http.StatusOK, status, out)
		var answer struct{ Approvals []approval.Approval }
		require.NoError(t, json.Unmarshal([]byte(out), &answer))
		found = map[string]int{}
		for _, a := range answer.Approvals {
			found[a.ID.String()] = len(a.Selects)
		}
		return found
	}
	require.Empty(t, list(lee, ids...))
	all := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["payments"]}}`)
	one := b.ask(kim, "/api/dlq/entries/"+ids[1]+"/resolve", "")
	require.Equal(t, map[string]int{all: 2, one: 1}, list(lee, ids...))
	require.Equal(t, map[string]int{all: 1}, list(lee, ids[0]))
	require.Empty(t, list(lee, ids[2]))
	for query, want := range map[string]map[string]int{
		"&limit=1": {one: 1}, "&state=requested": {all: 2, one: 1}, "&state=refused": {},
	} {
		more = query
		require.Equal(t, want, list(lee, ids...), query)
	}
	more = ""
	require.Empty(t, list(b.named("limited", access.Operator, "root", "payments"), ids...),
		"requests of everything are outside the scope")
	status, _ := b.as(lee, "GET", "/api/dlq/approvals?entries=x", "")
	require.Equal(t, http.StatusUnprocessableEntity, status)

	// The list for an entry leaves out a request whose operation can no longer change the entry, and a decided request.
	require.Equal(t, http.StatusOK, b.decide(lee, one, "approve", `{"expect": 1}`))
	b.awaitApproval(kim, one, "done")
	require.Equal(t, map[string]int{all: 1}, list(lee, ids...))
	require.Equal(t, http.StatusOK, b.decide(lee, all, "refuse", `{}`))
	require.Empty(t, list(lee, ids...))
}

// An operation that was approved before its request expired also runs after the time at which the request would have
// expired.
func TestApprovals_DoNotExpireOnceApproved(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}})
	b.fail("payments", 2)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	id := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`)
	require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SELECT dlq.approve($1, 2, p_actor => 'lee')", id); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), `UPDATE dlq.approvals SET taken_until = now() + interval '1 hour', expires_at = now()
			WHERE id = $1`, id)
		return err
	}))
	require.Zero(t, b.count("SELECT dlq.expire_approvals()"))
	require.Equal(t, "approved", b.approval(lee, id).State)
	_, err := b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET taken_until = NULL WHERE id = $1", id)
	require.NoError(t, err)
	require.EqualValues(t, 2, *b.awaitApproval(lee, id, "done").Changed)
}

func TestApprovals_ExpireAndAreDecidedOnce(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}})
	b.fail("payments", 2)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	id := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`)
	a := b.approval(kim, id)
	require.WithinDuration(t, a.RequestedAt.Add(24*time.Hour), a.ExpiresAt, time.Second)
	_, err := b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET expires_at = now()")
	require.NoError(t, err)
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 2}`))
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.acts WHERE act = 'expired' AND subject = 'approval "+id+"'") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, "expired", b.approval(lee, id).State)

	// Of several concurrent approvals one succeeds. A revoked token cannot approve.
	id = b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`)
	var wait sync.WaitGroup
	statuses := make([]int, 6)
	for i := range statuses {
		token := b.named(fmt.Sprintf("approver-%d", i), access.Operator, "root")
		wait.Go(func() { statuses[i], _ = b.as(token, "POST", "/api/dlq/approvals/"+id+"/approve", `{"expect": 2}`) })
	}
	wait.Wait()
	won := 0
	for _, status := range statuses {
		if status == http.StatusOK {
			won++
			continue
		}
		require.Equal(t, http.StatusConflict, status)
	}
	require.Equal(t, 1, won)
	b.awaitApproval(kim, id, "done")
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'"))

	b.fail("payments", 1)
	id = b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`)
	gone := b.named("gone", access.Operator, "root")
	tokens, err := b.tokens.List(t.Context())
	require.NoError(t, err)
	for _, token := range tokens {
		if token.Name == "gone" {
			require.NoError(t, b.tokens.Revoke(t.Context(), token.ID, "root", ""))
		}
	}
	require.Equal(t, http.StatusUnauthorized, b.decide(gone, id, "approve", `{"expect": 1}`))
	require.Equal(t, "requested", b.approval(kim, id).State)
}

// Operators with a role in the database need approvals for SQL functions, too, and cannot bypass them.
func TestApprovals_CannotBeBypassedInSQL(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{
		Operations: []string{"replay", "discard", "resolve", "purge", "erase"}, Queues: []string{"payments"},
	})
	ctx := t.Context()
	b.fail("payments", 2)
	b.fail("mail", 1)
	admin, err := pgx.Connect(ctx, postgrestest.Superuser(t, b.url))
	require.NoError(t, err)
	t.Cleanup(func() { _ = admin.Close(ctx) })
	login := func(role string) *pgx.Conn {
		name := role + "_" + strings.ReplaceAll(b.text("SELECT gen_random_uuid()::text"), "-", "")
		_, err := admin.Exec(ctx, "CREATE ROLE "+name+" LOGIN IN ROLE "+role)
		require.NoError(t, err)
		conn, err := pgx.Connect(ctx, postgrestest.WithUser(b.url, name))
		require.NoError(t, err)
		t.Cleanup(func() {
			_ = conn.Close(ctx)
			_, _ = admin.Exec(ctx, "DROP ROLE "+name)
		})
		return conn
	}
	kim, lee, reader := login("dlq_admin"), login("dlq_operator"), login("dlq_reader")
	one := "(SELECT min(id::text)::uuid FROM dlq.dead_letter_queue WHERE queue = 'payments')"
	for _, sql := range []string{
		"SELECT dlq.replay(" + one + ")", "SELECT dlq.discard(" + one + ")", "SELECT dlq.expire(" + one + ")",
		"SELECT dlq.resolve(" + one + ")", "SELECT dlq.unpark(" + one + ")",
		"SELECT dlq.act_on('discard', ARRAY[" + one + "], 'kim')", "SELECT dlq.act_where('discard', '{}', p_all => true)",
		"SELECT dlq.act_where('purge', '{}', p_all => true, p_args => '{\"force\": true}', p_limit => 1)",
		"SELECT dlq.replay_start('{}', p_all => true, p_force => true)", "SELECT dlq.erase_begin('{\"payload\": {\"n\": " +
			"1}}', 'x')", "CALL dlq.erase('{\"payload\": {\"n\": 1}}', 'x')", "SELECT dlq.delete_entries(ARRAY[" + one + "])",
		"SET dlq.approved = '00000000-0000-0000-0000-000000000000'; SELECT dlq.discard(" + one + ")",
	} {
		_, err := kim.Exec(ctx, sql)
		require.ErrorContains(t, err, "DLQ07", sql)
		require.ErrorContains(t, err, "needs a second person", sql)
	}
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'"))
	_, err = kim.Exec(ctx, "SELECT dlq.act_where('discard', '{\"queue\": \"mail\"}')")
	require.NoError(t, err, "no approval needed")
	for _, sql := range []string{
		"SELECT dlq.take_approval('1 hour')", "SELECT dlq.end_approval(gen_random_uuid(), 1)",
		"UPDATE dlq.approvals SET state = 'approved'", `INSERT INTO dlq.approval_entries
			VALUES (gen_random_uuid(), gen_random_uuid())`,
	} {
		_, err := kim.Exec(ctx, sql)
		require.ErrorContains(t, err, "permission denied", sql)
	}
	_, err = reader.Exec(ctx, "SELECT dlq.request_approval('bulk', '{}')")
	require.ErrorContains(t, err, "permission denied")
	_, err = lee.Exec(ctx, "SELECT dlq.request_approval('erase', '{\"filter\": {\"tags\": [\"x\"]}}')")
	require.ErrorContains(t, err, "not a dlq_admin")

	// The error's hint is the statement that requests approval.
	var pgErr *pgconn.PgError
	_, err = kim.Exec(ctx, "SELECT dlq.act_where('discard', '{\"queue\": \"payments\"}')")
	require.ErrorAs(t, err, &pgErr)
	statement, _, found := strings.Cut(strings.TrimPrefix(pgErr.Hint, "Request it: "), ". A second person")
	require.True(t, found, pgErr.Hint)
	var id string
	require.NoError(t, kim.QueryRow(ctx, statement).Scan(&id), statement)
	_, err = kim.Exec(ctx, "SELECT dlq.approve($1, 2)", id)
	require.ErrorContains(t, err, "second person")
	_, err = kim.Exec(ctx, "SELECT dlq.approve($1, 2, p_actor => 'another')", id)
	require.ErrorContains(t, err, "second person", "a claimed name does not count")
	_, err = lee.Exec(ctx, "SELECT dlq.approve($1, 1)", id)
	require.ErrorContains(t, err, "2 dead letters, more than the 1 expected")
	_, err = lee.Exec(ctx, "SELECT dlq.approve($1, 2)", id)
	require.NoError(t, err)
	token := b.named("ann", access.Operator, "root")
	require.EqualValues(t, 2, *b.awaitApproval(token, id, "done").Changed)
	require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_archived'
		AND actor LIKE 'dlq_admin_%' AND origin LIKE 'SQL, from % approved by dlq_operator_%'`))
	var rows int
	require.NoError(t, reader.QueryRow(ctx, "SELECT count(*) FROM (SELECT id, state FROM dlq.approvals) a").Scan(&rows))
	require.Equal(t, 1, rows)
	_, err = reader.Exec(ctx, "SELECT request FROM dlq.approvals")
	require.ErrorContains(t, err, "permission denied")
	// An invalid request fails without blocking others.
	require.NoError(t, kim.QueryRow(ctx,
		`SELECT dlq.request_approval('replay', '{"rate": "much", "filter": {"queue": "payments"}}')`).Scan(&id))
	_, err = lee.Exec(ctx, "SELECT dlq.approve($1, 2)", id)
	require.NoError(t, err)
	require.Contains(t, b.awaitApproval(token, id, "failed").Problem, "cannot be decoded")
	// The owner of the schema needs no approval. dlqd itself connects as the owner, too.
	_, err = b.pool.Exec(ctx, "SELECT dlq.act_where('purge', '{\"queue\": \"payments\"}')")
	require.NoError(t, err)
}

// A large operation requires the expected number of entries.
func TestExpect_IsRequiredForLargeOperations(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) {
		c.Process, c.DLQWorkers, c.Policy.Access.ExpectAbove = false,
			false, 2
	}})
	for _, sql := range []string{
		`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'order.paid', '{"customer": "cus_81"}',
			'payments', 1, 'running' FROM generate_series(1, 3) i`,
		`UPDATE river_job SET state = 'discarded', finalized_at = now()`,
		"SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'test')",
		"INSERT INTO river_queue (name, created_at, updated_at) VALUES ('payments', now(), now())",
	} {
		_, err := b.pool.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	one := b.text("SELECT min(id::text) FROM dlq.dead_letter_queue")
	for _, c := range []struct {
		path, body, expect string
		status             int
	}{
		{"/api/dlq/bulk", `{"do": "note", "filter": {}, "all": true, "note": "n"}`, "", 200},
		{"/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`, "", 422},
		{"/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`, "2", 409},
		{"/api/dlq/bulk", `{"do": "discard", "filter": {"ids": ["` + one + `"]}}`, "3", 409},
		{"/api/dlq/bulk", `{"do": "park", "filter": {"ids": ["` + one + `"]}}`, "", 200},
		{"/api/dlq/replay", `{"filter": {}, "all": true, "dryRun": true}`, "", 200},
		{"/api/dlq/replay", `{"filter": {}, "all": true, "force": true}`, "", 422},
		{"/api/dlq/replay", `{"filter": {"status": ["dlq_manual", "dlq_resolved"]}}`, "4", 409},
		{"/api/dlq/replay", `{"filter": {"status": ["dlq_manual", "dlq_resolved"]}, "rate": 0.001}`, "3", 202},
		{"/api/dlq/erasures", `{"filter": {"payload": {"customer": "cus_81"}}, "note": "n"}`, "", 422},
		{"/api/dlq/erasures", `{"filter": {"payload": {"customer": "cus_81"}}, "note": "n"}`, "5", 409},
		{"/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`, "3", 200},
		{"/api/dlq/erasures", `{"filter": {"payload": {"customer": "cus_81"}}, "note": "n"}`, "3", 200},
	} {
		body := c.body
		if c.expect != "" {
			body = strings.TrimSuffix(body, "}") + `, "expect": ` + c.expect + "}"
		}
		status, out, _ := b.call("POST", c.path, body)
		require.Equal(t, c.status, status, "%s %s: %v", c.path, body, out)
		if status == 422 {
			require.EqualValues(t, 3, out["errors"].([]any)[0].(map[string]any)["value"], "the number of selected entries")
		}
	}
}

// Requests for approval can contain personal data, as replay runs can. An erasure removes the data from requests that
// have ended, and reports how many requests still wait.
func TestApprovals_PersonalDataIsErased(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}})
	b.fail("payments", 1)
	kim, boss := b.named("kim", access.Operator, "root"), b.named("boss", access.Admin, "root")
	ended := b.text(`SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {"subscriberId": ["cus_81"]}}', 'asked by phone', 'kim')::text`)
	require.Equal(t, http.StatusOK, b.decide(kim, ended, "withdraw", `{"note": "cus_81 called again"}`))
	open := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["payments"]}, "note": "for cus_81"}`)
	other := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {"queue": ["payments", "mail"]}}`)
	status, out := b.as(boss, "POST", "/api/dlq/erasures",
		`{"filter": {"subscriberId": ["cus_81"]}, "note": "request 42"}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Contains(t, out, `"underWay":1`, "open requests are erased after they end")
	require.JSONEq(t, `{"erased": true}`, string(b.approval(kim, ended).Request))
	require.Empty(t, b.approval(kim, ended).Decision)
	require.Contains(t, string(b.approval(kim, open).Request), "payments")
	require.Equal(t, http.StatusOK, b.decide(boss, open, "refuse", ""))
	status, out = b.as(boss, "POST", "/api/dlq/erasures", `{"filter": {"subscriberId": ["cus_81"]}, "note": "request 42"}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Contains(t, out, `"underWay":0`)
	require.Empty(t, b.approval(kim, open).Note)
	require.Contains(t, string(b.approval(kim, other).Request), "payments", "it contains no personal data")

	// Requests for approval are deleted after the same time as the reports of replay runs.
	_, err := b.pool.Exec(t.Context(), "INSERT INTO dlq.approval_entries SELECT $1, id FROM dlq.dead_letter_queue", ended)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET ended_at = now() - interval '401 days' WHERE id = $1",
		ended)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.forget_old()")
	require.NoError(t, err)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.approvals"))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.approval_entries"))
}

// If the process that carries out an approved operation dies, another process carries it out. While a process renews
// its lease, no other process begins.
func TestApprovals_RunOnce(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"replay"}})
	b.fail("payments", 3)
	_, err := b.pool.Exec(t.Context(), `INSERT INTO river_queue (name, created_at, updated_at)
		VALUES ('payments', now(), now())`)
	require.NoError(t, err)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	id := b.ask(kim, "/api/dlq/replay", `{"filter": {}, "all": true, "rate": 0.001}`)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.approve($1, 3, p_actor => 'lee')", id)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.take_approval('1 hour')")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.take_approval('1 hour')"))
	// The process died.
	_, err = b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET taken_until = now() - interval '1 second'")
	require.NoError(t, err)
	run := b.awaitApproval(lee, id, "done").Outcome
	// If the first process was only slow and continues now, the database refuses the operation.
	tx, err = b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT set_config('dlq.approved', $1, true)", id)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT dlq.replay_start('{}', p_all => true, p_force => true)")
	require.ErrorContains(t, err, "was carried out already")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_runs WHERE id = '"+run.String()+"'"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.replay_runs"))
}

// If a process dies between two batches of an approved operation, another process continues. It does not touch the
// entries of finished batches again, even if they have moved since.
func TestApprovals_ContinueAfterAProcessDies(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}})
	b.fail("payments", 4)
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	id := b.ask(kim, "/api/dlq/bulk", `{"do": "discard", "filter": {}, "all": true}`)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	for _, sql := range []string{"SELECT dlq.approve($1, 4, p_actor => 'lee')", `SELECT dlq.take_approval('1 hour')
		WHERE $1::uuid IS NOT NULL`, "SELECT set_config('dlq.approved', $1::text, true)"} {
		_, err = tx.Exec(t.Context(), sql, id)
		require.NoError(t, err, sql)
	}
	// The approved operation runs its first batch.
	_, err = tx.Exec(t.Context(), "SELECT dlq.act_where('discard', '{}', 'kim', p_all => true, p_limit => 3)")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	// Another operator reopens those entries.
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.act_where('reopen', '{}', 'ann', p_all => true)")
	require.NoError(t, err)
	// The process died.
	_, err = b.pool.Exec(t.Context(), "UPDATE dlq.approvals SET taken_until = now() - interval '1 second'")
	require.NoError(t, err)
	done := b.awaitApproval(lee, id, "done")
	require.EqualValues(t, 4, *done.Changed)
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'"))
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_archived'"))
}

// An approved replay resumes from checkpoints or discards them, as the request asked. This is so for one entry and for
// a run.
func TestApprovals_KeepTheRequestedCheckpoint(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"replay"}})
	b.fail("payments", 3)
	for _, sql := range []string{
		"INSERT INTO river_queue (name, created_at, updated_at) VALUES ('payments', now(), now())",
		`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"river:resumable_step": "charge"}'`,
	} {
		_, err := b.pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")

	one := b.text("SELECT min(id::text) FROM dlq.dead_letter_open")
	status, out := b.as(kim, "POST", "/api/dlq/entries/"+one+"/replay", `{"mergePatch": {"fixed": true}}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	id := b.ask(kim, "/api/dlq/entries/"+one+"/replay", `{"mergePatch": {"fixed": true}, "checkpoint": "resume"}`)
	require.Contains(t, string(b.approval(lee, id).Request), `"checkpoint":"resume"`)
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 1}`))
	b.awaitApproval(lee, id, "done")
	b.awaitCount(1, `SELECT count(*) FROM river_job WHERE state = 'available' AND args @> '{"fixed": true}'
		AND metadata ->> 'river:resumable_step' = 'charge'`)

	id = b.ask(kim, "/api/dlq/replay",
		`{"filter": {"status": ["dlq_manual"]}, "mergePatch": {"fixed": true}, "checkpoint": "discard"}`)
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 2}`))
	b.awaitApproval(lee, id, "done")
	b.awaitCount(2, `SELECT count(*) FROM river_job WHERE state = 'available' AND args @> '{"fixed": true}'
		AND NOT metadata ? 'river:resumable_step'`)
}

// A rule for a queue also applies to redeliveries from other queues into that queue.
func TestApprovals_ApplyToRedeliveriesIntoAQueue(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"replay"}, Queues: []string{"pay*"}, Above: 1})
	b.fail("mail", 2)
	kim := b.named("kim", access.Operator, "root")
	const run = `{"filter": {"queue": ["mail"]}, "note": "n", "force": true%s}`
	b.ask(kim, "/api/dlq/replay", fmt.Sprintf(run, `, "queue": "payments"`))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.replay_runs"))
	for _, free := range []string{`, "queue": "other"`, ``} {
		status, out := b.as(kim, "POST", "/api/dlq/replay", fmt.Sprintf(run, free))
		require.Equal(t, http.StatusAccepted, status, out)
		require.Contains(t, out, `"run"`, free)
	}
	// One entry is not above the rule's limit.
	b.fail("post", 1)
	status, out := b.as(kim, "POST", "/api/dlq/replay",
		`{"filter": {"queue": ["post"]}, "note": "n", "force": true, "queue": "payments"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Contains(t, out, `"run"`)
}

// A cancelled job's work is dropped without a dead letter, so approval rules for discards apply to the cancellation.
// They do not apply to a redelivery, whose dead letter stays open. A rule that begins above one dead letter does not
// apply to one job.
func TestApprovals_ApplyToCancelledJobs(t *testing.T) {
	t.Parallel()
	b := approvalsSetup(t, policy.ApprovalRule{Operations: []string{"discard"}, Queues: []string{"pay*"}},
		policy.ApprovalRule{Operations: []string{"discard"}, Above: 1})
	kim, lee := b.named("kim", access.Operator, "root"), b.named("lee", access.Operator, "root")
	insert := func(queue, metadata string) (id string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state,
			scheduled_at, metadata) VALUES ('order.paid', '{}', $1, 3, 'scheduled', now() + interval '1 hour', $2)
			RETURNING id::text`, queue, metadata).Scan(&id))
		return id
	}
	state := func(job string) string { return b.text("SELECT state::text FROM river_job WHERE id = " + job) }
	cancel := func(job string) (int, string) {
		return b.as(kim, "POST", "/api/jobs/"+job+"/cancel", `{"note": "ticket 7"}`)
	}
	const marked = `{"dlq:entry_id": "01999999-0000-7000-8000-000000000000"}`
	redelivery := insert("payments", marked)
	b.exec(`INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id)
		SELECT id, created_at, (metadata ->> 'dlq:entry_id')::uuid FROM river_job WHERE id = ` + redelivery)
	for _, free := range []string{insert("mail", "{}"), redelivery} {
		status, out := cancel(free)
		require.Equal(t, http.StatusOK, status, out)
		require.Contains(t, out, `"state":"cancelled"`)
	}

	job := insert("payments", marked) // the marker is a copy
	id := b.ask(kim, "/api/jobs/"+job+"/cancel", `{"note": "ticket 7"}`)
	require.Equal(t, "scheduled", state(job), "nothing changes before the approval")
	require.Zero(t, b.count("SELECT count(*) FROM dlq.acts WHERE act LIKE '%job "+job+"%'"))
	require.Equal(t, id, b.ask(kim, "/api/jobs/"+job+"/cancel", `{}`), "an equal request waits already")
	status, told, to := b.send(kim, "/jobs/"+job+"/act", url.Values{"do": {"cancel"}})
	require.Equal(t, []any{http.StatusSeeOther, "/approvals/" + id}, []any{status, to}, told)
	_, page := b.browse(lee, "/approvals/"+id)
	has(t, page, "kim requests to cancel job "+job+".")
	has(t, page, `<a href="/jobs/`+job+`">job `+job+`</a>`)
	_, page = b.browse(lee, "/approvals")
	has(t, page, "<b>Cancel</b> job "+job)

	require.Equal(t, http.StatusForbidden, b.decide(kim, id, "approve", `{"expect": 1}`))
	require.Equal(t, http.StatusConflict, b.decide(lee, id, "approve", `{"expect": 0}`))
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 1}`))
	b.awaitApproval(kim, id, "done")
	require.Equal(t, "cancelled", state(job))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.acts WHERE act = 'cancelled job `+job+`' AND actor = 'kim'
		AND note = 'ticket 7' AND origin LIKE '%approved by lee'`))
	_, page = b.browse(kim, "/approvals/"+id)
	has(t, page, "lee approved it, and it was done.")

	// The job may end before the approval. A caller whose scope excludes the job's queue gets 404, as for a job that does
	// not exist.
	ended := insert("payments", "{}")
	id = b.ask(kim, "/api/jobs/"+ended+"/cancel", `{}`)
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = " + ended)
	require.Equal(t, http.StatusOK, b.decide(lee, id, "approve", `{"expect": 1}`))
	require.Contains(t, b.awaitApproval(kim, id, "failed").Problem, "cannot cancel from completed")
	foreign := b.named("pat", access.Operator, "root", "mail")
	status, out := b.as(foreign, "POST", "/api/jobs/"+insert("payments", "{}")+"/cancel", `{}`)
	require.Equal(t, http.StatusNotFound, status, out)
}
