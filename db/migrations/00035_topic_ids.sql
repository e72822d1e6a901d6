-- +goose Up
ALTER TABLE dlq.source_deliveries ADD COLUMN topic_id uuid;
COMMENT ON COLUMN dlq.source_deliveries.topic_id IS
    'Id of the topic when the record was published; null if unknown. A topic that is made again has another.';

-- +goose Down
ALTER TABLE dlq.source_deliveries DROP COLUMN topic_id;
