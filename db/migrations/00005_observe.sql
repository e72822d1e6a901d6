-- Observing: entries that nothing redelivers by itself until somebody says so, who said so, how an entry came in, and which
-- dlqd processes work on this database.

-- +goose Up
ALTER TABLE dlq.dead_letter_queue ADD COLUMN captured_by text NOT NULL DEFAULT 'capture';
COMMENT ON COLUMN dlq.dead_letter_queue.captured_by IS 'How the entry came in: capture (the trigger, when the job ended) or backfill (found among the jobs that River still kept).';
COMMENT ON COLUMN dlq.dead_letter_queue.waiting_for IS 'What a pending entry waits for besides next_retry_at, when it was last looked at: "automatic" (that automatic redelivery is switched on for it: it is observed), "condition: ...", "pace" (its place in the pace of its destination), "order" (an earlier entry of its ordering key); null for the time alone.';

-- Claim: the due entries of each priority, oldest first. Observed ones are outside of what workers claim.
DROP INDEX dlq.dead_letter_open_due;
CREATE INDEX dead_letter_open_due ON dlq.dead_letter_open (priority, next_retry_at, id)
    WHERE status = 'dlq_pending' AND waiting_for IS DISTINCT FROM 'automatic';
-- Observed entries, for what a switch would release: groups are found by one probe each, and gone through in order.
CREATE INDEX dead_letter_open_observed ON dlq.dead_letter_open (queue, job_kind, kind, error_class, priority, id) INCLUDE (next_retry_at)
    WHERE status = 'dlq_pending' AND waiting_for = 'automatic';

CREATE TABLE dlq.automatic_switches (
    scope   text NOT NULL CHECK (scope IN ('stop', 'all', 'queue', 'kind', 'class')),
    name    text NOT NULL DEFAULT '' CHECK ((name = '') = (scope IN ('stop', 'all'))),
    enabled boolean NOT NULL,
    include text[] NOT NULL DEFAULT '{}' CHECK (include <@ ARRAY['backfilled', 'single-attempt']),
    at      timestamptz NOT NULL DEFAULT now(),
    actor   text NOT NULL,
    note    text,
    PRIMARY KEY (scope, name)
);
COMMENT ON TABLE dlq.automatic_switches IS 'For what automatic redelivery was switched on or off by a person, on top of the policy''s section automatic. Change it with dlq.set_automatic, dlq.reset_automatic, dlq.stop_automatic and dlq.resume_automatic.';
COMMENT ON COLUMN dlq.automatic_switches.scope IS 'What the switch is for: all entries, a queue, a kind (* stands for any text) or a class. stop: nothing at all is redelivered by itself while the row is there.';
COMMENT ON COLUMN dlq.automatic_switches.name IS 'Name of the queue or class, or pattern of the kind; '''' for all and stop.';
COMMENT ON COLUMN dlq.automatic_switches.enabled IS 'Whether matching entries are redelivered by themselves. Where several switches match, one that is off wins; the one for all counts where no other matches.';
COMMENT ON COLUMN dlq.automatic_switches.include IS 'Entries that stay a person''s unless they are named here: backfilled, and of jobs that had a single-attempt.';
COMMENT ON COLUMN dlq.automatic_switches.at IS 'When it was switched.';
COMMENT ON COLUMN dlq.automatic_switches.actor IS 'Who switched it.';
COMMENT ON COLUMN dlq.automatic_switches.note IS 'What they said.';

CREATE TABLE dlq.automatic_changes (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    scope   text NOT NULL,
    name    text NOT NULL,
    enabled boolean,
    include text[],
    actor   text NOT NULL,
    db_user text NOT NULL DEFAULT session_user,
    origin  text,
    note    text
);
COMMENT ON TABLE dlq.automatic_changes IS 'The audit trail of dlq.automatic_switches: a row for each change, append-only.';
COMMENT ON COLUMN dlq.automatic_changes.id IS 'Sorts by time.';
COMMENT ON COLUMN dlq.automatic_changes.at IS 'When.';
COMMENT ON COLUMN dlq.automatic_changes.scope IS 'automatic_switches.scope.';
COMMENT ON COLUMN dlq.automatic_changes.name IS 'automatic_switches.name.';
COMMENT ON COLUMN dlq.automatic_changes.enabled IS 'What it was switched to; null where the switch was taken away, so that the policy counts again (or, of stop, that automatic redelivery goes on).';
COMMENT ON COLUMN dlq.automatic_changes.include IS 'What it names besides.';
COMMENT ON COLUMN dlq.automatic_changes.actor IS 'Who changed it.';
COMMENT ON COLUMN dlq.automatic_changes.db_user IS 'The database user of the session.';
COMMENT ON COLUMN dlq.automatic_changes.origin IS 'From where.';
COMMENT ON COLUMN dlq.automatic_changes.note IS 'What they said.';

CREATE TABLE dlq.processes (
    id         uuid PRIMARY KEY,
    name       text NOT NULL,
    version    text NOT NULL,
    parts      text[] NOT NULL,
    queues     text[] NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now(),
    stopped_at timestamptz
);
COMMENT ON TABLE dlq.processes IS 'The dlqd processes that serve on this database: each says every few seconds that it is there.';
COMMENT ON COLUMN dlq.processes.id IS 'Made by the process when it starts.';
COMMENT ON COLUMN dlq.processes.name IS 'Host and process id.';
COMMENT ON COLUMN dlq.processes.version IS 'Version of the program.';
COMMENT ON COLUMN dlq.processes.parts IS 'What it runs: api, process, dlq-workers.';
COMMENT ON COLUMN dlq.processes.queues IS 'River queues whose messages it delivers.';
COMMENT ON COLUMN dlq.processes.started_at IS 'When it started.';
COMMENT ON COLUMN dlq.processes.seen_at IS 'When it last said that it is there.';
COMMENT ON COLUMN dlq.processes.stopped_at IS 'When it stopped cleanly; null while it runs, and where it died.';

-- +goose Down
DROP TABLE dlq.processes;
DROP TABLE dlq.automatic_changes;
DROP TABLE dlq.automatic_switches;
DROP INDEX dlq.dead_letter_open_observed;
DROP INDEX dlq.dead_letter_open_due;
CREATE INDEX dead_letter_open_due ON dlq.dead_letter_open (priority, next_retry_at, id) WHERE status = 'dlq_pending';
ALTER TABLE dlq.dead_letter_queue DROP COLUMN captured_by;
