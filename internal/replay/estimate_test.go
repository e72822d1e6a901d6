package replay

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEstimate_IsExactIfAllWereRead(t *testing.T) {
	t.Parallel()
	e := estimate(estimateStale, 3, 40, 40)
	require.Equal(t, Estimate{What: "stale", Entries: 3, Low: 3, High: 3, Sampled: 40}, e)
	require.True(t, e.Exact(40))
	require.Equal(t, Estimate{What: "stale"}, estimate(estimateStale, 0, 0, 0))
}

func TestEstimate_HasAnInterval(t *testing.T) {
	t.Parallel()
	e := estimate(estimateStale, 100, 1000, 100_000)
	require.EqualValues(t, 10_000, e.Entries)
	require.InDelta(t, 8210, e.Low, 20, "tables of Clopper and Pearson")
	require.InDelta(t, 12030, e.High, 20)
	none, all := estimate(estimateStale, 0, 1000, 100_000), estimate(estimateStale, 1000, 1000, 100_000)
	require.Zero(t, none.Low)
	require.InDelta(t, 369, none.High, 2)
	require.EqualValues(t, 100_000, all.High)
	require.EqualValues(t, 100_000, all.Entries)
	require.Less(t, all.Low, int64(100_000))
}

// The 95 % interval contains the true number in about 95 % of the cases, for small and large shares.
func TestEstimate_IntervalHolds(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(30, 22))
	for _, share := range []float64{0.002, 0.1, 0.5, 0.97} {
		held, total := 0, int64(50_000)
		truth := int64(share * float64(total))
		for range 400 {
			hits := int64(0)
			for range 1000 {
				if random.Float64() < share {
					hits++
				}
			}
			if e := estimate(estimateStale, hits, 1000, total); e.Low <= truth && truth <= e.High {
				held++
			}
		}
		require.GreaterOrEqual(t, held, 370, share)
	}
}
