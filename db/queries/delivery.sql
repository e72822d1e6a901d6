-- name: ReleaseHeld :one
SELECT dlq.release_held(@queues::text[], @max_jobs::integer, @horizon::interval, @held::text)::integer AS released;

-- name: OrderPredecessor :one
SELECT coalesce(dlq.order_predecessor(@queue::text, @key::text, @job::bigint, @created_at::timestamptz), 0)::bigint AS job;

-- name: OrderDone :exec
SELECT dlq.order_done(@queue::text, @key::text, @job::bigint, @created_at::timestamptz);

-- name: ForgetOrdered :one
SELECT dlq.forget_ordered()::integer AS forgotten;

-- name: LiveJobs :many
-- Jobs that have not ended, by queue and state; and how many of them are held.
SELECT j.queue, j.state::text AS state, count(*) AS jobs, count(*) FILTER (WHERE j.state = 'scheduled' AND j.metadata ? 'dlq:held') AS held
FROM river.river_job j
WHERE j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
GROUP BY j.queue, j.state;
