package deadletter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// A stream keeps its rate for any interval between reservations. It skips no place, and grants none twice.
func TestReservePlaces_KeepsRate(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	start := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	for _, caller := range []struct {
		name          string
		every, within time.Duration
	}{
		{"run", 25 * time.Millisecond, 50 * time.Millisecond}, // a replay run
		{"gate", time.Second, time.Second},                    // a gate, and held messages
	} {
		for rate, seconds := range map[float64]int{0.01: 300, 0.5: 60, 1: 20, 5: 10, 10: 10, 19: 10, 21: 10, 800: 3} {
			granted := 0
			length := time.Duration(seconds) * time.Second
			for at := time.Duration(0); at < length; at += max(caller.every, length/1000) {
				within := max(caller.within, length/1000)
				places, err := deadletter.ReservePlaces(t.Context(), pool, caller.name+time.Duration(rate*1e9).String(), rate, 1000,
					start.Add(at), &within)
				require.NoError(t, err)
				if granted += places.Granted; places.Granted > 0 {
					last := places.First.Add(time.Duration(float64(places.Granted-1) / rate * float64(time.Second)))
					require.LessOrEqual(t, last.Sub(start), at+within+time.Microsecond)
				}
			}
			require.InDelta(t, rate*float64(seconds), granted, 2+rate*caller.within.Seconds(), "%s at %g/s", caller.name, rate)
		}
	}
}

// A stream grants no places for a time in which it was not used. Its next place is now, and the following places have
// the stream's rate.
func TestReservePlaces_UnusedStreamStartsNow(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	start, second := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC), time.Second
	_, err := deadletter.ReservePlaces(t.Context(), pool, "queue", 1, 1, start, &second)
	require.NoError(t, err)
	for _, within := range []*time.Duration{&second, nil} {
		start = start.Add(time.Hour)
		places, err := deadletter.ReservePlaces(t.Context(), pool, "queue", 1, 2, start, within)
		require.NoError(t, err)
		require.Equal(t, 2, places.Granted)
		require.WithinDuration(t, start, places.First, 0)
		places, err = deadletter.ReservePlaces(t.Context(), pool, "queue", 1, 100, start, &second)
		require.NoError(t, err)
		require.Zero(t, places.Granted, "the next place is in two seconds")
	}
}

// If no place is within reach, a caller reserves none, and the stream does not change.
func TestReservePlaces_NoPlaceWithinReachReservesNone(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	start, second := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC), time.Second
	reserve := func(count int, within *time.Duration) deadletter.Places {
		places, err := deadletter.ReservePlaces(t.Context(), pool, "queue", 1, count, start, within)
		require.NoError(t, err)
		return places
	}
	require.Equal(t, 100, reserve(100, nil).Granted)
	for range 3 {
		require.Zero(t, reserve(10, &second).Granted)
	}
	require.WithinDuration(t, start.Add(100*time.Second), reserve(1, nil).First, 0)
}

// Another transaction deletes the stream's row and makes it again while ReservePlaces waits for the lock on the row.
// The places are those of the new row.
func TestReservePlaces_WhileStreamIsMadeAgain(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	start := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	_, err := pool.Exec(t.Context(), "INSERT INTO dlq.paces (name, free_at) VALUES ('run', $1)", start)
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM dlq.paces WHERE name = 'run' FOR UPDATE")
	require.NoError(t, err)
	var places deadletter.Places
	ended := make(chan error, 1)
	go func() {
		var err error
		places, err = deadletter.ReservePlaces(t.Context(), pool, "run", 1, 1, start, nil)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		var waits bool
		err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'
			AND datname = current_database() AND query LIKE '%reserve_pace%')`).Scan(&waits)
		return err == nil && waits
	}, 3*time.Minute, 20*time.Millisecond)
	_, err = tx.Exec(t.Context(), "DELETE FROM dlq.paces WHERE name = 'run'")
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO dlq.paces (name, free_at) VALUES ('run', $1)", start.Add(time.Hour))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-ended)
	require.True(t, places.First.Equal(start.Add(time.Hour)), places.First)
	require.Equal(t, 1, places.Granted)
}
