-- +goose Up
-- Detects a database that was restored to an earlier moment, and lets dlqd stop automatic
-- redelivery then.
ALTER TABLE dlq.processes ADD COLUMN mark bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN dlq.processes.mark IS
    'Increases every few seconds. The process remembers the last committed value: if the row has less, or is '
    'gone, the database was restored to an earlier moment while the process ran (dlq.watch_server).';

ALTER TABLE dlq.automatic_switches DROP CONSTRAINT automatic_switches_check,
    ADD CONSTRAINT automatic_switches_check CHECK ((name = '') = (scope IN ('stop', 'all')) OR scope = 'stop' AND name = 'restored');
COMMENT ON COLUMN dlq.automatic_switches.name IS
    'Name of the queue or class, or pattern of the kind; '''' for all and stop. restored, with scope stop: the '
    'database was restored, and replay runs and messages are held, too, until dlq.resume_restored.';
COMMENT ON COLUMN dlq.acts.subject IS
    'What was changed: replay run ID, circuit breaker NAME, queue NAME, partition NAME, automatic redelivery: '
    'SCOPE NAME, capture, server.';

-- +goose Down
COMMENT ON COLUMN dlq.acts.subject IS 'To what: replay run ID, circuit breaker NAME, queue NAME, partition NAME, automatic redelivery: SCOPE NAME, capture.';
DELETE FROM dlq.settings WHERE key IN ('server', 'restored');
DELETE FROM dlq.automatic_switches WHERE scope = 'stop' AND name = 'restored';
ALTER TABLE dlq.automatic_switches DROP CONSTRAINT automatic_switches_check,
    ADD CONSTRAINT automatic_switches_check CHECK ((name = '') = (scope IN ('stop', 'all')));
COMMENT ON COLUMN dlq.automatic_switches.name IS 'Name of the queue or class, or pattern of the kind; '''' for all and stop.';
ALTER TABLE dlq.processes DROP COLUMN mark;
