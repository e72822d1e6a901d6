-- Capture: a job that ends as a failure becomes a dead letter in the transaction that ends it, whoever ends it.
--
-- A job comes here as jsonb (to_jsonb of its row), never as River's row type or columns. So River's migrations can alter and
-- drop them while dlqd is attached: no function depends on them, and no session keeps a plan for a type that a column had.
-- Nothing in capture needs a right on River's tables.

CREATE OR REPLACE FUNCTION dlq.to_timestamptz(p_text text) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN p_text::timestamptz;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.to_timestamptz IS 'p_text as a time, or null where it is none.';

CREATE OR REPLACE FUNCTION dlq.to_uuid(p_text text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_text ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' THEN p_text::uuid END;
COMMENT ON FUNCTION dlq.to_uuid IS 'p_text as a UUID, or null where it is none.';

-- Signatures of an earlier dlqd, which took River's row type.
DO $$
DECLARE
    v_old regprocedure;
BEGIN
    FOR v_old IN
        SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.settings'::regclass)
          AND p.proname IN ('is_failure', 'describe_failure', 'record_failure', 'record_outcome', 'actor')
          AND pg_get_function_identity_arguments(p.oid) ~ '(river_job|^$)'
    LOOP
        EXECUTE format('DROP FUNCTION %s', v_old);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION dlq.is_failure(p_job jsonb, p_before jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN CASE p_job ->> 'state'
    -- River's scheduler discards a retry whose unique key another job holds by now: a duplicate, not a failure. It leaves
    -- its mark for good, so the mark counts only on the way from where the scheduler takes jobs.
    WHEN 'discarded' THEN NOT (p_job -> 'metadata' @> '{"unique_key_conflict": "scheduler_discarded"}'
                               AND coalesce(p_before ->> 'state' IN ('scheduled', 'retryable'), true))
    -- A worker that returned river.JobCancel(err) leaves an error; an operator who cancelled a job leaves a mark.
    WHEN 'cancelled' THEN NOT (p_job -> 'metadata' ? 'cancel_attempted_at')
                          AND CASE jsonb_typeof(p_job -> 'errors') WHEN 'array' THEN jsonb_array_length(p_job -> 'errors') ELSE 0 END
                              > CASE jsonb_typeof(p_before -> 'errors') WHEN 'array' THEN jsonb_array_length(p_before -> 'errors') ELSE 0 END
    ELSE false
END;
COMMENT ON FUNCTION dlq.is_failure IS 'Whether a job that ended as p_job, and was p_before until then (null where nobody knows), ended as a failure. Both are to_jsonb of rows of river_job.';

-- describe_failure says what went wrong, from what a job carries. It reads whatever JSON an application left there,
-- so all of it is inside one block that cannot raise: an entry with a poor description is better than a job that
-- cannot end. (The block writes nothing, so it costs no subtransaction id.) It runs once for every failure: plain
-- assignments, which PL/pgSQL evaluates without a query, where it can.
CREATE OR REPLACE FUNCTION dlq.describe_failure(p_job jsonb,
    OUT error_message text, OUT error_type text, OUT error_code text, OUT error_class text,
    OUT error_stack_trace text, OUT error_context jsonb, OUT retry_history jsonb, OUT tags text[],
    OUT first_failed_at timestamptz, OUT last_failed_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_errors jsonb := CASE jsonb_typeof(p_job -> 'errors') WHEN 'array' THEN p_job -> 'errors' ELSE '[]' END;
    v_count  integer := jsonb_array_length(v_errors);
    v_last   jsonb := v_errors -> -1;
    v_said   jsonb := p_job -> 'metadata' -> 'dlq:error';
    v_time   timestamptz;
BEGIN
    last_failed_at := now();
    retry_history := '[]';
    tags := '{}';
    BEGIN
        -- Times that clients can read: psql takes 'infinity' and the year 294276 too.
        v_time := (p_job ->> 'finalized_at')::timestamptz;
        IF v_time BETWEEN '1970-01-01Z' AND now() + interval '1 day' THEN
            last_failed_at := v_time;
        END IF;
        error_message := v_last ->> 'error';
        error_stack_trace := nullif(v_last ->> 'trace', '');
        IF error_message LIKE 'JobCancelError: %' THEN
            error_message := substr(error_message, length('JobCancelError: ') + 1);
        END IF;
        IF error_stack_trace IS NOT NULL THEN
            error_type := 'panic';
        -- Metadata outlives the attempt that wrote it: it counts only if it is of the last one.
        ELSIF v_said -> 'attempt' = coalesce(v_last -> 'attempt', p_job -> 'attempt') THEN
            error_message := coalesce(v_said ->> 'message', error_message);
            error_type := left(v_said ->> 'type', 255);
            error_code := left(v_said ->> 'code', 255);
            error_context := nullif(v_said -> 'context', 'null');
            IF v_said ->> 'class' IN ('transient', 'rate_limited', 'outage', 'validation', 'malformed', 'unauthorized',
                                      'not_found', 'business', 'code_bug', 'unknown') THEN
                error_class := v_said ->> 'class';
            END IF;
        END IF;

        IF v_count > 1 THEN
            v_time := dlq.to_timestamptz(v_errors -> 0 ->> 'at');
            IF v_time BETWEEN '1970-01-01Z' AND last_failed_at THEN
                first_failed_at := v_time;
            END IF;
        END IF;
        IF v_count > 0 AND pg_column_size(v_errors) <= 4000 THEN
            retry_history := v_errors;
        ELSIF v_count > 0 THEN
            SELECT jsonb_agg(jsonb_build_object('at', e -> 'at', 'attempt', e -> 'attempt', 'error', left(e ->> 'error', 4000)))
            INTO retry_history FROM jsonb_array_elements(v_errors) e;
        END IF;
        IF p_job -> 'tags' <> '[]' AND jsonb_typeof(p_job -> 'tags') = 'array' THEN
            tags := array_remove(ARRAY(SELECT jsonb_array_elements_text(p_job -> 'tags')), NULL);
        END IF;
    EXCEPTION WHEN OTHERS THEN
        error_context := jsonb_build_object('captureError', SQLERRM);
    END;
    first_failed_at := coalesce(first_failed_at, last_failed_at);
    error_message := coalesce(nullif(error_message, ''), 'job was ' || (p_job ->> 'state') || ' without an error');
END
$$;
COMMENT ON FUNCTION dlq.describe_failure IS 'What went wrong with a job (to_jsonb of its row): the structured error of its last attempt (metadata key dlq:error) or, where there is none, the last error that River keeps. Never raises.';

CREATE OR REPLACE FUNCTION dlq.wake() RETURNS void
LANGUAGE sql VOLATILE
RETURN pg_notify('dlq.wake', '');
COMMENT ON FUNCTION dlq.wake IS 'Tells DLQ workers that there is something to do. They also poll.';

-- record_failure makes a dead letter of a job that failed, or updates the open one that the job already has. The unique
-- index decides which: no second entry, and no lookup whose plan could age.
CREATE OR REPLACE FUNCTION dlq.record_failure(p_job jsonb, p_captured_by text DEFAULT 'capture') RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_fail record := dlq.describe_failure(p_job);
    v_kind text := p_job ->> 'kind';
    v_args jsonb := p_job -> 'args';
    v_sent boolean := v_kind = 'dlqd_message';
    v_id   uuid;
BEGIN
    INSERT INTO dlq.dead_letter_open AS d
        (id, event_id, river_job_id, queue, kind, job_kind, subscriber_id, source, priority, tags, original_event,
         error_message, error_type, error_code, error_class, reported_class, error_stack_trace, error_context, retry_history,
         retry_count, max_retries, unique_key, metadata, next_retry_at, first_failed_at, last_failed_at, ordering_key, captured_by)
    VALUES
        (dlq.uuid_v7(),
         CASE WHEN v_sent THEN left(v_args ->> 'messageId', 255) END,
         (p_job ->> 'id')::bigint, p_job ->> 'queue',
         coalesce(CASE WHEN v_sent THEN left(v_args ->> 'kind', 255) END, v_kind),
         v_kind,
         CASE WHEN v_sent THEN left(v_args ->> 'subscriberId', 255) END,
         CASE WHEN v_sent THEN left(v_args ->> 'source', 255) END,
         (p_job ->> 'priority')::smallint, v_fail.tags, v_args,
         v_fail.error_message, v_fail.error_type, v_fail.error_code, v_fail.error_class, v_fail.error_class, v_fail.error_stack_trace,
         v_fail.error_context, v_fail.retry_history, (p_job ->> 'attempt')::integer, (p_job ->> 'max_attempts')::integer, (p_job ->> 'unique_key')::bytea,
         coalesce(p_job -> 'metadata', '{}'), now(), v_fail.first_failed_at, v_fail.last_failed_at,
         CASE WHEN v_sent THEN left(v_args ->> 'orderingKey', 255) END, p_captured_by)
    ON CONFLICT (river_job_id) DO UPDATE SET
        error_message = excluded.error_message, error_type = excluded.error_type, error_code = excluded.error_code,
        reported_class = excluded.reported_class, error_stack_trace = excluded.error_stack_trace,
        error_context = excluded.error_context, retry_history = excluded.retry_history,
        retry_count = excluded.retry_count, max_retries = excluded.max_retries, last_failed_at = excluded.last_failed_at,
        -- Undecided again, unless a person holds it or another redelivery is under way.
        error_class = CASE WHEN d.status = 'dlq_pending' THEN excluded.error_class ELSE d.error_class END,
        fingerprint = CASE WHEN d.status = 'dlq_pending' THEN NULL ELSE d.fingerprint END,
        strategy = CASE WHEN d.status = 'dlq_pending' THEN NULL ELSE d.strategy END,
        next_retry_at = CASE WHEN d.status = 'dlq_pending' THEN now() END,
        waiting_for = NULL,
        move = CASE WHEN d.status = 'dlq_pending' THEN jsonb_build_object('actor', p_captured_by, 'reason', 'job ' || excluded.river_job_id || ' failed again') END
    RETURNING d.id INTO v_id;
    RETURN v_id;
END
$$;
COMMENT ON FUNCTION dlq.record_failure IS 'Makes a dead letter of a job (to_jsonb of its row) that failed, or updates the open one that it already has.';

-- record_outcome takes the end of a redelivery to its entry. False: the entry does not wait for this job (an outcome
-- that comes twice counts once).
CREATE OR REPLACE FUNCTION dlq.record_outcome(p_entry uuid, p_job jsonb, p_actor text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_entry   record;
    v_fail    record;
    v_manual  boolean;
    v_spent   boolean;
    v_attempt jsonb;
    v_job     bigint := (p_job ->> 'id')::bigint;
    v_state   text := p_job ->> 'state';
BEGIN
    SELECT e.dlq_retry_count, e.dlq_max_retries, e.locked_by, e.locked_at INTO v_entry
    FROM dlq.dead_letter_open e
    WHERE e.id = p_entry AND e.status = 'dlq_processing' AND e.redelivery_job_id = v_job
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;

    v_spent := v_entry.dlq_retry_count >= v_entry.dlq_max_retries;
    v_manual := v_entry.locked_by NOT LIKE 'worker:%';
    v_attempt := jsonb_build_object('jobId', v_job, 'at', v_entry.locked_at, 'endedAt', coalesce(nullif(p_job -> 'finalized_at', 'null'), to_jsonb(now())),
                                    'actor', v_entry.locked_by, 'outcome', v_state);
    IF p_job -> 'metadata' ? 'dlq:run_id' THEN
        UPDATE dlq.replay_run_entries r SET
            outcome = CASE WHEN v_state = 'completed' THEN 'succeeded' ELSE 'failed' END,
            detail = left(p_job -> 'errors' -> -1 ->> 'error', 1000),
            ended_at = clock_timestamp()
        WHERE r.run_id = dlq.to_uuid(p_job -> 'metadata' ->> 'dlq:run_id') AND r.entry_id = p_entry AND r.job_id = v_job;
    END IF;
    IF v_state = 'completed' THEN
        UPDATE dlq.dead_letter_queue SET
            status = 'dlq_resolved',
            replay_attempts = replay_attempts || v_attempt,
            resolution_strategy = CASE WHEN v_manual THEN 'manual_retry' ELSE 'automatic_retry' END::dlq.resolution_strategy,
            resolved_by = v_entry.locked_by,
            move = jsonb_build_object('actor', p_actor, 'reason', 'job ' || v_job || ' completed')
        WHERE id = p_entry AND status = 'dlq_processing';
        RETURN true;
    END IF;

    v_fail := dlq.describe_failure(p_job);
    IF p_job -> 'metadata' ? 'cancel_attempted_at' THEN
        v_fail.error_type := 'cancelled';
        v_fail.error_class := NULL;
        v_fail.error_message := 'redelivery was cancelled by an operator';
    END IF;
    UPDATE dlq.dead_letter_queue SET
        status = CASE WHEN v_spent THEN 'dlq_failed' ELSE 'dlq_pending' END::dlq.dead_letter_status,
        replay_attempts = replay_attempts || (v_attempt || jsonb_build_object('error', left(v_fail.error_message, 4000))),
        error_message = v_fail.error_message, error_type = v_fail.error_type, error_code = v_fail.error_code,
        -- A closed entry is not decided again: it keeps what it was taken for.
        error_class = coalesce(v_fail.error_class, CASE WHEN v_spent THEN error_class END), reported_class = v_fail.error_class,
        error_stack_trace = v_fail.error_stack_trace, error_context = v_fail.error_context,
        last_failed_at = v_fail.last_failed_at,
        fingerprint = CASE WHEN v_spent THEN fingerprint END,
        strategy = NULL,
        next_retry_at = now(),
        move = jsonb_build_object('actor', p_actor, 'reason', 'job ' || v_job || ' was ' || v_state)
    WHERE id = p_entry AND status = 'dlq_processing';
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.record_outcome IS 'Moves an entry when the job of its redelivery (to_jsonb of its row) ends: dlq_resolved, or dlq_pending (undecided), or dlq_failed when its DLQ retries are spent.';

-- The settings of capture and follow hold for all that they call: names come from pg_catalog or are qualified, and plans never
-- depend on how small a table was when a session first used it.
CREATE OR REPLACE FUNCTION dlq.capture() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_schema constant text := split_part('dlq.', '.', 1); -- the schema's name, as it is installed
    v_job   jsonb := to_jsonb(NEW);
    v_meta  jsonb := v_job -> 'metadata';
    v_entry uuid;
BEGIN
    IF NOT has_schema_privilege(v_schema, 'USAGE') THEN
        RAISE WARNING 'dlqd: job % ended, and could not be captured: role % may not use schema %. dlqd doctor says what is missing; dlqd attach --backfill takes the job in later', v_job -> 'id', current_user, v_schema;
        RETURN NULL;
    END IF;
    IF v_meta ? 'dlq:entry_id' THEN
        v_entry := dlq.to_uuid(v_meta ->> 'dlq:entry_id');
        IF dlq.record_outcome(v_entry, v_job, 'capture') THEN
            IF v_job ->> 'state' <> 'completed' THEN
                PERFORM dlq.wake();
            END IF;
            RETURN NULL;
        END IF;
        -- Somebody ran an earlier redelivery again while the entry is open: it goes its own way, and one is enough.
        IF EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.id = v_entry AND e.river_job_id <> (v_job ->> 'id')::bigint) THEN
            RETURN NULL;
        END IF;
    END IF;
    -- What the job was before is asked for by the rarer ends alone: it is as large as the job.
    IF dlq.is_failure(v_job, CASE WHEN v_job ->> 'state' = 'cancelled' OR v_meta ? 'unique_key_conflict' THEN to_jsonb(OLD) END) THEN
        PERFORM dlq.record_failure(v_job);
        PERFORM dlq.wake();
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.capture IS 'Trigger dlq_capture on river_job: records a job''s failure, or the end of a redelivery, in the transaction that ends the job. "dlqd detach" removes it, and so does DROP FUNCTION ... CASCADE.';

-- follow ties an entry to a job that somebody retries outside dlqd (River UI: discarded -> available).
CREATE OR REPLACE FUNCTION dlq.follow() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_schema constant text := split_part('dlq.', '.', 1);
    v_job    jsonb := to_jsonb(NEW);
    v_id     bigint := (v_job ->> 'id')::bigint;
    v_marked uuid;
    v_entry  uuid;
BEGIN
    IF NOT has_schema_privilege(v_schema, 'USAGE') THEN
        RAISE WARNING 'dlqd: the retry of job % could not be followed: role % may not use schema %', v_id, current_user, v_schema;
        RETURN NULL;
    END IF;
    v_marked := dlq.to_uuid(v_job -> 'metadata' ->> 'dlq:entry_id');
    -- The entry of this very job goes before the one that the job was a redelivery of: that one may have closed since.
    SELECT e.id INTO v_entry FROM dlq.dead_letter_queue e
    WHERE (e.river_job_id = v_id OR e.id = v_marked) AND e.status IN ('dlq_pending', 'dlq_processing', 'dlq_manual', 'dlq_failed')
    ORDER BY dlq.is_open(e.status) DESC, e.river_job_id = v_id DESC, e.id DESC
    LIMIT 1;
    UPDATE dlq.dead_letter_queue SET
        status = 'dlq_processing',
        redelivery_job_id = v_id,
        dlq_retry_count = dlq_retry_count + 1,
        locked_by = 'river:' || session_user,
        locked_at = now(),
        lease_expires_at = now() + interval '5 minutes',
        move = jsonb_build_object('actor', 'river:' || session_user, 'reason', 'job ' || v_id || ' was retried outside dlqd')
    WHERE id = v_entry AND status IN ('dlq_pending', 'dlq_manual', 'dlq_failed');
    -- An AFTER trigger, so the mark is a second write of a row that is rarely written; a BEFORE trigger would lock
    -- the row of every job that succeeds a second time. Without the right to write it, the sweep of leases sees the job's end.
    IF FOUND AND v_entry IS DISTINCT FROM v_marked
       AND NOT row_security_active(TG_RELID) AND has_schema_privilege(TG_TABLE_SCHEMA, 'USAGE')
       AND has_column_privilege(TG_RELID, 'metadata', 'UPDATE') AND has_column_privilege(TG_RELID, 'id', 'SELECT') AND has_column_privilege(TG_RELID, 'metadata', 'SELECT') THEN
        UPDATE river.river_job SET metadata = metadata || jsonb_build_object('dlq:entry_id', v_entry) WHERE id = v_id;
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.follow IS 'Trigger dlq_follow on river_job: an entry whose job is retried outside dlqd goes to dlq_processing and follows that job to its end. "dlqd detach" removes it, and so does DROP FUNCTION ... CASCADE.';

CREATE OR REPLACE FUNCTION dlq.backfill(p_limit integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_job   jsonb;
    v_count integer := 0;
BEGIN
    FOR v_job IN
        SELECT to_jsonb(j) FROM river.river_job j
        WHERE j.state IN ('discarded', 'cancelled')
          AND NOT j.metadata ? 'dlq:entry_id'
          AND dlq.is_failure(to_jsonb(j))
          AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.river_job_id = j.id)
        ORDER BY j.id
        LIMIT p_limit
        FOR UPDATE OF j SKIP LOCKED
    LOOP
        PERFORM dlq.record_failure(v_job, 'backfill');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.backfill IS 'Takes in up to p_limit jobs that failed before capture was there and that River still keeps. Returns how many; call it until it returns 0.';
