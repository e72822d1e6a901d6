package server_test

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/filter"
)

// A filter text chooses the same entries in lists, exports, bulk actions, replays and SQL.
func TestFilter_SelectsTheSameEntriesEverywhere(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	admin := b.token(access.Admin, nil)
	body := func(text, rest string) string {
		q, err := json.Marshal(text)
		require.NoError(t, err)
		return `{"filter": {"q": ` + string(q) + `}` + rest + `}`
	}
	for text, want := range map[string][]string{
		"": {
			"pay_eu/order.paid", "pay_eu/user.mail", "mailqueue/order.paid",
			"mailqueue/user.mail",
		},
		"queue:pay_eu":                                {"pay_eu/order.paid", "pay_eu/user.mail"},
		"status:manual kind:order.*":                  {"pay_eu/order.paid", "mailqueue/order.paid"},
		`"SECRET of" mailqueue`:                       {"mailqueue/order.paid", "mailqueue/user.mail"},
		`payload.secret:"payload of pay_euuser.mail"`: {"pay_eu/user.mail"},
		"age:>2d":                          nil,
		"id:" + b.ids["pay_eu/order.paid"]: {"pay_eu/order.paid"},
		b.ids["pay_eu/order.paid"]:         {"pay_eu/order.paid"},
	} {
		var ids []string
		for _, name := range want {
			ids = append(ids, b.ids[name])
		}
		idsOf := func(out string) (found []string) {
			for _, id := range b.ids {
				if strings.Contains(out, `"id":"`+id+`"`) {
					found = append(found, id)
				}
			}
			return found
		}
		status, out := b.as(admin, "GET", "/api/dlq/entries?q="+url.QueryEscape(text), "")
		require.Equal(t, http.StatusOK, status, out)
		require.ElementsMatch(t, ids, idsOf(out), text)
		status, out = b.as(admin, "POST", "/api/dlq/export", body(text, ""))
		require.Equal(t, http.StatusOK, status, out)
		require.ElementsMatch(t, ids, idsOf(out), text)
		var counted struct {
			Chosen  int
			Preview struct{ Total int }
		}
		status, out = b.as(admin, "POST", "/api/dlq/bulk", body(text, `, "do": "discard", "dryRun": true`))
		require.Equal(t, http.StatusOK, status, out)
		require.NoError(t, json.Unmarshal([]byte(out), &counted))
		require.Len(t, ids, counted.Chosen, text)
		status, out = b.as(admin, "POST", "/api/dlq/replay", body(text, `, "dryRun": true, "all": true`))
		require.Equal(t, http.StatusOK, status, out)
		require.NoError(t, json.Unmarshal([]byte(out), &counted))
		require.Len(t, ids, counted.Preview.Total, text)
		chosen, err := filter.Parse(text, "")
		require.NoError(t, err)
		rows, err := b.pool.Query(t.Context(), "SELECT id::text FROM dlq.find($1)", chosen.JSON())
		require.NoError(t, err)
		found := []string{}
		for rows.Next() {
			var id string
			require.NoError(t, rows.Scan(&id))
			found = append(found, id)
		}
		require.NoError(t, rows.Err())
		require.ElementsMatch(t, ids, found, text)
	}

	// A page has a count if the request asks for one.
	var counted struct {
		Count struct {
			Entries int
			AtLeast bool
		}
	}
	_, out := b.as(admin, "GET", "/api/dlq/entries?limit=1&count=true&q=queue:pay_eu", "")
	require.NoError(t, json.Unmarshal([]byte(out), &counted))
	require.Equal(t, 2, counted.Count.Entries)
	require.False(t, counted.Count.AtLeast)
	_, out = b.as(admin, "GET", "/api/dlq/entries?countOnly=true&q=queue:pay_eu", "")
	require.Contains(t, out, `"entries":[]`)
	require.Contains(t, out, `"count":{"entries":2}`)

	// "me" is the caller.
	var status int
	status, out = b.as(admin, "POST", "/api/dlq/bulk", body("queue:pay_eu", `, "do": "assign", "assignee": "kim"`))
	require.Equal(t, http.StatusOK, status, out)
	_, err := b.tokens.Create(t.Context(), &access.Token{Name: "nobody-else", Role: access.Admin}, "test")
	require.NoError(t, err)
	secret, err := b.tokens.Create(t.Context(), &access.Token{Name: "kim", Role: access.Admin}, "test")
	require.NoError(t, err)
	_, out = b.as(secret, "GET", "/api/dlq/entries?q=assigned:me", "")
	require.Equal(t, 2, strings.Count(out, `"queue":"pay_eu"`), out)
	_, out = b.as(admin, "GET", "/api/dlq/entries?q=assigned:me", "")
	require.NotContains(t, out, "pay_eu")

	// An unknown or repeated term is an error with its position, and nothing is changed.
	status, out = b.as(admin, "GET", "/api/dlq/entries?q="+url.QueryEscape("queue:pay_eu qeueu:x"), "")
	require.Equal(t, http.StatusUnprocessableEntity, status)
	for _, want := range []string{
		"qeueu:x (at 14): unknown field qeueu; did you mean queue?", `"location":"query.q"`,
		`"from":13`, `"to":20`, `"suggest":["queue:x"`,
	} {
		require.Contains(t, out, want)
	}
	status, out = b.as(admin, "POST", "/api/dlq/bulk", body("class:lost", `, "do": "discard"`))
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Contains(t, out, `"location":"body.filter.q"`)
	status, out = b.as(admin, "GET", "/api/dlq/entries?queue=pay_eu&q=queue:pay_eu", "")
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Contains(t, out, "queue: set both in the text and as a field")
	status, _ = b.as(admin, "GET", "/api/dlq/entries?q="+strings.Repeat("x", 5000), "")
	require.Equal(t, http.StatusUnprocessableEntity, status)
	status, out = b.as(admin, "POST", "/api/dlq/bulk", body(`kind:*`, `, "do": "discard"`))
	require.Equal(t, http.StatusUnprocessableEntity, status)
	require.Contains(t, out, "matches every entry")

	// A caller who does not see payloads cannot search them.
	reader := b.token(access.Reader, nil)
	for text, want := range map[string]int{
		"payload.secret:x": http.StatusForbidden, `payload:{"secret":"x"}`: http.StatusForbidden,
		"secret": http.StatusOK, "queue:pay_eu": http.StatusOK,
	} {
		status, out = b.as(reader, "GET", "/api/dlq/entries?q="+url.QueryEscape(text), "")
		require.Equal(t, want, status, out)
	}
}

// Completions are fields, and values of entries in the caller's scope.
func TestFilter_CompletesFieldsAndValues(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	_, err := b.pool.Exec(t.Context(), `SELECT dlq.act_on('assign', ARRAY(SELECT id FROM dlq.dead_letter_queue
		WHERE queue = 'mailqueue'), 'kim', NULL, '{"assignee": "ann"}'),
		dlq.act_on('tag', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE queue = 'pay_eu'), 'kim', NULL,
			'{"tags": ["vip"]}')`)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), `UPDATE dlq.dead_letter_open SET ordering_key = 'order-81', subscriber_id = 'cus_81'
		WHERE queue = 'mailqueue'`)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), `UPDATE dlq.failure_groups SET fingerprint = CASE queue WHEN 'pay_eu' THEN '3f2a'
		ELSE '3f2b' END || substr(fingerprint, 5) WHERE (queue, fingerprint) IN (SELECT queue, min(fingerprint)
			FROM dlq.failure_groups GROUP BY queue);
		INSERT INTO dlq.failure_groups (queue, fingerprint, title, first_seen, last_seen)
		VALUES ('pay_eu', '3f2a000000000001', 'secret of pay_euorder.paid', now(), now()),
			('mailqueue', '3f2b000000000001', 'x', now(), now())`)
	require.NoError(t, err)
	complete := func(token, q string) (reading struct {
		From, To    int
		Terms       []filter.Term
		Completions []struct{ Insert, Name, Doc string }
	}, inserts string,
	) {
		status, out := b.as(token, "GET", "/api/dlq/filter?q="+url.QueryEscape(q), "")
		require.Equal(t, http.StatusOK, status, out)
		require.NoError(t, json.Unmarshal([]byte(out), &reading))
		for _, c := range reading.Completions {
			inserts += c.Insert + " "
		}
		return reading, inserts
	}
	operator := b.token(access.Operator, nil)
	payments := b.token(access.Operator, access.Scope{{Queues: []string{"pay*"}}})
	orders := b.token(access.Operator, access.Scope{{Kinds: []string{"order.*"}}})
	reader := b.token(access.Reader, nil)
	for _, c := range []struct{ token, q, want string }{
		{operator, "st", "status: strategy: stage: "},
		{operator, "status:m", "manual "},
		{operator, "status:manual queue:", "mailqueue pay_eu "},
		{operator, "queue:pay_eu,qu", "mailqueue "}, // pay_eu is in the filter already
		{payments, "queue:", "pay_eu "},
		{orders, "queue:", "mailqueue pay_eu "},
		{operator, "kind:", "order.paid user.mail "},
		{orders, "kind:", "order.paid "},
		{operator, "assigned:", "me nobody ann kim "},
		{payments, "assigned:", "me nobody kim "},
		{operator, "tag:v", "vip "},
		{reader, "tag:v", "vip "},
		{operator, "key:", "order-81 "},
		{payments, "key:", ""},
		{orders, "subscriber:81", "cus_81 "},
		{operator, "message:", ""},
		{operator, `"timed`, ""},
		{operator, "pay", "payload. "},
	} {
		_, got := complete(c.token, c.q)
		require.Equal(t, c.want, got, c.q)
	}
	reading, _ := complete(operator, "group:3f2a0")
	require.Len(t, reading.Completions, 1)
	require.Equal(t, "pay_eu: secret of pay_euorder.paid", reading.Completions[0].Doc)
	require.Equal(t, []int{6, 11}, []int{reading.From, reading.To})
	_, got := complete(payments, "group:3f2b")
	require.Empty(t, got)
	_, got = complete(orders, "group:3f2")
	require.Empty(t, got)
	reading, _ = complete(operator, "qeueu:x queue:pay_eu")
	require.Contains(t, reading.Terms[0].Problem, "did you mean queue?")
	require.Equal(t, []string{"pay_eu"}, reading.Terms[1].Values)

	// With masking, tags, ordering keys and subscribers may contain masked values.
	_, err = b.pool.Exec(t.Context(), `SELECT dlq.protect(dlq.sensitive_columns(), '{"patterns": ["tokens"]}')`)
	require.NoError(t, err)
	for _, q := range []string{"tag:v", "key:", "subscriber:"} {
		_, got = complete(operator, q)
		require.Empty(t, got, q)
	}
}
