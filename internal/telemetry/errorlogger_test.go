package telemetry

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A failure that persists is logged at once, and then at growing intervals. After a time without failures, the next
// failure is logged at once.
func TestErrorLogger_LogsPersistentErrorsRarely(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := &errorLogger{logger: slog.New(slog.NewTextHandler(&log, nil))}
	now := time.Now()
	lines := func(d time.Duration) int {
		log.Reset()
		for end := now.Add(d); now.Before(end); now = now.Add(5 * time.Second) {
			l.handle(errors.New("connection refused"), now)
		}
		return strings.Count(log.String(), "connection refused")
	}
	require.Equal(t, 1, lines(time.Minute))
	require.Equal(t, 4, lines(time.Hour), "after 2, 6, 14 and 30 minutes")
	require.Equal(t, 24, lines(24*time.Hour))
	now = now.Add(10 * time.Minute)
	require.Equal(t, 1, lines(time.Minute))
}
