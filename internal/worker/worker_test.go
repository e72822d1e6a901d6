package worker_test

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// builtIn is the planner of the built-in policy, without a pace.
var builtIn = sync.OnceValue(func() *strategy.Planner {
	p, err := policy.Default(policytest.Destination)
	if err != nil {
		panic(err)
	}
	p.Destinations[policy.DefaultQueue].RedeliveriesPerSecond, p.Routing.RedeliveriesPerSecond = 0, 0
	planner, err := strategy.NewPlanner(p, nil)
	if err != nil {
		panic(err)
	}
	return planner
})

// childVariable makes this test binary run as a DLQ worker until it is killed.
const childVariable = "DLQD_TEST_WORKER_CHILD"

func TestMain(m *testing.M) {
	if url := os.Getenv(childVariable); url != "" {
		runChild(url)
		return
	}
	if url := os.Getenv(applicationVariable); url != "" {
		runApplication(url)
		return
	}
	postgrestest.Main(m)
}

// runChild runs a worker whose clock is hours ahead, so that every entry is due once it is decided.
func runChild(url string) {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(err)
	}
	w := worker.New(worker.Config{
		Store: deadletter.NewStore(pool, postgres.DefaultSchemas()), Planner: builtIn,
		Logger: slog.New(slog.DiscardHandler), BatchSize: 7, Now: func() time.Time { return time.Now().Add(10 * time.Hour) },
	})
	_, _ = fmt.Fprintln(os.Stdout, "started")
	for {
		if _, err := w.File(ctx); err != nil {
			panic(err)
		}
		if _, err := w.RunOnce(ctx); err != nil {
			panic(err)
		}
	}
}

// TestWorker_RedeliversOnceWhenKilled kills workers at random points: every entry is decided once and
// redelivered once.
func TestWorker_RedeliversOnceWhenKilled(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	b := &bundle{T: t, pool: pool}
	const n = 600
	b.exec(`INSERT INTO river_job (kind, args, max_attempts) SELECT 'k', '{}', 3 FROM generate_series(1, $1)`, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "timeout"}'::jsonb]`)
	left := "SELECT count(*) FROM dlq.dead_letter_queue WHERE status <> 'dlq_processing'"
	kills := 0
	for b.count(left) > 0 {
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), childVariable+"="+url)
		out, err := child.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, child.Start())
		_, err = bufio.NewReader(out).ReadString('\n') // it has started
		require.NoError(t, err)
		// The time grows, so that a slow machine makes progress too.
		time.Sleep(time.Duration(rand.IntN(40+2*kills)) * time.Millisecond)
		require.NoError(t, child.Process.Kill())
		_ = child.Wait()
		kills++
	}
	t.Logf("%d kills", kills)
	require.Equal(t, n, b.count(`SELECT count(DISTINCT metadata ->> 'dlq:entry_id') FROM river_job
		WHERE state = 'available'`))
	require.Equal(t, 2*n, b.count("SELECT count(*) FROM river_job"), "one redelivery each")
	require.Equal(t, 2*n, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"), "filed, redelivered")
}

// A batch of decisions writes its audit rows with one insert. Each entry has its own reason.
func TestWorker_RecordsReasonOfEachDecision(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("INSERT INTO river_job (kind, args, max_attempts) SELECT 'k', '{}', 1 FROM generate_series(1, 10)")
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = ARRAY[jsonb_build_object(
		'error', CASE WHEN id % 2 = 0 THEN 'timeout' ELSE 'card was declined' END)]`)
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	_, err := b.worker.RunOnce(t.Context())
	require.NoError(t, err)
	const decided = `FROM dlq.dead_letter_transitions t JOIN dlq.dead_letter_open e ON e.id = t.entry_id
		WHERE t.from_status = 'dlq_pending' AND t.actor = 'worker:test' AND t.to_status = e.status AND t.rule = e.rule`
	require.Equal(t, 10, b.count("SELECT count(*) "+decided))
	require.Equal(t, 2, b.count("SELECT count(DISTINCT t.reason) "+decided))
	require.Equal(t, 2, b.count("SELECT count(*) FROM (SELECT DISTINCT t.reason, e.error_message "+decided+") r"))
}

// bundle is a database and a worker whose clock the test controls.
type bundle struct {
	*testing.T

	pool   *pgxpool.Pool
	store  *deadletter.Store
	worker *worker.Worker
	now    time.Time
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	b := &bundle{T: t, pool: pool, store: deadletter.NewStore(pool, postgres.DefaultSchemas())}
	b.worker = worker.New(worker.Config{
		Store: b.store, Planner: builtIn, Logger: slog.New(slog.DiscardHandler),
		Name: "test", BatchSize: 10, Now: func() time.Time { return b.now },
	})
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&b.now))
	b.now = b.now.Add(time.Second) // entries captured in this test are due
	return b
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

// fail inserts a job and makes it fail with an error.
func (b *bundle) fail(priority int, message string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, priority, max_attempts) VALUES ('k', '{}', $1, 3)`, priority)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', 1, 'at', now())] WHERE state = 'available'`, message)
}

func (b *bundle) once() bool {
	b.Helper()
	b.settle()
	b.catchUp()
	filed, err := b.worker.File(b.Context())
	require.NoError(b, err)
	full, err := b.worker.RunOnce(b.Context())
	require.NoError(b, err)
	return filed || full
}

// catchUp advances the test's clock, if it is behind, to the time at which undecided entries are
// due. A failed redelivery is due by the database's clock, which overtakes the test's on a slow
// machine.
func (b *bundle) catchUp() {
	b.Helper()
	var due *time.Time
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT max(next_retry_at) FROM dlq.dead_letter_open
		WHERE strategy IS NULL AND next_retry_at <= clock_timestamp()`).Scan(&due))
	if due != nil && due.After(b.now) {
		b.now = *due
	}
}

// settle applies facts. dlqd does so within a moment.
func (b *bundle) settle() {
	b.Helper()
	require.NoError(b, (&facts.Applier{Store: b.store}).All(b.Context()))
}

func (b *bundle) entry() *deadletter.Entry {
	b.Helper()
	b.settle()
	list, err := b.store.List(b.Context(), deadletter.Page{Limit: 10})
	require.NoError(b, err)
	require.Len(b, list, 1)
	entry, _, err := b.store.Get(b.Context(), list[0].ID)
	require.NoError(b, err)
	return entry
}

func TestWorker_ImmediateStrategyUntilFailed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "dial tcp: connection refused")
	for i, delay := range []time.Duration{time.Minute, 5 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour} {
		failed := b.entry().LastFailedAt
		b.once() // decides
		entry := b.entry()
		require.Equal(t, deadletter.Pending, entry.Status)
		require.Equal(t, "transient", *entry.ErrorClass)
		require.Equal(t, "connection", *entry.Rule)
		require.Equal(t, "immediate", *entry.Strategy)
		require.Equal(t, builtIn().Policy().Version(), *entry.ConfigVersion)
		require.NotEmpty(t, *entry.Fingerprint)
		require.GreaterOrEqual(t, entry.NextRetryAt.Sub(failed), delay, "redelivery %d", i+1)
		require.LessOrEqual(t, entry.NextRetryAt.Sub(failed), delay*6/5+time.Millisecond, "jitter is at most 20 %%")

		b.now = entry.NextRetryAt.Add(-time.Second)
		b.once()
		require.Equal(t, deadletter.Pending, b.entry().Status, "not before its time")
		b.now = *entry.NextRetryAt
		b.once() // redelivers
		entry = b.entry()
		require.Equal(t, deadletter.Processing, entry.Status)
		require.Equal(t, "worker:test", *entry.LockedBy)
		require.EqualValues(t, i+1, entry.DLQRetryCount)

		b.exec(`UPDATE river_job SET state = 'discarded', attempt = 1, finalized_at = $2,
			errors = ARRAY['{"error": "read: connection reset by peer", "attempt": 1}'::jsonb]
				WHERE id = $1`, *entry.RedeliveryJobID, b.now)
		require.Equal(t, "read: connection reset by peer", *b.entry().ErrorMessage)
		b.now = b.now.Add(time.Second)
	}
	entry := b.entry()
	require.Equal(t, deadletter.Failed, entry.Status, "after five redeliveries")
	b.once()
	require.Equal(t, deadletter.Failed, b.entry().Status)
}

func TestWorker_ResolvesEntryWhenRedeliverySucceeds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "HTTP 503")
	b.once()
	b.now = b.now.Add(time.Hour)
	b.once()
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", *b.entry().RedeliveryJobID)
	entry := b.entry()
	require.Equal(t, deadletter.Resolved, entry.Status)
	require.Equal(t, "automatic_retry", *entry.ResolutionStrategy)
	require.Equal(t, "worker:test", *entry.ResolvedBy)
}

func TestWorker_ParksPermanentErrors(t *testing.T) {
	t.Parallel()
	for _, message := range []string{
		"runtime error: invalid memory address or nil pointer dereference",
		"card was declined", "who knows",
	} {
		b := setup(t)
		b.fail(2, message)
		b.once()
		entry := b.entry()
		require.Equal(t, deadletter.Manual, entry.Status, message)
		require.Equal(t, "manual", *entry.Strategy)
		require.Nil(t, entry.NextRetryAt)
	}
}

func TestWorker_ClaimsByPriorityThenAge(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 20 {
		b.fail(1+i%4, "connection refused")
	}
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))") // undecided
	b.now = b.now.Add(time.Minute)
	require.True(t, b.once(), "a full batch: there may be more")
	require.Equal(t, 10, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL AND priority <= 2"))
	require.True(t, b.once())
	require.False(t, b.once())
	require.Equal(t, 20, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL"))
}

func TestWorker_ParksEntryWithLiveUniqueJob(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "connection refused")
	b.once()
	b.exec(`UPDATE dlq.dead_letter_queue SET unique_key = '\x01'`)
	b.exec(`INSERT INTO river_job (kind, args, max_attempts, unique_key, unique_states)
		VALUES ('k', '{}', 1, '\x01', B'11111111')`)
	b.now = b.now.Add(time.Hour)
	b.once()
	entry := b.entry()
	require.Equal(t, deadletter.Manual, entry.Status)
	require.Equal(t, 2, b.count("SELECT count(*) FROM river_job"), "nothing was redelivered")
}

// An entry that cannot be redelivered is parked and does not block the others.
func TestWorker_ParksEntryThatDatabaseRefuses(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"constraint": `ALTER TABLE river_job ADD CONSTRAINT no_poison CHECK (NOT args ? 'poison')`,
		"trigger with a custom SQLSTATE": `CREATE FUNCTION no_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no_poison' USING ERRCODE = 'APP01'; END $$;
			CREATE TRIGGER no_poison BEFORE INSERT ON river_job FOR EACH ROW
				WHEN (NEW.args ? 'poison') EXECUTE FUNCTION no_poison()`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireParksPoisonOnly(t, sql)
		})
	}
}

func requireParksPoisonOnly(t *testing.T, sql string) {
	t.Helper()
	b := setup(t)
	for i := range 5 {
		b.fail(2, "timeout")
		b.exec(`UPDATE river_job SET args = jsonb_build_object('n', $1::int) WHERE args = '{}'`, i)
	}
	b.once()
	b.exec(`UPDATE dlq.dead_letter_queue SET original_event = '{"poison": true}', move = '{"actor": "kim"}'
		WHERE id = (SELECT id FROM dlq.dead_letter_open ORDER BY id OFFSET 2 LIMIT 1)`)
	b.exec(sql)
	b.now = b.now.Add(time.Hour)
	b.once()
	require.Equal(t, 4, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND original_event ? 'poison'`))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE 'the database refused its redelivery' AND detail ->> 'refusal' LIKE '%no_poison%'`))
}

func TestWorker_DefersUnknownStrategy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "connection refused")
	b.exec("ALTER TYPE dlq.strategy ADD VALUE 'lunar'")
	b.exec("UPDATE dlq.dead_letter_queue SET strategy = 'lunar'")
	b.once()
	entry := b.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.True(t, entry.NextRetryAt.After(b.now))
}

// TestWorker_ConcurrentWorkersRedeliverOnce runs several workers on the same entries: each entry is redelivered once.
func TestWorker_ConcurrentWorkersRedeliverOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 300
	b.exec(`INSERT INTO river_job (kind, args, max_attempts) SELECT 'k', '{}', 3 FROM generate_series(1, $1)`, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "timeout"}'::jsonb]`)
	drain := func() {
		var wg sync.WaitGroup
		errs := make(chan error, 4)
		for range 4 {
			wg.Go(func() {
				for {
					filed, err := b.worker.File(t.Context())
					if err != nil {
						errs <- err
						return
					}
					full, err := b.worker.RunOnce(t.Context())
					if err != nil {
						errs <- err
						return
					}
					if !filed && !full {
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		require.NoError(t, <-errs)
	}
	drain()
	drain() // handle the entries that another worker had locked
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy = 'immediate'"))
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"), "each entry was filed once")
	b.now = b.now.Add(time.Hour)
	drain()
	drain()
	require.Equal(t, n, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_processing'"))
	require.Equal(t, n, b.count(`SELECT count(DISTINCT metadata ->> 'dlq:entry_id') FROM river_job
		WHERE state = 'available'`))
	require.Equal(t, 2*n, b.count("SELECT count(*) FROM river_job"), "one redelivery each")
}

func TestWorker_SkipsLockedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(1, "timeout")
	b.fail(2, "timeout")
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM dlq.dead_letter_open WHERE priority = 1 FOR UPDATE")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err = b.worker.RunOnce(ctx)
	require.NoError(t, err, "it does not wait for the locked entry")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL"))
}

// TestWorker_RollsBackBatchWhenAnyStepFails breaks each statement of a batch in turn: the batch is rolled back
// completely.
func TestWorker_RollsBackBatchWhenAnyStepFails(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(2, "timeout")
	b.fail(1, "card declined")
	breakStep := func(step string, run func(context.Context) (bool, error)) {
		t.Helper()
		b.exec("CREATE FUNCTION dlq.die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM " +
			"pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$; CREATE TRIGGER die AFTER " +
			step + " FOR EACH ROW EXECUTE FUNCTION dlq.die()")
		_, err := run(t.Context())
		require.Error(t, err, step)
		b.exec("DROP FUNCTION dlq.die() CASCADE")
	}
	for _, step := range []string{
		"INSERT ON dlq.dead_letter_open", "DELETE ON dlq.dead_letter_inbox",
		"INSERT ON dlq.dead_letter_transitions",
	} {
		breakStep(step, b.worker.File)
		require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"), step)
		require.Zero(t, b.count(`SELECT (SELECT count(*) FROM dlq.dead_letter_transitions) + (SELECT count(*)
			FROM dlq.dead_letter_open)`), step)
	}
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	for _, step := range []string{"INSERT ON dlq.dead_letter_transitions", "UPDATE ON dlq.dead_letter_open"} {
		breakStep(step, b.worker.RunOnce)
		require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'
			AND strategy IS NULL`), step)
		require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"), step)
	}
	b.once()
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL"))
}

// run runs a worker's loops until the test ends or calls stop.
func run(t *testing.T, w *worker.Worker) (stop func()) {
	t.Helper()
	loops := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	loops.Add(w.Loops()...)
	loops.Start()
	stop = func() { require.NoError(t, loops.Stop(context.Background())) }
	t.Cleanup(stop)
	return stop
}

// TestWorker_BacklogDoesNotDelayOtherLoops keeps every batch full: the sweep and smart retry still run.
func TestWorker_BacklogDoesNotDelayOtherLoops(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rules := policytest.Load(t,
		policytest.Files{"dlq-routing": "smartRetry: {enabled: true, over: 1s, minJobs: 1, errorRate: 100, probes: 1}\n"})
	planner, err := strategy.NewPlanner(rules, nil)
	require.NoError(t, err)
	batches, swept, probed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var begun sync.Once
	w := worker.New(worker.Config{
		Store: b.store, Planner: func() *strategy.Planner { return planner },
		Logger: slog.New(slog.DiscardHandler), BatchSize: 1,
		SweepInterval: 20 * time.Millisecond, SmartInterval: 20 * time.Millisecond, PollInterval: time.Millisecond,
		Observe: func(action string, n int, _ time.Duration) {
			switch {
			case action == "decided" && n > 0:
				b.fail(2, "timeout") // the next entry
				begun.Do(func() { close(batches) })
			case action == "requeued" && n > 0:
				close(swept)
			case action == "redelivered" && n > 0:
				close(probed)
			}
		},
	})
	// One entry is parked for a cause that is over, and one loses its redelivery's job.
	b.fail(2, "TypeError: undefined is not a function")
	b.fail(2, "timeout")
	b.once()
	stuck, lost := b.id("dlq_manual"), b.id("dlq_pending")
	b.exec("SELECT dlq.replay($1, 'kim')", lost)
	b.exec("UPDATE river_job SET state = 'running' WHERE state = 'available'")
	b.exec("UPDATE dlq.dead_letter_open SET last_failed_at = last_failed_at - interval '1 hour' WHERE id = $1", stuck)
	b.fail(2, "timeout")
	stop := run(t, w)
	<-batches
	b.exec("DELETE FROM river_job WHERE id = (SELECT redelivery_job_id FROM dlq.dead_letter_open WHERE id = $1)", lost)
	<-swept
	b.exec(`INSERT INTO river_job (kind, args, queue, state, finalized_at, max_attempts) SELECT 'k', '{}', 'default',
		'completed', now() + interval '10 seconds', 1 FROM generate_series(1, 1000)`)
	<-probed
	stop()
}

func (b *bundle) id(status string) (id string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT id FROM dlq.dead_letter_open
		WHERE status = $1::dlq.dead_letter_status`, status).Scan(&id))
	return id
}

func TestWorker_WakesOnNotify(t *testing.T) {
	t.Parallel()
	b := setup(t)
	moved := make(chan string, 10)
	w := worker.New(worker.Config{
		Store: b.store, Planner: builtIn, Logger: slog.New(slog.DiscardHandler),
		PollInterval: time.Hour, SweepInterval: time.Hour, Listen: b.pool, WakeTopic: postgres.DefaultSchemas().WakeTopic(),
		Observe: func(action string, n int, _ time.Duration) {
			if (action == "filed" || action == "redelivered") && n > 0 {
				moved <- action
			}
		},
	})
	run(t, w)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'") ==
			1
	}, 5*time.Minute, 5*time.Millisecond)
	for range 3 {
		b.fail(2, "timeout")
		require.Equal(t, "filed", <-moved)
		b.exec("SELECT dlq.park(id, 'kim') FROM dlq.dead_letter_open WHERE status = 'dlq_pending'")
		b.exec("SELECT dlq.unpark(id, 'kim') FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
		require.Equal(t, "redelivered", <-moved)
	}
}
