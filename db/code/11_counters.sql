-- Counters: totals of moves of dead letters and of changes of circuit breakers, which never decrease. /metrics serves
-- them, with the same values in every process.

CREATE OR REPLACE FUNCTION dlq.most_counted_queues() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 100;
COMMENT ON FUNCTION dlq.most_counted_queues IS
    'The maximum number of queues with counters of their own; the others count as other.';

CREATE OR REPLACE FUNCTION dlq.most_counted_types() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 20;
COMMENT ON FUNCTION dlq.most_counted_types IS
    'The maximum number of error types of a queue with counters of their own; the others count as other. '
    'dlq.trim_counters gives them to the most frequent types of the last 7 days.';

-- count_moves adds moves to the counters: the moves between two snapshots or, if p_old is null, the moves since p_since
-- that are visible in p_new, a snapshot taken at p_at. After a restore from a dump, the counters lack the moves that
-- the dump does not contain.
CREATE OR REPLACE FUNCTION dlq.count_moves(p_old txid_snapshot, p_new txid_snapshot, p_since timestamptz,
    p_at timestamptz) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
    WITH fresh AS MATERIALIZED (
        SELECT m.at, coalesce(m.failed_at, m.at) AS failed_at, m.entry_id, m.queue, m.from_status, m.to_status,
               m.error_type, m.first_failed_at, m.actor,
               coalesce(m.error_class, 'undecided') AS class, coalesce(m.from_class, 'undecided') AS from_class,
               m.error_type IS NOT NULL OR m.from_status IS NULL AS is_failure
        FROM (SELECT * FROM dlq.moves_between(p_old, p_new, p_since) WHERE p_old IS NOT NULL
              UNION ALL
              SELECT t.* FROM dlq.dead_letter_transitions t
              WHERE p_old IS NULL AND t.at >= p_since AND (t.xid IS NULL OR txid_visible_in_snapshot(t.xid, p_new)
                  OR (t.xid >= txid_snapshot_xmax(p_new) AND t.at < p_at))) m
    ), queues AS MATERIALIZED (
        -- Names of queues come from outside, so only a limited number of queues, the first ones, have their own
        -- counters.
        SELECT k.queue, CASE WHEN k.known OR row_number() OVER (PARTITION BY k.known ORDER BY k.moves DESC,
            k.queue) <= dlq.most_counted_queues() - k.counted THEN k.queue ELSE 'other' END AS shown
        FROM (SELECT f.queue, count(*) AS moves, EXISTS (SELECT FROM dlq.counters c WHERE c.name = 'captured'
            AND c.queue = f.queue) AS known,
                     (SELECT count(DISTINCT c.queue) FROM dlq.counters c WHERE c.name = 'captured'
                         AND c.queue <> 'other') AS counted
              FROM fresh f GROUP BY f.queue) k
    ), shown AS MATERIALIZED (
        SELECT q.shown, f.* FROM fresh f JOIN queues q ON q.queue = f.queue
    ), kinds AS (
        -- A failed redelivery counts for the class with which its entry was sent, because the new
        -- error has no class yet.
        SELECT s.shown, s.class, count(*) FILTER (WHERE s.from_status IS NULL) AS captured,
               count(*) FILTER (WHERE s.from_status IS NULL) AS failures, 0 AS failed_again,
               count(*) FILTER (WHERE s.to_status = 'dlq_processing'
                   AND s.from_status IS DISTINCT FROM 'dlq_processing') AS redelivered,
               count(*) FILTER (WHERE s.from_status IN ('dlq_processing', 'dlq_returned')
                   AND s.to_status = 'dlq_resolved') AS succeeded,
               count(*) FILTER (WHERE s.to_status = 'dlq_resolved'
                   AND s.from_status IS DISTINCT FROM 'dlq_resolved') AS resolved,
               count(*) FILTER (WHERE s.to_status = 'dlq_failed'
                   AND s.from_status IS DISTINCT FROM 'dlq_failed') AS failed,
               count(*) FILTER (WHERE s.to_status = 'dlq_archived'
                   AND (dlq.is_open(s.from_status) OR s.from_status = 'dlq_returned')) AS archived,
               count(*) FILTER (WHERE s.to_status = 'dlq_manual'
                   AND s.from_status IS DISTINCT FROM 'dlq_manual') AS parked,
               count(*) FILTER (WHERE s.actor = 'sweep') AS swept
        FROM shown s GROUP BY s.shown, s.class
        UNION ALL
        SELECT s.shown, s.from_class, 0, count(*), count(*), 0, 0, 0, 0, 0, 0, 0
        FROM shown s WHERE s.is_failure AND s.from_status IS NOT NULL GROUP BY s.shown, s.from_class
    ), times AS (
        SELECT s.shown, v.name, greatest(extract(epoch FROM v.took), 0.001)::float8 AS seconds
        FROM shown s CROSS JOIN LATERAL (VALUES
            ('in_dlq', CASE WHEN dlq.is_open(s.from_status) AND NOT dlq.is_open(s.to_status)
                THEN s.at - nullif(dlq.captured_at(s.entry_id), 'epoch') END),
            ('to_recovery', CASE WHEN s.to_status = 'dlq_resolved' AND s.from_status IS DISTINCT FROM 'dlq_resolved'
                THEN s.at - s.first_failed_at END),
            ('to_retry', CASE WHEN s.to_status = 'dlq_processing' AND s.from_status IS DISTINCT FROM 'dlq_processing'
                THEN s.at - nullif(dlq.captured_at(s.entry_id), 'epoch') END),
            ('to_filing', CASE WHEN s.from_status IS NULL AND s.actor <> 'backfill'
                THEN s.at - s.failed_at END)) v (name, took)
        WHERE v.took IS NOT NULL
    ), types AS (
        SELECT t.shown, CASE WHEN t.known OR row_number() OVER (PARTITION BY t.shown, t.known
            ORDER BY t.failures DESC, t.error_type)
                                  <= dlq.most_counted_types() - (SELECT count(*) FROM dlq.counters c
                                      WHERE c.name = 'error_type' AND c.queue = t.shown AND c.label <> 'other')
                                          THEN t.error_type ELSE 'other' END AS label, t.failures
        FROM (SELECT s.shown, s.error_type, count(*) AS failures, EXISTS (SELECT FROM dlq.counters c
            WHERE c.name = 'error_type' AND c.queue = s.shown AND c.label = s.error_type) AS known
              FROM shown s WHERE s.error_type IS NOT NULL GROUP BY s.shown, s.error_type) t
    )
    INSERT INTO dlq.counters AS r (name, queue, label, value)
    SELECT a.name, a.queue, a.label, sum(a.value)
    FROM (
        SELECT v.name, k.shown AS queue, v.label, v.value::float8 AS value
        FROM kinds k CROSS JOIN LATERAL (VALUES
            ('captured', k.class, k.captured), ('failures', k.class, k.failures),
            ('redelivered', k.class, k.redelivered), ('succeeded', k.class, k.succeeded),
            ('failed_again', k.class, k.failed_again),
            ('resolved', k.class, k.resolved), ('failed', k.class, k.failed), ('archived', k.class, k.archived),
            ('parked', k.class, k.parked), ('swept', '', k.swept)) v (name, label, value)
        WHERE v.value > 0 OR v.name = 'captured'
        UNION ALL
        SELECT t.name, t.shown, ceil(8 * ln(t.seconds) / ln(2::float8) - 1e-9)::integer::text, 1 FROM times t
        UNION ALL
        SELECT t.name, t.shown, 'seconds', t.seconds FROM times t
        UNION ALL
        SELECT 'error_type', t.shown, t.label, t.failures FROM types t) a
    GROUP BY a.name, a.queue, a.label
    ON CONFLICT (name, queue, label) DO UPDATE SET value = r.value + excluded.value
$$;
COMMENT ON FUNCTION dlq.count_moves IS
    'Adds moves to the counters: those that committed between two snapshots or, if p_old is null, those since '
    'p_since that are visible in p_new.';

-- trim_counters gives the most frequent error types of each queue their own counters. A type that loses its counter
-- counts as other from then on, and a new counter begins at 0, so that no counter decreases.
CREATE OR REPLACE FUNCTION dlq.trim_counters(p_now timestamptz DEFAULT now()) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET jit = off AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0)) THEN
        RETURN; -- the rollups are being refreshed: the next hourly run trims the counters
    END IF;
    WITH top AS MATERIALIZED (
        SELECT t.queue, t.error_type FROM (
            SELECT e.queue, e.error_type, row_number() OVER (PARTITION BY e.queue ORDER BY sum(e.failures) DESC,
                e.error_type) AS rank
            FROM dlq.rollup_errors e WHERE e.step = 'day' AND e.bucket >= p_now - interval '7 days'
                AND e.error_type <> 'other' GROUP BY e.queue, e.error_type) t
        WHERE t.rank <= dlq.most_counted_types() AND EXISTS (SELECT FROM dlq.counters c WHERE c.name = 'captured'
            AND c.queue = t.queue)
    ), full_queues AS (
        SELECT c.queue FROM dlq.counters c WHERE c.name = 'error_type' AND c.label <> 'other' GROUP BY c.queue
        HAVING count(*) >= dlq.most_counted_types()
    ), deleted AS (
        DELETE FROM dlq.counters c
        WHERE c.name = 'error_type' AND c.label <> 'other' AND c.queue IN (SELECT f.queue FROM full_queues f)
            AND NOT EXISTS (SELECT FROM top t WHERE t.queue = c.queue AND t.error_type = c.label)
    )
    INSERT INTO dlq.counters (name, queue, label, value)
    SELECT 'error_type', t.queue, t.error_type, 0 FROM top t WHERE t.queue IN (SELECT f.queue FROM full_queues f)
    ON CONFLICT (name, queue, label) DO NOTHING;
    -- A queue that is no longer used makes room for another.
    IF (SELECT count(DISTINCT c.queue) FROM dlq.counters c WHERE c.name = 'captured'
        AND c.queue <> 'other') >= dlq.most_counted_queues() THEN
        DELETE FROM dlq.counters c
        WHERE c.name <> 'breaker' AND c.queue <> 'other'
          AND NOT EXISTS (SELECT FROM dlq.rollup_flow r WHERE r.step = 'day' AND r.scope = 'queue' AND r.queue = c.queue
              AND r.bucket >= p_now - interval '30 days')
          AND NOT EXISTS (SELECT FROM dlq.rollup_backlog b WHERE b.queue = c.queue
              AND b.pending + b.processing + b.manual > 0);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.trim_counters IS
    'Gives counters to the most frequent error types of the last seven days, in queues whose counters of error types '
    'are all taken. Deletes the counters of queues that were not used for 30 days, if all counters of queues are '
    'taken. Does nothing while the rollups are refreshed.';

-- needs_person reads at most about p_most manual entries and as many failed ones.
--   - Manual entries: each class of each queue gets an equal share of p_most. If a class has fewer manual entries than
--     its share, its count is exact. If it has more, the count is at least an estimate from the rollups: the manual
--     entries, minus the open entries of muted groups, minus the entries that became manual within p_after.
--   - Failed entries: they are read in the ranges of fingerprints between the muted groups of their queue, and each
--     range gets an equal share of p_most. So a large muted group does not use up the share of the other groups.
--
-- Bitmap scans are off, because they read all index entries of a class before the first row. The time is a variable,
-- because clock_timestamp() is volatile and cannot limit an index scan: the sum of parked entries would read all
-- minutes of three days.
CREATE OR REPLACE FUNCTION dlq.needs_person(p_after interval DEFAULT '15 minutes', p_queues text[] DEFAULT '{}',
    p_afters interval[] DEFAULT '{}', p_most integer DEFAULT 5000)
RETURNS TABLE (queue text, error_class text, entries bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_now constant timestamptz := clock_timestamp();
BEGIN
    PERFORM dlq.require_everything('needs_person');
    RETURN QUERY
    WITH afters AS MATERIALIZED (
        SELECT a.queue, a.after FROM unnest(p_queues, p_afters) a (queue, after)
    ), muted AS MATERIALIZED (
        SELECT m.queue, m.fingerprint, g.error_class, g.open
        FROM dlq.group_marks m
        JOIN dlq.failure_groups g ON g.queue = m.queue AND g.fingerprint = m.fingerprint
        WHERE m.muted_at IS NOT NULL AND dlq.is_muted(m, g.failures)
    ), waiting AS MATERIALIZED (
        SELECT b.queue, b.error_class, b.manual, coalesce(a.after, p_after) AS after,
               p_most / count(*) OVER () + 1 AS share
        FROM dlq.rollup_backlog b LEFT JOIN afters a ON a.queue = b.queue WHERE b.manual > 0
    ), spans AS MATERIALIZED (
        SELECT d.after, dlq.step_for(d.after) AS step,
               date_trunc(dlq.step_for(d.after)::text, v_now - d.after, 'UTC') AS since
        FROM (SELECT DISTINCT w.after FROM waiting w) d
    ), parked AS MATERIALIZED (
        SELECT p.queue, p.error_class, s.after, sum(p.parked) AS parked
        FROM spans s CROSS JOIN LATERAL (
            SELECT f.queue, f.error_class, f.parked FROM dlq.rollup_flow f
            WHERE f.step = s.step AND f.scope = 'queue_class' AND f.bucket >= s.since OFFSET 0) p
        GROUP BY 1, 2, 3
    ), manual AS (
        SELECT w.queue, w.error_class, CASE WHEN l.looked < w.share THEN l.found ELSE greatest(l.found, w.manual
            - coalesce((SELECT sum(u.open) FROM muted u WHERE u.queue = w.queue AND u.error_class = w.error_class), 0)
            - coalesce((SELECT p.parked FROM parked p WHERE p.queue = w.queue AND p.error_class = w.error_class
                          AND p.after = w.after), 0)) END AS entries
        FROM waiting w CROSS JOIN LATERAL (
            SELECT count(*) AS looked, count(*) FILTER (WHERE e.updated_at <= v_now - w.after
                AND NOT EXISTS (
                    SELECT FROM muted u WHERE u.queue = w.queue AND u.fingerprint = e.fingerprint)) AS found
            FROM ((SELECT o.updated_at, o.fingerprint FROM dlq.dead_letter_open o
                   WHERE w.error_class <> 'undecided' AND o.status = 'dlq_manual' AND o.queue = w.queue
                     AND o.error_class = w.error_class LIMIT w.share)
                  UNION ALL
                  (SELECT o.updated_at, o.fingerprint FROM dlq.dead_letter_open o
                   WHERE w.error_class = 'undecided' AND o.status = 'dlq_manual' AND o.queue = w.queue
                     AND o.error_class IS NULL LIMIT w.share)) e) l
    ), ranges AS MATERIALIZED (
        SELECT r.*, p_most / count(*) OVER () + 1 AS share FROM (
            SELECT q.queue, q.after, q.fingerprint AS above,
                   lead(q.fingerprint) OVER (PARTITION BY q.queue ORDER BY q.fingerprint) AS below
            FROM (SELECT b.queue, coalesce(a.after, p_after) AS after, f.fingerprint
                  FROM (SELECT DISTINCT k.queue FROM dlq.rollup_backlog k) b LEFT JOIN afters a ON a.queue = b.queue
                  CROSS JOIN LATERAL (
                      SELECT '' AS fingerprint
                      UNION ALL
                      SELECT u.fingerprint FROM muted u WHERE u.queue = b.queue) f) q) r
    ), failed AS (
        SELECT r.queue, coalesce(e.error_class, 'undecided') AS error_class, count(*) AS entries
        FROM ranges r CROSS JOIN LATERAL (
            (SELECT o.error_class, o.closed_at FROM dlq.dead_letter_failed o
             WHERE r.below IS NULL AND o.queue = r.queue AND o.fingerprint > r.above LIMIT r.share)
            UNION ALL
            (SELECT o.error_class, o.closed_at FROM dlq.dead_letter_failed o
             WHERE r.below IS NOT NULL AND o.queue = r.queue AND o.fingerprint > r.above AND o.fingerprint < r.below
             LIMIT r.share)
            UNION ALL
            -- An entry whose last failure was not decided has no fingerprint, and no index finds such entries. So this
            -- filters the first r.share failed entries of the queue; entries behind these are not counted.
            (SELECT o.error_class, o.closed_at
             FROM (SELECT f.error_class, f.closed_at, f.fingerprint FROM dlq.dead_letter_failed f
                   WHERE r.above = '' AND f.queue = r.queue LIMIT r.share) o
             WHERE o.fingerprint IS NULL)) e
        WHERE e.closed_at <= v_now - r.after GROUP BY 1, 2
    )
    SELECT n.queue, n.error_class, sum(n.entries)::bigint
    FROM (SELECT m.queue, m.error_class, m.entries FROM manual m
          UNION ALL
          SELECT f.queue, f.error_class, f.entries FROM failed f) n
    WHERE n.entries > 0 GROUP BY 1, 2 ORDER BY 1, 2;
END
$$;
COMMENT ON FUNCTION dlq.needs_person IS
    'The number of entries that have waited for a person (manual or failed) for longer than p_after, or than '
    'p_afters for p_queues, by queue and class, without muted groups. A change of a manual entry, such as a note, '
    'restarts its time. Reads p_most manual and p_most failed entries; beyond that, the count may be too low.';
