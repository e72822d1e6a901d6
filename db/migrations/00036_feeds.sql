-- +goose Up
-- Feeds: dead letters that dlqd publishes to topics.
CREATE TABLE dlq.feeds (
    name       text PRIMARY KEY,
    cluster    text NOT NULL,
    topic      text NOT NULL,
    snapshot   txid_snapshot NOT NULL DEFAULT txid_current_snapshot(),
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    records    bigint NOT NULL DEFAULT 0,
    published  bigint NOT NULL DEFAULT 0,
    failed     bigint NOT NULL DEFAULT 0,
    error      text,
    error_at   timestamptz,
    removed_at timestamptz,
    key_secret uuid NOT NULL DEFAULT gen_random_uuid()
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE dlq.feeds IS 'The feeds of the policy, and how far each has read the audit trail.';
COMMENT ON COLUMN dlq.feeds.name IS 'Name of the feed in the policy.';
COMMENT ON COLUMN dlq.feeds.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.feeds.topic IS 'The topic, with {queue} for the name of the queue.';
COMMENT ON COLUMN dlq.feeds.snapshot IS
    'The position: entries that were filed by transactions visible in it are in feed_records.';
COMMENT ON COLUMN dlq.feeds.since IS 'No entry that is still to be read was filed before this time.';
COMMENT ON COLUMN dlq.feeds.at IS 'When the position was written.';
COMMENT ON COLUMN dlq.feeds.records IS 'Rows that were added to feed_records.';
COMMENT ON COLUMN dlq.feeds.published IS 'Those that the broker has acknowledged.';
COMMENT ON COLUMN dlq.feeds.failed IS 'Those that cannot be published.';
COMMENT ON COLUMN dlq.feeds.error IS 'The last error; null once publishing works again.';
COMMENT ON COLUMN dlq.feeds.error_at IS 'When it occurred first.';
COMMENT ON COLUMN dlq.feeds.removed_at IS 'When the policy no longer had the feed; null while it has.';
COMMENT ON COLUMN dlq.feeds.key_secret IS 'Hashed with an ordering key that must not be published.';

CREATE TABLE dlq.feed_records (
    place           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id              uuid NOT NULL UNIQUE,
    feed            text NOT NULL,
    entry_id        uuid NOT NULL,
    queue           text NOT NULL,
    cluster         text NOT NULL,
    topic           text NOT NULL,
    at              timestamptz NOT NULL DEFAULT now(),
    acknowledged_at timestamptz,
    partition       integer,
    "offset"        bigint,
    failure         text,
    UNIQUE (entry_id, feed)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
CREATE INDEX feed_records_waiting ON dlq.feed_records (feed, topic, place)
    WHERE acknowledged_at IS NULL AND failure IS NULL;
CREATE INDEX feed_records_at ON dlq.feed_records (at);
COMMENT ON TABLE dlq.feed_records IS
    'Entries that feeds publish: a row is committed before the record is sent, and says afterwards where it is.';
COMMENT ON COLUMN dlq.feed_records.place IS 'The order in which the records of a topic are published.';
COMMENT ON COLUMN dlq.feed_records.id IS 'The id, in the header dlqd-delivery-id of the record.';
COMMENT ON COLUMN dlq.feed_records.feed IS 'Name of the feed.';
COMMENT ON COLUMN dlq.feed_records.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.feed_records.queue IS 'Queue of the entry.';
COMMENT ON COLUMN dlq.feed_records.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.feed_records.topic IS 'The topic.';
COMMENT ON COLUMN dlq.feed_records.at IS 'When the feed found the entry.';
COMMENT ON COLUMN dlq.feed_records.acknowledged_at IS
    'When the broker acknowledged the record; null if it is not known to have.';
COMMENT ON COLUMN dlq.feed_records.partition IS 'The partition in which the broker stored it.';
COMMENT ON COLUMN dlq.feed_records."offset" IS 'The offset at which the broker stored it.';
COMMENT ON COLUMN dlq.feed_records.failure IS 'Why it cannot be published; null if it can.';

-- +goose Down
DROP TABLE dlq.feed_records;
DROP TABLE dlq.feeds;
