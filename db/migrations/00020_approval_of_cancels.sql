-- +goose Up
-- A request may also ask to cancel a job.
ALTER TABLE dlq.approvals DROP CONSTRAINT approvals_operation_check,
    ADD CONSTRAINT approvals_operation_check CHECK (operation IN ('replay', 'bulk', 'erase', 'export', 'cancel'));

-- +goose Down
DELETE FROM dlq.approvals WHERE operation = 'cancel';
ALTER TABLE dlq.approvals DROP CONSTRAINT approvals_operation_check,
    ADD CONSTRAINT approvals_operation_check CHECK (operation IN ('replay', 'bulk', 'erase', 'export'));
