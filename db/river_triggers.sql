-- The triggers on River's table, in a transaction of their own, and only where they are missing or have changed: the statements
-- lock river_job against writers for the moment that they take.

-- Nothing here runs for a job that succeeds: its WHEN is three comparisons of the row that is in memory already. (The triggers
-- themselves have no comment: only the owner of the table could write it.)
CREATE OR REPLACE TRIGGER dlq_capture AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (NEW.state IN ('completed', 'discarded', 'cancelled') AND OLD.state IS DISTINCT FROM NEW.state
          AND (NEW.state <> 'completed' OR NEW.metadata ? 'dlq:entry_id'))
    EXECUTE FUNCTION dlq.capture();
CREATE OR REPLACE TRIGGER dlq_follow AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW
    WHEN (NEW.state NOT IN ('discarded', 'cancelled', 'completed')
          AND (OLD.state IN ('discarded', 'cancelled') OR OLD.state = 'completed' AND OLD.metadata ? 'dlq:done_by'))
    EXECUTE FUNCTION dlq.follow();
