package ingest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool    *pgxpool.Pool
	config  ingest.Config
	inserts atomic.Int64
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{T: t, pool: postgrestest.Pool(t)}
	rules, err := policy.Default("http://127.0.0.1:1/")
	require.NoError(t, err)
	b.config = ingest.Config{
		Pool: b.pool, Schemas: postgres.DefaultSchemas(),
		Policy: func() *policy.Policy { return rules }, Logger: slog.New(slog.DiscardHandler),
		Observe: func(int, time.Duration, time.Duration, error) { b.inserts.Add(1) },
	}
	return b
}

func (b *bundle) start() *ingest.Ingester {
	b.Helper()
	i, err := ingest.New(b.config)
	require.NoError(b, err)
	b.Cleanup(func() { i.Stop(context.Background()) })
	return i
}

func (b *bundle) jobs() int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT count(*) FROM river_job").Scan(&n))
	return n
}

func (b *bundle) message(id, payload string) *message.Message {
	b.Helper()
	raw := fmt.Sprintf(`{"queue": "default", "kind": "order.placed", "payload": %s`, payload)
	if id != "" {
		raw += fmt.Sprintf(`, "messageId": %q`, id)
	}
	msg, err := message.Parse([]byte(raw + "}"))
	require.NoError(b, err)
	return msg
}

func TestSubmit_StoresJob(t *testing.T) {
	t.Parallel()
	b := setup(t)
	receipt, err := b.start().Submit(t.Context(), b.message("order-1", `{"a": 1}`), ingest.Trace{Parent: "00-aa-bb-01"})
	require.NoError(t, err)
	var args, metadata string
	var key []byte
	var attempts, priority int
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT args, metadata, unique_key, max_attempts, priority
		FROM river_job WHERE id = $1 AND kind = 'dlqd_message'`,
		receipt.JobID).Scan(&args, &metadata, &key, &attempts, &priority))
	require.JSONEq(t, `{"messageId": "order-1", "queue": "default", "kind": "order.placed", "payload": {"a": 1}}`, args)
	require.JSONEq(t, `{"traceparent": "00-aa-bb-01"}`, metadata)
	require.Equal(t, message.UniqueKey("order-1"), key, "River builds the key as this package expects")
	require.Equal(t, 3, attempts)
	require.Equal(t, message.DefaultPriority, priority)
}

// TestSubmit_StoresJobAsRiverDoes compares each column of a message's job with the same column of a job that River's
// client inserts.
func TestSubmit_StoresJobAsRiverDoes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		raw   string
		exact bool
		trace ingest.Trace
	}{
		"plain": {
			raw: `{"messageId": "m", "queue": "default", "kind": "k", "payload": {"b": 1.50, "a": "<&>é\u2028"}}`,
		},
		"generated id": {raw: `{"queue": "default", "kind": "k", "payload": null}`},
		"traced": {
			raw:   `{"messageId": "m:~@+=-", "queue": "default", "kind": "k", "payload": [1]}`,
			trace: ingest.Trace{Parent: "00-aa-bb-01", State: "a=b"},
		},
		"all fields": {raw: `{"messageId": "m", "queue": "default", "kind": "k", "payload": 1, "source": "s", "version": "2",
			"priority": 4, "tags": ["one", "two-2"], "headers": {"X-A": "b"}, "metadata": {"c": ["d"]}, "subscriberId": "u",
			"orderingKey": "o"}`},
		"scheduled": {
			raw: `{"queue": "default", "kind": "k", "payload": 1, "scheduledAt": "2099-01-31T08:00:00+02:00"}`,
		},
		"scheduled for the past": {
			raw: `{"queue": "default", "kind": "k", "payload": 1, "scheduledAt": "2020-01-31T08:00:00.123456789Z"}`,
		},
		"exact": {raw: `{"queue": "default", "kind": "k", "payload": {"b":  1.50, "a": 1}}`, exact: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			queue := b.config.Policy().Queues[policy.DefaultQueue]
			if test.exact {
				queue.Payload = policy.PayloadExact
			}
			msg, err := message.Parse([]byte(test.raw))
			require.NoError(t, err)
			receipt, err := b.start().Submit(t.Context(), msg, test.trace)
			require.NoError(t, err)
			got := b.row(receipt.JobID)

			_, err = b.pool.Exec(t.Context(), "DELETE FROM river_job")
			require.NoError(t, err)
			client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{})
			require.NoError(t, err)
			opts := &river.InsertOpts{
				MaxAttempts: queue.MaxAttempts, Queue: msg.Queue, Priority: max(msg.Priority, 0), Tags: msg.Tags,
				UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: rivertype.JobStates()},
			}
			if opts.Priority == 0 {
				opts.Priority = message.DefaultPriority
			}
			if msg.ScheduledAt != nil {
				opts.ScheduledAt = *msg.ScheduledAt
			}
			if test.trace != (ingest.Trace{}) {
				opts.Metadata, err = json.Marshal(test.trace)
				require.NoError(t, err)
			}
			args := *msg
			if test.exact {
				args = args.Exact()
			}
			inserted, err := client.Insert(t.Context(), args, opts)
			require.NoError(t, err)
			require.Equal(t, b.row(inserted.Job.ID), got)
		})
	}
}

// row returns the columns of a job, except for its id and the times that depend on when it was inserted.
func (b *bundle) row(job int64) map[string]any {
	b.Helper()
	var row map[string]any
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT to_jsonb(j) - 'id' - 'created_at' ||
		CASE WHEN j.scheduled_at = j.created_at THEN '{"scheduled_at": "created_at"}' ELSE '{}'::jsonb END
		FROM river_job j WHERE id = $1`, job).Scan(&row))
	return row
}

func TestSubmit_NotifiesQueueAsRiverDoes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `LISTEN "public.river_insert"`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	i := b.start()
	later := b.message("later", `1`)
	later.ScheduledAt = new(time.Now().Add(time.Hour))
	_, err = i.Submit(ctx, later, ingest.Trace{}) // notifies no worker
	require.NoError(t, err)
	other := b.message("other", `1`)
	_, err = i.SubmitBatch(ctx, []*message.Message{other}, ingest.Trace{})
	require.NoError(t, err)
	got, err := conn.Conn().WaitForNotification(ctx)
	require.NoError(t, err)
	require.JSONEq(t, `{"queue": "default"}`, got.Payload)

	client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{Schema: "public"})
	require.NoError(t, err)
	_, err = client.Insert(ctx, *b.message("river", `1`), &river.InsertOpts{Queue: "default"})
	require.NoError(t, err)
	want, err := conn.Conn().WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, want.Channel, got.Channel)
	require.Equal(t, want.Payload, got.Payload)
}

// TestSubmit_DroppedJobIsNotAccepted uses a trigger that drops a job without an error. The submission must not succeed.
func TestSubmit_DroppedJobIsNotAccepted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.pool.Exec(t.Context(), `CREATE FUNCTION dropped() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL;
		END $$; CREATE TRIGGER dropped BEFORE INSERT ON river_job FOR EACH ROW
		WHEN (NEW.args @> '{"payload": "drop"}') EXECUTE FUNCTION dropped()`)
	require.NoError(t, err)
	i := b.start()
	_, err = i.Submit(t.Context(), b.message("m", `"drop"`), ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrUncertain)
	_, err = i.SubmitBatch(t.Context(), []*message.Message{b.message("a", `1`), b.message("b", `"drop"`)}, ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrUncertain)
	require.Zero(t, b.jobs())
}

func TestSubmit_RefusesSeparatorOfArgs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	msg := b.message("m1", `1`)
	msg.Payload = json.RawMessage("\"a\x1eb\"") // message.Parse refuses it
	_, err := b.start().Submit(t.Context(), msg, ingest.Trace{})
	var refused *ingest.RefusedError
	require.ErrorAs(t, err, &refused)
}

func TestSubmit_KeepsScheduledAt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	msg, err := message.Parse(
		[]byte(`{"messageId": "later", "queue": "default", "kind": "k", "payload": 1, "scheduledAt": "` +
			at.Format(time.RFC3339) + `"}`))
	require.NoError(t, err)
	for range 2 { // the second is a duplicate
		_, err = i.Submit(t.Context(), msg, ingest.Trace{})
		require.NoError(t, err)
	}
	position, err := i.Lookup(t.Context(), "later")
	require.NoError(t, err)
	require.Equal(t, ingest.Queued, position.State)
	require.True(t, at.Equal(*position.NextAttemptAt), position.NextAttemptAt)
}

func TestSubmit_SameMessageIsDuplicate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	first, err := i.Submit(t.Context(), b.message("m1", `{"a": 1, "b": 2}`), ingest.Trace{})
	require.NoError(t, err)
	require.False(t, first.Duplicate)
	again, err := i.Submit(t.Context(), b.message("m1", `{"b": 2, "a":   1.0}`), ingest.Trace{Parent: "00-another"})
	require.NoError(t, err)
	require.True(t, again.Duplicate, "content is compared as JSON")
	require.Equal(t, first.JobID, again.JobID)
	_, err = i.Submit(t.Context(), b.message("m1", `{"a": 2}`), ingest.Trace{})
	var conflict *ingest.ConflictError
	require.ErrorAs(t, err, &conflict)
	require.Equal(t, first.JobID, conflict.JobID)
	require.Equal(t, 1, b.jobs())

	for _, end := range []string{"completed", "discarded"} {
		_, err = b.pool.Exec(t.Context(), "UPDATE river_job SET state = $1::river_job_state, finalized_at = now()", end)
		require.NoError(t, err)
		again, err = i.Submit(t.Context(), b.message("m1", `{"a": 1, "b": 2}`), ingest.Trace{})
		require.NoError(t, err)
		require.True(t, again.Duplicate, "after it was %s", end)
	}

	// River deletes old jobs; an open dead letter still has the message.
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), "DELETE FROM river_job")
	require.NoError(t, err)
	again, err = i.Submit(t.Context(), b.message("m1", `{"a": 1, "b": 2}`), ingest.Trace{})
	require.NoError(t, err)
	require.True(t, again.Duplicate)
	require.NotZero(t, again.EntryID)
	_, err = i.Submit(t.Context(), b.message("m1", `{"other": 1}`), ingest.Trace{})
	require.ErrorAs(t, err, &conflict)
	require.Zero(t, b.jobs())
}

func TestSubmit_FindsOldEntryInInbox(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.start().Submit(t.Context(), b.message("m1", `1`), ingest.Trace{})
	require.NoError(t, err)
	for _, sql := range []string{
		"UPDATE river_job SET state = 'discarded', finalized_at = now()",
		"ALTER TABLE dlq.dead_letter_inbox DISABLE TRIGGER USER", // this trigger would refuse the next statement
		"UPDATE dlq.dead_letter_inbox SET id = dlq.first_id(now() - interval '13 hours')",
		"DELETE FROM river_job",
	} {
		_, err := b.pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	again, err := b.start().Submit(t.Context(), b.message("m1", `1`), ingest.Trace{})
	require.NoError(t, err)
	require.True(t, again.Duplicate)
	require.NotZero(t, again.EntryID)
	require.Zero(t, b.jobs())
}

// onBegin calls begun when a transaction begins, and sends to acquires at each request for a connection of the pool.
type onBegin struct {
	begun    func()
	acquires chan struct{}
}

func (o *onBegin) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(query.SQL, "begin") {
		o.begun()
	}
	return ctx
}

func (*onBegin) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (o *onBegin) TraceAcquireStart(
	ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData,
) context.Context {
	o.acquires <- struct{}{}
	return ctx
}

func (*onBegin) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func TestSubmitBatch_DoesNotWaitForInsertThatWaitsForConnection(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := b.pool.Config()
	config.MaxConns = 1
	tracer := &onBegin{begun: func() {}, acquires: make(chan struct{}, 100)}
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, pool.Ping(t.Context()))
	<-tracer.acquires
	b.config.Pool = pool
	failed := make(chan error, 100)
	b.config.Observe = func(_ int, _, _ time.Duration, err error) { failed <- err }
	ingester := b.start()
	single := make(chan error, 1)
	one, two := b.message("m1", `1`), b.message("m2", `1`)
	tracer.begun = func() { // the batch has the only connection
		<-tracer.acquires
		go func() {
			_, err := ingester.Submit(context.WithoutCancel(t.Context()), one, ingest.Trace{})
			single <- err
		}()
		<-tracer.acquires
	}
	_, err = ingester.SubmitBatch(t.Context(), []*message.Message{two}, ingest.Trace{})
	require.NoError(t, err)
	require.NoError(t, <-single)
	require.NoError(t, <-failed)
	require.NoError(t, <-failed)
	require.Equal(t, 2, b.jobs())
}

func TestSubmit_ConcurrentSubmissionsShareInserts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	const n = 500
	var wg sync.WaitGroup
	jobs := make([]int64, n)
	for k := range n {
		wg.Go(func() {
			id := ""
			if k%5 == 0 {
				id = fmt.Sprintf("same-%d", k%10) // two ids, each used by 50 concurrent clients
			}
			receipt, err := i.Submit(t.Context(), b.message(id, `1`), ingest.Trace{})
			require.NoError(t, err)
			jobs[k] = receipt.JobID
		})
	}
	wg.Wait()
	require.Equal(t, 400+2, b.jobs())
	require.Less(t, b.inserts.Load(), int64(n), "submissions share inserts")
	for k := 10; k < n; k += 10 {
		require.Equal(t, jobs[0], jobs[k])
	}
}

func TestSubmit_RefusedMessageDoesNotFailOthers(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"constraint": `ALTER TABLE river_job ADD CONSTRAINT no_poison CHECK (NOT args @> '{"payload": "poison"}')`,
		"trigger": `CREATE FUNCTION no_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'poison'; END $$;
			CREATE TRIGGER no_poison BEFORE INSERT ON river_job FOR EACH ROW
				WHEN (NEW.args @> '{"payload": "poison"}') EXECUTE FUNCTION no_poison()`,
		"custom SQLSTATE": `CREATE FUNCTION no_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'poison'
			USING ERRCODE = 'APP01'; END $$;
			CREATE TRIGGER no_poison BEFORE INSERT ON river_job FOR EACH ROW
				WHEN (NEW.args @> '{"payload": "poison"}') EXECUTE FUNCTION no_poison()`,
		"not encodable": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireRefusesPoisonOnly(t, sql)
		})
	}
}

func requireRefusesPoisonOnly(t *testing.T, sql string) {
	t.Helper()
	b := setup(t)
	_, err := b.pool.Exec(t.Context(), sql)
	require.NoError(t, err)
	i := b.start()
	var wg sync.WaitGroup
	var refused atomic.Int64
	for k := range 200 {
		wg.Go(func() {
			payload := `"good"`
			if k%50 == 7 {
				payload = `"poison"`
			}
			msg := b.message(fmt.Sprintf("m-%d", k), payload)
			if k%50 == 7 && sql == "" {
				msg.ScheduledAt = new(time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)) // JSON cannot encode this year
			}
			_, err := i.Submit(t.Context(), msg, ingest.Trace{})
			var bad *ingest.RefusedError
			if k%50 == 7 {
				require.ErrorAs(t, err, &bad)
				require.Equal(t, fmt.Sprintf("m-%d", k), bad.MessageID)
				refused.Add(1)
				return
			}
			require.NoError(t, err)
		})
	}
	wg.Wait()
	require.EqualValues(t, 4, refused.Load())
	require.Equal(t, 196, b.jobs())
}

// blockInserts takes a lock for which every insert waits, until the returned function is called.
func (b *bundle) blockInserts() (release func()) {
	b.Helper()
	tx, err := b.pool.Begin(b.Context())
	require.NoError(b, err)
	_, err = tx.Exec(b.Context(), "LOCK TABLE river_job IN SHARE MODE")
	require.NoError(b, err)
	return func() { require.NoError(b, tx.Rollback(b.Context())) }
}

func TestSubmit_RefusesAboveMaxPending(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.config.MaxPending = 3
	i := b.start()
	release := b.blockInserts()
	results := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := i.Submit(t.Context(), b.message("", `1`), ingest.Trace{})
			results <- err
		}()
	}
	require.Eventually(t, func() bool { n, _ := i.Pending(); return n == 3 }, 5*time.Minute, time.Millisecond)
	_, err := i.Submit(t.Context(), b.message("", `1`), ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrFull)
	_, err = i.SubmitBatch(t.Context(), []*message.Message{b.message("", `1`)}, ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrFull)
	release()
	for range 3 {
		require.NoError(t, <-results)
	}
	require.Equal(t, 3, b.jobs())
	messages, size := i.Pending()
	require.Zero(t, messages)
	require.Zero(t, size)
}

func TestSubmit_RefusesAboveMaxPendingBytes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.config.MaxPendingBytes = 1000
	i := b.start()
	release := b.blockInserts()
	done := make(chan error, 1)
	large := `"` + strings.Repeat("x", 2000) + `"`
	go func() {
		_, err := i.Submit(t.Context(), b.message("", large), ingest.Trace{})
		done <- err
	}()
	require.Eventually(t, func() bool { n, _ := i.Pending(); return n == 1 }, 5*time.Minute, time.Millisecond)
	_, err := i.Submit(t.Context(), b.message("", `1`), ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrFull)
	release()
	require.NoError(t, <-done, "a message larger than the budget is accepted alone")

	// With payload: exact, the payload is stored a second time, as text. Both copies count towards the limit of bytes.
	b.config.Policy().Queues[policy.DefaultQueue].Payload = policy.PayloadExact
	release = b.blockInserts()
	go func() {
		_, err := i.Submit(t.Context(), b.message("", `"12345678"`), ingest.Trace{})
		done <- err
	}()
	require.Eventually(t, func() bool { _, bytes := i.Pending(); return bytes == 20 }, 5*time.Minute, time.Millisecond)
	release()
	require.NoError(t, <-done)
}

func TestSubmit_StoresOnceIfClientDisconnects(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	release := b.blockInserts()
	ctx, hangUp := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := i.Submit(ctx, b.message("hung-up", `1`), ingest.Trace{})
		done <- err
	}()
	require.Eventually(t, func() bool { n, _ := i.Pending(); return n == 1 }, 5*time.Minute, time.Millisecond)
	hangUp()
	require.ErrorIs(t, <-done, context.Canceled)
	release()
	receipt, err := i.Submit(t.Context(), b.message("hung-up", `1`), ingest.Trace{})
	require.NoError(t, err)
	require.NotZero(t, receipt.JobID)
	require.Equal(t, 1, b.jobs(), "the message is stored once")
}

// cutConn is a connection that breaks after it has sent a commit, or a statement that commits itself, and before the
// answer arrives.
type cutConn struct {
	net.Conn

	cut *atomic.Int64 // number of commits still to cut
}

func (c cutConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	commits := bytes.Contains(p, []byte("commit")) || bytes.Contains(p, []byte(`"messageId":"lost`))
	if commits && c.cut.Add(-1) >= 0 {
		_, _ = c.Read(make([]byte, 1)) // the server has committed and answers
		_ = c.Close()
		return n, errors.New("connection cut")
	}
	return n, err
}

func TestSubmit_RetriesLostCommit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := b.pool.Config().Copy()
	var cut atomic.Int64
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return cutConn{conn, &cut}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	b.config.Pool = pool
	i := b.start()

	cut.Store(1)
	receipt, err := i.Submit(t.Context(), b.message("lost", `1`), ingest.Trace{})
	require.NoError(t, err)
	require.Equal(t, 1, b.jobs())
	require.Negative(t, cut.Load(), "the insert was retried after the lost commit")

	cut.Store(2)
	_, err = i.SubmitBatch(t.Context(), []*message.Message{b.message("batch-1", `1`), b.message("batch-2", `2`)},
		ingest.Trace{})
	require.NoError(t, err)
	require.Equal(t, 3, b.jobs())

	cut.Store(1000) // all further commits are cut
	_, err = i.Submit(t.Context(), b.message("lost-again", `1`), ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrUncertain)
	cut.Store(0)
	again, err := i.Submit(t.Context(), b.message("lost-again", `1`), ingest.Trace{})
	require.NoError(t, err, "the same messageId resolves the doubt")
	require.NotEqual(t, receipt.JobID, again.JobID)
	require.Equal(t, 4, b.jobs())
}

func TestSubmitBatch_StoresAllOrNone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	_, err := i.Submit(t.Context(), b.message("taken", `1`), ingest.Trace{})
	require.NoError(t, err)

	_, err = i.SubmitBatch(t.Context(), []*message.Message{
		b.message("a", `1`), b.message("taken", `2`),
		b.message("b", `1`),
	}, ingest.Trace{})
	var conflict *ingest.ConflictError
	require.ErrorAs(t, err, &conflict)
	require.Equal(t, 1, conflict.Index)
	require.Equal(t, 1, b.jobs())

	unknown := b.message("c", `1`)
	unknown.Queue = "nowhere"
	_, err = i.SubmitBatch(t.Context(), []*message.Message{b.message("a", `1`), unknown}, ingest.Trace{})
	var queue *ingest.UnknownQueueError
	require.ErrorAs(t, err, &queue)
	require.Equal(t, 1, queue.Index)
	require.Equal(t, 1, b.jobs())

	receipts, err := i.SubmitBatch(t.Context(), []*message.Message{
		b.message("b", `1`), b.message("taken", `1`),
		b.message("a", `1`),
	}, ingest.Trace{})
	require.NoError(t, err)
	require.Equal(t, 3, b.jobs())
	require.Equal(t, "b", receipts[0].MessageID)
	require.True(t, receipts[1].Duplicate)
	require.Equal(t, "a", receipts[2].MessageID)
	var args string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT args FROM river_job WHERE id = $1",
		receipts[2].JobID).Scan(&args))
	require.Contains(t, args, `"a"`)
}

func TestStop_AnswersAcceptedMessages(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	release := b.blockInserts()
	const n = 20
	results := make(chan error, n)
	for range n {
		go func() {
			_, err := i.Submit(t.Context(), b.message("", `1`), ingest.Trace{})
			results <- err
		}()
	}
	require.Eventually(t, func() bool { p, _ := i.Pending(); return p == n }, 5*time.Minute, time.Millisecond)
	released := make(chan struct{})
	go func() { defer close(released); release() }()
	i.Stop(t.Context())
	<-released
	for range n {
		require.NoError(t, <-results)
	}
	require.Equal(t, n, b.jobs())
	_, err := i.Submit(t.Context(), b.message("", `1`), ingest.Trace{})
	require.ErrorIs(t, err, ingest.ErrStopped)
}

func TestLookup(t *testing.T) {
	t.Parallel()
	b := setup(t)
	i := b.start()
	_, err := i.Lookup(t.Context(), "unknown")
	require.ErrorIs(t, err, ingest.ErrNoMessage)
	receipt, err := i.Submit(t.Context(), b.message("m", `1`), ingest.Trace{})
	require.NoError(t, err)
	for _, step := range []struct {
		set  string
		want ingest.State
	}{
		{"priority = 2", ingest.Queued},
		{"state = 'running', attempt = 1", ingest.Running},
		{"state = 'retryable'", ingest.Retrying},
		{
			"state = 'completed', finalized_at = now(), metadata = '{\"dlq:logical_failure\": {\"body\": \"no\"}}'",
			ingest.Completed,
		},
		{"state = 'available', finalized_at = NULL", ingest.Retrying},
		{"state = 'cancelled', finalized_at = now(), metadata = '{\"cancel_attempted_at\": \"now\"}'", ingest.Cancelled},
		{"state = 'available', finalized_at = NULL", ingest.Retrying},
		{"state = 'discarded', finalized_at = now()", ingest.DeadLettered},
	} {
		_, err := b.pool.Exec(t.Context(), "UPDATE river_job SET "+step.set+" WHERE id = $1", receipt.JobID)
		require.NoError(t, err)
		position, err := i.Lookup(t.Context(), "m")
		require.NoError(t, err)
		require.Equal(t, step.want, position.State, step.set)
		if step.want == ingest.Completed {
			require.JSONEq(t, `{"body": "no"}`, string(position.LogicalFailure))
		}
		if step.want == ingest.DeadLettered {
			require.Equal(t, "dlq_pending", position.DeadLetter.Status)
			require.Equal(t, "/api/dlq/entries/"+position.DeadLetter.ID.String(), position.DeadLetter.URL)
		}
	}
	_, err = b.pool.Exec(t.Context(), "DELETE FROM river_job")
	require.NoError(t, err)
	position, err := i.Lookup(t.Context(), "m")
	require.NoError(t, err)
	require.Equal(t, ingest.DeadLettered, position.State)
	raw, err := json.Marshal(position)
	require.NoError(t, err)
	require.NotContains(t, string(raw), "jobId")
}
