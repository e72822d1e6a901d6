-- +goose Up
-- What waits for a second person.
CREATE TABLE dlq.approvals (
    id           uuid PRIMARY KEY,
    operation    text        NOT NULL CHECK (operation IN ('replay', 'bulk', 'erase')),
    request      jsonb       NOT NULL CHECK (jsonb_typeof(request) = 'object'),
    entries      bigint      NOT NULL,
    by_queue     jsonb       NOT NULL,
    state        text        NOT NULL DEFAULT 'requested' CHECK (state IN ('requested', 'approved', 'done', 'failed', 'refused', 'expired', 'withdrawn')),
    actor        text        NOT NULL,
    on_behalf_of text,
    token_by     text,
    origin       text,
    note         text,
    scope        jsonb,
    requested_at timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    decided_by   text,
    decided_at   timestamptz,
    decision     text,
    frozen       bigint,
    taken_until  timestamptz,
    changed      bigint,
    outcome      uuid,
    problem      text,
    ended_at     timestamptz
);
CREATE INDEX approvals_open ON dlq.approvals (id) WHERE state IN ('requested', 'approved');
COMMENT ON TABLE dlq.approvals IS 'What people ask for that needs a second person (access.yaml: approvals). Ask with dlq.request_approval; decide with dlq.approve, dlq.refuse and dlq.withdraw.';
COMMENT ON COLUMN dlq.approvals.id IS 'UUIDv7 of the moment it was asked.';
COMMENT ON COLUMN dlq.approvals.operation IS 'What is to be done: a replay run, one thing to many entries, or an erasure.';
COMMENT ON COLUMN dlq.approvals.request IS 'All of it: which entries (filter), and what else the operation takes.';
COMMENT ON COLUMN dlq.approvals.entries IS 'How many entries the filter chose when it was asked.';
COMMENT ON COLUMN dlq.approvals.by_queue IS 'How many of each queue.';
COMMENT ON COLUMN dlq.approvals.state IS 'requested; then approved, until dlqd has carried it out: done, or failed; or refused, withdrawn, or expired.';
COMMENT ON COLUMN dlq.approvals.actor IS 'Who asks, and acts once it is approved.';
COMMENT ON COLUMN dlq.approvals.on_behalf_of IS 'For whom they say that they ask.';
COMMENT ON COLUMN dlq.approvals.token_by IS 'Who made the token with which they ask.';
COMMENT ON COLUMN dlq.approvals.origin IS 'From where they ask.';
COMMENT ON COLUMN dlq.approvals.note IS 'Why.';
COMMENT ON COLUMN dlq.approvals.scope IS 'The queues and kinds to which they are limited, and so is what is done; null for somebody who is not.';
COMMENT ON COLUMN dlq.approvals.requested_at IS 'When it was asked.';
COMMENT ON COLUMN dlq.approvals.expires_at IS 'Until when it can be approved.';
COMMENT ON COLUMN dlq.approvals.decided_by IS 'Who approved, refused or withdrew it.';
COMMENT ON COLUMN dlq.approvals.decided_at IS 'When.';
COMMENT ON COLUMN dlq.approvals.decision IS 'What they said about it.';
COMMENT ON COLUMN dlq.approvals.frozen IS 'How many entries the filter chose when it was approved: these, and no others, are touched.';
COMMENT ON COLUMN dlq.approvals.taken_until IS 'Until when the process that carries it out is waited for.';
COMMENT ON COLUMN dlq.approvals.changed IS 'How many of them were touched; the others had moved on meanwhile.';
COMMENT ON COLUMN dlq.approvals.outcome IS 'The replay run, or the erasure, that came of it.';
COMMENT ON COLUMN dlq.approvals.problem IS 'Why it failed.';
COMMENT ON COLUMN dlq.approvals.ended_at IS 'When it was done, failed, was refused or withdrawn, or expired.';

CREATE TABLE dlq.approval_entries (
    approval_id uuid NOT NULL REFERENCES dlq.approvals ON DELETE CASCADE,
    entry_id    uuid NOT NULL,
    done_at     timestamptz,
    PRIMARY KEY (approval_id, entry_id)
);
COMMENT ON TABLE dlq.approval_entries IS 'The entries that an approval is for.';
COMMENT ON COLUMN dlq.approval_entries.approval_id IS 'The approval.';
COMMENT ON COLUMN dlq.approval_entries.entry_id IS 'The entry.';
COMMENT ON COLUMN dlq.approval_entries.done_at IS 'When what was approved was done to it, or could not be any more; null until then, and for replay runs and erasures.';

-- +goose Down
DROP TABLE dlq.approval_entries;
DROP TABLE dlq.approvals;
