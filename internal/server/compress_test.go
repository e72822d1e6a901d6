package server_test

import (
	"compress/gzip"
	"io"
	"net/http"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Pages and static files are compressed for browsers. Streams are not, and neither are pages that another site
// makes the browser load: see mayCompress.
func TestPages_AreCompressed(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	get := func(path, accepts, site string) (encoding, body string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.base+path, http.NoBody)
		require.NoError(t, err)
		request.Header.Set("Accept", "text/html")
		request.Header.Set("Accept-Encoding", accepts)
		request.Header.Set("Sec-Fetch-Site", site)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode, path)
		encoding = response.Header.Get("Content-Encoding")
		if path == "/events" {
			return encoding, ""
		}
		var reader io.Reader = response.Body
		if encoding == "gzip" {
			reader, err = gzip.NewReader(response.Body)
			require.NoError(t, err)
		}
		raw, err := io.ReadAll(reader)
		require.NoError(t, err)
		return encoding, string(raw)
	}
	for _, site := range []string{"same-origin", "none"} {
		encoding, page := get("/docs", "br;q=1.0, gzip;q=0.8", site)
		require.Equal(t, "gzip", encoding, site)
		has(t, page, "/api/dlq/entries")
	}
	for _, site := range []string{"cross-site", "same-site", ""} {
		encoding, page := get("/docs", "gzip", site)
		require.Empty(t, encoding, site)
		has(t, page, "/api/dlq/entries")
	}
	for _, accepts := range []string{"identity", "br", "gzip;q=0", "gzip; q=0.000"} {
		encoding, _ := get("/docs", accepts, "same-origin")
		require.Empty(t, encoding, accepts)
	}
	encoding, _ := get("/events", "gzip", "same-origin")
	require.Empty(t, encoding)

	_, page := get("/docs", "gzip", "none")
	script := regexp.MustCompile(`/static/[0-9a-f]+/console.js`).FindString(page)
	encoding, packed := get(script, "gzip", "cross-site")
	require.Equal(t, "gzip", encoding)
	encoding, plain := get(script, "identity", "cross-site")
	require.Empty(t, encoding)
	require.Equal(t, plain, packed)
}
