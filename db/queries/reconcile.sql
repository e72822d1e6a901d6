-- name: Reconcile :one
-- Reconcile advances a scan of the reconciler by one batch. It starts a new scan only if the last
-- one ended more than @every ago.
SELECT r.filed::integer AS filed, r.done::boolean AS done
FROM dlq.reconcile(@max_jobs::integer, @whole::boolean, @every::interval) r;

-- name: SetCapture :one
SELECT c.mode::text AS mode, c.writing::integer AS writing, c.recorded::boolean AS recorded, c.message::text AS message
FROM dlq.set_capture(@mode::text, sqlc.narg('time_limit')::interval, @actor::text, nullif(@note::text, '')) c;

-- name: CaptureStatus :one
-- CaptureStatus returns the status of capture in the form that reconcile.Capture reads. It omits values that were not
-- available.
SELECT jsonb_strip_nulls(jsonb_build_object('mode', c.mode::text, 'limit', c.time_limit::text, 'changedAt',
    c.changed_at::timestamptz, 'changedBy', c.changed_by::text, 'note', c.note::text,
    'triggers', c.triggers::text, 'writing', c.writing::integer, 'unfiled', c.unfiled::bigint, 'unfiledSince',
    c.unfiled_since::timestamptz,
    'facts', c.facts::bigint, 'factsSince', c.facts_since::timestamptz, 'lookedAt', c.looked_at::timestamptz,
    'lookedAtAll', c.looked_at_all::timestamptz,
    'missed', c.missed::bigint, 'missedBy', c.missed_by::jsonb, 'missedAt', c.missed_at::timestamptz))::jsonb AS status
FROM dlq.capture_status() c;

-- name: ReconcileFindings :many
-- ReconcileFindings counts the failures that capture has missed since dlqd was attached, by cause.
SELECT f.why, sum(f.entries)::bigint AS entries FROM dlq.reconcile_findings f GROUP BY f.why ORDER BY f.why;
