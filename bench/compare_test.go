package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadTables_ReturnsFiguresByRowAndColumn(t *testing.T) {
	t.Parallel()
	order, values := readTables(`2 CPUs, linux/amd64, fsync on, 1 rounds (median)

   batch size   replayed/s   limit/s   ratio   River inserts/s   ratio
          100        6,060    18,000    0.34            44,700    0.14
         1000        8,730         -    0.36            71,500    0.12

at a limit of 1,000/s: 998/s (-0.2 %)

   entries   claim rows/s
    10,000         30,000
`)
	require.Len(t, order, 10)
	require.Equal(t, cell{"100", "replayed/s"}, order[0])
	require.Equal(t, map[cell]float64{
		{"100", "replayed/s"}: 6060, {"100", "limit/s"}: 18000, {"100", "limit/s ratio"}: 0.34,
		{"100", "River inserts/s"}: 44700, {"100", "River inserts/s ratio"}: 0.14,
		{"1000", "replayed/s"}: 8730, {"1000", "limit/s ratio"}: 0.36, {"1000", "River inserts/s"}: 71500,
		{"1000", "River inserts/s ratio"}: 0.12, {"10,000", "claim rows/s"}: 30000,
	}, values)
	require.True(t, order[2].isRatio())
	require.False(t, order[0].isRatio())
}
