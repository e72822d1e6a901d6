-- name: ClaimDue :many
-- ClaimDue locks due entries that no other session has locked, ordered by priority and then by the time since they are
-- due. It reads one range of the index dead_letter_open_due for each priority: a single scan over all priorities would
-- pass every urgent entry that is not due yet. Large columns that only a decision needs (the error's message, stack
-- trace and context and, if rules read it, the message) are read only for undecided entries.
--
-- Unfiled and DecidedEntries have the same columns, so that Go can convert their rows. They do not share a view,
-- because a view has no parameters and would read the error of each entry. They do not share a function, because FOR
-- UPDATE does not lock rows that come from a function.
SELECT d.id, d.queue, d.kind, coalesce(d.source, '')::text AS source,
       CASE WHEN d.strategy IS NULL THEN coalesce(dlq.judged_message(d.error_message), '')
           ELSE '' END::text AS error_message,
       coalesce(d.error_type, '')::text AS error_type, coalesce(d.error_code, '')::text AS error_code,
       coalesce(d.error_title, '')::text AS error_title, coalesce(d.error_class, '')::text AS error_class,
       coalesce(d.reported_class, '')::text AS reported_class,
       CASE WHEN d.strategy IS NULL THEN coalesce(dlq.trace_ends(d.error_stack_trace), '')
           ELSE '' END::text AS error_stack_trace,
       CASE WHEN d.strategy IS NULL THEN dlq.judged_context(d.error_context) END::jsonb AS error_context,
       d.dlq_retry_count, coalesce(d.strategy::text, '')::text AS strategy, coalesce(d.rule, '')::text AS rule,
       coalesce(d.waiting_for, '')::text AS waiting_for,
       d.next_retry_at, coalesce(d.ordering_key, '')::text AS ordering_key, d.last_failed_at,
       d.job_kind, d.captured_by, d.max_retries, coalesce(d.fingerprint, '')::text AS fingerprint,
       CASE WHEN d.strategy IS NULL THEN dlq.rescues(d.metadata) ELSE 0 END::integer AS rescues,
       CASE WHEN d.strategy IS NULL AND @read_messages::boolean
           THEN dlq.judged_event(coalesce(d.edited_event, d.original_event)) END::jsonb AS message
FROM (VALUES (1), (2), (3), (4)) AS p (priority)
CROSS JOIN LATERAL (
    SELECT e.*
    FROM dlq.dead_letter_open e
    WHERE e.status = 'dlq_pending' AND e.waiting_for IS DISTINCT FROM 'automatic' AND e.priority = p.priority
        AND e.next_retry_at <= coalesce(sqlc.narg('now')::timestamptz, now())
    ORDER BY e.next_retry_at, e.id
    LIMIT @max_entries::integer
    FOR UPDATE SKIP LOCKED
) d
LIMIT @max_entries::integer;

-- name: ClaimUndecided :many
-- ClaimUndecided locks the given entries that are still pending and undecided, except entries that have failed again
-- since they were read, that are observed, or that another session has locked.
SELECT e.id FROM dlq.dead_letter_open e
JOIN (SELECT unnest(@ids::uuid[]) AS id, unnest(@last_failed_ats::timestamptz[]) AS last_failed_at) j ON e.id = j.id
    AND e.last_failed_at = j.last_failed_at
WHERE e.status = 'dlq_pending' AND e.strategy IS NULL AND e.waiting_for IS DISTINCT FROM 'automatic'
FOR UPDATE OF e SKIP LOCKED;

-- name: Unfiled :many
-- Unfiled describes failures in the inbox after the id @after that no other worker is filing, the earliest first. The
-- planner decides outside of transactions: the locks of Unfiled end with its own transaction, and ClaimUnfiled locks
-- the rows again. The columns are those of ClaimDue.
SELECT i.id, i.queue, i.kind, coalesce(i.source, '')::text AS source,
       coalesce(dlq.judged_message(f.error_message), '')::text AS error_message,
       coalesce(f.error_type, '')::text AS error_type, coalesce(f.error_code, '')::text AS error_code,
       coalesce(f.error_title, '')::text AS error_title, ''::text AS error_class,
       coalesce(f.error_class, '')::text AS reported_class,
       coalesce(dlq.trace_ends(f.error_stack_trace), '')::text AS error_stack_trace,
       dlq.judged_context(f.error_context)::jsonb AS error_context,
       i.dlq_retry_count, ''::text AS strategy, ''::text AS rule, ''::text AS waiting_for,
       i.next_retry_at, coalesce(i.ordering_key, '')::text AS ordering_key, i.last_failed_at,
       i.job_kind, i.captured_by, i.max_retries, ''::text AS fingerprint, dlq.rescues(i.metadata)::integer AS rescues,
       CASE WHEN @read_messages::boolean THEN dlq.judged_event(i.original_event) END::jsonb AS message
FROM dlq.dead_letter_inbox i
CROSS JOIN LATERAL dlq.describe_failure(i.retry_history, i.metadata, i.retry_count, i.last_failed_at) f
WHERE i.id > @after::uuid AND i.id <> ALL (@refused::uuid[])
ORDER BY i.id
LIMIT @max_entries::integer
FOR KEY SHARE OF i SKIP LOCKED;

-- name: HasUnfiled :one
SELECT dlq.has_unfiled(@after::uuid)::boolean AS has;

-- name: RescuedTogether :many
-- RescuedTogether returns, for each entry, the number of other jobs of the application that River's rescuer discarded
-- together with the entry's job. The jobs that one batch of the rescuer discards have the same finalized_at. At most
-- 1,000 of them are counted.
WITH entries AS MATERIALIZED (
    SELECT e.id, e.river_job_id, e.job_created_at, e.last_failed_at FROM dlq.dead_letter_queue e
    WHERE e.id = ANY (@ids::uuid[]) AND e.stage IN ('inbox', 'open')
), rescues AS (
    SELECT t.at, l.jobs
    FROM (SELECT DISTINCT e.last_failed_at AS at FROM entries e) t
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM river.river_job j
            WHERE j.state = 'discarded' AND j.finalized_at = t.at AND j.kind <> 'dlqd_message'
                AND j.errors[cardinality(j.errors)] ->> 'error' LIKE 'Stuck job rescued by %'
            LIMIT 1000) o
    ) l
)
SELECT e.id, greatest(l.jobs - (SELECT count(*) FROM (SELECT e.river_job_id AS id, e.job_created_at AS created_at UNION
    SELECT m.job_id, m.job_created_at FROM dlq.entry_jobs m WHERE m.entry_id = e.id) own
                              JOIN river.river_job j ON j.id = own.id AND j.created_at = own.created_at
                                  AND j.state = 'discarded' AND j.finalized_at = e.last_failed_at),
                                      0)::integer AS others
FROM entries e JOIN rescues l ON l.at = e.last_failed_at;

-- name: ClaimUnfiled :many
SELECT i.id FROM dlq.dead_letter_inbox i WHERE i.id = ANY (@ids::uuid[]) ORDER BY i.id FOR UPDATE SKIP LOCKED;

-- name: FileDecided :one
-- FileDecided files claimed rows of the inbox with the planner's decisions, and returns the filed ones.
SELECT dlq.file_as(@ids::uuid[], @actor::text, @config_version::text, @statuses::text[], @strategies::text[],
    @error_classes::text[], @rules::text[], @fingerprints::text[],
                   @next_retry_ats::timestamptz[], @waiting_fors::text[], @max_retries::integer[],
                   @priorities::smallint[], @tags::jsonb[], @assignees::text[], @reasons::text[])::uuid[] AS filed;

-- name: FileRepeats :one
-- FileRepeats removes claimed rows that do not become entries from the inbox (see dlq.file_repeats).
SELECT dlq.file_repeats(@ids::uuid[], false)::uuid[] AS ids;

-- name: FileUndecided :one
SELECT dlq.file(@ids::uuid[])::integer AS filed;

-- name: SetMoves :one
-- SetMoves makes the next statement write the audit rows of these moves with one insert. It returns false if that is
-- not possible. If it returns true, the caller calls ClearMoves after that statement.
SELECT dlq.set_moves(jsonb_build_object('actor', @actor::text, 'note', nullif(@note::text, ''), 'reasons',
    (SELECT jsonb_object_agg(r.id, r.reason)
     FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@reasons::text[]) AS reason) r)))::boolean AS set;

-- name: ClearMoves :exec
SELECT dlq.set_moves(NULL);

-- name: Decide :exec
-- Decide writes the planner's decisions for claimed entries: pending until a time, or manual.
UPDATE dlq.dead_letter_open e SET
    status = d.status::dlq.dead_letter_status,
    strategy = d.strategy::dlq.strategy,
    error_class = d.error_class,
    rule = d.rule,
    fingerprint = d.fingerprint,
    next_retry_at = d.next_retry_at,
    waiting_for = nullif(d.waiting_for, ''),
    dlq_max_retries = coalesce(nullif(d.max_retries, 0), e.dlq_max_retries),
    priority = coalesce(nullif(d.priority, 0), e.priority),
    tags = CASE WHEN d.tags = '[]' THEN e.tags
        ELSE ARRAY(SELECT DISTINCT t FROM unnest(e.tags || ARRAY(SELECT jsonb_array_elements_text(d.tags))) t) END,
    assigned_to = coalesce(e.assigned_to, (SELECT m.owner FROM dlq.group_marks m WHERE m.queue = e.queue
        AND m.fingerprint = d.fingerprint), nullif(d.assignee, '')),
    config_version = @config_version::text,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason, 'note', nullif(@note::text, ''))
FROM (
    SELECT unnest(@ids::uuid[]) AS id, unnest(@statuses::text[]) AS status,
           unnest(@waiting_fors::text[]) AS waiting_for,
           unnest(@max_retries::integer[]) AS max_retries, unnest(@priorities::smallint[]) AS priority,
           unnest(@tags::jsonb[]) AS tags, unnest(@assignees::text[]) AS assignee,
           unnest(@strategies::text[]) AS strategy,
           unnest(@error_classes::text[]) AS error_class, unnest(@rules::text[]) AS rule,
           unnest(@fingerprints::text[]) AS fingerprint, unnest(@next_retry_ats::timestamptz[]) AS next_retry_at,
           unnest(@reasons::text[]) AS reason
) d
WHERE e.id = d.id AND e.status IN ('dlq_pending', 'dlq_manual');

-- name: Postpone :exec
-- Postpone makes entries wait until a later time or for something else. It sets a missing class or rule, because
-- waiting entries are grouped by both (WaitingGroups). These are missing, for example, if an operator parked and
-- unparked an entry before a worker decided it: the entry has the rule unparked and no class.
UPDATE dlq.dead_letter_open e SET
    error_class = coalesce(e.error_class, 'unknown'),
    rule = coalesce(e.rule, 'none'),
    next_retry_at = d.next_retry_at,
    waiting_for = nullif(d.waiting_for, ''),
    config_version = @config_version::text,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason)
FROM (
    SELECT unnest(@ids::uuid[]) AS id, unnest(@waiting_fors::text[]) AS waiting_for,
        unnest(@next_retry_ats::timestamptz[]) AS next_retry_at, unnest(@reasons::text[]) AS reason
) d
WHERE e.id = d.id AND e.status = 'dlq_pending';

-- name: Park :many
-- Park parks entries that need an operator. Each entry has its own reason.
UPDATE dlq.dead_letter_queue e SET
    status = 'dlq_manual',
    strategy = 'manual',
    parked_by = @actor::text,
    config_version = @config_version::text,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason, 'detail',
        CASE WHEN d.refusal <> '' THEN jsonb_build_object('refusal', d.refusal) END)
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@reasons::text[]) AS reason, unnest(@refusals::text[]) AS refusal) d
WHERE e.id = d.id AND e.status = 'dlq_pending' AND e.stage IN ('inbox', 'open')
RETURNING e.id, e.queue, e.kind, coalesce(e.error_class, '')::text AS class, coalesce(e.rule, '')::text AS rule,
    coalesce(e.fingerprint, '')::text AS fingerprint;

-- name: ParkByRule :many
-- ParkByRule parks entries because of a rule such as single-attempt, although the strategy of their
-- class would redeliver them.
UPDATE dlq.dead_letter_open e SET
    status = 'dlq_manual',
    strategy = 'manual',
    rule = d.rule,
    config_version = @config_version::text,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason)
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@rules::text[]) AS rule, unnest(@reasons::text[]) AS reason) d
WHERE e.id = d.id AND e.status = 'dlq_pending'
RETURNING e.id, e.queue, e.kind, coalesce(e.error_class, '')::text AS class, coalesce(e.rule, '')::text AS rule,
    coalesce(e.fingerprint, '')::text AS fingerprint;

-- name: OpenPage :many
-- OpenPage returns a page of the entries that dlqd may expire (dlq.expire_stale).
SELECT e.id, e.queue, e.kind FROM dlq.dead_letter_open e
WHERE e.id > @after::uuid AND e.status IN ('dlq_pending', 'dlq_manual')
ORDER BY e.id
LIMIT @max_entries::integer;

-- name: EntryExpiries :many
SELECT e.id::uuid AS id, e.queue::text AS queue, e.kind::text AS kind, e.due_at::timestamptz AS due_at,
    e.expires_at::text AS expires_at
FROM dlq.expiries(@ids::uuid[]) e;

-- name: ExpireStale :many
SELECT e.id::uuid AS id
FROM dlq.expire_stale(@ids::uuid[], @reasons::text[], @actor::text, @config_version::text) e (id);

-- name: NextDue :one
-- NextDue returns the earliest time at which a pending entry that is not observed is due. It returns no row if there is
-- none. It takes one index probe for each priority.
SELECT d.next_retry_at::timestamptz AS next_due
FROM (VALUES (1), (2), (3), (4)) AS p (priority)
CROSS JOIN LATERAL (
    SELECT e.next_retry_at FROM dlq.dead_letter_open e
    WHERE e.status = 'dlq_pending' AND e.waiting_for IS DISTINCT FROM 'automatic' AND e.priority = p.priority
    ORDER BY e.next_retry_at
    LIMIT 1
) d
ORDER BY d.next_retry_at
LIMIT 1;

-- name: BlockedByOrder :many
-- BlockedByOrder returns which of the given entries must wait for earlier work of their ordering key.
SELECT e.id FROM dlq.dead_letter_open e
WHERE e.id = ANY (@ids::uuid[]) AND dlq.order_predecessor(e.queue, e.ordering_key, e.river_job_id,
    e.job_created_at) IS NOT NULL;

-- name: HeldByRuns :many
-- HeldByRuns returns which of the given entries a progressive replay run holds: the run has not ended, and the entry
-- failed again in it or has not been sent.
SELECT h.entry_id::uuid AS entry_id, h.run_id::uuid AS run_id FROM dlq.held_by_runs(@ids::uuid[]) h;

-- name: WaitingQueues :many
-- WaitingQueues returns queues with entries that wait for a condition. It probes the index
-- dead_letter_open_waiting once for each queue.
WITH RECURSIVE q AS (
    (SELECT e.queue FROM dlq.dead_letter_open e WHERE e.status = 'dlq_pending' AND e.waiting_for LIKE 'condition: %'
        ORDER BY e.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT e.queue FROM dlq.dead_letter_open e
            WHERE e.status = 'dlq_pending' AND e.waiting_for LIKE 'condition: %' AND e.queue > q.queue
            ORDER BY e.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
)
SELECT q.queue::text AS queue FROM q WHERE q.queue IS NOT NULL;

-- name: WaitingGroups :many
-- WaitingGroups returns the combinations of kind, class and rule of a queue's entries that wait for a condition.
-- Entries with the same combination have the same conditions. It probes the index dead_letter_open_waiting once for
-- each combination.
WITH RECURSIVE g AS (
    (SELECT e.kind, e.error_class, e.rule FROM dlq.dead_letter_open e
     WHERE e.status = 'dlq_pending' AND e.waiting_for LIKE 'condition: %' AND e.queue = @queue::text
     ORDER BY e.kind, e.error_class, e.rule LIMIT 1)
    UNION ALL
    SELECT n.kind, n.error_class, n.rule
    FROM g CROSS JOIN LATERAL (
        SELECT e.kind, e.error_class, e.rule FROM dlq.dead_letter_open e
        WHERE e.status = 'dlq_pending' AND e.waiting_for LIKE 'condition: %' AND e.queue = @queue::text
            AND (e.kind, e.error_class, e.rule) > (g.kind, g.error_class, g.rule)
        ORDER BY e.kind, e.error_class, e.rule LIMIT 1) n
)
SELECT g.kind::text AS kind, g.error_class::text AS error_class, g.rule::text AS rule FROM g LIMIT @most::integer;

-- name: ClaimWaiting :many
-- ClaimWaiting locks the most urgent and then the oldest entries of the given groups.
SELECT e.id, e.queue, e.kind, coalesce(e.error_class, '')::text AS error_class, coalesce(e.rule, '')::text AS rule,
       e.job_kind, e.captured_by, e.max_retries
FROM (
    SELECT w.id
    FROM (SELECT unnest(@kinds::text[]) AS kind, unnest(@error_classes::text[]) AS error_class,
        unnest(@rules::text[]) AS rule) g
    CROSS JOIN LATERAL (
        SELECT o.id, o.priority FROM dlq.dead_letter_open o
        WHERE o.status = 'dlq_pending' AND o.waiting_for LIKE 'condition: %' AND o.queue = @queue::text
            AND o.kind = g.kind AND o.error_class = g.error_class AND o.rule = g.rule
        ORDER BY o.priority, o.id
        LIMIT @max_entries::integer
    ) w
    ORDER BY w.priority, w.id
    LIMIT @max_entries::integer
) first
JOIN dlq.dead_letter_open e ON e.id = first.id
WHERE e.status = 'dlq_pending' AND e.waiting_for LIKE 'condition: %'
ORDER BY e.priority, e.id
FOR UPDATE OF e SKIP LOCKED;

-- name: LockGate :one
-- LockGate lets one process at a time evaluate a gate.
SELECT pg_try_advisory_xact_lock(hashtextextended('dlq.gate ' || @name::text, 0)) AS locked;

-- name: Gate :one
SELECT state, probes, started_at, until FROM dlq.gates WHERE name = @name::text;

-- name: SetGate :exec
INSERT INTO dlq.gates (name, state, probes, started_at, until)
VALUES (@name::text, @state::text, @probes::uuid[], @now::timestamptz, sqlc.narg('until')::timestamptz)
ON CONFLICT (name) DO UPDATE SET state = excluded.state, probes = excluded.probes, started_at = excluded.started_at,
until = excluded.until;

-- name: DeleteGate :exec
DELETE FROM dlq.gates WHERE name = @name::text;

-- name: ProbeOutcomes :one
-- ProbeOutcomes counts the given probes of a gate: those still in progress, and those that have succeeded.
SELECT count(*) FILTER (WHERE e.status = 'dlq_processing') AS under_way,
       count(*) FILTER (WHERE e.status IN ('dlq_resolved', 'dlq_returned')) AS succeeded
FROM dlq.dead_letter_queue e WHERE e.id = ANY (@probes::uuid[]);

-- name: DecidedEntries :many
-- DecidedEntries returns a page of the pending and manual entries that rules decided and that neither an operator nor a
-- worker has parked. Reclassify decides these again. The columns are those of ClaimDue.
SELECT e.id, e.queue, e.kind, coalesce(e.source, '')::text AS source,
       coalesce(dlq.judged_message(e.error_message), '')::text AS error_message,
       coalesce(e.error_type, '')::text AS error_type, coalesce(e.error_code, '')::text AS error_code,
       coalesce(e.error_title, '')::text AS error_title, coalesce(e.error_class, '')::text AS error_class,
       coalesce(e.reported_class, '')::text AS reported_class,
       coalesce(dlq.trace_ends(e.error_stack_trace), '')::text AS error_stack_trace,
       dlq.judged_context(e.error_context)::jsonb AS error_context,
       e.dlq_retry_count, coalesce(e.strategy::text, '')::text AS strategy, coalesce(e.rule, '')::text AS rule,
       coalesce(e.waiting_for, '')::text AS waiting_for,
       e.next_retry_at, coalesce(e.ordering_key, '')::text AS ordering_key, e.last_failed_at,
       e.job_kind, e.captured_by, e.max_retries, coalesce(e.fingerprint, '')::text AS fingerprint,
       dlq.rescues(e.metadata)::integer AS rescues,
       CASE WHEN @read_messages::boolean THEN dlq.judged_event(coalesce(e.edited_event, e.original_event)) END::jsonb
           AS message
FROM dlq.dead_letter_open e
WHERE e.id > @after::uuid AND e.status IN ('dlq_pending', 'dlq_manual') AND e.strategy IS NOT NULL
    AND e.parked_by IS NULL
ORDER BY e.id
LIMIT @max_entries::integer;

-- name: ClaimDecided :many
-- ClaimDecided locks the given entries, except entries that DecidedEntries would no longer return, that have failed
-- again since, or that another session has locked. It also returns other columns that a decision may change.
SELECT e.id, e.priority, e.tags, coalesce(e.assigned_to, '')::text AS assigned_to, e.dlq_max_retries
FROM dlq.dead_letter_open e
JOIN (SELECT unnest(@ids::uuid[]) AS id, unnest(@last_failed_ats::timestamptz[]) AS last_failed_at) j ON e.id = j.id
    AND e.last_failed_at = j.last_failed_at
WHERE e.status IN ('dlq_pending', 'dlq_manual') AND e.strategy IS NOT NULL AND e.parked_by IS NULL
FOR UPDATE OF e SKIP LOCKED;

-- name: StuckGroups :many
-- StuckGroups returns failure groups (queue and fingerprint) with manual or failed entries. It probes
-- the indexes by fingerprint once for each group.
WITH RECURSIVE g AS (
    (SELECT e.queue, e.fingerprint FROM dlq.dead_letter_queue e
     WHERE e.status IN ('dlq_manual', 'dlq_failed') AND e.fingerprint IS NOT NULL
     ORDER BY e.queue, e.fingerprint LIMIT 1)
    UNION ALL
    SELECT n.queue, n.fingerprint
    FROM g CROSS JOIN LATERAL (
        SELECT e.queue, e.fingerprint FROM dlq.dead_letter_queue e
        WHERE e.status IN ('dlq_manual', 'dlq_failed') AND e.fingerprint IS NOT NULL
            AND (e.queue, e.fingerprint) > (g.queue, g.fingerprint)
        ORDER BY e.queue, e.fingerprint LIMIT 1) n
)
SELECT g.queue::text AS queue, g.fingerprint::text AS fingerprint FROM g LIMIT @most::integer;

-- name: GroupFailures :one
-- GroupFailures counts the entries of a failure group with an id of at least @since, up to 10,000. For a former group
-- it also counts entries of the groups that have its errors now.
SELECT count(*) FROM (
    SELECT FROM dlq.dead_letter_queue e
    WHERE e.queue = @queue::text AND e.fingerprint = ANY (dlq.group_names(@queue::text, @fingerprint::text))
        AND e.id >= @since::uuid LIMIT 10000) f;

-- name: JobsCompleted :one
-- JobsCompleted counts the jobs of a queue that have completed since a time, up to @most. It leaves out jobs that dlqd
-- completed because another job had done their work.
SELECT count(*) FROM (
    SELECT FROM river.river_job j
    WHERE j.state = 'completed' AND j.finalized_at >= @since::timestamptz AND j.queue = @queue::text
      AND NOT j.metadata ? 'dlq:done_by' LIMIT @most::integer) c;

-- name: ClaimStuck :many
-- ClaimStuck locks the oldest manual or failed entries of a failure group after the id @after. It leaves out entries
-- that an operator or a worker parked (parked_by), entries that failed at @before or later, and entries whose class is
-- not in @classes.
SELECT e.id, e.queue, e.kind, coalesce(e.error_class, '')::text AS error_class, coalesce(e.rule, '')::text AS rule,
       e.job_kind, e.captured_by, e.max_retries,
       dlq.rescues(e.metadata)::integer AS rescues
FROM dlq.dead_letter_queue e
WHERE e.status IN ('dlq_manual', 'dlq_failed') AND e.queue = @queue::text AND e.fingerprint = @fingerprint::text
  AND e.parked_by IS NULL AND e.last_failed_at < @before::timestamptz AND e.error_class = ANY (@classes::text[])
  AND e.id > @after::uuid
ORDER BY e.id
LIMIT @most::integer
FOR UPDATE SKIP LOCKED;

-- name: SmartGates :many
-- SmartGates returns gates of smart retry that are probing or open.
SELECT name FROM dlq.gates WHERE name LIKE 'smart:%' AND state IN ('probing', 'open');

-- name: ObservedGroups :many
-- ObservedGroups returns the queues, kinds and classes of observed entries. It probes the index
-- dead_letter_open_observed once for each group.
WITH RECURSIVE g AS (
    (SELECT e.queue, e.job_kind, e.kind, e.error_class FROM dlq.dead_letter_open e
     WHERE e.status = 'dlq_pending' AND e.waiting_for = 'automatic'
     ORDER BY e.queue, e.job_kind, e.kind, e.error_class LIMIT 1)
    UNION ALL
    SELECT n.queue, n.job_kind, n.kind, n.error_class
    FROM g CROSS JOIN LATERAL (
        SELECT e.queue, e.job_kind, e.kind, e.error_class FROM dlq.dead_letter_open e
        WHERE e.status = 'dlq_pending' AND e.waiting_for = 'automatic'
            AND (e.queue, e.job_kind, e.kind, e.error_class) > (g.queue, g.job_kind, g.kind, g.error_class)
        ORDER BY e.queue, e.job_kind, e.kind, e.error_class LIMIT 1) n
)
SELECT g.queue::text AS queue, g.job_kind::text AS job_kind, g.kind::text AS kind, g.error_class::text AS error_class
FROM g LIMIT @most::integer;

-- name: ClaimObserved :many
-- ClaimObserved locks observed entries of a queue, job kind, kind and class, the most urgent first, then the oldest. It
-- skips entries that another session has locked.
SELECT e.id, e.next_retry_at::timestamptz AS next_retry_at, coalesce(e.rule, '')::text AS rule, e.captured_by,
    e.max_retries
FROM dlq.dead_letter_open e
WHERE e.status = 'dlq_pending' AND e.waiting_for = 'automatic'
  AND e.queue = @queue::text AND e.job_kind = @job_kind::text AND e.kind = @kind::text
  AND e.error_class = @error_class::text
ORDER BY e.priority, e.id
LIMIT @max_entries::integer
FOR UPDATE SKIP LOCKED;

-- name: EntryTraces :many
-- EntryTraces returns the traces in which open entries were submitted, for the spans of their filing. It is called only
-- if traces are exported.
SELECT e.id, (e.metadata ->> 'traceparent')::text AS parent, coalesce(e.metadata ->> 'tracestate', '')::text AS state
FROM dlq.dead_letter_queue e WHERE e.id = ANY (@ids::uuid[]) AND e.stage = 'open' AND e.metadata ? 'traceparent';
