-- +goose Up
-- The preview of a replay run counts open entries by failure group, and samples them, from this index alone. It also
-- finds the entries of a group, as dead_letter_open_by_fingerprint did. It has no kind, whose length is not limited
-- enough for an index row with an error type of 255 characters.
DROP INDEX dlq.dead_letter_open_by_fingerprint;

-- +dlqd concurrently
CREATE INDEX dead_letter_open_groups ON dlq.dead_letter_open (queue, fingerprint, id)
    INCLUDE (status, stage, error_type, error_class, river_job_id, job_created_at);

-- +goose Down
DROP INDEX IF EXISTS dlq.dead_letter_open_groups;
CREATE INDEX dead_letter_open_by_fingerprint ON dlq.dead_letter_open (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
