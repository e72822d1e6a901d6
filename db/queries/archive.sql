-- name: TakeDuty :one
-- True, and from then on for a time no other process keeps retention or erases from archives. Also to keep it for longer.
SELECT dlq.take_duty('archive', @holder::uuid, @during::interval)::boolean AS taken;

-- name: EndDuty :exec
SELECT dlq.end_duty('archive', @holder::uuid);
