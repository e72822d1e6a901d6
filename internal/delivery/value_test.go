package delivery

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// A record with a null value deletes its key in a compacted topic. So null is published only if the record's value was
// null, and not if the value was erased.
func TestValueOf_RejectsErasedValue(t *testing.T) {
	t.Parallel()
	for _, form := range []string{source.FormJSON, source.FormText, source.FormBinary, source.FormDecoded} {
		_, err := valueOf(&dbsqlc.RecordOfJobRow{Form: form}, &policy.TopicSource{}, nil)
		require.ErrorContains(t, err, "erased", form)
		value, err := valueOf(&dbsqlc.RecordOfJobRow{Form: form, Value: []byte{}}, &policy.TopicSource{}, nil)
		require.NoError(t, err)
		require.NotNil(t, value)
	}
	value, err := valueOf(&dbsqlc.RecordOfJobRow{Form: source.FormNull}, &policy.TopicSource{}, nil)
	require.NoError(t, err)
	require.Nil(t, value)
}

// An edit can be encoded only with the schema whose id is in the value.
func TestValueOf_RejectsEditWithoutSchema(t *testing.T) {
	t.Parallel()
	edited := []byte(`{"a":1}`)
	withRegistry := &policy.TopicSource{Registry: "main"}
	_, err := valueOf(&dbsqlc.RecordOfJobRow{Form: source.FormNull, Edited: true}, withRegistry, edited)
	require.ErrorContains(t, err, "no schema is known")
	_, err = valueOf(&dbsqlc.RecordOfJobRow{Form: source.FormDecoded, Edited: true}, withRegistry, edited)
	require.ErrorContains(t, err, "was erased")
	_, err = valueOf(&dbsqlc.RecordOfJobRow{Form: source.FormBinary, Edited: true, Value: edited}, withRegistry, edited)
	require.ErrorContains(t, err, "binary")
}
