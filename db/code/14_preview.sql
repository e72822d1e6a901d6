-- The preview of a replay run: facts about single entries before they are redelivered, and the expected end of the run.
-- internal/replay counts a sample with the first function; dlq.preview_replay does so in SQL.

CREATE OR REPLACE FUNCTION dlq.before_replay(p_ids uuid[])
RETURNS TABLE (entry_id uuid, seconds float8, attempts bigint, checkpoint boolean, other_run boolean, live_job boolean,
    behind boolean, assigned_to text, parked_by text, in_review text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
    SELECT e.id,
           CASE WHEN jsonb_typeof(l.last -> 'processingDuration') = 'number'
               AND (l.last ->> 'processingDuration')::numeric BETWEEN 0 AND 1e9
               THEN round((l.last ->> 'processingDuration')::numeric, 6)::float8 END, -- any client can write 1e±400
           e.retry_count + jsonb_array_length(e.replay_attempts), dlq.has_checkpoint(e.metadata),
           EXISTS (SELECT FROM dlq.replay_runs r JOIN dlq.replay_run_entries x ON x.run_id = r.id AND x.entry_id = e.id
               AND (x.outcome IS NULL AND x.job_id IS NULL OR r.progressive AND x.outcome = 'failed')
               WHERE r.unsettled AND r.status IN ('running', 'paused', 'stopped')),
           e.unique_key IS NOT NULL AND EXISTS (SELECT FROM river.river_job j
               WHERE j.unique_key = e.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
                   AND river.river_job_state_in_bitmask(j.unique_states, j.state) AND j.id <> e.river_job_id
                   AND (j.finalized_at IS NULL OR NOT EXISTS (SELECT FROM dlq.entry_jobs m
                       WHERE m.job_id = j.id AND m.job_created_at = j.created_at AND m.entry_id = e.id))),
           e.ordering_key IS NOT NULL AND EXISTS (SELECT FROM dlq.ordered_jobs o
               WHERE o.queue = e.queue AND o.ordering_key = e.ordering_key AND o.place < e.order_place),
           coalesce(e.assigned_to, ''), CASE WHEN dlq.is_person(e.parked_by) THEN e.parked_by ELSE '' END,
           coalesce(v.actor, '')
    FROM dlq.dead_letter_queue e
    CROSS JOIN LATERAL (SELECT coalesce(e.replay_attempts -> -1, e.retry_history -> -1) AS last) l
    LEFT JOIN dlq.in_review(p_ids) v ON v.entry_id = e.id
    WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
        AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
$$;
COMMENT ON FUNCTION dlq.before_replay IS
    'Data about entries before a replay: how long the last attempt ran (null if that is not known; errors of rescued '
    'jobs have no duration), how many attempts there were, whether a resumable job has completed a step, whether '
    'another replay run has not sent the entry yet or holds it, whether another job has its unique key, whether it '
    'is behind another message of its ordering key, and which operator it is assigned to, parked it, or has it in '
    'review.';

CREATE OR REPLACE FUNCTION dlq.count_keyed(p_ids uuid[]) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_key   constant text := dlq.job_key();
    v_keyed bigint := 0;
BEGIN
    IF v_key IS NOT NULL THEN
        EXECUTE 'SELECT count(*) FROM dlq.dead_letter_queue e WHERE e.id = ANY ($1)
                     AND e.stage IN (''inbox'', ''open'', ''failed'')
                     AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since($1)) AND (' || v_key || ') IS NOT NULL'
        INTO v_keyed USING p_ids;
    END IF;
    RETURN v_keyed;
END
$$;
COMMENT ON FUNCTION dlq.count_keyed IS
    'How many of the given entries are jobs of applications with an ordering key (dlq.job_key).';

-- No index has the keys: this reads all entries that match the filter.
CREATE OR REPLACE FUNCTION dlq.count_behind(p_filter jsonb, p_ids uuid[]) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_key    constant text := dlq.job_key();
    v_place  constant text := 'ARRAY[(extract(epoch FROM e.job_created_at) * 1000000)::bigint, e.river_job_id]';
    v_behind bigint := 0;
BEGIN
    IF v_key IS NOT NULL THEN
        EXECUTE 'WITH sampled AS MATERIALIZED (
                     SELECT e.queue, ' || v_key || ' AS key, ' || v_place || ' AS place
                     FROM dlq.dead_letter_queue e WHERE e.id = ANY ($2) AND e.stage IN (''inbox'', ''open'', ''failed'')
                         AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since($2))
                 ), firsts AS MATERIALIZED (
                     SELECT e.queue, ' || v_key || ' AS key, min(' || v_place || ') AS place
                     FROM dlq.dead_letter_queue e
                     WHERE (e.queue, ' || v_key || ') IN (SELECT s.queue, s.key FROM sampled s) AND '
            || dlq.filter_where(p_filter) || ' GROUP BY 1, 2
                 )
                 SELECT count(*) FROM sampled s JOIN firsts f ON f.queue = s.queue AND f.key = s.key
                 WHERE s.place > f.place'
        INTO v_behind USING p_filter, p_ids;
    END IF;
    RETURN v_behind;
END
$$;
COMMENT ON FUNCTION dlq.count_behind IS
    'How many of the given entries are behind another one that matches the filter: a job of an application with the '
    'same ordering key (dlq.job_key) in the same queue, which was inserted before.';

-- An attempt that reached no receiver counts as neither answered nor unanswered.
CREATE OR REPLACE FUNCTION dlq.how_far(p_ids uuid[]) RETURNS TABLE (what text, stage text, entries bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT a.what, a.stage, count(*)
    FROM dlq.dead_letter_queue e
    CROSS JOIN LATERAL (
        SELECT 'stage_reached' AS what, dlq.reported_stage(e.metadata) AS stage
        WHERE dlq.reported_stage(e.metadata) IS NOT NULL
        UNION ALL
        SELECT 'answered', '' WHERE e.job_kind = 'dlqd_message' AND e.error_context ?| '{status,grpcStatus}'
        UNION ALL
        SELECT 'no_answer', '' WHERE e.job_kind = 'dlqd_message'
            AND (e.error_context ?| '{status,grpcStatus}') IS NOT TRUE
            AND e.error_type IN ('TIMEOUT_ERROR', 'CONNECTION_RESET', 'CONNECTION_ERROR')) a
    WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
        AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
    GROUP BY 1, 2 ORDER BY 3 DESC, 2 LIMIT 10
$$;
COMMENT ON FUNCTION dlq.how_far IS
    'Counts entries by how far their last attempts got: the stage that a worker reported, and whether the receiver of '
    'a message answered.';

-- A redelivery is assumed to take as long as the last attempts of the entries: the interval is from their 10th to their
-- 90th percentile. p_workers is the number of redeliveries that dlqd works at a time; null if an application works
-- them. Each step of a progressive run waits for its last redelivery, and for a turn of the runner.
CREATE OR REPLACE FUNCTION dlq.replay_ends(p_entries bigint, p_seconds float8[], p_rate float8, p_concurrency float8,
    p_workers float8, p_progressive boolean, OUT earliest float8, OUT latest float8, OUT not_known text)
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_rate  constant float8 := coalesce(nullif(p_rate, 0), 10000); -- no limit: as many a second as two cores send
    v_steps constant integer := CASE WHEN p_progressive AND p_entries > 5 THEN 4 ELSE 1 END;
    v_at_once float8 := coalesce(nullif(p_concurrency, 0), p_workers);
    v_known bigint;
    v_low   float8;
    v_high  float8;
    v_most  float8;
BEGIN
    SELECT count(*), percentile_disc(0.1) WITHIN GROUP (ORDER BY s), percentile_disc(0.9) WITHIN GROUP (ORDER BY s),
        max(s)
    INTO v_known, v_low, v_high, v_most FROM unnest(p_seconds) s WHERE s IS NOT NULL;
    IF p_entries = 0 THEN
        earliest := 0;
        latest := 0;
        RETURN;
    ELSIF v_known < 5 AND v_known < p_entries THEN
        not_known := 'attempts'; -- too few attempts whose duration is known
        RETURN;
    ELSIF v_at_once IS NULL AND v_rate * v_high <= 1 THEN
        v_at_once := 1; -- one worker is enough
    ELSIF v_at_once IS NULL THEN
        not_known := 'workers'; -- the number of redeliveries that the application works at a time is unknown
        RETURN;
    END IF;
    v_at_once := least(v_at_once, p_workers);
    -- The limit is a century, because Postgres and clients may not be able to read later times.
    earliest := least(3.15e9, p_entries / least(v_rate, coalesce(nullif(p_concurrency, 0), 'infinity')
        / nullif(v_low, 0)) + v_steps * v_low);
    latest := least(3.15e9, p_entries / least(v_rate, v_at_once / nullif(v_high, 0))
        + v_most + (v_steps - 1) * v_high + v_steps * 2);
END
$$;
COMMENT ON FUNCTION dlq.replay_ends IS
    'After how many seconds a replay run of so many entries will have ended, if no group is held: from earliest to '
    'latest. Otherwise not_known says what is missing: attempts (fewer than five whose duration is known) or workers '
    '(how many redeliveries are worked at a time, without a concurrency). p_seconds are durations of recent attempts.';

-- The numbers of dlq.destination_traffic are arrays: the 48th element counts failures, and a 49th counts some of the
-- deliveries again. The table is not logged, so a standby cannot read it.
CREATE OR REPLACE FUNCTION dlq.destination_hours(p_destinations text[])
RETURNS TABLE (destination text, deliveries bigint, failures bigint, most_per_second float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    -- A destination gets the messages of many queues, so a caller with a scope sees no counts of a destination.
    IF pg_is_in_recovery() OR dlq.scope() IS NOT NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT s.destination, sum(s.deliveries)::bigint, sum(s.failures)::bigint, max(s.deliveries)::float8 / 10
    FROM (SELECT t.destination, t.at, sum(u.n) FILTER (WHERE u.level <= 48) AS deliveries,
              coalesce(sum(u.n) FILTER (WHERE u.level = 48), 0) AS failures
          FROM dlq.destination_traffic t CROSS JOIN LATERAL unnest(t.deliveries) WITH ORDINALITY u (n, level)
          WHERE t.destination = ANY (p_destinations) AND t.at >= now() - interval '1 hour' AND u.n > 0
          GROUP BY 1, 2) s
    GROUP BY 1;
END
$$;
COMMENT ON FUNCTION dlq.destination_hours IS
    'The deliveries of all processes to destinations in the last hour, how many of them failed, and how many a second '
    'there were in the busiest ten seconds. No row if none was counted, and no rows for a caller with a scope.';

CREATE OR REPLACE FUNCTION dlq.concerned_subscribers(p_ids uuid[], OUT entries bigint, OUT subscribers bigint,
    OUT largest jsonb)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH s AS MATERIALIZED (
        SELECT e.subscriber_id, count(*) AS entries FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.subscriber_id <> '' AND e.stage IN ('inbox', 'open', 'failed')
            AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
        GROUP BY 1
    )
    SELECT coalesce(sum(s.entries), 0)::bigint, count(*), (
        SELECT coalesce(jsonb_agg(jsonb_build_object('subscriberId', t.subscriber_id, 'entries', t.entries)
            ORDER BY t.entries DESC, t.subscriber_id), '[]')
        FROM (SELECT * FROM s ORDER BY s.entries DESC, s.subscriber_id LIMIT 5) t
        WHERE 'subscriber_id' <> ALL (dlq.hidden_columns()) AND (dlq.mask() ?| '{where,patterns}') IS NOT TRUE)
    FROM s
$$;
COMMENT ON FUNCTION dlq.concerned_subscribers IS
    'How many of the given entries are messages that name a subscriber, how many different subscribers they name, and '
    'the five with the most entries. These are an empty array if the caller may not see subscribers.';

-- The entries are taken in the order of their ids, in ten parts of equal size, as in internal/replay.
CREATE OR REPLACE FUNCTION dlq.sampled_load(p_ids uuid[], p_rate float8)
RETURNS TABLE (queue text, destination text, entries bigint, per_second numeric[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH sampled AS MATERIALIZED (
        SELECT e.queue, e.destination, row_number() OVER (ORDER BY e.id) - 1 AS place FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
            AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
    ), parts AS (
        SELECT p.part, p.part * n.entries / 10 AS first,
               greatest((p.part + 1) * n.entries / 10, least(p.part * n.entries / 10 + 1, n.entries)) AS below
        FROM generate_series(0, 9) p (part) CROSS JOIN (SELECT count(*) AS entries FROM sampled) n
    ), shares AS MATERIALIZED (
        SELECT p.part, s.queue, s.destination, count(*)::float8 / (p.below - p.first) AS share
        FROM parts p JOIN sampled s ON s.place >= p.first AND s.place < p.below
        GROUP BY p.part, s.queue, s.destination, p.first, p.below
    )
    SELECT n.queue, n.destination, n.entries, ARRAY(
        SELECT round((p_rate * coalesce(sum(h.share), 0))::numeric, 1)
        FROM generate_series(0, 9) g (part) LEFT JOIN shares h ON h.part = g.part
            AND (h.queue = n.queue OR h.destination = n.destination)
        GROUP BY g.part ORDER BY g.part)
    FROM (SELECT s.queue, s.destination, count(*) AS entries FROM sampled s
          GROUP BY GROUPING SETS ((s.queue), (s.destination))) n
    WHERE n.queue IS NOT NULL OR n.destination IS NOT NULL
    ORDER BY n.entries DESC, 1, 2 LIMIT 20
$$;
COMMENT ON FUNCTION dlq.sampled_load IS
    'How many of the given entries are of each queue, and how many failed at each destination, with the redeliveries a '
    'second in each tenth of a run of them at a rate.';

CREATE OR REPLACE FUNCTION dlq.preview_replay(p_filter jsonb, p_rate float8 DEFAULT NULL,
    p_concurrency integer DEFAULT NULL, p_progressive boolean DEFAULT false)
RETURNS TABLE (what text, entries bigint, sampled bigint, detail text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_filter constant jsonb := dlq.replayable(p_filter);
    v_total  bigint;
    v_sample uuid[];
    v_ends   record;
    v_scope  constant text[] := dlq.scope_patterns(dlq.scope());
BEGIN
    PERFORM dlq.check_rate(p_rate);
    WITH cells AS MATERIALIZED (SELECT c.entries, c.sample FROM dlq.count_groups(v_filter, 1000) c)
    SELECT (SELECT coalesce(sum(c.entries), 0) FROM cells c),
        ARRAY(SELECT i.id FROM cells c CROSS JOIN unnest(c.sample) i (id)) INTO v_total, v_sample;
    RETURN QUERY SELECT 'entries'::text, v_total, v_total, NULL::text;
    RETURN QUERY
    WITH b AS MATERIALIZED (SELECT * FROM dlq.before_replay(v_sample))
    SELECT k.what, round(v_total * k.hits::numeric / greatest(cardinality(v_sample), 1))::bigint,
           cardinality(v_sample)::bigint, k.detail
    FROM (SELECT count(*) FILTER (WHERE b.other_run), count(*) FILTER (WHERE b.live_job),
              count(*) FILTER (WHERE b.behind), count(*) FILTER (WHERE b.assigned_to <> ''),
              count(*) FILTER (WHERE b.parked_by <> ''), count(*) FILTER (WHERE b.in_review <> ''),
              count(*) FILTER (WHERE b.seconds > 5), count(*) FILTER (WHERE b.seconds IS NULL),
              count(*) FILTER (WHERE b.attempts > 1), count(*) FILTER (WHERE b.checkpoint)
          FROM b) c (other_run, live_job, behind, assigned, parked, in_review, ran_long, ran_not_known, repeated,
              steps_done)
    CROSS JOIN LATERAL (VALUES
        ('other_run', c.other_run, 'also in another replay run'),
        ('live_job', c.live_job, 'another job has their unique key: skipped'),
        ('behind', c.behind, 'behind another one of their ordering key'),
        ('keyed', dlq.count_keyed(v_sample),
         'have an ordering key in the args; live jobs of the key pass them, and sequences of River Pro are left to '
             'River'),
        -- No index has these keys, and the search takes 20 µs for each entry that matches.
        ('behind_job', CASE WHEN v_total <= 20000 THEN dlq.count_behind(v_filter, v_sample) END,
         'behind an earlier job of their ordering key'),
        ('behind_job_not_known', CASE WHEN v_total > 20000 AND dlq.job_key() IS NOT NULL THEN cardinality(v_sample) END,
         'may be behind an earlier job of their ordering key, which is not searched for among more than 20,000 '
             'entries'),
        ('assigned', c.assigned, 'assigned to an operator'),
        ('parked', c.parked, 'parked by an operator'),
        ('in_review', c.in_review, 'in review by an operator'),
        ('ran_long', c.ran_long, 'ran for more than 5 s before they failed'),
        ('ran_not_known', c.ran_not_known, 'it is not known how long the last attempt ran'),
        ('repeated', c.repeated, 'attempted more than once'),
        ('steps_done', c.steps_done, 'completed a step of their resumable jobs')) k (what, hits, detail)
    WHERE k.hits > 0;
    RETURN QUERY
    SELECT h.what, round(v_total * h.entries::numeric / cardinality(v_sample))::bigint, cardinality(v_sample)::bigint,
           CASE h.what WHEN 'answered' THEN 'were answered by the receiver, with an error'
               WHEN 'no_answer' THEN 'got no answer from the receiver, which may have done the work'
               ELSE 'had reached stage ' || h.stage END
    FROM dlq.how_far(v_sample) h;
    RETURN QUERY
    SELECT 'unworked'::text, round(v_total * k.entries::numeric / cardinality(v_sample))::bigint,
           cardinality(v_sample)::bigint, 'no worker seems to know kind ' || k.kind || ': inferred from ' || k.unknown
               || ' of ' || k.entries || ' last attempts'
    FROM dlq.unworked_kinds(v_sample) k;
    SELECT n.* INTO v_ends
    FROM dlq.replay_ends(v_total, ARRAY(SELECT b.seconds FROM dlq.before_replay(v_sample) b), p_rate, p_concurrency,
        NULL, p_progressive) n;
    RETURN QUERY SELECT 'ends'::text, NULL::bigint, cardinality(v_sample)::bigint, CASE WHEN v_ends.not_known IS NULL
        THEN (now() + make_interval(secs => v_ends.earliest)) || ' to '
            || (now() + make_interval(secs => v_ends.latest))
        ELSE 'not known: ' || v_ends.not_known END;
    RETURN QUERY
    SELECT 'subscribers'::text, round(v_total * s.entries::numeric / cardinality(v_sample))::bigint,
           cardinality(v_sample)::bigint,
           'concern ' || CASE WHEN cardinality(v_sample) < v_total THEN 'at least ' ELSE '' END || s.subscribers
               || ' subscribers' || coalesce('; the most ' || (SELECT string_agg(l.value ->> 'subscriberId', ', ')
                   FROM jsonb_array_elements(s.largest) l), '')
    FROM dlq.concerned_subscribers(v_sample) s WHERE s.entries > 0;
    RETURN QUERY
    SELECT CASE WHEN l.queue IS NULL THEN 'destination_load' ELSE 'queue_load' END,
           round(v_total * l.entries::numeric / cardinality(v_sample))::bigint, cardinality(v_sample)::bigint,
           coalesce('queue ' || l.queue, 'failed at destination ' || l.destination) || CASE WHEN p_rate > 0
               THEN ': ' || array_to_string(l.per_second, ', ') || ' per second in each tenth of the run' ELSE '' END
               || CASE WHEN l.queue IS NOT NULL AND dlq.in_patterns(l.queue, NULL, v_scope) THEN '; in the last hour, '
                   || f.redelivered || ' redelivered and ' || f.failures || ' failed; how many succeeded is not known'
               WHEN h.destination IS NULL THEN '; its last hour is not known'
               ELSE '; in the last hour, ' || h.deliveries || ' deliveries, at most ' || h.most_per_second
                   || ' per second; ' || h.failures || ' failed' END
    FROM dlq.sampled_load(v_sample, p_rate) l
    CROSS JOIN LATERAL (SELECT coalesce(sum(r.redelivered), 0) AS redelivered, coalesce(sum(r.failures), 0) AS failures
        FROM dlq.rollup_flow r WHERE r.step = 'minute' AND r.scope = 'queue'
            AND r.bucket >= now() - interval '1 hour' AND r.queue = l.queue) f
    LEFT JOIN LATERAL dlq.destination_hours(ARRAY[l.destination]) h ON l.destination IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.preview_replay IS
    'What a replay run of the entries that match a filter would do, estimated from a random sample of at most 1,000. '
    'Only the total (entries) is exact. Rows count the entries that are in another replay run; are assigned to an '
    'operator, parked or in review; will be skipped because another job has their unique key (live_job); are behind '
    'another one of their ordering key; have run before, and how far; and whose kind no worker seems to know. Other '
    'rows say when the run will have ended (ends), which subscribers the messages concern, and the load of queues and '
    'destinations beside their last hour. SQL knows neither the policy''s staleAfter nor how many messages dlqd '
    'delivers at a time, and of destinations only those of the failed deliveries.';

CREATE OR REPLACE FUNCTION dlq.preview_groups(p_filter jsonb, p_limit integer DEFAULT 200)
RETURNS TABLE (queue text, fingerprint text, entries bigint, tried boolean, expected bigint, recovered bigint,
    failed bigint, recovered_before bigint, failed_before bigint, since timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH cells AS MATERIALIZED (
        SELECT c.queue, c.fingerprint, c.entries, c.sample FROM dlq.count_groups(dlq.replayable(p_filter), 1000) c
    ), sampled AS MATERIALIZED (
        SELECT c.queue, c.fingerprint, i.id FROM cells c CROSS JOIN unnest(c.sample) i (id)
    ), shares AS MATERIALIZED (
        -- The share of the sample that goes, by group, and for the whole sample (queue is null).
        SELECT s.queue, s.fingerprint, count(b.entry_id)::numeric / nullif(count(*), 0) AS goes
        FROM sampled s LEFT JOIN (SELECT b.entry_id FROM dlq.before_replay(ARRAY(SELECT n.id FROM sampled n)) b
                                  WHERE NOT b.live_job) b ON b.entry_id = s.id
        GROUP BY GROUPING SETS ((s.queue, s.fingerprint), ())
    ), groups AS MATERIALIZED (
        SELECT c.queue, c.fingerprint, c.entries, coalesce(s.goes, w.goes, 1) AS goes
        FROM (SELECT c.queue, c.fingerprint, sum(c.entries)::bigint AS entries FROM cells c
              GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT p_limit) c
        LEFT JOIN shares s ON s.queue = c.queue AND s.fingerprint = c.fingerprint
        LEFT JOIN shares w ON w.queue IS NULL
    )
    SELECT g.queue, g.fingerprint, g.entries, o.queue IS NOT NULL,
           -- The mean of a beta-binomial distribution with Jeffreys' prior, as in internal/replay.
           CASE WHEN o.queue IS NOT NULL
               THEN round(g.entries * g.goes * (u.recovered + 0.5) / (u.recovered + u.failed + 1))::bigint END,
           o.recovered, o.failed, o.recovered_before, o.failed_before, o.since
    FROM groups g
    LEFT JOIN dlq.group_outcomes((SELECT array_agg(n.queue) FROM groups n WHERE n.fingerprint <> ''),
        (SELECT array_agg(n.fingerprint) FROM groups n WHERE n.fingerprint <> '')) o
        ON o.queue = g.queue AND o.fingerprint = g.fingerprint
    LEFT JOIN LATERAL (SELECT o.recovered + CASE WHEN few THEN o.recovered_before ELSE 0 END AS recovered,
            o.failed + CASE WHEN few THEN o.failed_before ELSE 0 END AS failed
        FROM (SELECT o.recovered + o.failed < 5 AS few) f) u ON true
    ORDER BY g.entries DESC, g.queue, g.fingerprint
$$;
COMMENT ON FUNCTION dlq.preview_groups IS
    'The expected outcome of a replay of the entries that match a filter, by failure group (the p_limit largest): '
    'the outcomes of earlier redeliveries (dlq.group_outcomes), and how many of the entries that go will recover '
    '(expected). An entry does not go if another job has its unique key; the share is estimated from a random sample '
    'of at most 1,000. tried is false if no replay run has outcomes of the group: it was never tried. The API adds '
    'intervals.';
