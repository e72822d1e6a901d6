-- Search of the audit trail, and the erasure of a person's data, which is recorded.

-- trail_begins returns a time before which an entry has no moves, so that earlier months are not read. All moves come
-- after the entry's capture (created_at, by this server's clock); an hour is subtracted because a clock may have been
-- set back. If the entry is deleted, the limit is the time in its id, at which the job failed by the application's
-- clock; a day is subtracted because clocks differ.
CREATE OR REPLACE FUNCTION dlq.trail_begins(p_id uuid) RETURNS timestamptz
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_since    timestamptz := dlq.closed_since(ARRAY[p_id]);
    v_captured timestamptz;
BEGIN
    SELECT min(e.created_at) INTO v_captured FROM dlq.dead_letter_queue e WHERE e.id = p_id
        AND e.stage IN ('inbox', 'open');
    IF v_captured IS NULL THEN
        SELECT min(e.created_at) INTO v_captured FROM dlq.dead_letter_queue e WHERE e.id = p_id
            AND e.closed_at >= v_since;
    END IF;
    RETURN coalesce(v_captured - interval '1 hour', v_since);
END
$$;
COMMENT ON FUNCTION dlq.trail_begins IS 'The time before which an entry has no audit rows; null if p_id is null.';

CREATE OR REPLACE FUNCTION dlq.trail(p_id uuid, p_limit integer DEFAULT 1000) RETURNS SETOF dlq.dead_letter_transitions
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_from  timestamptz := dlq.trail_begins(p_id);
    v_scope jsonb := dlq.scope();
    v_mask  jsonb := dlq.mask(false);
BEGIN
    RETURN QUERY SELECT m.* FROM dlq.dead_letter_transitions t
        CROSS JOIN LATERAL jsonb_populate_record(t,
            CASE WHEN v_mask IS NULL THEN '{}' ELSE jsonb_build_object('note', dlq.masked_text(t.note, v_mask),
                'detail', dlq.masked_detail(t.detail, v_mask)) END) m
        WHERE t.entry_id = p_id AND t.at >= v_from AND dlq.in_scope(t.queue, t.kind, v_scope) ORDER BY t.at,
            t.id LIMIT p_limit;
END
$$;
COMMENT ON FUNCTION dlq.trail IS 'The audit rows of an entry, oldest first.';

-- audit reads both trails: moves of entries, and other changes (dlq.acts). Their ids come from one sequence, of which
-- each session caches a range, so rows are ordered by time and then by id. If the filter has grouped, audit shows an
-- operation (dlq.operations) as one row, whose id is made from the operation's id, and leaves out the moves of
-- operations and of replay runs.
CREATE OR REPLACE FUNCTION dlq.audit(p_filter jsonb DEFAULT '{}', p_limit integer DEFAULT 100,
    p_before timestamptz DEFAULT NULL, p_before_id bigint DEFAULT NULL)
RETURNS TABLE (id bigint, at timestamptz, actor text, db_user text, origin text, entry_id uuid,
    from_status dlq.dead_letter_status, to_status dlq.dead_letter_status,
               reason text, note text, queue text, kind text, error_class text, river_job_id bigint,
               config_version text, detail jsonb, operation uuid)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_key   text;
    v_where text := 'true';
    v_acts  boolean := NOT p_filter ?| '{entryId,queue,kind,from,to,operation}'; -- acts do not have these columns
    v_from  timestamptz := '-infinity';
    v_until timestamptz := 'infinity';
    v_scope jsonb := dlq.scope();
    -- Only a caller whose scope is at least as wide as the operation's scope may see its row. So callers with a scope
    -- get every move instead.
    v_group boolean := v_scope IS NULL AND v_acts AND NOT p_filter ? 'configVersion'
        AND coalesce((p_filter ->> 'grouped')::boolean, false);
    v_mask  jsonb := dlq.mask(false);
    v_note  text := CASE WHEN 'notes' = ANY (dlq.hidden_columns()) THEN 'NULL::text'
        WHEN v_mask IS NULL THEN 't.note' ELSE 'dlq.masked_text(t.note, $8)' END;
BEGIN
    -- As in dlq.filter_where, values are read from parameter $1 and never become part of the SQL
    -- text.
    FOR v_key IN SELECT jsonb_object_keys(p_filter) LOOP
        v_where := v_where || ' AND ' || CASE v_key
            WHEN 'actor'         THEN 't.actor = $1 ->> ''actor'''
                || CASE WHEN dlq.origin(p_filter ->> 'actor') IS NULL THEN '' ELSE ' AND t.origin IS NOT NULL' END
            -- A replay run or request that the policy makes has an origin, so that it needs approval like an
            -- operator's. It is no act of a person.
            WHEN 'people'        THEN CASE WHEN (p_filter ->> 'people')::boolean
                THEN 't.origin IS NOT NULL AND NOT (t.actor = ''policy'' AND starts_with(t.origin, ''policy, ''))'
                ELSE 'true' END
            WHEN 'dbUser'        THEN 't.db_user = $1 ->> ''dbUser'''
            WHEN 'origin'        THEN 'position($1 ->> ''origin'' IN t.origin) > 0'
            WHEN 'entryId'       THEN 't.entry_id = ($1 ->> ''entryId'')::uuid'
            WHEN 'queue'         THEN 't.queue = $1 ->> ''queue'''
            WHEN 'kind'          THEN 't.kind = $1 ->> ''kind'''
            WHEN 'from'          THEN 't.from_status = ($1 ->> ''from'')::dlq.dead_letter_status'
            WHEN 'to'            THEN 't.to_status = ($1 ->> ''to'')::dlq.dead_letter_status'
            WHEN 'text'          THEN '(position(lower($1 ->> ''text'') IN lower(' || v_note
                || ')) > 0 OR position(lower($1 ->> ''text'') IN lower(t.reason)) > 0)'
            WHEN 'configVersion' THEN 't.config_version = $1 ->> ''configVersion'''
            WHEN 'operation'     THEN 't.operation = ($1 ->> ''operation'')::uuid'
            WHEN 'after'         THEN 'true'
            WHEN 'before'        THEN 'true'
            WHEN 'grouped'       THEN 'true'
        END;
        IF v_where IS NULL THEN
            RAISE EXCEPTION 'audit: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'Fields: actor, people, dbUser, origin, entryId, queue, kind, from, to, text, configVersion, operation, grouped, after, before.';
        END IF;
    END LOOP;
    v_where := v_where || CASE WHEN p_before IS NULL THEN '' WHEN p_before_id IS NULL THEN ' AND t.at < $3'
        ELSE ' AND (t.at, t.id) < ($3, $6)' END || ' ORDER BY t.at DESC, t.id DESC LIMIT $2';
    -- The times are parameters of the statement, so that the plan excludes months outside of the range.
    v_from := greatest((p_filter ->> 'after')::timestamptz, dlq.trail_begins((p_filter ->> 'entryId')::uuid), v_from);
    v_until := least((p_filter ->> 'before')::timestamptz, p_before + interval '1 microsecond', v_until);
    RETURN QUERY EXECUTE
        'SELECT * FROM (
             (SELECT t.id, t.at, t.actor, t.db_user, t.origin, t.entry_id, t.from_status, t.to_status, t.reason, '
                 || v_note || ' AS note, t.queue, t.kind, t.error_class, t.river_job_id, t.config_version, '
             -- Details contain edited payloads: only callers who may see these see the details.
             || CASE WHEN 'edited_event' = ANY (dlq.hidden_columns()) THEN 'NULL::jsonb AS detail'
                 ELSE 'dlq.masked_detail(t.detail, $8) AS detail' END
             || ', t.operation FROM dlq.dead_letter_transitions t WHERE t.at >= $4 AND t.at < $5 AND '
             || CASE WHEN v_group THEN 't.operation IS NULL AND (t.detail IS NULL OR NOT t.detail ? ''run'') AND '
                 ELSE '' END
             || CASE WHEN v_scope IS NULL THEN '' ELSE 'dlq.in_scope(t.queue, t.kind, $7) AND ' END || v_where || ')'
        || CASE WHEN v_group THEN '
             UNION ALL
             (SELECT t.id, t.at, t.actor, t.db_user, t.origin, NULL::uuid, NULL::dlq.dead_letter_status,
                     NULL::dlq.dead_letter_status, t.reason, ' || v_note || ', NULL, NULL, NULL, NULL::bigint, NULL,
                     ' || CASE WHEN dlq.hidden_columns() && dlq.filtered_columns() THEN '' ELSE
                         'dlq.masked_detail(jsonb_strip_nulls(t.args || jsonb_build_object(''filter'', t.filter)), $8) || '
                         END
                     || 'jsonb_strip_nulls(jsonb_build_object(''entries'', t.looked, ''changed'', t.changed, ''undoes'',
                         t.undoes)), t.operation
              FROM (SELECT (''x'' || right(replace(o.id::text, ''-'', ''''), 14))::bit(56)::bigint AS id, o.last_at AS at,
                        o.actor, o.db_user, o.origin, o.action AS reason, o.note, o.args, o.filter, o.looked, o.changed,
                        o.undoes, o.scope, o.id AS operation
                    FROM dlq.operations o WHERE o.last_at >= $4 AND o.last_at < $5) t WHERE '
             || CASE WHEN v_scope IS NULL THEN '' ELSE 'dlq.scope_within(t.scope, $7) AND ' END || v_where || ')'
                 ELSE '' END
        || CASE WHEN v_acts THEN '
             UNION ALL
             (SELECT t.id, t.at, t.actor, t.db_user, t.origin, NULL::uuid, NULL::dlq.dead_letter_status,
                     NULL::dlq.dead_letter_status, t.reason, ' || v_note || ', NULL, NULL, NULL, NULL::bigint,
                     t.config_version,
                     dlq.masked_detail(t.detail' || CASE WHEN dlq.hidden_columns() && dlq.filtered_columns()
                         THEN ' - ''filter''' ELSE '' END || ', $8), NULL::uuid
              FROM (SELECT a.*, a.subject || '': '' || a.act AS reason FROM dlq.acts a) t WHERE t.at >= $4 AND t.at < $5 AND '
             || CASE WHEN v_scope IS NULL THEN '' ELSE 'dlq.act_in_scope(t.subject, $7) AND ' END || v_where || ')'
                 ELSE '' END
        || ') a ORDER BY a.at DESC, a.id DESC LIMIT $2'
        USING p_filter, p_limit, p_before, v_from, v_until, p_before_id, v_scope, v_mask;
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'audit: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.audit IS
    'Who changed what, when, from where and why: changes of entries and of anything else, newest first. For the '
    'next page: rows before the time p_before, or before the row with p_before and p_before_id. detail includes '
    'edited payloads. Filter: {"actor": "kim", "people": true (without what dlqd does by itself), "dbUser", '
    '"origin" (a part of it), "entryId", "queue", "kind", "from", "to" (states), "text" (in reason or note), '
    '"configVersion", "operation", "grouped": true (an operation in place of its changes, and of a replay run only its '
    'acts; without entryId, queue, kind, from, to, operation and configVersion), "after", "before"}.';

-- erased returns the entry without personal data. The time, error type and class of the failure remain, and the outcome
-- of the entry.
CREATE OR REPLACE FUNCTION dlq.erased(p_entry dlq.dead_letter_queue) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    p_entry.event_id := NULL;
    p_entry.source := NULL;
    p_entry.assigned_to := NULL;
    p_entry.original_event := '{"erased": true}';
    p_entry.edited_event := NULL;
    p_entry.error_message := 'erased';
    p_entry.error_code := NULL;
    p_entry.error_title := NULL;
    p_entry.destination_url := NULL;
    p_entry.error_stack_trace := NULL;
    p_entry.error_context := NULL;
    p_entry.retry_history := '[]';
    p_entry.replay_attempts := coalesce((SELECT jsonb_agg(a - 'error')
        FROM jsonb_array_elements(p_entry.replay_attempts) a), '[]');
    p_entry.metadata := '{}';
    p_entry.subscriber_id := NULL;
    p_entry.ordering_key := NULL;
    p_entry.unique_key := NULL;
    p_entry.tags := '{}';
    p_entry.notes := NULL;
    p_entry.resolution_notes := NULL;
    p_entry.record := dlq.without_bytes(p_entry.record);
    RETURN p_entry;
END
$$;
COMMENT ON FUNCTION dlq.erased IS
    'Returns the entry without message id, source, payload, error texts and code, URL of the destination, metadata, '
    'subscriber, ordering key, tags, assignee and notes.';

CREATE OR REPLACE FUNCTION dlq.erase_rows(p_rows jsonb, p_filter jsonb) RETURNS TABLE (id uuid, line text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    RETURN QUERY EXECUTE
        'SELECT e.id, to_jsonb(dlq.erased(e))::text FROM jsonb_populate_recordset(NULL::dlq.dead_letter_queue, $2) e WHERE ' || dlq.filter_where(p_filter)
        USING p_filter, p_rows;
END
$$;
COMMENT ON FUNCTION dlq.erase_rows IS
    'Of the given rows of the archive, returns those that match a filter, without their personal data: as '
    'dlq.erased changes them.';

CREATE OR REPLACE FUNCTION dlq.erase_jobs(p_jobs bigint[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_count integer;
BEGIN
    UPDATE river.river_job j SET args = '{"erased": true}', errors = '{}', tags = '{}', unique_key = NULL,
        metadata = jsonb_strip_nulls(jsonb_build_object('dlq:entry_id', j.metadata -> 'dlq:entry_id'))
    WHERE j.id = ANY (p_jobs) AND j.finalized_at IS NOT NULL AND j.args <> '{"erased": true}';
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.erase_jobs IS
    'Deletes args, errors, tags and metadata of jobs that have ended. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.reason_without_names(p_reason text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_reason LIKE 'assigned to %' AND p_reason <> 'assigned to nobody' THEN 'assigned'
            WHEN p_reason LIKE 'tagged %' THEN 'tagged' ELSE p_reason END;
COMMENT ON FUNCTION dlq.reason_without_names IS
    'The reason of an audit row without the assignee or the tags in it. internal/archive has the same rule for rows of '
    'the archive.';

-- The id of the replay run stays: it says nothing about a person.
CREATE OR REPLACE FUNCTION dlq.erase_trail(p_ids uuid[], p_since timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    PERFORM set_config('dlq.erasing', txid_current()::text, true); -- dlq.on_rewrite allows the change
    UPDATE dlq.dead_letter_transitions t
    SET detail = CASE WHEN t.detail IS NOT NULL
            THEN jsonb_strip_nulls(jsonb_build_object('run', t.detail -> 'run', 'erased', true)) END,
        reason = dlq.reason_without_names(t.reason)
    WHERE t.entry_id = ANY (p_ids) AND t.at >= p_since
        AND (CASE jsonb_typeof(t.detail) WHEN 'object' THEN t.detail - 'run' NOT IN ('{}', '{"erased": true}') END
            OR t.reason <> dlq.reason_without_names(t.reason));
    PERFORM set_config('dlq.erasing', '', true);
    UPDATE dlq.replay_run_entries r SET detail = NULL WHERE r.entry_id = ANY (p_ids) AND r.detail IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.erase_trail IS
    'Deletes edited payloads, assignees and tags of entries from the audit trail, and error texts from the reports '
    'of replay runs.';

-- erase_titles takes the lock of rollup refreshes, because a refresh also writes titles of failure groups.
CREATE OR REPLACE FUNCTION dlq.erase_titles(p_groups text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF cardinality(p_groups) > 0 THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0));
        UPDATE dlq.failure_groups g SET title = g.error_type
        FROM unnest(p_groups) p (name) WHERE g.queue = split_part(p.name, E'\n', 1)
            AND g.fingerprint = split_part(p.name, E'\n', 2);
        UPDATE dlq.group_aliases a SET title = NULL
        FROM unnest(p_groups) p (name) WHERE a.queue = split_part(p.name, E'\n', 1)
            AND a.fingerprint = split_part(p.name, E'\n', 2) AND a.title IS NOT NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.erase_titles IS
    'Deletes error texts from the titles of failure groups, given as queue and fingerprint with a newline '
    'between: a title may be the text of an erased entry.';

-- erase_archived is erase_entries for entries that are only in the archive: the database keeps
-- their moves for years, and River may still have their jobs.
CREATE OR REPLACE FUNCTION dlq.erase_archived(p_rows jsonb) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_ids  uuid[] := ARRAY(SELECT (r ->> 'id')::uuid FROM jsonb_array_elements(p_rows) r);
    v_jobs bigint[];
BEGIN
    v_jobs := ARRAY(
        SELECT j.id FROM river.river_job j
        WHERE j.finalized_at IS NOT NULL
          AND j.id IN (SELECT (r ->> 'river_job_id')::bigint FROM jsonb_array_elements(p_rows) r UNION SELECT k.job_id
              FROM dlq.retired_jobs k)
          AND (EXISTS (SELECT FROM jsonb_array_elements(p_rows) r WHERE (r ->> 'river_job_id')::bigint = j.id
              AND (r ->> 'job_created_at')::timestamptz = j.created_at)
               OR j.metadata ->> 'dlq:entry_id' = ANY (v_ids::text[]))
        ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED);
    -- Begin an hour before the capture if that is earlier than dlq.closed_since: the time in the id is from the
    -- application's clock, which may be ahead.
    PERFORM dlq.erase_trail(v_ids, least(dlq.closed_since(v_ids),
        (SELECT min((r ->> 'created_at')::timestamptz) - interval '1 hour' FROM jsonb_array_elements(p_rows) r)));
    PERFORM dlq.erase_titles(ARRAY(SELECT DISTINCT (r ->> 'queue') || E'\n' || (r ->> 'fingerprint')
        FROM jsonb_array_elements(p_rows) r WHERE r ->> 'fingerprint' IS NOT NULL));
    RETURN dlq.erase_jobs(v_jobs);
END
$$;
COMMENT ON FUNCTION dlq.erase_archived IS
    'Erases what the database still has of entries that are only in the archive (rows of dead_letter_queue): '
    'edited payloads, assignees and tags in the audit trail, error texts in reports and titles, and their jobs. '
    'Returns how many jobs it erased.';

CREATE OR REPLACE FUNCTION dlq.erased_reason() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 'erased';
COMMENT ON FUNCTION dlq.erased_reason IS
    'The reason of the audit row of an erasure, which dlq.were_erased and dlq.erased_entries look for.';

CREATE OR REPLACE FUNCTION dlq.were_erased(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    -- Read all months of the trail. Reading only from the time in the id on could miss the erasure: that time
    -- is from the application's clock, which may be ahead.
    RETURN QUERY SELECT DISTINCT t.entry_id FROM dlq.dead_letter_transitions t WHERE t.entry_id = ANY (p_ids)
        AND t.reason = dlq.erased_reason();
END
$$;
COMMENT ON FUNCTION dlq.were_erased IS 'Of the given entries, returns those whose data was erased in the database.';

-- An erasure may erase more than necessary: names also finds a value inside of a longer word. Exception: a number is
-- not found inside of a longer number, so cus_8 is not found in cus_81.
CREATE OR REPLACE FUNCTION dlq.names(p_text text, p_values text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN EXISTS (SELECT FROM unnest(p_values) v (value) WHERE CASE
    WHEN coalesce(position(v.value IN p_text), 0) = 0 THEN false
    WHEN v.value !~ '^[0-9]|[0-9]$' OR length(v.value) > 1000 THEN true
    ELSE p_text ~ (CASE WHEN v.value ~ '^[0-9]' THEN '(^|[^0-9])' ELSE '' END
        || regexp_replace(v.value, '([^[:alnum:]])', '\\\1', 'g') || CASE WHEN v.value ~ '[0-9]$' THEN '($|[^0-9])'
            ELSE '' END) END);
COMMENT ON FUNCTION dlq.names IS
    'Whether a text contains one of the values. A number does not match inside of a longer one: cus_8 is not in '
    'cus_81.';

-- The filter, the patch or the note of a replay run may name the person. A run is erased if
--   - it contains a value of the erasure's filter, or
--   - it redelivered one of the person's entries, and has a patch, or a filter of payloads,
--     subscribers, ordering keys or tags.
CREATE OR REPLACE FUNCTION dlq.erase_runs(p_filter jsonb, p_ids uuid[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- The paths of payloadAt contain no personal data.
    v_values         text[] := ARRAY(SELECT DISTINCT v.value #>> '{}'
        FROM jsonb_path_query((SELECT coalesce(jsonb_object_agg(f.key,
            CASE f.key WHEN 'payloadAt' THEN jsonb_path_query_array(f.value, '$[*].values[*]') ELSE f.value END), '{}')
                FROM jsonb_each(p_filter) f
                WHERE f.key = ANY (dlq.personal_filters() || 'messageId'::text)), 'strict $.**')
                    v (value)
                             WHERE jsonb_typeof(v.value) IN ('string', 'number') AND length(v.value #>> '{}') > 2);
    v_since          constant timestamptz := ( -- start of the audit rows
        SELECT least(dlq.closed_since(p_ids), min(e.created_at) - interval '1 hour')
        FROM dlq.dead_letter_queue e WHERE e.id = ANY (p_ids));
    v_runs           uuid[];
    v_open_runs      integer;
    v_open_approvals integer;
BEGIN
    v_runs := ARRAY(
        SELECT r.id FROM dlq.replay_runs r
        WHERE (r.filter ?| dlq.personal_filters() OR r.patch IS NOT NULL OR r.merge_patch IS NOT NULL
            OR r.filter ? 'errorMessage' OR r.note IS NOT NULL) AND r.filter ->> 'erased' IS NULL
          AND (EXISTS (SELECT FROM jsonb_path_query(jsonb_build_array(r.filter, r.patch, r.merge_patch),
              'strict $.**') v (value)
                       WHERE jsonb_typeof(v.value) IN ('string', 'number') AND v.value #>> '{}' = ANY (v_values))
               OR dlq.names(concat_ws(' ', r.note, r.filter ->> 'errorMessage'), v_values)
               OR ((r.filter ?| dlq.personal_filters() OR r.patch IS NOT NULL OR r.merge_patch IS NOT NULL)
                   AND EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id
                       AND e.entry_id = ANY (p_ids))))
        ORDER BY r.id FOR UPDATE);
    UPDATE dlq.replay_runs r SET
        filter = r.filter - dlq.personal_filters() - 'errorMessage' || '{"erased": true}',
        patch = CASE WHEN r.patch IS NOT NULL THEN '{"erased": true}' END::jsonb,
        merge_patch = CASE WHEN r.merge_patch IS NOT NULL THEN '{"erased": true}' END::jsonb, note = NULL
    WHERE r.id = ANY (v_runs) AND r.status IN ('completed', 'cancelled'); -- a stopped run can be resumed
    SELECT count(*) INTO v_open_runs FROM dlq.replay_runs r WHERE r.id = ANY (v_runs)
        AND r.status NOT IN ('completed', 'cancelled');
    -- Requests for approval may name persons, too.
    PERFORM set_config('dlq.erasing', txid_current()::text, true); -- dlq.on_operation allows the change
    WITH named AS MATERIALIZED (
        SELECT a.id FROM dlq.approvals a
        WHERE a.id IS DISTINCT FROM dlq.approved() AND a.request ->> 'erased' IS NULL
          AND (EXISTS (SELECT FROM jsonb_path_query(a.request, 'strict $.**') v (value)
              WHERE jsonb_typeof(v.value) IN ('string', 'number') AND v.value #>> '{}' = ANY (v_values))
               OR dlq.names(concat_ws(' ', a.note, a.decision, a.problem, a.request -> 'filter' ->> 'errorMessage'),
                   v_values)
               OR (a.request ?| '{patch,mergePatch}' OR a.request -> 'filter' ?| dlq.personal_filters())
                   AND EXISTS (SELECT FROM dlq.approval_entries e WHERE e.approval_id = a.id
                       AND e.entry_id = ANY (p_ids)))
        ORDER BY a.id FOR UPDATE
    ), erased_approvals AS (
        UPDATE dlq.approvals a SET request = '{"erased": true}', note = NULL, decision = NULL, problem = NULL
        WHERE a.id IN (SELECT n.id FROM named n) AND a.ended_at IS NOT NULL RETURNING a.id
    ), erased_operations AS (
        -- Filters and arguments of operations may name persons, too.
        UPDATE dlq.operations o SET filter = CASE WHEN o.filter IS NOT NULL THEN '{"erased": true}' END::jsonb,
            args = '{}', note = NULL
        WHERE EXISTS (SELECT FROM jsonb_path_query(jsonb_build_array(o.filter, o.args), 'strict $.**') v (value)
            WHERE jsonb_typeof(v.value) IN ('string', 'number') AND v.value #>> '{}' = ANY (v_values))
           OR dlq.names(concat_ws(' ', o.note, o.filter ->> 'errorMessage'), v_values)
           OR o.filter ?| dlq.personal_filters() AND o.id IN (SELECT t.operation FROM dlq.dead_letter_transitions t
               WHERE t.entry_id = ANY (p_ids) AND t.at >= v_since)
    ) SELECT count(*) INTO v_open_approvals FROM named n WHERE n.id NOT IN (SELECT b.id FROM erased_approvals b);
    PERFORM set_config('dlq.erasing', '', true);
    UPDATE dlq.group_marks m SET note = NULL WHERE dlq.names(m.note, v_values);
    -- A saved view whose query names the person is deleted: without its query it would select all
    -- entries. Values of fields such as queue:mailers are no personal data, so they are not compared.
    -- "queue:mailers" in quotes is a search text, and may be personal data.
    DELETE FROM dlq.saved_views w
    WHERE dlq.names(w.name || ' '
        || regexp_replace(w.query,
            '("(?:[^"\\]|\\.)*")|(^|\s)(status|queue|kind|class|type|code|group|rule|strategy|waiting|stage):("(?:[^"\\]|\\.)*"|\S*)', '\1 ', 'g'), v_values);
    RETURN v_open_runs + v_open_approvals;
END
$$;
COMMENT ON FUNCTION dlq.erase_runs IS
    'Deletes filter values, patches and notes of replay runs, approvals and operations that name the person of '
    'a filter, or that handled these entries. Deletes notes of failure groups and saved views that name the '
    'person. Returns how many runs and approvals were skipped because they have not ended.';

-- erase_entries locks jobs first, then entries. It skips entries whose rows or jobs another session has locked, and
-- counts them in under_way; it waits only for a session that is filing one of the entries. Open and failed entries are
-- archived, because nothing is left to redeliver.
CREATE OR REPLACE FUNCTION dlq.erase_entries(p_ids uuid[], p_actor text, p_note text, OUT entries integer,
    OUT jobs integer, OUT under_way integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan SET row_security = off AS $$
DECLARE
    v_since timestamptz; -- when the first of the entries closed
    v_from  timestamptz; -- start of the audit rows
    v_ids   uuid[];
    v_jobs  bigint[];
BEGIN
    PERFORM dlq.file(p_ids);
    -- This reads all months. If the application's clock was ahead, an entry may have closed before the time in
    -- its id; a filter finds such an entry, so p_ids may contain it.
    SELECT least(dlq.closed_since(p_ids), min(e.closed_at)) INTO v_since FROM dlq.dead_letter_queue e
    WHERE e.id = ANY (p_ids);
    SELECT coalesce(array_agg(e.id), '{}'), min(e.created_at) - interval '1 hour' INTO v_ids, v_from
    FROM dlq.dead_letter_queue e WHERE e.id = ANY (p_ids) AND e.status <> 'dlq_processing'
        AND (e.closed_at IS NULL OR e.closed_at >= v_since);
    -- River keeps jobs for a while: the original one, and each redelivery.
    WITH all_jobs AS MATERIALIZED (
        SELECT e.id AS entry_id, e.river_job_id AS job_id, e.job_created_at FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (v_ids) AND (e.closed_at IS NULL OR e.closed_at >= v_since)
        UNION
        SELECT t.entry_id, t.job_id, t.job_created_at FROM dlq.entry_jobs t WHERE t.entry_id = ANY (v_ids)
    ), present AS MATERIALIZED (
        SELECT t.entry_id, j.id FROM all_jobs t JOIN river.river_job j ON j.id = t.job_id
            AND j.created_at = t.job_created_at
    ), locked AS MATERIALIZED (
        SELECT j.id FROM river.river_job j WHERE j.id IN (SELECT p.id FROM present p) AND j.finalized_at IS NOT NULL
        ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT coalesce(array_agg(DISTINCT h.id), '{}'), array(SELECT unnest(v_ids) EXCEPT SELECT p.entry_id FROM present p
        WHERE p.id NOT IN (SELECT h2.id FROM locked h2))
    INTO v_jobs, v_ids FROM locked h;
    v_ids := ARRAY(SELECT e.id FROM dlq.dead_letter_queue e
                   WHERE e.id = ANY (v_ids) AND e.status <> 'dlq_processing' AND e.stage <> 'inbox'
                       AND (e.closed_at IS NULL OR e.closed_at >= v_since)
                   ORDER BY e.id FOR UPDATE SKIP LOCKED);
    SELECT count(*) - cardinality(v_ids) INTO under_way FROM dlq.dead_letter_queue e WHERE e.id = ANY (p_ids)
        AND (e.closed_at IS NULL OR e.closed_at >= v_since);

    jobs := dlq.erase_jobs(v_jobs);
    UPDATE dlq.dead_letter_queue e SET status = 'dlq_archived', resolution_strategy = 'discard', resolved_by = p_actor,
        move = jsonb_build_object('actor', p_actor, 'reason', 'discarded, to be erased', 'note', p_note)
    WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed', 'dlq_returned')
        AND e.stage IN ('open', 'failed', 'returned') AND (e.closed_at IS NULL OR e.closed_at >= v_since);
    PERFORM set_config('dlq.erasing', txid_current()::text, true); -- dlq.on_content allows the change
    UPDATE dlq.dead_letter_queue e SET
        original_event = x.original_event, edited_event = x.edited_event, error_message = x.error_message,
        error_title = x.error_title, destination_url = x.destination_url, error_stack_trace = x.error_stack_trace,
        error_context = x.error_context, retry_history = x.retry_history, replay_attempts = x.replay_attempts,
        metadata = x.metadata,
        subscriber_id = x.subscriber_id, ordering_key = x.ordering_key, unique_key = x.unique_key, tags = x.tags,
        notes = x.notes, resolution_notes = x.resolution_notes, event_id = x.event_id, source = x.source,
        error_code = x.error_code, assigned_to = x.assigned_to, record = x.record
    FROM (SELECT d.id AS entry, (dlq.erased(d)).* FROM dlq.dead_letter_queue d WHERE d.id = ANY (v_ids)
        AND d.closed_at >= v_since) x
    WHERE e.id = x.entry AND e.status IN ('dlq_resolved', 'dlq_archived') AND e.closed_at >= v_since;
    GET DIAGNOSTICS entries = ROW_COUNT;
    UPDATE dlq.source_deliveries d SET content = NULL WHERE d.entry_id = ANY (v_ids) AND d.content IS NOT NULL;

    -- Facts that are not applied yet, or that the database refuses, still say that the job ended, but lose its metadata
    -- and errors. For a failure, one empty error remains: dlq.is_failure needs it to distinguish a job that its worker
    -- cancelled from a job that an operator cancelled.
    UPDATE dlq.job_facts f SET job = f.job - '{refusal,row}'::text[] || '{"metadata": {}}'
        || CASE WHEN dlq.is_failure(f.job)
        THEN '{"errors": [{}]}' ELSE '{"errors": []}' END::jsonb
    WHERE f.job IS NOT NULL AND (f.entry_id = ANY (v_ids) OR (f.job_id, f.job_created_at) IN (
        SELECT e.river_job_id, e.job_created_at FROM dlq.dead_letter_queue e WHERE e.id = ANY (v_ids)
            AND e.closed_at >= v_since
        UNION SELECT m.job_id, m.job_created_at FROM dlq.entry_jobs m WHERE m.entry_id = ANY (v_ids)));
    DELETE FROM dlq.ordered_jobs o USING dlq.dead_letter_queue d
    WHERE d.id = ANY (v_ids) AND d.closed_at >= v_since AND o.job_id = d.river_job_id
        AND o.job_created_at = d.job_created_at;
    PERFORM dlq.erase_trail(v_ids, v_from);
    -- This also erases titles of groups that an entry has left, because such a title may be the entry's error text.
    PERFORM dlq.erase_titles(ARRAY(SELECT d.queue || E'\n' || d.fingerprint FROM dlq.dead_letter_queue d
        WHERE d.id = ANY (v_ids) AND d.closed_at >= v_since AND d.fingerprint IS NOT NULL
        UNION SELECT t.queue || E'\n' || t.joined_group FROM dlq.dead_letter_transitions t
        WHERE t.entry_id = ANY (v_ids) AND t.at >= v_from AND t.joined_group IS NOT NULL));
    PERFORM dlq.note_on(v_ids, p_actor, dlq.erased_reason(), p_note, '{resolved,archived}', p_since => v_since);
END
$$;
COMMENT ON FUNCTION dlq.erase_entries IS
    'Erases payloads, error texts and other personal data of entries, of their jobs and of the details of the '
    'audit trail. Open and failed entries are archived. Entries that have a redelivery under way, or that '
    'another session has locked, are skipped and counted in under_way.';

CREATE OR REPLACE FUNCTION dlq.erased_entries(p_erasure uuid) RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_since constant timestamptz := (SELECT r.at FROM dlq.erasures r WHERE r.id = p_erasure);
BEGIN
    PERFORM dlq.require_admin('erase');
    RETURN QUERY SELECT DISTINCT t.entry_id FROM dlq.dead_letter_transitions t WHERE t.at >= v_since
        AND t.reason = dlq.erased_reason();
END
$$;
COMMENT ON FUNCTION dlq.erased_entries IS
    'The entries that were erased in the database by an erasure, or by one that began after it.';

-- An erasure does not erase error types and sources, because reports count them, and notes that operators wrote on
-- groups or on many entries at once. erase_leaves returns where such data remains, with the query that counted the
-- rows, so that the caller can read the same rows.
CREATE OR REPLACE FUNCTION dlq.erase_leaves(p_erasure uuid) RETURNS TABLE (table_name text, columns text[],
    row_count bigint, query text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_entries constant text := format('SELECT dlq.erased_entries(%L)', p_erasure);
    v_moves   constant text := format('dlq.dead_letter_transitions m WHERE m.entry_id IN (%s)', v_entries);
BEGIN
    PERFORM dlq.require_admin('erase');
    FOR table_name, columns, query IN VALUES
        ('dead_letter_queue', '{kind,error_type,destination}'::text[], format(
            'SELECT t.id, t.kind, t.error_type, t.destination FROM dlq.dead_letter_queue t WHERE t.id IN (%s)',
            v_entries)),
        ('dead_letter_transitions', '{kind,note,error_type,source}', format(
            'SELECT m.at, m.actor, m.kind, m.note, m.error_type, m.source FROM %s', v_moves)),
        ('rollup_errors', '{error_type}', format(
            'SELECT t.* FROM dlq.rollup_errors t WHERE (t.queue, t.error_type) IN (SELECT m.queue, '
            'm.error_type FROM %s AND m.error_type <> '''')', v_moves)),
        ('rollup_sources', '{source}', format(
            'SELECT t.* FROM dlq.rollup_sources t WHERE t.source IN (SELECT m.source FROM %s)', v_moves)),
        ('counters', '{label}', format(
            'SELECT t.* FROM dlq.counters t WHERE t.name = ''error_type'' AND t.label IN (SELECT m.error_type FROM %s '
            'AND m.error_type <> '''')', v_moves)),
        ('replay_run_groups', '{error_type}', format(
            'SELECT t.* FROM dlq.replay_run_groups t WHERE t.error_type IN (SELECT m.error_type FROM %s '
            'AND m.error_type <> '''')', v_moves)),
        ('failure_groups', '{title,error_type}', format(
            'SELECT t.* FROM dlq.failure_groups t WHERE (t.queue, t.fingerprint) IN (SELECT m.queue, m.joined_group '
            'FROM %s)', v_moves)),
        ('group_marks', '{owner,note}', format(
            'SELECT t.* FROM dlq.group_marks t WHERE coalesce(t.owner, t.note) IS NOT NULL AND (t.queue, '
            't.fingerprint) IN (SELECT m.queue, m.joined_group FROM %s)', v_moves)),
        ('operations', '{filter,args,note}', format(
            'SELECT t.* FROM dlq.operations t WHERE t.args || coalesce(t.filter, ''{}'') || '
            'jsonb_strip_nulls(jsonb_build_object(''note'', t.note)) NOT IN (''{}'', ''{"erased": true}'') AND t.id IN '
            '(SELECT m.operation FROM %s)', v_moves)),
        ('replay_runs', '{filter,patch,merge_patch,note}', format(
            'SELECT t.* FROM dlq.replay_runs t WHERE t.filter ->> ''erased'' IS NULL AND t.id IN (SELECT n.run_id '
            'FROM dlq.replay_run_entries n WHERE n.entry_id IN (%s))', v_entries)),
        -- A request has a list of its entries from its approval on. Before that, and if it was refused, it has only
        -- their queues.
        ('approvals', '{request,note,decision,problem}', format(
            'SELECT t.* FROM dlq.approvals t WHERE (t.request ->> ''erased'' IS NULL OR coalesce(t.note, t.decision, '
            't.problem) IS NOT NULL) AND (t.id IN (SELECT n.approval_id FROM dlq.approval_entries n '
            'WHERE n.entry_id IN (%s)) OR t.frozen IS NULL AND t.by_queue ?| ARRAY(SELECT m.queue FROM %s))',
            v_entries, v_moves))
    LOOP
        EXECUTE format('SELECT count(*) FROM (%s) q', query) INTO row_count;
        IF row_count > 0 THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.erase_leaves IS
    'Rows of erased entries that an erasure leaves in the database and that may name the person: tables, columns, '
    'the number of rows, and the query that lists these. dlq.traces finds values of the person anywhere.';

-- The planner's statistics keep values of columns: the most frequent ones, and a sample of the others.
-- ANALYZE replaces them. It takes no lock that readers or writers wait for.
CREATE OR REPLACE FUNCTION dlq.erase_statistics(p_erasure uuid) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_months oid[];       -- months of closed entries with erased ones
    v_from   timestamptz; -- start of the audit rows of erased entries
    v_table  record;
    v_left   text[] := '{}';
BEGIN
    PERFORM dlq.require_admin('erase');
    SELECT array_agg(DISTINCT e.tableoid), min(e.created_at) - interval '1 hour' INTO v_months, v_from
    FROM dlq.dead_letter_queue e
    WHERE e.id IN (SELECT dlq.erased_entries(p_erasure));
    FOR v_table IN
        SELECT c.oid::regclass AS name, pg_has_role(c.relowner, 'USAGE') AS may
        FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
        LEFT JOIN pg_class p ON p.oid = i.inhparent
        -- ANALYZE of a parent analyzes all of its partitions, so a parent is left out unless it has statistics,
        -- which it has only after an operator's ANALYZE.
        WHERE (c.relkind = 'r' OR c.relkind = 'p' AND EXISTS (SELECT FROM pg_stats s
                WHERE s.schemaname = c.relnamespace::regnamespace::text AND s.tablename = c.relname AND s.inherited))
          AND (c.oid = 'river.river_job'::regclass
            OR c.relnamespace = (SELECT q.relnamespace FROM pg_class q WHERE q.oid = 'dlq.dead_letter_queue'::regclass)
            AND CASE p.relname
                WHEN 'dead_letter_resolved' THEN c.oid = ANY (v_months)
                WHEN 'dead_letter_archived' THEN c.oid = ANY (v_months)
                WHEN 'dead_letter_transitions' THEN coalesce(dlq.partition_end(c.oid) > v_from, true)
                ELSE true END)
        ORDER BY c.oid
    LOOP
        BEGIN
            IF v_table.may THEN
                EXECUTE format('ANALYZE %s', v_table.name);
                CONTINUE;
            END IF;
        EXCEPTION WHEN lock_not_available THEN NULL;
        END;
        v_left := v_left || v_table.name::text;
    END LOOP;
    IF v_left <> '{}' THEN
        RAISE WARNING 'erasure %: the statistics of % may still have values of erased rows', p_erasure,
            array_to_string(v_left, ', ') USING HINT = 'The owner of the table runs ANALYZE.';
    END IF;
    RETURN v_left;
END
$$;
COMMENT ON FUNCTION dlq.erase_statistics IS
    'Runs ANALYZE on the tables that an erasure may have changed, because the planner''s statistics keep values. '
    'Returns the tables that dlqd may not analyze, or that another session kept locked.';

-- Only the owner of the schema may call traces: to other callers, counts of matches would reveal masked values.
CREATE OR REPLACE FUNCTION dlq.traces(p_values text[]) RETURNS TABLE (table_name text, column_name text,
    row_count bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_table record;
BEGIN
    FOR v_table IN
        SELECT c.oid::regclass AS name, array_agg(a.attname::text ORDER BY a.attnum) AS columns,
            string_agg(format('count(*) FILTER (WHERE dlq.names(t.%I::text, $1))', a.attname), ', ' ORDER BY a.attnum)
                AS counts
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND (c.oid = 'river.river_job'::regclass
            OR c.relnamespace = (SELECT q.relnamespace FROM pg_class q WHERE q.oid = 'dlq.dead_letter_queue'::regclass))
          AND a.atttypid IN ('text'::regtype, 'text[]'::regtype, 'jsonb'::regtype, 'jsonb[]'::regtype, 'json'::regtype,
              'varchar'::regtype, 'varchar[]'::regtype)
        GROUP BY c.oid ORDER BY c.oid::regclass::text
    LOOP
        RETURN QUERY EXECUTE format('SELECT $3, k.name, k.n FROM (SELECT ARRAY[%s] AS counts FROM %s t) c
            CROSS JOIN LATERAL unnest($2, c.counts) k (name, n) WHERE k.n > 0', v_table.counts, v_table.name)
            USING p_values, v_table.columns, v_table.name::text;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.traces IS
    'Counts the rows in which a column of any table of dlqd, or of River''s jobs, contains one of the values: what '
    'an erasure left, and other entries that name the person. It reads all tables. For the owner of the schema.';

CREATE OR REPLACE FUNCTION dlq.erase_begin(p_filter jsonb, p_note text, p_actor text DEFAULT session_user) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id uuid := dlq.uuid_v7();
BEGIN
    PERFORM dlq.require_admin('erase');
    PERFORM dlq.require_everything('erase');
    IF dlq.chooses_all(p_filter) THEN
        RAISE EXCEPTION 'erase: an empty filter matches the data of every person' USING ERRCODE = 'DLQ04',
            HINT = 'Name the person: {"payload": {"customer": "cus_81"}}, {"subscriberId": "cus_81"} or {"tags": ["cus_81"]}.';
    END IF;
    PERFORM dlq.filter_where(p_filter);
    PERFORM dlq.require_approval('{erase}', 'erase', jsonb_build_object('filter', p_filter));
    INSERT INTO dlq.erasures (id, actor, origin, note, filter_sha256, fields)
    VALUES (v_id, dlq.actor(p_actor), dlq.origin(dlq.actor(p_actor), p_actor), dlq.masked_text(p_note, dlq.mask(false)),
        encode(sha256(convert_to(p_filter::text, 'UTF8')), 'hex'), ARRAY(SELECT jsonb_object_keys(p_filter)));
    RETURN v_id;
END
$$;
COMMENT ON FUNCTION dlq.erase_begin IS 'Writes the record of an erasure. Returns its id, for dlq.erase_step.';

CREATE OR REPLACE FUNCTION dlq.erase_step(p_erasure uuid, p_filter jsonb, p_after uuid DEFAULT NULL,
    p_limit integer DEFAULT 250) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_record     dlq.erasures;
    v_ids        uuid[] := ARRAY(SELECT dlq.find_ids(p_filter, p_limit, p_after, false));
    v_batch      record;
    v_unfinished integer; -- replay runs and approvals that have not ended
BEGIN
    PERFORM dlq.require_admin('erase');
    PERFORM dlq.require_everything('erase');
    -- Approval is checked again, because more entries may match by now.
    PERFORM dlq.require_approval('{erase}', 'erase', jsonb_build_object('filter', p_filter));
    SELECT * INTO STRICT v_record FROM dlq.erasures r WHERE r.id = p_erasure;
    IF v_record.filter_sha256 <> encode(sha256(convert_to(p_filter::text, 'UTF8')), 'hex') THEN
        RAISE EXCEPTION 'erasure %: began with another filter', p_erasure USING ERRCODE = 'DLQ04',
            HINT = 'Start an erasure with this filter: dlq.erase_begin.';
    END IF;
    IF p_after IS NULL OR cardinality(v_ids) > 0 THEN
        v_unfinished := dlq.erase_runs(p_filter, v_ids);
        SELECT * INTO v_batch FROM dlq.erase_entries(v_ids, v_record.actor, v_record.note);
        v_batch.under_way := v_batch.under_way + v_unfinished;
        UPDATE dlq.erasures r SET entries = r.entries + v_batch.entries, jobs = r.jobs + v_batch.jobs,
            under_way = r.under_way + v_batch.under_way WHERE r.id = p_erasure;
    END IF;
    RETURN v_ids[cardinality(v_ids)];
END
$$;
COMMENT ON FUNCTION dlq.erase_step IS
    'Erases up to p_limit entries that match a filter (see dlq.find), in order of capture after p_after, and adds '
    'the counts to the record of the erasure. Returns the last id, for the next p_after; null when none is left. '
    'Raises DLQ04 if the erasure began with another filter; more matching entries may need a new approval.';

-- One transaction per batch, so that no lock is held for longer than a batch takes.
CREATE OR REPLACE PROCEDURE dlq.erase(p_filter jsonb, p_note text, p_actor text DEFAULT session_user,
    INOUT p_erasure uuid DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
    v_after uuid;
    v_started_at timestamptz := clock_timestamp();
    v_left record;
BEGIN
    p_erasure := dlq.erase_begin(p_filter, p_note, p_actor);
    COMMIT;
    -- First file the failures that capture missed. Otherwise they would be filed after the erasure.
    WHILE NOT (SELECT r.done AND r.began_at >= v_started_at FROM dlq.reconcile(p_whole => true) r) LOOP
        COMMIT;
    END LOOP;
    COMMIT;
    LOOP
        v_after := dlq.erase_step(p_erasure, p_filter, v_after);
        COMMIT;
        EXIT WHEN v_after IS NULL;
    END LOOP;
    PERFORM dlq.erase_statistics(p_erasure);
    COMMIT;
    FOR v_left IN SELECT l.* FROM dlq.erase_leaves(p_erasure) l LOOP
        RAISE NOTICE 'erasure %: may still name the person: % rows of % (%)', p_erasure, v_left.row_count,
            v_left.table_name, array_to_string(v_left.columns, ', ') USING HINT = v_left.query;
    END LOOP;
END
$$;
COMMENT ON PROCEDURE dlq.erase IS
    'Erases the data of the person whom a filter names (see dlq.find) from entries, jobs and the details of the '
    'audit trail, in small batches. Keeps a record in dlq.erasures, and returns its id; the record does not say '
    'whose data it was. Notices say what stays (see dlq.erase_leaves). Archives are outside of the database: '
    '"dlqd erase" erases both.';
