-- A fact says what happened to a job that has an entry. Capture appends facts in the application's transaction
-- (02_capture.sql), and dlqd appends some itself. The functions of this file apply facts to the entries, in
-- transactions of dlqd. They do not wait for an application: entries and jobs that another session has locked are left
-- for the next call.

CREATE OR REPLACE FUNCTION dlq.is_superseded(p_state text, p_attempt integer, p_metadata jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- A job that ran again outside dlqd keeps the marker dlq:done, but has made one more attempt.
RETURN p_state = 'completed' AND p_metadata #>> '{dlq:done,attempt}' IS NOT DISTINCT FROM p_attempt::text;
COMMENT ON FUNCTION dlq.is_superseded IS
    'Whether dlqd set a job of River to completed (dlq.supersede) and the job has not run since.';

-- supersede removes the jobs of resolved entries from River's list of discarded jobs, where "retry
-- all" would do their work again:
--   - The entry's own job becomes completed. It keeps its unique key only if the key applied in its
--     former state: otherwise the job that did the work may hold the key. It loses the marker
--     dlq:entry_id, so that capture does not record a success.
--   - Redeliveries that did not do the work and are neither running nor completed are deleted. If
--     dlqd has no right to delete and a job did the work, they become completed instead.
--
-- An operator's transaction may stay open, and River's scheduler would wait for the jobs that it locks. So in an
-- operator's transaction, supersede locks only jobs that have ended. For other jobs it appends the fact "closed", which
-- a transaction of dlqd applies.
CREATE OR REPLACE FUNCTION dlq.supersede_jobs(p_ids uuid[], p_jobs bigint[], p_states text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_since constant timestamptz := dlq.closed_since(p_ids); -- older partitions need not be read
BEGIN
    UPDATE river.river_job j SET
        state = 'completed',
        finalized_at = now(),
        unique_key = CASE WHEN river.river_job_state_in_bitmask(j.unique_states, j.state) THEN j.unique_key END,
        metadata = (j.metadata - 'dlq:entry_id')
            || jsonb_build_object('dlq:done_by', coalesce(to_jsonb(s.job), to_jsonb(s.resolved_by), 'null'),
                                                                             'dlq:done', jsonb_build_object('entry',
                                                                                 s.entry, 'attempt', j.attempt))
    FROM (
        SELECT o.id, r.id AS entry, r.job, e.resolved_by
        FROM unnest(p_ids, p_jobs) r (id, job)
        JOIN dlq.dead_letter_queue e ON e.id = r.id AND e.stage = 'resolved' AND e.closed_at >= v_since
        JOIN river.river_job o ON o.id = e.river_job_id AND o.created_at = e.job_created_at
        WHERE o.state::text = ANY (p_states) AND o.id IS DISTINCT FROM r.job
        FOR NO KEY UPDATE OF o SKIP LOCKED
    ) s
    WHERE j.id = s.id;
    PERFORM dlq.drop_redelivery(o.id, o.created_at, r.job)
    FROM unnest(p_ids, p_jobs) r (id, job)
    JOIN dlq.dead_letter_queue e ON e.id = r.id AND e.stage = 'resolved' AND e.closed_at >= v_since
    JOIN dlq.entry_jobs m ON m.entry_id = r.id AND m.job_id IS DISTINCT FROM r.job
        AND (m.job_id, m.job_created_at) IS DISTINCT FROM (e.river_job_id, e.job_created_at)
    JOIN river.river_job o ON o.id = m.job_id AND o.created_at = m.job_created_at
    WHERE o.state::text = ANY (p_states);
END
$$;
COMMENT ON FUNCTION dlq.supersede_jobs IS 'Does the work of dlq.supersede, for jobs in one of p_states.';

CREATE OR REPLACE FUNCTION dlq.supersede(p_ids uuid[], p_jobs bigint[], p_actor text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_waits  constant text[] := '{available,scheduled,retryable,pending}';
    v_person constant boolean := dlq.is_person(p_actor);
    v_states constant text[] := ARRAY['discarded', 'cancelled'] || CASE WHEN NOT v_person THEN v_waits ELSE '{}' END;
BEGIN
    BEGIN
        PERFORM dlq.supersede_jobs(p_ids, p_jobs, v_states);
    EXCEPTION WHEN OTHERS THEN
        -- A missing right, or a constraint or trigger of the application, must not keep entries open. If one job cannot
        -- be changed, change the others one by one.
        FOR i IN 1 .. cardinality(p_ids) LOOP
            BEGIN
                PERFORM dlq.supersede_jobs(p_ids[i:i], p_jobs[i:i], v_states);
            EXCEPTION WHEN OTHERS THEN
                RAISE WARNING 'dlqd: entry % is resolved, but removing its jobs from River''s list of discarded jobs failed: %', p_ids[i], SQLERRM;
            END;
        END LOOP;
    END;
    IF v_person THEN
        INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id)
        SELECT e.river_job_id, e.job_created_at, 'closed', e.id
        FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.stage = 'resolved'
          AND EXISTS (SELECT FROM (SELECT e.river_job_id AS job_id, e.job_created_at UNION SELECT m.job_id,
              m.job_created_at FROM dlq.entry_jobs m WHERE m.entry_id = e.id) t
                      JOIN river.river_job j ON j.id = t.job_id AND j.created_at = t.job_created_at
                      WHERE j.state::text = ANY (v_waits));
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.supersede IS
    'For resolved entries, removes jobs whose work is done from River''s list of discarded jobs. '
    'The original becomes completed, with dlq:done_by in its metadata: the job in p_jobs that did '
    'the work, or else who resolved the entry. Other redeliveries that are not running are deleted.';

CREATE OR REPLACE FUNCTION dlq.drop_redelivery(p_job bigint, p_created_at timestamptz, p_done_by bigint DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
BEGIN
    IF has_table_privilege('river.river_job', 'DELETE') THEN
        DELETE FROM river.river_job j
        WHERE j.id = (SELECT o.id FROM river.river_job o WHERE o.id = p_job AND o.created_at = p_created_at
            AND o.state NOT IN ('running', 'completed') FOR UPDATE SKIP LOCKED);
    ELSIF p_done_by IS NOT NULL THEN
        UPDATE river.river_job j SET state = 'completed', finalized_at = now(),
            unique_key = CASE WHEN river.river_job_state_in_bitmask(j.unique_states, j.state) THEN j.unique_key END,
            metadata = (j.metadata - 'dlq:entry_id') || jsonb_build_object('dlq:done_by', p_done_by, 'dlq:done',
                jsonb_build_object('attempt', j.attempt))
        WHERE j.id = (SELECT o.id FROM river.river_job o WHERE o.id = p_job AND o.created_at = p_created_at
            AND o.state NOT IN ('running', 'completed') FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'dlqd: job % is no longer needed, but removing it from River''s lists failed: %', p_job, SQLERRM;
END
$$;
COMMENT ON FUNCTION dlq.drop_redelivery IS
    'Deletes a redelivery that is no longer needed, unless it is running or completed. Without the '
    'right to delete, sets it to completed if another job (p_done_by) has done its work.';

-- redirected runs for each entry of a batch. It has no SET clauses for planning, because its callers have them, and
-- setting them again took longer than the lookup.
CREATE OR REPLACE FUNCTION dlq.redirected(p_entry uuid, p_job bigint) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((SELECT jsonb_build_object('destination', m.destination) FROM dlq.entry_jobs m
                     WHERE m.job_id = p_job AND m.entry_id = p_entry AND m.destination IS NOT NULL LIMIT 1), '{}');
END
$$;
COMMENT ON FUNCTION dlq.redirected IS
    'The destination that a redelivery was sent to instead of its queue''s, as a part of its '
    'element in replay_attempts; {} if it was not redirected.';

CREATE OR REPLACE FUNCTION dlq.has_open_entry(p_job bigint, p_created_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM dlq.dead_letter_queue o WHERE o.stage = 'open' AND o.river_job_id = p_job
    AND o.job_created_at = p_created_at);
COMMENT ON FUNCTION dlq.has_open_entry IS
    'Whether a job has a filed, open entry. It has at most one, and a closed entry of the job '
    'cannot be reopened beside it.';

CREATE OR REPLACE FUNCTION dlq.sent_by(p_actor text, p_strategy dlq.strategy) RETURNS dlq.strategy
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_actor LIKE 'worker:%' THEN p_strategy ELSE 'manual' END;
COMMENT ON FUNCTION dlq.sent_by IS
    'The strategy of a redelivery: that of its entry if a worker made it; manual if an operator, a '
    'replay run or a retry outside dlqd did.';

CREATE OR REPLACE FUNCTION dlq.resolve_by(p_ids uuid[], p_jobs bigint[], p_ended timestamptz[], p_actor text)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_moving boolean;
    v_moved  bigint;
BEGIN
    -- Every replay run that redelivered one of these entries counts it as succeeded.
    UPDATE dlq.replay_run_entries r SET outcome = 'succeeded', ended_at = clock_timestamp(),
        worked = dlq.seconds_worked(j.attempted_at, j.finalized_at), version = dlq.reported_version(j.metadata)
    FROM unnest(p_ids, p_jobs) i (id, job) JOIN dlq.entry_jobs m ON m.entry_id = i.id AND m.run_id IS NOT NULL
    LEFT JOIN river.river_job j ON j.id = i.job AND j.id = m.job_id
    WHERE r.run_id = m.run_id AND r.entry_id = i.id AND r.outcome IS NULL;
    v_moving := dlq.set_moves((SELECT jsonb_build_object('actor', p_actor, 'reasons',
            jsonb_object_agg(e.id, 'job ' || d.job || ' completed'))
        FROM unnest(p_ids, p_jobs) d (id, job) JOIN dlq.dead_letter_open e ON e.id = d.id
        WHERE cardinality(p_ids) > 1 HAVING bool_and(d.job IS NOT DISTINCT FROM e.redelivery_job_id)));
    -- Most entries are open, so the first statement names only their partition. A statement that also named the
    -- partitions of failed entries would look each entry up in all of them.
    UPDATE dlq.dead_letter_queue e SET
        status = (CASE WHEN e.river_job_id < 0 AND dlq.is_published(e.id, d.job) THEN 'dlq_returned'
            ELSE 'dlq_resolved' END)::dlq.dead_letter_status,
        replay_attempts = e.replay_attempts || (CASE WHEN e.redelivery_job_id = d.job
            THEN jsonb_build_object('jobId', d.job, 'at', e.locked_at, 'endedAt', d.ended, 'actor', e.locked_by,
                                    'strategy', dlq.sent_by(e.locked_by, e.strategy), 'outcome', 'completed')
            ELSE jsonb_build_object('jobId', d.job, 'endedAt', d.ended, 'strategy', 'manual', 'outcome', 'completed')
            END || dlq.redirected(e.id, d.job)),
        resolution_strategy = CASE WHEN e.redelivery_job_id = d.job AND e.locked_by LIKE 'worker:%'
            THEN 'automatic_retry' ELSE 'manual_retry' END::dlq.resolution_strategy,
        resolved_by = CASE WHEN e.redelivery_job_id = d.job THEN e.locked_by ELSE 'job ' || d.job END,
        move = jsonb_build_object('actor', p_actor, 'reason',
            CASE WHEN d.job = e.redelivery_job_id THEN 'job ' || d.job || ' completed'
            WHEN d.job = e.river_job_id THEN 'the original, job ' || d.job || ', completed'
            ELSE 'an earlier redelivery, job ' || d.job || ', completed' END)
    FROM (SELECT unnest(p_ids) AS id, unnest(p_jobs) AS job, unnest(p_ended) AS ended) d
    WHERE e.id = d.id AND e.stage = 'open' AND e.status IN ('dlq_pending', 'dlq_processing', 'dlq_manual');
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    IF v_moving THEN
        PERFORM dlq.set_moves(NULL);
    END IF;
    IF v_moved < cardinality(p_ids) THEN -- a failed entry waits for no job
        UPDATE dlq.dead_letter_queue e SET
            status = 'dlq_resolved',
            replay_attempts = e.replay_attempts || (jsonb_build_object('jobId', d.job, 'endedAt', d.ended,
                'strategy', 'manual', 'outcome', 'completed') || dlq.redirected(e.id, d.job)),
            resolution_strategy = 'manual_retry',
            resolved_by = 'job ' || d.job,
            move = jsonb_build_object('actor', p_actor, 'reason', CASE WHEN d.job = e.river_job_id
                THEN 'the original, job ' || d.job || ', completed'
                ELSE 'an earlier redelivery, job ' || d.job || ', completed' END)
        FROM (SELECT unnest(p_ids) AS id, unnest(p_jobs) AS job, unnest(p_ended) AS ended) d
        WHERE e.id = d.id AND e.stage = 'failed' AND e.status = 'dlq_failed';
    END IF;
    PERFORM dlq.supersede(p_ids, p_jobs, p_actor);
END
$$;
COMMENT ON FUNCTION dlq.resolve_by IS
    'Resolves entries, each by the job that did its work: a redelivery, or the original if it was '
    'retried. The entry of a record that the job published becomes dlq_returned instead. p_ended: the times at which '
    'the jobs ended.';

CREATE OR REPLACE FUNCTION dlq.failed_at(p_job jsonb) RETURNS timestamptz
LANGUAGE sql STABLE
RETURN CASE WHEN dlq.to_timestamptz(p_job ->> 'finalized_at') BETWEEN '1970-01-01Z' AND now() + interval '1 day'
    THEN dlq.to_timestamptz(p_job ->> 'finalized_at') ELSE now() END;
COMMENT ON FUNCTION dlq.failed_at IS
    'When a job (to_jsonb of its row) ended: its finalized_at, or now if that is before 1970 or '
    'more than a day ahead, which clients may not be able to read.';

CREATE OR REPLACE FUNCTION dlq.has_failure(p_entry uuid, p_job jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_job        constant bigint := (p_job ->> 'id')::bigint;
    v_created_at constant timestamptz := dlq.to_timestamptz(p_job ->> 'created_at');
    v_failure    constant uuid := dlq.failure_of(v_job, p_job);
BEGIN
    RETURN coalesce(dlq.taken_by(v_job, v_created_at, v_failure), v_failure) = p_entry
       AND dlq.is_taken(v_job, v_created_at, v_failure, (p_job ->> 'attempt')::integer,
                        dlq.to_timestamptz(p_job ->> 'finalized_at'));
END
$$;
COMMENT ON FUNCTION dlq.has_failure IS
    'Whether a failure of a job (to_jsonb of its row, or a fact) is already recorded in this entry.';

CREATE OR REPLACE FUNCTION dlq.record_end(p_entry uuid, p_job jsonb, p_actor text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_entry   record;
    v_fail    record;
    v_used_up boolean;
    v_own_job boolean; -- whether this is the entry's own job
    v_other   uuid; -- another entry that already has this failure
    v_class   text;
    v_job     constant bigint := (p_job ->> 'id')::bigint;
    v_created_at constant timestamptz := dlq.to_timestamptz(p_job ->> 'created_at');
    v_failure constant uuid := dlq.failure_of(v_job, p_job);
    v_at      constant timestamptz := dlq.failed_at(p_job);
    v_state   constant text := p_job ->> 'state';
BEGIN
    SELECT e.dlq_retry_count, e.dlq_max_retries, e.locked_by, e.locked_at, e.river_job_id, e.job_created_at,
        e.error_class,
           EXISTS (SELECT FROM jsonb_array_elements(e.replay_attempts) a
                   WHERE a -> 'jobId' = to_jsonb(v_job) AND dlq.to_timestamptz(a ->> 'endedAt') = v_at) AS ended
    INTO v_entry
    FROM dlq.dead_letter_open e
    WHERE e.id = p_entry AND e.status = 'dlq_processing' AND e.redelivery_job_id = v_job
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_state = 'completed' THEN
        PERFORM dlq.resolve_by(ARRAY[p_entry], ARRAY[v_job], ARRAY[v_at], p_actor);
        RETURN true;
    END IF;

    v_own_job := (v_job, v_created_at) IS NOT DISTINCT FROM (v_entry.river_job_id, v_entry.job_created_at);
    v_used_up := v_entry.dlq_retry_count >= v_entry.dlq_max_retries;
    v_fail := dlq.describe_failure(p_job -> 'errors', p_job -> 'metadata', (p_job ->> 'attempt')::integer, v_at);
    IF p_job -> 'metadata' ? 'cancel_attempted_at' THEN
        v_fail.error_type := 'cancelled';
        v_fail.error_class := NULL;
        v_fail.error_message := 'redelivery was cancelled by an operator';
    ELSIF v_fail.error_class IS NULL AND v_fail.error_message LIKE 'Stuck job rescued by %' THEN
        -- River's rescuer ended the attempt before the worker could report an error: the entry keeps
        -- its class (see strategy.Planner).
        v_class := v_entry.error_class;
    END IF;
    UPDATE dlq.replay_run_entries r SET outcome = 'failed', detail = left(p_job -> 'errors' -> -1 ->> 'error', 1000),
        ended_at = clock_timestamp(),
        worked = (SELECT dlq.seconds_worked(j.attempted_at, j.finalized_at) FROM river.river_job j WHERE j.id = v_job),
        version = dlq.reported_version(p_job -> 'metadata')
    FROM dlq.entry_jobs m
    WHERE m.job_id = v_job AND m.entry_id = p_entry AND m.run_id IS NOT NULL AND r.run_id = m.run_id
        AND r.entry_id = p_entry AND r.job_id = v_job;
    -- Another entry, which is closed, already has this failure. Park the entry: an operator decides whether to close
    -- it, too.
    v_other := CASE WHEN v_own_job
        THEN coalesce(nullif(dlq.taken_by(v_job, v_entry.job_created_at, v_failure), p_entry),
                      (SELECT e.id FROM dlq.dead_letter_queue e WHERE e.stage <> 'inbox' AND e.id = v_failure
                           AND e.id <> p_entry LIMIT 1)) END;
    IF v_other IS NOT NULL THEN
        UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual', parked_by = p_actor,
            move = jsonb_build_object('actor', p_actor, 'reason', 'job ' || v_job || ' was ' || v_state
                || ', which is entry ' || v_other)
        WHERE id = p_entry AND stage = 'open' AND status = 'dlq_processing';
        RETURN true;
    END IF;
    -- The entry already has this failure, because the reconciler filed it before dlqd noticed the retry, or because a
    -- restore undid a retry. The entry stops waiting and keeps its last failure.
    IF v_entry.ended OR v_own_job AND dlq.has_failure(p_entry, p_job) THEN
        UPDATE dlq.dead_letter_queue SET
            status = CASE WHEN v_used_up THEN 'dlq_failed' ELSE 'dlq_pending' END::dlq.dead_letter_status,
            error_class = CASE WHEN v_used_up THEN error_class ELSE reported_class END,
            fingerprint = CASE WHEN v_used_up THEN fingerprint END,
            strategy = NULL,
            next_retry_at = now(),
            move = jsonb_build_object('actor', p_actor, 'reason', 'job ' || v_job || ' was ' || v_state
                || ', which is known')
        WHERE id = p_entry AND stage = 'open' AND status = 'dlq_processing';
        RETURN true;
    END IF;
    -- Record in dlq.retired_jobs that the entry has this failure, in two cases: the job is the entry's own, or the
    -- failure is also in the inbox, because the redelivery has lost its marker.
    IF v_own_job OR EXISTS (SELECT FROM dlq.dead_letter_inbox i WHERE i.id = v_failure) THEN
        PERFORM dlq.take_failure(v_job, v_created_at, v_failure, (p_job ->> 'attempt')::integer, p_entry);
    END IF;
    UPDATE dlq.dead_letter_queue SET
        status = CASE WHEN v_used_up THEN 'dlq_failed' ELSE 'dlq_pending' END::dlq.dead_letter_status,
        replay_attempts = replay_attempts || (
            jsonb_build_object('jobId', v_job, 'at', v_entry.locked_at, 'endedAt', v_at, 'actor', v_entry.locked_by,
                               'strategy', dlq.sent_by(v_entry.locked_by, strategy), 'outcome', v_state,
                               'error', left(v_fail.error_message, 4000))
            || jsonb_strip_nulls(jsonb_build_object(
                'processingDuration', v_fail.retry_history -> -1 -> 'processingDuration',
                'systemState', v_fail.retry_history -> -1 -> 'systemState'))
            || dlq.redirected(p_entry, v_job)),
        error_message = v_fail.error_message, error_type = v_fail.error_type, error_code = v_fail.error_code,
        error_title = v_fail.error_title,
        destination = v_fail.destination, destination_url = v_fail.destination_url,
        -- An entry that closes is not decided again, so it keeps its class.
        error_class = coalesce(v_fail.error_class, v_class, CASE WHEN v_used_up THEN error_class END),
        reported_class = v_fail.error_class,
        error_stack_trace = v_fail.error_stack_trace, error_context = v_fail.error_context,
        last_failed_at = v_at,
        metadata = dlq.metadata_after(metadata, v_own_job, v_job, p_job -> 'metadata'),
        fingerprint = CASE WHEN v_used_up THEN fingerprint END,
        strategy = NULL,
        next_retry_at = now(),
        move = jsonb_build_object('actor', p_actor, 'reason', 'job ' || v_job || ' was ' || v_state)
    WHERE id = p_entry AND stage = 'open' AND status = 'dlq_processing';
    -- River's list needs at most one discarded job per entry, the original: delete a failed
    -- redelivery.
    IF NOT v_own_job THEN
        PERFORM dlq.drop_redelivery(v_job, v_created_at);
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.record_end IS
    'Applies the end of the job that an entry waits for (to_jsonb of its row): the entry becomes dlq_resolved, '
    'dlq_pending (undecided), dlq_failed if its DLQ retries are spent, or dlq_manual if another entry has the '
    'failure. If the entry itself already has the failure, it only stops waiting. A redelivery whose failure is '
    'recorded is deleted from River. Returns false if the entry does not wait for this job: an end that comes twice '
    'counts once.';

CREATE OR REPLACE FUNCTION dlq.follow_jobs(p_entries uuid[], p_jobs bigint[], p_created_at timestamptz[], p_actor text,
    p_reasons text[], p_note text DEFAULT NULL, p_run uuid DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_moving boolean := false;
    v_moved  bigint;
BEGIN
    IF cardinality(p_entries) > 1 THEN
        v_moving := dlq.set_moves((SELECT jsonb_build_object('actor', p_actor, 'note', p_note, 'reasons',
            jsonb_object_agg(f.entry, f.reason)) FROM unnest(p_entries, p_reasons) f (entry, reason)));
    END IF;
    UPDATE dlq.dead_letter_open e SET
        status = 'dlq_processing',
        redelivery_job_id = f.job,
        dlq_retry_count = e.dlq_retry_count + 1,
        locked_by = p_actor,
        locked_at = now(),
        notes = coalesce(p_note, e.notes),
        move = jsonb_build_object('actor', p_actor, 'reason', f.reason, 'note', p_note)
    FROM unnest(p_entries, p_jobs, p_reasons) f (entry, job, reason)
    WHERE e.id = f.entry AND e.status IN ('dlq_pending', 'dlq_manual');
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    IF v_moving THEN
        PERFORM dlq.set_moves(NULL);
    END IF;
    -- Most entries are open. An UPDATE that also named the partitions of failed entries would have to prepare for each
    -- of them.
    IF v_moved < cardinality(p_entries) THEN
        UPDATE dlq.dead_letter_queue e SET
            status = 'dlq_processing',
            redelivery_job_id = f.job,
            dlq_retry_count = e.dlq_retry_count + 1,
            locked_by = p_actor,
            locked_at = now(),
            notes = coalesce(p_note, e.notes),
            move = jsonb_build_object('actor', p_actor, 'reason', f.reason, 'note', p_note)
        FROM unnest(p_entries, p_jobs, p_reasons) f (entry, job, reason)
        WHERE e.id = f.entry AND e.stage = 'failed' AND e.status = 'dlq_failed';
    END IF;
    INSERT INTO dlq.entry_jobs AS m (job_id, job_created_at, entry_id, run_id)
    SELECT f.job, f.created_at, f.entry, p_run FROM unnest(p_entries, p_jobs, p_created_at) f (entry, job, created_at)
    ON CONFLICT (job_id, job_created_at) DO UPDATE SET entry_id = excluded.entry_id,
    run_id = coalesce(excluded.run_id, m.run_id);
END
$$;
COMMENT ON FUNCTION dlq.follow_jobs IS
    'Makes entries wait for jobs that run again: their originals or redeliveries, retried outside dlqd. It counts a '
    'DLQ retry of each entry that is dlq_pending, dlq_manual or dlq_failed; any other entry keeps its status and '
    'gets only the marker of the job. No entry and no job may occur twice. If an entry already waits for another '
    'job, the success of either resolves it. dlq.watch_jobs comes next, in a transaction of dlqd''s own.';

CREATE OR REPLACE FUNCTION dlq.follow_job(p_entry uuid, p_job bigint, p_created_at timestamptz, p_actor text,
    p_reason text,
    p_note text DEFAULT NULL, p_run uuid DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.follow_jobs(ARRAY[p_entry], ARRAY[p_job], ARRAY[p_created_at], p_actor, ARRAY[p_reason], p_note, p_run);
END
$$;
COMMENT ON FUNCTION dlq.follow_job IS 'dlq.follow_jobs for one entry.';

-- If a job's metadata has the marker dlq:entry_id, capture records the job's success at once. dlqd writes the marker
-- only while the job waits to run. If dlqd wrote to a running job, a worker's transaction in REPEATABLE READ could not
-- end the job.
CREATE OR REPLACE FUNCTION dlq.watch_jobs(p_entries uuid[], p_jobs bigint[], p_created_at timestamptz[])
    RETURNS integer[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_job     record;
    v_left    integer[]; -- positions of jobs that did not wait to run
    v_running integer[] := '{}';
    -- Entries whose awaited job has completed, the ids of these jobs, and the times at which the jobs ended.
    v_entries uuid[] := '{}';
    v_jobs    bigint[] := '{}';
    v_ended   timestamptz[] := '{}';
BEGIN
    BEGIN
        WITH marked AS (
            UPDATE river.river_job j SET metadata = j.metadata || jsonb_build_object('dlq:entry_id', s.entry)
            FROM (
                SELECT o.id, w.entry, w.n
                FROM unnest(p_entries, p_jobs, p_created_at) WITH ORDINALITY w (entry, job, created_at, n)
                CROSS JOIN LATERAL (
                    SELECT l.id FROM river.river_job l
                    WHERE l.id = w.job AND l.created_at = w.created_at
                        AND l.state IN ('available', 'scheduled', 'retryable', 'pending')
                    FOR NO KEY UPDATE SKIP LOCKED
                ) o
            ) s
            WHERE j.id = s.id
            RETURNING s.n
        )
        SELECT array_agg(l.n) INTO v_left
        FROM (SELECT g.n FROM generate_series(1, cardinality(p_jobs)) g (n) EXCEPT SELECT m.n::integer FROM marked m) l;
    EXCEPTION WHEN OTHERS THEN
        -- A right is missing, or a constraint or trigger of the application refuses a change. Mark the jobs one by one,
        -- so that one such job does not keep the others from being marked.
        IF cardinality(p_jobs) > 1 THEN
            RETURN ARRAY(SELECT i FROM generate_series(1, cardinality(p_jobs)) i
                         WHERE dlq.watch_jobs(p_entries[i:i], p_jobs[i:i], p_created_at[i:i]) <> '{}');
        END IF;
        -- The marker could not be written, so check below whether the job has ended.
        v_left := '{1}';
    END;
    IF v_left IS NULL THEN
        RETURN '{}';
    END IF;
    FOR v_job IN
        SELECT w.n, p_entries[w.n] AS entry, p_jobs[w.n] AS id, j.id IS NULL AS gone, j.ended, j.marked, j.job,
               j.completed AND (SELECT e.id FROM dlq.dead_letter_open e
                   WHERE e.id = p_entries[w.n] AND e.status = 'dlq_processing' AND e.redelivery_job_id = p_jobs[w.n]
                   LIMIT 1) IS NOT NULL AS awaited,
               (SELECT min(f.at) FROM dlq.job_facts f WHERE f.job_id = p_jobs[w.n]
                   AND f.job_created_at = p_created_at[w.n] AND f.fact IN ('completed', 'discarded', 'cancelled'))
                   IS NULL AS unrecorded
        FROM unnest(v_left) w (n)
        LEFT JOIN LATERAL (
            SELECT o.id, o.finalized_at IS NOT NULL AS ended, o.state = 'completed' AS completed,
                   o.metadata @> jsonb_build_object('dlq:entry_id', p_entries[w.n]) AS marked,
                   CASE WHEN o.finalized_at IS NOT NULL THEN to_jsonb(o) - 'args' END AS job
            FROM river.river_job o WHERE o.id = p_jobs[w.n] AND o.created_at = p_created_at[w.n] LIMIT 1
        ) j ON true
        ORDER BY w.n
    LOOP
        IF v_job.gone THEN
            UPDATE dlq.dead_letter_queue SET status = 'dlq_manual', strategy = 'manual', parked_by = 'capture',
                move = jsonb_build_object('actor', 'capture', 'reason', 'retried outside dlqd as job ' || v_job.id
                    || ', which is gone')
            WHERE id = v_job.entry AND stage = 'open' AND status = 'dlq_processing' AND redelivery_job_id = v_job.id;
            -- End the wait of the replay run that follows the job.
            UPDATE dlq.replay_run_entries r SET outcome = 'failed', detail = 'job ' || v_job.id || ' is gone',
                ended_at = clock_timestamp()
            FROM dlq.entry_jobs m
            WHERE m.job_id = v_job.id AND m.job_created_at = p_created_at[v_job.n] AND m.entry_id = v_job.entry
                AND r.run_id = m.run_id AND r.entry_id = v_job.entry AND r.job_id = v_job.id AND r.outcome IS NULL;
        ELSIF NOT v_job.ended THEN
            -- The job runs. A redelivery has the marker from the start; another job gets it after this attempt.
            IF NOT v_job.marked THEN
                v_running := v_running || v_job.n;
            END IF;
        -- The job has ended. If capture recorded its end as a fact, dlq.apply_facts applies it.
        ELSIF v_job.unrecorded AND v_job.awaited THEN -- the entry is resolved after the loop
            v_entries := v_entries || v_job.entry;
            v_jobs := v_jobs || v_job.id;
            v_ended := v_ended || dlq.failed_at(v_job.job);
        ELSIF v_job.unrecorded THEN
            PERFORM dlq.apply_end(v_job.entry, v_job.job, true);
        END IF;
    END LOOP;
    IF v_entries <> '{}' THEN
        PERFORM dlq.resolve_by(v_entries, v_jobs, v_ended, 'capture');
    END IF;
    RETURN v_running;
END
$$;
COMMENT ON FUNCTION dlq.watch_jobs IS
    'Writes the marker into those jobs of entries that wait to run. If a job has ended, applies its '
    'end. If it is gone, parks the entry that waits for it. No entry and no job may occur twice. '
    'Returns the positions of jobs that run without a marker: call again for these.';

CREATE OR REPLACE FUNCTION dlq.watch_job(p_entry uuid, p_job bigint, p_created_at timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN dlq.watch_jobs(ARRAY[p_entry], ARRAY[p_job], ARRAY[p_created_at]) = '{}';
END
$$;
COMMENT ON FUNCTION dlq.watch_job IS
    'dlq.watch_jobs for one job. Returns false if it runs without a marker: call again.';

CREATE OR REPLACE FUNCTION dlq.follow_retries(p_entries uuid[], p_jobs bigint[], p_created_at timestamptz[],
    p_user text) RETURNS integer[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.follow_jobs(p_entries, p_jobs, p_created_at, 'river:' || p_user,
        ARRAY(SELECT 'job ' || j.id || ' was retried outside dlqd' FROM unnest(p_jobs) WITH ORDINALITY j (id, n)
              ORDER BY j.n));
    RETURN dlq.watch_jobs(p_entries, p_jobs, p_created_at);
END
$$;
COMMENT ON FUNCTION dlq.follow_retries IS
    'Applies retries that a database user made outside dlqd to the entries of the jobs. None of the entries may be '
    'closed. Returns the same as dlq.watch_jobs.';

CREATE OR REPLACE FUNCTION dlq.assign_ends(p_entries uuid[], p_jobs bigint[], p_created_at timestamptz[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    UPDATE dlq.job_facts f SET entry_id = r.entry
    FROM unnest(p_entries, p_jobs, p_created_at) r (entry, job, created_at)
    WHERE f.job_id = r.job AND f.job_created_at = r.created_at AND f.entry_id IS NULL
        AND f.fact IN ('discarded', 'cancelled', 'refused');
END
$$;
COMMENT ON FUNCTION dlq.assign_ends IS
    'Assigns failures of retried jobs to p_entries, if facts recorded them without an entry. If River has deleted '
    'the job when such a fact is applied, the entry''s payload is used.';

-- file_end files a failure for which only a fact exists, because its entry is closed or deleted. A fact has the error
-- but not the payload, which comes from the first of these that exists:
--   1. River's job, even if it runs again by now. If dlq.supersede has completed the job, it may have lost its unique
--      key; the new entry then gets the key of the closed one.
--   2. The job's closed entry p_entry.
--   3. Nothing, if the job and its entries were deleted before the fact was applied. The failure becomes an entry
--      without a payload, like an erased one, with the queue and kind of the deleted entry from the audit trail. It
--      has no metadata, which only redeliveries need. The failure of a redelivery is not filed, because it belonged to
--      the deleted entry.
-- If the payload is gone or was erased, nothing is left to redeliver, and the entry is archived at once.
CREATE OR REPLACE FUNCTION dlq.file_end(p_entry uuid, p_job jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_job        constant bigint := (p_job ->> 'id')::bigint;
    v_created_at constant timestamptz := dlq.to_timestamptz(p_job ->> 'created_at');
    v_failure    constant uuid := dlq.failure_of(v_job, p_job);
    v_attempt    constant integer := (p_job ->> 'attempt')::integer;
    v_at         constant timestamptz := dlq.failed_at(p_job);
    v_message    constant text := p_job -> 'errors' -> -1 ->> 'error';
    v_deleted    uuid[]; -- deleted entries of the job
    v_since      timestamptz;
    v_reason     text; -- why there is no payload; null if it was erased
    v_id         uuid; -- the new entry's id, if another failure's entry has v_failure
BEGIN
    IF NOT dlq.is_failure(p_job) OR dlq.is_taken(v_job, v_created_at, v_failure, v_attempt,
        dlq.to_timestamptz(p_job ->> 'finalized_at')) THEN
        RETURN;
    END IF;
    INSERT INTO dlq.dead_letter_inbox
        (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, subscriber_id, source, ordering_key,
         priority, tags, original_event, error_message, retry_history, retry_count, max_retries, unique_key,
         unique_states,
         metadata, next_retry_at, first_failed_at, last_failed_at)
    SELECT v_failure, m.message_id, j.id, j.created_at, j.queue, coalesce(m.kind, j.kind), j.kind, m.subscriber_id,
           m.source, m.ordering_key,
           j.priority, j.tags, j.args, v_message,
           (SELECT coalesce(jsonb_agg(r.error ORDER BY r.number), '[]')
               FROM unnest(j.errors) WITH ORDINALITY r (error, number)
            WHERE jsonb_typeof(r.error -> 'attempt') = 'number' AND r.error -> 'attempt' < to_jsonb(v_attempt))
                || coalesce(p_job -> 'errors' -> -1, '[]'),
           v_attempt, greatest(j.max_attempts, v_attempt),
           coalesce(j.unique_key, e.unique_key), coalesce(j.unique_states, e.unique_states),
           coalesce(p_job -> 'metadata', '{}'), now(), v_at, v_at
    FROM river.river_job j
    LEFT JOIN LATERAL (SELECT e.unique_key, e.unique_states FROM dlq.dead_letter_queue e
                       WHERE e.id = p_entry AND e.river_job_id = v_job AND e.job_created_at = v_created_at
                           AND e.stage <> 'inbox'
                       LIMIT 1) e ON j.unique_key IS NULL
    LEFT JOIN LATERAL (SELECT left(j.args ->> 'messageId', 255) AS message_id, left(j.args ->> 'kind', 255) AS kind,
        left(j.args ->> 'subscriberId', 255) AS subscriber_id,
                              left(j.args ->> 'source', 255) AS source,
                              left(j.args ->> 'orderingKey', 255) AS ordering_key) m ON j.kind = 'dlqd_message'
    WHERE j.id = v_job AND j.created_at = v_created_at;
    IF NOT FOUND THEN
        INSERT INTO dlq.dead_letter_inbox
            (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, subscriber_id, source, ordering_key,
             priority, tags, original_event, error_message, retry_history, retry_count, max_retries, unique_key,
             unique_states,
             metadata, next_retry_at, first_failed_at, last_failed_at)
        SELECT v_failure, e.event_id, e.river_job_id, e.job_created_at, e.queue, e.kind, e.job_kind, e.subscriber_id,
               e.source, e.ordering_key,
               e.priority, e.tags, e.original_event, v_message, coalesce(p_job -> 'errors', '[]'), v_attempt,
               greatest(e.max_retries, v_attempt), e.unique_key, e.unique_states,
               coalesce(p_job -> 'metadata', '{}'), now(), v_at, v_at
        FROM dlq.dead_letter_queue e WHERE e.id = p_entry AND e.river_job_id = v_job AND e.job_created_at = v_created_at
            AND e.stage <> 'inbox' LIMIT 1;
    END IF;
    IF NOT FOUND THEN
        v_deleted := ARRAY(SELECT r.entry_id FROM dlq.retired_jobs r
                        WHERE r.job_id = v_job AND r.job_created_at = v_created_at
                            AND (p_entry IS NULL OR r.failure = r.entry_id));
        IF p_entry IS NOT NULL AND v_deleted = '{}' THEN
            RETURN;
        END IF;
        v_since := dlq.closed_since(v_deleted);
        INSERT INTO dlq.dead_letter_inbox
            (id, river_job_id, job_created_at, queue, kind, job_kind, priority, original_event, error_message,
             retry_history, retry_count, max_retries, metadata, next_retry_at,
             first_failed_at, last_failed_at)
        SELECT v_failure, v_job, v_created_at, coalesce(t.queue, 'unknown'), coalesce(t.kind, 'unknown'),
               coalesce(t.kind, 'unknown'), 1, '{"erased": true}', v_message, coalesce(p_job -> 'errors', '[]'),
               v_attempt, v_attempt, coalesce(p_job -> 'metadata', '{}'), now(), v_at, v_at
        FROM (VALUES (1)) one
        LEFT JOIN (SELECT m.queue, m.kind FROM dlq.dead_letter_transitions m
                   WHERE m.entry_id = ANY (v_deleted) AND m.at >= v_since ORDER BY m.at DESC LIMIT 1) t ON true;
        v_reason := 'job ' || v_job || ' and its entry were deleted: there is no payload';
    END IF;
    IF EXISTS (SELECT FROM dlq.dead_letter_inbox i
               WHERE i.id = v_failure AND i.river_job_id = v_job AND i.original_event = '{"erased": true}') THEN
        PERFORM dlq.file(ARRAY[v_failure]);
        -- If an entry of another failure has the id v_failure, dlq.file gave this row a new id. Then
        -- file the row by its new id.
        SELECT r.entry_id INTO v_id FROM dlq.retired_jobs r
        WHERE r.job_id = v_job AND r.job_created_at = v_created_at AND r.failure = v_failure
          AND r.attempt = coalesce(v_attempt, 0) AND r.entry_id <> v_failure;
        IF FOUND THEN
            PERFORM dlq.file(ARRAY[v_id]);
        END IF;
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_archived', resolution_strategy = 'discard',
            resolved_by = 'capture',
            metadata = CASE WHEN v_reason IS NULL THEN e.metadata ELSE '{}' END,
            move = jsonb_build_object('actor', 'capture', 'reason', coalesce(v_reason, 'its payload was erased'))
        WHERE e.id = coalesce(v_id, v_failure) AND e.stage = 'open' AND e.status = 'dlq_pending'
          AND e.original_event = '{"erased": true}';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.file_end IS
    'Appends a failure of a job (to_jsonb of its row, or a fact) to the inbox if it is recorded in no '
    'entry, with the payload of River''s job or of the job''s closed entry p_entry. If both are '
    'deleted, or the payload was erased, files the failure as an archived entry.';

CREATE OR REPLACE FUNCTION dlq.apply_end(p_entry uuid, p_job jsonb, p_own boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_entry      record;
    v_job        constant bigint := (p_job ->> 'id')::bigint;
    v_created_at timestamptz;
    v_at         timestamptz;
    v_failure    uuid;
    v_own_job    boolean; -- whether this is the entry's own job
BEGIN
    IF dlq.record_end(p_entry, p_job, 'capture') THEN
        RETURN;
    END IF;
    -- These values are computed only here, because dlq.to_timestamptz costs a subtransaction, and most ends need only
    -- record_end.
    v_created_at := dlq.to_timestamptz(p_job ->> 'created_at');
    v_at := dlq.failed_at(p_job);
    v_failure := dlq.failure_of(v_job, p_job);
    SELECT e.status, e.rule, e.river_job_id, e.job_created_at,
        e.replay_attempts @> jsonb_build_array(jsonb_build_object('jobId', v_job, 'outcome', p_job -> 'state')) AS known
    INTO v_entry FROM dlq.dead_letter_queue e WHERE e.id = p_entry;
    IF p_job ->> 'state' = 'completed' THEN
        -- An entry with the rule done-twice stays as it is: an operator decides whether the second run of the work
        -- matters.
        IF v_entry.status IN ('dlq_resolved', 'dlq_returned') AND v_entry.known THEN
            RETURN; -- an end that comes twice counts once
        ELSIF v_entry.status IN ('dlq_resolved', 'dlq_archived') OR v_entry.rule = 'done-twice' THEN
            PERFORM dlq.note_on(ARRAY[p_entry], 'capture', 'job ' || v_job || ' completed, too', NULL);
        ELSE
            PERFORM dlq.resolve_by(ARRAY[p_entry], ARRAY[v_job], ARRAY[dlq.failed_at(p_job)], 'capture');
        END IF;
    ELSE
        v_own_job := (v_job, v_created_at) IS NOT DISTINCT FROM (v_entry.river_job_id, v_entry.job_created_at);
        IF v_own_job AND dlq.is_taken(v_job, v_created_at, v_failure, (p_job ->> 'attempt')::integer,
            dlq.to_timestamptz(p_job ->> 'finalized_at')) THEN
            RETURN;
        END IF;
        IF p_own THEN
            -- The audit row gets the time of the failure, so that analytics count the failure. Exception: file_end or
            -- failed_again below writes an audit row that counts it.
            INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, reason, strategy, rule,
                next_retry_at, river_job_id, queue, kind,
                                                     error_class, from_class, config_version, error_type, failed_at)
            SELECT e.id, e.status, e.status, 'capture', 'job ' || v_job || ', which the entry does not wait for, was '
                || (p_job ->> 'state'),
                   e.strategy, e.rule, e.next_retry_at, e.river_job_id, e.queue, e.kind, e.error_class, e.error_class,
                   e.config_version, f.error_type, f.at
            FROM dlq.dead_letter_queue e
            LEFT JOIN LATERAL (SELECT coalesce(d.error_type, '') AS error_type, v_at AS at
                               FROM dlq.describe_failure(p_job -> 'errors', p_job -> 'metadata',
                                   (p_job ->> 'attempt')::integer, v_at) d) f
                   ON CASE WHEN dlq.is_open(e.status) THEN e.status = 'dlq_processing' ELSE NOT v_own_job END
            WHERE e.id = p_entry AND NOT EXISTS (SELECT FROM dlq.dead_letter_transitions t WHERE t.entry_id = p_entry
                AND t.failed_at = v_at);
        END IF;
        IF v_own_job AND dlq.is_open(v_entry.status) THEN
            PERFORM dlq.take_failure(v_job, v_created_at, v_failure, (p_job ->> 'attempt')::integer, p_entry);
        ELSIF v_own_job THEN
            PERFORM dlq.file_end(p_entry, p_job); -- the closed entry does not have this failure
        END IF;
        IF dlq.is_open(v_entry.status) AND (NOT p_own OR v_entry.status <> 'dlq_processing') THEN
            PERFORM dlq.failed_again(p_entry, p_job -> 'errors', p_job -> 'metadata', (p_job ->> 'attempt')::integer,
                NULL, dlq.failed_at(p_job), 'capture');
        END IF;
        IF p_own AND NOT v_own_job THEN
            PERFORM dlq.drop_redelivery(v_job, v_created_at);
        END IF;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.apply_end IS
    'Applies the end of a job (to_jsonb of its row) to an entry. p_own: dlqd made or follows the '
    'job; otherwise it is the entry''s own job, which failed again.';

-- taken_by is in PL/pgSQL, which keeps the plan. Postgres would plan an SQL function with a subquery again in every
-- statement.
CREATE OR REPLACE FUNCTION dlq.taken_by(p_job bigint, p_created_at timestamptz, p_failure uuid) RETURNS uuid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN (SELECT r.entry_id FROM dlq.retired_jobs r WHERE r.job_id = p_job AND r.job_created_at = p_created_at
        AND r.failure = p_failure ORDER BY r.attempt DESC LIMIT 1);
END
$$;
COMMENT ON FUNCTION dlq.taken_by IS
    'The entry in which a failure of a job is recorded, by dlq.retired_jobs; null for failures that are not '
    'there, because the id of their entry identifies them.';

CREATE OR REPLACE FUNCTION dlq.apply_fact(p_fact dlq.job_facts) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_id     uuid;
    v_open   uuid;
    v_own    boolean;
    v_found  boolean; -- whether v_id is open, or the fact is about a closed entry
    v_entry  record;
    v_actor  constant text := 'river:' || p_fact.db_user;
    v_origin constant text := current_setting('dlq.origin', true);
    v_done   boolean := true;
BEGIN
    v_id := CASE WHEN p_fact.fact = 'closed' THEN p_fact.entry_id
                 ELSE (SELECT m.entry_id FROM dlq.entry_jobs m WHERE m.job_id = p_fact.job_id
                     AND m.job_created_at = p_fact.job_created_at) END;
    v_own := v_id IS NOT NULL;
    v_found := p_fact.fact = 'closed';
    IF NOT v_found AND v_own THEN -- with a null id, Postgres would plan this query each time
        v_found := EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.id = v_id);
    END IF;
    IF NOT v_found THEN
        -- If the entry that followed the job is closed, use the open entry that the job itself has.
        v_open := (SELECT e.id FROM dlq.dead_letter_open e WHERE e.river_job_id = p_fact.job_id
            AND e.job_created_at = p_fact.job_created_at);
        v_own := v_own AND v_open IS NULL;
        v_id := coalesce(v_open, v_id,
            CASE p_fact.fact WHEN 'retried' THEN dlq.taken_by(p_fact.job_id, p_fact.job_created_at,
                p_fact.entry_id) END, p_fact.entry_id);
    END IF;
    SELECT e.stage, e.status, e.redelivery_job_id, e.closed_at, e.resolution_strategy, e.resolved_by,
        e.replay_attempts, e.river_job_id, e.job_created_at, e.queue, e.ordering_key INTO v_entry
    FROM dlq.dead_letter_open e WHERE e.id = v_id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        SELECT e.stage, e.status, e.redelivery_job_id, e.closed_at, e.resolution_strategy, e.resolved_by,
            e.replay_attempts, e.river_job_id, e.job_created_at, e.queue, e.ordering_key INTO v_entry
        FROM dlq.dead_letter_queue e WHERE e.id = v_id FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN -- there is no entry, or it is deleted or locked
            IF EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = v_id) THEN
                RETURN 'held';
            ELSIF p_fact.fact IN ('discarded', 'cancelled') THEN
                PERFORM dlq.file_end(v_id, jsonb_build_object('id', p_fact.job_id, 'created_at', p_fact.job_created_at,
                    'state', p_fact.fact, 'finalized_at', p_fact.at) || coalesce(p_fact.job, '{}'));
            ELSIF p_fact.fact = 'returned' THEN
                PERFORM dlq.return_record(v_id, p_fact.job);
            END IF;
            RETURN 'done';
        END IF;
    END IF;
    IF p_fact.fact = 'retried' AND NOT v_own
        AND (v_entry.river_job_id, v_entry.job_created_at) IS DISTINCT FROM (p_fact.job_id, p_fact.job_created_at) THEN
        RETURN 'done'; -- the marker was copied from another job
    END IF;
    IF v_entry.stage = 'inbox' THEN
        PERFORM dlq.file(ARRAY[v_id]);
    END IF;

    CASE p_fact.fact
    WHEN 'closed' THEN
        IF v_entry.status = 'dlq_resolved' THEN
            PERFORM dlq.supersede(ARRAY[v_id],
                ARRAY[CASE WHEN v_entry.replay_attempts @> '[{"outcome": "completed"}]'
                    THEN (v_entry.replay_attempts -> -1 ->> 'jobId')::bigint END], 'capture');
        END IF;
        IF v_entry.ordering_key IS NOT NULL AND NOT dlq.is_open(v_entry.status) THEN
            PERFORM dlq.order_done(v_entry.queue, v_entry.ordering_key, p_fact.job_id, p_fact.job_created_at);
        END IF;
    WHEN 'returned' THEN
        -- The record came back before the end of its redelivery was applied. Apply that end first.
        IF v_entry.redelivery_job_id = (p_fact.job ->> 'redelivery')::bigint THEN
            RETURN 'held';
        END IF;
        PERFORM dlq.return_record(v_id, p_fact.job);
    WHEN 'following' THEN
        v_done := dlq.watch_job(v_id, p_fact.job_id, p_fact.job_created_at);
    WHEN 'retried' THEN
        PERFORM set_config('dlq.origin', 'River, as ' || p_fact.db_user, true);
        IF v_entry.stage IN ('resolved', 'failed', 'archived')
            AND dlq.has_open_entry(v_entry.river_job_id, v_entry.job_created_at) THEN
            PERFORM dlq.note_on(ARRAY[v_id], v_actor, 'job ' || p_fact.job_id || ' was retried outside dlqd; job '
                || v_entry.river_job_id || ' has an open entry by now', NULL);
        ELSIF v_entry.status NOT IN ('dlq_resolved', 'dlq_archived')
              AND (SELECT dlq.has_failure(v_id, to_jsonb(j) - 'args') FROM river.river_job j
                   WHERE j.id = p_fact.job_id AND j.created_at = p_fact.job_created_at
                       AND j.state IN ('discarded', 'cancelled')) THEN
            PERFORM dlq.note_on(ARRAY[v_id], v_actor,
                                'job ' || p_fact.job_id || ' was retried outside dlqd, and its failure is known', NULL);
        ELSIF v_entry.status NOT IN ('dlq_resolved', 'dlq_archived') THEN
            IF v_entry.redelivery_job_id <> p_fact.job_id THEN
                PERFORM dlq.note_on(ARRAY[v_id], v_actor, 'job ' || p_fact.job_id
                    || ' was retried outside dlqd while job ' || v_entry.redelivery_job_id || ' is under way', NULL);
            END IF;
            v_done := dlq.follow_retries(ARRAY[v_id], ARRAY[p_fact.job_id], ARRAY[p_fact.job_created_at],
                p_fact.db_user) = '{}';
        ELSIF NOT EXISTS (SELECT FROM jsonb_array_elements(v_entry.replay_attempts) a -- unless this retry resolved it
                          WHERE a -> 'jobId' = to_jsonb(p_fact.job_id) AND a ->> 'outcome' = 'completed'
                              AND dlq.to_timestamptz(a ->> 'endedAt') >= p_fact.at) THEN
            -- If another job resolved the entry while the retry had this job locked, dlq.supersede
            -- skipped this job. Supersede it now; if it runs, supersede skips it again.
            IF p_fact.at <= v_entry.closed_at AND v_entry.status = 'dlq_resolved' THEN
                PERFORM dlq.supersede(ARRAY[v_id], ARRAY[(v_entry.replay_attempts -> -1 ->> 'jobId')::bigint],
                    'capture');
            END IF;
            IF p_fact.at <= v_entry.closed_at AND (v_entry.resolution_strategy IN ('discard', 'manual_resolution')
                OR v_entry.resolution_strategy = 'expired' AND dlq.is_person(v_entry.resolved_by)) THEN
                -- An operator closed the entry after the retry: an older fact does not reopen it.
                PERFORM dlq.note_on(ARRAY[v_id], v_actor, 'job ' || p_fact.job_id
                    || ' was retried outside dlqd before the entry was '
                                    || CASE WHEN v_entry.status = 'dlq_resolved' THEN 'resolved'
                                        WHEN v_entry.resolution_strategy = 'expired' THEN 'expired'
                                        ELSE 'discarded' END,
                                    NULL);
            ELSIF p_fact.at <= v_entry.closed_at AND v_entry.status = 'dlq_resolved'
                  AND p_fact.job_id <> v_entry.river_job_id
                  AND NOT EXISTS (SELECT FROM river.river_job j
                                  WHERE j.id = p_fact.job_id AND j.created_at = p_fact.job_created_at)
                  AND NOT EXISTS (SELECT FROM dlq.job_facts f
                                  WHERE f.job_id = p_fact.job_id AND f.job_created_at = p_fact.job_created_at
                                    AND f.fact NOT IN ('retried', 'following', 'closed')) THEN
                -- dlqd deletes a redelivery that waits to run when its entry is resolved or its
                -- failure is applied. If the redelivery had run, its end would be a later fact.
                PERFORM dlq.note_on(ARRAY[v_id], v_actor, 'job ' || p_fact.job_id
                    || ' was retried outside dlqd before the entry '
                                    || 'was resolved, and deleted before it ran', NULL);
            ELSE
                UPDATE dlq.dead_letter_queue SET
                    status = 'dlq_manual', strategy = 'manual', rule = 'done-twice', parked_by = v_actor,
                    move = jsonb_build_object('actor', v_actor, 'reason', 'done twice? job ' || p_fact.job_id
                        || ' was retried outside dlqd after the entry was '
                                              || CASE WHEN v_entry.status = 'dlq_resolved' THEN 'resolved'
                                                  WHEN v_entry.resolution_strategy = 'expired' THEN 'expired'
                                                  ELSE 'discarded' END)
                WHERE id = v_id AND stage = v_entry.stage AND status = v_entry.status
                  AND NOT EXISTS (SELECT FROM river.river_job j WHERE j.id = p_fact.job_id
                      AND j.created_at = p_fact.job_created_at
                      AND dlq.is_superseded(j.state::text, j.attempt, j.metadata));
            END IF;
        END IF;
        PERFORM set_config('dlq.origin', coalesce(v_origin, ''), true);
        PERFORM dlq.assign_ends(ARRAY[v_id], ARRAY[p_fact.job_id], ARRAY[p_fact.job_created_at]);
    ELSE
        PERFORM dlq.apply_end(v_id, jsonb_build_object('id', p_fact.job_id, 'created_at', p_fact.job_created_at,
            'state', p_fact.fact, 'finalized_at', p_fact.at) || coalesce(p_fact.job, '{}'), v_own);
    END CASE;
    RETURN CASE WHEN v_done THEN 'done' ELSE 'following' END;
END
$$;
COMMENT ON FUNCTION dlq.apply_fact IS
    'Applies a fact to the entry of its job; files a failure whose job has no entry. Returns done; held, if another '
    'session has locked the entry or the end of its redelivery has to be applied first (call again); or following, if '
    'a running job does not have its marker yet (dlq:entry_id in its metadata; call again).';

CREATE OR REPLACE FUNCTION dlq.may_pass(p_sqlstate text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_sqlstate <> 'XX001' AND left(p_sqlstate, 2) IN ('08', '0A', '25', '28', '3D', '3F', '40', '42', '53', '55',
    '57', '58', 'F0', 'HV', 'XX');
COMMENT ON FUNCTION dlq.may_pass IS
    'Whether an error may be temporary: a deadlock, a lock that is not available, a missing right. '
    'Any other error means that the database refuses the row; postgres.IsRefusal in Go has the same '
    'rule.';

-- apply_facts applies the facts of a job in order: a fact waits while an earlier one of its job exists, except for
-- facts "following". The two most frequent facts are applied in one statement for all entries: the redelivery for which
-- an entry waits has completed, and the job of an entry that waits for no job was retried. Such a retry is applied
-- alone if another job of its entry has a fact, because facts of one entry are applied in the order of the table.
--
-- Facts are read from the position p_from on. While an open transaction keeps vacuum from removing deleted rows,
-- reading past those rows twenty times a second would cost more and more. A caller that passes p_from still has to read
-- the whole table from time to time (see internal/facts).
--
-- The queries have subqueries that return one value. With EXISTS instead, a plan that Postgres made while the table was
-- small might read the whole table.
CREATE OR REPLACE FUNCTION dlq.apply_facts(p_limit integer DEFAULT 500, p_run uuid DEFAULT NULL,
    p_from tid DEFAULT '(0,0)', p_careful boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_facts   tid[];
    v_entries uuid[];
    v_jobs    bigint[];
    v_ended   timestamptz[];
    v_created timestamptz[];
    v_user    text;
    v_running integer[];
    v_origin  constant text := coalesce(current_setting('dlq.origin', true), '');
    v_tid     tid;
    v_fact    dlq.job_facts;
    v_refused boolean;
    v_result  text;
    v_count   integer := 0;
    v_wake    boolean := false;
    -- The call stops after 1 s, because its entries stay locked until then, and an operator or worker that moves one of
    -- them waits.
    v_until   constant timestamptz := clock_timestamp() + interval '1 s';
    -- The call may hold locks on jobs, too. So it waits at most 250 ms for a session that has locked
    -- a table of dlqd.
    v_wait    constant text := current_setting('lock_timeout');
BEGIN
    -- Most calls find no fact. Return before the queries below, which a new session would plan first (measured: 12 of
    -- the 16 ms of six calls).
    IF (SELECT f.fact FROM dlq.job_facts f WHERE f.ctid >= p_from LIMIT 1) IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM set_config('lock_timeout', '250ms', true);
    IF NOT p_careful THEN
        SELECT array_agg(d.fact), array_agg(d.entry_id), array_agg(d.job_id), array_agg(d.at) INTO v_facts, v_entries,
            v_jobs, v_ended
        FROM (
            SELECT f.ctid AS fact, e.id AS entry_id, f.job_id, f.at
            FROM dlq.job_facts f
            CROSS JOIN LATERAL (
                SELECT o.id FROM dlq.dead_letter_open o
                WHERE o.id = f.entry_id AND o.status = 'dlq_processing' AND o.redelivery_job_id = f.job_id
                FOR UPDATE SKIP LOCKED
            ) e
            WHERE f.ctid >= p_from AND f.fact = 'completed'
              AND f.at = (SELECT min(b.at) FROM dlq.job_facts b WHERE b.job_id = f.job_id
                  AND b.job_created_at = f.job_created_at AND b.fact <> 'following')
              AND (p_run IS NULL OR p_run = (SELECT m.run_id FROM dlq.entry_jobs m WHERE m.job_id = f.job_id
                  AND m.job_created_at = f.job_created_at))
            LIMIT p_limit
            FOR UPDATE OF f SKIP LOCKED
        ) d;
        IF v_facts IS NOT NULL THEN
            PERFORM dlq.resolve_by(v_entries, v_jobs, v_ended, 'capture');
            DELETE FROM dlq.job_facts f WHERE f.ctid = ANY (v_facts);
            v_count := cardinality(v_facts);
        END IF;
        FOR v_user, v_facts, v_entries, v_jobs, v_created IN
            SELECT d.db_user, array_agg(d.fact), array_agg(d.entry_id), array_agg(d.job_id), array_agg(d.job_created_at)
            FROM (
                SELECT DISTINCT ON (l.entry_id) l.*
                FROM (
                    SELECT f.ctid AS fact, e.id AS entry_id, f.job_id, f.job_created_at, f.db_user
                    FROM dlq.job_facts f
                    CROSS JOIN LATERAL (
                        SELECT o.id FROM dlq.dead_letter_open o
                        WHERE o.river_job_id = f.job_id AND o.job_created_at = f.job_created_at
                          AND o.status IN ('dlq_pending', 'dlq_manual')
                          AND coalesce((SELECT m.entry_id FROM dlq.entry_jobs m WHERE m.job_id = f.job_id
                              AND m.job_created_at = f.job_created_at), o.id) = o.id
                          AND (SELECT min((SELECT min(b.at) FROM dlq.job_facts b WHERE b.job_id = m.job_id
                                   AND b.job_created_at = m.job_created_at))
                               FROM dlq.entry_jobs m WHERE m.entry_id = o.id
                                   AND (m.job_id, m.job_created_at) <> (f.job_id, f.job_created_at)) IS NULL
                          AND (SELECT dlq.has_failure(o.id, to_jsonb(j) - 'args') FROM river.river_job j
                               WHERE j.id = f.job_id AND j.created_at = f.job_created_at
                                   AND j.state IN ('discarded', 'cancelled')) IS NOT TRUE
                        FOR UPDATE SKIP LOCKED
                    ) e
                    WHERE f.ctid >= p_from AND f.fact = 'retried'
                      AND f.at = (SELECT min(b.at) FROM dlq.job_facts b WHERE b.job_id = f.job_id
                          AND b.job_created_at = f.job_created_at AND b.fact <> 'following')
                      AND (p_run IS NULL OR p_run = (SELECT m.run_id FROM dlq.entry_jobs m WHERE m.job_id = f.job_id
                          AND m.job_created_at = f.job_created_at))
                    LIMIT p_limit - v_count
                    FOR UPDATE OF f SKIP LOCKED
                ) l
                ORDER BY l.entry_id, l.fact
            ) d
            GROUP BY d.db_user
        LOOP
            PERFORM set_config('dlq.origin', 'River, as ' || v_user, true);
            v_running := dlq.follow_retries(v_entries, v_jobs, v_created, v_user);
            PERFORM set_config('dlq.origin', v_origin, true);
            PERFORM dlq.assign_ends(v_entries, v_jobs, v_created);
            UPDATE dlq.job_facts f SET fact = 'following'
            WHERE f.ctid = ANY (ARRAY(SELECT v_facts[r.n] FROM unnest(v_running) r (n)));
            DELETE FROM dlq.job_facts f
            WHERE f.ctid = ANY (ARRAY(SELECT u.fact FROM unnest(v_facts) WITH ORDINALITY u (fact, n)
                WHERE u.n <> ALL (v_running)));
            v_count := v_count + cardinality(v_facts);
        END LOOP;
    END IF;

    FOR v_tid IN
        SELECT f.ctid
        FROM dlq.job_facts f
        WHERE f.ctid >= p_from AND (f.fact <> 'refused' OR p_careful
            AND dlq.to_timestamptz(f.job ->> 'refusedAt') < now() - interval '1 minute')
          -- The fact of a followed job that still runs is skipped here. Otherwise this function would lock the fact
          -- twenty times a second.
          AND CASE f.fact WHEN 'following' THEN (SELECT j.state FROM river.river_job j WHERE j.id = f.job_id
              AND j.created_at = f.job_created_at) IS DISTINCT FROM 'running'
                          ELSE f.at = (SELECT min(b.at) FROM dlq.job_facts b WHERE b.job_id = f.job_id
                              AND b.job_created_at = f.job_created_at AND b.fact <> 'following') END
          AND (p_run IS NULL OR p_run = (SELECT m.run_id FROM dlq.entry_jobs m WHERE m.job_id = f.job_id
              AND m.job_created_at = f.job_created_at))
        FOR UPDATE SKIP LOCKED
    LOOP
        EXIT WHEN v_count >= p_limit OR clock_timestamp() > v_until AND (v_count > 0 OR v_result = 'held');
        SELECT * INTO v_fact FROM dlq.job_facts f WHERE f.ctid = v_tid;
        v_refused := v_fact.fact = 'refused';
        IF v_refused THEN
            v_fact.fact := v_fact.job ->> 'fact';
            v_fact.job := nullif(v_fact.job - '{fact,refusal,refusedAt}'::text[], '{}');
        END IF;
        IF p_careful THEN
            BEGIN
                v_result := dlq.apply_fact(v_fact);
            EXCEPTION WHEN lock_not_available THEN
                v_result := 'held';
            WHEN OTHERS THEN
                IF dlq.may_pass(SQLSTATE) THEN
                    RAISE;
                END IF;
                RAISE WARNING 'dlqd: the database refuses a fact of job % (%): %', v_fact.job_id, v_fact.fact, SQLERRM;
                UPDATE dlq.job_facts f SET fact = 'refused', job = coalesce(v_fact.job, '{}')
                    || jsonb_build_object('fact', v_fact.fact, 'refusal', SQLERRM, 'refusedAt', clock_timestamp())
                WHERE f.ctid = v_tid;
                v_result := 'refused';
            END;
        ELSE
            v_result := dlq.apply_fact(v_fact);
        END IF;
        IF v_result = 'done' THEN
            DELETE FROM dlq.job_facts f WHERE f.ctid = v_tid;
            v_count := v_count + 1;
            v_wake := v_wake OR v_fact.fact IN ('discarded', 'cancelled', 'returned');
        ELSIF v_result = 'following' AND (v_refused OR v_fact.fact <> 'following') THEN
            UPDATE dlq.job_facts f SET fact = 'following', job = v_fact.job WHERE f.ctid = v_tid;
            v_count := v_count + 1;
        END IF;
    END LOOP;
    IF v_wake THEN
        PERFORM dlq.wake();
    END IF;
    PERFORM set_config('lock_timeout', v_wait, true);
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.apply_facts IS
    'Applies up to p_limit facts to the entries of their jobs and deletes the facts. p_run: only facts about jobs of '
    'this replay run. p_from: only facts from this position of the table on. Stops after one second, once it has '
    'applied a fact or found a locked entry. Facts of an entry that another session has locked stay. Returns how '
    'many facts were applied. p_careful: one by one; facts that the database refuses are marked as refused and tried '
    'again after a minute. Without p_careful, such a fact raises its error, and facts marked as refused are skipped.';
