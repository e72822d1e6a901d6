-- Retention: whole partitions are dropped, and what a queue keeps for less time than the others is deleted in small steps;
-- both after they went to the archive. dlqd calls these functions; the archive is a directory or an object store.

CREATE OR REPLACE FUNCTION dlq.default_partition(p_parent regclass) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.oid::regclass FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = p_parent AND pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT'
$$;
COMMENT ON FUNCTION dlq.default_partition IS 'The default partition of a partitioned table.';

CREATE OR REPLACE FUNCTION dlq.ensure_partition(p_parent regclass, p_name text, p_from timestamptz, p_to timestamptz, p_primary_key text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_schema text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = p_parent);
BEGIN
    IF to_regclass(format('%I.%I', v_schema, p_name)) IS NOT NULL THEN
        RETURN false;
    END IF;
    -- ATTACH lets inserts into other partitions go on; CREATE TABLE ... PARTITION OF would stop them.
    EXECUTE format('CREATE TABLE %I.%I (LIKE %s INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (%s))', v_schema, p_name, p_parent, p_primary_key);
    -- Rows of this range that came while there was no partition for them.
    EXECUTE format('WITH early AS (DELETE FROM %1$s WHERE %2$I >= %3$L AND %2$I < %4$L RETURNING *) INSERT INTO %5$I.%6$I SELECT * FROM early',
                   dlq.default_partition(p_parent), CASE WHEN p_primary_key = 'id' THEN 'closed_at' ELSE 'at' END, p_from, p_to, v_schema, p_name);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)', p_parent, v_schema, p_name, p_from, p_to);
    RETURN true;
EXCEPTION WHEN lock_not_available OR check_violation THEN
    -- Busy, or rows of this range have just come to the default partition: the next round tries again, and nothing is refused.
    RAISE WARNING 'partition % was not made: %', p_name, SQLERRM;
    RETURN false;
END
$$;
COMMENT ON FUNCTION dlq.ensure_partition IS 'Makes one partition if it is missing. Returns whether it did.';

CREATE OR REPLACE FUNCTION dlq.ensure_partitions(p_days integer DEFAULT 7, p_months integer DEFAULT 2) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_made   integer := 0;
    v_day    timestamptz := date_trunc('day', now());
    v_month  timestamptz := date_trunc('month', now());
    v_status text;
    v_early  timestamptz;
    i        integer;
BEGIN
    -- One at a time, over all dlqd processes; whoever comes second has nothing to do.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.ensure_partitions', 0));
    FOR i IN 0 .. p_days LOOP
        v_made := v_made + dlq.ensure_partition('dlq.dead_letter_transitions',
            'dead_letter_transitions_' || to_char(v_day + i * interval '1 day', 'YYYYMMDD'),
            v_day + i * interval '1 day', v_day + (i + 1) * interval '1 day', 'id, at')::integer;
    END LOOP;
    FOREACH v_status IN ARRAY ARRAY['resolved', 'failed', 'archived'] LOOP
        FOR i IN 0 .. p_months LOOP
            v_made := v_made + dlq.ensure_partition(('dlq.dead_letter_' || v_status)::regclass,
                'dead_letter_' || v_status || '_' || to_char(v_month + i * interval '1 month', 'YYYYMM'),
                v_month + i * interval '1 month', v_month + (i + 1) * interval '1 month', 'id')::integer;
        END LOOP;
        -- Entries that a default partition took in long ago go to the month in which they closed, and with it.
        FOR v_early IN EXECUTE format('SELECT DISTINCT date_trunc(''month'', e.closed_at) FROM dlq.dead_letter_%s_default e', v_status) LOOP
            v_made := v_made + dlq.ensure_partition(('dlq.dead_letter_' || v_status)::regclass,
                'dead_letter_' || v_status || '_' || to_char(v_early, 'YYYYMM'), v_early, v_early + interval '1 month', 'id')::integer;
        END LOOP;
    END LOOP;
    FOR v_early IN SELECT DISTINCT date_trunc('day', t.at) FROM dlq.dead_letter_transitions_default t LOOP
        v_made := v_made + dlq.ensure_partition('dlq.dead_letter_transitions',
            'dead_letter_transitions_' || to_char(v_early, 'YYYYMMDD'), v_early, v_early + interval '1 day', 'id, at')::integer;
    END LOOP;
    RETURN v_made;
END
$$;
COMMENT ON FUNCTION dlq.ensure_partitions IS 'Makes the partitions of the next p_days days (audit trail) and p_months months (closed entries). Returns how many it made.';

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

-- Replaced by the functions below, between which dlqd writes the archive.
DROP FUNCTION IF EXISTS dlq.enforce_retention(jsonb, integer, timestamptz);

CREATE OR REPLACE FUNCTION dlq.age_out(p_periods jsonb, p_limit integer DEFAULT 1000, p_now timestamptz DEFAULT now()) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '2s' AS $$
DECLARE
    v_ids   uuid[];
    v_month regclass;
    v_empty boolean;
BEGIN
    v_ids := ARRAY(
        SELECT e.id FROM dlq.dead_letter_failed e
        WHERE e.closed_at < p_now - (SELECT r.shortest FROM dlq.retention_range(p_periods, 'failed') r) AND e.closed_at < p_now - dlq.retention_of(p_periods, e.queue, 'failed')
        ORDER BY e.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    UPDATE dlq.dead_letter_queue SET status = 'dlq_archived', move = '{"actor": "retention", "reason": "aged out"}' WHERE id = ANY (v_ids) AND status = 'dlq_failed';
    -- Months that are over and of which nothing is left.
    FOR v_month IN
        SELECT i.inhrelid FROM pg_inherits i
        WHERE i.inhparent = 'dlq.dead_letter_failed'::regclass AND dlq.partition_end(i.inhrelid) <= p_now - (SELECT r.longest FROM dlq.retention_range(p_periods, 'failed') r)
    LOOP
        BEGIN
            EXECUTE format('LOCK TABLE %s IN SHARE MODE', v_month);
            EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', v_month) INTO v_empty;
            IF v_empty THEN
                EXECUTE format('DROP TABLE %s', v_month);
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            RAISE WARNING 'partition % was not dropped: it is in use', v_month; -- the next round tries again
        END;
    END LOOP;
    RETURN cardinality(v_ids);
END
$$;
COMMENT ON FUNCTION dlq.age_out IS 'Moves up to p_limit failed entries whose time is over to dlq_archived, where a new time begins. p_periods: {"defaults": {"resolved": "30 days", "failed": "90 days", "archived": "365 days"}, "queues": {"payments": {...}}}. Returns how many.';

-- A month goes whole once its last day is past the longest period of any queue: until then its entries stay, up to a month
-- longer than their period.
CREATE OR REPLACE FUNCTION dlq.expired_partitions(p_periods jsonb, p_audit interval, p_now timestamptz DEFAULT now())
RETURNS TABLE (partition_name text, of_audit boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    SELECT c.relname::text, p.of_audit
    FROM (VALUES ('dlq.dead_letter_resolved'::regclass, false, (SELECT r.longest FROM dlq.retention_range(p_periods, 'resolved') r)),
                 ('dlq.dead_letter_archived', false, (SELECT r.longest FROM dlq.retention_range(p_periods, 'archived') r)),
                 ('dlq.dead_letter_transitions', true, p_audit)) p (parent, of_audit, period)
    JOIN pg_inherits i ON i.inhparent = p.parent JOIN pg_class c ON c.oid = i.inhrelid
    WHERE dlq.partition_end(c.oid) <= p_now - p.period
      AND NOT EXISTS (SELECT FROM dlq.restored_partitions h WHERE h.partition_name = c.relname AND h.until > p_now)
    ORDER BY p.of_audit, c.relname
$$;
COMMENT ON FUNCTION dlq.expired_partitions IS 'Partitions of which nothing has to be kept any more: months of resolved and archived entries, and days of the audit trail.';

-- What is dropped is what was archived: a row that came or changed since then keeps the partition for the next round.
CREATE OR REPLACE FUNCTION dlq.drop_partition(p_partition text, p_rows bigint DEFAULT NULL, p_hash numeric DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '2s' AS $$
DECLARE
    v_partition regclass := (
        SELECT c.oid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE c.relname = p_partition AND i.inhparent IN ('dlq.dead_letter_resolved'::regclass, 'dlq.dead_letter_archived'::regclass, 'dlq.dead_letter_transitions'::regclass)
          AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT');
    v_rows      bigint;
    v_hash      numeric;
BEGIN
    IF v_partition IS NULL THEN
        RAISE EXCEPTION '%: there is no such month of closed entries or day of the audit trail', p_partition USING ERRCODE = 'DLQ02';
    END IF;
    IF p_rows IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN SHARE MODE', v_partition);
        EXECUTE format('SELECT count(*), coalesce(sum(hashtextextended(r::text, 0)), 0) FROM %s r', v_partition) INTO v_rows, v_hash;
        IF (v_rows, v_hash) IS DISTINCT FROM (p_rows, p_hash) THEN
            RAISE EXCEPTION 'partition % has changed since it was archived', p_partition USING ERRCODE = 'DLQ01';
        END IF;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = v_partition AND i.inhparent = 'dlq.dead_letter_transitions'::regclass) THEN
        PERFORM dlq.retire(NULL, v_partition);
    END IF;
    EXECUTE format('DROP TABLE %s', v_partition);
    DELETE FROM dlq.restored_partitions h WHERE h.partition_name = p_partition;
END
$$;
COMMENT ON FUNCTION dlq.drop_partition IS 'Drops a month of closed entries or a day of the audit trail, if it still holds what was archived: so many rows, with that sum of hashtextextended(row::text, 0). Without p_rows, whatever it holds.';

CREATE OR REPLACE FUNCTION dlq.expired_entries(p_periods jsonb, p_limit integer DEFAULT 1000, p_now timestamptz DEFAULT now()) RETURNS SETOF uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_status text;
    v_range  record;
BEGIN
    FOREACH v_status IN ARRAY ARRAY['resolved', 'archived'] LOOP
        SELECT * INTO v_range FROM dlq.retention_range(p_periods, v_status);
        IF v_range.shortest < v_range.longest THEN
            RETURN QUERY EXECUTE format('SELECT e.id FROM dlq.dead_letter_%s e
                WHERE e.closed_at < $1 - $5 AND e.closed_at < $1 - dlq.retention_of($2, e.queue, $3) AND dlq.retention_of($2, e.queue, $3) < $6
                  AND NOT EXISTS (SELECT FROM dlq.restored_partitions h JOIN pg_class c ON c.relname = h.partition_name WHERE c.oid = e.tableoid AND h.until > $1)
                ORDER BY e.id LIMIT $4 FOR UPDATE OF e SKIP LOCKED', v_status)
                USING p_now, p_periods, v_status, p_limit, v_range.shortest, v_range.longest;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.expired_entries IS 'Locks and returns closed entries whose time is over, of queues that keep them for less time than others: the others'' month is not over yet, so these go one by one.';

CREATE OR REPLACE FUNCTION dlq.delete_entries(p_ids uuid[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM dlq.retire(ARRAY(SELECT e.id FROM dlq.dead_letter_queue e WHERE e.id = ANY (p_ids) AND e.status IN ('dlq_resolved', 'dlq_archived')));
    DELETE FROM dlq.dead_letter_queue WHERE id = ANY (p_ids) AND status IN ('dlq_resolved', 'dlq_archived');
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.delete_entries IS 'Deletes closed entries. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.restore_entries(p_rows jsonb, p_until timestamptz, p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_month record;
    v_ids   uuid[];
BEGIN
    FOR v_month IN
        SELECT DISTINCT 'dead_letter_' || substr(r.status::text, 5) AS parent, date_trunc('month', r.closed_at) AS month
        FROM jsonb_populate_recordset(NULL::dlq.dead_letter_queue, p_rows) r
    LOOP
        PERFORM dlq.ensure_partition(('dlq.' || v_month.parent)::regclass, v_month.parent || '_' || to_char(v_month.month, 'YYYYMM'), v_month.month, v_month.month + interval '1 month', 'id');
        INSERT INTO dlq.restored_partitions AS h (partition_name, until) VALUES (v_month.parent || '_' || to_char(v_month.month, 'YYYYMM'), p_until)
        ON CONFLICT (partition_name) DO UPDATE SET until = greatest(h.until, excluded.until);
    END LOOP;
    WITH back AS (
        INSERT INTO dlq.dead_letter_queue
        SELECT r.* FROM jsonb_array_elements(p_rows) j CROSS JOIN LATERAL jsonb_populate_record(NULL::dlq.dead_letter_queue, j || '{"move": {"moved": true}}') r
        WHERE r.status IN ('dlq_resolved', 'dlq_archived') AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = r.id)
        RETURNING id)
    SELECT array_agg(back.id) INTO v_ids FROM back;
    PERFORM dlq.note_on(v_ids, p_actor, 'restored from the archive', p_note);
    RETURN coalesce(cardinality(v_ids), 0);
END
$$;
COMMENT ON FUNCTION dlq.restore_entries IS 'Brings archived entries back, as they were, and keeps their months until p_until. Entries that are there are left alone. Returns how many it brought.';
