package delivery_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
)

func TestTraffic_TellsWhetherOtherDeliveriesAreWorse(t *testing.T) {
	t.Parallel()
	run, began := uuid.New(), time.Now().Truncate(time.Minute)
	now := began.Add(2 * time.Minute)
	// deliver makes n deliveries, of which every bad one fails or is slow.
	deliver := func(traffic *delivery.Traffic, of uuid.UUID, from time.Time, n, bad int, slow bool) {
		for i := range n {
			d := &delivery.Delivered{
				Destination: "bank", Run: of, Outcome: delivery.OutcomeOK, Available: true, Took: 20 * time.Millisecond,
			}
			if i < bad {
				d.Available, d.Took = slow, 5*time.Second
			}
			traffic.Observe(d, from.Add(time.Duration(i%60)*time.Second))
		}
	}
	for name, c := range map[string]struct {
		before, badBefore, during, bad int
		slow, of                       bool
		worse                          bool
	}{
		"as before":              {before: 600, badBefore: 6, during: 100, bad: 1},
		"failures":               {before: 600, badBefore: 6, during: 100, bad: 20, worse: true},
		"slow":                   {before: 600, badBefore: 6, during: 100, bad: 20, slow: true, worse: true},
		"few others":             {before: 600, during: 29, bad: 29},
		"few others before":      {before: 29, during: 100, bad: 100},
		"failed before, too":     {before: 600, badBefore: 300, during: 100, bad: 55},
		"worse than much before": {before: 600, badBefore: 300, during: 100, bad: 80, worse: true},
		"of the run itself":      {before: 600, badBefore: 6, during: 100, bad: 20, of: true},
	} {
		traffic := delivery.NewTraffic()
		of := uuid.Nil
		if c.of {
			of = run
		}
		deliver(traffic, uuid.Nil, began.Add(-10*time.Minute), c.before, c.badBefore, c.slow)
		deliver(traffic, of, began.Add(30*time.Second), c.during, c.bad, c.slow)
		got := traffic.Worse("bank", run, began, began, now)
		require.Equal(t, c.worse, got != "", "%s: %s", name, got)
		require.Empty(t, traffic.Worse("other", run, began, began, now), name)
	}
}
