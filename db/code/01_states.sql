-- The state machine: the allowed moves, and the functions that enforce them for every client. Their
-- triggers are in db/triggers.sql.
--
-- Every file of db/code can be run again at any time: it replaces what exists.

CREATE OR REPLACE FUNCTION dlq.allowed_moves(p_from dlq.dead_letter_status) RETURNS dlq.dead_letter_status[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_from
    WHEN 'dlq_pending'::dlq.dead_letter_status
        THEN ARRAY['dlq_processing', 'dlq_pending', 'dlq_manual', 'dlq_resolved',
            'dlq_archived']::dlq.dead_letter_status[]
    WHEN 'dlq_processing'::dlq.dead_letter_status
        THEN ARRAY['dlq_resolved', 'dlq_returned', 'dlq_pending', 'dlq_failed',
            'dlq_manual']::dlq.dead_letter_status[]
    -- The consumer group has read past the record, the record came back, or an operator replays the entry.
    WHEN 'dlq_returned'::dlq.dead_letter_status
        THEN ARRAY['dlq_resolved', 'dlq_pending', 'dlq_manual', 'dlq_failed', 'dlq_processing',
            'dlq_archived']::dlq.dead_letter_status[]
    WHEN 'dlq_manual'::dlq.dead_letter_status
        THEN ARRAY['dlq_processing', 'dlq_pending', 'dlq_manual', 'dlq_resolved',
            'dlq_archived']::dlq.dead_letter_status[]
    WHEN 'dlq_failed'::dlq.dead_letter_status
        THEN ARRAY['dlq_processing', 'dlq_resolved', 'dlq_archived']::dlq.dead_letter_status[]
    -- An operator reopens the entry, or its job was run again outside dlqd.
    WHEN 'dlq_resolved'::dlq.dead_letter_status THEN ARRAY['dlq_manual']::dlq.dead_letter_status[]
    WHEN 'dlq_archived'::dlq.dead_letter_status THEN ARRAY['dlq_manual']::dlq.dead_letter_status[]
END;
COMMENT ON FUNCTION dlq.allowed_moves IS 'The states that a dead letter may move to from p_from.';

CREATE OR REPLACE FUNCTION dlq.is_open(p_status dlq.dead_letter_status) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_status IN ('dlq_pending'::dlq.dead_letter_status, 'dlq_processing'::dlq.dead_letter_status,
    'dlq_manual'::dlq.dead_letter_status);
COMMENT ON FUNCTION dlq.is_open IS 'Whether a dead letter with this status is open.';

CREATE OR REPLACE FUNCTION dlq.stage_of(p_status dlq.dead_letter_status) RETURNS dlq.dead_letter_stage
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_status
    WHEN 'dlq_resolved'::dlq.dead_letter_status THEN 'resolved'::dlq.dead_letter_stage
    WHEN 'dlq_failed'::dlq.dead_letter_status THEN 'failed'::dlq.dead_letter_stage
    WHEN 'dlq_returned'::dlq.dead_letter_status THEN 'returned'::dlq.dead_letter_stage
    WHEN 'dlq_archived'::dlq.dead_letter_status THEN 'archived'::dlq.dead_letter_stage
    ELSE 'open'::dlq.dead_letter_stage
END;
COMMENT ON FUNCTION dlq.stage_of IS 'The partition (stage) of a filed dead letter with this status.';

-- PL/pgSQL keeps the plan of this function for the session. Postgres cannot inline it, so it would plan an SQL function
-- again in every statement (measured: 22 µs of the 45 µs of an insert).
CREATE OR REPLACE FUNCTION dlq.uuid_v7() RETURNS uuid
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
DECLARE
    v_us bigint := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
BEGIN
    RETURN (lpad(to_hex(v_us / 1000), 12, '0') || '7' || lpad(to_hex(v_us % 1000 * 4096 / 1000), 3, '0')
            || substr(replace(gen_random_uuid()::text, '-', ''), 17))::uuid;
END
$$;
COMMENT ON FUNCTION dlq.uuid_v7 IS
    'A UUID version 7 (RFC 9562, method 3): current time in milliseconds, microseconds in rand_a, '
    'then random bits, so that ids sort by time. Postgres 18 and later have uuidv7().';

CREATE OR REPLACE FUNCTION dlq.caller() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
RETURN coalesce(nullif(current_setting('role', true), 'none'), session_user);
COMMENT ON FUNCTION dlq.caller IS
    'The role of the session: the one chosen by SET ROLE, or else session_user. Also correct inside '
    'functions that run as the schema''s owner.';

-- is_owner and dlq.origin are in PL/pgSQL, because each move calls both, and Postgres would plan SQL functions again in
-- every statement (measured: 115 µs of the 280 µs of a replay).
CREATE OR REPLACE FUNCTION dlq.is_owner() RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN pg_has_role(dlq.caller(),
        (SELECT c.relowner FROM pg_class c WHERE c.oid = 'dlq.dead_letter_queue'::regclass), 'USAGE');
END
$$;
COMMENT ON FUNCTION dlq.is_owner IS
    'Whether the caller owns the schema, as dlqd itself does, or is a superuser.';

-- Only dlqd, as the schema's owner, may name another actor. For any other caller the actor is the
-- database user, and the claimed name goes into dlq.origin.
CREATE OR REPLACE FUNCTION dlq.actor(p_claimed text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
RETURN CASE WHEN p_claimed = session_user OR dlq.is_owner() THEN coalesce(p_claimed, session_user)
    ELSE session_user END;
COMMENT ON FUNCTION dlq.actor IS
    'The actor of an operation: p_claimed if the caller owns the schema, otherwise the database '
    'user. dlq.origin records a different claimed name as "on behalf of".';

CREATE OR REPLACE FUNCTION dlq.is_person(p_actor text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_actor NOT LIKE 'worker:%' AND p_actor NOT IN ('capture', 'source', 'reconciler', 'sweep', 'retention',
    'backfill', 'policy');
COMMENT ON FUNCTION dlq.is_person IS 'Whether an actor is a user or a program of one, not dlqd itself.';

-- The setting dlq.origin, in which the API describes its caller, counts only if the caller owns the
-- schema. For other callers the address comes from the server; application_name is the client's own
-- claim. A database user may have the name of one of dlqd's actors, such as capture: the second
-- condition gives the moves of such a user an origin, too.
CREATE OR REPLACE FUNCTION dlq.origin(p_actor text, p_claimed text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_described constant text := nullif(current_setting('dlq.origin', true), '');
BEGIN
    IF v_described IS NOT NULL AND dlq.is_owner() THEN
        RETURN v_described;
    ELSIF dlq.is_person(p_actor) OR p_actor = session_user AND NOT dlq.is_owner() THEN
        RETURN 'SQL, from ' || coalesce(host(inet_client_addr()), 'a local socket')
            || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')
            || CASE WHEN p_claimed <> p_actor THEN ', on behalf of ' || p_claimed ELSE '' END;
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.origin IS
    'Where an operator''s move comes from: the API''s description of its caller, or the address and '
    'program of the database session, with the claimed name if it differs from the actor. Null for '
    'moves that dlqd makes itself.';

-- For the schema's owner the scope is the setting dlq.scope, which dlqd sets for one transaction. For other users it
-- comes from the roles of session_user, so SET ROLE does not widen it. Exception: for a member of the owner, it comes
-- from the role that SET ROLE has chosen.
CREATE OR REPLACE FUNCTION dlq.scope() RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- SECURITY DEFINER: current_user is the schema's owner here.
    v_user name := CASE WHEN pg_has_role(session_user, current_user, 'MEMBER') THEN dlq.caller() ELSE session_user END;
BEGIN
    IF pg_has_role(v_user, current_user, 'USAGE') THEN
        RETURN nullif(current_setting('dlq.scope', true), '')::jsonb;
    END IF;
    RETURN (SELECT CASE WHEN NOT bool_or((s.queues = '{}' OR '*' = ANY (s.queues))
        AND (s.kinds = '{}' OR '*' = ANY (s.kinds)))
                THEN jsonb_agg(jsonb_build_object('queues', s.queues, 'kinds', s.kinds)) END
            FROM dlq.role_scopes s JOIN pg_roles r ON r.rolname = s.role
            WHERE pg_has_role(v_user, r.oid, 'MEMBER'));
END
$$;
COMMENT ON FUNCTION dlq.scope IS
    'The queues and kinds that the caller may see, as [{"queues": ["payments*"], "kinds": []}]. An '
    'entry is in scope if one element matches it; an empty list matches every queue or kind. Null '
    'means no limit. For a database user the elements are the rows of dlq.role_scopes for the roles '
    'that session_user is a member of.';

CREATE OR REPLACE FUNCTION dlq.like_patterns(p_patterns jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(replace(replace(replace(replace(coalesce(p, ''), '\', '\\'), '%', '\%'), '_', '\_'), '*', '%'))
    FROM jsonb_array_elements_text(p_patterns) p
$$;
COMMENT ON FUNCTION dlq.like_patterns IS
    'LIKE patterns for patterns in which * stands for any text; null for an empty list.';

CREATE OR REPLACE FUNCTION dlq.scope_patterns(p_scope jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN p_scope IS NOT NULL THEN ARRAY(
        -- '*' becomes the pattern '%'. It gets no colon, so that it also matches a missing queue or kind.
        SELECT coalesce(':' || replace(nullif(q, '%'), E'\x01', E'\x02'), '%') || E'\x01'
            || coalesce(':' || replace(nullif(k, '%'), E'\x01', E'\x02'), '%')
        FROM jsonb_array_elements(p_scope) g
        CROSS JOIN unnest(coalesce(dlq.like_patterns(g -> 'queues'), ARRAY[NULL::text])) q
        CROSS JOIN unnest(coalesce(dlq.like_patterns(g -> 'kinds'), ARRAY[NULL::text])) k) END
$$;
COMMENT ON FUNCTION dlq.scope_patterns IS
    'A scope (dlq.scope) as LIKE patterns of queue and kind, for dlq.in_patterns. Null for no '
    'limit.';

-- Postgres inlines this expression. Pass (SELECT dlq.scope_patterns(dlq.scope())), which a
-- statement evaluates once; each row then costs 0.1 µs. Queue and kind are joined into one text so
-- that one LIKE ANY checks both. The separator E'\x01' is replaced where it occurs in either. A
-- null kind has no colon, so only patterns without a limit on kinds match it.
CREATE OR REPLACE FUNCTION dlq.in_patterns(p_queue text, p_kind text, p_patterns text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(':' || replace(p_queue, E'\x01', E'\x02'), '') || E'\x01'
    || coalesce(':' || replace(p_kind, E'\x01', E'\x02'), '') LIKE ANY (coalesce(p_patterns, '{%}'));
COMMENT ON FUNCTION dlq.in_patterns IS
    'Whether a queue and a kind are in a scope, given as dlq.scope_patterns returns it. Objects of '
    'a whole queue have a null kind: they are in scope if kinds are not limited.';

-- Postgres inlines this expression, too. If the scope is a constant or a parameter, its patterns are
-- computed at plan time.
CREATE OR REPLACE FUNCTION dlq.in_scope(p_queue text, p_kind text, p_scope jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN dlq.in_patterns(p_queue, p_kind, dlq.scope_patterns(p_scope));
COMMENT ON FUNCTION dlq.in_scope IS
    'Whether a queue and a kind are in a scope (dlq.scope). For many rows use dlq.in_patterns.';

CREATE OR REPLACE FUNCTION dlq.scope_within(p_inner jsonb, p_outer jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    -- If an outer pattern matches an inner pattern as text, it matches everything that the inner
    -- one matches.
    SELECT p_outer IS NULL OR p_inner IS NOT NULL AND NOT EXISTS (
        SELECT FROM jsonb_array_elements(p_inner) g
        CROSS JOIN jsonb_array_elements_text(CASE WHEN coalesce(g -> 'queues', '[]') = '[]' THEN '["*"]'
            ELSE g -> 'queues' END) q
        CROSS JOIN jsonb_array_elements_text(CASE WHEN coalesce(g -> 'kinds', '[]') = '[]' THEN '["*"]'
            ELSE g -> 'kinds' END) k
        WHERE NOT dlq.in_scope(q, k, p_outer))
$$;
COMMENT ON FUNCTION dlq.scope_within IS 'Whether everything in scope p_inner is also in scope p_outer.';

CREATE OR REPLACE FUNCTION dlq.act_in_scope(p_subject text, p_scope jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN p_scope IS NULL
        OR p_subject LIKE 'queue %' AND dlq.in_scope(substr(p_subject, length('queue ') + 1), NULL, p_scope)
        OR p_subject LIKE 'group %'
            AND dlq.in_scope(regexp_replace(substr(p_subject, length('group ') + 1), ' [^ ]*$', ''), NULL, p_scope)
        OR p_subject LIKE 'circuit breaker queue:%'
            AND dlq.in_scope(substr(p_subject, length('circuit breaker queue:') + 1), NULL, p_scope)
        OR p_subject LIKE 'replay run %'
            AND EXISTS (SELECT FROM dlq.replay_runs r
                WHERE r.id = dlq.to_uuid(substr(p_subject, length('replay run ') + 1))
                    AND dlq.scope_within(r.scope, p_scope))
        OR p_subject LIKE 'approval %'
            AND EXISTS (SELECT FROM dlq.approvals a WHERE a.id = dlq.to_uuid(substr(p_subject, length('approval ') + 1))
                AND dlq.scope_within(a.scope, p_scope))
        OR p_subject LIKE 'source %'
            AND EXISTS (SELECT FROM dlq.sources s WHERE s.name = substr(p_subject, length('source ') + 1)
                AND dlq.in_scope(s.queue, NULL, p_scope));
END
$$;
COMMENT ON FUNCTION dlq.act_in_scope IS
    'Whether a caller limited to p_scope may see an act on an object that is not an entry '
    '(dlq.acts.subject): a queue, its circuit breaker, a failure group of the queue, a replay run, '
    'a request for approval, or a source of records.';

-- For the caller, an entry outside the scope looks the same as one that does not exist. Call this function before a
-- query, not within the query: there the planner would call it for each partition and index.
CREATE OR REPLACE FUNCTION dlq.ids_in_scope(p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_scope jsonb := dlq.scope();
    v_since timestamptz := dlq.closed_since(p_ids);
BEGIN
    IF v_scope IS NULL THEN
        RETURN p_ids;
    END IF;
    RETURN ARRAY(SELECT e.id FROM dlq.dead_letter_queue e
                 WHERE e.id = ANY (p_ids) AND (e.closed_at IS NULL OR e.closed_at >= v_since)
                     AND dlq.in_scope(e.queue, e.kind, v_scope) ORDER BY e.id);
END
$$;
COMMENT ON FUNCTION dlq.ids_in_scope IS
    'The ids, of those given, of entries in the caller''s scope; all ids if the caller has no '
    'limit.';

CREATE OR REPLACE FUNCTION dlq.require_everything(p_action text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF dlq.scope() IS NOT NULL THEN
        RAISE EXCEPTION '%: applies to all queues and kinds, but your scope is limited', p_action
            USING ERRCODE = 'DLQ06';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_everything IS
    'Raises DLQ06 if the caller is limited to some queues or kinds.';

CREATE OR REPLACE FUNCTION dlq.queue_scope() RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_scope jsonb := dlq.scope();
BEGIN
    IF EXISTS (SELECT FROM jsonb_array_elements(v_scope) g WHERE coalesce(g -> 'kinds', '[]') <> '[]'
        AND NOT g -> 'kinds' ? '*') THEN
        RAISE EXCEPTION 'these counts are by queue, but your scope is limited to some kinds' USING ERRCODE = 'DLQ06';
    END IF;
    RETURN v_scope;
END
$$;
COMMENT ON FUNCTION dlq.queue_scope IS
    'The caller''s scope (dlq.scope), for figures that are counted by queue. Raises DLQ06 if the '
    'caller is limited to some kinds.';

CREATE OR REPLACE FUNCTION dlq.policy_version() RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN (SELECT s.value FROM dlq.settings s WHERE s.key = 'policy_version');
END
$$;
COMMENT ON FUNCTION dlq.policy_version IS
    'Version of the policy in force: the one that a dlqd process published last. Null before the '
    'first.';

CREATE OR REPLACE FUNCTION dlq.record_act(p_subject text, p_act text, p_actor text, p_note text DEFAULT NULL,
    p_detail jsonb DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO dlq.acts (subject, act, actor, origin, note, detail, config_version)
    VALUES (p_subject, p_act, dlq.actor(p_actor), dlq.origin(dlq.actor(p_actor), p_actor), p_note,
        nullif(jsonb_strip_nulls(p_detail), '{}'), dlq.policy_version())
$$;
COMMENT ON FUNCTION dlq.record_act IS 'Writes an audit row for an act on an object that is not an entry.';

-- Each process publishes the policy that it loads, at startup and whenever its files change. An audit row is written
-- only if another version was published before. A process of an earlier version passes no skips or keys, and does not
-- change the published ones.
CREATE OR REPLACE FUNCTION dlq.publish_policy(p_version text, p_approvals text, p_actor text, p_skips text DEFAULT NULL,
    p_keys text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_before text;
BEGIN
    SELECT s.value INTO v_before FROM dlq.settings s WHERE s.key = 'policy_version' FOR UPDATE;
    INSERT INTO dlq.settings AS s (key, value) SELECT k.key, k.value
    FROM (VALUES ('policy_version', p_version), ('approvals', p_approvals), ('replay_skips', p_skips),
        ('replay_keys', p_keys)) k (key, value)
    WHERE k.value IS NOT NULL
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now() WHERE s.value <> excluded.value;
    IF v_before <> p_version THEN
        PERFORM dlq.record_act('policy', 'came into force', p_actor, NULL, jsonb_build_object('before', v_before));
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.publish_policy IS
    'Publishes the version of the policy in force, the operations that need a second person, what replay runs skip by '
    'default (dlq.skip_defaults), and where jobs have their ordering keys (dlq.job_key). A changed version leaves an '
    'audit row (dlq.policy_changes).';

-- on_move checks a move and writes its audit row. It is a BEFORE trigger, because AFTER UPDATE triggers do not fire for
-- a row that changes its partition, as every closing entry does. It files an entry that is still in the inbox first.
-- The WHEN of the trigger skips the redeliveries of dlq.redeliver_now: that function sets the same columns, and
-- dlq.on_moves writes the audit rows.
CREATE OR REPLACE FUNCTION dlq.on_move() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_actor  text;
    v_origin text;
    -- Failure groups that the entry leaves and joins; a group has only open entries.
    v_left   text;
    v_joined text;
    v_stage  constant dlq.dead_letter_stage := OLD.stage;
    -- Whether dlq.on_moves, the trigger of dead_letter_queue and of the open partition, writes the audit rows of the
    -- statement in place of this function.
    v_batch  constant boolean := OLD.stage = 'open' AND dlq.moves_in_batch();
    v_raw    dlq.dead_letter_queue; -- the row as capture wrote it
BEGIN
    IF NEW.id IS DISTINCT FROM OLD.id OR NEW.river_job_id IS DISTINCT FROM OLD.river_job_id THEN
        RAISE EXCEPTION 'dead letter %: its id and river_job_id cannot be changed', OLD.id USING ERRCODE = 'DLQ01';
    END IF;
    IF NOT (NEW.status = ANY (dlq.allowed_moves(OLD.status))) THEN
        RAISE EXCEPTION 'dead letter %: cannot move from % to % (allowed: %)', OLD.id, OLD.status, NEW.status,
                coalesce(nullif(array_to_string(dlq.allowed_moves(OLD.status), ', '), ''), 'none')
            USING ERRCODE = 'DLQ01';
    END IF;

    NEW.updated_at := now();
    IF OLD.stage = 'inbox' THEN
        -- If the job has an open entry, or an entry already holds this failure, the row does not
        -- move: filing adds the failure to the open entry, or drops it.
        IF dlq.is_repeat(OLD.river_job_id, OLD.job_created_at)
           OR NOT dlq.may_be_filed(OLD.id, OLD.river_job_id, OLD.job_created_at, OLD.retry_count, OLD.last_failed_at)
               THEN
            RETURN NULL;
        END IF;
        IF OLD.id <> dlq.entry_id(OLD.river_job_id, OLD.last_failed_at) THEN
            PERFORM dlq.take_failure(OLD.river_job_id, OLD.job_created_at, OLD.id, OLD.retry_count, OLD.id);
        END IF;
        v_raw := OLD;
        OLD := dlq.filed(OLD);
        NEW := dlq.filed(NEW, v_raw, OLD);
        PERFORM dlq.audit_capture(OLD);
        IF NEW.status = OLD.status AND NEW.next_retry_at IS NOT DISTINCT FROM OLD.next_retry_at
            AND NEW.move IS NULL THEN
            RETURN NEW;
        END IF;
    END IF;
    NEW.stage := dlq.stage_of(NEW.status);
    IF dlq.is_open(NEW.status) THEN
        NEW.closed_at := NULL;
    ELSIF NEW.status <> OLD.status THEN
        NEW.closed_at := now();
        NEW.resolution_timestamp := now();
    END IF;
    IF NEW.status <> 'dlq_pending' THEN
        NEW.next_retry_at := NULL;
        NEW.waiting_for := NULL;
    END IF;
    IF NEW.status <> 'dlq_manual' THEN
        NEW.parked_by := NULL;
    END IF;
    IF NEW.ordering_key IS NOT NULL THEN
        NEW.order_place := coalesce(NEW.order_place, dlq.order_place(NEW.river_job_id, NEW.job_created_at));
        IF dlq.is_open(OLD.status) AND NOT dlq.is_open(NEW.status) THEN
            IF NOT dlq.is_person(NEW.move ->> 'actor') THEN
                PERFORM dlq.order_done(NEW.queue, NEW.ordering_key, NEW.river_job_id, NEW.job_created_at);
            ELSE
                -- For an operator's move, only a fact is written. A DLQ worker wakes the next message of the key when
                -- it applies the fact. The operator's transaction may stay open, and River's scheduler would wait for
                -- the jobs that it locks.
                INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id)
                VALUES (NEW.river_job_id, NEW.job_created_at, 'closed', NEW.id);
            END IF;
        ELSIF dlq.is_open(NEW.status) AND NOT dlq.is_open(OLD.status) THEN
            PERFORM dlq.order_again(NEW.queue, NEW.ordering_key, NEW.order_place, NEW.river_job_id, NEW.job_created_at);
        END IF;
    END IF;
    IF NEW.status <> 'dlq_processing' THEN
        NEW.redelivery_job_id := NULL;
        NEW.locked_by := NULL;
        NEW.locked_at := NULL;
    END IF;
    IF dlq.is_open(NEW.status) AND NOT dlq.is_open(OLD.status) THEN
        NEW.resolution_strategy := NULL;
        NEW.resolved_by := NULL;
        NEW.resolution_notes := NULL;
        NEW.resolution_timestamp := NULL;
    END IF;

    IF NOT v_batch THEN
        v_actor := coalesce(NEW.move ->> 'actor', session_user);
        v_origin := dlq.origin(v_actor, NEW.move ->> 'claimed');
        v_left := CASE WHEN dlq.is_open(OLD.status) THEN OLD.fingerprint END;
        v_joined := CASE WHEN dlq.is_open(NEW.status) THEN NEW.fingerprint END;
        IF v_left IS NOT DISTINCT FROM v_joined THEN
            v_left := NULL;
            v_joined := NULL;
        END IF;
        INSERT INTO dlq.dead_letter_transitions
            (entry_id, from_status, to_status, actor, reason, note, strategy, rule, next_retry_at, river_job_id, queue,
             kind, error_class, detail, config_version,
             from_class, error_type, failed_at, first_failed_at, left_group, joined_group, origin, operation)
        VALUES
            (NEW.id, OLD.status, NEW.status, v_actor, NEW.move ->> 'reason', NEW.move ->> 'note',
             NEW.strategy, NEW.rule, NEW.next_retry_at, coalesce(NEW.redelivery_job_id, OLD.redelivery_job_id,
                 NEW.river_job_id),
             NEW.queue, NEW.kind, NEW.error_class, nullif(NEW.move -> 'detail', 'null'),
             -- The audit row of an operator's move has the version of the current policy, not the version by which dlqd
             -- last decided the entry.
             CASE WHEN v_origin IS NULL THEN NEW.config_version
                 ELSE coalesce(dlq.policy_version(), NEW.config_version) END,
             OLD.error_class,
             CASE WHEN NEW.last_failed_at IS DISTINCT FROM OLD.last_failed_at THEN coalesce(NEW.error_type, '') END,
             CASE WHEN NEW.last_failed_at IS DISTINCT FROM OLD.last_failed_at THEN NEW.last_failed_at END,
             CASE WHEN NEW.closed_at IS NOT NULL THEN NEW.first_failed_at END,
             v_left, v_joined, v_origin, (NEW.move ->> 'operation')::uuid);
    END IF;

    -- If the row changes its partition, Postgres inserts it into the new one after this trigger. The
    -- marker "moved" tells dlq.on_enter that the entry is not new.
    NEW.move := CASE WHEN NEW.stage <> v_stage AND NEW.status <> 'dlq_pending' THEN '{"moved": true}' END;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION dlq.on_move IS
    'Trigger: refuses a move that dlq.allowed_moves() does not list (SQLSTATE DLQ01), sets the '
    'columns that follow from the status, and writes the audit row, unless dlq.on_moves does.';

-- A function that moves many entries with one statement sets dlq.moves for this statement (dlq.set_moves). dlq.on_moves
-- then writes all audit rows of the statement with one insert. The setting counts only for the schema's owner, its
-- members and superusers, because an operator could set it before calling a function. These roles, and no others, have
-- every privilege on the table with the grant option, and may also set the column move themselves.
CREATE OR REPLACE FUNCTION dlq.moves_in_batch() RETURNS boolean
LANGUAGE sql STABLE
RETURN coalesce(current_setting('dlq.moves', true), '') <> ''
    AND has_table_privilege(coalesce(nullif(current_setting('role', true), 'none'), session_user)::name,
        'dlq.dead_letter_queue'::regclass, 'TRIGGER WITH GRANT OPTION');
COMMENT ON FUNCTION dlq.moves_in_batch IS
    'Whether dlq.on_moves writes the audit rows of the current statement, and not dlq.on_move. The condition of the '
    'trigger dead_letter_move contains the same expression.';

-- The triggers may be missing for a moment during an upgrade of dlqd, which replaces functions before triggers.
CREATE OR REPLACE FUNCTION dlq.set_moves(p_move jsonb) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_move IS NOT NULL AND (SELECT count(*) FROM pg_trigger t WHERE t.tgname = 'dead_letter_moves'
        AND t.tgrelid IN ('dlq.dead_letter_queue'::regclass, 'dlq.dead_letter_open'::regclass)
        AND t.tgenabled IN ('O', 'A')) < 2 THEN
        RETURN false;
    END IF;
    PERFORM set_config('dlq.moves', coalesce(p_move::text, ''), true);
    IF p_move IS NOT NULL AND NOT dlq.moves_in_batch() THEN
        PERFORM set_config('dlq.moves', '', true);
        RETURN false;
    END IF;
    RETURN p_move IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.set_moves IS
    'Sets dlq.moves to what the moves of the next statement have in common: an object like the column move, or with '
    'the reason of each id under "reasons". Call it with null after that statement. Returns true if dlq.on_moves '
    'writes the audit rows of the statement; otherwise the statement has to set the column move.';

-- With nested loops, a plan that was made for one row could compare each of 5,000 rows with every other row.
CREATE OR REPLACE FUNCTION dlq.on_moves() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_nestloop = off SET jit = off AS $$
DECLARE
    v_move    jsonb;
    v_actor   text;
    v_origin  text;
    v_version text;
BEGIN
    IF coalesce(current_setting('dlq.moves', true), '') = '' THEN -- it was set when the statement ended
        RAISE EXCEPTION 'a trigger has reset dlq.moves, so that moves would have no audit row'
            USING HINT = 'Look for RESET ALL or DISCARD ALL in triggers of river_job.';
    END IF;
    IF NOT dlq.moves_in_batch() THEN
        RETURN NULL;
    END IF;
    v_move := current_setting('dlq.moves')::jsonb;
    v_actor := coalesce(v_move ->> 'actor', session_user);
    v_origin := dlq.origin(v_actor, v_move ->> 'claimed');
    v_version := CASE WHEN v_origin IS NOT NULL THEN dlq.policy_version() END;
    INSERT INTO dlq.dead_letter_transitions
        (entry_id, from_status, to_status, actor, reason, note, strategy, rule, next_retry_at, river_job_id, queue,
         kind, error_class, detail, config_version,
         from_class, error_type, failed_at, first_failed_at, left_group, joined_group, origin, operation)
    SELECT n.id, o.status, n.status, v_actor, coalesce(r.value, v_move ->> 'reason'), v_move ->> 'note',
           n.strategy, n.rule, n.next_retry_at, coalesce(n.redelivery_job_id, o.redelivery_job_id, n.river_job_id),
           n.queue, n.kind, n.error_class, nullif(v_move -> 'detail', 'null'),
           coalesce(v_version, n.config_version),
           o.error_class,
           CASE WHEN n.last_failed_at IS DISTINCT FROM o.last_failed_at THEN coalesce(n.error_type, '') END,
           CASE WHEN n.last_failed_at IS DISTINCT FROM o.last_failed_at THEN n.last_failed_at END,
           CASE WHEN n.closed_at IS NOT NULL THEN n.first_failed_at END,
           nullif(o.fingerprint, g.joined), nullif(g.joined, o.fingerprint), v_origin, (v_move ->> 'operation')::uuid
    FROM was o
    JOIN came n ON n.id = o.id
    CROSS JOIN LATERAL (SELECT CASE WHEN dlq.is_open(n.status) THEN n.fingerprint END AS joined) g
    LEFT JOIN jsonb_each_text(v_move -> 'reasons') r ON r.key = n.id::text
    WHERE o.stage = 'open'
    ORDER BY n.id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_moves IS
    'Trigger: writes the audit rows of a statement that moves open entries, if dlq.moves is set. dlq.on_move checks '
    'each move.';

-- on_enter distinguishes a row that changes its partition from a new row. A new row must be pending. The inbox has no
-- such trigger, because it would slow down capture.
CREATE OR REPLACE FUNCTION dlq.on_enter() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.move IS NULL OR NOT NEW.move ? 'moved' THEN
        RAISE EXCEPTION 'dead letter %: a new entry must be dlq_pending, not %', NEW.id, NEW.status
            USING ERRCODE = 'DLQ01';
    END IF;
    NEW.move := NULL;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION dlq.on_enter IS 'Trigger: refuses a new entry that is not dlq_pending.';

-- This statement trigger fires for an INSERT statement, and not for the insert that Postgres makes when a row changes
-- its partition. on_insert accepts entries that dlqd restores from the archive: the same transaction has written an
-- audit row for each of them.
CREATE OR REPLACE FUNCTION dlq.on_insert() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id uuid;
BEGIN
    SELECT c.id INTO v_id FROM came c
    WHERE c.status <> 'dlq_pending' AND NOT EXISTS (SELECT FROM dlq.dead_letter_transitions t WHERE t.entry_id = c.id
        AND t.at >= now() AND t.xid = txid_current()) LIMIT 1;
    IF v_id IS NOT NULL THEN
        RAISE EXCEPTION 'dead letter %: cannot be inserted unless it is dlq_pending', v_id
            USING ERRCODE = 'DLQ01', HINT = 'Insert it as dlq_pending, then move it.';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_insert IS
    'Trigger: refuses an inserted entry that is neither dlq_pending nor has an audit row of the '
    'same transaction.';

CREATE OR REPLACE FUNCTION dlq.fence_table(p_table regclass, p_sees text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('DROP POLICY IF EXISTS in_scope ON %1$s;
        CREATE POLICY in_scope ON %1$s FOR SELECT USING ((SELECT dlq.scope()) IS NULL%2$s);
        COMMENT ON POLICY in_scope ON %1$s IS ''Rows in the scope of the reader.'';
        ALTER TABLE %1$s ENABLE ROW LEVEL SECURITY', p_table, coalesce(' OR ' || p_sees, ''));
END
$$;
COMMENT ON FUNCTION dlq.fence_table IS
    'Enables row level security on a table. A reader with a scope sees only the rows for which the '
    'condition p_sees holds; no rows if p_sees is null. A reader without a scope sees all rows.';

-- guard_partition puts the parent's statement triggers on a partition: the parent's own do not fire
-- for a statement that names the partition.
CREATE OR REPLACE FUNCTION dlq.guard_partition(p_partition regclass, p_parent regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_parent = 'dlq.dead_letter_transitions'::regclass THEN
        EXECUTE format($sql$CREATE OR REPLACE TRIGGER transitions_append_only BEFORE DELETE OR TRUNCATE ON %1$s
            FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');
            COMMENT ON TRIGGER transitions_append_only ON %1$s IS 'The audit trail is append-only.'$sql$, p_partition);
    ELSE
        EXECUTE format($sql$CREATE OR REPLACE TRIGGER dead_letter_insert AFTER INSERT
            ON %1$s REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_insert();
            COMMENT ON TRIGGER dead_letter_insert
                ON %1$s IS 'Rejects new entries that are neither dlq_pending nor have an audit row.';
            CREATE OR REPLACE TRIGGER dead_letter_delete AFTER DELETE ON %1$s REFERENCING OLD TABLE AS gone
                FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_delete();
            COMMENT ON TRIGGER dead_letter_delete ON %1$s IS 'Rejects the deletion of open and failed entries.';
            CREATE OR REPLACE TRIGGER dead_letter_truncate BEFORE TRUNCATE ON %1$s FOR EACH STATEMENT
                EXECUTE FUNCTION dlq.refuse('it would delete entries without audit rows');
            COMMENT ON TRIGGER dead_letter_truncate ON %1$s IS 'Rejects TRUNCATE.'$sql$, p_partition);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.guard_partition IS
    'Puts triggers on a partition of the audit trail, or of closed entries, that refuse what the '
    'parent table refuses.';

-- This statement trigger fires for a DELETE statement, and not for the delete that Postgres makes when a row changes
-- its partition.
CREATE OR REPLACE FUNCTION dlq.on_delete() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id uuid;
BEGIN
    SELECT g.id INTO v_id FROM gone g WHERE g.status NOT IN ('dlq_resolved', 'dlq_archived') LIMIT 1;
    IF v_id IS NOT NULL THEN
        RAISE EXCEPTION 'dead letter %: only resolved and archived entries can be deleted', v_id
            USING ERRCODE = 'DLQ01', HINT = 'Close it first with dlq.discard(id, actor, note).';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_delete IS 'Trigger: refuses to delete an open, failed or returned entry.';

CREATE OR REPLACE FUNCTION dlq.refuse() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% on %.% is not allowed: %', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_ARGV[0]
        USING ERRCODE = 'DLQ01';
END
$$;
COMMENT ON FUNCTION dlq.refuse IS 'Trigger: refuses the statement, with the reason that the trigger passes.';

-- A row of the audit trail changes only if dlq.erase removes from it an edited payload (in detail)
-- or names (in reason). All other columns, such as actor and time, stay.
CREATE OR REPLACE FUNCTION dlq.on_rewrite() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('dlq.erasing', true) IS DISTINCT FROM txid_current()::text
        OR NEW.detail IS DISTINCT FROM OLD.detail
            AND NEW.detail IS DISTINCT FROM jsonb_strip_nulls(jsonb_build_object('run', OLD.detail -> 'run', 'erased',
                true))
        OR NEW.reason IS DISTINCT FROM OLD.reason AND NEW.reason IS DISTINCT FROM dlq.reason_without_names(OLD.reason)
        OR to_jsonb(NEW) - '{detail,reason}'::text[] IS DISTINCT FROM to_jsonb(OLD) - '{detail,reason}'::text[] THEN
        RAISE EXCEPTION 'UPDATE on the audit trail is not allowed: it is append-only' USING ERRCODE = 'DLQ01',
            HINT = 'dlq.erase removes payloads and names from it.';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION dlq.on_rewrite IS
    'Trigger: refuses changes of the audit trail, except that an erasure (dlq.erase_trail) removes detail, and '
    'assignees and tags from reason.';

CREATE OR REPLACE FUNCTION dlq.on_operation() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('dlq.recording', true) IS NOT DISTINCT FROM txid_current()::text THEN
        IF TG_OP = 'DELETE' THEN
            RETURN OLD;
        ELSIF to_jsonb(NEW) - '{looked,changed,unchanged,last_at}'::text[]
            = to_jsonb(OLD) - '{looked,changed,unchanged,last_at}'::text[] THEN
            RETURN NEW;
        END IF;
    ELSIF TG_OP = 'UPDATE' AND current_setting('dlq.erasing', true) IS NOT DISTINCT FROM txid_current()::text
        AND to_jsonb(NEW) - '{filter,args,note}'::text[] = to_jsonb(OLD) - '{filter,args,note}'::text[] THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'operation %: % is not allowed: the audit trail is append-only', OLD.id, TG_OP
        USING ERRCODE = 'DLQ01';
END
$$;
COMMENT ON FUNCTION dlq.on_operation IS
    'Trigger: refuses changes of operations, except for their progress (dlq.record_operation), data that '
    'dlq.erase removes, and the deletion of old ones (dlq.forget_old).';

-- The WHEN of the trigger skips statements that set move or the status, because dlq.on_move writes their audit rows.
-- Functions that write the audit row after the change set dlq.recording, and dlq.erase sets dlq.erasing.
CREATE OR REPLACE FUNCTION dlq.on_content() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF txid_current()::text <> ALL (ARRAY[coalesce(current_setting('dlq.recording', true), ''),
        coalesce(current_setting('dlq.erasing', true), '')]) THEN
        RAISE EXCEPTION 'dead letter %: its payload and its error cannot be changed without an audit row', OLD.id
            USING ERRCODE = 'DLQ01', HINT = 'dlq.replay edits the payload of a redelivery; dlq.erase erases data.';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION dlq.on_content IS
    'Trigger: refuses changes of payloads and errors of entries without an audit row.';

CREATE OR REPLACE FUNCTION dlq.on_erasure() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_progress constant text[] := '{entries,jobs,under_way,archived,archives,archive,finished_at}';
BEGIN
    IF to_jsonb(NEW) - v_progress IS DISTINCT FROM to_jsonb(OLD) - v_progress THEN
        RAISE EXCEPTION 'erasure %: its record cannot be changed, except for its progress', OLD.id
            USING ERRCODE = 'DLQ01';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION dlq.on_erasure IS
    'Trigger: refuses changes of the record of an erasure, except for its progress.';
