package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Benchmarks ask dlqd's own statements, and fill its tables by themselves: each of these is tried on a thousandth of its work.
func TestBenchmarks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"claim", "replay", "retention"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.NoError(t, start(runs[name], 1, 0.001, os.Getenv("DLQD_TEST_POSTGRES_BIN"), ""))
		})
	}
}
