-- +goose Up
-- Not logged: after a crash, it is not known whether the replay runs of that time harm other deliveries.
CREATE UNLOGGED TABLE dlq.destination_traffic (
    destination text NOT NULL,
    at          timestamptz NOT NULL,
    run_id      uuid NOT NULL,
    deliveries  integer[] NOT NULL,
    PRIMARY KEY (destination, at, run_id)
);
CREATE INDEX destination_traffic_at ON dlq.destination_traffic (at);
COMMENT ON TABLE dlq.destination_traffic IS
    'How long the deliveries of all processes took, by destination, in slots of ten seconds: a replay run is held if it '
    'harms other deliveries. Rows are deleted after six hours. Unlogged: empty after a crash.';
COMMENT ON COLUMN dlq.destination_traffic.destination IS 'Name of the destination in the policy.';
COMMENT ON COLUMN dlq.destination_traffic.at IS 'Beginning of the slot in which the deliveries ended.';
COMMENT ON COLUMN dlq.destination_traffic.run_id IS 'The replay run of the deliveries; zeros for those of none.';
COMMENT ON COLUMN dlq.destination_traffic.deliveries IS
    'Numbers of deliveries by duration: powers of the square root of 2, from 1 ms on; the last one counts failures.';

-- +goose Down
DROP TABLE dlq.destination_traffic;
