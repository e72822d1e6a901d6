package main_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestClient_RefusesRedirects checks that a client sends a token only to the address that the user named. It does not
// follow a redirect to another host, or from https to http.
func TestClient_RefusesRedirects(t *testing.T) {
	t.Parallel()
	requests := make(chan string, 10)
	elsewhere := httptest.NewServer(
		http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { requests <- r.Header.Get("Authorization") }))
	defer elsewhere.Close()
	for _, status := range []int{http.StatusMovedPermanently, http.StatusSeeOther, http.StatusTemporaryRedirect} {
		for _, to := range []string{elsewhere.URL, ""} { // "": the same host
			at := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/again" {
					requests <- "the same host"
				}
				w.Header().Set("Location", to+"/again?token=hush")
				w.WriteHeader(status)
			}))
			for _, args := range [][]string{{"list"}, {"stats"}, {"discard", "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"}} {
				cmd := exec.CommandContext(t.Context(), program, append(args, "--api-url", at.URL)...)
				cmd.Env = append(os.Environ(), "DLQD_TOKEN=dlqd_hush")
				out, err := cmd.CombinedOutput()
				require.Error(t, err, string(out))
				require.Contains(t, string(out), "--api-url redirects to http://127.0.0.1:")
				require.NotContains(t, string(out), "hush")
			}
			at.Close()
		}
	}
	require.Empty(t, requests, "the client followed a redirect")
}
