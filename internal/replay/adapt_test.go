package replay_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/replay"
)

// weak is a run that two processes send to a receiver with a limit. In each turn, the receiver accepts as many requests
// as the field takes says, and answers 429 to the others. The test moves the clock turn by turn.
type weak struct {
	*bundle

	run       *replay.Run
	now       time.Time
	url       string
	steps     int          // how often a process sends in a turn
	takes     atomic.Int64 // requests in a turn
	got       atomic.Int64 // in this turn
	processes []*replay.Runner
	traffic   []*delivery.Traffic
}

// turnTime is chosen so that every second turn ends a period in which deliveries are counted.
const turnTime = 5 * time.Second

func newWeak(t *testing.T, takes int64, request replay.Request) *weak {
	t.Helper()
	w := &weak{bundle: setup(t), now: time.Now().Truncate(time.Minute), steps: 1}
	w.takes.Store(takes)
	receiver := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		if w.got.Add(1) > w.takes.Load() {
			answer.Header().Set("Retry-After", "1")
			answer.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	t.Cleanup(receiver.Close)
	w.url = receiver.URL
	for range 2 {
		traffic, runner := delivery.NewTraffic(w.pool), w.newRunner()
		runner.Reached, runner.Strain = traffic.Reached, traffic.Strain
		runner.SetClock(func() time.Time { return w.now })
		w.traffic, w.processes = append(w.traffic, traffic), append(w.processes, runner)
	}
	w.failAs(300, "default", "WEAK")
	w.run = w.start(request)
	return w
}

// turn lets each process send and deliver some entries. It returns the number of new redeliveries.
func (w *weak) turn(number int) (sent int64) {
	w.Helper()
	before := w.get(w.run).Replayed
	w.got.Store(0)
	process := number % len(w.processes)
	for range w.steps {
		w.now = w.now.Add(turnTime / time.Duration(w.steps))
		_, err := w.processes[process].RunOnce(w.Context())
		require.NoError(w, err)
	}
	rows, err := w.pool.Query(w.Context(), "SELECT id FROM river_job WHERE state = 'available' ORDER BY id")
	require.NoError(w, err)
	var jobs, done []int64
	for rows.Next() {
		var id int64
		require.NoError(w, rows.Scan(&id))
		jobs = append(jobs, id)
	}
	require.NoError(w, rows.Err())
	for i, id := range jobs {
		answer, err := http.Post(w.url, "application/json", nil)
		require.NoError(w, err)
		_ = answer.Body.Close()
		ok := answer.StatusCode == http.StatusOK
		if ok {
			done = append(done, id)
		}
		w.traffic[i%2].Observe(&delivery.Delivered{
			Destination: "default", Run: w.run.ID, Available: ok, Limited: !ok, Took: time.Millisecond,
		}, w.now)
	}
	w.exec("UPDATE river_job SET state = 'completed', finalized_at = now(), attempt = 1 WHERE id = ANY ($1)", done)
	require.NoError(w, w.traffic[1-process].Write(w.Context()))
	return w.get(w.run).Replayed - before
}

// acts returns the acts of decisions about rates, the oldest first.
func (w *weak) acts() (acts []string) {
	w.Helper()
	for _, d := range w.get(w.run).Decisions {
		if d.Group == 0 {
			acts = append(acts, d.Act)
		}
	}
	slices.Reverse(acts)
	return acts
}

// The rate of a run falls below the rate at which the destination answers 429, stays above zero, and rises again.
func TestProgressive_AdaptsItsRate(t *testing.T) {
	t.Parallel()
	w := newWeak(t, 7, replay.Request{All: true, Progressive: true, Rate: 2})
	w.steps = 10 // to use the rate
	fell, well := 0, 0
	for number := range 400 {
		sent := w.turn(number)
		require.LessOrEqual(t, sent, int64(11), "2 a second are 10 in 5 s")
		acts := w.acts()
		if fell == 0 && slices.Contains(acts, "rate lowered") {
			fell = number
			require.Equal(t, []string{"rate lowered"}, acts, "two processes lower it once")
		}
		if well == 0 && slices.Contains(acts, "rate raised") {
			well = number
			w.takes.Store(1000)
		}
		if w.get(w.run).Status != "running" {
			break
		}
	}
	run := w.get(w.run)
	require.Equal(t, "completed", run.Status, run.Reason)
	require.EqualValues(t, 300, run.Succeeded)
	require.Positive(t, fell)
	require.Greater(t, well, fell)
	acts := w.acts()
	require.Equal(t, "rate raised", acts[len(acts)-1])
	first := slices.IndexFunc(run.Decisions, func(d replay.RunDecision) bool { return d.Act == "rate lowered" })
	require.Regexp(t, `^the rate of default was lowered from 2 to 1 a second: \d+ of \d+ answers were 429 or had a `+
		`Retry-After$`, run.Decisions[first].Reason)
	require.Equal(t, len(acts), w.count(`SELECT count(*) FROM dlq.audit('{}', 5000)
		WHERE reason LIKE 'replay run %: rate %' AND note LIKE 'the rate of default was %'`))
}

// If the destination accepts every request, the run keeps its own rate.
func TestProgressive_DoesNotSlowAWellDestination(t *testing.T) {
	t.Parallel()
	w := newWeak(t, 1000, replay.Request{All: true, Progressive: true, Rate: 200})
	for number := 0; w.get(w.run).Status == "running" && number < 400; number++ {
		w.turn(number)
	}
	require.Equal(t, "completed", w.get(w.run).Status)
	require.Empty(t, w.acts())
	require.Equal(t, 1, w.count("SELECT count(*) FROM dlq.replay_runs WHERE paces IS NULL"))
}

// A run that is not progressive keeps its rate even if the destination answers 429.
func TestRun_DoesNotAdaptAllAtOnce(t *testing.T) {
	t.Parallel()
	w := newWeak(t, 7, replay.Request{All: true, Rate: 200})
	for number := 0; w.get(w.run).Status == "running" && number < 400; number++ {
		w.turn(number)
	}
	require.Equal(t, "completed", w.get(w.run).Status)
	require.Equal(t, 1, w.count("SELECT count(*) FROM dlq.replay_runs WHERE paces IS NULL"))
}

// Groups whose destination is slowed go at its rate, and the group of all other failure groups at the lowest rate.
// Groups of an application's jobs, which have no destination, go at the rate of the run.
func TestProgressive_SlowsOnlyItsDestination(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failAs(5, "default", "SLOW")
	b.failAs(5, "a", "APPLICATION")
	run := b.start(replay.Request{All: true, Progressive: true, Rate: 1000})
	slow := func() {
		b.exec(`UPDATE dlq.replay_runs SET paces = '{"default": {"rate": 0.001, "of": 1000, "from": "2026-11-29T08:00:00Z"}}'`)
	}
	slow()
	b.turn()
	require.EqualValues(t, 1, b.groups(run)["SLOW"].Sent, "the second is sent after 1000 s")
	require.EqualValues(t, 5, b.groups(run)["APPLICATION"].Sent)
	require.Equal(t, "running", b.get(run).Status)

	// A new rate for the run replaces the rates of all destinations.
	require.NoError(t, b.replayer.SetRate(t.Context(), run.ID, 500, "kim"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.replay_runs
		WHERE paces -> 'default' ->> 'from' > '2026-11-29T09' AND NOT paces -> 'default' ? 'rate'`))
	b.turn()
	require.EqualValues(t, 5, b.groups(run)["SLOW"].Sent)

	// A run with a queue of its own has only this queue's destination.
	b.failAs(5, "a", "REDIRECTED")
	b.registerQueue("default")
	require.NoError(t, b.replayer.Control(t.Context(), run.ID, "cancel", "kim"))
	run = b.start(replay.Request{
		Filter: []byte(`{"errorType": ["REDIRECTED"]}`), Progressive: true, Rate: 1000, Queue: "default",
	})
	slow()
	b.turn()
	require.EqualValues(t, 1, b.groups(run)["REDIRECTED"].Sent)
}

// An open breaker holds the groups of its destination. When they go on, their rate is lower.
func TestProgressive_GoesOnSlowerAfterABreaker(t *testing.T) {
	t.Parallel()
	w := newWeak(t, 1000, replay.Request{All: true, Progressive: true, Rate: 200})
	w.turn(0)
	w.unmet = "circuit breaker destination:default is open"
	w.turn(1)
	require.Equal(t, "held in the canary: "+w.unmet, w.groups(w.run)["WEAK"].Reason)
	require.Equal(t, []string{"rate lowered"}, w.acts())
	require.Equal(t, 1, w.count(`SELECT count(*) FROM dlq.replay_runs WHERE paces -> 'default' -> 'rate' = '100'`))
	w.unmet = ""
	w.steer(w.run, "go-on")
	require.EqualValues(t, 6, w.turn(2), "100 a second are 5 in 50 ms")
}
