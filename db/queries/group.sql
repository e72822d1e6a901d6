-- name: SetGroup :one
SELECT dlq.set_group(@queue::text, @fingerprint::text, @changes::jsonb, @actor::text, nullif(@why::text, ''))::text AS fingerprint;

-- name: OneGroup :one
-- The fingerprint of a group, of which the beginning will do.
SELECT dlq.one_group(@queue::text, @fingerprint::text)::text AS fingerprint;

-- name: Shares :many
SELECT s.by::text AS by, s.name::text AS name, s.entries::bigint AS entries, s.share::float8 AS share FROM dlq.group_shares(@queue::text, @fingerprint::text) s;

-- name: LastEntries :many
SELECT e::uuid AS id FROM dlq.group_entries(@queue::text, @fingerprint::text, @most::integer) e;

-- name: MutedEntries :one
SELECT dlq.muted_entries()::bigint AS entries;

-- name: Marks :many
-- What people have said of some groups, each a queue and a fingerprint.
SELECT m.queue, m.fingerprint, coalesce(m.owner, '')::text AS owner, dlq.is_muted(m, g.failures)::boolean AS muted, (m.fixed_at IS NOT NULL)::boolean AS fixed
FROM (SELECT DISTINCT unnest(@queues::text[]) AS queue, unnest(@fingerprints::text[]) AS fingerprint) a
JOIN dlq.group_marks m ON m.queue = a.queue AND m.fingerprint = a.fingerprint
JOIN dlq.failure_groups g ON g.queue = m.queue AND g.fingerprint = m.fingerprint;
