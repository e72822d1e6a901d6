package delivery

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/riverdlq"
)

// What says that a request came too early, or to what is locked, says nothing against its destination.
func TestIsWell_AnswersAboutOneRequest(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]bool{402: true, 408: false, 423: true, 425: true, 429: true, 500: false, 503: false} {
		require.Equal(t, want, isWell(&riverdlq.Error{Context: map[string]any{"status": status}}), status)
	}
}
