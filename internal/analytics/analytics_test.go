package analytics_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool  *pgxpool.Pool
	store *analytics.Store
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	return &bundle{T: t, pool: pool, store: analytics.NewStore(pool, postgres.DefaultSchemas())}
}

type execer interface {
	require.TestingT
}

func (b *bundle) exec(t execer, sql string, args ...any) {
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func (b *bundle) refresh(t execer) { require.NoError(t, b.store.Refresh(b.Context())) }

// fail creates n dead letters of a queue.
func (b *bundle) fail(t execer, n int, queue, errorType, source string, attempts int) {
	b.failAt(t, time.Now(), n, queue, errorType, source, attempts)
}

func (b *bundle) failAt(t execer, at time.Time, n int, queue, errorType, source string, attempts int) {
	b.exec(t, `INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state) SELECT 'dlqd_message',
		jsonb_build_object('messageId', gen_random_uuid(), 'kind', 'k', 'source', $3::text), $1, 5, $4, 'running'
			FROM generate_series(1, $2)`, queue, n, source, attempts)
	b.exec(t, `UPDATE river_job SET state = 'discarded', finalized_at = $2,
		errors = ARRAY[jsonb_build_object('error', $1::text || ' happened', 'attempt', attempt)],
		metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', attempt, 'type', $1::text))
			WHERE state = 'running'`, errorType, at)
	b.file(t)
}

// decide sets class, group and status of new entries, as a DLQ worker does.
func (b *bundle) decide(t execer, class, fingerprint, status string) {
	b.exec(t, `UPDATE dlq.dead_letter_queue SET status = $3::dlq.dead_letter_status, error_class = $1, fingerprint = $2,
		strategy = 'manual', move = '{"actor": "worker:1", "reason": "decided"}'
		WHERE status = 'dlq_pending' AND strategy IS NULL`, class, fingerprint, status)
}

// endRedeliveries makes the moves that dlqd makes when the jobs of current redeliveries end in the given state.
func (b *bundle) endRedeliveries(t execer, state string) {
	if state == "completed" {
		b.exec(t, `UPDATE dlq.dead_letter_queue SET status = 'dlq_resolved',
			move = '{"actor": "capture", "reason": "job completed"}' WHERE status = 'dlq_processing'`)
		return
	}
	b.exec(t, `UPDATE dlq.dead_letter_queue SET status = CASE WHEN dlq_retry_count >= dlq_max_retries THEN 'dlq_failed'
		ELSE 'dlq_pending' END::dlq.dead_letter_status,
		error_class = CASE WHEN dlq_retry_count >= dlq_max_retries THEN error_class END, fingerprint = CASE
			WHEN dlq_retry_count >= dlq_max_retries THEN fingerprint END,
		last_failed_at = clock_timestamp() - random() * interval '2 hours', strategy = NULL, next_retry_at = now(),
			move = '{"actor": "capture", "reason": "job failed"}' WHERE status = 'dlq_processing'`)
}

// file files the entries in the inbox, without a decision.
func (b *bundle) file(t execer) {
	b.exec(t, "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'))")
}

// rollups returns all rollups as text. It omits the first error of each group, which a rebuild cannot know.
func (b *bundle) rollups(t execer) []string {
	rows, err := b.pool.Query(b.Context(), `
		SELECT 'flow ' || to_jsonb(r)::text FROM dlq.rollup_flow r
		WHERE (captured, failures, attempts, redelivered, succeeded, resolved, failed, archived, parked, open_change) <> (0,
			0, 0, 0, 0, 0, 0, 0, 0, 0)
		UNION ALL SELECT 'backlog ' || to_jsonb(r)::text FROM dlq.rollup_backlog r
		WHERE (pending, processing, manual) <> (0, 0, 0)
		UNION ALL SELECT 'times ' || (to_jsonb(r) - 'seconds')::text || round(seconds::numeric, 3) FROM dlq.rollup_times r
		UNION ALL SELECT 'errors ' || to_jsonb(r)::text FROM dlq.rollup_errors r
		UNION ALL SELECT 'sources ' || to_jsonb(r)::text FROM dlq.rollup_sources r
		UNION ALL SELECT 'trend ' || to_jsonb(r)::text FROM dlq.rollup_groups r
		UNION ALL SELECT 'group ' || concat_ws(' ', queue, fingerprint, failures, open) FROM dlq.failure_groups r
		ORDER BY 1`)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

// requireConsistent compares the rollups with the entries and the audit trail.
func (b *bundle) requireConsistent(t execer) {
	for name, sql := range map[string]string{
		"backlog": `SELECT count(*) FROM (
			SELECT queue, coalesce(error_class, 'undecided'), count(*) FILTER (WHERE status = 'dlq_pending'),
				count(*) FILTER (WHERE status = 'dlq_processing'), count(*) FILTER (WHERE status = 'dlq_manual')
			FROM dlq.dead_letter_open GROUP BY 1, 2
			EXCEPT SELECT * FROM dlq.rollup_backlog) d`,
		"surplus backlog": `SELECT abs(sum(pending + processing + manual) - (SELECT count(*)
			FROM dlq.dead_letter_open))::bigint FROM dlq.rollup_backlog`,
		"open changes": `SELECT abs(sum(open_change) - (SELECT count(*) FROM dlq.dead_letter_open))::bigint
			FROM dlq.rollup_flow WHERE step = 'day' AND scope = 'queue_class'`,
		"captures": `SELECT abs(sum(captured) - (SELECT count(*) FROM dlq.dead_letter_transitions
			WHERE from_status IS NULL))::bigint FROM dlq.rollup_flow WHERE step = 'minute' AND scope = 'all'`,
		"resolved": `SELECT abs(sum(resolved) - (SELECT count(*) FROM dlq.dead_letter_queue
			WHERE status = 'dlq_resolved'))::bigint FROM dlq.rollup_flow WHERE step = 'hour' AND scope = 'class'`,
		"groups": `SELECT count(*) FROM (
			SELECT queue, fingerprint, count(*) FROM dlq.dead_letter_open WHERE fingerprint IS NOT NULL GROUP BY 1, 2
			EXCEPT SELECT queue, fingerprint, open FROM dlq.failure_groups) d`,
	} {
		var difference *int64
		require.NoError(t, b.pool.QueryRow(b.Context(), sql).Scan(&difference), name)
		if difference != nil {
			require.Zero(t, *difference, name)
		}
	}
}

// TestRollups_MatchEntriesAfterRandomMoves makes random moves of random entries, some in transactions that stay open,
// and refreshes the rollups in between. Afterwards the rollups equal counts of the entries, and a rebuild from the
// audit trail changes nothing.
func TestRollups_MatchEntriesAfterRandomMoves(t *testing.T) {
	t.Parallel()
	b := setup(t)
	queues := []string{"payments", "mails"}
	rapid.Check(t, func(rt *rapid.T) {
		var late []pgx.Tx
		defer func() {
			for _, tx := range late {
				_ = tx.Rollback(b.Context())
			}
		}()
		for range rapid.IntRange(3, 15).Draw(rt, "steps") {
			switch step := rapid.IntRange(0, 11).Draw(rt, "step"); step {
			case 0, 1:
				b.failAt(rt, time.Now().Add(
					-time.Duration(rapid.SampledFrom([]int{0, 0, 1, 70, 3000}).Draw(rt, "minutes ago"))*time.Minute),
					rapid.IntRange(1, 3).Draw(rt, "n"), rapid.SampledFrom(queues).Draw(rt, "queue"),
					rapid.SampledFrom([]string{"A", "B"}).Draw(rt, "type"), "s", 2)
			case 2:
				b.decide(rt, rapid.SampledFrom([]string{"transient", "outage"}).Draw(rt, "class"),
					rapid.SampledFrom([]string{"f1", "f2"}).Draw(rt, "fingerprint"), "dlq_manual")
			case 3:
				b.exec(rt, `SELECT dlq.replay(id) FROM dlq.dead_letter_queue
					WHERE status IN ('dlq_pending', 'dlq_manual', 'dlq_failed') AND random() < 0.5`)
			case 4:
				b.endRedeliveries(rt, "completed")
			case 5:
				b.endRedeliveries(rt, "discarded")
			case 6:
				b.exec(rt, "UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE status = 'dlq_processing'")
			case 7:
				b.exec(rt, "SELECT dlq.act_on($1, ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE random() < 0.3), 'kim')",
					rapid.SampledFrom([]string{"discard", "resolve", "park", "unpark", "note"}).Draw(rt, "action"))
			case 8: // a move and a capture in one transaction
				tx, err := b.pool.Begin(b.Context())
				require.NoError(rt, err)
				late = append(late, tx)
				_, err = tx.Exec(b.Context(), `WITH p AS (SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
					ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) SELECT dlq.resolve(id) FROM p`)
				require.NoError(rt, err)
				_, err = tx.Exec(b.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state)
					VALUES ('k', '{}', 'late', 1, 'running')`)
				require.NoError(rt, err)
				_, err = tx.Exec(b.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now()
					WHERE state = 'running' AND queue = 'late'`)
				require.NoError(rt, err)
				_, err = tx.Exec(b.Context(), `SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox'
					AND queue = 'late'))`)
				require.NoError(rt, err)
				// Commit at once. Otherwise other steps would wait for the row that the transaction has locked.
				require.NoError(rt, tx.Commit(b.Context()))
				late = late[:len(late)-1]
			case 9: // a transaction that stays open while others begin and commit
				tx, err := b.pool.Begin(b.Context())
				require.NoError(rt, err)
				late = append(late, tx)
				for _, sql := range []string{
					"INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('k', '{}', 'later', 1, 'running')",
					"UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running' AND queue = 'later'",
					"SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE stage = 'inbox' AND queue = 'later'))",
				} {
					_, err = tx.Exec(b.Context(), sql)
					require.NoError(rt, err)
				}
			case 10:
				for _, tx := range late {
					if rapid.Bool().Draw(rt, "commit") {
						require.NoError(rt, tx.Commit(b.Context()))
					} else {
						require.NoError(rt, tx.Rollback(b.Context()))
					}
				}
				late = nil
			default:
				b.refresh(rt)
			}
		}
		b.refresh(rt)
		b.requireConsistent(rt)
		before := b.rollups(rt)
		b.exec(rt, "SELECT dlq.rebuild_rollups()")
		b.requireConsistent(rt)
		require.Empty(rt, cmp.Diff(before, b.rollups(rt)))
		b.refresh(rt)
		require.Empty(rt, cmp.Diff(before, b.rollups(rt)), "a refresh after the rebuild counts nothing twice")
	})
}

// createScenario creates four failures: two resolved by a replay, one discarded, one open.
func (b *bundle) createScenario() {
	b.fail(b, 3, "payments", "TimeoutError", "shop", 5)
	b.decide(b, "transient", "f1", "dlq_manual")
	b.fail(b, 1, "mails", "ParseError", "crm", 1)
	b.decide(b, "malformed", "f2", "dlq_manual")
	b.exec(b, "SELECT dlq.replay(id, 'kim') FROM dlq.dead_letter_queue WHERE queue = 'payments' ORDER BY id LIMIT 2")
	b.endRedeliveries(b, "completed")
	b.exec(b, "SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_queue WHERE queue = 'mails'")
	b.refresh(b)
}

func TestStore_ReturnsAnalytics(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createScenario()
	day := analytics.Window{Over: 24 * time.Hour}

	flow, err := b.store.Flow(t.Context(), day, "queue", "")
	require.NoError(t, err)
	require.Len(t, flow, 2)
	require.Equal(t, "mails", flow[0].Name)
	require.Len(t, flow[1].Buckets, 25, "one bucket per hour, without gaps")
	sum := analytics.Bucket{Open: flow[1].Buckets[24].Open}
	for _, bucket := range flow[1].Buckets { // an hour may have begun since
		sum.Captured += bucket.Captured
		sum.Failures += bucket.Failures
		sum.Redelivered += bucket.Redelivered
		sum.Succeeded += bucket.Succeeded
		sum.Resolved += bucket.Resolved
		sum.Parked += bucket.Parked
	}
	require.Equal(t, analytics.Bucket{
		Captured: 3, Failures: 3, Redelivered: 2, Succeeded: 2, Resolved: 2, Parked: 3, Open: 1,
	}, sum)
	require.Zero(t, flow[1].Buckets[22].Open, "no entry was open two hours ago")
	byClass, err := b.store.Flow(t.Context(), analytics.Window{Over: time.Hour, Queue: "payments"}, "class", "")
	require.NoError(t, err)
	require.Len(t, byClass, 2, "the entries were undecided, then transient")
	require.Len(t, byClass[0].Buckets, 61, "one bucket per minute")
	require.EqualValues(t, 1, byClass[0].Buckets[60].Open)
	require.Zero(t, byClass[1].Buckets[60].Open)
	_, err = b.store.Flow(t.Context(), day, "moon", "")
	require.ErrorContains(t, err, "cannot group by moon")
	_, err = b.store.Flow(t.Context(), analytics.Window{Over: 100 * 24 * time.Hour}, "all", "minute")
	require.ErrorContains(t, err, "for buckets of one minute")

	stats, err := b.store.Stats(t.Context(), day)
	require.NoError(t, err)
	require.Len(t, stats, 3)
	require.Nil(t, stats[0].Queue)
	require.EqualValues(t, 1, stats[0].Open)
	require.EqualValues(t, 4, stats[0].Captured)
	require.InDelta(t, 0.6667, *stats[0].ResolutionRate, 1e-9, "two entries resolved, one discarded")
	require.InDelta(t, 1, *stats[0].ReplaySuccess, 1e-9)
	require.Nil(t, stats[1].ReplaySuccess, "no entry of the queue mails was replayed")

	types, err := b.store.ErrorTypes(t.Context(), day, 10)
	require.NoError(t, err)
	require.Equal(t, "TimeoutError", types[0].ErrorType)
	require.EqualValues(t, 3, types[0].Failures)
	require.InDelta(t, 0.75, *types[0].Share, 1e-9)

	groups, err := b.store.TopGroups(t.Context(), day, 1)
	require.NoError(t, err)
	require.Len(t, groups, 1)
	g := groups[0]
	require.Equal(t, "payments f1 TimeoutError happened TimeoutError transient 3 3 1",
		fmt.Sprint(g.Queue, " ", g.Fingerprint, " ", *g.Title, " ", *g.ErrorType, " ", *g.ErrorClass, " ", g.InWindow, " ",
			g.Failures, " ", g.Open))
	require.Len(t, g.Trend, 25)
	require.EqualValues(t, 3, g.Trend[23]+g.Trend[24])

	cells, err := b.store.HeatMap(t.Context(), analytics.Window{Over: 28 * 24 * time.Hour}, "Europe/Paris")
	require.NoError(t, err)
	require.Len(t, cells, 7*24)
	failures := int64(0)
	for _, c := range cells {
		failures += c.Failures
	}
	require.EqualValues(t, 4, failures)
	_, err = b.store.HeatMap(t.Context(), day, "Mars/Base")
	require.ErrorContains(t, err, "Mars/Base")

	success, err := b.store.ReplaySuccess(t.Context(), day)
	require.NoError(t, err)
	require.Len(t, success, 1)
	require.EqualValues(t, 2, success[0].Succeeded)

	sources, err := b.store.NoisiestSources(t.Context(), day, 1)
	require.NoError(t, err)
	require.Equal(t, "shop", sources[0].Source)

	cost, err := b.store.RetryCost(t.Context(), day)
	require.NoError(t, err)
	require.EqualValues(t, 15, cost[0].Attempts)
	require.InDelta(t, 5, *cost[0].AttemptsPerCapture, 1e-9)
	require.InDelta(t, 0.8824, *cost[0].Wasted, 1e-9, "15 attempts failed, 2 redeliveries succeeded")

	oldest, err := b.store.Oldest(t.Context(), 5)
	require.NoError(t, err)
	require.Len(t, oldest, 1)
	require.Equal(t, "payments", oldest[0].Queue)
}

// TestRollups_CountAtTimeOfFailure files failures of Saturday on Monday, with a decision. They count on Saturday, and
// count as open from then on. A rebuild has the same result, although the rows of the audit trail are from Monday.
func TestRollups_CountAtTimeOfFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	saturday := time.Now().Add(-49 * time.Hour)
	b.exec(t, `INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, reason, queue, kind, error_class,
		error_type, failed_at, source, attempts, joined_group)
		SELECT dlq.entry_id(i, $1), CASE WHEN i = 1 THEN 'dlq_pending' ELSE 'dlq_manual' END::dlq.dead_letter_status,
			'capture', 'job failed', 'payments', 'k', 'outage', 'T', $1, 'shop', 5, 'f1'
		FROM generate_series(1, 3) i`, saturday)
	b.refresh(t)
	before := b.rollups(t)
	flow, err := b.store.Flow(t.Context(), analytics.Window{Over: 72 * time.Hour}, "class", "hour")
	require.NoError(t, err)
	require.Len(t, flow, 1, "the entries were never undecided")
	bucket := flow[0].Buckets[len(flow[0].Buckets)-1-49]
	if bucket.Captured == 0 { // a new hour has begun since
		bucket = flow[0].Buckets[len(flow[0].Buckets)-1-50]
	}
	require.Equal(t, analytics.Bucket{Start: bucket.Start, Captured: 3, Failures: 3, Parked: 2, Open: 3}, bucket)
	require.EqualValues(t, 3, flow[0].Buckets[len(flow[0].Buckets)-1].Open)
	groups, err := b.store.TopGroups(t.Context(), analytics.Window{Over: 72 * time.Hour}, 1)
	require.NoError(t, err)
	require.EqualValues(t, 3, groups[0].Open)
	require.EqualValues(t, 3, groups[0].Failures)
	require.WithinDuration(t, saturday, groups[0].FirstSeen, time.Second)

	for range 2 { // the first rebuild begins without rollups, the second with existing ones
		b.exec(t, "SELECT dlq.rebuild_rollups()")
		b.exec(t, "UPDATE dlq.rollup_backlog SET manual = 2, pending = 1")
		require.Equal(t, flowLines(before), flowLines(b.rollups(t)))
		b.exec(t, `DELETE FROM dlq.rollup_flow; DELETE FROM dlq.rollup_errors; DELETE FROM dlq.rollup_sources; DELETE
			FROM dlq.rollup_groups`)
	}
}

// flowLines returns the lines of rollups that a rebuild computes from the audit trail alone.
func flowLines(lines []string) (flow []string) {
	for _, line := range lines {
		if !strings.HasPrefix(line, "backlog ") && !strings.HasPrefix(line, "group ") {
			flow = append(flow, line)
		}
	}
	return flow
}

// TestRollups_RefreshDespiteOpenTransaction checks that a refresh reads only moves since the last refresh, however long
// another transaction is open. The moves of that transaction are counted after it commits.
func TestRollups_RefreshDespiteOpenTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const moves = `INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, queue, kind)
		SELECT gen_random_uuid(), 'dlq_pending', 'dlq_processing', 'kim', 'q', 'k' FROM generate_series(1, $1)`
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	_, err = tx.Exec(t.Context(), moves, 7)
	require.NoError(t, err)
	b.refresh(t)
	for range 3 {
		b.exec(t, moves, 20_000)
		b.refresh(t)
	}
	b.exec(t, `SELECT brin_summarize_new_values(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
		WHERE c.relname LIKE 'dead_letter_transitions_%_xid_at_idx' AND c.relkind = 'i'`)
	// read runs a query. It returns the query's result, the number of pages of the audit trail that the query read, and
	// the number of all pages.
	read := func(query string) (found, pages, all int64) {
		var before int64
		require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
			fetched := func(n *int64) error { // pages that this session has read and not reported yet
				return tx.QueryRow(t.Context(), `SELECT sum(pg_relation_size(i.inhrelid)) / 8192,
					sum(pg_stat_get_xact_blocks_fetched(i.inhrelid))
					FROM pg_inherits i WHERE i.inhparent = 'dlq.dead_letter_transitions'::regclass`).Scan(&all, n)
			}
			if err := fetched(&before); err != nil {
				return err
			}
			if err := tx.QueryRow(t.Context(), query).Scan(&found); err != nil {
				return err
			}
			return fetched(&pages)
		}))
		return found, pages - before, all
	}
	const hasMoves = `SELECT dlq.has_moves(s.snapshot, txid_current_snapshot(), s.since)::int FROM dlq.rollup_state s`
	found, pages, all := read(hasMoves)
	require.EqualValues(t, 0, found)
	require.Less(t, pages, all/4, "the look for moves reads only pages written since the last refresh")
	b.exec(t, moves, 10)
	found, pages, all = read(`SELECT count(*) FROM dlq.rollup_state s CROSS
		JOIN LATERAL dlq.moves_between(s.snapshot, txid_current_snapshot(), s.since) m`)
	require.EqualValues(t, 10, found)
	require.Less(t, pages, all/4, "reads only pages written since the last refresh")
	found, _, _ = read(hasMoves)
	require.EqualValues(t, 1, found)
	b.refresh(t)
	require.NoError(t, tx.Commit(t.Context()))
	found, _, _ = read(hasMoves)
	require.EqualValues(t, 1, found, "the moves of the transaction that was open")
	b.refresh(t)
	stats, err := b.store.Stats(t.Context(), analytics.Window{Over: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 60_017, stats[0].Redelivered)
}

// TestTimes_ComputesPercentiles inserts a thousand known durations into the audit trail. Percentiles must be within 5
// %, and averages exact.
func TestTimes_ComputesPercentiles(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `INSERT INTO dlq.dead_letter_transitions (at, entry_id, from_status, to_status, actor, queue, kind,
		first_failed_at)
		SELECT now(), dlq.first_id(now() - i * interval '1 second'), 'dlq_manual', 'dlq_resolved', 'kim', 'q', 'k',
			now() - i * interval '2 seconds' FROM generate_series(1, 1000) i`)
	b.refresh(t)
	times, err := b.store.Times(t.Context(), analytics.Window{Over: time.Hour}, "all")
	require.NoError(t, err)
	require.Len(t, times, 2)
	for i, unit := range []float64{1, 2} {
		require.EqualValues(t, 1000, times[i].Entries)
		for want, got := range map[float64]analytics.Seconds{
			500.5: times[i].Average, 500: times[i].P50, 950: times[i].P95, 990: times[i].P99,
		} {
			require.InEpsilon(t, want*unit, float64(got), 0.05, times[i].Measure)
		}
		require.InEpsilon(t, 500.5*unit, float64(times[i].Average), 0.0001)
	}
}

// TestRollups_RebuildAfterRestore stores a snapshot from another server, as in a database restored from a dump. Its
// transaction ids are ahead of this server's.
func TestRollups_RebuildAfterRestore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createScenario()
	want := b.rollups(t)
	superuser := postgrestest.Open(t, postgrestest.Superuser(t, b.pool.Config().ConnString()))
	require.NoError(t, pgx.BeginFunc(t.Context(), superuser, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SET LOCAL session_replication_role = replica; UPDATE dlq.dead_letter_transitions "+
			"SET xid = xid + 1000000000", pgx.QueryExecModeSimpleProtocol)
		return err
	}))
	b.exec(t, "UPDATE dlq.rollup_state SET snapshot = '1000000000:1000000000:'")
	b.refresh(t)
	require.Empty(t, cmp.Diff(want, b.rollups(t)))
	b.refresh(t)
	require.Empty(t, cmp.Diff(want, b.rollups(t)))
	b.fail(t, 1, "payments", "TimeoutError", "shop", 5)
	b.refresh(t)
	b.requireConsistent(t)
}

// TestLoops_RefreshRollups lets the loop refresh the rollups.
func TestLoops_RefreshRollups(t *testing.T) {
	t.Parallel()
	b := setup(t)
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	group.Add(b.store.Loops()...)
	group.Start()
	t.Cleanup(func() { require.NoError(t, group.Stop(context.Background())) })
	b.fail(t, 2, "payments", "TimeoutError", "shop", 5)
	require.Eventually(t, func() bool {
		stats, err := b.store.Stats(t.Context(), analytics.Window{Over: time.Hour})
		return err == nil && len(stats) > 0 && stats[0].Captured == 2
	}, 5*time.Minute, 50*time.Millisecond)
}

// Applications choose the names of error types and sources, and their error texts determine failure groups. A bounded
// number of names is counted separately, and all others as "other". No count is lost.
func TestRollups_LimitNames(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const names = 12_000
	capture := func(from, to int) {
		b.exec(t, `INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, reason, queue, kind, error_class,
			error_type, failed_at, source, attempts, joined_group)
			SELECT dlq.entry_id(i, now()), 'dlq_manual', 'capture', 'job failed', 'q', 'k', 'unknown', 'T' || i, now(), 'S' || i,
				1, 'g' || i FROM generate_series($1::int, $2::int) i`, from, to)
		b.refresh(t)
	}
	capture(1, 600)
	capture(1, names)
	got := func(sql string) (n int) {
		t.Helper()
		require.NoError(t, b.pool.QueryRow(t.Context(), sql).Scan(&n))
		return n
	}
	require.Equal(t, 1001, got("SELECT count(*) FROM dlq.rollup_errors WHERE step = 'week'"))
	require.Equal(t, 1001, got("SELECT count(*) FROM dlq.rollup_sources WHERE step = 'day'"))
	require.Equal(t, 10_001, got("SELECT count(*) FROM dlq.failure_groups"))
	require.Equal(t, names+600, got("SELECT sum(failures)::int FROM dlq.rollup_errors WHERE step = 'day'"),
		"every failure is counted")
	require.Equal(t, names-1000,
		got("SELECT failures::int FROM dlq.rollup_errors WHERE step = 'day' AND error_type = 'other'"))
	require.Equal(t, names-10_000, got("SELECT open::int FROM dlq.failure_groups WHERE fingerprint = 'other'"))
	require.Equal(t, 600, got("SELECT count(*) FROM dlq.rollup_errors WHERE step = 'day' AND failures = 2"),
		"known names keep their own counts")

	// An entry that leaves a group without a row of its own is subtracted from "other".
	b.exec(t, `INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, queue, kind, error_class,
		left_group)
		SELECT dlq.entry_id(i, now()), 'dlq_manual', 'dlq_archived', 'kim', 'q', 'k', 'unknown', 'g' || i
		FROM generate_series(1, $1::int) i`, names)
	b.refresh(t)
	require.Equal(t, 600, got("SELECT sum(open)::int FROM dlq.failure_groups"),
		"the first 600 groups had two entries each")
	require.Zero(t, got("SELECT open::int FROM dlq.failure_groups WHERE fingerprint = 'other'"))
}

// A failed redelivery, like a successful one, counts for the class that its entry had when the redelivery was sent, not
// for the class of the new error. Refreshed rollups, rebuilt rollups and counters agree.
func TestReplaySuccess_CountsClassAtRedelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(b, 4, "payments", "TimeoutError", "shop", 5)
	b.decide(b, "transient", "f1", "dlq_manual")
	b.exec(b, "SELECT dlq.replay(id, 'kim') FROM dlq.dead_letter_queue WHERE queue = 'payments' ORDER BY id LIMIT 3")
	b.exec(b, `UPDATE dlq.dead_letter_queue SET status = 'dlq_resolved',
			move = '{"actor": "capture", "reason": "job completed"}'
		WHERE id = (SELECT min(id::text)::uuid FROM dlq.dead_letter_open WHERE status = 'dlq_processing')`)
	b.endRedeliveries(b, "discarded")
	b.decide(b, "validation", "f2", "dlq_manual")
	b.refresh(b)
	requireSuccess := func() {
		t.Helper()
		success, err := b.store.ReplaySuccess(t.Context(), analytics.Window{Over: 24 * time.Hour})
		require.NoError(t, err)
		require.Len(t, success, 1, "only the class at the time of the redelivery")
		of := success[0]
		require.Equal(t, "transient 3 1 2", fmt.Sprint(of.ErrorClass, " ", of.Redelivered, " ", of.Succeeded, " ", of.Failed))
		require.InDelta(t, 0.3333, *success[0].Success, 1e-9)
		var failed string
		require.NoError(t, b.pool.QueryRow(t.Context(),
			"SELECT string_agg(label || ' ' || value, ', ') FROM dlq.counters WHERE name = 'failed_again'").Scan(&failed))
		require.Equal(t, "transient 2", failed)
	}
	requireSuccess()
	b.exec(b, "SELECT dlq.rebuild_rollups()")
	requireSuccess()
}

// delayRefresh delays each refresh by the given seconds.
func (b *bundle) delayRefresh(t *testing.T, seconds float64) {
	t.Helper()
	var function string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT replace(pg_get_functiondef('dlq.has_moves'::regproc),
		E'BEGIN\n', format(E'BEGIN\n PERFORM pg_sleep(%s);\n', $1::float8))`, seconds).Scan(&function))
	b.exec(t, function)
}

// A hanging refresh is cancelled, and the next refresh may take longer. So a large backlog of moves is counted in the
// end.
func TestLoops_CancelHangingRefresh(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail(b, 3, "payments", "TimeoutError", "shop", 5)
	b.delayRefresh(t, 7) // longer than the first limit
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	loop := b.store.Loops()[0]
	group.Add(loop)
	group.Start()
	t.Cleanup(func() { _ = group.Stop(context.Background()) })
	require.Eventually(t, func() bool { return loop.Status().Errors > 0 }, 5*time.Minute, 50*time.Millisecond,
		"the first refresh is cancelled")
	require.Eventually(t, func() bool {
		var captured *int64
		require.NoError(t, b.pool.QueryRow(t.Context(),
			"SELECT sum(captured) FROM dlq.rollup_flow WHERE step = 'day' AND scope = 'all'").Scan(&captured))
		return captured != nil && *captured == 3
	}, 3*time.Minute, 50*time.Millisecond)
}

// A turn does nothing if another process is refreshing. Such turns do not shorten the pause after a slow refresh.
func TestLoops_PauseAfterSlowRefresh(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.refresh(b)
	b.delayRefresh(t, 0.5)
	other, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.Background()) }()
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0))")
	require.NoError(t, err)
	type turn struct{ began, ended time.Time }
	turns := make(chan turn, 100)
	group := &background.Group{
		Logger:  slog.New(slog.DiscardHandler),
		Observe: func(_ string, took time.Duration, _ error) { turns <- turn{time.Now().Add(-took), time.Now()} },
	}
	group.Add(b.store.Loops()[0])
	group.Start()
	t.Cleanup(func() { _ = group.Stop(context.Background()) })
	for range 3 {
		<-turns
	}
	require.NoError(t, other.Rollback(t.Context()))
	for {
		first := <-turns
		if first.ended.Sub(first.began) < 500*time.Millisecond {
			continue // this refresh began before the rollback
		}
		require.Greater(t, (<-turns).began.Sub(first.ended), 4*time.Second, "the pause is ten times the refresh")
		return
	}
}
