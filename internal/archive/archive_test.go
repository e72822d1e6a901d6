package archive_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
)

// Arrays that go to the database are bounded in bytes: 1,000 large entries exceed a jsonb array
// (256 MB), and then the archive could be neither erased nor restored.
func TestBatches_AreBoundedInBytes(t *testing.T) {
	t.Parallel()
	cold, err := archive.Open(t.Context(), t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { _ = cold.Close() })
	const large, small = 40, 2500
	unit := cold.NewUnit(archive.Manifest{Unit: "u"})
	for i := range large + small {
		size := 1 << 20
		if i >= large {
			size = 10
		}
		require.NoError(t, unit.Entry(t.Context(), fmt.Sprintf(`{"n": %d, "blob": %q}`, i, strings.Repeat("x", size)),
			time.Now()))
	}
	m, err := unit.Close(t.Context())
	require.NoError(t, err)
	n, batches := 0, 0
	require.NoError(t, cold.Batches(t.Context(), m, func(batch []json.RawMessage) error {
		size := 0
		for _, line := range batch {
			size += len(line)
		}
		require.Less(t, size, 32<<20)
		require.LessOrEqual(t, len(batch), 1000)
		n, batches = n+len(batch), batches+1
		return nil
	}))
	require.Equal(t, large+small, n)
	require.LessOrEqual(t, batches, 6)
}
