package deadletter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// If childVariable is set, this test binary runs as a River program without dlqd.
const childVariable = "DLQD_TEST_RIVER_CHILD"

func TestMain(m *testing.M) {
	if url := os.Getenv(childVariable); url != "" {
		runChild(url)
		return
	}
	postgrestest.Main(m)
}

// jobArgs are job args of any kind and shape.
type jobArgs struct {
	kind string
	raw  json.RawMessage
}

func (a jobArgs) Kind() string                 { return a.kind }
func (a jobArgs) MarshalJSON() ([]byte, error) { return a.raw, nil }
func (a *jobArgs) UnmarshalJSON([]byte) error  { return nil }

// bundle is a database with dlqd's schema, and a River client whose only worker calls a function of the test.
type bundle struct {
	*testing.T

	pool   *pgxpool.Pool
	store  *deadletter.Store
	client *river.Client[pgx.Tx]
}

type testArgs struct {
	Value string `json:"value" river:"unique"`
}

func (testArgs) Kind() string { return "test_job" }

func setup(t *testing.T, work func(context.Context, *river.Job[testArgs]) error) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	b := &bundle{T: t, pool: pool, store: deadletter.NewStore(pool, postgres.DefaultSchemas())}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(work))
	var err error
	b.client, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}, Workers: workers,
		Logger: slog.New(slog.DiscardHandler), TestOnly: true,
		FetchCooldown: time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()}, RetryPolicy: noWait{},
	})
	require.NoError(t, err)
	return b
}

type noWait struct{}

func (noWait) NextRetry(*rivertype.JobRow) time.Time { return time.Now() }

// start starts the client, and stops it when the test ends.
func (b *bundle) start() {
	b.Helper()
	require.NoError(b, b.client.Start(b.Context()))
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(b, b.client.StopAndCancel(ctx))
	})
}

func (b *bundle) insert(opts *river.InsertOpts) int64 {
	b.Helper()
	result, err := b.client.Insert(b.Context(), testArgs{Value: "x"}, opts)
	require.NoError(b, err)
	return result.Job.ID
}

// runJob inserts a job, starts the client, and waits until the job is in one of the states.
func (b *bundle) runJob(opts *river.InsertOpts, states ...rivertype.JobState) int64 {
	b.Helper()
	b.start()
	id := b.insert(opts)
	b.await(id, states...)
	return id
}

func (b *bundle) await(id int64, states ...rivertype.JobState) {
	b.Helper()
	require.Eventually(b, func() bool {
		job, err := b.client.JobGet(b.Context(), id)
		require.NoError(b, err)
		return slices.Contains(states, job.State)
	}, 5*time.Minute, 5*time.Millisecond)
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *bundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

// processInbox files the inbox without decisions and applies facts, as dlqd does within a second.
func (b *bundle) processInbox() {
	b.Helper()
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'))")
	require.NoError(b, (&facts.Applier{Store: b.store}).All(b.Context()))
}

// entry processes the inbox and returns the only dead letter with its audit trail.
func (b *bundle) entry() (*deadletter.Entry, []deadletter.Transition) {
	b.Helper()
	b.processInbox()
	list, err := b.store.List(b.Context(), deadletter.Page{Limit: 10})
	require.NoError(b, err)
	require.Len(b, list, 1)
	entry, transitions, err := b.store.Get(b.Context(), list[0].ID)
	require.NoError(b, err)
	return entry, transitions
}

func (b *bundle) requireNoEntries() {
	b.Helper()
	require.Zero(b, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Zero(b, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
}

func succeed(context.Context, *river.Job[testArgs]) error { return nil }

// endBySQL ends a job with a plain UPDATE.
func (b *bundle) endBySQL(id int64, state string) {
	b.Helper()
	b.exec("UPDATE river_job SET state = $2::river_job_state, finalized_at = now() WHERE id = $1", id, state)
}

func TestCapture_RecordsLastFailedAttempt(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ context.Context, job *river.Job[testArgs]) error {
		return fmt.Errorf("attempt %d: connection refused", job.Attempt)
	})
	id := b.runJob(&river.InsertOpts{MaxAttempts: 2, Priority: 3, Tags: []string{"tag1"}}, rivertype.JobStateDiscarded)
	entry, transitions := b.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, id, entry.RiverJobID)
	require.Equal(t, "test_job", entry.Kind)
	require.Equal(t, "attempt 2: connection refused", *entry.ErrorMessage)
	require.JSONEq(t, `{"value": "x"}`, string(entry.OriginalEvent))
	require.Equal(t, int16(3), entry.Priority)
	require.Equal(t, []string{"tag1"}, entry.Tags)
	require.EqualValues(t, 2, entry.RetryCount)
	require.EqualValues(t, 2, entry.MaxRetries)
	require.Nil(t, entry.Strategy, "a captured entry is undecided")
	var history []struct {
		Attempt int
		Error   string
	}
	require.NoError(t, json.Unmarshal(entry.RetryHistory, &history))
	require.Len(t, history, 2)
	require.Equal(t, "attempt 1: connection refused", history[0].Error)
	require.True(t, entry.FirstFailedAt.Before(entry.LastFailedAt))
	require.Len(t, transitions, 1)
	require.Nil(t, transitions[0].FromStatus)
	require.Equal(t, "capture", transitions[0].Actor)
}

func TestCapture_IgnoresSuccessAndRetriedFailures(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ context.Context, job *river.Job[testArgs]) error {
		if job.Attempt == 1 {
			return errors.New("once")
		}
		return nil
	})
	b.runJob(&river.InsertOpts{MaxAttempts: 2}, rivertype.JobStateCompleted)
	b.requireNoEntries()
}

func TestCapture_RecordsPanics(t *testing.T) {
	t.Parallel()
	b := setup(t, func(context.Context, *river.Job[testArgs]) error { panic("index out of range [3]") })
	b.runJob(&river.InsertOpts{MaxAttempts: 1}, rivertype.JobStateDiscarded)
	entry, _ := b.entry()
	require.Equal(t, "panic", *entry.ErrorType)
	require.Equal(t, "index out of range [3]", *entry.ErrorMessage)
	require.Contains(t, *entry.ErrorStackTrace, "TestCapture_RecordsPanics")
}

// If a worker panics with a structured error, the entry has the error's fields and a stack trace.
func TestCapture_RecordsPanicsWithStructuredErrors(t *testing.T) {
	t.Parallel()
	b := setup(t, func(context.Context, *river.Job[testArgs]) error {
		panic(fmt.Errorf("charge: %w", &riverdlq.Error{
			Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness, Title: "Declined",
			Message: "insufficient funds", Context: map[string]any{"payment": "pay_81"},
		}))
	})
	b.runJob(&river.InsertOpts{MaxAttempts: 1}, rivertype.JobStateDiscarded)
	entry, _ := b.entry()
	require.Equal(t, "CardDeclined", *entry.ErrorType)
	require.Equal(t, "51", *entry.ErrorCode)
	require.Equal(t, "business", *entry.ErrorClass)
	require.Equal(t, "insufficient funds", *entry.ErrorMessage)
	require.JSONEq(t, `{"payment": "pay_81"}`, string(entry.ErrorContext))
	require.Contains(t, *entry.ErrorStackTrace, "TestCapture_RecordsPanicsWithStructuredErrors")
}

func TestCapture_RecordsJobCancel(t *testing.T) {
	t.Parallel()
	b := setup(t, func(context.Context, *river.Job[testArgs]) error {
		return river.JobCancel(
			errors.New("card declined"))
	})
	b.runJob(nil, rivertype.JobStateCancelled)
	entry, _ := b.entry()
	require.Equal(t, "card declined", *entry.ErrorMessage)
	require.EqualValues(t, 1, entry.RetryCount)
}

func TestCapture_RecordsStructuredErrors(t *testing.T) {
	t.Parallel()
	b := setup(t, func(context.Context, *river.Job[testArgs]) error {
		return fmt.Errorf("charge: %w", &riverdlq.Error{
			Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness, Title: "Declined",
			Message: "insufficient funds \x00",
			Context: map[string]any{
				"nul": "a\x00b", "half": json.RawMessage(`"\ud800"`), "amount": 42,
				"destination": "bank", "url": "https://bank.example/",
			},
		})
	})
	b.runJob(nil, rivertype.JobStateCancelled) // an error with a permanent class ends the job at once
	entry, _ := b.entry()
	require.Equal(t, "CardDeclined", *entry.ErrorType)
	require.Equal(t, "51", *entry.ErrorCode)
	require.Equal(t, "business", *entry.ErrorClass)
	require.Equal(t, "insufficient funds \uFFFD", *entry.ErrorMessage)
	require.JSONEq(t, `{"nul": "a\uFFFDb", "half": "\uFFFD", "amount": 42, "destination": "bank",
		"url": "https://bank.example/"}`, string(entry.ErrorContext))
	require.Equal(t, "Declined", *entry.ErrorTitle)
	require.Equal(t, "bank", *entry.Destination)
	require.Equal(t, "https://bank.example/", *entry.DestinationURL)
}

// dlqd reads all metadata that riverdlq writes. Tests of the module riverdlq check that it writes the same metadata
// with other versions of River.
func TestCapture_ReadsMetadataOfRiverdlq(t *testing.T) {
	t.Parallel()
	metadata, err := os.ReadFile("../../riverdlq/testdata/metadata.json")
	require.NoError(t, err)
	b := setup(t, succeed)
	id := b.insert(nil)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 2, metadata = $2::jsonb,
		errors = ARRAY[jsonb_build_object('attempt', 1, 'error', 'no', 'at', now()),
			jsonb_build_object('attempt', 2, 'error', 'charge: BankUnavailable: the bank does not answer', 'at', now())]
		WHERE id = $1`, id, string(metadata))
	entry, _ := b.entry()
	require.Equal(t, "BankUnavailable", *entry.ErrorType)
	require.Equal(t, "503", *entry.ErrorCode)
	require.Equal(t, "outage", *entry.ErrorClass)
	require.Equal(t, "Bank unavailable", *entry.ErrorTitle)
	require.Equal(t, "the bank does not answer", *entry.ErrorMessage)
	require.Contains(t, string(entry.ErrorContext), "9007199254740993")
	require.Contains(t, string(entry.ErrorContext), "a\uFFFDb")
	require.JSONEq(t, `{"cpu": 41.5, "memory": 63}`, string(entry.SystemState))
	require.Equal(t, "charged", deadletter.StageOf(entry.Metadata))
	require.Equal(t, "4.2.0", deadletter.VersionOf(entry.Metadata))
	attempts := attemptsOf(t, entry.RetryHistory)
	require.Len(t, attempts, 2)
	for _, attempt := range attempts {
		require.InDelta(t, 0.25, *attempt.ProcessingDuration, 0)
	}
}

func TestCapture_IgnoresStructuredErrorsOfEarlierAttempts(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ context.Context, job *river.Job[testArgs]) error {
		if job.Attempt == 1 {
			return &riverdlq.Error{Type: "First", Message: "structured"}
		}
		return errors.New("plain")
	})
	b.runJob(&river.InsertOpts{MaxAttempts: 2}, rivertype.JobStateDiscarded)
	entry, _ := b.entry()
	require.Nil(t, entry.ErrorType)
	require.Equal(t, "plain", *entry.ErrorMessage)
}

func TestCapture_RecordsRescuedJobs(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.insert(&river.InsertOpts{MaxAttempts: 2, Queue: "unworked"})
	b.exec("UPDATE river_job SET state = 'running', attempt = 2, attempted_at = now() - interval '5 hours' WHERE id = $1",
		id)
	b.start()
	b.await(id, rivertype.JobStateDiscarded)
	entry, _ := b.entry()
	require.Equal(t, "Stuck job rescued by JobRescuer", *entry.ErrorMessage)
}

func TestCapture_RecordsUnregisteredKinds(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	inserter, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	result, err := inserter.Insert(t.Context(), jobArgs{"no_such_kind", json.RawMessage(`{}`)},
		&river.InsertOpts{MaxAttempts: 1})
	require.NoError(t, err)
	b.start()
	b.await(result.Job.ID, rivertype.JobStateDiscarded)
	entry, _ := b.entry()
	require.Equal(t, "no_such_kind", entry.Kind)
	require.Contains(t, *entry.ErrorMessage, "not registered")
}

func TestCapture_RecordsJobsEndedBySQL(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.endBySQL(b.insert(nil), "discarded")
	entry, _ := b.entry()
	require.Equal(t, "the job ended without an error", *entry.ErrorMessage)
}

func TestCapture_RollsBackWithItsTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.insert(nil)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1", id)
	require.NoError(t, err)
	var n int
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM dlq.dead_letter_queue").Scan(&n))
	require.Equal(t, 1, n, "the dead letter is in the same transaction")
	require.NoError(t, tx.Rollback(t.Context()))
	b.requireNoEntries()
	require.Equal(t, 1, b.count("SELECT count(*) FROM river_job WHERE state = 'available'"))
}

func TestCapture_IgnoresCancelRequests(t *testing.T) {
	t.Parallel()
	running := make(chan struct{})
	b := setup(t, func(ctx context.Context, _ *river.Job[testArgs]) error {
		close(running)
		<-ctx.Done()
		return ctx.Err()
	})
	waiting := b.insert(&river.InsertOpts{Queue: "unworked"})
	_, err := b.client.JobCancel(t.Context(), waiting)
	require.NoError(t, err)
	b.start()
	id := b.insert(nil)
	<-running
	_, err = b.client.JobCancel(t.Context(), id)
	require.NoError(t, err)
	b.await(id, rivertype.JobStateCancelled)
	b.requireNoEntries()
}

func TestCapture_IgnoresUniqueDuplicates(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	unique := &river.InsertOpts{
		Queue: "unworked", MaxAttempts: 1,
		UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: []rivertype.JobState{
			rivertype.JobStateAvailable, rivertype.JobStatePending, rivertype.JobStateRunning, rivertype.JobStateScheduled,
		}},
	}
	first := b.insert(unique)
	b.exec("UPDATE river_job SET state = 'retryable', scheduled_at = now() - interval '1 minute' WHERE id = $1", first)
	second := b.insert(unique)
	require.NotEqual(t, first, second)
	b.start() // the scheduler finds that another job has the first job's key
	b.await(first, rivertype.JobStateDiscarded)
	b.requireNoEntries()

	// River's scheduler has left a marker in the metadata. A later failure still becomes an entry.
	b.endBySQL(second, "completed")
	_, err := b.client.JobRetry(t.Context(), first)
	require.NoError(t, err)
	b.exec("UPDATE river_job SET state = 'running', attempt = 1 WHERE id = $1", first)
	b.endBySQL(first, "discarded")
	entry, _ := b.entry()
	require.Equal(t, first, entry.RiverJobID)
}

func TestCapture_FollowsRetriesOutsideDlqd(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		failAgain bool
		want      deadletter.Status
	}{
		"to success": {false, deadletter.Resolved},
		"to failure": {true, deadletter.Pending},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gate := make(chan struct{})
			b := setup(t, func(ctx context.Context, job *river.Job[testArgs]) error {
				if job.Attempt == 1 {
					return errors.New("first")
				}
				select {
				case <-gate:
				case <-ctx.Done():
				}
				if test.failAgain {
					return errors.New("again")
				}
				return nil
			})
			id := b.runJob(&river.InsertOpts{MaxAttempts: 1}, rivertype.JobStateDiscarded)
			_, err := b.client.JobRetry(t.Context(), id) // same as River UI's retry button
			require.NoError(t, err)
			entry, _ := b.entry()
			require.Equal(t, deadletter.Processing, entry.Status)
			require.Equal(t, id, *entry.RedeliveryJobID)
			close(gate)
			b.await(id, rivertype.JobStateCompleted, rivertype.JobStateDiscarded)
			entry, transitions := b.entry()
			require.Equal(t, test.want, entry.Status)
			require.Len(t, transitions, 3)
			if test.failAgain {
				require.Equal(t, "again", *entry.ErrorMessage)
			} else {
				require.Equal(t, "manual_retry", *entry.ResolutionStrategy)
			}
		})
	}
}

func TestCapture_UpdatesOpenEntryOnNextFailure(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.insert(nil)
	b.endBySQL(id, "discarded")
	before, _ := b.entry()
	b.endBySQL(id, "completed") // not a retry, so the entry does not follow the job
	b.exec(`UPDATE river_job SET state = 'discarded',
		errors = ARRAY['{"attempt": 0, "error": "second", "at": "2026-01-01T00:00:00Z"}'::jsonb] WHERE id = $1`, id)
	after, transitions := b.entry()
	require.Equal(t, before.ID, after.ID)
	require.Equal(t, "second", *after.ErrorMessage)
	require.Len(t, transitions, 2)

	// The same happens if the job has the entry's marker, as after a retry that dlqd followed.
	b.exec("UPDATE river_job SET metadata = jsonb_build_object('dlq:entry_id', $2::uuid) WHERE id = $1", id, after.ID)
	b.endBySQL(id, "completed")
	b.exec(`UPDATE river_job SET state = 'discarded', errors = errors || '{"attempt": 0, "error": "again"}'::jsonb
		WHERE id = $1`, id)
	after, _ = b.entry()
	require.Equal(t, "again", *after.ErrorMessage)

	// A parked entry stays parked, and has the new error.
	require.NoError(t, b.store.Park(t.Context(), after.ID, deadletter.Act{Actor: "kim"}))
	b.endBySQL(id, "completed")
	b.exec(`UPDATE river_job SET state = 'discarded', errors = errors || '{"attempt": 0, "error": "third"}'::jsonb
		WHERE id = $1`, id)
	after, _ = b.entry()
	require.Equal(t, deadletter.Manual, after.Status)
	require.Equal(t, "third", *after.ErrorMessage)
}

func TestCapture_CreatesNewEntryAfterClose(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.insert(nil)
	b.endBySQL(id, "discarded")
	entry, _ := b.entry()
	require.NoError(t, b.store.Discard(t.Context(), entry.ID, deadletter.Act{Actor: "kim"}))
	_, err := b.client.JobRetry(t.Context(), id)
	require.NoError(t, err)
	b.endBySQL(id, "discarded")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'"))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived'"))
}

// A completed redelivery has resolved its entry. Then it is run again outside dlqd, and fails. The entry's audit trail
// has the run and the failure, and the entry is parked.
func TestCapture_ReopensEntryIfClosedRedeliveryFails(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	first := b.createEntry()
	job, err := b.store.Replay(t.Context(), first.ID, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	b.endBySQL(job, "completed")
	b.processInbox()
	b.exec("UPDATE river_job SET state = 'running', finalized_at = NULL WHERE id = $1", job)
	b.endBySQL(job, "discarded")
	entry, trail := b.entry()
	require.Equal(t, first.ID, entry.ID)
	require.Equal(t, deadletter.Manual, entry.Status)
	require.Contains(t, *trail[len(trail)-3].Reason, "done twice?")
	require.Contains(t, *trail[len(trail)-1].Reason, "failed again")
}

func TestCapture_AcceptsAnyJobData(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("Ünïcödé 💥 ", 90_000) // more than a megabyte
	large := `{"blob": "` + strings.Repeat("0123456789", 500_000) + `"}`
	for name, test := range map[string]struct{ args, errors, metadata, wantError string }{
		"1 MB error":        {`{}`, `{"error": "` + long + `", "attempt": 0}`, `{}`, long},
		"5 MB args":         {large, `{"error": "e"}`, `{}`, "e"},
		"args array":        {`[1, [2], {"a": null}]`, `{"error": "e"}`, `{}`, "e"},
		"args string":       {`"text"`, `{"error": "e"}`, `{}`, "e"},
		"args number":       {`1e300`, `{"error": "e"}`, `{}`, "e"},
		"args null":         {`null`, `{"error": "e"}`, `{}`, "e"},
		"args boolean":      {`true`, `{"error": "e"}`, `{}`, "e"},
		"non-ASCII":         {`{"ключ": "значение", "鍵": "値"}`, `{"error": "失敗"}`, `{"メタ": 1}`, "失敗"},
		"error is a string": {`{}`, `"text"`, `{}`, "the job ended without an error"},
		"error is null":     {`{}`, `null`, `{}`, "the job ended without an error"},
		"error of wrong types": {
			`{}`, `{"error": {"a": 1}, "trace": [1], "at": "yesterday", "attempt": "one"}`,
			`{}`, `{"a": 1}`,
		},
		"impossible date":                   {`{}`, `{"error": "e", "at": "2026-02-30T25:61:61Z"}`, `{}`, "e"},
		"metadata array":                    {`{}`, `{"error": "e"}`, `["dlq:error"]`, "e"},
		"metadata string":                   {`{}`, `{"error": "e"}`, `"dlq:entry_id"`, "e"},
		"structured error is not an object": {`{}`, `{"error": "e"}`, `{"dlq:error": 5}`, "e"},
		"structured error of wrong types": {
			`{}`, `{"error": "e", "attempt": 0}`,
			`{"dlq:error": {"attempt": 0, "type": {"x": 1}, "code": [1], "class": 7, "message": null, "context": "text"}}`, "e",
		},
		"unknown entry id":   {`{}`, `{"error": "e"}`, `{"dlq:entry_id": "0198a0b0-0000-7000-8000-000000000000"}`, "e"},
		"malformed entry id": {`{}`, `{"error": "e"}`, `{"dlq:entry_id": {"a": 1}}`, "e"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, succeed)
			id := b.insert(nil)
			b.exec(`UPDATE river_job SET args = $2::jsonb, metadata = $3::jsonb, errors = ARRAY[$4::jsonb], state = 'running'
				WHERE id = $1`,
				id, test.args, test.metadata, test.errors)
			b.endBySQL(id, "discarded")
			entry, _ := b.entry()
			require.Equal(t, test.wantError, *entry.ErrorMessage)
			require.JSONEq(t, test.args, string(entry.OriginalEvent))
		})
	}
}

func TestCapture_AcceptsMalformedMessageArgs(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	var long strings.Builder // exceeds the size of an index entry, and does not compress
	for range 500 {
		_, _ = fmt.Fprintf(&long, "%016x", rand.Uint64())
	}
	for _, args := range []string{
		`[]`, `"x"`, `{"kind": {"a": 1}, "messageId": [1]}`,
		`{"kind": "` + long.String() + `", "source": "` + long.String() + `", "subscriberId": null}`,
	} {
		id := b.insert(nil)
		b.exec(`UPDATE river_job SET kind = 'dlqd_message', args = $2::jsonb WHERE id = $1`, id, args)
		b.endBySQL(id, "discarded")
	}
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

func TestCapture_WorksForRolesWithoutRights(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.insert(nil)
	url := b.pool.Config().ConnString()
	admin := postgrestest.Open(t, postgrestest.Superuser(t, url))
	role := fmt.Sprintf("app_%d", time.Now().UnixNano())
	_, err := admin.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN")
	require.NoError(t, err)
	b.exec("GRANT USAGE ON SCHEMA public TO " + role)
	b.exec("GRANT SELECT, INSERT, UPDATE, DELETE ON river_job TO " + role)
	app := postgrestest.Open(t, postgrestest.WithUser(url, role))
	t.Cleanup(func() {
		app.Close()
		_, err := admin.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+role+"; DROP ROLE "+role)
		require.NoError(t, err)
	})
	_, err = app.Exec(t.Context(), "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1", id)
	require.NoError(t, err)
	_, err = app.Exec(t.Context(), "UPDATE river_job SET state = 'available', finalized_at = NULL WHERE id = $1", id)
	require.NoError(t, err)
	_, err = app.Exec(t.Context(), "SELECT * FROM dlq.dead_letter_queue")
	require.ErrorContains(t, err, "permission denied")
	entry, _ := b.entry()
	require.Equal(t, deadletter.Processing, entry.Status)
}

func TestCapture_WorksForOtherProcesses(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+url)
	out, err := child.CombinedOutput()
	require.NoError(t, err, string(out))
	pool := postgrestest.Open(t, url)
	var message string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT error_message FROM dlq.dead_letter_queue").Scan(&message))
	require.Equal(t, "the child fails", message)
}

// runChild is an application that uses River without dlqd.
func runChild(url string) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	pool, err := pgxpool.New(ctx, url)
	must(err)
	defer pool.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(
		func(context.Context, *river.Job[testArgs]) error { return errors.New("the child fails") }))
	client, err := river.NewClient(riverpgxv5.New(pool),
		&river.Config{Queues: map[string]river.QueueConfig{"default": {MaxWorkers: 2}}, Workers: workers})
	must(err)
	events, stop := client.Subscribe(river.EventKindJobFailed)
	defer stop()
	must(client.Start(ctx))
	_, err = client.Insert(ctx, testArgs{Value: "child"}, &river.InsertOpts{MaxAttempts: 1})
	must(err)
	<-events
	must(client.Stop(ctx))
}

func TestCapture_SuccessCallsNoFunction(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.exec("CREATE OR REPLACE FUNCTION dlq.capture() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION " +
		"'capture ran'; END $$")
	b.exec("CREATE OR REPLACE FUNCTION dlq.follow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION " +
		"'follow ran'; END $$")
	b.runJob(nil, rivertype.JobStateCompleted)
}
