-- name: EntriesByEvent :many
-- EntriesByEvent returns the newest ten dead letters of a message that are in the caller's scope,
-- newest first.
SELECT id, status FROM dlq.dead_letter_queue WHERE event_id = @event_id::text
    AND dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope()))) ORDER BY id DESC LIMIT 10;

-- name: InsertMessages :many
-- InsertMessages inserts the jobs of messages as River's client would. It returns the new jobs, and the open dead
-- letters of messages, whose jobs River may have deleted. A message with neither already has a job. event_id is empty
-- if dlqd generated the messageId, because no entry can have that id. The job of an entry in the inbox usually still
-- exists, and its unique key shows the duplicate. The inbox has no index for this query, so it is read only with
-- with_inbox. Jobs are inserted in the order of the arrays, which prevents deadlocks.
--
-- It is one statement, so it takes one round trip, and outside of a transaction block it commits by itself. DO NOTHING,
-- unlike River's DO UPDATE, does not write to the jobs of duplicates.
WITH messages AS (
    -- pgx copies each text of an array of large texts about five times. So the args come as one text, separated by
    -- character 30, which JSON cannot contain (RFC 7464).
    SELECT unnest(@event_ids::text[]) AS event_id, unnest(string_to_array(@args::text, chr(30))) AS args,
        unnest(@max_attempts::smallint[]) AS max_attempts, unnest(@metadata::text[]) AS metadata,
        unnest(@priorities::smallint[]) AS priority, unnest(@queues::text[]) AS queue,
        unnest(@scheduled_at::timestamptz[]) AS scheduled_at, unnest(@states::text[]) AS state,
        unnest(@tags::text[]) AS tags, unnest(@unique_keys::bytea[]) AS unique_key
), entries AS MATERIALIZED (
    SELECT e.event_id, e.id FROM dlq.dead_letter_queue e
    WHERE e.stage = 'open' AND e.event_id = ANY (@event_ids::text[]) AND e.event_id <> ''
    UNION ALL
    SELECT e.event_id, e.id FROM dlq.dead_letter_queue e
    WHERE e.stage = 'inbox' AND e.event_id = ANY (@event_ids::text[]) AND e.event_id <> ''
      AND @with_inbox::boolean
), jobs AS (
    INSERT INTO river.river_job (args, created_at, kind, max_attempts, metadata, priority, queue, scheduled_at, state,
        tags, unique_key, unique_states)
    SELECT m.args::jsonb, @created_at::timestamptz, @kind::text, m.max_attempts, m.metadata::jsonb, m.priority, m.queue,
        m.scheduled_at, m.state::river.river_job_state, string_to_array(m.tags, ',')::varchar(255)[], m.unique_key,
        -- A messageId stays in use as long as River keeps the job, in any state.
        B'11111111'
    FROM messages m WHERE m.event_id <> ALL (ARRAY (SELECT entries.event_id FROM entries))
    ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND unique_states IS NOT NULL
        AND river.river_job_state_in_bitmask(unique_states, state)
    DO NOTHING
    RETURNING id, unique_key
)
SELECT jobs.id::bigint AS job_id, jobs.unique_key::bytea AS unique_key, ''::text AS event_id, NULL::uuid AS entry_id
FROM jobs
UNION ALL
SELECT 0, '', entries.event_id, entries.id FROM entries
UNION ALL
-- The last rows notify River's workers of the queues. They belong to no message.
SELECT 0, '', pg_notify('river.river_insert', n.payload)::text, NULL
FROM (SELECT unnest(@notifications::text[]) AS payload) n;

-- name: InboxIsOld :one
-- InboxIsOld returns whether the inbox has an entry older than 12 hours, whose job River may have deleted.
SELECT EXISTS (SELECT FROM dlq.dead_letter_queue WHERE stage = 'inbox'
    AND id < dlq.first_id(now() - interval '12 hours'));

-- name: NotifyWorkers :exec
SELECT pg_notify('river.river_insert', n.payload) FROM (SELECT unnest(@notifications::text[]) AS payload) n;

-- name: CompareEntry :one
-- CompareEntry returns whether a dead letter's message equals the given one. Both are compared as jsonb, so the
-- formatting of the payload does not count.
SELECT river_job_id, (original_event - 'payloadText' = @args::jsonb)::boolean AS same FROM dlq.dead_letter_queue
WHERE id = @id AND stage IN ('inbox', 'open');

-- name: MessageJob :one
-- MessageJob returns the job of a message, by River's unique key.
SELECT id, state::text AS state, attempt, max_attempts, created_at, scheduled_at, finalized_at, args, metadata
FROM river.river_job
WHERE unique_key = @unique_key::bytea AND unique_states IS NOT NULL
  AND river.river_job_state_in_bitmask(unique_states, state)
  AND dlq.in_patterns(queue, args ->> 'kind', (SELECT dlq.scope_patterns(dlq.scope())));

-- name: CompareJobs :many
-- CompareJobs finds the jobs of messages by River's unique keys, and returns whether the args of each equal the given
-- ones. Both are compared as jsonb, so the formatting of the payload does not count.
SELECT j.id, d.unique_key::bytea AS unique_key, (j.args - 'payloadText' = d.args)::boolean AS same
FROM (SELECT unnest(@unique_keys::bytea[]) AS unique_key, unnest(@args::jsonb[]) AS args) d
JOIN river.river_job j ON j.unique_key = d.unique_key AND j.unique_states IS NOT NULL
    AND river.river_job_state_in_bitmask(j.unique_states, j.state);

-- name: InsertOrdered :exec
-- InsertOrdered assigns places in the order of the arrays.
INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
SELECT o.queue, o.ordering_key, o.job_id, o.created_at
FROM (SELECT unnest(@queues::text[]) AS queue, unnest(@keys::text[]) AS ordering_key, unnest(@jobs::bigint[]) AS job_id,
    unnest(@created_ats::timestamptz[]) AS created_at, generate_series(1, cardinality(@jobs::bigint[])) AS n) o
ORDER BY o.n;
