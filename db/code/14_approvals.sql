-- Approvals. A second person approves a request, and dlqd then carries it out on exactly the entries
-- that matched at the approval. The functions that carry out operators' requests check themselves
-- whether an approval is needed (dlq.require_approval), so that no client can bypass it.

-- Only dlqd can set dlq.approved, for the duration of a transaction.
CREATE OR REPLACE FUNCTION dlq.approved() RETURNS uuid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN nullif(current_setting('dlq.approved', true), '') IS NOT NULL AND dlq.is_owner()
        THEN current_setting('dlq.approved', true)::uuid END
$$;
COMMENT ON FUNCTION dlq.approved IS
    'The approval that dlqd carries out in this transaction; null if none. While dlqd carries out an approval, '
    'filters match only the entries of that approval.';

-- A rule for a queue also applies to redeliveries from other queues into that queue. Changes by dlqd itself and by the
-- schema's owner have no origin and need no approval, because both could write to the tables directly.
CREATE OR REPLACE FUNCTION dlq.require_approval(p_operations text[], p_operation text, p_request jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_rule  jsonb;
    v_above bigint;
    v_more  boolean;
BEGIN
    FOR v_rule IN
        SELECT r FROM dlq.settings s, jsonb_array_elements(s.value::jsonb -> 'rules') r
        WHERE s.key = 'approvals' AND r -> 'operations' ?| p_operations
    LOOP
        IF dlq.is_owner() AND (coalesce(current_setting('dlq.origin', true), '') = '' OR dlq.approved() IS NOT NULL)
            THEN
            RETURN;
        END IF;
        v_above := coalesce((v_rule ->> 'above')::bigint, 0);
        EXECUTE 'SELECT count(*) > $3 FROM (SELECT FROM dlq.dead_letter_queue e WHERE '
             || dlq.filter_where(p_request -> 'filter')
             || ' AND ($2 IS NULL OR e.queue LIKE ANY ($2) OR $4 LIKE ANY ($2)) LIMIT $3 + 1) l'
        INTO v_more USING p_request -> 'filter', dlq.like_patterns(v_rule -> 'queues'), v_above, p_request ->> 'queue';
        IF v_more THEN
            RAISE EXCEPTION '%: needs a second person for more than % dead letters%', p_operations[1], v_above,
                coalesce(' of ' || (SELECT string_agg(q, ', ') FROM jsonb_array_elements_text(v_rule -> 'queues') q),
                    '')
                USING ERRCODE = 'DLQ07',
                -- A hint is written to the server's log. For dlqd the hint omits the request: the API creates the
                -- request itself, and a client's data must not be in that log.
                HINT = CASE WHEN dlq.is_owner() THEN 'Request it with dlq.request_approval.'
                    ELSE format('Request it: SELECT dlq.request_approval(%L, %L, ''why''). A second person approves it with dlq.approve.', p_operation, p_request) END;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.require_approval IS
    'Raises DLQ07 if the policy (access.yaml: approvals) requires a second person for one of these operations '
    '(replay, patch, redirect, discard, resolve, purge, erase, export) on the entries that match the request''s '
    'filter, in a queue of the rule or redelivered into one, and more entries match than the rule allows without it '
    '(above).';

CREATE OR REPLACE FUNCTION dlq.needs_approval(p_operations text[], p_request jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_approval(p_operations, 'replay', p_request);
    RETURN '';
EXCEPTION WHEN SQLSTATE 'DLQ07' THEN
    RETURN SQLERRM;
END
$$;
COMMENT ON FUNCTION dlq.needs_approval IS
    'Why these operations on the entries of a request need a second person (dlq.require_approval); empty if they do '
    'not.';

CREATE OR REPLACE FUNCTION dlq.require_approval_to(p_action text, p_args jsonb, p_filter jsonb, p_all boolean)
    RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_force constant boolean := coalesce((p_args ->> 'force')::boolean, false);
BEGIN
    -- Unpark redelivers at once, so it counts as replay, and expire counts as discard. A forced purge first discards
    -- open entries, so it counts as purge and discard.
    IF p_action IN ('discard', 'expire', 'resolve', 'unpark', 'purge') THEN
        PERFORM dlq.require_approval(CASE WHEN p_action = 'unpark' THEN '{replay}' WHEN p_action = 'expire'
            THEN '{discard}' WHEN p_action = 'purge' AND v_force THEN '{purge,discard}' ELSE ARRAY[p_action] END,
            'bulk', jsonb_build_object('do', p_action, 'filter', p_filter) || CASE WHEN v_force THEN '{"force": true}'
                ELSE '{}' END::jsonb || CASE WHEN p_all THEN '{"all": true}' ELSE '{}' END::jsonb);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_approval_to IS 'dlq.require_approval for a change of many entries (dlq.act_on).';

-- A cancelled job gets no dead letter. Its work is dropped, as if the dead letter that it might have become were
-- discarded. Exception: a redelivery, because its dead letter stays open.
CREATE OR REPLACE FUNCTION dlq.require_approval_of_cancel(p_job bigint) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_queue text;
BEGIN
    IF dlq.is_owner() AND (coalesce(current_setting('dlq.origin', true), '') = '' OR dlq.approved() IS NOT NULL) THEN
        RETURN;
    END IF;
    SELECT r.queues INTO v_queue
    FROM river.river_job j
    CROSS JOIN LATERAL (
        SELECT coalesce((SELECT string_agg(q, ', ') FROM jsonb_array_elements_text(r.rule -> 'queues') q), j.queue)
            AS queues
        FROM dlq.settings s, jsonb_array_elements(s.value::jsonb -> 'rules') r (rule)
        WHERE s.key = 'approvals' AND r.rule -> 'operations' ? 'discard'
            AND coalesce((r.rule ->> 'above')::bigint, 0) < 1
            AND coalesce(j.queue LIKE ANY (dlq.like_patterns(r.rule -> 'queues')), true)
        LIMIT 1) r
    WHERE j.id = p_job -- the marker dlq:entry_id may be a copy in another job
        AND NOT EXISTS (SELECT FROM dlq.entry_jobs m WHERE m.job_id = j.id AND m.job_created_at = j.created_at);
    IF FOUND THEN
        RAISE EXCEPTION 'cancel: job % needs a second person, as the discard of a dead letter of % does', p_job, v_queue
            USING ERRCODE = 'DLQ07', HINT = format('Request it: SELECT dlq.request_approval(''cancel'', %L, ''why''). A second person approves it with dlq.approve.', jsonb_build_object('job', p_job));
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_approval_of_cancel IS
    'Raises DLQ07 if the policy (access.yaml: approvals) requires a second person to discard one dead letter of the '
    'queue of a job, unless the job is a redelivery.';

CREATE OR REPLACE FUNCTION dlq.jobs_to_cancel(p_operation text, p_request jsonb) RETURNS TABLE (id bigint, queue text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    IF p_operation = 'cancel' THEN
        RETURN QUERY SELECT j.id, j.queue::text FROM river.river_job j
        WHERE j.id = (p_request ->> 'job')::bigint AND j.finalized_at IS NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.jobs_to_cancel IS 'The job that a request for approval asks to cancel, while it has not ended.';

-- A request counts only entries that its operation can change: an entry that another operator has closed meanwhile does
-- not need approval any more.
CREATE OR REPLACE FUNCTION dlq.approval_filter(p_operation text, p_request jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE p_operation
        WHEN 'replay' THEN dlq.replayable(p_request -> 'filter')
        WHEN 'erase' THEN p_request -> 'filter'
        WHEN 'cancel' THEN '{"ids": ["00000000-0000-0000-0000-000000000000"]}' -- no dead letter
        WHEN 'export' THEN p_request -> 'filter'
        ELSE dlq.only_in_states(p_request -> 'filter', CASE p_request ->> 'do'
            WHEN 'discard' THEN '{dlq_pending,dlq_manual,dlq_failed,dlq_returned}'
            WHEN 'expire' THEN '{dlq_pending,dlq_manual,dlq_failed}'
            WHEN 'purge' THEN CASE WHEN (p_request ->> 'force')::boolean
                THEN '{dlq_pending,dlq_manual,dlq_failed,dlq_returned,dlq_resolved,dlq_archived}'
                ELSE '{dlq_resolved,dlq_archived}' END
            WHEN 'resolve' THEN '{dlq_manual,dlq_returned}'
            ELSE '{dlq_manual}' END::text[]) END
$$;
COMMENT ON FUNCTION dlq.approval_filter IS
    'The filter of a request for approval, restricted to the states from which its operation is allowed.';

CREATE OR REPLACE FUNCTION dlq.approval_where(p_approval dlq.approvals, p_filter jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT dlq.filter_where(p_filter) || dlq.scope_where(p_approval.scope)
        || ' AND (e.stage <> ''inbox'' OR NOT dlq.is_repeat(e.river_job_id, e.job_created_at))'
$$;
COMMENT ON FUNCTION dlq.approval_where IS
    'Returns the SQL condition (see dlq.filter_where) that a row e matches p_filter in the scope of the requester.';

-- closed counts entries that closed after the request into a state that the request does not select, because another
-- operator or a redelivery closed them. Their state at the time of the request is not stored. So if the filter has a
-- status, closed may also count entries that the request did not select.
CREATE OR REPLACE FUNCTION dlq.approval_matches(p_id uuid, OUT entries bigint, OUT arrived bigint, OUT closed jsonb)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_approval dlq.approvals;
    v_filter   jsonb;
BEGIN
    SELECT * INTO v_approval FROM dlq.approvals a WHERE a.id = p_id AND dlq.scope_within(a.scope, dlq.scope());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'approval %: there is no such request', p_id USING ERRCODE = 'DLQ02';
    END IF;
    v_filter := dlq.approval_filter(v_approval.operation, v_approval.request);
    EXECUTE 'SELECT count(*), count(*) FILTER (WHERE e.id >= $2) FROM dlq.dead_letter_queue e WHERE '
        || dlq.approval_where(v_approval, v_filter)
    INTO entries, arrived USING v_filter, dlq.first_id(v_approval.requested_at);
    entries := entries + (SELECT count(*) FROM dlq.jobs_to_cancel(v_approval.operation, v_approval.request));
    closed := '{}';
    IF v_filter ? 'status' AND v_filter -> 'status' <> '[]' THEN
        EXECUTE 'SELECT coalesce(jsonb_object_agg(c.status, c.n), ''{}'') FROM (
                SELECT e.status, count(*) AS n FROM dlq.dead_letter_queue e
                WHERE e.stage IN (''resolved'', ''failed'', ''archived'', ''returned'') AND e.closed_at > $2 AND e.id < $3
                    AND e.status::text <> ALL (dlq.filter_words($1, ''status''))
                    AND ' || dlq.approval_where(v_approval, v_filter - 'status') || ' GROUP BY e.status) c'
        INTO closed USING v_filter, v_approval.requested_at, dlq.first_id(v_approval.requested_at);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.approval_matches IS
    'The effect that the approval of a request would have now: the number of entries, how many of them arrived after '
    'the request, and how many that it selected before were closed since, by their state.';

-- Few requests wait at a time, so requests_for checks only the latest fifty. It evaluates the filter of each request
-- only on the entries p_ids.
CREATE OR REPLACE FUNCTION dlq.requests_for(p_ids uuid[]) RETURNS TABLE (approval_id uuid, entry_id uuid)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_approval dlq.approvals;
    v_filter   jsonb;
BEGIN
    FOR v_approval IN
        SELECT a.* FROM dlq.approvals a WHERE a.state = 'requested' AND a.expires_at > now()
            AND dlq.scope_within(a.scope, dlq.scope()) ORDER BY a.id DESC LIMIT 50
    LOOP
        v_filter := dlq.approval_filter(v_approval.operation, v_approval.request);
        RETURN QUERY EXECUTE 'SELECT $2, e.id FROM dlq.dead_letter_queue e WHERE e.id = ANY ($3) AND '
            || dlq.approval_where(v_approval, v_filter) USING v_filter, v_approval.id, p_ids;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.requests_for IS
    'The requests for approval that wait and select one of these entries now, with the entries that each selects.';

CREATE OR REPLACE FUNCTION dlq.require_role_for(p_operation text, p_request jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_operation = 'erase' OR p_request ->> 'do' = 'purge' THEN
        PERFORM dlq.require_admin(coalesce(p_request ->> 'do', p_operation));
    END IF;
    IF p_operation = 'erase' OR p_request ->> 'toDestination' IS NOT NULL THEN
        PERFORM dlq.require_everything(p_operation);
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_role_for IS
    'Raises an error if the caller lacks the role for the operation of a request.';

CREATE OR REPLACE FUNCTION dlq.request_approval(p_operation text, p_request jsonb, p_note text DEFAULT NULL,
    p_actor text DEFAULT session_user,
    p_on_behalf_of text DEFAULT NULL, p_token_by text DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id       uuid := dlq.uuid_v7();
    v_actor    text := dlq.actor(p_actor);
    v_filter   jsonb;
    v_entries  bigint;
    v_by_queue jsonb;
    v_equal    uuid;
    v_job      record;
    v_skips    jsonb;
    v_expires  timestamptz := now() + make_interval(secs => coalesce((SELECT (s.value::jsonb ->> 'seconds')::float8
        FROM dlq.settings s WHERE s.key = 'approvals'), 86400));
BEGIN
    IF p_operation IS NULL OR p_operation NOT IN ('replay', 'bulk', 'erase', 'cancel', 'export')
        OR jsonb_typeof(p_request) IS DISTINCT FROM 'object'
        OR p_operation = 'bulk'
            AND coalesce(p_request ->> 'do', '') NOT IN ('discard', 'expire', 'resolve', 'unpark', 'purge')
        OR p_operation = 'cancel' AND jsonb_typeof(p_request -> 'job') IS DISTINCT FROM 'number' THEN
        RAISE EXCEPTION 'approval: invalid operation or request' USING ERRCODE = 'DLQ04',
            HINT = 'Operations: bulk (discard, expire, resolve, unpark or purge), replay (with the fields of a replay run), erase, cancel (job), export. Example: dlq.request_approval(''bulk'', ''{"do": "discard", "filter": {"queue": "payments"}}'', ''ticket 7'').';
    END IF;
    PERFORM dlq.require_role_for(p_operation, p_request);
    v_filter := dlq.approval_filter(p_operation, p_request);
    PERFORM dlq.filter_where(v_filter);
    IF p_operation <> 'cancel' AND dlq.chooses_all(p_request -> 'filter')
        AND (p_operation = 'erase' OR NOT coalesce((p_request ->> 'all')::boolean, false)) THEN
        RAISE EXCEPTION '%: an empty filter matches every entry', p_operation USING ERRCODE = 'DLQ04',
            HINT = CASE WHEN p_operation = 'erase'
                THEN 'Name the person, for example {"payload": {"customer": "cus_81"}}.'
                ELSE 'To select all entries, put "all": true into the request.' END;
    END IF;
    SELECT coalesce(sum(q.n), 0), coalesce(jsonb_object_agg(q.queue, q.n), '{}') INTO v_entries, v_by_queue
    FROM (SELECT p.queue, sum(p.entries)::bigint AS n FROM dlq.preview(v_filter) p GROUP BY p.queue) q;
    IF p_operation = 'cancel' THEN
        SELECT j.id, j.queue INTO v_job
        FROM dlq.jobs_to_cancel(p_operation, p_request) j
        JOIN dlq.show_jobs(ARRAY[(p_request ->> 'job')::bigint], false) s ON s.id = j.id;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'job %: does not exist, or has ended', p_request ->> 'job'
                USING ERRCODE = 'DLQ02';
        END IF;
        v_entries := 1;
        v_by_queue := jsonb_build_object(v_job.queue, 1);
    END IF;
    IF p_operation = 'replay' THEN
        v_skips := dlq.skips_of(dlq.skip_defaults((p_request ->> 'skipStale')::boolean,
            (p_request ->> 'skipSuperseded')::boolean), v_filter);
    END IF;
    -- An equal request that waits is returned instead of a second one, which would find nothing left to do
    -- once the first is carried out. Two transactions at the same time may still create two requests.
    SELECT a.id INTO v_equal FROM dlq.approvals a WHERE a.state = 'requested' AND a.expires_at > now()
        AND a.operation = p_operation AND a.request = p_request
        AND a.skips IS NOT DISTINCT FROM v_skips AND a.scope IS NOT DISTINCT FROM dlq.scope()
        AND (p_operation <> 'export' OR lower(a.actor) = lower(v_actor)) -- only the requester may download it
    ORDER BY a.id LIMIT 1;
    IF v_equal IS NOT NULL THEN
        PERFORM dlq.record_act('approval ' || v_equal, 'requested again', p_actor, p_note,
            jsonb_build_object('operation', p_operation, 'do', p_request ->> 'do', 'entries', v_entries));
        RETURN v_equal;
    END IF;
    INSERT INTO dlq.approvals (id, operation, request, entries, by_queue, actor, on_behalf_of, token_by, origin, note,
        scope, skips, expires_at)
    VALUES (v_id, p_operation, p_request, v_entries, v_by_queue, v_actor,
        CASE WHEN p_actor <> v_actor THEN p_actor ELSE p_on_behalf_of END,
            CASE WHEN dlq.is_owner() THEN p_token_by END, dlq.origin(v_actor, p_actor), p_note, dlq.scope(),
            v_skips, v_expires);
    PERFORM dlq.record_act('approval ' || v_id, 'requested', p_actor, p_note,
        jsonb_build_object('operation', p_operation, 'do', p_request ->> 'do', 'entries', v_entries));
    RETURN v_id;
END
$$;
COMMENT ON FUNCTION dlq.request_approval IS
    'Requests approval of an operation by a second person: bulk (such as {"do": "discard", "filter": {"queue": '
    '"payments"}}: discard, expire, resolve, unpark or purge), replay, erase, cancel ({"job": 41}) or export. '
    'Returns its id, for dlq.approve. If an equal request waits already, returns its id and makes no second one. '
    'Raises DLQ04 if the request is invalid, or has an empty filter without "all": true.';

-- A person may have several names: the names of a token and of a sign-in, in upper or lower case. A token counts as the
-- same person as its creator.
CREATE OR REPLACE FUNCTION dlq.require_second_person(p_approval dlq.approvals, p_actor text, p_on_behalf_of text,
    p_token_by text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF lower(p_actor) IN (lower(p_approval.actor), lower(p_approval.on_behalf_of), lower(p_approval.token_by))
        OR lower(p_on_behalf_of) IN (lower(p_approval.actor), lower(p_approval.on_behalf_of))
        OR lower(p_token_by) = lower(p_approval.actor) THEN
        RAISE EXCEPTION 'approval %: requires a second person, and % counts as the requester', p_approval.id, p_actor
            USING ERRCODE = 'DLQ06', HINT = 'The requester, the person they act for, and the creator of their token count as one person.';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_second_person IS 'Raises an error if the caller is the requester, by any name.';

CREATE OR REPLACE FUNCTION dlq.open_approval(p_id uuid) RETURNS dlq.approvals
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_approval dlq.approvals;
BEGIN
    SELECT * INTO v_approval FROM dlq.approvals a WHERE a.id = p_id AND dlq.scope_within(a.scope, dlq.scope())
    FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'approval %: there is no such request', p_id USING ERRCODE = 'DLQ02';
    END IF;
    IF v_approval.state <> 'requested' OR v_approval.expires_at <= now() THEN
        RAISE EXCEPTION 'approval %: is %', p_id, CASE v_approval.state WHEN 'requested' THEN 'expired'
            ELSE v_approval.state END USING ERRCODE = 'DLQ01';
    END IF;
    RETURN v_approval;
END
$$;
COMMENT ON FUNCTION dlq.open_approval IS
    'Locks a request for approval that is not decided yet and has not expired; raises an error otherwise.';

CREATE OR REPLACE FUNCTION dlq.decide_approval(p_id uuid, p_state text, p_act text, p_actor text, p_note text)
    RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.approvals a SET state = p_state, decided_by = dlq.actor(p_actor), decided_at = now(), decision = p_note,
        ended_at = CASE WHEN p_state <> 'approved' THEN now() END,
        -- The request of an erasure contains personal data.
        request = CASE WHEN p_state <> 'approved' AND a.operation = 'erase' THEN '{"erased": true}' ELSE a.request END
    WHERE a.id = p_id;
    SELECT dlq.record_act('approval ' || p_id, p_act, p_actor, p_note,
        (SELECT jsonb_build_object('entries', a.frozen, 'requestedBy', a.actor) FROM dlq.approvals a WHERE a.id = p_id))
$$;
COMMENT ON FUNCTION dlq.decide_approval IS 'Records a decision on a request for approval.';

CREATE OR REPLACE FUNCTION dlq.approve(p_id uuid, p_expect bigint, p_note text DEFAULT NULL,
    p_actor text DEFAULT session_user, p_on_behalf_of text DEFAULT NULL, p_token_by text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_approval dlq.approvals := dlq.open_approval(p_id);
    v_actor    text := dlq.actor(p_actor);
    v_filter   jsonb := dlq.approval_filter(v_approval.operation, v_approval.request);
    v_frozen   bigint;
BEGIN
    PERFORM dlq.require_role_for(v_approval.operation, v_approval.request);
    PERFORM dlq.require_second_person(v_approval, v_actor, CASE WHEN p_actor <> v_actor THEN p_actor
        ELSE p_on_behalf_of END, CASE WHEN dlq.is_owner() THEN p_token_by END);
    IF p_expect IS NULL THEN
        RAISE EXCEPTION 'approval %: pass the number of dead letters that you expect it to change', p_id
            USING ERRCODE = 'DLQ04', HINT = 'It was requested for ' || v_approval.entries || '.';
    END IF;
    -- Entries are selected in the requester's scope, which is within the approver's scope.
    EXECUTE 'INSERT INTO dlq.approval_entries (approval_id, entry_id)
        SELECT $2, e.id FROM dlq.dead_letter_queue e WHERE ' || dlq.approval_where(v_approval, v_filter)
        || ' ON CONFLICT DO NOTHING' USING v_filter, p_id;
    GET DIAGNOSTICS v_frozen = ROW_COUNT;
    v_frozen := v_frozen + (SELECT count(*) FROM dlq.jobs_to_cancel(v_approval.operation, v_approval.request));
    IF v_frozen > p_expect THEN
        RAISE EXCEPTION 'approval %: matches % dead letters, more than the % expected', p_id, v_frozen, p_expect
            USING ERRCODE = 'DLQ05', HINT = 'Check them again.';
    END IF;
    UPDATE dlq.approvals a SET frozen = v_frozen WHERE a.id = p_id;
    PERFORM dlq.decide_approval(p_id, 'approved', 'approved', p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.approve IS
    'Approves a request of another person (dlq.approvals), for exactly the entries that match its filter now. '
    'Raises an error if there are more than p_expect. A dlqd that runs DLQ workers then carries it out.';

CREATE OR REPLACE FUNCTION dlq.refuse_approval(p_id uuid, p_note text DEFAULT NULL, p_actor text DEFAULT session_user)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_approval dlq.approvals := dlq.open_approval(p_id);
BEGIN
    PERFORM dlq.require_role_for(v_approval.operation, v_approval.request);
    PERFORM dlq.decide_approval(p_id, 'refused', 'refused', p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.refuse_approval IS 'Refuses a request for approval.';

CREATE OR REPLACE FUNCTION dlq.withdraw_approval(p_id uuid, p_note text DEFAULT NULL, p_actor text DEFAULT session_user)
    RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_approval dlq.approvals := dlq.open_approval(p_id);
BEGIN
    IF lower(dlq.actor(p_actor)) NOT IN (lower(v_approval.actor),
        lower(coalesce(v_approval.on_behalf_of, v_approval.actor))) THEN
        RAISE EXCEPTION 'approval %: only the requester % can withdraw it', p_id, v_approval.actor
            USING ERRCODE = 'DLQ06', HINT = 'Others can refuse it.';
    END IF;
    PERFORM dlq.decide_approval(p_id, 'withdrawn', 'withdrawn', p_actor, p_note);
END
$$;
COMMENT ON FUNCTION dlq.withdraw_approval IS 'Withdraws the caller''s own request for approval.';

-- One process at a time carries out an approved request. If that process dies, another one continues after taken_until.
-- A process takes only operations that it knows, because a newer dlqd may have others.
CREATE OR REPLACE FUNCTION dlq.take_approval(p_for interval,
    p_operations text[] DEFAULT '{replay,bulk,erase,cancel,export}') RETURNS SETOF dlq.approvals
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.approvals a SET taken_until = now() + p_for
    WHERE a.id = (SELECT o.id FROM dlq.approvals o WHERE o.state = 'approved'
        AND o.operation = ANY (p_operations) AND (o.taken_until IS NULL OR o.taken_until < now())
        AND NOT dlq.is_restored()
        ORDER BY o.id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING a.*
$$;
COMMENT ON FUNCTION dlq.take_approval IS
    'Reserves an approved request for one of p_operations for p_for, so that the caller carries it out and no other '
    'process does. '
    'Returns none while the database is held after a restore: the request may have been carried out before the '
    'restore.';

CREATE OR REPLACE FUNCTION dlq.forecast_approval(p_id uuid, p_forecast jsonb) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.approvals a SET forecast = p_forecast WHERE a.id = p_id AND a.forecast IS NULL
$$;
COMMENT ON FUNCTION dlq.forecast_approval IS
    'Keeps the preview of a replay run with the request for it. An equal request later does not change it.';

CREATE OR REPLACE FUNCTION dlq.approved_forecast() RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(a.forecast, jsonb_build_object('entries', a.entries, 'byQueue', a.by_queue))
    FROM dlq.approvals a WHERE a.id = dlq.approved()
$$;
COMMENT ON FUNCTION dlq.approved_forecast IS
    'The preview, as it was at the time of the request, of the approved request that dlqd carries out in this '
    'transaction. Null if there is none.';

CREATE OR REPLACE FUNCTION dlq.end_approval(p_id uuid, p_changed bigint, p_outcome uuid DEFAULT NULL,
    p_problem text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_approval dlq.approvals;
BEGIN
    UPDATE dlq.approvals a SET state = CASE WHEN p_problem IS NULL THEN 'done' ELSE 'failed' END,
        changed = CASE a.operation WHEN 'bulk' THEN coalesce(a.changed, 0) ELSE p_changed END, outcome = p_outcome,
        problem = p_problem, ended_at = now(), taken_until = NULL,
        -- The request of an erasure contains personal data.
        request = CASE WHEN a.operation = 'erase' THEN '{"erased": true}' ELSE a.request END
    WHERE a.id = p_id AND a.state = 'approved' RETURNING * INTO v_approval;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'approval %: was carried out already', p_id USING ERRCODE = 'DLQ01';
    END IF;
    PERFORM dlq.record_act('approval ' || p_id, v_approval.state, v_approval.actor, p_problem,
        jsonb_build_object('entries', v_approval.frozen, 'changed', v_approval.changed, 'approvedBy',
            v_approval.decided_by, 'outcome', p_outcome));
END
$$;
COMMENT ON FUNCTION dlq.end_approval IS 'Records the result of an approved request.';

CREATE OR REPLACE FUNCTION dlq.expire_approvals() RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id    uuid;
    v_count integer := 0;
BEGIN
    FOR v_id IN
        SELECT a.id FROM dlq.approvals a WHERE a.state = 'requested' AND a.expires_at <= now() ORDER BY a.id LIMIT 100
        FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE dlq.approvals a SET state = 'expired', ended_at = now(),
            request = CASE WHEN a.operation = 'erase' THEN '{"erased": true}' ELSE a.request END WHERE a.id = v_id;
        PERFORM dlq.record_act('approval ' || v_id, 'expired', 'sweep');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.expire_approvals IS
    'Ends requests for approval that were not decided in time. Returns how many.';
