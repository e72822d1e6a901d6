-- +goose Up
-- The order in which the console shows saved views as tabs.
ALTER TABLE dlq.saved_views ADD COLUMN place integer;
COMMENT ON COLUMN dlq.saved_views.place IS
    'Place among the views of a list, from 1; null: after those that have one, by name. See dlq.order_views.';

-- The audit trail by operation (dlq.audit with grouped) reads operations by time, and of the moves of people those
-- that belong neither to an operation nor to a replay run.
CREATE INDEX operations_last_at ON dlq.operations (last_at);
-- +dlqd concurrently
CREATE INDEX dead_letter_transitions_single ON dlq.dead_letter_transitions (at, id)
    WHERE origin IS NOT NULL AND operation IS NULL AND (detail IS NULL OR NOT detail ? 'run');

-- +goose Down
DROP INDEX dlq.dead_letter_transitions_single;
DROP INDEX dlq.operations_last_at;
ALTER TABLE dlq.saved_views DROP COLUMN place;
