package protocol_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/protocol"
)

const (
	lockNotAvailable = "55P03"
	pollInterval     = 3 * time.Millisecond
	wholeScan        = "SELECT dlq.look_for_failures('whole', 'reconciler', 2000, '0', true)"
)

// database executes the model's steps on a real Postgres and compares the result with the model's state. River's steps
// run as the application's role, and dlqd's steps as dlqd's role.
type database struct {
	testing.TB

	ctx   context.Context
	urls  map[role]string
	conns map[role]*pgx.Conn

	model    *protocol.Model
	state    protocol.State
	jobs     []job
	failures []failure
	acts     map[int8]uuid.UUID // the last operation on each entry
	scan     *pendingScan       // the reconciler's call while it waits between reading and locking
	taken    []string
}

// role is the actor of a step.
type role string

const (
	application   role = "application"
	worker        role = "worker"
	applier       role = "applier"
	reconciler    role = "reconciler"
	operator      role = "operator"
	administrator role = "administrator"
	holder        role = "holder"   // holds the lock that the reconciler waits for
	observer      role = "observer" // compares the database with the model
)

type job struct {
	id      int64
	created time.Time
}

type failure struct {
	at time.Time
	id uuid.UUID // id of the failure's entry, if it has one
}

// pendingScan is a call of the reconciler that waits for a lock between reading and locking.
type pendingScan struct {
	lock  *pgx.Conn
	ended chan error
}

func newDatabase(tb testing.TB) *database {
	tb.Helper()
	url := postgrestest.URL(tb)
	super := postgrestest.Superuser(tb, url)
	d := &database{TB: tb, ctx: tb.Context(), conns: map[role]*pgx.Conn{}}
	admin, err := pgx.Connect(d.ctx, super)
	require.NoError(tb, err)
	app := "app_" + strings.ReplaceAll(uuid.NewString(), "-", "")[:12]
	_, err = admin.Exec(d.ctx, fmt.Sprintf(`CREATE ROLE %[1]s LOGIN; GRANT SELECT, INSERT, UPDATE,
		DELETE ON river_job TO %[1]s; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO %[1]s;
		ALTER TABLE dlq.dead_letter_queue ALTER dlq_max_retries SET DEFAULT %[2]d`, app, protocol.MaxTries))
	require.NoError(tb, err)
	d.urls = map[role]string{
		application: postgrestest.WithUser(url, app), worker: url, applier: url,
		reconciler: url, operator: url, holder: url, administrator: super,
		observer: url,
	}
	tb.Cleanup(func() {
		ctx := context.WithoutCancel(d.ctx)
		for _, conn := range d.conns {
			_ = conn.Close(ctx)
		}
		_, _ = admin.Exec(ctx, fmt.Sprintf("DROP OWNED BY %[1]s; DROP ROLE %[1]s", app))
		_ = admin.Close(ctx)
	})
	return d
}

// begin empties the database and starts a trace.
func (d *database) begin(model *protocol.Model) {
	d.Helper()
	d.model, d.state = model, protocol.Start()
	d.jobs, d.failures, d.acts, d.scan, d.taken = nil, nil, map[int8]uuid.UUID{}, nil, nil
	d.exec(administrator, `BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM river_job; DELETE
		FROM dlq.dead_letter_queue; TRUNCATE dlq.job_facts; DELETE FROM dlq.entry_jobs;
		DELETE FROM dlq.retired_jobs; DELETE FROM dlq.dead_letter_transitions; DELETE FROM dlq.operations; COMMIT`)
}

func (d *database) conn(of role) *pgx.Conn {
	d.Helper()
	if conn := d.conns[of]; conn != nil && !conn.IsClosed() {
		return conn
	}
	conn, err := pgx.Connect(d.ctx, d.urls[of])
	require.NoError(d, err)
	if of == observer { // the observer's query over all tables takes longer to plan than to run
		_, err = conn.Exec(d.ctx, "SET plan_cache_mode = force_generic_plan")
		require.NoError(d, err)
	}
	d.conns[of] = conn
	return conn
}

func (d *database) exec(of role, sql string, args ...any) {
	d.Helper()
	_, err := d.conn(of).Exec(d.ctx, sql, args...)
	require.NoError(d, err, sql)
}

// statements runs the statements of a step in its transaction.
type statements func(tx pgx.Tx) error

// transaction is the transaction of a step: its role and its statements. after is called after the commit, to record
// results for the test.
type transaction struct {
	of        role
	isolation pgx.TxIsoLevel
	do        statements
	after     func()
}

func (d *database) entry(e int8) uuid.UUID { return d.failures[e].id }

func (d *database) entries(set uint8) []uuid.UUID {
	ids := []uuid.UUID{}
	for f := range d.failures {
		if set&(1<<f) != 0 {
			ids = append(ids, d.failures[f].id)
		}
	}
	return ids
}

func run(tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(context.Background(), sql, args...)
	if err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

func one[T any](tx pgx.Tx, sql string, args ...any) (value T, err error) {
	err = tx.QueryRow(context.Background(), sql, args...).Scan(&value)
	return value, err
}

// uniqueStates is River's default: all states but discarded and cancelled.
const uniqueStates = "B'11110101'"

// transactionOf returns the transaction of a step. after is the model's state after the step.
func (d *database) transactionOf(step protocol.Step, after *protocol.State) transaction {
	t := transaction{of: application}
	switch {
	case step.Rule >= protocol.ReadInbox && step.Rule <= protocol.Park, step.Rule == protocol.Sweep,
		step.Rule == protocol.CrashWorker:
		t.of = worker
	case step.Rule == protocol.ApplyFacts, step.Rule == protocol.FindSuccesses:
		t.of = applier
	case step.Rule == protocol.Scan, step.Rule == protocol.Append, step.Rule == protocol.CrashReconciler:
		t.of = reconciler
	case step.Rule >= protocol.Discard && step.Rule <= protocol.Delete:
		t.of = operator
	}
	if step.Capture == protocol.Serializable {
		t.isolation = pgx.Serializable
	}
	insert := func(metadata string, id any) {
		var made job
		t.do = func(tx pgx.Tx) error {
			return tx.QueryRow(d.ctx, `INSERT INTO river_job (id, kind, args, queue, state, max_attempts, metadata, unique_key,
				unique_states)
				VALUES (coalesce($2, nextval('river_job_id_seq')), 'k', '{}', 'default', 'available', 25, $1::text::jsonb, CASE
					WHEN $3 THEN 'key'::bytea END, CASE WHEN $3 THEN `+uniqueStates+` END)
				RETURNING id, created_at`, metadata, id, step.Rule == protocol.InsertKeyed).Scan(&made.id, &made.created)
		}
		t.after = func() { d.jobs = append(d.jobs, made) }
	}
	var of job
	if int(step.On) < len(d.jobs) {
		of = d.jobs[step.On]
	}
	endJob := func(end func(now time.Time) *riverdriver.JobSetStateIfRunningParams) {
		t.do = func(tx pgx.Tx) error {
			p := end(time.Now())
			params := &riverdriver.JobSetStateIfRunningManyParams{
				ID: []int64{p.ID}, Attempt: []*int{p.Attempt},
				ErrData: [][]byte{p.ErrData}, FinalizedAt: []*time.Time{p.FinalizedAt},
				MetadataDoMerge: []bool{p.MetadataDoMerge}, MetadataUpdates: [][]byte{p.MetadataUpdates},
				ScheduledAt: []*time.Time{p.ScheduledAt}, State: []rivertype.JobState{p.State},
			}
			rows, err := riverpgxv5.New(nil).UnwrapExecutor(tx).JobSetStateIfRunningMany(d.ctx, params)
			if err == nil && len(rows) != 1 {
				err = errors.New("no job was ended")
			}
			return err
		}
		t.after = func() { d.ended(step.On) }
	}
	boom := func(now time.Time) []byte {
		raw, err := json.Marshal(map[string]any{"at": now, "attempt": 1 + len(d.failures), "error": "boom", "trace": ""})
		require.NoError(d, err)
		return raw
	}
	changes := func(sql string) { t.do = func(tx pgx.Tx) error { return changesOne(tx, sql, of.id) } }
	acts := func(sql string, args ...any) { t.do = func(tx pgx.Tx) error { return run(tx, sql, args...) } }
	switch step.Rule {
	case protocol.Insert, protocol.InsertKeyed:
		insert("{}", nil)
	case protocol.InsertMarked:
		insert(fmt.Sprintf(`{"dlq:entry_id": %q}`, d.entry(step.On)), nil)
	case protocol.ReuseID:
		insert("{}", of.id)
	case protocol.StartJob:
		changes(`UPDATE river_job SET state = 'running', attempt = attempt + 1, attempted_at = now(),
			attempted_by = array_append(attempted_by, 'walk') WHERE id = $1 AND state = 'available'`)
	case protocol.Complete:
		endJob(func(now time.Time) *riverdriver.JobSetStateIfRunningParams {
			return riverdriver.JobSetStateCompleted(of.id, now, nil)
		})
	case protocol.Fail:
		endJob(func(now time.Time) *riverdriver.JobSetStateIfRunningParams {
			return riverdriver.JobSetStateDiscarded(of.id, now, boom(now), nil)
		})
	case protocol.FailCancel:
		endJob(func(now time.Time) *riverdriver.JobSetStateIfRunningParams {
			return riverdriver.JobSetStateCancelled(of.id, now, boom(now), nil)
		})
	case protocol.Attempt:
		endJob(func(now time.Time) *riverdriver.JobSetStateIfRunningParams {
			return riverdriver.JobSetStateErrorRetryable(of.id, now, boom(now), nil)
		})
		t.after = nil
	case protocol.Schedule:
		changes("UPDATE river_job SET state = 'available' WHERE id = $1 AND state = 'retryable'")
	case protocol.RemoveMark:
		changes("UPDATE river_job SET metadata = metadata - 'dlq:entry_id' WHERE id = $1")
	case protocol.CancelJob:
		t.do = func(tx pgx.Tx) error {
			_, err := riverpgxv5.New(nil).UnwrapExecutor(tx).JobCancel(d.ctx,
				&riverdriver.JobCancelParams{ID: of.id, CancelAttemptedAt: time.Now(), ControlTopic: "c"})
			return err
		}
		t.after = func() { d.ended(step.On) }
	case protocol.RetryJob:
		t.do = func(tx pgx.Tx) error {
			_, err := riverpgxv5.New(nil).UnwrapExecutor(tx).JobRetry(d.ctx, &riverdriver.JobRetryParams{ID: of.id})
			return err
		}
	case protocol.DeleteJob:
		t.do = func(tx pgx.Tx) error {
			_, err := riverpgxv5.New(nil).UnwrapExecutor(tx).JobDelete(d.ctx, &riverdriver.JobDeleteParams{ID: of.id})
			return err
		}
	case protocol.ReadInbox:
		acts("SELECT id FROM dlq.dead_letter_inbox FOR KEY SHARE SKIP LOCKED")
	case protocol.File, protocol.FileParked:
		t.do = d.files(d.state.Workers[step.On].Of, step.Rule == protocol.FileParked)
	case protocol.Claim:
		t.do = func(tx pgx.Tx) error {
			id, err := one[uuid.UUID](tx, `SELECT id FROM dlq.dead_letter_open WHERE id = $1 AND status = 'dlq_pending'
				AND strategy IS NOT NULL FOR UPDATE SKIP LOCKED`, d.entry(step.On))
			if errors.Is(err, pgx.ErrNoRows) {
				return nil // there is no such entry
			} else if err != nil {
				return err
			}
			return run(tx, `UPDATE dlq.dead_letter_queue e SET status = 'dlq_manual', strategy = 'manual',
				parked_by = 'worker:walk', move = '{"actor": "worker:walk"}'
				FROM dlq.redeliver(ARRAY[$1::uuid], 'worker:walk', 'due', p_config_version => 'v') r
				WHERE r.verdict IN ('live', 'done') AND e.id = r.entry_id AND e.status = 'dlq_pending'`, id)
		}
		t.after = func() { d.redelivered(after) }
	case protocol.ReadUndecided:
		acts("SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND strategy IS NULL FOR UPDATE SKIP LOCKED")
	case protocol.Decide, protocol.Park:
		t.do = d.decides(&d.state.Workers[step.On], step.Rule == protocol.Park)
	case protocol.ApplyFacts:
		t.do = func(tx pgx.Tx) error {
			// dlq.apply_facts stops after a second, and on a busy machine it may not have applied all facts by then. So a
			// call that took a second is rolled back and repeated. A second call after a commit would have another result: it
			// would also apply facts that a single complete call does not apply.
			for {
				again, err := tx.Begin(d.ctx)
				if err != nil {
					return err
				}
				began := time.Now()
				if _, err := again.Exec(d.ctx, "SELECT dlq.apply_facts()"); err != nil {
					return err
				}
				if time.Since(began) < time.Second {
					return again.Commit(d.ctx)
				}
				if err := again.Rollback(d.ctx); err != nil {
					return err
				}
			}
		}
	case protocol.Scan, protocol.Append, protocol.CrashReconciler:
		acts("SELECT dlq.look_for_failures('whole', 'reconciler', 2000, '0', true)")
	case protocol.FindSuccesses:
		acts("SELECT dlq.find_successes()")
	case protocol.Sweep:
		acts("SELECT dlq.sweep_redeliveries()")
	case protocol.Discard, protocol.ResolveEntry, protocol.Reopen:
		action := map[protocol.Rule]string{
			protocol.Discard: "discard", protocol.ResolveEntry: "resolve", protocol.Reopen: "reopen",
		}[step.Rule]
		operation, changed := uuid.New(), 0
		t.do = func(tx pgx.Tx) (err error) {
			changed, err = one[int](tx, `SELECT count(*)
				FROM dlq.act_on($1, ARRAY[$2::uuid], 'kim', NULL,
					jsonb_build_object('operation', $3::text))`, action, d.entry(step.On), operation.String())
			return err
		}
		t.after = func() {
			if changed > 0 && step.Rule != protocol.Reopen {
				d.acts[step.On] = operation
			}
		}
	case protocol.Replay, protocol.Force:
		acts("SELECT * FROM dlq.redeliver(ARRAY[$1::uuid], 'kim', 'replayed', NULL, $2)", d.entry(step.On),
			step.Rule == protocol.Force)
		t.after = func() { d.redelivered(after) }
	case protocol.Undo:
		acts("SELECT dlq.undo($1, NULL, 'kim')", d.acts[step.On])
	case protocol.Delete:
		acts("SELECT dlq.delete_entries(ARRAY[$1::uuid], NULL, 'kim')", d.entry(step.On))
	case protocol.CrashWorker:
		t.do = d.files(d.state.Workers[step.On].Of, false)
		if d.state.Workers[step.On].Doing == protocol.Decides {
			t.do = d.decides(&d.state.Workers[step.On], false)
		}
	}
	return t
}

func changesOne(tx pgx.Tx, sql string, args ...any) error {
	tag, err := tx.Exec(context.Background(), sql, args...)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("%s changed %d rows", sql, tag.RowsAffected())
	}
	return err
}

// ended records the end of a job for the test, unless it is a success.
func (d *database) ended(i int8) {
	var at *time.Time
	var state string
	var id uuid.UUID
	require.NoError(d, d.conn(worker).QueryRow(d.ctx, `SELECT finalized_at, state, dlq.entry_id(id, finalized_at)
		FROM river_job WHERE id = $1`, d.jobs[i].id).Scan(&at, &state, &id))
	if state != "completed" {
		d.failures = append(d.failures, failure{*at, id})
	}
}

// redelivered records the job that a redelivery inserted, if it inserted one.
func (d *database) redelivered(after *protocol.State) {
	if int(after.NJobs) == len(d.jobs) {
		return
	}
	var made job
	require.NoError(d, d.conn(worker).QueryRow(d.ctx,
		"SELECT id, created_at FROM river_job ORDER BY id DESC LIMIT 1").Scan(&made.id, &made.created))
	if made.id != d.jobs[len(d.jobs)-1].id {
		d.jobs = append(d.jobs, made)
	}
}

func repeat[T any](value T, n int) []T { return slices.Repeat([]T{value}, n) }

// files returns the statements with which a worker files the rows of the inbox that it has read (see
// internal/worker/filing.go).
func (d *database) files(failures uint8, parked bool) statements {
	return func(tx pgx.Tx) error {
		rows, err := tx.Query(d.ctx, `SELECT i.id FROM dlq.dead_letter_inbox i WHERE i.id = ANY ($1)
			ORDER BY i.id FOR UPDATE SKIP LOCKED`, d.entries(failures))
		if err != nil {
			return err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		if err != nil {
			return err
		}
		ids = slices.Compact(ids)
		n, status, strategy := len(ids), "dlq_pending", "immediate"
		if n == 0 {
			return nil
		}
		if parked {
			status, strategy = "dlq_manual", "manual"
		}
		filed, err := one[int](tx,
			`SELECT cardinality(dlq.file_as($1, 'worker:walk', 'v', $2, $3, $4, $5, $6, array_fill(now(), ARRAY[$7::integer]), $8, array_fill($9::integer, ARRAY[$7]),
			array_fill(0::smallint, ARRAY[$7]), array_fill('[]'::jsonb, ARRAY[$7]), $8, $8))`, ids,
			repeat(status, n), repeat(strategy, n), repeat("transient", n), repeat("rule", n), repeat("f", n), n,
			repeat("", n), protocol.MaxTries)
		if err != nil || filed == n {
			return err
		}
		return run(tx, "SELECT dlq.file_repeats($1, false)", ids)
	}
}

// decides returns the statements with which a worker decides the undecided entries that it has read.
func (d *database) decides(w *protocol.Worker, park bool) statements {
	ids, ats := []uuid.UUID{}, []time.Time{}
	for e, last := range w.As {
		if w.Of&(1<<e) != 0 {
			ids, ats = append(ids, d.failures[e].id), append(ats, d.failures[last].at)
		}
	}
	status, strategy := "dlq_pending", "immediate"
	if park {
		status, strategy = "dlq_manual", "manual"
	}
	return func(tx pgx.Tx) error {
		return run(tx, `WITH claimed AS (
				SELECT e.id FROM dlq.dead_letter_open e
				JOIN (SELECT unnest($1::uuid[]) AS id, unnest($2::timestamptz[]) AS last_failed_at) j ON e.id = j.id
					AND e.last_failed_at = j.last_failed_at
				WHERE e.status = 'dlq_pending' AND e.strategy IS NULL AND e.waiting_for IS DISTINCT
				FROM 'automatic' FOR UPDATE OF e SKIP LOCKED)
			UPDATE dlq.dead_letter_queue e SET status = $3::text::dlq.dead_letter_status, strategy = $4::text::dlq.strategy,
				error_class = 'transient', rule = 'rule', fingerprint = 'f', next_retry_at = now(),
				waiting_for = NULL, move = '{"actor": "worker:walk", "reason": "decided"}'
			FROM claimed c WHERE e.id = c.id AND e.status IN ('dlq_pending', 'dlq_manual')`, ids, ats, status, strategy)
	}
}

// take takes a step in the model and on the database, and compares both. If kill is true, the step's session is
// terminated before it commits. take returns the step that was taken.
func (d *database) take(step protocol.Step, kill bool) protocol.Step {
	d.Helper()
	after, _, ok := d.model.Apply(d.state, step)
	require.True(d, ok)
	switch {
	case step.Rule == protocol.Scan || step.Rule == protocol.Append || step.Rule == protocol.CrashReconciler:
		if d.reconcilerStep(step.Rule) {
			break
		}
		step = protocol.Step{Rule: protocol.CrashReconciler} // the reconciler's lock timeout ended its call
		after, _, _ = d.model.Apply(d.state, step)
	case kill:
		d.kill(d.transactionOf(step, &after))
		after = d.state
	case step.Rule == protocol.CrashWorker:
		d.kill(d.transactionOf(step, &after))
	default:
		if step.Capture == protocol.Misses {
			d.exec(worker, "SELECT dlq.put_capture('off', '1 min')")
		}
		d.commit(d.transactionOf(step, &after))
		if step.Capture == protocol.Misses {
			d.exec(worker, "SELECT dlq.put_capture('on', '1 min')")
		}
	}
	text := step.String()
	if kill {
		text += " (rolled back: its session ends)"
	}
	d.taken = append(d.taken, text)
	d.state = after
	d.compare()
	return step
}

func (d *database) commit(t transaction) {
	d.Helper()
	tx, err := d.conn(t.of).BeginTx(d.ctx, pgx.TxOptions{IsoLevel: t.isolation})
	require.NoError(d, err)
	require.NoError(d, t.do(tx), d.trace())
	require.NoError(d, tx.Commit(d.ctx))
	if t.after != nil {
		t.after()
	}
}

func (d *database) kill(t transaction) {
	d.Helper()
	conn := d.conn(t.of)
	tx, err := conn.BeginTx(d.ctx, pgx.TxOptions{IsoLevel: t.isolation})
	require.NoError(d, err)
	require.NoError(d, t.do(tx), d.trace())
	d.terminate(conn)
	require.Error(d, tx.Commit(d.ctx))
}

// terminate terminates a session, and waits until it has ended.
func (d *database) terminate(conn *pgx.Conn) {
	d.Helper()
	pid := conn.PgConn().PID()
	d.exec(administrator, "SELECT pg_terminate_backend($1)", pid)
	d.await(func() bool { return !d.queryBool("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid) })
}

// await polls until a condition is true. It pauses between polls, to leave the processor to the session that the test
// waits for.
func (d *database) await(condition func() bool) {
	d.Helper()
	for !condition() {
		select {
		case <-d.ctx.Done():
			require.NoError(d, d.ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}

func (d *database) queryBool(sql string, args ...any) (yes bool) {
	d.Helper()
	require.NoError(d, d.conn(administrator).QueryRow(d.ctx, sql, args...).Scan(&yes))
	return yes
}

func (d *database) count(sql string, args ...any) (n int) {
	d.Helper()
	require.NoError(d, d.conn(worker).QueryRow(d.ctx, sql, args...).Scan(&n))
	return n
}

// reconcilerStep takes a step of the reconciler. The reconciler reads, locks and appends in one transaction. To stop it
// after it has read, the test locks dlq.reconcile_findings, which the reconciler locks next. reconcilerStep returns
// false if the reconciler's lock timeout ended the call.
func (d *database) reconcilerStep(rule protocol.Rule) bool {
	d.Helper()
	if rule == protocol.Scan {
		d.scan = &pendingScan{lock: d.conn(holder), ended: make(chan error, 1)}
		_, err := d.scan.lock.Exec(d.ctx, "BEGIN; LOCK TABLE dlq.reconcile_findings IN SHARE MODE")
		require.NoError(d, err)
		conn, ended := d.conn(reconciler), d.scan.ended
		pid := conn.PgConn().PID()
		go func() {
			_, err := conn.Exec(d.ctx, wholeScan)
			ended <- err
		}()
		d.await(func() bool {
			return len(ended) > 0 || d.queryBool("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)", pid)
		})
		return true
	}
	if rule == protocol.CrashReconciler {
		d.terminate(d.conns[reconciler])
	}
	_, err := d.scan.lock.Exec(d.ctx, "COMMIT")
	require.NoError(d, err)
	err = <-d.scan.ended
	d.scan = nil
	if rule == protocol.CrashReconciler {
		_ = d.conns[reconciler].Close(d.ctx) // the call may have failed before the session was terminated
		return true
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == lockNotAvailable {
		return false
	}
	require.NoError(d, err)
	return true
}

// scanFindsNothing runs the reconciler when the model expects that it finds nothing.
func (d *database) scanFindsNothing() {
	d.Helper()
	d.exec(reconciler, wholeScan)
	d.taken = append(d.taken, "reconciler scans and finds nothing")
	d.compare()
}

func (d *database) trace() string {
	var out strings.Builder
	for n, step := range d.taken {
		fmt.Fprintf(&out, "  %2d. %s\n", n+1, step)
	}
	return out.String()
}
