-- Filing: what applications' transactions appended to the inbox goes to the open partition, described and with its audit row.
-- DLQ workers do that, judged at once; whoever acts on an entry before they come files it first.

-- describe_failure says what went wrong, from what a job carries. It reads whatever JSON an application left there,
-- so all of it is inside one block that cannot raise: an entry with a poor description is better than one that cannot be
-- filed. (The block writes nothing, so it costs no subtransaction id.) It runs once for every failure: plain
-- assignments, which PL/pgSQL evaluates without a query, where it can.
CREATE OR REPLACE FUNCTION dlq.describe_failure(p_errors jsonb, p_metadata jsonb, p_attempt integer, p_failed_at timestamptz,
    OUT error_message text, OUT error_type text, OUT error_code text, OUT error_class text,
    OUT error_stack_trace text, OUT error_context jsonb, OUT retry_history jsonb,
    OUT first_failed_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_errors jsonb := CASE jsonb_typeof(p_errors) WHEN 'array' THEN p_errors ELSE '[]' END;
    v_count  integer := jsonb_array_length(v_errors);
    v_last   jsonb := v_errors -> -1;
    v_said   jsonb := p_metadata -> 'dlq:error';
    v_time   timestamptz;
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
        -- Metadata outlives the attempt that wrote it: it counts only if it is of the last one.
        ELSIF v_said -> 'attempt' = coalesce(v_last -> 'attempt', to_jsonb(p_attempt)) THEN
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
            IF v_time BETWEEN '1970-01-01Z' AND p_failed_at THEN
                first_failed_at := v_time;
            END IF;
        END IF;
        IF v_count > 0 AND pg_column_size(v_errors) <= 4000 THEN
            retry_history := v_errors;
        ELSIF v_count > 0 THEN
            SELECT jsonb_agg(jsonb_build_object('at', e -> 'at', 'attempt', e -> 'attempt', 'error', left(e ->> 'error', 4000)))
            INTO retry_history FROM jsonb_array_elements(v_errors) e;
        END IF;
    EXCEPTION WHEN OTHERS THEN
        error_context := jsonb_build_object('captureError', SQLERRM);
    END;
    first_failed_at := coalesce(first_failed_at, p_failed_at);
    error_message := coalesce(nullif(error_message, ''), 'the job ended without an error');
END
$$;
COMMENT ON FUNCTION dlq.describe_failure IS 'What went wrong with a job, from the errors and metadata that River keeps: the structured error of its last attempt (metadata key dlq:error) or, where there is none, the last error that River keeps. Never raises.';

CREATE OR REPLACE FUNCTION dlq.filed(p_entry dlq.dead_letter_queue) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_fail record := dlq.describe_failure(p_entry.retry_history, p_entry.metadata, p_entry.retry_count, p_entry.last_failed_at);
BEGIN
    p_entry.error_message := v_fail.error_message;
    p_entry.error_type := v_fail.error_type;
    p_entry.error_code := v_fail.error_code;
    p_entry.error_class := v_fail.error_class;
    p_entry.reported_class := v_fail.error_class;
    p_entry.error_stack_trace := v_fail.error_stack_trace;
    p_entry.error_context := v_fail.error_context;
    p_entry.retry_history := v_fail.retry_history;
    p_entry.first_failed_at := v_fail.first_failed_at;
    p_entry.filed_at := clock_timestamp();
    p_entry.stage := 'open';
    RETURN p_entry;
END
$$;
COMMENT ON FUNCTION dlq.filed IS 'An entry of the inbox as it is filed: described, undecided.';

CREATE OR REPLACE FUNCTION dlq.audit_capture(p_entry dlq.dead_letter_queue) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, reason, next_retry_at, river_job_id, queue, kind, error_class, error_type, failed_at, source, attempts)
    VALUES (p_entry.id, 'dlq_pending', p_entry.captured_by, 'job ' || p_entry.river_job_id || ' failed', p_entry.next_retry_at, p_entry.river_job_id, p_entry.queue, p_entry.kind,
            p_entry.error_class, coalesce(p_entry.error_type, ''), p_entry.last_failed_at, p_entry.source, p_entry.retry_count);
END
$$;
COMMENT ON FUNCTION dlq.audit_capture IS 'Writes the audit row of an entry that is filed undecided.';
