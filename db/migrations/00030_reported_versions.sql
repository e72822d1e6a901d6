-- +goose Up
ALTER TABLE dlq.deploys ADD COLUMN last_number bigint NOT NULL DEFAULT 0;
UPDATE dlq.deploys d SET last_number = o.place
FROM (SELECT queue, version, row_number() OVER (ORDER BY last_at, number) AS place FROM dlq.deploys) o
WHERE d.queue = o.queue AND d.version = o.version;
COMMENT ON COLUMN dlq.deploys.last_number IS 'Order of the last reports: the version with the greatest one runs.';
COMMENT ON TABLE dlq.deploys IS
    'Versions that work queues, as deploys (POST /api/deploys, dlq.record_deploy), and completed jobs (dlq.learn_versions) '
    'reported them. The version with the greatest last_number runs.';

ALTER TABLE dlq.replay_run_entries ADD COLUMN version text;
COMMENT ON COLUMN dlq.replay_run_entries.version IS
    'The version of the worker, or of the destination, that made the outcome, as it reported it; otherwise null.';

-- +goose Down
ALTER TABLE dlq.replay_run_entries DROP COLUMN version;
ALTER TABLE dlq.deploys DROP COLUMN last_number;
