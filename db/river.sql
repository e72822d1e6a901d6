-- For sqlc only: the columns of River's tables that dlqd's queries read, so that it can check their
-- types. River's own migrations create the tables.
CREATE SCHEMA river;
CREATE TYPE river.river_job_state AS ENUM ('available', 'cancelled', 'completed', 'discarded', 'pending', 'retryable',
    'running', 'scheduled');
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
    priority     smallint NOT NULL,
    attempted_at timestamptz,
    attempted_by text[],
    errors       jsonb[]
);
CREATE TABLE river.river_queue (
    name       text PRIMARY KEY,
    paused_at  timestamptz,
    updated_at timestamptz NOT NULL
);
CREATE SCHEMA dlq;
