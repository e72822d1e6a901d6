-- +goose Up
-- What people say of failure groups. (What they are is a rollup: failure_groups.)
CREATE TABLE dlq.group_marks (
    queue       text NOT NULL,
    fingerprint text NOT NULL,
    owner       text CHECK (length(owner) BETWEEN 1 AND 255),
    note        text CHECK (length(note) <= 10000),
    fixed_at    timestamptz,
    fixed_by    text,
    muted_at    timestamptz,
    muted_by    text,
    mute_until  timestamptz,
    mute_upto   bigint,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    updated_by  text NOT NULL,
    PRIMARY KEY (queue, fingerprint)
) WITH (fillfactor = 70);
COMMENT ON TABLE dlq.group_marks IS 'What people say of failure groups. Look at dlq.groups; change it with dlq.set_group and dlq.assign_group.';
COMMENT ON COLUMN dlq.group_marks.queue IS 'The queue.';
COMMENT ON COLUMN dlq.group_marks.fingerprint IS 'The failure group, in its queue.';
COMMENT ON COLUMN dlq.group_marks.owner IS 'Who looks after it: its open entries were assigned to them, and those that join it are.';
COMMENT ON COLUMN dlq.group_marks.note IS 'What the next person should know.';
COMMENT ON COLUMN dlq.group_marks.fixed_at IS 'When somebody marked it as fixed: what fails after that makes it regressed. Null while nobody has.';
COMMENT ON COLUMN dlq.group_marks.fixed_by IS 'Who did.';
COMMENT ON COLUMN dlq.group_marks.muted_at IS 'When somebody muted it, so that nobody is told of it; null while nobody has.';
COMMENT ON COLUMN dlq.group_marks.muted_by IS 'Who did.';
COMMENT ON COLUMN dlq.group_marks.mute_until IS 'When that ends by itself; null for no time.';
COMMENT ON COLUMN dlq.group_marks.mute_upto IS 'It ends by itself, too, when so many failures in all have been counted; null for no number.';
COMMENT ON COLUMN dlq.group_marks.updated_at IS 'When somebody last said something of it.';
COMMENT ON COLUMN dlq.group_marks.updated_by IS 'Who did.';

-- Lists that people come back to.
CREATE TABLE dlq.saved_views (
    owner      text NOT NULL CHECK (length(owner) BETWEEN 1 AND 255),
    name       text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    query      text NOT NULL CHECK (octet_length(query) <= 4096),
    columns    text[] NOT NULL DEFAULT '{}' CHECK (cardinality(columns) <= 40),
    sort       text NOT NULL DEFAULT '' CHECK (length(sort) <= 64),
    shared     boolean NOT NULL DEFAULT false,
    scope      jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (owner, name)
);
CREATE UNIQUE INDEX saved_views_shared ON dlq.saved_views (name) WHERE shared;
COMMENT ON TABLE dlq.saved_views IS 'Lists of dead letters that people come back to, their own or shared. Read it with dlq.views(); change it with dlq.save_view and dlq.delete_view.';
COMMENT ON COLUMN dlq.saved_views.owner IS 'Who made it.';
COMMENT ON COLUMN dlq.saved_views.name IS 'Its name, among theirs and among those that are shared.';
COMMENT ON COLUMN dlq.saved_views.query IS 'What it chooses, as one types it.';
COMMENT ON COLUMN dlq.saved_views.columns IS 'Which columns it shows, in this order; none for the usual ones.';
COMMENT ON COLUMN dlq.saved_views.sort IS 'In which order; empty for the usual one.';
COMMENT ON COLUMN dlq.saved_views.shared IS 'Others see it, too.';
COMMENT ON COLUMN dlq.saved_views.scope IS 'The queues and kinds to which its owner was limited: only who may see all of these sees it. Null for somebody who was not.';
COMMENT ON COLUMN dlq.saved_views.created_at IS 'When it was made.';
COMMENT ON COLUMN dlq.saved_views.updated_at IS 'When it was last changed.';

-- What one person did in one go: the audit rows of all that it touched say which operation they are of.
CREATE TABLE dlq.operations (
    id         uuid PRIMARY KEY,
    action     text NOT NULL,
    filter     jsonb,
    args       jsonb NOT NULL DEFAULT '{}',
    actor      text NOT NULL,
    db_user    text NOT NULL DEFAULT session_user,
    origin     text,
    note       text,
    scope      jsonb,
    undoes     uuid,
    started_at timestamptz NOT NULL DEFAULT now(),
    last_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    looked     bigint NOT NULL DEFAULT 0,
    changed    bigint NOT NULL DEFAULT 0,
    unchanged  jsonb NOT NULL DEFAULT '{}'
);
COMMENT ON TABLE dlq.operations IS 'What people did to dead letters, in one go each: discard, resolve, park, unpark, reopen, assign, tag, note, purge, undo. dead_letter_transitions.operation says of what each changed, operation_unchanged what each left. Undo with dlq.undo.';
COMMENT ON COLUMN dlq.operations.id IS 'UUIDv7 of the moment when it began.';
COMMENT ON COLUMN dlq.operations.action IS 'What was done.';
COMMENT ON COLUMN dlq.operations.filter IS 'The filter that chose entries; null where somebody named them.';
COMMENT ON COLUMN dlq.operations.args IS 'More about it: assignee, tags.';
COMMENT ON COLUMN dlq.operations.actor IS 'Who did it.';
COMMENT ON COLUMN dlq.operations.db_user IS 'The database user of the session.';
COMMENT ON COLUMN dlq.operations.origin IS 'From where.';
COMMENT ON COLUMN dlq.operations.note IS 'What they said.';
COMMENT ON COLUMN dlq.operations.scope IS 'The queues and kinds to which they are limited; null for somebody who is not.';
COMMENT ON COLUMN dlq.operations.undoes IS 'The operation that it undoes; null for the others.';
COMMENT ON COLUMN dlq.operations.started_at IS 'When it began.';
COMMENT ON COLUMN dlq.operations.last_at IS 'When its last batch was done.';
COMMENT ON COLUMN dlq.operations.looked IS 'How many entries it was for.';
COMMENT ON COLUMN dlq.operations.changed IS 'How many of them it changed.';
COMMENT ON COLUMN dlq.operations.unchanged IS 'Why it left the others, with how many for each reason.';

CREATE TABLE dlq.operation_unchanged (
    operation_id uuid NOT NULL REFERENCES dlq.operations ON DELETE CASCADE,
    entry_id     uuid NOT NULL,
    reason       text NOT NULL,
    PRIMARY KEY (operation_id, entry_id)
);
COMMENT ON TABLE dlq.operation_unchanged IS 'Entries that an operation was for and did not change, 10,000 of each at most.';
COMMENT ON COLUMN dlq.operation_unchanged.operation_id IS 'The operation.';
COMMENT ON COLUMN dlq.operation_unchanged.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.operation_unchanged.reason IS 'Why it was left.';

ALTER TABLE dlq.dead_letter_transitions ADD COLUMN operation uuid;
COMMENT ON COLUMN dlq.dead_letter_transitions.operation IS 'The operation of a person that it is of; null for what dlqd does by itself, and for replays, whose run or note says the same.';

-- +goose Down
ALTER TABLE dlq.dead_letter_transitions DROP COLUMN operation;
DROP TABLE dlq.operation_unchanged;
DROP TABLE dlq.operations;
DROP TABLE dlq.saved_views;
DROP TABLE dlq.group_marks;
