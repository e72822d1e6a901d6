-- The triggers on River's table. dlqd runs this file in a transaction of its own, and only if
-- triggers are missing or have changed: the statements lock river_job against writers for a moment.

-- A job that succeeds runs no trigger function, unless it is a redelivery of an entry: Postgres
-- evaluates WHEN on the row in memory. The conditions are short because Postgres parses them again
-- for every statement. A constraint of River sets finalized_at for jobs that ended and for no others.
-- The triggers have no COMMENT: only the owner of the table could set it.
CREATE OR REPLACE TRIGGER dlq_capture AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (NEW.finalized_at IS NOT NULL AND OLD.state <> NEW.state
        AND (NEW.state <> 'completed' OR NEW.metadata ? 'dlq:entry_id'))
    EXECUTE FUNCTION dlq.capture();
CREATE OR REPLACE TRIGGER dlq_follow AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (OLD.finalized_at IS NOT NULL AND NEW.finalized_at IS NULL)
    EXECUTE FUNCTION dlq.follow();
