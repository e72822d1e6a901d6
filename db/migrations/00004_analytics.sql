-- Analytics: rollups of the audit trail, kept up to date every second or so, and what the trail must say for them.
-- And what archives and erasures leave behind: which months were restored, and what was erased.

-- +goose Up
ALTER TABLE dlq.dead_letter_transitions
    ADD COLUMN xid             bigint,
    ADD COLUMN from_class      text,
    ADD COLUMN error_type      text,
    ADD COLUMN source          text,
    ADD COLUMN attempts        integer,
    ADD COLUMN first_failed_at timestamptz,
    ADD COLUMN left_group      text,
    ADD COLUMN joined_group    text,
    ADD COLUMN origin          text;
-- A default of its own: added with the column, it would rewrite every partition.
ALTER TABLE dlq.dead_letter_transitions ALTER COLUMN xid SET DEFAULT txid_current();
COMMENT ON COLUMN dlq.dead_letter_transitions.xid IS 'The transaction that made the move: rollups count what committed between two snapshots.';
COMMENT ON COLUMN dlq.dead_letter_transitions.from_class IS 'The entry''s class before the move; null while undecided.';
COMMENT ON COLUMN dlq.dead_letter_transitions.error_type IS 'Type of the error, of moves that record a failure ('''' where it has none); null for the others.';
COMMENT ON COLUMN dlq.dead_letter_transitions.source IS 'Source of the message, of captures.';
COMMENT ON COLUMN dlq.dead_letter_transitions.attempts IS 'Attempts that the job had made, of captures.';
COMMENT ON COLUMN dlq.dead_letter_transitions.first_failed_at IS 'When the first attempt failed, of moves that close the entry.';
COMMENT ON COLUMN dlq.dead_letter_transitions.left_group IS 'Fingerprint of the failure group that the entry left as an open one.';
COMMENT ON COLUMN dlq.dead_letter_transitions.joined_group IS 'Fingerprint of the failure group that it joined as an open one.';
COMMENT ON COLUMN dlq.dead_letter_transitions.origin IS 'From where a person made the move; null for what dlqd does by itself.';

ALTER TABLE dlq.replay_runs ADD COLUMN origin text;
-- Rows are written by a transaction that holds the run; looking it up again for each cost a tenth of a replay.
ALTER TABLE dlq.replay_run_entries DROP CONSTRAINT replay_run_entries_run_id_fkey;
COMMENT ON COLUMN dlq.replay_runs.batch_size IS 'Entries sent back in one step. A run without rate or concurrency commits steps together, up to 500 entries.';
COMMENT ON COLUMN dlq.replay_runs.origin IS 'From where it was started.';

-- What committed since the last look: BRIN, since rows come nearly in the order of their transactions.
CREATE INDEX dead_letter_transitions_xid ON dlq.dead_letter_transitions USING brin (xid) WITH (pages_per_range = 32, autosummarize = on);
-- A capture pays for each index: rows of a time are found by their day's partition.
DROP INDEX dlq.dead_letter_transitions_at;
-- What people did, the least of what the trail holds; the latest first.
CREATE INDEX dead_letter_transitions_people ON dlq.dead_letter_transitions (id, actor) WHERE origin IS NOT NULL;
-- Where they were then, nobody knows any more.
ALTER TABLE dlq.dead_letter_transitions DISABLE TRIGGER USER;
UPDATE dlq.dead_letter_transitions SET origin = 'unknown' WHERE actor NOT LIKE 'worker:%' AND actor NOT IN ('capture', 'sweep', 'retention', 'backfill');
ALTER TABLE dlq.dead_letter_transitions ENABLE TRIGGER USER;

CREATE TYPE dlq.rollup_step AS ENUM ('minute', 'hour', 'day', 'week');
COMMENT ON TYPE dlq.rollup_step IS 'Length of a rollup''s buckets. Minutes are kept three days, hours 400 days, days and weeks for ever.';

CREATE TABLE dlq.rollup_state (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    snapshot   txid_snapshot NOT NULL,
    at         timestamptz NOT NULL,
    since      timestamptz NOT NULL,
    rebuilt_at timestamptz NOT NULL,
    moves      bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE dlq.rollup_state IS 'How far the rollups have come: one row, written by dlq.refresh_rollups().';
COMMENT ON COLUMN dlq.rollup_state.one IS 'There is one row.';
COMMENT ON COLUMN dlq.rollup_state.snapshot IS 'Moves of transactions that this snapshot sees are counted.';
COMMENT ON COLUMN dlq.rollup_state.at IS 'When it was taken: the rollups are exact as of then.';
COMMENT ON COLUMN dlq.rollup_state.since IS 'No move that is not counted yet was made before.';
COMMENT ON COLUMN dlq.rollup_state.rebuilt_at IS 'When the rollups were last made anew.';
COMMENT ON COLUMN dlq.rollup_state.moves IS 'Moves counted since then.';

CREATE TABLE dlq.rollup_flow (
    step        dlq.rollup_step NOT NULL,
    scope       text NOT NULL CHECK (scope IN ('all', 'queue', 'class', 'queue_class')),
    bucket      timestamptz NOT NULL,
    queue       text NOT NULL,
    error_class text NOT NULL,
    captured    bigint NOT NULL DEFAULT 0,
    failures    bigint NOT NULL DEFAULT 0,
    attempts    bigint NOT NULL DEFAULT 0,
    redelivered bigint NOT NULL DEFAULT 0,
    succeeded   bigint NOT NULL DEFAULT 0,
    resolved    bigint NOT NULL DEFAULT 0,
    failed      bigint NOT NULL DEFAULT 0,
    archived    bigint NOT NULL DEFAULT 0,
    parked      bigint NOT NULL DEFAULT 0,
    open_change bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (step, scope, bucket, queue, error_class)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.rollup_flow IS 'Rollup: moves by time, queue and class. Read it with dlq.flow() and dlq.stats().';
COMMENT ON COLUMN dlq.rollup_flow.step IS 'Length of the bucket.';
COMMENT ON COLUMN dlq.rollup_flow.scope IS 'What the row is of: all entries, one queue, one class, or one class of one queue.';
COMMENT ON COLUMN dlq.rollup_flow.bucket IS 'When the bucket begins (UTC).';
COMMENT ON COLUMN dlq.rollup_flow.queue IS 'The queue; '''' in rows of all queues.';
COMMENT ON COLUMN dlq.rollup_flow.error_class IS 'The class after the move (undecided where there is none yet); '''' in rows of all classes.';
COMMENT ON COLUMN dlq.rollup_flow.captured IS 'Jobs that became dead letters.';
COMMENT ON COLUMN dlq.rollup_flow.failures IS 'Captures, and redeliveries that failed.';
COMMENT ON COLUMN dlq.rollup_flow.attempts IS 'Attempts that the captured jobs had made.';
COMMENT ON COLUMN dlq.rollup_flow.redelivered IS 'Redeliveries started.';
COMMENT ON COLUMN dlq.rollup_flow.succeeded IS 'Redeliveries that succeeded.';
COMMENT ON COLUMN dlq.rollup_flow.resolved IS 'Entries resolved, by redelivery or by a person.';
COMMENT ON COLUMN dlq.rollup_flow.failed IS 'Entries whose redeliveries are spent.';
COMMENT ON COLUMN dlq.rollup_flow.archived IS 'Entries archived: discarded, or aged out.';
COMMENT ON COLUMN dlq.rollup_flow.parked IS 'Entries that came to wait for a person.';
COMMENT ON COLUMN dlq.rollup_flow.open_change IS 'By how much the number of open entries changed.';

CREATE TABLE dlq.rollup_backlog (
    queue       text NOT NULL,
    error_class text NOT NULL,
    pending     bigint NOT NULL DEFAULT 0,
    processing  bigint NOT NULL DEFAULT 0,
    manual      bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, error_class)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.rollup_backlog IS 'Rollup: open entries now, by queue and class.';
COMMENT ON COLUMN dlq.rollup_backlog.error_class IS 'The class; undecided where there is none yet.';
COMMENT ON COLUMN dlq.rollup_backlog.pending IS 'Entries in dlq_pending.';
COMMENT ON COLUMN dlq.rollup_backlog.processing IS 'Entries in dlq_processing.';
COMMENT ON COLUMN dlq.rollup_backlog.manual IS 'Entries in dlq_manual.';

CREATE TABLE dlq.rollup_times (
    step    dlq.rollup_step NOT NULL CHECK (step <> 'minute'),
    measure text NOT NULL CHECK (measure IN ('in_dlq', 'to_recovery')),
    scope   text NOT NULL CHECK (scope IN ('all', 'queue')),
    bucket  timestamptz NOT NULL,
    queue   text NOT NULL,
    bin     smallint NOT NULL,
    entries bigint NOT NULL,
    seconds float8 NOT NULL,
    PRIMARY KEY (step, measure, scope, bucket, queue, bin)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.rollup_times IS 'Rollup: how long entries were open (in_dlq), and how long work took from its first failure until it was done (to_recovery), as histograms. Read it with dlq.times().';
COMMENT ON COLUMN dlq.rollup_times.bin IS 'Times of up to 1.1 ^ bin seconds, and more than 1.1 ^ (bin - 1): percentiles are right within 5 %.';
COMMENT ON COLUMN dlq.rollup_times.entries IS 'How many entries.';
COMMENT ON COLUMN dlq.rollup_times.seconds IS 'Sum of their times: averages are exact.';

CREATE TABLE dlq.rollup_errors (
    step       dlq.rollup_step NOT NULL CHECK (step <> 'minute'),
    bucket     timestamptz NOT NULL,
    queue      text NOT NULL,
    error_type text NOT NULL,
    failures   bigint NOT NULL,
    PRIMARY KEY (step, bucket, queue, error_type)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.rollup_errors IS 'Rollup: failures by queue and type of error. Read it with dlq.error_types().';
COMMENT ON COLUMN dlq.rollup_errors.error_type IS 'The type; '''' where the error has none.';

CREATE TABLE dlq.rollup_sources (
    step     dlq.rollup_step NOT NULL CHECK (step <> 'minute'),
    bucket   timestamptz NOT NULL,
    source   text NOT NULL,
    captured bigint NOT NULL,
    PRIMARY KEY (step, bucket, source)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.rollup_sources IS 'Rollup: captures by source of the message. Read it with dlq.noisiest_sources().';

CREATE TABLE dlq.rollup_groups (
    step        dlq.rollup_step NOT NULL CHECK (step <> 'minute'),
    bucket      timestamptz NOT NULL,
    queue       text NOT NULL,
    fingerprint text NOT NULL,
    failures    bigint NOT NULL,
    PRIMARY KEY (step, bucket, queue, fingerprint)
) WITH (fillfactor = 70);
CREATE INDEX rollup_groups_trend ON dlq.rollup_groups (queue, fingerprint, step, bucket);
COMMENT ON TABLE dlq.rollup_groups IS 'Rollup: failures of each failure group. Read it with dlq.top_groups().';

CREATE TABLE dlq.failure_groups (
    queue       text NOT NULL,
    fingerprint text NOT NULL,
    title       text,
    error_type  text,
    error_class text,
    first_seen  timestamptz NOT NULL,
    last_seen   timestamptz NOT NULL,
    failures    bigint NOT NULL DEFAULT 0,
    open        bigint NOT NULL DEFAULT 0,
    sample      uuid,
    PRIMARY KEY (queue, fingerprint)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.failure_groups IS 'Rollup: failure groups, that is entries of a queue that failed for the same reason.';
COMMENT ON COLUMN dlq.failure_groups.fingerprint IS 'dead_letter_queue.fingerprint.';
COMMENT ON COLUMN dlq.failure_groups.title IS 'What its first error said, its first line.';
COMMENT ON COLUMN dlq.failure_groups.error_type IS 'Type of that error.';
COMMENT ON COLUMN dlq.failure_groups.error_class IS 'Class of its last entry.';
COMMENT ON COLUMN dlq.failure_groups.first_seen IS 'When an entry first joined it.';
COMMENT ON COLUMN dlq.failure_groups.last_seen IS 'When one last did.';
COMMENT ON COLUMN dlq.failure_groups.failures IS 'Failures so far: captures, and redeliveries that failed.';
COMMENT ON COLUMN dlq.failure_groups.open IS 'Open entries now.';
COMMENT ON COLUMN dlq.failure_groups.sample IS 'Its last entry.';

CREATE TABLE dlq.restored_partitions (
    partition_name text PRIMARY KEY,
    until          timestamptz NOT NULL
);
COMMENT ON TABLE dlq.restored_partitions IS 'Months into which entries were restored from the archive: retention leaves them until then.';
COMMENT ON COLUMN dlq.restored_partitions.partition_name IS 'The partition.';
COMMENT ON COLUMN dlq.restored_partitions.until IS 'How long it stays.';

CREATE TABLE dlq.erasures (
    id              uuid PRIMARY KEY,
    at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor           text NOT NULL,
    db_user         text NOT NULL DEFAULT session_user,
    origin          text,
    note            text,
    filter_sha256   text NOT NULL,
    fields          text[] NOT NULL,
    entries         bigint NOT NULL DEFAULT 0,
    jobs            bigint NOT NULL DEFAULT 0,
    under_way       bigint NOT NULL DEFAULT 0,
    archived        bigint NOT NULL DEFAULT 0,
    archives        bigint NOT NULL DEFAULT 0,
    archive         text,
    finished_at     timestamptz
);
COMMENT ON TABLE dlq.erasures IS 'A row for each erasure of somebody''s data: that it was done, how far, and who asked; not whose data it was.';
COMMENT ON COLUMN dlq.erasures.actor IS 'Who did it.';
COMMENT ON COLUMN dlq.erasures.db_user IS 'The database user of the session.';
COMMENT ON COLUMN dlq.erasures.origin IS 'From where.';
COMMENT ON COLUMN dlq.erasures.note IS 'Why: the number of the request.';
COMMENT ON COLUMN dlq.erasures.filter_sha256 IS 'SHA-256 of the filter, which names the person: whoever knows the filter can prove that it was done.';
COMMENT ON COLUMN dlq.erasures.fields IS 'Fields that the filter looks at.';
COMMENT ON COLUMN dlq.erasures.entries IS 'Entries of the database that were blanked.';
COMMENT ON COLUMN dlq.erasures.jobs IS 'River jobs that were blanked.';
COMMENT ON COLUMN dlq.erasures.under_way IS 'Entries that were left, because a redelivery was under way: erase again when it has ended.';
COMMENT ON COLUMN dlq.erasures.archived IS 'Entries of archives that were blanked.';
COMMENT ON COLUMN dlq.erasures.archives IS 'Archives that were looked through.';
COMMENT ON COLUMN dlq.erasures.archive IS 'Where they are; null if none were looked through.';
COMMENT ON COLUMN dlq.erasures.finished_at IS 'When all of it was done; null while not.';

-- Columns of older tables that had no comment, and of the new ones.
COMMENT ON COLUMN dlq.settings.key IS 'What.';
COMMENT ON COLUMN dlq.settings.value IS 'Its value.';
COMMENT ON COLUMN dlq.settings.updated_at IS 'When it was set.';
COMMENT ON COLUMN dlq.replay_run_entries.run_id IS 'The run.';
COMMENT ON COLUMN dlq.replay_run_entries.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.replay_runs.id IS 'UUID version 7: sorts by the time of its start.';
COMMENT ON COLUMN dlq.replay_runs.status IS 'Where it stands.';
COMMENT ON COLUMN dlq.replay_runs.created_at IS 'When it was started.';
COMMENT ON COLUMN dlq.replay_runs.updated_at IS 'When it last went further, or was steered.';
COMMENT ON COLUMN dlq.replay_runs.finished_at IS 'When it ended; null while it has not.';
COMMENT ON COLUMN dlq.dead_letter_transitions.id IS 'Identifies the move; a session takes ids ahead, so moves of the same moment may not be in their order.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.id IS 'Identifies the change.';
COMMENT ON COLUMN dlq.rollup_backlog.queue IS 'The queue.';
COMMENT ON COLUMN dlq.rollup_times.step IS 'Length of the bucket.';
COMMENT ON COLUMN dlq.rollup_times.measure IS 'in_dlq or to_recovery.';
COMMENT ON COLUMN dlq.rollup_times.scope IS 'What the row is of: all entries, or one queue.';
COMMENT ON COLUMN dlq.rollup_times.bucket IS 'When the bucket begins (UTC).';
COMMENT ON COLUMN dlq.rollup_times.queue IS 'The queue; '''' in rows of all queues.';
COMMENT ON COLUMN dlq.rollup_errors.step IS 'Length of the bucket.';
COMMENT ON COLUMN dlq.rollup_errors.bucket IS 'When the bucket begins (UTC).';
COMMENT ON COLUMN dlq.rollup_errors.queue IS 'The queue.';
COMMENT ON COLUMN dlq.rollup_errors.failures IS 'Captures, and redeliveries that failed.';
COMMENT ON COLUMN dlq.rollup_sources.step IS 'Length of the bucket.';
COMMENT ON COLUMN dlq.rollup_sources.bucket IS 'When the bucket begins (UTC).';
COMMENT ON COLUMN dlq.rollup_sources.source IS 'Who sent the messages.';
COMMENT ON COLUMN dlq.rollup_sources.captured IS 'Jobs that became dead letters.';
COMMENT ON COLUMN dlq.rollup_groups.step IS 'Length of the bucket.';
COMMENT ON COLUMN dlq.rollup_groups.bucket IS 'When the bucket begins (UTC).';
COMMENT ON COLUMN dlq.rollup_groups.queue IS 'The queue.';
COMMENT ON COLUMN dlq.rollup_groups.fingerprint IS 'The failure group, in its queue.';
COMMENT ON COLUMN dlq.rollup_groups.failures IS 'Captures, and redeliveries that failed.';
COMMENT ON COLUMN dlq.failure_groups.queue IS 'The queue.';
COMMENT ON COLUMN dlq.erasures.id IS 'UUID version 7.';
COMMENT ON COLUMN dlq.erasures.at IS 'When it was begun.';

-- +goose Down
DROP TABLE dlq.erasures;
DROP TABLE dlq.restored_partitions;
DROP TABLE dlq.failure_groups;
DROP TABLE dlq.rollup_groups;
DROP TABLE dlq.rollup_sources;
DROP TABLE dlq.rollup_errors;
DROP TABLE dlq.rollup_times;
DROP TABLE dlq.rollup_backlog;
DROP TABLE dlq.rollup_flow;
DROP TABLE dlq.rollup_state;
DROP TYPE dlq.rollup_step;
DROP INDEX dlq.dead_letter_transitions_people;
CREATE INDEX dead_letter_transitions_at ON dlq.dead_letter_transitions USING brin (at);
DROP INDEX dlq.dead_letter_transitions_xid;
ALTER TABLE dlq.replay_run_entries ADD CONSTRAINT replay_run_entries_run_id_fkey FOREIGN KEY (run_id) REFERENCES dlq.replay_runs ON DELETE CASCADE;
ALTER TABLE dlq.replay_runs DROP COLUMN origin;
ALTER TABLE dlq.dead_letter_transitions
    DROP COLUMN origin, DROP COLUMN joined_group, DROP COLUMN left_group, DROP COLUMN first_failed_at, DROP COLUMN attempts,
    DROP COLUMN source, DROP COLUMN error_type, DROP COLUMN from_class, DROP COLUMN xid;
