-- The triggers on River's table, in a transaction of their own, and only where they are missing or have changed: the statements
-- lock river_job against writers for the moment that they take.

-- Nothing here runs for a job that succeeds: its WHEN compares the row that is in memory already. They are short because Postgres
-- reads them anew in every statement; River has finalized_at in jobs that ended and in no other (its own constraint). (The triggers
-- themselves have no comment: only the owner of the table could write it.)
CREATE OR REPLACE TRIGGER dlq_capture AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (NEW.finalized_at IS NOT NULL AND OLD.state <> NEW.state AND (NEW.state <> 'completed' OR NEW.metadata ? 'dlq:entry_id'))
    EXECUTE FUNCTION dlq.capture();
CREATE OR REPLACE TRIGGER dlq_follow AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (OLD.finalized_at IS NOT NULL AND NEW.finalized_at IS NULL)
    EXECUTE FUNCTION dlq.follow();
