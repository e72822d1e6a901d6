-- +goose Up
-- A migration such as a later release may have: it adds columns to tables, and older programs do not write them.
ALTER TABLE dlq.dead_letter_queue ADD COLUMN newer text;
COMMENT ON COLUMN dlq.dead_letter_queue.newer IS 'A column of a later release.';
ALTER TABLE dlq.processes ADD COLUMN newer integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN dlq.processes.newer IS 'A column of a later release.';
ALTER TABLE dlq.sessions ADD COLUMN newer text;
COMMENT ON COLUMN dlq.sessions.newer IS 'A column of a later release.';
ALTER TABLE dlq.replay_runs ADD COLUMN newer jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN dlq.replay_runs.newer IS 'A column of a later release.';
-- +goose Down
ALTER TABLE dlq.replay_runs DROP COLUMN newer;
ALTER TABLE dlq.sessions DROP COLUMN newer;
ALTER TABLE dlq.processes DROP COLUMN newer;
ALTER TABLE dlq.dead_letter_queue DROP COLUMN newer;
