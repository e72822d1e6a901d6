-- +goose Up
-- Trends of failure groups over one and six hours need minutes, which are kept for seven hours (dlq.trim_rollups).
ALTER TABLE dlq.rollup_groups DROP CONSTRAINT rollup_groups_step_check;
-- Exports may need a second person. The table has few rows.
ALTER TABLE dlq.approvals DROP CONSTRAINT approvals_operation_check,
    ADD CONSTRAINT approvals_operation_check CHECK (operation IN ('replay', 'bulk', 'erase', 'export'));

-- +goose Down
DELETE FROM dlq.approval_entries e USING dlq.approvals a WHERE a.id = e.approval_id AND a.operation = 'export';
DELETE FROM dlq.approvals WHERE operation = 'export';
ALTER TABLE dlq.approvals DROP CONSTRAINT approvals_operation_check,
    ADD CONSTRAINT approvals_operation_check CHECK (operation IN ('replay', 'bulk', 'erase'));
DELETE FROM dlq.rollup_groups WHERE step = 'minute';
ALTER TABLE dlq.rollup_groups ADD CONSTRAINT rollup_groups_step_check CHECK (step <> 'minute');
