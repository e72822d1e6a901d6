// Package policytest creates policies for tests.
package policytest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
)

// Destination is the URL of the only destination of a policy that defines no queues. No server listens on it.
const Destination = "http://127.0.0.1:1/"

// Files maps the names of a policy's files, without extension, to their contents.
type Files map[string]string

// Dir writes the files to a temporary directory and returns its path.
func Dir(tb testing.TB, files Files) string {
	tb.Helper()
	dir := tb.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name+".yaml")
		require.NoError(tb, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(tb, os.WriteFile(path, []byte(text), 0o600))
	}
	return dir
}

// Load returns the policy of the files.
func Load(tb testing.TB, files Files) *policy.Policy {
	tb.Helper()
	p, err := policy.Load(policy.Source{Dir: Dir(tb, files), Destination: Destination})
	require.NoError(tb, err)
	return p
}
