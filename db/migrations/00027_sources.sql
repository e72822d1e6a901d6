-- +goose Up
-- Dead letters that come from elsewhere than River: records of topics.
CREATE TYPE dlq.record AS (
    cluster            text,
    topic              text,
    topic_id           uuid,
    partition          integer,
    "offset"           bigint,
    at                 timestamptz,
    consumer_group     text,
    node               text,
    original_topic     text,
    original_partition integer,
    original_offset    bigint,
    form               text,
    size               bigint,
    sha256             bytea,
    key                bytea,
    value              bytea,
    header_keys        bytea[],
    header_values      bytea[]
);
COMMENT ON TYPE dlq.record IS 'A record of a topic: where it came from, and its bytes.';

ALTER TABLE dlq.dead_letter_queue ADD COLUMN record dlq.record;
COMMENT ON COLUMN dlq.dead_letter_queue.record IS
    'The record of a topic from which the entry was made; null for an entry of a job.';

CREATE SEQUENCE dlq.record_ids OWNED BY dlq.dead_letter_queue.river_job_id;

CREATE TABLE dlq.source_positions (
    cluster      text NOT NULL,
    topic_id     uuid NOT NULL,
    partition    integer NOT NULL,
    topic        text NOT NULL,
    source       text NOT NULL,
    queue        text NOT NULL,
    first_offset bigint NOT NULL,
    next_offset  bigint NOT NULL CHECK (next_offset >= first_offset),
    holes        bigint NOT NULL DEFAULT 0,
    lost         bigint NOT NULL DEFAULT 0,
    started_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (cluster, topic_id, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE dlq.source_positions IS
    'How far each partition of a topic is read: position, fence and ledger. dlq.append_records changes it in the '
    'transaction that stores the records.';
COMMENT ON COLUMN dlq.source_positions.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.source_positions.topic_id IS 'Id of the topic.';
COMMENT ON COLUMN dlq.source_positions.partition IS 'Partition of the topic.';
COMMENT ON COLUMN dlq.source_positions.topic IS 'Name of the topic.';
COMMENT ON COLUMN dlq.source_positions.source IS 'Name of the source in the policy that read it last.';
COMMENT ON COLUMN dlq.source_positions.queue IS 'Queue of its entries.';
COMMENT ON COLUMN dlq.source_positions.first_offset IS 'The offset at which reading began.';
COMMENT ON COLUMN dlq.source_positions.next_offset IS 'The offset that is read next: all before it are stored.';
COMMENT ON COLUMN dlq.source_positions.holes IS
    'Offsets from first_offset to next_offset that had no record: those of transactions, aborted or compacted ones.';
COMMENT ON COLUMN dlq.source_positions.lost IS 'Offsets that the broker did not have any more when dlqd came to them.';
COMMENT ON COLUMN dlq.source_positions.started_at IS 'When reading began.';
COMMENT ON COLUMN dlq.source_positions.updated_at IS 'When the position last moved.';

CREATE TABLE dlq.source_progress (
    source      text NOT NULL,
    cluster     text NOT NULL,
    topic       text NOT NULL,
    partition   integer NOT NULL,
    queue       text NOT NULL,
    state       text NOT NULL,
    next_offset bigint,
    end_offset  bigint,
    error       text,
    error_at    timestamptz,
    at          timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source, topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE dlq.source_progress IS 'What the readers of sources report, once a second at most.';
COMMENT ON COLUMN dlq.source_progress.source IS 'Name of the source in the policy.';
COMMENT ON COLUMN dlq.source_progress.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.source_progress.topic IS 'Name of the topic; empty for the source itself.';
COMMENT ON COLUMN dlq.source_progress.partition IS 'Partition of the topic; -1 for the topic or the source itself.';
COMMENT ON COLUMN dlq.source_progress.queue IS 'Queue of the entries.';
COMMENT ON COLUMN dlq.source_progress.state IS 'reading, caught_up or failing.';
COMMENT ON COLUMN dlq.source_progress.next_offset IS 'The offset that is read next; null if unknown.';
COMMENT ON COLUMN dlq.source_progress.end_offset IS 'The offset after the last record of the partition; null if unknown.';
COMMENT ON COLUMN dlq.source_progress.error IS 'The last error; null once reading works again.';
COMMENT ON COLUMN dlq.source_progress.error_at IS 'When it occurred first.';
COMMENT ON COLUMN dlq.source_progress.at IS 'When the reader reported it.';

CREATE TABLE dlq.source_deliveries (
    id              uuid PRIMARY KEY,
    entry_id        uuid NOT NULL,
    queue           text NOT NULL,
    job_id          bigint NOT NULL,
    job_created_at  timestamptz NOT NULL,
    cluster         text NOT NULL,
    topic           text NOT NULL,
    at              timestamptz NOT NULL DEFAULT now(),
    acknowledged_at timestamptz,
    partition       integer,
    "offset"        bigint,
    UNIQUE (job_id, job_created_at)
);
CREATE INDEX source_deliveries_entry ON dlq.source_deliveries (entry_id);
COMMENT ON TABLE dlq.source_deliveries IS
    'Records that dlqd publishes: a row is committed before the record is sent, and says afterwards where it is. A '
    'record that comes back has the id in its header dlqd-delivery-id.';
COMMENT ON COLUMN dlq.source_deliveries.id IS 'The id, in the header dlqd-delivery-id of the record.';
COMMENT ON COLUMN dlq.source_deliveries.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.source_deliveries.queue IS 'Queue of the entry: a record of another queue cannot have this id.';
COMMENT ON COLUMN dlq.source_deliveries.job_id IS 'The job of the redelivery.';
COMMENT ON COLUMN dlq.source_deliveries.job_created_at IS 'When River created that job.';
COMMENT ON COLUMN dlq.source_deliveries.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.source_deliveries.topic IS 'The topic that it is published to.';
COMMENT ON COLUMN dlq.source_deliveries.at IS 'When it was first sent.';
COMMENT ON COLUMN dlq.source_deliveries.acknowledged_at IS 'When the broker acknowledged it; null if it is not known to have.';
COMMENT ON COLUMN dlq.source_deliveries.partition IS 'The partition in which the broker stored it.';
COMMENT ON COLUMN dlq.source_deliveries."offset" IS 'The offset at which the broker stored it.';

-- +goose Down
DROP TABLE dlq.source_deliveries;
DROP TABLE dlq.source_progress;
DROP TABLE dlq.source_positions;
DROP SEQUENCE dlq.record_ids;
ALTER TABLE dlq.dead_letter_queue DROP COLUMN record;
DROP TYPE dlq.record;
