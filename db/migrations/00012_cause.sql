-- +goose Up
-- The cause of an error as reported by the receiver of a message, and where the message was sent.
-- Old entries have NULL: adding the columns does not rewrite a table.
ALTER TABLE dlq.dead_letter_queue
    ADD COLUMN error_title     text,
    ADD COLUMN destination     text,
    ADD COLUMN destination_url text;
COMMENT ON COLUMN dlq.dead_letter_queue.error_title IS
    'The cause of the error as reported by the worker or the destination; the same text for each occurrence.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_code IS
    'Code of the error as named by the worker or the destination; else an HTTP status or a SQLSTATE.';
COMMENT ON COLUMN dlq.dead_letter_queue.destination IS
    'Destination (of the policy) of the failed delivery; null if the failure was not a delivery.';
COMMENT ON COLUMN dlq.dead_letter_queue.destination_url IS 'URL of that destination, without parts that may be secret.';
COMMENT ON COLUMN dlq.dead_letter_queue.fingerprint IS
    'Equal for entries that failed for the same reason. 20 hexadecimal digits by grouping method 2, 16 by '
    'method 1.';

-- +dlqd concurrently
-- These indexes are built after the migration's transaction, partition by partition, without
-- blocking writes (internal/postgres/indexes.go).
CREATE INDEX dead_letter_open_by_code ON dlq.dead_letter_open (error_code, id) WHERE error_code IS NOT NULL;
CREATE INDEX dead_letter_open_by_destination ON dlq.dead_letter_open (destination, id) WHERE destination IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_code ON dlq.dead_letter_resolved (error_code, id) WHERE error_code IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_destination ON dlq.dead_letter_resolved (destination, id) WHERE destination IS NOT NULL;
CREATE INDEX dead_letter_failed_by_code ON dlq.dead_letter_failed (error_code, id) WHERE error_code IS NOT NULL;
CREATE INDEX dead_letter_failed_by_destination ON dlq.dead_letter_failed (destination, id) WHERE destination IS NOT NULL;
CREATE INDEX dead_letter_archived_by_code ON dlq.dead_letter_archived (error_code, id) WHERE error_code IS NOT NULL;
CREATE INDEX dead_letter_archived_by_destination ON dlq.dead_letter_archived (destination, id) WHERE destination IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS dlq.dead_letter_open_by_code, dlq.dead_letter_open_by_destination, dlq.dead_letter_resolved_by_code,
    dlq.dead_letter_resolved_by_destination, dlq.dead_letter_failed_by_code, dlq.dead_letter_failed_by_destination,
    dlq.dead_letter_archived_by_code, dlq.dead_letter_archived_by_destination;
COMMENT ON COLUMN dlq.dead_letter_queue.fingerprint IS 'Equal for entries that failed for the same reason.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_code IS 'Code of the error: an HTTP status, a SQLSTATE, a word of the application''s.';
ALTER TABLE dlq.dead_letter_queue
    DROP COLUMN error_title,
    DROP COLUMN destination,
    DROP COLUMN destination_url;
