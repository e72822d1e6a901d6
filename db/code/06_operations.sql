-- What operators, the API and DLQ workers call. Each function says who moves what and why, and returns what it did;
-- errors carry a SQLSTATE: DLQ01 the move is not allowed, DLQ02 there is no such entry, DLQ03 an equal job is live.

-- redeliver is the one way back to River: it inserts the jobs and moves their entries in one statement, so that an
-- entry in dlq_processing always has a job. An entry whose original job was unique is left alone while an equal job
-- is live, unless p_force.
-- Its parameters have grown: the function with fewer would stay beside it.
DROP FUNCTION IF EXISTS dlq.redeliver(uuid[], text, text, text, boolean, jsonb);
CREATE OR REPLACE FUNCTION dlq.redeliver(p_ids uuid[], p_actor text, p_reason text,
    p_note text DEFAULT NULL, p_force boolean DEFAULT false, p_detail jsonb DEFAULT NULL, p_queue text DEFAULT NULL, p_run uuid DEFAULT NULL)
RETURNS TABLE (entry_id uuid, job_id bigint, live_job_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
BEGIN
    PERFORM dlq.file(p_ids);
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT e.id, e.status = 'dlq_failed' AS failed, e.job_kind, e.queue, e.priority, e.tags, coalesce(e.edited_event, e.original_event) AS args,
               -- What the application left there, less what speaks of the old job; a job's metadata must be an object.
               CASE WHEN jsonb_typeof(e.metadata) = 'object'
                    THEN e.metadata - '{dlq:error,dlq:entry_id,dlq:held,dlq:run_id,dlq:logical_failure,cancel_attempted_at,unique_key_conflict,snoozes,output,river:log,river:rescue_count,river:unique_nonce}'::text[]
                    ELSE '{}' END AS metadata,
               CASE WHEN e.unique_key IS NOT NULL AND NOT p_force THEN (
                   SELECT j.id FROM river.river_job j
                   WHERE j.unique_key = e.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
                     AND river.river_job_state_in_bitmask(j.unique_states, j.state)
                     AND j.state IN ('available', 'pending', 'running', 'retryable', 'scheduled')
                   LIMIT 1) END AS live_job_id
        FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed')
        ORDER BY e.id
        FOR UPDATE
    ), jobs AS (
        INSERT INTO river.river_job (args, kind, max_attempts, metadata, priority, queue, tags, state)
        SELECT p.args, p.job_kind, 1,
               p.metadata || jsonb_build_object('dlq:entry_id', p.id) || CASE WHEN p_run IS NULL THEN '{}' ELSE jsonb_build_object('dlq:run_id', p_run) END,
               p.priority, coalesce(p_queue, p.queue), p.tags, 'available'
        FROM picked p WHERE p.live_job_id IS NULL
        RETURNING id, queue, (metadata ->> 'dlq:entry_id')::uuid AS entry_id
    ), told AS (
        SELECT count(pg_notify('river.river_insert', json_build_object('queue', q.queue)::text)) AS n
        FROM (SELECT DISTINCT jobs.queue FROM jobs) q
    ), moved AS (
        -- Most are open: straight into their partition, without asking every other one for each.
        UPDATE dlq.dead_letter_open e SET
            status = 'dlq_processing',
            redelivery_job_id = jobs.id,
            dlq_retry_count = e.dlq_retry_count + 1,
            locked_by = p_actor,
            locked_at = now(),
            lease_expires_at = now() + interval '5 minutes',
            notes = coalesce(p_note, e.notes),
            move = jsonb_build_object('actor', p_actor, 'reason', p_reason, 'note', p_note, 'detail', p_detail)
        FROM jobs, told
        WHERE e.id = jobs.entry_id
    ), reopened AS (
        UPDATE dlq.dead_letter_queue e SET
            status = 'dlq_processing',
            redelivery_job_id = jobs.id,
            dlq_retry_count = e.dlq_retry_count + 1,
            locked_by = p_actor,
            locked_at = now(),
            lease_expires_at = now() + interval '5 minutes',
            notes = coalesce(p_note, e.notes),
            move = jsonb_build_object('actor', p_actor, 'reason', p_reason, 'note', p_note, 'detail', p_detail)
        FROM jobs, told
        WHERE e.id = jobs.entry_id AND e.status = 'dlq_failed' AND EXISTS (SELECT FROM picked p WHERE p.failed)
    )
    SELECT p.id, j.id, p.live_job_id
    FROM picked p LEFT JOIN jobs j ON j.entry_id = p.id
    ORDER BY p.id;
END
$$;
COMMENT ON FUNCTION dlq.redeliver IS 'Makes River jobs from entries and moves them to dlq_processing. Returns a row for each entry that could be redelivered: its job, or the live equal job that stands in the way.';

CREATE OR REPLACE FUNCTION dlq.refuse_move(p_id uuid, p_verb text, p_from text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_status dlq.dead_letter_status;
BEGIN
    SELECT e.status INTO v_status FROM dlq.dead_letter_queue e WHERE e.id = p_id ORDER BY dlq.is_open(e.status) DESC LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'dead letter %: there is no such entry', p_id USING ERRCODE = 'DLQ02';
    END IF;
    RAISE EXCEPTION 'dead letter %: cannot % from % (allowed: %)', p_id, p_verb, v_status, p_from USING ERRCODE = 'DLQ01';
END
$$;
COMMENT ON FUNCTION dlq.refuse_move IS 'Raises what an operator is told when an entry cannot be moved: where it stands, and from where the move is allowed.';

CREATE OR REPLACE FUNCTION dlq.replay(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL,
    p_payload jsonb DEFAULT NULL, p_force boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row record;
BEGIN
    PERFORM dlq.file(ARRAY[p_id]);
    IF p_payload IS NOT NULL THEN
        UPDATE dlq.dead_letter_queue SET
            edited_event = CASE WHEN job_kind = 'dlqd_message' THEN jsonb_set(original_event, '{payload}', p_payload) ELSE p_payload END
        WHERE id = p_id AND status IN ('dlq_pending', 'dlq_manual', 'dlq_failed');
    END IF;
    SELECT * INTO v_row FROM dlq.redeliver(ARRAY[p_id], p_actor,
        CASE WHEN p_payload IS NULL THEN 'replayed' ELSE 'edited and replayed' END, p_note, p_force,
        CASE WHEN p_payload IS NOT NULL THEN jsonb_build_object('payload', p_payload) END);
    IF NOT FOUND THEN
        PERFORM dlq.refuse_move(p_id, 'replay', 'dlq_pending, dlq_manual, dlq_failed');
    END IF;
    IF v_row.live_job_id IS NOT NULL THEN
        RAISE EXCEPTION 'dead letter %: job % with the same unique key is live', p_id, v_row.live_job_id
            USING ERRCODE = 'DLQ03', HINT = 'Wait for that job to end, or replay with force.';
    END IF;
    RETURN v_row.job_id;
END
$$;
COMMENT ON FUNCTION dlq.replay IS 'Redelivers an entry now, with p_payload in place of its payload if given (the original is kept). Returns the id of the new job. DLQ03: an equal job is live; p_force overrides.';

CREATE OR REPLACE FUNCTION dlq.discard(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.act_on('discard', ARRAY[p_id], p_actor, p_note)) THEN
        PERFORM dlq.refuse_move(p_id, 'discard', 'dlq_pending, dlq_manual, dlq_failed');
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.discard IS 'Archives an entry whose work is not wanted any more.';

CREATE OR REPLACE FUNCTION dlq.resolve(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.act_on('resolve', ARRAY[p_id], p_actor, p_note)) THEN
        PERFORM dlq.refuse_move(p_id, 'resolve', 'dlq_manual');
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.resolve IS 'Closes a parked entry whose work a person has done outside dlqd.';

CREATE OR REPLACE FUNCTION dlq.park(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.act_on('park', ARRAY[p_id], p_actor, p_note)) THEN
        PERFORM dlq.refuse_move(p_id, 'park', 'dlq_pending');
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.park IS 'Takes a pending entry out of the automatic path.';

CREATE OR REPLACE FUNCTION dlq.unpark(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.act_on('unpark', ARRAY[p_id], p_actor, p_note)) THEN
        PERFORM dlq.refuse_move(p_id, 'unpark', 'dlq_manual');
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.unpark IS 'Returns a parked entry to the automatic path.';

-- The job of an entry in dlq_processing is its lease. Once lease_expires_at has passed, look at the job: extend while
-- it is waiting or running, however long; take its end in where no trigger saw it; send the entry back if it is gone.
CREATE OR REPLACE FUNCTION dlq.requeue_expired_leases(p_limit integer DEFAULT 1000)
RETURNS TABLE (extended integer, settled integer, requeued integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_entry record;
    v_job   jsonb;
BEGIN
    extended := 0; settled := 0; requeued := 0;
    FOR v_entry IN
        SELECT e.id, e.redelivery_job_id FROM dlq.dead_letter_open e
        WHERE e.status = 'dlq_processing' AND e.lease_expires_at <= now()
        ORDER BY e.lease_expires_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
    LOOP
        SELECT to_jsonb(j) INTO v_job FROM river.river_job j WHERE j.id = v_entry.redelivery_job_id;
        IF NOT FOUND THEN
            UPDATE dlq.dead_letter_queue SET
                status = 'dlq_pending', strategy = NULL, next_retry_at = now(),
                move = jsonb_build_object('actor', 'sweep', 'reason', 'job ' || v_entry.redelivery_job_id || ' is gone')
            WHERE id = v_entry.id AND status = 'dlq_processing';
            requeued := requeued + 1;
        ELSIF v_job ->> 'state' IN ('completed', 'discarded', 'cancelled') THEN
            PERFORM dlq.record_outcome(v_entry.id, v_job, 'sweep');
            settled := settled + 1;
        ELSE
            UPDATE dlq.dead_letter_open SET lease_expires_at = now() + interval '5 minutes' WHERE id = v_entry.id;
            extended := extended + 1;
        END IF;
    END LOOP;
    IF settled + requeued > 0 THEN
        PERFORM dlq.wake();
    END IF;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION dlq.requeue_expired_leases IS 'Checks the jobs of entries whose lease has passed. Returns how many leases were extended (job alive), settled (job had ended unseen) and requeued (job gone).';

-- Replaced by dlq.flow.
DROP VIEW IF EXISTS dlq.moves_last_day;
