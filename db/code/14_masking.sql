-- Masking: data that the policy marks as sensitive (data.sensitivePaths and data.sensitivePatterns of
-- retry-policies.yaml) is shown as ***. Views, functions, API, CLI and exports all use these functions.
--
-- A mask is the result of dlq.mask, or null if nothing is masked:
--   - hidden: columns that a reader does not see at all
--   - where: a regular expression of sensitive paths
--   - keys: a regular expression that matches JSON text with any value at these paths
--   - last: the last keys of these paths, if they are known
--   - patterns: names of patterns
--
-- A path has the keys from the outermost one to that of the value, separated by the character U+001F. Positions in
-- arrays are not part of a path, so a path matches in every element of an array.

CREATE OR REPLACE FUNCTION dlq.is_reader() RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN NOT (dlq.has_role('dlq_operator') OR dlq.has_role('dlq_admin'))
        OR coalesce(current_setting('dlq.sight', true) = 'reader', false) AND dlq.is_owner();
END
$$;
COMMENT ON FUNCTION dlq.is_reader IS
    'Whether the caller sees only what a dlq_reader sees: by its roles or, for a user of dlqd, by the setting '
    'dlq.sight, which dlqd sets.';

CREATE OR REPLACE FUNCTION dlq.sensitive_columns() RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_to_array(coalesce((SELECT s.value FROM dlq.settings s WHERE s.key = 'sensitive_columns'),
        'original_event,edited_event,error_context,metadata'), ',')
$$;
COMMENT ON FUNCTION dlq.sensitive_columns IS
    'The columns of entries that the policy marks as sensitive. Until dlqd has published the policy: its '
    'defaults.';

-- error_title is the beginning of the error message, so it is hidden together with the message.
CREATE OR REPLACE FUNCTION dlq.with_title(p_columns text[]) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN 'error_message' = ANY (p_columns) THEN p_columns || 'error_title'::text ELSE p_columns END;
COMMENT ON FUNCTION dlq.with_title IS 'Hidden columns, with error_title if error_message is one of them.';

CREATE OR REPLACE FUNCTION dlq.hidden_columns() RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN CASE WHEN dlq.is_reader() THEN dlq.with_title(dlq.sensitive_columns()) ELSE '{}' END;
END
$$;
COMMENT ON FUNCTION dlq.hidden_columns IS 'The columns of entries that the caller does not see.';

CREATE OR REPLACE FUNCTION dlq.mask(p_reader boolean DEFAULT dlq.is_reader()) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT nullif(coalesce((SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'sensitive'), '{}')
                  || CASE WHEN p_reader THEN jsonb_build_object('hidden', dlq.sensitive_columns()) ELSE '{}' END, '{}')
$$;
COMMENT ON FUNCTION dlq.mask IS
    'The rules of the policy for masked values and, for a reader (p_reader), the hidden columns. Null if p_reader is '
    'false and the policy masks nothing.';

CREATE OR REPLACE FUNCTION dlq.masked_columns() RETURNS text[]
LANGUAGE sql IMMUTABLE
RETURN '{original_event,edited_event,error_message,error_title,destination_url,error_stack_trace,error_context,retry_history,replay_attempts,metadata,subscriber_id,tags,ordering_key,notes,resolution_notes,move,record}'::text[];
COMMENT ON FUNCTION dlq.masked_columns IS 'The columns of entries that may contain masked values.';

CREATE OR REPLACE FUNCTION dlq.filtered_columns() RETURNS text[]
LANGUAGE sql IMMUTABLE
RETURN '{original_event,edited_event,error_message,subscriber_id,ordering_key,tags}'::text[];
COMMENT ON FUNCTION dlq.filtered_columns IS
    'The columns of entries whose values occur in filters. A caller who does not see one of them does not see '
    'filters of others.';

CREATE OR REPLACE FUNCTION dlq.personal_filters() RETURNS text[]
LANGUAGE sql IMMUTABLE
RETURN '{payload,payloadAt,subscriberId,orderingKey,tags}'::text[];
COMMENT ON FUNCTION dlq.personal_filters IS
    'The filter fields that search dlq.filtered_columns(); their values may name a person.';

-- tokens matches JWTs, Bearer and Basic credentials, private keys, and tokens with the prefixes of common issuers.
-- cardNumbers matches numbers with the prefixes of card issuers, without separators or in the groups that are printed
-- on cards. emails matches addresses with a dot in their domain, also in URLs.
CREATE OR REPLACE FUNCTION dlq.pattern(p_name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_name
    WHEN 'tokens' THEN 'eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?'
        || '|(?:[Bb]earer|BEARER|[Bb]asic|BASIC)[ :]+[A-Za-z0-9._~+/=-]{8,}'
        || '|(?:dlqds?|npm|github_pat|gh[oprsu])_[A-Za-z0-9_]{16,}|(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{8,}|whsec_[A-Za-z0-9+/=]{16,}|sk-[A-Za-z0-9_-]{20,}'
        || '|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|xox[a-z]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{16,}'
        || '|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[A-Za-z0-9+/=\s]*'
    WHEN 'emails' THEN '[A-Za-z0-9._%+-]+(?:@|%40)(?:[A-Za-z0-9-]+\.)+[A-Za-z][A-Za-z0-9-]*[A-Za-z0-9]'
    WHEN 'cardNumbers' THEN '(?<![0-9.])(?:[2-6][0-9]{12,18}|[2-6][0-9]{3}(?:[ -][0-9]{4}){3}|3[47][0-9]{2}[ -][0-9]{6}[ -][0-9]{5})(?![0-9])'
END;
COMMENT ON FUNCTION dlq.pattern IS
    'The regular expression of a pattern: tokens, emails or cardNumbers. Of card numbers, only those with a correct '
    'check digit are masked (dlq.is_luhn).';

CREATE OR REPLACE FUNCTION dlq.is_luhn(p_number text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT sum(CASE WHEN d.place % 2 = 1 THEN d.digit::integer WHEN d.digit > '4' THEN d.digit::integer * 2 - 9
        ELSE d.digit::integer * 2 END) % 10 = 0
    FROM regexp_split_to_table(reverse(regexp_replace(p_number, '[^0-9]', '', 'g')), '') WITH ORDINALITY d (digit,
        place)
$$;
COMMENT ON FUNCTION dlq.is_luhn IS 'Whether the check digit of a number is correct (ISO/IEC 7812, Luhn).';

CREATE OR REPLACE FUNCTION dlq.has_card(p_text text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_text ~ dlq.pattern('cardNumbers')
        AND (SELECT count(*) = 101 OR bool_or(dlq.is_luhn(f.found[1]))
            FROM (SELECT found FROM regexp_matches(p_text, '(' || dlq.pattern('cardNumbers') || ')', 'g') found
                LIMIT 101) f)
$$;
COMMENT ON FUNCTION dlq.has_card IS 'Whether a text contains a payment card number, or more than 100 candidates.';

-- mask_text and mask_node have no SET clause for search_path, because it would cost more time than the functions
-- themselves; their callers set it. To limit the time, more than necessary is masked in texts that are very long or
-- have very many candidates.
CREATE OR REPLACE FUNCTION dlq.mask_text(p_text text, p_mask jsonb, p_values text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_patterns constant jsonb := p_mask -> 'patterns';
    v_value    text;
    v_found    text[];
BEGIN
    FOREACH v_value IN ARRAY p_values LOOP
        IF v_value IS NULL THEN -- too many values to search for
            RETURN '***';
        END IF;
        p_text := replace(p_text, v_value, '***');
    END LOOP;
    IF v_patterns IS NULL OR length(p_text) < 6 THEN -- patterns match longer texts only
        RETURN p_text;
    ELSIF length(p_text) > 1000000 THEN
        p_text := left(p_text, 1000000) || '***';
    END IF;
    IF v_patterns ? 'emails' AND p_text ~ dlq.pattern('emails') THEN
        p_text := regexp_replace(p_text, dlq.pattern('emails'), '***', 'g');
    END IF;
    IF length(p_text) < 13 THEN -- the other patterns match longer texts only
        RETURN p_text;
    END IF;
    IF v_patterns ? 'tokens' AND p_text ~ dlq.pattern('tokens') THEN
        p_text := regexp_replace(p_text, dlq.pattern('tokens'), '***', 'g');
    END IF;
    IF v_patterns ? 'cardNumbers' AND p_text ~ dlq.pattern('cardNumbers') THEN
        v_found := ARRAY(SELECT DISTINCT m[1] FROM regexp_matches(p_text, '(' || dlq.pattern('cardNumbers') || ')',
            'g') m LIMIT 101);
        IF cardinality(v_found) > 100 THEN
            RETURN regexp_replace(p_text, dlq.pattern('cardNumbers'), '***', 'g');
        END IF;
        FOREACH v_value IN ARRAY v_found LOOP
            IF dlq.is_luhn(v_value) THEN
                p_text := replace(p_text, v_value, '***');
            END IF;
        END LOOP;
    END IF;
    RETURN p_text;
END
$$;
COMMENT ON FUNCTION dlq.mask_text IS 'dlq.masked_text for use in other functions.';

-- needs_mask avoids calls of mask_node. Most parts of a document contain nothing to mask, and checking their text takes
-- a tenth of the time of masking them.
CREATE OR REPLACE FUNCTION dlq.needs_mask(p_text text, p_path text, p_mask jsonb, p_values text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_value text;
BEGIN
    IF p_path IS NOT NULL AND p_text ~* (p_mask ->> 'keys') THEN
        RETURN true;
    ELSIF length(p_text) > 5 AND p_mask -> 'patterns' ? 'emails' AND p_text ~ dlq.pattern('emails') THEN
        RETURN true;
    ELSIF length(p_text) > 12 AND (p_mask -> 'patterns' ? 'tokens' AND p_text ~ dlq.pattern('tokens')
        OR p_mask -> 'patterns' ? 'cardNumbers' AND dlq.has_card(p_text)) THEN
        RETURN true;
    END IF;
    FOREACH v_value IN ARRAY p_values LOOP
        IF v_value IS NULL OR position(v_value IN p_text) > 0 THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
COMMENT ON FUNCTION dlq.needs_mask IS
    'Whether the text of JSON at a path (null: no path) may contain something to mask.';

CREATE OR REPLACE FUNCTION dlq.mask_node(p_node jsonb, p_path text, p_mask jsonb, p_values text[],
    p_depth integer DEFAULT 0) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_where constant text := p_mask ->> 'where';
    v_last  constant jsonb := p_mask -> 'last';
    v_under constant text := CASE p_path WHEN '' THEN '' ELSE p_path || chr(31) END;
    v_text  text;
BEGIN
    -- Messages have at most 64 levels; the args of an application's job may have more than the
    -- stack can hold.
    IF p_path ~* v_where OR p_depth > 70 THEN
        RETURN '"***"';
    END IF;
    CASE jsonb_typeof(p_node)
    WHEN 'object' THEN
        RETURN coalesce((
            SELECT jsonb_object_agg(CASE WHEN length(c.key) > 5 OR p_values <> '{}'
                THEN dlq.mask_text(c.key, p_mask, p_values) ELSE c.key END,
                CASE WHEN (v_last IS NULL OR v_last ? lower(c.key)) AND c.path ~* v_where THEN '"***"'
                    WHEN dlq.needs_mask(c.value::text, p_path, p_mask, p_values)
                        THEN dlq.mask_node(c.value, c.path, p_mask, p_values, p_depth + 1) ELSE c.value END)
            FROM (SELECT o.key, o.value, v_under || replace(o.key, chr(31), ' ') AS path
                FROM jsonb_each(p_node) o OFFSET 0) c), '{}');
    WHEN 'array' THEN
        RETURN coalesce((
            SELECT jsonb_agg(CASE WHEN dlq.needs_mask(c.value::text, p_path, p_mask, p_values)
                THEN dlq.mask_node(c.value, p_path, p_mask, p_values, p_depth + 1) ELSE c.value END ORDER BY c.place)
            FROM jsonb_array_elements(p_node) WITH ORDINALITY c (value, place)), '[]');
    WHEN 'string', 'number' THEN
        v_text := dlq.mask_text(p_node #>> '{}', p_mask, p_values);
        RETURN CASE WHEN v_text = p_node #>> '{}' THEN p_node ELSE to_jsonb(v_text) END;
    ELSE
        RETURN p_node;
    END CASE;
END
$$;
COMMENT ON FUNCTION dlq.mask_node IS
    'dlq.masked_json for use in other functions: masks JSON at a path (null: no path). Keys are kept, unless they '
    'contain a masked value; numbers keep their precision. Values below more than 70 levels are masked.';

CREATE OR REPLACE FUNCTION dlq.masked_text(p_text text, p_mask jsonb, p_values text[] DEFAULT '{}') RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN CASE WHEN p_text IS NULL OR p_mask IS NULL THEN p_text ELSE dlq.mask_text(p_text, p_mask, p_values) END;
END
$$;
COMMENT ON FUNCTION dlq.masked_text IS
    'Returns a text with *** in place of p_values, and of matches of the mask''s patterns.';

CREATE OR REPLACE FUNCTION dlq.masked_json(p_document jsonb, p_path text, p_mask jsonb, p_values text[] DEFAULT '{}')
    RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_text text;
    v_out  jsonb;
BEGIN
    IF p_document IS NULL OR p_mask IS NULL OR NOT p_mask ?| '{where,patterns}' THEN
        RETURN p_document;
    END IF;
    IF p_path ~* (p_mask ->> 'where') THEN
        RETURN '"***"';
    END IF;
    v_text := p_document::text;
    IF NOT dlq.needs_mask(v_text, p_path, p_mask, p_values) THEN
        RETURN p_document;
    ELSIF length(v_text) > 50000 THEN
        RETURN '"***"'; -- bounds the time
    END IF;
    -- Search the parts of the document only for values and patterns that the whole document contains.
    v_out := dlq.mask_node(p_document, CASE WHEN v_text ~* (p_mask ->> 'keys') THEN p_path END,
        p_mask || jsonb_build_object('patterns',
            to_jsonb(ARRAY(SELECT p FROM jsonb_array_elements_text(p_mask -> 'patterns') p
                WHERE dlq.needs_mask(v_text, NULL, jsonb_build_object('patterns', jsonb_build_array(p)), '{}')))),
        ARRAY(SELECT v FROM unnest(p_values) WITH ORDINALITY u (v, place) WHERE v IS NULL OR position(v IN v_text) > 0
            ORDER BY place));
    -- payloadText is the payload as the client sent it; it must not reveal what payload masks.
    IF p_document ? 'payloadText' AND v_out -> 'payload' IS DISTINCT FROM p_document -> 'payload' THEN
        v_out := v_out || '{"payloadText": "***"}';
    END IF;
    RETURN v_out;
END
$$;
COMMENT ON FUNCTION dlq.masked_json IS
    'Returns JSON at a path (null: no path) with *** in place of masked values and of p_values. A document of '
    'more than 50,000 characters that contains any is masked as a whole.';

-- The args of an application's job are its payload, so their path is payload. The args of a message
-- have a key payload, so their own path is empty.
CREATE OR REPLACE FUNCTION dlq.event_path(p_job_kind text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_job_kind WHEN 'dlqd_message' THEN '' ELSE 'payload' END;
COMMENT ON FUNCTION dlq.event_path IS 'The path of the args of a job.';

-- Error texts may repeat values at sensitive paths.
CREATE OR REPLACE FUNCTION dlq.sensitive_values(p_original jsonb, p_edited jsonb, p_metadata jsonb, p_job_kind text,
    p_mask jsonb) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_where text := p_mask ->> 'where';
    v_keys  text := p_mask ->> 'keys';
    v_all   text[];
BEGIN
    IF v_where IS NULL OR NOT (coalesce(p_original::text ~* v_keys, false) OR coalesce(p_edited::text ~* v_keys, false)
        OR coalesce(p_metadata::text ~* v_keys, false)) THEN
        RETURN '{}';
    ELSIF coalesce(length(p_original::text), 0) + coalesce(length(p_edited::text),
        0) + coalesce(length(p_metadata::text), 0) > 50000 THEN
        RETURN ARRAY[NULL]::text[]; -- bounds the time
    END IF;
    WITH RECURSIVE n (value, path, found, depth) AS (
        SELECT d.value, d.path, coalesce(d.path ~* v_where, false), 0
        FROM (VALUES (p_original, dlq.event_path(p_job_kind)), (p_edited, dlq.event_path(p_job_kind)),
            (p_metadata, 'metadata')) d (value, path) WHERE d.value IS NOT NULL
        UNION ALL
        SELECT c.value, c.path, n.found OR c.path ~* v_where, n.depth + 1
        FROM n CROSS JOIN LATERAL (
            SELECT o.value, CASE n.path WHEN '' THEN '' ELSE n.path || chr(31) END
                || replace(o.key, chr(31), ' ') AS path
            FROM jsonb_each(CASE jsonb_typeof(n.value) WHEN 'object' THEN n.value END) o
            UNION ALL
            SELECT a.value, n.path FROM jsonb_array_elements(CASE jsonb_typeof(n.value)
                WHEN 'array' THEN n.value END) a) c
        WHERE n.depth < 70
    )
    -- Search for each value as it is, and as JSON writes it, with escapes.
    SELECT array_agg(DISTINCT t.text) INTO v_all
    FROM (SELECT DISTINCT n.value #>> '{}' AS text FROM n WHERE n.found
        AND jsonb_typeof(n.value) IN ('string', 'number') AND length(n.value #>> '{}') > 3 LIMIT 101) v
    CROSS JOIN LATERAL (VALUES (v.text),
        (substr(to_jsonb(v.text)::text, 2, length(to_jsonb(v.text)::text) - 2))) t (text);
    v_all := ARRAY(SELECT v FROM unnest(v_all) v ORDER BY length(v) DESC, v);
    RETURN CASE WHEN cardinality(v_all) > 100 THEN ARRAY[NULL]::text[] ELSE coalesce(v_all, '{}') END;
END
$$;
COMMENT ON FUNCTION dlq.sensitive_values IS
    'Texts and numbers at sensitive paths of an entry, of four or more characters, longest first, which error '
    'texts must not repeat. With more than 100 of them, or more than 50,000 characters to search, the result is '
    'a single null: texts are then masked as a whole.';

CREATE OR REPLACE FUNCTION dlq.masked_event(p_event jsonb, p_job_kind text, p_mask jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN dlq.masked_json(p_event, dlq.event_path(p_job_kind), p_mask,
        dlq.sensitive_values(p_event, NULL, NULL, p_job_kind, p_mask));
END
$$;
COMMENT ON FUNCTION dlq.masked_event IS
    'The args of a job, masked, including repetitions of values at sensitive paths.';

CREATE OR REPLACE FUNCTION dlq.masked(p_entry dlq.dead_letter_queue, p_mask jsonb) RETURNS dlq.dead_letter_queue
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_values text[];
    v_hidden text[];
BEGIN
    IF p_mask IS NULL THEN
        RETURN p_entry;
    END IF;
    p_entry.record := dlq.without_bytes(p_entry.record);
    IF p_mask ?| '{where,patterns}' THEN
        v_values := dlq.sensitive_values(p_entry.original_event, p_entry.edited_event, p_entry.metadata,
            p_entry.job_kind, p_mask);
        p_entry.original_event := dlq.masked_json(p_entry.original_event, dlq.event_path(p_entry.job_kind),
            p_mask, v_values);
        p_entry.edited_event := dlq.masked_json(p_entry.edited_event, dlq.event_path(p_entry.job_kind),
            p_mask, v_values);
        p_entry.metadata := dlq.masked_json(p_entry.metadata, 'metadata', p_mask, v_values);
        p_entry.error_context := dlq.masked_json(p_entry.error_context, NULL, p_mask, v_values);
        p_entry.retry_history := dlq.masked_json(p_entry.retry_history, NULL, p_mask, v_values);
        p_entry.replay_attempts := dlq.masked_json(p_entry.replay_attempts, NULL, p_mask, v_values);
        p_entry.move := dlq.masked_json(p_entry.move, NULL, p_mask, v_values);
        p_entry.error_message := dlq.masked_text(p_entry.error_message, p_mask, v_values);
        p_entry.error_title := dlq.masked_text(p_entry.error_title, p_mask, v_values);
        p_entry.destination_url := dlq.masked_text(p_entry.destination_url, p_mask, v_values);
        p_entry.error_stack_trace := dlq.masked_text(p_entry.error_stack_trace, p_mask, v_values);
        p_entry.subscriber_id := dlq.masked_text(p_entry.subscriber_id, p_mask, v_values);
        p_entry.ordering_key := dlq.masked_text(p_entry.ordering_key, p_mask, v_values);
        p_entry.notes := dlq.masked_text(p_entry.notes, p_mask, v_values);
        p_entry.resolution_notes := dlq.masked_text(p_entry.resolution_notes, p_mask, v_values);
        p_entry.tags := CASE WHEN p_entry.tags IS NOT NULL THEN ARRAY(SELECT dlq.masked_text(t, p_mask, v_values)
            FROM unnest(p_entry.tags) t) END;
    END IF;
    IF p_mask ? 'hidden' THEN
        v_hidden := dlq.with_title(ARRAY(SELECT jsonb_array_elements_text(p_mask -> 'hidden')));
        p_entry := jsonb_populate_record(p_entry, (SELECT coalesce(jsonb_object_agg(h, NULL), '{}')
            FROM unnest(v_hidden) h));
    END IF;
    RETURN p_entry;
END
$$;
COMMENT ON FUNCTION dlq.masked(dlq.dead_letter_queue, jsonb) IS 'An entry, masked (dlq.mask).';

-- A JSON Pointer (RFC 6901) names a place in a payload. The value at this place, or a value that contains the place,
-- may be sensitive.
CREATE OR REPLACE FUNCTION dlq.masked_at(p_pointer text, p_value jsonb, p_mask jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_paths text[] := '{payload}';
    v_path  text;
    v_key   text;
    v_under text[];
BEGIN
    FOREACH v_key IN ARRAY coalesce(string_to_array(substr(p_pointer, 2), '/'), '{}') LOOP
        v_under := ARRAY(SELECT p || chr(31) || replace(replace(replace(v_key, '~1', '/'), '~0', '~'), chr(31), ' ')
            FROM unnest(v_paths) p);
        -- A number may be a key or the index of an array. Without the document, both must be considered.
        v_paths := CASE WHEN v_key ~ '^([0-9]+|-)$' THEN v_paths || v_under ELSE v_under END;
        IF cardinality(v_paths) > 64 OR EXISTS (SELECT FROM unnest(v_paths) p WHERE p ~* (p_mask ->> 'where')) THEN
            RETURN '"***"';
        END IF;
    END LOOP;
    FOREACH v_path IN ARRAY v_paths LOOP
        p_value := dlq.mask_node(p_value, v_path, p_mask, '{}');
    END LOOP;
    RETURN p_value;
END
$$;
COMMENT ON FUNCTION dlq.masked_at IS 'A value at a JSON Pointer of a payload, masked.';

CREATE OR REPLACE FUNCTION dlq.masked_detail(p_detail jsonb, p_mask jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_detail IS NULL OR p_mask IS NULL OR NOT p_mask ?| '{where,patterns}' THEN
        RETURN p_detail;
    ELSIF jsonb_typeof(p_detail) <> 'object' THEN
        RETURN dlq.mask_node(p_detail, NULL, p_mask, '{}');
    ELSIF length(p_detail::text) > 50000 THEN -- bounds the time
        RETURN (SELECT jsonb_object_agg(d.key,
            CASE WHEN d.key IN ('patch', 'changes') THEN '[]' ELSE '"***"' END::jsonb) FROM jsonb_each(p_detail) d);
    END IF;
    RETURN coalesce((
        SELECT jsonb_object_agg(d.key, CASE
            WHEN d.key IN ('patch', 'changes') AND jsonb_typeof(d.value) = 'array' THEN (
                SELECT coalesce(jsonb_agg(CASE WHEN jsonb_typeof(c.value) = 'object' THEN c.value
                        || CASE WHEN c.value ? 'value' THEN jsonb_build_object('value',
                            dlq.masked_at(c.value ->> 'path', c.value -> 'value', p_mask)) ELSE '{}' END
                        || CASE WHEN c.value ? 'was' THEN jsonb_build_object('was',
                            dlq.masked_at(c.value ->> 'path', c.value -> 'was', p_mask)) ELSE '{}' END
                    ELSE '"***"' END ORDER BY c.place), '[]')
                FROM jsonb_array_elements(d.value) WITH ORDINALITY c (value, place))
            WHEN d.key IN ('payload', 'mergePatch') THEN dlq.mask_node(d.value, 'payload', p_mask, '{}')
            WHEN d.key = 'payloadAt' AND jsonb_typeof(d.value) = 'array' THEN (
                SELECT coalesce(jsonb_agg(CASE WHEN jsonb_typeof(c.value -> 'path') = 'array'
                    AND jsonb_typeof(c.value -> 'values') = 'array' THEN c.value || jsonb_build_object('values', (
                    SELECT coalesce(jsonb_agg(dlq.masked_at((SELECT string_agg('/'
                        || replace(replace(k.key, '~', '~0'), '/', '~1'), '' ORDER BY k.place)
                            FROM jsonb_array_elements_text(c.value -> 'path') WITH ORDINALITY k (key, place)), v.value,
                                p_mask) ORDER BY v.place), '[]')
                    FROM jsonb_array_elements(c.value -> 'values') WITH ORDINALITY v (value, place))) ELSE '"***"' END
                        ORDER BY c.place), '[]')
                FROM jsonb_array_elements(d.value) WITH ORDINALITY c (value, place))
            WHEN d.key = 'filter' THEN dlq.masked_detail(d.value, p_mask)
            ELSE dlq.mask_node(d.value, NULL, p_mask, '{}') END)
        FROM jsonb_each(p_detail) d), '{}');
END
$$;
COMMENT ON FUNCTION dlq.masked_detail IS
    'Masks the detail of an audit row, a replay run or an answer: payload, mergePatch, patch, changes, payloadAt '
    '(whose paths are those of the payload) and filter. Of more than 50,000 characters, all values are masked.';

-- If an operator saw a payload with ***, the operator must not send *** in place of the masked values.
CREATE OR REPLACE FUNCTION dlq.refuse_mask(p_action text, p_document jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_document IS NOT NULL AND position('"***"' IN p_document::text) > 0 AND dlq.mask(false) IS NOT NULL THEN
        RAISE EXCEPTION '%: the payload contains ***, which stands for a masked value', p_action
            USING ERRCODE = 'DLQ04',
            HINT = 'Send a patch with the changes, or reveal the payload and send all of it.';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.refuse_mask IS
    'Raises an error for a payload, or a patch of one, that contains *** while masking is on.';

CREATE OR REPLACE FUNCTION dlq.revealed_reason() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 'revealed';
COMMENT ON FUNCTION dlq.revealed_reason IS 'The reason of the audit row of a reveal, which dlq.revealed looks for.';

-- The audit row with the reason is committed before the entry is shown: if both were in one
-- transaction, the caller could see the entry and roll the row back.
CREATE OR REPLACE FUNCTION dlq.record_reveal(p_id uuid, p_note text, p_actor text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_found record;
BEGIN
    IF btrim(coalesce(p_note, '')) = '' THEN
        RAISE EXCEPTION 'reveal: a note is required' USING ERRCODE = 'DLQ04',
            HINT = 'The note is written to the audit trail.';
    END IF;
    SELECT l.* INTO v_found FROM dlq.lock_entries(dlq.ids_in_scope(ARRAY[p_id]),
        enum_range(NULL::dlq.dead_letter_status)) l;
    IF v_found.ids = '{}' THEN
        PERFORM dlq.refuse_move(p_id, 'reveal', 'any');
    END IF;
    PERFORM dlq.note_on(v_found.ids, p_actor, dlq.revealed_reason(), p_note, v_found.stages, p_since => v_found.since,
        p_until => v_found.until);
END
$$;
COMMENT ON FUNCTION dlq.record_reveal IS 'Writes the audit row of a reveal (see dlq.reveal).';

-- The audit row omits values of filter fields that may name a person, because an erasure deletes nothing from dlq.acts.
CREATE OR REPLACE FUNCTION dlq.record_export(p_filter jsonb, p_revealed boolean, p_actor text, p_note text)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_personal constant text[] := dlq.personal_filters()
        || '{errorMessage,messageId,source,errorType,errorCode,assignee}'::text[];
BEGIN
    PERFORM dlq.require_approval('{export}', 'export', jsonb_build_object('filter', p_filter));
    PERFORM dlq.record_act('export', CASE WHEN p_revealed THEN 'revealed' ELSE 'exported' END, p_actor, p_note,
        jsonb_build_object('filter', p_filter - v_personal,
            'leftOut', (SELECT jsonb_agg(k.key) FROM jsonb_object_keys(p_filter) k (key) WHERE k.key = ANY (v_personal)),
            'entries', CASE WHEN p_revealed THEN (SELECT coalesce(sum(p.entries), 0) FROM dlq.preview(p_filter) p) END));
END
$$;
COMMENT ON FUNCTION dlq.record_export IS
    'Writes the audit row of an export: the actor, the filter without values that may name a person, and for an '
    'export of masked values (p_revealed) the reason and the number of entries. Raises DLQ07 if the policy requires '
    'a second person for it.';

-- Each reveal needs its own audit row, so only dlq.reveal may call revealed, after it has committed the row. revealed
-- therefore requires a row that is older than its transaction, so that the row cannot be rolled back, and at most a
-- minute old by the clock, because a transaction may stay open.
--
-- revealed finds its caller in PG_CONTEXT. That text is in the language of lc_messages, and names dlq.reveal without
-- its schema if the schema was in search_path at the first call. A caller could forge the context, but would gain only
-- a second reveal of the same entry within a minute.
CREATE OR REPLACE FUNCTION dlq.revealed(p_id uuid) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_ids      uuid[] := dlq.ids_in_scope(ARRAY[p_id]);
    v_since    timestamptz := dlq.closed_since(ARRAY[p_id]);
    v_began_at timestamptz := transaction_timestamp();
    v_calls    text;
    v_lines    text[];
    v_caller   text;
BEGIN
    GET DIAGNOSTICS v_calls = PG_CONTEXT; -- this call, then perhaps its statement, then the caller
    v_lines := string_to_array(v_calls, E'\n');
    v_caller := v_lines[CASE WHEN v_lines[2] ~ 'p_entry := dlq.revealed\(p_id\)\W*$' THEN 3 ELSE 2 END];
    IF strpos(coalesce(v_caller, ''), 'reveal(uuid,text,jsonb)') = 0
        OR NOT EXISTS (SELECT FROM dlq.dead_letter_transitions t WHERE t.entry_id = p_id AND t.actor = session_user
            AND t.reason = dlq.revealed_reason()
                   AND t.at >= clock_timestamp() - interval '1 minute' AND t.at < v_began_at) THEN
        RAISE EXCEPTION 'dead letter %: no reason for revealing it is recorded', p_id USING ERRCODE = 'DLQ06',
            HINT = 'Use CALL dlq.reveal(id, note), outside of a transaction.';
    END IF;
    RETURN (SELECT to_jsonb(e) FROM dlq.dead_letter_queue e WHERE e.id = ANY (v_ids)
        AND (e.closed_at IS NULL OR e.closed_at >= v_since));
END
$$;
COMMENT ON FUNCTION dlq.revealed IS 'Returns an entry unmasked, for dlq.reveal, which has recorded the reason.';

CREATE OR REPLACE PROCEDURE dlq.reveal(p_id uuid, p_note text, INOUT p_entry jsonb DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM dlq.record_reveal(p_id, p_note);
    COMMIT;
    p_entry := dlq.revealed(p_id);
END
$$;
COMMENT ON PROCEDURE dlq.reveal IS
    'Shows an entry unmasked. The reason (p_note) is committed to the audit trail first, so this cannot run '
    'inside of a transaction, which could be rolled back.';
