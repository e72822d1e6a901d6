-- Functions by which operators, the API and DLQ workers move entries, and their helpers. A move
-- records who makes it and why. Errors have a SQLSTATE: DLQ01 the move is not allowed; DLQ02 there
-- is no such entry; DLQ03 another job or session is in the way (an equal job is live or has ended,
-- or the job is locked); DLQ04 an argument is invalid; DLQ06 the caller's scope or role does not
-- allow it; DLQ07 a second person has to approve.

-- River's resumable jobs keep their progress in metadata: the last completed step, and the cursors
-- of steps that have begun.
CREATE OR REPLACE FUNCTION dlq.has_checkpoint(p_metadata jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(p_metadata ? 'river:resumable_step' AND jsonb_typeof(p_metadata -> 'river:resumable_step') = 'string'
    AND p_metadata ->> 'river:resumable_step' <> '', false)
    OR coalesce(p_metadata ? 'river:resumable_cursor'
        AND jsonb_typeof(p_metadata -> 'river:resumable_cursor') = 'object'
        AND p_metadata -> 'river:resumable_cursor' <> '{}', false);
COMMENT ON FUNCTION dlq.has_checkpoint IS
    'Whether a job with this metadata resumes: River skips the steps that an earlier attempt '
    'completed.';

-- Any client of River can write metadata. Check the size of the value first: for matching a text of 1 MB with a
-- pattern, Postgres allocates 4 MB. deadletter.IsVersion and deadletter.StageOf have the same patterns.
CREATE OR REPLACE FUNCTION dlq.reported_name(p_value jsonb, p_pattern text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(p_value) > 200 OR jsonb_typeof(p_value) IS DISTINCT FROM 'string' THEN NULL
    WHEN octet_length(p_value #>> '{}') <= 100 AND p_value #>> '{}' ~ p_pattern THEN p_value #>> '{}' END;
COMMENT ON FUNCTION dlq.reported_name IS
    'A name that a worker reported in the metadata of its job; null if it is longer than 100 bytes or does not match.';

CREATE OR REPLACE FUNCTION dlq.reported_stage(p_metadata jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN dlq.reported_name(p_metadata -> 'dlq:stage', '^[0-9A-Za-z][0-9A-Za-z ./:_-]*$');
COMMENT ON FUNCTION dlq.reported_stage IS
    'The last stage that a worker of a job with this metadata reported (riverdlq); null if there is none.';

CREATE OR REPLACE FUNCTION dlq.reported_version(p_metadata jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN dlq.reported_name(p_metadata -> 'dlq:version', '^[0-9A-Za-z][0-9A-Za-z.+_-]*$');
COMMENT ON FUNCTION dlq.reported_version IS
    'The version that worked a job with this metadata, as its worker (riverdlq) or its destination (Dlqd-Version) '
    'reported it; null if there is none, or it is no version.';

CREATE OR REPLACE FUNCTION dlq.seconds_worked(p_attempted_at timestamptz, p_finalized_at timestamptz) RETURNS float8
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_attempted_at BETWEEN '1970-01-01Z' AND p_finalized_at AND p_finalized_at < '9999-01-01Z'
    THEN extract(epoch FROM p_finalized_at - p_attempted_at)::float8 END;
COMMENT ON FUNCTION dlq.seconds_worked IS
    'How long the last attempt of a job that has ended ran; null if its times, which any client can write, are not in '
    'order, or infinite: Postgres cannot subtract those.';

-- carried_metadata keeps the metadata that the application wrote and drops the metadata that describes the old job.
-- River needs an object: metadata of another type becomes {}. This expression and that of dlq.is_superseded use nothing
-- that is STABLE, such as to_jsonb or the cast of a CASE to text[]. So Postgres inlines both (measured: saves 5 of the
-- 110 µs of a redelivery).
CREATE OR REPLACE FUNCTION dlq.carried_metadata(p_metadata jsonb, p_checkpoint text DEFAULT NULL) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN jsonb_typeof(p_metadata) = 'object'
    THEN p_metadata - '{dlq:error,dlq:attempts,dlq:entry_id,dlq:held,dlq:run_id,dlq:replay,dlq:trace,dlq:destination,dlq:done_by,dlq:done,dlq:copied,dlq:rescues,dlq:logical_failure,dlq:stage,dlq:version,dlq:place,dlq:postponed,cancel_attempted_at,unique_key_conflict,snoozes,output,river:log,river:rescue_count,river:unique_nonce}'::text[]
                    - CASE WHEN p_checkpoint = 'discard' THEN '{river:resumable_step,river:resumable_cursor}'::text[]
                        ELSE '{}'::text[] END
    ELSE '{}' END;
COMMENT ON FUNCTION dlq.carried_metadata IS
    'The metadata of a job that repeats the work of another. p_checkpoint: discard, to run all '
    'steps of a resumable job again.';

-- River keeps rescue counts and checkpoints for each job, and a redelivery is a separate job. So an entry keeps the
-- checkpoint of the job that failed last, and one rescue count each for its own job and for every redelivery. It
-- keeps the last stage that any of these jobs reported, and the version of the job that failed last.
--
-- jsonb_build_object is STABLE, so Postgres would not inline an IMMUTABLE function that calls it: each statement
-- would parse and plan the function again.
CREATE OR REPLACE FUNCTION dlq.metadata_after(p_metadata jsonb, p_own boolean, p_job bigint, p_of_job jsonb)
    RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
    WHEN jsonb_typeof(p_metadata) <> 'object' OR jsonb_typeof(p_of_job) IS DISTINCT FROM 'object'
        OR NOT (p_metadata || p_of_job) ?| '{river:resumable_step,river:resumable_cursor,river:rescue_count,dlq:stage,dlq:version}'
            THEN p_metadata
    ELSE p_metadata - '{river:resumable_step,river:resumable_cursor,dlq:version}'::text[]
        || jsonb_strip_nulls(jsonb_build_object('river:resumable_step', p_of_job -> 'river:resumable_step',
            'dlq:stage', p_of_job -> 'dlq:stage', 'dlq:version', p_of_job -> 'dlq:version'))
        || CASE WHEN p_of_job ? 'river:resumable_cursor' THEN jsonb_build_object('river:resumable_cursor',
            p_of_job -> 'river:resumable_cursor') ELSE '{}' END
        || CASE WHEN NOT p_of_job ? 'river:rescue_count' THEN '{}'
                WHEN p_own THEN jsonb_build_object('river:rescue_count', p_of_job -> 'river:rescue_count')
                ELSE jsonb_build_object('dlq:rescues', CASE jsonb_typeof(p_metadata -> 'dlq:rescues')
                    WHEN 'object' THEN p_metadata -> 'dlq:rescues' ELSE '{}' END
                                                       || jsonb_build_object(p_job,
                                                           p_of_job -> 'river:rescue_count')) END
    END;
COMMENT ON FUNCTION dlq.metadata_after IS
    'The metadata of an entry after one of its jobs has failed, its own (p_own) or a redelivery: '
    'with that job''s checkpoint and version, its stage if it reported one, and how often River''s rescuer ended its '
    'attempts.';

CREATE OR REPLACE FUNCTION dlq.count_rescues(p_metadata jsonb) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(sum(least(greatest(n::numeric, 0), 1000000)), 0)::integer
        FROM (SELECT p_metadata -> 'river:rescue_count' AS n
              UNION ALL SELECT r.value FROM jsonb_each(CASE jsonb_typeof(p_metadata -> 'dlq:rescues')
                  WHEN 'object' THEN p_metadata -> 'dlq:rescues' ELSE '{}' END) r) c
        WHERE CASE WHEN jsonb_typeof(n) = 'number' THEN true ELSE false END);
COMMENT ON FUNCTION dlq.count_rescues IS 'Computes dlq.rescues for metadata that has a count.';

CREATE OR REPLACE FUNCTION dlq.rescues(p_metadata jsonb) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_metadata ?| '{river:rescue_count,dlq:rescues}' THEN dlq.count_rescues(p_metadata) ELSE 0 END;
COMMENT ON FUNCTION dlq.rescues IS
    'How often River''s rescuer ended attempts of an entry, by the entry''s metadata: attempts of '
    'its own job and of its redeliveries.';

-- A job that was rescued twice or more may crash its process, and with it all other jobs of the process. So each queue
-- gets only one such job at a time, unless an operator replays a single entry (dlq.replay).
CREATE OR REPLACE FUNCTION dlq.may_go_alone(p_id uuid, p_entry_queue text, p_queue text, p_ids uuid[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('dlq.may_go_alone ' || coalesce(p_queue, p_entry_queue), 0)) THEN
        RETURN false;
    END IF;
    -- This is a separate statement, so that its snapshot includes the changes of the session that held the lock before.
    RETURN NOT EXISTS (SELECT FROM dlq.dead_letter_queue e
                        WHERE e.id = ANY (p_ids) AND e.id < p_id AND e.stage IN ('open', 'failed')
                            AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed')
                          AND (p_queue IS NOT NULL OR e.queue = p_entry_queue) AND e.job_kind <> 'dlqd_message'
                          AND dlq.rescues(e.metadata) >= 2)
        AND NOT EXISTS (SELECT FROM dlq.dead_letter_open e JOIN river.river_job j ON j.id = e.redelivery_job_id
                        WHERE e.status = 'dlq_processing' AND e.metadata ?| '{river:rescue_count,dlq:rescues}'
                          AND e.job_kind <> 'dlqd_message' AND dlq.rescues(e.metadata) >= 2
                          AND j.queue = coalesce(p_queue, p_entry_queue));
END
$$;
COMMENT ON FUNCTION dlq.may_go_alone IS
    'Whether an entry whose job was rescued twice or more may be redelivered now, to p_queue or to its own queue if '
    'that is null: no other such redelivery is under way in that queue, and no such entry in p_ids has a lower id. '
    'Until this transaction ends, other transactions get false for that queue.';

-- redeliver_now is the only function that inserts redeliveries. It inserts the jobs and moves their entries in one
-- statement, so that an entry in dlq_processing always has a job. It does no work twice: unless p_force is set, an
-- entry gets no job if its own job runs again or has done the work, or if another job than its own and its failed
-- redeliveries holds its unique key.
--
-- Plans of its statements have all partitions and take long to make, so Postgres makes each of them only once per
-- session (force_generic_plan). p_failed is failed if p_ids may contain a failed entry. Otherwise it is null, and the
-- statement leaves out the partitions of failed entries.
CREATE OR REPLACE FUNCTION dlq.redeliver_now(p_ids uuid[], p_actor text, p_reason text, p_note text, p_force boolean,
    p_detail jsonb, p_queue text, p_destination text, p_run uuid, p_config_version text, p_checkpoint text,
    p_alone boolean, p_failed dlq.dead_letter_stage)
RETURNS TABLE (entry_id uuid, verdict text, job_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_row   record;
    v_actor constant text := dlq.actor(p_actor);
    v_move  constant jsonb := jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', p_reason,
        'note', p_note, 'detail', p_detail);
    v_moving boolean;
    -- The trace of the operator's request. The redelivery is linked to it.
    v_trace constant jsonb := CASE WHEN coalesce(current_setting('dlq.trace', true), '') = '' THEN '{}'
        ELSE jsonb_build_object('dlq:trace', current_setting('dlq.trace', true)) END;
BEGIN
    v_moving := dlq.set_moves(v_move);
    FOR v_row IN
        WITH candidates AS MATERIALIZED (
            SELECT e.id, e.status = 'dlq_failed' AS failed, e.job_kind, e.queue, e.priority, e.tags,
                   e.dlq_retry_count + 1 AS number,
                   coalesce(e.edited_event, e.original_event) AS args,
                   dlq.carried_metadata(e.metadata, p_checkpoint) AS metadata,
                   CASE WHEN h.id IS NULL THEN e.unique_key END AS unique_key, e.unique_states,
                   e.river_job_id, e.job_created_at,
                   -- A failed entry is closed. So another entry of its job may be open, or p_ids may contain another
                   -- failed entry of the same job.
                   CASE WHEN e.status = 'dlq_failed'
                       AND (dlq.has_open_entry(e.river_job_id, e.job_created_at) OR EXISTS (
                                 SELECT FROM dlq.dead_letter_queue f WHERE f.id = ANY (p_ids) AND f.stage = 'failed'
                                     AND f.id < e.id AND f.river_job_id = e.river_job_id
                                     AND f.job_created_at = e.job_created_at)) THEN 'open'
                        WHEN p_alone AND dlq.rescues(e.metadata) >= 2 AND e.job_kind <> 'dlqd_message'
                            AND NOT dlq.may_go_alone(e.id, e.queue, p_queue, p_ids) THEN 'alone'
                        WHEN p_force THEN 'sent'
                        WHEN o.state IS NULL AND (SELECT j.state IN ('completed', 'discarded', 'cancelled')
                            FROM river.river_job j WHERE j.id = e.river_job_id AND j.created_at = e.job_created_at)
                                THEN 'busy'
                        WHEN o.state IS NULL AND (SELECT j.state NOT IN ('completed', 'discarded', 'cancelled')
                            FROM river.river_job j WHERE j.id = e.river_job_id AND j.created_at = e.job_created_at)
                                THEN 'follows'
                        WHEN o.state = 'completed' AND NOT o.done THEN 'resolved'
                        WHEN h.id IS NULL OR h.id = e.river_job_id THEN 'sent'
                        WHEN h.live THEN 'live'
                        WHEN NOT h.own THEN 'done'
                        WHEN h.completed THEN 'resolved'
                        ELSE 'sent' END AS verdict,
                   h.id AS holder, coalesce(o.state = 'completed' AND NOT o.done, false) AS completed
            FROM (
                SELECT * FROM dlq.dead_letter_queue e
                -- IS TRUE excludes the indexes on the status. If old statistics say that no entry is pending, a plan
                -- could use such an index and read all pending entries.
                WHERE e.id = ANY (p_ids) AND e.stage IN ('open', 'failed') AND e.stage IN ('open', p_failed)
                    AND (e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed')) IS TRUE
                ORDER BY e.stage, e.id -- the order of dlq.lock_entries
                FOR UPDATE
            ) e
            -- The entry's own job, if it has ended. It is locked so that it is not retried meanwhile. A job that runs
            -- or waits to run belongs to the application and River, so it is not locked. done means that dlqd itself
            -- completed the job, which therefore has not done the work.
            LEFT JOIN LATERAL (
                SELECT j.state, dlq.is_superseded(j.state::text, j.attempt, j.metadata) AS done FROM river.river_job j
                WHERE j.id = e.river_job_id AND j.created_at = e.job_created_at
                    AND j.state IN ('completed', 'discarded', 'cancelled')
                FOR NO KEY UPDATE SKIP LOCKED
            ) o ON NOT p_force
            -- The job that holds the unique key: at most one, by River's partial unique index.
            LEFT JOIN LATERAL (
                SELECT j.id, j.state NOT IN ('completed', 'discarded', 'cancelled') AS live, j.state = 'completed'
                    AND NOT dlq.is_superseded(j.state::text, j.attempt, j.metadata) AS completed,
                       coalesce(e.id = (SELECT m.entry_id FROM dlq.entry_jobs m WHERE m.job_id = j.id
                           AND m.job_created_at = j.created_at), false) AS own
                FROM river.river_job j
                WHERE j.unique_key = e.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
                  AND river.river_job_state_in_bitmask(j.unique_states, j.state)
            ) h ON e.unique_key IS NOT NULL AND NOT p_force
        ), jobs AS (
            INSERT INTO river.river_job (args, kind, max_attempts, metadata, priority, queue, tags, state, unique_key,
                unique_states)
            SELECT l.args, l.job_kind, 1,
                   l.metadata || jsonb_build_object('dlq:entry_id', l.id, 'dlq:replay', l.number)
                       || CASE WHEN p_run IS NULL THEN v_trace ELSE jsonb_build_object('dlq:run_id', p_run) END
                       || CASE WHEN p_destination IS NULL THEN '{}'
                           ELSE jsonb_build_object('dlq:destination', p_destination) END
                       || CASE WHEN l.river_job_id < 0 THEN '{"dlq:record": true}' ELSE '{}'::jsonb END,
                   l.priority, coalesce(p_queue, l.queue), l.tags, 'available',
                   CASE WHEN NOT p_force AND l.unique_states IS NOT NULL THEN l.unique_key END,
                       CASE WHEN NOT p_force AND l.unique_key IS NOT NULL THEN l.unique_states END::bit(8)
            FROM candidates l WHERE l.verdict = 'sent'
            ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND unique_states IS NOT NULL
                AND river.river_job_state_in_bitmask(unique_states, state) DO NOTHING
            RETURNING id, created_at, queue, (metadata ->> 'dlq:entry_id')::uuid AS entry_id
        ), recorded AS (
            INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id, run_id, destination)
            SELECT jobs.id, jobs.created_at, jobs.entry_id, p_run, p_destination FROM jobs
        ), notified AS (
            SELECT count(pg_notify('river.river_insert', json_build_object('queue', q.queue)::text)) AS n
            FROM (SELECT DISTINCT jobs.queue FROM jobs) q
        ), moved AS (
            -- Most entries are open, so update their partition directly instead of probing all partitions for each
            -- entry.
            UPDATE dlq.dead_letter_open e SET
                status = 'dlq_processing',
                redelivery_job_id = jobs.id,
                dlq_retry_count = e.dlq_retry_count + 1,
                locked_by = v_actor,
                locked_at = now(),
                notes = coalesce(p_note, e.notes),
                config_version = coalesce(p_config_version, e.config_version),
                -- These are the columns that dlq.on_move would set. The trigger skips the row.
                next_retry_at = NULL,
                waiting_for = NULL,
                parked_by = NULL,
                updated_at = now(),
                move = CASE WHEN NOT v_moving OR current_setting('dlq.moves') = '' THEN v_move END
            FROM jobs, notified
            WHERE e.id = jobs.entry_id
        ), reopened AS (
            UPDATE dlq.dead_letter_queue e SET
                status = 'dlq_processing',
                redelivery_job_id = jobs.id,
                dlq_retry_count = e.dlq_retry_count + 1,
                locked_by = v_actor,
                locked_at = now(),
                notes = coalesce(p_note, e.notes),
                config_version = coalesce(p_config_version, e.config_version),
                move = v_move
            FROM jobs, notified
            WHERE e.id = jobs.entry_id AND e.stage = 'failed' AND e.status = 'dlq_failed'
                AND EXISTS (SELECT FROM candidates l WHERE l.failed)
        )
        SELECT jobs.entry_id, 'sent' AS verdict, jobs.id AS job_id, NULL::timestamptz AS job_created_at,
            NULL::bytea AS unique_key FROM jobs
        UNION ALL
        -- If the insert of a job returned no row, another session or another entry of this batch has
        -- just taken its unique key.
        SELECT l.id, CASE WHEN l.verdict = 'sent' THEN 'conflict' ELSE l.verdict END,
               -- Return the key's holder only if it decided the verdict. Otherwise return the
               -- entry's own job, even if another job has the key by now.
               CASE WHEN l.verdict IN ('live', 'done') OR l.verdict = 'resolved' AND NOT l.completed THEN l.holder
                   ELSE l.river_job_id END, l.job_created_at, l.unique_key
        FROM candidates l
        WHERE l.verdict <> 'sent'
           OR ((SELECT count(*) FROM candidates a WHERE a.verdict = 'sent') > (SELECT count(*) FROM jobs)
               AND NOT EXISTS (SELECT FROM jobs WHERE jobs.entry_id = l.id))
    LOOP
        IF v_moving THEN -- the statement has ended: one that writes runs to its end before it returns a row
            v_moving := dlq.set_moves(NULL);
        END IF;
        entry_id := v_row.entry_id;
        verdict := v_row.verdict;
        job_id := v_row.job_id;
        IF verdict = 'conflict' THEN
            SELECT j.id, CASE WHEN j.state IN ('completed', 'discarded', 'cancelled') THEN 'done'
                ELSE 'live' END INTO job_id, verdict
            FROM river.river_job j
            WHERE j.unique_key = v_row.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
              AND river.river_job_state_in_bitmask(j.unique_states, j.state);
            IF NOT FOUND THEN
                verdict := 'busy';
                job_id := v_row.job_id;
            END IF;
        ELSIF verdict = 'resolved' THEN
            PERFORM dlq.resolve_by(ARRAY[entry_id], ARRAY[job_id], ARRAY[clock_timestamp()], v_actor);
        ELSIF verdict = 'follows' THEN
            PERFORM dlq.follow_job(entry_id, job_id, v_row.job_created_at, v_actor, p_reason || ': its job ' || job_id
                || ' runs again already', p_note, p_run);
            INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id)
            VALUES (job_id, v_row.job_created_at, 'following', entry_id);
        END IF;
        RETURN NEXT;
    END LOOP;
    IF v_moving THEN
        PERFORM dlq.set_moves(NULL);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.redeliver_now IS 'Does the work of dlq.redeliver, for filed entries.';

-- The insert of a unique key waits for an open transaction of the application that inserts the same key. dlqd stops
-- waiting long before Postgres looks for a deadlock (deadlock_timeout): if both transactions take the same keys in
-- different orders, they deadlock, and Postgres might cancel the application's.
CREATE OR REPLACE FUNCTION dlq.redeliver(p_ids uuid[], p_actor text, p_reason text,
    p_note text DEFAULT NULL, p_force boolean DEFAULT false, p_detail jsonb DEFAULT NULL, p_queue text DEFAULT NULL,
    p_destination text DEFAULT NULL, p_run uuid DEFAULT NULL, p_config_version text DEFAULT NULL,
    p_checkpoint text DEFAULT NULL, p_alone boolean DEFAULT true)
RETURNS TABLE (entry_id uuid, verdict text, job_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    v_wait     constant text := current_setting('lock_timeout');
    v_deadline timestamptz;
    v_entry    record;
    v_failed   dlq.dead_letter_stage; -- null if no entry has failed
BEGIN
    -- Lock the entries first, with the caller's lock_timeout and before any job: the application's
    -- statement that ends such a job must not wait for a session that has locked an entry. From
    -- then on this function waits only for unique keys and for locks on dlqd's tables, at most 50 or
    -- 250 ms each.
    SELECT CASE WHEN 'failed' = ANY (l.stages) THEN 'failed' END INTO v_failed
    FROM dlq.lock_entries(p_ids, '{dlq_pending,dlq_manual,dlq_failed}') l;
    -- Recovery from a lock timeout needs a subtransaction. Most batches need none, because they insert
    -- no unique key: their entries have none, or a job still holds it.
    IF p_force OR (SELECT e.id FROM dlq.dead_letter_queue e
                   WHERE e.id = ANY (p_ids) AND e.stage IN ('open', 'failed') AND e.stage IN ('open', v_failed)
                     AND e.unique_key IS NOT NULL
                       AND e.unique_states IS NOT NULL
                     AND (SELECT j.id FROM river.river_job j
                          WHERE j.unique_key = e.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
                            AND river.river_job_state_in_bitmask(j.unique_states, j.state)) IS NULL
                   LIMIT 1) IS NULL THEN
        PERFORM set_config('lock_timeout', '250ms', true);
        RETURN QUERY SELECT * FROM dlq.redeliver_now(p_ids, p_actor, p_reason, p_note, p_force, p_detail, p_queue,
            p_destination, p_run, p_config_version, p_checkpoint, p_alone, v_failed);
        PERFORM set_config('lock_timeout', v_wait, true);
        RETURN;
    END IF;
    BEGIN
        PERFORM set_config('lock_timeout', '50ms', true);
        RETURN QUERY SELECT * FROM dlq.redeliver_now(p_ids, p_actor, p_reason, p_note, p_force, p_detail, p_queue,
            p_destination, p_run, p_config_version, p_checkpoint, p_alone, v_failed);
        PERFORM set_config('lock_timeout', v_wait, true);
        RETURN;
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    -- Redeliver the entries one by one, for at most 500 ms in all, because other sessions that insert an equal job wait
    -- meanwhile.
    v_deadline := clock_timestamp() + interval '500 ms';
    FOR v_entry IN
        SELECT e.id, e.river_job_id FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.stage IN ('open', 'failed')
            AND (e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed')) IS TRUE
        ORDER BY e.stage, e.id
    LOOP
        BEGIN
            IF clock_timestamp() > v_deadline THEN
                RAISE lock_not_available;
            END IF;
            PERFORM set_config('lock_timeout', '50ms', true);
            RETURN QUERY SELECT * FROM dlq.redeliver_now(ARRAY[v_entry.id], p_actor, p_reason, p_note, p_force,
                p_detail, p_queue, p_destination, p_run, p_config_version, p_checkpoint, p_alone, v_failed);
            PERFORM set_config('lock_timeout', v_wait, true);
        EXCEPTION WHEN lock_not_available THEN
            RETURN QUERY SELECT v_entry.id, 'busy', v_entry.river_job_id;
        END;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.redeliver IS
    'Makes River jobs from entries and moves the entries to dlq_processing. Returns a verdict for each entry that '
    'could be redelivered: sent (as job_id); follows or resolved (its job, job_id, runs again or has completed, so '
    'no new job is needed). With any other verdict the entry stays: busy (another session has locked job_id, or is '
    'taking the unique key, or such waits used up 500 ms), live or done (job_id holds the unique key, and is live or '
    'has ended), open (the entry has failed, and another entry of job_id is open), alone (see p_alone). '
    'p_checkpoint: discard, to start resumable jobs over. p_alone: of entries whose jobs were rescued twice or more, '
    'only one at a time is sent to a queue.';

CREATE OR REPLACE FUNCTION dlq.refuse_move(p_id uuid, p_verb text, p_from text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_ids    uuid[] := dlq.ids_in_scope(ARRAY[p_id]);
    v_status dlq.dead_letter_status;
    v_since  timestamptz;
    v_by     text; -- whose redelivery resolved the entry
    v_last   text; -- the move that gave the entry its status
BEGIN
    -- v_since bounds the query of the audit trail below, so that its plan neither contains nor locks
    -- the partitions of older months.
    SELECT e.status, e.updated_at - interval '31 days', CASE e.status WHEN 'dlq_resolved' THEN e.resolved_by END
    INTO v_status, v_since, v_by
    FROM dlq.dead_letter_queue e WHERE e.id = ANY (v_ids)
    ORDER BY dlq.is_open(e.status) DESC LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'dead letter %: there is no such entry', p_id USING ERRCODE = 'DLQ02';
    END IF;
    SELECT coalesce(v_by, t.actor) || CASE t.reason WHEN 'resolved outside dlqd' THEN ' resolved it'
            WHEN 'discarded' THEN ' discarded it' WHEN 'expired' THEN ' expired it' WHEN 'parked' THEN ' parked it'
            WHEN 'returned to the automatic path' THEN ' unparked it'
            WHEN 'reopened' THEN ' reopened it' WHEN 'replayed' THEN ' replayed it'
            WHEN 'edited and replayed' THEN ' edited and replayed it'
            ELSE ' moved it to ' || t.to_status || coalesce(' (' || left(t.reason, 200) || ')', '') END
        || to_char(t.at AT TIME ZONE 'UTC', '" at "YYYY-MM-DD"T"HH24:MI:SS"Z"')
        || coalesce(': "' || left(CASE WHEN t.mask -> 'hidden' ? 'notes' THEN NULL
            ELSE dlq.masked_text(nullif(t.note, ''), t.mask) END, 300) || '"', '') || '.' INTO v_last
    FROM (SELECT l.actor, l.reason, l.to_status, l.at, l.note, dlq.mask() AS mask FROM dlq.dead_letter_transitions l
          WHERE l.entry_id = p_id AND l.at >= v_since AND l.from_status <> l.to_status
          ORDER BY l.at DESC, l.id DESC LIMIT 1) t;
    RAISE EXCEPTION 'dead letter %: cannot % from % (allowed: %)', p_id, p_verb, v_status, p_from
        USING ERRCODE = 'DLQ01', HINT = concat_ws(' ', v_last, CASE v_status
            WHEN 'dlq_pending'    THEN 'Allowed from dlq_pending: replay, discard, expire, park.'
            WHEN 'dlq_manual'     THEN 'Allowed from dlq_manual: replay, discard, expire, resolve, unpark.'
            WHEN 'dlq_failed'     THEN 'Allowed from dlq_failed: replay, discard, expire.'
            WHEN 'dlq_returned'   THEN 'Allowed from dlq_returned: replay, discard, resolve, reopen.'
            WHEN 'dlq_processing' THEN 'Nothing is allowed from dlq_processing: its job has to end first.'
            ELSE 'Allowed from ' || v_status || ': reopen.' END);
END
$$;
COMMENT ON FUNCTION dlq.refuse_move IS
    'Raises the error for an entry that cannot be moved: DLQ02 if there is no such entry, or else '
    'DLQ01 with its status, the statuses from which the move is allowed, who gave the entry its status, '
    'when and with which note, and the moves that its status allows.';

CREATE OR REPLACE FUNCTION dlq.replay(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL,
    p_payload jsonb DEFAULT NULL, p_force boolean DEFAULT false, p_destination text DEFAULT NULL,
    p_payload_text text DEFAULT NULL,
    p_checkpoint text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row record;
BEGIN
    IF dlq.ids_in_scope(ARRAY[p_id]) = '{}' THEN
        PERFORM dlq.refuse_move(p_id, 'replay', '');
    END IF;
    IF dlq.is_restored() THEN
        RAISE WARNING 'dead letter %: the database was restored, and its work may have been done since', p_id
            USING HINT = 'SELECT * FROM dlq.restored() lists the work that dlqd holds.';
    END IF;
    -- File and lock the entry first. Otherwise the entry could move to another partition while dlq.redeliver waits for
    -- its lock, which would raise 40001.
    PERFORM dlq.lock_entries(ARRAY[p_id], '{dlq_pending,dlq_manual,dlq_failed,dlq_returned}');
    IF p_payload IS NOT NULL AND p_payload_text IS NOT NULL THEN
        RAISE EXCEPTION 'dead letter %: p_payload and p_payload_text exclude each other', p_id USING ERRCODE = 'DLQ04',
            HINT = 'Pass one of them.';
    END IF;
    p_payload := coalesce(p_payload, p_payload_text::jsonb);
    PERFORM dlq.check_destination(jsonb_build_object('ids', jsonb_build_array(p_id)), p_destination);
    PERFORM dlq.refuse_mask('replay', p_payload);
    PERFORM dlq.check_checkpoint(jsonb_build_object('ids', jsonb_build_array(p_id)), p_payload IS NOT NULL,
        p_checkpoint);
    PERFORM dlq.require_approval(ARRAY['replay'] || CASE WHEN p_payload IS NOT NULL THEN '{patch}' ELSE '{}' END::text[]
        || CASE WHEN p_destination IS NOT NULL THEN '{redirect}' ELSE '{}' END::text[], 'replay',
        jsonb_build_object('filter', jsonb_build_object('ids', jsonb_build_array(p_id)))
            || CASE WHEN p_destination IS NOT NULL THEN jsonb_build_object('toDestination', p_destination) ELSE '{}' END
            || CASE WHEN p_force THEN '{"force": true}' ELSE '{}' END::jsonb
            || jsonb_strip_nulls(jsonb_build_object('checkpoint', p_checkpoint))
            || CASE WHEN p_payload IS NOT NULL THEN jsonb_build_object('patch',
                jsonb_build_array(jsonb_build_object('op', 'replace', 'path', '', 'value', p_payload))) ELSE '{}' END);
    -- Only an operator's replay of a single entry may publish the record of a returned entry again, so dlq.redeliver
    -- does not accept returned entries. Reopen the entry first.
    UPDATE dlq.dead_letter_queue e SET status = 'dlq_manual', strategy = 'manual', parked_by = dlq.actor(p_actor),
        move = jsonb_build_object('actor', dlq.actor(p_actor), 'claimed', p_actor, 'reason', 'reopened')
    WHERE e.id = p_id AND e.stage = 'returned' AND e.original_event <> '{"erased": true}';
    IF p_payload IS NOT NULL THEN
        UPDATE dlq.dead_letter_queue SET
            edited_event = CASE WHEN job_kind <> 'dlqd_message' THEN p_payload
                ELSE original_event || jsonb_build_object('payload', p_payload)
                     -- If the message is delivered byte for byte, so is its edited payload.
                     || CASE WHEN original_event ? 'payloadText' THEN jsonb_build_object('payloadText',
                         coalesce(p_payload_text, p_payload::text)) ELSE '{}' END END
        WHERE id = p_id AND status IN ('dlq_pending', 'dlq_manual', 'dlq_failed');
    END IF;
    SELECT * INTO v_row FROM dlq.redeliver(ARRAY[p_id], p_actor,
        CASE WHEN p_payload IS NULL THEN 'replayed' ELSE 'edited and replayed' END, p_note, p_force,
        nullif(CASE WHEN p_payload IS NULL THEN '{}' ELSE jsonb_build_object('payload', p_payload) END
               || CASE WHEN p_destination IS NULL THEN '{}' ELSE jsonb_build_object('destination', p_destination) END
               || jsonb_strip_nulls(jsonb_build_object('checkpoint', p_checkpoint)), '{}'),
                   p_destination => p_destination, p_checkpoint => p_checkpoint, p_alone => false);
    IF NOT FOUND THEN
        PERFORM dlq.refuse_move(p_id, 'replay', 'dlq_pending, dlq_manual, dlq_failed, dlq_returned');
    END IF;
    IF v_row.verdict = 'open' THEN
        RAISE EXCEPTION 'dead letter %: its job % has an open entry', p_id, v_row.job_id USING ERRCODE = 'DLQ01',
            HINT = 'Replay the open entry instead.';
    ELSIF v_row.verdict = 'live' THEN
        RAISE EXCEPTION 'dead letter %: job % with the same unique key is live', p_id, v_row.job_id
            USING ERRCODE = 'DLQ03', HINT = 'Wait for that job to end, or replay with force.';
    ELSIF v_row.verdict = 'done' THEN
        RAISE EXCEPTION 'dead letter %: job % with the same unique key has ended, and may have done its work',
            p_id, v_row.job_id
            USING ERRCODE = 'DLQ03', HINT = 'Check that job, then resolve the entry or replay with force.';
    ELSIF v_row.verdict = 'busy' THEN
        RAISE EXCEPTION 'dead letter %: another transaction has locked its job % or the job''s unique key',
            p_id, v_row.job_id
            USING ERRCODE = 'DLQ03', HINT = 'Try again.';
    ELSIF v_row.verdict IN ('follows', 'resolved') AND (p_payload IS NOT NULL OR p_destination IS NOT NULL
        OR p_checkpoint = 'discard') THEN
        RAISE EXCEPTION 'dead letter %: its job % % with its original payload, checkpoint and destination', p_id,
            v_row.job_id, CASE v_row.verdict WHEN 'follows' THEN 'runs again' ELSE 'has completed' END
            USING ERRCODE = 'DLQ03', HINT = 'Replay with force to redeliver it with the changes, too.';
    END IF;
    RETURN v_row.job_id;
END
$$;
COMMENT ON FUNCTION dlq.replay IS
    'Redelivers an entry now. p_payload, if given, replaces its payload; the original is kept. As p_payload_text it '
    'is delivered as written by queues that deliver byte for byte. p_destination, if given, replaces its queue''s '
    'destination with another one of the policy (only for dlqd''s own messages). A resumable job continues after its '
    'last step. With another payload, p_checkpoint must say whether it does: resume, or discard to start over. '
    'Returns the id of the new job, or of the entry''s own job if that already runs again or has completed. Raises '
    'DLQ03 if an equal job is live or has ended, or if another session has locked the entry''s job; p_force '
    'overrides. Raises DLQ02 if there is no such entry, and DLQ01 if its status does not permit a replay or its job '
    'has another open entry. It may need an approval.';

CREATE OR REPLACE FUNCTION dlq.discard(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('discard', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.discard IS 'Archives an entry whose work is no longer wanted.';

CREATE OR REPLACE FUNCTION dlq.expire(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('expire', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.expire IS 'Archives an entry whose work is out of date.';

CREATE OR REPLACE FUNCTION dlq.resolve(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('resolve', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.resolve IS 'Closes a parked entry whose work was done outside dlqd.';

CREATE OR REPLACE FUNCTION dlq.park(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('park', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.park IS 'Takes a pending entry out of the automatic path.';

CREATE OR REPLACE FUNCTION dlq.unpark(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('unpark', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.unpark IS 'Returns a parked entry to the automatic path.';

CREATE OR REPLACE FUNCTION dlq.reopen(p_id uuid, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('reopen', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.reopen IS 'Reopens a closed entry: it becomes dlq_manual.';

-- The sweep checks the jobs of entries in dlq_processing:
--   - If the job waits or runs, the sweep writes nothing, however long the job takes.
--   - If the job has ended and no trigger recorded it, the sweep applies the end.
--   - If the job is gone, the entry becomes pending again, or manual if the job was retried outside dlqd.
CREATE OR REPLACE FUNCTION dlq.sweep_redeliveries(p_limit integer DEFAULT 1000,
    p_after uuid DEFAULT '00000000-0000-0000-0000-000000000000')
RETURNS TABLE (looked integer, last uuid, settled integer, requeued integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_entry record;
    v_job   jsonb;
BEGIN
    PERFORM dlq.require_everything('sweep');
    looked := 0; settled := 0; requeued := 0;
    FOR v_entry IN
        SELECT e.id, e.redelivery_job_id AS job_id, e.locked_by, j.id IS NULL AS gone, j.created_at, j.state
        FROM dlq.dead_letter_open e
        LEFT JOIN LATERAL (
            SELECT o.id, o.created_at, o.state FROM river.river_job o
            WHERE o.id = e.redelivery_job_id
              AND EXISTS (SELECT FROM dlq.entry_jobs m WHERE m.job_id = o.id AND m.job_created_at = o.created_at
                  AND m.entry_id = e.id)
        ) j ON true
        WHERE e.status = 'dlq_processing' AND e.id > p_after
        ORDER BY e.id
        LIMIT p_limit
    LOOP
        looked := looked + 1;
        last := v_entry.id;
        -- If a fact records the end, dlq.apply_facts applies it. Locked entries are left for the next sweep.
        CONTINUE WHEN NOT v_entry.gone AND v_entry.state NOT IN ('completed', 'discarded', 'cancelled');
        CONTINUE WHEN EXISTS (SELECT FROM dlq.job_facts f WHERE f.job_id = v_entry.job_id AND f.fact <> 'following');
        PERFORM FROM dlq.dead_letter_open e WHERE e.id = v_entry.id AND e.status = 'dlq_processing'
            AND e.redelivery_job_id = v_entry.job_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        IF v_entry.gone THEN
            CONTINUE WHEN EXISTS (SELECT FROM river.river_job j JOIN dlq.entry_jobs m ON m.job_id = j.id
                AND m.job_created_at = j.created_at WHERE j.id = v_entry.job_id AND m.entry_id = v_entry.id);
            UPDATE dlq.dead_letter_queue SET
                status = CASE WHEN v_entry.locked_by LIKE 'river:%' THEN 'dlq_manual'
                    ELSE 'dlq_pending' END::dlq.dead_letter_status,
                strategy = CASE WHEN v_entry.locked_by LIKE 'river:%' THEN 'manual' END::dlq.strategy,
                next_retry_at = now(),
                move = jsonb_build_object('actor', 'sweep', 'reason', 'job ' || v_entry.job_id || ' is gone')
            WHERE id = v_entry.id AND stage = 'open' AND status = 'dlq_processing';
            -- End the wait of the replay run that made the job.
            UPDATE dlq.replay_run_entries r SET outcome = 'failed', detail = 'job ' || v_entry.job_id || ' is gone',
                ended_at = clock_timestamp()
            FROM dlq.entry_jobs m
            WHERE m.entry_id = v_entry.id AND m.job_id = v_entry.job_id AND r.run_id = m.run_id
                AND r.entry_id = v_entry.id AND r.job_id = v_entry.job_id AND r.outcome IS NULL;
            requeued := requeued + 1;
        ELSE
            SELECT to_jsonb(j) - 'args' INTO v_job FROM river.river_job j WHERE j.id = v_entry.job_id
                AND j.created_at = v_entry.created_at;
            IF dlq.record_end(v_entry.id, v_job, 'sweep') THEN
                settled := settled + 1;
            END IF;
        END IF;
    END LOOP;
    IF settled + requeued > 0 THEN
        PERFORM dlq.wake();
    END IF;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION dlq.sweep_redeliveries IS
    'Checks the jobs of up to p_limit entries in dlq_processing, in order of id after p_after. '
    'Returns how many it checked, the last id, how many it settled (their job had ended unseen) and '
    'how many it requeued (their job is gone).';
