-- Sources: records of topics that become entries, and entries that are published as records.
--
-- A record becomes an entry like that of a dlqd message whose first delivery failed elsewhere. Its job id is negative,
-- unlike any job of River, and its job_created_at is the time of the failure. So the entry is filed, decided,
-- redelivered, ordered, masked, archived and erased like any other message.

COMMENT ON COLUMN dlq.record.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.record.topic IS 'The topic that dlqd read it from.';
COMMENT ON COLUMN dlq.record.topic_id IS 'Id of the topic: a topic that is deleted and made again has another.';
COMMENT ON COLUMN dlq.record.partition IS 'Partition of the topic.';
COMMENT ON COLUMN dlq.record."offset" IS 'Offset in the partition.';
COMMENT ON COLUMN dlq.record.at IS 'Timestamp of the record.';
COMMENT ON COLUMN dlq.record.consumer_group IS 'The consumer group that failed; null if unknown.';
COMMENT ON COLUMN dlq.record.node IS 'The node of a pipeline that failed; null if unknown.';
COMMENT ON COLUMN dlq.record.original_topic IS 'The topic in which the record failed, by its envelope; null if unknown.';
COMMENT ON COLUMN dlq.record.original_partition IS 'The partition in which it failed; null if unknown.';
COMMENT ON COLUMN dlq.record.original_offset IS 'The offset at which it failed; null if unknown.';
COMMENT ON COLUMN dlq.record.form IS
    'json, text, binary, decoded (binary, with a payload that the reader decoded), null, or absent (larger than '
    'maxRecordBytes: the value lies in the topic alone).';
COMMENT ON COLUMN dlq.record.size IS 'Bytes of the value; null for a null value.';
COMMENT ON COLUMN dlq.record.sha256 IS 'Hash of the value; null for a null value.';
COMMENT ON COLUMN dlq.record.key IS 'Key of the record; null for a null key, and once it is erased.';
COMMENT ON COLUMN dlq.record.value IS 'Value of the record; null for a null or absent value, and once it is erased.';
COMMENT ON COLUMN dlq.record.header_keys IS 'Keys of the headers, in order.';
COMMENT ON COLUMN dlq.record.header_values IS 'Values of the headers, in the order of the keys.';

-- store_records stores a batch and moves the position in one transaction. If several readers read the same partition,
-- the lock on the row of the position lets one of them store at a time, and only a batch that begins at the position.
--
-- The arrays have one element per record, and are the columns of the batch: one JSON object per record would cost the
-- database half as much again. An unknown text, id or hash is empty, and an unknown number -1. Headers are texts of
-- bytea[].
CREATE OR REPLACE FUNCTION dlq.store_records(p_source text, p_queue text, p_cluster text, p_topic text,
    p_topic_id uuid, p_partition integer, p_first bigint, p_next bigint, p_start boolean, p_lost boolean,
    p_ordered boolean, p_offsets bigint[], p_ats timestamptz[], p_failed_ats timestamptz[], p_delivery_ids text[],
    p_kinds text[], p_ordering_keys text[], p_events jsonb[], p_errors text[], p_histories jsonb[],
    p_attempts integer[], p_metadata jsonb[], p_groups text[], p_nodes text[], p_original_topics text[],
    p_original_topic_ids text[], p_original_partitions integer[], p_original_offsets bigint[], p_forms text[],
    p_sizes bigint[], p_sha256s bytea[], p_contents bytea[], p_header_keys text[], p_header_values text[],
    p_keys bytea[], p_values bytea[],
    OUT accepted boolean, OUT next bigint, OUT entries integer, OUT returned integer, OUT skipped integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_position   bigint;
    v_until      bigint; -- records below this offset were read before the position was moved back
    v_count      constant integer := cardinality(p_offsets);
    v_above      integer := v_count; -- number of records that were not read before, and are stored
    v_jobs       bigint[];
    v_ended      timestamptz[]; -- arrays, because Postgres inlines dlq.entry_id only for columns
    v_skipped    boolean[]; -- null if no record is skipped
    v_entries    uuid[]; -- entries of records that dlqd had published; null if there are none
    v_deliveries bigint[]; -- jobs of these publications
BEGIN
    IF p_start THEN
        INSERT INTO dlq.source_positions (cluster, topic_id, partition, topic, source, queue, first_offset, next_offset)
        VALUES (p_cluster, p_topic_id, p_partition, p_topic, p_source, p_queue, p_first, p_first)
        ON CONFLICT DO NOTHING;
    END IF;
    SELECT s.next_offset, s.stored_until INTO v_position, v_until FROM dlq.source_positions s
    WHERE s.cluster = p_cluster AND s.topic_id = p_topic_id AND s.partition = p_partition FOR UPDATE;
    accepted := coalesce(p_first <= v_position, false);
    next := v_position;
    entries := 0;
    returned := 0;
    skipped := 0;
    IF NOT accepted THEN
        RETURN;
    END IF;
    -- Most batches contain no record that was stored before, and none that dlqd published. Skip the checks for them.
    IF p_first < greatest(v_position, v_until)
       OR EXISTS (SELECT FROM unnest(p_delivery_ids) d WHERE d <> '')
       OR EXISTS (SELECT FROM dlq.source_deliveries d WHERE d.queue = p_queue AND d.content = ANY (p_contents)
            AND d.content IS NOT NULL AND d.settled_at IS NULL)
       OR EXISTS (SELECT FROM unnest(p_original_topics, p_original_partitions, p_original_offsets)
                o (topic, partition, "offset")
            -- LIMIT prevents a join, for which Postgres may read all deliveries.
            CROSS JOIN LATERAL (SELECT FROM dlq.source_deliveries d WHERE d.cluster = p_cluster
                AND d.topic = o.topic AND d.partition = o.partition AND d."offset" = o."offset"
                AND d."offset" IS NOT NULL LIMIT 1) d
            WHERE o."offset" >= 0) THEN
        SELECT array_agg(t.skip ORDER BY t.place), array_agg(t.delivery[1]::uuid ORDER BY t.place),
            array_agg(t.delivery[2]::bigint ORDER BY t.place),
            count(*) FILTER (WHERE NOT t.skip AND t."offset" >= v_until)
        INTO v_skipped, v_entries, v_deliveries, v_above
        FROM (
            -- The call is not in a join, because a join could make one call for equal records (Memoize). Most records
            -- are not a delivery of dlqd, and a call costs more than checking for a delivery first.
            SELECT n.place, n."offset", n.skip, CASE WHEN NOT n.skip AND (n.delivery_id IS NOT NULL
                OR EXISTS (SELECT FROM dlq.source_deliveries d WHERE d.queue = p_queue AND d.content = n.content
                    AND d.content IS NOT NULL AND d.settled_at IS NULL)
                OR EXISTS (SELECT FROM dlq.source_deliveries d WHERE d.cluster = p_cluster
                    AND d.topic = n.original_topic AND d.partition = n.original_partition
                    AND d."offset" = n.original_offset AND d."offset" IS NOT NULL))
                THEN (SELECT ARRAY[t.entry_id::text, t.job_id::text] FROM dlq.take_delivery(p_queue, p_cluster, n.came,
                    n.delivery_id, n.original_topic, n.original_partition, n.original_offset, n.consumer_group,
                    n.content, n.original_topic_id) t) END AS delivery
            FROM (
                SELECT r.*, r."offset" < v_position
                    OR r.delivery_id IS NOT NULL AND EXISTS (SELECT FROM dlq.feed_records f WHERE f.id = r.delivery_id
                        AND f.cluster = p_cluster AND f.topic = p_topic) AND cardinality(r.headers) = 4 -- not a copy
                    OR r."offset" < v_until AND dlq.is_stored(p_cluster, p_topic_id, r.message_id, r.at, r.sha256,
                        r.came, r.delivery_id, p_queue) AS skip
                FROM (
                    SELECT u.place, u."offset", u.at, nullif(u.delivery_id, '')::uuid AS delivery_id,
                        nullif(u.consumer_group, '') AS consumer_group, nullif(u.original_topic, '') AS original_topic,
                        nullif(u.original_topic_id, '')::uuid AS original_topic_id,
                        nullif(u.original_partition, -1) AS original_partition,
                        nullif(u.original_offset, -1) AS original_offset, nullif(u.sha256, '') AS sha256, u.content,
                        u.headers::bytea[] AS headers, concat(p_topic, '/', p_partition, '/', u."offset") AS message_id,
                        concat(p_cluster, ' ', p_topic, '/', p_partition, '/', u."offset", ' ', p_topic_id, ' ',
                            extract(epoch FROM u.at)) AS came
                    FROM unnest(p_offsets, p_ats, p_delivery_ids, p_groups, p_original_topics, p_original_topic_ids,
                        p_original_partitions, p_original_offsets, p_sha256s, p_contents, p_header_keys)
                        WITH ORDINALITY u ("offset", at, delivery_id, consumer_group, original_topic,
                            original_topic_id, original_partition, original_offset, sha256, content, headers, place)
                ) r
                ORDER BY r.place OFFSET 0
            ) n
        ) t;
    END IF;
    v_jobs := ARRAY(SELECT -nextval('dlq.record_ids') FROM generate_series(1, v_count));
    v_ended := ARRAY(SELECT least(greatest(f.at, '1970-01-01Z'), now())
        FROM unnest(p_failed_ats) WITH ORDINALITY f (at, place) ORDER BY f.place);
    -- Each statement reads the arrays itself, because storing the shared rows costs more.
    WITH rows AS NOT MATERIALIZED (
        SELECT u.*, left(concat(p_topic, '/', p_partition, '/', u."offset"), 255) AS event_id,
            left(nullif(u.key_text, ''), 255) AS ordering_key,
            ROW (p_cluster, p_topic, p_topic_id, p_partition, u."offset", u.at, nullif(u.consumer_group, ''),
                nullif(u.node, ''), nullif(u.original_topic, ''), nullif(u.original_partition, -1),
                nullif(u.original_offset, -1), u.form, nullif(u.size, -1), nullif(u.sha256, ''), u.key, u.value,
                u.header_keys::bytea[], u.header_values::bytea[])::dlq.record AS record
        FROM unnest(v_jobs, v_skipped, v_entries, v_deliveries, p_offsets, p_ats, v_ended, p_kinds,
            p_ordering_keys, p_events, p_errors, p_histories, p_attempts, p_metadata, p_groups, p_nodes,
            p_original_topics, p_original_partitions, p_original_offsets, p_forms, p_sizes, p_sha256s, p_header_keys,
            p_header_values, p_keys, p_values)
            WITH ORDINALITY u (job, skip, entry_id, job_id, "offset", at, ended_at, kind, key_text, event, error,
                errors, attempts, metadata, consumer_group, node, original_topic, original_partition,
                original_offset, form, size, sha256, header_keys, header_values, key, value, place)
        WHERE u.skip IS NOT TRUE
    ), inserted AS (
        INSERT INTO dlq.dead_letter_inbox
            (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, source, ordering_key, priority,
             original_event, error_message, retry_history, retry_count, max_retries, metadata, next_retry_at,
             captured_by, first_failed_at, last_failed_at, record)
        SELECT dlq.entry_id(r.job, r.ended_at), r.event_id, r.job, r.ended_at, p_queue, left(r.kind, 255),
            'dlqd_message', p_source, r.ordering_key, 1, r.event, r.error, r.errors, r.attempts,
            greatest(r.attempts, 2), r.metadata, now(), 'source', r.ended_at, r.ended_at, r.record
        FROM rows r WHERE r.entry_id IS NULL
        RETURNING 1
    ), ordered AS (
        INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
        SELECT p_queue, r.ordering_key, r.job, r.ended_at FROM rows r
        WHERE p_ordered AND r.entry_id IS NULL AND r.ordering_key IS NOT NULL ORDER BY r.place
    ), came_back AS (
        -- The fact contains all data for a new entry, because the entry may be deleted before the fact is applied.
        INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job)
        SELECT r.job, r.ended_at, 'returned', r.entry_id, jsonb_build_object('state', 'discarded', 'attempt',
            r.attempts, 'finalized_at', r.ended_at, 'errors', r.errors, 'metadata', r.metadata, 'redelivery', r.job_id,
            'ordered', p_ordered,
            'row', jsonb_build_object('id', dlq.entry_id(r.job, r.ended_at), 'event_id', r.event_id, 'river_job_id',
                r.job, 'job_created_at', r.ended_at, 'queue', p_queue, 'kind', left(r.kind, 255), 'job_kind',
                'dlqd_message', 'source', p_source, 'ordering_key', r.ordering_key, 'original_event', r.event,
                'error_message', r.error, 'retry_history', r.errors, 'retry_count', r.attempts, 'max_retries',
                greatest(r.attempts, 2), 'metadata', r.metadata, 'first_failed_at', r.ended_at, 'last_failed_at',
                r.ended_at, 'record', to_jsonb(r.record)))
        FROM rows r WHERE v_entries IS NOT NULL AND r.entry_id IS NOT NULL ORDER BY r.place
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM inserted), (SELECT count(*) FROM came_back) INTO entries, returned;
    skipped := v_count - entries - returned;
    IF p_next > v_position THEN
        next := p_next;
        v_until := greatest(v_until, v_position);
        UPDATE dlq.source_positions s SET next_offset = p_next, topic = p_topic, source = p_source, queue = p_queue,
            records = s.records + entries + returned,
            holes = s.holes + CASE WHEN p_lost THEN 0 ELSE greatest(p_next - v_until, 0) - v_above END,
            lost = s.lost + CASE WHEN p_lost THEN greatest(p_next - v_until, 0) ELSE 0 END, updated_at = now()
        WHERE s.cluster = p_cluster AND s.topic_id = p_topic_id AND s.partition = p_partition;
        IF p_lost AND p_next > v_until THEN
            PERFORM dlq.record_act('source ' || p_source, 'offsets lost', 'source', NULL,
                jsonb_build_object('cluster', p_cluster, 'topic', p_topic, 'partition', p_partition, 'first',
                    v_until, 'next', p_next));
        END IF;
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.store_records IS
    'Stores a batch of records of a partition, from offset p_first to the one before p_next, and moves the position. '
    'Not accepted if the batch begins above the position (next), or if there is none (next is null) and p_start is '
    'false. Records below the position are skipped, and so are those that were stored before the position was moved '
    'back, and those that a feed of dlqd published to the topic. A record that dlqd had published for an entry of the '
    'queue that still exists (dlq.take_delivery) becomes a fact "returned" of that entry; each of the others becomes '
    'an entry in the inbox.';

CREATE OR REPLACE FUNCTION dlq.append_records(p_source text, p_queue text, p_cluster text, p_topic text,
    p_topic_id uuid, p_partition integer, p_first bigint, p_next bigint, p_start boolean, p_lost boolean,
    p_ordered boolean, p_records jsonb[], p_keys bytea[], p_values bytea[],
    OUT accepted boolean, OUT next bigint, OUT entries integer, OUT returned integer, OUT skipped integer)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.* FROM (
        SELECT array_agg(r."offset" ORDER BY u.place) AS offsets, array_agg(r.at ORDER BY u.place) AS ats,
            array_agg(r.failed_at ORDER BY u.place) AS failed_ats,
            array_agg(coalesce(r.delivery_id, '') ORDER BY u.place) AS delivery_ids,
            array_agg(r.kind ORDER BY u.place) AS kinds,
            array_agg(coalesce(r.ordering_key, '') ORDER BY u.place) AS ordering_keys,
            array_agg(r.event ORDER BY u.place) AS events, array_agg(r.error ORDER BY u.place) AS errors,
            array_agg(r.errors ORDER BY u.place) AS histories, array_agg(r.attempts ORDER BY u.place) AS attempts,
            array_agg(r.metadata ORDER BY u.place) AS metadata,
            array_agg(coalesce(r.consumer_group, '') ORDER BY u.place) AS groups,
            array_agg(coalesce(r.node, '') ORDER BY u.place) AS nodes,
            array_agg(coalesce(r.original_topic, '') ORDER BY u.place) AS original_topics,
            array_agg(coalesce(r.original_topic_id, '') ORDER BY u.place) AS original_topic_ids,
            array_agg(coalesce(r.original_partition, -1) ORDER BY u.place) AS original_partitions,
            array_agg(coalesce(r.original_offset, -1) ORDER BY u.place) AS original_offsets,
            array_agg(r.form ORDER BY u.place) AS forms, array_agg(coalesce(r.size, -1) ORDER BY u.place) AS sizes,
            array_agg(coalesce(decode(r.sha256, 'hex'), '') ORDER BY u.place) AS sha256s,
            array_agg(decode(r.content, 'hex') ORDER BY u.place) AS contents,
            array_agg(ARRAY(SELECT decode(h.pair ->> 0, 'base64') FROM jsonb_array_elements(r.headers) WITH ORDINALITY
                h (pair, place) ORDER BY h.place)::text ORDER BY u.place) AS header_keys,
            array_agg(ARRAY(SELECT decode(h.pair ->> 1, 'base64') FROM jsonb_array_elements(r.headers) WITH ORDINALITY
                h (pair, place) ORDER BY h.place)::text ORDER BY u.place) AS header_values
        FROM unnest(p_records) WITH ORDINALITY u (record, place)
        CROSS JOIN LATERAL jsonb_to_record(u.record) AS r ("offset" bigint, at timestamptz, failed_at timestamptz,
            delivery_id text, kind text, ordering_key text, event jsonb, error text, errors jsonb, attempts integer,
            metadata jsonb, consumer_group text, node text, original_topic text, original_topic_id text,
            original_partition integer, original_offset bigint, form text, size bigint, sha256 text, content text,
            headers jsonb)
    ) b
    CROSS JOIN LATERAL dlq.store_records(p_source, p_queue, p_cluster, p_topic, p_topic_id, p_partition, p_first,
        p_next, p_start, p_lost, p_ordered, coalesce(b.offsets, '{}'), b.ats, b.failed_ats, b.delivery_ids, b.kinds,
        b.ordering_keys, b.events, b.errors, b.histories, b.attempts, b.metadata, b.groups, b.nodes,
        b.original_topics, b.original_topic_ids, b.original_partitions, b.original_offsets, b.forms, b.sizes,
        b.sha256s, b.contents, b.header_keys, b.header_values, p_keys, p_values) s
$$;
COMMENT ON FUNCTION dlq.append_records IS
    'dlq.store_records for a process of an older release, which passes each record as a JSON object.';

-- take_delivery is volatile. So if a batch has two equal records, the second does not get the delivery that the first
-- one took.
CREATE OR REPLACE FUNCTION dlq.take_delivery(p_queue text, p_cluster text, p_came text, p_id uuid, p_topic text,
    p_partition integer, p_offset bigint, p_group text, p_content bytea, p_topic_id uuid DEFAULT NULL,
    OUT entry_id uuid, OUT job_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_id      uuid;
    v_by_hash boolean := false;
BEGIN
    IF p_id IS NOT NULL THEN
        v_id := (SELECT d.id FROM dlq.source_deliveries d WHERE d.id = p_id AND d.queue = p_queue);
    END IF;
    IF v_id IS NULL AND p_offset IS NOT NULL THEN
        v_id := (SELECT d.id FROM dlq.source_deliveries d WHERE d.cluster = p_cluster AND d.topic = p_topic
            AND d.partition = p_partition AND d."offset" = p_offset AND d.queue = p_queue
            AND coalesce(d.topic_id = p_topic_id, true) ORDER BY d.id DESC LIMIT 1);
    ELSIF v_id IS NULL AND p_id IS NULL AND p_content IS NOT NULL THEN
        v_by_hash := true;
    END IF;
    LOOP
        IF v_by_hash THEN
            v_id := (SELECT d.id FROM dlq.source_deliveries d
                WHERE d.queue = p_queue AND d.content = p_content AND d.settled_at IS NULL AND d.cluster = p_cluster
                    AND d.acknowledged_at > now() - interval '1 day' AND d.topic = coalesce(p_topic, d.topic)
                    AND coalesce(d.consumer_group = p_group, true)
                    AND (SELECT e.id FROM dlq.dead_letter_queue e WHERE e.id = d.entry_id LIMIT 1) IS NOT NULL
                ORDER BY d.id LIMIT 1);
        END IF;
        IF v_id IS NULL THEN
            RETURN;
        END IF;
        UPDATE dlq.source_deliveries d SET settled_at = coalesce(d.settled_at, now()),
            came_back = CASE WHEN d.came_back IS NOT NULL
                THEN d.came_back[greatest(cardinality(d.came_back) - 98, 1):] || p_came END
        WHERE d.id = v_id AND (d.settled_at IS NULL OR NOT v_by_hash)
            AND (SELECT e.id FROM dlq.dead_letter_queue e WHERE e.id = d.entry_id LIMIT 1) IS NOT NULL
        RETURNING d.entry_id, d.job_id INTO entry_id, job_id;
        -- If two partitions have equal records, another session may have taken the delivery meanwhile. Look for another
        -- one.
        EXIT WHEN FOUND OR NOT v_by_hash;
    END LOOP;
END
$$;
COMMENT ON FUNCTION dlq.take_delivery IS
    'Finds the delivery of a record that came back, and returns its entry and its job. It is found by the id in the '
    'record''s header (p_id); else by the place that the envelope names, at which the broker stored the delivery, in a '
    'topic with the same id as far as both are known; else, if the envelope names no offset, by the hash of key and '
    'value and what the envelope names, within a day of the delivery, each delivery once. Null if there is no such '
    'delivery, or if the entry is deleted.';

CREATE OR REPLACE FUNCTION dlq.return_record(p_entry uuid, p_fact jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_where   constant text := 'it came back: ' || (p_fact #>> '{row,record,topic}') || '/'
        || (p_fact #>> '{row,record,partition}') || ' at offset ' || (p_fact #>> '{row,record,offset}');
    v_at      timestamptz := dlq.failed_at(p_fact);
    v_errors  jsonb := coalesce(p_fact -> 'errors', '[]');
    v_entry   record;
    v_fail    record;
    v_used_up boolean;
BEGIN
    IF p_fact -> 'row' IS NULL THEN
        RETURN; -- its payload was erased
    END IF;
    SELECT e.status, e.stage, e.original_event = '{"erased": true}' AS erased, e.last_failed_at,
        e.dlq_retry_count >= e.dlq_max_retries AS used_up INTO v_entry
    FROM dlq.dead_letter_queue e WHERE e.id = p_entry FOR UPDATE;
    IF v_entry.status IS NULL OR v_entry.erased THEN
        WITH came AS (
            INSERT INTO dlq.dead_letter_inbox
                (id, event_id, river_job_id, job_created_at, queue, kind, job_kind, source, ordering_key, priority,
                 original_event, error_message, retry_history, retry_count, max_retries, metadata, next_retry_at,
                 captured_by, first_failed_at, last_failed_at, record)
            SELECT r.id, r.event_id, r.river_job_id, r.job_created_at, r.queue, r.kind, r.job_kind, r.source,
                r.ordering_key, 1, r.original_event, r.error_message, r.retry_history, r.retry_count, r.max_retries,
                r.metadata, now(), 'source', r.first_failed_at, r.last_failed_at, r.record
            FROM jsonb_populate_record(NULL::dlq.dead_letter_queue, p_fact -> 'row') r
            RETURNING queue, ordering_key, river_job_id, job_created_at
        )
        INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
        SELECT c.queue, c.ordering_key, c.river_job_id, c.job_created_at FROM came c
        WHERE c.ordering_key IS NOT NULL AND (p_fact ->> 'ordered')::boolean;
        RETURN;
    END IF;
    -- The record failed after the entry's last failure. Its time may still be earlier, because its envelope may have
    -- the time of the first failure.
    IF v_at <= v_entry.last_failed_at THEN
        v_at := v_entry.last_failed_at + interval '1 microsecond';
        v_errors := jsonb_set(v_errors, '{-1,at}', to_jsonb(v_at));
    END IF;
    v_used_up := v_entry.status = 'dlq_failed' OR v_entry.used_up;
    IF dlq.is_open(v_entry.status) THEN
        PERFORM dlq.failed_again(p_entry, v_errors, p_fact -> 'metadata', (p_fact ->> 'attempt')::integer, NULL, v_at,
            'source');
        RETURN;
    END IF;
    v_fail := dlq.describe_failure(v_errors, p_fact -> 'metadata', (p_fact ->> 'attempt')::integer, v_at);
    IF v_entry.status = 'dlq_failed' THEN -- the entry remains failed: only an operator can replay it
        PERFORM set_config('dlq.recording', txid_current()::text, true); -- dlq.on_content allows the change
    END IF;
    UPDATE dlq.dead_letter_queue e SET
        status = (CASE WHEN v_entry.stage IN ('resolved', 'archived') THEN 'dlq_manual' WHEN v_used_up THEN 'dlq_failed'
            ELSE 'dlq_pending' END)::dlq.dead_letter_status,
        strategy = CASE WHEN v_entry.stage IN ('resolved', 'archived') THEN 'manual'::dlq.strategy END,
        rule = CASE WHEN v_entry.stage = 'returned' THEN e.rule WHEN v_entry.stage = 'failed' THEN e.rule
            ELSE 'came-back' END,
        parked_by = CASE WHEN v_entry.stage IN ('resolved', 'archived') THEN 'source' END,
        next_retry_at = CASE WHEN v_entry.stage = 'returned' AND NOT v_used_up THEN now() END,
        error_message = v_fail.error_message, error_type = v_fail.error_type, error_code = v_fail.error_code,
        error_title = v_fail.error_title,
        reported_class = v_fail.error_class,
        error_class = coalesce(v_fail.error_class, CASE WHEN v_used_up OR v_entry.stage <> 'returned' THEN e.error_class
            END),
        fingerprint = CASE WHEN v_used_up OR v_entry.stage <> 'returned' THEN e.fingerprint END,
        error_stack_trace = v_fail.error_stack_trace, error_context = v_fail.error_context,
        retry_history = e.retry_history || v_fail.retry_history, last_failed_at = v_at,
        metadata = CASE WHEN v_entry.stage = 'returned'
            THEN dlq.metadata_after(e.metadata, true, e.river_job_id, p_fact -> 'metadata') ELSE e.metadata END,
        move = CASE WHEN v_entry.stage <> 'failed' THEN jsonb_build_object('actor', 'source', 'reason', v_where) END
    WHERE e.id = p_entry AND e.stage = v_entry.stage;
    IF v_entry.status = 'dlq_failed' THEN
        PERFORM set_config('dlq.recording', '', true);
        INSERT INTO dlq.dead_letter_transitions (entry_id, from_status, to_status, actor, reason, strategy, rule,
            river_job_id, queue, kind, error_class, from_class, config_version, error_type, failed_at)
        SELECT e.id, e.status, e.status, 'source', v_where, e.strategy, e.rule, e.river_job_id, e.queue, e.kind,
            e.error_class, e.error_class, e.config_version, coalesce(v_fail.error_type, ''), v_at
        FROM dlq.dead_letter_queue e WHERE e.id = p_entry AND e.stage = 'failed';
    END IF;
END
$$;
COMMENT ON FUNCTION dlq.return_record IS
    'Applies a fact "returned": the record that dlqd published for an entry came back as a dead letter. The entry '
    'has failed again: a returned one is pending, or failed if its DLQ retries are spent; a resolved or archived one '
    'becomes manual; an open or failed one only gets the further failure. If the entry is deleted or erased, the '
    'record becomes a new entry, unless the fact itself was erased.';

CREATE OR REPLACE FUNCTION dlq.without_bytes(p_record dlq.record) RETURNS dlq.record
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_record.topic IS NULL THEN
        RETURN NULL;
    END IF;
    p_record.sha256 := NULL;
    p_record.key := NULL;
    p_record.value := NULL;
    p_record.header_keys := NULL;
    p_record.header_values := NULL;
    RETURN p_record;
END
$$;
COMMENT ON FUNCTION dlq.without_bytes IS 'A record without its key, value and headers: where it came from.';

CREATE OR REPLACE FUNCTION dlq.record_of_job(p_job bigint, p_created_at timestamptz)
    RETURNS TABLE (entry_id uuid, edited boolean, run_id uuid, record dlq.record)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY SELECT e.id, e.edited_event IS NOT NULL, m.run_id, e.record
    FROM dlq.entry_jobs m JOIN dlq.dead_letter_open e ON e.id = m.entry_id
    WHERE m.job_id = p_job AND m.job_created_at = p_created_at AND (e.record).topic IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.record_of_job IS
    'The record that a job of River redelivers; no row if it is not a redelivery of a record''s entry.';

CREATE OR REPLACE FUNCTION dlq.begin_delivery(p_entry uuid, p_queue text, p_job bigint, p_created_at timestamptz,
    p_cluster text, p_topic text, p_group text DEFAULT NULL, p_content bytea DEFAULT NULL) RETURNS uuid
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO dlq.source_deliveries AS d (id, entry_id, queue, job_id, job_created_at, cluster, topic, consumer_group,
        content)
    VALUES (dlq.uuid_v7(), p_entry, p_queue, p_job, p_created_at, p_cluster, p_topic, p_group, p_content)
    ON CONFLICT (job_id, job_created_at) DO UPDATE SET cluster = excluded.cluster, topic = excluded.topic,
        consumer_group = excluded.consumer_group, content = excluded.content
    RETURNING id
$$;
COMMENT ON FUNCTION dlq.begin_delivery IS
    'Records that a redelivery is about to be published. Returns its id, which is the same if it is published again.';

CREATE OR REPLACE FUNCTION dlq.end_delivery(p_id uuid, p_partition integer, p_offset bigint,
    p_topic_id uuid DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    -- If the record was published before, the consumer group may be past that copy, or it came back. Both say nothing
    -- about this copy.
    UPDATE dlq.source_deliveries d SET acknowledged_at = now(), partition = p_partition, "offset" = p_offset,
        topic_id = p_topic_id, consumed_at = NULL, settled_at = NULL
    WHERE d.id = p_id
$$;
COMMENT ON FUNCTION dlq.end_delivery IS 'Records where the broker stored a published record.';

-- dlq.resolve_by calls is_published only for entries of records.
CREATE OR REPLACE FUNCTION dlq.is_published(p_entry uuid, p_job bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN (SELECT d.id FROM dlq.source_deliveries d WHERE d.job_id = p_job AND d.entry_id = p_entry
        AND d.acknowledged_at IS NOT NULL LIMIT 1) IS NOT NULL;
END
$$;
COMMENT ON FUNCTION dlq.is_published IS
    'Whether the broker has acknowledged the record that a job published for an entry.';

CREATE OR REPLACE FUNCTION dlq.unread_groups() RETURNS TABLE (cluster text, consumer_group text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH RECURSIVE g AS (
        (SELECT d.cluster, d.consumer_group FROM dlq.source_deliveries d
         WHERE d.consumer_group IS NOT NULL AND d."offset" IS NOT NULL AND d.consumed_at IS NULL
             AND d.settled_at IS NULL
         ORDER BY d.cluster, d.consumer_group LIMIT 1)
        UNION ALL
        SELECT n.cluster, n.consumer_group FROM g CROSS JOIN LATERAL (
            SELECT d.cluster, d.consumer_group FROM dlq.source_deliveries d
            WHERE d.consumer_group IS NOT NULL AND d."offset" IS NOT NULL AND d.consumed_at IS NULL
                AND d.settled_at IS NULL AND (d.cluster, d.consumer_group) > (g.cluster, g.consumer_group)
            ORDER BY d.cluster, d.consumer_group LIMIT 1) n
    )
    -- If a group has many such deliveries, only some of them are read.
    SELECT g.cluster, g.consumer_group FROM g CROSS JOIN LATERAL (
        SELECT count(*) AS deliveries, count(e.id) AS returned
        FROM (SELECT d.entry_id FROM dlq.source_deliveries d
              WHERE d.cluster = g.cluster AND d.consumer_group = g.consumer_group AND d."offset" IS NOT NULL
                  AND d.consumed_at IS NULL AND d.settled_at IS NULL LIMIT 1000) d
        LEFT JOIN dlq.dead_letter_returned e ON e.id = d.entry_id) n
    WHERE n.returned > 0 OR n.deliveries = 1000
$$;
COMMENT ON FUNCTION dlq.unread_groups IS
    'The consumer groups that may not have read past a published record whose entry is in dead_letter_returned. '
    'Checks at most 1,000 records of a group; a group with that many is in the result without a further check.';

CREATE OR REPLACE FUNCTION dlq.mark_read(p_cluster text, p_group text, p_topics text[], p_partitions integer[],
    p_offsets bigint[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_count integer;
BEGIN
    UPDATE dlq.source_deliveries d SET consumed_at = now()
    WHERE d.consumed_at IS NULL AND d.id IN (
        SELECT n.id FROM unnest(p_topics, p_partitions, p_offsets) c (topic, partition, next)
        CROSS JOIN LATERAL (
            SELECT s.id FROM dlq.source_deliveries s
            WHERE s.cluster = p_cluster AND s.consumer_group = p_group AND s.topic = c.topic
                AND s.partition = c.partition AND s."offset" < c.next AND s."offset" IS NOT NULL
                AND s.consumed_at IS NULL AND s.settled_at IS NULL
            ORDER BY s."offset" LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED) n
        LIMIT 5000);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.mark_read IS
    'Records that the committed offsets of a consumer group are past published records, up to 5,000 of them. Returns '
    'how many.';

CREATE OR REPLACE FUNCTION dlq.resolve_returned(p_queue text, p_quiet interval, p_returned_for interval,
    p_limit integer DEFAULT 500) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_due     uuid[]; -- deliveries whose quiet time is over
    v_entries uuid[];
    v_held    uuid[];
    v_ids     uuid[];
    v_count   integer := 0;
BEGIN
    SELECT array_agg(d.id), array_agg(d.entry_id) INTO v_due, v_entries
    FROM (SELECT s.id, s.entry_id FROM dlq.source_deliveries s
          WHERE s.queue = p_queue AND s.consumed_at <= now() - p_quiet AND s.settled_at IS NULL
          ORDER BY s.consumed_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) d;
    IF v_due IS NOT NULL THEN
        v_ids := ARRAY(SELECT e.id FROM dlq.dead_letter_returned e WHERE e.id = ANY (v_entries) ORDER BY e.id
            FOR UPDATE SKIP LOCKED);
        v_held := ARRAY(SELECT e.id FROM dlq.dead_letter_returned e WHERE e.id = ANY (v_entries)
            AND e.id <> ALL (v_ids));
        UPDATE dlq.dead_letter_queue e SET status = 'dlq_resolved',
            move = jsonb_build_object('actor', 'source', 'reason', 'consumer group ' || d.consumer_group
                || ' is past ' || d.topic || '/' || d.partition || ' at offset ' || d."offset")
        FROM unnest(v_ids) i (id)
        CROSS JOIN LATERAL (SELECT s.* FROM dlq.source_deliveries s WHERE s.entry_id = i.id
            AND s.acknowledged_at IS NOT NULL ORDER BY s.id DESC LIMIT 1) d
        WHERE e.id = i.id AND e.stage = 'returned' AND e.status = 'dlq_returned' AND d.id = ANY (v_due);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        PERFORM dlq.supersede(v_ids, '{}', 'source');
        -- If the entry is not returned, an operator or a later delivery has decided about it, unless the end of this
        -- delivery's job is not applied yet.
        UPDATE dlq.source_deliveries d SET settled_at = now() WHERE d.id = ANY (v_due)
            AND d.entry_id <> ALL (v_held) AND NOT EXISTS (SELECT FROM dlq.dead_letter_open e
                WHERE e.id = d.entry_id AND e.redelivery_job_id = d.job_id);
    END IF;
    IF p_returned_for > interval '0' THEN
        v_ids := ARRAY(SELECT e.id FROM dlq.dead_letter_returned e
            WHERE e.queue = p_queue AND e.closed_at <= now() - p_returned_for
            ORDER BY e.closed_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
        IF v_ids <> '{}' THEN
            UPDATE dlq.dead_letter_queue e SET status = 'dlq_resolved', move = jsonb_build_object('actor', 'source',
                'reason', 'it did not come back for ' || justify_interval(p_returned_for))
            WHERE e.id = ANY (v_ids) AND e.stage = 'returned' AND e.status = 'dlq_returned';
            PERFORM dlq.supersede(v_ids, '{}', 'source');
            v_count := v_count + cardinality(v_ids);
        END IF;
    END IF;
    RETURN v_count;
END
$$;
COMMENT ON FUNCTION dlq.resolve_returned IS
    'Resolves returned entries of a queue, up to p_limit of each kind: those whose consumer group has been past their '
    'record for p_quiet, and those that were returned p_returned_for ago (0: never). Entries that another session has '
    'locked are left for the next call. Returns how many it resolved.';

-- p_starts is the last parameter, because processes of an earlier version call the function without it.
CREATE OR REPLACE FUNCTION dlq.report_progress(p_source text, p_cluster text, p_queue text, p_topics text[],
    p_partitions integer[], p_states text[], p_nexts bigint[], p_ends bigint[], p_errors text[],
    p_starts bigint[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO dlq.source_progress AS s (source, cluster, queue, topic, partition, state, next_offset, end_offset,
        start_offset, error, error_at, behind_since)
    SELECT p_source, p_cluster, p_queue, r.topic, r.partition, r.state, nullif(r.next, -1), nullif(r.stop, -1),
        nullif(r.start, -1), nullif(r.error, ''), CASE WHEN r.error <> '' THEN now() END,
        CASE WHEN r.next >= 0 AND r.stop > r.next THEN now() END
    FROM unnest(p_topics, p_partitions, p_states, p_nexts, p_ends, p_errors, p_starts)
        r (topic, partition, state, next, stop, error, start)
    ORDER BY r.topic, r.partition
    ON CONFLICT (source, topic, partition) DO UPDATE SET cluster = excluded.cluster, queue = excluded.queue,
        state = excluded.state, next_offset = excluded.next_offset, end_offset = excluded.end_offset,
        start_offset = excluded.start_offset, error = excluded.error, at = now(),
        error_at = CASE WHEN excluded.error IS NOT NULL THEN coalesce(s.error_at, excluded.error_at) END,
        behind_since = CASE WHEN excluded.behind_since IS NOT NULL AND s.next_offset = excluded.next_offset
            THEN coalesce(s.behind_since, excluded.behind_since) ELSE excluded.behind_since END
$$;
COMMENT ON FUNCTION dlq.report_progress IS 'Records what the readers of a source report. -1: unknown.';

CREATE OR REPLACE FUNCTION dlq.record_origins(p_filter jsonb, p_limit integer DEFAULT 1000)
    RETURNS TABLE (queue text, topic text, original_topic text, consumer_group text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY EXECUTE 'SELECT DISTINCT e.queue, (e.record).topic, (e.record).original_topic,
            (e.record).consumer_group
        FROM dlq.dead_letter_queue e WHERE e.river_job_id < 0 AND (e.record).topic IS NOT NULL AND '
        || dlq.filter_where(p_filter) || ' LIMIT $2' USING p_filter, p_limit;
END
$$;
COMMENT ON FUNCTION dlq.record_origins IS
    'The topics and consumer groups in which the records of a filter''s entries failed, up to p_limit.';
