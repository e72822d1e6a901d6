-- Filing makes an entry from a failure in the inbox: it moves the row to the open partition, describes the failure, and
-- writes an audit row. DLQ workers file and decide (class, strategy, time) in one step. An operation on an entry that
-- is still in the inbox first files it without a decision.

-- describe_failure describes a failure from the errors and metadata of its job. An application may
-- have left any JSON there, so the code is in one block that catches every error: a poorly
-- described entry is better than one that cannot be filed. The block writes nothing, so it costs no
-- subtransaction id. The function runs once per failure, so where possible it uses plain
-- assignments, which PL/pgSQL evaluates without a query.
CREATE OR REPLACE FUNCTION dlq.describe_failure(p_errors jsonb, p_metadata jsonb, p_attempt integer,
    p_failed_at timestamptz,
    OUT error_message text, OUT error_type text, OUT error_code text, OUT error_title text, OUT error_class text,
    OUT destination text, OUT destination_url text, OUT error_stack_trace text, OUT error_context jsonb,
        OUT retry_history jsonb,
    OUT first_failed_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_errors   jsonb := CASE jsonb_typeof(p_errors) WHEN 'array' THEN p_errors ELSE '[]' END;
    v_count    integer := jsonb_array_length(v_errors);
    v_last     jsonb := v_errors -> -1;
    v_reported jsonb := p_metadata -> 'dlq:error';
    v_started  text;
    v_time     timestamptz;
BEGIN
    retry_history := '[]';
    BEGIN
        error_message := v_last ->> 'error';
        error_stack_trace := nullif(v_last ->> 'trace', '');
        IF error_message LIKE 'JobCancelError: %' THEN
            error_message := substr(error_message, length('JobCancelError: ') + 1);
        END IF;
        IF error_stack_trace IS NOT NULL THEN
            error_type := 'panic';
        END IF;
        -- The reported error stays in the metadata during later attempts, so it counts only if the
        -- last attempt wrote it.
        IF v_reported -> 'attempt' = coalesce(v_last -> 'attempt', to_jsonb(p_attempt)) THEN
            error_message := coalesce(v_reported ->> 'message', error_message);
            error_type := coalesce(left(v_reported ->> 'type', 255), error_type);
            error_code := left(v_reported ->> 'code', 255);
            error_title := left(v_reported ->> 'title', 1000);
            error_context := nullif(v_reported -> 'context', 'null');
            -- Deliveries record a destination. An application may record one, too.
            IF jsonb_typeof(error_context -> 'destination') = 'string' THEN
                destination := left(error_context ->> 'destination', 255);
                IF jsonb_typeof(error_context -> 'url') = 'string' THEN
                    destination_url := left(error_context ->> 'url', 2000);
                END IF;
            END IF;
            IF v_reported ->> 'class' IN ('transient', 'rate_limited', 'outage', 'validation', 'malformed',
                'unauthorized',
                                      'not_found', 'business', 'code_bug', 'unknown') THEN
                error_class := v_reported ->> 'class';
            END IF;
        END IF;

        IF v_count > 1 THEN
            v_time := dlq.to_timestamptz(v_errors -> 0 ->> 'at');
            IF v_time BETWEEN '1970-01-01Z' AND p_failed_at THEN
                first_failed_at := v_time;
            END IF;
        END IF;
        IF v_count > 0 AND pg_column_size(v_errors) <= 4000 THEN
            retry_history := v_errors;
        ELSIF v_count > 0 THEN
            SELECT jsonb_agg(jsonb_build_object('at', e -> 'at', 'attempt', e -> 'attempt', 'error',
                left(e ->> 'error', 4000)))
            INTO retry_history FROM jsonb_array_elements(v_errors) e;
        END IF;
        -- Durations and system state come from the worker's report of each attempt (riverdlq). Without a report, the
        -- duration of the last attempt is finalized_at minus the start that River recorded. Errors of the rescuer are
        -- excluded, because their time is the time of the rescue.
        IF p_metadata ? 'dlq:attempts' THEN
            retry_history := dlq.with_attempts(retry_history, p_metadata -> 'dlq:attempts');
            v_last := retry_history -> -1;
        END IF;
        -- An invalid time raises an error here, after everything else has been described. dlq.to_timestamptz would
        -- avoid the error but cost a subtransaction.
        v_started := v_last ->> 'at';
        IF v_started LIKE '____-__-__T__:__:__%' AND NOT v_last ? 'processingDuration'
           AND v_last ->> 'error' NOT LIKE 'Stuck job rescued by %' THEN
            v_time := v_started;
            IF v_time <= p_failed_at THEN
                retry_history := jsonb_set(retry_history, '{-1,processingDuration}',
                    to_jsonb(extract(epoch FROM p_failed_at - v_time)));
            END IF;
        END IF;
    EXCEPTION WHEN OTHERS THEN
        error_context := jsonb_build_object('captureError', SQLERRM);
    END;
    first_failed_at := coalesce(first_failed_at, p_failed_at);
    error_message := coalesce(nullif(error_message, ''), 'the job ended without an error');
END
$$;
COMMENT ON FUNCTION dlq.describe_failure IS
    'Describes the failure of a job from its errors and metadata: from the structured error of its '
    'last attempt (metadata key dlq:error), or else from the last error that River keeps. Never '
    'raises.';

CREATE OR REPLACE FUNCTION dlq.with_attempts(p_history jsonb, p_attempts jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    SELECT coalesce(jsonb_agg(
        CASE WHEN jsonb_typeof(h.failed) = 'object' THEN h.failed || jsonb_strip_nulls(jsonb_build_object(
            'processingDuration', CASE jsonb_typeof(a.report -> 'seconds') WHEN 'number' THEN a.report -> 'seconds' END,
            'systemState', CASE WHEN jsonb_typeof(a.report #> '{system,cpu}') = 'number'
                                 AND jsonb_typeof(a.report #> '{system,memory}') = 'number'
                THEN jsonb_build_object('cpu', a.report #> '{system,cpu}', 'memory',
                    a.report #> '{system,memory}') END))
        ELSE h.failed END ORDER BY h.number), '[]')
    FROM jsonb_array_elements(p_history) WITH ORDINALITY h (failed, number)
    CROSS JOIN LATERAL (SELECT p_attempts -> (h.failed ->> 'attempt')) a (report));
COMMENT ON FUNCTION dlq.with_attempts IS
    'A retry history, completed by a worker''s report of its attempts (metadata key dlq:attempts, '
    'by attempt number): processingDuration in seconds, and systemState.';

-- The next four functions limit how much of an entry rules and fingerprints read. Postgres inlines them into queries;
-- for that, the functions that cast jsonb to text have to be STABLE. They first compare pg_column_size, which does not
-- decompress the column, so that only values within the limit are converted to text.
CREATE OR REPLACE FUNCTION dlq.judged_message(p_message text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN left(p_message, 8192);
COMMENT ON FUNCTION dlq.judged_message IS 'The part of an error message that rules read: its first 8,192 characters.';

CREATE OR REPLACE FUNCTION dlq.judged_context(p_context jsonb) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(p_context) <= 65536 AND octet_length(p_context::text) <= 65536 THEN p_context END;
COMMENT ON FUNCTION dlq.judged_context IS 'The context of an error as rules read it: null if it is larger than 64 KiB.';

CREATE OR REPLACE FUNCTION dlq.judged_event(p_event jsonb) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(p_event) <= 262144
    AND octet_length(p_event::text) <= CASE WHEN p_event ? 'payloadText' THEN 262144 ELSE 131072 END THEN p_event END;
COMMENT ON FUNCTION dlq.judged_event IS
    'A message as rules read it: null if it is larger than 128 KiB, or than 256 KiB if it has its payload twice '
    '(payloadText).';

CREATE OR REPLACE FUNCTION dlq.trace_ends(p_trace text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN octet_length(p_trace) <= 16384 THEN p_trace ELSE left(p_trace, 8192) || E'\n…\n'
    || right(p_trace, 8192) END;
COMMENT ON FUNCTION dlq.trace_ends IS
    'The part of a stack trace that goes into a fingerprint: its first and last 8,192 characters. '
    'The innermost frame may be at either end.';

CREATE OR REPLACE FUNCTION dlq.filed(p_entry dlq.dead_letter_queue) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_fail record := dlq.describe_failure(p_entry.retry_history, p_entry.metadata, p_entry.retry_count,
        p_entry.last_failed_at);
BEGIN
    p_entry.error_message := v_fail.error_message;
    p_entry.error_type := v_fail.error_type;
    p_entry.error_code := v_fail.error_code;
    p_entry.error_title := v_fail.error_title;
    p_entry.destination := v_fail.destination;
    p_entry.destination_url := v_fail.destination_url;
    p_entry.error_class := v_fail.error_class;
    p_entry.reported_class := v_fail.error_class;
    p_entry.error_stack_trace := v_fail.error_stack_trace;
    p_entry.error_context := v_fail.error_context;
    p_entry.retry_history := v_fail.retry_history;
    p_entry.first_failed_at := v_fail.first_failed_at;
    -- River's column allows NULL elements and nested arrays. An entry gets a flat list without NULL.
    p_entry.tags := ARRAY(SELECT t FROM unnest(p_entry.tags) t WHERE t IS NOT NULL);
    p_entry.next_retry_at := coalesce(p_entry.next_retry_at, now());
    p_entry.filed_at := clock_timestamp();
    p_entry.stage := 'open';
    RETURN p_entry;
END
$$;
COMMENT ON FUNCTION dlq.filed(dlq.dead_letter_queue) IS
    'A row of the inbox as it is filed: described, not yet decided.';

-- Columns that the caller's UPDATE has set keep their new values.
CREATE OR REPLACE FUNCTION dlq.filed(p_new dlq.dead_letter_queue, p_raw dlq.dead_letter_queue,
    p_filed dlq.dead_letter_queue) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    p_new.error_message := CASE WHEN p_new.error_message IS DISTINCT FROM p_raw.error_message THEN p_new.error_message
        ELSE p_filed.error_message END;
    p_new.error_type := coalesce(p_new.error_type, p_filed.error_type);
    p_new.error_code := coalesce(p_new.error_code, p_filed.error_code);
    p_new.error_title := coalesce(p_new.error_title, p_filed.error_title);
    p_new.destination := coalesce(p_new.destination, p_filed.destination);
    p_new.destination_url := coalesce(p_new.destination_url, p_filed.destination_url);
    p_new.error_class := coalesce(p_new.error_class, p_filed.error_class);
    p_new.reported_class := coalesce(p_new.reported_class, p_filed.reported_class);
    p_new.error_stack_trace := coalesce(p_new.error_stack_trace, p_filed.error_stack_trace);
    p_new.error_context := coalesce(p_new.error_context, p_filed.error_context);
    p_new.retry_history := CASE WHEN p_new.retry_history IS DISTINCT FROM p_raw.retry_history THEN p_new.retry_history
        ELSE p_filed.retry_history END;
    p_new.first_failed_at := CASE WHEN p_new.first_failed_at IS DISTINCT FROM p_raw.first_failed_at
        THEN p_new.first_failed_at ELSE p_filed.first_failed_at END;
    p_new.tags := CASE WHEN p_new.tags IS DISTINCT FROM p_raw.tags THEN p_new.tags ELSE p_filed.tags END;
    p_new.next_retry_at := coalesce(p_new.next_retry_at, p_filed.next_retry_at);
    p_new.filed_at := p_filed.filed_at;
    p_new.stage := p_filed.stage;
    RETURN p_new;
END
$$;
COMMENT ON FUNCTION dlq.filed(dlq.dead_letter_queue, dlq.dead_letter_queue, dlq.dead_letter_queue) IS
    'A row of the inbox that an UPDATE changes to p_new, as it is filed. p_raw is the row before '
    'the UPDATE; p_filed is p_raw as it is filed.';

CREATE OR REPLACE FUNCTION dlq.audit_capture(p_entry dlq.dead_letter_queue) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, reason, next_retry_at, river_job_id, queue,
        kind, error_class, error_type, failed_at, source, attempts)
    VALUES (p_entry.id, 'dlq_pending', p_entry.captured_by,
        CASE WHEN p_entry.river_job_id < 0 THEN 'a record failed' ELSE 'job ' || p_entry.river_job_id || ' failed' END,
        p_entry.next_retry_at, p_entry.river_job_id, p_entry.queue, p_entry.kind,
            p_entry.error_class, coalesce(p_entry.error_type, ''), p_entry.last_failed_at, p_entry.source,
                p_entry.retry_count);
END
$$;
COMMENT ON FUNCTION dlq.audit_capture IS 'Writes the audit row of an entry that is filed undecided.';

CREATE OR REPLACE FUNCTION dlq.failure_of(p_job bigint, p_end jsonb) RETURNS uuid
LANGUAGE sql STABLE
RETURN coalesce(dlq.to_uuid(p_end ->> 'failure'), dlq.entry_id(p_job, dlq.to_timestamptz(p_end ->> 'finalized_at')));
COMMENT ON FUNCTION dlq.failure_of IS
    'The id of a failure, from the end of a job in the form of dlq.job_facts.job, or as to_jsonb of '
    'the job''s row.';

-- known_failure alone decides whether dlqd already has a failure of a job. A failure has an id and an attempt. The
-- id is made from the job's id and its finalized_at (dlq.entry_id), and becomes the id of the failure's entry.
--   - If finalized_at is a valid past time, the id alone identifies the failure: River's clients write
--     microseconds.
--   - If finalized_at is "infinity" or in the future, the job's next failure may have the same finalized_at, so the
--     attempt has to be the same, too.
--
-- If an entry has the failure's id, the failure is known. dlq.retired_jobs contains the failures that no entry's id
-- identifies: failures recorded in an entry with another id, failures without a valid time (dlq.take_failure), and
-- failures of deleted entries.
--
-- The function has no SET clause and is one SELECT, so that Postgres inlines it in FROM. It uses subqueries that
-- return one value instead of UNION: Postgres then prunes, at run time, partitions that closed before the failure,
-- and skips the remaining subqueries once one has found the failure.
CREATE OR REPLACE FUNCTION dlq.known_failure(p_job bigint, p_created_at timestamptz, p_failure uuid, p_attempt integer,
    p_finalized_at timestamptz)
RETURNS TABLE (known text)
LANGUAGE sql STABLE ROWS 1
BEGIN ATOMIC
    SELECT coalesce(
        CASE WHEN p_finalized_at BETWEEN '1970-01-01Z' AND now() + interval '1 day' THEN coalesce(
            (SELECT 'entry' FROM dlq.dead_letter_queue e WHERE e.stage = 'open' AND e.id = p_failure LIMIT 1),
            -- An entry closes after its failure, so Postgres prunes partitions of earlier months. One day is subtracted
            -- because clocks differ.
            (SELECT 'entry' FROM dlq.dead_letter_queue e
             WHERE e.stage IN ('resolved', 'failed', 'archived') AND e.id = p_failure
                 AND e.closed_at >= p_finalized_at - interval '1 day' LIMIT 1)) END,
        (SELECT 'entry' FROM dlq.retired_jobs r
         WHERE r.job_id = p_job AND r.job_created_at = p_created_at
           AND (r.failure = p_failure
               AND (r.attempt = p_attempt OR p_finalized_at BETWEEN '1970-01-01Z' AND now() + interval '1 day')
                -- Rows from before schema version 9 have no failure id.
                OR r.failure = '00000000-0000-0000-0000-000000000000' AND r.at >= p_finalized_at) LIMIT 1),
        -- The failure of a redelivery belongs to the entry that it redelivers.
        (SELECT 'redelivery' FROM dlq.entry_jobs k
         WHERE k.job_id = p_job AND k.job_created_at = p_created_at
           AND (SELECT 1 FROM dlq.dead_letter_queue e WHERE e.id = k.entry_id AND e.river_job_id = p_job
               AND e.job_created_at = p_created_at LIMIT 1) IS NULL),
        (SELECT 'waits' FROM dlq.dead_letter_queue e
         WHERE e.stage = 'inbox' AND e.id = p_failure
           AND (p_finalized_at BETWEEN '1970-01-01Z' AND now() + interval '1 day' OR e.job_created_at = p_created_at
               AND e.retry_count = p_attempt) LIMIT 1),
        (SELECT 'waits' FROM dlq.job_facts f
         WHERE f.job_id = p_job AND f.job_created_at = p_created_at
           AND CASE f.fact WHEN 'refused' THEN f.job ->> 'fact' ELSE f.fact END IN ('discarded', 'cancelled')
           AND dlq.failure_of(p_job, f.job) = p_failure
           AND (p_finalized_at BETWEEN '1970-01-01Z' AND now() + interval '1 day'
               OR f.job -> 'attempt' = to_jsonb(p_attempt)) LIMIT 1),
        -- An entry in dlq_processing waits for the end of this job, which is the entry's own job: the sweep will apply
        -- the end. The cast of status makes the planner use the index by job.
        (SELECT 'waits' FROM dlq.dead_letter_queue e
         WHERE e.stage = 'open' AND e.river_job_id = p_job AND e.job_created_at = p_created_at
             AND e.redelivery_job_id = p_job AND e.status::text = 'dlq_processing')
    )::text;
END;
COMMENT ON FUNCTION dlq.known_failure IS
    'Whether a failure of a job is known, and how: entry (it is recorded in an entry, which may have '
    'been deleted since), redelivery (it belongs to the entry that the job redelivers), waits (it is '
    'in the inbox or a fact, or the sweep will find it). Null if it is unknown. p_failure is '
    'dlq.entry_id() of the job and p_finalized_at.';

-- As in dlq.to_be_filed, a generic plan is made once per session, because a custom plan takes milliseconds each time.
CREATE OR REPLACE FUNCTION dlq.is_taken(p_job bigint, p_created_at timestamptz, p_failure uuid, p_attempt integer,
    p_failed_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    -- p_failure is made from finalized_at. If it does not match p_failed_at, finalized_at was not a valid time, and
    -- p_failed_at is the time at which capture recorded the failure.
    RETURN EXISTS (SELECT FROM dlq.known_failure(p_job, p_created_at, p_failure, p_attempt,
        CASE WHEN p_failure = dlq.entry_id(p_job, p_failed_at) THEN p_failed_at ELSE 'infinity' END) k
                   WHERE k.known = 'entry');
END
$$;
COMMENT ON FUNCTION dlq.is_taken IS
    'Whether a failure is or was recorded in an entry. That entry may have been deleted since.';

CREATE OR REPLACE FUNCTION dlq.take_failure(p_job bigint, p_created_at timestamptz, p_failure uuid, p_attempt integer,
    p_entry uuid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    INSERT INTO dlq.retired_jobs (job_id, job_created_at, failure, attempt, entry_id, at)
    VALUES (p_job, p_created_at, p_failure, coalesce(p_attempt, 0), p_entry, clock_timestamp())
    ON CONFLICT DO NOTHING;
END
$$;
COMMENT ON FUNCTION dlq.take_failure IS
    'Writes to dlq.retired_jobs that a failure is recorded in an entry. Needed if the id of the entry '
    'does not identify the failure: the ids differ, or the failure has no valid time.';

CREATE OR REPLACE FUNCTION dlq.may_be_filed(p_id uuid, p_job bigint, p_created_at timestamptz, p_attempt integer,
    p_failed_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN NOT dlq.is_taken(p_job, p_created_at, p_id, p_attempt, p_failed_at)
       AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.stage IN ('open', 'resolved', 'failed', 'archived')
           AND e.id = p_id);
END
$$;
COMMENT ON FUNCTION dlq.may_be_filed IS
    'Whether a row of the inbox can become an entry: its failure is recorded in no entry, and no '
    'entry of another failure has its id.';

-- to_be_filed is may_be_filed for a batch. file_as calls it once, and only if the batch has rows
-- that need the check. Planning its query takes milliseconds, because the plan has all partitions,
-- so one query checks the whole batch. At run time, Postgres prunes partitions that closed before
-- the failure: before the time in the id (1970 if the id has none), or before now() if that time is
-- in the future.
CREATE OR REPLACE FUNCTION dlq.to_be_filed(p_ids uuid[]) RETURNS SETOF tid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
    SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
        SELECT i.ctid FROM dlq.dead_letter_inbox i
        -- The id is made from finalized_at. If it does not match last_failed_at, finalized_at was not a valid time, and
        -- last_failed_at is the time at which capture recorded the failure.
        CROSS JOIN LATERAL (SELECT CASE WHEN i.id = dlq.entry_id(i.river_job_id, i.last_failed_at)
            THEN i.last_failed_at ELSE 'infinity' END AS finalized_at) f
        WHERE i.id = ANY (p_ids)
          AND (i.captured_by <> 'capture' OR f.finalized_at = 'infinity'
               OR (SELECT r.job_id FROM dlq.retired_jobs r WHERE r.job_id = i.river_job_id
                   AND r.job_created_at = i.job_created_at LIMIT 1) IS NOT NULL)
          AND (SELECT k.known FROM dlq.known_failure(i.river_job_id, i.job_created_at, i.id, i.retry_count,
              f.finalized_at) k) IS DISTINCT FROM 'entry'
          AND (SELECT 1 FROM dlq.dead_letter_queue e WHERE e.stage = 'open' AND e.id = i.id LIMIT 1) IS NULL
          AND (SELECT 1 FROM dlq.dead_letter_queue e
               WHERE e.stage IN ('resolved', 'failed', 'archived') AND e.id = i.id
                   AND e.closed_at >= least(dlq.captured_at(i.id), now()) - interval '1 day' LIMIT 1) IS NULL;
END
$$;
COMMENT ON FUNCTION dlq.to_be_filed IS
    'The ctids of those inbox rows with these ids that dlq.file_as cannot file without a check, and '
    'that can become entries (dlq.may_be_filed): rows that are not from capture, have no valid time '
    'of failure, or belong to a job in dlq.retired_jobs.';

-- file_as files rows of the inbox: in one statement it inserts them into the open partition,
-- deletes them from the inbox and writes their audit rows. The arrays of decisions are in the order
-- of p_ids; without them, entries are filed undecided. The caller has locked the rows and passes
-- each id once. ON CONFLICT DO NOTHING: a failure that arrives twice is one entry (for example, if
-- a transaction retries a job and fails it again with now()), and a job has at most one open entry.
-- file_repeats handles further failures of a job, failures of redeliveries, and known failures.
--
-- Nearly all rows come from capture, have the time of the failure in their id, and belong to a job
-- that is not in dlq.retired_jobs. They are filed without a look at other entries. For other rows
-- dlq.to_be_filed checks the entries: as a hashed subplan, it runs once for the whole batch, at the
-- first such row.
CREATE OR REPLACE FUNCTION dlq.file_as(p_ids uuid[], p_actor text DEFAULT NULL, p_config_version text DEFAULT NULL,
    p_statuses text[] DEFAULT NULL, p_strategies text[] DEFAULT NULL,
    p_error_classes text[] DEFAULT NULL, p_rules text[] DEFAULT NULL, p_fingerprints text[] DEFAULT NULL,
    p_next_retry_ats timestamptz[] DEFAULT NULL,
    p_waiting_fors text[] DEFAULT NULL, p_max_retries integer[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_tags jsonb[] DEFAULT NULL,
    p_assignees text[] DEFAULT NULL, p_reasons text[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_filed uuid[];
BEGIN
    WITH filed AS (
        INSERT INTO dlq.dead_letter_open
            (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, subscriber_id, source, priority,
             tags,
             original_event, error_message, error_type, error_code, error_title, destination, destination_url,
             error_class, reported_class, error_stack_trace, error_context, fingerprint,
             retry_history, retry_count, max_retries, dlq_max_retries, status, strategy, rule,
             next_retry_at, waiting_for,
             ordering_key, assigned_to, config_version, unique_key, unique_states, metadata,
             move, captured_by, first_failed_at, last_failed_at, created_at, filed_at, updated_at, stage,
             record)
        SELECT i.id, i.event_id, i.river_job_id, i.job_created_at, i.queue, i.kind, i.job_kind, i.subscriber_id,
               i.source, coalesce(nullif(d.priority, 0), i.priority),
               CASE WHEN coalesce(d.tags, '[]') <> '[]' THEN ARRAY(SELECT DISTINCT a.t
                   FROM (SELECT unnest(i.tags) AS t UNION ALL SELECT jsonb_array_elements_text(d.tags)) a
                   WHERE a.t IS NOT NULL)
                    WHEN i.tags = '{}' THEN i.tags ELSE ARRAY(SELECT t FROM unnest(i.tags) t WHERE t IS NOT NULL) END,
               i.original_event, f.error_message, f.error_type, f.error_code, f.error_title, f.destination,
               f.destination_url, coalesce(d.error_class, f.error_class), f.error_class, f.error_stack_trace,
               f.error_context, d.fingerprint,
               f.retry_history, i.retry_count, i.max_retries, coalesce(nullif(d.max_retries, 0), i.dlq_max_retries),
               coalesce(d.status::dlq.dead_letter_status, 'dlq_pending'), d.strategy::dlq.strategy, d.rule,
               CASE WHEN d.status = 'dlq_manual' THEN NULL ELSE coalesce(d.next_retry_at, i.next_retry_at, now()) END,
                   CASE WHEN d.status = 'dlq_pending' THEN nullif(d.waiting_for, '') END,
               i.ordering_key, coalesce(k.owner, nullif(d.assignee, '')), p_config_version, i.unique_key,
               i.unique_states, i.metadata,
               CASE WHEN d.status <> 'dlq_pending' THEN '{"moved": true}'::jsonb END, i.captured_by, f.first_failed_at,
                   i.last_failed_at, i.created_at, clock_timestamp(), now(), 'open', i.record
        FROM unnest(p_ids, p_statuses, p_strategies, p_error_classes, p_rules, p_fingerprints, p_next_retry_ats,
            p_waiting_fors, p_max_retries, p_priorities, p_tags, p_assignees)
             AS d (id, status, strategy, error_class, rule, fingerprint, next_retry_at, waiting_for, max_retries,
                 priority, tags, assignee)
        JOIN dlq.dead_letter_inbox i ON i.id = d.id
        CROSS JOIN LATERAL dlq.describe_failure(i.retry_history, i.metadata, i.retry_count, i.last_failed_at) f
        LEFT JOIN dlq.group_marks k ON k.queue = i.queue AND k.fingerprint = d.fingerprint
        WHERE ((SELECT m.entry_id FROM dlq.entry_jobs m WHERE m.job_id = i.river_job_id
            AND m.job_created_at = i.job_created_at) IS NULL
           OR NOT dlq.is_repeat(i.river_job_id, i.job_created_at))
          AND ((SELECT r.job_id FROM dlq.retired_jobs r WHERE r.job_id = i.river_job_id
              AND r.job_created_at = i.job_created_at LIMIT 1) IS NULL
               AND i.captured_by IN ('capture', 'source')
               AND i.id = dlq.entry_id(i.river_job_id, i.last_failed_at)
           OR i.ctid IN (SELECT t FROM dlq.to_be_filed(p_ids) t))
        ON CONFLICT DO NOTHING
        RETURNING id, job_created_at, status, strategy, rule, next_retry_at, river_job_id, queue, kind, error_class,
            error_type, last_failed_at, source, retry_count, fingerprint, captured_by
    ), deleted AS (
        DELETE FROM dlq.dead_letter_inbox i USING filed WHERE i.id = filed.id
            AND (i.retry_count = filed.retry_count OR i.id = dlq.entry_id(i.river_job_id, i.last_failed_at))
    ), recorded AS (
        INSERT INTO dlq.retired_jobs (job_id, job_created_at, failure, attempt, entry_id, at)
        SELECT f.river_job_id, f.job_created_at, f.id, f.retry_count, f.id, clock_timestamp() FROM filed f
        WHERE f.id <> dlq.entry_id(f.river_job_id, f.last_failed_at)
        ON CONFLICT DO NOTHING
    ), audited AS (
        INSERT INTO dlq.dead_letter_transitions
            (entry_id, to_status, actor, reason, strategy, rule, next_retry_at, river_job_id, queue, kind, error_class,
             config_version,
             error_type, failed_at, source, attempts, joined_group)
        SELECT f.id, f.status, coalesce(p_actor, f.captured_by), concat_ws(': ',
            CASE WHEN f.river_job_id < 0 THEN 'a record failed' ELSE 'job ' || f.river_job_id || ' failed' END, r.reason), f.strategy, f.rule, f.next_retry_at, f.river_job_id, f.queue, f.kind, f.error_class,
                p_config_version,
               coalesce(f.error_type, ''), f.last_failed_at, f.source, f.retry_count, f.fingerprint
        FROM filed f JOIN unnest(p_ids, p_reasons) AS r (id, reason) ON r.id = f.id
    )
    SELECT coalesce(array_agg(f.id), '{}') INTO v_filed FROM filed f;
    -- The insert may have waited for a transaction that closed the open entry of the same job. If
    -- that transaction recorded the same failure in the closed entry, only a new statement sees that.
    IF EXISTS (SELECT FROM dlq.dead_letter_open e
               JOIN dlq.retired_jobs r ON r.job_id = e.river_job_id AND r.job_created_at = e.job_created_at
                   AND r.failure = e.id AND r.entry_id <> e.id
               WHERE e.id = ANY (v_filed)
                 AND (r.attempt = e.retry_count OR e.id = dlq.entry_id(e.river_job_id, e.last_failed_at))) THEN
        RAISE EXCEPTION 'another entry has taken in one of these failures: try again'
            USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN v_filed;
END
$$;
COMMENT ON FUNCTION dlq.file_as IS
    'Files entries of the inbox that the caller has locked, decided or undecided. Returns their '
    'ids. Rows whose job has an open entry, or whose failure is known, stay for dlq.file_repeats. '
    'Raises 40001 if one of the failures was recorded in another entry at the same time: call again.';

CREATE OR REPLACE FUNCTION dlq.failed_again(p_entry uuid, p_errors jsonb, p_metadata jsonb, p_attempt integer,
    p_max_attempts integer, p_at timestamptz, p_actor text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_fail   record := dlq.describe_failure(p_errors, p_metadata, p_attempt, p_at);
    v_status dlq.dead_letter_status;
    v_reason text;
BEGIN
    SELECT CASE WHEN e.river_job_id < 0 THEN 'its record' ELSE 'job ' || e.river_job_id END INTO v_reason
    FROM dlq.dead_letter_open e WHERE e.id = p_entry;
    IF EXISTS (SELECT FROM dlq.dead_letter_transitions t WHERE t.entry_id = p_entry AND t.failed_at = p_at) THEN
        RETURN; -- this failure is already recorded
    END IF;
    PERFORM set_config('dlq.recording', txid_current()::text, true); -- dlq.on_content allows the change
    UPDATE dlq.dead_letter_open e SET
        error_message = v_fail.error_message, error_type = v_fail.error_type, error_code = v_fail.error_code,
        error_title = v_fail.error_title,
        destination = v_fail.destination, destination_url = v_fail.destination_url, reported_class = v_fail.error_class,
        error_stack_trace = v_fail.error_stack_trace, error_context = v_fail.error_context,
        -- p_errors has all errors of the job if the failure comes from the inbox, but only the last error if it comes
        -- from a fact. So drop the attempts that the new history repeats, then append the new history.
        retry_history = coalesce((SELECT jsonb_agg(o.failed ORDER BY o.number)
            FROM jsonb_array_elements(e.retry_history) WITH ORDINALITY o (failed, number)
                                  WHERE NOT v_fail.retry_history @> jsonb_build_array(jsonb_build_object('at',
                                      o.failed -> 'at', 'attempt', o.failed -> 'attempt'))), '[]')
                                          || v_fail.retry_history,
        retry_count = greatest(e.retry_count, p_attempt), max_retries = coalesce(p_max_attempts, e.max_retries),
        last_failed_at = p_at,
        metadata = dlq.metadata_after(e.metadata, true, e.river_job_id, p_metadata),
        -- A pending entry becomes undecided. A manual entry, or an entry with a redelivery in progress, keeps its
        -- decision.
        error_class = CASE WHEN e.status = 'dlq_pending' THEN v_fail.error_class ELSE e.error_class END,
        fingerprint = CASE WHEN e.status = 'dlq_pending' THEN NULL ELSE e.fingerprint END,
        strategy = CASE WHEN e.status = 'dlq_pending' THEN NULL ELSE e.strategy END,
        next_retry_at = CASE WHEN e.status = 'dlq_pending' THEN now() END,
        waiting_for = NULL,
        move = CASE WHEN e.status <> 'dlq_processing' THEN jsonb_build_object('actor', p_actor, 'reason',
            v_reason || ' failed again') END
    WHERE e.id = p_entry AND e.last_failed_at <= p_at
    RETURNING e.status INTO v_status;
    PERFORM set_config('dlq.recording', '', true);
    IF v_status IS NULL OR v_status = 'dlq_processing' THEN -- the entry has a newer failure, or did not move
        INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, reason, strategy, rule,
            next_retry_at, river_job_id, queue, kind, error_class, from_class, error_type, failed_at)
        SELECT e.id, e.status, e.status, p_actor, v_reason || ' failed again', e.strategy, e.rule,
               e.next_retry_at, e.river_job_id, e.queue, e.kind, e.error_class, e.error_class,
               coalesce(v_fail.error_type, ''), p_at
        FROM dlq.dead_letter_open e WHERE e.id = p_entry;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.failed_again IS
    'Records that the own job of an open entry failed again. A pending entry becomes undecided; a '
    'manual one, or one with a redelivery under way, keeps its decision. A known failure counts '
    'once.';

-- A failure of a job that has an open entry is a further failure of that entry. The failure of a
-- redelivery becomes a fact: it is in the inbox only if the job has lost the marker dlq:entry_id,
-- by which capture recognizes a redelivery.
CREATE OR REPLACE FUNCTION dlq.file_repeats(p_ids uuid[], p_wait boolean) RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_row     dlq.dead_letter_queue;
    v_entry   record;
    v_id      uuid;
    v_end     jsonb; -- the failure in the form of dlq.job_facts.job
    v_removed uuid[] := '{}';
BEGIN
    FOR v_row IN SELECT i.* FROM dlq.dead_letter_inbox i WHERE i.id = ANY (p_ids) ORDER BY i.id LOOP
        v_end := jsonb_build_object('state', 'discarded', 'attempt', v_row.retry_count, 'finalized_at',
            v_row.last_failed_at, 'errors', v_row.retry_history, 'metadata', v_row.metadata,
                                    'failure', v_row.id);
        v_id := v_row.id;
        IF p_wait THEN
            SELECT e.id, e.status, e.redelivery_job_id INTO v_entry FROM dlq.dead_letter_open e
            WHERE e.river_job_id = v_row.river_job_id AND e.job_created_at = v_row.job_created_at FOR UPDATE;
        ELSE
            SELECT e.id, e.status, e.redelivery_job_id INTO v_entry FROM dlq.dead_letter_open e
            WHERE e.river_job_id = v_row.river_job_id AND e.job_created_at = v_row.job_created_at
            FOR UPDATE SKIP LOCKED;
        END IF;

        IF dlq.is_taken(v_row.river_job_id, v_row.job_created_at, v_row.id, v_row.retry_count, v_row.last_failed_at)
            THEN
            NULL;
        ELSIF v_entry.id IS NULL THEN
            INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job)
            SELECT m.job_id, m.job_created_at, 'discarded', m.entry_id, v_end
            FROM dlq.entry_jobs m JOIN dlq.dead_letter_queue e ON e.id = m.entry_id
                AND (e.river_job_id, e.job_created_at) <> (m.job_id, m.job_created_at)
            WHERE m.job_id = v_row.river_job_id AND m.job_created_at = v_row.job_created_at;
            IF NOT FOUND AND (dlq.has_open_entry(v_row.river_job_id, v_row.job_created_at)
                              OR dlq.may_be_filed(v_row.id, v_row.river_job_id, v_row.job_created_at, v_row.retry_count,
                                  v_row.last_failed_at)) THEN
                -- The open entry is locked or has just closed. The next call handles this row: if the entry
                -- is closed, the row becomes a new entry.
                CONTINUE;
            ELSIF NOT FOUND THEN
                -- An entry of another failure has this id: the next call files the row under a new
                -- id.
                v_id := dlq.uuid_v7();
                PERFORM dlq.take_failure(v_row.river_job_id, v_row.job_created_at, v_row.id, v_row.retry_count, v_id);
            END IF;
        ELSIF v_entry.status = 'dlq_processing' AND v_entry.redelivery_job_id = v_row.river_job_id THEN
            -- The entry waits for this job, and the row is the job's end.
            INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job)
            VALUES (v_row.river_job_id, v_row.job_created_at, 'discarded', v_entry.id, v_end);
        ELSE
            PERFORM dlq.take_failure(v_row.river_job_id, v_row.job_created_at, v_row.id, v_row.retry_count, v_entry.id);
            PERFORM dlq.failed_again(v_entry.id, v_row.retry_history, v_row.metadata, v_row.retry_count,
                v_row.max_retries, v_row.last_failed_at, v_row.captured_by);
        END IF;
        DELETE FROM dlq.dead_letter_inbox i WHERE i.id = v_row.id AND i.retry_count = v_row.retry_count;
        IF v_id = v_row.id THEN
            v_removed := v_removed || v_row.id;
        ELSE
            v_row.id := v_id;
            INSERT INTO dlq.dead_letter_inbox SELECT v_row.*;
        END IF;
    END LOOP;
    RETURN v_removed;
END
$$;
COMMENT ON FUNCTION dlq.file_repeats IS
    'Removes rows from the inbox that do not become entries: further failures of a job that has an open entry, ends '
    'of redeliveries (as facts), and failures that an entry already has. A row whose id an entry of another failure '
    'has gets a new id, and stays. p_wait: wait for locked entries instead of leaving their rows for the next call. '
    'Returns the ids of the removed rows.';

CREATE OR REPLACE FUNCTION dlq.file(p_ids uuid[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_ids   uuid[];
    v_filed integer;
BEGIN
    -- Locking waits for another session that is filing these rows, so that the caller's next statement
    -- finds the entries in the open partition.
    v_ids := ARRAY(WITH locked AS (SELECT i.id FROM dlq.dead_letter_inbox i WHERE i.id = ANY (p_ids) ORDER BY i.id
        FOR UPDATE) SELECT DISTINCT h.id FROM locked h);
    IF cardinality(v_ids) = 0 THEN
        RETURN 0;
    END IF;
    BEGIN
        v_filed := cardinality(dlq.file_as(v_ids));
    EXCEPTION WHEN serialization_failure THEN
        v_filed := cardinality(dlq.file_as(v_ids));
    END;
    IF v_filed < cardinality(v_ids) THEN
        -- Lock the open entries of their jobs together with the entries that the caller acts on, in
        -- the order of dlq.lock_entries.
        PERFORM dlq.lock_filed(
            p_ids || ARRAY(
                SELECT o.id FROM dlq.dead_letter_inbox i
                JOIN dlq.dead_letter_open o ON o.river_job_id = i.river_job_id AND o.job_created_at = i.job_created_at
                WHERE i.id = ANY (v_ids)),
            '{dlq_pending,dlq_processing,dlq_manual}');
        v_filed := v_filed + cardinality(dlq.file_repeats(v_ids, true));
    END IF;
    RETURN v_filed;
END
$$;
COMMENT ON FUNCTION dlq.file IS
    'Files the given entries that are still in the inbox, undecided. Operations on entries call this '
    'first, as a separate statement. DLQ workers file other entries within moments. Returns how many '
    'were filed.';

CREATE OR REPLACE FUNCTION dlq.is_repeat(p_job bigint, p_job_created_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    IF EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.stage = 'open' AND e.river_job_id = p_job
        AND e.job_created_at = p_job_created_at) THEN
        RETURN true;
    END IF;
    -- This check is a separate statement, because the join below locks every partition and is rarely needed.
    IF (SELECT m.entry_id FROM dlq.entry_jobs m WHERE m.job_id = p_job AND m.job_created_at = p_job_created_at) IS NULL
        THEN
        RETURN false;
    END IF;
    RETURN EXISTS (SELECT FROM dlq.entry_jobs m JOIN dlq.dead_letter_queue e ON e.id = m.entry_id
        AND (e.river_job_id, e.job_created_at) <> (m.job_id, m.job_created_at)
                   WHERE m.job_id = p_job AND m.job_created_at = p_job_created_at);
END
$$;
COMMENT ON FUNCTION dlq.is_repeat IS
    'Whether a job has an open entry, or redelivers the entry of another job. An unfiled failure of '
    'such a job is a further failure of that entry; lists and counts do not show it.';

-- has_unfiled sets enable_seqscan = off, because a session may plan its query while the inbox is small.
CREATE OR REPLACE FUNCTION dlq.has_unfiled(p_after uuid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    RETURN (SELECT i.id FROM dlq.dead_letter_inbox i WHERE i.id > p_after ORDER BY i.id LIMIT 1) IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.has_unfiled IS
    'Whether the inbox has a failure after this id. DLQ workers ask twenty times a second, and start '
    'a transaction only if it has.';

-- At most 10,000 unfiled entries are counted, so that the cost stays bounded while no DLQ worker
-- runs. The view has one branch for callers without a scope, whose open entries are counted from an
-- index alone. Callers with a scope need another branch, because the index lacks the kind.
CREATE OR REPLACE VIEW dlq.backlog WITH (security_barrier) AS
    SELECT b.status, b.queue, b.error_class, sum(b.entries)::bigint AS entries, bool_or(b.more) AS more
    FROM (
        SELECT o.status, o.queue, o.error_class, count(*) AS entries, false AS more FROM dlq.dead_letter_open o
        WHERE (SELECT dlq.scope()) IS NULL GROUP BY o.status, o.queue, o.error_class
        UNION ALL
        SELECT o.status, o.queue, o.error_class, count(*) AS entries, false AS more FROM dlq.dead_letter_open o
        WHERE (SELECT dlq.scope()) IS NOT NULL
            AND dlq.in_patterns(o.queue, o.kind, (SELECT dlq.scope_patterns(dlq.scope()))) GROUP BY o.status,
                o.queue, o.error_class
        UNION ALL
        SELECT 'dlq_pending', u.queue, NULL, count(*), sum(count(*)) OVER () >= 10000
        FROM (SELECT i.queue FROM dlq.dead_letter_inbox i
              WHERE NOT dlq.is_repeat(i.river_job_id, i.job_created_at)
                  AND dlq.in_patterns(i.queue, i.kind, (SELECT dlq.scope_patterns(dlq.scope())))
              LIMIT 10000) u
        GROUP BY u.queue
    ) b
    GROUP BY b.status, b.queue, b.error_class;
COMMENT ON VIEW dlq.backlog IS
    'Open entries by status, queue and class. Unfiled entries have a null class. At most 10,000 of '
    'them are counted; more is true if there are others.';
