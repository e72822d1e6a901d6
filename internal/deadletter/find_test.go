package deadletter_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// Entries of a job, a subscriber or a failure group are found by an index of each partition, so the time does not grow
// with the number of closed entries.
func TestFind_UsesIndexesForJobSubscriberAndGroup(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	admin := postgrestest.Open(t, postgrestest.Superuser(t, b.pool.Config().ConnString()))
	_, err := admin.Exec(t.Context(), `SET session_replication_role = replica; -- closed entries come by moves
		INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, stage, status, queue, kind, job_kind,
		priority, original_event, subscriber_id, fingerprint, next_retry_at,
			first_failed_at, last_failed_at, closed_at)
		SELECT dlq.uuid_of(1750000000000000 + i * 1000, i), i, now(), s.stage::dlq.dead_letter_stage,
		s.status::dlq.dead_letter_status, repeat('q', 250), 'k', 'k', 1, '{}',
			CASE WHEN i % 2 = 0 THEN 'sub_' || i / 40 END, lpad(to_hex(i / 40), 20, '0'), now(),
			now(), now(), CASE WHEN s.stage <> 'open' THEN now() END
		FROM generate_series(1, 40000) i
		JOIN (VALUES (0, 'open', 'dlq_pending'), (1, 'resolved', 'dlq_resolved'), (2, 'failed', 'dlq_failed'), (3,
		'archived', 'dlq_archived')) s (n, stage, status) ON s.n = i / 4 % 4`)
	require.NoError(t, err)
	b.exec("VACUUM ANALYZE dlq.dead_letter_queue")

	for name, look := range map[string]struct {
		filter  filter.Filter
		entries int
	}{
		"by job":        {filter.Filter{JobID: []int64{1, 5, 9, 13, 39999}}, 5},
		"by subscriber": {filter.Filter{SubscriberID: []string{"sub_7"}}, 20},
		"by group":      {filter.Filter{Fingerprint: []string{"00000000000000000007"}}, 40},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := deadletter.Page{Filter: look.filter, Limit: 50}
			found, err := b.store.Search(t.Context(), p, time.Minute)
			require.NoError(t, err)
			require.Len(t, found.Entries, look.entries)
			require.Equal(t, look.entries, b.count("SELECT count(*) FROM dlq.find($1)", look.filter.JSON()))

			chosen, err := b.store.Where(t.Context(), &p.Filter)
			require.NoError(t, err)
			parts, err := b.store.ClosedParts(t.Context())
			require.NoError(t, err)
			for _, part := range append(parts, deadletter.OpenPart()) {
				sql, args := b.store.ListSQL(t.Context(), p, chosen, part)
				b.requireFewPages(sql, args...)
			}
			b.requireFewPages("SELECT e.id FROM dlq.dead_letter_queue e WHERE "+chosen+" ORDER BY e.id DESC LIMIT 100",
				look.filter.JSON()) // the statement of dlq.find_ids
		})
	}
}

// requireFewPages checks that a statement reads only a few pages of each partition.
func (b *bundle) requireFewPages(sql string, args ...any) {
	b.Helper()
	var plan string
	var pages float64
	require.NoError(b, pgx.BeginFunc(b.Context(), b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.Context(), "SET LOCAL enable_seqscan = off; SET LOCAL jit = off"); err != nil {
			return err
		}
		if err := tx.QueryRow(b.Context(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT json) "+sql,
			args...).Scan(&plan); err != nil {
			return err
		}
		var explained []struct {
			Plan map[string]any
		}
		if err := json.Unmarshal([]byte(plan), &explained); err != nil {
			return err
		}
		pages, _ = explained[0].Plan["Shared Hit Blocks"].(float64)
		return nil
	}))
	require.Less(b, pages, 300.0, plan)
}
