-- +goose Up
CREATE TABLE dlq.deploys (
    queue   text        NOT NULL CHECK (length(queue) <= 255),
    version text        NOT NULL CHECK (length(version) BETWEEN 1 AND 255),
    number  bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor   text        NOT NULL,
    PRIMARY KEY (queue, version)
);
COMMENT ON TABLE dlq.deploys IS
    'Versions that work queues, as deploys (POST /api/deploys, dlq.record_deploy) and responses of destinations '
    'reported them. The version with the latest last_at runs.';
COMMENT ON COLUMN dlq.deploys.queue IS 'The queue; empty for all queues.';
COMMENT ON COLUMN dlq.deploys.version IS 'The version.';
COMMENT ON COLUMN dlq.deploys.number IS 'Order of the first reports, for versions that are not semantic.';
COMMENT ON COLUMN dlq.deploys.at IS 'When it was first reported.';
COMMENT ON COLUMN dlq.deploys.last_at IS 'When it was last reported.';
COMMENT ON COLUMN dlq.deploys.actor IS 'Who reported it last.';

ALTER TABLE dlq.group_marks ADD COLUMN fixed_in text CHECK (length(fixed_in) BETWEEN 1 AND 255),
    ADD COLUMN fix_deployed_at timestamptz, ADD COLUMN fix_run uuid, ADD COLUMN fix_request uuid;
CREATE INDEX group_marks_fixed_in ON dlq.group_marks (queue, fingerprint) WHERE fixed_in IS NOT NULL;

ALTER TABLE dlq.replay_runs ADD COLUMN for_fix boolean NOT NULL DEFAULT false,
    ADD COLUMN approval uuid;
COMMENT ON COLUMN dlq.replay_runs.for_fix IS
    'Whether the policy started the run for a failure group that is fixed in the version that runs. It skips entries '
    'that an operator has.';
COMMENT ON COLUMN dlq.replay_runs.approval IS 'The approved request that started the run; null if none did.';

ALTER TABLE dlq.approvals ADD COLUMN forecast jsonb;

ALTER TABLE dlq.replay_run_groups ADD COLUMN let_go_at timestamptz;
COMMENT ON COLUMN dlq.replay_run_groups.let_go_at IS
    'When an operator last let it go on. Other deliveries from before do not hold it again.';

-- +goose Down
ALTER TABLE dlq.replay_run_groups DROP COLUMN let_go_at;
ALTER TABLE dlq.approvals DROP COLUMN forecast;
ALTER TABLE dlq.replay_runs DROP COLUMN for_fix, DROP COLUMN approval;
DROP INDEX dlq.group_marks_fixed_in;
ALTER TABLE dlq.group_marks DROP COLUMN fixed_in, DROP COLUMN fix_deployed_at, DROP COLUMN fix_run, DROP COLUMN fix_request;
DROP TABLE dlq.deploys;
