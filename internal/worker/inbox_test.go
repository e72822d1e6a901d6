package worker

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// A worker that found nothing yet does not look past what comes first.
func TestInbox_thatWasEmpty(t *testing.T) {
	t.Parallel()
	var i inbox
	i.saw(i.next(time.Now()), nil, time.Minute, false)
	require.Equal(t, uuid.Nil, i.next(time.Now()).after)
}
