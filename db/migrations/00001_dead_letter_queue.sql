-- All that dlqd keeps: the queue, its audit trail, what applications' transactions append, and what workers, replays,
-- analytics and switches go by.
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

CREATE TYPE dlq.dead_letter_stage AS ENUM ('inbox', 'open', 'resolved', 'failed', 'archived');
COMMENT ON TYPE dlq.dead_letter_stage IS 'Which partition a dead letter is in. inbox: its job ended a moment ago, and no DLQ worker has filed it yet. The others follow from the status.';

CREATE TYPE dlq.strategy AS ENUM ('immediate', 'scheduled', 'conditional', 'manual');
COMMENT ON TYPE dlq.strategy IS 'What happens next to a dead letter: retried after a delay, at the next off-peak hour, once a condition holds, or when a person says so.';

CREATE TYPE dlq.resolution_strategy AS ENUM ('automatic_retry', 'manual_retry', 'manual_resolution', 'discard');
COMMENT ON TYPE dlq.resolution_strategy IS 'How a dead letter was closed: redelivered by a worker, replayed by a person, resolved by a person outside dlqd, or discarded.';

CREATE TABLE dlq.dead_letter_queue (
    id                    uuid NOT NULL,
    event_id              text,
    river_job_id          bigint NOT NULL,
    job_created_at        timestamptz NOT NULL,
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
    reported_class        text,
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
    waiting_for           text,
    ordering_key          text,
    order_place           bigint,
    redelivery_job_id     bigint,
    locked_by             text,
    locked_at             timestamptz,
    parked_by             text,
    assigned_to           text,
    notes                 text,
    resolution_strategy   dlq.resolution_strategy,
    resolved_by           text,
    resolution_notes      text,
    resolution_timestamp  timestamptz,
    config_version        text,
    unique_key            bytea,
    unique_states         bit varying,
    metadata              jsonb NOT NULL DEFAULT '{}',
    move                  jsonb,
    captured_by           text NOT NULL DEFAULT 'capture',
    first_failed_at       timestamptz NOT NULL,
    last_failed_at        timestamptz NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now(),
    filed_at              timestamptz,
    updated_at            timestamptz NOT NULL DEFAULT now(),
    closed_at             timestamptz,
    stage                 dlq.dead_letter_stage NOT NULL DEFAULT 'inbox'
) PARTITION BY LIST (stage);

-- What River keeps compressed is copied as it is, and what it could not compress is not tried again: STORAGE EXTERNAL.
-- lz4 unpacks several times faster than pglz; servers built without it keep their default.
-- +goose StatementBegin
DO $$
BEGIN
    ALTER TABLE dlq.dead_letter_queue
        ALTER COLUMN original_event SET STORAGE EXTERNAL,
        ALTER COLUMN edited_event SET COMPRESSION lz4,
        ALTER COLUMN error_stack_trace SET COMPRESSION lz4,
        ALTER COLUMN error_context SET COMPRESSION lz4,
        ALTER COLUMN retry_history SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    RAISE NOTICE 'lz4 compression is not available on this server (%); columns keep the default', SQLERRM;
    ALTER TABLE dlq.dead_letter_queue ALTER COLUMN original_event SET STORAGE EXTERNAL;
END
$$;
-- +goose StatementEnd

-- The inbox: all that an application's transaction writes. One index, no trigger on insertion, no constraint beyond the
-- partition's: what is here is undecided, and a DLQ worker files it within a moment.
--
-- Rows stay for a moment, so dead ones are taken away soon and at full speed, however many there were. The file is never cut
-- shorter: VACUUM would lock the table for that, and capture gives way to locks.
CREATE TABLE dlq.dead_letter_inbox PARTITION OF dlq.dead_letter_queue (PRIMARY KEY (id))
    FOR VALUES IN ('inbox')
    WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
          toast.vacuum_truncate = off, toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000, toast.autovacuum_vacuum_cost_delay = 0);

-- The open partition and the inbox are the only ones that workers touch, so their cost does not grow with history.
CREATE TABLE dlq.dead_letter_open PARTITION OF dlq.dead_letter_queue (
    PRIMARY KEY (id),
    CONSTRAINT columns_follow_status CHECK (
        status IN ('dlq_pending', 'dlq_processing', 'dlq_manual') AND closed_at IS NULL
        AND (redelivery_job_id IS NOT NULL) = (status = 'dlq_processing')
        AND (next_retry_at IS NOT NULL OR status <> 'dlq_pending')))
    FOR VALUES IN ('open')
    -- A row lives for some updates, none of which can be HOT: each changes the status or what an index is partial by. So no
    -- space is kept free in its pages (fillfactor), and vacuum comes early.
    WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.05,
          toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 5000, toast.autovacuum_vacuum_cost_delay = 0);

-- Closed entries are partitioned again by the time they closed, so that retention drops whole partitions. Partitions
-- are made ahead by dlq.ensure_partitions(); a row whose partition is missing goes to the default one, never away.
CREATE TABLE dlq.dead_letter_resolved PARTITION OF dlq.dead_letter_queue (CONSTRAINT columns_follow_status CHECK (status = 'dlq_resolved' AND closed_at IS NOT NULL AND redelivery_job_id IS NULL))
    FOR VALUES IN ('resolved') PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_failed PARTITION OF dlq.dead_letter_queue (CONSTRAINT columns_follow_status CHECK (status = 'dlq_failed' AND closed_at IS NOT NULL AND redelivery_job_id IS NULL))
    FOR VALUES IN ('failed') PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_archived PARTITION OF dlq.dead_letter_queue (CONSTRAINT columns_follow_status CHECK (status = 'dlq_archived' AND closed_at IS NOT NULL AND redelivery_job_id IS NULL))
    FOR VALUES IN ('archived') PARTITION BY RANGE (closed_at);
CREATE TABLE dlq.dead_letter_resolved_default PARTITION OF dlq.dead_letter_resolved (PRIMARY KEY (id)) DEFAULT;
CREATE TABLE dlq.dead_letter_failed_default   PARTITION OF dlq.dead_letter_failed   (PRIMARY KEY (id)) DEFAULT;
CREATE TABLE dlq.dead_letter_archived_default PARTITION OF dlq.dead_letter_archived (PRIMARY KEY (id)) DEFAULT;

-- One open entry a job: what makes a second dead letter for one failure impossible.
CREATE UNIQUE INDEX dead_letter_open_river_job ON dlq.dead_letter_open (river_job_id, job_created_at);
-- Claim: the due entries of each priority, oldest first. Observed ones are outside of what workers claim.
CREATE INDEX dead_letter_open_due ON dlq.dead_letter_open (priority, next_retry_at, id)
    WHERE status = 'dlq_pending' AND waiting_for IS DISTINCT FROM 'automatic';
-- Observed entries, for what a switch would release: groups are found by one probe each, and gone through in order.
CREATE INDEX dead_letter_open_observed ON dlq.dead_letter_open (queue, job_kind, kind, error_class, priority, id) INCLUDE (next_retry_at)
    WHERE status = 'dlq_pending' AND waiting_for = 'automatic';
-- Counts by status, queue and class, read from the index alone.
CREATE INDEX dead_letter_open_backlog ON dlq.dead_letter_open (status, queue, error_class);
-- Follow a retry that somebody makes on a failed entry's job.
CREATE INDEX dead_letter_failed_river_job ON dlq.dead_letter_failed (river_job_id);
-- Entries that wait for a condition, for the gate of their queue that releases them: those of one plan are together, the most
-- urgent and oldest first.
CREATE INDEX dead_letter_open_waiting ON dlq.dead_letter_open (queue, kind, error_class, rule, priority, id)
    WHERE status = 'dlq_pending' AND waiting_for LIKE 'condition: %';
-- Lists: one filter each, in id (that is, time) order, so that a page is read from one index whatever it skips: what a filter
-- chooses may all be older than a million others. Jobs of applications mostly have no event, type or source, and cost these
-- indexes nothing. Not of the inbox: capture would pay for them.
CREATE INDEX dead_letter_open_by_event ON dlq.dead_letter_open (event_id) WHERE event_id IS NOT NULL;
CREATE INDEX dead_letter_open_by_status ON dlq.dead_letter_open (status, id);
CREATE INDEX dead_letter_open_by_queue ON dlq.dead_letter_open (queue, id);
CREATE INDEX dead_letter_open_by_kind ON dlq.dead_letter_open (kind, id);
CREATE INDEX dead_letter_open_by_class ON dlq.dead_letter_open (error_class, id);
CREATE INDEX dead_letter_open_by_type ON dlq.dead_letter_open (error_type, id) WHERE error_type IS NOT NULL;
CREATE INDEX dead_letter_open_by_source ON dlq.dead_letter_open (source, id) WHERE source IS NOT NULL;
CREATE INDEX dead_letter_open_by_fingerprint ON dlq.dead_letter_open (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_event ON dlq.dead_letter_resolved (event_id) WHERE event_id IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_queue ON dlq.dead_letter_resolved (queue, id);
CREATE INDEX dead_letter_resolved_by_kind ON dlq.dead_letter_resolved (kind, id);
CREATE INDEX dead_letter_resolved_by_class ON dlq.dead_letter_resolved (error_class, id);
CREATE INDEX dead_letter_resolved_by_type ON dlq.dead_letter_resolved (error_type, id) WHERE error_type IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_source ON dlq.dead_letter_resolved (source, id) WHERE source IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_fingerprint ON dlq.dead_letter_resolved (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_failed_by_event ON dlq.dead_letter_failed (event_id) WHERE event_id IS NOT NULL;
CREATE INDEX dead_letter_failed_by_queue ON dlq.dead_letter_failed (queue, id);
CREATE INDEX dead_letter_failed_by_kind ON dlq.dead_letter_failed (kind, id);
CREATE INDEX dead_letter_failed_by_class ON dlq.dead_letter_failed (error_class, id);
CREATE INDEX dead_letter_failed_by_type ON dlq.dead_letter_failed (error_type, id) WHERE error_type IS NOT NULL;
CREATE INDEX dead_letter_failed_by_source ON dlq.dead_letter_failed (source, id) WHERE source IS NOT NULL;
CREATE INDEX dead_letter_failed_by_fingerprint ON dlq.dead_letter_failed (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX dead_letter_archived_by_event ON dlq.dead_letter_archived (event_id) WHERE event_id IS NOT NULL;
CREATE INDEX dead_letter_archived_by_queue ON dlq.dead_letter_archived (queue, id);
CREATE INDEX dead_letter_archived_by_kind ON dlq.dead_letter_archived (kind, id);
CREATE INDEX dead_letter_archived_by_class ON dlq.dead_letter_archived (error_class, id);
CREATE INDEX dead_letter_archived_by_type ON dlq.dead_letter_archived (error_type, id) WHERE error_type IS NOT NULL;
CREATE INDEX dead_letter_archived_by_source ON dlq.dead_letter_archived (source, id) WHERE source IS NOT NULL;
CREATE INDEX dead_letter_archived_by_fingerprint ON dlq.dead_letter_archived (queue, fingerprint, id) WHERE fingerprint IS NOT NULL;

-- Closed entries that are past their time: they come in the order in which they closed, which is what BRIN is for.
CREATE INDEX dead_letter_resolved_closed ON dlq.dead_letter_resolved USING brin (closed_at);
CREATE INDEX dead_letter_failed_closed   ON dlq.dead_letter_failed   USING brin (closed_at);
CREATE INDEX dead_letter_archived_closed ON dlq.dead_letter_archived USING brin (closed_at);

COMMENT ON TABLE dlq.dead_letter_queue IS 'Jobs that ended as failures, and what became of each. Change it through the functions of this schema (dlq.replay, dlq.discard, dlq.resolve, dlq.park): a trigger refuses any move that the state table does not allow.';
COMMENT ON TABLE dlq.dead_letter_open IS 'Open entries: dlq_pending, dlq_processing, dlq_manual.';
COMMENT ON TABLE dlq.dead_letter_resolved IS 'Entries whose work was done in the end, by month closed.';
COMMENT ON TABLE dlq.dead_letter_failed IS 'Entries whose DLQ retries are spent, by month closed.';
COMMENT ON TABLE dlq.dead_letter_archived IS 'Entries that were discarded or that aged out, by month closed.';
COMMENT ON COLUMN dlq.dead_letter_queue.id IS 'UUID version 7, made of the time of the failure and the job''s id (dlq.entry_id): sorts by time, and one failure has one id.';
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
COMMENT ON COLUMN dlq.dead_letter_queue.redelivery_job_id IS 'The job that an entry in dlq_processing waits for.';
COMMENT ON COLUMN dlq.dead_letter_queue.locked_by IS 'Worker or person that started the redelivery.';
COMMENT ON COLUMN dlq.dead_letter_queue.locked_at IS 'When the redelivery was started.';
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
COMMENT ON COLUMN dlq.dead_letter_queue.reported_class IS 'The class that the worker which failed gave the error; null if it gave none.';
COMMENT ON COLUMN dlq.dead_letter_queue.ordering_key IS 'orderingKey of the message.';
COMMENT ON COLUMN dlq.dead_letter_queue.order_place IS 'Its message''s place in the order of that key (dlq.ordered_jobs), which it has again when it is replayed or reopened; null in a queue that does not keep the order.';
COMMENT ON COLUMN dlq.dead_letter_queue.parked_by IS 'Who parked an entry in dlq_manual; null where its class did.';
COMMENT ON COLUMN dlq.dead_letter_queue.captured_by IS 'How the entry came in: capture (the trigger, when the job ended) backfill or reconciler (found among the jobs that River keeps).';
COMMENT ON COLUMN dlq.dead_letter_queue.waiting_for IS 'What a pending entry waits for besides next_retry_at, when it was last looked at: "automatic" (that automatic redelivery is switched on for it: it is observed), "condition: ...", "pace" (its place in the pace of its destination), "order" (an earlier entry of its ordering key); null for the time alone.';
COMMENT ON TABLE dlq.dead_letter_inbox IS 'Entries that no DLQ worker has filed yet: dlq_pending, undecided.';
COMMENT ON COLUMN dlq.dead_letter_queue.job_created_at IS 'When River made that job: a job is (id, created_at), since ids come again where a sequence is restarted.';
COMMENT ON COLUMN dlq.dead_letter_queue.unique_states IS 'In which states of a job River keeps unique_key to one job.';
COMMENT ON COLUMN dlq.dead_letter_queue.filed_at IS 'When it was filed: described, judged and written to the audit trail. Null while it is in the inbox.';
COMMENT ON COLUMN dlq.dead_letter_queue.stage IS 'The partition; follows from the status once the entry is filed.';

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
    config_version text,
    xid           bigint DEFAULT txid_current(),
    from_class    text,
    error_type    text,
    source        text,
    attempts      integer,
    first_failed_at timestamptz,
    failed_at     timestamptz,
    left_group    text,
    joined_group  text,
    origin        text,
    PRIMARY KEY (at, id) -- the order in which it is read
) PARTITION BY RANGE (at);
ALTER SEQUENCE dlq.dead_letter_transitions_id_seq OWNED BY dlq.dead_letter_transitions.id;
CREATE TABLE dlq.dead_letter_transitions_default PARTITION OF dlq.dead_letter_transitions DEFAULT;
CREATE INDEX dead_letter_transitions_entry ON dlq.dead_letter_transitions (entry_id, at);
-- What committed since the last look, and what a day holds: BRIN, since rows come nearly in the order of time and of their
-- transactions.
CREATE INDEX dead_letter_transitions_xid ON dlq.dead_letter_transitions USING brin (xid, at) WITH (pages_per_range = 32, autosummarize = on);
-- What people did, the least of what the trail holds; the latest first.
CREATE INDEX dead_letter_transitions_people ON dlq.dead_letter_transitions (at, id, actor) WHERE origin IS NOT NULL;

COMMENT ON TABLE dlq.dead_letter_transitions IS 'The audit trail: a row for each move of a dead letter, append-only, by month.';
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
COMMENT ON COLUMN dlq.dead_letter_transitions.config_version IS 'Version of the policy that the entry was decided by last; of what a person did, the one that was in force then.';
COMMENT ON COLUMN dlq.dead_letter_transitions.xid IS 'The transaction that made the move: rollups count what committed between two snapshots.';
COMMENT ON COLUMN dlq.dead_letter_transitions.from_class IS 'The entry''s class before the move; null while undecided.';
COMMENT ON COLUMN dlq.dead_letter_transitions.error_type IS 'Type of the error, of moves that record a failure ('''' where it has none); null for the others.';
COMMENT ON COLUMN dlq.dead_letter_transitions.source IS 'Source of the message, of captures.';
COMMENT ON COLUMN dlq.dead_letter_transitions.attempts IS 'Attempts that the job had made, of captures.';
COMMENT ON COLUMN dlq.dead_letter_transitions.first_failed_at IS 'When the first attempt failed, of moves that close the entry.';
COMMENT ON COLUMN dlq.dead_letter_transitions.left_group IS 'Fingerprint of the failure group that the entry left as an open one.';
COMMENT ON COLUMN dlq.dead_letter_transitions.joined_group IS 'Fingerprint of the failure group that it joined as an open one.';
COMMENT ON COLUMN dlq.dead_letter_transitions.origin IS 'From where a person made the move; null for what dlqd does by itself.';
COMMENT ON COLUMN dlq.dead_letter_transitions.failed_at IS 'When the job failed, of moves that record a failure: what analytics count by. (at is when it was filed.)';
COMMENT ON COLUMN dlq.dead_letter_transitions.id IS 'Identifies the move. A session takes ids ahead, so they are not in the order of time: at is.';

-- What an application's transaction says of jobs that dlqd knows already. It is appended to; DLQ workers take rows out as
-- they draw the conclusions.
CREATE TABLE dlq.job_facts (
    job_id         bigint NOT NULL,
    job_created_at timestamptz NOT NULL,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    fact           text NOT NULL,
    entry_id       uuid,
    job            jsonb,
    db_user        text NOT NULL DEFAULT session_user
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        toast.vacuum_truncate = off, toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000, toast.autovacuum_vacuum_cost_delay = 0);
-- Where a publication has all tables, a table without a key takes no DELETE otherwise.
ALTER TABLE dlq.job_facts REPLICA IDENTITY FULL;
CREATE INDEX job_facts_job ON dlq.job_facts (job_id, at);
COMMENT ON TABLE dlq.job_facts IS 'Ends of redeliveries, and retries made outside dlqd, that no dlqd process has applied yet: see dlq.apply_facts().';
COMMENT ON COLUMN dlq.job_facts.job_id IS 'The job.';
COMMENT ON COLUMN dlq.job_facts.job_created_at IS 'When River made it.';
COMMENT ON COLUMN dlq.job_facts.at IS 'When it happened: facts of a job are applied in this order.';
COMMENT ON COLUMN dlq.job_facts.fact IS 'completed, discarded or cancelled: the job ended so. retried: somebody had it run again. following: that was applied, but the job runs and could not be marked, so dlqd looks at it until it ends. closed: a person has closed the entry, and dlqd does what is to be done with jobs that wait to run. refused: the database refuses what follows from it, which is tried again every minute; job has the fact, the refusal and its time.';
COMMENT ON COLUMN dlq.job_facts.entry_id IS 'The entry that the job is of, where dlqd made it or follows it, or that was made of the failure after which it was retried; null for another job.';
COMMENT ON COLUMN dlq.job_facts.job IS 'Of a job that failed, what describes it: state, attempt, finalized_at, errors (the last one) and metadata.';
COMMENT ON COLUMN dlq.job_facts.db_user IS 'The database user of the session.';

CREATE TABLE dlq.entry_jobs (
    job_id         bigint NOT NULL,
    job_created_at timestamptz NOT NULL,
    entry_id       uuid NOT NULL,
    run_id         uuid,
    destination    text,
    PRIMARY KEY (job_id, job_created_at)
) WITH (vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX entry_jobs_entry ON dlq.entry_jobs (entry_id);
COMMENT ON TABLE dlq.entry_jobs IS 'Which jobs are of which entry: its redeliveries, and its original job once that was retried outside dlqd. This, and not the mark in a job''s metadata, says so: metadata gets copied. Rows go when River has deleted the job.';
COMMENT ON COLUMN dlq.entry_jobs.job_id IS 'The job.';
COMMENT ON COLUMN dlq.entry_jobs.job_created_at IS 'When River made it.';
COMMENT ON COLUMN dlq.entry_jobs.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.entry_jobs.run_id IS 'The replay run that made it; null for none.';
COMMENT ON COLUMN dlq.entry_jobs.destination IS 'Where it goes instead of its queue''s destination; null for where it belongs.';

CREATE TABLE dlq.retired_jobs (
    job_id         bigint NOT NULL,
    job_created_at timestamptz NOT NULL,
    at             timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, job_created_at)
);
COMMENT ON TABLE dlq.retired_jobs IS 'Jobs whose entries were purged or retired while River still had the job: they are never filed again. Rows go when River has deleted the job.';
COMMENT ON COLUMN dlq.retired_jobs.job_id IS 'The job.';
COMMENT ON COLUMN dlq.retired_jobs.job_created_at IS 'When River made it.';
COMMENT ON COLUMN dlq.retired_jobs.at IS 'When its entry went.';

-- What the reconciler goes by: looks for failures that have no entry, in River's order of ended jobs, a batch a transaction.
CREATE TABLE dlq.reconcile_looks (
    look         text PRIMARY KEY CHECK (look IN ('recent', 'whole', 'backfill')),
    since        timestamptz NOT NULL DEFAULT '-infinity',
    seen_at      timestamptz,
    seen_xid     bigint,
    began_at     timestamptz,
    from_at      timestamptz,
    began_xmin   bigint,
    began_xid    bigint,
    cursor_state text,
    cursor_at    timestamptz,
    cursor_id    bigint,
    skipped      boolean NOT NULL DEFAULT false,
    triggers     text,
    triggers_before text,
    done_at      timestamptz
);
COMMENT ON TABLE dlq.reconcile_looks IS 'How far the reconciler has looked among the jobs that River keeps: recent (every minute), whole (every hour) and backfill (asked for). See dlq.reconcile().';
COMMENT ON COLUMN dlq.reconcile_looks.look IS 'Which look.';
COMMENT ON COLUMN dlq.reconcile_looks.since IS 'recent: failures of before then are known, and no transaction of before then can still commit. whole: failures of before then are not dlqd''s: it was not there, and only a backfill takes them in.';
COMMENT ON COLUMN dlq.reconcile_looks.seen_at IS 'recent: when a look began that is complete; since moves there once the transactions that ran then have ended.';
COMMENT ON COLUMN dlq.reconcile_looks.seen_xid IS 'That look''s own transaction: those that ran then have lesser ids.';
COMMENT ON COLUMN dlq.reconcile_looks.began_at IS 'When the look under way began; null between two looks.';
COMMENT ON COLUMN dlq.reconcile_looks.from_at IS 'The finalized_at that it began with.';
COMMENT ON COLUMN dlq.reconcile_looks.began_xmin IS 'The oldest transaction that ran then, prepared ones included.';
COMMENT ON COLUMN dlq.reconcile_looks.began_xid IS 'Its own transaction then: those that ran have lesser ids.';
COMMENT ON COLUMN dlq.reconcile_looks.cursor_state IS 'How far the look under way has come: state,';
COMMENT ON COLUMN dlq.reconcile_looks.cursor_at IS 'finalized_at,';
COMMENT ON COLUMN dlq.reconcile_looks.cursor_id IS 'and id of the last job that it looked at.';
COMMENT ON COLUMN dlq.reconcile_looks.skipped IS 'The look under way met a job that somebody held: it does not count as complete.';
COMMENT ON COLUMN dlq.reconcile_looks.triggers IS 'dlq.trigger_state() when the last look began.';
COMMENT ON COLUMN dlq.reconcile_looks.triggers_before IS 'The same, of the look before.';
COMMENT ON COLUMN dlq.reconcile_looks.done_at IS 'When a look ended last.';

CREATE TABLE dlq.reconcile_findings (
    hour     timestamptz NOT NULL,
    why      text NOT NULL,
    entries  bigint NOT NULL,
    last_at  timestamptz NOT NULL,
    PRIMARY KEY (hour, why)
);
COMMENT ON TABLE dlq.reconcile_findings IS 'How many failures the reconciler filed that capture had missed, by hour and cause.';
COMMENT ON COLUMN dlq.reconcile_findings.hour IS 'When they were filed: the hour''s beginning.';
COMMENT ON COLUMN dlq.reconcile_findings.why IS 'capture_off, trigger_missing, trigger_disabled (then, or when the reconciler had looked before), or missed: capture gave way, or was bypassed (session_replication_role, COPY, a restore).';
COMMENT ON COLUMN dlq.reconcile_findings.entries IS 'How many.';
COMMENT ON COLUMN dlq.reconcile_findings.last_at IS 'When the last of them was filed.';

CREATE TABLE dlq.settings (
    key        text PRIMARY KEY,
    value      text NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE dlq.settings IS 'What dlqd remembers of this installation: code_version (hash of db/code as installed), triggers and river_triggers (of the triggers on its own tables and on River''s), river (own, or attached: it belongs to an application, whose clients lead its maintenance).';
COMMENT ON COLUMN dlq.settings.key IS 'What.';
COMMENT ON COLUMN dlq.settings.value IS 'Its value.';
COMMENT ON COLUMN dlq.settings.updated_at IS 'When it was set.';

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
) WITH (fillfactor = 50);
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
) WITH (fillfactor = 50);
-- (fillfactor: few rows that are updated often, in columns that no index has: their pages keep room for the next version.)
COMMENT ON TABLE dlq.paces IS 'How far the pace of redeliveries is reserved: see dlq.reserve_pace.';
COMMENT ON COLUMN dlq.paces.name IS 'destination:NAME, or queue:NAME for a queue of an application.';
COMMENT ON COLUMN dlq.paces.free_at IS 'When the next redelivery has a place.';

CREATE TABLE dlq.gates (
    name       text PRIMARY KEY,
    state      text NOT NULL CHECK (state IN ('probing', 'shut', 'open')),
    probes     uuid[] NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL,
    until      timestamptz
) WITH (fillfactor = 50);
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
    job_id       bigint NOT NULL,
    job_created_at timestamptz NOT NULL,
    PRIMARY KEY (queue, ordering_key, place),
    UNIQUE (job_id, job_created_at)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
COMMENT ON TABLE dlq.ordered_jobs IS 'Messages with an orderingKey, in queues that keep the order, whose work may not be done: a job waits for those before it.';
COMMENT ON COLUMN dlq.ordered_jobs.queue IS 'Queue of the job.';
COMMENT ON COLUMN dlq.ordered_jobs.ordering_key IS 'orderingKey of the message.';
COMMENT ON COLUMN dlq.ordered_jobs.place IS 'Its place in the order: that of its submission.';
COMMENT ON COLUMN dlq.ordered_jobs.job_id IS 'The job that the message came as.';
COMMENT ON COLUMN dlq.ordered_jobs.job_created_at IS 'When River made it.';
COMMENT ON COLUMN dlq.circuit_breaker_changes.id IS 'Identifies the change.';

CREATE TYPE dlq.replay_status AS ENUM ('running', 'paused', 'completed', 'cancelled', 'stopped');
COMMENT ON TYPE dlq.replay_status IS 'running, paused by a person, completed (nothing is left to replay), cancelled by a person, or stopped because too much of it failed.';

CREATE TABLE dlq.replay_runs (
    id            uuid PRIMARY KEY,
    status        dlq.replay_status NOT NULL DEFAULT 'running',
    filter        jsonb NOT NULL,
    newest_first  boolean NOT NULL DEFAULT false,
    batch_size    integer NOT NULL DEFAULT 100 CHECK (batch_size BETWEEN 1 AND 10000),
    rate          float8 CHECK (rate BETWEEN 0.001 AND 1000000),
    concurrency   integer CHECK (concurrency > 0),
    patch         jsonb,
    merge_patch   jsonb,
    queue         text,
    destination   text,
    force         boolean NOT NULL DEFAULT false,
    stop_at       float8 NOT NULL DEFAULT 50 CHECK (stop_at > 0),
    stop_of       integer NOT NULL DEFAULT 50 CHECK (stop_of > 0),
    note          text,
    actor         text NOT NULL,
    origin        text,
    reason        text,
    judged_from   timestamptz NOT NULL DEFAULT now(),
    cursor        uuid,
    total         bigint NOT NULL,
    replayed      bigint NOT NULL DEFAULT 0,
    skipped       bigint NOT NULL DEFAULT 0,
    stepped_at    timestamptz,
    sending       float8 NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    finished_at   timestamptz
) WITH (fillfactor = 50);
CREATE INDEX replay_runs_active ON dlq.replay_runs (id) WHERE status = 'running';
COMMENT ON TABLE dlq.replay_runs IS 'Bulk replays, and their reports. Start one with dlq.replay_start; steer it with dlq.replay_pause, dlq.replay_resume, dlq.replay_cancel and dlq.replay_set_rate.';
COMMENT ON COLUMN dlq.replay_runs.filter IS 'Which entries; see dlq.find.';
COMMENT ON COLUMN dlq.replay_runs.newest_first IS 'Order of capture, reversed.';
COMMENT ON COLUMN dlq.replay_runs.rate IS 'Entries a second; null for as fast as it goes.';
COMMENT ON COLUMN dlq.replay_runs.stepped_at IS 'When it last sent entries back; null before the first time since it was started or resumed.';
COMMENT ON COLUMN dlq.replay_runs.sending IS 'Seconds that it has been sending: without pauses, and without the time before its first entry and after its last one.';
COMMENT ON COLUMN dlq.replay_runs.concurrency IS 'Redeliveries of the run under way at once; null for no limit.';
COMMENT ON COLUMN dlq.replay_runs.patch IS 'JSON Patch (RFC 6902) of each payload.';
COMMENT ON COLUMN dlq.replay_runs.merge_patch IS 'JSON Merge Patch (RFC 7396) of each payload.';
COMMENT ON COLUMN dlq.replay_runs.queue IS 'Where redeliveries go instead of the entries'' own queues.';
COMMENT ON COLUMN dlq.replay_runs.destination IS 'Where messages are delivered instead of their queues'' destinations.';
COMMENT ON COLUMN dlq.replay_runs.force IS 'Replay although an equal job is live.';
COMMENT ON COLUMN dlq.replay_runs.stop_at IS 'Percent of the last stop_of outcomes that fail and so stop the run.';
COMMENT ON COLUMN dlq.replay_runs.stop_of IS 'How many outcomes stop_at looks at.';
COMMENT ON COLUMN dlq.replay_runs.note IS 'What the person said.';
COMMENT ON COLUMN dlq.replay_runs.actor IS 'Who started it.';
COMMENT ON COLUMN dlq.replay_runs.reason IS 'Why it is in its state.';
COMMENT ON COLUMN dlq.replay_runs.judged_from IS 'stop_at looks at outcomes since then: its start, or when it was resumed.';
COMMENT ON COLUMN dlq.replay_runs.cursor IS 'How far it has come.';
COMMENT ON COLUMN dlq.replay_runs.total IS 'Entries that the filter chose when it was started.';
COMMENT ON COLUMN dlq.replay_runs.replayed IS 'Entries that it has sent back so far.';
COMMENT ON COLUMN dlq.replay_runs.skipped IS 'Entries that had moved meanwhile, have a live equal job, or whose patch does not apply.';

CREATE TABLE dlq.replay_run_entries (
    run_id   uuid NOT NULL,
    entry_id uuid NOT NULL,
    job_id   bigint,
    behind   uuid,
    leads    boolean NOT NULL DEFAULT false,
    outcome  text,
    detail   text,
    ended_at timestamptz,
    PRIMARY KEY (run_id, entry_id)
);
CREATE INDEX replay_run_entries_outcome ON dlq.replay_run_entries (run_id, outcome) WHERE outcome IS NOT NULL;
CREATE INDEX replay_run_entries_next ON dlq.replay_run_entries (run_id, entry_id) WHERE outcome IS NULL AND job_id IS NULL AND behind IS NULL;
CREATE INDEX replay_run_entries_behind ON dlq.replay_run_entries (run_id, behind) WHERE behind IS NOT NULL;
CREATE INDEX replay_run_entries_under_way ON dlq.replay_run_entries (run_id) WHERE outcome IS NULL AND job_id IS NOT NULL;
CREATE INDEX replay_run_entries_last ON dlq.replay_run_entries (run_id, ended_at) WHERE outcome IN ('succeeded', 'failed');
CREATE INDEX replay_run_entries_detail ON dlq.replay_run_entries (entry_id) WHERE detail IS NOT NULL;
COMMENT ON TABLE dlq.replay_run_entries IS 'The entries of a replay run, chosen when it was started, and what became of each.';
COMMENT ON COLUMN dlq.replay_run_entries.job_id IS 'The redelivery; null where it was skipped, or its turn has not come.';
COMMENT ON COLUMN dlq.replay_run_entries.behind IS 'The entry of the run, with the same ordering key, that comes before it: it waits until that one''s redelivery has ended. Null where its turn may come.';
COMMENT ON COLUMN dlq.replay_run_entries.leads IS 'Another entry of the run is behind it.';
COMMENT ON COLUMN dlq.replay_run_entries.outcome IS 'succeeded, failed or skipped; null while under way, and before.';
COMMENT ON COLUMN dlq.replay_run_entries.detail IS 'The error, or why it was skipped.';
COMMENT ON COLUMN dlq.replay_run_entries.ended_at IS 'When the redelivery ended.';
COMMENT ON COLUMN dlq.replay_runs.batch_size IS 'Entries sent back in one step. A run without rate or concurrency commits steps together, up to 500 entries.';
COMMENT ON COLUMN dlq.replay_runs.origin IS 'From where it was started.';
COMMENT ON COLUMN dlq.replay_run_entries.run_id IS 'The run.';
COMMENT ON COLUMN dlq.replay_run_entries.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.replay_runs.id IS 'UUID version 7: sorts by the time of its start.';
COMMENT ON COLUMN dlq.replay_runs.status IS 'Where it stands.';
COMMENT ON COLUMN dlq.replay_runs.created_at IS 'When it was started.';
COMMENT ON COLUMN dlq.replay_runs.updated_at IS 'When it last went further, or was steered.';
COMMENT ON COLUMN dlq.replay_runs.finished_at IS 'When it ended; null while it has not.';

CREATE TYPE dlq.rollup_step AS ENUM ('minute', 'hour', 'day', 'week');
COMMENT ON TYPE dlq.rollup_step IS 'Length of a rollup''s buckets. Minutes are kept three days, hours 400 days, days and weeks for ever; of names that strangers choose, see dlq.trim_rollups().';

CREATE TABLE dlq.rollup_state (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    snapshot   txid_snapshot NOT NULL,
    at         timestamptz NOT NULL,
    since      timestamptz NOT NULL,
    rebuilt_at timestamptz NOT NULL,
    moves      bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
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
COMMENT ON COLUMN dlq.rollup_errors.error_type IS 'The type; '''' where the error has none; other for those beyond dlq.most_names().';

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
COMMENT ON COLUMN dlq.erasures.under_way IS 'Entries that were left, because a redelivery was under way or somebody held them, and replay runs that had not ended: erase again when they have.';
COMMENT ON COLUMN dlq.erasures.archived IS 'Entries of archives that were blanked.';
COMMENT ON COLUMN dlq.erasures.archives IS 'Archives that were looked through.';
COMMENT ON COLUMN dlq.erasures.archive IS 'Where they are; null if none were looked through.';
COMMENT ON COLUMN dlq.erasures.finished_at IS 'When all of it was done; null while not.';
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
) WITH (fillfactor = 50);
COMMENT ON TABLE dlq.processes IS 'The dlqd processes that serve on this database: each says every few seconds that it is there.';
COMMENT ON COLUMN dlq.processes.id IS 'Made by the process when it starts.';
COMMENT ON COLUMN dlq.processes.name IS 'Host and process id.';
COMMENT ON COLUMN dlq.processes.version IS 'Version of the program.';
COMMENT ON COLUMN dlq.processes.parts IS 'What it runs: api, process, dlq-workers.';
COMMENT ON COLUMN dlq.processes.queues IS 'River queues whose messages it delivers.';
COMMENT ON COLUMN dlq.processes.started_at IS 'When it started.';
COMMENT ON COLUMN dlq.processes.seen_at IS 'When it last said that it is there.';
COMMENT ON COLUMN dlq.processes.stopped_at IS 'When it stopped cleanly; null while it runs, and where it died.';

CREATE TABLE dlq.acts (
    id             bigint NOT NULL DEFAULT nextval('dlq.dead_letter_transitions_id_seq'),
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    subject        text NOT NULL,
    act            text NOT NULL,
    actor          text NOT NULL,
    db_user        text NOT NULL DEFAULT session_user,
    origin         text,
    note           text,
    detail         jsonb,
    config_version text,
    PRIMARY KEY (at, id)
);
CREATE INDEX acts_capture ON dlq.acts (at) WHERE subject = 'capture';
COMMENT ON TABLE dlq.acts IS 'The audit trail of what is no move of an entry: what people do to replay runs, circuit breakers, queues and switches, and partitions that went. Append-only. dlq.audit() shows both trails. Of capture, what holds is what dlq.capture_mode() says.';
COMMENT ON COLUMN dlq.acts.id IS 'Identifies the row, among those of dead_letter_transitions too.';
COMMENT ON COLUMN dlq.acts.at IS 'When.';
COMMENT ON COLUMN dlq.acts.subject IS 'To what: replay run ID, circuit breaker NAME, queue NAME, partition NAME, automatic redelivery: SCOPE NAME, capture.';
COMMENT ON COLUMN dlq.acts.act IS 'What was done.';
COMMENT ON COLUMN dlq.acts.actor IS 'Who did it.';
COMMENT ON COLUMN dlq.acts.db_user IS 'The database user of the session.';
COMMENT ON COLUMN dlq.acts.origin IS 'From where; null for what dlqd does by itself.';
COMMENT ON COLUMN dlq.acts.note IS 'What they said.';
COMMENT ON COLUMN dlq.acts.detail IS 'More about it, such as the new rate of a run.';
COMMENT ON COLUMN dlq.acts.config_version IS 'Version of the policy that was in force.';

CREATE TABLE dlq.archived_partitions (
    partition_name text PRIMARY KEY,
    rows           bigint NOT NULL,
    hash           numeric NOT NULL,
    archive        text NOT NULL,
    at             timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE dlq.archived_partitions IS 'Months that are in the archive and still here: what dlq.drop_partition compares them to.';
COMMENT ON COLUMN dlq.archived_partitions.partition_name IS 'The partition.';
COMMENT ON COLUMN dlq.archived_partitions.rows IS 'How many rows it had.';
COMMENT ON COLUMN dlq.archived_partitions.hash IS 'Sum of hashtextextended(row::text, 0).';
COMMENT ON COLUMN dlq.archived_partitions.archive IS 'Where the archive is.';
COMMENT ON COLUMN dlq.archived_partitions.at IS 'When it was archived.';

CREATE TABLE dlq.duties (
    name   text PRIMARY KEY,
    holder uuid NOT NULL,
    until  timestamptz NOT NULL
);
COMMENT ON TABLE dlq.duties IS 'What one process at a time does, in many transactions, and which one does it now: retention and erasures, which write the archive.';
COMMENT ON COLUMN dlq.duties.name IS 'Which duty.';
COMMENT ON COLUMN dlq.duties.holder IS 'Who does it: an id of that time alone.';
COMMENT ON COLUMN dlq.duties.until IS 'When another may take it, unless its holder says before that it goes on.';

COMMENT ON TABLE dlq.dead_letter_inbox IS 'Entries that nobody has filed yet: all that an application''s transaction writes.';
COMMENT ON TABLE dlq.dead_letter_resolved_default IS 'Rows of months that had no partition when they came; dlq.ensure_partitions() makes it, and moves them there.';
COMMENT ON TABLE dlq.dead_letter_failed_default IS 'Rows of months that had no partition when they came; dlq.ensure_partitions() makes it, and moves them there.';
COMMENT ON TABLE dlq.dead_letter_archived_default IS 'Rows of months that had no partition when they came; dlq.ensure_partitions() makes it, and moves them there.';
COMMENT ON TABLE dlq.dead_letter_transitions_default IS 'Rows of months that had no partition when they came; dlq.ensure_partitions() makes it, and moves them there.';

-- +goose Down
DROP TABLE dlq.acts;
DROP TABLE dlq.archived_partitions;
DROP TABLE dlq.duties;
DROP TABLE dlq.processes;
DROP TABLE dlq.automatic_changes;
DROP TABLE dlq.automatic_switches;
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
DROP TABLE dlq.replay_run_entries;
DROP TABLE dlq.replay_runs;
DROP TABLE dlq.ordered_jobs;
DROP TABLE dlq.gates;
DROP TABLE dlq.paces;
DROP TABLE dlq.circuit_breaker_changes;
DROP TABLE dlq.circuit_breakers;
DROP TABLE dlq.settings;
DROP TABLE dlq.reconcile_findings;
DROP TABLE dlq.reconcile_looks;
DROP TABLE dlq.retired_jobs;
DROP TABLE dlq.entry_jobs;
DROP TABLE dlq.job_facts;
DROP TABLE dlq.dead_letter_transitions;
DROP TABLE dlq.dead_letter_queue;
DROP TYPE dlq.rollup_step;
DROP TYPE dlq.replay_status;
DROP TYPE dlq.breaker_state;
DROP TYPE dlq.resolution_strategy;
DROP TYPE dlq.strategy;
DROP TYPE dlq.dead_letter_stage;
DROP TYPE dlq.dead_letter_status;
