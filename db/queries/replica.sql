-- name: RecordLastAct :exec
-- RecordLastAct runs after an actor's change has committed.
INSERT INTO dlq.last_acts (actor, position, at) VALUES (@actor, pg_current_wal_insert_lsn(), now())
ON CONFLICT (actor) DO UPDATE SET position = greatest(last_acts.position, excluded.position), at = excluded.at;

-- name: LastAct :one
-- LastAct returns the position of the last change of some actors, in bytes; 0 if there is none.
SELECT coalesce(pg_wal_lsn_diff(max(a.position), '0/0'), 0)::bigint AS position
FROM dlq.last_acts a WHERE a.actor = ANY (@actors::text[]);

-- name: ForgetActs :exec
DELETE FROM dlq.last_acts WHERE at < now() - @after::interval;
