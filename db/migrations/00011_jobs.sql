-- +goose Up
ALTER TABLE dlq.replay_runs ADD COLUMN checkpoint text CHECK (checkpoint IN ('resume', 'discard'));
COMMENT ON COLUMN dlq.replay_runs.checkpoint IS
    'Whether resumable River jobs continue after their last step (resume) or repeat all steps (discard). Null: '
    'they continue, and no entry with a checkpoint is edited.';
COMMENT ON COLUMN dlq.replay_run_entries.behind IS
    'The previous entry of the run with the same ordering key: this one waits until that one''s redelivery has '
    'ended. Its own id: its job was rescued twice or more, and waits until no other such redelivery is under '
    'way in the queue. Null if it need not wait.';

-- Finds redeliveries under way of jobs that were rescued: see dlq.may_go_alone.
CREATE INDEX dead_letter_open_rescued ON dlq.dead_letter_open (id) WHERE status = 'dlq_processing' AND metadata ?| '{river:rescue_count,dlq:rescues}';

-- +goose Down
DROP INDEX dlq.dead_letter_open_rescued;
COMMENT ON COLUMN dlq.replay_run_entries.behind IS 'The entry of the run, with the same ordering key, that comes before it: it waits until that one''s redelivery has ended. Null where its turn may come.';
ALTER TABLE dlq.replay_runs DROP COLUMN checkpoint;
