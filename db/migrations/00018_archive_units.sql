-- +goose Up
-- Finds what the audit trail says is in an archive: each archived unit is looked up before its rows are deleted.
-- +dlqd concurrently
CREATE INDEX acts_archive ON dlq.acts (subject) WHERE act IN ('archived', 'removed', 'dropped');

-- +goose Down
DROP INDEX dlq.acts_archive;
