-- name: ReleaseHeld :one
SELECT dlq.release_held(@queues::text[], @max_jobs::integer, @horizon::interval)::integer AS released;

-- name: OrderPredecessor :one
SELECT coalesce(dlq.order_predecessor(@queue::text, @key::text, @job::bigint, sqlc.narg('entry')::uuid), 0)::bigint AS job;

-- name: OrderDone :exec
SELECT dlq.order_done(@queue::text, @key::text, @job::bigint, sqlc.narg('entry')::uuid);

-- name: InsertOrdered :exec
-- Places in the order of the arrays.
INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id)
SELECT o.queue, o.ordering_key, o.job_id
FROM (SELECT unnest(@queues::text[]) AS queue, unnest(@keys::text[]) AS ordering_key, unnest(@jobs::bigint[]) AS job_id, generate_series(1, cardinality(@jobs::bigint[])) AS n) o
ORDER BY o.n;

-- name: ForgetOrdered :one
SELECT dlq.forget_ordered()::integer AS forgotten;

-- name: EnforceRetention :many
SELECT r.action::text AS action, r.what::text AS what, r.entries::bigint AS entries FROM dlq.enforce_retention(@periods::jsonb, @max_entries::integer, @now::timestamptz) r;

-- name: LiveJobs :many
-- Jobs that have not ended, by queue and state; and how many of them are held.
SELECT j.queue, j.state::text AS state, count(*) AS jobs, count(*) FILTER (WHERE j.state = 'scheduled' AND j.metadata ? 'dlq:held') AS held
FROM river.river_job j
WHERE j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
GROUP BY j.queue, j.state;
