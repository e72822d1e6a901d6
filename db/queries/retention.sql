-- name: AgeOut :one
SELECT dlq.age_out(@periods::jsonb, @max_entries::integer, @now::timestamptz)::integer AS entries;

-- name: DropEmptyMonth :one
-- DropEmptyMonth returns the name of the dropped partition, or '' if it dropped none.
SELECT coalesce(dlq.drop_empty_month(@periods::jsonb, @now::timestamptz), '')::text AS name;

-- name: ExpiredPartitions :many
SELECT p.partition_name::text AS name, p.of_audit::boolean AS of_audit
FROM dlq.expired_partitions(@periods::jsonb, @audit::interval, @now::timestamptz) p;

-- name: PublishRetention :exec
-- PublishRetention publishes the retention periods, which dlq.drop_partition reads.
INSERT INTO dlq.settings AS s (key, value)
VALUES ('retention', jsonb_build_object('periods', @periods::jsonb, 'audit', @audit::interval)::text)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now() WHERE s.value <> excluded.value;

-- name: NoteArchived :exec
SELECT dlq.note_archived(@name::text, @archived_rows::bigint, (@hash::text)::numeric, @archive::text);

-- name: DropPartition :exec
SELECT dlq.drop_partition(@name::text, sqlc.narg('archived_rows')::bigint, (sqlc.narg('hash')::text)::numeric,
    'retention');

-- name: ExpiredEntries :many
SELECT e.id::uuid AS id FROM dlq.expired_entries(@periods::jsonb, @max_entries::integer, @now::timestamptz) e (id);

-- name: DeleteEntries :one
-- DeleteEntries deletes the given entries, except entries that changed since they were archived.
SELECT dlq.delete_entries(@ids::uuid[], @hashes::bigint[], 'retention',
    'deleted: its time is over')::integer AS entries;

-- name: ForgetOld :one
SELECT dlq.forget_old(@max_entries::integer, @now::timestamptz)::integer AS entries;
