-- Feeds: dead letters that dlqd publishes to topics.
--
-- A feed finds filed entries in the audit trail, as the rollups do. Its position is a snapshot, so that an entry whose
-- transaction commits late is neither missed nor found twice, and filing an entry costs nothing extra.

CREATE OR REPLACE FUNCTION dlq.publish_feeds(p_names text[], p_clusters text[], p_topics text[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.feeds f SET removed_at = now() WHERE f.removed_at IS NULL AND f.name <> ALL (p_names);
    -- Records that are not published yet go to the feed's new cluster.
    UPDATE dlq.feed_records r SET cluster = p.cluster FROM unnest(p_names, p_clusters) p (name, cluster)
    WHERE r.feed = p.name AND r.acknowledged_at IS NULL AND r.failure IS NULL AND r.cluster <> p.cluster;
    INSERT INTO dlq.feeds AS f (name, cluster, topic)
    SELECT p.name, p.cluster, p.topic FROM unnest(p_names, p_clusters, p_topics) p (name, cluster, topic)
    ORDER BY p.name
    ON CONFLICT (name) DO UPDATE SET cluster = excluded.cluster, topic = excluded.topic, removed_at = NULL
    WHERE (f.cluster, f.topic) <> (excluded.cluster, excluded.topic) OR f.removed_at IS NOT NULL;
$$;
COMMENT ON FUNCTION dlq.publish_feeds IS
    'Records the feeds of the policy in force. The others are marked as removed. A new feed begins with the entries '
    'that are filed from now on; a feed that is back continues where it was.';

CREATE OR REPLACE FUNCTION dlq.snapshot_before(p_snapshot txid_snapshot, p_xid bigint) RETURNS txid_snapshot
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT (least(txid_snapshot_xmin(p_snapshot), p_xid) || ':' || p_xid || ':' || coalesce((
        SELECT string_agg(x::text, ',' ORDER BY x)
        FROM txid_snapshot_xip(p_snapshot) x WHERE x < p_xid), ''))::txid_snapshot
$$;
COMMENT ON FUNCTION dlq.snapshot_before IS
    'The snapshot of the transactions with ids below p_xid that p_snapshot contains. p_xid must not be above the '
    'limit of p_snapshot.';

-- If there are more than p_limit new entries, collect_feed takes the entries of the first transactions and moves the
-- position past them, so that later entries are not read again in each call. If a single transaction filed more, the
-- position stays, and the next call skips entries that already have a row. A snapshot ahead of this server's
-- transaction ids comes from a dump of another server: entries then count by time.
CREATE OR REPLACE FUNCTION dlq.collect_feed(p_feed text, p_queues text[], p_limit integer DEFAULT 10000)
    RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_patterns constant text[] := dlq.scope_patterns(jsonb_build_array(jsonb_build_object('queues', p_queues)));
    v_feed     dlq.feeds;
    v_new      txid_snapshot;
    v_at       timestamptz;
    v_dumped   boolean;
    v_first    bigint;  -- the first transaction after the position
    v_step     bigint;  -- the number of transactions to read
    v_part     boolean := false; -- whether more transactions are left
    v_count    integer := 0;
BEGIN
    SELECT * INTO v_feed FROM dlq.feeds f WHERE f.name = p_feed FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT txid_current_snapshot(), clock_timestamp() INTO v_new, v_at;
    v_first := txid_snapshot_xmax(v_feed.snapshot);
    v_step := txid_snapshot_xmax(v_new) - v_first;
    v_dumped := v_step < 0;
    WHILE v_step > 1 AND p_limit < (SELECT count(*) FROM (SELECT FROM dlq.dead_letter_transitions t
            WHERE t.at >= v_feed.since - interval '1 hour' AND t.xid >= v_first AND t.xid < v_first + v_step
                AND t.from_status IS NULL AND dlq.in_patterns(t.queue, NULL, v_patterns) LIMIT p_limit + 1) n) LOOP
        v_step := v_step / 2;
        v_part := true;
    END LOOP;
    IF v_part THEN
        v_new := dlq.snapshot_before(v_new, v_first + v_step);
        v_at := v_feed.at; -- all entries that are left were filed at this time or later
    END IF;
    IF v_dumped OR dlq.has_moves(v_feed.snapshot, v_new, v_feed.since) THEN
        INSERT INTO dlq.feed_records (id, feed, entry_id, queue, cluster, topic)
        SELECT dlq.uuid_v7(), p_feed, t.entry_id, t.queue, v_feed.cluster,
            replace(v_feed.topic, '{queue}', regexp_replace(t.queue, '[^a-zA-Z0-9._-]', '_', 'g'))
        FROM (
            SELECT m.* FROM dlq.moves_between(v_feed.snapshot, v_new, v_feed.since) m WHERE NOT v_dumped
            UNION ALL
            SELECT d.* FROM dlq.dead_letter_transitions d WHERE v_dumped AND d.at >= v_feed.since - interval '1 hour'
        ) t
        WHERE t.from_status IS NULL AND dlq.in_patterns(t.queue, NULL, v_patterns)
            AND NOT EXISTS (SELECT FROM dlq.feed_records r WHERE r.entry_id = t.entry_id AND r.feed = p_feed)
            -- If a feed published a record that came back as an entry, it is not published again: it could circulate
            -- forever.
            AND NOT (t.river_job_id < 0 AND EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.id = t.entry_id
                AND 'dlqd-feed'::bytea = ANY ((e.record).header_keys)))
        ORDER BY t.failed_at, abs(t.river_job_id) -- the ids of records count down
        LIMIT p_limit
        ON CONFLICT (entry_id, feed) DO NOTHING;
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    IF v_count >= p_limit THEN
        UPDATE dlq.feeds f SET records = f.records + v_count WHERE f.name = p_feed;
    ELSIF v_count > 0 OR v_dumped OR v_part OR v_at > v_feed.at + interval '10 seconds' THEN
        UPDATE dlq.feeds f SET records = f.records + v_count, snapshot = v_new, at = v_at,
            -- See dlq.refresh_rollups.
            since = CASE WHEN v_dumped OR txid_snapshot_xmin(v_new) >= txid_snapshot_xmax(v_feed.snapshot)
                THEN v_feed.at ELSE v_feed.since END
        WHERE f.name = p_feed;
    END IF;
    RETURN CASE WHEN v_part THEN p_limit ELSE v_count END;
END
$$;
COMMENT ON FUNCTION dlq.collect_feed IS
    'Adds the entries that were filed since the last call, up to p_limit, to the records of a feed, in the order in '
    'which they failed, and moves its position. p_queues: names of queues; * matches any text. Leaves out entries '
    'whose record a feed published. Returns how many it added, or p_limit if there may be more.';

CREATE OR REPLACE FUNCTION dlq.feed_topics(p_feed text) RETURNS TABLE (topic text, waiting_since timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH RECURSIVE g AS (
        (SELECT r.topic, r.at FROM dlq.feed_records r
         WHERE r.feed = p_feed AND r.acknowledged_at IS NULL AND r.failure IS NULL
         ORDER BY r.topic, r.place LIMIT 1)
        UNION ALL
        SELECT n.topic, n.at FROM g CROSS JOIN LATERAL (
            SELECT r.topic, r.at FROM dlq.feed_records r
            WHERE r.feed = p_feed AND r.acknowledged_at IS NULL AND r.failure IS NULL AND r.topic > g.topic
            ORDER BY r.topic, r.place LIMIT 1) n
    )
    SELECT g.topic, g.at FROM g
$$;
COMMENT ON FUNCTION dlq.feed_topics IS
    'The topics of a feed with records that are not published yet, and since when the first of each waits.';

CREATE OR REPLACE FUNCTION dlq.feed_batch(p_feed text, p_topic text, p_limit integer)
    RETURNS TABLE (id uuid, entry_id uuid, ordering_key text, hidden_key text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT r.id, r.entry_id, e.ordering_key, 'hidden:' || encode(sha256(convert_to(
        (SELECT f.key_secret::text FROM dlq.feeds f WHERE f.name = p_feed) || e.ordering_key, 'UTF8')), 'hex')
    FROM (SELECT w.id, w.entry_id, w.place FROM dlq.feed_records w
          WHERE w.feed = p_feed AND w.topic = p_topic AND w.acknowledged_at IS NULL AND w.failure IS NULL
          ORDER BY w.place LIMIT p_limit) r
    LEFT JOIN LATERAL (SELECT q.ordering_key FROM dlq.dead_letter_queue q WHERE q.id = r.entry_id LIMIT 1) e ON true
    ORDER BY r.place
$$;
COMMENT ON FUNCTION dlq.feed_batch IS
    'The next records of a feed to publish to a topic, in order. hidden_key: the same for entries with the same '
    'ordering key, without showing it.';

CREATE OR REPLACE FUNCTION dlq.mark_feed(p_feed text, p_ids uuid[], p_partitions integer[], p_offsets bigint[],
    p_failures text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_count  bigint;
    v_failed bigint;
BEGIN
    WITH marked AS (
        UPDATE dlq.feed_records r SET acknowledged_at = CASE WHEN m.failure = '' THEN now() END,
            partition = CASE WHEN m.failure = '' THEN m.partition END,
            "offset" = CASE WHEN m.failure = '' THEN m.at_offset END, failure = nullif(m.failure, '')
        FROM unnest(p_ids, p_partitions, p_offsets, p_failures) m (id, partition, at_offset, failure)
        WHERE r.id = m.id AND r.acknowledged_at IS NULL AND r.failure IS NULL
        RETURNING r.failure
    )
    SELECT count(*), count(m.failure) INTO v_count, v_failed FROM marked m;
    UPDATE dlq.feeds f SET published = f.published + v_count - v_failed, failed = f.failed + v_failed
    WHERE f.name = p_feed AND v_count > 0;
END
$$;
COMMENT ON FUNCTION dlq.mark_feed IS
    'Records where the broker stored records of a feed, or why they cannot be published (p_failures; otherwise empty).';

CREATE OR REPLACE FUNCTION dlq.report_feed(p_feed text, p_error text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE dlq.feeds f SET error = nullif(p_error, ''),
        error_at = CASE WHEN p_error <> '' THEN coalesce(f.error_at, now()) END
    WHERE f.name = p_feed AND coalesce(f.error, '') <> p_error
$$;
COMMENT ON FUNCTION dlq.report_feed IS 'Records the last error of a feed; empty for none.';

CREATE OR REPLACE FUNCTION dlq.feed_figures() RETURNS TABLE (feed text, cluster text, topic text, published bigint,
    failed bigint, waiting bigint, waiting_since timestamptz, error text, error_at timestamptz, running boolean,
    paused_at timestamptz, paused_by text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT f.name, f.cluster, f.topic, f.published, f.failed, f.records - f.published - f.failed,
        (SELECT min(t.waiting_since) FROM dlq.feed_topics(f.name) t), f.error, f.error_at,
        f.at > now() - interval '1 minute', p.updated_at, p.value
    FROM dlq.feeds f LEFT JOIN dlq.settings p ON p.key = 'feed paused: ' || f.name
    WHERE f.removed_at IS NULL
$$;
COMMENT ON FUNCTION dlq.feed_figures IS
    'The feeds of the policy, and what each has published and has yet to publish. running: a process looked within a '
    'minute for entries to publish.';

CREATE OR REPLACE FUNCTION dlq.is_feed_paused(p_feed text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM dlq.settings s WHERE s.key = 'feed paused: ' || p_feed)
$$;
COMMENT ON FUNCTION dlq.is_feed_paused IS 'Whether an operator paused a feed.';

CREATE OR REPLACE FUNCTION dlq.require_feed(p_feed text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF dlq.scope() IS NOT NULL OR NOT EXISTS (SELECT FROM dlq.feeds f WHERE f.name = p_feed AND f.removed_at IS NULL)
    THEN
        RAISE EXCEPTION 'there is no feed %', p_feed USING ERRCODE = 'DLQ02';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.require_feed IS
    'Raises DLQ02 if the policy has no such feed, or if the caller does not see all queues.';

-- A pause is a row of settings, because the row of the feed is locked while a process collects its entries.
CREATE OR REPLACE FUNCTION dlq.pause_feed(p_feed text, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_feed(p_feed);
    INSERT INTO dlq.settings (key, value) VALUES ('feed paused: ' || p_feed, dlq.actor(p_actor))
    ON CONFLICT (key) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM dlq.record_act('feed ' || p_feed, 'paused', p_actor, p_note);
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.pause_feed IS
    'Stops the publication of a feed, within seconds; its entries wait. Returns false if it is paused already.';

CREATE OR REPLACE FUNCTION dlq.resume_feed(p_feed text, p_actor text DEFAULT session_user, p_note text DEFAULT NULL)
    RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM dlq.require_feed(p_feed);
    DELETE FROM dlq.settings s WHERE s.key = 'feed paused: ' || p_feed;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM dlq.record_act('feed ' || p_feed, 'resumed', p_actor, p_note);
    RETURN true;
END
$$;
COMMENT ON FUNCTION dlq.resume_feed IS
    'Resumes the publication of a feed where it stopped. Returns false if it is not paused.';

-- The records become unpublished again, and keep their order and their ids.
CREATE OR REPLACE FUNCTION dlq.rewind_feed(p_feed text, p_since timestamptz, p_actor text DEFAULT session_user,
    p_note text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_limit constant bigint := 100000;
    v_count bigint;
BEGIN
    PERFORM dlq.require_feed(p_feed);
    IF (SELECT count(*) FROM (SELECT FROM dlq.feed_records r WHERE r.feed = p_feed AND r.at >= p_since
            AND (r.acknowledged_at IS NOT NULL OR r.failure IS NOT NULL) LIMIT v_limit + 1) m) > v_limit THEN
        RAISE EXCEPTION 'feed %: more than % records since %', p_feed, v_limit, p_since
            USING ERRCODE = 'DLQ04', HINT = 'Choose a later time.';
    END IF;
    WITH again AS (
        UPDATE dlq.feed_records r SET acknowledged_at = NULL, partition = NULL, "offset" = NULL, failure = NULL
        FROM (SELECT o.place, o.failure FROM dlq.feed_records o WHERE o.feed = p_feed AND o.at >= p_since
              AND (o.acknowledged_at IS NOT NULL OR o.failure IS NOT NULL)) b
        WHERE r.place = b.place RETURNING b.failure
    ), counted AS (
        UPDATE dlq.feeds f SET failed = f.failed - a.failed, records = f.records + a.acknowledged
        FROM (SELECT count(g.failure) AS failed, count(*) - count(g.failure) AS acknowledged FROM again g) a
        WHERE f.name = p_feed RETURNING a.failed + a.acknowledged AS changed
    )
    SELECT c.changed INTO v_count FROM counted c;
    PERFORM dlq.record_act('feed ' || p_feed, 'rewound', p_actor, p_note,
        jsonb_build_object('since', p_since, 'records', v_count));
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.rewind_feed IS
    'Publishes again, with the same ids, the records whose entries the feed found since a time, including those that '
    'could not be published. Raises DLQ04 if these are more than 100,000. Returns how many there are.';
