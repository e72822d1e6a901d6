-- name: EntriesByEvent :many
-- EntriesByEvent returns a message's dead letters, newest first.
SELECT id, status FROM dlq.dead_letter_queue WHERE event_id = @event_id::text
    AND dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope()))) ORDER BY id DESC LIMIT 10;

-- name: OpenEvents :many
-- OpenEvents returns the open dead letters of these messages. Of an entry in the inbox, the job
-- usually still exists, and its unique key shows the duplicate. Only if the inbox has an entry older
-- than 12 hours, whose job River may have deleted, does OpenEvents read the inbox, which has no
-- index for this query.
SELECT e.event_id::text AS event_id, e.id, e.status FROM dlq.dead_letter_queue e WHERE e.stage = 'open'
    AND e.event_id = ANY (@event_ids::text[])
UNION ALL
SELECT e.event_id::text, e.id, e.status FROM dlq.dead_letter_queue e
WHERE e.stage = 'inbox' AND e.event_id = ANY (@event_ids::text[])
  AND EXISTS (SELECT FROM dlq.dead_letter_queue o WHERE o.stage = 'inbox'
      AND o.id < dlq.first_id(now() - interval '12 hours'));

-- name: CompareEntry :one
-- CompareEntry returns whether a dead letter's message equals the given one as jsonb: the
-- payload's formatting is ignored.
SELECT river_job_id, (original_event - 'payloadText' = @args::jsonb)::boolean AS same FROM dlq.dead_letter_queue
WHERE id = @id AND stage IN ('inbox', 'open');

-- name: MessageJob :one
-- MessageJob returns the job of a message, by River's unique key.
SELECT id, state::text AS state, attempt, max_attempts, created_at, scheduled_at, finalized_at, args, metadata
FROM river.river_job
WHERE unique_key = @unique_key::bytea AND unique_states IS NOT NULL
  AND river.river_job_state_in_bitmask(unique_states, state)
  AND dlq.in_patterns(queue, args ->> 'kind', (SELECT dlq.scope_patterns(dlq.scope())));

-- name: CompareJobs :many
-- CompareJobs returns whether the args of each job equal the given ones as jsonb: a payload's
-- formatting is ignored.
SELECT j.id, (j.args - 'payloadText' = d.args)::boolean AS same
FROM (SELECT unnest(@ids::bigint[]) AS id, unnest(@args::jsonb[]) AS args) d
JOIN river.river_job j ON j.id = d.id;

-- name: InsertOrdered :exec
-- InsertOrdered assigns places in the order of the arrays.
INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
SELECT o.queue, o.ordering_key, o.job_id, o.created_at
FROM (SELECT unnest(@queues::text[]) AS queue, unnest(@keys::text[]) AS ordering_key, unnest(@jobs::bigint[]) AS job_id,
    unnest(@created_ats::timestamptz[]) AS created_at, generate_series(1, cardinality(@jobs::bigint[])) AS n) o
ORDER BY o.n;
