-- Retention: whole partitions are dropped; what a queue keeps for less time than the others, or a default partition holds,
-- is deleted in small steps.

-- The end of the range of a month's partition, from its bounds as Postgres keeps them.
CREATE OR REPLACE FUNCTION dlq.partition_end(p_partition regclass) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT substring(pg_get_expr(c.relpartbound, c.oid) FROM $re$TO \('([^']+)'\)$re$)::timestamptz FROM pg_class c WHERE c.oid = p_partition
$$;
COMMENT ON FUNCTION dlq.partition_end IS 'Where the range of a partition ends; null for a default partition.';

-- retention_of is how long a closed entry is kept: its queue's period, or the default.
CREATE OR REPLACE FUNCTION dlq.retention_of(p_periods jsonb, p_queue text, p_status text) RETURNS interval
LANGUAGE sql STABLE
RETURN coalesce(p_periods -> 'queues' -> p_queue ->> p_status, p_periods -> 'defaults' ->> p_status)::interval;
COMMENT ON FUNCTION dlq.retention_of IS 'How long an entry of a queue is kept after it was closed as resolved, failed or archived.';

CREATE OR REPLACE FUNCTION dlq.retention_range(p_periods jsonb, p_status text, OUT shortest interval, OUT longest interval)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(p.period), max(p.period) FROM (
        SELECT (p_periods -> 'defaults' ->> p_status)::interval AS period
        UNION ALL
        SELECT (q.value ->> p_status)::interval FROM jsonb_each(coalesce(p_periods -> 'queues', '{}')) q) p
$$;
COMMENT ON FUNCTION dlq.retention_range IS 'The shortest and the longest period of any queue.';

CREATE OR REPLACE FUNCTION dlq.enforce_retention(p_periods jsonb, p_limit integer DEFAULT 1000, p_now timestamptz DEFAULT now())
RETURNS TABLE (action text, what text, entries bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET dlq.actor = 'retention' AS $$
DECLARE
    v_status    text;
    v_longest   interval;
    v_shortest  interval; -- what is younger need not be looked at
    v_partition record;
    v_ids       uuid[];
BEGIN
    -- One at a time, over all dlqd processes.
    IF NOT pg_try_advisory_xact_lock(hashtextextended('dlq.enforce_retention', 0)) THEN
        RETURN;
    END IF;

    -- Entries that failed are archived when their time has come, and begin a new one.
    SELECT r.shortest INTO v_shortest FROM dlq.retention_range(p_periods, 'failed') r;
    v_ids := ARRAY(
        SELECT e.id FROM dlq.dead_letter_failed e
        WHERE e.closed_at < p_now - v_shortest AND e.closed_at < p_now - dlq.retention_of(p_periods, e.queue, 'failed')
        ORDER BY e.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    IF cardinality(v_ids) > 0 THEN
        UPDATE dlq.dead_letter_queue SET status = 'dlq_archived', move = '{"reason": "aged out"}' WHERE id = ANY (v_ids) AND status = 'dlq_failed';
        RETURN QUERY SELECT 'archived', 'failed', cardinality(v_ids)::bigint;
    END IF;

    FOREACH v_status IN ARRAY ARRAY['resolved', 'archived'] LOOP
        SELECT r.shortest, r.longest INTO v_shortest, v_longest FROM dlq.retention_range(p_periods, v_status) r;
        -- A month that is older than the longest period of any queue goes whole.
        FOR v_partition IN
            SELECT c.oid::regclass AS partition, c.relname, greatest(c.reltuples, 0)::bigint AS about
            FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
            WHERE i.inhparent = ('dlq.dead_letter_' || v_status)::regclass AND dlq.partition_end(c.oid) <= p_now - v_longest
            ORDER BY c.relname
        LOOP
            BEGIN
                PERFORM set_config('lock_timeout', '2s', true);
                EXECUTE format('DROP TABLE %s', v_partition.partition);
                RETURN QUERY SELECT 'dropped', v_partition.relname::text, v_partition.about;
            EXCEPTION WHEN lock_not_available THEN
                RAISE WARNING 'partition % was not dropped: it is in use', v_partition.relname; -- the next round tries again
            END;
        END LOOP;
        -- What is left past its time: of queues with a shorter period, in the month that is not over, in the default partition.
        EXECUTE format('SELECT ARRAY(SELECT e.id FROM dlq.dead_letter_%s e WHERE e.closed_at < $1 - $5 AND e.closed_at < $1 - dlq.retention_of($2, e.queue, $3)
            ORDER BY e.id LIMIT $4 FOR UPDATE SKIP LOCKED)', v_status) INTO v_ids USING p_now, p_periods, v_status, p_limit, v_shortest;
        IF cardinality(v_ids) > 0 THEN
            DELETE FROM dlq.dead_letter_queue WHERE id = ANY (v_ids) AND status IN ('dlq_resolved', 'dlq_archived');
            RETURN QUERY SELECT 'deleted', v_status, cardinality(v_ids)::bigint;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.enforce_retention IS 'One step of retention: archives up to p_limit failed entries whose time has come, drops months of resolved and archived entries that are past every queue''s period, and deletes up to p_limit single ones. p_periods: {"defaults": {"resolved": "30 days", "failed": "90 days", "archived": "365 days"}, "queues": {"payments": {...}}}. Open entries are kept for ever.';
