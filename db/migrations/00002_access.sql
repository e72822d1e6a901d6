-- +goose Up
-- Who may use the API.
CREATE TABLE dlq.tokens (
    id         uuid PRIMARY KEY,
    name       text        NOT NULL CHECK (name <> '' AND length(name) <= 255),
    hash       bytea       NOT NULL UNIQUE CHECK (length(hash) = 32),
    role       text        NOT NULL CHECK (role IN ('reader', 'operator', 'admin', 'sender', 'metrics')),
    queues     text[]      NOT NULL DEFAULT '{}',
    kinds      text[]      NOT NULL DEFAULT '{}',
    sources    text[]      NOT NULL DEFAULT '{}',
    note       text,
    created_by text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    used_at    timestamptz,
    revoked_at timestamptz,
    revoked_by text
);
COMMENT ON TABLE dlq.tokens IS 'Keys to the API. What a token is made of is shown once, when it is made: here is its hash.';
COMMENT ON COLUMN dlq.tokens.id IS 'UUIDv7 of the moment it was made.';
COMMENT ON COLUMN dlq.tokens.name IS 'Who holds it: the actor of what is done with it.';
COMMENT ON COLUMN dlq.tokens.hash IS 'SHA-256 of the token.';
COMMENT ON COLUMN dlq.tokens.role IS 'What it may do: as the database''s roles, or sender (submits messages), or metrics (reads metrics and health).';
COMMENT ON COLUMN dlq.tokens.queues IS 'Patterns of the queues in which it may; none: every queue.';
COMMENT ON COLUMN dlq.tokens.kinds IS 'Patterns of the kinds of messages and jobs for which it may; none: every kind.';
COMMENT ON COLUMN dlq.tokens.sources IS 'Patterns of the sources as which a sender may submit; none: every source.';
COMMENT ON COLUMN dlq.tokens.note IS 'What it is for.';
COMMENT ON COLUMN dlq.tokens.created_by IS 'Who made it.';
COMMENT ON COLUMN dlq.tokens.created_at IS 'When it was made.';
COMMENT ON COLUMN dlq.tokens.expires_at IS 'When it ends by itself; null for never.';
COMMENT ON COLUMN dlq.tokens.used_at IS 'When it was last used, within a minute or so.';
COMMENT ON COLUMN dlq.tokens.revoked_at IS 'From when on it is refused: a rotated one may have a while left.';
COMMENT ON COLUMN dlq.tokens.revoked_by IS 'Who revoked it.';

-- To which queues and kinds people are limited who work by SQL.
CREATE TABLE dlq.role_scopes (
    role   name   NOT NULL,
    queues text[] NOT NULL DEFAULT '{}',
    kinds  text[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (role, queues, kinds)
);
COMMENT ON TABLE dlq.role_scopes IS 'To which queues and kinds the members of a database role are limited: to what any row of any of their roles lets through. Who is in none of these roles is not limited. Change it with dlq.set_role_scope.';
COMMENT ON COLUMN dlq.role_scopes.role IS 'The database role.';
COMMENT ON COLUMN dlq.role_scopes.queues IS 'Patterns of queues, in which * stands for any text; none: every queue.';
COMMENT ON COLUMN dlq.role_scopes.kinds IS 'Patterns of kinds, likewise; none: every kind.';

-- +goose Down
DROP TABLE dlq.role_scopes;
DROP TABLE dlq.tokens;
