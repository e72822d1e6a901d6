-- Work that a replay run need not repeat, because a later job has done it or another run will do it.

CREATE OR REPLACE FUNCTION dlq.has_job_index(p_column text, p_method text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
RETURN EXISTS (
    SELECT FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    JOIN pg_am m ON m.oid = c.relam
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = dlq.job_table() AND i.indisvalid AND i.indpred IS NULL AND m.amname = p_method
        AND a.attname = p_column);
COMMENT ON FUNCTION dlq.has_job_index IS
    'Whether river_job has a valid index of a method (btree, gin) that begins with a column.';

-- Metadata may be rewritten, so the marker of a redelivery may be missing. run_again marks the copy of a job with
-- dlq:copied: true, or "copy" if the copied job is itself a copy.
CREATE OR REPLACE FUNCTION dlq.repeats_work(p_job bigint, p_created_at timestamptz, p_metadata jsonb, p_entry uuid)
    RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
RETURN p_metadata ? 'dlq:entry_id'
    OR p_metadata ? 'dlq:run_again' AND p_metadata -> 'dlq:copied' IS DISTINCT FROM 'true'
    OR EXISTS (SELECT FROM dlq.entry_jobs m WHERE m.job_id = p_job AND m.job_created_at = p_created_at
        AND m.entry_id = p_entry)
    OR dlq.has_open_entry(p_job, p_created_at);
COMMENT ON FUNCTION dlq.repeats_work IS
    'Whether a completed job has not done later work than an entry: it redelivers an entry, is a copy that '
    'dlq.run_again made, is a job of the entry itself, or has an open entry again.';

-- superseded looks for a job that was inserted later and has completed, and that has the entry's unique key, its
-- ordering key, or its kind and equal args (for a message: an equal payload). Redeliveries and copies do not count
-- (dlq.repeats_work); the original job of a resolved entry does.
--
-- No lookup reads the whole table. Equal args are found by River's GIN index on args. Args without any value would
-- read all of that index; in this case the jobs of the kind are compared, if there are at most 1000. The caller sets
-- statement_timeout: the lookup that exceeds it, and the lookups after it, have no result (known is false).
CREATE OR REPLACE FUNCTION dlq.superseded(p_ids uuid[])
RETURNS TABLE (entry_id uuid, known boolean, job_id bigint, same text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    v_entry   record;
    v_gin     constant boolean := dlq.has_job_index('args', 'gin');
    v_btree   constant boolean := dlq.has_job_index('kind', 'btree');
    v_late    boolean := false; -- whether statement_timeout has been used up
    v_known   boolean;
    v_job     bigint;
    v_by      text;
    v_message boolean;
    v_work    jsonb;  -- args or payload that an equal job must have
    v_jobs    bigint; -- number of jobs of the kind
BEGIN
    FOR v_entry IN
        SELECT e.id, e.river_job_id, e.job_created_at, e.job_kind, e.kind, e.queue, e.ordering_key, e.unique_key,
            CASE WHEN pg_column_size(e.original_event) <= 8192 THEN e.original_event END AS args
        FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
            AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
    LOOP
        v_known := NOT v_late AND v_entry.river_job_id > 0; -- later work on a record is done outside dlqd
        v_job := NULL;
        BEGIN
            IF v_known AND v_entry.unique_key IS NOT NULL THEN
                v_by := 'unique key';
                SELECT j.id INTO v_job FROM river.river_job j
                WHERE j.unique_key = v_entry.unique_key AND j.unique_key IS NOT NULL AND j.unique_states IS NOT NULL
                    AND river.river_job_state_in_bitmask(j.unique_states, j.state) AND j.state = 'completed'
                    AND j.id > v_entry.river_job_id AND j.created_at >= v_entry.job_created_at
                    AND NOT dlq.repeats_work(j.id, j.created_at, j.metadata, v_entry.id);
            END IF;
            IF v_known AND v_job IS NULL AND v_entry.ordering_key IS NOT NULL THEN
                v_by := 'ordering key';
                v_known := v_gin;
                IF v_gin THEN
                    SELECT j.id INTO v_job
                    FROM (SELECT o.id, o.kind, o.queue, o.state, o.created_at, o.metadata FROM river.river_job o
                          WHERE o.args @> jsonb_build_object('orderingKey', v_entry.ordering_key) OFFSET 0) j
                    WHERE j.state = 'completed' AND j.kind = 'dlqd_message' AND j.queue = v_entry.queue
                        AND j.id > v_entry.river_job_id AND j.created_at >= v_entry.job_created_at
                        AND NOT dlq.repeats_work(j.id, j.created_at, j.metadata, v_entry.id)
                    ORDER BY j.id LIMIT 1;
                END IF;
            END IF;
            IF v_known AND v_job IS NULL THEN
                v_message := v_entry.job_kind = 'dlqd_message';
                v_by := CASE WHEN v_message THEN 'payload' ELSE 'args' END;
                v_work := CASE WHEN v_message THEN v_entry.args -> 'payload' ELSE v_entry.args END;
                IF v_work IS NULL THEN
                    v_known := false; -- the payload is too large to compare
                ELSIF jsonb_path_exists(v_work, '$.** ? (@.type() != "object" && @.type() != "array")') THEN
                    v_known := v_gin;
                    IF v_gin THEN
                        SELECT j.id INTO v_job
                        FROM (SELECT o.id, o.kind, o.queue, o.state, o.created_at, o.metadata, o.args
                              FROM river.river_job o
                              WHERE o.args @> CASE WHEN v_message
                                  THEN jsonb_build_object('kind', v_entry.kind, 'payload', v_work)
                                  ELSE v_work END OFFSET 0) j
                        WHERE j.state = 'completed' AND j.kind = v_entry.job_kind AND j.id > v_entry.river_job_id
                            AND j.created_at >= v_entry.job_created_at
                            AND NOT dlq.repeats_work(j.id, j.created_at, j.metadata, v_entry.id)
                            AND CASE WHEN v_message THEN j.args -> 'payload' = v_work AND j.queue = v_entry.queue
                                ELSE j.args = v_work END
                        ORDER BY j.id LIMIT 1;
                    END IF;
                ELSE
                    v_known := v_btree;
                    IF v_btree THEN
                        SELECT count(*), min(j.id) FILTER (WHERE j.state = 'completed' AND j.id > v_entry.river_job_id
                            AND j.created_at >= v_entry.job_created_at
                            AND NOT dlq.repeats_work(j.id, j.created_at, j.metadata, v_entry.id)
                            AND CASE WHEN v_message THEN j.args ->> 'kind' = v_entry.kind
                                AND j.args -> 'payload' = v_work AND j.queue = v_entry.queue
                                ELSE j.args = v_work END) INTO v_jobs, v_job
                        FROM (SELECT o.id, o.queue, o.state, o.created_at, o.metadata, o.args FROM river.river_job o
                              WHERE o.kind = v_entry.job_kind LIMIT 1001) j;
                        v_known := v_job IS NOT NULL OR v_jobs <= 1000;
                    END IF;
                END IF;
            END IF;
        EXCEPTION WHEN query_canceled THEN
            v_late := true;
            v_known := false;
            v_job := NULL;
        END;
        entry_id := v_entry.id;
        known := v_known;
        job_id := v_job;
        same := CASE WHEN v_job IS NOT NULL THEN v_by END;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.superseded IS
    'For each of the given entries, the later job that has done its work (job_id) with the same unique key, ordering '
    'key, args or payload (same), among the jobs that River still keeps. known is false if River''s table has no '
    'index for the lookup, the args are larger than 8 KiB, more than 1,000 jobs of the kind would have to be '
    'compared, the statement''s time is used up, or the entry is a record of a topic.';

-- unworked_kinds reads the last 1,000 completed jobs by River's index on state and finalized_at.
CREATE OR REPLACE FUNCTION dlq.unworked_kinds(p_ids uuid[]) RETURNS TABLE (kind text, unknown bigint, entries bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
    WITH attempts AS MATERIALIZED (
        SELECT e.job_kind AS kind, e.last_failed_at AS at,
               coalesce(e.rule = 'unknown-job-kind', false)
                   OR coalesce(e.error_message LIKE '%job kind is not registered%', false) AS unknown
        FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
            AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
    ), kinds AS MATERIALIZED (
        SELECT a.kind, count(*) FILTER (WHERE a.unknown) AS unknown, count(*) AS entries, max(a.at) AS at,
               (array_agg(a.unknown ORDER BY a.at DESC, a.unknown))[1] AS last
        FROM attempts a GROUP BY a.kind
    ), completed AS MATERIALIZED (
        SELECT j.kind, max(j.finalized_at) AS at
        FROM (SELECT o.kind, o.finalized_at FROM river.river_job o
              WHERE o.state = 'completed' AND o.finalized_at IS NOT NULL
              ORDER BY o.finalized_at DESC LIMIT 1000) j
        GROUP BY j.kind
    )
    SELECT k.kind, k.unknown, k.entries FROM kinds k
    WHERE k.last AND NOT EXISTS (SELECT FROM completed c WHERE c.kind = k.kind AND c.at > k.at)
    ORDER BY k.unknown DESC, k.kind
$$;
COMMENT ON FUNCTION dlq.unworked_kinds IS
    'Of the kinds of the given entries, those that no worker seems to know: the latest attempt failed because the kind '
    'is not registered, and none of the last 1,000 completed jobs of the kind ended after it. unknown is the number of '
    'the entries with that error.';
