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

-- name: AgeOut :one
SELECT dlq.age_out(@periods::jsonb, @max_entries::integer, @now::timestamptz)::integer AS entries;

-- name: ExpiredPartitions :many
SELECT p.partition_name::text AS name, p.of_audit::boolean AS of_audit FROM dlq.expired_partitions(@periods::jsonb, @audit::interval, @now::timestamptz) p;

-- name: DropPartition :exec
SELECT dlq.drop_partition(@name::text, sqlc.narg('archived_rows')::bigint, (sqlc.narg('hash')::text)::numeric);

-- name: ExpiredEntries :many
SELECT e.id::uuid AS id FROM dlq.expired_entries(@periods::jsonb, @max_entries::integer, @now::timestamptz) e (id);

-- name: DeleteEntries :one
SELECT dlq.delete_entries(@ids::uuid[])::integer AS entries;

-- name: RestoreEntries :one
SELECT dlq.restore_entries(@entries::jsonb, @until::timestamptz, @actor::text, sqlc.narg('note')::text)::integer AS entries;

-- name: LockRetention :one
-- One process at a time keeps retention.
SELECT pg_try_advisory_xact_lock(hashtextextended('dlq.retention', 0)) AS locked;

-- name: WaitForRetention :exec
-- Until the transaction ends, no process keeps retention.
SELECT pg_advisory_xact_lock(hashtextextended('dlq.retention', 0));

-- name: LiveJobs :many
-- Jobs that have not ended, by queue and state; and how many of them are held.
SELECT j.queue, j.state::text AS state, count(*) AS jobs, count(*) FILTER (WHERE j.state = 'scheduled' AND j.metadata ? 'dlq:held') AS held
FROM river.river_job j
WHERE j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
GROUP BY j.queue, j.state;
