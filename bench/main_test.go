package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBenchmarks runs the benchmarks that use dlqd's internal statements and fill its tables themselves, with a
// thousandth of the data.
func TestBenchmarks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"claim", "replay", "retention", "retries", "soak"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.NoError(t, start(runs[name], 1, 0.001, os.Getenv("DLQD_TEST_POSTGRES_BIN"), "", "", ""))
		})
	}
}
