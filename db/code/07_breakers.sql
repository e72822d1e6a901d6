-- Circuit breakers. Each process decides from its own counts whether the closed breaker of a destination opens. The
-- breaker of a River queue opens because of the outcomes of the queue's jobs. An open or half-open breaker is a row
-- that all processes share, so that probes are counted across processes. p_now lets a test set the time.

CREATE OR REPLACE FUNCTION dlq.on_breaker_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO dlq.circuit_breaker_changes (name, from_state, to_state, reason, actor)
    VALUES (NEW.name, CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END, NEW.state, NEW.reason, NEW.changed_by);
    INSERT INTO dlq.counters AS c (name, queue, label, value) VALUES ('breaker', NEW.name, NEW.state::text, 1)
    ON CONFLICT (name, queue, label) DO UPDATE SET value = c.value + 1;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.on_breaker_change IS 'Trigger: records each change of a breaker, and counts it.';

DROP TRIGGER IF EXISTS circuit_breaker_insert ON dlq.circuit_breakers;
CREATE TRIGGER circuit_breaker_insert AFTER INSERT ON dlq.circuit_breakers
    FOR EACH ROW EXECUTE FUNCTION dlq.on_breaker_change();
DROP TRIGGER IF EXISTS circuit_breaker_change ON dlq.circuit_breakers;
CREATE TRIGGER circuit_breaker_change AFTER UPDATE ON dlq.circuit_breakers
    FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state OR OLD.forced IS DISTINCT FROM NEW.forced)
    EXECUTE FUNCTION dlq.on_breaker_change();
COMMENT ON TRIGGER circuit_breaker_insert ON dlq.circuit_breakers IS 'Records each change of a breaker.';
COMMENT ON TRIGGER circuit_breaker_change ON dlq.circuit_breakers IS 'Records each change of a breaker.';
CREATE OR REPLACE TRIGGER changes_append_only BEFORE UPDATE OR TRUNCATE ON dlq.circuit_breaker_changes
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');
COMMENT ON TRIGGER changes_append_only ON dlq.circuit_breaker_changes IS 'The audit trail is append-only.';

-- A destination gets the messages of many queues, so a caller with a scope sees no breaker of a
-- destination.
CREATE OR REPLACE FUNCTION dlq.breaker_in_scope(p_name text, p_scope jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
RETURN p_scope IS NULL OR p_name LIKE 'queue:%' AND dlq.in_scope(substr(p_name, length('queue:') + 1), NULL, p_scope);
COMMENT ON FUNCTION dlq.breaker_in_scope IS
    'Whether a circuit breaker is in a scope (dlq.scope). If the scope is null, all are; otherwise '
    'only breakers of queues in the scope.';

CREATE OR REPLACE FUNCTION dlq.require_breaker(p_name text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT dlq.breaker_in_scope(p_name, dlq.scope()) THEN
        RAISE EXCEPTION 'there is no circuit breaker %', p_name USING ERRCODE = 'DLQ02';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_breaker IS 'Raises DLQ02 if a circuit breaker is not in the caller''s scope.';

CREATE OR REPLACE FUNCTION dlq.open_breaker(p_name text, p_actor text DEFAULT session_user,
    p_reason text DEFAULT 'opened by an operator',
    p_for interval DEFAULT NULL, p_forced boolean DEFAULT true, p_now timestamptz DEFAULT now()) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_breaker(p_name);
    INSERT INTO dlq.circuit_breakers AS b (name, state, since, open_until, forced, reason, changed_by, trouble_since)
    VALUES (p_name, 'open', p_now, p_now + p_for, p_forced, left(dlq.masked_text(p_reason, dlq.mask(false)), 10000),
            dlq.actor(p_actor), p_now)
    ON CONFLICT (name) DO UPDATE SET
        state = 'open', since = p_now, open_until = excluded.open_until, forced = excluded.forced,
        reason = excluded.reason, changed_by = excluded.changed_by,
        trouble_since = CASE b.state WHEN 'closed' THEN p_now ELSE coalesce(b.trouble_since, b.since) END,
        last_tried_at = CASE WHEN b.state <> 'closed' THEN b.last_tried_at END
    -- Many processes see the same failures at the same time, and the first one opens the breaker. An operator
    -- (p_forced) opens the breaker in any state.
    WHERE p_forced OR b.state = 'closed';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_forced OR NOT dlq.is_owner() THEN
        PERFORM dlq.record_act('circuit breaker ' || p_name, 'opened', p_actor, p_reason,
            jsonb_build_object('for', p_for));
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.open_breaker IS
    'Opens a breaker for p_for, or until dlq.reset_breaker if p_for is null. Without p_forced, only '
    'a closed breaker is opened; returns false if it was not closed.';

CREATE OR REPLACE FUNCTION dlq.reset_breaker(p_name text, p_actor text DEFAULT session_user,
    p_reason text DEFAULT 'reset by an operator',
    p_now timestamptz DEFAULT now()) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_breaker(p_name);
    UPDATE dlq.circuit_breakers SET
        state = 'closed', since = p_now, open_until = NULL, forced = false,
        reason = left(dlq.masked_text(p_reason, dlq.mask(false)), 10000), changed_by = dlq.actor(p_actor),
        trouble_since = NULL, last_tried_at = NULL
    WHERE name = p_name AND state <> 'closed';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM dlq.record_act('circuit breaker ' || p_name, 'reset', p_actor, p_reason);
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.reset_breaker IS 'Closes a breaker. Returns false if it was closed already.';

-- A half-open breaker has p_probes places for probes:
--   - A probe takes a place when it starts. If its process dies or loses the database, the place becomes free
--     again after p_timeout and 10 seconds.
--   - Once the probe has reported its outcome, the place stays taken.
-- There is always at least one place for a running probe, even if the policy has lowered p_probes: without a further
-- probe, the breaker would stay half-open.
CREATE OR REPLACE FUNCTION dlq.take_probe(p_name text, p_probes integer, p_open_for interval, p_actor text,
    p_now timestamptz DEFAULT now(), p_timeout interval DEFAULT '30 seconds') RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_until constant timestamptz := p_now + p_timeout + interval '10 seconds';
    v_epoch bigint;
BEGIN
    UPDATE dlq.circuit_breakers b SET
        state = 'half_open', since = p_now, open_until = NULL, epoch = b.epoch + 1,
        probes_started = 1, probes_succeeded = 0, probes_failed = 0,
        probes_until = ARRAY[v_until], last_tried_at = p_now, reason = 'probing', changed_by = p_actor
    WHERE b.name = p_name AND b.state = 'open' AND b.open_until <= p_now
    RETURNING b.epoch INTO v_epoch;
    IF FOUND THEN
        RETURN v_epoch;
    END IF;
    UPDATE dlq.circuit_breakers b SET
        probes_started = b.probes_started + 1, last_tried_at = p_now,
        probes_until = ARRAY(SELECT u FROM unnest(b.probes_until) u WHERE u > p_now) || v_until
    WHERE b.name = p_name AND b.state = 'half_open'
      AND (SELECT count(*) FROM unnest(b.probes_until) u WHERE u > p_now)
          < greatest(p_probes - b.probes_succeeded - b.probes_failed, 1)
    RETURNING b.epoch INTO v_epoch;
    RETURN v_epoch;
END
$$;
COMMENT ON FUNCTION dlq.take_probe IS
    'Starts a probe, if the breaker is half-open and has a free place. An open breaker whose time '
    'has come becomes half-open. A probe that has not reported within p_timeout and 10 seconds '
    'loses its place. Returns the epoch to pass to dlq.report_probe; null if no probe may start. '
    'p_open_for is ignored: processes from before migration 00015 pass it.';

-- An outcome that is reported after its place became free still counts, even if another probe has taken the place, as
-- long as the half-open period (epoch) in which the probe started lasts.
CREATE OR REPLACE FUNCTION dlq.report_probe(p_name text, p_epoch bigint, p_ok boolean, p_probes integer,
    p_success_rate float8,
    p_open_for interval, p_actor text, p_now timestamptz DEFAULT now(), p_until timestamptz DEFAULT NULL)
RETURNS dlq.breaker_state
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_needed integer := ceil(p_probes * p_success_rate / 100);
    v_row    dlq.circuit_breakers;
BEGIN
    UPDATE dlq.circuit_breakers b SET
        probes_succeeded = b.probes_succeeded + p_ok::integer, probes_failed = b.probes_failed + (NOT p_ok)::integer,
        probes_until = ARRAY(
            SELECT u.until FROM unnest(b.probes_until) WITH ORDINALITY u (until, place)
            WHERE u.place IS DISTINCT FROM array_position(b.probes_until, coalesce(p_until, b.probes_until[1])))
    WHERE b.name = p_name AND b.state = 'half_open' AND b.epoch = p_epoch
    RETURNING * INTO v_row;
    IF v_row.probes_succeeded >= v_needed THEN
        UPDATE dlq.circuit_breakers SET
            state = 'closed', since = p_now, open_until = NULL, forced = false,
            trouble_since = NULL, last_tried_at = NULL,
            reason = v_row.probes_succeeded || ' probes succeeded, ' || v_row.probes_failed || ' failed',
            changed_by = p_actor
        WHERE name = p_name;
        RETURN 'closed';
    ELSIF v_row.probes_failed > p_probes - v_needed THEN
        UPDATE dlq.circuit_breakers SET state = 'open', since = p_now, open_until = p_now + p_open_for,
            reason = v_row.probes_failed || ' probes failed, ' || v_row.probes_succeeded || ' succeeded',
            changed_by = p_actor
        WHERE name = p_name;
        RETURN 'open';
    END IF;
    RETURN v_row.state;
END
$$;
COMMENT ON FUNCTION dlq.report_probe IS
    'Counts the outcome of a probe: enough successes close the breaker, too many failures open it '
    'again. p_until: when the probe''s place would have expired (null: the first place). Returns '
    'the state; null if the probe is of an earlier epoch.';
