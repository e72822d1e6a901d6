-- name: Breakers :many
-- Breakers returns every breaker that has ever opened.
SELECT name, state::text AS state, since, open_until, forced, probes_succeeded, probes_failed,
       probes_until::timestamptz[] AS probes_until, trouble_since, last_tried_at,
       coalesce(reason, '')::text AS reason, coalesce(changed_by, '')::text AS changed_by
FROM dlq.circuit_breakers ORDER BY name;

-- name: OpenBreaker :one
SELECT dlq.open_breaker(@name::text, @actor::text, @reason::text, sqlc.narg('for')::interval, @forced::boolean,
    @now::timestamptz)::boolean AS opened FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: ResetBreaker :one
SELECT dlq.reset_breaker(@name::text, @actor::text, @reason::text, @now::timestamptz)::boolean AS was_reset
FROM (SELECT set_config('dlq.origin', @origin::text, true) OFFSET 0) o;

-- name: TakeProbe :one
SELECT coalesce(dlq.take_probe(@name::text, @probes::integer, @open_for::interval, @actor::text,
                               @now::timestamptz, @timeout::interval), 0)::bigint AS epoch;

-- name: ReportProbe :one
SELECT coalesce(dlq.report_probe(@name::text, @epoch::bigint, @ok::boolean, @probes::integer, @success_rate::float8,
                                 @open_for::interval, @actor::text, @now::timestamptz,
                                 @until::timestamptz)::text, '')::text AS state;

-- name: LockQueueBreaker :one
-- LockQueueBreaker lets one process at a time evaluate the breaker of a River queue.
SELECT pg_try_advisory_xact_lock(hashtextextended('dlq.queue_breaker ' || @name::text, 0)) AS locked;

-- name: QueueBreaker :one
SELECT state::text AS state, since, open_until, forced, paused FROM dlq.circuit_breakers WHERE name = @name::text
FOR UPDATE;

-- name: PausedQueues :many
-- PausedQueues returns the breakers that have paused their River queue.
SELECT name FROM dlq.circuit_breakers WHERE paused;

-- name: SetPaused :exec
UPDATE dlq.circuit_breakers SET paused = @paused::boolean WHERE name = @name::text;

-- name: HalfOpenQueue :exec
UPDATE dlq.circuit_breakers SET state = 'half_open', since = @now::timestamptz, open_until = NULL, epoch = epoch + 1,
    probes_started = 0, probes_succeeded = 0, probes_failed = 0, probes_until = '{}',
    last_tried_at = @now::timestamptz, reason = 'probing', changed_by = @actor::text
WHERE name = @name::text;

-- name: ReopenQueue :exec
UPDATE dlq.circuit_breakers SET state = 'open', since = @now::timestamptz, open_until = @open_until::timestamptz,
    probes_succeeded = @succeeded::integer, probes_failed = @failed::integer, reason = @reason::text,
    changed_by = @actor::text
WHERE name = @name::text;

-- name: QueueOutcomes :one
-- QueueOutcomes counts completed jobs and failures of a River queue since @since, and running jobs whose attempt began
-- after @running_since, at most 10,000 each. A failure is a job that was discarded, a job that was cancelled without a
-- request to cancel it, or a failed attempt that River will repeat. Jobs that dlqd itself completed, because another
-- job had done their work, do not count: they say nothing about the queue.
SELECT
    (SELECT count(*) FROM (SELECT FROM river.river_job j WHERE j.state = 'completed'
        AND j.finalized_at >= @since::timestamptz AND j.queue = @queue::text
        AND NOT j.metadata ? 'dlq:done_by' LIMIT 10000) c) AS succeeded,
    (SELECT count(*) FROM (SELECT FROM river.river_job j WHERE j.state IN ('discarded', 'cancelled')
        AND j.finalized_at >= @since::timestamptz AND j.queue = @queue::text
        AND NOT j.metadata ? 'cancel_attempted_at' LIMIT 10000) d)
    + (SELECT count(*) FROM (SELECT FROM river.river_job j WHERE j.state = 'retryable' AND j.queue = @queue::text
        AND j.attempted_at >= @since::timestamptz LIMIT 10000) r) AS failed,
    (SELECT count(*) FROM (SELECT FROM river.river_job j WHERE j.state = 'running' AND j.queue = @queue::text
        AND j.attempted_at > @running_since::timestamptz LIMIT 10000) u) AS running;
