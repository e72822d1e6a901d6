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
-- AttemptRuns returns whether an attempt at a job still runs according to River's table. It does not if another process
-- has put the job back (dlq.rescue_messages).
SELECT EXISTS (
    SELECT FROM river.river_job j
    WHERE j.id = @job AND j.created_at = @created_at AND j.state = 'running' AND j.attempt = @attempt::integer
)::boolean AS runs;

-- name: LockAttempts :many
-- LockAttempts locks those of the given jobs that this client runs, and returns the jobs with the given created_at and
-- attempt. Attempt 0 matches any attempt.
SELECT l.id
FROM (
    SELECT j.id, j.created_at, j.attempt FROM river.river_job j
    WHERE j.id = ANY (@jobs::bigint[]) AND j.state = 'running'
      AND j.attempted_by[cardinality(j.attempted_by)] = @client::text
    ORDER BY j.id FOR NO KEY UPDATE
) l
JOIN (
    SELECT unnest(@jobs::bigint[]) AS id, unnest(@created_at::timestamptz[]) AS created_at,
        unnest(@attempts::int[]) AS attempt
) r ON r.id = l.id AND r.created_at = l.created_at
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

-- name: QueueFlow :many
-- QueueFlow returns the flow of each queue. A missing time is the epoch.
SELECT f.queue::text AS queue, coalesce(f.oldest_ready, 'epoch')::timestamptz AS oldest_ready,
    f.completed::bigint AS completed, coalesce(f.since, 'epoch')::timestamptz AS since,
    f.inserted::bigint AS inserted, f.inserted_since::timestamptz AS inserted_since
FROM dlq.queue_flow(@queues::text[]) f;

-- name: ListJobs :many
SELECT l.id::bigint AS id, l.at::timestamptz AS at, l.visible::boolean AS visible
FROM dlq.list_jobs(@queue::text, @state::text, @max_jobs::integer, sqlc.narg('after')::timestamptz,
    sqlc.narg('after_id')::bigint) l;

-- name: ShowJobs :many
-- ShowJobs returns jobs. A missing time is the epoch, and a missing id the nil UUID.
SELECT j.id::bigint AS id, j.state::text AS state, j.queue::text AS queue, coalesce(j.kind, '')::text AS kind,
    coalesce(j.message_id, '')::text AS message_id, j.priority::integer AS priority, j.attempt::integer AS attempt,
    j.max_attempts::integer AS max_attempts, j.created_at::timestamptz AS created_at,
    j.scheduled_at::timestamptz AS scheduled_at,
    coalesce(j.attempted_at, 'epoch')::timestamptz AS attempted_at,
    coalesce(j.finalized_at, 'epoch')::timestamptz AS finalized_at,
    coalesce(j.attempted_by, '')::text AS attempted_by, coalesce(j.held_for, '')::text AS held_for,
    j.cancelling::boolean AS cancelling,
    coalesce(j.entry_id, '00000000-0000-0000-0000-000000000000')::uuid AS entry_id,
    coalesce(j.errors, '[]')::jsonb AS errors,
    coalesce(j.args, 'null')::jsonb AS args
FROM dlq.show_jobs(@ids::bigint[], @everything::boolean) j;

-- name: LockJob :one
-- LockJob locks a job with the lock that River takes to change it. It returns no row if another session has locked the
-- job. has_entry: the job redelivers a dead letter, or has failed. has_order: the job is a message with an ordering
-- key.
SELECT j.state::text AS state,
    (j.metadata ? 'dlq:entry_id' OR dlq.is_failure(to_jsonb(j) - 'args'))::boolean AS has_entry,
    (j.kind = 'dlqd_message' AND coalesce(j.args ->> 'orderingKey', '') <> '')::boolean AS has_order
FROM river.river_job j WHERE j.id = @id FOR UPDATE SKIP LOCKED;

-- name: PutBackFetched :one
-- PutBackFetched makes messages of a queue available again that this River client fetched, if the answer to the fetch
-- was lost: the jobs are marked as running, and the client does not know them. The client delivers the jobs
-- @delivering, and has not fetched any other job of the queue since @fetched_before.
SELECT (b.retried + b.ended)::integer AS jobs
FROM dlq.put_back(ARRAY[@client::text], @queue::text, @delivering::bigint[], 'the answer to its fetch was lost',
    @max_jobs::integer, @fetched_before::timestamptz) b;

-- name: Clock :one
-- Clock returns the time of the database.
SELECT clock_timestamp()::timestamptz AS now;

-- name: RecordOfJob :one
-- RecordOfJob returns the record that a job redelivers. An unknown value is empty or -1.
SELECT r.entry_id::uuid AS entry_id, r.edited::boolean AS edited,
    coalesce(r.run_id, '00000000-0000-0000-0000-000000000000')::uuid AS run_id,
    (r.record).topic::text AS topic, coalesce((r.record).original_topic, '')::text AS original_topic,
    coalesce((r.record).consumer_group, '')::text AS consumer_group,
    coalesce((r.record).original_partition, -1)::integer AS original_partition,
    coalesce((r.record).original_offset, -1)::bigint AS original_offset, (r.record).at::timestamptz AS at,
    (r.record).form::text AS form, (r.record).key::bytea AS key, (r.record).value::bytea AS value,
    coalesce((r.record).header_keys, '{}')::bytea[] AS header_keys,
    coalesce((r.record).header_values, '{}')::bytea[] AS header_values
FROM dlq.record_of_job(@job::bigint, @created_at::timestamptz) r;

-- name: BeginDelivery :one
SELECT dlq.begin_delivery(@entry::uuid, @queue::text, @job::bigint, @created_at::timestamptz, @cluster::text,
    @topic::text, nullif(@consumer_group::text, ''), @content::bytea)::uuid AS id;

-- name: EndDelivery :exec
SELECT dlq.end_delivery(@id::uuid, @partition::integer, @stored_at::bigint,
    nullif(@topic_id::uuid, '00000000-0000-0000-0000-000000000000'));

-- name: AddTraffic :exec
SELECT dlq.add_traffic(@counts::jsonb);

-- name: TrafficOf :many
-- TrafficOf counts the deliveries of all processes to a destination, without deliveries of the run, by duration: before
-- counts from @since until @began, and during from @after until @until.
SELECT u.level::integer AS level, coalesce(sum(u.n) FILTER (WHERE t.at < @began::timestamptz), 0)::bigint AS before,
    coalesce(sum(u.n) FILTER (WHERE t.at >= @after::timestamptz), 0)::bigint AS during
FROM dlq.destination_traffic t CROSS JOIN LATERAL unnest(t.deliveries) WITH ORDINALITY u (n, level)
WHERE t.destination = @destination::text AND t.run_id <> @run::uuid AND t.at >= @since::timestamptz
    AND t.at < @until::timestamptz AND (t.at < @began::timestamptz OR t.at >= @after::timestamptz) AND u.n > 0
GROUP BY 1;

-- name: DestinationsOfRun :many
SELECT DISTINCT t.destination FROM dlq.destination_traffic t
WHERE t.run_id = @run::uuid AND t.at >= @since::timestamptz ORDER BY 1;

-- name: TrafficOfRun :many
-- TrafficOfRun returns the deliveries of a run to a destination by all processes, in slots that begin at @since or
-- later.
SELECT t.at, t.deliveries FROM dlq.destination_traffic t
WHERE t.destination = @destination::text AND t.run_id = @run::uuid AND t.at >= @since::timestamptz ORDER BY t.at;

-- name: JobTraffic :many
-- JobTraffic counts jobs of a period by kind and duration, without jobs of the run. It reads a sample.
SELECT t.kind::text AS kind, t.level::integer AS level, t.jobs::bigint AS jobs
FROM dlq.job_traffic(@run::uuid, @from_time::timestamptz, @until::timestamptz) t;

-- name: RunPlace :one
SELECT p.place_at::timestamptz AS place_at, p.taken_at::timestamptz AS taken_at, p.wait::float8 AS wait
FROM dlq.run_place(@run::uuid, @destination::text, sqlc.narg('at')::timestamptz, sqlc.narg('taken')::timestamptz) p;

-- name: IsProgressive :one
SELECT dlq.is_progressive(@run::uuid, sqlc.narg('entry')::uuid)::boolean AS progressive;
