package console

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGroupOrders_BeginAtTheFirstPage checks that the links that sort the groups omit the cursor, which is valid for
// one order only, and that exactly one column is marked.
func TestGroupOrders_BeginAtTheFirstPage(t *testing.T) {
	t.Parallel()
	const address = "/groups?cursor=x&order=owner&queue=payments"
	in := &request{Request: httptest.NewRequest(http.MethodGet, address, http.NoBody)}
	sorted := map[string]string{}
	for _, o := range in.groupOrders("owner") {
		require.Equal(t, "/groups?order="+o.Name+"&queue=payments", o.Path)
		if o.Sort != "" {
			sorted[o.Column] = o.Sort
		}
	}
	require.Equal(t, map[string]string{"Owner": "ascending"}, sorted)
}

// TestSpark_IsSmall checks that the trends of a page of 50 young groups take less than a third of the page's size
// limit.
func TestSpark_IsSmall(t *testing.T) {
	t.Parallel()
	minutes := make([]int64, 61)
	for i := range minutes {
		minutes[i] = int64(i % 3)
	}
	require.Less(t, len(spark(minutes)), 2000)
}
