-- The report of a replay run: what became of each entry.

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
    'What became of an entry of a replay run: recovered; failed_same or failed_new, in the same failure group or '
    'another; failed, if one of the groups is not known; skipped; taken_over by a person before its turn; '
    'in_progress; or to_go.';

CREATE OR REPLACE FUNCTION dlq.run_closures(p_run uuid)
RETURNS TABLE (entry_id uuid, was text, closure text, what text, sent_at timestamptz, ended_at timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.entry_id, c.was, c.closure,
           CASE c.closure WHEN 'failed_new' THEN c.fingerprint
               WHEN 'taken_over' THEN c.taken_by
               WHEN 'expired' THEN coalesce(c.taken_by, 'the policy')
               WHEN 'skipped' THEN coalesce(regexp_replace(split_part(c.detail, ':', 1), '[0-9]+', '#', 'g'),
                   'the run was cancelled')
               ELSE '' END,
           c.sent_at, c.ended_at
    FROM (SELECT x.entry_id, coalesce(x.was, '') AS was, x.fingerprint, x.taken_by, x.detail, x.sent_at, x.ended_at,
              CASE x.closed_as::text WHEN 'expired' THEN 'expired' ELSE dlq.closure_of(x.outcome, x.job_id, x.was,
                  x.fingerprint, x.taken_by, r.status = 'cancelled') END AS closure
          FROM dlq.replay_runs r JOIN dlq.replay_run_entries x ON x.run_id = r.id
          WHERE r.id = p_run AND dlq.scope_within(r.scope, dlq.scope())) c
$$;
COMMENT ON FUNCTION dlq.run_closures IS
    'What became of each entry of a replay run (dlq.closure_of), or expired, if it was closed so before its turn. '
    'was is its failure group at the start; what is the new failure group, who took the entry over or expired it, or '
    'why it was skipped, with # for numbers.';

CREATE OR REPLACE FUNCTION dlq.run_report(p_run uuid, p_limit integer)
RETURNS TABLE (is_total boolean, was text, closure text, what text, entries bigint, since timestamptz, median float8,
    slowest float8, queue text, error_type text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.is_total, t.was, t.closure, t.what, t.entries, t.since, coalesce(t.median, 0), coalesce(t.slowest, 0),
           e.queue, e.error_type
    FROM (SELECT grouping(c.was) = 1 AS is_total, c.was, c.closure, c.what, count(*) AS entries,
              min(c.sent_at) FILTER (WHERE c.closure = 'in_progress') AS since,
              percentile_disc(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM c.ended_at - c.sent_at)::float8)
                  FILTER (WHERE c.closure = 'recovered') AS median,
              max(extract(epoch FROM c.ended_at - c.sent_at)::float8) FILTER (WHERE c.closure = 'recovered') AS slowest,
              min(c.entry_id::text)::uuid AS example
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
    'median and slowest are seconds from a redelivery to its success.';

CREATE OR REPLACE FUNCTION dlq.diff_runs(p_before uuid, p_after uuid, p_limit integer)
RETURNS TABLE (was text, before text, after text, entries bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
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
    recovered_before bigint, failed_before bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT g.queue, g.fingerprint, l.since, l.recovered, l.failed, l.recovered_before, l.failed_before
    FROM unnest(p_queues, p_fingerprints) g (queue, fingerprint)
    CROSS JOIN LATERAL (
        SELECT min(o.ended_at) FILTER (WHERE o.last) AS since,
               count(*) FILTER (WHERE o.last AND o.outcome = 'succeeded') AS recovered,
               count(*) FILTER (WHERE o.last AND o.outcome = 'failed') AS failed,
               count(*) FILTER (WHERE NOT o.last AND o.outcome = 'succeeded') AS recovered_before,
               count(*) FILTER (WHERE NOT o.last AND o.outcome = 'failed') AS failed_before
        FROM (SELECT p.outcome, p.ended_at,
                  p.run_id = first_value(p.run_id) OVER (ORDER BY p.ended_at DESC, p.run_id DESC) AS last
              FROM (SELECT x.run_id, x.outcome, x.ended_at FROM dlq.replay_run_entries x
                    WHERE x.queue = g.queue AND x.was = g.fingerprint AND x.outcome IN ('succeeded', 'failed')
                        AND EXISTS (SELECT FROM dlq.replay_runs r
                            WHERE r.id = x.run_id AND dlq.scope_within(r.scope, dlq.scope()))
                    ORDER BY x.ended_at DESC LIMIT 100) p) o
        HAVING count(*) > 0) l
$$;
COMMENT ON FUNCTION dlq.group_outcomes IS
    'What became of the last 100 redeliveries of each of the given failure groups in replay runs: in the run with the '
    'latest outcome, whose first outcome was at since, and in runs before. Groups without outcomes have no row.';

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
    'What became of the failure groups of a run''s forecast, in the form of replay_runs.result. It reads each entry of '
    'the run.';

CREATE OR REPLACE FUNCTION dlq.replay_calibration()
RETURNS TABLE (run_id uuid, queue text, fingerprint text, entries bigint, recover bigint, low bigint, high bigint,
    recovered bigint, failed bigint, judged boolean, held boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT r.id, g.queue, g.fingerprint, g.entries, g.recover, g.low, g.high, g.recovered, g.failed,
           g.recovered + g.failed >= g.entries, g.recovered BETWEEN g.low AND g.high
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
