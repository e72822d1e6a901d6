package console_test

import (
	"encoding/csv"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestChart_Downloads follows the links of each chart without scripts. The CSV has the numbers of the page's table.
func TestChart_Downloads(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 3)
	o.exec("SELECT dlq.refresh_rollups()")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_open LIMIT 1")
	b := o.tab()
	b.script(false)
	for _, path := range []string{"/", group, group + "?over=24h"} {
		b.open(path)
		links, _ := b.value(`[...document.querySelectorAll(".chart-files a")].filter(a => a.checkVisibility())
			.map(a => a.href)`).([]any)
		require.Len(t, links, 2, path)
		kind, table := o.file(links[0])
		require.Equal(t, "text/csv; charset=utf-8", kind)
		rows, err := csv.NewReader(strings.NewReader(table)).ReadAll()
		require.NoError(t, err)
		shown, _ := b.value(`document.querySelectorAll(".chart-figure tbody tr").length`).(float64)
		require.Len(t, rows, int(shown)+1, path)
		failed := 0 // leave out the last row, which may be of a later minute
		for _, row := range rows[1:] {
			n, err := strconv.Atoi(row[1])
			require.NoError(t, err, path)
			failed += n
		}
		require.Equal(t, 3, failed, path)
		kind, image := o.file(links[1])
		require.Equal(t, "image/svg+xml", kind)
		require.True(t, strings.HasPrefix(image, "<svg xmlns="), path)
	}
}

// file returns the type and the content of a file that a page links to.
func (o *testServer) file(address any) (kind, content string) {
	o.Helper()
	text, _ := address.(string)
	request, err := http.NewRequestWithContext(o.Context(), http.MethodGet, text, nil)
	require.NoError(o, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(o, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(o, err)
	require.Equal(o, http.StatusOK, response.StatusCode, string(raw))
	return response.Header.Get("Content-Type"), string(raw)
}
