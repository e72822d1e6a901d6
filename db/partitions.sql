-- Columns that the open partition has from its parent since it was made, for sqlc's type checker only: it does not know
-- that ALTER TABLE reaches partitions.
ALTER TABLE dlq.dead_letter_open ADD COLUMN reported_class text, ADD COLUMN waiting_for text, ADD COLUMN ordering_key text, ADD COLUMN parked_by text, ADD COLUMN captured_by text NOT NULL;
