package delivery

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/source"
)

// A record with a null value deletes its key in a compacted topic. So null is published only if the record's value was
// null, and not if the value was erased.
func TestValueOf_RejectsErasedValue(t *testing.T) {
	t.Parallel()
	for _, form := range []string{source.FormJSON, source.FormText, source.FormBinary, source.FormDecoded} {
		_, err := valueOf(&dbsqlc.RecordOfJobRow{Form: form}, nil)
		require.ErrorContains(t, err, "erased", form)
		value, err := valueOf(&dbsqlc.RecordOfJobRow{Form: form, Value: []byte{}}, nil)
		require.NoError(t, err)
		require.NotNil(t, value)
	}
	value, err := valueOf(&dbsqlc.RecordOfJobRow{Form: source.FormNull}, nil)
	require.NoError(t, err)
	require.Nil(t, value)
}
