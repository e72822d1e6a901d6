-- name: RecordHeartbeat :one
-- RecordHeartbeat records that a process is alive. Each serving process calls it every few seconds, also while the
-- process stops, because its jobs may still run. It returns the database's time, and deletes the rows of processes
-- whose last heartbeat is older than @forget_after.
WITH deleted AS (
    DELETE FROM dlq.processes WHERE seen_at < now() - @forget_after::interval AND id <> @id
)
INSERT INTO dlq.processes (id, name, version, parts, queues)
VALUES (@id, @name, @version, @parts::text[], @queues::text[])
ON CONFLICT (id) DO UPDATE SET name = excluded.name, version = excluded.version, parts = excluded.parts,
    queues = CASE WHEN processes.stopped_at IS NULL THEN excluded.queues ELSE processes.queues END, seen_at = now()
RETURNING seen_at;

-- name: StopProcess :exec
UPDATE dlq.processes SET stopped_at = now() WHERE id = @id AND stopped_at IS NULL;

-- name: WorkedQueues :many
-- WorkedQueues returns each queue whose messages a dlqd process delivers or has recently delivered. live is true if a
-- process delivers them now.
SELECT q.queue::text AS queue,
    bool_or(p.stopped_at IS NULL AND p.seen_at > now() - @live_for::interval)::boolean AS live
FROM dlq.processes p CROSS JOIN unnest(p.queues) q (queue)
WHERE p.seen_at > now() - @away_for::interval
GROUP BY q.queue;

-- name: SharedQueues :one
SELECT dlq.shared_queues(@queues::text[])::text[] AS queues;

-- name: TakeRescue :one
SELECT dlq.take_duty('rescue', @holder::uuid, @during::interval)::boolean AS taken;

-- name: RescueMessages :one
SELECT r.retried::integer AS retried, r.ended::integer AS ended
FROM dlq.rescue_messages(@seen_before::timestamptz, @max_jobs::integer) r;
