-- name: TakeDuty :one
-- TakeDuty reserves the work on archives (retention and erasure) for one process for a time, or extends the process's
-- reservation. It returns false if another process has reserved the work.
SELECT dlq.take_duty('archive', @holder::uuid, @during::interval)::boolean AS taken;

-- name: EndDuty :exec
SELECT dlq.end_duty('archive', @holder::uuid);

-- name: RecordUnit :exec
-- RecordUnit records a complete unit in the audit trail, once. @spellings has every spelling of the
-- archive's location that the audit trail contains.
SELECT dlq.record_act(u.subject, 'archived', 'retention', NULL,
    jsonb_build_object('archive', @archive::text, 'rows', @archived_rows::bigint))
FROM (SELECT 'archive unit ' || @unit::text AS subject) u
WHERE NOT EXISTS (SELECT FROM dlq.acts a WHERE a.subject = u.subject AND a.act = 'archived'
    AND a.detail ->> 'archive' = ANY (@spellings::text[]));

-- name: RecordedUnits :many
-- RecordedUnits returns the content of an archive according to the audit trail: units and dropped partitions, each with
-- its number of rows. The archive may have several units of one partition. A unit is missing from the archive if the
-- owner of the schema has recorded its removal (act removed), for example after the end of a legal period.
SELECT r.name::text AS name, r.is_partition::boolean AS is_partition, max(r.archived_rows)::bigint AS archived_rows,
    (max(r.at) FILTER (WHERE NOT r.is_removal))::timestamptz AS at,
    coalesce(max(r.at) FILTER (WHERE r.is_removal) > max(r.at) FILTER (WHERE NOT r.is_removal), false)::boolean
        AS is_removed
FROM (
    SELECT substr(a.subject, length('archive unit ') + 1) AS name, false AS is_partition,
        (a.detail ->> 'rows')::bigint AS archived_rows, a.at, a.act = 'removed' AS is_removal
    FROM dlq.acts a
    WHERE a.subject LIKE 'archive unit %' AND a.act IN ('archived', 'removed')
      AND a.detail ->> 'archive' = ANY (@spellings::text[])
    UNION ALL
    SELECT substr(a.subject, length('partition ') + 1), true, (a.detail ->> 'rows')::bigint, a.at, false
    FROM dlq.acts a
    WHERE a.subject LIKE 'partition %' AND a.act = 'dropped' AND a.detail ->> 'archive' = ANY (@spellings::text[])
      AND (a.detail ->> 'rows')::bigint > 0
) r
GROUP BY r.name, r.is_partition
HAVING bool_or(NOT r.is_removal)
ORDER BY r.name, r.is_partition;

-- name: RecordedArchives :many
-- RecordedArchives returns the locations of archives in the audit trail, with the number of units and
-- partitions that the trail records for each.
SELECT r.archive::text AS archive, count(DISTINCT r.subject)::bigint AS units
FROM (
    SELECT a.detail ->> 'archive' AS archive, a.subject FROM dlq.acts a
    WHERE (a.subject LIKE 'archive unit %' AND a.act = 'archived'
        OR a.subject LIKE 'partition %' AND a.act = 'dropped' AND (a.detail ->> 'rows')::bigint > 0)
      AND a.act IN ('archived', 'removed', 'dropped')
) r
WHERE r.archive IS NOT NULL
GROUP BY r.archive ORDER BY r.archive;
