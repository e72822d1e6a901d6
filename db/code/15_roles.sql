-- Privileges: three roles for people, and what the policy hides from dlq_reader. dlqd itself runs as
-- the owner of the schema.
--
--     dlq_reader    reads entries (except sensitive columns), the audit trail, analytics, runs and breakers
--     dlq_operator  also reads sensitive columns; replays, discards, resolves, parks, assigns, tags and notes;
--                   undoes such changes; starts and controls runs; controls breakers and automatic redelivery;
--                   marks failure groups; requests and decides approvals; runs jobs again
--     dlq_admin     also purges, erases, restores, and deletes jobs; switches capture; limits roles to queues and
--                   kinds; drops months after their retention, creates partitions, and rebuilds rollups; files
--                   failures that capture missed
--
-- No role may write to tables. Roles call functions, which write as the owner of the schema, so that
-- every change follows the state table and has an audit row, and audit rows cannot be changed.

CREATE OR REPLACE FUNCTION dlq.has_role(p_role text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT dlq.is_owner()
        OR coalesce((SELECT pg_has_role(dlq.caller(), r.oid, 'USAGE') FROM pg_roles r WHERE r.rolname = p_role), false)
$$;
COMMENT ON FUNCTION dlq.has_role IS 'Whether the caller has the role, which is one of dlqd''s, or owns the schema.';

CREATE OR REPLACE FUNCTION dlq.require_admin(p_action text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT dlq.has_role('dlq_admin') THEN
        RAISE EXCEPTION '%: % is not a dlq_admin', p_action, dlq.caller() USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_admin IS
    'Raises an error if the caller is neither a dlq_admin nor the owner of the schema.';

-- The view is a security barrier while any role has a scope (see dlq.fence_entries). Otherwise a condition of the
-- caller could see rows before the scope is checked. Even then, Postgres evaluates leakproof conditions below the
-- barrier, and a plan shows how many rows passed them. So texts that people wrote have || '' appended, which makes
-- conditions on them not leakproof.
CREATE OR REPLACE VIEW dlq.visible_entries WITH (security_barrier) AS
    SELECT e.id,
           e.event_id,
           e.river_job_id,
           e.job_created_at,
           e.queue,
           e.kind,
           e.job_kind,
           e.subscriber_id,
           e.source,
           e.priority,
           e.tags,
           e.original_event,
           e.edited_event,
           e.error_message,
           e.error_type,
           e.error_code || '' AS error_code,
           e.error_class,
           e.reported_class,
           e.error_stack_trace,
           e.error_context,
           e.fingerprint,
           e.retry_history,
           e.retry_count,
           e.max_retries,
           e.dlq_retry_count,
           e.dlq_max_retries,
           e.replay_attempts,
           e.status,
           e.strategy,
           e.rule,
           e.next_retry_at,
           e.waiting_for,
           e.ordering_key,
           e.order_place,
           e.redelivery_job_id,
           e.locked_by,
           e.locked_at,
           e.parked_by || '' AS parked_by,
           e.assigned_to || '' AS assigned_to,
           e.notes,
           e.resolution_strategy,
           e.resolved_by || '' AS resolved_by,
           e.resolution_notes || '' AS resolution_notes,
           e.resolution_timestamp,
           e.config_version,
           e.unique_key,
           e.unique_states,
           e.metadata,
           e.move,
           e.captured_by,
           e.first_failed_at,
           e.last_failed_at,
           e.created_at,
           e.filed_at,
           e.updated_at,
           e.closed_at,
           e.stage,
           e.error_title || '' AS error_title,
           e.destination,
           e.destination_url || '' AS destination_url
    FROM dlq.dead_letter_queue e
    -- The scope is a condition of the scan, not of a join above it: the plan of a join would show how many rows outside
    -- of the scope match a condition of the caller.
    WHERE (SELECT dlq.scope_patterns(dlq.scope())) IS NULL
        OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope())));
COMMENT ON VIEW dlq.visible_entries IS
    'The rows of dead_letter_queue in the caller''s scope, unmasked. Only dlq.entries reads it, and masks the '
    'columns.';

-- Conditions of the caller apply to the masked values. The columns are masked here, above the barrier, so that only
-- returned rows are masked.
CREATE OR REPLACE VIEW dlq.entries AS
    SELECT e.id,
           e.event_id,
           e.river_job_id,
           e.job_created_at,
           e.queue,
           e.kind,
           e.job_kind,
           CASE WHEN 'subscriber_id' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.subscriber_id IS NULL
               THEN e.subscriber_id ELSE dlq.masked_text(e.subscriber_id, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS subscriber_id,
           e.source,
           e.priority,
           CASE WHEN 'tags' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.tags = '{}' THEN e.tags
               ELSE ARRAY(SELECT dlq.masked_text(t, h.mask, dlq.sensitive_values(e.original_event, e.edited_event,
                   e.metadata, e.job_kind, h.mask)) FROM unnest(e.tags) t) END AS tags,
           CASE WHEN 'original_event' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.original_event IS NULL
               THEN e.original_event ELSE dlq.masked_json(e.original_event, dlq.event_path(e.job_kind), h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS original_event,
           CASE WHEN 'edited_event' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.edited_event IS NULL
               THEN e.edited_event ELSE dlq.masked_json(e.edited_event, dlq.event_path(e.job_kind), h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS edited_event,
           CASE WHEN 'error_message' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.error_message IS NULL
               THEN e.error_message ELSE dlq.masked_text(e.error_message, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS error_message,
           e.error_type,
           e.error_code,
           e.error_class,
           e.reported_class,
           CASE WHEN 'error_stack_trace' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.error_stack_trace IS NULL
               THEN e.error_stack_trace ELSE dlq.masked_text(e.error_stack_trace, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS error_stack_trace,
           CASE WHEN 'error_context' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.error_context IS NULL
               THEN e.error_context ELSE dlq.masked_json(e.error_context, NULL, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS error_context,
           e.fingerprint,
           CASE WHEN 'retry_history' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.retry_history = '[]'
               THEN e.retry_history ELSE dlq.masked_json(e.retry_history, NULL, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS retry_history,
           e.retry_count,
           e.max_retries,
           e.dlq_retry_count,
           e.dlq_max_retries,
           CASE WHEN 'replay_attempts' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.replay_attempts = '[]'
               THEN e.replay_attempts ELSE dlq.masked_json(e.replay_attempts, NULL, h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS replay_attempts,
           e.status,
           e.strategy,
           e.rule,
           e.next_retry_at,
           e.waiting_for,
           CASE WHEN h.mask IS NULL OR e.ordering_key IS NULL THEN e.ordering_key
               ELSE dlq.masked_text(e.ordering_key, h.mask, dlq.sensitive_values(e.original_event, e.edited_event,
                   e.metadata, e.job_kind, h.mask)) END AS ordering_key,
           e.order_place,
           e.redelivery_job_id,
           e.locked_by,
           e.locked_at,
           e.parked_by,
           e.assigned_to,
           CASE WHEN 'notes' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.notes IS NULL THEN e.notes
               ELSE dlq.masked_text(e.notes, h.mask, dlq.sensitive_values(e.original_event, e.edited_event, e.metadata,
                   e.job_kind, h.mask)) END AS notes,
           e.resolution_strategy,
           e.resolved_by,
           CASE WHEN h.mask IS NULL OR e.resolution_notes IS NULL THEN e.resolution_notes
               ELSE dlq.masked_text(e.resolution_notes, h.mask, dlq.sensitive_values(e.original_event, e.edited_event,
                   e.metadata, e.job_kind, h.mask)) END AS resolution_notes,
           e.resolution_timestamp,
           e.config_version,
           e.unique_key,
           e.unique_states,
           CASE WHEN 'metadata' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.metadata = '{}' THEN e.metadata
               ELSE dlq.masked_json(e.metadata, 'metadata', h.mask,
                   dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                       h.mask)) END AS metadata,
           CASE WHEN h.mask IS NULL OR e.move IS NULL THEN e.move ELSE dlq.masked_json(e.move, NULL, h.mask,
               dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind, h.mask)) END AS move,
           e.captured_by,
           e.first_failed_at,
           e.last_failed_at,
           e.created_at,
           e.filed_at,
           e.updated_at,
           e.closed_at,
           e.stage,
           dlq.next_step(e.status, e.strategy, e.rule, e.next_retry_at, e.waiting_for, e.error_class, e.parked_by,
               e.queue, e.kind, e.job_kind) AS next,
           CASE WHEN 'error_message' = ANY (h.columns) THEN NULL WHEN h.mask IS NULL OR e.error_title IS NULL
               THEN e.error_title
                ELSE dlq.masked_text(e.error_title, h.mask, dlq.sensitive_values(e.original_event, e.edited_event,
                    e.metadata, e.job_kind, h.mask)) END AS error_title,
           e.destination,
           CASE WHEN h.mask IS NULL OR e.destination_url IS NULL THEN e.destination_url
                ELSE dlq.masked_text(e.destination_url, h.mask,
                    dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind,
                    h.mask)) END AS destination_url
    FROM dlq.visible_entries e CROSS JOIN (SELECT dlq.hidden_columns() AS columns, dlq.mask(false) AS mask OFFSET 0) h;
COMMENT ON VIEW dlq.entries IS
    'dead_letter_queue as the caller may see it. Columns that the policy marks as sensitive (data.sensitiveColumns) '
    'are null for a dlq_reader. Values that it marks (data.sensitivePaths, data.sensitivePatterns) are *** for every '
    'caller: see dlq.reveal. The column next is the next step of an entry (dlq.next_step).';

-- A security barrier computes all rows before the first one is returned, and prevents partition pruning by status. It
-- is therefore off while no role has a scope.
CREATE OR REPLACE FUNCTION dlq.fence_entries() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    -- Of two concurrent changes, the later one sees both.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.fence_entries', 0));
    IF EXISTS (SELECT FROM dlq.role_scopes) THEN
        ALTER VIEW dlq.visible_entries SET (security_barrier);
    ELSE
        ALTER VIEW dlq.visible_entries SET (security_barrier = false);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.fence_entries IS
    'Makes dlq.visible_entries a security barrier while any role is limited to queues or kinds.';
SELECT dlq.fence_entries();

CREATE OR REPLACE FUNCTION dlq.on_role_scope() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.fence_entries();
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_role_scope IS 'Trigger role_scope_change: calls dlq.fence_entries.';

-- Because of the conditions on status and closed_at, the statement of find does not lock partitions of other states and
-- of months before the entries failed (see dlq.closed_since).
CREATE OR REPLACE FUNCTION dlq.find(p_filter jsonb DEFAULT '{}', p_limit integer DEFAULT 100,
    p_newest_first boolean DEFAULT true)
RETURNS SETOF dlq.dead_letter_queue
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_ids uuid[] := ARRAY(SELECT dlq.find_ids(p_filter, p_limit, NULL, p_newest_first)); -- in the caller's scope
BEGIN
    RETURN QUERY EXECUTE
        'SELECT m.* FROM (SELECT e AS entry FROM dlq.dead_letter_queue e WHERE e.id = ANY ($1) AND (e.closed_at IS NULL OR e.closed_at >= $2)'
        || CASE WHEN p_filter ? 'status' THEN ' AND '
            || dlq.filter_where(jsonb_build_object('status', p_filter -> 'status')) ELSE '' END
        || ') w CROSS JOIN LATERAL dlq.masked(w.entry, $3) m ORDER BY m.id '
        || CASE WHEN p_newest_first THEN 'DESC' ELSE 'ASC' END
        USING v_ids, dlq.closed_since(v_ids), dlq.mask();
END
$$;
COMMENT ON FUNCTION dlq.find IS
    'Entries that match a filter: {"status": "dlq_manual", "kind": "payment.*", "errorType": ["TIMEOUT_ERROR"], '
    '"maxAge": "2 days", "payload": {"customer": "cus_81"}}. Other fields: queue, errorClass, errorCode, '
    'destination, errorMessage (has all of these texts), fingerprint (or its first characters), rule, strategy, '
    'waitingFor, failedIn, assignee, source, subscriberId, orderingKey, tags, ids, messageId, jobId, rest (replay '
    'runs that have not sent the entry), again (in which its redelivery failed), after, before, minAge, '
    'minRetryCount, maxRetryCount, payloadAt ([{"path": ["customer", "id"], "values": ["cus_81"]}]). Columns that '
    'the policy hides from the caller are null.';

CREATE OR REPLACE FUNCTION dlq.set_role_scope(p_role name, p_scope jsonb, p_note text DEFAULT NULL,
    p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_admin('scope of a role');
    PERFORM dlq.require_everything('scope of a role');
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = p_role) THEN
        RAISE EXCEPTION 'scope of a role: there is no role %', p_role USING ERRCODE = 'DLQ02';
    END IF;
    IF p_scope IS NOT NULL AND (jsonb_typeof(p_scope) <> 'array' OR p_scope = '[]' OR EXISTS (
        SELECT FROM jsonb_array_elements(p_scope) g WHERE jsonb_typeof(g) <> 'object' OR g - 'queues' - 'kinds' <> '{}'
            OR jsonb_typeof(coalesce(g -> 'queues', '[]')) <> 'array'
            OR jsonb_typeof(coalesce(g -> 'kinds', '[]')) <> 'array'
            OR EXISTS (SELECT FROM jsonb_path_query(g, 'strict $.*[*]') p WHERE jsonb_typeof(p) <> 'string'
                OR length(p #>> '{}') NOT BETWEEN 1 AND 255))) THEN
        RAISE EXCEPTION 'scope of a role: invalid scope %', p_scope USING ERRCODE = 'DLQ04',
            HINT = 'Example: [{"queues": ["payments*"], "kinds": ["order.*"]}]; null for no limit.';
    END IF;
    DELETE FROM dlq.role_scopes s WHERE s.role = p_role;
    INSERT INTO dlq.role_scopes (role, queues, kinds)
    SELECT DISTINCT p_role, ARRAY(SELECT jsonb_array_elements_text(g -> 'queues')),
        ARRAY(SELECT jsonb_array_elements_text(g -> 'kinds')) FROM jsonb_array_elements(p_scope) g;
    PERFORM dlq.record_act('role ' || p_role, CASE WHEN p_scope IS NULL THEN 'not limited any more' ELSE 'limited' END,
        p_actor, p_note, jsonb_build_object('scope', p_scope));
END
$$;
COMMENT ON FUNCTION dlq.set_role_scope IS
    'Limits the members of a database role to queues and kinds: [{"queues": ["payments*"], "kinds": '
    '["order.*"]}], where * matches any text. A member of several roles sees what any of their rows allows. '
    'Null removes the limit. Writes an audit row.';

-- dlqd calls protect when the policy's list of sensitive data has changed. If the policy masks values, roles get no
-- privilege on columns that may contain such values: they read these columns through views and functions.
CREATE OR REPLACE FUNCTION dlq.protect(p_sensitive text[], p_masked jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table  regclass;
    v_hidden text[]; -- columns hidden from readers
    v_masked text[]; -- columns hidden from all roles
    v_role   text;
    v_seen   text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.protect', 0));
    INSERT INTO dlq.settings AS s (key, value) VALUES ('sensitive_columns', array_to_string(p_sensitive, ',')),
        ('sensitive', p_masked::text)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now();
    FOREACH v_role IN ARRAY ARRAY['dlq_reader', 'dlq_operator', 'dlq_admin'] LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role);
        FOR v_table, v_hidden, v_masked IN VALUES
            -- A record contains the payload, the key and the headers, which may contain the error.
            ('dlq.dead_letter_queue'::regclass, dlq.with_title(p_sensitive)
                || CASE WHEN p_sensitive <> '{}' THEN '{record}'::text[] END, dlq.masked_columns()),
            -- Edited payloads, patches, filters on payloads, and error texts are in other tables,
            -- too.
            ('dlq.dead_letter_transitions', CASE WHEN 'edited_event' = ANY (p_sensitive) THEN ARRAY['detail'] END
                || CASE WHEN 'notes' = ANY (p_sensitive) THEN ARRAY['note'] END, ARRAY['detail', 'note']),
            ('dlq.source_deliveries', CASE WHEN p_sensitive <> '{}' THEN ARRAY['content'] END, ARRAY['content']),
            ('dlq.job_facts', CASE WHEN p_sensitive <> '{}' THEN ARRAY['job'] END, ARRAY['job']),
            ('dlq.replay_runs', CASE WHEN p_sensitive && dlq.filtered_columns()
                THEN ARRAY['filter', 'patch', 'merge_patch'] END, ARRAY['filter', 'patch', 'merge_patch', 'note']),
            ('dlq.ordered_jobs', NULL, ARRAY['ordering_key']),
            ('dlq.operations', CASE WHEN p_sensitive && dlq.filtered_columns() THEN ARRAY['filter', 'args'] END
                || CASE WHEN 'notes' = ANY (p_sensitive) THEN ARRAY['note'] END, ARRAY['filter', 'args', 'note']),
            ('dlq.approvals', CASE WHEN p_sensitive && dlq.filtered_columns() THEN ARRAY['request'] END,
                ARRAY['request', 'note', 'decision', 'problem']),
            ('dlq.replay_run_entries', CASE WHEN 'error_message' = ANY (p_sensitive) THEN ARRAY['detail'] END,
                ARRAY['detail']),
            ('dlq.failure_groups', CASE WHEN 'error_message' = ANY (p_sensitive) THEN ARRAY['title'] END,
                ARRAY['title']),
            ('dlq.group_aliases', CASE WHEN 'error_message' = ANY (p_sensitive) THEN ARRAY['title'] END,
             ARRAY['title']),
            ('dlq.acts', CASE WHEN 'notes' = ANY (p_sensitive) THEN ARRAY['note'] END, ARRAY['detail', 'note'])
        LOOP
            v_hidden := CASE v_role WHEN 'dlq_reader' THEN coalesce(v_hidden, '{}') ELSE '{}' END
                || CASE WHEN p_masked ?| '{where,patterns}' THEN v_masked ELSE '{}' END;
            SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) INTO v_seen
            FROM pg_attribute a WHERE a.attrelid = v_table AND a.attnum > 0 AND NOT a.attisdropped
                AND a.attname <> ALL (v_hidden);
            EXECUTE format('REVOKE SELECT ON %s FROM %I', v_table, v_role);
            EXECUTE CASE WHEN v_hidden = '{}' THEN format('GRANT SELECT ON %s TO %I', v_table, v_role)
                ELSE format('GRANT SELECT (%s) ON %s TO %I', v_seen, v_table, v_role) END;
        END LOOP;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.protect IS
    'Grants dlq_reader all columns except p_sensitive. If p_masked (dlq.mask) masks anything, revokes the '
    'columns that may contain it from all roles.';

CREATE OR REPLACE FUNCTION dlq.install_roles() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_schema   regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.dead_letter_queue'::regclass);
    v_role     text;
    v_grant    record;
    v_function regprocedure;
    -- The functions that each role may call, beside those of the roles before it. Functions that only dlqd calls are
    -- not listed.
    v_functions constant jsonb := '{
        "dlq_reader": ["act_in_scope", "actor", "allowed_moves", "approved", "audit", "automatic_for",
            "breaker_in_scope", "by_rule", "caller", "capture_limit", "capture_mode", "capture_status",
            "captured_at", "check_destination", "chooses_all", "closed_since", "coarse_step", "count_groups",
            "count_rescues", "delete_view", "diff_runs", "error_types", "event_path", "filter_bounds", "filter_groups",
            "filter_path", "filter_patterns", "filter_values", "filter_where", "filter_words", "find",
            "find_ids", "first_id", "fixed_since", "flow", "group_entries", "group_names", "group_outcomes",
            "group_shares", "group_status", "groups", "has_card", "has_checkpoint", "has_role", "heat_map",
            "hidden_columns",
            "in_patterns", "in_scope", "is_luhn", "is_muted", "is_open", "is_owner", "is_person", "is_reader",
            "is_repeat", "is_restored", "job_table", "like_patterns", "mask", "mask_node", "mask_text",
            "masked_json", "masked_text", "muted_entries", "needs_mask", "next_step", "noisiest_sources",
            "oldest_entries", "one_group", "only_in_states", "operation", "operation_entries", "origin",
            "pattern", "policy_changes", "policy_version", "preview", "preview_groups", "preview_replay",
            "queue_scope", "ratio", "replay_calibration", "replay_figure_calibration", "replay_success", "replayable",
            "require_everything", "rescues", "retry_cost", "run_closures", "run_report",
            "save_view", "scope", "scope_patterns", "scope_where", "scope_within", "sensitive_columns",
            "sensitive_values", "stage_of", "stats", "step_for", "switched_on", "times", "to_uuid",
            "top_groups", "trail_begins", "trigger_state", "views", "with_title", "writing_jobs"],
        "dlq_operator": ["act_on", "act_where", "approve", "assign", "assign_group", "count_jobs",
            "default_partition_rows", "discard", "expire", "expired_partitions", "hold_restored", "jobs", "note",
            "open_breaker", "order_views", "park", "pause_feed", "pause_source", "paused_queues", "record_deploy",
            "record_reveal", "refresh_rollups", "refuse_approval", "reopen", "replay", "replay_back",
            "replay_cancel", "replay_end", "replay_go_on", "replay_pause", "replay_resume", "replay_set_rate",
            "replay_start", "request_approval", "reset_automatic", "reset_breaker", "resolve", "restored",
            "resume_automatic", "resume_restored", "resume_feed", "resume_source", "reveal", "revealed",
            "rewind_feed", "rewind_source", "river_leader", "run_again", "set_automatic", "set_group",
            "stop_automatic", "sweep_redeliveries", "trail", "undo", "unpark", "withdraw_approval"],
        "dlq_admin": ["backfill", "delete_entries", "delete_jobs", "drop_partition", "ensure_partition",
            "ensure_partitions", "erase", "erase_begin", "erase_leaves", "erase_statistics", "erase_step",
            "erased_entries", "missing_partitions", "rebuild_rollups", "reconcile", "set_capture",
            "set_role_scope", "restore_entries"]}';
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.protect', 0));
    EXECUTE format('REVOKE ALL ON ALL ROUTINES IN SCHEMA %s FROM PUBLIC', v_schema);
    FOREACH v_role IN ARRAY ARRAY['dlq_reader', 'dlq_operator', 'dlq_admin'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
                EXECUTE format('COMMENT ON ROLE %I IS %L', v_role, CASE v_role
                    WHEN 'dlq_reader' THEN 'dlqd: reads dead letters (except sensitive columns), the audit trail and analytics.'
                    WHEN 'dlq_operator' THEN 'dlqd: also reads sensitive columns; replays, discards, resolves and parks; controls replay runs and circuit breakers.'
                    ELSE 'dlqd: also purges, erases, restores, and manages partitions.' END);
                -- dlqd detach drops these roles.
                INSERT INTO dlq.settings AS s (key, value) VALUES ('roles_made', v_role)
                ON CONFLICT (key) DO UPDATE SET value = s.value || ',' || excluded.value, updated_at = now();
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN NULL; -- created by another database's dlqd
                WHEN insufficient_privilege THEN
                    RAISE NOTICE 'role % was not created, because % may not create roles; create it and run dlqd attach (or dlqd migrate up) again', v_role, current_user;
                    RETURN;
            END;
        END IF;
    END LOOP;
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO dlq_reader, dlq_operator, dlq_admin', v_schema);
    FOR v_grant IN
        SELECT c.oid::regclass AS name FROM pg_class c
        -- Roles get no privilege on the tables and the view that are named here: functions and views
        -- read them.
        WHERE c.relnamespace = v_schema AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition
            AND c.relname NOT IN ('tokens', 'sessions', 'saved_views', 'reviews', 'last_acts', 'feeds',
                'visible_entries')
    LOOP
        EXECUTE format('GRANT SELECT ON %s TO dlq_reader, dlq_operator, dlq_admin', v_grant.name);
    END LOOP;
    EXECUTE format('REVOKE ALL ON %s.visible_entries FROM dlq_reader, dlq_operator, dlq_admin', v_schema);
    FOR v_grant IN
        SELECT r.key AS role, f.value AS name FROM jsonb_each(v_functions) r CROSS
        JOIN jsonb_array_elements_text(r.value) f
    LOOP
        FOR v_function IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = v_schema AND p.proname = v_grant.name LOOP
            EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO dlq_admin', v_function);
            IF v_grant.role <> 'dlq_admin' THEN
                EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO dlq_operator', v_function);
            END IF;
            IF v_grant.role = 'dlq_reader' THEN
                EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO dlq_reader', v_function);
            ELSIF NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = v_function AND p.prokind = 'p') THEN
                -- These functions run as the owner of the schema. Names in them come from
                -- pg_catalog or are qualified.
                EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp', v_function);
            END IF;
        END LOOP;
    END LOOP;
    -- The policies of row-level security call these functions as the role that reads the table, no matter which role
    -- granted it the privilege.
    EXECUTE format('GRANT EXECUTE ON FUNCTION %1$s.scope(), %1$s.in_scope(text, text, jsonb), %1$s.in_patterns(text, text, text[]), %1$s.scope_patterns(jsonb), %1$s.like_patterns(jsonb), %1$s.scope_within(jsonb, jsonb), %1$s.act_in_scope(text, jsonb), %1$s.breaker_in_scope(text, jsonb), %1$s.caller(), %1$s.to_uuid(text) TO PUBLIC', v_schema);
    PERFORM dlq.protect(dlq.sensitive_columns(),
        coalesce((SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'sensitive'), '{}'));
END
$$;
COMMENT ON FUNCTION dlq.install_roles IS
    'Creates the roles dlq_reader, dlq_operator and dlq_admin, if they are missing, and grants them their '
    'privileges. If this role may not create them, it only raises a notice.';
