-- Versions: the version in which a failure group is fixed, and the version that works a queue. Once the fix of a group
-- is deployed, the console and the CLI offer a replay run of its earlier failures. If the policy sets replayWhenFixed,
-- dlqd starts or requests this run (internal/replay/fixed.go).

CREATE OR REPLACE FUNCTION dlq.version_key(p_version text) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ARRAY(SELECT lpad(coalesce(v.part[n], '0'), 20, '0') FROM unnest(ARRAY[1, 3, 5]) n)
        || CASE WHEN v.part[7] IS NULL THEN ARRAY['2'] ELSE ARRAY(
            SELECT CASE WHEN i ~ '^[0-9]{1,20}$' THEN '0' || lpad(i, 20, '0') ELSE '1' || i END
            FROM unnest(string_to_array(v.part[7], '.')) WITH ORDINALITY u (i, place) ORDER BY u.place) END
    FROM regexp_match(p_version, '^v?([0-9]{1,20})(\.([0-9]{1,20}))(\.([0-9]{1,20}))?(-([0-9A-Za-z.-]+))?(\+[0-9A-Za-z.-]+)?$') v (part)
    WHERE v.part IS NOT NULL
$$;
COMMENT ON FUNCTION dlq.version_key IS
    'The key by which semantic versions are ordered, with the collation "C" (4.2 is 4.2.0; a leading v and the build '
    'do not count). Null for versions that are not semantic.';

CREATE OR REPLACE FUNCTION dlq.deployed_version(p_queue text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT d.version FROM dlq.deploys d WHERE d.queue IN (p_queue, '') ORDER BY d.last_number DESC LIMIT 1
$$;
COMMENT ON FUNCTION dlq.deployed_version IS
    'The version that works a queue: the last that was reported for it or for all queues.';

CREATE OR REPLACE FUNCTION dlq.has_fix(p_queue text, p_version text, p_fixed_in text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT CASE WHEN p_version = p_fixed_in THEN true
        WHEN dlq.version_key(p_version) IS NOT NULL AND dlq.version_key(p_fixed_in) IS NOT NULL
            THEN dlq.version_key(p_version) COLLATE "C" >= dlq.version_key(p_fixed_in) COLLATE "C"
        ELSE coalesce((
            SELECT min(d.number) FILTER (WHERE d.version = p_version)
                > min(d.number) FILTER (WHERE d.version = p_fixed_in)
            FROM dlq.deploys d WHERE d.queue IN (p_queue, '') AND d.version IN (p_version, p_fixed_in)), false)
        END
$$;
COMMENT ON FUNCTION dlq.has_fix IS
    'Whether a version that works a queue has a fix of the version p_fixed_in: if both are semantic, because it is not '
    'lower; otherwise because it was first deployed later.';

-- settle_fixes records when the fix of a group was deployed, which decides whether a later failure is a regression. If
-- a version without the fix is deployed, as in a rollback, settle_fixes removes that time.
CREATE OR REPLACE FUNCTION dlq.settle_fixes(p_queue text, p_fingerprint text DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    UPDATE dlq.group_marks m SET
        fix_deployed_at = CASE WHEN f.runs THEN clock_timestamp() END,
        fix_run = CASE WHEN f.runs THEN NULL ELSE m.fix_run END,
        fix_request = CASE WHEN f.runs THEN NULL ELSE m.fix_request END
    FROM (SELECT k.queue, k.fingerprint, coalesce(dlq.has_fix(k.queue, v.version, k.fixed_in), false) AS runs
          FROM dlq.group_marks k CROSS JOIN LATERAL dlq.deployed_version(k.queue) v (version)
          WHERE k.fixed_in IS NOT NULL AND (p_queue = '' OR k.queue = p_queue)
            AND (p_fingerprint IS NULL OR k.fingerprint = p_fingerprint)
          ORDER BY k.queue, k.fingerprint) f
    WHERE m.queue = f.queue AND m.fingerprint = f.fingerprint AND f.runs <> (m.fix_deployed_at IS NOT NULL)
$$;
COMMENT ON FUNCTION dlq.settle_fixes IS
    'Writes for the groups of a queue (empty: of all queues) that are fixed in a version whether a version with the '
    'fix runs, and since when.';

CREATE OR REPLACE FUNCTION dlq.note_deploy(p_queue text, p_version text, p_actor text, p_note text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
BEGIN
    -- Deploys are ordered by a number, because a clock may be set back.
    INSERT INTO dlq.deploys AS d (queue, version, actor, last_number)
    VALUES (p_queue, p_version, dlq.actor(p_actor), (SELECT coalesce(max(o.last_number), 0) + 1 FROM dlq.deploys o))
    ON CONFLICT (queue, version) DO UPDATE SET last_at = clock_timestamp(), actor = excluded.actor,
        last_number = excluded.last_number;
    DELETE FROM dlq.deploys d WHERE d.queue = p_queue AND d.version IN (
        SELECT o.version FROM dlq.deploys o WHERE o.queue = p_queue ORDER BY o.last_number DESC OFFSET 1000);
    PERFORM dlq.settle_fixes(p_queue);
    PERFORM dlq.record_act(CASE p_queue WHEN '' THEN 'deploy' ELSE 'queue ' || p_queue END,
        'deployed ' || p_version, p_actor, p_note, NULL);
END
$$;
COMMENT ON FUNCTION dlq.note_deploy IS
    'Writes that a version works a queue (empty: all queues). The caller holds the advisory lock of dlq.deploys.';

CREATE OR REPLACE FUNCTION dlq.record_deploy(p_version text, p_queues text[] DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_queue text;
BEGIN
    IF length(coalesce(p_version, '')) NOT BETWEEN 1 AND 255 OR cardinality(p_queues) > 100
        OR EXISTS (SELECT FROM unnest(p_queues) q WHERE length(coalesce(q, '')) NOT BETWEEN 1 AND 255)
        OR length(p_note) > 10000 THEN
        RAISE EXCEPTION 'deploy: invalid version, queues or note' USING ERRCODE = 'DLQ04',
            HINT = 'A version and a queue have 1 to 255 characters, a note 10000. At most 100 queues; none for all.';
    END IF;
    IF coalesce(cardinality(p_queues), 0) = 0 THEN
        PERFORM dlq.require_everything('deploy');
        p_queues := ARRAY[''];
    END IF;
    -- One session records deploys at a time, because the last deploy decides which version runs.
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.deploys', 0));
    FOR v_queue IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY q LOOP
        IF v_queue <> '' AND NOT dlq.in_scope(v_queue, NULL, dlq.queue_scope()) THEN
            RAISE EXCEPTION 'deploy: one of the queues is not in your scope' USING ERRCODE = 'DLQ06';
        END IF;
        PERFORM dlq.note_deploy(v_queue, p_version, p_actor, p_note);
        -- A caller with a scope may name any number of queues that match a pattern, so the rows of such a caller are
        -- limited.
        DELETE FROM dlq.deploys d WHERE dlq.queue_scope() IS NOT NULL AND (d.queue, d.version) IN (
            SELECT o.queue, o.version FROM dlq.deploys o WHERE o.actor = dlq.actor(p_actor)
            ORDER BY o.last_number DESC OFFSET 10000);
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.record_deploy IS
    'Records that a version works these queues from now on (null: all queues), for failure groups that are fixed in '
    'a version. At most 100 queues; all queues require a caller without a scope. An earlier version again is a '
    'rollback. Of a queue, the last 1,000 versions are kept; of an actor who is limited to some queues, the last '
    '10,000 reports.';

-- learn_versions learns versions from the reports of completed jobs:
--   - During a deploy, two versions report. A version counts only if it is the only one among at least ten reports of
--     its queue.
--   - A job that dlqd completed for a resolved entry does not count, because no worker has worked it.
--   - A job that was worked before the last reported deploy does not count: after an operator has reported a rollback,
--     jobs of the newer version are still among the last ones.
--   - A receiver may change its version with each answer, so a new version is learned at most once in five minutes.
CREATE OR REPLACE FUNCTION dlq.learn_versions() RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_queue   text;
    v_version text;
    v_count   integer := 0;
BEGIN
    IF NOT EXISTS (SELECT FROM dlq.group_marks m WHERE m.fixed_in IS NOT NULL)
        OR NOT pg_try_advisory_xact_lock(hashtextextended('dlq.deploys', 0)) THEN
        RETURN 0;
    END IF;
    FOR v_queue, v_version IN
        SELECT r.queue, min(r.version)
        FROM (SELECT j.queue, j.attempted_at, dlq.reported_version(j.metadata) AS version
              -- #- '{}' decompresses metadata once. Metadata of more than 64 kB, as stored, does not count.
              FROM (SELECT l.queue, l.attempt, l.attempted_at, CASE WHEN pg_column_size(l.metadata) <= 65536
                        THEN l.metadata #- '{}' END AS metadata
                    FROM (SELECT d.queue, d.metadata, d.attempt, d.attempted_at FROM river.river_job d
                          WHERE d.state = 'completed' AND d.finalized_at > now() - interval '5 minutes'
                              AND d.finalized_at <= now()
                          ORDER BY d.finalized_at DESC LIMIT 1000) l
                    OFFSET 0) j
              WHERE NOT dlq.is_superseded('completed', j.attempt, j.metadata)) r
        JOIN (SELECT m.queue, (SELECT max(d.last_at) FROM dlq.deploys d
                               WHERE d.queue IN (m.queue, '') AND d.last_at <= now()) AS reported_at
              FROM dlq.group_marks m WHERE m.fixed_in IS NOT NULL GROUP BY m.queue OFFSET 0) f
            ON f.queue = r.queue AND (f.reported_at IS NULL OR r.attempted_at > f.reported_at)
        WHERE r.version IS NOT NULL
            AND NOT EXISTS (SELECT FROM dlq.deploys d WHERE d.queue = r.queue AND d.actor = 'capture'
                AND d.last_at BETWEEN now() - interval '5 minutes' AND now())
        GROUP BY r.queue HAVING count(*) >= 10 AND min(r.version) = max(r.version)
            AND min(r.version) IS DISTINCT FROM dlq.deployed_version(r.queue)
        ORDER BY r.queue
    LOOP
        PERFORM dlq.note_deploy(v_queue, v_version, 'capture', 'reported by completed jobs');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.learn_versions IS
    'Records which versions work the queues with failure groups that are fixed in a version. Of the last 1,000 jobs '
    'that completed within five minutes, at least ten of the queue have to report a version, and all of these the '
    'same. Returns the number of queues whose version changed.';

-- If several processes find the same group, one starts the run: the others skip the locked row, and later find that the
-- run exists.
CREATE OR REPLACE FUNCTION dlq.fixed_groups(p_queues text[], p_after text[], p_limit integer)
RETURNS TABLE (queue text, fingerprint text, fixed_in text, fix_deployed_at timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT m.queue, m.fingerprint, m.fixed_in, m.fix_deployed_at
    FROM dlq.group_marks m
    JOIN dlq.failure_groups g ON g.queue = m.queue AND g.fingerprint = m.fingerprint
    WHERE m.fixed_in IS NOT NULL AND m.queue = ANY (p_queues) AND m.fix_run IS NULL AND m.fix_request IS NULL
        AND m.fix_deployed_at > now() - interval '7 days' AND g.open > 0
        AND dlq.group_status(m, g.failures, g.last_seen) IN ('fixed', 'muted') AND g.last_seen <= m.fix_deployed_at
        -- Leave former groups out: another group continues each of them and has the same marks.
        AND NOT EXISTS (SELECT FROM dlq.group_aliases a WHERE a.queue = m.queue AND a.former = m.fingerprint)
        AND (p_after IS NULL OR (m.queue, m.fingerprint) > (p_after[1], p_after[2]))
    ORDER BY m.queue, m.fingerprint LIMIT p_limit
$$;
COMMENT ON FUNCTION dlq.fixed_groups IS
    'Failure groups of these queues whose fix has run for at most seven days, that have not failed since, and for '
    'which the policy has started no replay run yet.';

-- No run starts while a process of another version is alive: that process does not know the rules of such runs, and
-- would also send entries that the run must leave out.
CREATE OR REPLACE FUNCTION dlq.take_fix(p_queue text, p_fingerprint text, p_deployed_at timestamptz,
    p_program text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM FROM dlq.group_marks m WHERE m.queue = p_queue AND m.fingerprint = p_fingerprint
        AND NOT EXISTS (SELECT FROM dlq.processes p WHERE p.version <> p_program AND p.stopped_at IS NULL
            AND p.seen_at > now() - interval '1 minute' AND 'dlq-workers' = ANY (p.parts))
        AND m.fix_deployed_at = p_deployed_at AND m.fix_run IS NULL AND m.fix_request IS NULL FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION dlq.take_fix IS
    'Locks the marks of a group whose fix runs, for the process that starts its replay run; false if another process '
    'has them, or has started it, or if dlqd runs in several versions.';

-- A request for approval may name any group (forFix). Only the request that the policy made for this group counts.
CREATE OR REPLACE FUNCTION dlq.set_fix(p_queue text, p_fingerprint text, p_run uuid, p_request uuid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    UPDATE dlq.group_marks m SET fix_run = coalesce(p_run, m.fix_run), fix_request = coalesce(p_request, m.fix_request)
    WHERE m.queue = p_queue AND m.fingerprint = p_fingerprint AND m.fixed_in IS NOT NULL
        AND m.fix_deployed_at IS NOT NULL AND m.fix_run IS NULL
        AND (dlq.approved() IS NULL OR m.fix_request = dlq.approved());
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION dlq.set_fix IS
    'Records the replay run, or the request for approval, for a group whose fix runs. False if the fix does not run, or '
    'the approved request is not the one for this group.';

CREATE OR REPLACE FUNCTION dlq.fix_runs(p_run uuid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT EXISTS (SELECT FROM dlq.replay_runs r
        JOIN dlq.group_marks m
          ON m.queue = r.filter -> 'queue' ->> 0 AND m.fingerprint = r.filter -> 'fingerprint' ->> 0
        WHERE r.id = p_run AND m.fix_run = r.id AND m.fixed_in IS NOT NULL AND m.fix_deployed_at IS NOT NULL)
$$;
COMMENT ON FUNCTION dlq.fix_runs IS
    'Whether the fix for which the policy started a replay run still runs: no rollback, no other mark since.';
