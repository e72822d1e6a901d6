-- +goose Up
ALTER TABLE dlq.replay_runs ADD COLUMN paces jsonb;
COMMENT ON COLUMN dlq.replay_runs.paces IS
    'How fast a progressive run sends to destinations that it has strained, by destination: rate (entries per second; '
    'absent for that of the run), of (the rate that it was first lowered from), and from (deliveries before do not count '
    'for the next decision).';
COMMENT ON COLUMN dlq.destination_traffic.deliveries IS
    'Numbers of deliveries by duration: powers of the square root of 2, from 1 ms on; the 48th counts failures. The '
    '49th, if it is there, counts again those whose answer asked for fewer requests (429, Retry-After).';

-- +goose Down
COMMENT ON COLUMN dlq.destination_traffic.deliveries IS
    'Numbers of deliveries by duration: powers of the square root of 2, from 1 ms on; the last one counts failures.';
ALTER TABLE dlq.replay_runs DROP COLUMN paces;
