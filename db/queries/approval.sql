-- name: RequestApproval :one
-- RequestApproval requests an operation. existing is true if an equal request already waited: the snapshot of the
-- statement contains such a request, but not a request that the statement itself creates.
SELECT r.id::uuid AS id, EXISTS (SELECT FROM dlq.approvals a WHERE a.id = r.id)::boolean AS existing
FROM dlq.request_approval(@operation::text, @request::jsonb, nullif(@note::text, ''), @actor::text,
    nullif(@on_behalf_of::text, ''), nullif(@token_by::text, '')) r (id);

-- name: Approve :exec
SELECT dlq.approve(@id::uuid, @expect::bigint, nullif(@note::text, ''), @actor::text, nullif(@on_behalf_of::text, ''),
    nullif(@token_by::text, ''));

-- name: RequireForCancel :exec
SELECT dlq.require_approval_of_cancel(@job::bigint);

-- name: Refuse :exec
SELECT dlq.refuse_approval(@id::uuid, nullif(@note::text, ''), @actor::text);

-- name: Version :one
-- Version returns a text that changes whenever a request is made, decided or ended. Each process with open pages runs
-- it.
SELECT coalesce(sum(hashtextextended(a.id::text || a.state, 0)), 0)::text AS version
FROM dlq.approvals a WHERE a.state IN ('requested', 'approved');

-- name: Withdraw :exec
SELECT dlq.withdraw_approval(@id::uuid, nullif(@note::text, ''), @actor::text);

-- name: Approvals :many
-- Approvals returns requests in the caller's scope, the latest first and at most @most: the request with an id, the
-- requests in a state, or all. Values that the policy masks are masked.
SELECT a.id, a.operation, dlq.masked_detail(a.request, dlq.mask(false))::jsonb AS request, a.entries, a.by_queue,
       coalesce(a.skips, '{}')::jsonb AS skips,
       a.state, a.actor, a.on_behalf_of, a.token_by,
       coalesce(dlq.masked_text(a.note, dlq.mask(false)), '')::text AS note,
       a.requested_at, a.expires_at, a.decided_by, a.decided_at, coalesce(dlq.masked_text(a.decision, dlq.mask(false)),
           '')::text AS decision, a.frozen, a.changed, a.outcome,
       coalesce(dlq.masked_text(a.problem, dlq.mask(false)), '')::text AS problem, a.ended_at
FROM dlq.approvals a
WHERE dlq.scope_within(a.scope, (SELECT dlq.scope())) AND (sqlc.narg(id)::uuid IS NULL OR a.id = sqlc.narg(id)::uuid)
    AND (@state::text = '' OR a.state = @state::text)
ORDER BY a.id DESC LIMIT @most::integer;

-- name: Matches :one
-- Matches counts the entries that approving a request would change now.
SELECT m.entries::bigint AS entries, m.arrived::bigint AS arrived, m.closed::jsonb AS closed
FROM dlq.approval_matches(@id::uuid) m;

-- name: RequestsFor :many
-- RequestsFor looks at the newest 50 requests that wait for a decision. It returns the requests that select one of the
-- entries, with these entries.
SELECT r.approval_id::uuid AS approval_id, r.entry_id::uuid AS entry_id FROM dlq.requests_for(@ids::uuid[]) r;

-- name: Take :many
-- Take reserves the next approved request for this process, which then carries it out. It returns no row if there is
-- none.
SELECT t.id::uuid AS id, t.operation::text AS operation, t.request::jsonb AS request, t.actor::text AS actor,
       coalesce(t.origin, '')::text AS origin, coalesce(t.note, '')::text AS note,
       coalesce(t.scope::text, '')::text AS scope, coalesce(t.decided_by, '')::text AS decided_by
FROM dlq.take_approval(@during::interval, @operations::text[]) t;

-- name: ExtendReservation :exec
-- ExtendReservation extends the time for which a request is reserved for this process.
UPDATE dlq.approvals SET taken_until = now() + sqlc.arg(during)::interval WHERE id = @id AND state = 'approved';

-- name: EndReservation :exec
-- EndReservation ends the reservation, so that another process, or this one later, can carry out the request.
UPDATE dlq.approvals SET taken_until = NULL WHERE id = @id AND state = 'approved';

-- name: End :exec
SELECT dlq.end_approval(@id::uuid, sqlc.narg(changed)::bigint, sqlc.narg(outcome)::uuid, nullif(@problem::text, ''));

-- name: Expire :exec
SELECT dlq.expire_approvals();

-- name: ForecastApproval :exec
SELECT dlq.forecast_approval(@id::uuid, @forecast::jsonb);
