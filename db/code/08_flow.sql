-- The flow of redeliveries and messages: pacing, held messages and ordering.

-- reserve_pace reserves the next p_count places in a stream of p_rate redeliveries per second, which all processes
-- share. The first place is at first_at. With p_within it reserves only places that are at most p_within after p_now. A
-- place may be in the future, so a rate below one redelivery per poll also works.
CREATE OR REPLACE FUNCTION dlq.reserve_pace(p_name text, p_rate float8, p_count integer, p_now timestamptz,
    p_within interval DEFAULT NULL,
    OUT first_at timestamptz, OUT granted integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOOP
        INSERT INTO dlq.paces (name, free_at) VALUES (p_name, p_now) ON CONFLICT (name) DO NOTHING;
        SELECT greatest(p.free_at, p_now) INTO first_at FROM dlq.paces p WHERE p.name = p_name FOR UPDATE;
        EXIT WHEN FOUND; -- otherwise another session has just deleted the row
    END LOOP;
    granted := p_count;
    IF p_within IS NOT NULL THEN
        granted := least(p_count, greatest(0, 1 + floor(extract(epoch FROM p_now + p_within - first_at) * p_rate)));
    END IF;
    UPDATE dlq.paces SET free_at = first_at + make_interval(secs => granted / p_rate) WHERE name = p_name
        AND granted > 0;
END
$$;
COMMENT ON FUNCTION dlq.reserve_pace IS
    'Reserves the next p_count places in a stream of p_rate redeliveries per second: the first at first_at, the '
    'others behind it. With p_within, only the places (granted) that come within that time.';

-- run_place takes the places of a run and of a destination in the order in which a run takes them, so that no deadlock
-- arises. The time at which a run falls to a lower rate is in the "fell" of its pace (internal/replay/pace.go).
CREATE OR REPLACE FUNCTION dlq.run_place(p_run uuid, p_destination text, p_at timestamptz, p_taken timestamptz,
    OUT place_at timestamptz, OUT taken_at timestamptz, OUT wait float8)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_rate    float8;
    v_lowered float8;
    v_fell    timestamptz;
BEGIN
    taken_at := clock_timestamp();
    place_at := taken_at;
    wait := 0;
    SELECT r.rate, (r.paces -> p_destination ->> 'rate')::float8, (r.paces -> p_destination ->> 'fell')::timestamptz
    INTO v_rate, v_lowered, v_fell
    FROM dlq.replay_runs r WHERE r.id = p_run AND r.progressive AND r.status IN ('running', 'paused', 'stopped');
    IF NOT FOUND OR v_rate IS NULL AND v_lowered IS NULL THEN
        RETURN;
    END IF;
    IF p_taken >= coalesce(v_fell, '-infinity') THEN
        place_at := p_at;
        taken_at := p_taken;
    ELSE
        IF v_rate IS NOT NULL THEN
            SELECT p.first_at INTO place_at
            FROM dlq.reserve_pace('replay:' || p_run, v_rate, 1, taken_at) p;
        END IF;
        IF v_lowered < coalesce(v_rate, 'infinity') THEN
            SELECT greatest(place_at, p.first_at) INTO place_at
            FROM dlq.reserve_pace('replay:' || p_run || ':' || p_destination, v_lowered, 1, taken_at) p;
        END IF;
    END IF;
    wait := greatest(extract(epoch FROM place_at - clock_timestamp()), 0);
END
$$;
COMMENT ON FUNCTION dlq.run_place IS
    'The place of a redelivery in the pace of its progressive run to a destination: when it is sent (place_at), when '
    'that place was taken (taken_at), and in how many seconds it is (wait). p_at and p_taken are its place until now; '
    'without one, or if the run became slower after p_taken, it gets a new place. wait is 0 if the run has no rate, '
    'has ended or is not progressive.';

-- A held message is a River job with the metadata key dlq:held, scheduled for a few minutes later. p_horizon limits the
-- scan, because a queue may have any number of jobs that applications scheduled. A caller releases, each second, the
-- messages that may go in that second, so they are spread over it.
CREATE OR REPLACE FUNCTION dlq.release_held(p_queues text[], p_limit integer, p_horizon interval,
    p_held text DEFAULT 'breaker') RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_released integer;
BEGIN
    WITH held AS MATERIALIZED (
        SELECT h.id
        -- The order is random, so that many messages of one queue do not delay the others.
        FROM (SELECT u.queue FROM unnest(p_queues) u (queue) ORDER BY random()) q
        CROSS JOIN (VALUES (1), (2), (3), (4)) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT j.id FROM river.river_job j
            WHERE j.state = 'scheduled' AND j.queue = q.queue AND j.priority = p.priority
                AND j.scheduled_at <= now() + p_horizon
              AND j.kind = 'dlqd_message' AND j.metadata @> jsonb_build_object('dlq:held', p_held)
            ORDER BY j.scheduled_at, j.id
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED
        ) h
        LIMIT p_limit
    ), placed AS (
        SELECT held.id, (row_number() OVER () - 1) / (count(*) OVER ())::float8 * interval '1 second' AS after FROM held
    ), released AS (
        UPDATE river.river_job j SET state = 'available', scheduled_at = now() + p.after,
            metadata = j.metadata - 'dlq:held'
        FROM placed p WHERE j.id = p.id
        RETURNING j.queue
    ), notified AS (
        SELECT count(pg_notify('river.river_insert', json_build_object('queue', r.queue)::text)) AS n
        FROM (SELECT DISTINCT released.queue FROM released) r
    )
    SELECT count(*) INTO v_released FROM released, notified;
    RETURN v_released;
END
$$;
COMMENT ON FUNCTION dlq.release_held IS
    'Makes up to p_limit held messages that are due within p_horizon available, spread over the next second: those '
    'held for p_held, by default because of an open breaker. Returns how many.';

-- put_back makes messages available again that are marked as running in River clients that do not deliver them. River's
-- rescuer does the same, but minutes later, because it waits for the longest timeout of all queues. put_back differs in
-- three ways:
--   - The next attempt is due at once, because the process failed and not the destination.
--   - The job's timeout is ignored, because no process delivers the message.
--   - river:rescue_count does not change. It counts rescues of jobs that may have killed their worker, and a
--     message runs no code of its own.
CREATE OR REPLACE FUNCTION dlq.put_back(p_clients text[], p_queue text, p_except bigint[], p_why text, p_limit integer,
    p_fetched_before timestamptz DEFAULT NULL, OUT retried integer, OUT ended integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET row_security = off AS $$
BEGIN
    WITH stuck AS MATERIALIZED (
        SELECT j.id,
               CASE WHEN j.metadata ? 'cancel_attempted_at' THEN 'cancelled'
                    WHEN p_fetched_before IS NOT NULL OR j.attempt < j.max_attempts THEN 'available'
                    ELSE 'discarded' END AS state
        FROM river.river_job j
        WHERE j.state = 'running' AND j.kind = 'dlqd_message'
          AND j.attempted_by[cardinality(j.attempted_by)] = ANY (p_clients)
          AND (p_queue IS NULL OR j.queue = p_queue) AND j.id <> ALL (p_except)
          AND (p_fetched_before IS NULL OR j.attempted_at <= p_fetched_before)
        -- "+ 0" keeps the planner from reading by the index of ids, which also contains all finished
        -- jobs.
        ORDER BY j.id + 0
        LIMIT p_limit
        FOR NO KEY UPDATE SKIP LOCKED
    ), rescued AS (
        UPDATE river.river_job j
        SET state = s.state::river.river_job_state,
            attempt = CASE WHEN p_fetched_before IS NULL THEN j.attempt ELSE greatest(j.attempt - 1, 0) END,
            errors = CASE WHEN p_fetched_before IS NULL THEN array_append(j.errors, jsonb_build_object('at', now(),
                'attempt', j.attempt, 'error', 'Stuck job rescued by dlqd: ' || p_why, 'trace', '')) ELSE j.errors END,
            finalized_at = CASE WHEN s.state <> 'available' THEN now() END,
            scheduled_at = CASE WHEN s.state = 'available' THEN now() ELSE j.scheduled_at END
        FROM stuck s WHERE j.id = s.id
        RETURNING j.queue, s.state
    ), notified AS (
        SELECT count(pg_notify('river.river_insert', json_build_object('queue', r.queue)::text)) AS n
        FROM (SELECT DISTINCT rescued.queue FROM rescued WHERE rescued.state = 'available') r
    )
    SELECT count(*) FILTER (WHERE rescued.state = 'available'), count(*) FILTER (WHERE rescued.state <> 'available')
    INTO retried, ended
    FROM notified LEFT JOIN rescued ON true;
END
$$;
COMMENT ON FUNCTION dlq.put_back IS
    'Makes available again up to p_limit messages that are running in the given River clients, of one queue or '
    '(null) of all, except the jobs p_except, as River''s rescuer would. p_why ends the recorded error. With '
    'p_fetched_before, only those fetched up to then are put back, and the attempt does not count: no process knows '
    'of it. Returns how many run again (retried), and how many were cancelled or had no attempts left (ended).';

CREATE OR REPLACE FUNCTION dlq.rescue_messages(p_seen_before timestamptz, p_limit integer,
    OUT retried integer, OUT ended integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_silent text[] := ARRAY(SELECT p.id::text FROM dlq.processes p WHERE p.seen_at < p_seen_before);
BEGIN
    retried := 0;
    ended := 0;
    IF cardinality(v_silent) = 0 THEN
        RETURN;
    END IF;
    SELECT b.retried, b.ended INTO retried, ended
    FROM dlq.put_back(v_silent, NULL, '{}', 'its process was not seen any more', p_limit) b;
END
$$;
COMMENT ON FUNCTION dlq.rescue_messages IS
    'Rescues up to p_limit messages that were running in processes that dlq.processes has not seen since '
    'p_seen_before, as River''s rescuer would. Returns how many run again (retried), and how many were cancelled or '
    'had no attempts left (ended).';

-- Ordering. In an ordered queue, a message with an orderingKey has a row in ordered_jobs from its submission on. The
-- job and the entry decide whether the work is done; the row is only an index of them. A function that reads the row
-- and finds the work done deletes the row.
CREATE OR REPLACE FUNCTION dlq.is_undone(p_job bigint, p_created_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_ended   timestamptz;
    v_runs    boolean;
    v_attempt integer;
    v_failure boolean;
BEGIN
    SELECT j.finalized_at, j.finalized_at IS NULL, j.attempt,
        CASE WHEN j.state IN ('discarded', 'cancelled') THEN dlq.is_failure(to_jsonb(j) - 'args') END
    INTO v_ended, v_runs, v_attempt, v_failure
    FROM river.river_job j WHERE j.id = p_job AND j.created_at = p_created_at;
    RETURN coalesce(v_runs, false)
        OR EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.river_job_id = p_job AND e.job_created_at = p_created_at)
        -- A record has no job: p_created_at is the time of its failure.
        OR (v_ended IS NOT NULL OR p_job < 0) AND EXISTS (SELECT FROM dlq.dead_letter_inbox e
            WHERE e.id = dlq.entry_id(p_job, coalesce(v_ended, p_created_at)))
        -- The job has a failure that no entry has yet: the failure is in the inbox, or capture skipped it and the
        -- reconciler files it later.
        OR coalesce(v_failure, false)
           AND (SELECT k.known FROM dlq.known_failure(p_job, p_created_at, dlq.entry_id(p_job, v_ended), v_attempt,
               v_ended) k WHERE k.known <> 'waits') IS NULL;
END
$$;
COMMENT ON FUNCTION dlq.is_undone IS
    'Whether a job has not ended yet, or its failure is not filed yet, or its entry is open.';

CREATE OR REPLACE FUNCTION dlq.order_predecessor(p_queue text, p_key text, p_job bigint, p_created_at timestamptz)
    RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_place bigint := dlq.order_place(p_job, p_created_at);
    v_first record;
BEGIN
    FOR v_first IN
        SELECT o.place, o.job_id, o.job_created_at FROM dlq.ordered_jobs o
        WHERE o.queue = p_queue AND o.ordering_key = p_key AND o.place < v_place
        ORDER BY o.place
    LOOP
        IF dlq.is_undone(v_first.job_id, v_first.job_created_at) THEN
            RETURN v_first.job_id;
        END IF;
        PERFORM dlq.forget_place(v_first.job_id, v_first.job_created_at);
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.order_predecessor IS
    'Returns the first unfinished job with this ordering key that comes before p_job (or before the message '
    'that p_job redelivers). Null if it is p_job''s turn.';

CREATE OR REPLACE FUNCTION dlq.order_place(p_job bigint, p_created_at timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_place bigint;
BEGIN
    SELECT o.place INTO v_place FROM dlq.ordered_jobs o WHERE o.job_id = p_job AND o.job_created_at = p_created_at;
    IF NOT FOUND THEN -- a redelivery uses the place of its message
        SELECT o.place INTO v_place
        FROM dlq.entry_jobs m
        JOIN dlq.dead_letter_open e ON e.id = m.entry_id
        JOIN dlq.ordered_jobs o ON o.job_id = e.river_job_id AND o.job_created_at = e.job_created_at
        WHERE m.job_id = p_job AND m.job_created_at = p_created_at;
    END IF;
    RETURN v_place;
END
$$;
COMMENT ON FUNCTION dlq.order_place IS
    'Returns the place of a job, or of the message that it redelivers, in the order of its key; null if it has '
    'none.';

-- SKIP LOCKED: if another session has locked the row, that session or a later reader deletes it.
CREATE OR REPLACE FUNCTION dlq.leave_order(p_job bigint, p_created_at timestamptz) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    DELETE FROM dlq.ordered_jobs o
    WHERE (o.queue, o.ordering_key, o.place) IN (SELECT s.queue, s.ordering_key, s.place FROM dlq.ordered_jobs s
        WHERE s.job_id = p_job AND s.job_created_at = p_created_at FOR UPDATE SKIP LOCKED)
$$;
COMMENT ON FUNCTION dlq.leave_order IS 'Deletes a job''s place in the order of its key.';

-- forget_place is for functions that have seen that the work is done but hold no lock on its entry, which an operator
-- may reopen at the same time. dlq.order_again and forget_place both lock the place. forget_place locks it in one
-- statement and checks the work in the next one, whose snapshot includes the changes of the lock's last holder.
CREATE OR REPLACE FUNCTION dlq.forget_place(p_job bigint, p_created_at timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
BEGIN
    PERFORM FROM dlq.ordered_jobs o WHERE o.job_id = p_job AND o.job_created_at = p_created_at FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR dlq.is_undone(p_job, p_created_at) THEN
        RETURN false;
    END IF;
    PERFORM dlq.leave_order(p_job, p_created_at);
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.forget_place IS
    'Deletes a job''s place in the order of its key if its work is done, unless another session has locked the place. '
    'Returns whether it did.';

CREATE OR REPLACE FUNCTION dlq.order_again(p_queue text, p_key text, p_place bigint, p_job bigint,
    p_created_at timestamptz) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    -- The SELECT locks the place if it exists, so that no reader deletes the place. If a reader is already deleting it,
    -- the SELECT waits for the reader, and the INSERT writes the place again.
    SELECT FROM dlq.ordered_jobs o WHERE o.job_id = p_job AND o.job_created_at = p_created_at FOR UPDATE;
    INSERT INTO dlq.ordered_jobs (queue, ordering_key, place, job_id, job_created_at) OVERRIDING SYSTEM VALUE
    SELECT p_queue, p_key, p_place, p_job, p_created_at WHERE p_place IS NOT NULL
    ON CONFLICT DO NOTHING
$$;
COMMENT ON FUNCTION dlq.order_again IS
    'Restores a job''s former place in the order of its key, because its work is to be done after all.';

-- wake_first waits for no lock. It skips a job that another session has locked; dlq.wake_ordered finds
-- that job in its next round over all keys.
CREATE OR REPLACE FUNCTION dlq.wake_first(p_queue text, p_key text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_place bigint := -1;
    v_first record;
BEGIN
    FOR v_looked IN 1 .. 100 LOOP
        SELECT o.place, o.job_id, o.job_created_at, e.id IS NOT NULL AS is_open, n.id AS live_id,
            n.state = 'scheduled' AND n.metadata @> '{"dlq:held": "order"}' AS is_held
        INTO v_first
        FROM (SELECT f.place, f.job_id, f.job_created_at FROM dlq.ordered_jobs f
            WHERE f.queue = p_queue AND f.ordering_key = p_key AND f.place > v_place ORDER BY f.place LIMIT 1) o
        LEFT JOIN dlq.dead_letter_open e ON e.river_job_id = o.job_id AND e.job_created_at = o.job_created_at
        LEFT JOIN dlq.entry_jobs m ON m.job_id = e.redelivery_job_id AND m.entry_id = e.id
        LEFT JOIN river.river_job n ON n.id = coalesce(m.job_id, o.job_id)
            AND n.created_at = coalesce(m.job_created_at, o.job_created_at) AND n.finalized_at IS NULL;
        IF NOT FOUND THEN
            RETURN false;
        ELSIF v_first.is_held THEN
            UPDATE river.river_job j SET state = 'available', scheduled_at = now(), metadata = j.metadata - 'dlq:held'
            WHERE j.id = (SELECT l.id FROM river.river_job l WHERE l.id = v_first.live_id AND l.state = 'scheduled'
                AND l.metadata @> '{"dlq:held": "order"}' FOR NO KEY UPDATE SKIP LOCKED);
            IF FOUND THEN
                PERFORM pg_notify('river.river_insert', json_build_object('queue', p_queue)::text);
                RETURN true;
            END IF;
            RETURN false;
        ELSIF v_first.live_id IS NOT NULL OR v_first.is_open
            OR dlq.is_undone(v_first.job_id, v_first.job_created_at) THEN
            RETURN false;
        END IF;
        PERFORM dlq.forget_place(v_first.job_id, v_first.job_created_at);
        v_place := v_first.place;
    END LOOP;
    RETURN false;
END
$$;
COMMENT ON FUNCTION dlq.wake_first IS
    'Makes the first unfinished job of an ordering key, or its redelivery, available if it is held because of its '
    'order. Deletes the places of finished jobs before it, at most 100 in a call. Returns whether it made a job '
    'available.';

-- wake_ordered checks up to p_limit keys, which limits its duration and the number of jobs that it locks.
CREATE OR REPLACE FUNCTION dlq.wake_ordered(p_limit integer, p_queue text DEFAULT '', p_key text DEFAULT '',
    OUT queue text, OUT ordering_key text, OUT woken integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    woken := 0;
    FOR v_looked IN 1 .. p_limit LOOP
        SELECT o.queue, o.ordering_key INTO p_queue, p_key FROM dlq.ordered_jobs o
        WHERE (o.queue, o.ordering_key) > (p_queue, p_key) ORDER BY o.queue, o.ordering_key LIMIT 1;
        EXIT WHEN NOT FOUND; -- p_queue and p_key are null
        woken := woken + dlq.wake_first(p_queue, p_key)::integer;
    END LOOP;
    queue := coalesce(p_queue, '');
    ordering_key := coalesce(p_key, '');
END
$$;
COMMENT ON FUNCTION dlq.wake_ordered IS
    'Wakes the first jobs (dlq.wake_first) of up to p_limit ordering keys after the given one. Returns the last '
    'key, or empty texts if none is left, and how many it woke. So jobs run even if the end of their '
    'predecessor did not wake them.';

CREATE OR REPLACE FUNCTION dlq.order_done(p_queue text, p_key text, p_job bigint, p_created_at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_job     bigint := p_job;
    v_created timestamptz := p_created_at;
BEGIN
    SELECT e.river_job_id, e.job_created_at INTO v_job, v_created
    FROM dlq.entry_jobs m JOIN dlq.dead_letter_open e ON e.id = m.entry_id
    WHERE m.job_id = p_job AND m.job_created_at = p_created_at;
    PERFORM dlq.leave_order(coalesce(v_job, p_job), coalesce(v_created, p_created_at));
    PERFORM dlq.wake_first(p_queue, p_key);
END
$$;
COMMENT ON FUNCTION dlq.order_done IS
    'Ends the work of a job (or of the message that it redelivers), and makes the next job of its ordering key, '
    'or that job''s redelivery, available.';

-- complete_ordered completes the job and removes its place in one transaction. If the place were removed first and the
-- process then died, later messages would be delivered, and the rescued job would deliver its message after them.
-- River's completer does not change a job that is already completed.
CREATE OR REPLACE FUNCTION dlq.complete_ordered(p_queue text, p_key text, p_job bigint, p_created_at timestamptz,
    p_attempt integer) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET row_security = off AS $$
BEGIN
    UPDATE river.river_job j SET state = 'completed', finalized_at = now()
    WHERE j.id = p_job AND j.created_at = p_created_at AND j.state = 'running' AND j.attempt = p_attempt;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM dlq.order_done(p_queue, p_key, p_job, p_created_at);
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.complete_ordered IS
    'Completes a job whose message was delivered in attempt p_attempt, and removes its place in the order of '
    'its key. Returns false, and changes nothing, if that attempt no longer runs because the job was rescued.';

CREATE OR REPLACE FUNCTION dlq.forget_ordered(p_limit integer DEFAULT 10000) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_done  record;
    v_count integer := 0;
BEGIN
    FOR v_done IN
        SELECT s.job_id, s.job_created_at FROM dlq.ordered_jobs s
        WHERE NOT dlq.is_undone(s.job_id, s.job_created_at) LIMIT p_limit
    LOOP
        v_count := v_count + dlq.forget_place(v_done.job_id, v_done.job_created_at)::integer;
    END LOOP;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.forget_ordered IS
    'Deletes up to p_limit rows of ordered_jobs whose work is done and that no reader has deleted. Returns how '
    'many.';

-- dlqd must not put messages into an application's queue: the application's River client fetches every job of its
-- queues, and fails jobs of a kind that it does not know. A queue counts as shared if it has jobs of other kinds than
-- dlqd's, or if it has no such jobs but River lists it and no dlqd has worked it. The function reads at most 100 jobs
-- per queue and state.
CREATE OR REPLACE FUNCTION dlq.shared_queues(p_queues text[]) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
BEGIN
    RETURN ARRAY(
        SELECT q.queue FROM unnest(p_queues) q (queue)
        WHERE EXISTS (
                SELECT FROM unnest(
                    '{available,running,retryable,scheduled,completed,discarded,cancelled}'::text[]) s (state)
                CROSS JOIN LATERAL (SELECT j.kind FROM river.river_job j WHERE j.state = s.state::river.river_job_state
                    AND j.queue = q.queue LIMIT 100) k
                WHERE k.kind <> 'dlqd_message')
           OR (EXISTS (SELECT FROM river.river_queue r WHERE r.name = q.queue)
               AND NOT EXISTS (SELECT FROM dlq.processes p WHERE q.queue = ANY (p.queues)))
        ORDER BY 1);
END
$$;
COMMENT ON FUNCTION dlq.shared_queues IS
    'Of the given queues, returns those that River clients other than dlqd''s may work: queues with jobs of other '
    'kinds, and queues that River lists and no dlqd has worked.';
