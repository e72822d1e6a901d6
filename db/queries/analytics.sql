-- name: MovesLastDay :one
-- MovesLastDay counts the moves of the last 24 hours. It adds up three parts: the first, partial hour from the rollup
-- by minute, whose first minute may be missing; the hours after it from the rollup by hour; and moves that the rollup
-- does not contain yet. If the caller has a scope, all moves come from the audit trail, because the rollup has no
-- kinds.
SELECT coalesce(sum(m.captured), 0)::bigint AS captured, coalesce(sum(m.resolved), 0)::bigint AS resolved,
       coalesce(sum(m.failed), 0)::bigint AS failed, coalesce(sum(m.archived), 0)::bigint AS archived,
       coalesce(sum(m.redelivered), 0)::bigint AS replayed
FROM (
    SELECT r.captured, r.redelivered, r.resolved, r.failed, r.archived
    FROM dlq.rollup_flow r WHERE (SELECT dlq.scope()) IS NULL AND r.step = 'minute' AND r.scope = 'all'
        AND r.bucket >= now() - interval '24 hours'
        AND r.bucket < date_trunc('hour', now() - interval '23 hours', 'UTC')
    UNION ALL
    SELECT r.captured, r.redelivered, r.resolved, r.failed, r.archived
    FROM dlq.rollup_flow r WHERE (SELECT dlq.scope()) IS NULL AND r.step = 'hour' AND r.scope = 'all'
        AND r.bucket >= date_trunc('hour', now() - interval '23 hours', 'UTC')
    UNION ALL
    SELECT count(*) FILTER (WHERE t.from_status IS NULL), count(*) FILTER (WHERE t.to_status = 'dlq_processing'
        AND t.from_status <> 'dlq_processing'),
           count(*) FILTER (WHERE t.to_status = 'dlq_resolved' AND t.from_status <> 'dlq_resolved'),
           count(*) FILTER (WHERE t.to_status = 'dlq_failed' AND t.from_status <> 'dlq_failed'),
           count(*) FILTER (WHERE t.to_status = 'dlq_archived' AND t.from_status <> 'dlq_archived')
    FROM dlq.rollup_state s CROSS JOIN LATERAL (
        SELECT b.from_status, b.to_status FROM dlq.moves_between(s.snapshot, txid_current_snapshot(), s.since) b
        WHERE (SELECT dlq.scope()) IS NULL
        UNION ALL
        SELECT d.from_status, d.to_status FROM dlq.dead_letter_transitions d
        WHERE (SELECT dlq.scope()) IS NOT NULL AND d.at >= now() - interval '24 hours'
            AND dlq.in_patterns(d.queue, d.kind, (SELECT dlq.scope_patterns(dlq.scope())))) t
) m;

-- name: AsOf :one
-- AsOf returns when the rollups were last refreshed.
SELECT at FROM dlq.rollup_state;

-- name: RefreshRollups :one
-- RefreshRollups refreshes the rollups. It returns false if another process is refreshing them.
SELECT (dlq.refresh_rollups() IS NOT NULL)::boolean AS refreshed;

-- name: TrimRollups :exec
SELECT dlq.trim_rollups();

-- name: TrimCounters :exec
SELECT dlq.trim_counters();
