-- name: WatchServer :one
-- Each process, every few seconds and on each new connection.
SELECT w.mark::bigint AS mark, coalesce(w.timeline, 0)::bigint AS timeline, w.verdict::text AS verdict,
       (w.held_at IS NOT NULL)::boolean AS held, coalesce(w.held_at, now())::timestamptz AS held_at, coalesce(w.note, '')::text AS note
FROM dlq.watch_server(@process::uuid, @name::text, @mark::bigint, @timeline::bigint) w;

-- name: MaySend :one
-- Held by every transaction that sends by itself, from before it reads what it goes by until it commits.
SELECT dlq.may_send(@process::uuid, @mark::bigint)::text AS verdict;

-- name: Restored :many
-- What may be done a second time.
SELECT r.what::text AS what, r.held::boolean AS held, r.items::bigint AS items, coalesce(r.detail, '')::text AS detail FROM dlq.restored() r;

-- name: ResumeRestored :one
SELECT dlq.resume_restored(@actor::text, nullif(@note::text, ''))::boolean AS was;
