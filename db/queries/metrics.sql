-- name: ReadSample :one
-- ReadSample is the only query of a scrape. It reads one row, however large the backlog is. If the sample has the time
-- @known_at, the process already has it, and counters and sample are null. If there is no sample, as before the first
-- one or after a crash, they are also null, and at is @known_at.
SELECT coalesce(s.at, @known_at)::timestamptz AS at, coalesce(s.counters, 'null')::json AS counters,
    coalesce(s.sample, 'null')::json AS sample, clock_timestamp()::timestamptz AS now
FROM (SELECT) one LEFT JOIN (SELECT m.at, CASE WHEN m.at <> @known_at THEN m.counters END AS counters,
    CASE WHEN m.at <> @known_at THEN m.sample END AS sample FROM dlq.metrics_sample m) s ON true;

-- name: SampleDue :one
-- SampleDue returns whether a sample is due, the age of the last one (0 if there is none), and whether this transaction
-- takes the next one. The lock and the statement timeout last until the transaction ends. If a clock was set back, the
-- last sample has a future time; the next one is due then.
SELECT d.due, d.age, (d.due AND pg_try_advisory_xact_lock(hashtextextended('dlq.metrics_sample', 0)))::boolean AS taken
FROM (SELECT coalesce(s.age, '0')::interval AS age,
             coalesce(NOT (s.age >= '0' AND s.age < greatest(@every::interval, least(20 * s.took, @most::interval))),
                      true)::boolean AS due
      FROM (SELECT set_config('statement_timeout', @timeout::text, true) OFFSET 0) one
      LEFT JOIN (SELECT clock_timestamp() - m.at AS age, m.took FROM dlq.metrics_sample m) s ON true OFFSET 0) d;

-- name: Ages :one
-- Ages returns the age of the sample and of the rollups, or 0 if they do not exist yet.
SELECT coalesce((SELECT clock_timestamp() - s.at FROM dlq.metrics_sample s), '0')::interval AS sample,
       coalesce((SELECT clock_timestamp() - r.at FROM dlq.rollup_state r), '0')::interval AS rollups;

-- name: WriteSample :exec
-- WriteSample does not write if nothing has changed since a recent sample. It leaves unchanged counters as they are, so
-- that Postgres does not write their out-of-line value again.
INSERT INTO dlq.metrics_sample AS s (at, took, takes, counters, sample)
VALUES (clock_timestamp(), @took::interval, ARRAY[@took::interval], @counters::json, @sample::json)
ON CONFLICT (one) DO UPDATE SET at = excluded.at, takes = (excluded.takes || s.takes)[1:5], sample = excluded.sample,
    took = (SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY t.took)
            FROM unnest((excluded.takes || s.takes)[1:5]) t (took)),
    counters = CASE WHEN s.counters::text = excluded.counters::text THEN s.counters ELSE excluded.counters END
WHERE s.sample::text <> excluded.sample::text OR s.counters::text <> excluded.counters::text
   OR s.at NOT BETWEEN clock_timestamp() - @unchanged::interval AND clock_timestamp();

-- name: Counters :many
SELECT name, queue, array_agg(label)::text[] AS labels, array_agg(value)::float8[] AS values FROM dlq.counters
GROUP BY name, queue ORDER BY name, queue;

-- name: OpenEntries :many
-- OpenEntries returns the numbers of filed open entries from the rollup. They are exact at its last refresh, and
-- reading them costs the same for any backlog.
SELECT b.queue, b.error_class, b.pending, b.processing, b.manual FROM dlq.rollup_backlog b
WHERE (b.pending, b.processing, b.manual) <> (0, 0, 0) ORDER BY b.queue, b.error_class;

-- name: Unfiled :many
-- Unfiled counts, by queue, the failures in the inbox that will become entries, up to 10,000 in
-- all.
SELECT u.queue, count(*) AS entries, min(u.created_at)::timestamptz AS since
FROM (SELECT i.queue, i.created_at FROM dlq.dead_letter_inbox i
    WHERE NOT dlq.is_repeat(i.river_job_id, i.job_created_at) LIMIT 10000) u GROUP BY u.queue ORDER BY u.queue;

-- name: OldestOpen :many
-- OldestOpen returns the time of the oldest open entry of each queue, with one index probe for
-- each.
SELECT q.queue, o.created_at AS since
FROM (SELECT DISTINCT b.queue FROM dlq.rollup_backlog b WHERE b.pending + b.processing + b.manual > 0) q
CROSS JOIN LATERAL (SELECT e.created_at FROM dlq.dead_letter_open e WHERE e.queue = q.queue ORDER BY e.id LIMIT 1) o
ORDER BY q.queue;

-- name: Observed :many
-- Observed counts observed entries, up to 10,000 of each queue.
SELECT q.queue, o.entries
FROM (SELECT DISTINCT b.queue FROM dlq.rollup_backlog b WHERE b.pending > 0) q
CROSS JOIN LATERAL (SELECT count(*) AS entries FROM (SELECT FROM dlq.dead_letter_open e WHERE e.status = 'dlq_pending'
    AND e.waiting_for = 'automatic' AND e.queue = q.queue LIMIT 10000) l) o
WHERE o.entries > 0 ORDER BY q.queue;

-- name: Returned :many
-- Returned counts returned entries by queue, up to 10,000 in all.
SELECT r.queue, count(*) AS entries FROM (SELECT e.queue FROM dlq.dead_letter_returned e LIMIT 10000) r
GROUP BY r.queue ORDER BY r.queue;

-- name: NeedsPerson :many
SELECT p.queue::text AS queue, p.error_class::text AS error_class, p.entries::bigint AS entries
FROM dlq.needs_person(@after::interval, @queues::text[], @afters::interval[], @most::integer) p;

-- name: Rollups :one
SELECT at, moves FROM dlq.rollup_state;

-- name: Gates :many
SELECT g.state, count(*) AS gates FROM dlq.gates g GROUP BY g.state ORDER BY g.state;

-- name: Paces :many
SELECT p.name, p.free_at FROM dlq.paces p WHERE p.name NOT LIKE 'replay:%' AND p.free_at > now() - interval '1 hour'
ORDER BY p.free_at DESC, p.name LIMIT 100;

-- name: ReplayRuns :many
SELECT r.status::text AS status, count(*) AS runs, coalesce(sum(r.total) FILTER (WHERE r.finished_at IS NULL),
    0)::bigint AS total,
       coalesce(sum(r.replayed) FILTER (WHERE r.finished_at IS NULL), 0)::bigint AS replayed,
       coalesce(sum(r.skipped) FILTER (WHERE r.finished_at IS NULL), 0)::bigint AS skipped
FROM dlq.replay_runs r GROUP BY r.status ORDER BY r.status;

-- name: Approvals :many
SELECT a.operation, a.state, count(*) AS requests FROM dlq.approvals a GROUP BY a.operation, a.state
ORDER BY a.operation, a.state;

-- name: Processes :one
SELECT count(*) FROM dlq.processes p WHERE p.stopped_at IS NULL AND p.seen_at > now() - @live_for::interval;

-- name: PartitionsUntil :many
SELECT p.of::text AS of, p.until::timestamptz AS until FROM dlq.partitions_until() p ORDER BY 1;

-- name: RiverQueues :many
-- RiverQueues returns River's queues, the most recently used first.
SELECT q.name, (q.paused_at IS NOT NULL)::boolean AS paused FROM river.river_queue q WHERE q.name <> ''
ORDER BY q.updated_at DESC, q.name LIMIT @most::integer;

-- name: RiverJobs :many
-- RiverJobs counts River's jobs of some queues by state, each up to a limit, from the index that River uses to fetch
-- jobs.
SELECT q.queue::text AS queue, s.state::text AS state, c.jobs
FROM unnest(@queues::text[]) q (queue) CROSS
JOIN unnest(ARRAY['available', 'running', 'retryable', 'scheduled']) s (state)
CROSS JOIN LATERAL (SELECT count(*) AS jobs
    FROM (SELECT FROM river.river_job j WHERE j.state = s.state::river.river_job_state AND j.queue = q.queue
        LIMIT @most::integer) l) c
ORDER BY 1, 2;

-- name: RiverOldest :many
-- RiverOldest returns, for each queue, the scheduled_at of the available job that has waited longest. It reads only the
-- first job of each priority in River's index.
SELECT q.queue::text AS queue, min(o.scheduled_at)::timestamptz AS since
FROM unnest(@queues::text[]) q (queue) CROSS JOIN generate_series(1, 4) p (priority)
CROSS JOIN LATERAL (SELECT j.scheduled_at FROM river.river_job j WHERE j.state = 'available' AND j.queue = q.queue
    AND j.priority = p.priority ORDER BY j.scheduled_at LIMIT 1) o
GROUP BY q.queue ORDER BY 1;

-- name: RiverLatency :many
-- RiverLatency returns how long the running jobs of each queue had waited: the average in seconds,
-- over at most 1,000 jobs of the queue.
SELECT l.queue::text AS queue, avg(l.waited)::float8 AS seconds
FROM (SELECT q.queue, greatest(extract(epoch FROM j.attempted_at - j.scheduled_at), 0) AS waited
      FROM unnest(@queues::text[]) q (queue)
      CROSS JOIN LATERAL (SELECT r.attempted_at, r.scheduled_at FROM river.river_job r WHERE r.state = 'running'
          AND r.queue = q.queue LIMIT 1000) j) l
GROUP BY l.queue ORDER BY 1;

-- name: Sources :many
-- Sources returns the figures of sources. An unknown time is the epoch, and an unknown margin -1.
SELECT f.source::text AS source, f.paused::boolean AS paused, f.running::boolean AS running,
    f.failing::bigint AS failing, f.lag::bigint AS lag, coalesce(f.margin, -1)::bigint AS margin,
    f.records::bigint AS records, f.holes::bigint AS holes, f.lost::bigint AS lost,
    coalesce(f.moved_at, 'epoch')::timestamptz AS moved_at,
    coalesce(f.behind_since, 'epoch')::timestamptz AS behind_since
FROM dlq.source_figures() f WHERE NOT f.removed ORDER BY 1 LIMIT 1000;

-- name: Feeds :many
-- Feeds returns the figures of feeds. An unknown time is the epoch.
SELECT f.feed::text AS feed, f.published::bigint AS published, f.failed::bigint AS failed, f.waiting::bigint AS waiting,
    coalesce(f.waiting_since, 'epoch')::timestamptz AS waiting_since, (f.error IS NOT NULL)::boolean AS failing,
    f.running::boolean AS running, (f.paused_at IS NOT NULL)::boolean AS paused
FROM dlq.feed_figures() f ORDER BY 1 LIMIT 1000;
