package replay

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/mathext"
)

// The 80 % interval contains the actual number in about 80 % of the cases or more, if each entry recovers independently
// with the same probability.
func TestExpectation_IntervalHolds(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(30, 24))
	for _, size := range []struct{ tried, entries int }{{5, 10}, {9, 30}, {100, 20}, {50, 3000}} {
		held := 0
		for range 600 {
			share := mathext.InvRegIncBeta(0.5, 0.5, random.Float64())
			throw := func(n int) (hits int64) {
				for range n {
					if random.Float64() < share {
						hits++
					}
				}
				return hits
			}
			g := GroupExpectation{Recovered: throw(size.tried), Entries: int64(size.entries)}
			g.Failed = int64(size.tried) - g.Recovered
			mean, variance := g.prediction()
			low, high := likelyRange(mean, variance, g.Entries)
			if n := throw(size.entries); low <= n && n <= high {
				held++
			}
		}
		require.GreaterOrEqual(t, held, 440, size)
	}
}

func TestExpectation_TakesTheLastRun(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		group GroupExpectation
		mean  float64
	}{
		{GroupExpectation{Entries: 22, Recovered: 7, Failed: 2, FailedBefore: 30}, 16.5},
		{GroupExpectation{Entries: 22, Recovered: 1, FailedBefore: 9}, 3},
	} {
		mean, _ := tt.group.prediction()
		require.InDelta(t, tt.mean, mean, 0.01)
	}
	mean, variance := (&GroupExpectation{Entries: 1, Recovered: 9}).prediction()
	low, high := likelyRange(mean, variance, 1)
	require.Equal(t, [2]int64{0, 1}, [2]int64{low, high})
}
