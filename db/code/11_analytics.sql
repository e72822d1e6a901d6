-- Analytics: rollups of the audit trail, and the reports that read them. Three reports read other
-- tables: dlq.oldest_entries and dlq.by_rule a limited number of entries, dlq.policy_changes the acts on
-- the policy.

-- moves_between finds the moves of transactions that began after the first snapshot, and of transactions that were in
-- progress in it. The rows of the trail are nearly in the order of their transaction ids, so a BRIN index finds the few
-- pages to read, no matter how long a transaction was open and how many others ran meanwhile.
CREATE OR REPLACE FUNCTION dlq.moves_between(p_old txid_snapshot, p_new txid_snapshot, p_since timestamptz)
    RETURNS SETOF dlq.dead_letter_transitions
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    -- One hour is subtracted, because a clock may have been set back.
    SELECT t.* FROM dlq.dead_letter_transitions t
    WHERE t.at >= p_since - interval '1 hour' AND t.xid >= txid_snapshot_xmax(p_old)
        AND txid_visible_in_snapshot(t.xid, p_new)
    UNION ALL
    -- OFFSET 0 forces one index probe per transaction.
    SELECT m.* FROM txid_snapshot_xip(p_old) x CROSS JOIN LATERAL (
        SELECT t.* FROM dlq.dead_letter_transitions t WHERE t.at >= p_since - interval '1 hour'
            AND t.xid = x OFFSET 0) m
    WHERE txid_visible_in_snapshot(x, p_new)
$$;
COMMENT ON FUNCTION dlq.moves_between IS
    'Moves of transactions that committed between two snapshots. p_since limits how much of the '
    'trail is read: none of these moves may have been made before it.';

-- has_moves avoids calls of dlq.fold_moves without moves. Such a call takes ten times as long as has_moves, mostly for
-- planning.
CREATE OR REPLACE FUNCTION dlq.has_moves(p_old txid_snapshot, p_new txid_snapshot, p_since timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM dlq.moves_between(p_old, p_new, p_since));
END
$$;
COMMENT ON FUNCTION dlq.has_moves IS 'Whether dlq.moves_between returns moves.';

-- After a restore from a dump, a move may have a transaction id of another server that is ahead of this server's ids.
-- Such a move counts by its time. Moves from before the column xid existed have a null xid.
CREATE OR REPLACE FUNCTION dlq.moves_of_day(p_day timestamptz, p_new txid_snapshot, p_at timestamptz)
    RETURNS SETOF dlq.dead_letter_transitions
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = on SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
    SELECT t.* FROM dlq.dead_letter_transitions t
    WHERE t.at >= p_day AND t.at < p_day + interval '1 day'
      AND (t.xid IS NULL OR txid_visible_in_snapshot(t.xid, p_new)
          OR (t.xid >= txid_snapshot_xmax(p_new) AND t.at < p_at))
$$;
COMMENT ON FUNCTION dlq.moves_of_day IS 'The moves of a day that are visible in a snapshot taken at p_at.';

CREATE OR REPLACE FUNCTION dlq.most_names() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1000;
COMMENT ON FUNCTION dlq.most_names IS
    'The number of error types per queue and week, and of sources per week, that have counts of their own; a '
    'queue has ten times as many failure groups. The rest counts as other.';

-- A title is visible to all users and outlives its entry, so it is stored masked.
CREATE OR REPLACE FUNCTION dlq.group_title(p_message text, p_original jsonb, p_edited jsonb, p_metadata jsonb,
    p_job_kind text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_mask jsonb := dlq.mask(false);
BEGIN
    RETURN left(dlq.masked_text(left(split_part(p_message, E'\n', 1), 4000), v_mask,
        dlq.sensitive_values(p_original, p_edited, p_metadata, p_job_kind, v_mask)), 200);
END
$$;
COMMENT ON FUNCTION dlq.group_title IS
    'The title of a failure group, from an entry: the first line of its error message, masked.';

-- fold_moves adds moves to the rollups: the moves between two snapshots or, if p_old is null, the moves of a day. With
-- p_old null it leaves out the backlog and the open entries of groups, because a rebuild counts these itself.
--
-- A failure counts at the time at which the job failed, no matter when it was filed: failures of a weekend without DLQ
-- workers belong to the weekend, and count as open from then on. Other moves count at the time at which they were made.
CREATE OR REPLACE FUNCTION dlq.fold_moves(p_old txid_snapshot, p_new txid_snapshot, p_since timestamptz,
    p_at timestamptz, p_from timestamptz DEFAULT '-infinity') RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_count bigint;
BEGIN
    WITH fresh AS MATERIALIZED (
        SELECT CASE WHEN m.from_status IS NULL THEN coalesce(m.failed_at, m.at) ELSE m.at END AS at,
               coalesce(m.failed_at, m.at) AS failed_at,
               m.entry_id, m.queue, m.from_status, m.to_status, m.source, m.attempts, m.error_type, m.first_failed_at,
               g.left_group, g.joined_group,
               CASE WHEN m.left_group IS NULL OR m.joined_group IS NULL OR m.error_type IS NOT NULL THEN ''
                    WHEN m.failed_at IS NOT NULL THEN 'regrouped' ELSE 'rejudged' END AS change,
               coalesce(m.error_class, 'undecided') AS to_class, coalesce(m.from_class, 'undecided') AS from_class,
               m.error_type IS NOT NULL OR m.from_status IS NULL AS is_failure
        FROM (SELECT * FROM dlq.moves_between(p_old, p_new, p_since) WHERE p_old IS NOT NULL
              UNION ALL
              SELECT * FROM dlq.moves_of_day(p_since, p_new, p_at) WHERE p_old IS NULL) m
        -- A group of an earlier method counts as the group that continues it; a move between the
        -- two is ignored.
        LEFT JOIN dlq.group_aliases l ON l.main AND l.queue = m.queue AND l.former = m.left_group
        LEFT JOIN dlq.group_aliases j ON j.main AND j.queue = m.queue AND j.former = m.joined_group
        CROSS JOIN LATERAL (
            SELECT coalesce(l.fingerprint, m.left_group) AS left_group,
                   coalesce(j.fingerprint, m.joined_group) AS joined_group) n
        CROSS JOIN LATERAL (
            SELECT CASE WHEN n.left_group IS DISTINCT FROM n.joined_group THEN n.left_group END AS left_group,
                   CASE WHEN n.left_group IS DISTINCT FROM n.joined_group THEN n.joined_group END AS joined_group) g
    ), minutes AS MATERIALIZED (
        -- A move makes up to three rows, which differ in sign:
        --    1: the move, for the class that the entry has after it
        --   -1: the entry leaves the class that it had before
        --    0: a failure, in the minute in which the job failed. A failed redelivery counts for the class that its
        --       entry had when it was sent, because the new error has no class yet.
        SELECT date_trunc('minute', c.at) AS minute, f.queue, c.class,
               count(*) FILTER (WHERE c.sign = 0 AND f.from_status IS NULL) AS captured,
               count(*) FILTER (WHERE c.sign = 0) AS failures,
               coalesce(sum(f.attempts) FILTER (WHERE c.sign = 0), 0)::bigint AS attempts,
               count(*) FILTER (WHERE c.sign = 1 AND f.to_status = 'dlq_processing'
                   AND f.from_status IS DISTINCT FROM 'dlq_processing') AS redelivered,
               count(*) FILTER (WHERE c.sign = 1 AND f.from_status IN ('dlq_processing', 'dlq_returned')
                   AND f.to_status = 'dlq_resolved') AS succeeded,
               count(*) FILTER (WHERE c.sign = 1 AND f.to_status = 'dlq_resolved'
                   AND f.from_status IS DISTINCT FROM 'dlq_resolved') AS resolved,
               count(*) FILTER (WHERE c.sign = 1 AND f.to_status = 'dlq_failed'
                   AND f.from_status IS DISTINCT FROM 'dlq_failed') AS failed,
               -- Entries that are archived from dlq_failed do not count: they count as failed
               -- already.
               count(*) FILTER (WHERE c.sign = 1 AND f.to_status = 'dlq_archived'
                   AND (dlq.is_open(f.from_status) OR f.from_status = 'dlq_returned')) AS archived,
               count(*) FILTER (WHERE c.sign = 1 AND f.to_status = 'dlq_manual'
                   AND f.from_status IS DISTINCT FROM 'dlq_manual') AS parked,
               coalesce(sum(c.sign) FILTER (WHERE c.status IN ('dlq_pending', 'dlq_processing', 'dlq_manual')),
                   0)::bigint AS open_change,
               coalesce(sum(c.sign) FILTER (WHERE c.status = 'dlq_pending'), 0)::bigint AS pending,
               coalesce(sum(c.sign) FILTER (WHERE c.status = 'dlq_processing'), 0)::bigint AS processing,
               coalesce(sum(c.sign) FILTER (WHERE c.status = 'dlq_manual'), 0)::bigint AS manual
        FROM fresh f
        CROSS JOIN LATERAL (VALUES (f.at, f.to_class, 1, f.to_status), (f.at, f.from_class, -1, f.from_status),
                                   (f.failed_at, CASE WHEN f.from_status IS NULL THEN f.to_class ELSE f.from_class END,
                                    0,
                                    CASE WHEN f.is_failure THEN f.to_status END)) c (at, class, sign, status)
        WHERE c.status IS NOT NULL AND c.at >= p_from
        GROUP BY 1, 2, 3
    ), flow AS (
        INSERT INTO dlq.rollup_flow AS r (step, scope, bucket, queue, error_class, captured, failures, attempts,
            redelivered, succeeded, resolved, failed, archived, parked, open_change)
        SELECT s.step, (ARRAY['queue_class', 'queue', 'class', 'all'])[1 + grouping(m.queue, m.class)], b.bucket,
               coalesce(m.queue, ''), coalesce(m.class, ''),
               sum(m.captured), sum(m.failures), sum(m.attempts), sum(m.redelivered), sum(m.succeeded), sum(m.resolved),
               sum(m.failed), sum(m.archived), sum(m.parked), sum(m.open_change)
        FROM minutes m
        CROSS JOIN unnest(enum_range(NULL::dlq.rollup_step)) s (step)
        CROSS JOIN LATERAL (SELECT date_trunc(s.step::text, m.minute) AS bucket) b
        WHERE s.step <> 'minute' OR m.minute > p_at - interval '3 days'
        GROUP BY s.step, b.bucket, GROUPING SETS ((m.queue, m.class), (m.queue), (m.class), ())
        ON CONFLICT (step, scope, bucket, queue, error_class) DO UPDATE SET
            captured = r.captured + excluded.captured, failures = r.failures + excluded.failures,
            attempts = r.attempts + excluded.attempts,
            redelivered = r.redelivered + excluded.redelivered, succeeded = r.succeeded + excluded.succeeded,
            resolved = r.resolved + excluded.resolved,
            failed = r.failed + excluded.failed, archived = r.archived + excluded.archived,
            parked = r.parked + excluded.parked,
            open_change = r.open_change + excluded.open_change
    ), backlog AS (
        INSERT INTO dlq.rollup_backlog AS r (queue, error_class, pending, processing, manual)
        SELECT m.queue, m.class, sum(m.pending), sum(m.processing), sum(m.manual) FROM minutes m WHERE p_old IS NOT NULL
        GROUP BY m.queue, m.class HAVING bool_or(m.pending <> 0 OR m.processing <> 0 OR m.manual <> 0)
        ON CONFLICT (queue, error_class) DO UPDATE SET
            pending = r.pending + excluded.pending, processing = r.processing + excluded.processing,
            manual = r.manual + excluded.manual
    ), times AS (
        INSERT INTO dlq.rollup_times AS r (step, measure, scope, bucket, queue, bin, entries, seconds)
        SELECT s.step, d.measure, CASE grouping(d.queue) WHEN 0 THEN 'queue' ELSE 'all' END,
            date_trunc(s.step::text, d.at), coalesce(d.queue, ''), d.bin, count(*), sum(d.seconds)
        FROM (
            SELECT f.at, f.queue, t.measure, t.seconds, ceil(ln(t.seconds) / ln(1.1))::smallint AS bin
            FROM fresh f CROSS JOIN LATERAL (VALUES
                ('in_dlq', CASE WHEN dlq.is_open(f.from_status) AND NOT dlq.is_open(f.to_status)
                    THEN nullif(dlq.captured_at(f.entry_id), 'epoch') END),
                ('to_recovery', CASE WHEN f.to_status = 'dlq_resolved' THEN f.first_failed_at END)) v (measure, began)
            CROSS JOIN LATERAL (SELECT v.measure,
                greatest(extract(epoch FROM f.at - v.began), 0.001)::float8 AS seconds) t
            WHERE v.began IS NOT NULL AND f.at >= p_from) d
        CROSS JOIN (VALUES ('hour'::dlq.rollup_step), ('day'), ('week')) s (step)
        GROUP BY s.step, d.measure, date_trunc(s.step::text, d.at), d.bin, GROUPING SETS ((d.queue), ())
        ON CONFLICT (step, measure, scope, bucket, queue, bin) DO UPDATE SET entries = r.entries + excluded.entries,
        seconds = r.seconds + excluded.seconds
    ), counted AS MATERIALIZED (
        SELECT 'error' AS of, f.queue, date_trunc('week', f.failed_at) AS week, f.error_type AS name, count(*) AS times
        FROM fresh f WHERE f.error_type IS NOT NULL GROUP BY 2, 3, 4
        UNION ALL
        SELECT 'source', '', date_trunc('week', f.at), f.source, count(*) FROM fresh f WHERE f.from_status IS NULL
            AND f.source IS NOT NULL GROUP BY 3, 4
        UNION ALL
        SELECT 'group', f.queue, '-infinity', f.joined_group, count(*) FROM fresh f WHERE f.joined_group IS NOT NULL
        GROUP BY 2, 4
    ), room AS MATERIALIZED (
        SELECT d.of, d.queue, d.week, CASE d.of
            WHEN 'error' THEN dlq.most_names() - (SELECT count(*)
                FROM (SELECT FROM dlq.rollup_errors k WHERE k.step = 'week' AND k.bucket = d.week AND k.queue = d.queue
                    LIMIT dlq.most_names()) l)
            WHEN 'source' THEN dlq.most_names() - (SELECT count(*)
                FROM (SELECT FROM dlq.rollup_sources k WHERE k.step = 'week' AND k.bucket = d.week
                    LIMIT dlq.most_names()) l)
            ELSE 10 * dlq.most_names() - (
                SELECT count(*) FROM (
                    SELECT FROM dlq.failure_groups k
                    WHERE k.queue = d.queue AND NOT EXISTS (
                        SELECT FROM dlq.group_aliases a WHERE a.queue = k.queue AND a.former = k.fingerprint)
                    LIMIT 10 * dlq.most_names()) l) END AS room
        FROM (SELECT DISTINCT c.of, c.queue, c.week FROM counted c) d
    ), names AS MATERIALIZED (
        -- Names come from outside, so their number is limited: error types per queue and week,
        -- sources per week, fingerprints per queue. The rest counts as other.
        SELECT n.of, n.queue, n.week, n.name
        FROM (
            SELECT k.*, row_number() OVER (PARTITION BY k.of, k.queue, k.week, k.known ORDER BY k.times DESC,
                k.name) AS rank
            FROM (
                SELECT c.*, CASE c.of
                           WHEN 'error' THEN EXISTS (SELECT FROM dlq.rollup_errors e WHERE e.step = 'week'
                               AND e.bucket = c.week AND e.queue = c.queue AND e.error_type = c.name)
                           WHEN 'source' THEN EXISTS (SELECT FROM dlq.rollup_sources e WHERE e.step = 'week'
                               AND e.bucket = c.week AND e.source = c.name)
                           ELSE EXISTS (SELECT FROM dlq.failure_groups e WHERE e.queue = c.queue
                               AND e.fingerprint = c.name) END AS known
                FROM counted c) k) n
        WHERE n.known OR n.rank <= (
            SELECT r.room FROM room r WHERE r.of = n.of AND r.queue = n.queue AND r.week = n.week)
    ), errors AS (
        INSERT INTO dlq.rollup_errors AS r (step, bucket, queue, error_type, failures)
        SELECT s.step, date_trunc(s.step::text, f.failed_at), f.queue,
            CASE WHEN (f.queue, date_trunc('week', f.failed_at), f.error_type) IN (SELECT n.queue, n.week, n.name
                FROM names n WHERE n.of = 'error') THEN f.error_type ELSE 'other' END, count(*)
        FROM fresh f CROSS JOIN (VALUES ('hour'::dlq.rollup_step), ('day'), ('week')) s (step)
        WHERE f.error_type IS NOT NULL AND f.failed_at >= p_from
        GROUP BY 1, 2, 3, 4
        ON CONFLICT (step, bucket, queue, error_type) DO UPDATE SET failures = r.failures + excluded.failures
    ), sources AS (
        INSERT INTO dlq.rollup_sources AS r (step, bucket, source, captured)
        SELECT s.step, date_trunc(s.step::text, f.at),
            CASE WHEN (date_trunc('week', f.at), f.source) IN (SELECT n.week, n.name FROM names n WHERE n.of = 'source')
                THEN f.source ELSE 'other' END, count(*)
        FROM fresh f CROSS JOIN (VALUES ('hour'::dlq.rollup_step), ('day'), ('week')) s (step)
        WHERE f.from_status IS NULL AND f.source IS NOT NULL AND f.at >= p_from
        GROUP BY 1, 2, 3
        ON CONFLICT (step, bucket, source) DO UPDATE SET captured = r.captured + excluded.captured
    ), members AS MATERIALIZED (
        -- How an entry changes the counts of failure groups:
        --   - It joins a group when a worker decides it, usually at filing.
        --   - When its redeliveries are used up, it leaves the group with a last failure, because it is not decided
        --     again.
        --   - If it is replayed or reopened after that, it joins the group again without a failure.
        --   - If dlq.regroup moves it to a group that does not continue its former one, its last failure counts in
        --     the new group, at the time of the failure. The former group keeps that failure, too.
        --   - If it is decided again without a further failure, it changes its group without a failure.
        SELECT f.queue,
               CASE WHEN (f.queue, f.joined_group) IN (SELECT n.queue, n.name FROM names n WHERE n.of = 'group')
                    THEN f.joined_group ELSE 'other' END AS fingerprint,
               CASE f.change WHEN 'regrouped' THEN f.failed_at ELSE f.at END AS at,
               f.entry_id, f.to_class, 1 AS change,
               (f.change <> 'rejudged' AND coalesce(dlq.is_open(f.from_status), true))::integer AS failures
        FROM fresh f WHERE f.joined_group IS NOT NULL
        UNION ALL
        SELECT f.queue, CASE WHEN (f.queue, f.left_group) IN (SELECT n.queue, n.name FROM names n WHERE n.of = 'group')
            OR EXISTS (SELECT FROM dlq.failure_groups k WHERE k.queue = f.queue AND k.fingerprint = f.left_group)
                THEN f.left_group ELSE 'other' END, f.failed_at, f.entry_id, f.to_class, -1,
                (f.is_failure AND f.to_status = 'dlq_failed')::integer
        FROM fresh f WHERE f.left_group IS NOT NULL
    ), groups AS (
        INSERT INTO dlq.failure_groups AS r (queue, fingerprint, title, error_type, error_class, first_seen, last_seen,
            failures, open, sample)
        SELECT g.queue, g.fingerprint, CASE g.fingerprint WHEN 'other' THEN 'others: this queue has too many groups'
            ELSE e.title END, e.error_type, g.class, g.first_seen, g.last_seen, g.failures, g.change, g.sample
        FROM (
            SELECT m.queue, m.fingerprint, sum(m.failures) AS failures,
                   CASE WHEN p_old IS NULL THEN 0 ELSE sum(m.change) END AS change,
                   -- Failures set last_seen; the closing of an entry does not.
                   min(m.at) AS first_seen, coalesce(max(m.at) FILTER (WHERE m.failures > 0), max(m.at)) AS last_seen,
                   (array_agg(m.entry_id ORDER BY m.at DESC))[1] AS sample,
                   (array_agg(m.to_class ORDER BY m.at DESC))[1] AS class
            FROM members m GROUP BY m.queue, m.fingerprint) g
        LEFT JOIN LATERAL (
            -- Only for new groups an entry is looked up, because the lookup reads every partition.
            SELECT dlq.group_title(e.error_message, e.original_event, e.edited_event, e.metadata, e.job_kind) AS title,
                e.error_type
            FROM dlq.dead_letter_queue e
            WHERE e.id = g.sample AND NOT EXISTS (SELECT FROM dlq.failure_groups k WHERE k.queue = g.queue
                AND k.fingerprint = g.fingerprint)
            LIMIT 1) e ON true
        ON CONFLICT (queue, fingerprint) DO UPDATE SET
            failures = r.failures + excluded.failures, open = r.open + excluded.open,
            error_class = CASE WHEN excluded.failures > 0 THEN excluded.error_class ELSE r.error_class END,
            sample = CASE WHEN excluded.failures > 0 THEN excluded.sample ELSE r.sample END,
            first_seen = least(r.first_seen, excluded.first_seen),
            last_seen = CASE WHEN excluded.failures > 0 THEN greatest(r.last_seen, excluded.last_seen)
                ELSE r.last_seen END
    ), trend AS (
        INSERT INTO dlq.rollup_groups AS r (step, bucket, queue, fingerprint, failures)
        SELECT s.step, date_trunc(s.step::text, m.at), m.queue, m.fingerprint, sum(m.failures)
        FROM members m CROSS JOIN unnest(enum_range(NULL::dlq.rollup_step)) s (step)
        WHERE m.failures > 0 AND m.at >= p_from AND (s.step <> 'minute' OR m.at > p_at - interval '7 hours')
        GROUP BY 1, 2, 3, 4
        ON CONFLICT (step, bucket, queue, fingerprint) DO UPDATE SET failures = r.failures + excluded.failures
    )
    SELECT count(*) INTO v_count FROM fresh;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.fold_moves IS
    'Adds moves to the rollups: those that committed between two snapshots or, if p_old is null, those of the '
    'day that begins at p_since. Buckets before p_from are not changed.';

-- count_aliases adds the counts of former groups to the groups that continue them. The row of the
-- former group remains, for its marks; lists leave it out. Only refreshes and rebuilds call it:
-- they hold the lock of the rollups.
CREATE OR REPLACE FUNCTION dlq.count_aliases() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.group_aliases a WHERE a.counted_at IS NULL) THEN
        RETURN;
    END IF;
    WITH fresh AS MATERIALIZED (
        SELECT a.queue, a.former, a.fingerprint, a.main, a.entry_id, a.title
        FROM dlq.group_aliases a WHERE a.counted_at IS NULL FOR UPDATE
    ), marked AS (
        UPDATE dlq.group_aliases a SET counted_at = clock_timestamp(), title = NULL
        FROM fresh f WHERE a.queue = f.queue AND a.former = f.former AND a.fingerprint = f.fingerprint
    ), former_groups AS MATERIALIZED (
        SELECT f.main, f.fingerprint AS present, f.entry_id, f.title AS new_title, g.*
        FROM fresh f JOIN dlq.failure_groups g ON g.queue = f.queue AND g.fingerprint = f.former
    ), groups AS (
        INSERT INTO dlq.failure_groups AS r
            (queue, fingerprint, title, error_type, error_class, first_seen, last_seen, failures, open, sample)
        SELECT h.queue, h.present,
               (array_agg(coalesce(nullif(h.new_title, ''), h.title) ORDER BY h.main DESC, h.last_seen DESC))[1],
               (array_agg(coalesce(e.error_type, h.error_type) ORDER BY h.main DESC, h.last_seen DESC))[1],
               (array_agg(h.error_class ORDER BY h.main DESC, h.last_seen DESC))[1],
               min(h.first_seen),
               max(CASE WHEN h.main THEN h.last_seen ELSE coalesce(e.last_failed_at, h.first_seen) END),
               sum(CASE WHEN h.main THEN h.failures ELSE 0 END), sum(CASE WHEN h.main THEN h.open ELSE 0 END),
               (array_agg(coalesce(h.entry_id, h.sample) ORDER BY h.main DESC, h.last_seen DESC))[1]
        FROM former_groups h
        LEFT JOIN LATERAL (
            SELECT e.error_type, e.last_failed_at
            FROM dlq.dead_letter_queue e
            WHERE e.id = h.entry_id AND NOT EXISTS (
                SELECT FROM dlq.failure_groups k WHERE k.queue = h.queue AND k.fingerprint = h.present)
            LIMIT 1) e ON true
        GROUP BY h.queue, h.present
        ON CONFLICT (queue, fingerprint) DO UPDATE SET
            failures = r.failures + excluded.failures, open = r.open + excluded.open,
            first_seen = least(r.first_seen, excluded.first_seen), last_seen = greatest(r.last_seen, excluded.last_seen)
    ), emptied AS (
        UPDATE dlq.failure_groups g SET open = 0
        FROM former_groups h WHERE h.main AND g.queue = h.queue AND g.fingerprint = h.fingerprint
    ), trend AS (
        DELETE FROM dlq.rollup_groups r USING former_groups h WHERE h.main AND r.queue = h.queue
            AND r.fingerprint = h.fingerprint
        RETURNING r.step, r.bucket, r.queue, h.present, r.failures
    )
    INSERT INTO dlq.rollup_groups AS r (step, bucket, queue, fingerprint, failures)
    SELECT t.step, t.bucket, t.queue, t.present, sum(t.failures) FROM trend t GROUP BY 1, 2, 3, 4
    ON CONFLICT (step, bucket, queue, fingerprint) DO UPDATE SET failures = r.failures + excluded.failures;
END
$$;
COMMENT ON FUNCTION dlq.count_aliases IS
    'Adds the counts, the trend and the times of groups of an earlier grouping method to the groups that their '
    'errors are in now (dlq.group_aliases).';

-- If a refresh waits 5 seconds for a lock, it fails, so that it does not block the next refresh; dlqd tries again a
-- second later.
CREATE OR REPLACE FUNCTION dlq.refresh_rollups() RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '5s'
SET enable_seqscan = off SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_state dlq.rollup_state;
    v_new   txid_snapshot;
    v_at    timestamptz;
    v_count bigint;
BEGIN
    -- One session of all dlqd processes refreshes the rollups at a time.
    IF NOT pg_try_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0)) THEN
        RETURN NULL;
    END IF;
    SELECT * INTO v_state FROM dlq.rollup_state;
    SELECT txid_current_snapshot(), clock_timestamp() INTO v_new, v_at;
    -- The stored snapshot is ahead of this server's transaction ids: the database was restored from a dump into another
    -- server.
    IF v_state IS NULL OR txid_snapshot_xmax(v_state.snapshot) > txid_snapshot_xmax(v_new) THEN
        RETURN dlq.rebuild_rollups();
    END IF;
    PERFORM dlq.count_aliases();
    v_count := 0;
    IF dlq.has_moves(v_state.snapshot, v_new, v_state.since) THEN
        v_count := dlq.fold_moves(v_state.snapshot, v_new, v_state.since, v_at);
        PERFORM dlq.count_moves(v_state.snapshot, v_new, v_state.since, v_at);
    END IF;
    -- Without moves, write the state only every 10 seconds.
    IF v_count > 0 OR v_at > v_state.at + interval '10 seconds' THEN
        UPDATE dlq.rollup_state SET
            snapshot = v_new, at = v_at, moves = moves + v_count,
            -- If all transactions that ran at the last snapshot have ended, later moves come from transactions that
            -- began after that snapshot.
            since = CASE WHEN txid_snapshot_xmin(v_new) >= txid_snapshot_xmax(v_state.snapshot) THEN v_state.at
                ELSE v_state.since END;
    END IF;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.refresh_rollups IS
    'Updates the rollups. dlqd calls it about every second. Returns how many moves it counted; null if another '
    'process is refreshing.';

CREATE OR REPLACE FUNCTION dlq.rebuild_rollups() RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = on SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_new   txid_snapshot;
    v_at    timestamptz := clock_timestamp();
    v_day   timestamptz;
    v_first timestamptz;
    v_from  timestamptz := '-infinity';
    v_count bigint := 0;
    v_state dlq.rollup_state;
BEGIN
    PERFORM dlq.require_everything('rollups');
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0));
    -- Readers see the old rollups until this transaction commits. Rollups of days before the first move of the trail
    -- are kept.
    PERFORM dlq.count_aliases();
    DELETE FROM dlq.rollup_backlog;
    -- This is one statement, so that one snapshot shows both the open entries and the moves that led to them.
    WITH backlog AS (
        INSERT INTO dlq.rollup_backlog (queue, error_class, pending, processing, manual)
        SELECT e.queue, coalesce(e.error_class, 'undecided'), count(*) FILTER (WHERE e.status = 'dlq_pending'),
            count(*) FILTER (WHERE e.status = 'dlq_processing'), count(*) FILTER (WHERE e.status = 'dlq_manual')
        FROM dlq.dead_letter_open e GROUP BY 1, 2
    ), groups AS (
        INSERT INTO dlq.failure_groups AS r (queue, fingerprint, first_seen, last_seen, failures, open, sample, title,
            error_type, error_class)
        SELECT e.queue, e.fingerprint, min(e.created_at), max(e.last_failed_at), 0, count(*),
               (array_agg(e.id ORDER BY e.id DESC))[1],
               (SELECT dlq.group_title(o.error_message, o.original_event, o.edited_event, o.metadata, o.job_kind)
                   FROM dlq.dead_letter_open o WHERE o.id = (array_agg(e.id ORDER BY e.id))[1]),
                       (array_agg(e.error_type ORDER BY e.id))[1], (array_agg(e.error_class ORDER BY e.id DESC))[1]
        FROM (SELECT o.id, o.queue, o.created_at, o.last_failed_at, o.error_type, o.error_class,
                     CASE WHEN dense_rank() OVER (PARTITION BY o.queue ORDER BY c.fingerprint) <= 10 * dlq.most_names()
                               OR EXISTS (SELECT FROM dlq.failure_groups k
                                          WHERE k.queue = o.queue AND k.fingerprint = c.fingerprint)
                          THEN c.fingerprint ELSE 'other' END AS fingerprint
              FROM dlq.dead_letter_open o
              LEFT JOIN dlq.group_aliases a
                     ON a.main AND a.counted_at IS NOT NULL AND a.queue = o.queue AND a.former = o.fingerprint
              CROSS JOIN LATERAL (SELECT coalesce(a.fingerprint, o.fingerprint) AS fingerprint) c
              WHERE o.fingerprint IS NOT NULL) e GROUP BY e.queue, e.fingerprint
        ON CONFLICT (queue, fingerprint) DO UPDATE SET open = excluded.open
    ), closed AS (
        UPDATE dlq.failure_groups r SET open = 0
        WHERE r.fingerprint <> 'other' AND NOT EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.queue = r.queue
            AND e.fingerprint = r.fingerprint)
          AND NOT EXISTS (
              SELECT FROM dlq.group_aliases a
              JOIN dlq.dead_letter_open e ON e.queue = a.queue AND e.fingerprint = a.former
              WHERE a.main AND a.counted_at IS NOT NULL AND a.queue = r.queue AND a.fingerprint = r.fingerprint)
    )
    SELECT txid_current_snapshot(), clock_timestamp() INTO v_new, v_at;

    -- Counters are not rebuilt; they continue from their values.
    SELECT * INTO v_state FROM dlq.rollup_state;
    IF v_state IS NULL OR txid_snapshot_xmax(v_state.snapshot) > txid_snapshot_xmax(v_new) THEN
        PERFORM dlq.count_moves(NULL, v_new, coalesce(v_state.at, '-infinity'), v_at);
    ELSE
        PERFORM dlq.count_moves(v_state.snapshot, v_new, v_state.since, v_at);
    END IF;

    SELECT date_trunc('day', min(t.at)) INTO v_day FROM dlq.dead_letter_transitions t;
    v_first := date_trunc('week', v_day);
    -- Keep the rollups of the first week if the trail no longer has all moves of that week. Failures from before the
    -- first move do not show that moves are missing: a failure counts at the time of the failure, which may be long
    -- before it was filed.
    IF EXISTS (SELECT FROM dlq.rollup_flow r WHERE r.step = 'day' AND r.scope = 'all' AND r.bucket < v_day
               AND (r.redelivered, r.resolved, r.failed, r.archived) <> (0, 0, 0, 0)) THEN
        v_first := v_first + interval '7 days';
    END IF;
    IF EXISTS (SELECT FROM dlq.rollup_flow r WHERE r.step = 'day' AND r.bucket < v_first) THEN
        v_from := v_first;
    END IF;
    DELETE FROM dlq.rollup_flow    WHERE bucket >= v_first;
    DELETE FROM dlq.rollup_times   WHERE bucket >= v_first;
    DELETE FROM dlq.rollup_errors  WHERE bucket >= v_first;
    DELETE FROM dlq.rollup_sources WHERE bucket >= v_first;
    DELETE FROM dlq.rollup_groups  WHERE bucket >= v_first;
    FOR v_day IN SELECT generate_series(v_first, v_at, interval '1 day') LOOP
        v_count := v_count + dlq.fold_moves(NULL, v_new, v_day, v_at, v_from);
    END LOOP;
    UPDATE dlq.failure_groups r SET failures = coalesce((
        SELECT sum(g.failures) FROM dlq.rollup_groups g WHERE g.queue = r.queue AND g.fingerprint = r.fingerprint
            AND g.step = 'day'), 0);

    INSERT INTO dlq.rollup_state AS s (snapshot, at, since, rebuilt_at, moves)
    VALUES (v_new, v_at, '-infinity', v_at, v_count)
    ON CONFLICT (one) DO UPDATE SET snapshot = excluded.snapshot, at = excluded.at, since = excluded.since,
    rebuilt_at = excluded.rebuilt_at, moves = excluded.moves;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.rebuild_rollups IS
    'Rebuilds the rollups from the audit trail, as far back as it reaches; older rollups are kept. Returns how '
    'many moves it counted. Takes minutes for many millions of moves; only refreshes wait for it.';

CREATE OR REPLACE FUNCTION dlq.trim_rollups(p_now timestamptz DEFAULT now()) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM dlq.rollup_flow    WHERE step = 'minute' AND bucket < p_now - interval '3 days';
    DELETE FROM dlq.rollup_flow    WHERE step = 'hour' AND bucket < p_now - interval '400 days';
    DELETE FROM dlq.rollup_times   WHERE step = 'hour' AND bucket < p_now - interval '400 days';
    -- Rollups with names from outside (error types, sources, fingerprints) are kept for a shorter time, because there
    -- may be a million such names.
    DELETE FROM dlq.rollup_errors  WHERE bucket < p_now - CASE step WHEN 'week' THEN interval '1100 days'
        WHEN 'day' THEN interval '400 days' ELSE interval '35 days' END;
    DELETE FROM dlq.rollup_sources WHERE bucket < p_now - CASE step WHEN 'week' THEN interval '1100 days'
        WHEN 'day' THEN interval '400 days' ELSE interval '35 days' END;
    DELETE FROM dlq.rollup_groups  WHERE bucket < p_now - CASE step WHEN 'week' THEN interval '1100 days'
        WHEN 'day' THEN interval '400 days' WHEN 'hour' THEN interval '35 days' ELSE interval '7 hours' END;
    DELETE FROM dlq.failure_groups WHERE open <= 0 AND last_seen < p_now - interval '400 days';
    DELETE FROM dlq.group_aliases a
    WHERE a.counted_at IS NOT NULL AND NOT EXISTS (
        SELECT FROM dlq.failure_groups g WHERE g.queue = a.queue AND g.fingerprint = a.fingerprint);
    DELETE FROM dlq.group_marks m
    WHERE NOT EXISTS (SELECT FROM dlq.failure_groups g WHERE g.queue = m.queue AND g.fingerprint = m.fingerprint)
      AND NOT EXISTS (SELECT FROM dlq.group_aliases a WHERE a.queue = m.queue AND a.fingerprint = m.fingerprint);
$$;
COMMENT ON FUNCTION dlq.trim_rollups IS
    'Deletes rollups by age: minutes after three days, hours after 400; days and weeks stay. Of error types, '
    'sources and failure groups, hours are deleted after 35 days, days after 400, weeks after 1,100, and groups '
    'without open entries after 400 days. Minutes of failure groups are deleted after seven hours.';

-- A window ends now and consists of whole buckets: the bucket in which it begins counts in full.

CREATE OR REPLACE FUNCTION dlq.step_for(p_over interval) RETURNS dlq.rollup_step
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_over <= interval '3 hours' THEN 'minute' WHEN p_over <= interval '3 days' THEN 'hour'
    ELSE 'day' END::dlq.rollup_step;
COMMENT ON FUNCTION dlq.step_for IS
    'The bucket size of a chart: minutes for windows of up to three hours, hours up to three days, else days.';

-- Queries that sum up many rows need no finer buckets than these.
CREATE OR REPLACE FUNCTION dlq.coarse_step(p_over interval) RETURNS dlq.rollup_step
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_over <= interval '24 hours' THEN 'hour' WHEN p_over <= interval '35 days' THEN 'day'
    ELSE 'week' END::dlq.rollup_step;
COMMENT ON FUNCTION dlq.coarse_step IS
    'The bucket size of a sum: hours for windows of up to a day, days up to 35, else weeks.';

CREATE OR REPLACE FUNCTION dlq.trend_step(p_over interval) RETURNS dlq.rollup_step
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_over <= interval '6 hours' THEN 'minute' ELSE dlq.coarse_step(p_over) END;
COMMENT ON FUNCTION dlq.trend_step IS
    'The bucket size from which the trend of a failure group is made: minutes for windows of up to six hours, hours '
    'up to a day, days up to 35, else weeks.';

CREATE OR REPLACE FUNCTION dlq.trend_width(p_over interval) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_over > interval '1 hour' AND p_over <= interval '6 hours' THEN interval '5 minutes'
    ELSE ('1 ' || dlq.trend_step(p_over))::interval END;
COMMENT ON FUNCTION dlq.trend_width IS
    'The time that one number of the trend of a failure group covers: a minute for windows of up to an hour, five '
    'minutes up to six hours, else dlq.trend_step.';

CREATE OR REPLACE FUNCTION dlq.trend_start(p_over interval) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC'
RETURN CASE dlq.trend_step(p_over)
    WHEN 'minute' THEN date_bin(dlq.trend_width(p_over), now() - p_over, '2001-01-01')
    ELSE date_trunc(dlq.trend_step(p_over)::text, now() - p_over) END;
COMMENT ON FUNCTION dlq.trend_start IS 'The beginning of the trend of a failure group.';

-- One call for a page of groups costs a third of the processor time of a call for each.
CREATE OR REPLACE FUNCTION dlq.group_trends(p_queues text[], p_fingerprints text[], p_over interval)
RETURNS TABLE (queue text, fingerprint text, trend bigint[])
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_step  constant dlq.rollup_step := dlq.trend_step(p_over);
    v_width constant interval := dlq.trend_width(p_over);
    v_start constant timestamptz := dlq.trend_start(p_over);
BEGIN
    RETURN QUERY
    SELECT g.queue, g.fingerprint, ARRAY(
        SELECT coalesce(r.failures, 0)
        FROM generate_series(v_start, now(), v_width) b (bucket)
        LEFT JOIN (
            SELECT date_bin(v_width, t.bucket, v_start) AS bucket, sum(t.failures)::bigint AS failures
            FROM dlq.rollup_groups t
            WHERE t.queue = g.queue AND t.fingerprint = g.fingerprint AND t.step = v_step AND t.bucket >= v_start
            GROUP BY 1) r ON r.bucket = b.bucket
        ORDER BY b.bucket)
    FROM unnest(p_queues, p_fingerprints) g (queue, fingerprint);
END
$$;
COMMENT ON FUNCTION dlq.group_trends IS
    'The trends (dlq.group_trend) of several failure groups, each a queue and a fingerprint.';

CREATE OR REPLACE FUNCTION dlq.group_trend(p_queue text, p_fingerprint text, p_over interval) RETURNS bigint[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.trend FROM dlq.group_trends(ARRAY[p_queue], ARRAY[p_fingerprint], p_over) t
$$;
COMMENT ON FUNCTION dlq.group_trend IS
    'The failures of a failure group in a window that ends now, the oldest first: for each minute of windows of up to '
    'an hour, each five minutes up to six hours, each hour up to a day, each day up to 35, else each week.';

CREATE OR REPLACE FUNCTION dlq.flow(p_over interval DEFAULT '24 hours', p_by text DEFAULT 'all',
    p_queue text DEFAULT NULL, p_step dlq.rollup_step DEFAULT NULL)
RETURNS TABLE (bucket timestamptz, name text, captured bigint, failures bigint, redelivered bigint, succeeded bigint,
    resolved bigint, failed bigint, archived bigint, parked bigint, open bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_step     dlq.rollup_step := coalesce(p_step, dlq.step_for(p_over));
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
    v_scope    text := CASE WHEN p_by = 'class' AND (p_queue IS NOT NULL OR v_patterns IS NOT NULL) THEN 'queue_class'
        WHEN p_by IN ('all', 'class') AND p_queue IS NULL AND v_patterns IS NULL THEN p_by
                         WHEN p_by IN ('all', 'queue') THEN 'queue' END;
BEGIN
    IF v_scope IS NULL THEN
        RAISE EXCEPTION 'analytics: cannot group by %', p_by USING ERRCODE = 'DLQ04',
            HINT = 'Values: all, queue, class.';
    END IF;
    IF p_over <= interval '0'
        OR p_over > (CASE v_step WHEN 'minute' THEN interval '3 days' WHEN 'hour' THEN interval '60 days'
            ELSE interval '20 years' END) THEN
        RAISE EXCEPTION 'analytics: invalid window % for buckets of one %', p_over, v_step USING ERRCODE = 'DLQ04',
            HINT = 'Windows: up to 3 days by minute, up to 60 days by hour, up to 20 years by day.';
    END IF;
    RETURN QUERY
    WITH moves AS MATERIALIZED (
        SELECT r.bucket, sum(r.captured)::bigint AS captured, sum(r.failures)::bigint AS failures,
               sum(r.redelivered)::bigint AS redelivered, sum(r.succeeded)::bigint AS succeeded,
               sum(r.resolved)::bigint AS resolved, sum(r.failed)::bigint AS failed,
               sum(r.archived)::bigint AS archived, sum(r.parked)::bigint AS parked,
               sum(r.open_change)::bigint AS open_change,
               (CASE p_by WHEN 'queue' THEN r.queue WHEN 'class' THEN r.error_class ELSE 'all' END) COLLATE "C" AS name
        FROM dlq.rollup_flow r
        WHERE r.step = v_step AND r.scope = v_scope AND r.bucket >= date_trunc(v_step::text, now() - p_over)
            AND (p_queue IS NULL OR r.queue = p_queue)
            AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
        GROUP BY r.bucket, name
    ), names AS MATERIALIZED (
        -- The number of open entries before the window: the open entries of today, less the changes
        -- since.
        SELECT o.name, sum(o.open)::float8 AS before
        FROM (
            SELECT (CASE p_by WHEN 'queue' THEN b.queue WHEN 'class' THEN b.error_class
                ELSE 'all' END) COLLATE "C" AS name, b.pending + b.processing + b.manual AS open, false AS moved
            FROM dlq.rollup_backlog b WHERE (p_queue IS NULL OR b.queue = p_queue)
                AND (v_patterns IS NULL OR dlq.in_patterns(b.queue, NULL, v_patterns))
            UNION ALL SELECT m.name, -m.open_change, true FROM moves m
            UNION ALL SELECT 'all', 0, true WHERE p_by = 'all') o
        GROUP BY o.name HAVING bool_or(o.moved) OR sum(o.open) > 0
    )
    SELECT g.bucket, n.name, coalesce(m.captured, 0), coalesce(m.failures, 0), coalesce(m.redelivered, 0),
           coalesce(m.succeeded, 0),
           coalesce(m.resolved, 0), coalesce(m.failed, 0), coalesce(m.archived, 0), coalesce(m.parked, 0),
           (n.before + coalesce(sum(m.open_change::float8) OVER (PARTITION BY n.name
               ORDER BY g.bucket ROWS UNBOUNDED PRECEDING), 0))::bigint
    FROM generate_series(date_trunc(v_step::text, now() - p_over), now(), ('1 ' || v_step)::interval) g (bucket)
    CROSS JOIN names n
    LEFT JOIN moves m ON m.bucket = g.bucket AND m.name = n.name
    ORDER BY n.name, g.bucket;
END
$$;
COMMENT ON FUNCTION dlq.flow IS
    'The activity of a window that ends now, per bucket: captured, failures (captures and failed redeliveries), '
    'redelivered, succeeded (redeliveries), resolved, failed, archived, parked, and the number of open entries at '
    'the end. By all, queue or class. The longest window is 3 days by minute, 60 days by hour, 20 years by day.';

CREATE OR REPLACE FUNCTION dlq.times(p_over interval DEFAULT '7 days', p_by text DEFAULT 'queue',
    p_queue text DEFAULT NULL)
RETURNS TABLE (queue text, measure text, entries bigint, average interval, p50 interval, p95 interval, p99 interval)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    WITH w AS (
        SELECT dlq.coarse_step(p_over) AS step
    ), bins AS (
        SELECT CASE WHEN p_by = 'queue' OR p_queue IS NOT NULL THEN r.queue ELSE '' END AS queue, r.measure, r.bin,
            sum(r.entries) AS entries, sum(r.seconds) AS seconds
        FROM w CROSS JOIN unnest(ARRAY['in_dlq', 'to_recovery']) m (measure)
        JOIN dlq.rollup_times r ON r.step = w.step AND r.measure = m.measure
            AND r.scope = CASE WHEN p_by = 'queue' OR p_queue IS NOT NULL OR v_patterns IS NOT NULL THEN 'queue'
                ELSE 'all' END
            AND r.bucket >= date_trunc(w.step::text, now() - p_over) AND (p_queue IS NULL OR r.queue = p_queue)
            AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
        GROUP BY 1, r.measure, r.bin
    ), cumulative AS (
        SELECT b.*, make_interval(secs => 1.1::float8 ^ (b.bin - 0.5)) AS middle,
               sum(b.entries) OVER (PARTITION BY b.queue, b.measure ORDER BY b.bin) AS so_far,
               sum(b.entries) OVER (PARTITION BY b.queue, b.measure) AS total
        FROM bins b
    )
    SELECT nullif(u.queue, ''), u.measure, sum(u.entries)::bigint,
           make_interval(secs => sum(u.seconds) / sum(u.entries)),
           min(u.middle) FILTER (WHERE u.so_far >= 0.50 * u.total),
           min(u.middle) FILTER (WHERE u.so_far >= 0.95 * u.total),
           min(u.middle) FILTER (WHERE u.so_far >= 0.99 * u.total)
    FROM cumulative u GROUP BY u.queue, u.measure ORDER BY u.measure, u.queue;
END
$$;
COMMENT ON FUNCTION dlq.times IS
    'How long entries that closed in a window were open (in_dlq), and the time from the first failure until the work '
    'was done (to_recovery): average, and percentiles within 5 %. By queue, or all (queue is null).';

CREATE OR REPLACE FUNCTION dlq.ratio(p_part numeric, p_whole numeric) RETURNS float8
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_whole > 0 THEN round(p_part / p_whole, 4)::float8 END;
COMMENT ON FUNCTION dlq.ratio IS 'p_part of p_whole, from 0 to 1; null if p_whole is 0.';

CREATE OR REPLACE FUNCTION dlq.stats(p_over interval DEFAULT '24 hours')
RETURNS TABLE (queue text, open bigint, pending bigint, processing bigint, manual bigint, captured bigint,
    redelivered bigint, succeeded bigint,
               resolved bigint, failed bigint, archived bigint, parked bigint, resolution_rate float8,
               replay_success float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    WITH w AS (
        SELECT dlq.step_for(p_over) AS step
    ), moves AS (
        SELECT r.queue, sum(r.captured) AS captured, sum(r.redelivered) AS redelivered, sum(r.succeeded) AS succeeded,
               sum(r.failures - r.captured) AS failed_again,
               sum(r.resolved) AS resolved, sum(r.failed) AS failed, sum(r.archived) AS archived,
               sum(r.parked) AS parked
        FROM w JOIN dlq.rollup_flow r ON r.step = w.step AND r.scope = 'queue'
            AND r.bucket >= date_trunc(w.step::text, now() - p_over)
        WHERE v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns)
        GROUP BY r.queue
    ), backlog AS (
        SELECT b.queue, sum(b.pending) AS pending, sum(b.processing) AS processing, sum(b.manual) AS manual
        FROM dlq.rollup_backlog b WHERE v_patterns IS NULL OR dlq.in_patterns(b.queue, NULL, v_patterns)
        GROUP BY b.queue
    )
    SELECT s.queue, coalesce(sum(b.pending + b.processing + b.manual), 0)::bigint, coalesce(sum(b.pending), 0)::bigint,
           coalesce(sum(b.processing), 0)::bigint, coalesce(sum(b.manual), 0)::bigint,
           coalesce(sum(m.captured), 0)::bigint, coalesce(sum(m.redelivered), 0)::bigint,
           coalesce(sum(m.succeeded), 0)::bigint,
           coalesce(sum(m.resolved), 0)::bigint, coalesce(sum(m.failed), 0)::bigint,
           coalesce(sum(m.archived), 0)::bigint, coalesce(sum(m.parked), 0)::bigint,
           dlq.ratio(sum(m.resolved), sum(m.resolved + m.failed + m.archived)),
           dlq.ratio(sum(m.succeeded), sum(m.succeeded + m.failed_again))
    FROM (SELECT o.queue FROM moves o UNION SELECT k.queue FROM backlog k) s
    LEFT JOIN moves m ON m.queue = s.queue LEFT JOIN backlog b ON b.queue = s.queue
    GROUP BY GROUPING SETS ((s.queue), ())
    ORDER BY s.queue NULLS FIRST;
END
$$;
COMMENT ON FUNCTION dlq.stats IS
    'Figures of each queue, and of all (queue is null): open entries now, the moves of a window, the share of '
    'closed entries that were resolved (resolution_rate), and of redeliveries that succeeded (replay_success).';

CREATE OR REPLACE FUNCTION dlq.replay_success(p_over interval DEFAULT '7 days')
RETURNS TABLE (queue text, error_class text, redelivered bigint, succeeded bigint, failed bigint, success float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    SELECT r.queue, r.error_class, sum(r.redelivered)::bigint, sum(r.succeeded)::bigint,
           sum(r.failures - r.captured)::bigint,
           dlq.ratio(sum(r.succeeded), sum(r.succeeded + r.failures - r.captured))
    FROM dlq.rollup_flow r
    WHERE r.step = dlq.coarse_step(p_over) AND r.scope = 'queue_class'
      AND r.bucket >= date_trunc(dlq.coarse_step(p_over)::text, now() - p_over)
      AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
    GROUP BY r.queue, r.error_class HAVING sum(r.redelivered + r.succeeded + r.failures - r.captured) > 0
    ORDER BY 3 DESC, 1, 2;
END
$$;
COMMENT ON FUNCTION dlq.replay_success IS
    'Redeliveries in a window, by queue and class: started, succeeded and failed, and the share that succeeded. '
    'Each counts for the class that its entry had when it was sent.';

CREATE OR REPLACE FUNCTION dlq.retry_cost(p_over interval DEFAULT '7 days')
RETURNS TABLE (queue text, captured bigint, attempts bigint, redelivered bigint, succeeded bigint, resolved bigint,
    attempts_per_capture float8, wasted float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    SELECT r.queue, sum(r.captured)::bigint, sum(r.attempts)::bigint, sum(r.redelivered)::bigint,
           sum(r.succeeded)::bigint, sum(r.resolved)::bigint,
           CASE WHEN sum(r.captured) > 0 THEN round(sum(r.attempts) / sum(r.captured), 2)::float8 END,
           dlq.ratio(sum(r.attempts + r.failures - r.captured), sum(r.attempts + r.failures - r.captured + r.succeeded))
    FROM dlq.rollup_flow r
    WHERE r.step = dlq.coarse_step(p_over) AND r.scope = 'queue'
      AND r.bucket >= date_trunc(dlq.coarse_step(p_over)::text, now() - p_over)
      AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
    GROUP BY r.queue ORDER BY sum(r.attempts + r.redelivered) DESC, r.queue;
END
$$;
COMMENT ON FUNCTION dlq.retry_cost IS
    'The cost of retries, by queue: attempts of jobs before their capture, redeliveries, and the share of all '
    'of these that failed (wasted).';

CREATE OR REPLACE FUNCTION dlq.error_types(p_over interval DEFAULT '7 days', p_queue text DEFAULT NULL,
    p_limit integer DEFAULT 50)
RETURNS TABLE (error_type text, failures bigint, share float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    SELECT r.error_type, sum(r.failures)::bigint, dlq.ratio(sum(r.failures), sum(sum(r.failures)) OVER ())
    FROM dlq.rollup_errors r
    WHERE r.step = dlq.coarse_step(p_over)
      AND r.bucket >= date_trunc(dlq.coarse_step(p_over)::text, now() - p_over)
      AND (p_queue IS NULL OR r.queue = p_queue)
      AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
    GROUP BY r.error_type ORDER BY 2 DESC, 1 LIMIT p_limit;
END
$$;
COMMENT ON FUNCTION dlq.error_types IS
    'Failures in a window by error type ('''' if the error has none), and the share of each type.';

CREATE OR REPLACE FUNCTION dlq.top_groups(p_over interval DEFAULT '7 days', p_queue text DEFAULT NULL,
    p_limit integer DEFAULT 20)
RETURNS TABLE (queue text, fingerprint text, title text, error_type text, error_class text, in_window bigint,
    trend bigint[], failures bigint, open bigint,
               first_seen timestamptz, last_seen timestamptz, sample uuid)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC'
SET enable_seqscan = off SET jit = off SET max_parallel_workers_per_gather = 0
SET plan_cache_mode = force_generic_plan SET enable_sort = off AS $$
DECLARE
    v_step     dlq.rollup_step := dlq.trend_step(p_over);
    v_from     timestamptz := dlq.trend_start(p_over);
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
    v_mask     jsonb := dlq.mask();
BEGIN
    RETURN QUERY
    WITH top AS MATERIALIZED (
        SELECT r.queue, r.fingerprint, sum(r.failures) AS failures
        FROM dlq.rollup_groups r
        WHERE r.step = v_step AND r.bucket >= v_from AND (p_queue IS NULL OR r.queue = p_queue)
            AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))
        GROUP BY r.queue, r.fingerprint ORDER BY sum(r.failures) DESC, r.queue, r.fingerprint LIMIT p_limit
    )
    SELECT t.queue, t.fingerprint, CASE WHEN v_mask -> 'hidden' ? 'error_message' THEN NULL
        ELSE dlq.masked_text(g.title, v_mask) END, g.error_type, g.error_class, t.failures::bigint,
           w.trend, g.failures, g.open, g.first_seen, g.last_seen, g.sample
    FROM top t JOIN dlq.failure_groups g ON g.queue = t.queue AND g.fingerprint = t.fingerprint
    JOIN dlq.group_trends(ARRAY(SELECT o.queue FROM top o ORDER BY o.queue, o.fingerprint),
            ARRAY(SELECT o.fingerprint FROM top o ORDER BY o.queue, o.fingerprint), p_over) w
        ON w.queue = t.queue AND w.fingerprint = t.fingerprint
    ORDER BY t.failures DESC, t.queue, t.fingerprint;
END
$$;
COMMENT ON FUNCTION dlq.top_groups IS
    'The failure groups with the most failures in a window: title, failures in the window and their trend (see '
    'dlq.group_trend), failures in all, open entries, when first and last seen, and the last entry.';

CREATE OR REPLACE FUNCTION dlq.heat_map(p_over interval DEFAULT '28 days', p_timezone text DEFAULT 'UTC',
    p_queue text DEFAULT NULL)
RETURNS TABLE (weekday integer, hour integer, failures bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
BEGIN
    RETURN QUERY
    SELECT d.weekday, h.hour, coalesce(sum(r.failures), 0)::bigint
    FROM generate_series(1, 7) d (weekday) CROSS JOIN generate_series(0, 23) h (hour)
    LEFT JOIN (
        SELECT extract(isodow FROM r.bucket AT TIME ZONE p_timezone)::integer AS weekday,
            extract(hour FROM r.bucket AT TIME ZONE p_timezone)::integer AS hour, r.failures
        FROM dlq.rollup_flow r
        WHERE r.step = 'hour' AND r.bucket >= date_trunc('hour', now() - p_over)
          AND r.scope = CASE WHEN p_queue IS NULL AND v_patterns IS NULL THEN 'all' ELSE 'queue' END
          AND (p_queue IS NULL OR r.queue = p_queue)
          AND (v_patterns IS NULL OR dlq.in_patterns(r.queue, NULL, v_patterns))) r ON r.weekday = d.weekday
              AND r.hour = h.hour
    GROUP BY d.weekday, h.hour ORDER BY d.weekday, h.hour;
END
$$;
COMMENT ON FUNCTION dlq.heat_map IS 'Failures in a window by weekday (1 is Monday) and hour, in a time zone.';

CREATE OR REPLACE FUNCTION dlq.noisiest_sources(p_over interval DEFAULT '7 days', p_limit integer DEFAULT 20)
RETURNS TABLE (source text, captured bigint, share float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET enable_seqscan = off
SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
BEGIN
    PERFORM dlq.require_everything('sources');
    RETURN QUERY SELECT r.source, sum(r.captured)::bigint, dlq.ratio(sum(r.captured), sum(sum(r.captured)) OVER ())
    FROM dlq.rollup_sources r
    WHERE r.step = dlq.coarse_step(p_over)
      AND r.bucket >= date_trunc(dlq.coarse_step(p_over)::text, now() - p_over)
    GROUP BY r.source ORDER BY 2 DESC, 1 LIMIT p_limit;
END
$$;
COMMENT ON FUNCTION dlq.noisiest_sources IS
    'Sources of messages with the most captures in a window, and their share of the captures that name a '
    'source.';

CREATE OR REPLACE FUNCTION dlq.oldest_entries(p_limit integer DEFAULT 20)
RETURNS TABLE (id uuid, age interval, status dlq.dead_letter_status, queue text, kind text, error_class text,
    error_type text, assigned_to text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT e.id, now() - e.created_at, e.status, e.queue, e.kind, e.error_class, e.error_type, e.assigned_to
    FROM dlq.dead_letter_queue e WHERE e.stage IN ('inbox', 'open')
        AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
            ORDER BY e.id LIMIT p_limit
$$;
COMMENT ON FUNCTION dlq.oldest_entries IS 'The entries that have been open longest.';

CREATE OR REPLACE FUNCTION dlq.policy_changes(p_over interval DEFAULT '7 days')
RETURNS TABLE (at timestamptz, version text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT a.at, a.config_version FROM dlq.acts a WHERE a.subject = 'policy' AND a.at >= now() - p_over
    ORDER BY a.at DESC LIMIT 1000
$$;
COMMENT ON FUNCTION dlq.policy_changes IS 'When the version of the policy changed, newest first, 1,000 at most.';

-- Rules have no rollup. by_rule reads the newest entries of all queues, so that it costs the same for every caller.
-- With a custom plan, Postgres knows the times, so the plan neither contains nor locks the partitions of earlier
-- months.
CREATE OR REPLACE FUNCTION dlq.by_rule(p_over interval DEFAULT '24 hours', p_most integer DEFAULT 5000)
RETURNS TABLE (rule text, entries bigint, more boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_sort = off
SET jit = off SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    v_since constant timestamptz := now() - p_over;
    v_until constant timestamptz := now() + interval '1 hour'; -- excludes partitions that were created ahead
    v_first constant uuid := dlq.first_id(v_since);
BEGIN
    RETURN QUERY
    WITH newest AS MATERIALIZED (
        SELECT e.queue, e.kind, e.rule FROM dlq.dead_letter_queue e
        WHERE e.stage <> 'inbox' AND e.id >= v_first AND (e.closed_at IS NULL OR e.closed_at >= v_since
            AND e.closed_at < v_until) ORDER BY e.id DESC LIMIT p_most
    )
    SELECT n.rule, count(*), (SELECT count(*) >= p_most FROM newest) FROM newest n
    WHERE n.rule IS NOT NULL AND ((SELECT dlq.scope()) IS NULL
        OR dlq.in_patterns(n.queue, n.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
    GROUP BY n.rule ORDER BY 2 DESC, 1;
END
$$;
COMMENT ON FUNCTION dlq.by_rule IS
    'The newest p_most dead letters that were captured in a window, by the rule that decided them last. more: '
    'there may be further ones.';

CREATE OR REPLACE VIEW dlq.rates_by_hour AS
    SELECT f.bucket AS hour, f.name AS queue, f.captured, f.failures, f.redelivered, f.succeeded, f.resolved, f.failed,
        f.archived, f.parked, f.open
    FROM dlq.flow('7 days', 'queue', NULL, 'hour') f;
COMMENT ON VIEW dlq.rates_by_hour IS
    'The activity of each queue in each hour of the last seven days, and its open entries at the end of the '
    'hour; see dlq.flow.';
CREATE OR REPLACE VIEW dlq.backlog_by_class AS SELECT f.bucket AS hour, f.name AS error_class, f.open
    FROM dlq.flow('7 days', 'class', NULL, 'hour') f;
COMMENT ON VIEW dlq.backlog_by_class IS 'Open entries of each class at the end of each hour of the last seven days.';
CREATE OR REPLACE VIEW dlq.failures_by_hour AS SELECT * FROM dlq.heat_map('28 days', current_setting('timezone'));
COMMENT ON VIEW dlq.failures_by_hour IS 'Failures of the last 28 days by weekday (1 is Monday) and hour, in the session''s time zone.';
CREATE OR REPLACE VIEW dlq.time_in_dlq AS SELECT * FROM dlq.times('7 days');
COMMENT ON VIEW dlq.time_in_dlq IS
    'How long the entries that closed in the last seven days were open, and how long recovery took; see '
    'dlq.times.';
CREATE OR REPLACE VIEW dlq.rollup_lag AS SELECT s.at, now() - s.at AS behind, s.rebuilt_at, s.moves
    FROM dlq.rollup_state s;
COMMENT ON VIEW dlq.rollup_lag IS 'The time up to which analytics are exact.';
-- The following views are the functions of the same names with default arguments.
CREATE OR REPLACE VIEW dlq.error_types AS SELECT * FROM dlq.error_types();
COMMENT ON VIEW dlq.error_types IS 'Failures of the last seven days by error type, most frequent first.';
CREATE OR REPLACE VIEW dlq.top_groups AS SELECT * FROM dlq.top_groups();
COMMENT ON VIEW dlq.top_groups IS 'The failure groups with the most failures in the last seven days.';
CREATE OR REPLACE VIEW dlq.replay_success AS SELECT * FROM dlq.replay_success();
COMMENT ON VIEW dlq.replay_success IS 'The results of the redeliveries of the last seven days, by queue and class.';
CREATE OR REPLACE VIEW dlq.retry_cost AS SELECT * FROM dlq.retry_cost();
COMMENT ON VIEW dlq.retry_cost IS 'The cost of attempts and redeliveries of the last seven days, by queue.';
CREATE OR REPLACE VIEW dlq.noisiest_sources AS SELECT * FROM dlq.noisiest_sources();
COMMENT ON VIEW dlq.noisiest_sources IS 'The sources with the most captures in the last seven days.';
CREATE OR REPLACE VIEW dlq.oldest_entries AS SELECT * FROM dlq.oldest_entries();
COMMENT ON VIEW dlq.oldest_entries IS 'The entries that have been open longest.';
