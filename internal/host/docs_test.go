package host_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHost_DocumentsFunctionsThatLockJobs checks the lists of functions that lock jobs in docs/host.md: each function
// stands under the lowest role that may call it.
func TestHost_DocumentsFunctionsThatLockJobs(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	page, err := os.ReadFile("../../docs/host.md")
	require.NoError(t, err)
	may := func(role, function string) bool {
		t.Helper()
		all := h.strings(`SELECT has_function_privilege($1, p.oid, 'EXECUTE')::text FROM pg_proc p
			WHERE p.pronamespace = 'dlq'::regnamespace AND p.proname = $2`, role, function)
		require.NotEmpty(t, all, "there is no function %s", function)
		return all[0] == "true"
	}
	for role, line := range map[string]string{
		"dlq_operator": "of a `dlq_operator`: (.*)", "dlq_admin": "of a `dlq_admin`, too: (.*)",
		"": "of the role that owns schema `dlq`: (.*)",
	} {
		found := regexp.MustCompile("- " + line).FindSubmatch(page)
		require.NotNil(t, found, line)
		functions := regexp.MustCompile("`dlq\\.(\\w+)`").FindAllSubmatch(found[1], -1)
		require.NotEmpty(t, functions)
		for _, function := range functions {
			name := string(function[1])
			require.Equal(t, role == "dlq_operator", may("dlq_operator", name), name)
			require.Equal(t, role != "", may("dlq_admin", name), name)
		}
	}
}
