-- name: AgeOut :one
SELECT dlq.age_out(@periods::jsonb, @max_entries::integer, @now::timestamptz)::integer AS entries;

-- name: DropEmptyMonth :one
-- '' where there is none.
SELECT coalesce(dlq.drop_empty_month(@periods::jsonb, @now::timestamptz), '')::text AS name;

-- name: ExpiredPartitions :many
SELECT p.partition_name::text AS name, p.of_audit::boolean AS of_audit FROM dlq.expired_partitions(@periods::jsonb, @audit::interval, @now::timestamptz) p;

-- name: DropPartition :exec
SELECT dlq.drop_partition(@name::text, sqlc.narg('archived_rows')::bigint, (sqlc.narg('hash')::text)::numeric);

-- name: ExpiredEntries :many
SELECT e.id::uuid AS id FROM dlq.expired_entries(@periods::jsonb, @max_entries::integer, @now::timestamptz) e (id);

-- name: DeleteEntries :one
SELECT dlq.delete_entries(@ids::uuid[])::integer AS entries;

-- name: LockRetention :one
-- One process at a time keeps retention.
SELECT pg_try_advisory_xact_lock(hashtextextended('dlq.retention', 0)) AS locked;
