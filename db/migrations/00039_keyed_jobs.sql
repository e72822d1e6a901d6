-- +goose Up
ALTER TABLE dlq.replay_runs ADD COLUMN keyed_jobs bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN dlq.replay_runs.keyed_jobs IS
    'The number of jobs of applications in the run that have an ordering key by the policy (dlq.job_key).';

-- +goose Down
ALTER TABLE dlq.replay_runs DROP COLUMN keyed_jobs;
