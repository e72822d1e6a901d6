package worker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/worker"
)

// applicationVariable makes this test binary run as an application that works River jobs until one of the jobs kills
// it. The value is the URL of the database.
const applicationVariable = "DLQD_TEST_APPLICATION"

// deadlyArgs are the args of a killer, a job that kills its worker, or of a bystander, a job that completes once no
// killer is left.
type deadlyArgs struct {
	Kills bool `json:"kills"`
}

func (deadlyArgs) Kind() string { return "deadly" }

type deadlyWorker struct {
	river.WorkerDefaults[deadlyArgs]

	pool *pgxpool.Pool
}

// Work waits for other jobs. A killer waits until all jobs run, so that it kills all of them; a bystander waits until
// no killer is left.
func (w *deadlyWorker) Work(ctx context.Context, job *river.Job[deadlyArgs]) error {
	for {
		var waiting, killers int
		if err := w.pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE state <> 'running'),
			count(*) FILTER (WHERE args @> '{"kills": true}')
			FROM river_job WHERE finalized_at IS NULL`).Scan(&waiting, &killers); err != nil {
			return err
		}
		switch {
		case job.Args.Kills && waiting == 0:
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case !job.Args.Kills && killers == 0:
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (*deadlyWorker) NextRetry(*river.Job[deadlyArgs]) time.Time { return time.Now() }

// client returns a client of the application's River. A rescuer works no jobs, and considers every
// running job stuck.
func client(pool *pgxpool.Pool, rescuer bool) (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, &deadlyWorker{pool: pool})
	config := &river.Config{
		Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues:     map[string]river.QueueConfig{"default": {MaxWorkers: 10}},
		JobTimeout: time.Hour, RescueStuckJobsAfter: time.Hour, TestOnly: true,
	}
	if rescuer {
		config.Queues = map[string]river.QueueConfig{"none": {MaxWorkers: 1}}
		config.JobTimeout, config.RescueStuckJobsAfter = time.Millisecond, time.Millisecond
	}
	return river.NewClient(riverpgxv5.New(pool), config)
}

func runApplication(url string) {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(err)
	}
	c, err := client(pool, false)
	if err != nil {
		panic(err)
	}
	if err := c.Start(ctx); err != nil {
		panic(err)
	}
	// The process ends with the test, which holds the other end of stdin.
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

// application is an application with River on the database of a bundle.
type application struct {
	*policyBundle

	url    string
	client *river.Client[pgx.Tx] // to insert jobs
}

func setupApplication(t *testing.T) *application {
	t.Helper()
	a := &application{policyBundle: setupWithPolicy(t, nil)}
	a.url = a.pool.Config().ConnString()
	var err error
	a.client, err = client(a.pool, false)
	require.NoError(t, err)
	return a
}

func (a *application) insert(attempts int, args ...deadlyArgs) {
	a.Helper()
	for _, arg := range args {
		_, err := a.client.Insert(a.Context(), arg, &river.InsertOpts{MaxAttempts: attempts})
		require.NoError(a, err)
	}
}

// dropLeader lets the next client become leader at once: the last leader was killed.
func (a *application) dropLeader() {
	a.Helper()
	a.exec("DELETE FROM river_leader")
}

func (a *application) start() *exec.Cmd {
	a.Helper()
	a.dropLeader()
	process := exec.CommandContext(a.Context(), os.Args[0])
	process.Env = append(os.Environ(), applicationVariable+"="+a.url)
	_, err := process.StdinPipe() // closed when the test ends
	require.NoError(a, err)
	require.NoError(a, process.Start())
	return process
}

// runUntilKilled runs the application until a job kills it, and then River's rescuer until no job is
// running.
func (a *application) runUntilKilled() {
	a.Helper()
	process := a.start()
	err := process.Wait()
	status, _ := process.ProcessState.Sys().(syscall.WaitStatus)
	require.Equal(a, syscall.SIGKILL, status.Signal(), err)
	a.dropLeader()
	c, err := client(a.pool, true)
	require.NoError(a, err)
	require.NoError(a, c.Start(a.Context()))
	for a.count("SELECT count(*) FROM river_job WHERE state = 'running'") > 0 {
		time.Sleep(10 * time.Millisecond)
	}
	require.NoError(a, c.Stop(a.Context()))
	a.settle()
	require.NoError(a, a.pool.QueryRow(a.Context(),
		"SELECT clock_timestamp() + interval '1 s'").Scan(&a.now)) // failures are due
}

// TestWorkerLost_NeedsManualHandling lets a job kill the application repeatedly, together with all jobs
// that run beside it.
func TestWorkerLost_NeedsManualHandling(t *testing.T) {
	t.Parallel()
	a := setupApplication(t)
	a.insert(2, deadlyArgs{Kills: true}, deadlyArgs{}, deadlyArgs{}, deadlyArgs{})
	a.runUntilKilled()
	a.runUntilKilled()
	a.all()
	require.Equal(t, 4, a.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND rule = 'worker-lost' AND error_class = 'transient'`))
	require.Equal(t, 4, a.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE '%: its worker died, or it never ended, 2 times; rescued together with 3 others'`))
	require.Equal(t, 4, a.count(`SELECT count(*) FROM dlq.find('{"rule": "worker-lost"}')`))

	// A replay run sends entries of jobs that may have killed their worker one at a time. The job that kills its worker
	// failed first and kills only that worker; the others complete.
	replayer := &replay.Replayer{Store: a.store, Planner: a.planner.Load}
	_, err := replayer.Start(t.Context(), &replay.Request{
		Filter: json.RawMessage(`{"rule": "worker-lost"}`), Force: true,
		BatchSize: 100, StopAt: 50, Act: deadletter.Act{Actor: "kim"},
	})
	require.NoError(t, err)
	runner := replay.NewRunner(a.store, a.planner.Load, slog.New(slog.DiscardHandler), nil)
	step := func() {
		_, err := runner.RunOnce(t.Context())
		require.NoError(t, err)
		require.LessOrEqual(t, a.inStatus(deadletter.Processing), 1)
	}
	for a.inStatus(deadletter.Processing) == 0 {
		step()
	}
	a.runUntilKilled()
	a.all()
	require.Equal(t, 1, a.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE reason LIKE '%: its worker died, or it never ended, 3 times'`))
	require.Equal(t, 4, a.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		AND rule = 'worker-lost'`))
	a.start()
	for a.inStatus(deadletter.Resolved) < 3 {
		step()
		a.settle()
	}
	for a.count("SELECT count(*) FROM dlq.replay_runs WHERE status = 'running'") > 0 {
		step()
	}
	require.Equal(t, 1, a.count(`SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed' AND replayed = 4
		AND skipped = 0`))
	require.Equal(t, 1, a.inStatus(deadletter.Manual), "the killer")
}

// TestWorkerLost_OneRescueIsTransient lets the rescuer end a job's only attempt, and then the attempt of its
// redelivery.
func TestWorkerLost_OneRescueIsTransient(t *testing.T) {
	t.Parallel()
	a := setupApplication(t)
	a.exec("SELECT dlq.set_automatic('all', '', true, '{single-attempt}')")
	a.insert(1, deadlyArgs{Kills: true})
	a.runUntilKilled()
	a.once()
	entry := a.entry()
	require.Equal(t, deadletter.Pending, entry.Status)
	require.Equal(t, "transient", *entry.ErrorClass)
	require.Equal(t, "stuck-job", *entry.Rule)

	a.passDelay()
	require.Equal(t, deadletter.Processing, a.entry().Status)
	a.runUntilKilled()
	a.all()
	entry = a.entry()
	require.Equal(t, deadletter.Manual, entry.Status)
	require.Equal(t, "transient", *entry.ErrorClass)
	require.Equal(t, "worker-lost", *entry.Rule)
	require.Equal(t, "needs a person: its worker died, or it never ended, twice or more", *entry.Next)
	result, err := worker.Reclassify(t.Context(), a.store, a.planner.Load(), deadletter.Act{Actor: "kim"}, false)
	require.NoError(t, err)
	require.Empty(t, result.Changed)
}

// rescued makes n jobs that River's rescuer discarded after it had ended the given number of their attempts.
func (j *policyBundle) rescued(n int, kind string, rescues int) {
	j.Helper()
	j.exec(`INSERT INTO river_job (kind, args, max_attempts, state, metadata)
		SELECT $1, '{"kind": "order", "payload": {}}', 3, 'running', jsonb_build_object('river:rescue_count', $2::integer)
		FROM generate_series(1, $3)`, kind, rescues, n)
	j.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3,
		errors = ARRAY[jsonb_build_object('error', 'Stuck job rescued by JobRescuer', 'attempt', 3, 'at', now())]
			WHERE state = 'running'`)
}

func TestWorkerLost_DoesNotApplyToMessages(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.rescued(3, message.JobKind, 2)
	j.once()
	require.Equal(t, 3, j.count(`SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'stuck-job'
		AND error_class = 'transient' AND status = 'dlq_pending'`))
	j.passDelay()
	require.Equal(t, 3, j.inStatus(deadletter.Processing), "together")
}

// TestWorkerLost_UnparkedEntriesRunOneAtATime unparks all entries with the rule worker-lost at once.
func TestWorkerLost_UnparkedEntriesRunOneAtATime(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, policytest.Files{"dlq-routing": "smartRetry: {enabled: true, errorRate: 5, over: 1h, " +
		"minJobs: 10, probes: 3, classes: [transient]}\n"})
	j.rescued(3, "order", 3)
	j.all()
	require.Equal(t, 3, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'worker-lost'"))
	j.exec(`INSERT INTO river_job (kind, args, max_attempts, state, finalized_at) SELECT 'order', '{}', 1, 'completed',
		now() + interval '90 minutes' FROM generate_series(1, 200)`)
	j.now = j.now.Add(2 * time.Hour)
	require.NoError(t, j.worker.SmartRetry(t.Context()))
	require.Equal(t, 3, j.inStatus(deadletter.Manual), "smart retry skips them")

	j.exec("SELECT dlq.act_where('unpark', '{\"rule\": \"worker-lost\"}')")
	for left := 3; left > 0; left-- {
		j.now = j.now.Add(10 * time.Minute)
		j.all()
		require.Equal(t, 1, j.count("SELECT count(*) FROM river_job WHERE kind = 'order' AND state = 'available'"))
		require.Equal(t, left-1, j.count("SELECT count(*) FROM dlq.dead_letter_open WHERE waiting_for = 'order'"))
		j.endRedeliveries("completed")
	}
	require.Equal(t, 3, j.inStatus(deadletter.Resolved))
}

// Two sessions at the same time redeliver entries of one queue whose jobs were rescued twice or more. Only one of the
// sessions sends its entry.
func TestWorkerLost_SendsOneOfTwoAtOnce(t *testing.T) {
	t.Parallel()
	j := setupWithPolicy(t, nil)
	j.rescued(2, "order", 3)
	j.all()
	tx, err := j.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	redeliver := func(db postgres.DB, which string) (verdict string) {
		require.NoError(t, db.QueryRow(t.Context(), `SELECT verdict FROM dlq.redeliver(ARRAY(SELECT `+which+
			`(id::text)::uuid FROM dlq.dead_letter_open), 'worker:1', 'due')`).Scan(&verdict))
		return verdict
	}
	require.Equal(t, "sent", redeliver(tx, "min"))
	require.Equal(t, "alone", redeliver(j.pool, "max"), "the other one is not committed yet")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "sent", redeliver(j.pool, "max"))
	require.Equal(t, "alone", redeliver(j.pool, "min"))
}
