-- The flow of what dlqd sends by itself: its pace, and messages that are held.

-- reserve_pace gives p_count redeliveries their places in a stream that lets p_rate through a second, behind those that
-- have theirs already, over all processes. With p_within it gives only as many as come within that time.
CREATE OR REPLACE FUNCTION dlq.reserve_pace(p_name text, p_rate float8, p_count integer, p_now timestamptz, p_within interval DEFAULT NULL,
    OUT first_at timestamptz, OUT granted integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO dlq.paces (name, free_at) VALUES (p_name, p_now) ON CONFLICT (name) DO NOTHING;
    SELECT greatest(p.free_at, p_now) INTO first_at FROM dlq.paces p WHERE p.name = p_name FOR UPDATE;
    granted := p_count;
    IF p_within IS NOT NULL THEN
        granted := least(p_count, greatest(0, floor(extract(epoch FROM p_now + p_within - first_at) * p_rate)));
    END IF;
    UPDATE dlq.paces SET free_at = first_at + make_interval(secs => granted / p_rate) WHERE name = p_name AND granted > 0;
END
$$;
COMMENT ON FUNCTION dlq.reserve_pace IS 'Gives p_count redeliveries their places in a stream of p_rate a second: the first at first_at, the others behind it. With p_within only as many (granted) as come within that time.';

-- Messages that are held are River jobs scheduled for later with the mark dlq:held. Their time is never far off, which
-- bounds what is looked at here: a queue may have any number of jobs that their senders scheduled.
CREATE OR REPLACE FUNCTION dlq.release_held(p_queues text[], p_limit integer, p_horizon interval) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_released integer;
BEGIN
    WITH held AS MATERIALIZED (
        SELECT h.id
        FROM unnest(p_queues) AS q (queue)
        CROSS JOIN (VALUES (1), (2), (3), (4)) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT j.id FROM river.river_job j
            WHERE j.state = 'scheduled' AND j.queue = q.queue AND j.priority = p.priority AND j.scheduled_at <= now() + p_horizon
              AND j.kind = 'dlqd_message' AND j.metadata @> '{"dlq:held": "breaker"}'
            ORDER BY j.scheduled_at, j.id
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED
        ) h
        LIMIT p_limit
    ), released AS (
        UPDATE river.river_job j SET state = 'available', scheduled_at = now(), metadata = j.metadata - 'dlq:held'
        FROM held WHERE j.id = held.id
        RETURNING j.queue
    ), told AS (
        SELECT count(pg_notify('river.river_insert', json_build_object('queue', r.queue)::text)) AS n
        FROM (SELECT DISTINCT released.queue FROM released) r
    )
    SELECT count(*) INTO v_released FROM released, told;
    RETURN v_released;
END
$$;
COMMENT ON FUNCTION dlq.release_held IS 'Lets up to p_limit messages go that were held because a breaker was open. Returns how many.';

-- Order. A message with an orderingKey, in a queue that keeps the order, has a row in ordered_jobs from its submission.
-- Rows of work that is done are taken away by whoever comes by: job and entry are the truth, the row says where to look.
CREATE OR REPLACE FUNCTION dlq.is_undone(p_job bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
BEGIN
    RETURN EXISTS (SELECT FROM river.river_job j WHERE j.id = p_job AND j.finalized_at IS NULL)
        OR EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.river_job_id = p_job);
END
$$;
COMMENT ON FUNCTION dlq.is_undone IS 'Whether a job has not ended yet, or its dead letter is open.';

CREATE OR REPLACE FUNCTION dlq.order_predecessor(p_queue text, p_key text, p_job bigint, p_entry uuid DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_job   bigint := p_job;
    v_place bigint;
    v_first record;
BEGIN
    IF p_entry IS NOT NULL THEN -- a redelivery has its message's place
        SELECT e.river_job_id INTO v_job FROM dlq.dead_letter_open e WHERE e.id = p_entry;
    END IF;
    SELECT o.place INTO v_place FROM dlq.ordered_jobs o WHERE o.job_id = v_job;
    LOOP
        SELECT o.place, o.job_id INTO v_first FROM dlq.ordered_jobs o
        WHERE o.queue = p_queue AND o.ordering_key = p_key AND o.place < v_place
        ORDER BY o.place LIMIT 1;
        IF NOT FOUND OR dlq.is_undone(v_first.job_id) THEN
            RETURN v_first.job_id;
        END IF;
        DELETE FROM dlq.ordered_jobs o WHERE o.queue = p_queue AND o.ordering_key = p_key AND o.place = v_first.place;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.order_predecessor IS 'The first job of an ordering key, before p_job (or before the message of the entry that it redelivers), whose work is not done; null where it is p_job''s turn.';

CREATE OR REPLACE FUNCTION dlq.order_done(p_queue text, p_key text, p_job bigint, p_entry uuid DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_job bigint := p_job;
BEGIN
    IF p_entry IS NOT NULL THEN
        SELECT e.river_job_id INTO v_job FROM dlq.dead_letter_open e WHERE e.id = p_entry;
    END IF;
    DELETE FROM dlq.ordered_jobs o WHERE o.job_id = v_job;
    UPDATE river.river_job j SET state = 'available', scheduled_at = now(), metadata = j.metadata - 'dlq:held'
    WHERE j.id = (SELECT o.job_id FROM dlq.ordered_jobs o WHERE o.queue = p_queue AND o.ordering_key = p_key ORDER BY o.place LIMIT 1)
      AND j.state = 'scheduled' AND j.metadata @> '{"dlq:held": "order"}';
    IF FOUND THEN
        PERFORM pg_notify('river.river_insert', json_build_object('queue', p_queue)::text);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.order_done IS 'The work of a job (or of the message of the entry that it redelivers) is done: the next of its ordering key may go.';

CREATE OR REPLACE FUNCTION dlq.forget_ordered(p_limit integer DEFAULT 10000) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_count integer;
BEGIN
    DELETE FROM dlq.ordered_jobs o
    WHERE o.job_id IN (SELECT s.job_id FROM dlq.ordered_jobs s WHERE NOT dlq.is_undone(s.job_id) LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.forget_ordered IS 'Takes rows out of ordered_jobs whose work is done and that nobody came by. Returns how many.';

-- An application's clients fetch every job of their queues, and fail those whose kind they do not know. Jobs say whose a queue is;
-- where there are none, River's own list of queues does, unless a dlqd has worked the queue. A few jobs of each state are
-- looked at, however many there are.
CREATE OR REPLACE FUNCTION dlq.shared_queues(p_queues text[]) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
BEGIN
    RETURN ARRAY(
        SELECT q.queue FROM unnest(p_queues) q (queue)
        WHERE EXISTS (
                SELECT FROM unnest('{available,running,retryable,scheduled,completed,discarded,cancelled}'::text[]) s (state)
                CROSS JOIN LATERAL (SELECT j.kind FROM river.river_job j WHERE j.state = s.state::river.river_job_state AND j.queue = q.queue LIMIT 100) k
                WHERE k.kind <> 'dlqd_message')
           OR (EXISTS (SELECT FROM river.river_queue r WHERE r.name = q.queue)
               AND NOT EXISTS (SELECT FROM dlq.processes p WHERE q.queue = ANY (p.queues)))
        ORDER BY 1);
END
$$;
COMMENT ON FUNCTION dlq.shared_queues IS 'Which of some queues clients other than dlqd''s work, too: there are jobs of theirs, or River knows the queue and no dlqd has worked it.';
