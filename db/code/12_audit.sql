-- The audit trail as people search it, and erasure of somebody's data, with a record that it was done.

CREATE OR REPLACE FUNCTION dlq.audit(p_filter jsonb DEFAULT '{}', p_limit integer DEFAULT 100, p_before bigint DEFAULT NULL)
RETURNS TABLE (id bigint, at timestamptz, actor text, db_user text, origin text, entry_id uuid, from_status dlq.dead_letter_status, to_status dlq.dead_letter_status,
               reason text, note text, queue text, kind text, error_class text, river_job_id bigint, config_version text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_key   text;
    v_where text := 'true';
BEGIN
    -- As in dlq.filter_where, values are read from the parameter $1 and never put into the text.
    FOR v_key IN SELECT jsonb_object_keys(p_filter) LOOP
        v_where := v_where || ' AND ' || CASE v_key
            WHEN 'actor'         THEN 't.actor = $1 ->> ''actor''' || CASE WHEN dlq.origin(p_filter ->> 'actor') IS NULL THEN '' ELSE ' AND t.origin IS NOT NULL' END
            WHEN 'people'        THEN CASE WHEN (p_filter ->> 'people')::boolean THEN 't.origin IS NOT NULL' ELSE 'true' END
            WHEN 'dbUser'        THEN 't.db_user = $1 ->> ''dbUser'''
            WHEN 'origin'        THEN 'position($1 ->> ''origin'' IN t.origin) > 0'
            WHEN 'entryId'       THEN 't.entry_id = ($1 ->> ''entryId'')::uuid'
            WHEN 'queue'         THEN 't.queue = $1 ->> ''queue'''
            WHEN 'kind'          THEN 't.kind = $1 ->> ''kind'''
            WHEN 'from'          THEN 't.from_status = ($1 ->> ''from'')::dlq.dead_letter_status'
            WHEN 'to'            THEN 't.to_status = ($1 ->> ''to'')::dlq.dead_letter_status'
            WHEN 'text'          THEN '(position(lower($1 ->> ''text'') IN lower(t.note)) > 0 OR position(lower($1 ->> ''text'') IN lower(t.reason)) > 0)'
            WHEN 'configVersion' THEN 't.config_version = $1 ->> ''configVersion'''
            WHEN 'after'         THEN 't.at >= ($1 ->> ''after'')::timestamptz'
            WHEN 'before'        THEN 't.at < ($1 ->> ''before'')::timestamptz'
        END;
        IF v_where IS NULL THEN
            RAISE EXCEPTION 'audit: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'There are actor, people, dbUser, origin, entryId, queue, kind, from, to, text, configVersion, after and before.';
        END IF;
    END LOOP;
    RETURN QUERY EXECUTE
        'SELECT t.id, t.at, t.actor, t.db_user, t.origin, t.entry_id, t.from_status, t.to_status, t.reason, t.note, t.queue, t.kind, t.error_class, t.river_job_id, t.config_version
         FROM dlq.dead_letter_transitions t WHERE ' || v_where || CASE WHEN p_before IS NULL THEN '' ELSE ' AND t.id < $3' END || ' ORDER BY t.id DESC LIMIT $2'
        USING p_filter, p_limit, p_before;
EXCEPTION WHEN invalid_text_representation OR datetime_field_overflow OR invalid_datetime_format THEN
    RAISE EXCEPTION 'audit: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.audit IS 'Who did what to which entry, when, from where and why, the latest first; before the move p_before, for the next page. Filter: {"actor": "kim", "people": true (not what dlqd does by itself), "dbUser", "origin" (a part of it), "entryId", "queue", "kind", "from", "to" (states), "text" (in reason or note), "configVersion", "after", "before"}.';

-- What is left of an entry whose data was erased: that it failed, when, how, and what became of it.
CREATE OR REPLACE FUNCTION dlq.erased(p_entry dlq.dead_letter_queue) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    p_entry.original_event := '{"erased": true}';
    p_entry.edited_event := NULL;
    p_entry.error_message := 'erased';
    p_entry.error_stack_trace := NULL;
    p_entry.error_context := NULL;
    p_entry.retry_history := '[]';
    p_entry.replay_attempts := coalesce((SELECT jsonb_agg(a - 'error') FROM jsonb_array_elements(p_entry.replay_attempts) a), '[]');
    p_entry.metadata := '{}';
    p_entry.subscriber_id := NULL;
    p_entry.ordering_key := NULL;
    p_entry.unique_key := NULL;
    p_entry.tags := '{}';
    p_entry.notes := NULL;
    p_entry.resolution_notes := NULL;
    RETURN p_entry;
END
$$;
COMMENT ON FUNCTION dlq.erased IS 'An entry without payload, error texts, metadata, subscriber, ordering key, tags and notes.';

CREATE OR REPLACE FUNCTION dlq.erase_rows(p_rows jsonb, p_filter jsonb) RETURNS TABLE (id uuid, line text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    RETURN QUERY EXECUTE
        'SELECT e.id, to_jsonb(dlq.erased(e))::text FROM jsonb_populate_recordset(NULL::dlq.dead_letter_queue, $2) e WHERE ' || dlq.filter_where(p_filter)
        USING p_filter, p_rows;
END
$$;
COMMENT ON FUNCTION dlq.erase_rows IS 'Of entries as the archive has them, those that a filter chooses, erased.';

-- erase_entries erases entries in id order. Open and failed ones are archived: there is nothing left to redeliver.
CREATE OR REPLACE FUNCTION dlq.erase_entries(p_ids uuid[], p_actor text, p_note text, OUT entries integer, OUT jobs integer, OUT under_way integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET row_security = off AS $$
DECLARE
    v_ids  uuid[];
    v_jobs bigint[];
BEGIN
    PERFORM dlq.file(p_ids);
    SELECT array_agg(e.id) FILTER (WHERE e.status <> 'dlq_processing'), count(*) FILTER (WHERE e.status = 'dlq_processing') INTO v_ids, under_way
    FROM (SELECT l.id, l.status FROM dlq.dead_letter_queue l WHERE l.id = ANY (p_ids) ORDER BY l.id FOR UPDATE) e;
    UPDATE dlq.dead_letter_queue SET status = 'dlq_archived', resolution_strategy = 'discard', resolved_by = p_actor,
        move = jsonb_build_object('actor', p_actor, 'reason', 'discarded, to be erased', 'note', p_note)
    WHERE id = ANY (v_ids) AND status IN ('dlq_pending', 'dlq_manual', 'dlq_failed');
    UPDATE dlq.dead_letter_queue e SET
        original_event = x.original_event, edited_event = x.edited_event, error_message = x.error_message, error_stack_trace = x.error_stack_trace,
        error_context = x.error_context, retry_history = x.retry_history, replay_attempts = x.replay_attempts, metadata = x.metadata,
        subscriber_id = x.subscriber_id, ordering_key = x.ordering_key, unique_key = x.unique_key, tags = x.tags, notes = x.notes, resolution_notes = x.resolution_notes
    FROM (SELECT d.id AS entry, (dlq.erased(d)).* FROM dlq.dead_letter_queue d WHERE d.id = ANY (v_ids)) x
    WHERE e.id = x.entry AND e.status IN ('dlq_resolved', 'dlq_archived');
    GET DIAGNOSTICS entries = ROW_COUNT;

    UPDATE dlq.dead_letter_transitions t SET detail = '{"erased": true}' WHERE t.entry_id = ANY (v_ids) AND t.detail IS NOT NULL;
    UPDATE dlq.replay_run_entries r SET detail = NULL WHERE r.entry_id = ANY (v_ids) AND r.detail IS NOT NULL;
    -- The title of a failure group may be what one of these said.
    UPDATE dlq.failure_groups g SET title = g.error_type
    FROM (SELECT DISTINCT d.queue, d.fingerprint FROM dlq.dead_letter_queue d WHERE d.id = ANY (v_ids)) d
    WHERE g.queue = d.queue AND g.fingerprint = d.fingerprint;
    -- River keeps the jobs for a while: the first, and each redelivery.
    v_jobs := ARRAY(SELECT DISTINCT t.river_job_id FROM dlq.dead_letter_transitions t WHERE t.entry_id = ANY (v_ids) ORDER BY 1);
    UPDATE river.river_job j SET args = '{"erased": true}', errors = '{}', tags = '{}', unique_key = NULL, metadata = jsonb_strip_nulls(jsonb_build_object('dlq:entry_id', j.metadata -> 'dlq:entry_id'))
    WHERE j.id = ANY (v_jobs) AND j.finalized_at IS NOT NULL AND j.args <> '{"erased": true}';
    GET DIAGNOSTICS jobs = ROW_COUNT;
    PERFORM dlq.note_on(v_ids, p_actor, 'erased', p_note);
END
$$;
COMMENT ON FUNCTION dlq.erase_entries IS 'Takes payloads, error texts and what else may be personal out of entries, of their jobs and of the audit trail''s details. Open and failed entries are archived; those with a redelivery under way are left, and counted.';

CREATE OR REPLACE FUNCTION dlq.erase(p_filter jsonb, p_note text, p_actor text DEFAULT session_user) RETURNS dlq.erasures
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_record dlq.erasures;
    v_batch  record;
    v_ids    uuid[];
    v_after  uuid;
BEGIN
    IF p_filter = '{}' THEN
        RAISE EXCEPTION 'erase: an empty filter chooses everybody''s data' USING ERRCODE = 'DLQ04', HINT = 'Name whose: {"payload": {"customer": "cus_81"}}, {"subscriberId": "cus_81"} or {"tags": ["cus_81"]}.';
    END IF;
    -- A month that is being written to the archive now is finished first: it would hold what is erased here.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.retention', 0));
    INSERT INTO dlq.erasures (id, actor, origin, note, filter_sha256, fields)
    VALUES (dlq.uuid_v7(), p_actor, dlq.origin(p_actor), p_note, encode(sha256(convert_to(p_filter::text, 'UTF8')), 'hex'), ARRAY(SELECT jsonb_object_keys(p_filter)))
    RETURNING * INTO v_record;
    LOOP
        v_ids := ARRAY(SELECT dlq.find_ids(p_filter, 1000, v_after, false));
        EXIT WHEN cardinality(v_ids) = 0;
        v_after := v_ids[cardinality(v_ids)];
        SELECT * INTO v_batch FROM dlq.erase_entries(v_ids, p_actor, p_note);
        v_record.entries := v_record.entries + v_batch.entries;
        v_record.jobs := v_record.jobs + v_batch.jobs;
        v_record.under_way := v_record.under_way + v_batch.under_way;
    END LOOP;
    UPDATE dlq.erasures SET entries = v_record.entries, jobs = v_record.jobs, under_way = v_record.under_way WHERE id = v_record.id RETURNING * INTO v_record;
    RETURN v_record;
END
$$;
COMMENT ON FUNCTION dlq.erase IS 'Erases the data of whoever a filter names (see dlq.find) from entries, jobs and the audit trail''s details, and leaves a record in dlq.erasures, which does not say whose it was. Archives are not in the database: "dlqd erase" does both.';
