package server_test

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
)

// The audit trail, grouped by operation, has one row for each operation, and the operation's page lists its entries.
// Pages follow each other without a gap. A caller sees only operations in the caller's scope.
func TestAudit_GroupsByOperation(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	admin := b.token(access.Admin, nil)
	status, out := b.as(admin, "POST", "/api/dlq/bulk", `{"do": "tag", "tags": ["urgent"], "filter": {"q": "kind:order.*"}, "note": "ticket 7"}`)
	require.Equal(t, http.StatusOK, status, out)
	type row struct {
		Reason, Note, Operation string
		EntryID                 *string
		Detail                  struct{ Entries, Changed int }
	}
	list := func(token, query string) (rows []row) {
		cursor := ""
		for {
			status, out := b.as(token, "GET", "/api/dlq/audit?people=true&limit=2&grouped=true&"+query+"&cursor="+cursor, "")
			require.Equal(t, http.StatusOK, status, out)
			var page struct {
				Moves []row
				Next  string
			}
			require.NoError(t, json.Unmarshal([]byte(out), &page))
			rows = append(rows, page.Moves...)
			if cursor = page.Next; cursor == "" {
				return rows
			}
		}
	}
	rows := list(admin, "")
	var operations []string
	for _, r := range rows {
		if r.Operation != "" {
			require.Nil(t, r.EntryID)
			operations = append(operations, r.Operation)
		}
	}
	slices.Sort(operations)
	require.Len(t, slices.Compact(operations), b.count("SELECT count(*) FROM dlq.operations"))
	require.Equal(t, row{Reason: "tag", Note: "ticket 7", Operation: rows[0].Operation, Detail: struct{ Entries, Changed int }{2, 2}},
		rows[0])
	require.Len(t, list(admin, "text=ticket"), 1)
	limited := list(b.token(access.Admin, access.Scope{{Queues: []string{"pay_eu"}}}), "")
	for _, r := range limited {
		require.True(t, r.Operation == "" || r.EntryID != nil, "a caller with a scope sees each move: %v", r)
	}
	require.True(t, slices.ContainsFunc(limited, func(r row) bool { return r.Operation == b.done["pay_eu"] }))
	require.Len(t, list(admin, "to=dlq_manual&queue=pay_eu"), b.count(`SELECT count(*) FROM dlq.audit(
		'{"people": true, "to": "dlq_manual", "queue": "pay_eu"}', 1000)`), "with a field of entries, each has a row")

	_, page := b.browse(admin, "/audit")
	has(t, page, "tagged 2 dead letters urgent")
	has(t, page, `href="/operations/`+rows[0].Operation+`"`)
	has(t, page, "Today")
	_, page = b.browse(admin, "/audit?people=true&each=true")
	require.GreaterOrEqual(t, strings.Count(page, "ticket 7"), 2, "a row for each entry")
	_, page = b.browse(admin, "/audit?people=true&day=2020-02-02")
	has(t, page, "Sunday, 2 February 2020")
}

// Operators order the saved views that they see. A shared view has the same place for everyone.
func TestViews_AreOrderedByATeam(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	kim, lee := b.token(access.Operator, nil), b.token(access.Operator, nil)
	for _, name := range []string{"a", "b", "c"} {
		status, out := b.as(kim, "PUT", "/api/dlq/views/"+name, `{"query": "queue:pay_eu", "shared": true}`)
		require.Equal(t, http.StatusOK, status, out)
	}
	order := func(token string) (names []string) {
		_, out := b.as(token, "GET", "/api/dlq/views", "")
		var list struct{ Views []struct{ Name string } }
		require.NoError(t, json.Unmarshal([]byte(out), &list))
		for _, v := range list.Views {
			names = append(names, v.Name)
		}
		return names
	}
	status, out := b.as(lee, "POST", "/api/dlq/views-order", `{"names": ["c", "b"]}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, []string{"c", "b", "a"}, order(lee))
	require.Equal(t, []string{"c", "b", "a"}, order(kim))
	status, out = b.as(b.token(access.Reader, nil), "POST", "/api/dlq/views-order", `{"names": ["a"]}`)
	require.Equal(t, http.StatusForbidden, status, out)
	elsewhere := b.token(access.Operator, access.Scope{{Queues: []string{"mailqueue"}}})
	status, out = b.as(elsewhere, "POST", "/api/dlq/views-order", `{"names": ["a"]}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Equal(t, []string{"c", "b", "a"}, order(kim), "views outside of the scope keep their places")
	status, _, to := b.send(kim, "/views/a/move", url.Values{"to": {"up"}})
	require.Equal(t, []any{http.StatusSeeOther, "/dead-letters"}, []any{status, to})
	require.Equal(t, []string{"c", "a", "b"}, order(lee))
}
