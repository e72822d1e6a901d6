-- +goose Up
-- Closed entries of a failure group are found by their fingerprint, with or without a queue. The indexes replaced here
-- began with the queue: without one, a search read the whole index of each month.
DROP INDEX dlq.dead_letter_resolved_by_fingerprint;
DROP INDEX dlq.dead_letter_failed_by_fingerprint;
DROP INDEX dlq.dead_letter_archived_by_fingerprint;
DROP INDEX dlq.dead_letter_returned_by_fingerprint;

-- +dlqd concurrently
CREATE INDEX dead_letter_resolved_by_group ON dlq.dead_letter_resolved (fingerprint, queue, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_failed_by_group ON dlq.dead_letter_failed (fingerprint, queue, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_archived_by_group ON dlq.dead_letter_archived (fingerprint, queue, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_returned_by_group ON dlq.dead_letter_returned (fingerprint, queue, id) WHERE fingerprint IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS dlq.dead_letter_resolved_by_group, dlq.dead_letter_failed_by_group,
    dlq.dead_letter_archived_by_group, dlq.dead_letter_returned_by_group;
CREATE INDEX dead_letter_resolved_by_fingerprint ON dlq.dead_letter_resolved (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_failed_by_fingerprint ON dlq.dead_letter_failed (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_archived_by_fingerprint ON dlq.dead_letter_archived (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_returned_by_fingerprint ON dlq.dead_letter_returned (queue, fingerprint, id)
    WHERE fingerprint IS NOT NULL;
