-- +goose Up
-- A half-open period ends by its outcomes alone: what is under way is known by when each probe gives its place back.
ALTER TABLE dlq.circuit_breakers ADD COLUMN probes_until timestamptz[] NOT NULL DEFAULT '{}', ADD COLUMN trouble_since timestamptz, ADD COLUMN last_tried_at timestamptz;
COMMENT ON COLUMN dlq.circuit_breakers.since IS 'Since when it is in this state.';
COMMENT ON COLUMN dlq.circuit_breakers.probes_until IS 'When each probe that has not reported yet gives its place to another: its timeout and 10 seconds after it began.';
COMMENT ON COLUMN dlq.circuit_breakers.trouble_since IS 'When it was last closed; null while it is closed.';
COMMENT ON COLUMN dlq.circuit_breakers.last_tried_at IS 'When the last probe began since it was last closed.';
UPDATE dlq.circuit_breakers b SET trouble_since = coalesce((
    SELECT min(c.at) FROM dlq.circuit_breaker_changes c
    WHERE c.name = b.name AND c.id > coalesce((SELECT max(d.id) FROM dlq.circuit_breaker_changes d WHERE d.name = b.name AND d.to_state = 'closed'), 0)), b.since)
WHERE b.state <> 'closed';

-- How long the last samples took: one that hung does not put off the next.
ALTER TABLE dlq.metrics_sample ADD COLUMN takes interval[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN dlq.metrics_sample.took IS 'How long a sample takes, by the median of the last five: the next one is not taken before twenty times as long, or 30 seconds.';
COMMENT ON COLUMN dlq.metrics_sample.takes IS 'How long the last five took, the newest first; without waiting for a connection.';

-- +goose Down
COMMENT ON COLUMN dlq.metrics_sample.took IS 'How long that took: the next one is not taken before twenty times as long.';
ALTER TABLE dlq.metrics_sample DROP COLUMN takes;
COMMENT ON COLUMN dlq.circuit_breakers.since IS 'Since when.';
ALTER TABLE dlq.circuit_breakers DROP COLUMN probes_until, DROP COLUMN trouble_since, DROP COLUMN last_tried_at;
