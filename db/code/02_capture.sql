-- Capture records a job that ends as a failure as a dead letter, in the transaction that ends the
-- job, whichever client ends it.
--
-- In the application's transaction dlqd only appends: a failed job to the inbox; the end of a
-- redelivery, or a retry made outside dlqd, to job_facts. Unless capture is strict, it waits for no
-- lock and raises no error. If a lock, a plan or time is not available, it skips the rest of the
-- statement's jobs with a warning, and the reconciler finds the failures. DLQ workers file the
-- failures and apply the facts.

CREATE OR REPLACE FUNCTION dlq.to_timestamptz(p_text text) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN p_text::timestamptz;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.to_timestamptz IS 'p_text as a time; null if it is not one.';

CREATE OR REPLACE FUNCTION dlq.to_uuid(p_text text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_text ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' THEN p_text::uuid END;
COMMENT ON FUNCTION dlq.to_uuid IS 'p_text as a UUID; null if it is not one.';

-- The next three functions are SQL expressions, not PL/pgSQL, so that Postgres inlines them.
-- date_part is STABLE, so the two that use it cannot be IMMUTABLE.
CREATE OR REPLACE FUNCTION dlq.uuid_of(p_us bigint, p_number bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN encode(int8send(((p_us / 1000) << 16) | 28672 | ((p_us % 1000) << 2))
    || int8send((-9223372036854775808) | p_number), 'hex')::uuid;
COMMENT ON FUNCTION dlq.uuid_of IS
    'A UUID version 7 of a time in microseconds, with a number in place of its random bits.';

CREATE OR REPLACE FUNCTION dlq.microseconds(p_at timestamptz) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (CASE WHEN p_at BETWEEN '1970-01-01Z'::timestamptz AND '2200-01-01Z'::timestamptz THEN date_part('epoch', p_at)
    ELSE 0 END * 1000000)::bigint;
COMMENT ON FUNCTION dlq.microseconds IS
    'p_at in microseconds since 1970; 0 for a time outside 1970 to 2200 (psql accepts ''infinity'' '
    'and the year 294276, too).';

CREATE OR REPLACE FUNCTION dlq.entry_id(p_job bigint, p_failed_at timestamptz) RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
-- A record's entry has a negative job id. The mask clears the upper two bits of the id, because a UUID has its variant
-- there.
RETURN dlq.uuid_of(dlq.microseconds(p_failed_at), p_job & 4611686018427387903);
COMMENT ON FUNCTION dlq.entry_id IS
    'The id of the dead letter of a failure, made from the job''s id and its finalized_at, so that '
    'one failure has one id in capture, in a fact and in the reconciler.';

-- The mode and the limit of capture are stored as the bodies of two functions. Replacing these takes
-- no lock on River's or dlqd's tables, and takes effect in every session at its next statement.
CREATE OR REPLACE FUNCTION dlq.put_capture(p_mode text, p_limit interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
    v_try integer := 0;
BEGIN
    LOOP
        v_try := v_try + 1;
        BEGIN
            IF v_try <= 2 THEN -- serializes changes; only two attempts wait, because any role may hold this lock
                PERFORM pg_advisory_xact_lock(hashtextextended('dlq.put_capture', 0));
            END IF;
            EXECUTE format('CREATE OR REPLACE FUNCTION dlq.capture_mode() RETURNS text LANGUAGE sql STABLE RETURN %L::text', p_mode);
            EXECUTE format('CREATE OR REPLACE FUNCTION dlq.capture_limit() RETURNS interval LANGUAGE sql STABLE RETURN %L::interval', p_limit);
            RETURN;
        EXCEPTION WHEN internal_error OR unique_violation OR lock_not_available THEN
            -- Another session has just changed the functions ("tuple concurrently updated") or is
            -- changing them: try again.
            IF v_try = 10 THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.put_capture IS
    'Replaces dlq.capture_mode() and dlq.capture_limit(): dlq.set_capture without the audit row.';

CREATE OR REPLACE FUNCTION dlq.set_capture(p_mode text, p_limit interval DEFAULT NULL,
    p_actor text DEFAULT session_user, p_note text DEFAULT NULL,
    OUT mode text, OUT writing integer, OUT recorded boolean, OUT message text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    v_limit constant interval := coalesce(p_limit, dlq.capture_limit());
BEGIN
    PERFORM dlq.require_everything('capture');
    mode := p_mode;
    IF p_mode IS NULL OR p_mode NOT IN ('on', 'off', 'strict') THEN
        RAISE EXCEPTION 'capture: invalid mode %', p_mode USING ERRCODE = 'DLQ04', HINT = 'Modes: on, off, strict.';
    ELSIF v_limit NOT BETWEEN interval '1 ms' AND interval '1 hour' THEN
        RAISE EXCEPTION 'capture: invalid limit %', v_limit USING ERRCODE = 'DLQ04',
            HINT = 'A limit is 1 ms to 1 hour; the default is 250 ms.';
    END IF;
    PERFORM dlq.put_capture(p_mode, v_limit);
    -- The switch takes effect even if its audit row cannot be written.
    BEGIN
        PERFORM dlq.record_act('capture', p_mode, p_actor, p_note, jsonb_build_object('limit', v_limit));
        recorded := true;
    EXCEPTION WHEN OTHERS THEN
        recorded := false;
        RAISE WARNING 'dlqd: capture was switched, but writing the audit row failed: %', SQLERRM;
    END;
    writing := dlq.writing_jobs();
    message := CASE p_mode
        WHEN 'on' THEN 'Failures are captured from each session''s next statement on.'
        WHEN 'strict' THEN 'From each session''s next statement on, a job cannot end as a failure unless its dead letter can be written: such a statement waits, or fails.'
        ELSE 'From each session''s next statement on, dlqd does nothing in the application''s transactions.' END
        || ' ' || CASE WHEN writing = 0 THEN 'No transaction that writes jobs is open.' ELSE writing
            || ' open transactions have written jobs: their current statements still use the previous mode.' END
        || CASE WHEN p_mode = 'strict' THEN ''
            ELSE ' Failures that capture misses are filed every minute by dlqd serve, or by SELECT * FROM dlq.reconcile(), as long as River keeps the job.'
        || CASE WHEN p_mode = 'off'
            THEN ' While capture is off, retries made outside dlqd are not followed, and ends of redeliveries are noticed late.' ELSE '' END END;
END
$$;
COMMENT ON FUNCTION dlq.set_capture IS
    'Switches capture: on; off (dlqd does nothing in the application''s transactions; the '
    'reconciler files failures of jobs that River keeps); strict (a job cannot end as a failure '
    'unless its dead letter can be written). p_limit is how long capture may work in one statement '
    'of the application (250 ms until it is first changed; null keeps it). Takes no lock on a '
    'table. Returns how many open transactions have written jobs, and whether the change was '
    'recorded in dlq.acts, which dlq.audit() shows.';

CREATE OR REPLACE FUNCTION dlq.job_table() RETURNS oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- The function reads the catalog, so that it also works for roles without USAGE on River's schema.
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = split_part('river.river_job', '.', 1) AND c.relname = 'river_job'
$$;
COMMENT ON FUNCTION dlq.job_table IS 'The oid of River''s table of jobs; null if it does not exist.';

CREATE OR REPLACE FUNCTION dlq.writing_jobs() RETURNS integer
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- Every role may read pg_locks, which includes prepared transactions.
    SELECT count(DISTINCT l.virtualtransaction)::integer FROM pg_locks l
    WHERE l.relation = dlq.job_table() AND l.database = (SELECT d.oid FROM pg_database d
        WHERE d.datname = current_database())
      AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;
COMMENT ON FUNCTION dlq.writing_jobs IS
    'The number of open transactions, other than the current one, that have written jobs.';

DO $install$
BEGIN
    IF to_regprocedure('dlq.capture_mode()') IS NULL THEN
        PERFORM dlq.put_capture(coalesce(c.act, 'on'), coalesce((c.detail ->> 'limit')::interval, '250 ms'))
        FROM (VALUES (1)) one LEFT JOIN (SELECT a.act, a.detail FROM dlq.acts a WHERE a.subject = 'capture'
            ORDER BY a.at DESC LIMIT 1) c ON true;
    END IF;
END
$install$;
COMMENT ON FUNCTION dlq.capture_mode IS
    'Whether capture is on, off or strict. dlq.set_capture replaces this function.';
COMMENT ON FUNCTION dlq.capture_limit IS
    'How long capture may work in one statement of the application. dlq.set_capture replaces this '
    'function.';

CREATE OR REPLACE FUNCTION dlq.is_failure(p_job jsonb, p_before jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN CASE p_job ->> 'state'
    -- River's scheduler discards a retry whose unique key another job holds: a duplicate, not a
    -- failure. The scheduler's marker stays in the metadata if the job runs again later. So the
    -- marker means a duplicate only if the job was scheduled or retryable before, or if its previous
    -- state is unknown.
    WHEN 'discarded' THEN NOT (p_job -> 'metadata' @> '{"unique_key_conflict": "scheduler_discarded"}'
                               AND coalesce(p_before ->> 'state' IN ('scheduled', 'retryable'), true))
    -- A worker that cancels its job (river.JobCancel(err)) adds an error: a failure. A cancellation
    -- by an operator, which is no failure, sets cancel_attempted_at.
    WHEN 'cancelled' THEN NOT (p_job -> 'metadata' ? 'cancel_attempted_at')
                          AND CASE jsonb_typeof(p_job -> 'errors')
                              WHEN 'array' THEN jsonb_array_length(p_job -> 'errors') ELSE 0 END
                              > CASE jsonb_typeof(p_before -> 'errors')
                                  WHEN 'array' THEN jsonb_array_length(p_before -> 'errors') ELSE 0 END
    ELSE false
END;
COMMENT ON FUNCTION dlq.is_failure IS
    'Whether a job that ended as p_job ended as a failure. p_before is the job before it ended; '
    'null if unknown. Both are to_jsonb of rows of river_job.';

CREATE OR REPLACE FUNCTION dlq.wake() RETURNS void
LANGUAGE sql VOLATILE
RETURN pg_notify('dlq.wake', '');
COMMENT ON FUNCTION dlq.wake IS 'Notifies DLQ workers that there is work. They also poll.';

-- dlq.capture and dlq.follow contain each of their SQL statements twice:
--   - For the first job of an application's statement: in a block that catches every error (a lock
--     that is not available, a plan that cannot be made, an added constraint).
--   - For the further jobs of that statement: without a block, because each block that writes costs
--     a subtransaction id. The first job has shown that the SQL statement works.
-- These SQL statements read variables, never NEW and OLD. Postgres plans an expression on NEW for the types that the
-- columns have at that time. If a column changes its type later, the expression fails until Postgres plans it again.
-- The two copies may be planned at different times: the first job may succeed with a new plan, and the next one fail
-- with an old one. So each job is read in a block, which writes nothing. The texts below are the parts that both copies
-- share; \sf dlq.capture shows the whole function. Functions that take the job as a record, instead of the texts, cost
-- time in the application's transactions (CPU time of its session, 5,000 jobs, medians of five alternating runs,
-- Postgres 15): 1 % of one statement that discards them, 5 % of 1,000 statements that discard one each, 12 % of one
-- that retries them. Functions that take River's row type would depend on River's table.
--
-- A setting of the transaction passes the result of the first job on to the further jobs, as
-- "statement until tables":
--   statement: when the application's statement began, in microseconds
--   until:     until when capture may work on it, in microseconds; 0 to skip the further jobs
--   tables:    the tables written so far: i (inbox), f (job_facts)
DO $install$
DECLARE
    -- v_failure is dlq.is_failure as an expression on NEW and OLD.
    --
    -- v_read reads the failure, unless the job is too large, and v_entry appends it. Capture checks the time only
    -- between jobs, and copying one large job could exceed the limit. So a job is too large if it has more than 10 MB,
    -- which take 100 ms to copy, or more than 50 bytes for each microsecond left. Compressed errors and metadata count
    -- a hundred times, because copying unpacks them; args are copied as stored.
    v_failure constant text := $sql$CASE WHEN NEW.state = 'discarded'
        THEN NOT (NEW.metadata @> '{"unique_key_conflict": "scheduler_discarded"}'
            AND OLD.state IN ('scheduled', 'retryable'))
                     ELSE NEW.state = 'cancelled' AND NOT NEW.metadata ? 'cancel_attempted_at'
                         AND coalesce(cardinality(NEW.errors), 0) > coalesce(cardinality(OLD.errors), 0) END$sql$;
    v_read constant text := $sql$v_size := pg_column_size(NEW.args) + coalesce(pg_column_size(NEW.errors),
        0) + pg_column_size(NEW.metadata);
            IF v_size > 20000 AND v_until < 9223372036854775807
               AND v_size + (CASE WHEN pg_column_compression(NEW.errors) IS NULL THEN 0
                   ELSE 100 * pg_column_size(NEW.errors) END)
                          + (CASE WHEN pg_column_compression(NEW.metadata) IS NULL THEN 0
                              ELSE 100 * pg_column_size(NEW.metadata) END)
                   > least(10000000, 50 * (v_until - date_part('epoch', clock_timestamp()) * 1000000)) THEN
                v_reason := 'job ' || v_id || ' is too large';
            ELSE
                v_us := dlq.microseconds(NEW.finalized_at);
                v_failed_at := CASE WHEN v_us > 0 AND NEW.finalized_at <= now() + interval '1 day'
                    THEN NEW.finalized_at ELSE now() END;
                v_job_kind := NEW.kind;
                v_kind := v_job_kind;
                IF v_kind = 'dlqd_message' THEN
                    v_kind := coalesce(left(NEW.args ->> 'kind', 255), v_kind);
                    v_event_id := left(NEW.args ->> 'messageId', 255);
                    v_subscriber := left(NEW.args ->> 'subscriberId', 255);
                    v_source := left(NEW.args ->> 'source', 255);
                    v_ordering_key := left(NEW.args ->> 'orderingKey', 255);
                END IF;
                v_queue := NEW.queue;
                v_priority := NEW.priority;
                v_tags := NEW.tags;
                v_args := NEW.args;
                v_error := NEW.errors[cardinality(NEW.errors)] ->> 'error';
                v_errors := coalesce(to_jsonb(NEW.errors), '[]');
                v_attempt := NEW.attempt;
                v_max_attempts := NEW.max_attempts;
                v_unique_key := NEW.unique_key;
                v_unique_states := NEW.unique_states;
                v_metadata := NEW.metadata;
            END IF$sql$;
    v_entry constant text := $sql$INSERT INTO dlq.dead_letter_inbox
                    (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, subscriber_id,
                     source, ordering_key,
                     priority, tags, original_event, error_message, retry_history, retry_count, max_retries, unique_key,
                     unique_states,
                     metadata, next_retry_at, first_failed_at, last_failed_at)
                SELECT dlq.uuid_of(v_us, v_id), v_event_id, v_id, v_created_at, v_queue, v_kind, v_job_kind,
                       v_subscriber, v_source, v_ordering_key,
                       v_priority, v_tags, v_args, v_error, v_errors, v_attempt, v_max_attempts, v_unique_key,
                       v_unique_states, v_metadata, now(), v_failed_at, v_failed_at$sql$;
    -- v_marked is true if dlqd may have made or may follow this job, or if the job may have been retried just before.
    -- It only decides whether v_fact looks the job up. A marker (dlq:entry_id) proves nothing, because applications
    -- copy metadata to other jobs.
    v_marked constant text := $sql$NEW.metadata ? 'dlq:entry_id' OR cardinality(NEW.errors) > 1$sql$;
    -- v_look looks the job up in entry_jobs and job_facts. If they contain the job, it is not a new failure, and
    -- v_fact records its end, which v_end has read.
    --
    -- Under SERIALIZABLE it does not read these tables. Otherwise any other transaction that appends to a page
    -- that was read would count as a conflict, and the application's transaction could fail. It trusts the marker
    -- instead, which dlq.apply_fact checks later. If the application copied the marker from another job, the
    -- reconciler finds the failure.
    v_look constant text := $sql$IF current_setting('transaction_isolation') = 'serializable' THEN
                    v_known := v_marker;
                ELSE
                    SELECT j.entry_id, true INTO v_entry, v_known
                    FROM (SELECT e.entry_id FROM dlq.entry_jobs e WHERE e.job_id = v_id
                        AND e.job_created_at = v_created_at
                          UNION ALL SELECT NULL FROM dlq.job_facts f WHERE f.job_id = v_id
                              AND f.job_created_at = v_created_at AND f.fact = 'retried' LIMIT 1) j;
                END IF$sql$;
    v_end constant text := $sql$v_state := NEW.state;
                    v_job := CASE WHEN NEW.state <> 'completed' THEN jsonb_build_object('state', NEW.state, 'attempt',
                        NEW.attempt, 'finalized_at', NEW.finalized_at,
                        'errors', coalesce(to_jsonb(NEW.errors[cardinality(NEW.errors):]), '[]'), 'metadata',
                        NEW.metadata) END$sql$;
    v_fact constant text := $sql$INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job)
                    SELECT v_id, v_created_at, v_state, v_entry, v_job$sql$;
    -- v_retry records a retry. The entry's id follows from the job's finalized_at, except for a
    -- completed job: dlq.supersede completes jobs with a new finalized_at. For a completed job the id
    -- comes from a marker in the metadata, which dlq.apply_fact checks.
    v_retry constant text := $sql$INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id)
            SELECT v_id, v_created_at, 'retried', v_entry$sql$;
    -- v_until is the time until which capture may work on this statement: now plus the limit, or the
    -- statement's start plus half of statement_timeout, if that is earlier.
    v_until constant text := $sql$(date_part('epoch', least(clock_timestamp() + dlq.capture_limit(),
                    CASE WHEN current_setting('statement_timeout') <> '0'
                        THEN statement_timestamp() + current_setting('statement_timeout')::interval / 2
                    END)) * 1000000)::bigint$sql$;
BEGIN
    EXECUTE format($create$
CREATE OR REPLACE FUNCTION dlq.capture() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_statement    constant bigint := date_part('epoch', statement_timestamp()) * 1000000;
    v_setting      text := current_setting('dlq.capture', true);
    v_until        bigint;
    v_written      text := '';
    v_now          text;
    v_reason       text;
    v_marked       boolean;
    v_known        boolean := false;
    v_failure      boolean := false;
    v_marker       boolean;
    v_id           bigint;
    v_created_at   timestamptz;
    v_state        text;
    v_job          jsonb;
    v_entry        uuid;
    v_us           bigint;
    v_size         bigint;
    v_failed_at    timestamptz;
    v_kind         text;
    v_job_kind     text;
    v_event_id     text;
    v_subscriber   text;
    v_source       text;
    v_ordering_key text;
    v_queue        text;
    v_priority     smallint;
    v_tags         text[];
    v_args         jsonb;
    v_error        text;
    v_errors       jsonb;
    v_attempt      integer;
    v_max_attempts integer;
    v_unique_key   bytea;
    v_unique_states bit varying;
    v_metadata     jsonb;
BEGIN
    IF v_setting IS NOT NULL AND starts_with(v_setting, v_statement || ' ') THEN
        v_until := split_part(v_setting, ' ', 2);
        IF v_until = 0 THEN
            RETURN NULL;
        ELSIF v_until < 9223372036854775807 AND date_part('epoch', clock_timestamp()) * 1000000 > v_until THEN
            v_reason := 'the time limit is reached';
        ELSE
            v_written := split_part(v_setting, ' ', 3);
        END IF;
    END IF;
    v_now := v_written;

    IF v_reason IS NULL THEN
        BEGIN -- writes nothing, so it costs no subtransaction id
            IF v_until IS NULL THEN
                v_until := CASE dlq.capture_mode() WHEN 'off' THEN 0 WHEN 'strict' THEN 9223372036854775807
                    ELSE %7$s END;
            END IF;
            IF v_until > 0 THEN
                v_id := NEW.id;
                v_created_at := NEW.created_at;
                v_marked := %1$s;
                IF v_marked THEN
                    v_marker := NEW.metadata ? 'dlq:entry_id';
                END IF;
                v_failure := %5$s;
            END IF;
        EXCEPTION WHEN OTHERS THEN
            IF v_until = 9223372036854775807 THEN
                RAISE;
            END IF;
            v_reason := SQLERRM;
        END;
    END IF;

    IF v_marked AND v_reason IS NULL AND position('f' IN v_written) = 0 THEN
        BEGIN
            IF v_until < 9223372036854775807 THEN
                LOCK TABLE dlq.entry_jobs IN ACCESS SHARE MODE NOWAIT;
                LOCK TABLE dlq.job_facts IN ROW EXCLUSIVE MODE NOWAIT;
                IF row_security_active('dlq.job_facts') OR row_security_active('dlq.entry_jobs') THEN
                    RAISE EXCEPTION 'row level security is forced on job_facts or entry_jobs';
                END IF;
            END IF;
            %2$s;
            IF v_known THEN
                %3$s;
                %4$s;
                v_now := v_written || 'f';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            IF v_until = 9223372036854775807 THEN
                RAISE;
            END IF;
            v_reason := SQLERRM;
        END;
    ELSIF v_marked AND v_reason IS NULL THEN
        %2$s;
        IF v_known THEN
            BEGIN
                %3$s;
            EXCEPTION WHEN OTHERS THEN
                IF v_until = 9223372036854775807 THEN
                    RAISE;
                END IF;
                v_reason := SQLERRM;
            END;
            IF v_reason IS NULL THEN
                %4$s;
            END IF;
        END IF;
    END IF;

    IF v_failure AND v_known IS NOT TRUE AND v_reason IS NULL THEN
        BEGIN -- writes nothing, so it costs no subtransaction id
            %6$s;
        EXCEPTION WHEN OTHERS THEN
            IF v_until = 9223372036854775807 THEN
                RAISE;
            END IF;
            v_reason := SQLERRM;
        END;
        IF v_reason IS NOT NULL THEN
            NULL;
        ELSIF position('i' IN v_written) > 0 THEN
            %8$s;
        ELSE
            BEGIN
                IF v_until < 9223372036854775807 THEN
                    LOCK TABLE ONLY dlq.dead_letter_queue IN ACCESS SHARE MODE NOWAIT;
                    LOCK TABLE dlq.dead_letter_inbox IN ROW EXCLUSIVE MODE NOWAIT;
                    IF row_security_active('dlq.dead_letter_inbox') THEN
                        RAISE EXCEPTION 'row level security is forced on the inbox';
                    END IF;
                END IF;
                %8$s;
                v_now := v_now || 'i';
            EXCEPTION WHEN OTHERS THEN
                IF v_until = 9223372036854775807 THEN
                    RAISE;
                END IF;
                v_reason := SQLERRM;
            END;
        END IF;
    END IF;

    IF v_reason IS NOT NULL THEN
        PERFORM set_config('dlq.capture', v_statement || ' 0', true);
        RAISE WARNING 'dlqd: capture skips the rest of this statement (%%): its jobs end, and dlqd''s reconciler files those that failed', v_reason;
    ELSIF v_now <> v_written OR v_setting IS NULL OR NOT starts_with(v_setting, v_statement || ' ') THEN
        PERFORM set_config('dlq.capture', v_statement || ' ' || v_until || ' ' || v_now, true);
    END IF;
    RETURN NULL;
END
$body$$create$, v_marked, v_look, v_end, v_fact, v_failure, v_read, v_until, v_entry);

    EXECUTE format($create$
CREATE OR REPLACE FUNCTION dlq.follow() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_statement  constant bigint := date_part('epoch', statement_timestamp()) * 1000000;
    v_setting    text := current_setting('dlq.follow', true);
    v_further    boolean := v_setting IS NOT NULL AND starts_with(v_setting, v_statement || ' ');
    v_until      bigint;
    v_reason     text;
    v_id         bigint;
    v_created_at timestamptz;
    v_entry      uuid;
BEGIN
    IF v_further THEN
        v_until := split_part(v_setting, ' ', 2);
        IF v_until = 0 THEN
            RETURN NULL;
        END IF;
    END IF;
    BEGIN -- writes nothing, so it costs no subtransaction id
        IF OLD.state = 'completed' AND NOT OLD.metadata ?| '{dlq:done_by,dlq:entry_id}' THEN
            RETURN NULL; -- neither a redelivery, nor a job that dlqd completed for a resolved entry
        END IF;
        IF v_until IS NULL THEN
            v_until := CASE dlq.capture_mode() WHEN 'off' THEN 0 ELSE %2$s END;
        END IF;
        IF v_until > 0 THEN
            v_id := NEW.id;
            v_created_at := NEW.created_at;
            v_entry := CASE OLD.state WHEN 'completed'
                THEN dlq.to_uuid(coalesce(OLD.metadata #>> '{dlq:done,entry}', OLD.metadata ->> 'dlq:entry_id'))
                ELSE dlq.entry_id(NEW.id, OLD.finalized_at) END;
        END IF;
    EXCEPTION WHEN OTHERS THEN
        v_reason := SQLERRM;
    END;
    IF v_reason IS NOT NULL OR v_until = 0 THEN
        NULL;
    ELSIF NOT v_further THEN
        BEGIN
            LOCK TABLE dlq.job_facts IN ROW EXCLUSIVE MODE NOWAIT;
            IF row_security_active('dlq.job_facts') THEN
                RAISE EXCEPTION 'row level security is forced on job_facts';
            END IF;
            %1$s;
        EXCEPTION WHEN OTHERS THEN
            v_reason := SQLERRM;
        END;
    ELSIF date_part('epoch', clock_timestamp()) * 1000000 > v_until THEN
        v_reason := 'the time limit is reached';
    ELSE
        %1$s;
        RETURN NULL;
    END IF;
    PERFORM set_config('dlq.follow', v_statement || ' ' || CASE WHEN v_reason IS NULL THEN v_until ELSE 0 END, true);
    IF v_reason IS NOT NULL THEN
        RAISE WARNING 'dlqd: retries of this statement are not followed (%%)', v_reason;
    END IF;
    RETURN NULL;
END
$body$$create$, v_retry, v_until);
END
$install$;
COMMENT ON FUNCTION dlq.capture IS
    'Trigger dlq_capture on river_job: appends a job''s failure to the inbox, or the end of a '
    'redelivery to job_facts, in the transaction that ends the job. Unless capture is strict, it '
    'waits for no lock and raises no error. "dlqd detach" removes it, and so does DROP FUNCTION ... '
    'CASCADE.';
COMMENT ON FUNCTION dlq.follow IS
    'Trigger dlq_follow on river_job: appends a retry made outside dlqd (from discarded, cancelled '
    'or completed to available) to job_facts. "dlqd detach" removes it, and so does DROP FUNCTION '
    '... CASCADE.';
