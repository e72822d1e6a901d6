-- name: EntriesByEvent :many
-- A message's dead letters, newest first.
SELECT id, status FROM dlq.dead_letter_queue WHERE event_id = @event_id::text ORDER BY id DESC LIMIT 10;

-- name: OpenEvents :many
-- Which of these messages have an open dead letter.
SELECT event_id::text AS event_id, id, status FROM dlq.dead_letter_open WHERE event_id = ANY (@event_ids::text[]);

-- name: EntrySameContent :one
-- Whether a dead letter's message equals the given one, as jsonb.
SELECT river_job_id, (original_event = @args::jsonb)::boolean AS same FROM dlq.dead_letter_open WHERE id = @id;

-- name: MessageJob :one
-- The job of a message, by River's unique key. same: whether its content is that of args.
SELECT id, state::text AS state, attempt, max_attempts, created_at, scheduled_at, finalized_at, args, metadata
FROM river.river_job
WHERE unique_key = @unique_key::bytea AND unique_states IS NOT NULL
  AND river.river_job_state_in_bitmask(unique_states, state);

-- name: JobsSameContent :many
-- Whether the args of each job equal the given ones, as jsonb.
SELECT j.id, (j.args = d.args)::boolean AS same
FROM (SELECT unnest(@ids::bigint[]) AS id, unnest(@args::jsonb[]) AS args) d
JOIN river.river_job j ON j.id = d.id;

-- name: InsertOrdered :exec
-- Places in the order of the arrays.
INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
SELECT o.queue, o.ordering_key, o.job_id, o.created_at
FROM (SELECT unnest(@queues::text[]) AS queue, unnest(@keys::text[]) AS ordering_key, unnest(@jobs::bigint[]) AS job_id, unnest(@created_ats::timestamptz[]) AS created_at, generate_series(1, cardinality(@jobs::bigint[])) AS n) o
ORDER BY o.n;
