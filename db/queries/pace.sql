-- name: ReservePace :one
-- ReservePace reserves places in a stream of redeliveries that all processes share.
SELECT p.first_at::timestamptz AS first_at, p.granted::integer AS granted
FROM dlq.reserve_pace(@name::text, @rate::float8, @count::integer, @now::timestamptz, sqlc.narg('within')::interval) p;
