-- +goose Up
-- Failure groups by their fingerprints, or the beginnings of these, whatever their queue. Only of open entries: what has closed is looked
-- for within a budget, and its index begins with the queue.
CREATE INDEX dead_letter_open_by_group ON dlq.dead_letter_open (fingerprint, id) WHERE fingerprint IS NOT NULL;

-- +goose Down
DROP INDEX dlq.dead_letter_open_by_group;
