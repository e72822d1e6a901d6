-- +goose Up
ALTER TABLE dlq.replay_run_entries ADD COLUMN closed_as dlq.resolution_strategy;
COMMENT ON COLUMN dlq.replay_run_entries.closed_as IS
    'How the entry had been closed when the run skipped it, if it was closed; otherwise null.';

-- +goose Down
ALTER TABLE dlq.replay_run_entries DROP COLUMN closed_as;
