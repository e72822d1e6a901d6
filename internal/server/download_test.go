package server_test

import (
	"encoding/csv"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
)

// A download from the console contains the entries that the viewer's filter selects, in the viewer's scope, in both
// formats. The audit trail records each download. The reason of a refusal is shown on the page with the form.
func TestDownload_HasWhatMatches(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	operator := b.token(access.Operator, access.Scope{{Queues: []string{"pay_eu"}}})
	status, page := b.browse(operator, "/dead-letters/export?q=kind:order.*")
	require.Equal(t, http.StatusOK, status)
	has(t, page, "Download 1 dead letter")
	status, page = b.browse(b.token(access.Reader, nil), "/dead-letters/export")
	require.Equal(t, http.StatusForbidden, status, page)

	status, file, _ := b.send(operator, "/dead-letters/export", url.Values{"format": {"csv"}})
	require.Equal(t, http.StatusOK, status, file)
	rows, err := csv.NewReader(strings.NewReader(file)).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 3, "a head, and the entries in scope")
	status, file, _ = b.send(operator, "/dead-letters/export",
		url.Values{"format": {"ndjson"}, "id": {b.ids["pay_eu/order.paid"], b.ids["mailqueue/order.paid"]}})
	require.Equal(t, http.StatusOK, status, file)
	var entry struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(file), &entry))
	require.Equal(t, b.ids["pay_eu/order.paid"], entry.ID)
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.acts WHERE subject = 'export' AND act = 'exported'"))

	for form, want := range map[string]string{
		"reveal=yes": "requires a note", "format=xml": "expected value to be one of", "q=nothing:here": "nothing",
	} {
		values, err := url.ParseQuery(form + "&from=/dead-letters/export")
		require.NoError(t, err)
		status, told, to := b.send(operator, "/dead-letters/export", values)
		require.Equal(t, []any{http.StatusSeeOther, "/dead-letters/export"}, []any{status, to}, told)
		require.Contains(t, told, want)
	}
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.acts WHERE subject = 'export'"))

	status, file = b.browse(operator, "/chart/backlog.csv")
	require.Equal(t, http.StatusOK, status)
	require.True(t, strings.HasPrefix(file, "from,"), file)
	status, file = b.browse(operator, "/chart/backlog.svg")
	require.Equal(t, http.StatusOK, status)
	require.True(t, strings.HasPrefix(file, `<svg xmlns="http://www.w3.org/2000/svg"`), file)
	status, _ = b.browse(operator, "/chart/other.csv")
	require.Equal(t, http.StatusNotFound, status)

	// A chart of a failure group can be downloaded only in the caller's scope.
	for kind, want := range map[string]int{"csv": http.StatusOK, "svg": http.StatusOK, "png": http.StatusNotFound} {
		status, file = b.browse(operator, "/groups/pay_eu/same/chart/failures."+kind)
		require.Equal(t, want, status, file)
	}
	status, _ = b.browse(operator, "/groups/mailqueue/same/chart/failures.csv")
	require.Equal(t, http.StatusNotFound, status)
}
