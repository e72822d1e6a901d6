-- Bulk replay: a run sends many entries back, in the server, at its pace, and its report stays. And what retention reads.

-- +goose Up
CREATE TYPE dlq.replay_status AS ENUM ('running', 'paused', 'completed', 'cancelled', 'stopped');
COMMENT ON TYPE dlq.replay_status IS 'running, paused by a person, completed (nothing is left to replay), cancelled by a person, or stopped because too much of it failed.';

CREATE TABLE dlq.replay_runs (
    id            uuid PRIMARY KEY,
    status        dlq.replay_status NOT NULL DEFAULT 'running',
    filter        jsonb NOT NULL,
    newest_first  boolean NOT NULL DEFAULT false,
    batch_size    integer NOT NULL DEFAULT 100 CHECK (batch_size BETWEEN 1 AND 10000),
    rate          float8 CHECK (rate > 0),
    concurrency   integer CHECK (concurrency > 0),
    patch         jsonb,
    merge_patch   jsonb,
    queue         text,
    force         boolean NOT NULL DEFAULT false,
    stop_at       float8 NOT NULL DEFAULT 50 CHECK (stop_at > 0),
    stop_of       integer NOT NULL DEFAULT 50 CHECK (stop_of > 0),
    note          text,
    actor         text NOT NULL,
    reason        text,
    judged_from   timestamptz NOT NULL DEFAULT now(),
    cutoff        uuid NOT NULL,
    cursor        uuid,
    total         bigint NOT NULL,
    replayed      bigint NOT NULL DEFAULT 0,
    skipped       bigint NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    finished_at   timestamptz
);
CREATE INDEX replay_runs_active ON dlq.replay_runs (id) WHERE status = 'running';
COMMENT ON TABLE dlq.replay_runs IS 'Bulk replays, and their reports. Start one with dlq.replay_start; steer it with dlq.replay_pause, dlq.replay_resume, dlq.replay_cancel and dlq.replay_set_rate.';
COMMENT ON COLUMN dlq.replay_runs.filter IS 'Which entries; see dlq.find.';
COMMENT ON COLUMN dlq.replay_runs.newest_first IS 'Order of capture, reversed.';
COMMENT ON COLUMN dlq.replay_runs.batch_size IS 'Entries in one transaction.';
COMMENT ON COLUMN dlq.replay_runs.rate IS 'Entries a second; null for as fast as it goes.';
COMMENT ON COLUMN dlq.replay_runs.concurrency IS 'Redeliveries of the run under way at once; null for no limit.';
COMMENT ON COLUMN dlq.replay_runs.patch IS 'JSON Patch (RFC 6902) of each payload.';
COMMENT ON COLUMN dlq.replay_runs.merge_patch IS 'JSON Merge Patch (RFC 7386) of each payload.';
COMMENT ON COLUMN dlq.replay_runs.queue IS 'Where redeliveries go instead of the entries'' own queues.';
COMMENT ON COLUMN dlq.replay_runs.force IS 'Replay although an equal job is live.';
COMMENT ON COLUMN dlq.replay_runs.stop_at IS 'Percent of the last stop_of outcomes that fail and so stop the run.';
COMMENT ON COLUMN dlq.replay_runs.stop_of IS 'How many outcomes stop_at looks at.';
COMMENT ON COLUMN dlq.replay_runs.note IS 'What the person said.';
COMMENT ON COLUMN dlq.replay_runs.actor IS 'Who started it.';
COMMENT ON COLUMN dlq.replay_runs.reason IS 'Why it is in its state.';
COMMENT ON COLUMN dlq.replay_runs.judged_from IS 'stop_at looks at outcomes since then: its start, or when it was resumed.';
COMMENT ON COLUMN dlq.replay_runs.cutoff IS 'Entries captured later than the run was started are not drawn in.';
COMMENT ON COLUMN dlq.replay_runs.cursor IS 'How far it has come.';
COMMENT ON COLUMN dlq.replay_runs.total IS 'Entries that the filter chose when it was started.';
COMMENT ON COLUMN dlq.replay_runs.replayed IS 'Entries that it has sent back so far.';
COMMENT ON COLUMN dlq.replay_runs.skipped IS 'Entries that had moved meanwhile, have a live equal job, or whose patch does not apply.';

CREATE TABLE dlq.replay_run_entries (
    run_id   uuid NOT NULL REFERENCES dlq.replay_runs ON DELETE CASCADE,
    entry_id uuid NOT NULL,
    job_id   bigint,
    outcome  text,
    detail   text,
    ended_at timestamptz,
    PRIMARY KEY (run_id, entry_id)
);
CREATE INDEX replay_run_entries_outcome ON dlq.replay_run_entries (run_id, outcome);
CREATE INDEX replay_run_entries_last ON dlq.replay_run_entries (run_id, ended_at) WHERE outcome IN ('succeeded', 'failed');
COMMENT ON TABLE dlq.replay_run_entries IS 'What became of each entry of a replay run.';
COMMENT ON COLUMN dlq.replay_run_entries.job_id IS 'The redelivery; null where it was skipped.';
COMMENT ON COLUMN dlq.replay_run_entries.outcome IS 'succeeded, failed or skipped; null while under way.';
COMMENT ON COLUMN dlq.replay_run_entries.detail IS 'The error, or why it was skipped.';
COMMENT ON COLUMN dlq.replay_run_entries.ended_at IS 'When the redelivery ended.';

-- Closed entries that are past their time: they come in the order in which they closed, which is what BRIN is for.
CREATE INDEX dead_letter_resolved_closed ON dlq.dead_letter_resolved USING brin (closed_at);
CREATE INDEX dead_letter_failed_closed   ON dlq.dead_letter_failed   USING brin (closed_at);
CREATE INDEX dead_letter_archived_closed ON dlq.dead_letter_archived USING brin (closed_at);

-- +goose Down
DROP INDEX dlq.dead_letter_archived_closed;
DROP INDEX dlq.dead_letter_failed_closed;
DROP INDEX dlq.dead_letter_resolved_closed;
DROP TABLE dlq.replay_run_entries;
DROP TABLE dlq.replay_runs;
DROP TYPE dlq.replay_status;
