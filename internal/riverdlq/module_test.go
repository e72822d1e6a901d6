package riverdlq

import (
	"bytes"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// dlqd's module cannot require the module of riverdlq, which has no tagged version yet. Until it has one, this package
// is a copy of riverdlq, so that dlqd reads and writes the same metadata.
func TestCopy_EqualsPublicPackage(t *testing.T) {
	t.Parallel()
	public, err := os.ReadFile("../../riverdlq/riverdlq.go")
	require.NoError(t, err)
	copied, err := os.ReadFile("riverdlq.go")
	require.NoError(t, err)
	_, copied, found := bytes.Cut(copied, []byte("\n\n")) // the header
	require.True(t, found)
	require.Equal(t, string(public), string(copied), `change riverdlq/riverdlq.go, then run "make generate"`)
}

// An application that requires riverdlq gets no modules but River's. Only the tests need River's driver and pgx.
func TestModule_RequiresRiverAlone(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../riverdlq/go.mod")
	require.NoError(t, err)
	require.NotContains(t, string(raw), "replace") // "go install …@version" refuses a module with a replace directive
	direct := regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(string(raw), -1)
	require.NotEmpty(t, direct)
	for _, module := range direct {
		require.Regexp(t, `^github\.com/(riverqueue/river(/.+)?|jackc/pgx/v5)$`, module[1])
	}
	require.NoFileExists(t, "../../go.work") // "go tool -modfile" does not work in a workspace
	raw, err = os.ReadFile("../../go.mod")
	require.NoError(t, err)
	require.NotContains(t, string(raw), "dlqd/riverdlq")
}
