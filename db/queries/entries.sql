-- name: EntriesByEvent :many
-- A message's dead letters, newest first.
SELECT id, status FROM dlq.dead_letter_queue WHERE event_id = @event_id::text ORDER BY id DESC LIMIT 10;

-- name: OpenEvents :many
-- Which of these messages have an open dead letter.
SELECT event_id::text AS event_id, id, status FROM dlq.dead_letter_open WHERE event_id = ANY (@event_ids::text[]);

-- name: EntrySameContent :one
-- Whether a dead letter's message equals the given one, as jsonb.
SELECT river_job_id, (original_event = @args::jsonb)::boolean AS same FROM dlq.dead_letter_open WHERE id = @id;

-- name: Backlog :many
-- Open entries by status, queue and class, from the index dead_letter_open_backlog alone.
SELECT status, queue, coalesce(error_class, 'undecided')::text AS error_class, count(*) AS entries
FROM dlq.dead_letter_open
GROUP BY status, queue, error_class
ORDER BY status, queue, error_class;

-- name: MovesLastDay :one
-- Moves of the last 24 hours, exact: the rollup, and the moves that it does not count yet.
SELECT coalesce(sum(m.captured), 0)::bigint AS captured, coalesce(sum(m.redelivered), 0)::bigint AS redelivered, coalesce(sum(m.resolved), 0)::bigint AS resolved,
       coalesce(sum(m.failed), 0)::bigint AS failed, coalesce(sum(m.archived), 0)::bigint AS archived
FROM (
    SELECT r.captured, r.redelivered, r.resolved, r.failed, r.archived
    FROM dlq.rollup_flow r WHERE r.step = 'minute' AND r.scope = 'all' AND r.bucket >= now() - interval '24 hours'
    UNION ALL
    SELECT count(*) FILTER (WHERE t.from_status IS NULL), count(*) FILTER (WHERE t.to_status = 'dlq_processing' AND t.from_status <> 'dlq_processing'),
           count(*) FILTER (WHERE t.to_status = 'dlq_resolved' AND t.from_status <> 'dlq_resolved'),
           count(*) FILTER (WHERE t.to_status = 'dlq_failed' AND t.from_status <> 'dlq_failed'),
           count(*) FILTER (WHERE t.to_status = 'dlq_archived' AND t.from_status <> 'dlq_archived')
    FROM dlq.rollup_state s CROSS JOIN LATERAL (SELECT b.from_status, b.to_status FROM dlq.moves_between(s.snapshot, txid_current_snapshot(), s.since) b) t
) m;

-- name: OldestOpen :one
SELECT created_at FROM dlq.dead_letter_open ORDER BY id LIMIT 1;

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
