-- +goose Up
-- The preview of a replay run counts open entries by failure group, and samples them, from this index alone. It also
-- finds the entries of a group, as dead_letter_open_by_fingerprint did. It has no kind, whose length is not limited
-- enough for an index row with an error type of 255 characters.
DROP INDEX dlq.dead_letter_open_by_fingerprint;

ALTER TABLE dlq.replay_run_entries ADD COLUMN queue text;
COMMENT ON COLUMN dlq.replay_run_entries.queue IS
    'Queue of the entry at the start of the run; null in runs of earlier versions.';

ALTER TABLE dlq.replay_runs ADD COLUMN result jsonb;
COMMENT ON COLUMN dlq.replay_runs.result IS
    'What became of the failure groups of the forecast, beside it; null until each redelivery of the run has ended, '
    'and without a forecast.';

-- Earlier outcomes of a failure group, the latest first, for the forecast of a replay run.
-- +dlqd concurrently
CREATE INDEX replay_run_entries_group ON dlq.replay_run_entries (queue, was, ended_at)
    WHERE outcome IN ('succeeded', 'failed');
CREATE INDEX dead_letter_open_groups ON dlq.dead_letter_open (queue, fingerprint, id)
    INCLUDE (status, stage, error_type, error_class, river_job_id, job_created_at);

-- +goose Down
DROP INDEX IF EXISTS dlq.replay_run_entries_group;
ALTER TABLE dlq.replay_run_entries DROP COLUMN queue;
ALTER TABLE dlq.replay_runs DROP COLUMN result;
DROP INDEX IF EXISTS dlq.dead_letter_open_groups;
CREATE INDEX dead_letter_open_by_fingerprint ON dlq.dead_letter_open (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
