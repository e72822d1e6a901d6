-- Functions for operators on River's tables, on which dlqd's roles have no privileges. Their queries are texts that are
-- planned at run time, so no function depends on River's tables or types, which would block River's migrations.

CREATE OR REPLACE FUNCTION dlq.jobs_where(p_filter jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_key   text;
    v_where text := 'true';
    v_scope jsonb;
    v_words constant text := 'ARRAY(SELECT jsonb_array_elements_text(CASE jsonb_typeof($1 -> %1$L) WHEN ''array'' THEN $1 -> %1$L ELSE jsonb_build_array($1 -> %1$L) END))';
BEGIN
    FOR v_key IN SELECT jsonb_object_keys(p_filter) LOOP
        v_where := v_where || ' AND ' || CASE v_key
            WHEN 'ids'     THEN 'j.id = ANY (' || format(v_words, v_key) || '::bigint[])'
            WHEN 'state'   THEN 'j.state = ANY (' || format(v_words, v_key) || '::river.river_job_state[])'
            WHEN 'queue'   THEN 'j.queue = ANY (' || format(v_words, v_key) || ')'
            WHEN 'kind'    THEN 'j.kind = ANY (' || format(v_words, v_key) || ')'
            WHEN 'payload' THEN '(j.args @> jsonb_build_object(''payload'', $1 -> ''payload'') OR j.kind <> ''dlqd_message'' AND j.args @> ($1 -> ''payload''))'
            WHEN 'after'   THEN 'j.finalized_at >= ($1 ->> ''after'')::timestamptz'
            WHEN 'before'  THEN 'j.finalized_at < ($1 ->> ''before'')::timestamptz'
            WHEN 'heldFor' THEN 'j.metadata ->> ''dlq:held'' = $1 ->> ''heldFor'''
            WHEN 'overdue' THEN 'j.state = ''available'' AND j.scheduled_at < now() - ($1 ->> ''overdue'')::interval'
        END;
        IF v_where IS NULL THEN
            RAISE EXCEPTION 'jobs: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'Fields: ids, state, queue, kind, payload, after, before (when the job ended), heldFor, '
                    'overdue.';
        END IF;
    END LOOP;
    v_scope := dlq.scope();
    RETURN v_where || CASE WHEN v_scope IS NULL THEN ''
        ELSE format(' AND dlq.in_scope(j.queue, CASE j.kind WHEN ''dlqd_message'' THEN j.args ->> ''kind'' ELSE j.kind END, %L::jsonb)', v_scope) END;
END
$$;
COMMENT ON FUNCTION dlq.jobs_where IS
    'Returns the SQL condition of a filter of River''s jobs, on a row j with the filter as parameter $1.';

CREATE OR REPLACE FUNCTION dlq.jobs(p_filter jsonb DEFAULT '{}', p_limit integer DEFAULT 100)
RETURNS TABLE (id bigint, state text, queue text, kind text, attempt integer, attempted_by text[], held_for text,
    created_at timestamptz, scheduled_at timestamptz, attempted_at timestamptz, finalized_at timestamptz, args jsonb)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    RETURN QUERY EXECUTE 'SELECT j.id, j.state::text, j.queue::text, j.kind::text, j.attempt::integer, j.attempted_by::text[], j.metadata ->> ''dlq:held'', j.created_at, j.scheduled_at, j.attempted_at, j.finalized_at,
            dlq.masked_event(j.args, j.kind, $3)
        FROM river.river_job j WHERE ' || dlq.jobs_where(p_filter) || ' ORDER BY j.id DESC LIMIT $2' USING p_filter,
            p_limit, dlq.mask(false);
END
$$;
COMMENT ON FUNCTION dlq.jobs IS
    'River''s jobs that match a filter, newest first: {"ids": [7], "state": "running", "queue", "kind", '
    '"payload": {"customer": "cus_81"}, "after", "before" (when they ended), "heldFor": "breaker", "overdue": '
    '"1 hour"}.';

-- For each of River's four priorities, list_jobs reads one range of River's index of (state, queue, priority,
-- scheduled_at, id), so that a page costs the same for any number of jobs. A caller who may see only some kinds of the
-- queue gets the matching jobs among the next 1,000.
CREATE OR REPLACE FUNCTION dlq.list_jobs(p_queue text, p_state text, p_limit integer, p_at timestamptz DEFAULT NULL,
    p_id bigint DEFAULT NULL) RETURNS TABLE (id bigint, at timestamptz, visible boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    v_scope constant jsonb := dlq.scope();
    v_whole constant boolean := dlq.in_scope(p_queue, NULL, v_scope);
    v_some  constant boolean := v_scope IS NULL OR dlq.in_scope(p_queue, NULL,
        coalesce((SELECT jsonb_agg(g - 'kinds') FROM jsonb_array_elements(v_scope) g), '[]'));
    v_down  constant boolean := p_state IN ('cancelled', 'completed', 'discarded');
BEGIN
    IF NOT v_some THEN -- the caller sees no kind of the queue: the place of a job would tell that it exists
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT w.id, w.scheduled_at, CASE WHEN $6 THEN true
             ELSE dlq.in_scope($1, CASE w.kind WHEN ''dlqd_message'' THEN w.args ->> ''kind'' ELSE w.kind END, $7) END
         FROM (SELECT j.* FROM generate_series(1, 4) p (priority)
               CROSS JOIN LATERAL (SELECT j.id, j.scheduled_at, j.kind, j.args FROM river.river_job j
                   WHERE j.state = $2::river.river_job_state AND j.queue = $1 AND j.priority = p.priority
                       AND (j.scheduled_at, j.id) %1$s ($4, $5)
                   ORDER BY j.scheduled_at %2$s, j.id %2$s LIMIT $3) j
               ORDER BY j.scheduled_at %2$s, j.id %2$s LIMIT $3) w
         ORDER BY w.scheduled_at %2$s, w.id %2$s',
        CASE WHEN v_down THEN '<' ELSE '>' END, CASE WHEN v_down THEN 'DESC' ELSE 'ASC' END)
        USING p_queue, p_state, CASE WHEN v_whole THEN p_limit ELSE greatest(p_limit, 1000) END,
            coalesce(p_at, CASE WHEN v_down THEN 'infinity'::timestamptz ELSE '-infinity' END),
            coalesce(p_id, CASE WHEN v_down THEN 9223372036854775807 ELSE 0 END), v_whole, v_scope;
END
$$;
COMMENT ON FUNCTION dlq.list_jobs IS
    'The ids of River''s jobs of a queue in a state, after the job with p_at and p_id, and whether the caller may '
    'see each: those that wait or run by the time of their next attempt, the earliest first; those that ended '
    'the latest first.';

CREATE OR REPLACE FUNCTION dlq.show_jobs(p_ids bigint[], p_all boolean DEFAULT true)
RETURNS TABLE (id bigint, state text, queue text, kind text, message_id text, priority integer, attempt integer,
    max_attempts integer, created_at timestamptz, scheduled_at timestamptz, attempted_at timestamptz,
    finalized_at timestamptz, attempted_by text, held_for text, cancelling boolean, entry_id uuid, errors jsonb,
    args jsonb)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off SET enable_seqscan = off
SET jit = off AS $$
DECLARE
    v_scope  constant jsonb := dlq.scope();
    v_mask   constant jsonb := dlq.mask();
    v_hidden constant text[] := dlq.hidden_columns();
BEGIN
    RETURN QUERY SELECT j.id, j.state::text, j.queue::text, k.kind, CASE j.kind WHEN 'dlqd_message'
            THEN j.args ->> 'messageId' END, j.priority::integer, j.attempt::integer, j.max_attempts::integer,
        j.created_at, j.scheduled_at, j.attempted_at, nullif(j.finalized_at, 'infinity'),
        j.attempted_by[cardinality(j.attempted_by)]::text,
        CASE WHEN j.state = 'scheduled' THEN j.metadata ->> 'dlq:held' END, j.metadata ? 'cancel_attempted_at',
        dlq.to_uuid(j.metadata ->> 'dlq:entry_id'), e.errors,
        CASE WHEN p_all AND NOT 'original_event' = ANY (v_hidden) THEN dlq.masked_event(j.args, j.kind, v_mask) END
    FROM river.river_job j
    CROSS JOIN LATERAL (SELECT CASE j.kind WHEN 'dlqd_message' THEN j.args ->> 'kind' ELSE j.kind END AS kind) k
    CROSS JOIN LATERAL (
        SELECT jsonb_agg(jsonb_build_object('at', dlq.to_timestamptz(f.failure ->> 'at'),
            'attempt', CASE jsonb_typeof(f.failure -> 'attempt') WHEN 'number' THEN f.failure -> 'attempt' ELSE '0' END,
            'error',
            dlq.masked_text(f.failure ->> 'error', v_mask,
                dlq.sensitive_values(j.args, NULL, j.metadata, j.kind, v_mask))) ORDER BY f.place) AS errors
        FROM unnest(j.errors) WITH ORDINALITY f (failure, place)
        WHERE NOT v_hidden && '{error_message,retry_history}' AND (p_all OR f.place = cardinality(j.errors))) e
    WHERE j.id = ANY (p_ids) AND dlq.in_scope(j.queue, k.kind, v_scope);
END
$$;
COMMENT ON FUNCTION dlq.show_jobs IS
    'River''s jobs with these ids in the caller''s scope, masked as entries are: p_all with args and every error, '
    'otherwise with the last error only.';

-- queue_flow reads the last 3,000 rows of river_job by the primary key. For each queue and each of River's four
-- priorities, it also reads one row and at most 300 rows of the index that list_jobs reads. So it costs the same for
-- any number of jobs.
CREATE OR REPLACE FUNCTION dlq.queue_flow(p_queues text[])
RETURNS TABLE (queue text, oldest_ready timestamptz, completed bigint, since timestamptz, inserted bigint,
    inserted_since timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY EXECUTE
        'WITH latest AS (
             SELECT j.queue, j.created_at FROM river.river_job j ORDER BY j.id DESC LIMIT 3000
         ), whole AS (
             SELECT greatest(now() - interval ''10 minutes'', CASE count(*) WHEN 3000 THEN min(l.created_at) END) AS since
             FROM latest l
         )
         SELECT q.queue, o.at, c.jobs, CASE WHEN c.jobs = 300 THEN c.since ELSE now() - interval ''10 minutes'' END,
             (SELECT count(*) FROM latest l WHERE l.queue = q.queue AND l.created_at >= w.since), w.since
         FROM unnest($1) q (queue)
         CROSS JOIN whole w
         CROSS JOIN LATERAL (
             SELECT min(f.scheduled_at) AS at FROM generate_series(1, 4) p (priority)
             CROSS JOIN LATERAL (SELECT j.scheduled_at FROM river.river_job j
                 WHERE j.state = ''available'' AND j.queue = q.queue AND j.priority = p.priority
                 ORDER BY j.scheduled_at, j.id LIMIT 1) f) o
         CROSS JOIN LATERAL (
             SELECT count(*) AS jobs, min(l.scheduled_at) AS since FROM (
                 SELECT f.scheduled_at FROM generate_series(1, 4) p (priority)
                 CROSS JOIN LATERAL (SELECT j.scheduled_at FROM river.river_job j
                     WHERE j.state = ''completed'' AND j.queue = q.queue AND j.priority = p.priority
                         AND j.scheduled_at > now() - interval ''10 minutes'' AND j.scheduled_at < now()
                     ORDER BY j.scheduled_at DESC, j.id DESC LIMIT 300) f
                 ORDER BY f.scheduled_at DESC LIMIT 300) l) c
         WHERE dlq.in_scope(q.queue, NULL, dlq.scope())' USING p_queues;
END
$$;
COMMENT ON FUNCTION dlq.queue_flow IS
    'For each queue, when its oldest ready job became ready, the jobs that were due since a time and completed (in ten '
    'minutes, or the last 300), and the jobs that were inserted since a time (in ten minutes, or among the last 3,000 of '
    'all queues).';

CREATE OR REPLACE FUNCTION dlq.count_jobs(p_filter jsonb DEFAULT '{}')
RETURNS TABLE (state text, queue text, jobs bigint, first_scheduled timestamptz, last_attempted timestamptz,
    first_ended timestamptz, last_ended timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    RETURN QUERY EXECUTE 'SELECT j.state::text, j.queue::text, count(*), min(j.scheduled_at), max(j.attempted_at), min(j.finalized_at), max(j.finalized_at)
        FROM river.river_job j WHERE ' || dlq.jobs_where(p_filter) || ' GROUP BY j.state, j.queue ORDER BY 3 DESC, 1, 2'
            USING p_filter;
END
$$;
COMMENT ON FUNCTION dlq.count_jobs IS
    'The number of River''s jobs that match a filter (see dlq.jobs), by state and queue.';

CREATE OR REPLACE FUNCTION dlq.river_leader() RETURNS TABLE (leader_id text, elected_at timestamptz, alive boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    RETURN QUERY EXECUTE 'SELECT l.leader_id::text, l.elected_at, l.expires_at > now() FROM river.river_leader l';
END
$$;
COMMENT ON FUNCTION dlq.river_leader IS
    'The River client that is the leader, and whether it is alive. Without a leader no jobs are scheduled, '
    'rescued or cleaned.';

CREATE OR REPLACE FUNCTION dlq.paused_queues() RETURNS TABLE (queue text, paused_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    RETURN QUERY EXECUTE 'SELECT q.name::text, q.paused_at FROM river.river_queue q WHERE q.paused_at IS NOT NULL AND dlq.in_scope(q.name, NULL, dlq.scope()) ORDER BY 1';
END
$$;
COMMENT ON FUNCTION dlq.paused_queues IS 'Queues that are paused.';

-- run_again skips redeliveries of entries, jobs that dlqd itself completed, and jobs that were run again with the same
-- note. If a job was run again with another note, run_again skips the job and takes its copy once the copy has
-- completed, because the copy did the work last. It discards checkpoints of resumable jobs, which River keeps after a
-- failed attempt, so that the new job repeats all steps.
CREATE OR REPLACE FUNCTION dlq.run_again(p_since timestamptz, p_note text, p_queue text DEFAULT NULL,
    p_limit integer DEFAULT 1000, p_actor text DEFAULT session_user) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_count integer;
BEGIN
    IF coalesce(p_note, '') = '' THEN
        RAISE EXCEPTION 'run again: a note is required' USING ERRCODE = 'DLQ04',
            HINT = 'A job is run again only once with the same note.';
    END IF;
    EXECUTE 'WITH originals AS (
            SELECT j.* FROM river.river_job j
            WHERE j.state = ''completed'' AND j.finalized_at >= $1 AND ($2 IS NULL OR j.queue = $2) AND '
                || dlq.jobs_where('{}') || ' AND NOT j.metadata ?| ''{dlq:entry_id,dlq:done_by,dlq:copied}'' AND j.metadata ->> ''dlq:run_again'' IS DISTINCT FROM $4
            ORDER BY j.finalized_at, j.id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
        ), marked AS (
            UPDATE river.river_job j SET metadata = j.metadata || jsonb_build_object(''dlq:run_again'', $4, ''dlq:copied'', CASE WHEN j.metadata ? ''dlq:run_again'' THEN ''"copy"'' ELSE ''true'' END::jsonb) FROM originals WHERE j.id = originals.id
        ), copies AS (
            INSERT INTO river.river_job (args, kind, max_attempts, metadata, priority, queue, tags, state)
            SELECT a.args, a.kind, a.max_attempts, dlq.carried_metadata(a.metadata, ''discard'') || jsonb_build_object(''dlq:run_again'', $4), a.priority, a.queue, a.tags, ''available'' FROM originals a ORDER BY a.finalized_at, a.id
            RETURNING id, created_at, kind, queue, args
        ), ordered AS (
            -- Jobs of one ordering key run in the order in which they ended. In an unordered queue nothing reads the
            -- row; dlq.forget_ordered deletes it when the work is done.
            INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
            SELECT q.queue, q.args ->> ''orderingKey'', q.id, q.created_at FROM copies q WHERE q.kind = ''dlqd_message'' AND q.args ->> ''orderingKey'' IS NOT NULL ORDER BY q.id
        ) SELECT count(*)::integer FROM copies' INTO v_count USING p_since, p_queue, p_limit, p_note;
    PERFORM dlq.record_act('completed jobs', 'run again', p_actor, p_note,
        jsonb_build_object('since', p_since, 'queue', p_queue, 'jobs', v_count));
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.run_again IS
    'Runs up to p_limit jobs again that completed since p_since and that River still keeps, as new jobs, in the '
    'order in which they ended. A note is required. With the same note each job is run again only once: repeat the '
    'call until it returns 0.';

CREATE OR REPLACE FUNCTION dlq.delete_jobs(p_payload jsonb, p_note text, p_actor text DEFAULT session_user)
    RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM dlq.require_admin('delete jobs');
    PERFORM dlq.require_everything('delete jobs');
    IF dlq.chooses_all(jsonb_build_object('payload', p_payload)) THEN
        RAISE EXCEPTION 'delete jobs: an empty payload matches the jobs of every person' USING ERRCODE = 'DLQ04';
    END IF;
    EXECUTE 'DELETE FROM river.river_job d WHERE d.id IN (
            SELECT j.id FROM river.river_job j WHERE j.finalized_at IS NOT NULL AND '
                || dlq.jobs_where(jsonb_build_object('payload', p_payload)) || ' FOR UPDATE SKIP LOCKED)
            AND NOT EXISTS (
                SELECT FROM dlq.dead_letter_queue e
                WHERE e.river_job_id = d.id AND e.job_created_at = d.created_at AND e.stage IN (''inbox'', ''open''))'
        USING jsonb_build_object('payload', p_payload);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    PERFORM dlq.record_act('jobs that ended', 'deleted', p_actor, p_note, jsonb_build_object('jobs', v_count));
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.delete_jobs IS
    'Deletes River''s jobs that have ended, have no open dead letter, and whose payload contains p_payload. '
    'Returns how many.';

CREATE OR REPLACE FUNCTION dlq.default_partition_rows() RETURNS TABLE (partition text, entries bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_everything('default partitions');
    RETURN QUERY SELECT 'resolved', count(*) FROM (SELECT FROM dlq.dead_letter_resolved_default LIMIT 10000) d
    UNION ALL SELECT 'failed', count(*) FROM (SELECT FROM dlq.dead_letter_failed_default LIMIT 10000) d
    UNION ALL SELECT 'archived', count(*) FROM (SELECT FROM dlq.dead_letter_archived_default LIMIT 10000) d
    UNION ALL SELECT 'audit trail', count(*) FROM (SELECT FROM dlq.dead_letter_transitions_default LIMIT 10000) d;
END
$$;
COMMENT ON FUNCTION dlq.default_partition_rows IS
    'The number of rows in default partitions, which hold rows of months without a partition; counts at most '
    '10,000 each.';
