package delivery_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestTraffic_TellsWhetherOtherDeliveriesAreWorse(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	run, began := uuid.New(), time.Now().Truncate(time.Minute)
	now := began.Add(2 * time.Minute)
	// deliver makes n deliveries, of which every bad one fails or is slow.
	deliver := func(processes []*delivery.Traffic, to string, of uuid.UUID, from time.Time, n, bad int, slow bool) {
		for i := range n {
			d := &delivery.Delivered{
				Destination: to, Run: of, Outcome: delivery.OutcomeOK, Available: true, Took: 20 * time.Millisecond,
			}
			if i < bad {
				d.Available, d.Took = slow, 5*time.Second
			}
			processes[i%len(processes)].Observe(d, from.Add(time.Duration(i%60)*time.Second))
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
		"few others of each":     {before: 40, during: 40, bad: 40, worse: true},
		"few others before":      {before: 29, during: 100, bad: 100},
		"failed before, too":     {before: 600, badBefore: 300, during: 100, bad: 55},
		"worse than much before": {before: 600, badBefore: 300, during: 100, bad: 80, worse: true},
		"of the run itself":      {before: 600, badBefore: 6, during: 100, bad: 20, of: true},
	} {
		processes := []*delivery.Traffic{delivery.NewTraffic(pool), delivery.NewTraffic(pool)}
		of := uuid.Nil
		if c.of {
			of = run
		}
		deliver(processes, name, uuid.Nil, began.Add(-10*time.Minute), c.before, c.badBefore, c.slow)
		for _, traffic := range processes {
			require.NoError(t, traffic.Write(t.Context()))
		}
		deliver(processes, name, of, began.Add(30*time.Second), c.during, c.bad, c.slow)
		for _, traffic := range processes {
			require.NoError(t, traffic.Write(t.Context()))
		}
		for _, traffic := range processes {
			require.NoError(t, traffic.Write(t.Context()), "nothing new")
			got, err := traffic.Worse(t.Context(), name, run, began, began, now)
			require.NoError(t, err)
			require.Equal(t, c.worse, got != "", "%s: %s", name, got)
			got, err = traffic.Worse(t.Context(), "other", run, began, began, now)
			require.NoError(t, err)
			require.Empty(t, got, name)
		}
	}
}
