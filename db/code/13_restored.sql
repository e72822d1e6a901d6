-- A database that was restored to an earlier moment does not know what was sent since. To detect a restore, dlqd
-- records the server, timeline and database that it runs on (settings, key server), and each process writes a mark, a
-- number that it increases every few seconds (processes.mark). If a process finds another server, timeline or database,
-- or does not find its own mark, dlqd holds automatic deliveries and replay runs until an operator resumes them. The
-- promotion of a standby during which a process ran is no restore: the process still finds its mark.
--
-- The hold is the row (stop, restored) of automatic_switches. Its reason is in settings, key restored.

CREATE OR REPLACE FUNCTION dlq.server_identity() RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_system   text;
    v_timeline bigint;
BEGIN
    -- Postgres 15 to 18 let every role call these functions. A hosted Postgres may have revoked that
    -- right, or lack the functions; dlq.same_server ignores keys that are missing.
    BEGIN
        SELECT s.system_identifier::text INTO v_system FROM pg_control_system() s;
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    -- The timeline that the server writes to. pg_control_checkpoint() returns the previous one for
    -- minutes after a promotion.
    IF NOT pg_is_in_recovery() THEN
        BEGIN
            v_timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
        EXCEPTION WHEN OTHERS THEN
            BEGIN
                SELECT c.timeline_id INTO v_timeline FROM pg_control_checkpoint() c;
            EXCEPTION WHEN OTHERS THEN
                NULL;
            END;
        END;
    END IF;
    RETURN jsonb_strip_nulls(jsonb_build_object('system', v_system, 'timeline', v_timeline,
        -- A restored dump has new oids, also in the same server.
        'database', (SELECT d.oid::bigint FROM pg_database d WHERE d.datname = current_database()), 'table',
        'dlq.settings'::regclass::oid::bigint));
END
$$;
COMMENT ON FUNCTION dlq.server_identity IS
    'Identifies this database, to detect another or a restored one: system (the server''s system identifier), '
    'timeline, database (its oid) and table (oid of dlq.settings). Values that this role may not read are '
    'absent.';

CREATE OR REPLACE FUNCTION dlq.same_server(p_known jsonb, p_now jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
RETURN NOT EXISTS (SELECT FROM jsonb_each(p_known) k WHERE p_now -> k.key <> k.value);
COMMENT ON FUNCTION dlq.same_server IS
    'Whether the keys that two values of dlq.server_identity() have in common are equal.';

CREATE OR REPLACE FUNCTION dlq.is_restored() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM dlq.automatic_switches s WHERE s.scope = 'stop' AND s.name = 'restored')
$$;
COMMENT ON FUNCTION dlq.is_restored IS 'Whether dlqd holds deliveries because the database was restored.';

-- Every transaction that sends automatically calls may_send first. may_send takes a shared lock until
-- the transaction ends, and a change of the switches (dlq.change_automatic) waits for that lock.
CREATE OR REPLACE FUNCTION dlq.may_send(p_process uuid, p_mark bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = on SET jit = off AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(hashtextextended('dlq.automatic', 0)) THEN
        RETURN 'switching';
    ELSIF dlq.is_restored() THEN
        RETURN 'held';
    ELSIF dlq.server_verdict(p_process, p_mark, NULL, dlq.server_identity()) <> 'same' THEN
        RETURN 'unsettled';
    END IF;
    RETURN 'yes';
END
$$;
COMMENT ON FUNCTION dlq.may_send IS
    'Whether a process may send automatically: yes, held (the database was restored), switching (a switch of '
    'automatic redelivery is being changed), or unsettled (the server is new or has changed, or the mark is lost; '
    'dlq.watch_server has to run first). p_mark: the last number that the process has committed in processes.mark.';

CREATE OR REPLACE FUNCTION dlq.server_verdict(p_process uuid, p_mark bigint, p_timeline bigint, p_now jsonb)
    RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_known       jsonb := (SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'server');
    v_mark_lost   boolean := p_mark > 0 AND NOT EXISTS (SELECT FROM dlq.processes p WHERE p.id = p_process
        AND p.mark >= p_mark);
    v_mark_intact boolean;
BEGIN
    IF v_known IS NULL AND (NOT v_mark_lost OR dlq.is_restored()) THEN
        RETURN 'unknown';
    END IF;
    -- The process wrote its last mark on the known timeline, and the mark still exists: no commit before the mark is
    -- lost.
    v_mark_intact := p_mark > 0 AND NOT v_mark_lost AND p_timeline = (v_known ->> 'timeline')::bigint;
    IF dlq.is_restored() THEN
        -- Only a hold because of the timeline can end without an operator: a process that had just started could not
        -- tell a promotion from a restore, but a process that ran during the promotion can.
        IF NOT EXISTS (SELECT FROM dlq.settings s WHERE s.key = 'restored' AND s.value::jsonb ->> 'why' = 'timeline')
            THEN
            RETURN 'same';
        END IF;
        RETURN CASE WHEN v_mark_lost THEN 'lost' WHEN v_mark_intact AND dlq.same_server(v_known - 'timeline', p_now)
            THEN 'promoted' ELSE 'same' END;
    END IF;
    RETURN CASE
        WHEN NOT dlq.same_server(v_known - 'timeline', p_now) THEN 'other'
        WHEN v_mark_lost THEN 'lost' -- also if the server is not known yet
        WHEN dlq.same_server(v_known, p_now) THEN 'same'
        WHEN v_mark_intact THEN 'promoted'
        ELSE 'timeline' END;
END
$$;
COMMENT ON FUNCTION dlq.server_verdict IS
    'The state of the server from the view of a process: same (or already held), unknown (dlqd has not run '
    'here), promoted (a standby took over, and nothing that the process knows of is lost), or why it counts as '
    'restored: other (another server, database or dump), lost (the process''s mark is gone), timeline (another '
    'timeline, and no dlqd ran through the change). p_timeline: the timeline on which the process wrote its '
    'last mark.';

-- watch_server decides whether the server is as expected, and writes the process's mark:
--   1. If the server is the known one, it only writes the mark.
--   2. Otherwise one process decides, under a lock. An unknown server or a promoted standby is recorded as known; for a
--      restored server, the hold begins. Starting or ending a hold waits for transactions that are sending
--      (dlq.change_automatic).
--   3. It writes the mark in the same transaction; the previous mark is not needed any more.
CREATE OR REPLACE FUNCTION dlq.watch_server(p_process uuid, p_name text, p_mark bigint, p_timeline bigint,
    OUT mark bigint, OUT timeline bigint, OUT verdict text, OUT held_at timestamptz, OUT note text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
#variable_conflict use_column
DECLARE
    v_now         jsonb := dlq.server_identity();
    v_known       jsonb;
BEGIN
    verdict := dlq.server_verdict(p_process, p_mark, p_timeline, v_now);
    IF verdict <> 'same' THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('dlq.server', 0));
        verdict := dlq.server_verdict(p_process, p_mark, p_timeline, v_now);
        v_known := (SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'server');
        CASE verdict
        WHEN 'same' THEN
            NULL;
        WHEN 'unknown' THEN
            PERFORM dlq.know_server(v_now);
        WHEN 'promoted' THEN
            PERFORM dlq.change_automatic('stop', 'restored', NULL, NULL, 'worker:' || p_name,
                'a standby was promoted while this dlqd ran');
            PERFORM dlq.know_server(v_now);
            PERFORM dlq.record_act('server', 'promoted', 'worker:' || p_name, NULL,
                jsonb_build_object('before', v_known, 'after', v_now));
        ELSE
            PERFORM dlq.change_automatic('stop', 'restored', true, '{}', 'worker:' || p_name,
                dlq.restored_note(verdict, p_process, p_name, v_known, v_now));
            INSERT INTO dlq.settings AS s (key, value)
            VALUES ('restored', jsonb_build_object('why', verdict, 'known', v_known, 'found', v_now)::text)
            ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now();
        END CASE;
    END IF;
    -- The commit of the mark waits for the disk, even if the session has synchronous_commit off.
    -- Otherwise a crash could lose the mark, which would look like a restore.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'local', true);
    END IF;
    INSERT INTO dlq.processes AS p (id, name, version, parts, mark)
    VALUES (p_process, p_name, '', '{}', greatest(p_mark, 0) + 1)
    ON CONFLICT (id) DO UPDATE SET mark = greatest(p.mark, p_mark) + 1
    RETURNING p.mark INTO mark;
    timeline := (v_now ->> 'timeline')::bigint;
    SELECT s.at, s.note INTO held_at, note FROM dlq.automatic_switches s WHERE s.scope = 'stop' AND s.name = 'restored';
END
$$;
COMMENT ON FUNCTION dlq.watch_server IS
    'Compares the server with the known one (dlq.server_verdict), holds automatic deliveries if it was '
    'restored, and writes the mark of a process. Each process calls it when it starts, on each new connection, '
    'and every few seconds. held_at and note describe the hold; null if there is none.';

CREATE OR REPLACE FUNCTION dlq.know_server(p_identity jsonb) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM dlq.settings s WHERE s.key = 'restored';
    INSERT INTO dlq.settings AS s (key, value) VALUES ('server', p_identity::text)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now()
$$;
COMMENT ON FUNCTION dlq.know_server IS 'Records this server as the known one.';

CREATE OR REPLACE FUNCTION dlq.restored_note(p_why text, p_process uuid, p_name text, p_known jsonb, p_now jsonb)
    RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE
        WHEN p_why = 'lost' THEN 'the last write of ' || p_name || ' is missing: the database was set back while it ran'
        WHEN p_why = 'timeline' THEN format('the server is on timeline %s, and was on %s before: it was restored, or promoted while no dlqd ran', p_now ->> 'timeline', p_known ->> 'timeline')
        WHEN p_now -> 'system' <> p_known -> 'system'
            THEN format('this is another server (system identifier %s, expected %s)', p_now ->> 'system',
                p_known ->> 'system')
        WHEN p_now -> 'database' <> p_known -> 'database' THEN 'this is another database of the same server'
        ELSE 'its tables were restored from a dump' END
        -- Leave out seen_at of this process, because the process has just written its own row.
        || coalesce('; its last record is of '
            || to_char(greatest((SELECT max(t.at) FROM dlq.dead_letter_transitions t),
                (SELECT max(p.seen_at) FROM dlq.processes p WHERE p.id <> p_process)) AT TIME ZONE 'UTC',
                    'YYYY-MM-DD HH24:MI:SS') || ' UTC', '')
$$;
COMMENT ON FUNCTION dlq.restored_note IS 'The reason why dlqd considers the database restored, as text.';

CREATE OR REPLACE FUNCTION dlq.hold_restored(p_actor text DEFAULT session_user, p_note text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.change_automatic('stop', 'restored', true, '{}', p_actor,
        coalesce(p_note, 'reported by ' || dlq.actor(p_actor)));
    INSERT INTO dlq.settings AS s (key, value) VALUES ('restored', '{"why": "said"}')
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now();
END
$$;
COMMENT ON FUNCTION dlq.hold_restored IS
    'Holds automatic deliveries, as if dlqd had found the database restored. For restores that it cannot '
    'detect, such as of a disk snapshot while no dlqd ran.';

CREATE OR REPLACE FUNCTION dlq.resume_restored(p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_known jsonb;
BEGIN
    PERFORM dlq.require_everything('restored database');
    PERFORM pg_advisory_xact_lock(hashtextextended('dlq.server', 0));
    v_known := (SELECT s.value::jsonb FROM dlq.settings s WHERE s.key = 'server');
    IF NOT dlq.change_automatic('stop', 'restored', NULL, NULL, p_actor, p_note) THEN
        RETURN false;
    END IF;
    PERFORM dlq.know_server(dlq.server_identity());
    PERFORM dlq.record_act('server', 'acknowledged', p_actor, dlq.masked_text(p_note, dlq.mask(false)),
        jsonb_build_object('before', v_known, 'after', dlq.server_identity()));
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.resume_restored IS
    'Resumes what dlqd holds because the database was restored, and records this server as the known one. '
    'dlq.restored() shows what may be sent a second time. Returns false if nothing was held.';

CREATE OR REPLACE FUNCTION dlq.restored() RETURNS TABLE (what text, held boolean, items bigint, detail text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off SET row_security = off AS $$
DECLARE
    v_most constant integer := 100000;
    v_at   timestamptz;
BEGIN
    PERFORM dlq.require_everything('restored database');
    v_at := coalesce((SELECT s.at FROM dlq.automatic_switches s WHERE s.scope = 'stop' AND s.name = 'restored'), now());
    RETURN QUERY
    SELECT 'replay run'::text, true, (SELECT count(*) FROM dlq.replay_run_entries e WHERE e.run_id = r.id
        AND e.outcome IS NULL AND e.job_id IS NULL),
           format('run %s of %s: sent %s of %s', r.id, r.actor, r.replayed, r.total)
    FROM (SELECT * FROM dlq.replay_runs r WHERE r.status = 'running' ORDER BY r.id LIMIT 100) r;
    RETURN QUERY
    SELECT CASE WHEN u.own THEN 'redelivery of a message' ELSE 'redelivery of an application''s job' END,
           u.own, count(*),
           CASE WHEN u.own THEN string_agg(DISTINCT u.state, ', ')
               ELSE 'the application''s workers run these: dlqd cannot hold them ('
                   || string_agg(DISTINCT u.state, ', ') || ')' END
    FROM (
        SELECT j.kind = 'dlqd_message' AS own, j.state::text
        FROM (SELECT e.redelivery_job_id FROM dlq.dead_letter_open e WHERE e.status = 'dlq_processing' LIMIT v_most) e
        JOIN river.river_job j ON j.id = e.redelivery_job_id
        WHERE j.state NOT IN ('completed', 'discarded', 'cancelled') AND j.created_at < v_at
    ) u GROUP BY u.own ORDER BY u.own DESC;
    RETURN QUERY
    SELECT 'dead letter that goes by itself'::text, true, sum(g.n)::bigint, sum(g.due)::bigint
        || ' of them are due'
    FROM (
        SELECT e.queue, e.kind, e.error_class, e.job_kind, count(*) AS n,
            count(*) FILTER (WHERE e.next_retry_at <= now()) AS due
        FROM (SELECT * FROM dlq.dead_letter_open o WHERE o.status = 'dlq_pending' AND o.strategy IS NOT NULL
            LIMIT v_most) e
        -- Select by the age of the job, not by the last failure: a redelivery that ran at v_at is rescued later, and so
        -- its failure is later, too.
        WHERE e.job_created_at < v_at
        GROUP BY e.queue, e.kind, e.error_class, e.job_kind
    ) g WHERE dlq.switched_on(g.queue, g.kind, g.error_class, g.job_kind) HAVING sum(g.n) > 0;
    RETURN QUERY
    SELECT 'message in River''s queues'::text, true, count(*), string_agg(DISTINCT m.state, ', ')
    FROM unnest('{available,pending,retryable,running,scheduled}'::text[]) s (state)
    CROSS JOIN LATERAL (SELECT j.kind, j.created_at, j.metadata, j.state::text FROM river.river_job j
        WHERE j.state = s.state::river.river_job_state LIMIT v_most) m
    WHERE m.kind = 'dlqd_message' AND m.created_at < v_at AND NOT m.metadata ? 'dlq:entry_id' HAVING count(*) > 0;
    RETURN QUERY
    SELECT 'approved request'::text, true, count(*), string_agg(DISTINCT a.operation, ', ') FROM dlq.approvals a
    WHERE a.state = 'approved' HAVING count(*) > 0;
END
$$;
COMMENT ON FUNCTION dlq.restored IS
    'Lists what dlqd, or an application that works its jobs, may do a second time in a restored database, and '
    'whether dlqd holds it: replay runs with their remaining entries, redeliveries under way, dead letters to be '
    'redelivered automatically, messages, and approved requests. It lists at most 100 replay runs, and reads at most '
    '100,000 redeliveries, 100,000 dead letters, and 100,000 jobs of each state.';
