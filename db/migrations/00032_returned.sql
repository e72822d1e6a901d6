-- +goose Up
-- Entries whose record was published and whose consumer group is not known to be past it. The table is made and
-- indexed on its own: attaching it to the empty stage locks no writer of the other partitions.
CREATE TABLE dlq.dead_letter_returned (LIKE dlq.dead_letter_queue INCLUDING ALL EXCLUDING INDEXES EXCLUDING COMMENTS,
    PRIMARY KEY (id), CONSTRAINT columns_follow_status CHECK (
        status = 'dlq_returned' AND closed_at IS NOT NULL AND redelivery_job_id IS NULL),
    CONSTRAINT stage_is_returned CHECK (stage IS NOT NULL AND stage = 'returned'))
    WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX dead_letter_returned_due ON dlq.dead_letter_returned (queue, closed_at);
CREATE INDEX dead_letter_returned_river_job ON dlq.dead_letter_returned (river_job_id);
CREATE INDEX dead_letter_returned_by_event ON dlq.dead_letter_returned (event_id) WHERE event_id IS NOT NULL;
CREATE INDEX dead_letter_returned_by_queue ON dlq.dead_letter_returned (queue, id);
CREATE INDEX dead_letter_returned_by_kind ON dlq.dead_letter_returned (kind, id);
CREATE INDEX dead_letter_returned_by_class ON dlq.dead_letter_returned (error_class, id);
CREATE INDEX dead_letter_returned_by_fingerprint ON dlq.dead_letter_returned (queue, fingerprint, id)
    WHERE fingerprint IS NOT NULL;
ALTER TABLE dlq.dead_letter_queue ATTACH PARTITION dlq.dead_letter_returned FOR VALUES IN ('returned');
ALTER TABLE dlq.dead_letter_returned DROP CONSTRAINT stage_is_returned;
COMMENT ON TABLE dlq.dead_letter_returned IS
    'Entries whose record is published again, until the consumer group that failed is past it.';

ALTER TABLE dlq.source_deliveries ADD COLUMN consumer_group text, ADD COLUMN content bytea,
    ADD COLUMN consumed_at timestamptz, ADD COLUMN settled_at timestamptz, ADD COLUMN came_back text[];
ALTER TABLE dlq.source_deliveries ALTER COLUMN came_back SET DEFAULT '{}';
COMMENT ON COLUMN dlq.source_deliveries.consumer_group IS 'The consumer group that had failed; null if unknown.';
COMMENT ON COLUMN dlq.source_deliveries.content IS
    'Hash of the key and value that were published; null once the entry is erased.';
COMMENT ON COLUMN dlq.source_deliveries.consumed_at IS
    'When dlqd first saw that the committed offset of the consumer group is past the record.';
COMMENT ON COLUMN dlq.source_deliveries.settled_at IS
    'When the record came back, or its entry was resolved some time after consumed_at; dlqd waits no longer.';
COMMENT ON COLUMN dlq.source_deliveries.came_back IS
    'The records that it came back as, up to 100 of them (dlq.append_records); null if it was sent before they were '
    'recorded.';
CREATE INDEX source_deliveries_came_back ON dlq.source_deliveries USING gin (came_back) WHERE came_back <> '{}';
CREATE INDEX source_deliveries_place ON dlq.source_deliveries (cluster, topic, partition, "offset")
    WHERE "offset" IS NOT NULL;
CREATE INDEX source_deliveries_content ON dlq.source_deliveries (queue, content)
    WHERE content IS NOT NULL AND settled_at IS NULL;
CREATE INDEX source_deliveries_unread ON dlq.source_deliveries (cluster, consumer_group, topic, partition, "offset")
    WHERE consumer_group IS NOT NULL AND "offset" IS NOT NULL AND consumed_at IS NULL AND settled_at IS NULL;
CREATE INDEX source_deliveries_read ON dlq.source_deliveries (queue, consumed_at)
    WHERE consumed_at IS NOT NULL AND settled_at IS NULL;

-- +goose Down
-- Entries of the state remain, and an older dlqd refuses it.
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM dlq.dead_letter_returned) THEN
        RAISE EXCEPTION 'there are entries in the state dlq_returned, which the older version does not have'
            USING HINT = 'Resolve or discard them first: the filter is status:returned.';
    END IF;
END
$$;
-- +goose StatementEnd
DROP TABLE dlq.dead_letter_returned;
DROP INDEX dlq.source_deliveries_came_back, dlq.source_deliveries_read, dlq.source_deliveries_unread,
    dlq.source_deliveries_content, dlq.source_deliveries_place;
ALTER TABLE dlq.source_deliveries DROP COLUMN consumer_group, DROP COLUMN content, DROP COLUMN consumed_at,
    DROP COLUMN settled_at, DROP COLUMN came_back;
