package process

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// A process declares other processes dead only after the database has answered it for as long as they have been silent.
// The reason: after a stall of the database, all other processes look silent.
func TestHeartbeats_JudgeOnlyWhileTheDatabaseAnswers(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b heartbeats
	beat := func(at time.Duration) { b.record(start.Add(at), start.Add(at)) }
	before := func() time.Duration {
		deadBefore, sure := b.deadBefore()
		if !sure {
			return -1
		}
		return deadBefore.Sub(start)
	}
	require.EqualValues(t, -1, before(), "before the first heartbeat")
	for at := time.Duration(0); at < deadAfter; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "not enough heartbeats yet")
	}
	beat(deadAfter)
	require.EqualValues(t, 0, before())
	beat(deadAfter + maxGap)
	require.Equal(t, maxGap, before(), "a short stall")

	back := deadAfter + maxGap + 40*time.Second
	beat(back) // a late heartbeat: the database hung
	for at := back; at < back+deadAfter; at += Interval {
		beat(at)
		require.EqualValues(t, -1, before(), "other processes could not write meanwhile either")
	}
	beat(back + deadAfter)
	require.Equal(t, back, before())

	beat(0) // an earlier time, from the clock of another server after a failover
	require.EqualValues(t, -1, before())
}

func TestHeartbeats_LateHeartbeatPutsJobsInDoubt(t *testing.T) {
	t.Parallel()
	start := time.Now()
	var b heartbeats
	b.record(start, start)
	require.False(t, b.inDoubt(start.Add(heartbeatValidFor), time.Hour))
	require.True(t, b.inDoubt(start.Add(heartbeatValidFor+1), time.Hour),
		"other processes may soon consider this one dead")
	b.record(start.Add(Interval), start.Add(Interval))
	require.False(t, b.inDoubt(start.Add(Interval), time.Hour))
	late := start.Add(Interval + deadAfter)
	b.record(late, late)
	require.True(t, b.inDoubt(time.Now(), time.Hour), "jobs from before the gap may have been put back")
	require.False(t, b.inDoubt(late, 0))

	b = heartbeats{}
	b.record(start, start)
	b.record(start.Add(Interval), start.Add(deadAfter)) // the machine and its clock were suspended
	require.True(t, b.inDoubt(start.Add(Interval), time.Hour))
}

// A process rescues messages if the database has answered it for long enough and no other process holds the lease.
func TestRescue_NeedsCertaintyAndTheDuty(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	start := func() *Process {
		p := New(Config{
			DB: postgres.DefaultSchemas().Rendered(pool), Name: "host/1", Version: "1", Parts: []string{"process"},
			Logger: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, p.Once(t.Context()))
		return p
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	dead, p, other := start(), start(), start()
	exec("UPDATE dlq.processes SET seen_at = now() - interval '31 seconds' WHERE id = $1", dead.id)
	exec(`INSERT INTO river_job (kind, args, queue, state, attempt, max_attempts, attempted_at, attempted_by)
		VALUES ('dlqd_message', '{}', 'mail', 'running', 1, 3, now(), ARRAY[$1::text])`, dead.id.String())
	rescue := func() (state string) {
		t.Helper()
		_, err := p.rescue(t.Context())
		require.NoError(t, err)
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT state FROM river_job").Scan(&state))
		return state
	}
	require.Equal(t, "running", rescue(), "the database has answered this process only once")
	p.heartbeats.since = p.heartbeats.last.Add(-deadAfter)
	exec("SELECT dlq.take_duty('rescue', $1, '1 hour')", other.id)
	require.Equal(t, "running", rescue(), "another process has the duty")
	exec("SELECT dlq.end_duty('rescue', $1)", other.id)
	require.Equal(t, "available", rescue())
}
