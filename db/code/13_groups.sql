-- Failure groups: owner, note, mark as fixed, and mute. The title, counts and times of a group are in the rollups; the
-- marks that operators set are in group_marks. Whether a mute has ended, or a fixed group has failed again, is computed
-- when the group is read, so that filing a failure does not have to write it.

CREATE OR REPLACE FUNCTION dlq.is_muted(p_mark dlq.group_marks, p_failures bigint) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce((p_mark).muted_at IS NOT NULL AND now() < coalesce((p_mark).mute_until, 'infinity')
    AND p_failures < coalesce((p_mark).mute_upto, 9223372036854775807), false);
COMMENT ON FUNCTION dlq.is_muted IS 'Whether a failure group with p_failures failures in all is muted now.';

-- A group is regressed if it has failed since it was marked as fixed or, if it is fixed in a version, since a version
-- with the fix was deployed. last_seen is the time at which the job failed, not the time of filing.
CREATE OR REPLACE FUNCTION dlq.fixed_since(p_mark dlq.group_marks) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN (p_mark).fixed_in IS NULL THEN (p_mark).fixed_at ELSE (p_mark).fix_deployed_at END;
COMMENT ON FUNCTION dlq.fixed_since IS
    'The time from which failures of a group make it regressed; null if it is not fixed, or no version with the fix '
    'runs yet.';

CREATE OR REPLACE FUNCTION dlq.group_status(p_mark dlq.group_marks, p_failures bigint, p_last_seen timestamptz)
    RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN dlq.is_muted(p_mark, p_failures) THEN 'muted'
    WHEN p_last_seen > dlq.fixed_since(p_mark) THEN 'regressed'
    WHEN (p_mark).fixed_at IS NOT NULL THEN 'fixed' ELSE 'open' END;
COMMENT ON FUNCTION dlq.group_status IS
    'The status of a failure group: muted, regressed (failed after it was marked as fixed), fixed or open.';

CREATE OR REPLACE FUNCTION dlq.groups(p_filter jsonb DEFAULT '{}', p_limit integer DEFAULT 100,
    p_order text DEFAULT 'latest', p_after jsonb DEFAULT NULL, p_over interval DEFAULT '24 hours')
RETURNS TABLE (queue text, fingerprint text, title text, error_type text, error_class text, status text,
    regressed boolean, owner text, note text, open bigint, failures bigint,
               in_window bigint, trend bigint[], first_seen timestamptz, last_seen timestamptz, fixed_at timestamptz,
               fixed_by text, muted_at timestamptz, muted_by text,
               mute_until timestamptz, mute_left bigint, updated_at timestamptz, updated_by text, sample uuid,
               place bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC'
SET enable_seqscan = on SET jit = off SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.queue_scope());
    v_mask     jsonb := dlq.mask();
    v_where    text := 'true';
    v_key      text;
    -- Owners, by which groups are ordered before their place. Groups without an owner come last.
    v_owner    constant text := CASE p_order WHEN 'owner' THEN 'coalesce(''0'' || m.owner, ''1'')' ELSE '''''' END;
    v_after    constant text := CASE p_order WHEN 'owner' THEN coalesce('0' || (p_after ->> 3), '1') ELSE '' END;
    v_words    constant text :=
        'ARRAY(SELECT jsonb_array_elements_text(CASE jsonb_typeof($1 -> %1$L) WHEN ''array'' THEN $1 -> %1$L ELSE jsonb_build_array($1 -> %1$L) END))';
BEGIN
    -- As in dlq.filter_where, values are read from parameter $1 and never become part of the SQL
    -- text.
    FOR v_key IN SELECT jsonb_object_keys(p_filter) LOOP
        v_where := v_where || ' AND ' || CASE v_key
            WHEN 'queue'       THEN 'g.queue = ANY (' || format(v_words, v_key) || ')'
            WHEN 'fingerprint' THEN format('(g.fingerprint = ANY (%1$s) OR EXISTS (
                                           SELECT FROM dlq.group_aliases a
                                           WHERE a.queue = g.queue AND a.fingerprint = g.fingerprint
                                             AND a.former = ANY (%1$s)))',
                                           format(v_words, v_key))
            WHEN 'errorClass'  THEN 'g.error_class = ANY (' || format(v_words, v_key) || ')'
            -- A group without marks is open. Other states are found by the marks, of which there are few.
            WHEN 'status'      THEN 'dlq.group_status(m, g.failures, g.last_seen) = ANY ('
                || format(v_words, v_key) || ')'
                || CASE WHEN p_filter -> v_key ? 'open' THEN '' ELSE ' AND m.queue IS NOT NULL' END
            WHEN 'owner'       THEN 'coalesce(m.owner, '''') = ANY (' || format(v_words, v_key) || ')'
            WHEN 'hasOpen'     THEN '(g.open > 0) = ($1 ->> ''hasOpen'')::boolean'
        END;
        IF v_where IS NULL THEN
            RAISE EXCEPTION 'groups: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'Fields: queue, fingerprint, errorClass, status (open, fixed, regressed, muted), owner ("" for no owner), hasOpen.';
        END IF;
    END LOOP;
    IF p_order NOT IN ('latest', 'open', 'failures', 'newest', 'status', 'owner') THEN
        RAISE EXCEPTION 'groups: there is no order %', p_order USING ERRCODE = 'DLQ04',
            HINT = 'Orders: latest, open, failures, newest, status, owner.';
    END IF;
    RETURN QUERY EXECUTE
        'WITH page AS MATERIALIZED (
             SELECT g, m, o.owner, o.place
             FROM dlq.failure_groups g
             LEFT JOIN dlq.group_marks m ON m.queue = g.queue AND m.fingerprint = g.fingerprint
             CROSS JOIN LATERAL (SELECT ' || v_owner || ' AS owner, ' || CASE p_order
                 WHEN 'open' THEN 'g.open' WHEN 'failures' THEN 'g.failures'
                 WHEN 'newest' THEN '(extract(epoch FROM g.first_seen) * 1000000)::bigint'
                 ELSE '(extract(epoch FROM g.last_seen) * 1000000)::bigint' || CASE p_order WHEN 'status'
                     -- more than the microseconds of any time until the year 2286
                     THEN ' + 10000000000000000 * array_position(''{fixed,muted,open,regressed}''::text[], dlq.group_status(m, g.failures, g.last_seen))'
                     ELSE '' END
                 END || ' AS place) o
             WHERE ' || v_where || '
               AND NOT EXISTS (
                   SELECT FROM dlq.group_aliases a
                   WHERE a.queue = g.queue AND a.former = g.fingerprint AND a.main AND a.counted_at IS NOT NULL)
               AND ($2 IS NULL OR dlq.in_patterns(g.queue, NULL, $2))
               AND ($3 IS NULL OR o.owner > $7
                    OR o.owner = $7 AND (o.place < ($3 ->> 0)::bigint
                        OR o.place = ($3 ->> 0)::bigint AND (g.queue, g.fingerprint) > ($3 ->> 1, $3 ->> 2)))
             ORDER BY o.owner, o.place DESC, g.queue, g.fingerprint LIMIT $4
         )
         SELECT (p.g).queue, (p.g).fingerprint, CASE WHEN $5 -> ''hidden'' ? ''error_message'' THEN NULL ELSE dlq.masked_text((p.g).title, $5) END, (p.g).error_type, (p.g).error_class,
                dlq.group_status(p.m, (p.g).failures, (p.g).last_seen),
                coalesce((p.g).last_seen > dlq.fixed_since(p.m), false),
                (p.m).owner, dlq.masked_text((p.m).note, $5), (p.g).open, (p.g).failures,
                (SELECT coalesce(sum(t.failures), 0)::bigint FROM unnest(w.trend) t (failures)),
                w.trend, (p.g).first_seen, (p.g).last_seen, (p.m).fixed_at, (p.m).fixed_by,
                CASE WHEN u.muted THEN (p.m).muted_at END, CASE WHEN u.muted THEN (p.m).muted_by END,
                CASE WHEN u.muted THEN (p.m).mute_until END,
                CASE WHEN u.muted THEN (p.m).mute_upto - (p.g).failures END,
                (p.m).updated_at, (p.m).updated_by, (p.g).sample, p.place
         FROM page p
         CROSS JOIN LATERAL (SELECT dlq.is_muted(p.m, (p.g).failures) AS muted) u
         JOIN dlq.group_trends(
                 ARRAY(SELECT (o.g).queue FROM page o ORDER BY (o.g).queue, (o.g).fingerprint),
                 ARRAY(SELECT (o.g).fingerprint FROM page o ORDER BY (o.g).queue, (o.g).fingerprint), $6) w
             ON w.queue = (p.g).queue AND w.fingerprint = (p.g).fingerprint
         ORDER BY p.owner, p.place DESC, (p.g).queue, (p.g).fingerprint'
        USING p_filter, v_patterns, p_after, p_limit, v_mask, p_over, v_after;
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'groups: %', SQLERRM USING ERRCODE = 'DLQ04';
END
$$;
COMMENT ON FUNCTION dlq.groups IS
    'Failure groups that match a filter ({"status": ["open", "regressed"], "queue", "fingerprint", '
    '"errorClass", "owner" ("" for no owner), "hasOpen": true}). p_order: those that failed last (latest), that '
    'have the most open entries (open) or the most failures (failures), or that are newest come first; by status '
    '(regressed, open, muted, fixed), or by owner, and then those that failed last. p_after, for the next page: '
    '[place, queue, fingerprint] of the last group, and its owner. trend: failures in a window (see dlq.group_trend).';

CREATE OR REPLACE VIEW dlq.groups AS SELECT * FROM dlq.groups(p_limit => 1000);
COMMENT ON VIEW dlq.groups IS
    'Failure groups, and the marks of operators: those that failed last first, 1,000 at most.';

-- As with entries, a group outside the caller's scope gives the same error as one that does not exist.
CREATE OR REPLACE FUNCTION dlq.one_group(p_queue text, p_fingerprint text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_found text[];
BEGIN
    IF dlq.in_scope(p_queue, NULL, dlq.queue_scope()) AND p_fingerprint <> 'other' THEN -- other has no single cause
        v_found := ARRAY(
            SELECT a.fingerprint FROM dlq.group_aliases a
            WHERE a.queue = p_queue AND a.former = p_fingerprint AND a.main AND a.counted_at IS NOT NULL);
        IF v_found = '{}' THEN
            v_found := ARRAY(
                SELECT g.fingerprint FROM dlq.failure_groups g
                WHERE g.queue = p_queue AND g.fingerprint = p_fingerprint);
        END IF;
        IF v_found = '{}' AND length(p_fingerprint) >= 4 THEN
            v_found := ARRAY(
                SELECT a.fingerprint FROM dlq.group_aliases a
                WHERE a.queue = p_queue AND starts_with(a.former, p_fingerprint) AND a.main AND a.counted_at IS NOT NULL
                UNION
                SELECT g.fingerprint FROM dlq.failure_groups g
                WHERE g.queue = p_queue AND starts_with(g.fingerprint, p_fingerprint) AND g.fingerprint <> 'other'
                  AND NOT EXISTS (
                      SELECT FROM dlq.group_aliases a
                      WHERE a.queue = g.queue AND a.former = g.fingerprint AND a.main AND a.counted_at IS NOT NULL)
                LIMIT 2);
        END IF;
    END IF;
    IF coalesce(v_found, '{}') = '{}' THEN
        RAISE EXCEPTION 'failure group % of queue %: there is no such group', p_fingerprint, p_queue
            USING ERRCODE = 'DLQ02';
    ELSIF v_found[2] IS NOT NULL THEN
        RAISE EXCEPTION 'failure group % of queue %: several fingerprints begin with this', p_fingerprint, p_queue
            USING ERRCODE = 'DLQ04', HINT = 'Give more characters of the fingerprint.';
    END IF;
    RETURN v_found[1];
END
$$;
COMMENT ON FUNCTION dlq.one_group IS
    'Returns the fingerprint of a failure group, given in full or as its first four or more characters. For a former '
    'group, returns the group that continues it. Raises DLQ02 if there is none, and DLQ04 if several begin with '
    'these characters.';

-- group_names returns all fingerprints that entries of a group can have. For a former group, it adds all groups that
-- its errors are in now. For a current group, it adds the last 100 former groups that it continues, to find closed
-- entries.
CREATE OR REPLACE FUNCTION dlq.group_names(p_queue text, p_fingerprint text) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT ARRAY(
        SELECT p_fingerprint
        UNION SELECT a.fingerprint FROM dlq.group_aliases a WHERE a.queue = p_queue AND a.former = p_fingerprint
        UNION (SELECT a.former FROM dlq.group_aliases a
               WHERE a.queue = p_queue AND a.fingerprint = p_fingerprint AND a.main
               ORDER BY a.learned_at DESC LIMIT 100))
$$;
COMMENT ON FUNCTION dlq.group_names IS
    'All fingerprints that entries of a failure group can have: its own, those of the groups that its errors '
    'are in since the grouping method changed, and at most 100 of former groups that it continues.';

CREATE OR REPLACE FUNCTION dlq.title_of_group(p_queue text, p_fingerprint text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_mask constant jsonb := dlq.mask();
BEGIN
    RETURN (
        SELECT CASE WHEN v_mask -> 'hidden' ? 'error_message' THEN NULL ELSE dlq.masked_text(g.title, v_mask) END
        FROM dlq.failure_groups g WHERE g.queue = p_queue AND g.fingerprint = p_fingerprint);
END
$$;
COMMENT ON FUNCTION dlq.title_of_group IS
    'The title of a failure group as the caller may see it; null if there is no such group.';

-- group_entries returns the entries that the page of a group describes: open entries, and entries that closed within a
-- month. Older months are neither read nor locked.
CREATE OR REPLACE FUNCTION dlq.group_entries(p_queue text, p_fingerprint text, p_limit integer DEFAULT 200)
    RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_fingerprint constant text := dlq.one_group(p_queue, p_fingerprint);
    v_since       constant timestamptz := now() - interval '30 days';
    v_until       constant timestamptz := now() + interval '1 hour'; -- excludes partitions that were created ahead
BEGIN
    RETURN QUERY
    SELECT l.id FROM (
        SELECT o.id FROM unnest(dlq.group_names(p_queue, v_fingerprint)) n (name) CROSS JOIN LATERAL (
            SELECT e.id FROM dlq.dead_letter_queue e
            WHERE e.stage = 'open' AND e.queue = p_queue AND e.fingerprint = n.name
            ORDER BY e.id DESC LIMIT p_limit) o
        UNION
        SELECT c.id FROM unnest(dlq.group_names(p_queue, v_fingerprint)) n (name) CROSS JOIN LATERAL (
            SELECT e.id FROM dlq.dead_letter_queue e
            WHERE e.stage IN ('resolved', 'failed', 'archived', 'returned')
                AND e.closed_at >= v_since AND e.closed_at < v_until
              AND e.queue = p_queue AND e.fingerprint = n.name
            ORDER BY e.id DESC LIMIT p_limit) c) l
    ORDER BY l.id DESC LIMIT p_limit;
END
$$;
COMMENT ON FUNCTION dlq.group_entries IS
    'The newest entries of a failure group that are open, or that closed within 30 days.';

-- shares_of does not check the caller's scope; the function that calls it has checked it.
CREATE OR REPLACE FUNCTION dlq.shares_of(p_ids uuid[])
RETURNS TABLE (by text, name text, entries bigint, share float8)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan SET row_security = off AS $$
DECLARE
    -- Each partition costs a probe for each entry, so leave out partitions that cannot contain the entries.
    v_since constant timestamptz := greatest(now() - interval '31 days', dlq.closed_since(p_ids));
    v_until constant timestamptz := now() + interval '1 hour';
BEGIN
    RETURN QUERY EXECUTE
        'WITH details AS (
             SELECT e.source,
                    coalesce(e.error_context ->> ''version'', e.error_context ->> ''appVersion'', e.error_context ->> ''release'', e.metadata ->> ''version'', e.metadata ->> ''appVersion'', e.metadata ->> ''release'', e.metadata ->> ''dlq:version'') AS version,
                    -- If the application sets no client id, River makes one of the host and the start time.
                    coalesce(e.error_context ->> ''host'', e.error_context ->> ''hostname'', e.metadata ->> ''host'', e.metadata ->> ''hostname'',
                             (SELECT CASE WHEN c.id ~ ''^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$''
                                     -- a process of dlqd, whose name is the host and the process id
                                     THEN (SELECT split_part(p.name, ''/'', 1) FROM dlq.processes p
                                           WHERE p.id = c.id::uuid)
                                     ELSE regexp_replace(c.id, ''_[0-9]{4}_[0-9]{2}_[0-9]{2}T[0-9]{2}_[0-9]{2}_[0-9]{2}_[0-9]+$'', '''') END
                              FROM river.river_job j
                              CROSS JOIN LATERAL (SELECT j.attempted_by[array_upper(j.attempted_by, 1)] AS id) c
                              WHERE j.id = e.river_job_id AND j.created_at = e.job_created_at)) AS host
             FROM dlq.entries e
             WHERE e.id = ANY ($1) AND (e.closed_at IS NULL OR e.closed_at >= $2 AND e.closed_at < $3)
         ), named AS (
             SELECT n.by, left(n.name, 255) AS name, count(*) AS entries
             FROM details s CROSS JOIN LATERAL (VALUES (''source'', s.source), (''version'', s.version), (''host'', s.host)) n (by, name)
             WHERE n.name <> '''' GROUP BY 1, 2
         )
         SELECT r.by, r.name, r.entries, dlq.ratio(r.entries, cardinality($1))
         FROM (SELECT n.*, row_number() OVER (PARTITION BY n.by ORDER BY n.entries DESC, n.name) AS rank FROM named n) r
         WHERE r.rank <= 10 ORDER BY r.by, r.entries DESC, r.name' USING p_ids, v_since, v_until;
END
$$;
COMMENT ON FUNCTION dlq.shares_of IS
    'The shares that dlq.group_shares returns, for these entries: the ten most frequent sources, versions and hosts.';

CREATE OR REPLACE FUNCTION dlq.group_shares(p_queue text, p_fingerprint text, p_limit integer DEFAULT 200)
RETURNS TABLE (by text, name text, entries bigint, share float8)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.by, s.name, s.entries, s.share
    FROM dlq.shares_of(ARRAY(SELECT dlq.group_entries(p_queue, p_fingerprint, p_limit))) s
$$;
COMMENT ON FUNCTION dlq.group_shares IS
    'The last entries of a failure group (dlq.group_entries) by source, version and host: the ten most frequent '
    'values of each, and their share of these entries, 0 to 1. version: version, appVersion or release of the '
    'error''s context, or of the job''s metadata. host: host or hostname, likewise, or the host of the River '
    'client that worked the job, while River keeps the job; for a message, while dlq.processes has the process.';

-- set_group changes only the marks that p_changes names.
CREATE OR REPLACE FUNCTION dlq.set_group(p_queue text, p_fingerprint text, p_changes jsonb,
    p_actor text DEFAULT session_user, p_why text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_fingerprint constant text := dlq.one_group(p_queue, p_fingerprint);
    v_actor       constant text := dlq.actor(p_actor);
    v_mute        constant boolean := coalesce(p_changes ->> 'muteUntil', p_changes ->> 'muteFailures') IS NOT NULL;
    v_key         text;
    v_acts        text[] := '{}';
    v_failures    bigint;
BEGIN
    FOR v_key IN SELECT jsonb_object_keys(p_changes) LOOP
        IF v_key NOT IN ('owner', 'note', 'status', 'fixedIn', 'muteUntil', 'muteFailures') THEN
            RAISE EXCEPTION 'group: there is no field %', v_key USING ERRCODE = 'DLQ04',
                HINT = 'Fields: owner, note, status (open, fixed, muted), fixedIn, muteUntil, muteFailures.';
        END IF;
    END LOOP;
    IF p_changes = '{}' OR p_changes ->> 'status' NOT IN ('open', 'fixed', 'muted') OR v_mute
        AND coalesce(p_changes ->> 'status', 'muted') <> 'muted' OR p_changes ->> 'status' = 'muted' AND NOT v_mute
        OR (p_changes ->> 'muteUntil')::timestamptz <= now()
        OR (p_changes ->> 'muteFailures')::bigint NOT BETWEEN 1 AND 1000000000
        OR p_changes ->> 'fixedIn' IS NOT NULL AND (p_changes ->> 'status' IS DISTINCT FROM 'fixed'
            OR length(p_changes ->> 'fixedIn') NOT BETWEEN 1 AND 255) THEN
        RAISE EXCEPTION 'group: invalid changes %', p_changes USING ERRCODE = 'DLQ04',
            HINT = 'Examples: {"owner": "kim"}, {"note": "waits for the bank"}, {"status": "fixed"}, {"status": "fixed", "fixedIn": "4.2.0"}, {"status": "open"}, or a mute that ends: {"muteUntil": "2030-01-01T00:00:00Z"}, {"muteFailures": 100}.';
    END IF;
    IF length(p_changes ->> 'owner') > 255 OR length(p_changes ->> 'note') > 10000 OR length(p_why) > 10000 THEN
        RAISE EXCEPTION 'group: the owner, note or reason is too long' USING ERRCODE = 'DLQ04',
            HINT = 'Limits: owner 255 characters, note and reason 10000 characters.';
    END IF;
    p_why := dlq.masked_text(p_why, dlq.mask(false)); -- users may read it after the entries are gone
    p_changes := p_changes || CASE WHEN p_changes ->> 'note' IS NOT NULL
        THEN jsonb_build_object('note', dlq.masked_text(p_changes ->> 'note', dlq.mask(false))) ELSE '{}' END;
    SELECT g.failures INTO v_failures FROM dlq.failure_groups g WHERE g.queue = p_queue
        AND g.fingerprint = v_fingerprint;
    INSERT INTO dlq.group_marks AS m (queue, fingerprint, owner, note, fixed_at, fixed_by, fixed_in, muted_at, muted_by,
        mute_until, mute_upto, updated_by)
    VALUES (p_queue, v_fingerprint, nullif(p_changes ->> 'owner', ''), nullif(p_changes ->> 'note', ''),
            CASE WHEN p_changes ->> 'status' = 'fixed' THEN clock_timestamp() END,
                CASE WHEN p_changes ->> 'status' = 'fixed' THEN v_actor END, p_changes ->> 'fixedIn',
            CASE WHEN v_mute THEN clock_timestamp() END, CASE WHEN v_mute THEN v_actor END,
                (p_changes ->> 'muteUntil')::timestamptz, v_failures + (p_changes ->> 'muteFailures')::bigint, v_actor)
    ON CONFLICT (queue, fingerprint) DO UPDATE SET
        owner = CASE WHEN p_changes ? 'owner' THEN excluded.owner ELSE m.owner END,
        note = CASE WHEN p_changes ? 'note' THEN excluded.note ELSE m.note END,
        -- Status open removes the mark as fixed and the mute; a mute keeps the mark as fixed.
        fixed_at = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN excluded.fixed_at ELSE m.fixed_at END,
        fixed_by = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN excluded.fixed_by ELSE m.fixed_by END,
        fixed_in = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN excluded.fixed_in ELSE m.fixed_in END,
        fix_deployed_at = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN NULL ELSE m.fix_deployed_at END,
        fix_run = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN NULL ELSE m.fix_run END,
        fix_request = CASE WHEN p_changes ->> 'status' IN ('open', 'fixed') THEN NULL ELSE m.fix_request END,
        muted_at = CASE WHEN v_mute OR p_changes ? 'status' THEN excluded.muted_at ELSE m.muted_at END,
        muted_by = CASE WHEN v_mute OR p_changes ? 'status' THEN excluded.muted_by ELSE m.muted_by END,
        mute_until = CASE WHEN v_mute OR p_changes ? 'status' THEN excluded.mute_until ELSE m.mute_until END,
        mute_upto = CASE WHEN v_mute OR p_changes ? 'status' THEN excluded.mute_upto ELSE m.mute_upto END,
        inherited_from = CASE WHEN v_mute OR p_changes ? 'status' THEN NULL ELSE m.inherited_from END,
        updated_at = now(), updated_by = excluded.updated_by;
    IF p_changes ? 'fixedIn' THEN
        PERFORM dlq.settle_fixes(p_queue, v_fingerprint);
    END IF;
    -- The former groups get the same marks: a dlqd with an earlier grouping method files entries into
    -- them, which stay there until dlq.regroup moves them.
    UPDATE dlq.group_marks f SET
        (owner, fixed_at, fixed_by, fixed_in, fix_deployed_at, muted_at, muted_by, mute_until, mute_upto)
            = (m.owner, m.fixed_at, m.fixed_by, m.fixed_in, m.fix_deployed_at, m.muted_at, m.muted_by, m.mute_until,
               m.mute_upto)
    FROM dlq.group_marks m JOIN dlq.group_aliases a ON a.queue = m.queue AND a.fingerprint = m.fingerprint AND a.main
    WHERE m.queue = p_queue AND m.fingerprint = v_fingerprint AND f.queue = a.queue AND f.fingerprint = a.former;
    v_acts := ARRAY(SELECT a.text FROM (VALUES
        (CASE WHEN p_changes ? 'owner' THEN coalesce('assigned to ' || nullif(p_changes ->> 'owner', ''),
            'assigned to nobody') END),
        (CASE WHEN p_changes ? 'note' THEN 'noted' END),
        (CASE WHEN v_mute THEN 'muted' WHEN p_changes ->> 'status' = 'fixed' THEN 'marked as fixed'
            WHEN p_changes ->> 'status' = 'open' THEN 'opened' END)) a (text) WHERE a.text IS NOT NULL);
    PERFORM dlq.record_act('group ' || p_queue || ' ' || v_fingerprint, array_to_string(v_acts, ', '), p_actor,
        p_why, p_changes);
    RETURN v_fingerprint;
END
$$;
COMMENT ON FUNCTION dlq.set_group IS
    'Changes the marks of a failure group: {"owner": "kim"}, {"note": "..."}, {"status": "fixed"}, with '
    '{"fixedIn": "4.2.0"} if failures of earlier versions are no regression, {"status": "open"} (neither fixed nor muted), or a mute, which stops notifications: {"muteUntil": '
    '"2030-01-01T00:00:00Z", "muteFailures": 100} (until that time or so many more failures, whichever is '
    'first). Does not change the entries: see dlq.assign_group. Writes an audit row. The first characters of '
    'the fingerprint are enough; returns the whole.';

CREATE OR REPLACE FUNCTION dlq.assign_group(p_queue text, p_fingerprint text, p_owner text,
    p_actor text DEFAULT session_user, p_why text DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_fingerprint constant text := dlq.set_group(p_queue, p_fingerprint, jsonb_build_object('owner', p_owner),
        p_actor, p_why);
BEGIN
    RETURN (SELECT a.changed FROM dlq.act_where('assign', jsonb_build_object('queue', p_queue, 'fingerprint',
        v_fingerprint, 'status', '["dlq_pending", "dlq_processing", "dlq_manual"]'::jsonb),
                                                p_actor, p_why, jsonb_build_object('assignee', p_owner),
                                                p_limit => NULL) a);
END
$$;
COMMENT ON FUNCTION dlq.assign_group IS
    'Sets the owner of a failure group (null: no owner), and assigns its open entries, and those that join it '
    'later, to that person. Returns how many entries were assigned.';

CREATE OR REPLACE FUNCTION dlq.muted_entries() RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
DECLARE
    v_patterns text[] := dlq.scope_patterns(dlq.scope());
BEGIN
    RETURN (SELECT count(*) FROM dlq.group_marks m JOIN dlq.failure_groups g ON g.queue = m.queue
        AND g.fingerprint = m.fingerprint
            CROSS JOIN LATERAL (SELECT FROM dlq.dead_letter_open e
                                WHERE e.queue = m.queue AND e.fingerprint = m.fingerprint AND e.status = 'dlq_manual'
                                    AND (v_patterns IS NULL OR dlq.in_patterns(e.queue, e.kind, v_patterns))
                                LIMIT 10000) e
            WHERE m.muted_at IS NOT NULL AND dlq.is_muted(m, g.failures));
END
$$;
COMMENT ON FUNCTION dlq.muted_entries IS
    'The number of manual entries in muted failure groups, at most 10,000 per group.';

-- The grouping method has versions; the length of a fingerprint shows which version made it. After a change of the
-- method, dlqd learns which groups the errors of each former group are in now (alias_groups), and moves the open
-- entries of the former group there (regroup). Closed entries keep their fingerprint.

-- A mute or a mark as fixed of a former group passes to the new group only if the two groups correspond one to one.
-- Otherwise the note of the new group says who muted the former group or marked it as fixed. part_of returns that note.
CREATE OR REPLACE FUNCTION dlq.part_of(p_former dlq.group_marks) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN coalesce((p_former).muted_at, (p_former).fixed_at) IS NOT NULL THEN
    concat_ws(', ', 'was part of ' || (p_former).fingerprint,
              'muted by ' || CASE WHEN (p_former).muted_at IS NOT NULL THEN (p_former).muted_by END,
              'marked as fixed by ' || CASE WHEN (p_former).fixed_at IS NOT NULL THEN (p_former).fixed_by END) END;
COMMENT ON FUNCTION dlq.part_of IS
    'The note for a failure group that was part of a former one: who muted the former group, and who marked it '
    'as fixed. Null if it was neither muted nor fixed.';

-- Owner and note are always inherited; a mute and a mark as fixed only while the former and the new group correspond
-- one to one. New groups are found one after another: when a second one appears, an inherited mute or mark ends, unless
-- an operator has changed it since.
CREATE OR REPLACE FUNCTION dlq.inherit_marks(p_queue text, p_former text, p_fingerprint text, p_actor text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_former     dlq.group_marks;
    v_note       text;
    v_one_to_one constant boolean := NOT EXISTS (
        SELECT FROM dlq.group_aliases a
        WHERE a.queue = p_queue AND a.former = p_former AND a.fingerprint <> p_fingerprint
    ) AND NOT EXISTS (
        SELECT FROM dlq.group_aliases a
        WHERE a.queue = p_queue AND a.fingerprint = p_fingerprint AND a.former <> p_former);
BEGIN
    IF NOT v_one_to_one THEN
        UPDATE dlq.group_marks m SET
            (fixed_at, fixed_by, fixed_in, fix_deployed_at, muted_at, muted_by, mute_until, mute_upto, inherited_from)
                = ROW (NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
            note = nullif(left(concat_ws(E'\n', m.note, dlq.part_of(f)), 10000), '')
        FROM dlq.group_marks f
        WHERE m.queue = p_queue AND m.inherited_from IS NOT NULL
          AND f.queue = m.queue AND f.fingerprint = m.inherited_from
          AND (m.fingerprint = p_fingerprint OR m.inherited_from = p_former);
    END IF;
    SELECT * INTO v_former FROM dlq.group_marks m WHERE m.queue = p_queue AND m.fingerprint = p_former;
    IF v_former.queue IS NULL THEN
        RETURN;
    END IF;
    IF NOT dlq.is_muted(v_former, (
        SELECT g.failures FROM dlq.failure_groups g WHERE g.queue = p_queue AND g.fingerprint = p_former))
    THEN
        v_former.muted_at := NULL; -- the mute has ended
    END IF;
    v_note := nullif(left(concat_ws(E'\n', v_former.note, CASE WHEN NOT v_one_to_one THEN dlq.part_of(v_former) END),
        10000), '');
    INSERT INTO dlq.group_marks AS m
        (queue, fingerprint, owner, note, fixed_at, fixed_by, fixed_in, fix_deployed_at, fix_run, fix_request,
         muted_at, muted_by, mute_until, mute_upto,
         inherited_from, updated_at, updated_by)
    SELECT p_queue, p_fingerprint, v_former.owner, v_note,
           CASE WHEN v_one_to_one THEN v_former.fixed_at END, CASE WHEN v_one_to_one THEN v_former.fixed_by END,
           CASE WHEN v_one_to_one THEN v_former.fixed_in END, CASE WHEN v_one_to_one THEN v_former.fix_deployed_at END,
           CASE WHEN v_one_to_one THEN v_former.fix_run END, CASE WHEN v_one_to_one THEN v_former.fix_request END,
           CASE WHEN x.mutes THEN v_former.muted_at END, CASE WHEN x.mutes THEN v_former.muted_by END,
           CASE WHEN x.mutes THEN v_former.mute_until END,
           CASE WHEN x.mutes THEN v_former.mute_upto + coalesce((
               SELECT g.failures FROM dlq.failure_groups g
               WHERE g.queue = p_queue AND g.fingerprint = p_fingerprint), 0) END,
           CASE WHEN v_one_to_one AND coalesce(v_former.fixed_at, v_former.muted_at) IS NOT NULL THEN p_former END,
           v_former.updated_at, v_former.updated_by
    FROM (SELECT v_one_to_one AND v_former.muted_at IS NOT NULL AS mutes) x
    ON CONFLICT (queue, fingerprint) DO UPDATE SET
        owner = coalesce(m.owner, excluded.owner),
        note = CASE WHEN position(excluded.note IN m.note) > 0 THEN m.note
                    ELSE nullif(left(concat_ws(E'\n', m.note, excluded.note), 10000), '') END,
        -- The marks that an operator set on the new group take precedence.
        (fixed_at, fixed_by, fixed_in, fix_deployed_at, muted_at, muted_by, mute_until, mute_upto, inherited_from) = (
            SELECT x.fixed_at, x.fixed_by, x.fixed_in, x.fix_deployed_at, x.muted_at, x.muted_by, x.mute_until,
                   x.mute_upto, x.inherited_from
            FROM (VALUES (1, m.fixed_at, m.fixed_by, m.fixed_in, m.fix_deployed_at, m.muted_at, m.muted_by,
                          m.mute_until, m.mute_upto, m.inherited_from),
                         (2, excluded.fixed_at, excluded.fixed_by, excluded.fixed_in, excluded.fix_deployed_at,
                          excluded.muted_at, excluded.muted_by, excluded.mute_until, excluded.mute_upto,
                          excluded.inherited_from))
                 x (place, fixed_at, fixed_by, fixed_in, fix_deployed_at, muted_at, muted_by, mute_until, mute_upto,
                    inherited_from)
            WHERE x.place = CASE WHEN m.fixed_at IS NULL AND m.muted_at IS NULL THEN 2 ELSE 1 END);
    PERFORM dlq.record_act(
        'group ' || p_queue || ' ' || p_fingerprint,
        CASE WHEN v_one_to_one THEN 'goes on with a former group' ELSE 'was part of a former group' END, p_actor, NULL,
        jsonb_build_object('former', p_former, 'owner', v_former.owner, 'fixedBy', v_former.fixed_by,
                           'mutedBy', CASE WHEN v_former.muted_at IS NOT NULL THEN v_former.muted_by END));
END
$$;
COMMENT ON FUNCTION dlq.inherit_marks IS
    'Makes a failure group inherit owner and note of a former one and, if the two are one to one, its mute and '
    'its mark as fixed. Otherwise the group''s note names who muted the former group, or marked it as fixed.';

-- Call alias_groups in a short transaction of its own, so that filing and moving entries do not
-- wait for it.
CREATE OR REPLACE FUNCTION dlq.alias_groups(p_queues text[], p_formers text[], p_fingerprints text[],
    p_entries uuid[], p_titles text[], p_actor text) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_row     record;
    v_learned integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.alias_groups', 0));
    FOR v_row IN
        SELECT p.queue, p.former, p.fingerprint,
               (array_agg(p.entry_id ORDER BY p.place))[1] AS entry_id,
               (array_agg(p.title ORDER BY p.place))[1] AS title
        FROM unnest(p_queues, p_formers, p_fingerprints, p_entries, p_titles)
            WITH ORDINALITY p (queue, former, fingerprint, entry_id, title, place)
        -- Groups that count as other have no counts of their own and get no alias.
        WHERE p.former <> 'other'
          AND EXISTS (SELECT FROM dlq.failure_groups g WHERE g.queue = p.queue AND g.fingerprint = p.former)
          AND NOT EXISTS (
              SELECT FROM dlq.group_aliases a
              WHERE a.queue = p.queue AND a.former = p.former AND a.fingerprint = p.fingerprint)
        GROUP BY p.queue, p.former, p.fingerprint ORDER BY min(p.place)
    LOOP
        INSERT INTO dlq.group_aliases (queue, former, fingerprint, main, entry_id, title)
        VALUES (v_row.queue, v_row.former, v_row.fingerprint,
                NOT EXISTS (
                    SELECT FROM dlq.group_aliases a
                    WHERE a.queue = v_row.queue AND a.former = v_row.former AND a.main),
                v_row.entry_id,
                (SELECT dlq.group_title(v_row.title, e.original_event, e.edited_event, e.metadata, e.job_kind)
                 FROM dlq.dead_letter_queue e WHERE e.id = v_row.entry_id LIMIT 1));
        PERFORM dlq.inherit_marks(v_row.queue, v_row.former, v_row.fingerprint, p_actor);
        v_learned := v_learned + 1;
    END LOOP;
    RETURN v_learned;
END
$$;
COMMENT ON FUNCTION dlq.alias_groups IS
    'Records the groups that errors of former failure groups are in, each with an entry as evidence, and makes '
    'them inherit marks (dlq.inherit_marks). Returns how many aliases are new.';

-- regroup moves open entries from former groups. An entry that moves to the group that continues
-- its former one needs no audit row: the rollups count it there already. The status and updated_at
-- do not change, so this is not a move of the state machine.
CREATE OR REPLACE FUNCTION dlq.regroup(p_ids uuid[], p_formers text[], p_fingerprints text[],
    p_last_failed_ats timestamptz[], p_actor text) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_moved integer;
    v_at    constant timestamptz := (SELECT s.at - interval '1 minute' FROM dlq.rollup_state s);
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT e.id, n.former, n.fingerprint, coalesce(a.fingerprint, 'other') AS counted
        FROM unnest(p_ids, p_formers, p_fingerprints, p_last_failed_ats) n (id, former, fingerprint, last_failed_at)
        -- Take only entries that have not changed since the caller read them.
        JOIN dlq.dead_letter_open e ON e.id = n.id AND e.fingerprint = n.former AND e.last_failed_at = n.last_failed_at
        LEFT JOIN dlq.group_aliases a ON a.main AND a.queue = e.queue AND a.former = n.former
        -- If the former group has no alias, the rollups may not have counted the entry yet, or count it
        -- as other. Such an entry is moved only after the rollups have counted its last change.
        WHERE a.former IS NOT NULL OR e.updated_at < v_at
        ORDER BY e.id FOR UPDATE OF e SKIP LOCKED
    ), moved AS (
        UPDATE dlq.dead_letter_open e SET fingerprint = h.fingerprint FROM locked h WHERE e.id = h.id
        RETURNING e.id, e.status, e.strategy, e.rule, e.next_retry_at, e.river_job_id, e.queue, e.kind, e.error_class,
                  e.config_version, e.last_failed_at, e.fingerprint, h.former, h.counted
    ), audited AS (
        INSERT INTO dlq.dead_letter_transitions
            (entry_id, from_status, to_status, actor, reason, strategy, rule, next_retry_at,
             river_job_id, queue, kind, error_class, from_class, config_version, failed_at,
             left_group, joined_group)
        SELECT m.id, m.status, m.status, p_actor, 'the grouping method changed', m.strategy, m.rule, m.next_retry_at,
               m.river_job_id, m.queue, m.kind, m.error_class, m.error_class, m.config_version, m.last_failed_at,
               CASE m.counted WHEN 'other' THEN 'other' ELSE m.former END, m.fingerprint
        FROM moved m WHERE m.counted <> m.fingerprint
    )
    SELECT count(*) INTO v_moved FROM moved m;
    RETURN v_moved;
END
$$;
COMMENT ON FUNCTION dlq.regroup IS
    'Moves open entries from former failure groups to the groups of their errors by the current method. Skips '
    'entries that another session has locked, that have changed since they were read, or whose last change the '
    'rollups have not counted and whose group has no alias. Returns how many it moved.';
