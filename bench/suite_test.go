package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPrintSuite_ShowsRatesBesideBaselinesAndPeersThatAreMissing(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, printSuite(&out, []string{"ingest", "replay", "claim", "peers", "capture"}, map[string][]string{
		"ingest": {"2 CPUs\n\n   server   messages/s   of the limit   p99 ms\n  64 dlqd   6,000   0.60   20\n" +
			" 64 limit   10,000   1.00   10\n"},
		"replay": {
			"   batch size   replayed/s   limit/s   ratio   River inserts/s   ratio\n   100   6,000   12,000   0.50   40,000   0.15\n",
			"   batch size   replayed/s   limit/s   ratio   River inserts/s   ratio\n   100   6,000   10,000   0.60   40,000   0.15\n",
			"   batch size   replayed/s   limit/s   ratio   River inserts/s   ratio\n   100   6,000   15,000   0.40   40,000   0.15\n",
		},
		"claim": {"   entries   claim rows/s\n   10,000   30,000\n"},
		"peers": {"\nBullMQ  not installed: npm was not found\n"},
	}))
	require.Equal(t, `path      row       dlqd                  beside                     ratio   spread
ingest    64 dlqd   6,000    messages/s   10,000   64 limit          0.60    0.60–0.60
ingest    64 dlqd   20       p99 ms       10       64 limit          2.00    2.00–2.00
replay    100       6,000    replayed/s   12,000   limit/s           0.50    0.40–0.60
replay    100       6,000    replayed/s   40,000   River inserts/s   0.15    0.15–0.15
claim     10,000    30,000   claim rows/s
peers     BullMQ    not installed: npm was not found
capture   failed
`, out.String())
}
