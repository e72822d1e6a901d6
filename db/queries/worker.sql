-- name: ClaimDue :many
-- The most urgent due entries, oldest first, that no other worker holds. One range of the index dead_letter_open_due
-- for each priority: a single scan over all of them would step over every urgent entry that is not due yet.
SELECT d.id, d.queue, d.error_message, d.error_type, d.error_code, d.error_class, d.error_stack_trace,
       d.dlq_retry_count, d.strategy, d.last_failed_at
FROM (VALUES (1), (2), (3), (4)) AS p (priority)
CROSS JOIN LATERAL (
    SELECT e.id, e.queue, coalesce(left(e.error_message, 8192), '')::text AS error_message, e.error_type, e.error_code, e.error_class,
           coalesce(left(e.error_stack_trace, 8192), '')::text AS error_stack_trace, e.dlq_retry_count, e.strategy, e.last_failed_at
    FROM dlq.dead_letter_open e
    WHERE e.status = 'dlq_pending' AND e.priority = p.priority AND e.next_retry_at <= coalesce(sqlc.narg('now')::timestamptz, now())
    ORDER BY e.next_retry_at, e.id
    LIMIT @max_entries::integer
    FOR UPDATE SKIP LOCKED
) d
LIMIT @max_entries::integer;

-- name: Decide :exec
-- What the planner decided of claimed entries: pending until their time comes, or a person's.
UPDATE dlq.dead_letter_queue e SET
    status = d.status::dlq.dead_letter_status,
    strategy = d.strategy::dlq.strategy,
    error_class = d.error_class,
    rule = d.rule,
    fingerprint = d.fingerprint,
    next_retry_at = d.next_retry_at,
    config_version = @config_version::text,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason)
FROM (
    SELECT unnest(@ids::uuid[]) AS id, unnest(@statuses::text[]) AS status, unnest(@strategies::text[]) AS strategy,
           unnest(@error_classes::text[]) AS error_class, unnest(@rules::text[]) AS rule,
           unnest(@fingerprints::text[]) AS fingerprint, unnest(@next_retry_ats::timestamptz[]) AS next_retry_at,
           unnest(@reasons::text[]) AS reason
) d
WHERE e.id = d.id AND e.status = 'dlq_pending';

-- name: PutOff :exec
-- Entries that were due and must wait longer.
UPDATE dlq.dead_letter_queue e SET
    next_retry_at = d.next_retry_at,
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason)
FROM (
    SELECT unnest(@ids::uuid[]) AS id, unnest(@next_retry_ats::timestamptz[]) AS next_retry_at, unnest(@reasons::text[]) AS reason
) d
WHERE e.id = d.id AND e.status = 'dlq_pending';

-- name: Park :exec
-- Entries that a worker leaves to a person, each for its own reason.
UPDATE dlq.dead_letter_queue e SET
    status = 'dlq_manual',
    strategy = 'manual',
    move = jsonb_build_object('actor', @actor::text, 'reason', d.reason)
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@reasons::text[]) AS reason) d
WHERE e.id = d.id AND e.status = 'dlq_pending';

-- name: NextDue :one
-- When the next pending entry is due; no row where none is pending. One index probe for each priority.
SELECT d.next_retry_at::timestamptz AS next_due
FROM (VALUES (1), (2), (3), (4)) AS p (priority)
CROSS JOIN LATERAL (
    SELECT e.next_retry_at FROM dlq.dead_letter_open e
    WHERE e.status = 'dlq_pending' AND e.priority = p.priority
    ORDER BY e.next_retry_at
    LIMIT 1
) d
ORDER BY d.next_retry_at
LIMIT 1;
