// Package host_test checks the promise of docs/host.md: no fault of dlqd delays the application's statements or makes
// them fail.
package host_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// limit bounds the duration of an application's statement that waits for no lock, even on a busy machine. The tests
// hold their locks until the statement has ended. A statement that waits for such a lock fails after lockTimeout, so
// that the test can continue.
const (
	limit       = time.Minute
	lockTimeout = "2min"
)

// host is a database where an application runs River, with dlqd attached. dlqd's role is no superuser.
type host struct {
	*postgrestest.Guest
	*testing.T

	owner, dlqd, admin *pgxpool.Pool
	migrator           *postgres.Migrator
}

func newHost(t *testing.T) *host {
	t.Helper()
	return openHost(t, postgrestest.AttachedGuest(t))
}

// newHostWithRoles returns a host with separate roles, which the test may change.
func newHostWithRoles(t *testing.T) *host {
	t.Helper()
	g := postgrestest.NewGuest(t)
	g.Grant(t, postgres.DefaultSchemas())
	g.Attach(t)
	return openHost(t, g)
}

func openHost(t *testing.T, guest *postgrestest.Guest) *host {
	t.Helper()
	h := &host{Guest: guest, T: t}
	h.owner, h.dlqd, h.admin = postgrestest.Open(t, h.Owner), postgrestest.Open(t, h.DLQD), postgrestest.Open(t, h.Admin)
	h.migrator = &postgres.Migrator{
		Pool: h.dlqd, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler),
	}
	h.exec(h.dlqd, "SELECT dlq.set_capture('on', '1 min')") // machines may be busy; tests of the limit set another limit
	return h
}

func (h *host) exec(db postgres.DB, sql string, args ...any) {
	h.Helper()
	_, err := db.Exec(h.Context(), sql, args...)
	require.NoError(h, err, sql)
}

func (h *host) count(sql string, args ...any) int {
	h.Helper()
	var n int
	require.NoError(h, h.admin.QueryRow(h.Context(), sql, args...).Scan(&n), sql)
	return n
}

func (h *host) strings(sql string, args ...any) []string {
	h.Helper()
	rows, err := h.admin.Query(h.Context(), sql, args...)
	require.NoError(h, err, sql)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(h, err, sql)
	return list
}

// application is a session of the application. Each call of River's driver is one statement in its own transaction.
type application struct {
	*pgxpool.Pool

	host     *host
	mu       sync.Mutex
	warnings []string
}

// application opens a session with the given settings.
func (h *host) application(settings ...string) *application {
	h.Helper()
	app := &application{host: h}
	config, err := pgxpool.ParseConfig(h.App)
	require.NoError(h, err)
	config.MaxConns = 1
	config.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		app.mu.Lock()
		defer app.mu.Unlock()
		if n.Severity == "WARNING" && strings.HasPrefix(n.Message, "dlqd: ") {
			app.warnings = append(app.warnings, n.Message)
		}
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		for _, setting := range append([]string{"lock_timeout = '" + lockTimeout + "'"}, settings...) {
			if _, err := conn.Exec(ctx, "SET "+setting); err != nil {
				return fmt.Errorf("SET %s: %w", setting, err)
			}
		}
		return nil
	}
	app.Pool, err = pgxpool.NewWithConfig(h.Context(), config)
	require.NoError(h, err)
	h.Cleanup(app.Close)
	return app
}

// takeWarnings returns the warnings since the last call.
func (app *application) takeWarnings() []string {
	app.mu.Lock()
	defer app.mu.Unlock()
	warnings := app.warnings
	app.warnings = nil
	return warnings
}

// jobs is a batch of jobs of the application. It has one running job for each kind of end, and one discarded job to
// retry.
type jobs struct {
	ids   map[string]int64
	batch int64
}

const (
	fails           = "fails"            // at its only attempt
	failsAgain      = "fails_again"      // at its second attempt
	cancels         = "cancels"          // its worker returns river.JobCancel
	succeeds        = "succeeds"         // no trigger acts on it
	copied          = "copied"           // succeeds, with metadata that the application copied from a redelivery
	redelivered     = "redelivered"      // a redelivery that succeeds
	redeliveryFails = "redelivery_fails" // a redelivery that fails
	retried         = "retried"          // discarded, and retried outside dlqd
)

// prepare creates n batches of jobs.
func (h *host) prepare(n int) []jobs {
	h.Helper()
	rows, err := h.admin.Query(h.Context(), `
		WITH kinds AS (
			SELECT b AS batch, k AS kind, gen_random_uuid() AS entry
			FROM generate_series(1, $1) b, unnest(ARRAY['fails', 'fails_again', 'cancels', 'succeeds', 'copied', 'redelivered',
				'redelivery_fails', 'retried']) k
		), inserted AS (
			INSERT INTO river_job (kind, args, max_attempts, attempt, state, finalized_at, errors, metadata)
			SELECT k.kind, jsonb_build_object('batch', k.batch), 2, CASE k.kind WHEN 'fails_again' THEN 2 ELSE 1 END,
			       CASE k.kind WHEN 'retried' THEN 'discarded' ELSE 'running' END::river_job_state, CASE k.kind
			       	WHEN 'retried' THEN now() END,
			       CASE WHEN k.kind IN ('fails_again',
			       	'retried') THEN ARRAY['{"error": "timeout", "attempt": 1, "at": "2026-01-01T00:00:00Z"}'::jsonb] END,
			       CASE WHEN k.kind IN ('copied', 'redelivered', 'redelivery_fails') THEN jsonb_build_object('dlq:entry_id',
			       	k.entry) ELSE '{}' END
			FROM kinds k
			RETURNING *
		), known AS (
			INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id)
			SELECT i.id, i.created_at, (i.metadata ->> 'dlq:entry_id')::uuid FROM inserted i WHERE i.kind LIKE 'redeliver%'
		)
		SELECT (i.args ->> 'batch')::bigint, i.kind, i.id FROM inserted i`, n)
	require.NoError(h, err)
	batches := make([]jobs, n)
	var batch, id int64
	var kind string
	_, err = pgx.ForEachRow(rows, []any{&batch, &kind, &id}, func() error {
		b := &batches[batch-1]
		if b.ids == nil {
			b.ids = map[string]int64{}
		}
		b.batch = batch
		b.ids[kind] = id
		return nil
	})
	require.NoError(h, err)
	return batches
}

// complete ends the running jobs of a batch in one statement, as River's completer does.
func complete(ctx context.Context, river riverdriver.Executor, j jobs) error {
	params := &riverdriver.JobSetStateIfRunningManyParams{}
	now := time.Now()
	for kind, id := range j.ids {
		state := rivertype.JobStateCompleted
		var failure []byte
		switch kind {
		case fails, failsAgain, redeliveryFails:
			state = rivertype.JobStateDiscarded
			failure = []byte(`{"error": "timeout", "attempt": 1, "at": "2026-01-01T00:00:00Z"}`)
		case cancels:
			state = rivertype.JobStateCancelled
			failure = []byte(`{"error": "JobCancelError: no such account", "attempt": 1, "at": "2026-01-01T00:00:00Z"}`)
		case retried:
			continue
		}
		params.ID = append(params.ID, id)
		params.State = append(params.State, state)
		params.FinalizedAt = append(params.FinalizedAt, &now)
		params.ErrData = append(params.ErrData, failure)
		params.Attempt = append(params.Attempt, nil)
		params.MetadataDoMerge = append(params.MetadataDoMerge, false)
		params.MetadataUpdates = append(params.MetadataUpdates, nil)
		params.ScheduledAt = append(params.ScheduledAt, nil)
	}
	_, err := river.JobSetStateIfRunningMany(ctx, params)
	return err
}

// retry retries the discarded job of a batch, as River UI does.
func retry(ctx context.Context, river riverdriver.Executor, j jobs) error {
	_, err := river.JobRetry(ctx, &riverdriver.JobRetryParams{ID: j.ids[retried]})
	return err
}

// run runs the statements of a batch and checks that they succeed within limit. It returns the warnings that the
// statements raised.
func (app *application) run(j jobs, when string) []string {
	h := app.host
	h.Helper()
	river := riverpgxv5.New(app.Pool).GetExecutor()
	for name, statement := range map[string]func(context.Context, riverdriver.Executor, jobs) error{
		"complete": complete, "retry": retry,
	} {
		begun := time.Now()
		err := statement(h.Context(), river, j)
		assert.NoError(h, err, "%s while %s", name, when) //nolint:testifylint // every statement is tried
		assert.Less(h, time.Since(begun), limit, "%s while %s", name, when)
	}
	warnings := app.takeWarnings()
	require.Equal(h, 7, h.count(`SELECT count(*) FROM river_job WHERE id = ANY ($1)
		AND state IN ('completed', 'discarded', 'cancelled')`, j.list()), when)
	require.LessOrEqual(h, len(warnings), 2, "at most one warning for each statement: %s", when)
	return warnings
}

func (j jobs) list() []int64 {
	var list []int64
	for _, id := range j.ids {
		list = append(list, id)
	}
	return list
}

// captured reports whether capture recorded exactly the failures and facts of the batch in the application's
// transactions.
func (h *host) captured(j jobs) bool {
	h.Helper()
	return h.count(`SELECT count(*) FROM river_job j WHERE j.id = ANY ($1) AND CASE
			WHEN j.kind IN ('succeeds', 'copied') THEN NOT EXISTS (SELECT FROM dlq.dead_letter_inbox i
				WHERE i.river_job_id = j.id)
			WHEN j.kind LIKE 're%' THEN (SELECT count(*) = 1 FROM dlq.job_facts f WHERE f.job_id = j.id
				AND f.job_created_at = j.created_at)
			                            AND NOT EXISTS (SELECT FROM dlq.dead_letter_inbox i WHERE i.river_job_id = j.id)
			ELSE (SELECT count(*) = 1 FROM dlq.dead_letter_inbox i WHERE i.river_job_id = j.id
				AND i.job_created_at = j.created_at)
		END`, j.list()) == 8
}

// while runs sql in a transaction of the administrator, and calls run while that transaction is open. It returns false
// if sql fails.
func (h *host) while(sql string, run func()) bool {
	h.Helper()
	tx, err := h.admin.Begin(h.Context())
	require.NoError(h, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(h.Context())) }()
	h.exec(tx, "SET LOCAL lock_timeout = '2s'")
	if _, err := tx.Exec(h.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		h.Logf("%s: %v", sql, err)
		return false
	}
	run()
	return true
}

// reconcile runs a whole scan of River's jobs and files the failures that it finds.
func (h *host) reconcile() {
	h.Helper()
	var begun time.Time
	require.NoError(h, h.dlqd.QueryRow(h.Context(), "SELECT now()").Scan(&begun))
	for done := false; !done; {
		require.NoError(h, h.dlqd.QueryRow(h.Context(), "SELECT done AND began_at >= $1 FROM dlq.reconcile(p_whole => true)",
			begun).Scan(&done))
	}
	h.exec(h.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
}

// requireExact requires that there is exactly one dead letter for each failure among River's jobs.
func (h *host) requireExact() {
	h.Helper()
	require.Empty(h, h.strings(`SELECT j.kind || ' ' || j.id || ' ' || j.state || ' ' || j.finalized_at FROM river_job j
		WHERE dlq.is_failure(to_jsonb(j))
		  AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.river_job_id = j.id AND e.job_created_at = j.created_at
		  AND (e.last_failed_at >= j.finalized_at OR dlq.is_open(e.status)))
		  AND NOT EXISTS (SELECT FROM dlq.entry_jobs k WHERE k.job_id = j.id AND k.job_created_at = j.created_at)
		  AND NOT EXISTS (SELECT FROM dlq.retired_jobs r WHERE r.job_id = j.id
		  AND r.job_created_at = j.created_at)`), "failures without a dead letter")
	require.Empty(h, h.strings(`SELECT river_job_id || ' ' || job_created_at || ': ' || count(*) FROM dlq.dead_letter_queue
		GROUP BY river_job_id, job_created_at, CASE WHEN dlq.is_open(status) THEN 'infinity'
			ELSE last_failed_at END HAVING count(*) > 1`), "failures with two dead letters")
	require.Empty(h, h.strings(`SELECT e.id || ' ' || e.river_job_id || ' ' || o.id FROM dlq.dead_letter_queue e
		JOIN dlq.entry_jobs k ON k.job_id = e.river_job_id AND k.job_created_at = e.job_created_at
		JOIN dlq.dead_letter_queue o ON o.id = k.entry_id
			AND (o.river_job_id, o.job_created_at) <> (k.job_id,
				k.job_created_at)`), "redeliveries with a dead letter of their own")
}
