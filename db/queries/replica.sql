-- name: RecordLastAct :exec
-- RecordLastAct records the position of a committed change of some actors. It locks their rows in the order of the
-- names.
INSERT INTO dlq.last_acts (actor, position, at)
SELECT a.actor, pg_current_wal_insert_lsn(), now() FROM (SELECT DISTINCT unnest(@actors::text[])) a (actor)
ORDER BY a.actor
ON CONFLICT (actor) DO UPDATE SET position = greatest(last_acts.position, excluded.position), at = excluded.at;

-- name: Needed :one
-- Needed returns the state that a standby must have reached to answer some actors: the position of their last change in
-- bytes (0 if there is none), the primary's timeline, and the value that Masking returns.
SELECT coalesce(pg_wal_lsn_diff(max(a.position), '0/0'), 0)::bigint AS position,
    ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint AS timeline,
    (SELECT md5(string_agg(concat(s.value, extract(epoch FROM s.updated_at)), ',' ORDER BY s.key)) FROM dlq.settings s
        WHERE s.key IN ('sensitive', 'sensitive_columns', 'policy_version', 'code_version'))::text AS masking
FROM dlq.last_acts a WHERE a.actor = ANY (@actors::text[]);

-- name: Masking :one
-- Masking returns a hash of everything that decides which data callers may see: the mask (dlq.protect), the policy, and
-- the version of the functions that apply them.
SELECT md5(string_agg(concat(s.value, extract(epoch FROM s.updated_at)), ',' ORDER BY s.key))::text AS masking
FROM dlq.settings s WHERE s.key IN ('sensitive', 'sensitive_columns', 'policy_version', 'code_version');

-- name: ForgetActs :exec
DELETE FROM dlq.last_acts WHERE at < now() - @after::interval;
