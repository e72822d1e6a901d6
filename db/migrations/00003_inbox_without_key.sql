-- +goose Up
-- An application's transaction waits for nobody: with a unique index it waited for whoever took the same failure out of the inbox in
-- a transaction that was still open. That a failure comes in twice is filing's to see. (The functions of the version before insert
-- ON CONFLICT (id), until they are replaced a moment later.)
-- +goose StatementBegin
DO $$
BEGIN
    IF to_regprocedure('dlq.capture()') IS NOT NULL THEN
        EXECUTE replace(pg_get_functiondef('dlq.capture()'::regprocedure), 'ON CONFLICT (id) DO NOTHING', '');
    END IF;
END
$$;
-- +goose StatementEnd
CREATE INDEX dead_letter_inbox_id ON dlq.dead_letter_inbox (id);
ALTER TABLE dlq.dead_letter_inbox DROP CONSTRAINT dead_letter_inbox_pkey, REPLICA IDENTITY FULL;

-- +goose Down
DELETE FROM dlq.dead_letter_inbox i USING dlq.dead_letter_inbox o WHERE o.id = i.id AND o.ctid < i.ctid;
DROP INDEX dlq.dead_letter_inbox_id;
ALTER TABLE dlq.dead_letter_inbox ADD PRIMARY KEY (id), REPLICA IDENTITY DEFAULT;
