-- Sources in operation: their list, pauses, moved positions, and figures for metrics and doctor.

-- is_stored reports whether an entry exists for a record, which it finds by place, time and value. So if the broker
-- lost a record and stored another one at the same offset, that is a different record. A record that came back has no
-- entry of its own; its delivery has the place (p_came).
CREATE OR REPLACE FUNCTION dlq.is_stored(p_cluster text, p_topic_id uuid, p_message text, p_at timestamptz,
    p_sha256 bytea, p_came text, p_delivery uuid, p_queue text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN EXISTS (SELECT FROM dlq.dead_letter_queue e
            WHERE e.event_id = left(p_message, 255) AND (e.record).cluster = p_cluster
                AND (e.record).topic_id = p_topic_id AND (e.record).at = p_at
                AND ((e.record).sha256 IS NULL OR (e.record).sha256 = p_sha256))
        OR EXISTS (SELECT FROM dlq.source_deliveries d
            WHERE d.came_back @> ARRAY[p_came] AND d.came_back <> '{}' AND d.queue = p_queue
                AND EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = d.entry_id))
        OR EXISTS (SELECT FROM dlq.source_deliveries d
            WHERE d.id = p_delivery AND d.came_back IS NULL AND d.queue = p_queue
                AND EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = d.entry_id));
END
$$;
COMMENT ON FUNCTION dlq.is_stored IS
    'Whether a record that is read again has an entry: one made from it, or one for which dlqd published it.';

CREATE OR REPLACE FUNCTION dlq.publish_sources(p_names text[], p_clusters text[], p_queues text[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.sources s SET removed_at = now() WHERE s.removed_at IS NULL AND s.name <> ALL (p_names);
    INSERT INTO dlq.sources AS s (name, cluster, queue)
    SELECT p.name, p.cluster, p.queue FROM unnest(p_names, p_clusters, p_queues) p (name, cluster, queue)
    ORDER BY p.name
    ON CONFLICT (name) DO UPDATE SET cluster = excluded.cluster, queue = excluded.queue, removed_at = NULL,
        published_at = now()
    WHERE (s.cluster, s.queue) <> (excluded.cluster, excluded.queue) OR s.removed_at IS NOT NULL;
$$;
COMMENT ON FUNCTION dlq.publish_sources IS
    'Records the sources of the policy in force. The others are marked as removed.';

CREATE OR REPLACE FUNCTION dlq.see_sources(p_names text[]) RETURNS TABLE (name text, paused boolean, changes bigint)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.sources s SET seen_at = now()
    WHERE s.name = ANY (p_names) AND (s.seen_at IS NULL OR s.seen_at < now() - interval '10 seconds');
    SELECT s.name, s.paused_at IS NOT NULL, s.changes FROM dlq.sources s WHERE s.name = ANY (p_names);
$$;
COMMENT ON FUNCTION dlq.see_sources IS
    'Records that a process reads these sources, and returns which are paused. Readers begin again when changes is '
    'another number.';

-- require_source locks the source. For the caller, a source outside the scope looks the same as one that does not
-- exist.
CREATE OR REPLACE FUNCTION dlq.require_source(p_source text) RETURNS dlq.sources
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_source dlq.sources;
BEGIN
    SELECT * INTO v_source FROM dlq.sources s WHERE s.name = p_source FOR UPDATE;
    IF NOT FOUND OR NOT dlq.in_scope(v_source.queue, NULL, dlq.scope()) THEN
        RAISE EXCEPTION 'there is no source %', p_source USING ERRCODE = 'DLQ02';
    END IF;
    RETURN v_source;
END
$$;
COMMENT ON FUNCTION dlq.require_source IS
    'Returns a source, locked. Raises DLQ02 if it does not exist in the caller''s scope.';

CREATE OR REPLACE FUNCTION dlq.pause_source(p_source text, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_source constant dlq.sources := dlq.require_source(p_source);
BEGIN
    IF v_source.paused_at IS NOT NULL THEN
        RETURN false;
    END IF;
    UPDATE dlq.sources s SET paused_at = now(), paused_by = dlq.actor(p_actor), changes = s.changes + 1
    WHERE s.name = p_source;
    PERFORM dlq.record_act('source ' || p_source, 'paused', p_actor, p_note,
        jsonb_build_object('queue', v_source.queue));
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.pause_source IS
    'Stops the reading of a source in all processes, within seconds; its records stay in their topics, and '
    'redeliveries continue. Returns false if it is paused already.';

CREATE OR REPLACE FUNCTION dlq.resume_source(p_source text, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_source constant dlq.sources := dlq.require_source(p_source);
BEGIN
    IF v_source.paused_at IS NULL THEN
        RETURN false;
    END IF;
    UPDATE dlq.sources s SET paused_at = NULL, paused_by = NULL, changes = s.changes + 1 WHERE s.name = p_source;
    PERFORM dlq.record_act('source ' || p_source, 'resumed', p_actor, p_note,
        jsonb_build_object('queue', v_source.queue));
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.resume_source IS
    'Resumes the reading of a source where it stopped. Returns false if it is not paused.';

-- A topic may have been created again, so a topic name may have several positions. rewind_source moves the one that was
-- read last.
CREATE OR REPLACE FUNCTION dlq.rewind_source(p_source text, p_topic text, p_partition integer, p_offset bigint,
    p_skip boolean DEFAULT false, p_actor text DEFAULT session_user, p_note text DEFAULT NULL,
    OUT before bigint, OUT next bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_source   constant dlq.sources := dlq.require_source(p_source);
    v_position dlq.source_positions;
BEGIN
    SELECT * INTO v_position FROM dlq.source_positions l
    WHERE l.cluster = v_source.cluster AND l.topic = p_topic AND l.partition = p_partition AND l.source = p_source
    ORDER BY l.started_at DESC LIMIT 1 FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source %: there is no position in partition % of the topic %', p_source, p_partition, p_topic
            USING ERRCODE = 'DLQ02';
    ELSIF p_offset IS NULL OR p_offset < 0 THEN
        RAISE EXCEPTION 'source %: % is not an offset', p_source, p_offset USING ERRCODE = 'DLQ04';
    ELSIF p_offset > v_position.next_offset AND NOT p_skip THEN
        RAISE EXCEPTION 'source %: the position is %, before %', p_source, v_position.next_offset, p_offset
            USING ERRCODE = 'DLQ04', HINT = 'To skip the records between, which dlqd has not read, say so (skip).';
    END IF;
    before := v_position.next_offset;
    next := p_offset;
    UPDATE dlq.source_positions l SET next_offset = p_offset, first_offset = least(l.first_offset, p_offset),
        stored_until = greatest(l.stored_until, before),
        lost = l.lost + greatest(p_offset - greatest(before, l.stored_until), 0), updated_at = now()
    WHERE l.cluster = v_position.cluster AND l.topic_id = v_position.topic_id AND l.partition = v_position.partition;
    UPDATE dlq.sources s SET changes = s.changes + 1 WHERE s.name = p_source;
    PERFORM dlq.record_act('source ' || p_source, CASE WHEN next > before THEN 'offsets skipped' ELSE 'rewound' END,
        p_actor, p_note, jsonb_build_object('queue', v_source.queue, 'cluster', v_source.cluster, 'topic', p_topic,
            'partition', p_partition, 'before', before, 'next', next));
END
$$;
COMMENT ON FUNCTION dlq.rewind_source IS
    'Moves the position of a partition back to an offset, so that its records are read again. Records whose entries '
    'exist are recognized; those whose entries are deleted become entries again. With p_skip it may move forward: '
    'the records between are counted as lost. Returns the position before and after. Raises DLQ02 if the partition '
    'has no position, and DLQ04 if p_offset is negative, or forward without p_skip.';

CREATE OR REPLACE FUNCTION dlq.source_figures() RETURNS TABLE (source text, queue text, paused boolean, removed boolean,
    running boolean, partitions bigint, failing bigint, lag bigint, margin bigint, records bigint, holes bigint,
    lost bigint, moved_at timestamptz, behind_since timestamptz, failing_since timestamptz, error text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.name, s.queue, s.paused_at IS NOT NULL, s.removed_at IS NOT NULL,
        coalesce(s.seen_at > now() - interval '1 minute', false),
        coalesce(p.partitions, 0), coalesce(p.failing, 0), coalesce(p.lag, 0), p.margin, coalesce(l.records, 0),
        coalesce(l.holes, 0), coalesce(l.lost, 0), l.moved_at, p.behind_since, p.failing_since, p.error
    FROM dlq.sources s
    LEFT JOIN (
        SELECT g.source, count(*) FILTER (WHERE g.partition >= 0) AS partitions,
            count(*) FILTER (WHERE g.state = 'failing') AS failing,
            sum(greatest(g.end_offset - g.next_offset, 0))::bigint AS lag,
            min(g.next_offset - g.start_offset) FILTER (WHERE g.end_offset > g.next_offset) AS margin,
            min(g.behind_since) AS behind_since, min(g.error_at) AS failing_since,
            (array_agg(g.error ORDER BY g.error_at) FILTER (WHERE g.error IS NOT NULL))[1] AS error
        FROM dlq.source_progress g GROUP BY g.source) p ON p.source = s.name
    LEFT JOIN (
        SELECT o.source, sum(o.records)::bigint AS records, sum(o.holes)::bigint AS holes, sum(o.lost)::bigint AS lost,
            max(o.updated_at) AS moved_at
        FROM dlq.source_positions o GROUP BY o.source) l ON l.source = s.name
$$;
COMMENT ON FUNCTION dlq.source_figures IS
    'The figures of each source, over its partitions. running: a process said within a minute that it reads it.';
