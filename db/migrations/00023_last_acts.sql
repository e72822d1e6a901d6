-- +goose Up
-- Not logged: a standby needs no copy, and after a crash or a promotion it is empty, as the standbys start again, too.
CREATE UNLOGGED TABLE dlq.last_acts (
    actor    text PRIMARY KEY,
    position pg_lsn NOT NULL,
    at       timestamptz NOT NULL
) WITH (fillfactor = 50);
ALTER TABLE dlq.last_acts ENABLE ROW LEVEL SECURITY;
COMMENT ON TABLE dlq.last_acts IS
    'The last change that each actor made through the API, if dlqd serve runs with --replica-url: the actor''s pages '
    'come from the primary until the replica has replayed it. Unlogged: empty after a crash.';
COMMENT ON COLUMN dlq.last_acts.actor IS 'Name of the actor; empty without authentication.';
COMMENT ON COLUMN dlq.last_acts.position IS 'Position in the WAL at which the change was complete.';
COMMENT ON COLUMN dlq.last_acts.at IS 'When the change was complete. Rows are deleted after a day.';

-- +goose Down
DROP TABLE dlq.last_acts;
