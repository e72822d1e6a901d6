package replay

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
)

func TestPace_Decides(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 29, 8, 0, 7, 0, time.UTC)
	closed := now.Add(-7 * time.Second)
	strained := breaker.Strain{PerSecond: 40, Reason: "3 of 400 answers were 429 or had a Retry-After"}
	slower := breaker.Strain{PerSecond: 40, Reason: "9 of 90 deliveries failed"}
	well := breaker.Strain{PerSecond: 30, Taken: 40, Closed: closed}
	for name, test := range map[string]struct {
		pace   pace
		most   float64
		strain breaker.Strain
		next   pace
		reason string
	}{
		"falls to half": {
			pace{},
			100, strained,
			pace{Rate: 50, Of: 100, From: now, Fell: now},
			"the rate of bank was lowered from 100 to 50 a second: 3 of 400 answers were 429 or had a Retry-After",
		},
		"falls again": {
			pace{Rate: 50, Of: 100},
			100, slower,
			pace{Rate: 25, Of: 100, From: now, Fell: now},
			"the rate of bank was lowered from 50 to 25 a second: 9 of 90 deliveries failed",
		},
		"has a least": {
			pace{Rate: 2, Of: 100},
			100, strained,
			pace{Rate: 100. / 64, Of: 100, From: now, Fell: now},
			"the rate of bank was lowered from 2 to 1.56 a second",
		},
		"does not fall below it": {pace{Rate: 100. / 64, Of: 100}, 100, strained, pace{Rate: 100. / 64, Of: 100}, ""},
		"rises by a tenth": {
			pace{Rate: 50, Of: 100},
			100, well,
			pace{Rate: 60, Of: 100, From: closed},
			"the rate of bank was raised from 50 to 60 a second: it took 40 a second",
		},
		"rises up to the rate of the run": {
			pace{Rate: 95, Of: 100},
			100,
			breaker.Strain{Taken: 94, Closed: closed},
			pace{Of: 100, From: closed},
			"the rate of bank was raised from 95 to 100 a second",
		},
		"does not rise if the run did not use it": {
			pace{Rate: 50, Of: 100},
			100,
			breaker.Strain{PerSecond: 50, Taken: 39, Closed: closed},
			pace{Rate: 50, Of: 100},
			"",
		},
		"rises once a slot":          {pace{Rate: 50, Of: 100, From: closed}, 100, well, pace{Rate: 50, Of: 100, From: closed}, ""},
		"does not rise without news": {pace{Rate: 50, Of: 100}, 100, breaker.Strain{PerSecond: 1}, pace{Rate: 50, Of: 100}, ""},
		"is that of the run":         {pace{}, 100, well, pace{}, ""},
		"has no limit":               {pace{}, 0, well, pace{}, ""},
		"without a rate, falls to half of what the destination got": {
			pace{},
			0, strained,
			pace{Rate: 20, Of: 40, From: now, Fell: now},
			"the rate of bank was lowered from no limit to 20 a second",
		},
		"without a rate, does not follow a canary": {
			pace{},
			0,
			breaker.Strain{PerSecond: 0.5, Reason: "slow"},
			pace{Rate: 5, Of: 10, From: now, Fell: now},
			"the rate of bank was lowered from no limit to 5 a second: slow",
		},
		"without a rate, rises without end": {
			pace{Rate: 100, Of: 40},
			0,
			breaker.Strain{Taken: 80, Closed: closed},
			pace{Rate: 104, Of: 40, From: closed},
			"the rate of bank was raised from 100 to 104 a second",
		},
	} {
		next, act, reason := test.pace.decide("bank", test.most, &test.strain, now)
		require.Equal(t, test.next, next, name)
		require.Contains(t, reason, test.reason, name)
		require.Equal(t, test.reason == "", act == "", name)
	}
}

// The rate is at most the rate of the run, and at least a 64th of it.
func TestPace_KeepsWithinTheRateOfTheRun(t *testing.T) {
	t.Parallel()
	now, p := time.Now(), pace{}
	for range 10_000 {
		now = now.Add(10 * time.Second)
		strain := breaker.Strain{PerSecond: 1, Taken: 200, Closed: now}
		if rand.IntN(4) == 0 {
			strain.Reason = "slow"
		}
		p, _, _ = p.decide("bank", 200, &strain, now)
		require.LessOrEqual(t, p.Rate, 200.)
		require.True(t, p.Rate == 0 || p.Rate >= 200./64)
	}
}
