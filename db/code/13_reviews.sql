-- Reviews: entries that need an operator are handed out, so that operators who work at the same time get different
-- ones. A review is no lock: other operators can act on the entry, too.

CREATE OR REPLACE FUNCTION dlq.in_review(p_ids uuid[])
RETURNS TABLE (entry_id uuid, actor text, at timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT r.entry_id, r.actor, r.at
    FROM dlq.reviews r JOIN dlq.dead_letter_open e ON e.id = r.entry_id
    WHERE r.entry_id = ANY (p_ids) AND r.at > now() - interval '2 minutes' AND e.updated_at < r.at
$$;
COMMENT ON FUNCTION dlq.in_review IS
    'Which operators have these entries in review. A review ends with a move of the entry, after two minutes, '
    'or when its operator is handed out another entry.';

CREATE OR REPLACE FUNCTION dlq.review_next(p_ids uuid[], p_actor text) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_actor constant text := dlq.actor(p_actor);
    v_id    uuid;
BEGIN
    FOR v_id IN
        SELECT i.id FROM unnest(p_ids) WITH ORDINALITY i (id, place)
        WHERE NOT EXISTS (SELECT FROM dlq.in_review(p_ids) r WHERE r.entry_id = i.id AND r.actor <> v_actor)
        ORDER BY i.place
    LOOP
        -- If the lock is not free, another session is handing out the entry. If it is free, a session
        -- that held it before has committed, so the next statement sees the review of that session.
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(hashtextextended('dlq.reviews ' || v_id, 0));
        CONTINUE WHEN NOT EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.id = v_id AND e.status = 'dlq_manual')
            OR EXISTS (SELECT FROM dlq.in_review(ARRAY[v_id]) r WHERE r.actor <> v_actor);
        INSERT INTO dlq.reviews (actor, entry_id) VALUES (v_actor, v_id)
        ON CONFLICT ON CONSTRAINT reviews_pkey DO UPDATE SET entry_id = excluded.entry_id, at = excluded.at;
        RETURN v_id;
    END LOOP;
    DELETE FROM dlq.reviews r WHERE r.actor = v_actor;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dlq.review_next IS
    'Hands out the first of these entries that is in dlq_manual and in review by no other operator, and ends the '
    'operator''s previous review. Returns null if there is none.';
