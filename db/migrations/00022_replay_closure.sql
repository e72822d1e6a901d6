-- +goose Up
ALTER TABLE dlq.replay_runs ADD COLUMN skip_stale boolean NOT NULL DEFAULT false, ADD COLUMN skip_superseded boolean NOT NULL DEFAULT false, ADD COLUMN not_known bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN dlq.replay_runs.skip_stale IS
    'Whether the run skips work that is out of date: past its expiry, or older than staleAfter of the policy.';
COMMENT ON COLUMN dlq.replay_runs.skip_superseded IS
    'Whether the run skips work that a later job has done (dlq.superseded).';
COMMENT ON COLUMN dlq.replay_runs.not_known IS
    'Entries that were sent although dlq.superseded could not say whether later work has superseded them.';

ALTER TABLE dlq.replay_run_entries ADD COLUMN was text, ADD COLUMN sent_at timestamptz, ADD COLUMN taken_by text;
COMMENT ON COLUMN dlq.replay_run_entries.was IS
    'Failure group of the entry at the start of the run; null if it had none, and in runs of earlier versions.';
COMMENT ON COLUMN dlq.replay_run_entries.sent_at IS 'When the run sent it; null until then.';
COMMENT ON COLUMN dlq.replay_run_entries.taken_by IS
    'Who moved the entry before its turn; null if no person did.';

-- +goose Down
ALTER TABLE dlq.replay_run_entries DROP COLUMN was, DROP COLUMN sent_at, DROP COLUMN taken_by;
ALTER TABLE dlq.replay_runs DROP COLUMN skip_stale, DROP COLUMN skip_superseded, DROP COLUMN not_known;
