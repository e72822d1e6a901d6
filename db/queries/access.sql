-- name: FindToken :one
SELECT t.id, t.name, t.role, t.queues, t.kinds, t.sources, t.used_at, t.created_by
FROM dlq.tokens t
WHERE t.hash = @hash AND (t.expires_at IS NULL OR t.expires_at > now()) AND (t.revoked_at IS NULL OR t.revoked_at > now());

-- name: TouchToken :exec
-- At most once a minute, by whichever process is first. Nobody waits for it.
UPDATE dlq.tokens t SET used_at = now()
WHERE t.id = (SELECT k.id FROM dlq.tokens k WHERE k.id = @id AND (k.used_at IS NULL OR k.used_at < now() - interval '1 minute') FOR UPDATE SKIP LOCKED);

-- name: InsertToken :exec
INSERT INTO dlq.tokens (id, name, hash, role, queues, kinds, sources, note, created_by, expires_at)
VALUES (@id, @name, @hash, @role, @queues, @kinds, @sources, sqlc.narg(note), @created_by, sqlc.narg(expires_at));

-- name: Tokens :many
SELECT t.id, t.name, t.role, t.queues, t.kinds, t.sources, t.note, t.created_by, t.created_at, t.expires_at, t.used_at, t.revoked_at, t.revoked_by
FROM dlq.tokens t ORDER BY t.id;

-- name: RevokeToken :execrows
UPDATE dlq.tokens t SET revoked_at = now() + sqlc.arg(after)::interval, revoked_by = @revoked_by
WHERE t.id = @id AND (t.revoked_at IS NULL OR t.revoked_at > now() + sqlc.arg(after)::interval);

-- name: RecordAct :exec
SELECT dlq.record_act('tokens', @act::text, @actor::text, nullif(@note::text, ''), @detail::jsonb);
