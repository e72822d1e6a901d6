-- +goose Up
-- What a person does with a source: pauses, and positions that are moved.
CREATE TABLE dlq.sources (
    name         text PRIMARY KEY,
    cluster      text NOT NULL,
    queue        text NOT NULL,
    published_at timestamptz NOT NULL DEFAULT now(),
    removed_at   timestamptz,
    seen_at      timestamptz,
    paused_at    timestamptz,
    paused_by    text,
    changes      bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE dlq.sources IS 'The sources of the policy, whether a process reads them, and whether they are paused.';
COMMENT ON COLUMN dlq.sources.name IS 'Name of the source in the policy.';
COMMENT ON COLUMN dlq.sources.cluster IS 'Name of the cluster in the policy.';
COMMENT ON COLUMN dlq.sources.queue IS 'Queue of its entries.';
COMMENT ON COLUMN dlq.sources.published_at IS
    'When a process first loaded a policy with the source, or with another queue of it.';
COMMENT ON COLUMN dlq.sources.removed_at IS 'When the policy no longer had the source; null while it has.';
COMMENT ON COLUMN dlq.sources.seen_at IS 'When a process last said that it reads the source; null if none has.';
COMMENT ON COLUMN dlq.sources.paused_at IS 'When an operator paused it; null while it is read.';
COMMENT ON COLUMN dlq.sources.paused_by IS 'Who paused it.';
COMMENT ON COLUMN dlq.sources.changes IS
    'Number of pauses, resumptions and moved positions: readers begin again when it changes.';

ALTER TABLE dlq.source_positions ADD COLUMN records bigint NOT NULL DEFAULT 0,
    ADD COLUMN stored_until bigint NOT NULL DEFAULT 0;
UPDATE dlq.source_positions SET records = next_offset - first_offset - holes - lost;
COMMENT ON COLUMN dlq.source_positions.records IS 'Records that were stored.';
COMMENT ON COLUMN dlq.source_positions.stored_until IS
    'Where the position was before it was moved back: records below were read before.';

ALTER TABLE dlq.source_progress ADD COLUMN start_offset bigint, ADD COLUMN behind_since timestamptz;
COMMENT ON COLUMN dlq.source_progress.start_offset IS 'The oldest offset that the broker has; null if unknown.';
COMMENT ON COLUMN dlq.source_progress.behind_since IS
    'Since when there are records to read and the position has not moved; null if all are read.';

CREATE INDEX source_deliveries_at ON dlq.source_deliveries (at);

-- +goose Down
DROP INDEX dlq.source_deliveries_at;
ALTER TABLE dlq.source_progress DROP COLUMN behind_since, DROP COLUMN start_offset;
ALTER TABLE dlq.source_positions DROP COLUMN stored_until, DROP COLUMN records;
DROP TABLE dlq.sources;
