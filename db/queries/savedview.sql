-- name: Views :many
SELECT v.owner::text AS owner, v.name::text AS name, v.query::text AS query, v.columns::text[] AS columns,
    v.sort::text AS sort, v.shared::boolean AS shared, v.created_at::timestamptz AS created_at,
    v.updated_at::timestamptz AS updated_at
FROM dlq.views(@actor::text) v;

-- name: Save :exec
SELECT dlq.save_view(@name::text, @query::text, @columns::text[], @sort::text, @shared::boolean, @actor::text);

-- name: Delete :exec
SELECT dlq.delete_view(@name::text, nullif(@owner::text, ''), @actor::text);
