package deadletter_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestLocks_DoNotGrowWithHistory counts the locks of common queries in a database with three years of history. All
// databases of a server share one lock table, so a query for an entry must not need more locks with a longer history.
func TestLocks_DoNotGrowWithHistory(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec(`SELECT dlq.ensure_partition(p.parent, m)
		FROM (VALUES ('dlq.dead_letter_transitions'::regclass), ('dlq.dead_letter_resolved'),
			('dlq.dead_letter_archived')) p (parent),
			generate_series(date_trunc('month', now(), 'UTC') - interval '36 months', now(), interval '1 month') m`)
	// One entry has just failed, one was closed today, and two failed 13 months ago. Of these two, one was closed a month
	// later, and the other ten months later.
	exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', 'q', 1, 'running'
		FROM generate_series(1, 2)`)
	exec("UPDATE river_job SET state = 'discarded', finalized_at = now()")
	var fresh, closed uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT min(id::text), max(id::text) FROM dlq.dead_letter_queue").Scan(
		&fresh, &closed))
	require.NoError(t, store.Discard(t.Context(), closed, deadletter.Act{Actor: "kim"}))
	closedAfter := func(job, months int) (id uuid.UUID) {
		t.Helper()
		require.NoError(t, pool.QueryRow(t.Context(), `
			WITH noted AS (
				INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind)
				SELECT dlq.entry_id($1, now() - interval '13 months'), 'dlq_archived', 'restored', 'q', 'k')
			INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, queue, kind, job_kind, priority,
				original_event, status, first_failed_at, last_failed_at, created_at, closed_at, stage, move)
			SELECT dlq.entry_id($1, f), $1, f, 'q', 'k', 'k', 1, '{}', 'dlq_archived', f, f, f,
				f + $2 * interval '1 month', 'archived', '{"moved": true}'
			FROM (SELECT now() - interval '13 months') t (f) RETURNING id`, job, months).Scan(&id))
		return id
	}
	old, late := closedAfter(7, 1), closedAfter(8, 10)

	// fits is the number of locks for each page with which a hundred pages at a time fit into the lock table of a server
	// with default settings: 64 locks for each of 100 connections, and 16 fast-path locks for each connection.
	const fits = 80
	count := func(sql string, args ...any) (n, found int) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			rows, err := tx.Query(t.Context(), sql, args...)
			if err != nil {
				return err
			}
			rows.Close()
			require.NoError(t, rows.Err())
			found = int(rows.CommandTag().RowsAffected())
			return tx.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()").Scan(&n)
		}))
		return n, found
	}
	locks := func(sql string, args ...any) int {
		t.Helper()
		n, found := count(sql, args...)
		require.Equal(t, 1, found, sql)
		return n
	}
	parts, err := store.ClosedParts(t.Context())
	require.NoError(t, err)
	parts = append(parts, deadletter.OpenPart())
	for name, look := range map[string]struct {
		id    uuid.UUID
		acts  int // number of locks of a note, a tag or an assignment
		reads int // number of locks of dlq.trail and dlq.audit
	}{
		"has just failed":   {fresh, 100, 100},
		"closed today":      {closed, 300, 300},
		"closed a year ago": {old, 300, 900},
		"closed late":       {late, 700, 900},
	} {
		found := 0
		for _, part := range parts {
			sql, args := store.GetSQL(t.Context(), look.id, part)
			n, rows := count(sql, args...)
			require.Less(t, n, fits, "%s: %v", name, part)
			found += rows
		}
		require.Equal(t, 1, found, name)
		sql, args := store.TrailSQL(t.Context(), look.id, deadletter.ClosedSince(look.id), 1000)
		n, _ := count(sql, args...)
		t.Log(name, "trail", n)
		require.Less(t, n, fits, name)
		require.Less(t, locks("SELECT count(*) FROM dlq.trail($1)", look.id), look.reads, name)
		n = locks("SELECT count(*) FROM dlq.audit(jsonb_build_object('entryId', $1::uuid))", look.id)
		require.Less(t, n, look.reads, name)
		for _, act := range []string{"note", "tag", "assign"} {
			n := locks("SELECT dlq.act_on($1, ARRAY[$2::uuid], 'kim', 'x', '{\"tags\": [\"seen\"]}')", act, look.id)
			t.Log(name, act, n)
			require.Less(t, n, look.acts, name)
		}
	}
	t.Log("audit", locks("SELECT count(*) FROM dlq.audit('{}', 100)"))
	require.Less(t, locks("SELECT count(*) FROM dlq.audit('{}', 100)"), 300, "the complete audit trail")
	require.Less(t, locks("SELECT count(*) FROM dlq.audit(jsonb_build_object('after', now() - interval '7 days'), 100)"),
		60, "a week of the audit trail")
	for _, part := range parts {
		for _, f := range []filter.Filter{{}, {Queue: []string{"q"}, Kind: []string{"k"}}} {
			chosen, err := store.Where(t.Context(), &f)
			require.NoError(t, err)
			sql, args := store.ListSQL(t.Context(), deadletter.Page{Filter: f, Limit: 50}, chosen, part)
			n, _ := count(sql, args...)
			require.Less(t, n, fits, "a list: %v", part)
		}
	}
	for _, call := range []string{
		"dlq.oldest_entries(20)", "dlq.policy_changes('7 days')", "dlq.stats('24 hours')",
		"dlq.flow('24 hours', 'class')", "dlq.times('24 hours')",
		"dlq.top_groups('24 hours')", "dlq.groups('{}')",
	} {
		require.Less(t, locks("SELECT count(*) FROM "+call), fits, call)
	}
	require.Less(t, locks("SELECT count(*) FROM dlq.by_rule('24 hours')"), 2*fits, "open and closed entries")
	require.Less(t, locks(`SELECT count(*) FROM dlq.find('{"status": "dlq_pending"}')`), 60, "open entries, in psql")

	// Actions also find an old entry.
	n := 0
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.act_on('purge', ARRAY[$1::uuid], 'kim')",
		old).Scan(&n))
	require.Equal(t, 1, n)
}

// A list that is read part by part equals the result of one statement over all parts.
func TestList_ReadsInParts(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec(`SELECT dlq.ensure_partition(p.parent, m)
		FROM (VALUES ('dlq.dead_letter_resolved'::regclass), ('dlq.dead_letter_archived')) p (parent),
			generate_series(date_trunc('month', now(), 'UTC') - interval '11 months', now(), interval '1 month') m`)
	exec(`WITH e AS (
			SELECT i, now() - interval '14 months' * random() AS f, (ARRAY['pending', 'manual', 'resolved', 'resolved', 'failed',
				'archived'])[1 + i % 6] AS s FROM generate_series(1, 200) i
		), noted AS ( -- as what comes back from the archive
			INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind) SELECT dlq.entry_id(e.i, e.f),
				('dlq_' || e.s)::dlq.dead_letter_status, 'restored', 'q', 'k' FROM e
		)
		INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event,
			status, stage, first_failed_at, last_failed_at, created_at, closed_at, next_retry_at, move)
		SELECT dlq.entry_id(i, f), i, f, 'q' || i % 3, 'k', 'k', 1, '{}', ('dlq_' || s)::dlq.dead_letter_status,
			(CASE WHEN s IN ('pending', 'manual') THEN 'open' ELSE s END)::dlq.dead_letter_stage, f, f, f,
			CASE WHEN s NOT IN ('pending', 'manual') THEN f + (now() - f) * random() END, now(), '{"moved": true}'
		FROM e`)
	year := time.Now().AddDate(-1, 0, 0)
	for _, c := range []struct {
		filter deadletter.Page
		where  string
		args   []any
	}{
		{deadletter.Page{}, "true", nil},
		{deadletter.Page{Oldest: true}, "true", nil},
		{deadletter.Page{Filter: filter.Filter{Queue: []string{"q1"}}}, "queue = 'q1'", nil},
		{deadletter.Page{Filter: filter.Filter{Status: []string{"dlq_archived"}}}, "status = 'dlq_archived'", nil},
		{
			deadletter.Page{Filter: filter.Filter{Status: []string{"dlq_manual", "dlq_failed"}}, Oldest: true},
			"status IN ('dlq_manual', 'dlq_failed')", nil,
		},
		{
			deadletter.Page{Filter: filter.Filter{After: year.Format(time.RFC3339Nano)}},
			"id >= $1",
			[]any{deadletter.FirstID(year)},
		},
		{
			deadletter.Page{Filter: filter.Filter{Before: year.Format(time.RFC3339Nano)}, Oldest: true},
			"id < $1",
			[]any{deadletter.FirstID(year)},
		},
		{deadletter.Page{Filter: filter.Filter{Status: []string{"dlq_manual"}}}, "status = 'dlq_manual'", nil},
	} {
		order := "DESC"
		if c.filter.Oldest {
			order = "ASC"
		}
		rows, err := pool.Query(t.Context(), "SELECT id FROM dlq.dead_letter_queue WHERE "+c.where+" ORDER BY id "+order,
			c.args...)
		require.NoError(t, err)
		want, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		require.NoError(t, err)
		require.NotEmpty(t, want, c.where)
		for _, limit := range []int{7, 100} {
			var got []uuid.UUID
			for c.filter.Limit, c.filter.Cursor = limit, uuid.Nil; ; c.filter.Cursor = got[len(got)-1] {
				page, err := store.List(t.Context(), c.filter)
				require.NoError(t, err)
				require.LessOrEqual(t, len(page), limit)
				for _, e := range page {
					got = append(got, e.ID)
				}
				if len(page) < limit {
					break
				}
			}
			require.Equal(t, want, got, c.where)
		}
	}
	for _, id := range []string{"0198aaaa-0000-7000-8000-000000000000", "ffffffff-0000-7000-8000-000000000000"} {
		_, _, err := store.Get(t.Context(), uuid.MustParse(id))
		require.ErrorIs(t, err, deadletter.ErrNotFound)
	}
	var some []uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT array_agg(id)
		FROM (SELECT id FROM dlq.dead_letter_queue ORDER BY random() LIMIT 50) s`).Scan(&some))
	for _, id := range some {
		_, _, err := store.Get(t.Context(), id)
		require.NoError(t, err)
	}
}
