-- +goose Up
-- Only dlqd reads the table, even after a GRANT on all tables of the schema.
CREATE TABLE dlq.reviews (
    actor    text PRIMARY KEY,
    entry_id uuid NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
ALTER TABLE dlq.reviews ENABLE ROW LEVEL SECURITY;
COMMENT ON TABLE dlq.reviews IS
    'The entry that each operator was handed out last, for a decision: see dlq.in_review. Other operators can '
    'act on the entry, too.';
COMMENT ON COLUMN dlq.reviews.actor IS 'The operator.';
COMMENT ON COLUMN dlq.reviews.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.reviews.at IS 'When it was handed out.';

-- +goose Down
DROP TABLE dlq.reviews;
