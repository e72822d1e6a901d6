-- Retention drops whole partitions. Entries of queues with a shorter period than others are deleted in small batches.
-- If dlqd has an archive (a directory or an object store), it archives the data before it calls these functions.

-- A duty is a row, not a lock: a lock would need a transaction or session that stays open while dlqd writes gigabytes
-- to an object store.
CREATE OR REPLACE FUNCTION dlq.take_duty(p_name text, p_holder uuid, p_for interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO dlq.duties AS d (name, holder, until) VALUES (p_name, p_holder, clock_timestamp() + p_for)
    ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until WHERE d.holder = excluded.holder
        OR d.until < clock_timestamp();
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION dlq.take_duty IS
    'Takes a duty (work that one process does at a time), or renews it, for p_for. Returns false if another '
    'process holds it.';

CREATE OR REPLACE FUNCTION dlq.end_duty(p_name text, p_holder uuid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM dlq.duties d WHERE d.name = p_name AND d.holder = p_holder
$$;
COMMENT ON FUNCTION dlq.end_duty IS
    'Releases a duty (work that one process does at a time, see dlq.take_duty) if p_holder holds it.';

CREATE OR REPLACE FUNCTION dlq.default_partition(p_parent regclass) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.oid::regclass FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = p_parent AND pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT'
$$;
COMMENT ON FUNCTION dlq.default_partition IS 'The default partition of a partitioned table.';

-- ensure_partition locks the parent table against writers. Otherwise a writer could choose the default
-- partition for its row, wait there for a lock, and fail (23514) once the month has a partition.
-- ensure_partition waits for its lock for at most half a second. Applications never wait for
-- ensure_partition, because they write only to the inbox.
CREATE OR REPLACE FUNCTION dlq.ensure_partition(p_parent regclass, p_month timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '500ms' AS $$
DECLARE
    v_month    constant timestamptz := date_trunc('month', p_month);
    v_of_audit constant boolean := p_parent = 'dlq.dead_letter_transitions'::regclass;
    v_trigger  constant text := CASE WHEN v_of_audit THEN 'transitions_append_only' ELSE 'dead_letter_delete' END;
    v_name     text; -- with its schema
BEGIN
    IF p_parent IS NULL OR p_parent NOT IN ('dlq.dead_letter_transitions'::regclass,
        'dlq.dead_letter_resolved'::regclass, 'dlq.dead_letter_failed'::regclass, 'dlq.dead_letter_archived'::regclass)
            THEN
        RAISE EXCEPTION '%: is not partitioned by month', p_parent USING ERRCODE = 'DLQ04',
            HINT = 'dlq.missing_partitions() lists the partitions that are missing.';
    ELSIF NOT dlq.is_owner() AND v_month > now() + interval '1 year' THEN -- plans contain all partitions
        RAISE EXCEPTION '%: cannot create a partition for %', p_parent, p_month USING ERRCODE = 'DLQ04',
            HINT = 'Only the owner of dlqd''s schema can create partitions more than a year ahead.';
    ELSIF v_month IS NULL OR v_month NOT BETWEEN '1970-01-01Z' AND now() + interval '10 years' THEN
        RAISE EXCEPTION '%: cannot create a partition for %', p_parent, p_month USING ERRCODE = 'DLQ04',
            HINT = 'Months are from 1970 to ten years from now.';
    END IF;
    PERFORM dlq.require_everything('partitions');
    SELECT format('%I.%I', n.nspname, c.relname || '_' || to_char(v_month, 'YYYYMM')) INTO v_name FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = p_parent;
    IF to_regclass(v_name) IS NOT NULL THEN -- before waiting for the lock below, which a long transaction may hold
        RETURN true;
    END IF;
    -- One session of all dlqd processes creates partitions at a time.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.ensure_partition', 0));
    IF to_regclass(v_name) IS NOT NULL THEN
        RETURN true;
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (%s))', v_name, p_parent,
        CASE WHEN v_of_audit THEN 'at, id' ELSE 'id' END);
    EXECUTE format('COMMENT ON TABLE %s IS %L', v_name, 'A month of ' || p_parent || ', from ' || v_month || '.');
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', p_parent);
    -- Move the rows of this month that were written before its partition existed. The trigger that
    -- refuses DELETE is disabled for that.
    EXECUTE format('ALTER TABLE %s DISABLE TRIGGER %I', dlq.default_partition(p_parent), v_trigger);
    EXECUTE format('WITH misplaced AS (DELETE FROM %1$s WHERE %2$I >= %3$L AND %2$I < %4$L RETURNING *) INSERT INTO %5$s SELECT * FROM misplaced',
                   dlq.default_partition(p_parent), CASE WHEN v_of_audit THEN 'at' ELSE 'closed_at' END, v_month,
                   v_month + interval '1 month', v_name);
    EXECUTE format('ALTER TABLE %s ENABLE TRIGGER %I', dlq.default_partition(p_parent), v_trigger);
    PERFORM dlq.guard_partition(v_name::regclass, p_parent);
    -- The partition needs its own row-level security, because a GRANT on all tables of the schema includes it.
    PERFORM dlq.fence_table(v_name::regclass, 'dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope())))');
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', p_parent, v_name, v_month,
        v_month + interval '1 month');
    RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RETURN false;
END
$$;
COMMENT ON FUNCTION dlq.ensure_partition IS
    'Creates the partition of one month (in UTC) of the audit trail or of closed entries, if it is missing. '
    'Returns whether it exists: false if another session held the table for more than half a second.';

CREATE OR REPLACE FUNCTION dlq.missing_partitions(p_months integer DEFAULT 2)
    RETURNS TABLE (parent regclass, name text, month timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    SELECT m.parent, m.name, m.month
    FROM (
        SELECT p.parent, n.month, c.relname || '_' || to_char(n.month, 'YYYYMM') AS name, c.relnamespace
        FROM (VALUES ('dlq.dead_letter_transitions'::regclass), ('dlq.dead_letter_resolved'),
            ('dlq.dead_letter_failed'), ('dlq.dead_letter_archived')) p (parent)
        JOIN pg_class c ON c.oid = p.parent
        CROSS JOIN LATERAL (
            SELECT generate_series(date_trunc('month', now()), now() + p_months * interval '1 month',
                interval '1 month') AS month
            -- Months of rows in a default partition get a partition, too.
            UNION SELECT date_trunc('month', d.at) FROM dlq.dead_letter_transitions_default d
            WHERE p.parent = 'dlq.dead_letter_transitions'::regclass
            UNION SELECT date_trunc('month', d.closed_at) FROM dlq.dead_letter_resolved_default d
            WHERE p.parent = 'dlq.dead_letter_resolved'::regclass
            UNION SELECT date_trunc('month', d.closed_at) FROM dlq.dead_letter_failed_default d
            WHERE p.parent = 'dlq.dead_letter_failed'::regclass
            UNION SELECT date_trunc('month', d.closed_at) FROM dlq.dead_letter_archived_default d
            WHERE p.parent = 'dlq.dead_letter_archived'::regclass) n) m
    WHERE NOT EXISTS (SELECT FROM pg_class k WHERE k.relname = m.name AND k.relnamespace = m.relnamespace)
      AND m.month BETWEEN '1970-01-01Z' AND now() + interval '10 years' -- see dlq.ensure_partition
    ORDER BY m.month <> date_trunc('month', now()), m.month, m.name -- this month first: rows are being written to it
$$;
COMMENT ON FUNCTION dlq.missing_partitions IS
    'Months of the audit trail and of closed entries that have no partition: this month, the next p_months, and '
    'those of rows in a default partition.';

CREATE OR REPLACE FUNCTION dlq.partitions_until() RETURNS TABLE (of text, until timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    SELECT substring(c.relname FROM 'dead_letter_([a-z]+)'),
           coalesce(min(m.month) FILTER (WHERE to_regclass(format('%I.%I', n.nspname, c.relname || '_'
               || to_char(m.month, 'YYYYMM'))) IS NULL), max(m.month) + interval '1 month')
    FROM (VALUES ('dlq.dead_letter_transitions'::regclass), ('dlq.dead_letter_resolved'), ('dlq.dead_letter_failed'),
        ('dlq.dead_letter_archived')) p (parent)
    JOIN pg_class c ON c.oid = p.parent JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN generate_series(date_trunc('month', now()), date_trunc('month', now()) + interval '1 year',
        interval '1 month') m (month)
    GROUP BY c.relname
$$;
COMMENT ON FUNCTION dlq.partitions_until IS
    'Until when the audit trail and each table of closed entries have partitions, without a gap from this month '
    'on. Looks a year ahead at most.';

-- One transaction per partition, so that none stays locked while the next is created. A procedure
-- that commits cannot have SET clauses.
CREATE OR REPLACE PROCEDURE dlq.ensure_partitions(p_months integer DEFAULT 2)
LANGUAGE plpgsql AS $$
DECLARE
    v_partition record;
    v_busy      text;
BEGIN
    FOR v_try IN 1 .. 10 LOOP
        v_busy := NULL;
        FOR v_partition IN SELECT * FROM dlq.missing_partitions(p_months) LOOP
            IF NOT dlq.ensure_partition(v_partition.parent, v_partition.month) THEN
                v_busy := v_partition.name;
                EXIT; -- the session that has locked this table may have locked the others, too
            END IF;
            COMMIT;
        END LOOP;
        COMMIT;
        EXIT WHEN v_busy IS NULL;
        -- The pause is random, so that two processes do not collide each time.
        PERFORM pg_catalog.pg_sleep(0.25 + pg_catalog.random() / 2);
        COMMIT;
    END LOOP;
    IF v_busy IS NOT NULL THEN
        RAISE WARNING 'partition % was not created: another session has locked its table', v_busy
            USING HINT = 'dlqd tries again every hour; until then, rows of that month go to the default partition.';
    END IF;
END
$$;
COMMENT ON PROCEDURE dlq.ensure_partitions IS
    'Creates the partitions of this month and the next p_months, each in its own transaction: CALL '
    'dlq.ensure_partitions().';

CREATE OR REPLACE FUNCTION dlq.partition_end(p_partition regclass) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT substring(pg_get_expr(c.relpartbound, c.oid)
        FROM $re$TO \('([^']+)'\)$re$)::timestamptz FROM pg_class c WHERE c.oid = p_partition
$$;
COMMENT ON FUNCTION dlq.partition_end IS
    'The end of a partition''s range, from its bounds in the catalog; null for a default partition.';

CREATE OR REPLACE FUNCTION dlq.closed_months() RETURNS TABLE (stage text, begins_at timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.stage,
           substring(pg_get_expr(c.relpartbound, c.oid) FROM $re$FROM \('([^']+)'\)$re$)::timestamptz AS begins_at
    FROM (VALUES ('resolved', 'dlq.dead_letter_resolved'::regclass), ('failed', 'dlq.dead_letter_failed'),
        ('archived', 'dlq.dead_letter_archived')) s (stage, parent)
    JOIN pg_inherits i ON i.inhparent = s.parent
    JOIN pg_class c ON c.oid = i.inhrelid
    WHERE dlq.partition_end(c.oid) IS NOT NULL
    ORDER BY begins_at DESC
$$;
COMMENT ON FUNCTION dlq.closed_months IS 'The months of closed entries that have a partition, newest first.';

CREATE OR REPLACE FUNCTION dlq.retention_of(p_periods jsonb, p_queue text, p_status text) RETURNS interval
LANGUAGE sql STABLE
RETURN coalesce(p_periods -> 'queues' -> p_queue ->> p_status, p_periods -> 'defaults' ->> p_status)::interval;
COMMENT ON FUNCTION dlq.retention_of IS
    'How long an entry of a queue is kept after it closed as resolved, failed or archived: the queue''s period, '
    'or the default.';

CREATE OR REPLACE FUNCTION dlq.retention_range(p_periods jsonb, p_status text, OUT shortest interval,
    OUT longest interval)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(p.period), max(p.period) FROM (
        SELECT (p_periods -> 'defaults' ->> p_status)::interval AS period
        UNION ALL
        SELECT (q.value ->> p_status)::interval FROM jsonb_each(coalesce(p_periods -> 'queues', '{}')) q) p
$$;
COMMENT ON FUNCTION dlq.retention_range IS 'The shortest and the longest retention period of any queue.';

CREATE OR REPLACE FUNCTION dlq.age_out(p_periods jsonb, p_limit integer DEFAULT 1000, p_now timestamptz DEFAULT now())
    RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_ids uuid[];
BEGIN
    v_ids := ARRAY(
        SELECT e.id FROM dlq.dead_letter_failed e
        WHERE e.closed_at < p_now - (SELECT r.shortest FROM dlq.retention_range(p_periods, 'failed') r)
            AND e.closed_at < p_now - dlq.retention_of(p_periods, e.queue, 'failed')
        ORDER BY e.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    UPDATE dlq.dead_letter_queue SET status = 'dlq_archived', move = '{"actor": "retention", "reason": "aged out"}'
    WHERE id = ANY (v_ids) AND status = 'dlq_failed';
    RETURN cardinality(v_ids);
END
$$;
COMMENT ON FUNCTION dlq.age_out IS
    'Moves up to p_limit failed entries whose period is over to dlq_archived, where a new period begins. '
    'p_periods: {"defaults": {"resolved": "30 days", "failed": "90 days", "archived": "365 days"}, "queues": '
    '{"payments": {...}}}. Returns how many.';

-- Dropping a partition locks the whole table, and all sessions that use the table queue behind the
-- lock. The function therefore waits for at most a tenth of a second, and fails with 55P03; dlqd
-- tries again later.
CREATE OR REPLACE FUNCTION dlq.drop_empty_month(p_periods jsonb, p_now timestamptz DEFAULT now()) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '100ms' AS $$
DECLARE
    v_month regclass;
    v_name  text;
    v_empty boolean;
BEGIN
    FOR v_month IN
        SELECT i.inhrelid FROM pg_inherits i
        WHERE i.inhparent = 'dlq.dead_letter_failed'::regclass AND dlq.partition_end(i.inhrelid) <= p_now -
            (SELECT r.longest FROM dlq.retention_range(p_periods, 'failed') r)
    LOOP
        EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', v_month) INTO v_empty;
        CONTINUE WHEN NOT v_empty;
        EXECUTE format('LOCK TABLE %s IN SHARE MODE', v_month);
        EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', v_month) INTO v_empty;
        IF v_empty THEN
            v_name := v_month;
            EXECUTE format('DROP TABLE %s', v_month);
            PERFORM dlq.record_act('partition ' || (SELECT substring(v_name FROM '[^.]+$')), 'dropped', 'retention',
                'it was empty');
            RETURN v_name;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.drop_empty_month IS
    'Drops one month of failed entries that is over and empty. Returns its name; null if there is none.';

-- A month is dropped as a whole, once its end is older than the longest period of any queue. So an entry may stay up to
-- a month longer than its period.
CREATE OR REPLACE FUNCTION dlq.expired_partitions(p_periods jsonb, p_audit interval, p_now timestamptz DEFAULT now())
RETURNS TABLE (partition_name text, of_audit boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    SELECT c.relname::text, p.of_audit
    FROM (VALUES ('dlq.dead_letter_resolved'::regclass, false,
        (SELECT r.longest FROM dlq.retention_range(p_periods, 'resolved') r)),
                 ('dlq.dead_letter_archived', false,
                     (SELECT r.longest FROM dlq.retention_range(p_periods, 'archived') r)),
                 ('dlq.dead_letter_transitions', true, p_audit)) p (parent, of_audit, period)
    JOIN pg_inherits i ON i.inhparent = p.parent JOIN pg_class c ON c.oid = i.inhrelid
    WHERE dlq.partition_end(c.oid) <= p_now - p.period
      AND NOT EXISTS (SELECT FROM dlq.restored_partitions h WHERE h.partition_name = c.relname AND h.until > p_now)
    ORDER BY p.of_audit, c.relname
$$;
COMMENT ON FUNCTION dlq.expired_partitions IS
    'Partitions whose retention is over: months of resolved and archived entries, and of the audit trail.';

CREATE OR REPLACE FUNCTION dlq.note_archived(p_partition text, p_rows bigint, p_hash numeric, p_archive text)
    RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO dlq.archived_partitions AS a (partition_name, rows, hash, archive)
    VALUES (p_partition, p_rows, p_hash, p_archive)
    ON CONFLICT (partition_name) DO UPDATE SET rows = excluded.rows, hash = excluded.hash, archive = excluded.archive,
    at = now()
$$;
COMMENT ON FUNCTION dlq.note_archived IS 'Records that a month is in the archive in its current state.';

-- With p_rows and p_hash, drop_partition drops only archived data: it refuses a partition in which a row was added or
-- changed since it was archived; the next run archives that row. Failures of jobs that River still has are recorded
-- first (dlq.retire), so that the reconciler does not file them again.
--
-- The owner of the schema, which is dlqd's role, may drop any month. A dlq_admin may drop only months that retention
-- would drop: the period is over by the current policy, and dlqd has archived the month.
CREATE OR REPLACE FUNCTION dlq.drop_partition(p_partition text, p_rows bigint DEFAULT NULL, p_hash numeric DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '100ms'
SET row_security = off AS $$
DECLARE
    v_partition regclass := (
        SELECT c.oid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE c.relname = p_partition AND i.inhparent IN ('dlq.dead_letter_resolved'::regclass,
            'dlq.dead_letter_archived'::regclass, 'dlq.dead_letter_transitions'::regclass)
          AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT');
    v_of_audit  boolean := EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = v_partition
        AND i.inhparent = 'dlq.dead_letter_transitions'::regclass);
    v_policy    jsonb := (SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'retention');
    v_archived  dlq.archived_partitions;
    v_rows      bigint;
    v_hash      numeric;
BEGIN
    PERFORM dlq.require_everything('drop a partition');
    IF v_partition IS NULL THEN
        RAISE EXCEPTION '%: there is no such month of closed entries or of the audit trail', p_partition
            USING ERRCODE = 'DLQ02';
    END IF;
    SELECT * INTO v_archived FROM dlq.archived_partitions a WHERE a.partition_name = p_partition;
    IF NOT dlq.is_owner() THEN
        IF NOT EXISTS (SELECT FROM dlq.expired_partitions(v_policy -> 'periods', (v_policy ->> 'audit')::interval) e
            WHERE e.partition_name = p_partition) THEN
            RAISE EXCEPTION 'partition %: its retention has not expired', p_partition USING ERRCODE = 'DLQ01',
                HINT = 'The policy sets the retention of entries and of the audit trail.';
        ELSIF v_archived IS NULL THEN
            RAISE EXCEPTION 'partition %: it has not been archived', p_partition USING ERRCODE = 'DLQ01',
                HINT = 'dlqd archives and drops an expired month within an hour, or logs why it cannot.';
        END IF;
        p_rows := v_archived.rows;
        p_hash := v_archived.hash;
    END IF;
    IF p_rows IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN SHARE MODE', v_partition);
        EXECUTE format('SELECT count(*), coalesce(sum(hashtextextended(r::text, 0)), 0) FROM %s r',
            v_partition) INTO v_rows, v_hash;
        IF (v_rows, v_hash) IS DISTINCT FROM (p_rows, p_hash) THEN
            RAISE EXCEPTION 'partition % has changed since it was archived', p_partition USING ERRCODE = 'DLQ01';
        END IF;
    END IF;
    IF NOT v_of_audit THEN
        PERFORM dlq.retire(NULL, v_partition);
        IF p_rows IS NULL THEN
            EXECUTE format('SELECT dlq.erase_trail(array_agg(e.id), least(dlq.closed_since(array_agg(e.id)), min(e.created_at) - interval ''1 hour'')) FROM %s e WHERE e.edited_event IS NOT NULL HAVING count(*) > 0', v_partition);
        END IF;
    END IF;
    EXECUTE format('DROP TABLE %s', v_partition);
    DELETE FROM dlq.restored_partitions h WHERE h.partition_name = p_partition;
    DELETE FROM dlq.archived_partitions a WHERE a.partition_name = p_partition;
    PERFORM dlq.record_act('partition ' || p_partition, 'dropped', p_actor, p_note,
        jsonb_build_object('rows', p_rows, 'archive', v_archived.archive));
END
$$;
COMMENT ON FUNCTION dlq.drop_partition IS
    'Drops a month of closed entries or of the audit trail, if it still holds what was archived: p_rows rows, '
    'with the sum p_hash of hashtextextended(row::text, 0). The owner of the schema may leave both out, to drop '
    'the month in any case. For other callers they are what dlqd recorded of the archive, and the month''s '
    'period must be over. Writes an audit row. Fails after a tenth of a second (55P03) if another session uses '
    'the table.';

CREATE OR REPLACE FUNCTION dlq.expired_entries(p_periods jsonb, p_limit integer DEFAULT 1000,
    p_now timestamptz DEFAULT now()) RETURNS SETOF uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_status text;
    v_range  record;
BEGIN
    FOREACH v_status IN ARRAY ARRAY['resolved', 'archived'] LOOP
        SELECT * INTO v_range FROM dlq.retention_range(p_periods, v_status);
        IF v_range.shortest < v_range.longest THEN
            RETURN QUERY EXECUTE format('SELECT e.id FROM dlq.dead_letter_%s e
                WHERE e.closed_at < $1 - $5 AND e.closed_at < $1 - dlq.retention_of($2, e.queue, $3)
                  AND dlq.retention_of($2, e.queue, $3) < $6
                  AND NOT EXISTS (
                      SELECT FROM dlq.restored_partitions h JOIN pg_class c ON c.relname = h.partition_name
                      WHERE c.oid = e.tableoid AND h.until > $1)
                ORDER BY e.id LIMIT $4 FOR UPDATE OF e SKIP LOCKED', v_status)
                USING p_now, p_periods, v_status, p_limit, v_range.shortest, v_range.longest;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.expired_entries IS
    'Locks and returns closed entries whose period is over, of queues that keep entries for less time than '
    'others. Their month is not over for the other queues, so these entries are deleted one by one.';

-- delete_entries first records the failures of jobs that River still has, so that the reconciler
-- does not file them again. It erases edited payloads, assignees and tags in the audit trail,
-- unless the entry is in the archive: a later erasure of a person's data finds these payloads only
-- by their entry.
CREATE OR REPLACE FUNCTION dlq.delete_entries(p_ids uuid[], p_hashes bigint[] DEFAULT NULL,
    p_actor text DEFAULT session_user, p_reason text DEFAULT 'deleted', p_note text DEFAULT NULL,
    p_operation uuid DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan SET row_security = off
SET timezone = 'UTC' AS $$
DECLARE
    v_since timestamptz := dlq.closed_since(p_ids);
    v_ids   uuid[] := dlq.ids_in_scope(p_ids);
BEGIN
    PERFORM dlq.require_approval_to('purge', '{}', jsonb_build_object('ids', to_jsonb(p_ids)), false);
    v_ids := ARRAY(
        SELECT e.id FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_resolved', 'dlq_archived')
            AND e.closed_at >= v_since
          AND (p_hashes IS NULL OR hashtextextended(e::text, 0) = p_hashes[array_position(p_ids, e.id)])
        ORDER BY e.id FOR UPDATE);
    PERFORM dlq.retire(v_ids);
    PERFORM dlq.note_on(v_ids, p_actor, p_reason, p_note, '{resolved,archived}', p_operation);
    IF p_hashes IS NULL OR NOT dlq.is_owner() THEN -- only dlqd knows what is in the archive
        PERFORM dlq.erase_trail(v_ids, v_since);
    END IF;
    DELETE FROM dlq.dead_letter_queue e WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_resolved', 'dlq_archived')
        AND e.closed_at >= v_since;
    RETURN cardinality(v_ids);
END
$$;
COMMENT ON FUNCTION dlq.delete_entries IS
    'Deletes closed entries; an audit row for each remains. p_hashes: hashtextextended(row::text, 0) of each as '
    'archived; an entry that has changed since is kept. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.restore_entries(p_rows jsonb, p_until timestamptz, p_actor text DEFAULT session_user,
    p_note text DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_month record;
    v_ids   uuid[];
    v_since timestamptz := dlq.closed_since(ARRAY(SELECT (j ->> 'id')::uuid FROM jsonb_array_elements(p_rows) j));
BEGIN
    PERFORM dlq.require_everything('restore');
    FOR v_month IN
        SELECT DISTINCT 'dead_letter_' || substr(r.status::text, 5) AS parent, date_trunc('month', r.closed_at) AS month
        FROM jsonb_populate_recordset(NULL::dlq.dead_letter_queue, p_rows) r
    LOOP
        PERFORM dlq.ensure_partition(('dlq.' || v_month.parent)::regclass, v_month.month);
        INSERT INTO dlq.restored_partitions AS h (partition_name, until)
        VALUES (v_month.parent || '_' || to_char(v_month.month, 'YYYYMM'), p_until)
        ON CONFLICT (partition_name) DO UPDATE SET until = greatest(h.until, excluded.until);
    END LOOP;
    SELECT array_agg((j ->> 'id')::uuid) INTO v_ids FROM jsonb_array_elements(p_rows) j
    WHERE j ->> 'status' IN ('dlq_resolved', 'dlq_archived')
      AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = (j ->> 'id')::uuid
          AND (e.closed_at IS NULL OR e.closed_at >= v_since));
    -- The audit rows are part of the same statement, because dlq.on_insert requires them.
    WITH audited AS (
        INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, reason, note, strategy, rule,
            river_job_id, queue, kind, error_class, from_class, config_version, origin)
        SELECT r.id, r.status, r.status, dlq.actor(p_actor), 'restored from the archive', p_note, r.strategy, r.rule,
            r.river_job_id, r.queue, r.kind, r.error_class, r.error_class,
            coalesce(dlq.policy_version(), r.config_version), dlq.origin(dlq.actor(p_actor), p_actor)
        FROM jsonb_populate_recordset(NULL::dlq.dead_letter_queue, p_rows) r WHERE r.id = ANY (v_ids)
    )
    INSERT INTO dlq.dead_letter_queue
    SELECT r.* FROM jsonb_array_elements(p_rows) j
    CROSS JOIN LATERAL jsonb_populate_record(NULL::dlq.dead_letter_queue,
        j || jsonb_build_object('move', '{"moved": true}'::jsonb, 'stage', substr(j ->> 'status', 5))) r
    WHERE r.id = ANY (v_ids);
    RETURN coalesce(cardinality(v_ids), 0);
END
$$;
COMMENT ON FUNCTION dlq.restore_entries IS
    'Restores archived entries unchanged, and keeps their months until p_until. Entries that still exist are '
    'skipped. Returns how many it restored.';

-- forget_old deletes records whose number grows with activity rather than with the number of entries. p_limit limits
-- each DELETE from a table that may be large.
CREATE OR REPLACE FUNCTION dlq.forget_old(p_limit integer DEFAULT 10000, p_now timestamptz DEFAULT now())
    RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count integer;
    v_most  integer; -- the largest count of one table: if it is p_limit, there may be more to delete
    v_runs  uuid[] := ARRAY(SELECT r.id FROM dlq.replay_runs r WHERE r.status IN ('completed', 'cancelled', 'stopped')
        AND r.finished_at < p_now - interval '400 days' ORDER BY r.id LIMIT 1000);
BEGIN
    DELETE FROM dlq.replay_run_entries e
    WHERE (e.run_id, e.entry_id) IN (SELECT d.run_id, d.entry_id FROM dlq.replay_run_entries d
        WHERE d.run_id = ANY (v_runs) LIMIT p_limit);
    GET DIAGNOSTICS v_most = ROW_COUNT;
    DELETE FROM dlq.replay_runs r WHERE r.id = ANY (v_runs) AND NOT EXISTS (SELECT FROM dlq.replay_run_entries e
        WHERE e.run_id = r.id);
    DELETE FROM dlq.circuit_breaker_changes c WHERE c.id IN (SELECT d.id FROM dlq.circuit_breaker_changes d
        WHERE d.at < p_now - interval '1100 days' ORDER BY d.id LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    DELETE FROM dlq.approval_entries e
    WHERE (e.approval_id, e.entry_id) IN (SELECT d.approval_id, d.entry_id FROM dlq.approvals a
        JOIN dlq.approval_entries d ON d.approval_id = a.id WHERE a.ended_at < p_now - interval '400 days'
        LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    DELETE FROM dlq.approvals a WHERE a.ended_at < p_now - interval '400 days'
        AND NOT EXISTS (SELECT FROM dlq.approval_entries e WHERE e.approval_id = a.id);
    DELETE FROM dlq.operation_unchanged u
    WHERE (u.operation_id, u.entry_id) IN (SELECT d.operation_id, d.entry_id FROM dlq.operations o
        JOIN dlq.operation_unchanged d ON d.operation_id = o.id WHERE o.last_at < p_now - interval '400 days'
        LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    PERFORM set_config('dlq.recording', txid_current()::text, true); -- dlq.on_operation allows the deletion
    DELETE FROM dlq.operations o
    WHERE o.id IN (SELECT d.id FROM dlq.operations d WHERE d.last_at < p_now - interval '400 days'
        AND NOT EXISTS (SELECT FROM dlq.operation_unchanged u WHERE u.operation_id = d.id) ORDER BY d.id LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    PERFORM set_config('dlq.recording', '', true);
    -- Unused gates and paces can be deleted: a new row begins with the first use.
    DELETE FROM dlq.gates g WHERE greatest(g.started_at, g.until) < p_now - interval '30 days';
    DELETE FROM dlq.paces p WHERE p.free_at < p_now - interval '1 day';
    DELETE FROM dlq.reviews r WHERE r.at < p_now - interval '1 hour';
    DELETE FROM dlq.reconcile_findings f WHERE f.hour < p_now - interval '1100 days';
    RETURN v_most;
END
$$;
COMMENT ON FUNCTION dlq.forget_old IS
    'Deletes, up to p_limit rows of each: replay runs, approvals and operations (dlq.operations) 400 days after '
    'they ended, and changes of circuit breakers after 1,100 days. Also deletes findings of the reconciler '
    'after 1,100 days, unused gates and paces, and reviews that have ended. Returns the largest count of one '
    'table: p_limit if there may be more.';

CREATE OR REPLACE FUNCTION dlq.refuse_recent() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM gone g WHERE g.at > now() - interval '1100 days') THEN
        RAISE EXCEPTION 'DELETE on %.% is not allowed: the audit trail is append-only', TG_TABLE_SCHEMA, TG_TABLE_NAME
            USING ERRCODE = 'DLQ01';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.refuse_recent IS
    'Trigger: rejects the deletion of rows of an audit trail that are younger than 1,100 days.';
DROP TRIGGER IF EXISTS changes_kept ON dlq.circuit_breaker_changes;
CREATE TRIGGER changes_kept AFTER DELETE ON dlq.circuit_breaker_changes REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION dlq.refuse_recent();
COMMENT ON TRIGGER changes_kept ON dlq.circuit_breaker_changes IS 'Changes are kept for 1,100 days.';
