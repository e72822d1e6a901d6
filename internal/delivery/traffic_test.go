package delivery_test

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestTraffic_TellsWhetherOtherDeliveriesAreWorse(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	run, began := uuid.New(), time.Now().Truncate(time.Minute)
	now := began.Add(2 * time.Minute)
	// deliver observes n deliveries; bad of them fail, or are slow if slow is set.
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
			got, unknown, err := traffic.Worse(t.Context(), name, run, began, began, now)
			require.NoError(t, err)
			require.Equal(t, c.worse, got != "", "%s: %s", name, got)
			require.Equal(t, c.before < 30 || c.during < 30 || c.of, unknown != "", "%s: %s", name, unknown)
			got, unknown, err = traffic.Worse(t.Context(), "other", run, began, began, now)
			require.NoError(t, err)
			require.Empty(t, got, name)
			require.NotEmpty(t, unknown, name)
		}
	}
}

func TestTraffic_TellsWhetherARunStrainsItsDestination(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	run, began := uuid.New(), time.Now().Truncate(time.Minute)
	now := began.Add(39 * time.Second)
	for name, c := range map[string]struct {
		before, badBefore int
		during, bad       int
		limited           int
		took              time.Duration // of the bad ones; 0: they fail
		reason            string
	}{
		"as before": {before: 600, badBefore: 6, during: 300, bad: 3, took: time.Second},
		"slow": {
			before: 600, badBefore: 6, during: 300, bad: 30, took: time.Second,
			reason: "30 of 300 deliveries failed or took at least twice the 95th percentile of the hour before the run; in " +
				"that hour, 6 of 600",
		},
		"failures":           {before: 600, during: 300, bad: 30, reason: "30 of 300 deliveries failed or took"},
		"hardly slower":      {before: 600, badBefore: 6, during: 300, bad: 100, took: 27 * time.Millisecond},
		"few are slow":       {before: 600, during: 300, bad: 14, took: time.Second},
		"few":                {before: 600, during: 29, bad: 29, took: time.Second},
		"few before":         {before: 29, during: 300, bad: 300, took: time.Second},
		"failed before, too": {before: 600, badBefore: 300, during: 300, bad: 150},
		"one is limited":     {during: 20, bad: 1, limited: 1, reason: "1 of 20 answers were 429 or had a Retry-After"},
	} {
		processes := []*delivery.Traffic{delivery.NewTraffic(pool), delivery.NewTraffic(pool)}
		deliver := func(of uuid.UUID, from time.Time, n, bad, limited int) {
			for i := range n {
				d := &delivery.Delivered{Destination: name, Run: of, Available: true, Took: 20 * time.Millisecond}
				if i < bad {
					d.Available, d.Took, d.Limited = c.took > 0, c.took, i < limited
				}
				processes[i%2].Observe(d, from.Add(time.Duration(i%20)*time.Second))
			}
		}
		deliver(uuid.Nil, began.Add(-10*time.Minute), c.before, c.badBefore, 0)
		deliver(uuid.Nil, began, 100, 100, 100) // others do not count
		deliver(run, began.Add(10*time.Second), c.during, c.bad, c.limited)
		require.NoError(t, processes[1].Write(t.Context()))
		reached, err := processes[0].Reached(t.Context(), run, now)
		require.NoError(t, err)
		require.Contains(t, reached, name)
		strain := func(from time.Time) breaker.Strain {
			got, err := processes[1].Strain(t.Context(), name, run, began, from, now)
			require.NoError(t, err)
			return got
		}
		got := strain(time.Time{})
		if c.reason == "" {
			require.Empty(t, got.Reason, name)
		}
		require.Contains(t, got.Reason, c.reason, name)
		require.InDelta(t, float64(c.during)/29, got.PerSecond, 0.01, name)
		require.WithinDuration(t, began.Add(30*time.Second), got.Closed, 0, name)
		require.InDelta(t, float64(c.during)/20, got.Taken, 1, "half of them in each of two slots: %s", name)
		require.Positive(t, strain(began.Add(20*time.Second)).PerSecond, name)
		require.Zero(t, strain(began.Add(20*time.Second+time.Millisecond)), "slots that begin later: %s", name)
	}
	reached, err := delivery.NewTraffic(pool).Reached(t.Context(), uuid.New(), now)
	require.NoError(t, err)
	require.Empty(t, reached)
}

// All processes count in slots of the database's time.
func TestTraffic_CountsInTheTimeOfTheDatabase(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	run, destination := uuid.New(), "default"
	for _, ahead := range []time.Duration{0, time.Hour, -time.Hour} {
		traffic := delivery.NewTraffic(pool)
		now := func() time.Time { return time.Now().Add(ahead) }
		traffic.SetClock(now)
		require.NoError(t, traffic.Write(t.Context()))
		traffic.Observe(&delivery.Delivered{Destination: destination, Run: run, Available: true}, now())
		require.NoError(t, traffic.Write(t.Context()))
	}
	var counted, inTime int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT sum(n), sum(n) FILTER (
			WHERE t.at BETWEEN clock_timestamp() - interval '5 minutes' AND clock_timestamp())
		FROM dlq.destination_traffic t CROSS JOIN unnest(t.deliveries) n WHERE t.run_id = $1`, run).Scan(&counted, &inTime))
	require.Equal(t, 3, counted)
	require.Equal(t, 3, inTime)
}

func TestTraffic_TellsWhetherOtherJobsOfTheKindAreWorse(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	run, began := uuid.New(), time.Now().Add(-2*time.Minute).Truncate(time.Second)
	now := began.Add(100 * time.Second)
	// end inserts n jobs of a kind that have ended, one a second after from. The first bad jobs are slow, or failed for
	// good.
	end := func(kind, metadata string, from time.Time, n, bad int, badState string) {
		_, err := pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, metadata,
				attempted_at, finalized_at)
			SELECT $1, '{}', 'default', 1, 1, CASE WHEN i <= $5 THEN $6 ELSE 'completed' END::river_job_state, $2,
				$3::timestamptz + i * interval '1 s' - CASE WHEN i <= $5 AND $6 = 'completed' THEN interval '5 s'
					ELSE interval '20 ms' END, $3::timestamptz + i * interval '1 s'
			FROM generate_series(1, $4::integer) i`, kind, metadata, from, n, bad, badState)
		require.NoError(t, err)
	}
	for name, c := range map[string]struct {
		before, badBefore, during, bad int
		state, metadata                string // of jobs during the run
		worse, unknown                 string
	}{
		"as before": {before: 600, badBefore: 6, during: 90, bad: 1},
		"slow": {
			before: 600, badBefore: 6, during: 90, bad: 20,
			worse: "20 of 90 other jobs of kind slow (sampled) failed or were slower than the 95th percentile of the hour " +
				"before the run; in that hour, 6 of 600",
		},
		"failed": {
			before: 600, badBefore: 6, during: 90, bad: 20, state: "discarded",
			worse: "20 of 90 other jobs of kind failed (sampled) failed or were slower than the 95th percentile of the hour " +
				"before the run; in that hour, 6 of 600",
		},
		"few others": {
			before: 600, during: 29, bad: 29,
			unknown: "not known whether other jobs of kind few others (sampled) are worse: 29 since, 600 in the hour before " +
				"the run, at least 30 of each needed",
		},
		"few before": {
			during: 90, bad: 90, unknown: "not known whether other jobs of kind few before (sampled) are worse: 90 since, 0 in " +
				"the hour before the run, at least 30 of each needed",
		},
		"of the run itself": {
			before: 600, during: 90, bad: 90, metadata: `{"dlq:run_id": "` + run.String() + `"}`,
			unknown: "not known whether other jobs of kind of the run itself (sampled) are worse: 0 since, 600 in the hour " +
				"before the run, at least 30 of each needed",
		},
		"completed by dlqd": {
			before: 600, during: 90, bad: 90, metadata: `{"dlq:done": {"attempt": 1}}`,
			unknown: "not known whether other jobs of kind completed by dlqd (sampled) are worse: 0 since, 600 in the hour " +
				"before the run, at least 30 of each needed",
		},
	} {
		end(name, "{}", began.Add(-10*time.Minute-time.Second), c.before, c.badBefore, "completed")
		end(name, cmp.Or(c.metadata, "{}"), began, c.during, c.bad, cmp.Or(c.state, "completed"))
		worse, unknown, err := delivery.NewTraffic(pool).JobsWorse(t.Context(), name, run, began, began, now)
		require.NoError(t, err)
		require.Equal(t, c.worse, worse, name)
		require.Equal(t, c.unknown, unknown, name)
		_, err = pool.Exec(t.Context(), "DELETE FROM river_job")
		require.NoError(t, err)
	}

	// There are many jobs of the kind much, and the run has many jobs of another kind. JobsWorse reads a new sample only
	// after ten seconds.
	end("much", "{}", began.Add(-10*time.Minute-time.Second), 600, 6, "completed")
	for range 3 {
		end("other", `{"dlq:run_id": "`+run.String()+`"}`, began, 90, 0, "completed")
	}
	traffic := delivery.NewTraffic(pool)
	worse, _, err := traffic.JobsWorse(t.Context(), "much", run, began, began, now)
	require.NoError(t, err)
	require.Empty(t, worse)
	end("much", "{}", began, 90, 50, "completed")
	worse, _, err = traffic.JobsWorse(t.Context(), "much", run, began, began, now.Add(9*time.Second))
	require.NoError(t, err)
	require.Empty(t, worse)
	worse, _, err = traffic.JobsWorse(t.Context(), "much", run, began, began, now.Add(10*time.Second))
	require.NoError(t, err)
	require.NotEmpty(t, worse)

	// It reads the hour before the run only once, also for a group that an operator let go on later.
	_, err = pool.Exec(t.Context(), "DELETE FROM river_job WHERE finalized_at < $1", began)
	require.NoError(t, err)
	worse, _, err = traffic.JobsWorse(t.Context(), "much", run, began, began.Add(time.Millisecond), now)
	require.NoError(t, err)
	require.NotEmpty(t, worse)
}

// While River's table does not answer, a run waits for no sample of jobs.
func TestTraffic_DoesNotWaitForJobs(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job")
	require.NoError(t, err)
	traffic, now := delivery.NewTraffic(pool), time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const late = "not known whether other jobs of kind k (sampled) are worse: River's table did not answer within 2s"
	worse, unknown, err := traffic.JobsWorse(ctx, "k", uuid.New(), now, now, now)
	require.NoError(t, err)
	require.Empty(t, worse)
	require.Equal(t, late, unknown)
	require.NoError(t, tx.Rollback(t.Context()))
	_, unknown, err = traffic.JobsWorse(ctx, "k", uuid.New(), now, now, now.Add(time.Minute))
	require.NoError(t, err)
	require.Equal(t, late, unknown)
	_, unknown, err = traffic.JobsWorse(ctx, "k", uuid.New(), now, now, now.Add(2*time.Minute))
	require.NoError(t, err)
	require.Contains(t, unknown, "0 since, 0 in the hour before the run")
}
