-- +goose Up
ALTER TABLE dlq.replay_runs ADD COLUMN skips jsonb, ADD COLUMN figures jsonb;
COMMENT ON COLUMN dlq.replay_runs.skips IS
    'What the run skips because the policy said so at its start, or when it was requested: stale and superseded, each '
    'with its queues and kinds. Null if the request decided, or the policy says nothing.';
COMMENT ON COLUMN dlq.replay_runs.figures IS
    'The figures of the forecast beside what happened (dlq.replay_figures); null until each redelivery of the run has '
    'ended, and without a forecast.';

ALTER TABLE dlq.replay_run_entries ADD COLUMN reason text, ADD COLUMN worked double precision;
COMMENT ON COLUMN dlq.replay_run_entries.reason IS
    'Why the entry was skipped, as an identifier that does not change: moved, stale, superseded, patch, checkpoint, '
    'held, ordering_key, live_job, done_job, open_entry, busy, resolved, group_ended or rejected.';
COMMENT ON COLUMN dlq.replay_run_entries.worked IS
    'Seconds that the redelivery worked; null until it has ended, and if its job was deleted.';

ALTER TABLE dlq.approvals ADD COLUMN skips jsonb;

-- +goose Down
ALTER TABLE dlq.approvals DROP COLUMN skips;
ALTER TABLE dlq.replay_run_entries DROP COLUMN reason, DROP COLUMN worked;
ALTER TABLE dlq.replay_runs DROP COLUMN skips, DROP COLUMN figures;
