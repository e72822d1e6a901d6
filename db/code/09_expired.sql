-- Work that is out of date. The policy says from which age work is out of date, and whether dlqd expires it (staleAfter
-- and expireStale of dlq-routing.yaml).

CREATE OR REPLACE FUNCTION dlq.expiries(p_ids uuid[])
RETURNS TABLE (id uuid, queue text, kind text, due_at timestamptz, expires_at text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT e.id, e.queue, e.kind,
           -- Any client can write an infinite time.
           least(greatest(e.job_created_at, CASE WHEN e.job_kind = 'dlqd_message'
               THEN dlq.to_timestamptz(e.original_event ->> 'scheduledAt') END, 'epoch'), now()),
           coalesce(CASE WHEN e.job_kind = 'dlqd_message' THEN e.original_event ->> 'expiresAt' END,
               e.metadata ->> 'dlqd:expires_at', '')
    FROM dlq.dead_letter_queue e
    WHERE e.id = ANY (p_ids) AND e.stage IN ('inbox', 'open', 'failed')
        AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(p_ids))
$$;
COMMENT ON FUNCTION dlq.expiries IS
    'The times that decide whether the work of entries is out of date. expires_at is a message''s expiresAt, or the '
    'metadata dlqd:expires_at of an application''s job; empty if there is none. due_at is when the job was inserted, '
    'or of a message when it was to be delivered, if that is later; it lies between 1970 and now.';

-- The lock on the job makes a retry outside dlqd wait. The fact of the retry is then later than the end of the entry,
-- and reopens it. This function waits for no lock (SKIP LOCKED), so the caller may already hold locks on entries.
CREATE OR REPLACE FUNCTION dlq.expire_stale(p_ids uuid[], p_reasons text[], p_actor text, p_version text)
RETURNS SETOF uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET row_security = off AS $$
DECLARE
    v_dead bigint[];
    v_ids  uuid[];
BEGIN
    v_dead := ARRAY(
        SELECT j.id FROM river.river_job j
        WHERE j.id IN (SELECT e.river_job_id FROM dlq.dead_letter_open e WHERE e.id = ANY (p_ids))
            AND j.state::text IN ('discarded', 'cancelled')
        ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED);
    v_ids := ARRAY(
        SELECT e.id FROM dlq.dead_letter_open e
        WHERE e.id = ANY (p_ids) AND e.status IN ('dlq_pending', 'dlq_manual')
            -- Leave entries out that an operator works on or wants to be sent.
            AND e.rule IS DISTINCT FROM 'unparked' AND (e.parked_by IS NULL OR NOT dlq.is_person(e.parked_by))
            AND NOT EXISTS (
                SELECT FROM dlq.replay_runs r JOIN dlq.replay_run_entries x ON x.run_id = r.id AND x.entry_id = e.id
                WHERE r.unsettled AND r.status IN ('running', 'paused', 'stopped') AND x.outcome IS NULL)
            AND (e.river_job_id = ANY (v_dead) OR NOT EXISTS (
                SELECT FROM river.river_job j WHERE j.id = e.river_job_id AND j.created_at = e.job_created_at))
            AND NOT EXISTS (
                SELECT FROM dlq.entry_jobs m
                JOIN river.river_job j ON j.id = m.job_id AND j.created_at = m.job_created_at
                WHERE m.entry_id = e.id AND j.state::text NOT IN ('discarded', 'cancelled'))
            -- A fact that is not applied yet may be a retry or a success. The conditions are separate, because one
            -- condition for all jobs would read every fact for each entry.
            AND (SELECT f.fact FROM dlq.job_facts f
                 WHERE f.job_id = e.river_job_id AND f.job_created_at = e.job_created_at LIMIT 1) IS NULL
            AND (SELECT f.fact FROM dlq.entry_jobs m
                 JOIN dlq.job_facts f ON f.job_id = m.job_id AND f.job_created_at = m.job_created_at
                 WHERE m.entry_id = e.id LIMIT 1) IS NULL
        ORDER BY e.id FOR UPDATE OF e SKIP LOCKED);
    RETURN QUERY
    UPDATE dlq.dead_letter_queue e SET status = 'dlq_archived', resolution_strategy = 'expired', resolved_by = p_actor,
        config_version = p_version, move = jsonb_build_object('actor', p_actor, 'reason', r.reason)
    FROM unnest(p_ids, p_reasons) r (id, reason)
    WHERE e.id = r.id AND e.id = ANY (v_ids) AND e.stage = 'open' AND e.status IN ('dlq_pending', 'dlq_manual')
    RETURNING e.id;
END
$$;
COMMENT ON FUNCTION dlq.expire_stale IS
    'Expires pending and manual entries for dlqd, each for its own reason, and returns those that it expired. It '
    'leaves entries that an operator has parked, reopened or unparked, those that a replay run is still to send, '
    'those whose job or redelivery is not dead or has a fact that is not applied yet, and those that another session '
    'has locked.';
