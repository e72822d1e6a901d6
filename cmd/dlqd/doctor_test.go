package main_test

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestDoctor(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	s := serve(t, "--database-url", url)
	require.Eventually(t, func() bool { // River needs a while to elect a leader
		out, _, _ := run(t, "doctor", "--database-url", url)
		return !strings.Contains(out, "there is none: River schedules") &&
			strings.Contains(out, "dlq_capture and dlq_follow exist")
	}, 5*time.Minute, 100*time.Millisecond)
	require.Contains(t, ok(t, "breakers", "open", "default", "--api-url="+s.api), "open")
	out, stderr, code := run(t, "doctor", "--database-url", url, "--config-dir",
		policytest.Dir(t, policytest.Files{"monitoring": "defaults: {maxOpen: many}"}))
	require.Equal(t, 1, code)
	require.Regexp(t, `WRONG +circuit breakers +an operator holds open: destination:default`, out)
	require.Contains(t, out, "do: if they should close: dlqd breakers reset NAME")
	require.Regexp(t, `WRONG +policy +.*monitoring.yaml:1: defaults.maxOpen: is of type string; must be integer`, out)
	require.Contains(t, stderr, "checks found a problem")
	require.Zero(t, s.stop(syscall.SIGTERM))
}
