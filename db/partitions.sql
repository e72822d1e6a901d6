-- For sqlc only: columns that migrations added to dlq.dead_letter_queue. sqlc does not add them to
-- its partitions.
ALTER TABLE dlq.dead_letter_open ADD COLUMN error_title text, ADD COLUMN destination text,
    ADD COLUMN destination_url text, ADD COLUMN record dlq.record;
