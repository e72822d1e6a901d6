-- Operations and their undo. An operation is one change by an operator, of any number of entries. The audit row of each
-- changed entry has the operation's id, and the former values that an undo restores (detail: was). The request of the
-- operation is a row of operations; the entries that it did not change are in operation_unchanged.

CREATE OR REPLACE FUNCTION dlq.record_operation(p_id uuid, p_action text, p_filter jsonb, p_args jsonb, p_actor text,
    p_note text, p_ids uuid[], p_changed uuid[], p_undoes uuid DEFAULT NULL, p_why text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_actor     constant text := dlq.actor(p_actor);
    v_unchanged constant uuid[] := ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(p_changed));
    v_since     constant timestamptz := dlq.closed_since(p_ids);
    v_counts    jsonb := '{}';
    v_capacity  integer;
BEGIN
    IF p_ids = '{}' AND p_undoes IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO dlq.operations AS o (id, action, filter, args, actor, origin, note, scope, undoes)
    VALUES (p_id, p_action, p_filter, p_args, v_actor, dlq.origin(v_actor, p_actor), p_note, dlq.scope(), p_undoes)
    ON CONFLICT (id) DO NOTHING;
    IF v_unchanged <> '{}' THEN
        v_capacity := 10000 - (SELECT count(*)
            FROM (SELECT FROM dlq.operation_unchanged u WHERE u.operation_id = p_id LIMIT 10000) l);
        WITH reasons AS MATERIALIZED (
            SELECT i.id, CASE WHEN p_why IS NOT NULL THEN p_why
                              WHEN e.status IS NULL THEN 'it is gone'
                              WHEN p_action = 'reopen' AND e.status IN ('dlq_resolved', 'dlq_archived', 'dlq_returned')
                                  THEN 'its payload was erased, or its job has an open entry again'
                              ELSE 'cannot ' || p_action || ' from ' || e.status END AS reason
            FROM unnest(v_unchanged) i (id)
            LEFT JOIN LATERAL (SELECT q.status FROM dlq.dead_letter_queue q WHERE q.id = i.id
                AND (q.closed_at IS NULL OR q.closed_at >= v_since) LIMIT 1) e ON true
        ), stored AS (
            INSERT INTO dlq.operation_unchanged (operation_id, entry_id, reason) SELECT p_id, w.id, w.reason
            FROM reasons w ORDER BY w.id LIMIT v_capacity ON CONFLICT DO NOTHING
        ) SELECT jsonb_object_agg(c.reason, c.n) INTO v_counts
            FROM (SELECT w.reason, count(*) AS n FROM reasons w GROUP BY w.reason) c;
    END IF;
    PERFORM set_config('dlq.recording', txid_current()::text, true); -- dlq.on_operation allows the change
    UPDATE dlq.operations o SET looked = o.looked + cardinality(p_ids), changed = o.changed + cardinality(p_changed),
        last_at = clock_timestamp(),
        unchanged = (SELECT coalesce(jsonb_object_agg(c.key, c.n), '{}') FROM (
            SELECT r.key, sum(r.value::bigint) AS n FROM (SELECT * FROM jsonb_each_text(o.unchanged) UNION ALL SELECT *
                FROM jsonb_each_text(v_counts)) r GROUP BY r.key) c)
    WHERE o.id = p_id AND o.actor = v_actor AND o.db_user = session_user
        AND (o.action = p_action OR o.undoes IS NOT NULL);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'operation %: belongs to another caller or action', p_id USING ERRCODE = 'DLQ04';
    END IF;
    PERFORM set_config('dlq.recording', '', true);
END
$$;
COMMENT ON FUNCTION dlq.record_operation IS
    'Records the request of a batch of an operation, the number of entries it changed, and why it skipped others (at '
    'most 10,000 of these, but all are counted). Raises DLQ04 if the operation is of another caller or action.';

CREATE OR REPLACE FUNCTION dlq.one_operation(p_id uuid) RETURNS dlq.operations
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_operation dlq.operations;
BEGIN
    SELECT * INTO v_operation FROM dlq.operations o WHERE o.id = p_id AND dlq.scope_within(o.scope, dlq.scope());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'operation %: there is no such operation', p_id USING ERRCODE = 'DLQ02';
    END IF;
    RETURN v_operation;
END
$$;
COMMENT ON FUNCTION dlq.one_operation IS 'Returns an operation in the caller''s scope; raises DLQ02 if there is none.';

CREATE OR REPLACE FUNCTION dlq.operation(p_id uuid) RETURNS SETOF dlq.operations
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_operation dlq.operations := dlq.one_operation(p_id);
    v_mask      constant jsonb := dlq.mask(false);
BEGIN
    v_operation.note := CASE WHEN NOT 'notes' = ANY (dlq.hidden_columns())
        THEN dlq.masked_text(v_operation.note, v_mask) END;
    v_operation.filter := CASE WHEN NOT dlq.hidden_columns() && dlq.filtered_columns()
        THEN dlq.masked_detail(v_operation.filter, v_mask) END;
    v_operation.args := CASE WHEN NOT dlq.hidden_columns() && dlq.filtered_columns()
        THEN dlq.masked_detail(v_operation.args, v_mask) ELSE '{}' END;
    RETURN NEXT v_operation;
END
$$;
COMMENT ON FUNCTION dlq.operation IS
    'Returns an operation: who, when, with which filter, how many entries it changed, and why it skipped '
    'others.';

CREATE OR REPLACE FUNCTION dlq.operation_entries(p_id uuid, p_limit integer DEFAULT 1000, p_after uuid DEFAULT NULL)
    RETURNS TABLE (entry_id uuid, changed boolean, reason text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_operation constant dlq.operations := dlq.one_operation(p_id);
    v_scope     constant jsonb := dlq.scope();
BEGIN
    RETURN QUERY SELECT l.entry_id, l.changed, l.reason FROM (
        (SELECT DISTINCT ON (t.entry_id) t.entry_id, true AS changed, t.reason FROM dlq.dead_letter_transitions t
         WHERE t.at >= v_operation.started_at AND t.at <= v_operation.last_at AND t.operation = p_id
             AND (p_after IS NULL OR t.entry_id > p_after) AND dlq.in_scope(t.queue, t.kind, v_scope)
         ORDER BY t.entry_id, t.at DESC LIMIT p_limit)
        UNION ALL
        (SELECT u.entry_id, false, u.reason FROM dlq.operation_unchanged u WHERE u.operation_id = p_id
            AND (p_after IS NULL OR u.entry_id > p_after) ORDER BY u.entry_id LIMIT p_limit)) l
    ORDER BY l.entry_id LIMIT p_limit;
END
$$;
COMMENT ON FUNCTION dlq.operation_entries IS
    'The entries of an operation, in order of capture after p_after: what it did to each, or why it skipped it '
    '(10,000 skipped ones are kept).';

-- undo restores entries that are still in the state in which the operation left them. Exception: entries that the
-- operation discarded, expired or resolved always become dlq_manual. It reads the audit rows
-- of the operation in order. The next call can continue after the last row read, as part of the same undo (p_as).
CREATE OR REPLACE FUNCTION dlq.undo(p_operation uuid, p_note text DEFAULT NULL, p_actor text DEFAULT session_user,
    p_limit integer DEFAULT NULL, p_after timestamptz DEFAULT NULL, p_after_id bigint DEFAULT NULL,
    p_as uuid DEFAULT NULL,
    OUT operation uuid, OUT looked integer, OUT changed integer, OUT became jsonb, OUT last timestamptz,
    OUT last_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    v_operation  constant dlq.operations := dlq.one_operation(p_operation);
    v_scope      constant jsonb := dlq.scope();
    v_actor      constant text := dlq.actor(p_actor);
    v_status     constant dlq.dead_letter_status := CASE v_operation.action WHEN 'discard' THEN 'dlq_archived'
        WHEN 'expire' THEN 'dlq_archived' WHEN 'resolve' THEN 'dlq_resolved' WHEN 'park' THEN 'dlq_manual'
        WHEN 'unpark' THEN 'dlq_pending' END;
    v_undo       constant uuid := coalesce(p_as, dlq.uuid_v7());
    v_ids        uuid[];
    v_old_values jsonb;
    v_since      timestamptz;
    v_unmoved    uuid[];
    v_changed    uuid[];
    v_locked     record;
BEGIN
    IF v_operation.action NOT IN ('discard', 'expire', 'resolve', 'park', 'unpark', 'assign', 'tag', 'note') THEN
        RAISE EXCEPTION 'operation %: % cannot be undone', p_operation, v_operation.action USING ERRCODE = 'DLQ01',
            HINT = 'These can be undone: discard, expire, resolve, park, unpark, assign, tag, note.';
    END IF;
    SELECT coalesce(array_agg(t.entry_id ORDER BY t.entry_id), '{}'),
        coalesce(jsonb_object_agg(t.entry_id, coalesce(t.detail -> 'was', '{}')), '{}'), max(t.at),
        (array_agg(t.id ORDER BY t.at DESC, t.id DESC))[1]
    INTO v_ids, v_old_values, last, last_id
    FROM (SELECT m.* FROM dlq.dead_letter_transitions m
          WHERE m.at >= v_operation.started_at AND m.at <= v_operation.last_at AND m.operation = p_operation
              AND (p_after IS NULL OR (m.at, m.id) > (p_after, p_after_id)) AND dlq.in_scope(m.queue, m.kind, v_scope)
          ORDER BY m.at, m.id LIMIT p_limit) t;
    v_since := dlq.closed_since(v_ids);
    SELECT l.ids, l.stages INTO v_locked FROM dlq.lock_entries(v_ids, enum_range(NULL::dlq.dead_letter_status)) l;
    -- An entry is unmoved if its last move is the move of the operation, or if it still has the values that the
    -- operation set.
    v_unmoved := ARRAY(
        SELECT e.id FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (v_locked.ids) AND e.stage = ANY (v_locked.stages)
            AND (e.closed_at IS NULL OR e.closed_at >= v_since)
          -- For assign, tag and note: leave out an entry if a later operation of the same kind changed
          -- it and was not undone, or if an undo of this operation has changed it already.
          AND (v_operation.action NOT IN ('assign', 'tag', 'note') OR NOT EXISTS (
              SELECT FROM dlq.dead_letter_transitions m JOIN dlq.operations o ON o.id = m.operation
              WHERE m.entry_id = e.id AND m.at >= v_operation.started_at AND m.operation <> p_operation
                  AND (o.undoes = p_operation OR o.action = v_operation.action AND o.started_at > v_operation.started_at
                  AND NOT EXISTS (SELECT FROM dlq.dead_letter_transitions b JOIN dlq.operations w ON w.id = b.operation
                      WHERE b.entry_id = e.id AND b.at >= o.started_at AND w.undoes = o.id))))
          AND CASE v_operation.action
              WHEN 'assign' THEN v_old_values -> e.id::text ? 'assignee'
                  AND e.assigned_to IS NOT DISTINCT FROM nullif(v_operation.args ->> 'assignee', '')
              WHEN 'tag' THEN v_old_values -> e.id::text -> 'added' <> '[]'
                  AND e.tags @> ARRAY(SELECT jsonb_array_elements_text(v_old_values -> e.id::text -> 'added'))
              WHEN 'note' THEN v_old_values -> e.id::text ? 'notes' AND e.notes IS NOT DISTINCT FROM v_operation.note
              ELSE e.status = v_status AND p_operation = (SELECT m.operation FROM dlq.dead_letter_transitions m
                  WHERE m.entry_id = e.id AND m.at >= v_operation.started_at
                      AND m.from_status IS DISTINCT FROM m.to_status ORDER BY m.at DESC, m.id DESC LIMIT 1) END
        ORDER BY e.id);
    PERFORM dlq.record_operation(v_undo, 'undo', NULL, '{}', p_actor, p_note, '{}', '{}', p_operation);
    CASE v_operation.action
    WHEN 'discard', 'expire', 'resolve' THEN
        v_changed := ARRAY(SELECT dlq.act_on('reopen', v_unmoved, p_actor,
            coalesce(p_note, 'operation ' || p_operation || ' was undone'), jsonb_build_object('operation', v_undo)));
    WHEN 'park' THEN
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_pending', strategy = (w.was ->> 'strategy')::dlq.strategy,
            rule = w.was ->> 'rule', next_retry_at = coalesce((w.was ->> 'nextRetryAt')::timestamptz, now()),
            waiting_for = w.was ->> 'waitingFor',
            tags = ARRAY(SELECT t FROM unnest(e.tags) t WHERE NOT coalesce(w.was -> 'added' ? t, false)),
            notes = CASE WHEN w.was ? 'notes' AND e.notes = v_operation.note THEN w.was ->> 'notes' ELSE e.notes END,
            move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'operation ' || p_operation
                || ' undone', 'note', p_note, 'operation', v_undo)
        FROM (SELECT i.id, v_old_values -> i.id::text AS was FROM unnest(v_unmoved) i (id)) w WHERE e.id = w.id
            AND e.status = 'dlq_manual' AND e.stage = 'open';
        PERFORM dlq.wake();
    WHEN 'unpark' THEN
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_manual',
            strategy = coalesce((w.was ->> 'strategy')::dlq.strategy, 'manual'), rule = w.was ->> 'rule',
            parked_by = w.was ->> 'parkedBy',
            notes = CASE WHEN w.was ? 'notes' AND e.notes = v_operation.note THEN w.was ->> 'notes' ELSE e.notes END,
            move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'operation ' || p_operation
                || ' undone', 'note', p_note, 'operation', v_undo)
        FROM (SELECT i.id, v_old_values -> i.id::text AS was FROM unnest(v_unmoved) i (id)) w WHERE e.id = w.id
            AND e.status = 'dlq_pending' AND e.stage = 'open';
    ELSE
        PERFORM dlq.note_on(v_unmoved, p_actor, 'operation ' || p_operation || ' undone', p_note,
            v_locked.stages, v_undo);
        UPDATE dlq.dead_letter_queue e SET
            assigned_to = CASE WHEN w.was ? 'assignee' THEN w.was ->> 'assignee' ELSE e.assigned_to END,
            notes = CASE WHEN w.was ? 'notes' AND e.notes IS NOT DISTINCT FROM v_operation.note THEN w.was ->> 'notes'
                ELSE e.notes END,
            tags = ARRAY(SELECT t FROM unnest(e.tags) t WHERE NOT coalesce(w.was -> 'added' ? t, false))
        FROM (SELECT i.id, v_old_values -> i.id::text AS was FROM unnest(v_unmoved) i (id)) w WHERE e.id = w.id
            AND e.stage = ANY (v_locked.stages) AND (e.closed_at IS NULL OR e.closed_at >= v_since);
    END CASE;
    v_changed := coalesce(v_changed, v_unmoved);
    -- act_on has recorded the entries that it reopened.
    PERFORM dlq.record_operation(v_undo, 'undo', NULL, '{}', p_actor, p_note,
        CASE WHEN v_operation.action IN ('discard', 'expire', 'resolve') THEN ARRAY(SELECT unnest(v_ids) EXCEPT
            SELECT unnest(v_unmoved)) ELSE v_ids END,
        CASE WHEN v_operation.action IN ('discard', 'expire', 'resolve') THEN '{}' ELSE v_unmoved END, p_operation,
        'it has moved on since');
    operation := v_undo;
    looked := cardinality(v_ids);
    changed := cardinality(v_changed);
    SELECT coalesce(jsonb_object_agg(s.status, s.n), '{}') INTO became
    FROM (SELECT e.status, count(*) AS n FROM dlq.dead_letter_queue e WHERE e.id = ANY (v_changed)
        AND (e.closed_at IS NULL OR e.closed_at >= v_since) GROUP BY e.status) s;
END
$$;
COMMENT ON FUNCTION dlq.undo IS
    'Undoes an operation (dlq.operations): discard, expire, resolve, park, unpark, assign, tag or note. Entries that '
    'still have the status or values that the operation gave them get the earlier ones (after discard, expire and '
    'resolve: dlq_manual); others are skipped. Raises DLQ01 for other operations. Returns the id of the undo, how '
    'many entries it read, how many it changed, and their states now. p_limit: at most so many, after the audit row '
    'with p_after and p_after_id, as part of the undo p_as.';
