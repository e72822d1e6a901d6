-- +goose Up
-- Alone in this migration: a transaction cannot use a label that it has added.
ALTER TYPE dlq.resolution_strategy ADD VALUE IF NOT EXISTS 'expired';

-- +goose Down
-- Postgres cannot drop a label.
SELECT 1;
