package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// riverVersions has, for each frozen schema, the version of River's schema at the time of the freeze.
var riverVersions = map[string]int{"00002": 8, "00004": 8, "00008": 8}

// A database with a frozen schema is upgraded while an application completes and fails jobs. No statement of the
// application fails, every failure has exactly one dead letter, and existing rows do not change.
func TestUpgrade_FromFrozenSchema(t *testing.T) {
	t.Parallel()
	codes, err := filepath.Glob("testdata/frozen/*.sql.gz")
	require.NoError(t, err)
	require.Len(t, codes, len(riverVersions), "riverVersions has the version of River for each")
	for _, file := range codes {
		version := strings.TrimSuffix(filepath.Base(file), ".sql.gz")
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			upgrade(t, version)
		})
	}
}

// frozenGuest returns an attached database in the state of the freeze of the migrations up to version.
func frozenGuest(t *testing.T, version string) *guest {
	t.Helper()
	code := gunzip(t, "testdata/frozen/"+version+".sql.gz")
	g := newGuest(t)
	postgrestest.MigrateRiver(t, g.owner, "", riverVersions[version])
	g.Grant(t, postgres.DefaultSchemas())
	number, err := strconv.ParseInt(version, 10, 64)
	require.NoError(t, err)
	require.NoError(t, g.migrator.UpTo(t.Context(), number))
	// On the day of a freeze, the frozen functions and triggers equal the current ones. Change them slightly, so that
	// there is something to upgrade.
	older := strings.NewReplacer("'dlqd: capture gives way", "'dlqd, an older one: capture gives way",
		"'dlqd: capture skips", "'dlqd, an older one: capture skips",
		"AFTER UPDATE OF state ON river.river_job", "AFTER UPDATE ON river.river_job",
		"BEFORE UPDATE OR DELETE OR TRUNCATE ON dlq.acts", "BEFORE DELETE OR TRUNCATE ON dlq.acts").Replace(code)
	require.NotEqual(t, code, older)
	execute(t, g.dlqd, postgres.DefaultSchemas().Render(older))
	execute(t, g.dlqd, `INSERT INTO dlq.settings (key, value) VALUES ('river', 'attached'), ('river_schema', 'public'),
		('code_version', 'older'), ('triggers', 'older'), ('river_triggers', 'older');
		INSERT INTO dlq.reconcile_looks (look, since) VALUES ('whole', now()); SELECT dlq.install_roles();
		SELECT dlq.refresh_rollups()`)
	execute(t, g.dlqd, "CALL dlq.ensure_partitions()")
	execute(t, g.dlqd, "SELECT dlq.put_capture('on', '1 min')")
	require.ErrorIs(t, g.migrator.Check(t.Context()), postgres.ErrSchemaOld)
	return g
}

func upgrade(t *testing.T, version string) {
	t.Helper()
	g := frozenGuest(t, version)
	g.createEntriesInEveryState()
	g.createRepeatedFailures()
	before := g.rows(nil)

	app := newLoad(t, g)
	app.await(300)
	require.NoError(t, g.migrator.Up(t.Context()))
	app.await(300)
	g.reconcile()
	for _, f := range doctor.Examine(t.Context(), g.migrator) {
		// These findings concern the whole server, vacuum, or DLQ workers; no DLQ worker runs in this test.
		if !slices.Contains([]string{"transactions", "replication slots", "dead rows", "filing"}, f.Name) {
			require.True(t, f.OK, "%s: %s", f.Name, f.Detail)
		}
	}
	app.stop()

	after := g.rows(before)
	for table, rows := range before {
		require.Subset(t, after[table].all, rows.all, table)
	}
	require.NoError(t, g.migrator.Check(t.Context()))
	g.reconcile()
	const jobs = "SELECT id, created_at FROM river_job WHERE kind = 'load' AND state IN ('discarded', 'cancelled')"
	const entries = "SELECT river_job_id, job_created_at FROM dlq.dead_letter_queue WHERE kind = 'load'"
	require.NotZero(t, count(t, g.dlqd, "SELECT count(*) FROM ("+jobs+") j"))
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM ("+jobs+" EXCEPT ALL "+entries+") j"),
		"failures without a dead letter")
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM ("+entries+" EXCEPT ALL "+jobs+") j"),
		"dead letters without a failure, or duplicates")

	// dlqd still knows the failures of an entry after the entry is closed or deleted.
	execute(t, g.dlqd, "SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open WHERE kind IN ('folded_open', 'followed')")
	g.reconcile()
	require.Zero(t, count(t, g.dlqd, "SELECT dlq.backfill()"))
	require.Equal(t, "folded 1, folded_open 1, followed 1",
		g.text(`SELECT string_agg(kind || ' ' || n, ', ' ORDER BY kind)
			FROM (SELECT kind, count(*) AS n FROM dlq.dead_letter_queue WHERE kind LIKE 'fol%' OR kind = 'purged'
			GROUP BY 1) s`))
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open WHERE kind LIKE 'fol%'"))

	// Work in progress continues: the redelivery ends, and the paused run still has its entries.
	execute(t, g.app, `UPDATE river_job SET state = 'completed', finalized_at = now() WHERE kind = 'processing'
		AND state = 'available'`)
	execute(t, g.dlqd, "SELECT dlq.apply_facts()")
	require.Equal(t, "dlq_resolved",
		g.text("SELECT string_agg(DISTINCT status::text, ',') FROM dlq.dead_letter_queue WHERE kind = 'processing'"))
	execute(t, g.dlqd, "SELECT dlq.replay_resume(id) FROM dlq.replay_runs")
	require.Equal(t, "running 2", g.text(`SELECT status || ' ' || (SELECT count(*) FROM dlq.replay_run_entries
		WHERE outcome IS NULL) FROM dlq.replay_runs`))
}

// createEntriesInEveryState makes jobs fail in a queue without workers, and moves each entry into the state that the
// kind of its job names.
func (g *guest) createEntriesInEveryState() {
	g.Helper()
	fail := func(kinds string) {
		execute(g.T, g.app, "INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT kind, "+
			"jsonb_build_object('n', 9007199254740993), 'elsewhere', 3, 'running' FROM unnest('"+kinds+
			"'::text[]) kind, generate_series(1, 2)")
		execute(g.T, g.app, "UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 3, errors = "+
			"ARRAY['{\"error\": \"timeout\", \"attempt\": 3}'::jsonb] WHERE state = 'running'")
	}
	act := func(kind, function string) {
		execute(g.T, g.dlqd, "SELECT dlq."+function+"(id, 'kim', 'of '||kind) FROM dlq.dead_letter_queue WHERE kind = '"+
			kind+"'")
	}
	fail("{pending,processing,manual,resolved,redelivered,failed,archived}")
	execute(g.T, g.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	execute(g.T, g.dlqd, "UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE kind = 'failed'")
	for _, kind := range []string{"processing", "redelivered", "failed"} {
		act(kind, "replay")
	}
	execute(g.T, g.app, `UPDATE river_job SET state = 'completed', finalized_at = now() WHERE kind = 'redelivered'
		AND state = 'available'`)
	execute(g.T, g.app, "UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1, errors = "+
		"ARRAY['{\"error\": \"again\", \"attempt\": 1}'::jsonb] WHERE kind = 'failed' AND state = 'available'")
	execute(g.T, g.dlqd, "SELECT dlq.apply_facts()")
	act("manual", "park")
	act("resolved", "park")
	act("resolved", "resolve")
	act("archived", "discard")
	execute(g.T, g.dlqd, "SELECT dlq.replay_pause(dlq.replay_start('{\"kind\": \"manual\"}', 'kim', p_force => true, "+
		"p_merge_patch => '{\"m\": 1}'))")
	execute(g.T, g.dlqd, "SELECT dlq.open_breaker('destination:x'), dlq.reset_breaker('destination:x'), "+
		"dlq.set_automatic('kind', 'manual', true)")
	fail("{inbox}")
	require.Equal(g, "dlq_pending 4, dlq_processing 2, dlq_manual 2, dlq_resolved 4, dlq_failed 2, dlq_archived 2",
		g.text(`SELECT string_agg(status || ' ' || n, ', ' ORDER BY status)
			FROM (SELECT status, count(*) AS n FROM dlq.dead_letter_queue GROUP BY 1) s`))
}

// createRepeatedFailures makes jobs fail again after a retry outside dlqd, so that entries have several failures. It
// also purges one entry.
func (g *guest) createRepeatedFailures() {
	g.Helper()
	fail := func() {
		execute(g.T, g.app, `UPDATE river_job SET state = 'running', attempt = attempt + 1, finalized_at = NULL
			WHERE state = 'available' AND queue = 'known'`)
		execute(g.T, g.app, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(),
			errors = errors || jsonb_build_object('at', clock_timestamp(), 'attempt', attempt, 'error', 'timeout')
				WHERE state = 'running' AND queue = 'known'`)
	}
	processInbox := func() {
		for range 3 {
			execute(g.T, g.dlqd, "SELECT dlq.apply_facts()")
			execute(g.T, g.dlqd, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox WHERE queue = 'known'))")
		}
	}
	discard := func(kinds string) {
		execute(g.T, g.dlqd, "SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open WHERE kind = ANY ('"+kinds+"')")
	}
	execute(g.T, g.app, `INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT kind, '{}', 'known', 9,
		'available' FROM unnest('{folded,folded_open,followed,purged}'::text[]) kind`)
	fail()
	processInbox()
	discard("{folded,folded_open,purged}")
	execute(g.T, g.app, `UPDATE river_job SET state = 'available', finalized_at = NULL
		WHERE kind IN ('folded', 'folded_open', 'followed')`)
	processInbox()
	require.Equal(g, "dlq_processing 1, dlq_manual 2",
		g.text(`SELECT string_agg(status || ' ' || n, ', ' ORDER BY status)
			FROM (SELECT status, count(*) AS n FROM dlq.dead_letter_open WHERE queue = 'known' GROUP BY 1) s`))
	fail()
	processInbox()
	require.Equal(g, "4", g.text("SELECT count(*) FROM dlq.dead_letter_queue WHERE queue = 'known'"))
	discard("{folded}")
	execute(g.T, g.dlqd, "SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE kind = 'purged'))")
}

func (g *guest) text(sql string) (text string) {
	g.Helper()
	require.NoError(g, g.dlqd.QueryRow(g.Context(), "SELECT ("+sql+")::text").Scan(&text))
	return text
}

// tableRows has the rows of a table, and the query that selects them.
type tableRows struct {
	query string
	all   []string
}

// rows returns the rows of dlqd's tables. It uses the queries of before. If before is nil, it reads all tables with
// lasting data.
func (g *guest) rows(before map[string]tableRows) map[string]tableRows {
	g.Helper()
	if before == nil {
		before = map[string]tableRows{}
		// The query excludes tables that dlqd itself rewrites or empties.
		rows, err := g.dlqd.Query(g.Context(), `
			SELECT c.relname, format('SELECT to_jsonb(r)::text FROM (SELECT %s FROM %s) r', (SELECT string_agg(a.attname, ', ')
			FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), c.oid::regclass)
			FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
			  AND c.relname !~ '^(settings|schema_migrations|reconcile_.*|rollup_.*|failure_groups|duties)$'`)
		require.NoError(g, err)
		var table, query string
		_, err = pgx.ForEachRow(rows, []any{&table, &query}, func() error {
			before[table] = tableRows{query: query}
			return nil
		})
		require.NoError(g, err)
	}
	now := map[string]tableRows{}
	for table, r := range before {
		rows, err := g.dlqd.Query(g.Context(), r.query)
		require.NoError(g, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(g, err)
		if len(all) > 0 {
			now[table] = tableRows{query: r.query, all: all}
		}
	}
	return now
}

// load is an application that works without a pause. Its jobs succeed, fail, panic or cancel themselves.
type load struct {
	t      *testing.T
	client *river.Client[pgx.Tx]
	ended  atomic.Int64
	cancel context.CancelFunc
	over   chan error

	mu     sync.Mutex
	failed []string // statements, with their errors
}

type loadArgs struct {
	N int `json:"n"`
}

func (loadArgs) Kind() string { return "load" }

// TraceQueryStart and TraceQueryEnd record the application's statements that Postgres refuses.
func (l *load) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, l, data.SQL)
}

func (l *load) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	// Errors without a PgError come from connections that River closes when it stops.
	if _, refused := errors.AsType[*pgconn.PgError](data.Err); refused {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.failed = append(l.failed, fmt.Sprint(data.Err, ": ", ctx.Value(l)))
	}
}

func newLoad(t *testing.T, g *guest) *load {
	t.Helper()
	l := &load{t: t, over: make(chan error, 1)}
	config, err := pgxpool.ParseConfig(g.App)
	require.NoError(t, err)
	config.ConnConfig.Tracer = l
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	const batch = 30
	free := make(chan struct{}, 10*batch) // places for jobs that may be inserted
	for range cap(free) {
		free <- struct{}{}
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[loadArgs]) error {
		free <- struct{}{}
		l.ended.Add(1)
		switch job.Args.N % 6 {
		case 0:
			return errors.New("timeout")
		case 1:
			return river.JobCancel(errors.New("no such account"))
		case 2:
			panic("nil")
		}
		return nil
	}))
	l.client, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}},
		Workers: workers, Logger: slog.New(slog.DiscardHandler),
		FetchCooldown: time.Millisecond, FetchPollInterval: 20 * time.Millisecond,
	})
	require.NoError(t, err)
	require.NoError(t, l.client.Start(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	l.cancel = cancel
	go func() {
		defer close(l.over)
		for n := 0; ; {
			params := make([]river.InsertManyParams, 0, batch)
			for range batch {
				select {
				case <-free:
				case <-ctx.Done():
					return
				}
				params = append(params, river.InsertManyParams{Args: loadArgs{N: n}, InsertOpts: &river.InsertOpts{MaxAttempts: 1}})
				n++
			}
			if _, err := l.client.InsertManyFast(t.Context(), params); err != nil {
				l.over <- err
				return
			}
		}
	}()
	return l
}

// await waits until the given number of further jobs have ended.
func (l *load) await(jobs int64) {
	l.t.Helper()
	from := l.ended.Load()
	require.Eventually(l.t, func() bool { return l.ended.Load() >= from+jobs }, 5*time.Minute, 5*time.Millisecond)
}

func (l *load) stop() {
	l.t.Helper()
	l.cancel()
	require.NoError(l.t, <-l.over)
	require.NoError(l.t, l.client.Stop(context.WithoutCancel(l.t.Context())))
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Empty(l.t, l.failed, "the application's statements")
}
