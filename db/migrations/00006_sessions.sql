-- +goose Up
-- Who is signed in with a browser.
CREATE TABLE dlq.sessions (
    id             uuid PRIMARY KEY,
    hash           bytea       NOT NULL UNIQUE CHECK (length(hash) = 32),
    previous_hash  bytea       UNIQUE CHECK (length(previous_hash) = 32),
    previous_until timestamptz,
    rotated_at     timestamptz NOT NULL DEFAULT now(),
    name           text        NOT NULL CHECK (name <> '' AND length(name) <= 255),
    via            text        NOT NULL CHECK (via IN ('token', 'oidc')),
    token_id       uuid        REFERENCES dlq.tokens,
    issuer         text,
    subject        text,
    groups         text[]      NOT NULL DEFAULT '{}',
    address        text        NOT NULL,
    agent          text        NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    seen_at        timestamptz NOT NULL DEFAULT now(),
    CHECK ((via = 'token') = (token_id IS NOT NULL) AND (via = 'oidc') = (issuer IS NOT NULL) AND (issuer IS NULL) = (subject IS NULL))
);
CREATE INDEX sessions_name ON dlq.sessions (name);
COMMENT ON TABLE dlq.sessions IS 'Who is signed in with a browser. The browser has the id that counts, in a cookie: here is its hash. How long a session lasts, the policy says (access.yaml: sessions).';
COMMENT ON COLUMN dlq.sessions.id IS 'UUIDv7 of the moment of sign-in, by which the session is listed and ended. It signs nobody in.';
COMMENT ON COLUMN dlq.sessions.hash IS 'SHA-256 of what the cookie holds.';
COMMENT ON COLUMN dlq.sessions.previous_hash IS 'SHA-256 of what it held before.';
COMMENT ON COLUMN dlq.sessions.previous_until IS 'Until when that is still good: a minute from when the new one was first used; null until then.';
COMMENT ON COLUMN dlq.sessions.rotated_at IS 'When the cookie was changed last.';
COMMENT ON COLUMN dlq.sessions.name IS 'Who signed in: the actor of what they do.';
COMMENT ON COLUMN dlq.sessions.via IS 'How: by a token, or by the OpenID Connect provider.';
COMMENT ON COLUMN dlq.sessions.token_id IS 'The token, with which the session ends, and whose grant it has.';
COMMENT ON COLUMN dlq.sessions.issuer IS 'The provider.';
COMMENT ON COLUMN dlq.sessions.subject IS 'As whom the provider knows them.';
COMMENT ON COLUMN dlq.sessions.groups IS 'Their groups, as the provider said at sign-in.';
COMMENT ON COLUMN dlq.sessions.address IS 'From where they signed in.';
COMMENT ON COLUMN dlq.sessions.agent IS 'What their browser calls itself.';
COMMENT ON COLUMN dlq.sessions.created_at IS 'When they signed in.';
COMMENT ON COLUMN dlq.sessions.seen_at IS 'When they were last there, within a minute or so.';

-- +goose Down
DROP TABLE dlq.sessions;
