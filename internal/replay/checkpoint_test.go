package replay_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/replay"
)

type orderArgs struct {
	Amount int    `json:"amount"`
	FailIn string `json:"failIn,omitempty"` // name of the failing step
}

func (orderArgs) Kind() string { return "order" }

// orderWorker works orders in three resumable steps; a later attempt skips completed steps.
type orderWorker struct {
	river.WorkerDefaults[orderArgs]

	mu    sync.Mutex
	steps []string // completed steps with their amount
	fixed bool     // no step fails
}

func (w *orderWorker) Work(ctx context.Context, job *river.Job[orderArgs]) error {
	for _, step := range []string{"reserve", "charge", "ship"} {
		river.ResumableStep(ctx, step, nil, func(context.Context) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if job.Args.FailIn == step && !w.fixed {
				return errors.New("payload is wrong in " + step)
			}
			w.steps = append(w.steps, fmt.Sprintf("%s %d", step, job.Args.Amount))
			return nil
		})
	}
	return nil
}

// done returns the steps since the last call.
func (w *orderWorker) done() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	steps := strings.Join(w.steps, ", ")
	w.steps = nil
	return steps
}

// orders is a database with a River client that works orders.
type orders struct {
	*bundle

	worker *orderWorker
	client *river.Client[pgx.Tx]
	ended  <-chan *river.Event
}

func setupOrders(t *testing.T) *orders {
	t.Helper()
	o := &orders{bundle: setup(t), worker: &orderWorker{}}
	workers := river.NewWorkers()
	river.AddWorker(workers, o.worker)
	var err error
	o.client, err = river.NewClient(riverpgxv5.New(o.pool), &river.Config{
		Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1}}, TestOnly: true,
	})
	require.NoError(t, err)
	var unsubscribe func()
	o.ended, unsubscribe = o.client.Subscribe(river.EventKindJobCompleted, river.EventKindJobFailed)
	t.Cleanup(unsubscribe)
	require.NoError(t, o.client.Start(t.Context()))
	t.Cleanup(func() { _ = o.client.Stop(context.WithoutCancel(t.Context())) })
	o.registerQueue(river.QueueDefault)
	return o
}

// wait waits until a job has ended, then applies its facts and files its failure.
func (o *orders) wait(job int64) {
	o.Helper()
	for event := range o.ended {
		if event.Job.ID == job {
			break
		}
	}
	require.NoError(o, (&facts.Applier{Store: o.store}).All(o.Context()))
	o.file()
}

// createEntry makes an order fail in its last step, and returns its entry.
func (o *orders) createEntry() uuid.UUID {
	o.Helper()
	o.worker.mu.Lock()
	o.worker.fixed = false
	o.worker.mu.Unlock()
	inserted, err := o.client.Insert(o.Context(), orderArgs{Amount: 10, FailIn: "ship"}, &river.InsertOpts{MaxAttempts: 1})
	require.NoError(o, err)
	o.wait(inserted.Job.ID)
	require.Equal(o, "reserve 10, charge 10", o.worker.done())
	var id uuid.UUID
	require.NoError(o, o.pool.QueryRow(o.Context(), "SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $1",
		inserted.Job.ID).Scan(&id))
	require.Equal(o, "resumes after step charge", o.checkpoint(id))
	return id
}

func (o *orders) entry(id uuid.UUID) *deadletter.Entry {
	o.Helper()
	entry, _, err := o.store.Get(o.Context(), id)
	require.NoError(o, err)
	return entry
}

func (o *orders) checkpoint(id uuid.UUID) string {
	o.Helper()
	c := deadletter.CheckpointOf(o.entry(id).Metadata)
	if c == nil {
		return ""
	}
	return c.String()
}

// replay replays an entry and returns the steps of its job.
func (o *orders) replay(id uuid.UUID, in deadletter.Replay) string {
	o.Helper()
	in.Act = deadletter.Act{Actor: "kim"}
	job, _, err := o.replayer.Replay(o.Context(), id, in, replay.Patch{})
	require.NoError(o, err)
	o.wait(job)
	return o.worker.done()
}

// TestCheckpoint_EditRequiresChoice replays orders with a real River worker. Completed steps
// are not repeated unless the replay discards the checkpoint.
func TestCheckpoint_EditRequiresChoice(t *testing.T) {
	t.Parallel()
	o := setupOrders(t)
	edited := json.RawMessage(`{"amount": 12}`)

	id := o.createEntry()
	_, _, err := o.replayer.Replay(t.Context(), id, deadletter.Replay{Payload: edited, Act: deadletter.Act{Actor: "kim"}},
		replay.Patch{})
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	require.ErrorContains(t, err, "have a checkpoint")
	require.Equal(t, deadletter.Pending, o.entry(id).Status)
	require.Empty(t, o.entry(id).EditedEvent, "a rejected edit is not stored")
	_, err = o.pool.Exec(t.Context(), "SELECT dlq.replay($1, 'kim', p_payload => $2)", id, edited)
	require.ErrorContains(t, err, "have a checkpoint", "SQL requires the choice, too")
	_, err = o.pool.Exec(t.Context(), "SELECT dlq.replay($1, 'kim', p_payload => $2, p_checkpoint => 'restart')",
		id, edited)
	require.ErrorContains(t, err, "invalid checkpoint restart")

	require.Equal(t, "ship 12", o.replay(id, deadletter.Replay{Payload: edited, Checkpoint: deadletter.Resume}))
	require.Equal(t, deadletter.Resolved, o.entry(id).Status)

	id = o.createEntry()
	require.Equal(t, "reserve 12, charge 12, ship 12",
		o.replay(id, deadletter.Replay{Payload: edited, Checkpoint: deadletter.Discard}))
	require.Equal(t, deadletter.Resolved, o.entry(id).Status)
	require.Equal(t, "resumes after step charge", o.checkpoint(id), "the entry keeps its checkpoint")
	require.Equal(t, 1, o.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE entry_id = $1
		AND detail @> '{"checkpoint": "discard", "payload": {"amount": 12}}'`, id))

	id = o.createEntry()
	o.worker.mu.Lock()
	o.worker.fixed = true
	o.worker.mu.Unlock()
	require.Equal(t, "ship 10", o.replay(id, deadletter.Replay{}), "an unedited replay resumes")
	require.Equal(t, deadletter.Resolved, o.entry(id).Status)
}

// TestCheckpoint_ComesFromLastJob lets a redelivery from the start fail: the next one must not
// skip steps that it did not complete.
func TestCheckpoint_ComesFromLastJob(t *testing.T) {
	t.Parallel()
	o := setupOrders(t)
	id := o.createEntry()
	require.Equal(t, "reserve 12",
		o.replay(id, deadletter.Replay{
			Payload: json.RawMessage(`{"amount": 12, "failIn": "charge"}`), Checkpoint: deadletter.Discard,
		}))
	require.Equal(t, deadletter.Pending, o.entry(id).Status)
	require.Equal(t, "resumes after step reserve", o.checkpoint(id))

	o.worker.mu.Lock()
	o.worker.fixed = true
	o.worker.mu.Unlock()
	var job int64
	require.NoError(t, o.pool.QueryRow(t.Context(), "SELECT job_id FROM dlq.redeliver(ARRAY[$1::uuid], 'worker:x', 'due')",
		id).Scan(&job))
	o.wait(job)
	require.Equal(t, "charge 12, ship 12", o.worker.done(), "automatic redelivery resumes")
	require.Equal(t, deadletter.Resolved, o.entry(id).Status)

	// A reopened entry also needs the choice.
	o.exec("SELECT dlq.reopen($1)", id)
	_, _, err := o.replayer.Replay(t.Context(), id, deadletter.Replay{Payload: json.RawMessage(`{"amount": 13}`)},
		replay.Patch{})
	require.ErrorContains(t, err, "have a checkpoint")
}

// A job that completed in its second attempt has a checkpoint, too. Running the job again repeats all steps.
func TestCheckpoint_RunAgainRepeatsAllSteps(t *testing.T) {
	t.Parallel()
	o := setupOrders(t)
	inserted, err := o.client.Insert(t.Context(), orderArgs{Amount: 10, FailIn: "ship"}, &river.InsertOpts{MaxAttempts: 2})
	require.NoError(t, err)
	o.wait(inserted.Job.ID)
	require.Equal(t, "reserve 10, charge 10", o.worker.done())
	o.worker.mu.Lock()
	o.worker.fixed = true
	o.worker.mu.Unlock()
	o.exec("UPDATE river_job SET state = 'available', scheduled_at = now() WHERE state IN ('retryable', 'available')")
	o.wait(inserted.Job.ID)
	require.Equal(t, "ship 10", o.worker.done())

	require.Equal(t, 1, o.count("SELECT dlq.run_again('2000-01-01', 'receiver lost it')"))
	o.wait(int64(o.count("SELECT max(id) FROM river_job")))
	require.Equal(t, "reserve 10, charge 10, ship 10", o.worker.done())
}

// An entry keeps its checkpoint while it is closed.
func TestCheckpoint_OutlivesReopening(t *testing.T) {
	t.Parallel()
	for name, reopen := range map[string]string{
		"undo":       "SELECT dlq.undo((SELECT id FROM dlq.operations ORDER BY id DESC LIMIT 1))",
		"done twice": "UPDATE river_job SET state = 'available', finalized_at = NULL",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.fail(1, "default", "x")
			var id uuid.UUID
			require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id FROM dlq.dead_letter_open").Scan(&id))
			b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"river:resumable_step": "charge"}'`)
			b.exec("SELECT dlq.act_on('discard', ARRAY[$1::uuid], 'kim')", id)
			b.exec(reopen)
			require.NoError(t, (&facts.Applier{Store: b.store}).All(t.Context()))
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"))
			b.exec("DELETE FROM river_job")

			edited := deadletter.Replay{Payload: json.RawMessage(`{"amount": 12}`), Act: deadletter.Act{Actor: "kim"}}
			_, _, err := b.replayer.Replay(t.Context(), id, edited, replay.Patch{})
			require.ErrorContains(t, err, "have a checkpoint")
			edited.Checkpoint = deadletter.Resume
			_, _, err = b.replayer.Replay(t.Context(), id, edited, replay.Patch{})
			require.NoError(t, err)
			require.Equal(t, 1, b.count("SELECT count(*) FROM river_job WHERE metadata ->> 'river:resumable_step' = 'charge'"))
		})
	}
}

func TestRun_PatchRequiresCheckpointChoice(t *testing.T) {
	t.Parallel()
	o := setupOrders(t)
	first, second := o.createEntry(), o.createEntry()
	o.fail(1, "default", "x")
	request := replay.Request{
		Filter: json.RawMessage(`{"queue": "default"}`),
		Patch:  replay.Patch{MergePatch: json.RawMessage(`{"failIn": null, "amount": 12}`)},
	}

	preview, err := o.replayer.Preview(t.Context(), withDefaults(request))
	require.NoError(t, err)
	require.EqualValues(t, 2, preview.Checkpoints)
	checkpoints := []string{}
	for _, s := range preview.Samples {
		if s.Checkpoint != nil {
			checkpoints = append(checkpoints, s.Checkpoint.String())
		}
	}
	require.Equal(t, []string{"resumes after step charge", "resumes after step charge"}, checkpoints)

	_, err = o.replayer.Start(t.Context(), withDefaults(request))
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	require.ErrorContains(t, err, "2 have a checkpoint")
	require.Zero(t, o.count("SELECT count(*) FROM dlq.replay_runs"))

	request.Checkpoint = deadletter.Discard
	run := o.start(request)
	o.runOnce()
	for _, id := range []uuid.UUID{first, second} {
		o.wait(int64(o.count("SELECT max(job_id) FROM dlq.entry_jobs WHERE entry_id = $1", id))) // it may already have ended
		require.Equal(t, deadletter.Resolved, o.entry(id).Status)
	}
	require.Equal(t, "reserve 12, charge 12, ship 12, reserve 12, charge 12, ship 12", o.worker.done())
	require.Equal(t, deadletter.Discard, o.get(run).Checkpoint)
	require.Equal(t, 2, o.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE to_status = 'dlq_processing'
		AND detail @> '{"checkpoint": "discard"}' AND entry_id = ANY ($1)`, []uuid.UUID{first, second}))
}

// TestRun_SkipsEntriesWithNewCheckpoint gives an entry a checkpoint after a run without the choice
// was started.
func TestRun_SkipsEntriesWithNewCheckpoint(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "default", "x")
	run := b.start(replay.Request{All: true, Patch: replay.Patch{MergePatch: json.RawMessage(`{"amount": 12}`)}})
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata || '{"river:resumable_step": "charge"}'`)
	b.runOnce()
	require.EqualValues(t, 1, b.get(run).Skipped)
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.replay_run_entries
		WHERE detail LIKE '%the run does not say whether to resume it'`))
}

// A replay that discards the checkpoint also discards the cursors of its steps; the entry keeps
// both.
func TestCheckpoint_DiscardsCursors(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "default", "x")
	b.exec(`UPDATE dlq.dead_letter_queue SET metadata = metadata
		|| '{"river:resumable_step": "ship", "river:resumable_cursor": {"ship": 3}}'`)
	var id uuid.UUID
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id FROM dlq.dead_letter_open").Scan(&id))
	entry, _, err := b.store.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, "resumes in step ship", deadletter.CheckpointOf(entry.Metadata).String())
	job, _, err := b.replayer.Replay(t.Context(), id, deadletter.Replay{
		Payload: json.RawMessage(`{"amount": 12}`), Checkpoint: deadletter.Discard, Act: deadletter.Act{Actor: "kim"},
	}, replay.Patch{})
	require.NoError(t, err)
	const keys = "'{river:resumable_step,river:resumable_cursor}'"
	require.Zero(t, b.count("SELECT count(*) FROM river_job WHERE id = $1 AND metadata ?| "+keys, job))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE metadata ?& "+keys))
}
