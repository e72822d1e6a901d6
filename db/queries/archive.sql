-- name: WaitForRetention :exec
-- Until the transaction ends, no process keeps retention.
SELECT pg_advisory_xact_lock(hashtextextended('dlq.retention', 0));
