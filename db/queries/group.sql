-- name: SetGroup :one
SELECT dlq.set_group(@queue::text, @fingerprint::text, @changes::jsonb, @actor::text,
    nullif(@why::text, ''))::text AS fingerprint;

-- name: OneGroup :one
-- OneGroup returns the fingerprint of a group, which may be given by its first characters.
SELECT dlq.one_group(@queue::text, @fingerprint::text)::text AS fingerprint;

-- name: Shares :many
SELECT s.by::text AS by, s.name::text AS name, s.entries::bigint AS entries, s.share::float8 AS share
FROM dlq.shares_of(@ids::uuid[]) s;

-- name: LastEntries :many
SELECT e::uuid AS id FROM dlq.group_entries(@queue::text, @fingerprint::text, @most::integer) e;

-- name: MutedEntries :one
SELECT dlq.muted_entries()::bigint AS entries;

-- name: Marks :many
-- Marks returns the marks that operators have set for some groups, each given by a queue and a fingerprint. A group
-- that has just inherited marks may have no counts yet.
SELECT m.queue, m.fingerprint, coalesce(m.owner, '')::text AS owner,
       dlq.is_muted(m, coalesce(g.failures, 0))::boolean AS muted,
       (dlq.fixed_since(m) IS NOT NULL)::boolean AS fixed
FROM (SELECT DISTINCT unnest(@queues::text[]) AS queue, unnest(@fingerprints::text[]) AS fingerprint) a
JOIN dlq.group_marks m ON m.queue = a.queue AND m.fingerprint = a.fingerprint
LEFT JOIN dlq.failure_groups g ON g.queue = m.queue AND g.fingerprint = m.fingerprint;

-- name: GroupNames :one
-- GroupNames returns all fingerprints under which a group's entries are found.
SELECT dlq.group_names(@queue::text, @fingerprint::text)::text[] AS names;

-- name: FormerEntries :many
-- FormerEntries returns open entries of groups of an earlier grouping method, in the order of the index
-- dead_letter_open_by_former_method. It has the columns from which filing makes a fingerprint (ClaimDue in worker.sql).
SELECT e.id, e.queue, e.fingerprint::text AS former,
       coalesce(e.error_type, '')::text AS error_type, coalesce(e.error_code, '')::text AS error_code,
       coalesce(e.error_title, '')::text AS error_title,
       coalesce(dlq.judged_message(e.error_message), '')::text AS error_message,
       coalesce(dlq.trace_ends(e.error_stack_trace), '')::text AS error_stack_trace,
       dlq.judged_context(e.error_context)::jsonb AS error_context,
       e.last_failed_at
FROM dlq.dead_letter_open e
WHERE length(e.fingerprint) < 20 AND (e.fingerprint, e.id) > (@after_group::text, @after_id::uuid)
ORDER BY e.fingerprint, e.id
LIMIT @most::integer;

-- name: FormerGroups :many
-- FormerGroups returns groups of an earlier grouping method that have no known alias.
SELECT g.queue, g.fingerprint, (m.muted_at IS NOT NULL OR m.fixed_at IS NOT NULL)::boolean AS marked
FROM dlq.failure_groups g LEFT JOIN dlq.group_marks m ON m.queue = g.queue AND m.fingerprint = g.fingerprint
WHERE length(g.fingerprint) < 20 AND g.fingerprint <> 'other'
  AND (g.queue, g.fingerprint) > (@after_queue::text, @after_group::text)
  AND (m.queue IS NOT NULL OR NOT @only_marked::boolean)
  AND NOT EXISTS (SELECT FROM dlq.group_aliases a WHERE a.queue = g.queue AND a.former = g.fingerprint)
ORDER BY g.queue, g.fingerprint
LIMIT @most::integer;

-- name: LastGroupEntries :many
-- LastGroupEntries returns the last entries of some groups, in any state, up to @limits for each group. It has the
-- columns of FormerEntries.
SELECT e.id, e.queue, e.fingerprint::text AS former,
       coalesce(e.error_type, '')::text AS error_type, coalesce(e.error_code, '')::text AS error_code,
       coalesce(e.error_title, '')::text AS error_title,
       coalesce(dlq.judged_message(e.error_message), '')::text AS error_message,
       coalesce(dlq.trace_ends(e.error_stack_trace), '')::text AS error_stack_trace,
       dlq.judged_context(e.error_context)::jsonb AS error_context,
       e.last_failed_at
FROM (SELECT unnest(@queues::text[]) AS queue, unnest(@fingerprints::text[]) AS fingerprint,
             unnest(@limits::integer[]) AS most) g
CROSS JOIN LATERAL (
    SELECT * FROM dlq.dead_letter_queue l
    WHERE l.queue = g.queue AND l.fingerprint = g.fingerprint ORDER BY l.id DESC LIMIT g.most
) e;

-- name: AliasGroups :one
SELECT dlq.alias_groups(@queues::text[], @formers::text[], @fingerprints::text[],
                        @entries::uuid[], @titles::text[], @actor::text)::integer AS learned;

-- name: Regroup :one
SELECT dlq.regroup(@ids::uuid[], @formers::text[], @fingerprints::text[],
                   @last_failed_ats::timestamptz[], @actor::text)::integer AS moved;

-- name: GroupFix :many
-- GroupFix returns the version in which a group is fixed and the version that runs. It returns no row if no fix is
-- recorded.
SELECT m.fixed_in::text AS fixed_in, coalesce(dlq.deployed_version(m.queue), '')::text AS deployed_version,
       m.fix_deployed_at, m.fix_run, m.fix_request
FROM dlq.group_marks m
WHERE m.queue = @queue AND m.fingerprint = @fingerprint AND m.fixed_in IS NOT NULL;

-- name: RecordDeploy :exec
SELECT dlq.record_deploy(@version::text, sqlc.narg('queues')::text[], @actor::text, nullif(@note::text, ''));
