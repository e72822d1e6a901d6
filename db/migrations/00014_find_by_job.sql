-- +goose Up
-- Entries by their job and by their subscriber, in every state but the inbox, where capture would pay
-- for the indexes. An entry of an application's job has no subscriber, and costs that index nothing.
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
