package main_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

func TestVersion_NamesItsParts(t *testing.T) {
	t.Parallel()
	var v struct {
		Version, Commit, Go string
		Schema              int64
		River               struct {
			Library string
			Tested  []string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(ok(t, "version", "--json")), &v))
	schema, err := postgres.LatestVersion()
	require.NoError(t, err)
	require.Equal(t, schema, v.Schema)
	require.True(t, strings.HasPrefix(v.Go, "go1."), v.Go)
	require.Contains(t, v.River.Tested, v.River.Library, `"make riverdlq-matrix" tests the River that dlqd requires`)
	require.Equal(t, "dlqd version "+v.Version+"\n", ok(t, "--version"))
	text := ok(t, "version")
	for _, part := range append(v.River.Tested, v.Version, v.Commit, v.Go, v.River.Library) {
		require.Contains(t, text, part)
	}
}

// TestVersion_IsUnknownWithoutGit builds dlqd without data from Git, as from an archive of the source.
func TestVersion_IsUnknownWithoutGit(t *testing.T) {
	t.Parallel()
	built := filepath.Join(t.TempDir(), "dlqd")
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-buildvcs=false", "-o", built, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as "make build" does
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	text, err := exec.CommandContext(t.Context(), built, "--version").Output()
	require.NoError(t, err)
	require.Equal(t, "dlqd version unknown\n", string(text))
}
