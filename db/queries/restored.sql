-- name: WatchServer :one
-- WatchServer compares the server with the records that the database and the process have of it, to find a restore.
-- Each process calls it every few seconds and on each new connection.
SELECT w.mark::bigint AS mark, coalesce(w.timeline, 0)::bigint AS timeline, w.verdict::text AS verdict,
       (w.held_at IS NOT NULL)::boolean AS held, coalesce(w.held_at, now())::timestamptz AS held_at,
       coalesce(w.note, '')::text AS note
FROM dlq.watch_server(@process::uuid, @name::text, @mark::bigint, @timeline::bigint) w;

-- name: MaySend :one
-- MaySend returns whether a process may send automatically. Every transaction that sends automatically calls it before
-- it reads the entries to send. MaySend takes a lock until the transaction ends (dlq.may_send).
SELECT dlq.may_send(@process::uuid, @mark::bigint)::text AS verdict;

-- name: Restored :many
-- Restored counts work that may be done twice because of the restore.
SELECT r.what::text AS what, r.held::boolean AS held, r.items::bigint AS items, coalesce(r.detail, '')::text AS detail
FROM dlq.restored() r;

-- name: ResumeRestored :one
SELECT dlq.resume_restored(@actor::text, nullif(@note::text, ''))::boolean AS was_held;
