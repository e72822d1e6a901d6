-- Columns of River's that dlqd's queries read, so that sqlc can check their types. River's own migrations make the table.
CREATE SCHEMA river;
CREATE TABLE river.river_job (
    id           bigint PRIMARY KEY,
    args         jsonb NOT NULL,
    attempt      smallint NOT NULL,
    created_at   timestamptz NOT NULL,
    finalized_at timestamptz,
    max_attempts smallint NOT NULL,
    metadata     jsonb NOT NULL,
    scheduled_at timestamptz NOT NULL,
    state        text NOT NULL,
    unique_key   bytea,
    unique_states bit(8),
    queue        text NOT NULL,
    kind         text NOT NULL,
    attempted_at timestamptz,
    errors       jsonb[]
);
CREATE SCHEMA dlq;
