-- The report of a replay run: the closure of each entry.

CREATE OR REPLACE FUNCTION dlq.closure_of(p_outcome text, p_job bigint, p_was text, p_fingerprint text,
    p_taken_by text, p_cancelled boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_outcome
    WHEN 'succeeded' THEN 'recovered'
    WHEN 'failed' THEN CASE WHEN p_fingerprint = p_was THEN 'failed_same'
        WHEN p_fingerprint <> p_was THEN 'failed_new' ELSE 'failed' END
    WHEN 'skipped' THEN CASE WHEN p_taken_by IS NULL THEN 'skipped' ELSE 'taken_over' END
    ELSE CASE WHEN p_job IS NOT NULL THEN 'in_progress' WHEN p_cancelled THEN 'skipped' ELSE 'to_go' END END;
COMMENT ON FUNCTION dlq.closure_of IS
    'The closure of an entry of a replay run: recovered; failed_same or failed_new, in the same failure group or '
    'another; failed, if one of the groups is not known; skipped; taken_over by a person before its turn; '
    'in_progress; or to_go.';

CREATE OR REPLACE FUNCTION dlq.run_closures(p_run uuid)
RETURNS TABLE (entry_id uuid, was text, closure text, what text, sent_at timestamptz, ended_at timestamptz,
    reason text, worked float8, job_id bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.entry_id, c.was, c.closure,
           CASE c.closure WHEN 'failed_new' THEN c.fingerprint
               WHEN 'taken_over' THEN c.taken_by
               WHEN 'expired' THEN coalesce(c.taken_by, 'the policy')
               WHEN 'failed' THEN CASE c.reason WHEN 'process_lost' THEN 'its process was lost' ELSE '' END
               WHEN 'skipped' THEN coalesce(regexp_replace(split_part(c.detail, ':', 1), '[0-9]+', '#', 'g'),
                   'the run was cancelled')
               ELSE '' END,
           c.sent_at, c.ended_at,
           CASE c.closure WHEN 'skipped' THEN coalesce(c.reason, CASE WHEN c.outcome IS NULL THEN 'cancelled' END)
               WHEN 'failed' THEN c.reason END,
           c.worked, c.job_id
    FROM (SELECT x.entry_id, coalesce(x.was, '') AS was, x.fingerprint, x.taken_by, x.detail, x.sent_at, x.ended_at,
              x.reason, x.worked, x.job_id, x.outcome,
              CASE x.closed_as::text WHEN 'expired' THEN 'expired' ELSE dlq.closure_of(x.outcome, x.job_id, x.was,
                  x.fingerprint, x.taken_by, r.status = 'cancelled') END AS closure
          FROM dlq.replay_runs r JOIN dlq.replay_run_entries x ON x.run_id = r.id
          WHERE r.id = p_run AND dlq.scope_within(r.scope, dlq.scope())) c
$$;
COMMENT ON FUNCTION dlq.run_closures IS
    'What became of each entry of a replay run (dlq.closure_of), or expired, if it was closed so before its turn. '
    'was is its failure group at the start; what is the new failure group, who took the entry over or expired it, that '
    'its process was lost, or why it was skipped, with # for numbers; reason is the identifier of the latter two '
    '(replay_run_entries.reason, or cancelled), worked the seconds that the redelivery worked, and job_id the '
    'redelivery.';

CREATE OR REPLACE FUNCTION dlq.run_report(p_run uuid, p_limit integer)
RETURNS TABLE (is_total boolean, was text, closure text, what text, entries bigint, since timestamptz, median float8,
    slowest float8, queue text, error_type text, reason text, requests bigint, worked float8)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.is_total, t.was, t.closure, t.what, t.entries, t.since, coalesce(t.median, 0), coalesce(t.slowest, 0),
           e.queue, e.error_type, t.reason, t.requests, coalesce(t.worked, 0)
    FROM (SELECT grouping(c.was) = 1 AS is_total, c.was, c.closure, c.what, count(*) AS entries,
              min(c.sent_at) FILTER (WHERE c.closure = 'in_progress') AS since,
              percentile_disc(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM c.ended_at - c.sent_at)::float8)
                  FILTER (WHERE c.closure = 'recovered') AS median,
              max(extract(epoch FROM c.ended_at - c.sent_at)::float8) FILTER (WHERE c.closure = 'recovered') AS slowest,
              min(c.entry_id::text)::uuid AS example, min(c.reason) AS reason, count(c.job_id) AS requests,
              sum(c.worked) AS worked
          FROM dlq.run_closures(p_run) c
          GROUP BY GROUPING SETS ((c.closure), (c.was, c.closure, c.what))
          ORDER BY 1 DESC, 5 DESC, 2, 3, 4 LIMIT p_limit) t
    LEFT JOIN LATERAL (
        SELECT q.queue, q.error_type FROM dlq.dead_letter_queue q
        WHERE q.id = t.example AND (q.closed_at IS NULL
            OR q.closed_at >= dlq.captured_at(t.example) - interval '1 day') LIMIT 1) e ON NOT t.is_total
    ORDER BY t.is_total DESC, t.entries DESC, t.was, t.closure, t.what
$$;
COMMENT ON FUNCTION dlq.run_report IS
    'Counts the entries of a replay run by failure group at the start and by what became of them (dlq.run_closures), '
    'the most frequent first, after the totals for all groups. since is when the oldest redelivery under way was sent; '
    'median and slowest are seconds from a redelivery to its success. requests is the number of redeliveries, worked '
    'the seconds that they worked.';

CREATE OR REPLACE FUNCTION dlq.diff_runs(p_before uuid, p_after uuid, p_limit integer)
RETURNS TABLE (was text, before text, after text, entries bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(b.was, a.was), coalesce(a.closure, 'absent'), coalesce(b.closure, 'absent'), count(*)
    FROM dlq.run_closures(p_before) a FULL JOIN dlq.run_closures(p_after) b ON b.entry_id = a.entry_id
    GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT p_limit
$$;
COMMENT ON FUNCTION dlq.diff_runs IS
    'Counts the entries of two replay runs by failure group and by what became of them in each (dlq.run_closures); '
    'absent if a run has not chosen the entry.';

-- The last outcomes are found by replay_run_entries_group, one probe for each group.
CREATE OR REPLACE FUNCTION dlq.group_outcomes(p_queues text[], p_fingerprints text[])
RETURNS TABLE (queue text, fingerprint text, since timestamptz, recovered bigint, failed bigint,
    recovered_before bigint, failed_before bigint, version text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT g.queue, g.fingerprint, l.since, l.recovered, l.failed, l.recovered_before, l.failed_before, l.version
    FROM unnest(p_queues, p_fingerprints) g (queue, fingerprint)
    CROSS JOIN LATERAL (
        SELECT min(o.ended_at) FILTER (WHERE o.last) AS since,
               count(*) FILTER (WHERE o.last AND o.outcome = 'succeeded') AS recovered,
               count(*) FILTER (WHERE o.last AND o.outcome = 'failed') AS failed,
               count(*) FILTER (WHERE NOT o.last AND o.outcome = 'succeeded') AS recovered_before,
               count(*) FILTER (WHERE NOT o.last AND o.outcome = 'failed') AS failed_before,
               min(o.version) FILTER (WHERE o.last) AS version
        FROM (SELECT p.outcome, p.ended_at, p.version, p.run_id = first_value(p.run_id) OVER latest
                  AND p.version IS NOT DISTINCT FROM first_value(p.version) OVER latest AS last
              FROM (SELECT x.run_id, x.outcome, x.ended_at, x.version FROM dlq.replay_run_entries x
                    WHERE x.queue = g.queue AND x.was = g.fingerprint AND x.outcome IN ('succeeded', 'failed')
                        AND x.reason IS DISTINCT FROM 'process_lost'
                        AND EXISTS (SELECT FROM dlq.replay_runs r
                            WHERE r.id = x.run_id AND dlq.scope_within(r.scope, dlq.scope()))
                    ORDER BY x.ended_at DESC LIMIT 100) p
              WINDOW latest AS (ORDER BY p.ended_at DESC, p.run_id DESC)) o
        HAVING count(*) > 0) l
$$;
COMMENT ON FUNCTION dlq.group_outcomes IS
    'Counts the outcomes of the last 100 redeliveries of each of these failure groups in replay runs. recovered and '
    'failed count those of the run with the latest outcome that were worked by the version of that outcome (version; '
    'null if none was reported); since is when the first of these ended. recovered_before and failed_before count the '
    'others. Groups without outcomes have no row.';

CREATE OR REPLACE FUNCTION dlq.replay_result(p_run uuid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT jsonb_agg(g.expected || jsonb_build_object('recovered', coalesce(c.recovered, 0),
        'failed', coalesce(c.failed, 0)) ORDER BY g.place)
    FROM dlq.replay_runs r
    CROSS JOIN LATERAL (
        SELECT jsonb_build_object('queue', j -> 'queue', 'fingerprint', j -> 'fingerprint', 'entries', j -> 'entries',
            'recover', j -> 'recover', 'low', j -> 'low', 'high', j -> 'high') AS expected, place
        FROM jsonb_array_elements(CASE jsonb_typeof(r.forecast #> '{expect,groups}') WHEN 'array'
            THEN r.forecast #> '{expect,groups}' END) WITH ORDINALITY e (j, place)) g
    LEFT JOIN (
        SELECT x.queue, x.was, count(*) FILTER (WHERE x.outcome = 'succeeded') AS recovered,
               count(*) FILTER (WHERE x.outcome = 'failed') AS failed
        FROM dlq.replay_run_entries x WHERE x.run_id = p_run GROUP BY 1, 2) c
        ON c.queue = g.expected ->> 'queue' AND c.was = g.expected ->> 'fingerprint'
    WHERE r.id = p_run
$$;
COMMENT ON FUNCTION dlq.replay_result IS
    'The result of a run for each failure group of its forecast, in the form of replay_runs.result. It reads each '
    'entry of the run.';

CREATE OR REPLACE FUNCTION dlq.replay_calibration()
RETURNS TABLE (run_id uuid, queue text, fingerprint text, entries bigint, recover bigint, low bigint, high bigint,
    recovered bigint, failed bigint, judged boolean, held boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT r.id, g.queue, g.fingerprint, g.entries, g.recover, g.low, g.high, g.recovered, g.failed,
           g.recovered + g.failed = g.entries, g.recovered BETWEEN g.low AND g.high
    FROM (SELECT r.id, r.result FROM dlq.replay_runs r
          WHERE r.result IS NOT NULL AND dlq.scope_within(r.scope, (SELECT dlq.scope()))
          ORDER BY r.id DESC LIMIT 1000) r
    CROSS JOIN LATERAL jsonb_to_recordset(r.result) g (queue text, fingerprint text, entries bigint, recover bigint,
        low bigint, high bigint, recovered bigint, failed bigint)
    ORDER BY r.id DESC, g.entries DESC, g.queue, g.fingerprint
$$;
COMMENT ON FUNCTION dlq.replay_calibration IS
    'The forecasts of the last 1,000 ended replay runs beside what happened, by failure group. judged: each entry has '
    'recovered or failed. held: the number that recovered is in the 80 % interval.';

-- The entries of a run have changed since its start, but the attempts before its redeliveries have not. Like the
-- preview, ran_before reads 1,000 random entries.
CREATE OR REPLACE FUNCTION dlq.ran_before(p_run uuid)
RETURNS TABLE (sampled bigint, ran_long bigint, ran_not_known bigint, repeated bigint)
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH sampled AS MATERIALIZED (
        SELECT x.entry_id, x.job_id, x.run_id FROM dlq.replay_run_entries x
        WHERE x.run_id = p_run ORDER BY random() LIMIT 1000
    ), bounds AS MATERIALIZED (
        SELECT array_agg(s.entry_id) AS ids, dlq.closed_since(array_agg(s.entry_id)) AS since FROM sampled s
    )
    SELECT count(*), count(*) FILTER (WHERE a.seconds > 5), count(*) FILTER (WHERE a.seconds IS NULL),
           count(*) FILTER (WHERE a.attempts > 1)
    FROM (SELECT CASE jsonb_typeof(l.last -> 'processingDuration') WHEN 'number'
              THEN (l.last ->> 'processingDuration')::numeric END AS seconds, -- any client can write 1e400
              e.retry_count + l.redeliveries AS attempts
          FROM bounds b CROSS JOIN sampled s
          JOIN dlq.dead_letter_queue e ON e.id = s.entry_id AND e.id = ANY (b.ids)
              AND (e.closed_at IS NULL OR e.closed_at >= b.since)
          CROSS JOIN LATERAL (
              SELECT coalesce((array_agg(p.attempt ORDER BY p.place DESC))[1], e.retry_history -> -1) AS last,
                     count(*) AS redeliveries
              FROM jsonb_array_elements(e.replay_attempts) WITH ORDINALITY p (attempt, place)
              WHERE p.place < coalesce((SELECT min(o.place)
                  FROM jsonb_array_elements(e.replay_attempts) WITH ORDINALITY o (attempt, place)
                  WHERE o.attempt -> 'jobId' = to_jsonb(s.job_id)), 9223372036854775807)) l) a
$$;
COMMENT ON FUNCTION dlq.ran_before IS
    'Counts in a random sample of at most 1,000 entries of a run: the entries (sampled), those whose last attempt '
    'before the run took more than 5 s (ran_long), those of which that is not known (ran_not_known), and those with '
    'more than one attempt before the run (repeated).';

-- The identifiers of figures are those in the forecast. A figure that cannot be measured has no row: for example, a run
-- does not count stale entries unless it skips them.
CREATE OR REPLACE FUNCTION dlq.replay_figures(p_run uuid) RETURNS jsonb
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH run AS MATERIALIZED (
        SELECT r.*, CASE jsonb_typeof(r.forecast -> 'estimates') WHEN 'array' THEN r.forecast -> 'estimates'
            ELSE '[]' END AS estimates
        FROM dlq.replay_runs r WHERE r.id = p_run AND jsonb_typeof(r.forecast) = 'object'
    ), counts AS MATERIALIZED (
        SELECT count(*) FILTER (WHERE x.outcome = 'skipped' OR x.job_id IS NULL) AS skipped,
               count(x.job_id) AS sent,
               count(*) FILTER (WHERE x.reason = 'stale') AS stale,
               count(*) FILTER (WHERE x.reason = 'superseded') AS superseded,
               count(*) FILTER (WHERE x.reason = 'held') AS held,
               count(*) FILTER (WHERE x.reason = 'live_job') AS live_job,
               count(*) FILTER (WHERE x.reason = 'done_job') AS done_job,
               count(*) FILTER (WHERE x.reason = 'patch') AS patch
        FROM dlq.replay_run_entries x WHERE x.run_id = p_run
    ), ran AS MATERIALIZED (
        SELECT b.* FROM run r CROSS JOIN dlq.ran_before(r.id) b WHERE r.estimates @> '[{"what": "goes"}]'
    ), figures (what, forecast, low, high, actual) AS (
        SELECT e.what, e.entries, e.low, e.high,
               CASE e.what WHEN 'goes' THEN c.sent
                   WHEN 'skipped_stale' THEN c.stale WHEN 'skipped_superseded' THEN c.superseded
                   WHEN 'skipped_held' THEN c.held
                   WHEN 'stale' THEN CASE WHEN r.skip_stale THEN c.stale END
                   WHEN 'superseded' THEN CASE WHEN r.skip_superseded AND NOT r.skip_stale THEN c.superseded END
                   WHEN 'superseded_not_known' THEN CASE WHEN r.skip_superseded THEN r.not_known END
                   WHEN 'live_job' THEN CASE WHEN NOT r.force THEN c.live_job + c.done_job END
                   WHEN 'patch_fails' THEN c.patch
                   WHEN 'ran_long' THEN round(b.ran_long * r.total::numeric / nullif(b.sampled, 0))
                   WHEN 'ran_not_known' THEN round(b.ran_not_known * r.total::numeric / nullif(b.sampled, 0))
                   WHEN 'repeated' THEN round(b.repeated * r.total::numeric / nullif(b.sampled, 0)) END
        FROM run r CROSS JOIN counts c LEFT JOIN ran b ON true
        CROSS JOIN LATERAL jsonb_to_recordset(r.estimates) e (what text, entries bigint, low bigint, high bigint)
        UNION ALL
        -- If a run waited for an operator, its duration includes that wait.
        SELECT 'ends',
               round(((r.forecast #>> '{ends,earliest}')::numeric + (r.forecast #>> '{ends,latest}')::numeric) / 2),
               floor((r.forecast #>> '{ends,earliest}')::numeric), ceil((r.forecast #>> '{ends,latest}')::numeric),
               round(extract(epoch FROM r.finished_at - r.created_at))
        FROM run r
        WHERE jsonb_typeof(r.forecast -> 'ends') = 'object' AND r.status = 'completed' AND NOT EXISTS (
            SELECT FROM dlq.acts a WHERE a.subject = 'replay run ' || p_run AND a.subject LIKE 'replay run %'
                AND a.act IN ('paused', 'resumed', 'rate changed', 'group held', 'group stopped', 'group let go on',
                    'group sent back', 'group ended'))
        UNION ALL
        SELECT 'recover', (r.forecast #>> '{expect,recover}')::bigint, (r.forecast #>> '{expect,low}')::bigint,
               (r.forecast #>> '{expect,high}')::bigint, g.recovered
        FROM run r CROSS JOIN LATERAL (
            SELECT sum(j.recovered) AS recovered, sum(j.recovered + j.failed) AS ended
            FROM jsonb_to_recordset(coalesce(dlq.replay_result(p_run), '[]')) j (recovered bigint, failed bigint)) g
        WHERE g.ended = (r.forecast #>> '{expect,tried}')::bigint AND (r.forecast #>> '{expect,tried}')::bigint > 0
    )
    SELECT jsonb_agg(jsonb_build_object('what', f.what, 'forecast', f.forecast, 'low', f.low, 'high', f.high,
        'actual', f.actual) ORDER BY f.what COLLATE "C")
    FROM figures f WHERE f.actual IS NOT NULL
$$;
COMMENT ON FUNCTION dlq.replay_figures IS
    'The figures of a run''s forecast beside what happened, in the form of replay_runs.figures; null without any. '
    'Whether entries ran before is estimated again from 1,000 entries.';

CREATE OR REPLACE FUNCTION dlq.replay_figure_calibration()
RETURNS TABLE (what text, runs bigint, held bigint, forecast numeric, actual numeric, off numeric)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT f.what, count(*), count(*) FILTER (WHERE f.actual BETWEEN f.low AND f.high), sum(f.forecast), sum(f.actual),
           round(avg(abs(f.actual - f.forecast)), 1)
    FROM (SELECT r.figures FROM dlq.replay_runs r
          WHERE r.figures IS NOT NULL AND dlq.scope_within(r.scope, (SELECT dlq.scope()))
          ORDER BY r.id DESC LIMIT 1000) r
    CROSS JOIN LATERAL jsonb_to_recordset(r.figures) f (what text, forecast numeric, low numeric, high numeric,
        actual numeric)
    GROUP BY f.what ORDER BY f.what COLLATE "C"
$$;
COMMENT ON FUNCTION dlq.replay_figure_calibration IS
    'For each figure of the forecasts of the last 1,000 ended replay runs: the number of runs in which it was measured '
    '(runs), how often the measured number was in the interval of the forecast (held), the sums of the forecasts and '
    'of the measured numbers (actual), and the mean of their differences without sign (off).';
