-- The dead letter queue, its audit trail and its settings.
--
-- The schema names are placeholders that dlqd renders before it runs a file: dlq is the schema of dlqd (--schema),
-- river the schema of River's tables (--river-schema). Functions, views and triggers are in db/code: they are
-- replaced whole at every upgrade, and hold no data.

-- +goose Up
CREATE TYPE dlq.dead_letter_status AS ENUM (
    'dlq_pending', 'dlq_processing', 'dlq_manual',   -- open
    'dlq_resolved', 'dlq_failed', 'dlq_archived'     -- closed
);
COMMENT ON TYPE dlq.dead_letter_status IS 'Where a dead letter stands. Open: dlq_pending, dlq_processing, dlq_manual. Closed: dlq_resolved, dlq_failed, dlq_archived. dlq.allowed_moves() lists the legal moves.';

CREATE TYPE dlq.strategy AS ENUM ('immediate', 'scheduled', 'conditional', 'manual');
COMMENT ON TYPE dlq.strategy IS 'What happens next to a dead letter: retried after a delay, at the next off-peak hour, once a condition holds, or when a person says so.';

CREATE TYPE dlq.resolution_strategy AS ENUM ('automatic_retry', 'manual_retry', 'manual_resolution', 'discard');
COMMENT ON TYPE dlq.resolution_strategy IS 'How a dead letter was closed: redelivered by a worker, replayed by a person, resolved by a person outside dlqd, or discarded.';

CREATE TABLE dlq.dead_letter_queue (
    id                    uuid NOT NULL,
    event_id              text,
    river_job_id          bigint NOT NULL,
    queue                 text NOT NULL,
    kind                  text NOT NULL,
    job_kind              text NOT NULL,
    subscriber_id         text,
    source                text,
    priority              smallint NOT NULL,
    tags                  text[] NOT NULL DEFAULT '{}',
    original_event        jsonb NOT NULL,
    edited_event          jsonb,
    error_message         text,
    error_type            text,
    error_code            text,
    error_class           text,
    error_stack_trace     text,
    error_context         jsonb,
    fingerprint           text,
    retry_history         jsonb NOT NULL DEFAULT '[]',
    retry_count           integer NOT NULL DEFAULT 0,
    max_retries           integer NOT NULL DEFAULT 0,
    dlq_retry_count       integer NOT NULL DEFAULT 0,
    dlq_max_retries       integer NOT NULL DEFAULT 5,
    replay_attempts       jsonb NOT NULL DEFAULT '[]',
    status                dlq.dead_letter_status NOT NULL DEFAULT 'dlq_pending',
    strategy              dlq.strategy,
    rule                  text,
    next_retry_at         timestamptz,
    redelivery_job_id     bigint,
    locked_by             text,
    locked_at             timestamptz,
    lease_expires_at      timestamptz,
    assigned_to           text,
    notes                 text,
    resolution_strategy   dlq.resolution_strategy,
    resolved_by           text,
    resolution_notes      text,
    resolution_timestamp  timestamptz,
    config_version        text,
    unique_key            bytea,
    metadata              jsonb NOT NULL DEFAULT '{}',
    move                  jsonb,
    first_failed_at       timestamptz NOT NULL,
    last_failed_at        timestamptz NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now(),
    updated_at            timestamptz NOT NULL DEFAULT now(),
    closed_at             timestamptz,
    -- One constraint, not three: Postgres reads each anew in every statement, and capture is a statement a job.
    CONSTRAINT columns_follow_status CHECK (
        (closed_at IS NULL) = (status IN ('dlq_pending', 'dlq_processing', 'dlq_manual'))
        AND (redelivery_job_id IS NOT NULL) = (status = 'dlq_processing')
        AND (next_retry_at IS NOT NULL OR status <> 'dlq_pending'))
) PARTITION BY LIST (status);

-- lz4 unpacks several times faster than pglz; servers built without it keep their default.
-- +goose StatementBegin
DO $$
BEGIN
    ALTER TABLE dlq.dead_letter_queue
        ALTER COLUMN original_event SET COMPRESSION lz4,
        ALTER COLUMN edited_event SET COMPRESSION lz4,
        ALTER COLUMN error_stack_trace SET COMPRESSION lz4,
        ALTER COLUMN error_context SET COMPRESSION lz4;
EXCEPTION WHEN OTHERS THEN
    RAISE NOTICE 'lz4 compression is not available on this server (%); columns keep the default', SQLERRM;
END
$$;
-- +goose StatementEnd

-- The open partition is the only one that capture and workers touch, so their cost does not grow with history.
CREATE TABLE dlq.dead_letter_open PARTITION OF dlq.dead_letter_queue (PRIMARY KEY (id))
    FOR VALUES IN ('dlq_pending', 'dlq_processing', 'dlq_manual');

-- Closed entries are partitioned again by the time they closed, so that retention drops whole partitions. Partitions
-- are made ahead by dlq.ensure_partitions(); a row whose partition is missing goes to the default one, never away.
CREATE TABLE dlq.dead_letter_resolved PARTITION OF dlq.dead_letter_queue FOR VALUES IN ('dlq_resolved') PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_failed   PARTITION OF dlq.dead_letter_queue FOR VALUES IN ('dlq_failed')   PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_archived PARTITION OF dlq.dead_letter_queue FOR VALUES IN ('dlq_archived') PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_resolved_default PARTITION OF dlq.dead_letter_resolved (PRIMARY KEY (id)) DEFAULT;
CREATE TABLE dlq.dead_letter_failed_default   PARTITION OF dlq.dead_letter_failed   (PRIMARY KEY (id)) DEFAULT;
CREATE TABLE dlq.dead_letter_archived_default PARTITION OF dlq.dead_letter_archived (PRIMARY KEY (id)) DEFAULT;

-- One open entry a job: what makes a second dead letter for one failure impossible.
CREATE UNIQUE INDEX dead_letter_open_river_job ON dlq.dead_letter_open (river_job_id);
-- Claim: the due entries of each priority, oldest first.
CREATE INDEX dead_letter_open_due ON dlq.dead_letter_open (priority, next_retry_at, id) WHERE status = 'dlq_pending';
-- Leases to look at.
CREATE INDEX dead_letter_open_lease ON dlq.dead_letter_open (lease_expires_at) WHERE status = 'dlq_processing';
-- Counts by status, queue and class, read from the index alone.
CREATE INDEX dead_letter_open_backlog ON dlq.dead_letter_open (status, queue, error_class);
-- Follow a retry that somebody makes on a failed entry's job.
CREATE INDEX dead_letter_failed_river_job ON dlq.dead_letter_failed (river_job_id);
-- Lists: one filter each, in id (that is, time) order, so that a page is read from one index whatever it skips.
CREATE INDEX dead_letter_by_event  ON dlq.dead_letter_queue (event_id);
CREATE INDEX dead_letter_by_status ON dlq.dead_letter_queue (status, id);
CREATE INDEX dead_letter_by_queue  ON dlq.dead_letter_queue (queue, id);
CREATE INDEX dead_letter_by_kind   ON dlq.dead_letter_queue (kind, id);
CREATE INDEX dead_letter_by_class  ON dlq.dead_letter_queue (error_class, id);
CREATE INDEX dead_letter_by_type   ON dlq.dead_letter_queue (error_type, id);
CREATE INDEX dead_letter_by_source ON dlq.dead_letter_queue (source, id);

COMMENT ON TABLE dlq.dead_letter_queue IS 'Jobs that ended as failures, and what became of each. Change it through the functions of this schema (dlq.replay, dlq.discard, dlq.resolve, dlq.park): a trigger refuses any move that the state table does not allow.';
COMMENT ON TABLE dlq.dead_letter_open IS 'Open entries: dlq_pending, dlq_processing, dlq_manual.';
COMMENT ON TABLE dlq.dead_letter_resolved IS 'Entries whose work was done in the end, by month closed.';
COMMENT ON TABLE dlq.dead_letter_failed IS 'Entries whose DLQ retries are spent, by month closed.';
COMMENT ON TABLE dlq.dead_letter_archived IS 'Entries that were discarded or that aged out, by month closed.';
COMMENT ON COLUMN dlq.dead_letter_queue.id IS 'UUID version 7: sorts by the time of capture.';
COMMENT ON COLUMN dlq.dead_letter_queue.event_id IS 'messageId of the message; null for a job that dlqd did not submit.';
COMMENT ON COLUMN dlq.dead_letter_queue.river_job_id IS 'The job that failed first.';
COMMENT ON COLUMN dlq.dead_letter_queue.queue IS 'River queue of the job.';
COMMENT ON COLUMN dlq.dead_letter_queue.kind IS 'Kind of the message, or of the job where dlqd did not submit it.';
COMMENT ON COLUMN dlq.dead_letter_queue.job_kind IS 'River''s kind of the job: what a redelivery is inserted with.';
COMMENT ON COLUMN dlq.dead_letter_queue.subscriber_id IS 'Whom the message concerns, as its sender said.';
COMMENT ON COLUMN dlq.dead_letter_queue.source IS 'Who sent the message, as its sender said.';
COMMENT ON COLUMN dlq.dead_letter_queue.priority IS 'River''s priority: 1 is the most urgent, 4 the least.';
COMMENT ON COLUMN dlq.dead_letter_queue.tags IS 'Tags of the job.';
COMMENT ON COLUMN dlq.dead_letter_queue.original_event IS 'The message whole (the job''s args). Never changed.';
COMMENT ON COLUMN dlq.dead_letter_queue.edited_event IS 'What redeliveries carry instead of original_event, once a person has edited it.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_message IS 'The error of the last attempt, whole.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_type IS 'Type of the error, as the worker or the destination named it.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_code IS 'Code of the error: an HTTP status, a SQLSTATE, a word of the application''s.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_class IS 'transient, rate_limited, outage, validation, malformed, unauthorized, not_found, business, code_bug or unknown.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_stack_trace IS 'Stack trace of a panic.';
COMMENT ON COLUMN dlq.dead_letter_queue.error_context IS 'What the worker recorded beside the error.';
COMMENT ON COLUMN dlq.dead_letter_queue.fingerprint IS 'Equal for entries that failed for the same reason.';
COMMENT ON COLUMN dlq.dead_letter_queue.retry_history IS 'Attempts of the job as River kept them; where they are long, at, attempt and the first 4,000 characters of error.';
COMMENT ON COLUMN dlq.dead_letter_queue.retry_count IS 'Attempts that the job had made when it failed.';
COMMENT ON COLUMN dlq.dead_letter_queue.max_retries IS 'Attempts that the job was allowed.';
COMMENT ON COLUMN dlq.dead_letter_queue.dlq_retry_count IS 'Redeliveries made so far.';
COMMENT ON COLUMN dlq.dead_letter_queue.dlq_max_retries IS 'A redelivery that fails when so many were made closes the entry as dlq_failed.';
COMMENT ON COLUMN dlq.dead_letter_queue.replay_attempts IS 'Redeliveries that ended: jobId, at, endedAt, actor, outcome, error.';
COMMENT ON COLUMN dlq.dead_letter_queue.status IS 'Where the entry stands; see dlq.allowed_moves().';
COMMENT ON COLUMN dlq.dead_letter_queue.strategy IS 'What happens next; null while undecided.';
COMMENT ON COLUMN dlq.dead_letter_queue.rule IS 'The rule that chose class and strategy.';
COMMENT ON COLUMN dlq.dead_letter_queue.next_retry_at IS 'When a worker looks at a pending entry next.';
COMMENT ON COLUMN dlq.dead_letter_queue.redelivery_job_id IS 'The job that an entry in dlq_processing waits for: its lease.';
COMMENT ON COLUMN dlq.dead_letter_queue.locked_by IS 'Worker or person that started the redelivery.';
COMMENT ON COLUMN dlq.dead_letter_queue.locked_at IS 'When the redelivery was started.';
COMMENT ON COLUMN dlq.dead_letter_queue.lease_expires_at IS 'When a sweep looks whether the redelivery''s job still exists.';
COMMENT ON COLUMN dlq.dead_letter_queue.assigned_to IS 'Who looks after the entry.';
COMMENT ON COLUMN dlq.dead_letter_queue.notes IS 'The last note that a person left.';
COMMENT ON COLUMN dlq.dead_letter_queue.resolution_strategy IS 'How the entry was closed.';
COMMENT ON COLUMN dlq.dead_letter_queue.resolved_by IS 'Who closed it.';
COMMENT ON COLUMN dlq.dead_letter_queue.resolution_notes IS 'What they said.';
COMMENT ON COLUMN dlq.dead_letter_queue.resolution_timestamp IS 'When it was closed.';
COMMENT ON COLUMN dlq.dead_letter_queue.config_version IS 'Version of the policy that decided last.';
COMMENT ON COLUMN dlq.dead_letter_queue.unique_key IS 'River''s unique key of the original job: a replay asks before it doubles a live equal job.';
COMMENT ON COLUMN dlq.dead_letter_queue.metadata IS 'Metadata of the job.';
COMMENT ON COLUMN dlq.dead_letter_queue.move IS 'Written by whoever moves the entry ({"actor", "reason", "note", "detail"}) and taken by a trigger into dead_letter_transitions: always null at rest.';
COMMENT ON COLUMN dlq.dead_letter_queue.first_failed_at IS 'When the first attempt failed.';
COMMENT ON COLUMN dlq.dead_letter_queue.last_failed_at IS 'When the last attempt or redelivery failed.';
COMMENT ON COLUMN dlq.dead_letter_queue.created_at IS 'When the entry was captured.';
COMMENT ON COLUMN dlq.dead_letter_queue.updated_at IS 'When it last moved.';
COMMENT ON COLUMN dlq.dead_letter_queue.closed_at IS 'When it was closed; null while open.';

CREATE SEQUENCE dlq.dead_letter_transitions_id_seq CACHE 32;
CREATE TABLE dlq.dead_letter_transitions (
    id            bigint NOT NULL DEFAULT nextval('dlq.dead_letter_transitions_id_seq'),
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    entry_id      uuid NOT NULL,
    from_status   dlq.dead_letter_status,
    to_status     dlq.dead_letter_status NOT NULL,
    actor         text NOT NULL,
    db_user       text NOT NULL DEFAULT session_user,
    reason        text,
    note          text,
    strategy      dlq.strategy,
    rule          text,
    next_retry_at timestamptz,
    river_job_id  bigint,
    queue         text NOT NULL,
    kind          text NOT NULL,
    error_class   text,
    detail        jsonb,
    PRIMARY KEY (id, at)
) PARTITION BY RANGE (at);
ALTER SEQUENCE dlq.dead_letter_transitions_id_seq OWNED BY dlq.dead_letter_transitions.id;
CREATE TABLE dlq.dead_letter_transitions_default PARTITION OF dlq.dead_letter_transitions DEFAULT;
CREATE INDEX dead_letter_transitions_entry ON dlq.dead_letter_transitions (entry_id, at);
CREATE INDEX dead_letter_transitions_at ON dlq.dead_letter_transitions USING brin (at);

COMMENT ON TABLE dlq.dead_letter_transitions IS 'The audit trail: a row for each move of a dead letter, append-only, by day.';
COMMENT ON COLUMN dlq.dead_letter_transitions.at IS 'When the move was made (wall clock, not start of transaction).';
COMMENT ON COLUMN dlq.dead_letter_transitions.entry_id IS 'dead_letter_queue.id.';
COMMENT ON COLUMN dlq.dead_letter_transitions.from_status IS 'Null for a capture.';
COMMENT ON COLUMN dlq.dead_letter_transitions.to_status IS 'Where it went.';
COMMENT ON COLUMN dlq.dead_letter_transitions.actor IS 'Who moved it: a person, a worker, or the trigger that recorded a job''s end.';
COMMENT ON COLUMN dlq.dead_letter_transitions.db_user IS 'The database user of the session.';
COMMENT ON COLUMN dlq.dead_letter_transitions.reason IS 'Why.';
COMMENT ON COLUMN dlq.dead_letter_transitions.note IS 'What the person said.';
COMMENT ON COLUMN dlq.dead_letter_transitions.strategy IS 'The strategy after the move.';
COMMENT ON COLUMN dlq.dead_letter_transitions.rule IS 'The rule after the move.';
COMMENT ON COLUMN dlq.dead_letter_transitions.next_retry_at IS 'When a worker looks at it next.';
COMMENT ON COLUMN dlq.dead_letter_transitions.river_job_id IS 'The job that the move is about.';
COMMENT ON COLUMN dlq.dead_letter_transitions.queue IS 'The entry''s queue.';
COMMENT ON COLUMN dlq.dead_letter_transitions.kind IS 'The entry''s kind.';
COMMENT ON COLUMN dlq.dead_letter_transitions.error_class IS 'The entry''s class after the move.';
COMMENT ON COLUMN dlq.dead_letter_transitions.detail IS 'More about the move, such as the edited payload of a replay.';

CREATE TABLE dlq.settings (
    key        text PRIMARY KEY,
    value      text NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE dlq.settings IS 'What dlqd remembers of this installation: code_version (hash of db/code as installed), river (own, or attached: it belongs to an application, whose clients lead its maintenance).';

-- +goose Down
DROP TABLE dlq.settings;
DROP TABLE dlq.dead_letter_transitions;
DROP TABLE dlq.dead_letter_queue;
DROP TYPE dlq.resolution_strategy;
DROP TYPE dlq.strategy;
DROP TYPE dlq.dead_letter_status;
