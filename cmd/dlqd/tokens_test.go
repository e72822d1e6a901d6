package main_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestTokens creates the first token with a command on the server. Commands that call the API take the token from a
// variable or a file.
func TestTokens(t *testing.T) {
	url, config := postgrestest.URL(t), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(config, "access.yaml"), []byte("authentication: [tokens]\n"), 0o600))
	s := serve(t, "--database-url", url, "--config-dir", config)
	api := []string{"--api-url", s.api}
	tokens := func(args ...string) string {
		t.Helper()
		return ok(t, append(append([]string{"tokens"}, args...), "--database-url", url)...)
	}

	t.Setenv("DLQD_TOKEN", "")
	_, stderr, _ := run(t, append([]string{"list"}, api...)...)
	require.Contains(t, stderr, "dlqd tokens create")
	secret := strings.TrimSpace(tokens("create", "--name", "kim", "--role", "admin", "--note", "the first"))
	t.Setenv("DLQD_TOKEN", secret)
	require.Contains(t, ok(t, append([]string{"list"}, api...)...), "STATUS")
	file := writeFile(t, secret+"\n")
	t.Setenv("DLQD_TOKEN", "")
	require.Contains(t, ok(t, append([]string{"list", "--token-file", file}, api...)...), "STATUS")
	_, stderr, _ = run(t, append([]string{"list", "--token-file", file + ".none"}, api...)...)
	require.Contains(t, stderr, "--token-file")

	listed := tokens("list")
	require.NotContains(t, listed, secret)
	require.Contains(t, listed, "the first")
	id := strings.Fields(strings.Split(listed, "\n")[1])[0]
	next := strings.TrimSpace(tokens("rotate", id, "--keep", "0s"))
	require.NotEqual(t, secret, next)
	require.Contains(t, tokens("list"), "revoked")
	require.Contains(t, ok(t, append([]string{"audit", "--token-file", writeFile(t, next)}, api...)...), "tokens: rotated")
}

func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}
