-- Automatic redelivery: its switches, who changed them, and the next step of an entry.
--
-- Switches of operators are rows of automatic_switches. The switches of the policy are in settings, key automatic: each
-- DLQ worker publishes them when it loads a policy. The default for all entries depends on whether River belongs to an
-- application. A DLQ worker decides by the policy that it has loaded itself; the functions of this file show operators
-- the policy that was published last.

CREATE OR REPLACE VIEW dlq.automatic AS
    WITH policy AS (
        SELECT p.scope, coalesce(p.name, '') AS name, p.enabled, coalesce(p.include, '{}') AS include
        FROM dlq.settings s CROSS JOIN LATERAL jsonb_to_recordset(s.value::jsonb) AS p (scope text, name text,
            enabled boolean, include text[])
        WHERE s.key = 'automatic'
    ), switches AS (
        SELECT w.scope, w.name, w.enabled, w.include, 'operator' AS source, w.at, w.actor, w.note
        FROM dlq.automatic_switches w
        UNION ALL
        SELECT p.scope, p.name, p.enabled, p.include, 'policy', NULL, NULL, NULL FROM policy p
        WHERE NOT EXISTS (SELECT FROM dlq.automatic_switches w WHERE w.scope = p.scope AND w.name = p.name)
    )
    SELECT c.scope, c.name, c.enabled, c.include, c.source, c.at, c.actor, c.note FROM switches c
    UNION ALL
    SELECT 'all', '', NOT EXISTS (SELECT FROM dlq.settings s WHERE s.key = 'river' AND s.value = 'attached'), '{}',
        'default', NULL, NULL, NULL
    WHERE NOT EXISTS (SELECT FROM switches c WHERE c.scope = 'all');
COMMENT ON VIEW dlq.automatic IS
    'The switches of automatic redelivery that are in force, and the source of each: operator, policy or '
    'default. A row with scope stop stops all automatic redelivery; with the name restored, dlqd set it because '
    'the database was restored (dlq.resume_restored). Change them with dlq.set_automatic, dlq.reset_automatic, '
    'dlq.stop_automatic and dlq.resume_automatic.';

-- The functions below scan the few switches. Many of their callers set enable_seqscan = off, which
-- makes the estimated cost of a scan so high that Postgres would compile the query (JIT). Compiling
-- takes longer than running the query, so these functions set enable_seqscan = on and jit = off.
CREATE OR REPLACE FUNCTION dlq.automatic_for(p_queue text, p_kind text, p_class text, p_job_kind text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = on SET jit = off AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM dlq.automatic_switches s WHERE s.scope = 'stop')
        AND dlq.switched_on(p_queue, p_kind, p_class, p_job_kind);
END
$$;
COMMENT ON FUNCTION dlq.automatic_for IS
    'Whether entries of a queue, kind and class are redelivered automatically, by the switches of '
    'dlq.automatic. p_job_kind: River''s kind of the job.';

CREATE OR REPLACE FUNCTION dlq.switched_on(p_queue text, p_kind text, p_class text, p_job_kind text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = on SET jit = off AS $$
DECLARE
    v_on boolean;
BEGIN
    SELECT CASE
        WHEN bool_or(a.narrow) THEN bool_and(a.enabled) FILTER (WHERE a.narrow)
        -- If River belongs to an application, the default is off for the application's jobs, but not
        -- for dlqd's own messages.
        ELSE bool_or(a.enabled OR p_job_kind = 'dlqd_message' AND a.source = 'default') FILTER (WHERE a.scope = 'all')
        END INTO v_on
    FROM (SELECT s.scope, s.enabled, s.source,
              s.scope = 'queue' AND s.name = p_queue OR s.scope = 'class' AND s.name = p_class
              OR s.scope = 'kind' AND p_kind LIKE replace(replace(replace(replace(s.name, '\', '\\'), '%', '\%'), '_',
                  '\_'), '*', '%') AS narrow
          FROM dlq.automatic s) a;
    RETURN v_on;
END
$$;
COMMENT ON FUNCTION dlq.switched_on IS
    'The result of dlq.automatic_for while automatic redelivery as a whole is not stopped.';

CREATE OR REPLACE FUNCTION dlq.next_step(p_status dlq.dead_letter_status, p_strategy dlq.strategy, p_rule text,
    p_next_retry_at timestamptz, p_waiting_for text,
    p_class text, p_parked_by text, p_queue text, p_kind text, p_job_kind text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = on SET jit = off AS $$
DECLARE
    v_at     text := 'again at ' || to_char(p_next_retry_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI') || ' UTC'
        || CASE WHEN p_strategy = 'conditional' THEN ', once its conditions hold,' ELSE '' END
        || CASE WHEN p_rule = 'unparked' THEN ', because an operator returned it'
            ELSE coalesce(' by rule ' || p_rule, '') END;
    v_reason text;
BEGIN
    CASE p_status
    WHEN 'dlq_processing' THEN
        RETURN 'is being redelivered';
    WHEN 'dlq_manual' THEN
        RETURN 'needs a person: ' || CASE
            WHEN p_parked_by IS NOT NULL THEN 'parked by ' || p_parked_by
            WHEN p_rule = 'single-attempt' THEN 'its job had one attempt'
            WHEN p_rule = 'worker-lost' THEN 'its worker died, or it never ended, twice or more'
            WHEN p_rule = 'backfilled' THEN 'its job failed before dlqd was attached'
            ELSE 'class ' || coalesce(p_class, 'unknown') || coalesce(' by rule ' || p_rule, '') END;
    WHEN 'dlq_pending' THEN
        SELECT CASE s.name WHEN 'restored' THEN 'held, because the database was restored'
            ELSE 'all automatic redelivery is stopped by ' || s.actor END INTO v_reason
        FROM dlq.automatic_switches s WHERE s.scope = 'stop' ORDER BY s.name DESC LIMIT 1;
        IF p_strategy IS NULL THEN
            RETURN 'waits for a DLQ worker to decide' || coalesce(': ' || v_reason, '');
        ELSIF v_reason IS NOT NULL THEN
            RETURN 'would be sent ' || v_at || ': ' || v_reason;
        ELSIF NOT dlq.automatic_for(p_queue, p_kind, p_class, p_job_kind) THEN
            RETURN 'would be sent ' || v_at || ': automatic is off';
        END IF;
        RETURN CASE
            WHEN p_waiting_for = 'automatic' THEN 'will be sent ' || v_at || ': automatic was switched on'
            WHEN p_waiting_for = 'pace' THEN 'will be sent ' || v_at || ': its place in the pace'
            WHEN p_waiting_for = 'order' THEN 'waits for: earlier work of its ordering key'
            WHEN p_waiting_for = 'run' THEN 'waits for: the end of a replay run that has it'
            WHEN p_waiting_for LIKE 'condition: %' THEN 'waits for: ' || substr(p_waiting_for, 12)
            ELSE 'will be sent ' || v_at END;
    ELSE
        RETURN NULL;
    END CASE;
END
$$;
COMMENT ON FUNCTION dlq.next_step IS
    'The next step of an entry, as text: sent when, or waiting for what or whom; null for a closed entry.';

CREATE OR REPLACE TRIGGER automatic_changes_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON dlq.automatic_changes
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');
COMMENT ON TRIGGER automatic_changes_append_only ON dlq.automatic_changes IS 'The audit trail is append-only.';

-- change_automatic changes one switch, or deletes it if p_enabled is null. It takes an advisory lock that DLQ workers
-- hold in shared mode from before they read the switches until they commit. So once a change is committed, all
-- processes use it: earlier decisions are committed, and later decisions see the change. Exception: a stop waits at
-- most 5 s for the lock, and then takes effect without it.
CREATE OR REPLACE FUNCTION dlq.change_automatic(p_scope text, p_name text, p_enabled boolean, p_include text[],
    p_actor text, p_note text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_changed integer;
BEGIN
    p_note := dlq.masked_text(p_note, dlq.mask(false)); -- every user may read it
    PERFORM dlq.require_everything('automatic redelivery');
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtextextended('dlq.automatic', 0));
    EXCEPTION WHEN lock_not_available THEN
        -- A stop is for emergencies, so a hanging process, or another session that holds the lock, must not prevent it.
        IF p_scope = 'stop' AND p_enabled THEN
            RAISE WARNING 'automatic redelivery: stopped, but an earlier transaction did not end within 5 s, and may still redeliver'
                USING HINT = 'pg_stat_activity shows open transactions.';
        ELSE
            RAISE EXCEPTION 'automatic redelivery: not changed, because a transaction of a DLQ worker or of another change did not end within 5 s' USING ERRCODE = 'DLQ05',
                HINT = 'Try again; pg_stat_activity shows open transactions.';
        END IF;
    END;
    IF p_enabled IS NULL THEN
        DELETE FROM dlq.automatic_switches s WHERE s.scope = p_scope AND s.name = p_name;
    ELSE
        INSERT INTO dlq.automatic_switches AS s (scope, name, enabled, include, actor, note)
        VALUES (p_scope, p_name, p_enabled, p_include, dlq.actor(p_actor), p_note)
        ON CONFLICT (scope, name) DO UPDATE SET enabled = excluded.enabled, include = excluded.include, at = now(),
        actor = excluded.actor, note = excluded.note;
    END IF;
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    IF v_changed > 0 THEN
        INSERT INTO dlq.automatic_changes (scope, name, enabled, include, actor, origin, note)
        VALUES (p_scope, p_name, p_enabled, p_include, dlq.actor(p_actor), dlq.origin(dlq.actor(p_actor), p_actor),
            p_note);
        PERFORM dlq.record_act(concat_ws(' ', 'automatic redelivery:', p_scope, nullif(p_name, '')),
            CASE WHEN p_enabled IS NULL THEN 'switch taken away' WHEN p_scope = 'stop' THEN 'stopped' WHEN p_enabled
                THEN 'switched on' ELSE 'switched off' END,
                               p_actor, p_note, jsonb_build_object('include', nullif(p_include, '{}')));
        PERFORM dlq.wake();
    END IF;
    RETURN v_changed > 0;
END
$$;
COMMENT ON FUNCTION dlq.change_automatic IS
    'Changes or deletes one switch of automatic redelivery. Returns whether anything changed. Raises DLQ05 if a '
    'transaction of a DLQ worker does not end within 5 s; a stop then takes effect all the same.';

CREATE OR REPLACE FUNCTION dlq.set_automatic(p_scope text, p_name text, p_enabled boolean,
    p_include text[] DEFAULT '{}',
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.check_automatic(p_scope, p_name, coalesce(p_enabled, false), p_include);
    PERFORM dlq.change_automatic(p_scope, coalesce(p_name, ''), coalesce(p_enabled, false), p_include, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.set_automatic IS
    'Switches automatic redelivery on or off for all, a queue, a kind (* matches any text) or a class: '
    'dlq.set_automatic(''queue'', ''mailers'', true). p_include names entries that need manual handling otherwise: '
    'backfilled, single-attempt.';

CREATE OR REPLACE FUNCTION dlq.reset_automatic(p_scope text, p_name text DEFAULT '', p_actor text DEFAULT session_user,
    p_note text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.check_automatic(p_scope, p_name, true, '{}');
    RETURN dlq.change_automatic(p_scope, coalesce(p_name, ''), NULL, NULL, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.reset_automatic IS
    'Deletes an operator''s switch, so that the policy or the default applies again. Returns false if there was '
    'none.';

CREATE OR REPLACE FUNCTION dlq.check_automatic(p_scope text, p_name text, p_enabled boolean, p_include text[])
    RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_scope IS NULL OR p_scope NOT IN ('all', 'queue', 'kind', 'class')
        OR (coalesce(p_name, '') = '') <> (p_scope = 'all') THEN
        RAISE EXCEPTION 'automatic: there is no switch for % "%"', coalesce(p_scope, '(null)'), p_name
            USING ERRCODE = 'DLQ04',
            HINT = 'Scopes: all (without a name), queue, kind and class (with a name).';
    END IF;
    IF p_scope = 'class' AND p_name NOT IN ('transient', 'rate_limited', 'outage', 'validation', 'malformed',
        'unauthorized', 'not_found', 'business', 'code_bug', 'unknown') THEN
        RAISE EXCEPTION 'automatic: there is no class "%"', p_name USING ERRCODE = 'DLQ04';
    END IF;
    IF p_include IS NULL OR NOT p_include <@ ARRAY['backfilled', 'single-attempt']
        OR (NOT p_enabled AND p_include <> '{}') THEN
        RAISE EXCEPTION 'automatic: invalid include %', p_include USING ERRCODE = 'DLQ04',
            HINT = 'A switch that is on may include backfilled and single-attempt.';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.check_automatic IS 'Raises an error for an invalid switch.';

CREATE OR REPLACE FUNCTION dlq.stop_automatic(p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.change_automatic('stop', '', true, '{}', p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.stop_automatic IS
    'Stops all automatic redelivery, over all processes, until dlq.resume_automatic. Once this commits, none is '
    'made, except by a transaction that hangs; a warning reports one. Replays by operators continue.';

CREATE OR REPLACE FUNCTION dlq.resume_automatic(p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN dlq.change_automatic('stop', '', NULL, NULL, p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.resume_automatic IS
    'Lifts dlq.stop_automatic: the switches apply again, and entries that waited follow at their pace. Returns '
    'false if nothing was stopped.';
