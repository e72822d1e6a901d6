-- +goose Up
-- Finds entries by job and by subscriber, in every state except the inbox, where capture would pay
-- for the indexes. Entries of an application's jobs have no subscriber, and add nothing to that
-- index.
-- +dlqd concurrently
CREATE INDEX dead_letter_open_by_subscriber ON dlq.dead_letter_open (subscriber_id, id) WHERE subscriber_id IS NOT NULL;
CREATE INDEX dead_letter_resolved_by_subscriber ON dlq.dead_letter_resolved (subscriber_id, id) WHERE subscriber_id IS NOT NULL;
CREATE INDEX dead_letter_failed_by_subscriber ON dlq.dead_letter_failed (subscriber_id, id) WHERE subscriber_id IS NOT NULL;
CREATE INDEX dead_letter_archived_by_subscriber ON dlq.dead_letter_archived (subscriber_id, id) WHERE subscriber_id IS NOT NULL;
CREATE INDEX dead_letter_resolved_river_job ON dlq.dead_letter_resolved (river_job_id);
CREATE INDEX dead_letter_archived_river_job ON dlq.dead_letter_archived (river_job_id);

-- +goose Down
DROP INDEX dlq.dead_letter_archived_river_job;
DROP INDEX dlq.dead_letter_resolved_river_job;
DROP INDEX dlq.dead_letter_archived_by_subscriber;
DROP INDEX dlq.dead_letter_failed_by_subscriber;
DROP INDEX dlq.dead_letter_resolved_by_subscriber;
DROP INDEX dlq.dead_letter_open_by_subscriber;
