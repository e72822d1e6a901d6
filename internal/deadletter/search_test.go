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

// A search without a budget reads one slice and returns a cursor. Searches that continue from such cursors find all
// entries in order. A count works in the same way.
func TestSearch_ContinuesInSlices(t *testing.T) {
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
	// There are 20,000 entries of 14 months. A third of them were closed some time after their failure. One in 1,999
	// matches the filter.
	exec(`WITH e AS (
			SELECT i, now() - interval '14 months' * random() * random() AS f, (ARRAY['pending', 'pending', 'pending', 'pending',
				'resolved', 'archived'])[1 + i % 6] AS s FROM generate_series(1, 20000) i
		), noted AS ( -- as what comes back from the archive
			INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind) SELECT dlq.entry_id(e.i, e.f),
				('dlq_' || e.s)::dlq.dead_letter_status, 'restored', 'q', 'k' FROM e WHERE e.s <> 'pending'
		)
		INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event,
			error_message, status, stage, first_failed_at, last_failed_at, created_at, closed_at, move, next_retry_at)
		SELECT dlq.entry_id(i, f), i, f, 'q', 'k', 'k', 1, jsonb_build_object('n', i % 1999), 'failure ' || i % 1999 || '.',
			('dlq_' || s)::dlq.dead_letter_status, (CASE WHEN s = 'pending' THEN 'open' ELSE s END)::dlq.dead_letter_stage, f, f,
				f,
			CASE WHEN s <> 'pending' THEN f + (now() - f) * random() END, CASE
				WHEN s <> 'pending' THEN '{"moved": true}'::jsonb END, now()
		FROM e`)
	exec("VACUUM ANALYZE dlq.dead_letter_queue")
	for _, text := range []string{
		`"failure 7."`, `payload.n:7 status:pending,archived age:<300d`, `"failure 7." age:>30d`,
		`"no such failure"`,
	} {
		for _, oldest := range []bool{false, true} {
			if oldest && text == `"no such failure"` {
				continue
			}
			f, err := filter.Parse(text, "")
			require.NoError(t, err)
			where, err := store.Where(t.Context(), &f)
			require.NoError(t, err)
			order := map[bool]string{true: "ASC", false: "DESC"}[oldest]
			rows, err := pool.Query(t.Context(), "SELECT id FROM dlq.dead_letter_queue e WHERE $1::jsonb IS NOT NULL AND "+where+
				" ORDER BY id "+order, f.JSON())
			require.NoError(t, err)
			want, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
			require.NoError(t, err)

			got := []uuid.UUID{}
			page, searches, last := deadletter.Page{Filter: f, Oldest: oldest, Limit: 3}, 0, time.Time{}
			for {
				found, err := store.Search(t.Context(), page, 0)
				require.NoError(t, err)
				require.LessOrEqual(t, len(found.Entries), page.Limit)
				for _, e := range found.Entries {
					got = append(got, e.ID)
				}
				if searches++; found.Next == uuid.Nil {
					require.Zero(t, found.SearchedTo)
					break
				}
				if len(found.Entries) < page.Limit {
					require.NotZero(t, found.SearchedTo)
					require.True(t, last.IsZero() || found.SearchedTo.Before(last) != oldest || found.SearchedTo.Equal(last),
						"each search continues where the last one ended")
					last = found.SearchedTo
				}
				page.Cursor = found.Next
			}
			require.Equal(t, want, got, "%s %s", text, order)
			require.Greater(t, searches, 4, "each search reads a small slice")

			// With enough time, a search returns one page, whether it lists by index or reads slices.
			found, err := store.Search(t.Context(), deadletter.Page{Filter: f, Oldest: oldest, Limit: 100}, time.Minute)
			require.NoError(t, err)
			require.Zero(t, found.Next)
			require.Len(t, found.Entries, len(want))
		}
		f, err := filter.Parse(text, "")
		require.NoError(t, err)
		n, more, err := store.CountWithin(t.Context(), f, 3, 0)
		require.NoError(t, err)
		require.LessOrEqual(t, n, 3)
		require.True(t, more, "the budget does not allow a complete count")
		list, err := store.List(t.Context(), deadletter.Page{Filter: f, Limit: 100})
		require.NoError(t, err)
		n, more, err = store.CountWithin(t.Context(), f, 100, time.Minute)
		require.NoError(t, err)
		require.Equal(t, len(list), n)
		require.False(t, more)
	}
	n, more, err := store.CountWithin(t.Context(), filter.Filter{}, 10_000, time.Minute)
	require.NoError(t, err)
	require.Equal(t, 10_000, n)
	require.True(t, more)
	n, _, err = store.CountWithin(t.Context(), filter.Filter{}, 100_000, time.Minute)
	require.NoError(t, err)
	require.Equal(t, 20_000, n)
}
