-- name: RecordLastAct :exec
-- RecordLastAct runs after an actor's change has committed.
INSERT INTO dlq.last_acts (actor, position, at) VALUES (@actor, pg_current_wal_insert_lsn(), now())
ON CONFLICT (actor) DO UPDATE SET position = greatest(last_acts.position, excluded.position), at = excluded.at;

-- name: Needed :one
-- Needed returns what a standby must have replayed to answer some actors: the position of their last change, in bytes
-- (0 if there is none), on the primary's timeline.
SELECT coalesce(pg_wal_lsn_diff(max(a.position), '0/0'), 0)::bigint AS position,
    ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint AS timeline
FROM dlq.last_acts a WHERE a.actor = ANY (@actors::text[]);

-- name: ForgetActs :exec
DELETE FROM dlq.last_acts WHERE at < now() - @after::interval;
