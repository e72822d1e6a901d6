-- Progressive replay runs: each failure group of the run goes step by step. Go judges the outcomes and
-- decides (internal/replay/progressive.go); these functions move the groups, for dlqd and for operators.

CREATE OR REPLACE FUNCTION dlq.replay_quota(p_entries bigint, p_step integer) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_step WHEN 0 THEN least(p_entries, 5) WHEN 1 THEN (p_entries + 9) / 10 WHEN 2 THEN (p_entries + 1) / 2
    ELSE p_entries END;
COMMENT ON FUNCTION dlq.replay_quota IS
    'How many of a group''s entries a progressive run has sent at the end of a step: a canary of 5 (step 0), then '
    '10, 50 and 100 % of all (steps 1 to 3).';

-- The groups are counted before the entries are inserted. If an entry is captured in between and its failure group is
-- not among the largest, it goes into the group of all other failure groups.
CREATE OR REPLACE FUNCTION dlq.replay_largest(p_where text, p_filter jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_groups jsonb;
BEGIN
    EXECUTE 'SELECT coalesce(jsonb_agg(jsonb_build_object(''number'', least(g.number, 21), ''queue'', g.queue,
                 ''fingerprint'', g.fingerprint, ''errorType'', g.error_type) ORDER BY g.number), ''[]'')
             FROM (SELECT row_number() OVER (ORDER BY count(*) DESC, e.queue, coalesce(e.fingerprint, '''')) AS number,
                       e.queue, coalesce(e.fingerprint, '''') AS fingerprint, min(e.error_type) AS error_type
                   FROM dlq.dead_letter_queue e WHERE ' || p_where
        || ' GROUP BY e.queue, coalesce(e.fingerprint, '''')) g'
    INTO v_groups USING p_filter;
    RETURN v_groups;
END
$$;
COMMENT ON FUNCTION dlq.replay_largest IS
    'The failure groups of the entries that match a condition (dlq.filter_where): number, queue, fingerprint and '
    'errorType. The largest has the number 1; all groups after the 20 largest have the number 21.';

CREATE OR REPLACE FUNCTION dlq.replay_plan(p_run uuid, p_groups jsonb) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO dlq.replay_run_groups (run_id, number, queue, fingerprint, error_type, known, entries, quota)
    SELECT p_run, c.number, CASE WHEN c.number <= 20 THEN g.queue END,
           CASE WHEN c.number <= 20 THEN nullif(g.fingerprint, '') END, CASE WHEN c.number <= 20 THEN g.error_type END,
           coalesce(g.known, '{}'), c.entries, dlq.replay_quota(c.entries, 0)
    FROM (SELECT e.group_number AS number, count(*) AS entries FROM dlq.replay_run_entries e WHERE e.run_id = p_run
          GROUP BY e.group_number) c
    LEFT JOIN (SELECT (j.value ->> 'number')::integer AS number, min(j.value ->> 'queue') AS queue,
                   min(j.value ->> 'fingerprint') AS fingerprint, min(j.value ->> 'errorType') AS error_type,
                   array_remove(array_agg(DISTINCT j.value ->> 'fingerprint'), '') AS known
               FROM jsonb_array_elements(p_groups) j GROUP BY 1) g ON g.number = c.number
$$;
COMMENT ON FUNCTION dlq.replay_plan IS
    'Writes the groups (dlq.replay_largest) of a progressive run, whose entries have been inserted.';

-- replay_group_move is for dlqd (next, hold, stop, done) and for operators (go_on, back, end):
--   - next begins the next step that has more entries than were sent.
--   - go_on continues a held or stopped group with the rest of its step or, if nothing is left of the step, with the
--     next one. It sends at least ten entries, which the test needs if one of them fails. The test begins again, and
--     failures that have occurred no longer count as new.
--   - back is like go_on, but the next step is as large as the previous one.
CREATE OR REPLACE FUNCTION dlq.replay_group_move(p_run uuid, p_number integer, p_move text, p_actor text,
    p_reason text DEFAULT NULL, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_group  dlq.replay_run_groups;
    v_most   bigint; -- entries that can be sent, including entries that were sent
    v_step   integer;
    v_quota  bigint;
    v_seen   text[];
    v_reason text := p_reason;
BEGIN
    SELECT * INTO STRICT v_group FROM dlq.replay_run_groups g WHERE g.run_id = p_run AND g.number = p_number FOR UPDATE;
    v_most := v_group.entries - v_group.skipped;
    v_step := v_group.step;
    v_quota := v_group.quota;
    IF p_move = 'back' THEN
        v_step := greatest(v_step - 1, 0);
        v_quota := v_group.sent + greatest(dlq.replay_quota(v_most, v_step)
            - CASE WHEN v_step = 0 THEN 0 ELSE dlq.replay_quota(v_most, v_step - 1) END, 5);
    ELSIF p_move IN ('next', 'go_on') AND (p_move = 'next' OR v_group.sent >= v_quota) THEN
        LOOP
            v_step := least(v_step + 1, 3);
            v_quota := dlq.replay_quota(v_most, v_step);
            EXIT WHEN v_step = 3 OR v_quota > v_group.sent;
        END LOOP;
    END IF;
    IF p_move = 'go_on' THEN
        v_quota := greatest(v_quota, v_group.sent + 10);
    END IF;
    v_quota := least(v_quota, v_most);
    IF p_move IN ('go_on', 'back') THEN
        v_seen := ARRAY(SELECT DISTINCT e.fingerprint FROM dlq.replay_run_entries e
                        WHERE e.run_id = p_run AND e.outcome = 'failed' AND e.group_number = p_number
                            AND e.fingerprint IS NOT NULL AND e.fingerprint <> ALL (v_group.known));
        v_reason := dlq.actor(p_actor) || CASE p_move WHEN 'go_on' THEN ' let it go on' ELSE ' sent it back a step' END
            || ': up to ' || v_quota || ' of ' || v_most || ' are sent next';
    ELSIF p_move = 'end' THEN
        v_reason := dlq.actor(p_actor) || ' ended it: ' || greatest(v_most - v_group.sent, 0) || ' of ' || v_most
            || ' are not sent';
    END IF;
    UPDATE dlq.replay_run_groups g SET
        state = CASE p_move WHEN 'hold' THEN 'held' WHEN 'stop' THEN 'stopped' WHEN 'done' THEN 'done'
            WHEN 'end' THEN 'ended' ELSE 'going' END,
        reason = v_reason, step = v_step, quota = v_quota, known = g.known || coalesce(v_seen, '{}'),
        from_succeeded = CASE WHEN p_move IN ('go_on', 'back') THEN g.succeeded ELSE g.from_succeeded END,
        from_failed = CASE WHEN p_move IN ('go_on', 'back') THEN g.failed ELSE g.from_failed END,
        active_at = clock_timestamp(),
        let_go_at = CASE WHEN p_move IN ('go_on', 'back') THEN clock_timestamp() ELSE g.let_go_at END
    WHERE g.run_id = p_run AND g.number = p_number;
    PERFORM dlq.record_act('replay run ' || p_run, CASE p_move WHEN 'next' THEN 'group goes on'
        WHEN 'hold' THEN 'group held' WHEN 'stop' THEN 'group stopped' WHEN 'done' THEN 'group done'
        WHEN 'go_on' THEN 'group let go on' WHEN 'back' THEN 'group sent back' ELSE 'group ended' END, p_actor,
        coalesce(p_note, v_reason), jsonb_build_object('group', p_number, 'reason', v_reason));
END
$$;
COMMENT ON FUNCTION dlq.replay_group_move IS
    'Moves a group of a progressive run, and records the decision with its reason: next (step), hold, stop or done '
    'by dlqd; go_on, back or end by an operator.';

CREATE OR REPLACE FUNCTION dlq.replay_steer(p_run uuid, p_move text, p_actor text, p_note text, p_groups integer[])
    RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_run    dlq.replay_runs;
    v_number integer;
    v_moved  integer := 0;
BEGIN
    SELECT * INTO v_run FROM dlq.replay_runs r WHERE r.id = p_run AND dlq.scope_within(r.scope, dlq.scope()) FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'replay run %: there is no such run', p_run USING ERRCODE = 'DLQ02';
    END IF;
    IF NOT v_run.progressive THEN
        RAISE EXCEPTION 'replay run %: is not progressive', p_run USING ERRCODE = 'DLQ01',
            HINT = 'Pause, resume or cancel it.';
    END IF;
    IF v_run.status NOT IN ('running', 'paused', 'stopped') THEN
        RAISE EXCEPTION 'replay run %: has ended (it is %)', p_run, v_run.status USING ERRCODE = 'DLQ01';
    END IF;
    SELECT n INTO v_number FROM unnest(p_groups) n WHERE NOT EXISTS (SELECT FROM dlq.replay_run_groups g
        WHERE g.run_id = p_run AND g.number = n AND (g.state IN ('held', 'stopped')
            OR p_move = 'end' AND g.state = 'going')) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'replay run %: group % is not %', p_run, v_number,
            CASE p_move WHEN 'end' THEN 'going, held or stopped' ELSE 'held or stopped' END USING ERRCODE = 'DLQ01';
    END IF;
    FOR v_number IN SELECT g.number FROM dlq.replay_run_groups g WHERE g.run_id = p_run
        AND CASE WHEN p_groups IS NULL THEN g.state IN ('held', 'stopped') ELSE g.number = ANY (p_groups) END
        ORDER BY g.number LOOP
        PERFORM dlq.replay_group_move(p_run, v_number, p_move, p_actor, NULL, p_note);
        v_moved := v_moved + 1;
    END LOOP;
    IF v_moved = 0 THEN
        RAISE EXCEPTION 'replay run %: no group is held or stopped', p_run USING ERRCODE = 'DLQ01';
    END IF;
    IF v_run.status = 'stopped' THEN
        PERFORM dlq.replay_move(p_run, '{stopped}', 'running', 'resumed by ' || dlq.actor(p_actor));
    END IF;
    PERFORM dlq.wake();
    RETURN v_moved;
END
$$;
COMMENT ON FUNCTION dlq.replay_steer IS
    'Does the work of dlq.replay_go_on, dlq.replay_back and dlq.replay_end. p_groups: the numbers of groups that are '
    'held or stopped (to end: or going), or null for all that are held or stopped. Resumes a run that has stopped. '
    'Returns the number of groups that it moved. If the run is not progressive or has ended, or no group can be '
    'moved, it raises DLQ01.';

CREATE OR REPLACE FUNCTION dlq.replay_go_on(p_run uuid, p_groups integer[] DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS integer
LANGUAGE sql AS $$ SELECT dlq.replay_steer(p_run, 'go_on', p_actor, p_note, p_groups) $$;
COMMENT ON FUNCTION dlq.replay_go_on IS
    'Lets groups of a progressive run go on that are held or stopped: those with these numbers, or all. Their tests '
    'begin again. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.replay_back(p_run uuid, p_groups integer[] DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS integer
LANGUAGE sql AS $$ SELECT dlq.replay_steer(p_run, 'back', p_actor, p_note, p_groups) $$;
COMMENT ON FUNCTION dlq.replay_back IS
    'Lets groups of a progressive run go on that are held or stopped, with a step as large as the one before. Their '
    'tests begin again. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.replay_end(p_run uuid, p_groups integer[] DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS integer
LANGUAGE sql AS $$ SELECT dlq.replay_steer(p_run, 'end', p_actor, p_note, p_groups) $$;
COMMENT ON FUNCTION dlq.replay_end IS
    'Ends groups of a progressive run: those with these numbers, or all that are held or stopped. Their other '
    'entries are skipped. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.held_by_runs(p_ids uuid[]) RETURNS TABLE (entry_id uuid, run_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT e.entry_id, e.run_id
    FROM dlq.replay_runs r
    JOIN dlq.replay_run_entries e ON e.run_id = r.id AND e.entry_id = ANY (p_ids)
        AND (e.outcome = 'failed' OR e.outcome IS NULL AND e.job_id IS NULL)
    JOIN dlq.replay_run_groups g ON g.run_id = r.id AND g.number = e.group_number AND g.state <> 'ended'
    WHERE r.unsettled AND r.progressive AND r.status IN ('running', 'paused', 'stopped')
$$;
COMMENT ON FUNCTION dlq.held_by_runs IS
    'Of the given entries, those that failed in a progressive run that has not ended, or that it has not sent yet: '
    'dlqd does not redeliver them automatically.';

-- job_traffic reads a sample: for each sixtieth of the period at most 100 jobs of any kind, by River's index on state
-- and finalized_at. It leaves out jobs that dlqd itself completed, because these have not run.
CREATE OR REPLACE FUNCTION dlq.job_traffic(p_run uuid, p_from timestamptz, p_until timestamptz)
    RETURNS TABLE (kind text, level integer, jobs bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
    SELECT j.kind, j.level, count(*)
    FROM (
        SELECT s.kind, CASE WHEN s.failed THEN 48
            ELSE least(floor(2 * ln(greatest(s.ms, 1)) / ln(2)), 46)::integer + 1 END AS level
        FROM (SELECT p_from + (p_until - p_from) * (i / 60.0) AS from,
                     p_from + (p_until - p_from) * ((i + 1) / 60.0) AS until FROM generate_series(0, 59) i) slice
        CROSS JOIN LATERAL (
            SELECT u.kind, u.state = 'discarded' AS failed, u.metadata,
                extract(epoch FROM u.finalized_at - u.attempted_at)::float8 * 1000 AS ms,
                dlq.is_superseded(u.state::text, u.attempt, u.metadata) AS superseded
            FROM (
                (SELECT o.kind, o.state, o.attempt, o.metadata, o.attempted_at, o.finalized_at FROM river.river_job o
                 WHERE o.state = 'completed' AND o.finalized_at >= slice.from AND o.finalized_at < slice.until
                 ORDER BY o.finalized_at LIMIT 100)
                UNION ALL
                (SELECT o.kind, o.state, o.attempt, o.metadata, o.attempted_at, o.finalized_at FROM river.river_job o
                 WHERE o.state = 'discarded' AND o.finalized_at >= slice.from AND o.finalized_at < slice.until
                 ORDER BY o.finalized_at LIMIT 100)) u
            ORDER BY u.finalized_at LIMIT 100) s
        WHERE s.ms IS NOT NULL AND NOT s.superseded
            AND coalesce(s.metadata ->> 'dlq:run_id', '') <> p_run::text) j
    GROUP BY 1, 2
$$;
COMMENT ON FUNCTION dlq.job_traffic IS
    'A sample of the jobs that completed or failed for good in a period and are not of a replay run, by kind and '
    'duration: levels as places in destination_traffic.deliveries.';

CREATE OR REPLACE FUNCTION dlq.is_progressive(p_run uuid, p_entry uuid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM dlq.replay_runs r WHERE r.id = p_run AND r.progressive
        AND r.status IN ('running', 'paused', 'stopped'))
        AND NOT EXISTS (SELECT FROM dlq.replay_run_entries e
            JOIN dlq.replay_run_groups g ON g.run_id = e.run_id AND g.number = e.group_number
            WHERE e.run_id = p_run AND e.entry_id = p_entry AND g.state = 'ended')
$$;
COMMENT ON FUNCTION dlq.is_progressive IS
    'Whether a replay run is progressive and has not ended, and no operator has ended the group of the entry.';

-- If two processes delete the same rows, the second one skips locked rows instead of waiting.
CREATE OR REPLACE FUNCTION dlq.add_traffic(p_counts jsonb) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    DELETE FROM dlq.destination_traffic t USING (
        SELECT o.destination, o.at, o.run_id FROM dlq.destination_traffic o
        WHERE o.at < now() - interval '6 hours' ORDER BY o.at LIMIT 1000 FOR UPDATE SKIP LOCKED) o
    WHERE t.destination = o.destination AND t.at = o.at AND t.run_id = o.run_id;
    INSERT INTO dlq.destination_traffic AS t (destination, at, run_id, deliveries)
    SELECT c.destination, c.at, c.run, c.deliveries
    FROM jsonb_to_recordset(p_counts) c (destination text, at timestamptz, run uuid, deliveries integer[])
    ORDER BY 1, 2, 3 -- a fixed order, so that processes that write the same rows do not deadlock
    ON CONFLICT (destination, at, run_id) DO UPDATE SET deliveries = ARRAY(
        SELECT coalesce(u.was, 0) + coalesce(u.more, 0)
        FROM unnest(t.deliveries, excluded.deliveries) WITH ORDINALITY u (was, more, place) ORDER BY u.place);
$$;
COMMENT ON FUNCTION dlq.add_traffic IS
    'Adds a process''s deliveries to dlq.destination_traffic, and deletes rows that are older than six hours.';
