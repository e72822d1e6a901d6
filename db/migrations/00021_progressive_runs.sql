-- +goose Up
-- unsettled is false for the runs of earlier versions: the failures of their redeliveries stay unjudged.
ALTER TABLE dlq.replay_runs ADD COLUMN progressive boolean NOT NULL DEFAULT false, ADD COLUMN step_deadline interval NOT NULL DEFAULT '15 minutes' CHECK (step_deadline BETWEEN '1 second' AND '30 days'), ADD COLUMN unsettled boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN dlq.replay_runs.progressive IS
    'Whether the run goes step by step, by failure group: see dlq.replay_run_groups.';
COMMENT ON COLUMN dlq.replay_runs.step_deadline IS
    'A group of a progressive run is held if it gets no outcome for this time while redeliveries are under way.';
COMMENT ON COLUMN dlq.replay_runs.unsettled IS
    'Whether outcomes may come that are not judged yet: until the run and all its redeliveries have ended.';
CREATE INDEX replay_runs_unsettled ON dlq.replay_runs (id) WHERE unsettled;

CREATE TABLE dlq.replay_run_groups (
    run_id         uuid        NOT NULL REFERENCES dlq.replay_runs ON DELETE CASCADE,
    number         integer     NOT NULL,
    queue          text,
    fingerprint    text,
    error_type     text,
    known          text[]      NOT NULL DEFAULT '{}',
    state          text        NOT NULL DEFAULT 'going' CHECK (state IN ('going', 'held', 'stopped', 'done', 'ended')),
    reason         text,
    step           integer     NOT NULL DEFAULT 0,
    quota          bigint      NOT NULL,
    entries        bigint      NOT NULL,
    sent           bigint      NOT NULL DEFAULT 0,
    skipped        bigint      NOT NULL DEFAULT 0,
    succeeded      bigint      NOT NULL DEFAULT 0,
    failed         bigint      NOT NULL DEFAULT 0,
    from_succeeded bigint      NOT NULL DEFAULT 0,
    from_failed    bigint      NOT NULL DEFAULT 0,
    active_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (run_id, number)
) WITH (fillfactor = 50);
COMMENT ON TABLE dlq.replay_run_groups IS
    'The failure groups of a progressive replay run: the 20 largest, and one group of all others. Each goes on, is '
    'held or stops by its own outcomes.';
COMMENT ON COLUMN dlq.replay_run_groups.run_id IS 'The run.';
COMMENT ON COLUMN dlq.replay_run_groups.number IS 'The number of the group in its run: by size, from 1.';
COMMENT ON COLUMN dlq.replay_run_groups.queue IS 'The queue of its entries; null for the group of all others.';
COMMENT ON COLUMN dlq.replay_run_groups.fingerprint IS
    'Their failure group at the start of the run; null for the group of all others, and for entries that had none.';
COMMENT ON COLUMN dlq.replay_run_groups.error_type IS 'The error type of one of its entries.';
COMMENT ON COLUMN dlq.replay_run_groups.known IS
    'Fingerprints of failures that are not new in the run: those of its entries at the start, and those of '
    'failures with which an operator let it go on.';
COMMENT ON COLUMN dlq.replay_run_groups.state IS
    'going; held or stopped, until an operator decides; done: every entry was sent or skipped; ended: an operator '
    'ended it.';
COMMENT ON COLUMN dlq.replay_run_groups.reason IS 'The last decision, with its figures.';
COMMENT ON COLUMN dlq.replay_run_groups.step IS 'Its step: 0 is the canary, then 10, 50 and 100 % of its entries.';
COMMENT ON COLUMN dlq.replay_run_groups.quota IS 'How many of its entries may be sent up to the end of its step.';
COMMENT ON COLUMN dlq.replay_run_groups.entries IS 'The number of its entries.';
COMMENT ON COLUMN dlq.replay_run_groups.sent IS 'Entries sent so far.';
COMMENT ON COLUMN dlq.replay_run_groups.skipped IS 'Entries skipped so far.';
COMMENT ON COLUMN dlq.replay_run_groups.succeeded IS 'Redeliveries that succeeded.';
COMMENT ON COLUMN dlq.replay_run_groups.failed IS 'Redeliveries that failed, and were judged.';
COMMENT ON COLUMN dlq.replay_run_groups.from_succeeded IS
    'Successes before its test began: 0, or those when an operator last let it go on.';
COMMENT ON COLUMN dlq.replay_run_groups.from_failed IS 'Failures before its test began.';
COMMENT ON COLUMN dlq.replay_run_groups.active_at IS
    'When it last got an outcome, or was last seen with no redelivery under way.';

ALTER TABLE dlq.replay_run_entries ADD COLUMN group_number integer, ADD COLUMN counted boolean NOT NULL DEFAULT false, ADD COLUMN error_class text, ADD COLUMN fingerprint text;
COMMENT ON COLUMN dlq.replay_run_entries.group_number IS
    'The group of a progressive run (dlq.replay_run_groups); null in other runs.';
COMMENT ON COLUMN dlq.replay_run_entries.counted IS 'Whether the group of a progressive run has counted its outcome.';
COMMENT ON COLUMN dlq.replay_run_entries.error_class IS
    'Class of the failure of this redelivery; null until it is judged, and for other outcomes.';
COMMENT ON COLUMN dlq.replay_run_entries.fingerprint IS
    'Failure group of the failure of this redelivery; null until it is judged, and if the entry no longer has '
    'that failure.';

-- +dlqd concurrently
CREATE INDEX replay_run_entries_step ON dlq.replay_run_entries (run_id, group_number, entry_id)
    WHERE group_number IS NOT NULL AND outcome IS NULL AND job_id IS NULL AND behind IS NULL;
CREATE INDEX replay_run_entries_uncounted ON dlq.replay_run_entries (run_id, ended_at, entry_id)
    WHERE group_number IS NOT NULL AND outcome IS NOT NULL AND NOT counted;
CREATE INDEX replay_run_entries_unjudged ON dlq.replay_run_entries (run_id, entry_id)
    WHERE outcome = 'failed' AND error_class IS NULL;
CREATE INDEX acts_runs ON dlq.acts (subject, at) WHERE subject LIKE 'replay run %';

-- +goose Down
DROP INDEX dlq.acts_runs;
DROP INDEX dlq.replay_run_entries_unjudged;
DROP INDEX dlq.replay_run_entries_uncounted;
DROP INDEX dlq.replay_run_entries_step;
ALTER TABLE dlq.replay_run_entries DROP COLUMN group_number, DROP COLUMN counted, DROP COLUMN error_class, DROP COLUMN fingerprint;
DROP TABLE dlq.replay_run_groups;
DROP INDEX dlq.replay_runs_unsettled;
ALTER TABLE dlq.replay_runs DROP COLUMN progressive, DROP COLUMN step_deadline, DROP COLUMN unsettled;
