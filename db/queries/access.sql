-- name: FindToken :one
SELECT t.id, t.name, t.role, t.queues, t.kinds, t.sources, t.used_at, t.created_by
FROM dlq.tokens t
WHERE t.hash = @hash AND (t.expires_at IS NULL OR t.expires_at > now())
    AND (t.revoked_at IS NULL OR t.revoked_at > now());

-- name: TouchToken :exec
-- TouchToken records the use of a token, at most once a minute over all processes. It skips a
-- locked row instead of waiting for it.
UPDATE dlq.tokens t SET used_at = now()
WHERE t.id = (SELECT k.id FROM dlq.tokens k WHERE k.id = @id
    AND (k.used_at IS NULL OR k.used_at < now() - interval '1 minute') FOR UPDATE SKIP LOCKED);

-- name: InsertToken :exec
INSERT INTO dlq.tokens (id, name, hash, role, queues, kinds, sources, note, created_by, expires_at)
VALUES (@id, @name, @hash, @role, @queues, @kinds, @sources, nullif(@note::text, ''), @created_by,
    sqlc.narg(expires_at));

-- name: Tokens :many
SELECT t.id, t.name, t.role, t.queues, t.kinds, t.sources, coalesce(t.note, '')::text AS note, t.created_by,
    t.created_at, t.expires_at, t.used_at, t.revoked_at, coalesce(t.revoked_by, '')::text AS revoked_by
FROM dlq.tokens t ORDER BY t.id;

-- name: RevokeToken :execrows
UPDATE dlq.tokens t SET revoked_at = now() + sqlc.arg(after)::interval, revoked_by = @revoked_by
WHERE t.id = @id AND (t.revoked_at IS NULL OR t.revoked_at > now() + sqlc.arg(after)::interval);

-- name: RecordAct :exec
SELECT dlq.record_act(@subject::text, @act::text, @actor::text, nullif(@note::text, ''), @detail::jsonb);

-- name: SetOrigin :exec
SELECT set_config('dlq.origin', @origin::text, true);

-- name: InsertSession :exec
INSERT INTO dlq.sessions (id, hash, name, via, token_id, issuer, subject, groups, address, agent)
VALUES (@id, @hash, @name, @via, sqlc.narg(token_id), sqlc.narg(issuer), sqlc.narg(subject), @groups, @address, @agent);

-- name: FindSession :one
-- FindSession finds a session by the hash of its cookie, current or previous, or by its id. A
-- session from a token lasts no longer than the token.
SELECT s.id, s.name, s.via, s.issuer, s.groups,
    t.role, t.queues, t.kinds, t.sources, t.created_by,
    coalesce(s.previous_hash = @hash AND s.previous_until < now(), false)::boolean AS replaced,
    coalesce(s.hash = @hash AND s.rotated_at < now() - sqlc.arg(rotate_after)::interval
        OR s.previous_hash = @hash AND s.previous_until IS NULL
            AND s.rotated_at < now() - sqlc.arg(arrive_within)::interval, false)::boolean AS rotate,
    (s.seen_at < now() - interval '1 minute' OR s.hash = @hash AND s.previous_hash IS NOT NULL
        AND s.previous_until IS NULL)::boolean AS touch
FROM dlq.sessions s LEFT JOIN dlq.tokens t ON t.id = s.token_id AND (t.expires_at IS NULL OR t.expires_at > now())
    AND (t.revoked_at IS NULL OR t.revoked_at > now())
WHERE (s.hash = @hash OR s.previous_hash = @hash OR s.id = @id) AND (s.token_id IS NULL OR t.id IS NOT NULL)
  AND s.created_at > now() - sqlc.arg(absolute)::interval AND s.seen_at > now() - sqlc.arg(idle)::interval;

-- name: TouchSession :exec
-- TouchSession records the use of a session without waiting for a locked row. Once the browser
-- sends the current cookie, the previous one expires after @keep_previous.
UPDATE dlq.sessions s SET seen_at = now(),
    previous_until = CASE WHEN s.hash = @hash THEN coalesce(s.previous_until, now() + sqlc.arg(keep_previous)::interval)
        ELSE s.previous_until END
WHERE s.id = (SELECT k.id FROM dlq.sessions k WHERE k.id = @id FOR UPDATE SKIP LOCKED);

-- name: RotateSession :execrows
-- RotateSession gives a session the hash of a new cookie. Of concurrent requests, one succeeds. If the browser never
-- received the last new cookie, it still sends the previous one: RotateSession accepts the previous cookie once
-- @arrive_within has passed.
UPDATE dlq.sessions s SET hash = @new_hash, previous_hash = @hash, previous_until = NULL, rotated_at = now()
WHERE s.id = @id AND (s.hash = @hash AND s.rotated_at < now() - sqlc.arg(rotate_after)::interval
    OR s.previous_hash = @hash AND s.previous_until IS NULL
        AND s.rotated_at < now() - sqlc.arg(arrive_within)::interval);

-- name: Sessions :many
SELECT s.id::text AS id, s.name, s.via, s.address, s.agent, s.created_at, s.seen_at,
    least(s.created_at + sqlc.arg(absolute)::interval, s.seen_at + sqlc.arg(idle)::interval, t.expires_at,
        t.revoked_at)::timestamptz AS expires_at
FROM dlq.sessions s LEFT JOIN dlq.tokens t ON t.id = s.token_id
WHERE (@name::text = '' OR s.name = @name) AND s.created_at > now() - sqlc.arg(absolute)::interval
    AND s.seen_at > now() - sqlc.arg(idle)::interval
  AND (t.expires_at IS NULL OR t.expires_at > now()) AND (t.revoked_at IS NULL OR t.revoked_at > now())
ORDER BY s.id DESC;

-- name: EndSessions :many
-- EndSessions deletes the session @id, or all sessions of the user @name, or, if both are given, the session @id if it
-- belongs to @name.
DELETE FROM dlq.sessions s
WHERE (sqlc.narg(id)::uuid IS NULL OR s.id = sqlc.narg(id)) AND (@name::text = '' OR s.name = @name)
    AND (sqlc.narg(id)::uuid IS NOT NULL OR @name <> '')
RETURNING s.name;

-- name: EndOldSessions :exec
-- EndOldSessions deletes the oldest sessions of a user, so that @keep are left, and the session that the browser had
-- before the new one.
DELETE FROM dlq.sessions s
WHERE s.id IN (SELECT k.id FROM dlq.sessions k WHERE k.name = @name ORDER BY k.id DESC OFFSET sqlc.arg(keep)::integer)
    OR s.hash = @instead OR s.previous_hash = @instead;

-- name: TrimSessions :execrows
DELETE FROM dlq.sessions s
WHERE s.created_at < now() - sqlc.arg(absolute)::interval OR s.seen_at < now() - sqlc.arg(idle)::interval
   OR EXISTS (SELECT FROM dlq.tokens t WHERE t.id = s.token_id AND (t.expires_at < now() OR t.revoked_at < now()));
