package deadletter_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

type attemptRecord struct {
	Attempt            int                   `json:"attempt"`
	ProcessingDuration *float64              `json:"processingDuration"`
	SystemState        *riverdlq.SystemState `json:"systemState"`
	Strategy           string                `json:"strategy"`
	Outcome            string                `json:"outcome"`
}

func attemptsOf(t *testing.T, raw json.RawMessage) (attempts []attemptRecord) {
	t.Helper()
	require.NoError(t, json.Unmarshal(raw, &attempts))
	return attempts
}

// A worker with riverdlq records the duration and the system load of each failed attempt, and of each panic. For other
// workers dlqd knows from River only when the last attempt started.
func TestAttempts_RecordDurationAndLoad(t *testing.T) {
	t.Parallel()
	const pause = 5 * time.Millisecond // minimum duration of an attempt
	busy := riverdlq.SystemState{CPU: 41.5, Memory: 63}
	for name, look := range map[string]struct {
		middleware []rivertype.Middleware
		of         func(attempt int) (timed, system bool)
	}{
		"riverdlq": {[]rivertype.Middleware{&riverdlq.Middleware{SystemState: func() (riverdlq.SystemState,
			bool,
		) {
			return busy, true
		}}}, func(int) (bool, bool) { return true, true }},
		"bare": {nil, func(attempt int) (bool, bool) { return attempt == 3, false }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, succeed)
			workers := river.NewWorkers()
			river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[testArgs]) error {
				time.Sleep(pause)
				if job.Attempt == 2 {
					panic("nil")
				}
				return errors.New("no")
			}))
			var err error
			b.client, err = river.NewClient(riverpgxv5.New(b.pool), &river.Config{
				Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1}}, Workers: workers,
				Logger: slog.New(slog.DiscardHandler), TestOnly: true,
				FetchCooldown: time.Millisecond, FetchPollInterval: 50 * time.Millisecond, Middleware: look.middleware,
				RetryPolicy: noWait{},
			})
			require.NoError(t, err)
			b.runJob(&river.InsertOpts{MaxAttempts: 3}, rivertype.JobStateDiscarded)
			entry, _ := b.entry()
			attempts := attemptsOf(t, entry.RetryHistory)
			require.Len(t, attempts, 3)
			for _, a := range attempts {
				timed, system := look.of(a.Attempt)
				require.Equal(t, timed, a.ProcessingDuration != nil, a.Attempt)
				if timed {
					require.GreaterOrEqual(t, *a.ProcessingDuration, pause.Seconds())
				}
				if system {
					require.Equal(t, &busy, a.SystemState)
					require.JSONEq(t, `{"cpu": 41.5, "memory": 63}`, string(entry.SystemState))
				} else {
					require.Nil(t, a.SystemState)
					require.Empty(t, entry.SystemState)
				}
			}
			// A redelivery is a separate job with its own attempts.
			job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
			require.NoError(t, err)
			require.Zero(t, b.count("SELECT count(*) FROM river_job WHERE id = $1 AND metadata ? 'dlq:attempts'", job))
			b.await(job, rivertype.JobStateDiscarded)
			entry, _ = b.entry()
			replays := attemptsOf(t, entry.ReplayAttempts)
			require.Len(t, replays, 1)
			require.NotNil(t, replays[0].ProcessingDuration)
			_, system := look.of(1)
			require.Equal(t, system, replays[0].SystemState != nil)
		})
	}
}

// Other programs may write any value to the key dlq:attempts. The failure is recorded in spite of that.
func TestAttempts_IgnoreMalformedMetadata(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	for _, recorded := range []string{
		`7`, `[]`, `{"1": 3}`, `{"1": {"seconds": "x", "system": 3}}`,
		`{"1": {"system": {"cpu": "x", "memory": 1}}}`, `null`,
	} {
		id := b.insert(nil)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
			metadata = jsonb_build_object('dlq:attempts', $2::jsonb),
			errors = ARRAY[jsonb_build_object('attempt', 1, 'error', 'no money', 'at', now() - interval '3 s')]
			WHERE id = $1`, id, recorded)
		b.processInbox()
		require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE river_job_id = $1
			AND error_message = 'no money' AND error_context IS NULL
			AND (retry_history #>> '{0,processingDuration}')::numeric = 3
			AND retry_history #> '{0,systemState}' IS NULL`, id), recorded)
	}
	// An error of River's rescuer has the time of the rescue, from which the duration of the attempt cannot be computed.
	id := b.insert(nil)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('attempt', 1, 'error', 'Stuck job rescued by JobRescuer', 'at', now())]
		WHERE id = $1`, id)
	b.processInbox()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE river_job_id = $1 "+
		"AND NOT retry_history -> 0 ? 'processingDuration'", id))
}

// A redelivery by a worker has the strategy of the entry. A redelivery by an operator has the strategy manual.
func TestReplayAttempts_RecordStrategy(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createEntry().ID
	b.exec("UPDATE dlq.dead_letter_open SET strategy = 'scheduled' WHERE id = $1", id)
	var job int64
	for i, sent := range []struct{ actor, strategy, state string }{
		{"worker:1", "scheduled", "discarded"},
		{"kim", "manual", "discarded"},
		{"worker:1", "immediate", "completed"},
	} {
		if i == 2 {
			b.exec("UPDATE dlq.dead_letter_open SET strategy = 'immediate' WHERE id = $1", id)
		}
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT job_id FROM dlq.redeliver($1, $2, 'due')",
			[]uuid.UUID{id}, sent.actor).Scan(&job))
		b.endBySQL(job, sent.state)
		b.processInbox()
		var raw json.RawMessage
		require.NoError(t, b.pool.QueryRow(t.Context(),
			"SELECT replay_attempts FROM dlq.dead_letter_queue WHERE id = $1", id).Scan(&raw))
		last := attemptsOf(t, raw)[i]
		require.Equal(t, sent.strategy, last.Strategy)
		require.Equal(t, sent.state, last.Outcome)
	}
}

// If a job was retried outside dlqd and completed, that counts as an attempt with the strategy manual.
func TestReplayAttempts_CountRetriesOutsideDlqdAsManual(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createEntry().ID
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id)
		SELECT river_job_id, job_created_at, 'completed', id FROM dlq.dead_letter_open WHERE id = $1`, id)
	b.processInbox()
	var raw json.RawMessage
	require.NoError(t, b.pool.QueryRow(t.Context(),
		"SELECT replay_attempts FROM dlq.dead_letter_queue WHERE id = $1", id).Scan(&raw))
	require.Len(t, attemptsOf(t, raw), 1)
	require.Equal(t, "manual", attemptsOf(t, raw)[0].Strategy)
}

// The source and the version of an entry come from the message.
func TestEntry_TakesSourceAndVersionFromMessage(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.exec(`INSERT INTO river_job (kind, args, max_attempts, state, attempt) VALUES ('dlqd_message',
		'{"messageId": "m", "kind": "k", "queue": "default", "payload": {},
		"source": "checkout", "sourceType": "service", "sourceId": "checkout-7f9c", "sourceName": "Checkout",
		"version": "2.1"}', 1, 'running', 1)`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now(), " +
		"errors = ARRAY['{\"attempt\": 1, \"error\": \"no\"}'::jsonb]")
	entry, _ := b.entry()
	for want, is := range map[string]*string{
		"checkout": entry.Source, "service": entry.SourceType,
		"checkout-7f9c": entry.SourceID, "Checkout": entry.SourceName, "2.1": entry.Version,
	} {
		require.NotNil(t, is, want)
		require.Equal(t, want, *is)
	}
	b.exec("SELECT dlq.protect('{original_event}')")
	seen, _, err := b.store.Get(postgres.AsReader(t.Context()), entry.ID)
	require.NoError(t, err)
	require.Nil(t, seen.SourceName, "sourceName is part of a hidden column")
	require.Equal(t, deadletter.Pending, seen.Status)
}
