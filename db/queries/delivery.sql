-- name: ReleaseHeld :one
SELECT dlq.release_held(@queues::text[], @max_jobs::integer, @horizon::interval, @held::text)::integer AS released;

-- name: OrderPredecessor :one
SELECT coalesce(dlq.order_predecessor(@queue::text, @key::text, @job::bigint, @created_at::timestamptz),
    0)::bigint AS job;

-- name: CompleteOrdered :one
SELECT dlq.complete_ordered(@queue::text, @key::text, @job::bigint, @created_at::timestamptz,
    @attempt::integer)::boolean
    AS completed;

-- name: AttemptRuns :one
-- AttemptRuns returns whether an attempt at a job still runs, by River's table: another process may
-- have put the job back (dlq.rescue_messages).
SELECT EXISTS (
    SELECT FROM river.river_job j
    WHERE j.id = @job AND j.created_at = @created_at AND j.state = 'running' AND j.attempt = @attempt::integer
)::boolean AS runs;

-- name: LockAttempts :many
-- LockAttempts locks the given jobs that a client runs, and returns those that are at the given
-- attempt. Attempt 0 matches any.
SELECT l.id
FROM (
    SELECT j.id, j.attempt FROM river.river_job j
    WHERE j.id = ANY (@jobs::bigint[]) AND j.state = 'running'
      AND j.attempted_by[cardinality(j.attempted_by)] = @client::text
    ORDER BY j.id FOR NO KEY UPDATE
) l
JOIN (SELECT unnest(@jobs::bigint[]) AS id, unnest(@attempts::int[]) AS attempt) r ON r.id = l.id
WHERE r.attempt IN (0, l.attempt);

-- name: ForgetOrdered :one
SELECT dlq.forget_ordered()::integer AS forgotten;

-- name: WakeOrdered :one
SELECT w.queue::text AS queue, w.ordering_key::text AS ordering_key, w.woken::integer AS woken
FROM dlq.wake_ordered(@max_keys::integer, @queue::text, @ordering_key::text) w;

-- name: LiveJobs :many
-- LiveJobs counts jobs that have not ended, by queue and state, and how many of them are held.
SELECT j.queue, j.state::text AS state, count(*) AS jobs,
    count(*) FILTER (WHERE j.state = 'scheduled' AND j.metadata ? 'dlq:held') AS held
FROM river.river_job j
WHERE j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
GROUP BY j.queue, j.state;
