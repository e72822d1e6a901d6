-- Bulk operations: filters, replay runs, and moves of many entries.

CREATE OR REPLACE FUNCTION dlq.first_id(p_at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (lpad(to_hex(least(greatest(floor(extract(epoch FROM p_at) * 1000), 0), 281474976710655)::bigint), 12, '0')
    || repeat('0', 20))::uuid; -- 48 bits of milliseconds since 1970
COMMENT ON FUNCTION dlq.first_id IS
    'The smallest id of an entry that was captured at p_at; ids sort by time. Times are clamped to the range of '
    '48 bits: 1970 to 10889.';

CREATE OR REPLACE FUNCTION dlq.captured_at(p_id uuid) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN to_timestamp(('x' || substr(replace(p_id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0);
COMMENT ON FUNCTION dlq.captured_at IS 'When the job of an entry failed, from the entry''s id, to the millisecond.';

-- If every element of the scope names its queues without patterns, the condition also lists the
-- queues, so that Postgres can use an index.
CREATE OR REPLACE FUNCTION dlq.scope_where(p_scope jsonb) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN p_scope IS NULL THEN '' ELSE
        coalesce((SELECT ' AND e.queue IN (' || string_agg(quote_literal(q), ', ') || ')'
            FROM jsonb_array_elements(p_scope) g CROSS JOIN jsonb_array_elements_text(g -> 'queues') q
                  HAVING bool_and(position('*' IN q) = 0) AND NOT EXISTS (SELECT FROM jsonb_array_elements(p_scope) a
                      WHERE coalesce(a -> 'queues', '[]') = '[]')), '')
        || format(' AND dlq.in_scope(e.queue, e.kind, %L::jsonb)', p_scope) END
$$;
COMMENT ON FUNCTION dlq.scope_where IS
    'Returns the SQL condition, to be appended to others, that a row e is in a scope (see dlq.scope).';

-- filter_words is IMMUTABLE, so that the planner computes the values from the filter (a parameter) and plans with these
-- values.
CREATE OR REPLACE FUNCTION dlq.filter_words(p_filter jsonb, p_key text) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ARRAY(SELECT coalesce(w, '')
        FROM jsonb_array_elements_text(CASE jsonb_typeof(p_filter -> p_key) WHEN 'array' THEN p_filter -> p_key
            ELSE jsonb_build_array(p_filter -> p_key) END) w)
$$;
COMMENT ON FUNCTION dlq.filter_words IS 'The values of a filter field, which holds one value or a list.';

CREATE OR REPLACE FUNCTION dlq.filter_patterns(p_filter jsonb, p_key text, p_part boolean DEFAULT false) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ARRAY(SELECT CASE WHEN p_part THEN '%' || k || '%' ELSE replace(k, '*', '%') END
                 FROM (SELECT replace(replace(replace(w, '\', '\\'), '%', '\%'), '_', '\_')
                     FROM unnest(dlq.filter_words(p_filter, p_key)) w) l (k))
$$;
COMMENT ON FUNCTION dlq.filter_patterns IS
    'The values of a filter field as LIKE patterns: * matches any text; with p_part, a value matches anywhere '
    'in a text.';

CREATE OR REPLACE FUNCTION dlq.filter_path(p_keys jsonb) RETURNS jsonpath
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ('lax $' || string_agg('.' || to_jsonb(k.key)::text, '' ORDER BY k.place) || '[*]')::jsonpath
    FROM jsonb_array_elements_text(p_keys) WITH ORDINALITY k (key, place)
$$;
COMMENT ON FUNCTION dlq.filter_path IS
    'The JSON path (lax) to a value in payloads, made from its keys, the outermost first. Where a value is an '
    'array, the path matches its elements.';

-- filter_groups returns the results of dlq.group_names for all groups whose fingerprints begin with one of the texts.
CREATE OR REPLACE FUNCTION dlq.filter_groups(p_fingerprints text[], p_queues text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    SELECT ARRAY(
        SELECT a.fingerprint FROM dlq.group_aliases a
        WHERE EXISTS (SELECT FROM unnest(p_fingerprints) w WHERE w <> '' AND starts_with(a.former, w))
          AND (p_queues IS NULL OR a.queue LIKE ANY (p_queues))
        UNION
        (SELECT a.former FROM dlq.group_aliases a
         WHERE EXISTS (SELECT FROM unnest(p_fingerprints) w WHERE w <> '' AND starts_with(a.fingerprint, w))
           AND (p_queues IS NULL OR a.queue LIKE ANY (p_queues)) AND a.main
         ORDER BY a.learned_at DESC LIMIT 100))
$$;
COMMENT ON FUNCTION dlq.filter_groups IS
    'More fingerprints that a filter for failure groups (fingerprints or their first characters) has to match '
    'after a change of the grouping method (see dlq.group_aliases): all groups that continue former ones, and '
    'at most 100 former groups.';

-- filter_where turns a filter into a SQL condition. The condition contains only constants and enum
-- labels; every other value of the filter is read from parameter $1, which rules out SQL injection.
CREATE OR REPLACE FUNCTION dlq.filter_where(p_filter jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_key    text;
    v_where  text := 'true';
    v_words  text[];
    v_equals text; -- the condition that a column has one of the values
    v_like   text; -- the same condition, but the values may be patterns
    v_names  text[]; -- further fingerprints
    v_before text;
    v_mask   constant jsonb := dlq.mask();
    v_event  constant text :=
        'CASE WHEN e.job_kind = ''dlqd_message'' THEN e.original_event -> ''payload'' ELSE e.original_event END';
BEGIN
    IF jsonb_typeof(p_filter) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'filter: must be a JSON object' USING ERRCODE = 'DLQ04';
    END IF;
    FOR v_key IN SELECT jsonb_object_keys(p_filter) LOOP
        v_words := dlq.filter_words(p_filter, v_key);
        -- A single value is compared with =, so that an index returns the entries in order.
        v_equals := CASE WHEN cardinality(v_words) = 1 THEN format(' = (dlq.filter_words($1, %L))[1]', v_key)
            ELSE format(' = ANY (dlq.filter_words($1, %L))', v_key) END;
        v_like := CASE WHEN position('*' IN array_to_string(v_words, '')) > 0
            THEN format(' LIKE ANY (dlq.filter_patterns($1, %L))', v_key) ELSE v_equals END;
        v_before := v_where;
        v_where := v_where || ' AND ' || CASE v_key
            -- Enum labels are constants in the condition, so that the plan excludes partitions without these states and
            -- does not lock them.
            WHEN 'status'        THEN (
                SELECT format('e.status IN (%s) AND e.stage IN (%s)',
                    coalesce(string_agg(quote_literal(s.word::dlq.dead_letter_status), ', '), 'NULL'),
                              coalesce(string_agg(DISTINCT quote_literal(dlq.stage_of(s.word::dlq.dead_letter_status))
                                  || CASE s.word WHEN 'dlq_pending' THEN ', ''inbox''' ELSE '' END, ', '), 'NULL'))
                FROM unnest(v_words) s (word))
            WHEN 'queue'         THEN 'e.queue' || v_like
            WHEN 'kind'          THEN 'e.kind' || v_like
            WHEN 'errorType'     THEN 'e.error_type' || v_equals
            WHEN 'errorClass'    THEN 'e.error_class' || v_equals
            WHEN 'errorCode'     THEN 'e.error_code' || v_equals
            WHEN 'destination'   THEN 'e.destination' || v_equals
            -- With masking, the masked message must match, too; otherwise a filter could find
            -- masked values.
            WHEN 'errorMessage'  THEN 'e.error_message ILIKE ALL (dlq.filter_patterns($1, ''errorMessage'', true))'
                || CASE WHEN v_mask ?| '{where,patterns}' THEN
                format(' AND dlq.masked_text(e.error_message, %1$L, dlq.sensitive_values(e.original_event, e.edited_event, e.metadata, e.job_kind, %1$L)) ILIKE ALL (dlq.filter_patterns($1, ''errorMessage'', true))', v_mask) ELSE '' END
            -- A fingerprint has 20 hexadecimal digits (16 by grouping method 1). Fewer digits are a
            -- prefix, which a range of the index finds.
            WHEN 'fingerprint'   THEN CASE WHEN (SELECT bool_and(length(w) = 20) FROM unnest(v_words) w)
                THEN 'e.fingerprint' || v_equals ELSE (
                SELECT '(' || coalesce(string_agg(format(CASE WHEN w ~ '^[0-9a-f]{1,19}$'
                    THEN '(e.fingerprint >= (dlq.filter_words($1, ''fingerprint''))[%1$s] AND e.fingerprint < (dlq.filter_words($1, ''fingerprint''))[%1$s] || ''g'')'
                    ELSE 'starts_with(e.fingerprint, (dlq.filter_words($1, ''fingerprint''))[%1$s])' END, i), ' OR '),
                        'false') || ')'
                FROM unnest(v_words) WITH ORDINALITY u (w, i)) END
            WHEN 'rule'          THEN 'e.rule' || v_equals
            WHEN 'strategy'      THEN 'e.strategy = ANY (dlq.filter_words($1, ''strategy'')::dlq.strategy[])'
            -- A condition is stored after "condition:". For a single value, use the expressions of the partial indexes.
            WHEN 'waitingFor'    THEN 'e.status = ''dlq_pending'' AND ' || CASE
                WHEN v_words = '{condition}' THEN 'e.waiting_for LIKE ''condition: %'''
                WHEN 'condition' = ANY (v_words) THEN 'split_part(e.waiting_for, '':'', 1)' || v_equals
                ELSE 'e.waiting_for' || v_equals END
            WHEN 'failedIn'      THEN 'CASE WHEN jsonb_path_exists(e.replay_attempts, ''$[*] ? (@.outcome != "completed")'') THEN ''redelivery'' ELSE ''job'' END' || v_equals
            WHEN 'assignee'      THEN CASE WHEN '' = ANY (v_words) THEN 'coalesce(e.assigned_to, '''')'
                ELSE 'e.assigned_to' END || v_equals
            WHEN 'source'        THEN 'e.source' || v_equals
            WHEN 'topic'         THEN '((e.record).topic' || v_like || ' OR (e.record).original_topic' || v_like || ')'
            WHEN 'partition'     THEN '(e.record).partition = ANY (dlq.filter_words($1, ''partition'')::integer[])'
            WHEN 'offset'        THEN '(e.record)."offset" = ANY (dlq.filter_words($1, ''offset'')::bigint[])'
            WHEN 'node'          THEN '(e.record).node' || v_equals
            WHEN 'subscriberId'  THEN 'e.subscriber_id' || v_equals
            WHEN 'orderingKey'   THEN 'e.ordering_key' || v_equals
            WHEN 'tags'          THEN 'e.tags @> dlq.filter_words($1, ''tags'')'
            WHEN 'ids'           THEN 'e.id = ANY (dlq.filter_words($1, ''ids'')::uuid[])'
            WHEN 'messageId'     THEN 'e.event_id' || v_equals
            WHEN 'jobId'         THEN '(e.river_job_id = ANY (dlq.filter_words($1, ''jobId'')::bigint[]) OR e.id = ANY (ARRAY(SELECT j.entry_id FROM dlq.entry_jobs j WHERE j.job_id = ANY (dlq.filter_words($1, ''jobId'')::bigint[]))))'
            -- The first condition on run_id tells the planner how many entries the run has. Without it, the plan for a
            -- small run reads all open entries.
            WHEN 'rest'          THEN 'e.id IN (SELECT x.entry_id FROM dlq.replay_run_entries x WHERE x.run_id = ANY (dlq.filter_words($1, ''rest'')::uuid[]) AND x.run_id = ANY (ARRAY(SELECT r.id FROM dlq.replay_runs r WHERE r.id = ANY (dlq.filter_words($1, ''rest'')::uuid[]) AND dlq.scope_within(r.scope, dlq.scope()))) AND (x.outcome = ''skipped'' OR x.outcome IS NULL AND x.job_id IS NULL))'
            WHEN 'again'         THEN 'e.id IN (SELECT x.entry_id FROM dlq.replay_run_entries x WHERE x.run_id = ANY (dlq.filter_words($1, ''again'')::uuid[]) AND x.run_id = ANY (ARRAY(SELECT r.id FROM dlq.replay_runs r WHERE r.id = ANY (dlq.filter_words($1, ''again'')::uuid[]) AND dlq.scope_within(r.scope, dlq.scope()))) AND x.outcome = ''failed'')'
            WHEN 'after'         THEN 'e.id >= dlq.first_id(($1 ->> ''after'')::timestamptz)'
            WHEN 'before'        THEN 'e.id < dlq.first_id(($1 ->> ''before'')::timestamptz)'
            WHEN 'minAge'        THEN 'e.id < dlq.first_id(now() - ($1 ->> ''minAge'')::interval)'
            WHEN 'maxAge'        THEN 'e.id >= dlq.first_id(now() - ($1 ->> ''maxAge'')::interval)'
            WHEN 'minRetryCount' THEN 'e.dlq_retry_count >= ($1 ->> ''minRetryCount'')::integer'
            WHEN 'maxRetryCount' THEN 'e.dlq_retry_count <= ($1 ->> ''maxRetryCount'')::integer'
            WHEN 'payload'       THEN v_event || ' @> ($1 -> ''payload'')'
            WHEN 'payloadAt'     THEN (
                SELECT coalesce(string_agg(format('EXISTS (SELECT FROM jsonb_path_query(%1$s, dlq.filter_path($1 #> ''{payloadAt,%2$s,path}'')) v WHERE v #>> ''{}'' = ANY (dlq.filter_words($1 #> ''{payloadAt,%2$s}'', ''values'')))', v_event, i), ' AND '), 'false')
                FROM generate_series(0, jsonb_array_length(p_filter -> 'payloadAt') - 1) i)
        END;
        -- Also match groups of an earlier grouping method, and the groups that continue them. The added fingerprints
        -- come from dlqd's tables, not from the filter.
        IF v_key = 'fingerprint' THEN
            v_names := dlq.filter_groups(
                v_words, CASE WHEN p_filter ? 'queue' THEN dlq.filter_patterns(p_filter, 'queue') END);
            IF v_names <> '{}' THEN
                v_where := v_before || ' AND (' || substr(v_where, length(v_before || ' AND ') + 1)
                    || format(' OR e.fingerprint = ANY (%L::text[]))', v_names);
            END IF;
        END IF;
        IF v_where IS NULL THEN
            RAISE EXCEPTION 'filter: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'Fields: status, queue, kind, errorType, errorClass, errorCode, errorMessage, destination, fingerprint, rule, strategy, waitingFor, failedIn, assignee, source, topic, partition, offset, node, subscriberId, orderingKey, tags, ids, messageId, jobId, rest, again, after, before, minAge, maxAge, minRetryCount, maxRetryCount, payload, payloadAt.';
        END IF;
        -- Workers set these columns when they file an entry, so entries of the inbox never match.
        IF v_key IN ('errorType', 'errorClass', 'errorCode', 'destination', 'fingerprint', 'rule', 'strategy',
                     'waitingFor') THEN
            v_where := v_where || ' AND e.stage <> ''inbox''';
        END IF;
        -- If a caller may not see a field, the caller must not find its value with a filter, either.
        IF v_key IN ('payload', 'payloadAt', 'subscriberId', 'orderingKey', 'tags') AND dlq.is_reader()
            AND (CASE v_key WHEN 'payload' THEN 'original_event' WHEN 'payloadAt' THEN 'original_event'
                WHEN 'subscriberId' THEN 'subscriber_id' WHEN 'orderingKey' THEN 'ordering_key'
                ELSE v_key END = ANY (dlq.hidden_columns()) OR dlq.mask(false) IS NOT NULL)
            OR v_key = 'errorMessage' AND 'error_message' = ANY (dlq.hidden_columns()) THEN
            RAISE EXCEPTION 'filter: you may not search by %, which is sensitive', v_key USING ERRCODE = 'DLQ06',
                HINT = 'This requires the role operator.';
        END IF;
        IF v_key IN ('minAge', 'maxAge') AND (p_filter ->> v_key)::interval < interval '0' THEN
            RAISE EXCEPTION 'filter: % % is negative', v_key, p_filter ->> v_key USING ERRCODE = 'DLQ04';
        ELSIF v_key IN ('errorMessage', 'fingerprint') AND '' = ANY (v_words) THEN
            RAISE EXCEPTION 'filter: % is empty', v_key USING ERRCODE = 'DLQ04';
        ELSIF v_key = 'waitingFor' AND NOT v_words <@ '{automatic,condition,pace,order,run}' OR v_key = 'failedIn'
            AND NOT v_words <@ '{job,redelivery}' THEN
            RAISE EXCEPTION 'filter: invalid % %', v_key, p_filter -> v_key USING ERRCODE = 'DLQ04',
                HINT = CASE v_key WHEN 'failedIn' THEN 'Values: job, redelivery.'
                    ELSE 'Values: automatic, condition, pace, order, run.' END;
        ELSIF v_key = 'payloadAt'
            AND NOT coalesce((SELECT bool_and(jsonb_typeof(p -> 'path') = 'array' AND p -> 'path' <> '[]'
                AND jsonb_typeof(p -> 'values') = 'array') FROM jsonb_array_elements(p_filter -> 'payloadAt') p), false)
                    THEN
            RAISE EXCEPTION 'filter: invalid payloadAt %', p_filter -> 'payloadAt' USING ERRCODE = 'DLQ04',
                HINT = 'Example: [{"path": ["customer", "id"], "values": ["cus_81"]}].';
        END IF;
    END LOOP;
    IF dlq.approved() IS NOT NULL THEN
        v_where := v_where || format(' AND e.id IN (SELECT x.entry_id FROM dlq.approval_entries x WHERE x.approval_id = %L AND x.done_at IS NULL)', dlq.approved());
    END IF;
    RETURN v_where || dlq.scope_where(dlq.scope());
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'filter: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.filter_where IS
    'Returns the SQL condition of a filter, on a row e with the filter as parameter $1. Raises DLQ04 for an unknown '
    'field or an invalid value, and DLQ06 for a field whose values the caller may not see. It is limited to the '
    'caller''s scope (dlq.scope) and, while dlqd carries out an approval, to the entries of that approval.';

CREATE OR REPLACE FUNCTION dlq.filter_bounds(p_filter jsonb, OUT first uuid, OUT below uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT greatest(dlq.first_id((p_filter ->> 'after')::timestamptz),
        dlq.first_id(now() - (p_filter ->> 'maxAge')::interval)),
           least(dlq.first_id((p_filter ->> 'before')::timestamptz),
               dlq.first_id(now() - (p_filter ->> 'minAge')::interval))
$$;
COMMENT ON FUNCTION dlq.filter_bounds IS
    'The range of ids that the times of a filter allow: from first on, and less than below. Null for no bound.';

-- filter_values finds each next distinct value by one probe of the column's index. If the column
-- has no index, or the caller has a scope, it reads the 2,000 open entries that failed last.
-- Fingerprints come from dlq.failure_groups, unless the caller's scope limits kinds.
CREATE OR REPLACE FUNCTION dlq.filter_values(p_field text, p_text text DEFAULT '', p_limit integer DEFAULT 20)
RETURNS TABLE (value text, note text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
DECLARE
    v_scope  constant jsonb := dlq.scope();
    v_mask   constant jsonb := dlq.mask();
    v_column constant text := CASE p_field WHEN 'queue' THEN 'queue' WHEN 'kind' THEN 'kind' WHEN 'errorClass'
        THEN 'error_class' WHEN 'errorType' THEN 'error_type' WHEN 'source' THEN 'source'
        WHEN 'errorCode' THEN 'error_code' WHEN 'destination' THEN 'destination' WHEN 'rule' THEN 'rule'
            WHEN 'assignee' THEN 'assigned_to' WHEN 'fingerprint' THEN 'fingerprint' WHEN 'subscriberId'
            THEN 'subscriber_id'
        WHEN 'orderingKey' THEN 'ordering_key' WHEN 'tags' THEN 'tags' WHEN 'topic' THEN 'topic'
        WHEN 'node' THEN 'node' END;
BEGIN
    IF v_column IS NULL OR v_column IN ('subscriber_id', 'ordering_key', 'tags')
        AND (v_column = ANY (dlq.hidden_columns()) OR v_mask ?| '{where,patterns}') THEN
        RETURN;
    ELSIF v_column = 'fingerprint'
        AND (v_scope IS NULL OR NOT EXISTS (SELECT FROM jsonb_array_elements(v_scope) g
            WHERE coalesce(g -> 'kinds', '[]') <> '[]')) THEN
        RETURN QUERY
        SELECT g.fingerprint, g.queue
            || coalesce(': ' || CASE WHEN v_mask -> 'hidden' ? 'error_message' THEN NULL
                ELSE left(dlq.masked_text(g.title, v_mask), 200) END, '')
        FROM dlq.failure_groups g
        WHERE g.fingerprint <> 'other'
          AND NOT EXISTS (
              SELECT FROM dlq.group_aliases a
              WHERE a.queue = g.queue AND a.former = g.fingerprint AND a.main AND a.counted_at IS NOT NULL)
          AND starts_with(g.fingerprint, lower(p_text))
          AND (v_scope IS NULL OR dlq.in_patterns(g.queue, NULL, dlq.scope_patterns(v_scope)))
        ORDER BY g.open DESC, g.last_seen DESC, g.fingerprint LIMIT p_limit;
    ELSIF v_scope IS NULL AND v_column IN ('queue', 'kind', 'error_class', 'error_type', 'error_code', 'destination',
        'source') THEN
        RETURN QUERY EXECUTE format(
            'WITH RECURSIVE v (value, n) AS (
                 (SELECT e.%1$I, 1 FROM dlq.dead_letter_open e WHERE e.%1$I IS NOT NULL ORDER BY e.%1$I LIMIT 1)
                 UNION ALL
                 SELECT (SELECT e.%1$I FROM dlq.dead_letter_open e WHERE e.%1$I > v.value
                         ORDER BY e.%1$I LIMIT 1), v.n + 1
                 FROM v WHERE v.value IS NOT NULL AND v.n < 500
             )
             SELECT v.value, NULL::text FROM v WHERE position(lower($1) IN lower(v.value)) > 0
             ORDER BY starts_with(lower(v.value), lower($1)) DESC, v.value LIMIT $2', v_column)
        USING p_text, p_limit;
    ELSE
        RETURN QUERY EXECUTE format(
            'SELECT x.value, NULL::text
             FROM (SELECT e.* FROM dlq.dead_letter_queue e WHERE e.stage IN (''inbox'', ''open'') ORDER BY e.id DESC LIMIT 2000) e CROSS JOIN LATERAL %s x (value)
             WHERE position(lower($1) IN lower(x.value)) > 0 AND ($3 IS NULL OR dlq.in_patterns(e.queue, e.kind, $3))
             GROUP BY x.value ORDER BY starts_with(lower(x.value), lower($1)) DESC, count(*) DESC, x.value LIMIT $2',
            CASE WHEN v_column = 'tags' THEN 'unnest(e.tags)'
                WHEN v_column IN ('topic', 'node') THEN format('(VALUES ((e.record).%I))', v_column)
                    ELSE format('(VALUES (e.%I))', v_column) END)
        USING p_text, p_limit, dlq.scope_patterns(v_scope);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.filter_values IS
    'Suggests up to p_limit values of a filter field that contain p_text in upper or lower case, from open entries '
    'in the caller''s scope. A fingerprint must begin with p_text; its note is the queue and title of the group. A '
    'field without suggestions, or that the caller may not see, has none.';

-- find_ids returns ids in order, so that a caller continues after the last one. find_ids and
-- dlq.preview run as the owner of the schema, because filters read tables that the caller may not
-- read.
CREATE OR REPLACE FUNCTION dlq.find_ids(p_filter jsonb, p_limit integer, p_after uuid DEFAULT NULL,
    p_newest_first boolean DEFAULT false, p_below uuid DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
BEGIN
    RETURN QUERY EXECUTE
        'SELECT e.id FROM dlq.dead_letter_queue e WHERE ' || dlq.filter_where(p_filter)
        || CASE WHEN p_after IS NULL THEN '' WHEN p_newest_first THEN ' AND e.id < $3' ELSE ' AND e.id > $3' END
        || CASE WHEN p_below IS NULL THEN '' ELSE ' AND e.id < $4' END
        || ' ORDER BY e.id ' || CASE WHEN p_newest_first THEN 'DESC' ELSE 'ASC' END || ' LIMIT $2'
        USING p_filter, p_limit, p_after, p_below;
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'filter: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.find_ids IS
    'Ids of entries that match a filter, in order of capture, after p_after and below p_below.';

-- only_in_states keeps unknown states in the filter, so that filter_where rejects them.
CREATE OR REPLACE FUNCTION dlq.only_in_states(p_filter jsonb, p_states text[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_filter || jsonb_build_object('status', CASE WHEN p_filter ? 'status'
        THEN (SELECT coalesce(jsonb_agg(s.word), '[]') FROM unnest(dlq.filter_words(p_filter, 'status')) s (word)
              WHERE s.word = ANY (p_states) OR s.word NOT IN ('dlq_pending', 'dlq_processing', 'dlq_manual',
                  'dlq_returned', 'dlq_failed', 'dlq_resolved', 'dlq_archived'))
        ELSE to_jsonb(p_states) END)
$$;
COMMENT ON FUNCTION dlq.only_in_states IS
    'Restricts a filter to entries in these states. Without a status, the filter gets all of them.';

CREATE OR REPLACE FUNCTION dlq.replayable(p_filter jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT dlq.only_in_states(p_filter, '{dlq_pending,dlq_manual,dlq_failed}')
$$;
COMMENT ON FUNCTION dlq.replayable IS
    'Restricts a filter to entries that can be replayed: of its states, keeps those from which a replay is '
    'allowed. A filter without a status gets all of these states.';

CREATE OR REPLACE FUNCTION dlq.chooses_all(p_filter jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    RETURN NOT EXISTS (
        SELECT FROM jsonb_each(p_filter) f CROSS JOIN LATERAL (SELECT f.value #>> '{}') t (text) WHERE CASE f.key
            WHEN 'payload' THEN f.value NOT IN ('{}', '[]') -- every object contains {}
            WHEN 'tags' THEN f.value <> '[]'
            WHEN 'kind' THEN NOT EXISTS (SELECT FROM unnest(dlq.filter_words(p_filter, 'kind')) k WHERE k ~ '^[*]+$')
            WHEN 'queue' THEN NOT EXISTS (SELECT FROM unnest(dlq.filter_words(p_filter, 'queue')) k WHERE k ~ '^[*]+$')
            WHEN 'failedIn' THEN NOT f.value @> '["job", "redelivery"]'
            WHEN 'status' THEN NOT f.value @> to_jsonb(enum_range(NULL::dlq.dead_letter_status))
            WHEN 'minRetryCount' THEN t.text::numeric > 0
            WHEN 'maxRetryCount' THEN t.text::numeric < 1000000
            -- No id is earlier than 1970 or in the future (except for clock differences), so such a bound selects all
            -- entries.
            WHEN 'after' THEN t.text::timestamptz > '1970-01-01Z'
            WHEN 'before' THEN t.text::timestamptz <= now()
            WHEN 'maxAge' THEN now() - t.text::interval > '1970-01-01Z'
            WHEN 'minAge' THEN t.text::interval > '0'
            ELSE true END);
EXCEPTION WHEN data_exception THEN
    RETURN false; -- an invalid value: the function that uses the filter reports it
END
$$;
COMMENT ON FUNCTION dlq.chooses_all IS
    'Whether a filter matches every entry: it is empty, or none of its fields excludes one.';

-- Each matching entry gets a random place from 0 to 1. The sample consists of the entries with the smallest places.
-- To use little memory, only candidates are collected:
--   - If the index dead_letter_open_groups has all columns of the filter, candidates are the entries whose place is
--     below a share that is expected to give four times the sample. If there are too few, because the filter selects
--     few entries, a second pass samples again.
--   - Otherwise there is only one pass. Its n-th entry is a candidate only if its place is below about
--     2 * p_sample / n: the more entries there are, the smaller are the smallest places. Numbering a million entries
--     takes as long as the rest of the pass.
--
-- Without a filter on another column, the pass reads only that index; this is why ages come from ids. Bitmap scans
-- would read the rows, and a sort would write a temporary file, so both are off. A filter on another field may need
-- bitmap scans, to combine indexes. The memory is raised, because with the default work_mem the aggregation of a
-- million entries would use temporary files: the planner expects a tenth of the entries as groups.
CREATE OR REPLACE FUNCTION dlq.count_groups(p_filter jsonb, p_sample integer DEFAULT 0)
RETURNS TABLE (queue text, fingerprint text, error_type text, age text, entries bigint, sample uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET work_mem = '64MB' AS $$
DECLARE
    v_number text := 'row_number() OVER ()';
    v_below  float8 := 2 * p_sample + 20; -- of place * number
    v_from   text;
    v_cell   constant text := 'e.queue, coalesce(e.fingerprint, '''') AS fingerprint,
        coalesce(e.error_type, '''') AS error_type,
        CASE WHEN e.id >= $3 THEN 1 WHEN e.id >= $4 THEN 2 WHEN e.id >= $5 THEN 3 ELSE 4 END AS age, e.id, ';
BEGIN
    IF p_filter - '{queue,status,errorType,errorClass,after,before}'::text[] <> '{}' THEN
        PERFORM set_config('enable_bitmapscan', 'on', true); -- until the function ends
    END IF;
    v_from := ' FROM dlq.dead_letter_queue e WHERE ' || dlq.filter_where(p_filter)
        || ' AND (e.stage <> ''inbox'' OR NOT dlq.is_repeat(e.river_job_id, e.job_created_at))';
    IF p_filter - '{queue,fingerprint,status,errorType,errorClass,after,before}'::text[] = '{}' THEN
        v_number := '1';
        SELECT 4 * p_sample / greatest(sum(c.reltuples), 1) INTO v_below
        FROM pg_partition_tree('dlq.dead_letter_queue') t JOIN pg_class c ON c.oid = t.relid
        WHERE t.isleaf AND c.relname ~ '^dead_letter_(open|failed)';
    END IF;
    RETURN QUERY EXECUTE
        'WITH cells AS MATERIALIZED (
             SELECT c.queue, c.fingerprint, c.error_type, c.age, count(*) AS entries,
                 array_agg(c.id) FILTER (WHERE c.place * c.number < $6) AS ids,
                 array_agg(c.place) FILTER (WHERE c.place * c.number < $6) AS places
             FROM (SELECT ' || v_cell || 'random() AS place, ' || v_number || ' AS number' || v_from || ' OFFSET 0) c
             GROUP BY 1, 2, 3, 4
         ), enough AS MATERIALIZED (
             SELECT coalesce(sum(cardinality(c.ids)), 0) >= least(sum(c.entries), $2) AS is FROM cells c
         ), sampled AS MATERIALIZED (
             (SELECT c.queue, c.fingerprint, c.error_type, c.age, s.id
              FROM cells c CROSS JOIN LATERAL unnest(c.ids, c.places) s (id, place)
              WHERE (SELECT n.is FROM enough n) ORDER BY s.place LIMIT $2)
             UNION ALL
             (SELECT c.queue, c.fingerprint, c.error_type, c.age, c.id
              FROM (SELECT ' || v_cell || 'random() AS place' || v_from || '
                        AND NOT (SELECT n.is FROM enough n) OFFSET 0) c
              ORDER BY c.place LIMIT $2)
         )
         SELECT c.queue, c.fingerprint, c.error_type,
             (ARRAY[''under 1 hour'', ''1 hour to 1 day'', ''1 to 7 days'', ''over 7 days''])[c.age], c.entries,
             coalesce(s.ids, ''{}'')
         FROM cells c LEFT JOIN (SELECT s.queue, s.fingerprint, s.error_type, s.age, array_agg(s.id) AS ids
                                 FROM sampled s GROUP BY 1, 2, 3, 4) s USING (queue, fingerprint, error_type, age)
         ORDER BY 5 DESC, 1, 2, 3, 4'
        USING p_filter, p_sample, dlq.first_id(now() - interval '1 hour'), dlq.first_id(now() - interval '1 day'),
            dlq.first_id(now() - interval '7 days'), v_below;
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'filter: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.count_groups IS
    'The number of entries that match a filter, by queue, failure group, error type and age, the largest first, each '
    'with its part of a random sample of at most p_sample entries.';

CREATE OR REPLACE FUNCTION dlq.preview(p_filter jsonb)
RETURNS TABLE (queue text, error_type text, age text, entries bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.queue, c.error_type, c.age, sum(c.entries)::bigint FROM dlq.count_groups(p_filter) c
    GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3
$$;
COMMENT ON FUNCTION dlq.preview IS 'The number of entries that match a filter, by queue, error type and age.';

-- The policy defines destinations; the database does not know their names. A delivery to an unknown
-- destination fails.
CREATE OR REPLACE FUNCTION dlq.check_destination(p_filter jsonb, p_destination text) RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
DECLARE
    v_entry uuid;
BEGIN
    IF p_destination IS NULL THEN
        RETURN;
    END IF;
    PERFORM dlq.require_everything('replay to another destination'); -- a destination does not belong to a queue
    EXECUTE 'SELECT e.id FROM dlq.dead_letter_queue e WHERE e.job_kind <> ''dlqd_message'' AND '
        || dlq.filter_where(p_filter) || ' LIMIT 1' INTO v_entry USING p_filter;
    IF v_entry IS NOT NULL THEN
        RAISE EXCEPTION 'dead letter %: is an application''s job, which has no destination', v_entry
            USING ERRCODE = 'DLQ04', HINT = 'Messages that dlqd delivers can go to another destination; an application''s job can go to another queue.';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.check_destination IS
    'Raises an error if the filter matches jobs of an application, which cannot be sent to another destination '
    'because they have none.';

-- A resumable job with an edited payload would skip the steps that it completed with the old
-- payload, and then count as completed.
CREATE OR REPLACE FUNCTION dlq.count_checkpoints(p_filter jsonb) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
DECLARE
    v_entries bigint;
BEGIN
    EXECUTE 'SELECT count(*) FROM dlq.dead_letter_queue e WHERE dlq.has_checkpoint(e.metadata) AND '
        || dlq.filter_where(p_filter) INTO v_entries USING p_filter;
    RETURN v_entries;
END
$$;
COMMENT ON FUNCTION dlq.count_checkpoints IS
    'The number of entries that match a filter and whose resumable jobs have completed or started a step.';

CREATE OR REPLACE FUNCTION dlq.check_checkpoint(p_filter jsonb, p_edited boolean, p_checkpoint text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_entries bigint;
BEGIN
    IF p_checkpoint NOT IN ('resume', 'discard') THEN
        RAISE EXCEPTION 'replay: invalid checkpoint %', p_checkpoint USING ERRCODE = 'DLQ04',
            HINT = 'Values: resume, discard.';
    END IF;
    IF p_edited AND p_checkpoint IS NULL THEN
        v_entries := dlq.count_checkpoints(p_filter);
        IF v_entries > 0 THEN
            RAISE EXCEPTION 'replay: % have a checkpoint among the dead letters to be edited, and their jobs would skip completed steps', v_entries
                USING ERRCODE = 'DLQ04', HINT = 'Set the checkpoint: resume (continue after the last completed step) or discard (repeat all steps with the new payload).';
        END IF;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.check_checkpoint IS
    'Raises an error if p_checkpoint is neither resume nor discard, or if it is null and entries of resumable '
    'jobs are to be edited.';

CREATE OR REPLACE FUNCTION dlq.check_rate(p_rate float8) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_rate NOT BETWEEN 0.001 AND 1000000 THEN
        RAISE EXCEPTION 'replay: invalid rate %', p_rate USING ERRCODE = 'DLQ04',
            HINT = 'A rate is 0.001 to 1000000 entries a second; null means no limit.';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.check_rate IS 'Raises an error if a replay run cannot have this rate.';

-- An approved run uses the policy's choices from the time of its request.
CREATE OR REPLACE FUNCTION dlq.skip_defaults(p_skip_stale boolean, p_skip_superseded boolean) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_skips jsonb;
BEGIN
    IF dlq.approved() IS NOT NULL THEN
        SELECT a.skips INTO v_skips FROM dlq.approvals a WHERE a.id = dlq.approved();
    ELSE
        SELECT s.value::jsonb INTO v_skips FROM dlq.settings s WHERE s.key = 'replay_skips';
    END IF;
    RETURN nullif(coalesce(v_skips, '{}') - CASE WHEN p_skip_stale IS NULL THEN '{}' ELSE '{stale}' END::text[]
        - CASE WHEN p_skip_superseded IS NULL THEN '{}' ELSE '{superseded}' END::text[], '{}');
END
$$;
COMMENT ON FUNCTION dlq.skip_defaults IS
    'The work that a replay run skips because of the policy (skipStale and skipSuperseded of queues and kinds), '
    'where its request does not choose (null). Null if it skips none.';

-- A caller with a scope can read these choices in stored runs and requests for approval. So they name only queues and
-- kinds of the entries that the run selects.
CREATE OR REPLACE FUNCTION dlq.applying_skips(p_skips jsonb, p_queues text[], p_kinds text[]) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
RETURN CASE WHEN dlq.scope() IS NULL THEN p_skips ELSE (
    SELECT jsonb_object_agg(s.key, CASE WHEN q.queues IS NULL THEN '{}' ELSE jsonb_build_object('queues', q.queues) END
        || CASE WHEN k.kinds IS NULL THEN '{}' ELSE jsonb_build_object('kinds', k.kinds) END)
    FROM jsonb_each(p_skips) s
    CROSS JOIN LATERAL (SELECT jsonb_agg(n ORDER BY n) AS queues
                        FROM jsonb_array_elements_text(coalesce(s.value -> 'queues', '[]')) n
                        WHERE n = ANY (p_queues)) q
    CROSS JOIN LATERAL (SELECT jsonb_object_agg(n.key, n.value) AS kinds, bool_or(n.value = 'true') AS any_on
                        FROM jsonb_each(coalesce(s.value -> 'kinds', '{}')) n
                        WHERE EXISTS (SELECT FROM unnest(p_kinds) o (kind)
                                      WHERE o.kind LIKE ANY (dlq.like_patterns(jsonb_build_array(n.key))))) k
    WHERE q.queues IS NOT NULL OR k.any_on) END;
COMMENT ON FUNCTION dlq.applying_skips IS
    'p_skips (dlq.skip_defaults), and for a caller with a scope only what applies to one of these queues or kinds, so '
    'that it does not show others.';

CREATE OR REPLACE FUNCTION dlq.skips_of(p_skips jsonb, p_filter jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_skips jsonb := p_skips;
BEGIN
    IF p_skips IS NOT NULL AND dlq.scope() IS NOT NULL THEN
        EXECUTE 'SELECT dlq.applying_skips($2, array_agg(DISTINCT e.queue), array_agg(DISTINCT coalesce(e.kind, '''')))
                 FROM dlq.dead_letter_queue e WHERE ' || dlq.filter_where(p_filter)
        INTO v_skips USING p_filter, p_skips;
    END IF;
    RETURN v_skips;
END
$$;
COMMENT ON FUNCTION dlq.skips_of IS 'dlq.applying_skips for the entries that match a filter.';

-- The setting has the paths by kind, the longest pattern first, and by queue. A kind without a path has that of its
-- queue.
CREATE OR REPLACE FUNCTION dlq.job_key() RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_keys constant jsonb := (SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'replay_keys');
    v_path text; -- an expression for the path
BEGIN
    SELECT 'coalesce(' || nullif(concat_ws(', ',
        (SELECT 'CASE ' || string_agg(format('WHEN e.kind LIKE %L THEN %L::text[]',
             (dlq.like_patterns(jsonb_build_array(k.value -> 'kind')))[1], k.path), ' ' ORDER BY k.place) || ' END'
         FROM (SELECT j.value, j.place, CASE WHEN j.value ? 'path'
                   THEN ARRAY(SELECT jsonb_array_elements_text(j.value -> 'path')) END AS path
               FROM jsonb_array_elements(v_keys -> 'kinds') WITH ORDINALITY j (value, place)) k),
        (SELECT 'CASE e.queue ' || string_agg(format('WHEN %L THEN %L::text[]',
             q.key, ARRAY(SELECT jsonb_array_elements_text(q.value))), ' ') || ' END'
         FROM jsonb_each(v_keys -> 'queues') q)), '') || ')' INTO v_path;
    RETURN 'CASE WHEN e.job_kind <> ''dlqd_message'' AND e.ordering_key IS NULL AND jsonb_typeof(e.original_event #> '
        || v_path || ') IN (''string'', ''number'', ''boolean'') THEN nullif(e.original_event #>> ' || v_path
        || ', '''') END';
END
$$;
COMMENT ON FUNCTION dlq.job_key IS
    'Returns the SQL expression of the ordering key of an entry e of an application''s job: the value in its args at '
    'the path that the policy names for its kind or queue (orderingKey). It is null for a job without such a value, and '
    'for messages. Returns null if the policy names no path.';

CREATE OR REPLACE FUNCTION dlq.replay_start(p_filter jsonb, p_actor text DEFAULT session_user, p_note text DEFAULT NULL,
    p_all boolean DEFAULT false,
    p_newest_first boolean DEFAULT false, p_batch_size integer DEFAULT 100, p_rate float8 DEFAULT NULL,
    p_concurrency integer DEFAULT NULL,
    p_patch jsonb DEFAULT NULL, p_merge_patch jsonb DEFAULT NULL, p_queue text DEFAULT NULL,
    p_force boolean DEFAULT false,
    p_stop_at float8 DEFAULT 50, p_stop_of integer DEFAULT 50, p_destination text DEFAULT NULL,
    p_checkpoint text DEFAULT NULL, p_progressive boolean DEFAULT false,
    p_step_deadline interval DEFAULT '15 minutes', p_skip_stale boolean DEFAULT NULL,
    p_skip_superseded boolean DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id       uuid := dlq.uuid_v7();
    v_filter   jsonb := dlq.replayable(p_filter);
    v_breakers text;
    v_queues   text[]; -- the queues of the redeliveries
    v_unworked text[];
    v_where    text;
    v_groups   jsonb;
    v_number   text := 'NULL::integer'; -- an expression for the group number of an entry e
    v_join     text := '';
    v_skips    constant jsonb := dlq.skip_defaults(p_skip_stale, p_skip_superseded);
    v_job_key  constant text := dlq.job_key();
    v_key      text; -- an expression for the ordering key of an entry e
    v_total    bigint;
    v_ordered  bigint;
    v_keyed    bigint := 0;
BEGIN
    p_progressive := coalesce(p_progressive, false);
    p_step_deadline := coalesce(p_step_deadline, '15 minutes');
    IF dlq.chooses_all(p_filter) AND NOT p_all THEN
        RAISE EXCEPTION 'replay: an empty filter matches every entry' USING ERRCODE = 'DLQ04',
            HINT = 'To select all entries, pass p_all => true.';
    END IF;
    IF p_patch IS NOT NULL AND p_merge_patch IS NOT NULL THEN
        RAISE EXCEPTION 'replay: a patch and a merge patch exclude each other' USING ERRCODE = 'DLQ04',
            HINT = 'Pass one of them: p_patch (RFC 6902) or p_merge_patch (RFC 7396).';
    END IF;
    PERFORM dlq.refuse_mask('replay', p_patch), dlq.refuse_mask('replay', p_merge_patch);
    PERFORM dlq.check_rate(p_rate);
    IF p_step_deadline NOT BETWEEN '1 second' AND '30 days' THEN
        RAISE EXCEPTION 'replay: invalid step deadline %', p_step_deadline USING ERRCODE = 'DLQ04',
            HINT = 'A step deadline is 1 second to 30 days.';
    END IF;
    PERFORM dlq.check_destination(v_filter, p_destination);
    PERFORM dlq.check_checkpoint(v_filter, p_patch IS NOT NULL OR p_merge_patch IS NOT NULL, p_checkpoint);
    IF p_queue IS NOT NULL AND NOT dlq.in_scope(p_queue, NULL, dlq.scope()) THEN
        RAISE EXCEPTION 'replay: you may not send redeliveries to queue %', p_queue USING ERRCODE = 'DLQ06';
    END IF;
    IF NOT p_force THEN -- p_force also saves the preview, which reads all matching entries
        v_queues := CASE WHEN p_queue IS NULL THEN ARRAY(SELECT DISTINCT p.queue FROM dlq.preview(v_filter) p)
            ELSE ARRAY[p_queue] END;
        SELECT string_agg(b.name, ', ' ORDER BY b.name) INTO v_breakers FROM dlq.circuit_breakers b
        WHERE b.state = 'open' AND (b.name = 'destination:' || p_destination OR p_destination IS NULL
            AND b.name IN (SELECT 'queue:' || q.queue FROM unnest(v_queues) q (queue)));
        IF v_breakers IS NOT NULL THEN
            RAISE EXCEPTION 'replay: open circuit breakers: %', v_breakers USING ERRCODE = 'DLQ05',
                HINT = 'Wait for them to close, or replay with force.';
        END IF;
        v_unworked := dlq.unworked_queues(v_queues);
        IF v_unworked <> '{}' THEN
            RAISE EXCEPTION 'replay: no River client works these queues: %', array_to_string(v_unworked, ', ')
                USING ERRCODE = 'DLQ05', HINT = 'Start a client that works them, send the redeliveries to another queue, or replay with force.';
        END IF;
    END IF;
    PERFORM dlq.require_approval(ARRAY['replay'] || CASE WHEN p_patch IS NOT NULL OR p_merge_patch IS NOT NULL
        THEN '{patch}' ELSE '{}' END::text[]
            || CASE WHEN p_queue IS NOT NULL OR p_destination IS NOT NULL THEN '{redirect}' ELSE '{}' END::text[],
            'replay',
        jsonb_build_object('filter', v_filter)
            || jsonb_strip_nulls(jsonb_build_object('queue', p_queue, 'toDestination', p_destination, 'rate', p_rate,
                'concurrency', p_concurrency, 'force', nullif(p_force, false),
            'newestFirst', nullif(p_newest_first, false), 'batchSize', nullif(p_batch_size, 100), 'stopAt',
            nullif(p_stop_at, 50), 'checkpoint', p_checkpoint, 'progressive', nullif(p_progressive, false),
            'stepDeadline', CASE WHEN p_progressive THEN nullif(extract(epoch FROM p_step_deadline)::float8, 900) END,
            'skipStale', p_skip_stale, 'skipSuperseded', p_skip_superseded))
                || CASE WHEN p_patch IS NOT NULL THEN jsonb_build_object('patch', p_patch) ELSE '{}' END
            || CASE WHEN p_merge_patch IS NOT NULL THEN jsonb_build_object('mergePatch', p_merge_patch) ELSE '{}' END
            || CASE WHEN p_all THEN '{"all": true}' ELSE '{}' END::jsonb);
    -- The entries are selected once, at the start. Entries that match the filter later are not added; an entry that no
    -- longer matches stays in the report. Entries with the same ordering key run one after the other, in the order of
    -- their messages or jobs, not in the order of their failures.
    v_where := dlq.filter_where(v_filter)
        || ' AND (e.stage <> ''inbox'' OR NOT dlq.is_repeat(e.river_job_id, e.job_created_at))';
    IF p_progressive THEN
        v_groups := dlq.replay_largest(v_where, v_filter);
        v_number := 'coalesce((g.value ->> ''number'')::integer, 21)';
        v_join := ' LEFT JOIN jsonb_array_elements($3) g ON g.value ->> ''queue'' = e.queue AND g.value ->> ''fingerprint'' = coalesce(e.fingerprint, '''')';
    END IF;
    EXECUTE 'INSERT INTO dlq.replay_run_entries (run_id, entry_id, was, queue, group_number)
             SELECT $2, e.id, e.fingerprint, e.queue, '
        || v_number || ' FROM dlq.dead_letter_queue e' || v_join || ' WHERE e.ordering_key IS NULL AND '
        || coalesce('(' || v_job_key || ') IS NULL AND ', '') || v_where
        -- The inbox may contain the same failure twice.
        || ' ON CONFLICT DO NOTHING' USING v_filter, v_id, v_groups;
    GET DIAGNOSTICS v_total = ROW_COUNT;
    FOREACH v_key IN ARRAY array_remove(ARRAY['e.ordering_key', v_job_key], NULL) LOOP
        EXECUTE 'INSERT INTO dlq.replay_run_entries (run_id, entry_id, was, queue, group_number, behind, leads)
                 SELECT $2, e.id, e.fingerprint, e.queue, ' || v_number || ', lag(e.id) OVER k,
                     lead(e.id) OVER k IS NOT NULL
                 FROM dlq.dead_letter_queue e' || v_join || ' WHERE (' || v_key || ') IS NOT NULL AND ' || v_where
            || ' WINDOW k AS (PARTITION BY e.queue, ' || v_key || ' ORDER BY CASE WHEN e.ordering_key IS NOT NULL THEN coalesce(e.order_place, dlq.order_place(e.river_job_id, e.job_created_at)) END NULLS FIRST, e.job_created_at, e.river_job_id)
                 ON CONFLICT DO NOTHING' USING v_filter, v_id, v_groups;
        GET DIAGNOSTICS v_ordered = ROW_COUNT;
        v_total := v_total + v_ordered;
        v_keyed := CASE WHEN v_key = v_job_key THEN v_ordered ELSE 0 END;
    END LOOP;
    INSERT INTO dlq.replay_runs (id, filter, newest_first, batch_size, rate, concurrency, patch, merge_patch, queue,
        destination, force, stop_at, stop_of, note, actor, total, origin, scope, checkpoint, progressive, step_deadline,
        skip_stale, skip_superseded, skips, unsettled, approval, keyed_jobs)
    VALUES (v_id, v_filter, p_newest_first, p_batch_size, p_rate, p_concurrency, p_patch, p_merge_patch, p_queue,
        p_destination, p_force, p_stop_at, p_stop_of, p_note, dlq.actor(p_actor), v_total,
        dlq.origin(dlq.actor(p_actor), p_actor), dlq.scope(), p_checkpoint, p_progressive, p_step_deadline,
        coalesce(p_skip_stale, false), coalesce(p_skip_superseded, false), dlq.skips_of(v_skips, v_filter), true,
        dlq.approved(), v_keyed);
    IF p_progressive THEN
        PERFORM dlq.replay_plan(v_id, v_groups);
    END IF;
    PERFORM dlq.record_act('replay run ' || v_id, 'started', p_actor, p_note,
        jsonb_build_object('entries', v_total, 'progressive', nullif(p_progressive, false)));
    IF dlq.approved() IS NOT NULL THEN
        PERFORM dlq.end_approval(dlq.approved(), v_total, v_id);
    END IF;
    PERFORM dlq.wake();
    RETURN v_id;
END
$$;
COMMENT ON FUNCTION dlq.replay_start IS
    'Starts a replay run of the entries that match a filter now (see dlq.find; without a status: pending, manual and '
    'failed ones). A dlqd that runs DLQ workers carries it out. p_checkpoint says whether resumable River jobs '
    'continue after their last step (resume) or repeat all steps (discard); a patch requires it for such jobs. With '
    'p_progressive, the run goes step by step, by failure group (dlq.replay_run_groups). An empty filter requires '
    'p_all. An open circuit breaker, or a queue that no River client works, refuses the run unless p_force is set. '
    'The run may need an approval. p_skip_stale skips work that is out of date, p_skip_superseded work that a later '
    'job has done (dlq.superseded); null for what the policy says. Returns the run''s id in dlq.replay_runs.';

-- If a redelivery succeeded, or its entry was closed, the next entry of the ordering key may go. Otherwise all entries
-- behind it get the reason with which the run will skip them. (An entry whose "behind" is itself waits because it must
-- be sent alone.)
CREATE OR REPLACE FUNCTION dlq.on_replay_ended() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    IF NEW.outcome = 'succeeded' OR NEW.outcome = 'skipped' AND NOT EXISTS (
        SELECT FROM dlq.dead_letter_queue e WHERE e.id = NEW.entry_id AND e.stage IN ('inbox', 'open', 'failed')
            AND (e.closed_at IS NULL OR e.closed_at >= dlq.captured_at(NEW.entry_id) - interval '1 day')) THEN
        UPDATE dlq.replay_run_entries r SET behind = NULL WHERE r.run_id = NEW.run_id AND r.behind = NEW.entry_id;
        RETURN NULL;
    END IF;
    WITH RECURSIVE followers AS (
        SELECT r.entry_id FROM dlq.replay_run_entries r
        WHERE r.run_id = NEW.run_id AND r.behind = NEW.entry_id AND r.entry_id <> NEW.entry_id
        UNION ALL
        SELECT r.entry_id FROM followers f JOIN dlq.replay_run_entries r ON r.run_id = NEW.run_id
            AND r.behind = f.entry_id AND r.entry_id <> f.entry_id
    )
    UPDATE dlq.replay_run_entries r SET behind = NULL, detail = 'an earlier one of its ordering key '
        || CASE NEW.outcome WHEN 'failed' THEN 'failed again' ELSE 'was skipped' END || ': dead letter ' || NEW.entry_id
    FROM followers f WHERE r.run_id = NEW.run_id AND r.entry_id = f.entry_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_replay_ended IS
    'Trigger: when an entry of a replay run ends, lets the next entry of its ordering key go, or all those behind it '
    'be skipped.';
CREATE OR REPLACE TRIGGER replay_ended AFTER UPDATE OF outcome ON dlq.replay_run_entries
    FOR EACH ROW WHEN (NEW.leads AND OLD.outcome IS NULL AND NEW.outcome IS NOT NULL)
    EXECUTE FUNCTION dlq.on_replay_ended();
COMMENT ON TRIGGER replay_ended ON dlq.replay_run_entries IS
    'Releases the next entry of the ordering key, or has those behind it skipped.';

-- A River client updates its queues in river_queue every ten minutes.
CREATE OR REPLACE FUNCTION dlq.unworked_queues(p_queues text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
    SELECT ARRAY(SELECT q.queue FROM unnest(p_queues) q (queue)
                 WHERE NOT EXISTS (SELECT FROM river.river_queue r WHERE r.name = q.queue
                     AND r.updated_at > now() - interval '30 minutes') ORDER BY 1)
$$;
COMMENT ON FUNCTION dlq.unworked_queues IS
    'Of the given queues, returns those that no River client has worked for half an hour. A job in such a queue '
    'waits until a client works it.';

CREATE OR REPLACE FUNCTION dlq.replay_move(p_run uuid, p_from dlq.replay_status[], p_to dlq.replay_status,
    p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_status dlq.replay_status;
BEGIN
    UPDATE dlq.replay_runs r SET status = p_to, reason = p_reason, updated_at = now(), stepped_at = NULL,
        judged_from = CASE WHEN p_to = 'running' THEN now() ELSE r.judged_from END,
        finished_at = CASE WHEN p_to IN ('completed', 'cancelled', 'stopped') THEN now() END
    WHERE r.id = p_run AND r.status = ANY (p_from) AND dlq.scope_within(r.scope, dlq.scope());
    IF NOT FOUND THEN
        SELECT r.status INTO v_status FROM dlq.replay_runs r WHERE r.id = p_run
            AND dlq.scope_within(r.scope, dlq.scope());
        IF NOT FOUND THEN
            RAISE EXCEPTION 'replay run %: there is no such run', p_run USING ERRCODE = 'DLQ02';
        END IF;
        RAISE EXCEPTION 'replay run %: cannot move from % to % (allowed from: %)', p_run, v_status, p_to,
            array_to_string(p_from, ', ') USING ERRCODE = 'DLQ01';
    END IF;
    IF p_to = 'cancelled' THEN -- a group whose entries were all sent still becomes done once they have ended
        UPDATE dlq.replay_run_groups g SET state = 'ended', reason = p_reason
        WHERE g.run_id = p_run AND (g.state IN ('held', 'stopped') OR g.state = 'going'
            AND g.sent + g.skipped < g.entries);
    END IF;
    PERFORM dlq.wake();
END
$$;
COMMENT ON FUNCTION dlq.replay_move IS 'Moves a replay run to another state, if its current state is one of p_from.';

-- The statements look each entry up by the primary key (OFFSET 0 forces this) and update it by its ctid. Otherwise a
-- plan that Postgres made before it knew the size of the table would read all remaining entries of the run for each
-- batch.
CREATE OR REPLACE FUNCTION dlq.replay_step(p_run uuid, p_ids uuid[], p_skipped uuid[] DEFAULT '{}',
    p_why text[] DEFAULT '{}', p_reasons text[] DEFAULT '{}') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_run      dlq.replay_runs;
    v_entries  uuid[];
    v_verdicts text[];
    v_jobs     bigint[];
    v_replayed bigint;
    v_alone    bigint := 0; -- entries that must wait until no other rescued job is in progress
BEGIN
    SELECT * INTO STRICT v_run FROM dlq.replay_runs r WHERE r.id = p_run;
    -- Also skip entries behind an entry of their ordering key that did not succeed (see dlq.on_replay_ended).
    SELECT p_skipped || coalesce(array_agg(r.entry_id), '{}'), p_why || coalesce(array_agg(r.detail), '{}'),
        p_reasons || coalesce(array_agg('ordering_key'::text), '{}')
    INTO p_skipped, p_why, p_reasons
    FROM unnest(p_ids) i (id)
    CROSS JOIN LATERAL (SELECT e.entry_id, e.detail FROM dlq.replay_run_entries e
        WHERE e.run_id = p_run AND e.entry_id = i.id AND e.detail IS NOT NULL AND e.outcome IS NULL
            AND e.job_id IS NULL OFFSET 0) r
    WHERE r.entry_id <> ALL (p_skipped);
    -- The redeliveries of a run have the origin of the session that started it.
    PERFORM set_config('dlq.origin', coalesce(v_run.origin, ''), true);
    SELECT coalesce(array_agg(s.entry_id), '{}'), array_agg(s.verdict), array_agg(s.job_id)
    INTO v_entries, v_verdicts, v_jobs
    FROM dlq.redeliver(ARRAY(SELECT unnest(p_ids) EXCEPT ALL SELECT unnest(p_skipped)), v_run.actor, 'replay run '
        || p_run, v_run.note, v_run.force,
                       jsonb_build_object('run', p_run)
                           || CASE WHEN v_run.patch IS NOT NULL THEN jsonb_build_object('patch', v_run.patch)
                               ELSE '{}' END
                       || CASE WHEN v_run.merge_patch IS NOT NULL
                           THEN jsonb_build_object('mergePatch', v_run.merge_patch) ELSE '{}' END
                       || CASE WHEN v_run.destination IS NOT NULL
                           THEN jsonb_build_object('destination', v_run.destination) ELSE '{}' END
                       || jsonb_strip_nulls(jsonb_build_object('checkpoint', v_run.checkpoint)), v_run.queue,
                       v_run.destination, p_run, p_checkpoint => v_run.checkpoint) s;
    UPDATE dlq.replay_run_entries r SET job_id = s.job_id, behind = NULL, detail = NULL, sent_at = clock_timestamp()
    FROM unnest(v_entries, v_verdicts, v_jobs) s (entry_id, verdict, job_id)
    CROSS JOIN LATERAL (SELECT e.ctid FROM dlq.replay_run_entries e
        WHERE e.run_id = p_run AND e.entry_id = s.entry_id OFFSET 0) f
    WHERE s.verdict IN ('sent', 'follows') AND r.ctid = f.ctid AND (r.job_id IS NULL AND r.outcome IS NULL) IS TRUE;
    GET DIAGNOSTICS v_replayed = ROW_COUNT;
    IF v_replayed < cardinality(p_ids) THEN
        UPDATE dlq.replay_run_entries r SET behind = r.entry_id
        FROM unnest(v_entries, v_verdicts) s (entry_id, verdict)
        CROSS JOIN LATERAL (SELECT e.ctid FROM dlq.replay_run_entries e
            WHERE e.run_id = p_run AND e.entry_id = s.entry_id OFFSET 0) f
        WHERE s.verdict = 'alone' AND r.ctid = f.ctid;
        GET DIAGNOSTICS v_alone = ROW_COUNT;
        UPDATE dlq.replay_run_entries r SET
            behind = NULL,
            outcome = 'skipped',
            detail = w.why,
            reason = w.reason,
            ended_at = now(),
            closed_as = CASE WHEN w.moved THEN (SELECT e.resolution_strategy FROM dlq.dead_letter_queue e
                WHERE e.id = r.entry_id AND e.closed_at >= v_run.created_at - interval '1 day') END,
            taken_by = CASE WHEN w.moved THEN (SELECT CASE WHEN dlq.is_person(t.actor) THEN t.actor END
                FROM dlq.dead_letter_transitions t
                WHERE t.entry_id = r.entry_id AND t.at >= v_run.created_at AND t.from_status <> t.to_status
                ORDER BY t.at DESC, t.id DESC LIMIT 1) END
        FROM (
            SELECT i.id, s.verdict IS NULL AND k.id IS NULL AS moved,
                   coalesce(k.why, CASE s.verdict
                       WHEN 'live' THEN 'job ' || s.job_id || ' with the same unique key is live'
                       WHEN 'done' THEN 'job ' || s.job_id
                           || ' with the same unique key has ended, and may have done its work'
                       WHEN 'open' THEN 'its job ' || s.job_id || ' has an open entry'
                       WHEN 'busy' THEN 'another transaction had locked its job ' || s.job_id
                           || ' or the job''s unique key'
                       WHEN 'resolved' THEN 'job ' || s.job_id || ' had completed' END,
                           'the entry had moved meanwhile') AS why,
                   CASE WHEN k.id IS NOT NULL THEN k.reason ELSE CASE s.verdict WHEN 'live' THEN 'live_job'
                       WHEN 'done' THEN 'done_job' WHEN 'open' THEN 'open_entry' WHEN 'busy' THEN 'busy'
                       WHEN 'resolved' THEN 'resolved' ELSE 'moved' END END AS reason
            FROM unnest(p_ids) i (id)
            LEFT JOIN unnest(v_entries, v_verdicts, v_jobs) s (entry_id, verdict, job_id) ON s.entry_id = i.id
            LEFT JOIN unnest(p_skipped, p_why, p_reasons) k (id, why, reason) ON k.id = i.id
            WHERE s.verdict IS NULL OR s.verdict NOT IN ('sent', 'follows', 'alone')
        ) w
        CROSS JOIN LATERAL (SELECT e.ctid FROM dlq.replay_run_entries e
            WHERE e.run_id = p_run AND e.entry_id = w.id OFFSET 0) f
        WHERE r.ctid = f.ctid AND (r.job_id IS NULL AND r.outcome IS NULL) IS TRUE;
    END IF;
    UPDATE dlq.replay_runs SET cursor = p_ids[cardinality(p_ids)], replayed = replayed + v_replayed,
        skipped = skipped + cardinality(p_ids) - v_replayed - v_alone, updated_at = now(),
        sending = sending + extract(epoch FROM clock_timestamp() - coalesce(stepped_at, now())),
        stepped_at = clock_timestamp()
    WHERE id = p_run;
END
$$;
COMMENT ON FUNCTION dlq.replay_step IS
    'Advances a replay run by the entries p_ids, in their order: redelivers them, except p_skipped and '
    'those behind an entry of their ordering key that did not succeed, records the result of each, and moves the '
    'run''s cursor. p_why are the texts of p_skipped, p_reasons their identifiers (replay_run_entries.reason).';

CREATE OR REPLACE FUNCTION dlq.replay_pause(p_run uuid, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE sql AS $$ SELECT dlq.replay_move(p_run, '{running}', 'paused', 'paused by ' || dlq.actor(p_actor));
SELECT dlq.record_act('replay run ' || p_run, 'paused', p_actor) $$;
COMMENT ON FUNCTION dlq.replay_pause IS 'Pauses a replay run.';
CREATE OR REPLACE FUNCTION dlq.replay_resume(p_run uuid, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE sql AS $$ SELECT dlq.replay_move(p_run, '{paused,stopped}', 'running', 'resumed by ' || dlq.actor(p_actor));
SELECT dlq.record_act('replay run ' || p_run, 'resumed', p_actor) $$;
COMMENT ON FUNCTION dlq.replay_resume IS
    'Resumes a replay run that is paused, or that stopped because too many entries failed.';
CREATE OR REPLACE FUNCTION dlq.replay_cancel(p_run uuid, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE sql AS $$ SELECT dlq.replay_move(p_run, '{running,paused,stopped}', 'cancelled', 'cancelled by '
    || dlq.actor(p_actor)); SELECT dlq.record_act('replay run ' || p_run, 'cancelled', p_actor) $$;
COMMENT ON FUNCTION dlq.replay_cancel IS 'Ends a replay run. Redeliveries that it made continue.';

CREATE OR REPLACE FUNCTION dlq.replay_set_rate(p_run uuid, p_rate float8 DEFAULT NULL,
    p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_approved float8; -- the rate that the request for approval named; null without a limit
BEGIN
    PERFORM dlq.check_rate(p_rate);
    SELECT CASE WHEN a.id IS NULL THEN r.rate ELSE (
        SELECT min(nullif(k.value::text::float8, 0)) FROM jsonb_each(a.request) k -- dlqd reads keys in any case
        WHERE lower(k.key) = 'rate' AND jsonb_typeof(k.value) = 'number') END INTO v_approved
    FROM dlq.replay_runs r LEFT JOIN dlq.approvals a ON a.id = r.approval
    WHERE r.id = p_run AND r.approval IS NOT NULL AND dlq.scope_within(r.scope, dlq.scope());
    IF coalesce(p_rate, 'infinity') > v_approved THEN
        RAISE EXCEPTION 'replay run %: approved for % a second; a greater rate needs a new request', p_run, v_approved
            USING ERRCODE = 'DLQ01', HINT = 'Cancel the run, and request a run of the rest with the greater rate.';
    END IF;
    -- After a change of the rate, lowered rates to destinations are reset, and earlier answers of destinations do not
    -- count.
    UPDATE dlq.replay_runs r SET rate = p_rate, updated_at = now(), paces = (
        SELECT jsonb_object_agg(p.key, jsonb_build_object('from', n.now, 'fell', n.now))
        FROM jsonb_each(r.paces) p CROSS JOIN clock_timestamp() n (now))
    WHERE r.id = p_run
        AND r.status IN ('running', 'paused', 'stopped') AND dlq.scope_within(r.scope, dlq.scope());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'replay run %: there is no such run, or it has ended', p_run USING ERRCODE = 'DLQ02';
    END IF;
    -- The place of the next entry was reserved at the old rate.
    DELETE FROM dlq.paces WHERE name = 'replay:' || p_run; -- first, as in dlq.run_place
    DELETE FROM dlq.paces WHERE name LIKE 'replay:' || p_run || ':%';
    PERFORM dlq.record_act('replay run ' || p_run, 'rate changed', p_actor, NULL, jsonb_build_object('rate', p_rate));
END
$$;
COMMENT ON FUNCTION dlq.replay_set_rate IS
    'Sets how many entries a second a replay run sends; null for no limit. Refuses a greater rate than a second person '
    'has approved.';

-- closed_since returns the earliest time at which any of the entries can have closed, because an entry closes after its
-- job failed. Statements use it to exclude earlier months, and therefore not to lock them. One day is subtracted
-- because clocks may differ.
CREATE OR REPLACE FUNCTION dlq.closed_since(p_ids uuid[]) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT least(dlq.captured_at((SELECT i.id FROM unnest(p_ids) i (id) ORDER BY i.id LIMIT 1)),
        now()) - interval '1 day'
$$;
COMMENT ON FUNCTION dlq.closed_since IS 'A time before which none of these entries can have closed.';

-- note_on writes audit rows for changes that do not move entries. For an operation that can be undone, callers run it
-- before the change: it records the old values of the columns p_was, and the tags in p_tags that the entry does not
-- have yet.
CREATE OR REPLACE FUNCTION dlq.note_on(p_ids uuid[], p_actor text, p_reason text, p_note text,
    p_stages dlq.dead_letter_stage[] DEFAULT '{open,resolved,failed,archived,returned}',
    p_operation uuid DEFAULT NULL, p_was text[] DEFAULT NULL, p_tags text[] DEFAULT NULL,
    p_since timestamptz DEFAULT NULL, p_until timestamptz DEFAULT 'infinity') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_since  timestamptz := coalesce(p_since, dlq.closed_since(p_ids));
    v_actor  constant text := dlq.actor(p_actor);
    v_origin constant text := dlq.origin(v_actor, p_actor);
BEGIN
    INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, reason, note, strategy, rule,
        next_retry_at, river_job_id, queue, kind, error_class, from_class, config_version, origin, operation, detail)
    SELECT e.id, e.status, e.status, v_actor, p_reason, p_note, e.strategy, e.rule, e.next_retry_at, e.river_job_id,
           e.queue, e.kind, e.error_class, e.error_class,
           CASE WHEN v_origin IS NULL THEN e.config_version ELSE coalesce(dlq.policy_version(), e.config_version) END,
               v_origin, p_operation,
           CASE WHEN p_was IS NOT NULL THEN jsonb_build_object('was',
               CASE WHEN 'assignee' = ANY (p_was) THEN jsonb_build_object('assignee', e.assigned_to) ELSE '{}' END
               || CASE WHEN 'notes' = ANY (p_was) THEN jsonb_build_object('notes', e.notes) ELSE '{}' END
               || CASE WHEN p_tags IS NOT NULL THEN jsonb_build_object('added',
                   ARRAY(SELECT DISTINCT t FROM unnest(p_tags) t WHERE t <> ALL (e.tags))) ELSE '{}' END) END
    FROM dlq.dead_letter_queue e
    WHERE e.id = ANY (p_ids) AND e.stage = ANY (p_stages) AND (e.closed_at IS NULL
        OR e.closed_at BETWEEN v_since AND p_until);
END
$$;
COMMENT ON FUNCTION dlq.note_on IS
    'Writes an audit row for each of the entries, which must be in partitions of these stages and are not '
    'moved. p_since and p_until: when the first and the last closed entry closed, if the caller knows.';

-- lock_open locks entries for dlq.lock_filed. It is a function of its own so that Postgres keeps its plan: in
-- lock_filed, Postgres would plan the statement again for each batch.
CREATE OR REPLACE FUNCTION dlq.lock_open(p_ids uuid[], p_from dlq.dead_letter_status[]) RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN (SELECT coalesce(array_agg(l.id), '{}')
            FROM (SELECT e.id FROM dlq.dead_letter_open e
                  -- IS TRUE excludes the indexes on the status, as in dlq.redeliver_now.
                  WHERE e.id = ANY (p_ids) AND (e.status = ANY (p_from)) IS TRUE ORDER BY e.id FOR UPDATE) l);
END
$$;
COMMENT ON FUNCTION dlq.lock_open IS
    'Locks the given entries that are open and in one of these states. Returns their ids.';

-- lock_filed locks filed entries: first the open ones by id, then the closed ones by id, so that no
-- two transactions deadlock. It looks for closed entries only if not all entries are open, and only
-- in the stages of the states p_from. If an entry moves to another partition while the statement
-- waits for its lock, Postgres ends the statement (40001), and the loop repeats it.
--
-- A statement locks the partition of each month that it may read, with all indexes of the partition. Most entries
-- close within two months after their job failed, so the search for a single entry begins with these months. The
-- results since and until let the caller's statements lock few months, too.
CREATE OR REPLACE FUNCTION dlq.lock_filed(p_ids uuid[], p_from dlq.dead_letter_status[],
    OUT ids uuid[], OUT stages dlq.dead_letter_stage[], OUT since timestamptz, OUT until timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_from   timestamptz;
    v_until  timestamptz;
    v_closed dlq.dead_letter_stage[];
    v_found  record;
BEGIN
    FOR v_try IN 1 .. 10 LOOP
        BEGIN
            ids := dlq.lock_open(p_ids, p_from);
            stages := CASE WHEN ids = '{}' THEN '{}' ELSE '{open}' END;
            since := NULL;
            until := NULL;
            EXIT WHEN cardinality(ids) >= cardinality(p_ids);
            v_from := dlq.closed_since(p_ids);
            v_closed := ARRAY(SELECT DISTINCT dlq.stage_of(f.status) FROM unnest(p_from) f (status)
                WHERE NOT dlq.is_open(f.status));
            FOREACH v_until IN ARRAY CASE WHEN cardinality(p_ids) = 1
                THEN ARRAY[v_from + interval '2 months', 'infinity']
                                       ELSE ARRAY['infinity'::timestamptz] END LOOP
                EXIT WHEN cardinality(ids) >= cardinality(p_ids) OR v_closed = '{}';
                SELECT array_agg(l.id) AS ids, array_agg(DISTINCT l.stage) AS stages, min(l.closed_at) AS since,
                    max(l.closed_at) AS until
                INTO v_found
                FROM (SELECT e.id, e.stage, e.closed_at FROM dlq.dead_letter_queue e
                      WHERE e.id = ANY (p_ids) AND e.status = ANY (p_from) AND e.stage = ANY (v_closed)
                        AND e.closed_at BETWEEN v_from AND v_until
                      ORDER BY e.id FOR UPDATE) l;
                ids := ids || v_found.ids;
                stages := stages || v_found.stages;
                since := v_found.since;
                until := v_found.until;
            END LOOP;
            EXIT;
        EXCEPTION WHEN serialization_failure THEN
            IF v_try = 10 OR current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.lock_filed IS
    'Locks the given entries that are in one of these states. All must be filed. Returns their ids, their '
    'stages, and when the first and the last of them closed (null if none is closed).';

-- lock_entries first files those of the given entries that are still in the inbox, and then locks the given entries
-- with lock_filed.
CREATE OR REPLACE FUNCTION dlq.lock_entries(p_ids uuid[], p_from dlq.dead_letter_status[],
    OUT ids uuid[], OUT stages dlq.dead_letter_stage[], OUT since timestamptz, OUT until timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.file(p_ids);
    SELECT l.* INTO ids, stages, since, until FROM dlq.lock_filed(p_ids, p_from) l;
END
$$;
COMMENT ON FUNCTION dlq.lock_entries IS
    'Files the entries and locks those that are in one of these states. Returns what dlq.lock_filed returns.';

-- act_on makes one change on many entries: a move, or one of assign, tag, note and purge. It skips entries whose state
-- does not allow the change, and entries outside the caller's scope.
CREATE OR REPLACE FUNCTION dlq.act_on(p_action text, p_ids uuid[], p_actor text, p_note text DEFAULT NULL,
    p_args jsonb DEFAULT '{}')
RETURNS SETOF uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan SET row_security = off AS $$
DECLARE
    v_actor      constant text := dlq.actor(p_actor);
    v_ids        uuid[];
    v_in_scope   uuid[];
    v_stages     dlq.dead_letter_stage[];
    v_tags       text[];
    v_filter     constant jsonb := p_args -> 'filter';
    v_operation  constant uuid := coalesce((p_args ->> 'operation')::uuid, dlq.uuid_v7());
    v_move       constant jsonb := jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', CASE p_action
        WHEN 'discard' THEN 'discarded' WHEN 'expire' THEN 'expired' WHEN 'resolve' THEN 'resolved outside dlqd' END,
        'note', p_note,
        'operation', v_operation); -- if it is the same for all entries
    v_moving     boolean := false;
    v_old_values constant text[] := CASE WHEN p_note IS NOT NULL THEN '{notes}' ELSE '{}' END;
    v_since      timestamptz;
    v_until      timestamptz;
    v_from       dlq.dead_letter_status[] := CASE p_action
        WHEN 'discard' THEN '{dlq_pending,dlq_manual,dlq_failed,dlq_returned}'
        WHEN 'expire'  THEN '{dlq_pending,dlq_manual,dlq_failed}'
        WHEN 'resolve' THEN '{dlq_manual,dlq_returned}'
        WHEN 'park'    THEN '{dlq_pending}'
        WHEN 'unpark'  THEN '{dlq_manual}'
        WHEN 'reopen'  THEN '{dlq_resolved,dlq_archived,dlq_returned}'
        WHEN 'assign'  THEN enum_range(NULL::dlq.dead_letter_status)
        WHEN 'tag'     THEN enum_range(NULL::dlq.dead_letter_status)
        WHEN 'note'    THEN enum_range(NULL::dlq.dead_letter_status)
        WHEN 'purge'   THEN CASE WHEN (p_args ->> 'force')::boolean
            THEN '{dlq_pending,dlq_manual,dlq_failed,dlq_returned,dlq_resolved,dlq_archived}'::dlq.dead_letter_status[]
                              ELSE '{dlq_resolved,dlq_archived}'::dlq.dead_letter_status[] END
    END;
BEGIN
    IF v_from IS NULL THEN
        RAISE EXCEPTION 'there is no action %', p_action USING ERRCODE = 'DLQ04',
            HINT = 'Actions: discard, expire, resolve, park, unpark, reopen, assign, tag, note, purge.';
    END IF;
    p_args := jsonb_strip_nulls(p_args - '{operation,filter}'::text[]);
    IF length(p_note) > 10000 OR length(p_args ->> 'assignee') > 255 OR jsonb_typeof(p_args -> 'tags') = 'array'
        AND jsonb_array_length(p_args -> 'tags') > 32 THEN
        RAISE EXCEPTION '%: the note, assignee or list of tags is too long', p_action USING ERRCODE = 'DLQ04',
            HINT = 'Limits: note 10000 characters, assignee 255 characters, 32 tags at a time.';
    END IF;
    PERFORM dlq.require_approval_to(p_action, p_args, jsonb_build_object('ids', to_jsonb(p_ids)), false);
    IF p_action IN ('tag', 'park') AND EXISTS (SELECT FROM jsonb_array_elements_text(p_args -> 'tags') t
        WHERE t !~ '^[A-Za-z0-9_][A-Za-z0-9_-]{1,253}[A-Za-z0-9_]$') THEN
        RAISE EXCEPTION 'a tag must be 3 to 255 letters, digits, _ and -, and neither start nor end with -'
            USING ERRCODE = 'DLQ04', HINT = 'River rejects jobs with other tags.';
    END IF;
    v_in_scope := dlq.ids_in_scope(p_ids);
    SELECT l.* INTO v_ids, v_stages, v_since, v_until FROM dlq.lock_entries(v_in_scope, v_from) l;
    v_tags := ARRAY(SELECT jsonb_array_elements_text(p_args -> 'tags'));
    IF p_action IN ('discard', 'expire', 'resolve') AND cardinality(v_ids) > 1 THEN
        v_moving := dlq.set_moves(v_move);
    END IF;
    -- The conditions contain stages and time bounds, so that the plans exclude partitions that cannot hold these
    -- entries.
    CASE p_action
    WHEN 'discard', 'expire' THEN
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_archived',
            resolution_strategy = (CASE p_action WHEN 'expire' THEN 'expired' ELSE 'discard'
                END)::dlq.resolution_strategy,
            resolved_by = v_actor, resolution_notes = p_note,
            notes = coalesce(p_note, e.notes), move = v_move
        WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed', 'dlq_returned')
            AND e.stage = ANY (v_stages) AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
    WHEN 'resolve' THEN
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_resolved', resolution_strategy = 'manual_resolution',
            resolved_by = v_actor, resolution_notes = p_note,
            notes = coalesce(p_note, e.notes), move = v_move
        WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_manual', 'dlq_returned') AND e.stage = ANY (v_stages)
            AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
        IF v_moving THEN
            v_moving := dlq.set_moves(NULL);
        END IF;
        PERFORM dlq.supersede(v_ids, '{}', v_actor);
    WHEN 'park' THEN
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_manual', strategy = 'manual', parked_by = v_actor,
            notes = coalesce(p_note, e.notes),
            tags = CASE WHEN p_args ? 'tags' THEN ARRAY(SELECT DISTINCT t FROM unnest(e.tags || v_tags) t ORDER BY t)
                ELSE e.tags END,
            move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'parked', 'note', p_note,
                'operation', v_operation, 'detail', jsonb_build_object('was', jsonb_build_object(
                'strategy', e.strategy, 'rule', e.rule, 'nextRetryAt', e.next_retry_at, 'waitingFor', e.waiting_for,
                'added', ARRAY(SELECT DISTINCT t FROM unnest(v_tags) t WHERE t <> ALL (e.tags)))
                || CASE WHEN p_note IS NOT NULL THEN jsonb_build_object('notes', e.notes) ELSE '{}' END))
        WHERE e.id = ANY (v_ids) AND e.status = 'dlq_pending' AND e.stage = 'open';
    WHEN 'unpark' THEN
        -- The entry is due at once, with the immediate strategy: an operator has decided, so the class does not matter
        -- this time. The rule becomes unparked, because an entry with the rule single-attempt or backfilled stays
        -- manual unless a switch of automatic redelivery includes that rule.
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_pending', strategy = 'immediate', rule = 'unparked',
            next_retry_at = now(), notes = coalesce(p_note, e.notes),
            move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'returned to the automatic path',
                'note', p_note, 'operation', v_operation,
                'detail', jsonb_build_object('was', jsonb_build_object('strategy', e.strategy, 'rule', e.rule,
                    'parkedBy', e.parked_by) || CASE WHEN p_note IS NOT NULL THEN jsonb_build_object('notes', e.notes)
                        ELSE '{}' END))
        WHERE e.id = ANY (v_ids) AND e.status = 'dlq_manual' AND e.stage = 'open';
        PERFORM dlq.wake();
    WHEN 'reopen' THEN
        -- Skip entries whose payload was erased, and entries whose job already has another open entry.
        WITH reopened AS (
            UPDATE dlq.dead_letter_queue e SET status = 'dlq_manual', strategy = 'manual', parked_by = v_actor,
                notes = coalesce(p_note, e.notes),
                move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'reopened', 'note', p_note,
                    'operation', v_operation)
            WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_resolved', 'dlq_archived', 'dlq_returned')
                AND e.stage = ANY (v_stages)
                AND e.closed_at BETWEEN v_since AND v_until
              AND e.original_event <> '{"erased": true}'
              AND NOT dlq.has_open_entry(e.river_job_id, e.job_created_at)
            RETURNING e.id)
        SELECT coalesce(array_agg(r.id ORDER BY r.id), '{}') INTO v_ids FROM reopened r;
    WHEN 'assign' THEN
        PERFORM dlq.note_on(v_ids, p_actor, coalesce('assigned to ' || nullif(p_args ->> 'assignee', ''),
            'assigned to nobody'), p_note, v_stages, v_operation,
                            v_old_values || '{assignee}'::text[], p_since => v_since, p_until => v_until);
        UPDATE dlq.dead_letter_queue e SET assigned_to = nullif(p_args ->> 'assignee', ''),
            notes = coalesce(p_note, e.notes)
        WHERE e.id = ANY (v_ids) AND e.stage = ANY (v_stages)
            AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
    WHEN 'tag' THEN
        PERFORM dlq.note_on(v_ids, p_actor, 'tagged ' || (p_args ->> 'tags'), p_note, v_stages, v_operation,
            v_old_values,
            v_tags, v_since, v_until);
        UPDATE dlq.dead_letter_queue e SET tags = ARRAY(SELECT DISTINCT t FROM unnest(e.tags || v_tags) t ORDER BY t),
            notes = coalesce(p_note, e.notes)
        WHERE e.id = ANY (v_ids) AND e.stage = ANY (v_stages)
            AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
    WHEN 'note' THEN
        PERFORM dlq.note_on(v_ids, p_actor, 'noted', p_note, v_stages, v_operation, '{notes}', p_since => v_since,
            p_until => v_until);
        UPDATE dlq.dead_letter_queue e SET notes = p_note
        WHERE e.id = ANY (v_ids) AND e.stage = ANY (v_stages)
            AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
    WHEN 'purge' THEN
        PERFORM dlq.require_admin('purge');
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_archived', resolution_strategy = 'discard',
            resolved_by = v_actor,
            move = jsonb_build_object('actor', v_actor, 'claimed', p_actor, 'reason', 'discarded, to be purged', 'note',
                p_note, 'operation', v_operation)
        WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed', 'dlq_returned')
            AND e.stage = ANY (v_stages) AND (e.closed_at IS NULL OR e.closed_at BETWEEN v_since AND v_until);
        PERFORM dlq.delete_entries(v_ids, NULL, p_actor, 'purged', p_note, v_operation);
    END CASE;
    IF v_moving THEN
        PERFORM dlq.set_moves(NULL);
    END IF;
    PERFORM dlq.record_operation(v_operation, p_action, v_filter, p_args, p_actor, p_note, v_in_scope, v_ids);
    RETURN QUERY SELECT unnest(v_ids);
END
$$;
COMMENT ON FUNCTION dlq.act_on IS
    'Makes one change on many entries: discard, expire, resolve, park (with {"tags": ["incident-81"]}, to find them '
    'again), unpark, reopen, assign ({"assignee": "kim"}), tag ({"tags": ["bank"]}), note or purge ({"force": true} '
    'for open, failed and returned ones). Leaves entries whose status does not permit the action; reopen also leaves '
    'erased entries, and entries whose job has another open entry. Returns the ids of those that it changed. A call, '
    'or several calls with the same "operation" (a UUID) in p_args, is one operation: see dlq.operations.';

CREATE OR REPLACE FUNCTION dlq.act_where(p_action text, p_filter jsonb, p_actor text DEFAULT session_user,
    p_note text DEFAULT NULL, p_args jsonb DEFAULT '{}',
    p_all boolean DEFAULT false, p_limit integer DEFAULT 1000, p_after uuid DEFAULT NULL, p_below uuid DEFAULT NULL,
    OUT looked integer, OUT changed integer, OUT last uuid, OUT operation uuid)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    operation := coalesce((p_args ->> 'operation')::uuid, dlq.uuid_v7());
    IF dlq.chooses_all(p_filter) AND NOT p_all THEN
        RAISE EXCEPTION '%: an empty filter matches every entry', p_action USING ERRCODE = 'DLQ04',
            HINT = 'To select all entries, pass p_all => true.';
    END IF;
    PERFORM dlq.require_approval_to(p_action, p_args, p_filter, p_all);
    v_ids := ARRAY(SELECT dlq.find_ids(p_filter, p_limit, p_after, false, p_below));
    looked := cardinality(v_ids);
    last := v_ids[looked];
    SELECT count(*) INTO changed
    FROM dlq.act_on(p_action, v_ids, p_actor, p_note,
        p_args || jsonb_build_object('operation', operation, 'filter', p_filter));
    IF dlq.approved() IS NOT NULL THEN -- so that a session that continues the approval skips these entries
        UPDATE dlq.approval_entries x SET done_at = now() WHERE x.approval_id = dlq.approved()
            AND x.entry_id = ANY (v_ids);
        UPDATE dlq.approvals a SET changed = coalesce(a.changed, 0) + act_where.changed WHERE a.id = dlq.approved();
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.act_where IS
    'Makes one change (see dlq.act_on) on up to p_limit (null: all) entries that match a filter (see dlq.find), '
    'in order of capture after p_after. Returns how many it read, how many it changed, the last id, for the '
    'next p_after, and the operation, for dlq.undo. Pass the operation in p_args to make the next batch part of '
    'it.';

CREATE OR REPLACE FUNCTION dlq.act_on_one(p_action text, p_id uuid, p_actor text, p_note text,
    p_args jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    IF EXISTS (SELECT FROM dlq.act_on(p_action, ARRAY[p_id], p_actor, p_note, p_args)) THEN
        RETURN;
    END IF;
    v_ids := dlq.ids_in_scope(ARRAY[p_id]);
    IF p_action = 'reopen' AND EXISTS (SELECT FROM dlq.dead_letter_queue e
        WHERE e.id = ANY (v_ids) AND e.status IN ('dlq_resolved', 'dlq_archived', 'dlq_returned')) THEN
        RAISE EXCEPTION 'dead letter %: cannot be reopened: its payload was erased, or its job has an open entry again',
            p_id USING ERRCODE = 'DLQ01';
    END IF;
    PERFORM dlq.refuse_move(p_id, p_action, CASE p_action
        WHEN 'discard' THEN 'dlq_pending, dlq_manual, dlq_failed, dlq_returned'
        WHEN 'expire' THEN 'dlq_pending, dlq_manual, dlq_failed' WHEN 'resolve' THEN 'dlq_manual, dlq_returned'
        WHEN 'park' THEN 'dlq_pending' WHEN 'unpark' THEN 'dlq_manual'
                                                     WHEN 'reopen' THEN 'dlq_resolved, dlq_archived, dlq_returned'
                                                     ELSE 'any' END);
END
$$;
COMMENT ON FUNCTION dlq.act_on_one IS 'Makes one change on one entry, or raises an error that says why it cannot.';

CREATE OR REPLACE FUNCTION dlq.assign(p_id uuid, p_assignee text, p_actor text DEFAULT session_user,
    p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('assign', p_id, p_actor, p_note, jsonb_build_object('assignee', p_assignee));
END
$$;
COMMENT ON FUNCTION dlq.assign IS 'Assigns an entry to a person; null to unassign it.';

CREATE OR REPLACE FUNCTION dlq.note(p_id uuid, p_note text, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.act_on_one('note', p_id, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.note IS 'Sets the note of an entry. The audit trail keeps earlier notes.';
