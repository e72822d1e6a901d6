-- What judgement needs: who said what an error is, what entries wait for, breakers that processes share, the pace of
-- redeliveries, and the order of messages that ask for one.

-- +goose Up
ALTER TABLE dlq.dead_letter_queue
    ADD COLUMN reported_class text,
    ADD COLUMN waiting_for    text,
    ADD COLUMN ordering_key   text,
    ADD COLUMN parked_by      text;
COMMENT ON COLUMN dlq.dead_letter_queue.reported_class IS 'The class that the worker which failed gave the error; null if it gave none.';
COMMENT ON COLUMN dlq.dead_letter_queue.waiting_for IS 'What a pending entry waits for besides next_retry_at, when it was last looked at: "condition: ...", "pace" (its place in the pace of its destination), "order" (an earlier entry of its ordering key); null for the time alone.';
COMMENT ON COLUMN dlq.dead_letter_queue.ordering_key IS 'orderingKey of the message.';
COMMENT ON COLUMN dlq.dead_letter_queue.parked_by IS 'Who parked an entry in dlq_manual; null where its class did.';

ALTER TABLE dlq.dead_letter_transitions ADD COLUMN config_version text;
COMMENT ON COLUMN dlq.dead_letter_transitions.config_version IS 'Version of the policy that the entry was decided by last.';

-- Entries that wait for a condition, for the gate that releases them: by queue, the most urgent and oldest first.
CREATE INDEX dead_letter_open_waiting ON dlq.dead_letter_open (queue, priority, id)
    WHERE status = 'dlq_pending' AND waiting_for LIKE 'condition: %';
-- Failure groups of a queue. Entries get their fingerprint when they are decided, so capture does not pay for it.
CREATE INDEX dead_letter_by_fingerprint ON dlq.dead_letter_queue (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;

CREATE TYPE dlq.breaker_state AS ENUM ('closed', 'open', 'half_open');
COMMENT ON TYPE dlq.breaker_state IS 'closed: deliveries go through. open: none does until open_until. half_open: a few probes do.';

CREATE TABLE dlq.circuit_breakers (
    name             text PRIMARY KEY,
    state            dlq.breaker_state NOT NULL DEFAULT 'closed',
    since            timestamptz NOT NULL DEFAULT now(),
    open_until       timestamptz,
    forced           boolean NOT NULL DEFAULT false,
    epoch            bigint NOT NULL DEFAULT 0,
    probes_started   integer NOT NULL DEFAULT 0,
    probes_succeeded integer NOT NULL DEFAULT 0,
    probes_failed    integer NOT NULL DEFAULT 0,
    paused           boolean NOT NULL DEFAULT false,
    reason           text,
    changed_by       text
);
COMMENT ON TABLE dlq.circuit_breakers IS 'Circuit breakers that have ever opened, as all dlqd processes share them. Change them with dlq.open_breaker and dlq.reset_breaker.';
COMMENT ON COLUMN dlq.circuit_breakers.name IS 'destination:NAME, or queue:NAME for a River queue of an application.';
COMMENT ON COLUMN dlq.circuit_breakers.state IS 'Where it stands.';
COMMENT ON COLUMN dlq.circuit_breakers.since IS 'Since when.';
COMMENT ON COLUMN dlq.circuit_breakers.open_until IS 'When an open breaker becomes half-open; null where a person opened it for good.';
COMMENT ON COLUMN dlq.circuit_breakers.forced IS 'A person opened it.';
COMMENT ON COLUMN dlq.circuit_breakers.epoch IS 'Counts its half-open periods, so that a probe''s late outcome does not count in a later one.';
COMMENT ON COLUMN dlq.circuit_breakers.probes_started IS 'Probes let through since it is half-open, by all processes.';
COMMENT ON COLUMN dlq.circuit_breakers.probes_succeeded IS 'Of those, how many succeeded.';
COMMENT ON COLUMN dlq.circuit_breakers.probes_failed IS 'Of those, how many failed.';
COMMENT ON COLUMN dlq.circuit_breakers.paused IS 'It has paused its River queue.';
COMMENT ON COLUMN dlq.circuit_breakers.reason IS 'Why it is in this state.';
COMMENT ON COLUMN dlq.circuit_breakers.changed_by IS 'Who changed it: a process, or a person.';

CREATE TABLE dlq.circuit_breaker_changes (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    name       text NOT NULL,
    from_state dlq.breaker_state,
    to_state   dlq.breaker_state NOT NULL,
    reason     text,
    actor      text,
    db_user    text NOT NULL DEFAULT session_user
);
CREATE INDEX circuit_breaker_changes_name ON dlq.circuit_breaker_changes (name, id);
COMMENT ON TABLE dlq.circuit_breaker_changes IS 'A row for each change of a breaker''s state.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.at IS 'When.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.name IS 'circuit_breakers.name.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.from_state IS 'Null where it had never opened.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.to_state IS 'Where it went.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.reason IS 'Why.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.actor IS 'Who changed it.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.db_user IS 'The database user of the session.';

CREATE TABLE dlq.paces (
    name    text PRIMARY KEY,
    free_at timestamptz NOT NULL
);
COMMENT ON TABLE dlq.paces IS 'How far the pace of redeliveries is reserved: see dlq.reserve_pace.';
COMMENT ON COLUMN dlq.paces.name IS 'destination:NAME, or queue:NAME for a queue of an application.';
COMMENT ON COLUMN dlq.paces.free_at IS 'When the next redelivery has a place.';

CREATE TABLE dlq.gates (
    name       text PRIMARY KEY,
    state      text NOT NULL CHECK (state IN ('probing', 'shut', 'open')),
    probes     uuid[] NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL,
    until      timestamptz
);
COMMENT ON TABLE dlq.gates IS 'Entries that wait together are released a few first, and the rest if those succeed. A gate that is not here is shut and has tried nothing.';
COMMENT ON COLUMN dlq.gates.name IS 'conditions:QUEUE, or smart:QUEUE:FINGERPRINT.';
COMMENT ON COLUMN dlq.gates.state IS 'probing: the first few are under way. shut: they failed; try again at until. open: the rest follow.';
COMMENT ON COLUMN dlq.gates.probes IS 'The entries that were released first.';
COMMENT ON COLUMN dlq.gates.started_at IS 'When they were, or when an open gate last let entries through.';
COMMENT ON COLUMN dlq.gates.until IS 'When a shut gate probes again.';

CREATE TABLE dlq.ordered_jobs (
    queue        text NOT NULL,
    ordering_key text NOT NULL,
    place        bigint GENERATED ALWAYS AS IDENTITY,
    job_id       bigint NOT NULL UNIQUE,
    PRIMARY KEY (queue, ordering_key, place)
);
COMMENT ON TABLE dlq.ordered_jobs IS 'Messages with an orderingKey, in queues that keep the order, whose work may not be done: a job waits for those before it.';
COMMENT ON COLUMN dlq.ordered_jobs.queue IS 'Queue of the job.';
COMMENT ON COLUMN dlq.ordered_jobs.ordering_key IS 'orderingKey of the message.';
COMMENT ON COLUMN dlq.ordered_jobs.place IS 'Its place in the order: that of its submission.';
COMMENT ON COLUMN dlq.ordered_jobs.job_id IS 'The job that the message came as.';

-- +goose Down
DROP TABLE dlq.ordered_jobs;
DROP TABLE dlq.gates;
DROP TABLE dlq.paces;
DROP TABLE dlq.circuit_breaker_changes;
DROP TABLE dlq.circuit_breakers;
DROP TYPE dlq.breaker_state;
DROP INDEX dlq.dead_letter_by_fingerprint;
DROP INDEX dlq.dead_letter_open_waiting;
ALTER TABLE dlq.dead_letter_transitions DROP COLUMN config_version;
ALTER TABLE dlq.dead_letter_queue DROP COLUMN parked_by, DROP COLUMN ordering_key, DROP COLUMN waiting_for, DROP COLUMN reported_class;
