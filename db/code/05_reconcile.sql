-- The reconciler files failures that River keeps and that have no entry: capture was off or skipped
-- them, its trigger was missing or disabled, or a statement bypassed it (session_replication_role,
-- COPY, a restore). dlqd scans recent jobs every minute, and all jobs that River keeps every hour.

CREATE OR REPLACE FUNCTION dlq.trigger_state() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- ENABLE REPLICA counts as disabled: such a trigger fires only during replication.
    SELECT CASE WHEN count(*) < 2 THEN 'missing' WHEN bool_and(t.tgenabled IN ('O', 'A')) THEN 'enabled'
        ELSE 'disabled' END
    FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE t.tgrelid = dlq.job_table() AND t.tgname IN ('dlq_capture', 'dlq_follow')
      AND p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.settings'::regclass)
$$;
COMMENT ON FUNCTION dlq.trigger_state IS
    'Whether dlqd''s triggers on river_job are enabled, disabled (ENABLE REPLICA included) or '
    'missing.';

-- Before schema version 9, dlq.retired_jobs did not list the failures that entries have. The upgrade adds all of them,
-- however long that takes: some ten seconds for a million jobs. Statements of the earlier functions may still be
-- running at that time, so for the next ten minutes each scan of the reconciler adds failures that entries have got
-- since. Failures of deleted entries are already in dlq.retired_jobs. Entries that closed before the oldest failure
-- that River keeps are not read: they cannot contain a failure that River keeps.
CREATE OR REPLACE FUNCTION dlq.remember_taken() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off SET enable_seqscan = on
SET enable_bitmapscan = on SET jit = off AS $$
DECLARE
    v_state  text; -- upgrade: nothing is added yet; again: everything from before v_since is added
    v_since  timestamptz;
    v_oldest timestamptz;
BEGIN
    SELECT s.value, s.updated_at INTO v_state, v_since FROM dlq.settings s WHERE s.key = 'remember_taken';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT min(f.at) - interval '1 day' INTO v_oldest
    FROM (SELECT (SELECT min(j.finalized_at) FROM river.river_job j
        WHERE j.state = s.state::river.river_job_state) AS at FROM unnest('{discarded,cancelled}'::text[]) s (state)) f;
    INSERT INTO dlq.retired_jobs (job_id, job_created_at, failure, attempt, entry_id, at)
    SELECT j.id, j.created_at, dlq.entry_id(j.id, j.finalized_at), j.attempt, e.id, now()
    FROM dlq.dead_letter_queue e JOIN river.river_job j ON j.id = e.river_job_id AND j.created_at = e.job_created_at
    WHERE e.stage <> 'inbox' AND (e.closed_at IS NULL OR e.closed_at >= v_oldest)
        AND j.state IN ('discarded', 'cancelled')
      AND (v_state = 'upgrade' OR e.updated_at >= v_since - interval '1 hour')
      AND CASE WHEN e.id = dlq.entry_id(j.id, j.finalized_at)
          THEN j.finalized_at NOT BETWEEN '1970-01-01Z' AND e.created_at + interval '1 day'
              AND e.retry_count = j.attempt
               -- An entry with another id has the failure if its time, its attempts or its audit
               -- trail contain the failure.
               ELSE e.last_failed_at = j.finalized_at
                    OR e.retry_history @> jsonb_build_array(jsonb_build_object('at',
                        j.errors[cardinality(j.errors)] -> 'at', 'attempt',
                        j.errors[cardinality(j.errors)] -> 'attempt'))
                    OR EXISTS (SELECT FROM dlq.dead_letter_transitions t WHERE t.entry_id = e.id
                        AND t.failed_at = j.finalized_at)
                    -- If a closed entry followed the job, a note in the audit trail may be the only
                    -- record of the failure.
                    OR e.closed_at IS NOT NULL AND greatest(e.closed_at, e.last_failed_at) >= j.finalized_at
                       AND EXISTS (SELECT FROM dlq.entry_jobs k WHERE k.job_id = j.id
                           AND k.job_created_at = j.created_at AND k.entry_id = e.id) END
    ON CONFLICT DO NOTHING;
    IF v_since < now() - interval '10 minutes' THEN
        DELETE FROM dlq.settings s WHERE s.key = 'remember_taken';
    ELSIF v_state = 'upgrade' THEN
        UPDATE dlq.settings SET value = 'again' WHERE key = 'remember_taken';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.remember_taken IS
    'After the upgrade to schema version 9: adds failures that were recorded in entries earlier to '
    'dlq.retired_jobs, as far as River still shows them.';

-- The plan of dlq.known_failure has all partitions, so Postgres makes it once per session. The call is in a subquery
-- that returns one value. With EXISTS, a plan that Postgres made while the tables were small might join whole tables.
CREATE OR REPLACE FUNCTION dlq.unknown_failures(p_jobs bigint[]) RETURNS bigint[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off
SET jit = off SET max_parallel_workers_per_gather = 0 SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN ARRAY(SELECT j.id FROM river.river_job j
                 WHERE j.id = ANY (p_jobs) AND j.state::text IN ('discarded', 'cancelled')
                     AND (SELECT k.known FROM dlq.known_failure(j.id, j.created_at, dlq.entry_id(j.id, j.finalized_at),
                         j.attempt::integer, j.finalized_at) k) IS NULL
                 ORDER BY j.id);
END
$$;
COMMENT ON FUNCTION dlq.unknown_failures IS
    'Those of the jobs that ended as discarded or cancelled and whose failure dlqd does not know (dlq.known_failure).';

-- look_for_failures advances a scan by one batch:
--   1. Read the batch without locks.
--   2. Lock the jobs whose failure dlqd does not know (dlq.known_failure), until the end of the
--      transaction. Jobs that another session has locked are left for the next scan.
--   3. With a new snapshot, append to the inbox the failures that are still unknown, as dlq.capture
--      would have.
--
-- A job is a failure if dlq.is_failure(job, NULL) says so: its previous state is unknown here.
CREATE OR REPLACE FUNCTION dlq.look_for_failures(p_look text, p_captured_by text, p_limit integer, p_every interval,
    p_wait boolean,
    OUT filed integer, OUT done boolean, OUT began_at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off
SET jit = off SET max_parallel_workers_per_gather = 0 SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    -- The times of failures may be this much too early, because clocks of River's clients are slow or updates commit
    -- late.
    v_overlap        constant interval := '5 minutes';
    v_failed         constant text := $sql$
        CASE j.state WHEN 'discarded' THEN NOT j.metadata @> '{"unique_key_conflict": "scheduler_discarded"}'
                     WHEN 'cancelled' THEN NOT j.metadata ? 'cancel_attempted_at'
                         AND cardinality(j.errors) > 0 END$sql$;
    v_scan           dlq.reconcile_looks;
    v_from           timestamptz;
    v_page           record;
    v_ids            bigint[]; -- failures of the page that dlqd does not know
    v_locked         bigint[];
    v_jobs           integer := 0;
    v_most_at_cursor constant integer := 10000;
    v_at_cursor      integer;
    v_file           text;
    v_job            bigint;
    v_one            integer;
    v_error          text;
    v_wait           text;
BEGIN
    filed := 0;
    done := false;
    INSERT INTO dlq.reconcile_looks (look) SELECT l FROM unnest(ARRAY['recent', 'whole', 'backfill']) l
    WHERE NOT EXISTS (SELECT FROM dlq.reconcile_looks o WHERE o.look = l) ON CONFLICT DO NOTHING;
    IF p_wait THEN
        SELECT * INTO v_scan FROM dlq.reconcile_looks l WHERE l.look = p_look FOR UPDATE;
    ELSE
        SELECT * INTO v_scan FROM dlq.reconcile_looks l WHERE l.look = p_look FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            done := true; -- another session runs this scan
            RETURN;
        END IF;
    END IF;
    IF v_scan.began_at IS NULL THEN
        IF v_scan.done_at > now() - p_every THEN
            done := true;
            RETURN;
        END IF;
        PERFORM dlq.remember_taken();
        v_from := CASE p_look WHEN 'backfill' THEN '-infinity'
            ELSE greatest((SELECT l.since FROM dlq.reconcile_looks l WHERE l.look = 'whole'),
                CASE p_look WHEN 'recent' THEN v_scan.since - v_overlap END) END;
        v_scan.began_at := now();
        v_scan.began_xmin := txid_snapshot_xmin(txid_current_snapshot());
        -- Every transaction that is already running has a lower id than this transaction. The xmax of the snapshot
        -- would not be enough, because running transactions may have higher ids than xmax.
        v_scan.began_xid := txid_current();
        v_scan.from_at := v_from;
        v_scan.cursor_state := 'cancelled';
        v_scan.cursor_at := v_from;
        v_scan.cursor_id := -1;
        v_scan.skipped := false;
        v_scan.triggers_before := v_scan.triggers;
        v_scan.triggers := dlq.trigger_state();
    END IF;
    began_at := v_scan.began_at;

    LOOP
        -- The first query reads a page of ended jobs. If the page has failures, a second query finds the ones that
        -- dlqd does not know. One query for both would take several times as long to plan, and most pages hold no
        -- failure.
        --
        -- River's index is by state and time, without the id. If one statement ended many jobs with now(), they all
        -- have the time of the cursor. They are then read by id: read by time, all of them would be sorted again for
        -- each page.
        EXECUTE format('SELECT count(*) FROM (SELECT FROM river.river_job j WHERE j.state = %L AND j.finalized_at = $1 LIMIT $2) j', v_scan.cursor_state)
        INTO v_at_cursor USING v_scan.cursor_at, v_most_at_cursor;
        EXECUTE format($sql$
            WITH page AS MATERIALIZED (
                SELECT p.*, row_number() OVER () AS number
                FROM ((SELECT j.id, j.finalized_at, j.created_at, j.attempt, %1$s AS failed FROM river.river_job j
                    WHERE j.id > $2 AND %2$s ORDER BY j.id LIMIT $3)
                      UNION ALL
                      (SELECT j.id, j.finalized_at, j.created_at, j.attempt, %1$s FROM river.river_job j
                          WHERE j.state = %3$L AND j.finalized_at > $1 ORDER BY j.finalized_at, j.id LIMIT $3)
                      LIMIT $3) p)
            SELECT (SELECT count(*) FROM page) AS jobs, l.id, l.finalized_at,
                   ARRAY(SELECT p.id FROM page p WHERE p.failed) AS failed
            FROM (VALUES (1)) one LEFT JOIN (SELECT * FROM page p ORDER BY p.number DESC LIMIT 1) l ON true$sql$,
                v_failed,
            -- If many jobs have the time of the cursor, compare expressions that have no index, so
            -- that Postgres reads by id.
            format(CASE WHEN v_at_cursor < v_most_at_cursor THEN 'j.state = %L AND j.finalized_at = $1'
                ELSE 'j.state::text = %L AND greatest(j.finalized_at) = $1' END, v_scan.cursor_state),
            v_scan.cursor_state)
        INTO v_page USING v_scan.cursor_at, v_scan.cursor_id, p_limit - v_jobs;
        v_ids := '{}';
        IF cardinality(v_page.failed) > 0 THEN
            v_ids := dlq.unknown_failures(v_page.failed);
        END IF;

        IF cardinality(v_ids) > 0 THEN
            -- Other sessions wait for jobs that are locked here, so lock the tables first, and wait
            -- at most 250 ms for any lock.
            v_wait := current_setting('lock_timeout');
            PERFORM set_config('lock_timeout', '250ms', true);
            LOCK TABLE ONLY dlq.dead_letter_queue, ONLY dlq.dead_letter_inbox, dlq.reconcile_findings,
            dlq.reconcile_looks IN ROW EXCLUSIVE MODE;
            v_locked := ARRAY(SELECT j.id FROM river.river_job j WHERE j.id = ANY (v_ids)
                AND j.state::text IN ('discarded', 'cancelled') ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED);
            v_scan.skipped := v_scan.skipped OR cardinality(v_locked) < cardinality(v_ids);
            v_file := format($sql$
                WITH filed AS (
                    INSERT INTO dlq.dead_letter_queue
                        (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, subscriber_id,
                         source, ordering_key,
                         priority, tags, original_event, error_message, retry_history, retry_count, max_retries,
                         unique_key, unique_states,
                         metadata, next_retry_at, first_failed_at, last_failed_at, captured_by)
                    SELECT dlq.entry_id(j.id, j.finalized_at),
                           CASE WHEN j.kind = 'dlqd_message' THEN left(j.args ->> 'messageId', 255) END,
                           j.id, j.created_at, j.queue,
                           CASE WHEN j.kind = 'dlqd_message' THEN coalesce(left(j.args ->> 'kind', 255), j.kind)
                               ELSE j.kind END, j.kind,
                           CASE WHEN j.kind = 'dlqd_message' THEN left(j.args ->> 'subscriberId', 255) END,
                           CASE WHEN j.kind = 'dlqd_message' THEN left(j.args ->> 'source', 255) END,
                           CASE WHEN j.kind = 'dlqd_message' THEN left(j.args ->> 'orderingKey', 255) END,
                           j.priority, j.tags, j.args, j.errors[cardinality(j.errors)] ->> 'error',
                           coalesce(to_jsonb(j.errors), '[]'),
                           j.attempt, j.max_attempts, j.unique_key, j.unique_states, j.metadata, now(), t.failed_at,
                           t.failed_at, $2
                    FROM river.river_job j
                    CROSS JOIN LATERAL (SELECT CASE
                        WHEN j.finalized_at BETWEEN '1970-01-01Z' AND now() + interval '1 day' THEN j.finalized_at
                        ELSE now() END AS failed_at) t
                    WHERE j.id = ANY (dlq.unknown_failures($1)) AND j.state::text IN ('discarded', 'cancelled') AND %s
                    ON CONFLICT DO NOTHING
                    RETURNING last_failed_at
                ), causes AS (
                    SELECT CASE WHEN (SELECT a.act FROM dlq.acts a WHERE a.subject = 'capture'
                        AND a.at <= f.last_failed_at ORDER BY a.at DESC LIMIT 1) = 'off'
                                  -- A job's finalized_at may be earlier than the statement that
                                  -- ends the job: capture may have been switched off in between.
                                  OR EXISTS (SELECT FROM dlq.acts a WHERE a.subject = 'capture' AND a.act = 'off'
                                      AND a.at BETWEEN f.last_failed_at AND f.last_failed_at + $5) THEN 'capture_off'
                                WHEN 'missing' IN ($3, $4) THEN 'trigger_missing'
                                WHEN 'disabled' IN ($3, $4) THEN 'trigger_disabled'
                                ELSE 'missed' END AS why
                    FROM filed f WHERE $2 = 'reconciler'
                ), counted AS (
                    INSERT INTO dlq.reconcile_findings AS r (hour, why, entries, last_at)
                    SELECT date_trunc('hour', now()), c.why, count(*), now() FROM causes c GROUP BY c.why
                    ON CONFLICT (hour, why) DO UPDATE SET entries = r.entries + excluded.entries,
                    last_at = excluded.last_at
                )
                SELECT count(*) FROM filed$sql$, v_failed);
            BEGIN
                EXECUTE v_file INTO v_one USING v_locked, p_captured_by, v_scan.triggers, v_scan.triggers_before,
                    v_overlap;
                filed := filed + v_one;
            EXCEPTION WHEN lock_not_available THEN
                RAISE;
            WHEN OTHERS THEN
                -- If one job cannot be filed, file the others one by one.
                v_error := SQLERRM;
                FOREACH v_job IN ARRAY v_locked LOOP
                    BEGIN
                        EXECUTE v_file INTO v_one USING ARRAY[v_job], p_captured_by, v_scan.triggers,
                            v_scan.triggers_before, v_overlap;
                        filed := filed + v_one;
                    EXCEPTION WHEN lock_not_available THEN
                        RAISE;
                    WHEN OTHERS THEN
                        v_scan.skipped := true;
                        v_error := format('job %s: %s', v_job, SQLERRM);
                    END;
                END LOOP;
                RAISE WARNING 'dlqd: filing missed failures failed: %', v_error;
            END;
            PERFORM set_config('lock_timeout', v_wait, true);
        END IF;

        v_jobs := v_jobs + v_page.jobs;
        IF v_jobs >= p_limit THEN
            v_scan.cursor_at := v_page.finalized_at;
            v_scan.cursor_id := v_page.id;
            EXIT;
        ELSIF v_scan.cursor_state = 'cancelled' THEN
            v_scan.cursor_state := 'discarded';
            v_scan.cursor_at := v_scan.from_at;
            v_scan.cursor_id := -1;
        ELSE
            done := true;
            IF v_scan.seen_xid > v_scan.began_xid THEN
                v_scan.seen_xid := NULL; -- a future id: the database was restored from a dump into another server
            END IF;
            IF p_look = 'recent' AND NOT v_scan.skipped THEN
                IF v_scan.began_xmin >= v_scan.seen_xid THEN
                    -- All transactions that ran when the earlier scan (seen_xid) began had ended
                    -- before this scan began, so this scan has seen their jobs. Transactions that
                    -- commit later began after seen_at: the next scan starts there.
                    v_scan.since := v_scan.seen_at;
                    v_scan.seen_xid := NULL;
                END IF;
                IF v_scan.seen_xid IS NULL THEN
                    v_scan.seen_at := v_scan.began_at;
                    v_scan.seen_xid := v_scan.began_xid;
                END IF;
            END IF;
            v_scan.began_at := NULL;
            v_scan.done_at := now();
            EXIT;
        END IF;
    END LOOP;
    UPDATE dlq.reconcile_looks l SET
        since = v_scan.since, seen_at = v_scan.seen_at, seen_xid = v_scan.seen_xid, began_at = v_scan.began_at,
        from_at = v_scan.from_at,
        began_xmin = v_scan.began_xmin, began_xid = v_scan.began_xid, cursor_state = v_scan.cursor_state,
        cursor_at = v_scan.cursor_at,
        cursor_id = v_scan.cursor_id, skipped = v_scan.skipped, triggers = v_scan.triggers,
        triggers_before = v_scan.triggers_before, done_at = v_scan.done_at
    WHERE l.look = p_look;
END
$$;
COMMENT ON FUNCTION dlq.look_for_failures IS
    'Advances a scan of the reconciler by one batch of up to p_limit jobs. filed: the failures that it appended to '
    'the inbox. done: the scan has ended, or was not due (p_every), or another session runs it (without p_wait). '
    'began_at: when the scan began. dlq.reconcile and dlq.backfill call it.';

-- find_successes finds the success of a retry that was made while capture was off or skipped it: dlqd does not follow
-- such a retry, and has no fact about its success. River must still have the job. If this success resolved the entry,
-- or another entry of the job, and an operator has reopened the entry since, it stays open.
CREATE OR REPLACE FUNCTION dlq.find_successes(p_limit integer DEFAULT 10000) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET max_parallel_workers_per_gather = 0 SET row_security = off AS $$
DECLARE
    v_found integer;
BEGIN
    INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, at)
    SELECT j.id, j.created_at, 'completed', e.id, j.finalized_at
    FROM dlq.dead_letter_open e JOIN river.river_job j ON j.id = e.river_job_id AND j.created_at = e.job_created_at
    WHERE e.status IN ('dlq_pending', 'dlq_manual') AND e.rule IS DISTINCT FROM 'done-twice'
      -- The job has run since the entry's failure. Compare attempts, because the clocks of River's
      -- clients differ and a redelivery may have failed since. Compare times, too, because plain
      -- SQL need not count an attempt.
      AND j.state = 'completed' AND (j.attempt > e.retry_count
          OR j.attempt = e.retry_count AND j.finalized_at > e.last_failed_at)
      -- After a restore of River's table, a job may show a success from before its last failure.
      AND (SELECT r.attempt FROM dlq.retired_jobs r WHERE r.job_id = j.id AND r.job_created_at = j.created_at
          AND r.attempt > j.attempt LIMIT 1) IS NULL
      AND NOT dlq.is_superseded(j.state::text, j.attempt, j.metadata)
      AND NOT e.replay_attempts @> jsonb_build_array(jsonb_build_object('jobId', j.id, 'outcome', 'completed'))
      AND (SELECT o.id FROM dlq.dead_letter_queue o CROSS JOIN LATERAL jsonb_array_elements(o.replay_attempts) a
           WHERE o.river_job_id = j.id AND o.job_created_at = j.created_at AND o.stage <> 'inbox' AND o.id <> e.id
             AND a @> jsonb_build_object('jobId', j.id, 'outcome', 'completed')
             AND dlq.to_timestamptz(a ->> 'endedAt') >= j.finalized_at
             AND (SELECT t.id FROM dlq.dead_letter_transitions t WHERE t.entry_id = e.id AND t.at >= j.finalized_at
                 AND t.from_status IN ('dlq_resolved', 'dlq_archived') AND dlq.is_person(t.actor) LIMIT 1) IS NOT NULL
           LIMIT 1) IS NULL
      AND NOT EXISTS (SELECT FROM dlq.job_facts f WHERE f.job_id = j.id AND f.job_created_at = j.created_at)
    LIMIT p_limit;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    RETURN v_found;
END
$$;
COMMENT ON FUNCTION dlq.find_successes IS
    'Appends a fact for each of up to p_limit entries whose own job was retried outside dlqd and completed without a '
    'trigger seeing it, so that the entry is resolved. Returns how many.';

CREATE OR REPLACE FUNCTION dlq.reconcile(p_limit integer DEFAULT 2000, p_whole boolean DEFAULT false,
    p_every interval DEFAULT '0', OUT filed integer, OUT done boolean, OUT began_at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_everything('reconcile');
    SELECT l.filed, l.done, l.began_at INTO filed, done, began_at
    FROM dlq.look_for_failures(CASE WHEN p_whole THEN 'whole' ELSE 'recent' END, 'reconciler', p_limit, p_every,
        p_every = '0') l;
    IF p_whole AND done THEN
        PERFORM dlq.forget_jobs();
        PERFORM dlq.find_successes();
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.reconcile IS
    'Files failures that capture missed: among jobs that ended recently or, with p_whole, among all '
    'that River keeps since dlqd was attached. A call scans up to p_limit ended jobs in one '
    'transaction, and returns how many failures it filed and whether the scan is done. A call '
    'continues a scan that another session began. A finished scan covers all failures before its '
    'began_at, except for jobs that were locked: call this function until it is done with a scan '
    'that began after your first call. p_every: do nothing if the last scan is more recent than '
    'this, or another session is scanning. A dlqd that serves calls this every minute, and with '
    'p_whole every hour.';

CREATE OR REPLACE FUNCTION dlq.backfill(p_limit integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch record;
BEGIN
    PERFORM dlq.require_everything('backfill');
    LOOP
        SELECT * INTO v_batch FROM dlq.look_for_failures('backfill', 'backfill', p_limit, '0', true);
        EXIT WHEN v_batch.filed > 0 OR v_batch.done;
    END LOOP;
    RETURN v_batch.filed;
END
$$;
COMMENT ON FUNCTION dlq.backfill IS
    'Files jobs that failed before dlqd was attached and that River still keeps, up to p_limit in a '
    'call. Returns how many; call it until it returns 0.';

-- retire records failures that the reconciler must not file again. A function that deletes entries calls it first, in
-- the same transaction.
CREATE OR REPLACE FUNCTION dlq.retire(p_ids uuid[], p_partition regclass DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
DECLARE
    v_entries constant text := CASE WHEN p_partition IS NULL
        THEN 'SELECT * FROM dlq.dead_letter_queue WHERE id = ANY ($1) AND (closed_at IS NULL OR closed_at >= $2)'
            ELSE 'SELECT * FROM ' || p_partition END;
    v_fact record;
BEGIN
    -- After a TRUNCATE, as in a restore, a statement with an older snapshot sees an empty table, even if it waited for
    -- the lock. So take the lock in a statement of its own.
    LOCK TABLE river.river_job IN ACCESS SHARE MODE;
    -- A failure may exist only as a fact. If River has deleted its job, the payload comes from the entry. So append the
    -- failure to the inbox now, before the entry is deleted.
    FOR v_fact IN EXECUTE format($sql$
        SELECT f.ctid AS tid, e.id AS entry, jsonb_build_object('id', f.job_id, 'created_at', f.job_created_at, 'state',
            f.fact, 'finalized_at', f.at) || coalesce(f.job, '{}') AS job
        FROM (%1$s) e JOIN dlq.job_facts f ON f.job_id = e.river_job_id AND f.job_created_at = e.job_created_at
        WHERE CASE f.fact WHEN 'refused' THEN f.job ->> 'fact' ELSE f.fact END IN ('discarded', 'cancelled')
            ORDER BY f.job_id, f.at FOR UPDATE OF f$sql$, v_entries) USING p_ids, dlq.closed_since(p_ids)
    LOOP
        PERFORM dlq.file_end(v_fact.entry, v_fact.job);
        DELETE FROM dlq.job_facts f WHERE f.ctid = v_fact.tid;
    END LOOP;
    EXECUTE format($sql$
        INSERT INTO dlq.retired_jobs (job_id, job_created_at, failure, attempt, entry_id, at)
        SELECT DISTINCT ON (j.id, j.created_at, t.failure, t.attempt) j.id, j.created_at, t.failure, t.attempt,
            t.entry_id, clock_timestamp()
        FROM (
            SELECT e.river_job_id AS job_id, e.job_created_at, e.id AS failure, e.retry_count AS attempt,
                e.id AS entry_id FROM (%1$s) e
            UNION ALL
            SELECT k.job_id, k.job_created_at, dlq.entry_id(o.id, o.finalized_at), o.attempt, e.id
            FROM (%1$s) e JOIN dlq.entry_jobs k ON k.entry_id = e.id
                AND (k.job_id, k.job_created_at) <> (e.river_job_id, e.job_created_at)
            JOIN river.river_job o ON o.id = k.job_id AND o.created_at = k.job_created_at AND o.finalized_at IS NOT NULL
        ) t JOIN river.river_job j ON j.id = t.job_id AND j.created_at = t.job_created_at
        ORDER BY j.id, j.created_at, t.failure, t.attempt
        ON CONFLICT DO NOTHING$sql$, v_entries) USING p_ids, dlq.closed_since(p_ids);
    -- If one of these jobs runs again and fails, that failure becomes an entry of its own.
    EXECUTE format('DELETE FROM dlq.entry_jobs k USING (%1$s) e WHERE k.entry_id = e.id', v_entries)
        USING p_ids, dlq.closed_since(p_ids);
END
$$;
COMMENT ON FUNCTION dlq.retire IS
    'Records the failures of entries that are about to be deleted in dlq.retired_jobs, as far as River still has '
    'their jobs: of the entries p_ids, or of a whole partition. Also appends failures that only a fact records to '
    'the inbox, and deletes the markers of the entries.';

CREATE OR REPLACE FUNCTION dlq.forget_jobs() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    -- Keep rows for at least a day, because a restore of River's table may be in progress.
    DELETE FROM dlq.retired_jobs r
    WHERE r.at < now() - interval '1 day' AND NOT EXISTS (SELECT FROM river.river_job j WHERE j.id = r.job_id
        AND j.created_at = r.job_created_at)
      AND NOT EXISTS (SELECT FROM dlq.job_facts f WHERE f.job_id = r.job_id AND f.job_created_at = r.job_created_at);
    DELETE FROM dlq.entry_jobs k
    WHERE NOT EXISTS (SELECT FROM river.river_job j WHERE j.id = k.job_id AND j.created_at = k.job_created_at)
      AND NOT EXISTS (SELECT FROM dlq.job_facts f WHERE f.job_id = k.job_id AND f.job_created_at = k.job_created_at)
      AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = k.entry_id
          AND (e.closed_at IS NULL OR e.closed_at > now() - interval '1 day'));
    -- If a record comes back more than 90 days after dlqd published it, it becomes a new entry.
    DELETE FROM dlq.source_deliveries d WHERE d.id = ANY (ARRAY(
        SELECT o.id FROM dlq.source_deliveries o WHERE o.at < now() - interval '90 days'
            AND NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = o.entry_id) ORDER BY o.at LIMIT 10000));
    -- Delete records of a feed even if their entry still exists: looking up each entry would take longer the larger the
    -- table is.
    DELETE FROM dlq.feed_records f WHERE f.place = ANY (ARRAY(
        SELECT o.place FROM dlq.feed_records o WHERE o.at < now() - interval '400 days'
            AND (o.acknowledged_at IS NOT NULL OR o.failure IS NOT NULL) ORDER BY o.at LIMIT 100000));
END
$$;
COMMENT ON FUNCTION dlq.forget_jobs IS
    'Deletes the rows of dlq.retired_jobs and dlq.entry_jobs about jobs that River has deleted: the '
    'former after a day, the latter once the entry has been closed for a day or is gone.';

-- capture_status reads tables that another session may have locked: values that are not available
-- within 500 ms are null.
CREATE OR REPLACE FUNCTION dlq.capture_status(OUT mode text, OUT time_limit interval, OUT changed_at timestamptz,
    OUT changed_by text, OUT note text,
    OUT triggers text, OUT writing integer, OUT unfiled bigint, OUT unfiled_since timestamptz, OUT facts bigint,
    OUT facts_since timestamptz,
    OUT looked_at timestamptz, OUT looked_at_all timestamptz, OUT missed bigint, OUT missed_by jsonb,
    OUT missed_at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' SET row_security = on AS $$
DECLARE
    v_change record;
BEGIN
    PERFORM dlq.require_everything('capture');
    mode := dlq.capture_mode();
    time_limit := dlq.capture_limit();
    triggers := dlq.trigger_state();
    writing := dlq.writing_jobs();
    BEGIN
        SELECT * INTO v_change FROM dlq.acts a WHERE a.subject = 'capture' ORDER BY a.at DESC LIMIT 1;
        IF v_change.act = mode THEN -- otherwise the last switch could not be recorded
            changed_at := v_change.at;
            changed_by := v_change.actor;
            note := v_change.note;
        END IF;
        SELECT max(l.done_at) FILTER (WHERE l.look = 'recent'),
            max(l.done_at) FILTER (WHERE l.look = 'whole') INTO looked_at, looked_at_all FROM dlq.reconcile_looks l;
        SELECT coalesce(sum(w.entries), 0), coalesce(jsonb_object_agg(w.why, w.entries), '{}'),
            max(w.last_at) INTO missed, missed_by, missed_at
        FROM (SELECT f.why, sum(f.entries) AS entries, max(f.last_at) AS last_at FROM dlq.reconcile_findings f
            WHERE f.hour > now() - interval '24 hours' GROUP BY f.why) w;
    EXCEPTION WHEN lock_not_available THEN NULL;
    END;
    BEGIN
        SELECT count(*), min(f.at) INTO facts, facts_since
        FROM (SELECT f.at FROM dlq.job_facts f WHERE f.fact <> 'following' LIMIT 10000) f;
    EXCEPTION WHEN lock_not_available THEN NULL;
    END;
    BEGIN
        SELECT count(*), min(e.created_at) INTO unfiled, unfiled_since
        FROM (SELECT e.created_at FROM dlq.dead_letter_queue e WHERE e.stage = 'inbox' LIMIT 10000) e;
    EXCEPTION WHEN lock_not_available THEN NULL;
    END;
END
$$;
COMMENT ON FUNCTION dlq.capture_status IS
    'The status of capture: its mode (and when, by whom and why it was changed); the triggers; how '
    'many open transactions have written jobs; how many entries and facts no DLQ worker has handled '
    '(counted up to 10,000), and since when; when the reconciler last finished a scan; and how many '
    'failures it filed within 24 hours, by cause.';
