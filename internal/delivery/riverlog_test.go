package delivery

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// River's log lines have dlqd's field names, and do not contain errors of jobs.
func TestRiverLog_RenamesFieldsAndDropsJobErrors(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	logger := slog.New(RiverLog(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
	line := func(log func()) string {
		out.Reset()
		log()
		return out.String()
	}
	all := line(func() { logger.Warn("m", "job_id", 7, "job_kind", "mail", "queue", "a") })
	require.Contains(t, all, "msg=m job=7 kind=mail queue=a")
	require.Contains(t, line(func() { logger.Warn("m", "err", errors.New("no connection")) }), `error="no connection"`)
	require.Contains(t, line(func() { logger.With("job_id", 7).Warn("m", "client_id", "c") }), "job=7 client=c")
	for _, key := range []string{"error", "err", "panic_val"} {
		logged := line(func() { logger.Warn("m", key, "card 4111", "job_id", 7, "kind", "mail") })
		require.NotContains(t, logged, "4111", key)
		require.Contains(t, logged, "job=7 kind=mail")
		require.NotContains(t, line(func() { logger.With("job_id", 7).Warn("m", key, "card 4111") }), "4111", key)
	}
}
