package replay_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/strategy"
)

// Environment variables of a process that executes runs and works redeliveries until it is killed (see work).
const (
	workerURL  = "DLQD_TEST_REPLAY_URL"
	workerName = "DLQD_TEST_REPLAY_NAME"
	workerSeed = "DLQD_TEST_REPLAY_SEED"
)

// healthy is a system in which all conditions hold.
type healthy struct{}

func (healthy) Unmet(_, _ string, _ *policy.Conditions) string { return "" }

// work executes runs of a database and works their redeliveries, until the process is killed, or until its parent ends
// and closes the standard input. One of eight redeliveries fails.
func work(url string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pool, err := postgres.Open(ctx, url, 4)
	if err != nil {
		return err
	}
	rules, err := policy.Load(policy.Source{Destination: policytest.Destination})
	if err != nil {
		return err
	}
	planner, err := strategy.NewPlanner(rules, healthy{})
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(os.Getenv(workerSeed), 10, 64)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	go func() {
		for random := rand.New(rand.NewPCG(seed, 1)); ctx.Err() == nil; {
			if err := redeliver(ctx, pool, random); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "redelivery:", err)
			}
		}
	}()
	runner := replay.NewRunner(deadletter.NewStore(pool, postgres.DefaultSchemas()),
		func() *strategy.Planner { return planner }, slog.New(slog.DiscardHandler), nil)
	for ctx.Err() == nil {
		if _, err := runner.RunOnce(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "runs:", err)
		}
	}
	return nil
}

// redeliver works one redelivery, if there is one. Its effect is a row of happened. One of eight hangs after its
// effect, until the process is killed.
func redeliver(ctx context.Context, pool *pgxpool.Pool, random *rand.Rand) error {
	name := os.Getenv(workerName)
	rows, err := pool.Query(ctx, `UPDATE river_job SET state = 'running', attempt = attempt + 1, attempted_at = now(),
		attempted_by = array_append(attempted_by, $1) WHERE id = (SELECT id FROM river_job WHERE state = 'available'
			ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id`, name)
	if err != nil {
		return err
	}
	jobs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || len(jobs) == 0 {
		return err
	}
	hangs := random.IntN(8) == 0
	if _, err := pool.Exec(ctx, "INSERT INTO happened (job_id, what, hung) VALUES ($1, 'effect', $2)", jobs[0],
		map[bool]*string{true: &name}[hangs]); err != nil {
		return err
	}
	if hangs {
		<-ctx.Done()
		return nil
	}
	// If the test has put the job back, or another process works it, this process ends nothing.
	_, err = pool.Exec(ctx, `WITH ended AS (
			UPDATE river_job SET state = CASE WHEN $3 THEN 'completed' ELSE 'discarded' END::river_job_state,
				finalized_at = now(),
				errors = CASE WHEN $3 THEN errors ELSE array_append(errors, '{"error": "wrong", "attempt": 1}'::jsonb) END
			WHERE id = $1 AND state = 'running' AND attempted_by[cardinality(attempted_by)] = $2 RETURNING id)
		INSERT INTO happened (job_id, what) SELECT id, 'success' FROM ended WHERE $3`, jobs[0], name, random.IntN(8) > 0)
	return err
}

// workers are processes that execute runs and work redeliveries.
type workers struct {
	*bundle

	seed    uint64
	started int
	running map[string]*exec.Cmd // by name
	killed  []string             // names
}

func (w *workers) start() {
	w.Helper()
	w.started++
	name := "worker" + strconv.Itoa(w.started)
	cmd := exec.CommandContext(context.WithoutCancel(w.Context()), os.Args[0])
	cmd.Env = append(os.Environ(), workerURL+"="+w.pool.Config().ConnString(), workerName+"="+name,
		workerSeed+"="+strconv.FormatUint(w.seed+uint64(w.started), 10))
	cmd.Stderr = w.Output()
	_, err := cmd.StdinPipe() // the process ends when this process does
	require.NoError(w, err)
	require.NoError(w, cmd.Start())
	w.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	w.running[name] = cmd
}

// kill kills a process (SIGKILL) and starts another one.
func (w *workers) kill(name string) {
	w.Helper()
	require.NoError(w, w.running[name].Process.Kill())
	_ = w.running[name].Wait()
	delete(w.running, name)
	w.killed = append(w.killed, name)
	w.start()
}

// hung returns the processes in which a redelivery hangs.
func (w *workers) hung() []string {
	w.Helper()
	rows, err := w.pool.Query(w.Context(), `SELECT DISTINCT hung FROM happened
		WHERE hung IS NOT NULL AND hung <> ALL ($1)`, w.killed)
	require.NoError(w, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(w, err)
	return names
}

// putBack ends or repeats the redeliveries that killed processes have not ended, as River's rescuer does. A statement
// that a killed process has sent may still take effect afterwards, so putBack is called again and again.
func (w *workers) putBack(state string) {
	w.Helper()
	w.exec(`UPDATE river_job SET state = $1::river_job_state, finalized_at = CASE $1 WHEN 'discarded' THEN now() END,
		errors = array_append(errors, '{"error": "Stuck job rescued", "attempt": 1}'::jsonb)
		WHERE state = 'running' AND attempted_by[cardinality(attempted_by)] = ANY ($2)`, state, w.killed)
}

// No follower of an ordering key has an effect before its predecessor's success: there are many keys of messages and of
// jobs, redeliveries that fail at random, and processes that are killed at any time.
func TestProgressive_NoFollowersEffectBeforeSuccess(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("DLQD_TEST_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("repeat it with DLQD_TEST_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	b := setup(t)
	b.exec("CREATE TABLE happened (n bigserial, job_id bigint, what text, hung text)")
	b.publish(keyedPolicy)
	for key := range 5 {
		b.failKey("k"+strconv.Itoa(key), 2+random.IntN(5), `{}`)
	}
	b.failCustomers(5, 2+random.IntN(5))
	run := b.start(replay.Request{
		All: true, Progressive: true, BatchSize: 1 + random.IntN(5), NewestFirst: random.IntN(2) == 0,
	})
	w := &workers{bundle: b, seed: seed, running: map[string]*exec.Cmd{}, killed: []string{}}
	w.start()
	w.start()
	for next, kills := 1, 0; b.get(run).Status != "completed"; {
		for _, name := range w.hung() {
			w.kill(name)
		}
		if kills < 4 && b.count("SELECT count(*) FROM happened") >= next {
			next, kills = next+1+random.IntN(int(run.Total)/2), kills+1
			w.kill(slices.Sorted(maps.Keys(w.running))[0])
		}
		w.putBack([]string{"available", "discarded"}[random.IntN(2)])
		// This fails if no group is held or stopped.
		_, _ = b.pool.Exec(t.Context(), "SELECT dlq.replay_go_on($1)", run.ID)
	}
	const chain = `WITH chain AS (
		SELECT x.job_id, x.outcome, lag(x.entry_id) OVER k AS before, lag(x.job_id) OVER k AS job_before,
			lag(x.outcome) OVER k AS outcome_before
		FROM dlq.replay_run_entries x JOIN dlq.dead_letter_queue e ON e.id = x.entry_id
		WINDOW k AS (PARTITION BY coalesce(e.ordering_key, e.original_event #>> '{customer,id}')
			ORDER BY e.river_job_id)) `
	require.Zero(t, b.count(chain+`SELECT count(*) FROM chain c JOIN happened h ON h.job_id = c.job_id
		WHERE c.before IS NOT NULL AND h.what = 'effect' AND NOT EXISTS (SELECT FROM happened s
			WHERE s.job_id = c.job_before AND s.what = 'success' AND s.n < h.n)`), "effects before the predecessor's success")
	succeeded := b.count(chain + "SELECT count(*) FROM chain WHERE before IS NOT NULL AND outcome = 'succeeded'")
	held := b.count(chain + "SELECT count(*) FROM chain WHERE outcome = 'skipped' AND outcome_before <> 'succeeded'")
	require.Positive(t, succeeded)
	require.NotEmpty(t, w.killed)
	t.Logf("%d entries, %d kills; %d followers succeeded, %d were not sent; %d effects of %d redeliveries", run.Total,
		len(w.killed), succeeded, held, b.count("SELECT count(*) FROM happened WHERE what = 'effect'"),
		b.count("SELECT count(DISTINCT job_id) FROM happened"))
}
