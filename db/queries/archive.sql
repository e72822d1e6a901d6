-- name: TakeDuty :one
-- TakeDuty reserves retention and erasure from archives for one process for a time, or extends the
-- reservation. It returns false if another process has it.
SELECT dlq.take_duty('archive', @holder::uuid, @during::interval)::boolean AS taken;

-- name: EndDuty :exec
SELECT dlq.end_duty('archive', @holder::uuid);
