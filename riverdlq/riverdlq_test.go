package riverdlq_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/riverdlq"
)

// TestMiddleware_WritesMetadata compares the metadata of a failed job with testdata/metadata.json. Every later dlqd
// must be able to read that file.
func TestMiddleware_WritesMetadata(t *testing.T) {
	t.Parallel()
	job := run(t, &river.InsertOpts{MaxAttempts: 2}, func(ctx context.Context, job *river.Job[testArgs]) error {
		if job.Attempt == 1 {
			check(t, riverdlq.Stage(ctx, "charged"))
			return errors.New("no")
		}
		return fmt.Errorf("charge: %w", &riverdlq.Error{
			Type: "BankUnavailable", Code: "503", Class: riverdlq.ClassOutage, Title: "Bank unavailable",
			Message: "the bank does not answer",
			Context: map[string]any{
				"account": int64(9007199254740993), "note": "a\x00b", "path": []string{"charge", "capture"},
			},
		})
	})
	if job.State != rivertype.JobStateDiscarded {
		t.Fatalf("job is %s, want discarded", job.State)
	}
	want, err := os.ReadFile("testdata/metadata.json")
	check(t, err)
	got := recorded(t, job.Metadata)
	attempts, _ := got[riverdlq.AttemptsKey].(map[string]any)
	for number, attempt := range attempts {
		fields, _ := attempt.(map[string]any)
		seconds, _ := fields["seconds"].(json.Number)
		if size, err := seconds.Float64(); err != nil || size < 0 {
			t.Fatalf("attempt %s took %q seconds", number, seconds)
		}
		fields["seconds"] = json.Number("0.25")
	}
	if want := recorded(t, want); !reflect.DeepEqual(want, got) {
		t.Errorf("metadata is\n%v\nwant\n%v", got, want)
	}
}

func TestMiddleware_CancelsPermanentErrors(t *testing.T) {
	t.Parallel()
	for _, class := range []riverdlq.Class{riverdlq.ClassBusiness, riverdlq.ClassTransient} {
		t.Run(string(class), func(t *testing.T) {
			t.Parallel()
			job := run(t, &river.InsertOpts{MaxAttempts: 2}, func(context.Context, *river.Job[testArgs]) error {
				return &riverdlq.Error{Type: "Declined", Class: class, Message: "no"}
			})
			want, attempts := rivertype.JobStateDiscarded, 2
			if class.Permanent() {
				want, attempts = rivertype.JobStateCancelled, 1
			}
			if job.State != want || job.Attempt != attempts {
				t.Errorf("job is %s after %d attempts, want %s after %d", job.State, job.Attempt, want, attempts)
			}
		})
	}
}

func TestMiddleware_RecordsPanics(t *testing.T) {
	t.Parallel()
	job := run(t, &river.InsertOpts{MaxAttempts: 1}, func(context.Context, *river.Job[testArgs]) error {
		panic(&riverdlq.Error{Type: "Broken", Message: "no"})
	})
	got, _ := recorded(t, job.Metadata)[riverdlq.MetadataKey].(map[string]any)
	if got["type"] != "Broken" || got["message"] != "no" {
		t.Errorf("recorded %v", got)
	}
	if len(job.Errors) != 1 || job.Errors[0].Trace == "" {
		t.Errorf("River recorded %v, want one error with a trace", job.Errors)
	}
}

func TestRecord_FailsOutsideWorker(t *testing.T) {
	t.Parallel()
	if err := riverdlq.Record(t.Context(), &rivertype.JobRow{}, &riverdlq.Error{Message: "no"}); err == nil {
		t.Error("Record of a structured error returned no error")
	}
	if err := riverdlq.Record(t.Context(), &rivertype.JobRow{}, errors.New("no")); err != nil {
		t.Errorf("Record of a plain error: %v", err)
	}
}

// TestREADME_QuotesExamples checks that the code in the README occurs in the examples, which are compiled and run.
func TestREADME_QuotesExamples(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	check(t, err)
	examples, err := os.ReadFile("example_test.go")
	check(t, err)
	blocks := strings.Split(string(readme), "```go\n")[1:]
	if len(blocks) == 0 {
		t.Fatal("README.md has no code")
	}
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "```")
		if !strings.Contains(flat(string(examples)), flat(code)) {
			t.Errorf("example_test.go lacks this code of README.md:\n%s", code)
		}
	}
}

// flat returns text without indentation.
func flat(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

type testArgs struct{}

func (testArgs) Kind() string { return "test_job" }

type noWait struct{}

func (noWait) NextRetry(*rivertype.JobRow) time.Time { return time.Now() }

// run inserts a job, and starts a River client that has the middleware and works the job with the function work. It
// returns the job after the job's end.
func run(
	t *testing.T, opts *river.InsertOpts, work func(context.Context, *river.Job[testArgs]) error,
) *rivertype.JobRow {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(work))
	client, err := river.NewClient(riverpgxv5.New(database(t)), &river.Config{
		Logger: slog.New(slog.DiscardHandler),
		Middleware: []rivertype.Middleware{&riverdlq.Middleware{
			Version: "4.2.0", SystemState: func() (riverdlq.SystemState, bool) {
				return riverdlq.SystemState{CPU: 41.5, Memory: 63}, true
			},
		}},
		Queues:      map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1}},
		RetryPolicy: noWait{}, TestOnly: true, Workers: workers,
	})
	check(t, err)
	events, unsubscribe := client.Subscribe(river.EventKindJobCancelled, river.EventKindJobCompleted,
		river.EventKindJobFailed)
	defer unsubscribe()
	check(t, client.Start(ctx))
	defer func() { check(t, client.StopAndCancel(ctx)) }()
	inserted, err := client.Insert(ctx, testArgs{}, opts)
	check(t, err)
	for {
		select {
		case event := <-events:
			if event.Job.FinalizedAt == nil {
				continue
			}
			job, err := client.JobGet(ctx, inserted.Job.ID)
			check(t, err)
			return job
		case <-ctx.Done():
			t.Fatal("the job does not end")
		}
	}
}

// database returns a pool on a new database with River's tables. It skips the test if no server is configured.
func database(t *testing.T) *pgxpool.Pool {
	t.Helper()
	url := os.Getenv("DLQD_TEST_DATABASE_URL")
	if url == "" {
		t.Skip(`DLQD_TEST_DATABASE_URL is not set: run "make test", or set it to a server's URL, as its superuser`)
	}
	admin, err := pgx.Connect(t.Context(), url)
	check(t, err)
	name := "riverdlq_" + strings.ToLower(rand.Text())
	_, err = admin.Exec(t.Context(), "CREATE DATABASE "+name)
	check(t, err)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
		check(t, errors.Join(err, admin.Close(ctx)))
	})
	config, err := pgxpool.ParseConfig(url)
	check(t, err)
	config.ConnConfig.Database = name
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	check(t, err)
	t.Cleanup(pool.Close)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	check(t, err)
	_, err = migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	check(t, err)
	return pool
}

// recorded returns the data that the middleware recorded in a job's metadata. Numbers keep their digits.
func recorded(t *testing.T, metadata []byte) map[string]any {
	t.Helper()
	var all map[string]any
	decoder := json.NewDecoder(bytes.NewReader(metadata))
	decoder.UseNumber()
	check(t, decoder.Decode(&all))
	return map[string]any{
		riverdlq.MetadataKey: all[riverdlq.MetadataKey], riverdlq.AttemptsKey: all[riverdlq.AttemptsKey],
		riverdlq.VersionKey: all[riverdlq.VersionKey], riverdlq.StageKey: all[riverdlq.StageKey],
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The metadata of failed and of completed jobs has the stage and the version. A later attempt keeps the stage.
func TestStage_IsKeptWithTheJob(t *testing.T) {
	t.Parallel()
	job := run(t, &river.InsertOpts{MaxAttempts: 2}, func(ctx context.Context, job *river.Job[testArgs]) error {
		if job.Attempt == 1 {
			check(t, riverdlq.Stage(ctx, "reserved"))
			check(t, riverdlq.Stage(ctx, "charged"))
		}
		return errors.New("no")
	})
	var got map[string]any
	check(t, json.Unmarshal(job.Metadata, &got))
	if got[riverdlq.StageKey] != "charged" || got[riverdlq.VersionKey] != "4.2.0" {
		t.Errorf("metadata is %s, want stage charged and version 4.2.0", job.Metadata)
	}
	job = run(t, nil, func(ctx context.Context, _ *river.Job[testArgs]) error {
		return riverdlq.Stage(ctx, strings.Repeat("a", 99)+"\u00e9")
	})
	got = nil
	check(t, json.Unmarshal(job.Metadata, &got))
	if job.State != rivertype.JobStateCompleted || got[riverdlq.VersionKey] != "4.2.0" ||
		got[riverdlq.StageKey] != strings.Repeat("a", 99)+"\ufffd" {
		t.Errorf("job is %s with metadata %s", job.State, job.Metadata)
	}
	if riverdlq.Stage(t.Context(), "charged") == nil {
		t.Error("a context that is not River's gives no error")
	}
}
