package worker

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// A worker that has found nothing yet does not skip the first failures.
func TestInbox_EmptyScanSkipsNoFailure(t *testing.T) {
	t.Parallel()
	var i inbox
	i.record(i.next(time.Now()), nil, time.Minute, false)
	require.Equal(t, uuid.Nil, i.next(time.Now()).after)
}
