-- name: Reconcile :one
-- Takes a look for failures that capture missed a batch further, if the last one is older than @every.
SELECT r.filed::integer AS filed, r.done::boolean AS done FROM dlq.reconcile(@max_jobs::integer, @whole::boolean, @every::interval) r;

-- name: SetCapture :one
SELECT c.mode::text AS mode, c.writing::integer AS writing, c.recorded::boolean AS recorded, c.message::text AS message
FROM dlq.set_capture(@mode::text, sqlc.narg('time_limit')::interval, @actor::text, nullif(@note::text, '')) c;

-- name: CaptureStatus :one
-- How capture is, as reconcile.Capture reads it: what could not be had is left out.
SELECT jsonb_strip_nulls(jsonb_build_object('mode', c.mode::text, 'limit', c.time_limit::text, 'changedAt', c.changed_at::timestamptz, 'changedBy', c.changed_by::text, 'note', c.note::text,
    'triggers', c.triggers::text, 'writing', c.writing::integer, 'unfiled', c.unfiled::bigint, 'unfiledSince', c.unfiled_since::timestamptz,
    'facts', c.facts::bigint, 'factsSince', c.facts_since::timestamptz, 'lookedAt', c.looked_at::timestamptz, 'lookedAtAll', c.looked_at_all::timestamptz,
    'missed', c.missed::bigint, 'missedBy', c.missed_by::jsonb, 'missedAt', c.missed_at::timestamptz))::jsonb AS status
FROM dlq.capture_status() c;

-- name: ReconcileFindings :many
-- How many failures capture has missed, by cause, since dlqd is here.
SELECT f.why, sum(f.entries)::bigint AS entries FROM dlq.reconcile_findings f GROUP BY f.why ORDER BY f.why;
