-- +goose Up
-- Only the results of probes end a half-open period. probes_until has a time for each probe under
-- way, so that a probe that never reports does not keep its place.
ALTER TABLE dlq.circuit_breakers ADD COLUMN probes_until timestamptz[] NOT NULL DEFAULT '{}', ADD COLUMN trouble_since timestamptz, ADD COLUMN last_tried_at timestamptz;
COMMENT ON COLUMN dlq.circuit_breakers.since IS 'When the breaker entered its state.';
COMMENT ON COLUMN dlq.circuit_breakers.probes_until IS
    'When each probe that has not reported yet gives its place to another: its timeout and 10 seconds after it '
    'began.';
COMMENT ON COLUMN dlq.circuit_breakers.trouble_since IS
    'When the breaker opened after it was last closed; null while it is closed.';
COMMENT ON COLUMN dlq.circuit_breakers.last_tried_at IS
    'When the last probe began; null if none has begun since the breaker was last closed.';
UPDATE dlq.circuit_breakers b SET trouble_since = coalesce((
    SELECT min(c.at) FROM dlq.circuit_breaker_changes c
    WHERE c.name = b.name AND c.id > coalesce((SELECT max(d.id) FROM dlq.circuit_breaker_changes d WHERE d.name = b.name AND d.to_state = 'closed'), 0)), b.since)
WHERE b.state <> 'closed';

-- took is the median of takes, so that a single slow sample does not delay the next one.
ALTER TABLE dlq.metrics_sample ADD COLUMN takes interval[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN dlq.metrics_sample.took IS
    'Median duration of the last five samples. The next sample is not taken before twenty times as long has '
    'passed, at most 30 seconds.';
COMMENT ON COLUMN dlq.metrics_sample.takes IS
    'Durations of the last five samples, newest first, without the wait for a connection.';

-- +goose Down
COMMENT ON COLUMN dlq.metrics_sample.took IS 'How long that took: the next one is not taken before twenty times as long.';
ALTER TABLE dlq.metrics_sample DROP COLUMN takes;
COMMENT ON COLUMN dlq.circuit_breakers.since IS 'Since when.';
ALTER TABLE dlq.circuit_breakers DROP COLUMN probes_until, DROP COLUMN trouble_since, DROP COLUMN last_tried_at;
