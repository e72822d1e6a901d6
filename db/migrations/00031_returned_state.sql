-- +goose Up
-- Alone in this migration: a transaction cannot use a label that it has added.
ALTER TYPE dlq.dead_letter_status ADD VALUE IF NOT EXISTS 'dlq_returned' AFTER 'dlq_manual';
ALTER TYPE dlq.dead_letter_stage ADD VALUE IF NOT EXISTS 'returned';

-- +goose Down
-- Postgres cannot drop a label.
SELECT 1;
