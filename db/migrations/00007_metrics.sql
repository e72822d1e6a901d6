-- +goose Up
-- Running totals of what the audit trail says, and the sample that every process serves at /metrics.
CREATE TABLE dlq.counters (
    name  text   NOT NULL,
    queue text   NOT NULL,
    label text   NOT NULL,
    value float8 NOT NULL,
    PRIMARY KEY (name, queue, label)
) WITH (fillfactor = 50);
COMMENT ON TABLE dlq.counters IS 'What happened to dead letters since dlqd is here: totals that never go down, also past retention and trimming. dlq.count_moves() adds to them with each refresh of the rollups; /metrics shows them.';
COMMENT ON COLUMN dlq.counters.name IS 'captured, failures, redelivered, succeeded, failed_again, resolved, failed, archived and parked (label: the class of the error), swept, error_type (label: the type), breaker (queue: the circuit breaker; label: the state that it went to), or a time: in_dlq, to_recovery, to_retry and to_filing (label: seconds, which is their sum, or n for those of up to 2 ^ (n / 8) seconds and more than 2 ^ ((n - 1) / 8)).';
COMMENT ON COLUMN dlq.counters.queue IS 'The queue; other for those beyond dlq.most_counted_queues().';
COMMENT ON COLUMN dlq.counters.label IS 'What else it is by, as the name says; other for error types beyond dlq.most_counted_types() of a queue.';
COMMENT ON COLUMN dlq.counters.value IS 'How many; of a sum of times, seconds.';

-- Not logged: written every few seconds, it would go to every replica and backup. After a crash or a failover it is empty until the next
-- sample. (Yugabyte, from 2024.2, makes a plain one of it.)
CREATE UNLOGGED TABLE dlq.metrics_sample (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    at       timestamptz NOT NULL,
    took     interval NOT NULL,
    counters json NOT NULL,
    sample   json NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE dlq.metrics_sample IS 'What the metrics say of the database: one row, which one process at a time writes every few seconds, and each process reads at each scrape. Unlogged: empty after a crash, until the next sample.';
COMMENT ON COLUMN dlq.metrics_sample.one IS 'There is one row.';
COMMENT ON COLUMN dlq.metrics_sample.at IS 'When it was taken.';
COMMENT ON COLUMN dlq.metrics_sample.took IS 'How long that took: the next one is not taken before twenty times as long.';
COMMENT ON COLUMN dlq.metrics_sample.counters IS 'dlq.counters, by name and queue: times as [seconds, n of the first, how many of n, n + 1, …], the others by label. Apart from what changes each time, so that it is not written each time.';
COMMENT ON COLUMN dlq.metrics_sample.sample IS 'The other numbers, by queue and class: see internal/metrics.';

ALTER TABLE dlq.replay_runs ADD COLUMN forecast jsonb;
COMMENT ON COLUMN dlq.replay_runs.forecast IS 'What a dry run foretold as it was started: entries, seconds, entries by queue, and what spoke against it. Null where SQL started it.';

CREATE INDEX acts_policy ON dlq.acts (at) WHERE subject = 'policy';

-- +goose Down
DROP INDEX dlq.acts_policy;
ALTER TABLE dlq.replay_runs DROP COLUMN forecast;
DROP TABLE dlq.metrics_sample;
DROP TABLE dlq.counters;
