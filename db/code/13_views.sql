-- Saved views: named lists of entries. The query of a view is text in the filter language. The
-- database stores that text; only Go code parses it (internal/filter).

-- masked_query masks a query for users other than its owner, because the values that a query looks
-- for may name a person. The value of payload.<path> is masked if that path is sensitive, as in
-- dlq.masked_detail. After "payload:" comes JSON, and this function cannot tell where the JSON ends,
-- so it masks the whole rest of the query.
CREATE OR REPLACE FUNCTION dlq.masked_query(p_query text, p_mask jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_query text := p_query;
    v_term  text[];
    v_at    text;
BEGIN
    IF p_mask ? 'where' THEN
        FOR v_term IN
            SELECT regexp_matches(p_query,
                '(\mpayload((?:\.(?:"(?:[^"\\]|\\.)*"|[^\s".:]+))+):)((?:"(?:[^"\\]|\\.)*"|[^\s"])+)', 'gi')
        LOOP
            -- v_at is the path as a JSON Pointer.
            SELECT string_agg('/' || replace(replace(CASE WHEN k.key[1] LIKE '"%'
                       THEN regexp_replace(btrim(k.key[1], '"'), '\\(.)', '\1', 'g')
                       ELSE k.key[1] END, '~', '~0'), '/', '~1'), '' ORDER BY k.place) INTO v_at
            FROM regexp_matches(v_term[2], '\.("(?:[^"\\]|\\.)*"|[^\s".:]+)', 'g') WITH ORDINALITY k (key, place);
            IF dlq.masked_at(v_at, '"x"', p_mask) = '"***"' THEN
                v_query := replace(v_query, v_term[1] || v_term[3], v_term[1] || '"***"');
            END IF;
        END LOOP;
        v_query := regexp_replace(v_query, '(\mpayload:).*', '\1"***"', 'i');
    END IF;
    RETURN dlq.masked_text(v_query, p_mask);
END
$$;
COMMENT ON FUNCTION dlq.masked_query IS 'The query of a saved view, masked as filters are.';

CREATE OR REPLACE FUNCTION dlq.views(p_actor text DEFAULT session_user)
RETURNS TABLE (owner text, name text, query text, columns text[], sort text, shared boolean, created_at timestamptz,
    updated_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_actor constant text := dlq.actor(p_actor);
    v_scope constant jsonb := dlq.scope();
    v_mask  constant jsonb := dlq.mask(false);
BEGIN
    RETURN QUERY SELECT v.owner, v.name,
        CASE v.owner WHEN v_actor THEN v.query ELSE dlq.masked_query(v.query, v_mask) END,
        v.columns, v.sort, v.shared, v.created_at, v.updated_at
    FROM dlq.saved_views v
    WHERE v.owner = v_actor OR v.shared AND dlq.scope_within(v.scope, v_scope)
        AND NOT (dlq.is_reader() AND v.query ~* '\m(payload|subscriber|tag|key:)')
      -- Words outside of fields are searched for in error messages. A caller who may not see error messages does not
      -- see a query with such words.
      AND NOT ('error_message' = ANY (dlq.hidden_columns())
          AND regexp_replace(v.query, '(^|\s)[[:alpha:].]+:("(?:[^"\\]|\\.)*"|\S*)', ' ', 'g') ~ '\S')
    ORDER BY v.place NULLS LAST, v.owner <> v_actor, v.name;
END
$$;
COMMENT ON FUNCTION dlq.views IS 'Saved views: those with a place (see dlq.order_views), then the caller''s own, then those that others share.';

CREATE OR REPLACE FUNCTION dlq.save_view(p_name text, p_query text, p_columns text[] DEFAULT '{}',
    p_sort text DEFAULT '', p_shared boolean DEFAULT false, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_actor constant text := dlq.actor(p_actor);
    v_other text;
BEGIN
    IF coalesce(btrim(p_name) <> p_name OR p_name !~ '^[^[:cntrl:]]{1,100}$', true) OR octet_length(p_query) > 4096
        OR length(p_sort) > 64 OR cardinality(p_columns) > 40
        OR EXISTS (SELECT FROM unnest(p_columns) c WHERE c IS NULL OR c !~ '^[A-Za-z][A-Za-z0-9.]{0,63}$') THEN
        RAISE EXCEPTION 'saved view: invalid name, query, columns or sort order' USING ERRCODE = 'DLQ04',
            HINT = 'Limits: name 1 to 100 characters, query 4096 bytes, sort order 64 characters, 40 columns, such as errorType.';
    END IF;
    IF p_shared AND NOT dlq.has_role('dlq_operator') THEN
        RAISE EXCEPTION 'saved view %: you may not share it', p_name USING ERRCODE = 'DLQ06',
            HINT = 'This requires the role operator.';
    END IF;
    -- One session saves a view at a time, so that the limit and the unique names hold.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.save_view', 0));
    SELECT v.owner INTO v_other FROM dlq.saved_views v WHERE p_shared AND v.shared AND v.name = p_name
        AND v.owner <> v_actor;
    IF FOUND THEN
        RAISE EXCEPTION 'saved view %: another user shares a view with this name', p_name USING ERRCODE = 'DLQ01';
    END IF;
    IF (SELECT count(*) FROM dlq.saved_views v WHERE v.owner = v_actor AND v.name <> p_name) >= 100 THEN
        RAISE EXCEPTION 'saved view %: you have 100 views, which is the limit', p_name USING ERRCODE = 'DLQ04';
    END IF;
    INSERT INTO dlq.saved_views AS v (owner, name, query, columns, sort, shared, scope)
    VALUES (v_actor, p_name, p_query, p_columns, p_sort, p_shared, dlq.scope())
    ON CONFLICT ON CONSTRAINT saved_views_pkey DO UPDATE SET query = excluded.query, columns = excluded.columns,
    sort = excluded.sort, shared = excluded.shared, scope = excluded.scope, updated_at = now();
    PERFORM dlq.record_act('saved view ' || p_name, CASE WHEN p_shared THEN 'saved, and shared' ELSE 'saved' END,
        p_actor);
END
$$;
COMMENT ON FUNCTION dlq.save_view IS
    'Creates or replaces a saved view of the caller: its query as typed, its columns, its sort order, and whether it '
    'is shared. A caller has at most 100 views (DLQ04). Only operators share views (DLQ06), and no two users share '
    'views of one name (DLQ01).';

CREATE OR REPLACE FUNCTION dlq.delete_view(p_name text, p_owner text DEFAULT NULL, p_actor text DEFAULT session_user)
    RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_owner <> dlq.actor(p_actor) THEN
        PERFORM dlq.require_admin('delete a view of another user'),
            dlq.require_everything('delete a view of another user');
    END IF;
    DELETE FROM dlq.saved_views v WHERE v.name = p_name AND v.owner = coalesce(p_owner, dlq.actor(p_actor))
        AND (p_owner IS NULL OR p_owner = dlq.actor(p_actor) OR v.shared);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'saved view %: you have no view with this name', p_name USING ERRCODE = 'DLQ02';
    END IF;
    PERFORM dlq.record_act('saved view ' || p_name, 'deleted', p_actor, NULL, jsonb_build_object('owner', p_owner));
END
$$;
COMMENT ON FUNCTION dlq.delete_view IS
    'Deletes one of the caller''s saved views, or, as an admin, a view that p_owner shares.';

-- The place belongs to the view, so a shared view has the same place for every user who sees it.
CREATE OR REPLACE FUNCTION dlq.order_views(p_names text[], p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT dlq.has_role('dlq_operator') THEN
        RAISE EXCEPTION 'saved views: you may not order them' USING ERRCODE = 'DLQ06',
            HINT = 'This requires the role operator.';
    ELSIF cardinality(p_names) > 1000 THEN
        RAISE EXCEPTION 'saved views: more than 1,000 names' USING ERRCODE = 'DLQ04';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.save_view', 0));
    UPDATE dlq.saved_views v SET place = array_position(p_names, v.name)
    FROM dlq.views(p_actor) w
    WHERE v.owner = w.owner AND v.name = w.name AND v.place IS DISTINCT FROM array_position(p_names, v.name);
    PERFORM dlq.record_act('saved views', 'ordered', p_actor);
END
$$;
COMMENT ON FUNCTION dlq.order_views IS
    'Sets the places of the saved views that the caller sees: those named, in this order; the others have none.';
